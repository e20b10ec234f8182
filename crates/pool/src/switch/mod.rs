//! Pool that can be exchanged for another one while it is in use.
//!
//! Between two switches it is its only *side*: operations go there as they are, and all that is noted is which chunks were ever written.
//! During a switch it is a pair of legs, the old side and the new one, with the words and the copies of a mirror (`mirror`). The old
//! side leads: it gets every write, a write has succeeded if it has succeeded there, and so until the very end it holds everything; whatever
//! happens to the new side, nothing is lost but the switch. When the new side holds everything, too, it leads, the lanes are seen
//! without operations once, and the old side is given back.
//!
//! Whoever carries out a switch moves the lanes: from those of one side to those of the pair and back. A lane that is to be moved takes nothing new until
//! what is under way has ended, and it has been moved; so its owner never opens anything, allocates, or waits for a lock.

mod carry;
mod lane;
#[cfg(test)]
mod tests;

use crate::mirror::{CHUNK_PAGES, LegTable, MirrorLane, chunks};
use crate::touched::Touched;
use crate::{
    Backend, CallLane, Calls, CloneTicket, Deal, Health, Lane, Mapped, PoolError, Protection, Scrubbed, Writes,
};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use farfield_core::PageId;
use farfield_os::sync::{Mutex, MutexGuard, RwLock};
use lane::{Berth, Inner, SwitchLane};
use std::sync::{Arc, Weak};

/// Why a switch did not take place. The pool is as it was, on its old side, unless that is what was lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwitchError {
    /// There is one already.
    #[error("the pool is being switched already: wait for the end of that, or cancel it")]
    Busy,
    /// Somebody did not want it any more.
    #[error("the switch was cancelled")]
    Cancelled,
    /// The new pool cannot address as much.
    #[error("the new pool is too small: it has {pages} pages, and {wanted} are wanted")]
    TooSmall {
        /// What it has.
        pages: u64,
        /// What it should have.
        wanted: u64,
    },
    /// The new pool failed.
    #[error("the new pool failed, and the old one stays: {0}")]
    New(PoolError),
    /// The old pool was lost before everything had moved: what had not is lost as it would have been without a switch.
    #[error("the old pool was lost in the middle of the switch: {0}")]
    Old(PoolError),
}

/// The process in which a switch takes place.
pub trait SwitchHost {
    /// Is the switch still wanted? It ends soon after this has become false.
    fn is_wanted(&self) -> bool;

    /// Calls `act`, once, while nobody uses addresses from [`Mapped::page`]. It says whether the switch has taken place with that.
    fn alone(&self, act: &mut dyn FnMut() -> bool);

    /// Calls `open`, which opens lanes.
    fn open(&self, open: &mut dyn FnMut()) {
        open();
    }
}

/// How far a switch is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwitchProgress {
    /// One goes on.
    pub is_active: bool,
    /// Switches that have taken place.
    pub switches: u64,
    /// Pages (in chunks of 64) that were ever written, and those of them that the new side holds already. 0 between two switches.
    pub pages: u64,
    /// See `pages`.
    pub moved_pages: u64,
}

/// See the module.
pub struct SwitchBackend {
    pages: u64,
    touched: Arc<Touched>,
    stage: Mutex<Stage>,
    /// Held by whoever carries out a switch, step by step; and while a snapshot is made.
    work: Mutex<()>,
    /// What is loaded from, if it can be.
    loaded: RwLock<Arc<dyn Backend>>,
    is_loaded: AtomicBool,
    is_active: AtomicBool,
    switches: AtomicU64,
}

/// See [`SwitchBackend::heritage`].
pub struct Heritage(pub(crate) Arc<Touched>);

/// What lanes are opened at now.
struct Stage {
    side: Arc<dyn Backend>,
    pair: Option<Arc<LegTable>>,
    /// The new side of the pair.
    next: Option<Arc<dyn Backend>>,
    berths: Vec<Weak<Berth>>,
}

impl SwitchBackend {
    /// At first it is `side`, in which nothing was written yet.
    pub fn new(side: Arc<dyn Backend>) -> Result<SwitchBackend, PoolError> {
        let chunks = side.pages().div_ceil(CHUNK_PAGES);
        Ok(SwitchBackend::over(side, Arc::new(Touched::new(chunks).map_err(PoolError::Os)?)))
    }

    /// For the child of a fork: `side` is a snapshot of the parent's pool.
    pub fn inherit(side: Arc<dyn Backend>, heritage: Heritage) -> SwitchBackend {
        SwitchBackend::over(side, heritage.0)
    }

    /// What the child of a fork must know of its parent's pool.
    pub fn heritage(&self) -> Heritage {
        Heritage(self.touched.clone())
    }

    fn over(side: Arc<dyn Backend>, touched: Arc<Touched>) -> SwitchBackend {
        SwitchBackend {
            pages: side.pages(),
            touched,
            work: Mutex::new(()),
            is_loaded: AtomicBool::new(side.mapped().is_some()),
            loaded: RwLock::new(side.clone()),
            stage: Mutex::new(Stage { side, pair: None, next: None, berths: Vec::new() }),
            is_active: AtomicBool::new(false),
            switches: AtomicU64::new(0),
        }
    }

    /// No switch goes on, and none begins, as long as this is held: not even in the background does anything happen to the lanes.
    pub fn hold_still(&self) -> impl Drop {
        self.work.lock()
    }

