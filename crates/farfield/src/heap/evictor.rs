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

mod first;
mod log_pages;
mod merge;

use super::Core;
use super::segments::Unit;
use crate::plane::object::Evacuator;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FrameId, FrameWord, State};
use farfield_core::{PageId, checksum};
use farfield_pool::{Buffer, Completion, Lane, Op, PoolError, Priority, Request};
use first::Progress;
use merge::Merger;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

/// How much whoever runs the evictor is in need of room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Urgency {
    /// It waits for nothing yet.
    Background,
    /// It cannot go on.
    Demand,
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
    lane: Option<Box<dyn Lane>>,
    hand: u32,
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
    /// The one of them that is waited for, and since when.
    waited_for: Option<(u64, Instant)>,
    /// One page each.
    buffers: Vec<Buffer>,
    done: Vec<Completion>,
    /// Units whose copies are being written: word, unit, frame, pages written so far, first error.
    writing: Vec<Writing>,
    batch: usize,
}

struct Writing {
    unit: Unit,
    frame: FrameId,
    result: Result<(), PoolError>,
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
            lane: None,
            hand: 0,
            batches: VecDeque::new(),
            urgent: VecDeque::new(),
            evacuator: Evacuator::default(),
            merger: Merger::default(),
            retired: VecDeque::new(),
            cooling: 0,
            first: VecDeque::new(),
            waited_for: None,
            buffers: Vec::new(),
            done: Vec::with_capacity(batch),
            writing: Vec::with_capacity(batch),
            batch,
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
        self.recycle(core);
        self.discard(core)?;
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
                Progress::Blocked(epoch) if self.waits_for(epoch, urgency) => {
                    let is_demand = urgency == Urgency::Demand;
                    return Ok(if is_demand { Outcome::Soon } else { Outcome::Blocked(epoch) });
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
                    if is_full || urgency == Urgency::Demand {
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
        if self.evacuator.fills(core, page) {
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
            if info.is_pinned() {
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
            if self.writing.len() >= FEW && core.throttle.waiting() > 0 {
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

    /// Takes one unit that we have sealed.
    fn take(&mut self, core: &Core, unit: Unit, frame: FrameId, sealed: FrameWord) -> Result<(), PoolError> {
        let word = &core.words[unit.page];
        // A larger unit has one object, and goes with it.
        if unit.pages == 1 && !core.is_live(unit) {
            self.drop_dead(core, unit, frame);
            return Ok(());
        }
        if self.take_log_page(core, unit, frame) {
            return Ok(());
        }
        let trust_far = sealed.is_stored() && !sealed.is_dirty();
        if trust_far && (0..unit.pages).all(|index| sum(core, frame, index) == core.frames.infos[frame.0 + index].sum())
        {
            self.settle(word, |word| word.dropped(false));
            core.frames.put(frame, unit.pages);
            core.evictor.clean.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
            core.evictor.ahead.fetch_add(u64::from(sealed.is_ahead()), Ordering::Relaxed);
            return Ok(());
        }
        if unit.pages as usize > self.batch {
            return self.take_large(core, unit, frame);
        }
        if let Err(error) = self.room_for(core, unit.pages as usize) {
            self.settle(word, FrameWord::stays);
            return Err(error);
        }
        let tag = self.writing.len() as u64;
        // Before the copies: the first may have failed before the last is submitted.
        self.writing.push(Writing { unit, frame, result: Ok(()) });
        for index in 0..unit.pages {
            self.submit_copy(core, unit.page + index, FrameId(frame.0 + index), tag);
        }
        // Whoever needs the page from here on need not wait for the write.
        self.settle(word, FrameWord::copied);
        Ok(())
    }

    /// No object lives in the sealed unit.
    fn drop_dead(&self, core: &Core, unit: Unit, frame: FrameId) {
        let dropped = self.settle(&core.words[unit.page], |word| word.dropped(true));
        core.frames.put(frame, unit.pages);
        core.discard_later(unit.page, dropped.is_stored());
        core.evictor.dead.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
    }

    /// A transition that only the owner makes, on a word in which others may set marks.
    fn settle(&self, word: &AtomicU64, transition: impl Fn(FrameWord) -> FrameWord) -> FrameWord {
        let mut seen = FrameWord(word.load(Ordering::Acquire));
        loop {
            let next = transition(seen);
            match word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return next,
                Err(now) => seen = FrameWord(now),
            }
        }
    }

    /// Units of more pages than a batch are written while they are ours, in windows; between them we look whether
    /// somebody wants it back.
    fn take_large(&mut self, core: &Core, unit: Unit, frame: FrameId) -> Result<(), PoolError> {
        let word = &core.words[unit.page];
        if let Err(error) = self.finish(core) {
            self.settle(word, FrameWord::stays);
            return Err(error);
        }
        let mut at = 0;
        while at < unit.pages {
            let wanted = FrameWord(word.load(Ordering::Acquire)).is_wanted();
            let result = if wanted { Ok(()) } else { self.write_window(core, unit, frame, at) };
            if wanted || result.is_err() {
                // What was written is newer than the checksums say.
                self.settle(word, |word| word.stays_dirty());
                return result;
            }
            at += self.batch as u32;
        }
        let left =
            self.settle(word, |word| word.copied().left().unwrap_or_else(|| unreachable!("copied and not taken")));
        debug_assert_eq!(left.state(), State::Far);
        core.frames.put(frame, unit.pages);
        core.evictor.written.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
        Ok(())
    }

    fn write_window(&mut self, core: &Core, unit: Unit, frame: FrameId, at: u32) -> Result<(), PoolError> {
        self.open(core)?;
        self.writing.push(Writing { unit, frame, result: Ok(()) });
        for index in at..(at + self.batch as u32).min(unit.pages) {
            let frame = FrameId(frame.0 + index);
            let trusted = FrameWord(core.words[unit.page].load(Ordering::Relaxed));
            if trusted.is_stored() && !trusted.is_dirty() && sum(core, frame, 0) == core.frames.infos[frame.0].sum() {
                continue;
            }
            self.submit_copy(core, unit.page + index, frame, 0);
        }
        let result = self.wait_all(core);
        self.writing.pop().map_or(result, |writing| result.and(writing.result))
    }

    /// Opens the lane if it is closed, and waits until so many copies can be made.
    fn room_for(&mut self, core: &Core, pages: usize) -> Result<(), PoolError> {
        self.open(core)?;
        let in_flight = self.lane.as_ref().map_or(0, |lane| lane.in_flight());
        if in_flight + pages > self.batch { self.finish(core) } else { Ok(()) }
    }

    fn open(&mut self, core: &Core) -> Result<(), PoolError> {
        if self.lane.is_none() {
            self.lane = Some(core.backend.open_lane()?);
        }
        Ok(())
    }

    /// Copies a page that we have sealed and submits the copy.
    fn submit_copy(&mut self, core: &Core, page: u32, frame: FrameId, tag: u64) {
        let mut buffer = self.buffers.pop().unwrap_or_else(|| Buffer::new(1));
        // SAFETY: the frame is part of a unit in Copying, of which we are the owner: no scope refers to it, and who wants it
        // waits. So nobody writes it.
        unsafe {
            let source = core.frames.address(frame);
            launder(source);
            buffer.bytes_mut().as_mut_ptr().copy_from_nonoverlapping(source, PAGE_BYTES);
        }
        buffer.seal();
        let op = Op::Write { page: PageId(u64::from(page)), buffer };
        self.submit(core, Request { tag, priority: Priority::Background, deadline: core.patience, op });
    }

    /// Submits; a full lane is polled until it has room.
    fn submit(&mut self, core: &Core, mut request: Request) {
        let until = Instant::now() + core.patience;
        loop {
            let Some(lane) = &mut self.lane else { unreachable!("the lane was opened first") };
            let tag = request.tag as usize;
            match lane.submit(request) {
                Ok(()) => return,
                Err(back) => request = back,
            }
            if Instant::now() > until {
                let after = core.patience;
                if let Some(writing) = self.writing.get_mut(tag) {
                    writing.result = Err(PoolError::TimedOut { server: 0, after });
                }
                return;
            }
            self.collect(Duration::from_millis(1));
        }
    }

    /// Takes completions.
    fn collect(&mut self, wait: Duration) {
        let Some(lane) = &mut self.lane else { return };
        if lane.poll(&mut self.done) == 0 {
            lane.wait(wait);
            lane.poll(&mut self.done);
        }
        for completion in self.done.drain(..) {
            if let Some(writing) = self.writing.get_mut(completion.tag as usize) {
                writing.result = writing.result.and(completion.result);
            }
            self.buffers.extend(completion.buffer);
        }
    }

    /// Waits until nothing is in flight. The lane sees to it that this ends.
    fn wait_all(&mut self, core: &Core) -> Result<(), PoolError> {
        let until = Instant::now() + core.patience * 2;
        while self.lane.as_ref().is_some_and(|lane| lane.in_flight() > 0) {
            self.collect(core.patience);
            if Instant::now() > until {
                // A lane that forgets is of no use. A new one is opened next time.
                self.lane = None;
                return Err(PoolError::TimedOut { server: 0, after: core.patience * 2 });
            }
        }
        self.buffers.truncate(self.batch);
        Ok(())
    }

    /// Ends all writes; the pages whose copies arrived, and that nobody took back, are Far.
    fn finish(&mut self, core: &Core) -> Result<(), PoolError> {
        let waited = self.wait_all(core);
        let mut trouble = waited;
        for writing in self.writing.drain(..) {
            let Writing { unit, frame, result } = writing;
            let result = waited.and(result);
            let word = &core.words[unit.page];
            loop {
                let seen = FrameWord(word.load(Ordering::Acquire));
                let next = if result.is_ok() { seen.left() } else { seen.refused() };
                // Taken back, or released. Only we make a page Copied, so it is not Copied again.
                let Some(next) = next else { break };
                if core.exchange(word, seen, next) {
                    if result.is_ok() {
                        core.frames.put(frame, unit.pages);
                        core.evictor.written.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
                    }
                    break;
                }
            }
            trouble = trouble.and(result);
        }
        trouble
    }

    /// Gives back far memory of pages that are Empty.
    fn discard(&mut self, core: &Core) -> Result<(), PoolError> {
        loop {
            let mut pages = core.take_discards(self.batch * 4);
            if pages.is_empty() {
                return Ok(());
            }
            pages.sort_unstable();
            let mut ours: Vec<u32> = Vec::with_capacity(pages.len());
            for page in pages {
                let word = &core.words[page];
                let seen = FrameWord(word.load(Ordering::Acquire));
                // Otherwise it is in use again, and will be written over.
                if seen.discard().is_some_and(|next| core.exchange(word, seen, next)) {
                    ours.push(page);
                }
            }
            let result = self.discard_pages(core, &ours);
            for page in &ours {
                self.settle(&core.words[*page], |word| match result {
                    Ok(()) => word.discarded(),
                    Err(_) => word.gave_up(State::Empty),
                });
                if result.is_err() {
                    core.discard_later(*page, true);
                }
            }
            result?;
            core.evictor.discarded.fetch_add(ours.len() as u64, Ordering::Relaxed);
        }
    }

    fn discard_pages(&mut self, core: &Core, pages: &[u32]) -> Result<(), PoolError> {
        self.open(core)?;
        for run in pages.chunk_by(|a, b| a + 1 == *b) {
            let unit = Unit { page: run[0], pages: run.len() as u32 };
            let tag = self.writing.len() as u64;
            self.writing.push(Writing { unit, frame: FrameId(0), result: Ok(()) });
            let op = Op::Discard { page: PageId(u64::from(run[0])), count: run.len() as u64 };
            self.submit(core, Request { tag, priority: Priority::Background, deadline: core.patience, op });
        }
        let waited = self.wait_all(core);
        self.writing.drain(..).fold(waited, |result, writing| result.and(writing.result))
    }
}

/// For how many tasks that wait for room there is something: frames, or the error.
fn tasks_for(core: &Core, outcome: &Result<Outcome, PoolError>) -> u32 {
    if outcome.is_ok() { core.frames.open_room() } else { u32::MAX }
}

/// Checksum of the page in the `index`-th frame from `first` on, which belongs to a unit that we have sealed.
fn sum(core: &Core, first: FrameId, index: u32) -> u64 {
    let address = core.frames.address(FrameId(first.0 + index));
    launder(address);
    // SAFETY: a frame of the arena, which is initialised memory of the kernel (see `launder`); the unit is in Copying and
    // ours, so nobody writes it meanwhile.
    checksum(unsafe { core::slice::from_raw_parts(address, PAGE_BYTES) })
}

/// Values have bytes that no type gives a meaning (padding). In memory that the kernel gave us they are bytes like any others;
/// the compiler must not conclude otherwise from the types that were written there. It has to assume that the empty assembly
/// block wrote all of them.
pub(crate) fn launder(address: *mut u8) {
    #[cfg(not(miri))]
    // SAFETY: no instruction; memory is clobbered by default.
    unsafe {
        core::arch::asm!("/* {0} */", in(reg) address, options(nostack, preserves_flags));
    }
    #[cfg(miri)]
    let _ = address;
}
