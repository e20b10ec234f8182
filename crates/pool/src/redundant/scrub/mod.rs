//! Scrub: reads pages that are stored and never read, so that wrong bytes at one member are
//! repaired while other members are right.
//!
//! A backend of several members keeps its pages at *places* (a page of a mirror, a row of an
//! erasure code). Each place has a page at some of the members. The thread or lane that does
//! maintenance walks over all places once in a period, as fast as [`ScrubPace`] says. A run of
//! neighbours is read from one member after the other, in the background, one read at a time. A
//! wrong page is suspected as if a reader had found it, and so it is repaired; the walk goes on
//! when it is. Of all lanes one walks at a time, run by run.
//!
//! Bytes count as wrong when they were wrong twice: a bit that flips on the way is no rot.

#[cfg(test)]
mod tests;

use crate::redundant::members::RUN_PAGES;
use crate::{Lane, PoolError, ScrubStats};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_core::policy::scrub::ScrubPace;
use farfield_core::time::Moment;
use farfield_os::process::now_ns;
use std::sync::Arc;

/// Period of a scrub, unless the URL says otherwise.
pub(crate) const PERIOD: Duration = Duration::from_secs(24 * 3600);
/// Time limit of one read.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(2);
/// Time for which a member that did not answer is passed over.
const SILENCE: Duration = Duration::from_secs(60);
/// Time that the walk waits until wrong pages are repaired.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of times that a run is compared again because it was written meanwhile.
const TRIES: u32 = 3;
/// Number of polls after which a busy lane looks at the clock again.
const BUSY_POLLS: u32 = 64;
const RUN: usize = RUN_PAGES as usize;
const _: () = assert!(RUN_PAGES == ScrubPace::RUN);

/// State of a scrub that all lanes of a backend share.
pub(crate) struct Scrub {
    /// Time in which everything is looked at; `None` if there is no scrub.
    period: Option<Duration>,
    /// Set while a lane walks; only that lane changes the fields that follow.
    is_taken: AtomicBool,
    on_time: AtomicU64,
    not_before: AtomicU64,
    /// Place that is looked at next.
    next: AtomicU64,
    looked: AtomicU64,
    wrong: AtomicU64,
    repaired: AtomicU64,
    turns: AtomicU64,
    turn_ended_at: AtomicU64,
}

