//! The heap: far pages, near frames, and the page table that joins them.
//!
//! | file | decides |
//! |---|---|
//! | `memory` | which address space is reserved |
//! | `frames` | which near memory is free |
//! | `segments` | which far addresses are in use |
//! | `checksums` | whether bytes from the pool are those that were written there |
//! | `threads` | which threads are inside a scope, and since which epoch |
//! | `objects` | how values are made and freed |
//! | `shares` | how many owners a value has |
//! | `weak_cell` | near part of a value that weak pointers lead to |
//! | `runs` | how runs are made and freed: memory of collections that need no slots |
//! | `access` | how a mutator changes a frame word |
//! | `reclaim` | who frees frames (reclaim), and who waits for them |
//! | `fetch`, `io` | how flights begin and land, on which lane |
//! | `wait_queue`, `poller` | which tasks wait, and who lands what they wait for |
//! | `eviction`, `reclaimer` | which pages are evicted, and when |
//! | `streaming` | which pages are evicted first because they are used once (streaming) |
//! | `admission` | how threads wait for free frames |
//! | `registry` | which heap a far pointer belongs to |
//! | `write_back` | how dirty data reaches the pool before another reader looks at it |
//! | `changed_pages` | which near pages differ from their far copies |
//! | `background_jobs` | which jobs run in the background for tasks that wait |
//! | `switcher` | which pool holds the far pages from now on |
//! | `stats_thread` | how statistics are shown to other processes |
//! | `raw`, `retired` | objects of collections: slots that threads share, and when a replaced object is freed |

mod access;
mod admission;
mod background_jobs;
mod changed_pages;
mod checksums;
mod drops;
mod eviction;
mod fetch;
mod frames;
mod io;
mod memory;
mod objects;
mod poller;
mod raw;
mod reclaim;
mod reclaimer;
mod registry;
mod retired;
mod runs;
mod scope;
mod scopes;
mod segments;
mod shares;
mod stats_thread;
mod streaming;
mod switcher;
mod threads;
mod verify;
mod wait_queue;
mod weak_cell;
mod write_back;

pub(crate) use access::count_use;
pub(crate) use drops::Panics;
#[cfg(test)]
pub(crate) use eviction::EvictionOutcome;
pub(crate) use eviction::EvictionUrgency;
pub(crate) use farfield_core::heap::fault::AccessMode;
pub(crate) use frames::{Watermark, copy_words, launder};
pub(crate) use io::FetchFlight;
pub(crate) use memory::{ReservedArray, Zeroed};
pub(crate) use objects::{
    InternalScope, Teardown, drop_and_free, drop_collection, drop_far, drop_far_with, take, take_with,
};
pub(crate) use raw::{SlotCell, SlotWord};
pub(crate) use reclaim::ReclaimRound;
pub(crate) use registry::heap_of;
pub(crate) use retired::RetiredObjects;
pub(crate) use runs::{free_run, lose_run};
pub use scope::Scope;
pub(crate) use segments::TransferUnit;
pub(crate) use shares::{ShareKey, unshare};
pub(crate) use streaming::StreamingHint;
pub use switcher::PoolSwitch;
pub(crate) use threads::{Missed, ThreadState, add, count};
pub(crate) use wait_queue::{ReclaimTurn, WaiterTicket};
pub(crate) use weak_cell::WeakCell;
pub use write_back::FarRange;

use crate::config::Config;
use crate::error::{BuildError, FarError};
use crate::offload::Offload;
use crate::plane::Plane;
use crate::plane::object::{Objects, Paths};
use crate::stats::Stats;
use admission::AdmissionQueue;
use background_jobs::BackgroundJobs;
use changed_pages::ChangedPages;
use checksums::Checksums;
use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use eviction::{HeapEvictor, Vacancies};
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, PoolBuilder, SwitchBackend};
use frames::Frames;
use poller::Poller;
use reclaimer::Reclaimer;
use segments::Segments;
use shares::Shares;
use stats_thread::{SpaceNotice, StatsThread};
use std::sync::Arc;
use std::time::Instant;
use switcher::Switcher;
use threads::HeapThreads;
use wait_queue::Waiters;

