//! Busy-polling for the next request instead of sleeping until it arrives. A round trip takes 7 µs
//! instead of 40, as long as a processor is idle.
//!
//! On a busy machine, polling does harm. The scheduler quickly gives the processor to a thread that
//! sleeps, and takes it for milliseconds from one that never does. So a thread that was descheduled
//! for a time slice while it polled does not poll again for 64 times as long. Polling then costs
//! about one part in 65 of the time, whatever else the machine does. Shorter interruptions come
//! from threads that wake up and soon sleep again. They have priority, and nothing is to be learnt
//! from them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Shortest gap between two polls that counts as a lost time slice. Polls are otherwise a
/// microsecond apart.
const STOPPED: Duration = Duration::from_millis(1);
/// Time after which a thread yields the processor once. A client that waits for an answer asks again sooner, and later
/// perhaps another server waits for this very processor.
const YIELD_AFTER: Duration = Duration::from_micros(12);
/// Pause after a lost time slice, as a multiple of the time lost.
const PAUSE_FACTOR: u32 = 64;
/// Longest pause after a lost time slice.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Slots for threads that poll. More polling threads than there are other processors do harm.
#[derive(Debug)]
pub(crate) struct Spinners {
    spin: Duration,
    now: AtomicUsize,
    max: usize,
}

impl Spinners {
    pub(crate) fn new(spin: Duration) -> Spinners {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        Spinners { spin, now: AtomicUsize::new(0), max: processors - 1 }
    }

    /// Takes a slot for polling. Returns `None` if none is free, or if `backoff` forbids polling
    /// now.
    pub(crate) fn enter(&self, backoff: &SpinBackoff, now: Instant) -> Option<Spin<'_>> {
        if self.spin.is_zero() || backoff.pause_until.is_some_and(|until| now < until) {
            return None;
        }
        if self.now.fetch_add(1, Ordering::Relaxed) >= self.max {
            self.now.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Spin { spinners: self, started: now, last: now })
    }
}

/// A thread's memory of whether polling is worth it: after a lost time slice it pauses.
#[derive(Debug, Default)]
pub(crate) struct SpinBackoff {
    pause_until: Option<Instant>,
}

/// A slot for polling, given back when dropped.
pub(crate) struct Spin<'a> {
    spinners: &'a Spinners,
    started: Instant,
    last: Instant,
}

impl Spin<'_> {
    /// Checks whether to poll again: not after a lost time slice, which is noted in `backoff`, and
    /// not after the end of the polling time. May yield the processor before.
    pub(crate) fn go_on(&mut self, backoff: &mut SpinBackoff, now: Instant) -> bool {
        let stopped = now.saturating_duration_since(self.last);
        if stopped > STOPPED {
            backoff.pause_until = Some(now + (stopped * PAUSE_FACTOR).min(PAUSE_MAX));
            return false;
        }
        let polled_before = self.last.saturating_duration_since(self.started);
        let polled = now.saturating_duration_since(self.started);
        self.last = now;
        let goes_on = polled < self.spinners.spin;
        if goes_on && polled_before <= YIELD_AFTER && polled > YIELD_AFTER {
            std::thread::yield_now();
        }
        goes_on
    }
}

impl Drop for Spin<'_> {
    fn drop(&mut self) {
        self.spinners.now.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn a_thread_that_was_stopped_sleeps_for_a_while() {
        let spinners = Spinners { spin: 50 * MICRO, now: AtomicUsize::new(0), max: 1 };
        let mut backoff = SpinBackoff::default();
        let mut now = Instant::now();
        for (stopped, pause) in
            [(1500 * MICRO, 96_000 * MICRO), (3000 * MICRO, 192_000 * MICRO), (PAUSE_MAX, PAUSE_MAX)]
        {
            let mut spin = spinners.enter(&backoff, now).expect("no pause");
            assert!(spin.go_on(&mut backoff, now + MICRO));
            now += MICRO + stopped;
            assert!(!spin.go_on(&mut backoff, now));
            drop(spin);
            assert!(spinners.enter(&backoff, now + pause - MICRO).is_none());
            now += pause;
        }
        assert!(spinners.enter(&backoff, now).is_some());
    }

    #[test]
    fn only_so_many_look_and_only_so_long() {
        let spinners = Spinners { spin: 50 * MICRO, now: AtomicUsize::new(0), max: 1 };
        let (mut one, other) = (SpinBackoff::default(), SpinBackoff::default());
        let now = Instant::now();
        let mut spin = spinners.enter(&one, now).expect("a place");
        assert!(spinners.enter(&other, now).is_none());
        let mut looks = |micros: u32| spin.go_on(&mut one, now + micros * MICRO);
        assert!(looks(25) && looks(49) && !looks(51));
        drop(spin);
        assert!(spinners.enter(&other, now).is_some());
        assert_eq!(spinners.now.load(Ordering::Relaxed), 0, "every place is given up");
        let never = Spinners { spin: Duration::ZERO, now: AtomicUsize::new(0), max: 9 };
        assert!(never.enter(&one, now).is_none());
    }
}
