//! Many values at a time, values without a scope, values that are pinned. Dangers: a batch that is one miss after the other, a value at
//! the wrong place of it, a pinned value that moves, pins that outlast what they were for.

use crate::common::twin::steps;
use crate::common::{MIB, Rng, assert_in_budget, builder, heap, seed};
use farfield::collections::Index;
use farfield::task::Executor;
use farfield::{FarBox, FarError, FarMap, FarVec, Heap, PoolError};
use std::collections::HashMap;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(10);

/// A heap of this near memory over a pool with these faults.
fn faulty(faults: &str, near: u64, patience: Duration) -> Heap {
    let builder = builder().near(near).near_max(near).far(1 << 30).patience(patience).paranoid(true);
    builder.pool(format!("fault:{faults}@ram:")).build().unwrap()
}

/// So many values of a page each.
fn filled(heap: &Heap, count: usize) -> Vec<FarBox<[u64; 512]>> {
    (0..count as u64).map(|index| heap.alloc([index; 512]).unwrap()).collect()
}

#[test]
fn a_batch_is_asked_for_before_anything_is_waited_for() {
    let heap = faulty("delay=1ms", 8 * MIB, LONG);
    let mut values = filled(&heap, 4096);
    // What was made last is near, and its room is free at once.
    values.truncate(3840);
    let misses = heap.stats().misses;
    {
        let scope = heap.enter();
        let mut batch = pin!(heap.fetch_many(&scope, &values[..64]));
        let first = batch.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(heap.stats().misses, misses + 64, "all at the first look");
        let seen = match first {
            Poll::Pending => Executor::new(&heap).block_on(batch).unwrap(),
            // On a busy machine that was a long look.
            Poll::Ready(seen) => seen.unwrap(),
        };
        for (index, value) in seen.into_iter().enumerate() {
            assert_eq!(*value, [index as u64; 512]);
        }
    }
    assert_eq!(heap.stats().misses, misses + 64, "none of them twice");
    heap.verify();
}

#[test]
fn batches_are_in_order_whatever_is_near() {
    let heap = faulty("delay=20us", 2 * MIB, LONG);
    let mut values = filled(&heap, 2000);
    let mut twin: Vec<u64> = (0..2000).collect();
    let mut random = Rng::with_seed(seed());
    for round in 0..steps(150) {
        let from = random.usize(..values.len() - 40);
        let scope = heap.enter();
        if round % 3 == 0 {
            let batch = heap.get_many_mut(&scope, &mut values[from..from + 24]).unwrap();
            for (value, twin) in batch.into_iter().zip(&mut twin[from..]) {
                *twin = random.u64(..);
                value.fill(*twin);
            }
            continue;
        }
        // Some twice.
        let wanted: Vec<usize> = (0..24).map(|_| from + random.usize(..40)).collect();
        let batch = heap.get_many(&scope, wanted.iter().map(|index| &values[*index])).unwrap();
        assert_eq!(batch.len(), wanted.len());
        for (value, index) in batch.into_iter().zip(wanted) {
            assert_eq!(*value, [twin[index]; 512]);
        }
    }
    assert!(heap.get_many(&heap.enter(), &values[..0]).unwrap().is_empty());
    assert_in_budget(&heap);
    heap.verify();
}

#[test]
fn a_batch_that_a_scope_cannot_hold_is_an_error_and_the_heap_goes_on() {
    let heap = faulty("seed=1", MIB, LONG);
    let values = filled(&heap, 1000);
    let scope = heap.enter();
    assert_eq!(heap.get_many(&scope, &values).unwrap_err(), FarError::NearFull);
    drop(scope);
    let scope = heap.enter();
    assert_eq!(heap.get_many(&scope, &values[500..516]).unwrap()[15][0], 515);
    drop(scope);
    heap.verify();
}

#[test]
fn values_of_another_heap_are_refused() {
    let (one, two) = (heap(1), heap(1));
    let values = [one.alloc(5).unwrap(), two.alloc(6).unwrap()];
    let scope = two.enter();
    assert_eq!(two.get_many(&scope, &values), Err(FarError::OtherHeap));
    assert_eq!(two.get_many(&scope, &values[1..]), Ok(vec![&6]));
}

