//! The window: the one address range, the same in every process of a job, in which far-capable
//! memory lives.
//!
//! One fixed range makes system call pinning cheap: a system call touches far-capable memory if an
//! argument has the window's upper bits, which a seccomp filter can test. Page `n` of the window is
//! page `n` of the process's region in the pool, so no table of far addresses is needed. The last
//! pages of the window are exceptions: they lie in [`extents`], where the program asked for them.

pub mod extents;

use farfield_core::{PageId, geometry::PAGE_SHIFT};

/// First byte of the window: 32 TiB. This is away from where Linux puts programs (85 TiB and up)
/// and their mappings (just below 128 TiB), from ZGC's heaps (4 to 20 TiB), Go's (0.75 TiB) and the
/// sanitizers' shadows.
pub const BASE: usize = 0x2000_0000_0000;
/// Length of the window in bytes: 12 TiB.
pub const LEN: usize = 0xc00_0000_0000;
/// Number of pages in the window and in its extents: exactly what 32 bits can number.
pub const PAGES: u64 = 1 << 32;
/// Upper half of the first address that may be far-capable, in an extent.
pub const HIGH_FIRST: u32 = (extents::BASE >> 32) as u32;
/// Upper half of the first address behind all that may be far-capable.
pub const HIGH_END: u32 = ((BASE + LEN) >> 32) as u32;

const _: () = assert!((LEN >> PAGE_SHIFT) as u64 == extents::FIRST_PAGE);
const _: () = assert!((BASE + LEN).is_multiple_of(1 << 32));

/// Address, in the last page of the window, that asks for far-capable memory wherever there is
/// room. A call of `mmap` with this hint traps whatever else is captured, and no mapping of two pages or
/// more can lie there.
pub const ANYWHERE: usize = BASE + LEN - (1 << PAGE_SHIFT);

/// Address of the gate: a page with our own `syscall` instructions, at the same place in every
/// process of a job. It lies behind all that may be far-capable, because it is mapped under the
/// filter of a job, before there is a handler.
pub const GATE: usize = BASE + LEN + 0x10_0000;
/// Address in the gate of the `syscall` instruction for our own calls.
pub const GATE_OWN: usize = GATE;
/// Address in the gate of the `syscall` instruction for calls that we make for the program, after
/// having brought their buffers near.
pub const GATE_FORWARD: usize = GATE + 16;

/// First descriptor number that we keep in a program; the last is before [`DESCRIPTORS_END`]. The
/// numbers are above 1024, the usual soft limit, so that most programs cannot even name them.
pub const DESCRIPTORS: i32 = 1500;
/// First descriptor number that is not ours.
pub const DESCRIPTORS_END: i32 = 1628;

const fn is_plain(address: usize) -> bool {
    address >= BASE && address < BASE + LEN
}

/// Checks whether the address is in the window or in an extent.
pub fn contains(address: usize) -> bool {
    is_plain(address) || extents::with_address(address).is_some()
}

/// Returns the page that holds the address, which is in the window or in an extent.
pub fn page_of(address: usize) -> PageId {
    match extents::with_address(address) {
        None => PageId(((address - BASE) >> PAGE_SHIFT) as u64),
        Some((start, _, page)) => PageId(page + ((address - start) >> PAGE_SHIFT) as u64),
    }
}

/// Returns the address of the first byte of a page.
pub fn address_of(page: PageId) -> usize {
    match page.0 {
        extents::FIRST_PAGE.. => extents::with_page(page.0),
        _ => None,
    }
    .map_or(BASE + ((page.0 as usize) << PAGE_SHIFT), |(first, _, address)| {
        address + (((page.0 - first) as usize) << PAGE_SHIFT)
    })
}

/// Returns the first address behind the window, or behind the extent that holds `address`.
pub fn end_of(address: usize) -> usize {
    extents::with_address(address).map_or(BASE + LEN, |(_, end, _)| end)
}

/// Returns the first page behind `page` whose address does not continue where its predecessor ends.
pub fn pages_end(page: PageId) -> u64 {
    match page.0 {
        extents::FIRST_PAGE.. => extents::with_page(page.0).map_or(page.0, |(_, end, _)| end),
        _ => extents::FIRST_PAGE,
    }
}

/// Returns the page ranges (first, end) with contiguous addresses: that of the window, and that of
/// each extent.
pub fn parts() -> impl Iterator<Item = (u64, u64)> {
    core::iter::once((0, extents::FIRST_PAGE)).chain(extents::pages())
}
