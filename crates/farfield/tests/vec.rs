//! `FarVec` is a `Vec`, wherever its elements are. Dangers: as for `FarBox`, and elements in the wrong place.

mod common;

use common::twin::{Twin, twins};
use common::{MIB, Random, assert_in_budget, heap};
use farfield::collections::FarVec;
use farfield::{FarError, Heap};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Elements of different sizes, made from a number.
trait Element: Send + Debug + PartialEq + Clone + 'static {
    fn new(number: u64) -> Self;
}

impl Element for u64 {
    fn new(number: u64) -> u64 {
        number
    }
}

/// Does not divide a page.
impl Element for [u32; 9] {
    fn new(number: u64) -> [u32; 9] {
        [number as u32; 9]
    }
}

/// Owns memory, so that a lost or doubled drop is noticed.
impl Element for (String, u8) {
    fn new(number: u64) -> (String, u8) {
        (number.to_string(), number as u8)
    }
}

/// Two pages.
impl Element for [u64; 700] {
    fn new(number: u64) -> [u64; 700] {
        [number; 700]
    }
}

/// Larger than a segment.
impl Element for [u64; 9000] {
    fn new(number: u64) -> [u64; 9000] {
        [number; 9000]
    }
}

struct Vecs<T: Element> {
    far: FarVec<T>,
    near: Vec<T>,
}

