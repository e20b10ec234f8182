//! What is known of each frame.

use crate::heap::memory::Zeroed;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What is known of the page in a frame. Written by whoever owns the frame.
pub(crate) struct FrameInfo {
    /// Page within the heap, plus one; 0 if the frame is free. Pages inside a unit of several are not entered.
    pub(super) page: AtomicU32,
    /// Pins of the unit that begins here; see `pins`.
    pub(super) pins: AtomicU32,
    /// Checksum of the far copy.
    sum: AtomicU64,
    /// Epoch in which the page became Leaving. Only the evictor uses it.
    cooled: AtomicU64,
}

// SAFETY: atomics, for which zero is a value.
unsafe impl Zeroed for FrameInfo {}

/// What frames cost beside their bytes.
pub(crate) const INFO_BYTES: usize = size_of::<FrameInfo>();

impl FrameInfo {
    /// The unit of this page has moved in. The evictor reads what is said here only after it has seen the frame word that is
    /// stored afterwards.
    pub(crate) fn moved_in(&self, page: u32) {
        self.page.store(page + 1, Ordering::Relaxed);
    }

    /// Checksum of the far copy.
    pub(crate) fn set_sum(&self, sum: u64) {
        self.sum.store(sum, Ordering::Relaxed);
    }

    pub(crate) fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    pub(crate) fn page(&self) -> Option<u32> {
        self.page.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Must the unit in this frame stay?
    pub(crate) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }

    pub(crate) fn cooled(&self) -> u64 {
        self.cooled.load(Ordering::Relaxed)
    }

    pub(crate) fn set_cooled(&self, epoch: u64) {
        self.cooled.store(epoch, Ordering::Relaxed);
    }
}
