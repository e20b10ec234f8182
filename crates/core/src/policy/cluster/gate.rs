//! Admission of jobs with far memory in a cluster whose scheduler knows nothing of it.
//!
//! The scheduler has the queue and the last word about cores and near memory, by which a job counts
//! with its least. The gate says which waiting job may start, on which node, and with how much of
//! the pool. It keeps nothing between two decisions: what was decided is in the scheduler's books,
//! from which jobs come with their [phase](GatePhase). So whatever ends in between, a job, a node or
//! the gate itself, the next decision is right again.
//!
//! The pool is accounted by overflow of nodes ([`fit`](super::fit)), and the scheduler's books by
//! jobs. A job that is admitted is charged for the overflow that it adds. When another job ends, the
//! node's overflow may fall below what its jobs are charged for; the youngest of them is then charged
//! for less. What is charged is never less than the overflow, because no job is charged for more
//! than its memory. Beside these books, memory servers must have room: there, what they store counts
//! if it is more than running jobs were promised.

use super::fit::{Cluster, IndexedCluster, NodeShape, Shortage};
use super::job::{ClassError, JobClass, RunTime};
use alloc::vec::Vec;

/// Node of a cluster, as its scheduler describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateNode {
    /// Cores and near memory. No cores are kept for reclaim.
    pub shape: NodeShape,
    /// Cores that jobs without far memory have.
    pub foreign_cores: u32,
    /// Near memory that jobs without far memory have, in bytes.
    pub foreign_bytes: u64,
    /// Whether jobs can start there.
    pub is_up: bool,
}

/// Progress of a job in the scheduler's books. Nodes are indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatePhase {
    /// The job waits for the gate.
    Waiting,
    /// The job waits for something else, such as its begin time or another job.
    Held,
    /// The gate has named a node, and the job has not started.
    Admitted {
        /// Node of the job.
        node: usize,
        /// Part of the pool that the job is charged for, in bytes.
        far_bytes: u64,
        /// Seconds since the admission.
        age_s: u64,
    },
    /// The job runs.
    Running {
        /// Node of the job.
        node: usize,
        /// Part of the pool that the job is charged for, in bytes.
        far_bytes: u64,
    },
}

/// Job that may have far memory.
#[derive(Clone, Debug, PartialEq)]
pub struct GateJob {
    /// Cores and memory that the job asks for.
    pub class: JobClass,
    /// Progress of the job.
    pub phase: GatePhase,
    /// Seconds for which the job could have started, if there had been room.
    pub waited_s: u64,
}

impl GateJob {
    /// Makes the class of a job with bytes instead of a share. Nothing is known of its run time.
    pub fn class(cores: u32, memory_bytes: u64, least_bytes: u64) -> Result<JobClass, ClassError> {
        let least = if memory_bytes == 0 { 1.0 } else { least_bytes as f64 / memory_bytes as f64 };
        JobClass::new(cores, memory_bytes, least, RunTime::Polynomial(Vec::from([1.0])))
    }
}

/// Memory servers behind a pool, together. Amounts are bytes of jobs: copies of the same are counted once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolServers {
    /// Bytes that they store now. Servers keep copies of pages that have come near, so it can be more
    /// than jobs were promised.
    pub stored_bytes: u64,
    /// Bytes that they can store.
    pub capacity_bytes: u64,
}

impl PoolServers {
    /// Servers of which nothing is known.
    pub const UNKNOWN: PoolServers = PoolServers { stored_bytes: 0, capacity_bytes: u64::MAX };

    /// Returns the bytes for which there is room: of what servers store and what running jobs were
    /// promised the larger counts, beside what was promised to jobs that have not started.
    fn room_bytes(&self, jobs: &[GateJob]) -> u64 {
        let (mut running, mut starting) = (0u64, 0u64);
        for job in jobs {
            match job.phase {
                GatePhase::Running { far_bytes, .. } => running = running.saturating_add(far_bytes),
                GatePhase::Admitted { far_bytes, .. } => starting = starting.saturating_add(far_bytes),
                GatePhase::Waiting | GatePhase::Held => {}
            }
        }
        self.capacity_bytes.saturating_sub(self.stored_bytes.max(running)).saturating_sub(starting)
    }
}

