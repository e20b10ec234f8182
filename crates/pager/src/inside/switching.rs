//! Moves the far memory of this process when its job shall have another pool.
//!
//! The configuration says which pool that is ([`JobConfig::pool_epoch`]). If this process has
//! another one, the maintenance thread opens the new pool, moves everything
//! (`farfield_pool::SwitchBackend`), and notes that in the process's slot. A process for which that
//! fails notes the failure in its slot, and the runner takes all processes back to the pool before.
//! The child of a fork goes on with a snapshot of the pool that holds everything, and then moves by
//! itself.

use super::arm::pool_builder;
use super::runtime::Runtime;
use super::store::Store;
use super::sync::{Wait, tid};
use super::{async_io, evict, maintenance_thread};
use crate::config::JobConfig;
use core::cell::Cell;
use core::sync::atomic::Ordering;
use farfield_os::process;
use farfield_pool::{CloneTicket, PoolError, SnapshotContents, SwitchError, SwitchHost, leaf_urls};

/// Bytes that a process needs, while it moves, for lanes to a pool of one server beside those that
/// it has. `LANES_OF_SERVER_BYTES` is what each further server adds, and 1 / `LANES_SHARE` is the
/// part of its near memory that it takes for that at most. Measured; a test holds the peak of a job
/// that moves.
pub const LANES_BYTES: i64 = 6 << 20;
const LANES_OF_SERVER_BYTES: i64 = 9 << 18;
const LANES_SHARE: i64 = 2;
/// Interval between two reports of the progress.
const TELL_NS: u64 = 50_000_000;

/// Pool where far memory is.
#[derive(Clone)]
pub struct PoolLocation {
    /// Number of the pool among those that the job had.
    pub epoch: u32,
    /// URLs of the pool, as the job knows them.
    pub urls: Vec<String>,
    /// Token for the servers at these URLs.
    pub token: String,
}

impl PoolLocation {
    /// Returns the pool that the job shall have.
    pub fn wanted(config: &JobConfig) -> PoolLocation {
        let (epoch, urls, token) = config.pool();
        // The runner accepts only a token that is text.
        PoolLocation { epoch, urls, token: String::from_utf8(token).unwrap_or_default() }
    }
}

/// Far memory that the child of a fork goes on with.
pub struct InheritedSnapshot {
    /// Pool where the snapshot is.
    pub location: PoolLocation,
    /// Right to use the snapshot.
    pub ticket: CloneTicket,
    /// Contents that the snapshot may hold.
    pub contents: SnapshotContents,
}

impl InheritedSnapshot {
    /// Takes the snapshot of a store that is held still and has nothing in flight.
    pub fn of(store: &Store) -> Result<InheritedSnapshot, PoolError> {
        let (ticket, is_next) = store.backend().clone_authoritative()?;
        let next = store.next_location.lock().clone().filter(|_| is_next);
        let location = next.unwrap_or_else(|| store.location.lock().clone());
        Ok(InheritedSnapshot { location, ticket, contents: store.backend().snapshot_contents() })
    }
}

/// Checks whether there is another pool to move to.
pub fn is_due(runtime: &Runtime) -> bool {
    runtime.slot().pool_epoch.load(Ordering::Relaxed) != runtime.config().pool_epoch.load(Ordering::SeqCst)
}

/// Moves to the pool that the job shall have, if it is another one. Blocks until the move has
/// ended. Called by the maintenance thread.
pub fn follow(runtime: &Runtime) {
    let (slot, store) = (runtime.slot(), &runtime.armed().store);
    if !is_due(runtime) {
        return;
    }
    let wanted = PoolLocation::wanted(runtime.config());
    // The move has failed, and the runner will decide.
    if wanted.epoch != 0 && slot.pool_failed.load(Ordering::Relaxed) == wanted.epoch {
        return;
    }
    let here = store.location.lock().clone();
    if wanted.urls == here.urls {
        // The process never left, or has come back.
        let still = store.backend().hold_still();
        store.location.lock().epoch = wanted.epoch;
        drop(still);
        return slot.pool_epoch.store(wanted.epoch, Ordering::SeqCst);
    }
    let result = move_with_room(runtime, store, &wanted);
    slot.pool_pages.store(0, Ordering::Relaxed);
    slot.pool_moved_pages.store(0, Ordering::Relaxed);
    match result {
        Ok(()) => slot.pool_epoch.store(wanted.epoch, Ordering::SeqCst),
        // The job shall have another pool meanwhile; the next look finds out which.
        Err(PoolMoveError::Switch(SwitchError::Cancelled)) => {}
        // The process ends, and has given its far memory up.
        Err(_) if runtime.ending.load(Ordering::Acquire) != 0 => {}
        Err(failure) => {
            let reason = match failure {
                PoolMoveError::Open(text) => text,
                PoolMoveError::Switch(error) => error.to_string(),
            };
            slot.fail_pool(wanted.epoch, reason.as_bytes());
        }
    }
}

