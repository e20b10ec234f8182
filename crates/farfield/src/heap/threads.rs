//! Threads and epochs (epoch-based reclamation): which threads are inside a scope, and since when.
//!
//! The heap has an epoch, which the evictor moves on after it has made a batch of pages Cooling. A
//! thread that enters its outermost scope writes the epoch into its record, a fence follows, and
//! then it reads frame words. The evictor makes pages Cooling, a fence follows, and then it reads
//! the records. So either the evictor sees the scope, or the scope sees that the pages are Cooling
//! (`crates/core/tests/heap_model.rs` tries all interleavings).
//!
//! Scopes of one thread may end in any order, because tasks hold them while they wait. The record
//! shows the epoch in which the oldest one began (`scopes`).

use super::HeapInner;
use super::io::FetchLane;
use super::scopes::{ScopeState, Scopes};
use crate::plane::object::ThreadObjects;
use crate::stats::Stats;
use core::cell::{Cell, RefCell};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering, fence};
use core::time::Duration;
use farfield_core::heap::{AccessMode, Class};
use farfield_core::policy::prefetch::Prefetcher;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number within the heap of what an attempt did not find near (a page, or a handle above all
/// pages), and the access that needs it.
pub(crate) type Missed = (u32, AccessMode);

/// State of one thread in one heap. Fields that are not atomic belong to the thread that is
/// attached.
#[repr(align(128))]
pub(crate) struct ThreadState {
    /// Epoch in which the oldest open scope began; 0 outside.
    epoch: AtomicU64,
    /// Counters of the attached thread, read by others.
    pub(crate) counters: ThreadCounters,
    attached: AtomicBool,
    /// Kernel's thread ID of the attached thread.
    tid: AtomicI32,
    /// Open scopes of the attached thread.
    scopes: Scopes,
    /// Number of wrong guesses of slots; see [`HeapInner::may_correct`].
    pub(crate) tick: Cell<u32>,
    /// Segment that this thread fills, per class.
    pub(crate) segments: [Cell<Option<u32>>; Class::COUNT],
    /// Detector of access patterns in collections.
    pub(crate) streams: RefCell<Prefetcher>,
    /// Lane of the thread. Other threads look at it too, for pages that they wait for.
    pub(crate) io: Mutex<Option<FetchLane>>,
    /// Approximate number of flights on that lane.
    pub(crate) in_flight: AtomicU32,
    /// True while the thread waits for an answer of the pool.
    pub(crate) waits_for_pool: AtomicBool,
    /// Bytes of near memory of the lane's buffers after the first.
    pub(crate) buffer_bytes: AtomicU64,
    /// Statistics of the lane's link: see [`FetchLane::link`].
    pub(crate) prefetch_depth: AtomicU64,
    pub(crate) answer_ns: AtomicU64,
    /// State of the thread on the object plane.
    pub(crate) objects: ThreadObjects,
    /// True if a task of this thread waits for a page that another thread began to fetch.
    pub(crate) waits_for_others: Cell<bool>,
    /// True if the thread must not wait for far data now; see `try_access`.
    pub(crate) is_nonblocking: Cell<bool>,
    /// True if data that the thread finds was fetched for it: see `AttemptKind`.
    pub(crate) is_retry: Cell<bool>,
    /// Data that the last attempt found far and did not wait for.
    pub(crate) missed: Cell<Option<Missed>>,
    /// Number of locks of collections that the thread holds. Threads that wait for such a lock
    /// cannot make room, so the holder waits for no page meanwhile.
    pub(crate) locks: Cell<u32>,
}

/// Counters that one thread writes, so without read-modify-write.
#[derive(Default)]
pub(crate) struct ThreadCounters {
    pub(crate) misses: AtomicU64,
    pub(crate) object_misses: AtomicU64,
    pub(crate) whole_pages: AtomicU64,
    pub(crate) fetched_bytes: AtomicU64,
    pub(crate) rescued: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) pauses: PauseCounters,
    pub(crate) lost_values: AtomicU64,
    pub(crate) prefetches: AtomicU64,
    pub(crate) prefetches_used: AtomicU64,
}

/// Times that this thread has waited for near memory.
#[derive(Default)]
pub(crate) struct PauseCounters {
    /// Number of waits by class, as in [`Stats::pauses`](crate::Stats::pauses).
    counts: [AtomicU64; Stats::PAUSE_CLASSES],
    longest_ns: AtomicU64,
}

impl PauseCounters {
    pub(crate) fn add(&self, pause: Duration) {
        count(&self.counts[Stats::pause_class(pause)]);
        let longest = self.longest_ns.load(Ordering::Relaxed).max(pause.as_nanos() as u64);
        self.longest_ns.store(longest, Ordering::Relaxed);
    }
}

