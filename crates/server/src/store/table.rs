//! A table with one entry per page, in a sparse memfd that clients on this machine may have mapped and may write.
//!
//! So entries are only ever read and written as atomics, and what they say is a claim, not a fact.

use super::StoreError;
use farfield_core::PageId;
use farfield_os::memfd::{self, Access, Mapping};
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64};

/// What a table holds per page.
pub(super) trait Entry {
    const BYTES: u64;
}
impl Entry for AtomicU8 {
    const BYTES: u64 = 1;
}
impl Entry for AtomicU64 {
    const BYTES: u64 = 8;
}

/// Memory of a table comes and goes in pieces of this many bytes.
const PIECE_BYTES: u64 = 4096;

#[derive(Debug)]
pub(super) struct Table<E> {
    fd: OwnedFd,
    entries: Mapping,
    pages: u64,
    entry: PhantomData<E>,
}

impl<E: Entry> Table<E> {
    /// All entries zero, without memory.
    pub(super) fn new(name: &std::ffi::CStr, pages: u64) -> Result<Table<E>, StoreError> {
        let bytes = (pages * E::BYTES).next_multiple_of(PIECE_BYTES);
        let fd = memfd::create(name, bytes)?;
        let entries = Mapping::new(fd.as_fd(), bytes, Access::ReadWrite)?;
        Ok(Table { fd, entries, pages, entry: PhantomData })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The entry of `page`, which must lie inside the region.
    pub(super) fn at(&self, page: PageId) -> &E {
        assert!(page.0 < self.pages);
        // SAFETY:
        // - inside the mapping, by the line above, and aligned, because the mapping is page-aligned;
        // - E is an atomic integer (Entry is private to this module): any bytes are a value of it, and another
        //   process that writes there races with atomic accesses only;
        // - the mapping lives as long as `&self`, and so does the reference.
        unsafe { &*self.entries.as_ptr().add((page.0 * E::BYTES) as usize).cast::<E>() }
    }

    /// The first stretch of pages inside `pages` whose entries may be other than zero.
    pub(super) fn next_data(&self, pages: Range<u64>) -> Result<Option<Range<u64>>, StoreError> {
        if pages.is_empty() {
            return Ok(None);
        }
        let Some(data) = memfd::next_data(self.fd(), pages.start * E::BYTES)? else { return Ok(None) };
        let found = (data.start / E::BYTES).max(pages.start)..(data.end / E::BYTES).min(pages.end);
        Ok((!found.is_empty()).then_some(found))
    }

    /// Gives the memory of all entries of `pages` back that shares no piece with entries of other pages.
    pub(super) fn forget(&self, pages: Range<u64>) -> Result<(), StoreError> {
        let start = (pages.start * E::BYTES).next_multiple_of(PIECE_BYTES);
        let last = if pages.end == self.pages { self.entries.len() as u64 } else { pages.end * E::BYTES };
        let end = last - last % PIECE_BYTES;
        if start < end {
            memfd::punch(self.fd(), start, end - start)?;
        }
        Ok(())
    }

    /// A table with the same entries as this one, hole by hole.
    pub(super) fn copy(&self, name: &std::ffi::CStr) -> Result<Table<E>, StoreError> {
        let target = Table::new(name, self.pages)?;
        let mut bounce = vec![0; 64 * 1024];
        let mut offset = 0;
        while let Some(data) = memfd::next_data(self.fd(), offset)? {
            offset = data.start;
            while offset < data.end {
                let step = bounce.len().min((data.end - offset) as usize);
                memfd::read_at(self.fd(), &mut bounce[..step], offset)?;
                memfd::write_at(target.fd(), &bounce[..step], offset)?;
                offset += step as u64;
            }
        }
        Ok(target)
    }
}
