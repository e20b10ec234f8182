//! The object plane's protocol in all interleavings, with loom: an object that is moved while it is used.
//!
//! Danger: a reader has a reference into a place that the object has left, two threads bring one object, or a log page's number is
//! used again while somebody still believes an old handle; on the hybrid plane, an object is taken out of a page that comes near whole, or is
//! changed there meanwhile. The bytes of both places are cells that loom watches. The steps are
//! those of `crates/farfield/src/plane/object/ingress.rs`, and of the evacuator.

use farfield_core::heap::{Deref, FrameId, FrameWord, Handle, LogClass, LogWord, Path, State, Whereabouts};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The object moves from page 0 in frame 1 to page 1 in frame 2; or to page 2, which only the evacuator fills.
const PAGES: usize = 3;

struct Model {
    handle: AtomicU64,
    words: [AtomicU64; PAGES],
    /// Of page 0, in which the object is alone.
    log: AtomicU32,
    epoch: AtomicU64,
    /// One per mutator.
    records: [AtomicU64; 2],
    /// The object's place in each page's frame.
    frames: [UnsafeCell<u64>; PAGES],
    /// The object's place in page 0 at the server.
    far: UnsafeCell<u64>,
}

// SAFETY: accesses to the cells are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Model {}

fn read(cell: &UnsafeCell<u64>) -> u64 {
    // SAFETY: loom fails the model if somebody writes at the same time.
    cell.with(|value| unsafe { *value })
}

fn write(cell: &UnsafeCell<u64>, value: u64) {
    // SAFETY: loom fails the model if somebody else accesses the cell at the same time.
    cell.with_mut(|target| unsafe { *target = value });
}

fn near(page: usize) -> FrameWord {
    FrameWord::EMPTY.create().0.arrived(FrameId(page as u32 + 1), true)
}

fn far() -> FrameWord {
    let sealed = near(0).cool().and_then(FrameWord::seal).unwrap();
    sealed.copied().left().unwrap()
}

impl Model {
    fn new(first: FrameWord) -> Arc<Model> {
        Arc::new(Model {
            handle: AtomicU64::new(Handle::settle(0, 0).0),
            words: [first, near(1), near(2)].map(|word| AtomicU64::new(word.0)),
            log: AtomicU32::new(LogWord::opened(LogClass::from_index(0)).add().closed().0.leave(Path::Page).0),
            epoch: AtomicU64::new(1),
            records: [AtomicU64::new(0), AtomicU64::new(0)],
            frames: [0; PAGES].map(UnsafeCell::new),
            far: UnsafeCell::new(0),
        })
    }

    fn word(&self, page: usize) -> FrameWord {
        FrameWord(self.words[page].load(Ordering::Acquire))
    }

