//! Arrived bytes go in; their meaning and the bytes to send come out. The driver owns the sockets
//! and the clock. [`ServerConversation`] is one connection as the server sees it,
//! [`ClientConversation`] is one as a lane sees it.

// Numbers from the wire can have any value: none may index a slice or be narrowed without a check.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation, clippy::unreachable, clippy::panic)]

mod client;
mod server;

pub use client::{ClientConversation, ExpiredOperation, FinishedOperation, OutgoingMessage, PageOperation, ReplyEvent};
pub use server::{ConnectionLimits, ServerAction, ServerConversation};
