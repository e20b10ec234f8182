//! Pages that leave first: those that a walk brought and has passed, and those that a caller marked
//! as cold.
//!
//! They wait in a list, and leave before the hand looks at anything else. A page of the list that
//! is used again meanwhile is an ordinary one: taking it back makes it so.

use super::cooler::Next;
use super::{Core, EvictorState, Urgency};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::heap::FrameWord;
use farfield_pool::PoolError;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// List of pages within the heap that leave first.
#[derive(Default)]
pub(super) struct First(Mutex<VecDeque<u32>>);

/// Result of evicting pages from the list.
pub(super) enum Progress {
    /// Pages of the list may have left.
    Some,
    /// The oldest batch of the list, of this epoch, waits for a scope to end.
    Blocked(u64),
    /// The list is empty.
    Nothing,
}

/// Maximum wait for a walk's scope: a walk leaves its scope more often, if it runs at all.
const WAIT_MAX: Duration = Duration::from_millis(10);

/// A batch of the list that waits for a scope.
#[derive(Clone, Copy)]
pub(super) struct WaitedFor {
    epoch: u64,
    /// Time when the wait began, and the number of frames that were free then.
    since: Instant,
    room: u32,
    /// Number of times that a thread in need has found the batch not over.
    looks: u32,
}

impl First {
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

impl Core {
    /// Marks these units to be evicted before others. Units that are far or in use are no error.
    pub(crate) fn leave_first(&self, pages: impl Iterator<Item = u32>) {
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
    pub(super) fn evict_first(&mut self, core: &Core, wanted: u32) -> Result<Progress, PoolError> {
        let next = core.evictor.cooler().next_first(core, wanted);
        match next {
            Next::Nothing => Ok(Progress::Nothing),
            Next::Blocked(epoch) => Ok(Progress::Blocked(epoch)),
            Next::Batch(batch) => {
                self.evict(core, batch, u32::MAX)?;
                Ok(Progress::Some)
            }
        }
    }

    /// Checks whether it is better to wait for this batch of the list than to let the hand choose.
    ///
    /// A wait must not be long. Threads in need wait only until they have renewed their scope.
    /// Ahead of need, the wait lasts as long as half of what was free at its start still is: the
    /// thread that holds the scope may wait for a processor.
    pub(super) fn waits_for(&mut self, core: &Core, epoch: u64, urgency: Urgency) -> bool {
        let room = core.frames.room();
        let waited_for = match self.waited_for {
            Some(known) if known.epoch == epoch => known,
            _ => WaitedFor { epoch, since: Instant::now(), room, looks: 0 },
        };
        let (waited, is_ahead) = (waited_for.since.elapsed(), urgency == Urgency::Background);
        self.waited_for = Some(WaitedFor { looks: waited_for.looks + u32::from(!is_ahead), ..waited_for });
        match urgency {
            // A thread that has waited for a processor has not renewed its scope yet.
            Urgency::Demand | Urgency::Full | Urgency::Last => waited < WAIT_MAX / 64 || waited_for.looks < 2,
            Urgency::Background => waited < WAIT_MAX || room >= waited_for.room / 2,
        }
    }
}
