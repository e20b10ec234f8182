//! Transitions of frame words that a mutator makes.

use super::HeapInner;
use super::threads::{ThreadState, count};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::fault::PageWords;
use farfield_core::heap::{FrameWord, State};

impl PageWords for HeapInner {
    #[inline]
    fn load_page(&self, page: u32) -> FrameWord {
        FrameWord(self.words[page].load(Ordering::Acquire))
    }

    #[inline]
    fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool {
        self.exchange(&self.words[page], seen, next)
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
        if done && next.is_dirty() && !seen.is_dirty() {
            self.note_changed(next);
        }
        done
    }

    /// Notes that a page has become dirty by a transition to this word.
    pub(crate) fn note_changed(&self, word: FrameWord) {
        if let Some(frame) = word.frame() {
            self.changed.mark(frame);
        }
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
