//! The wire protocol: the meaning of the bytes between a client and a memory server.
//!
//! Every message is one *frame*: a [`MessageHeader`] of 40 bytes, little-endian, then `body` bytes. The
//! connection starts with [`Hello`] and [`Welcome`] (or [`ConnectionRefusal`]). Then the client sends tagged
//! [`Request`]s, as many at a time as the server allows, and the server answers each with one
//! reply, in any order. Page bytes are always last in a frame and are never read here: decoders
//! hand out borrowed slices, encoders write the fields before them.
//!
//! Decoders take any bytes, never panic and never allocate. `docs/design/wire.md` is the full
//! description.

// Numbers from the wire can have any value: none may index a slice or be narrowed without a check.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation, clippy::unreachable, clippy::panic)]

mod bytes;
mod call;
mod fabric;
mod handshake;
mod header;
mod reply;
mod request;

pub use call::{CallBody, encode_answer};
pub use fabric::{ExposeReply, RemoteWindow, StationReply, encode_expose, encode_station};
pub use handshake::{ConnectionRefusal, Hello, RefuseCode, SessionSecret, Welcome, encode_refusal, features};
pub use header::{HEADER_BYTES, MessageHeader, MessageKind, flags};
pub use reply::{
    ErrorCode, MapReply, ReadReply, Reply, Stat, WireReply, encode_claimed, encode_created, encode_error, encode_map,
    encode_ok, encode_part, encode_read, encode_stat, encode_ticket, part_body_bytes, part_reply, present_words,
    read_prefix_bytes,
};
pub use request::{PagePart, Request, WireRequest, WritePages, encode_request, write_body_bytes};

/// Newest protocol version that this code speaks.
pub const VERSION_MAX: u16 = 1;
/// Oldest protocol version that this code speaks.
pub const VERSION_MIN: u16 = 1;
/// First eight bytes of the body of [`Hello`].
pub const MAGIC: [u8; 8] = *b"FARFIELD";
/// Greatest number of pages in one read or write, whatever the two sides agree on.
pub const BATCH_PAGES_LIMIT: u32 = 4096;
/// Greatest length of any body: a write of [`BATCH_PAGES_LIMIT`] pages with its checksums.
pub const BODY_BYTES_LIMIT: usize = BATCH_PAGES_LIMIT as usize * (crate::geometry::PAGE_BYTES + 8);

/// Violation of the protocol. The connection is of no further use: the start of the next frame is
/// unknown, or the other side is not what it says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// The other side is not Farfield at all.
    #[error("the other side does not speak the Farfield protocol")]
    Magic,
    /// A kind of message that does not exist or does not belong here.
    #[error("unexpected message of kind {0:#04x}")]
    Kind(u8),
    /// The body has the wrong length for its header.
    #[error("a message of kind {kind:#04x} has a body of {body} bytes")]
    Length {
        /// Kind of the message.
        kind: u8,
        /// Length that its header claims.
        body: u32,
    },
    /// A field has a value that it cannot have.
    #[error("field {0} of a message has an invalid value")]
    Field(&'static str),
    /// An answer to a question that was not asked.
    #[error("the server answered a request that was not sent")]
    Unasked,
}
