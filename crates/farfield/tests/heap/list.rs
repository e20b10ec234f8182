//! `FarList`, `FarQueue` and `FarStack` are `LinkedList`, `VecDeque` and `Vec`, wherever their elements are. Dangers: an order that
//! changes when chunks are split or go, elements lost at chunk ends, dropped never or twice.

use crate::common::twin::{Twin, twins};
use crate::common::{MIB, Rng, heap, seed};
use farfield::{FarError, FarList, FarQueue, FarStack, Heap};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

type Page = [u64; 64];

fn element(number: u64) -> Page {
    core::array::from_fn(|at| number.wrapping_mul(at as u64 + 1))
}

struct List {
    far: FarList<Page>,
    near: VecDeque<u64>,
    target: usize,
}

impl Twin for List {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> List {
        let target = bytes as usize / size_of::<Page>();
        let mut twin = List { far: FarList::new(), near: VecDeque::new(), target };
        while twin.near.len() < target {
            let number = random.u64(..);
            let scope = heap.enter();
            if number.is_multiple_of(3) {
                twin.far.push_front(&scope, element(number)).unwrap();
                twin.near.push_front(number);
            } else {
                twin.far.push_back(&scope, element(number)).unwrap();
                twin.near.push_back(number);
            }
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let number = random.u64(..);
        let scope = heap.enter();
        match random.usize(..10) {
            0 => {
                self.far.push_front(&scope, element(number)).unwrap();
                self.near.push_front(number);
            }
            1 => {
                self.far.push_back(&scope, element(number)).unwrap();
                self.near.push_back(number);
            }
            2 => assert_eq!(self.far.pop_front(&scope).unwrap(), self.near.pop_front().map(element)),
            3 => assert_eq!(self.far.pop_back(&scope).unwrap(), self.near.pop_back().map(element)),
            4 => {
                assert_eq!(self.far.front(&scope).unwrap(), self.near.front().map(|n| element(*n)).as_ref());
                let back = self.far.back_mut(&scope).unwrap();
                assert_eq!(back.as_deref(), self.near.back().map(|n| element(*n)).as_ref());
                if let (Some(back), Some(twin)) = (back, self.near.back_mut()) {
                    (*back, *twin) = (element(number), number);
                }
            }
            5 => self.part(heap, random),
            _ => self.edit(heap, random),
        }
        assert_eq!(self.far.len(), self.near.len());
    }

    fn compare(&self, heap: &Heap) {
        let mut at = 0;
        let visit = |found: &Page| {
            assert_eq!(*found, element(self.near[at]));
            at += 1;
        };
        self.far.for_each(&mut heap.enter(), visit).unwrap();
        assert_eq!(at, self.near.len());
    }
}

impl List {
    /// Takes a tail off, or all or nothing, and puts it back, or before what was left.
    fn part(&mut self, heap: &Heap, random: &mut Rng) {
        let len = self.near.len();
        let at = match random.usize(..8) {
            0 => 0,
            1 => len,
            _ => random.usize(..len + 1),
        };
        let scope = heap.enter();
        let mut far = match self.far.split_off(&scope, at) {
            Ok(far) => far,
            // A second table is too much for the smallest heap; all is as it was.
            Err(FarError::TablesFull { .. }) => return,
            Err(other) => panic!("{other}"),
        };
        let mut near = self.near.split_off(at);
        assert_eq!((self.far.len(), far.len()), (at, len - at));
        assert_eq!(far.front(&scope).unwrap(), near.front().map(|n| element(*n)).as_ref());
        assert_eq!(self.far.back(&scope).unwrap(), self.near.back().map(|n| element(*n)).as_ref());
        if random.usize(..2) == 0 {
            std::mem::swap(&mut self.far, &mut far);
            std::mem::swap(&mut self.near, &mut near);
        }
        match self.far.append(&scope, &mut far) {
            Ok(()) => assert!(far.is_empty()),
            Err(FarError::TablesFull { .. }) => assert!(!far.is_empty()),
            Err(other) => panic!("{other}"),
        }
        // What has not been moved is still there, and goes.
        assert_eq!(far.len(), len - self.far.len());
        near.truncate(near.len() - far.len());
        self.near.append(&mut near);
    }

