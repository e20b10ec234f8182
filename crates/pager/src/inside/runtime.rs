//! The state of one process.

mod accounts;
mod armed;
mod failure;
mod recent_share;

pub use armed::Armed;
pub use failure::{fail, remember_standard_error};
pub use recent_share::RecentShare;

use super::clone::VmSharing;
use super::lock::SpinLock;
use super::queue::PageQueue;
use super::sync::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use super::table::PageWordTable;
use super::thread::ThreadTable;
use crate::config::JobConfig;
use crate::control::{JobAccounts, PagingCounters, ProcessSlot};
use crate::space::{PageRange, Space};
use crate::window;
use farfield_os::process;

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
/// small mappings (1 TiB), then large ones (10 TiB: programs reserve up to 8 TiB at once).
const BREAK_PAGES: u64 = 1 << 28;
const SMALL_END: u64 = 1 << 29;

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

    /// Checks whether this process is a vfork child that borrows its parent's memory.
    pub fn is_borrowed(&self) -> bool {
        self.pid.load(Ordering::Relaxed) != process::pid() as u32
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a program that reserves most of its address space at once does not start.
    use super::*;

    #[test]
    fn eight_tebibytes_can_be_reserved_beside_a_tebibyte() {
        let mut space = RUNTIME.space.lock();
        let mut map = |pages| {
            let range = space.find(pages).expect("there is room");
            space.map(range, 0);
            range
        };
        let taken: Vec<PageRange> = [1 << 10, 1 << 18, 1 << 28, 1 << 31, 1 << 10].map(&mut map).into();
        for range in taken {
            space.unmap(range);
        }
    }
}
