//! The few system calls that the standard library does not have.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

pub(crate) const PAGE_BYTES: usize = 4096;

/// The signal that asked us to stop; 0 while none did.
static STOP: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_stop(signal: libc::c_int) {
    STOP.store(signal, Ordering::Relaxed);
}

/// From now on Ctrl-C, TERM and HUP only set a flag, so that what was set up is taken down in order.
pub(crate) fn catch_stop_signals() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the zeroed struct is a valid sigaction without flags and with an empty mask; the handler has the right
        // signature and only stores to an atomic, which is async-signal-safe.
        let status = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_stop as *const () as usize;
            libc::sigaction(signal, &action, std::ptr::null_mut())
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The signal that asked us to stop, if any.
pub(crate) fn stop_signal() -> Option<i32> {
    match STOP.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(signal),
    }
}

/// Are we root in effect?
pub(crate) fn is_root() -> bool {
    // SAFETY: takes no argument and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Touches so much new memory, in huge pages where the kernel has them or in small ones, and frees it.
pub(crate) fn touch(bytes: usize, is_huge: bool) -> io::Result<()> {
    let advice = if is_huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, of which only this function knows; every byte that is written lies in it, and it is gone at the end.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A kernel without huge pages refuses either advice, and has only small ones.
        libc::madvise(start, bytes, advice);
        (0..bytes).step_by(PAGE_BYTES).for_each(|at| start.cast::<u8>().add(at).write_volatile(1));
        check(libc::munmap(start, bytes))
    }
}

/// Some of this machine's processors.
#[derive(Clone, Copy)]
pub(crate) struct Processors(libc::cpu_set_t);

impl Processors {
    const NONE: Processors = {
        // SAFETY: a set of bits, of which none is set.
        Processors(unsafe { std::mem::zeroed() })
    };

    /// Those of this process in two parts, the first and the others; `None` if it has one.
    pub(crate) fn two_sides() -> Option<(Processors, Processors)> {
        let mut all = Processors::NONE;
        // SAFETY: the set is writable, and as long as it is said to be.
        check(unsafe { libc::sched_getaffinity(0, size_of_val(&all.0), &mut all.0) }).ok()?;
        let (mut first, mut others) = (Processors::NONE, Processors::NONE);
        // SAFETY: the numbers are those of bits that the set has.
        let mut has = (0..libc::CPU_SETSIZE as usize).filter(|number| unsafe { libc::CPU_ISSET(*number, &all.0) });
        let one = has.next()?;
        let other = has.next()?;
        // SAFETY: as above.
        unsafe {
            libc::CPU_SET(one, &mut first.0);
            std::iter::once(other).chain(has).for_each(|number| libc::CPU_SET(number, &mut others.0));
        }
        Some((first, others))
    }

    /// A thread runs on these only, and so does what it starts; 0 is the calling one.
    fn keep(&self, thread: i32) -> io::Result<()> {
        // SAFETY: the set is readable, and as long as it is said to be.
        check(unsafe { libc::sched_setaffinity(thread, size_of_val(&self.0), &self.0) })
    }

    /// The process of a command runs on these only.
    pub(crate) fn keep_command(self, command: &mut Command) {
        // SAFETY: between fork and exec it makes one system call, and allocates nothing.
        unsafe { command.pre_exec(move || self.keep(0)) };
    }

