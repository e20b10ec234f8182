//! The collected heap: what its mutators, roots and collections share.

use crate::collector::{Collector, CycleMode, CycleRequests, CycleStep, Marking, StepHook};
use crate::entries::EntryTable;
use crate::error::GcError;
use crate::mutator::{AllocationBuffer, Mutator};
use crate::pacing::Pacing;
use crate::pages::Pages;
use crate::roots::RootTable;
use crate::stats::{CollectionCounters, GcStats, SafepointWait, WaitRecorder};
use crate::stops::Stops;
use crate::types::TypeRegistry;
use crate::verify::{self, VerifiedHeap};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield::space::Space;
use farfield::{BuildError, Heap};
use farfield_core::gc::RegionGeometry;
use farfield_core::geometry::PAGE_BYTES;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Smallest limit of a heap, in pages.
const LIMIT_PAGES_MIN: u64 = 64;

/// Entry pages that a heap can have beyond one for each 16 KiB of its limit.
const ENTRY_PAGES_MORE: u64 = 64;

/// Part of the near budget for copies of far pages, and the number of these, at least and at most.
const COPIES_PART: u64 = 32;
const COPIES: (u64, u64) = (2, 256);

/// Heap whose objects live as long as something leads to them.
///
/// The objects lie in pages of a far [`Heap`], under its near budget, beside its other values.
pub struct GcHeap {
    /// Ends first: then only roots keep what is in the heap.
    _collector: Collector,
    pub(crate) inner: Arc<GcInner>,
}

/// Configuration of a collected heap, made by [`GcHeap::in_heap`].
#[must_use]
pub struct GcBuilder<'h> {
    heap: &'h Heap,
    limit: u64,
    region: u64,
    far_tracing: FarTracing,
    evacuate: bool,
    evacuate_at_servers: bool,
    broken: Option<BrokenRule>,
    step_hook: Option<StepHook>,
}

/// Way in which a collection looks at objects that are far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FarTracing {
    /// It brings each one near, as a program does, in the order in which it finds them. Pages of the
    /// program leave for them.
    Frames,
    /// It reads their pages into a little memory of its own, in batches and in the order of the
    /// pages.
    #[default]
    Copies,
    /// Objects are looked at when the program brings their pages near, and it has some time for that.
    /// Pages that do not come are read as with [`FarTracing::Copies`]. So a collection reads fewer
    /// pages, and takes up to twice as long.
    ///
    /// This is for pools from which a read is dear, and for programs that use most of their objects
    /// again and again (MemLiner, section 4.3, with near pages in place of epochs).
    Arrivals,
    /// It lets the memory servers look at them, where they can and where that takes less time than to
    /// read their pages.
    ///
    /// Pages that come near are verified, and answers of a server are not. A server that has lost a
    /// write, or that lies, can make a collection free objects that are alive, and references to
    /// them then lead to anything. So choose it only for servers that you trust as you trust your own
    /// memory.
    Servers,
}

/// Rule of the collector that a test switches off, to see that it notices.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BrokenRule {
    /// Whoever removes a reference logs where it led.
    LogRemoved,
    /// Whoever uses a weak reference logs what it has found.
    LogWeaklyFound,
    /// What mutators have logged is traced before anything is freed.
    ShareLogs,
    /// No page of the snapshot is filled any more.
    CloseOpenPages,
    /// What is near is written before servers trace.
    FlushBeforeTracing,
    /// A far page whose copy is out of date is not moved.
    CopiesAreCurrent,
    /// Servers look only at what they take less time for. (Where the flush is switched off, they look at
    /// all, too.)
    ServersAreFaster,
    /// No waker that runs on the collector's thread panics.
    WakersReturn,
}

/// State of a heap.
pub(crate) struct GcInner {
    pub(crate) pages: Pages,
    pub(crate) entries: EntryTable,
    pub(crate) types: TypeRegistry,
    pub(crate) roots: Arc<RootTable>,
    pub(crate) stops: Stops,
    pub(crate) counters: Arc<CollectionCounters>,
    pub(crate) waits: WaitRecorder,
    pub(crate) cycles: CycleRequests,
    pub(crate) pacing: Pacing,
    /// Held while a cycle runs, or the heap is verified.
    cycle: Mutex<()>,
    phase: Mutex<CyclePhase>,
    /// Open pages and claimed entries of mutators that have ended.
    left_over: Mutex<Vec<AllocationBuffer>>,
    pub(crate) far_tracing: FarTracing,
    pub(crate) evacuate: bool,
    pub(crate) evacuate_at_servers: bool,
    pub(crate) broken: Option<BrokenRule>,
    step_hook: Option<StepHook>,
    /// Far pages of which the collector has copies at a time.
    pub(crate) copied_pages: usize,
    /// Time that the last flush has taken, in nanoseconds.
    flush_ns: AtomicU64,
    /// Address and length of the arena in which all near pages lie.
    pub(crate) arena: (usize, usize),
    table_bytes: u64,
}

