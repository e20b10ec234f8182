//! The heap: far pages, near frames, and the table that joins them.
//!
//! | file | decides |
//! |---|---|
//! | `memory` | address space |
//! | `frames` | which near memory is free |
//! | `segments` | which far addresses are in use |
//! | `checksums` | whether what comes from the pool is what was taken there |
//! | `threads` | who is inside a scope, and since when |
//! | `objects` | who makes and frees values |
//! | `shares` | how many owners they have |
//! | `runs` | the same for collections that need no slots |
//! | `access` | what is wanted of a page |
//! | `room` | who makes room, and who waits for it |
//! | `fetch`, `io` | how what is far comes near, waited for or not |
//! | `arrival`, `waiters`, `poller` | how tasks wait |
//! | `gather`, `attempt`, `look_ups` | how they wait for many values, for those that only looking finds, and for many of those |
//! | `pins` | what stays near without a scope |
//! | `evictor`, `reclaimer` | who leaves, and when |
//! | `once` | what leaves first, because it is used once |
//! | `throttle` | how threads wait for room |
//! | `directory` | which heap a far pointer belongs to |
//! | `write_back` | what the pool has before somebody else looks at it |
//! | `errands` | what the heap does for tasks while they wait |
//! | `switcher` | where far is from now on |
//! | `publisher` | who sees from outside how it is doing |
//! | `raw`, `retired` | objects of collections: slots that others use meanwhile, and when what they named is freed |

mod access;
mod arrival;
mod attempt;
mod checksums;
mod directory;
mod drops;
mod errands;
mod evictor;
mod fetch;
mod frames;
mod gather;
mod io;
mod look_ups;
mod memory;
mod objects;
mod once;
mod pins;
mod poller;
mod publisher;
mod raw;
mod reclaimer;
mod retired;
mod room;
mod runs;
mod scope;
mod scopes;
mod segments;
mod shares;
mod switcher;
mod threads;
mod throttle;
mod verify;
mod waiters;
mod write_back;

pub(crate) use access::{Want, count_use};
pub(crate) use arrival::Arrival;
pub(crate) use attempt::{NOT_NEAR, Time, attempt};
pub(crate) use directory::heap_of;
pub(crate) use drops::Panics;
pub(crate) use frames::{Purse, launder};
pub use gather::Batches;
pub(crate) use io::{Flight, Landing};
pub(crate) use memory::{Table, Zeroed};
pub(crate) use objects::{Bury, drop_collection, drop_far, drop_far_with, dropped_in_place, take, take_with};
pub(crate) use once::Once;
pub(crate) use pins::{Bring, Pin};
pub(crate) use raw::{Slot, SlotCell};
pub(crate) use retired::Retired;
pub(crate) use runs::{free_run, lose_run};
pub use scope::Scope;
pub(crate) use segments::Unit;
pub(crate) use shares::{ShareKey, unshare};
pub use switcher::PoolSwitch;
pub(crate) use threads::{Record, add, count};
pub use write_back::FarRange;

use crate::config::{Builder, Config};
use crate::error::{AllocError, BuildError, FarError};
use crate::offload::Offload;
use crate::plane::Plane;
use crate::plane::object::{Objects, Paths};
use crate::ptr::{FarArc, FarBox, FarPtr};
use crate::stats::Stats;
use checksums::Checksums;
use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use errands::Errands;
use evictor::{Evictor, Vacancies};
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Health, Opener, SwitchBackend};
use frames::Frames;
use poller::Poller;
use publisher::Publisher;
use reclaimer::Reclaimer;
use segments::Segments;
use shares::Shares;
use std::sync::Arc;
use std::time::Instant;
use switcher::Switcher;
use threads::Threads;
use throttle::Throttle;
use waiters::Waiters;

/// A budget of near memory, a pool of far memory, and values that are in one or the other.
///
/// Values keep the heap's memory alive: a heap that is dropped before its values ends with the last of them.
pub struct Heap {
    core: NonNull<Core>,
}

// SAFETY: a heap is a reference to its core, which is made to be shared; the count of references decides when it goes.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

