//! What all lanes of a mirror share: its legs, how they fare, and the words of its chunks.

use crate::{Backend, Health, PoolError};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use farfield_core::Incarnation;
use farfield_core::chunk_word::{ChunkWord, Legs};
use farfield_os::memory;
use std::sync::Arc;

/// Pages that are valid or stale together.
pub(super) const CHUNK_PAGES: u64 = 64;

/// One of those that hold the same.
pub(crate) struct Leg {
    /// `None`: it was lost before this mirror was opened.
    pub(crate) backend: Option<Arc<dyn Backend>>,
    /// Leaves in it: so many secrets of a ticket are its own.
    pub(crate) leaves: usize,
    /// Number of its first leaf.
    pub(crate) server: u16,
}

/// See the module.
pub(super) struct LegTable {
    pub(super) legs: Vec<Leg>,
    pub(super) pages: u64,
    /// Legs besides spares.
    wanted: usize,
    /// Legs that are memory of this machine: they answer while they are polled, and are never slow.
    pub(super) near: Legs,
    /// Sets of legs: in use, lost for good, waiting as spares.
    active: AtomicU8,
    lost: AtomicU8,
    spare: AtomicU8,
    /// Writes to each leg whose operation has ended without it.
    late: [AtomicU32; Legs::MAX],
    /// How often a chunk of the leg became stale, and up to which time all those are copied.
    hurts: [AtomicU32; Legs::MAX],
    healed: [AtomicU32; Legs::MAX],
    /// By a child of `fork`: nothing here is to be used.
    abandoned: AtomicBool,
    words: Words,
    /// No chunk from here on was ever written.
    chunks_end: AtomicU64,
}

impl LegTable {
    pub(super) fn new(
        mut legs: Vec<Leg>,
        spares: Vec<Leg>,
        pages: u64,
        inherited: bool,
    ) -> Result<LegTable, PoolError> {
        let wanted = legs.len();
        legs.extend(spares);
        let set = |is_in: &dyn Fn(usize, &Leg) -> bool| {
            let chosen = legs.iter().enumerate().filter(|(index, leg)| is_in(*index, leg));
            chosen.fold(Legs(0), |set, (index, _)| set.or(Legs::one(index)))
        };
        let lost = set(&|_, leg| leg.backend.is_none());
        let near = set(&|_, leg| leg.backend.as_ref().is_some_and(|backend| backend.mapped().is_some()));
        // In a snapshot, what was a spare and is there holds what the others hold.
        let spare = if inherited { Legs(0) } else { Legs::first(legs.len()).but(Legs::first(wanted)).but(lost) };
        let most = legs.iter().filter_map(|leg| Some(leg.backend.as_ref()?.pages())).min().unwrap_or(0);
        let pages = if pages == 0 { most } else { pages.min(most) };
        let (chunks, all) = (pages.div_ceil(CHUNK_PAGES), Legs::first(legs.len()));
        let first = if inherited { ChunkWord::inherited() } else { ChunkWord::fresh(spare) };
        let table = LegTable {
            legs,
            pages,
            wanted,
            near,
            active: AtomicU8::new(all.but(spare).but(lost).0),
            lost: AtomicU8::new(lost.0),
            spare: AtomicU8::new(spare.0),
            late: Default::default(),
            hurts: Default::default(),
            healed: Default::default(),
            abandoned: AtomicBool::new(false),
            words: Words::new(chunks, first).map_err(PoolError::Os)?,
            chunks_end: AtomicU64::new(if inherited { chunks } else { 0 }),
        };
        for leg in spare.iter() {
            table.hurts[leg].store(1, Ordering::Relaxed);
        }
        for _ in lost.and(Legs::first(wanted)).iter() {
            table.call_spare();
        }
        Ok(table)
    }

    pub(super) fn backends(&self) -> impl Iterator<Item = &Arc<dyn Backend>> {
        self.legs.iter().filter_map(|leg| leg.backend.as_ref())
    }

    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        self.backends().for_each(|backend| backend.abandon());
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    pub(super) fn all(&self) -> Legs {
        Legs::first(self.legs.len())
    }

    fn lost(&self) -> Legs {
        Legs(self.lost.load(Ordering::SeqCst))
    }

