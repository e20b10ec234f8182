//! Paged storage: units of elements in far space, found by their number. The common part of vectors
//! and arrays.

use super::pattern::{ElementPattern, PrefetchMode};
use crate::error::FarError;
use crate::heap::{
    AccessMode, FarRange, HeapInner, Panics, Scope, StreamingHint, Teardown, drop_collection, free_run, heap_of,
};
use core::marker::PhantomData;
use core::ops::Range;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{Extents, SEGMENT_PAGES};
use farfield_core::policy::prefetch::{PrefetchBatch, PrefetchTimeliness};

/// Extents that are known from the bytes of the storage itself: those of the first 8 MiB.
pub(super) const FIRSTS: usize = 8;

/// Units `0..made`, of [`Paged::PER_UNIT`] elements each. The storage knows which units exist, not
/// which elements do.
pub(super) struct Paged<T: Send + 'static> {
    /// First page of each extent. Pages are numbered over all heaps.
    extents: Vec<u32>,
    /// Copy of the first of them, for functions that meet a vector in a far value at a memory server.
    /// Behind the number of extents, it means nothing.
    firsts: [u32; FIRSTS],
    made: usize,
    /// Mode of prefetching, unless it is [`PrefetchMode::Auto`].
    prefetch_mode: Option<Box<PrefetchMode>>,
    owns: PhantomData<T>,
}

