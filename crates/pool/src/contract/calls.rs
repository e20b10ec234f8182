//! Calls: functions that run where the pages of a backend are kept.
//!
//! A call is sent once. If the connection is lost, it is unknown whether the function ran, and the
//! call ends with an error that says so. Unlike a lane, a channel may allocate.

use crate::PoolError;
use core::time::Duration;
use farfield_core::wire::ErrorCode;

/// Greatest number of calls in flight on one channel.
pub(crate) const CALLS_MAX: usize = 256;
/// Reason for a refusal: the backend runs no functions.
pub(crate) const NOWHERE: &str = "no code runs where these pages are kept";
/// Reason for a refusal: the backend runs no functions now, but perhaps will later.
pub(crate) const NOT_NOW: &str = "no server that runs code keeps all of these pages now";

/// Call of a function over the region of the backend.
#[derive(Clone, Debug)]
pub struct FarCall {
    /// Tag chosen by the caller, returned with the end of the call.
    pub tag: u64,
    /// Longest time that the answer may take, counted from submission.
    pub deadline: Duration,
    /// Greatest number of steps that the function may take; 0 means as many as the server allows.
    pub steps_max: u32,
    /// Name of the function at the server.
    pub name: &'static str,
    /// Version of the function.
    pub version: u32,
    /// Argument of the function.
    pub argument: Vec<u8>,
}

/// End of one call.
#[derive(Debug)]
pub struct CallEnd {
    /// Tag of the call.
    pub tag: u64,
    /// Answer of the function, or why there is none.
    pub result: Result<Vec<u8>, CallFailure>,
    /// Steps that the function took, if it answered; 0 if they were not counted.
    pub steps: u32,
}

/// Reason why a call has no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallFailure {
    /// The server reports an error.
    Server {
        /// Error code.
        code: ErrorCode,
        /// Detail of the code: a page, an offset, a version, or a number of steps.
        detail: u64,
    },
    /// The server reports nothing; the error arose on our side.
    Pool(PoolError),
}

/// A thread's private channel to functions that run where pages are kept.
pub trait CallChannel: Send {
    /// Takes the call, or gives it back when there is no room (poll, then try again).
    /// [`CallChannel::poll`] sends it.
    fn submit(&mut self, call: FarCall) -> Result<(), FarCall>;

    /// Sends everything submitted, moves the calls that ended into `done`, and returns their
    /// number. Returns soon. After the server is gone every call in flight ends with an error.
    fn poll(&mut self, done: &mut Vec<CallEnd>) -> usize;

    /// Returns the number of calls submitted and not ended.
    fn in_flight(&self) -> usize;

    /// Blocks until a call has probably ended or `timeout` has passed: spins first, then sleeps.
    fn wait(&mut self, timeout: Duration);
}

/// Channel factory for functions that write some pages at each place that keeps them. Made by
/// [`Backend::begin_writes`](crate::Backend::begin_writes).
pub trait WriteReservation: Send + Sync {
    /// Opens a channel for such functions. They change nothing but the reserved pages. Their
    /// effects and answers depend only on their arguments and on the rest of the pool. May allocate
    /// and block.
    fn open(&self) -> Result<Box<dyn CallChannel>, PoolError>;

    /// Ends the writes, after all channels are gone.
    ///
    /// On `Ok`, the pages are what the functions wrote if all of them have answered. On an error,
    /// or if one has not answered, the contents of the pages are unknown.
    fn end(self: Box<Self>) -> Result<(), IncompleteWrite>;
}

/// Error: the pages may differ from what the functions were to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IncompleteWrite {
    /// Whether it is certain that no function writes there any more.
    pub is_over: bool,
}
