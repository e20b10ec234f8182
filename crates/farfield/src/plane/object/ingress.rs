//! How a value is found, and brought near alone.
//!
//! A dereference reads the handle, then the frame word of the page that it names, then the handle again: was it the same, the
//! value was in that page while the page was in that frame, and neither changes for a scope that has seen it. A value whose page is Far is
//! locked, read, and put into the log page of whoever wanted it.

use super::{ObjectId, Objects, OwnObjects};
use crate::error::FarError;
use crate::heap::{Core, Part, Patience, Record, Scope, Want, count};
use core::sync::atomic::Ordering;
use farfield_core::heap::{
    CARD_BYTES, Deref, FrameId, FrameWord, Handle, LogClass, Place, State, TAG_BYTES, Whereabouts,
};
use farfield_pool::PagePart;

/// Where a new object lies: near, dirty, and counted.
pub(super) struct Spot {
    pub(super) page: u32,
    pub(super) place: Place,
}

impl Core {
    /// The object of a slot whose number is not a page's, made near; `guess` is the slot's. The caller is inside a scope, which may
    /// be `renewable`.
    #[inline(never)]
    pub(crate) fn find_object(
        &self,
        scope: &Scope<'_>,
        number: u32,
        guess: Place,
        want: Want,
        renewable: bool,
    ) -> Result<Place, FarError> {
        let object = number.wrapping_sub(self.first_page).wrapping_sub(self.pages);
        let Some(objects) = &self.objects else { return Err(FarError::OtherHeap) };
        if object >= objects.handles.count() {
            return Err(FarError::OtherHeap);
        }
        let handle = &objects.handles[object];
        let seen = Handle(handle.load(Ordering::Acquire));
        if let Whereabouts::At { page, card } = seen.whereabouts()
            && card == guess.card()
        {
            // The address comes from the slot, so that the processor loads the value while it checks.
            let word = FrameWord(self.words[page].load(Ordering::Acquire));
            let found = if want == Want::Write { word.confirms_dirty(guess) } else { word.confirms(guess) };
            if found && seen.is_hot() && Handle(handle.load(Ordering::Acquire)) == seen {
                return Ok(guess);
            }
        }
        self.seek(scope.record, objects, object, want, renewable)
    }

    /// Where an object of this number is, if it is near and nobody has to be waited for. The caller is inside a scope.
    pub(crate) fn object_now(&self, record: &Record, number: u32) -> Option<Place> {
        let object = number.wrapping_sub(self.first_page).wrapping_sub(self.pages);
        let handle = self.objects.as_ref().map(|objects| &objects.handles[object])?;
        loop {
            let Whereabouts::At { page, card } = Handle(handle.load(Ordering::Acquire)).whereabouts() else {
                return None;
            };
            let frame = self.near_now(record, page)?;
            // As in `seek`.
            if Handle(handle.load(Ordering::Acquire)).is_at(page, card) {
                return Some(Place::new(frame, card));
            }
        }
    }

    /// The same without a slot: where the value is, near.
    pub(crate) fn seek(
        &self,
        record: &Record,
        objects: &Objects,
        object: ObjectId,
        want: Want,
        renewable: bool,
    ) -> Result<Place, FarError> {
        let handle = &objects.handles[object];
        let mut patience = Patience::new(self.patience);
        let mut brought = false;
        loop {
            let seen = Handle(handle.load(Ordering::Acquire));
            let (page, card) = match seen.whereabouts() {
                Whereabouts::At { page, card } => (page, card),
                Whereabouts::Moving => {
                    patience.wait()?;
                    continue;
                }
                Whereabouts::Nowhere => unreachable!("a slot of an object that is gone"),
            };
            let word = &self.words[page];
            let held = FrameWord(word.load(Ordering::Acquire));
            let (next, what) = want.decide(held);
            match what {
                Deref::Here(frame) => {
                    if next != held && !self.exchange(word, held, next) {
                        continue;
                    }
                    if held.state() != State::Near {
                        count(&record.counters.taken_back);
                    }
                    // A scope that finds the page near after the object has moved out finds the handle changed, too.
                    let now = Handle(handle.load(Ordering::Acquire));
                    if now.whereabouts() == seen.whereabouts() {
                        // Hot is what is used again after it came.
                        if !now.is_hot() && !brought {
                            handle.fetch_or(Handle::HOT, Ordering::Relaxed);
                        }
                        return Ok(Place::new(frame, card));
                    }
                }
                // The page is being read, or is Empty because the object has moved out.
                Deref::Wait => {
                    if next == held || self.exchange(word, held, next) {
                        patience.wait()?;
                    }
                }
                Deref::Fetch => {
                    self.bring_object(record, objects, object, seen, renewable)?;
                    brought = true;
                }
                Deref::Zero => unreachable!("nobody creates by looking"),
            }
        }
    }

