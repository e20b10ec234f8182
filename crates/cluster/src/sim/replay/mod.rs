//! Recorded traces of clusters, replayed through the simulator.
//!
//! A trace says what jobs asked for, when, and for how long. It may say what they used over time. It
//! does not say how much slower they would be with memory far: that is an assumption, a profile for
//! each job by a draw that a seed repeats. Memory is accounted in two ways:
//!
//! - by the peak: a job counts with what it asked for, from beginning to end;
//! - by use over time: a job is placed by what it asked for, and then counts with what it uses.

mod format;
mod read;
mod report;
#[cfg(test)]
mod tests;
mod usage;

pub use format::{TraceFormat, TraceFormatError};
pub use report::{AccountingReport, PolicyGain, PolicyReport, ReplayReport, ReplayedCluster, TraceFacts};
pub use usage::UsageSeries;

use super::published::{self, Profiles};
use super::{Arrival, Arrivals, JobKind, Rules, Scenario, ScenarioError, SplitMix64};
use farfield_core::policy::cluster::{NodeShape, RunTime};
use farfield_core::policy::curve::Curve;
use format::PodColumns;
use serde::Serialize;
use std::path::Path;
use std::str::FromStr;

/// Most jobs of a trace: each is a class of its own.
const JOBS_MAX: usize = 20_000;
/// Lines between two reports of progress.
const REPORT_EVERY: u64 = 100_000;

/// Reason why a trace cannot be read or replayed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ReplayError {
    /// A file cannot be read.
    #[error("cannot read {file}: {message}")]
    Read {
        /// Name of the file.
        file: String,
        /// Answer of the system.
        message: String,
    },
    /// A line is wrong.
    #[error("{file}: line {line} {message}")]
    Row {
        /// Name of the file.
        file: String,
        /// Number of the line, from 1.
        line: usize,
        /// Mistake, in words.
        message: String,
    },
    /// An archive or a packed file is damaged, or cannot be unpacked.
    #[error("{file} {message}")]
    Packed {
        /// Name of the file.
        file: String,
        /// Mistake, in words.
        message: String,
    },
    /// The first line is that of no known format.
    #[error(
        "{file}: line 1 is not the header of a known trace: pods of Alibaba have cpu_milli and memory_mib, virtual \
         machines of Bitbrains have `Memory capacity provisioned [KB]`"
    )]
    Format {
        /// Name of the file.
        file: String,
    },
    /// More than can be simulated in reasonable time.
    #[error("{file} has more than {JOBS_MAX} jobs: take a part of it")]
    TooMany {
        /// Name of the file.
        file: String,
    },
    /// Nothing to simulate.
    #[error("{file} has no jobs that can be replayed{}", skipped.in_brackets())]
    NoJobs {
        /// Name of the file.
        file: String,
        /// Jobs that were left out.
        skipped: SkippedJobs,
    },
    /// Use over time is asked for, and was not recorded.
    #[error("the trace does not say what jobs use over time: account by peak, or name a file of containers for it")]
    NoUsage,
    /// An option that makes no cluster.
    #[error("{0}")]
    Cluster(String),
    /// The simulator refuses the jobs.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
}

impl ReplayError {
    fn read(file: &str, error: &std::io::Error) -> ReplayError {
        ReplayError::Read { file: file.to_owned(), message: error.to_string() }
    }
}

/// Jobs of a trace that were left out, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SkippedJobs {
    /// Jobs that never ran, have no samples, or had not ended.
    pub never_ran: u64,
    /// Jobs that asked for no cores.
    pub without_cores: u64,
    /// Jobs that asked for no memory.
    pub without_memory: u64,
    /// Jobs that ask for more than a node has.
    pub larger_than_a_node: u64,
}

impl SkippedJobs {
    /// Returns the number of all.
    pub fn all(&self) -> u64 {
        self.never_ran + self.without_cores + self.without_memory + self.larger_than_a_node
    }

    /// Returns a job, unless it asks for nothing or took no time; then it is counted.
    fn unless_empty(&mut self, job: TraceJob) -> Option<TraceJob> {
        let reason = match job {
            TraceJob { seconds, .. } if seconds <= 0.0 => &mut self.never_ran,
            TraceJob { cores: 0, .. } => &mut self.without_cores,
            TraceJob { memory_bytes: 0, .. } => &mut self.without_memory,
            _ => return Some(job),
        };
        *reason += 1;
        None
    }

