//! Which takes less time for objects that wait: to read their pages, or to have servers look at them.
//!
//! A page takes as long as it takes, for one object or for fifty; at a server, each object takes as
//! long. So servers are for objects that lie alone, and copies for pages with many.

use core::time::Duration;

/// Time that an object takes at servers, in nanoseconds, before any was looked at there.
const SERVER_NS: f64 = 1000.0;

/// Weight of the newest measurement.
const NEWEST: f64 = 0.5;

/// Decisions for servers after which pages are read once, to know what that would bring now.
const DECISIONS: u32 = 8;

/// Measured times of both.
pub(super) struct FarPace {
    /// Time of a page that is read, with what is traced for it, in nanoseconds; 0 before any was read.
    page_ns: f64,
    /// Objects that were traced for each page that was read.
    objects_per_page: f64,
    /// Time of an object at servers, in nanoseconds.
    server_ns: f64,
    /// Decisions for servers since pages were read.
    decisions: u32,
}

impl FarPace {
    /// Creates the record of nothing.
    pub(super) fn new() -> FarPace {
        FarPace { page_ns: 0.0, objects_per_page: 0.0, server_ns: SERVER_NS, decisions: 0 }
    }

    /// Adds pages that were read, after which so many objects were traced.
    pub(super) fn add_pages(&mut self, pages: u64, objects: u64, time: Duration) {
        if pages > 0 {
            let (page_ns, per_page) = (time.as_nanos() as f64 / pages as f64, objects as f64 / pages as f64);
            let weight = if self.page_ns == 0.0 { 1.0 } else { NEWEST };
            self.page_ns += (page_ns - self.page_ns) * weight;
            self.objects_per_page += (per_page - self.objects_per_page) * weight;
        }
    }

    /// Adds objects that servers have looked at.
    pub(super) fn add_at_servers(&mut self, objects: usize, time: Duration) {
        let of_object = time.as_nanos() as f64 / objects.max(1) as f64;
        self.server_ns += (of_object - self.server_ns) * NEWEST;
    }

    /// Decides whether servers look at what waits, so many objects for so many pages: they take less time.
    pub(super) fn decide_for_servers(&mut self, waiters: usize, pages: usize) -> bool {
        // What waits for a page leads to more in it.
        let per_page = (waiters as f64 / pages.max(1) as f64).max(self.objects_per_page);
        let is_for_servers = self.decisions < DECISIONS && self.server_ns * per_page < self.page_ns;
        self.decisions = if is_for_servers { self.decisions + 1 } else { 0 };
        is_for_servers
    }
}

#[cfg(test)]
mod tests {
    //! Guards against servers that are asked for what is read faster, and the reverse.
    use super::*;

    #[test]
    fn servers_are_for_objects_that_lie_alone() {
        let mut pace = FarPace::new();
        assert!(!pace.decide_for_servers(10_000, 10_000), "nothing was read yet");
        pace.add_pages(64, 100, Duration::from_micros(64 * 5));
        assert!(pace.decide_for_servers(1000, 900) && pace.decide_for_servers(4000, 1000));
        assert!(!pace.decide_for_servers(6000, 1000) && !pace.decide_for_servers(500, 10));
        // They take half as long as was thought.
        (0..20).for_each(|_| pace.add_at_servers(1000, Duration::from_micros(500)));
        assert!(pace.decide_for_servers(9000, 1000) && !pace.decide_for_servers(11_000, 1000));
        // Now and then pages are read all the same.
        let asked = (0..90).filter(|_| pace.decide_for_servers(1000, 1000)).count();
        assert_eq!(asked, 80);
        // What was read has led to much in it.
        (0..20).for_each(|_| pace.add_pages(64, 64 * 50, Duration::from_micros(64 * 8)));
        assert!(!pace.decide_for_servers(1000, 1000));
        // A server that takes long is not asked.
        pace.add_pages(64, 64, Duration::from_millis(1));
        pace.add_at_servers(1, Duration::from_secs(1));
        assert!(!pace.decide_for_servers(1000, 1000));
    }
}
