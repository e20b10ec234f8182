//! `farfield agent`: divides this node's near memory among the jobs that run on it.

mod daemon;
mod metrics;
mod servers;

use crate::address::address;
use crate::size::Size;
use anyhow::Context;
use clap::{Args, ValueEnum};
use farfield_cluster::agent::NodeConfig;
use farfield_core::policy::cluster::SplitRule;
use farfield_pager::runner::{self, AgentStatus, ByteSize, agent_socket, machine, pool_builder};
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Divide this node's near memory among jobs that `farfield run --agent` starts.
///
/// A job says how much memory it needs and how little of it may be near. The agent starts it when
/// there is room: it shrinks other jobs first, and gives memory back to them when one ends. If the
/// agent ends, jobs keep what they have; when it is started again, it finds them.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AgentArgs {
    /// Near memory for all jobs together: 24G, or 75% of this machine's (or container's). For some seconds
    /// after its budget has moved, a job can have 2 % and 16M beside it, so leave some free
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, required_unless_present = "status")]
    near: Option<Size>,
    /// Pool for the far memory of all jobs, as `farfield run --far` takes it. Several URLs share the
    /// load [default: each job has a private server on this machine]
    #[arg(long, value_name = "URL")]
    pool: Vec<String>,
    /// Most far memory of all jobs together: what they ask for beyond --near [default: no limit]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    far: Option<Size>,
    /// How near memory is divided when not all fits
    #[arg(long, value_enum, default_value = "variable")]
    policy: PolicyArg,
    /// Socket where jobs ask [default: /run/farfield/agent.sock for root, else one of this user]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Answer Prometheus at http://ADDR:PORT/metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    metrics: Option<SocketAddr>,
    /// Show what the agent that runs here does, and end
    #[arg(long, conflicts_with_all = ["near", "pool", "far", "policy", "token_file", "metrics"])]
    status: bool,
    /// With --status: one JSON object, for programs
    #[arg(long, requires = "status")]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield agent --near 24G                               24 GiB for the jobs of this user; for root, of all users
  farfield agent --near 24G --pool tcp://big:7400 --far 64G --policy worth
  farfield run --agent --mem 8G --least 4G -- ./train     A job: between 4 and 8 GiB near
  farfield run --agent --profile train.json -- ./train    The profile says how much, and how little
  farfield agent --status                                 Who has how much, and who waits why
  farfield agent --status --json | jq .jobs[].offered_bytes

When it is ready it prints one line of JSON to stdout.";

/// Rule by which near memory is divided.
#[derive(Clone, Copy, ValueEnum, Debug)]
enum PolicyArg {
    /// All have the same share of their memory, as far as their least allows
    Uniform,
    /// All give up the same part of what they can spare
    Variable,
    /// Those give up most that lose least by it; for jobs with profiles
    Worth,
}

impl PolicyArg {
    fn rule(self) -> SplitRule {
        match self {
            PolicyArg::Uniform => SplitRule::Uniform,
            PolicyArg::Variable => SplitRule::Variable,
            PolicyArg::Worth => SplitRule::Worth,
        }
    }
}

/// Runs the agent until it is told to stop, or shows the state of one that runs.
pub(crate) fn run(args: AgentArgs) -> anyhow::Result<()> {
    let socket = std::path::absolute(args.socket.unwrap_or_else(agent_socket)).context("--socket")?;
    if args.status {
        let status = runner::read_status(&socket)?;
        let text = if args.json { serde_json::to_string(&status)? + "\n" } else { render(&status) };
        // The write fails if stdout was closed.
        let _ = std::io::stdout().write_all(text.as_bytes());
        return Ok(());
    }
    let machine_bytes = machine::memory_bytes();
    let near = args.near.context("--near SIZE is missing")?;
    let near_bytes = near.bytes(machine_bytes);
    anyhow::ensure!(
        (machine::NEAR_BYTES_MIN..=machine_bytes).contains(&near_bytes),
        "--near {} must be at least 16M and at most this machine's (or container's) memory, {}",
        ByteSize(near_bytes),
        ByteSize(machine_bytes)
    );
    let token = crate::token::read(args.token_file.as_deref())?;
    if !args.pool.is_empty() {
        let opened = pool_builder(&args.pool, &token)?.inside_a_program().pages(args.pool.len() as u64).open();
        opened.context("--pool")?;
    }
    let far_bytes = args.far.map(|far| far.bytes(machine_bytes));
    daemon::run(daemon::DaemonOptions {
        node: NodeConfig { near_bytes, far_bytes, rule: args.policy.rule() },
        policy: args.policy.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default(),
        pool: args.pool,
        token: String::from_utf8(token).context("the token is not UTF-8 text")?,
        socket,
        metrics: args.metrics,
    })
}

