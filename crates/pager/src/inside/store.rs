//! The pool, as the pager uses it: lanes that any thread may borrow, and the handling of pages that
//! arrive.
//!
//! A demand read is submitted first, pages ahead of need behind it. The thread that needs a page
//! polls its lane until that page is near and goes on. Pages still in flight are completed by the
//! next thread that polls the lane.

use super::call::Context;
use super::evict::{EvictionSize, make_room};
use super::lock::{Guard, SpinLock};
use super::runtime::{RUNTIME, Runtime, fail};
use super::switching::PoolLocation;
use super::sync::{AtomicU64, AtomicUsize, Ordering, Wait, tid};
use crate::control::{FaultMode, exit};
use crate::window;
use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use core::mem::MaybeUninit;
use core::ops::{Deref, DerefMut};
use core::time::Duration;
use farfield_core::page_word::{PageWord, State};
use farfield_core::policy::replacement::{Gclock, ReplacementPolicy};
use farfield_core::{PageId, checksum, geometry::PAGE_BYTES};
use farfield_os::{Errno, uffd::Track};
use farfield_pool::{
    Backend, Buffer, Completion, Health, Lane, LaneRequest, Mapped, Op, PoolError, Priority, Protection, ScrubStats,
    SwitchBackend,
};

/// Maximum number of lanes of one process.
const LANES: usize = 3;
/// Number of one-page buffers of a lane; `RUNS` is that of longer ones for what leaves, and
/// `AHEAD_RUNS` for what is read ahead. Pages that leave are near until the pool has them, so fewer
/// of them are on their way.
const SINGLES: usize = 32;
const RUNS: usize = 6;
const AHEAD_RUNS: usize = 16;
/// Number of pages in a longer buffer.
pub const RUN_PAGES: usize = 16;
/// Maximum number of pages loaded at once. One system call maps them, and their copies fit the
/// signal stack and just fit the first-level cache.
const LOAD_PAGES: usize = 8;
/// Recent share of victims that differed from their far copy, in 1/256, above which arriving pages
/// are expected to be written. (With a lower one, programs that read two pages for each that they
/// write pay.)
const MOST: u32 = 160;
/// Time that the pool may take for one operation.
pub const DEADLINE: Duration = Duration::from_secs(20);

const TAG_PAGE: u64 = (1 << 48) - 1;
const TAG_READ: u64 = 1 << 60;
const TAG_AHEAD: u64 = 1 << 61;
const TAG_WRITE: u64 = 1 << 62;
const TAG_DISCARD: u64 = 1 << 63;

/// Lane with its buffers, which are made when they are first needed: a short-lived process needs
/// few.
pub struct Channel {
    /// Index of the lane in the store.
    index: usize,
    lane: Box<dyn Lane>,
    done: Vec<Completion>,
    /// Buffers by their use.
    spares: [Spare; 3],
    /// Number of writes submitted and not completed.
    writing: usize,
}

/// What a buffer of a lane is used for.
#[derive(Clone, Copy)]
enum BufferUse {
    /// One page, either way.
    Single,
    /// Pages that leave.
    Run,
    /// Pages that are read ahead.
    AheadRun,
}

/// Buffers of one use that are not in use now.
struct Spare {
    /// Pages of a buffer.
    pages: usize,
    free: Vec<Buffer>,
    unmade: usize,
}

impl Spare {
    fn new(count: usize, pages: usize) -> Spare {
        Spare { pages, free: Vec::with_capacity(count), unmade: count }
    }

    fn take(&mut self) -> Option<Buffer> {
        if self.free.is_empty() && self.unmade > 0 {
            self.unmade -= 1;
            return Some(Buffer::new(self.pages));
        }
        self.free.pop()
    }
}

/// Far memory of this process: the backend and the lanes to it.
pub struct Store {
    backend: SwitchBackend,
    /// Pool where the backend is; `next_location` is the pool that it moves to. Changed only by the
    /// thread that moves it, while it is [held still](SwitchBackend::hold_still).
    pub location: SpinLock<PoolLocation>,
    /// Pool that the backend moves to, if it moves.
    pub next_location: SpinLock<Option<PoolLocation>>,
    /// Lanes: the first ones are open; the rest is opened when all are busy.
    channels: [SpinLock<Option<Channel>>; LANES],
    open: AtomicUsize,
    /// Maximum number of lanes to open.
    lanes_max: AtomicUsize,
    /// Number of operations in flight, for a look without the locks.
    in_flight: AtomicU64,
}

