//! Agent of a node: divides the node's near memory among the jobs that run on it, and lets jobs
//! start when there is room.
//!
//! Decisions are pure: the time is an argument, and jobs are met through [`LocalJobs`]. A job waits
//! in the order of its arrival. When it fits, the node is divided anew as if it ran already; the
//! others are told to shrink, and it starts when what they have left is enough for its budget. Near
//! memory is counted by what jobs were promised or by what they are measured to have from outside,
//! whichever is more, so that a job that ignores its budget keeps others waiting and starves none.
//!
//! Before each division the agent looks at what jobs wait for far memory, and learns their curves
//! ([`LearnedCurve`]); and at how much the node waits for memory of any kind. A node that does has less
//! than was said, and the agent withholds a part until it does no longer.
//!
//! Far memory is promised only as far as memory servers have [room](ServerRoom) for it, beside what
//! running jobs were promised and have not stored yet.
//!
//! The agent keeps nothing that running jobs do not show: one that starts again
//! [adopts](Agent::adopt) them.

#[cfg(test)]
mod tests;

use core::time::Duration;
use farfield_core::policy::cluster::node::{approach, beside_bytes, budget_bytes};
use farfield_core::policy::cluster::{
    ClaimError, Cluster, JobBudget, JobClaim, JobClass, JobProgress, LearnedCurve, NodeShape, Shortage, SplitRule,
    Splitter,
};
use farfield_core::policy::curve::Point;

/// Interval between two divisions while no job starts or ends.
pub const DIVIDE_EVERY: Duration = Duration::from_secs(10);
/// Time for which a job may have more than its budget before others count on it no longer.
pub const SHRINK_WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of jobs, waiting ones included. The sum of what so many ask for is a number: a
/// class of jobs has less than 2^53 bytes.
pub const JOBS_MAX: usize = 1 << 11;
/// Time for which a job has had its budget before it counts what it has beside that.
const SETTLED_AFTER: Duration = Duration::from_secs(1);
/// Part of a job's work that counts as left at least.
const REMAINING_MIN: f64 = 0.05;

/// Parts of a node's time in which everything waits for memory: above the first the agent withholds
/// more of it, below the second less.
const PRESSURE_MARKS: (f64, f64) = (0.05, 0.01);
/// Part of the node's memory that is withheld or given back at a time, and part that is withheld at most.
const WITHHELD_PARTS: (u64, u64) = (32, 4);

/// Number of a job: the process id of its runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobNumber(pub u32);

/// Running jobs of a node, as an agent meets them.
pub trait LocalJobs {
    /// Measures the near memory of a job from outside, in bytes. Amounts up to `enough_bytes` need
    /// not be told apart. `None` if the job has ended.
    fn near_bytes(&mut self, job: JobNumber, enough_bytes: u64) -> Option<u64>;

    /// Tells a job how much near memory it may have at most, in bytes.
    fn offer(&mut self, job: JobNumber, bytes: u64);

    /// Returns what the job was told last, in bytes, whoever told it. `None` if it cannot be seen.
    fn told_bytes(&mut self, job: JobNumber) -> Option<u64>;

    /// Returns the memory of a job that is stored far, in bytes, as the job itself counts it.
    fn far_bytes(&mut self, job: JobNumber) -> u64;

    /// Measures how many times as long the job has taken since the last call as it would have without
    /// waiting for far memory. `None` if it did too little for a number.
    fn slowdown(&mut self, job: JobNumber) -> Option<f64>;

    /// Returns the part of the last seconds in which everything on the node waited for memory, between
    /// 0 and 1. Far memory does not count.
    fn pressure(&mut self) -> f64;
}

/// Room that the memory servers of a pool have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerRoom {
    /// Nothing is known of them, or there are none: `far_bytes` of the [`NodeConfig`] alone counts.
    #[default]
    Unknown,
    /// The servers were asked anew, because jobs have come or gone, and have not answered yet. No job starts.
    Asked,
    /// A server does not answer. No job starts.
    Silent,
    /// The servers all answer.
    Free {
        /// Bytes of jobs for which there is room, copies counted once.
        bytes: u64,
    },
}

/// Memory that an agent divides, and the policy by which it does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeConfig {
    /// Near memory for jobs, in bytes.
    pub near_bytes: u64,
    /// Far memory that the node may use, in bytes: what jobs may ask for beyond `near_bytes`, all
    /// together. `None`: without bound.
    pub far_bytes: Option<u64>,
    /// Rule of division.
    pub rule: SplitRule,
}

