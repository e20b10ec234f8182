//! Test support: heaps, and how tests run.

#[path = "../../../farfield/tests/common/budget.rs"]
mod budget;
#[path = "../../../farfield/tests/common/run.rs"]
mod run;

pub(crate) use budget::assert_in_budget;
use farfield::Heap;
use farfield_gc::GcHeap;
pub(crate) use run::{Over, is_deep, seed};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn far_heap(near_mib: u64) -> Heap {
    far_heap_at("ram:", near_mib)
}

pub(crate) fn far_heap_at(pool: &str, near_mib: u64) -> Heap {
    let near = near_mib * MIB;
    Heap::builder().near(near).near_max(near).far(1 << 30).paranoid(true).pool(pool).build().unwrap()
}

pub(crate) fn heaps(near_mib: u64, limit_mib: u64) -> (Heap, GcHeap) {
    let heap = far_heap(near_mib);
    let gc = GcHeap::in_heap(&heap).limit(limit_mib * MIB).build().unwrap();
    (heap, gc)
}
