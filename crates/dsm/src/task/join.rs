//! The wait for a task, at the node that has started it.
#![allow(unsafe_code, reason = "results arrive as bytes")]

use super::code::{ShippedCode, Value};
use crate::node::ShareNode;
use crate::{Far, Here, JoinError, NodeId, ShareError};
use core::marker::PhantomData;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Tasks that nobody knows the end of, by number.
#[derive(Default)]
pub(crate) struct OpenJoins(Mutex<WaitTable>);

#[derive(Default)]
struct WaitTable {
    last: u64,
    waiting: HashMap<u64, Arc<Waiting>>,
}

/// End of a task, at the node that waits for it.
pub(crate) struct TaskEnd {
    pub(crate) result: Result<Value, JoinError>,
    /// Mutable loans that the task has used: numbers, words of the objects, and last words in the
    /// blocks in which they were lent; zeros if the object is lost.
    pub(crate) loans: Vec<(u64, u64, u64)>,
}

/// Where the end of a task arrives.
pub(crate) struct Waiting {
    node: NodeId,
    code: ShippedCode,
    end: Mutex<Option<TaskEnd>>,
    arrived: Condvar,
}

impl Waiting {
    pub(crate) fn node(&self) -> NodeId {
        self.node
    }

    /// Waits for the end of the task, once.
    pub(crate) fn wait(&self, here: &Here<'_>) -> TaskEnd {
        let node: &ShareNode = here.node();
        node.workers.while_waiting(node, || {
            let mut end = self.lock();
            loop {
                match end.take() {
                    Some(end) => return end,
                    None => end = self.arrived.wait(end).unwrap_or_else(PoisonError::into_inner),
                }
            }
        })
    }

    pub(crate) fn code(&self) -> ShippedCode {
        self.code
    }

    /// Records the end of the task. Only the first one counts.
    pub(crate) fn put(&self, end: TaskEnd) {
        self.lock().get_or_insert(end);
        self.arrived.notify_all();
    }

    /// Records that the node of the task is gone.
    fn lose(&self) {
        self.put(TaskEnd { result: Err(ShareError::NodeLost { node: self.node }.into()), loans: Vec::new() });
    }

    fn lock(&self) -> MutexGuard<'_, Option<TaskEnd>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenJoins {
    fn lock(&self) -> MutexGuard<'_, WaitTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Expects the end of a task of this code at that node. Returns its number.
    pub(crate) fn expect(&self, node: NodeId, code: ShippedCode) -> (u64, Arc<Waiting>) {
        let waiting = Arc::new(Waiting { node, code, end: Mutex::new(None), arrived: Condvar::new() });
        let mut table = self.lock();
        table.last += 1;
        let number = table.last;
        table.waiting.insert(number, waiting.clone());
        (number, waiting)
    }

    /// Returns where the end of this task belongs, once.
    pub(crate) fn take(&self, task: u64) -> Option<Arc<Waiting>> {
        self.lock().waiting.remove(&task)
    }

    /// Ends all waits for tasks at a node that is gone.
    pub(crate) fn lose(&self, node: NodeId) {
        let lost: Vec<_> = self.lock().waiting.extract_if(|_, waiting| waiting.node == node).collect();
        lost.into_iter().for_each(|(_, waiting)| waiting.lose());
    }
}

impl Drop for OpenJoins {
    /// Handles may outlive their program.
    fn drop(&mut self) {
        let table = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        table.waiting.values().for_each(|waiting| waiting.lose());
    }
}

/// A task that was started. Without [`TaskHandle::join`] it goes on all the same, and its result is
/// dropped.
#[must_use = "a task whose result nobody wants is started by `drop(here.spawn_to(…)?)`"]
pub struct TaskHandle<R: Far> {
    pub(crate) waiting: Arc<Waiting>,
    pub(crate) result: PhantomData<R>,
}

impl<R: Far> core::fmt::Debug for TaskHandle<R> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "TaskHandle(at node {})", self.waiting.node)
    }
}

impl<R: Far> TaskHandle<R> {
    /// Returns the node at which the task runs.
    pub fn node(&self) -> NodeId {
        self.waiting.node
    }

    /// Waits until the task has ended and returns its result. A task may take as long as it likes;
    /// the wait ends with an error as soon as its node is known to be gone. Meanwhile another task
    /// may take the place of the caller's.
    pub fn join(self, here: &Here<'_>) -> Result<R, JoinError> {
        let value = self.waiting.wait(here).result?;
        // SAFETY: the handle was made with the code of a task that returns this type.
        Ok(unsafe { value.into_result() })
    }
}