/// Reason why a job is not taken, now or later.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum RegisterError {
    /// A claim of nonsense.
    #[error("{0}")]
    Claim(#[from] ClaimError),
    /// The node could never have the least near memory of the job.
    #[error(
        "the job needs at least {} MiB near, and the node has {} MiB for jobs",
        mib(*least_bytes),
        near_bytes >> 20
    )]
    NeverNear {
        /// Least near memory of the job.
        least_bytes: u64,
        /// Near memory of the node.
        near_bytes: u64,
    },
    /// The node may never use as much far memory as the job needs.
    #[error("the job needs {} MiB of far memory, and the node may use {} MiB", mib(*far_bytes), most_bytes >> 20)]
    NeverFar {
        /// Memory of the job beyond the node's near memory.
        far_bytes: u64,
        /// Far memory that the node may use.
        most_bytes: u64,
    },
    /// More jobs than anybody runs on a node.
    #[error("the node has {JOBS_MAX} jobs already")]
    TooMany,
    /// A runner has one job.
    #[error("this runner has a job already")]
    Twice,
}

/// Returns bytes as MiB, rounded up.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Reason why a job waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitReason {
    /// Jobs that arrived before it wait, too.
    #[error("{jobs} jobs that came before it wait, too")]
    Turn {
        /// Number of jobs before it.
        jobs: usize,
    },
    /// The least near memory of all jobs and of this one does not fit into the node.
    #[error("{} MiB near are missing even if all jobs have no more than they need", mib(*missing_bytes))]
    Near {
        /// Bytes that are missing.
        missing_bytes: u64,
    },
    /// The jobs of the node would ask for more far memory than they may.
    #[error("{} MiB of far memory are missing: the node's jobs may have no more", mib(*missing_bytes))]
    Far {
        /// Bytes that are missing.
        missing_bytes: u64,
    },
    /// The memory servers have no room for what would be far.
    #[error("the memory servers have no room for {} MiB of what would be far", mib(*missing_bytes))]
    ServersFull {
        /// Bytes for which there is no room.
        missing_bytes: u64,
    },
    /// The memory servers have not said yet how much room they have.
    #[error("the memory servers are asked how much room they have")]
    ServersAsked,
    /// A memory server does not answer.
    #[error("a memory server does not answer, so no job starts")]
    ServersSilent,
    /// Other jobs are shrinking.
    #[error("others have {} MiB to give up yet", mib(*missing_bytes))]
    Shrinking {
        /// Bytes that they have to give up yet.
        missing_bytes: u64,
    },
}

/// State of a job in its agent.
#[derive(Clone, Debug)]
pub struct AgentJob {
    /// Number of the job.
    pub number: JobNumber,
    /// Class that it has claimed.
    pub class: JobClass,
    /// Class by which it is divided for: with the curve that it has shown.
    pub learned: JobClass,
    /// Slowdown by far memory between the last two divisions, if it was measured.
    pub slowdown: Option<f64>,
    curve: LearnedCurve,
    /// Time of the last change of its budget.
    moved: Duration,
    /// Near memory that it keeps beside its budget, as stacks.
    beside_bytes: u64,
    /// Budget that it was told, what it has, and what it shall have.
    pub budget: JobBudget,
    /// Memory of the job that is stored far, as itself counts it, in bytes. Some of it may be near, too.
    pub far_bytes: u64,
    /// Number of times that somebody else had changed its budget, and the agent changed it back.
    pub corrections: u64,
    /// Whether its far memory is that of another tenant of the servers than the agent.
    has_own_token: bool,
    /// Far memory of the job when the servers last said what room they have.
    stored_bytes: u64,
    /// Reason why it waits; `None` if it runs.
    pub waits: Option<WaitReason>,
    /// Age of the job when the agent took it, and time of that.
    age: Duration,
    since: Duration,
    /// Time since which the job has more than its budget.
    beyond_since: Option<Duration>,
}

impl AgentJob {
    /// Tells whether the job runs.
    pub fn is_running(&self) -> bool {
        self.waits.is_none()
    }

