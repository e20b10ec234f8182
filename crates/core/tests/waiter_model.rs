//! Tasks that wait for a page, or for room, in all interleavings, with loom. A page is claimed,
//! marked and landed by the steps of the fault engine itself (`core::heap::fault`). The others are
//! those of `crates/farfield/src/heap/wait_queue.rs`, and of those who use it (`fault/task.rs`,
//! `heap/fetch.rs`, `heap/reclaimer.rs`), with the same orderings.
//!
//! Danger: a task that nobody wakes; one that is told of an end that is not its own; one that has given up and takes another's turn along.

mod models;

use farfield_core::heap::fault::{AccessMode, FetchIntent, PageLookup, PageWords, land_page, look_up_page, want_page};
use farfield_core::heap::{FrameId, FrameWord};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use models::{check, read, write};
use std::collections::VecDeque;

const FRAME: FrameId = FrameId(1);
const VALUE: u64 = 42;

/// What the table knows of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Slot {
    Free,
    Waiting,
    Ended,
}

/// How the steps are taken: as they must be, or with one mistake, which a model has to notice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Right,
    /// The mark is set before the table is locked.
    MarkWithoutLock,
    /// Who lands the page looks for the mark before it is near.
    LookFirst,
    /// Who queues for room does not ring afterwards.
    NoRing,
    /// Who claims a page begins its flight before it has left its waker.
    BeginFirst,
    /// Who gives up does not pass on that it was woken.
    KeepTurn,
}

/// A page on its way, and two tasks that may want it.
struct Page {
    way: Way,
    word: AtomicU64,
    frame: UnsafeCell<u64>,
    table: Mutex<[Slot; 2]>,
    woken: [AtomicBool; 2],
}

// SAFETY: accesses to the cell are ordered by the protocol; loom watches that they are, which is what the model is for.
unsafe impl Sync for Page {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Page {}

impl PageWords for Page {
    fn load_page(&self, _page: u32) -> FrameWord {
        FrameWord(self.word.load(Ordering::Acquire))
    }

