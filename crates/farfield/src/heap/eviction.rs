//! The evictor: evicts cold pages in batches, ahead of need (CLOCK with a cooling stage, as in
//! LeanStore).
//!
//! A hand goes round the frames. A page that was used since the hand came by last keeps its place
//! once more; another one becomes Cooling, and joins a batch. When no scope is left that could
//! refer to a page of the batch, those that nobody rescued are evicted: dead and clean pages at
//! once, the others are copied and written together.
//!
//! Some pages leave [`evict_first`], before the hand looks at anything else.
//!
//! There is one evictor, behind a lock: a thread of the heap runs it ahead of need, and a mutator
//! that finds no room runs it if it is idle.

mod compaction;
mod cooling;
mod discards;
mod evict_first;
mod flush;
mod log_pages;
mod victims;
mod writer;

use super::HeapInner;
use super::segments::TransferUnit;
use crate::plane::object::Evacuator;
use compaction::Compactor;
use cooling::{CoolingStage, NextBatch};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
pub(crate) use discards::Vacancies;
use evict_first::{BatchWait, EvictFirstOutcome};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use farfield_os::process::now_ns;
use farfield_pool::PoolError;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;
use writer::EvictionWriter;

/// Need for room of the thread that runs the evictor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EvictionUrgency {
    /// Ahead of need: the thread waits for nothing yet.
    Background,
    /// Needed now: the thread cannot go on.
    Demand,
    /// Needed now, and the pool is full: pages that would have to be written stay.
    Full,
    /// Needed now, and the frames wait for a scope of the thread's own.
    Last,
}

/// Outcome of a run of the evictor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EvictionOutcome {
    /// Success: as much room as was requested.
    Enough,
    /// Progress: there is more room, and it is the turn of others.
    Progress,
    /// Failed: the oldest batch, of this epoch, waits for a scope to end.
    Blocked(u64),
    /// Failed: pages that leave first wait for a scope, but not for long yet.
    ShortWait,
    /// Failed: everything is in use, and what was about to leave was rescued.
    Hot,
}

/// The evictor's state, with locks that say who may run it.
pub(crate) struct HeapEvictor {
    state: Mutex<EvictorState>,
    cooling: Mutex<CoolingStage>,
    first: evict_first::EvictFirstList,
    batch: usize,
    pub(crate) written: AtomicU64,
    pub(crate) clean: AtomicU64,
    pub(crate) dead: AtomicU64,
    pub(crate) discarded: AtomicU64,
    /// Number of units that were prefetched and left unused.
    pub(crate) ahead: AtomicU64,
    /// Processor time of all runs, in ns.
    pub(crate) cpu_ns: AtomicU64,
    /// Epoch whose batch was in the way of the last run that was blocked.
    blocked: AtomicU64,
    /// Time (ns) of the oldest request that the pool has not answered; 0 if it has answered all.
    asked_ns: AtomicU64,
    /// Epoch in which the scope began that has blocked all runs since, and the time of the first of
    /// them.
    held: Mutex<Option<(u64, Instant)>>,
}

/// Pages that were made Cooling together.
pub(crate) struct CoolingBatch {
    /// Identity of the batch: frames remember it.
    epoch: u64,
    /// Last epoch whose scopes may refer to its pages: scopes of later ones see them Cooling.
    last: u64,
    frames: Vec<FrameId>,
}

struct EvictorState {
    writer: EvictionWriter,
    /// Hand that goes round the vacancies.
    discard_hand: u32,
    evacuator: Evacuator,
    compactor: Compactor,
    /// Batch of the pages that leave first that is waited for.
    waited_for: Option<BatchWait>,
    batch: usize,
    /// Urgency of the present run.
    urgency: EvictionUrgency,
    /// Number of frames that became free since the hand's turns were counted last.
    freed: u32,
}

/// Number of pages that are written at a time while a thread waits.
const FEW: usize = 16;

/// Maximum number of pages in a batch, and of pages written at a time.
const BATCH_MAX: usize = 64;

