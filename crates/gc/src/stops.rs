//! Stops: all mutators wait at safepoints, for one thread that needs the heap for itself.
//!
//! A mutator is *stopped* when it waits in a safepoint, or has said that it will not touch the heap
//! for a while. A thread that collects waits a second for all others; then it names one that has not
//! stopped, and gives up.

use crate::error::GcError;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Instant, Mutex, MutexGuard, Thread, ThreadId, current_thread};
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::sync::PoisonError;

/// Longest time that a thread may take to reach a safepoint.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Number of a mutator among those that its heap has now.
pub(crate) type MutatorId = usize;

/// State of all mutators of a heap.
#[derive(Default)]
pub(crate) struct Stops {
    state: Mutex<StopState>,
    changed: Condvar,
    is_requested: AtomicBool,
    /// Number of mutators.
    count: AtomicU64,
}

#[derive(Default)]
struct StopState {
    /// Mutators by their numbers.
    mutators: Vec<Option<RegisteredMutator>>,
    /// Numbers that no mutator has.
    vacant: Vec<MutatorId>,
    /// Thread for which mutators are stopped.
    stopper: Option<ThreadId>,
}

struct RegisteredMutator {
    thread: Thread,
    is_stopped: bool,
}

impl RegisteredMutator {
    fn thread_name(&self) -> String {
        self.thread.name().map_or_else(|| format!("{:?}", self.thread.id()), str::to_owned)
    }
}

/// Time in which all mutators are stopped. They can go on when it is dropped.
pub(crate) struct WorldStop<'a> {
    stops: &'a Stops,
    requested: Instant,
}

impl Stops {
    fn lock(&self) -> MutexGuard<'_, StopState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, StopState>) -> MutexGuard<'a, StopState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no stop is under way. Each one ends: it waits for mutators a second at most, and
    /// for the pool as long as a far heap has patience.
    ///
    /// # Panics
    /// The calling thread is the one that has stopped them. While it waits for the pool it may run a
    /// waker or a destructor of the program, which then is here.
    fn wait_for_end<'a>(&self, mut state: MutexGuard<'a, StopState>) -> MutexGuard<'a, StopState> {
        while let Some(stopper) = state.stopper {
            if stopper == current_thread().id() {
                drop(state);
                panic!("a waker or a destructor uses a collected heap on the thread that collects it");
            }
            state = self.wait(state);
        }
        state
    }

    /// Adds a mutator of the calling thread.
    pub(crate) fn register(&self) -> MutatorId {
        let mutator = Some(RegisteredMutator { thread: current_thread(), is_stopped: false });
        let mut state = self.wait_for_end(self.lock());
        self.count.fetch_add(1, Ordering::Relaxed);
        match state.vacant.pop() {
            Some(id) => {
                state.mutators[id] = mutator;
                id
            }
            None => {
                state.mutators.push(mutator);
                state.mutators.len() - 1
            }
        }
    }

    /// Removes a mutator.
    pub(crate) fn unregister(&self, id: MutatorId) {
        let mut state = self.lock();
        state.mutators[id] = None;
        state.vacant.push(id);
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.notify_stopper(state);
    }

    /// Returns the number of mutators.
    pub(crate) fn mutators(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Checks whether a thread waits for mutators to stop.
    #[inline]
    pub(crate) fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::Relaxed)
    }

    /// Marks a mutator as stopped, until [`Stops::resume`].
    pub(crate) fn stop(&self, id: MutatorId) {
        let mut state = self.lock();
        state.set_stopped(id, true);
        self.notify_stopper(state);
    }

    /// Lets the thread look again for which mutators are stopped, if there is one.
    fn notify_stopper(&self, state: MutexGuard<'_, StopState>) {
        // Only that thread waits for what a mutator does. To notify nobody would be a system call, too.
        let is_awaited = state.stopper.is_some();
        drop(state);
        if is_awaited {
            self.changed.notify_all();
        }
    }

    /// Waits until no stop is under way, and lets a mutator go on.
    pub(crate) fn resume(&self, id: MutatorId) {
        let mut state = self.wait_for_end(self.lock());
        state.set_stopped(id, false);
    }

    /// Stops all mutators. The calling thread has none.
    pub(crate) fn begin(&self) -> Result<WorldStop<'_>, GcError> {
        let mut state = self.wait_for_end(self.lock());
        state.stopper = Some(current_thread().id());
        let stop = WorldStop { stops: self, requested: Instant::now() };
        self.is_requested.store(true, Ordering::Relaxed);
        let until = stop.requested + PATIENCE;
        while let Some(late) = state.mutators.iter().flatten().find(|mutator| !mutator.is_stopped) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let thread = late.thread_name();
                drop(state);
                drop(stop);
                return Err(GcError::NoSafepoint { thread });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        Ok(stop)
    }
}

impl StopState {
    fn set_stopped(&mut self, id: MutatorId, is_stopped: bool) {
        if let Some(mutator) = &mut self.mutators[id] {
            mutator.is_stopped = is_stopped;
        }
    }
}

impl WorldStop<'_> {
    /// Lets mutators go on. Returns the time since they were asked to stop.
    pub(crate) fn end(self) -> Duration {
        self.requested.elapsed()
    }
}

impl Drop for WorldStop<'_> {
    fn drop(&mut self) {
        let mut state = self.stops.lock();
        state.stopper = None;
        self.stops.is_requested.store(false, Ordering::Relaxed);
        drop(state);
        self.stops.changed.notify_all();
    }
}
