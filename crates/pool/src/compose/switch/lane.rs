//! Lane that can be moved to another side.

use crate::dirty_chunks::DirtyChunks;
use crate::redundant::mirror::{MirrorLane, chunks};
use crate::{Completion, Lane, LaneRequest, Op};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use farfield_os::sync::{Mutex, MutexGuard, Wait};
use std::sync::Arc;

/// Most completions that may wait for the owner, which is more than any lane takes operations.
const ENDED: usize = 1024;
/// Sleep, between two looks, of a thread that moves lanes.
const LOOK: Duration = Duration::from_micros(20);

/// Lane behind a lane.
pub(super) enum SwitchableLane {
    Single(Box<dyn Lane>),
    DualWrite(Box<MirrorLane>),
    /// No lane, for a moment, while it is moved.
    Detached,
}

impl SwitchableLane {
    fn lane(&mut self) -> &mut dyn Lane {
        match self {
            SwitchableLane::Single(lane) => &mut **lane,
            SwitchableLane::DualWrite(lane) => &mut **lane,
            SwitchableLane::Detached => unreachable!("moved with the berth locked"),
        }
    }
}

/// Meeting point of the owner of a lane and the thread that moves it.
pub(super) struct LaneCell {
    slot: Mutex<LaneCellState>,
    /// Set while the lane takes nothing new, until it was moved.
    is_halted: AtomicBool,
    /// Number of operations so far.
    operations: AtomicU64,
}

pub(super) struct LaneCellState {
    pub(super) inner: SwitchableLane,
    /// Completions that arrived while the owner did not look.
    ended: Vec<Completion>,
}

impl LaneCell {
    pub(super) fn new(inner: SwitchableLane) -> LaneCell {
        LaneCell {
            slot: Mutex::new(LaneCellState { inner, ended: Vec::with_capacity(ENDED) }),
            is_halted: AtomicBool::new(false),
            operations: AtomicU64::new(0),
        }
    }

    /// Tries to lock the slot; never waits, because both sides only ever try.
    fn try_lock(&self) -> Option<MutexGuard<'_, LaneCellState>> {
        self.slot.try_lock()
    }

    pub(super) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Waits until the lane has no operation, and calls `act` then.
    pub(super) fn when_empty<T>(&self, act: impl FnOnce(&mut LaneCellState) -> T) -> T {
        self.is_halted.store(true, Ordering::SeqCst);
        let mut wait = Wait::new("a lane to have nothing under way");
        loop {
            if let Some(mut slot) = self.try_lock() {
                let LaneCellState { inner, ended } = &mut *slot;
                // The owner may be busy with something else for long.
                inner.lane().poll(ended);
                if inner.lane().in_flight() == 0 {
                    let result = act(&mut slot);
                    self.is_halted.store(false, Ordering::SeqCst);
                    return result;
                }
            }
            wait.nap(LOOK);
        }
    }
}

/// Lane of a pool that can be switched.
pub(super) struct SwitchLane {
    lane_cell: Arc<LaneCell>,
    dirty_chunks: Arc<DirtyChunks>,
    pages: u64,
    in_flight: usize,
    /// Set if the last request was given back: then a waiting owner waits for room.
    is_refused: bool,
}

impl SwitchLane {
    pub(super) fn new(lane_cell: Arc<LaneCell>, dirty_chunks: Arc<DirtyChunks>, pages: u64) -> SwitchLane {
        SwitchLane { lane_cell, dirty_chunks, pages, in_flight: 0, is_refused: false }
    }

    fn try_submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.lane_cell.is_halted.load(Ordering::Acquire) || self.in_flight >= ENDED {
            return Err(request);
        }
        let Some(mut slot) = self.lane_cell.try_lock() else { return Err(request) };
        if let Op::Write { page, buffer } = &request.op {
            let count = buffer.pages() as u64;
            // The side refuses pages outside of the region.
            if page.0.checked_add(count).is_some_and(|end| end <= self.pages) {
                for chunk in chunks(page.0, count) {
                    self.dirty_chunks.mark(chunk);
                }
            }
        }
        slot.inner.lane().submit(request)?;
        self.in_flight += 1;
        self.lane_cell.operations.store(self.lane_cell.operations() + 1, Ordering::Relaxed);
        Ok(())
    }
}

impl Lane for SwitchLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        let result = self.try_submit(request);
        self.is_refused = result.is_err();
        result
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let Some(mut slot) = self.lane_cell.try_lock() else { return 0 };
        let mut moved = slot.ended.len().min(done.capacity() - done.len());
        done.extend(slot.ended.drain(..moved));
        if slot.ended.is_empty() {
            moved += slot.inner.lane().poll(done);
        }
        self.in_flight -= moved;
        moved
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn wait(&mut self, timeout: Duration) {
        let waits_for_room = self.is_refused && self.in_flight == 0;
        if waits_for_room || self.lane_cell.is_halted.load(Ordering::Acquire) {
            // The lane is being moved, or was just now: that takes a moment.
            return farfield_os::process::yield_now();
        }
        match self.lane_cell.try_lock() {
            Some(mut slot) if slot.ended.is_empty() => slot.inner.lane().wait(timeout),
            Some(_) => {}
            None => farfield_os::process::yield_now(),
        }
    }
}
