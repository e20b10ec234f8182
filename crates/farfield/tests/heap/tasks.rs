//! Tasks that wait for far values. Dangers: a task that nobody wakes, a page that leaves under a reference that a task holds while
//! it waits, scopes of tasks that together never end, an error or a panic that hits the wrong one.

use crate::common::task::{fetch_until_there, look, yield_now};
use crate::common::twin::steps;
use crate::common::{MIB, Rng, assert_in_budget, builder, seed};
use farfield::task::{Executor, spawn};
use farfield::{FarBox, FarError, Heap, PoolError};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

fn heap(faults: &str, near: u64, patience: Duration) -> Heap {
    let builder = builder().near(near).near_max(near).far(1 << 30).patience(patience).paranoid(true);
    builder.pool(format!("fault:{faults}@ram:")).build().unwrap()
}

/// So many values of a page each.
fn filled(heap: &Heap, count: u64) -> Vec<FarBox<[u64; 512]>> {
    let mut values = Vec::new();
    while values.len() < count as usize {
        match heap.alloc([values.len() as u64; 512]) {
            Ok(value) => values.push(value),
            Err(error) if matches!(error.error, FarError::Pool(PoolError::ServerGone { .. })) => break,
            // Writes fail too; then there is no room yet.
            Err(_) => {}
        }
    }
    values
}

#[test]
fn tasks_get_what_is_far() {
    let heap = heap("delay=200us", 2 * MIB, LONG);
    let values = filled(&heap, 2048);
    let right = Cell::new(0);
    let executor = Executor::new(&heap);
    let (heap_ref, right) = (&heap, &right);
    for (index, value) in values.iter().enumerate() {
        executor.spawn(async move {
            let scope = heap_ref.enter();
            assert_eq!(*value.fetch(&scope).await.unwrap(), [index as u64; 512]);
            right.set(right.get() + 1);
        });
    }
    executor.run();
    assert_eq!(right.get(), 2048);
    let stats = heap.stats();
    assert!(stats.misses > 1000, "{stats:?}");
    assert_in_budget(&heap);
    heap.verify();
}

/// Tasks take turns so that at every moment some scope of the thread is open. What left before the oldest one began must
/// not wait for the end of the world.
#[test]
fn scopes_that_overlap_without_end_keep_nothing_near_for_ever() {
    let heap = heap("seed=1", MIB, Duration::from_secs(60));
    let values = filled(&heap, 4000);
    let executor = Executor::new(&heap);
    let (heap, values) = (&heap, &values);
    for task in 0..3 {
        executor.spawn(async move {
            for at in (task..values.len()).step_by(3) {
                let scope = heap.enter();
                let seen = values[at].fetch(&scope).await.unwrap();
                // Others begin and end their scopes meanwhile.
                for _ in 0..4 {
                    yield_now().await;
                }
                assert_eq!(*seen, [at as u64; 512]);
            }
        });
    }
    executor.run();
    heap.verify();
}

/// Every frame without a page is poisoned and cannot be accessed, so a reference that lost its page stops the test.
#[test]
fn references_are_good_as_long_as_their_scope_whatever_others_do() {
    let heap = heap("delay=50us", 2 * MIB, LONG);
    let values = filled(&heap, 3000);
    let seed = seed();
    let executor = Executor::new(&heap);
    let (heap, values) = (&heap, &values);
    for task in 0..24 {
        executor.spawn(async move {
            let mut random = Rng::with_seed(seed ^ task << 32);
            for _ in 0..60 {
                let outer = heap.enter();
                let first = random.usize(..values.len());
                let seen = values[first].fetch(&outer).await.unwrap();
                {
                    let inner = heap.enter();
                    let second = random.usize(..values.len());
                    let other = values[second].fetch(&inner).await.unwrap();
                    assert_eq!((seen[7], other[511]), (first as u64, second as u64));
                }
                yield_now().await;
                assert_eq!(*seen, [first as u64; 512]);
            }
        });
    }
    executor.run();
    heap.verify();
}

#[test]
fn tasks_that_want_the_same_page_wait_for_one_miss() {
    let heap = heap("delay=2ms", 2 * MIB, LONG);
    let values = filled(&heap, 1000);
    let misses = heap.stats().misses;
    let executor = Executor::new(&heap);
    for _ in 0..50 {
        executor.spawn(async {
            let scope = heap.enter();
            assert_eq!(values[3].fetch(&scope).await.unwrap()[0], 3);
        });
    }
    executor.run();
    assert_eq!(heap.stats().misses, misses + 1);
}

