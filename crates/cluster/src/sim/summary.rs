//! What several runs say together.

use super::engine::{JobRecord, Run, Simulator};
use serde::{Deserialize, Serialize};

/// Middle and extremes of a figure over several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Middle value, or the mean of the two in the middle.
    pub median: f64,
    /// Least value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
}

/// Figures of all runs of a scenario under one policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// Scenario.
    pub scenario: String,
    /// Policy.
    pub policy: String,
    /// Seed of the first run; each further run has the next.
    pub seed: u64,
    /// Number of runs.
    pub trials: usize,
    /// Jobs in a run.
    pub jobs: usize,
    /// Seconds from the start to the last end.
    pub makespan_s: Spread,
    /// Mean of the seconds from arrival to end.
    pub turnaround_mean_s: Spread,
    /// Turnaround exceeded by one job in a hundred.
    pub turnaround_p99_s: Spread,
    /// Slowdown on a node against all memory near, as a part: 0.1 is 10 % slower. Half of the jobs
    /// have less.
    pub slowdown_p50: Spread,
    /// Slowdown that one job in a hundred exceeds.
    pub slowdown_p99: Spread,
    /// Most of the pool that was promised at a time.
    pub far_peak_bytes: Spread,
    /// Divisions of near memory in a run.
    pub splits: Spread,
}

/// Figures of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunFigures {
    /// Seconds from the start to the last end.
    pub makespan_s: f64,
    /// Mean of the seconds from arrival to end.
    pub turnaround_mean_s: f64,
    /// Turnaround exceeded by one job in a hundred.
    pub turnaround_p99_s: f64,
    /// Slowdown on a node that half of the jobs have at most, as a part.
    pub slowdown_p50: f64,
    /// Slowdown that one job in a hundred exceeds.
    pub slowdown_p99: f64,
    /// Most of the pool that was promised at a time.
    pub far_peak_bytes: f64,
    /// Divisions of near memory.
    pub splits: f64,
    /// Evictions of jobs for whose neighbours' growth there was no room.
    pub evictions: f64,
    /// Work of evicted jobs that was lost, in seconds at full speed.
    pub lost_s: f64,
}

/// Runs a simulator with `trials` seeds, the first of which is `seed`, and returns the figures of
/// each run. `after_each` is told how many runs are done.
pub fn run_trials(
    simulator: &mut Simulator,
    seed: u64,
    trials: usize,
    mut after_each: impl FnMut(usize),
) -> Result<Vec<RunFigures>, super::ScenarioError> {
    let mut values = Vec::new();
    let run = |trial| {
        let run = simulator.run(seed.wrapping_add(trial as u64))?;
        after_each(trial + 1);
        Ok(RunFigures::of(&run, simulator, &mut values))
    };
    (0..trials).map(run).collect()
}

/// Runs a simulator like [`run_trials`], and summarises the runs under the names of the scenario
/// and the policy.
pub fn summarise(
    simulator: &mut Simulator,
    names: (&str, &str),
    seed: u64,
    trials: usize,
    after_each: impl FnMut(usize),
) -> Result<RunSummary, super::ScenarioError> {
    let runs = run_trials(simulator, seed, trials, after_each)?;
    Ok(RunSummary::of(&runs, names, seed, simulator.records().len()))
}

impl RunSummary {
    /// Summarises runs of which the first had this seed.
    pub fn of(runs: &[RunFigures], names: (&str, &str), seed: u64, jobs: usize) -> RunSummary {
        let spread = |of: fn(&RunFigures) -> f64| Spread::of(runs.iter().map(of).collect());
        RunSummary {
            scenario: names.0.to_owned(),
            policy: names.1.to_owned(),
            seed,
            trials: runs.len(),
            jobs,
            makespan_s: spread(|run| run.makespan_s),
            turnaround_mean_s: spread(|run| run.turnaround_mean_s),
            turnaround_p99_s: spread(|run| run.turnaround_p99_s),
            slowdown_p50: spread(|run| run.slowdown_p50),
            slowdown_p99: spread(|run| run.slowdown_p99),
            far_peak_bytes: spread(|run| run.far_peak_bytes),
            splits: spread(|run| run.splits),
        }
    }
}

impl RunFigures {
    /// Computes the figures of the last run of a simulator, whose jobs have all ended. `values` is room for
    /// one value of each job.
    pub(crate) fn of(run: &Run, simulator: &Simulator, values: &mut Vec<f64>) -> RunFigures {
        let records = simulator.records();
        let turnaround = |job: &JobRecord| job.end_s - job.arrival_s;
        let slowdown = |job: &JobRecord| (job.end_s - job.start_s) / simulator.classes()[job.class].seconds() - 1.0;
        RunFigures {
            makespan_s: run.makespan_s,
            turnaround_mean_s: records.iter().map(turnaround).sum::<f64>() / records.len() as f64,
            turnaround_p99_s: percentile(records.iter().map(turnaround), 0.99, values),
            slowdown_p50: percentile(records.iter().map(slowdown), 0.5, values),
            slowdown_p99: percentile(records.iter().map(slowdown), 0.99, values),
            far_peak_bytes: run.far_peak_bytes as f64,
            splits: run.splits as f64,
            evictions: run.evictions as f64,
            lost_s: run.lost_s,
        }
    }
}

fn percentile(of: impl Iterator<Item = f64>, part: f64, values: &mut Vec<f64>) -> f64 {
    values.clear();
    values.extend(of);
    let place = ((values.len() as f64 * part) as usize).min(values.len().saturating_sub(1));
    if values.is_empty() { 0.0 } else { *values.select_nth_unstable_by(place, f64::total_cmp).1 }
}

impl Spread {
    /// Returns the spread of values, which is 0 if there are none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let [Some(&min), Some(&max)] = [values.first(), values.last()] else {
            return Spread { median: 0.0, min: 0.0, max: 0.0 };
        };
        let half = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[half] } else { f64::midpoint(values[half], values[half - 1]) };
        Spread { median, min, max }
    }
}
