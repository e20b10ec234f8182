//! Why an access or a function did not do what it should, and how that is said on the wire.

use farfield_core::PageId;
use farfield_core::wire::ErrorCode;
#[cfg(not(target_family = "wasm"))]
use farfield_pool::PoolError;
use serde::{Deserialize, Serialize};

/// Why an access of a function failed. The same at every place, except that only the client can lose the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum Fault {
    /// Bytes that the region does not have.
    #[error("a function reached outside the region, at offset {offset}")]
    OutOfRange {
        /// Where the access began.
        offset: u64,
    },
    /// More than [`crate::RANGE_BYTES_MAX`] at once.
    #[error("a function accessed {bytes} bytes at once, which is more than it may")]
    TooLong {
        /// How many.
        bytes: u64,
    },
    /// A word or a lock whose offset is no multiple of its size.
    #[error("what is at offset {offset} does not lie at a multiple of its size")]
    Unaligned {
        /// Its offset.
        offset: u64,
    },
    /// Words cannot be changed as one: no one server that runs functions keeps the pages.
    #[error("no one memory server keeps these pages and runs functions, so there are no atomics and no locks")]
    NotHere,
    /// What is there is no lock.
    #[error("there is no lock at offset {offset}")]
    NoLock {
        /// Where it should be.
        offset: u64,
    },
    /// Others had the lock for as long as somebody waited.
    #[error("the lock at offset {offset} was not to be had in time")]
    Locked {
        /// Where it is.
        offset: u64,
    },
    /// The lock was lost before: its lease was over.
    #[error("the lock at offset {offset} is another's by now")]
    Fenced {
        /// Where it is.
        offset: u64,
    },
    /// A page does not match its checksum.
    #[error("page {} is corrupt", page.0)]
    Corrupt {
        /// The page.
        page: PageId,
    },
    /// There is no room for another page.
    #[error("the memory server is full: raise its --capacity")]
    Full,
    /// Something failed inside the server.
    #[error("something failed inside the memory server; see its log")]
    Internal,
    /// The pool failed otherwise: the server is gone, or did not answer in time. A function in a sandbox does not hear of it: its call ends.
    #[cfg(not(target_family = "wasm"))]
    #[serde(skip)]
    #[error(transparent)]
    Lost(PoolError),
}

#[cfg(not(target_family = "wasm"))]
impl From<PoolError> for Fault {
    fn from(error: PoolError) -> Fault {
        match error {
            PoolError::Corrupt { page, .. } => Fault::Corrupt { page },
            PoolError::PoolFull { .. } => Fault::Full,
            error => Fault::Lost(error),
        }
    }
}

/// Why a function ended without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// It passed on what an access reported.
    Fault(Fault),
    /// It took as many steps as it may.
    Overrun {
        /// How many.
        steps: u64,
    },
    /// Its time is over.
    TimedOut,
    /// It waits for something that is not of its place, and would forever.
    Stuck,
    /// It panicked.
    Panicked,
    /// It cannot read its argument.
    Argument,
    /// Its answer is longer than answers may be.
    AnswerTooLong,
}

impl Stop {
    /// As an error code and what it is about.
    pub fn code(self) -> (ErrorCode, u64) {
        match self {
            Stop::Fault(Fault::OutOfRange { offset }) => (ErrorCode::OutOfRange, offset),
            Stop::Fault(Fault::TooLong { bytes }) => (ErrorCode::TooMuch, bytes),
            Stop::Fault(Fault::Unaligned { offset }) => (ErrorCode::Unaligned, offset),
            Stop::Fault(Fault::NotHere) => (ErrorCode::NoAtomics, 0),
            Stop::Fault(Fault::NoLock { offset }) => (ErrorCode::NoLock, offset),
            Stop::Fault(Fault::Locked { offset }) => (ErrorCode::Locked, offset),
            Stop::Fault(Fault::Fenced { offset }) => (ErrorCode::Fenced, offset),
            Stop::Fault(Fault::Corrupt { page }) => (ErrorCode::Corrupt, page.0),
            Stop::Fault(Fault::Full) => (ErrorCode::PoolFull, 0),
            #[cfg(not(target_family = "wasm"))]
            Stop::Fault(Fault::Lost(_)) => (ErrorCode::Internal, 0),
            Stop::Fault(Fault::Internal) => (ErrorCode::Internal, 0),
            Stop::Overrun { steps } => (ErrorCode::Overrun, steps),
            Stop::TimedOut => (ErrorCode::TimedOut, 0),
            Stop::Stuck => (ErrorCode::Stuck, 0),
            Stop::Panicked => (ErrorCode::Panicked, 0),
            Stop::Argument => (ErrorCode::BadRequest, 0),
            Stop::AnswerTooLong => (ErrorCode::AnswerTooLong, 0),
        }
    }
}
