//! Simulator of a cluster: jobs arrive, wait, run with shares of their memory near, and end.
//!
//! A run is a function of its scenario, policy and seed: equal arguments give equal bytes. With
//! [`Rules::published`] it follows the simulator of CFM (EuroSys 2020), quirks included.

mod arrivals;
mod engine;
mod file;
mod mix;
mod policy;
pub mod published;
mod random;
mod reference;
pub mod replay;
mod summary;
#[cfg(test)]
mod tests;
mod tournament;
mod trace;

pub use arrivals::{Arrival, ArrivalError, Arrivals, recorded};
pub use engine::{JobRecord, Run, Simulator};
pub use file::{BUILT_IN, FileError, built_in, parse};
pub use mix::{Mix, mixes_between};
pub use policy::{Policy, PolicyError};
pub use random::SplitMix64;
pub use reference::{ReferenceError, ReferenceRun, large_runs, small_runs};
pub use summary::{RunFigures, RunSummary, Spread, run_trials, summarise};
pub use trace::{TracedJob, traced};

use farfield_core::policy::cluster::{ClassError, Cluster, JobClass, NodeShape, RunTime};
use farfield_core::policy::curve::{Curve, Point};

/// Deviations of a simulation from a scheduler that reacts at once and knows all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Each start of a waiting job takes up to 100 ms, and at most half of the time to the next
    /// event, at random.
    pub start_jitter: bool,
    /// Nodes are tried beginning with a random one, instead of in their order.
    pub random_nodes: bool,
    /// Shares may fall to this one although more was promised; `None` keeps to the least shares.
    pub floor: Option<f64>,
    /// Bytes that move between a node and the pool in a second. A job that starts waits until the
    /// others have made room for it. `None`: memory moves in no time.
    pub link_bytes_per_s: Option<f64>,
    /// Relative error of the slowdowns that the policy believes, the same for all jobs of a class
    /// and drawn between minus this and this.
    pub profile_error: f64,
}

impl Rules {
    /// Returns the rules of the published simulator.
    pub fn published() -> Rules {
        Rules { start_jitter: true, random_nodes: false, floor: Some(0.5), ..Rules::default_rules() }
    }

    /// Returns the rules without the quirks of the published simulator.
    pub fn default_rules() -> Rules {
        Rules { start_jitter: false, random_nodes: true, floor: None, link_bytes_per_s: None, profile_error: 0.0 }
    }
}

/// What a class of jobs asks for, before rules and policy have their say.
#[derive(Clone, Debug, PartialEq)]
pub struct JobKind {
    /// Name of the class.
    pub name: String,
    /// Cores of a job.
    pub cores: u32,
    /// Memory that a job asks for.
    pub memory_bytes: u64,
    /// Share of it that must be near.
    pub least: f64,
    /// Run time by near share.
    pub run_time: RunTime,
    /// Memory that a job uses over time, with `memory_bytes` as the limit; empty if it uses all from
    /// beginning to end. The first step is at 0, and further ones follow in their order.
    pub usage: Vec<UsageStep>,
}

/// Step of the memory that a job uses over time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UsageStep {
    /// Part of the job's work that is done when the step begins, from 0 to below 1.
    pub from: f64,
    /// Memory that the job uses until the next step; more than 0.
    pub memory_bytes: u64,
}

/// Cluster and jobs of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Name, for reports.
    pub name: String,
    /// Classes of jobs.
    pub kinds: Vec<JobKind>,
    /// Number of jobs of each class.
    pub counts: Vec<usize>,
    /// Arrivals of the jobs.
    pub arrivals: Arrivals,
    /// Nodes, where no far memory is used.
    pub nodes: u32,
    /// Nodes of these that serve memory instead of running jobs, where far memory is used.
    pub memory_servers: u32,
    /// Shape of a node.
    pub shape: NodeShape,
    /// Far memory of all memory servers together.
    pub far_bytes: u64,
    /// Rules of the simulation.
    pub rules: Rules,
}

