//! Which objects are hot, by the heap's rule ([`Hotness`]), and what a use and a look of the evacuator do to a handle.

use super::{ObjectId, Objects};
use crate::heap::Core;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::{Handle, Hotness, STAMPS_PER_TURN, Stamp};

/// The rule, and the clock of [`Hotness::Recency`].
pub(super) struct Heat {
    pub(super) rule: Hotness,
    /// Moments that have passed.
    moments: AtomicU64,
    /// How many pages had left when the last one passed; only the evictor's.
    passed_at: AtomicU64,
}

impl Heat {
    pub(super) fn new(rule: Hotness) -> Heat {
        Heat { rule, moments: AtomicU64::new(0), passed_at: AtomicU64::new(0) }
    }

    pub(super) fn now(&self) -> Stamp {
        Stamp::after(self.moments.load(Ordering::Relaxed))
    }

    /// The evictor looks at a page: the time by which uses are stamped goes on.
    pub(super) fn tick(&self, core: &Core) {
        if self.rule != Hotness::Recency {
            return;
        }
        let moment = u64::from(core.frames.limit() / STAMPS_PER_TURN).max(1);
        let left = [&core.evictor.written, &core.evictor.clean].map(|count| count.load(Ordering::Relaxed));
        let left = left.iter().sum::<u64>();
        let since = left - self.passed_at.load(Ordering::Relaxed);
        if since >= moment {
            self.passed_at.store(left, Ordering::Relaxed);
            self.moments.fetch_add(since / moment, Ordering::Relaxed);
        }
    }
}

impl Objects {
    /// An object is used that is near and not plainly hot. Someone may move or mark it at this moment: then that he does is
    /// more than a use that nobody noted.
    pub(super) fn warm(&self, object: ObjectId, seen: Handle, brought: bool) {
        let next = Handle(self.heat.rule.used(seen, self.heat.now(), brought).0 | Handle::USED);
        if next != seen {
            let _ = self.handles[object].compare_exchange(seen.0, next.0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    pub(super) fn is_hot(&self, handle: Handle) -> bool {
        self.heat.rule.is_hot(handle, self.heat.now())
    }

    /// The evacuator has looked at an object that stays where it is. Who uses it at this moment keeps it hot.
    pub(super) fn cool_down(&self, object: ObjectId, seen: Handle) {
        let next = self.heat.rule.looked_at(seen);
        if next != seen {
            let _ = self.handles[object].compare_exchange(seen.0, next.0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}
