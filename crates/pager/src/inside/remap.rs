//! `mremap` in the window.
//!
//! The far copy of a page belongs to its place, so pages come near and are copied to their new
//! place one by one. Other threads see of that what the kernel shows them. The new place cannot be
//! touched before its pages are seized, and a page of it is let go with its content. The old place
//! cannot be written from the first copy on, has no memory when the new one gets it, and cannot be
//! touched when its pages are let go.

use super::call::{CallOutcome, done, error};
use super::emulate::{address_of, discard, forget, pages_of, release};
use super::fault::{fault_in, settled_phase};
use super::limits;
use super::runtime::{Phase, Runtime, fail};
use super::store::{self, enqueue};
use super::sync::Wait;
use super::table::CHUNK;
use crate::control::exit;
use crate::space::{FOREIGN, PageRange, Space};
use crate::window;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::policy::replacement::PolicyState;
use farfield_core::{PageId, page_word::State};
use farfield_os::uffd::Track;
use farfield_os::{Errno, Result, gate, memory};

/// Serves `mremap(old, old_len, new_len, flags, new)` where `old` or `new` is in the window.
pub fn remap(runtime: &Runtime, args: [usize; 6]) -> CallOutcome {
    let [old, old_len, new_len, flags, new, _] = args;
    let flags = flags as i32;
    let pages = |len: usize| len.checked_next_multiple_of(PAGE_BYTES).map(|len| (len / PAGE_BYTES) as u64);
    let (Some(old_pages), Some(new_pages)) = (pages(old_len), pages(new_len)) else { return error(libc::ENOMEM) };
    let fixed = flags & libc::MREMAP_FIXED != 0;
    let stays = flags & libc::MREMAP_DONTUNMAP != 0;
    // A fixed place, and leaving the old one mapped, need permission to move.
    let unmovable = flags & libc::MREMAP_MAYMOVE == 0;
    if unmovable && (fixed || stays) || stays && old_pages != new_pages || new_pages == 0 {
        return error(libc::EINVAL);
    }
    let overlap = fixed && new < old.saturating_add(old_len) && old < new.saturating_add(new_len);
    if overlap || !old.is_multiple_of(PAGE_BYTES) {
        return error(libc::EINVAL);
    }
    let mut space = runtime.space.lock();
    if !window::contains(old) {
        return remap_other(runtime, &mut space, args, None);
    }
    if old_pages == 0 {
        return error(libc::EINVAL);
    }
    let start = window::page_of(old).0;
    let from = PageRange { start, end: start + old_pages };
    if !space.is_mapped(from) {
        return error(libc::EFAULT);
    }
    let parts = space.parts_in(from);
    if parts.iter().any(|(_, prot)| *prot == FOREIGN) {
        // Ours and others in one call get the answer that kernels before 6.17 give whenever
        // mappings differ.
        return if parts.len() > 1 { error(libc::EFAULT) } else { remap_other(runtime, &mut space, args, Some(from)) };
    }
    let (_, prot) = parts[parts.len() - 1];
    let growth = if stays { new_pages } else { new_pages.saturating_sub(old_pages) };
    if growth > 0 && !limits::allow(&space, growth, prot) {
        return error(libc::ENOMEM);
    }
    let target = if fixed {
        let Some(target) = pages_of(new, new_len) else { return error(libc::EINVAL) };
        release(runtime, &mut space, target);
        target
    } else if new_pages <= old_pages && !stays {
        release(runtime, &mut space, PageRange { start: start + new_pages, end: from.end });
        return CallOutcome::Done(old as isize);
    } else {
        let growth = PageRange { start: from.end, end: start + new_pages };
        if !stays && growth.end <= window::pages_end(PageId(start)) && space.is_free(growth) {
            return match protect(growth, prot) {
                Ok(()) => {
                    space.map(growth, prot);
                    CallOutcome::Done(old as isize)
                }
                Err(errno) => error(errno.0),
            };
        }
        if unmovable {
            return error(libc::ENOMEM);
        }
        // The search asks for as much room behind it again: a mapping that grows once grows often.
        match space.find(new_pages.saturating_mul(2)).or_else(|| space.find(new_pages)) {
            Some(found) => PageRange { start: found.start, end: found.start + new_pages },
            None => return error(libc::ENOMEM),
        }
    };
    let kept = PageRange { start, end: start + old_pages.min(new_pages) };
    if let Err(errno) = (RangeMove { runtime, from: kept, target, stays }).carry_out(&mut space) {
        // The kernel may have unmapped the target.
        space.map(target, FOREIGN);
        release(runtime, &mut space, target);
        return error(errno.0);
    }
    if !stays {
        release(runtime, &mut space, from);
    }
    CallOutcome::Done(window::address_of(PageId(target.start)) as isize)
}

