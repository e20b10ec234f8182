//! Far memory in which nothing is any more: kept for what leaves next, and given back when that is enough.
//!
//! Dangers: a page that is used again shows what was in it before; far memory is never given back.

use crate::common::twin::steps;
use crate::common::{MIB, Rng, assert_in_budget, heap, seed};
use farfield::{FarBox, Heap};
use std::time::{Duration, Instant};

/// A value that says in each word which one it is.
enum Value {
    Small(FarBox<[u64; 8]>),
    Page(FarBox<[u64; 512]>),
    Large(FarBox<[u64; 2000]>),
}

impl Value {
    fn new(heap: &Heap, number: u64, kind: usize) -> Value {
        match kind {
            0..90 => Value::Small(heap.alloc([number; 8]).unwrap()),
            90..98 => Value::Page(heap.alloc([number; 512]).unwrap()),
            _ => Value::Large(heap.alloc([number; 2000]).unwrap()),
        }
    }

    fn check(&self, heap: &Heap, number: u64) {
        let scope = heap.enter();
        let words: &[u64] = match self {
            Value::Small(value) => value.get(&scope).unwrap(),
            Value::Page(value) => value.get(&scope).unwrap(),
            Value::Large(value) => value.get(&scope).unwrap(),
        };
        assert!(words.iter().all(|word| *word == number), "value {number} is {words:?}");
    }
}

/// Waits until the heap, which nobody uses, keeps nothing vacant.
fn wait_until_nothing_is_vacant(heap: &Heap) {
    let started = Instant::now();
    while heap.stats().vacant_pages > 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", heap.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Values come and go in waves, so that far pages are vacant, written over, and given back while others are read.
#[test]
fn overwritten_pages_never_show_old_contents() {
    let heap = heap(1);
    let mut random = Rng::with_seed(seed());
    let (mut values, mut number) = (Vec::<(u64, Value)>::new(), 0);
    let (mut vacant_most, mut rounds_used_again) = (0, 0);
    for _ in 0..steps(20) {
        let goal = [500, 8_000, 30_000][random.usize(..3)];
        let vacant = heap.stats().vacant_pages;
        while values.len() < goal {
            number += 1;
            values.push((number, Value::new(&heap, number, random.usize(..100))));
        }
        rounds_used_again += u64::from(heap.stats().vacant_pages < vacant);
        while values.len() > goal {
            values.swap_remove(random.usize(..values.len()));
        }
        for _ in 0..2_000 {
            let (number, value) = &values[random.usize(..values.len())];
            value.check(&heap, *number);
        }
        let stats = heap.stats();
        vacant_most = vacant_most.max(stats.vacant_pages);
        assert_in_budget(&heap);
        heap.verify();
    }
    for (number, value) in &values {
        value.check(&heap, *number);
    }
    drop(values);
    heap.verify();
    println!("at most {vacant_most} pages vacant; {:?}", heap.stats());
    assert!(vacant_most > 0 && rounds_used_again > 0 && heap.stats().discarded_pages > 0, "{:?}", heap.stats());
    wait_until_nothing_is_vacant(&heap);
    heap.verify();
}

/// A heap that churns keeps a little; one that nobody uses keeps nothing, however little it was.
#[test]
fn a_heap_that_idles_gives_everything_back() {
    let heap = heap(1);
    for pages in [3, 40, 3_000] {
        let values: Vec<_> = (0..pages).map(|number| Value::new(&heap, number, 95)).collect();
        // Everything leaves.
        let ballast: Vec<_> = (0..2 * MIB / 4096).map(|number| Value::new(&heap, number, 95)).collect();
        let written = heap.stats().written_pages;
        assert!(written >= pages);
        values[0].check(&heap, 0);
        drop(values);
        drop(ballast);
        wait_until_nothing_is_vacant(&heap);
        heap.verify();
    }
}
