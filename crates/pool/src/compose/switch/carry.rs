//! Execution of a switch, by the thread that asks for it.

use super::lane::{LaneCell, LaneCellState, SwitchableLane};
use super::{SwitchBackend, SwitchError, SwitchHost};
use crate::redundant::mirror::{MirrorLane, ReplicaMap};
use crate::{Backend, Health, PoolError};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::Incarnation;
use farfield_os::process::now_ns;
use farfield_os::sync::{Wait, nap};
use std::sync::Arc;

/// Number of chunks that are copied at a time while the pool is not used; while it is used, one is.
const COPIES: usize = 4;
/// While the pool is used, copies take one part in `DUTY` of the time.
const DUTY: u32 = 4;
/// Sleep when there is nothing to do, or nothing can be done now.
const REST: Duration = Duration::from_micros(500);
/// Time between two checks whether a member has ended operations that are not waited for any more.
const QUIET_LOOK: Duration = Duration::from_micros(50);
const GONE: PoolError = PoolError::ServerGone { server: 0, incarnation: Incarnation(0) };

impl SwitchBackend {
    /// Moves everything to `to`, which holds zeros, and makes it the only side; or ends with
    /// everything on the old one. Blocks until then, however long that takes: call it from a thread
    /// that has nothing else to do.
    ///
    /// Data is lost only when the old side dies: the pages that had not moved yet.
    pub fn switch(&self, to: Arc<dyn Backend>, host: &dyn SwitchHost) -> Result<(), SwitchError> {
        if to.pages() < self.pages {
            return Err(SwitchError::TooSmall { pages: to.pages(), wanted: self.pages });
        }
        let work = self.work.lock();
        let table = self.begin_dual_write(&to)?;
        if self.enter_dual_write(&table, &to, host) {
            table.admit();
        }
        drop(work);
        let result = self.copy_and_commit(&table, host);
        let work = self.work.lock();
        match result {
            Ok(()) => self.leave_dual_write(&table, ReplicaMap::NEW),
            // If the old side is lost, the pool has what is on the new one, and its words say what
            // that is.
            Err(SwitchError::Old(_)) => {}
            Err(_) => {
                table.mark_failed(ReplicaMap::NEW);
                table.set_authoritative(Some(ReplicaMap::OLD));
                self.leave_dual_write(&table, ReplicaMap::OLD);
            }
        }
        self.is_active.store(false, Ordering::SeqCst);
        drop(work);
        result
    }

    /// Begins the dual write: from here on lanes are opened at both sides.
    fn begin_dual_write(&self, to: &Arc<dyn Backend>) -> Result<Arc<ReplicaMap>, SwitchError> {
        let mut stage = self.stage();
        if stage.dual_write.is_some() {
            return Err(if self.is_active.load(Ordering::SeqCst) { SwitchError::Busy } else { SwitchError::Old(GONE) });
        }
        let table = ReplicaMap::dual_write(stage.source.clone(), to.clone(), self.dirty_chunks.clone());
        let table = Arc::new(table.map_err(SwitchError::New)?);
        self.is_active.store(true, Ordering::SeqCst);
        (stage.dual_write, stage.target) = (Some(table.clone()), Some(to.clone()));
        Ok(table)
    }

    fn lane_cells(&self) -> Vec<Arc<LaneCell>> {
        self.stage().lane_cells.iter().filter_map(|cell| cell.upgrade()).collect()
    }

    /// Moves all lanes to the dual write; returns `false` if the new side has failed already.
    fn enter_dual_write(&self, table: &Arc<ReplicaMap>, to: &Arc<dyn Backend>, host: &dyn SwitchHost) -> bool {
        for cell in self.lane_cells() {
            let lane = match opened(host, || to.open_lane()) {
                Ok(lane) => lane,
                Err(error) => {
                    table.give_up(ReplicaMap::NEW, error);
                    return false;
                }
            };
            let mut pair = Box::new(MirrorLane::over_target(table, lane));
            cell.when_empty(move |slot| {
                match core::mem::replace(&mut slot.inner, SwitchableLane::Detached) {
                    SwitchableLane::Single(old) => {
                        pair.add_member(ReplicaMap::OLD, old);
                        slot.inner = SwitchableLane::DualWrite(pair);
                    }
                    // The lane was opened at both, or is a lane to a lost side.
                    other => slot.inner = other,
                }
            });
        }
        true
    }

