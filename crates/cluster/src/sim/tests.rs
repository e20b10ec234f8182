//! Guards against a schedule that no cluster could have run, and against one that a seed does not
//! repeat.

use super::published::{Profiles, rack, testbed};
use super::*;
use farfield_core::policy::cluster::{QueueOrder, SplitRule};

fn random_scenario(random: &mut fastrand::Rng) -> Scenario {
    let rules = if random.bool() { Rules::published() } else { Rules::default_rules() };
    let profiles = if random.bool() { Profiles::Polynomials } else { Profiles::Lines };
    let mut scenario = if random.bool() { testbed(rules, profiles) } else { rack(rules, profiles) };
    scenario.nodes = 2 + random.u32(..6);
    scenario.far_bytes = scenario.shape.memory_bytes * random.u64(..8) / 2;
    scenario.counts = (0..published::CLASSES).map(|_| random.usize(..40)).collect();
    scenario.counts[random.usize(..6)] += 1;
    scenario.arrivals = match random.u8(..3) {
        0 => Arrivals::Window(f64::from(random.u16(..20_000))),
        1 => Arrivals::Poisson(0.001 + random.f64()),
        // Many at one moment.
        _ => Arrivals::Window(0.0),
    };
    if !rules.start_jitter {
        scenario.rules.link_bytes_per_s = random.bool().then_some(1e9);
        scenario.rules.profile_error = if random.bool() { 0.2 } else { 0.0 };
    }
    if random.bool() {
        scenario.kinds.iter_mut().for_each(|kind| kind.usage = random_usage(random, kind.memory_bytes));
    }
    scenario
}

fn random_usage(random: &mut fastrand::Rng, memory_bytes: u64) -> Vec<UsageStep> {
    let count = 1 + random.u32(..8);
    let step = |index| UsageStep {
        from: f64::from(index) / f64::from(count),
        memory_bytes: (memory_bytes / 8 * random.u64(1..=8)).max(1),
    };
    (0..count).map(step).collect()
}

const POLICIES: [&str; 7] = ["near", "near+long", "uniform:0.75", "uniform:0.95", "variable", "memory-time", "worth"];

/// A policy that is possible: lines know nothing of shares below 0.4.
fn policy(name: &str) -> Policy {
    name.parse().unwrap()
}

#[test]
fn schedules_are_possible_and_repeat() {
    for seed in 0..250 {
        let mut random = fastrand::Rng::with_seed(seed);
        let scenario = random_scenario(&mut random);
        let name = POLICIES[random.usize(..POLICIES.len())];
        let mut simulator = Simulator::new(&scenario, policy(name)).unwrap();
        let run = simulator.run(seed).unwrap();
        let records = simulator.records().to_vec();
        assert_eq!(records.len(), scenario.counts.iter().sum::<usize>());
        assert!(run.work_error_max < 1e-6, "seed {seed}, {name}: work done is not work asked, {run:?}");
        assert!(run.far_peak_bytes <= scenario.far_bytes, "seed {seed}, {name}");
        for job in &records {
            assert!(job.arrival_s <= job.start_s && job.start_s < job.end_s, "seed {seed}, {name}: {job:?}");
            assert!(job.end_s <= run.makespan_s && (0.0..=0.6).contains(&job.far_max), "seed {seed}: {job:?}");
        }
        let cores = scenario.nodes * scenario.shape.cores;
        assert!(most_at_a_time(&records, |class| scenario.kinds[class].cores) <= cores, "seed {seed}, {name}");
        let mut again = Simulator::new(&scenario, policy(name)).unwrap();
        again.run(seed + 1).unwrap();
        assert_eq!((again.run(seed).unwrap(), again.records()), (run, &records[..]), "seed {seed}, {name}");
    }
}

