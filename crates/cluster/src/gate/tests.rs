//! Guards against books of a scheduler that are read wrongly, and against a gate that depends on what
//! it did before.

use super::slurm::text::{FarComment, state, update_words};
use super::*;
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
const NODES: &str = "\
NodeName=n1 Arch=x86_64 CPUAlloc=3 CPUEfctv=8 CPUTot=8 OS=Linux 6.18 #1 SMP State=MIXED RealMemory=1000 AllocMem=700 Partitions=far Reason=State=DOWN [root]
NodeName=n2 CPUAlloc=0 CPUTot=4 RealMemory=1000 MemSpecLimit=100 AllocMem=0 State=IDLE+PLANNED Partitions=fast,far
NodeName=n3 CPUAlloc=0 CPUTot=4 RealMemory=1000 AllocMem=0 State=IDLE+DRAIN Partitions=far
NodeName=n4 CPUAlloc=0 CPUTot=4 RealMemory=1000 AllocMem=0 State=IDLE* Partitions=far
NodeName=n5 CPUAlloc=0 CPUTot=4 RealMemory=1000 AllocMem=0 State=IDLE Partitions=fast
";

#[test]
fn books_of_slurm_are_read() {
    let jobs = "\
3|COMPLETED|(null)|n[1-2]|16|900|(null)|100|None|
1|RUNNING|farmem:12,matlab:2|n1|2|500|farfield:mem=800,least=400,node=n1,at=150|100|None|
2_1|PENDING|farfield_gate:1||1|700|farfield:mem=300,least=100|100|Licenses|
2_2|PENDING|farfield_gate:1||1|700|farfield:mem=300,least=100|90|Priority|
4|PENDING|farfield_gate:1||1|800|farfield:mem=300,least=100|100|Dependency|
5|PENDING|farmem:7||1|600|farfield:mem=300,least=100,node=n2,at=190|100|Resources|
6|PENDING|||1|600|farfield:mem=300,least=100|110|None|
7|RUNNING|(null)|n1|1|1|(null)|100|None|
8|RUNNING|farmem|n[1-2]|1|1|farfield:mem=300,least=100|100|None|
9|PENDING|farfield_gate:1||1|1|nonsense|100|Licenses|
10|PENDING|farfield_gate:1||1|1|farfield:mem=300,least=301|100|Licenses|
11|PENDING|farfield_gate:1||1|0|farfield:mem=300,least=100|N/A|None|
1;rm|PENDING|farfield_gate:1||1|0|farfield:mem=300,least=100|1|None|
13|PENDING|farfield_gate:1||1|5|farfield:mem=300,least=100|100|ReqNodeNotAvail, UnavailableNodes:n3|
";
    let state = state("far", NODES, jobs, 200);
    let names: Vec<&str> = state.nodes.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["n1", "n2", "n3", "n4"]);
    let shapes: Vec<_> =
        state.nodes.iter().map(|(_, node)| (node.shape.cores, node.shape.memory_bytes / MIB, node.is_up)).collect();
    assert_eq!(shapes, [(8, 1000, true), (4, 900, true), (4, 1000, false), (4, 1000, false)]);
    let foreign = state.nodes[0].1;
    assert_eq!((foreign.foreign_cores, foreign.foreign_bytes / MIB), (1, 300), "the node's books without far jobs");
    let phases: Vec<_> = state.jobs.iter().map(|job| (job.id.as_str(), job.phase)).collect();
    let waiting = Some(GatePhase::Waiting);
    let expected = [
        ("4", Some(GatePhase::Held)),
        ("2_2", waiting),
        ("2_1", waiting),
        ("5", Some(GatePhase::Admitted { node: 1, far_bytes: 7 * MIB, age_s: 10 })),
        ("6", None),
        ("1", Some(GatePhase::Running { node: 0, far_bytes: 12 * MIB })),
        ("13", waiting),
        ("11", Some(GatePhase::Held)),
    ];
    assert_eq!(phases, expected);
    assert_eq!((state.jobs[1].waited_s, state.jobs[5].other_licenses.join(" ")), (110, "matlab:2".into()));
    let ignored: Vec<_> = state.ignored.iter().map(|(id, _)| id.as_str()).collect();
    assert_eq!(ignored, ["8", "9", "10", "1;rm"]);
}

