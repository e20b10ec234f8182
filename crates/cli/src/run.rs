//! `farfield run`: runs a program with far memory.

use crate::doctor::pool::ProbeEffort;
use crate::size::Size;
use anyhow::{Context, ensure};
use clap::{ArgGroup, Args, ValueEnum};
use farfield_core::policy::budget_controller::Cadence;
use farfield_core::policy::cluster::JobClaim;
use farfield_core::policy::cluster::claim::POINTS_MAX;
use farfield_core::policy::curve::{Curve, Point};
use farfield_core::policy::profile::Profile;
use farfield_pager::config::Capture;
use farfield_pager::control::{FaultMode, exit};
use farfield_pager::runner::{self, AgentOptions, ByteSize, HistoryFile, Options, ProgramExit, SloOptions, machine};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Run a program with far memory.
///
/// The program is not changed. What it allocates beyond --near goes to far memory and comes back when it is touched.
/// Without --far, a private memory server is started on this machine for this job and stopped with it.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
#[command(group(ArgGroup::new("budget").multiple(true)))]
pub(crate) struct RunArgs {
    /// Near memory that the program and all its children may use together: 512M, 1.5G, 4GiB, or 25% of this
    /// machine's (or container's) memory. At least 16M
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, default_value = "50%", env = "FARFIELD_NEAR")]
    near: Size,
    /// Where far memory is: a memory server, tcp://HOST:PORT or unix:PATH, or a file,
    /// ssd:FOLDER?size=8G. Several URLs share the load. "mirror(URL,URL)" keeps each page at both.
    /// "ec(2,1,URL,URL,URL)" survives the loss of any one of the three; with ",scrub=12h" behind the
    /// URLs it looks for corrupt pages twice a day instead of once. "tier(URL,URL)" uses the second
    /// for pages that the first has no room for
    #[arg(long, value_name = "URL")]
    far: Vec<String>,
    /// Least near memory that the program runs with: neither `farfield near` nor an agent gives it
    /// less. At least 16M [default: 16M; with --agent, the variable FARFIELD_JOB_LEAST of a job of
    /// Slurm, or with --profile what keeps --slo]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    least: Option<Size>,
    /// Ask the agent of this node (`farfield agent`) for near memory and for a pool, instead of
    /// --near and --far. The program starts when there is room
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, require_equals = true, default_missing_value = "",
          conflicts_with = "far", group = "budget")]
    agent: Option<PathBuf>,
    /// Memory that the program needs in all, near and far, for --agent [default: in a job of Slurm
    /// what it asked for, which the variable FARFIELD_JOB_MEM says; else as in --profile]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, requires = "agent")]
    mem: Option<Size>,
    /// Claim by what earlier runs with this file have shown, and add what this one shows, with --agent:
    /// slowdowns by near memory, the run time, and how much memory it used. The file is made by the
    /// first run; give each program its own
    #[arg(long, value_name = "FILE", requires = "agent")]
    learn: Option<PathBuf>,
    /// How long to wait for near memory, with --agent: 30s, 10m
    #[arg(long, value_name = "TIME", value_parser = crate::serve::duration, default_value = "10m", requires = "agent")]
    wait: Duration,
    /// Give the program as little near memory as --slo allows, --near at most, and adapt it while
    /// the program runs. Each --far is then a pool of its own. The job starts at the first one, or
    /// with --profile at the one that `farfield advise` recommends. It moves to another pool if its
    /// own is too slow or loses a server. "periodic" decides at fixed times
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true,
          default_missing_value = "event", requires = "slo", group = "budget")]
    auto: Option<AutoArg>,
    /// Slowdown that the program may have at most: 1.1 is 1.1 times its run time with all memory near
    #[arg(long, value_name = "TIMES", value_parser = crate::advise::slo, requires = "budget")]
    slo: Option<f64>,
    /// Profile of this program, written by `farfield profile`
    #[arg(long, value_name = "PROFILE", requires = "budget")]
    profile: Option<PathBuf>,
    /// What may be far
    #[arg(long, value_enum, default_value = "everything")]
    what: WhatArg,
    /// How page faults are served
    #[arg(long, value_enum, default_value = "auto")]
    mode: ModeArg,
    /// Use huge pages of 2 MiB for memory of the program as long as all of it is near; far memory
    /// moves in pages of 4 KiB. Faster if the program uses most of each 2 MiB, else the kernel gives
    /// it memory that it does not use. --auto uses them if `farfield advise` recommends them
    #[arg(long)]
    huge_pages: bool,
    /// Write a report as JSON to this file when the program ends
    #[arg(long, value_name = "FILE.json")]
    report: Option<PathBuf>,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print no progress line and no summary
    #[arg(long, short)]
    quiet: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  farfield run -- sort -S 8G big.txt                    Half of this machine's memory near, the rest far
  farfield run --near 512M -- redis-server              512 MiB near
  farfield run --near 25% -- ./train                    A quarter of the memory of this machine or container near
  farfield run --near 1G --far tcp://big:7400 -- ./app  The rest on the machine called big
  farfield run --near 1G --far tcp://a:7400 --far tcp://b:7400 -- ./app
                                                        The rest on two machines
  farfield run --near 1G --far 'ssd:/var/tmp?size=32G' -- ./app
                                                        The rest in a file on this machine's disk
  farfield run --auto --slo 1.4 -- ./train              As little near as makes it at most 40 % slower
  farfield run --auto --slo 1.4 --profile train.json -- ./train
  farfield run --auto --slo 1.4 --far tcp://big:7400 --far 'ssd:/var/tmp?size=32G' -- ./train
                                                        On big, and in a file when big becomes too slow
  farfield run --agent --mem 8G --least 4G -- ./train   What this node's `farfield agent` gives, between 4 and 8 GiB
  farfield run --agent --mem 8G --least 4G --learn train.json -- ./train
                                                        The same, and the agent knows how the last runs went
  farfield run --near 1G --report run.json -- ./app     What happened, for programs
  farfield run --quiet --near 1G -- ./app > out.txt     Nothing of ours on the terminal

