//! Record of what finished runs of a program have shown, by which the next run claims.
//!
//! A run shows one point of its curve: its slowdown with the near memory that it had. Points are kept
//! in bytes, because a later run may ask for more or less memory. A point that is measured again, or
//! close to an old one, moves halfway. The claim of the next run then has the [learned](super::learned)
//! curve, so its agent need not find out anew how much the program minds.

use super::claim::{JobClaim, POINTS_MAX};
use super::job::RunTime;
use super::learned::LearnedCurve;
use crate::policy::curve::Point;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Version of the record.
pub const HISTORY_VERSION: u32 = 1;
/// Number of runs whose peaks are kept.
const PEAKS_MAX: usize = 8;
/// Part of the newest run time in the mean.
const NEW_PART: f64 = 0.5;
/// Memory beside the highest peak that a program is advised to ask for, as a part of it.
const SPARE_PART: u64 = 8;
/// Part of the memory asked for below which nobody is advised to ask for less.
const ADVISED_BELOW: f64 = 0.8;

/// Slowdown with an amount of near memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HistoryPoint {
    /// Near memory in bytes.
    pub near_bytes: u64,
    /// Time as a multiple of that without waiting for far memory.
    pub slowdown: f64,
}

/// Record of finished runs of one program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunHistory {
    /// [`HISTORY_VERSION`].
    pub version: u32,
    /// Number of runs.
    pub runs: u64,
    /// Upper bound of the memory, near and far, that each of the last runs had, in bytes. The newest is last.
    pub peak_bytes: Vec<u64>,
    /// Run time in seconds with all memory near, by the runs that ended without an error.
    pub seconds: Option<f64>,
    /// Slowdowns that were measured, by near memory.
    pub slowdowns: Vec<HistoryPoint>,
}

/// Run that has ended, as its runner saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FinishedRun {
    /// Memory that the run asked for, in bytes.
    pub memory_bytes: u64,
    /// Upper bound of the memory that it had, near and far, in bytes.
    pub peak_bytes: u64,
    /// Slowdown with the near memory that it could have; `None` if it did too little for a number.
    pub slowdown: Option<HistoryPoint>,
    /// Seconds that it took; `None` if it ended with an error.
    pub seconds: Option<f64>,
}

impl Default for RunHistory {
    fn default() -> RunHistory {
        RunHistory { version: HISTORY_VERSION, runs: 0, peak_bytes: Vec::new(), seconds: None, slowdowns: Vec::new() }
    }
}

impl RunHistory {
    /// Adds a run. Numbers that make no sense are left out.
    pub fn add(&mut self, run: &FinishedRun) {
        self.runs = self.runs.saturating_add(1);
        if run.peak_bytes > 0 {
            self.peak_bytes.push(run.peak_bytes);
            let old = self.peak_bytes.len().saturating_sub(PEAKS_MAX);
            self.peak_bytes.drain(..old);
        }
        let Some(HistoryPoint { near_bytes, slowdown }) = run.slowdown.filter(|point| point.slowdown >= 1.0) else {
            return;
        };
        // What a run took is said with all memory near.
        if let Some(new) = run.seconds.map(|seconds| seconds / slowdown).filter(|new| *new > 0.0 && new.is_finite()) {
            self.seconds = Some(self.seconds.map_or(new, |old| old + (new - old) * NEW_PART));
        }
        let memory_bytes = run.memory_bytes;
        if near_bytes >= memory_bytes {
            return;
        }
        let mut curve = self.curve(memory_bytes);
        let beyond = self.slowdowns.iter().filter(|point| point.near_bytes >= memory_bytes).copied();
        let beyond: Vec<HistoryPoint> = beyond.collect();
        curve.observe(Point { near: share(near_bytes, memory_bytes), slowdown });
        let point_of = |point: Point| HistoryPoint {
            near_bytes: crate::cast::saturating_u64(point.near * memory_bytes as f64),
            slowdown: point.slowdown,
        };
        self.slowdowns = curve.points().map(point_of).chain(beyond).take(POINTS_MAX).collect();
    }

