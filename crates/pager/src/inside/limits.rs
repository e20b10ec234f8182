//! The program's own limits on address space and data.
//!
//! The kernel keeps these limits for us, raised by what we may reserve ([`crate::limits`]). That is
//! much, and the window counts there as a whole. So mappings in the window are compared with the
//! limits here.

use super::call::{CallOutcome, error, forward};
use super::heap::HEAP_BYTES;
use super::runtime::Runtime;
use super::{syscall_pinning, thread};
use crate::limits::{RESOURCES, TABLE_BYTES, from_kernel, to_kernel};
use crate::space::{FOREIGN, PageRange, Space};
use crate::window;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::{file, gate, process};

/// Soft limits in the order of [`RESOURCES`], as the program knows them.
static SOFT: [AtomicU64; 2] = [const { AtomicU64::new(libc::RLIM_INFINITY) }; 2];

/// Reads the limits that the process was started with.
pub fn start() {
    for (soft, resource) in SOFT.iter().zip(RESOURCES) {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        let args = [0, resource as usize, 0, &raw mut limit as usize, 0, 0];
        // SAFETY: `limit` is writable.
        let _ = unsafe { gate::syscall(libc::SYS_prlimit64, args) };
        soft.store(from_kernel(resource, limit).rlim_cur, Ordering::Relaxed);
    }
}

/// Serves `prlimit64`, `setrlimit` and `getrlimit` for one of [`RESOURCES`].
pub fn serve(runtime: &Runtime, number: usize, args: [usize; 6]) -> CallOutcome {
    let (pid, resource, new, old) = match number as i64 {
        libc::SYS_prlimit64 => (args[0] as u32, args[1] as u32, args[2], args[3]),
        libc::SYS_setrlimit => (0, args[0] as u32, args[1], 0),
        _ => (0, args[0] as u32, 0, args[1]),
    };
    let Some(index) = RESOURCES.iter().position(|one| *one == resource) else { return CallOutcome::Forward };
    let is_own = pid == 0 || pid == process::pid() as u32;
    if !is_own && !is_of_job(runtime, pid) {
        return CallOutcome::Forward;
    }
    let wanted = if new == 0 { None } else { syscall_pinning::peek::<libc::rlimit>(new) };
    if new != 0 && wanted.is_none() {
        return error(libc::EFAULT);
    }
    let kernel = wanted.map(|wanted| to_kernel(resource, wanted));
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let new_copy = kernel.as_ref().map_or(0, |limit| core::ptr::from_ref(limit) as usize);
    let old_copy = if old == 0 { 0 } else { &raw mut before as usize };
    let copied = match number as i64 {
        libc::SYS_prlimit64 => [args[0], args[1], new_copy, old_copy, 0, 0],
        libc::SYS_setrlimit => [args[0], new_copy, 0, 0, 0, 0],
        _ => [args[0], old_copy, 0, 0, 0, 0],
    };
    // SAFETY: the program's own call, with copies of ours that live through it.
    let result = unsafe { forward(number, copied) };
    if result < 0 {
        return CallOutcome::Done(result);
    }
    // A child of vfork sets its own limit, not that of the process whose memory this is.
    if let Some(wanted) = wanted.filter(|_| is_own && !runtime.is_borrowed()) {
        SOFT[index].store(wanted.rlim_cur, Ordering::Relaxed);
    }
    if old != 0 && !syscall_pinning::poke(old, from_kernel(resource, before)) {
        return error(libc::EFAULT);
    }
    CallOutcome::Done(result)
}

/// Checks whether `pid` is a process of this job, whose limits are kept as ours.
fn is_of_job(runtime: &Runtime, pid: u32) -> bool {
    runtime.control().slots.iter().any(|slot| slot.pid.load(Ordering::Relaxed) == pid)
}

/// Checks whether the program's limits leave room for `pages` more in the window, with this
/// protection. Outside of the window, private writable memory counts (what the kernel calls data).
/// The rest is libraries, files, and what is mapped of far memory.
pub fn allow(space: &Space, pages: u64, prot: i32) -> bool {
    let [address_space, data] = SOFT.each_ref().map(|soft| soft.load(Ordering::Relaxed));
    if (address_space, data) == (libc::RLIM_INFINITY, libc::RLIM_INFINITY) {
        return true;
    }
    let own = TABLE_BYTES + thread::TABLE_BYTES + HEAP_BYTES.load(Ordering::Relaxed).max(0) as u64;
    let writable = |prot: i32| prot != FOREIGN && prot & libc::PROT_WRITE != 0;
    let parts = space.parts_in(PageRange { start: 0, end: window::PAGES });
    let in_window: u64 = parts.iter().filter(|(_, prot)| writable(*prot)).map(|(part, _)| part.pages()).sum();
    let more = pages * PAGE_BYTES as u64;
    let all_data = data_bytes().saturating_sub(own);
    let outside = all_data.saturating_sub(in_window * PAGE_BYTES as u64);
    (space.pages() * PAGE_BYTES as u64).saturating_add(outside).saturating_add(more) <= address_space
        && (!writable(prot) || all_data.saturating_add(more) <= data)
}

/// Returns the bytes that the kernel counts as data of this process, with its stacks; 0 where it
/// does not say.
fn data_bytes() -> u64 {
    let mut text = [0; 128];
    let Ok(fd) = file::open(c"/proc/self/statm", libc::O_RDONLY) else { return 0 };
    let len = file::read(fd, &mut text).unwrap_or(0);
    file::close(fd);
    let fields = core::str::from_utf8(&text[..len]).unwrap_or_default();
    let pages = fields.split_ascii_whitespace().nth(5).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE_BYTES as u64
}
