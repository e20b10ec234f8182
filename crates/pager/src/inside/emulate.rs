//! System calls that we serve ourselves: those that make or change far-capable memory, and those
//! that could take our signals, descriptors or address space away.

use super::call::{CallOutcome, Context, done, error};
use super::fault::settled_phase;
use super::runtime::{Phase, RUNTIME, Runtime, fail};
use super::signal::OURS;
use super::sync::Wait;
use super::table::CHUNK;
use super::{
    aio, arm, clone, delivery, exec, forking, huge, inherited_fds, io_uring, late_start, limits, own_faults, start,
    store, syscall_pinning, thread, tracing,
};
use crate::config::Capture;
use crate::control::exit;
use crate::space::{FOREIGN, PageRange};
use crate::submission::SYS_IO_PGETEVENTS;
use crate::{filter, window};
use core::sync::atomic::Ordering;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::page_word::{PageWord, State};
use farfield_os::seccomp::{FilterProgram, Instruction};
use farfield_os::signals::SignalSet;
use farfield_os::{gate, memory, process, uffd};
use farfield_pool::Backend;

/// Advice that libc does not name yet.
const MADV_DONTNEED_LOCKED: i32 = 24;
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;

/// Decides what becomes of a call that the filter sent us, and serves it if it is ours.
pub fn on_call(number: usize, context: &Context) -> CallOutcome {
    let runtime = &RUNTIME;
    let args = context.arguments();
    let counters = runtime.counters();
    let outcome = match number as i64 {
        libc::SYS_mmap => map(runtime, args),
        libc::SYS_munmap => unmap(runtime, args[0], args[1]),
        libc::SYS_mremap => super::remap::remap(runtime, args),
        libc::SYS_mprotect => protect(runtime, args),
        libc::SYS_pkey_mprotect if args[3] as i32 == -1 => protect(runtime, args),
        // Protection keys belong to the kernel's mappings, and ours are one reservation.
        libc::SYS_pkey_mprotect => error(libc::EINVAL),
        libc::SYS_madvise => advise(runtime, args),
        libc::SYS_brk if late_start::is_late() => hold_break(number, args),
        libc::SYS_brk => move_break(runtime, args[0]),
        libc::SYS_mincore if pages_of(args[0], args[1]).is_some_and(|range| !runtime.space.lock().is_mapped(range)) => {
            error(libc::ENOMEM)
        }
        libc::SYS_mlock | libc::SYS_mlock2 if !window::contains(args[0]) => return CallOutcome::Forward,
        libc::SYS_mlock | libc::SYS_mlock2 | libc::SYS_mlockall => error(libc::ENOMEM),
        libc::SYS_munlock if !window::contains(args[0]) => return CallOutcome::Forward,
        libc::SYS_munlock => CallOutcome::Done(0),
        libc::SYS_rt_sigprocmask => return change_mask(context, args),
        libc::SYS_rt_sigaction => return delivery::set_action(args),
        libc::SYS_rt_sigreturn => return delivery::return_from_handler(context),
        libc::SYS_sigaltstack => return delivery::set_stack(context, args),
        libc::SYS_rt_sigsuspend
        | libc::SYS_ppoll
        | libc::SYS_pselect6
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2
        | SYS_IO_PGETEVENTS => {
            return syscall_pinning::forward_with_mask(number, context);
        }
        libc::SYS_fork => forking::fork(context, [libc::SIGCHLD as usize, 0, 0, 0, 0, 0]),
        libc::SYS_vfork => {
            clone::clone(context, [(libc::CLONE_VFORK | libc::CLONE_VM | libc::SIGCHLD) as usize, 0, 0, 0, 0, 0])
        }
        libc::SYS_clone if args[0] & libc::CLONE_VM as usize != 0 => clone::clone(context, args),
        libc::SYS_clone => {
            if args[0] & libc::CLONE_NEWUSER as usize != 0 {
                inherited_fds::take(runtime);
            }
            forking::fork(context, args)
        }
        libc::SYS_setuid
        | libc::SYS_setreuid
        | libc::SYS_setresuid
        | libc::SYS_setfsuid
        | libc::SYS_setgid
        | libc::SYS_setregid
        | libc::SYS_setresgid
        | libc::SYS_setfsgid
        | libc::SYS_capset
        | libc::SYS_setns
        | libc::SYS_unshare => {
            inherited_fds::take(runtime);
            return CallOutcome::Forward;
        }
        libc::SYS_ptrace if args[0] as u32 == libc::PTRACE_TRACEME => tracing::trace_me(runtime),
        libc::SYS_execve | libc::SYS_execveat => return exec::execute(number, context),
        libc::SYS_seccomp | libc::SYS_prctl => return set_filter(number, args),
        libc::SYS_exit_group => end(runtime, args[0]),
        libc::SYS_io_uring_setup => return io_uring::set_up(args),
        libc::SYS_io_uring_enter => return io_uring::enter(context),
        libc::SYS_io_uring_register => return io_uring::register(args),
        libc::SYS_io_setup => return aio::set_up(args),
        libc::SYS_io_submit => return aio::submit(args),
        libc::SYS_io_destroy => return aio::destroy(args),
        libc::SYS_ioctl if args[1] as u32 == uffd::REGISTER as u32 => own_faults::register(runtime, number, args),
        libc::SYS_prlimit64 | libc::SYS_setrlimit | libc::SYS_getrlimit => limits::serve(runtime, number, args),
        libc::SYS_close | libc::SYS_dup2 | libc::SYS_dup3 => error(libc::EBADF),
        libc::SYS_close_range => close_range(args),
        _ => return CallOutcome::Forward,
    };
    if outcome == CallOutcome::Forward {
        return outcome;
    }
    if matches!(
        number as i64,
        libc::SYS_mmap | libc::SYS_munmap | libc::SYS_mremap | libc::SYS_mprotect | libc::SYS_brk
    ) {
        arm_if_needed(runtime);
    }
    counters.syscalls_emulated.fetch_add(1, Ordering::Relaxed);
    outcome
}

