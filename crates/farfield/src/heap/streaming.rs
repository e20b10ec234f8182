//! Streaming look-ups: data that is used once is evicted first if a look-up had to fetch it, so it
//! displaces nothing.

use super::{HeapInner, Scope};
use crate::error::FarError;
use core::cell::Cell;
use core::future::{Future, poll_fn};
use core::pin::pin;

/// Page that a look-up had to bring near, or kept from leaving. For [`Scope::run_streaming`].
#[derive(Default)]
pub(crate) struct StreamingHint {
    /// Page number among those of all heaps.
    new: Cell<Option<u32>>,
}

impl StreamingHint {
    /// Notes that the page or object with this number (among those of all heaps) is used next.
    ///
    /// Small values of the object plane have pages of their own when they are used once, so they
    /// are not noted.
    pub(crate) fn note_use(&self, scope: &Scope<'_>, number: u32) {
        if scope.is_new(number) {
            self.new.set(Some(number));
        }
    }

    fn mark_evict_first(self, scope: &Scope<'_>) {
        if let Some(number) = self.new.into_inner() {
            scope.mark_evict_first(core::iter::once(number));
        }
    }
}

impl HeapInner {
    /// Marks a value that lives as cold, by its number among those of all heaps: it is evicted
    /// before others.
    pub(crate) fn mark_cold(&self, number: u32) {
        let page = number.wrapping_sub(self.first_page);
        if page < self.pages { self.mark_evict_first(core::iter::once(page)) } else { self.cool_object(number) }
    }
}

impl Scope<'_> {
    /// Runs a look-up of data that will not be used again soon; `look` notes it in the
    /// [`StreamingHint`] before use.
    pub(crate) fn run_streaming<R>(
        &self,
        look: impl FnOnce(&StreamingHint) -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        let hint = StreamingHint::default();
        let found = self.record.objects.run_streaming(|| look(&hint))?;
        hint.mark_evict_first(self);
        Ok(found)
    }

    /// Runs a look-up as [`Scope::run_streaming`] does, for a task.
    pub(crate) async fn fetch_streaming<R>(
        &self,
        look: impl AsyncFnOnce(&StreamingHint) -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        let hint = StreamingHint::default();
        let found = {
            let mut look = pin!(look(&hint));
            // Other tasks run between two polls; this does not hold for them.
            poll_fn(|context| self.record.objects.run_streaming(|| look.as_mut().poll(context))).await?
        };
        hint.mark_evict_first(self);
        Ok(found)
    }
}
