//! The [`Backend`] trait: a place that keeps pages, and the [`Lane`] through which a thread reaches
//! it.

use crate::contract::calls;
use crate::{Buffer, CallChannel, Deal, PagePlaces, Protection, ScrubStats, WriteReservation};
use core::time::Duration;
use farfield_core::wire::PagePart;
use farfield_core::{Incarnation, PageId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Scheduling class of an operation. Demand reads go first; everything else (prefetch, write-back,
/// discards) goes after and never in front.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Priority {
    /// A thread is stopped until the operation completes.
    Demand,
    /// No thread waits for the operation.
    Background,
}

/// Operation on a run of consecutive pages.
#[derive(Debug)]
pub enum Op {
    /// Fills `buffer` with the `buffer.pages()` pages that start at `page`. Pages never written, or
    /// discarded, read as zeros. On completion `buffer.sums()` holds the checksum stored with each
    /// page, verified against the bytes that arrived.
    Read {
        /// First page of the run.
        page: PageId,
        /// Buffer that receives the bytes.
        buffer: Buffer,
    },
    /// Fills the bytes of `part` in `buffer`, which is one page long, with those of `page`. The
    /// rest of the buffer is arbitrary afterwards: a backend may bring more than it was asked for.
    ///
    /// `buffer.sums()` holds the checksum stored with the whole page. The side that read the page
    /// compared it with that checksum. The receiver compared the part with a checksum of its own,
    /// which also covers the identity of the part.
    ReadPart {
        /// Page to be read.
        page: PageId,
        /// Bytes of the page to be read.
        part: PagePart,
        /// Buffer that receives the bytes, at the same offset as in the page.
        buffer: Buffer,
    },
    /// Stores the `buffer.pages()` pages of `buffer` at `page`. The checksums in `buffer.sums()`
    /// must be right ([`Buffer::seal`]); they travel with the pages.
    Write {
        /// First page of the run.
        page: PageId,
        /// Pages to be stored, with their checksums.
        buffer: Buffer,
    },
    /// Forgets `count` pages from `page` on and frees their memory; they read as zeros afterwards.
    Discard {
        /// First page of the run.
        page: PageId,
        /// Number of pages.
        count: u64,
    },
}

/// Kind of an operation, remembered while the buffer of the operation is elsewhere.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpKind {
    Read,
    Part(PagePart),
    Write,
    Discard,
}

impl OpKind {
    /// Returns a read operation for the bytes that this one wants: a part of the page, or whole
    /// pages.
    pub(crate) fn read(self, page: PageId, buffer: Buffer) -> Op {
        match self {
            OpKind::Part(part) => Op::ReadPart { page, part, buffer },
            _ => Op::Read { page, buffer },
        }
    }
}

impl Op {
    /// Returns the first page of the operation and the number of its pages.
    pub(crate) fn range(&self) -> (PageId, u64) {
        match self {
            Op::Read { page, buffer } | Op::Write { page, buffer } => (*page, buffer.pages() as u64),
            Op::ReadPart { page, .. } => (*page, 1),
            Op::Discard { page, count } => (*page, *count),
        }
    }

    /// Splits the operation into its kind and its buffer.
    pub(crate) fn into_parts(self) -> (OpKind, Option<Buffer>) {
        match self {
            Op::Read { buffer, .. } => (OpKind::Read, Some(buffer)),
            Op::ReadPart { part, buffer, .. } => (OpKind::Part(part), Some(buffer)),
            Op::Write { buffer, .. } => (OpKind::Write, Some(buffer)),
            Op::Discard { .. } => (OpKind::Discard, None),
        }
    }
}

/// Refuses a run of pages that does not lie in a region of `pages` pages at `server`.
pub(crate) fn check_range((page, count): (PageId, u64), pages: u64, server: u16) -> Result<(), PoolError> {
    match page.0.checked_add(count) {
        Some(end) if end <= pages => Ok(()),
        _ => Err(PoolError::Refused { server, reason: "pages outside the region" }),
    }
}

