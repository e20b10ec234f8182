//! Errors of collected heaps, and what to do about them.

use farfield::FarError;
use farfield_core::gc::LayoutError;

/// Reason why a collected heap cannot do what was asked. The heap stays usable, and keeps what it
/// holds.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum GcError {
    /// The far heap failed: the pool is gone or full, or near memory is held by scopes. After
    /// [`FarError::NearFull`], reach a safepoint.
    #[error(transparent)]
    Far(#[from] FarError),
    /// The limit is reached, and a collection has freed too little.
    #[error("{live_bytes} of {limit_bytes} bytes are in use after a collection: drop roots, or raise the limit")]
    HeapFull {
        /// Limit of the heap, in bytes.
        limit_bytes: u64,
        /// Bytes of pages that are in use.
        live_bytes: u64,
    },
    /// The limit is reached, and no collection can run while references to objects exist.
    #[error("the limit is reached: reach a safepoint, which collects, and allocate again")]
    SafepointDue,
    /// The object alone is larger than what the heap can hold.
    #[error("the object needs {bytes} bytes, more than the heap can have: raise its limit, or near")]
    TooLarge {
        /// Bytes of the object.
        bytes: u64,
    },
    /// The reference belongs to another heap than the mutator.
    #[error("the reference belongs to another heap than the mutator")]
    OtherHeap,
    /// A thread has a mutator and does not reach a safepoint, so the collection was given up.
    #[error(
        "no collection, because thread {thread:?} has reached no safepoint for a second: call `safepoint` there more \
         often, or `blocking` around waits, or drop its mutator"
    )]
    NoSafepoint {
        /// Name of the thread.
        thread: String,
    },
    /// All entries of the heap are in use.
    #[error("the heap has more objects than its limit allows for: raise the limit")]
    EntriesFull,
    /// The type cannot lie in the heap.
    #[error("objects of {type_name} cannot lie in a collected heap: {reason}")]
    Type {
        /// Name of the type.
        type_name: &'static str,
        /// Reason.
        reason: LayoutError,
    },
    /// The heap has as many types as it can have.
    #[error("the heap has as many types as it can have")]
    TypesFull,
    /// A waker or a destructor of the program panicked on the thread that collects. The collection
    /// was given up and has changed nothing.
    #[error("a waker or a destructor panicked on the thread that collects, so the collection was given up")]
    Panicked,
    /// An object is not what its references say. The collection was given up and has changed
    /// nothing.
    #[error("the object of entry {entry} is damaged: {what}")]
    Damaged {
        /// Entry of the object.
        entry: u32,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// As displayed, because an error that is unwrapped shows only its `Debug` text.
impl core::fmt::Debug for GcError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "GcError({self})")
    }
}

/// A value that could not be put into the heap, and the reason.
#[derive(Clone, PartialEq, Eq)]
pub struct RefusedObject<T> {
    /// Reason.
    pub error: GcError,
    /// The value, given back.
    pub value: T,
}

impl<T> core::fmt::Debug for RefusedObject<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "RefusedObject({:?})", self.error)
    }
}

impl<T> core::fmt::Display for RefusedObject<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for RefusedObject<T> {}

impl<T> From<RefusedObject<T>> for GcError {
    fn from(refused: RefusedObject<T>) -> GcError {
        refused.error
    }
}
