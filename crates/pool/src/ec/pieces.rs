//! What a lane remembers: operations, what is under way for them, and what legs do for that.

use super::index::Version;
use crate::backend::Kind as Asked;
use crate::changes::Change;
use crate::legs::RUN_PAGES;
use crate::{Buffer, PoolError, Priority};
use core::time::Duration;
use farfield_core::Legs;

/// Pieces of one lane at a time.
pub(super) const PIECES: usize = 256;
/// Most rows of one piece.
pub(super) const ROWS: usize = RUN_PAGES as usize;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A caller asked for it.
    Asked(Asked),
    /// Pages of sparse rows are read, to be written again.
    Gather,
    /// And then they are.
    Move,
}

impl Kind {
    pub(super) fn is_write(self) -> bool {
        matches!(self, Kind::Asked(Asked::Write) | Kind::Move)
    }
}

/// An operation of the caller; or pages that are moved.
pub(super) struct Parent {
    pub(super) tag: u64,
    pub(super) priority: Priority,
    pub(super) deadline: Duration,
    pub(super) started_at: u64,
    pub(super) kind: Kind,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Pages that have set out, and pages that have not ended.
    pub(super) cut: u64,
    pub(super) left: u64,
    pub(super) buffer: Option<Buffer>,
    pub(super) result: Result<(), PoolError>,
    /// Legs that it could be made at when it began.
    pub(super) knew: Legs,
    /// It has failed only because a leg that has it was being given up: it begins anew.
    pub(super) is_unlucky: bool,
}

impl Parent {
    /// When its time is over.
    pub(super) fn ends_at(&self) -> u64 {
        self.started_at.saturating_add(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// One page of a piece that writes.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) parent: usize,
    /// Which page of the parent's buffer.
    pub(super) offset: usize,
    pub(super) page: u64,
    pub(super) sum: u64,
    /// It becomes the newest version only after this one.
    pub(super) only_after: Option<Version>,
}

/// What a piece is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Pages of a parent from this offset on.
    Read { parent: usize, offset: u64 },
    /// The pages in `entries`.
    Write,
    /// This leg gets its part of the rows.
    Mend { leg: usize },
    /// Spent rows are discarded.
    Trim,
}

/// Rows of one group, and the same part of all of them where one is wanted.
pub(super) struct Piece {
    pub(super) task: Task,
    pub(super) first: u64,
    pub(super) rows: u64,
    pub(super) part: usize,
    /// Data pages that are not zeros by definition, the same in all rows, where something is read.
    pub(super) present: u16,
    /// Legs to read from, if need be.
    pub(super) have: Legs,
    /// The leg that was asked for what is wanted itself.
    pub(super) direct: Option<usize>,
    /// Several parts are read, to make the one that is wanted.
    pub(super) is_wide: bool,
    pub(super) errands: [Option<u16>; Legs::MAX],
    /// Of each leg: one that came with an answer, or waits to be sent.
    pub(super) buffers: [Option<Buffer>; Legs::MAX],
    /// Legs that have done it; that failed; that gave wrong bytes; whose write may still arrive.
    pub(super) got: Legs,
    pub(super) failed: Legs,
    pub(super) wrong: Legs,
    pub(super) unsure: Legs,
    pub(super) error: Option<PoolError>,
    /// When to ask others, or to lose patience.
    pub(super) alarm_at: u64,
    /// Of a write: when it counts with fewer legs, once enough have it; and when the time of its operations is over.
    pub(super) patient_until: u64,
    pub(super) ends_at: u64,
    /// Legs that were asked to store something nobody waits for, and are late.
    pub(super) late: Legs,
    pub(super) started_at: u64,
    /// What is read, row by row.
    pub(super) versions: [Version; ROWS],
    /// What is written.
    pub(super) entries: Vec<Entry>,
    /// If it is one.
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
            have: Legs(0),
            direct: None,
            is_wide: false,
            errands: [None; Legs::MAX],
            buffers: [const { None }; Legs::MAX],
            got: Legs(0),
            failed: Legs(0),
            wrong: Legs(0),
            unsure: Legs(0),
            error: None,
            alarm_at: u64::MAX,
            patient_until: u64::MAX,
            ends_at: u64::MAX,
            late: Legs(0),
            started_at: now,
            versions: [Version::ZEROS; ROWS],
            entries: Vec::new(),
            change: None,
        }
    }

    pub(super) fn under_way(&self) -> Legs {
        (0..Legs::MAX).filter(|&leg| self.errands[leg].is_some()).collect()
    }

    /// A leg has not done it.
    pub(super) fn fail(&mut self, leg: usize, error: PoolError) {
        self.failed = self.failed.or(Legs::one(leg));
        match error {
            PoolError::Corrupt { .. } => self.wrong = self.wrong.or(Legs::one(leg)),
            PoolError::TimedOut { .. } => self.unsure = self.unsure.or(Legs::one(leg)),
            _ => {}
        }
        // That it is full is for the caller to know; that a leg is gone only if too many are.
        let is_worse = matches!(error, PoolError::PoolFull { .. });
        if is_worse || self.error.is_none_or(|known| matches!(known, PoolError::ServerGone { .. })) {
            self.error = Some(error);
        }
    }
}

/// For whom a leg works.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Piece(usize),
    /// A piece that has ended: with a write that it did not wait for, or a read that nobody needs any more.
    LateWrite,
    Nobody,
    /// The scrub.
    Look,
}

pub(super) struct Errand {
    pub(super) target: For,
    pub(super) leg: usize,
    pub(super) started_at: u64,
}
