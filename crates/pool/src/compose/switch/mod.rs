//! Pool that can be exchanged for another one while it is in use (live migration).
//!
//! Between two switches the pool is its only *side*: operations go there as they are, and the only
//! note taken is which chunks were ever written. During a switch it is a dual write to two members,
//! the old side and the new one, with the words and the copies of a mirror (`mirror`). The old side
//! is authoritative: it gets every write, and a write has succeeded if it has succeeded there. So
//! until the very end the old side holds everything; whatever happens to the new side, nothing is
//! lost but the switch. When the new side holds everything, too, it becomes authoritative. The
//! lanes are seen without operations once, and the old side is given back.
//!
//! The thread that carries out a switch moves the lanes, from lanes of one side to lanes of the
//! dual write and back. A lane that is to be moved takes nothing new until its operations have
//! ended and it has been moved. So its owner never opens anything, allocates, or waits for a lock.

mod carry;
mod lane;
#[cfg(test)]
mod tests;

use crate::contract::calls;
use crate::dirty_chunks::DirtyChunks;
use crate::redundant::mirror::{CHUNK_PAGES, MirrorLane, ReplicaMap, chunks};
use crate::{
    Backend, CallChannel, CloneTicket, Deal, Health, Lane, Mapped, PagePlaces, PoolError, Protection, ScrubStats,
    WriteReservation,
};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use farfield_core::{Incarnation, PageId};
use farfield_os::sync::{Mutex, MutexGuard, RwLock};
use lane::{LaneCell, SwitchLane, SwitchableLane};
use std::sync::{Arc, Weak};

/// Reason for which a switch did not take place. The pool is as it was, on its old side, unless
/// that side is what was lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwitchError {
    /// A switch is under way already.
    #[error("the pool is being switched already: wait until that switch ends, or cancel it")]
    Busy,
    /// The switch was cancelled.
    #[error("the switch was cancelled")]
    Cancelled,
    /// The new pool has too few pages.
    #[error("the new pool is too small: it has {pages} pages, and the job needs {wanted}")]
    TooSmall {
        /// Number of pages that the new pool has.
        pages: u64,
        /// Number of pages that it must have.
        wanted: u64,
    },
    /// The new pool failed.
    #[error("the new pool failed, and the old one stays: {0}")]
    New(PoolError),
    /// The old pool was lost before everything had moved. The rest is lost as it would have been
    /// without a switch.
    #[error("the old pool was lost during the switch: {0}")]
    Old(PoolError),
}

/// Process in which a switch takes place.
pub trait SwitchHost {
    /// Checks whether the switch is still wanted. It ends soon after this has become false.
    fn is_wanted(&self) -> bool;

    /// Calls `act`, once, while nobody uses addresses from [`Mapped::page`]. `act` returns whether
    /// the switch has taken place with that.
    fn run_exclusive(&self, act: &mut dyn FnMut() -> bool);

    /// Calls `open`, which opens lanes.
    fn open(&self, open: &mut dyn FnMut()) {
        open();
    }
}

/// Progress of a switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwitchProgress {
    /// Set while a switch goes on.
    pub is_active: bool,
    /// Number of switches that have taken place.
    pub switches: u64,
    /// Number of pages (in chunks of 64) that were ever written; 0 between two switches.
    pub pages: u64,
    /// Number of the `pages` that the new side holds already.
    pub moved_pages: u64,
}

/// Pool that can be exchanged for another one while it is in use.
pub struct SwitchBackend {
    pages: u64,
    dirty_chunks: Arc<DirtyChunks>,
    stage: Mutex<SwitchStage>,
    /// Lock that the thread which carries out a switch holds step by step. It is also held while a
    /// snapshot is made.
    work: Mutex<()>,
    /// Side that is loaded from, if it is memory that can be.
    loaded: RwLock<Arc<dyn Backend>>,
    is_loaded: AtomicBool,
    is_active: AtomicBool,
    switches: AtomicU64,
}

/// Knowledge about a parent's pool that the child of a fork needs ([`SwitchBackend::snapshot_contents`]).
pub struct SnapshotContents(pub(crate) Arc<DirtyChunks>);

