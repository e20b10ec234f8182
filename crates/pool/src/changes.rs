//! Which changes of pages are under way that do not know of a leg that came meanwhile.
//!
//! A write is sent to the legs that there are when it begins. One that comes while it is under way lacks it, and that is noted when it ends. Until
//! then nobody may say that nothing is missing: the write would count as done, and be lost with a server that was whole.
//!
//! Time is cut into *epochs*. One ends before and one after a leg comes; a change belongs to the one in which it begins. What belongs to an earlier one
//! may not know of the leg; what begins in the last one looks whom there is after it has begun.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

/// Epochs that are told apart. A change would have to be under way while half as many legs come, to be taken for one that knows of the last.
const EPOCHS: usize = 64;

/// See the module.
#[derive(Clone)]
pub(crate) struct Changes(Arc<Counts>);

struct Counts {
    epoch: AtomicU64,
    /// Of each epoch.
    under_way: [AtomicUsize; EPOCHS],
}

/// While it lives, a change is under way.
pub(crate) struct Change {
    counts: Arc<Counts>,
    epoch: u64,
}

impl Drop for Change {
    fn drop(&mut self) {
        self.counts.of(self.epoch).fetch_sub(1, Ordering::SeqCst);
    }
}

impl Counts {
    fn of(&self, epoch: u64) -> &AtomicUsize {
        &self.under_way[epoch as usize % EPOCHS]
    }
}

impl Changes {
    pub(crate) fn new() -> Changes {
        Changes(Arc::new(Counts { epoch: AtomicU64::new(0), under_way: [const { AtomicUsize::new(0) }; EPOCHS] }))
    }

    /// One begins. After this its owner looks once more which legs there are.
    pub(crate) fn begin(&self) -> Change {
        loop {
            let epoch = self.0.epoch.load(Ordering::SeqCst);
            self.0.of(epoch).fetch_add(1, Ordering::SeqCst);
            let change = Change { counts: self.0.clone(), epoch };
            // Else it may have been counted too late for who looked meanwhile.
            if self.0.epoch.load(Ordering::SeqCst) == epoch {
                return change;
            }
        }
    }

    /// `come` lets a leg come.
    pub(crate) fn while_one_comes<T>(&self, come: impl FnOnce() -> T) -> T {
        // What begins before it has come belongs to an epoch that ends behind it; this one ends the one before, so that
        // `are_old` is true all the while.
        let _this = self.begin();
        self.end_epoch();
        let result = come();
        self.end_epoch();
        result
    }

    fn end_epoch(&self) {
        self.0.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Is one under way that may not know of the leg that came last?
    pub(crate) fn are_old(&self) -> bool {
        let epoch = self.0.epoch.load(Ordering::SeqCst);
        (1..EPOCHS as u64).any(|ago| self.0.of(epoch.wrapping_sub(ago)).load(Ordering::SeqCst) > 0)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a leg that is taken for whole while a write is under way that it will lack.
    use super::*;

    #[test]
    fn what_began_before_a_leg_came_is_old_until_it_ends() {
        let changes = Changes::new();
        let before = changes.begin();
        assert!(!changes.are_old());
        let meanwhile = changes.while_one_comes(|| {
            assert!(changes.are_old(), "nobody knows yet who has come");
            changes.begin()
        });
        let after = changes.begin();
        assert!(changes.are_old());
        drop(before);
        assert!(changes.are_old());
        drop(meanwhile);
        assert!(!changes.are_old());
        changes.while_one_comes(|| ());
        assert!(changes.are_old());
        drop(after);
        assert!(!changes.are_old());
    }
}
