//! Far memory of pages that are Empty is given back to the pool.

use super::take::settle;
use super::{Core, EvictorState, Unit};
use core::sync::atomic::Ordering;
use farfield_core::heap::{FrameWord, State};
use farfield_pool::PoolError;

impl EvictorState {
    /// Gives back far memory of pages that are Empty.
    pub(super) fn discard(&mut self, core: &Core) -> Result<(), PoolError> {
        loop {
            let mut pages = core.take_discards(self.batch * 4);
            if pages.is_empty() {
                return Ok(());
            }
            pages.sort_unstable();
            let mut ours: Vec<u32> = Vec::with_capacity(pages.len());
            for page in pages {
                let word = &core.words[page];
                let seen = FrameWord(word.load(Ordering::Acquire));
                // Otherwise it is in use again, and will be written over.
                if seen.discard().is_some_and(|next| core.exchange(word, seen, next)) {
                    ours.push(page);
                }
            }
            let result = self.discard_pages(core, &ours);
            for page in &ours {
                settle(&core.words[*page], |word| match result {
                    Ok(()) => word.discarded(),
                    Err(_) => word.gave_up(State::Empty),
                });
                if result.is_err() {
                    core.discard_later(*page, true);
                }
            }
            result?;
            core.evictor.discarded.fetch_add(ours.len() as u64, Ordering::Relaxed);
        }
    }

    fn discard_pages(&mut self, core: &Core, pages: &[u32]) -> Result<(), PoolError> {
        self.carrier.open(core)?;
        for run in pages.chunk_by(|a, b| a + 1 == *b) {
            self.carrier.discard(core, Unit { page: run[0], pages: run.len() as u32 });
        }
        self.carrier.finish_all(core)
    }
}
