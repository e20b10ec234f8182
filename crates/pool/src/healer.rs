//! A thread that gives legs what they lack.

use crate::leg_lanes::{Legged, SLEEP_SLICE};
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// How often the thread looks whether there is something to do.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long it waits when there is, but not now.
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);

/// What lanes of a backend share, as the thread sees it.
pub(crate) trait Patient: Send + Sync + 'static {
    type Lane: Nurse;
    /// Is there something to do?
    fn needs_care(&self) -> bool;
    /// A lane for the thread.
    fn open_for_care(self: &Arc<Self>) -> Option<Self::Lane>;
}

/// A lane that gives legs what they lack.
pub(crate) trait Nurse: Legged {
    /// Does as much as can be done now, and waits a little.
    fn care(&mut self) {
        self.work();
        self.legs().sleep(SLEEP_SLICE);
    }

    /// Is something under way?
    fn is_caring(&self) -> bool;
    /// Ends what is under way and begins nothing else.
    fn finish_care(&mut self);
}

/// See the module.
pub(crate) struct Healer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    is_abandoned: AtomicBool,
}

impl Healer {
    /// `caring` is locked while something is under way: snapshots are made when nothing is.
    pub(crate) fn start<P: Patient>(patient: Arc<P>, caring: Arc<Mutex<()>>) -> Healer {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread =
            std::thread::Builder::new().name("far-healer".into()).spawn(move || run(&patient, &caring, &stopped));
        // Without a thread nothing is mended, and health says so.
        Healer { stop, thread: thread.ok(), is_abandoned: AtomicBool::new(false) }
    }

    /// The thread exists in the parent only.
    pub(crate) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

fn run<P: Patient>(patient: &Arc<P>, caring: &Mutex<()>, stop: &AtomicBool) {
    let mut lane = None;
    while !stop.load(Ordering::Acquire) {
        std::thread::park_timeout(LOOK_EVERY);
        if !patient.needs_care() {
            continue;
        }
        let _caring = caring.lock().unwrap_or_else(PoisonError::into_inner);
        if lane.is_none() {
            lane = patient.open_for_care();
        }
        let Some(lane) = &mut lane else { continue };
        while !stop.load(Ordering::Acquire) && patient.needs_care() {
            lane.care();
            if !lane.is_caring() {
                // Between two rounds, or nothing can be done now.
                std::thread::sleep(BETWEEN_LOOKS);
            }
        }
        lane.finish_care();
    }
}

impl Drop for Healer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && !self.is_abandoned.load(Ordering::Relaxed)
        {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
