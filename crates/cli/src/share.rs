//! `farfield share`: programs of several processes with shared memory.

mod status;

pub(crate) use status::NodeRow;

use crate::serve::{duration, is_open_to_others};
use crate::size::Size;
use anyhow::{Context, ensure};
use clap::{Args, Subcommand};
use farfield_core::dsm::{LaunchOrder, LaunchRole};
use farfield_pager::runner::machine;
use farfield_server::ListenUrl;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Run a program that uses the library farfield-dsm as several processes with one shared heap.
#[derive(Args, Debug)]
pub(crate) struct ShareArgs {
    #[command(subcommand)]
    command: ShareCommand,
}

#[derive(Subcommand, Debug)]
enum ShareCommand {
    Run(Box<ShareRunArgs>),
    Status(status::ShareStatusArgs),
    Explain(status::ShareExplainArgs),
}

/// Start a program on several nodes: processes of this machine, and of others that join.
///
/// The first process runs the program; the others run its tasks. What is not said here is as the program says it
/// (`NodeBuilder`). The exit code is the program's. All nodes run the same file.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
struct ShareRunArgs {
    /// Number of nodes, on all machines together
    #[arg(long, value_name = "N", conflicts_with = "join")]
    nodes: Option<u16>,
    /// Number of those that are processes of this machine [default: all; with --listen: one]
    #[arg(long, value_name = "N", conflicts_with = "join")]
    here: Option<u16>,
    /// URL at which nodes of other machines join: tcp://HOST:PORT
    #[arg(long, value_name = "URL", conflicts_with = "join")]
    listen: Option<ListenUrl>,
    /// Be a node of the program whose first process listens there
    #[arg(long, value_name = "URL")]
    join: Option<ListenUrl>,
    /// Memory of each node for objects and copies: 4G, or 25% of this machine's
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    near: Option<Size>,
    /// Tasks that a node runs at a time
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Time of silence after which a node counts as dead, 2s or more
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "join")]
    expel_after: Option<Duration>,
    /// Memory server that keeps backups of all nodes but the first: tcp://HOST:PORT or unix:PATH; several of them, of
    /// which one has to be left: 'mirror(URL,URL)'
    #[arg(long, value_name = "URL", conflicts_with = "join")]
    backup: Option<String>,
    /// File whose first line is the token for that server [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE", requires = "backup")]
    backup_token_file: Option<PathBuf>,
    /// Servers of etcd that decide which nodes live, so that no node is special: http://HOST:2379, or
    /// 'https://USER:PASSWORD@HOST:2379?ca=FILE&cert=FILE&key=FILE', or several with commas. If the first process dies,
    /// the next one runs the program. With --join: as this machine reaches them
    #[arg(long, value_name = "URL,…")]
    etcd: Option<String>,
    /// File whose first line is the secret of the program's nodes [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Longest wait for nodes of other machines, or for the first process
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "5m")]
    wait: Duration,
    /// The program and its arguments
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  farfield share run --nodes 3 -- ./simulate grid.toml    Three processes on this machine
  farfield share run --nodes 3 --listen tcp://0.0.0.0:7410 --token-file secret -- ./simulate grid.toml
                                                          One process here, and two that join
  farfield share run --join tcp://big:7410 --token-file secret -- ./simulate grid.toml
                                                          Such a process, on another machine
  farfield share run --nodes 3 --backup tcp://mem:7400 -- ./simulate grid.toml
                                                          What a node has handed over outlives it
  farfield share run --nodes 3 --etcd http://etcd:2379 --backup tcp://mem:7400 -- ./simulate grid.toml
                                                          Any of them may die, the first one, too
  farfield share status                                   Which nodes run on this machine
  farfield share explain 4711                             What the tasks of process 4711's program wait for

A secret is made by: head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n' > secret; chmod 600 secret";

/// Runs the subcommand.
pub(crate) fn run(args: ShareArgs) -> ExitCode {
    match args.command {
        ShareCommand::Run(args) => {
            let Err(error) = start(*args);
            crate::say(&format!("{error:#}"));
            ExitCode::from(farfield_pager::control::exit::REFUSED as u8)
        }
        ShareCommand::Status(args) => crate::finish(status::status(&args)),
        ShareCommand::Explain(args) => crate::finish(status::explain(&args)),
    }
}

/// Becomes the program, with an order in its environment.
fn start(args: ShareRunArgs) -> anyhow::Result<std::convert::Infallible> {
    let token = crate::token::read(args.token_file.as_deref())?;
    let token = String::from_utf8(token).context("a token is text")?;
    let others = args.listen.as_ref().or(args.join.as_ref());
    ensure!(
        !token.is_empty() || others.is_none_or(|url| !is_open_to_others(url)),
        "nodes of several machines know each other by a secret: give all of them the same --token-file FILE"
    );
    let backup_token = match &args.backup {
        Some(_) => {
            String::from_utf8(crate::token::read(args.backup_token_file.as_deref())?).context("a token is text")?
        }
        None => String::new(),
    };
    let role = match &args.join {
        Some(first) => LaunchRole::Joined { first: tcp_url(first, "--join")? },
        None => LaunchRole::First {
            nodes: args.nodes,
            here: args.here.or(args.listen.as_ref().map(|_| 1)),
            listen: args.listen.as_ref().map(|url| tcp_url(url, "--listen")).transpose()?,
        },
    };
    let order = LaunchOrder {
        process: std::process::id(),
        role,
        near_bytes: args.near.map(|size| size.bytes(machine::memory_bytes())),
        workers: args.workers,
        expel_after: args.expel_after,
        token: (!token.is_empty()).then_some(token),
        etcd: args.etcd,
        backup: args.backup,
        backup_token: (!backup_token.is_empty()).then_some(backup_token),
        wait: args.wait,
    };
    let [program, arguments @ ..] = &args.program[..] else { anyhow::bail!("no program") };
    let mut command = Command::new(program);
    command.args(arguments).env(LaunchOrder::VARIABLE, serde_json::to_string(&order)?);
    // Only an error returns.
    Err(command.exec()).with_context(|| format!("cannot start {}", program.display()))
}

fn tcp_url(url: &ListenUrl, option: &str) -> anyhow::Result<String> {
    match url {
        ListenUrl::Tcp(address) => Ok(format!("tcp://{address}")),
        ListenUrl::Tls(_) | ListenUrl::Unix(_) => {
            anyhow::bail!("{option}: nodes meet at a port: write tcp://HOST:PORT")
        }
    }
}