/// Ends the program. Its far memory is freed now, not when the lease runs out.
fn end(runtime: &Runtime, code: usize) -> ! {
    if !runtime.is_borrowed() && settled_phase(runtime) == Phase::Armed {
        runtime.ending.store(256 | code as u32 & 0xFF, Ordering::Release);
        runtime.armed().store.backend().release();
    }
    if !runtime.is_borrowed() {
        // The bytes are taken off now, not when the runner notices: short-lived children would seem
        // to pile up.
        runtime.control().forget_bytes(runtime.slot());
    }
    process::exit_group(code as i32)
}

/// Returns the range of whole pages that the kernel would take `address, len` for; `None` if it is
/// not in the window.
pub fn pages_of(address: usize, len: usize) -> Option<PageRange> {
    let len = len.checked_next_multiple_of(PAGE_BYTES)?;
    let inside = address.is_multiple_of(PAGE_BYTES)
        && len > 0
        && window::contains(address)
        && address.checked_add(len)? <= window::end_of(address);
    inside.then(|| {
        let start = window::page_of(address).0;
        PageRange { start, end: start + (len / PAGE_BYTES) as u64 }
    })
}

/// Returns address and length of a range.
pub fn address_of(range: PageRange) -> (usize, usize) {
    (window::address_of(PageId(range.start)), range.pages() as usize * PAGE_BYTES)
}

