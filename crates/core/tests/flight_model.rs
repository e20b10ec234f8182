//! The flight of a small object in all interleavings, with loom: its place stays near by the count of what is *coming*, and by
//! nothing else once the scope in which it began has ended.
//!
//! Danger: the page leaves before the object's bytes are in it, so that they are lost or land where others live by then; somebody finds
//! the object before its bytes; a log page dies twice, or never. The steps are those of `crates/farfield/src/plane/object/flight.rs` and
//! of the evictor, with the same orderings.

mod models;

use farfield_core::heap::{DerefOutcome, FrameId, FrameWord, Handle, LogClass, LogWord, ObjectLocation, State};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use models::{Scopes, check, read, write};

const FRAME: FrameId = FrameId(1);
/// Where the object comes to; it comes from page 0, which is Far.
const PAGE: u32 = 1;
const VALUE: u64 = 7;

struct Model {
    handle: AtomicU64,
    /// Frame word and log word of `PAGE`.
    word: AtomicU64,
    log: AtomicU32,
    /// How often the log page has died.
    deaths: AtomicU32,
    scopes: Scopes,
    /// The object's place in the frame.
    place: UnsafeCell<u64>,
    /// The same in the far copy of `PAGE`; only the evictor touches it.
    far: UnsafeCell<u64>,
}

// SAFETY: accesses to the cells are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Model {}

impl Model {
    /// The page is near, and open for the thread that begins the flight.
    fn new() -> Arc<Model> {
        Arc::new(Model {
            handle: AtomicU64::new(Handle::settle(0, 0).0),
            word: AtomicU64::new(FrameWord::EMPTY.create().0.finish_load(FRAME, true).0),
            log: AtomicU32::new(LogWord::opened(LogClass::from_index(0)).0),
            deaths: AtomicU32::new(0),
            scopes: Scopes::new(),
            place: UnsafeCell::new(0),
            far: UnsafeCell::new(0),
        })
    }

    fn word(&self) -> FrameWord {
        FrameWord(self.word.load(Ordering::Acquire))
    }

