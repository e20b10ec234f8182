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

use crate::redundant::members::PoolMember;
use crate::redundant::rejoin::SpareMembers;
use crate::redundant::repair::{RepairLock, RepairThread, complete_members, readmit_members};
use crate::redundant::scrub::Scrub;
use crate::unclaimed_snapshots::{UnclaimedSnapshots, key};
use crate::{Backend, CloneTicket, Health, Lane, PoolError, Protection, ScrubStats};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_core::gf256::ErasureCode;
use farfield_os::sync::Mutex;
use index::VersionIndex;
use lane::EcLane;
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
pub(crate) struct EcBackend {
    table: Arc<RowMap>,
    /// Lock that is held while a thread gives members what they lack, and while a snapshot is made.
    repair_lock: Arc<RepairLock>,
    repair_thread: Option<RepairThread>,
}

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
        Ok(EcBackend::start(RowMap::new(code, members, spares.into(), pages)?, scrub, repairs))
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
        Ok(EcBackend::start(RowMap::inherited(code, members, spares, index, shards, &moved)?, scrub, repairs))
    }

    fn start(mut table: RowMap, scrub: Option<Duration>, repairs: bool) -> EcBackend {
        table.scrub = Scrub::new(scrub);
        let (table, repair_lock) = (Arc::new(table), Arc::new(RepairLock::default()));
        let repair_thread = repairs.then(|| RepairThread::start(table.clone(), repair_lock.clone()));
        EcBackend { table, repair_lock, repair_thread }
    }

    /// Sets how long a write waits for all members before it counts with fewer. With `None` it
    /// waits as long as none of them is known to be gone.
    pub(crate) fn set_write_timeout(&self, timeout: Option<Duration>) {
        self.table.set_write_timeout(timeout);
    }
}

impl Backend for EcBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(EcLane::open(&self.table, if self.repair_thread.is_some() { 0 } else { 1 })?))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.repair_lock.hold_still();
        let table = &self.table;
        let whole = complete_members(table)?;
        let index = table.index.copy().map_err(PoolError::Os)?;
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        let (mut cloned, mut failed) = (0, None);
        // The index knows what another member lacks, unless a late write is still on its way.
        let others =
            table.select(|member, _| table.active().has(member) && !table.is_lagging(member) && !whole.has(member));
        let able = whole.union(table.answering(others));
        for number in able.iter() {
            let own = table.leaves(number);
            match table.backend(number).map(|backend| backend.clone_region()) {
                Some(Ok(ticket)) => {
                    secrets[own.clone()].copy_from_slice(&ticket.secrets[..own.len()]);
                    cloned += 1;
                }
                Some(Err(error)) => {
                    if matches!(error, PoolError::ServerGone { .. }) {
                        table.mark_failed(number);
                    }
                    failed = Some(error);
                }
                None => {}
            }
        }
        if cloned < table.code.data() {
            return Err(failed.unwrap_or(table.gone()));
        }
        let shards = core::array::from_fn(|shard| table.member_of_shard(shard));
        let leaf = table.members.iter().map(|member| member.leaves).sum();
        let snapshot = EcSnapshot { index, shards, members: table.known(), moved: table.moved() };
        let old = SNAPSHOTS.lock().put(key(&secrets[..leaf]), snapshot);
        drop(old);
        Ok(CloneTicket { secrets })
    }

    fn pages(&self) -> u64 {
        self.table.index.pages
    }

    fn health(&self) -> Health {
        self.table.check_health();
        self.table.health()
    }

    fn scrub_stats(&self) -> Option<ScrubStats> {
        ScrubStats::with_parts(self.table.scrub.counts(), self.table.backends())
    }

    fn protection(&self) -> Option<Protection> {
        let (_, live, _) = self.table.index.counts();
        Protection::with_parts(Some(self.table.protection(live)), self.table.backends())
    }

    fn how(&self) -> String {
        let (rows, live, spent) = self.table.index.counts();
        format!("{live} pages in {rows} rows of {}; {spent} rows to be used again", self.table.code.data())
    }

    fn is_rejoin_due(&self) -> bool {
        self.repair_thread.is_none() && self.table.is_rejoin_due()
    }

    fn rejoin(&self) {
        readmit_members(&*self.table, &self.repair_lock);
    }

    fn release(&self) {
        self.table.backends().for_each(|backend| backend.release());
    }

    fn abandon(&self) {
        self.repair_thread.iter().for_each(RepairThread::abandon);
        self.table.abandon();
    }
}
