//! Mutators: the threads' rights to use objects, and how objects are made.

use crate::collector::{CycleMode, Marking};
use crate::entries::{ClaimedEntries, EntryPages, EntryPlace};
use crate::error::{GcError, RefusedObject};

use crate::heap::{BrokenRule, GcInner};
use crate::object::{FarObject, Referent};
use crate::pages::{OpenPage, Pages, UnitId, UnitPurpose};
use crate::reference::{Gc, Ref};
use crate::roots::Root;
use crate::stops::MutatorId;
use crate::types::TypeRegistry;
use core::any::TypeId;
use core::cell::{Cell, OnceCell, RefCell};
use core::hash::{Hash, Hasher};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield::FarError;
use farfield::space::SpaceScope;
use farfield_core::gc::{
    ENTRIES_PER_PAGE, EntryWord, ObjectHeader, ObjectPlacement, PageFill, PageOccupancy, RefWord, TypeLayout, WeakWord,
};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{CARD_BYTES, SlotHint};
use std::sync::Arc;
use std::time::Instant;

/// Pages that a safepoint reserves for its mutator, at least and at most, and the part of the limit
/// in between that all mutators share.
const RESERVE_PAGES: (u64, u64) = (4, 64);
const RESERVE_PART: u64 = 64;

/// Entries that a mutator logs before it shares them in any case, and at its next safepoint.
const LOG_MAX: usize = 1024;
const LOG_SHARED: usize = 64;

/// Attempts of an operation that needs room, but the last.
const ATTEMPTS: u32 = 8;

/// Index that no page of entries has.
const NO_PAGE: u32 = u32::MAX;
const _: () = assert!(u32::MAX / ENTRIES_PER_PAGE < NO_PAGE);

/// Least number of places of the table of types.
const TYPE_PLACES_MIN: usize = 32;

/// Number of buffers of ended mutators that are kept.
const LEFT_OVER_MAX: usize = 64;

/// Slow loads that a mutator counts before it adds them to the statistics of the heap.
const SLOW_LOADS_ADDED: u64 = 64;

/// Right of one thread to use the objects of a heap.
///
/// References to objects ([`Gc`]) borrow the mutator. They end at its next safepoint, where objects
/// that nothing leads to may be freed, and others may leave near memory. Between two safepoints a
/// thread can use as many objects as [a scope can hold](farfield::Scope).
///
/// A mutator belongs to its thread:
///
/// ```compile_fail,E0277
/// # use farfield_gc::GcHeap;
/// # fn send(gc: &GcHeap) {
/// let m = gc.enter();
/// std::thread::scope(|threads| { threads.spawn(move || drop(m)); }); // error: cannot be sent
/// # }
/// ```
pub struct Mutator<'gc> {
    heap: &'gc Arc<GcInner>,
    /// What each load needs of the heap: the table of its entry pages, and where the arena of its near
    /// pages lies.
    entry_pages: EntryPages<'gc>,
    arena: (usize, usize),
    /// Scope of what the mutator has used since its last safepoint; empty if that is nothing, so
    /// that a mutator that waits for something else holds no near memory.
    scope: OnceCell<SpaceScope<'gc>>,
    /// Page of entries that was found last in the scope: its index, and its address. The index is
    /// [`NO_PAGE`] unless the scope is marked as used, so that nobody renews it.
    last_entries: Cell<(u32, NonNull<u8>)>,
    id: MutatorId,
    /// Cycle that marks beside this mutator, as of its last safepoint.
    marking: Option<Arc<Marking>>,
    /// Entries that this mutator has marked, and not shared yet.
    log: RefCell<Vec<u32>>,
    /// Loads that took the long way and are not part of the statistics yet: all, and those whose guess was
    /// wrong.
    slow_loads: Cell<(u64, u64)>,
    allocation: RefCell<Allocation>,
}

/// What a mutator makes objects from.
#[derive(Default)]
struct Allocation {
    buffer: AllocationBuffer,
    /// Pages that are reserved for the mutator.
    reserve: u64,
    /// Pages that the largest object needs that could not be made since the last safepoint.
    wanted: u64,
}

/// Types of which a mutator, or one before it, has made or found objects: a hash table with linear
/// probing.
#[derive(Default)]
struct KnownTypes {
    /// Places, whose number is a power of two, or 0. At most half of them are taken.
    places: Vec<Option<KnownType>>,
    taken: usize,
}

/// Number of a type and its layout.
struct KnownType {
    id: TypeId,
    number: u32,
    layout: TypeLayout,
}

/// Hasher of what is a hash already, as a [`TypeId`] is.
#[derive(Default)]
struct HashOfHash(u64);

