//! Guards against a division that gives more than there is, or less than was promised.

use super::*;
use crate::policy::cluster::job::RunTime;
use crate::policy::curve::{Curve, Point};
use alloc::format;

const RULES: [SplitRule; 4] = [SplitRule::Uniform, SplitRule::Variable, SplitRule::MemoryTime, SplitRule::Worth];

/// A class with a least share and slowdowns that rise in random steps towards it.
fn random_class(random: &mut fastrand::Rng, memory_bytes: u64, least: f64) -> JobClass {
    let mut slowdown = 1.0;
    let points = (0..=6).map(|step| {
        let near = 1.0 - (1.0 - least) * f64::from(step) / 6.0;
        slowdown += if step == 0 { 0.0 } else { random.f64() * random.f64() * 0.4 };
        Point { near, slowdown }
    });
    let curve = Curve::through(&points.collect::<Vec<_>>()).unwrap();
    let seconds = 10.0 + 1000.0 * random.f64();
    JobClass::new(1, memory_bytes, least, RunTime::Measured { seconds, curve }).unwrap()
}

fn random_jobs(random: &mut fastrand::Rng, classes: usize, count: usize) -> Vec<JobProgress> {
    (0..count).map(|_| JobProgress { class: random.usize(..classes), remaining: random.f64() }).collect()
}

/// The contract, for one node.
fn conforms(rule: SplitRule, classes: &[JobClass], jobs: &[JobProgress], memory_bytes: u64, context: &str) {
    let mut shares = Vec::new();
    let answer = Splitter::new(rule, classes).split(classes, jobs, memory_bytes, &mut shares);
    let sum = |of: fn(&JobClass) -> u64| jobs.iter().map(|job| of(&classes[job.class])).sum::<u64>();
    let (asked, least) = (sum(JobClass::memory_bytes), sum(JobClass::least_bytes));
    if asked > memory_bytes && least > memory_bytes {
        assert_eq!(answer, Err(LeastSharesExceedNode { least_bytes: least, memory_bytes }), "{context}");
        return;
    }
    assert_eq!((answer, shares.len()), (Ok(()), jobs.len()), "{context}");
    let mut used = 0.0;
    for (job, &share) in jobs.iter().zip(&shares) {
        let class = &classes[job.class];
        assert!(share <= 1.0 && share >= class.least() - 1e-9, "{context}: {share} of {}", class.least());
        used += share * class.memory_bytes() as f64;
    }
    let room = memory_bytes as f64;
    assert!(used <= room + 1e-6 * room, "{context}: {used} of {room}");
    if asked <= memory_bytes {
        assert!(shares.iter().all(|share| *share == 1.0), "{context}: all fits, and not all is near");
    } else {
        // Least shares are rounded up to bytes.
        assert!(used >= room - 1e-6 * room - jobs.len() as f64, "{context}: {used} of {room}, the rest lies idle");
    }
}

#[test]
fn every_rule_keeps_the_contract() {
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let classes: Vec<JobClass> = (0..1 + random.usize(..6))
            .map(|_| {
                let least = [1.0, 0.2 + 0.8 * random.f64()][usize::from(random.u8(..8) > 0)];
                let memory = 1 + random.u64(..1 << 30);
                random_class(&mut random, memory, least)
            })
            .collect();
        let count = random.usize(..20);
        let jobs = random_jobs(&mut random, classes.len(), count);
        let asked: u64 = jobs.iter().map(|job| classes[job.class].memory_bytes()).sum();
        let memory = (asked as f64 * (0.3 + random.f64())) as u64 + 1;
        for rule in RULES {
            conforms(rule, &classes, &jobs, memory, &format!("seed {seed}, {rule:?}"));
        }
    }
}

