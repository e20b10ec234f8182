//! The event loop.
//!
//! Two kinds of event: a job arrives, a job ends. The next end of each node is in a tournament, so
//! a division that moves the ends of many jobs leaves no stale event behind. Once its tables are
//! as large as the run needs, nothing allocates.
//!
//! Jobs wait in one queue for each class, because what does not fit for one job of a class fits
//! for none.
//!
//! A job whose use of memory is known over time is placed by what it asked for. From then on it
//! counts with what it uses, by one class for each amount. When its use grows and its node has no
//! room, jobs that started later leave that node and start again.

use super::arrivals::Arrival;
use super::tournament::Tournament;
use super::{JobKind, Policy, Rules, Scenario, ScenarioError, SplitMix64};
use farfield_core::policy::cluster::{Cluster, JobClass, JobProgress, QueueHead, SplitRule, Splitter};
use std::collections::VecDeque;

/// Course of a job. Times are in seconds from the start of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JobRecord {
    /// Index of its class.
    pub class: usize,
    /// Arrival.
    pub arrival_s: f64,
    /// Start on a node.
    pub start_s: f64,
    /// End.
    pub end_s: f64,
    /// Largest share of its memory that was far.
    pub far_max: f64,
}

/// Figures of a run besides its jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Run {
    /// Last end.
    pub makespan_s: f64,
    /// Divisions of near memory while a node had less than its jobs asked for.
    pub splits: u64,
    /// Most of the pool that was promised at a time.
    pub far_peak_bytes: u64,
    /// Largest deviation of the work done from the work asked, as a part of a job.
    pub work_error_max: f64,
    /// Evictions of a job whose node had no room for the growth of others. The job starts again.
    pub evictions: u64,
    /// Work of evicted jobs that was lost, in seconds at full speed.
    pub lost_s: f64,
}

/// Running job. Progress is 1 at its end.
#[derive(Clone, Copy, Debug)]
struct RunState {
    record: usize,
    class: usize,
    share: f64,
    progress: f64,
    /// Progress in a second, and the time at which `progress` holds.
    rate: f64,
    since_s: f64,
    /// Index of the next step of its use, the progress at which that begins or the job ends, and
    /// when this is reached.
    next_step: usize,
    goal: f64,
    due_s: f64,
}

/// Jobs of a node.
#[derive(Clone, Debug, Default)]
struct NodeJobs {
    running: Vec<RunState>,
    is_shrunk: bool,
}

/// Simulator of one scenario under one policy. Runs can be repeated with other seeds.
#[derive(Clone, Debug)]
pub struct Simulator {
    scenario: Scenario,
    policy: Policy,
    /// Whether jobs start only when they are told to.
    is_told: bool,
    /// Classes as they are; the splitter has them as they are believed to be.
    classes: Vec<JobClass>,
    believed: Vec<JobClass>,
    /// Steps of the use of each kind: progress at the beginning, and class.
    steps: Vec<Vec<(f64, usize)>>,
    /// Last time at which waiting jobs were tried because a use had fallen.
    looked_s: f64,
    splitter: Splitter,
    empty: Cluster,
    cluster: Cluster,
    nodes: Vec<NodeJobs>,
    ends: Tournament,
    waiting: Vec<VecDeque<usize>>,
    arrivals: Vec<Arrival>,
    records: Vec<JobRecord>,
    random: SplitMix64,
    now_s: f64,
    next_arrival: usize,
    /// Longest run time of a job that has arrived.
    longest_s: f64,
    run: Run,
    heads: Vec<QueueHead>,
    blocked: Vec<bool>,
    jobs: Vec<JobProgress>,
    shares: Vec<f64>,
}

/// Longest delay of a start in the published simulator.
const JITTER_S: f64 = 0.1;
/// Interval in which waiting jobs are tried at most once because a use has fallen.
const LOOK_EVERY_S: f64 = 300.0;
/// Progress that counts as left at the end of a job, at most: rounding.
const WORK_ERROR: f64 = 1e-6;

