//! The evictor: makes cold pages leave, in batches, ahead of need.
//!
//! A hand goes round the frames. A page that was used since the hand came by last keeps its place once more; another
//! becomes Leaving, and joins a batch. When no scope is left that could refer to a page of the batch, those that nobody took back are
//! taken: dead ones and those equal to their far copy leave at once, the others are copied and written together.
//!
//! Some pages leave [`first`], before the hand looks at anything else.
//!
//! There is one evictor, behind a lock: a thread of the heap runs it ahead of need, and a mutator that finds no room runs it
//! if it is idle.

mod carrier;
mod cooler;
mod discards;
mod first;
mod log_pages;
mod merge;
mod take;

use super::Core;
use super::segments::Unit;
use crate::plane::object::Evacuator;
use carrier::Carrier;
use cooler::{Cooler, Next};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
pub(crate) use discards::Vacancies;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use farfield_pool::PoolError;
use first::{Progress, WaitedFor};
use merge::Merger;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

/// How much whoever runs the evictor is in need of room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Urgency {
    /// It waits for nothing yet.
    Background,
    /// It cannot go on.
    Demand,
    /// The same, and the pool is full: what would have to be written stays.
    Full,
    /// It cannot go on, and what it needs waits for a scope of its own.
    Last,
}

/// How a run of the evictor ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// There is as much room as was asked for.
    Enough,
    /// There is more room, and it is the turn of others.
    More,
    /// The oldest batch, of this epoch, waits for a scope to end.
    Blocked(u64),
    /// What leaves first waits for a scope, but not for long yet.
    Soon,
    /// Everything is in use: what was about to leave was taken back.
    Hot,
}

/// The evictor and who may run it.
pub(crate) struct Evictor {
    state: Mutex<EvictorState>,
    cooler: Mutex<Cooler>,
    first: first::First,
    batch: usize,
    pub(crate) written: AtomicU64,
    pub(crate) clean: AtomicU64,
    pub(crate) dead: AtomicU64,
    pub(crate) discarded: AtomicU64,
    /// Units that came ahead of need and left unused.
    pub(crate) ahead: AtomicU64,
    /// Processor time of all runs.
    pub(crate) cpu_ns: AtomicU64,
    /// The epoch whose batch was in the way of the last run that was blocked.
    blocked: AtomicU64,
    /// When the scope began that has been in the way of all runs since, and the first of them.
    held: Mutex<Option<(u64, Instant)>>,
}

/// Pages made Leaving together.
pub(crate) struct Batch {
    /// Its name: frames remember it.
    epoch: u64,
    /// Scopes of later epochs see its pages Leaving.
    last: u64,
    frames: Vec<FrameId>,
}

struct EvictorState {
    carrier: Carrier,
    /// The one that goes round the vacancies.
    discard_hand: u32,
    evacuator: Evacuator,
    merger: Merger,
    /// The batch of those that leave first that is waited for.
    waited_for: Option<WaitedFor>,
    batch: usize,
    /// Of the present run.
    urgency: Urgency,
    /// Frames that became free since the hand's turns were counted last.
    freed: u32,
}

/// While a thread waits, so many pages are written at a time.
const FEW: usize = 16;

/// Most pages in a batch, and most pages written at a time.
const BATCH_MAX: usize = 64;

impl Evictor {
    /// For a heap of so much near memory.
    pub(crate) fn new(near: u64) -> Evictor {
        let batch = (near as usize / PAGE_BYTES / 32).clamp(8, BATCH_MAX);
        let state = EvictorState {
            carrier: Carrier::new(batch),
            discard_hand: 0,
            evacuator: Evacuator::default(),
            merger: Merger::default(),
            waited_for: None,
            batch,
            urgency: Urgency::Background,
            freed: 0,
        };
        Evictor {
            state: Mutex::new(state),
            cooler: Mutex::new(Cooler::new(batch)),
            first: first::First::default(),
            batch,
            written: AtomicU64::new(0),
            clean: AtomicU64::new(0),
            dead: AtomicU64::new(0),
            discarded: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            held: Mutex::new(None),
        }
    }

    /// How long the oldest scope has held back what is about to leave, and its thread.
    pub(crate) fn held_back(&self, core: &Core) -> Option<(Duration, i32)> {
        let (entered, since) = (*self.held.lock().unwrap_or_else(PoisonError::into_inner))?;
        Some((since.elapsed(), core.threads.who_entered(entered)?))
    }

    fn note_held(&self, core: &Core, is_blocked: bool) {
        let oldest = if is_blocked { core.threads.oldest() } else { None };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held =
            oldest.map(|oldest| held.filter(|(known, _)| *known == oldest).unwrap_or_else(|| (oldest, Instant::now())));
    }

    /// Most pages that leave together.
    pub(crate) fn batch(&self) -> u32 {
        self.batch as u32
    }

    /// Pages that left so far.
    pub(crate) fn left(&self) -> u64 {
        [&self.written, &self.clean, &self.dead].map(|count| count.load(Ordering::Relaxed)).iter().sum()
    }