    /// Legs to write to and read from.
    pub(super) fn active(&self) -> Legs {
        let active = Legs(self.active.load(Ordering::SeqCst)).but(self.lost());
        if !active.is_empty() {
            return active;
        }
        // Better a slow one than none.
        self.all().but(self.lost()).but(Legs(self.spare.load(Ordering::SeqCst)))
    }

    /// A leg is gone, or may hold anything. For good; a spare takes its place.
    pub(super) fn lose(&self, leg: usize) {
        let bit = Legs::one(leg).0;
        if self.lost.fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            self.active.fetch_and(!bit, Ordering::SeqCst);
            if self.spare.fetch_and(!bit, Ordering::SeqCst) & bit == 0 {
                self.call_spare();
            }
        }
    }

    fn call_spare(&self) {
        loop {
            let spare = Legs(self.spare.load(Ordering::SeqCst));
            let Some(leg) = spare.iter().next() else { return };
            // In use before it is no spare any more: it is never neither.
            self.active.fetch_or(Legs::one(leg).0, Ordering::SeqCst);
            if self.spare.fetch_and(!Legs::one(leg).0, Ordering::SeqCst) & Legs::one(leg).0 != 0 {
                return;
            }
        }
    }

    /// `leg` has not answered a write for long; others have it. It is not asked for anything until it has.
    pub(super) fn set_late(&self, leg: usize) {
        self.late[leg].fetch_add(1, Ordering::SeqCst);
        self.active.fetch_and(!Legs::one(leg).0, Ordering::SeqCst);
    }

    /// That answer has come.
    pub(super) fn late_came(&self, leg: usize) {
        if self.late[leg].fetch_sub(1, Ordering::SeqCst) == 1 && !self.lost().has(leg) {
            self.active.fetch_or(Legs::one(leg).0, Ordering::SeqCst);
        }
    }

    /// Does the leg hold everything?
    pub(super) fn is_whole(&self, leg: usize) -> bool {
        let is_used = self.active().has(leg) && self.late[leg].load(Ordering::SeqCst) == 0;
        is_used && self.hurts(leg) == self.healed[leg].load(Ordering::SeqCst)
    }

    pub(super) fn hurts(&self, leg: usize) -> u32 {
        self.hurts[leg].load(Ordering::SeqCst)
    }

    /// Everything that had become stale when it was hurt so often is copied.
    pub(super) fn set_healed(&self, leg: usize, hurts: u32) {
        self.healed[leg].fetch_max(hurts, Ordering::SeqCst);
    }

    /// Legs that lack something and may be copied to.
    pub(super) fn to_heal(&self) -> Legs {
        let hurt = |leg: &usize| {
            self.hurts(*leg) != self.healed[*leg].load(Ordering::SeqCst) && self.late[*leg].load(Ordering::SeqCst) == 0
        };
        self.active().iter().filter(hurt).fold(Legs(0), |legs, leg| legs.or(Legs::one(leg)))
    }

    pub(super) fn health(&self) -> Health {
        let whole = (0..self.legs.len()).filter(|leg| self.is_whole(*leg)).count();
        if self.lost().0 | self.spare.load(Ordering::SeqCst) == self.all().0 {
            Health::Gone
        } else if whole >= self.wanted {
            Health::Good
        } else {
            Health::Degraded
        }
    }

    /// What is said when no leg is left that could answer.
    pub(super) fn gone(&self) -> PoolError {
        let server = self.lost().iter().last().map_or(0, |leg| self.legs[leg].server);
        PoolError::ServerGone { server, incarnation: Incarnation(0) }
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
            if self.words.change(chunk, |word| word.begin_write(active)).is_none() {
                (range.start..chunk).for_each(|begun| {
                    self.words.change(begun, |word| Some(word.end_write(active, Legs(0)).0));
                });
                return false;
            }
        }
        true
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
            // Behind the change: whoever has looked at the word in vain has read the count before.
            self.hurts[leg].fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Legs from which the chunk can be copied to `leg`, which is now the caller's to do.
    pub(super) fn claim(&self, chunk: u64, leg: usize) -> Option<Legs> {
        let (before, _) = self.words.change(chunk, |word| {
            // Late writes could land on top of the copy.
            if self.late[leg].load(Ordering::SeqCst) != 0 { None } else { Some(word.claim(leg, self.active())?.0) }
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
