//! Work of the scrubs of a pool, as its callers see it.

use crate::Backend;
use core::time::Duration;
use farfield_os::process::now_ns;

/// Work that the scrub of a pool has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubStats {
    /// Number of stored pages that were looked at, counted at each member.
    pub looked_pages: u64,
    /// Number of the `looked_pages` that were not what was written.
    pub wrong_pages: u64,
    /// Number of the `wrong_pages` that were repaired from other members.
    pub mended_pages: u64,
    /// Number of turns, in each of which everything was looked at.
    pub turns: u64,
    /// When the last turn ended, in nanoseconds of the machine's monotonic clock; 0 if none has.
    pub turn_ended_at_ns: u64,
}

impl ScrubStats {
    /// Returns the time since the end of the last turn; `None` if none has ended.
    pub fn turn_age(&self) -> Option<Duration> {
        let is_known = self.turns > 0 && self.turn_ended_at_ns > 0;
        is_known.then(|| Duration::from_nanos(now_ns().saturating_sub(self.turn_ended_at_ns)))
    }

    /// Adds up the work in two parts of a pool. A turn counts only when both have made it.
    pub fn and(self, other: ScrubStats) -> ScrubStats {
        ScrubStats {
            looked_pages: self.looked_pages + other.looked_pages,
            wrong_pages: self.wrong_pages + other.wrong_pages,
            mended_pages: self.mended_pages + other.mended_pages,
            turns: self.turns.min(other.turns),
            turn_ended_at_ns: self.turn_ended_at_ns.min(other.turn_ended_at_ns),
        }
    }

    /// Adds up the work of a pool's own scrub, if it has one, and of the scrubs of its parts.
    pub(crate) fn with_parts(
        own: Option<ScrubStats>,
        parts: impl Iterator<Item = impl AsRef<dyn Backend>>,
    ) -> Option<ScrubStats> {
        own.into_iter().chain(parts.filter_map(|part| part.as_ref().scrub_stats())).reduce(ScrubStats::and)
    }
}
