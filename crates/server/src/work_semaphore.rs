//! Permits to use the processors: a semaphore that bounds the working threads of one holder.
//!
//! The scheduler is fair between threads, and a client has as many threads here as it has
//! connections. With permits, a client with a thousand busy connections gets no more processor time
//! than one with two. While other holders work too, each leaves a processor to them.
//!
//! Whoever gives a permit back wakes the first waiter, and may take the permit again before that one
//! does: a thread that goes on is faster than one that wakes up. But a thread that has waited for long
//! gets the permit itself. A function may run for long and wait
//! for another function of its holder, so it [hands its permit over](WorkPermit::pass) now and then.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Time for which a holder counts as working after it has taken a permit.
const RECENT: Duration = Duration::from_millis(16);

/// Time after which a waiter is handed the next permit that is given back.
const PATIENCE: Duration = Duration::from_micros(500);

/// Which holders have worked recently. Threads may overwrite what another one notes, so an answer can
/// be wrong for a moment.
#[derive(Debug)]
pub(crate) struct RecentWork {
    epoch: Instant,
    next_holder: AtomicU64,
    /// The holder that took a permit last, and when: a [`RecentWork::note`].
    latest: AtomicU64,
    /// The last holder before that one, other than it.
    other: AtomicU64,
}

impl Default for RecentWork {
    fn default() -> RecentWork {
        RecentWork {
            epoch: Instant::now(),
            next_holder: AtomicU64::new(1),
            latest: AtomicU64::new(0),
            other: AtomicU64::new(0),
        }
    }
}

impl RecentWork {
    const MILLIS_BITS: u32 = 40;

    /// Packs a holder's number and a time in milliseconds. Numbers wrap around after 2^24 holders.
    fn note(holder: u64, millis: u64) -> u64 {
        holder << Self::MILLIS_BITS | (millis & ((1 << Self::MILLIS_BITS) - 1))
    }

    fn millis(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Notes that this holder works now, and checks whether another one does.
    fn is_shared(&self, holder: u64) -> bool {
        let now = Self::note(holder, self.millis());
        let latest = self.latest.load(Ordering::Relaxed);
        if latest != now {
            self.latest.store(now, Ordering::Relaxed);
        }
        let holder_of = |note: u64| note >> Self::MILLIS_BITS;
        let mut other = self.other.load(Ordering::Relaxed);
        if holder_of(latest) != holder_of(now) {
            self.other.store(latest, Ordering::Relaxed);
            other = latest;
        }
        let age_ms = now.wrapping_sub(other) & ((1 << Self::MILLIS_BITS) - 1);
        other != 0 && holder_of(other) != holder_of(now) && u128::from(age_ms) <= RECENT.as_millis()
    }
}

/// The permits of one holder.
#[derive(Debug)]
pub(crate) struct WorkSemaphore {
    /// Threads that may work while nobody else does.
    max: usize,
    recent: Arc<RecentWork>,
    holder: u64,
    wait_max: Duration,
    state: Mutex<SemaphoreState>,
}

#[derive(Debug, Default)]
struct SemaphoreState {
    taken: usize,
    queue: VecDeque<PermitWaiter>,
    next_ticket: u64,
}

/// A thread that waits for a permit.
#[derive(Debug)]
struct PermitWaiter {
    ticket: u64,
    since: Instant,
    thread: Thread,
}

/// A permit to work, given back when dropped.
#[derive(Debug)]
pub(crate) struct WorkPermit(Arc<WorkSemaphore>);

fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(2, |count| count.get()).max(2))
}

