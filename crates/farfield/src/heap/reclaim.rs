//! Reclaim on demand: an access that needs frames and finds none frees some, or waits.

use super::eviction::{EvictionOutcome, EvictionUrgency};
use super::frames::Watermark;
use super::threads::{ThreadState, count};
use super::{Backoff, HeapInner};
use crate::error::FarError;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use farfield_core::heap::fault::FetchIntent;
use farfield_pool::PoolError;
use std::time::Instant;

/// Maximum time that a thread which waits for the evictor sleeps before it looks for itself.
const SLEEP: Duration = Duration::from_millis(1);

impl HeapInner {
    /// Renews the only scope of this thread, from which nobody has a reference, and waits until
    /// there is room. As when a scope begins, enough pages must be ready to leave while it lasts.
    #[cold]
    pub(crate) fn make_room(&self, record: &ThreadState) -> Result<(), FarError> {
        self.evictor.prepare(self);
        record.renew_only(&self.epoch);
        let frame = self.take_frames(record, 1, true)?;
        self.frames.put(frame, 1);
        Ok(())
    }

    /// Cools pages before a scope begins that might not be able to hold as much as scopes may.
    /// Pages that are cooled after it began cannot leave before it ends.
    #[cold]
    pub(crate) fn relieve(&self) {
        if self.frames.room() < self.frames.low() {
            self.reclaimer.wake();
        }
        self.evictor.prepare(self);
    }

    /// Takes frames for a unit. If there are none, frees some: the thread runs the evictor itself
    /// if it is idle, because a wake-up takes longer than a batch.
    pub(crate) fn take_frames(&self, record: &ThreadState, pages: u32, renewable: bool) -> Result<FrameId, FarError> {
        if let Some(frame) = self.take_frames_now(pages, FetchIntent::Read) {
            return Ok(frame);
        }
        self.check_size(pages)?;
        count(&record.counters.throttled);
        let started = Instant::now();
        let frames = self.wait_for_frames(record, pages, renewable);
        record.counters.pauses.add(started.elapsed());
        frames.map_err(|error| match error {
            FarError::Stalled { after } => self.stalled(after),
            error => error,
        })
    }

    /// Returns the error of a wait for near memory that was too long: the pool's, if the pool keeps
    /// evicted pages or the oldest scope waiting, else [`FarError::Stalled`].
    pub(crate) fn stalled(&self, after: Duration) -> FarError {
        // Some of the time was other work.
        let is_silent = self.evictor.waits_for_pool() * 2 > after;
        if is_silent || self.threads.oldest_waits_for_pool() {
            return FarError::Pool(PoolError::TimedOut { server: 0, after });
        }
        FarError::Stalled { after }
    }

    /// Takes frames for a unit that is fetched. If they stay clean after that (`is_clean`), they can
    /// be had even if the pool is full.
    pub(crate) fn take_wanted_frames(
        &self,
        record: &ThreadState,
        pages: u32,
        renewable: bool,
        is_clean: bool,
    ) -> Result<FrameId, FarError> {
        match self.take_frames(record, pages, renewable) {
            Err(error) if is_clean => self.take_to_read(record, pages, renewable, error),
            frames => frames,
        }
    }

    /// Takes frames for a unit that is only read, though there are none because the pool is full:
    /// changed pages cannot leave then.
    ///
    /// Clean ones can. So the reserve is enough to read everything, a little at a time. Returns
    /// `error` if that is no help either.
    pub(crate) fn take_to_read(
        &self,
        record: &ThreadState,
        pages: u32,
        renewable: bool,
        error: FarError,
    ) -> Result<FrameId, FarError> {
        if !matches!(error, FarError::Pool(PoolError::PoolFull { .. })) {
            return Err(error);
        }
        let mut backoff = Backoff::new(self.patience);
        let mut is_over = false;
        loop {
            if let Some(frame) = self.frames.take(pages, Watermark::Emergency) {
                return Ok(frame);
            }
            if is_over || backoff.wait().is_err() {
                return Err(error);
            }
            if renewable {
                record.renew_only(&self.epoch);
            }
            let outcome = self.run_evictor(record, self.frames.room() + pages, EvictionUrgency::Full);
            is_over = match outcome {
                Some(Ok(EvictionOutcome::Blocked(epoch))) => !renewable && record.keeps(epoch),
                Some(Ok(EvictionOutcome::Hot) | Err(_)) => true,
                Some(Ok(EvictionOutcome::Enough | EvictionOutcome::Progress | EvictionOutcome::ShortWait)) | None => {
                    false
                }
            };
        }
    }