/// Operation with its tag, as given to [`Lane::submit`].
#[derive(Debug)]
pub struct LaneRequest {
    /// Tag chosen by the caller, returned in the completion.
    pub tag: u64,
    /// Scheduling class; demand goes first.
    pub priority: Priority,
    /// Longest time that the answer may take, counted from submission.
    pub deadline: Duration,
    /// Operation to be done.
    pub op: Op,
}

/// End of one operation, good or bad. The buffer always comes back.
#[derive(Debug)]
pub struct Completion {
    /// Tag of the request.
    pub tag: u64,
    /// Outcome of the operation.
    pub result: Result<(), PoolError>,
    /// Buffer of the read or write.
    pub buffer: Option<Buffer>,
}

/// State of a backend, as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// The backend answers.
    Good,
    /// The backend answers, but a part of it (a member of a stripe, a mirror) does not.
    Degraded,
    /// The backend is gone; operations fail with [`PoolError::ServerGone`].
    Gone,
}

/// Errors of the outside world. They are `Copy` and do not allocate, because they arise inside
/// signal handlers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PoolError {
    /// The server closed, died or cannot be reached any more.
    #[error("memory server {server} is gone (incarnation {:#x})", incarnation.0)]
    ServerGone {
        /// Index of the server in the pool, in the order of the URLs.
        server: u16,
        /// Incarnation that was lost.
        incarnation: Incarnation,
    },
    /// No answer arrived within the deadline.
    #[error("memory server {server} did not answer within {after:?}")]
    TimedOut {
        /// Index of the server.
        server: u16,
        /// Deadline that passed.
        after: Duration,
    },
    /// The bytes of a page do not match its checksum.
    #[error("page {} came back corrupt from memory server {server}", page.0)]
    Corrupt {
        /// Page whose bytes are corrupt.
        page: PageId,
        /// Index of the server; 0 where several keep the same page and it is unknown which one it
        /// was.
        server: u16,
    },
    /// Capacity of the server or quota of the tenant is used up. Nothing was stored.
    #[error(
        "memory server {server} is full: raise its --capacity (size= in a URL), or give it another server with --far"
    )]
    PoolFull {
        /// Index of the server.
        server: u16,
    },
    /// The server refused: wrong token, unknown region, unsupported request.
    #[error("memory server {server} refused the request: {reason}")]
    Refused {
        /// Index of the server.
        server: u16,
        /// Reason, in a few words.
        reason: &'static str,
    },
    /// The server at a Unix socket belongs to a user that is not trusted. Nothing was sent to it.
    #[error(
        "memory server {server} is run by user {uid}, who is neither root nor the user of this program: if you trust \
         that user, say so in the URL, as in unix:PATH?uid={uid}"
    )]
    OtherUser {
        /// Index of the server.
        server: u16,
        /// User that runs the server.
        uid: u32,
    },
    /// The two sides do not speak a common version of the protocol.
    #[error("memory server {server} speaks protocol version {theirs}, this program {ours}: use the same release")]
    Version {
        /// Index of the server.
        server: u16,
        /// Protocol version that the server speaks.
        theirs: u16,
        /// Newest protocol version that this program speaks.
        ours: u16,
    },
    /// The kernel refused a system call on our side.
    #[error("the operating system refused: {0}")]
    Os(farfield_os::Errno),
}

impl PoolError {
    /// Checks whether the error is a mere time-out: the server may be alive all the same.
    pub(crate) fn is_silence(self) -> bool {
        matches!(self, PoolError::TimedOut { .. })
    }
}

/// Right to one snapshot of a region. [`Backend::clone_region`] makes it and
/// [`crate::PoolBuilder::claim`] turns it into a backend of its own. It is plain bytes, so that it
/// survives `fork`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CloneTicket {
    /// Secrets, one for each server of the pool, in the order of the URLs.
    pub secrets: [u128; CloneTicket::SERVERS_MAX],
}

impl CloneTicket {
    /// Greatest number of servers in one pool.
    pub const SERVERS_MAX: usize = 16;

    /// Makes the ticket of a pool that has a single leaf.
    pub(crate) fn of_leaf(secret: u128) -> CloneTicket {
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        secrets[0] = secret;
        CloneTicket { secrets }
    }
}

