//! System calls that only a runner needs: starting a program unchanged, signals, waiting.
//!
//! They go through libc, not the gate: the runner is an ordinary process without a filter.

use crate::limits;
use core::mem::MaybeUninit;
use core::time::Duration;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Signals that the runner takes itself: those that it passes on, and SIGCHLD.
const TAKEN: [libc::c_int; 10] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGCONT,
    libc::SIGCHLD,
];

/// Signals as the runner found them, so that the program gets them unchanged. They stay taken when
/// this is dropped: this process is about to end with the program's exit code, and a late ^C must
/// not change that.
pub(super) struct Signals {
    mask: libc::sigset_t,
    child: libc::sighandler_t,
    tty_out: libc::sighandler_t,
    pipe: libc::sighandler_t,
    fd: OwnedFd,
}

/// Signal that arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Signal {
    pub(super) number: libc::c_int,
    /// True if the signal came from the kernel: a key or a hang-up, which the whole process group
    /// gets.
    pub(super) from_terminal: bool,
}

impl Signals {
    /// Takes the signals: from now on they wait for [`Signals::next`]. `pipe_ignored` says whether
    /// SIGPIPE was ignored when this process started (the Rust runtime ignores it before `main`).
    pub(super) fn take(pipe_ignored: bool) -> io::Result<Signals> {
        let taken = set_of(&TAKEN);
        let mut mask = MaybeUninit::uninit();
        // SAFETY: both sets are valid for the call; the old mask is written.
        if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &taken, mask.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: written by the successful call above.
        let mask = unsafe { mask.assume_init() };
        // An inherited "ignore" would reap our children behind our back.
        // SAFETY: default and ignore run no code of ours.
        let child = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        // SIGTTOU is ignored so that a summary written from the background does not stop us.
        // SAFETY: as above.
        let tty_out = unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
        let pipe = if pipe_ignored { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: a valid set, a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &taken, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        Ok(Signals { mask, child, tty_out, pipe, fd: owned(fd)? })
    }

    /// Returns the next signal that has arrived, if any. Does not block.
    pub(super) fn next(&self) -> Option<Signal> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: room for exactly one record.
        let read = unsafe { libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size) };
        if read != size as isize {
            return None;
        }
        // SAFETY: the kernel has written the whole record.
        let info = unsafe { info.assume_init() };
        Some(Signal { number: info.ssi_signo as i32, from_terminal: info.ssi_code == libc::SI_KERNEL })
    }

    pub(super) fn fd(&self) -> libc::c_int {
        self.fd.as_raw_fd()
    }

    /// Restores everything that `take` changed. Makes only calls that are safe between `fork` and
    /// `exec`.
    fn restore(&self) {
        // SAFETY: dispositions as they were found, none of them a handler of ours; a valid mask.
        unsafe {
            libc::signal(libc::SIGCHLD, self.child);
            libc::signal(libc::SIGTTOU, self.tty_out);
            libc::signal(libc::SIGPIPE, self.pipe);
            libc::sigprocmask(libc::SIG_SETMASK, &self.mask, core::ptr::null_mut());
        }
    }
}

fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set, `sigaddset` takes valid signal numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &signal in signals {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Limits on address space and data, as the runner found them ([`limits::RESOURCES`]).
pub(super) struct SavedRlimits([libc::rlimit; 2]);

impl SavedRlimits {
    /// Takes these limits off this process and its children. The program is an exception: it gets
    /// them beside what we reserve in it. Where a hard limit forbids that, fails with the limit and
    /// its bytes.
    pub(super) fn lift() -> Result<SavedRlimits, (libc::__rlimit_resource_t, u64)> {
        let none = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        let mut found = [none; 2];
        for (found, resource) in found.iter_mut().zip(limits::RESOURCES) {
            // SAFETY: valid structs in and out.
            let is_lifted = unsafe {
                libc::getrlimit(resource, found) != 0
                    || (found.rlim_cur == none.rlim_cur && found.rlim_max == none.rlim_max)
                    || libc::setrlimit(resource, &none) == 0
            };
            if !is_lifted {
                return Err((resource, found.rlim_max));
            }
        }
        Ok(SavedRlimits(found))
    }

    /// Gives this process, which becomes the program, its limits. Makes only calls that are safe
    /// between `fork` and `exec`.
    fn restore(&self) {
        for (found, resource) in self.0.iter().zip(limits::RESOURCES) {
            // SAFETY: a valid struct. Lowering a limit cannot fail.
            unsafe { libc::setrlimit(resource, &limits::to_kernel(resource, *found)) };
        }
    }
}

/// Starts `path` in the same process group, with signals as the runner found them, and with these
/// limits if any are given. Fails with the error of `exec`.
pub(super) fn spawn(
    path: &CStr,
    argv: &[CString],
    envp: &[CString],
    signals: &Signals,
    limits: Option<&SavedRlimits>,
) -> io::Result<u32> {
    let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
        texts.iter().map(|text| text.as_ptr()).chain([core::ptr::null()]).collect()
    };
    let (argv, envp) = (pointers(argv), pointers(envp));
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (reader, writer) = (owned(ends[0])?, owned(ends[1])?);
    // SAFETY: the child makes only async-signal-safe calls before `exec` or `_exit`, on memory
    // prepared above.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if pid == 0 {
        signals.restore();
        if let Some(limits) = limits {
            limits.restore();
        }
        // SAFETY: zero-terminated strings in null-terminated arrays; `errno` is read at once; four
        // bytes are written from a live integer.
        unsafe {
            libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr());
            let error = *libc::__errno_location();
            libc::write(writer.as_raw_fd(), (&raw const error).cast(), 4);
            libc::_exit(127);
        }
    }
    drop(writer);
    let mut error = [0; 4];
    // The other end closes on a successful exec, so the read ends at once either way.
    match io::Read::read_exact(&mut std::fs::File::from(reader), &mut error) {
        Ok(()) => {
            wait_for(pid as u32);
            Err(io::Error::from_raw_os_error(i32::from_ne_bytes(error)))
        }
        Err(_) => Ok(pid as u32),
    }
}

/// State change of a child, as `waitid` reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitStatus {
    Exited(i32),
    Killed(i32),
    Stopped(i32),
    /// The child asked to be traced by us, its parent, and has met this signal.
    Trapped(i32),
}

/// Returns the next state change of one of our children, and the child's pid; `None` if there is
/// none now. A child that ended is reaped. Fails when there are no children at all.
pub(super) fn next_change() -> io::Result<Option<(u32, WaitStatus)>> {
    let flags = libc::WEXITED | libc::WSTOPPED | libc::WNOHANG;
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: room for one record.
        if unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), flags) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: zeroed, then written by the kernel; `waitid` fills the fields of SIGCHLD.
        let (pid, status, code) = unsafe {
            let info = info.assume_init();
            (info.si_pid(), info.si_status(), info.si_code)
        };
        let change = match code {
            _ if pid == 0 => return Ok(None),
            libc::CLD_EXITED => WaitStatus::Exited(status),
            libc::CLD_KILLED | libc::CLD_DUMPED => WaitStatus::Killed(status),
            libc::CLD_STOPPED => WaitStatus::Stopped(status),
            libc::CLD_TRAPPED => WaitStatus::Trapped(status),
            _ => continue,
        };
        return Ok(Some((pid as u32, change)));
    }
}

/// Lets a child that asked to be traced go on with the signal that it has met, as if nobody traced
/// it.
pub(super) fn go_on(pid: u32, signal: i32) {
    // A traced process gets this signal when it executes a program.
    let signal = if signal == libc::SIGTRAP { 0 } else { signal };
    let nowhere = core::ptr::null_mut::<libc::c_void>();
    // SAFETY: touches no memory of ours. If it fails the process has ended.
    unsafe { libc::ptrace(libc::PTRACE_CONT, pid as libc::pid_t, nowhere, libc::c_long::from(signal)) };
}

