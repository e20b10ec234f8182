//! The far heap's protocol in all interleavings: scopes, rescue and eviction of one page, with
//! loom.
//!
//! Danger: a page leaves while a reference into it exists, a write is lost, or a frame is read
//! while it is written. The frame's bytes are a cell that loom watches: two accesses at once, of
//! which one writes, fail the model. A mutator takes the steps of the fault engine itself
//! (`core::heap::fault`). The others are those of `crates/farfield/src/heap/{threads,eviction}.rs`
//! and `fault/pins.rs`, with the same orderings.

mod models;

use farfield_core::heap::fault::{AccessMode, PageLookup, PageWords, look_up_page};
use farfield_core::heap::{FrameId, FrameWord, State};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use models::{Scopes, check, read, write};

const FRAME: FrameId = FrameId(1);

struct Model {
    word: AtomicU64,
    scopes: Scopes,
    /// Pins of the page.
    pins: AtomicU64,
    /// The value in the frame.
    frame: UnsafeCell<u64>,
    /// The far copy; only the evictor touches it.
    far: UnsafeCell<u64>,
}

// SAFETY: accesses to the cells are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Model {}

impl PageWords for Model {
    fn load_page(&self, _page: u32) -> FrameWord {
        FrameWord(self.word.load(Ordering::Acquire))
    }

    fn exchange_page(&self, _page: u32, seen: FrameWord, next: FrameWord) -> bool {
        self.exchange(seen, next)
    }
}

impl Model {
    fn new(word: FrameWord) -> Arc<Model> {
        Arc::new(Model {
            word: AtomicU64::new(word.0),
            scopes: Scopes::new(),
            pins: AtomicU64::new(0),
            frame: UnsafeCell::new(0),
            far: UnsafeCell::new(0),
        })
    }

    fn exchange(&self, seen: FrameWord, next: FrameWord) -> bool {
        self.word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// One look that waits for nothing: is the page near?
    fn got(&self, mode: AccessMode) -> bool {
        matches!(look_up_page(self, 0, mode), PageLookup::Resident(FRAME, _))
    }

    /// One scope, in which the value is incremented twice if the page is near. How often it was.
    fn mutate(&self, record: usize) -> u64 {
        self.scopes.enter(record);
        let mut done = 0;
        for _ in 0..4 {
            match look_up_page(self, 0, AccessMode::Write) {
                PageLookup::Resident(frame, _) => {
                    assert_eq!(frame, FRAME);
                    // A reference: it is used, and used again later in the scope.
                    for _ in 0..2 {
                        write(&self.frame, read(&self.frame) + 1);
                        done += 1;
                    }
                    break;
                }
                PageLookup::Loading | PageLookup::Retry => loom::thread::yield_now(),
                // The model has no way back from far.
                PageLookup::Far(_) | PageLookup::Empty(_) => break,
            }
        }
        self.scopes.leave(record);
        done
    }

    /// One round of the evictor; true if the page left.
    fn evict(&self) -> bool {
        let seen = FrameWord(self.word.load(Ordering::Acquire));
        let Some(next) = seen.cool() else { return false };
        if !self.exchange(seen, next) || next.state() != State::Cooling {
            return false;
        }
        let epoch = self.scopes.end_epoch();
        if !self.scopes.is_over(epoch) {
            return false;
        }
        let seen = FrameWord(self.word.load(Ordering::Acquire));
        let Some(sealed) = seen.claim_for_eviction() else { return false };
        if self.pins.load(Ordering::Acquire) > 0 {
            self.exchange(seen, seen.deref(false).0);
            return false;
        }
        if !self.exchange(seen, sealed) {
            return false;
        }
        let copy = read(&self.frame);
        let settle = |transition: fn(FrameWord) -> FrameWord| {
            let mut seen = FrameWord(self.word.load(Ordering::Acquire));
            while !self.exchange(seen, transition(seen)) {
                seen = FrameWord(self.word.load(Ordering::Acquire));
            }
        };
        settle(FrameWord::begin_writeback);
        write(&self.far, copy);
        let seen = FrameWord(self.word.load(Ordering::Acquire));
        let Some(next) = seen.finish_writeback() else { return false };
        let left = self.exchange(seen, next);
        if left {
            // The frame holds another page now.
            write(&self.frame, u64::MAX / 2);
        }
        left
    }

    /// The value, wherever it is.
    fn value(&self) -> u64 {
        match FrameWord(self.word.load(Ordering::Acquire)).state() {
            State::Far => read(&self.far),
            _ => read(&self.frame),
        }
    }
}

fn near() -> FrameWord {
    FrameWord::EMPTY.create().0.finish_load(FRAME, true)
}

#[test]
fn a_page_in_use_does_not_leave_and_no_write_is_lost() {
    loom::model(|| {
        let model = Model::new(near());
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.mutate(0));
        model.evict();
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), done);
    });
}

