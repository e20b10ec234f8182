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
    scenario
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
    scenario.kinds = vec![JobKind { name: "job".into(), cores: 1, memory_bytes: 60, least: 0.5, run_time }];
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
        for (index, job) in records.iter().enumerate() {
            let overtaker = records[index + 1..]
                .iter()
                .find(|later| later.start_s < job.start_s && later.arrival_s > job.arrival_s + window_s);
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
