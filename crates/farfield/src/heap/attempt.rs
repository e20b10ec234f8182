//! Code that waits for nothing: when it finds something far, it ends, and begins again when that is near.
//!
//! So that look-ups of all collections have an async form, and need not be written twice.

use super::access::Want;
use super::arrival::Arrival;
use super::pins::Bring;
use super::threads::Record;
use super::{Core, Heap, Scope};
use crate::error::FarError;
use core::time::Duration;
use std::time::Instant;

/// The number within the heap of what was not near (a page, or a handle above all pages), and what for.
pub(crate) type Missed = (u32, Want);

/// What an operation returns that does not wait; what is missing is in the record. Callers pass it on, as any other error that ends
/// with the next attempt.
pub(crate) const NOT_NEAR: FarError = FarError::Stalled { after: Duration::ZERO };

/// Which attempt it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Time {
    First,
    /// What the last one missed has come: that it is found now is its first use.
    Again,
}

/// While it exists, this thread waits for nothing far.
struct Impatient<'a>(&'a Record);

impl<'a> Impatient<'a> {
    fn new(record: &'a Record, time: Time) -> Impatient<'a> {
        record.missed.set(None);
        record.is_impatient.set(true);
        record.is_again.set(time == Time::Again);
        Impatient(record)
    }
}

impl Drop for Impatient<'_> {
    fn drop(&mut self) {
        self.0.is_impatient.set(false);
        self.0.is_again.set(false);
    }
}

/// While it exists, this thread waits after all: it does what must not end in its middle.
pub(crate) struct Patient<'a> {
    record: &'a Record,
    was_impatient: bool,
}

impl Drop for Patient<'_> {
    fn drop(&mut self) {
        self.record.is_impatient.set(self.was_impatient);
    }
}

/// The result of the action, or what it could not wait for.
pub(crate) fn attempt<R>(
    record: &Record,
    time: Time,
    action: impl FnOnce() -> Result<R, FarError>,
) -> Result<Result<R, FarError>, Missed> {
    let impatient = Impatient::new(record, time);
    let result = action();
    drop(impatient);
    match record.missed.take() {
        Some(missed) if result.is_err() => Err(missed),
        _ => Ok(result),
    }
}

impl Scope<'_> {
    /// For changes of many places, which cost much to take back.
    pub(crate) fn patiently(&self) -> Patient<'_> {
        Patient { record: self.record, was_impatient: self.record.is_impatient.replace(false) }
    }

    /// Does something that only looks, again and again until nothing of it is far any more. What was found near stays near.
    pub(crate) async fn retry<R>(&self, action: impl FnMut() -> Result<R, FarError>) -> Result<R, FarError> {
        self.retry_from(Time::First, action).await
    }

    /// The same, when an attempt was made.
    pub(crate) async fn retry_from<R>(
        &self,
        mut time: Time,
        mut action: impl FnMut() -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        let held = self.hold();
        let mut since = None;
        loop {
            match attempt(self.record, time, &mut action) {
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
            time = Time::Again;
        }
    }

    /// Waits for what an attempt missed. It stays near as long as the scope does.
    pub(crate) async fn await_missed(&self, (number, want): Missed) -> Result<(), FarError> {
        Arrival::new(self, number, want).await.map(drop)
    }
}

impl Heap {
    /// Calls `action` with a scope, for a task of any executor: when it finds something far it does not wait but returns an
    /// error; and is called again when that is near. So it passes errors on, may be called several times, and does nothing that
    /// should not be done twice: look-ups, and changes that come last. (What moves many elements, as [`FarVec::insert`](crate::FarVec::insert),
    /// makes the thread wait.)
    ///
    /// No scope is held while the task waits, so the task may change its thread, if `action` and what it returns may.
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

impl Core {
    /// See [`Heap::fetch_with`].
    pub(crate) async fn fetch_with<R>(
        &self,
        mut action: impl FnMut(&Scope<'_>) -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        // What was far stays near until all is done: nothing else holds it.
        let mut pins = Vec::new();
        loop {
            let time = if pins.is_empty() { Time::First } else { Time::Again };
            let (number, want) = {
                let scope = Scope::new(self);
                match attempt(self.record(), time, || action(&scope)) {
                    Ok(result) => return result,
                    Err(missed) => missed,
                }
            };
            pins.push(Bring::new(self, number, want).await?);
        }
    }
}
