//! Messages between guest and host.
//!
//! A guest exports its `memory` and three functions; it imports one at most, and has no start function.
//!
//! | export | is |
//! |---|---|
//! | `ff_sandbox_room(len: u32) -> u32` | returns the address of room for so many bytes, for this call and later ones |
//! | `ff_sandbox_begin(len: u32) -> u64` | begins a function: the bytes are a [`Begin`] |
//! | `ff_sandbox_go_on(len: u32) -> u64` | goes on: the bytes are a [`HostReply`] |
//!
//! | import | is |
//! |---|---|
//! | `farfield.read(offset: u64, into: u32, len: u32) -> u32` | reads bytes of the region; returns 1 if it cannot |
//!
//! `ff_sandbox_begin` and `ff_sandbox_go_on` return the address (upper half) and the length of the
//! guest's message, a [`GuestMessage`]. A request says why a read could not be made. All messages are
//! encoded with postcard. An instance runs one call and is thrown away.

use core::time::Duration;
use farfield_core::lock;
use farfield_wic::Fault;
use farfield_wic::access::{Answer, Ask, Bytes};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Module and name of what a guest may import.
#[cfg(not(target_family = "wasm"))]
pub(crate) const IMPORT: (&str, &str) = ("farfield", "read");

/// Most bytes of a message, either way. A guest that wants more sends several.
pub const ROUND_BYTES_MAX: usize = 256 * 1024;

/// Function to begin, and its argument.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Begin {
    /// Name of the function.
    pub name: String,
    /// Version of the function.
    pub version: u32,
    /// Size of the region in bytes.
    pub region_bytes: u64,
    /// Encoded argument.
    pub argument: Bytes,
}

/// Request of a guest to its place. Each has a number, which its answer has, too.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum PlaceRequest {
    /// An access.
    Access(Ask),
    /// [`farfield_wic::Place::pause`].
    Pause(Duration),
    /// [`farfield_wic::Place::yield_now`].
    Turn,
    /// [`farfield_wic::Place::give_back`]; there is no answer.
    GiveBack(GiveBack),
}

/// Step of a lock that was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GiveBack {
    /// Offset of the lock.
    pub lock: u64,
    /// Step to make.
    pub ask: lock::LockRequest,
}

/// Message of a guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum GuestMessage {
    /// The guest cannot go on without the answers to these requests.
    Wants(Vec<(u32, PlaceRequest)>),
    /// The function ended.
    Ended {
        /// Encoded answer of the function, or the fault of an access.
        result: Result<Bytes, Fault>,
        /// Steps of the locks that were dropped at its end.
        given_back: Vec<GiveBack>,
    },
    /// The guest has no function of this name.
    NoFunction,
    /// The guest has other versions of the function.
    OtherVersion {
        /// The newest version.
        newest: u32,
    },
    /// The guest cannot read the argument.
    Argument,
    /// The guest got a message that it cannot read.
    Confused,
}

/// Answers to the requests of a guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostReply {
    /// Time since the function began.
    pub now: Duration,
    /// Answers by the numbers of the requests; pauses and turns answer [`Answer::Done`].
    pub answers: Vec<(u32, Result<Answer, Fault>)>,
}

/// Decodes a value; `None` if the bytes are not exactly one.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(value)
}
