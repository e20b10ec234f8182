//! State of a lane: operations, the pieces that are under way for them, and what legs do for those.

use super::index::Version;
use crate::backend::OpKind as Asked;
use crate::members::RUN_PAGES;
use crate::write_epochs::WriteEpochGuard;
use crate::{Buffer, PoolError, Priority};
use core::time::Duration;
use farfield_core::MemberSet;

/// Most pieces that one lane has under way.
pub(super) const PIECES: usize = 256;
/// Most rows of one piece.
pub(super) const ROWS: usize = RUN_PAGES as usize;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EcOperationKind {
    /// Operation of a caller.
    Caller(Asked),
    /// First half of a move: reads pages of sparse rows, to be written again.
    Gather,
    /// Second half of a move: writes those pages.
    Move,
}

impl EcOperationKind {
    pub(super) fn is_write(self) -> bool {
        matches!(self, EcOperationKind::Caller(Asked::Write) | EcOperationKind::Move)
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
    /// Legs at which the operation could be made when it began.
    pub(super) knew: MemberSet,
    /// Set if the operation failed only because a leg that has it was being given up. Then it
    /// begins anew.
    pub(super) is_unlucky: bool,
}

impl EcOperation {
    /// Returns when the time of the operation is over, on the clock of `now_ns`.
    pub(super) fn ends_at(&self) -> u64 {
        self.started_at.saturating_add(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Page of a piece that writes.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) operation: usize,
    /// Index of the page in the parent's buffer.
    pub(super) offset: usize,
    pub(super) page: u64,
    pub(super) sum: u64,
    /// Version that must still be the newest one when this page is to become it; `None` for any.
    pub(super) only_after: Option<Version>,
}

/// Purpose of a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EcSplitKind {
    /// Reads pages of a parent from this offset on.
    Read { operation: usize, offset: u64 },
    /// Writes the pages in `entries`.
    Write,
    /// Gives this leg its part of the rows.
    Repair { member: usize },
    /// Discards spent rows.
    Trim,
}

/// Rows of one group that are read, written, mended or discarded together. If one part is wanted,
/// it is the same part of all of them.
pub(super) struct EcSplit {
    pub(super) kind: EcSplitKind,
    pub(super) first: u64,
    pub(super) rows: u64,
    pub(super) part: usize,
    /// Bits of the data pages that are not zeros by definition, where something is read. They are
    /// equal in all rows of the piece.
    pub(super) present: u16,
    /// Legs that have the rows and can be read from.
    pub(super) have: MemberSet,
    /// Leg that was asked for the wanted part itself.
    pub(super) direct: Option<usize>,
    /// Set when several parts are read, to make the one that is wanted.
    pub(super) is_wide: bool,
    pub(super) requests: [Option<u16>; MemberSet::MAX],
    /// Buffer of each leg: one that came with an answer, or waits to be sent.
    pub(super) buffers: [Option<Buffer>; MemberSet::MAX],
    /// Four sets of legs: those that have done it, that failed, that gave wrong bytes, and whose
    /// write may still arrive.
    pub(super) got: MemberSet,
    pub(super) failed: MemberSet,
    pub(super) wrong: MemberSet,
    pub(super) indeterminate: MemberSet,
    pub(super) error: Option<PoolError>,
    /// When to ask other legs, or to lose patience.
    pub(super) alarm_at: u64,
    /// When a write counts with fewer legs once enough have it (`patient_until`), and when the time
    /// of its operations is over (`ends_at`).
    pub(super) patient_until: u64,
    pub(super) ends_at: u64,
    /// Legs that are late with background work. They are not waited for.
    pub(super) lagging: MemberSet,
    pub(super) started_at: u64,
    /// Version of the page that is read, for each row.
    pub(super) versions: [Version; ROWS],
    /// Pages that are written.
    pub(super) entries: Vec<Entry>,
    /// Change that the piece makes; `None` if it makes none.
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
            patient_until: u64::MAX,
            ends_at: u64::MAX,
            lagging: MemberSet(0),
            started_at: now,
            versions: [Version::ZEROS; ROWS],
            entries: Vec::new(),
            epoch_guard: None,
        }
    }

    pub(super) fn under_way(&self) -> MemberSet {
        (0..MemberSet::MAX).filter(|&leg| self.requests[leg].is_some()).collect()
    }

    /// Notes that a leg has failed.
    pub(super) fn fail(&mut self, leg: usize, error: PoolError) {
        self.failed = self.failed.union(MemberSet::one(leg));
        match error {
            PoolError::Corrupt { .. } => self.wrong = self.wrong.union(MemberSet::one(leg)),
            PoolError::TimedOut { .. } => self.indeterminate = self.indeterminate.union(MemberSet::one(leg)),
            _ => {}
        }
        // The caller must know that a leg is full. It must know that a leg is gone only if too many
        // are.
        let is_worse = matches!(error, PoolError::PoolFull { .. });
        if is_worse || self.error.is_none_or(|known| matches!(known, PoolError::ServerGone { .. })) {
            self.error = Some(error);
        }
    }
}

/// Owner of an errand.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EcRequestOwner {
    Split(usize),
    /// Piece that has ended without this write (`LateWrite`), or that does not need this read any
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