/// Adds one to a counter that only this thread writes.
pub(crate) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

/// Adds `more` to a counter that only this thread writes.
pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}

// SAFETY: other threads touch the atomics and what a lock guards only. The cells are for the
// attached thread, of which there is one (`attached` is claimed by a compare-exchange and released
// with the cells at rest).
unsafe impl Sync for ThreadState {}

/// Number of scopes that are looked at for each batch of pages that was cooled.
const SCOPES_PER_BATCH: u32 = 64;

impl ThreadState {
    fn new() -> ThreadState {
        ThreadState {
            epoch: AtomicU64::new(0),
            counters: ThreadCounters::default(),
            attached: AtomicBool::new(true),
            tid: AtomicI32::new(0),
            scopes: Scopes::default(),
            tick: Cell::new(0),
            segments: core::array::from_fn(|_| Cell::new(None)),
            streams: RefCell::new(Prefetcher::new()),
            io: Mutex::new(None),
            in_flight: AtomicU32::new(0),
            waits_for_pool: AtomicBool::new(false),
            buffer_bytes: AtomicU64::new(0),
            prefetch_depth: AtomicU64::new(0),
            answer_ns: AtomicU64::new(0),
            objects: ThreadObjects::default(),
            waits_for_others: Cell::new(false),
            is_nonblocking: Cell::new(false),
            is_retry: Cell::new(false),
            missed: Cell::new(None),
            locks: Cell::new(0),
        }
    }

    /// Opens a scope.
    #[inline]
    pub(crate) fn enter(&self, epoch: &AtomicU64) -> &ScopeState {
        // What an older scope of this thread announced protects this one too, until it is over.
        // Then the evictor sees this epoch, in which the pages of earlier batches were seen Cooling
        // (Acquire).
        let began = if self.scopes.is_empty() { self.announce(epoch) } else { epoch.load(Ordering::Acquire) };
        self.scopes.enter(began)
    }

    #[inline]
    fn announce(&self, epoch: &AtomicU64) -> u64 {
        // Acquire: a scope of a later epoch sees the pages of earlier batches Cooling. Release: a
        // thread that sees this epoch sees what earlier scopes of this thread did to values.
        let began = epoch.load(Ordering::Acquire);
        self.epoch.store(began, Ordering::Release);
        fence(Ordering::SeqCst);
        began
    }

    /// Closes a scope; true if it was the last.
    #[inline]
    pub(crate) fn leave(&self, open: &ScopeState) -> bool {
        let oldest = self.scopes.leave(open);
        // Release: all that the scope did to values is done.
        self.epoch.store(oldest.unwrap_or(0), Ordering::Release);
        oldest.is_none()
    }

    /// Renews a scope from which nobody has a reference. There is never no scope meanwhile, so no
    /// fence is needed.
    pub(crate) fn renew(&self, epoch: &AtomicU64, open: &ScopeState) {
        let oldest = self.scopes.renew(open, epoch.load(Ordering::Acquire));
        self.epoch.store(oldest, Ordering::Release);
    }

    /// Renews the only scope of this thread, if there is exactly one and it has given out no
    /// references.
    pub(crate) fn renew_only(&self, epoch: &AtomicU64) {
        if let Some(oldest) = self.scopes.renew_only(epoch.load(Ordering::Acquire)) {
            self.epoch.store(oldest, Ordering::Release);
        }
    }

    /// Renews scopes that keep nothing near, mostly those of tasks that wait. False if that is no
    /// help, because the oldest one keeps something.
    pub(crate) fn renew_idle(&self, epoch: &AtomicU64) -> bool {
        let before = self.entered();
        let oldest = self.scopes.renew_idle(epoch.load(Ordering::Acquire));
        if let Some(oldest) = oldest {
            self.epoch.store(oldest, Ordering::Release);
        }
        before < oldest
    }

    /// Renews scopes that keep nothing near, unless that is more work than the batches that were
    /// cooled since. A thread may have thousands of tasks that wait, and each comes here.
    pub(crate) fn renew_some_idle(&self, epoch: &AtomicU64) {
        let age = self.entered().map_or(0, |entered| epoch.load(Ordering::Relaxed) - entered);
        if age > u64::from(self.scopes.len() / SCOPES_PER_BATCH) {
            self.renew_idle(epoch);
        }
    }

    /// Returns how many scopes were looked at so far.
    #[cfg(test)]
    pub(crate) fn looks(&self) -> u64 {
        self.scopes.looks.get()
    }

