//! `FarVec` is a `Vec`, wherever its elements are. Dangers: as for `FarBox`, and elements in the wrong place.

use crate::common::twin::{Twin, elements, twins};
use crate::common::{MIB, Rng, assert_in_budget, heap, is_deep, seed};
use farfield::collections::FarVec;
use farfield::{FarError, Heap, Plane, PrefetchMode, Scope};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Elements of different sizes, made from a number.
trait Element: Send + Debug + Ord + Clone + 'static {
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
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Self {
        let mut twin = Vecs { far: FarVec::new(), near: Vec::new() };
        let scope = heap.enter();
        while (twin.near.len() * size_of::<T>()) < bytes as usize {
            let element = T::new(random.u64(..));
            twin.far.push(&scope, element.clone()).unwrap();
            twin.near.push(element);
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let (far, near) = (&mut self.far, &mut self.near);
        let mut scope = heap.enter();
        let element = T::new(random.u64(..));
        // As many elements as fit into two pages, or three.
        let few = 8192 / size_of::<T>() + 3;
        // The steps below shrink it slowly.
        while near.len() < 4 * few {
            far.push(&scope, element.clone()).unwrap();
            near.push(element.clone());
        }
        let index = random.usize(..near.len() + 1);
        match random.usize(..44) {
            0..3 => {
                far.push(&scope, element.clone()).unwrap();
                near.push(element);
            }
            3..6 => assert_eq!(far.pop(&scope).unwrap(), near.pop()),
            6 if index < near.len() => {
                assert_eq!(
                    far.set(&scope, index, element.clone()).unwrap(),
                    std::mem::replace(&mut near[index], element)
                );
            }
            7 => {
                if let Some(change) = far.get_mut(&scope, index).unwrap() {
                    *change = element.clone();
                    near[index] = element;
                }
            }
            8 if index < near.len() => {
                let other = random.usize(..near.len());
                far.swap(&scope, index, other).unwrap();
                near.swap(index, other);
            }
            9 if index < near.len() => assert_eq!(far.swap_remove(&scope, index).unwrap(), near.swap_remove(index)),
            10 => {
                // Through many pages, or few: it would take long from anywhere.
                let index = near.len() - random.usize(..2 * few);
                far.insert(&scope, index, element.clone()).unwrap();
                near.insert(index, element);
            }
            11 => {
                let index = near.len() - 1 - random.usize(..2 * few);
                assert_eq!(far.remove(&scope, index).unwrap(), near.remove(index));
            }
            12 => {
                let more: Vec<T> = (0..random.usize(..few)).map(|_| T::new(random.u64(..))).collect();
                far.extend_from_slice(&scope, &more).unwrap();
                near.extend_from_slice(&more);
            }
            13 => {
                let more: Vec<T> = (0..random.usize(..few)).map(|_| T::new(random.u64(..))).collect();
                far.extend(&scope, more.clone()).unwrap();
                near.extend(more);
            }
            14 => {
                let len = near.len() - random.usize(..2 * few);
                far.truncate(&scope, len).unwrap();
                near.truncate(len);
            }
            15 => {
                let len = near.len() - 2 + random.usize(..5);
                far.resize(&scope, len, element.clone()).unwrap();
                near.resize(len, element);
            }
            16..20 => {
                let end = (index + random.usize(..few)).min(near.len());
                let mut at = index;
                for chunk in far.chunks_in(&scope, index..end) {
                    let chunk = chunk.unwrap();
                    assert_eq!(chunk, &near[at..at + chunk.len()]);
                    at += chunk.len();
                }
                assert_eq!(at, end);
            }
            20..23 => {
                for (far, near) in far.iter_mut(&scope).zip(near.iter_mut()).take(few) {
                    *far.unwrap() = element.clone();
                    *near = element.clone();
                }
            }
            23..27 => {
                let mut scan = far.scan_mut_in(&mut scope, index..);
                let mut at = index;
                for _ in 0..random.usize(..20) {
                    let Some(chunk) = scan.next_chunk().unwrap() else { break };
                    let within = random.usize(..chunk.len());
                    chunk[within] = element.clone();
                    near[at + within] = element.clone();
                    at += chunk.len();
                }
            }
            40 => {
                let at = near.len() - random.usize(..2 * few);
                let (mut tail, mut near_tail) = (far.split_off(&scope, at).unwrap(), near.split_off(at));
                assert_eq!((far.len(), tail.len()), (near.len(), near_tail.len()));
                // Back at once, or with others between.
                if random.usize(..2) == 0 {
                    let more: Vec<T> = (0..random.usize(..few)).map(|_| T::new(random.u64(..))).collect();
                    far.extend_from_slice(&scope, &more).unwrap();
                    near.extend(more);
                }
                far.append(&scope, &mut tail).unwrap();
                near.append(&mut near_tail);
                assert!(tail.is_empty());
            }
            41 => {
                assert_eq!(far.first(&scope).unwrap(), near.first());
                assert_eq!(far.last(&scope).unwrap(), near.last());
                *far.last_mut(&scope).unwrap().unwrap() = element.clone();
                *near.last_mut().unwrap() = element;
            }
            27..30 => {
                let equal = far.iter(&scope).take(few).map(Result::unwrap).eq(near.iter().take(few));
                assert!(equal, "the first elements");
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

/// Kept, sorted, found: vectors larger than near memory.
fn whole_vectors<T: Element>() {
    let heap = heap(1);
    let mut random = Rng::with_seed(seed());
    let count = elements(2 * MIB as usize / size_of::<T>());
    // Many that are equal, few, all, none; in no order, in order, backwards.
    for (round, kinds) in [count as u64 * 4, 1000, 20, 1].into_iter().enumerate() {
        let mut near: Vec<T> = (0..count).map(|_| T::new(random.u64(..) % kinds)).collect();
        match round {
            1 => near.sort(),
            2 => near.sort_by(|one, other| other.cmp(one)),
            _ => {}
        }
        let mut far = FarVec::new();
        near.iter().for_each(|element| far.push(&heap.enter(), element.clone()).unwrap());
        let mut twin = Vecs { far, near };
        if round == 2 {
            twin.far.dedup(&mut heap.enter()).unwrap();
            twin.near.dedup();
            twin.compare(&heap);
        }
        // In runs and alone.
        let (salt, run) = (random.u64(..), 1 << (4 * round));
        let mut at = [0, 0];
        let mut keep = |side: usize| {
            at[side] += 1;
            at[side] > count / 20 && !Rng::with_seed(salt ^ (at[side] / run) as u64).u64(..).is_multiple_of(3)
        };
        twin.far.retain(&mut heap.enter(), |_| keep(0)).unwrap();
        twin.near.retain(|_| keep(1));
        twin.compare(&heap);
        twin.far.sort_unstable(&mut heap.enter()).unwrap();
        twin.near.sort_unstable();
        twin.compare(&heap);
        for _ in 0..100 {
            let value = T::new(random.u64(..) % kinds);
            let far = twin.far.binary_search(&heap.enter(), &value).unwrap();
            let near = twin.near.binary_search(&value);
            assert_eq!((far.is_ok(), near.is_ok()), (near.is_ok(), far.is_ok()));
            match far {
                Ok(at) => assert_eq!(twin.near[at], value),
                Err(at) => assert_eq!(Err(at), near),
            }
        }
        if let Some(last) = twin.near.last() {
            assert!(twin.far.contains(&mut heap.enter(), last).unwrap());
        }
        twin.far.sort_unstable_by(&mut heap.enter(), |one, other| other.cmp(one)).unwrap();
        twin.far.dedup_by(&mut heap.enter(), |one, other| one == other).unwrap();
        twin.near.reverse();
        twin.near.dedup();
        twin.compare(&heap);
        twin.far
            .retain_mut(&mut heap.enter(), |element| {
                *element = T::new(7);
                true
            })
            .unwrap();
        twin.near.fill(T::new(7));
        twin.compare(&heap);
        assert!(!twin.far.contains(&mut heap.enter(), &T::new(8)).unwrap());
        drop(twin);
        assert_in_budget(&heap);
        heap.verify();
    }
}

#[test]
fn whole_vectors_of_words() {
    whole_vectors::<u64>();
}

#[test]
fn whole_vectors_of_odd_elements() {
    whole_vectors::<[u32; 9]>();
}

#[test]
fn whole_vectors_of_strings() {
    whole_vectors::<(String, u8)>();
}

#[test]
fn whole_vectors_of_large_elements() {
    whole_vectors::<[u64; 700]>();
}

/// An order that contradicts itself, and one that panics: nothing is lost or doubled.
#[test]
fn elements_survive_a_bad_order() {
    let heap = heap(1);
    let alive = Arc::new(AtomicI64::new(0));
    let mut random = Rng::with_seed(seed());
    for panics in [false, true] {
        let mut vec = counted(&heap, &alive, 100_000);
        let mut left = 200_000 + random.usize(..400_000);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            vec.sort_unstable_by(&mut heap.enter(), |_, _| {
                left -= usize::from(panics);
                assert!(left > 0, "the order panics");
                random.u64(..).cmp(&(u64::MAX / 2))
            })
        }));
        // As in std, a sort may panic when it notices what order it is.
        assert!(result.is_err() || !panics);
        let mut numbers = vec![0; 100_000];
        let mut scope = heap.enter();
        let mut scan = vec.scan(&mut scope);
        while let Some(chunk) = scan.next_chunk().unwrap() {
            chunk.iter().for_each(|element| numbers[element.1 as usize] += 1);
        }
        assert!(numbers.iter().all(|times| *times == 1));
        assert_eq!(alive.load(Ordering::Relaxed), 100_000);
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut left = 50_000;
            vec.retain(&mut scope, |element| {
                left -= u64::from(panics);
                assert!(left > 0, "the decision panics");
                element.1 % 3 == 0
            })
        }));
        drop(scope);
        assert_eq!(alive.load(Ordering::Relaxed), if panics { 100_000 } else { 33_334 });
        drop(vec);
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        heap.verify();
    }
}

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
    assert_in_budget(&heap);
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
    filled_in(&heap.enter(), bytes)
}