impl Simulator {
    /// Makes a simulator, or says why the scenario is impossible.
    pub fn new(scenario: &Scenario, policy: Policy) -> Result<Simulator, ScenarioError> {
        let cluster = scenario.cluster(&policy)?;
        let [classes, believed] = scenario.classes(&policy, &mut SplitMix64::new(0))?;
        if scenario.kinds.len() != scenario.counts.len() {
            return Err(ScenarioError::Shape("each class of jobs needs a count".into()));
        }
        let mut misfits = classes.iter().zip(&scenario.kinds).filter(|(class, _)| !cluster.takes(class));
        if let Some((_, kind)) = misfits.next() {
            return Err(ScenarioError::NeverFits { name: kind.name.clone(), others: misfits.count() });
        }
        let steps = scenario.steps()?;
        // A job must be able to use what it was placed by, even if no pool is free.
        let is_too_large = |kind: &&JobKind| !kind.usage.is_empty() && kind.memory_bytes > scenario.shape.memory_bytes;
        if let Some(kind) = scenario.kinds.iter().find(is_too_large) {
            return Err(ScenarioError::NeverFits { name: kind.name.clone(), others: 0 });
        }
        let count = scenario.kinds.len();
        Ok(Simulator {
            splitter: Splitter::new(policy.split.unwrap_or(SplitRule::Variable), &believed),
            nodes: vec![NodeJobs::default(); cluster.nodes()],
            ends: Tournament::new(cluster.nodes()),
            empty: cluster.clone(),
            cluster,
            scenario: scenario.clone(),
            policy,
            is_told: false,
            classes,
            believed,
            steps,
            looked_s: f64::NEG_INFINITY,
            waiting: vec![VecDeque::new(); count],
            arrivals: Vec::new(),
            records: Vec::new(),
            random: SplitMix64::new(0),
            now_s: 0.0,
            next_arrival: 0,
            longest_s: 0.0,
            run: Run::default(),
            heads: Vec::new(),
            blocked: vec![false; count],
            jobs: Vec::new(),
            shares: Vec::new(),
        })
    }

    /// Runs all jobs to their ends. The records are those of this run until the next.
    pub fn run(&mut self, seed: u64) -> Result<Run, ScenarioError> {
        self.reset(seed)?;
        while self.step(f64::INFINITY) {}
        debug_assert!(self.waiting.iter().all(VecDeque::is_empty), "a job waits for ever");
        debug_assert!(self.run.work_error_max < WORK_ERROR, "work done is not work asked");
        Ok(self.run)
    }

    /// Lets the next event happen, if there is one until `until_s`, and tells whether there was.
    fn step(&mut self, until_s: f64) -> bool {
        let end_s = self.ends.least();
        let next_s = self.next_event_s();
        if next_s == f64::INFINITY || next_s > until_s {
            return false;
        }
        self.now_s = self.now_s.max(next_s);
        // What ends at the moment of an arrival makes room for it.
        if end_s == next_s {
            self.reach(self.ends.winner());
        } else {
            self.arrive();
        }
        self.note_peak();
        self.run.makespan_s = self.now_s;
        true
    }

    fn note_peak(&mut self) {
        self.run.far_peak_bytes = self.run.far_peak_bytes.max(self.cluster.far_used_bytes());
    }

    fn next_arrival_s(&self) -> f64 {
        self.arrivals.get(self.next_arrival).map_or(f64::INFINITY, |arrival| arrival.at_s)
    }

    /// Returns when a job arrives, ends or changes its use next, in seconds: infinity if none does.
    pub(crate) fn next_event_s(&self) -> f64 {
        self.ends.least().min(self.next_arrival_s())
    }

    /// Begins a run whose jobs start only when [`start_on`](Self::start_on) says so.
    pub(crate) fn begin_told(&mut self, seed: u64) -> Result<(), ScenarioError> {
        self.reset(seed)?;
        self.is_told = true;
        Ok(())
    }

    /// Lets everything happen until `until_s`, which is the time from then on.
    pub(crate) fn advance(&mut self, until_s: f64) {
        while self.step(until_s) {}
        self.now_s = self.now_s.max(until_s);
    }