impl Hasher for HashOfHash {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    #[inline]
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

/// Returns the hash of a type: for the compiler, a number.
#[inline]
fn hash_of(id: TypeId) -> usize {
    let mut hasher = HashOfHash::default();
    id.hash(&mut hasher);
    hasher.finish() as usize
}

impl KnownTypes {
    #[inline]
    fn find<T: Referent + ?Sized>(&self) -> Option<&KnownType> {
        let id = TypeId::of::<T>();
        let mask = self.places.len().wrapping_sub(1);
        let mut at = hash_of(id) & mask;
        loop {
            let known = self.places.get(at)?.as_ref()?;
            if known.id == id {
                return Some(known);
            }
            at = (at + 1) & mask;
        }
    }

    /// Returns the number of a type that is not known; `None` if there has been no object of it in the
    /// heap.
    #[cold]
    fn look_for_number_of<T: Referent + ?Sized>(&mut self, registry: &TypeRegistry) -> Option<u32> {
        registry.number_of::<T>()?;
        self.look_for::<T>(registry).ok()?;
        self.find::<T>().map(|known| known.number)
    }

    #[inline]
    fn of<T: Referent + ?Sized>(&mut self, registry: &TypeRegistry) -> Result<&KnownType, GcError> {
        if self.find::<T>().is_none() {
            self.look_for::<T>(registry)?;
        }
        self.find::<T>().map_or_else(|| unreachable!("it was just found"), Ok)
    }

    /// Adds a type that is not known.
    #[cold]
    fn look_for<T: Referent + ?Sized>(&mut self, registry: &TypeRegistry) -> Result<(), GcError> {
        let (number, layout) = registry.of::<T>()?;
        if self.places.len() <= 2 * self.taken {
            let more = (2 * self.places.len()).max(TYPE_PLACES_MIN);
            let before = core::mem::replace(&mut self.places, (0..more).map(|_| None).collect());
            before.into_iter().flatten().for_each(|known| self.put(known));
        }
        self.put(KnownType { id: TypeId::of::<T>(), number, layout });
        self.taken += 1;
        Ok(())
    }

    fn put(&mut self, known: KnownType) {
        let mask = self.places.len() - 1;
        let mut at = hash_of(known.id) & mask;
        while self.places[at].is_some() {
            at = (at + 1) & mask;
        }
        self.places[at] = Some(known);
    }
}

/// Page that is being filled, entries that have been claimed, and types that are known.
#[derive(Default)]
pub(crate) struct AllocationBuffer {
    open: Option<OpenPage>,
    entries: ClaimedEntries,
    types: KnownTypes,
}

/// Place of an object that is being made.
struct NewPlace {
    header: NonNull<u8>,
    page: u32,
    card: u8,
    /// Unit that the object has for itself.
    unit: Option<UnitId>,
    cards: u32,
}

impl AllocationBuffer {
    /// Stops filling the open page, whose objects are known to others.
    pub(crate) fn close(&mut self) {
        self.open = None;
    }

    /// Forgets the entries that are claimed.
    pub(crate) fn forget_entries(&mut self) {
        self.entries = ClaimedEntries::default();
    }
}

impl<'gc> Mutator<'gc> {
    pub(crate) fn new(heap: &'gc Arc<GcInner>) -> Mutator<'gc> {
        heap.cycles.check_not_collector();
        let id = heap.stops.register();
        let marking = heap.phase().marking.clone();
        let buffer = heap.left_over().pop().unwrap_or_default();
        let allocation = RefCell::new(Allocation { buffer, ..Allocation::default() });
        let (entry_pages, arena) = (heap.entries.entry_pages(), heap.arena);
        let (scope, log) = (OnceCell::new(), RefCell::default());
        let (last_entries, slow_loads) = (Cell::new((NO_PAGE, NonNull::dangling())), Cell::default());
        Mutator { heap, entry_pages, arena, scope, last_entries, id, marking, log, slow_loads, allocation }
    }

    /// Ends the scope: no address from it is valid any more.
    fn end_scope(&mut self) {
        self.last_entries.set((NO_PAGE, NonNull::dangling()));
        drop(self.scope.take());
    }

    #[inline]
    fn scope(&self) -> &SpaceScope<'gc> {
        self.scope.get_or_init(|| self.heap.pages.space().enter())
    }

    /// Puts a value into the heap.
    ///
    /// Its references lead nowhere yet. Fails with [`GcError::SafepointDue`] when the limit is
    /// reached: a safepoint collects, after which at least a small reserve, and room for what had
    /// none, can be allocated.
    pub fn alloc<T: FarObject>(&self, value: T) -> Result<Gc<'_, T>, RefusedObject<T>> {
        let header = match self.make::<T>(0) {
            Ok(made) => made,
            Err(error) => return Err(RefusedObject { error, value }),
        };
        // SAFETY: the object is new, near, has room for its type, and nobody else knows of it.
        unsafe { T::from_header(header).write(value) };
        // SAFETY: as above; its value is complete.
        Ok(unsafe { self.finish(header, 0) })
    }

