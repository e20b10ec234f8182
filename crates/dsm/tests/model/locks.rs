//! Locks that are thin as long as nobody waits.
//!
//! Danger: two writers; a task that waits for ever; a value that is read as it was before the last writer.
//!
//! The steps of a word are the real ones (`src/thin.rs`), and so is the line. The table of a home is written again here,
//! as `src/node/locks.rs` has it. Each counterpart with one rule off fails.

use super::models::{check, read, write};
use super::thin;
use farfield_core::dsm::{Colour, HomeTicket, LockLine, ThinLock};
use farfield_core::lock::LockMode::{self, Exclusive, Shared};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{
    AtomicU32,
    Ordering::{Relaxed, Release},
};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;

const COLOUR: Colour = Colour(3);
const THIN: HomeTicket = HomeTicket { node: 0, number: 0 };

/// Rule that a home does not keep.
#[derive(Clone, Copy, PartialEq)]
enum Missing {
    Nothing,
    /// The table is told who has a lock that is inflated.
    Holders,
    /// A lock is inflated in one step.
    OneStep,
    /// Whoever gives a lock back looks whether it was inflated.
    Release,
    /// A lock is made thin again under the mutex of the table.
    UnderMutex,
    /// Whoever takes a lock sees what was written before.
    TakeOrder,
    /// Whoever inflates a lock sees what was written before.
    InflateOrder,
}

/// Home of a lock.
struct Home {
    word: AtomicU32,
    line: Mutex<Option<LockLine>>,
    turns: Condvar,
    value: UnsafeCell<u64>,
    missing: Missing,
}

impl Home {
    #[allow(clippy::arc_with_non_send_sync, reason = "loom checks who uses the cell at the same time")]
    fn new(missing: Missing) -> Arc<Home> {
        let word = AtomicU32::new(ThinLock::free(COLOUR).bits());
        let value = UnsafeCell::new(0);
        Arc::new(Home { word, line: Mutex::new(None), turns: Condvar::new(), value, missing })
    }

    fn take(&self, mode: LockMode) -> bool {
        if self.missing != Missing::TakeOrder {
            return thin::take(&self.word, COLOUR, mode);
        }
        let before = self.word.load(Relaxed);
        let after = ThinLock::from_bits(before).take(COLOUR, mode);
        after.is_some_and(|after| self.word.compare_exchange(before, after.bits(), Relaxed, Relaxed).is_ok())
    }

    fn release(&self, mode: LockMode) -> bool {
        if self.missing != Missing::Release {
            return thin::release(&self.word, mode);
        }
        self.word.store(ThinLock::free(COLOUR).bits(), Release);
        true
    }

    fn inflate(&self) -> Option<(u16, LockMode)> {
        let relaxed = || {
            let before = ThinLock::from_bits(self.word.load(Relaxed));
            let inflated = before.inflate(COLOUR)?;
            if self.missing == Missing::OneStep {
                self.word.store(inflated.bits(), Relaxed);
            } else if self.word.compare_exchange(before.bits(), inflated.bits(), Relaxed, Relaxed).is_err() {
                return thin::inflate(&self.word, COLOUR);
            }
            Some(before.holders())
        };
        match self.missing {
            Missing::OneStep | Missing::InflateOrder => relaxed(),
            Missing::Holders => thin::inflate(&self.word, COLOUR).map(|(_, mode)| (0, mode)),
            _ => thin::inflate(&self.word, COLOUR),
        }
    }

    /// Takes the lock by the table, and waits until it has it.
    fn ask(&self, ticket: HomeTicket, mode: LockMode) {
        let mut line = self.line.lock().unwrap();
        if let Some((count, held)) = self.inflate() {
            *line = Some(LockLine::held_by((0..count).map(|_| (THIN, held))));
        }
        line.get_or_insert_default().ask(ticket, mode);
        while line.as_ref().is_some_and(|line| line.held(ticket).is_none()) {
            line = self.turns.wait(line).unwrap();
        }
    }