    /// A few changes around one place, by a cursor from the nearer end.
    fn edit(&mut self, heap: &Heap, random: &mut Rng) {
        let mut at = random.usize(..self.near.len() + 1);
        let mut cursor = if at < self.near.len() / 2 {
            let mut cursor = self.far.cursor_front_mut();
            (0..at).for_each(|_| cursor.move_next());
            cursor
        } else {
            let mut cursor = self.far.cursor_back_mut();
            (at + 1..self.near.len()).for_each(|_| cursor.move_prev());
            if at == self.near.len() {
                cursor.move_next();
            }
            cursor
        };
        let removals = if self.near.len() > self.target { 6 } else { 4 };
        for _ in 0..random.usize(..24) {
            let number = random.u64(..);
            let scope = heap.enter();
            let end = self.near.len();
            match random.usize(..10) {
                choice if choice < removals => {
                    assert_eq!(cursor.remove_current(&scope).unwrap(), self.near.remove(at).map(element));
                }
                4..7 => {
                    cursor.insert_before(&scope, element(number)).unwrap();
                    self.near.insert(at, number);
                    at += 1;
                }
                7 => {
                    cursor.insert_after(&scope, element(number)).unwrap();
                    if at == end {
                        self.near.push_front(number);
                        at += 1;
                    } else {
                        self.near.insert(at + 1, number);
                    }
                }
                8 => {
                    cursor.move_next();
                    at = if at == end { 0 } else { at + 1 };
                }
                _ => {
                    cursor.move_prev();
                    at = if at == 0 { end } else { at - 1 };
                }
            }
            let here = cursor.current(&scope).unwrap();
            assert_eq!(here.map(|element| *element), self.near.get(at).map(|n| element(*n)));
        }
    }
}

twins!(list, List, 3_000);

#[test]
fn some_are_kept() {
    let heap = heap(1);
    let mut random = Rng::with_seed(seed());
    for kept_of_ten in [10, 8, 5, 2, 0] {
        let (alive, mut far, mut near) = (Arc::default(), FarQueue::new(), VecDeque::new());
        for _ in 0..3_000 {
            let number = random.u64(..);
            far.push(&heap.enter(), Counted::new(&alive, number)).unwrap();
            near.push_back(number);
        }
        let salt = random.u64(..);
        for run in [1, 40] {
            let mut at = [0, 0];
            let mut keep = |side: usize| {
                at[side] += 1;
                Rng::with_seed(salt ^ (at[side] / run)).usize(..10) < kept_of_ten
            };
            far.retain(&mut heap.enter(), |_| keep(0)).unwrap();
            near.retain(|_| keep(1));
            assert_eq!((far.len() as i64, far.len()), (alive.load(Ordering::Relaxed), near.len()));
        }
        let scope = heap.enter();
        if let Some(last) = far.back_mut(&scope).unwrap() {
            assert_eq!(Some(&last.number), near.back());
        }
        for number in near {
            let scope = heap.enter();
            assert_eq!(far.front_mut(&scope).unwrap().map(|first| first.number), Some(number));
            assert_eq!(far.iter(&scope).next().map(|first| first.unwrap().number), Some(number));
            assert_eq!(far.pop(&scope).unwrap().map(|first| first.number), Some(number));
        }
        assert!(far.pop(&scope).unwrap().is_none());
        drop((scope, far));
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        heap.verify();
    }
}

#[test]
fn lists_of_different_heaps_stay_apart() {
    let (one, two) = (heap(1), heap(1));
    let (mut list, mut other) = (FarList::new(), FarList::new());
    (0..5_000).for_each(|number| list.push_back(&one.enter(), number).unwrap());
    other.push_back(&two.enter(), 7).unwrap();
    assert_eq!(list.append(&one.enter(), &mut other), Err(FarError::OtherHeap));
    assert_eq!(list.split_off(&two.enter(), 3).map(drop), Err(FarError::OtherHeap));
    assert_eq!((list.len(), other.len()), (5_000, 1));
    assert!(list.contains(&mut one.enter(), &4_999).unwrap() && !list.contains(&mut one.enter(), &5_000).unwrap());
    list.retain(&mut one.enter(), |number| *number % 2 == 0).unwrap();
    assert!(list.iter(&one.enter()).map(|number| *number.unwrap()).eq((0..5_000).step_by(2)));
}

/// A queue and a stack of values with destructors.
struct Lines {
    alive: Arc<AtomicI64>,
    queue: FarQueue<Counted>,
    stack: FarStack<Counted>,
    near_queue: VecDeque<u64>,
    near_stack: Vec<u64>,
}

struct Counted {
    alive: Arc<AtomicI64>,
    number: u64,
    fill: [u64; 120],
}

impl Counted {
    fn new(alive: &Arc<AtomicI64>, number: u64) -> Counted {
        alive.fetch_add(1, Ordering::Relaxed);
        Counted { alive: alive.clone(), number, fill: [number; 120] }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(self.fill, [self.number; 120]);
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Twin for Lines {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Lines {
        let (queue, stack) = (FarQueue::new(), FarStack::new());
        let mut twin =
            Lines { alive: Arc::default(), queue, stack, near_queue: VecDeque::new(), near_stack: Vec::new() };
        for _ in 0..bytes / size_of::<Counted>() as u64 / 2 {
            twin.push(heap, random.u64(..));
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        // Runs of one kind, so that chunks come and go.
        let count = random.usize(..30);
        let push = random.usize(..2) == 0;
        for _ in 0..count {
            if push {
                self.push(heap, random.u64(..));
            } else {
                let scope = heap.enter();
                assert_eq!(self.queue.front(&scope).unwrap().map(|e| e.number), self.near_queue.front().copied());
                assert_eq!(self.queue.pop(&scope).unwrap().map(|e| e.number), self.near_queue.pop_front());
                assert_eq!(self.stack.top(&scope).unwrap().map(|e| e.number), self.near_stack.last().copied());
                assert_eq!(self.stack.pop(&scope).unwrap().map(|e| e.number), self.near_stack.pop());
            }
        }
        self.compare(heap);
    }

    fn compare(&self, _: &Heap) {
        assert_eq!((self.queue.len(), self.stack.len()), (self.near_queue.len(), self.near_stack.len()));
        assert_eq!(self.alive.load(Ordering::Relaxed), (self.near_queue.len() + self.near_stack.len()) as i64);
    }
}

impl Lines {
    fn push(&mut self, heap: &Heap, number: u64) {
        let scope = heap.enter();
        self.queue.push(&scope, Counted::new(&self.alive, number)).unwrap();
        self.stack.push(&scope, Counted::new(&self.alive, number)).unwrap();
        self.near_queue.push_back(number);
        self.near_stack.push(number);
    }
}

twins!(lines, Lines, 500);

#[test]
fn order_is_kept_through_a_whole_queue_and_stack() {
    let heap = heap(1);
    let (mut queue, mut stack) = (FarQueue::new(), FarStack::new());
    let count = 8 * MIB / size_of::<Page>() as u64;
    for number in 0..count {
        let scope = heap.enter();
        queue.push(&scope, element(number)).unwrap();
        stack.push(&scope, element(number)).unwrap();
    }
    for number in 0..count {
        let scope = heap.enter();
        assert_eq!(queue.pop(&scope).unwrap(), Some(element(number)));
        assert_eq!(stack.pop(&scope).unwrap(), Some(element(count - 1 - number)));
    }
    let scope = heap.enter();
    assert_eq!((queue.pop(&scope).unwrap(), stack.pop(&scope).unwrap()), (None, None));
    drop(scope);
    let stats = heap.stats();
    assert!(stats.prefetches_used > 100, "what comes next is fetched ahead: {stats:?}");
    drop((queue, stack));
    heap.verify();
}

#[test]
fn a_list_is_walked_from_both_ends() {
    let heap = heap(8);
    let mut list = FarList::new();
    for number in 0..1_000u64 {
        list.push_back(&heap.enter(), number).unwrap();
    }
    let scope = heap.enter();
    let mut iter = list.iter(&scope);
    for number in 0..500 {
        assert_eq!(iter.next().unwrap().unwrap(), &number);
        assert_eq!(iter.next_back().unwrap().unwrap(), &(999 - number));
    }
    assert!(iter.next().is_none() && iter.next_back().is_none());
    drop(scope);
    list.for_each_mut(&mut heap.enter(), |number| *number *= 2).unwrap();
    let scope = heap.enter();
    let mut cursor = list.cursor_back();
    for number in (0..1_000).rev() {
        assert_eq!(cursor.current(&scope).unwrap(), Some(&(number * 2)));
        cursor.move_prev();
    }
    assert_eq!(cursor.current(&scope).unwrap(), None);
}

#[test]
fn odd_elements_and_other_heaps() {
    let (one, two) = (heap(1), heap(1));
    let mut nothing = FarList::new();
    (0..1_000).for_each(|_| nothing.push_front(&one.enter(), ()).unwrap());
    let mut iter_count = 0;
    nothing.for_each(&mut one.enter(), |()| iter_count += 1).unwrap();
    assert_eq!(iter_count, 1_000);
    // Larger than a page: a chunk each, in the middle too.
    let mut large: FarList<[u8; 5_000]> = FarList::new();
    for number in 0..50 {
        let scope = one.enter();
        let mut cursor = large.cursor_front_mut();
        cursor.move_next();
        cursor.insert_before(&scope, [number; 5_000]).unwrap();
    }
    let mut order = Vec::new();
    large.for_each(&mut one.enter(), |element| order.push(element[4_999])).unwrap();
    let mut expected = Vec::new();
    (0..50).for_each(|number| expected.insert(expected.len().min(1), number));
    assert_eq!(order, expected);
    let error = large.push_back(&two.enter(), [7; 5_000]).unwrap_err();
    assert_eq!((error.error, error.value[0], large.len()), (FarError::OtherHeap, 7, 50));
    assert_eq!(large.pop_front(&two.enter()), Err(FarError::OtherHeap));
    large.clear();
    assert!(large.is_empty());
    drop((nothing, large));
    one.verify();
    two.verify();
}

/// What is left after many removals lies together again.
#[test]
fn sparse_chunks_are_merged() {
    let heap = heap(16);
    let mut list = FarList::new();
    for number in 0..10_000 {
        list.push_back(&heap.enter(), element(number)).unwrap();
    }
    let mut cursor = list.cursor_front_mut();
    for number in 0..10_000 {
        if number % 16 == 0 {
            cursor.move_next();
        } else {
            assert_eq!(cursor.remove_current(&heap.enter()).unwrap(), Some(element(number)));
        }
    }
    let mut left = Vec::new();
    list.for_each(&mut heap.enter(), |element| left.push(element[0])).unwrap();
    assert!(left.into_iter().eq((0..10_000).step_by(16)));
    // So another one has room where they were.
    let pages = heap.stats().pages;
    let mut other = FarList::new();
    (0..7_000).for_each(|number| other.push_back(&heap.enter(), element(number)).unwrap());
    assert!(heap.stats().pages <= pages + 16, "{pages} pages, then {}", heap.stats().pages);
    drop((list, other));
    heap.verify();
}

#[test]
fn a_list_outlives_its_heap_and_lies_in_far_values() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let mut lists: FarList<FarList<Counted>> = FarList::new();
    let mut random = Rng::with_seed(seed());
    for _ in 0..40 {
        let mut list = FarList::new();
        for _ in 0..random.usize(..100) {
            list.push_back(&heap.enter(), Counted::new(&alive, random.u64(..))).unwrap();
        }
        lists.push_front(&heap.enter(), list).unwrap();
    }
    assert!(alive.load(Ordering::Relaxed) > 1_000);
    drop(heap);
    drop(lists);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}
