//! Far memory in a tokio program. Dangers: a wake-up that a foreign scheduler misses, a value that leaves when its task changes threads,
//! tokio's threads waiting for each other through the heap.

use crate::common::{MIB, Rng, assert_in_budget, builder, seed};
use farfield::{FarBox, FarMap, FarVec, Heap};
use futures_util::TryStreamExt;
use std::future::ready;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinSet, LocalSet, spawn_local, yield_now};

fn heap(near: u64) -> Heap {
    let builder = builder().near(near).near_max(near).far(1 << 30).patience(Duration::from_secs(10));
    builder.pool("fault:delay=50us@ram:").paranoid(true).build().unwrap()
}

fn threads(threads: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(threads).build().unwrap()
}

fn filled(heap: &Heap, count: u64) -> Vec<FarBox<[u64; 512]>> {
    (0..count).map(|index| heap.alloc([index; 512]).unwrap()).collect()
}

/// Streams hold no scope between their batches, so their tasks move, too; several go through one vector.
#[test]
fn streams_run_on_many_threads() {
    let heap = heap(MIB);
    let mut vec = FarVec::new();
    // Neither do elements fill a page, nor batches the vector.
    vec.extend(&heap.enter(), (0..120_000u32).map(|number| [number; 9])).unwrap();
    let large: Arc<FarVec<[u64; 700]>> = Arc::new({
        let mut vec = FarVec::new();
        vec.extend(&heap.enter(), (0..300).map(|number| [number; 700])).unwrap();
        vec
    });
    let (vec, misses) = (Arc::new(vec), heap.stats().misses);
    let runtime = threads(3);
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..8u32 {
            let (vec, large) = (vec.clone(), large.clone());
            tasks.spawn(async move {
                let first = task * 1_001;
                let mut at = first;
                let mut batches = pin!(vec.stream(first as usize..119_999));
                while let Some(batch) = batches.try_next().await.unwrap() {
                    assert!(
                        batch.iter().zip(at..).all(|(element, number)| *element == [number; 9]) && !batch.is_empty()
                    );
                    at += batch.len() as u32;
                    yield_now().await;
                }
                assert_eq!(at, 119_999);
                let sum = large
                    .stream(..)
                    .try_fold(0, |sum, batch| ready(Ok(sum + batch.iter().map(|e| e[699]).sum::<u64>())));
                assert_eq!(sum.await.unwrap(), 299 * 150);
                assert!(pin!(vec.stream(7..7)).try_next().await.unwrap().is_none());
            });
        }
        while let Some(task) = tasks.join_next().await {
            task.unwrap();
        }
    });
    drop(runtime);
    let stats = heap.stats();
    assert!(stats.misses > misses && stats.prefetches_used > 0 && stats.pinned_bytes == 0, "{stats:?}");
    drop((vec, large));
    heap.verify();
}

/// Tasks hold no scope while they wait, so tokio moves them from thread to thread; what is pinned goes with them.
#[test]
fn tasks_on_many_threads_look_things_up_and_pin() {
    let heap = Arc::new(heap(2 * MIB));
    let values = Arc::new(filled(&heap, 1500));
    let map = Arc::new(FarMap::<str, [u8]>::new(&heap).unwrap());
    for number in 0..20_000u32 {
        map.insert(&heap.enter(), number.to_string().as_str(), &number.to_le_bytes().repeat(20)[..]).unwrap();
    }
    let runtime = threads(4);
    let seed = seed();
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..64 {
            let (heap, values, map) = (heap.clone(), values.clone(), map.clone());
            tasks.spawn(async move {
                let mut random = Rng::with_seed(seed ^ task << 32);
                for _ in 0..20 {
                    let number = random.usize(..20_000) as u32;
                    let key = number.to_string();
                    let found = heap
                        .fetch_with(|scope| Ok(map.get(scope, key.as_str())?.map(|value| value.len())))
                        .await
                        .unwrap();
                    assert_eq!(found, Some(80));
                    let index = random.usize(..values.len());
                    let pinned = values[index].fetch_pinned().await.unwrap();
                    yield_now().await;
                    assert_eq!(*pinned, [index as u64; 512]);
                }
            });
        }
        while let Some(task) = tasks.join_next().await {
            task.unwrap();
        }
    });
    drop(runtime);
    let stats = heap.stats();
    assert!(stats.misses > 1000 && stats.pinned_bytes == 0, "{stats:?}");
    // The threads were more tables; what has to leave for them leaves soon.
    assert_in_budget(&heap);
    drop((values, map));
    heap.verify();
}

