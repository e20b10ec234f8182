//! The page plane: the slow path of a dereference, when the slot's guess was wrong or the page is
//! not near. On a miss the whole unit comes, to the same far address.
//!
//! Every heap has this plane. On other planes it serves the values that are too large for those.

use crate::error::FarError;
use crate::fault::NewUnit;
use crate::heap::{Backoff, HeapInner, Scope, ThreadState, count_use};
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::fault::AccessMode;
use farfield_core::heap::{DerefOutcome, FrameId, FrameWord, SlotHint, State};

/// Number of wrong guesses, of slots that lie in the arena, of which one is corrected.
const CORRECT_EVERY: u32 = 64;

impl HeapInner {
    /// Makes the object of a slot near and returns its place. The caller is inside a scope.
    ///
    /// The slot gets a better guess. A slot that lies in the arena is part of a page, which would
    /// have to be written again for a guess. So only one in 64 of those is corrected, which costs a
    /// small share of the time that a used slot saves.
    #[cold]
    pub(crate) fn find(
        &self,
        scope: &Scope<'_>,
        page: u32,
        slot: &AtomicU32,
        mode: AccessMode,
    ) -> Result<SlotHint, FarError> {
        let frame = self.fault_in(scope.record, page, mode, scope.is_renewable())?;
        Ok(self.guess(scope.record, slot, frame))
    }

    /// Returns the place of a slot's object in this frame, and stores it in the slot as its guess.
    pub(crate) fn guess(&self, record: &ThreadState, slot: &AtomicU32, frame: FrameId) -> SlotHint {
        let place = SlotHint(slot.load(Ordering::Relaxed)).in_frame(frame);
        if self.may_correct(record, slot.as_ptr() as usize) {
            slot.store(place.0, Ordering::Relaxed);
        }
        place
    }

    /// Checks whether it is time to correct the guess of the slot at this address.
    pub(crate) fn may_correct(&self, record: &ThreadState, slot: usize) -> bool {
        let tick = record.tick.get().wrapping_add(1);
        record.tick.set(tick);
        !self.frames.contains(slot) || tick.is_multiple_of(CORRECT_EVERY)
    }

    /// Returns the frame of the page, if it is near and no wait is needed. The caller is inside a
    /// scope.
    #[cold]
    pub(crate) fn near_now(&self, record: &ThreadState, page: u32) -> Option<FrameId> {
        let word = &self.words[page];
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            let (next, DerefOutcome::Resident(frame)) = seen.deref(false) else { return None };
            if next == seen || self.exchange(word, seen, next) {
                count_use(record, seen);
                return Some(frame);
            }
        }
    }

    /// Makes a unit that was Empty, of zeros, near and dirty.
    pub(crate) fn make_unit(&self, unit: NewUnit) -> Result<SlotHint, FarError> {
        let NewUnit { claim, pages, frame } = unit;
        let (word, claimed) = (&self.words[claim.page()], claim.claimed());
        self.occupy(claim.seen());
        if let Err(error) = self.make_zero(claim.page(), pages, frame) {
            self.frames.put(frame, pages);
            word.store(claimed.cancel_load(State::Empty).0, Ordering::Release);
            self.vacate(claimed.is_stored());
            return Err(error);
        }
        let made = claimed.finish_load(frame, true);
        word.store(made.0, Ordering::Release);
        self.note_changed(made);
        Ok(SlotHint::new(frame, 0))
    }

    /// Fills the frames of a unit that was Empty, and whose word we made Loading, with zeros.
    fn make_zero(&self, page: u32, pages: u32, frame: FrameId) -> Result<(), FarError> {
        self.claim(page + 1..page + pages)?;
        // SAFETY: the frames are ours since `take_frames`, and there are that many.
        unsafe { self.frames.address(frame).write_bytes(0, pages as usize * PAGE_BYTES) };
        self.frames.infos[frame.0].moved_in(page);
        Ok(())
    }

    /// Claims pages that are Empty: their words become Loading. In a unit of several pages, the
    /// words of all but the first stay so as long as the unit exists. Thus nobody discards what an
    /// earlier page there left in the pool. Waits for discards that are under way.
    pub(crate) fn claim(&self, pages: Range<u32>) -> Result<(), FarError> {
        let mut backoff = Backoff::new(self.patience);
        for page in pages.clone() {
            let word = &self.words[page];
            loop {
                let seen = FrameWord(word.load(Ordering::Acquire));
                match seen.create() {
                    (next, DerefOutcome::Zero) if self.exchange(word, seen, next) => break self.occupy(seen),
                    _ => {
                        if let Err(error) = backoff.wait() {
                            (pages.start..page).for_each(|claimed| self.unclaim(claimed));
                            return Err(error);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes a claimed page Empty again, as it was.
    pub(crate) fn unclaim(&self, page: u32) {
        let seen = FrameWord(self.words[page].load(Ordering::Acquire));
        self.words[page].store(seen.cancel_load(State::Empty).0, Ordering::Release);
        self.vacate(seen.is_stored());
    }
}