impl<T: Element> Twin for Vecs<T> {
    fn filled(heap: &Heap, bytes: u64, random: &mut Random) -> Self {
        let mut twin = Vecs { far: FarVec::new(), near: Vec::new() };
        let scope = heap.enter();
        while (twin.near.len() * size_of::<T>()) < bytes as usize {
            let element = T::new(random.next());
            twin.far.push(&scope, element.clone()).unwrap();
            twin.near.push(element);
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Random) {
        let (far, near) = (&mut self.far, &mut self.near);
        let mut scope = heap.enter();
        let index = random.below(near.len() + 1);
        let element = T::new(random.next());
        match random.below(8) {
            0 => {
                far.push(&scope, element.clone()).unwrap();
                near.push(element);
            }
            1 => assert_eq!(far.pop(&scope).unwrap(), near.pop()),
            2 if index < near.len() => {
                *far.at_mut(&scope, index).unwrap() = element.clone();
                near[index] = element;
            }
            3 => {
                if let Some(change) = far.get_mut(&scope, index).unwrap() {
                    *change = element.clone();
                    near[index] = element;
                }
            }
            4 => {
                let mut at = 0;
                for chunk in far.chunks(&scope).take(3) {
                    let chunk = chunk.unwrap();
                    assert_eq!(chunk, &near[at..at + chunk.len()]);
                    at += chunk.len();
                }
            }
            5 => {
                let mut scan = far.scan_mut(&mut scope);
                let mut at = 0;
                for _ in 0..random.below(20) {
                    let Some(chunk) = scan.next_chunk().unwrap() else { break };
                    let within = random.below(chunk.len());
                    chunk[within] = element.clone();
                    near[at + within] = element.clone();
                    at += chunk.len();
                }
            }
            _ => assert_eq!(far.get(&scope, index).unwrap(), near.get(index)),
        }
        assert_eq!(far.len(), near.len());
    }

    fn compare(&self, heap: &Heap) {
        let mut scope = heap.enter();
        let mut scan = self.far.scan(&mut scope);
        let mut at = 0;
        while let Some(chunk) = scan.next_chunk().unwrap() {
            assert!(chunk == &self.near[at..at + chunk.len()], "elements from {at} on");
            at += chunk.len();
        }
        assert_eq!(at, self.near.len());
    }
}

twins!(words, Vecs<u64>, 2_000);
twins!(odd_elements, Vecs<[u32; 9]>, 2_000);
twins!(strings, Vecs<(String, u8)>, 2_000);
twins!(two_pages, Vecs<[u64; 700]>, 2_000);

#[test]
fn elements_larger_than_a_segment() {
    let heap = heap(2);
    let mut vec = FarVec::new();
    for number in 0..100 {
        let scope = heap.enter();
        vec.push(&scope, <[u64; 9000]>::new(number)).unwrap();
    }
    let mut scope = heap.enter();
    let mut scan = vec.scan(&mut scope);
    let mut number = 0;
    while let Some(chunk) = scan.next_chunk().unwrap() {
        assert_eq!(chunk, [<[u64; 9000]>::new(number)]);
        number += 1;
    }
    assert_eq!(number, 100);
    drop(scope);
    assert_in_budget(heap.stats());
    drop(vec);
    heap.verify();
}

#[test]
fn elements_without_bytes() {
    let heap = heap(1);
    let mut vec = FarVec::new();
    let scope = heap.enter();
    for _ in 0..10_000 {
        vec.push(&scope, ()).unwrap();
    }
    assert_eq!(vec.get(&scope, 9_999), Ok(Some(&())));
    assert_eq!(vec.chunks(&scope).map(|chunk| chunk.unwrap().len()).sum::<usize>(), 10_000);
}

/// Counts how many exist.
struct Counted(Arc<AtomicI64>, u64);

impl Counted {
    fn new(alive: &Arc<AtomicI64>, number: u64) -> Counted {
        alive.fetch_add(1, Ordering::Relaxed);
        Counted(alive.clone(), number)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn counted(heap: &Heap, alive: &Arc<AtomicI64>, count: u64) -> FarVec<Counted> {
    let mut vec = FarVec::new();
    let scope = heap.enter();
    for number in 0..count {
        vec.push(&scope, Counted::new(alive, number)).unwrap();
    }
    vec
}

#[test]
fn elements_are_dropped_once_also_far_ones() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let mut vec = counted(&heap, &alive, 200_000);
    assert!(heap.stats().written_pages > 300, "{:?}", heap.stats());
    let scope = heap.enter();
    let last = vec.pop(&scope).unwrap().unwrap();
    assert_eq!((last.1, alive.load(Ordering::Relaxed)), (199_999, 200_000));
    drop(last);
    drop(scope);
    drop(vec);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    assert_eq!(heap.stats().lost_values, 0);
    heap.verify();
}

#[test]
fn elements_outlive_their_heap() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let vec = counted(&heap, &alive, 200_000);
    drop(heap);
    std::thread::spawn(move || drop(vec)).join().unwrap();
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

#[test]
fn destructors_wait_for_the_end_of_a_full_scope() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let words: FarVec<u64> = filled(&heap, MIB);
    let vec = counted(&heap, &alive, 200_000);
    let scope = heap.enter();
    assert_eq!(words.chunks(&scope).find_map(Result::err), Some(FarError::NearFull));
    drop(vec);
    assert!(alive.load(Ordering::Relaxed) > 0, "the test needs a full scope");
    drop(scope);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    assert_eq!(heap.stats().lost_values, 0);
    drop(words);
    heap.verify();
}

fn filled(heap: &Heap, bytes: u64) -> FarVec<u64> {
    let mut vec = FarVec::new();
    let scope = heap.enter();
    for number in 0..bytes / 8 {
        vec.push(&scope, number).unwrap();
    }
    vec
}

#[test]
fn vectors_of_vectors() {
    let heap = heap(1);
    let mut outer = FarVec::new();
    for number in 0..40 {
        let inner = filled(&heap, number * 4096);
        outer.push(&heap.enter(), inner).unwrap();
    }
    for number in 0..40 {
        let scope = heap.enter();
        let inner: &FarVec<u64> = outer.at(&scope, number).unwrap();
        assert_eq!(inner.len(), number * 512);
        assert_eq!(inner.get(&scope, 512 * number / 2).unwrap().is_some(), number > 0);
    }
    drop(outer);
    heap.verify();
}

#[test]
fn memory_comes_back() {
    let heap = heap(1);
    let mut pages_most = 0;
    for _ in 0..20 {
        let mut vec = filled(&heap, 4 * MIB);
        while vec.len() > 1000 {
            assert!(vec.pop(&heap.enter()).unwrap().is_some());
        }
        heap.verify();
        let kept = filled(&heap, 3 * MIB);
        assert_eq!(kept.len() as u64, 3 * MIB / 8);
        pages_most = pages_most.max(heap.stats().pages);
    }
    assert!(pages_most * 4096 < 12 * MIB, "{pages_most} pages");
    assert!(heap.stats().discarded_pages > 4 * 256, "{:?}", heap.stats());
}

#[test]
fn a_vector_belongs_to_one_heap() {
    let (one, two) = (heap(1), heap(1));
    let mut vec = filled(&one, 4096);
    let scope = two.enter();
    assert_eq!(vec.get(&scope, 1), Err(FarError::OtherHeap));
    for number in 0..100_000 {
        let error = vec.push(&scope, number).unwrap_err();
        assert_eq!((error.error, error.value), (FarError::OtherHeap, number));
    }
    assert_eq!(vec.len(), 512);
}

#[test]
#[should_panic(expected = "index out of bounds: the len is 3 but the index is 3")]
fn an_index_out_of_bounds_panics_as_in_std() {
    let heap = heap(1);
    let vec = filled(&heap, 24);
    let _ = vec.at(&heap.enter(), 3);
}