    /// Returns a claim that also says what earlier runs have shown. Memory and least are the same. A
    /// claim of nonsense is left as it is, and so is one to which nothing can be added.
    pub fn improve(&self, claim: &JobClaim) -> JobClaim {
        let seconds = self.seconds.filter(|seconds| *seconds > 0.0 && seconds.is_finite()).or(claim.seconds);
        let timed = JobClaim { seconds, ..claim.clone() };
        let Ok(foretold) = timed.class() else { return claim.clone() };
        let curve = self.curve(claim.memory_bytes);
        if curve.points().next().is_none() {
            return timed;
        }
        let learned = curve.class(&foretold);
        let RunTime::Measured { curve, .. } = learned.run_time() else { return timed };
        let improved = JobClaim { slowdowns: thinned(curve.points()), ..timed };
        if improved.class().is_ok() { improved } else { claim.clone() }
    }

    /// Returns the memory that would have been enough for the last runs, with some to spare, in bytes;
    /// `None` if runs that ask for `memory_bytes` need not ask for less.
    pub fn enough_bytes(&self, memory_bytes: u64) -> Option<u64> {
        let peak = *self.peak_bytes.iter().max()?;
        let enough = peak.saturating_add(peak / SPARE_PART);
        ((enough as f64) < memory_bytes as f64 * ADVISED_BELOW).then_some(enough)
    }

    /// Returns the measured points as shares of this memory. With all of it near nothing is slow.
    fn curve(&self, memory_bytes: u64) -> LearnedCurve {
        let mut curve = LearnedCurve::default();
        for point in self.slowdowns.iter().filter(|point| point.near_bytes < memory_bytes).take(POINTS_MAX) {
            curve.observe(Point { near: share(point.near_bytes, memory_bytes), slowdown: point.slowdown });
        }
        curve
    }
}

fn share(bytes: u64, memory_bytes: u64) -> f64 {
    bytes as f64 / memory_bytes as f64
}

