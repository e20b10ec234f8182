//! Programs that let themselves be traced (`PTRACE_TRACEME`).
//!
//! A traced process stops at every signal, ours included, until its tracer lets it go on. A tracer
//! that made its child by `vfork`, as gdb does, waits in the call until the child has executed
//! something. So it could never let the child go on. That is why such a child is traced only from
//! the moment in which it executes.

use super::call::{CallOutcome, error};
use super::runtime::{RUNTIME, Runtime};
use super::thread::{self, ThreadRecord};
use crate::elf::{self, Linkage};
use core::sync::atomic::Ordering;
use farfield_os::{Errno, Result, file, gate, process};

/// Advice for the user who traces a program with far memory.
const ADVICE: &[u8] =
    b"farfield: a program is traced here that has far memory: it needs its SIGSYS and SIGBUS. In gdb: handle \
                        SIGSYS SIGBUS nostop noprint pass\n";

/// Serves `ptrace(PTRACE_TRACEME)`.
pub fn trace_me(runtime: &Runtime) -> CallOutcome {
    if !runtime.is_borrowed() {
        let _ = file::write_all(2, ADVICE);
        return CallOutcome::Forward;
    }
    match thread::current() {
        Some(record) if record.is_traced.swap(1, Ordering::Relaxed) == 0 => CallOutcome::Done(0),
        Some(_) => error(libc::EPERM),
        None => error(libc::EAGAIN),
    }
}

/// Begins the tracing that was asked for, before the `execve` of a thread. Returns whether tracing
/// began. Fails with an error that the `execve` would have had, while the child can still go on
/// from it.
pub fn begin(record: &ThreadRecord, directory: i32, path: &[u8], flags: i32) -> Result<bool> {
    if record.is_traced.load(Ordering::Relaxed) == 0 || !RUNTIME.is_borrowed() {
        return Ok(false);
    }
    can_execute(directory, path, flags)?;
    let _ = file::write_all(2, ADVICE);
    // SAFETY: numbers only.
    unsafe { gate::syscall(libc::SYS_ptrace, [libc::PTRACE_TRACEME as usize, 0, 0, 0, 0, 0]) }?;
    Ok(true)
}

/// Ends a traced child whose `execve` has failed all the same: its next signal would stop it for
/// ever.
pub fn give_up(errno: i32) -> ! {
    let _ = file::write_all(2, b"farfield: a traced program could not be executed, and its child of vfork ends here\n");
    process::exit_group(if errno == libc::ENOENT { 127 } else { 126 })
}

fn can_execute(directory: i32, path: &[u8], flags: i32) -> Result<()> {
    if path.first() == Some(&0) {
        return Ok(()); // A descriptor, which the kernel has opened before.
    }
    let at = flags & libc::AT_SYMLINK_NOFOLLOW | libc::AT_EACCESS;
    let args = [directory as usize, path.as_ptr() as usize, libc::X_OK as usize, at as usize, 0, 0];
    // SAFETY: `path` is NUL-terminated.
    unsafe { gate::syscall(libc::SYS_faccessat2, args) }?;
    let open = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
    // SAFETY: as above.
    let fd = unsafe { gate::syscall(libc::SYS_openat, [directory as usize, path.as_ptr() as usize, open, 0, 0, 0]) };
    // A file may be executable and not readable: the kernel will see.
    let Ok(fd) = fd else { return Ok(()) };
    let mut head = [0; 4096];
    let is_regular = file::is_regular(fd as i32);
    let len = file::read_at(fd as i32, &mut head, 0);
    file::close(fd as i32);
    if !is_regular {
        return Err(Errno(libc::EACCES));
    }
    match len.map(|len| elf::classify(&head[..len])) {
        Ok(Linkage::Unknown | Linkage::Malformed) => Err(Errno(libc::ENOEXEC)),
        _ => Ok(()),
    }
}
