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
mod discards;
mod first;
mod log_pages;
mod merge;
mod take;

use super::Core;
use super::segments::Unit;
use crate::plane::object::Evacuator;
use carrier::Carrier;
use core::sync::atomic::{AtomicU64, Ordering};
pub(crate) use discards::Vacancies;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FrameId, FrameWord, State};
use farfield_pool::PoolError;
use first::{Progress, WaitedFor};
use merge::Merger;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// How much whoever runs the evictor is in need of room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Urgency {
    /// It waits for nothing yet.
    Background,
    /// It cannot go on.
    Demand,
    /// The same, and the pool is full: what would have to be written stays.
    Full,
}

/// How a run of the evictor ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// There is as much room as was asked for.
    Enough,
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
    first: first::First,
    batch: usize,
    pub(crate) written: AtomicU64,
    pub(crate) clean: AtomicU64,
    pub(crate) dead: AtomicU64,
    pub(crate) discarded: AtomicU64,
    /// Units that came ahead of need and left unused.
    pub(crate) ahead: AtomicU64,
}

/// Pages made Leaving together.
struct Batch {
    /// Its name: frames remember it.
    epoch: u64,
    /// Scopes of later epochs see its pages Leaving.
    last: u64,
    frames: Vec<FrameId>,
}

struct EvictorState {
    carrier: Carrier,
    hand: u32,
    /// The one that goes round the vacancies.
    discard_hand: u32,
    batches: VecDeque<Batch>,
    /// Log pages to be taken as soon as no scope refers to them: sparse ones that are in use, and the evacuator's cold ones.
    urgent: VecDeque<Batch>,
    evacuator: Evacuator,
    merger: Merger,
    /// Log pages that were retired before this epoch's batch, and are free when it is over.
    retired: VecDeque<(u64, Vec<u32>)>,
    /// Frames in `batches`.
    cooling: usize,
    /// Batches of those that leave first.
    first: VecDeque<Batch>,
    /// The one of them that is waited for.
    waited_for: Option<WaitedFor>,
    batch: usize,
    /// Of the present run.
    urgency: Urgency,
}

