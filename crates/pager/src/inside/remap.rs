//! `mremap` in the window.

use super::call::{Outcome, error};
use super::emulate::{discard, release};
use super::fault::{enter, leave, settled_phase};
use super::runtime::{Phase, Runtime};
use super::store::{self, enqueue};
use super::table::CHUNK;
use crate::space::{FOREIGN, Range, Space};
use crate::window;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{PageId, page_word::State};
use farfield_os::{gate, memory};

/// Serves `mremap(old, old_len, new_len, flags, new)` for an old range in the window.
pub fn remap(runtime: &Runtime, args: [usize; 6]) -> Outcome {
    let [old, old_len, new_len, flags, new, _] = args;
    let flags = flags as i32;
    let pages = |len: usize| len.checked_next_multiple_of(PAGE_BYTES).map(|len| (len / PAGE_BYTES) as u64);
    let (Some(old_pages), Some(new_pages)) = (pages(old_len), pages(new_len)) else { return error(libc::ENOMEM) };
    if !window::contains(old) || !old.is_multiple_of(PAGE_BYTES) || new_pages == 0 || old_pages == 0 {
        return error(libc::EINVAL);
    }
    let stays = flags & libc::MREMAP_DONTUNMAP != 0;
    // A fixed place, and leaving the old one mapped, need leave to move.
    let unmovable = flags & libc::MREMAP_MAYMOVE == 0;
    if unmovable && (flags & libc::MREMAP_FIXED != 0 || stays) || stays && old_pages != new_pages {
        return error(libc::EINVAL);
    }
    let start = window::page_of(old).0;
    let from = Range { start, end: start + old_pages };
    let overlap = flags & libc::MREMAP_FIXED != 0 && new < old + old_len && old < new.saturating_add(new_len);
    if overlap {
        return error(libc::EINVAL);
    }
    let mut space = runtime.space.lock();
    if !space.is_mapped(from) {
        return error(libc::EFAULT);
    }
    let (_, prot) = space.stretch(start).expect("mapped");
    if prot == FOREIGN {
        // Not ours: the kernel moves it, anywhere but in the window.
        // SAFETY: the program's own call on its own mapping.
        let result = unsafe { gate::syscall(libc::SYS_mremap, args) };
        if result.is_ok_and(|address| address != old) {
            space.map(from, FOREIGN);
            release(runtime, &mut space, from);
        }
        return super::call::done(result);
    }
    let target = if flags & libc::MREMAP_FIXED != 0 {
        if !window::contains(new) || !new.is_multiple_of(PAGE_BYTES) {
            return error(libc::EINVAL);
        }
        let first = window::page_of(new).0;
        let target = Range { start: first, end: first + new_pages };
        release(runtime, &mut space, target);
        target
    } else if new_pages <= old_pages && !stays {
        release(runtime, &mut space, Range { start: start + new_pages, end: from.end });
        return Outcome::Done(old as isize);
    } else {
        let growth = Range { start: from.end, end: start + new_pages };
        if !stays && growth.end <= window::PAGES && space.is_free(growth) {
            return match open(&mut space, growth, prot) {
                Ok(()) => Outcome::Done(old as isize),
                Err(errno) => error(errno.0),
            };
        }
        if flags & libc::MREMAP_MAYMOVE == 0 {
            return error(libc::ENOMEM);
        }
        // With as much room behind it again: who grows once grows often.
        match space.find(new_pages.saturating_mul(2)).or_else(|| space.find(new_pages)) {
            Some(found) => Range { start: found.start, end: found.start + new_pages },
            None => return error(libc::ENOMEM),
        }
    };
    if let Err(errno) = open(&mut space, target, prot) {
        return error(errno.0);
    }
    let kept = Range { start, end: start + old_pages.min(new_pages) };
    move_pages(runtime, kept, target);
    if !stays {
        release(runtime, &mut space, from);
    }
    Outcome::Done(window::address_of(PageId(target.start)) as isize)
}

fn open(space: &mut Space, range: Range, prot: i32) -> farfield_os::Result<()> {
    let address = window::address_of(PageId(range.start));
    // SAFETY: the range is free.
    unsafe { memory::mprotect(address, range.pages() as usize * PAGE_BYTES, prot) }?;
    space.map(range, prot);
    Ok(())
}

/// Moves the content of `from` to the start of `target`, which is empty.
fn move_pages(runtime: &Runtime, from: Range, target: Range) {
    let (source, destination) = (window::address_of(PageId(from.start)), window::address_of(PageId(target.start)));
    let len = from.pages() as usize * PAGE_BYTES;
    if settled_phase(runtime) != Phase::Armed {
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) as usize;
        // SAFETY: source and target are ours, disjoint and of one length; the target holds nothing.
        let moved = unsafe { gate::syscall(libc::SYS_mremap, [source, len, len, flags, destination, 0]) };
        if moved.is_err() {
            // SAFETY: both are mapped; the target is new. (Source and target of mixed protection come here.)
            unsafe { core::ptr::copy_nonoverlapping(source as *const u8, destination as *mut u8, len) };
        }
        return;
    }
    let table = runtime.table();
    let armed = runtime.armed();
    let mut page = from.start;
    while page < from.end {
        if !table.chunk_touched(page) {
            page = (page / CHUNK + 1) * CHUNK;
            continue;
        }
        let (old, new) = (PageId(page), PageId(target.start + (page - from.start)));
        // A far page comes near first: its far copy belongs to the old place.
        let mut spins = 0;
        loop {
            match table.word(old).state() {
                State::Absent => break,
                State::Far => {
                    super::fault::bring(runtime, old, true);
                }
                State::Fetching | State::Leaving => store::wait_for(runtime, &mut spins),
                State::Near => {
                    // A fork must not see the page seized.
                    enter(runtime);
                    if table.update(old, |word| if word.state() == State::Near { word.seize() } else { None }).is_none()
                    {
                        leave(runtime);
                        continue;
                    }
                    let address = window::address_of(new);
                    let bytes = window::address_of(old);
                    table.update(new, |word| word.seize());
                    // SAFETY: the old page is near, seized and mapped readable for its owner; the new one is empty.
                    let copied =
                        unsafe { armed.uffd.copy(address, bytes, PAGE_BYTES, farfield_os::uffd::Track::Dirty, false) };
                    if copied.is_err() {
                        super::runtime::fail(
                            crate::control::exit::INTERNAL,
                            format_args!("a page could not be moved by mremap"),
                        );
                    }
                    table.update(old, |word| Some(word.arrived(true, false, 0)));
                    let moved = table.update(new, |word| Some(word.arrived(true, false, 0)));
                    if moved.is_some_and(|(before, _)| !before.is_queued()) {
                        enqueue(runtime, new);
                    }
                    runtime.charge(1);
                    leave(runtime);
                    // Give the old one up at once, so that a large move stays within the budget.
                    discard(runtime, Range { start: page, end: page + 1 }, true);
                    super::evict::make_room(runtime, 0, super::evict::Share::Batch);
                    break;
                }
            }
        }
        page += 1;
    }
}