impl<T: Send + 'static> Paged<T> {
    const EXTENTS: Extents = {
        assert!(align_of::<T>() <= PAGE_BYTES, "far values cannot be aligned to more than a page");
        Extents::of(size_of::<T>())
    };
    /// Elements in a unit.
    pub(super) const PER_UNIT: usize = Self::EXTENTS.per_unit();
    /// Pages of a unit.
    pub(super) const UNIT_PAGES: u32 = Self::EXTENTS.unit_pages();

    /// Offset of [`FIRSTS`] pages of extents in the storage.
    pub(super) const FIRSTS_AT: usize = core::mem::offset_of!(Self, firsts);

    pub(super) const fn new() -> Paged<T> {
        Paged { extents: Vec::new(), firsts: [0; FIRSTS], made: 0, prefetch_mode: None, owns: PhantomData }
    }

    /// Sets what is fetched ahead.
    pub(super) fn set_prefetch_mode(&mut self, mode: PrefetchMode) {
        self.prefetch_mode = (mode != PrefetchMode::Auto).then(|| Box::new(mode));
    }

    /// Returns what is fetched ahead.
    pub(super) fn prefetch_mode(&self) -> PrefetchMode {
        self.prefetch_mode.as_deref().copied().unwrap_or_default()
    }

    /// Returns the first page of each extent. Pages are numbered over all heaps.
    pub(super) fn extents(&self) -> &[u32] {
        &self.extents
    }

    /// Returns the number of units that exist.
    pub(super) fn made(&self) -> usize {
        self.made
    }

    /// Returns the first page of a unit in one of our extents. Pages are numbered over all heaps.
    pub(super) fn page(&self, unit: usize) -> u32 {
        let (extent, within) = Self::EXTENTS.locate(unit);
        self.extents[extent] + within as u32 * Self::UNIT_PAGES
    }

    /// Returns the address of a unit's elements, and brings the unit near. [`Scope::near_unit`]
    /// says how long the address is valid.
    #[inline]
    pub(super) fn unit(&self, scope: &Scope<'_>, unit: usize, mode: AccessMode) -> Result<*mut T, FarError> {
        assert!(unit < self.made);
        match scope.near_unit(self.page(unit), mode) {
            Some(address) => Ok(address.cast()),
            None => self.fault_in_unit(scope, unit, mode).map(<*mut u8>::cast),
        }
    }

    /// Checks whether this unit is near and ready to be used as `mode` says.
    #[inline]
    pub(super) fn is_near(&self, scope: &Scope<'_>, unit: usize, mode: AccessMode) -> bool {
        scope.near_unit(self.page(unit), mode).is_some()
    }

    /// Checks whether this unit is [new](Scope::is_new).
    pub(super) fn is_new(&self, scope: &Scope<'_>, unit: usize) -> bool {
        scope.is_new(self.page(unit))
    }

    /// Notes that this unit is used next, and only once.
    pub(super) fn note(&self, hint: &StreamingHint, scope: &Scope<'_>, unit: usize) {
        hint.note_use(scope, self.page(unit));
    }

    /// Marks these units to be evicted before others.
    pub(super) fn mark_evict_first(&self, scope: &Scope<'_>, units: impl Iterator<Item = usize>) {
        scope.mark_evict_first(units.map(|unit| self.page(unit)));
    }

    /// Begins to bring these units near, and does not wait. Returns how many are on their way now
    /// that were not before.
    pub(super) fn prefetch(&self, scope: &Scope<'_>, units: impl Iterator<Item = usize>) -> usize {
        scope.prefetch(units.filter(|unit| *unit < self.made).map(|unit| self.page(unit)))
    }

    /// Brings a unit near, and begins to bring those near that this thread will need next.
    #[cold]
    fn fault_in_unit(&self, scope: &Scope<'_>, unit: usize, mode: AccessMode) -> Result<*mut u8, FarError> {
        let page = self.page(unit);
        if let Some(timeliness) = scope.timeliness(page) {
            self.go_ahead(scope, unit, timeliness);
        }
        scope.fault_in_unit(page, mode)
    }

    fn go_ahead(&self, scope: &Scope<'_>, unit: usize, timeliness: PrefetchTimeliness) {
        let most = scope.core.reserve().low / Self::UNIT_PAGES;
        if let Some(mode) = self.prefetch_mode.as_deref() {
            if let PrefetchMode::Static { start, step, count } = *mode {
                let pattern = ElementPattern::new(start, step, count, Self::PER_UNIT);
                self.go_ahead_in(scope, pattern.units_after(unit, most as usize), timeliness);
            }
            return;
        }
        // Stream numbers of different collections are far apart.
        let base = u64::from(self.extents[0] / SEGMENT_PAGES) << 32;
        let number = base + unit as u64;
        let ahead = {
            let mut streams = scope.record.streams.borrow_mut();
            match streams.on_use(number, timeliness, most) {
                Some(ahead) => ahead,
                None if timeliness == PrefetchTimeliness::InTime => PrefetchBatch::default(),
                None => streams.on_fault(number, most),
            }
        };
        if ahead.count > 0 {
            let units =
                (1..=i64::from(ahead.count)).filter_map(|step| usize::try_from(unit as i64 + step * ahead.stride).ok());
            let brought = self.prefetch(scope, units);
            scope.record.streams.borrow_mut().on_brought(brought as u32);
        }
    }

    /// Begins to bring these units near. If the unit before them was there in time, it waits until
    /// the half of them that comes later has one that is far, so that they come in batches.
    fn go_ahead_in(
        &self,
        scope: &Scope<'_>,
        units: impl Iterator<Item = usize> + Clone,
        timeliness: PrefetchTimeliness,
    ) {
        let is_far =
            |unit: usize| unit < self.made && scope.timeliness(self.page(unit)) == Some(PrefetchTimeliness::Missing);
        let near_half = units.clone().count() / 2;
        if timeliness != PrefetchTimeliness::InTime || units.clone().nth(near_half).is_some_and(is_far) {
            self.prefetch(scope, units);
        }
    }

    /// Brings a unit near. Returns the address of its elements, and how many units, at most `most`
    /// from that one on, are near side by side there. [`Scope::near_unit`] says how long the
    /// address is valid.
    #[inline]
    pub(super) fn units(
        &self,
        scope: &Scope<'_>,
        unit: usize,
        most: usize,
        mode: AccessMode,
    ) -> Result<(*mut T, usize), FarError> {
        assert!(unit < self.made && most > 0);
        let (extent, within) = Self::EXTENTS.locate(unit);
        let page = self.page(unit);
        let address = match scope.near_unit(page, mode) {
            Some(address) => address,
            None => self.fault_in_unit(scope, unit, mode)?,
        };
        if Self::PER_UNIT * size_of::<T>() != PAGE_BYTES {
            return Ok((address.cast(), 1));
        }
        let most = most.min(self.made - unit).min(Self::EXTENTS.units(extent) - within);
        Ok((address.cast(), scope.side_by_side(page, address, most, mode)))
    }

    /// Appends a unit of zeros, and returns the address of its elements. [`Scope::near_unit`] says
    /// how long the address is valid.
    pub(super) fn make(&mut self, scope: &Scope<'_>) -> Result<*mut T, FarError> {
        let (extent, _) = Self::EXTENTS.locate(self.made);
        if extent == self.extents.len() {
            if self.extents.first().is_some_and(|page| scope.number(*page).is_none()) {
                return Err(FarError::OtherHeap);
            }
            self.take_extent(scope.core)?;
        }
        let address = scope.fault_in_unit(self.page(self.made), AccessMode::Create)?;
        self.made += 1;
        Ok(address.cast())
    }

    /// Adds an extent. Returns how many units it has room for.
    pub(super) fn take_extent(&mut self, core: &HeapInner) -> Result<usize, FarError> {
        let units = Self::EXTENTS.units(self.extents.len());
        self.extents.try_reserve(1).map_err(|_| FarError::FarFull)?;
        let page = core.take_run(units, Self::UNIT_PAGES)?;
        if let Some(first) = self.firsts.get_mut(self.extents.len()) {
            *first = page;
        }
        self.extents.push(page);
        Ok(units)
    }

    /// Sets the number of units that exist, when others have made them in our extents.
    pub(super) fn set_made(&mut self, units: usize) {
        assert!(self.made == 0 && units <= Self::EXTENTS.units_before(self.extents.len()));
        self.made = units;
    }

    /// Takes the extents out. No unit may exist.
    pub(super) fn take_extents(&mut self) -> Vec<u32> {
        assert_eq!(self.made, 0);
        core::mem::take(&mut self.extents)
    }

    /// Checks whether the far copy of this unit is up to date: see [`HeapInner::is_as_far`].
    pub(super) fn is_as_far(&self, unit: usize) -> bool {
        let page = self.page(unit);
        // SAFETY: our extents keep the heap.
        let core = unsafe { &*heap_of(page) };
        core.is_as_far(page - core.first_page)
    }

    /// Gives back all units from `keep` on. They must have no elements.
    pub(super) fn release(&mut self, keep: usize) {
        let Some(core) = self.core() else { return };
        while let Some(last) = self.extents.len().checked_sub(1) {
            let start = Self::EXTENTS.units_before(last);
            let from = keep.max(start);
            if from < self.made {
                // SAFETY: our extents keep the heap.
                unsafe { &*core }.release_units(self.page(from), self.made - from, Self::UNIT_PAGES);
                self.made = from;
            }
            if keep > start {
                break;
            }
            let Some(page) = self.extents.pop() else { break };
            // SAFETY: it came from `take_run`, all its units are released, and it is in `extents` no more.
            unsafe { free_run(core, page) };
        }
    }

    /// Returns where these elements of a unit lie in the heap's region.
    pub(super) fn far_range(&self, unit: usize, elements: Range<usize>) -> FarRange {
        let page = self.page(unit);
        // SAFETY: our extents keep the heap.
        let first_page = unsafe { &*heap_of(page) }.first_page;
        FarRange::in_page(page - first_page, elements.start * size_of::<T>(), elements.len() * size_of::<T>())
    }

    /// Checks whether this unit is far, and nowhere else.
    pub(super) fn is_far(&self, unit: usize) -> bool {
        let page = self.page(unit);
        // SAFETY: our extents keep the heap.
        let core = unsafe { &*heap_of(page) };
        core.is_far(page - core.first_page)
    }

    /// Returns the heap, which exists as long as there is an extent.
    pub(super) fn core(&self) -> Option<*const HeapInner> {
        self.extents.first().map(|page| heap_of(*page))
    }

    /// Drops the first `len` elements, and gives everything back. Elements that cannot be dropped
    /// now are dropped later.
    pub(super) fn drop_elements(self, len: usize) {
        if !core::mem::needs_drop::<T>() || len == 0 {
            return;
        }
        let Some(core) = self.core() else { unreachable!("elements without an extent") };
        // SAFETY: the extents in it keep the heap.
        unsafe { drop_collection(core, Box::new(PagedTeardown { paged: self, at: 0, len })) };
    }
}

