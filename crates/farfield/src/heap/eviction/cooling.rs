//! Cooling stage: which pages are about to leave, in which order, and whether scopes are in their
//! way.
//!
//! The state is behind a lock of its own that is held for moments only, so that a scope that begins
//! can have pages cooled while the evictor waits for the pool. A thread that makes pages Cooling
//! holds the lock, and so does the evictor when it claims one. A page that was rescued and is
//! Cooling again belongs to another batch, and a frame remembers which.

use super::{CoolingBatch, EvictionUrgency, EvictorState, HeapEvictor, HeapInner};
use crate::heap::frames::SCOPE_FRAMES;
use crate::plane::object::Evacuator;
use core::sync::atomic::Ordering;
use farfield_core::heap::{FrameId, FrameWord, State};
use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};

pub(super) struct CoolingStage {
    hand: u32,
    batches: VecDeque<CoolingBatch>,
    /// Log pages to be taken as soon as no scope refers to them: sparse ones that are in use, and
    /// the evacuator's cold ones.
    urgent: VecDeque<CoolingBatch>,
    /// Batches of pages that leave first.
    first: VecDeque<CoolingBatch>,
    /// Number of frames in `batches`.
    cooling: usize,
    /// Maximum number of frames in one.
    batch: usize,
}

/// Next batch to evict.
pub(super) enum NextBatch {
    Batch(CoolingBatch),
    /// The next batch waits for a scope: its pages became Cooling in this epoch.
    Blocked(u64),
    Empty,
}

/// Number of batches that are made Cooling for each that leaves, until there are enough.
const COOL_AHEAD: u32 = 8;

/// Maximum number of pages to make Cooling, and of frames to look at, when a scope begins: it
/// should not be held up for long.
const PREPARE: (u32, u64) = (SCOPE_FRAMES, 1 << 16);

impl HeapEvictor {
    pub(super) fn cooling_stage(&self) -> MutexGuard<'_, CoolingStage> {
        self.cooling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cools pages for a scope that is about to begin. It will hold back what is cooled later, so
    /// there must be enough before.
    pub(crate) fn prepare(&self, core: &HeapInner) {
        let mut stage = self.cooling_stage();
        let enough = cooling_target(core).min(core.frames.cooling() + PREPARE.0);
        let mut looks = (2 * u64::from(core.frames.used().count())).min(PREPARE.1);
        while core.frames.cooling() < enough && stage.cool_first(core) {}
        while looks > 0 && core.frames.cooling() < enough {
            looks = looks.saturating_sub(stage.cool(core));
        }
    }
}

/// Returns how many units should be Cooling: those that may leave while a scope lasts, and those
/// that are kept for the scope.
pub(super) fn cooling_target(core: &HeapInner) -> u32 {
    let limit = core.frames.limit();
    (limit / 4 + cooling_reserve(core)).max(core.evictor.batch())
}

/// Returns how many frames of Cooling pages are kept for threads that hold back the rest with a
/// scope of their own.
fn cooling_reserve(core: &HeapInner) -> u32 {
    core.frames.limit() / 8
}

impl CoolingStage {
    pub(super) fn new(batch: usize) -> CoolingStage {
        let [batches, urgent, first] = Default::default();
        CoolingStage { hand: 0, batches, urgent, first, cooling: 0, batch }
    }

    /// Makes pages Cooling until there are `enough`, but not all at once: a thread may be waiting
    /// for the first frame. False if there are enough now, or no frames left to look at.
    pub(super) fn cool_ahead(&mut self, core: &HeapInner, enough: u32, looks: &mut u64) -> bool {
        let is_short = |looks| core.frames.cooling() < enough && looks > 0;
        for _ in 0..COOL_AHEAD {
            if is_short(*looks) {
                *looks = looks.saturating_sub(self.cool(core));
            }
        }
        is_short(*looks)
    }

