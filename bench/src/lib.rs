//! The bench harness: experiments are parameter files, one driver, one JSON line a run.
//!
//! [`cli`] is `farfield bench`. Each run executes its baseline (Linux swap under the same limit, or all-near) in turns
//! with what is measured, so that a figure never stands without what it is compared with.
#![cfg(target_os = "linux")]

mod advised;
pub mod bar;
pub mod bar_page;
pub mod built_in;
mod cgroup;
mod child;
mod company;
mod contender;
pub mod driver;
pub mod experiment;
mod fio;
mod front;
mod java;
mod job;
mod limits;
pub mod line;
mod link;
pub mod machine;
pub mod measures;
mod overuse;
mod places;
mod plot;
pub mod press;
mod questions;
mod real_cluster;
pub mod redis_slots;
pub mod report;
mod serve;
mod server;
mod spill;
pub mod stats;
mod stored;
mod swap;
mod switching;
mod sys;
mod tables;
mod undo;
pub mod workload;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use experiment::Experiment;
use farfield::AtServer;
use farfield_bench_functions::with_workloads;
use farfield_wic::Registry;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A contender went wrong: crashed, brought wrong data, or hung.
pub const EXIT_FAILED: i32 = 1;
/// With `--check`: a bar was missed, or could not be checked.
pub const EXIT_BAR_MISSED: i32 = 4;

/// Lock and ledger for what is set up on the machine. Gone after a restart, as is what was set up.
const LEDGER: &str = "/run/farfield-bench";

const EXAMPLES: &str = "\
Examples:
  farfield bench list                     What can be measured
  farfield bench run --quick all          Does everything work? Small sizes, one sample
  farfield bench run paging/ --check      The paging experiments; ends with 4 if a bar is missed
  farfield bench report                   The bars of the newest results, on one page
  farfield bench report --full            All their tables and plots, in target/benchmarks";

/// Measure Farfield against Linux swap and against memory that is all near.
#[derive(Debug, Parser)]
#[command(name = "farfield bench", after_help = EXAMPLES, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Say what can be run.
    List,
    /// Run experiments and append a line for each to the results.
    Run(Run),
    /// Write the page of bars, or all tables and plots of the newest results.
    Report(Report),
    /// Wait for the end of stdin, then undo what a killed run has left behind.
    #[command(hide = true)]
    Keeper,
    /// Keep far memory for a sample, with the functions of the workloads.
    #[command(hide = true)]
    Serve(serve::Serve),
    /// Take as much of one resource of a memory server as it gives, until killed.
    #[command(hide = true)]
    Overuse(overuse::OveruseArgs),
}

#[derive(Debug, Args)]
struct Run {
    /// Names, families (`paging/`), `all`, or paths of parameter files.
    #[arg(required = true)]
    names: Vec<String>,
    /// Small sizes and one sample: does everything work?
    #[arg(long)]
    quick: bool,
    /// Samples of each contender.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Seed of data and order.
    #[arg(long)]
    seed: Option<u64>,
    /// Other values of a parameter: `data_mib=512`, or to sweep `near_percent=10,25,50`.
    #[arg(long, value_name = "NAME=VALUE[,VALUE]", value_parser = assignment)]
    set: Vec<Assignment>,
    /// Only these contenders, and the baseline.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// End with code 4 unless every bar is held.
    #[arg(long)]
    check: bool,
    /// The farfield binary [default: the one beside this program].
    #[arg(long)]
    farfield: Option<PathBuf>,
    /// Folder for result lines [default: bench/results of the tree].
    #[arg(long)]
    results: Option<PathBuf>,
    /// Folder for programs and swap files; on a disk, not tmpfs, for swap-file [default: target of the tree].
    #[arg(long)]
    scratch: Option<PathBuf>,
}

type Assignment = (String, Vec<experiment::Value>);

fn assignment(text: &str) -> Result<Assignment> {
    let (key, values) = text.split_once('=').context("write NAME=VALUE")?;
    let values = values.split(',').map(str::parse).collect::<Result<_, _>>()?;
    Ok((key.to_string(), values))
}

