//! State of a lane: operations, the pieces that are under way for them, and what legs do for those.

use super::index::Version;
use crate::backend::Kind as Asked;
use crate::changes::Change;
use crate::legs::RUN_PAGES;
use crate::{Buffer, PoolError, Priority};
use core::time::Duration;
use farfield_core::MemberSet;

/// Most pieces that one lane has under way.
pub(super) const PIECES: usize = 256;
/// Most rows of one piece.
pub(super) const ROWS: usize = RUN_PAGES as usize;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Operation of a caller.
    Asked(Asked),
    /// First half of a move: reads pages of sparse rows, to be written again.
    Gather,
    /// Second half of a move: writes those pages.
    Move,
}

impl Kind {
    pub(super) fn is_write(self) -> bool {
        matches!(self, Kind::Asked(Asked::Write) | Kind::Move)
    }
}

/// Operation of the caller, or a batch of pages that are moved.
pub(super) struct Parent {
    pub(super) tag: u64,
    pub(super) priority: Priority,
    pub(super) deadline: Duration,
    pub(super) started_at: u64,
    pub(super) kind: Kind,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Number of pages that have set out, and of pages that have not ended.
    pub(super) cut: u64,
    pub(super) left: u64,
    pub(super) buffer: Option<Buffer>,
    pub(super) result: Result<(), PoolError>,
    /// Legs at which the operation could be made when it began.
    pub(super) knew: MemberSet,
    /// Set if the operation failed only because a leg that has it was being given up. Then it
    /// begins anew.
    pub(super) is_unlucky: bool,
}

impl Parent {
    /// Returns when the time of the operation is over, on the clock of `now_ns`.
    pub(super) fn ends_at(&self) -> u64 {
        self.started_at.saturating_add(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Page of a piece that writes.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) parent: usize,
    /// Index of the page in the parent's buffer.
    pub(super) offset: usize,
    pub(super) page: u64,
    pub(super) sum: u64,
    /// Version that must still be the newest one when this page is to become it; `None` for any.
    pub(super) only_after: Option<Version>,
}

/// Purpose of a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Reads pages of a parent from this offset on.
    Read { parent: usize, offset: u64 },
    /// Writes the pages in `entries`.
    Write,
    /// Gives this leg its part of the rows.
    Mend { leg: usize },
    /// Discards spent rows.
    Trim,
}

/// Rows of one group that are read, written, mended or discarded together. If one part is wanted,
/// it is the same part of all of them.
pub(super) struct Piece {
    pub(super) task: Task,
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
    pub(super) errands: [Option<u16>; MemberSet::MAX],
    /// Buffer of each leg: one that came with an answer, or waits to be sent.
    pub(super) buffers: [Option<Buffer>; MemberSet::MAX],
    /// Four sets of legs: those that have done it, that failed, that gave wrong bytes, and whose
    /// write may still arrive.
    pub(super) got: MemberSet,
    pub(super) failed: MemberSet,
    pub(super) wrong: MemberSet,
    pub(super) unsure: MemberSet,
    pub(super) error: Option<PoolError>,
    /// When to ask other legs, or to lose patience.
    pub(super) alarm_at: u64,
    /// When a write counts with fewer legs once enough have it (`patient_until`), and when the time
    /// of its operations is over (`ends_at`).
    pub(super) patient_until: u64,
    pub(super) ends_at: u64,
    /// Legs that are late with background work. They are not waited for.
    pub(super) late: MemberSet,
    pub(super) started_at: u64,
    /// Version of the page that is read, for each row.
    pub(super) versions: [Version; ROWS],
    /// Pages that are written.
    pub(super) entries: Vec<Entry>,
    /// Change that the piece makes; `None` if it makes none.
    pub(super) change: Option<Change>,
}

impl Piece {
    pub(super) fn new(task: Task, first: u64, rows: u64, now: u64) -> Piece {
        Piece {
            task,
            first,
            rows,
            part: 0,
            present: 0,
            have: MemberSet(0),
            direct: None,
            is_wide: false,
            errands: [None; MemberSet::MAX],
            buffers: [const { None }; MemberSet::MAX],
            got: MemberSet(0),
            failed: MemberSet(0),
            wrong: MemberSet(0),
            unsure: MemberSet(0),
            error: None,
            alarm_at: u64::MAX,
            patient_until: u64::MAX,
            ends_at: u64::MAX,
            late: MemberSet(0),
            started_at: now,
            versions: [Version::ZEROS; ROWS],
            entries: Vec::new(),
            change: None,
        }
    }

    pub(super) fn under_way(&self) -> MemberSet {
        (0..MemberSet::MAX).filter(|&leg| self.errands[leg].is_some()).collect()
    }

    /// Notes that a leg has failed.
    pub(super) fn fail(&mut self, leg: usize, error: PoolError) {
        self.failed = self.failed.union(MemberSet::one(leg));
        match error {
            PoolError::Corrupt { .. } => self.wrong = self.wrong.union(MemberSet::one(leg)),
            PoolError::TimedOut { .. } => self.unsure = self.unsure.union(MemberSet::one(leg)),
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
pub(super) enum For {
    Piece(usize),
    /// Piece that has ended without this write (`LateWrite`), or that does not need this read any
    /// more (`Nobody`).
    LateWrite,
    Nobody,
    /// Scrub of the pool.
    Look,
}

pub(super) struct Errand {
    pub(super) target: For,
    pub(super) leg: usize,
    pub(super) started_at: u64,
}
