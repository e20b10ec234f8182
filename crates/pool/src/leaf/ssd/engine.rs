//! Engine of the transfers of a lane: io_uring, many at a time, or calls, one at a time. Also the
//! memory that they use.

use crate::bit_runs::{mask, run_of};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::ring::{FileTransfer, Ring, TransferDirection};
use farfield_os::{Errno, disk, memory};

/// Number of pages that the transfers of one lane have together.
const ARENA_PAGES: usize = 256;

/// Page-aligned memory of one lane that the device reads and writes. Callers' buffers would do, but
/// a transfer that comes too late would write into memory that its owner has back.
pub(super) struct Arena {
    start: usize,
    /// Bit for each page, set while the page is free.
    free: [u64; ARENA_PAGES / 64],
}

impl Arena {
    pub(super) fn new() -> Result<Arena, Errno> {
        let start = memory::map_anonymous(ARENA_PAGES * PAGE_BYTES)?;
        Ok(Arena { start, free: [u64::MAX; ARENA_PAGES / 64] })
    }

    /// Takes up to `wanted` neighbouring pages; returns the first and their number.
    pub(super) fn take(&mut self, wanted: u64) -> Option<(usize, u64)> {
        let (index, (shift, count)) = self
            .free
            .iter()
            .enumerate()
            .filter_map(|(index, bits)| Some((index, run_of(*bits, wanted)?)))
            .max_by_key(|(index, (_, count))| (*count, core::cmp::Reverse(*index)))?;
        self.free[index] &= !mask(shift, count);
        Some((index * 64 + shift as usize, count))
    }

    pub(super) fn give(&mut self, first: usize, count: u64) {
        if count > 0 {
            let mask = mask(first as u64 % 64, count);
            debug_assert!(self.free[first / 64] & mask == 0);
            self.free[first / 64] |= mask;
        }
    }

    /// Lets the ring keep the arena in place.
    ///
    /// # Safety
    /// The ring is dropped before the arena.
    pub(super) unsafe fn register(&self, ring: &mut Ring) {
        // SAFETY: mapped as long as `self`.
        unsafe { ring.register_memory(self.start, ARENA_PAGES * PAGE_BYTES) };
    }

    pub(super) fn address(&self, page: usize) -> usize {
        assert!(page < ARENA_PAGES);
        self.start + page * PAGE_BYTES
    }

    /// Returns the bytes of one page.
    pub(super) fn page(&mut self, page: usize) -> &mut [u8; PAGE_BYTES] {
        // SAFETY: inside the mapping, initialised by the kernel; the caller took it and no transfer
        // uses it, so it is ours alone, as `&mut self` is.
        unsafe { &mut *(self.address(page) as *mut [u8; PAGE_BYTES]) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`. The kernel keeps pages that a transfer still uses until that has
        // ended.
        let _ = unsafe { memory::munmap(self.start, ARENA_PAGES * PAGE_BYTES) };
    }
}

/// Engine that carries out the transfers of a lane.
pub(super) enum Engine {
    Uring(Ring),
    Calls {
        file: i32,
        /// Result of the last call, until it is taken.
        arrived: Option<(u64, Result<usize, Errno>)>,
    },
}

impl Engine {
    /// Checks whether there is room for one transfer more.
    pub(super) fn has_room(&self) -> bool {
        match self {
            // The ring has room for as many as the lane has chunks.
            Engine::Uring(_) => true,
            Engine::Calls { arrived, .. } => arrived.is_none(),
        }
    }

    /// Begins a transfer. It is under way at the latest after [`Engine::start`].
    ///
    /// # Safety
    /// Its memory is in the arena of the lane, and is used by nothing else until the transfer has
    /// arrived.
    pub(super) unsafe fn begin(&mut self, transfer: FileTransfer) {
        let FileTransfer { tag, direction: way, address, len, offset } = transfer;
        match self {
            Engine::Uring(ring) => {
                // SAFETY: passed on to the caller.
                let queued = unsafe { ring.queue(transfer) };
                assert!(queued, "the ring has an entry for each chunk");
            }
            Engine::Calls { file, arrived } => {
                // SAFETY: passed on to the caller.
                let result = unsafe {
                    match way {
                        TransferDirection::Read => disk::read_at(*file, address, len as usize, offset),
                        TransferDirection::Write => disk::write_at(*file, address, len as usize, offset),
                    }
                };
                *arrived = Some((tag, result));
            }
        }
    }

    pub(super) fn start(&mut self) {
        if let Engine::Uring(ring) = self {
            // The kernel is given again next time what it does not take now.
            let _ = ring.start();
        }
    }

    pub(super) fn take(&mut self) -> Option<(u64, Result<usize, Errno>)> {
        match self {
            Engine::Uring(ring) => ring.take(),
            Engine::Calls { arrived, .. } => arrived.take(),
        }
    }

    /// Sleeps until something arrives, for `timeout` at most.
    pub(super) fn wait(&self, timeout: Duration) {
        match self {
            Engine::Uring(ring) => ring.wait(timeout),
            Engine::Calls { .. } => farfield_os::process::sleep(timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arena_gives_each_page_once() {
        let mut arena = Arena::new().unwrap();
        let mut taken = Vec::new();
        for round in 0..20 {
            while let Some((first, count)) = arena.take(1 + round % 16) {
                (first..first + count as usize).for_each(|page| arena.page(page)[0] = 1);
                taken.push((first, count));
            }
            let mut pages: Vec<usize> =
                taken.iter().flat_map(|&(first, count)| first..first + count as usize).collect();
            pages.sort_unstable();
            assert!(pages.into_iter().eq(0..ARENA_PAGES));
            taken.drain(..).for_each(|(first, count)| arena.give(first, count));
        }
    }
}