impl Store {
    /// Opens the first lane.
    pub fn new(backend: SwitchBackend, location: PoolLocation) -> Result<Store, PoolError> {
        let first = Channel::open(&backend, 0)?;
        let mut channels = [const { SpinLock::new(None) }; LANES];
        channels[0] = SpinLock::new(Some(first));
        Ok(Store {
            backend,
            location: SpinLock::new(location),
            next_location: SpinLock::new(None),
            channels,
            open: AtomicUsize::new(1),
            lanes_max: AtomicUsize::new(LANES),
            in_flight: AtomicU64::new(0),
        })
    }

    /// Returns the backend.
    pub fn backend(&self) -> &SwitchBackend {
        &self.backend
    }

    fn channel(&self) -> ChannelGuard<'_> {
        let start = tid() as usize;
        let mut wait = Wait::new("a lane to the pool");
        loop {
            let open = self.open.load(Ordering::Acquire);
            for offset in 0..open {
                if let Some(guard) = self.channels[(start + offset) % open].try_lock() {
                    return ChannelGuard(guard);
                }
            }
            if open < self.lanes_max.load(Ordering::Relaxed) && wait.is_long() {
                self.open_another(open);
            }
            wait.pause();
        }
    }

    fn open_another(&self, open: usize) {
        let Some(mut slot) = self.channels[open].try_lock() else { return };
        RUNTIME.vm_sharing.open_descriptors(|| {
            if slot.is_none() {
                match super::arm::with_descriptors(|| Channel::open(&self.backend, open)) {
                    Ok(channel) => {
                        *slot = Some(channel);
                        self.open.store(open + 1, Ordering::Release);
                    }
                    // The process may be another user's by now. It works with fewer lanes as well.
                    Err(_) => self.lanes_max.store(open, Ordering::Relaxed),
                }
            }
        });
    }

    fn open_channels(&self) -> &[SpinLock<Option<Channel>>] {
        &self.channels[..self.open.load(Ordering::Acquire)]
    }

    /// Checks whether the processor loads directly from far memory. Then no thread ever waits for
    /// pages that travel.
    pub fn is_mapped(&self) -> bool {
        self.backend.mapped().is_some()
    }

    /// Brings `page` near, and sets pages `ahead` (which the caller owns, as it owns `page`) on
    /// their way. Blocks until `page` is near.
    ///
    /// Room is made before pages are loaded, or while they travel. Pages ahead of a write are
    /// expected to be written too, and so is every page while most pages leave changed. That saves
    /// the kernel a fault a page, and costs a checksum at eviction if it is wrong. `context` is
    /// that of the thread that needs the page, if it is in a handler.
    pub fn fetch(&self, page: PageId, write: bool, ahead: &[(PageId, usize)], context: Option<&Context>) {
        let runtime = &RUNTIME;
        let write = write || runtime.changed_share.get() > MOST;
        let pages = 1 + ahead.iter().map(|(_, count)| *count as i64).sum::<i64>();
        let Some(mapped) = self.backend.mapped() else {
            runtime.charge(pages);
            let index = self.request(page, write, ahead);
            make_room(runtime, 0, EvictionSize::while_waiting(runtime), context);
            return self.await_page(page, index);
        };
        make_room(runtime, pages, EvictionSize::Batch, context);
        let track = if write { TAG_WRITE } else { 0 };
        self.load(mapped, page, 1, track);
        for &(start, count) in ahead {
            for at in (0..count).step_by(LOAD_PAGES) {
                self.load(mapped, PageId(start.0 + at as u64), (count - at).min(LOAD_PAGES), track | TAG_AHEAD);
            }
        }
    }

    /// Sets pages on their way that the caller owns. Blocks for room only.
    pub fn fetch_ahead(&self, ahead: &[(PageId, usize)], context: Option<&Context>) {
        let runtime = &RUNTIME;
        runtime.charge(ahead.iter().map(|(_, count)| *count as i64).sum());
        let mut channel = self.channel();
        channel.request_ahead(self, ahead, if runtime.changed_share.get() > MOST { TAG_WRITE } else { 0 });
        channel.progress(self);
        drop(channel);
        make_room(runtime, 0, EvictionSize::while_waiting(runtime), context);
    }

    /// Begins to load `page`, which will be wanted in a moment, into the processor's cache, if far
    /// memory can be loaded from.
    pub fn will_need(&self, page: PageId) {
        if let Some(source) = self.backend.mapped().and_then(|mapped| mapped.page(page)) {
            for offset in (0..PAGE_BYTES).step_by(64) {
                // SAFETY: a hint; it cannot fault.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(source.add(offset).cast()) };
            }
        }
    }

    /// Loads a few pages from far memory that the processor can load from: copies them once, checks
    /// them, and puts the copies in their place.
    fn load(&self, mapped: &dyn Mapped, first: PageId, count: usize, tag: u64) {
        let mut copies = MaybeUninit::<PageCopies>::uninit();
        let copies = copies.as_mut_ptr().cast::<u8>();
        for index in 0..count {
            let page = PageId(first.0 + index as u64);
            // SAFETY: `count` is at most LOAD_PAGES.
            let copy = unsafe { copies.add(index * PAGE_BYTES) };
            match mapped.page(page) {
                // SAFETY: mapped far memory stays mapped and unchanged until its owner, this
                // process, writes or discards the page, which it does not while the page is
                // Loading.
                Some(source) => unsafe { core::ptr::copy_nonoverlapping(source, copy, PAGE_BYTES) },
                None if self.backend.health() == Health::Gone => fail_server_gone(),
                // SAFETY: inside `copies`. The server has lost the page, which the checksum will
                // show.
                None => unsafe { core::ptr::write_bytes(copy, 0, PAGE_BYTES) },
            }
            // SAFETY: written just now.
            check(&RUNTIME, page, checksum(unsafe { core::slice::from_raw_parts(copy, PAGE_BYTES) }));
        }
        place(&RUNTIME, first.0 | tag, copies as usize, count);
    }

    /// Requests the pages through a lane, and returns the index of that lane.
    fn request(&self, page: PageId, write: bool, ahead: &[(PageId, usize)]) -> usize {
        let mut channel = self.channel();
        let buffer = channel.take(self, BufferUse::Single);
        let track = if write { TAG_WRITE } else { 0 };
        channel.submit(
            self,
            LaneRequest {
                tag: page.0 | TAG_READ | track,
                priority: Priority::Demand,
                deadline: DEADLINE,
                op: Op::Read { page, buffer },
            },
        );
        channel.request_ahead(self, ahead, track);
        channel.progress(self);
        channel.index
    }

    /// Waits until a page that was requested through the lane at `index` is near.
    fn await_page(&self, page: PageId, index: usize) {
        let mut wait = Wait::new("a page from the pool");
        while RUNTIME.table().word(page).state() == State::Loading {
            // The thread that has the lane brings our page as well as its own.
            let Some(guard) = self.channels[index].try_lock() else {
                wait.pause();
                continue;
            };
            let mut channel = ChannelGuard(guard);
            channel.lane.wait(Duration::from_micros(200));
            channel.progress(self);
            drop(channel);
            // The page may have another owner already, which waits for the lane.
            wait.pause();
        }
    }

    /// Completes what has arrived, on every lane that is free.
    pub fn progress(&self) {
        if self.in_flight.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.take_answers();
    }

    /// Completes what has arrived, on every lane that is free, even if no operation is in flight. A
    /// part of the pool that was silent may have an answer for a lane that nobody uses.
    pub fn take_answers(&self) {
        for channel in self.open_channels() {
            if let Some(channel) = channel.try_lock() {
                ChannelGuard(channel).progress(self);
            }
        }
    }

    /// Returns the health of the pool. Ends the program if the server is gone: pages that can be
    /// loaded without the server would hide that for as long as nothing is written.
    pub fn look_for_server(&self) -> Health {
        if let Some(mut channel) = self.open_channels()[0].try_lock().map(ChannelGuard) {
            channel.lane.wait(Duration::ZERO);
        }
        self.take_answers();
        let health = self.backend.health();
        if health == Health::Gone {
            fail_server_gone();
        }
        health
    }

    /// Returns what the scrub of the pool has done, if the pool has one.
    pub fn scrubbed(&self) -> Option<ScrubStats> {
        self.backend.scrub_stats()
    }

    /// Returns how well the pool protects what it holds, if it does.
    pub fn protection(&self) -> Option<Protection> {
        self.backend.protection()
    }

    /// Locks all lanes, and waits until nothing is in flight. No other thread polls them as long as
    /// the result is held. Lanes also do work that nobody has asked for, and that must not begin
    /// while a snapshot is made.
    pub fn quiesce(&self) -> QuiescentLanes<'_> {
        let mut channels = [const { None }; LANES];
        for (channel, guard) in self.open_channels().iter().zip(&mut channels) {
            let channel = guard.insert(ChannelGuard(channel.lock()));
            while channel.lane.in_flight() > 0 {
                channel.advance(self);
            }
        }
        QuiescentLanes { store: self, channels }
    }

    /// Borrows a lane for writing.
    pub fn writer(&self) -> EgressWriter<'_> {
        EgressWriter { channel: self.channel(), store: self }
    }

    /// Gives back the far memory of a run of pages, and waits until that is done. It must not
    /// overtake a later write of the same pages.
    pub fn discard(&self, page: PageId, count: u64) {
        let mut channel = self.channel();
        let op = Op::Discard { page, count };
        channel.writing += 1;
        channel.submit(
            self,
            LaneRequest { tag: page.0 | TAG_DISCARD, priority: Priority::Background, deadline: DEADLINE, op },
        );
        channel.finish_writes(self);
    }
}

