//! Stages: a program prepares while its anonymous memory grows, and executes while it does not.
//!
//! A window that is unlike the one before begins a new stage: it grows and that one did not (or the
//! reverse), or faults come at twice or half its rate. There are two kinds only, as in the paper:
//! finer ones would only be noise that something reacts to.

use super::Sample;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Length of a window in a long run; a run is at least twenty windows.
pub const WINDOW_MS: u64 = 10_000;
const WINDOWS_MIN: u64 = 20;
/// Part of the peak that a window must add to be one of preparation.
const GROWTH: f64 = 0.02;
/// Factor between fault rates, in either direction, that means another stage …
const RATE_JUMP: f64 = 2.0;
/// … where the higher rate reaches this many faults per second.
const RATE_MIN: f64 = 1000.0;

/// Activity of a program in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageKind {
    /// The anonymous memory of the program grows.
    Preparation,
    /// The anonymous memory of the program does not grow.
    Execution,
}

/// A part of a run in which the program behaves alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStage {
    /// Kind of the stage.
    pub kind: StageKind,
    /// Start of the stage, since the start of the program.
    pub from_ms: u64,
    /// End of the stage, since the start of the program.
    pub to_ms: u64,
    /// Faults that the kernel served, per second.
    pub faults_per_s: f64,
    /// Anonymous memory at the end of the stage.
    pub anonymous_bytes: u64,
}

/// Returns the stages of a run.
pub(super) fn find(samples: &[Sample]) -> Vec<RunStage> {
    let Some(last) = samples.last() else {
        return Vec::new();
    };
    let peak = samples.iter().map(|sample| sample.anonymous_bytes).max().unwrap_or(0) as f64;
    let window_ms = (last.at_ms / WINDOWS_MIN).clamp(1, WINDOW_MS);
    let mut stages: Vec<RunStage> = Vec::new();
    let mut begin = &Sample::default();
    for sample in samples {
        let time_ms = sample.at_ms - begin.at_ms;
        if time_ms < window_ms && sample.at_ms < last.at_ms || time_ms == 0 {
            continue;
        }
        let grown = sample.anonymous_bytes as f64 - begin.anonymous_bytes as f64;
        let kind = if grown > peak * GROWTH { StageKind::Preparation } else { StageKind::Execution };
        let faults = sample.faults.saturating_sub(begin.faults) as f64;
        let window = RunStage {
            kind,
            from_ms: begin.at_ms,
            to_ms: sample.at_ms,
            faults_per_s: faults * 1000.0 / time_ms as f64,
            anonymous_bytes: sample.anonymous_bytes,
        };
        match stages.last_mut().filter(|stage| stage.is_like(&window)) {
            Some(stage) => stage.join(&window),
            None => stages.push(window),
        }
        begin = sample;
    }
    stages
}

impl RunStage {
    fn is_like(&self, next: &RunStage) -> bool {
        let (low, high) = (self.faults_per_s.min(next.faults_per_s), self.faults_per_s.max(next.faults_per_s));
        self.kind == next.kind && (high < RATE_MIN || high <= low * RATE_JUMP)
    }

    fn join(&mut self, next: &RunStage) {
        let (mine, its) = ((self.to_ms - self.from_ms) as f64, (next.to_ms - next.from_ms) as f64);
        self.faults_per_s = (self.faults_per_s * mine + next.faults_per_s * its) / (mine + its);
        self.to_ms = next.to_ms;
        self.anonymous_bytes = next.anonymous_bytes;
    }
}

#[cfg(test)]
mod tests {
    //! Danger: stages where there are none, so that whoever acts on them never rests.
    use super::*;

    /// One sample each 100 ms; memory in MiB and faults per second as functions of the step.
    fn run(steps: u64, memory: impl Fn(u64) -> u64, rate: impl Fn(u64) -> u64) -> Vec<RunStage> {
        let mut faults = 0;
        let sample = |step: u64| {
            faults += rate(step) / 10;
            Sample { at_ms: step * 100, anonymous_bytes: memory(step) << 20, faults, ..Sample::default() }
        };
        find(&(1..=steps).map(sample).collect::<Vec<_>>())
    }

    fn kinds(stages: &[RunStage]) -> Vec<(StageKind, u64)> {
        stages.iter().map(|stage| (stage.kind, stage.to_ms)).collect()
    }

    #[test]
    fn growth_is_preparation_and_rest_is_execution() {
        let stages = run(100, |step| step.min(30) * 10, |_| 0);
        assert_eq!(kinds(&stages), [(StageKind::Preparation, 3000), (StageKind::Execution, 10_000)]);
        assert_eq!(stages[1].anonymous_bytes, 300 << 20);
    }

    #[test]
    fn shrinking_is_no_preparation() {
        let stages = run(100, |step| 300 - step, |_| 0);
        assert_eq!(kinds(&stages[1..]), [(StageKind::Execution, 10_000)]);
    }

    #[test]
    fn a_jump_of_the_fault_rate_is_a_stage_and_a_drift_below_it_is_not() {
        let jump = run(100, |_| 100, |step| if step <= 50 { 2000 } else { 9000 });
        assert_eq!(kinds(&jump[1..]), [(StageKind::Execution, 5000), (StageKind::Execution, 10_000)]);
        assert!(jump[2].faults_per_s > 8999.0 && jump[2].faults_per_s < 9001.0, "{jump:?}");
        let drift = run(100, |_| 100, |step| 2000 + step * 10);
        assert_eq!(drift.len(), 2, "{drift:?}");
        let few = run(100, |_| 100, |step| if step % 20 < 10 { 10 } else { 500 });
        assert_eq!(few.len(), 2, "{few:?}");
    }

    #[test]
    fn stages_cover_the_run_without_gaps_whatever_happens() {
        let mut random = fastrand::Rng::with_seed(88);
        let mut next = move |below: u64| random.u64(..below);
        for _ in 0..500 {
            let (mut at_ms, mut faults) = (0, 0);
            let sample = |_| {
                at_ms += 1 + next(400);
                faults += next(5000);
                Sample { at_ms, anonymous_bytes: next(1 << 30), faults, ..Sample::default() }
            };
            let samples: Vec<Sample> = (0..60).map(sample).collect();
            let stages = find(&samples);
            assert_eq!(stages.first().map(|stage| stage.from_ms), Some(0));
            assert_eq!(stages.last().map(|stage| stage.to_ms), Some(at_ms));
            assert!(stages.windows(2).all(|pair| pair[0].to_ms == pair[1].from_ms));
            let seen: f64 = stages.iter().map(|s| s.faults_per_s * (s.to_ms - s.from_ms) as f64 / 1000.0).sum();
            assert!((seen - faults as f64).abs() < 1e-3 * faults as f64 + 1.0, "{seen} {faults}");
        }
        assert_eq!(find(&[]), []);
    }
}
