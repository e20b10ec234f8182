//! Finding a value, and bringing it near alone.
//!
//! A dereference reads the handle, then the frame word of the page that the handle names, then the
//! handle again. If the handle has not changed, the value was in that page while the page was in
//! that frame. Neither changes for a scope that has seen it. A value whose page is Far is locked,
//! and read into a place in the log page of the thread that wanted it (`flight`).

use super::{ObjectId, Objects};
use crate::error::FarError;
use crate::heap::{HeapInner, Scope, ThreadState, count, count_use};
use core::sync::atomic::Ordering;
use farfield_core::heap::fault::{AccessMode, ObjectLookup, ObjectWords, look_up_object};
use farfield_core::heap::{FrameWord, Handle, Hotness, LogWord, ObjectLocation, SlotHint, State};
use farfield_os::memory::load_ahead;

impl ObjectWords for HeapInner {
    #[inline]
    fn load_handle(&self, object: ObjectId) -> Handle {
        Handle(self.objects().handles[object].load(Ordering::Acquire))
    }

    #[inline]
    fn exchange_handle(&self, object: ObjectId, seen: Handle, next: Handle) -> bool {
        let handle = &self.objects().handles[object];
        handle.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn load_log(&self, page: u32) -> LogWord {
        self.objects().log.word(page)
    }

    fn update_log(&self, page: u32, transition: impl Fn(LogWord) -> (LogWord, bool)) -> bool {
        self.objects().log.update(page, transition)
    }

    fn retire_log(&self, page: u32) {
        HeapInner::retire_log(self, &self.objects().log, page);
    }
}

impl HeapInner {
    /// Returns the object of this number among those of all heaps, if it belongs to this heap.
    #[inline]
    pub(super) fn object_of(&self, number: u32) -> Option<(&Objects, ObjectId)> {
        let object = number.wrapping_sub(self.first_page).wrapping_sub(self.pages);
        self.objects.as_ref().filter(|objects| object < objects.handles.count()).map(|objects| (objects, object))
    }

    /// Makes the object of a slot near and returns its place; the slot's number is not a page's,
    /// and `guess` is the slot's guess. The caller is inside a scope, which may be `renewable`.
    #[inline(never)]
    pub(crate) fn find_object(
        &self,
        scope: &Scope<'_>,
        number: u32,
        guess: SlotHint,
        mode: AccessMode,
        renewable: bool,
    ) -> Result<SlotHint, FarError> {
        let (objects, object) = self.object_of(number).ok_or(FarError::OtherHeap)?;
        if self.confirms_object(objects, object, guess, mode) {
            return Ok(guess);
        }
        self.fault_in_object(scope.record, objects, object, mode, renewable)
    }

    /// Returns the number within this heap of the object that a slot names. `Ok(None)`: the object
    /// is near where the slot guesses. Fails if the object belongs to another heap.
    pub(crate) fn missing_object(
        &self,
        number: u32,
        guess: SlotHint,
        mode: AccessMode,
    ) -> Result<Option<u32>, FarError> {
        let (objects, object) = self.object_of(number).ok_or(FarError::OtherHeap)?;
        Ok((!self.confirms_object(objects, object, guess, mode)).then_some(self.pages + object))
    }

    /// Prefetches the handle of a slot, whose number is not a page's, into the processor's cache.
    #[inline]
    pub(crate) fn load_handle_ahead(&self, number: u32) {
        if let Some((objects, object)) = self.object_of(number) {
            load_ahead(&objects.handles[object]);
        }
    }

    /// Prefetches the words of the page that this handle names into the processor's cache.
    #[inline]
    pub(crate) fn load_page_ahead(&self, number: u32) {
        if let Some((objects, object)) = self.object_of(number)
            && let ObjectLocation::At { page, .. } = Handle(objects.handles[object].load(Ordering::Relaxed)).location()
        {
            load_ahead(&self.words[page]);
            objects.log.load_ahead(page);
        }
    }

