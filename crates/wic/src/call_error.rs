//! Errors of calls.

use crate::{Fault, Stop};
use core::time::Duration;
use farfield_core::wire::{CallBody, ErrorCode};
use farfield_pool::{CallFailure, CallLane, PoolError};

/// Reason why a call has no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CallError {
    /// No single server that runs functions keeps these pages. The server is an older one, or there
    /// is none. Or there are several, and each has different pages, or the function may change what
    /// it has.
    #[error("no memory server that runs functions keeps all of these pages: call the function at the client")]
    Nowhere,
    /// None of several servers keeps all of these pages at the moment: one is being given what it
    /// lacks, or the pool is being exchanged.
    #[error("no memory server keeps all of these pages now: call the function at the client, or try again later")]
    NotNow,
    /// The server has no function of this name.
    #[error("the memory server has no function {name:?}: start one whose registry has it")]
    NoFunction {
        /// Name of the function.
        name: &'static str,
    },
    /// The server has the function in another version.
    #[error(
        "the memory server has version {theirs} of the function {name:?}, this program {ours}: use the same release"
    )]
    OtherVersion {
        /// Name of the function.
        name: &'static str,
        /// Version of this program.
        ours: u32,
        /// Version of the server.
        theirs: u32,
    },
    /// The function took more steps than its budget. A server pushes back functions that keep it
    /// too long: call it at the client.
    #[error("the function used up its budget and was stopped after {steps} steps: call it at the client")]
    Overrun {
        /// Number of steps that it took.
        steps: u64,
    },
    /// There was no answer in time.
    #[error("the function did not answer within {after:?}")]
    TimedOut {
        /// Time limit of the call.
        after: Duration,
    },
    /// The function waits for something that its place does not provide.
    #[error("the function waits for an event that cannot occur where it runs")]
    Stuck,
    /// The function panicked at the server.
    #[error("the function panicked at the memory server")]
    Panicked,
    /// The server could not read the argument.
    #[error("the argument of the function cannot be encoded or read")]
    Argument,
    /// The answer could not be read here.
    #[error("the answer of the function cannot be read")]
    Answer,
    /// The encoded argument is longer than a memory server takes. Nothing was sent.
    #[error(
        "the argument of the function has {bytes} bytes, and a memory server takes at most {}: \
         put it into the region, or call with Where::Auto or Where::Client, which take arguments of any length",
        CallBody::ARGUMENT_BYTES_MAX
    )]
    ArgumentTooLong {
        /// Length of the encoded argument in bytes.
        bytes: u64,
    },
    /// The encoded answer is longer than a memory server sends. The function has run.
    #[error(
        "the answer of the function has more than the {} bytes that a memory server sends: write it into the region, \
         or call with Where::Client, or with Where::Auto if the function is REPEATABLE, which return any answer",
        CallBody::ANSWER_BYTES_MAX
    )]
    AnswerTooLong,
    /// An access of the function failed.
    #[error(transparent)]
    Fault(Fault),
}

impl CallError {
    /// Converts the reason why a function that ran here stopped.
    pub(crate) fn of_stop(stop: Stop, within: Duration) -> CallError {
        match stop {
            Stop::Fault(Fault::Lost(PoolError::TimedOut { .. })) | Stop::TimedOut => {
                CallError::TimedOut { after: within }
            }
            Stop::Fault(fault) => CallError::Fault(fault),
            Stop::Overrun { steps } => CallError::Overrun { steps },
            Stop::Stuck => CallError::Stuck,
            Stop::Panicked => CallError::Panicked,
            Stop::Argument => CallError::Argument,
            Stop::AnswerTooLong => CallError::AnswerTooLong,
        }
    }

    /// Converts the failure of a call of this function to the server.
    pub(crate) fn of_failure(failure: CallFailure, name: &'static str, ours: u32, within: Duration) -> CallError {
        let (code, detail) = match failure {
            CallFailure::Pool(PoolError::TimedOut { .. }) => return CallError::TimedOut { after: within },
            CallFailure::Pool(error) => return error.into(),
            CallFailure::Server { code, detail } => (code, detail),
        };
        match code {
            ErrorCode::NoFunction => CallError::NoFunction { name },
            ErrorCode::OtherVersion => CallError::OtherVersion { name, ours, theirs: detail as u32 },
            ErrorCode::Unsupported => CallError::Nowhere,
            code => match Stop::of_code(code, detail) {
                Some(stop) => CallError::of_stop(stop, within),
                None => CallError::Fault(Fault::Lost(PoolError::Refused { server: 0, reason: code.text() })),
            },
        }
    }
}

/// Converts the reason why a server cannot be reached, or not any more.
impl From<PoolError> for CallError {
    fn from(error: PoolError) -> CallError {
        match error {
            PoolError::Refused { reason: CallLane::NOWHERE, .. } => CallError::Nowhere,
            PoolError::Refused { reason: CallLane::NOT_NOW, .. } => CallError::NotNow,
            error => CallError::Fault(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an error that is another one on the other side of the wire.
    use super::*;
    use farfield_core::PageId;

    #[test]
    fn a_function_stops_alike_at_server_and_client() {
        let within = Duration::from_secs(1);
        for stop in [
            Stop::Fault(Fault::OutOfRange { offset: 77 }),
            Stop::Fault(Fault::TooLong { bytes: 1 << 40 }),
            Stop::Fault(Fault::Unaligned { offset: 12 }),
            Stop::Fault(Fault::NotHere),
            Stop::Fault(Fault::NoLock { offset: 64 }),
            Stop::Fault(Fault::Locked { offset: 128 }),
            Stop::Fault(Fault::Fenced { offset: 192 }),
            Stop::Fault(Fault::Corrupt { page: PageId(5) }),
            Stop::Fault(Fault::Full),
            Stop::Fault(Fault::Internal),
            Stop::Overrun { steps: 9 },
            Stop::TimedOut,
            Stop::Stuck,
            Stop::Panicked,
            Stop::Argument,
            Stop::AnswerTooLong,
        ] {
            let (code, detail) = stop.code();
            let code = ErrorCode::from_number(code.number());
            let there = CallError::of_failure(CallFailure::Server { code, detail }, "f", 1, within);
            assert_eq!(there, CallError::of_stop(stop, within), "{stop:?}");
        }
    }
}
