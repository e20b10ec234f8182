//! `farfield sim replay`: a recorded trace of a cluster, with far memory that it did not have.

use super::{erase, percent, progress};
use crate::size::Size;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use farfield_cluster::sim::replay::{
    Accounting, ClusterTrace, PolicyReport, ProfileDraw, ReplayConfig, ReplayReport, TraceFormat,
};
use farfield_cluster::sim::{Policy, Spread};
use farfield_pager::runner::ByteSize;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Replay a recorded trace of a cluster: what far memory would have gained.
///
/// A trace has no slowdowns, so each job gets a measured profile by a draw that the seed repeats.
/// The result names this and all other assumptions.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ReplayTrace {
    /// Trace: a table, a folder of tables or an archive (tar), which may be packed by zstd or gzip
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Format: alibaba or bitbrains [default: that of the first header]
    #[arg(long, value_name = "FORMAT")]
    format: Option<TraceFormat>,
    /// Table of other containers whose use of memory over time stands for that of the jobs, where the
    /// trace has none
    #[arg(long, value_name = "FILE")]
    usage: Option<PathBuf>,
    /// Accounting of memory [default: both, where the use over time is known]
    #[arg(long, value_enum)]
    account: Option<AccountingArg>,
    /// Profiles that jobs get, each one drawn evenly: all, or names with commas between them
    #[arg(long, value_name = "NAMES", default_value = "all")]
    profiles: ProfileDraw,
    /// Policy, as of `sim run`; no far memory is always run, and gains are over it
    #[arg(long, value_name = "POLICY", default_values = ["memory-time", "worth"])]
    policy: Vec<Policy>,
    /// Cores of a node
    #[arg(long, value_name = "N", default_value_t = 96)]
    cores: u32,
    /// Near memory of a node [default: as much as makes --memory-to-cores true]
    #[arg(long, value_name = "SIZE", conflicts_with = "memory_to_cores")]
    near: Option<Size>,
    /// Memory over cores that jobs ask for, each as a part of what nodes have: above 1, memory is scarce
    #[arg(long, value_name = "RATIO", default_value_t = 1.6)]
    memory_to_cores: f64,
    /// Number of nodes [default: as many as have a tenth more cores than jobs had at their peak]
    #[arg(long, value_name = "N")]
    nodes: Option<u32>,
    /// Far memory of all nodes together, beside their near memory [default: a quarter of that]
    #[arg(long, value_name = "SIZE")]
    far: Option<Size>,
    /// Number of runs of each policy; each has a seed of its own
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    trials: u32,
    /// Seed of the first run; equal seeds give equal results
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield sim replay openb_pod_list_default.csv.zst      Pods of Alibaba, by what they asked for
  farfield sim replay openb_pod_list_default.csv.zst --usage pod_memory_util_anon.tar.gz
                                                          Also by what other containers used over time
  farfield sim replay bitbrains/                          Virtual machines: a folder of tables, or a tar of them
  farfield sim replay bitbrains/ --near 192G --nodes 20 --far 1T --policy worth --json
  farfield sim replay bitbrains/ --profiles kmeans,spark  If all were as sensitive as these two";

/// Accounting of memory on the command line.
#[derive(Clone, Copy, ValueEnum, Debug)]
enum AccountingArg {
    /// A job counts with what it asked for
    Peak,
    /// A job is placed by what it asked for, and counts with what it uses
    Use,
    /// Both, one after the other
    Both,
}

/// Result of `--json`.
#[derive(Debug, Serialize)]
struct ReplayResults<'a> {
    version: &'static str,
    #[serde(flatten)]
    report: &'a ReplayReport,
}

