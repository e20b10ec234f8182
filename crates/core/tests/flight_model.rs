//! The flight of a small object in all interleavings, with loom: its place stays near by the count
//! of what is *coming*, and by nothing else once the scope in which it began has ended.
//!
//! Danger: the page leaves before the object's bytes are in it, so that they are lost or land where
//! others live by then; somebody finds the object before its bytes; a log page dies twice, or
//! never. The flight takes the steps of the fault engine itself (`core::heap::fault`). The others
//! are those of `crates/farfield/src/plane/object/flight.rs` and of the evictor, with the same
//! orderings.

mod models;

use farfield_core::heap::fault::{
    AccessMode, FetchIntent, ObjectLookup, ObjectWords, PageWords, give_up_place, land_object, lock_object,
    look_up_object, peek_object,
};
use farfield_core::heap::{DerefOutcome, FrameId, FrameWord, Handle, LogClass, LogWord, ObjectLocation, State};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use models::{Scopes, check, read, write};

const FRAME: FrameId = FrameId(1);
/// Where the object comes to; it comes from page 0, which is Far.
const PAGE: u32 = 1;
const VALUE: u64 = 7;
const CLASS: LogClass = LogClass::from_index(0);

struct Model {
    handle: AtomicU64,
    /// Frame word of `PAGE`, and log words of both pages.
    word: AtomicU64,
    logs: [AtomicU32; 2],
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

impl PageWords for Model {
    /// Page 0 is Far as long as the object is in it, and nobody releases it.
    fn load_page(&self, page: u32) -> FrameWord {
        if page == PAGE { self.word() } else { far() }
    }

    fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool {
        assert_eq!(page, PAGE);
        self.exchange(seen, next)
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

    /// `LogPages::update`.
    fn update_log(&self, page: u32, transition: impl Fn(LogWord) -> (LogWord, bool)) -> bool {
        let log = &self.logs[page as usize];
        let mut seen = log.load(Ordering::Relaxed);
        loop {
            let (next, flag) = transition(LogWord(seen));
            match log.compare_exchange(seen, next.0, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return flag,
                Err(now) => seen = now,
            }
        }
    }

    /// Counts deaths of `PAGE`; the other one dies when the object has left it.
    fn retire_log(&self, page: u32) {
        self.deaths.fetch_add(u32::from(page == PAGE), Ordering::Relaxed);
    }
}

fn far() -> FrameWord {
    let near = FrameWord::EMPTY.create().0.finish_load(FRAME, true);
    let copied = near.cool().and_then(FrameWord::claim_for_eviction).map(FrameWord::begin_writeback);
    copied.and_then(FrameWord::finish_writeback).expect("the way out")
}

impl Model {
    /// The page is near, and open for the thread that begins the flight.
    fn new() -> Arc<Model> {
        Arc::new(Model {
            handle: AtomicU64::new(Handle::settle(0, 0).0),
            word: AtomicU64::new(FrameWord::EMPTY.create().0.finish_load(FRAME, true).0),
            logs: [LogWord::opened(CLASS).add().closed().0, LogWord::opened(CLASS)].map(|log| AtomicU32::new(log.0)),
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

    /// `HeapInner::spot_now` and `HeapInner::depart_object`: true if the object is under way.
    fn depart(&self) -> bool {
        self.scopes.enter(0);
        self.update_log(PAGE, |log| (log.expect(), false));
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
            let far = peek_object(self, 0).expect("nobody else takes it");
            assert!(lock_object(self, far, CLASS, false));
        } else {
            give_up_place(self, PAGE);
        }
        self.scopes.leave(0);
        is_near
    }

    /// `HeapInner::land_object`, by whoever polls the lane, in no scope.
    fn land(&self) {
        write(&self.place, VALUE);
        assert!(!land_object(self, 0, 0, (PAGE, 0), Some(FetchIntent::Read)));
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
        if self.load_log(PAGE).coming() > 0 {
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

    /// A look in a scope: the value, if the object is there.
    fn look(&self) {
        self.scopes.enter(1);
        if let ObjectLookup::Resident(..) = look_up_object(self, 0, AccessMode::Read, |_, _| {}) {
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
            self.end_log(PAGE, LogWord::remove);
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
        model.end_log(PAGE, LogWord::closed);
        lands.join().unwrap();
        ends.join().unwrap();
        model.free();
        assert_eq!(model.deaths.load(Ordering::Relaxed), 1);
        assert_eq!(Handle(model.handle.load(Ordering::Acquire)).location(), ObjectLocation::Nowhere);
    });
}