/// State that says where lanes are opened now.
struct SwitchStage {
    source: Arc<dyn Backend>,
    dual_write: Option<Arc<ReplicaMap>>,
    /// New side of the dual write.
    target: Option<Arc<dyn Backend>>,
    lane_cells: Vec<Weak<LaneCell>>,
}

impl SwitchBackend {
    /// Creates a pool whose side is `source` at first. Nothing was written there yet.
    pub fn new(side: Arc<dyn Backend>) -> Result<SwitchBackend, PoolError> {
        let chunks = side.pages().div_ceil(CHUNK_PAGES);
        Ok(SwitchBackend::over(side, Arc::new(DirtyChunks::new(chunks).map_err(PoolError::Os)?)))
    }

    /// Creates the pool of the child of a fork, where `source` is a snapshot of the parent's pool.
    pub fn inherit(side: Arc<dyn Backend>, contents: SnapshotContents) -> SwitchBackend {
        SwitchBackend::over(side, contents.0)
    }

    /// Returns what the child of a fork must know of its parent's pool.
    pub fn snapshot_contents(&self) -> SnapshotContents {
        SnapshotContents(self.dirty_chunks.clone())
    }

    fn over(side: Arc<dyn Backend>, dirty_chunks: Arc<DirtyChunks>) -> SwitchBackend {
        SwitchBackend {
            pages: side.pages(),
            dirty_chunks,
            work: Mutex::new(()),
            is_loaded: AtomicBool::new(side.mapped().is_some()),
            loaded: RwLock::new(side.clone()),
            stage: Mutex::new(SwitchStage { source: side, dual_write: None, target: None, lane_cells: Vec::new() }),
            is_active: AtomicBool::new(false),
            switches: AtomicU64::new(0),
        }
    }

    /// Keeps switches from going on, and from beginning, until the guard is dropped. Not even in
    /// the background does anything happen to the lanes then.
    pub fn hold_still(&self) -> impl Drop {
        self.work.lock()
    }

    /// Notes that these pages are about to be written at the pool itself. The caller
    /// [holds still](SwitchBackend::hold_still). A later switch moves these pages, too.
    pub fn mark_dirty(&self, first: PageId, count: u64) {
        assert!(first.0.checked_add(count).is_some_and(|end| end <= self.pages), "pages of the region");
        for chunk in chunks(first.0, count) {
            self.dirty_chunks.mark(chunk);
        }
    }

    /// Locks the lanes and the health of the pool, in addition, for the moment of a fork. Until the
    /// guard is dropped, any use of them waits, also the caller's.
    pub fn hold_lanes(&self) -> impl Drop {
        self.stage()
    }

    /// Makes a snapshot of the authoritative side, and returns whether that is the new side of a
    /// switch. The caller [holds still](SwitchBackend::hold_still) and has no operation in flight.
    pub fn clone_authoritative(&self) -> Result<(CloneTicket, bool), PoolError> {
        let stage = self.stage();
        match (&stage.dual_write, &stage.target) {
            (Some(pair), Some(next)) if !pair.is_whole(ReplicaMap::OLD) && pair.is_whole(ReplicaMap::NEW) => {
                Ok((next.clone_region()?, true))
            }
            _ => Ok((stage.source.clone_region()?, false)),
        }
    }

    /// Returns how far a switch is.
    pub fn progress(&self) -> SwitchProgress {
        let pair = self.stage().dual_write.clone();
        let (held, all) = pair.as_ref().map_or((0, 0), |pair| pair.held(ReplicaMap::NEW));
        SwitchProgress {
            is_active: self.is_active.load(Ordering::SeqCst),
            switches: self.switches.load(Ordering::Relaxed),
            pages: all * CHUNK_PAGES,
            moved_pages: held * CHUNK_PAGES,
        }
    }

    /// Returns the side that functions run at; refuses in the middle of a switch.
    fn sole_backend(&self) -> Result<Arc<dyn Backend>, PoolError> {
        let stage = self.stage();
        let side = stage.dual_write.is_none().then(|| stage.source.clone());
        side.ok_or(PoolError::Refused { server: 0, reason: calls::NOT_NOW })
    }

    fn stage(&self) -> MutexGuard<'_, SwitchStage> {
        self.stage.lock()
    }

    fn loaded(&self) -> Arc<dyn Backend> {
        self.loaded.read().clone()
    }
}

