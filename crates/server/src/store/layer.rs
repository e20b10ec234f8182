//! A layer: the bytes of some pages of a region, in a sparse memfd as large as the region.
//!
//! The top layer of a region takes writes. A snapshot freezes it: from then on its pages are only
//! read. They are given back when the last region that may need them is gone.
//!
//! The bytes of a layer are mapped where possible, because then they are sent without a copy.
//! Mappings are shared by all clients of the server, so one may be refused at any time. Then the
//! bytes are copied with `pread` and `pwrite`.

use super::account::{Account, Bookkeeping, ChargeKind};
use super::ledger::{Charge, Resource};
use super::table::MEMFD_PAGES;
use super::{Full, RegionStoreError};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::memfd::{self, Mapping, MappingAccess};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// Bytes that are mapped at a time.
const EXTENT_BYTES: u64 = 1 << 30;
/// Extents whose slots are allocated together.
const GROUP_EXTENTS: usize = 64;

/// An extent of the layer that is mapped and charged.
#[derive(Debug)]
struct LayerExtent {
    mapping: Mapping,
    _held: [Charge; 2],
}

type Group = [OnceLock<LayerExtent>; GROUP_EXTENTS];

#[derive(Debug)]
pub(crate) struct Layer {
    fd: OwnedFd,
    size_bytes: u64,
    /// The bytes, mapped extent by extent when needed: many large regions would not fit the address
    /// space.
    groups: Box<[OnceLock<Box<Group>>]>,
    account: Account,
    _paid: Bookkeeping,
    _held: Charge,
    /// Pages that the account was charged for this layer.
    charged_pages: AtomicU64,
    /// Lock held while the charge is compared with the kernel's number.
    recount: Mutex<()>,
    /// Whether the layer was swept completely while only one region held it.
    swept_alone: AtomicBool,
}

