//! Vacancies: far pages that hold nothing any more, but whose old copies still take memory of the
//! pool.
//!
//! A page that dies leaves its far copy behind. The next pages that leave are likely to have its
//! far address, and write over the copy. That costs less than giving the memory back and taking it
//! again: system calls, in shared memory also interruptions of the other processors, and page
//! faults. So a share of all far pages may be vacant. A hand goes round the pages and gives back
//! what is more than that, and everything when the pool is full, or when the evictor has had
//! nothing to do for a while.
//!
//! No list says which pages these are: their words do (Empty and stored).

use super::victims::apply_transition;
use super::{EvictorState, HeapEvictor, HeapInner, TransferUnit};
use core::sync::atomic::{AtomicI64, Ordering};
use farfield_core::heap::{FrameWord, State};
use farfield_pool::PoolError;

/// Number of vacancies. Counted after a word has changed, so for a moment it can be wrong, and
/// negative.
#[derive(Default)]
pub(crate) struct Vacancies(AtomicI64);

/// Divisor of the far addresses used so far that gives how many may be vacant.
const SHARE: u64 = 16;
/// Number of pages that may be vacant in any case.
const FEW: u64 = 64;

impl Vacancies {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst).max(0) as u64
    }
}

impl HeapInner {
    /// Counts a page that has become Empty; `stored`: the pool has a copy of what was in it.
    pub(crate) fn vacate(&self, stored: bool) {
        if stored {
            // SeqCst: the reclaimer says that it sleeps before it looks whether there are any.
            self.vacancies.0.fetch_add(1, Ordering::SeqCst);
            if self.vacancies.count() > self.vacancies_max() || self.reclaimer.sleeps_long() {
                self.reclaimer.wake();
            }
        }
    }

    /// Counts a page that is not Empty any more, whose word `was` this.
    pub(crate) fn occupy(&self, was: FrameWord) {
        if was.is_stored() {
            self.vacancies.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn vacancies_max(&self) -> u64 {
        (u64::from(self.segments.high_page()) / SHARE).max(FEW)
    }
}

impl HeapEvictor {
    /// Gives a few vacancies back to the pool. Returns how many.
    pub(crate) fn discard_some(&self, core: &HeapInner) -> Result<usize, PoolError> {
        let mut looks = u64::from(core.segments.high_page());
        self.lock().discard_batch(core, &mut looks)
    }
}

impl EvictorState {
    /// Gives the vacancies back that are too many.
    pub(super) fn discard_excess(&mut self, core: &HeapInner) -> Result<(), PoolError> {
        let max = core.vacancies_max();
        // A quarter of the maximum more is given back, so that this is not done for each page that
        // dies.
        if core.vacancies.count() > max { self.discard(core, max / 4 * 3) } else { Ok(()) }
    }

    /// Gives vacancies back until there are at most `few`.
    pub(super) fn discard(&mut self, core: &HeapInner, few: u64) -> Result<(), PoolError> {
        let mut looks = u64::from(core.segments.high_page());
        while core.vacancies.count() > few && looks > 0 {
            self.discard_batch(core, &mut looks)?;
        }
        Ok(())
    }

    /// Gives back the next batch of vacancies, after at most `looks` looks. Returns how many.
    fn discard_batch(&mut self, core: &HeapInner, looks: &mut u64) -> Result<usize, PoolError> {
        self.writer.open(core)?;
        let ours = self.claim_vacancies(core, looks);
        for run in ours.chunk_by(|a, b| a + 1 == *b) {
            self.writer.discard(core, TransferUnit { page: run[0], pages: run.len() as u32 });
        }
        let result = self.writer.finish_all(core);
        for page in &ours {
            apply_transition(&core.words[*page], |word| match result {
                Ok(()) => word.discarded(),
                Err(_) => word.cancel_load(State::Empty),
            });
            core.vacate(result.is_err());
        }
        result?;
        core.evictor.discarded.fetch_add(ours.len() as u64, Ordering::Relaxed);
        Ok(ours.len())
    }

    /// Makes vacancies Loading that the hand comes by, and returns them.
    fn claim_vacancies(&mut self, core: &HeapInner, looks: &mut u64) -> Vec<u32> {
        let pages = core.segments.high_page();
        let mut ours = Vec::with_capacity(self.batch);
        while *looks > 0 && ours.len() < self.batch {
            *looks -= 1;
            self.discard_hand = if self.discard_hand + 1 >= pages { 0 } else { self.discard_hand + 1 };
            let page = self.discard_hand;
            let word = &core.words[page];
            let seen = FrameWord(word.load(Ordering::Acquire));
            if seen.discard().is_some_and(|next| core.exchange(word, seen, next)) {
                core.occupy(seen);
                ours.push(page);
            }
        }
        ours
    }
}