    fn leave(&self, ticket: HomeTicket) {
        let mut table = self.line.lock().unwrap();
        let Some(line) = table.as_mut() else { return };
        if !line.leave(ticket).is_empty() {
            self.turns.notify_all();
        }
        if line.is_idle() {
            *table = None;
            if self.missing == Missing::UnderMutex {
                drop(table);
            }
            thin::deflate(&self.word, COLOUR);
        }
    }

    /// Uses the value under the lock: a task of the home, or one of another node.
    fn with(&self, ticket: HomeTicket, mode: LockMode, is_at_home: bool) {
        let is_thin = is_at_home && self.take(mode);
        if !is_thin {
            self.ask(ticket, mode);
        }
        let before = read(&self.value);
        if mode == Exclusive {
            write(&self.value, before + 1);
        }
        if !is_thin {
            self.leave(ticket);
        } else if !self.release(mode) {
            self.leave(THIN);
        }
    }
}

/// Steps of a task: how it takes the lock each time, and whether it is at home.
type Steps = &'static [(LockMode, bool)];

/// Tasks use a lock in all interleavings. In the end nothing is lost, and the lock is thin and free.
fn use_lock(missing: Missing, tasks: &'static [Steps]) {
    check(2, move || {
        let home = Home::new(missing);
        let run = |home: &Home, task: usize| {
            for (step, (mode, is_at_home)) in tasks[task].iter().enumerate() {
                let ticket = HomeTicket { node: task as u16, number: 1 + step as u64 };
                home.with(ticket, *mode, *is_at_home);
            }
        };
        let threads: Vec<_> = (1..tasks.len())
            .map(|task| {
                let home = home.clone();
                thread::spawn(move || run(&home, task))
            })
            .collect();
        run(&home, 0);
        threads.into_iter().for_each(|thread| thread.join().expect("it ends"));
        let writes = tasks.iter().flat_map(|steps| steps.iter()).filter(|(mode, _)| *mode == Exclusive).count();
        home.with(HomeTicket { node: 9, number: 9 }, Exclusive, true);
        assert_eq!(read(&home.value), 1 + writes as u64, "a write is lost");
        assert_eq!(home.word.load(Relaxed), ThinLock::free(COLOUR).bits(), "it is thin again");
    });
}

const WRITERS: &[Steps] = &[&[(Exclusive, true), (Exclusive, true)], &[(Exclusive, true), (Exclusive, false)]];
const READERS: &[Steps] = &[&[(Shared, true)], &[(Shared, true)], &[(Exclusive, false)]];

#[test]
fn a_lock_that_is_inflated_and_thin_again_has_one_writer() {
    use_lock(Missing::Nothing, WRITERS);
    use_lock(Missing::Nothing, READERS);
    use_lock(Missing::Nothing, &[&[(Exclusive, true)], &[(Shared, true)], &[(Exclusive, false)]]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn there_would_be_two_writers_if_the_table_did_not_know_the_holders() {
    use_lock(Missing::Holders, WRITERS);
}

#[test]
#[should_panic(expected = "deadlock")]
fn somebody_would_wait_for_ever_if_a_lock_were_inflated_in_two_steps() {
    use_lock(Missing::OneStep, WRITERS);
}

#[test]
#[should_panic(expected = "deadlock")]
fn somebody_would_wait_for_ever_if_who_gives_back_did_not_look() {
    use_lock(Missing::Release, WRITERS);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn there_would_be_two_writers_if_a_lock_became_thin_without_the_mutex() {
    use_lock(Missing::UnderMutex, WRITERS);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_value_would_be_read_too_early_if_taking_did_not_acquire() {
    use_lock(Missing::TakeOrder, WRITERS);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_value_would_be_read_too_early_if_inflating_did_not_acquire() {
    use_lock(Missing::InflateOrder, WRITERS);
}
