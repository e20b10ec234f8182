//! Answers that other nodes will give: where each arrives, by number.

use crate::primitives::{AtomicU16, AtomicU64, Condvar, Mutex, MutexGuard};
use crate::{NodeId, ShareError};
use core::sync::atomic::Ordering::Relaxed;
use farfield_core::dsm::OwnerWord;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Waits of a node for answers `T`, and what it knows about each.
pub(crate) struct WaitTable<T: From<ShareError>, M = ()> {
    /// Number of the last wait.
    last: AtomicU64,
    slots: Mutex<HashMap<u64, Arc<WaitSlot<T, M>>>>,
}

/// Where an answer arrives.
pub(crate) struct WaitSlot<T, M = ()> {
    /// Node that answers. It changes under the lock of the table.
    node: AtomicU16,
    cause: WaitCause,
    about: M,
    answer: Mutex<Option<T>>,
    arrived: Condvar,
}

impl<T: From<ShareError>, M> Default for WaitTable<T, M> {
    fn default() -> Self {
        WaitTable { last: AtomicU64::new(0), slots: Mutex::new(HashMap::new()) }
    }
}

impl<T: From<ShareError>, M> WaitTable<T, M> {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<WaitSlot<T, M>>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Expects an answer of a node. Returns the number of the wait, which is used once.
    pub(crate) fn expect(&self, node: NodeId, cause: WaitCause, about: M) -> (u64, Arc<WaitSlot<T, M>>) {
        let slot = Arc::new(WaitSlot::new(node, cause, about));
        let number = self.number();
        self.lock().insert(number, slot.clone());
        (number, slot)
    }

    /// Returns a number that no wait has: of one that is over before it begins.
    pub(crate) fn number(&self) -> u64 {
        self.last.fetch_add(1, Relaxed) + 1
    }

    /// Returns where the answer of this number belongs, once.
    pub(crate) fn take(&self, number: u64) -> Option<Arc<WaitSlot<T, M>>> {
        self.lock().remove(&number)
    }

    /// Expects an answer of this number again, from another node.
    pub(super) fn expect_again(&self, number: u64, node: NodeId, cause: WaitCause, about: M) -> Arc<WaitSlot<T, M>> {
        let slot = Arc::new(WaitSlot::new(node, cause, about));
        self.lock().insert(number, slot.clone());
        slot
    }

    /// Records that another node will answer. Returns whether the answer is still waited for.
    pub(crate) fn expect_from(&self, number: u64, node: NodeId) -> bool {
        self.lock().get(&number).is_some_and(|slot| {
            slot.node.store(node.0, Relaxed);
            true
        })
    }

    /// Ends all waits for a node that is gone.
    pub(crate) fn lose(&self, node: NodeId) {
        let lost: Vec<_> = self.lock().extract_if(|_, slot| slot.node() == node).collect();
        lost.into_iter().for_each(|(_, slot)| slot.lose());
    }
}

impl<T: From<ShareError>, M> Drop for WaitTable<T, M> {
    /// Waits may outlive their program.
    fn drop(&mut self) {
        let waits = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        waits.values().for_each(|slot| slot.lose());
    }
}

impl<T, M> WaitSlot<T, M> {
    fn new(node: NodeId, cause: WaitCause, about: M) -> WaitSlot<T, M> {
        WaitSlot { node: AtomicU16::new(node.0), cause, about, answer: Mutex::new(None), arrived: Condvar::new() }
    }

    pub(crate) fn node(&self) -> NodeId {
        NodeId(self.node.load(Relaxed))
    }

    pub(crate) fn about(&self) -> &M {
        &self.about
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the answer. Only the first one counts.
    pub(crate) fn put(&self, answer: T) {
        self.lock().get_or_insert(answer);
        self.arrived.notify_all();
    }

    /// Records that the node is gone.
    fn lose(&self)
    where
        T: From<ShareError>,
    {
        self.put(ShareError::NodeLost { node: self.node() }.into());
    }

    /// Takes the answer, if it is there.
    pub(super) fn take(&self) -> Option<T> {
        self.lock().take()
    }

    /// Takes the answer when it is there. Returns `None` if it has not come until then.
    pub(super) fn take_until(&self, until: Instant) -> Option<T> {
        let mut answer = self.lock();
        loop {
            if let Some(answer) = answer.take() {
                return Some(answer);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            answer = self.arrived.wait_timeout(answer, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn cause(&self) -> WaitCause {
        self.cause
    }
}

/// Cause of a thread's wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitCause {
    /// The end of a task that runs at a node.
    Task,
    /// A lock of a node.
    Lock(OwnerWord),
    /// A channel of a node.
    Channel(OwnerWord),
    /// A value that gets a name.
    Name,
    /// The answer of a node.
    Answer,
}
