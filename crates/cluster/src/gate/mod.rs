//! Gate of a cluster: lets jobs with far memory start, beside a scheduler that knows nothing of it.
//!
//! Decisions are those of [`farfield_core::policy::cluster::gate`]. A [`Scheduler`] is read, what was
//! decided is written into its books, and nothing is remembered: a gate can be killed at any moment
//! and started again, and so can the scheduler.

pub mod kubernetes;
pub mod replay;
pub mod slurm;
#[cfg(test)]
mod tests;

use farfield_core::policy::cluster::{
    GateDecision, GateJob, GateNode, GatePhase, GateRules, GateWait, JobClass, PoolServers, decide,
};
use serde::{Serialize, Serializer};

/// Scheduler of a cluster, as a gate meets it.
pub trait Scheduler {
    /// Reason why the scheduler cannot be read or changed.
    type Error: core::error::Error + Send + Sync + 'static;

    /// Reads all nodes and jobs at the time `now_s`, in seconds since the epoch.
    fn read(&mut self, now_s: u64) -> Result<SchedulerState, Self::Error>;

    /// Writes a change into the books. Whether it took effect is seen at the next reading.
    fn apply(&mut self, job: &SchedulerJob, change: &BookChange<'_>) -> Result<(), Self::Error>;
}

/// Books of a scheduler at one moment.
#[derive(Clone, Debug, Default)]
pub struct SchedulerState {
    /// Nodes where jobs with far memory run, by name.
    pub nodes: Vec<(String, GateNode)>,
    /// Jobs that may have far memory, highest priority first.
    pub jobs: Vec<SchedulerJob>,
    /// Size of the pool in bytes.
    pub pool_bytes: u64,
    /// Jobs that cannot be understood, with the reason. They are left alone.
    pub ignored: Vec<(String, String)>,
}

/// Job in the books of a scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerJob {
    /// Name of the job in the scheduler.
    pub id: String,
    /// Cores and memory that the job asks for.
    pub class: JobClass,
    /// Seconds for which the job could have started, if there had been room.
    pub waited_s: u64,
    /// Progress of the job; `None` for one that may start although no gate has admitted it.
    pub phase: Option<GatePhase>,
    /// Licences of the job that are not the gate's business.
    pub other_licenses: Vec<String>,
}

/// Change of a scheduler's books about one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BookChange<'a> {
    /// The running job is charged for this part of the pool.
    Charge {
        /// Part of the pool in bytes.
        far_bytes: u64,
    },
    /// The job waits for the gate again.
    Withdraw,
    /// The job may start.
    Admit {
        /// Name of its node.
        node: &'a str,
        /// Part of the pool in bytes.
        far_bytes: u64,
        /// Time of the admission in seconds since the epoch.
        now_s: u64,
    },
}

/// Decision of a gate about a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "decision", rename_all = "snake_case")]
pub enum GateEvent {
    /// The job may start.
    Admitted {
        /// Name of the job.
        job: String,
        /// Name of its node.
        node: String,
        /// Part of the pool in bytes.
        far_bytes: u64,
    },
    /// The running job is charged for another part of the pool.
    Charged {
        /// Name of the job.
        job: String,
        /// Part of the pool in bytes.
        far_bytes: u64,
    },
    /// The admission was taken back: the job had not started in time.
    Withdrawn {
        /// Name of the job.
        job: String,
    },
    /// The job waits.
    Waits {
        /// Name of the job.
        job: String,
        /// Reason, which is a sentence for programs.
        #[serde(serialize_with = "as_sentence")]
        reason: GateWait,
    },
    /// The job is left alone.
    Ignored {
        /// Name of the job.
        job: String,
        /// Reason, in a sentence.
        reason: String,
    },
    /// The scheduler refused a change.
    Refused {
        /// Name of the job.
        job: String,
        /// Name of the change.
        change: &'static str,
        /// Answer of the scheduler.
        error: String,
    },
}

fn as_sentence<S: Serializer>(reason: &GateWait, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(reason)
}

