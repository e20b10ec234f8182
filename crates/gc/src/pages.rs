//! Far pages of a collected heap: regions, the units in them, and the limit.

use core::sync::atomic::{AtomicU64, Ordering};
use farfield::FarError;
use farfield::space::{FarLayout, FarServer, Space};
use farfield_core::gc::{OBJECT_BYTES_MIN, PageFill, PageOccupancy, RegionGeometry, SparseTotals, UnitMap, is_sparse};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{CARD_BYTES, SEGMENT_PAGES};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Purpose of a unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum UnitPurpose {
    /// Unit of so many pages that holds objects.
    Objects {
        /// Number of pages.
        pages: u32,
    },
    /// Page of entries.
    Entries,
}

impl UnitPurpose {
    /// One page that holds objects.
    pub(crate) const OBJECTS: UnitPurpose = UnitPurpose::Objects { pages: 1 };

    pub(crate) fn pages(self) -> u32 {
        match self {
            UnitPurpose::Objects { pages } => pages,
            UnitPurpose::Entries => 1,
        }
    }
}

/// Far pages of a heap.
pub(crate) struct Pages {
    space: Space,
    geometry: RegionGeometry,
    limit: u64,
    /// Pages of units that are in use, and pages that mutators have reserved.
    used: Arc<AtomicU64>,
    regions: Mutex<RegionSet>,
}

/// Regions of a heap.
#[derive(Default)]
pub(crate) struct RegionSet {
    regions: Vec<Option<HeapRegion>>,
    vacant: Vec<usize>,
    /// Index of the region of each segment of the far heap, plus one; 0 for none.
    by_segment: Vec<u32>,
    /// Regions that have free units.
    with_room: BTreeMap<UnitPurpose, BTreeSet<usize>>,
}

/// Run of far pages, cut into units.
pub(crate) struct HeapRegion {
    pub(crate) first_page: u32,
    pub(crate) purpose: UnitPurpose,
    pub(crate) units: UnitMap,
    /// Objects of each unit. What a mutator has put into its open page is not in it before the
    /// page is closed.
    pub(crate) occupancy: Box<[PageOccupancy]>,
    /// Cards of the objects that a cycle has found in each unit; empty but in the cycle's snapshot.
    live_cards: Box<[u16]>,
    /// Units in use that nobody has: a function at the server may still write there.
    lost: Vec<u32>,
    /// Near bytes that the heap is charged with.
    charge: u64,
}

/// Unit of one page that a snapshot has found sparse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SparseUnit {
    pub(crate) id: UnitId,
    pub(crate) page: u32,
    /// Cards that its live objects take.
    pub(crate) cards: u32,
}

/// Number of a unit: the index of its region, and its index there.
pub(crate) type UnitId = (usize, u32);

/// Page that is being filled with small objects.
pub(crate) struct OpenPage {
    pub(crate) id: UnitId,
    pub(crate) page: u32,
    pub(crate) fill: PageFill,
}

impl HeapRegion {
    /// Returns the units in use that are not lost.
    fn found_units(&self) -> UnitMap {
        let mut units = self.units.clone();
        self.lost.iter().for_each(|unit| units.give_back(*unit));
        units
    }

    /// Checks whether a server has all units, of which groups of pages are no smaller than a region.
    fn is_at(&self, layout: FarLayout, server: FarServer) -> bool {
        let last = self.page(self.units.units()) - 1;
        [self.first_page, last].iter().all(|page| layout.place(*page).0 == server)
    }

    /// Returns the first page of a unit.
    pub(crate) fn page(&self, unit: u32) -> u32 {
        self.first_page + unit * self.purpose.pages()
    }
}

impl RegionSet {
    /// Returns the unit in use to which a page belongs.
    pub(crate) fn unit_of(&self, page: u32) -> Option<UnitId> {
        let index = (*self.by_segment.get((page / SEGMENT_PAGES) as usize)?).checked_sub(1)? as usize;
        let region = self.regions[index].as_ref()?;
        let unit = match (page - region.first_page, region.purpose.pages()) {
            // Nearly all units; and a division takes as long as all else here.
            (offset, 1) => offset,
            (offset, pages) => offset / pages,
        };
        region.units.is_used(unit).then_some((index, unit))
    }

    /// Returns the region of this index.
    pub(crate) fn get(&self, index: usize) -> Option<&HeapRegion> {
        self.regions.get(index)?.as_ref()
    }

