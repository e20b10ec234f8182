//! The hybrid plane: pages that were used whole come whole, values of others alone. What holds on each plane is tested on this one, too, by
//! `heap_hybrid`. Dangers: the path never changes, or never back; a page comes whole while values are taken out of it; what comes whole is
//! written again though nobody changed it; what is too small to come alone does so, or is mistaken for what can.

use crate::common::twin::steps;
use crate::common::{MIB, Rng, assert_in_budget, seed};
use farfield::{Builder, FarBox, FarBytes, FarError, Heap, Plane, PoolError, Stats};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn builder(near: u64) -> Builder {
    mixed(near).alone_above(0)
}

/// Small values come with their page, larger ones may come alone.
fn mixed(near: u64) -> Builder {
    Heap::builder().near(near).near_max(near).far(1 << 30).paranoid(true).plane(Plane::Hybrid)
}

type Value = [u64; 8];

/// Values of 64 bytes in a page, beside their tags.
const PER_PAGE: usize = 60;

/// Everything small leaves.
fn send_away(heap: &Heap) {
    let pages = heap.stats().near_limit_bytes / 4096 * 2;
    drop((0..pages).map(|index| heap.alloc([index; 512]).unwrap()).collect::<Vec<_>>());
}

fn far_values(heap: &Heap, count: usize) -> Vec<FarBox<Value>> {
    let values = (0..count as u64).map(|index| heap.alloc([index; 8]).unwrap()).collect();
    send_away(heap);
    values
}

/// Reads these, which are all far, each in a scope of its own; what that cost.
fn read<'a>(heap: &Heap, values: impl Iterator<Item = (usize, &'a FarBox<Value>)>) -> (u64, u64, u64) {
    let before = heap.stats();
    for (index, value) in values {
        assert_eq!(*value.get(&heap.enter()).unwrap(), [index as u64; 8]);
    }
    let cost = |what: fn(Stats) -> u64| what(heap.stats()) - what(before);
    (cost(|stats| stats.misses), cost(|stats| stats.whole_pages), cost(|stats| stats.fetched_bytes))
}

#[test]
fn objects_used_together_come_as_a_page_and_leave_unwritten() {
    let heap = builder(2 * MIB).build().unwrap();
    let values = far_values(&heap, 20_000);
    let pages = values.len().div_ceil(PER_PAGE) as u64;
    for _ in 0..3 {
        // A few may have stayed near, or left while they were being read.
        let (misses, whole, bytes) = read(&heap, values.iter().enumerate());
        assert!(misses <= pages + pages / 3 && whole >= pages * 2 / 3, "{misses} misses, {whole} pages of {pages}");
        assert!(bytes <= misses * 4096, "{bytes}");
        send_away(&heap);
    }
    let stats = heap.stats();
    assert!(stats.clean_pages >= pages, "{stats:?}");
    drop(values);
    heap.verify();
}

#[test]
fn objects_used_alone_come_alone_and_later_as_a_page() {
    let heap = builder(2 * MIB).car_threshold(0.8).build().unwrap();
    let values = far_values(&heap, 20_000);
    let pages = (values.len() / PER_PAGE) as u64;
    let some = || values.iter().enumerate().step_by(PER_PAGE);
    let others = || values.iter().enumerate().skip(7).step_by(PER_PAGE);
    // They were made together; it takes a look to know better.
    let (misses, whole, _) = read(&heap, some());
    assert!(whole >= pages * 2 / 3 && misses - whole <= pages / 10, "{misses} misses, {whole} pages of {pages}");
    send_away(&heap);
    // Another value of each page: alone. They come to lie together.
    let (misses, whole, bytes) = read(&heap, others());
    assert!(misses >= pages * 2 / 3 && whole <= pages / 10, "{misses} misses, {whole} pages of {pages}");
    assert_eq!(bytes, whole * 4096 + (misses - whole) * 64);
    send_away(&heap);
    let (misses, whole, _) = read(&heap, others());
    assert!(misses <= pages / 4 && whole >= 2, "{misses} misses, {whole} pages of {pages}");
    drop(values);
    heap.verify();
}

/// Counts by path, and the share of paths as it is now.
#[test]
fn stats_tell_the_paths_apart() {
    let heap = builder(2 * MIB).car_threshold(0.8).build().unwrap();
    let values = far_values(&heap, 20_000);
    let pages = (values.len() / PER_PAGE) as u64;
    let stats = heap.stats();
    assert!(stats.pages_to_come_whole >= pages * 2 / 3 && stats.value_pages <= pages + pages / 5, "{stats:?}");
    assert!(stats.pages_to_come_whole <= stats.value_pages, "{stats:?}");
    // Whole, then alone: one value of each page, and another.
    read(&heap, values.iter().enumerate().step_by(PER_PAGE));
    send_away(&heap);
    let after = heap.stats();
    assert!(after.pages_to_come_whole <= pages / 3, "{after:?}");
    read(&heap, values.iter().enumerate().skip(7).step_by(PER_PAGE));
    let after = heap.stats();
    assert_eq!(after.object_misses + after.whole_pages, after.misses, "{after:?}");
    assert!(after.object_misses >= pages * 2 / 3, "{after:?}");
    drop(values);
    heap.verify();
    let stats = heap.stats();
    // What this thread or the evacuator still fills.
    assert!(stats.pages_to_come_whole == 0 && stats.value_pages <= 3, "{stats:?}");
}

