//! The pool fails: typed errors in time, near values stay usable, no garbage, no hang. Danger: everything else.

use crate::common::{MIB, Rng, builder};
use farfield::collections::FarVec;
use farfield::{FarBox, FarError, Heap, PoolError};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

/// A heap of 1 MiB near over a pool with these faults.
fn heap(faults: &str, patience: Duration) -> Heap {
    let url = format!("fault:{faults}@ram:");
    builder().near(MIB).near_max(MIB).far(1 << 30).patience(patience).pool(url).paranoid(true).build().unwrap()
}

/// Two MiB of pages, or as many as there is room for.
fn fill(heap: &Heap) -> (Vec<FarBox<[u64; 512]>>, Option<FarError>) {
    let mut values = Vec::new();
    for index in 0..512 {
        match heap.alloc([index; 512]) {
            Ok(value) => values.push(value),
            Err(error) => {
                assert_eq!(error.value, [index; 512], "the value comes back");
                return (values, Some(error.error));
            }
        }
    }
    (values, None)
}

#[test]
fn a_server_that_dies_leaves_what_is_near() {
    // Whenever it dies: while values are made, while they are read, or never.
    for die in [1, 2, 40, 200, 300, 400, 600] {
        let started = Instant::now();
        let alive = Arc::new(AtomicI64::new(0));
        struct Guard([u64; 500], Arc<AtomicI64>);
        impl Drop for Guard {
            fn drop(&mut self) {
                self.1.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let heap = heap(&format!("die={die}"), Duration::from_secs(5));
        let mut values = Vec::new();
        for index in 0..512 {
            alive.fetch_add(1, Ordering::Relaxed);
            match heap.alloc(Guard([index; 500], alive.clone())) {
                Ok(value) => values.push(value),
                Err(error) => {
                    assert!(matches!(error.error, FarError::Pool(PoolError::ServerGone { .. })), "{error:?}");
                    break;
                }
            }
        }
        let (mut good, mut gone) = (0, 0);
        for (index, value) in values.iter().enumerate() {
            let scope = heap.enter();
            match value.get(&scope) {
                Ok(value) => {
                    assert_eq!(value.0, [index as u64; 500]);
                    good += 1;
                }
                Err(FarError::Pool(PoolError::ServerGone { .. })) => gone += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
        assert!(good >= values.len().min(100), "{good} of {} with die={die}", values.len());
        assert_eq!(good + gone, values.len());
        let kept = values.len() as i64;
        assert_eq!(alive.load(Ordering::Relaxed), kept);
        drop(values);
        let lost = heap.stats().lost_values as i64;
        assert_eq!(alive.load(Ordering::Relaxed), lost, "dropped once, or lost and counted");
        assert!(lost == 0 || lost + 100 <= kept, "{lost} of {kept}: what is near is dropped");
        heap.verify();
        assert!(started.elapsed() < Duration::from_secs(20), "no waiting for the dead");
    }
}

#[test]
fn corrupt_pages_are_errors_and_never_values() {
    let heap = heap("corrupt=0.2,seed=5", Duration::from_secs(5));
    let (values, error) = fill(&heap);
    assert_eq!(error, None);
    let (mut corrupt, mut random) = (0, Rng::with_seed(9));
    for _ in 0..2_000 {
        let index = random.usize(..values.len());
        let scope = heap.enter();
        match values[index].get(&scope) {
            Ok(value) => assert_eq!(*value, [index as u64; 512]),
            Err(FarError::Pool(PoolError::Corrupt { .. })) => corrupt += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(corrupt > 100, "{corrupt}");
    drop(values);
    heap.verify();
}

/// Four threads need room that only a silent pool could give; none of them keeps a scope.
#[test]
fn a_silent_pool_is_not_called_a_scope_that_is_held_too_long() {
    let heap = heap("delay=1h", Duration::from_millis(100));
    let errors: Vec<FarError> = std::thread::scope(|threads| {
        let fill_often = || {
            let mut values = Vec::new();
            let mut errors = Vec::new();
            for _ in 0..4 {
                let (more, error) = fill(&heap);
                values.extend(more);
                errors.extend(error);
            }
            errors
        };
        let fillers: Vec<_> = (0..4).map(|_| threads.spawn(fill_often)).collect();
        fillers.into_iter().flat_map(|filler| filler.join().unwrap()).collect()
    });
    assert!(errors.len() >= 8, "the pool gives no room: {errors:?}");
    let is_named = |error: &FarError| matches!(error, FarError::Pool(PoolError::TimedOut { .. }));
    assert!(errors.iter().all(is_named), "{errors:?}");
}

#[test]
fn lost_answers_are_errors_in_time_and_can_be_asked_again() {
    let patience = Duration::from_millis(30);
    let heap = heap("drop=0.05,seed=2", patience);
    let mut random = Rng::with_seed(3);
    let mut values = Vec::new();
    let mut late = 0;
    while values.len() < 400 {
        match heap.alloc([values.len() as u64; 512]) {
            Ok(value) => values.push(value),
            Err(error)
                if matches!(error.error, FarError::Pool(PoolError::TimedOut { .. }) | FarError::Stalled { .. }) =>
            {
                late += 1;
                assert!(late < 1_000);
            }
            Err(error) => panic!("{error:?}"),
        }
    }
    for _ in 0..500 {
        let index = random.usize(..values.len());
        let started = Instant::now();
        loop {
            let scope = heap.enter();
            match values[index].get(&scope) {
                Ok(value) => break assert_eq!(*value, [index as u64; 512]),
                Err(FarError::Pool(PoolError::TimedOut { .. }) | FarError::Stalled { .. }) => late += 1,
                Err(other) => panic!("{other:?}"),
            }
            assert!(started.elapsed() < Duration::from_secs(20));
        }
    }
    assert!(late > 0, "the test needs lost answers");
    drop(values);
    heap.verify();
}

/// A value of more pages than leave together is about to leave when it turns out that a write before it was lost.
#[test]
fn large_values_outlast_lost_answers() {
    fn in_the_end<R>(mut action: impl FnMut() -> Result<R, FarError>) -> R {
        let started = Instant::now();
        loop {
            match action() {
                Ok(result) => return result,
                Err(FarError::Pool(PoolError::TimedOut { .. }) | FarError::Stalled { .. }) => {}
                Err(other) => panic!("{other:?}"),
            }
            assert!(started.elapsed() < Duration::from_secs(60));
        }
    }
    let heap = heap("drop=0.02,seed=4", Duration::from_millis(10));
    let (mut small, mut large) = (Vec::new(), Vec::new());
    for _ in 0..60 {
        for _ in 0..4 {
            small.push((in_the_end(|| heap.alloc([0u64; 512]).map_err(|error| error.error)), 0));
        }
        large.push((in_the_end(|| heap.alloc([0u64; 12 * 512]).map_err(|error| error.error)), 0));
    }
    let mut random = Rng::with_seed(5);
    for step in 1..1_000 {
        for _ in 0..4 {
            let (value, twin) = &mut small[random.usize(..240)];
            assert_eq!(in_the_end(|| value.write(|value| core::mem::replace(value, [step; 512]))), [*twin; 512]);
            *twin = step;
        }
        let (value, twin) = &mut large[random.usize(..60)];
        assert_eq!(in_the_end(|| value.write(|value| core::mem::replace(value, [step; 12 * 512]))), [*twin; 12 * 512]);
        *twin = step;
    }
    drop((small, large));
    heap.verify();
}

#[test]
fn a_slow_pool_is_slow_and_nothing_else() {
    let heap = heap("delay=200us", Duration::from_secs(5));
    let (values, error) = fill(&heap);
    assert_eq!(error, None);
    std::thread::scope(|threads| {
        let start = |thread| {
            let (heap, values) = (&heap, &values);
            threads.spawn(move || {
                let mut random = Rng::with_seed(thread);
                for _ in 0..200 {
                    let index = random.usize(..values.len());
                    let scope = heap.enter();
                    assert_eq!(*values[index].get(&scope).unwrap(), [index as u64; 512]);
                }
            })
        };
        let handles: Vec<_> = (0..3).map(start).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    drop(values);
    heap.verify();
}

#[test]
fn wrong_arguments_and_absent_pools_are_errors() {
    assert!(Heap::builder().near(10).build().is_err());
    assert!(Heap::builder().far(0).build().is_err());
    assert!(Heap::builder().near(2 * MIB).near_max(MIB).build().is_err());
    let error = Heap::builder().pool("rdma://x").build().unwrap_err();
    assert!(error.to_string().contains("tcp://HOST:PORT"), "{error}");
}

/// A pool that is full takes nothing more, and everything in it can still be read, a value at a time, though all of near memory waits to
/// be written.
#[test]
fn a_full_pool_can_be_read() {
    for full in [1, 100, 250] {
        let heap = heap(&format!("full={full}"), Duration::from_secs(5));
        let is_full = |error| assert_eq!(error, FarError::Pool(PoolError::PoolFull { server: 0 }), "with full={full}");
        let (mut values, error) = fill(&heap);
        error.map_or_else(|| panic!("room for two MiB"), is_full);
        for value in &mut values {
            // What is near is changed, and so cannot leave.
            value.write(|value| value[1] = 7).unwrap_or_else(is_full);
        }
        heap.alloc([0u64; 512]).map_or_else(|error| is_full(error.error), |_| panic!("room for one more"));
        let mut random = Rng::with_seed(11);
        for step in 0..600 {
            let index = random.usize(..values.len());
            let seen = match step % 2 {
                0 => values[index].read(|value| (value[0], value[2])),
                _ => farfield::task::Executor::new(&heap)
                    .block_on(async { values[index].fetch(&heap.enter()).await.map(|value| (value[0], value[2])) }),
            };
            assert_eq!(seen, Ok((index as u64, index as u64)), "step {step} with full={full}");
        }
        println!("full={full}: {} values, {:?}", values.len(), heap.stats());
        // Who gives up values makes room for others.
        values.truncate(values.len() - 40);
        heap.alloc([0u64; 512]).map(drop).unwrap_or_else(|error| panic!("no room for one more: {:?}", error.error));
        drop(values);
        heap.verify();
    }
}

/// Elements of a vector that a pool loses are dropped once or counted as lost, whatever was going on.
#[test]
fn a_vector_whose_server_dies_keeps_its_books() {
    struct Counted(Arc<AtomicI64>, #[allow(dead_code, reason = "makes it larger")] [u64; 29]);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    for die in (1..4000).step_by(399) {
        let heap = heap(&format!("die={die}"), Duration::from_secs(5));
        let alive = Arc::new(AtomicI64::new(0));
        let new = || {
            alive.fetch_add(1, Ordering::Relaxed);
            Counted(alive.clone(), [7; 29])
        };
        let mut vec = FarVec::new();
        let mut failed = 0;
        for _ in 0..12_000 {
            failed += u64::from(vec.push(&heap.enter(), new()).is_err());
        }
        let len = vec.len();
        assert_eq!(len as u64 + failed, 12_000);
        for index in [0, len / 2, len - 1] {
            let scope = heap.enter();
            if vec.insert(&scope, index, new()).is_err() {
                failed += 1;
                assert_eq!(vec.len(), len);
            } else {
                let removed = vec.remove(&scope, index);
                failed += u64::from(removed.is_err());
                assert!(removed.is_err() || vec.len() == len);
            }
            vec.truncate(&scope, len).ok();
        }
        assert_eq!(alive.load(Ordering::Relaxed), vec.len() as i64, "elements that came out are dropped");
        drop(vec);
        let lost = heap.stats().lost_values as i64;
        assert_eq!(alive.load(Ordering::Relaxed), lost, "dropped once, or lost and counted, with die={die}");
        println!("die={die}: {failed} operations failed, {lost} elements lost");
        heap.verify();
    }
}
