//! The tracer: depth first from the roots, through near pages where they are. Far objects wait until
//! nothing near is left. Then their pages are read in [batches](super::far_pages), memory
//! [servers](super::servers) look at them, or the program has [time](super::deferral) to bring them.

use super::Marking;
use super::deferral::Deferral;
use super::far_pages::{AwaitedPage, FarPages, Waiter};
use super::retry;
use super::servers::{FarWork, Servers, TakenAnswer, asked_object};
use super::steps::CycleStep;
use crate::error::GcError;
use crate::heap::{FarTracing, GcInner};
use crate::pages::{RegionSet, UnitId, UnitPurpose};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield::space::{Space, SpaceScope};
use farfield_core::gc::{EntryWord, LayoutTable, ObjectHeader, PageOccupancy, RefWord, TypeLayout};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use farfield_wic::trace::{AskedAnswer, ElsewhereObject, Traced, TracedObject};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Objects that are looked at together.
const BATCH: usize = 16;

/// Such batches between two looks at the clock.
const BATCHES_PER_LOOK: u32 = 4;

/// Bytes with which the heap is charged at a time.
const CHARGE_STEP: usize = 16 * 1024;

const LARGER: &str = "it is larger than its place";

/// Objects that a cycle has found alive.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LiveHeap {
    pub(crate) objects: u64,
    pub(crate) bytes: u64,
    /// Objects among these that servers have looked at.
    pub(crate) traced_at_servers: u64,
    /// Far pages that were read past the frames.
    pub(crate) read_pages: u64,
    /// Far pages that the collector has brought near.
    pub(crate) brought_pages: u64,
    /// Objects that waited for pages which the program has brought near.
    pub(crate) arrived_objects: u64,
    /// Time for which the collector has waited for that.
    pub(crate) waited: Duration,
}

/// State of the mutators while a tracer works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mutators {
    /// They go on.
    Run,
    /// They are stopped until all is traced.
    Wait,
    /// They are stopped for this long at most, and no page is read past the frames for them.
    WaitFor(Duration),
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
    /// Entries like these whose objects are far.
    pub(super) far: FarPages<'a>,
    /// References of the object that is looked at.
    leads_to: Vec<u32>,
    servers: Servers,
    /// Waits for the program, if there are any, and when the cycle began.
    deferral: Option<Deferral>,
    begun: Instant,
    charge: TableCharge<'a>,
    pub(super) live: LiveHeap,
}

/// Place in which an object lies.
#[derive(Clone, Copy)]
struct UnitPlace {
    unit: UnitId,
    /// Bytes from the object's header to the end of the unit.
    room: usize,
    /// The unit is one page.
    is_in_page: bool,
}

/// Object that was found where its entry says.
pub(super) struct FoundObject<'l> {
    layout: &'l TypeLayout,
    elements: u64,
    pub(super) bytes: u64,
}

impl<'l> FoundObject<'l> {
    /// Checks an object of this entry, which has so much room. `word` returns its word at an offset.
    pub(super) fn new(
        layouts: &'l LayoutTable,
        entry: u32,
        room: usize,
        word: impl Fn(usize) -> u64,
    ) -> Result<FoundObject<'l>, GcError> {
        let header = ObjectHeader(word(0));
        if header.entry() != entry {
            return Err(GcError::Damaged { entry, what: "the object at its place has another entry" });
        }
        let Some(layout) = layouts.get(header.type_number()) else {
            return Err(GcError::Damaged { entry, what: "its type is unknown" });
        };
        let elements = if layout.has_tail() { word(TypeLayout::TAIL_OFFSETS.0) } else { 0 };
        let Some(bytes) = layout.object_bytes(elements).filter(|bytes| *bytes <= room as u64) else {
            return Err(GcError::Damaged { entry, what: LARGER });
        };
        Ok(FoundObject { layout, elements, bytes })
    }

    /// Returns the entries that its references lead to, the last one first.
    fn references(&self, word: impl Fn(usize) -> u64) -> impl Iterator<Item = u32> {
        let indices = (0..self.layout.strong_count(self.elements)).rev();
        indices.filter_map(move |index| RefWord(word(self.layout.strong_offset(index) as usize)).entry())
    }
}