#[test]
fn texts_that_are_cut_or_made_up_are_never_believed() {
    for text in [
        "",
        "farfield:",
        "farfield:mem=1",
        "farfield:mem=0,least=0",
        "farfield:mem=-5,least=1",
        "mem=5,least=1",
        "farfield:mem=99999999999,least=1",
        "farfield:mem=5,least=1,node=n1,at=x",
        "farfield:mem=5;least=1",
    ] {
        assert_eq!(FarComment::parse(text), None, "{text}");
    }
    let jobs = "1|RUNNING|farmem:12|n1|2|500|farfield:mem=800,least=400,node=n1,at=150|100|None|\n";
    for end in 0..jobs.len() {
        state("far", &NODES[..NODES.len().min(end * 9)], &jobs[..end], 200);
    }
}

#[test]
fn changes_are_words_of_scontrol() {
    let class = GateJob::class(1, 300 * MIB, 100 * MIB).unwrap();
    let other_licenses = vec!["matlab:2".to_owned()];
    let job = SchedulerJob { id: "2_1".into(), class, waited_s: 0, phase: None, other_licenses };
    let words = |change| update_words(&job, &change).join(" ");
    assert_eq!(
        words(BookChange::Admit { node: "n2", far_bytes: 7 * MIB, now_s: 99 }),
        "JobId=2_1 NodeList=n2 Licenses=matlab:2,farmem:7 AdminComment=farfield:mem=300,least=100,node=n2,at=99"
    );
    assert_eq!(
        words(BookChange::Withdraw),
        "JobId=2_1 NodeList= Licenses=matlab:2,farfield_gate:1 AdminComment=farfield:mem=300,least=100"
    );
    assert_eq!(words(BookChange::Charge { far_bytes: 0 }), "JobId=2_1 Licenses=matlab:2");
}

/// Scheduler whose books are lines of `squeue`, changed by the words of `scontrol update`: what a
/// gate writes it must be able to read. It starts admitted jobs when told to.
struct ReplayedScheduler {
    memory_mib: u64,
    nodes: usize,
    pool_mib: u64,
    jobs: BTreeMap<String, ReplayedJob>,
    /// Changes that are accepted before the scheduler is away.
    answers: usize,
}

#[derive(Clone, Debug)]
struct ReplayedJob {
    is_running: bool,
    licenses: String,
    node: String,
    comment: String,
}

#[derive(Debug, thiserror::Error)]
#[error("the scheduler is away")]
struct Away;

impl ReplayedScheduler {
    fn submit(&mut self, id: &str, memory_mib: u64, least_mib: u64) {
        let comment = format!("farfield:mem={memory_mib},least={least_mib}");
        let licenses = "farfield_gate:1".into();
        self.jobs.insert(id.into(), ReplayedJob { is_running: false, licenses, node: String::new(), comment });
    }

    /// Starts admitted jobs, in their order, as far as near memory and licences are there.
    fn start_admitted(&mut self) {
        for id in self.jobs.keys().cloned().collect::<Vec<_>>() {
            let job = &self.jobs[&id];
            let least_mib = FarComment::parse(&job.comment).unwrap().least_mib;
            let has_room = self.sum_mib(&job.node, |comment| comment.least_mib) + least_mib <= self.memory_mib;
            let is_admitted = !job.is_running && !job.licenses.contains("farfield_gate");
            if is_admitted && has_room && self.charged_mib() + charge_mib(job) <= self.pool_mib {
                self.jobs.get_mut(&id).unwrap().is_running = true;
            }
        }
    }

    fn sum_mib(&self, node: &str, of: impl Fn(&FarComment) -> u64) -> u64 {
        let on = self.jobs.values().filter(|job| job.is_running && job.node == node);
        on.map(|job| of(&FarComment::parse(&job.comment).unwrap())).sum()
    }

    /// Licences that are in use, which are those of running jobs.
    fn charged_mib(&self) -> u64 {
        self.jobs.values().filter(|job| job.is_running).map(charge_mib).sum()
    }

    fn running(&self) -> usize {
        self.jobs.values().filter(|job| job.is_running).count()
    }
}

fn charge_mib(job: &ReplayedJob) -> u64 {
    job.licenses.strip_prefix("farmem:").map_or(0, |count| count.parse().unwrap())
}

impl Scheduler for ReplayedScheduler {
    type Error = Away;