/// Guard of all lanes, with nothing in flight; made by [`Store::quiesce`].
pub struct QuiescentLanes<'a> {
    store: &'a Store,
    channels: [Option<ChannelGuard<'a>>; LANES],
}

impl QuiescentLanes<'_> {
    /// Completes what has arrived, as [`Store::take_answers`] does.
    pub fn take_answers(&mut self) {
        for channel in self.channels.iter_mut().flatten() {
            channel.progress(self.store);
        }
    }
}

/// Lane, borrowed to write pages.
pub struct EgressWriter<'a> {
    channel: ChannelGuard<'a>,
    store: &'a Store,
}

impl EgressWriter<'_> {
    /// Returns a buffer for `pages` pages, at most [`RUN_PAGES`]. Waits for one if all are in use.
    pub fn buffer(&mut self, pages: usize) -> Buffer {
        let buffer_use = if pages == 1 { BufferUse::Single } else { BufferUse::Run };
        let mut buffer = self.channel.take(self.store, buffer_use);
        buffer.set_pages(pages);
        buffer
    }

    /// Takes back a buffer that is not to be written.
    pub fn give_back(&mut self, buffer: Buffer) {
        self.channel.recycle(buffer, false);
    }

    /// Starts writing a sealed buffer at `page`. Its pages are Evicting: they have left when the
    /// pool has them.
    pub fn write(&mut self, page: PageId, buffer: Buffer) {
        self.channel.writing += 1;
        let op = Op::Write { page, buffer };
        let request = LaneRequest { tag: page.0 | TAG_WRITE, priority: Priority::Background, deadline: DEADLINE, op };
        self.channel.submit(self.store, request);
    }

    /// Completes the writes that have ended already.
    pub fn finish(mut self) {
        self.channel.progress(self.store);
    }
}

