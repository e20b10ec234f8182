//! Recorded cluster on which a gate can be tried: jobs of a [`Scenario`] arrive, run and end in
//! virtual time, and start only where the gate has admitted them.
//!
//! Between two rounds of the gate the simulator goes on. Its jobs get slower and faster with their
//! near memory, which is divided as by the agents of nodes. The scheduler has licences, like Slurm:
//! an admitted job starts before the next round if near memory, cores and the pool are there, and
//! keeps what it was admitted with if it has to begin again.

use super::{BookChange, GateConfig, GateEvent, GateJob, GateNode, GatePhase, Scheduler, SchedulerJob, SchedulerState};
use crate::sim::{JobRecord, Policy, RunFigures, Scenario, ScenarioError, Simulator};
use core::convert::Infallible;
use farfield_core::policy::cluster::{JobClass, PoolServers};
use serde::Serialize;

/// Admission in the scheduler's books.
#[derive(Clone, Copy, Debug)]
struct BookedAdmission {
    node: usize,
    far_bytes: u64,
    at_s: u64,
}

/// Recorded cluster. Jobs are named by the order of their arrival, from 1, and nodes `n1`, `n2` and so on.
#[derive(Debug)]
pub struct GatedCluster {
    simulator: Simulator,
    /// Classes of jobs, as a gate knows them: without run times.
    classes: Vec<JobClass>,
    pool_bytes: u64,
    now_s: u64,
    /// Jobs that have arrived and not ended, oldest first.
    present: Vec<usize>,
    /// Jobs that have arrived.
    arrived: usize,
    /// Admission of each job.
    admissions: Vec<Option<BookedAdmission>>,
    /// Node of each job that runs.
    nodes: Vec<Option<usize>>,
}

/// What a gate did on a recorded cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ReplayCounts {
    /// Rounds of the gate.
    pub rounds: u64,
    /// Admissions.
    pub admitted: u64,
    /// Changes of what running jobs are charged for.
    pub charged: u64,
    /// Admissions that were taken back, because the job had not started.
    pub withdrawn: u64,
    /// Changes that the scheduler refused.
    pub refused: u64,
    /// Most of the pool that running jobs were charged for at a time, in bytes.
    pub charged_peak_bytes: u64,
}

/// Nothing runs and nothing arrives, but the gate admits nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{jobs} jobs wait for ever, although nothing runs: this is a defect of the gate")]
pub struct ReplayStalled {
    /// Number of jobs that wait.
    pub jobs: usize,
}

impl GatedCluster {
    /// Makes a cluster at the beginning of a run with this seed. Near memory is divided by the policy;
    /// its order of jobs is not used, because the gate's is that of the scheduler.
    pub fn new(scenario: &Scenario, policy: Policy, seed: u64) -> Result<GatedCluster, ScenarioError> {
        let mut simulator = Simulator::new(scenario, policy)?;
        simulator.begin_told(seed)?;
        let jobs = simulator.records().len();
        let class = |class: &JobClass| {
            let known = GateJob::class(class.cores(), class.memory_bytes(), class.least_bytes());
            known.map_err(|error| ScenarioError::Class { name: scenario.name.clone(), error })
        };
        Ok(GatedCluster {
            classes: simulator.classes().iter().map(class).collect::<Result<_, _>>()?,
            pool_bytes: simulator.cluster().far_bytes(),
            simulator,
            now_s: 0,
            present: Vec::new(),
            arrived: 0,
            admissions: vec![None; jobs],
            nodes: vec![None; jobs],
        })
    }

    /// Goes on to the next time at which a gate that looks every `every_s` seconds has something to decide,
    /// and returns it in seconds from the start. `None` after the last job has ended.
    pub fn next_round(&mut self, every_s: u64) -> Option<u64> {
        let every_s = every_s.max(1);
        let event_s = self.simulator.next_event_s();
        if event_s == f64::INFINITY && self.present.is_empty() {
            return None;
        }
        let soonest_s = self.now_s + every_s;
        let is_starting = self.present.iter().any(|&job| self.admissions[job].is_some() && self.nodes[job].is_none());
        let rounds_s = if is_starting || event_s == f64::INFINITY { 0 } else { event_s.ceil() as u64 };
        self.now_s = soonest_s.max(rounds_s.next_multiple_of(every_s));
        self.simulator.advance(self.now_s as f64);
        self.note_changes();
        self.start_admitted();
        Some(self.now_s)
    }

    /// Returns the figures of the run so far.
    pub fn figures(&self) -> RunFigures {
        RunFigures::of(&self.simulator.so_far(), &self.simulator, &mut Vec::new())
    }

    /// Returns the jobs by arrival.
    pub fn records(&self) -> &[JobRecord] {
        self.simulator.records()
    }

    /// Returns the part of the pool that running jobs are charged for, in bytes.
    pub fn charged_bytes(&self) -> u64 {
        let running = self.present.iter().filter(|&&job| self.nodes[job].is_some());
        running.filter_map(|&job| Some(self.admissions[job]?.far_bytes)).sum()
    }