    /// Starts a waiting job on a node, if there is room, and tells whether there was.
    pub(crate) fn start_on(&mut self, job: usize, node: usize) -> bool {
        let class = self.records[job].class;
        let place = self.waiting[class].iter().position(|&waiting| waiting == job);
        let Some(place) = place.filter(|_| self.cluster.fits_on(node, &self.classes[class])) else { return false };
        self.waiting[class].remove(place);
        self.start(job, node);
        self.divide(node);
        self.note_peak();
        true
    }

    /// Returns the number of jobs that have arrived. They are the first of the [records](Self::records).
    pub(crate) fn arrived(&self) -> usize {
        self.next_arrival
    }

    /// Returns each running job, and its node.
    pub(crate) fn running(&self) -> impl Iterator<Item = (usize, usize)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.flat_map(|(node, jobs)| jobs.running.iter().map(move |job| (job.record, node)))
    }

    /// Returns the cluster and its books.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns the figures of the run so far.
    pub(crate) fn so_far(&self) -> Run {
        self.run
    }

    /// Returns the jobs of the last run by arrival.
    pub fn records(&self) -> &[JobRecord] {
        &self.records
    }

    /// Returns the classes of jobs.
    pub fn classes(&self) -> &[JobClass] {
        &self.classes
    }

    fn rules(&self) -> &Rules {
        &self.scenario.rules
    }

    fn reset(&mut self, seed: u64) -> Result<(), ScenarioError> {
        self.random = SplitMix64::new(seed);
        if self.rules().profile_error != 0.0 {
            let [classes, believed] = self.scenario.classes(&self.policy, &mut self.random)?;
            self.splitter = Splitter::new(self.splitter.rule(), &believed);
            (self.classes, self.believed) = (classes, believed);
        }
        self.scenario.arrivals.draw(&self.scenario.counts, &mut self.random, &mut self.arrivals)?;
        self.cluster.clone_from(&self.empty);
        self.nodes.iter_mut().for_each(|node| {
            node.running.clear();
            node.is_shrunk = false;
        });
        self.ends.clear();
        self.waiting.iter_mut().for_each(VecDeque::clear);
        self.records.clear();
        self.records.extend(self.arrivals.iter().map(|arrival| JobRecord {
            class: arrival.class,
            arrival_s: arrival.at_s,
            start_s: f64::INFINITY,
            end_s: f64::INFINITY,
            far_max: 0.0,
        }));
        (self.now_s, self.next_arrival, self.longest_s, self.run) = (0.0, 0, 0.0, Run::default());
        self.is_told = false;
        self.looked_s = f64::NEG_INFINITY;
        Ok(())
    }

    fn arrive(&mut self) {
        let job = self.next_arrival;
        self.next_arrival += 1;
        let JobRecord { class, arrival_s, .. } = self.records[job];
        self.longest_s = self.longest_s.max(self.believed[class].seconds());
        // Whoever is before it in its queue did not fit.
        let may_start = !self.is_told && self.waiting[class].is_empty() && self.may_overtake(arrival_s);
        let Some(node) = may_start.then(|| self.find(class)).flatten() else {
            self.waiting[class].push_back(job);
            return;
        };
        self.start(job, node);
        self.divide(node);
    }

    fn may_overtake(&self, arrival_s: f64) -> bool {
        let heads = self.waiting.iter().filter_map(|queue| queue.front());
        let oldest_s = heads.map(|&job| self.records[job].arrival_s).fold(f64::INFINITY, f64::min);
        self.policy.order.may_overtake(arrival_s, oldest_s, self.longest_s)
    }

    fn find(&mut self, class: usize) -> Option<usize> {
        let first = if self.rules().random_nodes { self.random.below(self.nodes.len()) } else { 0 };
        self.cluster.find(&self.classes[class], first)
    }

    /// Ends the job of a node that is the next to end, and starts what now fits; or lets it begin its
    /// next step.
    fn reach(&mut self, node: usize) {
        let running = &mut self.nodes[node].running;
        let due = running.iter().enumerate().min_by(|a, b| a.1.due_s.total_cmp(&b.1.due_s));
        let Some((place, job)) = due else { return };
        let work = job.progress + (job.due_s - job.since_s) * job.rate;
        self.run.work_error_max = self.run.work_error_max.max((work - job.goal).abs());
        if job.goal < 1.0 {
            return self.change_use(node, place);
        }
        let job = running.remove(place);
        self.records[job.record].end_s = self.now_s;
        self.cluster.release(node, &self.classes[job.class]);
        self.update_due(node);
        if !self.start_waiting(node) {
            self.divide(node);
        }
    }

    /// Begins the next step of a job's use. Jobs that started later make room, or the job itself if it
    /// is the latest.
    fn change_use(&mut self, node: usize, place: usize) {
        let job = &mut self.nodes[node].running[place];
        // Progress is known exactly here; a division would add rounding.
        (job.progress, job.since_s) = (job.goal, self.now_s);
        let (record, old) = (job.record, job.class);
        self.cluster.release(node, &self.classes[old]);
        let new = self.begin_step(node, place);
        let has_shrunk = self.classes[new].memory_bytes() < self.classes[old].memory_bytes();
        while !self.cluster.fits_on(node, &self.classes[new]) {
            let latest = self.latest(node);
            let class = self.evict(node, latest);
            if latest == record {
                return self.divide(node);
            }
            self.cluster.release(node, &self.classes[class]);
        }
        self.cluster.admit(node, &self.classes[new]);
        let may_look = has_shrunk && self.now_s >= self.looked_s + LOOK_EVERY_S;
        if may_look {
            self.looked_s = self.now_s;
            if self.start_waiting(node) {
                return;
            }
        }
        self.divide(node);
    }

    /// Gives a job the class of its next step, and returns it. The books are unchanged.
    fn begin_step(&mut self, node: usize, place: usize) -> usize {
        let job = &mut self.nodes[node].running[place];
        let steps = &self.steps[self.records[job.record].class];
        job.class = steps[job.next_step].1;
        job.next_step += 1;
        job.goal = steps.get(job.next_step).map_or(1.0, |&(from, _)| from);
        job.due_s = job.since_s + (job.goal - job.progress).max(0.0) / job.rate;
        job.class
    }

    /// Returns the job of a node that started last.
    fn latest(&self, node: usize) -> usize {
        let start_s = |job: &RunState| self.records[job.record].start_s;
        let running = self.nodes[node].running.iter();
        let latest = running.max_by(|a, b| start_s(a).total_cmp(&start_s(b)).then(a.record.cmp(&b.record)));
        latest.expect("a job runs there").record
    }

    /// Takes a job from its node, but not from the books. It waits again, in the order of its arrival,
    /// and its work is lost. Returns its class.
    fn evict(&mut self, node: usize, record: usize) -> usize {
        let running = &mut self.nodes[node].running;
        let place = running.iter().position(|job| job.record == record).expect("it runs there");
        let job = running.remove(place);
        let class = self.records[record].class;
        let progress = job.progress + (self.now_s - job.since_s).max(0.0) * job.rate;
        self.run.evictions += 1;
        self.run.lost_s += progress * self.classes[class].seconds();
        let queue = &mut self.waiting[class];
        queue.insert(queue.partition_point(|&waiting| waiting < record), record);
        job.class
    }

    /// Starts waiting jobs until none fits. Tells whether one of them started on this node.
    fn start_waiting(&mut self, node: usize) -> bool {
        let mut is_divided = false;
        if self.is_told {
            return is_divided;
        }
        self.blocked.fill(false);
        loop {
            self.sort_heads();
            let mut started = None;
            for index in 0..self.heads.len() {
                let class = self.heads[index].class;
                // Starts only take room: what did not fit before does not fit now.
                if self.blocked[class] {
                    continue;
                }
                match self.find(class) {
                    Some(place) => {
                        started = Some((class, place));
                        break;
                    }
                    None => self.blocked[class] = true,
                }
            }
            let Some((class, place)) = started else { return is_divided };
            let job = self.waiting[class].pop_front().expect("the queue has a head");
            self.pass_jitter();
            self.start(job, place);
            self.divide(place);
            is_divided |= place == node;
        }
    }

    fn sort_heads(&mut self) {
        self.heads.clear();
        let heads = self.waiting.iter().enumerate().filter_map(|(class, queue)| Some((class, *queue.front()?)));
        self.heads.extend(heads.map(|(class, job)| QueueHead {
            class,
            arrival_s: self.records[job].arrival_s,
            run_s: self.believed[class].seconds(),
        }));
        self.policy.order.sort(&mut self.heads, self.longest_s);
    }

    fn pass_jitter(&mut self) {
        if self.rules().start_jitter {
            let gap_s = self.next_event_s() - self.now_s;
            self.now_s += self.random.unit() * (0.5 * gap_s).clamp(0.0, JITTER_S);
        }
    }

    /// Puts a job on a node, with all its memory near until the node is divided.
    fn start(&mut self, job: usize, node: usize) {
        let class = self.records[job].class;
        self.records[job].start_s = self.now_s;
        let seconds = self.classes[class].seconds();
        let due_s = self.now_s + seconds;
        let (share, progress, rate, since_s) = (1.0, 0.0, 1.0 / seconds, self.now_s);
        let state = RunState { record: job, class, share, progress, rate, since_s, next_step: 0, goal: 1.0, due_s };
        self.nodes[node].running.push(state);
        let mut counted = class;
        if !self.steps[class].is_empty() {
            counted = self.begin_step(node, self.nodes[node].running.len() - 1);
        }
        self.cluster.admit(node, &self.classes[counted]);
    }

    /// Divides the near memory of a node anew, if it is or was short of it.
    fn divide(&mut self, node: usize) {
        let is_short = self.cluster.overflow_bytes(node) > 0;
        if is_short || self.nodes[node].is_shrunk {
            self.nodes[node].is_shrunk = is_short;
            self.settle(node);
            let memory_bytes = self.cluster.shape(node).memory_bytes;
            let divided = self.splitter.split(&self.believed, &self.jobs, memory_bytes, &mut self.shares);
            divided.expect("jobs are admitted by their least shares");
            self.run.splits += u64::from(is_short);
            self.apply(node);
        }
        self.update_due(node);
    }

    /// Brings the progress of a node's jobs up to now.
    fn settle(&mut self, node: usize) {
        self.jobs.clear();
        for job in &mut self.nodes[node].running {
            // A job that waits for room begins later.
            let elapsed_s = (self.now_s - job.since_s).max(0.0);
            job.progress += elapsed_s * job.rate;
            job.since_s = job.since_s.max(self.now_s);
            self.jobs.push(JobProgress { class: job.class, remaining: 1.0 - job.progress });
        }
    }

    /// Gives the jobs of a node their new shares.
    fn apply(&mut self, node: usize) {
        let running = &mut self.nodes[node].running;
        let mut moved_bytes = 0.0;
        for (job, &share) in running.iter_mut().zip(&self.shares) {
            if job.share != share {
                let class = &self.classes[job.class];
                // What a job has not touched yet need not move.
                let is_new = job.progress == 0.0 && job.since_s >= self.now_s;
                if !is_new {
                    moved_bytes += (job.share - share).abs() * class.memory_bytes() as f64;
                }
                job.share = share;
                job.rate = 1.0 / class.run_time().at(share);
            }
            let far = &mut self.records[job.record].far_max;
            *far = far.max(1.0 - share);
        }
        if let Some(link) = self.scenario.rules.link_bytes_per_s {
            let newest = running.iter_mut().filter(|job| job.progress == 0.0 && job.since_s == self.now_s);
            newest.for_each(|job| job.since_s += moved_bytes / link);
        }
        for job in running {
            job.due_s = job.since_s + (job.goal - job.progress).max(0.0) / job.rate;
        }
    }

    fn update_due(&mut self, node: usize) {
        let ends = self.nodes[node].running.iter().map(|job| job.due_s);
        self.ends.set(node, ends.fold(f64::INFINITY, f64::min));
    }
}