/// State of a heap that its [`Heap`](crate::Heap), scopes and far pointers share.
pub(crate) struct HeapInner {
    /// Number of this heap in the process; never used again.
    pub(crate) serial: u64,
    /// Number of the heap's first page among the pages of all heaps.
    pub(crate) first_page: u32,
    /// Number of the heap's pages. Page numbers inside the heap count from `first_page`; they are
    /// page numbers of the pool's region, too.
    pub(crate) pages: u32,
    /// Table of frame words, one per page.
    pub(crate) words: ReservedArray<AtomicU64>,
    pub(crate) checksums: Checksums,
    pub(crate) frames: Frames,
    pub(crate) changed: ChangedPages,
    pub(crate) segments: Segments,
    /// State of the object plane; `None` on the page plane.
    pub(crate) objects: Option<Objects>,
    shares: Shares,
    pub(crate) threads: HeapThreads,
    /// Global epoch of the epoch-based reclamation that `threads` describes.
    pub(crate) epoch: AtomicU64,
    pub(crate) evictor: HeapEvictor,
    pub(crate) reclaimer: Reclaimer,
    pub(crate) admission: AdmissionQueue,
    pub(crate) waiters: Waiters,
    pub(crate) poller: Poller,
    background_jobs: BackgroundJobs,
    stats_thread: StatsThread,
    pub(crate) vacancies: Vacancies,
    /// Values whose destructor had to be deferred.
    deferred_drops: objects::DeferredDrops,
    pub(crate) backend: Arc<SwitchBackend>,
    /// Opens other pools for this heap.
    pool_builder: PoolBuilder,
    switcher: Switcher,
    pub(crate) offload: Offload,
    pub(crate) patience: Duration,
    pub(crate) near: AtomicU64,
    /// Bytes of near memory that tables of collections use.
    charged: AtomicU64,
    /// Number of references to this state. They are one for the [`Heap`](crate::Heap), one for each segment with
    /// objects, one for each object that has a handle, and one for each [`HeapRef`].
    pub(crate) references: AtomicU64,
    heap_refs: AtomicU64,
    /// True while a [`Space`](crate::space::Space) of this heap exists.
    pub(crate) has_space: AtomicBool,
    /// Lines that the space adds to the heap's notice.
    pub(crate) space_notice: SpaceNotice,
    /// True once the [`Heap`](crate::Heap) is dropped.
    closed: AtomicBool,
}

/// Address of a [`HeapInner`] that can be sent to the threads that are made for the heap.
pub(crate) struct HeapInnerPointer(pub(crate) *const HeapInner);
// SAFETY: `HeapInner` is `Sync`; `destroy` stops the threads that use it.
unsafe impl Send for HeapInnerPointer {}

thread_local! {
    /// True on a thread that a heap has started and will join.
    pub(crate) static SERVES: Cell<bool> = const { Cell::new(false) };
}

/// Numbers of free frames between which the reclaimer works (low and high watermark).
#[derive(Clone, Copy)]
pub(crate) struct Reserve {
    /// Number of free frames below which the reclaimer starts.
    pub(crate) low: u32,
    /// Number of free frames at which the reclaimer stops.
    pub(crate) high: u32,
}

/// Bytes of the tables that every heap has for each page below the highest that was used: its frame
/// word and its checksum.
const TABLES_PER_PAGE: usize = size_of::<AtomicU64>() + Checksums::BYTES_PER_PAGE;

/// Minimum number of frames of a heap, however large its tables are.
const FRAMES_MIN: u32 = 32;

