//! State that all lanes of an erasure-coded pool share: the legs, where parts lie, and the index.

use super::index::{GROUP, Index};
use super::lane::{ERRANDS, EcLane};
use crate::PoolError;
use crate::healer::Patient;
use crate::legs::{Leg, Roster};
use crate::rejoin::Spares;
use crate::scrub::{Scrub, Shelves};
use core::ops::Deref;
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_core::gf256::{ErasureCode, PARTS_MAX};
use std::sync::Arc;

/// Most pieces of care that the thread has under way.
const THREAD_CARES: usize = 4;

/// Legs of the pool, the places of parts, and the index.
pub(super) struct RowTable {
    roster: Roster,
    pub(super) code: ErasureCode,
    pub(super) index: Index,
    /// Scrub of the pool, which is off unless the maker of the table turns it on.
    pub(super) scrub: Scrub,
}

impl Deref for RowTable {
    type Target = Roster;
    fn deref(&self) -> &Roster {
        &self.roster
    }
}

impl Patient for RowTable {
    type Lane = EcLane;
    fn needs_care(&self) -> bool {
        let is_worth_it = || self.index.has_too_many_spent() || self.index.is_sparse(self.code.data() as u64);
        !self.is_abandoned() && (!self.to_heal().is_empty() || is_worth_it())
    }
    fn scrub_in(&self) -> Option<Duration> {
        if self.is_abandoned() { None } else { self.scrub.due_in(self.stored()) }
    }
    fn is_rejoin_due(&self) -> bool {
        self.roster.is_rejoin_due()
    }
    fn is_full(&self) -> bool {
        self.roster.is_full()
    }
    fn vacate(&self) {
        self.roster.vacate(|leg| self.index.forget(leg));
    }
    fn rejoin(&self) {
        self.roster.rejoin(self.index.rows, ERRANDS);
    }
    fn open_for_care(self: &Arc<RowTable>) -> Option<EcLane> {
        EcLane::open(self, THREAD_CARES).ok()
    }
}

impl RowTable {
    pub(super) fn new(code: ErasureCode, legs: Vec<Leg>, spares: Spares, pages: u64) -> Result<RowTable, PoolError> {
        let roster = Roster::new(legs, spares, code.data(), false, MemberSet::MAX);
        let rows = Index::rows_for(pages).min(roster.pages());
        let index = Index::new(pages, rows, code.parts() as u64).map_err(PoolError::Os)?;
        Ok(RowTable { code, index, scrub: Scrub::new(None), roster })
    }

    /// Creates the table of a claimed snapshot.
    pub(super) fn inherited(
        code: ErasureCode,
        legs: Vec<Leg>,
        spares: Spares,
        index: Index,
        seats: [usize; MemberSet::MAX],
        moved: &[(usize, usize)],
    ) -> Result<RowTable, PoolError> {
        let roster = Roster::new(legs, spares, code.data(), true, MemberSet::MAX);
        roster.set_seats(seats);
        moved.iter().for_each(|&(leg, origin)| roster.set_origin(leg, origin));
        // Only a look at all rows can tell whether a leg lacks something.
        roster.all().iter().for_each(|leg| roster.hurt(leg));
        Ok(RowTable { code, index, scrub: Scrub::new(None), roster })
    }

    /// Returns the server of a leg that keeps operations waiting, for the error that says so.
    pub(super) fn slow_server(&self) -> u16 {
        let slow = self.present().iter().find(|leg| self.is_late(*leg));
        self.server(slow.or(self.present().iter().next()).unwrap_or(0))
    }

    /// Notes that `leg` gave other bytes than its part of some of these rows. Returns `true` if
    /// others are asked from now on.
    pub(super) fn suspect(&self, first: u64, rows: u64, leg: usize) -> bool {
        self.while_in_doubt(MemberSet::one(leg), || {
            let living = self.present().difference(self.unreliable());
            let is_changed = self.index.suspect(first, rows, leg, self.code.data(), living);
            if is_changed {
                self.hurt(leg);
            }
            is_changed
        })
    }

    fn turn(&self, row: u64) -> usize {
        (row / GROUP) as usize % self.code.parts()
    }

    /// Returns the leg at whose seat `part` of the row lies; it may be lost. Parts change seats
    /// from group to group, so that parity is spread over all legs.
    pub(super) fn leg_of(&self, row: u64, part: usize) -> usize {
        self.at_seat((part + self.turn(row)) % self.code.parts())
    }

    /// Returns the part of the row that lies at the seat of `leg`.
    pub(super) fn part_of(&self, row: u64, leg: usize) -> Option<usize> {
        Some((self.seat_of(leg)? + self.code.parts() - self.turn(row)) % self.code.parts())
    }

    /// Returns the legs of all parts of the row.
    pub(super) fn legs_of(&self, row: u64) -> [usize; PARTS_MAX] {
        core::array::from_fn(|part| if part < self.code.parts() { self.leg_of(row, part) } else { usize::MAX })
    }

    /// Returns the legs that have a seat now and lack their part of a row that `have` hold.
    pub(super) fn lacking(&self, have: MemberSet) -> MemberSet {
        let seated: MemberSet = (0..self.code.parts()).map(|seat| self.at_seat(seat)).collect();
        seated.difference(have)
    }
}