    /// Makes a batch of pages Cooling. Returns how many frames the hand passed.
    fn cool(&mut self, core: &HeapInner) -> u64 {
        let epoch = core.epoch.load(Ordering::Relaxed);
        let (mut frames, mut sparse) = (Vec::with_capacity(self.batch), Vec::new());
        let mut passed = 0;
        let used = core.frames.used();
        while frames.len() + sparse.len() < self.batch && passed < u64::from(used.count()) {
            self.hand = used.after(self.hand);
            passed += 1;
            if let Some(page) = core.frames.infos[self.hand].page() {
                match cool_page(core, page, epoch) {
                    Some(frame) => frames.push(frame),
                    None => sparse.extend(cool_sparse(core, page, epoch)),
                }
            }
        }
        if !(frames.is_empty() && sparse.is_empty()) {
            // Scopes of later epochs than this see the batch Cooling. Others move the epoch on too,
            // so it may not be `epoch`.
            let last = core.next_epoch();
            let batch = |frames: Vec<FrameId>| (!frames.is_empty()).then_some(CoolingBatch { epoch, last, frames });
            self.cooling += frames.len();
            self.batches.extend(batch(frames));
            self.urgent.extend(batch(sparse));
            if self.cooling > core.frames.limit() as usize / 2 {
                self.forget(core);
            }
        }
        passed.max(1)
    }

    /// Makes these pages Cooling, as far as they can leave. Those that are Cooling already move to
    /// this batch.
    pub(super) fn cool_pages(&mut self, core: &HeapInner, pages: &[u32]) -> Option<CoolingBatch> {
        let epoch = core.epoch.load(Ordering::Relaxed);
        let frames: Vec<FrameId> = pages.iter().filter_map(|page| recool(core, *page, epoch)).collect();
        (!frames.is_empty()).then(|| CoolingBatch { epoch, last: core.next_epoch(), frames })
    }

    /// Makes these pages Cooling, as an urgent batch that leaves before others.
    pub(super) fn cool_urgent(&mut self, core: &HeapInner, pages: &[u32]) {
        let batch = self.cool_pages(core, pages);
        self.urgent.extend(batch);
    }

    /// Makes a batch Cooling of pages that leave first; false if there are none.
    fn cool_first(&mut self, core: &HeapInner) -> bool {
        let pages = core.evictor.first.take(self.batch);
        let batch = self.cool_pages(core, &pages);
        self.first.extend(batch);
        !pages.is_empty()
    }

    /// Takes the oldest batch of pages that leave first. One more batch than is wanted is Cooling
    /// then: the thread that wants it is not in its way.
    pub(super) fn next_first(&mut self, core: &HeapInner, wanted: u32) -> NextBatch {
        let waiting = |first: &VecDeque<CoolingBatch>| first.iter().map(|batch| batch.frames.len()).sum::<usize>();
        while waiting(&self.first) < wanted as usize + self.batch && self.cool_first(core) {}
        match self.first.front() {
            None => NextBatch::Empty,
            Some(batch) if !core.threads.is_over(batch.last) => NextBatch::Blocked(batch.last),
            Some(_) => self.first.pop_front().map_or(NextBatch::Empty, NextBatch::Batch),
        }
    }

    /// Removes pages that were rescued from their batches.
    fn forget(&mut self, core: &HeapInner) {
        self.batches.retain_mut(|batch| {
            batch.frames.retain(|frame| leaves_with(core, *frame, batch.epoch).is_some());
            !batch.frames.is_empty()
        });
        self.cooling = self.batches.iter().map(|batch| batch.frames.len()).sum();
    }

    /// Takes the oldest urgent batch, if its scopes are over.
    pub(super) fn next_urgent(&mut self, core: &HeapInner) -> Option<CoolingBatch> {
        let is_over = self.urgent.front().is_some_and(|batch| core.threads.is_over(batch.last));
        if is_over { self.urgent.pop_front() } else { None }
    }

    /// Returns the epoch of the oldest urgent batch.
    pub(super) fn urgent_since(&self) -> Option<u64> {
        self.urgent.front().map(|batch| batch.last)
    }