enum PoolMoveError {
    Open(String),
    Switch(SwitchError),
}

/// Moves to another pool, with room made first for what the move takes.
fn move_with_room(runtime: &Runtime, store: &Store, wanted: &PoolLocation) -> Result<(), PoolMoveError> {
    let (_, limit) = runtime.near();
    let servers = wanted.urls.iter().flat_map(|url| leaf_urls(url)).count() as i64;
    let lanes = LANES_BYTES + (servers - 1).max(0) * LANES_OF_SERVER_BYTES;
    evict::make_room_for_heap(runtime, lanes.min(limit / LANES_SHARE));
    let result = move_to(runtime, store, wanted);
    runtime.expect_heap(0);
    result
}

fn move_to(runtime: &Runtime, store: &Store, wanted: &PoolLocation) -> Result<(), PoolMoveError> {
    let host = ProcessSwitchHost { runtime, store, wanted, told_at: Cell::new(0) };
    // A fork meanwhile would take connections along that nobody knows of yet.
    let still = store.backend().hold_still();
    let mut opened = None;
    host.open(&mut || opened = Some(pool_builder(runtime, wanted).open()));
    let opened =
        opened.map_or(Err("the pool was not opened".to_owned()), |result| result.map_err(|error| error.to_string()));
    let to = opened.map_err(PoolMoveError::Open)?;
    *store.next_location.lock() = Some(wanted.clone());
    drop(still);
    let result = store.backend().switch(to, &host);
    let _still = store.backend().hold_still();
    *store.next_location.lock() = None;
    result.map_err(PoolMoveError::Switch)
}

/// This process, as the pool that is moved sees it.
struct ProcessSwitchHost<'a> {
    runtime: &'a Runtime,
    store: &'a Store,
    wanted: &'a PoolLocation,
    told_at: Cell<u64>,
}

impl SwitchHost for ProcessSwitchHost<'_> {
    fn is_wanted(&self) -> bool {
        let now = process::now_ns();
        if now - self.told_at.get() > TELL_NS {
            self.told_at.set(now);
            let progress = self.store.backend().progress();
            self.runtime.slot().pool_pages.store(progress.pages, Ordering::Relaxed);
            self.runtime.slot().pool_moved_pages.store(progress.moved_pages, Ordering::Relaxed);
        }
        self.runtime.config().pool_epoch.load(Ordering::SeqCst) == self.wanted.epoch
    }

    /// Runs `act` as for a fork: nobody is inside a fault, or loads from far memory.
    fn run_exclusive(&self, act: &mut dyn FnMut() -> bool) {
        let runtime = self.runtime;
        let end = runtime.break_end.lock();
        let space = runtime.space.lock();
        let registry = async_io::ASYNC_IO_REGISTRY.lock();
        let mut wait = Wait::new("threads that are inside a fault, so that the pool can be exchanged");
        let me = tid() as u32;
        while runtime.frozen_by.compare_exchange(0, me, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            wait.pause();
        }
        while runtime.busy.load(Ordering::SeqCst) != 0 {
            self.store.progress();
            wait.pause();
        }
        if act() {
            *self.store.location.lock() = self.wanted.clone();
        }
        runtime.frozen_by.store(0, Ordering::SeqCst);
        drop((registry, space, end));
    }

    fn open(&self, open: &mut dyn FnMut()) {
        maintenance_thread::open(self.runtime, open);
    }
}