/// Patience of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateRules {
    /// Size of the pool in bytes; `None` if it cannot be reached. Then nobody is admitted.
    pub pool_bytes: Option<u64>,
    /// Memory servers behind the pool.
    pub servers: PoolServers,
    /// Seconds within which an admitted job must start, or it waits again.
    pub start_within_s: u64,
    /// Seconds of waiting after which a job is overtaken by none.
    pub overtake_within_s: u64,
}

/// Reason why a job waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateWait {
    /// Something that is not the gate's business.
    #[error(
        "it is held, or waits for its begin time or for another job: `squeue` or `kubectl describe pod` says for what"
    )]
    Held,
    /// The job may start; the scheduler has not started it.
    #[error("it is admitted, and the scheduler has not started it yet")]
    Starting,
    /// The memory servers do not answer.
    #[error("a memory server does not answer, so nobody is admitted")]
    Pool,
    /// A job before it in the queue has waited so long that none may overtake it.
    #[error("a job before it has waited so long that none overtakes it any more")]
    Turn,
    /// All cores are in use.
    #[error("no node has enough free cores")]
    Cores,
    /// The near memory of all nodes is promised.
    #[error(
        "{} MiB near are missing on the best node, even if all jobs there have their least",
        missing_bytes.div_ceil(1 << 20)
    )]
    Near {
        /// Bytes that are missing.
        missing_bytes: u64,
    },
    /// The pool is promised.
    #[error("{} MiB of the pool are missing", missing_bytes.div_ceil(1 << 20))]
    Far {
        /// Bytes that are missing.
        missing_bytes: u64,
    },
    /// No node is large enough, nor is the pool, even without any other job.
    #[error("it fits on no node, even if nothing else runs: ask for less memory, fewer cores, or a smaller least")]
    Never,
}

impl GateWait {
    /// Names of all reasons, in the order of the variants.
    pub const NAMES: [&'static str; 8] = ["held", "starting", "pool", "turn", "cores", "near", "far", "never"];

    /// Returns the name of the reason, without its amounts.
    pub fn name(&self) -> &'static str {
        Self::NAMES[match self {
            GateWait::Held => 0,
            GateWait::Starting => 1,
            GateWait::Pool => 2,
            GateWait::Turn => 3,
            GateWait::Cores => 4,
            GateWait::Near { .. } => 5,
            GateWait::Far { .. } => 6,
            GateWait::Never => 7,
        }]
    }
}

/// Change of the scheduler's books, or a reason for none. Jobs and nodes are indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateDecision {
    /// A running job is charged for another part of the pool. These come first.
    Charge {
        /// Running job.
        job: usize,
        /// Part of the pool, in bytes.
        far_bytes: u64,
    },
    /// An admitted job has not started in time, or its node has gone down, and it waits again.
    Withdraw {
        /// Admitted job.
        job: usize,
    },
    /// A job may start.
    Admit {
        /// Waiting job.
        job: usize,
        /// Node where it starts.
        node: usize,
        /// Part of the pool that it is charged for, in bytes.
        far_bytes: u64,
    },
    /// A job waits.
    Wait {
        /// Waiting job.
        job: usize,
        /// Reason.
        reason: GateWait,
    },
}

