//! Objects leave sparse pages, while mutators use them.
//!
//! Danger: a change that is made to an object while it is moved, and is lost; pages that one object each keeps; and a heap that is
//! called full although most of it is garbage.

use crate::common::{MIB, Over, far_heap, is_deep, seed};
use farfield_gc::{Atom, BrokenRule, FarObject, GcBuilder, GcError, GcHeap, Mutator, Ref, Root};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(FarObject, Default)]
struct Counter {
    count: Atom<u64>,
    /// Makes the object as large as a cache line.
    rest: [u64; 6],
}

impl Counter {
    fn value(&self) -> u64 {
        assert_eq!(self.rest, [0; 6]);
        self.count.get()
    }
}

/// Counters, in arrays that each fit into a page.
struct Counters(Vec<Root<[Ref<Counter>]>>);

const EACH: usize = 128;

impl Counters {
    fn new(m: &mut Mutator<'_>, len: usize) -> Counters {
        let mut array = || m.with_room(|m| Ok(m.root(m.alloc_array(EACH, |_| Ref::null())?))).unwrap();
        Counters((0..len.div_ceil(EACH)).map(|_| array()).collect())
    }

    /// Calls `action` with the place of a counter, which is set.
    fn with<R>(&self, m: &mut Mutator<'_>, at: usize, action: impl Fn(&Counter) -> R) -> R {
        let counter = |m: &Mutator<'_>| {
            let found = m.get(&self.0[at / EACH])?[at % EACH].load(m)?;
            Ok(action(&found.expect("each is set")))
        };
        let result = m.with_room(counter).unwrap();
        m.safepoint().unwrap();
        result
    }

    /// Puts a new counter into a place, which begins with this count.
    fn replace(&self, m: &mut Mutator<'_>, at: usize, count: u64) {
        let make = |m: &Mutator<'_>| {
            let counter = m.alloc(Counter { count: Atom::new(count), ..Counter::default() })?;
            m.get(&self.0[at / EACH])?[at % EACH].store(m, Some(counter));
            Ok(())
        };
        m.with_room(make).unwrap();
        m.safepoint().unwrap();
    }
}

const COUNTERS: usize = 16_000;

/// Counts in random places, beside another thread that does so elsewhere, and a collector that does not rest. Returns the number of
/// counts that are wrong at the end.
fn count_beside_collections(broken: Option<BrokenRule>, seed: u64, steps: usize) -> usize {
    let heap = far_heap(1);
    let mut builder = GcHeap::in_heap(&heap).limit(24 * MIB);
    if let Some(rule) = broken {
        builder = builder.broken(rule);
    }
    let gc = builder.build().unwrap();
    let wrong = std::thread::scope(|threads| {
        let work = |thread: u64| {
            let gc = &gc;
            threads.spawn(move || {
                let (mut m, mut random) = (gc.enter(), Rng::with_seed(seed * 10 + thread));
                let (all, mut expected) = (Counters::new(&mut m, COUNTERS), vec![0; COUNTERS]);
                (0..COUNTERS).for_each(|at| all.replace(&mut m, at, 0));
                for _ in 0..steps {
                    let at = random.usize(..COUNTERS);
                    if random.usize(..4) == 0 {
                        all.replace(&mut m, at, expected[at]);
                    }
                    all.with(&mut m, at, |counter| counter.count.fetch_add(1));
                    expected[at] += 1;
                }
                let is_wrong = |at: &usize| all.with(&mut m, *at, Counter::value) != expected[*at];
                (0..COUNTERS).filter(is_wrong).count()
            })
        };
        let workers = [work(1), work(2)];
        while workers.iter().any(|worker| !worker.is_finished()) {
            gc.collect().unwrap();
        }
        workers.map(|worker| worker.join().unwrap()).iter().sum::<usize>()
    });
    gc.verify().unwrap();
    let stats = gc.stats();
    println!("{stats:?}");
    assert!(stats.moved_objects > 1000 && stats.moves_given_up == 0);
    wrong
}

#[test]
fn no_change_is_lost_while_objects_move() {
    let rounds = if is_deep() { 100 } else { 1 };
    for round in 0..rounds {
        assert_eq!(count_beside_collections(None, seed() + round, 30_000), 0);
    }
}

