//! Streaming look-ups: data that is used once is evicted first if a look-up had to fetch it, so it
//! displaces nothing.

use super::{Core, Scope};
use crate::error::FarError;
use core::cell::Cell;
use core::future::{Future, poll_fn};
use core::pin::pin;

/// Page that a look-up had to bring near, or kept from leaving. For [`Scope::once`].
#[derive(Default)]
pub(crate) struct Once {
    /// Page number among those of all heaps.
    new: Cell<Option<u32>>,
}

impl Once {
    /// Notes that the page or object with this number (among those of all heaps) is used next.
    ///
    /// Small values of the object plane have pages of their own when they are used once, so they
    /// are not noted.
    pub(crate) fn uses(&self, scope: &Scope<'_>, number: u32) {
        if scope.is_new(number) {
            self.new.set(Some(number));
        }
    }

    fn leave_first(self, scope: &Scope<'_>) {
        if let Some(number) = self.new.into_inner() {
            scope.leave_first(core::iter::once(number));
        }
    }
}

impl Core {
    /// Marks a value that lives as cold, by its number among those of all heaps: it is evicted
    /// before others.
    pub(crate) fn cold(&self, number: u32) {
        let page = number.wrapping_sub(self.first_page);
        if page < self.pages { self.leave_first(core::iter::once(page)) } else { self.cool_object(number) }
    }
}

impl Scope<'_> {
    /// Runs a look-up of data that will not be used again soon; `look` notes it in the [`Once`]
    /// before use.
    pub(crate) fn once<R>(&self, look: impl FnOnce(&Once) -> Result<R, FarError>) -> Result<R, FarError> {
        let once = Once::default();
        let found = self.record.objects.once(|| look(&once))?;
        once.leave_first(self);
        Ok(found)
    }

    /// Runs a look-up as [`Scope::once`] does, for a task.
    pub(crate) async fn fetch_once<R>(
        &self,
        look: impl AsyncFnOnce(&Once) -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        let once = Once::default();
        let found = {
            let mut look = pin!(look(&once));
            // Other tasks run between two polls; this does not hold for them.
            poll_fn(|context| self.record.objects.once(|| look.as_mut().poll(context))).await?
        };
        once.leave_first(self);
        Ok(found)
    }
}
