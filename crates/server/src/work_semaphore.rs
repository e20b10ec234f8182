//! Permits to use the processors: a semaphore that bounds the working threads of one holder.
//!
//! The scheduler is fair between threads, and a client has as many threads here as it has
//! connections. With permits, a client with a thousand busy connections gets no more processor time
//! than one with two.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// The permits of one holder.
#[derive(Debug)]
pub(crate) struct WorkSemaphore {
    max: usize,
    wait_max: Duration,
    counts: Mutex<Counts>,
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    taken: usize,
    /// Threads that wait for a permit. Without any, nobody is woken: that is a system call.
    waiting: usize,
}

/// A permit to work, given back when dropped.
#[derive(Debug)]
pub(crate) struct WorkPermit(Arc<WorkSemaphore>);

fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(2, |count| count.get()).max(2))
}

impl WorkSemaphore {
    /// Makes permits for `per_processor` threads on each processor. A thread that waits longer than
    /// `wait_max` goes on without a permit: threads at work may wait for something too, and must
    /// not wait for this one.
    pub(crate) fn new(per_processor: usize, wait_max: Duration) -> WorkSemaphore {
        let max = processors().saturating_mul(per_processor);
        WorkSemaphore { max, wait_max, counts: Mutex::default(), given_back: Condvar::new() }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits for a permit, at most as long as `wait_max`.
    pub(crate) fn take(self: &Arc<Self>) -> WorkPermit {
        let mut counts = self.counts();
        if counts.taken >= self.max {
            counts.waiting += 1;
            let is_full = |counts: &mut Counts| counts.taken >= self.max;
            let waited = self.given_back.wait_timeout_while(counts, self.wait_max, is_full);
            (counts, _) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            counts.waiting -= 1;
        }
        counts.taken += 1;
        WorkPermit(self.clone())
    }
}

impl Drop for WorkPermit {
    fn drop(&mut self) {
        let mut counts = self.0.counts();
        counts.taken -= 1;
        if counts.waiting > 0 && counts.taken < self.0.max {
            self.0.given_back.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_waiter_goes_on_when_it_has_waited_too_long() {
        let semaphore = Arc::new(WorkSemaphore::new(1, Duration::ZERO));
        let all: Vec<WorkPermit> = (0..=processors()).map(|_| semaphore.take()).collect();
        drop(all);
        let counts = semaphore.counts();
        assert_eq!((counts.taken, counts.waiting), (0, 0));
    }

    #[test]
    fn no_more_work_at_a_time_than_there_are_processors() {
        let (semaphore, now, most) =
            (Arc::new(WorkSemaphore::new(1, Duration::from_secs(600))), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 * processors() {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _permit = semaphore.take();
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        let counts = semaphore.counts();
        assert_eq!((counts.taken, counts.waiting), (0, 0));
        assert!(most.into_inner() <= processors());
    }
}
