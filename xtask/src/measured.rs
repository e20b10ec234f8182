//! A command with its time, its processor time and its largest resident set.

use anyhow::{Context, Result, anyhow, ensure};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// How a command ran.
pub(crate) struct Measured {
    pub(crate) wall: Duration,
    pub(crate) peak_rss_bytes: u64,
    /// Processor time of the command and of all processes that it has waited for, in seconds.
    pub(crate) cpu: f64,
    /// `None` if it was killed because its time was over.
    pub(crate) status: Option<ExitStatus>,
}

/// Pause between two looks whether a command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

impl Measured {
    /// Tells a command that succeeded from one that did not, or was killed.
    pub(crate) fn succeeded(self) -> core::result::Result<Measured, Measured> {
        if self.status.is_some_and(|status| status.success()) { Ok(self) } else { Err(self) }
    }
}

/// Runs a command that must succeed.
pub(crate) fn run(command: &mut Command) -> Result<Measured> {
    run_for(command, Duration::MAX)?
        .succeeded()
        .map_err(|measured| anyhow!("{} failed ({:?})", command.get_program().display(), measured.status))
}

/// Runs a command, and kills it after this time.
#[allow(clippy::zombie_processes, reason = "wait4 below waits, and gives the usage too")]
pub(crate) fn run_for(command: &mut Command, patience: Duration) -> Result<Measured> {
    let started = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let id = child.id().cast_signed();
    let mut is_killed = false;
    loop {
        let mut status = 0;
        // SAFETY: all zeros is a valid rusage.
        let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
        // Without a limit nothing but the end is waited for, so the time is exact.
        let options = if is_killed || patience == Duration::MAX { 0 } else { libc::WNOHANG };
        // SAFETY: two out pointers to locals of the right types.
        let waited = unsafe { libc::wait4(id, &raw mut status, options, &raw mut usage) };
        if waited == id {
            let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
            return Ok(Measured {
                wall: started.elapsed(),
                // Linux counts it in KiB.
                peak_rss_bytes: usage.ru_maxrss as u64 * 1024,
                cpu: seconds(usage.ru_utime) + seconds(usage.ru_stime),
                status: (!is_killed).then(|| ExitStatus::from_raw(status)),
            });
        }
        ensure!(waited == 0, "wait4: {}", std::io::Error::last_os_error());
        if started.elapsed() < patience {
            std::thread::sleep(LOOK_EVERY);
        } else {
            // SAFETY: no memory is involved, and the number is still the child's: nobody has waited for it.
            unsafe { libc::kill(id, libc::SIGKILL) };
            is_killed = true;
        }
    }
}
