//! Slots in all interleavings: readers correct a guess while pages change their frames and the slot comes to name another object, with loom.
//!
//! Danger: a guess that was right is believed when the frame holds another page; a correction of
//! one object's guess is put on another; a reader finds bytes that are not made yet. Pages are
//! found and brought by the steps of the fault engine itself (`core::heap::fault`). The others are
//! those of `crates/farfield/src/heap/raw.rs`, `ptr/` and `eviction.rs`, with the same orderings.

mod models;

use core::cell::Cell;
use farfield_core::heap::fault::{AccessMode, FetchIntent, PageLookup, PageWords, land_page, look_up_page, peek_page};
use farfield_core::heap::{FrameId, FrameWord, SlotHint, State};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use models::{Scopes, check, read, write};

/// A page, as index in the model's tables.
const FIRST: usize = 0;
const SECOND: usize = 1;

/// What the object in a page is.
fn value(page: usize) -> u64 {
    100 + page as u64
}

struct Model {
    /// `page << 32 | place`, as `raw.rs` keeps it.
    slot: AtomicU64,
    words: [AtomicU64; 2],
    /// The bytes of frames 1 and 2.
    frames: [UnsafeCell<u64>; 2],
    scopes: Scopes,
}

// SAFETY: accesses to the cells are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Model {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Model {}

fn slot(page: usize, place: SlotHint) -> u64 {
    (page as u64) << 32 | u64::from(place.0)
}

/// Words of a reader that has loaded one of them, which it does not load again at first: two loads
/// in a row would only make more interleavings.
struct LoadedOnce<'a> {
    model: &'a Model,
    word: Cell<Option<FrameWord>>,
}

impl PageWords for LoadedOnce<'_> {
    fn load_page(&self, page: u32) -> FrameWord {
        self.word.take().unwrap_or_else(|| self.model.load_page(page))
    }

    fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool {
        self.model.exchange_page(page, seen, next)
    }
}

impl PageWords for Model {
    fn load_page(&self, page: u32) -> FrameWord {
        self.word(page as usize)
    }

    fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool {
        self.exchange(page as usize, seen, next)
    }
}

impl Model {
    /// The first page is near, in frame 1, where the slot guesses it; the second is far.
    fn new() -> Arc<Model> {
        let near = FrameWord::EMPTY.create().0.finish_load(FrameId(1), true);
        let copied = near.cool().and_then(FrameWord::claim_for_eviction).map(FrameWord::begin_writeback);
        let far = copied.and_then(FrameWord::finish_writeback).expect("the way out");
        Arc::new(Model {
            slot: AtomicU64::new(slot(FIRST, SlotHint::new(FrameId(1), 3))),
            words: [AtomicU64::new(near.0), AtomicU64::new(far.0)],
            frames: [UnsafeCell::new(value(FIRST)), UnsafeCell::new(0)],
            scopes: Scopes::new(),
        })
    }

    fn word(&self, page: usize) -> FrameWord {
        FrameWord(self.words[page].load(Ordering::Acquire))
    }

