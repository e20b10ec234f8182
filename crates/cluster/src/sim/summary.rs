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

/// Collects the figures of runs.
#[derive(Clone, Debug, Default)]
struct Figures {
    columns: [Vec<f64>; 7],
    values: Vec<f64>,
}

/// Runs a simulator with `trials` seeds, the first of which is `seed`. `after_each` is told how many
/// runs are done.
pub fn summarise(
    simulator: &mut Simulator,
    names: (&str, &str),
    seed: u64,
    trials: usize,
    mut after_each: impl FnMut(usize),
) -> Result<RunSummary, super::ScenarioError> {
    let mut figures = Figures::default();
    for trial in 0..trials {
        let run = simulator.run(seed.wrapping_add(trial as u64))?;
        figures.add(&run, simulator);
        after_each(trial + 1);
    }
    let [makespan_s, turnaround_mean_s, turnaround_p99_s, slowdown_p50, slowdown_p99, far_peak_bytes, splits] =
        figures.columns.map(|values| spread(values).unwrap_or(Spread { median: 0.0, min: 0.0, max: 0.0 }));
    Ok(RunSummary {
        scenario: names.0.to_owned(),
        policy: names.1.to_owned(),
        seed,
        trials,
        jobs: simulator.records().len(),
        makespan_s,
        turnaround_mean_s,
        turnaround_p99_s,
        slowdown_p50,
        slowdown_p99,
        far_peak_bytes,
        splits,
    })
}

impl Figures {
    fn add(&mut self, run: &Run, simulator: &Simulator) {
        let records = simulator.records();
        let turnaround = |job: &JobRecord| job.end_s - job.arrival_s;
        let slowdown = |job: &JobRecord| (job.end_s - job.start_s) / simulator.classes()[job.class].seconds() - 1.0;
        let mean = records.iter().map(turnaround).sum::<f64>() / records.len() as f64;
        let turnaround_p99 = self.percentile(records.iter().map(turnaround), 0.99);
        let slowdown_p50 = self.percentile(records.iter().map(slowdown), 0.5);
        let slowdown_p99 = self.percentile(records.iter().map(slowdown), 0.99);
        let figures = [
            run.makespan_s,
            mean,
            turnaround_p99,
            slowdown_p50,
            slowdown_p99,
            run.far_peak_bytes as f64,
            run.splits as f64,
        ];
        self.columns.iter_mut().zip(figures).for_each(|(column, figure)| column.push(figure));
    }

    fn percentile(&mut self, values: impl Iterator<Item = f64>, part: f64) -> f64 {
        self.values.clear();
        self.values.extend(values);
        let place = ((self.values.len() as f64 * part) as usize).min(self.values.len().saturating_sub(1));
        if self.values.is_empty() { 0.0 } else { *self.values.select_nth_unstable_by(place, f64::total_cmp).1 }
    }
}

/// Returns the spread of values, if there are any.
fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let median = if values.len() % 2 == 1 { values[half] } else { f64::midpoint(*values.get(half)?, values[half - 1]) };
    Some(Spread { median, min: *values.first()?, max: *values.last()? })
}
