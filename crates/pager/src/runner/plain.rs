//! A program as it always runs: nothing of ours in it, and somebody who looks at it from outside now and then.

use super::program;
use super::sys::{self, Change, Signals};
use super::{Ended, Refusal};
use std::ffi::{CString, OsString};
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Starts programs without far memory, one after the other. Signals are the programs' from now on.
pub struct PlainRunner {
    signals: Signals,
}

/// How a program went.
#[derive(Clone, Copy, Debug)]
pub struct PlainRun {
    /// How it ended.
    pub ended: Ended,
    /// From its start to its end.
    pub wall: Duration,
    /// It took too long, and was asked to end (SIGTERM).
    pub is_cut: bool,
}

impl PlainRunner {
    /// `pipe_ignored`: was SIGPIPE ignored when this process started?
    pub fn new(pipe_ignored: bool) -> Result<PlainRunner, Refusal> {
        let signals = Signals::take(pipe_ignored).map_err(|error| Refusal::Os { what: "signals", error })?;
        sys::become_subreaper();
        Ok(PlainRunner { signals })
    }

    /// Runs the program, which could have far memory, without it. `look` says when it wants to be called next; it is called
    /// for the first time when the program has been started. A program that takes longer than `most` is asked to end; one that does not is waited for.
    pub fn run(
        &self,
        command: &[OsString],
        most: Duration,
        look: &mut dyn FnMut() -> Duration,
    ) -> Result<PlainRun, Refusal> {
        let program = program::find(command)?;
        let text = |(name, value): (OsString, OsString)| {
            CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).expect("the kernel gives no zeros")
        };
        let environment: Vec<CString> = std::env::vars_os().map(text).collect();
        let started = Instant::now();
        let pid = sys::spawn(&program.path, &program.argv, &environment, &self.signals, None)
            .map_err(|error| Refusal::NotExecutable { path: PathBuf::from(&command[0]), error })?;
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

    /// From the terminal, the program has got them already: it is in our process group.
    fn pass_signals(&self, pid: u32) {
        while let Some(signal) = self.signals.next() {
            if signal.number != libc::SIGCHLD && !signal.from_terminal {
                let _ = sys::kill(pid, signal.number);
            }
        }
    }
}

fn take_changes(program: u32) -> Option<Ended> {
    let mut ended = None;
    while let Ok(Some((pid, change))) = sys::next_change() {
        match change {
            Change::Exited(code) if pid == program => ended = Some(Ended::Code(code)),
            Change::Killed(signal) if pid == program => ended = Some(Ended::Signal(signal)),
            _ => {}
        }
    }
    ended
}

/// How wide a line about the progress of something may be: none where it would disturb.
pub fn progress_columns() -> Option<usize> {
    let stderr = std::io::stderr();
    (stderr.is_terminal() && sys::is_quiet_terminal(stderr.as_fd())).then(|| sys::columns(stderr.as_fd()))
}