    /// Near memory that the buffers cost.
    pub(crate) fn near_bytes(&self) -> u64 {
        (self.batch * PAGE_BYTES) as u64
    }

    fn lock(&self) -> MutexGuard<'_, EvictorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None`: somebody else is at it.
    fn try_lock(&self) -> Option<MutexGuard<'_, EvictorState>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Makes room until `goal` frames are free, or it cannot go on.
    pub(crate) fn run(&self, core: &Core, goal: u32) -> Result<Outcome, PoolError> {
        let outcome = {
            let mut state = self.lock();
            self.timed(|| {
                state.run(core, goal, Urgency::Background).and_then(|outcome| state.merge_far(core).map(|()| outcome))
            })
        };
        self.ring(core, &outcome);
        // At least one, who looks for what is wrong.
        core.waiters.room(tasks_for(core, &outcome).max(1), core.patience);
        outcome
    }

    /// The same, unless somebody else is at it.
    pub(crate) fn try_run(&self, core: &Core, goal: u32, urgency: Urgency) -> Option<Result<Outcome, PoolError>> {
        let mut state = self.try_lock()?;
        let outcome = self.timed(|| state.run(core, goal, urgency));
        drop(state);
        self.ring(core, &outcome);
        core.waiters.room(tasks_for(core, &outcome), core.patience);
        Some(outcome)
    }

    /// A step towards these units leaving, as far as nobody uses them meanwhile: they become the batch, or leave with it when the scopes of the moment at
    /// which they did so are over.
    pub(crate) fn send_away(&self, core: &Core, pages: &[u32], batch: &mut Option<Batch>) -> Result<(), PoolError> {
        let leaving = match batch.take() {
            Some(batch) => Some(batch),
            None => self.cooler().cool_pages(core, pages),
        };
        match leaving {
            Some(leaving) if core.threads.is_over(leaving.last) => {
                let mut state = self.lock();
                state.urgency = Urgency::Demand;
                self.timed(|| state.evict(core, leaving, u32::MAX))
            }
            leaving => {
                *batch = leaving;
                Ok(())
            }
        }
    }

    /// Nobody waits for what was to be sent away any more; it leaves when others do.
    pub(crate) fn put_last(&self, batch: Batch) {
        self.cooler().put_last(batch);
    }

    /// A run is over, and those who sleep wait for nothing: they look for themselves. It may be their scope that is in the way, and each gets its
    /// own error. But not again and again for the same batch, because whoever runs the evictor needs the processor.
    fn ring(&self, core: &Core, outcome: &Result<Outcome, PoolError>) {
        self.note_held(core, matches!(outcome, Ok(Outcome::Blocked(_))));
        let is_news = match outcome {
            Ok(Outcome::Blocked(epoch)) => self.blocked.swap(*epoch, Ordering::Relaxed) != *epoch,
            // Whoever makes room has rung.
            Ok(_) => false,
            Err(_) => true,
        };
        if is_news {
            core.throttle.ring();
        }
    }

    /// Takes answers to writes that nobody waits for, unless somebody else is at it.
    pub(crate) fn take_answers(&self) {
        if let Some(mut state) = self.try_lock() {
            state.carrier.take_answers();
        }
    }

    /// Does nobody run it?
    pub(crate) fn is_idle(&self) -> bool {
        self.try_lock().is_some()
    }

    /// Counts the processor time of a run.
    fn timed<R>(&self, run: impl FnOnce() -> R) -> R {
        let started = farfield_os::process::thread_cpu_ns();
        let result = run();
        self.cpu_ns.fetch_add(farfield_os::process::thread_cpu_ns().saturating_sub(started), Ordering::Relaxed);
        result
    }

    /// Somebody in need has found nothing after a run: pages that the evacuator fills may leave from now on,
    /// unless somebody else is at it.
    pub(crate) fn try_close(&self, core: &Core) {
        if let Some(mut state) = self.try_lock() {
            state.evacuator.close(core);
        }
    }

    /// Runs `action` while the evictor does nothing.
    pub(crate) fn paused<R>(&self, action: impl FnOnce() -> R) -> R {
        let _guard = self.lock();
        action()
    }
}

impl EvictorState {
    fn run(&mut self, core: &Core, goal: u32, urgency: Urgency) -> Result<Outcome, PoolError> {
        self.urgency = urgency;
        if let Some(objects) = &core.objects {
            core.recycle_log(&objects.log);
        }
        if urgency == Urgency::Background {
            self.discard_excess(core)?;
        }
        match self.make_room(core, goal) {
            Err(PoolError::PoolFull { .. }) if core.vacancies.count() > 0 => {
                self.discard(core, 0)?;
                self.make_room(core, goal)
            }
            outcome => outcome,
        }
    }

