//! What a heap tells about itself.

use core::time::Duration;

/// A look at a heap. Counters run from its beginning on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// The near budget in bytes.
    pub near_limit_bytes: u64,
    /// Near bytes in use: frames that hold pages, free ones that the kernel has not got back, and tables.
    pub near_bytes: u64,
    /// Of these, tables.
    pub table_bytes: u64,
    /// Of these, what is pinned ([`FarBox::pin`](crate::FarBox::pin)).
    pub pinned_bytes: u64,
    /// Pages in which values can lie, near or far.
    pub pages: u64,
    /// Of these, pages of small values, which have handles. On the object and hybrid plane.
    pub value_pages: u64,
    /// Of these, those whose values come together, with their page, when they are far: as was decided when the page left last (its *path*; one that
    /// was filled near and has never left is not among them). On the hybrid plane only.
    pub pages_to_come_whole: u64,
    /// Times that a value was not near and was brought.
    pub misses: u64,
    /// Of these, those that brought one small value alone; the others brought a page, or the pages of a large value. On the object and hybrid
    /// plane.
    pub object_misses: u64,
    /// Of these, those of what had left shortly before, while less than an eighth of the near memory left: so many fewer there would have been with
    /// about an eighth more. On the hybrid plane only.
    pub early_misses: u64,
    /// Pages of small values that came whole. On the hybrid plane only.
    pub whole_pages: u64,
    /// Pages of small values that left, by the share of them that was used while they were near (*card access rate*): less than a tenth, less than
    /// two tenths, and so on. On the hybrid plane only.
    pub access_rates: [u64; Stats::RATE_CLASSES],
    /// Of these, those that come whole next time.
    pub left_to_come_whole: u64,
    /// Bytes of small values that were used in pages that left. On the hybrid plane only.
    pub used_bytes: u64,
    /// Bytes that were read from the pool, for misses and ahead of need.
    pub fetched_bytes: u64,
    /// Pages that left and had to be written.
    pub written_pages: u64,
    /// Pages that left and were equal to their far copy.
    pub clean_pages: u64,
    /// Pages that left because no value was in them any more.
    pub dead_pages: u64,
    /// Processor time that making room took, in whichever threads.
    pub evicting: Duration,
    /// Pages that were about to leave and were used again.
    pub taken_back: u64,
    /// Times that a thread found no free frame and had to make one, or wait.
    pub throttled: u64,
    /// How often such a wait took less than 2 µs (the first), less than 4 µs, and so on; the last: anything longer.
    pub pauses: [u64; Stats::PAUSE_CLASSES],
    /// The longest.
    pub longest_pause: Duration,
    /// How long one scope has held back what is about to leave, so that there is too little room; 0: none does.
    pub held_back: Duration,
    /// The thread of that scope, as the kernel numbers it (`gettid`); 0: none.
    pub held_by: u32,
    /// Small values that were moved, so that what is hot lies together and what leaves is dense. On the object plane only.
    pub moved_values: u64,
    /// Far pages in which no value is any more, for which the pool still has memory: the next pages that leave are written there. Given
    /// back when they are more than a sixteenth of all, when the pool is full, and when nothing has left for a while.
    pub vacant_pages: u64,
    /// Far pages given back to the pool.
    pub discarded_pages: u64,
    /// Values whose destructor could not run, because their bytes are lost.
    pub lost_values: u64,
    /// Units (a page, or the pages of one large value) and small values of the object plane that were brought before anybody needed them.
    pub prefetches: u64,
    /// Of these, used before they left.
    pub prefetches_used: u64,
    /// Of these, left before anybody used them.
    pub prefetches_unused: u64,
    /// How many requests ahead of need a thread may have on its way at a time: two to three times of what the pool delivers in the time of an
    /// answer. Of the thread that may have most; 0: none had any.
    pub prefetch_depth: u64,
    /// The least that the answer to such a request of it took lately.
    pub answer_time: Duration,
    /// Times that the pool was exchanged ([`Heap::switch_pool`](crate::Heap::switch_pool)).
    pub pool_switches: u64,
    /// While it is being exchanged: far pages to be moved, in steps of 64.
    pub pool_pages_to_move: u64,
    /// Of these, those that the new pool holds already.
    pub pool_pages_moved: u64,
    /// Pages of a mirror or an erasure code that its scrub has looked at, counted at each server; this, and what follows, since the pool was exchanged last.
    pub scrubbed_pages: u64,
    /// Of these, those that were not what was written.
    pub scrub_wrong_pages: u64,
    /// Of these, those that were mended from other servers.
    pub scrub_mended_pages: u64,
    /// How often everything was looked at.
    pub scrub_turns: u64,
    /// How long ago that was over last; zero: it never was.
    pub scrub_age: Duration,
    /// Servers of mirrors and erasure codes that are lost and not replaced, silent, or do not hold everything yet.
    pub missing_legs: u64,
    /// Pages that may have fewer copies or parts than they should, at most: all that are stored there, as long as a server is missing.
    pub exposed_pages: u64,
    /// Pages that such servers were given because they lacked them, counted at each server, since the pool was exchanged last.
    pub restored_pages: u64,
}