#[test]
fn a_task_that_wants_everything_is_told_so_and_others_go_on() {
    let heap = heap("seed=1", MIB, Duration::from_secs(60));
    let values = filled(&heap, 2000);
    let executor = Executor::new(&heap);
    let (heap, values) = (&heap, &values);
    let greedy = executor.spawn(async move {
        let scope = heap.enter();
        let mut held = 0;
        loop {
            match values[held].fetch(&scope).await {
                Ok(value) => assert_eq!(value[1], held as u64),
                Err(error) => return (held, error),
            }
            held += 1;
        }
    });
    let modest = executor.spawn(async move {
        for (index, value) in values.iter().enumerate() {
            // While the other one holds what it has, there may be no room.
            loop {
                let scope = heap.enter();
                match value.fetch(&scope).await {
                    Ok(value) => break assert_eq!(value[1], index as u64),
                    Err(error) => assert_eq!(error, FarError::NearFull),
                }
                drop(scope);
                yield_now().await;
            }
        }
    });
    let (held, error) = executor.block_on(greedy).unwrap();
    assert_eq!(error, FarError::NearFull);
    assert!(held >= 24, "{held}");
    executor.block_on(modest).unwrap();
    heap.verify();
}

#[test]
fn a_panic_ends_its_task_and_its_scope_and_nothing_else() {
    let heap = heap("delay=100us", MIB, LONG);
    let values = filled(&heap, 1000);
    let executor = Executor::new(&heap);
    let (heap, values) = (&heap, &values);
    let bad = executor.spawn(async move {
        let scope = heap.enter();
        let value = values[0].fetch(&scope).await.unwrap();
        assert_eq!(value[0], 1, "wrong on purpose");
    });
    let good = executor.spawn(async move {
        let mut sum = 0;
        for value in values {
            let scope = heap.enter();
            sum += value.fetch(&scope).await.unwrap()[0];
        }
        sum
    });
    let panicked = executor.block_on(bad).unwrap_err();
    assert!(panicked.message().contains("wrong on purpose"), "{panicked}");
    assert_eq!(executor.block_on(good).unwrap(), 999 * 500);
    heap.verify();
}

#[test]
fn tasks_end_with_their_executor_and_their_flights_without_them() {
    let heap = heap("delay=1ms", 2 * MIB, LONG);
    let values = filled(&heap, 2048);
    for round in 0..8 {
        let executor = Executor::new(&heap);
        for value in &values[round * 16..][..16] {
            executor.spawn(async {
                let scope = heap.enter();
                let _ = value.fetch(&scope).await;
                panic!("not before the executor is gone");
            });
        }
        // Each is polled once, and asks.
        executor.block_on(async { yield_now().await });
    }
    heap.verify();
    let executor = Executor::new(&heap);
    // What was begun is near, or comes without being asked for again.
    executor.block_on(async {
        let scope = heap.enter();
        assert_eq!(values[5].fetch(&scope).await.unwrap()[3], 5);
    });
    drop(executor);
    heap.verify();
}

#[test]
fn tasks_make_tasks() {
    let heap = heap("seed=1", MIB, LONG);
    let executor = Executor::new(&heap);
    let sum = executor.block_on(async {
        let tasks: Vec<_> =
            (0..10u64).map(|n| spawn(async move { spawn(async move { n }).await.unwrap() + 1 })).collect();
        let mut sum = 0;
        for task in tasks {
            sum += task.await.unwrap();
        }
        sum
    });
    assert_eq!(sum, 55);
    assert!(std::panic::catch_unwind(|| spawn(async {})).is_err(), "outside of an executor it is misuse");
}

/// An executor that knows nothing of us.
fn foreign_block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::park();
    }
}

