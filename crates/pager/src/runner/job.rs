//! Runs one job from start to end.

use super::agent::{AgentOptions, AgentRegistration};
use super::budget::{self, BudgetDriver, SloOptions};
use super::placement::PlacementDriver;
use super::pool::PoolStatus;
use super::protection::ProtectionWatch;
use super::report::{self, ByteSize, PagerFailure, Report, ReportFile};
use super::server::{PrivateServer, check_interrupted};
use super::slot_monitor::SlotMonitor;
use super::sys::{self, Signals, WaitStatus};
use super::{
    ControlBlock, JobRefusal, JobTotals, NearStatus, RunnerBlock, Settings, create_control, far, history, machine,
    near, pool, preload, program, requests, watched,
};
use crate::config::{Capture, ENV_CONTROL};
use crate::control::{FaultMode, believed, exit};
use farfield_core::policy::budget_controller::WINDOW;
use farfield_core::policy::cluster::{FinishedRun, HistoryPoint};
use farfield_os::{process, serving};
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval between two sweeps of the slots, in which sizes are sampled too.
const SWEEP_EVERY: Duration = Duration::from_millis(50);
/// Interval between two updates of the progress line.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// Time after which far memory that nobody has joined is not kept any longer.
const JOIN_WITHIN: Duration = Duration::from_secs(60);
/// Time that an orphan of the job may take to show that it uses far memory.
const ORPHAN_GRACE: Duration = Duration::from_millis(250);

/// Options of `farfield run`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Near budget of the job in bytes; with `hold` the most that it may become.
    pub near_limit_bytes: u64,
    /// Least near memory, in bytes, that anybody may offer the job while it runs.
    pub near_least_bytes: u64,
    /// Agent that gives the job its budget and its pool, instead of `near_limit_bytes` and `far`.
    pub agent: Option<AgentOptions>,
    /// Slowdown to hold by changing the budget while the job runs.
    pub hold: Option<SloOptions>,
    /// Pools between which the job may move while it runs, with `hold`. The first is `far`; with
    /// fewer than two the job does not move.
    pub places: Vec<String>,
    /// Way in which faults are served.
    pub mode: FaultMode,
    /// Whether memory lies in huge pages until some of it has to leave.
    pub huge_pages: bool,
    /// Which memory of the program becomes far-capable.
    pub capture: Capture,
    /// Pool URLs; empty for a private server.
    pub far: Vec<String>,
    /// Token for the servers; empty if none.
    pub token: Vec<u8>,
    /// Path of the report.
    pub report: Option<PathBuf>,
    /// Whether to print no progress line and no summary; refusals and failures are still printed.
    pub quiet: bool,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Path of the library that is loaded into the program.
    pub preload: PathBuf,
    /// The `farfield` executable, for `serve --private`.
    pub farfield: PathBuf,
    /// Whether SIGPIPE was ignored when this process started.
    pub pipe_ignored: bool,
}

/// Way in which this process should end, so that its parent sees what the program did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProgramExit {
    /// Exit with this code.
    Code(i32),
    /// Die by this signal: call [`super::die_by`].
    Signal(i32),
}

impl ProgramExit {
    /// Returns the exit code as a shell shows it.
    pub fn exit_code(self) -> i32 {
        match self {
            ProgramExit::Code(code) => code,
            ProgramExit::Signal(signal) => 128 + signal,
        }
    }
}

/// A process that runs already, and for which this process is the runner.
struct KeptProcess<'a> {
    pid: u32,
    /// Descriptor that is readable when the process has ended.
    pidfd: OwnedFd,
    /// Called with the blocks of the job once they are ready for the process.
    ready: &'a dyn Fn(&ControlBlock),
}

/// Runs the program with far memory. Blocks until it and all its far-memory children have ended.
pub fn run(options: &Options) -> Result<ProgramExit, JobRefusal> {
    run_job(options, None)
}

