//! Slots of collections: far pointers to objects whose layout only the collection knows, and which
//! other threads follow and replace at the same time.
//!
//! A slot word is read as a whole, so page and place always belong together. A better guess is put
//! in by a compare-exchange, which fails when the slot names something else by now.

use super::AccessMode;
use super::objects::InternalScope;
use super::{HeapInner, Scope, StreamingHint};
use crate::error::FarError;
use core::num::NonZeroU64;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::{Class, FrameWord, LogClass, SlotHint};
use farfield_os::memory::load_ahead;
use std::alloc::Layout;

/// Slot word: number among those of all heaps (of a page, or on the object plane of a handle), and
/// place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotWord(NonZeroU64);

impl SlotWord {
    fn new(number: u32, place: SlotHint) -> SlotWord {
        let word = u64::from(number) << 32 | u64::from(place.0);
        SlotWord(NonZeroU64::new(word).unwrap_or_else(|| unreachable!("0 is nobody's")))
    }

    /// Decodes a word; `None` if it names nothing, because nothing has number 0.
    #[inline]
    pub(crate) fn from_word(word: u64) -> Option<SlotWord> {
        if word >> 32 == 0 { None } else { NonZeroU64::new(word).map(SlotWord) }
    }

    /// Returns the word that is stored in a [`SlotCell`].
    #[inline]
    pub(crate) fn word(self) -> u64 {
        self.0.get()
    }

    #[inline]
    fn number(self) -> u32 {
        (self.0.get() >> 32) as u32
    }

    #[inline]
    fn place(self) -> SlotHint {
        SlotHint(self.0.get() as u32)
    }

    /// Checks whether both name the same object of this heap, whatever place they guess. For an
    /// object with a handle, the card is a guess, too.
    #[inline]
    pub(crate) fn is(self, other: SlotWord, core: &HeapInner) -> bool {
        let (number, card) = self.parts(core);
        (number, card) == other.parts(core) || number >= core.pages && number == other.parts(core).0
    }

    /// Returns the number within its heap (page, or handle above all pages), and the card.
    pub(crate) fn parts(self, core: &HeapInner) -> (u32, u8) {
        (self.number() - core.first_page, self.place().card())
    }

    /// Tells `hint` that the object is used next, and only once.
    pub(crate) fn note(self, hint: &StreamingHint, scope: &Scope<'_>) {
        hint.note_use(scope, self.number());
    }

    /// Checks whether the object's page would not stay without the use to come, as
    /// [`Scope::is_new`] does. False for small values of the object plane.
    pub(crate) fn is_new(self, scope: &Scope<'_>) -> bool {
        scope.is_new(self.number())
    }

    /// Marks the object as cold: it is evicted before others.
    pub(crate) fn mark_cold(self, core: &HeapInner) {
        core.mark_cold(self.number());
    }

    /// Returns the object's heap, which exists as long as the object does.
    pub(crate) fn heap(self) -> *const HeapInner {
        super::heap_of(self.number())
    }

    /// Makes an object. Returns its slot and its address, which is valid as long as the scope
    /// lasts. Its bytes are arbitrary.
    pub(crate) fn make(scope: &Scope<'_>, layout: Layout) -> Result<(SlotWord, *mut u8), FarError> {
        let core = scope.core;
        scope.touch();
        let class = LogClass::of(layout.size(), layout.align());
        let (number, place) = core.room_for(scope.record, class, layout, false)?;
        // SAFETY: `room_for` gave a place in a frame.
        let address = unsafe { scope.arena.add(place.offset()) };
        Ok((SlotWord::new(core.first_page + number, place), address))
    }

    /// Moves an object that has a handle to a place for this layout. Returns its slot and its
    /// address, as [`SlotWord::make`] does.
    ///
    /// `copy` gets that address and copies the bytes before anybody finds them there. `None` if the
    /// object has no handle, or if new objects of this layout have none.
    ///
    /// # Safety
    /// The caller owns the object, which nobody else uses, and has found it near in this scope.
    pub(crate) unsafe fn moved(
        self,
        scope: &Scope<'_>,
        layout: Layout,
        copy: impl FnOnce(*mut u8),
    ) -> Result<Option<(SlotWord, *mut u8)>, FarError> {
        let copy = |place: SlotHint| {
            // SAFETY: a place in a frame.
            let address = unsafe { scope.arena.add(place.offset()) };
            copy(address);
            address
        };
        let moved = scope.core.move_within(scope.record, self.number(), layout, copy)?;
        Ok(moved.map(|(place, address)| (SlotWord::new(self.number(), place), address)))
    }

