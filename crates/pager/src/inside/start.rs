//! Set-up before the program's first instruction.

use super::runtime::{Phase, RUNTIME, fail, remember_standard_error};
use super::{exec, huge, inherited_fds, limits, loader, sanitizer, signal, storage, table, thread};
use crate::config::{Capture, ENV_CONTROL, JobConfig, MAGIC};
use crate::control::{JobAccounts, exit};
use crate::{filter, window};
use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering};
use farfield_os::{Errno, file, gate, memfd, memory, process, seccomp, signals};
use std::os::fd::BorrowedFd;

/// Sets far memory up, as the preload library's constructor. Without [`ENV_CONTROL`] it does
/// nothing. If the set-up fails the program does not start: a job that was given a budget never
/// runs without one.
///
/// # Safety
/// `environment` must be the NULL-terminated environment that the loader passes to constructors.
/// (The C library is not initialised yet: its own `getenv` would find nothing.)
pub unsafe fn start(environment: *const *const libc::c_char) {
    // SAFETY: passed on to the caller.
    let [control, preload, sanitizer_options] =
        unsafe { [ENV_CONTROL, "LD_PRELOAD", "ASAN_OPTIONS"].map(|name| variable(environment, name.as_bytes())) };
    let Some(control) = control else { return };
    if let Some(advice) = sanitizer::refusal(sanitizer_options) {
        fail(exit::REFUSED, format_args!("{advice}"));
    }
    if let Err((step, errno)) = set_up(control, preload.unwrap_or(c"")) {
        fail(
            exit::REFUSED,
            format_args!("cannot run this program with far memory: {step}: {errno}. Try `farfield doctor`."),
        );
    }
}

/// Returns the value of an environment variable.
///
/// # Safety
/// The contract is that of [`start`].
unsafe fn variable(environment: *const *const libc::c_char, name: &[u8]) -> Option<&'static CStr> {
    let mut at = environment;
    loop {
        // SAFETY: the array ends with NULL; its entries are NUL-terminated and stay.
        let entry = unsafe {
            if (*at).is_null() {
                return None;
            }
            CStr::from_ptr(*at)
        };
        let bytes = entry.to_bytes_with_nul();
        if bytes.starts_with(name) && bytes.get(name.len()) == Some(&b'=') {
            return CStr::from_bytes_with_nul(&bytes[name.len() + 1..]).ok();
        }
        // SAFETY: not yet at the end.
        at = unsafe { at.add(1) };
    }
}

static ENTRY: AtomicUsize = AtomicUsize::new(0);

/// Returns the address in the program's code where the program begins.
pub fn entry() -> usize {
    ENTRY.load(Ordering::Relaxed)
}

/// File name of the preload library.
const LIBRARY: &[u8] = b"libfarfield_preload.so";

/// Step that failed, and why.
pub(super) type Step = (&'static str, Errno);

pub(super) fn at(step: &'static str) -> impl FnOnce(Errno) -> Step {
    move |errno| (step, errno)
}

fn set_up(path: &CStr, preload: &CStr) -> Result<(), Step> {
    // This comes first: after an exec the filter is in force already, and knows our calls by the
    // gate.
    storage::start();
    map_gate().map_err(at("the gate page could not be mapped"))?;
    let blocks = map_blocks(path)?;
    let own = preload.to_bytes().split(|b| matches!(b, b':' | b' ')).find(|entry| entry.ends_with(LIBRARY));
    exec::remember(own.unwrap_or(preload.to_bytes()), path.to_bytes());
    reserve_window()?;
    prepare(blocks)?;
    let capture = RUNTIME.config().capture();
    if capture == Capture::Everything {
        move_break();
    }
    let advanced = RUNTIME.advance(Phase::Off, Phase::Dormant);
    assert!(advanced);
    signal::install().map_err(at("the signal handlers could not be installed"))?;
    if let Some(Ok((base, len))) = thread::current().map(|record| record.alternate_stack()) {
        // SAFETY: the stack is mapped for the thread's life.
        let _ = unsafe { signals::set_alternate_stack(base, len) };
    }
    let mask = signals::set_mask(!0);
    signals::set_mask(mask & !signal::OURS);
    if filter_is_inherited() { Ok(()) } else { install_filter(capture) }
}

/// Reserves the window. Fails, and changes nothing, if something is mapped there.
pub(super) fn reserve_window() -> Result<(), Step> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE touches nobody's memory.
    unsafe { memory::mmap(window::BASE, window::LEN, libc::PROT_NONE, flags, -1, 0) }
        .map_err(at("no address space for the window of far memory (is `ulimit -v` set?)"))?;
    Ok(())
}

/// Installs the filter for all threads of this process.
pub(super) fn install_filter(capture: Capture) -> Result<(), Step> {
    if !seccomp::may_filter_with_privileges() {
        seccomp::set_no_new_privileges().map_err(at("PR_SET_NO_NEW_PRIVS failed"))?;
    }
    seccomp::install(&filter::program(&loader::early_calls(), capture))
        .map_err(at("the system call filter could not be installed"))
}

