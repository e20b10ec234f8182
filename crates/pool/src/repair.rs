//! Repair thread: gives legs the pages that they lack, and scrubs the pages that they hold.

use crate::PoolError;
use crate::member_lanes::{CompositeLane, SLEEP_SLICE};
use crate::members::Membership;
use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_os::sync::{Mutex, MutexGuard};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Longest time between two checks for work.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Pause when there is work that cannot be done now.
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);

/// Time that a snapshot waits for enough legs that hold everything.
const WHOLE_PATIENCE: Duration = Duration::from_secs(1);

/// State that the lanes of a backend share, as the repair thread sees it.
pub(crate) trait RepairSource: Send + Sync + 'static {
    type Lane: Repairer;
    /// Checks whether there is something to repair.
    fn needs_repair(&self) -> bool;
    /// Returns the time until the scrub has something to look at; `None` if there is no scrub.
    fn scrub_in(&self) -> Option<Duration> {
        None
    }
    /// Checks whether it is time to look for the servers of lost legs.
    fn is_rejoin_due(&self) -> bool {
        false
    }
    /// Checks whether a server is away for which there is no free place.
    fn is_full(&self) -> bool {
        false
    }
    /// Frees a place, if there is one whose former server no lane refers to. Must not be called
    /// while a snapshot is made.
    fn release_slot(&self) {}
    /// Takes the servers that are back.
    fn rejoin(&self) {}
    /// Opens a lane for the repair thread.
    fn open_repair_lane(self: &Arc<Self>) -> Option<Self::Lane>;
}

/// Lane that can repair: it gives legs what they lack.
pub(crate) trait Repairer: CompositeLane {
    /// Advances the repairs as far as possible now, and waits a little.
    fn repair(&mut self) {
        self.work();
        self.member_lanes().sleep(SLEEP_SLICE);
    }

    /// Checks whether a leg still owes this lane an answer. No operation waits for it, but it can
    /// arrive on this lane only.
    fn is_owed_answers(&self) -> bool {
        false
    }

    /// Checks whether a repair is in flight that no operation asked for.
    fn is_repairing(&self) -> bool;
    /// Ends the repairs in flight and begins no others.
    fn finish_repairs(&mut self);
}

/// Returns legs that hold everything and answer, if there are enough of them. If a leg fell silent
/// before another was repaired there are too few. Then this repairs legs, and blocks, for at most
/// [`WHOLE_PATIENCE`].
///
/// # Errors
/// [`PoolError::TimedOut`]: some legs that are needed do not answer. [`PoolError::ServerGone`]: too
/// few legs are left.
pub(crate) fn complete_members<P: RepairSource + Deref<Target = Membership>>(
    patient: &Arc<P>,
) -> Result<MemberSet, PoolError> {
    let whole = || {
        let whole = patient.select(|leg, _| patient.is_whole(leg));
        if patient.are_enough(whole) { patient.answering(whole) } else { MemberSet(0) }
    };
    let legs = whole();
    if patient.are_enough(legs) {
        return Ok(legs);
    }
    let until = Instant::now() + WHOLE_PATIENCE;
    let mut lane = patient.open_repair_lane();
    while patient.are_enough(patient.present()) {
        let legs = whole();
        let (are_enough, is_late) = (patient.are_enough(legs), Instant::now() >= until);
        if are_enough || is_late {
            lane.iter_mut().for_each(Repairer::finish_repairs);
            return if are_enough { Ok(legs) } else { Err(patient.silent(WHOLE_PATIENCE)) };
        }
        match &mut lane {
            Some(lane) => lane.repair(),
            None => farfield_os::process::sleep(BETWEEN_LOOKS),
        }
    }
    Err(patient.gone())
}

/// Takes servers that are back, where there is a place for them or one can be freed.
pub(crate) fn readmit_members<P: RepairSource>(patient: &P, caring: &RepairLock) {
    if patient.is_full() {
        let _still = caring.hold_still();
        patient.release_slot();
    }
    patient.rejoin();
}

/// Lock that is held while a repair is in flight. Snapshots are made while no repair is in flight.
#[derive(Default)]
pub(crate) struct RepairLock {
    lock: Mutex<()>,
    waiting: AtomicU32,
}

impl RepairLock {
    /// Stops repairs for as long as the returned guard is held.
    pub(crate) fn hold_still(&self) -> MutexGuard<'_, ()> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let still = self.lock();
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        still
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock()
    }

    fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }
}

/// Handle of the repair thread (see the module documentation). Dropping it ends the thread.
pub(crate) struct RepairThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    is_abandoned: AtomicBool,
}

impl RepairThread {
    #[expect(clippy::disallowed_methods, reason = "never inside a program: Opener::inside_a_program")]
    pub(crate) fn start<P: RepairSource>(patient: Arc<P>, caring: Arc<RepairLock>) -> RepairThread {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread =
            std::thread::Builder::new().name("far-healer".into()).spawn(move || run(&patient, &caring, &stopped));
        // If no thread can be started, nothing is repaired, and the health of the backend shows it.
        RepairThread { stop, thread: thread.ok(), is_abandoned: AtomicBool::new(false) }
    }

    /// Forgets the thread in the child of a `fork`: it exists in the parent only.
    pub(crate) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

#[expect(clippy::disallowed_methods, reason = "a thread that does not exist inside programs")]
fn run<P: RepairSource>(patient: &Arc<P>, caring: &RepairLock, stop: &AtomicBool) {
    let (mut lane, mut rest) = (None, LOOK_EVERY);
    while !stop.load(Ordering::Acquire) {
        std::thread::park_timeout(rest);
        if patient.is_rejoin_due() {
            readmit_members(&**patient, caring);
        }
        let until_scrub = patient.scrub_in().unwrap_or(Duration::MAX);
        rest = LOOK_EVERY.min(until_scrub).max(BETWEEN_LOOKS);
        let is_owed = lane.as_ref().is_some_and(Repairer::is_owed_answers);
        if !patient.needs_repair() && !until_scrub.is_zero() && !is_owed {
            continue;
        }
        let _caring = caring.lock();
        if lane.is_none() {
            lane = patient.open_repair_lane();
        }
        let Some(lane) = &mut lane else {
            rest = LOOK_EVERY;
            continue;
        };
        let began = Instant::now();
        while !stop.load(Ordering::Acquire) && !caring.is_wanted() && !patient.is_rejoin_due() {
            lane.repair();
            if lane.is_repairing() {
                continue;
            }
            if !patient.needs_repair() {
                break;
            }
            // Either this is between two rounds, or nothing can be done now.
            farfield_os::process::sleep(BETWEEN_LOOKS);
        }
        lane.finish_repairs();
        // Threads that wait for the lock get at least as much time as it was held.
        rest = began.elapsed().clamp(BETWEEN_LOOKS, LOOK_EVERY);
    }
}

impl Drop for RepairThread {
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
