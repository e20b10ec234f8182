//! Object and hybrid plane hide latency: small values are asked for together, by tasks, batches and hints. Dangers: values that come one after the
//! other after all, or twice; a flight that writes where others live by then; a page that leaves while values are on their way to it; a task
//! that nobody tells; near memory that is never given back.

use crate::common::task::{fetch_until_there, look, yield_now};
use crate::common::twin::steps;
use crate::common::{MIB, Over, Rng, assert_in_budget, builder, plane, seed};
use farfield::task::Executor;
use farfield::{FarBox, FarError, Heap, Plane, PoolError};
use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Context, Waker};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

fn heap(faults: &str, near: u64, patience: Duration) -> Heap {
    let builder = builder().near(near).near_max(near).far(1 << 30).patience(patience).paranoid(true);
    builder.pool(format!("fault:{faults}@ram:")).build().unwrap()
}

type Value = [u64; 8];

/// What travels for a value that was made with others.
fn travels() -> u64 {
    if plane() == Plane::Hybrid { 4096 } else { 64 }
}

/// So many values, and then enough large ones that all of them have left.
fn far_values(heap: &Heap, count: usize) -> Vec<FarBox<Value>> {
    let values = (0..count as u64).map(|index| heap.alloc([index; 8]).unwrap()).collect();
    let pages = heap.stats().near_limit_bytes / 4096 * 2;
    drop((0..pages).map(|index| heap.alloc([index; 512]).unwrap()).collect::<Vec<_>>());
    values
}

fn is_gone(error: FarError) -> bool {
    matches!(error, FarError::Pool(PoolError::ServerGone { .. }))
}

