//! Evacuation: moves the objects of sparse pages close together, so that the sparse pages can be
//! given back (the compaction of Mako, without its barrier on loads).
//!
//! The collector works in batches. It plans a batch beside the mutators, and waits for the pool only
//! then: near sources are pinned, far ones are copied past the frames of the far heap, and the entry
//! pages of their objects and fresh pages are brought near and pinned. (A scope would keep mutators
//! from near memory while the collector waits for them.) Then the mutators are stopped for a
//! moment, in which nobody waits for I/O: the objects are copied, and their entries get their new
//! places. At a stop nobody has a reference into a page, so nobody notices that objects have moved.
//! A far source that has changed since it was copied is left as it is.
//!
//! Objects of near pages and of far ones go to different pages, because they are used differently.
//!
//! Objects of far pages are copied by the memory [server](at_servers) that has the pages, if the
//! program lets it be asked.

mod at_servers;

use super::retry;
use super::steps::CycleStep;
use super::tracer::FoundObject;
use crate::error::GcError;
use crate::heap::{BrokenRule, GcInner};
use crate::pages::{OpenPage, RegionSet, SparseUnit, UnitId, UnitPurpose};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield::FarError;
use farfield::space::{FarCopy, PageReader, SpaceScope, UnitPin};
use farfield_core::gc::{EntryWord, LayoutTable, ObjectHeader, PageFill, PageOccupancy, cards_of};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

/// Sources of a batch, and entry pages of the objects in it, at most.
const BATCH_PAGES: usize = 64;

/// Objects of a batch, at most: mutators are stopped while these are copied.
const BATCH_OBJECTS: usize = 4096;

/// What was moved.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct MovedObjects {
    pub(crate) objects: u64,
    pub(crate) bytes: u64,
    /// Objects that a server has copied.
    pub(crate) at_servers: u64,
    /// Pages that were emptied and given back.
    pub(crate) pages: u64,
    /// Far pages that were read.
    pub(crate) read_pages: u64,
    /// Calls of servers that did not copy what they should.
    pub(crate) refused_calls: u64,
}

/// Evacuation at the end of one cycle.
pub(super) struct Evacuation<'a, 'r> {
    heap: &'a GcInner,
    layouts: Rc<LayoutTable>,
    reader: &'r mut PageReader<'a>,
    /// Sparse pages that still have to be looked at.
    sources: VecDeque<SparseUnit>,
    /// Fresh page that is being filled with objects of near pages, and one for those of far pages.
    open: [Option<OpenPage>; 2],
    batch_pages: usize,
    moved: MovedObjects,
}

/// Objects that are moved together.
#[derive(Default)]
struct Batch<'a> {
    sources: Vec<SparsePage>,
    moves: Vec<Move>,
    /// What has to be near: sources that are not copied, fresh pages, and pages of entries.
    pins: HashMap<u32, UnitPin<'a>>,
}

/// Sparse page.
struct SparsePage {
    unit: SparseUnit,
    bytes: SourceBytes,
}

/// Where the bytes of a sparse page are read.
enum SourceBytes {
    /// In its frame.
    Near,
    /// In a copy of the far page.
    Copy(FarCopy),
    /// At a server, which has copied the objects of a page with this checksum.
    Server {
        /// Checksum of the page.
        sum: u64,
    },
}

/// Sparse page while all mutators are stopped.
#[derive(Clone, Copy)]
enum StoppedSource {
    /// Its bytes are here.
    Here(NonNull<u8>),
    /// Its objects lie where they go to, as they are.
    Copied,
    /// It is not what it was.
    Changed,
}

/// Object in a source.
struct SparseObject {
    /// Index of the source in its batch.
    source: usize,
    card: u8,
    bytes: usize,
    entry: u32,
}

/// Object that has a place to go to.
struct Move {
    object: SparseObject,
    generation: u32,
    target: UnitId,
    target_page: u32,
    target_card: u8,
}

