//! The two ends of a conversation, without the connection between them.
//!
//! Bytes that arrived go in, what they mean and what must be sent comes out; whoever drives it owns the sockets and the
//! clock. [`ServerConversation`] is one connection as the server sees it, [`ClientConversation`] as a lane sees it.

mod client;
mod server;

pub use client::{Answer, Call, ClientConversation, Expired, Finished, Outgoing};
pub use server::{Limits, ServerConversation, Step};