/// Replays a trace, and returns what is to be printed.
pub(super) fn replay(args: &ReplayTrace) -> Result<String> {
    let bytes = |size: Option<Size>, name: &str| match size {
        Some(Size::Percent(_)) => bail!("{name} is a size like 192G, not a part of this machine"),
        Some(size @ Size::Bytes(_)) => Ok(Some(size.bytes(0))),
        None => Ok(None),
    };
    let config = ReplayConfig {
        cores: args.cores,
        near_bytes: bytes(args.near, "--near")?,
        memory_to_cores: args.memory_to_cores,
        nodes: args.nodes,
        far_bytes: bytes(args.far, "--far")?,
        profiles: args.profiles.clone(),
    };
    let mut on_lines = |lines| progress(&format!("reading: {lines} lines"));
    let mut trace = ClusterTrace::read(&args.trace, args.format, &mut on_lines)?;
    if let Some(usage) = &args.usage {
        trace.read_containers(usage, &mut on_lines)?;
    }
    let accountings: &[Accounting] = match args.account {
        Some(AccountingArg::Peak) => &[Accounting::Peak],
        Some(AccountingArg::Use) => &[Accounting::Use],
        Some(AccountingArg::Both) => &[Accounting::Peak, Accounting::Use],
        None if trace.has_usage() => &[Accounting::Peak, Accounting::Use],
        None => &[Accounting::Peak],
    };
    let trials = (args.seed, args.trials as usize);
    let report = trace.replay(&config, &args.policy, accountings, trials, &mut |run| progress(run));
    erase();
    let report = report?;
    if args.json {
        let results = ReplayResults { version: env!("CARGO_PKG_VERSION"), report: &report };
        return Ok(serde_json::to_string(&results)? + "\n");
    }
    Ok(table(&report))
}

fn table(report: &ReplayReport) -> String {
    let ReplayReport { trace, cluster, .. } = report;
    let mut text = format!(
        "{} ({}): {} jobs over {:.1} days, from {} lines\n",
        trace.name,
        trace.format,
        trace.jobs,
        trace.span_s / 86_400.0,
        trace.lines
    );
    let skipped = [
        (trace.skipped.never_ran, "never ran"),
        (trace.skipped.without_cores, "without cores"),
        (trace.skipped.without_memory, "without memory"),
        (trace.skipped.larger_than_a_node, "larger than a node"),
    ];
    let skipped: Vec<String> =
        skipped.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}")).collect();
    if trace.skipped_samples > 0 {
        let _ = writeln!(text, "left out: {} samples of containers that are not from 0 to 1", trace.skipped_samples);
    }
    if !skipped.is_empty() {
        let _ = writeln!(text, "left out: {}", skipped.join(", "));
    }
    let _ = writeln!(
        text,
        "on {} nodes of {} cores and {}, with {} far; jobs ask for {:.2} times as much memory as cores",
        cluster.nodes,
        cluster.cores,
        ByteSize(cluster.near_bytes),
        ByteSize(cluster.far_bytes),
        cluster.memory_to_cores
    );
    if let Some(share) = trace.used_share {
        let _ = writeln!(text, "of the memory that they ask for, over time, they use {:.1} %", share * 100.0);
    }
    let _ = writeln!(
        text,
        "\n{:<6} {:<16} {:>11} {:>8} {:>8} {:>12} {:>8} {:>8} {:>9} {:>9} {:>9}",
        "by",
        "policy",
        "makespan h",
        "gain",
        "over req",
        "turnaround h",
        "gain",
        "over req",
        "slow p50",
        "p99",
        "evictions"
    );
    for accounting in &report.accountings {
        for policy in &accounting.policies {
            text += &row(accounting.accounting.name(), policy);
        }
    }
    let _ = writeln!(
        text,
        "\nMedians of {} runs. gain: over no far memory by the same accounting; over req: by peak.\n",
        report.trials
    );
    for assumption in &report.assumptions {
        let _ = writeln!(text, "assumed: {assumption}");
    }
    text
}

fn row(accounting: &str, policy: &PolicyReport) -> String {
    let hours = |seconds: Spread| seconds.median / 3600.0;
    let gain = |gain: Spread| format!("{:+.1}%", percent(gain));
    format!(
        "{accounting:<6} {:<16} {:>11.1} {:>8} {:>8} {:>12.2} {:>8} {:>8} {:>8.1}% {:>8.1}% {:>9.0}\n",
        policy.runs.policy,
        hours(policy.runs.makespan_s),
        gain(policy.gain.makespan),
        gain(policy.gain_over_requests.makespan),
        hours(policy.runs.turnaround_mean_s),
        gain(policy.gain.turnaround),
        gain(policy.gain_over_requests.turnaround),
        percent(policy.runs.slowdown_p50),
        percent(policy.runs.slowdown_p99),
        policy.evictions.median
    )
}
