//! Requests that arrive when they do, whether or not those before them have been answered: an open loop, with Poisson's law. A request's
//! time runs from the moment at which it was to begin, so that those who wait behind a slow one are late, too.

use crate::random::Random;
use crate::{Options, Outcome};
use anyhow::Result;
use farfield_os::process;
use std::ops::Range;

/// Serves `options.ops` requests and times them: one after the other, or in an open loop if they have a rate.
pub(crate) fn timed(outcome: &mut Outcome, options: &Options, mut serve: impl FnMut() -> Result<()>) -> Result<()> {
    if options.rate_per_s > 0 {
        let load = Load { together: 1, ..Load::of(options) };
        return load.timed(outcome, "request", |_| serve());
    }
    outcome.phase("request", options.ops, || (0..options.ops).try_for_each(|_| serve()))
}

/// Requests in an open loop.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    ops: u64,
    rate_per_s: u64,
    /// Most that are served together: whatever has arrived while others were under way.
    together: u64,
    seed: u64,
}

impl Load {
    pub(crate) fn of(options: &Options) -> Load {
        Load { ops: options.ops, rate_per_s: options.rate_per_s, together: options.in_flight, seed: options.seed }
    }

    pub(crate) fn with_ops(self, ops: u64) -> Load {
        Load { ops, ..self }
    }

    /// Serves them, as a phase of this name, and says how late the answers came.
    pub(crate) fn timed(
        self,
        outcome: &mut Outcome,
        phase: &str,
        serve: impl FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let mut times = outcome.phase(phase, self.ops, || self.serve(serve))?;
        times.sort_unstable();
        for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999)] {
            outcome.figure(&format!("latency_ns_{name}"), percentile(&times, share) as f64);
        }
        outcome.figure("requests_per_s", outcome.per_second(phase));
        Ok(())
    }

    /// Serves them; how long each took, in ns.
    pub(crate) fn serve(self, serve: impl FnMut(Range<u64>) -> Result<()>) -> Result<Vec<u64>> {
        let now = || {
            // Others of this program need a processor while nobody asks for anything.
            std::thread::yield_now();
            process::now_ns()
        };
        self.run(now, serve)
    }

    /// The same by this clock.
    fn run(self, mut now: impl FnMut() -> u64, mut serve: impl FnMut(Range<u64>) -> Result<()>) -> Result<Vec<u64>> {
        let mut arrivals = Arrivals::new(self.rate_per_s, self.seed);
        let mut times = Vec::with_capacity(self.ops as usize);
        let mut arrived = Vec::with_capacity(self.together as usize);
        let started = now();
        let mut due = started + arrivals.next();
        while (times.len() as u64) < self.ops {
            let mut at = now();
            while at < due {
                std::hint::spin_loop();
                at = now();
            }
            let first = times.len() as u64;
            let most = self.together.min(self.ops - first);
            while due <= at && (arrived.len() as u64) < most {
                arrived.push(due);
                due = started + arrivals.next();
            }
            serve(first..first + arrived.len() as u64)?;
            let ended = now();
            times.extend(arrived.drain(..).map(|due| ended - due));
        }
        Ok(times)
    }
}

/// When requests arrive, in ns from the beginning.
struct Arrivals {
    random: Random,
    gap_ns: f64,
    at_ns: f64,
}

impl Arrivals {
    fn new(rate_per_s: u64, seed: u64) -> Arrivals {
        Arrivals { random: Random::new(seed ^ 0x0A12), gap_ns: 1e9 / rate_per_s as f64, at_ns: 0.0 }
    }

    fn next(&mut self) -> u64 {
        // Above 0, at most 1.
        let unit = ((self.random.next() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        self.at_ns -= self.gap_ns * unit.ln();
        self.at_ns as u64
    }
}

/// The least time that so many did not exceed.
fn percentile(sorted: &[u64], share: f64) -> u64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Times of requests, as many of them together as may be, and how many were. What is served first takes `first_ns`, the others 1 µs, by a
    /// clock of its own.
    fn times(rate_per_s: u64, together: u64, first_ns: u64) -> (Vec<u64>, Vec<u64>) {
        let (clock, mut rows) = (Cell::new(0), Vec::new());
        let now = || {
            clock.set(clock.get() + 10);
            clock.get()
        };
        let load = Load { ops: 1000, rate_per_s, together, seed: 3 };
        let times = load.run(now, |row| {
            assert_eq!(row.start, rows.iter().sum::<u64>(), "none is left out");
            clock.set(clock.get() + if rows.is_empty() { first_ns } else { 1000 });
            rows.push(row.end - row.start);
            Ok(())
        });
        (times.unwrap(), rows)
    }

    #[test]
    fn a_request_behind_a_slow_one_is_late() {
        let (calm, rows) = times(100_000, 1, 1000);
        let (late, _) = times(100_000, 1, 2_000_000);
        assert!(rows.len() == 1000 && rows.iter().all(|row| *row == 1));
        // About 200 arrive meanwhile, and the last of them has waited least.
        assert!(late[1] > 1_900_000, "{}", late[1]);
        assert!(late[100] > 500_000 && late[100] < late[1]);
        assert_eq!(calm[999], late[999], "it has been made up for");
        assert!(calm.iter().all(|time| *time < 20_000));
    }

    #[test]
    fn requests_that_arrived_meanwhile_are_served_together() {
        let (alone, _) = times(100_000, 1, 2_000_000);
        let (together, rows) = times(100_000, 64, 2_000_000);
        assert_eq!(rows.iter().sum::<u64>(), 1000);
        assert_eq!(rows[..4], [1, 64, 64, 64], "about 200 arrived meanwhile");
        assert_eq!(together[1..65].iter().max(), Some(&together[1]), "who came first has waited longest");
        assert!(together[100] + 50_000 < alone[100], "{} and {}", together[100], alone[100]);
    }

    #[test]
    fn arrivals_follow_poissons_law() {
        let mut arrivals = Arrivals::new(1_000_000, 7);
        let mut at: Vec<u64> = (0..100_000).map(|_| arrivals.next()).collect();
        assert!(at.is_sorted());
        let mean = at[at.len() - 1] as f64 / at.len() as f64;
        assert!((990.0..1010.0).contains(&mean), "{mean}");
        at.iter_mut().for_each(|at| *at /= 1000);
        let crowded = at.chunk_by(|one, next| one == next).filter(|chunk| chunk.len() >= 2).count() as f64;
        // Of 100,000 µs those with two or more: 1 - 2/e.
        assert!((crowded / 100_000.0 - 0.264).abs() < 0.01, "{crowded}");
    }

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let times: Vec<u64> = (1..=1000).collect();
        assert_eq!(percentile(&times, 0.5), 500);
        assert_eq!(percentile(&times, 0.999), 999);
        assert_eq!(percentile(&times, 1.0), 1000);
        assert_eq!(percentile(&[7], 0.5), 7);
    }
}