    /// Marks the object as used now. A look-up does this by itself.
    pub(crate) fn mark(self, scope: &Scope<'_>) {
        if scope.number(self.number()).is_none() {
            scope.core.use_object(scope.record, self.number());
        }
    }

    /// Returns how many bytes the object has, which was made for this layout.
    pub(crate) fn room(self, core: &HeapInner, layout: Layout) -> usize {
        let (size, align) = (layout.size(), layout.align());
        let room = if self.parts(core).0 < core.pages {
            Class::of(size, align).map(Class::bytes)
        } else {
            LogClass::of(size, align).map(LogClass::bytes)
        };
        room.unwrap_or(size)
    }

    /// Frees an object without a destructor.
    ///
    /// # Safety
    /// The caller owns the object, which nobody uses any more, and keeps the heap by other means.
    pub(crate) unsafe fn free(self, core: &HeapInner) {
        let (number, card) = self.parts(core);
        // SAFETY: passed on to the caller. Without a destructor it needs no I/O, so it does not fail.
        let freed = unsafe { super::objects::drop_and_free(core, number, card, None::<fn(*mut u8)>) };
        debug_assert_eq!(freed, Ok(()));
    }

    /// Brings the object near and returns its address, which is valid as long as the scope lasts.
    pub(crate) fn address(self, scope: &Scope<'_>) -> Result<*mut u8, FarError> {
        SlotCell(AtomicU64::new(self.word())).address(scope, self, AccessMode::Read)
    }

    /// Hints that the object is used soon. The processor loads the frame word or handle that says
    /// where it is, and its first line if it is where the slot guesses.
    #[inline]
    pub(crate) fn load_ahead(self, scope: &Scope<'_>) {
        match scope.number(self.number()) {
            Some(page) => load_ahead(scope.words.wrapping_add(page as usize)),
            None => scope.core.load_handle_ahead(self.number()),
        }
        load_ahead(scope.arena.wrapping_add(self.place().offset()));
    }

    /// Loads the frame word and the log word of the object's page ahead, if it has a handle. A hint
    /// for a little after [`SlotWord::load_ahead`].
    #[inline]
    pub(crate) fn load_page_ahead(self, scope: &Scope<'_>) {
        if scope.number(self.number()).is_none() {
            scope.core.load_page_ahead(self.number());
        }
    }

    /// Returns the address, which is valid as long as the scope lasts, if the object is near and no
    /// wait is needed.
    #[inline]
    pub(crate) fn address_now(self, scope: &Scope<'_>) -> Option<*mut u8> {
        scope.touch();
        let place = match scope.number(self.number()) {
            Some(page) => {
                // SAFETY: `page` is below `scope.pages`, the length of the table.
                let word = unsafe { &*scope.words.add(page as usize) };
                // Acquire: the thread that brought the page has filled the frame.
                match FrameWord(word.load(Ordering::Acquire)).confirms(self.place()) {
                    true => self.place(),
                    false => self.place().in_frame(scope.core.near_now(scope.record, page)?),
                }
            }
            None => scope.core.object_now(scope.record, self.number())?,
        };
        // SAFETY: the word names a frame, and a card lies within its frame, so this is inside the arena.
        Some(unsafe { scope.arena.add(place.offset()) })
    }
}

/// Cell in which a collection keeps a slot.
#[repr(transparent)]
pub(crate) struct SlotCell(AtomicU64);

// SAFETY: an atomic, for which zero is a value.
unsafe impl super::Zeroed for SlotCell {}

impl HeapInner {
    /// Calls `action` with the address of an object, which is near during the call.
    pub(crate) fn with_object<R>(&self, slot: SlotWord, action: impl FnOnce(*mut u8) -> R) -> Result<R, FarError> {
        let inside = InternalScope::new(self);
        let (number, card) = slot.parts(self);
        let place = self.fault_in_owned(&inside, number, card, AccessMode::Read)?;
        // SAFETY: its page stays there until our scope ends, and a card lies within its frame.
        Ok(action(unsafe { self.frames.base().add(place.offset()) }))
    }
}

