//! Decisions of the gate of a large cluster, the division of a node among many jobs, and how far a division is from the exact
//! one. The measured phase is that of the gate. Nothing is read from a scheduler.

/// The oracle of the tests of `farfield-core`.
#[path = "../../../crates/core/src/policy/cluster/split/oracle.rs"]
mod oracle;

use crate::Options;
use crate::measure::Outcome;
use crate::random::{Random, mix};
use anyhow::{Context, Result, bail, ensure};
use farfield_core::policy::cluster::job::STEPS;
use farfield_core::policy::cluster::{
    GateDecision, GateJob, GateNode, GatePhase, GateRules, JobClass, JobProgress, NodeShape, PoolServers, RunTime,
    SplitRule, Splitter, decide,
};
use farfield_core::policy::curve::{Curve, Point};
use std::time::Instant;
use std::vec::Vec;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const NODE: NodeShape = NodeShape { cores: 48, reclaim_cores: 0, memory_bytes: 192 * GIB };
/// Far memory for each byte near, in hundredths.
const FAR_PERCENT: u64 = 25;
/// Rounds, with other jobs each.
const ROUNDS: u64 = 15;
const SPLIT_JOBS: usize = 64;
/// Small nodes that are divided exactly.
const EXACT: u64 = 300;

/// The cluster that a gate decides about.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DecideOptions {
    /// Nodes of the cluster.
    #[arg(long, default_value_t = 1000)]
    gate_nodes: usize,
    /// Jobs that wait: all `alike`, or all `different`.
    #[arg(long, default_value = "different")]
    queue: String,
    /// Nodes before the decision: `empty`, `full` of jobs that run, or `thinned`, where a tenth of these has ended.
    #[arg(long, default_value = "full")]
    books: String,
}

/// Runs so many rounds of a gate, and divides nodes.
pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let checksum = gate(options, &mut outcome)?;
    let checksum = checksum ^ split(options.seed, &mut outcome)?;
    gaps(options.seed, &mut outcome)?;
    outcome.checked(checksum, 0);
    Ok(outcome)
}

/// A job as people ask for them: 1 to 16 cores, 1 to 64 GiB, a third of it or more near.
fn random_job(random: &mut Random) -> Result<GateJob> {
    let memory = (1 + random.below(64)) * GIB - random.below(512) * MIB;
    let least = memory / 100 * (33 + random.below(68));
    let class = GateJob::class(1 << random.below(5), memory, least)?;
    Ok(GateJob { class, phase: GatePhase::Waiting, waited_s: random.below(3000) })
}

fn gate(options: &Options, outcome: &mut Outcome) -> Result<u64> {
    let (count, gate) = (usize::try_from(options.ops)?, &options.decide);
    ensure!(count > 0 && gate.gate_nodes > 0, "a gate needs nodes and jobs");
    let nodes = vec![GateNode { shape: NODE, foreign_cores: 0, foreign_bytes: 0, is_up: true }; gate.gate_nodes];
    let pool_bytes = NODE.memory_bytes * gate.gate_nodes as u64 / 100 * FAR_PERCENT;
    let rules = GateRules {
        pool_bytes: Some(pool_bytes),
        servers: PoolServers::UNKNOWN,
        start_within_s: 30,
        overtake_within_s: 3600,
    };
    let (mut checksum, mut round_ms, mut admitted) = (0, Vec::new(), 0);
    for round in 0..ROUNDS {
        let mut random = Random::new(options.seed + round);
        let mut jobs = running_jobs(&gate.books, &nodes, rules, &mut random)?;
        let waiting = match gate.queue.as_str() {
            "alike" => vec![random_job(&mut random)?; count],
            "different" => (0..count).map(|_| random_job(&mut random)).collect::<Result<_>>()?,
            other => bail!("no queue is called {other}; write alike or different"),
        };
        jobs.extend(waiting);
        let started = Instant::now();
        let decisions = outcome.phase("decide", options.ops, || decide(&nodes, &jobs, rules));
        round_ms.push(started.elapsed().as_secs_f64() * 1e3);
        for decision in decisions {
            let (kind, job, node) = match decision {
                GateDecision::Charge { job, .. } => (1, job, 0),
                GateDecision::Withdraw { job } => (2, job, 0),
                GateDecision::Admit { job, node, .. } => (3, job, node),
                GateDecision::Wait { job, .. } => (4, job, 0),
            };
            admitted += u64::from(kind == 3);
            checksum = mix(checksum ^ (kind << 60) ^ (job as u64) << 20 ^ node as u64);
        }
    }
    round_ms.sort_by(f64::total_cmp);
    outcome.figure("gate_ms", round_ms[round_ms.len() / 2]);
    outcome.figure("gate_ms_max", round_ms[round_ms.len() - 1]);
    outcome.figure("admitted_share", admitted as f64 / (ROUNDS * options.ops) as f64);
    Ok(checksum)
}

