//! What a place has under way, and the tasks that wait for it.
//!
//! Who waits may be dropped. What it waited for is then marked as given up, and its place is used again when it has come back.

use std::collections::VecDeque;

enum Slot<T> {
    /// Nobody's.
    Free,
    /// In flight, or about to be.
    Waits { task: u32 },
    /// Ended, and not yet looked at.
    Ended(T),
    /// In flight, and wanted by nobody.
    GivenUp,
}

/// Operations by their tags, which are used again.
pub(super) struct Underway<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    in_flight: usize,
}

impl<T> Underway<T> {
    pub(super) fn new() -> Underway<T> {
        Underway { slots: Vec::new(), free: Vec::new(), in_flight: 0 }
    }

    /// Operations that have not come back.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// One more, for which this task waits; its tag.
    pub(super) fn begin(&mut self, task: u32) -> u32 {
        self.in_flight += 1;
        let waits = Slot::Waits { task };
        if let Some(tag) = self.free.pop() {
            self.slots[tag as usize] = waits;
            return tag;
        }
        self.slots.push(waits);
        self.slots.len() as u32 - 1
    }

    /// It has come back, and the task goes on. What nobody wants is returned.
    pub(super) fn end(&mut self, tag: u32, value: T, ready: &mut VecDeque<u32>) -> Option<T> {
        self.in_flight -= 1;
        let slot = &mut self.slots[tag as usize];
        match *slot {
            Slot::Waits { task } => {
                *slot = Slot::Ended(value);
                ready.push_back(task);
                None
            }
            Slot::GivenUp => {
                *slot = Slot::Free;
                self.free.push(tag);
                Some(value)
            }
            Slot::Free | Slot::Ended(_) => unreachable!("an operation ends once"),
        }
    }

    /// What it came to, if it has come back; else this task, which may be another one by now, waits on.
    pub(super) fn take(&mut self, tag: u32, task: u32) -> Option<T> {
        let slot = &mut self.slots[tag as usize];
        if let Slot::Waits { task: waiting } = slot {
            *waiting = task;
            return None;
        }
        let Slot::Ended(value) = core::mem::replace(slot, Slot::Free) else {
            unreachable!("who waits has not given up");
        };
        self.free.push(tag);
        Some(value)
    }

    /// Nobody wants it any more; what it came to, if it has come back.
    pub(super) fn give_up(&mut self, tag: u32) -> Option<T> {
        match core::mem::replace(&mut self.slots[tag as usize], Slot::GivenUp) {
            Slot::Waits { .. } => None,
            Slot::Ended(value) => {
                self.slots[tag as usize] = Slot::Free;
                self.free.push(tag);
                Some(value)
            }
            Slot::Free | Slot::GivenUp => unreachable!("who waits has not given up"),
        }
    }
}