    fn exchange(&self, page: usize, seen: FrameWord, next: FrameWord) -> bool {
        self.words[page].compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn enter(&self, record: usize) {
        self.records[record].store(self.epoch.load(Ordering::Acquire), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn leave(&self, record: usize) {
        self.records[record].store(0, Ordering::Release);
    }

    fn is_over(&self, epoch: u64) -> bool {
        fence(Ordering::SeqCst);
        self.records.iter().all(|record| {
            let entered = record.load(Ordering::Acquire);
            entered == 0 || entered > epoch
        })
    }

    /// `LogPages::update`.
    fn update<R>(&self, transition: impl Fn(LogWord) -> Option<(LogWord, R)>) -> Option<R> {
        loop {
            let seen = LogWord(self.log.load(Ordering::Relaxed));
            let (next, result) = transition(seen)?;
            if self.log.compare_exchange(seen.0, next.0, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                return Some(result);
            }
        }
    }

    /// A transition that may be the end of page 0.
    fn end(&self, transition: impl Fn(LogWord) -> (LogWord, bool)) {
        if self.update(|word| Some(transition(word))) == Some(true) {
            self.retire();
        }
    }

    /// `Core::seek`, with a few looks: the page in whose frame the object is. On this path, if it is far.
    fn seek(&self, path: Path) -> Option<usize> {
        for _ in 0..3 {
            let seen = Handle(self.handle.load(Ordering::Acquire));
            let Whereabouts::At { page, .. } = seen.whereabouts() else {
                loom::thread::yield_now();
                continue;
            };
            let page = page as usize;
            let held = self.word(page);
            match held.deref(true) {
                (next, Deref::Here(_)) => {
                    if next != held && !self.exchange(page, held, next) {
                        continue;
                    }
                    if Handle(self.handle.load(Ordering::Acquire)).whereabouts() == seen.whereabouts() {
                        return Some(page);
                    }
                }
                (_, Deref::Fetch) if path == Path::Page => self.bring_page(),
                (_, Deref::Fetch) => self.bring(seen),
                _ => loom::thread::yield_now(),
            }
        }
        None
    }

    /// `Core::bring_object`; the other place is kept for whoever is first.
    fn bring(&self, seen: Handle) {
        if self.update(|word| Some((word.go()?, ()))).is_none() {
            return;
        }
        let locked = seen.lock().unwrap();
        let lock = || self.handle.compare_exchange(seen.0, locked.0, Ordering::AcqRel, Ordering::Relaxed);
        if self.word(0).state() == State::Far && lock().is_ok() {
            write(&self.frames[1], read(&self.far));
            self.handle.store(seen.moved(1, 0).0, Ordering::Release);
            self.end(LogWord::remove);
        }
        self.end(LogWord::gone);
    }

    /// `Core::depart_page`, and its landing.
    fn bring_page(&self) {
        if self.update(|word| Some((word.fetch()?, ()))).is_none() {
            return;
        }
        let seen = self.word(0);
        let fetching = seen.deref(false).0;
        let comes = seen.state() == State::Far && self.exchange(0, seen, fetching);
        if comes {
            write(&self.frames[0], read(&self.far));
            self.words[0].store(fetching.arrived(FrameId(1), false).0, Ordering::Release);
        }
        self.end(|word| word.fetched(comes));
    }

    /// The evictor writes page 0, which is near.
    fn evict(&self) {
        let seen = self.word(0);
        let Some(next) = seen.cool() else { return };
        if !self.exchange(0, seen, next) || next.state() != State::Leaving {
            return;
        }
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel);
        let seen = self.word(0);
        let Some(sealed) = seen.seal().filter(|_| self.is_over(epoch)) else { return };
        if self.exchange(0, seen, sealed) {
            write(&self.far, read(&self.frames[0]));
            let mut seen = self.word(0);
            while !self.exchange(0, seen, seen.copied().left().unwrap()) {
                seen = self.word(0);
            }
            // The frame holds something else now.
            write(&self.frames[0], u64::MAX / 2);
        }
    }

    /// The last object has left the Far page 0. `Core::retire_log`
    fn retire(&self) {
        let seen = self.word(0);
        let (next, frame) = seen.release().unwrap();
        assert_eq!(frame, None);
        assert!(self.exchange(0, seen, next));
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
            let retired = self.epoch.fetch_add(1, Ordering::AcqRel);
            if self.is_over(retired) {
                write(&self.frames[0], u64::MAX / 2);
                assert!(self.exchange(0, self.word(0), near(0)));
            }
        }
        merged
    }

    /// One scope, in which the object is incremented, if it is found; how often.
    fn increment(&self, record: usize) -> u64 {
        self.increment_by(record, Path::Object)
    }

    fn increment_by(&self, record: usize, path: Path) -> u64 {
        self.enter(record);
        let found = self.seek(path);
        if let Some(page) = found {
            // A reference: it is used, and used again later in the scope.
            write(&self.frames[page], read(&self.frames[page]) + 1);
            write(&self.frames[page], read(&self.frames[page]) + 1);
        }
        self.leave(record);
        found.map_or(0, |_| 2)
    }

    /// The evacuator moves the object out of page 0, which becomes Empty and, if nobody can remember it, is used for another.
    fn evacuate(&self) {
        let seen = self.word(0);
        let Some(next) = seen.cool() else { return };
        if !self.exchange(0, seen, next) || next.state() != State::Leaving {
            return;
        }
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel);
        if !self.is_over(epoch) {
            return;
        }
        let seen = self.word(0);
        let Some(sealed) = seen.seal() else { return };
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
        let retired = self.epoch.fetch_add(1, Ordering::AcqRel);
        if self.is_over(retired) {
            // So does the page, in the same frame, which an old slot may guess.
            let (seen, fresh) = (self.word(0), near(0));
            let _ = self.exchange(0, seen, fresh);
        }
    }

