//! `farfield run`: runs a program with far memory.

use crate::doctor::pool::ProbeEffort;
use crate::size::Size;
use anyhow::Context;
use clap::{Args, ValueEnum};
use farfield_core::policy::budget_controller::Cadence;
use farfield_pager::control::{FaultMode, exit};
use farfield_pager::runner::{self, Options, ProgramExit, SloOptions, machine};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run a program with far memory.
///
/// The program is not changed. What it allocates beyond --near goes to far memory and comes back when it is touched.
/// Without --far, a private memory server is started on this machine for this job and stopped with it.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
pub(crate) struct RunArgs {
    /// Near memory that the program and all its children may use together: 512M, 1.5G, 4GiB, or 25% of this
    /// machine's (or container's) memory. At least 16M
    #[arg(long, value_name = "SIZE", default_value = "50%", env = "FARFIELD_NEAR")]
    near: Size,
    /// Where far memory is: a memory server, tcp://HOST:PORT or unix:PATH, or a file,
    /// ssd:FOLDER?size=8G. Several URLs share the load. "mirror(URL,URL)" keeps each page at both.
    /// "ec(2,1,URL,URL,URL)" survives the loss of any one of the three; with ",scrub=12h" behind the
    /// URLs it looks for corrupt pages twice a day instead of once. "tier(URL,URL)" uses the second
    /// for pages that the first has no room for
    #[arg(long, value_name = "URL")]
    far: Vec<String>,
    /// Give the program as little near memory as --slo allows, --near at most, and adapt it while
    /// the program runs. Each --far is then a pool of its own. The job starts at the first one, or
    /// with --profile at the one that `farfield advise` recommends. It moves to another pool if its
    /// own is too slow or loses a server. "periodic" decides at fixed times
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true,
          default_missing_value = "event", requires = "slo")]
    auto: Option<AutoArg>,
    /// Slowdown that the program may have at most: 1.1 is 1.1 times its run time with all memory near
    #[arg(long, value_name = "TIMES", value_parser = crate::advise::slo, requires = "auto")]
    slo: Option<f64>,
    /// Profile of this program, written by `farfield profile`
    #[arg(long, value_name = "PROFILE", requires = "auto")]
    profile: Option<PathBuf>,
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
  farfield run --near 1G --report run.json -- ./app     What happened, for programs
  farfield run --quiet --near 1G -- ./app > out.txt     Nothing of ours on the terminal

Exit code: that of the program (128 + N in a shell if signal N killed it). 126 and 127 as in a shell if it cannot
be executed or found. 93 to 97 are ours: memory server lost, far memory full, a page came back corrupt, a fault of
ours, or not started because it could not have had far memory. docs/cli.md has the whole story.";

#[derive(Clone, Copy, ValueEnum, Debug)]
enum ModeArg {
    /// Signal mode where possible, else threads
    Auto,
    /// In the faulting thread: fast
    Signal,
    /// In handler threads of Farfield: slower, works for every program
    Thread,
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
    let near_limit_bytes = args.near.bytes(machine::memory_bytes());
    let AutoSettings { hold, far, places, huge_pages } = auto_settings(&args, near_limit_bytes)?;
    Ok(Options {
        near_limit_bytes,
        hold,
        places,
        mode: match args.mode {
            ModeArg::Auto => FaultMode::Auto,
            ModeArg::Signal => FaultMode::Signal,
            ModeArg::Thread => FaultMode::Thread,
        },
        huge_pages: args.huge_pages || huge_pages,
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
            runner::ByteSize(choice.near_bytes),
            choice.slowdown
        ));
    }
    let far = if choice.url.is_empty() { Vec::new() } else { vec![choice.url] };
    let others = args.far.iter().filter(|url| !far.contains(url));
    let places = far.iter().chain(others).cloned().collect();
    let hold = SloOptions { slo, cadence, near_start_bytes: choice.near_bytes, is_compared: true };
    Ok(AutoSettings { hold: Some(hold), far, places, huge_pages: choice.huge_pages })
}
