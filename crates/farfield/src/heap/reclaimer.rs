//! The reclaimer: a thread that runs the evictor ahead of need (like kswapd) and tasks' background
//! jobs, and sleeps while there is room.

use super::eviction::EvictionOutcome;
use super::{HeapInner, HeapInnerPointer, SERVES};
use crate::error::BuildError;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use farfield_pool::{Backend, Health, PoolError};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Handle on the thread.
pub(crate) struct Reclaimer {
    /// True if the thread was told that there is little room. Set without the lock, so that saying
    /// it again costs a load.
    awake: AtomicBool,
    /// True if the thread sleeps without a timeout, because nothing is vacant.
    sleeps_long: AtomicBool,
    stop: AtomicBool,
    /// True if a waiter has rung since the last round began. Locked while the thread looks whether
    /// it may sleep.
    rung: Mutex<bool>,
    bell: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Idle time after which vacancies are given back. When nobody has rung for so long, nothing
/// leaves, so nothing need be kept for what leaves next.
const IDLE: Duration = Duration::from_millis(100);

/// Time between two looks at late answers.
const LATE_LOOK: Duration = Duration::from_millis(20);

/// First and longest time to wait before a failed round is tried again.
const PAUSE: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(10));

impl Reclaimer {
    pub(crate) fn new() -> Reclaimer {
        Reclaimer {
            awake: AtomicBool::new(false),
            sleeps_long: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            rung: Mutex::new(false),
            bell: Condvar::new(),
            thread: Mutex::new(None),
        }
    }

    pub(crate) fn start(&self, core: &HeapInner) -> Result<(), BuildError> {
        let address = HeapInnerPointer(core);
        let body = move || {
            let address = address;
            SERVES.set(true);
            // SAFETY: see `HeapInnerPointer`.
            let core = unsafe { &*address.0 };
            core.reclaimer.run(core);
        };
        let thread = std::thread::Builder::new().name("farfield-reclaim".to_owned()).spawn(body);
        let refused = |error: std::io::Error| BuildError::Os { what: "a thread", why: error.to_string() };
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread.map_err(refused)?);
        Ok(())
    }

    /// Wakes the thread because there is little room, or another reason to look.
    #[inline]
    pub(crate) fn wake(&self) {
        if !self.awake.load(Ordering::Relaxed) {
            self.ring();
        }
    }

    /// Wakes the thread for a waiter: it is heard even if the thread is awake.
    #[cold]
    pub(crate) fn ring(&self) {
        let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        *rung = true;
        self.awake.store(true, Ordering::Release);
        self.bell.notify_one();
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        // `ring` takes the lock, so the thread sees this before it sleeps, or wakes.
        self.stop.store(true, Ordering::Release);
        self.ring();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }

    /// Lets the thread sleep until it is rung, if `so` is true and no task waits for room or has a
    /// job.
    fn rest(&self, core: &HeapInner, so: impl Fn(&HeapInner) -> bool) {
        // Acquire: a task that rang before this is among those who want room.
        self.awake.swap(false, Ordering::AcqRel);
        // A thread that took frames since then did not ring.
        if !so(core) || core.waiters.has_frame_waiters() || core.background_jobs.has_jobs() {
            self.awake.store(true, Ordering::Release);
        }
    }

    fn is_notified(&self) -> bool {
        self.awake.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire)
    }

    /// Sleeps until the bell rings. If it has not for a while, gives vacancies back to the pool.
    fn sleep(&self, core: &HeapInner) {
        self.take_late_answers(core);
        let mut discards = true;
        while !self.wait_for_bell(core, discards) {
            // Vacancies that cannot be given back now are tried again when the evictor has run.
            discards = self.discard(core).is_ok();
        }
        self.sleeps_long.store(false, Ordering::SeqCst);
    }

    /// Takes late answers until the bell rings or the pool is healthy. Writes that the pool went on
    /// without may still be answered, as long as they may take.
    fn take_late_answers(&self, core: &HeapInner) {
        let until = Instant::now() + core.patience * 2;
        while !self.is_notified() && core.backend.health() == Health::Degraded && Instant::now() < until {
            let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.bell.wait_timeout_while(rung, LATE_LOOK, |_| !self.is_notified()));
            core.evictor.take_answers();
        }
    }

    /// Waits until the bell rings; false if it has not for a while and something is to be
    /// discarded.
    fn wait_for_bell(&self, core: &HeapInner, discards: bool) -> bool {
        let mut guard = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_notified() {
            // SeqCst: a thread that makes a vacancy counts it before it looks here.
            self.sleeps_long.store(discards, Ordering::SeqCst);
            if !discards || core.vacancies.count() == 0 {
                guard = self.bell.wait(guard).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            self.sleeps_long.store(false, Ordering::SeqCst);
            let (woken, timeout) = self.bell.wait_timeout(guard, IDLE).unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() && !self.is_notified() {
                return false;
            }
            guard = woken;
        }
        *guard = false;
        true
    }

    /// Gives vacancies back to the pool, a few at a time, until the bell rings.
    fn discard(&self, core: &HeapInner) -> Result<(), PoolError> {
        while !self.is_notified() && core.evictor.discard_some(core)? > 0 {}
        Ok(())
    }

    /// Checks whether the thread sleeps without a timeout, though there may be vacancies from now
    /// on.
    pub(crate) fn sleeps_long(&self) -> bool {
        self.sleeps_long.load(Ordering::SeqCst)
    }

    /// Waits for what is in the way, less long if a task rings: that task waits for the end of the
    /// next round.
    fn pause(&self, most: Duration) {
        std::thread::sleep(PAUSE.0);
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.bell.wait_timeout_while(rung, most - PAUSE.0, |rung| !*rung));
    }

    fn run(&self, core: &HeapInner) {
        let mut pause = PAUSE.0;
        let mut left = 0;
        loop {
            self.sleep(core);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            core.run_background_jobs();
            match core.evictor.run(core, core.reserve().high) {
                Ok(EvictionOutcome::Enough) if core.background_jobs.has_jobs() => {
                    self.pause(pause);
                    pause = (pause * 2).min(PAUSE.1);
                }
                Ok(EvictionOutcome::Enough | EvictionOutcome::Progress) => {
                    self.rest(core, |core| core.frames.room() >= core.reserve().low);
                    pause = PAUSE.0;
                }
                Ok(EvictionOutcome::Blocked(_) | EvictionOutcome::ShortWait | EvictionOutcome::Hot) | Err(_) => {
                    core.help_all();
                    // The obstacle of the last round is gone: the next one is not worth a longer
                    // wait.
                    let before = core::mem::replace(&mut left, core.evictor.evicted_pages());
                    pause = if left == before { (pause * 2).min(PAUSE.1) } else { PAUSE.0 };
                    // A thread that needs room rings again, or runs the evictor itself and gets the
                    // error.
                    self.pause(pause);
                    let gives_up = pause == PAUSE.1 && !core.frames.is_over_limit();
                    if core.frames.room() >= core.reserve().low || gives_up {
                        self.rest(core, |_| true);
                    }
                }
            }
        }
    }
}
