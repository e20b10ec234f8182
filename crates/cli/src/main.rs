//! The farfield command.

mod address;
mod advise;
mod agent;
mod bench;
mod cert;
mod cluster;
mod doctor;
mod gate;
mod keep;
mod log;
mod metrics;
mod near;
mod notice;
#[cfg(feature = "pages")]
mod pages;
mod pipe;
mod plan;
mod pool;
mod profile;
mod run;
mod serve;
mod server_stat;
mod share;
mod sim;
mod size;
mod token;
mod top;

use clap::{Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;

/// More memory than the machine has: run programs with far memory, keep far memory, look at both.
#[derive(Parser, Debug)]
#[command(name = "farfield", version, after_help = EXAMPLES, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  farfield doctor                                         Will it work here?
  farfield run --near 4G -- ./train --epochs 3            4 GiB near, the rest far, in a private server on this machine
  farfield serve --listen tcp://0.0.0.0:7400 --capacity 64G --token-file tokens
  farfield run --near 25% --far tcp://big:7400 -- ./train  the rest in the memory of the machine called big
  farfield top 4711                                       What process 4711 does with its far memory
  farfield profile -- ./train                             How ./train uses its memory
  farfield share run --nodes 3 -- ./simulate              Three processes with one heap
  farfield sim run rack                                   What far memory would do for a cluster
  farfield plan ours.toml                                 Which memory to buy for it, or none";

#[derive(Subcommand, Debug)]
enum Command {
    Run(run::RunArgs),
    Keep(keep::KeepArgs),
    Profile(profile::ProfileArgs),
    Advise(advise::AdviseArgs),
    Serve(serve::ServeArgs),
    Cert(cert::CertArgs),
    Top(top::TopArgs),
    Share(share::ShareArgs),
    Near(near::NearArgs),
    Pool(pool::PoolArgs),
    Agent(agent::AgentArgs),
    Cluster(cluster::ClusterArgs),
    Gate(gate::GateArgs),
    Doctor(doctor::DoctorArgs),
    Bench(bench::BenchArgs),
    Sim(sim::SimArgs),
    Plan(plan::PlanArgs),
    #[cfg(feature = "pages")]
    #[command(hide = true)]
    Pages(pages::PagesArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return misused(&error),
    };
    match cli.command {
        Command::Run(args) => run::run(args),
        Command::Keep(args) => keep::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Advise(args) => finish(advise::run(&args)),
        Command::Serve(args) => finish(serve::run(args)),
        Command::Cert(args) => finish(cert::run(&args)),
        Command::Top(args) => top::run(args),
        Command::Share(args) => share::run(args),
        Command::Near(args) => finish(near::run(&args)),
        Command::Pool(args) => pool::run(args),
        Command::Agent(args) => finish(agent::run(args)),
        Command::Cluster(args) => finish(cluster::run(args)),
        Command::Gate(args) => finish(gate::run(args)),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => finish(bench::run(&args)),
        Command::Sim(args) => finish(sim::run(&args)),
        Command::Plan(args) => finish(plan::run(&args)),
        #[cfg(feature = "pages")]
        Command::Pages(args) => finish(pages::run(&args)),
    }
}

/// Prints help, the version, or a usage error, and returns the exit code: 0 for help and version, 2
/// for an error. Under `run` and `profile`, where 2 could be the program's own code, an error
/// returns the code for a program that was not started.
fn misused(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    let run = std::env::args_os().nth(1).is_some_and(|word| word == "run" || word == "keep" || word == "profile");
    match error.use_stderr() {
        true if run => ExitCode::from(farfield_pager::control::exit::REFUSED as u8),
        true => ExitCode::from(2),
        false => ExitCode::SUCCESS,
    }
}

/// Returns 0, or prints the error to stderr and returns 1.
fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes a line to stderr. `eprintln!` is not used, because it panics if stderr is closed.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("farfield: {text}\n").as_bytes());
}
