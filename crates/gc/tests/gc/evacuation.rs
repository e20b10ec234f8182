//! Objects leave sparse pages, while mutators use them.
//!
//! Danger: a change that is made to an object while it is moved, and is lost; pages that one object each keeps; and a heap that is
//! called full although most of it is garbage.

use crate::common::{MIB, Over, far_heap, is_deep, seed};
use crate::counters::{Counter, count_in, sparse_heap};
use farfield_gc::{BrokenRule, GcError, GcHeap, Root};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};

fn count_beside_collections(broken: Option<BrokenRule>, seed: u64, steps: usize) -> usize {
    let heap = far_heap(1);
    let (wrong, stats) = count_in(GcHeap::in_heap(&heap), broken, seed, steps);
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