fn map(runtime: &Runtime, args: [usize; 6]) -> CallOutcome {
    let [address, len, prot, flags, ..] = args;
    let (prot, flags) = (prot as i32, flags as i32);
    let Some(rounded) = len.checked_next_multiple_of(PAGE_BYTES) else { return error(libc::ENOMEM) };
    if rounded == 0 {
        return error(libc::EINVAL);
    }
    let ours = flags & libc::MAP_ANONYMOUS != 0 && flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
    let replaces = flags & libc::MAP_FIXED != 0;
    let keeps = flags & libc::MAP_FIXED_NOREPLACE != 0 && !replaces;
    let mut space = runtime.space.lock();
    let mut range = pages_of(address, len);
    let captures = address == window::ANYWHERE || runtime.config().capture() == Capture::Everything;
    let is_captured = range.is_some() || captures && rounded >= filter::CAPTURE_BYTES as usize;
    let ours = ours && flags & filter::NOT_CAPTURED == 0 && is_captured;
    if range.is_none() && ours && !replaces {
        range = hinted(runtime, address.next_multiple_of(PAGE_BYTES), rounded);
    }
    match range {
        Some(range) if keeps && !space.is_free(range) => error(libc::EEXIST),
        Some(range) if replaces || space.is_free(range) => {
            if !ours {
                return map_other(runtime, &mut space, args, range);
            }
            release(runtime, &mut space, range);
            place(&mut space, range, prot)
        }
        // The mapping is partly ours.
        None if (replaces || keeps) && is_near_window(address, rounded) => error(libc::EINVAL),
        _ if !ours || replaces || keeps => {
            // SAFETY: the program's own call; what is ours is not where it asks for.
            done(unsafe { gate::syscall(libc::SYS_mmap, args) })
        }
        _ => {
            if let Some(address) = near_hint(address, rounded, args) {
                return CallOutcome::Done(address as isize);
            }
            let pages = (rounded / PAGE_BYTES) as u64;
            let found = if address == window::ANYWHERE { space.find_packed(pages) } else { space.find(pages) };
            let Some(range) = found else { return error(libc::ENOMEM) };
            place(&mut space, range, prot)
        }
    }
}

/// Alignment and minimum length of mappings whose place matters. Others may lie anywhere: random
/// places are asked for only to be hard to guess.
const HINT_BYTES: usize = 1 << 20;

/// Returns pages for a mapping that the program wants to have at `address`, in an extent of the
/// window, if nothing is there.
fn hinted(runtime: &Runtime, address: usize, len: usize) -> Option<PageRange> {
    if address == 0 || len < HINT_BYTES || !address.is_multiple_of(HINT_BYTES) {
        return None;
    }
    let added = window::extents::add(address, len, |address, len| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: NOREPLACE touches nobody's memory.
        if unsafe { memory::mmap(address, len, libc::PROT_NONE, flags, -1, 0) } != Ok(address) {
            return false;
        }
        huge::advise(address, len);
        if runtime.phase() == Phase::Armed
            && let Err(errno) = runtime.armed().uffd.register(address, len)
        {
            fail(exit::INTERNAL, format_args!("a mapping could not be registered with userfaultfd: {errno}"));
        }
        true
    });
    if added { pages_of(address, len) } else { None }
}

/// Distance in bytes that calls and jumps of a program reach.
const REACH: usize = 2 << 30;

/// Maps memory outside of the window if it is only of use where the program wants to have it, and
/// nothing can be far there. That is within the reach of the program's code, where it will put more
/// code, or where 32 bits can address it. If nothing is there the mapping stays there, near.
fn near_hint(address: usize, len: usize, args: [usize; 6]) -> Option<usize> {
    let code = [near_hint as *const () as usize, start::entry()];
    let reached = code.iter().any(|code| code.abs_diff(address).max(code.abs_diff(address + len)) < REACH);
    let low = address + len <= window::extents::BASE && args[2] as i32 != libc::PROT_NONE;
    if address == 0 || !(reached || low) {
        return None;
    }
    let flags = args[3] | libc::MAP_FIXED_NOREPLACE as usize;
    // SAFETY: the program's own call, and NOREPLACE touches nobody's memory.
    unsafe { gate::syscall(libc::SYS_mmap, [args[0], args[1], args[2], flags, args[4], args[5]]) }.ok()
}

