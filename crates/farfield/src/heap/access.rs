//! How a mutator accesses a page, and the transitions of the frame word that it makes.

use super::HeapInner;
use super::io::FetchIntent;
use super::threads::{ThreadState, count};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::{DerefOutcome, FrameWord, State};

/// Access that a mutator needs to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AccessMode {
    Read,
    Write,
    /// Access to make an object: the page may be Empty.
    Create,
}

impl AccessMode {
    pub(crate) fn decide(self, word: FrameWord) -> (FrameWord, DerefOutcome) {
        match self {
            AccessMode::Read => word.deref(false),
            AccessMode::Write => word.deref(true),
            AccessMode::Create => word.create(),
        }
    }

    /// Returns the state in which a page fetched for this access lands.
    pub(crate) fn fetch_intent(self) -> FetchIntent {
        if self == AccessMode::Read { FetchIntent::Read } else { FetchIntent::Write }
    }
}

impl HeapInner {
    /// Makes one transition of a frame word, by compare-exchange; false if the word has changed.
    ///
    /// This is the only place where a mutator makes a transition that other threads could make too.
    pub(crate) fn exchange(&self, word: &AtomicU64, seen: FrameWord, next: FrameWord) -> bool {
        // Acquire: sees all that the last owner of the page did to its frame. Release: publishes
        // ours.
        let done = word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let [was, is] = [seen, next].map(|word| word.state() == State::Cooling);
        if done && was != is {
            self.frames.count_cooling(is);
        }
        done
    }
}

/// Updates the hit counters from `seen`, the frame word as it was before this access.
pub(crate) fn count_use(record: &ThreadState, seen: FrameWord) {
    if seen.state() != State::Near {
        count(&record.counters.rescued);
    }
    if seen.is_ahead() {
        count(&record.counters.prefetches_used);
    }
}
