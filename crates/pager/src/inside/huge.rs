//! Huge pages: they are in use until some memory has to leave.
//!
//! A program's memory lies in pages of 2 MiB where it asks for them, or everywhere if its user does
//! (`farfield run --huge-pages`), as long as all of it is near. Far memory comes and goes in pages
//! of 4 KiB. So there are no new huge pages once memory has to leave, and the old ones are taken
//! apart as their first part leaves. A huge page that loses a part would keep all its memory, until
//! the kernel is short of it.

use super::table::PageWordTable;
use crate::window;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::memory;

/// Places where there may be huge pages: [`NOWHERE`], [`SOMEWHERE`] or [`EVERYWHERE`].
static WHERE: AtomicU32 = AtomicU32::new(NOWHERE);
const NOWHERE: u32 = 0;
/// Where the program asked for them, or where there were some before memory had to leave.
const SOMEWHERE: u32 = 1;
const EVERYWHERE: u32 = 2;

/// Decides, at the start, whether there are huge pages everywhere, or only where the program asks
/// for them.
pub fn start(everywhere: bool) {
    WHERE.store(if everywhere { EVERYWHERE } else { NOWHERE }, Ordering::Relaxed);
    advise(window::BASE, window::LEN);
}

/// Tells the kernel about a part of the window that was mapped anew.
pub fn advise(address: usize, len: usize) {
    let is_wanted = WHERE.load(Ordering::Relaxed) == EVERYWHERE;
    let advice = if is_wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // SAFETY: changes no content.
    let _ = unsafe { memory::madvise(address, len, advice) };
}

/// Notes that the program asks for huge pages.
pub fn note() {
    WHERE.fetch_max(SOMEWHERE, Ordering::Relaxed);
}

/// Stops the use of new huge pages: from now on memory may have to leave.
pub fn stop() {
    if WHERE.fetch_min(SOMEWHERE, Ordering::Relaxed) != NOWHERE {
        advise(window::BASE, window::LEN);
        for (start, end) in window::extents::pages() {
            advise(window::address_of(PageId(start)), (end - start) as usize * PAGE_BYTES);
        }
    }
}

/// Takes the huge pages apart in which these pages may lie. The pages are near.
pub fn split(table: &PageWordTable, pages: impl Iterator<Item = PageId>) {
    if WHERE.load(Ordering::Relaxed) == NOWHERE {
        return;
    }
    for page in pages.filter(|page| table.split_chunk(*page)) {
        // The kernel takes a huge page apart when it gets advice about a part of it.
        // SAFETY: changes no content.
        let _ = unsafe { memory::madvise(window::address_of(page), PAGE_BYTES, libc::MADV_COLD) };
    }
}