fn render(status: &AgentStatus) -> String {
    let far = status.far_bytes.map_or(String::new(), |far| format!(" of {}", ByteSize(far)));
    let withheld = match status.withheld_bytes {
        0 => String::new(),
        bytes => format!(", {} not divided because this machine is short of memory", ByteSize(bytes)),
    };
    let mut text = format!(
        "near {} of {} held{withheld}, far {}{far} asked for, policy {}\n",
        ByteSize(status.held_bytes),
        ByteSize(status.near_bytes),
        ByteSize(status.overflow_bytes),
        status.policy
    );
    match status.servers_room_bytes {
        _ if status.is_server_silent => text += "a memory server does not answer, so no job starts\n",
        Some(bytes) => {
            let _ = writeln!(text, "the memory servers have room for {}", ByteSize(bytes));
        }
        None => {}
    }
    let _ = writeln!(
        text,
        "{:>7} {:<8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}  PROGRAM",
        "JOB", "STATE", "MEMORY", "LEAST", "OFFERED", "TARGET", "NEAR", "FAR", "SLOWER"
    );
    for job in &status.jobs {
        let state = match (job.is_running, job.is_kept) {
            (true, true) => "runs",
            (true, false) => "over",
            (false, _) => "waits",
        };
        let size = |bytes: u64| format!("{:#}", ByteSize(bytes));
        let [memory, least] = [job.memory_bytes, job.least_bytes].map(size);
        let [offered, target] = [job.offered_bytes, job.target_bytes].map(size);
        let [near, far] = [job.measured_bytes, job.far_bytes].map(size);
        let what = if job.is_running { crate::top::command_line(job.runner_pid) } else { job.reason.clone() };
        let slower = job.slowdown.map_or("-".into(), |slowdown| format!("{slowdown:.2}"));
        let line = format!(
            "{:>7} {state:<8} {memory:>8} {least:>8} {offered:>8} {target:>8} {near:>8} {far:>8} {slower:>6}  {what}",
            job.runner_pid
        );
        // A reason is told whole.
        let width = if job.is_running { 120 } else { usize::MAX };
        let _ = writeln!(text, "{}", line.chars().take(width).collect::<String>());
    }
    text
}

#[cfg(test)]
mod tests {
    //! Danger: a view that hides who waits, or who has more than its budget.
    use super::*;
    use farfield_pager::runner::AgentStatusRow;

    #[test]
    fn the_view_says_who_runs_who_waits_and_who_is_over() {
        let row = AgentStatusRow { runner_pid: u32::MAX, memory_bytes: 8 << 30, ..AgentStatusRow::default() };
        let jobs = vec![
            AgentStatusRow { is_running: true, is_kept: true, slowdown: Some(1.254), ..row.clone() },
            AgentStatusRow { is_running: true, is_kept: false, ..row.clone() },
            AgentStatusRow { reason: "others have 5 MiB to give up yet".into(), ..row },
        ];
        let status = AgentStatus { near_bytes: 24 << 30, far_bytes: Some(64 << 30), jobs, ..AgentStatus::default() };
        let text = render(&status);
        let known = AgentStatus { servers_room_bytes: Some(3 << 30), ..status.clone() };
        assert!(render(&known).contains("the memory servers have room for 3.0 GiB\n"), "{}", render(&known));
        let silent = AgentStatus { is_server_silent: true, ..status.clone() };
        assert!(render(&silent).contains("does not answer, so no job starts\n"), "{}", render(&silent));
        let short = AgentStatus { withheld_bytes: 1 << 30, ..status.clone() };
        assert!(render(&short).contains("held, 1.0 GiB not divided because"), "{}", render(&short));
        for part in
            ["of 24.0 GiB held, far", " 1.25 ", "of 64.0 GiB asked", " runs ", " over ", " waits ", "5 MiB to give up"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
