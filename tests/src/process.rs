//! Processes with a deadline, whose descendants are found whatever they do.
//!
//! Each command gets a mark in its environment and a process group of its own. Whoever has the mark or the group belongs to it: servers
//! that made themselves daemons have the first, programs that cleaned their environment the second. All stay in one session: the kernel shares
//! processors out between sessions, not always fairly (docs/design/testing.md).

use crate::usual_deadline;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const MARK: &str = "FARFIELD_TEST_MARK";
/// Addresses that the pager gives to programs: what lies here is far-capable.
const WINDOW: std::ops::Range<u64> = 0x1_0000_0000..0x2c00_0000_0000;

/// A command to run with a deadline.
#[derive(Clone, Debug)]
pub struct Command {
    /// Program and arguments.
    pub words: Vec<OsString>,
    /// Where it runs, and where its output goes.
    pub folder: PathBuf,
    /// Added to the environment.
    pub environment: Vec<(OsString, OsString)>,
    /// Standard input; empty if none.
    pub input: Option<PathBuf>,
    /// When it is killed and the test fails.
    pub deadline: Duration,
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code, 128 + N for signal N.
    pub code: i32,
    /// Its standard output, as a file.
    pub output: PathBuf,
    /// Its standard error.
    pub errors: String,
    /// From start to end.
    pub wall: Duration,
    /// Of the processors, by the command and its descendants that were waited for.
    pub cpu: Duration,
    /// Largest resident set of the command or of a descendant it waited for.
    pub peak_rss_bytes: u64,
    /// Its mark, for [`marked_processes`].
    pub mark: String,
}

impl Command {
    /// A command in `folder`, with the usual deadline.
    pub fn new(folder: &Path, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        Command {
            words: words.into_iter().map(|word| word.as_ref().to_owned()).collect(),
            folder: folder.to_owned(),
            environment: Vec::new(),
            input: None,
            deadline: usual_deadline(),
        }
    }

    /// With another deadline.
    pub fn within(mut self, deadline: Duration) -> Command {
        self.deadline = deadline;
        self
    }

    /// With a variable of the environment.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Command {
        self.environment.push((name.into(), value.as_ref().to_owned()));
        self
    }

    /// Starts it.
    #[allow(clippy::zombie_processes, reason = "`Running` waits by process id, with wait4, for the usage")]
    pub fn start(&self) -> Running {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{number}", std::process::id());
        let output = self.folder.with_extension(format!("{number}.out"));
        let errors = self.folder.with_extension(format!("{number}.err"));
        let create = |path: &Path| File::create(path).expect("room in the scratch folder");
        let input = match &self.input {
            Some(path) => File::open(path).expect("the input exists"),
            None => File::open("/dev/null").expect("/dev/null exists"),
        };
        let mut command = std::process::Command::new(&self.words[0]);
        command.args(&self.words[1..]).current_dir(&self.folder);
        command.env(MARK, &mark).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(input).stdout(create(&output)).stderr(create(&errors));
        command.process_group(0);
        // SAFETY: `signal` is async-signal-safe, which is all that code between fork and exec must be.
        unsafe {
            command.pre_exec(|| {
                // Who started the tests in the background may have them ignore these.
                for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            });
        }
        let started = Instant::now();
        let child =
            command.spawn().unwrap_or_else(|error| panic!("{} does not start: {error}", self.words[0].display()));
        let pid = child.id() as i32;
        // SAFETY: a system call with two integers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32;
        assert!(fd >= 0, "pidfd_open: {}", io::Error::last_os_error());
        // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(fd) };
        let deadline = started + self.deadline;
        Running { pid, pidfd, started, deadline, output, errors, mark, words: self.words.clone(), ended: false }
    }

    /// Runs it to its end. Past the deadline it is killed with all its descendants and the test fails.
    pub fn run(&self) -> Ended {
        self.start().wait()
    }
}

/// A command on its way. Dropped before its end, it is killed.
#[derive(Debug)]
pub struct Running {
    pid: i32,
    pidfd: OwnedFd,
    started: Instant,
    deadline: Instant,
    output: PathBuf,
    errors: PathBuf,
    mark: String,
    words: Vec<OsString>,
    ended: bool,
}

