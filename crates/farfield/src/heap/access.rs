//! What a mutator wants of a page, and the transitions that it makes.

use super::Core;
use super::io::Landing;
use super::threads::{Record, count};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::{Deref, FrameWord, State};

/// What a mutator wants of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Want {
    Read,
    Write,
    /// To make an object: the page may be Empty.
    Create,
}

impl Want {
    pub(crate) fn decide(self, word: FrameWord) -> (FrameWord, Deref) {
        match self {
            Want::Read => word.deref(false),
            Want::Write => word.deref(true),
            Want::Create => word.create(),
        }
    }

    /// How what is wanted so comes near.
    pub(crate) fn landing(self) -> Landing {
        if self == Want::Read { Landing::Clean } else { Landing::Dirty }
    }
}

impl Core {
    /// One transition of a frame word; the only place where a mutator makes one that others could make too.
    pub(crate) fn exchange(&self, word: &AtomicU64, seen: FrameWord, next: FrameWord) -> bool {
        // Acquire: what the last owner of the page did to its frame is done. Release: what we did is.
        let done = word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let [was, is] = [seen, next].map(|word| word.state() == State::Leaving);
        if done && was != is {
            self.frames.count_leaving(is);
        }
        done
    }
}

/// Counts what the use of a page tells, whose word was this before.
pub(crate) fn count_use(record: &Record, seen: FrameWord) {
    if seen.state() != State::Near {
        count(&record.counters.taken_back);
    }
    if seen.is_ahead() {
        count(&record.counters.prefetches_used);
    }
}
