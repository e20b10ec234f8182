//! Operations that the kernel continues after the call that submitted them has returned: io_uring's
//! and those of native asynchronous I/O.
//!
//! The kernel may copy into their buffers at any time, or has taken references to their memory. So
//! these pages stay near from before the submission until the completion was seen. They are
//! *reserved* first, because pages that cannot leave must not fill the budget. Then they are held
//! by a [`PinReservation`], and kept in the [`ASYNC_IO_REGISTRY`]: there, the thread that arms finds those that were
//! submitted while nothing was held yet.
//!
//! A hold that lasts too long costs room; one that ends too early could cost bytes. Where the end
//! of an operation cannot be told, its pages stay.

use super::fault::fault_in_and_pin;
use super::lock::SpinLock;
use super::runtime::{Phase, RUNTIME, Runtime};
use super::sync::Wait;
use super::thread::PinnedRun;
use super::{aio, arm, io_uring};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::process;
use std::collections::{BTreeMap, BTreeSet};

/// Registry of all operations under way. It is a leaf among the locks: its holder brings nothing
/// near and waits for nobody.
pub static ASYNC_IO_REGISTRY: SpinLock<AsyncIoRegistry> =
    SpinLock::new(AsyncIoRegistry { rings: Vec::new(), contexts: Vec::new() });

/// Rings and contexts with operations under way; [`ASYNC_IO_REGISTRY`] is the only instance.
pub struct AsyncIoRegistry {
    /// Rings of io_uring.
    pub rings: Vec<io_uring::Entry>,
    /// Contexts of native asynchronous I/O.
    pub contexts: Vec<aio::Entry>,
}

/// Number of pages reserved by operations under way; `LASTING_PAGES` counts those reserved for
/// longer.
static PAGES: AtomicU64 = AtomicU64::new(0);
static LASTING_PAGES: AtomicU64 = AtomicU64::new(0);
/// Number of operations under way that hold pages.
static OPERATIONS: AtomicU64 = AtomicU64::new(0);
/// Maximum number of such operations: a page counts its holds in 16 bits.
const OPERATIONS_MAX: u64 = 1 << 15;
const PAGES_MIN: u64 = 256;
/// Time that a submission waits for earlier operations to make room, if none of them ends
/// meanwhile.
const PATIENCE_NS: u64 = 2_000_000_000;

/// Returns the maximum number of pages that may be held after calls have returned: a quarter of the
/// budget.
fn pages_max(runtime: &Runtime) -> u64 {
    (runtime.near().1 as u64 / PAGE_BYTES as u64 / 4).max(PAGES_MIN)
}

/// Returns the maximum number of bytes of one operation.
pub fn operation_bytes_max(runtime: &Runtime) -> usize {
    let room = pages_max(runtime).saturating_sub(LASTING_PAGES.load(Ordering::Relaxed)).max(16);
    // The first and last page of an operation may be touched only in part.
    (room as usize - 2) * PAGE_BYTES
}

/// Bounded wait for other operations to make room; each progress renews the deadline.
pub struct ProgressWait {
    progress: u32,
    until_ns: u64,
    wait: Wait,
}

impl Default for ProgressWait {
    fn default() -> ProgressWait {
        ProgressWait { progress: 0, until_ns: 0, wait: Wait::new("asynchronous operations to end") }
    }
}

impl ProgressWait {
    /// Waits a little. Returns `false` if waiting is in vain: nothing is under way, or nothing has
    /// ended for two seconds.
    pub fn wait(&mut self, progress: u32) -> bool {
        let now = process::now_ns();
        if self.until_ns == 0 || progress != self.progress {
            (self.progress, self.until_ns) = (progress, now + PATIENCE_NS);
        }
        if now > self.until_ns || other_operations_in_flight(&mut core::iter::empty()) == 0 {
            return false;
        }
        self.wait.pause();
        true
    }
}

/// Returns the number of operations under way that hold pages and will make room, apart from these.
pub fn other_operations_in_flight(these: &mut dyn Iterator<Item = &PinReservation>) -> u64 {
    let own: u64 = these.map(|lease| lease.operations).sum();
    OPERATIONS.load(Ordering::Relaxed).saturating_sub(own)
}

/// Pages that the kernel may touch until an operation ends. Dropping the lease lets them go.
#[derive(Default)]
pub struct PinReservation {
    runs: Vec<PinnedRun>,
    held: bool,
    /// Number of pages and operations to subtract from the sums at the end.
    pages: u64,
    operations: u64,
    lasting: bool,
}

impl PinReservation {
    /// Reserves room for the pages of one operation. `None` if there is no room now.
    pub fn reserve(runtime: &Runtime, runs: Vec<PinnedRun>) -> Option<PinReservation> {
        let pages = pages_of(&runs);
        if pages == 0 {
            return Some(PinReservation::default());
        }
        let lasting = LASTING_PAGES.load(Ordering::Relaxed);
        let most = pages_max(runtime);
        // A single operation may be larger than the maximum.
        let fits = |now: u64| {
            let all = now + lasting + pages;
            (all <= most || now == 0 && all <= 2 * most).then_some(now + pages)
        };
        if OPERATIONS.load(Ordering::Relaxed) >= OPERATIONS_MAX {
            return None;
        }
        PAGES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        OPERATIONS.fetch_add(1, Ordering::Relaxed);
        Some(PinReservation { runs, held: false, pages, operations: 1, lasting: false })
    }

