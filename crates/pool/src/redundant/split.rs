//! Splits: parts of operations that are under way, what members have answered, and what a write
//! waits for.

use crate::redundant::write_epochs::WriteEpochGuard;
use crate::{Buffer, PoolError};
use farfield_core::MemberSet;

/// Part of one or more operations that is read or changed at once, with the scheme's notes on it.
pub(crate) struct Split<T> {
    /// What is done, as the scheme knows it.
    pub(super) task: T,
    /// Index of the request that is under way at each member.
    pub(super) requests: [Option<u16>; MemberSet::MAX],
    /// Four sets of members: those that have done it, that failed, that gave wrong bytes, and whose
    /// write may still arrive.
    pub(super) done: MemberSet,
    pub(super) failed: MemberSet,
    pub(super) wrong: MemberSet,
    pub(super) indeterminate: MemberSet,
    pub(super) error: Option<PoolError>,
    /// When to ask other members, or to time out.
    pub(super) alarm_at: u64,
    /// When a write counts with fewer members once enough have it (`degrades_at`), and when the
    /// time of its operations is over (`ends_at`).
    pub(super) degrades_at: u64,
    pub(super) ends_at: u64,
    /// Members that were asked and lag.
    pub(super) lagging: MemberSet,
    /// Change that the split makes; `None` if it is no write.
    pub(super) epoch_guard: Option<WriteEpochGuard>,
}

/// Decision on a write that some member has not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WriteDecision {
    /// The write counts without the members that have not answered.
    Count,
    /// The time of its operations is over, and too few members have it.
    TimeOut,
    /// The write waits; the time to look again.
    Wait(u64),
}

impl<T> Split<T> {
    pub(super) fn new(task: T) -> Split<T> {
        Split {
            task,
            requests: [None; MemberSet::MAX],
            done: MemberSet(0),
            failed: MemberSet(0),
            wrong: MemberSet(0),
            indeterminate: MemberSet(0),
            error: None,
            alarm_at: u64::MAX,
            degrades_at: u64::MAX,
            ends_at: u64::MAX,
            lagging: MemberSet(0),
            epoch_guard: None,
        }
    }

    /// Returns the members that have not answered.
    pub(super) fn under_way(&self) -> MemberSet {
        (0..MemberSet::MAX).filter(|&member| self.requests[member].is_some()).collect()
    }

    /// Returns all members that were asked.
    pub(super) fn requested(&self) -> MemberSet {
        self.done.union(self.failed).union(self.under_way())
    }

    /// Notes that a member has failed.
    pub(super) fn fail(&mut self, member: usize, error: PoolError) {
        self.failed = self.failed.union(MemberSet::one(member));
        match error {
            PoolError::Corrupt { .. } => self.wrong = self.wrong.union(MemberSet::one(member)),
            PoolError::TimedOut { .. } => self.indeterminate = self.indeterminate.union(MemberSet::one(member)),
            _ => {}
        }
        // The caller must know that a member is full. It must know that a member is gone only if
        // too many are.
        let is_worse = matches!(error, PoolError::PoolFull { .. });
        if is_worse || self.error.is_none_or(|known| matches!(known, PoolError::ServerGone { .. })) {
            self.error = Some(error);
        }
    }

    /// Decides on a write that some member has not answered by `now`. `has_enough` says whether the
    /// others suffice, and `may_degrade` whether writes ever count with fewer than all.
    pub(super) fn decide_write(&self, has_enough: bool, may_degrade: bool, now: u64) -> WriteDecision {
        let is_over = self.ends_at <= now;
        if has_enough && (self.degrades_at <= now || is_over && may_degrade) {
            WriteDecision::Count
        } else if is_over {
            WriteDecision::TimeOut
        } else if self.degrades_at > now {
            WriteDecision::Wait(self.ends_at.min(self.degrades_at))
        } else {
            WriteDecision::Wait(self.ends_at)
        }
    }
}

/// Owner of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestOwner {
    Split(usize),
    /// Job of the scheme's repairs with this number.
    Repair(usize),
    /// Scrub of the pool.
    Scrub,
    /// Split that has ended without this write (`LateWrite`, with its [place](super::scheme::Scheme::place)),
    /// or that does not need this read any more (`Abandoned`).
    LateWrite((u64, u64)),
    Abandoned,
}

/// Request that a member has not answered.
pub(super) struct MemberRequest {
    pub(super) owner: RequestOwner,
    pub(super) member: usize,
    /// Set if the request uses the caller's buffer.
    pub(super) is_direct: bool,
    pub(super) started_at: u64,
}

/// Answer of a member to a request of a split.
pub(crate) struct SplitReply {
    pub(super) member: usize,
    pub(super) result: Result<(), PoolError>,
    pub(super) buffer: Option<Buffer>,
    pub(super) started_at: u64,
    pub(super) is_direct: bool,
    /// Set if the member lagged with it.
    pub(super) is_late: bool,
}

#[cfg(test)]
mod tests {
    //! Dangers: a write that counts although too few members have it, or that waits for ever; an
    //! error that hides a worse one.
    use super::*;
    use core::time::Duration;
    use farfield_core::Incarnation;

    #[test]
    fn a_write_counts_with_fewer_only_if_they_are_enough_and_their_time_has_come() {
        let mut split = Split::new(());
        (split.degrades_at, split.ends_at) = (50, 100);
        for (has_enough, may_degrade, now, decision) in [
            (true, true, 49, WriteDecision::Wait(50)),
            (true, true, 50, WriteDecision::Count),
            (false, true, 50, WriteDecision::Wait(100)),
            (false, true, 100, WriteDecision::TimeOut),
        ] {
            assert_eq!(split.decide_write(has_enough, may_degrade, now), decision, "at {now}");
        }
        // The answer that makes them enough came shortly before the end.
        split.degrades_at = 120;
        assert_eq!(split.decide_write(true, true, 99), WriteDecision::Wait(100));
        assert_eq!(split.decide_write(true, true, 100), WriteDecision::Count);
        // With `?wait=all`.
        split.degrades_at = u64::MAX;
        assert_eq!(split.decide_write(true, false, 99), WriteDecision::Wait(100));
        assert_eq!(split.decide_write(true, false, 100), WriteDecision::TimeOut);
    }

    #[test]
    fn the_error_of_a_split_is_what_the_caller_must_know() {
        let gone = PoolError::ServerGone { server: 0, incarnation: Incarnation(0) };
        let (full, late) =
            (PoolError::PoolFull { server: 1 }, PoolError::TimedOut { server: 2, after: Duration::from_secs(1) });
        for (errors, known) in
            [([gone, late, gone], late), ([late, full, gone], full), ([full, late, gone], full), ([gone; 3], gone)]
        {
            let mut split = Split::new(());
            errors.into_iter().enumerate().for_each(|(member, error)| split.fail(member, error));
            assert_eq!(split.error, Some(known));
            assert_eq!((split.failed, split.requested()), (MemberSet(0b111), MemberSet(0b111)));
            let is_late = |member: &usize| errors[*member] == late;
            assert_eq!(split.indeterminate, (0..3).filter(is_late).collect());
        }
    }
}
