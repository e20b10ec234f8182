//! The driver of a thread: it waits for other threads and for the pool.

use super::{AccessFault, FaultStep, WOULD_BLOCK};
use crate::error::FarError;
use crate::heap::{Backoff, HeapInner, ThreadState};
use crate::plane::object::{ObjectId, Objects};
use farfield_core::heap::fault::AccessMode;
use farfield_core::heap::{FrameId, SlotHint};

impl HeapInner {
    /// Makes the page near and returns its frame; waits for other threads and for the pool. The
    /// caller is inside a scope. If it holds no reference from it (`renewable`), the scope may be
    /// renewed while it waits.
    pub(crate) fn fault_in(
        &self,
        record: &ThreadState,
        page: u32,
        mode: AccessMode,
        renewable: bool,
    ) -> Result<FrameId, FarError> {
        let fault = AccessFault::of_thread(record, page, mode);
        match fault.look_for_page(self, record) {
            FaultStep::Done(place) => Ok(place.frame()),
            step => self.serve(record, fault, step, renewable).map(SlotHint::frame),
        }
    }

    /// Makes an object near and returns its place, as [`HeapInner::fault_in`] does for a page.
    pub(crate) fn fault_in_object(
        &self,
        record: &ThreadState,
        objects: &Objects,
        object: ObjectId,
        mode: AccessMode,
        renewable: bool,
    ) -> Result<SlotHint, FarError> {
        let mut fault = AccessFault::of_thread(record, self.pages + object, mode);
        match fault.look_for_object(self, record, objects) {
            FaultStep::Done(place) => Ok(place),
            step => self.serve(record, fault, step, renewable),
        }
    }

    /// Serves a fault until its value is near: does what each step asks for.
    #[cold]
    fn serve(
        &self,
        record: &ThreadState,
        mut fault: AccessFault,
        mut step: FaultStep,
        renewable: bool,
    ) -> Result<SlotHint, FarError> {
        let mut backoff = Backoff::new(self.patience);
        loop {
            step = match step {
                FaultStep::Done(place) => return Ok(place),
                FaultStep::WaitFor(_) if record.is_nonblocking.get() => return fault.would_block(record),
                FaultStep::Far(target) if record.is_nonblocking.get() && !target.is_empty() => {
                    return fault.would_block(record);
                }
                _ if cfg!(debug_assertions) && record.locks.get() > 0 => unreachable!("waits with a lock"),
                FaultStep::WaitFor(number) => {
                    self.help(record, Some(number));
                    backoff.wait()?;
                    fault.look(self, record)
                }
                FaultStep::Retry => {
                    backoff.wait()?;
                    fault.look(self, record)
                }
                FaultStep::Far(target) => fault.begin(self, record, target, None)?,
                FaultStep::NeedFrames(target) => {
                    let is_clean = target.stays_clean(fault.mode);
                    let frame = self.take_wanted_frames(record, target.frames(), renewable, is_clean)?;
                    fault.begin(self, record, target, Some(frame))?
                }
                FaultStep::Submit(flight) => {
                    self.fetch(record, flight)?;
                    fault.after(self, record, &flight)
                }
                FaultStep::Make(unit) => return self.make_unit(unit),
            };
        }
    }
}

impl AccessFault {
    /// Ends an attempt that may not wait: the record says what for.
    fn would_block<T>(&self, record: &ThreadState) -> Result<T, FarError> {
        record.missed.set(Some((self.number, self.mode)));
        Err(WOULD_BLOCK)
    }
}
