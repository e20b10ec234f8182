//! Tasks look things up in collections. Dangers: a look-up that goes on where it should begin again, a page that leaves between two
//! attempts, an element that is taken out twice, a task that waits for ever.

use crate::common::twin::steps;
use crate::common::{MIB, Rng, assert_in_budget, builder, seed};
use farfield::collections::Index;
use farfield::task::Executor;
use farfield::{
    FarArray, FarBTreeMap, FarBytes, FarError, FarList, FarMap, FarQueue, FarStack, FarString, FarVec, Heap, PoolError,
};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

fn heap(faults: &str, near: u64) -> Heap {
    let builder = builder().near(near).near_max(near).far(1 << 30).patience(Duration::from_secs(10));
    builder.pool(format!("fault:{faults}@ram:")).paranoid(true).build().unwrap()
}

/// So many tasks at the same time, each with a random generator of its own.
fn in_tasks<'env, F: Future<Output = ()> + 'env>(heap: &'env Heap, tasks: u64, work: impl Fn(Rng) -> F) {
    let seed = seed();
    let executor = Executor::new(heap);
    let handles: Vec<_> = (0..tasks).map(|task| executor.spawn(work(Rng::with_seed(seed ^ task << 32)))).collect();
    for handle in handles {
        executor.block_on(handle).unwrap();
    }
    drop(executor);
    assert_in_budget(heap);
    heap.verify();
}

fn index_of(index: Index) {
    let heap = heap("delay=20us", 3 * MIB);
    let map: FarMap<str, [u8]> = FarMap::builder().index(index).build(&heap).unwrap();
    let mut twin = HashMap::new();
    for number in 0..14_000u32 {
        let (key, value) =
            (format!("key {}", number.wrapping_mul(0x9e37_79b9)), vec![number as u8; number as usize % 300 * 3]);
        map.insert(&heap.enter(), key.as_str(), value.as_slice()).unwrap();
        twin.insert(key, value);
    }
    let keys: Vec<&String> = twin.keys().collect();
    let (heap_ref, map, twin, keys) = (&heap, &map, &twin, &keys);
    in_tasks(heap_ref, 8, |mut random| async move {
        for _ in 0..steps(80) {
            let scope = heap_ref.enter();
            let key = keys[random.usize(..keys.len())];
            let first = map.fetch(&scope, key.as_str()).await.unwrap().unwrap();
            assert_eq!(map.fetch(&scope, &key[1..]).await.unwrap(), None);
            let other = keys[random.usize(..keys.len())];
            let second = map.fetch(&scope, other.as_str()).await.unwrap();
            assert_eq!((first, second), (&twin[key][..], Some(&twin[other][..])));
        }
    });
    // Everything is met once.
    in_tasks(heap_ref, 3, |_| async move {
        let (mut walk, mut met) = (map.walk(), 0);
        loop {
            let scope = heap_ref.enter();
            let Some(entries) = walk.fetch_next(&scope).await.unwrap() else { break };
            met += entries.len();
            assert!(entries.into_iter().all(|(key, value)| twin[key] == value));
        }
        assert_eq!(met, twin.len());
    });
    assert!(heap.stats().misses > 500, "{:?}", heap.stats());
}

#[test]
fn maps_with_a_near_index() {
    index_of(Index::Near);
}

#[test]
fn maps_with_a_far_index() {
    index_of(Index::Far);
}

#[test]
fn trees() {
    let heap = heap("delay=20us", MIB);
    let mut map = FarBTreeMap::new();
    let mut twin = BTreeMap::new();
    let mut random = Rng::with_seed(seed());
    for _ in 0..24_000 {
        let key = random.u64(..) % 100_000;
        map.insert(&heap.enter(), key, [key; 12]).unwrap();
        twin.insert(key, [key; 12]);
    }
    let (heap, map, twin) = (&heap, &map, &twin);
    in_tasks(heap, 16, |mut random| async move {
        for _ in 0..steps(100) {
            let scope = heap.enter();
            let key = random.u64(..) % 100_000;
            assert_eq!(map.fetch(&scope, &key).await.unwrap(), twin.get(&key));
        }
    });
    in_tasks(heap, 2, |_| async move {
        let mut expected = twin.iter();
        let mut scope = heap.enter();
        // Another scope of the thread keeps this one from being renewed as far as it would like; it is long enough.
        map.fetch_each(&mut scope, |key, value| assert_eq!(expected.next(), Some((key, value)))).await.unwrap();
        assert_eq!(expected.next(), None);
    });
    // The same by `fetch_with`: several look-ups at once, and ranges.
    in_tasks(heap, 4, |mut random| async move {
        for _ in 0..steps(60) {
            let from = random.u64(..) % 90_000;
            let sum = heap
                .fetch_with(|scope| {
                    let mut sum = 0;
                    for entry in map.range(scope, from..from + 200)? {
                        sum += entry?.1[2];
                    }
                    Ok(sum)
                })
                .await
                .unwrap();
            assert_eq!(sum, twin.range(from..from + 200).map(|(key, _)| key).sum::<u64>());
        }
    });
    assert_eq!(heap.stats().pinned_bytes, 0);
}

