//! Errors of accesses and functions, and their codes on the wire.

use farfield_core::PageId;
use farfield_core::wire::ErrorCode;
#[cfg(not(target_family = "wasm"))]
use farfield_pool::PoolError;
use serde::{Deserialize, Serialize};

/// Reason why an access of a function failed. Reasons are equal at every place, except that only
/// the client can lose the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum Fault {
    /// The access is outside of the region.
    #[error("a function accessed offset {offset}, which lies outside the region")]
    OutOfRange {
        /// Offset at which the access began.
        offset: u64,
    },
    /// The access has more than [`crate::RANGE_BYTES_MAX`] bytes.
    #[error("a function accessed {bytes} bytes at once, which is more than it may")]
    TooLong {
        /// Number of bytes.
        bytes: u64,
    },
    /// The offset of a word or a lock is not a multiple of its size.
    #[error("the word at offset {offset} is not aligned: its offset must be a multiple of its size")]
    Unaligned {
        /// Offset of the word or lock.
        offset: u64,
    },
    /// Words cannot be changed atomically: no single server that runs functions keeps the pages.
    #[error("atomics and locks need one memory server that keeps these pages and runs functions")]
    NotHere,
    /// The bytes at this offset are not a lock.
    #[error("the bytes at offset {offset} are not a lock")]
    NoLock {
        /// Offset at which the lock should be.
        offset: u64,
    },
    /// Others had the lock for the whole time of the wait.
    #[error("the lock at offset {offset} could not be acquired in time")]
    Locked {
        /// Offset of the lock.
        offset: u64,
    },
    /// The lock was lost before: its lease was over.
    #[error("the lease of the lock at offset {offset} has expired, and another task holds it")]
    Fenced {
        /// Offset of the lock.
        offset: u64,
    },
    /// A page does not match its checksum.
    #[error("page {} is corrupt", page.0)]
    Corrupt {
        /// Number of the page.
        page: PageId,
    },
    /// The server has no room for another page.
    #[error("the memory server is full: raise its --capacity")]
    Full,
    /// Something failed inside the server.
    #[error("the memory server failed inside: see its log")]
    Internal,
    /// The pool failed otherwise: the server is gone, or did not answer in time. A function in a
    /// sandbox does not get this error: its call ends.
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

/// Reason why a function ended without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// The function passed on the fault of an access.
    Fault(Fault),
    /// The function took as many steps as its budget allows.
    Overrun {
        /// Number of steps.
        steps: u64,
    },
    /// The time of the function is over.
    TimedOut,
    /// The function waits for something that its place does not provide, and would wait forever.
    Stuck,
    /// The function panicked.
    Panicked,
    /// The function cannot read its argument.
    Argument,
    /// The answer is longer than allowed.
    AnswerTooLong,
}

impl Stop {
    /// Returns the error code on the wire, and its detail.
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

    /// Returns the reason that has this code and detail; `None` if no function stops for it.
    pub fn of_code(code: ErrorCode, detail: u64) -> Option<Stop> {
        Some(match code {
            ErrorCode::OutOfRange => Stop::Fault(Fault::OutOfRange { offset: detail }),
            ErrorCode::TooMuch => Stop::Fault(Fault::TooLong { bytes: detail }),
            ErrorCode::Unaligned => Stop::Fault(Fault::Unaligned { offset: detail }),
            ErrorCode::NoAtomics => Stop::Fault(Fault::NotHere),
            ErrorCode::NoLock => Stop::Fault(Fault::NoLock { offset: detail }),
            ErrorCode::Locked => Stop::Fault(Fault::Locked { offset: detail }),
            ErrorCode::Fenced => Stop::Fault(Fault::Fenced { offset: detail }),
            ErrorCode::Corrupt => Stop::Fault(Fault::Corrupt { page: PageId(detail) }),
            ErrorCode::PoolFull => Stop::Fault(Fault::Full),
            ErrorCode::Internal => Stop::Fault(Fault::Internal),
            ErrorCode::Overrun => Stop::Overrun { steps: detail },
            ErrorCode::TimedOut => Stop::TimedOut,
            ErrorCode::Stuck => Stop::Stuck,
            ErrorCode::Panicked => Stop::Panicked,
            ErrorCode::BadRequest => Stop::Argument,
            ErrorCode::AnswerTooLong => Stop::AnswerTooLong,
            _ => return None,
        })
    }
}