    fn in_brackets(&self) -> String {
        if self.all() == 0 { String::new() } else { format!(" ({} were left out)", self.all()) }
    }
}

/// Job of a trace.
#[derive(Clone, Debug, PartialEq)]
struct TraceJob {
    arrival_s: f64,
    seconds: f64,
    cores: u32,
    memory_bytes: u64,
    /// Memory that it used, in bytes, if that was recorded with it.
    usage: Option<UsageSeries>,
}

/// Recorded trace of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterTrace {
    name: String,
    format: TraceFormat,
    /// Jobs by arrival. The first arrives at 0.
    jobs: Vec<TraceJob>,
    skipped: SkippedJobs,
    lines: u64,
    /// Parts of their memory that containers used, which stand for the use of jobs.
    containers: Vec<UsageSeries>,
    /// Samples of containers that were not parts.
    skipped_samples: u64,
}

/// Accounting of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Accounting {
    /// A job counts with what it asked for.
    Peak,
    /// A job is placed by what it asked for, and counts with what it uses.
    Use,
}

impl Accounting {
    /// Returns the name in options and results.
    pub fn name(self) -> &'static str {
        match self {
            Accounting::Peak => "peak",
            Accounting::Use => "use",
        }
    }
}

/// Profiles that jobs get, because traces have none: each one of these, drawn evenly.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileDraw {
    /// Names, curves and least shares.
    profiles: Vec<(String, Curve, f64)>,
}

/// A name among profiles is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no profile is called {name:?}; write all, or some of {known} with commas between them",
    known = published::names().join(", ")
)]
pub struct ProfileError {
    /// Name that was given.
    pub name: String,
}

impl FromStr for ProfileDraw {
    type Err = ProfileError;

    /// Reads names of the measured profiles of CFM with commas between them, or `all`. A name that is
    /// given twice is drawn twice as often.
    fn from_str(names: &str) -> Result<ProfileDraw, ProfileError> {
        let known = published::rack(Rules::default_rules(), Profiles::Lines).kinds;
        let profile = |kind: &JobKind| {
            let RunTime::Measured { curve, .. } = &kind.run_time else { unreachable!("lines are measured") };
            (kind.name.clone(), curve.clone(), kind.least)
        };
        if names == "all" {
            return Ok(ProfileDraw { profiles: known.iter().map(profile).collect() });
        }
        let named = |name: &str| {
            let kind = known.iter().find(|kind| kind.name == name);
            kind.map(profile).ok_or_else(|| ProfileError { name: name.to_owned() })
        };
        Ok(ProfileDraw { profiles: names.split(',').map(|name| named(name.trim())).collect::<Result<_, _>>()? })
    }
}

