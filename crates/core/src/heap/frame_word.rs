//! The frame word: where one page of a far heap is, as one atomic 64-bit word.
//!
//! ```text
//!  63          40 39  35 34 32 31           8 7     0
//! +--------------+------+-----+--------------+-------+
//! | frame        | 0    |state| place        | flags |
//! +--------------+------+-----+--------------+-------+
//! ```
//!
//! ```text
//!           fetch          arrived         cool            seal            copied           left
//!   Far ───────▶ Fetching ───────▶ Near ───────▶ Leaving ───────▶ Copying ───────▶ Copied ───────▶ Far
//!  Empty ──────▶     │               ▲◀─────────────┘               │ │              │
//!    ▲     create    │ gave_up       │◀─────────────────────────────┘ │ dropped      │
//!    │◀──────────────┘               │◀───────────────────────────────│──────────────┘
//!    └── release, from every state that nobody owns                   ▼ Far or Empty
//! ```
//!
//! *Place* is the frame number while the page is Near, and a number that no slot ever holds
//! otherwise. One comparison with a slot tells a mutator that its guess is right and the page
//! usable (`FrameWord::confirms`). *Leaving* means that slots do not find the page any more, so the
//! next user takes it back and marks it as referenced. That is the access mark of CLOCK, with a
//! cooling stage as in LeanStore: its price is paid when a page is about to leave and not at every
//! access. A page that came *ahead* of need is Near without a place until its first use, so that it
//! is known whether the prefetch was of use.
//!
//! Fetching and Copying have an owner, and others wait for it. In Copying the owner reads the bytes
//! while nobody can write them; it is short, because no I/O happens in it. In every other state, a
//! thread that needs the page takes it.
//!
//! Every transition is a pure function on a copy; the owner of the atomic runs the
//! compare-exchange.

use super::{FRAMES_MAX, FrameId, SlotHint};
use crate::cast::low_u32;

/// State of a page: where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Nowhere: the page holds no live object. The pool may still have an old copy of it (stored).
    Empty,
    /// In the pool.
    Far,
    /// Owned by a thread that brings it near, makes it, or discards its far copy.
    Loading,
    /// Near, and slots find it.
    Near,
    /// Near, and slots do not find it any more.
    Cooling,
    /// Near; no scope can have a reference into it, and the evictor reads it.
    Claimed,
    /// Near, and a copy of it is on its way to the pool.
    Writeback,
}

/// Action that a dereference has to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DerefOutcome {
    /// The page is usable in this frame.
    Resident(FrameId),
    /// The page is owned by another thread: look again soon.
    Wait,
    /// The caller now owns the page (Fetching) and reads it from the pool.
    Fetch,
    /// The caller now owns the page (Fetching) and provides zeros. Only for callers that make
    /// objects.
    Zero,
}

/// Word of one page of a far heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameWord(pub u64);

const DIRTY: u64 = 1;
const STORED: u64 = 1 << 1;
const REFERENCED: u64 = 1 << 2;
const WANTED: u64 = 1 << 3;
const AHEAD: u64 = 1 << 4;
const PLACE_MASK: u64 = 0xFFFF_FF00;
/// Place field of a page that slots do not find: no slot holds this frame number.
const NOWHERE: u64 = PLACE_MASK;
const STATE_SHIFT: u32 = 32;
const STATE_MASK: u64 = 7 << STATE_SHIFT;
const NEAR: u64 = 3 << STATE_SHIFT;
const FRAME_SHIFT: u32 = 40;

const _: () = assert!((FRAMES_MAX as u64) << 8 == NOWHERE);

/// The default is [`FrameWord::EMPTY`]: the state field of [`State::Empty`] is 0, and so is its
/// place field in fresh memory. No slot with a guess finds it, because guesses of 0 are never
/// confirmed to be usable (see [`FrameWord::confirms`]).
impl Default for FrameWord {
    fn default() -> FrameWord {
        FrameWord::EMPTY
    }
}

