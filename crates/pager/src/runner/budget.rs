//! Changes a job's near budget while it runs, so that the job's slowdown stays below a given
//! factor. It measures what [`farfield_core::policy::budget_controller`] decides by.

use super::{JobTotals, RunnerBlock, machine, sys};
use crate::control::{BUCKETS, bucket_floor};
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::policy::budget_controller::{ActivityWindow, BudgetController, Cadence, WINDOW};
use std::collections::BTreeMap;
use std::time::Instant;

/// Cost of a first touch in nanoseconds that a program pays also without far memory.
const FIRST_TOUCH_NS: f64 = 1200.0;
/// Cost of a fault in nanoseconds for the program, beside our handler. It is made up of the
/// kernel's signal and the way back, 2.6 µs (probe `signal_fault`), and caches that it finds cold.
/// In the median programs lose 4.2 µs a fault beside the handler's time (`docs/design/profile.md`).
const SIGNAL_NS: f64 = 4200.0;

/// Slowdown to hold, and the bounds for holding it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SloOptions {
    /// Largest allowed ratio of the program's run time to its own time without far memory.
    pub slo: f64,
    /// Times at which the budget is decided.
    pub cadence: Cadence,
    /// Budget at the start, in bytes; `near_limit_bytes` is the most that it may become.
    pub near_start_bytes: u64,
    /// Whether the pool where the job begins is the best of those that it may have, by
    /// measurement.
    pub is_compared: bool,
}

/// Result of holding a slowdown, for the report.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
#[allow(missing_docs, reason = "docs/cli.md describes each field")]
pub struct SloReport {
    pub slo: f64,
    pub slowdown: f64,
    pub changes: u32,
    pub near_limit_last_bytes: u64,
    pub pool_moves: u32,
}

pub(super) struct BudgetDriver {
    controller: BudgetController,
    slo: f64,
    changes: u32,
    last: Instant,
    before: Option<JobTotals>,
    /// Processor time of each living process at the end of the last window, in nanoseconds.
    busy: BTreeMap<u32, u64>,
}

impl BudgetDriver {
    pub(super) fn new(options: &SloOptions, most_bytes: u64) -> BudgetDriver {
        let start = options.near_start_bytes.clamp(machine::NEAR_BYTES_MIN, most_bytes);
        let controller =
            BudgetController::new(options.slo, options.cadence, start, machine::NEAR_BYTES_MIN, most_bytes);
        let (busy, last) = (BTreeMap::new(), Instant::now());
        BudgetDriver { controller, slo: options.slo, changes: 0, last, before: None, busy }
    }

    /// Returns the budget in bytes.
    pub(super) fn near_bytes(&self) -> u64 {
        self.controller.near_bytes()
    }

    /// Changes the most that the budget may be. Returns the budget in bytes.
    pub(super) fn limit_to(&mut self, most_bytes: u64) -> u64 {
        self.controller.limit_to(most_bytes)
    }

    /// Decides the budget anew if a window is over. Returns the window that has ended, if one has.
    pub(super) fn update(
        &mut self,
        control: &RunnerBlock,
        totals: impl FnOnce() -> JobTotals,
        pids: impl Iterator<Item = u32>,
    ) -> Option<ActivityWindow> {
        if self.last.elapsed() < WINDOW {
            return None;
        }
        self.last = Instant::now();
        let totals = totals();
        let busy = |pid| Some((pid, sys::processor_time(pid)?.as_nanos() as u64));
        let now: BTreeMap<u32, u64> = pids.filter_map(busy).collect();
        let busy_ns = now.iter().map(|(pid, ns)| ns.saturating_sub(*self.busy.get(pid).unwrap_or(&0))).sum();
        self.busy = now;
        Some(self.decide(control, totals, busy_ns))
    }

    fn decide(&mut self, control: &RunnerBlock, totals: JobTotals, busy_ns: u64) -> ActivityWindow {
        let window = window(&totals, self.before.as_ref(), busy_ns);
        self.before = Some(totals);
        if let Some(near) = self.controller.on_window(window) {
            self.changes += 1;
            control.config().near_limit_bytes.store(near, Ordering::Relaxed);
        }
        window
    }

    /// Returns the result so far, with the number of moves to another pool.
    pub(super) fn report(&self, pool_moves: u32) -> SloReport {
        let (slowdown, near_limit_last_bytes) = (self.controller.slowdown(), self.controller.near_bytes());
        SloReport { slo: self.slo, slowdown, changes: self.changes, near_limit_last_bytes, pool_moves }
    }
}

/// Returns the events between two readings as a window.
pub(super) fn window(now: &JobTotals, before: Option<&JobTotals>, busy_ns: u64) -> ActivityWindow {
    let since = |name: &str| now.count(name).saturating_sub(before.map_or(0, |before| before.count(name))) as f64;
    let served_ns = total_ns(&now.fault_ns_since(before)) + since("faults") * SIGNAL_NS;
    ActivityWindow {
        busy_ns: busy_ns as f64,
        waited_ns: (served_ns - since("first_touches") * FIRST_TOUCH_NS).max(0.0),
        faults: since("faults"),
        near_bytes: now.near_bytes,
        all_bytes: now.near_bytes + now.far_bytes,
        demand_reads: since("demand_reads"),
        moved_bytes: (since("pages_in") + since("pages_out")) * PAGE_BYTES as f64,
    }
}