    /// Reserves room for pages that stay for longer than an operation. `None` if there is no room.
    pub fn reserve_lasting(runtime: &Runtime, runs: Vec<PinnedRun>) -> Option<PinReservation> {
        let pages = pages_of(&runs);
        let most = pages_max(runtime);
        let fits = |now: u64| (now + pages <= most).then_some(now + pages);
        LASTING_PAGES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(PinReservation { runs, held: false, pages, operations: 0, lasting: true })
    }

    /// Creates a lease of pages that are reserved already, by a lease that outlives this one.
    pub fn covered(runs: Vec<PinnedRun>) -> PinReservation {
        PinReservation { operations: 0, pages: 0, runs, held: false, lasting: false }
    }

    /// Checks whether the lease has no pages.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Brings the lease's pages near and holds them. Pages that cannot be provided are left out:
    /// the kernel will tell the program.
    fn pin(&mut self, runtime: &Runtime) {
        for run in &mut self.runs {
            run.count = fault_in_and_pin(runtime, run.start, run.count);
        }
        self.held = true;
    }

    /// Populates the pages of a lease that holds none yet, brings them near and holds them. Called
    /// when faults become ours.
    fn pin_at_arming(&mut self, runtime: &Runtime) {
        if !self.held {
            for run in &mut self.runs {
                arm::populate(runtime, run);
            }
            self.pin(runtime);
        }
    }

    /// Takes over another lease, so that both end together.
    fn merge(&mut self, mut other: PinReservation) {
        self.runs.append(&mut other.runs);
        self.held |= other.held;
        self.pages += core::mem::take(&mut other.pages);
        self.operations += core::mem::take(&mut other.operations);
    }
}

impl Drop for PinReservation {
    fn drop(&mut self) {
        if self.held {
            for run in &self.runs {
                for number in run.start.0..run.start.0 + u64::from(run.count) {
                    unpin(PageId(number));
                }
            }
        }
        let sum = if self.lasting { &LASTING_PAGES } else { &PAGES };
        sum.fetch_sub(self.pages, Ordering::Relaxed);
        OPERATIONS.fetch_sub(self.operations, Ordering::Relaxed);
    }
}

fn unpin(page: PageId) {
    let _ = RUNTIME.table().update(page, |word| (word.holds() > 0).then(|| word.release()));
}

fn pages_of(runs: &[PinnedRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.count)).sum()
}

/// Holds the pages of all `planned` operations, and enters them into the registry before the kernel
/// hears of them.
pub fn begin<T>(
    runtime: &Runtime,
    planned: &mut Vec<T>,
    lease: impl Fn(&mut T) -> &mut PinReservation,
    enter: impl FnOnce(&mut AsyncIoRegistry, &mut Vec<T>),
) {
    // Nobody arms while the space is held. So a thread that arms later finds what was entered, not
    // held yet.
    let space = runtime.space.lock();
    if runtime.phase() == Phase::Armed {
        drop(space);
        for one in planned.iter_mut() {
            self::PinReservation::pin(lease(one), runtime);
        }
        enter(&mut ASYNC_IO_REGISTRY.lock(), planned);
    } else {
        enter(&mut ASYNC_IO_REGISTRY.lock(), planned);
        drop(space);
    }
}

/// Operations of one ring or context, by the name that tells their completions apart. Several may
/// have the same name: then their pages go when all of them have ended.
#[derive(Default)]
pub struct AsyncOperations {
    named: BTreeMap<u64, AsyncOperationGroup>,
    under_way: u32,
}

#[derive(Default)]
struct AsyncOperationGroup {
    operations: u32,
    lease: PinReservation,
}

impl AsyncOperations {
    /// Notes that an operation has begun.
    pub fn begin_operation(&mut self, name: u64, lease: PinReservation) {
        let flight = self.named.entry(name).or_default();
        flight.operations += 1;
        self.under_way += 1;
        if flight.lease.is_empty() {
            flight.lease = lease;
        } else {
            flight.lease.merge(lease);
        }
    }

    /// Notes that an operation has ended, or was not submitted after all.
    pub fn end_operation(&mut self, name: u64) {
        let Some(flight) = self.named.get_mut(&name) else { return };
        flight.operations -= 1;
        self.under_way -= 1;
        if flight.operations == 0 {
            self.named.remove(&name);
        }
    }

    /// Returns the number of operations that have not ended.
    pub fn in_flight(&self) -> u32 {
        self.under_way
    }

    /// Checks whether any of the operations holds pages.
    pub fn hold_pages(&self) -> bool {
        self.named.values().any(|flight| !flight.lease.is_empty())
    }

