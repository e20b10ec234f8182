//! Log pages of the object plane in the evictor: it hands Claimed ones to the evacuator, and takes
//! sparse ones that are in use.
//!
//! Some log pages are *urgent*: they are taken as soon as the scopes of the moment are over, and do
//! not wait for their turn among those that are cold.

use super::victims::apply_transition;
use super::{EvictorState, HeapInner, TransferUnit};
use farfield_core::heap::{EvacuationDecision, FrameId, FrameWord};
use farfield_pool::PoolError;

impl HeapInner {
    /// Checks whether objects are on their way to this page, which must not leave then.
    pub(super) fn expects_objects(&self, page: u32) -> bool {
        self.objects.as_ref().is_some_and(|objects| objects.log.has_arriving(page))
    }
}

impl EvictorState {
    /// Evicts the oldest urgent batch, if its scopes are over; false if there is none.
    pub(super) fn evict_urgent(&mut self, core: &HeapInner) -> Result<bool, PoolError> {
        let batch = core.evictor.cooling_stage().next_urgent(core);
        let Some(batch) = batch else { return Ok(false) };
        self.evict(core, batch, u32::MAX)?;
        self.cool_cold(core);
        Ok(true)
    }

    /// Cools pages that the evacuator has filled with cold objects, as an urgent batch.
    pub(super) fn cool_cold(&mut self, core: &HeapInner) {
        let pages = self.evacuator.take_cold();
        if !pages.is_empty() {
            core.evictor.cooling_stage().cool_urgent(core, &pages);
        }
    }

    /// Asks the evacuator about a Claimed unit; false if the unit is to leave as it is.
    ///
    /// While a thread or task waits for a frame, objects are not moved: moving them frees little at
    /// first.
    pub(super) fn evict_log_page(&mut self, core: &HeapInner, unit: TransferUnit, frame: FrameId) -> bool {
        let Some(objects) = &core.objects else { return false };
        let may_move = core.admission.waiting() == 0 && !core.waiters.has_frame_waiters();
        if !core.segments.is_log(unit.page) || !may_move && objects.paths.is_none() {
            return false;
        }
        let (decision, died) = self.evacuator.take(core, objects, unit.page, frame, may_move);
        match decision {
            EvacuationDecision::Write => return false,
            EvacuationDecision::Stay => {
                apply_transition(&core.words[unit.page], FrameWord::keep_near);
            }
            EvacuationDecision::Drop | EvacuationDecision::Evacuate => {
                self.drop_dead(core, unit, frame);
                if died {
                    objects.log.retire(unit.page);
                }
            }
        }
        true
    }
}