/// Open channel, locked for the calling thread.
struct ChannelGuard<'a>(Guard<'a, Option<Channel>>);

impl Deref for ChannelGuard<'_> {
    type Target = Channel;
    fn deref(&self) -> &Channel {
        self.0.as_ref().expect("below `open`")
    }
}

impl DerefMut for ChannelGuard<'_> {
    fn deref_mut(&mut self) -> &mut Channel {
        self.0.as_mut().expect("below `open`")
    }
}

impl Channel {
    fn open(backend: &SwitchBackend, index: usize) -> Result<Channel, PoolError> {
        Ok(Channel {
            index,
            lane: backend.open_lane()?,
            done: Vec::with_capacity(256),
            // In the order of their uses.
            spares: [Spare::new(SINGLES, 1), Spare::new(RUNS, RUN_PAGES), Spare::new(AHEAD_RUNS, RUN_PAGES)],
            writing: 0,
        })
    }

    /// Requests runs of pages that nobody waits for.
    fn request_ahead(&mut self, store: &Store, ahead: &[(PageId, usize)], track: u64) {
        for &(start, count) in ahead {
            let mut at = 0;
            while at < count {
                let step = (count - at).min(RUN_PAGES);
                let buffer_use = if step == 1 { BufferUse::Single } else { BufferUse::AheadRun };
                let mut buffer = self.take(store, buffer_use);
                buffer.set_pages(step);
                let page = PageId(start.0 + at as u64);
                let tag = page.0 | TAG_READ | TAG_AHEAD | track;
                let op = Op::Read { page, buffer };
                self.submit(store, LaneRequest { tag, priority: Priority::Background, deadline: DEADLINE, op });
                at += step;
            }
        }
    }