#[test]
fn divisions_are_those_of_the_paper() {
    let line = |least| {
        let points = [Point { near: 0.25, slowdown: 2.0 }, Point { near: 1.0, slowdown: 1.0 }];
        let run_time = RunTime::Measured { seconds: 10.0, curve: Curve::through(&points).unwrap() };
        JobClass::new(1, 100, least, run_time).unwrap()
    };
    let classes = [line(0.5), line(0.75), line(1.0)];
    let jobs = [0, 1, 2].map(|class| JobProgress { class, remaining: 1.0 });
    let check = |rule, memory_bytes, expected: [f64; 3]| {
        let mut shares = Vec::new();
        Splitter::new(rule, &classes).split(&classes, &jobs, memory_bytes, &mut shares).unwrap();
        let near = shares.iter().zip(expected).all(|(share, expected)| (share - expected).abs() < 1e-9);
        assert!(near, "{rule:?}: {shares:?}, not {expected:?}");
    };
    // 60 of 75 bytes that can be spared: four fifths from each.
    check(SplitRule::Variable, 240, [0.6, 0.8, 1.0]);
    check(SplitRule::Uniform, 240, [0.65, 0.75, 1.0]);
    check(SplitRule::Uniform, 260, [0.8, 0.8, 1.0]);
    check(SplitRule::Uniform, 225, [0.5, 0.75, 1.0]);
}

#[test]
fn what_hardly_needs_its_memory_gives_it_up() {
    let class = |slowdown| {
        let points = [Point { near: 0.5, slowdown }, Point { near: 1.0, slowdown: 1.0 }];
        let run_time = RunTime::Measured { seconds: 100.0, curve: Curve::through(&points).unwrap() };
        JobClass::new(1, 1000, 0.5, run_time).unwrap()
    };
    let classes = [class(1.01), class(3.0)];
    let jobs = [0, 1].map(|class| JobProgress { class, remaining: 0.5 });
    let mut shares = Vec::new();
    Splitter::new(SplitRule::Worth, &classes).split(&classes, &jobs, 1600, &mut shares).unwrap();
    assert!((shares[0] - 0.6).abs() < 1e-9 && shares[1] == 1.0, "{shares:?}");
}

/// What jobs take with these shares, by their memory and what is left of their work.
fn total_time(classes: &[JobClass], jobs: &[JobProgress], shares: &[f64]) -> f64 {
    let of = |(job, share): (&JobProgress, &f64)| {
        let class = &classes[job.class];
        job.remaining.max(0.05) * class.memory_bytes() as f64 * class.run_time().at(*share)
    };
    jobs.iter().zip(shares).map(of).sum()
}

#[test]
fn memory_time_is_close_to_the_exact_division_and_worth_is_where_it_pays() {
    let (mut paid, mut gaps) = (0, Vec::new());
    for seed in 0..120 {
        let mut random = fastrand::Rng::with_seed(seed);
        // Steps of one, two, … bytes.
        let classes: Vec<JobClass> = (1..=4).map(|bytes| random_class(&mut random, 100 * bytes, 0.5)).collect();
        let count = 2 + random.usize(..5);
        let jobs = random_jobs(&mut random, classes.len(), count);
        let asked: u64 = jobs.iter().map(|job| classes[job.class].memory_bytes()).sum();
        let memory = (asked as f64 * (0.55 + 0.4 * random.f64())) as u64;
        let exact = oracle::best_ratio(&classes, &jobs, memory as usize);
        let [(ours, shares), (_, worth)] = [SplitRule::MemoryTime, SplitRule::Worth].map(|rule| {
            let mut splitter = Splitter::new(rule, &classes);
            let mut shares = Vec::new();
            splitter.split(&classes, &jobs, memory, &mut shares).unwrap();
            (oracle::ratio(&classes, &jobs, &shares), shares)
        });
        if ours <= 0.0 {
            assert_eq!(shares, worth);
            paid += 1;
        } else {
            let [times, least] = [&shares, &worth].map(|shares| total_time(&classes, &jobs, shares));
            assert!(least <= times * 1.01, "{seed}: {least} and {times}");
        }
        // Where little is far, the ratio passes through 0.
        gaps.push((ours - exact) / exact.abs().max(0.05));
    }
    gaps.sort_by(f64::total_cmp);
    let at = |part: usize| gaps[(gaps.len() - 1) * part / 100];
    assert!((60..120).contains(&paid), "{paid} of 120 save near memory-time");
    assert!(at(50) < 0.005 && at(90) < 0.04 && at(100) < 0.5, "{} {} {}", at(50), at(90), at(100));
}
