//! Pool of several legs that hold the same: it lives as long as one of them does.
//!
//! Writes go to all legs, reads to one. Which legs hold the right bytes is noted for each chunk of 64 pages
//! ([`farfield_core::chunk_word`]), so a leg that missed a write, or gave wrong bytes, is not read there until the chunk was copied to it
//! (`heal`); what nobody reads is compared in turn (`scrub`). A leg that is gone is never used again; a spare takes its place and is filled by the same copies, while reads and
//! writes go on. A leg that is slow is asked for nothing until it has answered.

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

/// Several backends that hold the same.
pub(crate) struct MirrorBackend {
    table: Arc<LegTable>,
    /// Locked while somebody copies, and while a snapshot is made.
    copying: Arc<Caring>,
    healer: Option<Healer>,
}

impl MirrorBackend {
    /// `legs`, of which is known what each `holds`, without a backend where it is lost already; `spares` that hold zeros, or the same if it is a snapshot.
    /// `pages` is what the region shall address, 0 for as much as the legs have. Everything is looked at once in the period `scrub`, if there is one. With `heals` there
    /// is a thread that looks and copies; without, lanes do.
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

    /// How long a write waits for all legs before it counts with fewer; `None`: as long as none of them is known to be gone.
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
        // The snapshot of a leg that lacks something would not know what.
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
