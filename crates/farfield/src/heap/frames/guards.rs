//! How a paranoid heap catches uses of frames that hold nothing.
//!
//! A frame that comes back is overwritten, and looked at before it is given out again: whoever wrote there meanwhile
//! had no right to. One in a few is protected as well, which stops such a use where it happens, and reads too. To
//! protect all of them took more than half of the time of our tests.

use crate::heap::memory::Reserved;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;

/// Of so many runs that come back, one is protected.
const PROTECT_EVERY: u32 = 8;

/// Content of a frame that came back.
const POISONED: [u8; PAGE_BYTES] = [0xDB; PAGE_BYTES];

/// Free frames of a paranoid heap.
pub(super) struct Guards {
    /// By frame: whether any access to it stops the program.
    is_protected: Box<[AtomicBool]>,
    /// Number of runs that came back.
    returned: AtomicU32,
}

impl Guards {
    /// Protects the whole arena.
    ///
    /// # Safety
    /// Nobody has a frame yet.
    pub(super) unsafe fn new(arena: &Reserved, count: u32) -> Guards {
        // SAFETY: passed on to the caller.
        unsafe { arena.set_access(0, count as usize * PAGE_BYTES, false) };
        Guards { is_protected: (0..count).map(|_| AtomicBool::new(true)).collect(), returned: AtomicU32::new(0) }
    }

    /// Allows access to frames that are given out.
    ///
    /// # Panics
    /// If one that was not protected has been written to since it came back.
    pub(super) fn open(&self, arena: &Reserved, first: u32, count: u32) {
        let mut begin = first;
        for protected in self.frames(first, count).chunk_by(|one, other| is_set(one) == is_set(other)) {
            let (at, len) = (begin as usize * PAGE_BYTES, protected.len() * PAGE_BYTES);
            if is_set(&protected[0]) {
                // SAFETY: allows, forbids nothing.
                unsafe { arena.set_access(at, len, true) };
                protected.iter().for_each(|frame| frame.store(false, Ordering::Relaxed));
            } else {
                // SAFETY: readable, as it is not protected, and initialised when it came back. Only the caller has it.
                let bytes = unsafe { core::slice::from_raw_parts(arena.base().add(at), len) };
                for (page, frame) in bytes.chunks_exact(PAGE_BYTES).zip(begin..) {
                    assert!(page == POISONED, "frame {frame} was written to after it came back");
                }
            }
            begin += protected.len() as u32;
        }
    }

    /// Overwrites frames that come back, and protects some of them.
    ///
    /// # Safety
    /// They lie in the arena, and nobody but the caller reaches them.
    pub(super) unsafe fn close(&self, arena: &Reserved, first: FrameId, count: u32) {
        let (at, len) = (first.0 as usize * PAGE_BYTES, count as usize * PAGE_BYTES);
        // SAFETY: passed on to the caller.
        unsafe { core::ptr::write_bytes(arena.base().add(at), POISONED[0], len) };
        if self.returned.fetch_add(1, Ordering::Relaxed).is_multiple_of(PROTECT_EVERY) {
            // SAFETY: passed on to the caller.
            unsafe { self.protect(arena, first.0, count) };
        }
    }

    /// Protects free frames, whatever they hold.
    ///
    /// # Safety
    /// Nobody reaches them.
    pub(super) unsafe fn protect(&self, arena: &Reserved, first: u32, count: u32) {
        // SAFETY: passed on to the caller.
        unsafe { arena.set_access(first as usize * PAGE_BYTES, count as usize * PAGE_BYTES, false) };
        self.frames(first, count).iter().for_each(|frame| frame.store(true, Ordering::Relaxed));
    }

    fn frames(&self, first: u32, count: u32) -> &[AtomicBool] {
        &self.is_protected[first as usize..(first + count) as usize]
    }
}

/// Frames change hands under the lock of those that are free, which orders this.
fn is_set(frame: &AtomicBool) -> bool {
    frame.load(Ordering::Relaxed)
}
