//! Tables as large as the region, which take memory only where they are used.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::file::Descriptor;
use farfield_os::memfd::{self, Mapping, MappingAccess};
#[cfg(not(miri))]
use farfield_os::memory;
use farfield_os::{Errno, net};
use std::os::fd::{AsFd, IntoRawFd};

/// Table of atomic numbers that begin as zero.
pub(crate) struct AtomicTable<T> {
    start: usize,
    len: u64,
    kind: PhantomData<T>,
}

impl<T> AtomicTable<T> {
    /// Maps a table for `len` numbers.
    pub(crate) fn new(len: u64) -> Result<AtomicTable<T>, Errno> {
        #[cfg(not(miri))]
        let start = memory::map_anonymous(Self::bytes(len))?;
        #[cfg(miri)]
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(Self::layout(len)) }.expose_provenance();
        Ok(AtomicTable { start, len, kind: PhantomData })
    }

    fn bytes(len: u64) -> usize {
        (len as usize * size_of::<T>()).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES)
    }

    #[cfg(miri)]
    fn layout(len: u64) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(Self::bytes(len), PAGE_BYTES).expect("it fits")
    }

    /// Returns the number at `index`; panics if `index` is outside the table.
    pub(crate) fn at(&self, index: u64) -> &T {
        assert!(index < self.len);
        // SAFETY: inside the mapping, which lives as long as `self`; atomics are valid whatever
        // their bits.
        unsafe { &*(self.start as *const T).add(index as usize) }
    }
}

impl<T> Drop for AtomicTable<T> {
    fn drop(&mut self) {
        #[cfg(not(miri))]
        // SAFETY: mapped in `new` with this length; references end with `self`.
        let _ = unsafe { memory::munmap(self.start, Self::bytes(self.len)) };
        #[cfg(miri)]
        // SAFETY: made in `new` with this layout; references end with `self`.
        unsafe {
            std::alloc::dealloc(core::ptr::with_exposed_provenance_mut(self.start), Self::layout(self.len))
        };
    }
}

/// Number of pages whose entries fill a page of the table.
const BLOCK: u64 = (PAGE_BYTES / size_of::<u32>()) as u64;
/// Longest run of pages that is scanned entry by entry. In longer runs only the stretches of the
/// table that have memory are scanned.
const SPARSE: u64 = 1024;

/// Table of the place of each page, if it has one. It lies in shared memory, because the kernel can
/// tell which parts of that are in use.
pub(crate) struct PageTable {
    file: Descriptor,
    mapping: Mapping,
    pages: u64,
}

impl PageTable {
    /// Makes a table for `pages` pages, none of which has a place.
    pub(crate) fn new(pages: u64) -> Result<PageTable, Errno> {
        let bytes = pages * size_of::<u32>() as u64;
        let number = memfd::create(c"farfield page table", bytes)?.into_raw_fd();
        // SAFETY: just made, nobody else's.
        let file = unsafe { Descriptor::new(net::lift(number)?) };
        let mapping = Mapping::new(file.as_fd(), bytes, MappingAccess::ReadWrite)?;
        Ok(PageTable { file, mapping, pages })
    }

    fn entry(&self, page: u64) -> &AtomicU32 {
        assert!(page < self.pages);
        // SAFETY: inside the mapping, which is page-aligned and lives as long as `self`; every
        // access to it is atomic.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU32::from_ptr(self.mapping.as_ptr().cast::<u32>().add(page as usize))
        }
    }

    /// Returns the place of `page`.
    pub(crate) fn get(&self, page: u64) -> Option<u64> {
        self.entry(page).load(Ordering::Acquire).checked_sub(1).map(u64::from)
    }

    /// Gives `page` this place, or none; returns the one that it had.
    pub(crate) fn set(&self, page: u64, place: Option<u64>) -> Option<u64> {
        let word = place.map_or(0, |place| place as u32 + 1);
        self.entry(page).swap(word, Ordering::AcqRel).checked_sub(1).map(u64::from)
    }

    /// Gives `page` the place `to` if it has `from`; returns whether it had.
    pub(crate) fn exchange(&self, page: u64, from: u64, to: u64) -> bool {
        let word = |place: u64| place as u32 + 1;
        self.entry(page).compare_exchange(word(from), word(to), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Calls `each` for every page from `page` up to `end` that may have a place, in ascending
    /// order. In long runs, stretches of the table without memory are skipped.
    pub(crate) fn each(&self, page: u64, end: u64, mut each: impl FnMut(u64)) -> Result<(), Errno> {
        if end - page <= SPARSE {
            (page..end).for_each(each);
            return Ok(());
        }
        let mut at = page;
        while at < end
            && let Some(data) = memfd::next_data(self.file.as_fd(), at * 4)?
        {
            let stretch = (data.start / 4).max(at)..(data.end / 4).min(end);
            stretch.clone().for_each(&mut each);
            at = stretch.end.max(at + 1);
            if stretch.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Frees the memory of the table for pages none of which has a place.
    pub(crate) fn forget(&self, page: u64, end: u64) -> Result<(), Errno> {
        let (first, last) = (page.next_multiple_of(BLOCK), end / BLOCK * BLOCK);
        if first >= last {
            return Ok(());
        }
        memfd::punch(self.file.as_fd(), first * 4, (last - first) * 4)
    }
}
