//! What makes a place that keeps bytes a backend.

use crate::{Buffer, CallLane, Calls, Deal, Protection, Scrubbed, Writes};
use core::time::Duration;
use farfield_core::wire::PagePart;
use farfield_core::{Incarnation, PageId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Demand reads go first; everything else (prefetch, write-back, discards) goes after and never in front.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Priority {
    /// Somebody is stopped until this completes.
    Demand,
    /// Nobody waits.
    Background,
}

/// One operation on a run of consecutive pages.
#[derive(Debug)]
pub enum Op {
    /// Fill `buffer` with the `buffer.pages()` pages that start at `page`. Pages never written, or discarded,
    /// read as zeros. On completion `buffer.sums()` holds the checksum stored with each page, verified against
    /// the bytes that arrived.
    Read {
        /// First page of the run.
        page: PageId,
        /// Where the bytes go.
        buffer: Buffer,
    },
    /// Fill the bytes of `part` in `buffer`, of one page, with those of `page`. The rest of the buffer is arbitrary afterwards: a
    /// backend may bring more than it was asked for. `buffer.sums()` holds the checksum stored with the whole page. The page was
    /// compared with it by whoever read it, and the part with a checksum of its own, which says whose part it is, by whoever
    /// received it.
    ReadPart {
        /// The page.
        page: PageId,
        /// Which of its bytes.
        part: PagePart,
        /// Where the bytes go, at the same place in the page.
        buffer: Buffer,
    },
    /// Store the `buffer.pages()` pages of `buffer` at `page`. The checksums in `buffer.sums()` must be right
    /// ([`Buffer::seal`]); they travel with the pages.
    Write {
        /// First page of the run.
        page: PageId,
        /// What is stored.
        buffer: Buffer,
    },
    /// Forget `count` pages from `page` on and give their memory back; they read as zeros afterwards.
    Discard {
        /// First page of the run.
        page: PageId,
        /// Number of pages.
        count: u64,
    },
}

/// What an operation does, for those who remember it while its buffer is elsewhere.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Part(PagePart),
    Write,
    Discard,
}

impl Kind {
    /// An operation that reads what this one wants.
    pub(crate) fn read(self, page: PageId, buffer: Buffer) -> Op {
        match self {
            Kind::Part(part) => Op::ReadPart { page, part, buffer },
            _ => Op::Read { page, buffer },
        }
    }
}

impl Op {
    /// Its first page, and how many there are.
    pub(crate) fn range(&self) -> (PageId, u64) {
        match self {
            Op::Read { page, buffer } | Op::Write { page, buffer } => (*page, buffer.pages() as u64),
            Op::ReadPart { page, .. } => (*page, 1),
            Op::Discard { page, count } => (*page, *count),
        }
    }

    /// What it does, and its buffer.
    pub(crate) fn into_parts(self) -> (Kind, Option<Buffer>) {
        match self {
            Op::Read { buffer, .. } => (Kind::Read, Some(buffer)),
            Op::ReadPart { part, buffer, .. } => (Kind::Part(part), Some(buffer)),
            Op::Write { buffer, .. } => (Kind::Write, Some(buffer)),
            Op::Discard { .. } => (Kind::Discard, None),
        }
    }
}

/// Refuses a run of pages, for this server, that does not lie in a region of so many.
pub(crate) fn check_range((page, count): (PageId, u64), pages: u64, server: u16) -> Result<(), PoolError> {
    match page.0.checked_add(count) {
        Some(end) if end <= pages => Ok(()),
        _ => Err(PoolError::Refused { server, reason: "pages outside the region" }),
    }
}

/// An operation with its tag, as given to [`Lane::submit`].
#[derive(Debug)]
pub struct Request {
    /// Chosen by the caller, returned in the completion.
    pub tag: u64,
    /// Demand first.
    pub priority: Priority,
    /// How long the answer may take, from submission on.
    pub deadline: Duration,
    /// What to do.
    pub op: Op,
}

/// The end of one operation, good or bad. The buffer always comes back.
#[derive(Debug)]
pub struct Completion {
    /// The tag of the request.
    pub tag: u64,
    /// How it ended.
    pub result: Result<(), PoolError>,
    /// The buffer of a read or write.
    pub buffer: Option<Buffer>,
}

/// How a backend feels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// Answers.
    Good,
    /// Answers, but a part of it (a leg of a stripe, a mirror) does not.
    Degraded,
    /// Gone; operations fail with [`PoolError::ServerGone`].
    Gone,
}

