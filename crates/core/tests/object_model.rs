//! The object plane's protocol in all interleavings, with loom: an object that is moved while it is used.
//!
//! Danger: a reader has a reference into a place that the object has left, two threads bring one object, or a log page's number is
//! used again while somebody still believes an old handle; on the hybrid plane, an object is taken out of a page that comes near whole, or is
//! changed there meanwhile. The bytes of both places are cells that loom watches. Mutators take the
//! steps of the fault engine itself (`core::heap::fault`); the others are those of the evacuator.

mod models;

use farfield_core::heap::fault::{
    AccessMode, FarObject, FetchIntent, ObjectLookup, ObjectWords, PageWords, fetch_log_page, land_object, land_page,
    lock_object, look_up_object,
};
use farfield_core::heap::{
    DerefOutcome, FrameId, FrameWord, Handle, IngressPath, LogClass, LogWord, ObjectLocation, State,
};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use models::{Scopes, check, read, write};

/// The object moves from page 0 in frame 1 to page 1 in frame 2; or to page 2, which only the evacuator fills.
const PAGES: usize = 3;
/// The object's value at first.
const START: u64 = 7;

struct Model {
    handle: AtomicU64,
    words: [AtomicU64; PAGES],
    /// Of page 0, in which the object is alone; and of page 1, to which it comes.
    logs: [AtomicU32; 2],
    scopes: Scopes,
    /// The object's place in each page's frame.
    frames: [UnsafeCell<u64>; PAGES],
    /// The object's place in page 0 at the server.
    far: UnsafeCell<u64>,
}

// SAFETY: accesses to the cells are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Model {}

fn near(page: usize) -> FrameWord {
    FrameWord::EMPTY.create().0.finish_load(FrameId(page as u32 + 1), true)
}

fn far() -> FrameWord {
    let sealed = near(0).cool().and_then(FrameWord::claim_for_eviction).unwrap();
    sealed.begin_writeback().finish_writeback().unwrap()
}

/// The log word of page 0.
fn first_log() -> LogWord {
    LogWord::opened(LogClass::from_index(0)).add().closed().0.leave(IngressPath::Page)
}

impl PageWords for Model {
    fn load_page(&self, page: u32) -> FrameWord {
        self.word(page as usize)
    }

    fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool {
        self.exchange(page as usize, seen, next)
    }
}

impl ObjectWords for Model {
    fn load_handle(&self, _object: u32) -> Handle {
        Handle(self.handle.load(Ordering::Acquire))
    }

    fn exchange_handle(&self, _object: u32, seen: Handle, next: Handle) -> bool {
        self.handle.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn load_log(&self, page: u32) -> LogWord {
        LogWord(self.logs[page as usize].load(Ordering::SeqCst))
    }

    fn update_log(&self, page: u32, transition: impl Fn(LogWord) -> (LogWord, bool)) -> bool {
        self.update_word(page, |word| Some(transition(word))) == Some(true)
    }

    /// `HeapInner::retire_log`: the last object has left the Far page 0.
    fn retire_log(&self, page: u32) {
        assert_eq!(page, 0);
        let seen = self.word(0);
        let (next, frame) = seen.release().unwrap();
        assert_eq!(frame, None);
        assert!(self.exchange(0, seen, next));
    }
}

impl Model {
    /// The object is in page 0, whose word is this.
    fn new(first: FrameWord) -> Arc<Model> {
        let (in_frame, in_pool) = if first.state() == State::Far { (0, START) } else { (START, 0) };
        Arc::new(Model {
            handle: AtomicU64::new(Handle::settle(0, 0).0),
            words: [first, near(1), near(2)].map(|word| AtomicU64::new(word.0)),
            logs: [first_log(), LogWord::opened(LogClass::from_index(0))].map(|log| AtomicU32::new(log.0)),
            scopes: Scopes::new(),
            frames: [in_frame, 0, 0].map(UnsafeCell::new),
            far: UnsafeCell::new(in_pool),
        })
    }