impl HeapEvictor {
    /// Creates the evictor of a heap with `near` bytes of near memory.
    pub(crate) fn new(near: u64) -> HeapEvictor {
        let batch = (near as usize / PAGE_BYTES / 32).clamp(8, BATCH_MAX);
        let state = EvictorState {
            writer: EvictionWriter::new(batch),
            discard_hand: 0,
            evacuator: Evacuator::default(),
            compactor: Compactor::default(),
            waited_for: None,
            batch,
            urgency: EvictionUrgency::Background,
            freed: 0,
        };
        HeapEvictor {
            state: Mutex::new(state),
            cooling: Mutex::new(CoolingStage::new(batch)),
            first: evict_first::EvictFirstList::default(),
            batch,
            written: AtomicU64::new(0),
            clean: AtomicU64::new(0),
            dead: AtomicU64::new(0),
            discarded: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            asked_ns: AtomicU64::new(0),
            held: Mutex::new(None),
        }
    }

    /// Returns how long the oldest scope has held back the pages that are about to leave, and its
    /// thread.
    pub(crate) fn held_back(&self, core: &HeapInner) -> Option<(Duration, i32)> {
        let (entered, since) = (*self.held.lock().unwrap_or_else(PoisonError::into_inner))?;
        Some((since.elapsed(), core.threads.thread_of_scope(entered)?))
    }