    /// Puts an array into the heap, whose elements `element` makes from their indices. Fails as
    /// [`Mutator::alloc`] does, before it calls `element`.
    pub fn alloc_array<T: FarObject>(
        &self,
        len: usize,
        mut element: impl FnMut(usize) -> T,
    ) -> Result<Gc<'_, [T]>, GcError> {
        let header = self.make::<[T]>(len)?;
        let first = self.first_element::<T>(header);
        for index in 0..len {
            let value = element(index);
            // SAFETY: the object is new, near, and has so many elements. If `element` panics,
            // nothing leads to it.
            unsafe { first.add(index).write(value) };
        }
        // SAFETY: as above; its elements are complete.
        Ok(unsafe { self.finish(header, len as u64) })
    }

    /// Puts a copy of a slice into the heap. Fails as [`Mutator::alloc`] does.
    pub fn alloc_copy<T: FarObject + Copy>(&self, values: &[T]) -> Result<Gc<'_, [T]>, GcError> {
        let header = self.make::<[T]>(values.len())?;
        let first = self.first_element::<T>(header);
        // SAFETY: the object is new, near, has so many elements, and nobody else knows of it.
        unsafe { first.as_ptr().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        // SAFETY: as above.
        Ok(unsafe { self.finish(header, values.len() as u64) })
    }

    /// Puts a copy of a string into the heap. Fails as [`Mutator::alloc`] does.
    pub fn alloc_str(&self, text: &str) -> Result<Gc<'_, str>, GcError> {
        let header = self.make::<str>(text.len())?;
        let first = self.first_element::<u8>(header);
        // SAFETY: the object is new, near, has so many bytes, and nobody else knows of it.
        unsafe { first.as_ptr().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        // SAFETY: as above; its bytes are those of a string.
        Ok(unsafe { self.finish(header, text.len() as u64) })
    }

    fn first_element<T: FarObject>(&self, header: NonNull<u8>) -> NonNull<T> {
        // SAFETY: an array has its elements there, or ends there.
        unsafe { header.add(<[T]>::OFFSET).cast() }
    }

    /// Makes an object without a value, with a header. Nothing leads to it.
    fn make<T: Referent + ?Sized>(&self, len: usize) -> Result<NonNull<u8>, GcError> {
        let mut allocation = self.allocation.borrow_mut();
        let KnownType { number, layout, .. } = allocation.buffer.types.of::<T>(&self.heap.types)?;
        let (number, has_tail) = (*number, layout.has_tail());
        let elements = if has_tail { len as u64 } else { 0 };
        let too_large = |bytes| GcError::TooLarge { bytes };
        let bytes = layout.object_bytes(elements).ok_or(too_large(u64::MAX))?;
        let placement = ObjectPlacement::of(bytes).ok_or(too_large(bytes))?;
        let place = self.take_place(&mut allocation, placement, bytes)?;
        let entry = match self.take_entry(&mut allocation, &place) {
            Ok(entry) => entry,
            Err(error) => {
                if let Some(id) = place.unit {
                    // SAFETY: the unit was made, and its address is known only here.
                    unsafe { self.heap.pages.release_unit(id) };
                }
                return Err(error);
            }
        };
        self.keep_place(&mut allocation, &place);
        self.scope().mark_used();
        // SAFETY: the place is near in our scope, aligned to a card, has room for the object, and
        // nobody else knows of it.
        unsafe {
            place.header.cast::<u64>().write(ObjectHeader::new(entry, number).0);
            if has_tail {
                place.header.add(TypeLayout::TAIL_OFFSETS.0).cast::<u64>().write(elements);
            }
        }
        Ok(place.header)
    }

    /// Makes the references of a new object null, so that they can be set, and gives it out.
    ///
    /// # Safety
    /// The object was made for this type and so many elements in the mutator's scope, and its value
    /// is complete.
    unsafe fn finish<T: Referent + ?Sized>(&self, header: NonNull<u8>, elements: u64) -> Gc<'_, T> {
        let allocation = self.allocation.borrow();
        let known = allocation.buffer.types.find::<T>();
        let Some(KnownType { layout, .. }) = known else { unreachable!("an object of the type was made") };
        // SAFETY: the offset is that of a word of the object, by its layout.
        let word = |offset: u64| unsafe { header.add(offset as usize).cast::<AtomicU64>().as_ref() };
        layout.visit_strong(elements, |offset| word(offset).store(RefWord::NULL.0, Ordering::Relaxed));
        layout.weak_offsets(elements).for_each(|offset| word(offset).store(WeakWord::NULL.0, Ordering::Relaxed));
        // SAFETY: passed on to the caller.
        unsafe { Gc::from_header(header) }
    }

    /// Finds a place for an object, and leaves it free.
    fn take_place(
        &self,
        allocation: &mut Allocation,
        placement: ObjectPlacement,
        bytes: u64,
    ) -> Result<NewPlace, GcError> {
        let scope = self.scope();
        let cards = match placement {
            ObjectPlacement::Inside { cards } => cards,
            ObjectPlacement::Unit { pages } => {
                if u64::from(pages) > self.heap.pages.limit() {
                    return Err(GcError::TooLarge { bytes });
                }
                let (id, page, header) = self.make_unit(allocation, UnitPurpose::Objects { pages })?;
                return Ok(NewPlace { header, page, card: 0, unit: Some(id), cards: 0 });
            }
        };
        if let Some(open) = allocation.buffer.open.take_if(|open| open.fill.next(cards).is_none()) {
            self.heap.pages.set_occupancy(open.id, open.fill.occupancy());
        }
        let open = allocation.buffer.open.as_ref();
        let (page, card, base) = match open.and_then(|open| Some((open.page, open.fill.next(cards)?))) {
            Some((page, card)) => {
                let base = match scope.near(page) {
                    Some(base) => base,
                    None => scope.bring_to_change(page)?,
                };
                (page, card, base)
            }
            None => {
                let (id, page, base) = self.make_unit(allocation, UnitPurpose::OBJECTS)?;
                allocation.buffer.open = Some(OpenPage { id, page, fill: PageFill::default() });
                (page, 0, base)
            }
        };
        // SAFETY: the card lies in the page.
        let header = unsafe { base.add(usize::from(card) * CARD_BYTES) };
        Ok(NewPlace { header, page, card, unit: None, cards })
    }

    /// Makes a unit of zeros.
    fn make_unit(
        &self,
        allocation: &mut Allocation,
        purpose: UnitPurpose,
    ) -> Result<(UnitId, u32, NonNull<u8>), GcError> {
        let pages = u64::from(purpose.pages());
        if allocation.reserve >= pages {
            allocation.reserve -= pages;
        } else if !self.heap.pages.reserve(pages, u64::MAX) {
            allocation.wanted = allocation.wanted.max(pages + RESERVE_PAGES.0);
            return Err(GcError::SafepointDue);
        }
        let give_back = |allocation: &mut Allocation, error: FarError| {
            allocation.reserve += pages;
            GcError::from(error)
        };
        let (id, page) = self.heap.pages.take_unit(purpose).map_err(|error| give_back(allocation, error))?;
        match self.scope().make(page) {
            Ok(address) => Ok((id, page, address)),
            Err(error) => {
                self.heap.pages.cancel_unit(id);
                Err(give_back(allocation, error))
            }
        }
    }

    /// Marks the place of an object as used.
    fn keep_place(&self, allocation: &mut Allocation, place: &NewPlace) {
        match (place.unit, &mut allocation.buffer.open) {
            (Some(id), _) => {
                let mut occupancy = PageOccupancy::EMPTY;
                occupancy.insert(0);
                self.heap.pages.set_occupancy(id, occupancy);
            }
            (None, Some(open)) => open.fill.insert(place.cards),
            (None, None) => unreachable!("the place lies in the open page"),
        }
    }

    /// Takes an entry for an object at this place.
    fn take_entry(&self, allocation: &mut Allocation, place: &NewPlace) -> Result<u32, GcError> {
        let (entries, scope) = (&self.heap.entries, self.scope());
        loop {
            let Some(entry) = allocation.buffer.entries.peek() else {
                allocation.buffer.entries = match entries.claim() {
                    Some(claimed) => claimed,
                    None => {
                        self.add_entry_page(allocation)?;
                        continue;
                    }
                };
                continue;
            };
            let is_given = entries.give(scope, entry, place.page, place.card)?;
            allocation.buffer.entries.advance();
            if is_given {
                return Ok(entry);
            }
        }
    }

    fn add_entry_page(&self, allocation: &mut Allocation) -> Result<(), GcError> {
        let (id, page, _) = self.make_unit(allocation, UnitPurpose::Entries)?;
        match self.heap.entries.add(page) {
            Some(has_new_chunk) => {
                if has_new_chunk {
                    self.heap.pages.space().charge_anyway(crate::entries::EntryTable::near_bytes(0).1);
                }
                Ok(())
            }
            None => {
                // SAFETY: the unit was just made, and its address is not used.
                unsafe { self.heap.pages.release_unit(id) };
                Err(GcError::EntriesFull)
            }
        }
    }

    /// Checks whether this word lies in near memory of the mutator's heap.
    #[inline]
    pub(crate) fn contains(&self, word: &AtomicU64) -> bool {
        self.contains_address(word.as_ptr() as usize)
    }

    #[inline]
    fn contains_address(&self, address: usize) -> bool {
        let (base, bytes) = self.arena;
        address.wrapping_sub(base) < bytes
    }

    /// Marks and logs an object that a reference led to until now, if a cycle marks: it is in the
    /// snapshot, and the reference may have been the only way to it.
    #[inline]
    pub(crate) fn log_removed(&self, before: RefWord) {
        if let Some(marking) = &self.marking
            && let Some(entry) = before.entry()
            && self.heap.broken != Some(BrokenRule::LogRemoved)
        {
            self.log(marking, entry);
        }
    }

    /// Marks and logs an object that has come near, if the cycle that marks wants to look at it now:
    /// whoever has a reference to it got that from the snapshot.
    #[cold]
    fn log_arrival(&self, entry: u32) {
        if let Some(marking) = self.marking.as_ref().filter(|marking| marking.logs_arrivals()) {
            self.log(marking, entry);
        }
    }

    fn log(&self, marking: &Marking, entry: u32) {
        if marking.mark(entry) && !marking.is_over() {
            let mut log = self.log.borrow_mut();
            log.push(entry);
            if log.len() >= LOG_MAX {
                marking.share(&mut log);
            }
        }
    }

    /// Hands to the collector what was logged: all, or what is worth a lock.
    fn share_log(&mut self, is_all: bool) {
        let Some(marking) = &self.marking else { return };
        let log = self.log.get_mut();
        if marking.is_over() {
            // Given up. The marks are not needed any more.
            *log = Vec::new();
            self.marking = None;
        } else if is_all && self.heap.broken == Some(BrokenRule::ShareLogs) {
            log.clear();
        } else if is_all || log.len() >= LOG_SHARED || !log.is_empty() && marking.is_hungry() {
            marking.share(log);
        }
    }

    /// Returns the word of a reference in an object of the mutator's heap. Panics if it lies
    /// elsewhere.
    ///
    /// A word that is not loose is in an object of some heap, and a far heap has one collected heap
    /// at a time. So its address says whose it is.
    #[inline]
    pub(crate) fn check_settable(&self, word: &AtomicU64) -> RefWord {
        let found = RefWord(word.load(Ordering::Relaxed));
        assert!(!found.is_loose(), "a reference outside of a collected heap cannot be set: allocate the object first");
        assert!(self.contains(word), "the reference lies in an object of another heap");
        found
    }

    /// Checks whether an object of the mutator's heap has its header there.
    #[inline]
    pub(crate) fn is_own(&self, header: NonNull<u8>) -> bool {
        self.contains_address(header.as_ptr() as usize)
    }

    /// Panics unless an object of the mutator's heap has its header there.
    #[inline]
    pub(crate) fn check_own(&self, header: NonNull<u8>) {
        assert!(self.is_own(header), "the object belongs to another heap");
    }

    /// Returns the number of a type in the mutator's heap; `None` if there has been no object of it.
    #[inline]
    pub(crate) fn type_number<T: Referent + ?Sized>(&self) -> Option<u32> {
        if let Some(known) = self.allocation.borrow().buffer.types.find::<T>() {
            return Some(known.number);
        }
        self.allocation.borrow_mut().buffer.types.look_for_number_of::<T>(&self.heap.types)
    }

    /// Returns the word of a reference to this object.
    #[inline]
    pub(crate) fn word_of<T: Referent + ?Sized>(&self, value: Option<Gc<'_, T>>) -> RefWord {
        let Some(value) = value else { return RefWord::NULL };
        self.check_own(value.header());
        RefWord::new(value.entry(), self.scope().guess_of(value.header()))
    }

    /// Brings the object of this entry near, to which a reference with this word leads. Returns the
    /// address of its header.
    #[inline(always)]
    pub(crate) fn find_by_reference(
        &self,
        reference: &AtomicU64,
        word: RefWord,
        entry: u32,
    ) -> Result<NonNull<u8>, GcError> {
        match self.find_by_guess(word.guess(), entry) {
            Some(header) => Ok(header),
            None => self.find_and_correct(reference, word, entry),
        }
    }

    /// Returns the address of the header of this entry's object if it is where the guess says. Small
    /// enough to be part of the loops of programs.
    #[inline(always)]
    fn find_by_guess(&self, guess: SlotHint, entry: u32) -> Option<NonNull<u8>> {
        let scope = self.scope.get()?;
        let place = EntryPlace::of(entry);
        let (last, entries) = self.last_entries.get();
        let is_last = last == place.page;
        let entries = if is_last { entries } else { self.entry_pages.peek(scope, place.page)? };
        // SAFETY: the page of entries is near in this scope: it was just found, or was found since the
        // scope was marked as used.
        let at = unsafe { place.load(entries) };
        let header = scope.peek_at(at.page(), at.card(), guess)?;
        scope.mark_used();
        if !is_last {
            self.last_entries.set((place.page, entries));
        }
        Some(header)
    }

    #[cold]
    fn find_and_correct(&self, reference: &AtomicU64, word: RefWord, entry: u32) -> Result<NonNull<u8>, GcError> {
        let header = self.find(entry)?;
        let is_right = self.scope().guess_of(header) == word.guess();
        self.count_slow_load(is_right);
        if is_right {
            // Only the entry, or the first use of the scope, was not at hand.
            return Ok(header);
        }
        if self.scope().may_correct(reference.as_ptr() as usize) {
            let better = RefWord::new(entry, self.scope().guess_of(header));
            // It fails if the reference leads elsewhere now. A change that succeeds keeps what the
            // store before it has released.
            let _ = reference.compare_exchange(word.0, better.0, Ordering::Relaxed, Ordering::Relaxed);
        }
        Ok(header)
    }

    fn count_slow_load(&self, is_right: bool) {
        let (loads, wrong) = self.slow_loads.get();
        self.slow_loads.set((loads + 1, wrong + u64::from(!is_right)));
        if loads + 1 >= SLOW_LOADS_ADDED {
            self.add_slow_loads();
        }
    }

    /// Adds the loads that took the long way to the statistics of the heap.
    fn add_slow_loads(&self) {
        let (loads, wrong) = self.slow_loads.take();
        if loads > 0 {
            self.heap.counters.count_slow_loads(loads, wrong);
        }
    }

    /// Brings the object of this entry near. Returns the address of its header.
    #[inline]
    pub(crate) fn find(&self, entry: u32) -> Result<NonNull<u8>, GcError> {
        let scope = self.scope();
        let place = EntryPlace::of(entry);
        if let Some(entries) = self.entry_pages.peek(scope, place.page)
            // SAFETY: the page of entries was just found in this scope.
            && let at = unsafe { place.load(entries) }
            && let Some(base) = scope.peek(at.page())
        {
            scope.mark_used();
            // SAFETY: the card lies in the page.
            return Ok(unsafe { base.add(usize::from(at.card()) * CARD_BYTES) });
        }
        self.find_far(entry)
    }

    #[cold]
    fn find_far(&self, entry: u32) -> Result<NonNull<u8>, GcError> {
        let at = self.heap.entries.load(self.scope(), entry)?;
        self.find_at(entry, at)
    }

    fn find_at(&self, entry: u32, at: EntryWord) -> Result<NonNull<u8>, GcError> {
        let scope = self.scope();
        let base = match scope.near(at.page()) {
            Some(base) => base,
            None => {
                let base = scope.bring(at.page())?;
                self.log_arrival(entry);
                base
            }
        };
        scope.mark_used();
        // SAFETY: the card lies in the page.
        Ok(unsafe { base.add(usize::from(at.card()) * CARD_BYTES) })
    }

    /// Brings the object near that has this entry in this generation. `None` if it was collected.
    pub(crate) fn find_weakly(&self, entry: u32, generation: u32) -> Result<Option<NonNull<u8>>, GcError> {
        if !self.heap.entries.is_used(entry) {
            return Ok(None);
        }
        let at = self.heap.entries.load(self.scope(), entry)?;
        if at.generation() != generation {
            return Ok(None);
        }
        let header = self.find_at(entry, at)?;
        // Perhaps nothing led to it in the snapshot.
        if let Some(marking) = &self.marking
            && self.heap.broken != Some(BrokenRule::LogWeaklyFound)
        {
            self.log(marking, entry);
        }
        Ok(Some(header))
    }

    /// Returns the generation of the entry of an object that lives.
    pub(crate) fn generation_of(&self, entry: u32) -> Result<u32, GcError> {
        Ok(self.heap.entries.load(self.scope(), entry)?.generation())
    }

    /// Begins to bring the objects near that these references lead to, without waiting. Returns how
    /// many reads have begun.
    ///
    /// Where an object is, is in its entry. If that is far, it is brought near first, so another call
    /// may begin more.
    pub fn prefetch<'r, T: Referent + ?Sized>(&self, references: impl IntoIterator<Item = &'r Ref<T>>) -> usize {
        let scope = self.scope();
        let entries = references.into_iter().filter_map(|reference| reference.entry(self));
        let page = |entry| self.heap.entries.load_near(scope, entry).map_or_else(|page| page, EntryWord::page);
        // Collected first: nothing may be prefetched while an entry is read.
        let pages: Vec<u32> = entries.map(page).collect();
        scope.prefetch(pages)
    }

    /// Returns the objects that these references lead to, in their order, and brings them near. What
    /// is far is read together, so the time is that of the slowest read.
    pub fn load_many<'m, T: Referent + ?Sized>(
        &'m self,
        references: &[&Ref<T>],
    ) -> Result<Vec<Option<Gc<'m, T>>>, GcError> {
        let all = || references.iter().copied();
        self.prefetch(all());
        for entry in all().filter_map(|reference| reference.entry(self)) {
            self.heap.entries.load(self.scope(), entry)?;
        }
        self.prefetch(all());
        all().map(|reference| reference.load(self)).collect()
    }

    /// Makes a root of an object: it lives, whatever else leads to it.
    ///
    /// # Panics
    /// The object belongs to another heap.
    pub fn root<T: Referent + ?Sized>(&self, object: Gc<'_, T>) -> Root<T> {
        self.check_own(object.header());
        Root::new(Arc::clone(self.heap), object.entry())
    }

    /// Returns the object of a root, and brings it near.
    pub fn get<T: Referent + ?Sized>(&self, root: &Root<T>) -> Result<Gc<'_, T>, GcError> {
        if !root.is_of(self.heap) {
            return Err(GcError::OtherHeap);
        }
        let header = self.find(root.entry())?;
        // SAFETY: the root keeps an object of its type in this entry alive, and it was found near.
        Ok(unsafe { Gc::from_header(header) })
    }

    /// Ends all references of this mutator, and lets the collector stop it for a moment. Asks for a
    /// collection if it is time, which then runs beside the mutators. Waits for its end only if the
    /// limit is reached.
    ///
    /// ```compile_fail,E0502
    /// # use farfield_gc::{GcError, GcHeap};
    /// # fn run(gc: &GcHeap) -> Result<(), GcError> {
    /// let mut m = gc.enter();
    /// let number = m.alloc(7u64)?;
    /// m.safepoint()?; // error: `m` is borrowed by `number`
    /// println!("{}", *number);
    /// # Ok(()) }
    /// ```
    ///
    /// Afterwards the mutator can allocate a small reserve without an error of the limit. Fails
    /// with [`GcError::HeapFull`] if a collection did not free that much, and with
    /// [`GcError::NoSafepoint`] if none could run.
    pub fn safepoint(&mut self) -> Result<(), GcError> {
        self.safepoint_for(0)
    }

    /// Reaches a safepoint as [`Mutator::safepoint`] does, after which objects of so many bytes in
    /// all can be allocated.
    pub fn safepoint_for(&mut self, bytes: usize) -> Result<(), GcError> {
        self.end_scope();
        if self.heap.stops.is_requested() {
            let begun = Instant::now();
            self.blocking(|| ());
            self.heap.waits.add(begun);
        }
        self.share_log(false);
        let limit = self.heap.pages.limit();
        let share = limit / RESERVE_PART / self.heap.stops.mutators().max(1);
        let reserve = share.clamp(RESERVE_PAGES.0, RESERVE_PAGES.1);
        let allocation = self.allocation.get_mut();
        // An object can take a page and a byte less than two, or its entry a new page.
        let bytes = bytes as u64;
        let for_bytes = if bytes == 0 { 0 } else { bytes / (PAGE_BYTES as u64 / 2) + bytes / 16384 + 4 };
        let need = reserve.max(allocation.wanted).max(for_bytes);
        if self.fill_reserve(need, self.heap.pacing.due()) {
            return Ok(());
        }
        self.heap.cycles.request_if_idle();
        if self.fill_reserve(need, u64::MAX) {
            return Ok(());
        }
        // The cycle that runs may have begun before the last garbage was made, and the next one finds
        // that beside the other mutators. Everybody is stopped when neither has helped.
        let mut collected = Ok(());
        for mode in [None, Some(CycleMode::Concurrent), Some(CycleMode::Stopped)] {
            let cycles = &self.heap.cycles;
            let Some(number) = mode.map_or_else(|| cycles.running(), |mode| Some(cycles.request(mode))) else {
                continue;
            };
            let begun = Instant::now();
            collected = self.wait_for_cycle(number);
            self.heap.counters.count_stall(begun.elapsed());
            self.heap.waits.add(begun);
            // What is there is enough, though perhaps nothing could be collected.
            if self.fill_reserve(need, u64::MAX) {
                return Ok(());
            }
        }
        // Nobody can collect what is wanted, so nobody waits for it again.
        self.allocation.get_mut().wanted = 0;
        collected?;
        let live_bytes = Pages::bytes(self.heap.pages.used());
        Err(GcError::HeapFull { limit_bytes: Pages::bytes(limit), live_bytes })
    }

    /// Calls `action` until it needs no safepoint: not more room, and not less near memory than it
    /// uses at a time. Reaches one before each attempt but the first.
    ///
    /// What `action` has made before it failed stays made; objects that nothing leads to are
    /// collected. Fails as `action` or [`Mutator::safepoint`] does, and with the last error if that is
    /// [`GcError::SafepointDue`] or [`FarError::NearFull`] each time.
    ///
    /// ```
    /// # use farfield_gc::{GcError, GcHeap, Mutator, Root};
    /// fn numbers(m: &mut Mutator<'_>) -> Result<Root<[u64]>, GcError> {
    ///     m.with_room(|m| Ok(m.root(m.alloc_array(100, |at| at as u64)?)))
    /// }
    /// # let heap = farfield::Heap::builder().near(1 << 20).build()?;
    /// # let gc = GcHeap::in_heap(&heap).build()?;
    /// # assert_eq!(gc.enter().with_room(|m| Ok(m.alloc(7u64)?.id()))? > 0, true);
    /// # numbers(&mut gc.enter())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_room<R>(&mut self, mut action: impl FnMut(&Mutator<'gc>) -> Result<R, GcError>) -> Result<R, GcError> {
        for _ in 0..ATTEMPTS {
            match action(self) {
                Err(GcError::SafepointDue | GcError::Far(FarError::NearFull)) => self.safepoint()?,
                result => return result,
            }
        }
        action(self)
    }

    /// Reserves pages up to this number, if no more than `most` are in use then.
    fn fill_reserve(&mut self, need: u64, most: u64) -> bool {
        let allocation = self.allocation.get_mut();
        let missing = need.saturating_sub(allocation.reserve);
        let filled = self.heap.pages.reserve(missing, most);
        if filled {
            allocation.reserve += missing;
            allocation.wanted = 0;
        }
        filled
    }

    /// Ends all references of this mutator, collects what nothing leads to now, and waits for the
    /// end of that. Other mutators go on meanwhile.
    pub fn collect(&mut self) -> Result<(), GcError> {
        let number = self.heap.cycles.request(CycleMode::Concurrent);
        self.wait_for_cycle(number)
    }

    fn wait_for_cycle(&mut self, number: u64) -> Result<(), GcError> {
        let heap = self.heap;
        self.blocking(|| heap.cycles.wait_for(number))
    }

    /// Ends all references of this mutator, and calls `action`, which may wait for anything: others
    /// can collect meanwhile.
    pub fn blocking<R>(&mut self, action: impl FnOnce() -> R) -> R {
        let paused = PausedMutator::new(self);
        paused.mutator.heap.stops.stop(paused.mutator.id);
        action()
    }

    /// Shows others what was put into the open page, and what was logged.
    fn flush(&mut self) {
        self.share_log(true);
        self.add_slow_loads();
        if let Some(open) = &self.allocation.get_mut().buffer.open {
            self.heap.pages.set_occupancy(open.id, open.fill.occupancy());
        }
    }
}

