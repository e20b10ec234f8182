//! A table with one entry per page, in a sparse memfd that clients on this machine may map and
//! write.
//!
//! So entries are only ever read and written as atomics, and their values are claims, not facts.
//! The table knows which of its pieces may have memory. Those are charged, and only those are
//! touched, because a load from a hole of a mapping fills the hole.

use super::RegionStoreError;
use super::account::{Account, Bookkeeping, Full};
use super::ledger::{Charge, Resource};
use farfield_core::PageId;
use farfield_os::memfd::{self, Mapping, MappingAccess};
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// An entry of a table, one per page.
pub(super) trait Entry {
    const BYTES: u64;
}
impl Entry for AtomicU8 {
    const BYTES: u64 = 1;
}
impl Entry for AtomicU64 {
    const BYTES: u64 = 8;
}

/// Bytes of a piece, the unit in which a table's memory is allocated and freed.
const PIECE_BYTES: u64 = 4096;
/// Pages of memory that the kernel needs for a memfd and its mapping: inode, directory entry, file,
/// area.
pub(super) const MEMFD_PAGES: u64 = 1;

/// Bitmap with one bit per piece, allocated when needed.
type Leaf = [AtomicU64; LEAF_WORDS];
const LEAF_WORDS: usize = 512;
const LEAF_PIECES: u64 = LEAF_WORDS as u64 * 64;

/// The charged memfd of a table.
#[derive(Debug)]
pub(super) struct File {
    fd: OwnedFd,
    bytes: u64,
    /// Charge for fixed pages, and one page for each piece.
    paid: Bookkeeping,
    /// Pages charged besides the entries: for the memfd, and for the bitmaps of its pieces.
    fixed_pages: AtomicU64,
    _held: Charge,
}