#[test]
fn the_threshold_decides() {
    for (share, comes_whole) in [(0.0, true), (0.4, true), (0.6, false), (1.0, false)] {
        let heap = builder(2 * MIB).car_threshold(share).build().unwrap();
        let values = far_values(&heap, 6_000);
        // Every other value.
        read(&heap, values.iter().enumerate().step_by(2).take(2_000));
        send_away(&heap);
        let (_, whole, _) = read(&heap, values.iter().enumerate().skip(1).step_by(2).take(2_000));
        assert_eq!(whole > 0, comes_whole, "{share}: {whole} pages came whole");
        drop(values);
        heap.verify();
    }
    for wrong in [-0.1, 1.1, f64::NAN] {
        assert!(builder(MIB).car_threshold(wrong).build().is_err());
    }
}

/// Without a fixed threshold: when values are wanted at random, few pages come whole, though each page was used from end to end when it was
/// filled, and no more values are missed than with a threshold that only pages reach of which all was used. When they are wanted in order, they come whole again.
#[test]
fn the_heap_adapts_to_how_values_are_used() {
    let mut random = Rng::with_seed(seed());
    let mut misses_at_random = Vec::new();
    for threshold in [Some(0.8), None] {
        let mut builder = builder(MIB);
        if let Some(share) = threshold {
            builder = builder.car_threshold(share);
        }
        let heap = builder.build().unwrap();
        let values = far_values(&heap, 25_000);
        let mut at_random = |count: usize| {
            let order: Vec<usize> = (0..count).map(|_| random.usize(..values.len())).collect();
            read(&heap, order.into_iter().map(|index| (index, &values[index])))
        };
        at_random(25_000);
        let (misses, whole, _) = at_random(25_000);
        assert!(whole < misses / 10, "{threshold:?}: {whole} pages among {misses} misses at random");
        misses_at_random.push(misses);
        for _ in 0..4 {
            read(&heap, values.iter().enumerate());
        }
        let (misses, whole, _) = read(&heap, values.iter().enumerate());
        assert!(whole >= 200 && misses < 2_500, "{threshold:?}: {misses} misses, {whole} pages in order");
        let stats = heap.stats();
        assert!(stats.access_rates.iter().sum::<u64>() >= stats.left_to_come_whole, "{stats:?}");
        assert!(stats.early_misses > 0 && stats.early_misses < stats.misses, "{stats:?}");
        drop(values);
        heap.verify();
    }
    let [fixed, adapted] = misses_at_random[..] else { unreachable!() };
    assert!(adapted < fixed / 10 * 11, "{adapted} misses, fixed {fixed}");
}

/// Of pages that come whole, values that were used by two in sixty: in a program that reads everything in turn that is still better than two misses.
#[test]
fn pages_of_which_little_is_used_come_whole_if_near_memory_is_worth_little() {
    let heap = builder(MIB).build().unwrap();
    let values = far_values(&heap, 25_000);
    for _ in 0..4 {
        // Two values of each page; what is left of near memory holds less than half of the pages.
        let (misses, whole, _) = read(&heap, values.iter().enumerate().step_by(PER_PAGE / 2));
        assert!(misses - whole <= misses / 10, "{whole} pages among {misses} misses");
    }
    drop(values);
    heap.verify();
}