/// Keeps far memory for process `pid`, which runs already and is of this user: the runner without a
/// program. Calls `ready` when the process may join the job, and blocks until the process and all
/// its far-memory children have ended. `options.command` is for the report alone. Returns the exit
/// code of a process that ended because of us, else 0: the process's own is not known here.
pub fn keep(options: &Options, pid: u32, ready: &dyn Fn(&ControlBlock)) -> Result<ProgramExit, JobRefusal> {
    let refusal = |error| JobRefusal::NoProcess { pid, error };
    let pidfd = sys::pidfd(pid).map_err(refusal)?;
    let owner = std::fs::metadata(format!("/proc/{pid}")).map_err(refusal)?.uid();
    if owner != serving::effective_uid() {
        return Err(JobRefusal::OtherUser { pid });
    }
    run_job(options, Some(KeptProcess { pid, pidfd, ready }))
}

fn run_job(options: &Options, kept: Option<KeptProcess<'_>>) -> Result<ProgramExit, JobRefusal> {
    if std::env::var_os(ENV_CONTROL).is_some() {
        return Err(JobRefusal::Nested);
    }
    for bytes in [options.near_limit_bytes, options.near_least_bytes] {
        if bytes < machine::NEAR_BYTES_MIN {
            return Err(JobRefusal::NearTooSmall { bytes });
        }
    }
    if options.near_limit_bytes < options.near_least_bytes {
        let (bytes, least_bytes) = (options.near_limit_bytes, options.near_least_bytes);
        return Err(JobRefusal::NearBelowLeast { bytes, least_bytes });
    }
    let program = if kept.is_none() { Some(program::find(&options.command)?) } else { None };
    machine::check_kernel()?;
    let mut urls = far::resolve(&options.far)?;
    let places = far::resolve(&options.places)?;
    let report = options.report.as_deref().map(ReportFile::create).transpose()?;
    let os = |what| move |error| JobRefusal::Os { what, error };
    let limits = sys::SavedRlimits::lift().map_err(|(resource, bytes)| JobRefusal::Limit { resource, bytes })?;
    let signals = Signals::take(options.pipe_ignored).map_err(os("signals"))?;
    let mut token = options.token.clone();
    let register = |agent| AgentRegistration::begin(agent, !token.is_empty(), &signals);
    let registration = options.agent.as_ref().map(register).transpose()?;
    if let Some(given) = registration.as_ref().filter(|given| !given.urls.is_empty()) {
        urls = far::resolve(&given.urls)?;
        // The pool is the agent's. A job with a token of its own is the tenant of that token.
        if token.is_empty() {
            token = given.token.clone();
        }
    }
    let server = match urls.is_empty() {
        true => {
            if token.is_empty() {
                // The server checks the token and not the user, because the user of a process may
                // change.
                token = random_token().map_err(os("random bits"))?;
            }
            Some(PrivateServer::start(&options.farfield, &token, options.quiet, &signals)?)
        }
        false => None,
    };
    let urls = server.as_ref().map_or(urls, |server| vec![server.url()]);
    let promised = far::check(&urls, &token, serving::effective_uid())?;
    let mut budget_driver = options.hold.map(|hold| BudgetDriver::new(&hold, options.near_limit_bytes));
    let near_limit_bytes = budget_driver.as_ref().map_or(options.near_limit_bytes, BudgetDriver::near_bytes);
    let (mode, huge_pages, capture) = (options.mode, options.huge_pages, options.capture);
    let settings = Settings { near_limit_bytes, mode, huge_pages, capture, urls: urls.clone(), token };
    let control = create_control(&settings).map_err(os("control block"))?;
    let config = control.config();
    config.near_offer_bytes.store(options.near_limit_bytes, Ordering::Relaxed);
    config.near_least_bytes.store(options.near_least_bytes, Ordering::Relaxed);
    config.server_pid.store(server.as_ref().map_or(0, PrivateServer::pid), Ordering::Relaxed);
    control.set_places(&places).map_err(os("pools"))?;
    let placement_driver = options.hold.filter(|_| places.len() > 1);
    let placement_driver = placement_driver.map(|hold| PlacementDriver::new(&hold, places, settings.token));
    sys::become_subreaper();
    let registration = match registration {
        Some(registration) => {
            registration.publish(&control)?;
            let tell = |text: &str| {
                if !options.quiet {
                    say(text)
                }
            };
            Some(registration.wait_for_start(&control, &signals, tell)?)
        }
        None => None,
    };
    near::take_offer(&control, budget_driver.as_mut());
    check_interrupted(&signals)?;
    let started = Instant::now();
    let pid = match (&program, &kept) {
        (Some(program), _) => {
            let environment = environment(&options.preload, &control);
            sys::spawn(&program.path, &program.argv, &environment, &signals, Some(&limits))
                .map_err(|error| JobRefusal::NotExecutable { path: PathBuf::from(&options.command[0]), error })?
        }
        (None, Some(kept)) => {
            config.kept_pid.store(kept.pid, Ordering::Relaxed);
            (kept.ready)(&control);
            kept.pid
        }
        (None, None) => unreachable!("what is not kept is started"),
    };
    sys::raise_descriptor_limit();
    let mut protection = ProtectionWatch::new(started);
    if let Some(said) = protection.look(started, promised).filter(|_| !options.quiet) {
        say(&said);
    }
    let mut job = RunningJob {
        protection,
        control,
        signals,
        server,
        pid,
        kept: kept.map(|kept| kept.pidfd),
        slot_monitor: SlotMonitor::new(),
        budget_driver,
        placement_driver,
        near_limit_max_bytes: 0,
        _registration: registration,
        near: TimeWeightedMean::new(started),
        limit: TimeWeightedMean::new(started),
        peak_bytes: 0,
        tables_peak_bytes: 0,
        progress: JobProgressLine::new(options.quiet, started),
        ended: None,
        ended_at: None,
        forwarded_stop: false,
        told_to_stop: 0,
    };
    job.wait();
    Ok(job.finish(options, started, urls, report))
}

