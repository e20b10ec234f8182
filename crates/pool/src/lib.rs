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
mod calls;
mod changes;
#[cfg(any(test, feature = "conformance"))]
#[allow(clippy::disallowed_methods, reason = "runs outside of programs")]
pub mod conformance;
mod connection;
mod ec;
#[cfg_attr(not(feature = "fabric"), path = "fabric_absent.rs")]
mod fabric;
mod fault;
mod healer;
mod leg_lanes;
mod legs;
mod lz;
mod mapped;
mod mirror;
mod opener;
mod protection;
mod ram;
mod rejoin;
mod scrub;
mod seats;
mod shm;
mod size;
mod ssd;
mod stock;
mod stripe;
mod switch;
mod table;
mod tcp;
mod tier;
mod touched;
#[cfg(test)]
mod trial;
mod unclaimed;
mod unix;
mod url;

pub use backend::{Backend, CloneTicket, Completion, Health, Lane, Mapped, Op, PoolError, Priority, Request, Share};
pub use buffer::Buffer;
pub use calls::{CallEnd, CallFailure, CallLane, Calls, FarCall, Unwritten, Writes};
pub use farfield_core::wire::PagePart;
pub use opener::{OpenError, Opener, resolve_urls};
pub use protection::Protection;
pub use scrub::Scrubbed;
pub use stripe::Deal;
pub use switch::{Heritage, SwitchBackend, SwitchError, SwitchHost, SwitchProgress};
pub use unix::{UnixSocket, check_server_user};
#[cfg(any(test, feature = "conformance"))]
pub use url::check_url;
pub use url::{leaf_urls, replace_leaves};