impl<'a> Batch<'a> {
    /// Brings a page near, and keeps it there until the batch is done. False if too much is pinned.
    fn pin(&mut self, scope: &SpaceScope<'a>, page: u32) -> Result<bool, GcError> {
        let Entry::Vacant(vacant) = self.pins.entry(page) else { return Ok(true) };
        match scope.pin(scope.bring(page)?) {
            Ok(pin) => {
                vacant.insert(pin);
                Ok(true)
            }
            Err(FarError::PinsFull) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

fn first_byte(card: u8) -> usize {
    usize::from(card) * CARD_BYTES
}

impl<'a, 'r> Evacuation<'a, 'r> {
    /// Moves what lies in sparse pages of the snapshot of a cycle that has committed, if that frees
    /// enough. `is_needed` if the heap has no room left. Mutators have to reach safepoints.
    ///
    /// After an error, what was moved before it stays moved.
    pub(super) fn run(
        heap: &'a GcInner,
        reader: &'r mut PageReader<'a>,
        snapshot: &RegionSet,
        layouts: &Rc<LayoutTable>,
        is_needed: bool,
    ) -> (MovedObjects, Result<(), GcError>) {
        let (sparse, totals) = heap.pages.lock().sparse_units(snapshot);
        if !totals.pays(heap.pages.used(), is_needed) {
            return (MovedObjects::default(), Ok(()));
        }
        let mut evacuation = Evacuation {
            heap,
            layouts: Rc::clone(layouts),
            reader,
            sources: sparse.into(),
            open: [None, None],
            batch_pages: heap.copied_pages.min(BATCH_PAGES),
            moved: MovedObjects::default(),
        };
        let result = evacuation.move_far_at_servers().and_then(|()| evacuation.run_batches());
        evacuation.close();
        (evacuation.moved, result)
    }

    fn run_batches(&mut self) -> Result<(), GcError> {
        while !self.sources.is_empty() && !self.heap.cycles.is_closed() {
            let batch = self.plan()?;
            if batch.moves.is_empty() && !batch.sources.is_empty() {
                // There is no room to move to.
                return Ok(());
            }
            let stop = self.heap.stops.begin()?;
            self.heap.reach(CycleStep::Moving);
            let is_moved = self.move_objects(&batch);
            self.heap.counters.count_pause(stop.end());
            self.heap.reach(CycleStep::Moved);
            let mut is_left = vec![false; batch.sources.len()];
            self.note_moved(&batch, &is_moved, &mut is_left);
            drop(batch.pins);
            for (source, is_left) in batch.sources.into_iter().zip(is_left).rev() {
                // Others change one that is left, so it is not sparse for long, or will be found again.
                if !self.release_if_empty(source.unit.id) && !is_left {
                    self.sources.push_front(source.unit);
                }
                if let SourceBytes::Copy(copy) = source.bytes {
                    self.reader.take_back(copy);
                }
            }
        }
        Ok(())
    }

    /// Chooses what is moved next, and brings near what is needed for that. Waits for the pool.
    fn plan(&mut self) -> Result<Batch<'a>, GcError> {
        let mut batch = Batch::default();
        let count = self.sources.len().min(self.batch_pages);
        let chosen: Vec<SparseUnit> = self.sources.drain(..count).collect();
        let pages: Vec<u32> = chosen.iter().map(|unit| unit.page).collect();
        self.heap.reach(CycleStep::ReadingSources);
        let copies = self.reader.copy_far(&pages)?;
        self.moved.read_pages += copies.len() as u64;
        let mut copies: HashMap<u32, FarCopy> = copies.into_iter().map(|copy| (copy.page(), copy)).collect();
        let space = self.heap.pages.space();
        let mut scope = space.enter();
        let mut objects = Vec::new();
        for unit in chosen {
            let bytes = match copies.remove(&unit.page) {
                Some(copy) => SourceBytes::Copy(copy),
                None if space.is_near(unit.page) && retry(&mut scope, |scope| batch.pin(scope, unit.page))? => {
                    SourceBytes::Near
                }
                // It has just left, or cannot be read.
                None => continue,
            };
            let source = SparsePage { unit, bytes };
            objects.extend(self.objects_of(&scope, &source, batch.sources.len())?);
            batch.sources.push(source);
            scope.renew();
        }
        let mut entry_pages = HashSet::new();
        objects.retain(|object: &SparseObject| {
            let page = self.heap.entries.place(object.entry).0;
            // The others wait for the next batch.
            entry_pages.contains(&page) || entry_pages.len() < self.batch_pages && entry_pages.insert(page)
        });
        objects.truncate(BATCH_OBJECTS);
        scope.prefetch(entry_pages);
        for object in objects {
            let word = retry(&mut scope, |scope| self.heap.entries.load(scope, object.entry))?;
            if (word.page(), word.card()) != (batch.sources[object.source].unit.page, object.card) {
                return Err(GcError::Damaged { entry: object.entry, what: "its entry does not lead to it" });
            }
            if !batch.pin(&scope, self.heap.entries.place(object.entry).0)? {
                break;
            }
            let is_far = matches!(batch.sources[object.source].bytes, SourceBytes::Copy(_));
            let cards = cards_of(object.bytes);
            let Some(open) = find_room(self.heap, &scope, &mut self.open[usize::from(is_far)], cards) else { break };
            let Some(target_card) = open.fill.next(cards).filter(|_| batch.pin(&scope, open.page).is_ok_and(|it| it))
            else {
                break;
            };
            open.fill.insert(cards);
            let (target, target_page) = (open.id, open.page);
            batch.moves.push(Move { object, generation: word.generation(), target, target_page, target_card });
            scope.renew();
        }
        Ok(batch)
    }

    /// Returns the objects of a source, which has this index in its batch.
    fn objects_of(
        &self,
        scope: &SpaceScope<'_>,
        source: &SparsePage,
        index: usize,
    ) -> Result<Vec<SparseObject>, GcError> {
        let (near, copy) = match &source.bytes {
            SourceBytes::Near => (Some(scope.bring(source.unit.page)?), None),
            SourceBytes::Copy(copy) => (None, Some(copy)),
            SourceBytes::Server { .. } => (None, None),
        };
        let word = |offset: usize| {
            assert!(offset + size_of::<u64>() <= PAGE_BYTES && offset.is_multiple_of(size_of::<u64>()));
            match (near, copy) {
                // SAFETY: the page is near in the scope, the offset lies in it and is aligned, and
                // mutators change words as atomics.
                (Some(near), _) => unsafe { near.add(offset).cast::<AtomicU64>().as_ref() }.load(Ordering::Relaxed),
                (None, Some(copy)) => {
                    copy.bytes()[offset..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
                }
                (None, None) => unreachable!("the server has looked at its objects"),
            }
        };
        let object = |card: u8| {
            let first = first_byte(card);
            let entry = ObjectHeader(word(first)).entry();
            let found = FoundObject::new(&self.layouts, entry, PAGE_BYTES - first, |offset| word(first + offset))?;
            if !self.heap.entries.is_used(entry) {
                return Err(GcError::Damaged { entry, what: "its entry is not in use" });
            }
            Ok(SparseObject { source: index, card, bytes: found.bytes as usize, entry })
        };
        self.occupancy(source.unit.id).iter().map(object).collect()
    }

    fn occupancy(&self, (index, unit): UnitId) -> PageOccupancy {
        let regions = self.heap.pages.lock();
        regions.get(index).map_or(PageOccupancy::EMPTY, |region| region.occupancy[unit as usize])
    }

    /// Moves the objects of a batch while all mutators are stopped. Says of each whether it was
    /// moved.
    fn move_objects(&self, batch: &Batch<'_>) -> Vec<bool> {
        let scope = self.heap.pages.space().enter();
        let sources: Vec<_> = batch.sources.iter().map(|source| self.stopped(&scope, source)).collect();
        let move_object = |it: &Move| {
            match sources[it.object.source] {
                StoppedSource::Changed => return false,
                StoppedSource::Copied => {}
                StoppedSource::Here(from) => {
                    // It is pinned, as is the page of the entry, so this neither waits nor fails.
                    let Ok(to) = scope.bring_to_change(it.target_page) else { return false };
                    // SAFETY:
                    // - the source has the object there, by its layout: it is near in the scope or a
                    //   copy, and nobody changes it, because all mutators are stopped;
                    // - the target is near in the scope, and has room for the object there, which is
                    //   nobody's.
                    unsafe {
                        let to = to.add(first_byte(it.target_card));
                        to.copy_from_nonoverlapping(from.add(first_byte(it.object.card)), it.object.bytes);
                    }
                }
            }
            let word = EntryWord::new(it.target_page, it.target_card, it.generation);
            self.heap.entries.replace(&scope, it.object.entry, word).is_ok()
        };
        batch.moves.iter().map(move_object).collect()
    }

    /// Returns where the bytes of a source are while all mutators are stopped.
    fn stopped(&self, scope: &SpaceScope<'_>, source: &SparsePage) -> StoppedSource {
        let is_believed = self.heap.broken == Some(BrokenRule::CopiesAreCurrent);
        match &source.bytes {
            SourceBytes::Copy(copy) if is_believed || self.reader.is_current(copy) => {
                StoppedSource::Here(NonNull::from(copy.bytes()).cast())
            }
            SourceBytes::Server { sum }
                if is_believed || self.heap.pages.space().is_far_with(source.unit.page, *sum) =>
            {
                StoppedSource::Copied
            }
            SourceBytes::Copy(_) | SourceBytes::Server { .. } => StoppedSource::Changed,
            SourceBytes::Near => scope.bring(source.unit.page).map_or(StoppedSource::Changed, StoppedSource::Here),
        }
    }

    /// Notes what was moved, and which sources have objects that were not.
    fn note_moved(&mut self, batch: &Batch<'_>, is_moved: &[bool], is_left: &mut [bool]) {
        let mut regions = self.heap.pages.lock();
        let mut occupancy_of = |(index, unit): UnitId, change: &mut dyn FnMut(&mut PageOccupancy)| {
            if let Some(region) = regions.get_mut(index) {
                change(&mut region.occupancy[unit as usize]);
            }
        };
        for (it, is_moved) in batch.moves.iter().zip(is_moved) {
            if !is_moved {
                is_left[it.object.source] = true;
                continue;
            }
            let source = &batch.sources[it.object.source];
            occupancy_of(source.unit.id, &mut |objects| objects.remove(it.object.card));
            occupancy_of(it.target, &mut |objects| {
                objects.insert(it.target_card);
            });
            self.moved.objects += 1;
            self.moved.bytes += it.object.bytes as u64;
            self.moved.at_servers += u64::from(matches!(source.bytes, SourceBytes::Server { .. }));
        }
    }

    /// Gives back a source out of which all objects have moved. Returns whether they have.
    fn release_if_empty(&mut self, id: UnitId) -> bool {
        let is_empty = self.occupancy(id).is_empty();
        if is_empty {
            // SAFETY: the unit was made. No entry leads into it since the stop, in which no mutator had
            // a reference; our scope and the pins have ended.
            unsafe { self.heap.pages.release_unit(id) };
            self.moved.pages += 1;
        }
        is_empty
    }

    /// Gives back fresh pages that have got nothing.
    fn close(&mut self) {
        for open in core::mem::take(&mut self.open).into_iter().flatten() {
            if self.occupancy(open.id).is_empty() {
                // SAFETY: the unit was made, and nothing lies in it.
                unsafe { self.heap.pages.release_unit(open.id) };
            }
        }
    }
}

/// Returns the page that is filled, with room for an object of so many cards; a fresh one if there is
/// none. `None` if the heap, or its near memory, has no room for that.
fn find_room<'o>(
    heap: &GcInner,
    scope: &SpaceScope<'_>,
    open: &'o mut Option<OpenPage>,
    cards: u32,
) -> Option<&'o mut OpenPage> {
    if open.as_ref().is_none_or(|open| open.fill.next(cards).is_none()) {
        *open = Some(take_page(heap, scope)?);
    }
    open.as_mut()
}

/// Takes a fresh page; `None` if the heap, or its near memory, has no room for it.
fn take_page(heap: &GcInner, scope: &SpaceScope<'_>) -> Option<OpenPage> {
    if !heap.pages.reserve_to_move() {
        return None;
    }
    let taken = heap.pages.take_unit(UnitPurpose::OBJECTS).ok();
    let made = taken.filter(|(id, page)| scope.make(*page).inspect_err(|_| heap.pages.cancel_unit(*id)).is_ok());
    if made.is_none() {
        heap.pages.unreserve(1);
    }
    made.map(|(id, page)| OpenPage { id, page, fill: PageFill::default() })
}