/// Returns a random token, which only processes of one job know.
fn random_token() -> std::io::Result<Vec<u8>> {
    let mut bits = [0; 16];
    serving::fill_random(&mut bits)?;
    Ok(bits.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()).collect())
}

/// Name of the variable with the token of the servers, for commands of ours. The program does not
/// get it: the token is in the configuration.
const ENV_TOKEN: &str = "FARFIELD_TOKEN";

/// Returns the environment for the program: ours with two variables changed, and without the token.
fn environment(library: &std::path::Path, control: &ControlBlock) -> Vec<CString> {
    let preloaded = preload::prepended(library, std::env::var_os("LD_PRELOAD").as_deref());
    let ours = [("LD_PRELOAD", preloaded), (ENV_CONTROL, control.path().into())];
    let is_kept = |name: &OsString| name != ENV_TOKEN && ours.iter().all(|(our_name, _)| name != our_name);
    let kept = std::env::vars_os().filter(|(name, _)| is_kept(name));
    let ours = ours.iter().map(|(name, value)| (OsString::from(name), value.clone()));
    let text = |(name, value): (OsString, OsString)| {
        CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).expect("the kernel gives no zeros")
    };
    kept.chain(ours).map(text).collect()
}

struct RunningJob {
    protection: ProtectionWatch,
    control: RunnerBlock,
    signals: Signals,
    server: Option<PrivateServer>,
    pid: u32,
    /// Descriptor that is readable when the process has ended, if it is not our child.
    kept: Option<OwnedFd>,
    slot_monitor: SlotMonitor,
    budget_driver: Option<BudgetDriver>,
    placement_driver: Option<PlacementDriver>,
    /// Most that the budget was allowed to be so far.
    near_limit_max_bytes: u64,
    /// Connection to the agent of the node, open as long as the job runs.
    _registration: Option<AgentRegistration>,
    near: TimeWeightedMean,
    /// Mean of the budget.
    limit: TimeWeightedMean,
    /// Largest sum so far, in bytes, of memory that was near and that was stored far: the job had no more.
    peak_bytes: u64,
    /// Largest sum in bytes of our own tables, buffers and stacks so far.
    tables_peak_bytes: u64,
    progress: JobProgressLine,
    /// Way in which the program ended, once it has.
    ended: Option<ProgramExit>,
    ended_at: Option<Instant>,
    /// True if we passed a stop signal on; when the program stops, so do we.
    forwarded_stop: bool,
    /// Number of ending signals since the program ended and only its children were left.
    told_to_stop: u32,
}