fn filled_in(scope: &Scope<'_>, bytes: u64) -> FarVec<u64> {
    let mut vec = FarVec::new();
    for number in 0..bytes / 8 {
        vec.push(scope, number).unwrap();
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
    for _ in 0..if is_deep() { 40 } else { 3 } {
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

#[test]
#[should_panic(expected = "range end index 4 out of range for length 3")]
fn a_range_out_of_bounds_panics_as_in_std() {
    let heap = heap(1);
    let vec = filled(&heap, 24);
    let _ = vec.chunks_in(&heap.enter(), 1..4);
}

#[test]
fn insert_and_remove_move_more_than_near_memory() {
    let heap = heap(1);
    let mut vec = filled(&heap, 3 * MIB);
    let mut twin: Vec<u64> = (0..3 * MIB / 8).collect();
    for index in [0, 1, 511, 512, 200_000] {
        let scope = heap.enter();
        vec.insert(&scope, index, 7).unwrap();
        twin.insert(index, 7);
        assert_eq!(vec.remove(&scope, index / 2).unwrap(), twin.remove(index / 2));
    }
    let mut scope = heap.enter();
    let mut scan = vec.scan(&mut scope);
    let mut rest = &twin[..];
    while let Some(chunk) = scan.next_chunk().unwrap() {
        let (these, others) = rest.split_at(chunk.len());
        assert_eq!(chunk, these);
        rest = others;
    }
    assert!(rest.is_empty());
    vec.clear();
    assert_eq!((vec.len(), vec.get(&scope, 0)), (0, Ok(None)));
    drop(scope);
    heap.verify();
}

#[test]
fn a_failed_call_in_a_full_scope_changes_nothing() {
    let heap = heap(1);
    let words = filled(&heap, 2 * MIB);
    let mut vec = filled(&heap, MIB);
    let scope = heap.enter();
    assert_eq!(words.chunks(&scope).find_map(Result::err), Some(FarError::NearFull));
    let error = vec.insert(&scope, 10, 99).unwrap_err();
    assert_eq!((error.error, error.value), (FarError::NearFull, 99));
    assert_eq!(vec.remove(&scope, 10), Err(FarError::NearFull));
    drop(scope);
    let scope = heap.enter();
    assert_eq!(vec.get(&scope, 10), Ok(Some(&10)));
    assert_eq!(vec.len() as u64, MIB / 8);
    drop(scope);
    let mut scope = heap.enter();
    let mut scan = vec.scan(&mut scope);
    let mut expected = 0;
    while let Some(chunk) = scan.next_chunk().unwrap() {
        for word in chunk {
            assert_eq!(*word, expected);
            expected += 1;
        }
    }
}

/// Most of what a scan needs comes before it is needed, and little else comes.
#[test]
fn scans_are_seen_and_prefetched() {
    let heap = heap(8);
    let vec = filled(&heap, 32 * MIB);
    let (before, mut sum) = (heap.stats(), 0);
    let mut scope = heap.enter();
    // Backwards, every third page.
    for index in (0..vec.len()).rev().step_by(3 * 512) {
        sum += vec.at(&scope, index).unwrap();
        scope.renew();
    }
    let strided = heap.stats();
    assert!(strided.misses - before.misses < 32 * 256 / 3 / 2, "{strided:?}");
    let mut scan = vec.scan(&mut scope);
    while let Some(chunk) = scan.next_chunk().unwrap() {
        sum += chunk[0];
    }
    assert!(sum > 0);
    let after = heap.stats();
    assert!(after.misses - strided.misses < 32 * 256 / 2, "{after:?}");
    assert!(after.prefetch_coverage() > 0.5 && after.prefetch_accuracy() > 0.9, "{after:?}");
}

/// What a vector fetches ahead can be chosen, and nothing else comes.
#[test]
fn prefetching_can_be_off_or_static() {
    let heap = heap(4);
    let mut vec = filled(&heap, 16 * MIB);
    let units = vec.len() / 512;
    // Reads these elements with everything far before. Returns the misses and prefetches.
    let read = |vec: &FarVec<u64>, indices: &mut dyn Iterator<Item = usize>| {
        heap.write_back(vec.far_ranges(..)).unwrap();
        let before = heap.stats();
        let mut scope = heap.enter();
        for index in indices {
            assert_eq!(vec.at(&scope, index), Ok(&(index as u64)));
            scope.renew();
        }
        let after = heap.stats();
        ((after.misses - before.misses) as usize, (after.prefetches - before.prefetches) as usize)
    };
    vec.set_prefetch(PrefetchMode::Off);
    assert_eq!(read(&vec, &mut (0..vec.len()).step_by(512)), (units, 0));
    assert_eq!(read(&vec, &mut (0..vec.len()).rev().step_by(1024)), (units / 2, 0));
    // Forwards, backwards, dense: once each, most ahead, and the same number of units in all.
    let length = vec.len();
    for (start, step, count, expected) in
        [(1000, 5 * 512, 700, 700), (length - 1, -2 * 512, 900, 900), (512 * 100, 1, 512 * 300, 300)]
    {
        vec.set_prefetch(PrefetchMode::Static { start, step, count });
        let pattern = (0..count).map(|number| start.wrapping_add_signed(number as isize * step));
        let (misses, prefetches) = read(&vec, &mut pattern.clone());
        assert!(prefetches > expected / 2 && prefetches < expected, "{start} {step}: {prefetches} and {misses}");
        let used = heap.stats().prefetches_used;
        assert!(misses + prefetches >= expected, "{start} {step}: {prefetches} and {misses}");
        // A walk somewhere else brings nothing ahead, however regular it is.
        let first = if start > length / 2 { 0 } else { length - 512 * 400 };
        let elsewhere = read(
            &vec,
            &mut (first..first + 512 * 50)
                .step_by(512)
                .filter(|index| pattern.clone().all(|named| named / 512 != index / 512)),
        );
        assert!(elsewhere.0 > 20 && elsewhere.1 == 0, "{start} {step}: {elsewhere:?}");
        assert_eq!(heap.stats().prefetches_used, used);
    }
    // Elements that do not exist, behind the end and before the beginning.
    vec.set_prefetch(PrefetchMode::Static { start: length - 512 * 3, step: 512, count: usize::MAX });
    let (misses, prefetches) = read(&vec, &mut (length - 512 * 3..length).step_by(512));
    assert!(misses >= 1 && prefetches == 2, "{misses} and {prefetches}");
    vec.set_prefetch(PrefetchMode::Static { start: 512 * 2, step: -512, count: usize::MAX });
    let (misses, prefetches) = read(&vec, &mut (0..=512 * 2).rev().step_by(512));
    assert!(misses >= 1 && prefetches == 2, "{misses} and {prefetches}");
    // The mode stays when the elements go, and can be taken back.
    vec.clear();
    assert!(matches!(vec.prefetch_mode(), PrefetchMode::Static { step: -512, .. }));
    vec.extend(&heap.enter(), 0..length as u64).unwrap();
    vec.set_prefetch(PrefetchMode::Auto);
    let (misses, prefetches) = read(&vec, &mut (0..length).step_by(512));
    assert!(prefetches > misses, "{misses} and {prefetches}");
    drop(vec);
    heap.verify();
}

#[test]
fn random_access_is_not_prefetched() {
    let heap = heap(2);
    let vec = filled(&heap, 16 * MIB);
    // Among so few pages strides come about by chance, in the mean for a tenth of the misses. This order has few.
    let mut random = Rng::with_seed(14);
    for _ in 0..3_000 {
        let index = random.usize(..vec.len());
        assert_eq!(vec.at(&heap.enter(), index), Ok(&(index as u64)));
    }
    let stats = heap.stats();
    assert!(stats.misses > 2_000 && stats.prefetches < stats.misses / 10, "{stats:?}");
}

/// AIFM's test of non-temporal arrays: what streams by does not displace what is in use.
#[test]
fn values_that_are_read_once_leave_first() {
    let heap = heap(8);
    let mut streams = [filled(&heap, 5 * MIB), filled(&heap, 5 * MIB)];
    let hot = filled(&heap, 5 * MIB);
    let read = |vec: &FarVec<u64>| {
        let mut scope = heap.enter();
        let mut scan = vec.scan(&mut scope);
        while let Some(chunk) = scan.next_chunk().unwrap() {
            assert!(chunk[0] < chunk[chunk.len() - 1]);
        }
    };
    let brought = || heap.stats().misses + heap.stats().prefetches;
    let mut again = 0;
    for round in 0..4 {
        for stream in &mut streams {
            let mut scope = heap.enter();
            if round % 2 == 0 {
                let mut scan = stream.scan(&mut scope).once();
                while let Some(chunk) = scan.next_chunk().unwrap() {
                    assert!(chunk[0] < chunk[chunk.len() - 1]);
                }
            } else {
                let mut scan = stream.scan_mut(&mut scope).once();
                while let Some(chunk) = scan.next_chunk().unwrap() {
                    chunk.iter_mut().for_each(|word| *word += 1);
                }
            }
        }
        let before = brought();
        read(&hot);
        println!("round {round}: {} pages of {} had left", brought() - before, 5 * 256);
        // In the first round there is more to displace than what streams by.
        again += if round > 0 { brought() - before } else { 0 };
    }
    assert!(again < 3 * 5 * 256 / 10, "{again} pages had left");
    for index in (0..streams[0].len()).step_by(1111) {
        let scope = heap.enter();
        assert_eq!(streams[0].get_once(&scope, index), Ok(Some(&(index as u64 + 2))));
    }
    heap.verify();
}

#[test]
fn hints_are_followed() {
    let heap = heap(8);
    let vec = filled(&heap, 16 * MIB);
    let mut scope = heap.enter();
    // Nothing comes ahead of need while there is no room, and what makes room may be late.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let pages = loop {
        match vec.will_need(&scope, 10 * 512..30 * 512) {
            0 => assert!(std::time::Instant::now() < deadline, "nothing is on its way"),
            pages => break pages,
        }
        scope.renew();
        std::thread::yield_now();
    };
    assert!((1..=20).contains(&pages), "{pages} pages on their way");
    for index in (10 * 512..30 * 512).step_by(512) {
        assert_eq!(vec.at(&scope, index), Ok(&(index as u64)));
    }
    let stats = heap.stats();
    // What found no room ahead, the walk itself fetches ahead.
    assert!(stats.prefetches_used as usize >= pages, "{pages}: {stats:?}");
    vec.cold(&scope, ..);
    scope.renew();
    let other = filled_in(&scope, MIB);
    assert_eq!(vec.at(&scope, 5), Ok(&5));
    drop(scope);
    drop(other);
    heap.verify();
}

/// Threads read one vector, and each changes one of its own, with a tenth near.
#[test]
fn threads_share_a_vector() {
    let heap = heap(2);
    let shared = filled(&heap, 8 * MIB);
    let seed = seed();
    std::thread::scope(|threads| {
        let work = |thread: u64| {
            let (heap, shared) = (&heap, &shared);
            move || {
                let mut random = Rng::with_seed(seed ^ thread << 32);
                let mut own = filled(heap, 3 * MIB);
                let mut twin: Vec<u64> = (0..3 * MIB / 8).collect();
                for _ in 0..30 {
                    let mut scope = heap.enter();
                    let from = random.usize(..shared.len());
                    let mut scan = shared.scan_in(&mut scope, from..);
                    let mut at = from as u64;
                    for _ in 0..30 {
                        let Some(chunk) = scan.next_chunk().unwrap() else { break };
                        assert_eq!((chunk[0], chunk[chunk.len() - 1]), (at, at + chunk.len() as u64 - 1));
                        at += chunk.len() as u64;
                    }
                    for _ in 0..30 {
                        let (index, value) = (random.usize(..twin.len()), random.u64(..));
                        assert_eq!(own.set(&scope, index, value), Ok(std::mem::replace(&mut twin[index], value)));
                        scope.renew();
                        let index = random.usize(..shared.len());
                        assert_eq!(shared.at(&scope, index), Ok(&(index as u64)));
                        scope.renew();
                    }
                }
            }
        };
        let handles: Vec<_> = (0..4).map(|thread| threads.spawn(work(thread))).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    assert_in_budget(&heap);
    heap.verify();
}

/// Units are pages on the object plane, too.
#[test]
fn vectors_work_on_the_object_plane() {
    let heap = Heap::builder().near(2 * MIB).near_max(2 * MIB).plane(Plane::Object).paranoid(true).build().unwrap();
    let mut random = Rng::with_seed(seed());
    let mut vecs = Vecs::<(String, u8)>::filled(&heap, 6 * MIB, &mut random);
    let boxes: Vec<_> = (0..20_000u64).map(|number| heap.alloc([number; 8]).unwrap()).collect();
    for step in 0..500 {
        vecs.step(&heap, &mut random);
        let index = step * 37 % boxes.len();
        assert_eq!(boxes[index].get(&heap.enter()), Ok(&[index as u64; 8]));
    }
    vecs.compare(&heap);
    heap.verify();
    drop(vecs);
    drop(boxes);
    heap.verify();
}

#[test]
fn a_pinned_vector_stays_near_without_a_scope() {
    let heap = heap(2);
    let mut vec = FarVec::new();
    let mut other = FarVec::new();
    assert!(FarVec::<u64>::new().pin().unwrap().is_empty());
    for index in 0..50_000u64 {
        vec.push(&heap.enter(), index * index).unwrap();
        other.push(&heap.enter(), [index; 16]).unwrap();
    }
    let pinned = vec.pin().unwrap();
    assert_eq!(heap.stats().pinned_bytes, 98 * 4096);
    // All near memory is used many times over.
    for index in (0..50_000).step_by(17) {
        assert_eq!(other.read(index, |value| value[3]), Ok(Some(index as u64)));
    }
    std::thread::scope(|threads| {
        let read = || (0..50_000).all(|index| pinned[index] == (index * index) as u64);
        let readers = [threads.spawn(read), threads.spawn(read)];
        assert!(readers.into_iter().all(|reader| reader.join().unwrap()));
    });
    assert_eq!((pinned.len(), pinned.get(49_999), pinned.get(50_000)), (50_000, Some(&2_499_900_001), None));
    assert!(pinned.iter().copied().eq((0..50_000).map(|index| index * index)));
    assert!(pinned.slices().all(|slice| slice.len() == 512 || slice.len() == 50_000 % 512));
    // Too much, and then nothing of it is pinned.
    assert_eq!(other.pin().unwrap_err(), FarError::PinsFull);
    assert_eq!(heap.stats().pinned_bytes, 98 * 4096);
    drop(pinned);
    assert_eq!(heap.stats().pinned_bytes, 0);
    *vec.get_mut(&heap.enter(), 7).unwrap().unwrap() = 1;
    assert_eq!(vec.pin().unwrap()[7], 1);
    drop((vec, other));
    heap.verify();
}
