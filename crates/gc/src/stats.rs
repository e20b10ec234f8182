//! Statistics of a collected heap.

use crate::collector::LiveHeap;
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
    /// Pages that collections have given back.
    pub freed_pages: u64,
    /// Time that the last collection took, from the request to stop until mutators went on.
    pub last_pause: Duration,
    /// Longest time that a collection took.
    pub longest_pause: Duration,
}

/// Counters of collections.
#[derive(Default)]
pub(crate) struct CollectionCounters(Mutex<GcStats>);

impl CollectionCounters {
    fn update(&self, change: impl FnOnce(&mut GcStats)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn count(&self, found: &LiveHeap, pause: Duration) {
        self.update(|stats| {
            stats.collections += 1;
            stats.live_objects = found.objects;
            stats.live_bytes = found.bytes;
            stats.freed_pages += found.freed_pages;
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