impl HeapInner {
    /// Makes the state of a heap, which others find from now on. The caller has its first reference.
    pub(crate) fn open(config: Config) -> Result<NonNull<HeapInner>, BuildError> {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let backend = Arc::new(SwitchBackend::new(config.pool_builder.open()?).map_err(FarError::from)?);
        let pages = config.far_pages as u32;
        let frames = Frames::new(config.frames, config.paranoid)?;
        let changed = ChangedPages::new(frames.arena_bytes() / PAGE_BYTES)?;
        let objects = match config.plane {
            Plane::Page => None,
            Plane::Object => Some(Objects::new(pages, config.near, config.handles, config.hotness, None)?),
            Plane::Hybrid => {
                let paths = Paths::new(config.car_threshold, config.alone_above, pages)?;
                Some(Objects::new(pages, config.near, config.handles, config.hotness, Some(paths))?)
            }
        };
        let bytes_per_page = TABLES_PER_PAGE + objects.as_ref().map_or(0, Objects::bytes_per_page);
        let checksums = Checksums::new(pages, config.verify)?;
        let (words, segments) = (ReservedArray::new(pages as usize)?, Segments::new(pages, bytes_per_page)?);
        let numbers = config.far_pages + u64::from(config.handles);
        let first_page = registry::reserve(numbers)
            .ok_or(BuildError::Argument("the heaps of this process have used up 16 TiB of far addresses"))?;
        let core = Box::new(HeapInner {
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            first_page,
            pages,
            words,
            checksums,
            frames,
            changed,
            segments,
            objects,
            shares: Shares::default(),
            threads: HeapThreads::default(),
            epoch: AtomicU64::new(1),
            evictor: HeapEvictor::new(config.near),
            reclaimer: Reclaimer::new(),
            admission: AdmissionQueue::default(),
            waiters: Waiters::default(),
            poller: Poller::new(),
            background_jobs: BackgroundJobs::default(),
            stats_thread: StatsThread::default(),
            vacancies: Vacancies::default(),
            deferred_drops: objects::DeferredDrops::default(),
            backend,
            pool_builder: config.pool_builder,
            switcher: Switcher::default(),
            offload: Offload::default(),
            patience: config.patience,
            near: AtomicU64::new(config.near),
            charged: AtomicU64::new(0),
            references: AtomicU64::new(1),
            heap_refs: AtomicU64::new(0),
            has_space: AtomicBool::new(false),
            space_notice: SpaceNotice::default(),
            closed: AtomicBool::new(false),
        });
        core.fit();
        let core = Box::into_raw(core);
        registry::set(first_page, numbers, core);
        // SAFETY: just made, and gone only after `destroy` has taken it out of the registry.
        unsafe {
            threads::register(&*core);
            Ok(NonNull::new_unchecked(core))
        }
    }

    /// Starts the heap's own threads; with a name, that which shows its statistics under it.
    pub(crate) fn start(&self, name: Option<&str>, plane: Plane) -> Result<(), BuildError> {
        self.reclaimer.start(self)?;
        if let Some(name) = name {
            self.stats_thread.start(self, name, plane)?;
        }
        Ok(())
    }

    /// Closes the heap, whose [`Heap`](crate::Heap) is dropped. The caller gives up its reference.
    pub(crate) fn close(&self) -> Panics {
        let panics = self.run_deferred_drops(true);
        self.closed.store(true, Ordering::SeqCst);
        panics
    }

    /// Changes the near budget, in bytes.
    pub(crate) fn set_near(&self, bytes: u64) {
        self.near.store(bytes, Ordering::Relaxed);
        self.fit();
        self.reclaimer.wake();
    }

    /// Starts to move all far data to the pool at `url`.
    pub(crate) fn switch_pool(&self, url: String) -> Result<PoolSwitch, BuildError> {
        self.switcher.start(&self.backend, &self.pool_builder.with_url(url))
    }

    /// Returns the calling thread's record.
    #[inline]
    pub(crate) fn record(&self) -> &ThreadState {
        self.threads.current(self.serial, || self.adapt())
    }

    /// Returns how many numbers the slots of this heap can name: its pages, then its handles.
    pub(crate) fn numbers(&self) -> u64 {
        u64::from(self.pages) + self.objects.as_ref().map_or(0, |objects| u64::from(objects.handles.count()))
    }

    /// Converts a page or handle number among those of all heaps to the number within this heap;
    /// `None` if it belongs to another heap.
    pub(crate) fn number_of(&self, number: u32) -> Option<u32> {
        let number = number.wrapping_sub(self.first_page);
        (u64::from(number) < self.numbers()).then_some(number)
    }

    /// Checks whether an object lives in this unit, which the caller owns.
    pub(crate) fn is_live(&self, unit: TransferUnit) -> bool {
        match &self.objects {
            Some(objects) if self.segments.is_log(unit.page) => objects.log.word(unit.page).live() > 0,
            _ => self.segments.is_live(unit),
        }
    }