impl RunningJob {
    /// Serves the job until the program has ended and no process uses far memory any more.
    fn wait(&mut self) {
        let (mut fds, mut ready) = (Vec::new(), Vec::new());
        loop {
            self.take_changes();
            self.look_at_kept(&mut ready);
            self.take_signals();
            self.slot_monitor.sweep(&self.control);
            requests::answer(&self.control);
            near::take_offer(&self.control, self.budget_driver.as_mut());
            self.near_limit_max_bytes = self.near_limit_max_bytes.max(NearStatus::read(&self.control).near_offer_bytes);
            pool::look_for_failures(&self.control);
            if self.ended.is_none() {
                let [near, far] = [&self.control.near_bytes, &self.control.far_bytes].map(|it| believed(it).max(0));
                self.near.add(near as f64);
                self.limit.add(self.control.config().near_limit() as f64);
                self.peak_bytes = self.peak_bytes.max((near + far) as u64);
            }
            self.adjust();
            self.look_at_tables();
            self.tell_protection();
            if self.is_over() {
                break;
            }
            self.progress.update(&self.control);
            fds.clear();
            fds.push(self.signals.fd());
            fds.extend(self.kept.iter().filter(|_| self.ended.is_none()).map(AsRawFd::as_raw_fd));
            self.slot_monitor.descriptors(&mut fds);
            let every = if self.budget_driver.is_some() { SWEEP_EVERY.min(WINDOW) } else { SWEEP_EVERY };
            sys::poll(&fds, every, &mut ready);
        }
        self.progress.erase();
    }

    /// Notes the end of a process that is not our child, or that it has not joined.
    fn look_at_kept(&mut self, ready: &mut Vec<bool>) {
        let Some(pidfd) = self.kept.as_ref().filter(|_| self.ended.is_none()) else { return };
        sys::poll(&[pidfd.as_raw_fd()], Duration::ZERO, ready);
        let is_joined = self.control.processes.load(Ordering::Relaxed) > 0;
        if ready[..] == [true] || (!is_joined && self.near.started.elapsed() > JOIN_WITHIN) {
            self.ended = Some(ProgramExit::Code(0));
            self.ended_at = Some(Instant::now());
        }
    }

    /// Adjusts budget and pool so that the job keeps within its slowdown.
    fn adjust(&mut self) {
        let Some(budget_driver) = &mut self.budget_driver else { return };
        let window = budget_driver.update(&self.control, || JobTotals::read(&self.control), self.slot_monitor.pids());
        let (Some(window), Some(placement_driver)) = (window, &mut self.placement_driver) else { return };
        if let Some(said) = placement_driver.update(&self.control, &window).filter(|_| !self.progress.quiet) {
            self.progress.erase();
            say(&said);
        }
    }