    /// Returns the region of this index, to change it.
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut HeapRegion> {
        self.regions.get_mut(index)?.as_mut()
    }

    /// Returns the first pages of all units in use.
    pub(crate) fn units(&self) -> Vec<u32> {
        let used = |region: &HeapRegion| {
            let is_used = |unit: &u32| region.units.is_used(*unit);
            (0..region.units.units()).filter(is_used).map(|unit| region.page(unit)).collect::<Vec<u32>>()
        };
        self.regions.iter().flatten().flat_map(used).collect()
    }

    /// Returns an upper bound of the indices of regions.
    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns the regions and their units as they are, without what is known of their objects, and
    /// without units that are lost.
    pub(crate) fn snapshot(&self) -> RegionSet {
        let copy = |region: &HeapRegion| HeapRegion {
            first_page: region.first_page,
            purpose: region.purpose,
            units: region.found_units(),
            lost: Vec::new(),
            occupancy: vec![PageOccupancy::EMPTY; region.occupancy.len()].into(),
            live_cards: vec![0; region.occupancy.len()].into(),
            charge: 0,
        };
        RegionSet {
            regions: self.regions.iter().map(|region| region.as_ref().map(copy)).collect(),
            by_segment: self.by_segment.clone(),
            ..RegionSet::default()
        }
    }

    /// Counts an object of so many bytes in a unit of a snapshot.
    pub(crate) fn count_live(&mut self, (index, unit): UnitId, bytes: u64) {
        if let Some(cards) = self.get_mut(index).and_then(|region| region.live_cards.get_mut(unit as usize)) {
            let of_object = bytes.div_ceil(CARD_BYTES as u64).max((OBJECT_BYTES_MIN / CARD_BYTES) as u64);
            *cards = cards.saturating_add(u16::try_from(of_object).unwrap_or(u16::MAX));
        }
    }

    /// Returns the units of one page that a snapshot has found sparse, in the order of their pages,
    /// and what they hold. `self` is the present, after the cycle has committed. No unit that the
    /// snapshot has in use has been given back since.
    pub(crate) fn sparse_units(&self, snapshot: &RegionSet) -> (Vec<SparseUnit>, SparseTotals) {
        let (mut sparse, mut totals) = (Vec::new(), SparseTotals::default());
        for (index, old) in snapshot.regions.iter().enumerate() {
            let (Some(old), Some(now)) = (old, self.get(index)) else { continue };
            if old.purpose != UnitPurpose::OBJECTS {
                continue;
            }
            for unit in (0..old.units.units()).filter(|unit| old.units.is_used(*unit)) {
                let cards = u32::from(old.live_cards[unit as usize]);
                if is_sparse(now.occupancy[unit as usize].count(), cards) {
                    sparse.push(SparseUnit { id: (index, unit), page: old.page(unit), cards });
                    totals.pages += 1;
                    totals.cards += u64::from(cards);
                }
            }
        }
        sparse.sort_unstable_by_key(|unit| unit.page);
        (sparse, totals)
    }

    /// Returns the near memory that a snapshot of the regions takes, in bytes.
    pub(crate) fn near_bytes(&self) -> usize {
        let region = |region: &HeapRegion| {
            size_of_val(&*region.occupancy)
                + region.occupancy.len() * size_of::<u16>()
                + region.units.units().div_ceil(64) as usize * size_of::<u64>()
        };
        self.regions.iter().flatten().map(region).sum::<usize>()
            + self.regions.len() * size_of::<Option<HeapRegion>>()
            + self.by_segment.len() * size_of::<u32>()
    }

    /// Replaces what is known of the objects in units of a snapshot. What was in their place goes
    /// into the snapshot.
    pub(crate) fn replace_occupancy(&mut self, snapshot: &mut RegionSet) {
        for (now, old) in self.regions.iter_mut().zip(&mut snapshot.regions) {
            let (Some(now), Some(old)) = (now, old) else { continue };
            core::mem::swap(&mut now.occupancy, &mut old.occupancy);
            for unit in (0..now.units.units()).filter(|unit| now.units.is_used(*unit) && !old.units.is_used(*unit)) {
                now.occupancy[unit as usize] = old.occupancy[unit as usize];
            }
        }
    }

    fn segments(region: &HeapRegion) -> core::ops::Range<usize> {
        let pages = region.units.units() * region.purpose.pages();
        let first = (region.first_page / SEGMENT_PAGES) as usize;
        first..first + pages.div_ceil(SEGMENT_PAGES) as usize
    }