/// Right of another process to a region, made by [`Backend::share`] and used by
/// [`crate::PoolBuilder::attach`]. A process that knows it can do to the region whatever its owner
/// can.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Share {
    pub(crate) session: u128,
    pub(crate) region: u64,
    pub(crate) pages: u64,
}

impl core::fmt::Debug for Share {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // The session's secret must not reach a log by way of `{:?}`.
        write!(f, "Share({} pages)", self.pages)
    }
}

impl Share {
    /// Returns the share as text, for the other process. The text is a secret.
    pub fn to_secret(self) -> String {
        format!("{:032x}-{:x}-{:x}", self.session, self.region, self.pages)
    }

    /// Parses the text that [`Share::to_secret`] wrote; `None` if it is not such a text.
    pub fn from_secret(text: &str) -> Option<Share> {
        let mut parts = text.split('-');
        let session = u128::from_str_radix(parts.next()?, 16).ok()?;
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let share = Share { session, region: number()?, pages: number()? };
        (parts.next().is_none() && share.session != 0 && share.pages != 0).then_some(share)
    }
}

/// Region of far memory. It is shared between threads; each thread works through lanes of its own.
pub trait Backend: Send + Sync {
    /// Opens a private channel. May allocate and block (within a deadline); the lane itself does
    /// neither.
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError>;

    /// Opens a channel to functions that run where the pages are kept, if one server keeps all of
    /// them. May allocate and block.
    fn open_calls(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        Err(PoolError::Refused { server: 0, reason: calls::NOWHERE })
    }

    /// Opens a channel to functions that change nothing and run where all pages are kept: at the
    /// one server, or at any of several replicas. At a replica it must not be used for functions
    /// that write. May allocate and block.
    fn open_reads(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        self.open_calls()
    }

    /// Reserves runs of pages (first page, count) for functions that write them at each replica.
    /// The functions write nothing else. Until [`WriteReservation::end`] no other operation reads or writes
    /// these pages, and there is no snapshot. May allocate and block.
    fn begin_writes(&self, _runs: &[(PageId, u64)]) -> Result<Box<dyn WriteReservation>, PoolError> {
        Err(PoolError::Refused { server: 0, reason: calls::NOWHERE })
    }

    /// Returns how the pages are striped over several members, if they are. A function that reads
    /// only what one member keeps may run [at that member](Backend::member), given the offsets that
    /// its bytes have there.
    fn deal(&self) -> Option<Deal> {
        None
    }

    /// Returns where the pages lie, if the members are tiers. A function that only reads may run at one of
    /// them, as [`PagePlaces`] says.
    fn places(&self) -> Option<Arc<dyn PagePlaces>> {
        None
    }

    /// Returns the member `index` of those over which the pages are [striped](Backend::deal), or the
    /// [tier](Backend::places) `index`.
    fn member(&self, _index: usize) -> Option<Arc<dyn Backend>> {
        None
    }

    /// Returns the right of other processes to this region, if one server keeps it. They can change
    /// its bytes, so this is for functions and not for heaps. The region still ends with this
    /// backend's session.
    fn share(&self) -> Result<Share, PoolError> {
        Err(PoolError::Refused { server: 0, reason: calls::NOWHERE })
    }

    /// Returns a direct, one-sided view of the bytes, where the backend is memory that this process
    /// can map.
    fn mapped(&self) -> Option<&dyn Mapped> {
        None
    }

    /// Makes a copy-on-write snapshot of the region as it is now. The caller must have no operation
    /// in flight.
    fn clone_region(&self) -> Result<CloneTicket, PoolError>;

    /// Returns the number of pages that the region can address.
    fn pages(&self) -> u64;

    /// Returns the state of the backend.
    fn health(&self) -> Health;

    /// Returns the work of this backend's scrub and of its parts' scrubs; `None` if there is no
    /// scrub.
    fn scrub_stats(&self) -> Option<ScrubStats> {
        None
    }

    /// Returns how well the backend and its parts protect the pages they hold; `None` if none of
    /// them has redundancy. Does not block.
    fn protection(&self) -> Option<Protection> {
        None
    }

