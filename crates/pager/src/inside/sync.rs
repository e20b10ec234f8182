//! Atomics, thread ids and waiting, as the code inside the program uses them.
//!
//! They are core's and the kernel's, except in the models (feature `model`). There each access is
//! also a point at which another thread of the model may go on, and threads are the model's.

pub use core::sync::atomic::{AtomicPtr, Ordering};
pub use farfield_os::sync::{Wait, nap};

#[cfg(not(feature = "model"))]
pub use core::sync::atomic::{AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(not(feature = "model"))]
pub use farfield_os::process::{thread_exists, tid};

#[cfg(feature = "model")]
pub use crate::model::schedule::{
    AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, thread_exists, tid,
};

/// Starts a thread of ours. Does nothing in models, where the scenario does what the thread would
/// do.
///
/// # Safety
/// The contract is that of [`super::thread::spawn`].
pub unsafe fn spawn(entry: extern "C" fn(usize) -> !) -> farfield_os::Result<()> {
    if cfg!(feature = "model") {
        return Ok(());
    }
    // SAFETY: passed on to the caller.
    unsafe { super::thread::spawn(entry) }
}

/// Returns the number of threads of this process, ours among them.
pub fn thread_count(kernel: &farfield_os::process::ThreadCount) -> Option<u64> {
    #[cfg(feature = "model")]
    if let Some(threads) = crate::model::schedule::thread_count() {
        return Some(threads);
    }
    kernel.count()
}

/// Marks a place between two system calls at which models let other threads go on. Events in
/// between must make no difference.
pub fn schedule_point() {
    #[cfg(feature = "model")]
    (0..8).for_each(|_| crate::model::schedule::point());
}