    /// The threads of a process, and those that they start, run on these only.
    pub(crate) fn keep_process(self, pid: u32) -> io::Result<()> {
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let number = thread?.file_name().to_string_lossy().parse().map_err(io::Error::other)?;
            match self.keep(number) {
                // It has ended meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                result => result?,
            }
        }
        Ok(())
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

fn check(status: libc::c_int) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Starts swapping to a file or device that has a swap header.
pub(crate) fn swap_on(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: the pointer is to a terminated string that lives until the call returns.
    check(unsafe { libc::swapon(path.as_ptr(), 0) })
}

/// Stops swapping to a file or device; reads back what is there.
pub(crate) fn swap_off(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: as in `swap_on`.
    check(unsafe { libc::swapoff(path.as_ptr()) })
}

/// Takes the lock of an open file if nobody has it.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    // SAFETY: the descriptor belongs to `file`, which is borrowed for the call.
    match check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// Kills one process, or with a negative number a process group.
pub(crate) fn kill(process: i32) -> io::Result<()> {
    assert!(process != 0 && process != -1); // Ourselves, and everybody.
    // SAFETY: takes numbers only.
    check(unsafe { libc::kill(process, libc::SIGKILL) })
}

/// Asks a process to end.
pub(crate) fn terminate(process: i32) -> io::Result<()> {
    assert!(process > 1);
    // SAFETY: takes numbers only.
    check(unsafe { libc::kill(process, libc::SIGTERM) })
}

/// How a child ended and what it took, with all of its own children that it waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// Exit code, or 128 + signal.
    pub(crate) code: i32,
    /// The signal that killed it, or 0.
    pub(crate) signal: i32,
    /// CPU time in user mode.
    pub(crate) cpu_user: Duration,
    /// CPU time in the kernel.
    pub(crate) cpu_system: Duration,
    /// Largest resident set of any process in it.
    pub(crate) resident_peak_bytes: u64,
}

/// Why a wait returned without the child's end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Gave {
    /// The deadline passed.
    TimedOut,
    /// A signal asked us to stop.
    Stopped(i32),
}

/// Waits for the end of the child `pid`, at most until `deadline` or a stop signal. Sleeps in the kernel, so that waiting
/// takes nothing from what is measured.
pub(crate) fn wait_for(pid: u32, deadline: Instant) -> io::Result<Result<Ended, Gave>> {
    // SAFETY: takes numbers only; the child is not yet reaped, so that the number means it.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above gave us this descriptor and nobody else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    loop {
        if let Some(signal) = stop_signal() {
            return Ok(Err(Gave::Stopped(signal)));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Err(Gave::TimedOut));
        }
        let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // A signal between the check above and the poll is seen one round later.
        let wait_ms = left.as_millis().clamp(1, 250) as i32;
        // SAFETY: one valid pollfd, as the count says.
        let ready = unsafe { libc::poll(&mut poll, 1, wait_ms) };
        if ready == 1 {
            return reap(pid).map(Ok);
        }
    }
}

fn reap(pid: u32) -> io::Result<Ended> {
    let mut status = 0;
    // SAFETY: an all-zero rusage is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live local values of the right types.
    if unsafe { libc::wait4(pid as i32, &mut status, 0, &mut usage) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let signal = if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 };
    let code = if signal != 0 { 128 + signal } else { libc::WEXITSTATUS(status) };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    Ok(Ended {
        code,
        signal,
        cpu_user: time(usage.ru_utime),
        cpu_system: time(usage.ru_stime),
        resident_peak_bytes: usage.ru_maxrss as u64 * 1024,
    })
}

/// Forgets the largest resident set that this process had, as far as it is larger than the present one. The kernel counts it as
/// that of a child, too, which begins in our memory: without this every sample would have the peak of the warm-up before it.
pub(crate) fn forget_resident_peak() -> io::Result<()> {
    std::fs::write("/proc/self/clear_refs", "5")
}

/// Collects a child that was just killed.
pub(crate) fn reap_killed(pid: u32) {
    reap(pid).ok(); // A killed process ends; nobody reads how.
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sides_have_processors_of_their_own() {
        let Some((one, others)) = Processors::two_sides() else { return };
        let of = |processors: Processors| {
            let mut command = Command::new("grep");
            command.args(["Cpus_allowed:", "/proc/self/status"]);
            processors.keep_command(&mut command);
            let output = command.output().unwrap();
            let mask = String::from_utf8(output.stdout).unwrap().replace("Cpus_allowed:", "").replace(',', "");
            u128::from_str_radix(mask.trim(), 16).unwrap()
        };
        let (one, others) = (of(one), of(others));
        assert!(one.count_ones() == 1 && others != 0 && one & others == 0, "{one:x} {others:x}");
    }
}
