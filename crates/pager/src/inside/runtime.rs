//! The state of one process, and its accounts.

use super::clone::VmSharing;
use super::evict::WindowEvictor;
use super::lock::SpinLock;
use super::queue::PageQueue;
use super::store::Store;
use super::sync::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use super::table::PageWordTable;
use super::thread::ThreadTable;
use crate::config::JobConfig;
use crate::control::{FaultMode, JobAccounts, PagingCounters, ProcessSlot, believed};
use crate::space::{PageRange, Space};
use crate::window;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::memory::OwnMemory;
use farfield_os::process::{self, ThreadCount};
use farfield_os::{pagemap::Pagemap, uffd::Uffd};
use farfield_pool::Backend;

/// The one runtime of this process.
pub static RUNTIME: Runtime = Runtime::new();

/// Phase of the runtime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Phase {
    /// Off: the program does not run under us.
    Off = 0,
    /// Far-capable memory is known, the kernel serves its faults, and nothing is far.
    Dormant = 1,
    /// The runtime is on the way to Armed.
    Arming = 2,
    /// We serve the page faults, and pages may be far.
    Armed = 3,
}

/// State that exists only once faults are ours.
pub struct Armed {
    /// The userfaultfd that reports faults.
    pub uffd: Uffd,
    /// Way in which faults are served.
    pub mode: FaultMode,
    /// Reader of the pages' written bits.
    pub pagemap: Pagemap,
    /// Descriptor of this process, for `process_madvise`.
    pub pidfd: i32,
    /// Descriptor of `/dev/null`.
    pub null: i32,
    /// Access to this process's memory that ignores protections.
    pub own_memory: Option<OwnMemory>,
    /// Counter of the threads of this process, ours among them.
    pub threads: Option<ThreadCount>,
    /// Far memory: the pool and our lanes to it.
    pub store: Store,
    /// Eviction buffers; the holder of the lock evicts.
    pub evictor: SpinLock<WindowEvictor>,
}

/// State of this process; [`RUNTIME`] is the only one.
pub struct Runtime {
    phase: AtomicU32,
    config: AtomicPtr<JobConfig>,
    control: AtomicPtr<JobAccounts>,
    slot: AtomicPtr<ProcessSlot>,
    table: AtomicPtr<PageWordTable>,
    armed: AtomicPtr<Armed>,
    /// Threads of the program.
    pub threads: ThreadTable,
    /// Processes that run in the memory of this one.
    pub vm_sharing: VmSharing,
    /// Address space of the window.
    pub space: SpinLock<Space>,
    /// Near pages in order of arrival.
    pub queue: SpinLock<PageQueue>,
    /// Number of evictions so far, modulo 2³²: the clock of [`farfield_core::page_word`].
    pub evictions: AtomicU32,
    /// Epoch of first writes, never 0. It ends whenever a thread that evicts as the
    /// [sole writer](super::sole_writer::SoleWriter) finds that the process has faulted, or has shared
    /// its memory. If such an evictor finds the epoch not ended, no page was written for the first
    /// time in it.
    pub epoch: AtomicU32,
    /// 1 once the monitor thread runs.
    pub monitor: AtomicU32,
    /// 1 once the maintenance thread runs.
    pub maintenance_running: AtomicU32,
    /// Number of threads of ours that run. Each counts itself, and none ever ends.
    pub own_threads: AtomicU64,
    /// Thread that froze the world for a fork, or for another pool; 0 = none.
    pub frozen_by: AtomicU32,
    /// Number of threads inside a fault or an emulated call.
    pub busy: AtomicU32,
    /// End of the program break, as an address.
    pub break_end: SpinLock<usize>,
    /// Process id, cached: it differs from the kernel's in a vfork child.
    pub pid: AtomicU32,
    /// Recent share of victims that had to be read.
    pub dirty_share: RecentShare,
    /// Recent share of victims with a far copy that differed from it.
    pub changed_share: RecentShare,
    /// Bytes that our heap has been charged with.
    heap_charged: AtomicI64,
    /// Minimum that the heap is charged with: the size that it is about to reach.
    heap_expected: AtomicI64,
    /// Ranges that a child of a fork shall find empty (`MADV_WIPEONFORK`).
    pub wiped: SpinLock<Vec<PageRange>>,
    /// The program's own signal actions, by number of the signal less one. For SIGBUS and SIGSYS
    /// these are the actions in force, for the others the program's last handlers.
    pub program_actions: SpinLock<[farfield_os::signals::Action; 64]>,
    /// Whether debug builds go on after a [call of our own](super::own_code) outside of the gate,
    /// as others do. For tests.
    pub is_lenient: core::sync::atomic::AtomicBool,
    /// Device and inode of standard error as the program found it; 0 if there was none.
    standard_error: [AtomicU64; 2],
    /// 256 + exit code, once the program is ending and has released its far memory.
    pub ending: AtomicU32,
}