#[test]
fn vectors_are_scanned_by_tasks() {
    let heap = heap("delay=50us", 2 * MIB);
    let mut vec = FarVec::new();
    vec.extend(&heap.enter(), 0..1_500_000u64).unwrap();
    let executor = Executor::new(&heap);
    executor.block_on(async {
        let mut scope = heap.enter();
        let mut scan = vec.scan_mut(&mut scope);
        while let Some(chunk) = scan.fetch_chunk().await.unwrap() {
            chunk.iter_mut().for_each(|element| *element += 1);
        }
    });
    let stats = heap.stats();
    assert!(stats.prefetch_coverage() > 0.9, "walks of tasks are recognised too: {stats:?}");
    drop(executor);
    let (heap, vec) = (&heap, &vec);
    in_tasks(heap, 4, |mut random| async move {
        let from = random.usize(..1_000_000);
        let mut scope = heap.enter();
        let mut scan = vec.scan_in(&mut scope, from..from + 200_000).once();
        let mut expected = from as u64 + 1..;
        while let Some(chunk) = scan.fetch_chunk().await.unwrap() {
            assert!(chunk.iter().copied().eq(expected.by_ref().take(chunk.len())));
        }
        assert_eq!(expected.start, from as u64 + 200_001);
    });
}

/// A change that walks through more than a scope may hold is not taken back in its middle for what is far.
#[test]
fn elements_move_by_one_place_in_tasks() {
    let heap = heap("seed=1", MIB);
    let mut vec = FarVec::new();
    let mut twin: Vec<u64> = (0..300_000).collect();
    vec.extend(&heap.enter(), twin.iter().copied()).unwrap();
    let mut random = Rng::with_seed(seed());
    Executor::new(&heap).block_on(async {
        for value in 0..12 {
            let at = random.usize(..100_000);
            heap.fetch_with(|scope| vec.insert(scope, at, value).map_err(FarError::from)).await.unwrap();
            twin.insert(at, value);
            let at = random.usize(..100_000);
            assert_eq!(heap.fetch_with(|scope| vec.remove(scope, at)).await, Ok(twin.remove(at)));
        }
        let mut scope = heap.enter();
        let (mut scan, mut at) = (vec.scan(&mut scope), 0);
        while let Some(chunk) = scan.fetch_chunk().await.unwrap() {
            assert!(*chunk == twin[at..at + chunk.len()]);
            at += chunk.len();
        }
    });
    heap.verify();
}

#[test]
fn batches_of_far_values() {
    let heap = heap("delay=50us", 2 * MIB);
    let values: Vec<_> = (0..8_000u64).map(|index| heap.alloc([index; 64]).unwrap()).collect();
    let check = |batch: Vec<&[u64; 64]>, next: &mut u64| {
        for value in batch {
            assert_eq!(*value, [*next; 64]);
            *next += 1;
        }
    };
    let (mut scope, mut next) = (heap.enter(), 0);
    let mut batches = heap.batches(&mut scope, &values[..5_003], 50);
    while let Some(batch) = batches.next_batch().unwrap() {
        check(batch, &mut next);
    }
    assert!(batches.next_batch().unwrap().is_none());
    assert_eq!(next, 5_003);
    drop(scope);
    let (heap, values) = (&heap, &values);
    in_tasks(heap, 3, |_| async move {
        let (mut scope, mut next) = (heap.enter(), 0);
        let mut batches = heap.batches(&mut scope, values, 30);
        while let Some(batch) = batches.fetch_batch().await.unwrap() {
            check(batch, &mut next);
        }
        assert_eq!(next, 8_000);
    });
    assert!(heap.stats().prefetches_used > 500, "{:?}", heap.stats());
}