#[test]
fn a_collection_that_moves_copies_out_of_date_loses_changes() {
    let is_noticed =
        (0..10).any(|round| count_beside_collections(Some(BrokenRule::CopiesAreCurrent), seed() + round, 30_000) > 0);
    assert!(is_noticed);
}

/// Pages that a collection has freed are taken again before objects move: by mutators that come and go, so that others see at once
/// what lies in the pages that they fill.
#[test]
fn pages_that_were_freed_and_taken_again_are_not_taken_for_sparse_ones() {
    const PLACES: usize = 40;
    let heap = far_heap(2);
    let gc = GcHeap::in_heap(&heap).limit(12 * MIB).build().unwrap();
    let steps = if is_deep() { 1_000_000 } else { 20_000 };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let collector = threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // So much is given back then that it takes a while.
                if gc.stats().used_bytes > 6 * MIB {
                    gc.collect().unwrap();
                }
            }
        });
        let over = Over(&is_over);
        let mut random = Rng::with_seed(seed());
        let mut kept: Vec<Option<(Root<[u64]>, u64)>> = vec![None; PLACES];
        for step in 0..steps {
            let (mut m, at) = (gc.enter(), random.usize(..PLACES));
            let len = [6, 30, 250][random.usize(..3)];
            m.with_room(|m| m.alloc_copy(&[0u64; 600]).map(|_| ())).unwrap();
            let new = m.with_room(|m| Ok(m.root(m.alloc_copy(&vec![step; len])?))).unwrap();
            if let Some((old, expected)) = kept[at].replace((new, step)) {
                assert!(m.with_room(|m| Ok(m.get(&old)?.iter().all(|word| *word == expected))).unwrap());
            }
        }
        drop(over);
        collector.join().unwrap();
    });
    let stats = gc.stats();
    println!("{stats:?}");
    assert!(stats.collections > 10 && stats.given_up == 0 && stats.moves_given_up == 0);
    // What was alive at a snapshot, each time.
    assert!(stats.moved_objects <= stats.collections * PLACES as u64);
    gc.verify().unwrap();
    drop(gc);
    heap.verify();
}

/// A heap of which one object in ten lives, evenly spread.
fn sparse_heap(builder: GcBuilder<'_>, objects: usize) -> (GcHeap, Counters) {
    let gc = builder.build().unwrap();
    let mut m = gc.enter();
    let all = Counters::new(&mut m, objects / 10);
    (0..objects).for_each(|at| all.replace(&mut m, at / 10, at as u64));
    drop(m);
    (gc, all)
}

#[test]
fn garbage_that_is_spread_evenly_keeps_no_pages() {
    let heap = far_heap(1);
    for is_on in [false, true] {
        let (gc, all) = sparse_heap(GcHeap::in_heap(&heap).limit(24 * MIB).evacuate(is_on), 100_000);
        gc.collect().unwrap();
        gc.collect().unwrap();
        let (verified, stats) = (gc.verify().unwrap(), gc.stats());
        let ratio = (verified.pages * 4096) as f64 / verified.bytes as f64;
        println!("evacuate {is_on}: {ratio:.3} of what lives, {stats:?}");
        assert_eq!(is_on, ratio < 1.15, "{verified:?}");
        assert_eq!(is_on, stats.moved_objects >= 10_000);
        let mut m = gc.enter();
        (0..10_000).for_each(|at| assert_eq!(all.with(&mut m, at, Counter::value), at as u64 * 10 + 9));
    }
    heap.verify();
}

#[test]
fn a_heap_full_of_sparse_pages_has_room_only_if_they_are_emptied() {
    let heap = far_heap(1);
    for is_on in [false, true] {
        // Its pages and entries fill the limit.
        let (gc, _all) = sparse_heap(GcHeap::in_heap(&heap).limit(8 * MIB).evacuate(is_on), 95_000);
        let mut m = gc.enter();
        let mut kept = Vec::new();
        let mut fill = || -> Result<(), GcError> {
            for _ in 0..600 {
                kept.push(m.with_room(|m| Ok(m.root(m.alloc_array(500, |at| at as u64)?)))?);
                m.safepoint()?;
            }
            Ok(())
        };
        let filled = fill();
        println!("evacuate {is_on}: {filled:?} {:?}", gc.stats());
        assert_eq!(filled.is_ok(), is_on);
        drop(m);
        gc.verify().unwrap();
    }
}
