//! What a lane remembers: operations, their pieces, and what legs do for them.

use crate::{Buffer, Lane, PagePart, PoolError, Priority, Request};
use core::time::Duration;
use farfield_core::chunk_word::Legs;
use std::collections::VecDeque;

/// Pieces of one lane at a time.
pub(super) const PIECES: usize = 256;
/// Most pages of a piece that travels in buffers of the lane.
pub(super) const PIECE_PAGES: u64 = 16;
/// How long a leg may take for a write that another leg has.
pub(super) const WRITE_PATIENCE: Duration = Duration::from_secs(1);
/// A read is asked for again elsewhere after so many times what it usually takes, within these bounds.
pub(super) const HEDGE_TIMES: u64 = 8;
pub(super) const HEDGE_MIN: Duration = Duration::from_millis(1);
pub(super) const HEDGE_MAX: Duration = Duration::from_millis(250);
/// Buffers for one leg's errands: of one page, and of a piece.
pub(super) const SINGLES: usize = 32;
pub(super) const RUNS: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Part(PagePart),
    Write,
    Discard,
}

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
    pub(super) is_hedged: bool,
}

impl Piece {
    pub(super) fn under_way(&self) -> Legs {
        (0..Legs::MAX).filter(|&leg| self.errands[leg].is_some()).fold(Legs(0), |legs, leg| legs.or(Legs::one(leg)))
    }
}

/// For whom a leg works.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Piece(usize),
    /// The copier's job of this number.
    Copy(usize),
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

/// One leg, as one lane sees it.
pub(super) struct LegLane {
    pub(super) lane: Box<dyn Lane>,
    /// Requests that it had no room for.
    pub(super) waiting: VecDeque<Request>,
    pub(super) singles: Vec<Buffer>,
    pub(super) runs: Vec<Buffer>,
    /// Of a read; 0 for unknown.
    pub(super) latency_ns: u64,
}

impl LegLane {
    pub(super) fn has_buffer(&self, pages: u64) -> bool {
        if pages == 1 { !self.singles.is_empty() } else { !self.runs.is_empty() }
    }

    /// Half of the buffers are kept for writes: after a read that is not answered it is writes by which a slow leg is known.
    pub(super) fn has_buffer_for_read(&self, pages: u64) -> bool {
        if pages == 1 { self.singles.len() > SINGLES / 2 } else { self.runs.len() > RUNS / 2 }
    }

    pub(super) fn take_buffer(&mut self, pages: u64) -> Option<Buffer> {
        let mut buffer = if pages == 1 { self.singles.pop()? } else { self.runs.pop()? };
        buffer.set_pages(pages as usize);
        Some(buffer)
    }

    pub(super) fn give_buffer(&mut self, buffer: Buffer) {
        if buffer.capacity() == 1 { self.singles.push(buffer) } else { self.runs.push(buffer) }
    }

    pub(super) fn hedge_after(&self) -> u64 {
        match self.latency_ns {
            0 => HEDGE_MAX.as_nanos() as u64 / 4,
            usual => (usual * HEDGE_TIMES).clamp(HEDGE_MIN.as_nanos() as u64, HEDGE_MAX.as_nanos() as u64),
        }
    }
}