#[test]
fn chains() {
    let heap = heap("delay=30us", MIB);
    let (mut list, mut queue, mut stack) = (FarList::new(), FarQueue::new(), FarStack::new());
    for number in 0..3_000u64 {
        let scope = heap.enter();
        list.push_back(&scope, [number; 32]).unwrap();
        queue.push(&scope, (number, String::from("queue"), [0; 30])).unwrap();
        stack.push(&scope, [number; 32]).unwrap();
    }
    let executor = Executor::new(&heap);
    let listed = executor.spawn(async {
        let (mut scope, mut next) = (heap.enter(), 0);
        let check = |element: &[u64; 32]| {
            assert_eq!(*element, [next; 32]);
            next += 1;
        };
        list.fetch_each(&mut scope, check).await.unwrap();
        assert_eq!(next, 3_000);
    });
    let queued = executor.spawn(async {
        for number in 0..3_000 {
            let scope = heap.enter();
            let popped = queue.fetch_pop(&scope).await.unwrap().unwrap();
            assert_eq!((popped.0, popped.1.as_str()), (number, "queue"));
        }
        assert!(queue.fetch_pop(&heap.enter()).await.unwrap().is_none());
    });
    let stacked = executor.spawn(async {
        for number in (0..3_000).rev() {
            // A change that comes last, without a scope while it waits.
            assert_eq!(heap.fetch_with(|scope| stack.pop(scope)).await.unwrap(), Some([number; 32]));
        }
    });
    for task in [listed, queued, stacked] {
        executor.block_on(task).unwrap();
    }
    drop(executor);
    drop((list, queue, stack));
    heap.verify();
}

#[test]
fn arrays_bytes_and_strings() {
    let heap = heap("delay=30us", MIB);
    let mut table = FarArray::from_fn(&heap.enter(), [200, 2000], |[row, column]| row * column).unwrap();
    let texts: Vec<(FarBytes, FarString)> = (0..300)
        .map(|n| {
            let scope = heap.enter();
            let bytes = FarBytes::copy_of(&scope, &vec![n as u8; 5_000 + n]).unwrap();
            (bytes, FarString::copy_of(&scope, &format!("{n}").repeat(500)).unwrap())
        })
        .collect();
    let executor = Executor::new(&heap);
    executor.block_on(async {
        for row in 0..200 {
            let scope = heap.enter();
            *table.fetch_mut(&scope, [row, 7]).await.unwrap().unwrap() += 1;
            assert_eq!(table.fetch(&scope, [row, 2000]).await, Ok(None));
        }
        for (n, (bytes, text)) in texts.iter().enumerate() {
            let scope = heap.enter();
            assert!(bytes.fetch(&scope).await.unwrap().iter().all(|byte| *byte == n as u8));
            assert_eq!(text.fetch(&scope).await.unwrap(), format!("{n}").repeat(500));
            assert_eq!(table.fetch(&scope, [n % 200, 7]).await, Ok(Some(&(n % 200 * 7 + 1))));
        }
    });
    for row in 0..200 {
        assert_eq!(table.write([row, 7], |element| core::mem::replace(element, row)), Ok(Some(row * 7 + 1)));
        assert_eq!(table.read([row, 7], |element| *element), Ok(Some(row)));
    }
    assert_eq!(table.read([200, 0], |element| *element), Ok(None));
    drop(executor);
    heap.verify();
}

/// Dropped while it waits, a look-up leaves nothing behind; the page comes all the same.
#[test]
fn lookups_are_given_up() {
    let heap = heap("delay=100us", MIB);
    let mut vec = FarVec::new();
    vec.extend(&heap.enter(), 0..600_000u64).unwrap();
    let mut pending = 0;
    for index in (0..500_000).step_by(9_973) {
        let scope = heap.enter();
        let mut fetch = pin!(vec.fetch(&scope, index));
        pending += u32::from(fetch.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let mut with = pin!(heap.fetch_with(|scope| vec.get(scope, index + 4_000).map(|element| element.copied())));
        pending += u32::from(with.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert!(pending > 20, "{pending}");
    heap.verify();
    assert_eq!(heap.stats().pinned_bytes, 0);
    let scope = heap.enter();
    assert_eq!(vec.get(&scope, 9_973), Ok(Some(&9_973)));
}

#[test]
fn lookups_get_the_errors_of_the_pool() {
    let heap = heap("die=900", MIB);
    let mut map = FarBTreeMap::new();
    let mut made = 0u64;
    while made < 40_000 && map.insert(&heap.enter(), made, [made; 8]).is_ok() {
        made += 1;
    }
    let (good, gone) = (Cell::new(0), Cell::new(0));
    let executor = Executor::new(&heap);
    executor.block_on(async {
        for key in (0..made).step_by(997) {
            let held = {
                let scope = heap.enter();
                map.fetch(&scope, &key).await.map(|value| value.copied())
            };
            let alone = heap.fetch_with(|scope| Ok(map.get(scope, &key)?.copied())).await;
            for result in [held, alone] {
                match result {
                    Ok(value) => {
                        assert_eq!(value, Some([key; 8]));
                        good.set(good.get() + 1);
                    }
                    Err(FarError::Pool(PoolError::ServerGone { .. })) => gone.set(gone.get() + 1),
                    Err(other) => panic!("{other:?}"),
                }
            }
        }
    });
    assert!(good.get() > 0 && gone.get() > 0, "{} {}", good.get(), gone.get());
    drop((executor, map));
    heap.verify();
}
