//! The verifier: walks through a heap at rest, one object after the other, and checks all that is
//! known of it.
//!
//! It shares nothing with the collector but the words. It reads far pages from the pool and near
//! ones where they are, past the frames that mutators use, and it reads layouts from their encoded
//! form, as a server does. It goes breadth first and needs near memory for each object, so it is
//! for tests.

use crate::error::GcError;
use crate::heap::GcInner;
use crate::pages::{RegionSet, UnitPurpose};
use farfield::space::PageReader;
use farfield_core::gc::{EntryWord, LayoutTable, ObjectHeader, RefWord, TypeLayout, WeakWord};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// What the verifier has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VerifiedHeap {
    /// Objects that roots lead to.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// References between them.
    pub references: u64,
    /// Objects that were not collected, whether roots lead to them or not.
    pub allocated: u64,
    /// Pages in which objects lie that were not collected.
    pub pages: u64,
}

/// Pages that the walk keeps.
const CACHED_PAGES: usize = 64;

struct Walk<'a> {
    heap: &'a GcInner,
    regions: &'a RegionSet,
    layouts: LayoutTable,
    reader: PageReader<'a>,
    cache: HashMap<u32, Box<[u8; PAGE_BYTES]>>,
    cached: VecDeque<u32>,
    /// End of each object that was found, by where it begins; both in bytes of the far heap.
    places: BTreeMap<u64, u64>,
    found: VerifiedHeap,
}

fn damaged<T>(entry: u32, what: &'static str) -> Result<T, GcError> {
    Err(GcError::Damaged { entry, what })
}

/// Verifies a heap whose mutators are stopped.
pub(crate) fn verify(heap: &GcInner) -> Result<VerifiedHeap, GcError> {
    let regions = heap.pages.lock();
    let layouts = match LayoutTable::decode(&heap.types.table().encode()) {
        Ok(layouts) => layouts,
        Err(_) => return damaged(0, "the layouts cannot be read back"),
    };
    let mut walk = Walk {
        heap,
        regions: &regions,
        layouts,
        reader: heap.pages.space().reader(),
        cache: HashMap::new(),
        cached: VecDeque::new(),
        places: BTreeMap::new(),
        found: VerifiedHeap::default(),
    };
    walk.walk()?;
    walk.check_places()?;
    walk.count_allocated()?;
    Ok(walk.found)
}