    fn copy_and_commit(&self, table: &Arc<ReplicaMap>, host: &dyn SwitchHost) -> Result<(), SwitchError> {
        let mut lane = opened(host, || MirrorLane::open(table, COPIES)).map_err(SwitchError::New)?;
        let mut operations = 0;
        loop {
            let started = now_ns();
            let work = self.work.lock();
            self.check_health();
            if table.failed().has(ReplicaMap::NEW) {
                return Err(SwitchError::New(table.cause().unwrap_or(GONE)));
            }
            if table.is_whole(ReplicaMap::NEW) {
                if self.commit(table, host) {
                    return Ok(());
                }
            } else if table.failed().has(ReplicaMap::OLD) {
                return Err(SwitchError::Old(GONE));
            }
            if !host.is_wanted() && table.is_whole(ReplicaMap::OLD) {
                return Err(SwitchError::Cancelled);
            }
            let now: u64 = self.lane_cells().iter().map(|cell| cell.operations()).sum();
            let is_used = core::mem::replace(&mut operations, now) != now;
            let copied = lane.copy_chunks(if is_used { 1 } else { COPIES });
            drop(work);
            let took = Duration::from_nanos(now_ns() - started);
            match (copied, is_used) {
                (true, true) => nap(took * (DUTY - 1)),
                (true, false) => {}
                (false, _) => nap(REST),
            }
        }
    }

    /// Looks at both sides, because a lost side that is not asked for anything is noticed only so.
    fn check_health(&self) {
        self.health();
        if self.loaded().health() == Health::Gone {
            // Pages that have moved already can be had through lanes.
            self.is_loaded.store(false, Ordering::SeqCst);
        }
    }

    /// Makes the new side, which holds everything, authoritative. That takes effect if it still
    /// holds everything when all lanes have been empty once. Returns whether it does.
    fn commit(&self, table: &Arc<ReplicaMap>, host: &dyn SwitchHost) -> bool {
        let mut is_committed = false;
        host.run_exclusive(&mut || {
            table.set_authoritative(Some(ReplicaMap::NEW));
            // Afterwards no write that has succeeded, or will, has done so on the old side alone.
            self.lane_cells().iter().for_each(|cell| cell.when_empty(|_| ()));
            is_committed = table.is_whole(ReplicaMap::NEW);
            if !is_committed {
                table.set_authoritative(table.is_whole(ReplicaMap::OLD).then_some(ReplicaMap::OLD));
                return false;
            }
            table.mark_failed(ReplicaMap::OLD);
            let mut stage = self.stage();
            if let Some(next) = stage.target.clone() {
                self.is_loaded.store(next.mapped().is_some(), Ordering::SeqCst);
                *self.loaded.write() = next.clone();
                // The dual write lives as long as it has lanes.
                stage.source = next;
            }
            true
        });
        is_committed
    }

    /// Moves all lanes from the dual write to the side that stays, and gives the other one back.
    fn leave_dual_write(&self, table: &Arc<ReplicaMap>, member: usize) {
        let mut stage = self.stage();
        let gone = if member == ReplicaMap::NEW { table.source() } else { stage.target.clone() };
        (stage.dual_write, stage.target) = (None, None);
        drop(stage);
        let mut wait = Wait::new("a side of the pool to end what nobody waits for any more");
        for cell in self.lane_cells() {
            while !cell.when_empty(|slot| leave(slot, member)) {
                wait.nap(QUIET_LOOK);
            }
        }
        if member == ReplicaMap::NEW {
            self.switches.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(gone) = gone {
            gone.release();
        }
    }
}

/// Returns the result of `open`, called in the way that the host wants it.
fn opened<T>(host: &dyn SwitchHost, mut open: impl FnMut() -> Result<T, PoolError>) -> Result<T, PoolError> {
    let mut result = Err(GONE);
    host.open(&mut || result = open());
    result
}

/// Moves a lane to the side that stays; returns `false` if the member still works for operations
/// that have ended.
fn leave(slot: &mut LaneCellState, member: usize) -> bool {
    let SwitchableLane::DualWrite(pair) = &mut slot.inner else { return true };
    if !pair.has_member(member) {
        // The member had failed before the lane was opened.
        return true;
    }
    let Some(lane) = pair.take_member(member) else { return false };
    slot.inner = SwitchableLane::Single(lane);
    true
}