/// Checks whether any of these bytes is in the window, or in an extent.
fn is_near_window(address: usize, len: usize) -> bool {
    let end = address.saturating_add(len);
    window::contains(address)
        || address < window::BASE && end > window::BASE
        || window::extents::next(address).is_some_and(|start| start < end)
}

/// Makes a free range accessible.
fn place(space: &mut crate::space::Space, range: PageRange, prot: i32) -> CallOutcome {
    if !limits::allow(space, range.pages(), prot) {
        return error(libc::ENOMEM);
    }
    let (address, len) = address_of(range);
    // SAFETY: nobody uses the range: it was free, or the program replaces it.
    if let Err(errno) = unsafe { memory::mprotect(address, len, prot) } {
        return error(errno.0);
    }
    space.map(range, prot);
    CallOutcome::Done(address as isize)
}

/// Maps something that is not far-capable (a file, shared memory) to a fixed place in the window:
/// our memory ends there.
fn map_other(
    runtime: &Runtime,
    space: &mut crate::space::Space,
    mut args: [usize; 6],
    range: PageRange,
) -> CallOutcome {
    release(runtime, space, range);
    args[3] = args[3] & !(libc::MAP_FIXED_NOREPLACE as usize) | libc::MAP_FIXED as usize;
    // SAFETY: the program's own call; what was there has been discarded.
    let result = unsafe { gate::syscall(libc::SYS_mmap, args) };
    if result.is_ok() {
        space.map(range, FOREIGN);
    }
    done(result)
}

/// Arms if it is time, after a change of what the program may touch. The caller must not hold the
/// space.
pub fn arm_if_needed(runtime: &Runtime) {
    if runtime.phase() == Phase::Dormant {
        let pages = runtime.space.lock().touchable_pages();
        arm::arm_if_needed(runtime, pages as i64 * PAGE_BYTES as i64);
    }
}

fn unmap(runtime: &Runtime, address: usize, len: usize) -> CallOutcome {
    let end = len.checked_next_multiple_of(PAGE_BYTES).and_then(|len| address.checked_add(len));
    let Some(end) = end.filter(|&end| end > address && address.is_multiple_of(PAGE_BYTES)) else {
        return error(libc::EINVAL);
    };
    let mut space = runtime.space.lock();
    let mut at = address;
    while at < end {
        let stop = if window::contains(at) {
            let stop = window::end_of(at).min(end);
            release(runtime, &mut space, pages_of(at, stop - at).expect("in the window"));
            stop
        } else {
            let window = if at < window::BASE { window::BASE } else { end };
            let stop = window::extents::next(at).unwrap_or(end).min(window).min(end);
            // SAFETY: the program's own call, for a part that is not ours.
            if let Err(errno) = unsafe { gate::syscall(libc::SYS_munmap, [at, stop - at, 0, 0, 0, 0]) } {
                return error(errno.0);
            }
            stop
        };
        at = stop;
    }
    CallOutcome::Done(0)
}

/// Takes a range out of use: nothing of it stays near or far.
pub fn release(runtime: &Runtime, space: &mut crate::space::Space, range: PageRange) {
    for (part, prot) in space.parts_in(range) {
        let (address, len) = address_of(part);
        if prot == FOREIGN || runtime.phase() == Phase::Dormant {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            // SAFETY: the program gave the range up. Mapping anew also frees its page tables.
            let _ = unsafe { memory::mmap(address, len, libc::PROT_NONE, flags, -1, 0) };
            huge::advise(address, len);
            if runtime.phase() == Phase::Armed {
                let _ = runtime.armed().uffd.register(address, len);
            }
        } else {
            // SAFETY: the program gave the range up.
            let _ = unsafe { memory::mprotect(address, len, libc::PROT_NONE) };
        }
        // Nobody writes the range any more: what is mapped here next begins with zeros.
        if prot != FOREIGN {
            discard(runtime, part, true);
        }
    }
    space.unmap(range);
}