impl FrameWord {
    /// Word of a page that never was: all zeros, so that fresh memory is a table of these.
    pub const EMPTY: FrameWord = FrameWord(0);

    /// Returns the state of the page.
    #[inline]
    pub fn state(self) -> State {
        match (self.0 & STATE_MASK) >> STATE_SHIFT {
            0 => State::Empty,
            1 => State::Far,
            2 => State::Loading,
            3 => State::Near,
            4 => State::Cooling,
            5 => State::Claimed,
            6 => State::Writeback,
            other => unreachable!("frame word state {other}"),
        }
    }

    /// Returns the frame that holds the page, in the states in which one does.
    #[inline]
    pub fn frame(self) -> Option<FrameId> {
        match self.0 >> FRAME_SHIFT {
            0 => None,
            frame => Some(FrameId(low_u32(frame))),
        }
    }

    /// Checks whether the page must be written before it leaves, whatever its bytes are.
    #[inline]
    pub fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// Checks whether the pool holds, or may hold, a copy.
    #[inline]
    pub fn is_stored(self) -> bool {
        self.0 & STORED != 0
    }

    /// Checks whether the page was used since the clock hand came by.
    #[inline]
    pub fn is_referenced(self) -> bool {
        self.0 & REFERENCED != 0
    }

    /// Checks whether a thread waits for the end of Copying, or a task for that of Fetching.
    pub fn is_wanted(self) -> bool {
        self.0 & WANTED != 0
    }

    /// Checks whether the page was brought before anybody needed it, and has not been used since.
    #[inline]
    pub fn is_ahead(self) -> bool {
        self.0 & AHEAD != 0
    }

    /// Checks whether the page is Near in exactly the frame that the slot guesses: the one
    /// comparison of the fast path.
    ///
    /// A guess of frame 0 is confirmed by a word of fresh memory (Empty), which no live object's
    /// page has. Callers that cannot rule that out must not call this with frame 0.
    #[inline]
    pub fn confirms(self, place: SlotHint) -> bool {
        (low_u32(self.0) ^ place.0) < 1 << 8
    }

    /// Checks whether the guess stands for this card of the page: the page is Near in the guessed
    /// frame. A guess of frame 0 stands for nothing.
    #[inline(always)]
    pub fn confirms_card(self, card: u8, guess: SlotHint) -> bool {
        self.confirms(guess) && guess.card() == card && guess.frame() != FrameId(0)
    }

    /// Checks [`FrameWord::confirms`], and that writing needs no further mark.
    #[inline]
    pub fn confirms_dirty(self, place: SlotHint) -> bool {
        self.confirms(place) && self.0 & DIRTY != 0
    }

    /// Returns the frame of a page that is Near and was used before, for callers that find it
    /// without a slot.
    #[inline]
    pub fn near(self) -> Option<FrameId> {
        (self.0 & (STATE_MASK | AHEAD) == NEAR).then_some(FrameId((self.0 >> FRAME_SHIFT) as u32))
    }

    /// Returns [`FrameWord::near`] if writing needs no further mark.
    #[inline]
    pub fn near_dirty(self) -> Option<FrameId> {
        (self.0 & (STATE_MASK | AHEAD | DIRTY) == NEAR | DIRTY).then_some(FrameId((self.0 >> FRAME_SHIFT) as u32))
    }

    fn with_state(self, state: State, frame: Option<FrameId>) -> FrameWord {
        let bits: u64 = match state {
            State::Empty => 0,
            State::Far => 1,
            State::Loading => 2,
            State::Near => 3,
            State::Cooling => 4,
            State::Claimed => 5,
            State::Writeback => 6,
        };
        let frame = frame.map_or(0, |frame| u64::from(frame.0));
        let place = if state == State::Near { frame << 8 } else { NOWHERE };
        let mut flags = DIRTY | STORED | REFERENCED | WANTED;
        if matches!(state, State::Cooling | State::Claimed) {
            flags |= AHEAD;
        }
        FrameWord(frame << FRAME_SHIFT | bits << STATE_SHIFT | place | self.0 & flags)
    }