/// Near memory of a cycle's tables, with which the far heap is charged.
pub(super) struct TableCharge<'a> {
    space: &'a Space,
    bytes: u64,
    /// Part of these for objects that wait for far pages.
    of_waiters: usize,
}

impl TableCharge<'_> {
    /// Creates a charge of nothing.
    pub(super) fn new(space: &Space) -> TableCharge<'_> {
        TableCharge { space, bytes: 0, of_waiters: 0 }
    }

    /// Charges for so many bytes more.
    pub(super) fn add(&mut self, bytes: usize) {
        self.space.charge_anyway(bytes as u64);
        self.bytes += bytes as u64;
    }

    /// Charges for so many bytes of objects that wait for far pages, unless that was done before.
    fn at_least(&mut self, bytes: usize) {
        if bytes > self.of_waiters {
            let more = (bytes - self.of_waiters).next_multiple_of(CHARGE_STEP);
            self.add(more);
            self.of_waiters += more;
        }
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
        let mut charge = TableCharge::new(heap.pages.space());
        charge.add(Marking::near_bytes(&heap.entries) + old.near_bytes());
        let mut tracer = Tracer {
            heap,
            marking,
            layouts: Rc::new(heap.types.table()),
            old,
            stack: Vec::new(),
            far: FarPages::new(heap.pages.space(), heap.entries.made(), heap.copied_pages),
            leads_to: Vec::new(),
            servers: Servers::new(heap),
            deferral: (heap.far_tracing == FarTracing::Arrivals).then(|| Deferral::new(heap.pages.room())),
            begun: Instant::now(),
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

    /// Traces what is known, and what mutators have logged. While they are stopped for a time, no
    /// server is asked.
    pub(super) fn drain(&mut self, mutators: Mutators) -> Result<Drained, GcError> {
        let begun = Instant::now();
        let mut scope = self.heap.pages.space().enter();
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            for _ in 0..BATCHES_PER_LOOK {
                if self.stack.is_empty() {
                    self.marking.take_log(&mut self.stack);
                }
                let first = self.stack.len().saturating_sub(BATCH);
                batch.extend(self.stack.drain(first..).rev());
                if batch.is_empty() {
                    if self.far.waiters() == 0 {
                        return Ok(Drained::Empty);
                    }
                    if mutators != Mutators::Run || !self.look_at_arrived(&mut scope)? {
                        self.look_far(&mut scope)?;
                    }
                    scope.renew();
                }
                self.load_ahead(&scope, &batch);
                for entry in batch.drain(..) {
                    match mutators {
                        Mutators::WaitFor(_) => retry(&mut scope, |scope| self.trace(scope, entry))?,
                        _ => retry(&mut scope, |scope| self.trace_or_wait(scope, entry))?,
                    }
                }
                scope.renew();
            }
            if self.heap.cycles.is_closed() {
                return Ok(Drained::Closed);
            }
            if let Mutators::WaitFor(time) = mutators
                && begun.elapsed() >= time
            {
                return Ok(Drained::OutOfTime);
            }
        }
    }

    /// Lets the processor load what is looked at first of the objects of these entries, so that it
    /// waits for memory once for all of them.
    fn load_ahead(&self, scope: &SpaceScope<'_>, entries: &[u32]) {
        let [_, _, ..] = entries else { return };
        for entry in entries {
            let (page, offset) = self.heap.entries.place(*entry);
            scope.load_ahead(page, offset);
        }
        for entry in entries {
            // What lies nowhere is found out when it is looked at.
            if let Ok(at) = self.heap.entries.load_near(scope, *entry) {
                scope.load_ahead(at.page(), usize::from(at.card()) * CARD_BYTES);
            }
        }
    }

    fn push(&mut self, entry: u32) {
        grow(&mut self.stack, &mut self.charge);
        self.stack.push(entry);
    }

    /// Looks at an object that is near, or in a copy of its page. Another one waits for its page, or
    /// for that of its entry; so does one whose page is about to leave, for that would then stay.
    fn trace_or_wait(&mut self, scope: &SpaceScope<'_>, entry: u32) -> Result<(), GcError> {
        if self.heap.far_tracing == FarTracing::Frames {
            return self.trace(scope, entry);
        }
        let at = match self.heap.entries.load_near(scope, entry) {
            Ok(at) => at,
            Err(page) => match self.far.word(page, self.heap.entries.place(entry).1) {
                Some(word) => EntryWord(word),
                None => {
                    self.far.wait_for_entry(page, entry);
                    self.charge_waits();
                    return Ok(());
                }
            },
        };
        self.trace_at_or_wait(scope, entry, at)
    }

    /// Looks at an object whose entry has this word, or lets it wait for its page.
    fn trace_at_or_wait(&mut self, scope: &SpaceScope<'_>, entry: u32, at: EntryWord) -> Result<(), GcError> {
        if !self.trace_at_if_here(scope, entry, at)? {
            self.far.wait_for_object(at.page(), entry);
            self.charge_waits();
        }
        Ok(())
    }

    /// Looks at an object that is near, or in a copy of its page, or does not lie in one page alone.
    /// False if it is none of these.
    fn trace_at_if_here(&mut self, scope: &SpaceScope<'_>, entry: u32, at: EntryWord) -> Result<bool, GcError> {
        let (place, page) = (self.place_of(entry, at)?, at.page());
        if !place.is_in_page || scope.near(page).is_some() {
            self.trace_in(scope, entry, at, place)?;
        } else if self.far.copy(page).is_some() {
            self.trace_copy(entry, at, place)?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn charge_waits(&mut self) {
        self.charge.at_least(self.far.near_bytes());
    }

    /// Looks at the objects that wait for a page, which is near, or of which there may be a copy.
    fn trace_waiters(&mut self, scope: &mut SpaceScope<'_>, (page, entries): AwaitedPage) -> Result<(), GcError> {
        if let Some(index) = entries {
            for entry in self.far.of_entry_page(index) {
                let at = match self.far.word(page, self.heap.entries.place(entry).1) {
                    Some(word) => EntryWord(word),
                    // It came near, or cannot be read: then this says why.
                    None => retry(scope, |scope| self.load_entry(scope, entry))?,
                };
                // It waits on if only its entry is here.
                self.far.end_wait(entry);
                retry(scope, |scope| self.trace_at_or_wait(scope, entry, at))?;
                scope.renew();
            }
            return Ok(());
        }
        let Some(id) = self.old.unit_of(page) else { return Ok(()) };
        let occupancy =
            self.heap.pages.lock().get(id.0).map_or(PageOccupancy::EMPTY, |now| now.occupancy[id.1 as usize]);
        if self.far.copy(page).is_some() {
            return self.trace_waiters_in_copy(page, id, occupancy);
        }
        for card in occupancy.iter() {
            let header = retry(scope, |scope| self.load_word(scope, page, usize::from(card) * CARD_BYTES))?;
            let entry = ObjectHeader(header).entry();
            if self.far.is_waiting(entry) {
                retry(scope, |scope| self.trace_at(scope, entry, EntryWord::new(page, card, 0)))?;
                self.far.end_wait(entry);
            }
            scope.renew();
        }
        Ok(())
    }

    /// Looks at the objects that wait for a page of which there is a copy, all of them before what they
    /// lead to.
    fn trace_waiters_in_copy(&mut self, page: u32, unit: UnitId, occupancy: PageOccupancy) -> Result<(), GcError> {
        let mut leads_to = core::mem::take(&mut self.leads_to);
        let bytes = self.far.copy(page).unwrap_or_default();
        let mut found = [(0, 0, 0); PAGE_BYTES / CARD_BYTES];
        let mut count = 0;
        for card in occupancy.iter() {
            let first = usize::from(card) * CARD_BYTES;
            let word = |offset: usize| {
                let found = bytes.get(first + offset..).and_then(|bytes| bytes.first_chunk());
                found.map_or(0, |found| u64::from_ne_bytes(*found))
            };
            let entry = ObjectHeader(word(0)).entry();
            if self.far.is_waiting(entry) {
                let object = FoundObject::new(&self.layouts, entry, PAGE_BYTES - first, word)?;
                leads_to.extend(object.references(word));
                found[count] = (entry, card, object.bytes);
                count += 1;
            }
        }
        for (entry, card, bytes) in &found[..count] {
            // A page that is damaged may have two objects of one entry.
            if self.far.end_wait(*entry) {
                self.occupy(*entry, unit, EntryWord::new(page, *card, 0))?;
                self.count(unit, *bytes);
            }
        }
        let marked = leads_to.drain(..).try_for_each(|next| self.mark(next));
        self.leads_to = leads_to;
        marked
    }

    /// Looks at objects whose pages the program has brought near. If there are none, waits for that,
    /// or for what mutators log, unless the cycle has waited enough. False if nothing came.
    fn look_at_arrived(&mut self, scope: &mut SpaceScope<'_>) -> Result<bool, GcError> {
        let heap = self.heap;
        let Some(deferral) = &mut self.deferral else { return Ok(false) };
        let Some(time) = deferral.next(self.begun.elapsed(), heap.pages.room()) else { return Ok(false) };
        let wait_begun = Instant::now();
        // The program can use all frames meanwhile.
        scope.renew();
        self.marking.wait_for_log(time);
        self.marking.take_log(&mut self.stack);
        let arrived = self.far.take_arrived(|page| scope.near(page).is_some());
        let is_in_vain = arrived.is_empty() && self.stack.is_empty();
        deferral.add(wait_begun.elapsed(), self.begun.elapsed(), is_in_vain);
        self.live.waited = deferral.waited();
        let traced = self.live.objects;
        for page in arrived {
            // It may have left again since the collector has looked.
            match scope.near(page.0) {
                Some(_) => self.trace_waiters(scope, page)?,
                None => self.far.put_back(page),
            }
        }
        self.live.arrived_objects += self.live.objects - traced;
        Ok(!is_in_vain)
    }

    /// Lets servers look at objects that wait, or reads pages for which they do.
    fn look_far(&mut self, scope: &mut SpaceScope<'_>) -> Result<(), GcError> {
        let work = FarWork {
            traced: self.live.objects,
            read: self.far.read_pages(),
            waiters: self.far.waiters(),
            pages: self.far.awaited_pages(),
        };
        if self.servers.are_for(self.heap, &self.old, &self.layouts, work) && self.ask_servers(scope)? {
            return Ok(());
        }
        self.heap.reach(CycleStep::ReadingPages);
        let batch = self.far.read()?;
        self.heap.reach(CycleStep::PagesRead);
        self.live.read_pages = self.far.read_pages();
        if batch.is_empty() {
            // What is wrong with these is found out here.
            for entry in self.far.lost() {
                self.far.end_wait(entry);
                retry(scope, |scope| self.trace(scope, entry))?;
                scope.renew();
            }
        }
        batch.into_iter().try_for_each(|page| self.trace_waiters(scope, page))
    }

    /// Lets servers look at objects that wait. False if none does.
    fn ask_servers(&mut self, scope: &mut SpaceScope<'_>) -> Result<bool, GcError> {
        let find = |entry| match self.heap.entries.load_near(scope, entry) {
            Ok(at) => (at.page(), Waiter { entry, card: Some(at.card()) }),
            Err(page) => (page, Waiter { entry, card: None }),
        };
        let waiting = self.far.take(Servers::ENTRIES_MAX, find);
        let mut servers = core::mem::replace(&mut self.servers, Servers::Off);
        let asked = servers.ask(self.heap, &waiting, |asked, traced| self.take_traced(scope, asked, &traced));
        self.servers = servers;
        let asked = asked?;
        if !asked {
            self.wait_again(&waiting);
        }
        Ok(asked)
    }

    /// Lets objects wait that nobody has looked at.
    fn wait_again(&mut self, waiting: &[(u32, Waiter)]) {
        for (page, waiter) in waiting {
            match waiter.card {
                Some(_) => self.far.wait_placed(*page, *waiter),
                None => self.far.wait_for_entry(*page, waiter.entry),
            }
        }
        self.charge_waits();
    }

    /// Takes the answer to a call for objects that wait.
    ///
    /// Objects of the snapshot are what the answer says. Whatever else was found is ignored.
    fn take_traced(
        &mut self,
        scope: &mut SpaceScope<'_>,
        asked: &[(u32, Waiter)],
        traced: &Traced,
    ) -> Result<TakenAnswer, GcError> {
        let answers = traced.answers(asked.iter().map(asked_object));
        let (tried, rest) = asked.split_at(answers.asked.len());
        self.wait_again(rest);
        for (answer, (_, waiter)) in answers.asked.iter().zip(tried) {
            match answer {
                AskedAnswer::Object => continue,
                AskedAnswer::Elsewhere(other) => retry(scope, |scope| self.trace_elsewhere(scope, other))?,
                AskedAnswer::Nothing => retry(scope, |scope| self.trace(scope, waiter.entry))?,
            }
            scope.renew();
        }
        let objects = answers.objects;
        // All that were looked at, or named, are marked before references to them are.
        let is_new = |(index, object): (usize, &TracedObject)| index < objects || self.marking.mark(object.entry);
        let are_new: Vec<bool> = traced.objects.iter().enumerate().map(is_new).collect();
        let unasked = answers.elsewhere;
        let elsewhere: Vec<&ElsewhereObject> = unasked.iter().filter(|other| self.marking.mark(other.entry)).collect();
        for ((object, references), _) in traced.with_references().zip(&are_new).filter(|(_, is_new)| **is_new) {
            let at = EntryWord::new(object.page, object.card, 0);
            let place = self.place_of(object.entry, at)?;
            self.occupy(object.entry, place.unit, at)?;
            if u64::from(object.bytes) > place.room as u64 {
                return Err(GcError::Damaged { entry: object.entry, what: LARGER });
            }
            self.count(place.unit, object.bytes.into());
            self.live.traced_at_servers += 1;
            references.iter().try_for_each(|next| self.mark(*next))?;
        }
        for other in &elsewhere {
            retry(scope, |scope| self.trace_elsewhere(scope, other))?;
            scope.renew();
        }
        let new = are_new[objects..].iter().filter(|is_new| **is_new).count();
        Ok(TakenAnswer {
            tried: tried.len(),
            traced: objects + new,
            found: traced.objects.len() - objects + unasked.len(),
            new: new + elsewhere.len(),
        })
    }

    /// Looks at an object of which a server says that another one has it, or lets it wait for its page.
    fn trace_elsewhere(&mut self, scope: &SpaceScope<'_>, other: &ElsewhereObject) -> Result<(), GcError> {
        let at = EntryWord::new(other.place.page, other.place.card, 0);
        match self.place_of(other.entry, at) {
            Ok(_) => {
                if !self.trace_at_if_here(scope, other.entry, at)? {
                    // The entry, which is far, would only be asked for again.
                    let waiter = Waiter { entry: other.entry, card: Some(other.place.card) };
                    self.wait_again(&[(other.place.page, waiter)]);
                }
                Ok(())
            }
            // The entry says what is wrong.
            Err(_) => self.trace(scope, other.entry),
        }
    }

    /// Counts an object that lives.
    fn count(&mut self, unit: UnitId, bytes: u64) {
        self.live.objects += 1;
        self.live.bytes += bytes;
        self.old.count_live(unit, bytes);
    }

    /// Notes that an object begins at this place of its unit.
    fn occupy(&mut self, entry: u32, unit: UnitId, at: EntryWord) -> Result<(), GcError> {
        let region = self.old.get_mut(unit.0).unwrap_or_else(|| unreachable!("`place_of` has found it"));
        match region.occupancy[unit.1 as usize].insert(at.card()) {
            true => Ok(()),
            false => Err(GcError::Damaged { entry, what: "two objects begin at its place" }),
        }
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

    /// Brings a unit near, and returns its address.
    fn bring(&mut self, scope: &SpaceScope<'_>, page: u32) -> Result<NonNull<u8>, GcError> {
        if let Some(base) = scope.near(page) {
            return Ok(base);
        }
        self.count_brought(page);
        Ok(match self.heap.far_tracing {
            FarTracing::Frames => scope.bring(page)?,
            // What the collector uses says nothing of what the program will.
            _ => scope.bring_unmarked(page)?,
        })
    }

    /// Brings a page of objects near, and returns the word at this offset, at which one begins.
    fn load_word(&mut self, scope: &SpaceScope<'_>, page: u32, offset: usize) -> Result<u64, GcError> {
        assert!(offset + size_of::<u64>() <= PAGE_BYTES);
        let base = self.bring(scope, page)?;
        // SAFETY: the page is near in the scope, and the word lies in it, as just checked. Headers never
        // change after the snapshot.
        Ok(unsafe { base.add(offset).cast::<AtomicU64>().as_ref() }.load(Ordering::Relaxed))
    }

    /// Counts a page that is about to be brought near, if it is far.
    fn count_brought(&mut self, page: u32) {
        self.live.brought_pages += u64::from(!self.heap.pages.space().is_near(page));
    }

    /// Brings an object near, and marks what it leads to.
    fn trace(&mut self, scope: &SpaceScope<'_>, entry: u32) -> Result<(), GcError> {
        let at = self.load_entry(scope, entry)?;
        self.trace_at(scope, entry, at)
    }

    /// Loads the word of an entry, and brings its page near.
    fn load_entry(&mut self, scope: &SpaceScope<'_>, entry: u32) -> Result<EntryWord, GcError> {
        match self.heap.entries.load_near(scope, entry) {
            Ok(at) => Ok(at),
            Err(page) => {
                self.count_brought(page);
                match self.heap.far_tracing {
                    FarTracing::Frames => self.heap.entries.load(scope, entry),
                    _ => self.heap.entries.load_unmarked(scope, entry),
                }
            }
        }
    }

    /// Brings an object near whose entry has this word, and marks what it leads to.
    fn trace_at(&mut self, scope: &SpaceScope<'_>, entry: u32, at: EntryWord) -> Result<(), GcError> {
        let place = self.place_of(entry, at)?;
        self.trace_in(scope, entry, at, place)
    }

    /// Brings an object near that lies in this place, as its entry says, and marks what it leads to.
    fn trace_in(
        &mut self,
        scope: &SpaceScope<'_>,
        entry: u32,
        at: EntryWord,
        UnitPlace { unit, room, .. }: UnitPlace,
    ) -> Result<(), GcError> {
        let base = self.bring(scope, at.page())?;
        self.occupy(entry, unit, at)?;
        let first = usize::from(at.card()) * CARD_BYTES;
        let word = |offset: usize| {
            assert!(offset + size_of::<u64>() <= room);
            // SAFETY: the unit is near in the scope, the offset lies in it as just checked, and its
            // words are aligned. The header and the number of elements never change after the
            // snapshot, and mutators change references as atomics.
            unsafe { base.add(first + offset).cast::<AtomicU64>().as_ref() }.load(Ordering::Relaxed)
        };
        let layouts = Rc::clone(&self.layouts);
        let object = FoundObject::new(&layouts, entry, room, word)?;
        self.count(unit, object.bytes);
        // The last one is pushed first, so that the first one is looked at next.
        object.references(word).try_for_each(|next| self.mark(next))
    }

    /// Looks at an object in the copy of its page, and marks what it leads to.
    fn trace_copy(
        &mut self,
        entry: u32,
        at: EntryWord,
        UnitPlace { unit, room, .. }: UnitPlace,
    ) -> Result<(), GcError> {
        self.occupy(entry, unit, at)?;
        let first = usize::from(at.card()) * CARD_BYTES;
        let bytes = self.far.copy(at.page()).and_then(|bytes| bytes.get(first..)).unwrap_or_default();
        // The object has words for all of its bytes.
        let word = |offset: usize| {
            let found = bytes.get(offset..).and_then(|bytes| bytes.first_chunk());
            found.map_or(0, |found| u64::from_ne_bytes(*found))
        };
        let object = FoundObject::new(&self.layouts, entry, room, word)?;
        let mut leads_to = core::mem::take(&mut self.leads_to);
        leads_to.extend(object.references(word));
        self.count(unit, object.bytes);
        let marked = leads_to.drain(..).try_for_each(|next| self.mark(next));
        self.leads_to = leads_to;
        marked
    }

    /// Returns the place in which an object lies, as its entry says.
    fn place_of(&self, entry: u32, at: EntryWord) -> Result<UnitPlace, GcError> {
        let found = self.old.unit_of(at.page()).and_then(|id| Some((id, self.old.get(id.0)?)));
        match found {
            Some((id, region)) if at.is_used() && region.page(id.1) == at.page() => match region.purpose {
                UnitPurpose::Objects { pages } => {
                    let room = pages as usize * PAGE_BYTES - usize::from(at.card()) * CARD_BYTES;
                    Ok(UnitPlace { unit: id, room, is_in_page: pages == 1 })
                }
                UnitPurpose::Entries => Err(GcError::Damaged { entry, what: "it lies in a page of entries" }),
            },
            _ => Err(GcError::Damaged { entry, what: "it lies in no page of the heap" }),
        }
    }
}