/// What heap, scopes and far pointers share.
pub(crate) struct Core {
    /// Never given twice.
    pub(crate) serial: u64,
    /// Number of its first page among the pages of all heaps.
    pub(crate) first_page: u32,
    /// Its pages. All page numbers inside the heap count from `first_page`; they are those of the region, too.
    pub(crate) pages: u32,
    /// A frame word per page.
    pub(crate) words: Table<AtomicU64>,
    pub(crate) checksums: Checksums,
    pub(crate) frames: Frames,
    pub(crate) segments: Segments,
    /// Of the object plane.
    pub(crate) objects: Option<Objects>,
    shares: Shares,
    pub(crate) threads: Threads,
    /// See `threads`.
    pub(crate) epoch: AtomicU64,
    pub(crate) evictor: Evictor,
    pub(crate) reclaimer: Reclaimer,
    pub(crate) throttle: Throttle,
    pub(crate) waiters: Waiters,
    pub(crate) poller: Poller,
    errands: Errands,
    publisher: Publisher,
    pub(crate) vacancies: Vacancies,
    /// Values whose destructor has to wait.
    graves: objects::Graves,
    pub(crate) backend: Arc<SwitchBackend>,
    /// Of other pools for it.
    opener: Opener,
    switcher: Switcher,
    pub(crate) offload: Offload,
    pub(crate) patience: Duration,
    pub(crate) near: AtomicU64,
    /// Near memory of collections' tables.
    charged: AtomicU64,
    /// One for the [`Heap`], one for each segment with objects, one for each object that has a handle, and one for each [`Anchor`].
    pub(crate) references: AtomicU64,
    anchors: AtomicU64,
    /// The [`Heap`] is gone.
    closed: AtomicBool,
}

/// For threads that are made for a heap.
pub(crate) struct CoreAddress(pub(crate) *const Core);
// SAFETY: the core is `Sync`; `destroy` stops the threads that use it.
unsafe impl Send for CoreAddress {}

thread_local! {
    /// This thread was made for a heap, which waits for its end.
    pub(crate) static SERVES: Cell<bool> = const { Cell::new(false) };
}

/// Free frames to keep.
#[derive(Clone, Copy)]
pub(crate) struct Reserve {
    /// Below this, the reclaimer begins.
    pub(crate) low: u32,
    /// At this, it ends.
    pub(crate) high: u32,
}

impl Heap {
    /// How to make one.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(crate) fn from_config(config: Config) -> Result<Heap, BuildError> {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let backend = Arc::new(SwitchBackend::new(config.opener.open()?).map_err(FarError::from)?);
        let pages = config.far_pages as u32;
        let frames = Frames::new(config.frames, config.paranoid)?;
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
        let (words, segments) = (Table::new(pages as usize)?, Segments::new(pages, bytes_per_page)?);
        let numbers = config.far_pages + u64::from(config.handles);
        let first_page = directory::reserve(numbers)
            .ok_or(BuildError::Argument("the heaps of this process have used up 16 TiB of far addresses"))?;
        let core = Box::new(Core {
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            first_page,
            pages,
            words,
            checksums,
            frames,
            segments,
            objects,
            shares: Shares::default(),
            threads: Threads::default(),
            epoch: AtomicU64::new(1),
            evictor: Evictor::new(config.near),
            reclaimer: Reclaimer::new(),
            throttle: Throttle::default(),
            waiters: Waiters::default(),
            poller: Poller::new(),
            errands: Errands::default(),
            publisher: Publisher::default(),
            vacancies: Vacancies::default(),
            graves: objects::Graves::default(),
            backend,
            opener: config.opener,
            switcher: Switcher::default(),
            offload: Offload::default(),
            patience: config.patience,
            near: AtomicU64::new(config.near),
            charged: AtomicU64::new(0),
            references: AtomicU64::new(1),
            anchors: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        core.fit();
        let core = Box::into_raw(core);
        directory::set(first_page, numbers, core);
        // SAFETY: just made, and gone only after `destroy` has taken it out of the registry and stopped the reclaimer.
        let heap = unsafe {
            threads::register(&*core);
            Heap { core: NonNull::new_unchecked(core) }
        };
        heap.core().reclaimer.start(heap.core())?;
        if let Some(name) = config.name {
            heap.core().publisher.start(heap.core(), &name, config.plane)?;
        }
        Ok(heap)
    }

    #[inline]
    pub(crate) fn core(&self) -> &Core {
        // SAFETY: the reference that this heap counts as keeps it.
        unsafe { self.core.as_ref() }
    }

    /// Begins a scope: as long as it lasts, values that are dereferenced with it stay where they are.
    ///
    /// Scopes nest. A scope can bring a sixteenth of the near memory near (or 8 MiB, if that is less), and mostly a quarter, before
    /// [`FarError::NearFull`] tells to end it or to [renew](Scope::renew) it; scopes that bring much at the same time share that.
    #[inline]
    pub fn enter(&self) -> Scope<'_> {
        Scope::new(self.core())
    }