    /// Returns how long the pool has kept pages that leave waiting; zero if none waits now.
    pub(crate) fn waits_for_pool(&self) -> Duration {
        match self.asked_ns.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            asked => Duration::from_nanos(now_ns().saturating_sub(asked)),
        }
    }

    fn note_held(&self, core: &HeapInner, is_blocked: bool) {
        let oldest = if is_blocked { core.threads.oldest() } else { None };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held =
            oldest.map(|oldest| held.filter(|(known, _)| *known == oldest).unwrap_or_else(|| (oldest, Instant::now())));
    }

    /// Returns the maximum number of pages that leave together.
    pub(crate) fn batch(&self) -> u32 {
        self.batch as u32
    }

    /// Returns the number of pages that have left so far.
    pub(crate) fn evicted_pages(&self) -> u64 {
        [&self.written, &self.clean, &self.dead].map(|count| count.load(Ordering::Relaxed)).iter().sum()
    }

    /// Returns the bytes of near memory that the buffers cost.
    pub(crate) fn near_bytes(&self) -> u64 {
        (self.batch * PAGE_BYTES) as u64
    }

    fn lock(&self) -> MutexGuard<'_, EvictorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state; `None` if another thread runs the evictor.
    fn try_lock(&self) -> Option<MutexGuard<'_, EvictorState>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Evicts until `goal` frames are free, or it cannot go on. Waits for the evictor's lock.
    pub(crate) fn run(&self, core: &HeapInner, goal: u32) -> Result<EvictionOutcome, PoolError> {
        let outcome = {
            let mut state = self.lock();
            self.timed(|| {
                state
                    .run(core, goal, EvictionUrgency::Background)
                    .and_then(|outcome| state.compact_far_pages(core).map(|()| outcome))
            })
        };
        self.notify_waiters(core, &outcome);
        // At least one task, which looks for what is wrong.
        core.waiters.wake_for_frames(tasks_for(core, &outcome).max(1), core.patience);
        outcome
    }

    /// Evicts until `goal` frames are free, as [`HeapEvictor::run`] does, unless another thread
    /// runs the evictor (`None`).
    pub(crate) fn try_run(
        &self,
        core: &HeapInner,
        goal: u32,
        urgency: EvictionUrgency,
    ) -> Option<Result<EvictionOutcome, PoolError>> {
        let mut state = self.try_lock()?;
        let outcome = self.timed(|| state.run(core, goal, urgency));
        drop(state);
        self.notify_waiters(core, &outcome);
        core.waiters.wake_for_frames(tasks_for(core, &outcome), core.patience);
        Some(outcome)
    }

    /// Takes a step towards the eviction of these units, as far as nobody uses them meanwhile.
    ///
    /// They become the batch. They leave with it when the scopes are over that were open when they
    /// did so.
    pub(crate) fn evict_units(
        &self,
        core: &HeapInner,
        pages: &[u32],
        batch: &mut Option<CoolingBatch>,
    ) -> Result<(), PoolError> {
        let leaving = match batch.take() {
            Some(batch) => Some(batch),
            None => self.cooling_stage().cool_pages(core, pages),
        };
        match leaving {
            Some(leaving) if core.threads.is_over(leaving.last) => {
                let mut state = self.lock();
                state.urgency = EvictionUrgency::Demand;
                self.timed(|| state.evict(core, leaving, u32::MAX))
            }
            leaving => {
                *batch = leaving;
                Ok(())
            }
        }
    }

    /// Gives up a batch that nobody waits for any more: it leaves when others do.
    pub(crate) fn requeue(&self, batch: CoolingBatch) {
        self.cooling_stage().requeue(batch);
    }

    /// Wakes the threads that sleep if a run has ended without room for them, so that they look for
    /// themselves. It may be their scope that is in the way, and each gets its own error.
    ///
    /// Does so only once for the same batch, because the thread that runs the evictor needs the
    /// processor.
    fn notify_waiters(&self, core: &HeapInner, outcome: &Result<EvictionOutcome, PoolError>) {
        self.note_held(core, matches!(outcome, Ok(EvictionOutcome::Blocked(_))));
        let is_news = match outcome {
            Ok(EvictionOutcome::Blocked(epoch)) => self.blocked.swap(*epoch, Ordering::Relaxed) != *epoch,
            // The thread that makes room has rung.
            Ok(_) => false,
            Err(_) => true,
        };
        if is_news {
            core.admission.ring();
        }
    }

    /// Takes answers to writes that nobody waits for, unless another thread runs the evictor.
    pub(crate) fn take_answers(&self) {
        if let Some(mut state) = self.try_lock() {
            state.writer.take_answers();
        }
    }

    /// Checks whether nobody runs the evictor.
    pub(crate) fn is_idle(&self) -> bool {
        self.try_lock().is_some()
    }

    /// Runs `run` and counts its processor time.
    fn timed<R>(&self, run: impl FnOnce() -> R) -> R {
        let started = farfield_os::process::thread_cpu_ns();
        let result = run();
        self.cpu_ns.fetch_add(farfield_os::process::thread_cpu_ns().saturating_sub(started), Ordering::Relaxed);
        result
    }

    /// Closes the pages that the evacuator fills, so that they may leave, unless another thread
    /// runs the evictor. For a thread in need that has found nothing after a run.
    pub(crate) fn try_close(&self, core: &HeapInner) {
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
    fn run(&mut self, core: &HeapInner, goal: u32, urgency: EvictionUrgency) -> Result<EvictionOutcome, PoolError> {
        self.urgency = urgency;
        if let Some(objects) = &core.objects {
            core.recycle_log(&objects.log);
        }
        if urgency == EvictionUrgency::Background {
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

    fn make_room(&mut self, core: &HeapInner, goal: u32) -> Result<EvictionOutcome, PoolError> {
        let urgency = self.urgency;
        // Two turns of the hand clear every reference bit and make every page Cooling: pages that
        // are still here then are in use.
        let mut looks = 2 * u64::from(core.frames.used().count());
        self.freed = 0;
        let enough = if urgency == EvictionUrgency::Background { core.reserve().low } else { 1 };
        let mut helped = false;
        let mut spare = core.frames.spare();
        loop {
            let before = core::mem::replace(&mut spare, core.frames.spare());
            if spare > before {
                core.admission.serve(core.frames.open_spare());
            }
            // A thread that waits does so for a frame, and not for a lower limit to be reached.
            let room = if urgency == EvictionUrgency::Background { core.frames.room() } else { spare };
            if room >= goal {
                return Ok(EvictionOutcome::Enough);
            }
            // Tasks get room batch by batch, too.
            if urgency == EvictionUrgency::Background
                && self.freed >= self.batch as u32
                && core.waiters.has_frame_waiters()
            {
                return Ok(EvictionOutcome::Progress);
            }
            let mut blocked = None;
            match self.evict_first(core, (goal - room).max(self.batch as u32))? {
                EvictFirstOutcome::Evicted => {
                    helped = true;
                    continue;
                }
                EvictFirstOutcome::Blocked(epoch) if self.waits_for(core, epoch, urgency) => {
                    let is_ahead = urgency == EvictionUrgency::Background;
                    return Ok(if is_ahead { EvictionOutcome::Blocked(epoch) } else { EvictionOutcome::ShortWait });
                }
                // More pages that leave first will follow: the hand is for real need.
                _ if helped && room >= enough => return Ok(EvictionOutcome::Enough),
                EvictFirstOutcome::Blocked(epoch) => blocked = Some(epoch),
                EvictFirstOutcome::Empty => {}
            }
            let is_short = core.evictor.cooling_stage().cool_ahead(
                core,
                cooling::cooling_target(core).max(goal - room),
                &mut looks,
            );
            if looks == 0 && self.freed > 0 {
                // With more turns, fewer and fewer pages would be Cooling.
                return Ok(EvictionOutcome::Progress);
            }
            if self.evict_urgent(core)? {
                continue;
            }
            let next = core.evictor.cooling_stage().next(core, urgency);
            match next {
                NextBatch::Batch(batch) => {
                    // Frames that are kept for the thread that runs this are not for others that
                    // wait.
                    let is_shared = core.admission.waiting() > 1 || core.waiters.has_frame_waiters();
                    let most = if urgency == EvictionUrgency::Last && is_shared { goal - room } else { u32::MAX };
                    self.evict(core, batch, most)?;
                    self.cool_cold(core);
                }
                // Later batches wait for it, too. A thread that needs a frame looks again soon;
                // ahead of need more is cooled.
                NextBatch::Blocked(epoch) if !is_short || urgency != EvictionUrgency::Background => {
                    return Ok(EvictionOutcome::Blocked(epoch));
                }
                NextBatch::Empty if !is_short => {
                    let blocked = blocked.or(core.evictor.cooling_stage().urgent_since());
                    return Ok(blocked.map_or(EvictionOutcome::Hot, EvictionOutcome::Blocked));
                }
                NextBatch::Blocked(_) | NextBatch::Empty => {}
            }
        }
    }

    /// Evicts the pages of a batch that nobody rescued, up to `most` frames. The batch's scopes
    /// are over.
    fn evict(&mut self, core: &HeapInner, mut batch: CoolingBatch, most: u32) -> Result<(), PoolError> {
        let (mut trouble, mut taken) = (Ok(()), 0);
        while trouble.is_ok()
            && taken < most
            && let Some(frame) = batch.frames.pop()
        {
            let Some((page, claimed)) = self.claim_for_eviction(core, frame, batch.epoch) else { continue };
            // From here on the page is ours, so its segment stays what it is.
            let Some(unit) = core.segments.unit_of(page) else { unreachable!("a near page outside of all units") };
            assert_eq!(unit.page, page);
            taken += unit.pages;
            trouble = self.evict_unit(core, unit, frame, claimed);
            if self.writer.count() >= FEW && core.admission.waiting() > 0 {
                trouble = trouble.and(self.finish(core));
                core.admission.serve(core.frames.open_spare());
            }
        }
        if !batch.frames.is_empty() {
            // Enough, or the pool is in trouble; the rest goes on waiting, and can be rescued
            // meanwhile.
            core.evictor.cooling_stage().put_back(batch);
        }
        trouble.and(self.finish(core))
    }
}

/// Returns for how many tasks that wait for room there is something: frames, or the error.
fn tasks_for(core: &HeapInner, outcome: &Result<EvictionOutcome, PoolError>) -> u32 {
    if outcome.is_ok() { core.frames.open_spare() } else { u32::MAX }
}

#[cfg(test)]
mod tests {
    //! Guards against threads that sleep for a frame when nobody makes any.
    use super::*;
    use crate::Heap;
    use core::sync::atomic::AtomicBool;

    #[test]
    fn sleeping_waiters_learn_that_a_scope_is_in_the_way() {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
        let values: Vec<_> = (0..512u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        let core = heap.core();
        core.reclaimer.stop();
        let scope = heap.enter();
        values[0].get(&scope).unwrap();
        let run = || core.evictor.try_run(core, core.frames.limit(), EvictionUrgency::Demand).transpose().unwrap();
        while !matches!(run(), Some(EvictionOutcome::Blocked(_))) {}
        core.evictor.blocked.store(0, Ordering::Relaxed);
        let asleep = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let sleeper = threads.spawn(|| {
                let finds_nothing = || {
                    asleep.store(true, Ordering::Release);
                    false
                };
                core.admission.queue().sleep_unless(finds_nothing, Duration::from_secs(60))
            });
            while !asleep.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            assert!(matches!(run(), Some(EvictionOutcome::Blocked(_))));
            assert!(sleeper.join().unwrap(), "nobody rang");
        });
    }
}