/// Errors of the world. `Copy` and without allocation, because they arise inside signal handlers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PoolError {
    /// The server closed, died or cannot be reached any more.
    #[error("memory server {server} is gone (incarnation {:#x})", incarnation.0)]
    ServerGone {
        /// Index of the server in the pool, in the order of the URLs.
        server: u16,
        /// The incarnation that was lost.
        incarnation: Incarnation,
    },
    /// No answer within the deadline.
    #[error("memory server {server} did not answer within {after:?}")]
    TimedOut {
        /// Index of the server.
        server: u16,
        /// The deadline that passed.
        after: Duration,
    },
    /// The bytes of a page do not match its checksum.
    #[error("page {} came back corrupt from memory server {server}", page.0)]
    Corrupt {
        /// The page.
        page: PageId,
        /// Index of the server; 0 where several keep the same and nobody knows which one it was.
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
        /// Why, in a few words.
        reason: &'static str,
    },
    /// The server at a Unix socket belongs to a user that is not believed. Nothing was said to it.
    #[error(
        "memory server {server} is run by user {uid}, who is neither root nor the user of this program: if you trust that user, say so in the URL, as in unix:PATH?uid={uid}"
    )]
    OtherUser {
        /// Index of the server.
        server: u16,
        /// Who runs it.
        uid: u32,
    },
    /// The two sides do not speak a common version of the protocol.
    #[error("memory server {server} speaks protocol version {theirs}, this program {ours}: use the same release")]
    Version {
        /// Index of the server.
        server: u16,
        /// Its version.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// The kernel refused a call on our side.
    #[error("the operating system refused: {0}")]
    Os(farfield_os::Errno),
}

/// Right to one snapshot of a region, made by [`Backend::clone_region`] and turned into a backend of its own by
/// [`crate::Opener::claim`]. Plain bytes, so that it survives `fork`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CloneTicket {
    /// One secret per server of the pool, in the order of the URLs.
    pub secrets: [u128; CloneTicket::SERVERS_MAX],
}

impl CloneTicket {
    /// Most servers in one pool.
    pub const SERVERS_MAX: usize = 16;

    /// This process does not need it any more, because a child of `fork` has it: what was kept here for it goes.
    pub fn forget(&self) {
        crate::mapped::forget(self);
    }

    /// Of a pool of one leaf.
    pub(crate) fn of_leaf(secret: u128) -> CloneTicket {
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        secrets[0] = secret;
        CloneTicket { secrets }
    }
}

/// Right of another process to a region, made by [`Backend::share`] and used by [`crate::Opener::join`]. Whoever knows it can do to the region
/// whatever its owner can.
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
    /// As text, for the other process.
    pub fn to_secret(self) -> String {
        format!("{:032x}-{:x}-{:x}", self.session, self.region, self.pages)
    }

    /// From that text.
    pub fn from_secret(text: &str) -> Option<Share> {
        let mut parts = text.split('-');
        let session = u128::from_str_radix(parts.next()?, 16).ok()?;
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let share = Share { session, region: number()?, pages: number()? };
        (parts.next().is_none() && share.session != 0 && share.pages != 0).then_some(share)
    }
}

/// One region of far memory. Shared between threads; each thread works through lanes of its own.
pub trait Backend: Send + Sync {
    /// Opens a private channel. May allocate and block (within a deadline); the lane itself does neither.
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError>;

    /// Opens a channel to functions that run where the pages are kept, if one server keeps all of them. May allocate and block.
    fn open_calls(&self) -> Result<Box<dyn Calls>, PoolError> {
        Err(PoolError::Refused { server: 0, reason: CallLane::NOWHERE })
    }

    /// Opens a channel to functions that change nothing, where all pages are kept: at the one server, or at any of several that keep the same.
    /// There it must not be used for others. May allocate and block.
    fn open_reads(&self) -> Result<Box<dyn Calls>, PoolError> {
        self.open_calls()
    }

    /// Functions shall write these runs of pages (the first, and how many) and nothing else, at each of several servers that keep the same. Until that has ended
    /// nobody else reads or writes the pages, and there is no snapshot. May allocate and block.
    fn begin_writes(&self, _runs: &[(PageId, u64)]) -> Result<Box<dyn Writes>, PoolError> {
        Err(PoolError::Refused { server: 0, reason: CallLane::NOWHERE })
    }