#[test]
fn other_executors_do_too() {
    let heap = heap("delay=300us", MIB, LONG);
    let values = filled(&heap, 1500);
    std::thread::scope(|threads| {
        let start = |thread: usize| {
            let (heap, values) = (&heap, &values);
            threads.spawn(move || {
                for at in 0..200 {
                    let index = (at * 7 + thread * 100) % values.len();
                    foreign_block_on(async {
                        let scope = heap.enter();
                        assert_eq!(values[index].fetch(&scope).await.unwrap()[9], index as u64);
                    });
                }
            })
        };
        let handles: Vec<_> = (0..3).map(start).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    heap.verify();
}

#[test]
fn executors_on_threads_wait_for_each_others_pages() {
    let heap = heap("delay=200us", 2 * MIB, LONG);
    let values = filled(&heap, 2000);
    std::thread::scope(|threads| {
        let start = |_| {
            let (heap, values) = (&heap, &values);
            threads.spawn(move || {
                let executor = Executor::new(heap);
                for task in 0..32 {
                    executor.spawn(async move {
                        // All threads go the same way.
                        for index in (task..values.len()).step_by(32) {
                            let scope = heap.enter();
                            assert_eq!(values[index].fetch(&scope).await.unwrap()[2], index as u64);
                        }
                    });
                }
                executor.run();
            })
        };
        let handles: Vec<_> = (0..3).map(start).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    heap.verify();
}

#[test]
fn each_task_gets_the_error_of_its_page() {
    for die in [1850, 2100] {
        let heap = heap(&format!("die={die},delay=20us"), MIB, LONG);
        let values = filled(&heap, 2000);
        let gone = Cell::new(0);
        let executor = Executor::new(&heap);
        let (gone, heap) = (&gone, &heap);
        for (index, value) in values.iter().enumerate() {
            executor.spawn(async move {
                let scope = heap.enter();
                match value.fetch(&scope).await {
                    Ok(value) => assert_eq!(*value, [index as u64; 512]),
                    Err(FarError::Pool(PoolError::ServerGone { .. })) => gone.set(gone.get() + 1),
                    Err(other) => panic!("{other:?}"),
                }
            });
        }
        executor.run();
        assert!(gone.get() > 0 && gone.get() < values.len(), "{} of {}", gone.get(), values.len());
        heap.verify();
    }
}

#[test]
fn lost_and_corrupt_answers_reach_those_who_wait() {
    let heap = heap("drop=0.02,corrupt=0.05,seed=6", MIB, Duration::from_millis(40));
    let values = filled(&heap, 1000);
    let failed = Cell::new(0);
    let executor = Executor::new(&heap);
    let (failed, heap, values) = (&failed, &heap, &values);
    let tasks: Vec<_> = (0..40)
        .map(|task| {
            executor.spawn(async move {
                for index in (task..values.len()).step_by(20) {
                    let there = fetch_until_there(heap, &values[index], failed).await;
                    assert_eq!(there, [index as u64; 512]);
                }
            })
        })
        .collect();
    for task in tasks {
        executor.block_on(task).unwrap();
    }
    assert!(failed.get() > 0, "the test needs failures");
    heap.verify();
}

/// Rng steps of tasks against a twin, at this near share: each task owns a part of the values, of so many words.
fn random_tasks<const WORDS: usize>(near_percent: u64, tasks: usize) {
    let seed = seed();
    // The smallest heap has 1 MiB near.
    let bytes = (MIB * 100 / near_percent).max(12 * MIB);
    let near = (bytes * near_percent / 100).max(MIB);
    let heap = heap("delay=20us", near, LONG);
    let executor = Executor::new(&heap);
    let count = bytes as usize / (WORDS * 8) / tasks;
    let all = RefCell::new(0);
    let handles: Vec<_> = (0..tasks)
        .map(|task| {
            let (heap, all) = (&heap, &all);
            executor.spawn(async move {
                let mut random = Rng::with_seed(seed ^ (task as u64) << 40);
                let mut twin: Vec<u64> = (0..count as u64).collect();
                let mut far: Vec<FarBox<[u64; WORDS]>> = Vec::new();
                for value in &twin {
                    far.push(heap.alloc([*value; WORDS]).unwrap());
                    if far.len().is_multiple_of(16) {
                        yield_now().await;
                    }
                }
                for _ in 0..steps(800) {
                    let index = random.usize(..count);
                    let scope = heap.enter();
                    match random.usize(..8) {
                        0 => {
                            drop(scope);
                            twin[index] = random.u64(..);
                            far[index] = heap.alloc([twin[index]; WORDS]).unwrap();
                        }
                        1..=3 => {
                            twin[index] = random.u64(..);
                            *far[index].fetch_mut(&scope).await.unwrap() = [twin[index]; WORDS];
                        }
                        4 => {
                            heap.prefetch(&far[index..(index + 3).min(count)]);
                        }
                        // Given up at once.
                        5 => {
                            look(far[index].fetch(&scope)).await;
                        }
                        _ => {
                            let seen = far[index].fetch(&scope).await.unwrap();
                            let other = random.usize(..count);
                            assert_eq!(far[other].fetch(&scope).await.unwrap()[WORDS - 1], twin[other]);
                            assert_eq!(*seen, [twin[index]; WORDS]);
                        }
                    }
                }
                *all.borrow_mut() += 1;
            })
        })
        .collect();
    for handle in handles {
        executor.block_on(handle).unwrap();
    }
    drop(executor);
    assert_eq!(all.into_inner(), tasks);
    assert_in_budget(&heap);
    heap.verify();
}

#[test]
fn random_tasks_with_everything_near() {
    random_tasks::<80>(100, 8);
}

#[test]
fn random_tasks_with_a_third_near() {
    random_tasks::<80>(33, 16);
}

/// Large ones: what has a handle needs eight bytes near.
#[test]
fn random_tasks_with_two_percent_near() {
    random_tasks::<500>(2, 4);
}

#[test]
fn random_tasks_with_a_tenth_near() {
    random_tasks::<80>(10, 12);
}