    /// Takes a buffer. Waits for one if all are in use.
    fn take(&mut self, store: &Store, buffer_use: BufferUse) -> Buffer {
        loop {
            if let Some(buffer) = self.spares[buffer_use as usize].take() {
                return buffer;
            }
            self.advance(store);
        }
    }

    /// Completes something, or waits for it a little.
    fn advance(&mut self, store: &Store) {
        if self.progress(store) == 0 {
            self.lane.wait(Duration::from_micros(200));
        }
    }

    fn recycle(&mut self, buffer: Buffer, is_ahead: bool) {
        let buffer_use = match (buffer.capacity(), is_ahead) {
            (1, _) => BufferUse::Single,
            (_, true) => BufferUse::AheadRun,
            (_, false) => BufferUse::Run,
        };
        self.spares[buffer_use as usize].free.push(buffer);
    }

    fn submit(&mut self, store: &Store, request: LaneRequest) {
        store.in_flight.fetch_add(1, Ordering::Relaxed);
        let mut request = request;
        loop {
            match self.lane.submit(request) {
                Ok(()) => return,
                Err(back) => {
                    request = back;
                    self.progress(store);
                }
            }
        }
    }

    fn finish_writes(&mut self, store: &Store) {
        while self.writing > 0 {
            self.advance(store);
        }
    }

    /// Completes what has arrived, and returns the number of completions.
    fn progress(&mut self, store: &Store) -> usize {
        let mut done = core::mem::take(&mut self.done);
        let count = self.lane.poll(&mut done);
        for completion in done.drain(..) {
            if let Err(error) = completion.result {
                fail_pool_lost(error);
            }
            store.in_flight.fetch_sub(1, Ordering::Relaxed);
            if completion.tag & TAG_READ != 0 {
                let buffer = completion.buffer.as_ref().expect("a read returns its buffer");
                arrive(&RUNTIME, completion.tag, buffer);
            } else {
                self.writing -= 1;
                if completion.tag & TAG_WRITE != 0 {
                    let buffer = completion.buffer.as_ref().expect("a write returns its buffer");
                    mark_written(&RUNTIME, PageId(completion.tag & TAG_PAGE), buffer.sums());
                }
            }
            if let Some(buffer) = completion.buffer {
                self.recycle(buffer, completion.tag & TAG_AHEAD != 0);
            }
        }
        self.done = done;
        count
    }
}

#[repr(C, align(64))]
struct PageCopies([u8; LOAD_PAGES * PAGE_BYTES]);

/// Notes that the pages from `first` on, which were Evicting, are in the pool with these checksums.
fn mark_written(runtime: &Runtime, first: PageId, sums: &[u64]) {
    let now = runtime.evictions.load(Ordering::Relaxed);
    let mut new = 0;
    for (page, &sum) in (first.0..).map(PageId).zip(sums) {
        runtime.table().set_sum(page, sum);
        let (old, _) = runtime.table().update(page, |word| Some(word.finish_eviction(now))).expect("always");
        new += i64::from(!old.is_stored());
    }
    runtime.counters().pages_out.fetch_add(sums.len() as u64, Ordering::Relaxed);
    runtime.charge_far(new);
}

/// Checks pages that have arrived and puts them in their place.
fn arrive(runtime: &Runtime, tag: u64, buffer: &Buffer) {
    let first = tag & TAG_PAGE;
    for (index, sum) in buffer.sums().iter().enumerate() {
        check(runtime, PageId(first + index as u64), *sum);
    }
    place(runtime, tag, buffer.bytes().as_ptr() as usize, buffer.pages());
}

/// Checks that `sum` is the checksum with which the page left. Ends the program if not: it must not
/// see the page.
fn check(runtime: &Runtime, page: PageId, sum: u64) {
    let expected = runtime.table().sum(page);
    if sum != expected {
        fail(
            exit::CORRUPT,
            format_args!(
                "page {} came back from far memory with other bytes than were stored (checksum {sum:#x}, expected \
                 {expected:#x}); the program was stopped before it could see them",
                page.0
            ),
        );
    }
}

