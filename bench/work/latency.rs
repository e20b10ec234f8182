//! Requests that arrive when they do, whether or not those before them have been answered: an open loop, with Poisson's law. A request's
//! time runs from the moment at which it was to begin, so that those who wait behind a slow one are late, too.

use crate::random::Random;
use crate::{Options, Outcome};
use anyhow::Result;
use farfield_os::process;

/// Serves `options.ops` requests and times them: one after the other, or in an open loop if they have a rate.
pub(crate) fn timed(outcome: &mut Outcome, options: &Options, mut serve: impl FnMut() -> Result<()>) -> Result<()> {
    if options.rate_per_s > 0 {
        return open_loop(outcome, options, serve);
    }
    outcome.phase("request", options.ops, || (0..options.ops).try_for_each(|_| serve()))
}

/// Serves `options.ops` requests, `rate_per_s` of them in a second.
fn open_loop(outcome: &mut Outcome, options: &Options, serve: impl FnMut() -> Result<()>) -> Result<()> {
    let arrivals = Arrivals::new(options.rate_per_s, options.seed);
    let (ops, now) = (options.ops, || {
        // The heap's own threads need a processor while nobody asks for anything.
        std::thread::yield_now();
        process::now_ns()
    });
    let mut times = outcome.phase("request", ops, || run(arrivals, ops, now, serve))?;
    times.sort_unstable();
    for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999)] {
        outcome.figure(&format!("latency_ns_{name}"), percentile(&times, share) as f64);
    }
    outcome.figure("requests_per_s", outcome.per_second("request"));
    Ok(())
}

/// How long each request took, in ns, by this clock.
fn run(
    mut arrivals: Arrivals,
    ops: u64,
    mut now: impl FnMut() -> u64,
    mut serve: impl FnMut() -> Result<()>,
) -> Result<Vec<u64>> {
    let mut times = Vec::with_capacity(ops as usize);
    let started = now();
    for _ in 0..ops {
        let due = started + arrivals.next();
        while now() < due {
            std::hint::spin_loop();
        }
        serve()?;
        times.push(now() - due);
    }
    Ok(times)
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

    /// Times of requests, the first of which takes `first_ns` and the others 1 µs, by a clock of its own.
    fn times(rate_per_s: u64, first_ns: u64) -> Vec<u64> {
        let (clock, served) = (Cell::new(0), Cell::new(0));
        let now = || {
            clock.set(clock.get() + 10);
            clock.get()
        };
        let serve = || {
            clock.set(clock.get() + if served.get() == 0 { first_ns } else { 1000 });
            served.set(served.get() + 1);
            Ok(())
        };
        run(Arrivals::new(rate_per_s, 3), 1000, now, serve).unwrap()
    }

    #[test]
    fn who_waits_behind_a_slow_request_is_late() {
        let calm = times(100_000, 1000);
        let late = times(100_000, 2_000_000);
        // About 200 arrive meanwhile, and the last of them has waited least.
        assert!(late[1] > 1_900_000, "{}", late[1]);
        assert!(late[100] > 500_000 && late[100] < late[1]);
        assert_eq!(calm[999], late[999], "it has been made up for");
        assert!(calm.iter().all(|time| *time < 20_000));
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