Exit code: that of the program (128 + N in a shell if signal N killed it). 126 and 127 as in a shell if it cannot
be executed or found. 93 to 97 are ours: memory server lost, far memory full, a page came back corrupt, a fault of
ours, or not started because it could not have had far memory. docs/cli.md has the whole story.";

#[derive(Clone, Copy, ValueEnum, Debug)]
pub(crate) enum ModeArg {
    /// Signal mode where possible, else threads
    Auto,
    /// In the faulting thread: fast
    Signal,
    /// In handler threads of Farfield: slower, works for every program
    Thread,
}

impl From<ModeArg> for FaultMode {
    fn from(mode: ModeArg) -> FaultMode {
        match mode {
            ModeArg::Auto => FaultMode::Auto,
            ModeArg::Signal => FaultMode::Signal,
            ModeArg::Thread => FaultMode::Thread,
        }
    }
}

/// Kind of memory that may be far, as an argument.
#[derive(Clone, Copy, ValueEnum, Debug)]
pub(crate) enum WhatArg {
    /// All memory that the program maps
    Everything,
    /// NumPy arrays that are made inside of `with farfield.far():`
    Arrays,
}

impl From<WhatArg> for Capture {
    fn from(what: WhatArg) -> Capture {
        match what {
            WhatArg::Everything => Capture::Everything,
            WhatArg::Arrays => Capture::Arrays,
        }
    }
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum AutoArg {
    /// As soon as something changes
    Event,
    /// At fixed times
    Periodic,
}

/// Runs the program, and ends as the program ended.
pub(crate) fn run(args: RunArgs) -> ExitCode {
    let options = match options(args) {
        Ok(options) => options,
        Err(error) => return refused(&format!("{error:#}"), exit::REFUSED),
    };
    match runner::run(&options) {
        Ok(ProgramExit::Code(code)) => ExitCode::from(code as u8),
        Ok(ProgramExit::Signal(signal)) => runner::die_by(signal),
        Err(runner::JobRefusal::Interrupted { signal }) => runner::die_by(signal),
        Err(refusal) => refused(&refusal.to_string(), refusal.exit_code()),
    }
}

fn refused(text: &str, code: i32) -> ExitCode {
    crate::say(text);
    ExitCode::from(code as u8)
}

fn options(args: RunArgs) -> anyhow::Result<Options> {
    let farfield = std::env::current_exe().context("cannot tell where the farfield executable is")?;
    let preload = runner::find_preload(std::env::var_os(runner::ENV_PRELOAD).as_deref(), &farfield)?;
    let machine_bytes = machine::memory_bytes();
    let agent = args.agent.as_ref().map(|socket| agent_options(&args, socket)).transpose()?;
    let (near_limit_bytes, near_least_bytes) = match &agent {
        Some(agent) => (agent.claim.memory_bytes, agent.claim.least_bytes),
        None => (
            args.near.bytes(machine_bytes),
            args.least.map_or(machine::NEAR_BYTES_MIN, |least| least.bytes(machine_bytes)),
        ),
    };
    ensure!(near_least_bytes >= machine::NEAR_BYTES_MIN, "--least is too small to make progress: give at least 16M");
    let AutoSettings { hold, far, places, huge_pages } = auto_settings(&args, near_limit_bytes)?;
    Ok(Options {
        near_limit_bytes,
        near_least_bytes,
        agent,
        hold,
        places,
        mode: args.mode.into(),
        huge_pages: args.huge_pages || huge_pages,
        capture: args.what.into(),
        far,
        token: crate::token::read(args.token_file.as_deref())?,
        report: args.report,
        quiet: args.quiet,
        command: args.command,
        preload,
        farfield,
        pipe_ignored: crate::pipe::was_ignored(),
    })
}

/// Returns what the program asks the agent of the node for.
fn agent_options(args: &RunArgs, socket: &Path) -> anyhow::Result<AgentOptions> {
    let profile = args.profile.as_deref().map(crate::profile::read).transpose()?;
    let machine_bytes = machine::memory_bytes();
    let profiled_bytes = profile.as_ref().map(|profile| profile.findings.anonymous_peak_bytes);
    let memory = args.mem.map_or_else(|| job_size(ENV_JOB_MEM), |mem| Ok(Some(mem)))?;
    let memory_bytes = memory.map(|mem| mem.bytes(machine_bytes)).or(profiled_bytes);
    let memory_bytes = memory_bytes.context("--agent needs --mem SIZE, or --profile of a run that used its memory")?;
    let memory_bytes = memory_bytes.max(machine::NEAR_BYTES_MIN);
    let mut claim = match &profile {
        Some(profile) => profiled_claim(profile, args.slo.unwrap_or(AGENT_SLO), memory_bytes)?,
        None => JobClaim { memory_bytes, least_bytes: memory_bytes, slowdowns: Vec::new(), seconds: None },
    };
    match args.least.map_or_else(|| job_size(ENV_JOB_LEAST), |least| Ok(Some(least)))? {
        Some(least) => claim.least_bytes = least.bytes(machine_bytes),
        None => ensure!(profile.is_some(), "--agent needs --least SIZE, or --profile: how little may be near?"),
    }
    ensure!(
        claim.least_bytes <= memory_bytes,
        "--least {} is more than the program's memory, {}",
        ByteSize(claim.least_bytes),
        ByteSize(memory_bytes)
    );
    let socket = if socket.as_os_str().is_empty() { runner::agent_socket() } else { socket.to_owned() };
    claim.class().context("--profile")?;
    let history = args.learn.clone().map(HistoryFile);
    if let Some(file) = &history {
        let earlier = file.read().with_context(|| {
            format!("--learn {}: not a file of `farfield run --learn`; remove it to begin anew", file.0.display())
        })?;
        claim = earlier.improve(&claim);
    }
    Ok(AgentOptions { socket, claim, wait: args.wait, history })
}

/// Environment variables that the Lua script of `farfield cluster init` gives jobs of Slurm: what the
/// job asked for, which Slurm shows nowhere else.
const ENV_JOB_MEM: &str = "FARFIELD_JOB_MEM";
const ENV_JOB_LEAST: &str = "FARFIELD_JOB_LEAST";

/// Returns the size that a variable of the job says.
fn job_size(name: &str) -> anyhow::Result<Option<Size>> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let text = value.to_str().with_context(|| format!("{name} is not UTF-8"))?;
    text.parse().map(Some).map_err(|error| anyhow::anyhow!("{name}={text}: {error}"))
}

