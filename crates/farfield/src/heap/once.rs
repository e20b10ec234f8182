//! What is used once: if a look-up has to bring it near, it leaves first, and displaces nothing.

use super::{Core, Scope};
use crate::error::FarError;
use core::cell::Cell;
use core::future::{Future, poll_fn};
use core::pin::pin;

/// What a look-up had to bring near, or kept from leaving. See [`Scope::once`].
#[derive(Default)]
pub(crate) struct Once {
    /// A number of all heaps' pages.
    new: Cell<Option<u32>>,
}

impl Once {
    /// What has this number among those of all heaps is used next. Small values of the object plane have pages of their own when they
    /// are used once, so nothing is noted of them.
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
    /// What has this number among those of all heaps will not be needed soon: it leaves before others. For far values that live.
    pub(crate) fn cold(&self, number: u32) {
        let page = number.wrapping_sub(self.first_page);
        if page < self.pages { self.leave_first(core::iter::once(page)) } else { self.cool_object(number) }
    }
}

impl Scope<'_> {
    /// Looks at something that will not be used again soon; `look` says what, before it uses it.
    pub(crate) fn once<R>(&self, look: impl FnOnce(&Once) -> Result<R, FarError>) -> Result<R, FarError> {
        let once = Once::default();
        let found = self.record.objects.once(|| look(&once))?;
        once.leave_first(self);
        Ok(found)
    }

    /// The same for a task.
    pub(crate) async fn fetch_once<R>(
        &self,
        look: impl AsyncFnOnce(&Once) -> Result<R, FarError>,
    ) -> Result<R, FarError> {
        let once = Once::default();
        let found = {
            let mut look = pin!(look(&once));
            // Others run between two polls, for whom this does not hold.
            poll_fn(|context| self.record.objects.once(|| look.as_mut().poll(context))).await?
        };
        once.leave_first(self);
        Ok(found)
    }
}