/// Batches that are made Leaving for each that leaves, until there are enough.
const COOL_AHEAD: u32 = 8;

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
            hand: 0,
            discard_hand: 0,
            batches: VecDeque::new(),
            urgent: VecDeque::new(),
            evacuator: Evacuator::default(),
            merger: Merger::default(),
            retired: VecDeque::new(),
            cooling: 0,
            first: VecDeque::new(),
            waited_for: None,
            batch,
            urgency: Urgency::Background,
        };
        Evictor {
            state: Mutex::new(state),
            first: first::First::default(),
            batch,
            written: AtomicU64::new(0),
            clean: AtomicU64::new(0),
            dead: AtomicU64::new(0),
            discarded: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
        }
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
            state.run(core, goal, Urgency::Background).and_then(|outcome| state.merge_far(core).map(|()| outcome))
        };
        // At least one, who looks for what is wrong.
        core.waiters.room(tasks_for(core, &outcome).max(1), core.patience);
        outcome
    }

    /// The same, unless somebody else is at it.
    pub(crate) fn try_run(&self, core: &Core, goal: u32, urgency: Urgency) -> Option<Result<Outcome, PoolError>> {
        let outcome = self.try_lock()?.run(core, goal, urgency);
        core.waiters.room(tasks_for(core, &outcome), core.patience);
        Some(outcome)
    }

    /// Somebody in need has found nothing after a run: pages that the evacuator fills, which lie anywhere, may leave from now on,
    /// unless somebody else is at it.
    pub(crate) fn try_close(&self, core: &Core) {
        if let Some(mut state) = self.try_lock() {
            state.evacuator.close(core);
        }
    }

    /// Frees log pages that nobody remembers, unless somebody else is at it.
    pub(crate) fn try_recycle(&self, core: &Core) {
        if let Some(mut state) = self.try_lock() {
            state.recycle(core);
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
        self.recycle(core);
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
        let limit = core.frames.limit();
        // Two turns of the hand take away every mark and make every page Leaving: what is still here then is in use.
        let mut turns_left = 2 * u64::from(core.frames.count());
        let enough = if urgency == Urgency::Background { core.reserve().low } else { 1 };
        let mut helped = false;
        let mut before = core.frames.room();
        loop {
            let room = core.frames.room();
            if room > before {
                core.throttle.ring();
            }
            before = room;
            if room >= goal {
                return Ok(Outcome::Enough);
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
            let pool = (limit / 8).max(self.batch as u32).max(goal - room) as usize;
            // Not all of it at once: somebody may be waiting for the first frame.
            for _ in 0..COOL_AHEAD {
                if self.cooling < pool && turns_left > 0 {
                    turns_left -= self.cool(core).min(turns_left);
                }
            }
            let is_full = self.cooling >= pool || turns_left == 0;
            if self.evict_urgent(core)? {
                continue;
            }
            match self.batches.front() {
                None if is_full => {
                    let blocked = blocked.or(self.urgent.front().map(|batch| batch.last));
                    return Ok(blocked.map_or(Outcome::Hot, Outcome::Blocked));
                }
                Some(batch) if !core.threads.is_over(batch.last) => {
                    // Later batches wait for it, too. Who needs a frame looks again soon; ahead of need more is cooled.
                    if is_full || urgency != Urgency::Background {
                        return Ok(Outcome::Blocked(batch.last));
                    }
                    continue;
                }
                _ => {}
            }
            if let Some(batch) = self.batches.pop_front() {
                self.cooling -= batch.frames.len();
                self.evict(core, batch)?;
                self.cool_cold(core);
            }
        }
    }

    /// Makes a batch of pages Leaving; how many frames the hand passed.
    fn cool(&mut self, core: &Core) -> u64 {
        let epoch = core.epoch.load(Ordering::Relaxed);
        let (mut frames, mut sparse) = (Vec::with_capacity(self.batch), Vec::new());
        let mut passed = 0;
        // Frames are used from the low end.
        let end = core.frames.high();
        while frames.len() + sparse.len() < self.batch && passed < u64::from(end) {
            self.hand = if self.hand + 1 >= end { 1 } else { self.hand + 1 };
            passed += 1;
            if let Some(page) = core.frames.infos[self.hand].page() {
                match self.cool_page(core, page, epoch) {
                    Some(frame) => frames.push(frame),
                    None => sparse.extend(self.cool_sparse(core, page, epoch)),
                }
            }
        }
        if !(frames.is_empty() && sparse.is_empty()) {
            self.cooling += frames.len();
            // Scopes of later epochs than this see the batch Leaving. Others move the epoch on too, so it may not be `epoch`.
            let last = core.next_epoch();
            let queues = [(&mut self.batches, frames), (&mut self.urgent, sparse)];
            for (queue, frames) in queues.into_iter().filter(|(_, frames)| !frames.is_empty()) {
                queue.push_back(Batch { epoch, last, frames });
            }
        }
        passed.max(1)
    }

    /// Makes a page Leaving, or takes its mark away; its frame if it is Leaving now.
    fn cool_page(&self, core: &Core, page: u32, epoch: u64) -> Option<FrameId> {
        if self.evacuator.fills(core, page) || core.expects_objects(page) {
            return None;
        }
        let word = &core.words[page];
        let seen = FrameWord(word.load(Ordering::Acquire));
        let (next, frame) = (seen.cool()?, seen.frame()?);
        if core.frames.infos[frame.0].is_pinned() {
            return None;
        }
        let left = core.exchange(word, seen, next) && next.state() == State::Leaving;
        left.then(|| {
            core.frames.infos[frame.0].set_cooled(epoch);
            frame
        })
    }

    /// Takes the pages of a batch that nobody took back. The batch's scopes are over.
    fn evict(&mut self, core: &Core, mut batch: Batch) -> Result<(), PoolError> {
        let mut trouble = Ok(());
        while trouble.is_ok()
            && let Some(frame) = batch.frames.pop()
        {
            let info = &core.frames.infos[frame.0];
            // Taken back and made Leaving again since, or gone: then it is in a later batch, or in none.
            if info.cooled() != batch.epoch {
                continue;
            }
            let Some(page) = info.page() else { continue };
            let word = &core.words[page];
            let seen = FrameWord(word.load(Ordering::Acquire));
            if seen.frame() != Some(frame) {
                continue;
            }
            let Some(sealed) = seen.seal() else { continue };
            if info.is_pinned() || core.expects_objects(page) {
                // Since it was cooled. It is in use, as any page that is taken back.
                core.exchange(word, seen, seen.deref(false).0);
                continue;
            }
            if !core.exchange(word, seen, sealed) {
                continue;
            }
            // From here on the page is ours, so its segment stays what it is.
            let Some(unit) = core.segments.unit_of(page) else { unreachable!("a near page outside of all units") };
            assert_eq!(unit.page, page);
            trouble = self.take(core, unit, frame, sealed);
            if self.carrier.count() >= FEW && core.throttle.waiting() > 0 {
                trouble = trouble.and(self.finish(core));
                core.throttle.ring();
            }
        }
        if !batch.frames.is_empty() {
            // The pool is in trouble; the rest goes on waiting, and can be taken back meanwhile.
            self.cooling += batch.frames.len();
            self.batches.push_front(batch);
        }
        trouble.and(self.finish(core))
    }
}

/// For how many tasks that wait for room there is something: frames, or the error.
fn tasks_for(core: &Core, outcome: &Result<Outcome, PoolError>) -> u32 {
    if outcome.is_ok() { core.frames.open_room() } else { u32::MAX }
}
