//! Code that never waits: when it finds something far, it ends with an error, and is called again
//! when that is near.
//!
//! Thanks to this, look-ups of all collections have an async form, and need not be written twice.

use super::{FaultFuture, PinFault};
use crate::Heap;
use crate::error::FarError;
use crate::heap::{HeapInner, Missed, Scope, ThreadState};
use core::time::Duration;
use std::time::Instant;

/// Error of an operation that would have to wait (as `WouldBlock`); the record says for what.
///
/// Callers pass it on, as any other error that ends with the next attempt.
pub(crate) const WOULD_BLOCK: FarError = FarError::Stalled { after: Duration::ZERO };

/// Tells a first attempt from a repeated one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptKind {
    First,
    /// Attempt after what the last one missed has arrived: finding that now is its first use.
    Retry,
}

/// Guard during which this thread waits for nothing far.
struct NonblockingGuard<'a>(&'a ThreadState);

impl<'a> NonblockingGuard<'a> {
    fn new(record: &'a ThreadState, attempt: AttemptKind) -> NonblockingGuard<'a> {
        record.missed.set(None);
        record.is_nonblocking.set(true);
        record.is_retry.set(attempt == AttemptKind::Retry);
        NonblockingGuard(record)
    }
}

impl Drop for NonblockingGuard<'_> {
    fn drop(&mut self) {
        self.0.is_nonblocking.set(false);
        self.0.is_retry.set(false);
    }
}

/// Guard during which this thread waits after all, inside an attempt: for work that must not stop
/// in the middle.
pub(crate) struct BlockingGuard<'a> {
    record: &'a ThreadState,
    was_nonblocking: bool,
}

impl Drop for BlockingGuard<'_> {
    fn drop(&mut self) {
        self.record.is_nonblocking.set(self.was_nonblocking);
    }
}

/// Runs `action`, which may not wait. Returns its result, or what it would have had to wait for.
pub(crate) fn try_access<R>(
    record: &ThreadState,
    attempt: AttemptKind,
    action: impl FnOnce() -> Result<R, FarError>,
) -> Result<Result<R, FarError>, Missed> {
    let nonblocking = NonblockingGuard::new(record, attempt);
    let result = action();
    drop(nonblocking);
    match record.missed.take() {
        Some(missed) if result.is_err() => Err(missed),
        _ => Ok(result),
    }
}

impl Scope<'_> {
    /// Makes a guard for changes of many places, which would cost much to undo: until it is
    /// dropped, the thread waits.
    pub(crate) fn allow_blocking(&self) -> BlockingGuard<'_> {
        BlockingGuard { record: self.record, was_nonblocking: self.record.is_nonblocking.replace(false) }
    }

    /// Repeats an action that only looks until nothing of it is far any more. Places that were
    /// found near stay near.
    pub(crate) async fn retry<R>(&self, action: impl FnMut() -> Result<R, FarError>) -> Result<R, FarError> {
        self.retry_from(AttemptKind::First, action).await
    }

    /// Repeats an action as [`Scope::retry`] does; `attempt` says whether an attempt was made
    /// before.
    pub(crate) async fn retry_from<R>(
        &self,
        mut attempt: AttemptKind,
        mut action: impl FnMut() -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        let held = self.hold();
        let mut since = None;
        loop {
            match try_access(self.record, attempt, &mut action) {
                Ok(result) => {
                    drop(held);
                    if result.is_ok() {
                        self.mark_used();
                    }
                    return result;
                }
                Err(missed) => match self.await_missed(missed).await {
                    // Nobody has references: what was found may leave, and be found again.
                    Err(FarError::NearFull)
                        if held.is_only() && since.get_or_insert_with(Instant::now).elapsed() < self.core.patience =>
                    {
                        self.record.renew(&self.core.epoch, self.open);
                    }
                    other => other?,
                },
            }
            attempt = AttemptKind::Retry;
        }
    }

    /// Waits for what an attempt missed, which stays near as long as the scope lasts.
    pub(crate) async fn await_missed(&self, (number, mode): Missed) -> Result<(), FarError> {
        FaultFuture::new(self, number, mode).await.map(drop)
    }
}

impl Heap {
    /// Calls `action` with a scope, for a task of any executor, until all that it needs is near.
    ///
    /// When `action` finds something far, it does not wait but gets an error, which it must pass
    /// on. It is called again when that is near. So it may be called several times, and must do
    /// nothing that should not be done twice: look-ups, and changes that come last. (An operation
    /// that moves many elements, as [`FarVec::insert`](crate::FarVec::insert), blocks the thread.)
    ///
    /// No scope is held while the task waits, so the task may change its thread, if `action` and
    /// its result may.
    ///
    /// ```
    /// # use farfield::{FarBTreeMap, Heap, task::Executor};
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// # let mut map = FarBTreeMap::new();
    /// # map.insert(&heap.enter(), 7u64, String::from("seven"))?;
    /// # Executor::new(&heap).block_on(async {
    /// let length = heap.fetch_with(|scope| Ok(map.get(scope, &7)?.map(String::len))).await?;
    /// assert_eq!(length, Some(5));
    /// # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn fetch_with<R>(&self, action: impl FnMut(&Scope<'_>) -> Result<R, FarError>) -> Result<R, FarError> {
        self.core().fetch_with(action).await
    }
}

impl HeapInner {
    /// Runs `action` as [`Heap::fetch_with`] does.
    pub(crate) async fn fetch_with<R>(
        &self,
        mut action: impl FnMut(&Scope<'_>) -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        // Pins keep what was far near until all is done: nothing else holds it.
        let mut pins = Vec::new();
        loop {
            let attempt = if pins.is_empty() { AttemptKind::First } else { AttemptKind::Retry };
            let (number, mode) = {
                let scope = Scope::new(self);
                match try_access(self.record(), attempt, || action(&scope)) {
                    Ok(result) => return result,
                    Err(missed) => missed,
                }
            };
            pins.push(PinFault::new(self, number, mode).await?);
        }
    }
}
