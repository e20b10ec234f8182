//! `ff.access`: one access, made at the server for a function that runs at the client.
//!
//! Lanes move pages, and a change of a part of a page must not undo what somebody else stores
//! beside it meanwhile. So words, locks and parts of pages are changed at the server, by the code
//! that makes the accesses of functions there.

use crate::{Fault, Fence, Function, Place};
use core::fmt;
use farfield_core::lock;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Most bytes of one access. With their headers they fit into an argument and into an answer.
#[cfg(not(target_family = "wasm"))]
pub(crate) const BYTES_MAX: usize = 32 * 1024;

/// Makes one access.
#[derive(Debug)]
pub struct Access;

/// Access to make.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// [`Place::read_range`].
    Read {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// [`Place::write`].
    Write {
        /// Offset of the first byte.
        offset: u64,
        /// Bytes to store.
        bytes: Bytes,
    },
    /// [`Place::compare_exchange`].
    Exchange {
        /// Offset of the word.
        offset: u64,
        /// Value that the word must have.
        current: u64,
        /// New value of the word.
        new: u64,
    },
    /// [`Place::fetch_add`].
    Add {
        /// Offset of the word.
        offset: u64,
        /// Number to add.
        add: u64,
    },
    /// [`Place::lock_step`].
    Lock {
        /// Offset of the lock.
        lock: u64,
        /// Step to make.
        ask: lock::LockRequest,
    },
    /// [`Place::write_fenced`].
    Fenced {
        /// Holding that must not be over.
        fence: Fence,
        /// Offset of the first byte.
        offset: u64,
        /// Bytes to store.
        bytes: Bytes,
    },
}

/// Result of an access.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The bytes were stored.
    Done,
    /// The bytes that were read.
    Bytes(Bytes),
    /// The word as it was.
    Word(u64),
    /// The answer of the lock.
    Lock(lock::LockReply),
}

/// Bytes that are encoded in one piece and not one by one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bytes(pub Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        struct EncodedBytesVisitor;
        impl Visitor<'_> for EncodedBytesVisitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(EncodedBytesVisitor)
    }
}

impl Function for Access {
    const NAME: &'static str = "ff.access";
    const VERSION: u32 = 1;
    type Argument = Ask;
    type Answer = Answer;

    async fn run<P: Place>(place: &P, ask: Ask) -> Result<Answer, Fault> {
        Ok(match ask {
            Ask::Read { offset, len } => Answer::Bytes(Bytes(place.read_range(offset, len as usize).await?.to_vec())),
            Ask::Write { offset, bytes } => {
                place.write(offset, &bytes.0).await?;
                Answer::Done
            }
            Ask::Exchange { offset, current, new } => Answer::Word(place.compare_exchange(offset, current, new).await?),
            Ask::Add { offset, add } => Answer::Word(place.fetch_add(offset, add).await?),
            Ask::Lock { lock, ask } => Answer::Lock(place.lock_step(lock, ask).await?),
            Ask::Fenced { fence, offset, bytes } => {
                place.write_fenced(fence, offset, &bytes.0).await?;
                Answer::Done
            }
        })
    }
}