    /// Puts a value into the heap. It may leave for far memory as soon as no scope uses it.
    ///
    /// A value with pointers to memory outside of the heap (`String`, `Vec`) takes along only its own bytes.
    pub fn alloc<T: Send + 'static>(&self, value: T) -> Result<FarBox<T>, AllocError<T>> {
        FarBox::new_in(self.core(), value)
    }

    /// The same for a value with several owners.
    pub fn alloc_shared<T: Send + Sync + 'static>(&self, value: T) -> Result<FarArc<T>, AllocError<T>> {
        self.alloc(value).map(FarArc::from)
    }

    /// Begins to bring these values near, and does not wait: for values that will be needed soon. How many pages (or large
    /// values, or small ones of the [object plane](crate::Plane::Object)) are on their way now. It is advice: what is near, belongs to
    /// another heap, or finds no room, is passed over.
    pub fn prefetch<'a, P: FarPtr + 'a>(&self, values: impl IntoIterator<Item = &'a P>) -> usize {
        let core = self.core();
        let mut numbers = values.into_iter().filter_map(|value| value.pointer().number_in(core));
        let mut begun = 0;
        loop {
            // Before anything begins: the iterator is a user's, and may use the values itself, or panic.
            let some: Vec<u32> = numbers.by_ref().take(fetch::AHEAD_MAX).collect();
            if some.is_empty() {
                return begun;
            }
            begun += core.prefetch(core.record(), some) as usize;
            if !core.may_go_ahead(core.record()) {
                return begun;
            }
        }
    }

    /// Changes the near budget. A smaller one is reached as pages leave; that takes longer the more is in use.
    pub fn set_near(&self, bytes: u64) {
        let core = self.core();
        core.near.store(bytes.max(crate::config::NEAR_MIN), Ordering::Relaxed);
        core.fit();
        core.reclaimer.wake();
    }

    /// How it is doing.
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// How the pool is: degraded while a server of a stripe is gone, or while a leg of a mirror lacks something.
    pub fn health(&self) -> Health {
        self.core().backend.health()
    }

    /// Moves everything that is far to another pool, `url` as in [`Builder::pool`](crate::Builder::pool), while the heap is used; it returns when the move has begun.
    ///
    /// Until it is over the present pool holds everything: whatever happens to the new one, nothing is lost but the move. For that time
    /// both need the memory, and each page that leaves is written twice. A new pool that is full, or dies, ends the move, and the
    /// present one stays.
    pub fn switch_pool(&self, url: impl Into<String>) -> Result<PoolSwitch, BuildError> {
        let core = self.core();
        core.switcher.start(&core.backend, &core.opener.elsewhere(url))
    }

    /// For tests: checks everything that the heap believes of itself, and panics where it is wrong. No other thread
    /// uses the heap meanwhile (threads that did are joined), and this one is in no scope.
    pub fn verify(&self) {
        self.core().verify();
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        let core = self.core();
        let panics = core.bury_all(true);
        core.closed.store(true, Ordering::SeqCst);
        // SAFETY: not used afterwards.
        unsafe { Core::unreference(self.core.as_ptr()) };
        panics.resume();
    }
}