impl Running {
    /// Process id of the command itself.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Its mark, for [`marked_processes`].
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// What it has written to standard output so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.output).unwrap_or_default()).into_owned()
    }

    /// What it has written to standard error so far.
    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.errors).unwrap_or_default()).into_owned()
    }

    /// Sends a signal to the command itself.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a system call with two integers; `self` has not waited for the process, so the number is still its own.
        unsafe { libc::kill(self.pid, signal) };
    }

    /// Stops the command itself. Returns when all of its threads have stopped: the signal itself only reaches one of them, which
    /// may have to wait for a processor, and the others go on until then.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        // SAFETY: all zeros is a valid `siginfo_t`.
        let mut found: libc::siginfo_t = unsafe { core::mem::zeroed() };
        // SAFETY: an out pointer to a local; without `WEXITED`, the child is not reaped.
        let waited = unsafe { libc::waitid(libc::P_PID, self.pid as u32, &mut found, libc::WSTOPPED) };
        assert_eq!(waited, 0, "{}", io::Error::last_os_error());
    }

    /// Has it ended?
    pub fn is_over(&self) -> bool {
        self.poll(0)
    }

    fn poll(&self, milliseconds: i32) -> bool {
        let mut poll = libc::pollfd { fd: self.pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd that lives through the call.
        unsafe { libc::poll(&mut poll, 1, milliseconds) > 0 }
    }

    /// Until its end, or its deadline.
    pub fn wait(mut self) -> Ended {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() && !self.is_over() {
                self.fail_late();
            }
            if self.poll(left.as_millis().clamp(1, 1000) as i32) {
                break;
            }
        }
        let mut status = 0;
        // SAFETY: all zeros is a valid rusage.
        let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
        // SAFETY: two out pointers to locals of the right types.
        let waited = unsafe { libc::wait4(self.pid, &mut status, 0, &mut usage) };
        assert_eq!(waited, self.pid, "wait4: {}", io::Error::last_os_error());
        self.ended = true;
        let code = match libc::WIFEXITED(status) {
            true => libc::WEXITSTATUS(status),
            false => 128 + libc::WTERMSIG(status),
        };
        Ended {
            code,
            output: self.output.clone(),
            errors: self.errors(),
            wall: self.started.elapsed(),
            cpu: [usage.ru_utime, usage.ru_stime]
                .map(|time| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000))
                .iter()
                .sum(),
            peak_rss_bytes: usage.ru_maxrss as u64 * 1024,
            mark: self.mark.clone(),
        }
    }

    fn fail_late(&self) -> ! {
        let mut places = String::new();
        for pid in self.family() {
            places += &describe(pid);
        }
        let words: Vec<_> = self.words.iter().map(|word| word.to_string_lossy()).collect();
        // `drop` kills what is left.
        panic!(
            "not ended within {:?}: {}\n{places}last output: {}\nlast errors: {}",
            self.deadline - self.started,
            words.join(" "),
            tail(&self.output()),
            tail(&self.errors())
        );
    }

    fn family(&self) -> Vec<i32> {
        processes_where(|pid| has_mark(pid, &self.mark) || group_of(pid) == Some(self.pid))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        for pid in self.family() {
            // SAFETY: a system call with two integers.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        // SAFETY: as above; the last argument may be null.
        unsafe { libc::waitpid(self.pid, core::ptr::null_mut(), 0) };
    }
}

impl Ended {
    /// Its standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.output).expect("the output was captured")).into_owned()
    }
}

/// The last lines of a text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Where a process hangs, for failures.
fn describe(pid: i32) -> String {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let state = read("status").lines().find(|line| line.starts_with("State")).unwrap_or("").to_owned();
    let mut text = format!("  {pid} {} {state}\n", read("comm").trim());
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten().take(20) {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        text += &format!("    {} in {} at {}\n", read("comm").trim(), read("wchan"), read("syscall").trim());
    }
    text
}

fn processes_where(is_wanted: impl Fn(i32) -> bool) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").expect("/proc is mounted");
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| is_alive(pid) && is_wanted(pid)).collect()
}

/// Runs or sleeps; a zombie has ended, only nobody has asked yet.
fn is_alive(pid: i32) -> bool {
    stat_fields(pid).is_some_and(|fields| !matches!(fields.first().map(String::as_str), None | Some("Z" | "X")))
}

fn group_of(pid: i32) -> Option<i32> {
    stat_fields(pid)?.get(2)?.parse().ok()
}

/// `/proc/PID/stat` after the name: state, parent, group, session …
fn stat_fields(pid: i32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = text.rsplit_once(") ")?.1;
    Some(after_name.split(' ').map(str::to_owned).collect())
}

fn has_mark(pid: i32, mark: &str) -> bool {
    let wanted = format!("{MARK}={mark}");
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|&byte| byte == 0).any(|entry| entry == wanted.as_bytes())
}

/// Living processes that were started by the command with this mark, or by its descendants.
pub fn marked_processes(mark: &str) -> Vec<i32> {
    processes_where(|pid| has_mark(pid, mark))
}

/// Kills those of them that are called `name`: children of a program are its own business, also when they run for ever.
pub fn kill_marked(mark: &str, name: &str) {
    for pid in marked_processes(mark) {
        if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name) {
            // SAFETY: a system call with two integers; the process carries the mark of this test.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
}

/// Near bytes of far-capable memory of these processes as the kernel counts them: proportional set size of all mappings
/// in the pager's window. `None` when a process has none (it ended, or never had far-capable memory).
pub fn window_pss_bytes(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    let mut inside = false;
    let mut total = None;
    for line in text.lines() {
        let first = line.split(' ').next().unwrap_or("");
        if let Some((start, _)) = first.split_once('-') {
            let start = u64::from_str_radix(start, 16).unwrap_or(0);
            inside = WINDOW.contains(&start);
        } else if inside && first == "Pss:" {
            let kib: u64 = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
            *total.get_or_insert(0) += kib * 1024;
        }
    }
    total
}
