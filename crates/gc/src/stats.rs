//! Statistics of a collected heap.

use crate::collector::{LiveHeap, MovedObjects};
use crate::pages::Pages;
use crate::roots::RootTable;
use core::time::Duration;
use farfield_core::notice_lines;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

/// Statistics of a collected heap at one moment. Counters count from its creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GcStats {
    /// Most far memory that objects and entries can take, in bytes.
    pub limit_bytes: u64,
    /// Pages that hold objects or entries, and pages that mutators have reserved, in bytes.
    pub used_bytes: u64,
    /// Number of roots.
    pub roots: u64,
    /// Number of collections that have ended.
    pub collections: u64,
    /// Number of collections that were given up.
    pub given_up: u64,
    /// Objects that the last collection has found alive.
    pub live_objects: u64,
    /// Bytes of these objects.
    pub live_bytes: u64,
    /// Objects among these that memory servers have looked at, where they are.
    pub traced_at_servers: u64,
    /// Far pages that the last collection has read, past near memory, to look at objects in them.
    pub read_pages: u64,
    /// Far pages that the last collection has brought near.
    pub brought_pages: u64,
    /// Objects among those alive that waited until the program had brought their pages near.
    pub arrived_objects: u64,
    /// Time for which the last collection has waited for that.
    pub waited: Duration,
    /// Pages that collections have written, so that servers find what is near.
    pub flushed_pages: u64,
    /// Pages that collections have given back.
    pub freed_pages: u64,
    /// Objects that collections have moved out of sparse pages.
    pub moved_objects: u64,
    /// Bytes of these objects.
    pub moved_bytes: u64,
    /// Objects among these that memory servers have copied, where they were.
    pub moved_at_servers: u64,
    /// Far pages that collections have read, past near memory, to move objects out of them.
    pub evacuation_read_pages: u64,
    /// Number of times that a memory server was asked to copy objects and did not, so that the
    /// collector did.
    pub server_moves_given_up: u64,
    /// Number of times that moving objects was given up, after a collection.
    pub moves_given_up: u64,
    /// Time that the last collection took, beside the mutators.
    pub last_collection: Duration,
    /// Number of times that mutators were stopped.
    pub pauses: u64,
    /// Time that they were stopped for, in all, from each request until they went on.
    pub paused: Duration,
    /// Time of the last stop.
    pub last_pause: Duration,
    /// Time of the longest stop.
    pub longest_pause: Duration,
    /// Number of times that a mutator has waited at a safepoint, because the limit was reached.
    pub stalls: u64,
    /// Time of these waits, in all.
    pub stalled: Duration,
    /// Time of the longest of them.
    pub longest_stall: Duration,
    /// Number of loads of a reference that found the object by its entry, because the reference did not
    /// say where it was, or it or its entry was not at hand. Mutators add theirs 64 at a time.
    pub slow_loads: u64,
    /// Loads among these whose reference led to another place than where the object was.
    pub wrong_guesses: u64,
    /// Histogram of the stops. The classes are shorter than 2 µs, shorter than 4 µs, and so on; the
    /// last one has all longer stops.
    pub pause_counts: [u64; GcStats::PAUSE_CLASSES],
}

impl GcStats {
    /// Number of classes of [`GcStats::pause_counts`].
    pub const PAUSE_CLASSES: usize = 20;

    /// Returns a time that this share of the stops, between 0 and 1, did not exceed: the upper end
    /// of a class, so up to twice as much as it could be.
    pub fn pause_quantile(&self, share: f64) -> Duration {
        let all: u64 = self.pause_counts.iter().sum();
        let wanted = (all as f64 * share).ceil() as u64;
        let mut counted = 0;
        for (class, count) in self.pause_counts.iter().enumerate() {
            counted += count;
            if counted >= wanted && counted > 0 {
                return Duration::from_micros(2 << class).min(self.longest_pause);
            }
        }
        self.longest_pause
    }

    /// Returns the text for the [notice](farfield_core::notice) of the far heap, which keeps
    /// half of its room for it.
    pub(crate) fn lines(&self) -> String {
        notice_lines!("gc_", GcStats, self;
            numbers limit_bytes used_bytes roots collections given_up live_objects live_bytes traced_at_servers
            read_pages brought_pages arrived_objects flushed_pages freed_pages moved_objects moved_bytes
            moved_at_servers evacuation_read_pages server_moves_given_up moves_given_up pauses stalls slow_loads
            wrong_guesses;
            durations last_collection waited paused last_pause longest_pause stalled longest_stall;
            lists pause_counts)
    }

    fn count_pause(&mut self, pause: Duration) {
        let micros = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX).max(1);
        self.pause_counts[(micros.ilog2() as usize).min(Self::PAUSE_CLASSES - 1)] += 1;
        self.pauses += 1;
        self.paused += pause;
        self.last_pause = pause;
        self.longest_pause = self.longest_pause.max(pause);
    }
}

/// Counters of collections.
#[derive(Default)]
pub(crate) struct CollectionCounters(Mutex<GcStats>);