/// Returns the sum of all times in a histogram, in nanoseconds, by the middle of each bucket.
pub(super) fn total_ns(counts: &[u64; BUCKETS]) -> f64 {
    let middle = |bucket: usize| (bucket_floor(bucket) + bucket_floor(bucket + 1)) as f64 / 2.0;
    counts
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0)
        .map(|(bucket, &count)| middle(bucket) * count as f64)
        .sum()
}

#[cfg(test)]
mod tests {
    //! Danger: waiting that is counted twice, or not at all.
    use super::*;
    use crate::config::Capture;
    use crate::control::{FaultMode, bucket_of};
    use crate::runner::{Settings, create_control};
    use std::time::Duration;

    #[test]
    fn a_window_is_what_happened_since_the_last() {
        let settings = Settings {
            near_limit_bytes: 1 << 30,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls: vec![],
            token: vec![],
        };
        let control = create_control(&settings).unwrap();
        let fault = |number: u64, ns: u64| {
            control.past.faults.fetch_add(number, Ordering::Relaxed);
            control.past.fault_ns[bucket_of(ns)].fetch_add(number, Ordering::Relaxed);
        };
        fault(1000, 10_000);
        control.near_bytes.store(5 << 20, Ordering::Relaxed);
        control.far_bytes.store(7 << 20, Ordering::Relaxed);
        let first = JobTotals::read(&control);
        let seen = window(&first, None, 5);
        assert_eq!((seen.busy_ns, seen.faults, seen.near_bytes, seen.all_bytes), (5.0, 1000.0, 5 << 20, 12 << 20));
        let (ours, signals) = (1e7, 1000.0 * SIGNAL_NS);
        assert!(seen.waited_ns > 0.87 * ours + signals && seen.waited_ns < 1.13 * ours + signals, "{seen:?}");
        fault(100, 1_000_000);
        control.past.first_touches.fetch_add(50, Ordering::Relaxed);
        let seen = window(&JobTotals::read(&control), Some(&first), 0);
        assert!(seen.faults == 100.0 && seen.waited_ns > 0.87e8 && seen.waited_ns < 1.13e8, "{seen:?}");
    }

    #[test]
    fn lies_about_what_happened_leave_the_budget_within_its_bounds() {
        let settings = Settings {
            near_limit_bytes: 100 << 20,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls: vec![],
            token: vec![],
        };
        let control = create_control(&settings).unwrap();
        let options =
            SloOptions { slo: 1.4, cadence: Cadence::Periodic, near_start_bytes: 100 << 20, is_compared: true };
        let mut driver = BudgetDriver::new(&options, 1 << 30);
        let lies = [u64::MAX, 0, 1 << 63, 7, i64::MAX as u64];
        for round in 0..200 {
            let lie = |at: usize| lies[(round + at) % lies.len()];
            control.near_bytes.store(lie(0) as i64, Ordering::Relaxed);
            control.far_bytes.store(lie(1) as i64, Ordering::Relaxed);
            control.past.faults.store(lie(2), Ordering::Relaxed);
            control.past.first_touches.store(lie(3), Ordering::Relaxed);
            control.past.demand_reads.store(lie(4), Ordering::Relaxed);
            control.past.fault_ns.iter().enumerate().for_each(|(at, count)| count.store(lie(at), Ordering::Relaxed));
            driver.decide(&control, JobTotals::read(&control), lie(3) >> 32);
            let limit = control.config().near_limit() as u64;
            assert!((machine::NEAR_BYTES_MIN..=1 << 30).contains(&limit), "{limit}");
        }
        let report = driver.report(0);
        assert!(serde_json::to_string(&report).is_ok() && !report.slowdown.is_nan(), "{report:?}");
    }

    #[test]
    fn processor_time_is_that_of_the_process() {
        let begin = sys::processor_time(std::process::id()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut x = 1u64;
        while sys::processor_time(std::process::id()).unwrap() < begin + Duration::from_millis(20) {
            assert!(Instant::now() < deadline);
            (0..1_000_000).for_each(|i| x = std::hint::black_box(x.wrapping_mul(i | 1)));
        }
        assert!([0, u32::MAX].iter().all(|&pid| sys::processor_time(pid).is_none()));
    }

    #[test]
    fn the_budget_of_a_job_that_waits_grows_and_of_one_that_does_not_shrinks() {
        let settings = Settings {
            near_limit_bytes: 100 << 20,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls: vec![],
            token: vec![],
        };
        let control = create_control(&settings).unwrap();
        control.near_bytes.store(100 << 20, Ordering::Relaxed);
        control.far_bytes.store(100 << 20, Ordering::Relaxed);
        let options =
            SloOptions { slo: 1.4, cadence: Cadence::EventDriven, near_start_bytes: 100 << 20, is_compared: true };
        let mut driver = BudgetDriver::new(&options, 1 << 30);
        let mut step = |waited_ns: u64| {
            control.past.fault_ns[bucket_of(waited_ns)].fetch_add(1, Ordering::Relaxed);
            driver.decide(&control, JobTotals::read(&control), 1_000_000_000);
            let limit = control.config().near_limit_bytes.load(Ordering::Relaxed);
            // The job does what it is told.
            control.near_bytes.fetch_min(limit as i64, Ordering::Relaxed);
            limit
        };
        let starved = step(900_000_000);
        assert!(starved > 100 << 20, "{starved}");
        assert_eq!(step(8), starved, "what is lost already counts");
        let calm = (0..200).map(|_| step(8)).last().unwrap();
        assert!(calm < 90 << 20, "{calm}");
        let report = driver.report(0);
        assert!(
            report.slo == 1.4 && report.slowdown < 1.4 && report.changes > 1 && report.near_limit_last_bytes == calm
        );
    }
}
