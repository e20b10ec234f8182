//! Far memory switched on in a program that runs already.
//!
//! What can make that impossible is checked first, and reported before anything is changed. Three
//! things differ from a start (`super::start`) before the program's first instruction:
//!
//! - The program break stays where the kernel has it, because glibc's heap lies there. It does not
//!   grow any more ([`super::emulate`]): glibc then takes mappings.
//! - Handlers of signals that the program has already get ours before them.
//! - Threads that exist have no alternate stack of ours, or one of their own that may be small.
//!   Each gets ours at its first signal, which is then repeated ([`super::signal`]).

use super::runtime::{Phase, RUNTIME};
use super::start::{self, Step, at};
use super::{delivery, exec, foreign_mask, sanitizer, signal, storage, thread};
use crate::window;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering};
use farfield_os::uffd::{FaultOrigin, Uffd, feature};
use farfield_os::{Errno, gate, memory, process, seccomp, signals};
use std::path::Path;

/// Whether far memory was switched on while the program ran.
static IS_LATE: AtomicBool = AtomicBool::new(false);

/// Checks whether far memory was switched on while the program ran.
pub fn is_late() -> bool {
    IS_LATE.load(Ordering::Relaxed)
}

/// Reason why far memory cannot be switched on in this program.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each is")]
pub enum LateStartError {
    #[error("far memory is switched on in this process already, or it belongs to a job of `farfield run`")]
    AlreadyOn,
    #[error("{advice}")]
    Sanitizer { advice: &'static str },
    #[error(
        "the limit on {} (`ulimit -{}`) is set, and far memory reserves 16 TiB of addresses that it does not use: \
         start the program after `ulimit -{} unlimited`",
        if *resource == libc::RLIMIT_AS { "address space" } else { "data" },
        if *resource == libc::RLIMIT_AS { 'v' } else { 'd' },
        if *resource == libc::RLIMIT_AS { 'v' } else { 'd' }
    )]
    Limit { resource: libc::__rlimit_resource_t },
    #[error(
        "userfaultfd is not allowed here ({errno}): in a container, allow the system call `userfaultfd` in its seccomp \
         profile; `farfield doctor` says more"
    )]
    Userfaultfd { errno: Errno },
    #[error(
        "system call filters are not allowed here ({errno}): in a container, allow the system call `seccomp` in its \
         profile; `farfield doctor` says more"
    )]
    Seccomp { errno: Errno },
    #[error(
        "thread {tid} has a system call filter of its own, so that ours cannot be given to all threads: switch far \
         memory on before that thread is started"
    )]
    ThreadFilter { tid: u32 },
    #[error(
        "thread {tid} blocks SIGBUS or SIGSYS, which far memory needs, and they cannot be unblocked from outside \
         ({errno}): allow the system call `ptrace`, switch far memory on before that thread is started, or unblock \
         both signals in it"
    )]
    ThreadMask { tid: u32, errno: Errno },
    #[error("the threads of this process cannot be examined: {error}; far memory needs /proc")]
    Threads { error: std::io::Error },
    #[error("{}: {}", step.0, step.1)]
    Step { step: Step },
}

/// Switches far memory on for all threads of this process, which joins the job whose configuration
/// is at `path`. `library` is the path of this library, for programs that the process executes.
/// Nothing is changed if this fails, unless the last step does: the kernel refuses the filter though
/// it could have been installed a moment before.
pub fn start(path: &CStr, library: &CStr) -> Result<(), LateStartError> {
    let masked = check()?;
    let step = |step| LateStartError::Step { step };
    let blocks = start::map_blocks(path).map_err(step)?;
    if let Some(&tid) = masked.first() {
        foreign_mask::unblock(&masked, signal::OURS).map_err(|errno| LateStartError::ThreadMask { tid, errno })?;
    }
    // No handler may begin in this thread while it is half ready.
    let mask = signals::set_mask(!0);
    let started = start_masked(path, library, blocks);
    signals::set_mask(mask & !signal::OURS);
    started.map_err(step)
}