impl SwitchStage {
    fn open_switchable(&self) -> Result<SwitchableLane, PoolError> {
        match &self.dual_write {
            Some(pair) => Ok(SwitchableLane::DualWrite(Box::new(MirrorLane::open(pair, 0)?))),
            None => Ok(SwitchableLane::Single(self.source.open_lane()?)),
        }
    }
}

impl Backend for SwitchBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        let mut stage = self.stage();
        let cell = Arc::new(LaneCell::new(stage.open_switchable()?));
        stage.lane_cells.retain(|cell| cell.strong_count() > 0);
        stage.lane_cells.push(Arc::downgrade(&cell));
        Ok(Box::new(SwitchLane::new(cell, self.dirty_chunks.clone(), self.pages)))
    }

    /// Opens calls at the side that holds everything and will; in the middle of a switch there is
    /// none. Channels that are open when a switch begins stay with the old side: their user
    /// compares [`SwitchBackend::progress`] before and after a call.
    fn open_calls(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        self.sole_backend()?.open_calls()
    }

    /// Opens calls that only read, at the same side as [`SwitchBackend::open_calls`].
    fn open_reads(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        self.sole_backend()?.open_reads()
    }

    /// Begins writes by functions at the only side. The caller
    /// [holds still](SwitchBackend::hold_still) and has announced the pages with
    /// [`SwitchBackend::mark_dirty`].
    fn begin_writes(&self, runs: &[(PageId, u64)]) -> Result<Box<dyn WriteReservation>, PoolError> {
        self.sole_backend()?.begin_writes(runs)
    }

    /// Returns how the side that holds everything and will deals its pages out to members; `None`
    /// in the middle of a switch. The user compares [`SwitchBackend::progress`] from before the
    /// question with that after the answer.
    fn deal(&self) -> Option<Deal> {
        self.sole_backend().ok()?.deal()
    }

    /// Returns where the pages of that side lie, if it has tiers; `None` in the middle of a switch.
    fn places(&self) -> Option<Arc<dyn PagePlaces>> {
        self.sole_backend().ok()?.places()
    }

    /// Returns a member of the side that holds everything and will; `None` in the middle of a
    /// switch.
    fn member(&self, index: usize) -> Option<Arc<dyn Backend>> {
        self.sole_backend().ok()?.member(index)
    }

    /// Returns the incarnation of the only side, if it is one server; `None` in the middle of a switch.
    fn incarnation(&self) -> Option<Incarnation> {
        self.sole_backend().ok()?.incarnation()
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        self.is_loaded.load(Ordering::SeqCst).then_some(self)
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.hold_still();
        Ok(self.clone_authoritative()?.0)
    }

    fn pages(&self) -> u64 {
        self.pages
    }

    fn health(&self) -> Health {
        let stage = self.stage();
        let (Some(pair), Some(next)) = (&stage.dual_write, &stage.target) else { return stage.source.health() };
        for (member, backend) in [(ReplicaMap::OLD, &stage.source), (ReplicaMap::NEW, next)] {
            if backend.health() == Health::Gone {
                pair.mark_failed(member);
            }
        }
        pair.health()
    }

    fn scrub_stats(&self) -> Option<ScrubStats> {
        self.stage().source.scrub_stats()
    }

    fn protection(&self) -> Option<Protection> {
        self.stage().source.protection()
    }

    fn how(&self) -> String {
        self.stage().source.how()
    }

    /// Checks whether the side has a rejoin to do; never so during a switch.
    fn is_rejoin_due(&self) -> bool {
        let stage = self.stage();
        stage.dual_write.is_none() && stage.source.is_rejoin_due()
    }

    fn rejoin(&self) {
        let side = self.stage().source.clone();
        side.rejoin();
    }

    fn release(&self) {
        let stage = self.stage();
        stage.source.release();
        stage.target.iter().for_each(|next| next.release());
    }

    fn abandon(&self) {
        let stage = self.stage();
        stage.dual_write.iter().for_each(|pair| pair.abandon());
        stage.source.abandon();
        stage.target.iter().for_each(|next| next.abandon());
    }
}

impl Mapped for SwitchBackend {
    fn page(&self, page: PageId) -> Option<*const u8> {
        // The side changes only while nobody loads, so nobody waits here.
        let loaded = self.loaded.read();
        loaded.mapped()?.page(page)
    }
}