/// End of the break's area, which starts at the window's first page and has 1 TiB. Behind it are
/// small mappings (3 TiB), then large ones.
const BREAK_PAGES: u64 = 1 << 28;
const SMALL_END: u64 = 1 << 30;

impl Runtime {
    const fn new() -> Runtime {
        let small = PageRange { start: BREAK_PAGES, end: SMALL_END };
        let large = PageRange { start: SMALL_END, end: window::extents::FIRST_PAGE };
        Runtime {
            phase: AtomicU32::new(0),
            config: AtomicPtr::new(core::ptr::null_mut()),
            control: AtomicPtr::new(core::ptr::null_mut()),
            slot: AtomicPtr::new(core::ptr::null_mut()),
            table: AtomicPtr::new(core::ptr::null_mut()),
            armed: AtomicPtr::new(core::ptr::null_mut()),
            threads: ThreadTable::new(),
            vm_sharing: VmSharing::new(),
            space: SpinLock::new(Space::new(small, large)),
            queue: SpinLock::new(PageQueue::empty()),
            evictions: AtomicU32::new(0),
            epoch: AtomicU32::new(1),
            monitor: AtomicU32::new(0),
            maintenance_running: AtomicU32::new(0),
            own_threads: AtomicU64::new(0),
            frozen_by: AtomicU32::new(0),
            busy: AtomicU32::new(0),
            break_end: SpinLock::new(window::BASE),
            pid: AtomicU32::new(0),
            dirty_share: RecentShare::new(),
            changed_share: RecentShare::new(),
            heap_charged: AtomicI64::new(0),
            heap_expected: AtomicI64::new(0),
            wiped: SpinLock::new(Vec::new()),
            program_actions: SpinLock::new(
                [farfield_os::signals::Action { handler: 0, flags: 0, restorer: 0, mask: 0 }; 64],
            ),
            is_lenient: core::sync::atomic::AtomicBool::new(false),
            standard_error: [const { AtomicU64::new(0) }; 2],
            ending: AtomicU32::new(0),
        }
    }

    /// End of the break's part of the window, as an address.
    pub const BREAK_LIMIT: usize = window::BASE + ((BREAK_PAGES as usize) << 12);