    /// Somebody at the pool is about to write these pages, while the caller [holds still](SwitchBackend::hold_still). A switch after that takes them along.
    pub fn will_be_written(&self, first: PageId, count: u64) {
        assert!(first.0.checked_add(count).is_some_and(|end| end <= self.pages), "pages of the region");
        for chunk in chunks(first.0, count) {
            self.touched.mark(chunk);
        }
    }

    /// For the moment of a fork, besides: nobody even looks at its lanes and its health. Whoever does so must wait, the caller too.
    pub fn hold_lanes(&self) -> impl Drop {
        self.stage()
    }

    /// A snapshot of the side that leads, while the caller [holds still](SwitchBackend::hold_still) and has no operation in flight; and
    /// whether that is the new side of a switch.
    pub fn clone_side(&self) -> Result<(CloneTicket, bool), PoolError> {
        let stage = self.stage();
        match (&stage.pair, &stage.next) {
            (Some(pair), Some(next)) if !pair.is_whole(LegTable::OLD) && pair.is_whole(LegTable::NEW) => {
                Ok((next.clone_region()?, true))
            }
            _ => Ok((stage.side.clone_region()?, false)),
        }
    }

    /// How far a switch is.
    pub fn progress(&self) -> SwitchProgress {
        let pair = self.stage().pair.clone();
        let (held, all) = pair.as_ref().map_or((0, 0), |pair| pair.held(LegTable::NEW));
        SwitchProgress {
            is_active: self.is_active.load(Ordering::SeqCst),
            switches: self.switches.load(Ordering::Relaxed),
            pages: all * CHUNK_PAGES,
            moved_pages: held * CHUNK_PAGES,
        }
    }

    /// The side that functions run at.
    fn only_side(&self) -> Result<Arc<dyn Backend>, PoolError> {
        let stage = self.stage();
        let side = stage.pair.is_none().then(|| stage.side.clone());
        side.ok_or(PoolError::Refused { server: 0, reason: CallLane::NOT_NOW })
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock()
    }

    fn loaded(&self) -> Arc<dyn Backend> {
        self.loaded.read().clone()
    }
}

impl Stage {
    fn open_inner(&self) -> Result<Inner, PoolError> {
        match &self.pair {
            Some(pair) => Ok(Inner::Pair(Box::new(MirrorLane::open(pair, 0)?))),
            None => Ok(Inner::Side(self.side.open_lane()?)),
        }
    }
}

impl Backend for SwitchBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        let mut stage = self.stage();
        let berth = Arc::new(Berth::new(stage.open_inner()?));
        stage.berths.retain(|berth| berth.strong_count() > 0);
        stage.berths.push(Arc::downgrade(&berth));
        Ok(Box::new(SwitchLane::new(berth, self.touched.clone(), self.pages)))
    }

    /// At the side that holds everything and will; in the middle of a switch there is none. Channels that are open when one begins stay with the old
    /// side: who has some compares [`SwitchBackend::progress`] before and after a call.
    fn open_calls(&self) -> Result<Box<dyn Calls>, PoolError> {
        self.only_side()?.open_calls()
    }

    /// As [`SwitchBackend::open_calls`].
    fn open_reads(&self) -> Result<Box<dyn Calls>, PoolError> {
        self.only_side()?.open_reads()
    }

    /// The same. The caller [holds still](SwitchBackend::hold_still) and has said that it [will be written](SwitchBackend::will_be_written).
    fn begin_writes(&self, runs: &[(PageId, u64)]) -> Result<Box<dyn Writes>, PoolError> {
        self.only_side()?.begin_writes(runs)
    }

    /// Of the side that holds everything and will. Who uses it compares [`SwitchBackend::progress`] from before he asked with that after the answer.
    fn deal(&self) -> Option<Deal> {
        self.only_side().ok()?.deal()
    }

    /// The same.
    fn member(&self, index: usize) -> Option<Arc<dyn Backend>> {
        self.only_side().ok()?.member(index)
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        self.is_loaded.load(Ordering::SeqCst).then_some(self)
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let _still = self.hold_still();
        Ok(self.clone_side()?.0)
    }

    fn pages(&self) -> u64 {
        self.pages
    }

    fn health(&self) -> Health {
        let stage = self.stage();
        let (Some(pair), Some(next)) = (&stage.pair, &stage.next) else { return stage.side.health() };
        for (leg, backend) in [(LegTable::OLD, &stage.side), (LegTable::NEW, next)] {
            if backend.health() == Health::Gone {
                pair.lose(leg);
            }
        }
        pair.health()
    }

    fn scrubbed(&self) -> Option<Scrubbed> {
        self.stage().side.scrubbed()
    }

    fn protection(&self) -> Option<Protection> {
        self.stage().side.protection()
    }

    fn how(&self) -> String {
        self.stage().side.how()
    }

    /// Not during a switch.
    fn is_rejoin_due(&self) -> bool {
        let stage = self.stage();
        stage.pair.is_none() && stage.side.is_rejoin_due()
    }

    fn rejoin(&self) {
        let side = self.stage().side.clone();
        side.rejoin();
    }

    fn release(&self) {
        let stage = self.stage();
        stage.side.release();
        stage.next.iter().for_each(|next| next.release());
    }

    fn abandon(&self) {
        let stage = self.stage();
        stage.pair.iter().for_each(|pair| pair.abandon());
        stage.side.abandon();
        stage.next.iter().for_each(|next| next.abandon());
    }
}

impl Mapped for SwitchBackend {
    fn page(&self, page: PageId) -> Option<*const u8> {
        // Only while nobody loads is it changed, so nobody waits here.
        let loaded = self.loaded.read();
        loaded.mapped()?.page(page)
    }
}
