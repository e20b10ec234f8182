//! Backend of several members, whatever its scheme.

use super::lane::RedundantLane;
use super::repair::{RepairLock, RepairSource, RepairThread, readmit_members};
use super::scheme::{RedundantMap, Scheme};
use super::scrub::ScrubTarget;
use crate::{Backend, CallChannel, CloneTicket, Health, Lane, PoolError, Protection, ScrubStats, WriteReservation};
use core::time::Duration;
use farfield_core::PageId;
use std::sync::Arc;

/// Backend that outlives some of its members.
pub(crate) struct RedundantBackend<S: Scheme> {
    pub(super) table: Arc<S::Map>,
    /// Lock that is held while a thread repairs, and while a snapshot is made.
    repair_lock: Arc<RepairLock>,
    repair_thread: Option<RepairThread>,
}

impl<S: Scheme> RedundantBackend<S> {
    /// Starts the backend over this state. With `repairs` a thread looks after the members and
    /// repairs; without, lanes do.
    pub(super) fn start(table: S::Map, repairs: bool) -> RedundantBackend<S> {
        let (table, repair_lock) = (Arc::new(table), Arc::new(RepairLock::default()));
        let repair_thread = repairs.then(|| RepairThread::start(table.clone(), repair_lock.clone()));
        RedundantBackend { table, repair_lock, repair_thread }
    }

    /// Sets how long a write waits for all members before it counts with fewer. With `None` it
    /// waits as long as none of them is known to be gone.
    pub(crate) fn set_write_timeout(&self, timeout: Option<Duration>) {
        self.table.set_write_timeout(timeout);
    }
}

impl<S: Scheme> Backend for RedundantBackend<S> {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(RedundantLane::<S>::open(&self.table, if self.repair_thread.is_some() { 0 } else { 1 })?))
    }

    fn open_reads(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        self.table.open_function_reads()
    }

    fn begin_writes(&self, runs: &[(PageId, u64)]) -> Result<Box<dyn WriteReservation>, PoolError> {
        self.table.begin_function_writes(runs)
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.repair_lock.hold_still();
        self.table.snapshot()
    }

    fn pages(&self) -> u64 {
        self.table.region_pages()
    }

    fn health(&self) -> Health {
        self.table.check_health();
        self.table.health()
    }

    fn scrub_stats(&self) -> Option<ScrubStats> {
        ScrubStats::with_parts(self.table.scrub().counts(), self.table.backends())
    }

    fn protection(&self) -> Option<Protection> {
        Protection::with_parts(Some(self.table.protection(self.table.stored_pages())), self.table.backends())
    }

    fn how(&self) -> String {
        self.table.describe()
    }

    fn is_rejoin_due(&self) -> bool {
        self.repair_thread.is_none() && RepairSource::is_rejoin_due(&*self.table)
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
