//! Where a function runs, as far as the function sees.

use crate::{Fault, Fence};
use core::future::Future;
use core::ops::Deref;
use core::time::Duration;
use farfield_core::lock::{Ask, Says};

/// Most bytes of one access.
pub const RANGE_BYTES_MAX: usize = 64 * 1024;

/// Where a function runs: the bytes of one region, and time. Offsets count from the start of the region; what was never written is
/// zeros.
///
/// Buffers belong to the place: a function that is dropped while it waits leaves nothing that could be written to later.
///
/// Who changes the same bytes as somebody else at the same time gets what chance makes of it, as with any operation of the pool. Where one
/// server that runs functions keeps the region, functions lose neither each other's bytes nor each other's changes of a word, wherever they
/// run: parts of pages and words are changed by the server. Who writes whole pages must own them whole.
pub trait Place {
    /// Bytes that were read; the buffer goes back to the place when this is dropped.
    type Bytes<'p>: Deref<Target = [u8]>
    where
        Self: 'p;

    /// Bytes of the region.
    fn region_bytes(&self) -> u64;

    /// Reads `N` bytes.
    fn read<const N: usize>(&self, offset: u64) -> impl Future<Output = Result<[u8; N], Fault>>;

    /// Reads a range, at most [`RANGE_BYTES_MAX`].
    fn read_range(&self, offset: u64, len: usize) -> impl Future<Output = Result<Self::Bytes<'_>, Fault>>;

    /// Reads `N` bytes from each offset into the element of `into` at the same index, all of them on their way at once.
    fn read_many<const N: usize>(
        &self,
        offsets: &[u64],
        into: &mut [[u8; N]],
    ) -> impl Future<Output = Result<(), Fault>>;

    /// Reads as [`Place::read_many`] does, values that do not go beyond the end of their page, and may leave it to [`Place::matches`] to compare their pages with
    /// checksums: so that of pages of which much is read each is compared once.
    fn load_many<const N: usize>(
        &self,
        offsets: &[u64],
        into: &mut [[u8; N]],
    ) -> impl Future<Output = Result<(), Fault>> {
        self.read_many(offsets, into)
    }

    /// The checksums that so many pages should have from the one at this offset on, to be asked for before they are loaded from. They mean something here only.
    fn sums(&self, _offset: u64, _count: usize) -> impl Future<Output = Result<Vec<u64>, Fault>> {
        async { Ok(Vec::new()) }
    }

    /// Was what was [loaded](Place::load_many) of these pages, since their [sums](Place::sums) were asked for, what was stored? If not, somebody has written there,
    /// or they are corrupt, as a read will show.
    fn matches(&self, _offset: u64, _sums: &[u64]) -> impl Future<Output = Result<bool, Fault>> {
        async { Ok(true) }
    }

    /// Writes bytes, at most [`RANGE_BYTES_MAX`]. Whole pages change at once, a longer range page by page.
    fn write(&self, offset: u64, bytes: &[u8]) -> impl Future<Output = Result<(), Fault>>;

    /// Stores `new` in the little-endian word at `offset`, which is a multiple of eight, if it is `current`. The word as it was: it was
    /// exchanged if that is `current`. Nothing else happens to the word in between, wherever it is done from.
    ///
    /// Where no one server that runs functions keeps the region this is [`Fault::NotHere`]. When an error comes from the way there and back
    /// ([`Fault::Lost`]), nobody knows whether it was done.
    fn compare_exchange(&self, offset: u64, current: u64, new: u64) -> impl Future<Output = Result<u64, Fault>>;

    /// Adds to the little-endian word at `offset`, wrapping around, as [`Place::compare_exchange`] would. The word as it was.
    fn fetch_add(&self, offset: u64, add: u64) -> impl Future<Output = Result<u64, Fault>>;

    /// Writes bytes, at most [`RANGE_BYTES_MAX`], if this holding of a lock is not over; else [`Fault::Fenced`]. At the client a range of more than
    /// 32 KiB goes piece by piece.
    fn write_fenced(&self, fence: Fence, offset: u64, bytes: &[u8]) -> impl Future<Output = Result<(), Fault>>;

    /// Asks something of the lock at this offset. [`crate::WicLock`] knows what and when.
    fn lock_step(&self, lock: u64, ask: Ask) -> impl Future<Output = Result<Says, Fault>>;

    /// The same, and nobody waits for it: for those who are dropped.
    fn give_back(&self, lock: u64, ask: Ask);

    /// Lets others go on for so long, as far as clocks are to be had. Takes one step.
    fn pause(&self, time: Duration) -> impl Future<Output = ()>;

    /// The same for who has this ticket in the line of this lock: at the place that gives the lock back, until his turn comes, if that is sooner.
    fn pause_in_line(&self, _lock: u64, _ticket: u32, time: Duration) -> impl Future<Output = ()> {
        self.pause(time)
    }

    /// Time since the call began here.
    fn now(&self) -> Duration;

    /// Lets others go on. A loop without accesses should do so, because only here and at accesses can a function be ended.
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