/// Moves memory that is not ours, from or to a place in the window, by the kernel's own call.
/// `from` is its place if that is in the window.
fn remap_other(runtime: &Runtime, space: &mut Space, args: [usize; 6], from: Option<PageRange>) -> CallOutcome {
    let [old, _, new_len, flags, new, _] = args;
    let stays = flags as i32 & libc::MREMAP_DONTUNMAP != 0;
    // Without a fixed place `new` may be anything.
    let fixed = flags as i32 & libc::MREMAP_FIXED != 0 && window::contains(new);
    let target = if fixed { pages_of(new, new_len) } else { None };
    if fixed && target.is_none() {
        return error(libc::EINVAL);
    }
    if let Some(target) = target {
        release(runtime, space, target);
        space.map(target, FOREIGN);
    }
    // SAFETY: the program's own call, on its own mapping; what was at the new place has been
    // discarded.
    let result = unsafe { gate::syscall(libc::SYS_mremap, args) };
    if let (Some(target), Err(_)) = (target, result) {
        // The kernel may have unmapped the target all the same.
        release(runtime, space, target);
    }
    if let (Some(from), Ok(address)) = (from, result) {
        let kept = if address == old { (new_len.div_ceil(PAGE_BYTES) as u64).min(from.pages()) } else { 0 };
        if address == old || !stays {
            release(runtime, space, PageRange { start: from.start + kept, end: from.end });
        }
    }
    done(result)
}

fn protect(range: PageRange, prot: i32) -> Result<()> {
    let (address, len) = address_of(range);
    // SAFETY: the callers give the reason why this is sound.
    unsafe { memory::mprotect(address, len, prot) }
}

/// Move of the content of `from` to the start of `target`, which is free. If it `stays`, the old
/// place stays mapped, as zeros.
struct RangeMove<'a> {
    runtime: &'a Runtime,
    from: PageRange,
    target: PageRange,
    stays: bool,
}

impl RangeMove<'_> {
    /// Carries the move out. After an error everything is where it was, except for mappings in
    /// `target`.
    fn carry_out(&self, space: &mut Space) -> Result<()> {
        let parts = space.parts_in(self.from);
        if settled_phase(self.runtime) != Phase::Armed {
            let (from, target) = (address_of(self.from), address_of(self.target));
            self.move_by_kernel(from.0, target.0, from.1)?;
            return self.open(space, &parts);
        }
        let moved = self.seal(&parts).and_then(|()| self.move_pages(space, &parts));
        if self.stays || moved.is_err() {
            self.unseal(&parts);
        }
        moved
    }

    /// Moves the mapping while the kernel serves faults. Kernels before 6.17 return EFAULT if it is
    /// several mappings to them.
    fn move_by_kernel(&self, source: usize, destination: usize, len: usize) -> Result<()> {
        let stays = if self.stays { libc::MREMAP_DONTUNMAP } else { 0 };
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | stays) as usize;
        // SAFETY: source and destination are ours, disjoint and of one length; the destination
        // holds nothing.
        match unsafe { gate::syscall(libc::SYS_mremap, [source, len, len, flags, destination, 0]) } {
            Err(Errno(libc::EFAULT)) if len > PAGE_BYTES => {
                let half = len / PAGE_BYTES / 2 * PAGE_BYTES;
                self.move_by_kernel(source, destination, half)?;
                let rest = self.move_by_kernel(source + half, destination + half, len - half);
                if rest.is_err() {
                    let _ = self.move_by_kernel(destination, source, half);
                }
                rest
            }
            result => result.map(drop),
        }
    }

    fn new_of(&self, page: u64) -> PageId {
        PageId(self.target.start + (page - self.from.start))
    }

    /// Returns the new place of a part of `from`; that of the last part includes the growth.
    fn target_of(&self, part: PageRange) -> PageRange {
        let start = self.new_of(part.start).0;
        let end = if part.end == self.from.end { self.target.end } else { start + part.pages() };
        PageRange { start, end }
    }

    /// Gives the target the protection of what moves there.
    fn open(&self, space: &mut Space, parts: &[(PageRange, i32)]) -> Result<()> {
        for &(part, prot) in parts {
            let target = self.target_of(part);
            protect(target, prot)?;
            space.map(target, prot);
        }
        Ok(())
    }

    /// Returns the protection of the old place while its content is copied.
    fn sealed(&self, prot: i32) -> i32 {
        if self.stays { prot | libc::PROT_READ } else { prot & !libc::PROT_WRITE | libc::PROT_READ }
    }

    /// Makes the old place readable and, unless it stays, not writable.
    fn seal(&self, parts: &[(PageRange, i32)]) -> Result<()> {
        let mut changes = parts.iter().filter(|(_, prot)| self.sealed(*prot) != *prot);
        changes.try_for_each(|&(part, prot)| protect(part, self.sealed(prot)))
    }

    fn unseal(&self, parts: &[(PageRange, i32)]) {
        for &(part, prot) in parts.iter().filter(|(_, prot)| self.sealed(*prot) != *prot) {
            let _ = protect(part, prot);
        }
    }

    /// Moves the pages while faults are ours. No fork comes in between: it needs the space, which
    /// the caller has.
    fn move_pages(&self, space: &mut Space, parts: &[(PageRange, i32)]) -> Result<()> {
        let runtime = self.runtime;
        let chunks = (self.from.start / CHUNK..self.from.end.div_ceil(CHUNK)).map(|chunk| chunk * CHUNK);
        let touched: Vec<PageRange> = chunks
            .filter(|&chunk| runtime.table().chunk_touched(chunk))
            .map(|chunk| PageRange { start: chunk.max(self.from.start), end: (chunk + CHUNK).min(self.from.end) })
            .collect();
        for page in touched.iter().flat_map(|piece| piece.start..piece.end) {
            seize_nothing(runtime, self.new_of(page));
        }
        if let Err(errno) = self.open(space, parts) {
            for page in touched.iter().flat_map(|piece| piece.start..piece.end) {
                runtime.table().update(self.new_of(page), |word| Some(word.discarded()));
            }
            return Err(errno);
        }
        for piece in touched {
            for page in piece.start..piece.end {
                move_page(runtime, PageId(page), self.new_of(page));
            }
            if !self.stays {
                // A thread that waits for one of these pages finds that there is nothing.
                let _ = protect(piece, libc::PROT_NONE);
            }
            forget(runtime, piece);
        }
        Ok(())
    }
}

