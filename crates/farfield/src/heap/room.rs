//! Room for what comes near: who needs frames and finds none makes some, or waits.

use super::evictor::{Outcome, Urgency};
use super::frames::Purse;
use super::threads::{Record, count};
use super::{Core, Patience};
use crate::error::FarError;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use farfield_pool::PoolError;
use std::time::Instant;

/// How long a thread that waits for the evictor sleeps at most before it looks for itself.
const SLEEP: Duration = Duration::from_millis(1);

impl Core {
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