impl ProfileDraw {
    /// Returns the names with commas between them.
    pub fn names(&self) -> String {
        self.profiles.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// Cluster in which a trace is replayed, and assumptions.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayConfig {
    /// Cores of a node.
    pub cores: u32,
    /// Near memory of a node; `None` for as much as makes `memory_to_cores` true.
    pub near_bytes: Option<u64>,
    /// Memory over cores that the jobs ask for, each as a part of what the nodes have.
    pub memory_to_cores: f64,
    /// Number of nodes; `None` for as many as have a tenth more cores than jobs had at their peak.
    pub nodes: Option<u32>,
    /// Far memory of all nodes together, beside their near memory; `None` for a quarter of that.
    pub far_bytes: Option<u64>,
    /// Profiles of the jobs.
    pub profiles: ProfileDraw,
}

/// Nodes and bounds that follow from a trace and a configuration.
#[derive(Clone, Debug, PartialEq)]
struct ReplayCluster {
    shape: NodeShape,
    nodes: u32,
    far_bytes: u64,
    /// Jobs of the trace that are replayed.
    jobs: Vec<usize>,
    skipped: SkippedJobs,
}

impl ClusterTrace {
    /// Reads a trace as a stream: a table, a folder of tables, or an archive (`ustar`), which may be
    /// packed by zstd or gzip. The format is that of the first header, unless it is given.
    /// `on_progress` is told the number of lines, now and then. Blocks for as long as the files do.
    ///
    /// Errors name file and line. Jobs that say nothing (no run, no cores, no memory) are counted.
    pub fn read(
        path: &Path,
        format: Option<TraceFormat>,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<ClusterTrace, ReplayError> {
        let mut jobs = Vec::new();
        let (mut skipped, mut lines, mut known) = (SkippedJobs::default(), 0, format);
        let file = path.display().to_string();
        read::each_table(path, &mut |table| {
            let mut count = || {
                lines += 1;
                if lines % REPORT_EVERY == 0 {
                    on_progress(lines);
                }
            };
            let Some(header) = table.next()?.map(str::to_owned) else { return Ok(()) };
            let name = table.file().to_owned();
            let format = known.or_else(|| format::of_header(&header)).ok_or(ReplayError::Format { file: name })?;
            known = Some(format);
            let mut add = |job: Option<TraceJob>| {
                jobs.extend(job);
                if jobs.len() > JOBS_MAX { Err(ReplayError::TooMany { file: file.clone() }) } else { Ok(()) }
            };
            match format {
                TraceFormat::Bitbrains => add(format::machine(&header, table, &mut skipped, &mut count)?),
                TraceFormat::Alibaba => {
                    let columns = PodColumns::of(&header).map_err(|message| table.wrong(message))?;
                    while let Some(job) = table.next()?.map(|line| columns.job(line, &mut skipped)) {
                        add(job.map_err(|message| table.wrong(message))?)?;
                        count();
                    }
                    Ok(())
                }
            }
        })?;
        let Some(format) = known.filter(|_| !jobs.is_empty()) else {
            return Err(ReplayError::NoJobs { file, skipped });
        };
        // Stable: jobs that arrive at once keep their order.
        jobs.sort_by(|a: &TraceJob, b| a.arrival_s.total_cmp(&b.arrival_s));
        let first_s = jobs[0].arrival_s;
        jobs.iter_mut().for_each(|job| job.arrival_s -= first_s);
        let name = path.file_name().map_or(file.clone(), |name| name.to_string_lossy().into_owned());
        Ok(ClusterTrace { name, format, jobs, skipped, lines, containers: Vec::new(), skipped_samples: 0 })
    }

    /// Reads containers whose use of memory stands for that of the jobs: for each job, one of them is
    /// drawn, and its time is stretched to that of the job.
    pub fn read_containers(&mut self, path: &Path, on_progress: &mut dyn FnMut(u64)) -> Result<(), ReplayError> {
        let mut lines = 0;
        let mut count = || {
            lines += 1;
            if lines % REPORT_EVERY == 0 {
                on_progress(lines);
            }
        };
        let (mut containers, mut skipped) = (Vec::new(), 0);
        read::each_table(path, &mut |table| {
            containers.append(&mut format::containers(table, &mut skipped, &mut count)?);
            Ok(())
        })?;
        if containers.is_empty() {
            let file = path.display().to_string();
            return Err(ReplayError::Packed { file, message: "has no container with two samples".into() });
        }
        (self.containers, self.skipped_samples) = (containers, skipped);
        Ok(())
    }

    /// Tells whether the use of memory over time is known, of the jobs or of containers.
    pub fn has_usage(&self) -> bool {
        !self.containers.is_empty() || self.jobs.iter().all(|job| job.usage.is_some())
    }

    fn cluster(&self, config: &ReplayConfig) -> Result<ReplayCluster, ReplayError> {
        let ReplayConfig { cores, memory_to_cores, .. } = *config;
        let wrong = |message: &str| Err(ReplayError::Cluster(message.to_owned()));
        if cores == 0 || config.nodes == Some(0) || config.near_bytes == Some(0) {
            return wrong("a cluster has nodes with cores and near memory");
        }
        if !(memory_to_cores > 0.0 && memory_to_cores.is_finite()) {
            return wrong("the ratio of memory to cores is a number above 0");
        }
        let all = || self.jobs.iter();
        let near_bytes = config.near_bytes.unwrap_or_else(|| {
            let core_s: f64 = all().map(|job| f64::from(job.cores) * job.seconds).sum();
            let byte_s: f64 = all().map(|job| job.memory_bytes as f64 * job.seconds).sum();
            // Whole MiB, so that a result can be asked for again.
            let mib = byte_s / core_s * f64::from(cores) / memory_to_cores / f64::from(1 << 20);
            (mib.ceil() as u64) << 20
        });
        let mut skipped = self.skipped;
        let fits = |job: &TraceJob| job.cores <= cores && job.memory_bytes <= near_bytes;
        let jobs: Vec<usize> = (0..self.jobs.len()).filter(|&job| fits(&self.jobs[job])).collect();
        skipped.larger_than_a_node = (self.jobs.len() - jobs.len()) as u64;
        if jobs.is_empty() {
            return Err(ReplayError::NoJobs { file: self.name.clone(), skipped });
        }
        // A tenth more, because cores are left over on every node.
        let wanted = (self.cores_at_a_time_max(&jobs) * 11).div_ceil(10 * u64::from(cores));
        let nodes = config.nodes.unwrap_or(u32::try_from(wanted).unwrap_or(u32::MAX));
        let far_bytes = config.far_bytes.unwrap_or((u64::from(nodes).saturating_mul(near_bytes) / 4) >> 20 << 20);
        let shape = NodeShape { cores, reclaim_cores: 0, memory_bytes: near_bytes };
        Ok(ReplayCluster { shape, nodes, far_bytes, jobs, skipped })
    }

    /// Returns the most cores that jobs had at a time, if none of them waited.
    fn cores_at_a_time_max(&self, jobs: &[usize]) -> u64 {
        let mut changes: Vec<(f64, i64)> = Vec::new();
        for job in jobs.iter().map(|&job| &self.jobs[job]) {
            changes.push((job.arrival_s, i64::from(job.cores)));
            changes.push((job.arrival_s + job.seconds, -i64::from(job.cores)));
        }
        // Ends come before beginnings.
        changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let sums = changes.iter().scan(0, |sum, change| {
            *sum += change.1;
            Some(*sum)
        });
        sums.max().unwrap_or(0).max(1).unsigned_abs()
    }

    /// Makes the scenario of a seed, which draws the profile of each job, and its container.
    fn scenario(
        &self,
        cluster: &ReplayCluster,
        profiles: &ProfileDraw,
        accounting: Accounting,
        seed: u64,
    ) -> Result<Scenario, ReplayError> {
        if accounting == Accounting::Use && !self.has_usage() {
            return Err(ReplayError::NoUsage);
        }
        let mut random = SplitMix64::new(seed);
        let mut kinds = Vec::new();
        for &index in &cluster.jobs {
            let job = &self.jobs[index];
            // Both are drawn whatever the accounting is, so that all accountings meet the same jobs.
            let (_, curve, least) = &profiles.profiles[random.below(profiles.profiles.len())];
            let container = random.below(self.containers.len().max(1));
            let usage = match (accounting, &job.usage) {
                (Accounting::Peak, _) => Vec::new(),
                (Accounting::Use, Some(usage)) => usage.steps(job.memory_bytes as f64, job.memory_bytes),
                (Accounting::Use, None) => self.containers[container].steps(1.0, job.memory_bytes),
            };
            kinds.push(JobKind {
                name: format!("of job {}", index + 1),
                cores: job.cores,
                memory_bytes: job.memory_bytes,
                least: *least,
                run_time: RunTime::Measured { seconds: job.seconds, curve: curve.clone() },
                usage,
            });
        }
        let arrival = |(class, &job): (usize, &usize)| Arrival { class, at_s: self.jobs[job].arrival_s };
        Ok(Scenario {
            name: self.name.clone(),
            counts: vec![1; kinds.len()],
            kinds,
            arrivals: Arrivals::Recorded(cluster.jobs.iter().enumerate().map(arrival).collect()),
            nodes: cluster.nodes,
            memory_servers: 0,
            shape: cluster.shape,
            far_bytes: cluster.far_bytes,
            rules: Rules::default_rules(),
        })
    }
}
