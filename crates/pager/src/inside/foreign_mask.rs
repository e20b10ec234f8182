//! Signal masks of threads that exist when far memory is switched on.
//!
//! Some libraries block every signal in threads of their own: libzmq does, and so does each kernel of
//! Jupyter. A fault or a trap of such a thread would kill the program. Only a thread itself can change
//! its mask, or a tracer, and no process can trace its own threads. So a child does it: a copy of this
//! process that stops one thread after the other for a moment (`ptrace`), and ends.

use core::time::Duration;
use farfield_os::{Errno, Result, gate, process};

const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
/// Who may trace this process where the Yama module allows only ancestors (`PR_SET_PTRACER`).
const ANYBODY: usize = usize::MAX;
/// Longest time in all threads. Only one that cannot be stopped takes so long.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two looks whether the child has ended.
const LOOK: Duration = Duration::from_micros(200);

/// Takes `signals` (a bit each) out of the masks of these threads of this process, but not of the
/// caller's. Threads that have ended are left out. Blocks until it is done, for 5 s at most. Fails with
/// EPERM or another error of `ptrace` if this process may not be traced; some masks may be changed then.
pub fn unblock(tids: &[u32], signals: u64) -> Result<()> {
    if tids.is_empty() {
        return Ok(());
    }
    // Without Yama this is EINVAL, and not needed.
    allow_tracer(ANYBODY);
    let unblocked = in_child(tids, signals);
    allow_tracer(0);
    unblocked
}

fn allow_tracer(tracer: usize) {
    // SAFETY: numbers only.
    let _ = unsafe { gate::syscall(libc::SYS_prctl, [libc::PR_SET_PTRACER as usize, tracer, 0, 0, 0, 0]) };
}

fn in_child(tids: &[u32], signals: u64) -> Result<()> {
    // Without a signal at its end, so that the program does not learn of this child.
    // SAFETY: the child has a copy of this memory. It makes system calls alone, and ends.
    let child = unsafe { gate::syscall(libc::SYS_clone, [0; 6]) }?;
    if child == 0 {
        let code = match tids.iter().try_for_each(|&tid| unblock_by_tracing(tid, signals)) {
            Ok(()) => 0,
            Err(Errno(errno)) => errno,
        };
        process::exit_group(code);
    }
    let until = process::now_ns() + PATIENCE.as_nanos() as u64;
    loop {
        let (ended, status) = wait(child, libc::WNOHANG)?;
        match libc::WEXITSTATUS(status) {
            _ if !ended && process::now_ns() < until => process::sleep(LOOK),
            _ if !ended => {
                // SAFETY: numbers only; the child is not reaped yet.
                let _ = unsafe { gate::syscall(libc::SYS_kill, [child, libc::SIGKILL as usize, 0, 0, 0, 0]) };
                wait(child, 0)?;
                return Err(Errno(libc::ETIMEDOUT));
            }
            _ if !libc::WIFEXITED(status) => return Err(Errno(libc::ECHILD)),
            0 => return Ok(()),
            errno => return Err(Errno(errno)),
        }
    }
}

/// Waits for a child, or a thread that is traced. Returns whether there is a change, and its status.
fn wait(pid: usize, flags: i32) -> Result<(bool, i32)> {
    let mut status = 0i32;
    loop {
        let args = [pid, &raw mut status as usize, (flags | libc::__WALL) as usize, 0, 0, 0];
        // SAFETY: `status` is writable.
        match unsafe { gate::syscall(libc::SYS_wait4, args) } {
            Err(Errno(libc::EINTR)) => {}
            result => return result.map(|found| (found != 0, status)),
        }
    }
}

/// Stops a thread, changes its mask and lets it go on, as its tracer.
fn unblock_by_tracing(tid: u32, signals: u64) -> Result<()> {
    let mut mask = 0u64;
    let address = &raw mut mask as usize;
    let ptrace = |request: libc::c_uint, size: usize, data: usize| {
        // SAFETY: `mask` has the size that the requests for masks are given; the others use numbers only.
        unsafe { gate::syscall(libc::SYS_ptrace, [request as usize, tid as usize, size, data, 0, 0]) }
    };
    let traced = || {
        ptrace(libc::PTRACE_SEIZE, 0, 0)?;
        ptrace(libc::PTRACE_INTERRUPT, 0, 0)?;
        let (_, status) = wait(tid as usize, 0)?;
        if !libc::WIFSTOPPED(status) {
            return Ok(()); // It has ended.
        }
        ptrace(PTRACE_GETSIGMASK, size_of::<u64>(), address)?;
        // SAFETY: the kernel has written it; nobody else has the address now.
        unsafe { *(address as *mut u64) &= !signals };
        ptrace(PTRACE_SETSIGMASK, size_of::<u64>(), address)?;
        // A signal that was on its way when the thread stopped goes on to it.
        let is_ours = status >> 16 == libc::PTRACE_EVENT_STOP;
        let signal = if is_ours { 0 } else { libc::WSTOPSIG(status) };
        ptrace(libc::PTRACE_DETACH, 0, signal as usize).map(drop)
    };
    match traced() {
        Err(Errno(libc::ESRCH)) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a thread keeps its mask and is killed by its first far page, or is left stopped.
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn signals_of_other_threads_are_unblocked_and_the_threads_go_on() {
        let (said, hears) = channel();
        let (go, going) = channel::<()>();
        let own = |how: i32, set: u64| {
            let mut old = 0u64;
            let args = [how as usize, &raw const set as usize, &raw mut old as usize, 8, 0, 0];
            // SAFETY: both are masks of eight bytes.
            unsafe { gate::syscall(libc::SYS_rt_sigprocmask, args) }.unwrap();
            old
        };
        let blocked = super::super::signal::OURS | 1 << (libc::SIGUSR1 - 1);
        #[allow(clippy::disallowed_methods, reason = "a test is no program with far memory")]
        let thread = std::thread::spawn(move || {
            own(libc::SIG_BLOCK, blocked);
            said.send(process::tid() as u32).unwrap();
            going.recv().unwrap();
            own(libc::SIG_BLOCK, 0)
        });
        let tid = hears.recv().unwrap();
        // The second has never been there.
        unblock(&[tid, 0x7fff_fff0], super::super::signal::OURS).unwrap();
        go.send(()).unwrap();
        assert_eq!(thread.join().unwrap() & blocked, 1 << (libc::SIGUSR1 - 1));
    }
}
