//! Guards against a node that is promised twice, a job that waits for ever, and a job that is
//! believed about its own memory.

use super::*;
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;

/// Jobs that follow their budgets at some speed, or not.
#[derive(Default)]
struct ModelNode {
    jobs: BTreeMap<u32, ModelJob>,
    pressure: f64,
}

#[derive(Clone, Copy)]
struct ModelJob {
    budget_bytes: u64,
    near_bytes: u64,
    far_bytes: u64,
    wants_bytes: u64,
    obeys: bool,
    slowdown: Option<f64>,
}

impl ModelNode {
    /// Lets some time pass, in which a job can give up or take `step_bytes`.
    fn pass(&mut self, step_bytes: u64) {
        for job in self.jobs.values_mut() {
            let goal = if job.obeys { job.wants_bytes.min(job.budget_bytes) } else { job.wants_bytes };
            job.near_bytes = goal.clamp(job.near_bytes.saturating_sub(step_bytes), job.near_bytes + step_bytes);
        }
    }

    fn near_bytes_sum(&self) -> u64 {
        self.jobs.values().map(|job| job.near_bytes).sum()
    }
}

impl LocalJobs for ModelNode {
    fn near_bytes(&mut self, job: JobNumber, _: u64) -> Option<u64> {
        self.jobs.get(&job.0).map(|job| job.near_bytes)
    }

    fn offer(&mut self, job: JobNumber, bytes: u64) {
        let new = ModelJob {
            budget_bytes: 0,
            near_bytes: 0,
            far_bytes: 0,
            wants_bytes: u64::MAX,
            obeys: true,
            slowdown: None,
        };
        self.jobs.entry(job.0).or_insert(new).budget_bytes = bytes;
    }

    fn told_bytes(&mut self, job: JobNumber) -> Option<u64> {
        self.jobs.get(&job.0).map(|job| job.budget_bytes)
    }

    fn far_bytes(&mut self, job: JobNumber) -> u64 {
        self.jobs.get(&job.0).map_or(0, |job| job.far_bytes)
    }

    fn slowdown(&mut self, job: JobNumber) -> Option<f64> {
        self.jobs.get(&job.0)?.slowdown
    }

    fn pressure(&mut self) -> f64 {
        self.pressure
    }
}

fn claim(memory_mib: u64, least_mib: u64) -> JobClaim {
    JobClaim { memory_bytes: memory_mib * MIB, least_bytes: least_mib * MIB, slowdowns: vec![], seconds: None }
}

fn agent(near_mib: u64, far_mib: Option<u64>) -> Agent {
    let far_bytes = far_mib.map(|mib| mib * MIB);
    Agent::new(NodeConfig { near_bytes: near_mib * MIB, far_bytes, rule: SplitRule::Variable })
}

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn budgets(node: &ModelNode) -> Vec<u64> {
    node.jobs.values().map(|job| job.budget_bytes / MIB).collect()
}

#[test]
fn others_shrink_before_a_newcomer_starts_and_grow_when_it_ends() {
    let (mut agent, mut node) = (agent(1000, None), ModelNode::default());
    agent.register(JobNumber(1), &claim(1000, 400), at(0)).unwrap();
    assert_eq!(agent.update(at(0), &mut node), [JobNumber(1)]);
    assert_eq!(budgets(&node), [1000], "all fits, so all is near");
    node.pass(u64::MAX / 4);
    agent.register(JobNumber(2), &claim(1000, 400), at(100)).unwrap();
    assert_eq!(agent.update(at(100), &mut node), [], "the first has the memory yet");
    assert_eq!(budgets(&node), [500]);
    let waits = agent.job(JobNumber(2)).unwrap().waits;
    assert!(matches!(waits, Some(WaitReason::Shrinking { missing_bytes }) if missing_bytes > 400 * MIB), "{waits:?}");
    node.pass(300 * MIB);
    assert_eq!(agent.update(at(200), &mut node), []);
    node.pass(300 * MIB);
    assert_eq!(agent.update(at(300), &mut node), [JobNumber(2)]);
    assert_eq!(budgets(&node), [500, 500]);
    node.jobs.remove(&1);
    agent.update(at(400), &mut node);
    assert_eq!(budgets(&node), [1000], "the second has all that the first gave back");
    assert_eq!(agent.held_bytes(), 1000 * MIB);
}