/// Most cores that are in use at one moment.
fn most_at_a_time(records: &[JobRecord], cores: impl Fn(usize) -> u32) -> u32 {
    let mut changes: Vec<(f64, i64)> = Vec::new();
    for job in records {
        let cores = i64::from(cores(job.class));
        changes.extend([(job.start_s, cores), (job.end_s, -cores)]);
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut used = 0;
    changes
        .iter()
        .map(|change| {
            used += change.1;
            used
        })
        .max()
        .unwrap_or(0) as u32
}

#[test]
fn without_far_memory_jobs_run_at_full_speed() {
    let mut scenario = testbed(Rules::default_rules(), Profiles::Lines);
    scenario.counts = vec![20; published::CLASSES];
    let mut simulator = Simulator::new(&scenario, Policy::NEAR).unwrap();
    let run = simulator.run(3).unwrap();
    assert_eq!((run.splits, run.far_peak_bytes), (0, 0));
    for job in simulator.records() {
        let seconds = simulator.classes()[job.class].seconds();
        assert!((job.end_s - job.start_s - seconds).abs() < 1e-6 && job.far_max == 0.0);
    }
}

#[test]
fn one_job_more_than_fits_takes_the_time_of_its_share() {
    // Two jobs of 60 on a node of 100: each has 50 of 60, as long as both run.
    let mut scenario = testbed(Rules::default_rules(), Profiles::Lines);
    let line = |near, slowdown| Point { near, slowdown };
    let curve = Curve::through(&[line(0.5, 2.0), line(1.0, 1.0)]).unwrap();
    let run_time = RunTime::Measured { seconds: 300.0, curve };
    scenario.kinds =
        vec![JobKind { name: "job".into(), cores: 1, memory_bytes: 60, least: 0.5, run_time, usage: Vec::new() }];
    scenario.counts = vec![2];
    scenario.arrivals = Arrivals::Recorded([0.0, 30.0].map(|at_s| Arrival { class: 0, at_s }).to_vec());
    (scenario.nodes, scenario.memory_servers, scenario.far_bytes) = (1, 0, 20);
    scenario.shape.memory_bytes = 100;
    let makespan_s = |scenario: &Scenario| {
        let run = Simulator::new(scenario, Policy::VARIABLE).unwrap().run(1).unwrap();
        assert!(run.work_error_max < 1e-9, "{run:?}");
        run.makespan_s.round()
    };
    // The first has done a tenth when it slows down by a third; the second then has a tenth left.
    assert_eq!(makespan_s(&scenario), 30.0 + 360.0 + 30.0);
    // Memory that moves slowly delays the newcomer by 100 s: 10 bytes leave before it begins.
    scenario.rules.link_bytes_per_s = Some(0.1);
    assert_eq!(makespan_s(&scenario), 30.0 + 360.0 + 105.0);
    // The second starts when the first ends, if nothing may be far.
    scenario.far_bytes = 19;
    assert_eq!(makespan_s(&scenario), 600.0);
}

/// Arrival, memory that is asked for, and steps of the use.
type UsingJob<'a> = (f64, u64, &'a [(f64, u64)]);

/// Jobs on one node of 100 bytes without far memory. Each asks for some bytes, runs for 100 s, and
/// uses what its steps say.
fn jobs_that_use(jobs: &[UsingJob<'_>]) -> Scenario {
    let mut scenario = testbed(Rules::default_rules(), Profiles::Lines);
    let curve = Curve::through(&[Point { near: 0.5, slowdown: 2.0 }, Point { near: 1.0, slowdown: 1.0 }]).unwrap();
    let kind = |&(_, memory_bytes, steps): &UsingJob<'_>| JobKind {
        name: "job".into(),
        cores: 1,
        memory_bytes,
        least: 0.5,
        run_time: RunTime::Measured { seconds: 100.0, curve: curve.clone() },
        usage: steps.iter().map(|&(from, memory_bytes)| UsageStep { from, memory_bytes }).collect(),
    };
    scenario.kinds = jobs.iter().map(kind).collect();
    scenario.counts = vec![1; jobs.len()];
    let arrivals = jobs.iter().enumerate().map(|(class, job)| Arrival { class, at_s: job.0 });
    scenario.arrivals = Arrivals::Recorded(arrivals.collect());
    (scenario.nodes, scenario.memory_servers, scenario.far_bytes) = (1, 0, 0);
    scenario.shape.memory_bytes = 100;
    scenario
}