    fn exchange(&self, page: usize, seen: FrameWord, next: FrameWord) -> bool {
        self.words[page].compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn bytes(&self, frame: FrameId) -> &UnsafeCell<u64> {
        &self.frames[frame.0 as usize - 1]
    }

    /// One scope, in which what the slot names is read if it is near. A better guess is put in.
    fn get(&self, record: usize) {
        self.scopes.enter(record);
        let seen = self.slot.load(Ordering::Acquire);
        let (page, place) = ((seen >> 32) as usize, SlotHint(seen as u32));
        let word = self.word(page);
        let found = if word.confirms(place) { Some(place.frame()) } else { self.find(page, word, seen, place) };
        if let Some(frame) = found {
            assert_eq!(read(self.bytes(frame)), value(page));
        }
        self.scopes.leave(record);
    }

    fn find(&self, page: usize, word: FrameWord, seen: u64, place: SlotHint) -> Option<FrameId> {
        let words = LoadedOnce { model: self, word: Cell::new(Some(word)) };
        let PageLookup::Resident(frame, _) = look_up_page(&words, page as u32, AccessMode::Read) else { return None };
        let better = slot(page, place.in_frame(frame));
        let _ = self.slot.compare_exchange(seen, better, Ordering::Relaxed, Ordering::Relaxed);
        Some(frame)
    }

    /// The page leaves, if nobody uses it; the frame it had.
    fn evict(&self, page: usize) -> Option<FrameId> {
        let seen = self.word(page);
        let next = seen.cool().filter(|next| self.exchange(page, seen, *next) && next.state() == State::Cooling)?;
        let epoch = self.scopes.end_epoch();
        if !self.scopes.is_over(epoch) {
            return None;
        }
        let sealed = next.claim_for_eviction().filter(|sealed| self.exchange(page, next, *sealed))?;
        let copied = sealed.begin_writeback();
        if !self.exchange(page, sealed, copied) {
            return None;
        }
        let left = copied.finish_writeback().filter(|left| self.exchange(page, copied, *left))?;
        assert_eq!(left.state(), State::Far);
        sealed.frame()
    }

    /// The far page comes to this free frame.
    fn bring(&self, page: usize, frame: FrameId) {
        let claim = peek_page(self, page as u32);
        if claim.is_some_and(|claim| claim.take(self, false)) {
            write(self.bytes(frame), value(page));
            land_page(self, page as u32, Some(frame), FetchIntent::Read);
        }
    }
}

/// What the slot names leaves, its frame goes to another page, and it comes back elsewhere.
#[test]
fn a_guess_is_believed_only_while_it_is_right() {
    check(2, || {
        let model = Model::new();
        let readers = [0, 1].map(|record| {
            let model = model.clone();
            loom::thread::spawn(move || model.get(record))
        });
        if let Some(frame) = model.evict(FIRST) {
            model.bring(SECOND, frame);
            model.bring(FIRST, FrameId(2));
        }
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

/// The slot's first object is replaced by one in a page that has just come, while readers correct the guess.
#[test]
fn a_slot_comes_to_name_another_object_while_its_guess_is_corrected() {
    check(2, || {
        let model = Model::new();
        // Its guess is wrong already.
        model.slot.store(slot(FIRST, SlotHint::new(FrameId(2), 3)), Ordering::Relaxed);
        let readers = [0, 1].map(|record| {
            let model = model.clone();
            loom::thread::spawn(move || model.get(record))
        });
        model.bring(SECOND, FrameId(2));
        // Whoever stores a slot has made its object; the guess need not be right.
        model.slot.store(slot(SECOND, SlotHint::new(FrameId(1), 5)), Ordering::Release);
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

/// A reader that follows a corrected slot finds the object made: the correction passes on what the store released.
#[test]
fn a_correction_passes_on_that_the_object_is_made() {
    check(3, || {
        let model = Model::new();
        let maker = {
            let model = model.clone();
            loom::thread::spawn(move || {
                // In the page that is near already, where no frame word tells of it.
                write(model.bytes(FrameId(2)), value(FIRST));
                model.slot.store(1 << 63 | slot(FIRST, SlotHint::new(FrameId(1), 0)), Ordering::Release);
            })
        };
        let corrector = {
            let model = model.clone();
            loom::thread::spawn(move || {
                let seen = model.slot.load(Ordering::Acquire);
                if seen >> 63 == 1 {
                    let _ = model.slot.compare_exchange(seen, seen | 1, Ordering::Relaxed, Ordering::Relaxed);
                }
            })
        };
        if model.slot.load(Ordering::Acquire) >> 63 == 1 {
            assert_eq!(read(model.bytes(FrameId(2))), value(FIRST));
        }
        maker.join().unwrap();
        corrector.join().unwrap();
    });
}
