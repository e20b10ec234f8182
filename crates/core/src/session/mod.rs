//! The two ends of a conversation, without the connection between them.
//!
//! Bytes that arrived go in, what they mean and what must be sent comes out; whoever drives it owns the sockets and the
//! clock. [`ServerConversation`] is one connection as the server sees it, [`ClientConversation`] as a lane sees it.

// Numbers from the wire are anything: no place in a slice and no narrower number without a check.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation, clippy::unreachable, clippy::panic)]

mod client;
mod server;

pub use client::{Answer, Call, ClientConversation, Expired, Finished, Outgoing};
pub use server::{Limits, ServerConversation, Step};
