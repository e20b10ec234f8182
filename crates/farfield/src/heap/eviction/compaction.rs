//! Compaction of far log pages: live objects of sparse ones are brought together, so that far
//! memory is not full of holes.
//!
//! Objects leave their page one by one, when they are wanted, and holes of far pages are never
//! filled. So for every page that is opened the evictor looks at a few others, in turn. It reads those that are
//! Far and sparse, and the evacuator moves what lives in them to pages of cold objects. A page is
//! *sparse* if at most a quarter of it lives, or a larger part when far addresses become scarce.

use super::{EvictorState, HeapInner};
use crate::plane::object::Objects;
use core::sync::atomic::Ordering;
use farfield_core::heap::{FrameWord, State};
use farfield_pool::PoolError;

/// State of the hand that goes round the far pages.
#[derive(Default)]
pub(super) struct Compactor {
    hand: u32,
    /// Number of pages that had been opened when the hand moved last.
    opened: u32,
    /// Number of pages still to look at.
    debt: u32,
}

/// Number of pages that are looked at for each that is opened.
const LOOKS: u32 = 4;

impl EvictorState {
    /// Merges sparse far pages, as far as it is their turn, there is room, and nobody waits for it.
    pub(super) fn compact_far_pages(&mut self, core: &HeapInner) -> Result<(), PoolError> {
        let Some(objects) = &core.objects else { return Ok(()) };
        let (opened, pages) = (objects.log.opened(), core.segments.high_page());
        let more = opened.wrapping_sub(self.compactor.opened).saturating_mul(LOOKS);
        self.compactor.opened = opened;
        self.compactor.debt = self.compactor.debt.saturating_add(more).min(pages);
        let quarters = quarters(core, objects);
        let has_room = || core.frames.open_room() >= core.evictor.batch();
        while has_room() && core.admission.waiting() == 0 && !core.waiters.has_frame_waiters() {
            let sparse = self.find_sparse(core, objects, quarters);
            if sparse.is_empty() {
                break;
            }
            let merge = |page, bytes: &[u8]| self.evacuator.merge(core, objects, page, bytes);
            let read = self.writer.open(core).and_then(|()| self.writer.read(core, &sparse, merge));
            sparse.into_iter().for_each(|page| core.end_departure(&objects.log, page));
            read?;
            self.cool_cold(core);
        }
        Ok(())
    }

    /// Returns the next sparse pages, at most a batch.
    fn find_sparse(&mut self, core: &HeapInner, objects: &Objects, quarters: u32) -> Vec<u32> {
        let pages = core.segments.high_page();
        let mut sparse = Vec::new();
        while self.compactor.debt > 0 && sparse.len() < self.batch {
            self.compactor.debt -= 1;
            self.compactor.hand = if self.compactor.hand + 1 >= pages { 0 } else { self.compactor.hand + 1 };
            let page = self.compactor.hand;
            // Only pages that are log pages, and in use, have objects by their word. A page that is
            // Far stays so, because we take objects out of it.
            if objects.log.word(page).is_sparse(quarters) && objects.log.begin_departure(page) {
                if FrameWord(core.words[page].load(Ordering::Acquire)).state() == State::Far {
                    sparse.push(page);
                } else {
                    core.end_departure(&objects.log, page);
                }
            }
        }
        sparse
    }
}

/// Returns how much of a page may live for it to be sparse, in quarters: more when fewer far
/// addresses are left.
fn quarters(core: &HeapInner, objects: &Objects) -> u32 {
    let left = (core.pages - core.segments.high_page()) as usize + objects.log.unused_count();
    match left {
        left if left < core.pages as usize / 8 => 3,
        left if left < core.pages as usize / 4 => 2,
        _ => 1,
    }
}
