//! The place where a function runs, as far as the function sees it.

use crate::{Fault, Fence};
use core::future::Future;
use core::ops::Deref;
use core::time::Duration;
use farfield_core::lock::{LockReply, LockRequest};

/// Most bytes of one access.
pub const RANGE_BYTES_MAX: usize = 64 * 1024;

/// The place where a function runs: the bytes of one region, and time. Offsets count from the start
/// of the region. Bytes that were never written are zeros.
///
/// Buffers belong to the place: a function that is dropped while it waits leaves nothing that could
/// be written to later.
///
/// Two accesses that change the same bytes at the same time have a race, as with any operation of
/// the pool. Where one server that runs functions keeps the region, functions lose neither each
/// other's bytes nor each other's changes of a word, wherever they run: the server changes parts of
/// pages and words. A function that writes whole pages must own them whole.
pub trait Place {
    /// Bytes that were read; the buffer goes back to the place when this is dropped.
    type Bytes<'p>: Deref<Target = [u8]>
    where
        Self: 'p;

    /// Returns the size of the region in bytes.
    fn region_bytes(&self) -> u64;

    /// Reads `N` bytes.
    fn read<const N: usize>(&self, offset: u64) -> impl Future<Output = Result<[u8; N], Fault>>;

    /// Reads a range of at most [`RANGE_BYTES_MAX`] bytes.
    fn read_range(&self, offset: u64, len: usize) -> impl Future<Output = Result<Self::Bytes<'_>, Fault>>;

    /// Reads `N` bytes from each offset into the element of `into` at the same index, all reads in
    /// flight at once.
    fn read_many<const N: usize>(
        &self,
        offsets: &[u64],
        into: &mut [[u8; N]],
    ) -> impl Future<Output = Result<(), Fault>>;

    /// Reads as [`Place::read_many`] does, values that do not go beyond the end of their page. The
    /// place may leave the comparison with checksums to [`Place::matches`], so that a page of which
    /// much is read is compared once.
    fn load_many<const N: usize>(
        &self,
        offsets: &[u64],
        into: &mut [[u8; N]],
    ) -> impl Future<Output = Result<(), Fault>> {
        self.read_many(offsets, into)
    }

    /// Returns the checksums that `count` pages should have, from the one at this offset on. To be
    /// called before loading from them. The sums have a meaning at this place only.
    fn sums(&self, _offset: u64, _count: usize) -> impl Future<Output = Result<Vec<u64>, Fault>> {
        async { Ok(Vec::new()) }
    }

    /// Checks whether the bytes [loaded](Place::load_many) from these pages are those that were
    /// stored. The loads must come after the pages' [sums](Place::sums) were asked for. If the
    /// bytes differ, somebody has written there, or the pages are corrupt, as a read will show.
    fn matches(&self, _offset: u64, _sums: &[u64]) -> impl Future<Output = Result<bool, Fault>> {
        async { Ok(true) }
    }

    /// Writes at most [`RANGE_BYTES_MAX`] bytes. A whole page changes at once, a longer range page
    /// by page.
    fn write(&self, offset: u64, bytes: &[u8]) -> impl Future<Output = Result<(), Fault>>;

    /// Stores `new` in the little-endian word at `offset`, a multiple of eight, if it is `current`.
    /// Returns the word as it was: it was exchanged if that is `current`. The exchange is atomic,
    /// wherever other accesses come from.
    ///
    /// Fails with [`Fault::NotHere`] where no single server that runs functions keeps the region.
    /// After an error of the connection ([`Fault::Lost`]), it is unknown whether the exchange was
    /// done.
    fn compare_exchange(&self, offset: u64, current: u64, new: u64) -> impl Future<Output = Result<u64, Fault>>;

    /// Adds to the little-endian word at `offset`, wrapping around, and returns the word as it was.
    /// Atomic, and with the errors of [`Place::compare_exchange`].
    fn fetch_add(&self, offset: u64, add: u64) -> impl Future<Output = Result<u64, Fault>>;

    /// Writes at most [`RANGE_BYTES_MAX`] bytes if this holding of a lock is not over; else fails
    /// with [`Fault::Fenced`]. At the client, a range of more than 32 KiB goes piece by piece.
    fn write_fenced(&self, fence: Fence, offset: u64, bytes: &[u8]) -> impl Future<Output = Result<(), Fault>>;

    /// Makes a step of the lock at this offset. [`crate::WicLock`] knows which and when.
    fn lock_step(&self, lock: u64, ask: LockRequest) -> impl Future<Output = Result<LockReply, Fault>>;

    /// Makes a step of a lock without waiting for the answer, for holders and waiters that are
    /// dropped.
    fn give_back(&self, lock: u64, ask: LockRequest);

    /// Lets others go on for this time, as far as the place has a clock. Takes one step.
    fn pause(&self, time: Duration) -> impl Future<Output = ()>;

    /// Pauses as [`Place::pause`] does, for a task with this ticket in the line of this lock. At
    /// the place that gives the lock back, the pause ends earlier if the task's turn comes.
    fn pause_in_line(&self, _lock: u64, _ticket: u32, time: Duration) -> impl Future<Output = ()> {
        self.pause(time)
    }

    /// Returns the time since the call began at this place.
    fn now(&self) -> Duration;

    /// Lets others go on. A loop without accesses should call this, because a function can be ended
    /// only here and at accesses.
    fn yield_now(&self) -> impl Future<Output = ()>;

    /// Reads a little-endian word.
    fn read_u64(&self, offset: u64) -> impl Future<Output = Result<u64, Fault>> {
        async move { Ok(u64::from_le_bytes(self.read(offset).await?)) }
    }

    /// Writes a little-endian word.
    fn write_u64(&self, offset: u64, word: u64) -> impl Future<Output = Result<(), Fault>> {
        async move { self.write(offset, &word.to_le_bytes()).await }
    }
}
