//! Slurm as the scheduler of a cluster with far memory.
//!
//! Nothing of ours is in Slurm but a script of `job_submit/lua`, which makes a job with far memory
//! count with its least, and wait for a licence that a reservation keeps from everybody
//! ([`setup`]). What a job asked for, and when it was admitted, is in its AdminComment, which only
//! operators can write. Its part of the pool is its number of licences, one for each MiB.
//!
//! Slurm is read by `squeue` and `scontrol`, whose chosen fields have been the same for years. No
//! field that a user writes freely is read.

pub mod checks;
mod command;
pub mod setup;
pub mod text;

use super::{BookChange, Scheduler, SchedulerJob, SchedulerState};
use command::run;
use std::time::Duration;
use text::{QueueLine, ScontrolLine};

/// Licence that a job waits for until the gate admits it.
pub const GATE_LICENSE: &str = "farfield_gate";
/// Licence for one MiB of the pool.
pub const POOL_LICENSE: &str = "farmem";
/// Name of the reservation that keeps [`GATE_LICENSE`] from everybody.
pub const RESERVATION: &str = "farfield_gate";
/// Time that a command of Slurm may take. When `slurmctld` is away, commands try for some time.
const COMMAND_WITHIN: Duration = Duration::from_secs(60);

/// Reason why Slurm cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum SlurmError {
    /// A command of Slurm cannot be started.
    #[error("cannot start {program}: {error}; is Slurm's client installed (slurm-client)?")]
    NotStarted {
        /// Program.
        program: String,
        /// Answer of the kernel.
        error: std::io::Error,
    },
    /// A command of Slurm failed.
    #[error("{command}: {answer}")]
    Failed {
        /// Command line.
        command: String,
        /// Text that it wrote to stderr, or its exit code.
        answer: String,
    },
    /// A command of Slurm did not end in time.
    #[error("{command} has not ended within {} s: does slurmctld answer (scontrol ping)?", COMMAND_WITHIN.as_secs())]
    Silent {
        /// Command line.
        command: String,
    },
    /// The cluster has no pool.
    #[error("Slurm has no licence {POOL_LICENSE}: run farfield cluster init")]
    NoPool,
    /// No node runs jobs with far memory.
    #[error("partition {0} has no node: see scontrol show partition, or give --partition")]
    NoNodes(String),
}

/// A real Slurm, met by its commands.
#[derive(Clone, Debug)]
pub struct Slurm {
    partition: String,
}

impl Slurm {
    /// Makes the scheduler of the cluster that `SLURM_CONF` or `/etc/slurm` names, for jobs of one
    /// partition. Nothing is started or read yet.
    pub fn new(partition: &str) -> Slurm {
        Slurm { partition: partition.to_owned() }
    }

    /// Runs a command of Slurm and returns what it writes. Blocks for a minute at most.
    pub fn command(&self, program: &str, arguments: &[&str]) -> Result<String, SlurmError> {
        run(program, arguments, COMMAND_WITHIN)
    }

    fn read_pool(&self) -> Result<u64, SlurmError> {
        let licenses = self.command("scontrol", &["--oneliner", "show", "licenses"])?;
        let pool =
            licenses.lines().map(ScontrolLine::parse).find(|fields| fields.get("LicenseName") == Some(POOL_LICENSE));
        let total: Option<u64> = pool.and_then(|fields| fields.get("Total")?.parse().ok());
        total.map(|mib| mib << 20).ok_or(SlurmError::NoPool)
    }
}

impl Scheduler for Slurm {
    type Error = SlurmError;

    fn read(&mut self, now_s: u64) -> Result<SchedulerState, SlurmError> {
        let pool_bytes = self.read_pool()?;
        let format = format!("--Format={}", QueueLine::FORMAT);
        let partition = format!("--partition={}", self.partition);
        let squeue = ["--noheader", "--array", "--all", "--states=all", &partition, &format];
        let mut jobs = self.command("squeue", &squeue)?;
        let nodes = self.command("scontrol", &["--oneliner", "--all", "show", "node"])?;
        let mut state = text::state(&self.partition, &nodes, &jobs, now_s);
        if state.nodes.iter().any(|(_, node)| node.foreign_bytes > 0) {
            // A job that has started in between looks like one without far memory. One that has ended
            // in between would, if jobs were read after nodes only.
            jobs = self.command("squeue", &squeue)?;
            let after = text::state(&self.partition, &nodes, &jobs, now_s);
            for ((_, node), (_, later)) in state.nodes.iter_mut().zip(&after.nodes) {
                node.foreign_bytes = node.foreign_bytes.min(later.foreign_bytes);
                node.foreign_cores = node.foreign_cores.min(later.foreign_cores);
            }
        }
        if state.nodes.is_empty() {
            return Err(SlurmError::NoNodes(self.partition.clone()));
        }
        state.pool_bytes = pool_bytes;
        Ok(state)
    }

    fn apply(&mut self, job: &SchedulerJob, change: &BookChange<'_>) -> Result<(), SlurmError> {
        let words = text::update_words(job, change);
        let words: Vec<&str> = ["update"].into_iter().chain(words.iter().map(String::as_str)).collect();
        self.command("scontrol", &words).map(drop)
    }
}
