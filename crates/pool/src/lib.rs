//! Backends and lanes: the part of Farfield that moves bytes to and from far memory.
//!
//! A [`Backend`] is one region of far memory, wherever it is kept. A [`Lane`] is one thread's
//! private submission/completion channel to it, used like io_uring: submit a batch, poll
//! completions. The lane owns a buffer while its operation is in flight, and the buffer comes back
//! with the completion. So a late answer never lands in freed memory. After a lane is open, nothing
//! here allocates: lanes are used inside signal handlers.

#![cfg_attr(
    test,
    allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests run outside of programs")
)]

mod backend;
mod buffer;
mod builder;
mod calls;
#[cfg(any(test, feature = "conformance"))]
#[allow(clippy::disallowed_methods, reason = "runs outside of programs")]
pub mod conformance;
mod connection;
mod dirty_chunks;
mod ec;
#[cfg_attr(not(feature = "fabric"), path = "fabric_absent.rs")]
mod fabric;
mod fault;
mod lz;
mod mapped;
mod member_lanes;
mod members;
mod mirror;
mod protection;
mod ram;
mod rejoin;
mod repair;
mod request_slab;
mod scrub;
mod shadow_store;
mod shm;
mod size;
mod ssd;
mod stripe;
mod switch;
mod table;
mod tcp;
mod tier;
#[cfg(test)]
mod trial;
mod unclaimed_snapshots;
mod unix;
mod url;
mod write_epochs;

pub use backend::{
    Backend, CloneTicket, Completion, Health, Lane, LaneRequest, Mapped, Op, PoolError, Priority, Share,
};
pub use buffer::Buffer;
pub use builder::{OpenError, PoolBuilder, resolve_urls};
pub use calls::{CallChannel, CallEnd, CallFailure, CallLane, FarCall, IncompleteWrite, WriteReservation};
pub use farfield_core::wire::PagePart;
pub use protection::Protection;
pub use scrub::ScrubStats;
pub use stripe::Deal;
pub use switch::{SnapshotContents, SwitchBackend, SwitchError, SwitchHost, SwitchProgress};
pub use unix::{UnixSocket, check_server_user};
#[cfg(any(test, feature = "conformance"))]
pub use url::check_url;
pub use url::{leaf_urls, replace_leaves};

// Former names of renamed types. An alias of a trait cannot be deprecated.

#[doc(hidden)]
pub use calls::{CallChannel as Calls, WriteReservation as Writes};

/// Former name of [`PoolBuilder`].
#[deprecated(since = "0.1.0", note = "renamed to `PoolBuilder`")]
pub type Opener = PoolBuilder;
/// Former name of [`LaneRequest`].
#[deprecated(since = "0.1.0", note = "renamed to `LaneRequest`")]
pub type Request = LaneRequest;
/// Former name of [`ScrubStats`].
#[deprecated(since = "0.1.0", note = "renamed to `ScrubStats`")]
pub type Scrubbed = ScrubStats;
/// Former name of [`SnapshotContents`].
#[deprecated(since = "0.1.0", note = "renamed to `SnapshotContents`")]
pub type Heritage = SnapshotContents;
/// Former name of [`IncompleteWrite`].
#[deprecated(since = "0.1.0", note = "renamed to `IncompleteWrite`")]
pub type Unwritten = IncompleteWrite;
