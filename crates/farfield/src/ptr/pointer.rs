//! The common part of all far pointers: the slot word of a value, and how it is followed.

use crate::error::FarError;
use crate::fault::{FaultFuture, Pin, PinFault};
use crate::heap::{AccessMode, HeapInner, Scope, ShareKey, StreamingHint, heap_of};
use core::num::NonZeroU32;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::heap::{FrameWord, SlotHint};

/// A slot word. The owner of the word guarantees how long its value lives.
#[repr(C, align(8))]
pub(crate) struct Pointer {
    /// The lower half of the slot word, a [`SlotHint`]: a guess, which is corrected while others
    /// read it.
    place: AtomicU32,
    /// The upper half: the number of the value's page, or of its handle on the object plane.
    /// Numbers are unique over all heaps. Never 0, and never changes.
    number: NonZeroU32,
}

const _: () = assert!(size_of::<Pointer>() == 8 && size_of::<Option<Pointer>>() == 8);

/// Result of following a pointer without waiting.
pub(crate) enum PointerLookup<'a> {
    /// The value is near, at this address, as long as the scope lasts.
    Resident(*mut u8),
    /// The value is not usable yet. After the wait, [`Pointer::address_after_fault`] returns its
    /// address.
    Fault(FaultFuture<'a>),
}

impl Pointer {
    /// Makes a pointer to the value with this number within the heap.
    pub(crate) fn new(core: &HeapInner, number: u32, place: SlotHint) -> Pointer {
        let Some(number) = NonZeroU32::new(core.first_page + number) else { unreachable!("0 is nobody's") };
        Pointer { place: AtomicU32::new(place.0), number }
    }

    #[inline]
    fn place(&self) -> SlotHint {
        SlotHint(self.place.load(Ordering::Relaxed))
    }

    /// Returns the address of the value, which is valid as long as the scope lasts.
    #[inline]
    pub(crate) fn address(&self, scope: &Scope<'_>, mode: AccessMode) -> Result<*mut u8, FarError> {
        let mut place = self.place();
        match scope.number(self.number.get()) {
            Some(page) => {
                if !Self::confirms(scope, page, place, mode) {
                    place = scope.core.find(scope, page, &self.place, mode)?;
                }
            }
            None => place = self.place_of_object(scope, mode)?,
        }
        scope.mark_used();
        // SAFETY: the word names a frame, and a card lies within its frame, so this is inside the arena.
        Ok(unsafe { scope.arena.add(place.offset()) })
    }

    /// Finds a value of the object plane. Not inlined, because it would keep [`Pointer::address`]
    /// from being inlined.
    #[inline(never)]
    fn place_of_object(&self, scope: &Scope<'_>, mode: AccessMode) -> Result<SlotHint, FarError> {
        let found = scope.core.find_object(scope, self.number.get(), self.place(), mode, scope.is_renewable())?;
        self.correct(scope, found);
        Ok(found)
    }

    /// Checks whether the page is usable in the frame that the slot guesses.
    #[inline]
    fn confirms(scope: &Scope<'_>, page: u32, place: SlotHint, mode: AccessMode) -> bool {
        // SAFETY: `page` is below `scope.pages`, the length of the table.
        let word = unsafe { &*scope.words.add(page as usize) };
        // Acquire: the thread that brought the page near has filled the frame before.
        let word = FrameWord(word.load(Ordering::Acquire));
        if mode == AccessMode::Write { word.confirms_dirty(place) } else { word.confirms(place) }
    }

    /// Follows the pointer for a task: instead of blocking the thread, gives back a [`FaultFuture`]
    /// to wait for.
    pub(crate) fn look_up<'a>(&self, scope: &'a Scope<'_>, mode: AccessMode) -> Result<PointerLookup<'a>, FarError> {
        let missing = match scope.number(self.number.get()) {
            Some(page) => (!Self::confirms(scope, page, self.place(), mode)).then_some(page),
            None => scope.core.missing_object(self.number.get(), self.place(), mode)?,
        };
        match missing {
            Some(number) => Ok(PointerLookup::Fault(FaultFuture::new(scope, number, mode))),
            None => self.address(scope, mode).map(PointerLookup::Resident),
        }
    }

    /// Returns the address of a value for which a task has waited.
    pub(crate) fn address_after_fault(&self, scope: &Scope<'_>, found: SlotHint) -> *mut u8 {
        scope.mark_used();
        let place = match scope.number(self.number.get()) {
            Some(_) => scope.core.guess(scope.record, &self.place, found.frame()),
            None => {
                self.correct(scope, found);
                found
            }
        };
        // SAFETY: as in `address`.
        unsafe { scope.arena.add(place.offset()) }
    }

    /// Corrects the guess in the slot of a value that has a handle, if it may be corrected again by
    /// now.
    fn correct(&self, scope: &Scope<'_>, found: SlotHint) {
        if found != self.place() && scope.core.may_correct(scope.record, self.place.as_ptr() as usize) {
            self.place.store(found.0, Ordering::Relaxed);
        }
    }

