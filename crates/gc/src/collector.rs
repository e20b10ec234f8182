//! The collector: marks what roots lead to while all mutators are stopped, and gives back pages in
//! which nothing lives.
//!
//! Marking goes depth first through the frames of the far heap, as a program would. Nothing that
//! others see changes before all is marked, so a collection that fails has changed nothing.

use crate::entries::EntryBits;
use crate::error::GcError;
use crate::heap::GcInner;
use crate::pages::{RegionSet, UnitId, UnitPurpose};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield::space::{Space, SpaceScope};
use farfield_core::gc::{ENTRIES_PER_PAGE, EntryWord, LayoutTable, ObjectHeader, PageOccupancy, RefWord, TypeLayout};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use std::rc::Rc;
use std::sync::{MutexGuard, PoisonError};

/// Objects that a collection has found alive, and what it has freed.
#[derive(Default, Debug)]
pub(crate) struct LiveHeap {
    pub(crate) objects: u64,
    pub(crate) bytes: u64,
    pub(crate) freed_pages: u64,
}

/// Collection under way. All mutators are stopped.
pub(crate) struct Collection<'a> {
    heap: &'a GcInner,
    regions: MutexGuard<'a, RegionSet>,
    layouts: Rc<LayoutTable>,
    marks: Vec<EntryBits>,
    /// Objects that live, by region and unit.
    occupancy: Vec<Box<[PageOccupancy]>>,
    /// Entries that are marked, and whose objects were not looked at.
    stack: Vec<u32>,
    charge: CollectionCharge<'a>,
    live: LiveHeap,
}

/// Near memory of a collection's tables, with which the far heap is charged.
struct CollectionCharge<'a> {
    space: &'a Space,
    bytes: u64,
}

impl CollectionCharge<'_> {
    fn add(&mut self, bytes: usize) {
        self.space.charge_anyway(bytes as u64);
        self.bytes += bytes as u64;
    }
}

impl Drop for CollectionCharge<'_> {
    fn drop(&mut self) {
        self.space.uncharge(self.bytes);
    }
}

impl<'a> Collection<'a> {
    /// Collects. Fails, and changes nothing, if an object cannot be read.
    pub(crate) fn run(heap: &'a GcInner) -> Result<LiveHeap, GcError> {
        let mut charge = CollectionCharge { space: heap.pages.space(), bytes: 0 };
        let (regions, entry_pages) = (heap.pages.lock(), heap.entries.made());
        let tables = entry_pages * size_of::<EntryBits>()
            + (0..regions.len()).map(|index| units(&regions, index) * size_of::<PageOccupancy>()).sum::<usize>();
        charge.add(tables);
        let occupancy =
            (0..regions.len()).map(|index| vec![PageOccupancy::EMPTY; units(&regions, index)].into()).collect();
        let mut collection = Collection {
            heap,
            regions,
            layouts: Rc::new(heap.types.table()),
            marks: vec![EntryBits::default(); entry_pages],
            occupancy,
            stack: Vec::new(),
            charge,
            live: LiveHeap::default(),
        };
        collection.mark_all()?;
        Ok(collection.commit())
    }

    fn mark_all(&mut self) -> Result<(), GcError> {
        let mut scope = self.heap.pages.space().enter();
        for entry in self.heap.roots.entries() {
            self.mark(entry)?;
            while let Some(entry) = self.stack.pop() {
                self.trace(&scope, entry)?;
                scope.renew();
            }
        }
        Ok(())
    }

    /// Marks an object that something leads to.
    fn mark(&mut self, entry: u32) -> Result<(), GcError> {
        let (page, within) = (entry / ENTRIES_PER_PAGE, (entry % ENTRIES_PER_PAGE) as usize);
        let Some(bits) = self.marks.get_mut(page as usize).filter(|_| self.heap.entries.is_used(entry)) else {
            return Err(GcError::Damaged { entry, what: "a reference leads to an entry that is not in use" });
        };
        let bit = 1 << (within % 64);
        if bits[within / 64] & bit == 0 {
            bits[within / 64] |= bit;
            if self.stack.len() == self.stack.capacity() {
                self.charge.add(self.stack.len().max(1024) * size_of::<u32>());
                self.stack.reserve_exact(self.stack.len().max(1024));
            }
            self.stack.push(entry);
        }
        Ok(())
    }

