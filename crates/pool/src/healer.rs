//! A thread that gives legs what they lack, and looks whether they have what they should.

use crate::PoolError;
use crate::leg_lanes::{Legged, SLEEP_SLICE};
use crate::legs::Roster;
use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use core::time::Duration;
use farfield_core::Legs;
use farfield_os::sync::{Mutex, MutexGuard};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// How often the thread looks whether there is something to do.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long it waits when there is, but not now.
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);

/// How long a snapshot waits for legs that hold everything.
const WHOLE_PATIENCE: Duration = Duration::from_secs(1);

/// What lanes of a backend share, as the thread sees it.
pub(crate) trait Patient: Send + Sync + 'static {
    type Lane: Nurse;
    /// Is there something to do?
    fn needs_care(&self) -> bool;
    /// How long until a scrub has something to look at; `None`: there is no scrub.
    fn scrub_in(&self) -> Option<Duration> {
        None
    }
    /// Is it time to see whether servers of lost legs are back?
    fn is_rejoin_due(&self) -> bool {
        false
    }
    /// Is there no place for one that is away?
    fn is_full(&self) -> bool {
        false
    }
    /// Makes a place free, if there is one that nobody knows anything of. Not while a snapshot is made.
    fn vacate(&self) {}
    /// Takes those that are.
    fn rejoin(&self) {}
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

    /// Is a leg late with something that was asked of it here? Nobody waits for that, but its answer comes here alone.
    fn is_owed_answers(&self) -> bool {
        false
    }

    /// Is something under way that nobody has asked for?
    fn is_caring(&self) -> bool;
    /// Ends what is under way and begins nothing else.
    fn finish_care(&mut self);
}

/// Legs that hold everything and answer, as many as are needed. Where one fell silent before another had what it missed there are too few: they get it now.
///
/// # Errors
/// [`PoolError::TimedOut`]: some that are needed do not answer. [`PoolError::ServerGone`]: too few are left.
pub(crate) fn whole_legs<P: Patient + Deref<Target = Roster>>(patient: &Arc<P>) -> Result<Legs, PoolError> {
    let whole = || {
        let whole = patient.which(|leg, _| patient.is_whole(leg));
        if patient.are_enough(whole) { patient.answering(whole) } else { Legs(0) }
    };
    let legs = whole();
    if patient.are_enough(legs) {
        return Ok(legs);
    }
    let until = Instant::now() + WHOLE_PATIENCE;
    let mut lane = patient.open_for_care();
    while patient.are_enough(patient.present()) {
        let legs = whole();
        let (are_enough, is_late) = (patient.are_enough(legs), Instant::now() >= until);
        if are_enough || is_late {
            lane.iter_mut().for_each(Nurse::finish_care);
            return if are_enough { Ok(legs) } else { Err(patient.silent(WHOLE_PATIENCE)) };
        }
        match &mut lane {
            Some(lane) => lane.care(),
            None => farfield_os::process::sleep(BETWEEN_LOOKS),
        }
    }
    Err(patient.gone())
}

/// Takes servers that are back, where there is a place for them or can be one.
pub(crate) fn take_back<P: Patient>(patient: &P, caring: &Caring) {
    if patient.is_full() {
        let _still = caring.hold_still();
        patient.vacate();
    }
    patient.rejoin();
}

/// Held while something is under way: snapshots are made when nothing is.
#[derive(Default)]
pub(crate) struct Caring {
    lock: Mutex<()>,
    waiting: AtomicU32,
}

impl Caring {
    /// Nobody cares for legs as long as this is held.
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

/// See the module.
pub(crate) struct Healer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    is_abandoned: AtomicBool,
}

impl Healer {
    #[expect(clippy::disallowed_methods, reason = "never inside a program: Opener::inside_a_program")]
    pub(crate) fn start<P: Patient>(patient: Arc<P>, caring: Arc<Caring>) -> Healer {
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

#[expect(clippy::disallowed_methods, reason = "a thread that does not exist inside programs")]
fn run<P: Patient>(patient: &Arc<P>, caring: &Caring, stop: &AtomicBool) {
    let (mut lane, mut rest) = (None, LOOK_EVERY);
    while !stop.load(Ordering::Acquire) {
        std::thread::park_timeout(rest);
        if patient.is_rejoin_due() {
            take_back(&**patient, caring);
        }
        let until_scrub = patient.scrub_in().unwrap_or(Duration::MAX);
        rest = LOOK_EVERY.min(until_scrub).max(BETWEEN_LOOKS);
        let is_owed = lane.as_ref().is_some_and(Nurse::is_owed_answers);
        if !patient.needs_care() && !until_scrub.is_zero() && !is_owed {
            continue;
        }
        let _caring = caring.lock();
        if lane.is_none() {
            lane = patient.open_for_care();
        }
        let Some(lane) = &mut lane else {
            rest = LOOK_EVERY;
            continue;
        };
        let began = Instant::now();
        while !stop.load(Ordering::Acquire) && !caring.is_wanted() && !patient.is_rejoin_due() {
            lane.care();
            if lane.is_caring() {
                continue;
            }
            if !patient.needs_care() {
                break;
            }
            // Between two rounds, or nothing can be done now.
            farfield_os::process::sleep(BETWEEN_LOOKS);
        }
        lane.finish_care();
        // Whoever waits for the lock has at least as much time as it was held.
        rest = began.elapsed().clamp(BETWEEN_LOOKS, LOOK_EVERY);
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