/// Reaps one child that is about to end by itself.
fn wait_for(pid: u32) {
    // SAFETY: no status wanted.
    while unsafe { libc::waitpid(pid as i32, core::ptr::null_mut(), 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Checks whether any child besides `except` has not ended yet. (Only exact while `except` lives.)
pub(super) fn has_children(except: Option<u32>) -> bool {
    let path = "/proc/thread-self/children";
    let children = std::fs::read_to_string(path).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()).any(|pid| Some(pid) != except)
}

pub(super) fn kill(pid: u32, signal: libc::c_int) -> io::Result<()> {
    // Number 0, and numbers that would become negative, address whole groups.
    let Some(pid) = i32::try_from(pid).ok().filter(|&pid| pid > 0) else {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    };
    // SAFETY: sends a signal, touches no memory.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a signal to the process that `pidfd` names, even if its number belongs to another process
/// by now.
pub(super) fn pidfd_signal(pidfd: &OwnedFd, signal: libc::c_int) -> io::Result<()> {
    let (fd, none) = (pidfd.as_raw_fd(), core::ptr::null::<libc::siginfo_t>());
    // SAFETY: sends a signal, reads no memory.
    match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, none, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the processor time that all threads of a process have used; `None` if it is gone.
pub(super) fn processor_time(pid: u32) -> Option<Duration> {
    // Number 0 would be this process.
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 0)?;
    let (mut clock, mut time) = (0, MaybeUninit::<libc::timespec>::uninit());
    // SAFETY: room for a clock's number and for a time; the time is read only after success.
    let time = unsafe {
        let is_read =
            libc::clock_getcpuclockid(pid, &mut clock) == 0 && libc::clock_gettime(clock, time.as_mut_ptr()) == 0;
        is_read.then(|| time.assume_init())?
    };
    Some(Duration::new(time.tv_sec.try_into().ok()?, time.tv_nsec.try_into().ok()?))
}

/// Returns the state letter of a process in `/proc`; `None` if it is gone.
pub(super) fn state(pid: u32) -> Option<u8> {
    fields(pid)?.trim_start().bytes().next()
}

/// Returns the parent of a process; `None` if it is gone.
pub(super) fn parent(pid: u32) -> Option<u32> {
    fields(pid)?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Returns the fields of `/proc/PID/stat` behind the name: state, parent, …
fn fields(pid: u32) -> Option<String> {
    // A name may consist of any bytes.
    let text = String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?).into_owned();
    // The name is in parentheses and may itself contain some.
    Some(text.rsplit(')').next()?.to_owned())
}

/// Locks a file for the open file description until that is closed. Returns false if another one
/// has the lock.
pub(super) fn try_lock(file: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: numbers only.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(true),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            error => Err(error),
        },
    }
}

/// Checks whether a signal has stopped the process.
pub(super) fn is_stopped(pid: u32) -> bool {
    state(pid) == Some(b'T')
}

/// Opens a descriptor that becomes readable when the process ends.
pub(super) fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers, gives a new descriptor.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as libc::c_int)
}

/// Makes orphans of the job children of this process, so that we see them end.
pub(super) fn become_subreaper() {
    // SAFETY: sets a flag of this process. It cannot fail on any kernel that we run on.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
}

/// Raises the descriptor limit of this process to its hard limit. Called after the program was
/// started, which keeps its own limit.
pub(super) fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid struct in and out. If it fails we live with fewer descriptors.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// Waits until a descriptor is readable or `timeout` has passed (at most a minute). Writes into
/// `ready` which are, in the order of `fds`.
pub fn poll(fds: &[libc::c_int], timeout: Duration, ready: &mut Vec<bool>) {
    let mut polled: Vec<libc::pollfd> =
        fds.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    // The time is rounded up, so that a wait for a fraction of a millisecond is not a busy loop.
    let millis = timeout.as_micros().div_ceil(1000).min(60_000) as libc::c_int;
    // SAFETY: a slice of valid records. On an error (EINTR) no record is ready.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis) };
    ready.clear();
    ready.extend(polled.iter().map(|fd| fd.revents != 0));
}

/// Checks whether `fd` is a terminal on which a progress line disturbs nobody: in line mode, and
/// with us in its foreground.
pub(super) fn is_quiet_terminal(fd: BorrowedFd<'_>) -> bool {
    let fd = fd.as_raw_fd();
    let mut modes = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: room for the modes; read only after success.
    unsafe {
        libc::tcgetattr(fd, modes.as_mut_ptr()) == 0
            && modes.assume_init().c_lflag & libc::ICANON != 0
            && libc::tcgetpgrp(fd) == libc::getpgrp()
    }
}

/// Returns the width of the terminal in columns; 80 if it is not known.
pub(super) fn columns(fd: BorrowedFd<'_>) -> usize {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: room for the answer.
    let known = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCGWINSZ, &mut size) } == 0 && size.ws_col > 0;
    if known { usize::from(size.ws_col) } else { 80 }
}

/// Ends this process by `signal`, as the program ended, without a second core file. Exits with 128
/// + `signal` if that fails.
pub fn die_by(signal: i32) -> ! {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let set = set_of(&[signal]);
    // SAFETY: no memory is touched but the live structs above; the default action runs no code of
    // ours.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &none);
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::signal(signal, libc::SIG_DFL);
        libc::sigprocmask(libc::SIG_UNBLOCK, &set, core::ptr::null_mut());
        libc::raise(signal);
    }
    std::process::exit(128 + signal)
}
