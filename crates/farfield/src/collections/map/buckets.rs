//! Storage of buckets: near, in one growing table, or far, 64 to a page, with a near slot per page.

use crate::error::{BuildError, FarError};
use crate::heap::{AccessMode, HeapInner, ReservedArray, Scope, SlotCell, SlotWord, Zeroed};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::buckets::BucketWord;
use farfield_os::memory::load_ahead;
use std::alloc::Layout;

/// Places of a bucket for entries. If there are more entries, the last place is a link to another
/// bucket.
pub(super) const PLACES: usize = 5;

/// A bucket of the index: hashes and slots of a few entries, in one cache line.
#[repr(C, align(64))]
pub(super) struct IndexBucket {
    /// A [`BucketWord`].
    pub(super) word: AtomicU32,
    pub(super) hashes: [AtomicU32; PLACES],
    /// Objects. In a linked bucket, the last place has the number of the next bucket plus one; its
    /// upper half is 0.
    pub(super) slots: [SlotCell; PLACES],
}

const BUCKET_BYTES: usize = 64;
const PER_PAGE: u32 = (PAGE_BYTES / BUCKET_BYTES) as u32;
const _: () = assert!(size_of::<IndexBucket>() == BUCKET_BYTES);

// SAFETY: atomics, for which zero is a value.
unsafe impl Zeroed for IndexBucket {}

/// Most buckets of a table, so that all arithmetic on them fits.
const BUCKETS_MAX: u64 = 1 << 31;
/// Size from which on a near table grows by whole huge pages.
const HUGE_FROM: u64 = 16 << 20;
const HUGE_BYTES: u64 = 2 << 20;

/// A growing sequence of buckets.
pub(super) struct BucketArray {
    storage: BucketStorage,
    /// Near bytes that were charged to the heap.
    charged: AtomicU64,
}

enum BucketStorage {
    Near(ReservedArray<IndexBucket>),
    /// A slot per page of buckets.
    Far(ReservedArray<SlotCell>),
}

/// Where the index of a map is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Index {
    /// In near memory, about 20 bytes per entry: a look-up of a far value costs one fetch.
    #[default]
    Near,
    /// In far memory, like the values: parts that are not used are evicted. For maps whose index
    /// would fill the near budget.
    Far,
}

impl IndexBucket {
    #[inline]
    pub(super) fn look(&self, order: Ordering) -> BucketWord {
        BucketWord(self.word.load(order))
    }

    /// Empties the bucket. The caller has exclusive access to it.
    pub(super) fn reset(&self, depth: u32) {
        for (hash, slot) in self.hashes.iter().zip(&self.slots) {
            hash.store(0, Ordering::Relaxed);
            slot.store(0);
        }
        self.word.store(BucketWord::new(depth).0, Ordering::Release);
    }
}

impl BucketArray {
    pub(super) fn new(core: &HeapInner, index: Index) -> Result<BucketArray, BuildError> {
        let storage = match index {
            Index::Near => BucketStorage::Near(ReservedArray::new(
                u64::from(core.frames.limit_max()).saturating_mul(64).min(BUCKETS_MAX) as usize,
            )?),
            Index::Far => BucketStorage::Far(ReservedArray::new(
                u64::from(core.pages).min(BUCKETS_MAX / u64::from(PER_PAGE)) as usize,
            )?),
        };
        Ok(BucketArray { storage, charged: AtomicU64::new(0) })
    }

    /// Checks whether the buckets are always near.
    pub(super) fn is_near(&self) -> bool {
        matches!(self.storage, BucketStorage::Near(_))
    }

    /// Returns the most buckets that fit.
    pub(super) fn max(&self) -> u32 {
        match &self.storage {
            BucketStorage::Near(table) => table.len() as u32,
            BucketStorage::Far(pages) => pages.len() as u32 * PER_PAGE,
        }
    }

