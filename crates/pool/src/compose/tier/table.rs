//! State that all lanes of a tiered pool share: where each page is, and how much room each tier
//! has.

use super::lane::TierLane;
use crate::dirty_chunks::DirtyChunks;
use crate::redundant::members::{MemberLane, PoolMember, backends};
use crate::redundant::repair::RepairSource;
use crate::table::AtomicTable;
use crate::{Health, PagePlaces, PoolError, TierPages};
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::policy::tier_admission::{TierClockAction, TierOccupancy, clock_action};
use farfield_core::tier_word::TierWord;
use farfield_core::time::Moment;
use farfield_core::{Incarnation, MemberSet, PageId};
use farfield_os::process::now_ns;
use farfield_os::sync::Mutex;
use std::sync::Arc;

/// Number of pages that are noted together as perhaps written.
const CHUNK_PAGES: u64 = 64;
/// Time after which a full tier is asked again though nothing has left it.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// Most pages whose copies are given back in one go.
const SWEEP_PAGES: u64 = 4096;
/// Most maintenance steps that the thread has under way.
const THREAD_TASKS_MAX: usize = 4;

/// Choice of the tier that a page is written to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TierChoice {
    Tier(usize),
    /// The only tier that could take the page is busy with it.
    Busy,
    /// All tiers are full.
    Full,
    /// All tiers are gone.
    Gone,
}

/// Pages that are on their way to a tier.
#[derive(Clone, Copy, Default)]
pub(super) struct Bid {
    /// Number of pages that the tier had no bytes of.
    added: u64,
    /// Number of pages that the tier held with them when they set out. By the time that it has
    /// answered, it may have given back many others.
    held: u64,
}

struct Tier {
    /// Room of the tier, as in [`TierOccupancy`].
    held: CopyCount,
    limit: AtomicU64,
    full_until: AtomicU64,
    /// Number of pages that the tier holds and that are being moved away, or given back.
    leaving: AtomicU64,
    /// Number of times that copies were claimed here to be given back. It grows before the tier is told.
    sweeps: AtomicU64,
    is_gone: AtomicBool,
}

/// Place of each page.
pub(super) struct TierMap {
    pages: u64,
    words: AtomicTable<AtomicU64>,
    dirty_chunks: DirtyChunks,
}

impl TierMap {
    fn new(pages: u64) -> Result<TierMap, PoolError> {
        let dirty = DirtyChunks::new(pages.div_ceil(CHUNK_PAGES)).map_err(PoolError::Os)?;
        Ok(TierMap { pages, words: AtomicTable::new(pages).map_err(PoolError::Os)?, dirty_chunks: dirty })
    }

    fn word(&self, page: u64) -> TierWord {
        TierWord(self.words.at(page).load(Ordering::SeqCst))
    }

    /// Returns the first page from `page` on that may have been written, or the end.
    fn next_written(&self, page: u64) -> u64 {
        let chunk = page / CHUNK_PAGES;
        match self.dirty_chunks.next(chunk) {
            Some(next) if next == chunk => page,
            Some(next) => (next * CHUNK_PAGES).min(self.pages),
            None => self.pages,
        }
    }

    /// Iterates over the pages that were written and have a copy somewhere.
    fn written(&self) -> impl Iterator<Item = (u64, TierWord)> {
        let mut from = 0;
        let pages = std::iter::from_fn(move || {
            let page = self.next_written(from);
            from = page + 1;
            (page < self.pages).then_some(page)
        });
        pages.map(|page| (page, self.word(page))).filter(|(_, word)| !word.copies().is_empty())
    }

    /// Copies the places as they are now, for a snapshot of the tiers. They must not change
    /// meanwhile.
    fn copy(&self) -> Result<TierMap, PoolError> {
        let copy = TierMap::new(self.pages)?;
        for (page, word) in self.written() {
            copy.dirty_chunks.mark(page / CHUNK_PAGES);
            copy.words.at(page).store(word.settled().0, Ordering::SeqCst);
        }
        Ok(copy)
    }
}

/// Number of copies that words name. A word changes before the sum does, so a thread may take away
/// what another has not added yet.
#[derive(Default)]
struct CopyCount(AtomicI64);

impl CopyCount {
    fn add(&self, copies: i64) {
        self.0.fetch_add(copies, Ordering::SeqCst);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst).try_into().unwrap_or(0)
    }
}

