//! State that all lanes of an erasure-coded pool share: the legs, where parts lie, and the index.

use super::index::{GROUP, VersionIndex};
use super::lane::{ERRANDS, EcLane};
use crate::PoolError;
use crate::members::{Membership, PoolMember};
use crate::rejoin::SpareMembers;
use crate::repair::RepairSource;
use crate::scrub::{Scrub, ScrubTarget};
use core::ops::Deref;
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_core::gf256::{ErasureCode, PARTS_MAX};
use std::sync::Arc;

/// Most pieces of care that the thread has under way.
const THREAD_CARES: usize = 4;

/// Legs of the pool, the places of parts, and the index.
pub(super) struct RowMap {
    membership: Membership,
    pub(super) code: ErasureCode,
    pub(super) index: VersionIndex,
    /// Scrub of the pool, which is off unless the maker of the table turns it on.
    pub(super) scrub: Scrub,
}

impl Deref for RowMap {
    type Target = Membership;
    fn deref(&self) -> &Membership {
        &self.membership
    }
}

impl RepairSource for RowMap {
    type Lane = EcLane;
    fn needs_repair(&self) -> bool {
        let is_worth_it = || self.index.has_too_many_spent() || self.index.is_sparse(self.code.data() as u64);
        !self.is_abandoned() && (!self.repairable().is_empty() || is_worth_it())
    }
    fn scrub_in(&self) -> Option<Duration> {
        if self.is_abandoned() { None } else { self.scrub.due_in(self.stored()) }
    }
    fn is_rejoin_due(&self) -> bool {
        self.membership.is_rejoin_due()
    }
    fn is_full(&self) -> bool {
        self.membership.is_full()
    }
    fn release_slot(&self) {
        self.membership.release_slot(|leg| self.index.forget(leg));
    }
    fn rejoin(&self) {
        self.membership.rejoin(self.index.rows, ERRANDS);
    }
    fn open_repair_lane(self: &Arc<RowMap>) -> Option<EcLane> {
        EcLane::open(self, THREAD_CARES).ok()
    }
}

impl RowMap {
    pub(super) fn new(
        code: ErasureCode,
        legs: Vec<PoolMember>,
        spares: SpareMembers,
        pages: u64,
    ) -> Result<RowMap, PoolError> {
        let roster = Membership::new(legs, spares, code.data(), false, MemberSet::MAX);
        let rows = VersionIndex::rows_for(pages).min(roster.pages());
        let index = VersionIndex::new(pages, rows, code.parts() as u64).map_err(PoolError::Os)?;
        Ok(RowMap { code, index, scrub: Scrub::new(None), membership: roster })
    }

    /// Creates the table of a claimed snapshot.
    pub(super) fn inherited(
        code: ErasureCode,
        legs: Vec<PoolMember>,
        spares: SpareMembers,
        index: VersionIndex,
        seats: [usize; MemberSet::MAX],
        moved: &[(usize, usize)],
    ) -> Result<RowMap, PoolError> {
        let roster = Membership::new(legs, spares, code.data(), true, MemberSet::MAX);
        roster.set_shards(seats);
        moved.iter().for_each(|&(leg, origin)| roster.set_origin(leg, origin));
        // Only a look at all rows can tell whether a leg lacks something.
        roster.all().iter().for_each(|leg| roster.note_missed(leg));
        Ok(RowMap { code, index, scrub: Scrub::new(None), membership: roster })
    }

    /// Returns the server of a leg that keeps operations waiting, for the error that says so.
    pub(super) fn slow_server(&self) -> u16 {
        let slow = self.present().iter().find(|leg| self.is_lagging(*leg));
        self.server(slow.or(self.present().iter().next()).unwrap_or(0))
    }

    /// Notes that `leg` gave other bytes than its part of some of these rows. Returns `true` if
    /// others are asked from now on.
    pub(super) fn suspect(&self, first: u64, rows: u64, leg: usize) -> bool {
        self.with_unrecorded_miss(MemberSet::one(leg), || {
            let living = self.present().difference(self.unreliable());
            let is_changed = self.index.suspect(first, rows, leg, self.code.data(), living);
            if is_changed {
                self.note_missed(leg);
            }
            is_changed
        })
    }

    fn turn(&self, row: u64) -> usize {
        (row / GROUP) as usize % self.code.parts()
    }

    /// Returns the leg at whose seat `part` of the row lies; it may be lost. Parts change seats
    /// from group to group, so that parity is spread over all legs.
    pub(super) fn member_of(&self, row: u64, part: usize) -> usize {
        self.member_of_shard((part + self.turn(row)) % self.code.parts())
    }

    /// Returns the part of the row that lies at the seat of `leg`.
    pub(super) fn part_of(&self, row: u64, leg: usize) -> Option<usize> {
        Some((self.shard_of(leg)? + self.code.parts() - self.turn(row)) % self.code.parts())
    }

    /// Returns the legs of all parts of the row.
    pub(super) fn members_of(&self, row: u64) -> [usize; PARTS_MAX] {
        core::array::from_fn(|part| if part < self.code.parts() { self.member_of(row, part) } else { usize::MAX })
    }

    /// Returns the legs that have a seat now and lack their part of a row that `have` hold.
    pub(super) fn lacking(&self, have: MemberSet) -> MemberSet {
        let seated: MemberSet = (0..self.code.parts()).map(|seat| self.member_of_shard(seat)).collect();
        seated.difference(have)
    }
}