    fn read(&mut self, now_s: u64) -> Result<SchedulerState, Away> {
        let mut nodes = String::new();
        for node in 1..=self.nodes {
            let least = self.sum_mib(&format!("n{node}"), |comment| comment.least_mib);
            let memory = self.memory_mib;
            nodes += &format!(
                "NodeName=n{node} CPUTot=64 CPUAlloc=0 RealMemory={memory} AllocMem={least} State=MIXED Partitions=far\n"
            );
        }
        let line = |(id, job): (&String, &ReplayedJob)| {
            let ReplayedJob { licenses, node, comment, .. } = job;
            let (state, node) = if job.is_running { ("RUNNING", node.as_str()) } else { ("PENDING", "") };
            format!("{id}|{state}|{licenses}|{node}|1|5|{comment}|100|None|\n")
        };
        let jobs: String = self.jobs.iter().map(line).collect();
        let mut state = state("far", &nodes, &jobs, now_s);
        state.pool_bytes = self.pool_mib * MIB;
        assert!(state.ignored.is_empty(), "{:?}", state.ignored);
        Ok(state)
    }

    fn apply(&mut self, job: &SchedulerJob, change: &BookChange<'_>) -> Result<(), Away> {
        self.answers = self.answers.checked_sub(1).ok_or(Away)?;
        for word in &update_words(job, change)[1..] {
            let job = self.jobs.get_mut(&job.id).ok_or(Away)?;
            let (name, value) = word.split_once('=').unwrap();
            let field = match name {
                "NodeList" => &mut job.node,
                "Licenses" => &mut job.licenses,
                "AdminComment" => &mut job.comment,
                _ => panic!("{word}"),
            };
            *field = value.to_owned();
        }
        Ok(())
    }
}

fn config() -> GateConfig {
    GateConfig { start_within_s: 30, overtake_within_s: 3600, is_dry_run: false }
}

fn scheduler() -> ReplayedScheduler {
    ReplayedScheduler { memory_mib: 100, nodes: 2, pool_mib: 100, jobs: BTreeMap::new(), answers: usize::MAX }
}

#[test]
fn more_jobs_run_than_memory_would_allow_and_the_pool_follows() {
    let mut scheduler = scheduler();
    for id in ["1", "2", "3", "4"] {
        scheduler.submit(id, 80, 40);
    }
    let dry =
        GateConfig { is_dry_run: true, ..config() }.round(&mut scheduler, Some(PoolServers::UNKNOWN), 200).unwrap();
    assert!(matches!(&dry.events[0], GateEvent::Admitted { job, .. } if job == "1"));
    assert_eq!(scheduler.jobs["1"].licenses, "farfield_gate:1", "a dry run changes nothing");
    let round = config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 200).unwrap();
    assert!(round.explain("4").unwrap().contains("20 MiB of the pool are missing"), "{round:?}");
    assert!(round.explain("3").unwrap().contains("with 60 MiB"), "{round:?}");
    assert_eq!(round.explain("17"), None);
    let starting = config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 201).unwrap();
    let is_starting = |event: &GateEvent| matches!(event, GateEvent::Waits { reason: GateWait::Starting, .. });
    assert_eq!(starting.events.iter().filter(|event| is_starting(event)).count(), 3, "{starting:?}");
    assert_eq!(starting.explain("3").unwrap(), format!("job 3: {}", GateWait::Starting));
    assert_eq!((starting.charged_bytes, starting.held_bytes), (60 * MIB, 0), "promised, and not held yet");
    scheduler.start_admitted();
    assert_eq!((scheduler.running(), scheduler.charged_mib()), (3, 60), "without far memory two would run");
    scheduler.jobs.remove("1");
    let round = config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 201).unwrap();
    assert!(round.events.contains(&GateEvent::Charged { job: "3".into(), far_bytes: 0 }), "{round:?}");
    scheduler.start_admitted();
    assert_eq!((scheduler.running(), scheduler.charged_mib()), (3, 60));
    assert_eq!((round.charged_bytes, round.held_bytes), (60 * MIB, 60 * MIB));
    let json = serde_json_of(&round);
    assert!(json.contains("\"decision\":\"charged\""), "{json}");
    let json = serde_json_of(&starting);
    let waits = format!("{{\"decision\":\"waits\",\"job\":\"3\",\"reason\":\"{}\"}}", GateWait::Starting);
    assert!(json.contains(&waits), "{json}");
    scheduler.answers = 0;
    scheduler.submit("9", 1, 1);
    let refused = config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 202).unwrap();
    let is_refused = |event: &GateEvent| matches!(event, GateEvent::Refused { job, change: "admit", .. } if job == "9");
    assert!(refused.events.iter().any(is_refused), "{refused:?}");
}

