//! Locks whose values this node keeps: who holds them, and who waits.

use super::ShareNode;
use crate::message::{LockEnd, LockedType, ShareMessage, WaitAnswer};
use crate::stats::count;
use crate::task::code::ShippedCode;
use farfield_core::dsm::{HomeTicket, LockLine, OwnerWord};
use farfield_core::lock::LockMode;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks of this node that are held, or that were left.
#[derive(Default)]
pub(super) struct HomeLocks(Mutex<HashMap<OwnerWord, HomeLock>>);

struct HomeLock {
    line: LockLine,
    locked: LockedType,
    /// The last writer panicked, or was gone before it gave the lock back.
    was_left: bool,
    /// A writer is gone, and the value may own objects that it has dropped or handed on.
    is_lost: bool,
    /// The lock has no owner any more: it is dropped when nobody holds it.
    orphan: Option<Option<ShippedCode>>,
}

impl HomeLocks {
    fn lock(&self) -> MutexGuard<'_, HashMap<OwnerWord, HomeLock>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShareNode {
    /// Asks for a lock of this node. Returns `None` if the ticket waits.
    pub(super) fn ask_lock(
        &self,
        word: OwnerWord,
        ticket: HomeTicket,
        mode: LockMode,
        may_wait: bool,
        locked: LockedType,
    ) -> Option<WaitAnswer> {
        if !self.may_hold(word) {
            return Some(WaitAnswer::Closed);
        }
        let mut locks = self.locks.lock();
        let lock = locks.entry(word).or_insert_with(|| HomeLock {
            line: LockLine::default(),
            locked,
            was_left: false,
            is_lost: false,
            orphan: None,
        });
        if lock.is_lost {
            return Some(WaitAnswer::Lost);
        }
        if lock.line.ask(ticket, mode) {
            return Some(self.grant(word, lock, ticket));
        }
        if !may_wait {
            lock.line.leave(ticket);
            return Some(WaitAnswer::Busy);
        }
        None
    }

    /// Returns what the ticket that has the lock is told: the value, if it is at another node.
    fn grant(&self, word: OwnerWord, lock: &HomeLock, ticket: HomeTicket) -> WaitAnswer {
        let mut value = Vec::new();
        if ticket.node != self.id.0 && !self.arena.read(word, lock.locked.bytes, &mut value) {
            return WaitAnswer::Closed;
        }
        WaitAnswer::Granted { was_left: lock.was_left, value }
    }

    /// Ends a holding of a lock of this node, or a wait for it. Does nothing if the ticket has neither.
    pub(super) fn end_lock(&self, word: OwnerWord, ticket: HomeTicket, end: LockEnd) {
        let mut locks = self.locks.lock();
        let Some(lock) = locks.get_mut(&word) else { return };
        if lock.line.held(ticket) == Some(LockMode::Exclusive) {
            lock.was_left = !matches!(end, LockEnd::Released(_));
            match end {
                LockEnd::Released(Some(value)) | LockEnd::Panicked(Some(value)) => {
                    if value.len() as u64 == lock.locked.bytes {
                        self.arena.write(word, &value);
                    }
                }
                LockEnd::Released(None) | LockEnd::Panicked(None) => {}
                LockEnd::Abandoned => lock.is_lost = lock.locked.owns_others,
            }
        }
        let turns = lock.line.leave(ticket);
        if lock.is_lost {
            let waited = lock.line.dissolve();
            turns.into_iter().chain(waited).for_each(|ticket| self.answer(ticket, WaitAnswer::Lost));
        } else {
            turns.into_iter().for_each(|ticket| self.answer(ticket, self.grant(word, lock, ticket)));
        }
        if lock.line.is_idle() {
            let orphan = lock.orphan.take();
            if !lock.was_left || orphan.is_some() {
                let is_lost = lock.is_lost;
                locks.remove(&word);
                match orphan {
                    Some(_) if is_lost => count(&self.counters.orphans, 1),
                    Some(destructor) => self.outbox.free(self.id, word, destructor),
                    None => {}
                }
            }
        }
    }

    /// Gives a lock back, wherever its home is. Never waits for another node.
    pub(crate) fn unlock(&self, word: OwnerWord, number: u64, end: LockEnd) {
        let home = self.home_of(word);
        if home == self.id {
            self.end_lock(word, HomeTicket { node: self.id.0, number }, end);
        } else {
            self.outbox.tell(home, ShareMessage::Unlock { word: word.bits(), ticket: number, end });
        }
    }

    /// Ends a wait for a lock. Returns whether there was one; who holds the lock holds on.
    pub(super) fn cancel_lock(&self, word: OwnerWord, ticket: HomeTicket) -> bool {
        let is_held = self.locks.lock().get(&word).is_none_or(|lock| lock.line.held(ticket).is_some());
        if !is_held {
            self.end_lock(word, ticket, LockEnd::Released(None));
        }
        !is_held
    }

    /// Ends the holdings and waits of a node that is gone.
    pub(super) fn lose_locks(&self, node: u16) {
        let of_node = |(word, lock): (&OwnerWord, &HomeLock)| {
            lock.line.of_node(node).into_iter().map(|ticket| (*word, ticket)).collect::<Vec<_>>()
        };
        let lost: Vec<_> = self.locks.lock().iter().flat_map(of_node).collect();
        lost.into_iter().for_each(|(word, ticket)| self.end_lock(word, ticket, LockEnd::Abandoned));
    }

    /// Looks whether an object without an owner is a lock that is held or lost. If so, it is dropped
    /// later, or never.
    pub(super) fn is_lock_in_use(&self, word: OwnerWord, destructor: Option<ShippedCode>) -> bool {
        let mut locks = self.locks.lock();
        let Some(lock) = locks.get_mut(&word) else { return false };
        if lock.line.is_idle() {
            let is_lost = lock.is_lost;
            locks.remove(&word);
            if is_lost {
                count(&self.counters.orphans, 1);
            }
            return is_lost;
        }
        lock.orphan = Some(destructor);
        true
    }
}
