//! Errors of heaps, and what to do about them.

use core::time::Duration;
use farfield_pool::{OpenError, PoolError};

/// Reason why a far value cannot be had right now. The heap stays usable for what is near.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FarError {
    /// The pool failed: a server is gone, did not answer in time, is full, or gave back corrupt
    /// bytes.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// All near memory that could be freed may still be referred to from scopes of this thread.
    /// Either one scope lasts long, or each level of a recursion has one.
    #[error(
        "the scopes that this thread has open hold all near memory that could be freed: end or renew them more often \
         (a recursion copies or pins what it needs and ends its scope before it goes deeper), or raise near"
    )]
    NearFull,
    /// The limit of pinned near memory, half of it, is reached.
    #[error("half of the near memory is pinned, which is the limit: drop some pins, or raise near")]
    PinsFull,
    /// No near memory became free in time, because scopes of other threads hold it or the value is
    /// too hot to leave.
    #[error(
        "no near memory became free within {after:?}: a scope is held too long (`Stats::held_by` names its thread), or \
         near is too small"
    )]
    Stalled {
        /// Time after which the operation gave up.
        after: Duration,
    },
    /// The value alone is larger than the near memory.
    #[error("the value needs {bytes} bytes near at once, more than the heap's near memory: raise near")]
    TooLarge {
        /// Near bytes that the value needs.
        bytes: u64,
    },
    /// The near memory is too small for the tables of what the heap holds.
    #[error(
        "near memory has no room for {bytes} bytes of tables: raise near, or build the collection with a far index"
    )]
    TablesFull {
        /// Bytes of tables that were asked for.
        bytes: u64,
    },
    /// All far addresses are in use.
    #[error("all far addresses of the heap are in use: build it with more far")]
    FarFull,
    /// The value belongs to another heap than the scope.
    #[error("the value belongs to another heap than the scope")]
    OtherHeap,
}

/// As derived, but with the advice: an error that is unwrapped shows only its `Debug` text.
impl core::fmt::Debug for FarError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            FarError::Pool(error) => f.debug_tuple("Pool").field(error).finish(),
            FarError::NearFull => write!(f, "NearFull: {self}"),
            FarError::PinsFull => write!(f, "PinsFull: {self}"),
            FarError::Stalled { .. } => write!(f, "Stalled: {self}"),
            FarError::TooLarge { .. } => write!(f, "TooLarge: {self}"),
            FarError::TablesFull { .. } => write!(f, "TablesFull: {self}"),
            FarError::FarFull => write!(f, "FarFull: {self}"),
            FarError::OtherHeap => write!(f, "OtherHeap: {self}"),
        }
    }
}

/// Reason why a heap cannot be built.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BuildError {
    /// A setting is out of its bounds.
    #[error("{0}")]
    Argument(&'static str),
    /// The pool does not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The pool opens, but gives no lane.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The first near or far memory cannot be had.
    #[error(transparent)]
    Far(#[from] FarError),
    /// The kernel gives no address space or no thread.
    #[error("the operating system refused {what}: {why}")]
    Os {
        /// Resource that was asked for.
        what: &'static str,
        /// Error text of the operating system.
        why: String,
    },
}

/// A value that could not be put into the heap, and the reason.
///
/// The operator `?` turns it into [`FarError`], and drops the value. It also turns it into
/// `Box<dyn Error>`, and, if threads can share the value, into `Box<dyn Error + Send + Sync>` and
/// its like. Otherwise `map_err(FarError::from)` comes before that.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AllocError<T> {
    /// Reason.
    pub error: FarError,
    /// The value, given back.
    pub value: T,
}

impl<T> core::fmt::Debug for AllocError<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "AllocError({:?})", self.error)
    }
}

impl<T> core::fmt::Display for AllocError<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for AllocError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its text is that of the reason, so what is behind it is what is behind the reason.
        std::error::Error::source(&self.error)
    }
}

impl<T> From<AllocError<T>> for FarError {
    fn from(error: AllocError<T>) -> FarError {
        error.error
    }
}
