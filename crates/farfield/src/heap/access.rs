//! The slow path of a dereference: the slot's guess was wrong, or the page is not near.

use super::attempt::NOT_NEAR;
use super::evictor::{Outcome, Urgency};
use super::frames::Purse;
use super::io::{Flight, Landing};
use super::segments::Unit;
use super::threads::{Record, add, count};
use super::{Core, Patience, Scope};
use crate::error::FarError;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{Deref, FrameId, FrameWord, Place, State};
use farfield_pool::PoolError;
use std::time::Instant;

/// How long a thread that waits for the evictor sleeps at most before it looks for itself.
const SLEEP: Duration = Duration::from_millis(1);

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

/// Every so many wrong guesses of slots that lie in clean frames, one is corrected.
const CORRECT_EVERY: u32 = 64;

impl Core {
    /// The object of a slot, made near. The caller is inside a scope.
    ///
    /// The slot gets a better guess. A slot that lies in the arena is part of a page, which would have to be written
    /// again for a guess; so only one in 64 of those is corrected, which costs a small share of the time that a used slot saves.
    #[cold]
    pub(crate) fn find(&self, scope: &Scope<'_>, page: u32, slot: &AtomicU32, want: Want) -> Result<Place, FarError> {
        let frame = self.bring(scope.record, page, want, scope.is_renewable())?;
        Ok(self.guess(scope.record, slot, frame))
    }

    /// The place of a slot's object in this frame, which the slot remembers.
    pub(crate) fn guess(&self, record: &Record, slot: &AtomicU32, frame: FrameId) -> Place {
        let place = Place(slot.load(Ordering::Relaxed)).in_frame(frame);
        if self.may_correct(record, slot.as_ptr() as usize) {
            slot.store(place.0, Ordering::Relaxed);
        }
        place
    }

    /// Is it time to correct the guess of the slot at this address?
    pub(crate) fn may_correct(&self, record: &Record, slot: usize) -> bool {
        let tick = record.tick.get().wrapping_add(1);
        record.tick.set(tick);
        !self.frames.contains(slot) || tick.is_multiple_of(CORRECT_EVERY)
    }