/// Drops near and far copies of a range; it reads as zeros afterwards.
pub fn discard(runtime: &Runtime, range: PageRange, populated: bool) {
    if !populated {
        return;
    }
    if settled_phase(runtime) != Phase::Armed {
        let (address, len) = address_of(range);
        // SAFETY: the program gave the content up.
        let _ = unsafe { memory::madvise(address, len, libc::MADV_DONTNEED) };
        return;
    }
    super::fault::enter(runtime);
    let table = runtime.table();
    let mut start = range.start;
    while start < range.end {
        let end = (start / CHUNK * CHUNK + CHUNK).min(range.end);
        if table.chunk_touched(start) {
            discard_chunk(runtime, PageRange { start, end });
        }
        start = end;
    }
    super::fault::leave(runtime);
}

fn discard_chunk(runtime: &Runtime, range: PageRange) {
    let was_near = |&page: &u64| seize(runtime, PageId(page)).state() == State::Near;
    let near = (range.start..range.end).filter(was_near).count() as i64;
    if near > 0 {
        let (address, len) = address_of(range);
        // SAFETY: the program gave the content up, and no other thread moves these pages: they are
        // seized.
        let _ = unsafe { memory::madvise(address, len, libc::MADV_DONTNEED) };
    }
    forget(runtime, range);
    runtime.charge(-near);
}

/// Seizes a page, whichever thread moves it now. Waits while it is moved, and returns its word
/// before.
fn seize(runtime: &Runtime, page: PageId) -> PageWord {
    let mut wait = Wait::new("a page that another thread moves");
    loop {
        match runtime.table().update(page, |word| word.seize()) {
            Some((before, _)) => return before,
            None => store::wait_for(runtime, &mut wait),
        }
    }
}

/// Forgets seized pages that are not near any more: from now on they are nowhere.
pub fn forget(runtime: &Runtime, range: PageRange) {
    let table = runtime.table();
    let mut page = range.start;
    while page < range.end {
        let stored = (page..range.end).take_while(|&page| table.word(PageId(page)).is_stored()).count() as u64;
        if stored > 0 {
            runtime.armed().store.discard(PageId(page), stored);
            runtime.charge_far(-(stored as i64));
        }
        // The page behind these is not stored.
        page += stored + 1;
    }
    for page in range.start..range.end {
        table.update(PageId(page), |word| Some(word.discarded()));
    }
}

fn protect(runtime: &Runtime, args: [usize; 6]) -> CallOutcome {
    let Some(range) = pages_of(args[0], args[1]) else {
        // SAFETY: the program's own call.
        return done(unsafe { gate::syscall(libc::SYS_mprotect, args) });
    };
    let mut space = runtime.space.lock();
    // The kernel does the same: it changes up to the first hole, and then returns an error.
    let whole = space.mapped_from(range);
    if whole.start < whole.end {
        let (address, len) = address_of(whole);
        // A page that shares its memory and cannot be written leaves as it is; it must not become
        // writable on the way.
        let writable = args[2] as i32 & libc::PROT_WRITE != 0 && runtime.phase() == Phase::Armed;
        let evictor = writable.then(|| runtime.armed().evictor.lock());
        // SAFETY: the program's own call.
        if let Err(errno) = unsafe { memory::mprotect(address, len, args[2] as i32) } {
            return error(errno.0);
        }
        drop(evictor);
        space.protect(whole, args[2] as i32);
    }
    if whole == range { CallOutcome::Done(0) } else { error(libc::ENOMEM) }
}