    fn set(self, flag: u64, on: bool) -> FrameWord {
        if on { FrameWord(self.0 | flag) } else { FrameWord(self.0 & !flag) }
    }

    /// Decides what a mutator that needs the page has to do, to write if `write`. An Empty page has
    /// no object that could be dereferenced. That is a bug of ours, and the caller must report it.
    #[inline]
    pub fn deref(self, write: bool) -> (FrameWord, DerefOutcome) {
        match (self.state(), self.frame()) {
            (State::Near, frame @ Some(here)) => {
                (self.with_state(State::Near, frame).set(DIRTY, self.is_dirty() || write), DerefOutcome::Resident(here))
            }
            (State::Cooling, Some(frame)) => {
                let word = self.with_state(State::Near, Some(frame)).set(REFERENCED, true);
                (word.set(DIRTY, self.is_dirty() || write), DerefOutcome::Resident(frame))
            }
            // The copy under way is already out of date.
            (State::Writeback, Some(frame)) => (
                self.with_state(State::Near, Some(frame)).set(REFERENCED, true).set(DIRTY, true),
                DerefOutcome::Resident(frame),
            ),
            (State::Claimed, _) => (self.set(WANTED, true), DerefOutcome::Wait),
            (State::Far, _) => (self.with_state(State::Loading, None), DerefOutcome::Fetch),
            (State::Loading | State::Empty, _) => (self, DerefOutcome::Wait),
            (State::Near | State::Cooling | State::Writeback, None) => unreachable!("near without a frame"),
        }
    }

    /// Decides what a reader has to do whose access says nothing of the next one. Like
    /// [`FrameWord::deref`] for reading, but the page does not count as used.
    #[inline]
    pub fn peek(self) -> (FrameWord, DerefOutcome) {
        match (self.state(), self.frame()) {
            (State::Near, Some(frame)) => (self, DerefOutcome::Resident(frame)),
            (State::Cooling | State::Writeback, _) => {
                let (word, outcome) = self.deref(false);
                (word.set(REFERENCED, self.is_referenced()), outcome)
            }
            _ => self.deref(false),
        }
    }

    /// Decides what a mutator that makes an object in the page has to do. Like [`FrameWord::deref`]
    /// for writing, but an Empty page is made.
    #[inline]
    pub fn create(self) -> (FrameWord, DerefOutcome) {
        match self.state() {
            State::Empty => (self.with_state(State::Loading, None), DerefOutcome::Zero),
            _ => self.deref(true),
        }
    }

    /// Marks that a task waits for the Fetching page, and is to be told when it arrives. `None` if
    /// the page is not on its way.
    pub fn want(self) -> Option<FrameWord> {
        (self.state() == State::Loading).then(|| self.set(WANTED, true))
    }

    /// Makes a Fetching page Near; its owner has filled `frame`. `dirty` unless it equals its far
    /// copy.
    pub fn finish_load(self, frame: FrameId, dirty: bool) -> FrameWord {
        assert!(self.state() == State::Loading && frame.0 != 0 && frame.0 < FRAMES_MAX);
        self.with_state(State::Near, Some(frame)).set(DIRTY, dirty).set(REFERENCED | WANTED, false)
    }

    /// Makes a Fetching page Near and ahead; its owner has filled `frame` from the far copy, before
    /// anybody needs it.
    pub fn finish_prefetch(self, frame: FrameId) -> FrameWord {
        let word = self.finish_load(frame, false);
        FrameWord(word.0 | NOWHERE | AHEAD)
    }

    /// Returns a Fetching page to `origin`, Far or Empty; its owner gives up.
    pub fn cancel_load(self, origin: State) -> FrameWord {
        assert!(self.state() == State::Loading && matches!(origin, State::Far | State::Empty));
        self.with_state(origin, None).set(WANTED, false)
    }