    /// Returns the phase of the runtime.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::SeqCst) {
            1 => Phase::Dormant,
            2 => Phase::Arming,
            3 => Phase::Armed,
            _ => Phase::Off,
        }
    }

    /// Moves to another phase if the phase is `from`. Returns whether it was.
    pub fn advance(&self, from: Phase, to: Phase) -> bool {
        self.phase.compare_exchange(from as u32, to as u32, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Sets the state that is known at the start.
    pub fn set_up(
        &self,
        config: &'static JobConfig,
        control: &'static JobAccounts,
        slot: &'static ProcessSlot,
        table: PageWordTable,
    ) {
        self.config.store(core::ptr::from_ref(config).cast_mut(), Ordering::Release);
        self.control.store(core::ptr::from_ref(control).cast_mut(), Ordering::Release);
        self.slot.store(core::ptr::from_ref(slot).cast_mut(), Ordering::Release);
        self.table.store(Box::into_raw(Box::new(table)), Ordering::Release);
        self.pid.store(process::pid() as u32, Ordering::Release);
    }

    /// Takes another slot, in the child of a fork.
    pub fn set_slot(&self, slot: &'static ProcessSlot) {
        self.slot.store(core::ptr::from_ref(slot).cast_mut(), Ordering::Release);
        self.pid.store(process::pid() as u32, Ordering::Release);
    }

    /// Returns the configuration, which the runner has decided for the job.
    pub fn config(&self) -> &'static JobConfig {
        // SAFETY: set before the phase leaves Off and never unmapped; only read.
        unsafe { &*self.config.load(Ordering::Acquire) }
    }

    /// Returns the job's accounts.
    pub fn control(&self) -> &'static JobAccounts {
        // SAFETY: set before the phase leaves Off and never unmapped.
        unsafe { &*self.control.load(Ordering::Acquire) }
    }

    /// Returns this process's slot in the accounts.
    pub fn slot(&self) -> &'static ProcessSlot {
        // SAFETY: set before the phase leaves Off; slots are never unmapped.
        unsafe { &*self.slot.load(Ordering::Acquire) }
    }

    /// Returns the event counts of this process.
    pub fn counters(&self) -> &'static PagingCounters {
        &self.slot().counters
    }

    /// Returns the table of page words and checksums.
    pub fn table(&self) -> &'static PageWordTable {
        // SAFETY: set before the phase leaves Off and never freed.
        unsafe { &*self.table.load(Ordering::Acquire) }
    }

    /// Returns the state that exists when armed. Panics before.
    pub fn armed(&self) -> &'static Armed {
        let armed = self.armed.load(Ordering::Acquire);
        assert!(!armed.is_null());
        // SAFETY: never freed (a forked child leaks its parent's).
        unsafe { &*armed }
    }

    /// Closes and frees what belongs to the parent, in the child of a fork.
    ///
    /// # Safety
    /// No other thread may run, and no reference from [`Runtime::armed`] may be used afterwards.
    pub unsafe fn drop_inherited(&self) {
        let armed = self.armed.swap(core::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: made by `set_armed`, and nobody else looks at it, by the caller.
        let armed = unsafe { Box::from_raw(armed) };
        armed.store.backend().abandon();
        let threads = armed.threads.as_ref().map(ThreadCount::fd);
        let memory = armed.own_memory.as_ref().map(OwnMemory::fd);
        for fd in [armed.pagemap.fd(), armed.pidfd, armed.null].into_iter().chain(threads).chain(memory) {
            farfield_os::file::close(fd);
        }
        armed.evictor.lock().close_inherited();
    }

    /// Checks whether system calls must find their buffers near. In thread mode they need not:
    /// faults inside them are served too.
    pub fn guards(&self) -> bool {
        self.phase() == Phase::Armed && self.armed().mode == FaultMode::Signal
    }

    /// Sets the state that exists when armed.
    pub fn set_armed(&self, armed: Armed) {
        self.armed.store(Box::into_raw(Box::new(armed)), Ordering::Release);
    }

    /// Checks whether this process is a vfork child that borrows its parent's memory.
    pub fn is_borrowed(&self) -> bool {
        self.pid.load(Ordering::Relaxed) != process::pid() as u32
    }

    /// Charges process and job with `pages` more near pages; a negative number takes them off.
    pub fn charge(&self, pages: i64) {
        let bytes = pages * PAGE_BYTES as i64;
        self.slot().near_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.add_near(bytes);
    }

    fn add_near(&self, bytes: i64) {
        let control = self.control();
        let now = control.near_bytes.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes).max(0);
        if bytes > 0 && now as u64 > control.near_peak_bytes.load(Ordering::Relaxed) {
            control.near_peak_bytes.fetch_max(now as u64, Ordering::Relaxed);
        }
    }

    /// Charges process and job with `bytes` more of our own memory.
    pub fn add_meta(&self, bytes: i64) {
        if self.phase() != Phase::Off {
            self.slot().meta_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.control().meta_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.add_near(bytes);
        }
    }

    /// Sets the near bytes of this process to what was measured (dormant), and charges the growth
    /// of our heap.
    pub fn set_near(&self, bytes: i64) {
        let old = self.slot().near_bytes.swap(bytes, Ordering::Relaxed);
        self.add_near(bytes.wrapping_sub(old));
        self.settle_heap();
    }

    /// Returns the bytes that a child of a fork would have near: pages, and our own memory.
    pub fn copy_bytes(&self) -> i64 {
        let slot = self.slot();
        believed(&slot.near_bytes) + believed(&slot.meta_bytes)
    }

    /// Charges the job with a child that is about to be forked, or takes that back (negative).
    pub fn reserve(&self, bytes: i64) {
        self.add_near(bytes);
    }

    /// Takes over, in the child of a fork, the parent's `near` bytes of pages, which came with it.
    /// `reserved` bytes have been charged for the child.
    pub fn adopt(&self, near: i64, reserved: i64) {
        let heap = super::heap::HEAP_BYTES.load(Ordering::Relaxed);
        self.heap_charged.store(heap, Ordering::Relaxed);
        self.heap_expected.store(0, Ordering::Relaxed);
        let slot = self.slot();
        slot.near_bytes.store(near, Ordering::Relaxed);
        slot.meta_bytes.store(heap, Ordering::Relaxed);
        self.control().meta_bytes.fetch_add(heap, Ordering::Relaxed);
        self.reserve(near + heap - reserved);
    }

    /// Charges the growth of our heap before it happens, until `growth` 0 says that no growth is
    /// expected any more.
    pub fn expect_heap(&self, growth: i64) {
        let heap = super::heap::HEAP_BYTES.load(Ordering::Relaxed);
        self.heap_expected.store(if growth > 0 { heap + growth } else { 0 }, Ordering::Relaxed);
        self.settle_heap();
    }

    /// Charges the growth of our heap since the last call.
    pub fn settle_heap(&self) {
        let heap = super::heap::HEAP_BYTES.load(Ordering::Relaxed);
        let heap = heap.max(self.heap_expected.load(Ordering::Relaxed));
        let charged = self.heap_charged.swap(heap, Ordering::Relaxed);
        self.add_meta(heap - charged);
    }

    /// Charges process and job with `pages` more far pages; a negative number takes them off.
    pub fn charge_far(&self, pages: i64) {
        let bytes = pages * PAGE_BYTES as i64;
        self.slot().far_bytes.fetch_add(bytes, Ordering::Relaxed);
        let control = self.control();
        let now = control.far_bytes.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes).max(0);
        if bytes > 0 && now as u64 > control.far_peak_bytes.load(Ordering::Relaxed) {
            control.far_peak_bytes.fetch_max(now as u64, Ordering::Relaxed);
        }
    }

    /// Returns the near bytes of the job, and the limit. Our own tables count as near, but they
    /// cannot leave. The part of them beyond half of the limit (memory touched very sparsely) is
    /// not taken from the program's pages; the report shows it.
    pub fn near(&self) -> (i64, i64) {
        let control = self.control();
        let limit = self.config().near_limit();
        let excess = (believed(&control.meta_bytes) - limit / 2).max(0);
        (believed(&control.near_bytes), limit + excess)
    }

    /// Returns the bytes that the reclaim thread keeps free below the limit: 1/64 of it, but at
    /// least 1 MiB and at most 32 MiB.
    pub fn reserve_bytes(limit: i64) -> i64 {
        (limit / 64).clamp(1 << 20, 32 << 20)
    }
}