fn advise(runtime: &Runtime, args: [usize; 6]) -> CallOutcome {
    let Some(range) = pages_of(args[0], args[1]) else {
        // SAFETY: the program's own call, for memory that is not ours, or nonsense.
        return done(unsafe { gate::syscall(libc::SYS_madvise, args) });
    };
    if !matches!(args[2] as i32, libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED)
        && !runtime.space.lock().is_mapped(range)
    {
        return error(libc::ENOMEM);
    }
    match args[2] as i32 {
        libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED => {
            let mut space = runtime.space.lock();
            let whole = space.is_mapped(range);
            for (part, prot) in space.parts_in(range) {
                if prot == FOREIGN {
                    let (address, len) = address_of(part);
                    // SAFETY: the program's own call, on its own mapping.
                    let _ = unsafe { memory::madvise(address, len, args[2] as i32) };
                } else {
                    discard(runtime, part, true);
                }
            }
            space.empty(range);
            if whole { CallOutcome::Done(0) } else { error(libc::ENOMEM) }
        }
        // These are only hints; ours come from the faults themselves.
        libc::MADV_NORMAL
        | libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_WILLNEED
        | libc::MADV_COLD
        | libc::MADV_PAGEOUT
        | libc::MADV_NOHUGEPAGE
        | libc::MADV_COLLAPSE
        // A merged page would be replaced at the next write, behind the back of the thread that
        // evicts it.
        | libc::MADV_MERGEABLE
        | libc::MADV_UNMERGEABLE => CallOutcome::Done(0),
        libc::MADV_HUGEPAGE => {
            if settled_phase(runtime) == Phase::Dormant {
                huge::note();
                // SAFETY: the program's own hint.
                let _ = unsafe { gate::syscall(libc::SYS_madvise, args) };
            }
            CallOutcome::Done(0)
        }
        libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE if settled_phase(runtime) == Phase::Armed => {
            let most = (runtime.near().1 / 2) as u64 / PAGE_BYTES as u64;
            for number in range.start..range.end.min(range.start + most) {
                super::fault::fault_in(runtime, PageId(number), false);
            }
            CallOutcome::Done(0)
        }
        advice @ (libc::MADV_WIPEONFORK | libc::MADV_KEEPONFORK) => {
            let mut wiped = runtime.wiped.lock();
            wiped.retain(|old| old.end <= range.start || range.end <= old.start);
            if advice == libc::MADV_WIPEONFORK {
                wiped.push(range);
            }
            // SAFETY: the program's own call; near pages are wiped by the kernel.
            done(unsafe { gate::syscall(libc::SYS_madvise, args) })
        }
        MADV_GUARD_INSTALL | MADV_GUARD_REMOVE => error(libc::EINVAL),
        // SAFETY: the program's own call; advice that changes no content that we keep.
        _ => done(unsafe { gate::syscall(libc::SYS_madvise, args) }),
    }
}

fn move_break(runtime: &Runtime, wanted: usize) -> CallOutcome {
    let mut end = runtime.break_end.lock();
    if !(window::BASE..Runtime::BREAK_LIMIT).contains(&wanted) {
        return CallOutcome::Done(*end as isize);
    }
    let old_page = end.next_multiple_of(PAGE_BYTES);
    let new_page = wanted.next_multiple_of(PAGE_BYTES);
    let mut space = runtime.space.lock();
    if new_page > old_page {
        let range = PageRange { start: window::page_of(old_page).0, end: window::page_of(new_page).0 };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        match place(&mut space, range, prot) {
            CallOutcome::Done(value) if value > 0 => {}
            _ => return CallOutcome::Done(*end as isize),
        }
    } else if new_page < old_page {
        let range = PageRange { start: window::page_of(new_page).0, end: window::page_of(old_page).0 };
        release(runtime, &mut space, range);
    }
    *end = wanted;
    CallOutcome::Done(wanted as isize)
}

/// Serves `brk` in a program in which far memory was switched on later. Its break is the kernel's,
/// and lower addresses are granted. Growth is refused: that memory could not become far. glibc
/// then takes mappings instead, which can.
fn hold_break(number: usize, args: [usize; 6]) -> CallOutcome {
    // SAFETY: asks for the break.
    let end = unsafe { super::call::forward(number, [0; 6]) };
    if args[0] as isize > end { CallOutcome::Done(end) } else { CallOutcome::Forward }
}