impl core::fmt::Debug for Heap {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Heap({:?})", self.stats())
    }
}

/// Bytes of the tables that every heap has for each page below the highest that was used: its word and its digest.
const TABLES_PER_PAGE: usize = size_of::<AtomicU64>() + Checksums::BYTES_PER_PAGE;

/// A heap has so many frames whatever its tables take.
const FRAMES_MIN: u32 = 32;

impl Core {
    /// This thread's record.
    #[inline]
    pub(crate) fn record(&self) -> &Record {
        self.threads.mine(self.serial, || self.adapt())
    }

    /// Numbers that slots of this heap have: its pages, then its handles.
    fn numbers(&self) -> u64 {
        u64::from(self.pages) + self.objects.as_ref().map_or(0, |objects| u64::from(objects.handles.count()))
    }

    /// The number within this heap of a page or a handle among those of all heaps, if it has it.
    pub(crate) fn number_of(&self, number: u32) -> Option<u32> {
        let number = number.wrapping_sub(self.first_page);
        (u64::from(number) < self.numbers()).then_some(number)
    }

    /// Does an object live in this unit? The caller owns it.
    pub(crate) fn is_live(&self, unit: Unit) -> bool {
        match &self.objects {
            Some(objects) if self.segments.is_log(unit.page) => objects.log.word(unit.page).live() > 0,
            _ => self.segments.is_live(unit),
        }
    }

    /// Adapts the number of frames to the budget and to what the tables cost now.
    pub(crate) fn fit(&self) {
        let near = self.near.load(Ordering::Relaxed);
        // In steps: a frame that is given back for every page of tables would cost more than what the steps waste.
        let tables = self.table_bytes().next_multiple_of((near / 256).max(PAGE_BYTES as u64));
        let frames = near.saturating_sub(tables) / (PAGE_BYTES + frames::INFO_BYTES) as u64;
        // A heap whose tables fill the budget still moves, slowly. It takes no new values.
        self.frames.set_limit(u32::try_from(frames).unwrap_or(u32::MAX).max(FRAMES_MIN));
        let least = u64::from(FRAMES_MIN) * (PAGE_BYTES + frames::INFO_BYTES) as u64 + near / 128;
        self.segments.bound(near.saturating_sub(least + tables));
    }

    /// The same when a table has grown that no page needs: then nobody else makes the room.
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
        tables + objects + self.threads.table_bytes() + self.evictor.near_bytes() + charged
    }

    /// A collection is about to use so much near memory for its tables.
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

    /// The same for what cannot fail. A heap whose tables fill the budget still moves, slowly.
    pub(crate) fn charge_anyway(&self, bytes: u64) {
        self.charged.fetch_add(bytes, Ordering::Relaxed);
        self.fit();
    }

    /// It has given back what it charged.
    pub(crate) fn uncharge(&self, bytes: u64) {
        self.charged.fetch_sub(bytes, Ordering::Relaxed);
        self.fit();
    }

    pub(crate) fn reserve(&self) -> Reserve {
        let low = self.frames.low();
        Reserve { low, high: (low + low / 2).max(8) }
    }

    fn stats(&self) -> Stats {
        let (pauses, longest_pause) = self.threads.pauses();
        let (held_back, held_by) = self.evictor.held_back(self).unwrap_or_default();
        let (prefetch_depth, answer_ns) = self.threads.link();
        let switch = self.backend.progress();
        let scrub = self.backend.scrubbed().unwrap_or_default();
        let protection = self.backend.protection().unwrap_or_default();
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
            early_misses: of_paths(|paths| &paths.price.early),
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
            taken_back: self.threads.sum(|counters| &counters.taken_back),
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
        }
    }

    /// One reference less; the last one ends the heap.
    ///
    /// # Safety
    /// The caller had a reference, is in no scope of the heap, and does not use it afterwards.
    pub(crate) unsafe fn unreference(core: *const Core) {
        // SAFETY: the caller's reference still keeps it.
        if unsafe { &*core }.references.fetch_sub(1, Ordering::AcqRel) == 1 {
            if !SERVES.get() {
                // SAFETY: that was the last one.
                return unsafe { Core::destroy(core.cast_mut()) };
            }
            // A thread of a heap woke a task, and with that ended it. The thread cannot wait for itself. If there is no other, the
            // heap stays.
            let address = CoreAddress(core);
            let _ = std::thread::Builder::new().spawn(move || {
                let address = address;
                // SAFETY: as above.
                unsafe { Core::destroy(address.0.cast_mut()) };
            });
        }
    }

    /// # Safety
    /// No reference is left; threads that dropped the last values may still be leaving their scope.
    unsafe fn destroy(core: *mut Core) {
        {
            // SAFETY: it exists until the end of this function; others may still use it, until all is quiet.
            let core = unsafe { &*core };
            // From here on threads that end do not find it.
            threads::unregister(core.serial);
            directory::set(core.first_page, core.numbers(), core::ptr::null_mut());
            core.reclaimer.stop();
            core.poller.stop();
            core.publisher.stop();
            core.switcher.stop();
            // The last thing that a thread does in a heap is to leave its scope.
            let mut patience = Patience::new(core.patience);
            while !core.threads.is_quiet() {
                if patience.wait().is_err() {
                    // A scope was forgotten (`mem::forget`). Then so is the heap.
                    return;
                }
            }
            core.threads.close_lanes();
            core.close_channels();
            core.backend.release();
        }
        // SAFETY: made by `Box::into_raw`, and nobody else comes here: the count reached zero once. Nobody uses it any more.
        let core = unsafe { Box::from_raw(core) };
        let (first, numbers) = (core.first_page, core.numbers());
        drop(core);
        directory::give_back(first, numbers);
    }
}

