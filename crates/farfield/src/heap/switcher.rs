//! Exchanges the pool of a heap that is in use: a thread that runs the migration that the pool
//! implements.

use crate::error::BuildError;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use farfield_pool::{PoolBuilder, SwitchBackend, SwitchError, SwitchHost, SwitchProgress};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Handle of a move of all far data to another pool, begun by
/// [`Heap::switch_pool`](crate::Heap::switch_pool). Dropping it does not stop the move.
pub struct PoolSwitch {
    host: Arc<HeapSwitchHost>,
    backend: Arc<SwitchBackend>,
}

struct HeapSwitchHost {
    is_wanted: AtomicBool,
    end: Mutex<Option<Result<(), SwitchError>>>,
    bell: Condvar,
}

impl HeapSwitchHost {
    fn lock(&self) -> MutexGuard<'_, Option<Result<(), SwitchError>>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SwitchHost for HeapSwitchHost {
    fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst)
    }

    fn run_exclusive(&self, act: &mut dyn FnMut() -> bool) {
        // Heaps never load from far memory directly.
        act();
    }
}

impl PoolSwitch {
    /// Returns how far the move is.
    pub fn progress(&self) -> SwitchProgress {
        self.backend.progress()
    }

    /// Blocks until the move ends, at most for `most`. Returns its result, or `None` if it has not
    /// ended.
    pub fn wait(&self, most: Duration) -> Option<Result<(), SwitchError>> {
        let wait = self.host.bell.wait_timeout_while(self.host.lock(), most, |end| end.is_none());
        *wait.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Asks the move to stop and leave all data in the present pool. [`PoolSwitch::wait`] tells
    /// when it has stopped, and whether the move was complete before.
    pub fn cancel(&self) {
        self.host.is_wanted.store(false, Ordering::SeqCst);
    }
}

impl core::fmt::Debug for PoolSwitch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "PoolSwitch({:?}, {:?})", self.progress(), *self.host.lock())
    }
}

/// Handle on the thread of the switch that was begun last.
#[derive(Default)]
pub(crate) struct Switcher(Mutex<Option<(Arc<HeapSwitchHost>, JoinHandle<()>)>>);

impl Switcher {
    pub(crate) fn start(&self, backend: &Arc<SwitchBackend>, builder: &PoolBuilder) -> Result<PoolSwitch, BuildError> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_some_and(|(host, _)| host.lock().is_none()) {
            return Err(BuildError::Argument(
                "the pool is being switched already: wait until that switch ends, or cancel it",
            ));
        }
        let to = builder.open()?;
        let host =
            Arc::new(HeapSwitchHost { is_wanted: AtomicBool::new(true), end: Mutex::new(None), bell: Condvar::new() });
        let handle = PoolSwitch { host: host.clone(), backend: backend.clone() };
        let (given, pool) = (host.clone(), backend.clone());
        let body = move || {
            let end = pool.switch(to, &*given);
            *given.lock() = Some(end);
            given.bell.notify_all();
        };
        let thread = std::thread::Builder::new().name("farfield-switch".to_owned()).spawn(body);
        let thread = thread.map_err(|error| BuildError::Os { what: "a thread", why: error.to_string() })?;
        *last = Some((host, thread));
        Ok(handle)
    }

    /// Cancels the switch, if one is running, and joins its thread: the heap ends.
    pub(crate) fn stop(&self) {
        if let Some((host, thread)) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            host.is_wanted.store(false, Ordering::SeqCst);
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}