/// Outcome of one round of a gate.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GateRound {
    /// Size of the pool in bytes; `None` if it cannot be reached.
    pub pool_bytes: Option<u64>,
    /// Bytes that the memory servers store, copies counted once; `None` if nothing is known of them.
    pub stored_bytes: Option<u64>,
    /// Bytes that the memory servers can store, copies counted once; `None` if there is no limit.
    pub capacity_bytes: Option<u64>,
    /// Part of the pool for which running and admitted jobs were charged before this round.
    pub charged_bytes: u64,
    /// Part of these bytes for which jobs that run were charged.
    pub held_bytes: u64,
    /// Number of jobs that run.
    pub running: usize,
    /// Decisions, with those that the scheduler refused.
    pub events: Vec<GateEvent>,
}

/// Settings of a gate.
#[derive(Clone, Copy, Debug)]
pub struct GateConfig {
    /// Seconds within which an admitted job must start, or it waits again.
    pub start_within_s: u64,
    /// Seconds of waiting after which a job is overtaken by none.
    pub overtake_within_s: u64,
    /// Whether decisions are only reported.
    pub is_dry_run: bool,
}

impl GateConfig {
    /// Reads the scheduler, decides, and writes what was decided. `servers` is `None` while one of the
    /// memory servers does not answer: then nobody is admitted.
    pub fn round<S: Scheduler>(
        &self,
        scheduler: &mut S,
        servers: Option<PoolServers>,
        now_s: u64,
    ) -> Result<GateRound, S::Error> {
        let state = scheduler.read(now_s)?;
        let pool_bytes = servers.map(|_| state.pool_bytes);
        let known = servers.filter(|servers| *servers != PoolServers::UNKNOWN);
        let mut round = GateRound {
            pool_bytes,
            stored_bytes: known.map(|servers| servers.stored_bytes),
            capacity_bytes: known.map(|servers| servers.capacity_bytes).filter(|bytes| *bytes != u64::MAX),
            ..GateRound::default()
        };
        for (job, reason) in &state.ignored {
            round.events.push(GateEvent::Ignored { job: job.clone(), reason: reason.clone() });
        }
        let (strays, known): (Vec<_>, Vec<_>) = state.jobs.iter().partition(|job| job.phase.is_none());
        for job in strays {
            self.apply(scheduler, job, BookChange::Withdraw, &mut round.events);
        }
        let nodes: Vec<GateNode> = state.nodes.iter().map(|(_, node)| *node).collect();
        let jobs: Vec<GateJob> = known.iter().filter_map(|job| job.gate_job()).collect();
        for job in &jobs {
            if let GatePhase::Admitted { far_bytes, .. } | GatePhase::Running { far_bytes, .. } = job.phase {
                round.charged_bytes = round.charged_bytes.saturating_add(far_bytes);
            }
            if let GatePhase::Running { far_bytes, .. } = job.phase {
                round.held_bytes = round.held_bytes.saturating_add(far_bytes);
                round.running += 1;
            }
        }
        let rules = GateRules {
            pool_bytes,
            servers: servers.unwrap_or(PoolServers::UNKNOWN),
            start_within_s: self.start_within_s,
            overtake_within_s: self.overtake_within_s,
        };
        for decision in decide(&nodes, &jobs, rules) {
            match decision {
                GateDecision::Charge { job, far_bytes } => {
                    self.apply(scheduler, known[job], BookChange::Charge { far_bytes }, &mut round.events);
                }
                GateDecision::Withdraw { job } => {
                    self.apply(scheduler, known[job], BookChange::Withdraw, &mut round.events);
                }
                GateDecision::Admit { job, node, far_bytes } => {
                    let change = BookChange::Admit { node: &state.nodes[node].0, far_bytes, now_s };
                    self.apply(scheduler, known[job], change, &mut round.events);
                }
                GateDecision::Wait { job, reason } => {
                    round.events.push(GateEvent::Waits { job: known[job].id.clone(), reason });
                }
            }
        }
        Ok(round)
    }

