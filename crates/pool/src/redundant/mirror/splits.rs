//! State of a lane: operations, their splits, and what members do for them.

use crate::contract::backend::OpKind;
use crate::redundant::write_epochs::WriteEpochGuard;
use crate::{Buffer, PoolError, Priority};
use core::time::Duration;
use farfield_core::MemberSet;

/// Most splits that one lane has under way.
pub(super) const SPLITS: usize = 256;

/// Operation of the caller.
pub(super) struct MirrorOperation {
    pub(super) tag: u64,
    pub(super) priority: Priority,
    pub(super) deadline: Duration,
    pub(super) started_at: u64,
    pub(super) kind: OpKind,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Number of pages that are in splits by now.
    pub(super) split_pages: u64,
    pub(super) splits: usize,
    /// Buffer of the caller; `None` while a member has it.
    pub(super) buffer: Option<Buffer>,
    pub(super) result: Result<(), PoolError>,
    /// Members at which the operation could be made when it began.
    pub(super) knew: MemberSet,
    /// Set if the operation failed only because the members that have it are not those that are
    /// read there. Then it is retried.
    pub(super) is_unlucky: bool,
}

impl MirrorOperation {
    /// Returns when the time of the operation is over, on the clock of `now_ns`.
    pub(super) fn ends_at(&self) -> u64 {
        self.started_at.saturating_add(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX))
    }
}

pub(super) struct MirrorSplit {
    pub(super) operation: usize,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Index of the request that is under way at each member.
    pub(super) requests: [Option<u16>; MemberSet::MAX],
    /// Four sets of members: those that have done it, that failed, that gave wrong bytes, and whose
    /// write may still arrive.
    pub(super) have: MemberSet,
    pub(super) failed: MemberSet,
    pub(super) wrong: MemberSet,
    pub(super) indeterminate: MemberSet,
    pub(super) error: Option<PoolError>,
    /// When to hedge the read, or to time out the write.
    pub(super) alarm_at: u64,
    /// When a write counts with fewer members once some have it (`degrades_at`), and when the time
    /// of its operation is over (`ends_at`).
    pub(super) degrades_at: u64,
    pub(super) ends_at: u64,
    /// Set when the operation has ended in failure before the split has. The split goes on until
    /// all members have answered: a member that cannot be done without may still do it.
    pub(super) is_over: bool,
    /// Members that were asked and lag.
    pub(super) lagging: MemberSet,
    pub(super) is_hedged: bool,
    /// Change that the split makes; `None` for a read.
    pub(super) epoch_guard: Option<WriteEpochGuard>,
}

impl MirrorSplit {
    pub(super) fn under_way(&self) -> MemberSet {
        (0..MemberSet::MAX).filter(|&member| self.requests[member].is_some()).collect()
    }

    /// Returns all members that were asked.
    pub(super) fn requested(&self) -> MemberSet {
        self.have.union(self.failed).union(self.under_way())
    }
}

/// Owner of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MirrorRequestOwner {
    Split(usize),
    /// Copier's job with this number.
    Copy(usize),
    /// Scrub of the pool.
    Look,
    /// Split that has ended without this write (`LateWrite`), or that does not need this read any
    /// more (`Abandoned`).
    LateWrite,
    Abandoned,
}

pub(super) struct MirrorMemberRequest {
    pub(super) owner: MirrorRequestOwner,
    pub(super) member: usize,
    /// Set if the request uses the caller's buffer.
    pub(super) is_direct: bool,
    pub(super) started_at: u64,
}
