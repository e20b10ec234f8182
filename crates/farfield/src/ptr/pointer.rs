//! What far pointers are made of: the slot word of a value, and how it is followed.

use crate::error::FarError;
use crate::heap::{Arrival, Bring, Core, Once, Pin, Scope, ShareKey, Want, heap_of};
use core::num::NonZeroU32;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::heap::{FrameWord, Place};

/// A slot word, whose value lives as long as whoever has this says.
#[repr(C, align(8))]
pub(crate) struct Pointer {
    /// The lower half of the slot word, a [`Place`]. Its guess is corrected while others read.
    place: AtomicU32,
    /// The upper half: the number of its page, or on the object plane of its handle, among those of all heaps. Never 0, and
    /// never changes.
    number: NonZeroU32,
}

const _: () = assert!(size_of::<Pointer>() == 8 && size_of::<Option<Pointer>>() == 8);

/// How far a value is that somebody wants.
pub(crate) enum Stage<'a> {
    /// Near, at this address, as long as the scope lasts.
    Here(*mut u8),
    /// To be waited for; then [`Pointer::landed`] says where it is.
    Comes(Arrival<'a>),
}

impl Pointer {
    /// To the value with this number within the heap.
    pub(crate) fn new(core: &Core, number: u32, place: Place) -> Pointer {
        let Some(number) = NonZeroU32::new(core.first_page + number) else { unreachable!("0 is nobody's") };
        Pointer { place: AtomicU32::new(place.0), number }
    }

    #[inline]
    fn place(&self) -> Place {
        Place(self.place.load(Ordering::Relaxed))
    }

    /// Where the value is, as long as the scope lasts.
    #[inline]
    pub(crate) fn address(&self, scope: &Scope<'_>, want: Want) -> Result<*mut u8, FarError> {
        let mut place = self.place();
        match scope.number(self.number.get()) {
            Some(page) => {
                if !Self::confirms(scope, page, place, want) {
                    place = scope.core.find(scope, page, &self.place, want)?;
                }
            }
            None => place = self.place_of_object(scope, want)?,
        }
        scope.mark_used();
        // SAFETY: the word names a frame, and a card lies within its frame, so this is inside the arena.
        Ok(unsafe { scope.arena.add(place.offset()) })
    }

    /// The same on the object plane. Not inlined, or nothing of a dereference would be.
    #[inline(never)]
    fn place_of_object(&self, scope: &Scope<'_>, want: Want) -> Result<Place, FarError> {
        let found = scope.core.find_object(scope, self.number.get(), self.place(), want, scope.is_renewable())?;
        self.correct(scope, found);
        Ok(found)
    }

    /// Is the page usable in the frame that the slot guesses?
    #[inline]
    fn confirms(scope: &Scope<'_>, page: u32, place: Place, want: Want) -> bool {
        // SAFETY: `page` is below `scope.pages`, the length of the table.
        let word = unsafe { &*scope.words.add(page as usize) };
        // Acquire: who brought the page has filled the frame.
        let word = FrameWord(word.load(Ordering::Acquire));
        if want == Want::Write { word.confirms_dirty(place) } else { word.confirms(place) }
    }

    /// The same for a task, which waits without a thread if it has to.
    pub(crate) fn stage<'a>(&self, scope: &'a Scope<'_>, want: Want) -> Result<Stage<'a>, FarError> {
        let missing = match scope.number(self.number.get()) {
            Some(page) => (!Self::confirms(scope, page, self.place(), want)).then_some(page),
            None => scope.core.missing_object(self.number.get(), self.place(), want)?,
        };
        match missing {
            Some(number) => Ok(Stage::Comes(Arrival::new(scope, number, want))),
            None => self.address(scope, want).map(Stage::Here),
        }
    }