    /// Looks at an object, and marks what it leads to.
    fn trace(&mut self, scope: &SpaceScope<'_>, entry: u32) -> Result<(), GcError> {
        let at = self.heap.entries.load(scope, entry)?;
        let (id, room) = self.place_of(entry, at)?;
        if !self.occupancy[id.0][id.1 as usize].insert(at.card()) {
            return Err(GcError::Damaged { entry, what: "two objects begin at its place" });
        }
        let base = match scope.near(at.page()) {
            Some(base) => base,
            None => scope.bring(at.page())?,
        };
        let first = usize::from(at.card()) * CARD_BYTES;
        let word = |offset: usize| {
            assert!(offset + 8 <= room);
            // SAFETY: the unit is near in the scope, the offset lies in it as just checked, and its
            // words are aligned. Nobody changes them: all mutators are stopped.
            unsafe { base.add(first + offset).cast::<AtomicU64>().as_ref() }.load(Ordering::Relaxed)
        };
        let header = ObjectHeader(word(0));
        if header.entry() != entry {
            return Err(GcError::Damaged { entry, what: "the object at its place has another entry" });
        }
        let layouts = Rc::clone(&self.layouts);
        let Some(layout) = layouts.get(header.type_number()) else {
            return Err(GcError::Damaged { entry, what: "its type is unknown" });
        };
        let elements = if layout.has_tail() { word(TypeLayout::TAIL_OFFSETS.0) } else { 0 };
        let Some(bytes) = layout.object_bytes(elements).filter(|bytes| *bytes <= room as u64) else {
            return Err(GcError::Damaged { entry, what: "it is larger than its place" });
        };
        self.live.objects += 1;
        self.live.bytes += bytes;
        // The last one is pushed first, so that the first one is looked at next.
        for index in (0..layout.strong_count(elements)).rev() {
            if let Some(next) = RefWord(word(layout.strong_offset(index) as usize)).entry() {
                self.mark(next)?;
            }
        }
        Ok(())
    }

    /// Returns the unit in which an object lies, and the bytes from its header to the end of that.
    fn place_of(&self, entry: u32, at: EntryWord) -> Result<(UnitId, usize), GcError> {
        let found = self.regions.unit_of(at.page()).and_then(|id| Some((id, self.regions.get(id.0)?)));
        match found {
            Some((id, region)) if at.is_used() && region.page(id.1) == at.page() => match region.purpose {
                UnitPurpose::Objects { pages } => {
                    Ok((id, pages as usize * PAGE_BYTES - usize::from(at.card()) * CARD_BYTES))
                }
                UnitPurpose::Entries => Err(GcError::Damaged { entry, what: "it lies in a page of entries" }),
            },
            _ => Err(GcError::Damaged { entry, what: "it lies in no page of the heap" }),
        }
    }

    /// Frees what is not marked. Mutators have shown what they have, and use none of it on.
    fn commit(self) -> LiveHeap {
        let Collection { heap, mut regions, marks, occupancy, mut live, .. } = self;
        let mut dead = Vec::new();
        for (index, occupancy) in occupancy.into_iter().enumerate() {
            let Some(region) = regions.get_mut(index) else { continue };
            if region.purpose == UnitPurpose::Entries {
                continue;
            }
            let is_dead = |unit: &u32| region.units.is_used(*unit) && occupancy[*unit as usize].is_empty();
            dead.extend((0..region.units.units()).filter(is_dead).map(|unit| (index, unit)));
            live.freed_pages +=
                dead.iter().filter(|id| id.0 == index).count() as u64 * u64::from(region.purpose.pages());
            region.occupancy = occupancy;
        }
        drop(regions);
        heap.entries.replace_bits(&marks);
        heap.left_over.lock().unwrap_or_else(PoisonError::into_inner).clear();
        heap.epoch.fetch_add(1, Ordering::Release);
        for id in dead {
            // SAFETY: units in use were made. No object of the unit is reachable, so no mutator has
            // a reference into it after its safepoint, and open pages are forgotten (`epoch`).
            unsafe { heap.pages.release_unit(id) };
        }
        live
    }
}

fn units(regions: &RegionSet, index: usize) -> usize {
    regions.get(index).map_or(0, |region| region.units.units() as usize)
}