/// Jobs that run: as many as the gate admits, or nine of ten of these.
fn running_jobs(books: &str, nodes: &[GateNode], rules: GateRules, random: &mut Random) -> Result<Vec<GateJob>> {
    let kept_percent = match books {
        "empty" => return Ok(Vec::new()),
        "full" => 100,
        "thinned" => 90,
        other => bail!("no books are called {other}; write empty, full or thinned"),
    };
    let jobs = (0..nodes.len() * 24).map(|_| random_job(random)).collect::<Result<Vec<_>>>()?;
    let admitted = decide(nodes, &jobs, rules).into_iter().filter_map(|decision| match decision {
        GateDecision::Admit { job, node, far_bytes } => Some((job, GatePhase::Running { node, far_bytes })),
        _ => None,
    });
    let kept = admitted.filter(|_| random.below(100) < kept_percent);
    Ok(kept.map(|(job, phase)| GateJob { phase, ..jobs[job].clone() }).collect())
}

/// A class of jobs whose slowdown rises in random steps towards its least share.
fn random_class(random: &mut Random, memory_bytes: u64, least: f64) -> Result<JobClass> {
    let unit = |random: &mut Random| random.below(1 << 30) as f64 / f64::from(1 << 30);
    let mut slowdown = 1.0;
    let mut points = Vec::new();
    for step in 0..=6 {
        slowdown += if step == 0 { 0.0 } else { unit(random) * unit(random) * 0.4 };
        points.push(Point { near: 1.0 - (1.0 - least) * f64::from(step) / 6.0, slowdown });
    }
    let seconds = 10.0 + 1000.0 * unit(random);
    let curve = Curve::through(&points).context("a curve through falling points")?;
    Ok(JobClass::new(1, memory_bytes, least, RunTime::Measured { seconds, curve })?)
}

/// Jobs of these classes, and how much of their memory is near.
fn random_node(random: &mut Random, classes: &[JobClass], count: usize) -> (Vec<JobProgress>, u64) {
    let jobs: Vec<JobProgress> = (0..count)
        .map(|_| JobProgress {
            class: random.below(classes.len() as u64) as usize,
            remaining: random.below(1000) as f64 / 1e3,
        })
        .collect();
    let asked: u64 = jobs.iter().map(|job| classes[job.class].memory_bytes()).sum();
    (jobs, (asked as f64 * (0.55 + random.below(400) as f64 / 1e3)) as u64)
}

/// Divides a node among many jobs, each of a class of its own, as an agent does that has learned their curves.
fn split(seed: u64, outcome: &mut Outcome) -> Result<u64> {
    let (mut checksum, mut times_ms) = (0u64, Vec::new());
    for round in 0..ROUNDS * 10 {
        let mut random = Random::new(seed ^ (round << 32));
        let classes = (0..SPLIT_JOBS)
            .map(|_| {
                let memory = (1 + random.below(64)) * GIB;
                random_class(&mut random, memory, 0.5)
            })
            .collect::<Result<Vec<_>>>()?;
        let (jobs, memory) = random_node(&mut random, &classes, SPLIT_JOBS);
        let mut shares = Vec::new();
        let started = Instant::now();
        Splitter::new(SplitRule::Worth, &classes).split(&classes, &jobs, memory, &mut shares)?;
        times_ms.push(started.elapsed().as_secs_f64() * 1e3);
        checksum = shares.iter().fold(checksum, |sum, share| mix(sum ^ share.to_bits()));
    }
    times_ms.sort_by(f64::total_cmp);
    outcome.figure("split_ms", times_ms[times_ms.len() / 2]);
    outcome.figure("split_ms_max", times_ms[times_ms.len() - 1]);
    Ok(checksum)
}

/// Compares divisions of small nodes with the exact ones.
fn gaps(seed: u64, outcome: &mut Outcome) -> Result<()> {
    let mut gaps = Vec::new();
    for instance in 0..EXACT {
        let mut random = Random::new(seed ^ (instance << 40));
        // Steps of one, two, … bytes.
        let classes =
            (1..=4).map(|bytes| random_class(&mut random, 100 * bytes, 0.5)).collect::<Result<Vec<JobClass>>>()?;
        let count = 2 + random.below(5) as usize;
        let (jobs, memory) = random_node(&mut random, &classes, count);
        let mut shares = Vec::new();
        Splitter::new(SplitRule::MemoryTime, &classes).split(&classes, &jobs, memory, &mut shares)?;
        let (ours, exact) =
            (oracle::ratio(&classes, &jobs, &shares), oracle::best_ratio(&classes, &jobs, memory as usize));
        // Where little is far, the ratio passes through 0.
        gaps.push((ours - exact) / exact.abs().max(0.05));
    }
    gaps.sort_by(f64::total_cmp);
    let at = |percent: usize| gaps[(gaps.len() - 1) * percent / 100];
    outcome.figure("objective_gap", at(50));
    outcome.figure("objective_gap_p90", at(90));
    outcome.figure("objective_gap_max", at(100));
    Ok(())
}
