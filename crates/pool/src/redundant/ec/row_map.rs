//! State that all lanes of an erasure-coded pool share: the members, where parts lie, and the
//! index.

use super::index::{GROUP, VersionIndex};
use crate::PoolError;
use crate::redundant::members::{Membership, PoolMember};
use crate::redundant::rejoin::SpareMembers;
use crate::redundant::scrub::Scrub;
use core::ops::Deref;
use farfield_core::MemberSet;
use farfield_core::gf256::{ErasureCode, PARTS_MAX};

/// Members of the pool, the places of parts, and the index.
pub(crate) struct RowMap {
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

impl RowMap {
    pub(super) fn new(
        code: ErasureCode,
        members: Vec<PoolMember>,
        spares: SpareMembers,
        pages: u64,
    ) -> Result<RowMap, PoolError> {
        let membership = Membership::new(members, spares, code.data(), false, MemberSet::MAX);
        let rows = VersionIndex::rows_for(pages).min(membership.pages());
        let index = VersionIndex::new(pages, rows, code.parts() as u64).map_err(PoolError::Os)?;
        Ok(RowMap { code, index, scrub: Scrub::new(None), membership })
    }

    /// Creates the table of a claimed snapshot.
    pub(super) fn inherited(
        code: ErasureCode,
        members: Vec<PoolMember>,
        spares: SpareMembers,
        index: VersionIndex,
        shards: [usize; MemberSet::MAX],
        moved: &[(usize, usize)],
    ) -> Result<RowMap, PoolError> {
        let membership = Membership::new(members, spares, code.data(), true, MemberSet::MAX);
        membership.set_shards(shards);
        moved.iter().for_each(|&(member, origin)| membership.set_origin(member, origin));
        // Only a look at all rows can tell whether a member lacks something.
        membership.all().iter().for_each(|member| membership.note_missed(member));
        Ok(RowMap { code, index, scrub: Scrub::new(None), membership })
    }

    /// Notes that `member` gave other bytes than its part of some of these rows. Returns `true` if
    /// others are asked from now on.
    pub(super) fn suspect(&self, first: u64, rows: u64, member: usize) -> bool {
        self.with_unrecorded_miss(MemberSet::one(member), || {
            let living = self.present().difference(self.unreliable());
            let is_changed = self.index.suspect(first, rows, member, self.code.data(), living);
            if is_changed {
                self.note_missed(member);
            }
            is_changed
        })
    }

    fn turn(&self, row: u64) -> usize {
        (row / GROUP) as usize % self.code.parts()
    }

    /// Returns the member of the shard that `part` of the row belongs to; it may have failed. Parts
    /// change shards from group to group, so that parity is spread over all members.
    pub(super) fn member_of(&self, row: u64, part: usize) -> usize {
        self.member_of_shard((part + self.turn(row)) % self.code.parts())
    }

    /// Returns the part of the row that belongs to the shard of `member`.
    pub(super) fn part_of(&self, row: u64, member: usize) -> Option<usize> {
        Some((self.shard_of(member)? + self.code.parts() - self.turn(row)) % self.code.parts())
    }

    /// Returns the members of all parts of the row.
    pub(super) fn members_of(&self, row: u64) -> [usize; PARTS_MAX] {
        core::array::from_fn(|part| if part < self.code.parts() { self.member_of(row, part) } else { usize::MAX })
    }

    /// Returns the members that have a shard now and lack their part of a row that `have` hold.
    pub(super) fn lacking(&self, have: MemberSet) -> MemberSet {
        let seated: MemberSet = (0..self.code.parts()).map(|shard| self.member_of_shard(shard)).collect();
        seated.difference(have)
    }
}