impl Scrub {
    pub(crate) fn new(period: Option<Duration>) -> Scrub {
        let (zero, now) = (|| AtomicU64::new(0), now_ns());
        Scrub {
            period,
            is_taken: AtomicBool::new(false),
            on_time: AtomicU64::new(now),
            not_before: AtomicU64::new(now),
            next: zero(),
            looked: zero(),
            wrong: zero(),
            repaired: zero(),
            turns: zero(),
            turn_ended_at: zero(),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.period.is_some()
    }

    pub(crate) fn counts(&self) -> Option<ScrubStats> {
        let [looked_pages, wrong_pages, mended_pages, turns, turn_ended_at_ns] =
            [&self.looked, &self.wrong, &self.repaired, &self.turns, &self.turn_ended_at]
                .map(|count| count.load(Ordering::Relaxed));
        self.period.map(|_| ScrubStats { looked_pages, wrong_pages, mended_pages, turns, turn_ended_at_ns })
    }

    fn pace(&self) -> Option<ScrubPace> {
        let [on_time, not_before] =
            [&self.on_time, &self.not_before].map(|moment| Moment(moment.load(Ordering::SeqCst)));
        self.period.map(|period| ScrubPace { period, on_time, not_before })
    }

    fn set_pace(&self, pace: ScrubPace) {
        self.on_time.store(pace.on_time.0, Ordering::SeqCst);
        self.not_before.store(pace.not_before.0, Ordering::SeqCst);
    }

    /// Returns the time until there is something to look at, where `stored` places have something;
    /// `None` if there is no scrub.
    pub(crate) fn due_in(&self, stored: u64) -> Option<Duration> {
        let now = Moment(now_ns());
        self.pace().map(|pace| {
            if stored == 0 {
                self.set_pace(pace.idle(now));
            }
            pace.next_at(stored).since(now)
        })
    }

    fn take(&self) -> bool {
        !self.is_taken.swap(true, Ordering::SeqCst)
    }

    fn give(&self) {
        self.is_taken.store(false, Ordering::SeqCst);
    }

    /// Notes that the walk has come to the place `next` of those before `end`. It has looked at
    /// `looked` of the `stored` places that have something.
    fn pass(&self, next: u64, end: u64, looked: u64, stored: u64) {
        let now = Moment(now_ns());
        if let Some(pace) = self.pace() {
            self.set_pace(pace.looked(looked, stored, now));
        }
        self.next.store(if next < end { next } else { 0 }, Ordering::SeqCst);
        if next >= end {
            self.turn_ended_at.store(now.0, Ordering::Relaxed);
            self.turns.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Neighbouring places, and members that have a page at each of them.
#[derive(Clone, Copy)]
pub(crate) struct ScrubRange {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) members: MemberSet,
    /// Set if writes to the places are noted meanwhile.
    pub(crate) is_watched: bool,
}

/// Members with a wrong page, for each place of a run.
pub(crate) type MismatchedMembers = [MemberSet; RUN];

/// Answers of members: checksums of the pages that they have, which match the bytes.
pub(crate) struct MemberChecksums {
    sums: [[Option<u64>; RUN]; MemberSet::MAX],
}

impl MemberChecksums {
    pub(crate) fn sum(&self, member: usize, place: usize) -> Option<u64> {
        self.sums[member][place]
    }
}

/// State of a page that was wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RepairStatus {
    Pending,
    Repaired,
    /// The page is not needed any more.
    Obsolete,
}

/// State that all lanes of a backend share, as its scrub sees it.
pub(crate) trait ScrubTarget {
    fn scrub(&self) -> &Scrub;
    /// Returns the end of the places at which something was ever stored.
    fn end(&self) -> u64;
    /// Returns about how many places have something stored.
    fn stored(&self) -> u64;
    /// Begins to watch the run at `from`, of at most `most` places, and returns it. Returns the
    /// place to go on from if nothing is to be looked at before.
    fn watch(&self, from: u64, most: u64) -> Result<ScrubRange, u64>;
    /// Returns which pages are wrong, by these answers; `None` if that is unknown, because the run
    /// was written meanwhile.
    fn decide(&self, run: &ScrubRange, answers: &MemberChecksums) -> Option<MismatchedMembers>;
    /// Notes that this page is wrong; returns `true` if it will be repaired.
    fn suspect(&self, place: u64, member: usize) -> bool;
    /// Ends the watch over a run.
    fn unwatch(&self, run: &ScrubRange);
    /// Returns what became of a page that was suspected.
    fn repair_status(&self, place: u64, member: usize) -> RepairStatus;
}

/// Checks whether there is something to look at now.
fn is_due<S: ScrubTarget>(target: &S) -> bool {
    target.scrub().due_in(target.stored()) == Some(Duration::ZERO)
}

/// Lane that can walk.
pub(crate) trait ScrubLane: Lane {
    type ScrubMap: ScrubTarget;
    fn scrub_target(&self) -> &Arc<Self::ScrubMap>;
    /// Returns the scrub cursor of this lane; `None` if other lanes walk.
    fn scrub_cursor(&mut self) -> &mut Option<Box<ScrubCursor>>;
    /// Checks whether the owner waits for an operation that has not even begun.
    fn has_demand(&self) -> bool;
    /// Checks whether the lane has a way to this member.
    fn can_ask(&self, member: usize) -> bool;
    /// Reads `count` pages of a member; the result goes to [`ScrubCursor::on_reply`]. Returns
    /// `false` if there is no room for that now.
    fn ask(&mut self, member: usize, page: u64, count: u64) -> bool;
    /// Drops the interest in reads that are under way.
    fn forget(&mut self);
}

/// Takes the walk one step further, as far as that can be done now.
pub(crate) fn step_scrub<L: ScrubLane>(lane: &mut L) {
    // A lane that waits for an answer shall not pay for the clock with every look.
    let is_busy = lane.in_flight() > 0;
    if let Some(cursor) = lane.scrub_cursor() {
        cursor.polls = cursor.polls.wrapping_add(1);
        if is_busy && cursor.stage == ScrubStage::Idle && !cursor.polls.is_multiple_of(BUSY_POLLS) {
            return;
        }
    }
    if let Some(mut cursor) = lane.scrub_cursor().take() {
        cursor.step(lane);
        *lane.scrub_cursor() = Some(cursor);
    }
}

/// Stops the walk: nothing is under way any more, and nothing begins until [`go_on`].
pub(crate) fn pause<L: ScrubLane>(lane: &mut L) {
    if let Some(mut cursor) = lane.scrub_cursor().take() {
        cursor.is_paused = true;
        cursor.give_up(lane);
        *lane.scrub_cursor() = Some(cursor);
    }
}

/// Lets the walk go on after [`pause`].
pub(crate) fn go_on<L: ScrubLane>(lane: &mut L) {
    if let Some(cursor) = lane.scrub_cursor() {
        cursor.is_paused = false;
    }
}

/// Ends the walk of a lane that is dropped.
pub(crate) fn end<L: ScrubLane>(lane: &mut L) {
    if let Some(mut cursor) = lane.scrub_cursor().take() {
        cursor.give_up(lane);
        if cursor.stage != ScrubStage::Idle {
            cursor.finish(&**lane.scrub_target());
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ScrubStage {
    Idle,
    /// A member is asked for the pages of the run. If one of them is wrong, it is asked for each
    /// page alone, from the offset `alone` on.
    Reading {
        member: usize,
        alone: Option<u64>,
        is_sent: bool,
    },
    /// All members have answered.
    Deciding,
    /// Wrong pages are being repaired; the walk waits for that until `until` at most.
    Repairing {
        until: u64,
    },
}

/// Walk of one lane.
pub(crate) struct ScrubCursor {
    stage: ScrubStage,
    run: ScrubRange,
    /// Members that were not asked yet.
    left: MemberSet,
    answers: MemberChecksums,
    wrong: MismatchedMembers,
    tries: u32,
    /// Members that did not answer, and until when they are passed over.
    silent: MemberSet,
    silent_until: u64,
    is_paused: bool,
    polls: u32,
}

impl ScrubCursor {
    pub(crate) fn new() -> ScrubCursor {
        ScrubCursor {
            stage: ScrubStage::Idle,
            run: ScrubRange { first: 0, count: 0, members: MemberSet(0), is_watched: false },
            left: MemberSet(0),
            answers: MemberChecksums { sums: [[None; RUN]; MemberSet::MAX] },
            wrong: [MemberSet(0); RUN],
            tries: 0,
            silent: MemberSet(0),
            silent_until: 0,
            is_paused: false,
            polls: 0,
        }
    }

    /// Checks whether a look is under way.
    pub(crate) fn is_looking(&self) -> bool {
        matches!(self.stage, ScrubStage::Reading { .. } | ScrubStage::Deciding)
    }

    fn step<L: ScrubLane>(&mut self, lane: &mut L) {
        if self.stage == ScrubStage::Idle && (self.is_paused || lane.has_demand() || !is_due(&**lane.scrub_target())) {
            return;
        }
        let target = lane.scrub_target().clone();
        match self.stage {
            ScrubStage::Idle => self.begin(&*target),
            ScrubStage::Deciding => self.decide(&*target),
            ScrubStage::Repairing { until } => return self.look_at_repairs(&*target, until),
            ScrubStage::Reading { .. } => {}
        }
        if let ScrubStage::Reading { member, alone, is_sent: false } = self.stage {
            let (first, count) = self.requested(alone);
            if !lane.can_ask(member) {
                self.next_member();
            } else if lane.ask(member, self.run.first + first, count) {
                self.stage = ScrubStage::Reading { member, alone, is_sent: true };
            }
        }
    }

    fn begin<S: ScrubTarget>(&mut self, target: &S) {
        let (scrub, stored) = (target.scrub(), target.stored());
        if !scrub.take() {
            return;
        }
        // The lane that walked before may just have looked at what was due.
        let due = scrub.pace().map_or(0, |pace| pace.due(stored, Moment(now_ns())));
        let from = scrub.next.load(Ordering::SeqCst);
        if due == 0 {
            return scrub.give();
        }
        match target.watch(from, due) {
            Ok(run) => {
                self.run = run;
                self.tries = 0;
                self.begin_look();
            }
            Err(next) => {
                scrub.pass(next, target.end(), 0, stored);
                scrub.give();
            }
        }
    }

    fn begin_look(&mut self) {
        if now_ns() >= self.silent_until {
            self.silent = MemberSet(0);
        }
        self.left = self.run.members.difference(self.silent);
        self.answers.sums.iter_mut().for_each(|sums| sums.fill(None));
        self.wrong = [MemberSet(0); RUN];
        self.next_member();
    }

    fn next_member(&mut self) {
        self.stage = match self.left.iter().next() {
            Some(member) => {
                self.left = self.left.difference(MemberSet::one(member));
                ScrubStage::Reading { member, alone: None, is_sent: false }
            }
            None => ScrubStage::Deciding,
        };
    }

    /// Returns the offset in the run, and the number, of the pages that a member is asked for.
    fn requested(&self, alone: Option<u64>) -> (u64, u64) {
        alone.map_or((0, self.run.count), |offset| (offset, 1))
    }

    /// Notes the answer of a member, whose pages have these checksums.
    pub(crate) fn on_reply(&mut self, scrub: &Scrub, result: Result<(), PoolError>, sums: &[u64]) {
        let ScrubStage::Reading { member, alone, is_sent: true } = self.stage else { return };
        let (first, count) = self.requested(alone);
        let one_by_one = |offset| ScrubStage::Reading { member, alone: Some(offset), is_sent: false };
        match result {
            Ok(()) => {
                let sums = sums.iter().take(count as usize).copied().map(Some);
                self.answers.sums[member][first as usize..].iter_mut().zip(sums).for_each(|(known, sum)| *known = sum);
            }
            Err(PoolError::Corrupt { .. }) if alone.is_none() => {
                self.stage = one_by_one(0);
                return;
            }
            Err(PoolError::Corrupt { .. }) => {
                self.wrong[first as usize] = self.wrong[first as usize].union(MemberSet::one(member));
            }
            Err(error) => {
                if matches!(error, PoolError::TimedOut { .. }) {
                    self.silent = self.silent.union(MemberSet::one(member));
                    self.silent_until = now_ns().saturating_add(SILENCE.as_nanos() as u64);
                }
                return self.next_member();
            }
        }
        scrub.looked.fetch_add(count, Ordering::Relaxed);
        match alone {
            Some(offset) if offset + 1 < self.run.count => self.stage = one_by_one(offset + 1),
            _ => self.next_member(),
        }
    }

    fn decide<S: ScrubTarget>(&mut self, target: &S) {
        let verdict = target.decide(&self.run, &self.answers);
        if verdict.is_none() && self.tries < TRIES {
            target.unwatch(&self.run);
            match target.watch(self.run.first, self.run.count) {
                Ok(run) => {
                    (self.run, self.tries) = (run, self.tries + 1);
                    self.begin_look();
                }
                Err(_) => self.finish(target),
            }
            return;
        }
        let (mut found, mut is_repaired) = (0, true);
        for place in 0..self.run.count as usize {
            let members = self.wrong[place].union(verdict.unwrap_or([MemberSet(0); RUN])[place]);
            found += members.count() as u64;
            let suspected = members.iter().filter(|member| target.suspect(self.run.first + place as u64, *member));
            self.wrong[place] = suspected.collect();
            is_repaired &= self.wrong[place].is_empty();
        }
        target.unwatch(&self.run);
        target.scrub().wrong.fetch_add(found, Ordering::Relaxed);
        if is_repaired {
            return self.finish(target);
        }
        self.stage = ScrubStage::Repairing { until: now_ns().saturating_add(REPAIR_TIMEOUT.as_nanos() as u64) };
    }

    fn look_at_repairs<S: ScrubTarget>(&mut self, target: &S, until: u64) {
        let mut is_over = true;
        for place in 0..self.run.count as usize {
            for member in self.wrong[place].iter() {
                let repaired = target.repair_status(self.run.first + place as u64, member);
                if repaired == RepairStatus::Pending {
                    is_over = false;
                    continue;
                }
                self.wrong[place] = self.wrong[place].difference(MemberSet::one(member));
                target.scrub().repaired.fetch_add(u64::from(repaired == RepairStatus::Repaired), Ordering::Relaxed);
            }
        }
        if is_over || now_ns() >= until {
            self.finish(target);
        }
    }

    /// Ends a run.
    fn finish<S: ScrubTarget>(&mut self, target: &S) {
        let scrub = target.scrub();
        scrub.pass(self.run.first + self.run.count, target.end(), self.run.count, target.stored());
        self.stage = ScrubStage::Idle;
        scrub.give();
    }

    /// Gives up the look that is under way.
    fn give_up<L: ScrubLane>(&mut self, lane: &mut L) {
        if self.is_looking() {
            lane.forget();
            let target = lane.scrub_target();
            target.unwatch(&self.run);
            self.stage = ScrubStage::Idle;
            target.scrub().give();
        }
    }
}
