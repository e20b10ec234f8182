//! Pages that leave first: those that a walk brought and has passed, and those that a caller marked
//! as cold.
//!
//! They wait in a list, and leave before the hand looks at anything else. A page of the list that
//! is used again meanwhile is an ordinary one: the rescue makes it so.

use super::cooling::NextBatch;
use super::{EvictionUrgency, EvictorState, HeapInner};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::heap::FrameWord;
use farfield_pool::PoolError;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// List of pages within the heap that leave first.
#[derive(Default)]
pub(super) struct EvictFirstList(Mutex<VecDeque<u32>>);

/// Result of evicting pages from the list.
pub(super) enum EvictFirstOutcome {
    /// Pages of the list may have left.
    Evicted,
    /// The oldest batch of the list, of this epoch, waits for a scope to end.
    Blocked(u64),
    /// The list is empty.
    Empty,
}

/// Maximum wait for a walk's scope: a walk leaves its scope more often, if it runs at all.
const WAIT_MAX: Duration = Duration::from_millis(10);

/// A batch of the list that waits for a scope.
#[derive(Clone, Copy)]
pub(super) struct BatchWait {
    epoch: u64,
    /// Time when the wait began, and the number of frames that were free then.
    since: Instant,
    room: u32,
    /// Number of times that a thread in need has found the batch not over.
    looks: u32,
}

impl EvictFirstList {
    /// Appends pages. The list has many callers: beyond `most` pages, half of the frames, it
    /// forgets those that were there longest.
    fn add(&self, pages: impl Iterator<Item = u32>, most: usize) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for page in pages {
            // Small values that lie together are marked as cold one by one.
            if list.back() != Some(&page) {
                list.push_back(page);
            }
        }
        let excess = list.len().saturating_sub(most);
        list.drain(..excess);
    }

    pub(super) fn take(&self, count: usize) -> Vec<u32> {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = count.min(list.len());
        list.drain(..count).collect()
    }
}

impl HeapInner {
    /// Marks these units to be evicted before others. Units that are far or in use are no error.
    pub(crate) fn mark_evict_first(&self, pages: impl Iterator<Item = u32>) {
        let pages = pages.inspect(|page| self.forget_use(*page));
        self.evictor.first.add(pages, self.frames.limit() as usize / 2);
    }

    /// Clears the page's reference bit, so that earlier uses do not keep it.
    fn forget_use(&self, page: u32) {
        let word = &self.words[page];
        let seen = FrameWord(word.load(Ordering::Acquire));
        if let Some(next) = seen.cool().filter(|_| seen.is_referenced()) {
            self.exchange(word, seen, next);
        }
    }
}

impl EvictorState {
    /// Makes room with pages that leave first.
    pub(super) fn evict_first(&mut self, core: &HeapInner, wanted: u32) -> Result<EvictFirstOutcome, PoolError> {
        let next = core.evictor.cooling_stage().next_first(core, wanted);
        match next {
            NextBatch::Empty => Ok(EvictFirstOutcome::Empty),
            NextBatch::Blocked(epoch) => Ok(EvictFirstOutcome::Blocked(epoch)),
            NextBatch::Batch(batch) => {
                self.evict(core, batch, u32::MAX)?;
                Ok(EvictFirstOutcome::Evicted)
            }
        }
    }

    /// Checks whether it is better to wait for this batch of the list than to let the hand choose.
    ///
    /// A wait must not be long. Threads in need wait only until they have renewed their scope.
    /// Ahead of need, the wait lasts as long as half of what was free at its start still is: the
    /// thread that holds the scope may wait for a processor.
    pub(super) fn waits_for(&mut self, core: &HeapInner, epoch: u64, urgency: EvictionUrgency) -> bool {
        let room = core.frames.room();
        let waited_for = match self.waited_for {
            Some(known) if known.epoch == epoch => known,
            _ => BatchWait { epoch, since: Instant::now(), room, looks: 0 },
        };
        let (waited, is_ahead) = (waited_for.since.elapsed(), urgency == EvictionUrgency::Background);
        self.waited_for = Some(BatchWait { looks: waited_for.looks + u32::from(!is_ahead), ..waited_for });
        match urgency {
            // A thread that has waited for a processor has not renewed its scope yet.
            EvictionUrgency::Demand | EvictionUrgency::Full | EvictionUrgency::Last => {
                waited < WAIT_MAX / 64 || waited_for.looks < 2
            }
            EvictionUrgency::Background => waited < WAIT_MAX || room >= waited_for.room / 2,
        }
    }
}