    /// Returns the state of the object plane, for callers that have a handle of this heap.
    #[inline]
    pub(crate) fn objects(&self) -> &Objects {
        let Some(objects) = &self.objects else { unreachable!("an object of a heap without") };
        objects
    }

    /// Adapts the number of frames to the budget and to what the tables cost now.
    pub(crate) fn fit(&self) {
        let near = self.near.load(Ordering::Relaxed);
        // In steps: a frame that is given back for every page of tables would cost more than the
        // steps waste.
        let tables = self.table_bytes().next_multiple_of((near / 256).max(PAGE_BYTES as u64));
        let frames = near.saturating_sub(tables) / (PAGE_BYTES + frames::INFO_BYTES) as u64;
        // A heap whose tables fill the budget still moves, slowly. It takes no new values.
        self.frames.set_limit(u32::try_from(frames).unwrap_or(u32::MAX).max(FRAMES_MIN));
        let least = u64::from(FRAMES_MIN) * (PAGE_BYTES + frames::INFO_BYTES) as u64 + near / 128;
        self.segments.bound(near.saturating_sub(least + tables));
    }

    /// Adapts the number of frames after a table has grown that no page needs. No page fault would
    /// free the frames for it, so this wakes the reclaimer.
    #[cold]
    fn adapt(&self) {
        self.fit();
        self.reclaimer.wake();
    }

    pub(crate) fn table_bytes(&self) -> u64 {
        let words = u64::from(self.segments.high_page()) * TABLES_PER_PAGE as u64 + self.checksums.key_bytes();
        let tables = words.next_multiple_of(PAGE_BYTES as u64) + self.segments.table_bytes();
        let objects = self.objects.as_ref().map_or(0, |objects| objects.table_bytes(self.segments.high_page()));
        let charged = self.charged.load(Ordering::Relaxed);
        let marks = ChangedPages::bytes(self.frames.used().count()).next_multiple_of(PAGE_BYTES as u64);
        tables + objects + marks + self.threads.table_bytes() + self.evictor.near_bytes() + charged
    }

    /// Charges the budget with near memory that a collection is about to use for its tables. Fails
    /// with [`FarError::TablesFull`] if the tables would leave too little for pages.
    pub(crate) fn charge(&self, bytes: u64) -> Result<(), FarError> {
        self.charged.fetch_add(bytes, Ordering::Relaxed);
        // An eighth of the budget stays for pages, and a little for the tables of pages.
        let most = self.near.load(Ordering::Relaxed) / 64 * 55;
        if self.table_bytes() > most {
            self.charged.fetch_sub(bytes, Ordering::Relaxed);
            return Err(FarError::TablesFull { bytes });
        }
        self.adapt();
        Ok(())
    }

    /// Charges the budget for a table whose growth cannot fail. A heap whose tables fill the budget
    /// still works, slowly.
    pub(crate) fn charge_anyway(&self, bytes: u64) {
        self.charged.fetch_add(bytes, Ordering::Relaxed);
        self.fit();
    }

    /// Takes back a charge after the collection has freed the memory.
    pub(crate) fn uncharge(&self, bytes: u64) {
        self.charged.fetch_sub(bytes, Ordering::Relaxed);
        self.fit();
    }

    pub(crate) fn reserve(&self) -> Reserve {
        let low = self.frames.low();
        Reserve { low, high: (low + low / 2).max(8) }
    }