    fn apply<S: Scheduler>(
        &self,
        scheduler: &mut S,
        job: &SchedulerJob,
        change: BookChange<'_>,
        events: &mut Vec<GateEvent>,
    ) {
        let done = if self.is_dry_run { Ok(()) } else { scheduler.apply(job, &change) };
        let id = job.id.clone();
        events.push(match (done, change) {
            (Err(error), change) => GateEvent::Refused { job: id, change: change.name(), error: error.to_string() },
            (Ok(()), BookChange::Charge { far_bytes }) => GateEvent::Charged { job: id, far_bytes },
            (Ok(()), BookChange::Withdraw) => GateEvent::Withdrawn { job: id },
            (Ok(()), BookChange::Admit { node, far_bytes, .. }) => {
                GateEvent::Admitted { job: id, node: node.to_owned(), far_bytes }
            }
        });
    }
}

impl BookChange<'_> {
    /// Names of all changes.
    pub const NAMES: [&'static str; 3] = ["charge", "withdraw", "admit"];

    /// Returns the name of the change.
    pub fn name(&self) -> &'static str {
        match self {
            BookChange::Charge { .. } => Self::NAMES[0],
            BookChange::Withdraw => Self::NAMES[1],
            BookChange::Admit { .. } => Self::NAMES[2],
        }
    }
}

impl SchedulerJob {
    fn gate_job(&self) -> Option<GateJob> {
        let phase = self.phase?;
        Some(GateJob { class: self.class.clone(), phase, waited_s: self.waited_s })
    }
}

impl GateRound {
    /// Says how the pool is accounted, in brackets: what jobs were promised, and what servers store.
    fn pool_account(&self) -> String {
        let mib = |bytes: u64| bytes >> 20;
        let mut text = format!(" ({} of {} MiB are promised", mib(self.charged_bytes), self.pool_bytes.map_or(0, mib));
        if let Some(stored) = self.stored_bytes {
            text += &format!("; the memory servers store {}", mib(stored));
            text += &self.capacity_bytes.map_or(" MiB".to_owned(), |most| format!(" of {} MiB", mib(most)));
        }
        text + ")"
    }

    /// Returns the job that none may overtake any more, and what it waits for.
    fn closing_job(&self) -> Option<(&str, &GateWait)> {
        let is_behind = |event: &GateEvent| matches!(event, GateEvent::Waits { reason: GateWait::Turn, .. });
        let first = self.events.iter().position(is_behind)?;
        self.events[..first].iter().rev().find_map(|event| match event {
            GateEvent::Waits {
                job,
                reason: reason @ (GateWait::Cores | GateWait::Near { .. } | GateWait::Far { .. }),
            } => Some((job.as_str(), reason)),
            _ => None,
        })
    }

    /// Says in a sentence what a job does or waits for; `None` if the job has no far memory.
    pub fn explain(&self, job: &str) -> Option<String> {
        self.events.iter().rev().find_map(|event| match event {
            GateEvent::Waits { job: id, reason: GateWait::Starting } if id == job => {
                Some(format!("job {job}: {}", GateWait::Starting))
            }
            GateEvent::Waits { job: id, reason: reason @ GateWait::Far { .. } } if id == job => {
                Some(format!("job {job} waits: {reason}{}", self.pool_account()))
            }
            GateEvent::Waits { job: id, reason: GateWait::Turn } if id == job => {
                let before = self.closing_job();
                let before =
                    before.map_or(String::new(), |(id, reason)| format!("; that is job {id}, for which {reason}"));
                Some(format!("job {job} waits: {}{before}", GateWait::Turn))
            }
            GateEvent::Waits { job: id, reason } if id == job => Some(format!("job {job} waits: {reason}")),
            GateEvent::Admitted { job: id, node, far_bytes } if id == job => {
                let mib = far_bytes >> 20;
                Some(format!("job {job} fits on {node} now, with {mib} MiB of the pool: the gate admits it"))
            }
            GateEvent::Withdrawn { job: id } if id == job => {
                Some(format!("job {job} was admitted and has not started: it waits for the gate again"))
            }
            GateEvent::Ignored { job: id, reason } if id == job => Some(format!("job {job} is left alone: {reason}")),
            GateEvent::Refused { job: id, error, .. } if id == job => Some(format!("job {job}: {error}")),
            _ => None,
        })
    }
}
