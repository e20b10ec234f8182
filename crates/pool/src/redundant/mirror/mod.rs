//! Pool of several members that hold the same pages (RAID 1): it lives as long as one of its
//! members does.
//!
//! Writes go to all members, reads to one. For each chunk of 64 pages a word notes which members
//! hold the right bytes ([`farfield_core::chunk_word`]). A member that missed a write, or gave
//! wrong bytes, is not read there until the chunk was copied to it (`copier`). Pages that nobody
//! reads are compared in turn (`scrub`). A member that is gone is never used again; a spare takes
//! its place and is filled by the same copies, while reads and writes go on. A slow member is asked
//! for nothing until it has answered.

mod answers;
mod broadcast;
mod calls;
mod copier;
mod lane;
mod replica_map;
mod scrub;
mod splits;
#[cfg(test)]
mod tests;

use crate::redundant::members::PoolMember;
use crate::redundant::rejoin::SpareMembers;
use crate::redundant::repair::{RepairLock, RepairThread, complete_members, readmit_members};
use crate::redundant::scrub::{Scrub, ScrubTarget};
use crate::{Backend, CallChannel, CloneTicket, Health, Lane, PoolError, Protection, ScrubStats, WriteReservation};
use broadcast::MirrorWriteReservation;
use calls::MirrorCalls;
use core::time::Duration;
use farfield_core::PageId;
pub(crate) use lane::MirrorLane;
pub(crate) use replica_map::{CHUNK_PAGES, InitialContents, ReplicaMap, chunks};
use std::sync::Arc;

/// Backend that keeps the same pages at each of several members.
pub(crate) struct MirrorBackend {
    table: Arc<ReplicaMap>,
    /// Lock that is held while a thread copies, and while a snapshot is made.
    repair_lock: Arc<RepairLock>,
    repair_thread: Option<RepairThread>,
}

impl MirrorBackend {
    /// Creates a mirror of `members`, where `holds` says what each of them holds. A member that has
    /// failed already has no backend. The `spares` hold zeros, or what the members hold if they are
    /// a snapshot. The region addresses `pages` pages; 0 means as many as the members have. If
    /// there is a period `scrub`, everything is compared once in that time. With `repairs` a thread
    /// looks after the members and copies; without, lanes do.
    pub(crate) fn new(
        members: Vec<PoolMember>,
        spares: impl Into<SpareMembers>,
        pages: u64,
        holds: InitialContents,
        scrub: Option<Duration>,
        repairs: bool,
    ) -> Result<MirrorBackend, PoolError> {
        let mut table = ReplicaMap::new(members, spares.into(), pages, holds)?;
        table.scrub = Scrub::new(scrub);
        let (table, copying) = (Arc::new(table), Arc::new(RepairLock::default()));
        let repair_thread = repairs.then(|| RepairThread::start(table.clone(), copying.clone()));
        Ok(MirrorBackend { table, repair_lock: copying, repair_thread })
    }

    /// Sets how long a write waits for all members before it counts with fewer. With `None` it
    /// waits as long as none of them is known to be gone.
    pub(crate) fn set_write_timeout(&self, timeout: Option<Duration>) {
        self.table.set_write_timeout(timeout);
    }
}

impl Backend for MirrorBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(MirrorLane::open(&self.table, if self.repair_thread.is_some() { 0 } else { 1 })?))
    }

    fn open_reads(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        Ok(Box::new(MirrorCalls::open(&self.table)?))
    }

    fn begin_writes(&self, runs: &[(PageId, u64)]) -> Result<Box<dyn WriteReservation>, PoolError> {
        Ok(Box::new(MirrorWriteReservation::begin(&self.table, runs)?))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.repair_lock.hold_still();
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        let mut result = Err(self.table.gone());
        // A snapshot of a member that lacks a page would not know that it lacks it.
        let able = complete_members(&self.table)?;
        for index in able.iter() {
            let own = self.table.leaves(index);
            match self.table.backend(index).map(|backend| backend.clone_region()) {
                Some(Ok(ticket)) => {
                    secrets[own.clone()].copy_from_slice(&ticket.secrets[..own.len()]);
                    result = Ok(());
                }
                Some(Err(error)) => {
                    if matches!(error, PoolError::ServerGone { .. }) {
                        self.table.mark_failed(index);
                    }
                    result = result.or(Err(error));
                }
                None => {}
            }
        }
        result.map(|()| CloneTicket { secrets })
    }

    fn pages(&self) -> u64 {
        self.table.pages
    }

    fn health(&self) -> Health {
        self.table.check_health();
        self.table.health()
    }

    fn scrub_stats(&self) -> Option<ScrubStats> {
        ScrubStats::with_parts(self.table.scrub.counts(), self.table.backends())
    }

    fn protection(&self) -> Option<Protection> {
        Protection::with_parts(Some(self.table.protection(self.table.stored())), self.table.backends())
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
