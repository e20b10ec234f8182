//! What the evictor does for the object plane: it hands sealed log pages to the evacuator, and takes sparse ones that are in use.
//!
//! Some log pages are *urgent*: they are taken as soon as the scopes of the moment are over, and do not wait for their turn
//! among those that are cold.

use super::take::settle;
use super::{Core, EvictorState, Unit};
use farfield_core::heap::{FrameId, FrameWord, Verdict};
use farfield_pool::PoolError;

impl Core {
    /// Are objects on their way to this page? Then it must not leave.
    pub(super) fn expects_objects(&self, page: u32) -> bool {
        self.objects.as_ref().is_some_and(|objects| objects.log.expects(page))
    }
}

impl EvictorState {
    /// Takes the oldest urgent batch, if it is over.
    pub(super) fn evict_urgent(&mut self, core: &Core) -> Result<bool, PoolError> {
        let batch = core.evictor.cooler().next_urgent(core);
        let Some(batch) = batch else { return Ok(false) };
        self.evict(core, batch, u32::MAX)?;
        self.cool_cold(core);
        Ok(true)
    }

    /// What the evacuator has put into cold pages leaves next.
    pub(super) fn cool_cold(&mut self, core: &Core) {
        let pages = self.evacuator.take_cold();
        if !pages.is_empty() {
            core.evictor.cooler().cool_urgent(core, &pages);
        }
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
