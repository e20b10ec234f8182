//! What an erasure code notes of a split: rows that are read, written, repaired or discarded.

use super::index::Version;
use crate::Buffer;
use crate::redundant::members::RUN_PAGES;
use crate::redundant::split::Split;
use farfield_core::MemberSet;

/// Most rows of one split.
pub(super) const ROWS: usize = RUN_PAGES as usize;

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

pub(super) type EcSplit = Split<EcTask>;

/// Rows of one group that are read, written, repaired or discarded together. If one part is wanted,
/// it is the same part of all of them.
pub(crate) struct EcTask {
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
    /// Set when the parts that were read make other bytes than those that were written: a member
    /// gives old ones, and it takes one part more than usual to tell which.
    pub(super) needs_all: bool,
    /// Buffer of each member: one that came with an answer, or waits to be sent.
    pub(super) buffers: [Option<Buffer>; MemberSet::MAX],
    pub(super) started_at: u64,
    /// Version of the page that is read, for each row.
    pub(super) versions: [Version; ROWS],
    /// Pages that are written.
    pub(super) entries: Vec<Entry>,
}

impl EcTask {
    pub(super) fn new(kind: EcSplitKind, first: u64, rows: u64, now: u64) -> EcTask {
        EcTask {
            kind,
            first,
            rows,
            part: 0,
            present: 0,
            have: MemberSet(0),
            direct: None,
            is_wide: false,
            needs_all: false,
            buffers: [const { None }; MemberSet::MAX],
            started_at: now,
            versions: [Version::ZEROS; ROWS],
            entries: Vec::new(),
        }
    }

    /// Checks whether the split is maintenance that no operation asked for.
    pub(super) fn is_maintenance(&self) -> bool {
        matches!(self.kind, EcSplitKind::Repair { .. } | EcSplitKind::Trim)
    }
}
