//! `farfield sim`: simulates a cluster whose jobs share far memory, before anybody buys one.

mod replay;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use farfield_cluster::sim::{self, BUILT_IN, JobRecord, Policy, RunSummary, Scenario, Simulator, Spread, summarise};
use farfield_pager::runner::ByteSize;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Simulate a cluster of nodes that share far memory.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    command: SimCommand,
}

#[derive(Subcommand, Debug)]
enum SimCommand {
    /// Run a scenario under one or several policies
    Run(RunScenario),
    /// Replay a recorded trace of a cluster, of Alibaba or Bitbrains
    Replay(replay::ReplayTrace),
    /// Compare two results of `run --json`, figure by figure
    Compare(CompareResults),
    /// Print the scenarios that are part of the program
    List,
}

#[derive(Args, Debug)]
struct RunScenario {
    /// Scenario: a name of `farfield sim list`, or a file
    #[arg(value_name = "SCENARIO|FILE")]
    scenario: String,
    /// Policy: near, uniform:SHARE, variable, memory-time or worth; +long starts long jobs first. Give several
    /// to compare them with the first
    #[arg(long, value_name = "POLICY", default_values = ["near", "memory-time"])]
    policy: Vec<Policy>,
    /// Number of runs of each policy; each has a seed of its own
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    trials: u32,
    /// Seed of the first run; equal seeds give equal results
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object, for programs and for `farfield sim compare`
    #[arg(long)]
    json: bool,
    /// Write arrival, start and end of every job of the last policy's last run to a CSV file
    #[arg(long, value_name = "FILE")]
    jobs: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct CompareResults {
    /// Results to compare with
    before: PathBuf,
    /// Results that are compared; policies meet in their order
    after: PathBuf,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield sim list                                       What is part of the program
  farfield sim run rack                                   The rack of a paper, without far memory and with it
  farfield sim run rack --policy variable --policy memory-time --policy worth --trials 15
  farfield sim run my.toml --json > a.json                Your own nodes and jobs: docs/cli.md has the format
  farfield sim compare a.json b.json                      After a change of my.toml";

/// Result of `run --json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    /// Version of Farfield.
    version: String,
    /// Memory over cores that the jobs need, each as a part of what the nodes have.
    memory_to_cores: f64,
    /// Figures of each policy.
    policies: Vec<RunSummary>,
}

impl Results {
    pub(crate) fn new(scenario: &Scenario, policies: Vec<RunSummary>) -> Results {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Results { version, memory_to_cores: scenario.memory_to_cores(), policies }
    }
}

/// Difference of one figure between two results, as a part of the first.
#[derive(Debug, Serialize)]
struct FigureChange {
    policies: [String; 2],
    figure: &'static str,
    before: f64,
    after: f64,
    change: Option<f64>,
}

/// Does what the command line says.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    let text = match &args.command {
        SimCommand::Run(args) => simulate(args)?,
        SimCommand::Replay(args) => replay::replay(args)?,
        SimCommand::Compare(args) => compare(args)?,
        SimCommand::List => list(),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn list() -> String {
    let about = |text: &str| text.lines().next().unwrap_or_default().trim_start_matches("# ").to_owned();
    BUILT_IN.iter().map(|(name, text)| format!("{name:<10} {}\n", about(text))).collect()
}

/// Reads a scenario that is part of the program, or a file.
pub(crate) fn scenario(name: &str) -> Result<Scenario> {
    if let Some(scenario) = sim::built_in(name) {
        return Ok(scenario);
    }
    let path = Path::new(name);
    let is_name = path.extension().is_none() && !path.exists();
    ensure!(!is_name, "no scenario is called {name}; `farfield sim list` says which there are, or name a file");
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    sim::parse(&text, |file| read_beside(path, file)).with_context(|| name.to_owned())
}

/// Reads a file that a scenario names: its folder is that of the scenario.
pub(crate) fn read_beside(scenario: &Path, file: &str) -> Result<String, String> {
    let folder = scenario.parent().unwrap_or(Path::new(""));
    std::fs::read_to_string(folder.join(file)).map_err(|error| error.to_string())
}

fn simulate(args: &RunScenario) -> Result<String> {
    let scenario = scenario(&args.scenario)?;
    let mut policies = Vec::new();
    for (index, policy) in args.policy.iter().enumerate() {
        let name = policy.to_string();
        let mut simulator = Simulator::new(&scenario, *policy).with_context(|| args.scenario.clone())?;
        let progress = |done| progress(&format!("{name}: {done} of {} runs", args.trials));
        let names = (scenario.name.as_str(), name.as_str());
        let summary = summarise(&mut simulator, names, args.seed, args.trials as usize, progress);
        erase();
        policies.push(summary.with_context(|| args.scenario.clone())?);
        if let Some(path) = args.jobs.as_ref().filter(|_| index + 1 == args.policy.len()) {
            std::fs::write(path, jobs_csv(&scenario, simulator.records()))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    let results = Results::new(&scenario, policies);
    Ok(if args.json { serde_json::to_string(&results)? + "\n" } else { table(&scenario, &results) })
}

/// Renders the course of jobs as a table for other programs.
pub(crate) fn jobs_csv(scenario: &Scenario, jobs: &[JobRecord]) -> String {
    let mut text = "class,arrival_s,start_s,end_s,far_share_max\n".to_owned();
    for job in jobs {
        let name = &scenario.kinds[job.class].name;
        let _ = writeln!(text, "{name},{},{},{},{:.3}", job.arrival_s, job.start_s, job.end_s, job.far_max);
    }
    text
}

/// Renders results as a table.
pub(crate) fn table(scenario: &Scenario, results: &Results) -> String {
    let jobs = results.policies.first().map_or(0, |first| first.jobs);
    let mut text = format!(
        "{}: {jobs} jobs that need {:.2} times as much memory as cores, on {} nodes of {} cores and {}\n\
         memory servers, where far memory is used: {} of the nodes, {} in all\n\n",
        scenario.name,
        results.memory_to_cores,
        scenario.nodes,
        scenario.shape.cores,
        ByteSize(scenario.shape.memory_bytes),
        scenario.memory_servers,
        ByteSize(scenario.far_bytes),
    );
    let head =
        ["policy", "makespan s", "min", "max", "vs first", "turnaround s", "p99 s", "slowdown p50", "p99", "far peak"];
    let _ = writeln!(
        text,
        "{:<20} {:>10} {:>8} {:>8} {:>8} {:>12} {:>8} {:>12} {:>7} {:>9}",
        head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7], head[8], head[9]
    );
    for policy in &results.policies {
        let faster = results.policies[0].makespan_s.median / policy.makespan_s.median - 1.0;
        let _ = writeln!(
            text,
            "{:<20} {:>10.0} {:>8.0} {:>8.0} {:>8} {:>12.0} {:>8.0} {:>11.1}% {:>6.1}% {:>9}",
            policy.policy,
            policy.makespan_s.median,
            policy.makespan_s.min,
            policy.makespan_s.max,
            format!("{:+.1}%", faster * 100.0),
            policy.turnaround_mean_s.median,
            policy.turnaround_p99_s.median,
            percent(policy.slowdown_p50),
            percent(policy.slowdown_p99),
            ByteSize(policy.far_peak_bytes.median as u64).to_string(),
        );
    }
    let _ = match results.policies[0].trials {
        1 => writeln!(text, "\nvs first: how much sooner all is done."),
        trials => writeln!(text, "\nMedians of {trials} runs; vs first: how much sooner all is done."),
    };
    text
}

/// Returns the median in percent; what is nothing but rounding is 0.
fn percent(part: Spread) -> f64 {
    if part.median.abs() < 1e-9 { 0.0 } else { part.median * 100.0 }
}

fn compare(args: &CompareResults) -> Result<String> {
    let (before, after) = (read_results(&args.before)?, read_results(&args.after)?);
    let (old, new) = (before.policies.len(), after.policies.len());
    if old != new {
        bail!(
            "{} has {old} policies and {} has {new}; run both with the same",
            args.before.display(),
            args.after.display()
        );
    }
    let pairs = before.policies.iter().zip(&after.policies);
    let changes: Vec<FigureChange> = pairs.flat_map(|(before, after)| changes(before, after)).collect();
    if args.json {
        return Ok(serde_json::to_string(&changes)? + "\n");
    }
    let mut text = format!("{:<28} {:<18} {:>12} {:>12} {:>9}\n", "policy", "median of", "before", "after", "change");
    for FigureChange { policies: [before, after], figure, before: old, after: new, change } in &changes {
        let names = if before == after { before.clone() } else { format!("{before} → {after}") };
        let change = change.map_or("-".to_owned(), |change| format!("{:+.1}%", change * 100.0));
        let _ = writeln!(text, "{names:<28} {figure:<18} {old:>12.4} {new:>12.4} {change:>9}");
    }
    Ok(text)
}

fn changes(before: &RunSummary, after: &RunSummary) -> Vec<FigureChange> {
    type Figure = (&'static str, fn(&RunSummary) -> &Spread);
    let figures: [Figure; 5] = [
        ("makespan_s", |summary| &summary.makespan_s),
        ("turnaround_mean_s", |summary| &summary.turnaround_mean_s),
        ("turnaround_p99_s", |summary| &summary.turnaround_p99_s),
        ("slowdown_p50", |summary| &summary.slowdown_p50),
        ("slowdown_p99", |summary| &summary.slowdown_p99),
    ];
    let change = |(figure, of): Figure| {
        let (old, new) = (of(before).median, of(after).median);
        let policies = [before.policy.clone(), after.policy.clone()];
        FigureChange { policies, figure, before: old, after: new, change: (old != 0.0).then(|| new / old - 1.0) }
    };
    figures.map(change).into()
}

fn read_results(path: &Path) -> Result<Results> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read {} (`farfield sim run --json` prints results)", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not a result of `farfield sim run --json`", path.display()))
}

/// Writes a progress line, if somebody looks.
pub(crate) fn progress(text: &str) {
    if std::io::stderr().is_terminal() {
        let _ = write!(std::io::stderr(), "\r{text:<60}");
    }
}

/// Erases the progress line.
pub(crate) fn erase() {
    if std::io::stderr().is_terminal() {
        let _ = write!(std::io::stderr(), "\r{:<60}\r", "");
    }
}