#[test]
fn a_job_that_lacks_far_memory_is_told_what_was_promised_and_what_servers_store() {
    let mut scheduler = scheduler();
    scheduler.submit("1", 180, 40);
    let servers = PoolServers { stored_bytes: 30 * MIB, capacity_bytes: 100 * MIB };
    let round = config().round(&mut scheduler, Some(servers), 200).unwrap();
    let expected = "job 1 waits: 10 MiB of the pool are missing \
                    (0 of 100 MiB are promised; the memory servers store 30 of 100 MiB)";
    assert_eq!(round.explain("1").unwrap(), expected);
    let servers = PoolServers { stored_bytes: 20 * MIB, ..servers };
    config().round(&mut scheduler, Some(servers), 200).unwrap();
    assert_eq!(scheduler.jobs["1"].node, "n1");
}

#[test]
fn a_job_behind_one_that_none_may_overtake_is_told_which_and_what_that_lacks() {
    let mut scheduler = scheduler();
    for id in ["1", "2", "3"] {
        scheduler.submit(id, 80, 60);
    }
    scheduler.submit("4", 10, 10);
    scheduler.submit("5", 10, 10);
    let round = config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 3700).unwrap();
    for id in ["4", "5"] {
        let expected = format!(
            "job {id} waits: {}; that is job 3, for which {}",
            GateWait::Turn,
            GateWait::Near { missing_bytes: 20 * MIB }
        );
        assert_eq!(round.explain(id).unwrap(), expected);
    }
    assert_eq!(config().round(&mut scheduler, None, 3700).unwrap().closing_job(), None);
}

/// Events are data for programs; the shape is that of serde.
fn serde_json_of(round: &GateRound) -> String {
    serde_json::to_string(round).unwrap()
}

#[test]
fn nobody_is_admitted_while_the_pool_is_away_and_strays_are_caught() {
    let mut scheduler = scheduler();
    scheduler.submit("1", 80, 40);
    let round = config().round(&mut scheduler, None, 200).unwrap();
    assert_eq!(round.explain("1").unwrap(), "job 1 waits: a memory server does not answer, so nobody is admitted");
    scheduler.jobs.get_mut("1").unwrap().licenses = String::new();
    config().round(&mut scheduler, None, 200).unwrap();
    assert_eq!(scheduler.jobs["1"].licenses, "farfield_gate:1", "nobody starts who was not admitted");
    // Admitted, and not started in time.
    config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 200).unwrap();
    assert_eq!(scheduler.jobs["1"].node, "n1");
    config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 229).unwrap();
    assert_eq!(scheduler.jobs["1"].node, "n1");
    config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 230).unwrap();
    let job = &scheduler.jobs["1"];
    assert_eq!((job.node.as_str(), job.licenses.as_str()), ("", "farfield_gate:1"));
}

/// Each round is that of a new gate, which is killed after any number of changes.
#[test]
fn gates_that_are_killed_admit_nobody_twice_and_lose_nobody() {
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut scheduler = scheduler();
        let mut next = 1;
        for second in 0..200 {
            if second < 100 && random.bool() {
                let memory = 20 + random.u64(..100);
                scheduler.submit(&next.to_string(), memory, 1 + random.u64(..memory.min(90)));
                next += 1;
            }
            let ends: Vec<String> = scheduler.jobs.keys().filter(|_| random.u8(..8) == 0).cloned().collect();
            for id in ends {
                // It ends, is cancelled, or is started again with what it had.
                match scheduler.jobs.get_mut(&id) {
                    Some(job) if job.is_running && random.u8(..3) == 0 => job.is_running = false,
                    _ => drop(scheduler.jobs.remove(&id)),
                }
            }
            scheduler.answers = if second < 100 { random.usize(..6) } else { usize::MAX };
            config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 1000 + second).unwrap();
            if random.bool() || second >= 100 {
                scheduler.start_admitted();
            }
            assert!(scheduler.charged_mib() <= 100, "seed {seed}, second {second}");
            let overflow = |node| scheduler.sum_mib(node, |comment| comment.memory_mib).saturating_sub(100);
            assert!(overflow("n1") + overflow("n2") <= scheduler.charged_mib(), "seed {seed}, second {second}");
        }
        for round in 0.. {
            if scheduler.jobs.is_empty() {
                break;
            }
            assert!(round < 1000, "seed {seed}: {:?} wait for ever", scheduler.jobs);
            config().round(&mut scheduler, Some(PoolServers::UNKNOWN), 10_000 + 10 * round).unwrap();
            scheduler.start_admitted();
            scheduler.jobs.retain(|_, job| !job.is_running);
        }
    }
}
