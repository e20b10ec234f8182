//! Paged storage: units of elements in far space, found by their number. What vectors and arrays are made of.

use crate::error::FarError;
use crate::heap::{Bury, Core, FarRange, Once, Panics, Scope, Want, drop_collection, free_run, heap_of};
use core::marker::PhantomData;
use core::ops::Range;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{Extents, SEGMENT_PAGES};
use farfield_core::policy::prefetch::{Ahead, Arrival};

/// Units `0..made`, of [`Paged::PER_UNIT`] elements each. It knows which units exist, not which elements do.
pub(super) struct Paged<T: Send + 'static> {
    /// First page of each extent, among the pages of all heaps.
    extents: Vec<u32>,
    made: usize,
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

    pub(super) const fn new() -> Paged<T> {
        Paged { extents: Vec::new(), made: 0, owns: PhantomData }
    }

    /// Units that exist.
    pub(super) fn made(&self) -> usize {
        self.made
    }

    /// The page of a unit in one of our extents, among the pages of all heaps.
    pub(super) fn page(&self, unit: usize) -> u32 {
        let (extent, within) = Self::EXTENTS.locate(unit);
        self.extents[extent] + within as u32 * Self::UNIT_PAGES
    }

    /// Where the elements of a unit are. See [`Scope::near_unit`] for how long.
    #[inline]
    pub(super) fn unit(&self, scope: &Scope<'_>, unit: usize, want: Want) -> Result<*mut T, FarError> {
        assert!(unit < self.made);
        match scope.near_unit(self.page(unit), want) {
            Some(address) => Ok(address.cast()),
            None => self.bring(scope, unit, want).map(<*mut u8>::cast),
        }
    }

    /// Is this unit near and ready?
    #[inline]
    pub(super) fn is_near(&self, scope: &Scope<'_>, unit: usize, want: Want) -> bool {
        scope.near_unit(self.page(unit), want).is_some()
    }

    /// See [`Scope::is_new`].
    pub(super) fn is_new(&self, scope: &Scope<'_>, unit: usize) -> bool {
        scope.is_new(self.page(unit))
    }

    /// This unit is used next, once.
    pub(super) fn note(&self, once: &Once, scope: &Scope<'_>, unit: usize) {
        once.uses(scope, self.page(unit));
    }

    /// These units leave before others.
    pub(super) fn leave_first(&self, scope: &Scope<'_>, units: impl Iterator<Item = usize>) {
        scope.leave_first(units.map(|unit| self.page(unit)));
    }

    /// Begins to bring these units, and does not wait; how many are on their way now that were not.
    pub(super) fn prefetch(&self, scope: &Scope<'_>, units: impl Iterator<Item = usize>) -> usize {
        scope.prefetch(units.filter(|unit| *unit < self.made).map(|unit| self.page(unit)))
    }

    /// Brings a unit, and begins to bring those that this thread will need next.
    #[cold]
    fn bring(&self, scope: &Scope<'_>, unit: usize, want: Want) -> Result<*mut u8, FarError> {
        let page = self.page(unit);
        if let Some(arrival) = scope.arrival(page) {
            self.go_ahead(scope, unit, arrival);
        }
        scope.bring_unit(page, want)
    }

    fn go_ahead(&self, scope: &Scope<'_>, unit: usize, arrival: Arrival) {
        // Each collection has numbers of its own, far from those of others.
        let base = u64::from(self.extents[0] / SEGMENT_PAGES) << 32;
        let number = base + unit as u64;
        let most = scope.core.reserve().low / Self::UNIT_PAGES;
        let ahead = {
            let mut streams = scope.record.streams.borrow_mut();
            match streams.on_use(number, arrival, most) {
                Some(ahead) => ahead,
                None if arrival == Arrival::InTime => Ahead::default(),
                None => streams.on_fault(number),
            }
        };
        if ahead.count > 0 {
            let units =
                (1..=i64::from(ahead.count)).filter_map(|step| usize::try_from(unit as i64 + step * ahead.stride).ok());
            let brought = self.prefetch(scope, units);
            scope.record.streams.borrow_mut().on_brought(brought as u32);
        }
    }

    /// The same, and how many units, at most `most` from that one on, have their elements side by side there. They are near for
    /// as long.
    #[inline]
    pub(super) fn units(
        &self,
        scope: &Scope<'_>,
        unit: usize,
        most: usize,
        want: Want,
    ) -> Result<(*mut T, usize), FarError> {
        assert!(unit < self.made && most > 0);
        let (extent, within) = Self::EXTENTS.locate(unit);
        let page = self.page(unit);
        let address = match scope.near_unit(page, want) {
            Some(address) => address,
            None => self.bring(scope, unit, want)?,
        };
        if Self::PER_UNIT * size_of::<T>() != PAGE_BYTES {
            return Ok((address.cast(), 1));
        }
        let most = most.min(self.made - unit).min(Self::EXTENTS.units(extent) - within);
        Ok((address.cast(), scope.side_by_side(page, address, most, want)))
    }

    /// One unit more, of zeros; the same about where it is.
    pub(super) fn make(&mut self, scope: &Scope<'_>) -> Result<*mut T, FarError> {
        let (extent, _) = Self::EXTENTS.locate(self.made);
        if extent == self.extents.len() {
            if self.extents.first().is_some_and(|page| scope.number(*page).is_none()) {
                return Err(FarError::OtherHeap);
            }
            self.take_extent(scope.core)?;
        }
        let address = scope.bring_unit(self.page(self.made), Want::Create)?;
        self.made += 1;
        Ok(address.cast())
    }

    /// One extent more; how many units it has room for.
    pub(super) fn take_extent(&mut self, core: &Core) -> Result<usize, FarError> {
        let units = Self::EXTENTS.units(self.extents.len());
        self.extents.try_reserve(1).map_err(|_| FarError::FarFull)?;
        let page = core.take_run(units, Self::UNIT_PAGES)?;
        self.extents.push(page);
        Ok(units)
    }

    /// So many units exist: somebody has made them in our extents.
    pub(super) fn set_made(&mut self, units: usize) {
        assert!(self.made == 0 && units <= Self::EXTENTS.units_before(self.extents.len()));
        self.made = units;
    }

    /// Its extents, in which no unit exists.
    pub(super) fn take_extents(&mut self) -> Vec<u32> {
        assert_eq!(self.made, 0);
        core::mem::take(&mut self.extents)
    }

    /// See [`Core::is_as_far`].
    pub(super) fn is_as_far(&self, unit: usize) -> bool {
        let page = self.page(unit);
        // SAFETY: our extents keep the heap.
        let core = unsafe { &*heap_of(page) };
        core.is_as_far(page - core.first_page)
    }

    /// Gives back all units from `keep` on. Nothing lives in them.
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

    /// Where these elements of a unit lie in the heap's region.
    pub(super) fn far_range(&self, unit: usize, elements: Range<usize>) -> FarRange {
        let page = self.page(unit);
        // SAFETY: our extents keep the heap.
        let first_page = unsafe { &*heap_of(page) }.first_page;
        FarRange::in_page(page - first_page, elements.start * size_of::<T>(), elements.len() * size_of::<T>())
    }

    /// Is it far, and nowhere else?
    pub(super) fn is_far(&self, unit: usize) -> bool {
        let page = self.page(unit);
        // SAFETY: our extents keep the heap.
        let core = unsafe { &*heap_of(page) };
        core.is_far(page - core.first_page)
    }

    /// The heap; it exists as long as there is an extent.
    pub(super) fn core(&self) -> Option<*const Core> {
        self.extents.first().map(|page| heap_of(*page))
    }

    /// Drops the first `len` elements, and gives everything back; what cannot be done now is done later.
    pub(super) fn drop_elements(self, len: usize) {
        if !core::mem::needs_drop::<T>() || len == 0 {
            return;
        }
        let Some(core) = self.core() else { unreachable!("elements without an extent") };
        // SAFETY: the extents in it keep the heap.
        unsafe { drop_collection(core, Box::new(Remains { paged: self, at: 0, len })) };
    }
}

impl<T: Send + 'static> Drop for Paged<T> {
    fn drop(&mut self) {
        self.release(0);
    }
}

/// Elements of a collection that is gone.
struct Remains<T: Send + 'static> {
    paged: Paged<T>,
    /// Elements before this one are dropped.
    at: usize,
    len: usize,
}

impl<T: Send + 'static> Bury for Remains<T> {
    fn bury(&mut self, finally: bool, panics: &mut Panics) -> bool {
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
                // SAFETY: elements `at..at + count` are initialised and lie there; `taken` is empty and has room for them.
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
