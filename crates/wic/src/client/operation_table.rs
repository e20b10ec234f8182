//! Operations in flight of a place, and the tasks that wait for them.
//!
//! A waiting task may be dropped. Its operation is then marked as abandoned, and the slot is used
//! again when the operation has come back.

use slab::Slab;
use std::collections::VecDeque;

enum InFlightSlot<T> {
    /// In flight, or about to be.
    Pending { task: u32 },
    /// Completed, and the result not yet taken.
    Completed(T),
    /// In flight, but no task wants the result.
    Abandoned,
}

/// Operations by their tags, which are used again.
pub(super) struct OperationTable<T> {
    slots: Slab<InFlightSlot<T>>,
    in_flight: usize,
}

impl<T> OperationTable<T> {
    pub(super) fn new() -> OperationTable<T> {
        OperationTable { slots: Slab::new(), in_flight: 0 }
    }

    /// Returns the number of operations that have not come back.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Begins an operation for which this task waits, and returns its tag.
    pub(super) fn begin(&mut self, task: u32) -> u32 {
        self.in_flight += 1;
        self.slots.insert(InFlightSlot::Pending { task }) as u32
    }

    /// Ends an operation that has come back, and makes its task ready. Returns the value if no task
    /// wants it.
    pub(super) fn end(&mut self, tag: u32, value: T, ready: &mut VecDeque<u32>) -> Option<T> {
        self.in_flight -= 1;
        let slot = &mut self.slots[tag as usize];
        match *slot {
            InFlightSlot::Pending { task } => {
                *slot = InFlightSlot::Completed(value);
                ready.push_back(task);
                None
            }
            InFlightSlot::Abandoned => {
                self.slots.remove(tag as usize);
                Some(value)
            }
            InFlightSlot::Completed(_) => unreachable!("an operation ends once"),
        }
    }

    /// Takes the result of an operation, if it has come back. Otherwise this task, which may be
    /// another one by now, waits on.
    pub(super) fn take(&mut self, tag: u32, task: u32) -> Option<T> {
        if let InFlightSlot::Pending { task: waiting } = &mut self.slots[tag as usize] {
            *waiting = task;
            return None;
        }
        let InFlightSlot::Completed(value) = self.slots.remove(tag as usize) else {
            unreachable!("a task that waits has not given up");
        };
        Some(value)
    }

    /// Gives up an operation that no task wants any more. Returns its result, if it has come back.
    pub(super) fn give_up(&mut self, tag: u32) -> Option<T> {
        match core::mem::replace(&mut self.slots[tag as usize], InFlightSlot::Abandoned) {
            InFlightSlot::Pending { .. } => None,
            InFlightSlot::Completed(value) => {
                self.slots.remove(tag as usize);
                Some(value)
            }
            InFlightSlot::Abandoned => unreachable!("a task that waits has not given up"),
        }
    }
}
