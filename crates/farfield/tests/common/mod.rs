//! What tests of the heap share.
#![allow(dead_code, unused_imports, unused_macros, reason = "each test file uses a part")]

pub(crate) mod budget;
pub(crate) mod run;
pub(crate) mod task;
pub(crate) mod twin;

pub(crate) use budget::assert_in_budget;
use farfield::{Builder, Heap, Plane};
pub(crate) use fastrand::Rng;
pub(crate) use run::{Over, is_deep, seed};

/// Share of a collection that is near where little is.
pub(crate) fn little_percent() -> u64 {
    if is_deep() { 2 } else { 5 }
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