#[test]
fn jobs_are_placed_by_what_they_ask_for_and_count_with_what_they_use() {
    let ends = |scenario: &Scenario, policy| {
        let mut simulator = Simulator::new(scenario, policy).unwrap();
        let run = simulator.run(1).unwrap();
        let ends: Vec<f64> = simulator.records().iter().map(|job| job.end_s.round()).collect();
        (ends, run.evictions, run.lost_s.round())
    };
    // The second asks for 60 and finds 80 free, because the first uses 20 of its 60.
    let shared = jobs_that_use(&[(0.0, 60, &[(0.0, 20)]), (10.0, 60, &[(0.0, 60)])]);
    assert_eq!(ends(&shared, Policy::NEAR), (vec![100.0, 110.0], 0, 0.0));
    let by_request = jobs_that_use(&[(0.0, 60, &[]), (10.0, 60, &[])]);
    assert_eq!(ends(&by_request, Policy::NEAR), (vec![100.0, 200.0], 0, 0.0));
    // The first grows at 50 s, when the second has worked for 40 s; it starts again at 100 s.
    let grown = jobs_that_use(&[(0.0, 60, &[(0.0, 20), (0.5, 60)]), (10.0, 60, &[(0.0, 60)])]);
    assert_eq!(ends(&grown, Policy::NEAR), (vec![100.0, 200.0], 1, 40.0));
    // The pool takes the growth: both have 5/6 of their memory near until the first ends.
    let far = Scenario { far_bytes: 20, ..grown.clone() };
    assert_eq!(ends(&far, Policy::VARIABLE), (vec![117.0, 127.0], 0, 0.0));
    // The later one grows, and leaves itself.
    let later = jobs_that_use(&[(0.0, 60, &[(0.0, 40)]), (10.0, 60, &[(0.0, 50), (0.5, 60)])]);
    assert_eq!(ends(&later, Policy::NEAR), (vec![100.0, 110.0], 0, 0.0), "all fits");
    let later = jobs_that_use(&[(0.0, 60, &[(0.0, 30), (0.2, 41)]), (10.0, 60, &[(0.0, 50), (0.5, 60)])]);
    assert_eq!(ends(&later, Policy::NEAR), (vec![100.0, 200.0], 1, 50.0));
    // A fall of the use makes room.
    let fallen = jobs_that_use(&[(0.0, 60, &[(0.0, 60), (0.5, 20)]), (10.0, 60, &[(0.0, 60)])]);
    assert_eq!(ends(&fallen, Policy::NEAR), (vec![100.0, 150.0], 0, 0.0));
}

#[test]
fn a_use_that_cannot_be_is_refused() {
    let check = |memory_bytes, steps: &[(f64, u64)], complaint: &str| {
        let scenario = jobs_that_use(&[(0.0, memory_bytes, steps)]);
        let error = Simulator::new(&scenario, Policy::NEAR).expect_err(complaint).to_string();
        assert!(error.contains(complaint), "{error}");
    };
    check(60, &[(0.1, 20)], "begins after");
    check(60, &[(0.0, 20), (0.5, 30), (0.5, 20)], "follow each other");
    check(60, &[(0.0, 20), (f64::NAN, 30)], "follow each other");
    check(60, &[(0.0, 20), (1.0, 30)], "follow each other");
    check(60, &[(0.0, 61)], "more than the job asked");
    check(60, &[(0.0, 0)], "needs memory");
    check(101, &[(0.0, 20)], "fits on no node");
}

#[test]
fn overtaking_is_bounded() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut scenario = rack(Rules::default_rules(), Profiles::Lines);
        scenario.nodes = 3;
        scenario.counts = (0..published::CLASSES).map(|_| 20 + random.usize(..60)).collect();
        scenario.arrivals = Arrivals::Poisson(scenario.jobs_per_s_max() * 1.2);
        let window_s = 200.0;
        let order = QueueOrder::LongFirst { window_s };
        let mut simulator = Simulator::new(&scenario, Policy { order, ..Policy::MEMORY_TIME }).unwrap();
        simulator.run(seed).unwrap();
        let records = simulator.records();
        let longest_s = scenario.kinds.iter().map(|kind| kind.run_time.at(1.0)).fold(window_s, f64::max);
        for (index, job) in records.iter().enumerate() {
            let overtaker = records[index + 1..]
                .iter()
                .find(|later| later.start_s < job.start_s && later.arrival_s > job.arrival_s + longest_s);
            assert_eq!(overtaker, None, "seed {seed}: {job:?}");
        }
    }
}

#[test]
fn impossible_scenarios_are_refused() {
    let scenario = || {
        let mut scenario = testbed(Rules::default_rules(), Profiles::Lines);
        scenario.counts = vec![1; published::CLASSES];
        scenario
    };
    let check = |scenario: Scenario, policy: Policy, complaint: &str| {
        let error =
            Simulator::new(&scenario, policy).err().or_else(|| Simulator::new(&scenario, policy).ok()?.run(1).err());
        let error = error.expect(complaint).to_string();
        assert!(error.contains(complaint), "{error}");
    };
    let mut small = scenario();
    small.shape.memory_bytes /= 4;
    check(small, Policy::NEAR, "quicksort fits on no node, even an empty one (other classes like it: 1): lower");
    let mut servers = scenario();
    servers.memory_servers = 9;
    check(servers.clone(), Policy::VARIABLE, "no node for jobs");
    assert!(Simulator::new(&servers, Policy::NEAR).is_ok());
    let mut empty = scenario();
    empty.counts = vec![0; published::CLASSES];
    check(empty, Policy::NEAR, "no jobs");
    let unmeasured = Policy { split: Some(SplitRule::Uniform), least: Some(0.2), ..Policy::NEAR };
    check(scenario(), unmeasured, "quicksort");
    let mut nan = scenario();
    nan.arrivals = Arrivals::Poisson(f64::NAN);
    check(nan, Policy::NEAR, "arrivals");
}