/// Reason why a scenario cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScenarioError {
    /// A class of jobs is impossible.
    #[error("job class {name}: {error}")]
    Class {
        /// Name of the class.
        name: String,
        /// What is wrong.
        error: ClassError,
    },
    /// A job that would wait for ever.
    #[error(
        "a job of class {name} fits on no node, even an empty one{}: lower what it asks for, or use larger nodes",
        and_others(*others)
    )]
    NeverFits {
        /// Name of the class.
        name: String,
        /// Number of the other classes of which that is true, too.
        others: usize,
    },
    /// A use of memory over time that cannot be.
    #[error("job class {name}: its use of memory over time {message}")]
    Usage {
        /// Name of the class.
        name: String,
        /// Mistake, in words.
        message: String,
    },
    /// Numbers that make no cluster.
    #[error("{0}")]
    Shape(String),
    /// No job, or arrivals that are not those of the jobs.
    #[error(transparent)]
    Arrivals(#[from] ArrivalError),
}

impl JobKind {
    /// Returns the different amounts of memory that a job uses over time, smallest first.
    fn amounts(&self) -> Vec<u64> {
        let mut amounts: Vec<u64> = self.usage.iter().map(|step| step.memory_bytes).collect();
        amounts.sort_unstable();
        amounts.dedup();
        amounts
    }
}

/// Says how many other classes share a fault, in brackets.
fn and_others(classes: usize) -> String {
    if classes == 0 { String::new() } else { format!(" (other classes like it: {classes})") }
}

impl Scenario {
    /// Makes the cluster as a policy sees it.
    fn cluster(&self, policy: &Policy) -> Result<Cluster, ScenarioError> {
        let servers = if policy.uses_far() { self.memory_servers } else { 0 };
        if servers >= self.nodes {
            let message = format!("{} nodes without {servers} memory servers leave no node for jobs", self.nodes);
            return Err(ScenarioError::Shape(message));
        }
        if self.nodes > NODES_MAX || self.shape.cores <= self.shape.reclaim_cores || self.shape.memory_bytes == 0 {
            let message = format!("a cluster has 1 to {NODES_MAX} nodes, each with memory and cores for jobs");
            return Err(ScenarioError::Shape(message));
        }
        let nodes = vec![self.shape; (self.nodes - servers) as usize];
        Ok(Cluster::new(&nodes, if policy.uses_far() { self.far_bytes } else { 0 }))
    }

    /// Makes the classes as they are and as a policy believes them to be. Those of the kinds come
    /// first, then one for each further amount of memory that a kind uses over time.
    fn classes(&self, policy: &Policy, random: &mut SplitMix64) -> Result<[Vec<JobClass>; 2], ScenarioError> {
        let (mut real, mut believed) = (Vec::new(), Vec::new());
        let (mut real_steps, mut believed_steps) = (Vec::new(), Vec::new());
        for kind in &self.kinds {
            let error = self.rules.profile_error * (2.0 * random.unit() - 1.0);
            let least = policy.least.unwrap_or(kind.least);
            let floor = self.rules.floor.unwrap_or(least).min(least);
            for (run_time, classes, steps) in [
                (kind.run_time.clone(), &mut real, &mut real_steps),
                (mistaken(&kind.run_time, error), &mut believed, &mut believed_steps),
            ] {
                let class = |memory_bytes: u64| {
                    JobClass::with_floor(kind.cores, memory_bytes, least, floor, run_time.clone())
                        .map_err(|error| ScenarioError::Class { name: kind.name.clone(), error })
                };
                classes.push(class(kind.memory_bytes)?);
                for memory_bytes in kind.amounts() {
                    steps.push(class(memory_bytes)?);
                }
            }
        }
        real.append(&mut real_steps);
        believed.append(&mut believed_steps);
        Ok([real, believed])
    }

