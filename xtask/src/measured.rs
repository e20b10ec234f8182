//! A command with its time and its largest resident set.

use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::{Duration, Instant};

/// How a command ran.
pub(crate) struct Measured {
    pub(crate) wall: Duration,
    pub(crate) peak_rss_bytes: u64,
}

/// Runs a command that must succeed.
#[allow(clippy::zombie_processes, reason = "wait4 below waits, and gives the usage too")]
pub(crate) fn run(command: &mut Command) -> Result<Measured> {
    let started = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let mut status = 0;
    // SAFETY: all zeros is a valid rusage.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    // SAFETY: two out pointers to locals of the right types.
    let waited = unsafe { libc::wait4(child.id() as i32, &mut status, 0, &mut usage) };
    ensure!(waited == child.id() as i32, "wait4: {}", std::io::Error::last_os_error());
    let succeeded = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
    ensure!(succeeded, "{} failed (status {status:#x})", command.get_program().display());
    // Linux counts it in KiB.
    Ok(Measured { wall: started.elapsed(), peak_rss_bytes: usage.ru_maxrss as u64 * 1024 })
}
