//! The poller: a thread that lands what tasks wait for that run outside of our executors (which
//! poll by themselves).
//!
//! It starts with the first such task, and sleeps while nothing is under way.

use super::{HeapInner, HeapInnerPointer, SERVES};
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Handle on the thread.
pub(crate) struct Poller {
    /// True if something is under way that a task waits for.
    rung: AtomicBool,
    stop: AtomicBool,
    bell: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
    asleep: Mutex<()>,
}

impl Poller {
    pub(crate) fn new() -> Poller {
        Poller {
            rung: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            bell: Condvar::new(),
            thread: Mutex::new(None),
            asleep: Mutex::new(()),
        }
    }

    /// Tells the thread that a task waits and nobody polls for it; starts the thread if there is
    /// none.
    pub(crate) fn ring(&self, core: &HeapInner) {
        if self.rung.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let address = HeapInnerPointer(core);
            let body = move || {
                let address = address;
                SERVES.set(true);
                // SAFETY: see `HeapInnerPointer`.
                let core = unsafe { &*address.0 };
                core.poller.run(core);
            };
            // Without the thread, tasks are late: others who use the heap land what they wait for.
            *thread = std::thread::Builder::new().name("farfield-poll".to_owned()).spawn(body).ok();
        }
        drop(thread);
        let _guard = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.bell.notify_one();
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        {
            let _guard = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.notify_one();
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }

    fn run(&self, core: &HeapInner) {
        loop {
            let mut guard = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
            while !self.rung.load(Ordering::Acquire) && !self.stop.load(Ordering::Acquire) {
                guard = self.bell.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            drop(guard);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            self.rung.swap(false, Ordering::AcqRel);
            let mut rounds = 0;
            let mut before = 0;
            loop {
                let left = core.help_all();
                if left == 0 || self.stop.load(Ordering::Acquire) {
                    break;
                }
                rounds = if left == before { rounds + 1 } else { 0 };
                before = left;
                match rounds {
                    0..=32 => core::hint::spin_loop(),
                    33..=128 => std::thread::yield_now(),
                    _ => std::thread::sleep(Duration::from_micros(20)),
                }
            }
        }
    }
}