fn start_masked(path: &CStr, library: &CStr, blocks: start::Blocks) -> Result<(), Step> {
    start::reserve_window()?;
    if gate::address() != window::GATE_OWN
        && let Err(errno) = start::map_gate()
    {
        // SAFETY: reserved above, and empty.
        let _ = unsafe { memory::munmap(window::BASE, window::LEN) };
        return Err(("the gate page could not be mapped", errno));
    }
    storage::start();
    exec::remember(library.to_bytes(), path.to_bytes());
    start::prepare(blocks)?;
    IS_LATE.store(true, Ordering::Relaxed);
    let advanced = RUNTIME.advance(Phase::Off, Phase::Dormant);
    assert!(advanced);
    const HANDLERS: &str = "the signal handlers could not be installed";
    signal::install().map_err(at(HANDLERS))?;
    delivery::adopt_actions().map_err(at(HANDLERS))?;
    if let Some(record) = thread::current() {
        let mut before = libc::stack_t { ss_sp: core::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: `before` is writable.
        let _ = unsafe { gate::syscall(libc::SYS_sigaltstack, [0, &raw mut before as usize, 0, 0, 0, 0]) };
        if let Ok((base, len)) = record.alternate_stack() {
            // SAFETY: only this thread uses the field; the stack is mapped for the thread's life.
            unsafe {
                *record.program_stack.get() = before;
                let _ = signals::set_alternate_stack(base, len);
            }
        }
    }
    start::install_filter(RUNTIME.config().capture())
}

/// Checks everything that can make a late start impossible. Changes nothing. Returns the other threads
/// that block our signals.
fn check() -> Result<Vec<u32>, LateStartError> {
    if RUNTIME.phase() != Phase::Off || start::filter_is_inherited() {
        return Err(LateStartError::AlreadyOn);
    }
    // SAFETY: the environment is read while the caller holds the interpreter's lock.
    let options = unsafe { libc::getenv(c"ASAN_OPTIONS".as_ptr()) };
    // SAFETY: NUL-terminated if it is there.
    let options = (!options.is_null()).then(|| unsafe { CStr::from_ptr(options) });
    if let Some(advice) = sanitizer::refusal(options) {
        return Err(LateStartError::Sanitizer { advice });
    }
    for resource in crate::limits::RESOURCES {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is writable.
        let known = unsafe { libc::getrlimit(resource, &mut limit) } == 0;
        if known && limit.rlim_cur != libc::RLIM_INFINITY {
            return Err(LateStartError::Limit { resource });
        }
    }
    check_userfaultfd()?;
    seccomp::check().map_err(|errno| LateStartError::Seccomp { errno })?;
    check_threads(Path::new("/proc/self/task"), process::tid() as u32)
}

/// Opens a userfaultfd as arming will, and closes it.
fn check_userfaultfd() -> Result<(), LateStartError> {
    let features = feature::PAGEFAULT_FLAG_WP | feature::WP_UNPOPULATED | feature::WP_ASYNC;
    let signal_mode = Uffd::open(FaultOrigin::UserMode, features | feature::SIGBUS);
    let opened = signal_mode.or_else(|_| Uffd::open(FaultOrigin::UserAndKernel, features));
    opened.map(drop).map_err(|errno| LateStartError::Userfaultfd { errno })
}

/// Checks that every thread has the filters of thread `own`. Returns the others that block our signals.
fn check_threads(tasks: &Path, own: u32) -> Result<Vec<u32>, LateStartError> {
    let threads = |error| LateStartError::Threads { error };
    let status = |tid: u32| std::fs::read_to_string(tasks.join(tid.to_string()).join("status"));
    let filters_text = status(own).map_err(threads)?;
    let filters = filters_of(&filters_text);
    let mut masked = Vec::new();
    for entry in std::fs::read_dir(tasks).map_err(threads)? {
        let Some(tid) = entry.map_err(threads)?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A thread that ends meanwhile needs nothing.
        let Ok(text) = status(tid) else { continue };
        if filters_of(&text) != filters {
            return Err(LateStartError::ThreadFilter { tid });
        }
        let blocked = field(&text, "SigBlk:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
        if tid != own && blocked.unwrap_or(0) & signal::OURS != 0 {
            masked.push(tid);
        }
    }
    Ok(masked)
}

/// Returns the number of filters of a thread, and its mode, as its status shows them.
fn filters_of(status: &str) -> [Option<&str>; 2] {
    ["Seccomp:", "Seccomp_filters:"].map(|name| field(status, name))
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

#[cfg(test)]
mod tests {
    //! Danger: a thread that cannot serve its faults is killed by the first far page it touches.
    use super::*;

    #[test]
    fn threads_with_other_filters_or_masks_are_named() {
        let tasks = std::env::temp_dir().join(format!("farfield-tasks-{}", std::process::id()));
        let write = |tid: u32, text: &str| {
            std::fs::create_dir_all(tasks.join(tid.to_string())).unwrap();
            std::fs::write(tasks.join(tid.to_string()).join("status"), text).unwrap();
        };
        write(1, "Name:\tx\nSigBlk:\t0000000000000000\nSeccomp:\t0\nSeccomp_filters:\t0\n");
        write(2, "Name:\ty\nSigBlk:\t0000000000010002\nSeccomp:\t0\nSeccomp_filters:\t0\n");
        assert!(check_threads(&tasks, 1).unwrap().is_empty());
        write(2, "SigBlk:\t0000000000000040\nSeccomp:\t0\nSeccomp_filters:\t0\n");
        assert_eq!(check_threads(&tasks, 1).unwrap(), [2], "SIGBUS");
        assert!(check_threads(&tasks, 2).unwrap().is_empty(), "its own mask is changed by itself");
        write(2, "SigBlk:\t0000000040000000\nSeccomp:\t0\nSeccomp_filters:\t0\n");
        assert_eq!(check_threads(&tasks, 1).unwrap(), [2], "SIGSYS");
        write(2, "SigBlk:\t0000000000000000\nSeccomp:\t2\nSeccomp_filters:\t1\n");
        assert!(matches!(check_threads(&tasks, 1), Err(LateStartError::ThreadFilter { tid: 2 })));
        assert!(matches!(check_threads(&tasks, 9), Err(LateStartError::Threads { .. })));
        std::fs::remove_dir_all(&tasks).unwrap();
    }

    #[test]
    fn this_process_could_be_started_late() {
        check_userfaultfd().unwrap();
        check_threads(Path::new("/proc/self/task"), process::tid() as u32).unwrap();
    }
}
