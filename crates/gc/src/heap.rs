//! The collected heap: what its mutators, roots and collections share.

use crate::collector::Collection;
use crate::entries::EntryTable;
use crate::error::GcError;
use crate::mutator::{AllocationBuffer, Mutator};
use crate::pages::Pages;
use crate::roots::RootTable;
use crate::stats::{CollectionCounters, GcStats};
use crate::stops::{MutatorId, Stops};
use crate::types::TypeRegistry;
use crate::verify::{self, VerifiedHeap};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield::space::Space;
use farfield::{BuildError, Heap};
use farfield_core::gc::RegionGeometry;
use farfield_core::geometry::PAGE_BYTES;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Smallest limit of a heap, in pages.
const LIMIT_PAGES_MIN: u64 = 64;

/// Entry pages that a heap can have beyond one for each 16 KiB of its limit.
const ENTRY_PAGES_MORE: u64 = 64;

/// Heap whose objects live as long as something leads to them.
///
/// The objects lie in pages of a far [`Heap`], under its near budget, beside its other values.
pub struct GcHeap {
    pub(crate) inner: Arc<GcInner>,
}

/// Configuration of a collected heap, made by [`GcHeap::in_heap`].
#[must_use]
pub struct GcBuilder<'h> {
    heap: &'h Heap,
    limit: u64,
    region: u64,
}

/// State of a heap.
pub(crate) struct GcInner {
    pub(crate) pages: Pages,
    pub(crate) entries: EntryTable,
    pub(crate) types: TypeRegistry,
    pub(crate) roots: RootTable,
    pub(crate) stops: Stops,
    pub(crate) counters: CollectionCounters,
    /// Number of pages in use at which the next collection is due.
    pub(crate) due: AtomicU64,
    /// Number of collections that have freed what they found dead. Changes only while mutators are
    /// stopped.
    pub(crate) epoch: AtomicU64,
    /// Open pages and claimed entries of mutators that have ended since the last collection.
    pub(crate) left_over: Mutex<Vec<AllocationBuffer>>,
    /// Address and length of the arena in which all near pages lie.
    pub(crate) arena: (usize, usize),
    table_bytes: u64,
}

impl GcHeap {
    /// Returns a builder of a collected heap in this far heap. A far heap has at most one.
    pub fn in_heap(heap: &Heap) -> GcBuilder<'_> {
        GcBuilder { heap, limit: 0, region: Pages::bytes(RegionGeometry::DEFAULT.pages().into()) }
    }

    /// Makes a mutator: the right of the calling thread to use objects. Waits while a collection is
    /// under way.
    ///
    /// As long as the mutator exists, the thread has to reach safepoints, or nobody can collect.
    pub fn enter(&self) -> Mutator<'_> {
        Mutator::new(&self.inner)
    }

    /// Collects now, while the calling thread has no mutator. Waits for all mutators to reach a
    /// safepoint.
    pub fn collect(&self) -> Result<(), GcError> {
        self.inner.collect(None, None)
    }

    /// Returns statistics of the heap.
    pub fn stats(&self) -> GcStats {
        self.inner.stats()
    }

    /// Walks through all objects that roots lead to and checks all that is known of them, for
    /// tests. Waits for all mutators to reach a safepoint; the calling thread has none.
    pub fn verify(&self) -> Result<VerifiedHeap, GcError> {
        let _stop = self.inner.stops.begin(None)?;
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

    /// Makes the heap.
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
        let (table_bytes, _) = EntryTable::near_bytes(entry_pages);
        space.charge(table_bytes)?;
        let arena = space.arena();
        let inner = GcInner {
            pages: Pages::new(space, geometry, pages),
            entries: EntryTable::new(entry_pages),
            types: TypeRegistry::default(),
            roots: RootTable::default(),
            stops: Stops::default(),
            counters: CollectionCounters::default(),
            due: AtomicU64::new(pages - pages / 16),
            epoch: AtomicU64::new(0),
            left_over: Mutex::default(),
            arena,
            table_bytes,
        };
        Ok(GcHeap { inner: Arc::new(inner) })
    }
}

impl GcInner {
    /// Collects. `own` is the mutator of the calling thread, which is at a safepoint and in no
    /// scope. Does nothing if another thread has collected since `epoch`.
    pub(crate) fn collect(&self, own: Option<MutatorId>, epoch: Option<u64>) -> Result<(), GcError> {
        let begun = Instant::now();
        let is_over = || epoch.is_some_and(|epoch| self.epoch.load(Ordering::Acquire) != epoch);
        let run = || if is_over() { Ok(None) } else { Collection::run(self).map(Some) };
        let collected = self.stops.begin(own).and_then(|_stop| run());
        let (used, limit) = (self.pages.used(), self.pages.limit());
        // The next one is late enough to find something, also when this one was given up.
        let next = used + limit / 32;
        match &collected {
            Ok(None) => {}
            Ok(Some(found)) => {
                self.counters.count(found, begun.elapsed());
                self.due.store(next.max(limit - limit / 16).min(limit), Ordering::Relaxed);
            }
            Err(_) => {
                self.counters.count_given_up();
                self.due.store(next.min(limit), Ordering::Relaxed);
            }
        }
        collected.map(|_| ())
    }

    pub(crate) fn stats(&self) -> GcStats {
        let mut stats = self.counters.stats();
        stats.limit_bytes = Pages::bytes(self.pages.limit());
        stats.used_bytes = Pages::bytes(self.pages.used());
        stats.roots = self.roots.len() as u64;
        stats
    }
}

impl Drop for GcInner {
    fn drop(&mut self) {
        let (_, chunk) = EntryTable::near_bytes(0);
        let chunks = self.entries.chunk_count() as u64 * chunk;
        self.pages.space().uncharge(self.table_bytes + chunks);
    }
}