#[derive(Debug, Args)]
struct Report {
    /// All tables and plots, instead of the bars.
    #[arg(long)]
    full: bool,
    /// Folder of result lines [default: bench/results of the tree].
    #[arg(long)]
    results: Option<PathBuf>,
    /// The page to write; plots go beside it [default: docs/benchmarks.md of the tree, with --full
    /// target/benchmarks/benchmarks.md].
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Runs `farfield bench` with the arguments after that word. Gives the exit code.
pub fn cli(args: Vec<String>) -> Result<i32> {
    let named = std::iter::once("farfield bench".to_string()).chain(args);
    match Cli::try_parse_from(named) {
        Ok(cli) => cli.run(),
        Err(error) => {
            error.print()?;
            Ok(error.exit_code())
        }
    }
}

impl Cli {
    /// Does what the command line says. Gives the exit code.
    fn run(self) -> Result<i32> {
        match self.command {
            Command::List => list(),
            Command::Run(run) => run.execute(),
            Command::Keeper => {
                driver::keep(std::io::stdin(), Path::new(LEDGER))?;
                Ok(0)
            }
            Command::Serve(args) => serve::run(args).map(|()| 0),
            Command::Overuse(args) => overuse::run(&args).map(|()| 0),
            Command::Report(report) => {
                let root = tree();
                let results = report.results.unwrap_or(root.join("bench/results"));
                let page = if report.full { "target/benchmarks/benchmarks.md" } else { "docs/benchmarks.md" };
                let output = report.output.unwrap_or(root.join(page));
                if report.full {
                    report::write(&results, &output)?;
                } else {
                    bar_page::write(&results, &output)?;
                }
                note(&format!("wrote {}", output.display()));
                Ok(0)
            }
        }
    }
}

fn list() -> Result<i32> {
    for experiment in built_in::all()? {
        let (points, contenders) = (experiment.points(false)?.len(), experiment.contenders.join(", "));
        say(&format!("{:<20} {}\n{:<20} {points} points, {contenders}\n", experiment.name, experiment.about, ""));
    }
    Ok(0)
}

/// Adds the functions of all workloads to those of a server.
pub fn with_functions(functions: Registry) -> Registry {
    let table = measures::with_measures(with_workloads(functions));
    table.with::<AtServer<press::PressElement>>()
}

/// Prints, and does not mind if nobody reads: the results are in a file.
fn say(text: &str) {
    std::io::stdout().write_all(text.as_bytes()).ok();
}

/// Says on stderr what happens, and does not mind if nobody reads: a run that is cut off cleans up.
pub(crate) fn note(text: &str) {
    writeln!(std::io::stderr(), "{text}").ok();
}

/// The tree of the project that we are in, else the current folder.
fn tree() -> PathBuf {
    let here = std::env::current_dir().unwrap_or_default();
    let tree = here.ancestors().find(|folder| folder.join("bench/experiments").is_dir());
    tree.unwrap_or(&here).to_path_buf()
}

/// Experiments that a name means.
fn select(names: &[String]) -> Result<Vec<Experiment>> {
    let built_in = built_in::all()?;
    let mut selected: Vec<Experiment> = Vec::new();
    for name in names {
        if name.ends_with(".toml") {
            let text = std::fs::read_to_string(name).with_context(|| format!("cannot read {name}"))?;
            selected.push(Experiment::parse(&text).with_context(|| name.clone())?);
            continue;
        }
        let means = |e: &&Experiment| {
            name == "all" || e.name == *name || (name.ends_with('/') && e.name.starts_with(name.as_str()))
        };
        let before = selected.len();
        for experiment in built_in.iter().filter(means) {
            if !selected.iter().any(|s| s.name == experiment.name) {
                selected.push(experiment.clone());
            }
        }
        if selected.len() == before && !built_in.iter().any(|e| means(&e)) {
            bail!("no experiment is called {name}; `farfield bench list` says which there are");
        }
    }
    Ok(selected)
}

impl Run {
    fn execute(self) -> Result<i32> {
        let mut experiments = select(&self.names)?;
        for experiment in &mut experiments {
            experiment.set(&self.set, self.quick)?;
        }
        for name in &self.only {
            contender::known(name)?;
        }
        let root = tree();
        let results = self.results.unwrap_or(root.join("bench/results"));
        let settings = driver::Settings {
            quick: self.quick,
            runs: self.runs,
            seed: self.seed,
            only: self.only,
            farfield: job::find_farfield(self.farfield)?,
            scratch: self.scratch.unwrap_or_else(|| scratch_of(&root)),
            root,
            ledger: PathBuf::from(LEDGER),
            keeper: Some(keeper_command()?),
        };
        let mut code = 0;
        for experiment in &experiments {
            let line = match driver::run(experiment, &settings) {
                Err(error) if error.is::<child::Interrupted>() => {
                    note(&format!("{error}; nothing recorded of {}", experiment.name));
                    return Ok(128 + sys::stop_signal().unwrap_or(2));
                }
                other => other?,
            };
            line::append(&results, &line)?;
            say(&report::summary(&line));
            if report::any_failed(&line) {
                code = EXIT_FAILED;
            } else if self.check && code == 0 && !report::all_bars_held(experiment, &line) {
                code = EXIT_BAR_MISSED;
            }
        }
        Ok(code)
    }
}

/// This program again, as keeper.
fn keeper_command() -> Result<Vec<OsString>> {
    let this = std::env::current_exe().context("cannot find this program")?;
    Ok(vec![this.into_os_string(), "keeper".into()])
}

fn scratch_of(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from).join("bench")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(words: &[&str]) -> Vec<String> {
        let words: Vec<String> = words.iter().map(|w| w.to_string()).collect();
        select(&words).unwrap().into_iter().map(|e| e.name).collect()
    }

    #[test]
    fn names_families_and_all_select() {
        assert_eq!(names(&["paging/scan"]), ["paging/scan"]);
        let families = [
            "paging/",
            "aifm/",
            "atlas/",
            "dmswitcher/",
            "wickit/",
            "gc/",
            "share/",
            "cluster/",
            "serving/",
            "python/",
            "front/",
        ];
        let families = families.map(|family| names(&[family]));
        assert_eq!(families.concat().len(), names(&["all"]).len());
        assert_eq!(names(&["paging/scan", "all"]).len(), names(&["all"]).len());
        assert!(select(&["paging/scam".into()]).is_err());
    }

    #[test]
    fn wrong_arguments_are_an_exit_code_not_a_panic() {
        assert_eq!(cli(vec!["run".into()]).unwrap(), 2);
        assert_eq!(cli(vec!["dance".into()]).unwrap(), 2);
        assert_eq!(cli(vec!["--help".into()]).unwrap(), 0);
        assert!(cli(vec!["run".into(), "paging/none".into()]).is_err());
    }
}
