//! Processes, threads and time.

use crate::errno::{Errno, Result};
use crate::file;
use crate::gate::syscall;
use core::time::Duration;

/// Returns the id of this process.
pub fn pid() -> i32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { crate::gate::syscall_raw(libc::SYS_getpid as usize, [0; 6]) as i32 }
}

/// Placeholder for an identity that cannot be found out.
pub const UNKNOWN_IDENTITY: u64 = 1;
/// File system of pidfds since Linux 6.9, whose inode numbers are never used again.
const PID_FS: u64 = 0x5049_4446;
/// Bit that marks identities that are not inode numbers.
const HASHED: u64 = 1 << 63;

/// Returns a number that no other process of this machine has, in any pid namespace, nor had since
/// the machine started.
///
/// The number is the inode of the pidfd, or before Linux 6.9 a hash of pid namespace, pid and start
/// time. It is [`UNKNOWN_IDENTITY`] if the kernel tells neither.
pub fn identity() -> u64 {
    let pidfd = open_pidfd(pid() as u32);
    let identity = pidfd.ok().and_then(identity_of_pidfd);
    if let Ok(pidfd) = pidfd {
        file::close(pidfd);
    }
    identity.or_else(|| identity_by_start(&"self")).unwrap_or(UNKNOWN_IDENTITY)
}

/// Returns the identity of another process: the one that a pidfd names, and that this process sees as `pid`.
pub fn identity_of(pid: u32, pidfd: Option<i32>) -> Option<u64> {
    pidfd.and_then(identity_of_pidfd).or_else(|| identity_by_start(&pid))
}

fn open_pidfd(pid: u32) -> Result<i32> {
    // SAFETY: takes numbers only.
    unsafe { syscall(libc::SYS_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) }.map(|fd| fd as i32)
}

fn identity_of_pidfd(pidfd: i32) -> Option<u64> {
    (file::file_system(pidfd) == Some(PID_FS)).then(|| file::inode(pidfd)).flatten().filter(|inode| *inode < HASHED)
}

fn identity_by_start(process: &dyn core::fmt::Display) -> Option<u64> {
    let namespace = file::open_formatted(format_args!("/proc/{process}/ns/pid")).ok()?;
    let namespace_inode = file::inode(namespace);
    file::close(namespace);
    let (namespace, start, inner) = (namespace_inode?, start_ticks(process)?, inner_pid(process)?);
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    for byte in [namespace, start, u64::from(inner)].iter().flat_map(|number| number.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
    }
    Some(hash | HASHED)
}

/// Returns when a process started, in ticks of the kernel's clock; `process` is a pid or `self`.
pub fn start_ticks(process: &dyn core::fmt::Display) -> Option<u64> {
    let mut text = [0; 1024];
    let len = read_proc(process, "stat", &mut text)?;
    // The name may have spaces and parentheses; behind it comes the third field.
    let name_end = text[..len].iter().rposition(|byte| *byte == b')')?;
    number(text[name_end + 1..len].split(|byte| *byte == b' ').nth(20)?)
}

/// Returns the pid of a process in its own pid namespace, the innermost that it is in.
pub fn inner_pid(process: &dyn core::fmt::Display) -> Option<u32> {
    let mut text = [0; 4096];
    let len = read_proc(process, "status", &mut text)?;
    let line = text[..len].split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"))?;
    number(line.rsplit(|byte| *byte == b'\t').next()?)
}

fn read_proc(process: &dyn core::fmt::Display, name: &str, into: &mut [u8]) -> Option<usize> {
    let fd = file::open_formatted(format_args!("/proc/{process}/{name}")).ok()?;
    let len = file::read(fd, into);
    file::close(fd);
    len.ok()
}

fn number<T: core::str::FromStr>(digits: &[u8]) -> Option<T> {
    core::str::from_utf8(digits).ok()?.trim().parse().ok()
}

/// Returns the id of this thread.
pub fn tid() -> i32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { crate::gate::syscall_raw(libc::SYS_gettid as usize, [0; 6]) as i32 }
}

/// Checks whether a thread with this id exists, in this process or in one that shares its memory.
/// (It may also be in a stranger: ids are used again.)
pub fn thread_exists(tid: i32) -> bool {
    // SAFETY: signal 0 only asks.
    let result = unsafe { syscall(libc::SYS_tkill, [tid as usize, 0, 0, 0, 0, 0]) };
    result != Err(Errno(libc::ESRCH))
}

/// Checks whether the effective user or group of this thread differs from the real one.
pub fn is_of_two_users() -> bool {
    // SAFETY: no arguments, cannot fail.
    let [uid, euid, gid, egid] = [libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid]
        .map(|call| unsafe { crate::gate::syscall_raw(call as usize, [0; 6]) });
    uid != euid || gid != egid
}