    /// Returns the overflow of all nodes, in bytes.
    pub fn overflow_bytes(&self) -> u64 {
        self.simulator.cluster().far_used_bytes()
    }

    /// Reads from the simulator who has arrived, who runs and who has ended.
    fn note_changes(&mut self) {
        self.present.extend(self.arrived..self.simulator.arrived());
        self.arrived = self.simulator.arrived();
        let records = self.simulator.records();
        self.present.retain(|&job| records[job].end_s == f64::INFINITY);
        for &job in &self.present {
            self.nodes[job] = None;
        }
        for (job, node) in self.simulator.running() {
            self.nodes[job] = Some(node);
        }
    }

    /// Starts jobs that may start, as far as the node and the licences allow.
    fn start_admitted(&mut self) {
        let mut charged_bytes = self.charged_bytes();
        for &job in &self.present {
            let Some(admission) = self.admissions[job].filter(|_| self.nodes[job].is_none()) else { continue };
            let is_licensed = charged_bytes + admission.far_bytes <= self.pool_bytes;
            if is_licensed && self.simulator.start_on(job, admission.node) {
                self.nodes[job] = Some(admission.node);
                charged_bytes += admission.far_bytes;
            }
        }
    }

    fn phase(&self, job: usize) -> GatePhase {
        match (self.nodes[job], self.admissions[job]) {
            (Some(node), admission) => {
                GatePhase::Running { node, far_bytes: admission.map_or(0, |admission| admission.far_bytes) }
            }
            (None, Some(BookedAdmission { node, far_bytes, at_s })) => {
                GatePhase::Admitted { node, far_bytes, age_s: self.now_s - at_s }
            }
            (None, None) => GatePhase::Waiting,
        }
    }
}

impl Scheduler for GatedCluster {
    type Error = Infallible;

    fn read(&mut self, _now_s: u64) -> Result<SchedulerState, Infallible> {
        let cluster = self.simulator.cluster();
        let node = |index: usize| {
            let shape = cluster.shape(index);
            (node_name(index), GateNode { shape, foreign_cores: 0, foreign_bytes: 0, is_up: true })
        };
        let records = self.simulator.records();
        let job = |&job: &usize| SchedulerJob {
            id: (job + 1).to_string(),
            class: self.classes[records[job].class].clone(),
            waited_s: (self.now_s as f64 - records[job].arrival_s) as u64,
            phase: Some(self.phase(job)),
            other_licenses: Vec::new(),
        };
        Ok(SchedulerState {
            nodes: (0..cluster.nodes()).map(node).collect(),
            jobs: self.present.iter().map(job).collect(),
            pool_bytes: self.pool_bytes,
            ignored: Vec::new(),
        })
    }

    fn apply(&mut self, job: &SchedulerJob, change: &BookChange<'_>) -> Result<(), Infallible> {
        let number: usize = job.id.parse().expect("named by this cluster");
        let admission = &mut self.admissions[number - 1];
        match *change {
            BookChange::Charge { far_bytes } => {
                if let Some(admission) = admission {
                    admission.far_bytes = far_bytes;
                }
            }
            BookChange::Withdraw => *admission = None,
            BookChange::Admit { node, far_bytes, now_s } => {
                let number: usize = node[1..].parse().expect("named by this cluster");
                *admission = Some(BookedAdmission { node: number - 1, far_bytes, at_s: now_s });
            }
        }
        Ok(())
    }
}

fn node_name(index: usize) -> String {
    format!("n{}", index + 1)
}

impl GateConfig {
    /// Decides on a recorded cluster every `every_s` seconds, until the last job has ended. `after_round` is
    /// told how many jobs have arrived.
    pub fn replay(
        &self,
        cluster: &mut GatedCluster,
        every_s: u64,
        mut after_round: impl FnMut(usize),
    ) -> Result<ReplayCounts, ReplayStalled> {
        let mut counts = ReplayCounts::default();
        while let Some(now_s) = cluster.next_round(every_s) {
            let Ok(round) = self.round(cluster, Some(PoolServers::UNKNOWN), now_s);
            counts.add(&round.events);
            counts.charged_peak_bytes = counts.charged_peak_bytes.max(round.held_bytes);
            after_round(cluster.arrived);
            let has_admitted = cluster.present.iter().any(|&job| cluster.admissions[job].is_some());
            if !has_admitted && cluster.simulator.next_event_s() == f64::INFINITY && !cluster.present.is_empty() {
                return Err(ReplayStalled { jobs: cluster.present.len() });
            }
        }
        Ok(counts)
    }
}