    /// Makes a Fetching page, which was Empty, Far from the beginning; its owner has had it written
    /// at the pool.
    pub fn finish_far_create(self) -> FrameWord {
        assert!(self.state() == State::Loading);
        self.with_state(State::Far, None).set(STORED, true).set(DIRTY | REFERENCED | WANTED, false)
    }

    /// Makes a Fetching page Empty that may have been written at the pool, and is not wanted any
    /// more. The copy there is discarded later.
    pub fn abandon_far_create(self) -> FrameWord {
        assert!(self.state() == State::Loading);
        self.with_state(State::Empty, None).set(STORED, true).set(DIRTY | REFERENCED | WANTED, false)
    }

    /// Handles a visit of the clock hand. A referenced page loses the mark and stays; another
    /// becomes Leaving. `None` if there is nothing to do.
    pub fn cool(self) -> Option<FrameWord> {
        match self.state() {
            State::Near if self.is_referenced() => Some(self.set(REFERENCED, false)),
            State::Near => Some(self.with_state(State::Cooling, self.frame())),
            _ => None,
        }
    }

    /// Makes a Leaving page Copying: the scopes that could refer to it are over, and the evictor
    /// takes it. `None` if a mutator took it back.
    pub fn claim_for_eviction(self) -> Option<FrameWord> {
        (self.state() == State::Cooling).then(|| self.with_state(State::Claimed, self.frame()))
    }

    /// Makes a Copying page Near: it stays.
    pub fn keep_near(self) -> FrameWord {
        assert!(self.state() == State::Claimed);
        self.with_state(State::Near, self.frame()).set(WANTED, false).set(REFERENCED, true)
    }

    /// Makes a Copying page Near and dirty: it stays, and a part of it was written to the pool.
    pub fn keep_near_dirty(self) -> FrameWord {
        self.keep_near().set(DIRTY | STORED, true)
    }

    /// Ends Copying for a page that needs no copy: it equals its far copy, or (`empty`) has no live
    /// object. Its frame is free now.
    pub fn dropped(self, empty: bool) -> FrameWord {
        assert!(self.state() == State::Claimed && (empty || self.is_stored() && !self.is_dirty()));
        let word = self.with_state(if empty { State::Empty } else { State::Far }, None);
        word.set(DIRTY | WANTED | REFERENCED, false)
    }

    /// Prepares a page that is near and stays there for a copy to the pool, which the evictor is
    /// about to make; `None` if the page is not near, or is owned. The page counts as clean from
    /// here on: who writes it later marks it again, or its checksum differs from the copy's.
    pub fn begin_flush(self) -> Option<FrameWord> {
        matches!(self.state(), State::Near | State::Cooling).then(|| self.set(DIRTY, false).set(STORED, true))
    }

    /// Marks a page whose copy did not arrive; `None` if it is not near any more, or is owned.
    pub fn fail_flush(self) -> Option<FrameWord> {
        matches!(self.state(), State::Near | State::Cooling).then(|| self.set(DIRTY, true))
    }

    /// Makes a Copying page Copied: the copy is about to be written.
    pub fn begin_writeback(self) -> FrameWord {
        assert!(self.state() == State::Claimed);
        self.with_state(State::Writeback, self.frame()).set(STORED, true).set(WANTED, false)
    }

    /// Makes a Copied page Far, because the copy is in the pool; its frame is free. `None` if a
    /// mutator took the page back.
    pub fn finish_writeback(self) -> Option<FrameWord> {
        (self.state() == State::Writeback).then(|| self.with_state(State::Far, None).set(DIRTY | REFERENCED, false))
    }

    /// Makes a Copied page Near again, because the copy did not reach the pool. `None` if a mutator
    /// took the page back already.
    pub fn fail_writeback(self) -> Option<FrameWord> {
        let stays = || self.with_state(State::Near, self.frame()).set(DIRTY | REFERENCED, true);
        (self.state() == State::Writeback).then(stays)
    }