/// Tiers of the pool, and the place of each page.
pub(super) struct TierTable {
    pub(super) members: Vec<PoolMember>,
    pub(super) pages: u64,
    map: TierMap,
    tiers: Vec<Tier>,
    /// Number of copies that can be given back, and number of copies that ever were given back or
    /// came to count again.
    garbage: CopyCount,
    cleared: AtomicU64,
    /// Number of pages that ever went to the next tier.
    moved: AtomicU64,
    /// Number of times that a page came to lie elsewhere. It grows after the word has changed.
    relocations: AtomicU64,
    /// Pages of each tier as they were last named, with `relocations` from before.
    named: Mutex<Vec<Option<(u64, TierPages)>>>,
    /// Time before which no move begins.
    rests_until: AtomicU64,
    is_abandoned: AtomicBool,
}

impl RepairSource for TierTable {
    type Lane = TierLane;
    fn needs_repair(&self) -> bool {
        !self.is_abandoned() && !self.is_resting() && self.has_work()
    }
    fn open_repair_lane(self: &Arc<TierTable>) -> Option<TierLane> {
        TierLane::open_for_thread(self, THREAD_TASKS_MAX).ok()
    }
}

impl TierTable {
    pub(super) fn new(members: Vec<PoolMember>, pages: u64) -> Result<TierTable, PoolError> {
        let least = backends(&members).map(|backend| backend.pages()).min();
        Ok(TierTable::with(members, TierMap::new(pages.min(least.unwrap_or(0)))?))
    }

    /// Creates the table of a claimed snapshot.
    pub(super) fn inherited(members: Vec<PoolMember>, places: TierMap) -> TierTable {
        let table = TierTable::with(members, places);
        table.map.written().for_each(|(_, word)| table.count(TierWord::default(), word));
        table
    }

    fn with(members: Vec<PoolMember>, map: TierMap) -> TierTable {
        let tier = |member: &PoolMember| Tier {
            held: CopyCount::default(),
            limit: AtomicU64::new(u64::MAX),
            full_until: AtomicU64::new(0),
            leaving: AtomicU64::new(0),
            sweeps: AtomicU64::new(0),
            is_gone: AtomicBool::new(member.backend.is_none()),
        };
        TierTable {
            tiers: members.iter().map(tier).collect(),
            named: Mutex::new(members.iter().map(|_| None).collect()),
            relocations: AtomicU64::new(0),
            members,
            pages: map.pages,
            map,
            garbage: CopyCount::default(),
            cleared: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            rests_until: AtomicU64::new(0),
            is_abandoned: AtomicBool::new(false),
        }
    }

