//! Extents: parts of the window that lie where the program asked for them.
//!
//! A program may name the place of a mapping without insisting on it. Many programs that do cannot
//! live without it: their pointers have fewer bits, or mean something by their place. The last
//! pages of the window are kept for such mappings: an extent is a run of these pages with addresses
//! of its own. Code that works on pages (words, queue, pool) does not notice; only the translation
//! between addresses and pages does. Extents are added, with the space held, and never taken away.
//! What the program unmaps stays reserved, for the next request for that place.

use super::PAGES;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use farfield_core::geometry::PAGE_SHIFT;

/// First page that belongs to extents.
pub const FIRST_PAGE: u64 = PAGES - (1 << 30);
/// First address where an extent can be: above what 32 bits can address, and below the window.
/// Nothing else is usually there: programs, libraries and what the kernel places by itself lie
/// above the window.
pub const BASE: usize = 1 << 32;
/// First address behind the place of extents.
pub const END: usize = super::BASE;

/// Maximum number of extents of a process.
const MAX: usize = 64;
/// Number of pages that an extent can grow to at least, while there are enough: 64 GiB.
const ROOM_PAGES: u64 = 1 << 24;
/// Number of unused pages before each extent, so that no run of pages goes from one to the next.
const GAP_PAGES: u64 = 512;

struct Extent {
    address: AtomicUsize,
    len: AtomicUsize,
    page: AtomicU64,
    room: AtomicU64,
}

static EXTENTS: [Extent; MAX] = [const {
    Extent { address: AtomicUsize::new(0), len: AtomicUsize::new(0), page: AtomicU64::new(0), room: AtomicU64::new(0) }
}; MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Extent {
    fn address(&self) -> usize {
        self.address.load(Ordering::Relaxed)
    }
    fn end(&self) -> usize {
        self.address() + self.len.load(Ordering::Acquire)
    }
    fn page(&self) -> u64 {
        self.page.load(Ordering::Relaxed)
    }
    fn room(&self) -> u64 {
        self.room.load(Ordering::Relaxed)
    }
}

fn all() -> &'static [Extent] {
    &EXTENTS[..COUNT.load(Ordering::Acquire)]
}

/// Returns the bounds and the first page of the extent that holds this address.
pub fn with_address(address: usize) -> Option<(usize, usize, u64)> {
    if !(BASE..END).contains(&address) {
        return None;
    }
    let extent = all().iter().find(|extent| (extent.address()..extent.end()).contains(&address))?;
    Some((extent.address(), extent.end(), extent.page()))
}

/// Returns the first page, the end page and the address of the extent that holds this page, or that
/// ends before it.
pub fn with_page(page: u64) -> Option<(u64, u64, usize)> {
    let is_it = |extent: &&Extent| (extent.page()..=extent.page() + extent.room()).contains(&page);
    let extent = all().iter().find(is_it)?;
    let pages = (extent.len.load(Ordering::Acquire) >> PAGE_SHIFT) as u64;
    Some((extent.page(), extent.page() + pages, extent.address()))
}

/// Returns the pages of each extent, as first page and the page behind the last.
pub fn pages() -> impl Iterator<Item = (u64, u64)> {
    all()
        .iter()
        .map(|extent| (extent.page(), extent.page() + (extent.len.load(Ordering::Acquire) >> PAGE_SHIFT) as u64))
}

/// Returns the start of the first extent that begins at `address` or behind it.
pub fn next(address: usize) -> Option<usize> {
    all().iter().map(Extent::address).filter(|&start| start >= address).min()
}