/// Decides about all jobs, which are in the order of their priority, highest first. What a job lacks
/// is said for the time after all admissions.
pub fn decide(nodes: &[GateNode], jobs: &[GateJob], rules: GateRules) -> Vec<GateDecision> {
    let cluster = books(nodes, jobs, rules.pool_bytes.unwrap_or(0));
    let mut decisions = charges(&cluster, jobs);
    let mut cluster = IndexedCluster::new(cluster, rules.servers.room_bytes(jobs));
    let empty = cluster.best_empty_nodes();
    let (mut is_closed, mut refused, mut lacking) = (false, Refusals::default(), Vec::new());
    for (index, job) in jobs.iter().enumerate() {
        let wait = |reason| GateDecision::Wait { job: index, reason };
        let class = &job.class;
        let reason = match job.phase {
            GatePhase::Running { .. } => continue,
            GatePhase::Admitted { node, age_s, .. } if age_s >= rules.start_within_s || !nodes[node].is_up => {
                decisions.push(GateDecision::Withdraw { job: index });
                continue;
            }
            GatePhase::Admitted { .. } => GateWait::Starting,
            GatePhase::Held => GateWait::Held,
            GatePhase::Waiting if rules.pool_bytes.is_none() => GateWait::Pool,
            GatePhase::Waiting if is_closed => GateWait::Turn,
            GatePhase::Waiting if !empty.take(class) => GateWait::Never,
            GatePhase::Waiting => {
                let found = if refused.contain(class) { None } else { cluster.find(class) };
                if let Some(node) = found {
                    let far_bytes = cluster.admit(node, class);
                    decisions.push(GateDecision::Admit { job: index, node, far_bytes });
                    continue;
                }
                refused.add(class);
                // A job that can never start keeps nobody waiting.
                is_closed = job.waited_s >= rules.overtake_within_s;
                lacking.push(decisions.len());
                GateWait::Cores
            }
        };
        decisions.push(wait(reason));
    }
    let nodes = cluster.best_nodes();
    for decision in lacking {
        let GateDecision::Wait { job, reason } = &mut decisions[decision] else { continue };
        *reason = nodes.shortage(&jobs[*job].class).into();
    }
    decisions
}

/// Cores, memory and least memory of jobs that fitted nowhere. Other jobs that need as much of
/// everything fit nowhere either, not even after others were admitted.
#[derive(Default)]
struct Refusals(Vec<(u32, u64, u64)>);

impl Refusals {
    fn contain(&self, class: &JobClass) -> bool {
        let needs = |(cores, memory, least): &(u32, u64, u64)| {
            class.cores() >= *cores && class.memory_bytes() >= *memory && class.least_bytes() >= *least
        };
        self.0.iter().any(needs)
    }

    /// Adds a job, in the place of those that need as much of everything.
    fn add(&mut self, class: &JobClass) {
        if self.contain(class) {
            return;
        }
        let (cores, memory, least) = (class.cores(), class.memory_bytes(), class.least_bytes());
        self.0.retain(|other| other.0 < cores || other.1 < memory || other.2 < least);
        self.0.push((cores, memory, least));
    }
}

/// Nodes where one waiting job may start, for a scheduler that chooses among them itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateOffer {
    /// For each node, the part of the pool that the job would be charged for there, or the reason why
    /// it may not start there.
    pub nodes: Vec<Result<u64, GateWait>>,
}

impl GateOffer {
    /// Returns the node that [`decide`] would name, if only these nodes were there: the first where all
    /// of the job is near, else the first where it fits.
    pub fn best(&self, nodes: impl Iterator<Item = usize> + Clone) -> Option<usize> {
        let fits = |is_good: fn(u64) -> bool| {
            nodes.clone().find(|&node| self.nodes.get(node).is_some_and(|fit| fit.is_ok_and(is_good)))
        };
        fits(|far_bytes| far_bytes == 0).or_else(|| fits(|_| true))
    }
}

