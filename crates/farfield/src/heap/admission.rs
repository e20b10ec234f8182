//! Threads that wait for near memory: their order, and how they are told.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Queue of threads that wait for near memory, first come, first served. They sleep, because the
/// thread that makes room needs the processor more.
#[derive(Default)]
pub(crate) struct AdmissionQueue {
    waiting: AtomicU32,
    queue: Mutex<SleeperQueue>,
}

#[derive(Default)]
struct SleeperQueue {
    next: u64,
    threads: VecDeque<Sleeper>,
}

struct Sleeper {
    ticket: u64,
    bell: Arc<Condvar>,
}

/// Place in the queue; dropping it leaves the queue.
pub(crate) struct AdmissionTicket<'a> {
    admission: &'a AdmissionQueue,
    ticket: u64,
    bell: Arc<Condvar>,
}

impl AdmissionQueue {
    fn lock(&self) -> MutexGuard<'_, SleeperQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many threads wait.
    pub(crate) fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Appends the calling thread to the queue.
    pub(crate) fn queue(&self) -> AdmissionTicket<'_> {
        let mut queue = self.lock();
        let (ticket, bell) = (queue.next, Arc::<Condvar>::default());
        queue.next += 1;
        queue.threads.push_back(Sleeper { ticket, bell: Arc::clone(&bell) });
        self.waiting.fetch_add(1, Ordering::Relaxed);
        AdmissionTicket { admission: self, ticket, bell }
    }

    /// Wakes all: a thread that made room has found what is in the way, and each looks for itself.
    pub(crate) fn ring(&self) {
        self.serve(u32::MAX);
    }

    /// Wakes the first `count` threads, for which there is room.
    pub(crate) fn serve(&self, count: u32) {
        if self.waiting() > 0 {
            // A thread that has found too little is asleep, or has not looked yet.
            self.lock().threads.iter().take(count as usize).for_each(|sleeper| sleeper.bell.notify_one());
        }
    }
}

impl AdmissionTicket<'_> {
    /// Returns how many threads came before.
    pub(crate) fn position(&self) -> u32 {
        self.admission.lock().threads.iter().take_while(|sleeper| sleeper.ticket != self.ticket).count() as u32
    }

    /// Sleeps until the bell rings, at most for `most`, unless `enough` is true already. False if
    /// it did not ring.
    pub(crate) fn sleep_unless(&self, enough: impl FnOnce() -> bool, most: Duration) -> bool {
        let queue = self.admission.lock();
        if enough() {
            return true;
        }
        let (queue, timeout) = self.bell.wait_timeout(queue, most).unwrap_or_else(PoisonError::into_inner);
        drop(queue);
        !timeout.timed_out()
    }
}

impl Drop for AdmissionTicket<'_> {
    fn drop(&mut self) {
        let mut queue = self.admission.lock();
        queue.threads.retain(|sleeper| sleeper.ticket != self.ticket);
        self.admission.waiting.fetch_sub(1, Ordering::Relaxed);
        // The first thread in the queue makes the room from now on.
        if let Some(first) = queue.threads.front() {
            first.bell.notify_one();
        }
    }
}