/// Threads read and change values of the same pages, some in order and some at random, so that pages come whole while values are taken out
/// of them, in a pool that fails now and then.
#[test]
fn pages_and_values_come_at_the_same_time() {
    let seed = seed();
    let faults = format!("fault:seed={seed},corrupt=0.01@ram:");
    let heap = builder(MIB + MIB / 2).pool(faults).patience(Duration::from_secs(20)).build().unwrap();
    let values: Vec<FarBox<[AtomicU64; 8]>> =
        (0..20_000).map(|_| heap.alloc(std::array::from_fn(|_| AtomicU64::new(0))).unwrap()).collect();
    let sums: Vec<AtomicU64> = values.iter().map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|threads| {
        let start = |thread: u64| {
            let (heap, values, sums) = (&heap, &values, &sums);
            threads.spawn(move || {
                let mut random = Rng::with_seed(seed + thread);
                for _ in 0..steps(300) {
                    let first = random.usize(..values.len() - 200);
                    let (count, step) = if random.usize(..2) == 0 { (200, 1) } else { (10, 17) };
                    for index in (first..).step_by(step).take(count) {
                        let scope = heap.enter();
                        match values[index].get(&scope) {
                            Ok(value) => {
                                let before: Vec<u64> = value.iter().map(|word| word.load(Ordering::Relaxed)).collect();
                                assert!(before.iter().all(|word| *word <= 4 << 20), "{before:?}");
                                if thread.is_multiple_of(2) {
                                    for word in value {
                                        word.fetch_add(1, Ordering::Relaxed);
                                    }
                                    sums[index].fetch_add(1, Ordering::Relaxed);
                                }
                            }
                            Err(FarError::Pool(PoolError::Corrupt { .. })) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            })
        };
        let handles: Vec<_> = (0..4).map(start).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    for (value, sum) in values.iter().zip(&sums) {
        let sum = sum.load(Ordering::Relaxed);
        let scope = heap.enter();
        let value = loop {
            match value.get(&scope) {
                Ok(value) => break value,
                Err(error) => assert!(matches!(error, FarError::Pool(PoolError::Corrupt { .. })), "{error}"),
            }
        };
        assert!(value.iter().all(|word| word.load(Ordering::Relaxed) == sum));
    }
    let stats = heap.stats();
    println!("{stats:?}");
    assert!(stats.whole_pages > 0 && stats.misses > stats.whole_pages, "{stats:?}");
    assert_in_budget(&heap);
    drop(values);
    heap.verify();
}

/// Neither handle nor tag, and a far address of their own, which what moves has not.
#[test]
fn small_values_come_with_their_page() {
    let check = |builder: Builder, moves: [bool; 3]| {
        let heap = builder.build().unwrap();
        let (tiny, small) = (heap.alloc([1u8]).unwrap(), heap.alloc([2u64; 4]).unwrap());
        let larger = heap.alloc([3u8; 33]).unwrap();
        let ranges = [heap.far_range(&tiny), heap.far_range(&small), heap.far_range(&larger)];
        assert_eq!(ranges.map(|range| range.is_none()), moves);
    };
    check(mixed(MIB), [false, false, true]);
    check(mixed(MIB).car_threshold(0.8), [false, false, true]);
    check(mixed(MIB).alone_above(31), [false, true, true]);
    check(mixed(MIB).alone_above(0), [true; 3]);
    check(mixed(MIB).alone_above(usize::MAX), [false; 3]);
    check(mixed(MIB).alone_above(0).plane(Plane::Page), [false; 3]);
    check(mixed(MIB).plane(Plane::Object), [true; 3]);
}

#[test]
fn values_that_cannot_come_alone_cost_no_tables() {
    let tables = |above: usize| {
        let heap = mixed(2 * MIB).alone_above(above).build().unwrap();
        let values = far_values(&heap, 20_000);
        read(&heap, values.iter().enumerate());
        heap.stats().table_bytes
    };
    let (with, without) = (tables(63), tables(64));
    assert!(without + 20_000 * 8 <= with, "{without} bytes of tables without handles, {with} with them");
}

/// Texts of all sizes, so that those that can come alone and those that cannot are used, changed and freed among each other.
#[test]
fn values_that_can_come_alone_live_with_those_that_cannot() {
    let mut random = Rng::with_seed(seed());
    let heap = mixed(MIB).build().unwrap();
    let text = |random: &mut Rng| vec![random.usize(..256) as u8; 1 + random.usize(..160)];
    let mut twins: Vec<Vec<u8>> = (0..40_000).map(|_| text(&mut random)).collect();
    let mut texts: Vec<FarBytes> = twins.iter().map(|twin| FarBytes::copy_of(&heap.enter(), twin).unwrap()).collect();
    for _ in 0..steps(60_000) {
        let at = random.usize(..twins.len());
        let scope = heap.enter();
        assert_eq!(texts[at].get(&scope).unwrap(), twins[at]);
        match random.usize(..4) {
            0 => {
                twins[at] = text(&mut random);
                texts[at] = FarBytes::copy_of(&scope, &twins[at]).unwrap();
            }
            1 => {
                texts[at].get_mut(&scope).unwrap()[0] ^= 1;
                twins[at][0] ^= 1;
            }
            _ => {}
        }
    }
    assert!(texts.iter().zip(&twins).all(|(text, twin)| text.get(&heap.enter()).unwrap() == twin));
    let stats = heap.stats();
    assert!(stats.object_misses > 1_000 && stats.misses > stats.object_misses + stats.whole_pages + 1_000, "{stats:?}");
    assert_in_budget(&heap);
    heap.verify();
    drop(texts);
    heap.verify();
}