    fn value(&self) -> u64 {
        match Handle(self.handle.load(Ordering::Acquire)).whereabouts() {
            Whereabouts::At { page: 0, .. } if self.word(0).state() == State::Far => read(&self.far),
            Whereabouts::At { page, .. } => read(&self.frames[page as usize]),
            other => panic!("{other:?} at rest"),
        }
    }
}

#[test]
fn an_object_moves_between_uses_and_not_under_them() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(|| {
        let model = Model::new(near(0));
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.increment(0));
        model.evacuate();
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), done);
    });
}

#[test]
fn an_object_moves_while_scopes_come_and_go() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let model = Model::new(near(0));
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.increment(0) + other.increment(0));
        model.evacuate();
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), done);
    });
}

/// Increments of two threads on one object are the program's to order; here each only looks, and the one who is first brings it.
#[test]
fn two_threads_bring_one_object_once() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let model = Model::new(far());
        write(&model.far, 7);
        let look = |record: usize, model: Arc<Model>| {
            move || {
                model.enter(record);
                if let Some(page) = model.seek(Path::Object) {
                    assert_eq!((page, read(&model.frames[page])), (1, 7));
                }
                model.leave(record);
            }
        };
        let one = loom::thread::spawn(look(0, model.clone()));
        let two = loom::thread::spawn(look(1, model.clone()));
        one.join().unwrap();
        two.join().unwrap();
        assert_eq!(model.value(), 7);
    });
}

/// What is left in a far page is brought together while it is missed: one of them moves it.
#[test]
fn an_object_of_a_far_page_is_merged_or_missed() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(|| {
        let model = Model::new(far());
        write(&model.far, 7);
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.increment(0));
        let merged = model.merge();
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), 7 + done);
        let there = if merged { 2 } else { 1 };
        assert!(done == 0 || Handle(model.handle.load(Ordering::Acquire)).is_at(there, 0));
    });
}

/// One thread wants the object alone, and another one its page; each only looks, as above.
#[test]
fn a_page_comes_whole_or_an_object_out_of_it() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let model = Model::new(far());
        write(&model.far, 7);
        let look = |record: usize, path: Path, model: Arc<Model>| {
            move || {
                model.enter(record);
                if let Some(page) = model.seek(path) {
                    assert_eq!(read(&model.frames[page]), 7);
                }
                model.leave(record);
            }
        };
        let one = loom::thread::spawn(look(0, Path::Object, model.clone()));
        let two = loom::thread::spawn(look(1, Path::Page, model.clone()));
        one.join().unwrap();
        two.join().unwrap();
        assert_eq!(model.value(), 7);
    });
}

/// A page that came whole and was changed leaves, while somebody wants the object alone.
#[test]
fn a_page_that_came_whole_leaves_changed() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let model = Model::new(far());
        write(&model.far, 7);
        let other = model.clone();
        let mutator =
            loom::thread::spawn(move || other.increment_by(0, Path::Page) + other.increment_by(0, Path::Object));
        model.evict();
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), 7 + done);
    });
}

/// What is left in a far page is brought together while it comes near whole.
#[test]
fn a_page_comes_whole_or_is_merged() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(|| {
        let model = Model::new(far());
        write(&model.far, 7);
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.increment_by(0, Path::Page));
        model.merge();
        let done = mutator.join().unwrap();
        assert_eq!(model.value(), 7 + done);
    });
}
