//! Values come near without anybody waiting for them. Dangers: a page that nobody lands, an error that nobody is told, a
//! frame that two flights share.

use crate::common::{MIB, Rng, assert_in_budget, builder, seed};
use farfield::{FarBox, FarError, Heap, PoolError};
use std::sync::mpsc;
use std::time::Duration;

/// 2 MiB near over a pool with these faults, and 8 MiB of pages in it.
fn filled(faults: &str, patience: Duration) -> (Heap, Vec<FarBox<[u64; 512]>>) {
    let near = 2 * MIB;
    let builder = builder().near(near).near_max(near).far(1 << 30).patience(patience).paranoid(true);
    let heap = builder.pool(format!("fault:{faults}@ram:")).build().unwrap();
    let mut values = Vec::new();
    while values.len() < 2048 {
        // Writes fail too; then there is no room yet.
        match heap.alloc([values.len() as u64; 512]) {
            Ok(value) => values.push(value),
            Err(error) if matches!(error.error, FarError::Pool(PoolError::ServerGone { .. })) => break,
            Err(_) => {}
        }
    }
    (heap, values)
}

const LONG: Duration = Duration::from_secs(10);

#[test]
fn prefetched_values_are_no_misses() {
    let (heap, values) = filled("delay=1ms", LONG);
    let misses = heap.stats().misses;
    let mut started = 0;
    // A few at a time: there is not more room for what nobody needs.
    for values in values[..64].chunks(4) {
        started += heap.prefetch(values);
        for value in values {
            let scope = heap.enter();
            let seen = value.get(&scope).unwrap();
            assert!(seen.iter().all(|word| *word == seen[0]));
        }
    }
    let stats = heap.stats();
    assert!(started >= 48, "{started} of 64: {stats:?}");
    assert_eq!(stats.prefetches, started as u64);
    assert_eq!(stats.prefetches_used, stats.prefetches, "each was used, and counted once");
    assert_eq!(stats.misses - misses, 64 - started as u64);
    assert_in_budget(&heap);
    heap.verify();
}

#[test]
fn unused_prefetches_leave_and_are_counted() {
    let (heap, values) = filled("seed=1", LONG);
    assert!(heap.prefetch(&values[..8]) > 0);
    for value in &values[1000..] {
        let scope = heap.enter();
        value.get(&scope).unwrap();
    }
    let stats = heap.stats();
    assert_eq!((stats.prefetches_unused, stats.prefetches_used), (stats.prefetches, 0), "{stats:?}");
    heap.verify();
}

/// A flight needs no thread: others land it while its own does something else, or is gone.
#[test]
fn fetches_begun_by_busy_or_ended_threads_complete() {
    let (heap, values) = filled("delay=2ms", LONG);
    let read = |range: core::ops::Range<usize>| {
        for value in &values[range] {
            let scope = heap.enter();
            value.get(&scope).unwrap();
        }
    };
    // Nothing comes ahead of need while there is no room, and what makes room may be late.
    let begin = |values: &[FarBox<[u64; 512]>]| {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let mut begun = 0;
        while begun < values.len() {
            begun += heap.prefetch(values);
            assert!(std::time::Instant::now() < deadline, "{begun} are on their way");
            std::thread::yield_now();
        }
    };
    std::thread::scope(|threads| {
        let (began, wait) = mpsc::channel();
        let (end, busy) = mpsc::channel::<()>();
        let (begin, values) = (&begin, &values);
        let thread = threads.spawn(move || {
            begin(&values[..4]);
            began.send(()).unwrap();
            let _ = busy.recv();
        });
        wait.recv().unwrap();
        read(0..4);
        drop(end);
        thread.join().unwrap();
        threads.spawn(move || begin(&values[8..12])).join().unwrap();
        read(8..12);
    });
    let stats = heap.stats();
    assert!(stats.prefetches >= 6 && stats.prefetches_used == stats.prefetches, "{stats:?}");
    heap.verify();
}

#[test]
fn values_die_and_heaps_end_while_their_pages_are_under_way() {
    let (heap, mut values) = filled("delay=3ms", LONG);
    for index in (0..64).step_by(4) {
        heap.prefetch(&values[index..index + 4]);
        values[index] = heap.alloc([9; 512]).unwrap();
        drop(std::mem::replace(&mut values[index + 1], heap.alloc([9; 512]).unwrap()));
    }
    heap.verify();
    heap.prefetch(&values[100..108]);
    drop(values);
    heap.verify();
    let (heap, values) = filled("delay=3ms", LONG);
    heap.prefetch(&values[..8]);
    drop(heap);
    values[8].prefetch();
    drop(values);
}

#[test]
fn a_failed_prefetch_fails_for_the_thread_that_needs_the_value() {
    // The server dies at about the operation at which everything is written and the first prefetch begins.
    let (heap, values) = filled("die=1900", LONG);
    for values in values.chunks(16) {
        heap.prefetch(values);
    }
    let mut gone = 0;
    for (index, value) in values.iter().enumerate() {
        let scope = heap.enter();
        match value.get(&scope) {
            Ok(value) => assert_eq!(*value, [index as u64; 512]),
            Err(FarError::Pool(PoolError::ServerGone { .. })) => gone += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(gone > 0 && gone < values.len());
    heap.verify();
}

#[test]
fn lost_and_corrupt_answers_are_asked_for_again() {
    let (heap, values) = filled("drop=0.05,corrupt=0.05,seed=4", Duration::from_millis(30));
    let mut random = Rng::with_seed(seed());
    let mut failed = 0;
    for _ in 0..300 {
        let at = random.usize(..values.len() - 8);
        heap.prefetch(&values[at..at + 8]);
        for (index, value) in values.iter().enumerate().skip(at).take(8) {
            loop {
                let scope = heap.enter();
                match value.get(&scope) {
                    Ok(value) => break assert_eq!(*value, [index as u64; 512]),
                    Err(FarError::Pool(PoolError::TimedOut { .. } | PoolError::Corrupt { .. })) => failed += 1,
                    Err(FarError::Stalled { .. }) => failed += 1,
                    Err(other) => panic!("{other:?}"),
                }
                assert!(failed < 10_000);
            }
        }
    }
    assert!(failed > 0, "the test needs failures");
    drop(values);
    heap.verify();
}

#[test]
fn values_of_many_pages_come_ahead_too() {
    let near = 4 * MIB;
    let heap = builder().near(near).near_max(near).far(1 << 30).paranoid(true).build().unwrap();
    let values: Vec<_> = (0..100u64).map(|index| heap.alloc([index; 20_000]).unwrap()).collect();
    for (index, value) in values.iter().enumerate() {
        heap.prefetch(values.get(index + 1));
        let scope = heap.enter();
        assert_eq!(*value.get(&scope).unwrap(), [index as u64; 20_000]);
    }
    let stats = heap.stats();
    assert!(stats.prefetches_used > 50, "{stats:?}");
    heap.verify();
}