    /// Returns the steps of each kind's use, with the class of each among [`classes`](Self::classes).
    fn steps(&self) -> Result<Vec<Vec<(f64, usize)>>, ScenarioError> {
        let mut next = self.kinds.len();
        let steps = |kind: &JobKind| {
            let wrong = |message: &str| ScenarioError::Usage { name: kind.name.clone(), message: message.to_owned() };
            let froms = || kind.usage.iter().map(|step| step.from);
            if froms().next().is_some_and(|first| first != 0.0) {
                return Err(wrong("begins after the job"));
            }
            if !froms().is_sorted_by(|a, b| a < b) || !froms().all(|from| from < 1.0) {
                return Err(wrong("has steps that do not follow each other"));
            }
            if kind.usage.iter().any(|step| step.memory_bytes > kind.memory_bytes) {
                return Err(wrong("is more than the job asked for"));
            }
            let amounts = kind.amounts();
            let first = next;
            next += amounts.len();
            let class = |bytes: u64| first + amounts.partition_point(|&amount| amount < bytes);
            Ok(kind.usage.iter().map(|step| (step.from, class(step.memory_bytes))).collect())
        };
        self.kinds.iter().map(steps).collect()
    }

    /// Returns the ratio of the memory to the cores that the jobs need, each as a part of what the
    /// nodes have: above 1, memory is scarce (CFM: m2c).
    pub fn memory_to_cores(&self) -> f64 {
        let sum = |of: fn(&JobKind) -> f64| -> f64 {
            let seconds = |kind: &JobKind| kind.run_time.at(1.0);
            self.kinds.iter().zip(&self.counts).map(|(kind, &count)| count as f64 * of(kind) * seconds(kind)).sum()
        };
        let needs = sum(|kind| kind.memory_bytes as f64) / sum(|kind| f64::from(kind.cores));
        needs * f64::from(self.shape.cores) / self.shape.memory_bytes as f64
    }

    /// Returns the rate of arrivals at which the scarcer of cores and memory would always be in use,
    /// were all nodes to run jobs with all memory near and packed without gaps.
    pub fn jobs_per_s_max(&self) -> f64 {
        let jobs: f64 = self.counts.iter().map(|&count| count as f64).sum();
        let need = |of: fn(&JobKind) -> f64| -> f64 {
            let all = self.kinds.iter().zip(&self.counts);
            all.map(|(kind, &count)| count as f64 * of(kind) * kind.run_time.at(1.0)).sum::<f64>() / jobs
        };
        let nodes = f64::from(self.nodes);
        let by_cores = nodes * f64::from(self.shape.cores) / need(|kind| f64::from(kind.cores));
        let by_memory = nodes * self.shape.memory_bytes as f64 / need(|kind| kind.memory_bytes as f64);
        by_cores.min(by_memory)
    }
}

const NODES_MAX: u32 = 100_000;

/// Returns a run time whose slowdowns are wrong by this part.
fn mistaken(run_time: &RunTime, error: f64) -> RunTime {
    let factor = 1.0 + error;
    match run_time {
        _ if error == 0.0 => run_time.clone(),
        RunTime::Measured { seconds, curve } => {
            let wrong = |point: &Point| Point { slowdown: 1.0 + (point.slowdown - 1.0) * factor, ..*point };
            let points: Vec<Point> = curve.points().iter().map(wrong).collect();
            let curve = Curve::through(&points).unwrap_or_else(|| curve.clone());
            RunTime::Measured { seconds: *seconds, curve }
        }
        RunTime::Polynomial(coefficients) => {
            let mut wrong: Vec<f64> = coefficients.iter().map(|coefficient| coefficient * factor).collect();
            // The run time with all memory near stays.
            if let Some(constant) = wrong.last_mut() {
                *constant -= run_time.at(1.0) * error;
            }
            RunTime::Polynomial(wrong)
        }
    }
}
