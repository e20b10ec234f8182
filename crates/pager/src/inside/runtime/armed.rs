//! What exists only once faults are ours.

use super::super::evict::WindowEvictor;
use super::super::lock::SpinLock;
use super::super::store::Store;
use super::super::sync::Ordering;
use super::{Phase, Runtime};
use crate::control::FaultMode;
use farfield_os::memory::OwnMemory;
use farfield_os::process::ThreadCount;
use farfield_os::{pagemap::Pagemap, uffd::Uffd};
use farfield_pool::Backend;

/// State that exists only once faults are ours.
pub struct Armed {
    /// The userfaultfd that reports faults.
    pub uffd: Uffd,
    /// Way in which faults are served.
    pub mode: FaultMode,
    /// Reader of the pages' written bits.
    pub pagemap: Pagemap,
    /// Descriptor of this process, for `process_madvise`.
    pub pidfd: i32,
    /// Descriptor of `/dev/null`.
    pub null: i32,
    /// Access to this process's memory that ignores protections.
    pub own_memory: Option<OwnMemory>,
    /// Counter of the threads of this process, ours among them.
    pub threads: Option<ThreadCount>,
    /// Far memory: the pool and our lanes to it.
    pub store: Store,
    /// Eviction buffers; the holder of the lock evicts.
    pub evictor: SpinLock<WindowEvictor>,
}

impl Runtime {
    /// Returns the state that exists when armed. Panics before.
    pub fn armed(&self) -> &'static Armed {
        let armed = self.armed.load(Ordering::Acquire);
        assert!(!armed.is_null());
        // SAFETY: never freed (a forked child leaks its parent's).
        unsafe { &*armed }
    }

    /// Closes and frees what belongs to the parent, in the child of a fork.
    ///
    /// # Safety
    /// No other thread may run, and no reference from [`Runtime::armed`] may be used afterwards.
    pub unsafe fn drop_inherited(&self) {
        let armed = self.armed.swap(core::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: made by `set_armed`, and nobody else looks at it, by the caller.
        let armed = unsafe { Box::from_raw(armed) };
        armed.store.backend().abandon();
        let threads = armed.threads.as_ref().map(ThreadCount::fd);
        let memory = armed.own_memory.as_ref().map(OwnMemory::fd);
        for fd in [armed.pagemap.fd(), armed.pidfd, armed.null].into_iter().chain(threads).chain(memory) {
            farfield_os::file::close(fd);
        }
        armed.evictor.lock().close_inherited();
    }

    /// Checks whether system calls must find their buffers near. In thread mode they need not:
    /// faults inside them are served too.
    pub fn guards(&self) -> bool {
        self.phase() == Phase::Armed && self.armed().mode == FaultMode::Signal
    }

    /// Sets the state that exists when armed.
    pub fn set_armed(&self, armed: Armed) {
        self.armed.store(Box::into_raw(Box::new(armed)), Ordering::Release);
    }
}