    /// Returns the part of its work that is left at `now`, if it has run with its present share all
    /// the time.
    fn remaining(&self, now: Duration) -> f64 {
        let share = self.budget.offered_bytes as f64 / self.class.memory_bytes() as f64;
        let elapsed = (self.age + now.saturating_sub(self.since)).as_secs_f64();
        let whole = self.learned.run_time().at(share.clamp(self.class.least(), 1.0));
        if self.is_running() { (1.0 - elapsed / whole).max(REMAINING_MIN) } else { 1.0 }
    }

    /// Takes the slowdown of the time since `looked`.
    fn learn(&mut self, slowdown: Option<f64>, looked: Duration) {
        self.slowdown = slowdown;
        // It says something of the present share if the job had that nearly all the time. What grows is
        // told a moment after others have shrunk.
        let had_it = self.moved <= looked + SETTLED_AFTER && self.budget.is_kept();
        let Some(slowdown) = slowdown.filter(|_| had_it) else { return };
        let near = self.budget.offered_bytes as f64 / self.class.memory_bytes() as f64;
        self.curve.observe(Point { near: near.min(1.0), slowdown });
        self.learned = self.curve.class(&self.class);
    }

    /// Returns the bytes that others must not count on: what the job has held beyond its budget for
    /// longer than a job may take to shrink.
    fn seized_bytes(&self, now: Duration) -> u64 {
        let is_late = self.beyond_since.is_some_and(|since| now.saturating_sub(since) >= SHRINK_WITHIN);
        if is_late { self.budget.held_bytes().saturating_sub(self.budget.offered_bytes) } else { 0 }
    }
}

/// Agent of one node.
#[derive(Debug)]
pub struct Agent {
    config: NodeConfig,
    /// Jobs in the order of their arrival.
    jobs: Vec<AgentJob>,
    divided: Option<Duration>,
    /// Memory that the last division had.
    divided_bytes: u64,
    /// Job that the last division counted as running although it waits.
    candidate: Option<JobNumber>,
    /// Time of the last look at slowdowns and pressure.
    looked: Option<Duration>,
    /// Part of the node's memory that is not divided, because the node is short of memory.
    withheld_bytes: u64,
    /// Pressure at the last look.
    pressure: f64,
    servers: ServerRoom,
}

impl Agent {
    /// Makes an agent without jobs.
    pub fn new(config: NodeConfig) -> Agent {
        Agent {
            config,
            jobs: Vec::new(),
            divided: None,
            divided_bytes: config.near_bytes,
            candidate: None,
            looked: None,
            withheld_bytes: 0,
            pressure: 0.0,
            servers: ServerRoom::Unknown,
        }
    }

    /// Returns what the agent divides.
    pub fn config(&self) -> NodeConfig {
        self.config
    }

    /// Returns all jobs in the order of their arrival.
    pub fn jobs(&self) -> &[AgentJob] {
        &self.jobs
    }

    /// Returns the job with this number.
    pub fn job(&self, number: JobNumber) -> Option<&AgentJob> {
        self.jobs.iter().find(|job| job.number == number)
    }

    /// Returns the near memory that jobs hold: their budgets, or what they have if that is more.
    pub fn held_bytes(&self) -> u64 {
        self.running().fold(0, |sum, job| sum.saturating_add(job.budget.held_bytes()))
    }

    /// Returns the part of the node's near memory that is not divided, because the node is short of
    /// memory.
    pub fn withheld_bytes(&self) -> u64 {
        self.withheld_bytes
    }

    /// Returns the part of the last seconds before the last division in which everything on the node
    /// waited for memory.
    pub fn pressure(&self) -> f64 {
        self.pressure
    }

    /// Returns the memory that running jobs asked for beyond the near memory of the node.
    pub fn overflow_bytes(&self) -> u64 {
        let asked = self.running().fold(0u64, |sum, job| sum.saturating_add(job.class.memory_bytes()));
        asked.saturating_sub(self.config.near_bytes)
    }

    /// Returns the room that the memory servers had when they last said so.
    pub fn servers(&self) -> ServerRoom {
        self.servers
    }

    /// Takes what the memory servers have just said, or that they were asked.
    pub fn on_servers(&mut self, servers: ServerRoom, node: &mut impl LocalJobs) {
        self.servers = servers;
        if servers == ServerRoom::Asked {
            return;
        }
        for job in self.jobs.iter_mut().filter(|job| job.is_running()) {
            job.stored_bytes = node.far_bytes(job.number);
        }
    }

