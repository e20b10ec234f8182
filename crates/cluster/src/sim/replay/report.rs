//! Runs of a trace under several policies and accountings, and what they gain.

use super::super::{Policy, RunFigures, RunSummary, Simulator, Spread, run_trials};
use super::usage::LEVELS;
use super::{Accounting, ClusterTrace, ReplayConfig, ReplayError, SkippedJobs, TraceFormat};
use serde::Serialize;

/// Result of a replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Trace that was replayed.
    pub trace: TraceFacts,
    /// Assumptions about what is not in the trace, in sentences.
    pub assumptions: Vec<String>,
    /// Cluster of the replay.
    pub cluster: ReplayedCluster,
    /// Seed of the first trial; each further one has the next.
    pub seed: u64,
    /// Number of trials.
    pub trials: usize,
    /// Results by accounting.
    pub accountings: Vec<AccountingReport>,
}

/// Facts about a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TraceFacts {
    /// Name of the file or folder.
    pub name: String,
    /// Format.
    pub format: TraceFormat,
    /// Lines that were read, without headers.
    pub lines: u64,
    /// Jobs that were replayed.
    pub jobs: usize,
    /// Jobs that were left out.
    pub skipped: SkippedJobs,
    /// Samples of containers that were left out, because they are not from 0 to 1.
    pub skipped_samples: u64,
    /// Seconds from the first arrival to the last end, if no job waits.
    pub span_s: f64,
    /// Part of the memory-time that was asked for, that jobs used; `None` if that is not known.
    pub used_share: Option<f64>,
}

/// Cluster of a replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayedCluster {
    /// Nodes.
    pub nodes: u32,
    /// Cores of a node.
    pub cores: u32,
    /// Near memory of a node.
    pub near_bytes: u64,
    /// Far memory of all nodes together, where far memory is used.
    pub far_bytes: u64,
    /// Memory over cores that the jobs ask for, each as a part of what the nodes have.
    pub memory_to_cores: f64,
}

/// Results of one accounting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AccountingReport {
    /// Accounting.
    pub accounting: Accounting,
    /// Results by policy. The first uses no far memory.
    pub policies: Vec<PolicyReport>,
}

/// Results of one policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyReport {
    /// Figures of the runs.
    #[serde(flatten)]
    pub runs: RunSummary,
    /// Jobs that were evicted in a run, because others had grown.
    pub evictions: Spread,
    /// Work that evictions lost, as a part of all work.
    pub lost_share: Spread,
    /// Gain over no far memory with the same accounting.
    pub gain: PolicyGain,
    /// Gain over no far memory when memory is accounted by peak.
    pub gain_over_requests: PolicyGain,
}

/// Gain of a policy, trial by trial: the time without it over the time with it, less 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PolicyGain {
    /// Gain in the time until all jobs have ended.
    pub makespan: Spread,
    /// Gain in the mean time from arrival to end.
    pub turnaround: Spread,
}

impl PolicyGain {
    fn of(runs: &[RunFigures], baseline: &[RunFigures]) -> PolicyGain {
        let gain = |of: fn(&RunFigures) -> f64| {
            Spread::of(baseline.iter().zip(runs).map(|(before, with)| of(before) / of(with) - 1.0).collect())
        };
        PolicyGain { makespan: gain(|run| run.makespan_s), turnaround: gain(|run| run.turnaround_mean_s) }
    }
}

