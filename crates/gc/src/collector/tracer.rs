//! The unaligned tracer: depth first from the roots, through the frames of the far heap, as a
//! program would go.

use super::Marking;
use crate::error::GcError;
use crate::heap::GcInner;
use crate::pages::{RegionSet, UnitId, UnitPurpose};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield::space::{Space, SpaceScope};
use farfield_core::gc::{EntryWord, LayoutTable, ObjectHeader, RefWord, TypeLayout};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Objects between two looks at the clock.
const OBJECTS_PER_LOOK: u32 = 64;

/// Objects that a cycle has found alive.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LiveHeap {
    pub(crate) objects: u64,
    pub(crate) bytes: u64,
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
    layouts: Rc<LayoutTable>,
    /// Regions and units of the snapshot, and the objects in them that were found.
    pub(super) old: RegionSet,
    /// Entries that are marked, and whose objects were not looked at.
    stack: Vec<u32>,
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

    /// Traces what is known, and what mutators have logged, for this long at most.
    pub(super) fn drain(&mut self, time: Option<Duration>) -> Result<Drained, GcError> {
        let begun = Instant::now();
        let mut scope = self.heap.pages.space().enter();
        loop {
            for _ in 0..OBJECTS_PER_LOOK {
                if self.stack.is_empty() {
                    self.marking.take_log(&mut self.stack);
                }
                let Some(entry) = self.stack.pop() else { return Ok(Drained::Empty) };
                self.trace(&scope, entry)?;
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
        if self.stack.len() == self.stack.capacity() {
            let more = self.stack.len().max(1024);
            self.charge.add(more * size_of::<u32>());
            self.stack.reserve_exact(more);
        }
        self.stack.push(entry);
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
        let (id, room) = self.place_of(entry, at)?;
        let region = self.old.get_mut(id.0).unwrap_or_else(|| unreachable!("`place_of` has found it"));
        if !region.occupancy[id.1 as usize].insert(at.card()) {
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
