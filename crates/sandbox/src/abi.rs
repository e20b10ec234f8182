//! What guest and host say to each other.
//!
//! A guest exports its `memory` and three functions; it imports nothing and has no start function.
//!
//! | export | is |
//! |---|---|
//! | `ff_sandbox_room(len: u32) -> u32` | where in the memory the host may put so many bytes, for this call and those that follow |
//! | `ff_sandbox_begin(len: u32) -> u64` | begins a function: the bytes are a [`Begin`] |
//! | `ff_sandbox_go_on(len: u32) -> u64` | goes on: the bytes are a [`Told`] |
//!
//! Both answer with what the guest says, a [`Said`], as address (upper half) and length. Everything is encoded with postcard. An instance runs one
//! call and is thrown away.

use core::time::Duration;
use farfield_core::lock;
use farfield_wic::Fault;
use farfield_wic::access::{Answer, Ask, Bytes};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Most bytes that are said at a time, either way. A guest that wants more says so in turns.
pub const ROUND_BYTES_MAX: usize = 256 * 1024;

/// Which function begins, and with what.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Begin {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// Bytes of the region.
    pub region_bytes: u64,
    /// Its argument, encoded.
    pub argument: Bytes,
}

/// What a guest wants of its place, each with a number that the answer has, too.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Want {
    /// An access.
    Access(Ask),
    /// [`farfield_wic::Place::pause`].
    Pause(Duration),
    /// [`farfield_wic::Place::yield_now`].
    Turn,
    /// [`farfield_wic::Place::give_back`]; nobody waits for an answer, and there is none.
    GiveBack(GiveBack),
}

/// What is asked of a lock by one who is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GiveBack {
    /// Where the lock is.
    pub lock: u64,
    /// What is asked of it.
    pub ask: lock::Ask,
}

/// What a guest says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Said {
    /// It cannot go on without these.
    Wants(Vec<(u32, Want)>),
    /// The function ended.
    Ended {
        /// With this answer, encoded, or with what an access reported.
        result: Result<Bytes, Fault>,
        /// What was dropped at its end.
        given_back: Vec<GiveBack>,
    },
    /// It has no function of this name.
    NoFunction,
    /// It has others of this name.
    OtherVersion {
        /// The newest.
        newest: u32,
    },
    /// It cannot read the argument.
    Argument,
    /// It was told something that it cannot read.
    Confused,
}

/// What came of what a guest wanted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Told {
    /// Time since the function began.
    pub now: Duration,
    /// By the numbers of what was wanted; pauses and turns answer [`Answer::Done`].
    pub answers: Vec<(u32, Result<Answer, Fault>)>,
}

/// The value, if the bytes are one and no more.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(value)
}