#[test]
fn jobs_start_in_their_order_when_they_fit() {
    let (mut agent, mut node) = (agent(1000, Some(500)), ModelNode::default());
    let register = |agent: &mut Agent, number, memory, least| {
        agent.register(JobNumber(number), &claim(memory, least), at(0)).unwrap();
    };
    register(&mut agent, 1, 900, 900);
    register(&mut agent, 2, 300, 200);
    register(&mut agent, 3, 50, 50);
    register(&mut agent, 4, 700, 100);
    assert_eq!(agent.update(at(0), &mut node), [JobNumber(1)]);
    let waits = |agent: &Agent, number| agent.job(JobNumber(number)).unwrap().waits;
    assert_eq!(waits(&agent, 2), Some(WaitReason::Near { missing_bytes: 100 * MIB }));
    assert_eq!(waits(&agent, 3), Some(WaitReason::Turn { jobs: 1 }), "nobody overtakes");
    agent.remove(JobNumber(1));
    node.jobs.clear();
    assert_eq!(agent.update(at(100), &mut node), [JobNumber(2), JobNumber(3), JobNumber(4)]);
    register(&mut agent, 5, 500, 10);
    agent.update(at(200), &mut node);
    assert_eq!(waits(&agent, 5), Some(WaitReason::Far { missing_bytes: 50 * MIB }));
    agent.remove(JobNumber(5));
    register(&mut agent, 6, 450, 10);
    node.pass(u64::MAX / 4);
    agent.update(at(300), &mut node);
    node.pass(u64::MAX / 4);
    assert_eq!(agent.update(at(400), &mut node), [JobNumber(6)]);
}

#[test]
fn what_can_never_run_is_refused_at_once() {
    let mut agent = agent(1000, Some(100));
    let mut refused = |memory, least| agent.register(JobNumber(1), &claim(memory, least), at(0)).unwrap_err();
    assert!(matches!(refused(2000, 1001), RegisterError::NeverNear { .. }));
    assert!(matches!(refused(1101, 100), RegisterError::NeverFar { .. }));
    assert!(matches!(refused(100, 200), RegisterError::Claim(_)));
    agent.register(JobNumber(1), &claim(100, 50), at(0)).unwrap();
    assert_eq!(agent.register(JobNumber(1), &claim(100, 50), at(0)), Err(RegisterError::Twice));
    assert!(agent.remove(JobNumber(1)) && !agent.remove(JobNumber(1)));
}

#[test]
fn a_job_that_ignores_its_budget_keeps_others_waiting_and_squeezes_none_below_its_least() {
    let (mut agent, mut node) = (agent(1000, None), ModelNode::default());
    agent.register(JobNumber(1), &claim(500, 100), at(0)).unwrap();
    agent.register(JobNumber(2), &claim(500, 300), at(0)).unwrap();
    assert_eq!(agent.update(at(0), &mut node).len(), 2);
    node.jobs.get_mut(&1).unwrap().obeys = false;
    node.jobs.get_mut(&1).unwrap().wants_bytes = 700 * MIB;
    node.pass(u64::MAX / 4);
    agent.register(JobNumber(3), &claim(200, 200), at(100)).unwrap();
    for second in 0..60 {
        assert_eq!(agent.update(at(1000 * second), &mut node), [], "there is no room");
        node.pass(u64::MAX / 4);
    }
    assert!(!agent.job(JobNumber(1)).unwrap().budget.is_kept());
    let second = node.jobs[&2];
    assert!(second.budget_bytes >= 300 * MIB && second.near_bytes >= 300 * MIB, "{}", second.budget_bytes / MIB);
    // It comes to its senses.
    node.jobs.get_mut(&1).unwrap().obeys = true;
    let mut started = false;
    for second in 60..90 {
        node.pass(u64::MAX / 4);
        started |= agent.update(at(1000 * second), &mut node) == [JobNumber(3)];
    }
    assert!(started && node.near_bytes_sum() <= 1000 * MIB);
}