impl Stats {
    /// Length of [`Stats::access_rates`].
    pub const RATE_CLASSES: usize = 10;

    /// Length of [`Stats::pauses`].
    pub const PAUSE_CLASSES: usize = 20;

    /// Index in [`Stats::pauses`].
    pub(crate) fn pause_class(pause: Duration) -> usize {
        let micros = pause.as_micros().max(1) as u64;
        (micros.ilog2() as usize).min(Self::PAUSE_CLASSES - 1)
    }

    /// Of what came ahead of need and is decided, the share that was used; 1 if nothing is.
    pub fn prefetch_accuracy(&self) -> f64 {
        share(self.prefetches_used, self.prefetches_unused)
    }

    /// Of what was needed and far, the share that came ahead of need; 1 if nothing was.
    pub fn prefetch_coverage(&self) -> f64 {
        share(self.prefetches_used, self.misses)
    }
}

/// Writes numbers as lines. Takes all fields, so that none is forgotten.
macro_rules! lines {
    ($stats:ident: $($number:ident)*; durations $($duration:ident)*; lists $($list:ident)*) => {{
        let Stats { $($number,)* $($duration,)* $($list,)* } = $stats;
        let mut text = String::new();
        $(text += &format!("{} {}\n", stringify!($number), $number);)*
        $(text += &format!("{}_ns {}\n", stringify!($duration), $duration.as_nanos());)*
        $(text += &format!("{} {}\n", stringify!($list), $list.map(|number| number.to_string()).join(" "));)*
        text
    }};
}

impl Stats {
    /// For a [notice](farfield_core::heap::notice).
    pub(crate) fn lines(&self) -> String {
        lines!(self:
            near_limit_bytes near_bytes table_bytes pinned_bytes pages value_pages pages_to_come_whole misses object_misses early_misses whole_pages left_to_come_whole used_bytes fetched_bytes
            written_pages clean_pages dead_pages taken_back throttled moved_values vacant_pages discarded_pages lost_values held_by
            prefetches prefetches_used prefetches_unused prefetch_depth pool_switches pool_pages_to_move pool_pages_moved
            scrubbed_pages scrub_wrong_pages scrub_mended_pages scrub_turns missing_legs exposed_pages restored_pages;
            durations scrub_age answer_time evicting longest_pause held_back;
            lists access_rates pauses)
    }
}

fn share(part: u64, rest: u64) -> f64 {
    if part + rest == 0 { 1.0 } else { part as f64 / (part + rest) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farfield_core::heap::notice::TEXT_BYTES_MAX;

    #[test]
    fn a_notice_has_room_for_any_numbers() {
        let any = Duration::from_nanos(u64::MAX);
        let mut stats = Stats { evicting: any, longest_pause: any, ..Stats::default() };
        (stats.access_rates, stats.pauses) = ([u64::MAX; Stats::RATE_CLASSES], [u64::MAX; Stats::PAUSE_CLASSES]);
        let text = stats.lines();
        assert!(text.contains(&format!("evicting_ns {}\n", u64::MAX)) && text.contains("\nmisses 0\n"), "{text}");
        // Each number can take as many digits; a title comes before them.
        assert!(text.len() + 20 * text.lines().count() < TEXT_BYTES_MAX / 2, "{}", text.len());
    }
}