/// Runs `action` with access to this process's own files in `/proc`. A process that has changed its
/// user does not have that access by itself. (Others of its new user have it for that moment too.)
pub fn while_dumpable<T>(action: impl FnOnce() -> T) -> T {
    // SAFETY: numbers only.
    let set =
        |dumpable: usize| unsafe { syscall(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as usize, dumpable, 0, 0, 0, 0]) };
    let _ = set(1);
    let result = action();
    let _ = set(0);
    result
}

/// Sends a signal to this thread.
pub fn send_to_self(signal: i32) {
    // SAFETY: numbers only.
    let _ = unsafe { syscall(libc::SYS_tgkill, [pid() as usize, tid() as usize, signal as usize, 0, 0, 0]) };
}

/// Kills the process that has this pid, if it is the one that is meant, and waits until it has ended, up to this time.
/// `is_meant` is asked while no other process can get the pid unnoticed.
pub fn kill(pid: u32, within: Duration, is_meant: impl FnOnce() -> bool) {
    let Ok(pidfd) = open_pidfd(pid) else { return };
    if is_meant() {
        // SAFETY: numbers only; without a description of the signal it is as by `kill`.
        let sent =
            unsafe { syscall(libc::SYS_pidfd_send_signal, [pidfd as usize, libc::SIGKILL as usize, 0, 0, 0, 0]) };
        if sent.is_ok() {
            wait_readable(pidfd, within);
        }
    }
    file::close(pidfd);
}