/// Makes `len` bytes at `address` part of an extent: of the one that they lie in or continue, else
/// of a new one.
///
/// `reserve` takes address space that is not reserved yet (address and length). The caller holds
/// the space. Returns `false` if there is no room left, or if `reserve` fails.
pub fn add(address: usize, len: usize, mut reserve: impl FnMut(usize, usize) -> bool) -> bool {
    let Some(end) = address.checked_add(len) else { return false };
    if address < BASE || end > END {
        return false;
    }
    let continues = |extent: &&Extent| {
        (extent.address()..=extent.end()).contains(&address)
            && ((end - extent.address()) >> PAGE_SHIFT) as u64 <= extent.room()
    };
    if let Some(extent) = all().iter().find(continues) {
        let old = extent.end();
        if end > old {
            if !reserve(old, end - old) {
                return false;
            }
            extent.len.store(end - extent.address(), Ordering::Release);
        }
        return true;
    }
    let pages = (len >> PAGE_SHIFT) as u64;
    let page = all()
        .last()
        .map_or(FIRST_PAGE + GAP_PAGES, |last| (last.page() + last.room() + GAP_PAGES).next_multiple_of(GAP_PAGES));
    let room = if page + pages.max(ROOM_PAGES) < PAGES { pages.max(ROOM_PAGES) } else { pages };
    let Some(extent) = EXTENTS.get(all().len()).filter(|_| page + room < PAGES) else { return false };
    if !reserve(address, len) {
        return false;
    }
    extent.address.store(address, Ordering::Relaxed);
    extent.page.store(page, Ordering::Relaxed);
    extent.room.store(room, Ordering::Relaxed);
    extent.len.store(len, Ordering::Release);
    COUNT.fetch_add(1, Ordering::Release);
    true
}

#[cfg(test)]
mod tests {
    //! Danger: two addresses are one page, or a run of pages is no run of addresses.
    use super::super::{address_of, contains, end_of, page_of, pages_end};
    use super::*;
    use farfield_core::PageId;

    /// One test, because there is one table.
    #[test]
    fn pages_and_addresses_agree_and_extents_never_touch() {
        const MIB: usize = 1 << 20;
        let mut asked = Vec::new();
        let mut reserve = |address, len| {
            asked.push((address, len));
            address != 5 * BASE
        };
        assert!(!add(1 << 20, MIB, &mut reserve), "32 bits can address it");
        assert!(!add(END - MIB, 2 * MIB, &mut reserve), "behind the end");
        assert!(!add(usize::MAX - MIB + 1, MIB, &mut reserve));
        assert!(!add(5 * BASE, MIB, &mut reserve), "somebody else is there");
        assert!(add(BASE, 4 * MIB, &mut reserve));
        assert!(add(BASE + MIB, MIB, &mut reserve), "it is there already");
        assert!(add(BASE + 2 * MIB, 6 * MIB, &mut reserve), "it goes on");
        assert!(add(7 * BASE, 1 << 40, &mut reserve));
        assert!(add(3 * BASE, MIB, &mut reserve));
        assert_eq!(
            asked,
            [(5 * BASE, MIB), (BASE, 4 * MIB), (BASE + 4 * MIB, 4 * MIB), (7 * BASE, 1 << 40), (3 * BASE, MIB)]
        );
        let extents = [(BASE, 8 * MIB), (7 * BASE, 1 << 40), (3 * BASE, MIB)];
        let mut last = 0;
        for (address, len) in extents {
            assert!(
                contains(address) && contains(address + len - 1) && !contains(address + len) && !contains(address - 1)
            );
            assert_eq!(end_of(address + 1), address + len);
            let first = page_of(address).0;
            assert!(first >= FIRST_PAGE && first > last, "a gap lies between this extent and the one before");
            last = first + (len >> PAGE_SHIFT) as u64;
            assert!(last < PAGES);
            assert_eq!(pages_end(PageId(first)), last);
            for at in [0, MIB / 2, len - 4096] {
                assert_eq!(address_of(page_of(address + at)), address + at);
            }
            // The end of a range is no page of it, but has an address.
            assert_eq!(address_of(PageId(last)), address + len);
        }
        assert_eq!(pages().count(), 3);
        assert_eq!(next(BASE + 1), Some(3 * BASE));
        assert_eq!(next(8 * BASE), None);
        let plain = super::super::BASE + 5 * MIB;
        assert_eq!(address_of(PageId(FIRST_PAGE)), super::super::BASE + super::super::LEN);
        assert_eq!(address_of(page_of(plain)), plain);
        assert_eq!(end_of(plain), super::super::BASE + super::super::LEN);
        // The table is full before its pages are.
        while add(next_place(), MIB, |_, _| true) {}
        assert!(pages().count() <= MAX);
        assert_eq!(address_of(page_of(plain)), plain);
    }

    fn next_place() -> usize {
        1 << 44 | pages().count() << 36
    }
}
