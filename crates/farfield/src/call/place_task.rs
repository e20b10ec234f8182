//! The place of a function that runs in the heap as a task: while it waits for a value, others run.

use super::part::{FarPart, ObjectRef, PartBytes};
use super::place::{FarPlace, HeapStop, StepCounter, found, part_in, sealed, view_in};
use super::view_traits::{FarRef, FarView};
use crate::error::FarError;
use crate::heap::{HeapInner, Scope};
use core::cell::Cell;
use core::future::pending;
use farfield_wic::Fault;

/// The place of a task. It holds no scope while it waits, and views are copies.
pub(super) struct TaskPlace<'h> {
    core: &'h HeapInner,
    steps: StepCounter,
    stop: Cell<Option<HeapStop>>,
}

impl<'h> TaskPlace<'h> {
    pub(super) fn new(core: &'h HeapInner, steps: StepCounter) -> TaskPlace<'h> {
        TaskPlace { core, steps, stop: Cell::new(None) }
    }

    pub(super) fn stopped(&self) -> Option<HeapStop> {
        self.stop.get()
    }

    async fn halt<R>(&self, stop: HeapStop) -> R {
        self.stop.set(Some(stop));
        pending().await
    }

    async fn step(&self, bytes: usize) {
        if let Err(error) = self.steps.step(bytes) {
            self.halt(HeapStop::Call(error)).await
        }
    }

    /// Calls `bring` until all that it needs is near.
    async fn near<R>(&self, bring: impl FnMut(&Scope<'_>) -> Result<R, FarError>) -> Result<R, Fault> {
        match self.core.fetch_with(bring).await {
            Ok(found) => Ok(found),
            Err(FarError::Pool(error)) => Err(error.into()),
            Err(error) => self.halt(HeapStop::Far(error)).await,
        }
    }
}

impl sealed::Sealed for TaskPlace<'_> {}

impl FarPlace for TaskPlace<'_> {
    async fn follow<'f, T: FarView>(&'f self, pointer: FarRef<'f, T>) -> Result<T::View<'f>, Fault> {
        self.step(size_of::<T>()).await;
        self.near(|scope| view_in(scope, pointer)).await
    }

    async fn yield_now(&self) {
        self.step(0).await;
        if let Err(error) = self.steps.check_time() {
            return self.halt(HeapStop::Call(error)).await;
        }
        // Others of the executor have their turn.
        let mut is_over = false;
        core::future::poll_fn(|context| {
            if core::mem::replace(&mut is_over, true) {
                return core::task::Poll::Ready(());
            }
            context.waker().wake_by_ref();
            core::task::Poll::Pending
        })
        .await;
    }

    async fn look<'f, R>(
        &'f self,
        part: FarPart<'f>,
        read: impl FnOnce(&PartBytes<'_, 'f>) -> Option<R>,
    ) -> Result<R, Fault> {
        self.step(part.len).await;
        let mut read = Some(read);
        // What is read is the end of the last attempt.
        let result = self.near(|scope| {
            let bytes = part_in(scope, part)?;
            Ok(read.take().map(|read| found(read(&bytes))))
        });
        Ok(result.await?.unwrap_or_else(|| unreachable!("a part is read once")))
    }

    fn announce(&self, object: ObjectRef<'_>) {
        self.core.prefetch(self.core.record(), self.core.number_of(object.number.get()));
    }

    fn tables(&self) -> &[u32] {
        &[]
    }

    async fn halt_without_table<R>(&self) -> R {
        unreachable!("tables are at the client")
    }
}

/// Converts the reason why the place at the client has stopped its function.
pub(super) fn stop_error(stop: HeapStop) -> crate::OffloadError {
    match stop {
        HeapStop::Far(error) => error.into(),
        HeapStop::Call(error) => error.into(),
    }
}