    /// Makes the page Empty: its last object is gone, so nothing can refer to it. Returns the frame
    /// that it had, which is free. `None` while another thread owns the page: look again soon.
    pub fn release(self) -> Option<(FrameWord, Option<FrameId>)> {
        let frame = match self.state() {
            State::Loading | State::Claimed => return None,
            State::Empty | State::Far => None,
            State::Near | State::Cooling | State::Writeback => self.frame(),
        };
        Some((self.with_state(State::Empty, None).set(DIRTY | REFERENCED, false), frame))
    }

    /// Makes a page Empty that was inside a unit of several pages. The word of the unit's first
    /// page spoke for all of them, while the page's own word stayed Fetching. The unit is gone; the
    /// pool has a copy of the page if it has one of the unit.
    pub fn unit_released(self, stored: bool) -> FrameWord {
        assert!(self.state() == State::Loading);
        self.with_state(State::Empty, None).set(STORED, stored || self.is_stored()).set(WANTED, false)
    }

    /// Takes ownership (Fetching) of an Empty page of which the pool has an old copy, while the
    /// caller discards the copy. Ends with [`FrameWord::discarded`] or [`FrameWord::cancel_load`].
    pub fn discard(self) -> Option<FrameWord> {
        (self.state() == State::Empty && self.is_stored()).then(|| self.with_state(State::Loading, None))
    }

    /// Ends a discard: the far copy is gone.
    pub fn discarded(self) -> FrameWord {
        assert!(self.state() == State::Loading);
        FrameWord::EMPTY
    }
}

#[cfg(test)]
pub(super) use tests::reachable;

#[cfg(test)]
mod tests {
    //! Guards against words that two parties read differently. Exhaustive over everything reachable.
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    const FRAMES: [FrameId; 2] = [FrameId(1), FrameId(FRAMES_MAX - 1)];

    fn next(word: FrameWord) -> Vec<FrameWord> {
        let mut next = vec![word.deref(false).0, word.deref(true).0, word.peek().0, word.create().0];
        next.extend(word.cool());
        next.extend(word.claim_for_eviction());
        next.extend(word.finish_writeback());
        next.extend(word.fail_writeback());
        next.extend(word.release().map(|(word, _)| word));
        next.extend(word.discard());
        next.extend(word.want());
        next.extend(word.begin_flush());
        next.extend(word.fail_flush());
        match word.state() {
            State::Loading => {
                next.extend(FRAMES.iter().flat_map(|f| [word.finish_load(*f, false), word.finish_load(*f, true)]));
                next.extend(FRAMES.iter().map(|f| word.finish_prefetch(*f)));
                next.extend([word.cancel_load(State::Empty), word.discarded()]);
                next.extend([word.unit_released(false), word.unit_released(true)]);
                next.extend([word.finish_far_create(), word.abandon_far_create()]);
                // Only what was Far goes back to Far.
                next.extend(word.is_stored().then(|| word.cancel_load(State::Far)));
            }
            State::Claimed => {
                next.extend([word.keep_near(), word.keep_near_dirty(), word.begin_writeback(), word.dropped(true)]);
                next.extend((word.is_stored() && !word.is_dirty()).then(|| word.dropped(false)));
            }
            _ => {}
        }
        next
    }

    /// Returns all words that transitions can make.
    pub(crate) fn reachable() -> Vec<FrameWord> {
        crate::words::reachable(FrameWord::EMPTY, next)
    }

    #[test]
    fn a_slot_is_confirmed_by_a_near_page_in_its_frame_and_by_nothing_else() {
        let words = reachable();
        assert!(words.len() >= 50, "{}", words.len());
        for word in words {
            for frame in [FrameId(1), FrameId(2), FrameId(FRAMES_MAX - 1)] {
                for card in [0, 1, 255] {
                    let usable = word.state() == State::Near && word.frame() == Some(frame) && !word.is_ahead();
                    assert_eq!(word.confirms(SlotHint::new(frame, card)), usable, "{word:?}");
                    assert_eq!(word.confirms_dirty(SlotHint::new(frame, card)), usable && word.is_dirty());
                    assert_eq!(word.confirms_card(card, SlotHint::new(frame, card)), usable);
                    assert!(!word.confirms_card(card ^ 1, SlotHint::new(frame, card)));
                }
            }
            let near = if word.state() == State::Near && !word.is_ahead() { word.frame() } else { None };
            assert_eq!(word.near(), near);
            assert_eq!(word.near_dirty(), near.filter(|_| word.is_dirty()));
            // A slot without a guess is confirmed by fresh memory only.
            assert_eq!(word.confirms(SlotHint::new(FrameId(0), 9)), word == FrameWord::EMPTY);
            assert!(!word.confirms_card(9, SlotHint::new(FrameId(0), 9)));
        }
    }