    /// Brings an object near whose page was Far when its handle was `seen`, unless somebody else is at it: then the caller looks
    /// again.
    fn bring_object(
        &self,
        record: &Record,
        objects: &Objects,
        object: ObjectId,
        seen: Handle,
        renewable: bool,
    ) -> Result<(), FarError> {
        let (Whereabouts::At { page, card }, Some(locked)) = (seen.whereabouts(), seen.lock()) else {
            unreachable!("seen in a page");
        };
        let Some(class) = objects.log.word(page).class() else { return Ok(()) };
        // The room first: nobody waits for an object whose owner waits for room.
        let spot = self.place_object(record, objects, object, class, renewable)?;
        let handle = &objects.handles[object];
        // Acquire: whoever put it there is done.
        if handle.compare_exchange(seen.0, locked.0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            self.leave_log(&objects.log, spot.page);
            return Ok(());
        }
        // From here on the object is ours, and so its page stays what it is: no log page is fetched whole, and none is
        // Empty while an object lives in it. What we saw before may have been long ago.
        let is_far = FrameWord(self.words[page].load(Ordering::Acquire)).state() == State::Far;
        if !is_far || objects.log.word(page).class() != Some(class) {
            handle.store(seen.0, Ordering::Release);
            self.leave_log(&objects.log, spot.page);
            return Ok(());
        }
        count(&record.counters.misses);
        // SAFETY: the place is ours alone since `place_object`, near until our scope ends, and inside the arena.
        let target = unsafe { self.frames.base().add(spot.place.offset()) };
        let copy = |bytes: &[u8]| {
            // SAFETY: as above; the place has as many bytes as the object.
            unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len().min(class.bytes())) };
        };
        let part = PagePart::new(usize::from(card) * CARD_BYTES, class.bytes());
        let Some(part) = part else { unreachable!("an object lies inside its page") };
        let part = Part { page, part };
        match self.read_part(record, part, copy) {
            Ok(()) => {
                // Release: whoever finds it there finds its bytes.
                handle.store(seen.moved(spot.page, spot.place.card()).0, Ordering::Release);
                self.leave_log(&objects.log, page);
                Ok(())
            }
            Err(error) => {
                handle.store(seen.0, Ordering::Release);
                self.leave_log(&objects.log, spot.page);
                Err(error)
            }
        }
    }

    /// Room for an object in the page that this thread fills, with its tag. The caller is inside a scope.
    pub(super) fn place_object(
        &self,
        record: &Record,
        objects: &Objects,
        object: ObjectId,
        class: LogClass,
        renewable: bool,
    ) -> Result<Spot, FarError> {
        let OwnObjects { pages, .. } = &record.objects;
        let cell = &pages[class.index()];
        loop {
            let (page, index) = match cell.get() {
                Some((page, index)) if index < class.capacity() => (page, index),
                Some((page, _)) => {
                    cell.set(None);
                    self.close_log(&objects.log, page);
                    continue;
                }
                None => (self.open_log(&objects.log, class)?, 0),
            };
            cell.set(Some((page, index + 1)));
            objects.log.enter(page);
            match self.near_log(record, page, renewable) {
                Ok(Some(frame)) => {
                    let place = Place::new(frame, class.card(index));
                    // SAFETY: the frame holds the page until our scope ends; nobody else writes this tag, because the page is
                    // open and this thread fills it; aligned (`tag_offset`).
                    unsafe {
                        let tag = self.frames.address(frame).add(class.tag_offset(index)).cast::<[u8; TAG_BYTES]>();
                        tag.write((object + 1).to_le_bytes());
                    }
                    return Ok(Spot { page, place });
                }
                // It has left before it was full; it is not worth fetching.
                Ok(None) => {
                    cell.set(None);
                    self.close_log(&objects.log, page);
                    self.leave_log(&objects.log, page);
                }
                Err(error) => {
                    self.leave_log(&objects.log, page);
                    return Err(error);
                }
            }
        }
    }

    /// The frame of a page that this thread has open, dirty; `None` if the page has left.
    fn near_log(&self, record: &Record, page: u32, renewable: bool) -> Result<Option<FrameId>, FarError> {
        let word = &self.words[page];
        let mut patience = Patience::new(self.patience);
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            match seen.create() {
                (next, Deref::Here(frame)) => {
                    if next == seen || self.exchange(word, seen, next) {
                        return Ok(Some(frame));
                    }
                }
                (next, Deref::Wait) => {
                    if next == seen || self.exchange(word, seen, next) {
                        patience.wait()?;
                    }
                }
                (_, Deref::Fetch) => return Ok(None),
                // Only whoever has it open makes it, so it is still Empty there.
                (_, Deref::Zero) => return self.bring(record, page, Want::Create, renewable).map(Some),
            }
        }
    }
}
