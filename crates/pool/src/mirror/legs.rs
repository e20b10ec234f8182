//! What all lanes of a mirror share: its legs and the words of its chunks.

use super::lane::MirrorLane;
use crate::PoolError;
use crate::healer::Patient;
use crate::legs::{Leg, Roster};
use core::ops::Deref;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield_core::Legs;
use farfield_core::chunk_word::ChunkWord;
use farfield_os::memory;
use std::sync::Arc;

/// Pages that are valid or stale together.
pub(super) const CHUNK_PAGES: u64 = 64;
/// Chunks that the thread copies at a time.
const THREAD_COPIES: usize = 4;

/// See the module.
pub(super) struct LegTable {
    roster: Roster,
    pub(super) pages: u64,
    /// Legs that are memory of this machine: they answer while they are polled, and are never slow.
    pub(super) near: Legs,
    words: Words,
    /// No chunk from here on was ever written.
    chunks_end: AtomicU64,
}

impl Deref for LegTable {
    type Target = Roster;
    fn deref(&self) -> &Roster {
        &self.roster
    }
}

impl Patient for LegTable {
    type Lane = MirrorLane;
    fn needs_care(&self) -> bool {
        !self.to_heal().is_empty()
    }
    fn open_for_care(self: &Arc<LegTable>) -> Option<MirrorLane> {
        MirrorLane::open(self, THREAD_COPIES).ok()
    }
}

impl LegTable {
    pub(super) fn new(legs: Vec<Leg>, spares: Vec<Leg>, pages: u64, inherited: bool) -> Result<LegTable, PoolError> {
        let waiting = Legs::first(legs.len() + spares.len()).but(Legs::first(legs.len()));
        let roster = Roster::new(legs, spares, 1, inherited);
        let waiting = waiting.and(roster.which(|_, _| true));
        let most = roster.pages();
        let pages = if pages == 0 { most } else { pages.min(most) };
        let chunks = pages.div_ceil(CHUNK_PAGES);
        let first = if inherited { ChunkWord::inherited() } else { ChunkWord::fresh(waiting) };
        Ok(LegTable {
            pages,
            near: roster.which(|_, backend| backend.mapped().is_some()),
            words: Words::new(chunks, first).map_err(PoolError::Os)?,
            chunks_end: AtomicU64::new(if inherited { chunks } else { 0 }),
            roster,
        })
    }

    /// One behind the last chunk that was ever written.
    pub(super) fn chunks_end(&self) -> u64 {
        self.chunks_end.load(Ordering::SeqCst)
    }

    pub(super) fn word(&self, chunk: u64) -> ChunkWord {
        self.words.load(chunk)
    }

    /// Legs that hold all of these pages, of those given.
    pub(super) fn valid(&self, page: u64, count: u64, legs: Legs) -> Legs {
        chunks(page, count).fold(legs, |legs, chunk| legs.and(self.words.load(chunk).valid()))
    }

    /// Was nothing ever written here?
    pub(super) fn is_untouched(&self, page: u64, count: u64) -> bool {
        chunks(page, count).all(|chunk| !self.words.load(chunk).is_touched())
    }

    /// A write to all `active` legs begins. `false`: not now.
    pub(super) fn begin_write(&self, page: u64, count: u64, active: Legs) -> bool {
        let range = chunks(page, count);
        self.chunks_end.fetch_max(range.end, Ordering::SeqCst);
        for chunk in range.clone() {
            let Some((before, after)) = self.words.change(chunk, |word| word.begin_write(active)) else {
                (range.start..chunk).for_each(|begun| {
                    self.words.change(begun, |word| Some(word.end_write(active, Legs(0)).0));
                });
                return false;
            };
            // A spare that came in since the legs were chosen lacks the chunk, which nobody could have seen before.
            if !before.is_touched() {
                after.stale(self.all()).iter().for_each(|leg| self.hurt(leg));
            }
        }
        true
    }