/// Mutator that has no references and holds nothing near. It goes on when this is dropped.
struct PausedMutator<'a, 'gc> {
    mutator: &'a mut Mutator<'gc>,
    /// Cycles that had begun, and that had ended.
    seen: (u64, u64),
}

impl<'a, 'gc> PausedMutator<'a, 'gc> {
    fn new(mutator: &'a mut Mutator<'gc>) -> PausedMutator<'a, 'gc> {
        mutator.flush();
        mutator.end_scope();
        let phase = mutator.heap.phase();
        let seen = (phase.snapshots, phase.commits);
        drop(phase);
        PausedMutator { mutator, seen }
    }
}

impl Drop for PausedMutator<'_, '_> {
    fn drop(&mut self) {
        let heap = self.mutator.heap;
        heap.stops.resume(self.mutator.id);
        let phase = heap.phase().clone();
        let buffer = &mut self.mutator.allocation.get_mut().buffer;
        if phase.snapshots != self.seen.0 && heap.broken != Some(BrokenRule::CloseOpenPages) {
            // The page belongs to a snapshot.
            buffer.close();
        }
        if phase.commits != self.seen.1 {
            // A cycle has freed what was claimed.
            buffer.forget_entries();
        }
        self.mutator.marking = phase.marking;
    }
}

impl Drop for Mutator<'_> {
    fn drop(&mut self) {
        self.flush();
        self.end_scope();
        let heap = self.heap;
        let allocation = self.allocation.get_mut();
        heap.pages.unreserve(allocation.reserve);
        let mut left_over = heap.left_over();
        if left_over.len() < LEFT_OVER_MAX {
            left_over.push(core::mem::take(&mut allocation.buffer));
        }
        drop(left_over);
        heap.stops.unregister(self.id);
    }
}

impl core::fmt::Debug for Mutator<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Mutator({})", self.id)
    }
}