/// Makes the runtime ready to go on as dormant: the window is reserved, and nothing traps yet.
pub(super) fn prepare((config, control): Blocks) -> Result<(), Step> {
    remember_standard_error();
    // Unwinding takes locks of the loader, which the interrupted thread may hold, and could not
    // leave a handler anyway.
    std::panic::set_hook(Box::new(|panic| fail(exit::INTERNAL, format_args!("{panic}"))));
    huge::start(config.huge_pages.load(Ordering::Relaxed) != 0);
    // SAFETY: reads what the kernel gave the program.
    ENTRY.store(unsafe { libc::getauxval(libc::AT_ENTRY) } as usize, Ordering::Relaxed);
    let table = table::PageWordTable::reserve().map_err(at("no address space for the page table"))?;
    let slot = control
        .take_slot(process::pid() as u32, process::identity())
        .ok_or(("too many processes in this job", Errno(libc::EAGAIN)))?;
    let (_, urls, _) = config.pool();
    let others = [&config.first, &config.places].map(|pool| pool.read().0);
    farfield_pool::prepare_tls(urls.iter().chain(others.iter().flatten()).map(String::as_str));
    RUNTIME.set_up(config, control, slot, table);
    RUNTIME.threads.reserve().map_err(at("no address space for the thread table"))?;
    limits::start();
    Ok(())
}

/// Configuration and accounts of the job.
pub(super) type Blocks = (&'static JobConfig, &'static JobAccounts);

/// Maps the configuration, read-only, and the accounts of the job.
pub(super) fn map_blocks(path: &CStr) -> Result<Blocks, Step> {
    const CLOSED: &str = "the job's control block cannot be opened (has farfield run ended?)";
    // The descriptors are inherited if the path is closed to this user or name space, or leads to
    // another process there.
    let open = |path: &CStr, flags: i32, inherited: i32| match inherited_fds::are_open() {
        true => Ok(inherited),
        false => file::open(path, flags),
    };
    let config_fd = open(path, libc::O_RDONLY, inherited_fds::CONFIG).map_err(at(CLOSED))?;
    // SAFETY: the descriptor is open.
    let is_published = memfd::is_published(unsafe { BorrowedFd::borrow_raw(config_fd) });
    if !is_published || file::size(config_fd) != Some(size_of::<JobConfig>() as u64) {
        return Err(other_release());
    }
    // SAFETY: mapped for good, with its size; all fields are atomics, for which any bytes are
    // valid, and nobody here stores.
    let config = unsafe { &*(map::<JobConfig>(config_fd, libc::PROT_READ)? as *const JobConfig) };
    if config.magic.load(Ordering::Acquire) != MAGIC {
        return Err(other_release());
    }
    let control_fd =
        inherited_fds::with_control_path(path, config, |path| open(path, libc::O_RDWR, inherited_fds::CONTROL));
    let control_fd = control_fd.map_err(at(CLOSED))?;
    if file::size(control_fd) != Some(size_of::<JobAccounts>() as u64) {
        return Err(other_release());
    }
    // SAFETY: mapped for good, with its size; all fields are atomics, for which any bytes are
    // valid.
    let control =
        unsafe { &*(map::<JobAccounts>(control_fd, libc::PROT_READ | libc::PROT_WRITE)? as *const JobAccounts) };
    for (fd, inherited) in [(config_fd, inherited_fds::CONFIG), (control_fd, inherited_fds::CONTROL)] {
        if fd != inherited {
            file::close(fd);
        }
    }
    Ok((config, control))
}

fn other_release() -> Step {
    ("the job's control block is of another release", Errno(libc::EPROTO))
}

fn map<T>(fd: i32, protection: i32) -> Result<usize, Step> {
    // SAFETY: a new mapping.
    unsafe { memory::mmap(0, size_of::<T>(), protection, libc::MAP_SHARED, fd, 0) }
        .map_err(at("the job's control block cannot be mapped"))
}

pub(super) fn map_gate() -> farfield_os::Result<()> {
    // syscall; ret, twice, 16 bytes apart.
    let mut code = [0xCCu8; 32];
    code[..3].copy_from_slice(&[0x0F, 0x05, 0xC3]);
    code[16..19].copy_from_slice(&[0x0F, 0x05, 0xC3]);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE touches nobody's memory; the code is written before it becomes executable.
    unsafe {
        memory::mmap(window::GATE, 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)?;
        core::ptr::copy_nonoverlapping(code.as_ptr(), window::GATE as *mut u8, code.len());
        memory::mprotect(window::GATE, 4096, libc::PROT_READ | libc::PROT_EXEC)?;
        gate::set(window::GATE_OWN);
    }
    Ok(())
}

unsafe extern "C" {
    /// glibc's program break (exported since 2.2.5).
    static mut __curbrk: usize;
}

/// Makes glibc's malloc continue its heap in the window: `sbrk` starts from this word.
fn move_break() {
    // SAFETY: no other thread runs yet.
    unsafe { __curbrk = window::BASE };
}

/// Checks whether a filter of ours, kept over exec, answers already. Of several filters that answer
/// with an error, the kernel takes the error of the newest.
pub(super) fn filter_is_inherited() -> bool {
    let result: isize;
    // SAFETY: an invalid request, refused by filter or kernel. Not through the gate, which the
    // filter lets pass.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_clone3 as isize => result,
            in("rdi") filter::PROBE as usize, in("rsi") 0usize, out("rcx") _, out("r11") _,
        );
    }
    result == -(filter::PROBE_ERRNO as isize)
}