    /// Checks whether the node could ever run a job with this claim, and returns its class.
    pub fn check(&self, claim: &JobClaim) -> Result<JobClass, RegisterError> {
        let class = claim.class()?;
        let NodeConfig { near_bytes, far_bytes, .. } = self.config;
        if class.least_bytes() > near_bytes {
            return Err(RegisterError::NeverNear { least_bytes: class.least_bytes(), near_bytes });
        }
        let (far, most_bytes) = (class.memory_bytes().saturating_sub(near_bytes), far_bytes.unwrap_or(u64::MAX));
        if far > most_bytes {
            return Err(RegisterError::NeverFar { far_bytes: far, most_bytes });
        }
        Ok(class)
    }

    /// Takes a job that waits for its start.
    pub fn register(&mut self, number: JobNumber, claim: &JobClaim, now: Duration) -> Result<(), RegisterError> {
        let waits = Some(WaitReason::Turn { jobs: self.jobs.iter().filter(|job| !job.is_running()).count() });
        self.add(number, claim, JobBudget::default(), waits, Duration::ZERO, now)
    }

    /// Notes that the memory servers know a job as another tenant than the agent, so that the room of
    /// the agent's tenant says nothing of it.
    pub fn set_own_token(&mut self, number: JobNumber) {
        self.jobs.iter_mut().filter(|job| job.number == number).for_each(|job| job.has_own_token = true);
    }

    /// Takes a job that runs already, with the budget that it was told, for `age`.
    pub fn adopt(
        &mut self,
        number: JobNumber,
        claim: &JobClaim,
        offered_bytes: u64,
        age: Duration,
        now: Duration,
    ) -> Result<(), RegisterError> {
        let budget = JobBudget { offered_bytes, measured_bytes: 0, target_bytes: offered_bytes };
        self.add(number, claim, budget, None, age, now)
    }

    fn add(
        &mut self,
        number: JobNumber,
        claim: &JobClaim,
        budget: JobBudget,
        waits: Option<WaitReason>,
        age: Duration,
        now: Duration,
    ) -> Result<(), RegisterError> {
        if self.job(number).is_some() {
            return Err(RegisterError::Twice);
        }
        if self.jobs.len() >= JOBS_MAX {
            return Err(RegisterError::TooMany);
        }
        let class = self.check(claim)?;
        self.jobs.push(AgentJob {
            number,
            learned: class.clone(),
            class,
            slowdown: None,
            curve: LearnedCurve::default(),
            moved: now,
            beside_bytes: 0,
            budget,
            far_bytes: 0,
            corrections: 0,
            has_own_token: false,
            stored_bytes: 0,
            waits,
            age,
            since: now,
            beyond_since: None,
        });
        self.divided = None;
        Ok(())
    }

    /// Forgets a job that has ended, or that waits no longer. Returns whether there was one.
    pub fn remove(&mut self, number: JobNumber) -> bool {
        let before = self.jobs.len();
        self.jobs.retain(|job| job.number != number);
        if self.jobs.len() != before {
            self.divided = None;
        }
        self.jobs.len() != before
    }

    /// Measures running jobs, moves their budgets, and returns the jobs that start now, whose
    /// budgets were offered before. Is to be called some times in a second.
    pub fn update(&mut self, now: Duration, node: &mut impl LocalJobs) -> Vec<JobNumber> {
        self.measure(now, node);
        self.look(now, node);
        let mut started = Vec::new();
        // As many jobs as fit start at once, each one after the others have been told to shrink.
        loop {
            self.decide_candidate(now);
            self.divide(now);
            self.approach(now, node);
            match self.start_candidate(now, node) {
                Some(number) => started.push(number),
                None => break,
            }
        }
        self.explain();
        started
    }

    fn running(&self) -> impl Iterator<Item = &AgentJob> {
        self.jobs.iter().filter(|job| job.is_running())
    }

