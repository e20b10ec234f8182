//! Test support: heaps, and numbers that repeat.

use farfield::Heap;
use farfield_gc::GcHeap;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const MIB: u64 = 1 << 20;

/// `FARFIELD_SEED`, or a fixed one; printed, so that a failure can be repeated.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("seed {seed} (FARFIELD_SEED={seed})");
    seed
}

/// Is it the deep tier that runs?
pub(crate) fn is_deep() -> bool {
    std::env::var("FARFIELD_DEEP").is_ok_and(|deep| deep == "1")
}

/// Says that it is over when it is dropped, also by a test that fails: other threads wait for that.
pub(crate) struct Over<'a>(pub(crate) &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(crate) fn far_heap(near_mib: u64) -> Heap {
    let near = near_mib * MIB;
    Heap::builder().near(near).near_max(near).far(1 << 30).paranoid(true).build().unwrap()
}

pub(crate) fn heaps(near_mib: u64, limit_mib: u64) -> (Heap, GcHeap) {
    let heap = far_heap(near_mib);
    let gc = GcHeap::in_heap(&heap).limit(limit_mib * MIB).build().unwrap();
    (heap, gc)
}