    /// Checks whether the object is near where its slot guesses, and hot already.
    #[inline]
    fn confirms_object(&self, objects: &Objects, object: ObjectId, guess: SlotHint, mode: AccessMode) -> bool {
        let handle = &objects.handles[object];
        let seen = Handle(handle.load(Ordering::Acquire));
        if let ObjectLocation::At { page, card } = seen.location()
            && card == guess.card()
        {
            // The address comes from the slot, so that the processor loads the value while it
            // checks.
            let word = FrameWord(self.words[page].load(Ordering::Acquire));
            let found = if mode == AccessMode::Write { word.confirms_dirty(guess) } else { word.confirms(guess) };
            return found && seen.is_hot() && Handle(handle.load(Ordering::Acquire)) == seen;
        }
        false
    }

    /// Marks the use of the object of this number, whose place the caller knows.
    pub(crate) fn use_object(&self, record: &ThreadState, number: u32) {
        if let Some((objects, object)) = self.object_of(number) {
            self.mark(record, objects, object, Handle(objects.handles[object].load(Ordering::Relaxed)), false);
        }
    }

    /// Returns the place of the object of this number, if it is near and no wait is needed. The
    /// caller is inside a scope.
    pub(crate) fn object_now(&self, record: &ThreadState, number: u32) -> Option<SlotHint> {
        let (objects, object) = self.object_of(number)?;
        match self.look_up_object(record, objects, object, AccessMode::Read, false) {
            ObjectLookup::Resident(place, _) => Some(place),
            ObjectLookup::Relocating | ObjectLookup::Loading(_) | ObjectLookup::Retry | ObjectLookup::Far(_) => None,
        }
    }

    /// Looks at an object, and marks that it was used if it is near. `brought`: it was far when
    /// this use began. The caller is inside a scope.
    #[inline]
    pub(crate) fn look_up_object(
        &self,
        record: &ThreadState,
        objects: &Objects,
        object: ObjectId,
        mode: AccessMode,
        brought: bool,
    ) -> ObjectLookup {
        let found = look_up_object(self, object, mode, |page, seen| {
            count_use(record, seen);
            if seen.state() != State::Near {
                self.mark_streamed_page(record, page);
            }
        });
        if let ObjectLookup::Resident(_, handle) = found {
            self.mark(record, objects, object, handle, brought);
        }
        found
    }

    /// Lets this page leave first if the present use is the only one (streaming access). The page
    /// came whole for an object in it, or was about to leave.
    pub(crate) fn mark_streamed_page(&self, record: &ThreadState, page: u32) {
        if record.objects.is_streaming.get() {
            self.mark_evict_first(core::iter::once(page));
        }
    }

    /// Hints that an object of this number will not be needed soon: it is not hot any more, and its
    /// page leaves first. Hot objects of that page stay near, because the evacuator separates them.
    pub(crate) fn cool_object(&self, number: u32) {
        let Some((objects, object)) = self.object_of(number) else { return };
        let seen = Handle(objects.handles[object].fetch_and(!Handle::HEAT, Ordering::Relaxed));
        if let ObjectLocation::At { page, .. } = seen.location()
            && FrameWord(self.words[page].load(Ordering::Relaxed)).frame().is_some()
        {
            self.mark_evict_first(core::iter::once(page));
        }
    }

    /// Marks the use of an object that is near. An object is hot if it is used again after it came.
    fn mark(&self, record: &ThreadState, objects: &Objects, object: ObjectId, now: Handle, brought: bool) {
        let handle = &objects.handles[object];
        if now.is_ahead() {
            let before = Handle(handle.fetch_and(!Handle::AHEAD, Ordering::Relaxed));
            if before.is_ahead() {
                count(&record.counters.prefetches_used);
            }
            handle.fetch_or(Handle::USED, Ordering::Relaxed);
        } else if objects.heat.rule != Hotness::Mark && !now.is_hot() && !record.objects.is_streaming.get() {
            objects.warm(object, now, brought);
        } else if !now.is_hot() && !brought && !record.objects.is_streaming.get() {
            handle.fetch_or(Handle::HOT | Handle::USED, Ordering::Relaxed);
        } else if !now.is_used() {
            handle.fetch_or(Handle::USED, Ordering::Relaxed);
        }
    }
}
