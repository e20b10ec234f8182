//! What the evictor does for the object plane: it hands sealed log pages to the evacuator, takes sparse ones that are in use, and frees
//! retired ones.
//!
//! Some log pages are *urgent*: they are taken as soon as the scopes of the moment are over, and do not wait for their turn
//! among those that are cold.

use super::take::settle;
use super::{Batch, Core, EvictorState, Unit};
use crate::plane::object::Evacuator;
use core::sync::atomic::Ordering;
use farfield_core::heap::{FrameId, FrameWord, State, Verdict};
use farfield_pool::PoolError;

impl Core {
    /// Are objects on their way to this page? Then it must not leave.
    pub(super) fn expects_objects(&self, page: u32) -> bool {
        self.objects.as_ref().is_some_and(|objects| objects.log.expects(page))
    }
}

impl EvictorState {
    /// Log pages that were retired can be used again when every scope that was open then is over: it may have looked at a handle
    /// that named them.
    pub(super) fn recycle(&mut self, core: &Core) {
        let Some(objects) = &core.objects else { return };
        let retired = objects.log.take_retired();
        if !retired.is_empty() {
            self.retired.push_back((core.next_epoch(), retired));
        }
        while self.retired.front().is_some_and(|(epoch, _)| core.threads.is_over(*epoch)) {
            objects.log.recycle(self.retired.pop_front().map_or_else(Vec::new, |(_, pages)| pages));
        }
    }

    /// Takes the oldest urgent batch, if it is over.
    pub(super) fn evict_urgent(&mut self, core: &Core) -> Result<bool, PoolError> {
        if !self.urgent.front().is_some_and(|batch| core.threads.is_over(batch.last)) {
            return Ok(false);
        }
        if let Some(batch) = self.urgent.pop_front() {
            self.evict(core, batch)?;
            self.cool_cold(core);
        }
        Ok(true)
    }

    /// What the evacuator has put into cold pages leaves next.
    pub(super) fn cool_cold(&mut self, core: &Core) {
        let epoch = core.epoch.load(Ordering::Relaxed);
        let pages = self.evacuator.take_cold();
        let frames: Vec<FrameId> = pages.iter().filter_map(|page| self.cool_page(core, *page, epoch)).collect();
        if !frames.is_empty() {
            let last = core.next_epoch();
            self.urgent.push_back(Batch { epoch, last, frames });
        }
    }

    /// Makes a log page Leaving that is in use, but not by much: what is hot in it shall lie elsewhere.
    pub(super) fn cool_sparse(&self, core: &Core, page: u32, epoch: u64) -> Option<FrameId> {
        let objects = core.objects.as_ref().filter(|_| core.segments.is_log(page))?;
        let is_near = FrameWord(core.words[page].load(Ordering::Relaxed)).state() == State::Near;
        if is_near && Evacuator::is_sparse(objects, page) { self.cool_page(core, page, epoch) } else { None }
    }

    /// Asks the evacuator about a sealed unit; false if the unit is to leave as it is. While somebody waits for a frame, it is: moving
    /// objects frees little at first.
    pub(super) fn take_log_page(&mut self, core: &Core, unit: Unit, frame: FrameId) -> bool {
        let Some(objects) = &core.objects else { return false };
        let may_move = core.throttle.waiting() == 0 && !core.waiters.want_room();
        if !core.segments.is_log(unit.page) || !may_move && objects.paths.is_none() {
            return false;
        }
        let (verdict, died) = self.evacuator.take(core, objects, unit.page, frame, may_move);
        match verdict {
            Verdict::Write => return false,
            Verdict::Stay => {
                settle(&core.words[unit.page], FrameWord::stays);
            }
            Verdict::Drop | Verdict::Evacuate => {
                self.drop_dead(core, unit, frame);
                if died {
                    objects.log.retire(unit.page);
                }
            }
        }
        true
    }
}