/// Returns at most as many points as a claim may have, with the first and the last.
fn thinned(points: &[Point]) -> Vec<Point> {
    let last = points.len().saturating_sub(1);
    match points.len() <= POINTS_MAX {
        true => points.to_vec(),
        false => (0..POINTS_MAX).map(|index| points[index * last / (POINTS_MAX - 1)]).collect(),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a claim that a wrong record makes impossible, and against runs that teach nothing.
    use super::*;

    const GIB: u64 = 1 << 30;

    fn claim(memory: u64, least: u64) -> JobClaim {
        JobClaim { memory_bytes: memory, least_bytes: least, slowdowns: Vec::new(), seconds: None }
    }

    fn run(memory: u64, peak: u64, near: u64, slowdown: f64) -> FinishedRun {
        let slowdown = Some(HistoryPoint { near_bytes: near, slowdown });
        FinishedRun { memory_bytes: memory, peak_bytes: peak, slowdown, seconds: Some(100.0) }
    }

    fn slowdown(claim: &JobClaim, near: f64) -> f64 {
        let class = claim.class().unwrap();
        class.run_time().at(near) / class.seconds()
    }

    #[test]
    fn without_runs_the_claim_is_what_it_was() {
        let asked = claim(8 * GIB, 2 * GIB);
        assert_eq!(RunHistory::default().improve(&asked), asked);
        let nonsense = claim(GIB, 2 * GIB);
        let mut history = RunHistory::default();
        history.add(&run(8 * GIB, 7 * GIB, 4 * GIB, 1.25));
        assert_eq!(history.improve(&nonsense), nonsense);
    }

    #[test]
    fn the_next_run_claims_what_earlier_ones_have_shown() {
        let (mut history, asked) = (RunHistory::default(), claim(8 * GIB, 2 * GIB));
        assert!(slowdown(&asked, 0.5) >= 2.0, "a job that knows nothing is as slow as its share is small");
        history.add(&run(8 * GIB, 7 * GIB, 4 * GIB, 1.25));
        let next = history.improve(&asked);
        assert!((slowdown(&next, 0.5) - 1.25).abs() < 1e-6, "{next:?}");
        assert!(slowdown(&next, 0.25) < 2.5 && slowdown(&next, 0.25) >= 1.25, "the rest keeps its shape");
        assert_eq!((next.memory_bytes, next.least_bytes, next.seconds), (8 * GIB, 2 * GIB, Some(80.0)));
        // Another point, and the first one anew: it moves halfway.
        history.add(&run(8 * GIB, 6 * GIB, 2 * GIB, 3.0));
        history.add(&run(8 * GIB, 6 * GIB, 4 * GIB, 1.75));
        let next = history.improve(&asked);
        assert!((slowdown(&next, 0.5) - 1.5).abs() < 1e-6 && (slowdown(&next, 0.25) - 3.0).abs() < 1e-6, "{next:?}");
        // A run that asks for less has the same curve by bytes.
        let less = history.improve(&claim(6 * GIB, 2 * GIB));
        assert!((slowdown(&less, 1.0 / 3.0) - 3.0).abs() < 1e-6, "{less:?}");
        assert!((slowdown(&less, 2.0 / 3.0) - 1.5).abs() < 1e-6, "{less:?}");
        let all_near = history.improve(&claim(2 * GIB, GIB));
        assert_eq!(slowdown(&all_near, 0.5), 2.0, "nothing was measured below");
        assert_eq!((history.runs, history.peak_bytes.as_slice()), (3, &[7 * GIB, 6 * GIB, 6 * GIB][..]));
    }

    #[test]
    fn who_asks_for_much_more_than_it_uses_is_told_what_is_enough() {
        let mut history = RunHistory::default();
        assert_eq!(history.enough_bytes(8 * GIB), None);
        (0..20).for_each(|_| history.add(&run(8 * GIB, 2 * GIB, GIB, 1.0)));
        assert_eq!(history.enough_bytes(8 * GIB), Some(2 * GIB + GIB / 4));
        assert_eq!(history.enough_bytes(GIB * 5 / 2), None, "that is what it asks for already");
        history.add(&run(8 * GIB, 7 * GIB, GIB, 1.0));
        assert_eq!(history.enough_bytes(8 * GIB), None, "one of the last runs needed it");
        (0..PEAKS_MAX).for_each(|_| history.add(&run(8 * GIB, 2 * GIB, GIB, 1.0)));
        assert_eq!(history.enough_bytes(8 * GIB), Some(2 * GIB + GIB / 4), "long ago");
    }

    #[test]
    fn any_record_makes_a_claim_that_an_agent_takes() {
        let mut random = fastrand::Rng::with_seed(11);
        let strange = [0.0, -1.0, 1.0, f64::NAN, f64::INFINITY, 1e300, 0.5];
        for _ in 0..3000 {
            let mut number = || match random.u8(..3) {
                0 => strange[random.usize(..strange.len())],
                _ => 1.0 + random.f64() * 20.0,
            };
            let mut history = RunHistory { seconds: Some(number()), ..RunHistory::default() };
            let numbers: Vec<f64> = (0..40).map(|_| number()).collect();
            for &slowdown in &numbers[..random.usize(..40)] {
                history.slowdowns.push(HistoryPoint { near_bytes: random.u64(..16 * GIB), slowdown });
            }
            for &slowdown in &numbers[..random.usize(..5)] {
                let peak = random.u64(..u64::MAX);
                history.add(&run(random.u64(..16 * GIB), peak, random.u64(..16 * GIB), slowdown));
            }
            let memory = 1 + random.u64(..16 * GIB);
            let mut asked = claim(memory, 1 + random.u64(..memory));
            if random.bool() {
                let least = asked.least_bytes as f64 / memory as f64;
                let step = |index: u64| (least + (1.0 - least) * index as f64 / 31.0).min(1.0);
                let point = |index| Point { near: step(index), slowdown: 1.0 + (31 - index) as f64 / 10.0 };
                asked.slowdowns = (0..32).map(point).collect();
            }
            let next = history.improve(&asked);
            assert!(next.class().is_ok() && next.slowdowns.len() <= POINTS_MAX, "{history:?}: {next:?}");
            assert!(history.slowdowns.len() <= 2 * POINTS_MAX, "{}", history.slowdowns.len());
        }
    }
}
