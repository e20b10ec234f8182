//! Looking for the next request instead of sleeping until it comes: 7 µs instead of 40 for a round trip, as long as there
//! is a processor to spare.
//!
//! On a busy machine it is the wrong thing: the scheduler gives a thread that sleeps the processor as soon as there is
//! something for it, and takes it for milliseconds from one that never does. So a thread that finds that it was
//! stopped for a time slice while it looked does not look again for sixty-four times as long: looking then costs one part
//! in sixty-five of the time, about, whatever else the machine does. Shorter stops are threads that wake up and soon sleep again;
//! they have the right of way and there is nothing to learn from them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// With so much between two looks, a microsecond apart otherwise, somebody had a time slice of the processor.
const STOPPED: Duration = Duration::from_millis(1);
/// A thread that was stopped does not look for so many times as long as it was stopped.
const PAUSE_FACTOR: u32 = 64;
/// And at most so long.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Threads that look; more than there are other processors do harm.
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

    /// A place among those who look, if one is free and `patience` allows it.
    pub(crate) fn enter(&self, patience: &Patience, now: Instant) -> Option<Spin<'_>> {
        if self.spin.is_zero() || patience.pause_until.is_some_and(|until| now < until) {
            return None;
        }
        if self.now.fetch_add(1, Ordering::Relaxed) >= self.max {
            self.now.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Spin { spinners: self, until: now + self.spin, last: now })
    }
}

/// What a thread has learnt about looking.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    pause_until: Option<Instant>,
}

/// A place among those who look.
pub(crate) struct Spin<'a> {
    spinners: &'a Spinners,
    until: Instant,
    last: Instant,
}

impl Spin<'_> {
    /// Look again?
    pub(crate) fn go_on(&mut self, patience: &mut Patience, now: Instant) -> bool {
        let stopped = now.saturating_duration_since(self.last);
        if stopped > STOPPED {
            patience.pause_until = Some(now + (stopped * PAUSE_FACTOR).min(PAUSE_MAX));
            return false;
        }
        self.last = now;
        now < self.until
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
        let mut patience = Patience::default();
        let mut now = Instant::now();
        for (stopped, pause) in
            [(1500 * MICRO, 96_000 * MICRO), (3000 * MICRO, 192_000 * MICRO), (PAUSE_MAX, PAUSE_MAX)]
        {
            let mut spin = spinners.enter(&patience, now).expect("no pause");
            assert!(spin.go_on(&mut patience, now + MICRO));
            now += MICRO + stopped;
            assert!(!spin.go_on(&mut patience, now));
            drop(spin);
            assert!(spinners.enter(&patience, now + pause - MICRO).is_none());
            now += pause;
        }
        assert!(spinners.enter(&patience, now).is_some());
    }

    #[test]
    fn only_so_many_look_and_only_so_long() {
        let spinners = Spinners { spin: 50 * MICRO, now: AtomicUsize::new(0), max: 1 };
        let (mut one, other) = (Patience::default(), Patience::default());
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