    #[test]
    fn invariants_hold_on_every_reachable_word() {
        for word in reachable() {
            match word.state() {
                State::Empty => assert!(!word.is_dirty() && !word.is_wanted() && word.frame().is_none()),
                State::Far => assert!(word.is_stored() && !word.is_dirty() && word.frame().is_none()),
                State::Loading => assert!(word.frame().is_none()),
                State::Near | State::Cooling => assert!(word.frame().is_some() && !word.is_wanted()),
                State::Claimed => assert!(word.frame().is_some()),
                State::Writeback => assert!(word.frame().is_some() && word.is_stored()),
            }
        }
    }

    /// What came ahead of need is found by its first use, which counts it; one that leaves first is known, too.
    #[test]
    fn pages_ahead_are_counted_once() {
        for word in reachable().into_iter().filter(|word| word.is_ahead()) {
            assert!(matches!(word.state(), State::Near | State::Cooling | State::Claimed), "{word:?}");
            if word.state() != State::Claimed {
                assert!(matches!(word.deref(false), (after, DerefOutcome::Resident(_)) if !after.is_ahead()));
            }
            assert!(word.cool().is_none_or(FrameWord::is_ahead));
            assert!(word.claim_for_eviction().is_none_or(FrameWord::is_ahead));
        }
    }

    #[test]
    fn an_owned_page_cannot_be_claimed() {
        for word in reachable() {
            if matches!(word.state(), State::Loading | State::Claimed) {
                assert_eq!(word.deref(true).1, DerefOutcome::Wait);
                assert_eq!(word.create().1, DerefOutcome::Wait);
                assert_eq!(word.deref(false).0.state(), word.state());
                assert!(word.cool().is_none() && word.claim_for_eviction().is_none() && word.release().is_none());
                assert!(
                    word.finish_writeback().is_none() && word.fail_writeback().is_none() && word.discard().is_none()
                );
            }
        }
    }

    /// A write is never forgotten: from a dirty page no way leads to Far that does not go through a copy.
    #[test]
    fn dirty_pages_do_not_leave_uncopied() {
        for word in reachable().into_iter().filter(|word| word.is_dirty()) {
            for after in next(word) {
                let lost = matches!(after.state(), State::Far) && word.state() != State::Writeback;
                assert!(!lost || word.state() == State::Loading, "{word:?} -> {after:?}");
            }
        }
        // What is taken back while its copy is under way may be written meanwhile.
        for word in reachable().into_iter().filter(|word| word.state() == State::Writeback) {
            assert!(word.deref(false).0.is_dirty());
        }
    }

    #[test]
    fn a_referenced_page_gets_a_second_chance() {
        for word in reachable().into_iter().filter(|word| word.state() == State::Near) {
            let cooled = word.cool().unwrap();
            assert_eq!(cooled.state() == State::Near, word.is_referenced());
            assert!(!cooled.is_referenced());
        }
        for word in reachable().into_iter().filter(|word| word.state() == State::Cooling) {
            assert!(word.deref(false).0.is_referenced());
        }
    }

    #[test]
    fn released_pages_give_their_frame_back_once() {
        for word in reachable() {
            if let Some((after, frame)) = word.release() {
                assert_eq!(frame, word.frame());
                assert_eq!((after.state(), after.frame()), (State::Empty, None));
                assert_eq!(after.is_stored(), word.is_stored(), "the far copy is discarded later");
            }
        }
    }
}
