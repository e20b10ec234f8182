//! Pool of K + M members that holds as much as K of them could, and survives the loss of M.
//!
//! Pages that leave together make a *row*: up to K pages and M pages of parity, one at each member,
//! all under the row's number there. A row is written once, where no live row is, and never changed
//! ([`farfield_core::row_word`]). An index in local memory says where the newest version of each
//! page is (`index`); it changes when the row is at enough members. So whatever dies in the middle
//! of a write, every page is its old or its new version ([decision
//! 7](../../../../../docs/decisions/0007-rows-of-an-erasure-code-are-written-once.md)).
//!
//! A read asks the member that has the page. If that member is gone or slow, or gives bytes that
//! differ from those that were written, the page is made from K others of its row (`reads`). A part
//! that a member lacks is made the same way, and written there (`maintenance`); a spare lacks
//! everything at first. Pages that nobody reads are compared with their digests in turn (`scrub`).

mod index;
mod lane;
mod maintenance;
mod reads;
mod row_map;
mod scrub;
mod splits;
#[cfg(test)]
mod tests;
mod writes;

use crate::redundant::backend::RedundantBackend;
use crate::redundant::members::PoolMember;
use crate::redundant::rejoin::SpareMembers;
use crate::redundant::repair::complete_members;
use crate::redundant::scheme::RedundantMap;
use crate::redundant::scrub::Scrub;
use crate::unclaimed_snapshots::{UnclaimedSnapshots, key};
use crate::{CloneTicket, PoolError};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_core::gf256::ErasureCode;
use farfield_os::sync::Mutex;
use index::VersionIndex;
use lane::EcScheme;
use row_map::RowMap;
use std::sync::Arc;

/// Unclaimed snapshots. There is room for as many as there can be erasure codes in one pool: each
/// code has at least two members.
static SNAPSHOTS: Mutex<UnclaimedSnapshots<EcSnapshot, { CloneTicket::SERVERS_MAX / 2 }>> =
    Mutex::new(UnclaimedSnapshots::new());

/// State of the pool that snapshots of the members do not contain.
struct EcSnapshot {
    index: VersionIndex,
    /// Index of the member of each shard.
    shards: [usize; MemberSet::MAX],
    /// Number of members that the index may know.
    members: usize,
    /// Members that came back, each with the member of the URL whose server it is.
    moved: Vec<(usize, usize)>,
}

/// Backend that keeps one page of every row at each of several members.
pub(crate) type EcBackend = RedundantBackend<EcScheme>;

impl EcBackend {
    /// Returns the number of pages that each member needs for a region of `pages`.
    pub(crate) fn pages_of_member(pages: u64) -> u64 {
        VersionIndex::rows_for(pages)
    }

    /// Creates a pool of `members` for rows of this `code`, and `spares`; all of them hold zeros. A
    /// member that has failed already has no backend. If there is a period `scrub`, everything is
    /// compared once in that time. With `repairs` a thread looks after the members and repairs;
    /// without, lanes do.
    pub(crate) fn new(
        code: ErasureCode,
        members: Vec<PoolMember>,
        spares: impl Into<SpareMembers>,
        pages: u64,
        scrub: Option<Duration>,
        repairs: bool,
    ) -> Result<EcBackend, PoolError> {
        Ok(EcBackend::over(RowMap::new(code, members, spares.into(), pages)?, scrub, repairs))
    }

    /// Claims the snapshot whose members, and spares that were in use, were claimed with these
    /// secrets.
    pub(crate) fn claim(
        code: ErasureCode,
        mut members: Vec<PoolMember>,
        mut spares: SpareMembers,
        secrets: &[u128],
        scrub: Option<Duration>,
        repairs: bool,
    ) -> Result<EcBackend, PoolError> {
        let found = SNAPSHOTS.lock().take(key(secrets));
        let (server, reason) = (members[0].server, "the ticket is unknown, used or expired");
        let EcSnapshot { index, shards, members: known, moved } = found.ok_or(PoolError::Refused { server, reason })?;
        // The index knows members by their places, also those that have failed.
        let (wanted, behind) = (members.len(), &mut spares.members);
        let nobody = || PoolMember { backend: None, leaves: 0, server: 0 };
        behind.resize_with(behind.len().max(known - wanted), nobody);
        for &(place, origin) in &moved {
            let from = if origin < wanted { &mut members[origin] } else { &mut behind[origin - wanted] };
            behind[place - wanted] = PoolMember { backend: from.backend.take(), leaves: 0, server: from.server };
        }
        Ok(EcBackend::over(RowMap::inherited(code, members, spares, index, shards, &moved)?, scrub, repairs))
    }

    fn over(mut table: RowMap, scrub: Option<Duration>, repairs: bool) -> EcBackend {
        table.scrub = Scrub::new(scrub);
        RedundantBackend::start(table, repairs)
    }
}

impl RedundantMap for RowMap {
    type Scheme = EcScheme;

    fn region_pages(&self) -> u64 {
        self.index.pages
    }

    fn member_pages(&self) -> u64 {
        self.index.rows
    }

    fn stored_pages(&self) -> u64 {
        self.index.counts().1
    }

    fn describe(&self) -> String {
        let (rows, live, spent) = self.index.counts();
        format!("{live} pages in {rows} rows of {}; {spent} rows to be used again", self.code.data())
    }

    fn needs_maintenance(&self) -> bool {
        self.index.has_too_many_spent() || self.index.is_sparse(self.code.data() as u64)
    }

    fn forget_member(&self, member: usize) {
        self.index.forget(member);
    }

    fn snapshot(self: &Arc<RowMap>) -> Result<CloneTicket, PoolError> {
        let whole = complete_members(self)?;
        let index = self.index.copy().map_err(PoolError::Os)?;
        // The index knows what another member lacks, unless a late write is still on its way.
        let others =
            self.select(|member, _| self.active().has(member) && !self.is_lagging(member) && !whole.has(member));
        let secrets = self.clone_members(whole.union(self.answering(others)))?;
        let shards = core::array::from_fn(|shard| self.member_of_shard(shard));
        let leaves: usize = self.members.iter().map(|member| member.leaves).sum();
        let snapshot = EcSnapshot { index, shards, members: self.known(), moved: self.moved() };
        let old = SNAPSHOTS.lock().put(key(&secrets[..leaves]), snapshot);
        drop(old);
        Ok(CloneTicket { secrets })
    }
}
