//! Applications that share memory on many nodes, in virtual time (DRust, OSDI 2024, Figure 5.4).
//!
//! The applications run here, for so many nodes, over a recorder of what they do with shared memory. The trace is replayed under
//! a way to keep objects coherent, on three networks. What a message, a byte, a lock and a task cost here is measured before.
//! The time of a run is that of the paper's network; the same trace for one node, where nothing costs anything, is what it
//! is compared with. For a run on this machine it is foretold what it takes (`sim:here`).

#[path = "../apps/mod.rs"]
#[expect(
    clippy::duplicate_mod,
    reason = "the applications are compiled once more, with the recorder as their shared memory"
)]
mod apps;
mod calibrate;
mod coherence;
mod directory;
mod engine;
mod recorder;
#[cfg(test)]
mod tests;
mod trace;

use crate::{Options, Outcome, Workload};
use anyhow::{Context, Result, bail, ensure};
use coherence::{Coherence, Delegation, Ownership};
use directory::Directory;
use engine::{Network, Replay, ReplayReport};
use farfield_bench::workload::Output;
/// Shared memory of the applications in this module.
use recorder as dsm;
use std::process::{Command, Stdio};
use trace::Trace;

/// Peers of this form are simulated.
const SIMULATED: &str = "sim:";
/// Name of the peer that foretells what a run on this machine takes.
const HERE: &str = "here";
/// Network of the paper: 40 Gb/s, and 3.6 µs for a read of 512 bytes.
const PAPER: NetworkForm = NetworkForm { round_trip_ns: 3_600, bytes_per_us: 5_000 };
/// Time of a processor for a message there.
const PAPER_HANDLE_NS: u64 = 500;
/// Network of a cloud: 25 Gb/s and 50 µs.
const CLOUD: NetworkForm = NetworkForm { round_trip_ns: 50_000, bytes_per_us: 3_125 };
/// Ways that owners are compared with on one and the same trace: what its work takes differs from recording to recording.
const OTHERS: [(CoherenceName, &str); 2] =
    [(CoherenceName::Directory, "over_directory"), (CoherenceName::Delegation, "over_delegation")];
/// Requests, processes and clients of the services that pass values.
const BY_VALUE: [(&str, u64); 3] = [("--ops", 1200), ("--nodes", 3), ("--threads", 6)];

/// Form of a network that is not here.
struct NetworkForm {
    round_trip_ns: u64,
    bytes_per_us: u64,
}

impl NetworkForm {
    fn network(self, handle_ns: u64, here: Network) -> Network {
        let NetworkForm { round_trip_ns, bytes_per_us } = self;
        let one_way_ns = round_trip_ns.saturating_sub(2 * handle_ns) / 2;
        Network { one_way_ns, bytes_per_us, handle_ns, takes_processors: false, ..here }
    }
}

/// Way to keep objects coherent, by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CoherenceName {
    Ownership,
    Directory,
    /// The same, where a message asks for all blocks of an access.
    DirectoryOfMany,
    Delegation,
}

impl CoherenceName {
    fn of(name: &str) -> Result<CoherenceName> {
        Ok(match name {
            "ownership" => CoherenceName::Ownership,
            "directory" => CoherenceName::Directory,
            "directory-of-many" => CoherenceName::DirectoryOfMany,
            "delegation" => CoherenceName::Delegation,
            _ => bail!("no way is called {name}: write ownership, directory, directory-of-many, delegation or {HERE}"),
        })
    }

    fn replay(self, trace: &Trace, network: Network, processors: usize) -> ReplayReport {
        fn run(trace: &Trace, coherence: impl Coherence, network: Network, processors: usize) -> ReplayReport {
            Replay::new(trace, coherence, network, processors).run()
        }
        match self {
            CoherenceName::Ownership => run(trace, Ownership::new(trace), network, processors),
            CoherenceName::Directory => run(trace, Directory::new(trace, false), network, processors),
            CoherenceName::DirectoryOfMany => run(trace, Directory::new(trace, true), network, processors),
            CoherenceName::Delegation => run(trace, Delegation::new(trace), network, processors),
        }
    }
}

/// Runs an application in virtual time, if that is asked for.
pub(crate) fn run(options: &Options) -> Option<Result<Outcome>> {
    let name = options.peer.as_deref()?.strip_prefix(SIMULATED)?;
    Some(match name {
        HERE => foretell(options),
        name => CoherenceName::of(name).and_then(|name| simulate(options, name)),
    })
}

