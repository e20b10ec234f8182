//! Shares of recent events.

use super::super::sync::{AtomicU32, Ordering};

/// Recent share of events of a kind, in 1/256: an exponential moving average that gives each count
/// a weight of 1/8.
pub struct RecentShare(AtomicU32);

impl RecentShare {
    pub(super) const fn new() -> RecentShare {
        RecentShare(AtomicU32::new(0))
    }

    /// Returns the share in 1/256.
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Notes that `part` of `whole` events were of the kind. For one thread at a time; `whole` is
    /// not 0.
    pub fn count(&self, part: usize, whole: usize) {
        self.0.store((self.get() * 7 + (part * 256 / whole) as u32) / 8, Ordering::Relaxed);
    }
}