/// Seizes a page that is nowhere, whichever thread moves it now. At a free place there may still be
/// a page of zeros. It was brought for a thread which had touched it before it was unmapped, or
/// along with its neighbour.
fn seize_nothing(runtime: &Runtime, page: PageId) {
    let absent = |state| state == State::Absent;
    while runtime.table().update(page, |word| if absent(word.state()) { word.seize() } else { None }).is_none() {
        discard(runtime, PageRange { start: page.0, end: page.0 + 1 }, true);
    }
}

/// Moves the content of a page to a seized one, and leaves the old one seized, without memory.
fn move_page(runtime: &Runtime, old: PageId, new: PageId) {
    let table = runtime.table();
    let mut wait = Wait::new("a page that another thread moves");
    let before = loop {
        match table.word(old).state() {
            State::Loading | State::Evicting => store::wait_for(runtime, &mut wait),
            // The page's far copy belongs to the old place.
            State::Far => drop(fault_in(runtime, old, true)),
            State::Absent | State::Near => {
                let is_far = |state| state == State::Far;
                if let Some((before, _)) =
                    table.update(old, |word| if is_far(word.state()) { None } else { word.seize() })
                {
                    break before.state();
                }
            }
        }
    };
    if before == State::Absent {
        table.update(new, |word| Some(word.discarded()));
        return;
    }
    let (source, destination) = (window::address_of(old), window::address_of(new));
    let mut page = PageCopy([0; PAGE_BYTES]);
    // SAFETY: the old page is near, readable and seized, so that nobody else moves it; `page` has
    // room for it.
    unsafe { core::ptr::copy_nonoverlapping(source as *const u8, page.0.as_mut_ptr(), PAGE_BYTES) };
    // The page is gone here first, then there: nobody finds here what has been written anew there.
    // One page leaves and one comes: the budget does not notice.
    // SAFETY: the content of the page is in `page`.
    let _ = unsafe { memory::madvise(source, PAGE_BYTES, libc::MADV_DONTNEED) };
    let copy = page.0.as_ptr() as usize;
    // SAFETY: `page` is readable as far as it goes.
    let copied = unsafe { runtime.armed().uffd.copy(destination, copy, PAGE_BYTES, Track::Dirty, false) };
    if let Err((_, errno)) = copied {
        fail(exit::INTERNAL, format_args!("a page could not be moved by mremap: {errno}"));
    }
    let moved = table.update(new, |word| Some(word.finish_load(true, PolicyState::default(), 0)));
    if moved.is_some_and(|(before, _)| !before.is_queued()) {
        enqueue(runtime, new);
    }
}

/// Copy of a page: UFFDIO_COPY reads whole pages.
#[repr(align(64))]
struct PageCopy([u8; PAGE_BYTES]);