/// Finds out where the waiting job `asked` may start. Jobs are in the order of their priority, as for
/// [`decide`]. The error is a reason that holds on every node.
///
/// Jobs before it that fit somewhere are the scheduler's to start first. A job before it that fits
/// nowhere, and has waited too long to be overtaken, closes the gate.
pub fn offer(nodes: &[GateNode], jobs: &[GateJob], asked: usize, rules: GateRules) -> Result<GateOffer, GateWait> {
    let job = &jobs[asked];
    match job.phase {
        GatePhase::Waiting => {}
        GatePhase::Held => return Err(GateWait::Held),
        GatePhase::Admitted { .. } | GatePhase::Running { .. } => return Err(GateWait::Starting),
    }
    let Some(pool_bytes) = rules.pool_bytes else { return Err(GateWait::Pool) };
    let cluster = books(nodes, jobs, pool_bytes);
    let room_bytes = rules.servers.room_bytes(jobs);
    let fit = |node, class: &JobClass| match cluster.fit(node, class)? {
        far_bytes if far_bytes > room_bytes => Err(GateWait::Far { missing_bytes: far_bytes - room_bytes }),
        far_bytes => Ok(far_bytes),
    };
    let closes = |before: &GateJob| {
        before.phase == GatePhase::Waiting
            && before.waited_s >= rules.overtake_within_s
            && (0..nodes.len()).all(|node| fit(node, &before.class).is_err())
            && cluster.takes(&before.class)
    };
    if jobs[..asked].iter().any(closes) {
        return Err(GateWait::Turn);
    }
    if !cluster.takes(&job.class) {
        return Err(GateWait::Never);
    }
    Ok(GateOffer { nodes: (0..nodes.len()).map(|node| fit(node, &job.class)).collect() })
}

/// Enters all jobs that have a node.
fn books(nodes: &[GateNode], jobs: &[GateJob], pool_bytes: u64) -> Cluster {
    let shapes: Vec<NodeShape> = nodes.iter().map(|node| node.shape).collect();
    let mut cluster = Cluster::new(&shapes, pool_bytes);
    for (index, node) in nodes.iter().enumerate() {
        // Nothing starts where all cores are taken.
        let cores = if node.is_up { node.foreign_cores } else { node.shape.cores.max(node.foreign_cores) };
        cluster.occupy(index, cores, node.foreign_bytes);
    }
    for job in jobs {
        if let GatePhase::Admitted { node, .. } | GatePhase::Running { node, .. } = job.phase {
            cluster.admit(node, &job.class);
        }
    }
    cluster
}

/// Makes the jobs of each node charged for exactly its overflow, as far as running jobs can be.
fn charges(cluster: &Cluster, jobs: &[GateJob]) -> Vec<GateDecision> {
    let mut charged = alloc::vec![0u64; cluster.nodes()];
    for job in jobs {
        if let GatePhase::Admitted { node, far_bytes, .. } | GatePhase::Running { node, far_bytes } = job.phase {
            charged[node] = charged[node].saturating_add(far_bytes);
        }
    }
    let mut decisions = Vec::new();
    // The lowest priority, which is mostly the youngest job, is changed first.
    for (index, job) in jobs.iter().enumerate().rev() {
        let GatePhase::Running { node, far_bytes } = job.phase else { continue };
        let overflow = cluster.overflow_bytes(node);
        let others = charged[node] - far_bytes;
        let new = overflow.saturating_sub(others).min(job.class.memory_bytes());
        if new != far_bytes {
            charged[node] = others + new;
            decisions.push(GateDecision::Charge { job: index, far_bytes: new });
        }
    }
    // Less first, so that the pool has room for the others.
    decisions.sort_by_key(|decision| match *decision {
        GateDecision::Charge { job, far_bytes } => match jobs[job].phase {
            GatePhase::Running { far_bytes: before, .. } => far_bytes > before,
            _ => false,
        },
        _ => false,
    });
    decisions
}

impl From<Shortage> for GateWait {
    fn from(shortage: Shortage) -> GateWait {
        match shortage {
            Shortage::Cores => GateWait::Cores,
            Shortage::Near(missing_bytes) => GateWait::Near { missing_bytes },
            Shortage::Far(missing_bytes) => GateWait::Far { missing_bytes },
        }
    }
}

#[cfg(test)]
mod tests;