    /// Copies the places of pages for a snapshot, whose tiers do not contain them. Nothing may be
    /// under way.
    pub(super) fn copy_map(&self) -> Result<TierMap, PoolError> {
        self.map.copy()
    }

    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::SeqCst);
        backends(&self.members).for_each(|backend| backend.abandon());
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::SeqCst)
    }

    /// Checks whether there is something to move, or to give back.
    pub(super) fn has_work(&self) -> bool {
        self.has_garbage() || (0..self.members.len()).any(|tier| self.move_to(tier).is_some())
    }

    /// Starts no more moves for `time`, because one has failed, or nothing can be moved now. So
    /// snapshots find a moment.
    pub(super) fn rest(&self, time: Duration) {
        self.rests_until.fetch_max(Moment(now_ns()).after(time).0, Ordering::SeqCst);
    }

    pub(super) fn is_resting(&self) -> bool {
        let until = self.rests_until.load(Ordering::SeqCst);
        until != 0 && now_ns() < until
    }

    // Words.

    pub(super) fn word(&self, page: u64) -> TierWord {
        self.map.word(page)
    }

    /// Changes the word of a page, which happens only here. Returns `None` if `change` refuses the
    /// word as it is.
    pub(super) fn change<T>(
        &self,
        page: u64,
        mut change: impl FnMut(TierWord) -> Option<(TierWord, T)>,
    ) -> Option<(TierWord, T)> {
        let at = self.map.words.at(page);
        let mut before = at.load(Ordering::SeqCst);
        loop {
            let (next, told) = change(TierWord(before))?;
            match at.compare_exchange_weak(before, next.0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    self.count(TierWord(before), next);
                    if TierWord(before).at() != next.at() {
                        self.relocations.fetch_add(1, Ordering::SeqCst);
                    }
                    return Some((TierWord(before), told));
                }
                Err(now) => before = now,
            }
        }
    }

    /// Brings the sums up to date with the change of a word.
    fn count(&self, before: TierWord, after: TierWord) {
        for tier in after.copies().difference(before.copies()).iter() {
            self.tiers[tier].held.add(1);
        }
        for tier in before.copies().difference(after.copies()).iter() {
            self.tiers[tier].held.add(-1);
        }
        let (was, is) = (before.garbage().count(), after.garbage().count());
        if was != is {
            self.garbage.add(is as i64 - was as i64);
            self.cleared.fetch_add(was.saturating_sub(is) as u64, Ordering::SeqCst);
        }
    }

    /// Begins to write a page to `tier`. Returns whether the tier had no bytes of it; `None` if it
    /// cannot be written there now.
    pub(super) fn begin_write(&self, page: u64, tier: usize) -> Option<bool> {
        self.map.dirty_chunks.mark(page / CHUNK_PAGES);
        let (before, ()) = self.change(page, |word| Some((word.begin_write(tier)?, ())))?;
        Some(!before.copies().has(tier))
    }

    pub(super) fn end_write(&self, first: u64, count: u64, tier: usize, written: bool) {
        for page in first..first + count {
            self.change(page, |word| Some((word.end_write(tier, written), ())));
        }
    }

    pub(super) fn discard(&self, page: u64) {
        self.change(page, |word| Some((word.discard()?, ())));
    }

    /// Returns the sum of the generations of these pages, which differs after any change to one of
    /// them. Returns `None` if not all of them are at `tier`.
    pub(super) fn stamp(&self, first: u64, count: u64, tier: usize) -> Option<u64> {
        let is_there = |word: &TierWord| word.at() == Some(tier);
        let words = (first..first + count).map(|page| Some(self.word(page)).filter(is_there));
        words.map(|word| Some(u64::from(word?.generation()))).sum()
    }

    /// Returns the first page from `page` on that may have been written, or the end.
    pub(super) fn next_written(&self, page: u64) -> u64 {
        self.map.next_written(page)
    }

    /// Claims the copies at `tier` of this page and of those behind it. Returns their number.
    pub(super) fn claim_sweep(&self, first: u64, end: u64, tier: usize, discards: bool) -> u64 {
        let end = end.min(first + SWEEP_PAGES);
        let claim = |page: &u64| {
            if discards {
                self.discard(*page);
            }
            self.change(*page, |word| Some((word.claim_sweep(tier)?, ()))).is_some()
        };
        let count = (first..end).take_while(claim).count() as u64;
        self.tiers[tier].leaving.fetch_add(count, Ordering::SeqCst);
        self.tiers[tier].sweeps.fetch_add(u64::from(count > 0), Ordering::SeqCst);
        count
    }

    /// Counts copies that were claimed to leave a tier and have left it, or do not leave; called
    /// once for each claim.
    pub(super) fn end_leaving(&self, tier: usize, count: u64) {
        self.tiers[tier].leaving.fetch_sub(count, Ordering::SeqCst);
    }

    pub(super) fn finish_sweep(&self, first: u64, count: u64, tier: usize, swept: bool) {
        for page in first..first + count {
            self.change(page, |word| Some((word.finish_sweep(tier, swept), ())));
        }
    }

    /// Notes that the page was written before the clock hand came by.
    pub(super) fn age(&self, page: u64) {
        self.change(page, |word| Some((word.age()?, ())));
    }

    /// Claims this page and those behind it that shall leave. Returns their number, and the bid
    /// that they are to the tier where they go.
    pub(super) fn claim_move(&self, first: u64, count: u64, from: usize, to: usize) -> (u64, Bid) {
        let mut added = 0;
        let claim = |page: &u64| {
            let leaves = |word: TierWord| clock_action(word, from) == TierClockAction::Leave;
            let claimed = self
                .change(*page, |word| leaves(word).then(|| word.claim_move(from, to)).flatten().map(|word| (word, ())));
            added += u64::from(claimed.is_some_and(|(before, ())| !before.copies().has(to)));
            claimed.is_some()
        };
        let end = (first + count).min(self.pages);
        let count = (first..end).take_while(claim).count() as u64;
        self.tiers[from].leaving.fetch_add(count, Ordering::SeqCst);
        (count, self.bid(to, added))
    }

    pub(super) fn finish_move(&self, first: u64, count: u64, to: usize, copied: bool) {
        let moved = (first..first + count).filter(|page| {
            let end = self.change(*page, |word| Some(word.finish_move(to, copied)));
            end.is_some_and(|(_, is_there)| is_there)
        });
        self.moved.fetch_add(moved.count() as u64, Ordering::Relaxed);
    }

    // Room.

    fn room(&self, tier: usize) -> TierOccupancy {
        let tier = &self.tiers[tier];
        TierOccupancy {
            held: tier.held.get(),
            limit: tier.limit.load(Ordering::SeqCst),
            full_until: Moment(tier.full_until.load(Ordering::SeqCst)),
        }
    }

    fn is_open(&self, tier: usize) -> bool {
        self.room(tier).is_open(|| Moment(now_ns()))
    }

    /// Returns the bid of pages that set out for a tier; `added` of them it has no bytes of.
    pub(super) fn bid(&self, tier: usize, added: u64) -> Bid {
        Bid { added, held: self.room(tier).held }
    }

    /// Notes that the tier was full for these pages.
    pub(super) fn set_full(&self, tier: usize, bid: Bid) {
        let room = self.room(tier);
        let limit = TierOccupancy { held: room.held.max(bid.held), ..room }.limit_when_full(bid.added);
        self.tiers[tier].limit.store(limit, Ordering::SeqCst);
        self.tiers[tier].full_until.store(Moment(now_ns()).after(ASK_AGAIN).0, Ordering::SeqCst);
    }

    /// Notes that the tier took these pages.
    pub(super) fn took(&self, tier: usize, bid: Bid) {
        let room = self.room(tier);
        if bid.added > 0 && room.held > room.limit {
            self.tiers[tier].limit.fetch_max(room.held, Ordering::SeqCst);
        }
    }

    pub(super) fn has_garbage(&self) -> bool {
        self.garbage.get() != 0
    }

    /// Returns the count at which all copies that can be given back now will have been, for
    /// [`TierTable::is_cleared`]. Returns `None` if there are none.
    pub(super) fn clearing(&self) -> Option<u64> {
        let cleared = self.cleared.load(Ordering::SeqCst);
        let garbage = self.garbage.get();
        (garbage != 0).then_some(cleared + garbage)
    }

    pub(super) fn is_cleared(&self, clearing: u64) -> bool {
        self.cleared.load(Ordering::SeqCst) >= clearing || !self.has_garbage()
    }

    fn lives(&self, tier: usize) -> bool {
        !self.tiers[tier].is_gone.load(Ordering::SeqCst)
    }

    pub(super) fn living(&self) -> MemberSet {
        (0..self.members.len()).filter(|tier| self.lives(*tier)).collect()
    }

    pub(super) fn mark_failed(&self, tier: usize) {
        self.tiers[tier].is_gone.store(true, Ordering::SeqCst);
    }

    pub(super) fn gone(&self, tier: usize) -> PoolError {
        PoolError::ServerGone { server: self.members[tier].server, incarnation: Incarnation(0) }
    }

    /// Returns the tier where pages of `tier` go, if more have to leave than do, and it has room
    /// for them.
    pub(super) fn move_to(&self, tier: usize) -> Option<usize> {
        let leaving = self.tiers[tier].leaving.load(Ordering::SeqCst);
        if self.room(tier).to_move() <= leaving || !self.lives(tier) {
            return None;
        }
        (tier + 1..self.members.len()).find(|next| self.lives(*next) && self.is_open(*next))
    }

    /// Returns the first of the `usable` tiers, from `from` on, that a page with this word can be
    /// written to.
    pub(super) fn choose(&self, word: TierWord, usable: MemberSet, from: usize) -> TierChoice {
        let Some(last) = usable.iter().last() else { return TierChoice::Gone };
        let mut is_busy = false;
        for tier in usable.iter().filter(|tier| *tier >= from) {
            let may_have_room = || word.at() == Some(tier) || tier == last || self.is_open(tier);
            if word.claimed() == Some(tier) {
                is_busy = true;
            } else if may_have_room() {
                return TierChoice::Tier(tier);
            }
        }
        if is_busy { TierChoice::Busy } else { TierChoice::Full }
    }

    /// Returns the error that says that all tiers are full, with the server of the last one.
    pub(super) fn full(&self) -> PoolError {
        let last = self.living().iter().last().unwrap_or(0);
        PoolError::PoolFull { server: self.members[last].server }
    }

    pub(super) fn health(&self) -> Health {
        let health = |member: &PoolMember| member.backend.as_ref().map_or(Health::Gone, |backend| backend.health());
        let all: Vec<Health> = self.members.iter().map(health).collect();
        if all.iter().all(|health| *health == Health::Gone) {
            Health::Gone
        } else if all.iter().all(|health| *health == Health::Good) {
            Health::Good
        } else {
            Health::Degraded
        }
    }

    /// Returns how many pages each tier has bytes of, and how many went to the next one.
    pub(super) fn counts(&self) -> (Vec<u64>, u64) {
        let held = (0..self.members.len()).map(|tier| self.room(tier).held).collect();
        (held, self.moved.load(Ordering::Relaxed))
    }

    /// Returns the runs of pages (first page, count) that a tier has; `None` if there are more than so many.
    fn runs_at(&self, tier: usize, runs_max: usize) -> Option<Arc<[(u64, u64)]>> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut first = self.next_written(0);
        while first < self.pages {
            let end = (first + CHUNK_PAGES - first % CHUNK_PAGES).min(self.pages);
            for page in (first..end).filter(|page| self.word(*page).at() == Some(tier)) {
                let is_full = runs.len() == runs_max;
                match runs.last_mut() {
                    Some((run, count)) if *run + *count == page => *count += 1,
                    _ if is_full => return None,
                    _ => runs.push((page, 1)),
                }
            }
            first = self.next_written(end);
        }
        Some(runs.into())
    }

    // Lanes.

    pub(super) fn open_lanes(&self, requests: usize) -> Result<Vec<Option<MemberLane>>, PoolError> {
        let mut lanes = Vec::with_capacity(self.members.len());
        for (tier, member) in self.members.iter().enumerate() {
            lanes.push(match member.backend.as_ref().map(|backend| backend.open_lane()) {
                Some(Ok(lane)) => Some(MemberLane::new(lane, requests)),
                Some(Err(PoolError::ServerGone { .. })) => {
                    self.mark_failed(tier);
                    None
                }
                Some(Err(error)) => return Err(error),
                None => None,
            });
        }
        if lanes.iter().all(Option::is_none) { Err(self.gone(0)) } else { Ok(lanes) }
    }
}

