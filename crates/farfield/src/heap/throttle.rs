//! Threads that wait for near memory: in which order, and how they hear of it.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// They sleep, because whoever makes room needs the processor more, and are woken batch by batch. Who came first is served first.
#[derive(Default)]
pub(crate) struct Throttle {
    waiting: AtomicU32,
    queue: Mutex<Queue>,
    bell: Condvar,
}

#[derive(Default)]
struct Queue {
    next: u64,
    tickets: VecDeque<u64>,
}

/// A place in the queue.
pub(crate) struct Place<'a> {
    throttle: &'a Throttle,
    ticket: u64,
}

impl Throttle {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Queues.
    pub(crate) fn queue(&self) -> Place<'_> {
        let mut queue = self.lock();
        let ticket = queue.next;
        queue.next += 1;
        queue.tickets.push_back(ticket);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Place { throttle: self, ticket }
    }

    /// There is more room, or somebody who made some has found what is in the way.
    pub(crate) fn ring(&self) {
        if self.waiting() > 0 {
            // Who has found too little is asleep, or has not looked yet.
            drop(self.lock());
            self.bell.notify_all();
        }
    }
}

impl Place<'_> {
    /// How many came before.
    pub(crate) fn before(&self) -> u32 {
        self.throttle.lock().tickets.iter().take_while(|ticket| **ticket != self.ticket).count() as u32
    }

    /// Sleeps until somebody rings, or for so long, unless this is true already. False if nobody rang.
    pub(crate) fn sleep_unless(&self, enough: impl FnOnce() -> bool, most: Duration) -> bool {
        let queue = self.throttle.lock();
        if enough() {
            return true;
        }
        let (queue, timeout) = self.throttle.bell.wait_timeout(queue, most).unwrap_or_else(PoisonError::into_inner);
        drop(queue);
        !timeout.timed_out()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.throttle.lock().tickets.retain(|ticket| *ticket != self.ticket);
        self.throttle.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