    fn make_room(&mut self, core: &Core, goal: u32) -> Result<Outcome, PoolError> {
        let urgency = self.urgency;
        // Two turns of the hand take away every mark and make every page Leaving: what is still here then is in use.
        let mut looks = 2 * u64::from(core.frames.used().count());
        self.freed = 0;
        let enough = if urgency == Urgency::Background { core.reserve().low } else { 1 };
        let mut helped = false;
        let mut spare = core.frames.spare();
        loop {
            let before = core::mem::replace(&mut spare, core.frames.spare());
            if spare > before {
                core.throttle.serve(core.frames.open_spare());
            }
            // Who waits does so for a frame, and not for a lower limit to be reached.
            let room = if urgency == Urgency::Background { core.frames.room() } else { spare };
            if room >= goal {
                return Ok(Outcome::Enough);
            }
            // Tasks get it batch by batch, too.
            if urgency == Urgency::Background && self.freed >= self.batch as u32 && core.waiters.want_room() {
                return Ok(Outcome::More);
            }
            let mut blocked = None;
            match self.evict_first(core, (goal - room).max(self.batch as u32))? {
                Progress::Some => {
                    helped = true;
                    continue;
                }
                Progress::Blocked(epoch) if self.waits_for(core, epoch, urgency) => {
                    let is_ahead = urgency == Urgency::Background;
                    return Ok(if is_ahead { Outcome::Blocked(epoch) } else { Outcome::Soon });
                }
                // More of them will follow: the hand is for real need.
                _ if helped && room >= enough => return Ok(Outcome::Enough),
                Progress::Blocked(epoch) => blocked = Some(epoch),
                Progress::Nothing => {}
            }
            let is_short = core.evictor.cooler().cool_ahead(core, cooler::pool(core).max(goal - room), &mut looks);
            if looks == 0 && self.freed > 0 {
                // Less and less would be Leaving.
                return Ok(Outcome::More);
            }
            if self.evict_urgent(core)? {
                continue;
            }
            let next = core.evictor.cooler().next(core, urgency);
            match next {
                Next::Batch(batch) => {
                    // What is kept for whoever runs this is not for others who wait.
                    let is_shared = core.throttle.waiting() > 1 || core.waiters.want_room();
                    let most = if urgency == Urgency::Last && is_shared { goal - room } else { u32::MAX };
                    self.evict(core, batch, most)?;
                    self.cool_cold(core);
                }
                // Later batches wait for it, too. Who needs a frame looks again soon; ahead of need more is cooled.
                Next::Blocked(epoch) if !is_short || urgency != Urgency::Background => {
                    return Ok(Outcome::Blocked(epoch));
                }
                Next::Nothing if !is_short => {
                    let blocked = blocked.or(core.evictor.cooler().urgent_since());
                    return Ok(blocked.map_or(Outcome::Hot, Outcome::Blocked));
                }
                Next::Blocked(_) | Next::Nothing => {}
            }
        }
    }

    /// Takes the pages of a batch that nobody took back, up to so many frames. The batch's scopes are over.
    fn evict(&mut self, core: &Core, mut batch: Batch, most: u32) -> Result<(), PoolError> {
        let (mut trouble, mut taken) = (Ok(()), 0);
        while trouble.is_ok()
            && taken < most
            && let Some(frame) = batch.frames.pop()
        {
            let Some((page, sealed)) = self.seal(core, frame, batch.epoch) else { continue };
            // From here on the page is ours, so its segment stays what it is.
            let Some(unit) = core.segments.unit_of(page) else { unreachable!("a near page outside of all units") };
            assert_eq!(unit.page, page);
            taken += unit.pages;
            trouble = self.take(core, unit, frame, sealed);
            if self.carrier.count() >= FEW && core.throttle.waiting() > 0 {
                trouble = trouble.and(self.finish(core));
                core.throttle.serve(core.frames.open_spare());
            }
        }
        if !batch.frames.is_empty() {
            // Enough, or the pool is in trouble; the rest goes on waiting, and can be taken back meanwhile.
            core.evictor.cooler().put_back(batch);
        }
        trouble.and(self.finish(core))
    }
}

/// For how many tasks that wait for room there is something: frames, or the error.
fn tasks_for(core: &Core, outcome: &Result<Outcome, PoolError>) -> u32 {
    if outcome.is_ok() { core.frames.open_spare() } else { u32::MAX }
}

#[cfg(test)]
mod tests {
    //! Guards against threads that sleep for a frame when nobody makes any.
    use super::*;
    use crate::Heap;
    use core::sync::atomic::AtomicBool;

    #[test]
    fn those_who_sleep_hear_that_a_scope_is_in_the_way() {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
        let values: Vec<_> = (0..512u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        let core = heap.core();
        core.reclaimer.stop();
        let scope = heap.enter();
        values[0].get(&scope).unwrap();
        let run = || core.evictor.try_run(core, core.frames.limit(), Urgency::Demand).transpose().unwrap();
        while !matches!(run(), Some(Outcome::Blocked(_))) {}
        core.evictor.blocked.store(0, Ordering::Relaxed);
        let asleep = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let sleeper = threads.spawn(|| {
                let finds_nothing = || {
                    asleep.store(true, Ordering::Release);
                    false
                };
                core.throttle.queue().sleep_unless(finds_nothing, Duration::from_secs(60))
            });
            while !asleep.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            assert!(matches!(run(), Some(Outcome::Blocked(_))));
            assert!(sleeper.join().unwrap(), "nobody rang");
        });
    }
}