#[test]
fn an_agent_that_starts_again_finds_the_division_and_promises_nothing_twice() {
    let (mut first, mut node) = (agent(1000, None), ModelNode::default());
    for number in 1..=3 {
        first.register(JobNumber(number), &claim(600, 200), at(0)).unwrap();
    }
    for round in 0..10 {
        first.update(at(100 * round), &mut node);
        node.pass(u64::MAX / 4);
    }
    let before = budgets(&node);
    assert_eq!(before.len(), 3);
    let mut second = agent(1000, None);
    for (number, job) in &node.jobs {
        second.adopt(JobNumber(*number), &claim(600, 200), job.budget_bytes, at(5000), at(0)).unwrap();
    }
    second.register(JobNumber(4), &claim(600, 400), at(0)).unwrap();
    assert_eq!(second.update(at(0), &mut node), [], "they have to shrink first");
    for round in 1..10 {
        node.pass(u64::MAX / 4);
        second.update(at(100 * round), &mut node);
        assert!(second.held_bytes() <= 1000 * MIB);
    }
    assert_eq!(budgets(&node), [200, 200, 200, 400]);
    // A node that was made smaller keeps its promises, and takes nobody.
    let mut smaller = agent(500, None);
    for (number, job) in &node.jobs {
        let claim = if *number == 4 { claim(600, 400) } else { claim(600, 200) };
        smaller.adopt(JobNumber(*number), &claim, job.budget_bytes, at(5000), at(0)).unwrap();
    }
    smaller.register(JobNumber(5), &claim(100, 50), at(0)).unwrap();
    assert_eq!(smaller.update(at(0), &mut node), []);
    assert_eq!(budgets(&node), [200, 200, 200, 400]);
}

#[test]
fn random_histories_keep_every_promise() {
    for seed in 0..150 {
        let mut random = fastrand::Rng::with_seed(seed);
        let rule = [SplitRule::Uniform, SplitRule::Variable, SplitRule::Worth][random.usize(..3)];
        let near_bytes = (500 + random.u64(..1500)) * MIB;
        let far_bytes = random.bool().then(|| random.u64(..2000) * MIB);
        let mut agent = Agent::new(NodeConfig { near_bytes, far_bytes, rule });
        let mut node = ModelNode::default();
        let (mut next, mut now) = (1, Duration::ZERO);
        for _ in 0..150 {
            now += at(random.u64(..3000));
            match random.u8(..6) {
                0 | 1 => {
                    let memory = 20 + random.u64(..600);
                    // It may be refused.
                    let _ = agent.register(JobNumber(next), &claim(memory, 16 + random.u64(..=memory - 16)), now);
                    next += 1;
                }
                2 => {
                    let all: Vec<JobNumber> = agent.jobs().iter().map(|job| job.number).collect();
                    if let Some(&number) = all.get(random.usize(..all.len().max(1))) {
                        agent.remove(number);
                        node.jobs.remove(&number.0);
                    }
                }
                3 => {
                    // It starts again and finds what runs.
                    let mut again = Agent::new(agent.config());
                    for job in agent.jobs().iter().filter(|job| job.is_running()) {
                        let least_bytes = job.class.least_bytes().min(job.class.memory_bytes());
                        let claim = JobClaim {
                            memory_bytes: job.class.memory_bytes(),
                            least_bytes,
                            slowdowns: vec![],
                            seconds: None,
                        };
                        let budget = node.jobs[&job.number.0].budget_bytes;
                        again.adopt(job.number, &claim, budget, Duration::ZERO, now).unwrap();
                    }
                    agent = again;
                }
                _ => {}
            }
            node.pass(random.u64(..200) * MIB);
            agent.update(now, &mut node);
            let context = format!("seed {seed}, {rule:?}");
            assert!(agent.held_bytes() <= near_bytes, "{context}");
            for job in agent.jobs().iter().filter(|job| job.is_running()) {
                let told = node.jobs[&job.number.0].budget_bytes;
                assert_eq!(told, job.budget.offered_bytes, "{context}");
                assert!(told >= job.class.least_bytes() && told <= job.class.memory_bytes(), "{context}");
            }
            if let Some(far_bytes) = far_bytes {
                assert!(agent.overflow_bytes() <= far_bytes, "{context}");
            }
        }
        // Jobs that wait start in the end, when others end.
        for _ in 0..2000 {
            if agent.jobs().is_empty() {
                break;
            }
            now += at(1000);
            node.pass(u64::MAX / 4);
            agent.update(now, &mut node);
            let running = agent.jobs().iter().find(|job| job.is_running()).map(|job| job.number);
            if let Some(number) = running {
                node.jobs.remove(&number.0);
            }
        }
        assert!(agent.jobs().is_empty(), "seed {seed}: {:?} wait for ever", agent.jobs());
    }
}

