//! What a scheme of redundancy decides itself; everything else is the same in all of them.

use super::lane::RedundantLane;
use super::members::{ANSWER_WITHIN, MemberLane, Membership};
use super::operation::Operation;
use super::repair::RepairSource;
use super::scrub::ScrubTarget;
use super::split::{Split, SplitReply};
use crate::contract::backend::OpKind;
use crate::contract::calls;
use crate::{Buffer, CallChannel, CloneTicket, Op, PoolError, Priority, WriteReservation};
use core::ops::Deref;
use core::time::Duration;
use farfield_core::{MemberSet, PageId};
use std::sync::Arc;

/// Most requests that one lane has under way.
pub(super) const MEMBER_REQUESTS: usize = 1024;

/// Scheme of redundancy: what pages mean to the members (as a personality of Linux MD). The value
/// is what one lane keeps for it.
///
/// The lane calls a scheme when there is something to decide. The scheme works on the lane, and
/// never waits.
pub(crate) trait Scheme: Sized + Send + 'static {
    /// State that all lanes share.
    type Map: RedundantMap<Scheme = Self>;
    /// What the scheme notes of a split.
    type Task: Send;
    /// Number of operations that a lane makes for its own maintenance.
    const OWN_OPERATIONS: usize = 0;
    /// Time limit of one step of a repair. (Tests have less time.)
    const REPAIR_DEADLINE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

    /// Creates the part of a lane that makes up to `repairs_max` repairs at a time.
    fn new(map: &Self::Map, repairs_max: usize) -> Self;

    // Operations and their splits.

    /// Checks whether an operation may be made at all.
    fn check(_map: &Self::Map, _op: &Op) -> Result<(), PoolError> {
        Ok(())
    }
    /// Checks whether an operation sets out when it is submitted, and not only at the next poll.
    fn starts_at_once(_kind: OpKind) -> bool {
        true
    }
    /// Starts the next split of an operation; returns `false` if there is no room for it now.
    fn split_next(lane: &mut RedundantLane<Self>, operation: usize) -> bool;
    /// Goes on with reads that wait for room.
    fn resume_reads(lane: &mut RedundantLane<Self>);
    /// Checks whether reads wait for room.
    fn has_waiting_reads(&self) -> bool;
    /// Returns the priority and the time left of the operations of a split; `None` if it has none.
    fn urgency(lane: &RedundantLane<Self>, split: &Split<Self::Task>, now: u64) -> Option<(Priority, Duration)>;
    /// Handles an answer to a split, which has noted it.
    fn on_reply(lane: &mut RedundantLane<Self>, split: usize, reply: SplitReply);
    /// Handles the alarm of a split that is no write.
    fn on_alarm(lane: &mut RedundantLane<Self>, split: usize, now: u64);
    /// Ends an operation of the lane itself.
    fn end_own_operation(_lane: &mut RedundantLane<Self>, _operation: Operation) {}

    // Writes.

    /// Returns the place that no other write may go to while a late one of the split may arrive:
    /// the first page or row, and their number; (0, 0) if late writes keep no place.
    fn place(_split: &Split<Self::Task>) -> (u64, u64) {
        (0, 0)
    }
    /// Takes note that no late write may arrive at this place any more. Called once for
    /// each split.
    fn on_late_writes_over(_map: &Self::Map, _place: (u64, u64)) {}
    /// Checks whether the time begins after which the write counts with fewer members.
    fn may_degrade(lane: &RedundantLane<Self>, split: &Split<Self::Task>) -> bool;
    /// Checks whether the write may count with the members that have it.
    fn has_enough(lane: &RedundantLane<Self>, split: &Split<Self::Task>) -> bool;
    /// Does more for a write that too few members have, if there is anything to do. Returns when to
    /// look again.
    fn ask_more(_lane: &mut RedundantLane<Self>, _split: usize, _has_enough: bool, _now: u64) -> u64 {
        u64::MAX
    }
    /// Ends a write: nothing is under way any more, or enough members have it.
    fn end_write(lane: &mut RedundantLane<Self>, split: usize);
    /// Ends the operations of a write whose time is over; these members have not answered.
    fn end_in_time(lane: &mut RedundantLane<Self>, split: usize, late: MemberSet, now: u64);

    // Repairs.

    /// Begins the next repair, if there is one.
    fn begin_repair(lane: &mut RedundantLane<Self>);
    /// Checks whether a repair is under way that is waited for.
    fn is_repairing(lane: &RedundantLane<Self>) -> bool;
    /// Handles an answer to a request of a repair that is no split.
    fn on_repair_reply(
        _lane: &mut RedundantLane<Self>,
        _job: usize,
        _result: Result<(), PoolError>,
        _buffer: Option<Buffer>,
    ) {
    }
    /// Checks whether the repair with this number is late, so that it is not waited for.
    fn is_late(&self, _job: usize) -> bool {
        false
    }
    /// Brings repairs on that are under way, and begins none, until [`Scheme::resume_repairs`].
    fn finish_repairs(lane: &mut RedundantLane<Self>);
    fn resume_repairs(&mut self) {}
    /// Cuts repairs short, because the lane is dropped.
    fn cut_repairs_short(&mut self) {}
}

