//! Who leaves first: pages that a walk brought and has passed, and those that somebody called cold.
//!
//! They wait in a list, and leave before the hand looks at anything else. A page of the list that is used again meanwhile is an ordinary
//! one: taking it back says so.

use super::{Batch, Core, EvictorState, Urgency};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::heap::FrameId;
use farfield_pool::PoolError;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Pages within the heap.
#[derive(Default)]
pub(super) struct First(Mutex<VecDeque<u32>>);

/// What the list was good for.
pub(super) enum Progress {
    /// Pages of it may have left.
    Some,
    /// Its oldest batch, of this epoch, waits for a scope to end.
    Blocked(u64),
    /// There are none.
    Nothing,
}

/// A walk leaves its scope more often than this, if it runs at all.
const WAIT_MAX: Duration = Duration::from_millis(10);

/// A batch that waits for a scope.
#[derive(Clone, Copy)]
pub(super) struct WaitedFor {
    epoch: u64,
    /// It is waited for since then, and so many frames were free.
    since: Instant,
    room: u32,
}

impl First {
    /// One list for many callers: those that were there longest are forgotten when there are more than half of the frames.
    fn add(&self, pages: impl Iterator<Item = u32>, most: usize) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.extend(pages);
        let excess = list.len().saturating_sub(most);
        list.drain(..excess);
    }

    fn take(&self, count: usize) -> Vec<u32> {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = count.min(list.len());
        list.drain(..count).collect()
    }
}

impl Core {
    /// These units leave first. No error if they are far or in use.
    pub(crate) fn leave_first(&self, pages: impl Iterator<Item = u32>) {
        self.evictor.first.add(pages, self.frames.limit() as usize / 2);
    }
}

impl EvictorState {
    /// Makes room with those that leave first.
    pub(super) fn evict_first(&mut self, core: &Core, wanted: u32) -> Result<Progress, PoolError> {
        let waiting: usize = self.first.iter().map(|batch| batch.frames.len()).sum();
        if waiting < wanted as usize {
            self.cool_first(core);
        }
        match self.first.front() {
            None => Ok(Progress::Nothing),
            Some(batch) if !core.threads.is_over(batch.last) => Ok(Progress::Blocked(batch.last)),
            Some(_) => {
                if let Some(batch) = self.first.pop_front() {
                    self.evict(core, batch)?;
                }
                Ok(Progress::Some)
            }
        }
    }

    /// Is it better to wait for this batch of the list than to let the hand choose? Not for long; for those in need, only until
    /// they have renewed their scope. Ahead of need as long as half of what was free then still is: who holds the scope may wait for a
    /// processor.
    pub(super) fn waits_for(&mut self, core: &Core, epoch: u64, urgency: Urgency) -> bool {
        let room = core.frames.room();
        let waited_for = match self.waited_for {
            Some(known) if known.epoch == epoch => known,
            _ => *self.waited_for.insert(WaitedFor { epoch, since: Instant::now(), room }),
        };
        let waited = waited_for.since.elapsed();
        match urgency {
            Urgency::Demand | Urgency::Full => waited < WAIT_MAX / 64,
            Urgency::Background => waited < WAIT_MAX || room > waited_for.room / 2,
        }
    }

    fn cool_first(&mut self, core: &Core) {
        let epoch = core.epoch.load(Ordering::Relaxed);
        let pages = core.evictor.first.take(self.batch);
        let frames: Vec<FrameId> = pages.iter().filter_map(|page| self.cool_page(core, *page, epoch)).collect();
        if !frames.is_empty() {
            let last = core.next_epoch();
            self.first.push_back(Batch { epoch, last, frames });
        }
    }
}