/// Tasks that stay on their thread hold scopes, and references from them, while they wait.
#[test]
fn local_tasks_hold_scopes() {
    let heap = heap(2 * MIB);
    let values = Arc::new(filled(&heap, 1500));
    let runtime = Builder::new_current_thread().build().unwrap();
    let heap = Arc::new(heap);
    let local = LocalSet::new();
    for task in 0..16u64 {
        let (heap, values) = (heap.clone(), values.clone());
        let seed = seed();
        local.spawn_local(async move {
            let mut random = Rng::with_seed(seed ^ task << 32);
            for _ in 0..60 {
                let scope = heap.enter();
                let (one, two) = (random.usize(..values.len()), random.usize(..values.len()));
                let first = values[one].fetch(&scope).await.unwrap();
                let second = values[two].fetch(&scope).await.unwrap();
                yield_now().await;
                assert_eq!((first[3], second[400]), (one as u64, two as u64));
            }
            spawn_local(async {}).await.unwrap();
        });
    }
    runtime.block_on(local);
    assert_eq!(Arc::strong_count(&values), 1, "all tasks have ended");
    drop((runtime, values));
    heap.verify();
}

/// The future of `block_on` stays on its thread, on any runtime; and threads for blocking code wait as threads do.
#[test]
fn block_on_and_blocking_threads() {
    let heap = Arc::new(heap(MIB));
    let values = Arc::new(filled(&heap, 800));
    let runtime = threads(2);
    runtime.block_on(async {
        let scope = heap.enter();
        let batch = heap.fetch_many(&scope, &values[..16]).await.unwrap();
        assert!(batch.iter().enumerate().all(|(index, value)| value[8] == index as u64));
        let (other, owned) = (values.clone(), heap.clone());
        let read = tokio::task::spawn_blocking(move || {
            let scope = owned.enter();
            other[700].get(&scope).map(|value| value[0])
        });
        assert_eq!(read.await.unwrap(), Ok(700));
        assert_eq!(batch[15][511], 15);
    });
    drop(runtime);
    heap.verify();
}

/// What a task changes, it changes by a pin, or in a closure that begins again as long as something is far.
#[test]
fn tasks_on_many_threads_change_values() {
    let heap = Arc::new(heap(MIB));
    let runtime = threads(3);
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..12u64 {
            let heap = heap.clone();
            tasks.spawn(async move {
                let mut values: Vec<_> = (0..60).map(|index| heap.alloc([index; 512]).unwrap()).collect();
                let mut vec = FarVec::new();
                for step in 0..3000 {
                    heap.fetch_with(|scope| vec.push(scope, task * step).map_err(Into::into)).await.unwrap();
                }
                for (index, value) in values.iter_mut().enumerate() {
                    let mut value = value.fetch_pinned_mut().await.unwrap();
                    value[0] += task;
                    yield_now().await;
                    assert_eq!(value[0], index as u64 + task);
                    let at = index * 50;
                    drop(value);
                    let read = heap.fetch_with(|scope| vec.at(scope, at).copied()).await.unwrap();
                    assert_eq!(read, task * at as u64);
                }
                values.iter().map(|value| value.read(|value| value[0]).unwrap()).sum::<u64>()
            });
        }
        let mut sum = 0;
        while let Some(task) = tasks.join_next().await {
            sum += task.unwrap();
        }
        assert_eq!(sum, 12 * (0..60).sum::<u64>() + 60 * (0..12).sum::<u64>());
    });
    drop(runtime);
    heap.verify();
}