    /// Notes what our own tables, buffers and stacks take of the budget, and tells the user once
    /// when that is too much. They cannot leave, and the part that exceeds half of the budget is
    /// near beside the budget.
    fn look_at_tables(&mut self) {
        let tables = believed(&self.control.meta_bytes).max(0) as u64;
        self.tables_peak_bytes = self.tables_peak_bytes.max(tables);
        let near = self.control.config().near_limit() as u64;
        if tables > near / 2 && self.progress.tell_tables() {
            self.progress.erase();
            let processes = self.slot_monitor.pids().count();
            say(&format!(
                "tables and stacks for far memory, of {processes} processes, take {} of the {} near and cannot leave: \
                 with more of them, more is near than that",
                ByteSize(tables),
                ByteSize(near)
            ));
        }
    }

    /// Tells the user when far memory is not protected as its pool promises, and when it is again.
    fn tell_protection(&mut self) {
        let said = self.protection.update(Instant::now(), || PoolStatus::read(&self.control));
        if let Some(said) = said.filter(|_| !self.progress.quiet) {
            self.progress.erase();
            say(&said);
        }
    }

    fn is_over(&mut self) -> bool {
        let Some(ended_at) = self.ended_at else {
            return false;
        };
        let left = self.slot_monitor.pids().count();
        if left == 0 {
            // A daemon that has just been forked may not have a slot yet.
            let server = self.server.as_ref().map(PrivateServer::pid);
            let has_orphans = self.kept.is_some() || sys::has_children(server);
            return ended_at.elapsed() > ORPHAN_GRACE || !has_orphans;
        }
        if self.progress.tell_waiting(left) {
            self.progress.erase();
            let plural =
                if left == 1 { "process that it started still uses" } else { "processes that it started still use" };
            say(&format!("the program has ended; {left} {plural} far memory, waiting (press ^C to stop)"));
        }
        self.told_to_stop >= 2
    }

    fn take_changes(&mut self) {
        while let Ok(Some((pid, change))) = sys::next_change() {
            if let WaitStatus::Trapped(signal) = change {
                sys::go_on(pid, signal);
                continue;
            }
            if pid != self.pid {
                self.other_child_changed(pid, change);
                continue;
            }
            match change {
                WaitStatus::Exited(code) => self.ended = Some(ProgramExit::Code(code)),
                WaitStatus::Killed(signal) => self.ended = Some(ProgramExit::Signal(signal)),
                WaitStatus::Stopped(signal) => {
                    self.follow_stop(signal);
                    continue;
                }
                WaitStatus::Trapped(_) => continue,
            }
            self.ended_at = Some(Instant::now());
        }
    }

    fn other_child_changed(&mut self, pid: u32, change: WaitStatus) {
        let Some(server) = self.server.as_mut().filter(|server| server.pid() == pid) else {
            return; // An orphan of the job.
        };
        let how = match change {
            WaitStatus::Stopped(_) | WaitStatus::Trapped(_) => return,
            WaitStatus::Exited(code) => format!("it exited with code {code}"),
            WaitStatus::Killed(signal) => format!("it was killed by signal {signal}"),
        };
        server.note_reaped();
        self.progress.erase();
        say(&format!("the private memory server is gone: {how}"));
    }

    /// Stops this process too when job control has stopped the program, or the shell would go on
    /// waiting for us.
    fn follow_stop(&mut self, signal: i32) {
        let job_control = matches!(signal, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU);
        // Without a terminal nobody would continue us when the program is continued.
        if self.forwarded_stop || (job_control && File::open("/dev/tty").is_ok()) {
            self.forwarded_stop = false;
            // A process that has continued the program meanwhile, through us or with us, will not
            // do so again.
            self.take_signals();
            if !sys::is_stopped(self.pid) {
                return;
            }
            self.progress.erase();
            let _ = sys::kill(std::process::id(), libc::SIGSTOP);
            // We were continued. A shell has continued the whole group; a sender that continued
            // only us meant the program.
            if sys::is_stopped(self.pid) {
                let _ = sys::kill(self.pid, libc::SIGCONT);
            }
        }
    }