    fn word(&self, page: usize) -> FrameWord {
        FrameWord(self.words[page].load(Ordering::Acquire))
    }

    fn exchange(&self, page: usize, seen: FrameWord, next: FrameWord) -> bool {
        self.words[page].compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// `LogPages::update`.
    fn update_word<R>(&self, page: u32, transition: impl Fn(LogWord) -> Option<(LogWord, R)>) -> Option<R> {
        let log = &self.logs[page as usize];
        loop {
            let seen = LogWord(log.load(Ordering::Relaxed));
            let (next, result) = transition(seen)?;
            if log.compare_exchange(seen.0, next.0, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                return Some(result);
            }
        }
    }

    fn update<R>(&self, transition: impl Fn(LogWord) -> Option<(LogWord, R)>) -> Option<R> {
        self.update_word(0, transition)
    }

    /// A transition that may be the end of page 0.
    fn end(&self, transition: impl Fn(LogWord) -> (LogWord, bool)) {
        self.end_log(0, transition);
    }

    /// `HeapInner::fault_in_object`, with a few looks: the page in whose frame the object is. On
    /// this path, if it is far.
    fn seek(&self, path: IngressPath) -> Option<usize> {
        for _ in 0..3 {
            match look_up_object(self, 0, AccessMode::Write, |_, _| {}) {
                ObjectLookup::Resident(place, _) => return Some(place.frame().0 as usize - 1),
                ObjectLookup::Far(_) if path == IngressPath::Page => self.bring_page(),
                ObjectLookup::Far(far) => self.bring(far),
                ObjectLookup::Relocating | ObjectLookup::Loading(_) | ObjectLookup::Retry => loom::thread::yield_now(),
            }
        }
        None
    }

    /// Bringing the object to the other place, as `FetchTarget::depart` and `land_object` do.
    fn bring(&self, far: FarObject) {
        // Whoever is not the first gives the place up; here it is counted by the first alone.
        if lock_object(self, far, LogClass::from_index(0), false) {
            self.update_log(1, |word| (word.expect(), false));
            write(&self.frames[1], read(&self.far));
            land_object(self, 0, 0, (1, 0), Some(FetchIntent::Write));
        }
    }

    /// `HeapInner::depart_page`, and its landing.
    fn bring_page(&self) {
        if fetch_log_page(self, 0, false) {
            write(&self.frames[0], read(&self.far));
            land_page(self, 0, Some(FrameId(1)), FetchIntent::Read);
            self.end(|word| word.fetched(true));
        }
    }

    /// The evictor writes page 0, which is near.
    fn evict(&self) {
        let seen = self.word(0);
        let Some(next) = seen.cool() else { return };
        if !self.exchange(0, seen, next) || next.state() != State::Cooling {
            return;
        }
        let epoch = self.scopes.end_epoch();
        let seen = self.word(0);
        let Some(sealed) = seen.claim_for_eviction().filter(|_| self.scopes.is_over(epoch)) else { return };
        if self.exchange(0, seen, sealed) {
            write(&self.far, read(&self.frames[0]));
            let mut seen = self.word(0);
            while !self.exchange(0, seen, seen.begin_writeback().finish_writeback().unwrap()) {
                seen = self.word(0);
            }
            // The frame holds something else now.
            write(&self.frames[0], u64::MAX / 2);
        }
    }

    /// `Evacuator::merge`: what is left in the Far page 0 goes to page 2; true if it was there. The evictor discards, too, and uses
    /// page 0 for another object, if nobody can remember it.
    fn merge(&self) -> bool {
        let mut merged = false;
        let goes = self.update(|word| Some((word.go()?, ()))).is_some();
        if goes && self.word(0).state() == State::Far {
            let bytes = read(&self.far);
            let here = Handle(self.handle.load(Ordering::Acquire));
            if here.is_at(0, 0) {
                write(&self.frames[2], bytes);
                let moved = here.moved(2, 0);
                merged = self.handle.compare_exchange(here.0, moved.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            }
        }
        if merged {
            self.end(LogWord::remove);
        }
        if goes {
            self.end(LogWord::gone);
        }
        if self.word(0).state() == State::Empty {
            write(&self.far, u64::MAX / 2);
            let retired = self.scopes.end_epoch();
            if self.scopes.is_over(retired) {
                write(&self.frames[0], u64::MAX / 2);
                assert!(self.exchange(0, self.word(0), near(0)));
            }
        }
        merged
    }

    /// One scope, in which the object is incremented, if it is found; how often.
    fn increment(&self, record: usize) -> u64 {
        self.increment_by(record, IngressPath::Object)
    }

    fn increment_by(&self, record: usize, path: IngressPath) -> u64 {
        self.scopes.enter(record);
        let found = self.seek(path);
        if let Some(page) = found {
            // A reference: it is used, and used again later in the scope.
            write(&self.frames[page], read(&self.frames[page]) + 1);
            write(&self.frames[page], read(&self.frames[page]) + 1);
        }
        self.scopes.leave(record);
        found.map_or(0, |_| 2)
    }

    /// The evacuator moves the object out of page 0, which becomes Empty and, if nobody can remember it, is used for another.
    fn evacuate(&self) {
        let seen = self.word(0);
        let Some(next) = seen.cool() else { return };
        if !self.exchange(0, seen, next) || next.state() != State::Cooling {
            return;
        }
        let epoch = self.scopes.end_epoch();
        if !self.scopes.is_over(epoch) {
            return;
        }
        let seen = self.word(0);
        let Some(sealed) = seen.claim_for_eviction() else { return };
        if !self.exchange(0, seen, sealed) {
            return;
        }
        write(&self.frames[1], read(&self.frames[0]));
        let here = Handle(self.handle.load(Ordering::Acquire));
        let moved = here.moved(1, 0);
        assert!(self.handle.compare_exchange(here.0, moved.0, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        let mut seen = self.word(0);
        while !self.exchange(0, seen, seen.dropped(true)) {
            seen = self.word(0);
        }
        // The frame holds something else now.
        write(&self.frames[0], u64::MAX / 2);
        let retired = self.scopes.end_epoch();
        if self.scopes.is_over(retired) {
            // So does the page, in the same frame, which an old slot may guess.
            let (seen, fresh) = (self.word(0), near(0));
            let _ = self.exchange(0, seen, fresh);
        }
    }

    /// Another object lives in page 0, so that it does not die.
    fn add_company(&self) {
        self.update(|word| Some((word.reopened()?.add().closed().0, ())));
    }

    /// `HeapInner::reopen`, and the object's place filled if it is free: was it?
    fn refill(&self, record: usize) -> bool {
        self.scopes.enter(record);
        let seen = self.word(0);
        let (next, what) = seen.create();
        let is_near = matches!(what, DerefOutcome::Resident(_)) && (next == seen || self.exchange(0, seen, next));
        let is_ours = is_near && self.update(|word| Some((word.reopened()?, ()))).is_some();
        let is_free = is_ours && !Handle(self.handle.load(Ordering::Acquire)).is_at(0, 0);
        if is_free {
            self.update(|word| Some((word.add(), ())));
            write(&self.frames[0], START * 3);
        }
        if is_ours {
            self.end(LogWord::closed);
        }
        self.scopes.leave(record);
        is_free
    }

    /// The object's owner uses it a last time, if it is near, and frees it.
    /// `HeapInner::free_object`
    fn free(&self, record: usize) {
        self.scopes.enter(record);
        let seen = Handle(self.handle.load(Ordering::Acquire));
        if self.word(0).deref(false).1 == DerefOutcome::Resident(FrameId(1)) {
            assert_eq!(read(&self.frames[0]), START);
        }
        self.scopes.leave(record);
        let free = Handle::free(None);
        assert!(self.handle.compare_exchange(seen.0, free.0, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        self.end(LogWord::remove);
    }

    fn value(&self) -> u64 {
        match Handle(self.handle.load(Ordering::Acquire)).location() {
            ObjectLocation::At { page: 0, .. } if self.word(0).state() == State::Far => read(&self.far),
            ObjectLocation::At { page, .. } => read(&self.frames[page as usize]),
            other => panic!("{other:?} at rest"),
        }
    }
}

/// A mutator increments the object while something else is done: nothing is lost.
fn increments_stay(preemptions: usize, first: fn() -> FrameWord, mutate: fn(&Model) -> u64, meanwhile: fn(&Model)) {
    check(preemptions, move || {
        let model = Model::new(first());
        let other = model.clone();
        let mutator = loom::thread::spawn(move || mutate(&other));
        meanwhile(&model);
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), START + done);
    });
}

/// Increments of two threads on one object are the program's to order; here each only looks, and the one who is first brings it.
fn two_look(paths: [IngressPath; 2], may_be_in: &'static [usize]) {
    check(3, move || {
        let model = Model::new(far());
        let threads = [0, 1].map(|record| {
            let model = model.clone();
            loom::thread::spawn(move || {
                model.scopes.enter(record);
                if let Some(page) = model.seek(paths[record]) {
                    assert!(may_be_in.contains(&page));
                    assert_eq!(read(&model.frames[page]), START);
                }
                model.scopes.leave(record);
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(model.value(), START);
    });
}

#[test]
fn an_object_moves_between_uses_and_not_under_them() {
    increments_stay(4, || near(0), |model| model.increment(0), Model::evacuate);
}

#[test]
fn an_object_moves_while_scopes_come_and_go() {
    increments_stay(3, || near(0), |model| model.increment(0) + model.increment(0), Model::evacuate);
}

#[test]
fn two_threads_bring_one_object_once() {
    two_look([IngressPath::Object; 2], &[1]);
}

/// What is left in a far page is brought together while it is missed: one of them moves it.
#[test]
fn an_object_of_a_far_page_is_merged_or_missed() {
    check(4, || {
        let model = Model::new(far());
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.increment(0));
        let merged = model.merge();
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), START + done);
        let there = if merged { 2 } else { 1 };
        assert!(done == 0 || Handle(model.handle.load(Ordering::Acquire)).is_at(there, 0));
    });
}

/// The object's place is filled after its owner has used it for the last time, or not at all.
#[test]
fn a_place_is_filled_when_its_object_is_gone() {
    check(4, || {
        let model = Model::new(near(0));
        model.add_company();
        let other = model.clone();
        let owner = loom::thread::spawn(move || other.free(0));
        let filled = model.refill(1);
        owner.join().unwrap();
        let now = if filled { START * 3 } else { START };
        assert_eq!(read(&model.frames[0]), now);
        assert!(filled || model.refill(1));
    });
}

/// A page whose holes are filled leaves before that, or after it with what came there.
#[test]
fn a_page_does_not_leave_while_it_is_filled() {
    check(4, || {
        let model = Model::new(near(0));
        model.add_company();
        model.free(1);
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.refill(0));
        model.evict();
        let filled = mutator.join().unwrap();
        let value = if filled { START * 3 } else { START };
        let cell = if model.word(0).state() == State::Far { &model.far } else { &model.frames[0] };
        assert_eq!(read(cell), value);
    });
}

/// One thread wants the object alone, and another one its page.
#[test]
fn a_page_comes_whole_or_an_object_out_of_it() {
    two_look([IngressPath::Object, IngressPath::Page], &[0, 1]);
}

/// A page that came whole and was changed leaves, while somebody wants the object alone.
#[test]
fn a_page_that_came_whole_leaves_changed() {
    let mutate = |model: &Model| model.increment_by(0, IngressPath::Page) + model.increment_by(0, IngressPath::Object);
    increments_stay(3, far, mutate, Model::evict);
}

/// What is left in a far page is brought together while it comes near whole.
#[test]
fn a_page_comes_whole_or_is_merged() {
    increments_stay(
        4,
        far,
        |model| model.increment_by(0, IngressPath::Page),
        |model| {
            model.merge();
        },
    );
}
