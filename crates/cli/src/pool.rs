//! `farfield pool`: shows the pool of a running job, and moves the job to another one.

use clap::{Args, Subcommand};
use farfield_core::geometry::PAGE_BYTES;
use farfield_pager::runner::{self, ControlBlock, PoolStatus, find_control};
use farfield_pool::{Protection, ScrubStats};
use std::io::{IsTerminal, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Look at the pool of a running job, or give it another one.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PoolArgs {
    #[command(subcommand)]
    command: PoolCommand,
}

const EXAMPLES: &str = "\
Examples:
  farfield pool switch 4711 tcp://big:7400              All that is far moves to the machine called big
  farfield pool switch 4711 'ssd:/var/tmp?size=32G'     To a file
  farfield pool switch 4711 first                       To where it was when the job began
  farfield pool status 4711                             Where it is, what still moves, what is not protected
  farfield pool status --json 4711 | jq .moving         The same, for programs
  farfield pool cancel 4711                             Back to where it was

JOB is a process of the job: the program, a child of it, or its `farfield run`.";

#[derive(Subcommand, Debug)]
enum PoolCommand {
    /// Move all far memory of a running job to another pool, and wait until it has moved
    ///
    /// Until all pages have moved, the old pool still holds all of them. If the new pool is full or
    /// fails, or if the switch is cancelled, the job goes on with the old pool. During the switch both
    /// pools need the memory.
    Switch(SwitchArgs),
    /// Show where the job's far memory is, how many pages still have to move, and how many pages of a
    /// mirror or an erasure code have too few copies or shards
    Status(StatusArgs),
    /// Cancel a switch and move the pages back
    Cancel(JobArgs),
}

#[derive(Args, Debug)]
struct JobArgs {
    /// Process id of any process of the job
    #[arg(value_name = "JOB", value_parser = crate::pool::parse_job)]
    pid: u32,
}

#[derive(Args, Debug)]
struct StatusArgs {
    /// Process id of any process of the job
    #[arg(value_name = "JOB", value_parser = crate::pool::parse_job)]
    pid: u32,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct SwitchArgs {
    /// Process id of any process of the job
    #[arg(value_name = "JOB", value_parser = crate::pool::parse_job)]
    pid: u32,
    /// A pool as in `farfield run --far`, or `first`: the one that the job began with
    #[arg(value_name = "URL")]
    url: String,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Do not wait until the switch ends; `farfield pool status` shows its progress
    #[arg(long)]
    no_wait: bool,
}

/// Parses the process id that stands for a job.
pub(crate) fn parse_job(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "JOB is the number of one of its processes; `farfield top` lists the jobs".into())
}

/// Runs the subcommand. Returns 0, or prints the error to stderr and returns 1.
pub(crate) fn run(args: PoolArgs) -> ExitCode {
    crate::finish(match args.command {
        PoolCommand::Switch(args) => switch(args),
        PoolCommand::Status(args) => status(&args),
        PoolCommand::Cancel(args) => cancel(&args),
    })
}

fn switch(args: SwitchArgs) -> anyhow::Result<()> {
    let token = crate::token::read(args.token_file.as_deref())?;
    let (runner, control) = find_control(args.pid)?;
    let url = (args.url != "first").then_some(args.url.as_str());
    let epoch = runner::switch_pool(&control, url, &token)?;
    if args.no_wait {
        return tell(format_args!("the job moves; `farfield pool status {}` shows how far it is", args.pid));
    }
    let started = Instant::now();
    let live = std::io::stderr().is_terminal();
    loop {
        let status = PoolStatus::read(&control);
        if live {
            let _ = write!(std::io::stderr(), "\r{:<60}\r", progress(&status));
        }
        if status.epoch != epoch {
            anyhow::bail!(cancellation_reason(&control));
        }
        if status.moving.is_empty() {
            return tell(format_args!(
                "moved to {} in {:.1} s",
                status.urls.join(" "),
                started.elapsed().as_secs_f64()
            ));
        }
        anyhow::ensure!(Path::new(&format!("/proc/{runner}")).exists(), "the job has ended");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Says what was done.
fn tell(what: std::fmt::Arguments<'_>) -> anyhow::Result<()> {
    // The write fails if stdout was closed.
    let _ = writeln!(std::io::stdout(), "{what}");
    Ok(())
}

/// Returns the reason why the job stays where it is. Waits up to a second for it, because it is
/// published right after the switch was given up.
fn cancellation_reason(control: &ControlBlock) -> String {
    let deadline = Instant::now() + Duration::from_secs(1);
    loop {
        let PoolStatus { urls, reason, .. } = PoolStatus::read(control);
        let is_late = Instant::now() > deadline;
        if is_late || !reason.is_empty() {
            let reason = if reason.is_empty() { "something else was decided meanwhile" } else { &reason };
            return format!("the job stays with {}: {reason}", urls.join(" "));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn progress(status: &PoolStatus) -> String {
    let sum = |count: fn(&runner::MovingProcess) -> u64| status.moving.iter().map(count).sum::<u64>();
    let (pages, moved) = (sum(|process| process.pages), sum(|process| process.moved_pages));
    match (status.moving.len(), pages) {
        (0, _) => String::new(),
        (processes, 0) => format!("{processes} to move"),
        (processes, _) => format!("{processes} to move, {} of {} MiB moved", moved / 256, pages.div_ceil(256)),
    }
}

fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let (_, control) = find_control(args.pid)?;
    let status = PoolStatus::read(&control);
    let text = match args.json {
        true => serde_json::to_string(&PoolRow::of(status))? + "\n",
        false => render(&status),
    };
    // The write fails if stdout was closed.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// The pool of a job, as JSON output.
#[derive(serde::Serialize, serde::Deserialize, Default, Debug)]
pub(crate) struct PoolRow {
    /// URLs of the pool, or of its target while `moving` is not empty; and the URLs before that.
    pub(crate) urls: Vec<String>,
    pub(crate) before: Vec<String>,
    /// Number of pools that the job was given since it began, moves back included; and the number
    /// of those to which it moved by itself.
    pub(crate) switches: u32,
    pub(crate) moves: u32,
    /// Reason why the job moved there by itself, and reason why it came back from the pool before;
    /// `null` if it did not.
    cause: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) moving: Vec<MovingRow>,
    /// Processes that have lost a server, or whose servers are silent or lack something.
    pub(crate) degraded: Vec<u32>,
    pub(crate) scrubbed: Vec<ScrubRow>,
    pub(crate) protection: Vec<ProtectionRow>,
}

#[derive(serde::Serialize, serde::Deserialize, Debug)]
pub(crate) struct MovingRow {
    pid: u32,
    pub(crate) pages: u64,
    pub(crate) moved_pages: u64,
}

/// Progress of the scrub of a process's pool.
#[derive(serde::Serialize, serde::Deserialize, Debug)]
pub(crate) struct ScrubRow {
    pid: u32,
    pub(crate) looked_pages: u64,
    pub(crate) wrong_pages: u64,
    pub(crate) mended_pages: u64,
    turns: u64,
    /// Seconds since the last turn ended.
    turn_age_s: Option<f64>,
}

/// Redundancy of the data in a process's pool.
#[derive(serde::Serialize, serde::Deserialize, Debug)]
pub(crate) struct ProtectionRow {
    pid: u32,
    pub(crate) missing_legs: u64,
    pub(crate) shared_legs: u64,
    pub(crate) exposed_pages: u64,
    pub(crate) restored_pages: u64,
}

impl PoolRow {
    /// Reads the pool of a job from its control block.
    pub(crate) fn read(control: &ControlBlock) -> PoolRow {
        PoolRow::of(PoolStatus::read(control))
    }

    fn of(status: PoolStatus) -> PoolRow {
        let PoolStatus { epoch, moves, urls, before, moving, degraded, scrubbed, protection, reason, cause } = status;
        let moving =
            moving.iter().map(|one| MovingRow { pid: one.pid, pages: one.pages, moved_pages: one.moved_pages });
        let scrubbed = scrubbed.iter().map(|(pid, done)| ScrubRow {
            pid: *pid,
            looked_pages: done.looked_pages,
            wrong_pages: done.wrong_pages,
            mended_pages: done.mended_pages,
            turns: done.turns,
            turn_age_s: done.turn_age().map(|age| age.as_secs_f64()),
        });
        let protection = protection.iter().map(|(pid, protection)| ProtectionRow {
            pid: *pid,
            missing_legs: protection.missing_legs,
            shared_legs: protection.shared_legs,
            exposed_pages: protection.exposed_pages,
            restored_pages: protection.restored_pages,
        });
        let said = |text: String| (!text.is_empty()).then_some(text);
        PoolRow {
            urls,
            before,
            switches: epoch,
            moves,
            cause: said(cause),
            reason: said(reason),
            moving: moving.collect(),
            degraded,
            scrubbed: scrubbed.collect(),
            protection: protection.collect(),
        }
    }
}

fn render(status: &PoolStatus) -> String {
    let mut text = format!("{}\n", status.urls.join(" "));
    if !status.cause.is_empty() {
        text += &format!("it went there by itself, from {}: {}\n", status.before.join(" "), status.cause);
    }
    for process in &status.moving {
        let (moved, pages) = (process.moved_pages / 256, process.pages.div_ceil(256));
        text += &format!("process {} moves there: {moved} of {pages} MiB\n", process.pid);
    }
    for process in &status.degraded {
        text += &format!("process {process}: a server is lost, silent, or lacks something\n");
    }
    for (process, protection) in &status.protection {
        text += &format!("process {process}: {}\n", protected(protection));
    }
    for (process, scrubbed) in &status.scrubbed {
        text += &format!("process {process}: {}\n", scrub(scrubbed));
    }
    if !status.reason.is_empty() {
        text += &format!("it has come back from {}: {}\n", status.before.join(" "), status.reason);
    }
    text
}

fn protected(protection: &Protection) -> String {
    let Protection { exposed_pages, restored_pages, .. } = protection;
    let how = match protection.is_whole() {
        true => "everything is protected".to_owned(),
        false => format!("up to {exposed_pages} pages are not protected: {}", protection.what_is_missing()),
    };
    format!("{how}; {restored_pages} pages were brought to servers that lacked them")
}

impl PoolRow {
    /// Describes the protection of all processes together in a few words. Returns `None` if the
    /// pool promises no redundancy.
    pub(crate) fn protected(&self) -> Option<String> {
        Some(self.unprotected()?.map_or("protected".to_owned(), |what| format!("NOT PROTECTED, {what}")))
    }

    /// Describes what is not protected, of all processes together: how much at most, and why.
    /// Returns `None` if the pool promises no redundancy, and `Some(None)` if everything is protected.
    pub(crate) fn unprotected(&self) -> Option<Option<String>> {
        let most = |number: fn(&ProtectionRow) -> u64| self.protection.iter().map(number).max();
        let protection = Protection {
            missing_legs: most(|row| row.missing_legs)?,
            shared_legs: most(|row| row.shared_legs)?,
            exposed_pages: self.protection.iter().map(|row| row.exposed_pages).sum(),
            restored_pages: 0,
        };
        let bytes = runner::ByteSize(protection.exposed_pages.saturating_mul(PAGE_BYTES as u64));
        Some((!protection.is_whole()).then(|| format!("up to {bytes}: {}", protection.what_is_missing())))
    }
}

fn scrub(done: &ScrubStats) -> String {
    let ScrubStats { looked_pages, wrong_pages, mended_pages, turns, .. } = done;
    let age = done.turn_age().map_or(String::new(), |age| format!(", the last one {} s ago", age.as_secs()));
    format!("scrub: {looked_pages} pages looked at, {wrong_pages} wrong, {mended_pages} mended; {turns} turns{age}")
}

fn cancel(args: &JobArgs) -> anyhow::Result<()> {
    let (_, control) = find_control(args.pid)?;
    runner::cancel_switch(&control)?;
    tell(format_args!("the job goes back to where it was; `farfield pool status {}` shows how far it is", args.pid))
}