/// Puts checked pages in their place and counts them.
fn place(runtime: &Runtime, tag: u64, source: usize, pages: usize) {
    let ahead = tag & TAG_AHEAD != 0;
    let track = if tag & TAG_WRITE != 0 { Track::Dirty } else { Track::Clean };
    install(runtime, PageId(tag & TAG_PAGE), source, pages, track, ahead);
    let counters = runtime.counters();
    counters.pages_in.fetch_add(pages as u64, Ordering::Relaxed);
    if ahead {
        counters.prefetched.fetch_add(pages as u64, Ordering::Relaxed);
    }
}

/// Maps `count` pages with bytes from `source` at pages that the caller owns (Loading), and lets
/// them go as near.
pub fn install(runtime: &Runtime, first: PageId, source: usize, count: usize, track: Track, ahead: bool) {
    let armed = runtime.armed();
    let wake = armed.mode == FaultMode::Thread;
    let epoch = runtime.epoch.load(Ordering::SeqCst);
    let address = window::address_of(first);
    let mut at = 0;
    let mut gone = 0;
    let mut present = [false; 64];
    assert!(count <= present.len());
    while at < count {
        let offset = at * PAGE_BYTES;
        // SAFETY: the caller's source holds `count` pages.
        match unsafe { armed.uffd.copy(address + offset, source + offset, count * PAGE_BYTES - offset, track, wake) } {
            Ok(()) => break,
            Err((done, errno)) => {
                at += done / PAGE_BYTES;
                match errno {
                    Errno(libc::EEXIST) => {
                        // The kernel was faster (before faults were ours): its page counts.
                        present[at] = true;
                        at += 1;
                    }
                    // The mapping went away or changed under us: there is nothing to provide.
                    Errno(libc::ENOENT | libc::EINVAL | libc::ESRCH) => {
                        gone = count - at;
                        break;
                    }
                    errno => fail(exit::INTERNAL, format_args!("a page could not be mapped: {errno}")),
                }
            }
        }
    }
    let installed = count - gone;
    for (index, &was_present) in present[..count].iter().enumerate() {
        let page = PageId(first.0 + index as u64);
        if index >= installed {
            runtime.table().update(page, |word| Some(word.cancel_load()));
            continue;
        }
        let dirty = track == Track::Dirty || was_present;
        mark_near(runtime, page, dirty, ahead, epoch);
    }
    if gone > 0 {
        runtime.charge(-(gone as i64));
    }
}

/// Marks a page that the caller owns as near, now that it is in its place.
fn mark_near(runtime: &Runtime, page: PageId, dirty: bool, ahead: bool, epoch: u32) {
    let now = runtime.evictions.load(Ordering::Relaxed);
    let capacity = runtime.near().1 as u64 / PAGE_BYTES as u64;
    let arrival = |word: PageWord| word.arrival(now, capacity, ahead);
    let reuse = |word: PageWord| Gclock.on_arrival(&arrival(word)).state;
    let (old, _) =
        runtime.table().update(page, |word| Some(word.finish_load(dirty, reuse(word), epoch))).expect("always");
    if arrival(old).is_early() {
        runtime.counters().refaults.fetch_add(1, Ordering::Relaxed);
    }
    if !old.is_queued() {
        enqueue(runtime, page);
    }
}

/// Puts a near page at the end of the eviction queue.
pub fn enqueue(runtime: &Runtime, page: PageId) {
    let table = runtime.table();
    runtime.queue.lock().push(page, |stale| {
        table
            .update(stale, |word: PageWord| match word.state() {
                State::Absent | State::Far => Some(word.unqueued()),
                _ => None,
            })
            .is_some()
    });
}

/// Waits a little for a page that another thread is moving.
pub fn wait_for(runtime: &Runtime, wait: &mut Wait) {
    runtime.armed().store.progress();
    wait.pause();
}

fn fail_server_gone() -> ! {
    fail(
        exit::SERVER_LOST,
        format_args!("the memory server is gone; the program needs pages that are there and was stopped"),
    )
}

/// Ends the program because the pool failed: there is nothing to go on with.
pub fn fail_pool_lost(error: PoolError) -> ! {
    let code = match error {
        PoolError::PoolFull { .. } => exit::POOL_FULL,
        PoolError::Corrupt { .. } => exit::CORRUPT,
        _ => exit::SERVER_LOST,
    };
    fail(code, format_args!("{error}; the program needs pages that are there and was stopped"))
}