    /// Takes frames for a fetch of this kind, if there are any now. Prefetches leave an eighth of
    /// the low watermark to accesses that need frames.
    pub(crate) fn take_frames_now(&self, pages: u32, intent: FetchIntent) -> Option<FrameId> {
        let frames = match intent {
            FetchIntent::Prefetch if !self.has_prefetch_room(pages) => None,
            FetchIntent::Prefetch => self.frames.take(pages, Watermark::Normal),
            FetchIntent::Read | FetchIntent::Write => {
                self.frames.take(pages, Watermark::Queued(self.admission.waiting()))
            }
        };
        if self.frames.room() < self.reserve().low {
            self.reclaimer.wake();
        }
        frames
    }

    /// Checks whether prefetches find room for so many pages.
    pub(crate) fn has_prefetch_room(&self, pages: u32) -> bool {
        self.frames.room() >= self.reserve().low / 8 + pages
    }

    /// Fails with [`FarError::TooLarge`] if a unit takes more than half of the frames.
    pub(crate) fn check_size(&self, pages: u32) -> Result<(), FarError> {
        if pages > self.frames.limit() / 2 {
            return Err(FarError::TooLarge { bytes: u64::from(pages) * PAGE_BYTES as u64 });
        }
        Ok(())
    }

    fn wait_for_frames(&self, record: &ThreadState, pages: u32, renewable: bool) -> Result<FrameId, FarError> {
        self.reclaimer.wake();
        let place = self.admission.queue();
        let mut backoff = Backoff::new(self.patience);
        let mut goal = self.first_goal(pages);
        loop {
            if renewable {
                record.renew_only(&self.epoch);
            }
            let before = place.position();
            // One of the waiters makes room for all. But nobody gets on before the one whose scope
            // holds back the pages that are about to leave.
            let holds_back = || !renewable && record.entered().is_some() && record.entered() == self.threads.oldest();
            if before > 0 && !holds_back() {
                if let Some(frame) = self.frames.take(pages, Watermark::Queued(before)) {
                    return Ok(frame);
                }
                let enough = || self.frames.open_spare() >= pages + before;
                backoff.wait_by(|| _ = place.sleep_unless(enough, SLEEP))?;
                continue;
            }
            let is_own = |epoch| !renewable && record.keeps(epoch);
            let round = self.make_frames(record, pages, &mut goal, before, is_own)?;
            match round {
                ReclaimRound::Frame(frame) => return Ok(frame),
                // The scope does not end before we return.
                ReclaimRound::OwnScope => {
                    return self.frames.take(pages, Watermark::Emergency).ok_or(FarError::NearFull);
                }
                // The others may wait for what this thread holds.
                ReclaimRound::Blocked if backoff.is_long() => {
                    if let Some(frame) = self.frames.take(pages, Watermark::Emergency) {
                        return Ok(frame);
                    }
                }
                _ => {}
            }
            // Pages that have arrived can leave again.
            self.help(record, None);
            if round == ReclaimRound::EvictorBusy {
                // The thread that runs the evictor rings when it has stopped.
                let enough = || self.frames.spare() >= goal + before || self.evictor.is_idle();
                backoff.wait_by(|| _ = place.sleep_unless(enough, SLEEP))?;
            } else {
                backoff.wait()?;
            }
        }
    }

    /// Runs the evictor, unless another thread does, for a thread that first renews scopes which
    /// hold back more than they must.
    fn run_evictor(
        &self,
        record: &ThreadState,
        goal: u32,
        urgency: EvictionUrgency,
    ) -> Option<Result<EvictionOutcome, PoolError>> {
        record.renew_some_idle(&self.epoch);
        let outcome = self.evictor.try_run(self, goal, urgency);
        let Some(Ok(EvictionOutcome::Blocked(epoch))) = outcome else { return outcome };
        let helps = record.entered().is_some_and(|entered| entered <= epoch) && record.renew_idle(&self.epoch);
        if helps { self.evictor.try_run(self, goal, urgency) } else { outcome }
    }

    /// Returns how many frames must be free for a waiter that needs `pages`: those and the reserve.
    /// No more, so that it does not take long: the rest is the reclaimer's.
    pub(crate) fn first_goal(&self, pages: u32) -> u32 {
        self.frames.reserve() + pages
    }

