//! `farfield keep`: keeps far memory for a process that runs already.

use crate::run::{ModeArg, WhatArg};
use crate::size::Size;
use anyhow::{Context, ensure};
use clap::Args;
use farfield_core::policy::budget_controller::Cadence;
use farfield_pager::control::exit;
use farfield_pager::runner::{self, ControlBlock, Options, SloOptions, machine};
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// Keep far memory for a process that runs already.
///
/// This is `farfield run` without a program: it starts the private server, watches the budget and
/// reports, and ends with the process. The process itself joins by a call of
/// `libfarfield_preload.so`; `farfield.enable()` of the Python package does both.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct KeepArgs {
    /// The process, which must be of this user
    #[arg(long = "for", value_name = "PID")]
    process: u32,
    /// Near memory that the process and all its children may use together: 512M, 1.5G, 4GiB, or 25% of this machine's
    /// (or container's) memory. At least 16M
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, default_value = "50%", env = "FARFIELD_NEAR")]
    near: Size,
    /// Where far memory is, as for `farfield run`. Without it, a private memory server is started on this machine
    #[arg(long, value_name = "URL")]
    far: Vec<String>,
    /// Slowdown that the process may have at most: gives it as little near memory as that allows, --near at most. Each
    /// --far is then a pool of its own
    #[arg(long, value_name = "TIMES", value_parser = crate::advise::slo)]
    slo: Option<f64>,
    /// What may be far
    #[arg(long, value_enum, default_value = "everything")]
    what: WhatArg,
    /// How page faults are served
    #[arg(long, value_enum, default_value = "auto")]
    mode: ModeArg,
    /// Write a report as JSON to this file when the process ends. (The exit code in it is 0 unless Farfield ended the
    /// process: its own is not known here)
    #[arg(long, value_name = "FILE.json")]
    report: Option<PathBuf>,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print one line of JSON when the process may join: the keeper's pid and the path of the configuration, or "error"
    #[arg(long)]
    json: bool,
    /// Return when the process may join, and go on in the background; implies --json
    #[arg(long)]
    background: bool,
    /// Print no progress line and no summary
    #[arg(long, short)]
    quiet: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield keep --for 4711 --near 4G --far tcp://big:7400     Far memory on big for process 4711, once it joins
  farfield keep --for 4711 --near 4G --background             In the background; prints where to join
  python3 -c 'import farfield; farfield.enable(near=\"4G\")'    Starts it, and joins";

/// Keeps far memory until the process ends.
pub(crate) fn run(args: KeepArgs) -> ExitCode {
    let is_json = args.json || args.background;
    let kept = if args.background { start_in_background() } else { keep(args) };
    match kept {
        Ok(code) => code,
        Err(error) if is_json => {
            print_line(&json!({ "error": format!("{error:#}") }));
            ExitCode::from(exit::REFUSED as u8)
        }
        Err(error) => {
            crate::say(&format!("{error:#}"));
            ExitCode::from(exit::REFUSED as u8)
        }
    }
}

fn keep(args: KeepArgs) -> anyhow::Result<ExitCode> {
    ensure!(std::fs::exists("/proc/self/fd")?, "/proc is not there, and far memory needs it");
    let process = args.process;
    let is_json = args.json;
    let near_limit_bytes = args.near.bytes(machine::memory_bytes());
    let hold = args.slo.map(|slo| SloOptions {
        slo,
        cadence: Cadence::EventDriven,
        near_start_bytes: near_limit_bytes,
        is_compared: false,
    });
    let (far, places) = match hold {
        Some(_) => (args.far.iter().take(1).cloned().collect(), args.far),
        None => (args.far, Vec::new()),
    };
    let options = Options {
        near_limit_bytes,
        near_least_bytes: machine::NEAR_BYTES_MIN,
        agent: None,
        hold,
        places,
        mode: args.mode.into(),
        huge_pages: false,
        capture: args.what.into(),
        far,
        token: crate::token::read(args.token_file.as_deref())?,
        report: args.report,
        quiet: args.quiet,
        command: command_line(process),
        preload: PathBuf::new(),
        farfield: std::env::current_exe().context("cannot tell where the farfield executable is")?,
        pipe_ignored: crate::pipe::was_ignored(),
    };
    let ready = |control: &ControlBlock| {
        if is_json {
            let control = control.path().to_string_lossy();
            print_line(&json!({ "pid": std::process::id(), "control": control, "near_limit_bytes": near_limit_bytes }));
        } else if !options.quiet {
            crate::say(&format!("process {process} may join at {}", control.path().display()));
        }
    };
    let ended = runner::keep(&options, process, &ready)?;
    Ok(ExitCode::from(ended.exit_code() as u8))
}

/// Starts this command once more, without `--background`, and passes on what it says first. Then
/// nobody is its parent: the process must not find a child that it did not start.
fn start_in_background() -> anyhow::Result<ExitCode> {
    let farfield = std::env::current_exe().context("cannot tell where the farfield executable is")?;
    let words = std::env::args_os().skip(1).filter(|word| word != "--background");
    // No key press of the terminal reaches it.
    let mut child = Command::new(farfield)
        .args(words)
        .arg("--json")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("farfield keep cannot be started")?;
    let output = child.stdout.take().context("no output")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    ensure!(line.ends_with('\n'), "farfield keep ended before far memory was ready");
    let _ = std::io::stdout().write_all(line.as_bytes());
    let has_failed = line.starts_with("{\"error\"");
    Ok(if has_failed { ExitCode::from(exit::REFUSED as u8) } else { ExitCode::SUCCESS })
}

fn print_line(value: &serde_json::Value) {
    // The write fails if stdout was closed.
    let _ = writeln!(std::io::stdout(), "{value}").and_then(|()| std::io::stdout().flush());
}

/// Returns the command of a process for the report; empty if it cannot be read.
fn command_line(pid: u32) -> Vec<OsString> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| OsStr::from_bytes(word).to_owned()).collect()
}
