//! Locks whose values this node keeps: who holds them, and who waits. Among them are locks of nodes that are
//! gone, if they were in a backup.
#![allow(unsafe_code, reason = "values are bytes")]

use super::{NodeId, ShareNode};
use crate::message::{LockEnd, LockedType, ShareMessage, WaitAnswer};
use crate::stats::count;
use crate::task::Borrows;
use crate::task::code::ShippedCode;
use farfield_core::dsm::{BorrowRoot, HomeTicket, LockLine, OwnerWord, StoredLock};
use farfield_core::lock::LockMode;
use hashbrown::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of the holdings of locks that were taken while they were thin.
pub(crate) const THIN_NUMBER: u64 = 0;

/// Locks of this node that are held, or that were left. Those that are thin are not among them.
#[derive(Default)]
pub(super) struct HomeLocks(Mutex<HashMap<OwnerWord, HomeLock>>);

/// What is asked of a lock.
#[derive(Clone, Copy)]
pub(crate) struct LockWish {
    pub(crate) mode: LockMode,
    pub(crate) may_wait: bool,
    /// Whether the task may have been lent something of what the lock owns.
    pub(crate) may_borrow: bool,
    /// Whether nobody has used the ticket before.
    pub(crate) is_new: bool,
}

struct HomeLock {
    line: LockLine,
    /// Those who wait and may have been lent something of what the lock owns.
    borrowers: Vec<HomeTicket>,
    locked: LockedType,
    /// The last writer panicked, or was gone before it gave the lock back.
    was_left: bool,
    /// A writer is gone, and the value may own objects that it has dropped or handed on.
    is_lost: bool,
    /// The lock has no owner any more: it is dropped when nobody holds it.
    orphan: Option<Option<ShippedCode>>,
    /// The object is being dropped, or never will be.
    is_dropped: bool,
    /// A reader at the home has lent what the value owns to another node's task, and there are still readers here.
    is_lent: bool,
}

impl HomeLock {
    /// A lock that nobody holds.
    fn free(locked: LockedType) -> HomeLock {
        HomeLock {
            line: LockLine::default(),
            borrowers: Vec::new(),
            locked,
            was_left: false,
            is_lost: false,
            orphan: None,
            is_dropped: false,
            is_lent: false,
        }
    }
}

