//! Tasks that wait: for something that is on its way, or for room.
//!
//! A task that finds a page Loading, or a handle Moving, sets its *wanted* mark while it holds the
//! lock here, and leaves its waker. The thread that lands it and sees the mark comes here
//! afterwards. So either the task sees what has landed, or the lander sees the task. Numbers are
//! those within the heap: of pages, and above them of handles.

use crate::error::FarError;
use core::hash::{BuildHasherDefault, Hasher};
use core::sync::atomic::{AtomicUsize, Ordering};
use core::task::Waker;
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Index in the table; its owner takes the entry out with [`Waiters::look`] or [`Waiters::forget`].
#[derive(Debug)]
pub(crate) struct WaiterTicket(u32);

/// Place in the queue of tasks that wait for room.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ReclaimTurn(u64);

/// All tasks that wait for something of a heap.
#[derive(Default)]
pub(crate) struct Waiters {
    table: Mutex<WaiterTable>,
    for_room: Mutex<ReclaimQueue>,
    for_room_count: AtomicUsize,
}

#[derive(Default)]
struct ReclaimQueue {
    /// Tasks that wait, in the order of their turns.
    waiting: VecDeque<(ReclaimTurn, Waker, Instant)>,
    /// Number of turns that were given.
    turns: u64,
}

#[derive(Default)]
struct WaiterTable {
    slots: Vec<WaiterSlot>,
    free: Vec<u32>,
    /// Index of the last task that began to wait for a number; the others follow it in a list.
    last: HashMap<u32, u32, BuildHasherDefault<NumberHasher>>,
}

enum WaiterSlot {
    Free,
    Waiting { number: u32, waker: Waker, next: Option<u32> },
    Ended(Result<(), FarError>),
}

