//! The tracer: depth first from the roots, through near pages where they are. Far objects wait until
//! nothing near is left, and are then looked at by memory [servers](super::servers), or, where none
//! does that, brought into the frames of the far heap, as a program would do.

use super::Marking;
use super::servers::Servers;
use crate::error::GcError;
use crate::heap::GcInner;
use crate::pages::{RegionSet, UnitId, UnitPurpose};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield::space::{Space, SpaceScope};
use farfield_core::gc::{EntryWord, LayoutTable, ObjectHeader, RefWord, TypeLayout};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use farfield_wic::trace::{Traced, TracedObject};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Objects between two looks at the clock.
const OBJECTS_PER_LOOK: u32 = 64;

const LARGER: &str = "it is larger than its place";

/// Objects that a cycle has found alive.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LiveHeap {
    pub(crate) objects: u64,
    pub(crate) bytes: u64,
    /// Objects among these that servers have looked at.
    pub(crate) traced_at_servers: u64,
}

/// Why a tracer has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Drained {
    /// All that is known is traced.
    Empty,
    /// The time is over.
    OutOfTime,
    /// Nobody needs the heap any more.
    Closed,
}

/// Tracer of one cycle.
pub(super) struct Tracer<'a> {
    heap: &'a GcInner,
    marking: Arc<Marking>,
    pub(super) layouts: Rc<LayoutTable>,
    /// Regions and units of the snapshot, and the objects in them that were found.
    pub(super) old: RegionSet,
    /// Entries that are marked, and whose objects were not looked at.
    stack: Vec<u32>,
    /// Entries like these whose objects are far, for servers.
    parked: Vec<u32>,
    servers: Servers,
    charge: TableCharge<'a>,
    pub(super) live: LiveHeap,
}

/// Near memory of a cycle's tables, with which the far heap is charged.
struct TableCharge<'a> {
    space: &'a Space,
    bytes: u64,
}

impl TableCharge<'_> {
    fn add(&mut self, bytes: usize) {
        self.space.charge_anyway(bytes as u64);
        self.bytes += bytes as u64;
    }
}

impl Drop for TableCharge<'_> {
    fn drop(&mut self) {
        self.space.uncharge(self.bytes);
    }
}

/// Makes room for one more entry.
fn grow(entries: &mut Vec<u32>, charge: &mut TableCharge<'_>) {
    if entries.len() == entries.capacity() {
        let more = entries.len().max(1024);
        charge.add(more * size_of::<u32>());
        entries.reserve_exact(more);
    }
}