#[test]
fn as_many_jobs_as_there_can_be_with_as_much_memory_are_counted() {
    let most = JobClaim { memory_bytes: (1 << 53) - 1, ..claim(16, 16) };
    let (mut agent, mut node) = (agent(1 << 20, None), ModelNode::default());
    for number in 2..=JOBS_MAX as u32 {
        node.offer(JobNumber(number), 16 * MIB);
        agent.adopt(JobNumber(number), &most, 16 * MIB, at(0), at(0)).unwrap();
    }
    agent.register(JobNumber(1), &most, at(0)).unwrap();
    assert_eq!(agent.register(JobNumber(0), &most, at(0)), Err(RegisterError::TooMany));
    assert_eq!(agent.update(at(0), &mut node), [JobNumber(1)]);
    assert_eq!(agent.overflow_bytes(), JOBS_MAX as u64 * most.memory_bytes - (1 << 40));
}

/// Two jobs of one claim, one of which minds far memory so much.
fn budgets_of_one_that_minds(minds: f64) -> [u64; 2] {
    let (mut agent, mut node) = (agent(1000, None), ModelNode::default());
    agent.config.rule = SplitRule::Worth;
    for number in [1, 2] {
        agent.register(JobNumber(number), &claim(1000, 200), at(0)).unwrap();
        node.pass(u64::MAX / 4);
        agent.update(at(0), &mut node);
        node.pass(u64::MAX / 4);
        agent.update(at(0), &mut node);
    }
    let mut now = 0;
    for _ in 0..60 {
        for (number, excess) in [(1, minds), (2, 0.1)] {
            let job = node.jobs.get_mut(&number).unwrap();
            let far = 1.0 - job.budget_bytes as f64 / (1000 * MIB) as f64;
            job.slowdown = Some(1.0 + excess * far);
        }
        now += 4000;
        agent.update(at(now), &mut node);
        node.pass(u64::MAX / 4);
    }
    assert!(agent.job(JobNumber(2)).unwrap().slowdown.unwrap() < 1.1);
    [1, 2].map(|number| agent.job(JobNumber(number)).unwrap().budget.offered_bytes / MIB)
}

#[test]
fn jobs_that_wait_for_far_memory_get_more_of_what_is_near() {
    // Also one whose slowdown grows faster than its near share falls.
    for minds in [0.5, 1.0, 8.0, 40.0] {
        let [more, less] = budgets_of_one_that_minds(minds);
        assert!(more >= 700 && less >= 200 && more + less <= 1000, "{more} and {less} MiB with {minds}");
    }
}