impl SlotCell {
    /// Makes a cell that names nothing.
    pub(crate) const fn nothing() -> SlotCell {
        SlotCell(AtomicU64::new(0))
    }

    pub(crate) fn new(slot: SlotWord) -> SlotCell {
        SlotCell(AtomicU64::new(slot.word()))
    }

    /// Loads the word. Acquire: the thread that stored a slot has made its object.
    #[inline]
    pub(crate) fn word(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Loads the slot, if the cell names something.
    #[inline]
    pub(crate) fn load(&self) -> Option<SlotWord> {
        SlotWord::from_word(self.word())
    }

    /// Stores a word; `0` for nothing.
    #[inline]
    pub(crate) fn store(&self, word: u64) {
        self.0.store(word, Ordering::Release);
    }

    /// Stores this slot if the cell has named nothing until now; false otherwise.
    pub(crate) fn fill(&self, slot: SlotWord) -> bool {
        self.0.compare_exchange(0, slot.word(), Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Returns the address of the object that `slot`, loaded from here, names. The object stays
    /// near as long as the scope lasts. Never renews the scope.
    #[inline]
    pub(crate) fn address(&self, scope: &Scope<'_>, slot: SlotWord, mode: AccessMode) -> Result<*mut u8, FarError> {
        scope.touch();
        let mut place = slot.place();
        let Some(page) = scope.number(slot.number()) else {
            let place = self.find_object(scope, slot, mode)?;
            // SAFETY: as below.
            return Ok(unsafe { scope.arena.add(place.offset()) });
        };
        // SAFETY: `page` is below `scope.pages`, the length of the table.
        let word = unsafe { &*scope.words.add(page as usize) };
        // Acquire: the thread that brought the page has filled the frame.
        let word = FrameWord(word.load(Ordering::Acquire));
        let found = if mode == AccessMode::Write { word.confirms_dirty(place) } else { word.confirms(place) };
        if !found {
            place = self.find(scope, slot, page, mode)?;
        }
        // SAFETY: the word names a frame, and a card lies within its frame, so this is inside the arena.
        Ok(unsafe { scope.arena.add(place.offset()) })
    }

    #[cold]
    fn find(&self, scope: &Scope<'_>, slot: SlotWord, page: u32, mode: AccessMode) -> Result<SlotHint, FarError> {
        let core = scope.core;
        let place = slot.place().in_frame(core.fault_in(scope.record, page, mode, false)?);
        self.correct(scope, slot, place);
        Ok(place)
    }

    /// Finds the place of an object that has a handle, and brings it near.
    #[inline]
    fn find_object(&self, scope: &Scope<'_>, slot: SlotWord, mode: AccessMode) -> Result<SlotHint, FarError> {
        let place = scope.core.find_object(scope, slot.number(), slot.place(), mode, false)?;
        if place != slot.place() {
            self.correct(scope, slot, place);
        }
        Ok(place)
    }

    /// Puts a better guess into the cell, if it is time.
    fn correct(&self, scope: &Scope<'_>, slot: SlotWord, place: SlotHint) {
        if scope.core.may_correct(scope.record, core::ptr::from_ref(self) as usize) {
            let better = SlotWord::new(slot.number(), place);
            // It fails if the slot names something else now, or if another thread has corrected it.
            let _ = self.0.compare_exchange(slot.word(), better.word(), Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Scope<'_> {
    /// Calls `action`, and if there was no room, renews the scope and calls it again.
    ///
    /// The scope can be renewed if it holds nothing for anybody; otherwise this fails with
    /// [`FarError::NearFull`]. After a renewal, `action` finds anew what it had found. The scope
    /// holds something if an address was known before (the operation runs inside another one), or
    /// if user code in `action` was given a reference.
    #[inline]
    pub(crate) fn with_room<R>(&self, mut action: impl FnMut() -> Result<R, FarError>) -> Result<R, FarError> {
        let before = core::mem::ManuallyDrop::new(self.begin_transient());
        match action() {
            Err(FarError::NearFull) => {}
            other => return other,
        }
        let mut backoff = super::Backoff::new(self.core.patience);
        while self.forget(&before) {
            backoff.wait()?;
            self.core.make_room(self.record)?;
            match action() {
                Err(FarError::NearFull) => {}
                other => return other,
            }
        }
        Err(FarError::NearFull)
    }
}