    /// Checks whether exactly one scope is open.
    pub(crate) fn is_single(&self) -> bool {
        self.scopes.len() == 1
    }

    /// Checks whether a scope of this thread keeps pages near that became Cooling in this epoch.
    pub(crate) fn keeps(&self, epoch: u64) -> bool {
        self.scopes.any_keeps(epoch, |_| true)
    }

    /// Checks whether a scope whose tasks do not wait for room keeps pages near that became Cooling
    /// in this epoch.
    pub(crate) fn keeps_and_goes_on(&self, epoch: u64) -> bool {
        self.scopes.any_keeps_and_goes_on(epoch)
    }

    /// Counts a task that holds this scope and begins (`is`) or stops to wait for room.
    pub(crate) fn set_hungry(&self, open: &ScopeState, is: bool) {
        self.scopes.set_hungry(open, is);
    }

    /// Returns the epoch in which this thread's oldest scope began.
    pub(crate) fn entered(&self) -> Option<u64> {
        match self.epoch.load(Ordering::Acquire) {
            0 => None,
            epoch => Some(epoch),
        }
    }
}

/// Heaps that exist, by serial number, for threads that end. A heap in the map exists while the
/// lock is held.
static HEAPS: Mutex<BTreeMap<u64, HeapAddress>> = Mutex::new(BTreeMap::new());

struct HeapAddress(*const HeapInner);
// SAFETY: only used under the lock, as long as it is in the map, which `unregister` ends before the
// heap goes.
unsafe impl Send for HeapAddress {}

fn heaps() -> MutexGuard<'static, BTreeMap<u64, HeapAddress>> {
    HEAPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enters the heap into the map that threads use when they end.
pub(crate) fn register(core: &HeapInner) {
    heaps().insert(core.serial, HeapAddress(core));
}

/// Removes a heap that is about to end from the map.
pub(crate) fn unregister(serial: u64) {
    heaps().remove(&serial);
}

/// Heaps to which this thread is attached. The records are shared with the heaps, so a thread that
/// leaves its last scope never touches memory that another thread frees.
struct Attachments(Vec<(u64, Arc<ThreadState>)>);

impl Drop for Attachments {
    fn drop(&mut self) {
        LAST.set((0, core::ptr::null()));
        // A record with a scope that was forgotten, or that ends later than this, stays attached for good.
        for (serial, record) in self.0.drain(..).filter(|(_, record)| record.scopes.is_empty()) {
            let heaps = heaps();
            let Some(core) = heaps.get(&serial) else { continue };
            // SAFETY: it is in the map and the map is locked, so it exists.
            unsafe { &*core.0 }.detach(&record);
            record.attached.store(false, Ordering::Release);
        }
    }
}

thread_local! {
    /// Heap that this thread used last, and its record there.
    static LAST: Cell<(u64, *const ThreadState)> = const { Cell::new((0, core::ptr::null())) };
    static ATTACHED: RefCell<Attachments> = const { RefCell::new(Attachments(Vec::new())) };
}

/// All records of a heap.
#[derive(Default)]
pub(crate) struct HeapThreads {
    // Shared because threads keep the addresses of their records.
    records: Mutex<Vec<Arc<ThreadState>>>,
}

impl HeapThreads {
    /// Returns this thread's record. If it is a new one, calls `grown`, without locks.
    #[inline]
    pub(crate) fn current(&self, serial: u64, grown: impl FnOnce()) -> &ThreadState {
        let (last, record) = LAST.get();
        if last == serial {
            // SAFETY: serial numbers are never given twice, so it is a record of this heap, which
            // keeps its records.
            return unsafe { &*record };
        }
        let (record, is_new) = self.find(serial);
        if is_new {
            grown();
        }
        record
    }

    #[cold]
    fn find(&self, serial: u64) -> (&ThreadState, bool) {
        let known = ATTACHED.try_with(|attached| {
            let mut attached = attached.borrow_mut();
            let found = attached.0.iter().find(|(known, _)| *known == serial).map(|(_, record)| Arc::as_ptr(record));
            found.map_or_else(
                || {
                    let heaps = heaps();
                    attached.0.retain(|(known, _)| heaps.contains_key(known));
                    drop(heaps);
                    let (record, is_new) = self.attach();
                    attached.0.push((serial, record.clone()));
                    (Arc::as_ptr(&record), is_new)
                },
                |found| (found, false),
            )
        });
        match known {
            Ok((record, is_new)) => {
                LAST.set((serial, record));
                // SAFETY: as in `current`.
                (unsafe { &*record }, is_new)
            }
            // The thread is ending, and a destructor of its thread-local values uses the heap.
            // Nobody will detach this record; it goes with the heap.
            Err(_) => {
                let (record, is_new) = self.attach();
                // SAFETY: as in `current`.
                (unsafe { &*Arc::as_ptr(&record) }, is_new)
            }
        }
    }

