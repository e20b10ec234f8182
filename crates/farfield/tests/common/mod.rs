//! What tests of the heap share.
#![allow(dead_code, unused_imports, unused_macros, reason = "each test file uses a part")]

pub(crate) mod task;
pub(crate) mod twin;

use farfield::{Builder, Heap, Plane, Stats};

/// A small random generator; its seed is printed by the test that uses it.
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

pub(crate) const MIB: u64 = 1 << 20;

/// The plane under test: the one that `FARFIELD_PLANE` names, or the page plane. `cargo x test` runs the program once for each.
pub(crate) fn plane() -> Plane {
    match std::env::var("FARFIELD_PLANE").as_deref() {
        Ok("object") => Plane::Object,
        Ok("hybrid") => Plane::Hybrid,
        Ok("page") | Err(_) => Plane::Page,
        Ok(other) => panic!("FARFIELD_PLANE is page, object or hybrid, not {other:?}"),
    }
}

/// Of a heap on the plane under test. Small values can come alone however small they are, where they can at all.
pub(crate) fn builder() -> Builder {
    Heap::builder().plane(plane()).alone_above(0)
}

/// A paranoid heap with so many MiB near.
pub(crate) fn heap(near_mib: u64) -> Heap {
    builder().near(near_mib * MIB).near_max(near_mib * MIB).far(1 << 30).paranoid(true).build().unwrap()
}

/// The heap holds to its budget.
pub(crate) fn assert_in_budget(stats: Stats) {
    assert!(stats.near_bytes <= stats.near_limit_bytes, "{stats:?}");
}
