//! Statistics of a collected heap.

use crate::collector::{LiveHeap, MovedObjects};
use core::time::Duration;
use std::sync::{Mutex, PoisonError};

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
    /// Pages that collections have written, so that servers find what is near.
    pub flushed_pages: u64,
    /// Pages that collections have given back.
    pub freed_pages: u64,
    /// Objects that collections have moved out of sparse pages.
    pub moved_objects: u64,
    /// Bytes of these objects.
    pub moved_bytes: u64,
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
            stats.freed_pages += moved.pages;
            stats.moves_given_up += u64::from(is_given_up);
        });
    }

    pub(crate) fn count_time(&self, time: Duration) {
        self.update(|stats| stats.last_collection = time);
    }

    pub(crate) fn count_pause(&self, pause: Duration) {
        self.update(|stats| {
            stats.pauses += 1;
            stats.paused += pause;
            stats.last_pause = pause;
            stats.longest_pause = stats.longest_pause.max(pause);
        });
    }

    pub(crate) fn count_given_up(&self) {
        self.update(|stats| stats.given_up += 1);
    }

    pub(crate) fn stats(&self) -> GcStats {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