/// What mutators have to know of cycles. Changes only while they are stopped, but for a cycle that
/// is given up.
#[derive(Clone, Default)]
pub(crate) struct CyclePhase {
    /// Number of cycles that have begun.
    pub(crate) snapshots: u64,
    /// Number of cycles that have freed what they found dead.
    pub(crate) commits: u64,
    /// Cycle that marks.
    pub(crate) marking: Option<Arc<Marking>>,
}

impl GcHeap {
    /// Returns a builder of a collected heap in this far heap. A far heap has at most one.
    pub fn in_heap(heap: &Heap) -> GcBuilder<'_> {
        let region = Pages::bytes(RegionGeometry::DEFAULT.pages().into());
        let far_tracing = FarTracing::Copies;
        GcBuilder {
            heap,
            limit: 0,
            region,
            far_tracing,
            evacuate: true,
            evacuate_at_servers: false,
            broken: None,
            step_hook: None,
        }
    }

    /// Makes a mutator: the right of the calling thread to use objects. Waits while mutators are
    /// stopped.
    ///
    /// As long as the mutator exists, the thread has to reach safepoints, or nobody can collect.
    pub fn enter(&self) -> Mutator<'_> {
        Mutator::new(&self.inner)
    }

    /// Collects what nothing leads to now, and waits for the end of that. The calling thread has no
    /// mutator; those of others go on meanwhile, and have to reach safepoints.
    pub fn collect(&self) -> Result<(), GcError> {
        let cycles = &self.inner.cycles;
        cycles.wait_for(cycles.request(CycleMode::Concurrent))
    }

    /// Returns statistics of the heap.
    pub fn stats(&self) -> GcStats {
        self.inner.stats()
    }

    /// Records the waits of mutators at safepoints that end from now on, the first `most` of them, and
    /// forgets those before. This is for measurements of how evenly a program runs. A wait takes 40 bytes of the
    /// process's own memory.
    pub fn record_waits(&self, most: usize) {
        self.inner.waits.begin(most);
    }

    /// Returns the recorded waits, in the order in which they ended; none without
    /// [`GcHeap::record_waits`]. Waits for [`Mutator::collect`] and in [`Mutator::blocking`] are not among
    /// them.
    pub fn recorded_waits(&self) -> Vec<SafepointWait> {
        self.inner.waits.waits()
    }

    /// Checks whether a collection, or the verifier, is at work.
    pub fn is_collecting(&self) -> bool {
        matches!(self.inner.cycle.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Walks through all objects that roots lead to and checks all that is known of them, for
    /// tests. Waits for a collection that is under way, and for all mutators to reach a safepoint;
    /// the calling thread has none.
    pub fn verify(&self) -> Result<VerifiedHeap, GcError> {
        self.inner.cycles.check_not_collector();
        let _alone = self.inner.begin_cycle();
        let _stop = self.inner.stops.begin()?;
        verify::verify(&self.inner)
    }
}

impl core::fmt::Debug for GcHeap {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "GcHeap({:?})", self.stats())
    }
}