/// Slowdown that a profiled program may have under an agent unless `--slo` says otherwise.
const AGENT_SLO: f64 = 1.4;

/// Returns the claim of a program with a profile: the least near memory is what
/// `farfield advise --slo` recommends, and slowdowns are those that were measured, or a straight
/// line to that one.
fn profiled_claim(profile: &Profile, slo: f64, memory_bytes: u64) -> anyhow::Result<JobClaim> {
    let advice = crate::advise::advise(profile, slo, &[], None, ProbeEffort::Quick)?;
    let way = advice.choice.or_else(|| advice.ways.into_iter().next()).context("the profile says nothing")?;
    let least_bytes = way.near_bytes.clamp(machine::NEAR_BYTES_MIN, memory_bytes);
    let least = least_bytes as f64 / memory_bytes as f64;
    let measured = Curve::places(profile).first().and_then(|url| Some(Curve::of(profile, url)?.0));
    let mut slowdowns: Vec<Point> = match measured {
        Some(curve) => curve.points().iter().filter(|point| point.near > 0.0 && point.near <= 1.0).copied().collect(),
        None => Vec::new(),
    };
    slowdowns.truncate(POINTS_MAX - 2);
    if slowdowns.first().is_none_or(|first| first.near > least) {
        slowdowns.insert(0, Point { near: least, slowdown: way.slowdown });
    }
    if slowdowns.last().is_some_and(|last| last.near < 1.0) {
        slowdowns.push(Point { near: 1.0, slowdown: 1.0 });
    }
    let seconds = Some(profile.observation.native_ms() as f64 / 1e3).filter(|seconds| *seconds > 0.0);
    Ok(JobClaim { memory_bytes, least_bytes, slowdowns, seconds })
}