    /// Returns a bucket that was [prepared](BucketArray::prepare). It stays where it is as long as
    /// the scope lasts.
    #[inline]
    pub(super) fn get<'a>(&'a self, scope: &'a Scope<'_>, bucket: u32) -> Result<&'a IndexBucket, FarError> {
        match &self.storage {
            BucketStorage::Near(table) => Ok(&table[bucket]),
            BucketStorage::Far(pages) => {
                let cell = &pages[bucket / PER_PAGE];
                let Some(slot) = cell.load() else { unreachable!("a bucket before it was prepared") };
                let page = cell.address(scope, slot, AccessMode::Read)?;
                // SAFETY: `prepare` made a page of buckets there, which lives as long as `self`.
                // They are changed through atomics only; where it is does not change before the
                // scope ends.
                Ok(unsafe { in_page(page, bucket) })
            }
        }
    }

    /// Returns a bucket that was [prepared](BucketArray::prepare), if it is near.
    pub(super) fn get_now<'a>(&'a self, scope: &'a Scope<'_>, bucket: u32) -> Option<&'a IndexBucket> {
        match &self.storage {
            BucketStorage::Near(table) => Some(&table[bucket]),
            BucketStorage::Far(pages) => {
                let page = pages[bucket / PER_PAGE].load()?.address_now(scope)?;
                // SAFETY: as in `get`.
                Some(unsafe { in_page(page, bucket) })
            }
        }
    }

    /// Prefetches a bucket into the processor's cache, if the buckets are near.
    #[inline]
    pub(super) fn load_ahead(&self, bucket: u32) {
        if let BucketStorage::Near(table) = &self.storage {
            load_ahead(&table[bucket]);
        }
    }

    /// Returns the number within the heap of the far page of a bucket that was prepared.
    pub(super) fn page_number(&self, core: &HeapInner, bucket: u32) -> Option<u32> {
        match &self.storage {
            BucketStorage::Near(_) => None,
            BucketStorage::Far(pages) => pages[bucket / PER_PAGE].load().map(|slot| slot.parts(core).0),
        }
    }

    /// Checks whether there is room for this bucket.
    pub(super) fn is_prepared(&self, bucket: u32) -> bool {
        let page = bucket / PER_PAGE;
        match &self.storage {
            BucketStorage::Near(_) => self.is_charged((u64::from(page) + 1) * PAGE_BYTES as u64),
            BucketStorage::Far(pages) => pages[page].load().is_some(),
        }
    }

    /// Makes room for one more bucket: number `bucket`, after all smaller ones. Several threads may
    /// do this at the same time.
    pub(super) fn prepare(&self, scope: &Scope<'_>, bucket: u32) -> Result<(), FarError> {
        let page = bucket / PER_PAGE;
        while !self.is_prepared(bucket) {
            match &self.storage {
                BucketStorage::Near(table) => {
                    let from = self.charged.load(Ordering::Relaxed);
                    let huge = from >= HUGE_FROM;
                    let step = if huge { HUGE_BYTES } else { PAGE_BYTES as u64 };
                    if self.charge(scope.core, from, step)? && huge {
                        table.prefer_huge(from as usize, step as usize);
                    }
                }
                BucketStorage::Far(pages) => {
                    while !self.is_charged((u64::from(page) + 1) * size_of::<SlotCell>() as u64) {
                        self.charge(scope.core, self.charged.load(Ordering::Relaxed), PAGE_BYTES as u64)?;
                    }
                    let layout = Layout::from_size_align(PAGE_BYTES, BUCKET_BYTES).unwrap_or_else(|_| unreachable!());
                    let (slot, address) = SlotWord::make(scope, layout)?;
                    // SAFETY: a new object of a page, near as long as the scope lasts, which nobody else knows.
                    unsafe { address.write_bytes(0, PAGE_BYTES) };
                    if !pages[page].fill(slot) {
                        // SAFETY: made above, and still nobody knows it.
                        unsafe { slot.free(scope.core) };
                    }
                }
            }
        }
        Ok(())
    }

    fn is_charged(&self, bytes: u64) -> bool {
        self.charged.load(Ordering::Relaxed) >= bytes
    }

    /// Charges `step` bytes more than `from`, unless another thread has changed the charge
    /// meanwhile. Returns whether it did.
    fn charge(&self, core: &HeapInner, from: u64, step: u64) -> Result<bool, FarError> {
        core.charge(step)?;
        let charged = self.charged.compare_exchange(from, from + step, Ordering::Relaxed, Ordering::Relaxed);
        if charged.is_err() {
            core.uncharge(step);
        }
        Ok(charged.is_ok())
    }

    /// Frees far pages, and gives back the charged bytes. Called when the map is dropped.
    pub(super) fn clear(&mut self, core: &HeapInner) {
        if let BucketStorage::Far(pages) = &self.storage {
            for cell in (0..pages.len() as u32).map(|page| &pages[page]) {
                let Some(slot) = cell.load() else { break };
                cell.store(0);
                // SAFETY: made by `prepare`, and nobody follows the cell any more.
                unsafe { slot.free(core) };
            }
        }
        core.uncharge(core::mem::take(self.charged.get_mut()));
    }
}

/// Returns a bucket in a page of them.
///
/// # Safety
/// There is a page of buckets, which stays there during `'a`.
#[expect(clippy::cast_ptr_alignment, reason = "objects of a page begin at one")]
#[inline]
unsafe fn in_page<'a>(page: *mut u8, bucket: u32) -> &'a IndexBucket {
    // SAFETY: passed on to the caller; the number is below that of buckets in a page.
    unsafe { &*page.cast::<IndexBucket>().add((bucket % PER_PAGE) as usize) }
}
