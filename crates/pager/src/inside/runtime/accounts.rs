//! What the process and its job have near and far, and the memory that is our own.

use super::super::sync::Ordering;
use super::{Phase, Runtime};
use crate::control::believed;
use farfield_core::geometry::PAGE_BYTES;

impl Runtime {
    /// Charges process and job with `pages` more near pages; a negative number takes them off.
    pub fn charge(&self, pages: i64) {
        let bytes = pages * PAGE_BYTES as i64;
        self.slot().near_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.add_near(bytes);
    }

    fn add_near(&self, bytes: i64) {
        let control = self.control();
        let now = control.near_bytes.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes).max(0);
        if bytes > 0 && now as u64 > control.near_peak_bytes.load(Ordering::Relaxed) {
            control.near_peak_bytes.fetch_max(now as u64, Ordering::Relaxed);
        }
    }

    /// Charges process and job with `bytes` more of our own memory.
    pub fn add_meta(&self, bytes: i64) {
        if self.phase() != Phase::Off {
            self.slot().meta_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.control().meta_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.add_near(bytes);
        }
    }

    /// Sets the near bytes of this process to what was measured (dormant), and charges the growth
    /// of our heap.
    pub fn set_near(&self, bytes: i64) {
        let old = self.slot().near_bytes.swap(bytes, Ordering::Relaxed);
        self.add_near(bytes.wrapping_sub(old));
        self.settle_heap();
    }

    /// Returns the bytes that a child of a fork would have near: pages, and our own memory.
    pub fn copy_bytes(&self) -> i64 {
        let slot = self.slot();
        believed(&slot.near_bytes) + believed(&slot.meta_bytes)
    }

    /// Charges the job with a child that is about to be forked, or takes that back (negative).
    pub fn reserve(&self, bytes: i64) {
        self.add_near(bytes);
    }

    /// Takes over, in the child of a fork, the parent's `near` bytes of pages, which came with it.
    /// `reserved` bytes have been charged for the child.
    pub fn adopt(&self, near: i64, reserved: i64) {
        let heap = super::super::heap::HEAP_BYTES.load(Ordering::Relaxed);
        self.heap_charged.store(heap, Ordering::Relaxed);
        self.heap_expected.store(0, Ordering::Relaxed);
        let slot = self.slot();
        slot.near_bytes.store(near, Ordering::Relaxed);
        slot.meta_bytes.store(heap, Ordering::Relaxed);
        self.control().meta_bytes.fetch_add(heap, Ordering::Relaxed);
        self.reserve(near + heap - reserved);
    }

    /// Charges the growth of our heap before it happens, until `growth` 0 says that no growth is
    /// expected any more.
    pub fn expect_heap(&self, growth: i64) {
        let heap = super::super::heap::HEAP_BYTES.load(Ordering::Relaxed);
        self.heap_expected.store(if growth > 0 { heap + growth } else { 0 }, Ordering::Relaxed);
        self.settle_heap();
    }

    /// Charges the growth of our heap since the last call.
    pub fn settle_heap(&self) {
        let heap = super::super::heap::HEAP_BYTES.load(Ordering::Relaxed);
        let heap = heap.max(self.heap_expected.load(Ordering::Relaxed));
        let charged = self.heap_charged.swap(heap, Ordering::Relaxed);
        self.add_meta(heap - charged);
    }

    /// Charges process and job with `pages` more far pages; a negative number takes them off.
    pub fn charge_far(&self, pages: i64) {
        let bytes = pages * PAGE_BYTES as i64;
        self.slot().far_bytes.fetch_add(bytes, Ordering::Relaxed);
        let control = self.control();
        let now = control.far_bytes.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes).max(0);
        if bytes > 0 && now as u64 > control.far_peak_bytes.load(Ordering::Relaxed) {
            control.far_peak_bytes.fetch_max(now as u64, Ordering::Relaxed);
        }
    }

    /// Returns the near bytes of the job, and the limit. Our own tables count as near, but they
    /// cannot leave. The part of them beyond half of the limit (memory touched very sparsely) is
    /// not taken from the program's pages; the report shows it.
    pub fn near(&self) -> (i64, i64) {
        let control = self.control();
        let limit = self.config().near_limit();
        let excess = (believed(&control.meta_bytes) - limit / 2).max(0);
        (believed(&control.near_bytes), limit + excess)
    }

    /// Returns the bytes that the reclaim thread keeps free below the limit: 1/64 of it, but at
    /// least 1 MiB and at most 32 MiB.
    pub fn reserve_bytes(limit: i64) -> i64 {
        (limit / 64).clamp(1 << 20, 32 << 20)
    }
}