    /// Runs one round of a thread or task that waits for frames behind others: runs the evictor, if
    /// no other thread does. `is_own` tells whether the batch of an epoch waits for the waiter's
    /// own scopes.
    pub(crate) fn make_frames(
        &self,
        record: &ThreadState,
        pages: u32,
        goal: &mut u32,
        before: u32,
        is_own: impl Fn(u64) -> bool,
    ) -> Result<ReclaimRound, FarError> {
        // The reserve grows with the limit, also while a thread waits.
        *goal = (*goal).max(self.first_goal(pages));
        // The goal includes the frames of those that came before; else it would not see what is in
        // the way.
        let mut outcome = self.run_evictor(record, *goal + before, EvictionUrgency::Demand);
        if matches!(outcome, Some(Ok(EvictionOutcome::Blocked(epoch))) if is_own(epoch)) {
            // Nobody else gets on before this waiter does, so it is not behind the others.
            outcome = self.evictor.try_run(self, *goal, EvictionUrgency::Last);
            if let Some(frame) = self.frames.take(pages, Watermark::Normal) {
                return Ok(ReclaimRound::Frame(frame));
            }
        }
        if let Some(frame) = self.frames.take(pages, Watermark::Queued(before)) {
            return Ok(ReclaimRound::Frame(frame));
        }
        self.evictor.try_close(self);
        // Where there is no overflow area, free frames need not be contiguous: each round frees
        // more.
        if pages > 1 && self.frames.spare() >= *goal {
            *goal = (*goal + *goal / 2).min(self.frames.limit());
        }
        match outcome {
            None => Ok(ReclaimRound::EvictorBusy),
            Some(Ok(EvictionOutcome::Blocked(epoch))) if is_own(epoch) => Ok(ReclaimRound::OwnScope),
            Some(Ok(EvictionOutcome::Blocked(_))) => Ok(ReclaimRound::Blocked),
            Some(Ok(_)) => Ok(ReclaimRound::Retry),
            Some(Err(error)) => Err(error.into()),
        }
    }
}

/// Outcome of one round of making room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReclaimRound {
    Frame(FrameId),
    /// Failed: all that could leave waits for scopes of others.
    Blocked,
    /// Failed: all that could leave waits for scopes of the waiter itself.
    OwnScope,
    /// No frames yet; a later round may get some.
    Retry,
    /// Skipped: another thread runs the evictor.
    EvictorBusy,
}

#[cfg(test)]
mod tests {
    //! Guards against scopes that hold less than they may and find no room, because the reclaimer was late.
    use super::{Backoff, Duration, FarError, HeapInner, ReclaimRound, Watermark};
    use crate::ptr::Follow;
    use crate::{FarBox, FarString, Heap, Plane};
    use core::sync::atomic::{AtomicBool, Ordering};
    use farfield_core::heap::{FrameWord, ObjectLocation, State};

    /// A heap whose reclaimer never runs, and values of three times its near memory.
    fn without_reclaimer<const WORDS: usize>(plane: Plane) -> (Heap, Vec<FarBox<[u64; WORDS]>>) {
        let heap = Heap::builder().plane(plane).near(4 << 20).near_max(4 << 20).far(64 << 20).build().unwrap();
        heap.core().reclaimer.stop();
        let values = (0..(12 << 20) / (8 * WORDS) as u64).map(|index| heap.alloc([index; WORDS]).unwrap()).collect();
        (heap, values)
    }

    /// What a scope may hold whatever happens.
    fn share(heap: &Heap) -> usize {
        heap.core().frames.limit() as usize / 16
    }

    fn is_near<const WORDS: usize>(core: &HeapInner, value: &FarBox<[u64; WORDS]>) -> bool {
        let number = value.pointer().number_in(core).unwrap();
        let page = match (&core.objects, number.checked_sub(core.pages)) {
            (Some(objects), Some(object)) => match objects.handle(object).location() {
                ObjectLocation::At { page, .. } => page,
                other => panic!("{other:?}"),
            },
            _ => number,
        };
        !matches!(FrameWord(core.words[page].load(Ordering::Relaxed)).state(), State::Far)
    }

    fn scopes_hold_their_share<const WORDS: usize>(plane: Plane) {
        let (heap, mut values) = without_reclaimer::<WORDS>(plane);
        let mut random = fastrand::Rng::with_seed(1);
        for round in 0..200 {
            // All that is about to leave is rescued, which is done in scopes that bring nothing.
            if round % 3 == 0 {
                for value in values.iter().filter(|value| is_near(heap.core(), value)) {
                    value.get(&heap.enter()).unwrap();
                }
            }
            let scope = heap.enter();
            for _ in 0..share(&heap) {
                let at = random.usize(..values.len());
                let value = values[at].get_mut(&scope).unwrap_or_else(|error| panic!("round {round}: {error}"));
                assert_eq!(value[0], at as u64);
                value[1] += 1;
            }
        }
        assert!(heap.stats().throttled > 0);
        heap.verify();
    }

    #[test]
    fn a_scope_can_hold_its_share_though_the_reclaimer_never_runs() {
        scopes_hold_their_share::<512>(Plane::Page);
        scopes_hold_their_share::<64>(Plane::Object);
    }

    /// What is kept free for what comes next is little of a larger near memory.
    #[test]
    fn values_that_fill_most_of_a_large_near_memory_stay_near() {
        let heap = Heap::builder().near(128 << 20).near_max(128 << 20).build().unwrap();
        let count = heap.core().frames.limit() / 100 * 95;
        let values: Vec<FarBox<[u64; 512]>> =
            (0..count).map(|index| heap.alloc([index.into(); 512]).unwrap()).collect();
        for (index, value) in values.iter().enumerate() {
            assert_eq!(value.get(&heap.enter()).unwrap()[1], index as u64);
        }
        let stats = heap.stats();
        assert_eq!((stats.misses, stats.written_pages), (0, 0));
    }

