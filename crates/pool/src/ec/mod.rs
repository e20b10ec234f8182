//! Pool of K + M legs that holds what K of them could, and outlives M of them.
//!
//! Pages that leave together make a *row*: up to K pages and M pages of parity, one at each leg, all under the row's number there. A row is written once, where no
//! live row is, and never changed ([`farfield_core::row_word`]); an index in our own memory says where the newest version of each page is (`index`), and changes when the row
//! is at enough legs. So whatever dies in the middle of a write, every page is its old or its new version
//! ([decision 7](../../../../docs/decisions/0007-rows-of-an-erasure-code-are-written-once.md)).
//!
//! A read asks the leg that has the page. If that one is gone, slow, or gives something else than what was written, the page is made from K others of its row (`reads`).
//! What a leg lacks is made the same way, and written there (`care`); a spare lacks everything at first. What nobody reads is compared with its digest in turn (`scrub`).

mod care;
mod index;
mod lane;
mod pieces;
mod reads;
mod scrub;
mod table;
#[cfg(test)]
mod tests;
mod writes;

use crate::healer::{Caring, Healer, take_back, whole_legs};
use crate::legs::Leg;
use crate::rejoin::Spares;
use crate::scrub::Scrub;
use crate::unclaimed::{Unclaimed, key};
use crate::{Backend, CloneTicket, Health, Lane, PoolError, Protection, Scrubbed};
use core::time::Duration;
use farfield_core::Legs;
use farfield_core::gf256::Code;
use farfield_os::sync::Mutex;
use index::Index;
use lane::EcLane;
use std::sync::Arc;
use table::RowTable;

/// As many as the erasure codes in one pool, which has two legs at least for each.
static SNAPSHOTS: Mutex<Unclaimed<Snapshot, { CloneTicket::SERVERS_MAX / 2 }>> = Mutex::new(Unclaimed::new());

/// What a snapshot of the legs does not say.
struct Snapshot {
    index: Index,
    /// The leg at each seat.
    seats: [usize; Legs::MAX],
    /// As many as the index may know.
    legs: usize,
    /// Legs that came back, and the one of the URL whose server each is.
    moved: Vec<(usize, usize)>,
}

/// Several backends, each of which holds one page of every row.
pub(crate) struct EcBackend {
    table: Arc<RowTable>,
    /// Locked while somebody brings legs what they lack, and while a snapshot is made.
    caring: Arc<Caring>,
    healer: Option<Healer>,
}

impl EcBackend {
    /// Pages that each leg needs for a region of `pages`.
    pub(crate) fn pages_of_leg(pages: u64) -> u64 {
        Index::rows_for(pages)
    }

    /// `legs` for rows of this `code` and `spares`, all of which hold zeros, without a backend where one is lost already. Everything is looked at once in the period
    /// `scrub`, if there is one. With `heals` there is a thread that looks and mends; without, lanes do.
    pub(crate) fn new(
        code: Code,
        legs: Vec<Leg>,
        spares: impl Into<Spares>,
        pages: u64,
        scrub: Option<Duration>,
        heals: bool,
    ) -> Result<EcBackend, PoolError> {
        Ok(EcBackend::start(RowTable::new(code, legs, spares.into(), pages)?, scrub, heals))
    }

    /// The snapshot whose legs, and spares that were in use, were claimed with these secrets.
    pub(crate) fn claim(
        code: Code,
        mut legs: Vec<Leg>,
        mut spares: Spares,
        secrets: &[u128],
        scrub: Option<Duration>,
        heals: bool,
    ) -> Result<EcBackend, PoolError> {
        let found = SNAPSHOTS.lock().take(key(secrets));
        let (server, reason) = (legs[0].server, "the ticket is unknown, used or expired");
        let Snapshot { index, seats, legs: known, moved } = found.ok_or(PoolError::Refused { server, reason })?;
        // The index knows legs by their places, also those that were lost.
        let (wanted, behind) = (legs.len(), &mut spares.legs);
        let nobody = || Leg { backend: None, leaves: 0, server: 0 };
        behind.resize_with(behind.len().max(known - wanted), nobody);
        for &(place, origin) in &moved {
            let from = if origin < wanted { &mut legs[origin] } else { &mut behind[origin - wanted] };
            behind[place - wanted] = Leg { backend: from.backend.take(), leaves: 0, server: from.server };
        }
        Ok(EcBackend::start(RowTable::inherited(code, legs, spares, index, seats, &moved)?, scrub, heals))
    }

    fn start(mut table: RowTable, scrub: Option<Duration>, heals: bool) -> EcBackend {
        table.scrub = Scrub::new(scrub);
        let (table, caring) = (Arc::new(table), Arc::new(Caring::default()));
        let healer = heals.then(|| Healer::start(table.clone(), caring.clone()));
        EcBackend { table, caring, healer }
    }

    /// How long a write waits for all legs before it counts with fewer; `None`: as long as none of them is known to be gone.
    pub(crate) fn set_write_patience(&self, patience: Option<Duration>) {
        self.table.set_write_patience(patience);
    }
}

impl Backend for EcBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(EcLane::open(&self.table, if self.healer.is_some() { 0 } else { 1 })?))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.caring.hold_still();
        let table = &self.table;
        let whole = whole_legs(table)?;
        let index = table.index.copy().map_err(PoolError::Os)?;
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        let (mut cloned, mut failed) = (0, None);
        // What another leg lacks the index knows, unless a late write is still on its way.
        let others = table.which(|leg, _| table.active().has(leg) && !table.is_late(leg) && !whole.has(leg));
        let able = whole.or(table.answering(others));
        for number in able.iter() {
            let own = table.leaves(number);
            match table.backend(number).map(|backend| backend.clone_region()) {
                Some(Ok(ticket)) => {
                    secrets[own.clone()].copy_from_slice(&ticket.secrets[..own.len()]);
                    cloned += 1;
                }
                Some(Err(error)) => {
                    if matches!(error, PoolError::ServerGone { .. }) {
                        table.lose(number);
                    }
                    failed = Some(error);
                }
                None => {}
            }
        }
        if cloned < table.code.data() {
            return Err(failed.unwrap_or(table.gone()));
        }
        let seats = core::array::from_fn(|seat| table.at_seat(seat));
        let leaf = table.legs.iter().map(|leg| leg.leaves).sum();
        let snapshot = Snapshot { index, seats, legs: table.known(), moved: table.moved() };
        let old = SNAPSHOTS.lock().put(key(&secrets[..leaf]), snapshot);
        drop(old);
        Ok(CloneTicket { secrets })
    }

    fn pages(&self) -> u64 {
        self.table.index.pages
    }

    fn health(&self) -> Health {
        self.table.look_at_health();
        self.table.health()
    }

    fn scrubbed(&self) -> Option<Scrubbed> {
        Scrubbed::with_parts(self.table.scrub.counts(), self.table.backends())
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
        self.healer.is_none() && self.table.is_rejoin_due()
    }

    fn rejoin(&self) {
        take_back(&*self.table, &self.caring);
    }

    fn release(&self) {
        self.table.backends().for_each(|backend| backend.release());
    }

    fn abandon(&self) {
        self.healer.iter().for_each(Healer::abandon);
        self.table.abandon();
    }
}
