//! What is counted for `stats`.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) connections: AtomicU64,
    pub(crate) gets: AtomicU64,
    pub(crate) hits: AtomicU64,
    pub(crate) sets: AtomicU64,
    pub(crate) evictions: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counts {
    /// Names and values.
    pub(crate) fn stats(&self, now: u64) -> Vec<(&'static str, u64)> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("pid", u64::from(std::process::id())),
            ("time", now),
            ("curr_connections", load(&self.connections)),
            ("cmd_get", load(&self.gets)),
            ("cmd_set", load(&self.sets)),
            ("get_hits", load(&self.hits)),
            ("get_misses", load(&self.gets).saturating_sub(load(&self.hits))),
            ("evictions", load(&self.evictions)),
        ]
    }
}