/// Ends the whole process at once, without running anything else of the program.
pub fn exit_group(code: i32) -> ! {
    loop {
        // SAFETY: does not return.
        let _ = unsafe { syscall(libc::SYS_exit_group, [code as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Yields the processor to other threads.
pub fn yield_now() {
    // SAFETY: no arguments.
    let _ = unsafe { syscall(libc::SYS_sched_yield, [0; 6]) };
}

/// Sleeps; may return early when a signal arrives.
pub fn sleep(duration: Duration) {
    let time = timespec(duration);
    // SAFETY: `time` is readable, no remainder is asked for.
    let _ = unsafe { syscall(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

/// Sleeps until `fd` is readable or `timeout` has passed.
pub fn wait_readable(fd: i32, timeout: Duration) {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let time = timespec(timeout);
    // SAFETY: both structures are readable, `poll` writable; no mask is given.
    let _ = unsafe { syscall(libc::SYS_ppoll, [&raw mut poll as usize, 1, &raw const time as usize, 0, 0, 0]) };
}

/// Returns the monotonic time in nanoseconds.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable. libc's clock_gettime is the vDSO's: no system call, async-signal-safe.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the processor time that all threads of this process have used, in nanoseconds.
pub fn cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Returns the processor time that the calling thread has used, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    if cfg!(miri) {
        // Miri makes no system calls, and knows no processor time.
        return now_ns();
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    let _ = unsafe { syscall(libc::SYS_clock_gettime, [clock as usize, &raw mut time as usize, 0, 0, 0, 0]) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Resources that this process has used so far, over all threads.
#[derive(Clone, Copy, Debug)]
pub struct ResourceUsage {
    /// Processor time in user and kernel, in nanoseconds.
    pub cpu_ns: u64,
    /// Major page faults: those for which something was read.
    pub faults_major: u64,
    /// Minor page faults: all others.
    pub faults_minor: u64,
}

/// Returns the resources that this process has used so far.
pub fn usage() -> ResourceUsage {
    usage_of(libc::RUSAGE_SELF)
}

/// Returns the resources that children of this process had used which have ended and were waited for,
/// with their own children.
pub fn usage_of_ended_children() -> ResourceUsage {
    usage_of(libc::RUSAGE_CHILDREN)
}

fn usage_of(who: i32) -> ResourceUsage {
    // SAFETY: rusage is plain numbers; all-zero is valid.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    // SAFETY: `usage` is writable.
    let _ = unsafe { syscall(libc::SYS_getrusage, [who as usize, &raw mut usage as usize, 0, 0, 0, 0]) };
    let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000;
    ResourceUsage {
        cpu_ns: ns(usage.ru_utime) + ns(usage.ru_stime),
        faults_major: usage.ru_majflt as u64,
        faults_minor: usage.ru_minflt as u64,
    }
}

/// Returns the number of page faults that the kernel served for this process so far.
pub fn faults() -> u64 {
    let usage = usage();
    usage.faults_minor + usage.faults_major
}

/// Counter of the threads of this process; each count is one system call.
#[derive(Debug)]
pub struct ThreadCount(i32);

impl ThreadCount {
    /// Opens the descriptor that the counter reads.
    pub fn open() -> Result<ThreadCount> {
        file::open(c"/proc/self/task", libc::O_RDONLY | libc::O_DIRECTORY).map(ThreadCount)
    }

    /// Wraps a descriptor that was moved.
    pub fn from_fd(fd: i32) -> ThreadCount {
        ThreadCount(fd)
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> i32 {
        self.0
    }

    /// Returns the number of threads, including those that are about to end. The directory has one
    /// link for each thread, besides its own two. `None` if the number cannot be found out.
    pub fn count(&self) -> Option<u64> {
        file::links(self.0)?.checked_sub(2)
    }
}

pub(crate) fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

/// Makes a blank thread-control block at `storage`. Code that runs with it must not use
/// thread-locals that need the dynamic loader.
///
/// # Safety
/// The 48 bytes there must be the caller's.
pub unsafe fn begin_storage(storage: usize) {
    // SAFETY: by the caller. Word 0 and 2 of the x86-64 control block point to itself.
    unsafe {
        *(storage as *mut usize) = storage;
        *((storage + 16) as *mut usize) = storage;
        // Word 5 is the stack protector's canary: any value does.
        *((storage + 40) as *mut usize) = 0x5afe_c0de_5afe_c000;
    }
}

/// Starts a thread that shares everything with this process but that the C library does not know
/// of. It runs on the stack below `top`, with the thread-control block at `storage`
/// ([`begin_storage`]), and inherits the signal mask. Returns its id. Usable in a signal handler.
///
/// # Safety
/// Stack and block must be the thread's, for good. `entry` must never return, and must keep to what
/// the block allows.
pub unsafe fn spawn_on(top: usize, storage: usize, entry: extern "C" fn(usize) -> !, argument: usize) -> Result<i32> {
    let (stack, block) = ((top - 64) & !15, storage);
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_SETTLS;
    // SAFETY: stack and control block are its own; `entry` by the caller.
    unsafe { clone_into(crate::gate::address(), [flags as usize, stack, 0, 0, block], entry, argument) }
}

/// Calls `clone` with these five arguments, which contain `CLONE_VM` and a stack. The new thread or
/// process begins in `entry`. The call is made at `gate`, which is `syscall; ret`. Usable in a
/// signal handler.
///
/// # Safety
/// The stack must be 16-byte aligned and nobody else's; `entry` must never return, and must live
/// with the thread-local storage that the arguments give it.
pub unsafe fn clone_into(
    gate: usize,
    args: [usize; 5],
    entry: extern "C" fn(usize) -> !,
    argument: usize,
) -> Result<i32> {
    let result: isize;
    // SAFETY: the new thread leaves the gate by its `ret`, to the address that was put on its
    // stack. It takes entry and argument from registers, which clone copies; it never comes back
    // here. The block may use the stack, so the call hits no red zone.
    unsafe {
        core::arch::asm!(
            "lea rax, [rip + 3f]",
            "sub rsi, 8",
            "mov qword ptr [rsi], rax",
            "mov eax, {number}",
            "call {gate}",
            "jmp 2f",
            "3:",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            number = const libc::SYS_clone,
            gate = in(reg) gate,
            out("rax") result,
            in("rdi") args[0],
            inout("rsi") args[1] => _,
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r12") entry as usize,
            in("r13") argument,
            out("rcx") _, out("r11") _,
        );
    }
    Errno::from_raw(result).map(|id| id as i32)
}

#[cfg(test)]
mod tests {
    //! Danger: two processes that are taken for one, or one that is taken for another.
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_and_whoever_looks_at_it_agree_on_its_identity() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pidfd = open_pidfd(pid() as u32).unwrap();
        assert_eq!(identity_of(pid() as u32, Some(pidfd)), Some(identity()));
        file::close(pidfd);
        // Kernels before 6.9 have nothing but this.
        let own = identity_by_start(&"self");
        assert!(own.is_some() && own == identity_by_start(&pid()));
        assert_ne!(own, identity_by_start(&child.id()));
        assert_eq!(inner_pid(&child.id()), Some(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(identity_by_start(&child.id()), None);
    }

    #[test]
    fn a_name_full_of_parentheses_does_not_hide_the_start() {
        // `comm` of the thread that the test runs in is not that of the process: the process's own is changed.
        let before = start_ticks(&"self");
        let own = std::fs::read("/proc/self/comm").unwrap();
        std::fs::write("/proc/self/comm", ") 1 2 (").unwrap();
        let after = start_ticks(&"self");
        std::fs::write("/proc/self/comm", own).unwrap();
        assert!(before.is_some() && before == after);
    }
}