#[test]
fn batches_get_the_errors_of_their_pages() {
    for die in [2000, 2100, 2300] {
        let heap = faulty(&format!("die={die}"), MIB, LONG);
        let mut values = Vec::new();
        while values.len() < 2000
            && let Ok(value) = heap.alloc([values.len() as u64; 512])
        {
            values.push(value);
        }
        let (mut good, mut gone) = (0, 0);
        for (batch, values) in values.chunks(10).enumerate() {
            let scope = heap.enter();
            match heap.get_many(&scope, values) {
                Ok(seen) => {
                    good += 1;
                    for (index, value) in seen.into_iter().enumerate() {
                        assert_eq!(*value, [(batch * 10 + index) as u64; 512]);
                    }
                }
                Err(FarError::Pool(PoolError::ServerGone { .. })) => gone += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
        assert!(gone > 0 && good > 0, "{good} and {gone} with die={die}");
        heap.verify();
    }
}

#[test]
fn keys_are_looked_up_together() {
    let heap = faulty("delay=1ms", 8 * MIB, LONG);
    let map: FarMap<u64, [u64; 512]> = FarMap::new(&heap).unwrap();
    for key in 0..4096 {
        map.insert(&heap.enter(), key, [key; 512]).unwrap();
    }
    // What was made last is near, and its room is free at once.
    for key in 3840..4096 {
        map.remove(&heap.enter(), &key).unwrap();
    }
    let misses = heap.stats().misses;
    {
        let scope = heap.enter();
        let mut found = pin!(heap.fetch_many_with(&scope, 0..64, |key| map.get(&scope, key)));
        let first = found.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(heap.stats().misses, misses + 64, "all at the first look");
        let found = match first {
            Poll::Pending => Executor::new(&heap).block_on(found).unwrap(),
            Poll::Ready(found) => found.unwrap(),
        };
        assert!((0..64).zip(found).all(|(key, value)| *value.unwrap() == [key; 512]));
    }
    heap.verify();
}

#[test]
fn look_ups_are_in_order_whatever_is_near() {
    for index in [Index::Near, Index::Far] {
        let heap = faulty("delay=20us", 2 * MIB, LONG);
        let map: FarMap<u64, [u64; 32]> = FarMap::builder().index(index).build(&heap).unwrap();
        let mut twin = HashMap::new();
        let mut random = Rng::with_seed(seed());
        for _ in 0..steps(250) {
            for _ in 0..60 {
                let (key, value) = (random.usize(..20_000) as u64, random.u64(..));
                map.insert(&heap.enter(), key, [value; 32]).unwrap();
                twin.insert(key, value);
            }
            // Some are absent, and some asked for twice.
            let keys: Vec<u64> = (0..40).map(|_| random.usize(..20_000) as u64).collect();
            let scope = heap.enter();
            let found = if random.usize(..2) == 0 {
                map.get_many(&scope, &keys).unwrap()
            } else {
                heap.get_many_with(&scope, &keys, |key| map.get(&scope, *key)).unwrap()
            };
            assert_eq!(found.len(), keys.len());
            for (key, value) in keys.iter().zip(found) {
                assert_eq!(value, twin.get(key).map(|value| [*value; 32]).as_ref());
            }
        }
        assert!(heap.stats().misses > 100, "{:?}", heap.stats());
        assert_in_budget(&heap);
        heap.verify();
    }
}

#[test]
fn look_ups_that_fail_say_so_and_the_heap_goes_on() {
    let heap = faulty("seed=1", MIB, LONG);
    let map: FarMap<u64, [u64; 512]> = FarMap::new(&heap).unwrap();
    for key in 0..1000 {
        map.insert(&heap.enter(), key, [key; 512]).unwrap();
    }
    let scope = heap.enter();
    assert_eq!(heap.get_many_with(&scope, 0..1000, |key| map.get(&scope, key)).unwrap_err(), FarError::NearFull);
    drop(scope);
    let scope = heap.enter();
    assert_eq!(map.get_many(&scope, &Vec::from_iter(0..1000)).unwrap_err(), FarError::NearFull);
    drop(scope);
    let scope = heap.enter();
    let found = heap.get_many_with(&scope, 990..1002, |key| map.get(&scope, key)).unwrap();
    assert_eq!(found.iter().map(|value| value.map(|value| value[0])).collect::<Vec<_>>(), {
        (990..1002).map(|key| (key < 1000).then_some(key)).collect::<Vec<_>>()
    });
    let refused = heap.get_many_with(&scope, 0..3, |key| if *key == 1 { Err(FarError::FarFull) } else { Ok(*key) });
    assert_eq!(refused, Err(FarError::FarFull));
    drop(scope);
    heap.verify();
}

#[test]
fn look_ups_of_a_batch_inside_one_that_does_not_wait() {
    let heap = faulty("delay=20us", MIB, LONG);
    let map: FarMap<u64, [u64; 512]> = FarMap::new(&heap).unwrap();
    for key in 0..1000 {
        map.insert(&heap.enter(), key, [key; 512]).unwrap();
    }
    let misses = heap.stats().misses;
    let keys = [3u64, 700, 5, 1001];
    let sum = |scope: &farfield::Scope<'_>| {
        let found = map.get_many(scope, &keys)?;
        Ok(found.into_iter().flatten().map(|value| value[0]).sum::<u64>())
    };
    assert_eq!(Executor::new(&heap).block_on(heap.fetch_with(sum)).unwrap(), 708);
    assert!(heap.stats().misses > misses);
    heap.verify();
}

#[test]
fn values_are_read_and_written_without_a_scope() {
    let heap = heap(1);
    let mut boxes: Vec<_> = (0..20_000u64).map(|index| heap.alloc([index; 8]).unwrap()).collect();
    let mut vec = FarVec::new();
    vec.extend(&heap.enter(), (0..200_000u64).map(|index| [index; 2])).unwrap();
    for step in 0..20_000 {
        let index = step * 7919 % boxes.len();
        assert_eq!(boxes[index].write(|value| core::mem::replace(&mut value[3], 1)), Ok(index as u64));
        assert_eq!(boxes[index].read(|value| value[2] + value[3]), Ok(index as u64 + 1));
        assert_eq!(vec.write(index, |element| element[0] += 1), Ok(Some(())));
        assert_eq!(vec.read(index, |element| *element), Ok(Some([index as u64 + 1, index as u64])));
        assert_eq!(vec.read_once(index + 20_000, |element| element[0]), Ok(Some(index as u64 + 20_000)));
        assert_eq!(boxes[index].read_once(|value| value[0]), Ok(index as u64));
    }
    assert_eq!(vec.read(200_000, |_| ()), Ok(None));
    assert_eq!(FarVec::<u64>::new().write(0, |_| ()), Ok(None));
    // What is read may end its heap.
    let far = heap.alloc(1u64).unwrap();
    drop((boxes, vec));
    heap.verify();
    let mut heap = Some(heap);
    let ended = far.read(|value| {
        heap = None;
        *value
    });
    assert_eq!(ended, Ok(1));
}

#[test]
fn values_that_are_read_once_leave_first() {
    let heap = heap(4);
    let values = filled(&heap, 3000);
    let hot = &values[..400];
    let misses = |action: &dyn Fn()| {
        let before = heap.stats().misses;
        action();
        heap.stats().misses - before
    };
    let read_hot = || hot.iter().for_each(|value| assert_eq!(value.read(|value| value[0] < 400), Ok(true)));
    read_hot();
    let streamed = misses(&|| {
        // Not those that are near since they were made.
        for (index, value) in values.iter().enumerate().take(2000).skip(400) {
            assert_eq!(value.read_once(|value| value[9]), Ok(index as u64));
        }
    });
    assert!(streamed > 1500, "{streamed}");
    assert_eq!(misses(&read_hot), 0, "{:?}", heap.stats());
    // Every second one is called cold, and goes; the others stay.
    let (cold, warm) = (|| hot.iter().step_by(2), || hot.iter().skip(1).step_by(2));
    cold().for_each(FarBox::cold);
    values[400..700].iter().for_each(|value| assert_eq!(value.read(|value| value[0] >= 400), Ok(true)));
    let read = |value: &FarBox<[u64; 512]>| assert_eq!(value.read(|value| value[0] < 400), Ok(true));
    let warm_gone = misses(&|| warm().for_each(read));
    let cold_gone = misses(&|| cold().for_each(read));
    assert!(warm_gone < 20 && cold_gone > 180, "{warm_gone} and {cold_gone} of 200: {:?}", heap.stats());
}

/// Every frame without a page is poisoned and cannot be accessed.
#[test]
fn pinned_values_do_not_move() {
    let heap = heap(1);
    let small: Vec<_> = (0..60_000u64).map(|index| heap.alloc([index; 8]).unwrap()).collect();
    let large: Vec<_> = (0..20u64).map(|index| heap.alloc([index; 2000]).unwrap()).collect();
    let mut random = Rng::with_seed(seed());
    let mut churn = || {
        for _ in 0..5_000 {
            let index = random.usize(..small.len());
            assert_eq!(small[index].read(|value| value[7]), Ok(index as u64));
        }
    };
    for (round, large) in large.iter().enumerate().take(8) {
        let first = round * 1000;
        let pins: Vec<_> = small[first..].iter().step_by(500).take(20).map(|value| value.pin().unwrap()).collect();
        let big = large.pin().unwrap();
        let addresses: Vec<*const [u64; 8]> = pins.iter().map(|pin| &raw const **pin).collect();
        assert!(heap.stats().pinned_bytes >= 4 * 4096, "{:?}", heap.stats());
        std::thread::scope(|threads| {
            // A reference, for any thread.
            threads.spawn(|| assert_eq!((pins[3][1], big[1999]), (first as u64 + 1500, round as u64)));
            churn();
        });
        for (index, (pin, address)) in pins.iter().zip(addresses).enumerate() {
            assert_eq!((**pin, &raw const **pin), ([(first + index * 500) as u64; 8], address));
        }
        assert_in_budget(&heap);
    }
    assert_eq!(heap.stats().pinned_bytes, 0);
    let before = heap.stats().misses;
    churn();
    assert!(heap.stats().misses > before);
    heap.verify();
}

#[test]
fn pinned_values_are_changed_and_what_is_changed_is_kept() {
    let heap = heap(1);
    let mut values = filled(&heap, 1000);
    {
        let mut pinned = values[5].pin_mut().unwrap();
        pinned[0] = 77;
    }
    let (one, others) = values.split_at_mut(1);
    let mut pinned = one[0].pin_mut().unwrap();
    for (index, value) in others.iter().enumerate() {
        pinned[index % 512] += 1;
        value.read(|_| ()).unwrap();
    }
    assert_eq!(pinned.iter().sum::<u64>(), 999);
    drop(pinned);
    for value in others {
        value.read(|_| ()).unwrap();
    }
    assert_eq!(values[0].read(|value| value.iter().sum()), Ok(999u64));
    assert_eq!(values[5].read(|value| value[0]), Ok(77));
    heap.verify();
}

#[test]
fn half_of_the_near_memory_can_be_pinned() {
    let heap = heap(2);
    let values = filled(&heap, 2000);
    let mut pins = Vec::new();
    let error = loop {
        match values[pins.len()].pin() {
            Ok(pin) => pins.push(pin),
            Err(error) => break error,
        }
    };
    assert_eq!(error, FarError::PinsFull);
    assert!((200..=256).contains(&pins.len()), "{} of 512 pages", pins.len());
    assert_eq!(heap.stats().pinned_bytes, pins.len() as u64 * 4096);
    // The other half does all the work.
    for (index, value) in values.iter().enumerate() {
        assert_eq!(value.read(|value| value[1]), Ok(index as u64));
    }
    assert_eq!(pins.iter().map(|pin| pin[0]).sum::<u64>(), (0..pins.len() as u64).sum());
    // A second pin of the same costs nothing; one of another is possible as soon as one goes.
    pins.push(values[0].pin().unwrap());
    pins.swap_remove(1);
    pins.push(values[1999].pin().unwrap());
    assert_eq!(values[1998].pin().unwrap_err(), FarError::PinsFull);
    // Lowered below what is pinned: those stay, and when they go so does the memory.
    heap.set_near(MIB);
    assert!(pins.iter().all(|pin| pin[0] == pin[511]));
    drop(pins);
    for (index, value) in values.iter().enumerate() {
        assert_eq!(value.read(|value| value[1]), Ok(index as u64));
    }
    assert_eq!(heap.stats().pinned_bytes, 0);
    heap.verify();
}

#[test]
fn a_forgotten_pin_ends_with_its_segment() {
    let heap = heap(1);
    let values = filled(&heap, 500);
    std::mem::forget(values[3].pin().unwrap());
    for value in &values {
        value.read(|_| ()).unwrap();
    }
    assert_eq!(heap.stats().pinned_bytes, 4096);
    drop(values);
    assert_eq!(heap.stats().pinned_bytes, 0);
    let values = filled(&heap, 500);
    for value in &values {
        value.read(|_| ()).unwrap();
    }
    heap.verify();
}

/// Tasks that hold no scope may be sent; they may even be given up.
#[test]
fn tasks_pin() {
    let heap = faulty("delay=50us", 2 * MIB, LONG);
    let mut values = filled(&heap, 2000);
    fn sent<F: Future + Send>(future: F) -> F {
        future
    }
    let (one, others) = values.split_at_mut(1);
    let executor = Executor::new(&heap);
    executor.block_on(async {
        let mut first = sent(one[0].fetch_pinned_mut()).await.unwrap();
        for (index, value) in others.iter().enumerate() {
            {
                let mut early = pin!(sent(value.fetch_pinned()));
                let _ = early.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            }
            let pinned = sent(value.fetch_pinned()).await.unwrap();
            first[0] += pinned[1] - index as u64;
        }
        assert_eq!(first[0], 1999);
    });
    drop(executor);
    assert_eq!(heap.stats().pinned_bytes, 0);
    heap.verify();
    // Too many at a time are told so.
    let pins: Vec<_> = Executor::new(&heap).block_on(async {
        let mut pins = Vec::new();
        for value in &values {
            pins.push(value.fetch_pinned().await);
        }
        pins
    });
    assert!(pins.iter().any(|pin| matches!(pin, Err(FarError::PinsFull))));
    assert!(pins.iter().flatten().count() > 200);
}

#[test]
fn vectors_have_elements_for_tasks() {
    let heap = faulty("delay=30us", 2 * MIB, LONG);
    let mut vec = FarVec::new();
    vec.extend(&heap.enter(), 0..2_000_000u64).unwrap();
    let executor = Executor::new(&heap);
    let mut random = Rng::with_seed(seed());
    executor.block_on(async {
        for _ in 0..1_000 {
            let index = random.usize(..vec.len());
            let scope = heap.enter();
            *vec.fetch_mut(&scope, index).await.unwrap().unwrap() += 1;
            let first = vec.fetch(&scope, index).await.unwrap().unwrap();
            let other = random.usize(..vec.len());
            vec.fetch(&scope, other).await.unwrap();
            assert!(*first > index as u64);
        }
    });
    executor.block_on(async {
        let scope = heap.enter();
        assert_eq!(vec.fetch(&scope, 2_000_000).await, Ok(None));
        assert_eq!(vec.fetch_mut(&scope, 2_000_000).await, Ok(None));
    });
    // Tasks side by side: all are asked for at the first look, or wait for room, or for what was asked for ahead of need.
    let asked = || heap.stats().misses + heap.stats().throttled;
    let stats = heap.stats();
    let ahead = stats.prefetches - stats.prefetches_used - stats.prefetches_unused;
    let before = stats.misses + stats.throttled;
    let scope = heap.enter();
    let mut tasks: Vec<_> = (0..24).map(|at| Box::pin(vec.fetch(&scope, at * 70_000 + 35_000))).collect();
    let looks = tasks.iter_mut().map(|task| task.as_mut().poll(&mut Context::from_waker(Waker::noop())));
    let far = looks.filter(Poll::is_pending).count() as u64;
    assert!(far > 12, "{far}");
    assert!(asked() - before + ahead >= far, "{} and {ahead} for {far}", asked() - before);
    drop(tasks);
    drop(scope);
    heap.verify();
}