    fn take_signals(&mut self) {
        while let Some(signal) = self.signals.next() {
            if signal.number == libc::SIGCHLD {
                continue;
            }
            let ends = matches!(signal.number, libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT);
            if self.ended.is_none() && self.kept.is_some() {
                if ends {
                    self.end_keeping();
                }
            } else if self.ended.is_some() {
                self.told_to_stop += u32::from(ends);
                self.slot_monitor.signal(signal.number);
            } else if !signal.from_terminal {
                // A signal from the terminal has reached the program already: it is in our process
                // group.
                self.forwarded_stop |= signal.number == libc::SIGTSTP;
                let _ = sys::kill(self.pid, signal.number);
            }
        }
    }

    /// Ends the job before its process, unless a process uses far memory: that one would die.
    fn end_keeping(&mut self) {
        self.slot_monitor.sweep(&self.control);
        if self.slot_monitor.pids().next().is_some() {
            say(&format!("process {} still uses far memory: end it first", self.pid));
        } else {
            self.ended = Some(ProgramExit::Code(0));
            self.ended_at = Some(Instant::now());
        }
    }

    fn finish(self, options: &Options, started: Instant, urls: Vec<String>, file: Option<ReportFile>) -> ProgramExit {
        let wall = self.ended_at.unwrap_or_else(Instant::now) - started;
        let program = self.ended.unwrap_or(ProgramExit::Code(0));
        let failure = self.failure();
        let mut report = Report::new(&JobTotals::read(&self.control), wall);
        report.command = options.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        report.mode = report::mode_name(options.mode);
        report.serving = self.slot_monitor.serving();
        report.protection = self.protection.report();
        report.far = urls;
        report.meta_peak_bytes = self.tables_peak_bytes;
        report.near_mean_bytes = self.near.value() as u64;
        report.hold = {
            let moves = self.placement_driver.as_ref().map_or(0, PlacementDriver::moves);
            self.budget_driver.as_ref().map(|budget_driver| budget_driver.report(moves))
        };
        let near = NearStatus::read(&self.control);
        report.near_limit_bytes = self.near_limit_max_bytes;
        report.near_offer_last_bytes = near.near_offer_bytes;
        report.near_limit_last_bytes = near.near_limit_bytes;
        report.exit_code = program.exit_code();
        report.signal = match program {
            ProgramExit::Signal(signal) => Some(signal),
            ProgramExit::Code(_) => None,
        };
        report.failure.clone_from(&failure);
        if !options.quiet {
            tell(&report.summary());
            if self.tables_peak_bytes > self.near_limit_max_bytes / 2 {
                let enough = (2 * self.tables_peak_bytes).div_ceil(1 << 20);
                say(&format!(
                    "its tables and stacks took {} at most: give --near {enough}M",
                    ByteSize(self.tables_peak_bytes)
                ));
            }
        }
        if let Some(agent) = &options.agent
            && let Some(file) = &agent.history
        {
            let is_right = failure.is_none() && program == ProgramExit::Code(0);
            let run = self.finished_run(agent.claim.memory_bytes, is_right.then_some(wall));
            match file.add(&run) {
                Ok(history) if !options.quiet => say(&history::summary(&history, run.memory_bytes)),
                Ok(_) => {}
                Err(error) => {
                    say(&format!("what the run has shown could not be added to {}: {error}", file.0.display()))
                }
            }
        }
        if let Some(file) = file {
            let path = file.path().to_path_buf();
            if let Err(error) = file.write(&report) {
                say(&format!("the report could not be written to {}: {error}", path.display()));
            }
        }
        match failure {
            Some(PagerFailure { exit_code, reason }) => {
                say(&reason);
                if self.kept.is_some() && exit_code == exit::SERVER_LOST {
                    say("far memory at mirror(URL,URL) survives the loss of a server");
                }
                ProgramExit::Code(exit_code)
            }
            None => program,
        }
    }