    /// Forgets all operations, and returns their leases.
    pub fn take(&mut self) -> impl Iterator<Item = PinReservation> + use<> {
        self.under_way = 0;
        core::mem::take(&mut self.named).into_values().map(|flight| flight.lease)
    }

    fn pin_at_arming(&mut self, runtime: &Runtime) {
        self.named.values_mut().for_each(|flight| flight.lease.pin_at_arming(runtime));
    }
}

/// Pages that stay for good, each held once however often it is named.
#[derive(Default)]
pub struct PermanentPins {
    pages: BTreeSet<u64>,
    held: bool,
}

impl PermanentPins {
    /// Checks whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Takes over the pages of a lease.
    pub fn add(&mut self, mut lease: PinReservation) {
        let runs = core::mem::take(&mut lease.runs);
        self.held |= lease.held;
        for number in runs.iter().flat_map(|run| run.start.0..run.start.0 + u64::from(run.count)) {
            if self.pages.insert(number) {
                LASTING_PAGES.fetch_add(1, Ordering::Relaxed);
            } else if lease.held {
                unpin(PageId(number));
            }
        }
    }

    fn pin_at_arming(&mut self, runtime: &Runtime) {
        if self.held {
            return;
        }
        self.held = true;
        self.pages.retain(|&number| {
            let mut run = PinnedRun { start: PageId(number), count: 1 };
            arm::populate(runtime, &mut run);
            let held = fault_in_and_pin(runtime, run.start, run.count) == 1;
            LASTING_PAGES.fetch_sub(u64::from(!held), Ordering::Relaxed);
            held
        });
    }
}

impl Drop for PermanentPins {
    fn drop(&mut self) {
        LASTING_PAGES.fetch_sub(self.pages.len() as u64, Ordering::Relaxed);
        if self.held {
            self.pages.iter().for_each(|&number| unpin(PageId(number)));
        }
    }
}

/// Holds the pages of all operations under way when faults become ours: they must not leave.
pub fn pin_all_at_arming(runtime: &Runtime) {
    let mut books = ASYNC_IO_REGISTRY.lock();
    for ring in &mut books.rings {
        ring.reap();
        ring.flights.pin_at_arming(runtime);
        ring.permanent.pin_at_arming(runtime);
        ring.registered.iter_mut().for_each(|lease| lease.pin_at_arming(runtime));
    }
    for context in &mut books.contexts {
        context.reap();
        context.flights.pin_at_arming(runtime);
    }
}

/// Lets the pages of finished operations go. Called from time to time.
pub fn reap_completed(runtime: &Runtime) {
    {
        let Some(mut books) = ASYNC_IO_REGISTRY.try_lock() else { return };
        if books.rings.is_empty() && books.contexts.is_empty() {
            return;
        }
        books.rings.iter_mut().for_each(io_uring::Entry::reap);
        books.contexts.iter_mut().for_each(aio::Entry::reap);
    }
    io_uring::find_closed(runtime);
}

/// Forgets the operations under way in the child of a fork: they are the parent's, in the parent's
/// memory.
pub fn reset_in_child() {
    let mut books = ASYNC_IO_REGISTRY.lock();
    books.contexts.clear();
    books.rings.retain_mut(io_uring::Entry::inherit);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leases that hold nothing, told apart by what they have reserved.
    fn lease(pages: u64) -> PinReservation {
        let runs = vec![PinnedRun { start: PageId(0), count: pages as u32 }];
        PAGES.fetch_add(pages, Ordering::Relaxed);
        OPERATIONS.fetch_add(1, Ordering::Relaxed);
        PinReservation { runs, held: false, pages, operations: 1, lasting: false }
    }

    #[test]
    fn pages_go_when_the_last_operation_of_a_name_has_ended() {
        let mut flights = AsyncOperations::default();
        flights.begin_operation(7, lease(3));
        flights.begin_operation(8, PinReservation::default());
        flights.begin_operation(7, lease(2));
        assert_eq!((PAGES.load(Ordering::Relaxed), flights.in_flight()), (5, 3));
        flights.end_operation(7);
        flights.end_operation(8);
        assert_eq!(PAGES.load(Ordering::Relaxed), 5, "which of the two it was cannot be told");
        flights.end_operation(9);
        assert!(flights.hold_pages());
        flights.end_operation(7);
        assert_eq!((PAGES.load(Ordering::Relaxed), OPERATIONS.load(Ordering::Relaxed), flights.in_flight()), (0, 0, 0));
        flights.end_operation(7);
        assert!(!flights.hold_pages());

        // A page that stays is counted once.
        let mut kept = PermanentPins::default();
        kept.add(lease(3));
        kept.add(lease(5));
        assert_eq!((PAGES.load(Ordering::Relaxed), LASTING_PAGES.load(Ordering::Relaxed)), (0, 5));
        drop(kept);
        assert_eq!(LASTING_PAGES.load(Ordering::Relaxed), 0);
    }
}