impl HomeLocks {
    /// Returns the locks that somebody waits for: the word, the nodes of the holders, and how many
    /// wait.
    pub(super) fn wanted(&self) -> Vec<(OwnerWord, Vec<u16>, usize)> {
        let locks = self.lock();
        let wanted = locks.iter().filter(|(_, lock)| lock.line.waiters() > 0);
        wanted
            .map(|(word, HomeLock { line, .. })| {
                (*word, line.holders().map(|ticket| ticket.node).collect(), line.waiters())
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<OwnerWord, HomeLock>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShareNode {
    /// Sees to it that a lock of this node is in the table, with those who have taken it while it was thin.
    fn inflate(&self, locks: &mut HashMap<OwnerWord, HomeLock>, word: OwnerWord, locked: LockedType) {
        let Some((count, mode)) = self.arena.inflate(word) else { return };
        if count > 0 {
            let holders = core::iter::repeat_n((self.thin_ticket(), mode), usize::from(count));
            locks.insert(word, HomeLock { line: LockLine::held_by(holders), ..HomeLock::free(locked) });
        }
    }

    /// Returns the ticket of all tasks of this node that have taken a lock while it was thin. No wait has its number.
    fn thin_ticket(&self) -> HomeTicket {
        HomeTicket { node: self.id.0, number: THIN_NUMBER }
    }

    /// Asks for a lock that is kept here, for a task of this node, as long as that needs no wait. Returns the
    /// number of the holding, and the answer.
    pub(crate) fn ask_lock_here(
        &self,
        word: OwnerWord,
        wish: LockWish,
        locked: LockedType,
    ) -> Option<(u64, WaitAnswer)> {
        if self.host_of(word) != self.id {
            return None;
        }
        let number = self.waits.number();
        let wish = LockWish { may_wait: false, is_new: true, ..wish };
        let answer = self.ask_lock(word, HomeTicket { node: self.id.0, number }, wish, locked)?;
        // Who waits has a place in the line, and somebody to tell.
        (!matches!(answer, WaitAnswer::Busy)).then_some((number, answer))
    }

    /// Asks for a lock of this node. Returns `None` if the ticket waits.
    pub(super) fn ask_lock(
        &self,
        word: OwnerWord,
        ticket: HomeTicket,
        wish: LockWish,
        locked: LockedType,
    ) -> Option<WaitAnswer> {
        let mut locks = self.locks.lock();
        // A message may be late. An object is dropped and freed under this mutex, and a node that is gone
        // was lost before its tickets are taken out.
        if !self.keeps(word) || self.peers.is_lost(NodeId(ticket.node)) {
            return Some(WaitAnswer::Closed);
        }
        if !wish.is_new && self.withdrawn().take(ticket) {
            return Some(WaitAnswer::Busy);
        }
        self.inflate(&mut locks, word, locked);
        let lock = locks.entry(word).or_insert_with(|| HomeLock::free(locked));
        if lock.is_dropped {
            return Some(WaitAnswer::Closed);
        }
        if lock.is_lost {
            return Some(WaitAnswer::Lost);
        }
        // Where so many wait, nobody has the lock at once.
        if lock.line.is_full_for(ticket.node) && lock.line.held(ticket).is_none() {
            return Some(WaitAnswer::TooMany);
        }
        // Whoever asks again after the home has died may have been given the lock before.
        if lock.line.held(ticket).is_some() || lock.line.ask(ticket, wish.mode) {
            self.note_change(word, lock, None);
            return Some(self.grant(word, lock, ticket));
        }
        if !wish.may_wait {
            lock.line.leave(ticket);
            return Some(WaitAnswer::Busy);
        }
        if wish.may_borrow {
            if let Some(node) = self.dead_lender(lock) {
                lock.line.leave(ticket);
                return Some(WaitAnswer::Borrowed(node));
            }
            lock.borrowers.push(ticket);
        }
        None
    }

    /// Returns the node of a reader of a lock that is gone, and that may have lent what the lock owns.
    fn dead_lender(&self, lock: &HomeLock) -> Option<u16> {
        let is_lender = |(ticket, mode): &(HomeTicket, LockMode)| {
            *mode == LockMode::Shared && self.peers.is_lost(NodeId(ticket.node))
        };
        lock.line.holdings().find(is_lender).map(|(ticket, _)| ticket.node).filter(|_| lock.locked.owns_others)
    }

    /// Records in the backup who holds a lock, and its new value if it has one.
    fn note_change(&self, word: OwnerWord, lock: &mut HomeLock, value: Option<Vec<u8>>) {
        let is_here = |(ticket, _): &(HomeTicket, LockMode)| ticket.node == self.id.0;
        lock.is_lent &= lock.line.holdings().any(|holding| is_here(&holding));
        // Readers at the home leave nothing when they die with it, unless they have lent something.
        let is_noted =
            |holding: &(HomeTicket, LockMode)| lock.is_lent || !is_here(holding) || holding.1 == LockMode::Exclusive;
        self.note_lock(word, |state| {
            let holders: Vec<_> = lock.line.holdings().filter(is_noted).collect();
            let is_changed = value.is_some()
                || state.holders != holders
                || (state.was_left, state.is_lost) != (lock.was_left, lock.is_lost);
            (state.holders, state.was_left, state.is_lost) = (holders, lock.was_left, lock.is_lost);
            if let Some(value) = value {
                state.value = value;
            }
            is_changed
        });
    }

    /// Records that a task with these borrows is about to be sent to another node: of the locks here, whoever takes
    /// them over has to wait for it. Returns the roots for the message.
    pub(super) fn lend(&self, borrows: &Borrows) -> Option<Vec<u64>> {
        let roots = borrows.as_ref()?;
        if self.has_backup() && roots.iter().any(|root| root.lock().is_some()) {
            let mut locks = self.locks.lock();
            for word in roots.iter().filter_map(|root| root.lock()) {
                if let Some(lock) = locks.get_mut(&word) {
                    lock.is_lent = true;
                    self.note_change(word, lock, None);
                }
            }
        }
        Some(roots.iter().map(|root| root.bits()).collect())
    }

    /// Returns whether an object of this version is kept here.
    fn keeps(&self, word: OwnerWord) -> bool {
        self.may_hold(word) || self.holds_promoted(word)
    }

    /// Returns the value under a lock.
    fn read_locked(&self, word: OwnerWord, bytes: u64) -> Option<Vec<u8>> {
        if self.is_promoted(word) {
            return self.read_promoted(word, 0, bytes);
        }
        let mut value = Vec::new();
        self.arena.read(word, bytes, &mut value).then_some(value)
    }

    /// Overwrites the value under a lock.
    fn write_locked(&self, word: OwnerWord, value: &[u8]) {
        if self.is_promoted(word) {
            self.write_promoted(word, value);
        } else {
            self.arena.write(word, value);
        }
    }

    /// Keeps a lock of a node that is gone. Its holders at living nodes hold it here.
    pub(super) fn promote_lock(&self, node: NodeId, word: OwnerWord, stored: StoredLock) {
        let mut locks = self.locks.lock();
        // A node that is gone was lost before its tickets are taken out.
        let is_gone = |holder: u16| holder == node.0 || self.peers.is_lost(NodeId(holder));
        let stored = stored.without(is_gone);
        self.keep_promoted(word, &stored.value);
        self.keep_stored_lock(word, stored.clone());
        let lenders = stored.lenders(is_gone);
        let StoredLock { value, holders, was_left, is_lost, owns_others } = stored;
        if !holders.is_empty() || was_left || is_lost {
            let locked = LockedType { bytes: value.len() as u64, owns_others, destructor: None };
            let line = LockLine::held_by(holders);
            locks.insert(word, HomeLock { line, was_left, is_lost, ..HomeLock::free(locked) });
        }
        drop(locks);
        self.outlast_lenders(lenders.into_iter().map(|ticket| (word, ticket)));
    }

    /// Returns what the ticket that has the lock is told: the value, if it is at another node.
    fn grant(&self, word: OwnerWord, lock: &HomeLock, ticket: HomeTicket) -> WaitAnswer {
        let mut value = Vec::new();
        // A value in the arena is used in place by tasks of this node.
        if ticket.node != self.id.0 || !self.is_here(word) {
            match self.read_locked(word, lock.locked.bytes) {
                Some(bytes) => value = bytes,
                None => return WaitAnswer::Closed,
            }
        }
        // Whoever has the lock can take the objects that the value owns.
        self.stage(|| {
            let destructor = lock.locked.destructor.filter(|_| !value.is_empty()).and_then(ShippedCode::find);
            // SAFETY: the bytes of the value, which nobody else holds.
            destructor.map_or_else(Vec::new, |destructor| unsafe { destructor.owned_by(&value, false) })
        });
        WaitAnswer::Granted { was_left: lock.was_left, value }
    }

    /// Ends a holding of a lock of this node, or a wait for it. Does nothing if the ticket has neither.
    pub(super) fn end_lock(&self, word: OwnerWord, ticket: HomeTicket, end: LockEnd) {
        self.end_lock_in(&mut self.locks.lock(), word, ticket, end);
    }

    fn end_lock_in(&self, locks: &mut HashMap<OwnerWord, HomeLock>, word: OwnerWord, ticket: HomeTicket, end: LockEnd) {
        let Some(lock) = locks.get_mut(&word) else { return };
        let mut written = None;
        if lock.line.held(ticket) == Some(LockMode::Exclusive) {
            lock.was_left = !matches!(end, LockEnd::Released(_));
            match end {
                LockEnd::Released(Some(value)) | LockEnd::Panicked(Some(value)) => {
                    if value.len() as u64 == lock.locked.bytes {
                        self.write_locked(word, &value);
                        written = Some(value);
                    }
                }
                // A task of this node may have written to it in place.
                LockEnd::Released(None) | LockEnd::Panicked(None) if self.has_backup() => {
                    written = self.read_locked(word, lock.locked.bytes);
                }
                LockEnd::Released(None) | LockEnd::Panicked(None) => {}
                LockEnd::Abandoned => lock.is_lost = lock.locked.owns_others,
            }
        }
        let mut turns = lock.line.leave(ticket);
        lock.borrowers.retain(|waiter| *waiter != ticket && !turns.contains(waiter));
        if lock.is_lost {
            turns.extend(lock.line.dissolve());
        }
        self.note_change(word, lock, written);
        for ticket in turns {
            let answer = if lock.is_lost { WaitAnswer::Lost } else { self.grant(word, lock, ticket) };
            self.answer(ticket, answer);
        }
        if !lock.line.is_idle() {
            return;
        }
        match lock.orphan.take() {
            Some(_) if lock.is_lost => {
                lock.is_dropped = true;
                count(&self.counters.orphans, 1);
            }
            Some(destructor) => {
                locks.remove(&word);
                self.outbox.free(self.id, word, destructor);
            }
            None if lock.was_left => {}
            None => {
                locks.remove(&word);
                self.arena.deflate(word);
            }
        }
    }

    /// Gives a lock back, wherever its home is. Never waits for another node.
    pub(crate) fn unlock(&self, word: OwnerWord, number: u64, end: LockEnd, locked: LockedType) {
        if number == THIN_NUMBER {
            let mut locks = self.locks.lock();
            // Whoever comes next is told how it was left.
            self.inflate(&mut locks, word, locked);
            self.end_lock_in(&mut locks, word, self.thin_ticket(), end);
        } else {
            self.give_back(word, number, end);
        }
    }

    /// Ends the holding of a ticket, wherever the home of the lock is. Never waits for another node.
    pub(super) fn give_back(&self, word: OwnerWord, number: u64, end: LockEnd) {
        let home = self.host_of(word);
        if home == self.id {
            self.end_lock(word, HomeTicket { node: self.id.0, number }, end);
        } else {
            self.outbox.tell(home, ShareMessage::Unlock { word: word.bits(), ticket: number, end });
        }
    }

    /// Ends a wait for a lock. Returns whether there was one; who holds the lock holds on.
    pub(super) fn cancel_lock(&self, word: OwnerWord, ticket: HomeTicket) -> bool {
        let mut locks = self.locks.lock();
        let is_waiting = locks.get(&word).is_some_and(|lock| lock.line.held(ticket).is_none());
        if is_waiting {
            self.end_lock_in(&mut locks, word, ticket, LockEnd::Released(None));
        }
        is_waiting
    }

    /// Ends what a ticket has at a lock that its node does not want any more. Returns whether it had something.
    pub(super) fn leave_lock(&self, word: OwnerWord, ticket: HomeTicket) -> bool {
        let mut locks = self.locks.lock();
        let is_there = locks.get(&word).is_some_and(|lock| lock.line.has(ticket));
        if is_there {
            self.end_lock_in(&mut locks, word, ticket, LockEnd::Released(None));
        }
        is_there
    }

    /// Ends the holdings and waits of a node that is gone. What the value of a lock owns may have been lent further
    /// by a reader, so its holding ends when nobody has borrowed that any more.
    pub(super) fn lose_locks(&self, node: u16) {
        let mut locks = self.locks.lock();
        let of_node = |(word, lock): (&OwnerWord, &HomeLock)| {
            let tickets = lock.line.of_node(node).into_iter();
            tickets.map(|ticket| (lock.line.held(ticket).is_some(), *word, ticket)).collect::<Vec<_>>()
        };
        let may_have_lent = |(_, word, ticket): &(bool, OwnerWord, HomeTicket)| {
            let lock = locks.get(word).filter(|lock| lock.locked.owns_others);
            lock.is_some_and(|lock| lock.line.held(*ticket) == Some(LockMode::Shared))
        };
        let all = locks.iter().flat_map(of_node);
        let (lent, mut lost): (Vec<_>, Vec<_>) = all.partition(may_have_lent);
        // Who waits and is among those who are waited for would wait for ever.
        for word in lent.iter().map(|(_, word, _)| *word) {
            let borrowers = locks.get_mut(&word).map(|lock| core::mem::take(&mut lock.borrowers));
            for ticket in borrowers.into_iter().flatten() {
                let is_waiting = |lock: &HomeLock| lock.line.has(ticket) && lock.line.held(ticket).is_none();
                if locks.get(&word).is_some_and(is_waiting) && ticket.node != node {
                    self.end_lock_in(&mut locks, word, ticket, LockEnd::Released(None));
                    self.answer(ticket, WaitAnswer::Borrowed(node));
                }
            }
        }
        self.outlast_lenders(lent.into_iter().map(|(_, word, ticket)| (word, ticket)));
        // Those that wait first, so that none of them has its turn.
        lost.sort_by_key(|(is_held, ..)| *is_held);
        lost.into_iter().for_each(|(_, word, ticket)| self.end_lock_in(&mut locks, word, ticket, LockEnd::Abandoned));
    }

    /// Ends the holdings of readers whose nodes are gone, each when nobody has borrowed any more what the value of
    /// its lock owns.
    fn outlast_lenders(&self, lenders: impl IntoIterator<Item = (OwnerWord, HomeTicket)>) {
        for (word, ticket) in lenders {
            let Some(this) = self.shared() else { return };
            // Each has a thread: who has borrowed something under one of the locks may wait for another one.
            let body = move || {
                this.outlast_borrowers(NodeId(ticket.node), BorrowRoot::of_lock(word));
                this.end_lock(word, ticket, LockEnd::Abandoned);
            };
            if std::thread::Builder::new().name("share-borrowers".into()).spawn(body).is_err() {
                // Without a thread the lock stays held, and is counted.
                count(&self.counters.orphans, 1);
            }
        }
    }

    /// Begins to drop an object that has no owner. Returns whether it is to be dropped now: a lock that
    /// is held is dropped later, one whose value is lost never, and what was said twice is done once.
    pub(super) fn begin_drop(&self, word: OwnerWord, destructor: Option<ShippedCode>) -> bool {
        let mut locks = self.locks.lock();
        if !self.keeps(word) {
            count(&self.counters.late_frees, 1);
            return false;
        }
        self.inflate(&mut locks, word, LockedType { bytes: 0, owns_others: false, destructor: None });
        match locks.get_mut(&word) {
            Some(lock) if lock.is_dropped => false,
            Some(lock) if !lock.line.is_idle() => {
                lock.orphan = Some(destructor);
                // Nobody takes it over, and whoever holds it may have taken the value.
                self.forget_stored(word);
                false
            }
            Some(lock) if lock.is_lost => {
                lock.is_dropped = true;
                count(&self.counters.orphans, 1);
                false
            }
            Some(lock) => {
                lock.is_dropped = true;
                true
            }
            // Any object: who asks for it late, as for a lock, does not get it.
            None => {
                let locked = LockedType { bytes: 0, owns_others: false, destructor: None };
                locks.insert(word, HomeLock { is_dropped: true, ..HomeLock::free(locked) });
                true
            }
        }
    }

    /// Frees the block of an object that was dropped.
    pub(super) fn end_drop(&self, word: OwnerWord) {
        let mut locks = self.locks.lock();
        if self.is_here(word) {
            self.free_block(word);
        }
        locks.remove(&word);
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;
    use crate::node::{Peers, within};
    use crate::object::owned_by;
    use crate::{DRwLock, Here, NodeBuilder};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    const OTHER: HomeTicket = HomeTicket { node: 1, number: 5 };
    const LOCKED: LockedType = LockedType { bytes: 8, owns_others: false, destructor: None };

    fn node() -> Arc<ShareNode> {
        let peers = Peers::new(2, 7, String::new());
        ShareNode::new(NodeId(0), 0, &NodeBuilder::new().near(1 << 20), peers, None).unwrap()
    }

    fn word_of(lock: &DRwLock<u64>) -> OwnerWord {
        owned_by(lock)[0].word
    }

    /// Another node asks for the lock. Returns whether it has it at once.
    fn ask(node: &ShareNode, word: OwnerWord, mode: LockMode) -> bool {
        let wish = LockWish { mode, may_wait: true, may_borrow: false, is_new: false };
        matches!(node.ask_lock(word, OTHER, wish, LOCKED), Some(WaitAnswer::Granted { .. }))
    }

    #[test]
    fn a_lock_is_in_the_table_only_while_others_are_concerned() {
        let node = node();
        let here = Here::at(&node);
        let lock = DRwLock::new(&here, 5u64).unwrap();
        let word = word_of(&lock);
        let entries = || node.locks.lock().len();
        let held = || node.locks.lock().get(&word).and_then(|lock| lock.line.held(OTHER));
        let give_back = |value: u64| {
            node.end_lock(word, OTHER, LockEnd::Released(Some(value.to_ne_bytes().to_vec())));
        };
        *lock.write(&here).unwrap() += 1;
        let (first, second) = (lock.read(&here).unwrap(), lock.read(&here).unwrap());
        assert_eq!((entries(), *first, *second), (0, 6, 6));
        // Somebody waits for all who have it already.
        assert!(!ask(&node, word, LockMode::Exclusive));
        drop(first);
        assert_eq!((entries(), held()), (1, None));
        drop(second);
        assert_eq!(held(), Some(LockMode::Exclusive));
        give_back(9);
        assert_eq!((entries(), *lock.read(&here).unwrap()), (0, 9), "it is thin again, with the new value");
        // A writer is waited for in the same way; readers elsewhere and here share the lock.
        let writer = lock.write(&here).unwrap();
        assert!(!ask(&node, word, LockMode::Shared));
        drop(writer);
        assert_eq!((held(), *lock.read(&here).unwrap()), (Some(LockMode::Shared), 9));
        node.end_lock(word, OTHER, LockEnd::Released(None));
        assert_eq!(entries(), 0);
        within(&node, false, || drop(lock));
    }

    #[test]
    fn a_thin_lock_that_is_left_says_so_once() {
        let node = node();
        let here = Here::at(&node);
        let lock = DRwLock::new(&here, 5u64).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut value = lock.write(&here).unwrap();
            *value = 6;
            panic!("no luck")
        }));
        assert!(panicked.is_err());
        for (was_left, value) in [(true, 6), (false, 7)] {
            let mut writer = lock.write(&here).unwrap();
            assert_eq!((writer.was_left(), *writer), (was_left, value));
            *writer += 1;
        }
        // A reader that panics leaves nothing, and a guard that is forgotten leaves its lock with the task.
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _value = lock.read(&here).unwrap();
            panic!("no luck")
        }));
        assert!(panicked.is_err() && !lock.write(&here).unwrap().was_left());
        let task = Here::at(&node);
        let forgotten = core::mem::ManuallyDrop::new(lock.write(&task).unwrap());
        assert!(!ask(&node, word_of(&lock), LockMode::Exclusive));
        task.leave_locks();
        assert_eq!(**forgotten, 8);
        node.end_lock(word_of(&lock), OTHER, LockEnd::Released(None));
        within(&node, false, || drop(lock));
    }

    #[test]
    fn the_word_of_a_lock_that_is_gone_takes_no_later_lock() {
        let node = node();
        let here = Here::at(&node);
        let lock = DRwLock::new(&here, 5u64).unwrap();
        let old = word_of(&lock);
        within(&node, false, || drop(lock));
        let started = std::time::Instant::now();
        while node.stats().object_bytes > 0 {
            assert!(started.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
        assert!(!node.arena.take_thin(old, LockMode::Exclusive), "it is gone");
        let lock = DRwLock::new(&here, 6u64).unwrap();
        let new = word_of(&lock);
        assert!(old.is_same_block(new) && old != new);
        assert!(!node.arena.take_thin(old, LockMode::Shared) && !ask(&node, old, LockMode::Shared));
        assert!(node.arena.take_thin(new, LockMode::Exclusive));
        assert!(node.arena.release_thin(new, LockMode::Exclusive));
        within(&node, false, || drop(lock));
    }
}