impl<T: Send + 'static> Drop for Paged<T> {
    fn drop(&mut self) {
        self.release(0);
    }
}

/// Elements of a dropped collection.
struct PagedTeardown<T: Send + 'static> {
    paged: Paged<T>,
    /// Elements before this one are dropped.
    at: usize,
    len: usize,
}

impl<T: Send + 'static> Teardown for PagedTeardown<T> {
    fn tear_down(&mut self, finally: bool, panics: &mut Panics) -> bool {
        let Some(core) = self.paged.core() else { return true };
        // SAFETY: our extents keep the heap.
        let core = unsafe { &*core };
        // Out of the heap first: destructors must not run in a scope that holds our unit.
        let mut taken: Vec<T> = Vec::with_capacity(Paged::<T>::PER_UNIT.min(self.len));
        while self.at < self.len {
            let (unit, within) = (self.at / Paged::<T>::PER_UNIT, self.at % Paged::<T>::PER_UNIT);
            let count = (Paged::<T>::PER_UNIT - within).min(self.len - self.at);
            let target = taken.as_mut_ptr();
            let copied = core.with_unit(self.paged.page(unit), |address| {
                // SAFETY: elements `at..at + count` are initialised and lie there; `taken` is empty
                // and has room for them.
                unsafe { target.copy_from_nonoverlapping(address.cast::<T>().add(within), count) };
            });
            match copied {
                Err(error) if !finally && !core.is_lost(error) => return false,
                Err(_) => core.lose_values(count),
                // SAFETY: just filled, and from here on `taken` owns them.
                Ok(()) => unsafe { taken.set_len(count) },
            }
            self.at += count;
            panics.catch(|| taken.clear());
        }
        true
    }
}