/// What a collection has of its heap: it exists as long as this does.
pub(crate) struct Anchor(NonNull<Core>);

// SAFETY: a reference to the core, which is made to be shared; the count of references decides when it goes.
unsafe impl Send for Anchor {}
// SAFETY: as above.
unsafe impl Sync for Anchor {}

impl Anchor {
    /// The heap of this scope.
    pub(crate) fn of(scope: &Scope<'_>) -> Anchor {
        scope.core.references.fetch_add(1, Ordering::Relaxed);
        scope.core.anchors.fetch_add(1, Ordering::Relaxed);
        Anchor(NonNull::from(scope.core))
    }

    #[inline]
    pub(crate) fn core(&self) -> &Core {
        // SAFETY: our reference keeps it.
        unsafe { self.0.as_ref() }
    }

    /// Is it a scope of this heap?
    #[inline]
    pub(crate) fn check(&self, scope: &Scope<'_>) -> Result<(), FarError> {
        if core::ptr::eq(scope.core, self.0.as_ptr()) { Ok(()) } else { Err(FarError::OtherHeap) }
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        self.core().anchors.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: not used afterwards. If a scope of this thread is open, it is of a `Heap`, which has a reference too.
        unsafe { Core::unreference(self.0.as_ptr()) };
    }
}

/// Waits for something that is about to happen, and gives up after a while.
pub(crate) struct Patience {
    rounds: u32,
    limit: Duration,
    since: Option<Instant>,
}

impl Patience {
    pub(crate) fn new(limit: Duration) -> Patience {
        Patience { rounds: 0, limit, since: None }
    }

    /// Has it taken longer than anything but waiting for each other takes?
    pub(crate) fn is_long(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() > Duration::from_millis(500))
    }

    /// A moment; longer each time.
    pub(crate) fn wait(&mut self) -> Result<(), FarError> {
        self.rounds += 1;
        match self.rounds {
            0..=64 => core::hint::spin_loop(),
            65..=256 => std::thread::yield_now(),
            _ => self.wait_by(|| std::thread::sleep(Duration::from_micros(50)))?,
        }
        Ok(())
    }

    /// Waits in this way, unless it has waited too long.
    pub(crate) fn wait_by(&mut self, sleep: impl FnOnce()) -> Result<(), FarError> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.limit {
            return Err(FarError::Stalled { after: since.elapsed() });
        }
        sleep();
        Ok(())
    }
}
