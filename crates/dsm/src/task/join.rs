//! The wait for a task, at the node that has started it.
#![allow(unsafe_code, reason = "results arrive as bytes")]

use super::UsedLoan;
use super::code::{ShippedCode, Value};
use crate::node::{WaitSlot, WaitTable};
use crate::{Far, Here, JoinError, NodeId, ShareError};
use core::marker::PhantomData;
use std::sync::Arc;

/// End of a task, at the node that waits for it.
pub(crate) struct TaskEnd {
    pub(crate) result: Result<Value, JoinError>,
    /// Mutable loans that the task has used, by number; `None` if the object is lost.
    pub(crate) loans: Vec<(u64, Option<UsedLoan>)>,
}

impl From<ShareError> for TaskEnd {
    fn from(error: ShareError) -> TaskEnd {
        TaskEnd { result: Err(error.into()), loans: Vec::new() }
    }
}

/// Tasks that nobody knows the end of, by number, with their code.
pub(crate) type OpenJoins = WaitTable<TaskEnd, ShippedCode>;

/// Where the end of a task arrives.
pub(crate) type Waiting = WaitSlot<TaskEnd, ShippedCode>;

/// A task that was started. Without [`TaskHandle::join`] it goes on all the same, and its result is
/// dropped.
#[must_use = "a task whose result nobody wants is started by `drop(here.spawn_to(…)?)`"]
pub struct TaskHandle<R: Far> {
    pub(crate) waiting: Arc<Waiting>,
    pub(crate) result: PhantomData<R>,
}

impl<R: Far> core::fmt::Debug for TaskHandle<R> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "TaskHandle(at node {})", self.waiting.node())
    }
}

impl<R: Far> TaskHandle<R> {
    /// Returns the node at which the task runs.
    pub fn node(&self) -> NodeId {
        self.waiting.node()
    }

    /// Waits until the task has ended and returns its result. A task may take as long as it likes;
    /// the wait ends with an error as soon as its node is known to be gone. Meanwhile another task
    /// may take the place of the caller's.
    pub fn join(self, here: &Here<'_>) -> Result<R, JoinError> {
        let value = self.waiting.wait(here.node()).result?;
        // SAFETY: the handle was made with the code of a task that returns this type.
        Ok(unsafe { value.into_result() })
    }
}