#[test]
fn a_page_is_cooled_twice_and_leaves_with_the_later_batch_only() {
    check(3, || {
        let model = Model::new(near());
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.mutate(0) + other.mutate(0));
        if !model.evict() {
            model.evict();
        }
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), done);
    });
}

#[test]
fn two_readers_take_a_page_back_at_once() {
    check(2, || {
        let model = Model::new(near());
        let reader = |record: usize, model: Arc<Model>| {
            move || {
                model.scopes.enter(record);
                if model.got(AccessMode::Read) {
                    assert_eq!(read(&model.frame), 0);
                }
                model.scopes.leave(record);
            }
        };
        let one = loom::thread::spawn(reader(0, model.clone()));
        let two = loom::thread::spawn(reader(1, model.clone()));
        model.evict();
        one.join().unwrap();
        two.join().unwrap();
        assert_eq!(model.value(), 0);
    });
}

/// An object that a collection has unlinked while a page is about to leave: both wait for scopes, and both move the epoch on.
/// The cell stands for what the scope may look at: the page in its frame, the object in its place.
#[test]
fn a_retired_object_and_a_page_wait_for_the_same_scope() {
    struct Retiring {
        page: Arc<Model>,
        /// Names the object; 0 when it is unlinked.
        slot: AtomicU64,
        object: UnsafeCell<u64>,
    }
    // SAFETY: as for `Model`.
    unsafe impl Sync for Retiring {}
    // SAFETY: nothing in it belongs to a thread.
    unsafe impl Send for Retiring {}

    check(3, || {
        let page = Model::new(near());
        let model = Arc::new(Retiring { page, slot: AtomicU64::new(1), object: UnsafeCell::new(7) });
        let reader = {
            let model = model.clone();
            move || {
                let Model { scopes, frame, .. } = &*model.page;
                scopes.enter(0);
                if model.slot.load(Ordering::Acquire) != 0 {
                    assert_eq!(read(&model.object), 7);
                }
                if model.page.got(AccessMode::Read) {
                    assert_eq!(read(frame), 0);
                }
                scopes.leave(0);
            }
        };
        let retirer = {
            let model = model.clone();
            move || {
                model.slot.store(0, Ordering::Release);
                let epoch = model.page.scopes.end_epoch();
                if model.page.scopes.is_over(epoch) {
                    write(&model.object, u64::MAX);
                }
            }
        };
        let (reader, retirer) = (loom::thread::spawn(reader), loom::thread::spawn(retirer));
        model.page.evict();
        reader.join().unwrap();
        retirer.join().unwrap();
    });
}

/// A scope begins inside an older one of its thread, which ends first: what the record shows then is younger than what it
/// showed when the page was dereferenced.
#[test]
fn a_scope_outlives_an_older_one_of_its_thread() {
    check(3, || {
        let model = Model::new(near());
        let other = model.clone();
        let mutator = loom::thread::spawn(move || {
            other.scopes.enter(0);
            let younger = other.scopes.now();
            let got = other.got(AccessMode::Write);
            // The older scope ends.
            other.scopes.show(0, younger);
            if got {
                write(&other.frame, read(&other.frame) + 1);
            }
            other.scopes.leave(0);
            u64::from(got)
        });
        if !model.evict() {
            model.evict();
        }
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), done);
    });
}

/// A page is pinned in a scope, and written after the scope has ended.
#[test]
fn a_pinned_page_does_not_leave() {
    check(3, || {
        let model = Model::new(near());
        let other = model.clone();
        let mutator = loom::thread::spawn(move || {
            other.scopes.enter(0);
            let got = other.got(AccessMode::Write);
            if got {
                other.pins.fetch_add(1, Ordering::Relaxed);
            }
            other.scopes.leave(0);
            if got {
                write(&other.frame, read(&other.frame) + 1);
                other.pins.fetch_sub(1, Ordering::Release);
            }
            u64::from(got)
        });
        if !model.evict() {
            model.evict();
        }
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), done);
    });
}
