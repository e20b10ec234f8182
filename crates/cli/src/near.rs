//! `farfield near`: shows the near budget of a running job, and changes it.

use crate::size::Size;
use anyhow::{bail, ensure};
use clap::Args;
use farfield_pager::runner::{ByteSize, ControlBlock, NearStatus, find_control, machine, offer_near};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// Show the near budget of a running job, or change it.
///
/// The job gets SIZE, or less if it holds a slowdown (`farfield run --auto`) and needs less. The
/// command waits until the job keeps its new budget.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct NearArgs {
    /// Process id of any process of the job
    #[arg(value_name = "JOB", value_parser = crate::pool::parse_job)]
    pid: u32,
    /// Most near memory that the job may have from now on: 512M, 1.5G, or 25% of this machine's (or
    /// container's) memory. Without it, the budget is shown
    #[arg(value_name = "SIZE", allow_hyphen_values = true)]
    size: Option<Size>,
    /// Do not wait until the job keeps the new budget
    #[arg(long, requires = "size")]
    no_wait: bool,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield near 4711                                    What the job has, its budget, and how little it may be given
  farfield near 4711 512M                               512 MiB from now on; waits until no more is near
  farfield near --no-wait 4711 25%                      A quarter of this machine's memory, when it can
  farfield near --json 4711 | jq .near_limit_bytes      For programs

JOB is a process of the job: the program, a child of it, or its `farfield run`.";

/// Time without progress after which the command no longer waits for a job to shrink.
const STALLED_AFTER: Duration = Duration::from_secs(10);
/// Interval between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Budget of a job, as JSON output.
#[derive(serde::Serialize)]
struct NearRow {
    runner_pid: u32,
    #[serde(flatten)]
    status: NearStatus,
    /// Socket of the agent that decides the budget; `null` if there is none.
    agent: Option<String>,
}

/// Shows or changes the budget.
pub(crate) fn run(args: &NearArgs) -> anyhow::Result<()> {
    let (runner, control) = find_control(args.pid)?;
    let agent = agent_of(&control);
    if let Some(size) = args.size {
        let bytes = offer(&control, size)?;
        if !args.no_wait {
            wait(runner, &control, bytes)?;
        }
    }
    let status = NearStatus::read(&control);
    let text = match args.json {
        true => serde_json::to_string(&NearRow { runner_pid: runner, status, agent })?,
        false => {
            format!("{status}{}", agent.map_or(String::new(), |agent| format!(", decided by the agent at {agent}")))
        }
    };
    // The write fails if stdout was closed.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

/// Offers a job a budget, which its runner takes within a moment. Returns the budget in bytes. Fails if an agent
/// decides the budget, or if the job cannot run with so little.
pub(crate) fn offer(control: &ControlBlock, size: Size) -> anyhow::Result<u64> {
    let bytes = size.bytes(machine::memory_bytes());
    if let Some(agent) = agent_of(control) {
        bail!("the agent at {agent} decides the budget of this job and would change it back");
    }
    offer_near(control, bytes)?;
    Ok(bytes)
}

/// Returns the socket of the agent that decides the budget of a job.
fn agent_of(control: &ControlBlock) -> Option<String> {
    Some(control.config().agent.line()).filter(|agent| !agent.is_empty())
}

/// Waits until the job keeps its new budget. Fails if it comes no closer for [`STALLED_AFTER`].
fn wait(runner: u32, control: &ControlBlock, offer_bytes: u64) -> anyhow::Result<()> {
    let (mut least_bytes, mut since) = (u64::MAX, Instant::now());
    loop {
        let status = NearStatus::read(control);
        if status.holds(offer_bytes) {
            return Ok(());
        }
        ensure!(Path::new(&format!("/proc/{runner}")).exists(), "the job has ended");
        ensure!(
            status.near_offer_bytes == offer_bytes || since.elapsed() < STALLED_AFTER,
            "the job's `farfield run` does not take the budget: is it stopped? It takes it when it goes on"
        );
        if status.near_bytes < least_bytes {
            (least_bytes, since) = (status.near_bytes, Instant::now());
        }
        ensure!(
            since.elapsed() < STALLED_AFTER,
            "the budget is in force, but the job still has {} near, and no less for {} s: its processes are stopped, \
             or tables and pinned memory take the rest",
            ByteSize(status.near_bytes),
            STALLED_AFTER.as_secs()
        );
        std::thread::sleep(LOOK);
    }
}