/// Hasher for our own numbers, which need to be spread, not to be secret.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("they are numbers")
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        let product = (u128::from(number) + 1) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, WaiterTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the flight of this number, if `mark` says that it is under way and has been marked
    /// as wanted.
    pub(crate) fn wait(&self, number: u32, waker: &Waker, mark: impl FnOnce() -> bool) -> Option<WaiterTicket> {
        let waker = waker.clone();
        let mut table = self.lock();
        if !mark() {
            drop(table);
            return None;
        }
        let place = table.free.pop().unwrap_or_else(|| {
            table.slots.push(WaiterSlot::Free);
            table.slots.len() as u32 - 1
        });
        let next = table.last.insert(number, place);
        table.slots[place as usize] = WaiterSlot::Waiting { number, waker, next };
        Some(WaiterTicket(place))
    }

    /// Returns how the wait ended, if it is over. Otherwise this waker is woken when it is.
    pub(crate) fn look(&self, ticket: WaiterTicket, waker: &Waker) -> Result<Result<(), FarError>, WaiterTicket> {
        let mut waker = waker.clone();
        let mut table = self.lock();
        let answer = match &mut table.slots[ticket.0 as usize] {
            WaiterSlot::Ended(result) => {
                let result = *result;
                table.free(ticket.0);
                Ok(result)
            }
            WaiterSlot::Waiting { waker: known, .. } => {
                core::mem::swap(known, &mut waker);
                Err(ticket)
            }
            WaiterSlot::Free => unreachable!("a ticket without a place"),
        };
        // The old waker is dropped without the lock: that may run code of others.
        drop(table);
        answer
    }

    /// Ends the wait of a task that waits no more.
    pub(crate) fn forget(&self, ticket: WaiterTicket) {
        let mut table = self.lock();
        if let WaiterSlot::Waiting { number, next, .. } = table.slots[ticket.0 as usize] {
            table.unlink(number, ticket.0, next);
        }
        let slot = table.free(ticket.0);
        drop(table);
        drop(slot);
    }

    /// Ends all waits for this number, which has landed or failed. The caller wakes the wakers,
    /// without locks.
    pub(crate) fn end(&self, number: u32, result: Result<(), FarError>, wakers: &mut Vec<Waker>) {
        let mut table = self.lock();
        let mut at = table.last.remove(&number);
        while let Some(place) = at {
            let slot = core::mem::replace(&mut table.slots[place as usize], WaiterSlot::Ended(result));
            let WaiterSlot::Waiting { waker, next, .. } = slot else { unreachable!("a chain of tasks that wait") };
            wakers.push(waker);
            at = next;
        }
    }

    /// Queues a task that waits for frames to become free, since `since`. A task that waits already
    /// keeps its turn.
    pub(crate) fn wait_for_room(&self, turn: Option<ReclaimTurn>, waker: &Waker, since: Instant) -> ReclaimTurn {
        let mut waker = waker.clone();
        let mut queue = self.lock_queue();
        // The waker that is replaced is dropped without the lock.
        if let Some(turn) = turn
            && let Some(at) = queue.place(turn)
        {
            core::mem::swap(&mut queue.waiting[at].1, &mut waker);
            return turn;
        }
        queue.turns += 1;
        let turn = ReclaimTurn(queue.turns);
        queue.waiting.push_back((turn, waker, since));
        self.for_room_count.store(queue.waiting.len(), Ordering::Release);
        turn
    }

    /// Removes a task from the queue for room. False if it was woken, so that another one can be.
    pub(crate) fn leave_room(&self, turn: ReclaimTurn) -> bool {
        let mut queue = self.lock_queue();
        let Some(at) = queue.place(turn) else { return false };
        let left = queue.waiting.remove(at);
        self.for_room_count.store(queue.waiting.len(), Ordering::Release);
        drop(queue);
        drop(left);
        true
    }

    fn lock_queue(&self) -> MutexGuard<'_, ReclaimQueue> {
        self.for_room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether a task waits for room.
    #[inline]
    pub(crate) fn has_frame_waiters(&self) -> bool {
        self.for_room_count.load(Ordering::Acquire) > 0
    }

    /// Wakes so many tasks that wait for room, and those whose patience is over: there may be
    /// something for them, and they look for themselves. Called without locks.
    pub(crate) fn wake_for_frames(&self, tasks: u32, patience: Duration) {
        if !self.has_frame_waiters() {
            return;
        }
        let woken: Vec<_> = {
            let mut queue = self.lock_queue();
            let waiting = &mut queue.waiting;
            let count = waiting.len().min(tasks as usize);
            let late = waiting.iter().skip(count).take_while(|(.., since)| since.elapsed() > patience).count();
            let woken = waiting.drain(..count + late).collect();
            self.for_room_count.store(waiting.len(), Ordering::Release);
            woken
        };
        woken.into_iter().for_each(|(_, waker, _)| waker.wake());
    }
}

impl ReclaimQueue {
    /// Returns the index of the task with this turn.
    fn place(&self, turn: ReclaimTurn) -> Option<usize> {
        self.waiting.binary_search_by_key(&turn, |(turn, ..)| *turn).ok()
    }
}

impl WaiterTable {
    fn free(&mut self, place: u32) -> WaiterSlot {
        self.free.push(place);
        core::mem::replace(&mut self.slots[place as usize], WaiterSlot::Free)
    }

    fn unlink(&mut self, number: u32, place: u32, after: Option<u32>) {
        let Some(last) = self.last.get(&number).copied() else { unreachable!("a chain without a beginning") };
        if last == place {
            match after {
                Some(next) => self.last.insert(number, next),
                None => self.last.remove(&number),
            };
            return;
        }
        let mut at = last;
        while let WaiterSlot::Waiting { next: Some(next), .. } = self.slots[at as usize] {
            if next == place {
                if let WaiterSlot::Waiting { next, .. } = &mut self.slots[at as usize] {
                    *next = after;
                }
                return;
            }
            at = next;
        }
    }
}
