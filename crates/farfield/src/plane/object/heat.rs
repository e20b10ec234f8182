//! Heat of objects: which are hot by the heap's rule ([`Hotness`]), and how a use and a check by
//! the evacuator change a handle.

use super::{ObjectId, Objects};
use crate::heap::HeapInner;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::{Handle, Hotness, STAMPS_PER_TURN, Stamp};

/// The rule of the heap, and the clock of [`Hotness::Recency`].
pub(super) struct HotnessClock {
    pub(super) rule: Hotness,
    /// Number of moments (ticks of the clock) that have passed.
    moments: AtomicU64,
    /// Number of pages that had left at the last tick; only the evictor uses it.
    passed_at: AtomicU64,
}

impl HotnessClock {
    pub(super) fn new(rule: Hotness) -> HotnessClock {
        HotnessClock { rule, moments: AtomicU64::new(0), passed_at: AtomicU64::new(0) }
    }

    pub(super) fn now(&self) -> Stamp {
        Stamp::after(self.moments.load(Ordering::Relaxed))
    }

    /// Advances the clock by which uses are stamped, according to the pages that have left. The
    /// evictor calls this when it checks a page.
    pub(super) fn tick(&self, core: &HeapInner) {
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
    /// Notes the use of an object that is near and not plainly hot. If another thread moves or
    /// marks the object at this moment, this use is not noted: the other change says more.
    pub(super) fn warm(&self, object: ObjectId, seen: Handle, brought: bool) {
        let next = Handle(self.heat.rule.used(seen, self.heat.now(), brought).0 | Handle::USED);
        if next != seen {
            let _ = self.handles[object].compare_exchange(seen.0, next.0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    pub(super) fn is_hot(&self, handle: Handle) -> bool {
        self.heat.rule.is_hot(handle, self.heat.now())
    }

    /// Updates the heat of an object that the evacuator has checked and that stays where it is. A
    /// use at this moment keeps the object hot.
    pub(super) fn cool_down(&self, object: ObjectId, seen: Handle) {
        let next = self.heat.rule.looked_at(seen);
        if next != seen {
            let _ = self.handles[object].compare_exchange(seen.0, next.0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}