    fn measure(&mut self, now: Duration, node: &mut impl LocalJobs) {
        let mut ended = Vec::new();
        for job in self.jobs.iter_mut().filter(|job| job.is_running()) {
            let Some(bytes) = node.near_bytes(job.number, job.budget.offered_bytes) else {
                ended.push(job.number);
                continue;
            };
            job.budget.measured_bytes = bytes;
            job.far_bytes = node.far_bytes(job.number);
            let offered_bytes = job.budget.offered_bytes;
            if node.told_bytes(job.number).is_some_and(|told_bytes| told_bytes != offered_bytes) {
                job.corrections += 1;
                node.offer(job.number, offered_bytes);
            }
            if job.budget.is_kept() && now.saturating_sub(job.moved) >= SETTLED_AFTER {
                job.beside_bytes = beside_bytes(job.beside_bytes, job.budget.beyond_bytes());
            }
            job.beyond_since = if job.budget.is_kept() { None } else { job.beyond_since.or(Some(now)) };
        }
        for number in ended {
            self.remove(number);
        }
    }

    /// Looks at what jobs and the node wait for, as often as the node is divided.
    fn look(&mut self, now: Duration, node: &mut impl LocalJobs) {
        let looked = self.looked.unwrap_or_default();
        if self.looked.is_some() && now.saturating_sub(looked) < DIVIDE_EVERY {
            return;
        }
        // What was learned counts at once, and jobs then keep their budgets until the next look.
        (self.looked, self.divided) = (Some(now), None);
        for job in self.jobs.iter_mut().filter(|job| job.is_running()) {
            job.learn(node.slowdown(job.number), looked);
        }
        self.pressure = node.pressure();
        let step = self.config.near_bytes / WITHHELD_PARTS.0;
        if self.pressure > PRESSURE_MARKS.0 {
            self.withheld_bytes = (self.withheld_bytes + step).min(self.config.near_bytes / WITHHELD_PARTS.1);
        } else if self.pressure < PRESSURE_MARKS.1 {
            self.withheld_bytes = self.withheld_bytes.saturating_sub(step);
        }
    }

    /// Returns the memory that can be divided: without what is withheld, and what jobs hold beyond
    /// their budgets and will not give up, but never less than what was promised to those that run.
    fn memory_bytes(&self, now: Duration) -> u64 {
        let seized = self.running().fold(0u64, |sum, job| sum.saturating_add(job.seized_bytes(now)));
        let promised = self.running().fold(0u64, |sum, job| sum.saturating_add(job.class.least_bytes()));
        self.config.near_bytes.saturating_sub(self.withheld_bytes + seized).max(promised)
    }

    /// Chooses the job that is to start next: the one that waits longest, if it fits.
    fn decide_candidate(&mut self, now: Duration) {
        let memory_bytes = self.memory_bytes(now);
        let first = self.jobs.iter().position(|job| !job.is_running());
        let mut candidate = None;
        if let Some(index) = first {
            match self.lacks(&self.jobs[index], memory_bytes) {
                Some(reason) => self.jobs[index].waits = Some(reason),
                None => candidate = Some(self.jobs[index].number),
            }
        }
        let divided_bytes = self.divisible_bytes(candidate, memory_bytes);
        if candidate != self.candidate || divided_bytes != self.divided_bytes {
            self.divided = None;
        }
        (self.candidate, self.divided_bytes) = (candidate, divided_bytes);
    }

    /// Returns the part of `memory_bytes` that budgets may add up to, so that with what jobs keep beside
    /// them it is no more; but never less than the least of those that run and of the candidate.
    fn divisible_bytes(&self, candidate: Option<JobNumber>, memory_bytes: u64) -> u64 {
        let (mut beside, mut promised) = (0u64, 0u64);
        for job in self.jobs.iter().filter(|job| job.is_running() || Some(job.number) == candidate) {
            beside = beside.saturating_add(job.beside_bytes);
            promised = promised.saturating_add(job.class.least_bytes());
        }
        memory_bytes.saturating_sub(beside).max(promised)
    }

    /// Returns what a job lacks to run beside those that do; `None` if it fits.
    fn lacks(&self, job: &AgentJob, memory_bytes: u64) -> Option<WaitReason> {
        let class = &job.class;
        match self.servers {
            ServerRoom::Asked => return Some(WaitReason::ServersAsked),
            ServerRoom::Silent => return Some(WaitReason::ServersSilent),
            ServerRoom::Unknown | ServerRoom::Free { .. } => {}
        }
        // Cores are not the agent's business.
        let shape = NodeShape { cores: u32::MAX, reclaim_cores: 0, memory_bytes };
        let most_bytes = self.config.far_bytes.unwrap_or(u64::MAX);
        let mut node = Cluster::new(&[shape], most_bytes);
        self.running().for_each(|job| node.admit(0, &job.class));
        match node.fit(0, class) {
            Ok(far_bytes) => {
                let room_bytes = if job.has_own_token { u64::MAX } else { self.room_bytes(memory_bytes) };
                let missing_bytes = far_bytes.saturating_sub(room_bytes);
                (missing_bytes > 0).then_some(WaitReason::ServersFull { missing_bytes })
            }
            Err(Shortage::Far(missing_bytes)) => Some(WaitReason::Far { missing_bytes }),
            Err(Shortage::Near(missing_bytes)) => Some(WaitReason::Near { missing_bytes }),
            Err(Shortage::Cores) => unreachable!("no node has as many cores"),
        }
    }

