//! `farfield gate replay`: the gate on a simulated cluster, before it decides on a real one.

use super::GatePatience;
use crate::sim::{self, Results};
use anyhow::{Context, ensure};
use clap::Args;
use farfield_cluster::gate::replay::{GatedCluster, ReplayCounts};
use farfield_cluster::sim::{Policy, RunSummary, Simulator, summarise};
use farfield_pager::runner::ByteSize;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

/// Try the gate on a simulated cluster, whose jobs arrive as they were recorded or drawn.
///
/// Jobs of a scenario of `farfield sim` wait for the gate that decides for Slurm. Beside it are runs
/// without far memory, and runs of a scheduler that knows all and starts jobs at once.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ReplayArgs {
    /// Scenario: a name of `farfield sim list`, or a file, which may name recorded arrivals
    #[arg(value_name = "SCENARIO|FILE")]
    scenario: String,
    /// Policy by which agents divide near memory: uniform:SHARE, variable, memory-time or worth
    #[arg(long, value_name = "POLICY", default_value = "memory-time")]
    policy: Policy,
    #[command(flatten)]
    patience: GatePatience,
    /// Seed of the arrivals; equal seeds give equal results
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
    /// Write arrival, start and end of every job to a CSV file
    #[arg(long, value_name = "FILE")]
    jobs: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  farfield gate replay open                          A rack where jobs keep arriving
  farfield gate replay my.toml --overtake 10m        Your own cluster and arrivals: docs/cli.md has the format
  farfield gate replay my.toml --every 10s --json    Would it do to look every ten seconds?";

/// Result of `--json`.
#[derive(Serialize)]
struct GateReplayResults {
    #[serde(flatten)]
    results: Results,
    /// Decisions of the gate.
    gate: ReplayCounts,
}

/// Replays a scenario, and prints what became of its jobs.
pub(super) fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let every = args.patience.every;
    let is_whole = every.as_secs() > 0 && every.subsec_nanos() == 0;
    ensure!(is_whole, "--every is at least 1s, and whole seconds: arrivals are replayed by the second");
    ensure!(args.policy.uses_far(), "--policy near has no far memory, and no use for a gate");
    let scenario = sim::scenario(&args.scenario)?;
    let config = args.patience.config(false);
    let mut policies = Vec::new();
    for policy in [Policy::NEAR, args.policy] {
        let mut simulator = Simulator::new(&scenario, policy).with_context(|| args.scenario.clone())?;
        let name = policy.to_string();
        policies.push(summarise(&mut simulator, (&scenario.name, &name), args.seed, 1, |_| ())?);
    }
    let mut cluster = GatedCluster::new(&scenario, args.policy, args.seed)?;
    let jobs = cluster.records().len();
    let progress = |arrived| sim::progress(&format!("gate: {arrived} of {jobs} jobs have arrived"));
    let replayed = config.replay(&mut cluster, every.as_secs(), progress);
    sim::erase();
    let gate = replayed?;
    let name = format!("gate, {}", args.policy);
    policies.push(RunSummary::of(&[cluster.figures()], (&scenario.name, &name), args.seed, jobs));
    if let Some(path) = &args.jobs {
        std::fs::write(path, sim::jobs_csv(&scenario, cluster.records()))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let results = Results::new(&scenario, policies);
    let text = if args.json {
        serde_json::to_string(&GateReplayResults { results, gate })? + "\n"
    } else {
        let mut text = sim::table(&scenario, &results);
        let ReplayCounts { rounds, admitted, charged, withdrawn, refused, charged_peak_bytes } = gate;
        let _ = writeln!(
            text,
            "Gate: {rounds} rounds, {admitted} admissions, {charged} other charges, {withdrawn} withdrawals, \
             {refused} refusals; jobs were charged for {} of the pool at most.",
            ByteSize(charged_peak_bytes),
        );
        text
    };
    // The write fails if stdout was closed.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}
