//! Pool of several tiers, by age: new writes lie in the first tier that has room, and old pages
//! move on to the next.
//!
//! A page has the same number in every tier; a word for each page says which tier has it
//! ([`farfield_core::tier_word`]). Writes go to the first tier with room; if one is full they go to
//! the next at once. From then on pages that were not written for long are copied to the next tier
//! before the first one is full again ([`farfield_core::policy::tier_admission`], `maintenance`). A
//! thread does that, or lanes do while their owner writes.

mod lane;
mod maintenance;
mod table;
#[cfg(test)]
mod tests;

use crate::redundant::members::{PoolMember, backends};
use crate::redundant::repair::{RepairLock, RepairThread};
use crate::unclaimed_snapshots::{UnclaimedSnapshots, key};
use crate::{Backend, CloneTicket, Health, Lane, PagePlaces, PoolError, Protection, ScrubStats};
use core::fmt::Write;
use core::time::Duration;
use farfield_os::sync::Mutex;
use lane::TierLane;
use std::sync::Arc;
use table::{TierMap, TierTable};

/// Places of the pages of unclaimed snapshots; snapshots of the tiers do not contain them. There is
/// room for as many as there can be tiered pools in one pool: each has at least two tiers.
static SNAPSHOTS: Mutex<UnclaimedSnapshots<TierMap, { CloneTicket::SERVERS_MAX / 2 }>> =
    Mutex::new(UnclaimedSnapshots::new());

/// Backend that spreads pages over tiers by their age.
pub(crate) struct TierBackend {
    table: Arc<TierTable>,
    /// Lock that is held while the thread moves pages, and while a snapshot is made.
    repair_lock: Arc<RepairLock>,
    repair_thread: Option<RepairThread>,
}

impl TierBackend {
    /// Creates a pool of the tiers `members`, the first tier first; all of them hold zeros. With
    /// `repairs` a thread moves pages; without, lanes do.
    pub(crate) fn new(members: Vec<PoolMember>, pages: u64, repairs: bool) -> Result<TierBackend, PoolError> {
        Ok(TierBackend::start(TierTable::new(members, pages)?, repairs))
    }

    /// Claims the snapshot whose tiers were claimed with these secrets.
    pub(crate) fn claim(members: Vec<PoolMember>, secrets: &[u128], repairs: bool) -> Result<TierBackend, PoolError> {
        let found = SNAPSHOTS.lock().take(key(secrets));
        let (server, reason) = (members[0].server, "the ticket is unknown, used or expired");
        let places = found.ok_or(PoolError::Refused { server, reason })?;
        Ok(TierBackend::start(TierTable::inherited(members, places), repairs))
    }

    fn start(table: TierTable, repairs: bool) -> TierBackend {
        let (table, repair_lock) = (Arc::new(table), Arc::new(RepairLock::default()));
        let repair_thread = repairs.then(|| RepairThread::start(table.clone(), repair_lock.clone()));
        TierBackend { table, repair_lock, repair_thread }
    }
}

impl Backend for TierBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(TierLane::open(&self.table, self.repair_thread.is_none())?))
    }

    fn places(&self) -> Option<Arc<dyn PagePlaces>> {
        Some(self.table.clone())
    }

    fn member(&self, index: usize) -> Option<Arc<dyn Backend>> {
        self.table.members.get(index)?.backend.clone()
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.repair_lock.hold_still();
        let places = self.table.copy_map()?;
        let (mut secrets, mut leaf) = ([0; CloneTicket::SERVERS_MAX], 0);
        for (tier, member) in self.table.members.iter().enumerate() {
            match member.backend.as_ref().map(|backend| backend.clone_region()) {
                Some(Ok(ticket)) => secrets[leaf..][..member.leaves].copy_from_slice(&ticket.secrets[..member.leaves]),
                // A tier that is lost here is lost in the snapshot, too.
                Some(Err(PoolError::ServerGone { .. })) => self.table.mark_failed(tier),
                Some(Err(error)) => return Err(error),
                None => {}
            }
            leaf += member.leaves;
        }
        if self.table.living().is_empty() {
            return Err(self.table.gone(0));
        }
        let old = SNAPSHOTS.lock().put(key(&secrets[..leaf]), places);
        drop(old);
        Ok(CloneTicket { secrets })
    }

    fn pages(&self) -> u64 {
        self.table.pages
    }

    fn health(&self) -> Health {
        self.table.health()
    }

    fn how(&self) -> String {
        let (held, moved) = self.table.counts();
        let mut text = String::new();
        for (tier, (pages, member)) in held.iter().zip(&self.table.members).enumerate() {
            let how = member.backend.as_ref().map_or("gone".to_owned(), |backend| backend.how());
            let how = if how.is_empty() { how } else { format!(" ({how})") };
            let _ = write!(text, "{}{pages} pages in tier {}{how}", if tier > 0 { ", " } else { "" }, tier + 1);
        }
        text + &format!("; {moved} have moved on")
    }

    fn scrub_stats(&self) -> Option<ScrubStats> {
        ScrubStats::with_parts(None, backends(&self.table.members))
    }

    fn protection(&self) -> Option<Protection> {
        Protection::with_parts(None, backends(&self.table.members))
    }

    fn answers(&self, within: Duration) -> bool {
        backends(&self.table.members).all(|backend| backend.answers(within))
    }

    fn is_rejoin_due(&self) -> bool {
        backends(&self.table.members).any(|backend| backend.is_rejoin_due())
    }

    fn rejoin(&self) {
        backends(&self.table.members).for_each(|backend| backend.rejoin());
    }

    fn release(&self) {
        backends(&self.table.members).for_each(|backend| backend.release());
    }

    fn abandon(&self) {
        self.repair_thread.iter().for_each(RepairThread::abandon);
        self.table.abandon();
    }
}