/// Settings that `--auto` derives.
struct AutoSettings {
    hold: Option<SloOptions>,
    /// URLs of far memory at the start, and URLs that it may move to.
    far: Vec<String>,
    places: Vec<String>,
    huge_pages: bool,
}

fn auto_settings(args: &RunArgs, near_limit_bytes: u64) -> anyhow::Result<AutoSettings> {
    let (Some(auto), Some(slo)) = (args.auto, args.slo) else {
        return Ok(AutoSettings { hold: None, far: args.far.clone(), places: Vec::new(), huge_pages: false });
    };
    let cadence = match auto {
        AutoArg::Event => Cadence::EventDriven,
        AutoArg::Periodic => Cadence::Periodic,
    };
    let Some(profile) = &args.profile else {
        let first = args.far.iter().take(1).cloned().collect();
        let hold = SloOptions { slo, cadence, near_start_bytes: near_limit_bytes, is_compared: false };
        return Ok(AutoSettings { hold: Some(hold), far: first, places: args.far.clone(), huge_pages: false });
    };
    let profile = crate::profile::read(profile)?;
    let advice = crate::advise::advise(&profile, slo, &args.far, args.token_file.as_deref(), ProbeEffort::Quick)?;
    let choice = advice.choice.with_context(|| advice.reasons.join(" "))?;
    if !args.quiet {
        crate::say(&format!(
            "starts with {} near; expected is {:.2} × its time",
            ByteSize(choice.near_bytes),
            choice.slowdown
        ));
    }
    let far = if choice.url.is_empty() { Vec::new() } else { vec![choice.url] };
    let others = args.far.iter().filter(|url| !far.contains(url));
    let places = far.iter().chain(others).cloned().collect();
    let hold = SloOptions { slo, cadence, near_start_bytes: choice.near_bytes, is_compared: true };
    Ok(AutoSettings { hold: Some(hold), far, places, huge_pages: choice.huge_pages })
}