/// Records an application on so many nodes. Returns the trace, what the application has found, and the name of what it does.
fn record(options: &Options, nodes: u64) -> Result<(Trace, Outcome, &'static str)> {
    ensure!((1..=u64::from(recorder::NODES_MAX)).contains(&nodes), "--nodes must be 1 to {}", recorder::NODES_MAX);
    let options = Options { peer: Some("share:".to_owned()), nodes, ..options.clone() };
    let (outcome, phase) = match options.workload {
        Workload::ShareGemm => (apps::gemm::run(&options)?, "multiply"),
        Workload::ShareFrame => (apps::frame::run(&options)?, "ask"),
        Workload::ShareTaxi => (apps::taxi::run(&options)?, "ask"),
        Workload::ShareSocial => (apps::social::run(&options)?, "serve"),
        Workload::ShareKv => (apps::kv::run(&options)?, "serve"),
        other => bail!("{other:?} is not simulated"),
    };
    Ok((recorder::take(), outcome, phase))
}

/// Returns the time of a request to the social network on one node whose services pass values, if its processors are those of
/// this machine. What is in the caller's process is called as a function.
fn by_value_ns(options: &Options, processors: usize) -> Result<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["share-social", "--peer", "rpc:", "--data-mib", &options.data_mib.to_string()]);
    command.args(["--seed", &options.seed.to_string(), "--real", &options.real.to_string()]);
    command.args(BY_VALUE.map(|(name, value)| [name.to_owned(), value.to_string()]).as_flattened());
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the services that pass values fail");
    let output = Output::parse(&String::from_utf8(output.stdout)?)?;
    let ns = output.phase("serve")?.ns_per_op();
    let here = std::thread::available_parallelism().context("how many processors are there?")?;
    Ok(ns * here.get() as f64 / processors as f64)
}

/// Makes a replay the result of a phase: its time and its counts.
fn put(outcome: &mut Outcome, phase: &str, report: ReplayReport) {
    outcome.retime(phase, report.elapsed_ns);
    let ops = outcome.ops(phase).max(1) as f64;
    outcome.figure("messages", report.messages as f64);
    outcome.figure("messages_per_op", report.messages as f64 / ops);
    outcome.figure("bytes_per_op", report.bytes as f64 / ops);
    outcome.figure("moves_per_op", report.moves as f64 / ops);
}

/// Foretells a run of owners on this machine, whose nodes have processors of their own.
fn foretell(options: &Options) -> Result<Outcome> {
    ensure!(options.processors > 0, "a node needs --processors");
    let here = calibrate::calibrate()?;
    let (trace, mut outcome, phase) = record(options, options.nodes)?;
    let report = CoherenceName::Ownership.replay(&trace, here, options.processors as usize);
    put(&mut outcome, phase, report);
    outcome.figure("work_s", trace.work_ns() as f64 / 1e9);
    figures_of_network(&mut outcome, here);
    Ok(outcome)
}

fn figures_of_network(outcome: &mut Outcome, here: Network) {
    outcome.figure("one_way_here_us", here.one_way_ns as f64 / 1e3);
    outcome.figure("handle_here_us", here.handle_ns as f64 / 1e3);
    outcome.figure("here_mib_per_s", here.bytes_per_us as f64 * 1e6 / f64::from(1 << 20));
    outcome.figure("lock_here_ns", here.lock_ns as f64);
    outcome.figure("task_here_us", here.task_ns as f64 / 1e3);
}

fn simulate(options: &Options, name: CoherenceName) -> Result<Outcome> {
    ensure!(options.processors > 0, "a node needs --processors");
    let here = calibrate::calibrate()?;
    let processors = options.processors as usize;
    let free =
        Network { one_way_ns: 0, bytes_per_us: 1, handle_ns: 0, lock_ns: 0, task_ns: 0, takes_processors: false };
    let (one_trace, _, _) = record(options, 1)?;
    let one = CoherenceName::Ownership.replay(&one_trace, free, processors);
    drop(one_trace);
    let (trace, mut outcome, phase) = record(options, options.nodes)?;
    let paper = PAPER.network(PAPER_HANDLE_NS, here);
    let networks = [("", paper), ("_cloud", CLOUD.network(here.handle_ns, here)), ("_here", here)];
    for (suffix, network) in networks {
        let report = name.replay(&trace, network, processors);
        if suffix.is_empty() {
            put(&mut outcome, phase, report);
            for (other, figure) in OTHERS.into_iter().filter(|_| name == CoherenceName::Ownership) {
                let other = other.replay(&trace, network, processors);
                outcome.figure(figure, report.elapsed_ns as f64 / other.elapsed_ns.max(1) as f64);
            }
        }
        let over_one = report.elapsed_ns as f64 / one.elapsed_ns.max(1) as f64;
        outcome.figure(&format!("over_one_node{suffix}"), over_one);
    }
    if options.workload == Workload::ShareSocial {
        let one_node_ns = by_value_ns(options, processors)? * outcome.ops(phase) as f64;
        let elapsed_ns = outcome.seconds(phase) * 1e9;
        outcome.figure("over_by_value", elapsed_ns / one_node_ns);
    }
    outcome.figure("work_s", trace.work_ns() as f64 / 1e9);
    outcome.figure("one_node_s", one.elapsed_ns as f64 / 1e9);
    figures_of_network(&mut outcome, here);
    Ok(outcome)
}