    /// Would a write that ends with these legs be kept?
    pub(super) fn keeps(&self, page: u64, count: u64, have: Legs) -> bool {
        chunks(page, count).all(|chunk| !self.words.load(chunk).valid().and(have).is_empty())
    }

    /// It ends; `false`: in vain.
    pub(super) fn end_write(&self, page: u64, count: u64, have: Legs) -> bool {
        let mut all_kept = true;
        for chunk in chunks(page, count) {
            let mut kept = false;
            let changed = self.words.change(chunk, |word| {
                let (next, is_kept) = word.end_write(have, self.all());
                kept = is_kept;
                Some(next)
            });
            all_kept &= kept;
            if let Some((before, after)) = changed {
                self.count_hurts(before, after);
            }
        }
        all_kept
    }

    /// `leg` gave wrong bytes. `true`: others are asked from now on.
    pub(super) fn suspect(&self, page: u64, count: u64, leg: usize) -> bool {
        let mut is_changed = false;
        for chunk in chunks(page, count) {
            if let Some((before, after)) = self.words.change(chunk, |word| word.suspect(leg, self.active())) {
                self.count_hurts(before, after);
                is_changed = true;
            }
        }
        is_changed
    }

    fn count_hurts(&self, before: ChunkWord, after: ChunkWord) {
        for leg in before.valid().but(after.valid()).and(self.all()).iter() {
            self.hurt(leg);
        }
    }

    /// Legs from which the chunk can be copied to `leg`, which is now the caller's to do.
    pub(super) fn claim(&self, chunk: u64, leg: usize) -> Option<Legs> {
        let (before, _) = self.words.change(chunk, |word| {
            // Late writes could land on top of the copy.
            if self.is_late(leg) { None } else { Some(word.claim(leg, self.active())?.0) }
        })?;
        Some(before.valid().and(self.active()))
    }

    /// The end of a copy.
    pub(super) fn finish(&self, chunk: u64, leg: usize, copied: bool) {
        self.words.change(chunk, |word| Some(word.finish(leg, copied)));
    }
}

fn chunks(page: u64, count: u64) -> core::ops::Range<u64> {
    page / CHUNK_PAGES..(page + count).div_ceil(CHUNK_PAGES)
}

/// The words, in memory that exists once it is written. All are `first` at first.
struct Words {
    base: usize,
    count: u64,
    first: ChunkWord,
}

impl Words {
    fn new(count: u64, first: ChunkWord) -> Result<Words, farfield_os::Errno> {
        Ok(Words { base: memory::map_anonymous(Self::bytes(count))?, count, first })
    }

    fn bytes(count: u64) -> usize {
        (count as usize * size_of::<AtomicU32>()).max(1)
    }

    fn at(&self, chunk: u64) -> &AtomicU32 {
        assert!(chunk < self.count);
        // SAFETY: inside of the mapping, which lives as long as we do; zeroed, aligned, and only ever used as atomics.
        unsafe { &*(self.base as *const AtomicU32).add(chunk as usize) }
    }

    fn load(&self, chunk: u64) -> ChunkWord {
        ChunkWord(self.at(chunk).load(Ordering::SeqCst) ^ self.first.0)
    }

    /// The only place where words change: before and after, or `None` if `change` says so.
    fn change(
        &self,
        chunk: u64,
        mut change: impl FnMut(ChunkWord) -> Option<ChunkWord>,
    ) -> Option<(ChunkWord, ChunkWord)> {
        let at = self.at(chunk);
        let mut before = at.load(Ordering::SeqCst);
        loop {
            let word = ChunkWord(before ^ self.first.0);
            let next = change(word)?;
            match at.compare_exchange_weak(before, next.0 ^ self.first.0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some((word, next)),
                Err(now) => before = now,
            }
        }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; references do not outlive us.
        let _ = unsafe { memory::munmap(self.base, Self::bytes(self.count)) };
    }
}