    /// The frame of the page, if it is near and nobody has to be waited for. The caller is inside a scope.
    #[cold]
    pub(crate) fn near_now(&self, record: &Record, page: u32) -> Option<FrameId> {
        let word = &self.words[page];
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            let (next, Deref::Here(frame)) = seen.deref(false) else { return None };
            if next == seen || self.exchange(word, seen, next) {
                count_use(record, seen);
                return Some(frame);
            }
        }
    }

    /// Renews the only scope of this thread, which nobody has a reference from, and waits until there is room.
    #[cold]
    pub(crate) fn make_room(&self, record: &Record) -> Result<(), FarError> {
        record.renew_only(&self.epoch);
        let frame = self.take_frames(record, 1, true)?;
        self.frames.put(frame, 1);
        Ok(())
    }

    /// A scope is about to begin, and there is little room. What is cooled after it began cannot leave before it ends, so room is
    /// made first, unless somebody is at it.
    #[cold]
    pub(crate) fn relieve(&self) {
        self.reclaimer.wake();
        // Whoever finds no frame in the end gets the error.
        let _ = self.evictor.try_run(self, self.evictor.batch(), Urgency::Demand);
    }

    /// Makes the page near. The caller is inside a scope; if it holds no reference from it (`renewable`), the scope may be
    /// renewed while it waits.
    pub(crate) fn bring(&self, record: &Record, page: u32, want: Want, renewable: bool) -> Result<FrameId, FarError> {
        let word = &self.words[page];
        let mut patience = Patience::new(self.patience);
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            let (next, what) = want.decide(seen);
            match what {
                Deref::Here(frame) => {
                    if next == seen || self.exchange(word, seen, next) {
                        count_use(record, seen);
                        return Ok(frame);
                    }
                }
                Deref::Wait | Deref::Fetch
                    if record.is_impatient.get() && matches!(seen.state(), State::Fetching | State::Far) =>
                {
                    record.missed.set(Some((page, want)));
                    return Err(NOT_NEAR);
                }
                _ if cfg!(debug_assertions) && record.locks.get() > 0 => unreachable!("waits for a page with a lock"),
                Deref::Wait => {
                    if next == seen || self.exchange(word, seen, next) {
                        if seen.state() == State::Fetching {
                            self.help(record, Some(page));
                        }
                        patience.wait()?;
                    }
                }
                Deref::Fetch | Deref::Zero => {
                    let pages = self.segments.unit_of(page).map_or(1, |unit| unit.pages);
                    // The frames first: nobody waits for a page whose owner waits for room.
                    let frame = match self.take_frames(record, pages, renewable) {
                        Err(error) if what == Deref::Fetch && want == Want::Read => {
                            self.take_to_read(record, pages, renewable, error)?
                        }
                        frames => frames?,
                    };
                    if !self.exchange(word, seen, next) {
                        self.frames.put(frame, pages);
                        continue;
                    }
                    if what == Deref::Fetch {
                        count(&record.counters.misses);
                        add(&record.counters.fetched_bytes, u64::from(pages) * PAGE_BYTES as u64);
                        let unit = Unit { page, pages };
                        self.fetch(record, Flight::Unit { unit, frame, landing: want.landing() })?;
                        return Ok(frame);
                    }
                    self.occupy(seen);
                    if let Err(error) = self.make_zero(page, pages, frame) {
                        self.frames.put(frame, pages);
                        word.store(next.gave_up(State::Empty).0, Ordering::Release);
                        self.vacate(next.is_stored());
                        return Err(error);
                    }
                    word.store(next.arrived(frame, true).0, Ordering::Release);
                    return Ok(frame);
                }
            }
        }
    }

    /// One transition of a frame word; the only place where a mutator makes one that others could make too.
    pub(crate) fn exchange(&self, word: &AtomicU64, seen: FrameWord, next: FrameWord) -> bool {
        // Acquire: what the last owner of the page did to its frame is done. Release: what we did is.
        word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Fills the frames of a unit that was Empty, and whose word we made Fetching.
    fn make_zero(&self, page: u32, pages: u32, frame: FrameId) -> Result<(), FarError> {
        self.claim_rest(page, pages)?;
        // SAFETY: the frames are ours since `take_frames`, and so many.
        unsafe { self.frames.address(frame).write_bytes(0, pages as usize * PAGE_BYTES) };
        self.frames.infos[frame.0].moved_in(page);
        Ok(())
    }

    /// A unit of several pages comes into being: the words of all but the first stay Fetching as long as it exists, so that
    /// nobody discards what an earlier page there left in the pool.
    fn claim_rest(&self, page: u32, pages: u32) -> Result<(), FarError> {
        let mut patience = Patience::new(self.patience);
        for inside in page + 1..page + pages {
            let word = &self.words[inside];
            loop {
                let seen = FrameWord(word.load(Ordering::Acquire));
                match seen.create() {
                    (next, Deref::Zero) if self.exchange(word, seen, next) => break self.occupy(seen),
                    _ => {
                        if let Err(error) = patience.wait() {
                            for claimed in page + 1..inside {
                                let seen = FrameWord(self.words[claimed].load(Ordering::Acquire));
                                self.words[claimed].store(seen.gave_up(State::Empty).0, Ordering::Release);
                                self.vacate(seen.is_stored());
                            }
                            return Err(error);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Frames for a unit. Makes room if there is none: with the evictor's own hands if it is idle, because a wake-up takes
    /// longer than a batch.
    pub(crate) fn take_frames(&self, record: &Record, pages: u32, renewable: bool) -> Result<FrameId, FarError> {
        if let Some(frame) = self.frames.take(pages, Purse::Behind(self.throttle.waiting())) {
            if self.frames.room() < self.reserve().low {
                self.reclaimer.wake();
            }
            return Ok(frame);
        }
        self.check_size(pages)?;
        count(&record.counters.throttled);
        let started = Instant::now();
        let frames = self.wait_for_frames(record, pages, renewable);
        record.counters.pauses.add(started.elapsed());
        frames
    }

    /// The scopes of a thread that waits for frames hold back no more than they must.
    fn renew(&self, record: &Record, renewable: bool) {
        if renewable {
            record.renew_only(&self.epoch);
        }
        record.renew_idle(&self.epoch);
    }

    /// Frames for a unit that comes to be read, though there are none: the pool is full, so nothing that was changed can leave. What
    /// was only read can. So the reserve is enough to read everything, a little at a time.
    pub(crate) fn take_to_read(
        &self,
        record: &Record,
        pages: u32,
        renewable: bool,
        error: FarError,
    ) -> Result<FrameId, FarError> {
        if !matches!(error, FarError::Pool(PoolError::PoolFull { .. })) {
            return Err(error);
        }
        let mut patience = Patience::new(self.patience);
        let mut is_over = false;
        loop {
            if let Some(frame) = self.frames.take(pages, Purse::Reserve) {
                return Ok(frame);
            }
            if is_over || patience.wait().is_err() {
                return Err(error);
            }
            self.renew(record, renewable);
            let outcome = self.evictor.try_run(self, self.frames.room() + pages, Urgency::Full);
            is_over = match outcome {
                Some(Ok(Outcome::Blocked(epoch))) => !renewable && record.keeps(epoch, |_| true),
                Some(Ok(Outcome::Hot) | Err(_)) => true,
                Some(Ok(Outcome::Enough | Outcome::Soon)) | None => false,
            };
        }
    }

    /// Units of more than half of the frames find no neighbours.
    pub(super) fn check_size(&self, pages: u32) -> Result<(), FarError> {
        if pages > self.frames.limit() / 2 {
            return Err(FarError::TooLarge { bytes: u64::from(pages) * PAGE_BYTES as u64 });
        }
        Ok(())
    }

    fn wait_for_frames(&self, record: &Record, pages: u32, renewable: bool) -> Result<FrameId, FarError> {
        self.reclaimer.wake();
        let place = self.throttle.queue();
        let mut patience = Patience::new(self.patience);
        let mut goal = self.first_goal(pages);
        loop {
            self.renew(record, renewable);
            let before = place.before();
            let round = self.make_frames(pages, &mut goal, before)?;
            match round {
                Round::Got(frame) => return Ok(frame),
                // All that could leave waits for a scope of this thread, which does not end before we return.
                Round::Blocked(epoch) if !renewable && record.keeps(epoch, |_| true) => {
                    return self.frames.take(pages, Purse::Reserve).ok_or(FarError::NearFull);
                }
                // It waits for scopes of others, who may wait for what this thread holds.
                Round::Blocked(_) if patience.is_long() => {
                    if let Some(frame) = self.frames.take(pages, Purse::Reserve) {
                        return Ok(frame);
                    }
                }
                _ => {}
            }
            // What has arrived can leave again.
            self.help(record, None);
            if round == Round::Busy {
                let enough = || self.frames.room() >= goal + before;
                patience.wait_by(|| place.sleep_unless(enough, SLEEP))?;
            } else {
                patience.wait()?;
            }
        }
    }

    /// How many frames are to be free for those who wait for so many. No more than a batch, so that it does not take long: the rest
    /// is the reclaimer's.
    pub(super) fn first_goal(&self, pages: u32) -> u32 {
        self.frames.reserve() + pages
    }

    /// One round of a thread or task that waits for frames behind others: makes room with its own hands, if nobody else is at it.
    pub(super) fn make_frames(&self, pages: u32, goal: &mut u32, before: u32) -> Result<Round, FarError> {
        // As much as it may take when something is left for those before; else it would not see what is in the way.
        let outcome = self.evictor.try_run(self, *goal + before, Urgency::Demand);
        if let Some(frame) = self.frames.take(pages, Purse::Behind(before)) {
            return Ok(Round::Got(frame));
        }
        self.evictor.try_close(self);
        // Free frames need not be neighbours: each round frees more.
        if pages > 1 && self.frames.room() >= *goal {
            *goal = (*goal + *goal / 2).min(self.frames.limit());
        }
        match outcome {
            None => Ok(Round::Busy),
            Some(Ok(Outcome::Blocked(epoch))) => Ok(Round::Blocked(epoch)),
            Some(Ok(_)) => Ok(Round::Tried),
            Some(Err(error)) => Err(error.into()),
        }
    }
}

/// What one round of making room came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Round {
    Got(FrameId),
    /// What could leave since this epoch waits for scopes.
    Blocked(u64),
    /// Nothing yet.
    Tried,
    /// Somebody else is at it.
    Busy,
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