    fn insert(&mut self, region: HeapRegion) -> usize {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.regions.push(None);
            self.regions.len() - 1
        });
        let segments = RegionSet::segments(&region);
        if self.by_segment.len() < segments.end {
            self.by_segment.resize(segments.end, 0);
        }
        self.by_segment[segments].fill(index as u32 + 1);
        self.with_room.entry(region.purpose).or_default().insert(index);
        self.regions[index] = Some(region);
        index
    }

    /// Gives a unit back. Returns its region if that holds nothing any more.
    fn give_back(&mut self, (index, unit): UnitId) -> Option<HeapRegion> {
        let Some(region) = &mut self.regions[index] else { unreachable!("a unit in use has a region") };
        region.units.give_back(unit);
        region.occupancy[unit as usize] = PageOccupancy::EMPTY;
        if !region.units.is_empty() {
            self.with_room.entry(region.purpose).or_default().insert(index);
            return None;
        }
        if let Some(indices) = self.with_room.get_mut(&region.purpose) {
            indices.remove(&index);
        }
        let region = self.regions[index].take()?;
        self.by_segment[RegionSet::segments(&region)].fill(0);
        self.vacant.push(index);
        Some(region)
    }
}

impl Pages {
    /// Creates an empty set of pages that can have so many.
    pub(crate) fn new(space: Space, geometry: RegionGeometry, limit: u64) -> Pages {
        Pages { space, geometry, limit, used: Arc::default(), regions: Mutex::default() }
    }

    pub(crate) fn space(&self) -> &Space {
        &self.space
    }

    /// Returns the number of pages that the heap can have.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the number of pages in use or reserved.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns how many pages the limit leaves.
    pub(crate) fn room(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }

    /// Returns the counter of the pages in use or reserved.
    pub(crate) fn used_counter(&self) -> Arc<AtomicU64> {
        self.used.clone()
    }

    /// Reserves pages if no more than `most` are in use then.
    pub(crate) fn reserve(&self, pages: u64, most: u64) -> bool {
        let reserve = |used: u64| used.checked_add(pages).filter(|used| *used <= most.min(self.limit));
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_ok()
    }

    /// Reserves a page for objects that are moved, of which there may be one above the limit: moving
    /// them frees pages.
    pub(crate) fn reserve_to_move(&self) -> bool {
        let reserve = |used: u64| (used <= self.limit).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_ok()
    }

