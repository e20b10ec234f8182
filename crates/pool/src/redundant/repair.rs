//! Repair thread: gives members the pages that they lack, and scrubs the pages that they hold.

use crate::PoolError;
use crate::redundant::member_lanes::{CompositeLane, SLEEP_SLICE};
use crate::redundant::members::Membership;
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

/// Time that a snapshot waits for enough members that hold everything.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(1);

/// State that the lanes of a backend share, as the repair thread sees it.
pub(crate) trait RepairSource: Send + Sync + 'static {
    type Lane: Repairer;
    /// Checks whether there is something to repair.
    fn needs_repair(&self) -> bool;
    /// Returns the time until the scrub has something to look at; `None` if there is no scrub.
    fn scrub_in(&self) -> Option<Duration> {
        None
    }
    /// Checks whether it is time to look for the servers of failed members.
    fn is_rejoin_due(&self) -> bool {
        false
    }
    /// Checks whether a server is unreachable for which there is no free slot.
    fn is_full(&self) -> bool {
        false
    }
    /// Frees a slot, if there is one whose former server no lane refers to. Must not be called
    /// while a snapshot is made.
    fn release_slot(&self) {}
    /// Takes the servers that are back.
    fn rejoin(&self) {}
    /// Opens a lane for the repair thread.
    fn open_repair_lane(self: &Arc<Self>) -> Option<Self::Lane>;
}

/// Lane that can repair: it gives members what they lack.
pub(crate) trait Repairer: CompositeLane {
    /// Advances the repairs as far as possible now, and waits a little.
    fn repair(&mut self) {
        self.work();
        self.member_lanes().sleep(SLEEP_SLICE);
    }

    /// Checks whether a member still owes this lane an answer. No operation waits for it, but it
    /// can arrive on this lane only.
    fn is_owed_answers(&self) -> bool {
        false
    }

    /// Checks whether a repair is in flight that no operation asked for.
    fn is_repairing(&self) -> bool;
    /// Ends the repairs in flight and begins no others.
    fn finish_repairs(&mut self);
}

/// Returns members that hold everything and answer, if there are enough of them. If a member fell
/// silent before another was repaired there are too few. Then this repairs members, and blocks, for
/// at most [`COMPLETE_TIMEOUT`].
///
/// # Errors
/// [`PoolError::TimedOut`]: some members that are needed do not answer. [`PoolError::ServerGone`]:
/// too few members are left.
pub(crate) fn complete_members<P: RepairSource + Deref<Target = Membership>>(
    source: &Arc<P>,
) -> Result<MemberSet, PoolError> {
    let whole = || {
        let whole = source.select(|member, _| source.is_whole(member));
        if source.are_enough(whole) { source.answering(whole) } else { MemberSet(0) }
    };
    let members = whole();
    if source.are_enough(members) {
        return Ok(members);
    }
    let until = Instant::now() + COMPLETE_TIMEOUT;
    let mut lane = source.open_repair_lane();
    while source.are_enough(source.present()) {
        let members = whole();
        let (are_enough, is_late) = (source.are_enough(members), Instant::now() >= until);
        if are_enough || is_late {
            lane.iter_mut().for_each(Repairer::finish_repairs);
            return if are_enough { Ok(members) } else { Err(source.silent(COMPLETE_TIMEOUT)) };
        }
        match &mut lane {
            Some(lane) => lane.repair(),
            None => farfield_os::process::sleep(BETWEEN_LOOKS),
        }
    }
    Err(source.gone())
}

/// Takes servers that are back, where there is a slot for them or one can be freed.
pub(crate) fn readmit_members<P: RepairSource>(source: &P, repair_lock: &RepairLock) {
    if source.is_full() {
        let _still = repair_lock.hold_still();
        source.release_slot();
    }
    source.rejoin();
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
    #[expect(clippy::disallowed_methods, reason = "never inside a program: PoolBuilder::inside_a_program")]
    pub(crate) fn start<P: RepairSource>(source: Arc<P>, repair_lock: Arc<RepairLock>) -> RepairThread {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread =
            std::thread::Builder::new().name("far-healer".into()).spawn(move || run(&source, &repair_lock, &stopped));
        // If no thread can be started, nothing is repaired, and the health of the backend shows it.
        RepairThread { stop, thread: thread.ok(), is_abandoned: AtomicBool::new(false) }
    }

    /// Forgets the thread in the child of a `fork`: it exists in the parent only.
    pub(crate) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

#[expect(clippy::disallowed_methods, reason = "a thread that does not exist inside programs")]
fn run<P: RepairSource>(source: &Arc<P>, repair_lock: &RepairLock, stop: &AtomicBool) {
    let (mut lane, mut rest) = (None, LOOK_EVERY);
    while !stop.load(Ordering::Acquire) {
        std::thread::park_timeout(rest);
        if source.is_rejoin_due() {
            readmit_members(&**source, repair_lock);
        }
        let until_scrub = source.scrub_in().unwrap_or(Duration::MAX);
        rest = LOOK_EVERY.min(until_scrub).max(BETWEEN_LOOKS);
        let is_owed = lane.as_ref().is_some_and(Repairer::is_owed_answers);
        if !source.needs_repair() && !until_scrub.is_zero() && !is_owed {
            continue;
        }
        let _caring = repair_lock.lock();
        if lane.is_none() {
            lane = source.open_repair_lane();
        }
        let Some(lane) = &mut lane else {
            rest = LOOK_EVERY;
            continue;
        };
        let began = Instant::now();
        while !stop.load(Ordering::Acquire) && !repair_lock.is_wanted() && !source.is_rejoin_due() {
            lane.repair();
            if lane.is_repairing() {
                continue;
            }
            if !source.needs_repair() {
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