impl CollectionCounters {
    fn update(&self, change: impl FnOnce(&mut GcStats)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Counts a collection whose objects are marked.
    pub(crate) fn count(&self, found: &LiveHeap) {
        self.update(|stats| {
            stats.collections += 1;
            stats.live_objects = found.objects;
            stats.live_bytes = found.bytes;
            stats.traced_at_servers = found.traced_at_servers;
            stats.read_pages = found.read_pages;
            stats.brought_pages = found.brought_pages;
            stats.arrived_objects = found.arrived_objects;
            stats.waited = found.waited;
        });
    }

    pub(crate) fn count_flushed(&self, pages: u64) {
        self.update(|stats| stats.flushed_pages += pages);
    }

    pub(crate) fn count_freed(&self, pages: u64) {
        self.update(|stats| stats.freed_pages += pages);
    }

    pub(crate) fn count_moved(&self, moved: &MovedObjects, is_given_up: bool) {
        self.update(|stats| {
            stats.moved_objects += moved.objects;
            stats.moved_bytes += moved.bytes;
            stats.moved_at_servers += moved.at_servers;
            stats.evacuation_read_pages += moved.read_pages;
            stats.server_moves_given_up += moved.refused_calls;
            stats.freed_pages += moved.pages;
            stats.moves_given_up += u64::from(is_given_up);
        });
    }

    pub(crate) fn count_time(&self, time: Duration) {
        self.update(|stats| stats.last_collection = time);
    }

    pub(crate) fn count_pause(&self, pause: Duration) {
        self.update(|stats| stats.count_pause(pause));
    }

    /// Counts a wait of a mutator for memory.
    pub(crate) fn count_stall(&self, stall: Duration) {
        self.update(|stats| {
            stats.stalls += 1;
            stats.stalled += stall;
            stats.longest_stall = stats.longest_stall.max(stall);
        });
    }

    /// Counts loads that took the long way, and those among them whose guess was wrong.
    pub(crate) fn count_slow_loads(&self, loads: u64, wrong: u64) {
        self.update(|stats| {
            stats.slow_loads += loads;
            stats.wrong_guesses += wrong;
        });
    }

    pub(crate) fn count_given_up(&self) {
        self.update(|stats| stats.given_up += 1);
    }

    /// Returns the statistics of a heap with this limit and this use, in pages, and with these roots.
    pub(crate) fn stats(&self, limit: u64, used: u64, roots: &RootTable) -> GcStats {
        let counted = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (limit_bytes, used_bytes) = (Pages::bytes(limit), Pages::bytes(used));
        GcStats { limit_bytes, used_bytes, roots: roots.len() as u64, ..counted }
    }
}

/// Time that a mutator has lost at a safepoint, where it waited for the end of a stop, or for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SafepointWait {
    /// Thread of the mutator.
    pub thread: ThreadId,
    /// Moment at which the wait began.
    pub begun: Instant,
    /// Length of the wait.
    pub time: Duration,
}

/// Recorder of the waits of mutators. It keeps none until it is told how many.
#[derive(Default)]
pub(crate) struct WaitRecorder(Mutex<RecordedWaits>);

#[derive(Default)]
struct RecordedWaits {
    most: usize,
    waits: Vec<SafepointWait>,
}

impl WaitRecorder {
    fn lock(&self) -> MutexGuard<'_, RecordedWaits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all waits, and keeps so many from now on.
    pub(crate) fn begin(&self, most: usize) {
        *self.lock() = RecordedWaits { most, waits: Vec::new() };
    }

    /// Adds a wait of the calling thread, which ends now.
    pub(crate) fn add(&self, begun: Instant) {
        let wait = SafepointWait { thread: thread::current().id(), begun, time: begun.elapsed() };
        let mut recorded = self.lock();
        if recorded.waits.len() < recorded.most {
            recorded.waits.push(wait);
        }
    }

    pub(crate) fn waits(&self) -> Vec<SafepointWait> {
        self.lock().waits.clone()
    }
}

#[cfg(test)]
mod tests {
    //! Guards against quantiles that are below what was measured.
    use super::*;

    #[test]
    fn a_notice_has_room_for_any_numbers() {
        let any = Duration::from_nanos(u64::MAX);
        let stats =
            GcStats { last_collection: any, pause_counts: [u64::MAX; GcStats::PAUSE_CLASSES], ..GcStats::default() };
        let text = stats.lines();
        assert!(
            text.contains(&format!("gc_last_collection_ns {}\n", u64::MAX)) && text.contains("gc_roots 0\n"),
            "{text}"
        );
        // Each number can take as many digits.
        assert!(text.len() + 20 * text.lines().count() < farfield_core::notice::TEXT_BYTES_MAX / 2);
    }

    #[test]
    fn quantiles_of_stops_are_upper_ends_of_classes() {
        let mut stats = GcStats::default();
        assert_eq!(stats.pause_quantile(0.99), Duration::ZERO);
        for micros in (1..=99).chain([5000]) {
            stats.count_pause(Duration::from_micros(micros));
        }
        assert_eq!(stats.pause_counts.iter().sum::<u64>(), 100);
        assert_eq!(stats.pause_quantile(0.0), Duration::from_micros(2));
        assert_eq!(stats.pause_quantile(0.5), Duration::from_micros(64));
        assert_eq!(stats.pause_quantile(0.99), Duration::from_micros(128));
        assert_eq!(stats.pause_quantile(1.0), Duration::from_micros(5000));
        stats.count_pause(Duration::from_secs(1000));
        assert_eq!(stats.pause_quantile(1.0), Duration::from_micros(2 << 19));
    }
}
