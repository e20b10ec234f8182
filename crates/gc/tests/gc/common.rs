//! Test support: heaps, and numbers that repeat.

use farfield::Heap;
use farfield_gc::{GcError, GcHeap, Mutator};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

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

pub(crate) fn far_heap(near_mib: u64) -> Heap {
    let near = near_mib * MIB;
    Heap::builder().near(near).near_max(near).far(1 << 30).paranoid(true).build().unwrap()
}

pub(crate) fn heaps(near_mib: u64, limit_mib: u64) -> (Heap, GcHeap) {
    let heap = far_heap(near_mib);
    let gc = GcHeap::in_heap(&heap).limit(limit_mib * MIB).build().unwrap();
    (heap, gc)
}

/// Calls `action` until it needs no safepoint.
pub(crate) fn with_room<R>(
    m: &mut Mutator<'_>,
    mut action: impl FnMut(&Mutator<'_>) -> Result<R, GcError>,
) -> Result<R, GcError> {
    for _ in 0..8 {
        match action(m) {
            Err(GcError::SafepointDue | GcError::Far(farfield::FarError::NearFull)) => m.safepoint()?,
            other => return other,
        }
    }
    action(m)
}
