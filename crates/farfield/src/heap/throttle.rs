//! Threads that wait for near memory: in which order, and how they hear of it.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// They sleep, because whoever makes room needs the processor more. Who came first is served first.
#[derive(Default)]
pub(crate) struct Throttle {
    waiting: AtomicU32,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    next: u64,
    threads: VecDeque<Sleeper>,
}

struct Sleeper {
    ticket: u64,
    bell: Arc<Condvar>,
}

/// A place in the queue.
pub(crate) struct Place<'a> {
    throttle: &'a Throttle,
    ticket: u64,
    bell: Arc<Condvar>,
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
        let (ticket, bell) = (queue.next, Arc::<Condvar>::default());
        queue.next += 1;
        queue.threads.push_back(Sleeper { ticket, bell: Arc::clone(&bell) });
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Place { throttle: self, ticket, bell }
    }

    /// Somebody who made room has found what is in the way: all look for themselves.
    pub(crate) fn ring(&self) {
        self.serve(u32::MAX);
    }

    /// There is room for so many.
    pub(crate) fn serve(&self, count: u32) {
        if self.waiting() > 0 {
            // Who has found too little is asleep, or has not looked yet.
            self.lock().threads.iter().take(count as usize).for_each(|sleeper| sleeper.bell.notify_one());
        }
    }
}

impl Place<'_> {
    /// How many came before.
    pub(crate) fn before(&self) -> u32 {
        self.throttle.lock().threads.iter().take_while(|sleeper| sleeper.ticket != self.ticket).count() as u32
    }

    /// Sleeps until somebody rings, or for so long, unless this is true already. False if nobody rang.
    pub(crate) fn sleep_unless(&self, enough: impl FnOnce() -> bool, most: Duration) -> bool {
        let queue = self.throttle.lock();
        if enough() {
            return true;
        }
        let (queue, timeout) = self.bell.wait_timeout(queue, most).unwrap_or_else(PoisonError::into_inner);
        drop(queue);
        !timeout.timed_out()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queue = self.throttle.lock();
        queue.threads.retain(|sleeper| sleeper.ticket != self.ticket);
        self.throttle.waiting.fetch_sub(1, Ordering::Relaxed);
        // It makes the room from now on.
        if let Some(first) = queue.threads.front() {
            first.bell.notify_one();
        }
    }
}