#[test]
fn a_batch_is_asked_for_before_anything_is_waited_for() {
    let heap = heap("delay=1ms", 8 * MIB, LONG);
    let values = far_values(&heap, 20_000);
    let wanted: Vec<_> = values.iter().step_by(311).take(64).collect();
    let before = heap.stats();
    {
        let scope = heap.enter();
        let mut batch = pin!(heap.fetch_many(&scope, wanted.iter().copied()));
        assert!(batch.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(heap.stats().misses, before.misses + 64, "all at the first look");
        let seen = Executor::new(&heap).block_on(batch).unwrap();
        for (index, value) in seen.into_iter().enumerate() {
            assert_eq!(*value, [index as u64 * 311; 8]);
        }
    }
    let scope = heap.enter();
    assert_eq!(heap.get_many(&scope, wanted).unwrap().len(), 64);
    let after = heap.stats();
    assert_eq!(after.misses, before.misses + 64, "none of them twice");
    assert_eq!(after.fetched_bytes, before.fetched_bytes + 64 * travels(), "and nothing else");
    assert_in_budget(&heap);
}

#[test]
fn batches_longer_than_the_lane_come_in_order() {
    let heap = heap("delay=50us", 2 * MIB, LONG);
    let mut values = far_values(&heap, 20_000);
    let mut random = Rng::with_seed(seed());
    for round in 0..steps(40) {
        let from = random.usize(..19_000);
        let scope = heap.enter();
        if round % 3 == 0 {
            let batch = heap.get_many_mut(&scope, &mut values[from..from + 900]).unwrap();
            batch.into_iter().for_each(|value| value[7] += 1);
        } else {
            let batch = heap.get_many(&scope, &values[from..from + 900]).unwrap();
            assert!(batch.into_iter().enumerate().all(|(at, value)| value[..7] == [(from + at) as u64; 7]));
        }
        assert_in_budget(&heap);
    }
    heap.verify();
    drop(values);
    heap.verify();
}

#[test]
fn tasks_that_want_the_same_value_wait_for_one_miss() {
    let heap = heap("delay=2ms", 2 * MIB, LONG);
    let values = far_values(&heap, 10_000);
    let before = heap.stats();
    let executor = Executor::new(&heap);
    for _ in 0..50 {
        executor.spawn(async {
            let scope = heap.enter();
            assert_eq!(*values[3].fetch(&scope).await.unwrap(), [3; 8]);
        });
    }
    executor.run();
    let after = heap.stats();
    assert_eq!((after.misses, after.fetched_bytes), (before.misses + 1, before.fetched_bytes + travels()));
}

/// A batch of more than fits is refused, and lets go of everything.
#[test]
fn a_batch_that_cannot_be_near_is_refused() {
    let heap = heap("seed=1", MIB, LONG);
    let values: Vec<_> = (0..4_000u64).map(|index| heap.alloc([index; 100]).unwrap()).collect();
    let scope = heap.enter();
    assert_eq!(heap.get_many(&scope, &values).unwrap_err(), FarError::NearFull);
    drop(scope);
    let scope = heap.enter();
    assert_eq!(heap.get_many(&scope, &values[..100]).unwrap()[99][99], 99);
    drop(scope);
    heap.verify();
}

#[test]
fn futures_are_given_up_and_their_flights_land() {
    let heap = heap("delay=1ms", 2 * MIB, LONG);
    let values = far_values(&heap, 20_000);
    let misses = heap.stats().misses;
    let executor = Executor::new(&heap);
    executor.block_on(async {
        for value in values.iter().step_by(100) {
            let scope = heap.enter();
            assert!(!look(value.fetch(&scope)).await);
        }
    });
    drop(executor);
    heap.verify();
    assert_in_budget(&heap);
    // What was begun is near.
    for (index, value) in values.iter().enumerate().step_by(100) {
        assert_eq!(*value.get(&heap.enter()).unwrap(), [index as u64; 8]);
    }
    assert_eq!(heap.stats().misses, misses + 200);
    heap.verify();
}

/// Nobody has a scope, or a thread, while values are on their way: then their places must not be given to others.
#[test]
fn places_of_values_on_their_way_are_nobody_elses() {
    let heap = heap("delay=300us", MIB, LONG);
    let mut values = far_values(&heap, 20_000);
    let mut random = Rng::with_seed(seed());
    for _ in 0..steps(60) {
        let from = random.usize(..19_900);
        heap.prefetch(&values[from..from + 40]);
        // Pushes out what can leave.
        let ballast: Vec<_> = (0..300u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        // Values die while they are on their way, and their numbers name others.
        for value in &mut values[from..from + 8] {
            let old = value.get(&heap.enter()).unwrap()[0];
            *value = heap.alloc([old; 8]).unwrap();
        }
        for (index, value) in values.iter().enumerate().skip(from).take(40) {
            assert_eq!(*value.get(&heap.enter()).unwrap(), [index as u64; 8]);
        }
        assert!(ballast.iter().enumerate().all(|(index, value)| value.read(|value| value[9] == index as u64).unwrap()));
        assert_in_budget(&heap);
    }
    heap.verify();
    drop(values);
    heap.verify();
}

#[test]
fn prefetched_objects_are_no_misses_and_are_counted() {
    let heap = heap("delay=1ms", 2 * MIB, LONG);
    let values = far_values(&heap, 20_000);
    let before = heap.stats();
    // Each of another page.
    let some = |first: usize, count: usize| values.iter().enumerate().skip(first).step_by(61).take(count);
    let wanted = |first, count| some(first, count).map(|(_, value)| value);
    let started = heap.prefetch(wanted(0, 64));
    assert!(started >= 48, "{started} of 64");
    assert_eq!(heap.prefetch(wanted(0, started)), 0, "they are on their way");
    for _ in 0..2 {
        for (index, value) in some(0, 64) {
            assert_eq!(*value.get(&heap.enter()).unwrap(), [index as u64; 8]);
        }
    }
    let after = heap.stats();
    assert_eq!(after.prefetches, started as u64);
    assert_eq!(after.prefetches_used, after.prefetches, "each was used, and counted once");
    assert_eq!(after.misses - before.misses, 64 - started as u64);
    assert_eq!(after.fetched_bytes - before.fetched_bytes, 64 * travels());
    // Others are not used.
    assert!(heap.prefetch(wanted(10_000, 20)) > 0);
    drop(far_values(&heap, 1));
    drop(far_values(&heap, 20_000));
    // Those that left in haste are found when they are wanted again.
    for value in wanted(10_000, 20) {
        value.get(&heap.enter()).unwrap();
    }
    let stats = heap.stats();
    assert_eq!(stats.prefetches_used + stats.prefetches_unused, stats.prefetches, "{stats:?}");
    assert!(stats.prefetches_unused > 0, "{stats:?}");
    heap.verify();
}

/// A flight needs no thread: others land it while its own does something else, or is gone.
#[test]
fn fetches_begun_by_busy_or_ended_threads_complete() {
    let heap = heap("delay=2ms", 2 * MIB, LONG);
    let values = far_values(&heap, 20_000);
    let misses = heap.stats().misses;
    // Each of another page.
    let some = |first: usize| values.iter().enumerate().skip(first).step_by(61).take(16);
    let read = |first| {
        for (index, value) in some(first) {
            assert_eq!(*value.get(&heap.enter()).unwrap(), [index as u64; 8]);
        }
    };
    std::thread::scope(|threads| {
        let (began, wait) = mpsc::channel();
        let (end, busy) = mpsc::channel::<()>();
        let (heap, some) = (&heap, &some);
        let prefetch = move |first| heap.prefetch(some(first).map(|(_, value)| value));
        let thread = threads.spawn(move || {
            assert_eq!(prefetch(0), 16);
            began.send(()).unwrap();
            let _ = busy.recv();
        });
        wait.recv().unwrap();
        read(0);
        drop(end);
        thread.join().unwrap();
        threads.spawn(move || assert_eq!(prefetch(10_000), 16)).join().unwrap();
        read(10_000);
    });
    let stats = heap.stats();
    assert_eq!((stats.misses, stats.prefetches, stats.prefetches_used), (misses, 32, 32), "{stats:?}");
    heap.verify();
}

#[test]
fn values_die_and_heaps_end_while_they_are_on_their_way() {
    let first = heap("delay=3ms", 2 * MIB, LONG);
    let mut values = far_values(&first, 10_000);
    for index in (0..640).step_by(40) {
        first.prefetch(&values[index..index + 20]);
        values[index] = first.alloc([9; 8]).unwrap();
        drop(std::mem::replace(&mut values[index + 1], first.alloc([9; 8]).unwrap()));
    }
    first.verify();
    first.prefetch(&values[5_000..5_030]);
    drop(values);
    first.verify();
    let second = heap("delay=3ms", 2 * MIB, LONG);
    let values = far_values(&second, 10_000);
    second.prefetch(&values[..30]);
    drop(second);
    values[40].prefetch();
    drop(values);
}

#[test]
fn each_task_gets_the_error_of_its_value() {
    for die in [700, 900, 1100] {
        let heap = heap(&format!("die={die},delay=20us"), 2 * MIB, LONG);
        let mut values = Vec::new();
        for index in 0..40_000u64 {
            match heap.alloc([index; 8]) {
                Ok(value) => values.push(value),
                Err(error) => {
                    assert!(is_gone(error.error), "{error:?}");
                    break;
                }
            }
        }
        let (good, gone) = (Cell::new(0), Cell::new(0));
        let executor = Executor::new(&heap);
        for task in 0..40 {
            let (heap, values, good, gone) = (&heap, &values, &good, &gone);
            executor.spawn(async move {
                for (index, value) in values.iter().enumerate().skip(task).step_by(40) {
                    let scope = heap.enter();
                    if index % 3 == 0 {
                        heap.prefetch([value]);
                    }
                    match value.fetch(&scope).await {
                        Ok(value) => assert_eq!(*value, [index as u64; 8]),
                        Err(error) => {
                            assert!(is_gone(error), "{error:?}");
                            gone.set(gone.get() + 1);
                            continue;
                        }
                    }
                    good.set(good.get() + 1);
                }
            });
        }
        executor.run();
        drop(executor);
        assert!(good.get() > 5_000 && gone.get() > 0, "{} came and {} did not, with die={die}", good.get(), gone.get());
        assert_eq!(good.get() + gone.get(), values.len());
        let batch_is_gone = |values: &[FarBox<Value>]| heap.get_many(&heap.enter(), values).is_err_and(is_gone);
        assert!(values.chunks(20).any(batch_is_gone));
        heap.verify();
        drop(values);
        heap.verify();
    }
}

#[test]
fn lost_and_corrupt_answers_reach_those_who_wait() {
    let heap = heap("drop=0.01,corrupt=0.05,seed=6", 2 * MIB, Duration::from_millis(40));
    let mut values: Vec<FarBox<Value>> = Vec::new();
    while values.len() < 40_000 {
        // Writes fail too; then there is no room yet.
        if let Ok(value) = heap.alloc([values.len() as u64; 8]) {
            values.push(value);
        }
    }
    let failed = Cell::new(0);
    let executor = Executor::new(&heap);
    let tasks: Vec<_> = (0..40)
        .map(|task| {
            let (failed, heap, values) = (&failed, &heap, &values);
            executor.spawn(async move {
                for index in (task..values.len()).step_by(400) {
                    let there = fetch_until_there(heap, &values[index], failed).await;
                    assert_eq!(there, [index as u64; 8]);
                }
            })
        })
        .collect();
    for task in tasks {
        executor.block_on(task).unwrap();
    }
    assert!(failed.get() > 0, "the test needs failures");
    drop(executor);
    drop(values);
    heap.verify();
}

/// Knows its number, and counts how many exist.
struct Counted(Arc<AtomicI64>, [u64; 31]);

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(self.1[0], self.1[30]);
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a task owns, and its twin.
struct Owned<'a> {
    heap: &'a Heap,
    random: Rng,
    alive: &'a Arc<AtomicI64>,
    far: Vec<FarBox<Counted>>,
    twin: Vec<u64>,
    shared: &'a [FarBox<[AtomicU64; 8]>],
    /// Increments of what is shared.
    added: u64,
}

impl Owned<'_> {
    /// When scopes of other tasks hold all that could leave, those go on first.
    async fn make(&self, value: u64) -> FarBox<Counted> {
        loop {
            self.alive.fetch_add(1, Ordering::Relaxed);
            match self.heap.alloc(Counted(self.alive.clone(), [value; 31])) {
                Ok(made) => return made,
                Err(error) => assert_eq!(error.error, FarError::NearFull),
            }
            yield_now().await;
        }
    }

    async fn step(&mut self) -> Result<(), FarError> {
        let index = self.random.usize(..self.far.len());
        let end = (index + self.random.usize(..8)).min(self.far.len());
        match self.random.usize(..10) {
            0 => {
                self.twin[index] = self.random.u64(..);
                self.far[index] = self.make(self.twin[index]).await;
            }
            1 | 2 => {
                let value = self.random.u64(..);
                self.far[index].fetch_mut(&self.heap.enter()).await?.1 = [value; 31];
                self.twin[index] = value;
            }
            3 => drop(self.heap.prefetch(&self.far[index..end])),
            // Given up at once, and perhaps dropped while it is on its way.
            4 => {
                look(self.far[index].fetch(&self.heap.enter())).await;
                if self.random.usize(..2) == 0 {
                    self.far[index] = self.make(self.twin[index]).await;
                }
            }
            5 => {
                let scope = self.heap.enter();
                let seen = self.heap.fetch_many(&scope, &self.far[index..end]).await?;
                yield_now().await;
                assert!(seen.into_iter().zip(&self.twin[index..end]).all(|(seen, twin)| seen.1 == [*twin; 31]));
            }
            6 => {
                let pinned = self.far[index].fetch_pinned().await?;
                self.far[self.random.usize(..self.twin.len())].fetch_pinned().await?;
                assert_eq!(pinned.1, [self.twin[index]; 31]);
            }
            7 => {
                let scope = self.heap.enter();
                let value = self.shared[self.random.usize(..self.shared.len())].fetch(&scope).await?;
                value[self.random.usize(..8)].fetch_add(1, Ordering::Relaxed);
                self.added += 1;
            }
            _ => {
                let scope = self.heap.enter();
                let seen = self.far[index].fetch(&scope).await?;
                let other = self.random.usize(..self.twin.len());
                assert_eq!(self.far[other].fetch(&scope).await?.1[30], self.twin[other]);
                assert_eq!(seen.1, [self.twin[index]; 31]);
            }
        }
        Ok(())
    }
}

