//! Threads that run the tasks of a node: a few at a time, in the order in which they came.

use super::code::ShippedCode;
use crate::NodeId;
use crate::node::ShareNode;
use crate::primitives::{Condvar, Mutex, MutexGuard, thread};
use farfield_core::dsm::{BorrowRoot, NodeLoad};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// A task that has not begun: bytes only.
pub(crate) struct QueuedTask {
    /// Node that waits for its end.
    pub(crate) origin: NodeId,
    /// Number of the task there.
    pub(crate) number: u64,
    pub(crate) body: ShippedCode,
    /// Bytes that own what the arguments own.
    pub(crate) arguments: Vec<u8>,
    /// Whether it may begin at another node.
    pub(crate) may_move: bool,
    pub(crate) borrows: Borrows,
    /// Bytes of the task, if another node has sent it.
    pub(crate) bytes_of_other: Option<u64>,
}

/// Roots of the borrows that a task may have of the one that has started it; `None` if it can have none.
pub(crate) type Borrows = Option<Arc<[BorrowRoot]>>;

/// Most tasks of other nodes at a node. Those that wait for something lend their places, but keep their threads.
pub(crate) const TASKS_OF_OTHERS_MAX: u64 = 1 << 16;

/// Refusal of a task of another node: what has not begun would be so much with it, and the most that it may be.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) enum TaskRefusal {
    Tasks { tasks: u64, most: u64 },
    Bytes { bytes: u64, limit_bytes: u64 },
}

/// Time for which a thread waits for the next task before it ends.
const IDLE_FOR: Duration = Duration::from_secs(1);

pub(crate) struct Workers {
    most: usize,
    queue: Mutex<Queue>,
    submitted: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<QueuedTask>,
    /// Threads that run a task and do not wait for another one.
    busy: usize,
    /// Threads that wait for a task.
    idle: usize,
    /// Threads of these that shall go on: they count as busy already.
    called: usize,
    /// Busy threads that have not taken their task yet.
    starting: usize,
    /// Busy threads that only tell how their task has ended.
    ending: usize,
    /// Tasks of these that may begin at another node.
    movable: usize,
    /// Tasks of other nodes that have not ended, and the bytes of those that have not begun.
    of_others: u64,
    bytes_of_others: u64,
    /// Number of the last statement about the load.
    stamp: u64,
}

impl Queue {
    /// Returns the work of a node that runs so many tasks at a time.
    fn load(&self, most: usize) -> NodeLoad {
        // Each of those that start takes a task.
        let taken = (self.busy + self.tasks.len()).saturating_sub(self.starting + self.ending);
        let waiting = self.movable.saturating_sub(self.starting);
        let bounded = |count| u8::try_from(count).unwrap_or(u8::MAX);
        NodeLoad { stamp: self.stamp, room: bounded(most.saturating_sub(taken)), waiting: bounded(waiting) }
    }

    fn take(&mut self, index: usize) -> Option<QueuedTask> {
        let task = self.tasks.remove(index)?;
        self.movable -= usize::from(task.may_move);
        self.bytes_of_others -= task.bytes_of_other.unwrap_or(0);
        Some(task)
    }
}

