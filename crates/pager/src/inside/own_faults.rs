//! Memory whose faults a program serves itself, with a userfaultfd of its own.
//!
//! A range can have one userfaultfd. So a range that a program registers stops being far-capable.
//! It comes near, leaves our tables and our userfaultfd, and is the kernel's and the program's from
//! then on, as files in the window are.

use super::arm::with_descriptors;
use super::call::{CallOutcome, error, forward};
use super::emulate::{address_of, forget, pages_of};
use super::fault::{fault_in, settled_phase};
use super::runtime::{Phase, Runtime, fail};
use super::table::CHUNK;
use super::{store, sync, syscall_pinning};
use crate::control::{FaultMode, exit};
use crate::space::{FOREIGN, PageRange};
use crate::window;
use core::sync::atomic::Ordering;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::page_word::{PageWord, State};
use farfield_os::pipe::PagePipe;
use farfield_os::uffd::Track;
use farfield_os::{file, memory};

/// Number of pages that are looked at together.
const BATCH: usize = 64;

/// Serves `ioctl(userfaultfd, UFFDIO_REGISTER, argument)`.
pub fn register(runtime: &Runtime, number: usize, args: [usize; 6]) -> CallOutcome {
    // The words are address, length, mode, and the kernel's answer.
    let Some(mut argument) = syscall_pinning::peek::<[u64; 4]>(args[2]) else { return error(libc::EFAULT) };
    let Some(range) = pages_of(argument[0] as usize, argument[1] as usize) else { return CallOutcome::Forward };
    // No thread arms, forks, maps or moves meanwhile.
    let mut space = runtime.space.lock();
    if !space.is_mapped(range) {
        return error(libc::EINVAL);
    }
    let mut copied = args;
    copied[2] = argument.as_mut_ptr() as usize;
    // SAFETY: the program's own call, with a copy of its argument.
    let call = || unsafe { forward(number, copied) };
    let mut result = call();
    if result == -(libc::EBUSY as isize) && settled_phase(runtime) == Phase::Armed {
        for part in space.mapped_in(range) {
            give_up(runtime, part);
            space.map(part, FOREIGN);
        }
        result = call();
    }
    if result < 0 {
        return CallOutcome::Done(result);
    }
    space.map(range, FOREIGN);
    drop(space);
    if syscall_pinning::poke(args[2], argument) { CallOutcome::Done(result) } else { error(libc::EFAULT) }
}

/// Makes a range near for good and gives it to the kernel, with its content. The caller holds the
/// space.
fn give_up(runtime: &Runtime, range: PageRange) {
    let (address, len) = address_of(range);
    freeze(runtime);
    let pipe = with_descriptors(|| PagePipe::open(BATCH)).ok();
    for piece in touched(runtime, range) {
        let near: Vec<u64> = (piece.start..piece.end).filter(|&page| seize_near(runtime, PageId(page))).collect();
        for run in near.chunk_by(|page, next| page + 1 == *next).flat_map(|run| run.chunks(BATCH)) {
            if let Some(pipe) = &pipe {
                drop_zeros(runtime, pipe, run[0], run.len());
            }
        }
        // Pages that may not leave any more are not counted any more.
        runtime.charge(-(near.len() as i64));
    }
    pipe.iter().flat_map(PagePipe::fds).for_each(file::close);
    if let Err(errno) = runtime.armed().uffd.unregister(address, len) {
        fail(exit::INTERNAL, format_args!("memory could not be given to the program's own userfaultfd: {errno}"));
    }
    touched(runtime, range).for_each(|piece| forget(runtime, piece));
    runtime.frozen_by.store(0, Ordering::SeqCst);
}

/// Keeps every other thread out of faults and discards, as a fork does. Blocks until those under
/// way have ended.
fn freeze(runtime: &Runtime) {
    let me = sync::tid() as u32;
    let mut wait = sync::Wait::new("another thread to end its fork, or its change of a mapping");
    while runtime.frozen_by.compare_exchange(0, me, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        wait.pause();
    }
    while runtime.busy.load(Ordering::SeqCst) != 0 {
        store::wait_for(runtime, &mut wait);
    }
}

/// Makes pages of zeros missing, as pages are that were never touched: some of them came near ahead
/// of need. The caller has seized them all. Threads that run may write them; as in an eviction, a
/// pipe keeps what is unmapped.
fn drop_zeros(runtime: &Runtime, pipe: &PagePipe, first: u64, count: usize) {
    let armed = runtime.armed();
    let address = window::address_of(PageId(first));
    // Memory that is shared since a fork is replaced at the next write: now, or, where nothing can
    // be written, not at all.
    // SAFETY: changes no content.
    let _ = unsafe { memory::madvise(address, count * PAGE_BYTES, libc::MADV_POPULATE_WRITE) };
    let all = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: count * PAGE_BYTES };
    // Pages that cannot be read stay as they are.
    let taken = pipe.take(&[all]).unwrap_or(0) / PAGE_BYTES;
    // SAFETY: the pipe has these pages.
    if taken > 0 && unsafe { memory::madvise(address, taken * PAGE_BYTES, libc::MADV_DONTNEED) }.is_err() {
        fail(exit::INTERNAL, format_args!("pages could not be taken for the program's own userfaultfd"));
    }
    let mut page = [0u64; PAGE_BYTES / 8];
    for index in 0..taken {
        // SAFETY: the whole page is writable.
        let read = unsafe { pipe.read_exact(page.as_mut_ptr().cast(), PAGE_BYTES) };
        let (target, source) = (address + index * PAGE_BYTES, page.as_ptr() as usize);
        let is_back = || {
            let wake = armed.mode == FaultMode::Thread;
            // SAFETY: the whole page is readable.
            unsafe { armed.uffd.copy(target, source, PAGE_BYTES, Track::Dirty, wake) }.is_ok()
        };
        if read.is_err() || page.iter().any(|word| *word != 0) && !is_back() {
            fail(exit::INTERNAL, format_args!("pages for the program's own userfaultfd could not be put back"));
        }
    }
}

/// Returns the parts of a range of which any page was ever ours.
fn touched(runtime: &Runtime, range: PageRange) -> impl Iterator<Item = PageRange> {
    let chunks = (range.start / CHUNK..range.end.div_ceil(CHUNK)).map(|chunk| chunk * CHUNK);
    chunks
        .filter(|&chunk| runtime.table().chunk_touched(chunk))
        .map(move |chunk| PageRange { start: chunk.max(range.start), end: (chunk + CHUNK).min(range.end) })
}

/// Seizes a page, after bringing it near if it is far. Returns whether it was counted as near.
fn seize_near(runtime: &Runtime, page: PageId) -> bool {
    let mut wait = sync::Wait::new("a page that another thread moves");
    loop {
        let is_far = |word: PageWord| word.state() == State::Far;
        let word = runtime.table().update(page, |word| if is_far(word) { None } else { word.seize() });
        match word {
            Some((before, _)) => return before.state() == State::Near,
            None if is_far(runtime.table().word(page)) => {
                fault_in(runtime, page, true);
            }
            None => store::wait_for(runtime, &mut wait),
        }
    }
}
