//! A layer: the bytes of some pages of a region, in a sparse memfd as large as the region.
//!
//! While it is the top layer of a region it takes writes. A snapshot freezes it: from then on its pages are only read, and
//! given back when the last region that may need them is gone.

use super::account::Account;
use super::{Full, StoreError};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::memfd::{self, Access, Mapping};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// Bytes mapped at a time.
const PIECE_BYTES: u64 = 1 << 30;

#[derive(Debug)]
pub(crate) struct Layer {
    fd: OwnedFd,
    size_bytes: u64,
    /// The bytes, mapped piece by piece as they are needed: many large regions would not fit the address space.
    pieces: Box<[OnceLock<Mapping>]>,
    account: Account,
    /// Pages that the account has been charged for this layer.
    charged_pages: AtomicU64,
    /// Held while the charge is compared with what the kernel says.
    recount: Mutex<()>,
    /// Was it swept to the end by the only region that holds it?
    swept_alone: AtomicBool,
}

impl Layer {
    /// An empty layer for a region of `pages` pages.
    pub(super) fn new(pages: u64, account: Account) -> Result<Layer, StoreError> {
        let size_bytes = pages * PAGE_BYTES as u64;
        let fd = memfd::create(c"farfield-layer", size_bytes)?;
        let pieces = (0..size_bytes.div_ceil(PIECE_BYTES)).map(|_| OnceLock::new()).collect();
        Ok(Layer {
            fd,
            size_bytes,
            pieces,
            account,
            charged_pages: AtomicU64::new(0),
            recount: Mutex::new(()),
            swept_alone: AtomicBool::new(false),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Address of the bytes of `page`, which must lie inside the region.
    pub(super) fn page(&self, page: PageId) -> Result<*mut u8, StoreError> {
        let (piece, offset) = (page.offset() / PIECE_BYTES, page.offset() % PIECE_BYTES);
        let mapping = match self.pieces[piece as usize].get() {
            Some(mapping) => mapping,
            None => self.map_piece(piece)?,
        };
        assert!(offset < mapping.len() as u64);
        // SAFETY: inside the mapping, by the line above, and a whole page, because both are multiples of the page size.
        Ok(unsafe { mapping.as_ptr().add(offset as usize) })
    }

    #[cold]
    fn map_piece(&self, piece: u64) -> Result<&Mapping, StoreError> {
        let start = piece * PIECE_BYTES;
        let bytes = PIECE_BYTES.min(self.size_bytes - start);
        let mapping = Mapping::part(self.fd(), start, bytes, Access::ReadWrite)?;
        // Another thread may have been faster; then this mapping goes away again.
        Ok(self.pieces[piece as usize].get_or_init(|| mapping))
    }

    pub(super) fn charged_pages(&self) -> u64 {
        self.charged_pages.load(Ordering::Relaxed)
    }

    /// Takes room for `pages` more pages.
    pub(super) fn charge(&self, pages: u64) -> Result<(), Full> {
        self.account.charge(pages)?;
        self.charged_pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Counts pages that are there already.
    pub(super) fn charge_regardless(&self, pages: u64) {
        self.account.charge_regardless(pages);
        self.charged_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Gives back the room of up to `pages` pages; never more than was charged.
    pub(super) fn refund(&self, pages: u64) -> u64 {
        let mut given = 0;
        let less = |charged: u64| {
            given = charged.min(pages);
            Some(charged - given)
        };
        let _ = self.charged_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.account.refund(given);
        given
    }

    /// Moves `pages` of the charge to `other`, which has the same account.
    pub(super) fn pass_charge(&self, other: &Layer, pages: u64) {
        self.charged_pages.fetch_sub(pages, Ordering::Relaxed);
        other.charged_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Pages that the kernel keeps for this layer.
    pub(super) fn real_pages(&self) -> Result<u64, StoreError> {
        Ok(memfd::usage(self.fd())?.used_bytes.div_ceil(PAGE_BYTES as u64))
    }

    /// Makes the charge what the kernel says, for a layer that nobody writes any more. Returns the charge.
    pub(super) fn recount(&self) -> Result<u64, StoreError> {
        let _alone = self.recount.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let real = self.real_pages()?;
        let charged = self.charged_pages.swap(real, Ordering::Relaxed);
        if real > charged {
            self.account.charge_regardless(real - charged);
        } else {
            self.account.refund(charged - real);
        }
        Ok(real)
    }

    pub(super) fn swept_alone(&self) -> bool {
        self.swept_alone.load(Ordering::Relaxed)
    }

    pub(super) fn mark_swept_alone(&self) {
        self.swept_alone.store(true, Ordering::Relaxed);
    }

    /// Somebody else refers to it now, and may leave pages behind that only he needed.
    pub(super) fn mark_shared(&self) {
        self.swept_alone.store(false, Ordering::Relaxed);
    }

    /// Gives the memory of the pages `first..end` back.
    pub(super) fn punch(&self, first: PageId, end: PageId) -> Result<(), StoreError> {
        Ok(memfd::punch(self.fd(), first.offset(), end.offset() - first.offset())?)
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        self.account.refund(*self.charged_pages.get_mut());
    }
}