/// Serves `rt_sigprocmask` as asked, but keeps our two signals open. The mask in the context is
/// what the thread gets back.
fn change_mask(context: &Context, args: [usize; 6]) -> CallOutcome {
    let [how, set, old, size, ..] = args;
    if size != 8 {
        return error(libc::EINVAL);
    }
    let Some(record) = thread::current() else { return error(libc::EAGAIN) };
    // Our two signals are open in truth; the program sees them as it set them.
    let before = context.mask() & !OURS | record.hidden_mask.load(Ordering::Relaxed);
    let asked = if set == 0 { None } else { syscall_pinning::peek::<SignalSet>(set) };
    if set != 0 && asked.is_none() {
        return error(libc::EFAULT);
    }
    let set = asked.unwrap_or(0);
    let after = match how as i32 {
        _ if asked.is_none() => before,
        libc::SIG_BLOCK => before | set,
        libc::SIG_UNBLOCK => before & !set,
        libc::SIG_SETMASK => set,
        _ => return error(libc::EINVAL),
    };
    if old != 0 && !syscall_pinning::poke(old, before) {
        return error(libc::EFAULT);
    }
    context.set_mask(after & !OURS);
    record.hidden_mask.store(after & OURS, Ordering::Relaxed);
    super::signal::send_postponed(record);
    CallOutcome::Done(0)
}

/// Installs a filter of the program's own as it is, except that our own calls are exempt.
fn set_filter(number: usize, args: [usize; 6]) -> CallOutcome {
    if number as i64 == libc::SYS_prctl && args[0] != libc::PR_SET_SECCOMP as usize {
        return CallOutcome::Forward;
    }
    let (install, header) = match number as i64 {
        libc::SYS_prctl => (args[1] == libc::SECCOMP_MODE_FILTER as usize, args[2]),
        _ => (args[0] == libc::SECCOMP_SET_MODE_FILTER as usize, args[2]),
    };
    let strict = match number as i64 {
        libc::SYS_prctl => args[1] == libc::SECCOMP_MODE_STRICT as usize,
        _ => args[0] == libc::SECCOMP_SET_MODE_STRICT as usize,
    };
    if strict {
        // Strict mode allows four calls and nothing else: no page could ever come near again.
        return error(libc::EINVAL);
    }
    if !install {
        return CallOutcome::Forward;
    }
    let Some(program) = syscall_pinning::peek::<FilterProgram>(header) else { return error(libc::EFAULT) };
    let len = usize::from(program.len);
    if len == 0 || len > 4096 {
        return error(libc::EINVAL);
    }
    let mut theirs = vec![Instruction { code: 0, jump_true: 0, jump_false: 0, constant: 0 }; len];
    if !syscall_pinning::peek_slice(program.instructions as usize, &mut theirs) {
        return error(libc::EFAULT);
    }
    let combined = filter::exempt_own_calls(&theirs);
    if combined.len() > 4096 {
        return error(libc::EINVAL);
    }
    let header = FilterProgram { len: combined.len() as u16, instructions: combined.as_ptr() };
    let mut args = args;
    args[2] = &raw const header as usize;
    // SAFETY: the program's own call, with its filter copied and extended.
    done(unsafe { gate::syscall(number as libc::c_long, args) })
}

/// Serves `close_range` for all but our descriptors.
fn close_range(args: [usize; 6]) -> CallOutcome {
    let [first, last, flags, ..] = args.map(|arg| arg as u32 as usize);
    let (ours, ours_end) = (window::DESCRIPTORS as usize, window::DESCRIPTORS_END as usize);
    if first > last {
        return error(libc::EINVAL);
    }
    for (from, to) in [(first, last.min(ours - 1)), (first.max(ours_end), last)] {
        if from <= to {
            // SAFETY: the program's own descriptors.
            if let Err(errno) = unsafe { gate::syscall(libc::SYS_close_range, [from, to, flags, 0, 0, 0]) } {
                return error(errno.0);
            }
        }
    }
    CallOutcome::Done(0)
}