impl ClusterTrace {
    /// Replays the trace under each policy and accounting. No far memory is always run first, and
    /// gains are over it. Equal traces, configurations and seeds give equal reports. `on_run` is told
    /// what runs next.
    pub fn replay(
        &self,
        config: &ReplayConfig,
        policies: &[Policy],
        accountings: &[Accounting],
        (seed, trials): (u64, usize),
        on_run: &mut dyn FnMut(&str),
    ) -> Result<ReplayReport, ReplayError> {
        let cluster = self.cluster(config)?;
        let mut all = vec![Policy::NEAR];
        all.extend(policies.iter().filter(|policy| **policy != Policy::NEAR));
        let mut runs_of = |accounting: Accounting, policy: Policy| {
            let mut runs = Vec::new();
            for trial in 0..trials as u64 {
                on_run(&format!("{policy} by {}: run {} of {trials}", accounting.name(), trial + 1));
                let seed = seed.wrapping_add(trial);
                let scenario = self.scenario(&cluster, &config.profiles, accounting, seed)?;
                runs.append(&mut run_trials(&mut Simulator::new(&scenario, policy)?, seed, 1, |_| {})?);
            }
            Ok::<_, ReplayError>(runs)
        };
        let requests = runs_of(Accounting::Peak, Policy::NEAR)?;
        let work_s: f64 = cluster.jobs.iter().map(|&job| self.jobs[job].seconds).sum();
        let mut reports = Vec::new();
        for &accounting in accountings {
            let near = match accounting {
                Accounting::Peak => requests.clone(),
                Accounting::Use => runs_of(accounting, Policy::NEAR)?,
            };
            let mut results = Vec::new();
            for &policy in &all {
                let runs = if policy == Policy::NEAR { near.clone() } else { runs_of(accounting, policy)? };
                let name = policy.to_string();
                results.push(PolicyReport {
                    evictions: Spread::of(runs.iter().map(|run| run.evictions).collect()),
                    lost_share: Spread::of(runs.iter().map(|run| run.lost_s / work_s).collect()),
                    gain: PolicyGain::of(&runs, &near),
                    gain_over_requests: PolicyGain::of(&runs, &requests),
                    runs: RunSummary::of(&runs, (&self.name, &name), seed, cluster.jobs.len()),
                });
            }
            reports.push(AccountingReport { accounting, policies: results });
        }
        let scenario = self.scenario(&cluster, &config.profiles, Accounting::Peak, seed)?;
        Ok(ReplayReport {
            trace: self.facts(&cluster.jobs, cluster.skipped),
            assumptions: self.assumptions(config, accountings),
            cluster: ReplayedCluster {
                nodes: cluster.nodes,
                cores: cluster.shape.cores,
                near_bytes: cluster.shape.memory_bytes,
                far_bytes: cluster.far_bytes,
                memory_to_cores: scenario.memory_to_cores(),
            },
            seed,
            trials,
            accountings: reports,
        })
    }

    pub(super) fn facts(&self, jobs: &[usize], skipped: SkippedJobs) -> TraceFacts {
        let replayed = || jobs.iter().map(|&job| &self.jobs[job]);
        let asked: f64 = replayed().map(|job| job.memory_bytes as f64 * job.seconds).sum();
        let mean_part = self.containers.iter().map(|series| series.mean()).sum::<f64>() / self.containers.len() as f64;
        let used = replayed().map(|job| {
            let limit = job.memory_bytes as f64;
            let mean = job.usage.as_ref().map_or(mean_part * limit, |usage| usage.mean().min(limit));
            mean * job.seconds
        });
        TraceFacts {
            name: self.name.clone(),
            format: self.format,
            lines: self.lines,
            jobs: jobs.len(),
            skipped,
            skipped_samples: self.skipped_samples,
            span_s: replayed().map(|job| job.arrival_s + job.seconds).fold(0.0, f64::max),
            used_share: self.has_usage().then(|| used.sum::<f64>() / asked),
        }
    }

    fn assumptions(&self, config: &ReplayConfig, accountings: &[Accounting]) -> Vec<String> {
        let mut assumptions = vec![
            format!(
                "profiles: the trace has no slowdowns; each job gets one of {} (measured by CFM, EuroSys 2020), drawn \
                 evenly by the seed, with its least share",
                config.profiles.names()
            ),
            "cluster: nodes are equal, far memory is beside them and moves in no time, and GPUs are not modelled"
                .to_owned(),
        ];
        if config.nodes.is_none() {
            assumptions.push("nodes: as many as have a tenth more cores than jobs had at their peak".to_owned());
        }
        if !accountings.contains(&Accounting::Use) {
            return assumptions;
        }
        if !self.containers.is_empty() && self.jobs.iter().any(|job| job.usage.is_none()) {
            assumptions.push(format!(
                "use: the trace has none; each job uses the part of its memory that one of {} other containers used, \
                 drawn by the seed, its time stretched to that of the job",
                self.containers.len()
            ));
        }
        assumptions.push(format!(
            "use over time: a job is placed by what it asked for, and then counts with the largest sample of its \
             present step, rounded up to {LEVELS} parts of what it asked for; jobs that started last leave a node \
             that has no room for growth, and start again"
        ));
        assumptions
    }
}
