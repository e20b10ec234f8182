//! Runs a program without far memory: nothing of ours is in it, and a caller looks at it from
//! outside now and then.

use super::program;
use super::sys::{self, Signals, WaitStatus};
use super::{JobRefusal, ProgramExit};
use std::ffi::{CString, OsString};
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Starts programs without far memory, one after the other. From its creation on, signals are
/// passed on to the programs.
pub struct PlainRunner {
    signals: Signals,
}

/// Result of a run.
#[derive(Clone, Copy, Debug)]
pub struct PlainRun {
    /// Way in which the program ended.
    pub ended: ProgramExit,
    /// Time from the start of the program to its end.
    pub wall: Duration,
    /// True if the program took too long, and was asked to end (SIGTERM).
    pub is_cut: bool,
}

impl PlainRunner {
    /// Takes over the signals of this process. `pipe_ignored` says whether SIGPIPE was ignored when
    /// the process started.
    pub fn new(pipe_ignored: bool) -> Result<PlainRunner, JobRefusal> {
        let signals = Signals::take(pipe_ignored).map_err(|error| JobRefusal::Os { what: "signals", error })?;
        sys::become_subreaper();
        Ok(PlainRunner { signals })
    }

    /// Runs the program, which could have far memory, without it. Blocks until it ends.
    ///
    /// `look` returns the time after which it wants to be called next; it is called for the first
    /// time when the program has been started. A program that takes longer than `most` is asked to
    /// end; one that does not is waited for.
    pub fn run(
        &self,
        command: &[OsString],
        most: Duration,
        look: &mut dyn FnMut() -> Duration,
    ) -> Result<PlainRun, JobRefusal> {
        let program = program::find(command)?;
        let text = |(name, value): (OsString, OsString)| {
            CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).expect("the kernel gives no zeros")
        };
        let environment: Vec<CString> = std::env::vars_os().map(text).collect();
        let started = Instant::now();
        let pid = sys::spawn(&program.path, &program.argv, &environment, &self.signals, None)
            .map_err(|error| JobRefusal::NotExecutable { path: PathBuf::from(&command[0]), error })?;
        let mut ready = Vec::new();
        let (mut next, mut is_cut) = (started, false);
        loop {
            if let Some(ended) = take_changes(pid) {
                return Ok(PlainRun { ended, wall: started.elapsed(), is_cut });
            }
            self.pass_signals(pid);
            let now = Instant::now();
            if now >= next {
                next = now + look();
            }
            let left = most.saturating_sub(started.elapsed());
            if left.is_zero() && !is_cut {
                let _ = sys::kill(pid, libc::SIGTERM);
                is_cut = true;
            }
            let until_look = next.saturating_duration_since(Instant::now());
            let wait = if is_cut { until_look } else { until_look.min(left) };
            sys::poll(&[self.signals.fd()], wait, &mut ready);
        }
    }

    /// Passes signals on to the program. Signals from the terminal have reached it already: it is
    /// in our process group.
    fn pass_signals(&self, pid: u32) {
        while let Some(signal) = self.signals.next() {
            if signal.number != libc::SIGCHLD && !signal.from_terminal {
                let _ = sys::kill(pid, signal.number);
            }
        }
    }
}

fn take_changes(program: u32) -> Option<ProgramExit> {
    let mut ended = None;
    while let Ok(Some((pid, change))) = sys::next_change() {
        match change {
            WaitStatus::Exited(code) if pid == program => ended = Some(ProgramExit::Code(code)),
            WaitStatus::Killed(signal) if pid == program => ended = Some(ProgramExit::Signal(signal)),
            _ => {}
        }
    }
    ended
}

/// Returns the width of a progress line in columns; `None` where the line would disturb.
pub fn progress_columns() -> Option<usize> {
    let stderr = std::io::stderr();
    (stderr.is_terminal() && sys::is_quiet_terminal(stderr.as_fd())).then(|| sys::columns(stderr.as_fd()))
}