    /// Returns a snapshot of the counters and sizes.
    pub(crate) fn stats(&self) -> Stats {
        let (pauses, longest_pause) = self.threads.pauses();
        let (held_back, held_by) = self.evictor.held_back(self).unwrap_or_default();
        let (prefetch_depth, answer_ns) = self.threads.link();
        let switch = self.backend.progress();
        let scrub = self.backend.scrub_stats().unwrap_or_default();
        let protection = self.backend.protection().unwrap_or_default();
        let calls = self.all_call_counts();
        let (resident, _) = self.frames.resident();
        let infos = u64::from(resident) * frames::INFO_BYTES as u64;
        let table_bytes = self.table_bytes() + infos;
        let paths = self.objects.as_ref().and_then(|objects| objects.paths.as_ref());
        let (value_pages, pages_to_come_whole) = self.objects.as_ref().map_or((0, 0), |objects| objects.log.in_use());
        let of_paths = |count: fn(&Paths) -> &AtomicU64| paths.map_or(0, |paths| count(paths).load(Ordering::Relaxed));
        Stats {
            near_limit_bytes: self.near.load(Ordering::Relaxed),
            near_bytes: u64::from(resident) * PAGE_BYTES as u64 + table_bytes,
            table_bytes,
            pages: u64::from(self.segments.high_page()),
            value_pages: u64::from(value_pages),
            pages_to_come_whole: u64::from(pages_to_come_whole),
            misses: self.threads.sum(|counters| &counters.misses),
            object_misses: self.threads.sum(|counters| &counters.object_misses),
            early_misses: of_paths(|paths| &paths.utility.early),
            access_rates: core::array::from_fn(|tenth| {
                paths.map_or(0, |paths| paths.rates[tenth].load(Ordering::Relaxed))
            }),
            left_to_come_whole: of_paths(|paths| &paths.by_page),
            used_bytes: of_paths(|paths| &paths.used_bytes),
            whole_pages: self.threads.sum(|counters| &counters.whole_pages),
            fetched_bytes: self.threads.sum(|counters| &counters.fetched_bytes),
            written_pages: self.evictor.written.load(Ordering::Relaxed),
            clean_pages: self.evictor.clean.load(Ordering::Relaxed),
            dead_pages: self.evictor.dead.load(Ordering::Relaxed),
            evicting: Duration::from_nanos(self.evictor.cpu_ns.load(Ordering::Relaxed)),
            taken_back: self.threads.sum(|counters| &counters.rescued),
            throttled: self.threads.sum(|counters| &counters.throttled),
            pauses,
            longest_pause,
            held_back,
            held_by: held_by.cast_unsigned(),
            moved_values: self.objects.as_ref().map_or(0, |objects| objects.moved.load(Ordering::Relaxed)),
            vacant_pages: self.vacancies.count(),
            discarded_pages: self.evictor.discarded.load(Ordering::Relaxed),
            lost_values: self.threads.sum(|counters| &counters.lost_values),
            pinned_bytes: self.pinned_bytes(),
            prefetches: self.threads.sum(|counters| &counters.prefetches),
            prefetches_used: self.threads.sum(|counters| &counters.prefetches_used),
            prefetches_unused: self.evictor.ahead.load(Ordering::Relaxed),
            prefetch_depth,
            answer_time: Duration::from_nanos(answer_ns),
            pool_switches: switch.switches,
            pool_pages_to_move: switch.pages,
            pool_pages_moved: switch.moved_pages,
            scrubbed_pages: scrub.looked_pages,
            scrub_wrong_pages: scrub.wrong_pages,
            scrub_mended_pages: scrub.mended_pages,
            scrub_turns: scrub.turns,
            scrub_age: scrub.turn_age().unwrap_or_default(),
            missing_legs: protection.missing_legs,
            exposed_pages: protection.exposed_pages,
            restored_pages: protection.restored_pages,
            calls_at_server: calls.at_server,
            calls_at_client: calls.at_client,
        }
    }

    /// Drops one reference to the heap's state; the last one destroys it.
    ///
    /// # Safety
    /// The caller had a reference, is in no scope of the heap, and does not use it afterwards.
    pub(crate) unsafe fn unreference(core: *const HeapInner) {
        // SAFETY: the caller's reference still keeps it.
        if unsafe { &*core }.references.fetch_sub(1, Ordering::AcqRel) == 1 {
            if !SERVES.get() {
                // SAFETY: that was the last reference.
                return unsafe { HeapInner::destroy(core.cast_mut()) };
            }
            // A thread of the heap woke a task, and that dropped the last reference. The thread
            // cannot join itself, so another one destroys the heap. If that cannot be spawned, the
            // heap is leaked.
            let address = HeapInnerPointer(core);
            let _ = std::thread::Builder::new().spawn(move || {
                let address = address;
                // SAFETY: as above.
                unsafe { HeapInner::destroy(address.0.cast_mut()) };
            });
        }
    }