    /// How its pages are dealt out, if each of several members keeps some of them: functions that read what one member keeps may run
    /// [there](Backend::member), given the offsets that its bytes have there.
    fn deal(&self) -> Option<Deal> {
        None
    }

    /// One of those to whom the pages are [dealt out](Backend::deal).
    fn member(&self, _index: usize) -> Option<Arc<dyn Backend>> {
        None
    }

    /// The right of other processes to the same region, if one server keeps it: they change its bytes, too, so this is for functions and not
    /// for heaps. The region ends with this backend's session all the same.
    fn share(&self) -> Result<Share, PoolError> {
        Err(PoolError::Refused { server: 0, reason: CallLane::NOWHERE })
    }

    /// Direct, one-sided view of the bytes, where the backend is memory that this process can map.
    fn mapped(&self) -> Option<&dyn Mapped> {
        None
    }

    /// Copy-on-write snapshot of the region as it is now. The caller has no operation in flight.
    fn clone_region(&self) -> Result<CloneTicket, PoolError>;

    /// Pages that the region can address.
    fn pages(&self) -> u64;

    /// How it feels.
    fn health(&self) -> Health;

    /// What its scrub has done, and those of its parts; `None`: there is none.
    fn scrubbed(&self) -> Option<Scrubbed> {
        None
    }

    /// How well it protects what it holds, and how well its parts do; `None`: none of them does. Takes no time.
    fn protection(&self) -> Option<Protection> {
        None
    }

    /// Which life of which server it is; `None`: there is no server, or there are several.
    fn incarnation(&self) -> Option<Incarnation> {
        None
    }

    /// Does it answer a question within that time? A place without a server always does.
    fn answers(&self, _within: Duration) -> bool {
        true
    }

    /// How it works here, for people, where that depends on the machine. May allocate and ask the system.
    fn how(&self) -> String {
        String::new()
    }

    /// Is it time to see whether servers of legs that were lost are back? For whoever has a backend without threads of its own
    /// ([`crate::Opener::inside_a_program`]), and asks now and then.
    fn is_rejoin_due(&self) -> bool {
        false
    }

    /// Sees whether they are, and takes them as spares. Blocks for as long as they take to answer, or not to. One thread at a time, and no
    /// snapshot meanwhile.
    fn rejoin(&self) {}

    /// Says goodbye, so that the servers free the region now and not when the lease runs out. No harm if nobody hears
    /// it. The backend must not be used afterwards.
    fn release(&self) {}

    /// After `fork`, in the child: drops the inherited connections without a word to the servers, which go on
    /// serving the parent. The backend and its lanes must not be used afterwards.
    fn abandon(&self);
}

/// Far memory that the CPU can load from directly (shm, CXL, DAX).
pub trait Mapped: Send + Sync {
    /// Address of the bytes of `page`, or `None` if the page was never written or was discarded (zeros).
    /// The address stays valid and its bytes unchanged until the owner of the region writes or discards the page.
    /// Another process can write there, so it is a raw pointer and never a reference.
    /// [`Backend::clone_region`] ends the life of all such addresses. `None` is also the answer when the page cannot be had
    /// any more; [`Backend::health`] is [`Health::Gone`] then.
    fn page(&self, page: PageId) -> Option<*const u8>;
}

/// A thread's private channel.
pub trait Lane: Send {
    /// Takes the request, or gives it back when the lane's queue is full (poll, then try again).
    /// May or may not start it; [`Lane::poll`] starts whatever is queued.
    fn submit(&mut self, request: Request) -> Result<(), Request>;

    /// Starts everything submitted and moves finished operations into `done` (never more than its free capacity,
    /// so it never allocates). Returns at once; the number moved. After the server is gone, every
    /// operation in flight completes with an error: poll never forgets one.
    fn poll(&mut self, done: &mut Vec<Completion>) -> usize;

    /// Operations submitted and not yet completed. Even with none there may be an answer to come that no operation waits for: of a leg of a mirror or an
    /// erasure code that was late. It is used again when that is taken, by [`Lane::poll`]; so a lane of a pool that is [`Health::Degraded`] is polled now and then.
    fn in_flight(&self) -> usize;

    /// Blocks until a completion is likely or `timeout` has passed: spins first, then sleeps.
    fn wait(&mut self, timeout: Duration);
}

/// The end of a [`Lane::poll`]: moves what has `ended` into `done`, as far as there is room without allocating; how much.
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
