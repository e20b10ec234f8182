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

mod bit_runs;
mod builder;
mod compose;
#[cfg(any(test, feature = "conformance"))]
#[allow(clippy::disallowed_methods, reason = "runs outside of programs")]
pub mod conformance;
mod contract;
mod dirty_chunks;
mod leaf;
mod polling;
mod redundant;
mod table;
#[cfg(test)]
mod trial;
mod unclaimed_snapshots;
mod url;

#[cfg(any(test, feature = "conformance"))]
pub use builder::check_url;
pub use builder::{OpenError, PoolBuilder, resolve_urls};
pub use compose::switch::{SnapshotContents, SwitchBackend, SwitchError, SwitchHost, SwitchProgress};
pub use contract::backend::{
    Backend, CloneTicket, Completion, Health, Lane, LaneRequest, Mapped, Op, PoolError, Priority, Share,
};
pub use contract::buffer::Buffer;
pub use contract::calls::{CallChannel, CallEnd, CallFailure, FarCall, IncompleteWrite, WriteReservation};
pub use contract::places::{PagePlaces, TierPages};
pub use contract::protection::Protection;
pub use contract::scrub_stats::ScrubStats;
pub use farfield_core::Deal;
pub use farfield_core::wire::PagePart;
pub use leaf::call_lane::CallLane;
pub use leaf::tls::{prepare_tls, tls_connector};
pub use leaf::unix::{UnixSocket, check_server_user};
pub use url::{leaf_urls, replace_leaves, room_bytes};

// Former names of renamed types. An alias of a trait cannot be deprecated.

#[doc(hidden)]
pub use contract::calls::{CallChannel as Calls, WriteReservation as Writes};

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
