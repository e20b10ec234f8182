//! What a heap counts for those who measure a program.
//!
//! Danger: figures that look plausible and leave out what they are about.

use crate::common::{MIB, Over, far_heap, heaps};
use crate::counters::{Counter, sparse_heap};
use farfield_gc::GcHeap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn waits_of_a_mutator_are_recorded_while_asked_for_and_no_more_than_that() {
    const MOST: usize = 3;
    let (_heap, gc) = heaps(2, 16);
    let begun = Instant::now();
    let (runs, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|threads| {
        let mutator = threads.spawn(|| {
            let mut m = gc.enter();
            while !is_over.load(Ordering::Relaxed) {
                m.safepoint().unwrap();
                runs.store(true, Ordering::Relaxed);
            }
        });
        let over = Over(&is_over);
        while !runs.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        // A collection stops a mutator twice or more, and this one does nothing but reach safepoints.
        gc.collect().unwrap();
        assert_eq!(gc.recorded_waits(), []);
        gc.record_waits(MOST);
        while gc.recorded_waits().len() < MOST {
            gc.collect().unwrap();
        }
        let (waits, passed) = (gc.recorded_waits(), begun.elapsed());
        assert_eq!(waits.len(), MOST);
        assert!(waits.iter().all(|wait| wait.thread == mutator.thread().id()));
        assert!(waits.is_sorted_by(|one, next| one.begun + one.time <= next.begun));
        assert!(waits.iter().map(|wait| wait.time).sum::<Duration>() <= passed);
        gc.record_waits(0);
        gc.collect().unwrap();
        assert_eq!(gc.recorded_waits(), []);
        drop(over);
    });
}

#[test]
fn guesses_are_wrong_where_objects_have_moved_and_right_where_all_stays_near() {
    for moves in [false, true] {
        let heap = far_heap(64);
        let (gc, all) = sparse_heap(GcHeap::in_heap(&heap).limit(24 * MIB).evacuate(moves), 100_000);
        gc.collect().unwrap();
        gc.collect().unwrap();
        let before = gc.stats();
        let mut m = gc.enter();
        (0..10_000).for_each(|at| assert_eq!(all.with(&mut m, at, Counter::value), at as u64 * 10 + 9));
        drop(m);
        let after = gc.stats();
        assert_eq!(after.moved_objects > 0, moves);
        let wrong = after.wrong_guesses - before.wrong_guesses;
        assert!(wrong <= after.slow_loads - before.slow_loads && wrong <= 10_000);
        assert!(if moves { wrong > 5_000 } else { wrong == 0 }, "moved: {moves}, wrong: {wrong}");
    }
}
