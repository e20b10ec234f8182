//! Pacing: at how many pages in use the next cycle begins: when they have doubled, and so that it ends
//! before the limit.

use crate::collector::CycleMode;
use core::sync::atomic::{AtomicU64, Ordering};

/// When the next cycle is due.
pub(crate) struct Pacing {
    /// Number of pages in use at which it begins.
    due: AtomicU64,
    /// Pages that are kept for what mutators allocate while it runs.
    headroom: AtomicU64,
}

/// Part of the limit that is kept at least, and at most.
const HEADROOM_PARTS: (u64, u64) = (16, 2);

/// Part of the limit that is allocated from one snapshot to the next, at least.
const GARBAGE_PART: u64 = 32;

/// Pages that are allocated between two cycles at least, as long as half of the limit is free: 8 MiB.
const GROWTH_MIN: u64 = 2048;

impl Pacing {
    pub(crate) fn new(limit: u64) -> Pacing {
        let headroom = limit / HEADROOM_PARTS.0;
        let due = due(0, limit - headroom, limit);
        Pacing { due: AtomicU64::new(due), headroom: AtomicU64::new(headroom) }
    }

    /// Returns the number of pages in use at which the next cycle is due.
    #[inline]
    pub(crate) fn due(&self) -> u64 {
        self.due.load(Ordering::Relaxed)
    }

    /// Plans the next cycle after one while which so many pages were allocated. So many are in use
    /// now.
    pub(crate) fn plan(&self, mode: CycleMode, allocated: u64, used: u64, limit: u64) {
        let before = self.headroom.load(Ordering::Relaxed);
        let headroom = match mode {
            CycleMode::Concurrent => allocated + allocated / 2,
            // The cycle before it came too late, or there was none.
            CycleMode::Stopped => before * 2,
        };
        let headroom = headroom.clamp(limit / HEADROOM_PARTS.0, limit / HEADROOM_PARTS.1);
        self.headroom.store(headroom, Ordering::Relaxed);
        // What was allocated during the last cycle may be garbage now.
        let more = (limit / GARBAGE_PART).saturating_sub(allocated);
        let latest = (limit - headroom).max(used + more).min(limit);
        self.due.store(due(used, latest, limit), Ordering::Relaxed);
    }

    /// Plans the next cycle after one that failed: when there is something more to find.
    pub(crate) fn retry_later(&self, used: u64, limit: u64) {
        self.due.store((used + limit / GARBAGE_PART).min(limit), Ordering::Relaxed);
    }
}

/// Returns the number of pages in use at which the next cycle is due, `latest` at the latest, when so
/// many are in use now.
fn due(used: u64, latest: u64, limit: u64) -> u64 {
    // As much garbage as there is of what lives costs a cycle for each of its bytes once. More would
    // only fill near memory, and then be written to far memory. Where the limit is not far away, a
    // cycle that begins early finds less garbage, and mutators wait for the next one.
    let grown = (2 * used).max(used + GROWTH_MIN);
    if grown <= limit / 2 { grown } else { latest }
}

#[cfg(test)]
mod tests {
    //! Guards against cycles that begin too late, or again and again.
    use super::*;

    #[test]
    fn the_next_cycle_leaves_room_for_what_was_allocated_during_the_last() {
        let pacing = Pacing::new(3200);
        assert_eq!(pacing.due(), 3000);
        pacing.plan(CycleMode::Concurrent, 600, 1000, 3200);
        assert_eq!(pacing.due(), 2300);
        pacing.plan(CycleMode::Stopped, 0, 1000, 3200);
        assert_eq!(pacing.due(), 1600);
        // What lives is above that.
        pacing.plan(CycleMode::Stopped, 0, 2500, 3200);
        assert_eq!(pacing.due(), 2600);
        pacing.plan(CycleMode::Concurrent, 0, 0, 3200);
        assert_eq!(pacing.due(), 3000);
        // The heap is almost full of what was made during the last cycle.
        pacing.plan(CycleMode::Concurrent, 900, 3150, 3200);
        assert_eq!(pacing.due(), 3150);
        pacing.plan(CycleMode::Concurrent, 40, 3150, 3200);
        assert_eq!(pacing.due(), 3200);
        pacing.retry_later(3150, 3200);
        assert_eq!(pacing.due(), 3200);
    }

    #[test]
    fn far_from_the_limit_the_next_cycle_comes_when_the_heap_has_doubled() {
        let pacing = Pacing::new(1 << 20);
        assert_eq!(pacing.due(), GROWTH_MIN);
        for (used, due) in [(0, 2048), (1000, 3048), (5000, 10_000), (250_000, 500_000), (300_000, 983_040)] {
            pacing.plan(CycleMode::Concurrent, 0, used, 1 << 20);
            assert_eq!(pacing.due(), due, "{used}");
        }
    }
}