impl GcBuilder<'_> {
    /// Sets the most far memory that objects and their entries can take, in bytes. Without it, half
    /// of the far heap's addresses.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Sets the size of regions: a power of two from 64 KiB to 16 MiB. Without it, 1 MiB.
    pub fn region(mut self, bytes: u64) -> Self {
        self.region = bytes;
        self
    }

    /// Sets how collections look at far objects. Without it, by [`FarTracing::Copies`].
    pub fn far_tracing(mut self, how: FarTracing) -> Self {
        self.far_tracing = how;
        self
    }

    /// Sets whether collections move objects out of pages that are mostly garbage, so that these
    /// pages can be given back; with it unless this is called. Without it, a page that holds one
    /// live object keeps all of its far memory.
    ///
    /// Mutators are stopped for a moment for each few thousand objects.
    pub fn evacuate(mut self, on: bool) -> Self {
        self.evacuate = on;
        self
    }

    /// Sets whether memory servers copy the objects of far pages that collections move, where the pages
    /// are; without it unless this is called. Then the collector reads these pages, and writes others.
    ///
    /// Servers are asked if one keeps all pages, if each member of a mirror does, or if several share
    /// them in groups as large as [regions](GcBuilder::region) (`stripe(URL, URL)?group=1M`). The far
    /// heap verifies pages without a key. The collector copies what they do not. What a server has copied is
    /// verified as pages are that it keeps: a write that it has lost is noticed, and a server that lies
    /// is not.
    pub fn evacuate_at_servers(mut self, on: bool) -> Self {
        self.evacuate_at_servers = on;
        self
    }

    /// Makes a heap without one of its rules, for tests of the tests.
    #[doc(hidden)]
    pub fn broken(mut self, rule: BrokenRule) -> Self {
        self.broken = Some(rule);
        self
    }

    /// Sets what is called at each step of a collection, on the thread that collects, for tests.
    #[doc(hidden)]
    pub fn at_steps(mut self, hook: impl Fn(CycleStep) + Send + Sync + 'static) -> Self {
        self.step_hook = Some(Box::new(hook));
        self
    }

    /// Makes the heap, and starts the thread that collects.
    pub fn build(self) -> Result<GcHeap, BuildError> {
        let geometry = RegionGeometry::new(self.region)
            .ok_or(BuildError::Argument("a region is a power of two from 64 KiB to 16 MiB"))?;
        let space = Space::open(self.heap)?;
        let pages = match self.limit {
            0 => u64::from(space.far_pages()) / 2,
            bytes => bytes / PAGE_BYTES as u64,
        };
        if pages < LIMIT_PAGES_MIN || pages > space.far_pages().into() {
            return Err(BuildError::Argument("the limit is at least 256 KiB, and at most the far heap's size"));
        }
        // The smallest objects have 32 bytes, and an entry page has 512 entries.
        let entry_pages = (pages / 4 + ENTRY_PAGES_MORE) as usize;
        let copied_pages = (space.near_bytes() / PAGE_BYTES as u64 / COPIES_PART).clamp(COPIES.0, COPIES.1);
        let table_bytes = EntryTable::near_bytes(entry_pages).0 + Pages::bytes(copied_pages);
        space.charge(table_bytes)?;
        let arena = space.arena();
        let inner = GcInner {
            pages: Pages::new(space, geometry, pages),
            entries: EntryTable::new(entry_pages),
            types: TypeRegistry::default(),
            roots: Arc::default(),
            stops: Stops::default(),
            counters: Arc::default(),
            waits: WaitRecorder::default(),
            cycles: CycleRequests::default(),
            pacing: Pacing::new(pages),
            cycle: Mutex::default(),
            phase: Mutex::default(),
            left_over: Mutex::default(),
            far_tracing: self.far_tracing,
            copied_pages: copied_pages as usize,
            flush_ns: AtomicU64::new(0),
            evacuate: self.evacuate,
            evacuate_at_servers: self.evacuate_at_servers,
            broken: self.broken,
            step_hook: self.step_hook,
            arena,
            table_bytes,
        };
        inner.publish();
        let inner = Arc::new(inner);
        let _collector = Collector::start(&inner)?;
        Ok(GcHeap { inner, _collector })
    }
}

impl GcInner {
    /// Waits until no cycle runs. None begins until the guard is dropped.
    pub(crate) fn begin_cycle(&self) -> MutexGuard<'_, ()> {
        self.cycle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how long the last flush has taken; nothing before there was one.
    pub(crate) fn flush_time(&self) -> Duration {
        Duration::from_nanos(self.flush_ns.load(Ordering::Relaxed))
    }

    /// Notes how long a flush has taken.
    pub(crate) fn set_flush_time(&self, time: Duration) {
        self.flush_ns.store(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Tells a test that a collection has reached a step.
    pub(crate) fn reach(&self, step: CycleStep) {
        if let Some(hook) = &self.step_hook {
            hook(step);
        }
    }

    /// Returns what mutators that have ended have left.
    pub(crate) fn left_over(&self) -> MutexGuard<'_, Vec<AllocationBuffer>> {
        self.left_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the phase of the collector.
    pub(crate) fn phase(&self) -> MutexGuard<'_, CyclePhase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> GcStats {
        self.counters.stats(self.pages.limit(), self.pages.used(), &self.roots)
    }

    /// Adds the statistics to the notice of the far heap, so that others see them.
    fn publish(&self) {
        let (counters, roots) = (self.counters.clone(), self.roots.clone());
        let (limit, used) = (self.pages.limit(), self.pages.used_counter());
        let lines = move || counters.stats(limit, used.load(Ordering::Relaxed), &roots).lines();
        self.pages.space().add_to_notice(lines);
    }
}

impl Drop for GcInner {
    fn drop(&mut self) {
        let (_, chunk) = EntryTable::near_bytes(0);
        let chunks = self.entries.chunk_count() as u64 * chunk;
        self.pages.space().uncharge(self.table_bytes + chunks);
    }
}