/// A function reads a page at a tier while others write, move and discard pages. The tier's copy keeps its
/// bytes, or gets newer ones, until it is given back. That is claimed first, when the page has left the
/// tier, then counted (`sweeps`), and only then is the tier told. So if the count has not changed since
/// before the page was found there, nobody has told the tier to give the copy back.
///
/// Pages that were named before are still at the tier if neither count has changed. A thread that has moved
/// a page and not counted that yet has not reported its write as done, so the user of the pool takes the
/// page for unwritten; or the copy that it has left is right, and its return will be counted as a sweep.
impl PagePlaces for TierTable {
    fn tiers(&self) -> usize {
        self.members.len()
    }

    fn tier_of(&self, page: PageId) -> Option<usize> {
        (page.0 < self.pages).then(|| self.word(page.0).at()).flatten()
    }

    fn pages_at(&self, tier: usize, runs_max: usize) -> Option<TierPages> {
        // Both before the words are looked at.
        let sweeps = self.tiers[tier].sweeps.load(Ordering::SeqCst);
        let relocations = self.relocations.load(Ordering::SeqCst);
        let mut named = self.named.lock();
        let is_current = |(at, pages): &&(u64, TierPages)| *at == relocations && pages.sweeps == sweeps;
        if let Some((_, pages)) = named[tier].as_ref().filter(is_current) {
            return (pages.runs.len() <= runs_max).then(|| pages.clone());
        }
        let pages = TierPages { tier, runs: self.runs_at(tier, runs_max)?, sweeps };
        named[tier] = Some((relocations, pages.clone()));
        Some(pages)
    }

    fn are_kept(&self, pages: &TierPages) -> bool {
        self.tiers[pages.tier].sweeps.load(Ordering::SeqCst) == pages.sweeps
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a tier that takes itself for full, or for unlimited, because two threads count.
    use super::*;

    #[test]
    fn copies_that_are_taken_away_before_they_are_added_count_as_none() {
        let count = CopyCount::default();
        count.add(-1);
        assert_eq!(count.get(), 0);
        count.add(3);
        assert_eq!(count.get(), 2);
    }
}