/// Rng steps of a task; how often it has incremented something that is shared.
async fn random_task(mut owned: Owned<'_>, count: u64) -> u64 {
    for value in 0..count {
        let made = owned.make(value).await;
        owned.far.push(made);
        owned.twin.push(value);
    }
    for _ in 0..steps(400) {
        match owned.step().await {
            Ok(()) => {}
            Err(error) => assert_eq!(error, FarError::NearFull),
        }
    }
    owned.added
}

/// Tasks in threads, and a thread that does not wait in tasks, on values of which this share is near.
fn random_threads(near_percent: u64, threads: u64, tasks: u64) {
    let seed = seed();
    let bytes = 6 * MIB;
    let near = (bytes * near_percent / 100).max(MIB);
    let heap = heap("delay=20us", near, LONG);
    let alive = Arc::new(AtomicI64::new(0));
    let shared: Vec<FarBox<[AtomicU64; 8]>> = (0..2_000).map(|_| heap.alloc(Default::default()).unwrap()).collect();
    let count = bytes / 256 / (threads * tasks);
    let stop = AtomicBool::new(false);
    let added = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let blocking = scope.spawn(|| {
            let mut random = Rng::with_seed(!seed);
            while !stop.load(Ordering::Relaxed) {
                let value = &shared[random.usize(..shared.len())];
                value.get(&heap.enter()).unwrap()[0].fetch_add(1, Ordering::Relaxed);
                added.fetch_add(1, Ordering::Relaxed);
            }
        });
        let start = |thread: u64| {
            let (heap, alive, shared, added) = (&heap, &alive, &shared, &added);
            scope.spawn(move || {
                let executor = Executor::new(heap);
                let start = |task| {
                    let random = Rng::with_seed(seed ^ thread << 40 ^ task << 32);
                    let (far, twin) = (Vec::new(), Vec::new());
                    random_task(Owned { heap, random, alive, far, twin, shared, added: 0 }, count)
                };
                let handles: Vec<_> = (0..tasks).map(|task| executor.spawn(start(task))).collect();
                for handle in handles {
                    added.fetch_add(executor.block_on(handle).unwrap(), Ordering::Relaxed);
                }
            })
        };
        let started: Vec<_> = (0..threads).map(start).collect();
        let over = Over(&stop);
        started.into_iter().for_each(|thread| thread.join().unwrap());
        drop(over);
        blocking.join().unwrap();
    });
    let sum = |value: &FarBox<[AtomicU64; 8]>| {
        value.read(|value| value.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>()).unwrap()
    };
    assert_eq!(shared.iter().map(sum).sum::<u64>(), added.into_inner(), "no increment is lost when a value moves");
    assert_eq!(alive.load(Ordering::Relaxed), 0, "each was dropped once");
    assert_in_budget(&heap);
    heap.verify();
    drop(shared);
    heap.verify();
    println!("{:?}", heap.stats());
}

#[test]
fn random_tasks_with_everything_near() {
    random_threads(200, 2, 4);
}

#[test]
fn random_tasks_with_a_third_near() {
    random_threads(33, 2, 8);
}

#[test]
fn random_tasks_with_an_eighth_near() {
    random_threads(12, 3, 4);
}