/// Remembers the standard error of this moment: long waits are reported on it from now on.
pub fn remember_standard_error() {
    let (device, inode) = farfield_os::file::identity(2).unwrap_or_default();
    RUNTIME.standard_error[0].store(device, Ordering::Relaxed);
    RUNTIME.standard_error[1].store(inode, Ordering::Relaxed);
    farfield_os::sync::set_say(say);
}

/// Writes a text to standard error, unless the program has made that descriptor something else.
fn say(text: &[u8]) {
    let known = RUNTIME.standard_error.each_ref().map(|number| number.load(Ordering::Relaxed));
    if farfield_os::file::identity(2) == Some((known[0], known[1])) {
        farfield_os::file::write_without_waiting(2, text);
    }
}

/// Ends the program because of us: tells the runner why, or the user if there is no runner yet.
/// Never returns.
pub fn fail(code: i32, reason: core::fmt::Arguments<'_>) -> ! {
    use core::fmt::Write;
    if cfg!(feature = "model") {
        panic!("exit code {code}: {reason}");
    }
    let ending = RUNTIME.ending.load(Ordering::Acquire);
    if ending != 0 {
        // Another thread is ending the program and has given its far memory up: nothing is wrong.
        process::exit_group(ending as i32 & 0xFF)
    }
    let mut text = FailureText { bytes: [0; 480], len: 0 };
    let _ = text.write_fmt(reason);
    if RUNTIME.phase() != Phase::Off {
        // The runner reports the reason, once for the whole job.
        RUNTIME.control().fail(code, &text.bytes[..text.len]);
        process::exit_group(code)
    }
    let _ = farfield_os::file::write_all(2, b"farfield: ");
    let _ = farfield_os::file::write_all(2, &text.bytes[..text.len]);
    let _ = farfield_os::file::write_all(2, b"\n");
    process::exit_group(code)
}

struct FailureText {
    bytes: [u8; 480],
    len: usize,
}

impl core::fmt::Write for FailureText {
    fn write_str(&mut self, s: &str) -> core::fmt::Result {
        let take = s.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + take].copy_from_slice(&s.as_bytes()[..take]);
        self.len += take;
        Ok(())
    }
}

/// Recent share of events of a kind, in 1/256: an exponential moving average that gives each count
/// a weight of 1/8.
pub struct RecentShare(AtomicU32);

impl RecentShare {
    const fn new() -> RecentShare {
        RecentShare(AtomicU32::new(0))
    }

    /// Returns the share in 1/256.
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Notes that `part` of `whole` events were of the kind. For one thread at a time; `whole` is
    /// not 0.
    pub fn count(&self, part: usize, whole: usize) {
        self.0.store((self.get() * 7 + (part * 256 / whole) as u32) / 8, Ordering::Relaxed);
    }
}