impl Layer {
    /// Creates an empty layer for a region of `pages` pages.
    pub(super) fn new(pages: u64, account: Account) -> Result<Layer, RegionStoreError> {
        let size_bytes = pages.saturating_mul(PAGE_BYTES as u64);
        let groups = size_bytes.div_ceil(EXTENT_BYTES).div_ceil(GROUP_EXTENTS as u64);
        let group_pages = groups * size_of::<OnceLock<Box<Group>>>() as u64 / PAGE_BYTES as u64;
        let held = account.ledger.charge(Resource::Descriptors, 1)?;
        let paid = account.hold(MEMFD_PAGES + group_pages)?;
        let fd = memfd::create(c"farfield-layer", size_bytes)?;
        let groups = (0..groups).map(|_| OnceLock::new()).collect();
        Ok(Layer {
            fd,
            size_bytes,
            groups,
            account,
            _paid: paid,
            _held: held,
            charged_pages: AtomicU64::new(0),
            recount: Mutex::new(()),
            swept_alone: AtomicBool::new(false),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the address of the bytes of `page`, if they are mapped or can be mapped.
    pub(super) fn mapped(&self, page: PageId) -> Option<*mut u8> {
        if page.offset() >= self.size_bytes {
            return None;
        }
        let index = usize::try_from(page.offset() / EXTENT_BYTES).ok()?;
        let offset = usize::try_from(page.offset() % EXTENT_BYTES).ok()?;
        let group = self.groups.get(index / GROUP_EXTENTS)?;
        let extent = match group.get().and_then(|group| group.get(index % GROUP_EXTENTS)?.get()) {
            Some(extent) => extent,
            None => self.map_extent(group, index)?,
        };
        if offset >= extent.mapping.len() {
            return None;
        }
        // SAFETY: inside the mapping, by the comparison above, and a whole page, because both are
        // multiples of the page size.
        Some(unsafe { extent.mapping.as_ptr().add(offset) })
    }

    #[cold]
    fn map_extent<'l>(&'l self, group: &'l OnceLock<Box<Group>>, index: usize) -> Option<&'l LayerExtent> {
        let start = index as u64 * EXTENT_BYTES;
        let bytes = EXTENT_BYTES.min(self.size_bytes.checked_sub(start)?);
        let ledger = &self.account.ledger;
        let held = [ledger.charge(Resource::Mappings, 1), ledger.charge(Resource::AddressBytes, bytes)];
        let [Ok(mapping), Ok(address)] = held else { return None };
        let held = [mapping, address];
        let mapping = Mapping::part(self.fd(), start, bytes, MappingAccess::ReadWrite).ok()?;
        let group = group.get_or_init(|| Box::new([const { OnceLock::new() }; GROUP_EXTENTS]));
        // Another thread may have been faster. Then this mapping is dropped.
        Some(group.get(index % GROUP_EXTENTS)?.get_or_init(|| LayerExtent { mapping, _held: held }))
    }

    /// Copies bytes of a page without a mapping.
    pub(super) fn copy_out(&self, page: PageId, skip: usize, into: &mut [u8]) -> Result<(), RegionStoreError> {
        debug_assert!(skip + into.len() <= PAGE_BYTES);
        Ok(memfd::read_at(self.fd(), into, page.offset() + skip as u64)?)
    }

    /// Stores the bytes of a page.
    pub(super) fn store_page(&self, page: PageId, bytes: &[u8]) -> Result<(), RegionStoreError> {
        debug_assert_eq!(bytes.len(), PAGE_BYTES);
        match self.mapped(page) {
            // SAFETY: a whole page of the layer; a page of a layer and what was received do not
            // overlap. Raw copy, no reference: the owner may be writing there through its own
            // mapping.
            Some(target) => unsafe {
                core::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len().min(PAGE_BYTES));
            },
            None => memfd::write_at(self.fd(), bytes, page.offset())?,
        }
        Ok(())
    }

    pub(super) fn charged_pages(&self) -> u64 {
        self.charged_pages.load(Ordering::Relaxed)
    }

    /// Charges the account for `pages` more pages.
    pub(super) fn charge(&self, pages: u64) -> Result<(), Full> {
        self.account.charge(ChargeKind::Pages, pages)?;
        self.charged_pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Charges the account for pages that are stored already, whatever the limit says.
    pub(super) fn charge_regardless(&self, pages: u64) {
        self.account.charge_regardless(ChargeKind::Pages, pages);
        self.charged_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Refunds up to `pages` pages, but never more than was charged. Returns the number refunded.
    pub(super) fn refund(&self, pages: u64) -> u64 {
        let mut given = 0;
        let less = |charged: u64| {
            given = charged.min(pages);
            Some(charged - given)
        };
        let _ = self.charged_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.account.refund(ChargeKind::Pages, given);
        given
    }

    /// Moves `pages` of the charge to `other`, which has the same account.
    pub(super) fn pass_charge(&self, other: &Layer, pages: u64) {
        self.charged_pages.fetch_sub(pages, Ordering::Relaxed);
        other.charged_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Returns the number of pages that the kernel keeps for this layer.
    pub(super) fn real_pages(&self) -> Result<u64, RegionStoreError> {
        Ok(memfd::usage(self.fd())?.used_bytes.div_ceil(PAGE_BYTES as u64))
    }

    /// Sets the charge to the kernel's number of pages, for a layer that is not written any more.
    /// Returns the new charge.
    pub(super) fn recount(&self) -> Result<u64, RegionStoreError> {
        let _alone = self.recount.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let real = self.real_pages()?;
        let charged = self.charged_pages.swap(real, Ordering::Relaxed);
        if real > charged {
            self.account.charge_regardless(ChargeKind::Pages, real - charged);
        } else {
            self.account.refund(ChargeKind::Pages, charged - real);
        }
        Ok(real)
    }

    pub(super) fn swept_alone(&self) -> bool {
        self.swept_alone.load(Ordering::Relaxed)
    }

    pub(super) fn mark_swept_alone(&self) {
        self.swept_alone.store(true, Ordering::Relaxed);
    }

    /// Records that another owner refers to the layer. That owner may leave pages behind that only
    /// it needed.
    pub(super) fn mark_shared(&self) {
        self.swept_alone.store(false, Ordering::Relaxed);
    }

    /// Gives the memory of the pages `first..end` back.
    pub(super) fn punch(&self, first: PageId, end: PageId) -> Result<(), RegionStoreError> {
        Ok(memfd::punch(self.fd(), first.offset(), end.offset() - first.offset())?)
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        self.account.refund(ChargeKind::Pages, *self.charged_pages.get_mut());
    }
}
