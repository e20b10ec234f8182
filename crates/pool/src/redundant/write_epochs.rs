//! Write epochs: which changes of pages are in flight that do not know of a member that joined
//! meanwhile.
//!
//! A write is sent to the members that are present when it begins. A member that joins while the
//! write is in flight does not receive it; this is noted when the write ends. Until then no code
//! may conclude that the member lacks nothing. Otherwise the write would count as done, and be lost
//! together with a server that was whole.
//!
//! Time is cut into *epochs*, much as in epoch-based reclamation. An epoch ends before and another
//! after a member joins. A change belongs to the epoch in which it begins. A change of an earlier
//! epoch may not know of the member. A change that begins in the current epoch looks up the members
//! after it has begun.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

/// Number of epochs that are told apart. An old change is mistaken for a current one only if half
/// as many members join while it is in flight (two epochs for each member).
const EPOCHS: usize = 64;

/// Counts of the changes in flight, by epoch (see the module documentation).
#[derive(Clone)]
pub(crate) struct WriteEpochs(Arc<WriteEpochCounts>);

struct WriteEpochCounts {
    epoch: AtomicU64,
    /// Number of changes in flight, for each epoch modulo [`EPOCHS`].
    under_way: [AtomicUsize; EPOCHS],
}

/// Guard: a change is in flight as long as this lives.
pub(crate) struct WriteEpochGuard {
    counts: Arc<WriteEpochCounts>,
    epoch: u64,
}

impl Drop for WriteEpochGuard {
    fn drop(&mut self) {
        self.counts.of(self.epoch).fetch_sub(1, Ordering::SeqCst);
    }
}

impl WriteEpochCounts {
    fn of(&self, epoch: u64) -> &AtomicUsize {
        &self.under_way[epoch as usize % EPOCHS]
    }
}

impl WriteEpochs {
    pub(crate) fn new() -> WriteEpochs {
        WriteEpochs(Arc::new(WriteEpochCounts {
            epoch: AtomicU64::new(0),
            under_way: [const { AtomicUsize::new(0) }; EPOCHS],
        }))
    }

    /// Begins a change. Its owner must look up the members again after this call.
    pub(crate) fn begin(&self) -> WriteEpochGuard {
        loop {
            let epoch = self.0.epoch.load(Ordering::SeqCst);
            self.0.of(epoch).fetch_add(1, Ordering::SeqCst);
            let change = WriteEpochGuard { counts: self.0.clone(), epoch };
            // Otherwise the change may have been counted too late for a thread that looked
            // meanwhile.
            if self.0.epoch.load(Ordering::SeqCst) == epoch {
                return change;
            }
        }
    }

    /// Calls `come`, which makes a member join, between two ends of epochs.
    pub(crate) fn during_join<T>(&self, come: impl FnOnce() -> T) -> T {
        // A change that begins before the member has joined belongs to an epoch that ends after the
        // join. The guard here belongs to the epoch before, so that `has_old_writes` is true all the
        // while.
        let _this = self.begin();
        self.end_epoch();
        let result = come();
        self.end_epoch();
        result
    }

    fn end_epoch(&self) {
        self.0.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Checks whether a change is in flight that may not know of the member that joined last.
    pub(crate) fn has_old_writes(&self) -> bool {
        let epoch = self.0.epoch.load(Ordering::SeqCst);
        (1..EPOCHS as u64).any(|ago| self.0.of(epoch.wrapping_sub(ago)).load(Ordering::SeqCst) > 0)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a member that is taken for whole while a write is under way that it will
    //! lack.
    use super::*;

    #[test]
    fn writes_begun_before_a_member_came_are_old_until_they_end() {
        let changes = WriteEpochs::new();
        let before = changes.begin();
        assert!(!changes.has_old_writes());
        let meanwhile = changes.during_join(|| {
            assert!(changes.has_old_writes(), "nobody knows yet who has come");
            changes.begin()
        });
        let after = changes.begin();
        assert!(changes.has_old_writes());
        drop(before);
        assert!(changes.has_old_writes());
        drop(meanwhile);
        assert!(!changes.has_old_writes());
        changes.during_join(|| ());
        assert!(changes.has_old_writes());
        drop(after);
        assert!(!changes.has_old_writes());
    }
}