    /// Returns what the run has shown, after its processes have ended. `took` is absent if it ended with
    /// an error.
    fn finished_run(&self, memory_bytes: u64, took: Option<Duration>) -> FinishedRun {
        let busy_ns = process::usage_of_ended_children().cpu_ns;
        let window = budget::window(&JobTotals::read(&self.control), None, busy_ns);
        // It could have had its budget near, and no more than there was.
        let near_bytes = (self.limit.value() as u64).min(self.peak_bytes);
        let slowdown = HistoryPoint { near_bytes, slowdown: window.slowdown() };
        FinishedRun {
            memory_bytes,
            peak_bytes: self.peak_bytes,
            slowdown: (window.busy_ns >= watched::BUSY_NS_MIN).then_some(slowdown),
            seconds: took.map(|took| took.as_secs_f64()),
        }
    }

    fn failure(&self) -> Option<PagerFailure> {
        // The processes have ended, so a reason that is incomplete stays so.
        let (exit_code, complete) = self.control.failure()?;
        let mut reason = self.control.reason.line();
        if !complete || reason.is_empty() {
            reason = "a process of the job had to stop and died before it could say why".into();
        }
        Some(PagerFailure { exit_code, reason })
    }
}

/// Mean of a value over time.
struct TimeWeightedMean {
    started: Instant,
    last: Instant,
    sum: f64,
}

impl TimeWeightedMean {
    fn new(started: Instant) -> TimeWeightedMean {
        TimeWeightedMean { started, last: started, sum: 0.0 }
    }

    /// Notes that the value has been `value` since the last call.
    fn add(&mut self, value: f64) {
        let now = Instant::now();
        self.sum += value * (now - self.last).as_secs_f64();
        self.last = now;
    }

    fn value(&self) -> f64 {
        self.sum / (self.last - self.started).as_secs_f64().max(1e-9)
    }
}

/// Prints a line on stderr. If stderr is gone, so is its reader.
fn say(text: &str) {
    tell(&format!("farfield: {text}\n"));
}

fn tell(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// State of the progress line and of what was told to the user.
struct JobProgressLine {
    enabled: bool,
    shown: bool,
    told_waiting: bool,
    told_tables: bool,
    quiet: bool,
    started: Instant,
    last: Instant,
    before: Option<JobTotals>,
}

impl JobProgressLine {
    fn new(quiet: bool, started: Instant) -> JobProgressLine {
        let enabled = !quiet && std::io::stderr().is_terminal();
        JobProgressLine {
            enabled,
            shown: false,
            told_waiting: false,
            told_tables: false,
            quiet,
            started,
            last: started,
            before: None,
        }
    }

    fn update(&mut self, control: &ControlBlock) {
        if !self.enabled || self.last.elapsed() < PROGRESS_EVERY {
            return;
        }
        let stderr = std::io::stderr();
        if !sys::is_quiet_terminal(stderr.as_fd()) {
            self.shown = false;
            return;
        }
        let totals = JobTotals::read(control);
        let (seconds, columns) = (self.last.elapsed().as_secs_f64(), sys::columns(stderr.as_fd()));
        let line = report::progress_line(&totals, self.before.as_ref(), seconds, self.started.elapsed(), columns);
        self.last = Instant::now();
        self.before = Some(totals);
        tell(&format!("\r\x1b[2K{line}"));
        self.shown = true;
    }

    fn erase(&mut self) {
        if std::mem::take(&mut self.shown) {
            tell("\r\x1b[2K");
        }
    }

    /// Checks whether the user shall be told now how much tables take; true only once.
    fn tell_tables(&mut self) -> bool {
        !self.quiet && !std::mem::replace(&mut self.told_tables, true)
    }

    /// Checks whether the user shall be told now that children are left; true only once. `left` is
    /// not zero.
    fn tell_waiting(&mut self, left: usize) -> bool {
        assert!(left > 0);
        !self.quiet && !std::mem::replace(&mut self.told_waiting, true)
    }
}