impl ReplayCounts {
    fn add(&mut self, events: &[GateEvent]) {
        self.rounds += 1;
        for event in events {
            match event {
                GateEvent::Admitted { .. } => self.admitted += 1,
                GateEvent::Charged { .. } => self.charged += 1,
                GateEvent::Withdrawn { .. } => self.withdrawn += 1,
                GateEvent::Refused { .. } => self.refused += 1,
                GateEvent::Waits { .. } | GateEvent::Ignored { .. } => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a gate that promises the same memory twice, forgets jobs, or costs a cluster much of
    //! what a scheduler that knows all would gain.
    use super::*;
    use crate::gate::{GateRound, SchedulerState};
    use crate::sim::{Arrivals, built_in};

    /// Interval between two rounds in seconds.
    const EVERY_S: u64 = 1;

    fn config() -> GateConfig {
        GateConfig { start_within_s: 30, overtake_within_s: 3600, is_dry_run: false }
    }

    /// Scenario of the racks where jobs keep arriving, with a part of its jobs.
    fn open(part: usize) -> Scenario {
        let mut scenario = built_in("open").unwrap();
        scenario.counts.iter_mut().for_each(|count| *count = count.div_ceil(part));
        scenario
    }

    /// Gate that is killed after a number of changes.
    struct Killed<'a> {
        cluster: &'a mut GatedCluster,
        changes: usize,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("the gate was killed")]
    struct Dead;

    impl Scheduler for Killed<'_> {
        type Error = Dead;

        fn read(&mut self, now_s: u64) -> Result<SchedulerState, Dead> {
            let Ok(state) = self.cluster.read(now_s);
            Ok(state)
        }

        fn apply(&mut self, job: &SchedulerJob, change: &BookChange<'_>) -> Result<(), Dead> {
            self.changes = self.changes.checked_sub(1).ok_or(Dead)?;
            let Ok(()) = self.cluster.apply(job, change);
            Ok(())
        }
    }

    fn killed_round(cluster: &mut GatedCluster, changes: usize, now_s: u64, is_reached: bool) -> GateRound {
        let servers = is_reached.then_some(PoolServers::UNKNOWN);
        config().round(&mut Killed { cluster, changes }, servers, now_s).unwrap()
    }

    #[test]
    fn days_of_arrivals_end_whatever_gates_and_servers_do() {
        let seeds = if std::env::var_os("FARFIELD_DEEP").is_some() { 40 } else { 2 };
        for seed in 0..seeds {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut scenario = open(if seeds > 2 { 4 } else { 24 });
            scenario.far_bytes /= 1 + random.u64(..4);
            if random.bool() {
                // All at one moment.
                scenario.arrivals = Arrivals::Window(0.0);
            }
            let mut cluster = GatedCluster::new(&scenario, Policy::MEMORY_TIME, seed).unwrap();
            let (mut admitted, mut killed) = (0, 0);
            while let Some(now_s) = cluster.next_round(EVERY_S) {
                let changes = if random.u8(..4) == 0 { random.usize(..4) } else { usize::MAX };
                let is_reached = !(now_s / 600).is_multiple_of(7);
                let round = killed_round(&mut cluster, changes, now_s, is_reached);
                killed += u64::from(round.events.iter().any(|event| matches!(event, GateEvent::Refused { .. })));
                let new = round.events.iter().filter(|event| matches!(event, GateEvent::Admitted { .. })).count();
                assert!(is_reached || new == 0, "seed {seed}: admitted without servers");
                admitted += new;
                assert!(cluster.charged_bytes() <= scenario.far_bytes, "seed {seed}, {now_s} s: promised twice");
                assert!(cluster.overflow_bytes() <= cluster.charged_bytes(), "seed {seed}, {now_s} s: not charged");
            }
            assert!(cluster.records().iter().all(|job| job.arrival_s <= job.start_s && job.start_s < job.end_s));
            assert!(admitted >= cluster.records().len() && killed > 0, "seed {seed}: {admitted}, {killed}");
        }
    }

    #[test]
    fn a_gate_costs_little_of_what_a_scheduler_that_knows_all_gains() {
        let scenario = open(8);
        let mut at_once = Simulator::new(&scenario, Policy::MEMORY_TIME).unwrap();
        at_once.run(1).unwrap();
        let at_once = RunFigures::of(&at_once.so_far(), &at_once, &mut Vec::new());
        let mut cluster = GatedCluster::new(&scenario, Policy::MEMORY_TIME, 1).unwrap();
        let counts = config().replay(&mut cluster, EVERY_S, |_| ()).unwrap();
        let gated = cluster.figures();
        let ratio = gated.turnaround_mean_s / at_once.turnaround_mean_s;
        assert!((0.95..1.05).contains(&ratio), "{gated:?} {at_once:?}");
        assert_eq!(counts.admitted as usize, cluster.records().len());
        assert!(counts.charged > 0 && counts.withdrawn == 0 && counts.refused == 0, "{counts:?}");
        let mut again = GatedCluster::new(&scenario, Policy::MEMORY_TIME, 1).unwrap();
        assert_eq!(config().replay(&mut again, EVERY_S, |_| ()), Ok(counts));
        assert_eq!(again.records(), cluster.records(), "equal seeds give equal results");
    }
}