    /// Returns the bytes for which the memory servers have room, beside what running jobs were promised
    /// and had not stored when the servers were asked.
    fn room_bytes(&self, memory_bytes: u64) -> u64 {
        let ServerRoom::Free { bytes } = self.servers else { return u64::MAX };
        let (mut asked, mut stored) = (0u64, 0u64);
        for job in self.running().filter(|job| !job.has_own_token) {
            asked = asked.saturating_add(job.class.memory_bytes());
            stored = stored.saturating_add(job.stored_bytes);
        }
        bytes.saturating_sub(asked.saturating_sub(memory_bytes).saturating_sub(stored))
    }

    /// Divides the node among the jobs that run and the candidate, if something has changed or the
    /// last division is old.
    fn divide(&mut self, now: Duration) {
        if self.divided.is_some_and(|at| now.saturating_sub(at) < DIVIDE_EVERY) {
            return;
        }
        self.divided = Some(now);
        let is_divided_for = |job: &AgentJob| job.is_running() || Some(job.number) == self.candidate;
        let among: Vec<usize> = (0..self.jobs.len()).filter(|&index| is_divided_for(&self.jobs[index])).collect();
        let classes: Vec<JobClass> = among.iter().map(|&index| self.jobs[index].learned.clone()).collect();
        let progress =
            |(class, &index): (usize, &usize)| JobProgress { class, remaining: self.jobs[index].remaining(now) };
        let progress: Vec<JobProgress> = among.iter().enumerate().map(progress).collect();
        let mut shares = Vec::new();
        let mut splitter = Splitter::new(self.config.rule, &classes);
        let fits = splitter.split(&classes, &progress, self.divided_bytes, &mut shares).is_ok();
        for (position, &index) in among.iter().enumerate() {
            let job = &mut self.jobs[index];
            let (memory_bytes, least_bytes) = (job.class.memory_bytes(), job.class.least_bytes());
            // A node that has become too small for its jobs keeps what it has promised.
            job.budget.target_bytes =
                if fits { budget_bytes(shares[position], memory_bytes, least_bytes) } else { least_bytes };
        }
    }

    /// Moves the budgets of running jobs towards their targets.
    fn approach(&mut self, now: Duration, node: &mut impl LocalJobs) {
        let mut budgets: Vec<JobBudget> = self.running().map(|job| job.budget).collect();
        approach(&mut budgets, self.config.near_bytes);
        for (job, budget) in self.jobs.iter_mut().filter(|job| job.is_running()).zip(budgets) {
            if job.budget.offered_bytes != budget.offered_bytes {
                node.offer(job.number, budget.offered_bytes);
                job.moved = now;
            }
            job.budget = budget;
        }
    }

    /// Starts the candidate if there is room for its budget.
    fn start_candidate(&mut self, now: Duration, node: &mut impl LocalJobs) -> Option<JobNumber> {
        let number = self.candidate?;
        let room = self.config.near_bytes.saturating_sub(self.held_bytes());
        let job = self.jobs.iter_mut().find(|job| job.number == number)?;
        let target = job.budget.target_bytes;
        if room < target {
            job.waits = Some(WaitReason::Shrinking { missing_bytes: target - room });
            return None;
        }
        job.budget = JobBudget { offered_bytes: target, measured_bytes: 0, target_bytes: target };
        (job.waits, job.since, job.moved) = (None, now, now);
        node.offer(number, target);
        self.candidate = None;
        Some(number)
    }

    /// Notes why jobs behind the first one wait.
    fn explain(&mut self) {
        let waiting = self.jobs.iter_mut().filter(|job| !job.is_running());
        for (jobs, job) in waiting.enumerate().skip(1) {
            job.waits = Some(WaitReason::Turn { jobs });
        }
    }
}