#[test]
fn a_node_that_is_short_of_memory_divides_less_and_keeps_its_promises() {
    let (mut agent, mut node) = (agent(1024, None), ModelNode::default());
    agent.register(JobNumber(1), &claim(1024, 900), at(0)).unwrap();
    agent.update(at(0), &mut node);
    node.pass(u64::MAX / 4);
    let mut budgets_at = |agent: &mut Agent, pressure: f64, seconds: u64| {
        node.pressure = pressure;
        agent.update(at(seconds * 1000), &mut node);
        node.pass(u64::MAX / 4);
        budgets(&node)[0]
    };
    assert_eq!(budgets_at(&mut agent, 0.2, 5), 1024, "the last look was five seconds ago");
    assert_eq!(budgets_at(&mut agent, 0.2, 10), 992);
    assert_eq!(budgets_at(&mut agent, 0.2, 11), 992);
    assert_eq!(budgets_at(&mut agent, 0.02, 20), 992, "neither short nor not");
    assert_eq!((agent.withheld_bytes() / MIB, agent.pressure()), (32, 0.02));
    for seconds in (30..200).step_by(10) {
        assert!(budgets_at(&mut agent, 0.9, seconds) >= 900, "the least that was promised");
    }
    assert_eq!(agent.withheld_bytes() / MIB, 256, "a quarter at most");
    for seconds in (200..290).step_by(10) {
        budgets_at(&mut agent, 0.0, seconds);
    }
    assert_eq!((budgets_at(&mut agent, 0.0, 290), agent.withheld_bytes()), (1024, 0));
}

/// An agent of 100 MiB with jobs of 100 MiB, which may have all but 20 MiB of it far.
fn agent_with_jobs(running: u32) -> (Agent, ModelNode) {
    let (mut agent, mut node) = (agent(100, None), ModelNode::default());
    for number in 1..=running {
        agent.register(JobNumber(number), &claim(100, 20), at(0)).unwrap();
        (0..2).for_each(|_| {
            agent.update(at(0), &mut node);
            node.pass(u64::MAX / 4);
        });
        assert!(agent.job(JobNumber(number)).unwrap().is_running());
    }
    (agent, node)
}

#[test]
fn far_memory_is_promised_as_far_as_servers_have_room_beside_what_is_not_stored_yet() {
    // One job runs, whose memory is near: what the next one asks for is 100 MiB far.
    let waits = |free_mib: u64, running: u32, stored_mib: u64| {
        let (mut agent, mut node) = agent_with_jobs(running);
        node.jobs.values_mut().for_each(|job| job.far_bytes = stored_mib * MIB);
        agent.on_servers(ServerRoom::Free { bytes: free_mib * MIB }, &mut node);
        // What is stored afterwards was room when the servers were asked.
        node.jobs.values_mut().for_each(|job| job.far_bytes = 90 * MIB);
        agent.register(JobNumber(9), &claim(100, 20), at(1)).unwrap();
        agent.update(at(1), &mut node);
        match agent.job(JobNumber(9)).unwrap().waits {
            None | Some(WaitReason::Shrinking { .. }) => 0,
            Some(WaitReason::ServersFull { missing_bytes }) => missing_bytes / MIB,
            other => panic!("{other:?}"),
        }
    };
    for free in [0, 1, 99, 100, 101, 150, 199, 200, 250, u64::MAX / MIB] {
        // 0 and 100 MiB are promised to those that run, and so much is stored.
        for (running, stored) in [(1, 0), (1, 30), (2, 0), (2, 20), (2, 50), (2, 80)] {
            let promised: u64 = 100 * (u64::from(running) - 1);
            let unstored = promised.saturating_sub(stored * u64::from(running));
            let expected = 100u64.saturating_sub(free.saturating_sub(unstored));
            assert_eq!(waits(free, running, stored), expected, "{free} free, {running} run, {stored} stored");
        }
    }
}