    /// Returns the incarnation (which server, and which life of it); `None` if there is no server,
    /// or several.
    fn incarnation(&self) -> Option<Incarnation> {
        None
    }

    /// Checks whether the backend answers a question within that time. A backend without a server
    /// always does.
    fn answers(&self, _within: Duration) -> bool {
        true
    }

    /// Describes, for people, how the backend works here, where that depends on the machine. May
    /// allocate and make system calls.
    fn how(&self) -> String {
        String::new()
    }

    /// Checks whether it is time to look for the servers of failed members. Polled now and then by
    /// the owner of a backend without threads of its own
    /// ([`crate::PoolBuilder::inside_a_program`]).
    fn is_rejoin_due(&self) -> bool {
        false
    }

    /// Looks for the servers of failed members and takes those that are back as spares. Blocks
    /// until they answer or time out. Only one thread may call it at a time, and no snapshot may be
    /// made meanwhile.
    fn rejoin(&self) {}

    /// Says goodbye, so that the servers free the region now and not when the lease runs out. It
    /// does no harm if no server hears it. The backend must not be used afterwards.
    fn release(&self) {}

    /// Drops, in the child after `fork`, the inherited connections without a word to the servers,
    /// which go on serving the parent. The backend and its lanes must not be used afterwards.
    fn abandon(&self);
}

/// Far memory that the CPU can load from directly (shm, CXL, DAX).
pub trait Mapped: Send + Sync {
    /// Returns the address of the bytes of `page`, or `None` if the page reads as zeros (never
    /// written, or discarded).
    ///
    /// The address stays valid and its bytes unchanged until the owner of the region writes or
    /// discards the page, or calls [`Backend::clone_region`]. Another process can write there, so
    /// it is a raw pointer and never a reference. `None` is also the answer when the page cannot be
    /// had any more; [`Backend::health`] is [`Health::Gone`] then.
    fn page(&self, page: PageId) -> Option<*const u8>;
}

/// Private channel of a thread to a backend.
pub trait Lane: Send {
    /// Takes the request, or gives it back when the lane's queue is full (poll, then try again). It
    /// may or may not start the operation; [`Lane::poll`] starts whatever is queued.
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest>;

    /// Starts everything submitted, moves finished operations into `done`, and returns their
    /// number. It never moves more than the free capacity of `done`, so it never allocates. Returns
    /// at once. After the server is gone, every operation in flight completes with an error: poll
    /// never forgets one.
    fn poll(&mut self, done: &mut Vec<Completion>) -> usize;

    /// Returns the number of operations submitted and not yet completed.
    ///
    /// Even at zero, an answer may be outstanding that no operation waits for: that of a lagging
    /// member of a mirror or an erasure code. The member is used again when [`Lane::poll`] takes
    /// that answer. So a lane of a pool that is [`Health::Degraded`] must be polled now and then.
    fn in_flight(&self) -> usize;

    /// Blocks until a completion is likely or `timeout` has passed: spins first, then sleeps.
    fn wait(&mut self, timeout: Duration);
}

/// Ends a [`Lane::poll`]: moves what has `ended` into `done`, as far as there is room without
/// allocating, and returns how many completions it moved.
pub(crate) fn hand_over(ended: &mut VecDeque<Completion>, done: &mut Vec<Completion>) -> usize {
    let moved = ended.len().min(done.capacity() - done.len());
    done.extend(ended.drain(..moved));
    moved
}

#[cfg(test)]
mod tests {
    //! Guards against shares that name another region, and against secrets in logs.
    use super::*;

    #[test]
    fn a_share_survives_as_text_and_nonsense_is_none() {
        let share = Share { session: 0xABCD << 100, region: 7, pages: 1 << 40 };
        assert_eq!(Share::from_secret(&share.to_secret()), Some(share));
        for text in ["", "-", "1-2", "1-2-3-4", "0-1-1", "1-1-0", "g-1-1", "1--1"] {
            assert_eq!(Share::from_secret(text), None, "{text:?}");
        }
        assert!(!format!("{share:?}").contains("abcd"));
    }
}
