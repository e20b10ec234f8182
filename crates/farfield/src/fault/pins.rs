//! Pins: units that stay near without a scope.
//!
//! The frame of a pinned unit counts its pins. A thread that pins is in a scope in which the unit
//! is near, so no batch that could take the unit is over before the pin can be seen. So it is
//! enough that the evictor looks at the count after the scopes of a batch are over. It looks when
//! it makes pages Cooling too, so as not to do that in vain.

use super::AccessFault;
use super::task::{FaultFuture, FaultState};
use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope};
use core::future::Future;
use core::task::{Context, Poll};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use std::time::Instant;

/// Guard that keeps a unit in its frame.
pub(crate) struct Pin<'a> {
    pub(crate) core: &'a HeapInner,
    pub(crate) frame: FrameId,
    pages: u32,
}

impl HeapInner {
    /// Pins the unit in this frame. The caller is in a scope in which it is near. Fails with
    /// [`FarError::PinsFull`] if half of the frames are pinned.
    fn pin(&self, mut frame: FrameId) -> Result<Pin<'_>, FarError> {
        // Only the first frame of a unit knows its page.
        let page = loop {
            match self.frames.infos[frame.0].page() {
                Some(page) => break page,
                None => frame.0 -= 1,
            }
        };
        let Some(unit) = self.segments.unit_of(page) else { unreachable!("a near page outside of all units") };
        if !self.frames.pin(frame, unit.pages) {
            return Err(FarError::PinsFull);
        }
        Ok(Pin { core: self, frame, pages: unit.pages })
    }

    /// Returns the bytes of near memory that are pinned.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        u64::from(self.frames.pinned()) * PAGE_BYTES as u64
    }
}

impl<'heap> Scope<'heap> {
    /// Pins the unit at this address, which this scope has brought near.
    pub(crate) fn pin_at(&self, address: *const u8) -> Result<Pin<'heap>, FarError> {
        self.core.pin(self.core.frames.at(address))
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.core.frames.unpin(self.frame, self.pages);
    }
}

/// Future that ends when a page, or a small object's, is near and pinned. It holds no scope while
/// it waits, so its task may go to other threads.
pub(crate) struct PinFault<'a> {
    core: &'a HeapInner,
    fault: AccessFault,
    wait: FaultState,
    /// Time when the wait began. Nothing holds what has landed until the task looks, so it may
    /// leave again.
    since: Instant,
}

impl<'a> PinFault<'a> {
    pub(crate) fn new(core: &'a HeapInner, number: u32, mode: AccessMode) -> PinFault<'a> {
        PinFault { core, fault: AccessFault::of_task(number, mode), wait: FaultState::default(), since: Instant::now() }
    }
}

impl<'a> Future for PinFault<'a> {
    type Output = Result<Pin<'a>, FarError>;

    fn poll(self: core::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let scope = Scope::new(this.core);
        let mut fault = FaultFuture::resume(&scope, this.fault, core::mem::take(&mut this.wait));
        match core::pin::Pin::new(&mut fault).poll(context) {
            Poll::Ready(place) => Poll::Ready(place.and_then(|place| this.core.pin(place.frame()))),
            Poll::Pending => {
                (this.fault, this.wait) = fault.suspend();
                let after = this.since.elapsed();
                // A flight has a deadline of its own.
                if after > this.core.patience * 2 {
                    return Poll::Ready(Err(this.core.stalled(after)));
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for PinFault<'_> {
    fn drop(&mut self) {
        self.wait.stop(self.core);
    }
}
