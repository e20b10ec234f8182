//! `farfield-bench serve`: a memory server that has the functions of the workloads, which
//! `farfield serve` does not offer.

use anyhow::Result;
use clap::Args;
use farfield_os::{serving, signals};
use farfield_server::{Config, ListenUrl, Server};
use farfield_wic::Registry;
use std::io::Write;
use std::time::Duration;

/// Time between two checks of whether the driver still lives.
const CHECK_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Where to listen: tcp://HOST:PORT or unix:PATH.
    #[arg(long, value_name = "URL")]
    listen: ListenUrl,
    /// Most memory to keep, in bytes.
    #[arg(long, value_name = "BYTES")]
    capacity: u64,
    /// Ends when its parent is not this process any more.
    #[arg(long, value_name = "PID")]
    parent_pid: i32,
}

/// Serves until a signal or until the parent ends. Prints where the server listens, as one line of
/// JSON, as `farfield serve` does.
pub(crate) fn run(args: Serve) -> Result<()> {
    // Done before there are threads, so that all of them inherit the mask.
    let stop = signals::bit(libc::SIGTERM) | signals::bit(libc::SIGINT) | signals::bit(libc::SIGHUP);
    let parent_died = signals::bit(libc::SIGUSR2);
    signals::set_mask(stop | parent_died);
    serving::signal_when_parent_dies(libc::SIGUSR2)?;
    let server = Server::start(Config {
        listen: vec![args.listen],
        capacity_bytes: Some(args.capacity),
        functions: crate::with_functions(Registry::standard()),
        ..Config::default()
    })?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::json!({ "ready": true, "endpoints": server.endpoints() }))?;
    out.flush()?;
    // The signal only means that it is time to check: the kernel also sends it when the thread ends
    // that started this process.
    while serving::parent_pid() == args.parent_pid {
        match serving::wait_for_signal(stop | parent_died, CHECK_EVERY)? {
            None | Some(libc::SIGUSR2) => {}
            Some(_) => break,
        }
    }
    server.shutdown(Duration::ZERO);
    Ok(())
}