    /// # Safety
    /// No reference is left; threads that dropped the last values may still be leaving their scope.
    unsafe fn destroy(core: *mut HeapInner) {
        {
            // SAFETY: it exists until the end of this function; others may still use it, until all is quiet.
            let core = unsafe { &*core };
            // From here on, threads that end do not find the heap.
            threads::unregister(core.serial);
            registry::set(core.first_page, core.numbers(), core::ptr::null_mut());
            core.reclaimer.stop();
            core.poller.stop();
            core.stats_thread.stop();
            core.switcher.stop();
            // The last thing that a thread does in a heap is to leave its scope.
            let mut backoff = Backoff::new(core.patience);
            while !core.threads.is_quiet() {
                if backoff.wait().is_err() {
                    // A scope was forgotten (`mem::forget`). Then so is the heap.
                    return;
                }
            }
            core.threads.close_lanes();
            core.close_channels();
            core.backend.release();
        }
        // SAFETY: made by `Box::into_raw`. Only one caller gets here, because the count reached
        // zero once. Nobody uses the `HeapInner` any more.
        let core = unsafe { Box::from_raw(core) };
        let (first, numbers) = (core.first_page, core.numbers());
        drop(core);
        registry::give_back(first, numbers);
    }
}

/// A collection's reference to its heap, which exists at least as long as this.
pub(crate) struct HeapRef(NonNull<HeapInner>);

// SAFETY: a reference to the `HeapInner`, which is made to be shared. The reference count decides
// when that is freed.
unsafe impl Send for HeapRef {}
// SAFETY: as above.
unsafe impl Sync for HeapRef {}

impl HeapRef {
    /// Makes a reference to the heap of this scope.
    pub(crate) fn of(scope: &Scope<'_>) -> HeapRef {
        scope.core.references.fetch_add(1, Ordering::Relaxed);
        scope.core.heap_refs.fetch_add(1, Ordering::Relaxed);
        HeapRef(NonNull::from(scope.core))
    }

    #[inline]
    pub(crate) fn core(&self) -> &HeapInner {
        // SAFETY: our reference keeps it.
        unsafe { self.0.as_ref() }
    }

    /// Fails with [`FarError::OtherHeap`] if the scope is of another heap.
    #[inline]
    pub(crate) fn check(&self, scope: &Scope<'_>) -> Result<(), FarError> {
        if core::ptr::eq(scope.core, self.0.as_ptr()) { Ok(()) } else { Err(FarError::OtherHeap) }
    }
}

impl Drop for HeapRef {
    fn drop(&mut self) {
        self.core().heap_refs.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: not used afterwards. If a scope of this thread is open, it is of a `Heap`, which has a reference too.
        unsafe { HeapInner::unreference(self.0.as_ptr()) };
    }
}

/// Back-off for a wait that should be short; it errs after a time limit.
pub(crate) struct Backoff {
    rounds: u32,
    limit: Duration,
    since: Option<Instant>,
}

impl Backoff {
    pub(crate) fn new(limit: Duration) -> Backoff {
        Backoff { rounds: 0, limit, since: None }
    }

    /// Checks whether the wait has taken more than 500 ms: longer than contention alone explains.
    pub(crate) fn is_long(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() > Duration::from_millis(500))
    }

    /// Waits for a moment that grows from call to call: spins, then yields, then sleeps for 50 µs.
    /// Fails with [`FarError::Stalled`] after the limit.
    pub(crate) fn wait(&mut self) -> Result<(), FarError> {
        self.rounds += 1;
        match self.rounds {
            0..=64 => core::hint::spin_loop(),
            65..=256 => std::thread::yield_now(),
            _ => self.wait_by(|| std::thread::sleep(Duration::from_micros(50)))?,
        }
        Ok(())
    }

    /// Calls `sleep`, or fails with [`FarError::Stalled`] if the limit has passed since the first
    /// call.
    pub(crate) fn wait_by(&mut self, sleep: impl FnOnce()) -> Result<(), FarError> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.limit {
            return Err(FarError::Stalled { after: since.elapsed() });
        }
        sleep();
        Ok(())
    }
}
