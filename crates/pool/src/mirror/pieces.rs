//! What a lane remembers: operations, their pieces, and what legs do for them.

use crate::backend::Kind;
use crate::changes::Change;
use crate::{Buffer, PoolError, Priority};
use core::time::Duration;
use farfield_core::Legs;

/// Pieces of one lane at a time.
pub(super) const PIECES: usize = 256;

/// An operation of the caller.
pub(super) struct Parent {
    pub(super) tag: u64,
    pub(super) priority: Priority,
    pub(super) deadline: Duration,
    pub(super) started_at: u64,
    pub(super) kind: Kind,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Pages that are in pieces by now.
    pub(super) cut: u64,
    pub(super) pieces: usize,
    /// Not while a leg has it.
    pub(super) buffer: Option<Buffer>,
    pub(super) result: Result<(), PoolError>,
    /// Legs that it could be made at when it began.
    pub(super) knew: Legs,
    /// It has failed only because the legs that have it are not those that are read there: it begins anew.
    pub(super) is_unlucky: bool,
}

impl Parent {
    /// When its time is over.
    pub(super) fn ends_at(&self) -> u64 {
        self.started_at.saturating_add(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX))
    }
}

pub(super) struct Piece {
    pub(super) parent: usize,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Errands under way.
    pub(super) errands: [Option<u16>; Legs::MAX],
    /// Legs that have done it; that failed; that gave wrong bytes; whose write may still arrive.
    pub(super) have: Legs,
    pub(super) failed: Legs,
    pub(super) wrong: Legs,
    pub(super) unsure: Legs,
    pub(super) error: Option<PoolError>,
    /// When to hedge, or to lose patience.
    pub(super) alarm_at: u64,
    /// Of a write: when it counts with fewer legs, once some have it; and when the time of its operation is over.
    pub(super) patient_until: u64,
    pub(super) ends_at: u64,
    /// Its operation has ended in failure; it goes on until all legs have answered, because a leg that nobody could do without may still do it.
    pub(super) is_over: bool,
    /// Legs that were asked and are late.
    pub(super) late: Legs,
    pub(super) is_hedged: bool,
    /// If it is one.
    pub(super) change: Option<Change>,
}

impl Piece {
    pub(super) fn under_way(&self) -> Legs {
        (0..Legs::MAX).filter(|&leg| self.errands[leg].is_some()).collect()
    }

    /// All legs that were asked.
    pub(super) fn asked(&self) -> Legs {
        self.have.or(self.failed).or(self.under_way())
    }
}

/// For whom a leg works.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Piece(usize),
    /// The copier's job of this number.
    Copy(usize),
    /// The scrub.
    Look,
    /// A piece that has ended: with a write that it did not wait for, or a read that nobody needs any more.
    LateWrite,
    Nobody,
}

pub(super) struct Errand {
    pub(super) target: For,
    pub(super) leg: usize,
    /// The buffer is the caller's.
    pub(super) is_direct: bool,
    pub(super) started_at: u64,
}
