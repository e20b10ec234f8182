//! Limit on the background transfers that a device is given at a time.
//!
//! Transfers that somebody waits for are never held back. The others fill what the device does at
//! once, and no more: transfers that queue inside a device only make the next demand read wait. As
//! in TCP Vegas, latency tells. While a transfer takes hardly longer than on an idle device, more
//! may be under way; when it takes much longer, fewer. The latency of the idle device is measured
//! again now and then, with few transfers under way.

/// Fewest transfers under way to which the limit falls.
pub(super) const DEPTH_MIN: usize = 4;
/// Most transfers under way to which the limit rises.
pub(super) const DEPTH_MAX: usize = 64;
/// Number of transfers after which the limit is decided anew.
const WINDOW: u32 = 32;
/// Number of windows from one measurement of the idle device to the next, and number that a
/// measurement takes.
const PROBE_EVERY: u32 = 128;
const PROBE_FOR: u32 = 4;
/// Most pages of a small transfer; larger ones have a time of their own.
const SMALL_PAGES: u64 = 4;

/// Limit on background transfers of one lane, and what it is decided by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    allowed: usize,
    /// Least time of a transfer since the device was measured last, for small and large ones, in
    /// ns.
    floor_ns: [u64; 2],
    /// Sum of times over floors, in 1/256, and the number of transfers in it.
    slowness: u64,
    seen: u32,
    /// Set if as many transfers were under way as allowed.
    was_full: bool,
    windows: u32,
}

impl Depth {
    pub(super) fn new() -> Depth {
        Depth { allowed: 16, floor_ns: [0; 2], slowness: 0, seen: 0, was_full: false, windows: 0 }
    }

    /// Returns the limit: another background transfer may start while fewer transfers are under
    /// way.
    pub(super) fn allowed(&self) -> usize {
        if self.is_probing() { DEPTH_MIN } else { self.allowed }
    }

    fn is_probing(&self) -> bool {
        self.windows % PROBE_EVERY < PROBE_FOR
    }

    /// Notes that a transfer of `pages` pages took `took_ns` while `under_way` were under way.
    pub(super) fn on_end(&mut self, pages: u64, took_ns: u64, under_way: usize) {
        let floor = &mut self.floor_ns[usize::from(pages > SMALL_PAGES)];
        if *floor == 0 || took_ns < *floor {
            *floor = took_ns.max(1);
        }
        // A transfer that hung says nothing about the others.
        self.slowness += (took_ns * 256 / *floor).min(64 * 256);
        self.seen += 1;
        self.was_full |= under_way >= self.allowed();
        if self.seen == WINDOW {
            self.decide();
        }
    }

    fn decide(&mut self) {
        let slowness = self.slowness / u64::from(self.seen);
        if self.is_probing() {
            // Only the floors change.
        } else if slowness > 3 * 256 {
            self.allowed -= self.allowed / 4;
        } else if slowness < 2 * 256 && self.was_full {
            self.allowed += 2;
        }
        self.allowed = self.allowed.clamp(DEPTH_MIN, DEPTH_MAX);
        self.windows = self.windows.wrapping_add(1);
        if self.windows.is_multiple_of(PROBE_EVERY) {
            self.floor_ns = [0; 2];
        }
        (self.slowness, self.seen, self.was_full) = (0, 0, false);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a depth that starves a fast device, or drowns a slow one.
    use super::*;

    /// What it settles at for a device that does `parallel` transfers at a time, each in 80 µs.
    fn settled(parallel: usize) -> usize {
        let mut depth = Depth::new();
        for _ in 0..(3 * PROBE_EVERY - 1) * WINDOW {
            let under_way = depth.allowed();
            let took = 80_000 * under_way.div_ceil(parallel) as u64;
            depth.on_end(1, took, under_way);
        }
        depth.allowed()
    }

    #[test]
    fn the_depth_settles_near_what_the_device_does_at_once() {
        assert_eq!(settled(1000), DEPTH_MAX);
        let narrow = settled(8);
        assert!((8..=26).contains(&narrow), "{narrow}");
        // Its idle time is measured with four under way.
        assert!(settled(1) <= 3 * DEPTH_MIN + 2);
    }

    #[test]
    fn the_depth_does_not_grow_without_demand() {
        let mut depth = Depth::new();
        for _ in 0..(PROBE_EVERY - 1) * WINDOW {
            depth.on_end(16, 80_000, 2);
        }
        assert_eq!(depth.allowed(), 16);
    }

    #[test]
    fn a_device_that_became_slower_is_measured_again() {
        let mut depth = Depth::new();
        depth.on_end(1, 10_000, 1);
        for _ in 0..(2 * PROBE_EVERY - 1) * WINDOW {
            let under_way = depth.allowed();
            depth.on_end(1, 100_000, under_way);
        }
        assert!(depth.allowed() > 32, "{}", depth.allowed());
    }
}