    /// Gives pages back that were reserved, or whose unit was released.
    pub(crate) fn unreserve(&self, pages: u64) {
        self.used.fetch_sub(pages, Ordering::Relaxed);
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, RegionSet> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an empty unit, whose pages the caller has reserved.
    pub(crate) fn take_unit(&self, purpose: UnitPurpose) -> Result<(UnitId, u32), FarError> {
        self.take_unit_of(purpose, None)
    }

    /// Takes an empty unit that this server has, whose pages the caller has reserved. Regions
    /// [lie at one server](Pages::has_regions_at_servers).
    pub(crate) fn take_unit_at(
        &self,
        purpose: UnitPurpose,
        layout: FarLayout,
        server: FarServer,
    ) -> Result<(UnitId, u32), FarError> {
        self.take_unit_of(purpose, Some((layout, server)))
    }

    /// Checks whether one server has all pages of a region, if the region begins where a region should.
    pub(crate) fn has_regions_at_servers(&self, layout: FarLayout) -> bool {
        layout.deal().is_none_or(|deal| deal.group_pages() >= self.geometry.pages().into())
    }

    fn take_unit_of(
        &self,
        purpose: UnitPurpose,
        server: Option<(FarLayout, FarServer)>,
    ) -> Result<(UnitId, u32), FarError> {
        let mut regions = self.lock();
        let is_there = |index: &usize| {
            let region = regions.get(*index);
            server.is_none_or(|(layout, server)| region.is_some_and(|region| region.is_at(layout, server)))
        };
        let found = regions.with_room.get(&purpose).and_then(|indices| indices.iter().copied().find(is_there));
        let index = match found {
            Some(index) => index,
            None => {
                let region = self.take_region(purpose, server)?;
                regions.insert(region)
            }
        };
        let Some(region) = &mut regions.regions[index] else { unreachable!("a region with room exists") };
        let Some(unit) = region.units.take() else { unreachable!("a region with room has a free unit") };
        let (page, is_full) = (region.page(unit), region.units.is_full());
        if is_full && let Some(indices) = regions.with_room.get_mut(&purpose) {
            indices.remove(&index);
        }
        Ok(((index, unit), page))
    }

    fn take_region(
        &self,
        purpose: UnitPurpose,
        server: Option<(FarLayout, FarServer)>,
    ) -> Result<HeapRegion, FarError> {
        let units = self.geometry.units(purpose.pages());
        let tables = size_of::<HeapRegion>() + units as usize * size_of::<PageOccupancy>() + units as usize / 8;
        let segments = (units * purpose.pages()).div_ceil(SEGMENT_PAGES) as usize * size_of::<u32>();
        let charge = (tables + segments) as u64;
        self.space.charge(charge)?;
        let first_page = self.take_run(units, purpose, server).inspect_err(|_| self.space.uncharge(charge))?;
        let occupancy = vec![PageOccupancy::EMPTY; units as usize].into();
        let (live_cards, lost) = (Box::default(), Vec::new());
        Ok(HeapRegion { first_page, purpose, units: UnitMap::new(units), occupancy, live_cards, lost, charge })
    }

    /// Takes the far space of a region: one server has all of it, if servers have enough pages that
    /// follow each other. With a server, it is this one.
    fn take_run(
        &self,
        units: u32,
        purpose: UnitPurpose,
        server: Option<(FarLayout, FarServer)>,
    ) -> Result<u32, FarError> {
        let layout = server.map_or_else(|| self.space.layout(), |(layout, _)| layout);
        let region = u64::from(self.geometry.pages());
        // A large object that has a run of its own begins anywhere.
        let Some(deal) = layout.deal().filter(|_| units > 1 && self.has_regions_at_servers(layout)) else {
            return self.space.take_run(units, purpose.pages());
        };
        let next = |page: u32| {
            let page = u64::from(page).next_multiple_of(region);
            let page = server.map_or(Some(page), |(_, server)| deal.next_of(server.index() as usize, page));
            u32::try_from(page?).ok()
        };
        let taken = self.space.take_run_at(units, purpose.pages(), next);
        if taken.is_err() && server.is_none() {
            return self.space.take_run(units, purpose.pages());
        }
        taken
    }

    /// Replaces what is known of the objects of a unit.
    pub(crate) fn set_occupancy(&self, (index, unit): UnitId, occupancy: PageOccupancy) {
        if let Some(region) = &mut self.lock().regions[index] {
            region.occupancy[unit as usize] = occupancy;
        }
    }

    /// Gives back a unit that could not be made: no page of it is near or far. Its pages stay
    /// reserved.
    pub(crate) fn cancel_unit(&self, id: UnitId) {
        let emptied = self.lock().give_back(id);
        if let Some(region) = emptied {
            self.free_region(&region);
        }
    }

    /// Gives back a unit and its pages.
    ///
    /// # Safety
    /// The unit was made, and nobody uses an address in it any more.
    pub(crate) unsafe fn release_unit(&self, id: UnitId) {
        let unit = self.lock().get(id.0).map(|region| (region.page(id.1), region.purpose.pages()));
        let Some((page, pages)) = unit else { unreachable!("a unit in use has a region") };
        // SAFETY: passed on to the caller. Nobody takes the unit before it is given back below.
        unsafe { self.space.release(page, pages) };
        self.cancel_unit(id);
        self.unreserve(pages.into());
    }

    /// Gives up a unit in use that was never made, because a function at the server may still write
    /// there: neither it nor its region is ever used for anything else. Its pages stay reserved.
    pub(crate) fn lose_unit(&self, (index, unit): UnitId) {
        if let Some(region) = &mut self.lock().regions[index] {
            region.lost.push(unit);
        }
    }

    fn free_region(&self, region: &HeapRegion) {
        // SAFETY: the run was taken by `take_region`, the region is in no table any more, and its
        // units are empty, but for those that are lost: each was released, or never made.
        unsafe {
            match region.lost[..] {
                [] => self.space.free_run(region.first_page),
                _ => self.space.lose_run(region.first_page),
            }
        };
        self.space.uncharge(region.charge);
    }

    /// Returns the number of bytes of so many pages.
    pub(crate) fn bytes(pages: u64) -> u64 {
        pages * PAGE_BYTES as u64
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let regions = core::mem::take(self.regions.get_mut().unwrap_or_else(PoisonError::into_inner));
        for region in regions.regions.into_iter().flatten() {
            let found = region.found_units();
            for unit in (0..found.units()).filter(|unit| found.is_used(*unit)) {
                // SAFETY: units in use that are not lost were made. The heap is gone, and with it all mutators, whose
                // references were the addresses in it.
                unsafe { self.space.release(region.page(unit), region.purpose.pages()) };
            }
            self.free_region(&region);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a page that is used again while a server may still write there, and against one that another server has.
    use super::*;
    use farfield::Heap;

    #[test]
    fn regions_over_a_stripe_lie_at_one_server_each() {
        for (group, is_at_servers) in [("1M", true), ("4M", true), ("512K", false)] {
            let pool = format!("stripe(ram:,ram:,ram:)?group={group}");
            let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).pool(pool).build().unwrap();
            let space = Space::open(&heap).unwrap();
            // The regions begin behind this.
            let other = space.take_run(40, 1).unwrap();
            let pages = Pages::new(space, RegionGeometry::DEFAULT, 1 << 20);
            let layout = pages.space().layout();
            assert_eq!(pages.has_regions_at_servers(layout), is_at_servers);
            let mut taken: Vec<UnitId> = Vec::new();
            for purpose in [UnitPurpose::OBJECTS, UnitPurpose::Objects { pages: 3 }, UnitPurpose::Entries] {
                taken.extend((0..600).map(|_| pages.take_unit(purpose).unwrap().0));
            }
            let of_region = |region: &HeapRegion| {
                let pages = region.first_page..region.page(region.units.units());
                pages.map(|page| layout.place(page).0).collect::<BTreeSet<FarServer>>().len()
            };
            let regions = pages.lock().regions.iter().flatten().map(of_region).collect::<Vec<usize>>();
            assert!(regions.len() > 10 && regions.iter().all(|servers| *servers == 1) == is_at_servers, "{group}");
            if is_at_servers {
                for server in layout.servers() {
                    for _ in 0..300 {
                        let (id, page) = pages.take_unit_at(UnitPurpose::OBJECTS, layout, server).unwrap();
                        assert_eq!(layout.place(page).0, server);
                        taken.push(id);
                    }
                }
            }
            let count = taken.len();
            assert_eq!(taken.iter().collect::<BTreeSet<_>>().len(), count, "no unit is taken twice");
            taken.into_iter().for_each(|id| pages.cancel_unit(id));
            // SAFETY: our run, of which nothing was made.
            unsafe { pages.space().free_run(other) };
            drop(pages);
            heap.verify();
        }
    }

    #[test]
    fn lost_units_are_neither_found_nor_taken_nor_given_back() {
        let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
        let pages = Pages::new(Space::open(&heap).unwrap(), RegionGeometry::new(64 << 10).unwrap(), 1000);
        let take = || {
            let (id, page) = pages.take_unit(UnitPurpose::OBJECTS).unwrap();
            pages.space().enter().make(page).unwrap();
            assert!(pages.reserve(1, u64::MAX));
            (id, page)
        };
        let first: Vec<(UnitId, u32)> = (0..5).map(|_| take()).collect();
        // SAFETY: just made, and nobody uses it.
        unsafe { pages.release_unit(first[2].0) };
        let (lost, lost_page) = pages.take_unit(UnitPurpose::OBJECTS).unwrap();
        assert_eq!((lost, lost_page), first[2]);
        pages.lose_unit(lost);
        let snapshot = pages.lock().snapshot();
        assert!(snapshot.unit_of(lost_page).is_none() && snapshot.unit_of(first[3].1).is_some());
        let more: Vec<(UnitId, u32)> = (0..40).map(|_| take()).collect();
        assert!(more.iter().all(|(id, _)| *id != lost));
        for (id, _) in first.iter().filter(|(id, _)| *id != lost).chain(&more) {
            // SAFETY: as above.
            unsafe { pages.release_unit(*id) };
        }
        assert!(pages.lock().unit_of(lost_page).is_some(), "its region stays");
        drop(pages);
        heap.verify();
        // Its far addresses are nobody's any more.
        let space = Space::open(&heap).unwrap();
        let mut runs = Vec::new();
        while let Ok(run) = space.take_run(4096, 1) {
            assert!(!(run..run + 4096).contains(&lost_page));
            runs.push(run);
        }
        assert!(runs.len() > 30);
        // SAFETY: our runs, of which nothing was made.
        runs.into_iter().for_each(|run| unsafe { space.free_run(run) });
    }
}