impl Workers {
    /// Tasks of a node, `most` of which run at a time.
    pub(crate) fn new(most: usize) -> Workers {
        Workers { most, queue: Mutex::default(), submitted: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many tasks run, and how many wait for a place.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let queue = self.lock();
        (queue.busy, queue.tasks.len())
    }

    /// Says what other nodes are told of the work. No task begins, ends or is queued while `note` notes
    /// who is told.
    pub(crate) fn tell_load<T>(&self, note: impl FnOnce(NodeLoad) -> T) -> T {
        let mut queue = self.lock();
        queue.stamp += 1;
        note(queue.load(self.most))
    }

    /// Returns the work of the node.
    pub(crate) fn load(&self) -> NodeLoad {
        self.lock().load(self.most)
    }

    /// Takes a task that may begin at another node: the one that has waited longest.
    pub(crate) fn take_movable(&self) -> Option<QueuedTask> {
        let mut queue = self.lock();
        // Threads of this node are on their way to the first ones.
        let first = queue.tasks.iter().skip(queue.starting).position(|task| task.may_move)?;
        let index = first + queue.starting;
        queue.take(index)
    }

    /// Records that a task of this thread has ended while `tell` tells how.
    pub(crate) fn while_ending(&self, tell: impl FnOnce()) {
        self.lock().ending += 1;
        tell();
        self.lock().ending -= 1;
    }

    /// Returns how many tasks run at a time.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Queues a task of another node, if there are not too many, and those that have not begun take at most so many
    /// bytes with it.
    pub(crate) fn submit_of_other(
        &self,
        node: &Arc<ShareNode>,
        task: QueuedTask,
        limit_bytes: u64,
    ) -> Result<(), TaskRefusal> {
        let more = (task.arguments.len() + task.borrows.as_ref().map_or(0, |roots| size_of_val(&**roots))) as u64;
        let mut queue = self.lock();
        let (tasks, bytes) = (queue.of_others + 1, queue.bytes_of_others + more);
        if tasks > TASKS_OF_OTHERS_MAX {
            return Err(TaskRefusal::Tasks { tasks, most: TASKS_OF_OTHERS_MAX });
        }
        if bytes > limit_bytes {
            return Err(TaskRefusal::Bytes { bytes, limit_bytes });
        }
        (queue.of_others, queue.bytes_of_others) = (tasks, bytes);
        queue.tasks.push_back(QueuedTask { bytes_of_other: Some(more), ..task });
        self.start(node, &mut queue);
        Ok(())
    }

    /// Queues a task of this node. Never waits.
    pub(crate) fn submit(&self, node: &Arc<ShareNode>, task: QueuedTask) {
        let mut queue = self.lock();
        queue.movable += usize::from(task.may_move);
        queue.tasks.push_back(task);
        self.start(node, &mut queue);
    }

    /// Takes back a task that was to begin elsewhere: it has waited longest.
    pub(crate) fn take_back(&self, node: &Arc<ShareNode>, task: QueuedTask) {
        let mut queue = self.lock();
        queue.movable += usize::from(task.may_move);
        queue.tasks.push_front(task);
        self.start(node, &mut queue);
    }

    /// Lets a thread begin if there are tasks, and fewer run than may.
    fn start(&self, node: &Arc<ShareNode>, queue: &mut Queue) {
        if queue.busy >= self.most || queue.tasks.is_empty() {
            return;
        }
        if queue.idle > queue.called {
            queue.called += 1;
            queue.busy += 1;
            queue.starting += 1;
            self.submitted.notify_one();
            return;
        }
        let worker = node.clone();
        let thread = thread::Builder::new().name("share-worker".into());
        match thread.spawn(move || worker.workers.work(&worker)) {
            Ok(_) => {
                queue.busy += 1;
                queue.starting += 1;
            }
            Err(error) if queue.busy == 0 => {
                while let Some(task) = queue.take(0) {
                    queue.of_others -= u64::from(task.bytes_of_other.is_some());
                    node.refuse_task(task, &error);
                }
            }
            // Those that run take the task when they have ended.
            Err(_) => {}
        }
    }

    /// Runs tasks until there have been none for a while. The thread counts as busy at first.
    fn work(&self, node: &Arc<ShareNode>) {
        let mut queue = self.lock();
        queue.starting -= 1;
        loop {
            // Who waited and came back may be one too many.
            let next = if queue.busy > self.most { None } else { queue.take(0) };
            if let Some(task) = next {
                drop(queue);
                let is_of_other = task.bytes_of_other.is_some();
                node.run_task(task);
                queue = self.lock();
                queue.of_others -= u64::from(is_of_other);
                continue;
            }
            queue.busy -= 1;
            queue.idle += 1;
            if queue.tasks.is_empty() {
                drop(queue);
                node.offer_room();
                queue = self.lock();
            }
            let wait = self.submitted.wait_timeout_while(queue, IDLE_FOR, |queue| queue.called == 0);
            queue = wait.unwrap_or_else(PoisonError::into_inner).0;
            queue.idle -= 1;
            if queue.called == 0 {
                return;
            }
            queue.called -= 1;
            queue.starting -= 1;
        }
    }

    /// Waits for something that another task may have to do: lends the place of this thread's task
    /// meanwhile.
    pub(crate) fn while_waiting<T>(&self, node: &ShareNode, wait: impl FnOnce() -> T) -> T {
        if !node.is_worker() {
            return wait();
        }
        {
            let mut queue = self.lock();
            queue.busy -= 1;
            if let Some(node) = node.shared() {
                self.start(&node, &mut queue);
            }
        }
        node.offer_room();
        let waited = wait();
        self.lock().busy += 1;
        waited
    }
}