    /// [`Pointer::address`] for a task, which waits without blocking its thread.
    pub(crate) async fn address_async(&self, scope: &Scope<'_>, mode: AccessMode) -> Result<*mut u8, FarError> {
        match self.look_up(scope, mode)? {
            PointerLookup::Resident(address) => Ok(address),
            PointerLookup::Fault(fault) => Ok(self.address_after_fault(scope, fault.await?)),
        }
    }

    /// Returns the number of the value's page within this heap, if the pointer names a page of it.
    pub(crate) fn page_in(&self, core: &HeapInner) -> Option<u32> {
        let page = self.number.get().wrapping_sub(core.first_page);
        (page < core.pages).then_some(page)
    }

    /// Returns page and card of a value of this heap that never moves.
    pub(crate) fn far_place(&self, core: &HeapInner) -> Option<(u32, u8)> {
        self.page_in(core).map(|page| (page, self.place().card()))
    }

    /// Returns the value's number within this heap, if it belongs to it. Numbers of pages come
    /// first, those of handles after all pages.
    pub(crate) fn number_in(&self, core: &HeapInner) -> Option<u32> {
        core.number_of(self.number.get())
    }

    /// Returns the heap, which exists as long as the value.
    pub(crate) fn core(&self) -> *const HeapInner {
        heap_of(self.number.get())
    }

    /// Borrows the heap, as long as this pointer is borrowed.
    pub(crate) fn heap(&self) -> &HeapInner {
        // SAFETY: the value keeps the heap, and lives as long as this says.
        unsafe { &*self.core() }
    }

    /// Calls `action` with a scope of its own.
    pub(crate) fn with_scope<R>(&self, action: impl FnOnce(&Scope<'_>) -> R) -> R {
        action(&Scope::new(self.heap()))
    }

    /// Brings the value near and pins its page. Returns its address.
    pub(crate) fn pin(&self, mode: AccessMode) -> Result<(*mut u8, Pin<'_>), FarError> {
        let scope = Scope::new(self.heap());
        let address = self.address(&scope, mode)?;
        Ok((address, scope.pin_at(address)?))
    }

    /// Pins the value for a task that holds no scope. [`Pointer::within`] returns its address
    /// afterwards.
    pub(crate) async fn arrive_pinned(&self, mode: AccessMode) -> Result<Pin<'_>, FarError> {
        let core = self.heap();
        let Some(number) = self.number_in(core) else { unreachable!("the number of a value of this heap") };
        PinFault::new(core, number, mode).await
    }

    /// Returns the address of the value, whose page is pinned.
    pub(crate) fn within(&self, pin: &Pin<'_>) -> *mut u8 {
        let scope = Scope::new(pin.core);
        match self.page_in(pin.core) {
            Some(_) => self.address_after_fault(&scope, SlotHint::new(pin.frame, 0)),
            None => {
                let address = self.address(&scope, AccessMode::Read);
                address.unwrap_or_else(|_| unreachable!("what is pinned is near"))
            }
        }
    }

    /// Notes that the value is used next, and only once.
    pub(crate) fn note(&self, hint: &StreamingHint, scope: &Scope<'_>) {
        hint.note_use(scope, self.number.get());
    }

    /// Marks the value as cold: its page is evicted before others.
    pub(crate) fn mark_cold(&self) {
        self.heap().mark_cold(self.number.get());
    }

    /// Begins to bring the value near, and does not wait.
    pub(crate) fn prefetch(&self) {
        let core = self.heap();
        core.prefetch(core.record(), self.number_in(core));
    }

    /// Returns the halves of the slot word, place and number.
    pub(crate) fn halves(&self) -> (u32, NonZeroU32) {
        (self.place().0, self.number)
    }

    /// Makes a second pointer to the value of the pointer that had these halves.
    pub(crate) fn from_halves(place: u32, number: NonZeroU32) -> Pointer {
        Pointer { place: AtomicU32::new(place), number }
    }

    /// Makes a second pointer to the same value.
    pub(crate) fn alias(&self) -> Pointer {
        Pointer { place: AtomicU32::new(self.place().0), number: self.number }
    }

    /// Checks whether both point to the same value.
    pub(crate) fn is(&self, other: &Pointer) -> bool {
        self.number == other.number && self.key() == other.key()
    }

    /// Returns the key under which the owners of the value are counted.
    pub(crate) fn key(&self) -> ShareKey {
        let (_, number, card) = self.parts();
        self.heap().share_key(number, card)
    }

    /// Returns the heap, the number within the heap, and the card.
    pub(crate) fn parts(&self) -> (*const HeapInner, u32, u8) {
        (self.core(), self.number.get() - self.heap().first_page, self.place().card())
    }
}

impl core::fmt::Debug for Pointer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.number.fmt(f)
    }
}
