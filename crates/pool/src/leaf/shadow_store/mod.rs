//! Shadow store: stored pages, and of the places of a medium that they are in.
//!
//! A page that is written goes to a free place and is only then *the* page (shadow paging). So a
//! write that fails leaves the version before it, and a reader sees a whole page meanwhile. Places
//! have room on the medium before anything is written to them. The places of pages, and their
//! checksums, are in memory of this process. The members `ssd`, `numa` and `dax` move the bytes to
//! their places and back.

mod medium;
mod slots;

pub(crate) use medium::Medium;
pub(crate) use slots::{NoSpace, Slots};

use crate::PoolError;
use crate::contract::backend::check_range;
use crate::table::{AtomicTable, PageTable};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::Errno;

/// Most pages of a region, and most places.
pub(crate) const PAGES_MAX: u64 = 1 << 32;
/// Number of places beyond the capacity, for new versions of pages that are stored; one in 64 of
/// the capacity is added.
const SPARE: u64 = 1024;
/// Most places that new pages leave to new versions.
const MARGIN: u64 = 256;
/// Fewest places of a region.
const PLACES_MIN: u64 = 1024;

/// Number of tries to read a page whose place shows another checksum: a writer may have replaced
/// the page meanwhile, even in its old place. What stays wrong is corrupt.
pub(crate) const READ_TRIES: u32 = 8;

/// Room on the medium when a shadow store is created.
pub(crate) struct MediumCapacity {
    /// Most bytes that the medium may have.
    pub(crate) bytes: u64,
    /// Number of places that have room and content.
    pub(crate) begun: u64,
}

/// Places of the stored pages of one region, and their checksums.
pub(crate) struct ShadowStore {
    pub(crate) server: u16,
    pub(crate) medium: Medium,
    pub(crate) pages: u64,
    /// Most pages that may be stored.
    pub(crate) capacity: u64,
    /// Number of places beyond the capacity, and how many of them new pages leave alone.
    pub(crate) spare: u64,
    margin: u64,
    /// Number of pages that are stored, or about to be.
    pub(crate) stored: AtomicU64,
    pub(crate) places: PageTable,
    /// Checksum of the content of each place.
    sums: AtomicTable<AtomicU64>,
    pub(crate) slots: Slots,
}

impl ShadowStore {
    /// Creates a shadow store without pages, of `size_bytes` at most; without a size, of all that
    /// there is room for.
    pub(crate) fn new(
        server: u16,
        medium: Medium,
        pages: u64,
        size_bytes: Option<u64>,
        room: MediumCapacity,
    ) -> Result<ShadowStore, PoolError> {
        let room_pages = (room.bytes / PAGE_BYTES as u64).min(PAGES_MAX) / 64 * 64;
        let wanted = size_bytes.unwrap_or(room.bytes).min(room.bytes) / PAGE_BYTES as u64;
        let most = (wanted + SPARE + wanted / 64).next_multiple_of(64).min(room_pages).max(room.begun);
        let capacity = wanted.min(most - most / 65 - most.min(SPARE) / 4);
        let (spare, margin) = (most - capacity, MARGIN.min((most - capacity) / 2));
        let refuse = |reason| Err(PoolError::Refused { server, reason });
        if pages > PAGES_MAX {
            return refuse("the region is larger than 16 TiB");
        }
        if most < PLACES_MIN {
            return refuse("there is room for less than 4 MiB");
        }
        let tables =
            || Ok::<_, Errno>((PageTable::new(pages)?, AtomicTable::new(most)?, Slots::new(most, room.begun)?));
        let (places, sums, slots) = tables().map_err(PoolError::Os)?;
        let stored = AtomicU64::new(0);
        Ok(ShadowStore { server, medium, pages, capacity, spare, margin, stored, places, sums, slots })
    }

    /// Returns the number of bytes of the medium that its places may take.
    pub(crate) fn bytes(&self) -> u64 {
        PageId(self.capacity + self.spare).offset()
    }

    pub(crate) fn check(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        check_range((page, count), self.pages, self.server)
    }

    pub(crate) fn full(&self) -> PoolError {
        PoolError::PoolFull { server: self.server }
    }

    pub(crate) fn corrupt(&self, page: u64) -> PoolError {
        PoolError::Corrupt { page: PageId(page), server: self.server }
    }

    pub(crate) fn sum(&self, place: u64) -> &AtomicU64 {
        self.sums.at(place)
    }

    /// Claims room and places for a write of `count` pages from `page` on, before any of it is
    /// stored. Returns how many of these pages are new.
    pub(crate) fn claim(&self, page: u64, count: u64) -> Result<u64, NoSpace> {
        let new = (page..page + count).filter(|&page| self.places.get(page).is_none()).count() as u64;
        if count + self.margin > self.spare {
            return Err(NoSpace::Full);
        }
        let more = |stored: u64| (stored + new <= self.capacity).then_some(stored + new);
        self.stored.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| NoSpace::Full)?;
        // New pages leave some places for new versions: stored pages can always be written again.
        let margin = if new > 0 { self.margin } else { 0 };
        self.slots.claim(&self.medium, count + margin).inspect_err(|_| self.dismiss(new))?;
        self.slots.unclaim(margin);
        Ok(new)
    }

    /// Uncounts `count` new pages that are not stored after all, or not any more.
    pub(crate) fn dismiss(&self, count: u64) {
        self.stored.fetch_sub(count, Ordering::Relaxed);
    }

    /// Makes the content of this place the page. `admitted` counts the new pages for which room was
    /// made.
    pub(crate) fn publish(&self, page: u64, place: u64, admitted: &mut u64) {
        match self.places.set(page, Some(place)) {
            Some(before) => self.slots.give(before, 1),
            None if *admitted > 0 => *admitted -= 1,
            // The page was discarded meanwhile.
            None => drop(self.stored.fetch_add(1, Ordering::Relaxed)),
        }
    }

    pub(crate) fn discard(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        self.check(page, count)?;
        let end = page.0 + count;
        // Neighbouring places go back together.
        let (mut first, mut run) = (0, 0);
        let give = |first: u64, run: u64| {
            if run > 0 {
                self.slots.give(first, run);
                self.slots.trim(&self.medium, first, run);
                self.dismiss(run);
            }
        };
        let walked = self.places.each(page.0, end, |page| {
            let Some(place) = self.places.set(page, None) else { return };
            if place == first + run && run > 0 {
                run += 1;
            } else {
                give(first, run);
                (first, run) = (place, 1);
            }
        });
        give(first, run);
        walked.and_then(|()| self.places.forget(page.0, end)).map_err(PoolError::Os)
    }
}