    fn exchange(&self, seen: FrameWord, next: FrameWord) -> bool {
        self.word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// `LogPages::update`, which counts deaths.
    fn update(&self, transition: fn(LogWord) -> (LogWord, bool)) {
        let mut seen = self.log.load(Ordering::Relaxed);
        loop {
            let (next, dead) = transition(LogWord(seen));
            match self.log.compare_exchange(seen, next.0, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => {
                    self.deaths.fetch_add(u32::from(dead), Ordering::Relaxed);
                    return;
                }
                Err(now) => seen = now,
            }
        }
    }

    /// `HeapInner::spot_now` and `HeapInner::depart`: true if the object is under way.
    fn depart(&self) -> bool {
        self.scopes.enter(0);
        self.update(|log| (log.expect(), false));
        let is_near = loop {
            let seen = self.word();
            match seen.create() {
                (next, DerefOutcome::Resident(_)) if next == seen || self.exchange(seen, next) => break true,
                (_, DerefOutcome::Resident(_)) => {}
                (next, DerefOutcome::Wait) => {
                    let _ = next == seen || self.exchange(seen, next);
                    loom::thread::yield_now();
                }
                (_, DerefOutcome::Fetch | DerefOutcome::Zero) => break false,
            }
        };
        if is_near {
            let seen = Handle(self.handle.load(Ordering::Acquire));
            let locked = seen.lock().unwrap();
            assert!(self.handle.compare_exchange(seen.0, locked.0, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        } else {
            self.update(LogWord::arrived);
            self.update(LogWord::remove);
        }
        self.scopes.leave(0);
        is_near
    }

    /// `HeapInner::land_object`, by whoever polls the lane, in no scope.
    fn land(&self) {
        write(&self.place, VALUE);
        let seen = Handle(self.handle.load(Ordering::Relaxed));
        let moved = seen.moved(PAGE, 0);
        assert!(self.handle.compare_exchange(seen.0, moved.0, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        self.update(LogWord::arrived);
    }

    /// One round of the evictor, as in `heap_model.rs`.
    fn evict(&self) {
        let seen = self.word();
        let Some(next) = seen.cool() else { return };
        if !self.exchange(seen, next) || next.state() != State::Cooling {
            return;
        }
        let epoch = self.scopes.end_epoch();
        if !self.scopes.is_over(epoch) {
            return;
        }
        let seen = self.word();
        let Some(sealed) = seen.claim_for_eviction() else { return };
        if LogWord(self.log.load(Ordering::SeqCst)).coming() > 0 {
            self.exchange(seen, seen.deref(false).0);
            return;
        }
        if !self.exchange(seen, sealed) {
            return;
        }
        write(&self.far, read(&self.place));
        let settle = |transition: fn(FrameWord) -> FrameWord| {
            let mut seen = self.word();
            while !self.exchange(seen, transition(seen)) {
                seen = self.word();
            }
        };
        settle(FrameWord::begin_writeback);
        let seen = self.word();
        if let Some(next) = seen.finish_writeback()
            && self.exchange(seen, next)
        {
            // The frame holds another page now.
            write(&self.place, u64::MAX / 2);
        }
    }

    /// `HeapInner::look_up_object`, in a scope: the value, if the object is there.
    fn look(&self) {
        self.scopes.enter(1);
        let seen = Handle(self.handle.load(Ordering::Acquire));
        let held = self.word();
        if seen.is_at(PAGE, 0)
            && let (next, DerefOutcome::Resident(_)) = held.deref(false)
            && (next == held || self.exchange(held, next))
        {
            assert_eq!(read(&self.place), VALUE);
        }
        self.scopes.leave(1);
    }

    /// `HeapInner::free_object`, if the object has landed.
    fn free(&self) {
        let seen = Handle(self.handle.load(Ordering::Acquire));
        if seen.is_at(PAGE, 0) {
            let free = Handle::free(None);
            assert!(self.handle.compare_exchange(seen.0, free.0, Ordering::AcqRel, Ordering::Relaxed).is_ok());
            self.update(LogWord::remove);
        }
    }
}

#[test]
fn a_page_that_arrives_after_its_scope_is_installed() {
    check(4, || {
        let model = Model::new();
        let other = model.clone();
        let mutator = loom::thread::spawn(move || {
            let departed = other.depart();
            if departed {
                other.land();
            }
            departed
        });
        model.evict();
        model.evict();
        let departed = mutator.join().unwrap();
        let there = Handle(model.handle.load(Ordering::Acquire));
        assert!(there.is_at(if departed { PAGE } else { 0 }, 0));
        let value = if model.word().state() == State::Far { read(&model.far) } else { read(&model.place) };
        assert!(!departed || value == VALUE, "{value}");
    });
}

#[test]
fn a_reader_that_finds_a_page_near_finds_its_bytes() {
    check(2, || {
        let model = Model::new();
        let (flight, look) = (model.clone(), model.clone());
        let flight = loom::thread::spawn(move || {
            if flight.depart() {
                flight.land();
            }
        });
        let look = loom::thread::spawn(move || look.look());
        model.evict();
        flight.join().unwrap();
        look.join().unwrap();
    });
}

/// It ends as soon as it is there, while its page is closed and the flight is not quite over.
#[test]
fn its_page_dies_once() {
    check(4, || {
        let model = Model::new();
        let (lands, ends) = (model.clone(), model.clone());
        assert!(model.depart());
        let lands = loom::thread::spawn(move || lands.land());
        let ends = loom::thread::spawn(move || ends.free());
        model.update(LogWord::closed);
        lands.join().unwrap();
        ends.join().unwrap();
        model.free();
        assert_eq!(model.deaths.load(Ordering::Relaxed), 1);
        assert_eq!(Handle(model.handle.load(Ordering::Acquire)).location(), ObjectLocation::Nowhere);
    });
}
