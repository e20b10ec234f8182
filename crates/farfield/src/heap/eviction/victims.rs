//! Eviction of a unit that the evictor has claimed.

use super::writer::EvictionRequest;
use super::{EvictionUrgency, EvictorState, HeapInner, TransferUnit};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::checksum;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FrameId, FrameWord, State};
use farfield_pool::PoolError;

impl EvictorState {
    /// Evicts one unit that we have claimed, or lets it stay.
    pub(super) fn evict_unit(
        &mut self,
        core: &HeapInner,
        unit: TransferUnit,
        frame: FrameId,
        claimed: FrameWord,
    ) -> Result<(), PoolError> {
        let word = &core.words[unit.page];
        // A larger unit has one object, and is freed with it.
        if unit.pages == 1 && !core.is_live(unit) {
            self.drop_dead(core, unit, frame);
            return Ok(());
        }
        if self.evict_log_page(core, unit, frame) {
            return Ok(());
        }
        core.count_departure(unit);
        if (0..unit.pages).all(|index| is_as_far(core, claimed, frame, index)) {
            apply_transition(word, |word| word.dropped(false));
            self.free(core, unit, frame);
            core.evictor.clean.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
            core.evictor.ahead.fetch_add(u64::from(claimed.is_ahead()), Ordering::Relaxed);
            return Ok(());
        }
        if self.urgency == EvictionUrgency::Full {
            apply_transition(word, FrameWord::keep_near);
            return Ok(());
        }
        if unit.pages as usize > self.batch {
            return self.evict_large_unit(core, unit, frame, claimed);
        }
        if let Err(error) = self.room_for(core, unit.pages as usize) {
            apply_transition(word, FrameWord::keep_near);
            return Err(error);
        }
        self.writer.write(core, unit, frame, 0..unit.pages);
        // A thread that needs the page from here on need not wait for the write.
        apply_transition(word, FrameWord::begin_writeback);
        Ok(())
    }

    /// Frees the frames of a unit that has left.
    fn free(&mut self, core: &HeapInner, unit: TransferUnit, frame: FrameId) {
        core.frames.put(frame, unit.pages);
        self.freed += unit.pages;
    }

    /// Drops the Claimed unit, in which no object lives.
    pub(super) fn drop_dead(&mut self, core: &HeapInner, unit: TransferUnit, frame: FrameId) {
        let dropped = apply_transition(&core.words[unit.page], |word| word.dropped(true));
        self.free(core, unit, frame);
        core.vacate(dropped.is_stored());
        core.evictor.dead.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
    }

    /// Evicts a unit of more pages than a batch. It is written in windows while it is ours; between
    /// them this looks whether a thread wants it back.
    fn evict_large_unit(
        &mut self,
        core: &HeapInner,
        unit: TransferUnit,
        frame: FrameId,
        claimed: FrameWord,
    ) -> Result<(), PoolError> {
        let word = &core.words[unit.page];
        if let Err(error) = self.finish(core).and_then(|()| self.writer.open(core)) {
            apply_transition(word, FrameWord::keep_near);
            return Err(error);
        }
        let mut at = 0;
        while at < unit.pages {
            let wanted = FrameWord(word.load(Ordering::Acquire)).is_wanted();
            let result = if wanted { Ok(()) } else { self.write_window(core, unit, frame, claimed, at) };
            if wanted || result.is_err() {
                // Pages that were written are newer than the checksums say.
                core.note_changed(apply_transition(word, FrameWord::keep_near_dirty));
                return result;
            }
            at += self.batch as u32;
        }
        let left = apply_transition(word, |word| {
            word.begin_writeback().finish_writeback().unwrap_or_else(|| unreachable!("copied and not taken"))
        });
        debug_assert_eq!(left.state(), State::Far);
        self.free(core, unit, frame);
        core.evictor.written.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
        Ok(())
    }

    fn write_window(
        &mut self,
        core: &HeapInner,
        unit: TransferUnit,
        frame: FrameId,
        claimed: FrameWord,
        at: u32,
    ) -> Result<(), PoolError> {
        let window = at..(at + self.batch as u32).min(unit.pages);
        self.writer.write(core, unit, frame, window.filter(|index| !is_as_far(core, claimed, frame, *index)));
        self.writer.finish_all(core)
    }

    /// Opens the lane if it is closed, and waits until `pages` copies can be made.
    fn room_for(&mut self, core: &HeapInner, pages: usize) -> Result<(), PoolError> {
        self.writer.open(core)?;
        if self.writer.has_room(pages) { Ok(()) } else { self.finish(core) }
    }

    /// Ends all writes. Pages whose copies arrived, and that nobody rescued, are Far then.
    pub(super) fn finish(&mut self, core: &HeapInner) -> Result<(), PoolError> {
        let (waited, requests) = self.writer.finish(core);
        let mut trouble = waited;
        for EvictionRequest { unit, frame, result } in requests {
            let result = waited.and(result);
            let word = &core.words[unit.page];
            loop {
                let seen = FrameWord(word.load(Ordering::Acquire));
                let next = if result.is_ok() { seen.finish_writeback() } else { seen.fail_writeback() };
                // The page was rescued, or released. Only we put a page into Writeback, so it is
                // not there again.
                let Some(next) = next else { break };
                if core.exchange(word, seen, next) {
                    if result.is_ok() {
                        self.free(core, unit, frame);
                        core.evictor.written.fetch_add(u64::from(unit.pages), Ordering::Relaxed);
                    }
                    break;
                }
            }
            trouble = trouble.and(result);
        }
        trouble
    }
}

/// Makes a transition that only the owner makes, on a word in which others may set marks.
pub(super) fn apply_transition(word: &AtomicU64, transition: impl Fn(FrameWord) -> FrameWord) -> FrameWord {
    let mut seen = FrameWord(word.load(Ordering::Acquire));
    loop {
        let next = transition(seen);
        match word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return next,
            Err(now) => seen = FrameWord(now),
        }
    }
}

/// Checks whether the pool has this page already: the `index`-th of a unit that we have claimed and
/// that begins in this frame.
fn is_as_far(core: &HeapInner, claimed: FrameWord, frame: FrameId, index: u32) -> bool {
    let frame = FrameId(frame.0 + index);
    claimed.is_stored() && !claimed.is_dirty() && sum(core, frame) == core.frames.infos[frame.0].sum()
}

/// Returns the checksum of the page in a frame of a unit that we have claimed.
fn sum(core: &HeapInner, frame: FrameId) -> u64 {
    let address = core.frames.address(frame);
    crate::heap::launder(address);
    // SAFETY: a frame of the arena, which is initialised memory of the kernel (see `launder`); the
    // unit is Claimed and ours, so nobody writes it meanwhile.
    checksum(unsafe { core::slice::from_raw_parts(address, PAGE_BYTES) })
}
