//! Requests for cycles: who asks for one, and who waits for its end.

use crate::error::GcError;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// How a cycle runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum CycleMode {
    /// Beside the mutators, which are stopped twice for a moment.
    Concurrent,
    /// While all mutators are stopped: for a heap that has no room left.
    Stopped,
}

/// Cycles that are wanted, run, and have ended. Cycles have numbers from 1 on.
#[derive(Default)]
pub(crate) struct CycleRequests {
    state: Mutex<RequestState>,
    changed: Condvar,
    /// Whether a cycle is wanted or runs; a hint.
    is_busy: AtomicBool,
}

#[derive(Default)]
struct RequestState {
    wanted: Option<CycleMode>,
    /// Number of the cycle that has begun last.
    begun: u64,
    /// Number of the cycle that has ended last.
    ended: u64,
    /// Error of that cycle.
    error: Option<GcError>,
    collector: Option<ThreadId>,
    is_closed: bool,
}

impl CycleRequests {
    fn lock(&self) -> MutexGuard<'_, RequestState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, RequestState>) -> MutexGuard<'a, RequestState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a cycle that begins after this call, and returns its number.
    pub(crate) fn request(&self, mode: CycleMode) -> u64 {
        let mut state = self.lock();
        state.wanted = state.wanted.max(Some(mode));
        self.is_busy.store(true, Ordering::Relaxed);
        let number = state.begun + 1;
        drop(state);
        self.changed.notify_all();
        number
    }

    /// Asks for a concurrent cycle unless one is wanted or runs.
    pub(crate) fn request_if_idle(&self) {
        if !self.is_busy.load(Ordering::Relaxed) {
            self.request(CycleMode::Concurrent);
        }
    }

    /// Returns the number of the cycle that runs.
    pub(crate) fn running(&self) -> Option<u64> {
        let state = self.lock();
        (state.begun != state.ended).then_some(state.begun)
    }

    /// Waits until this cycle, or a later one, has ended. Fails as the last one that has.
    ///
    /// A cycle makes progress as long as the pool answers, and fails when that does not.
    ///
    /// # Panics
    /// The calling thread is the one that collects.
    pub(crate) fn wait_for(&self, number: u64) -> Result<(), GcError> {
        self.check_not_collector();
        let mut state = self.lock();
        while state.ended < number && !state.is_closed {
            state = self.wait(state);
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Panics on the thread that collects. While it waits for the pool it may run a waker or a
    /// destructor of the program, which must not wait for it.
    pub(crate) fn check_not_collector(&self) {
        let is_collector = self.lock().collector == Some(std::thread::current().id());
        assert!(!is_collector, "a waker or a destructor uses a collected heap on the thread that collects it");
    }

    /// Says that the calling thread is the one that collects.
    pub(crate) fn set_collector(&self) {
        self.lock().collector = Some(std::thread::current().id());
    }

    /// Waits until a cycle is wanted, and begins it; `None` when the heap is not needed any more.
    pub(crate) fn next(&self) -> Option<CycleMode> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(mode) = state.wanted.take() {
                state.begun += 1;
                return Some(mode);
            }
            state = self.wait(state);
        }
    }

    /// Ends the cycle that [`CycleRequests::next`] began.
    pub(crate) fn end(&self, result: Result<(), GcError>) {
        let mut state = self.lock();
        state.ended = state.begun;
        state.error = result.err();
        self.is_busy.store(state.wanted.is_some(), Ordering::Relaxed);
        drop(state);
        self.changed.notify_all();
    }

    /// Says that the heap is not needed any more: no cycle begins, and the one that runs is dropped.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Checks whether the heap is not needed any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a request that no cycle serves, or one that began before it.
    use super::*;

    #[test]
    fn a_request_is_served_by_a_cycle_that_begins_after_it() {
        let requests = CycleRequests::default();
        assert_eq!((requests.running(), requests.request(CycleMode::Concurrent)), (None, 1));
        assert_eq!(requests.request(CycleMode::Stopped), 1);
        requests.request_if_idle();
        assert_eq!(requests.next(), Some(CycleMode::Stopped));
        assert_eq!((requests.running(), requests.request(CycleMode::Concurrent)), (Some(1), 2));
        requests.end(Err(GcError::SafepointDue));
        assert_eq!(requests.wait_for(1), Err(GcError::SafepointDue));
        requests.request_if_idle();
        assert_eq!(requests.next(), Some(CycleMode::Concurrent));
        requests.end(Ok(()));
        assert_eq!((requests.wait_for(1), requests.wait_for(2)), (Ok(()), Ok(())));
        requests.request_if_idle();
        requests.request_if_idle();
        assert_eq!(requests.next(), Some(CycleMode::Concurrent));
        requests.close();
        assert_eq!(requests.next(), None);
        assert_eq!(requests.wait_for(9), Ok(()));
    }
}
