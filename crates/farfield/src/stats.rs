//! Statistics of a heap.

use crate::call::{CallCounts, ClientReason};
use core::time::Duration;
use farfield_core::notice_lines;

/// Statistics of a heap at one moment. Counters count from the creation of the heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// The near budget in bytes.
    pub near_limit_bytes: u64,
    /// Near bytes in use: frames that hold pages, free frames that were not returned to the kernel,
    /// and tables.
    pub near_bytes: u64,
    /// Part of [`Stats::near_bytes`] that tables take.
    pub table_bytes: u64,
    /// Part of [`Stats::near_bytes`] that is pinned ([`FarBox::pin`](crate::FarBox::pin)).
    pub pinned_bytes: u64,
    /// Pages in which values can lie, near or far.
    pub pages: u64,
    /// Part of [`Stats::pages`]: pages of small values, which have handles. On the object and
    /// hybrid plane.
    pub value_pages: u64,
    /// Part of [`Stats::value_pages`]: pages whose values come together when they are far, because
    /// their *path*, decided when the page last left, is to come whole. A page that was filled near
    /// and has never left does not count. On the hybrid plane only.
    pub pages_to_come_whole: u64,
    /// Number of times that a value was not near and was brought.
    pub misses: u64,
    /// Part of [`Stats::misses`] that brought one small value alone; the others brought a page, or
    /// the pages of a large value. On the object and hybrid plane.
    pub object_misses: u64,
    /// Part of [`Stats::misses`] of values that had left shortly before, while less than an eighth
    /// of the near memory left since. With about an eighth more near memory, there would have been
    /// that many misses fewer. On the hybrid plane only.
    pub early_misses: u64,
    /// Number of pages of small values that came whole. On the hybrid plane only.
    pub whole_pages: u64,
    /// Histogram of the pages of small values that left, by the share of them that was used while
    /// they were near (*card access rate*). The classes are less than a tenth, less than two
    /// tenths, and so on. On the hybrid plane only.
    pub access_rates: [u64; Stats::RATE_CLASSES],
    /// Part of the pages in [`Stats::access_rates`] that come whole next time.
    pub left_to_come_whole: u64,
    /// Bytes of small values that were used, in pages that left. On the hybrid plane only.
    pub used_bytes: u64,
    /// Bytes that were read from the pool, for misses and for prefetches.
    pub fetched_bytes: u64,
    /// Number of pages that left and had to be written.
    pub written_pages: u64,
    /// Number of pages that left and were equal to their far copy.
    pub clean_pages: u64,
    /// Number of pages that left because they held no value any more.
    pub dead_pages: u64,
    /// Processor time that eviction took, in all threads.
    pub evicting: Duration,
    /// Number of pages that were about to leave and were used again.
    pub taken_back: u64,
    /// Number of times that a thread found no free frame and had to make one, or wait.
    pub throttled: u64,
    /// Histogram of the waits for a frame. The classes are shorter than 2 µs, shorter than 4 µs,
    /// and so on; the last one has all longer waits.
    pub pauses: [u64; Stats::PAUSE_CLASSES],
    /// Longest wait for a frame.
    pub longest_pause: Duration,
    /// Time for which one scope has held back pages that are about to leave, so that there is too
    /// little room; 0 if no scope does.
    pub held_back: Duration,
    /// Kernel thread id (`gettid`) of the thread of that scope; 0: none.
    pub held_by: u32,
    /// Number of small values that were moved, so that hot ones lie together and pages that leave
    /// are dense. On the object plane only.
    pub moved_values: u64,
    /// Number of far pages that hold no value any more and for which the pool still has memory. The
    /// next pages that leave are written there. They are given back when they are more than a
    /// sixteenth of all pages, when the pool is full, and when nothing has left for a while.
    pub vacant_pages: u64,
    /// Number of far pages given back to the pool.
    pub discarded_pages: u64,
    /// Number of values whose destructor could not run, because their bytes are lost.
    pub lost_values: u64,
    /// Number of prefetches, which bring values before they are needed. They are counted in units
    /// (a page, or the pages of one large value) and in small values of the object plane.
    pub prefetches: u64,
    /// Part of [`Stats::prefetches`] that were used before they left.
    pub prefetches_used: u64,
    /// Part of [`Stats::prefetches`] that left before they were used.
    pub prefetches_unused: u64,
    /// Most prefetches that a thread may have in flight: two to three times what the pool delivers
    /// in the time of an answer. The value is that of the thread with the highest limit; 0: no
    /// thread prefetched.
    pub prefetch_depth: u64,
    /// Shortest recent answer time of a prefetch of that thread.
    pub answer_time: Duration,
    /// Number of times that the pool was exchanged
    /// ([`Heap::switch_pool`](crate::Heap::switch_pool)).
    pub pool_switches: u64,
    /// Number of far pages to be moved while the pool is being exchanged, in steps of 64.
    pub pool_pages_to_move: u64,
    /// Part of [`Stats::pool_pages_to_move`] that the new pool holds already.
    pub pool_pages_moved: u64,
    /// Number of pages of a mirror or an erasure code that its scrub has checked, counted at each
    /// server. This number and the following scrub numbers count since the pool was last exchanged.
    pub scrubbed_pages: u64,
    /// Part of [`Stats::scrubbed_pages`] that differed from what was written.
    pub scrub_wrong_pages: u64,
    /// Part of [`Stats::scrub_wrong_pages`] that were repaired from other servers.
    pub scrub_mended_pages: u64,
    /// Number of complete scrubs.
    pub scrub_turns: u64,
    /// Time since the last complete scrub; 0: there was none.
    pub scrub_age: Duration,
    /// Number of servers of mirrors and erasure codes that are lost and not replaced, do not
    /// answer, or do not hold everything yet.
    pub missing_legs: u64,
    /// Upper bound of the pages that have fewer copies or parts than they should. As long as a
    /// server is missing, these are all pages that are stored there.
    pub exposed_pages: u64,
    /// Number of pages that were written to such servers because they lacked them, counted at each
    /// server since the pool was last exchanged.
    pub restored_pages: u64,
    /// Number of calls of functions over far pointers that a memory server answered
    /// ([`Heap::call_counts`](crate::Heap::call_counts) tells functions apart). A fold counts a call for
    /// each of its pieces.
    pub calls_at_server: u64,
    /// Number of such calls that ran at the client, by reason, in the order of [`ClientReason::ALL`].
    pub calls_at_client: [u64; ClientReason::ALL.len()],
}