impl<'a> Tracer<'a> {
    /// Creates the tracer of a snapshot, while all mutators are stopped.
    pub(super) fn new(heap: &'a GcInner, marking: Arc<Marking>) -> Tracer<'a> {
        let old = heap.pages.lock().snapshot();
        let mut charge = TableCharge { space: heap.pages.space(), bytes: 0 };
        charge.add(Marking::near_bytes(&heap.entries) + old.near_bytes());
        let mut tracer = Tracer {
            heap,
            marking,
            layouts: Rc::new(heap.types.table()),
            old,
            stack: Vec::new(),
            parked: Vec::new(),
            servers: Servers::new(heap),
            charge,
            live: LiveHeap::default(),
        };
        for entry in heap.roots.entries() {
            if tracer.marking.mark(entry) {
                tracer.push(entry);
            }
        }
        tracer
    }

    /// Traces what is known, and what mutators have logged, for this long at most. With a limit,
    /// mutators wait, and no server is asked.
    pub(super) fn drain(&mut self, time: Option<Duration>) -> Result<Drained, GcError> {
        let begun = Instant::now();
        let mut scope = self.heap.pages.space().enter();
        loop {
            for _ in 0..OBJECTS_PER_LOOK {
                if self.stack.is_empty() {
                    self.marking.take_log(&mut self.stack);
                }
                match self.stack.pop() {
                    Some(entry) if time.is_none() && self.park(&scope, entry)? => {}
                    Some(entry) => self.trace(&scope, entry)?,
                    None if self.parked.is_empty() => return Ok(Drained::Empty),
                    None => {
                        scope.renew();
                        self.ask_servers(&mut scope)?;
                    }
                }
                scope.renew();
            }
            if self.heap.cycles.is_closed() {
                return Ok(Drained::Closed);
            }
            if time.is_some_and(|time| begun.elapsed() >= time) {
                return Ok(Drained::OutOfTime);
            }
        }
    }

    fn push(&mut self, entry: u32) {
        grow(&mut self.stack, &mut self.charge);
        self.stack.push(entry);
    }

    /// Puts an object aside if it is far and servers look at it.
    fn park(&mut self, scope: &SpaceScope<'_>, entry: u32) -> Result<bool, GcError> {
        if matches!(self.servers, Servers::Off) || !self.is_far(scope, entry)? {
            return Ok(false);
        }
        let are_for = self.servers.are_for(self.heap, &self.old, &self.layouts, self.live.objects);
        if are_for {
            grow(&mut self.parked, &mut self.charge);
            self.parked.push(entry);
        }
        Ok(are_for)
    }

    /// Checks whether an object, or its entry, is far.
    fn is_far(&self, scope: &SpaceScope<'_>, entry: u32) -> Result<bool, GcError> {
        let space = self.heap.pages.space();
        if !space.is_near(self.heap.entries.place(entry).0) {
            return Ok(true);
        }
        let page = self.heap.entries.load(scope, entry)?.page();
        Ok(page < space.far_pages() && !space.is_near(page))
    }

    /// Lets servers look at objects that were put aside, or puts them back if none does.
    fn ask_servers(&mut self, scope: &mut SpaceScope<'_>) -> Result<(), GcError> {
        let (mut parked, mut servers) =
            (core::mem::take(&mut self.parked), core::mem::replace(&mut self.servers, Servers::Off));
        let asked = servers.ask(self.heap, &mut parked, |entries, traced| self.take_traced(scope, entries, &traced));
        (self.parked, self.servers) = (parked, servers);
        if !asked? {
            self.stack.append(&mut self.parked);
        }
        Ok(())
    }

    /// Takes the answer to a call for these entries. Returns the number of objects that the server
    /// found unasked, and of those among them that nobody had marked.
    ///
    /// Objects of the snapshot are what the answer says. Whatever else was found is ignored.
    fn take_traced(
        &mut self,
        scope: &mut SpaceScope<'_>,
        entries: &[u32],
        traced: &Traced,
    ) -> Result<(usize, usize), GcError> {
        let (tried, rest) = entries.split_at((traced.tried as usize).min(entries.len()));
        rest.iter().for_each(|entry| self.push(*entry));
        let mut asked = 0;
        for entry in tried {
            if traced.objects.get(asked).is_some_and(|object| object.entry == *entry) {
                asked += 1;
            } else {
                self.trace(scope, *entry)?;
                scope.renew();
            }
        }
        // All that were looked at are marked before references to them are.
        let is_new = |(index, object): (usize, &TracedObject)| index < asked || self.marking.mark(object.entry);
        let are_new: Vec<bool> = traced.objects.iter().enumerate().map(is_new).collect();
        let mut references = traced.references.iter();
        for (object, is_new) in traced.objects.iter().zip(&are_new) {
            let of_object = references.by_ref().take(object.references as usize);
            if !is_new {
                of_object.for_each(drop);
                continue;
            }
            let (unit, room) = self.occupy(object.entry, EntryWord::new(object.page, object.card, 0))?;
            if u64::from(object.bytes) > room as u64 {
                return Err(GcError::Damaged { entry: object.entry, what: LARGER });
            }
            self.count(unit, object.bytes.into());
            self.live.traced_at_servers += 1;
            for next in of_object {
                self.mark(*next)?;
            }
        }
        Ok((traced.objects.len() - asked, are_new[asked..].iter().filter(|is_new| **is_new).count()))
    }

    /// Counts an object that lives.
    fn count(&mut self, unit: UnitId, bytes: u64) {
        self.live.objects += 1;
        self.live.bytes += bytes;
        self.old.count_live(unit, bytes);
    }

    /// Notes where an object begins. Returns its unit, and the bytes from there to the unit's end.
    fn occupy(&mut self, entry: u32, at: EntryWord) -> Result<(UnitId, usize), GcError> {
        let (id, room) = self.place_of(entry, at)?;
        let region = self.old.get_mut(id.0).unwrap_or_else(|| unreachable!("`place_of` has found it"));
        if !region.occupancy[id.1 as usize].insert(at.card()) {
            return Err(GcError::Damaged { entry, what: "two objects begin at its place" });
        }
        Ok((id, room))
    }

    /// Marks an object that a reference leads to.
    fn mark(&mut self, entry: u32) -> Result<(), GcError> {
        if self.marking.mark(entry) {
            self.push(entry);
        } else if !self.marking.is_old(entry) && !self.heap.entries.is_used(entry) {
            return Err(GcError::Damaged { entry, what: "a reference leads to an entry that is not in use" });
        }
        Ok(())
    }

    /// Looks at an object, and marks what it leads to.
    fn trace(&mut self, scope: &SpaceScope<'_>, entry: u32) -> Result<(), GcError> {
        let at = self.heap.entries.load(scope, entry)?;
        let (unit, room) = self.occupy(entry, at)?;
        let base = match scope.near(at.page()) {
            Some(base) => base,
            None => scope.bring(at.page())?,
        };
        let first = usize::from(at.card()) * CARD_BYTES;
        let word = |offset: usize| {
            assert!(offset + 8 <= room);
            // SAFETY: the unit is near in the scope, the offset lies in it as just checked, and its
            // words are aligned. The header and the number of elements never change after the
            // snapshot, and mutators change references as atomics.
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
            return Err(GcError::Damaged { entry, what: LARGER });
        };
        self.count(unit, bytes);
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
        let found = self.old.unit_of(at.page()).and_then(|id| Some((id, self.old.get(id.0)?)));
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
}
