//! The state of each frame that is not in its page's frame word.

use crate::heap::memory::Zeroed;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Metadata of a frame and of the page in it. Written by the owner of the frame.
pub(crate) struct FrameInfo {
    /// Page within the heap, plus one; 0 if the frame is free. Not set for pages inside a unit of
    /// several.
    pub(super) page: AtomicU32,
    /// Number of pins of the unit that begins here; see `pins`.
    pub(super) pins: AtomicU32,
    /// Checksum of the page's far copy.
    sum: AtomicU64,
    /// Epoch in which the page became Cooling. Only the evictor uses it.
    cooled: AtomicU64,
}

// SAFETY: atomics, for which zero is a value.
unsafe impl Zeroed for FrameInfo {}

/// Bytes that a frame costs beside its page.
pub(crate) const INFO_BYTES: usize = size_of::<FrameInfo>();

impl FrameInfo {
    /// Notes that the unit of this page has moved in. The evictor reads this only after it has seen
    /// the frame word that is stored afterwards.
    pub(crate) fn moved_in(&self, page: u32) {
        self.page.store(page + 1, Ordering::Relaxed);
    }

    /// Stores the checksum of the page's far copy.
    pub(crate) fn set_sum(&self, sum: u64) {
        self.sum.store(sum, Ordering::Relaxed);
    }

    pub(crate) fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    pub(crate) fn page(&self) -> Option<u32> {
        self.page.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Checks whether the unit in this frame must stay.
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