impl Stats {
    /// Length of [`Stats::access_rates`].
    pub const RATE_CLASSES: usize = 10;

    /// Length of [`Stats::pauses`].
    pub const PAUSE_CLASSES: usize = 20;

    /// Returns the index in [`Stats::pauses`] of a wait of this length.
    pub(crate) fn pause_class(pause: Duration) -> usize {
        let micros = pause.as_micros().max(1) as u64;
        (micros.ilog2() as usize).min(Self::PAUSE_CLASSES - 1)
    }

    /// Returns the counts of calls of functions over far pointers.
    pub fn calls(&self) -> CallCounts {
        CallCounts { at_server: self.calls_at_server, at_client: self.calls_at_client }
    }

    /// Returns the share of prefetches that were used, among those that were used or have left
    /// unused; 1 if there are none.
    pub fn prefetch_accuracy(&self) -> f64 {
        share(self.prefetches_used, self.prefetches_unused)
    }

    /// Returns the share of the needed far values that were prefetched; 1 if none was needed.
    pub fn prefetch_coverage(&self) -> f64 {
        share(self.prefetches_used, self.misses)
    }
}

impl Stats {
    /// Returns the text for a [notice](farfield_core::notice).
    pub(crate) fn lines(&self) -> String {
        notice_lines!("", Stats, self;
            numbers near_limit_bytes near_bytes table_bytes pinned_bytes pages value_pages pages_to_come_whole
            misses object_misses early_misses whole_pages left_to_come_whole used_bytes fetched_bytes
            written_pages clean_pages dead_pages taken_back throttled moved_values vacant_pages
            discarded_pages lost_values held_by
            prefetches prefetches_used prefetches_unused prefetch_depth
            pool_switches pool_pages_to_move pool_pages_moved
            scrubbed_pages scrub_wrong_pages scrub_mended_pages scrub_turns missing_legs exposed_pages restored_pages
            calls_at_server;
            durations scrub_age answer_time evicting longest_pause held_back;
            lists access_rates pauses calls_at_client)
    }
}

fn share(part: u64, rest: u64) -> f64 {
    if part + rest == 0 { 1.0 } else { part as f64 / (part + rest) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farfield_core::notice::TEXT_BYTES_MAX;

    #[test]
    fn a_notice_has_room_for_any_numbers() {
        let any = Duration::from_nanos(u64::MAX);
        let mut stats = Stats { evicting: any, longest_pause: any, ..Stats::default() };
        (stats.access_rates, stats.pauses) = ([u64::MAX; Stats::RATE_CLASSES], [u64::MAX; Stats::PAUSE_CLASSES]);
        stats.calls_at_client = [u64::MAX; ClientReason::ALL.len()];
        let text = stats.lines();
        assert!(text.contains(&format!("evicting_ns {}\n", u64::MAX)) && text.contains("\nmisses 0\n"), "{text}");
        // Each number can take as many digits; a title comes before them.
        assert!(text.len() + 20 * text.lines().count() < TEXT_BYTES_MAX / 2, "{}", text.len());
    }
}
