//! State of a lane: operations, the splits that are under way for them, and what members do for
//! those.

use super::index::Version;
use crate::contract::backend::OpKind;
use crate::redundant::members::RUN_PAGES;
use crate::redundant::write_epochs::WriteEpochGuard;
use crate::{Buffer, PoolError, Priority};
use core::time::Duration;
use farfield_core::MemberSet;

/// Most splits that one lane has under way.
pub(super) const SPLITS: usize = 256;
/// Most rows of one split.
pub(super) const ROWS: usize = RUN_PAGES as usize;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EcOperationKind {
    /// Operation of a caller.
    Caller(OpKind),
    /// First half of a move: reads pages of sparse rows, to be written again.
    Gather,
    /// Second half of a move: writes those pages.
    Move,
}

impl EcOperationKind {
    pub(super) fn is_write(self) -> bool {
        matches!(self, EcOperationKind::Caller(OpKind::Write) | EcOperationKind::Move)
    }
}

/// Operation of the caller, or a batch of pages that are moved.
pub(super) struct EcOperation {
    pub(super) tag: u64,
    pub(super) priority: Priority,
    pub(super) deadline: Duration,
    pub(super) started_at: u64,
    pub(super) kind: EcOperationKind,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Number of pages that have set out, and of pages that have not ended.
    pub(super) split_pages: u64,
    pub(super) left: u64,
    pub(super) buffer: Option<Buffer>,
    pub(super) result: Result<(), PoolError>,
    /// Members at which the operation could be made when it began.
    pub(super) knew: MemberSet,
    /// Set if the operation failed only because a member that has it was being given up. Then it
    /// is retried.
    pub(super) is_unlucky: bool,
}

impl EcOperation {
    /// Returns when the time of the operation is over, on the clock of `now_ns`.
    pub(super) fn ends_at(&self) -> u64 {
        self.started_at.saturating_add(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Page of a split that writes.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) operation: usize,
    /// Index of the page in the operation's buffer.
    pub(super) offset: usize,
    pub(super) page: u64,
    pub(super) sum: u64,
    /// Version that must still be the newest one when this page is to become it; `None` for any.
    pub(super) only_after: Option<Version>,
}

/// Purpose of a split.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EcSplitKind {
    /// Reads pages of an operation from this offset on.
    Read { operation: usize, offset: u64 },
    /// Writes the pages in `entries`.
    Write,
    /// Gives this member its part of the rows.
    Repair { member: usize },
    /// Discards spent rows.
    Trim,
}

/// Rows of one group that are read, written, repaired or discarded together. If one part is wanted,
/// it is the same part of all of them.
pub(super) struct EcSplit {
    pub(super) kind: EcSplitKind,
    pub(super) first: u64,
    pub(super) rows: u64,
    pub(super) part: usize,
    /// Bits of the data pages that are not zeros by definition, where something is read. They are
    /// equal in all rows of the split.
    pub(super) present: u16,
    /// Members that have the rows and can be read from.
    pub(super) have: MemberSet,
    /// Member that was asked for the wanted part itself.
    pub(super) direct: Option<usize>,
    /// Set when several parts are read, to make the one that is wanted.
    pub(super) is_wide: bool,
    pub(super) requests: [Option<u16>; MemberSet::MAX],
    /// Buffer of each member: one that came with an answer, or waits to be sent.
    pub(super) buffers: [Option<Buffer>; MemberSet::MAX],
    /// Four sets of members: those that have done it, that failed, that gave wrong bytes, and whose
    /// write may still arrive.
    pub(super) got: MemberSet,
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
    /// Members that lag with background work. They are not waited for.
    pub(super) lagging: MemberSet,
    pub(super) started_at: u64,
    /// Version of the page that is read, for each row.
    pub(super) versions: [Version; ROWS],
    /// Pages that are written.
    pub(super) entries: Vec<Entry>,
    /// Change that the split makes; `None` if it makes none.
    pub(super) epoch_guard: Option<WriteEpochGuard>,
}

impl EcSplit {
    pub(super) fn new(kind: EcSplitKind, first: u64, rows: u64, now: u64) -> EcSplit {
        EcSplit {
            kind,
            first,
            rows,
            part: 0,
            present: 0,
            have: MemberSet(0),
            direct: None,
            is_wide: false,
            requests: [None; MemberSet::MAX],
            buffers: [const { None }; MemberSet::MAX],
            got: MemberSet(0),
            failed: MemberSet(0),
            wrong: MemberSet(0),
            indeterminate: MemberSet(0),
            error: None,
            alarm_at: u64::MAX,
            degrades_at: u64::MAX,
            ends_at: u64::MAX,
            lagging: MemberSet(0),
            started_at: now,
            versions: [Version::ZEROS; ROWS],
            entries: Vec::new(),
            epoch_guard: None,
        }
    }

    pub(super) fn under_way(&self) -> MemberSet {
        (0..MemberSet::MAX).filter(|&member| self.requests[member].is_some()).collect()
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
}

/// Owner of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EcRequestOwner {
    Split(usize),
    /// Split that has ended without this write (`LateWrite`), or that does not need this read any
    /// more (`Abandoned`).
    LateWrite,
    Abandoned,
    /// Scrub of the pool.
    Look,
}

pub(super) struct EcMemberRequest {
    pub(super) owner: EcRequestOwner,
    pub(super) member: usize,
    pub(super) started_at: u64,
}