    fn exchange_page(&self, _page: u32, seen: FrameWord, next: FrameWord) -> bool {
        self.word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

impl Page {
    /// A page that is far.
    fn far(way: Way) -> Arc<Page> {
        let near = FrameWord::EMPTY.create().0.finish_load(FRAME, true);
        let far = near
            .cool()
            .and_then(FrameWord::claim_for_eviction)
            .map(FrameWord::begin_writeback)
            .and_then(FrameWord::finish_writeback);
        Arc::new(Page {
            way,
            word: AtomicU64::new(far.expect("the way out").0),
            frame: UnsafeCell::new(0),
            table: Mutex::new([Slot::Free; 2]),
            woken: [AtomicBool::new(false), AtomicBool::new(false)],
        })
    }

    /// A page that is on its way for somebody who does not wait.
    fn new(way: Way) -> Arc<Page> {
        let page = Page::far(way);
        assert!(page.claim(false));
        page
    }

    /// Takes the page for a flight, if it is far.
    fn claim(&self, is_wanted: bool) -> bool {
        let PageLookup::Far(claim) = look_up_page(self, 0, AccessMode::Read) else { return false };
        claim.take(self, is_wanted)
    }

    /// The page is on its way, and whoever lands it knows that it is wanted.
    fn mark(&self) -> bool {
        want_page(self, 0)
    }

    /// One poll of a task that claims the page, if it is far, and lands it, or waits for it as
    /// another one does.
    fn claim_or_wait(&self, task: usize) -> bool {
        if !self.claim(true) {
            return self.wait(task);
        }
        if self.way == Way::BeginFirst {
            self.land();
        }
        self.table.lock().unwrap()[task] = Slot::Waiting;
        if self.way != Way::BeginFirst {
            self.land();
        }
        true
    }

    /// One poll of a task that does not wait yet: it finds the page near, or waits for it from now on.
    fn wait(&self, task: usize) -> bool {
        let early = self.way == Way::MarkWithoutLock && self.mark();
        let mut table = self.table.lock().unwrap();
        if early || self.mark() {
            table[task] = Slot::Waiting;
            return true;
        }
        drop(table);
        let found = look_up_page(self, 0, AccessMode::Read);
        assert!(matches!(found, PageLookup::Resident(FRAME, _)));
        assert_eq!(read(&self.frame), VALUE);
        false
    }

    /// One poll of a task that waits: is it over?
    fn look(&self, task: usize) -> bool {
        let mut table = self.table.lock().unwrap();
        match table[task] {
            Slot::Ended => {
                table[task] = Slot::Free;
                true
            }
            Slot::Waiting => false,
            Slot::Free => panic!("a ticket without a place"),
        }
    }

    fn forget(&self, task: usize) {
        self.table.lock().unwrap()[task] = Slot::Free;
    }

    /// The page has come: tells those who wait.
    fn land(&self) {
        write(&self.frame, VALUE);
        let early = FrameWord(self.word.load(Ordering::Acquire)).is_wanted();
        let wanted = land_page(self, 0, Some(FRAME), FetchIntent::Read);
        if if self.way == Way::LookFirst { early } else { wanted } {
            let mut wakers = Vec::new();
            let mut table = self.table.lock().unwrap();
            for (task, slot) in table.iter_mut().enumerate() {
                if *slot == Slot::Waiting {
                    *slot = Slot::Ended;
                    wakers.push(task);
                }
            }
            drop(table);
            wakers.into_iter().for_each(|task| self.woken[task].store(true, Ordering::Release));
        }
    }
}

/// Two tasks ask for a page while it lands; one of them may give up.
fn ask_while_it_lands(way: Way, gives_up: bool) {
    check(3, move || {
        let page = Page::new(way);
        let tasks = [0, 1].map(|task| {
            let page = page.clone();
            loom::thread::spawn(move || {
                let mut waits = page.wait(task);
                if waits && gives_up && task == 1 {
                    page.forget(task);
                    waits = false;
                } else if waits && page.look(task) {
                    assert_eq!(read(&page.frame), VALUE);
                    waits = false;
                }
                waits
            })
        });
        page.land();
        for (task, handle) in tasks.into_iter().enumerate() {
            if handle.join().unwrap() {
                assert!(page.woken[task].load(Ordering::Acquire), "task {task} is not woken");
                assert!(page.look(task), "task {task} is woken for nothing");
            }
        }
        assert_eq!(*page.table.lock().unwrap(), [Slot::Free; 2], "who does not wait has no place");
    });
}

#[test]
fn every_task_that_waits_for_a_page_is_woken() {
    ask_while_it_lands(Way::Right, false);
}

#[test]
fn a_task_that_gives_up_leaves_nothing_behind() {
    ask_while_it_lands(Way::Right, true);
}

#[test]
#[should_panic(expected = "is not woken")]
fn a_mark_that_is_set_without_the_lock_is_missed() {
    ask_while_it_lands(Way::MarkWithoutLock, false);
}

#[test]
#[should_panic(expected = "is not woken")]
fn a_mark_that_is_looked_for_too_early_is_missed() {
    ask_while_it_lands(Way::LookFirst, false);
}

/// Two tasks want a far page: one of them claims it, and marks it for itself.
fn claim_and_wait(way: Way) {
    check(3, move || {
        let page = Page::far(way);
        let other = page.clone();
        let other = loom::thread::spawn(move || other.claim_or_wait(1));
        let waits = [page.claim_or_wait(0), other.join().unwrap()];
        for task in (0..2).filter(|task| waits[*task]) {
            assert!(page.woken[task].load(Ordering::Acquire), "task {task} is not woken");
            assert!(page.look(task), "task {task} is woken for nothing");
        }
        assert_eq!(*page.table.lock().unwrap(), [Slot::Free; 2], "who does not wait has no place");
    });
}

#[test]
fn who_claims_a_page_is_woken_as_are_those_who_find_it_claimed() {
    claim_and_wait(Way::Right);
}

#[test]
#[should_panic(expected = "is not woken")]
fn a_flight_that_begins_before_its_task_waits_is_missed() {
    claim_and_wait(Way::BeginFirst);
}

/// Frames, the queue of tasks that want one, and the bell of the reclaimer.
struct Room {
    way: Way,
    frames: AtomicUsize,
    queue: Mutex<VecDeque<usize>>,
    /// How many wait, for those who have no time for the lock.
    waiting: AtomicUsize,
    woken: [AtomicBool; 2],
    rung: AtomicBool,
}

impl Room {
    fn new(way: Way) -> Arc<Room> {
        Arc::new(Room {
            way,
            frames: AtomicUsize::new(0),
            queue: Mutex::new(VecDeque::new()),
            waiting: AtomicUsize::new(0),
            woken: [AtomicBool::new(false), AtomicBool::new(false)],
            rung: AtomicBool::new(false),
        })
    }

    fn take(&self) -> bool {
        let take = |frames: usize| frames.checked_sub(1);
        self.frames.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }

    /// One poll of a task: it has a frame, or waits for one from now on.
    fn poll(&self, task: usize) -> bool {
        if self.take() {
            return true;
        }
        let mut queue = self.queue.lock().unwrap();
        queue.push_back(task);
        self.waiting.store(queue.len(), Ordering::Release);
        drop(queue);
        if self.way != Way::NoRing {
            self.rung.store(true, Ordering::Release);
        }
        false
    }

    /// A task gives up. If it was woken, another one can be.
    fn give_up(&self, task: usize) {
        let mut queue = self.queue.lock().unwrap();
        let place = queue.iter().position(|waits| *waits == task);
        if let Some(place) = place {
            queue.remove(place);
            self.waiting.store(queue.len(), Ordering::Release);
            return;
        }
        drop(queue);
        if self.waiting.load(Ordering::Acquire) > 0 && self.way != Way::KeepTurn {
            self.rung.store(true, Ordering::Release);
        }
    }

    /// There is something for so many: wakes them.
    fn room(&self, tasks: usize) {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return;
        }
        let woken: Vec<usize> = {
            let mut queue = self.queue.lock().unwrap();
            let count = queue.len().min(tasks);
            let woken = queue.drain(..count).collect();
            self.waiting.store(queue.len(), Ordering::Release);
            woken
        };
        woken.into_iter().for_each(|task| self.woken[task].store(true, Ordering::Release));
    }

    /// The reclaimer's rounds, until nobody rings.
    fn rounds(&self) {
        while self.rung.swap(false, Ordering::AcqRel) {
            self.room(self.frames.load(Ordering::Acquire));
        }
    }
}

/// A frame becomes free while a task asks for one; the reclaimer looks when somebody has rung.
fn ask_while_there_comes_room(way: Way) {
    check(3, move || {
        let room = Room::new(way);
        let task = {
            let room = room.clone();
            loom::thread::spawn(move || room.poll(0))
        };
        room.frames.fetch_add(1, Ordering::AcqRel);
        room.room(1);
        let has_frame = task.join().unwrap();
        room.rounds();
        assert!(has_frame || room.woken[0].load(Ordering::Acquire), "nobody wakes it, and there is a frame");
        assert!(has_frame || room.take(), "it was woken, and looks for itself");
    });
}

#[test]
fn every_task_that_waits_for_room_is_woken_when_there_is_some() {
    ask_while_there_comes_room(Way::Right);
}

#[test]
#[should_panic(expected = "nobody wakes it, and there is a frame")]
fn without_the_bell_room_is_missed() {
    ask_while_there_comes_room(Way::NoRing);
}

/// Two wait for room, there is some for one, and the first gives up.
fn give_up_while_there_comes_room(way: Way) {
    check(3, move || {
        let room = Room::new(way);
        assert!(!room.poll(0) && !room.poll(1));
        room.rounds();
        let first = {
            let room = room.clone();
            loom::thread::spawn(move || room.give_up(0))
        };
        room.frames.fetch_add(1, Ordering::AcqRel);
        room.room(1);
        first.join().unwrap();
        room.rounds();
        assert!(room.woken[1].load(Ordering::Acquire), "the frame is for the second one, whom nobody wakes");
        assert_eq!((room.waiting.load(Ordering::Acquire), room.take()), (0, true));
    });
}

#[test]
fn a_task_that_gives_up_passes_its_turn_on() {
    give_up_while_there_comes_room(Way::Right);
}

#[test]
#[should_panic(expected = "whom nobody wakes")]
fn a_turn_that_is_kept_is_a_frame_that_nobody_takes() {
    give_up_while_there_comes_room(Way::KeepTurn);
}
