//! The words by which mutators, the collector and the evictor meet, in all interleavings, with loom.
//!
//! Danger: an object that is used where it was before it moved, or after its page is another one's; a
//! change that is lost because a flush and the eviction of a page, or a copy and a stop, cross each other.
//!
//! The stops are the real ones (`src/stops.rs`, on loom's locks), and so are the words, their transitions,
//! and the steps of a fault and of a flush (`farfield-core`). What lies between them is written again
//! here, with the orderings of the code that it names. Each model has a counterpart in which one rule is
//! switched off, and which fails.

#[path = "../../core/tests/models/mod.rs"]
mod models;
#[path = "../src/stops.rs"]
#[allow(dead_code, reason = "the models use a part")]
mod stops;

/// What `src/stops.rs` reports.
mod error {
    pub(crate) use farfield_gc::GcError;
}

/// What `src/sync.rs` is in the product.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread::{Thread, ThreadId, current as current_thread};

    /// A clock that stands still: no patience ends, so whoever waits in vain is a deadlock.
    #[derive(Clone, Copy)]
    pub(crate) struct Instant;

    impl Instant {
        pub(crate) fn now() -> Instant {
            Instant
        }

        pub(crate) fn elapsed(self) -> core::time::Duration {
            core::time::Duration::ZERO
        }

        pub(crate) fn saturating_duration_since(self, _earlier: Instant) -> core::time::Duration {
            crate::stops::PATIENCE
        }
    }

    impl core::ops::Add<core::time::Duration> for Instant {
        type Output = Instant;

        fn add(self, _patience: core::time::Duration) -> Instant {
            self
        }
    }
}

use farfield_core::gc::{EntryWord, RefWord};
use farfield_core::heap::fault::{
    AccessMode, FetchIntent, PageLookup, PageWords, flush_page, land_page, look_up_page, peek_page,
};
use farfield_core::heap::{FrameId, FrameWord, SlotHint, State};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use models::{Scopes, check, read, write};
use stops::{MutatorId, Stops};

fn near(frame: u32, is_dirty: bool) -> FrameWord {
    FrameWord::EMPTY.create().0.finish_load(FrameId(frame), is_dirty)
}

fn far() -> FrameWord {
    let copied = near(1, true).cool().and_then(FrameWord::claim_for_eviction).map(FrameWord::begin_writeback);
    copied.and_then(FrameWord::finish_writeback).expect("the way out")
}

/// The frame words of a few pages.
struct Words<const PAGES: usize>([AtomicU64; PAGES]);

impl<const PAGES: usize> PageWords for Words<PAGES> {
    fn load_page(&self, page: u32) -> FrameWord {
        FrameWord(self.0[page as usize].load(Ordering::Acquire))
    }

    fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool {
        let word = &self.0[page as usize];
        word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

impl<const PAGES: usize> Words<PAGES> {
    /// Makes a transition on a word in which others may set marks; `None` if there is none from what it is.
    fn apply(&self, page: u32, mut transition: impl FnMut(FrameWord) -> Option<FrameWord>) -> Option<FrameWord> {
        loop {
            let seen = self.load_page(page);
            let next = transition(seen)?;
            if self.exchange_page(page, seen, next) {
                return Some(next);
            }
        }
    }

    /// Claims a page for eviction if no scope has it, in one round of the evictor (`eviction/cooling.rs`).
    fn claim_for_eviction(&self, page: u32, scopes: &Scopes) -> Option<FrameWord> {
        let seen = self.load_page(page);
        let next = seen.cool()?;
        if !self.exchange_page(page, seen, next) || next.state() != State::Cooling {
            return None;
        }
        let epoch = scopes.end_epoch();
        if !scopes.is_over(epoch) {
            return None;
        }
        let seen = self.load_page(page);
        let claimed = seen.claim_for_eviction()?;
        self.exchange_page(page, seen, claimed).then_some(claimed)
    }
}

/// A safepoint, as `Mutator::safepoint` reaches it.
fn safepoint(stops: &Stops, id: MutatorId) {
    if stops.is_requested() {
        stops.stop(id);
        stops.resume(id);
    }
}

// Stops.

/// The heap of which one thread has everything while mutators are stopped.
struct Stopped {
    stops: Stops,
    heap: UnsafeCell<u64>,
}

impl Stopped {
    fn new() -> Arc<Stopped> {
        Arc::new(Stopped { stops: Stops::default(), heap: UnsafeCell::new(0) })
    }
}

// SAFETY: accesses to the cell are ordered by the stops; loom watches that they are, which is what the model is for.
unsafe impl Sync for Stopped {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Stopped {}

/// What a stopper or a mutator leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StopRule {
    /// Nothing.
    All,
    /// The stopper waits until each mutator has stopped.
    WaitForMutators,
    /// A mutator goes on when the stop is over.
    WaitForEnd,
    /// A mutator ends what it does before it counts as stopped.
    EndFirst,
}

fn stop_beside_mutators(broken: StopRule, mutators: usize) {
    check(3, move || {
        let model = Stopped::new();
        let mutate = |model: Arc<Stopped>| {
            move || {
                let id = model.stops.register();
                read(&model.heap);
                if broken == StopRule::EndFirst {
                    model.stops.stop(id);
                    read(&model.heap);
                    model.stops.resume(id);
                } else if model.stops.is_requested() {
                    model.stops.stop(id);
                    if broken != StopRule::WaitForEnd {
                        model.stops.resume(id);
                    }
                }
                read(&model.heap);
                model.stops.unregister(id);
            }
        };
        let threads: Vec<_> = (0..mutators).map(|_| loom::thread::spawn(mutate(model.clone()))).collect();
        for round in 1..=2 {
            let stop = (broken != StopRule::WaitForMutators).then(|| model.stops.begin().expect("nobody is late"));
            write(&model.heap, round);
            drop(stop);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((read(&model.heap), model.stops.mutators()), (2, 0));
    });
}

#[test]
fn nobody_uses_the_heap_while_mutators_are_stopped_and_nobody_waits_for_ever() {
    stop_beside_mutators(StopRule::All, 1);
    stop_beside_mutators(StopRule::All, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_stop_that_does_not_wait_meets_mutators() {
    stop_beside_mutators(StopRule::WaitForMutators, 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_mutator_that_does_not_wait_for_the_end_meets_the_collector() {
    stop_beside_mutators(StopRule::WaitForEnd, 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_mutator_that_is_stopped_before_it_is_done_meets_the_collector() {
    stop_beside_mutators(StopRule::EndFirst, 1);
}

/// Two threads that stop mutators (the collector, and one that verifies) take turns.
#[test]
fn two_stops_take_turns() {
    check(2, || {
        let model = Stopped::new();
        let id = model.stops.register();
        let stopping = |model: Arc<Stopped>| {
            move || {
                let stop = model.stops.begin().expect("nobody is late");
                write(&model.heap, read(&model.heap) + 1);
                drop(stop);
            }
        };
        let threads = [(); 2].map(|()| loom::thread::spawn(stopping(model.clone())));
        read(&model.heap);
        safepoint(&model.stops, id);
        read(&model.heap);
        model.stops.unregister(id);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(read(&model.heap), 2);
    });
}

// A reference is loaded while its object moves and the page that it was in is closed.

const ENTRY: u32 = 7;
const CARD: u8 = 3;
/// The sparse page, the fresh one, and one that gets the frame of the sparse page afterwards.
const SOURCE: u32 = 0;
const TARGET: u32 = 1;
const LATER: u32 = 2;
/// What the object is, and what is in the frame of its page when that is another one's.
const OBJECT: u64 = 100;
const OTHER: u64 = 999;

/// What the collector or a mutator leaves out of a move.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MoveRule {
    /// Nothing.
    All,
    /// Objects move while mutators are stopped.
    MoveAtStops,
    /// No reference outlives a safepoint.
    EndReferences,
    /// What a reference guesses is compared with the entry.
    CompareEntries,
}

struct Moving {
    stops: Stops,
    scopes: Scopes,
    words: Words<3>,
    /// The word of the object's entry, whose page is near and pinned.
    entry: AtomicU64,
    reference: AtomicU64,
    /// The objects at `CARD` in frames 1 and 2.
    frames: [UnsafeCell<u64>; 2],
}

// SAFETY: accesses to the cells are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Moving {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Moving {}

impl Moving {
    fn new() -> Arc<Moving> {
        Arc::new(Moving {
            stops: Stops::default(),
            scopes: Scopes::new(),
            words: Words([near(1, true), near(2, true), FrameWord::EMPTY].map(|word| AtomicU64::new(word.0))),
            entry: AtomicU64::new(EntryWord::new(SOURCE, CARD, 0).0),
            reference: AtomicU64::new(RefWord::new(ENTRY, SlotHint::new(FrameId(1), CARD)).0),
            frames: [UnsafeCell::new(OBJECT), UnsafeCell::new(0)],
        })
    }

    fn bytes(&self, frame: FrameId) -> &UnsafeCell<u64> {
        &self.frames[frame.0 as usize - 1]
    }

    /// Loads the reference in a scope, as `Mutator::find_by_reference` does. Returns the object.
    fn load(&self, broken: MoveRule) -> &UnsafeCell<u64> {
        let word = RefWord(self.reference.load(Ordering::Acquire));
        assert_eq!(word.entry(), Some(ENTRY));
        let guess = word.guess();
        let is_there = |page| self.words.load_page(page).confirms_card(CARD, guess);
        if broken == MoveRule::CompareEntries && (is_there(SOURCE) || is_there(LATER)) {
            return self.bytes(guess.frame());
        }
        let at = EntryWord(self.entry.load(Ordering::Acquire));
        if self.words.load_page(at.page()).confirms_card(at.card(), guess) {
            return self.bytes(guess.frame());
        }
        let PageLookup::Resident(frame, _) = look_up_page(&self.words, at.page(), AccessMode::Read) else {
            panic!("an object lies in a page that is closed")
        };
        let better = RefWord::new(ENTRY, guess.in_frame(frame));
        let _ = self.reference.compare_exchange(word.0, better.0, Ordering::Relaxed, Ordering::Relaxed);
        self.bytes(frame)
    }

    /// Two turns of a mutator, each with two uses of a reference, and safepoints in between.
    fn mutate(&self, broken: MoveRule) {
        let id = self.stops.register();
        let mut kept = None;
        for _ in 0..2 {
            self.scopes.enter(0);
            let object = kept.unwrap_or_else(|| self.load(broken));
            (0..2).for_each(|_| assert_eq!(read(object), OBJECT, "the object is another one"));
            kept = (broken == MoveRule::EndReferences).then_some(object);
            self.scopes.leave(0);
            safepoint(&self.stops, id);
        }
        self.stops.unregister(id);
    }

    /// Moves the object (`Evacuation::move_objects`), and closes the page that it was in. The frame of that
    /// page is another one's afterwards.
    fn evacuate(&self, broken: MoveRule) {
        let stop = (broken != MoveRule::MoveAtStops).then(|| self.stops.begin().expect("nobody is late"));
        write(self.bytes(FrameId(2)), read(self.bytes(FrameId(1))));
        self.entry.store(EntryWord::new(TARGET, CARD, 0).0, Ordering::Release);
        drop(stop);
        let mut frame = None;
        self.words.apply(SOURCE, |seen| {
            let (next, freed) = seen.release()?;
            frame = freed;
            Some(next)
        });
        let frame = frame.expect("nobody else takes it");
        self.words.apply(LATER, |seen| (seen == FrameWord::EMPTY).then(|| seen.create().0));
        write(self.bytes(frame), OTHER);
        land_page(&self.words, LATER, Some(frame), FetchIntent::Write);
    }
}

fn load_beside_a_move(broken: MoveRule) {
    check(3, move || {
        let model = Moving::new();
        let other = model.clone();
        let mutator = loom::thread::spawn(move || other.mutate(broken));
        model.evacuate(broken);
        mutator.join().unwrap();
        assert_eq!(read(model.load(MoveRule::All)), OBJECT);
        assert_eq!(RefWord(model.reference.load(Ordering::Acquire)).guess(), SlotHint::new(FrameId(2), CARD));
    });
}

#[test]
fn a_reference_is_loaded_while_its_object_moves_and_its_page_is_closed() {
    load_beside_a_move(MoveRule::All);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn an_object_that_moves_beside_a_mutator_is_lost() {
    load_beside_a_move(MoveRule::MoveAtStops);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_reference_that_outlives_a_safepoint_leads_to_another_page() {
    load_beside_a_move(MoveRule::EndReferences);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_guess_that_is_compared_with_no_entry_leads_to_another_page() {
    load_beside_a_move(MoveRule::CompareEntries);
}

// A page is flushed while it is evicted.

/// What the pool has at first, and what the page is.
const OLD: u64 = 9;
const NEW: u64 = 1;

/// What a flush leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlushRule {
    /// Nothing.
    All,
    /// The evictor is the only one that writes pages.
    HoldEvictor,
    /// The checksum of the far copy is that of what was written last.
    NoteSums,
}

struct Flushing {
    words: Words<1>,
    scopes: Scopes,
    evictor: Mutex<()>,
    /// The page in its frame. Words of collected pages are changed as atomics.
    frame: AtomicU64,
    /// The checksum of the far copy (`FrameInfo`): of a page of one word that is the word.
    sum: AtomicU64,
    pool: AtomicU64,
}

impl Flushing {
    fn new() -> Arc<Flushing> {
        let dirty = far().deref(true).0.finish_load(FrameId(1), true);
        Arc::new(Flushing {
            words: Words([AtomicU64::new(dirty.0)]),
            scopes: Scopes::new(),
            evictor: Mutex::new(()),
            frame: AtomicU64::new(NEW),
            sum: AtomicU64::new(OLD),
            pool: AtomicU64::new(OLD),
        })
    }

    /// Changes the page, each time in a scope and if it is near: once with a mark, and once through an
    /// address that needs none. Returns the last change.
    fn change(&self, last: u64) -> Option<u64> {
        let changes = [(AccessMode::Write, NEW + 1), (AccessMode::Read, last)];
        let change = |(mode, value)| {
            self.scopes.enter(0);
            let is_near = matches!(look_up_page(&self.words, 0, mode), PageLookup::Resident(..));
            if is_near {
                self.frame.store(value, Ordering::Relaxed);
            }
            self.scopes.leave(0);
            is_near.then_some(value)
        };
        changes.into_iter().filter_map(change).last()
    }

    /// Flushes the page (`eviction/flush.rs`).
    fn flush(&self, broken: FlushRule) {
        let held = (broken != FlushRule::HoldEvictor).then(|| self.evictor.lock().unwrap());
        if let Some(seen) = flush_page(&self.words, 0) {
            let was_clean = seen.is_stored() && !seen.is_dirty();
            let copy = self.frame.load(Ordering::Relaxed);
            if !(was_clean && self.sum.load(Ordering::Relaxed) == copy) {
                if broken != FlushRule::NoteSums {
                    self.sum.store(copy, Ordering::Relaxed);
                }
                self.pool.store(copy, Ordering::Release);
            }
        }
        drop(held);
    }

    /// Evicts the page (`eviction/victims.rs`); another one gets its frame.
    fn evict(&self) {
        let held = self.evictor.lock().unwrap();
        let Some(claimed) = self.words.claim_for_eviction(0, &self.scopes) else { return };
        let copy = self.frame.load(Ordering::Relaxed);
        let left = if claimed.is_stored() && !claimed.is_dirty() && self.sum.load(Ordering::Relaxed) == copy {
            self.words.apply(0, |word| Some(word.dropped(false)))
        } else {
            self.words.apply(0, |word| Some(word.begin_writeback()));
            self.pool.store(copy, Ordering::Release);
            self.words.apply(0, FrameWord::finish_writeback)
        };
        if left.is_some() {
            self.frame.store(OTHER, Ordering::Relaxed);
        }
        drop(held);
    }

    fn value(&self) -> u64 {
        match self.words.load_page(0).state() {
            State::Far => self.pool.load(Ordering::Acquire),
            _ => self.frame.load(Ordering::Relaxed),
        }
    }
}

fn flush_beside_an_eviction(broken: FlushRule, last: u64) {
    check(2, move || {
        let model = Flushing::new();
        let (changing, evicting) = (model.clone(), model.clone());
        let changing = loom::thread::spawn(move || changing.change(last));
        let evicting = loom::thread::spawn(move || evicting.evict());
        model.flush(broken);
        let found = model.pool.load(Ordering::Acquire);
        assert!(found != OLD || last == OLD, "a server reads what was there before the snapshot");
        assert_ne!(found, OTHER, "a server reads another page");
        evicting.join().unwrap();
        let changed = changing.join().unwrap();
        // What is near leaves, so that all that counts is at the pool.
        model.evict();
        model.evict();
        assert_eq!(model.value(), changed.unwrap_or(NEW), "a change is lost");
    });
}

#[test]
fn a_page_is_flushed_while_it_is_changed_and_evicted() {
    flush_beside_an_eviction(FlushRule::All, NEW + 2);
    // It becomes what it was in the pool.
    flush_beside_an_eviction(FlushRule::All, OLD);
}

#[test]
#[should_panic(expected = "a change is lost")]
fn a_flush_that_does_not_hold_the_evictor_loses_a_change() {
    flush_beside_an_eviction(FlushRule::HoldEvictor, NEW + 2);
}

#[test]
#[should_panic(expected = "a change is lost")]
fn a_flush_that_notes_no_checksum_loses_a_change() {
    flush_beside_an_eviction(FlushRule::NoteSums, OLD);
}

// The collector looks at a page that is near, and the page leaves.

/// What the collector leaves out of a look.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PeekRule {
    /// Nothing.
    All,
    /// It looks at near pages in a scope.
    EnterScope,
    /// It looks at the word of the page, not only at where the page was before.
    LookAtWord,
}

struct Peeking {
    words: Words<1>,
    scopes: Scopes,
    frame: UnsafeCell<u64>,
}

// SAFETY: accesses to the cell are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Peeking {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Peeking {}

/// The collector looks at a page twice: only if it needs no transition (`SpaceScope::near`), and so that the
/// page stays (`SpaceScope::bring_unmarked`).
fn peek_beside_an_eviction(broken: PeekRule) {
    check(3, move || {
        let page = near(1, true);
        let words = Words([AtomicU64::new(page.0)]);
        let model = Arc::new(Peeking { words, scopes: Scopes::new(), frame: UnsafeCell::new(OBJECT) });
        let other = model.clone();
        let tracer = loom::thread::spawn(move || {
            let Peeking { words, scopes, frame } = &*other;
            let is_in_scope = broken != PeekRule::EnterScope;
            for mode in [None, Some(AccessMode::Peek)] {
                if is_in_scope {
                    scopes.enter(0);
                }
                let found = match mode {
                    _ if broken == PeekRule::LookAtWord => page.near(),
                    None => words.load_page(0).near(),
                    Some(mode) => match look_up_page(words, 0, mode) {
                        PageLookup::Resident(frame, _) => Some(frame),
                        _ => None,
                    },
                };
                if found.is_some() {
                    (0..2).for_each(|_| assert_eq!(read(frame), OBJECT));
                }
                if is_in_scope {
                    scopes.leave(0);
                }
            }
        });
        for _ in 0..2 {
            let Peeking { words, scopes, frame } = &*model;
            if words.claim_for_eviction(0, scopes).is_some() {
                assert_eq!(read(frame), OBJECT);
                words.apply(0, |word| Some(word.begin_writeback()));
                if words.apply(0, FrameWord::finish_writeback).is_some() {
                    write(frame, OTHER);
                }
            }
        }
        tracer.join().unwrap();
    });
}

#[test]
fn the_collector_looks_at_a_near_page_while_it_leaves() {
    peek_beside_an_eviction(PeekRule::All);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_look_without_a_scope_meets_the_next_page_of_the_frame() {
    peek_beside_an_eviction(PeekRule::EnterScope);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_look_at_where_the_page_was_meets_the_next_page_of_the_frame() {
    peek_beside_an_eviction(PeekRule::LookAtWord);
}

// The collector copies a far page past the frames, and moves what was in it at a stop.

/// What the collector leaves out of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyRule {
    /// Nothing.
    All,
    /// It looks at the page again when it has the copy (`PageReader::copy_far`).
    LookAgain,
    /// It looks at the page again at the stop (`Evacuation::stopped`).
    LookAtStop,
}

/// A far page of two words, both of them the count of its changes.
struct Copying {
    stops: Stops,
    scopes: Scopes,
    words: Words<1>,
    frame: UnsafeCell<u64>,
    pool: [AtomicU64; 2],
    digest: AtomicU64,
    /// The count as it was when the object moved; `u64::MAX` while it is in the page.
    moved: AtomicU64,
}

// SAFETY: accesses to the cell are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Copying {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Copying {}

const IN_PAGE: u64 = u64::MAX;

impl Copying {
    fn digest_of(halves: [u64; 2]) -> u64 {
        halves[0] << 32 | halves[1]
    }

    fn copy(&self) -> [u64; 2] {
        [0, 1].map(|half: usize| self.pool[half].load(Ordering::Acquire))
    }

    /// Checks whether the page is far, and as it was when it was copied (`PageReader::is_current`).
    fn is_current(&self, copy: [u64; 2]) -> bool {
        let is_far = self.words.load_page(0).state() == State::Far;
        is_far && self.digest.load(Ordering::Relaxed) == Copying::digest_of(copy)
    }

    /// A mutator brings the object near and counts, and its page leaves. Then the thread reaches a safepoint.
    ///
    /// It knows what it has counted `before`: if it loaded that from the pool, loom would take no notice of
    /// the collector's loads there.
    fn count(&self, id: MutatorId, before: u64) {
        if self.moved.load(Ordering::Acquire) != IN_PAGE {
            self.moved.fetch_add(1, Ordering::AcqRel);
            return;
        }
        self.scopes.enter(0);
        let claim = peek_page(&self.words, 0).expect("it is far");
        assert!(claim.take(&self.words, false), "nobody else brings it");
        write(&self.frame, before);
        land_page(&self.words, 0, Some(FrameId(1)), FetchIntent::Write);
        write(&self.frame, read(&self.frame) + 1);
        self.scopes.leave(0);
        self.words.claim_for_eviction(0, &self.scopes).expect("nobody else has a scope");
        let count = read(&self.frame);
        self.digest.store(Copying::digest_of([count; 2]), Ordering::Relaxed);
        self.words.apply(0, |word| Some(word.begin_writeback()));
        self.pool.iter().for_each(|half| half.store(count, Ordering::Release));
        assert!(self.words.apply(0, FrameWord::finish_writeback).is_some());
        safepoint(&self.stops, id);
    }

    /// Copies the page, and moves the object at a stop if the page is still the copy.
    fn evacuate(&self, broken: CopyRule) {
        if self.words.load_page(0).state() != State::Far {
            return;
        }
        let copy = self.copy();
        if broken != CopyRule::LookAgain && !self.is_current(copy) {
            return;
        }
        assert_eq!(copy[0], copy[1], "the copy is of no moment");
        let stop = self.stops.begin().expect("nobody is late");
        if broken == CopyRule::LookAtStop || self.is_current(copy) {
            self.moved.store(copy[0], Ordering::Release);
        }
        drop(stop);
    }
}

fn copy_beside_changes(broken: CopyRule) {
    check(3, move || {
        let model = Arc::new(Copying {
            stops: Stops::default(),
            scopes: Scopes::new(),
            words: Words([AtomicU64::new(far().0)]),
            frame: UnsafeCell::new(OTHER),
            pool: [0; 2].map(AtomicU64::new),
            digest: AtomicU64::new(Copying::digest_of([0; 2])),
            moved: AtomicU64::new(IN_PAGE),
        });
        let other = model.clone();
        let id = model.stops.register();
        let mutator = loom::thread::spawn(move || {
            (0..2).for_each(|before| other.count(id, before));
            other.stops.unregister(id);
        });
        model.evacuate(broken);
        mutator.join().unwrap();
        let count = match model.moved.load(Ordering::Acquire) {
            IN_PAGE => model.copy()[0],
            moved => moved,
        };
        assert_eq!(count, 2, "a change is lost");
    });
}

#[test]
fn a_far_page_is_copied_and_emptied_while_it_comes_and_leaves() {
    copy_beside_changes(CopyRule::All);
}

#[test]
#[should_panic(expected = "the copy is of no moment")]
fn a_copy_without_a_second_look_is_of_no_moment() {
    copy_beside_changes(CopyRule::LookAgain);
}

#[test]
#[should_panic(expected = "a change is lost")]
fn a_copy_that_is_believed_at_the_stop_loses_a_change() {
    copy_beside_changes(CopyRule::LookAtStop);
}