    /// A step may need more than a scope can count on. Then its scope is renewed, if nobody has a reference from it.
    #[test]
    fn steps_of_texts_leave_their_scope_renewable() {
        let heap = Heap::builder().near(4 << 20).build().unwrap();
        let scope = heap.enter();
        let mut text = FarString::copy_of(&scope, "far").unwrap();
        text.push_str(&scope, " away").unwrap();
        text.insert_str(&scope, 3, ", far").unwrap();
        text.insert(&scope, 0, 'ß').unwrap();
        assert_eq!((text.remove(&scope, 0), text.pop(&scope)), (Ok('ß'), Ok(Some('y'))));
        text.truncate(&scope, 10).unwrap();
        assert!(scope.is_renewable());
        assert_eq!(text.get(&scope), Ok("far, far a"));
        assert!(!scope.is_renewable());
    }

    /// Who waits needs more than the reserve, which grows when there may be more near, or when tables give memory back.
    #[test]
    fn a_waiter_gets_room_though_the_reserve_grows() {
        let heap = Heap::builder().near(4 << 20).near_max(8 << 20).far(64 << 20).build().unwrap();
        heap.core().reclaimer.stop();
        let values: Vec<FarBox<[u64; 512]>> = (0..3072).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        let (core, record) = (heap.core(), heap.core().record());
        let mut goal = core.first_goal(1);
        heap.set_near(8 << 20);
        assert!(core.first_goal(1) > goal);
        let mut taken: Vec<_> = core::iter::from_fn(|| core.frames.take(1, Watermark::Normal)).collect();
        let found = (0..100).find_map(|_| match core.make_frames(record, 1, &mut goal, 0, |_| false).unwrap() {
            ReclaimRound::Frame(frame) => Some(frame),
            _ => None,
        });
        taken.extend(found);
        taken.drain(..).for_each(|frame| core.frames.put(frame, 1));
        assert!(found.is_some());
        assert!(values.iter().zip(0..).all(|(value, index)| value.get(&heap.enter()).unwrap()[0] == index));
        heap.verify();
    }

    #[test]
    fn others_leave_a_scope_its_share_however_long_it_lasts() {
        let (heap, values) = without_reclaimer::<512>(Plane::Page);
        let ends = AtomicBool::new(false);
        let hold = |round: usize| {
            let scope = heap.enter();
            let throttled = heap.stats().throttled;
            values[round].get(&scope)?;
            // The other thread has used up what may be had while this scope lasts.
            let mut backoff = Backoff::new(Duration::from_secs(60));
            while heap.core().admission.waiting() == 0 || heap.stats().throttled == throttled {
                backoff.wait()?;
            }
            let middle = values.len() / 2 + round * 100;
            values[middle..middle + share(&heap) - 1].iter().try_for_each(|value| value.get(&scope).map(drop))
        };
        let outcomes: Vec<Result<(), FarError>> = std::thread::scope(|threads| {
            threads.spawn(|| {
                for value in values.iter().cycle().take_while(|_| !ends.load(Ordering::Acquire)) {
                    value.get(&heap.enter()).unwrap();
                }
            });
            let outcomes = (0..10).map(hold).collect();
            ends.store(true, Ordering::Release);
            outcomes
        });
        assert_eq!(outcomes, vec![Ok(()); 10]);
        heap.verify();
    }

    /// Scopes that hold a quarter of near memory together, of more threads than there are
    /// processors: none of them lasts longer than the others need for what may be had meanwhile.
    #[test]
    fn many_threads_hold_a_quarter_together() {
        const THREADS: u64 = 64;
        let pool = "fault:delay=200us@ram:";
        let heap = Heap::builder().near(16 << 20).near_max(16 << 20).far(128 << 20).pool(pool).build().unwrap();
        let values: Vec<FarBox<[u64; 512]>> = (0..12_288).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        let each = heap.core().frames.limit() / 4 / THREADS as u32;
        let (heap, values) = (&heap, &values);
        let look = |thread| {
            let mut random = fastrand::Rng::with_seed(thread);
            for _ in 0..40 {
                let scope = heap.enter();
                for _ in 0..each {
                    let at = random.usize(..values.len());
                    assert_eq!(values[at].get(&scope)?[0], at as u64);
                }
            }
            Ok(())
        };
        let outcomes: Vec<Result<(), FarError>> = std::thread::scope(|threads| {
            let threads: Vec<_> = (0..THREADS).map(|thread| threads.spawn(move || look(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(outcomes, vec![Ok(()); THREADS as usize]);
    }
}