impl File {
    /// Creates a file for one entry of `entry_bytes` per page, all zero, without memory.
    pub(super) fn new(
        name: &std::ffi::CStr,
        pages: u64,
        entry_bytes: u64,
        account: &Account,
    ) -> Result<File, RegionStoreError> {
        let bytes = pages.saturating_mul(entry_bytes).next_multiple_of(PIECE_BYTES);
        let held = account.ledger.charge(Resource::Descriptors, 1)?;
        let paid = account.hold(MEMFD_PAGES)?;
        let fd = memfd::create(name, bytes)?;
        Ok(File { fd, bytes, paid, fixed_pages: AtomicU64::new(MEMFD_PAGES), _held: held })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Charges pages for as long as the file lives.
    fn pay_fixed(&self, pages: u64) -> Result<(), Full> {
        self.paid.grow(pages)?;
        self.fixed_pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the number of pages that the kernel keeps for the entries.
    pub(super) fn real_pages(&self) -> Result<u64, RegionStoreError> {
        Ok(memfd::usage(self.fd())?.used_bytes.div_ceil(PIECE_BYTES))
    }

    /// Sets the charge to the kernel's number of pages, for a table that a client fills by itself.
    pub(super) fn recount(&self) -> Result<(), RegionStoreError> {
        self.paid.set(self.real_pages()? + self.fixed_pages.load(Ordering::Relaxed));
        Ok(())
    }

    /// Gives all memory back.
    pub(super) fn clear(&self) -> Result<(), RegionStoreError> {
        Ok(memfd::punch(self.fd(), 0, self.bytes)?)
    }

    /// Returns the pages of entries that are charged, and those that the kernel has.
    #[cfg(test)]
    pub(crate) fn paid_and_real_pages(&self) -> (u64, u64) {
        (self.paid.pages() - self.fixed_pages.load(Ordering::Relaxed), self.real_pages().unwrap())
    }
}

#[derive(Debug)]
pub(super) struct PageMetadataTable<E> {
    file: Arc<File>,
    entries: Mapping,
    pages: u64,
    /// Bitmaps of the pieces that are charged.
    pieces: Box<[OnceLock<Box<Leaf>>]>,
    /// Whether pieces may be charged that have no memory.
    is_unsettled: AtomicBool,
    _held: [Charge; 2],
    entry: PhantomData<E>,
}

impl<E: Entry> PageMetadataTable<E> {
    /// Pages whose entries lie in one piece.
    const PIECE_PAGES: u64 = PIECE_BYTES / E::BYTES;

    /// Creates a table with all entries zero, without memory.
    pub(super) fn new(
        name: &std::ffi::CStr,
        pages: u64,
        account: &Account,
    ) -> Result<PageMetadataTable<E>, RegionStoreError> {
        Self::open(Arc::new(File::new(name, pages, E::BYTES, account)?), pages, account)
    }

    /// Opens the table in a file that was created for it.
    pub(super) fn open(
        file: Arc<File>,
        pages: u64,
        account: &Account,
    ) -> Result<PageMetadataTable<E>, RegionStoreError> {
        let leaves = pages.div_ceil(Self::PIECE_PAGES).div_ceil(LEAF_PIECES);
        let held =
            [account.ledger.charge(Resource::Mappings, 1)?, account.ledger.charge(Resource::AddressBytes, file.bytes)?];
        file.pay_fixed(leaves * size_of::<OnceLock<Box<Leaf>>>() as u64 / PIECE_BYTES)?;
        let entries = Mapping::new(file.fd(), file.bytes, MappingAccess::ReadWrite)?;
        let pieces = (0..leaves).map(|_| OnceLock::new()).collect();
        let is_unsettled = AtomicBool::new(false);
        Ok(PageMetadataTable { file, entries, pages, pieces, is_unsettled, _held: held, entry: PhantomData })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.file.fd()
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the entry of `page`, or `None` outside of the region.
    pub(super) fn at(&self, page: PageId) -> Option<&E> {
        if page.0 >= self.pages {
            return None;
        }
        let offset = usize::try_from(page.0 * E::BYTES).ok()?;
        // SAFETY:
        // - inside the mapping, by the comparison above, and aligned, because the mapping is page-aligned;
        // - E is an atomic integer (Entry is private to this module): any bytes are a value of it, and another
        //   process that writes there races with atomic accesses only;
        // - the mapping lives as long as `&self`, and so does the reference.
        Some(unsafe { &*self.entries.as_ptr().add(offset).cast::<E>() })
    }

    fn leaf(&self, piece: u64) -> Option<&OnceLock<Box<Leaf>>> {
        self.pieces.get(usize::try_from(piece / LEAF_PIECES).ok()?)
    }

    /// Returns the word and the bit of a piece in its leaf.
    fn place(leaf: &Leaf, piece: u64) -> Option<(&AtomicU64, u64)> {
        let word = leaf.get(usize::try_from(piece % LEAF_PIECES / 64).ok()?)?;
        Some((word, 1 << (piece % 64)))
    }

    /// Checks whether the memory of the entry of `page` is charged. If not, this process never
    /// stored an entry there.
    pub(super) fn is_paid(&self, page: PageId) -> bool {
        let piece = page.0 / Self::PIECE_PAGES;
        let place = self.leaf(piece).and_then(|leaf| Self::place(leaf.get()?, piece));
        place.is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Charges the memory of the entries of `pages`, so that they may be stored.
    pub(super) fn pay(&self, pages: Range<u64>) -> Result<(), Full> {
        if pages.is_empty() {
            return Ok(());
        }
        for piece in pages.start / Self::PIECE_PAGES..=(pages.end - 1) / Self::PIECE_PAGES {
            let Some(leaf) = self.leaf(piece) else { continue };
            let bits = match leaf.get() {
                Some(bits) => bits,
                None => {
                    self.file.pay_fixed(1)?;
                    let mut is_ours = false;
                    let bits = leaf.get_or_init(|| {
                        is_ours = true;
                        Box::new([const { AtomicU64::new(0) }; LEAF_WORDS])
                    });
                    if !is_ours {
                        self.file.fixed_pages.fetch_sub(1, Ordering::Relaxed);
                        self.file.paid.shrink(1);
                    }
                    bits
                }
            };
            let Some((word, bit)) = Self::place(bits, piece) else { continue };
            if word.load(Ordering::Relaxed) & bit != 0 {
                continue;
            }
            self.file.paid.grow(1)?;
            if word.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
                self.file.paid.shrink(1);
            }
        }
        Ok(())
    }

    /// Returns the first stretch of pages inside `pages` whose entries may be other than zero.
    pub(super) fn next_data(&self, pages: Range<u64>) -> Result<Option<Range<u64>>, RegionStoreError> {
        if pages.is_empty() {
            return Ok(None);
        }
        let Some(data) = memfd::next_data(self.fd(), pages.start * E::BYTES)? else { return Ok(None) };
        let found = (data.start / E::BYTES).max(pages.start)..(data.end / E::BYTES).min(pages.end);
        Ok((!found.is_empty()).then_some(found))
    }

    /// Gives the memory of the entries of `pages` back, except pieces that also hold entries of
    /// other pages. The memory stays charged until [`PageMetadataTable::settle`].
    pub(super) fn forget(&self, pages: Range<u64>) -> Result<(), RegionStoreError> {
        let start = (pages.start * E::BYTES).next_multiple_of(PIECE_BYTES);
        let last = if pages.end == self.pages { self.file.bytes } else { pages.end * E::BYTES };
        let end = last - last % PIECE_BYTES;
        if start < end {
            memfd::punch(self.fd(), start, end - start)?;
            self.unsettle();
        }
        Ok(())
    }

    /// Checks whether pieces may be charged that have no memory.
    pub(super) fn is_unsettled(&self) -> bool {
        self.is_unsettled.load(Ordering::Relaxed)
    }

    /// Records that charged pieces may have no memory, because entries were not stored after all.
    pub(super) fn unsettle(&self) {
        self.is_unsettled.store(true, Ordering::Relaxed);
    }

    /// Refunds the charge for all pieces.
    pub(super) fn settle_all(&self) {
        self.clear(0..self.file.bytes / PIECE_BYTES);
    }

    /// Refunds the charge for pieces without memory. No thread may store entries meanwhile.
    pub(super) fn settle(&self) -> Result<(), RegionStoreError> {
        if !self.is_unsettled.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let mut offset = 0;
        loop {
            let data = memfd::next_data(self.fd(), offset)?;
            let hole_end = data.as_ref().map_or(self.file.bytes, |data| data.start);
            self.clear(offset / PIECE_BYTES..hole_end / PIECE_BYTES);
            match data {
                Some(data) => offset = data.end.next_multiple_of(PIECE_BYTES),
                None => return Ok(()),
            }
        }
    }

    /// Refunds the charge for a range of pieces.
    fn clear(&self, pieces: Range<u64>) {
        let mut piece = pieces.start;
        while piece < pieces.end {
            let word_end = (piece + 64 - piece % 64).min(pieces.end);
            let leaf_end = piece + LEAF_PIECES - piece % LEAF_PIECES;
            let Some(bits) = self.leaf(piece).and_then(OnceLock::get) else {
                piece = leaf_end;
                continue;
            };
            if let Some((word, _)) = Self::place(bits, piece) {
                let upper = u64::MAX << (piece % 64);
                let lower = u64::MAX >> (63 - (word_end - 1) % 64);
                let cleared = word.fetch_and(!(upper & lower), Ordering::Relaxed) & upper & lower;
                self.file.paid.shrink(u64::from(cleared.count_ones()));
            }
            piece = word_end;
        }
    }

    /// Copies the table. Holes stay holes.
    pub(super) fn copy(
        &self,
        name: &std::ffi::CStr,
        account: &Account,
    ) -> Result<PageMetadataTable<E>, RegionStoreError> {
        let target = PageMetadataTable::new(name, self.pages, account)?;
        let mut bounce = vec![0; 64 * 1024];
        let mut offset = 0;
        while let Some(data) = memfd::next_data(self.fd(), offset)? {
            offset = data.start;
            while offset < data.end {
                let left = usize::try_from(data.end - offset).unwrap_or(usize::MAX);
                let step = bounce.len().min(left);
                let end = offset + step as u64;
                target.pay(offset / E::BYTES..(end / E::BYTES).min(self.pages))?;
                let Some(bounce) = bounce.get_mut(..step) else { break };
                memfd::read_at(self.fd(), bounce, offset)?;
                memfd::write_at(target.fd(), bounce, offset)?;
                offset = end;
            }
        }
        Ok(target)
    }
}