    /// Attaches this thread to a record; true if a new one had to be made, because none was free.
    fn attach(&self) -> (Arc<ThreadState>, bool) {
        let mut records = self.lock();
        let claim = |record: &Arc<ThreadState>| {
            record.attached.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let known = records.iter().position(claim);
        let index = known.unwrap_or_else(|| {
            records.push(Arc::new(ThreadState::new()));
            records.len() - 1
        });
        if cfg!(not(miri)) {
            records[index].tid.store(farfield_os::process::tid(), Ordering::Relaxed);
        }
        (records[index].clone(), known.is_none())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<ThreadState>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether no scope can refer any more to a page that became Cooling in this epoch and
    /// was not rescued.
    pub(crate) fn is_over(&self, epoch: u64) -> bool {
        self.oldest().is_none_or(|entered| entered > epoch)
    }

    /// Returns the epoch in which the oldest scope of all threads began.
    pub(crate) fn oldest(&self) -> Option<u64> {
        fence(Ordering::SeqCst);
        self.lock().iter().filter_map(|record| record.entered()).min()
    }

    /// Returns the thread whose oldest scope began in this epoch, if none has an older one.
    pub(crate) fn thread_of_scope(&self, oldest: u64) -> Option<i32> {
        let (entered, record) = self.oldest_record()?;
        (entered == oldest).then(|| record.tid.load(Ordering::Relaxed))
    }

    /// Checks whether the thread with the oldest scope waits for the pool.
    pub(crate) fn oldest_waits_for_pool(&self) -> bool {
        self.oldest_record().is_some_and(|(_, record)| record.waits_for_pool.load(Ordering::Relaxed))
    }

    /// Returns the epoch in which the oldest scope began, and the record of its thread.
    fn oldest_record(&self) -> Option<(u64, Arc<ThreadState>)> {
        let records = self.lock();
        let entered = |record: &Arc<ThreadState>| Some((record.entered()?, record.clone()));
        records.iter().filter_map(entered).min_by_key(|(at, _)| *at)
    }

    /// Checks whether no thread is inside a scope.
    pub(crate) fn is_quiet(&self) -> bool {
        self.oldest().is_none()
    }

    /// Returns the records whose lanes have something in flight.
    pub(crate) fn in_flight(&self) -> Vec<Arc<ThreadState>> {
        let records = self.lock();
        records.iter().filter(|record| record.in_flight.load(Ordering::Acquire) > 0).cloned().collect()
    }

    /// Closes all lanes. Nobody uses the heap any more.
    pub(crate) fn close_lanes(&self) {
        for record in self.lock().iter() {
            record.io.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    /// Returns the sum of one counter over all threads.
    pub(crate) fn sum(&self, counter: impl Fn(&ThreadCounters) -> &AtomicU64) -> u64 {
        self.lock().iter().map(|record| counter(&record.counters).load(Ordering::Relaxed)).sum()
    }

    /// Returns how often threads have waited for near memory, by [`Stats::pause_class`], and the
    /// longest wait.
    pub(crate) fn pauses(&self) -> ([u64; Stats::PAUSE_CLASSES], Duration) {
        let (mut counts, mut longest_ns) = ([0; Stats::PAUSE_CLASSES], 0);
        for record in self.lock().iter() {
            let pauses = &record.counters.pauses;
            longest_ns = longest_ns.max(pauses.longest_ns.load(Ordering::Relaxed));
            for (sum, count) in counts.iter_mut().zip(&pauses.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
        }
        (counts, Duration::from_nanos(longest_ns))
    }

    /// Returns the link statistics of the thread that may have most under way: see
    /// [`FetchLane::link`].
    pub(crate) fn link(&self) -> (u64, u64) {
        let link = |record: &Arc<ThreadState>| {
            (record.prefetch_depth.load(Ordering::Relaxed), record.answer_ns.load(Ordering::Relaxed))
        };
        self.lock().iter().map(link).max().unwrap_or_default()
    }

    /// Returns the bytes of near memory that the records cost.
    pub(crate) fn table_bytes(&self) -> u64 {
        let records = self.lock();
        let buffers: u64 = records.iter().map(|record| record.buffer_bytes.load(Ordering::Relaxed)).sum();
        records.len() as u64 * (size_of::<ThreadState>() as u64 + FetchLane::NEAR_BYTES) + buffers
    }
}