    /// Where the value is that a task has waited for.
    pub(crate) fn landed(&self, scope: &Scope<'_>, found: Place) -> *mut u8 {
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

    /// The slot of a value that has a handle gets a better guess, if it is time.
    fn correct(&self, scope: &Scope<'_>, found: Place) {
        if found != self.place() && scope.core.may_correct(scope.record, self.place.as_ptr() as usize) {
            self.place.store(found.0, Ordering::Relaxed);
        }
    }

    /// [`Pointer::address`] for a task.
    pub(crate) async fn arrival(&self, scope: &Scope<'_>, want: Want) -> Result<*mut u8, FarError> {
        match self.stage(scope, want)? {
            Stage::Here(address) => Ok(address),
            Stage::Comes(arrival) => Ok(self.landed(scope, arrival.await?)),
        }
    }

    /// Its page's number within this heap, if it names a page of it.
    pub(crate) fn page_in(&self, core: &Core) -> Option<u32> {
        let page = self.number.get().wrapping_sub(core.first_page);
        (page < core.pages).then_some(page)
    }

    /// The place of a value of this heap that never moves: page and card.
    pub(crate) fn far_place(&self, core: &Core) -> Option<(u32, u8)> {
        self.page_in(core).map(|page| (page, self.place().card()))
    }

    /// Its number within this heap, if it is a value of it: its page's, or its handle's above all pages.
    pub(crate) fn number_in(&self, core: &Core) -> Option<u32> {
        core.number_of(self.number.get())
    }

    /// The heap. It exists as long as the value.
    pub(crate) fn core(&self) -> *const Core {
        heap_of(self.number.get())
    }

    /// The same, as long as this pointer is used.
    pub(crate) fn heap(&self) -> &Core {
        // SAFETY: the value keeps the heap, and lives as long as this says.
        unsafe { &*self.core() }
    }

    /// Calls `action` with a scope of its own.
    pub(crate) fn with_scope<R>(&self, action: impl FnOnce(&Scope<'_>) -> R) -> R {
        action(&Scope::new(self.heap()))
    }

    /// Keeps the value near: where it is.
    pub(crate) fn pin(&self, want: Want) -> Result<(*mut u8, Pin<'_>), FarError> {
        let scope = Scope::new(self.heap());
        let address = self.address(&scope, want)?;
        Ok((address, scope.pin_at(address)?))
    }

    /// The same for a task that holds no scope; [`Pointer::within`] says where it is.
    pub(crate) async fn arrive_pinned(&self, want: Want) -> Result<Pin<'_>, FarError> {
        let core = self.heap();
        let Some(number) = self.number_in(core) else { unreachable!("the number of a value of this heap") };
        Bring::new(core, number, want).await
    }

    /// The address of the value, whose page is pinned.
    pub(crate) fn within(&self, pin: &Pin<'_>) -> *mut u8 {
        let scope = Scope::new(pin.core);
        match self.page_in(pin.core) {
            Some(_) => self.landed(&scope, Place::new(pin.frame, 0)),
            None => {
                let address = self.address(&scope, Want::Read);
                address.unwrap_or_else(|_| unreachable!("what is pinned is near"))
            }
        }
    }

    /// It is used next, once.
    pub(crate) fn note(&self, once: &Once, scope: &Scope<'_>) {
        once.uses(scope, self.number.get());
    }

    /// Its page leaves before others.
    pub(crate) fn cold(&self) {
        self.heap().cold(self.number.get());
    }

    /// Begins to bring it near, and does not wait.
    pub(crate) fn prefetch(&self) {
        let core = self.heap();
        core.prefetch(core.record(), self.number_in(core));
    }

    /// Another pointer to the same value.
    pub(crate) fn alias(&self) -> Pointer {
        Pointer { place: AtomicU32::new(self.place().0), number: self.number }
    }

    /// Do both point to the same value?
    pub(crate) fn is(&self, other: &Pointer) -> bool {
        self.number == other.number && self.key() == other.key()
    }

    /// Names the value, for its owners to be counted.
    pub(crate) fn key(&self) -> ShareKey {
        let (_, number, card) = self.parts();
        self.heap().share_key(number, card)
    }

    /// Heap, number within the heap, and card.
    pub(crate) fn parts(&self) -> (*const Core, u32, u8) {
        (self.core(), self.number.get() - self.heap().first_page, self.place().card())
    }
}

impl core::fmt::Debug for Pointer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.number.fmt(f)
    }
}