impl Walk<'_> {
    /// Returns the word at this byte of the far heap.
    fn word(&mut self, byte: u64) -> Result<u64, GcError> {
        let (page, offset) = ((byte / PAGE_BYTES as u64) as u32, (byte % PAGE_BYTES as u64) as usize);
        if !self.cache.contains_key(&page) {
            if self.cached.len() == CACHED_PAGES
                && let Some(oldest) = self.cached.pop_front()
            {
                self.cache.remove(&oldest);
            }
            let mut bytes = Box::new([0; PAGE_BYTES]);
            self.reader.read(page, &mut bytes)?;
            self.cache.insert(page, bytes);
            self.cached.push_back(page);
        }
        let bytes = self.cache[&page][offset..].first_chunk().copied();
        Ok(u64::from_ne_bytes(bytes.unwrap_or_else(|| unreachable!("words do not cross pages"))))
    }

    fn entry(&mut self, entry: u32) -> Result<EntryWord, GcError> {
        let (page, offset) = self.heap.entries.place(entry);
        let is_entry_page = self
            .regions
            .unit_of(page)
            .and_then(|id| self.regions.get(id.0))
            .is_some_and(|region| region.purpose == UnitPurpose::Entries);
        if !is_entry_page {
            return damaged(entry, "its entry lies in no page of entries");
        }
        Ok(EntryWord(self.word(u64::from(page) * PAGE_BYTES as u64 + offset as u64)?))
    }

    fn walk(&mut self) -> Result<(), GcError> {
        let mut queue: VecDeque<u32> = self.heap.roots.entries().into();
        let mut seen: std::collections::HashSet<u32> = queue.iter().copied().collect();
        queue = seen.iter().copied().collect();
        while let Some(entry) = queue.pop_front() {
            for next in self.object(entry)? {
                self.found.references += 1;
                if seen.insert(next) {
                    queue.push_back(next);
                }
            }
        }
        Ok(())
    }

    /// Checks an object, and returns the entries that it leads to.
    fn object(&mut self, entry: u32) -> Result<Vec<u32>, GcError> {
        if !self.heap.entries.is_used(entry) {
            return damaged(entry, "it is reachable, and its entry is not in use");
        }
        let at = self.entry(entry)?;
        let Some((region, unit)) = self
            .regions
            .unit_of(at.page())
            .and_then(|(index, unit)| Some((self.regions.get(index)?, unit)))
            .filter(|_| at.is_used())
        else {
            return damaged(entry, "it lies in no page that is in use");
        };
        let UnitPurpose::Objects { pages } = region.purpose else {
            return damaged(entry, "it lies in a page of entries");
        };
        if region.page(unit) != at.page() || pages > 1 && at.card() != 0 {
            return damaged(entry, "it begins inside of a unit");
        }
        if !region.occupancy[unit as usize].contains(at.card()) {
            return damaged(entry, "its page does not know it");
        }
        let begin = u64::from(at.page()) * PAGE_BYTES as u64 + u64::from(at.card()) * CARD_BYTES as u64;
        let end = (u64::from(at.page()) + u64::from(pages)) * PAGE_BYTES as u64;
        let header = ObjectHeader(self.word(begin)?);
        if header.entry() != entry {
            return damaged(entry, "its header names another entry");
        }
        let Some(layout) = self.layouts.get(header.type_number()).cloned() else {
            return damaged(entry, "its type is unknown");
        };
        let elements = if layout.has_tail() { self.word(begin + TypeLayout::TAIL_OFFSETS.0 as u64)? } else { 0 };
        let Some(bytes) = layout.object_bytes(elements).filter(|bytes| begin + bytes <= end) else {
            return damaged(entry, "it does not fit into its unit");
        };
        if self.places.insert(begin, begin + bytes).is_some() {
            return damaged(entry, "another object begins where it does");
        }
        self.found.objects += 1;
        self.found.bytes += bytes;
        let mut leads_to = Vec::new();
        for index in 0..layout.strong_count(elements) {
            let word = RefWord(self.word(begin + layout.strong_offset(index))?);
            if word.is_loose() {
                return damaged(entry, "a reference in it was never made null");
            }
            leads_to.extend(word.entry());
        }
        for offset in layout.weak_offsets(elements) {
            let word = WeakWord(self.word(begin + offset)?);
            if word.is_loose() {
                return damaged(entry, "a weak reference in it was never made null");
            }
            if let Some((target, generation)) = word.target()
                && self.heap.entries.is_used(target)
                && self.entry(target)?.generation() < generation
            {
                return damaged(entry, "a weak reference in it is younger than what it leads to");
            }
        }
        Ok(leads_to)
    }

    /// Checks that no object begins in another.
    fn check_places(&self) -> Result<(), GcError> {
        let begins = self.places.keys().skip(1);
        let overlap = self.places.values().zip(begins).any(|(end, next)| end > next);
        if overlap { damaged(0, "two objects overlap") } else { Ok(()) }
    }

    /// Counts objects by entries and by the bits of their pages, which agree.
    fn count_allocated(&mut self) -> Result<(), GcError> {
        let entries: u32 =
            (0..self.heap.entries.made()).flat_map(|page| self.heap.entries.bits_of(page)).map(u64::count_ones).sum();
        // Entry 0 is no object's.
        self.found.allocated = u64::from(entries.saturating_sub(1));
        let mut begun = 0;
        for region in (0..self.regions.len()).filter_map(|index| self.regions.get(index)) {
            let UnitPurpose::Objects { pages } = region.purpose else { continue };
            for unit in (0..region.units.units()).filter(|unit| region.units.is_used(*unit)) {
                begun += u64::from(region.occupancy[unit as usize].count());
                self.found.pages += u64::from(pages);
            }
        }
        if begun != self.found.allocated {
            return damaged(0, "pages and entries disagree on the number of objects");
        }
        Ok(())
    }
}