/// State that all lanes of a backend share.
pub(crate) trait RedundantMap: ScrubTarget + Deref<Target = Membership> + Sized + Send + Sync + 'static {
    type Scheme: Scheme<Map = Self>;
    /// Most repairs that the repair thread has under way.
    const THREAD_REPAIRS: usize = 4;

    /// Returns the number of pages of the region.
    fn region_pages(&self) -> u64;
    /// Returns the number of pages that each member needs.
    fn member_pages(&self) -> u64;
    /// Returns the number of pages that are stored.
    fn stored_pages(&self) -> u64;
    /// Describes, for people, what is stored.
    fn describe(&self) -> String {
        String::new()
    }
    /// Checks whether there is maintenance to do besides repairs.
    fn needs_maintenance(&self) -> bool {
        false
    }
    /// Forgets what the member holds. It has failed, and no lane has a way to it.
    fn forget_member(&self, member: usize);
    /// Makes a snapshot. No repair is under way meanwhile.
    fn snapshot(self: &Arc<Self>) -> Result<CloneTicket, PoolError>;
    /// Opens a channel to functions that change nothing.
    fn open_function_reads(self: &Arc<Self>) -> Result<Box<dyn CallChannel>, PoolError> {
        Err(PoolError::Refused { server: 0, reason: calls::NOWHERE })
    }
    /// Reserves runs of pages for functions that write them.
    fn begin_function_writes(
        self: &Arc<Self>,
        _runs: &[(PageId, u64)],
    ) -> Result<Box<dyn WriteReservation>, PoolError> {
        Err(PoolError::Refused { server: 0, reason: calls::NOWHERE })
    }

    // Members that fail or lag. A scheme may have reasons to give one up sooner.

    /// Opens a lane to each member that is present.
    fn open_member_lanes(&self) -> Result<Vec<Option<MemberLane>>, PoolError> {
        self.open_lanes(MEMBER_REQUESTS)
    }
    /// Gives up a member that has failed for good: others go on without it.
    fn expel(&self, member: usize, _error: PoolError) {
        self.mark_failed(member);
    }
    /// Checks whether this error of a member concerns no operation. The member is given up then.
    fn pardons(&self, _member: usize, _error: PoolError) -> bool {
        false
    }
    /// Checks whether members that are late with a change are waited for beyond the deadline: until
    /// they have answered, it is unknown which bytes they hold.
    fn waits_for_late_answers(&self) -> bool {
        true
    }
    /// Handles the answer of a member to a write that was late there.
    fn on_late_write_reply(&self, member: usize, result: Result<(), PoolError>) {
        match result {
            // The write may still arrive, at any time.
            Err(PoolError::TimedOut { .. }) => self.stay_lagging(member),
            _ => self.on_late_reply(member),
        }
    }
    /// Notes that it will never be known whether a write for which `member` lags was made.
    fn give_up_answer(&self, member: usize) {
        self.stay_lagging(member);
    }
    /// Gives up members that have been silent for long, if the others can do without them.
    fn expel_the_silent(&self) {
        self.give_up_the_silent(|member| {
            self.expel(member, PoolError::TimedOut { server: self.server(member), after: ANSWER_WITHIN });
        });
    }
}

impl<M: RedundantMap> RepairSource for M {
    type Lane = RedundantLane<M::Scheme>;

    fn needs_repair(&self) -> bool {
        !self.is_abandoned() && (!self.repairable().is_empty() || self.needs_maintenance())
    }
    fn scrub_in(&self) -> Option<Duration> {
        if self.is_abandoned() { None } else { self.scrub().due_in(self.stored()) }
    }
    fn is_rejoin_due(&self) -> bool {
        self.deref().is_rejoin_due()
    }
    fn is_full(&self) -> bool {
        self.deref().is_full()
    }
    fn release_slot(&self) {
        self.deref().release_slot(|member| self.forget_member(member));
    }
    fn rejoin(&self) {
        self.deref().rejoin(self.member_pages(), MEMBER_REQUESTS);
    }
    fn open_repair_lane(self: &Arc<M>) -> Option<RedundantLane<M::Scheme>> {
        RedundantLane::open(self, M::THREAD_REPAIRS).ok()
    }
}