impl WorkSemaphore {
    /// Makes permits for a thread on each processor, and one less while another holder of `recent`
    /// works. A thread that waits longer than `wait_max` goes on without a permit: threads at work may
    /// wait for something too, and must not wait for this one.
    pub(crate) fn new(recent: Arc<RecentWork>, wait_max: Duration) -> WorkSemaphore {
        let holder = recent.next_holder.fetch_add(1, Ordering::Relaxed);
        WorkSemaphore { max: processors(), recent, holder, wait_max, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, SemaphoreState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns how many threads may work now.
    pub(crate) fn max_now(&self) -> usize {
        if self.recent.is_shared(self.holder) { (self.max - 1).max(1) } else { self.max }
    }

    /// Waits for a permit, at most as long as `wait_max`.
    pub(crate) fn take(self: &Arc<Self>) -> WorkPermit {
        self.wait();
        WorkPermit(self.clone())
    }

    /// Counts this thread among those at work as soon as there is a permit, or it has waited for
    /// `wait_max`.
    fn wait(&self) {
        let max = self.max_now();
        let mut state = self.state();
        if state.taken < max {
            state.taken += 1;
            return;
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        let since = Instant::now();
        state.queue.push_back(PermitWaiter { ticket, since, thread: std::thread::current() });
        let until = since + self.wait_max;
        loop {
            drop(state);
            std::thread::park_timeout(until.saturating_duration_since(Instant::now()));
            let max = self.max_now();
            state = self.state();
            // Whoever handed a permit over took this thread out of the queue.
            let Some(index) = state.queue.iter().position(|waiter| waiter.ticket == ticket) else { return };
            if state.taken < max || Instant::now() >= until {
                state.queue.remove(index);
                state.taken += 1;
                return;
            }
        }
    }

    /// Gives a permit back, and wakes the first waiter if the permit is one that there is now.
    fn give_back(&self) {
        let max = self.max_now();
        let mut state = self.state();
        if state.taken <= max
            && let Some(first) = state.queue.front()
        {
            first.thread.unpark();
            if first.since.elapsed() >= PATIENCE {
                state.queue.pop_front();
                return;
            }
        }
        state.taken -= 1;
    }
}

impl WorkPermit {
    /// Hands the permit over to the thread that has waited longest, and waits for another one. Does
    /// nothing if no thread waits and the permit is still among those that there are.
    pub(crate) fn pass(&self) {
        let max = self.0.max_now();
        let mut state = self.0.state();
        if state.taken > max {
            state.taken -= 1;
            drop(state);
            return self.0.wait();
        }
        let Some(first) = state.queue.pop_front() else { return };
        if state.taken < max {
            // There is room for both.
            state.taken += 1;
            first.thread.unpark();
            return;
        }
        drop(state);
        first.thread.unpark();
        self.0.wait();
    }
}

impl Drop for WorkPermit {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

/// The turns of one thread at work: it has a permit while it works, and none while it waits for
/// something.
#[derive(Debug, Default)]
pub(crate) struct WorkTurn {
    /// Permits of the holder, once it is known.
    semaphore: Option<Arc<WorkSemaphore>>,
    permit: Option<WorkPermit>,
}

impl WorkTurn {
    pub(crate) fn new(semaphore: Arc<WorkSemaphore>) -> WorkTurn {
        WorkTurn { semaphore: Some(semaphore), permit: None }
    }

    /// Waits for a permit, unless the thread has one. The thread must hold no lock for which a
    /// thread at work may wait.
    pub(crate) fn begin(&mut self) {
        if self.permit.is_none() {
            self.permit = self.semaphore.as_ref().map(WorkSemaphore::take);
        }
    }

    /// Lets a thread of the holder that waits for a permit go first, as in [`WorkPermit::pass`].
    pub(crate) fn pass(&self) {
        if let Some(permit) = &self.permit {
            permit.pass();
        }
    }

    /// Gives the permit back.
    pub(crate) fn end(&mut self) {
        self.permit = None;
    }
}

#[cfg(test)]
mod tests {
    //! Guards against more threads at work than there are permits, against a permit that is lost or
    //! counted twice, and against threads that wait for ever behind one that works for ever.

    use super::*;
    use std::sync::atomic::AtomicUsize;

    impl WorkSemaphore {
        fn counts(&self) -> (usize, usize) {
            let state = self.state();
            (state.taken, state.queue.len())
        }
    }

    fn semaphore(wait_max: Duration) -> Arc<WorkSemaphore> {
        Arc::new(WorkSemaphore::new(Arc::new(RecentWork::default()), wait_max))
    }

    #[test]
    fn a_waiter_goes_on_when_it_has_waited_too_long() {
        let semaphore = semaphore(Duration::ZERO);
        let all: Vec<WorkPermit> = (0..=processors()).map(|_| semaphore.take()).collect();
        assert_eq!(semaphore.counts(), (processors() + 1, 0));
        drop(all);
        assert_eq!(semaphore.counts(), (0, 0));
    }

    #[test]
    fn no_more_work_at_a_time_than_there_are_processors() {
        let (semaphore, now, most) = (semaphore(Duration::from_secs(600)), AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            now.fetch_sub(1, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..4 * processors() {
                scope.spawn(|| {
                    for round in 0..50 {
                        let permit = semaphore.take();
                        work();
                        if round % 3 == 0 {
                            permit.pass();
                            work();
                        }
                    }
                });
            }
        });
        assert_eq!(semaphore.counts(), (0, 0));
        assert!(most.into_inner() <= processors());
    }

    #[test]
    fn threads_that_wait_for_each_other_at_work_have_turns() {
        let (semaphore, turn) = (semaphore(Duration::from_secs(600)), AtomicUsize::new(0));
        let threads = 3 * processors();
        std::thread::scope(|scope| {
            for number in 0..threads {
                let (semaphore, turn) = (&semaphore, &turn);
                scope.spawn(move || {
                    let permit = semaphore.take();
                    // Each thread works until all before it have finished.
                    while turn.load(Ordering::SeqCst) != threads - 1 - number {
                        permit.pass();
                    }
                    turn.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!((turn.into_inner(), semaphore.counts()), (threads, (0, 0)));
    }

    #[test]
    fn a_holder_leaves_a_processor_to_others_while_they_work() {
        let recent = Arc::new(RecentWork::default());
        let [one, other] = [(); 2].map(|()| Arc::new(WorkSemaphore::new(recent.clone(), Duration::ZERO)));
        let all = one.max;
        assert_eq!((one.max_now(), one.max_now()), (all, all), "alone");
        let until = Instant::now() + Duration::from_secs(60);
        // Tried again if this thread was kept from running in between.
        let leaves = |one: &WorkSemaphore, other: &WorkSemaphore| {
            let _ = other.max_now();
            one.max_now() == all - 1
        };
        while !(leaves(&one, &other) && leaves(&other, &one) && leaves(&one, &other)) {
            assert!(Instant::now() < until);
        }
        while one.max_now() < all {
            assert!(Instant::now() < until, "the other one worked long ago");
        }
        // A permit that is one too many is not handed over, but given back.
        let permits = [one.take(), one.take()];
        let third = std::thread::scope(|scope| {
            let third = scope.spawn(|| one.take());
            third.join().unwrap()
        });
        assert_eq!(one.counts(), (3, 0));
        drop(permits);
        third.pass();
        assert_eq!(one.counts(), (1, 0));
    }

    #[test]
    fn a_thread_that_works_all_the_time_keeps_none_of_its_holder_waiting() {
        let semaphore = semaphore(Duration::from_secs(600));
        let is_over = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..processors() {
                scope.spawn(|| {
                    while is_over.load(Ordering::Relaxed) == 0 {
                        drop(semaphore.take());
                    }
                });
            }
            (0..20).for_each(|_| drop(semaphore.take()));
            is_over.store(1, Ordering::Relaxed);
        });
        assert_eq!(semaphore.counts(), (0, 0));
    }
}