    /// Takes the next batch to evict. While an old scope holds back batches, the last ones before
    /// those are kept for its thread: others make no use of them.
    pub(super) fn next(&mut self, core: &HeapInner, urgency: EvictionUrgency) -> NextBatch {
        let oldest = core.threads.oldest().unwrap_or(u64::MAX);
        let Some(front) = self.batches.front() else { return NextBatch::Empty };
        if front.last >= oldest {
            return NextBatch::Blocked(front.last);
        }
        if matches!(urgency, EvictionUrgency::Background | EvictionUrgency::Demand) {
            let (kept, mut left) = (cooling_reserve(core) as usize, 0);
            for batch in self.batches.iter().skip(1) {
                if left >= kept {
                    break;
                }
                if batch.last >= oldest {
                    return NextBatch::Blocked(batch.last);
                }
                left += batch.frames.len();
            }
        }
        let batch = self.batches.pop_front();
        batch.map_or(NextBatch::Empty, |batch| {
            self.cooling -= batch.frames.len();
            NextBatch::Batch(batch)
        })
    }

    /// Appends a batch that was made for a caller that waits for it no more.
    pub(super) fn requeue(&mut self, batch: CoolingBatch) {
        self.cooling += batch.frames.len();
        self.batches.push_back(batch);
    }

    /// Puts a batch back of which not all pages could leave now.
    pub(super) fn put_back(&mut self, batch: CoolingBatch) {
        self.cooling += batch.frames.len();
        self.batches.push_front(batch);
    }
}

impl EvictorState {
    /// Claims a page of a batch for eviction. Returns the page and its word, or `None` if it must
    /// stay. The batch's scopes are over.
    pub(super) fn claim_for_eviction(&self, core: &HeapInner, frame: FrameId, epoch: u64) -> Option<(u32, FrameWord)> {
        // Nobody makes it Cooling again meanwhile, so it is not rescued and in a later batch
        // when the exchange succeeds.
        let _stage = core.evictor.cooling_stage();
        let (page, seen) = leaves_with(core, frame, epoch)?;
        let claimed = seen.claim_for_eviction()?;
        let word = &core.words[page];
        if core.frames.infos[frame.0].is_pinned() || core.expects_objects(page) || self.evacuator.fills(core, page) {
            // The page is in use, as any page that is rescued.
            core.exchange(word, seen, seen.deref(false).0);
            return None;
        }
        core.exchange(word, seen, claimed).then_some((page, claimed))
    }
}

/// Returns the page in this frame and its word, if it has been Cooling since this batch was made.
fn leaves_with(core: &HeapInner, frame: FrameId, epoch: u64) -> Option<(u32, FrameWord)> {
    let info = &core.frames.infos[frame.0];
    // If the page was rescued and made Cooling again since, it is in a later batch; if it is
    // gone, in none.
    let page = info.page().filter(|_| info.cooled() == epoch)?;
    let seen = FrameWord(core.words[page].load(Ordering::Acquire));
    (seen.state() == State::Cooling && seen.frame() == Some(frame)).then_some((page, seen))
}

/// Makes a page Cooling, or clears its reference bit. Returns its frame if it is Cooling now.
fn cool_page(core: &HeapInner, page: u32, epoch: u64) -> Option<FrameId> {
    if core.expects_objects(page) {
        return None;
    }
    let word = &core.words[page];
    let seen = FrameWord(word.load(Ordering::Acquire));
    let (next, frame) = (seen.cool()?, seen.frame()?);
    if core.frames.infos[frame.0].is_pinned() {
        return None;
    }
    let left = core.exchange(word, seen, next) && next.state() == State::Cooling;
    left.then(|| {
        core.frames.infos[frame.0].set_cooled(epoch);
        frame
    })
}

/// Makes a page Cooling as [`cool_page`] does; a page that is Cooling already moves to this batch.
fn recool(core: &HeapInner, page: u32, epoch: u64) -> Option<FrameId> {
    let seen = FrameWord(core.words[page].load(Ordering::Acquire));
    let frame = seen.frame().filter(|_| seen.state() == State::Cooling);
    if let Some(frame) = frame {
        core.frames.infos[frame.0].set_cooled(epoch);
    }
    frame.or_else(|| cool_page(core, page, epoch))
}

/// Makes a log page Cooling that is in use, but sparse: its hot objects should lie elsewhere.
fn cool_sparse(core: &HeapInner, page: u32, epoch: u64) -> Option<FrameId> {
    let objects = core.objects.as_ref().filter(|_| core.segments.is_log(page))?;
    let is_near = FrameWord(core.words[page].load(Ordering::Relaxed)).state() == State::Near;
    if is_near && Evacuator::is_sparse(objects, page) { cool_page(core, page, epoch) } else { None }
}