#[test]
fn no_job_starts_while_a_server_is_silent_and_all_that_run_go_on() {
    let (mut agent, mut node) = agent_with_jobs(1);
    agent.register(JobNumber(2), &claim(20, 20), at(1)).unwrap();
    for (servers, reason) in
        [(ServerRoom::Asked, WaitReason::ServersAsked), (ServerRoom::Silent, WaitReason::ServersSilent)]
    {
        agent.on_servers(servers, &mut node);
        assert_eq!(agent.update(at(1), &mut node), []);
        assert_eq!(agent.job(JobNumber(2)).unwrap().waits, Some(reason));
        assert_eq!(budgets(&node), [100]);
    }
    agent.on_servers(ServerRoom::Free { bytes: 20 * MIB }, &mut node);
    agent.update(at(2), &mut node);
    node.pass(u64::MAX / 4);
    assert_eq!(agent.update(at(3), &mut node), [JobNumber(2)]);
    // The servers say what an agent's tenant may store. A job with a token of its own is another's.
    agent.on_servers(ServerRoom::Free { bytes: 0 }, &mut node);
    for (number, has_token) in [(3, true), (4, false)] {
        agent.register(JobNumber(number), &claim(30, 20), at(4)).unwrap();
        if has_token {
            agent.set_own_token(JobNumber(number));
        }
    }
    (4..8).for_each(|second| {
        node.pass(u64::MAX / 4);
        agent.update(at(second), &mut node);
    });
    assert!(agent.job(JobNumber(3)).unwrap().is_running());
    let waits = agent.job(JobNumber(4)).unwrap().waits;
    assert!(matches!(waits, Some(WaitReason::ServersFull { .. })), "{waits:?}");
}

#[test]
fn a_budget_that_somebody_else_has_changed_is_changed_back() {
    let (mut agent, mut node) = agent_with_jobs(2);
    assert_eq!(budgets(&node), [50, 50]);
    for (told_mib, corrections) in [(90, 1), (20, 2), (50, 2)] {
        node.jobs.get_mut(&1).unwrap().budget_bytes = told_mib * MIB;
        agent.update(at(10), &mut node);
        assert_eq!(budgets(&node), [50, 50]);
        assert_eq!(agent.job(JobNumber(1)).unwrap().corrections, corrections, "{told_mib}");
    }
    assert_eq!(agent.job(JobNumber(2)).unwrap().corrections, 0);
    node.jobs.get_mut(&2).unwrap().far_bytes = 40 * MIB;
    agent.update(at(20), &mut node);
    assert_eq!(agent.job(JobNumber(2)).unwrap().far_bytes, 40 * MIB);
}

#[test]
fn what_jobs_keep_beside_their_budgets_is_divided_among_none() {
    let (mut agent, mut node) = agent_with_jobs(2);
    let has = |node: &mut ModelNode, beyond_mib: u64| {
        node.jobs.values_mut().for_each(|job| job.near_bytes = job.budget_bytes + beyond_mib * MIB);
    };
    has(&mut node, 6);
    agent.update(at(500), &mut node);
    assert_eq!(budgets(&node), [50, 50], "they may not have shrunk yet");
    for second in 1..30 {
        agent.update(at(second * 1000), &mut node);
        has(&mut node, 6);
        // 8 MiB are kept free for each.
        assert!(budgets(&node).iter().all(|mib| (41..=42).contains(mib)), "{:?}", budgets(&node));
        assert!(second == 1 || node.near_bytes_sum() <= 100 * MIB);
    }
    // A newcomer is admitted by the least of all, and no budget falls below that.
    agent.register(JobNumber(3), &claim(100, 60), at(30_000)).unwrap();
    for second in 31..40 {
        agent.update(at(second * 1000), &mut node);
        has(&mut node, 6);
    }
    assert_eq!(budgets(&node), [20, 20, 60]);
    node.jobs.remove(&3);
    for second in 41..60 {
        agent.update(at(second * 1000), &mut node);
        has(&mut node, 0);
    }
    assert_eq!(budgets(&node), [50, 50], "what is beside no longer is given back");
}
