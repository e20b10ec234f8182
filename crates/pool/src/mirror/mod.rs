//! Pool of several legs that hold the same pages (RAID 1): it lives as long as one of its legs
//! does.
//!
//! Writes go to all legs, reads to one. For each chunk of 64 pages a word notes which legs hold the
//! right bytes ([`farfield_core::chunk_word`]). A leg that missed a write, or gave wrong bytes, is
//! not read there until the chunk was copied to it (`heal`). Pages that nobody reads are compared
//! in turn (`scrub`). A leg that is gone is never used again; a spare takes its place and is filled
//! by the same copies, while reads and writes go on. A slow leg is asked for nothing until it has
//! answered.

mod answers;
mod calls;
mod everywhere;
mod heal;
mod lane;
mod legs;
mod pieces;
mod scrub;
#[cfg(test)]
mod tests;

use crate::healer::{Caring, Healer, take_back, whole_legs};
use crate::legs::Leg;
use crate::rejoin::Spares;
use crate::scrub::{Scrub, Shelves};
use crate::{Backend, Calls, CloneTicket, Health, Lane, PoolError, Protection, Scrubbed, Writes};
use calls::MirrorCalls;
use core::time::Duration;
use everywhere::MirrorWrites;
use farfield_core::PageId;
pub(crate) use lane::MirrorLane;
pub(crate) use legs::{CHUNK_PAGES, Holds, LegTable, chunks};
use std::sync::Arc;

/// Backend that keeps the same pages at each of several legs.
pub(crate) struct MirrorBackend {
    table: Arc<LegTable>,
    /// Lock that is held while a thread copies, and while a snapshot is made.
    copying: Arc<Caring>,
    healer: Option<Healer>,
}

impl MirrorBackend {
    /// Creates a mirror of `legs`, where `holds` says what each of them holds. A leg that is lost
    /// already has no backend. The `spares` hold zeros, or what the legs hold if they are a
    /// snapshot. The region addresses `pages` pages; 0 means as many as the legs have. If there is
    /// a period `scrub`, everything is compared once in that time. With `heals` a thread looks
    /// after the legs and copies; without, lanes do.
    pub(crate) fn new(
        legs: Vec<Leg>,
        spares: impl Into<Spares>,
        pages: u64,
        holds: Holds,
        scrub: Option<Duration>,
        heals: bool,
    ) -> Result<MirrorBackend, PoolError> {
        let mut table = LegTable::new(legs, spares.into(), pages, holds)?;
        table.scrub = Scrub::new(scrub);
        let (table, copying) = (Arc::new(table), Arc::new(Caring::default()));
        let healer = heals.then(|| Healer::start(table.clone(), copying.clone()));
        Ok(MirrorBackend { table, copying, healer })
    }

    /// Sets how long a write waits for all legs before it counts with fewer. With `None` it waits
    /// as long as none of them is known to be gone.
    pub(crate) fn set_write_patience(&self, patience: Option<Duration>) {
        self.table.set_write_patience(patience);
    }
}

impl Backend for MirrorBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(MirrorLane::open(&self.table, if self.healer.is_some() { 0 } else { 1 })?))
    }

    fn open_reads(&self) -> Result<Box<dyn Calls>, PoolError> {
        Ok(Box::new(MirrorCalls::open(&self.table)?))
    }

    fn begin_writes(&self, runs: &[(PageId, u64)]) -> Result<Box<dyn Writes>, PoolError> {
        Ok(Box::new(MirrorWrites::begin(&self.table, runs)?))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.copying.hold_still();
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        let mut result = Err(self.table.gone());
        // A snapshot of a leg that lacks a page would not know that it lacks it.
        let able = whole_legs(&self.table)?;
        for index in able.iter() {
            let own = self.table.leaves(index);
            match self.table.backend(index).map(|backend| backend.clone_region()) {
                Some(Ok(ticket)) => {
                    secrets[own.clone()].copy_from_slice(&ticket.secrets[..own.len()]);
                    result = Ok(());
                }
                Some(Err(error)) => {
                    if matches!(error, PoolError::ServerGone { .. }) {
                        self.table.lose(index);
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
        self.table.look_at_health();
        self.table.health()
    }

    fn scrubbed(&self) -> Option<Scrubbed> {
        Scrubbed::with_parts(self.table.scrub.counts(), self.table.backends())
    }

    fn protection(&self) -> Option<Protection> {
        Protection::with_parts(Some(self.table.protection(self.table.stored())), self.table.backends())
    }

    fn is_rejoin_due(&self) -> bool {
        self.healer.is_none() && self.table.is_rejoin_due()
    }

    fn rejoin(&self) {
        take_back(&*self.table, &self.copying);
    }

    fn release(&self) {
        self.table.backends().for_each(|backend| backend.release());
    }

    fn abandon(&self) {
        self.healer.iter().for_each(Healer::abandon);
        self.table.abandon();
    }
}
