//! Operations that the kernel continues after the call that submitted them has returned: io_uring's
//! and those of native asynchronous I/O.
//!
//! The kernel may copy into their buffers at any time, or has taken references to their memory. So
//! these pages stay near from before the submission until the completion was seen. They are
//! *reserved* first, because pages that cannot leave must not fill the budget. Then they are pinned
//! by a [`PinReservation`], and kept in the [`ASYNC_IO_REGISTRY`]: there, the thread that arms
//! finds those that were submitted while nothing was pinned yet.
//!
//! A pin that lasts too long costs room; one that ends too early could cost bytes. Where the end
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

/// Registry of all operations in flight. It is a leaf among the locks: its holder brings nothing
/// near and waits for nobody.
pub static ASYNC_IO_REGISTRY: SpinLock<AsyncIoRegistry> =
    SpinLock::new(AsyncIoRegistry { rings: Vec::new(), contexts: Vec::new() });

/// Rings and contexts with operations in flight; [`ASYNC_IO_REGISTRY`] is the only instance.
pub struct AsyncIoRegistry {
    /// Rings of io_uring.
    pub rings: Vec<io_uring::Entry>,
    /// Contexts of native asynchronous I/O.
    pub contexts: Vec<aio::Entry>,
}

/// Number of pages reserved by operations in flight; `LASTING_PAGES` counts those reserved for
/// longer.
static PAGES: AtomicU64 = AtomicU64::new(0);
static LASTING_PAGES: AtomicU64 = AtomicU64::new(0);
/// Number of operations in flight that pin pages.
static OPERATIONS: AtomicU64 = AtomicU64::new(0);
/// Maximum number of such operations: a page counts its pins in 16 bits.
const OPERATIONS_MAX: u64 = 1 << 15;
const PAGES_MIN: u64 = 256;
/// Time that a submission waits for earlier operations to make room, if none of them ends
/// meanwhile.
const PROGRESS_TIMEOUT_NS: u64 = 2_000_000_000;

/// Returns the maximum number of pages that may be pinned after calls have returned: a quarter of
/// the budget.
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
    /// Waits a little. Returns `false` if waiting is in vain: nothing is in flight, or nothing has
    /// ended for two seconds.
    pub fn wait(&mut self, progress: u32) -> bool {
        let now = process::now_ns();
        if self.until_ns == 0 || progress != self.progress {
            (self.progress, self.until_ns) = (progress, now + PROGRESS_TIMEOUT_NS);
        }
        if now > self.until_ns || other_operations_in_flight(&mut core::iter::empty()) == 0 {
            return false;
        }
        self.wait.pause();
        true
    }
}

/// Returns the number of operations in flight that pin pages and will make room, apart from these.
pub fn other_operations_in_flight(these: &mut dyn Iterator<Item = &PinReservation>) -> u64 {
    let own: u64 = these.map(|reservation| reservation.operations).sum();
    OPERATIONS.load(Ordering::Relaxed).saturating_sub(own)
}

/// Pages that the kernel may touch until an operation ends. Dropping the reservation unpins them.
#[derive(Default)]
pub struct PinReservation {
    runs: Vec<PinnedRun>,
    pinned: bool,
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
        Some(PinReservation { runs, pinned: false, pages, operations: 1, lasting: false })
    }

    /// Reserves room for pages that stay for longer than an operation. `None` if there is no room.
    pub fn reserve_lasting(runtime: &Runtime, runs: Vec<PinnedRun>) -> Option<PinReservation> {
        let pages = pages_of(&runs);
        let most = pages_max(runtime);
        let fits = |now: u64| (now + pages <= most).then_some(now + pages);
        LASTING_PAGES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(PinReservation { runs, pinned: false, pages, operations: 0, lasting: true })
    }

    /// Creates a reservation of pages that are reserved already, by one that outlives this one.
    pub fn covered(runs: Vec<PinnedRun>) -> PinReservation {
        PinReservation { operations: 0, pages: 0, runs, pinned: false, lasting: false }
    }

    /// Checks whether the reservation has no pages.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Brings the reservation's pages near and pins them. Pages that cannot be provided are left
    /// out: the kernel will tell the program.
    fn pin(&mut self, runtime: &Runtime) {
        for run in &mut self.runs {
            run.count = fault_in_and_pin(runtime, run.start, run.count);
        }
        self.pinned = true;
    }

    /// Populates the pages of a reservation that pins none yet, brings them near and pins them.
    /// Called when faults become ours.
    fn pin_at_arming(&mut self, runtime: &Runtime) {
        if !self.pinned {
            for run in &mut self.runs {
                arm::populate(runtime, run);
            }
            self.pin(runtime);
        }
    }

    /// Takes over another reservation, so that both end together.
    fn merge(&mut self, mut other: PinReservation) {
        self.runs.append(&mut other.runs);
        self.pinned |= other.pinned;
        self.pages += core::mem::take(&mut other.pages);
        self.operations += core::mem::take(&mut other.operations);
    }
}

impl Drop for PinReservation {
    fn drop(&mut self) {
        if self.pinned {
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

/// Pins the pages of all `planned` operations, and enters them into the registry before the kernel
/// hears of them.
pub fn begin<T>(
    runtime: &Runtime,
    planned: &mut Vec<T>,
    reservation: impl Fn(&mut T) -> &mut PinReservation,
    enter: impl FnOnce(&mut AsyncIoRegistry, &mut Vec<T>),
) {
    // Nobody arms while the space is held. So a thread that arms later finds what was entered, not
    // pinned yet.
    let space = runtime.space.lock();
    if runtime.phase() == Phase::Armed {
        drop(space);
        for one in planned.iter_mut() {
            PinReservation::pin(reservation(one), runtime);
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
    in_flight: u32,
}

#[derive(Default)]
struct AsyncOperationGroup {
    operations: u32,
    reservation: PinReservation,
}

impl AsyncOperations {
    /// Notes that an operation has begun.
    pub fn begin_operation(&mut self, name: u64, reservation: PinReservation) {
        let group = self.named.entry(name).or_default();
        group.operations += 1;
        self.in_flight += 1;
        if group.reservation.is_empty() {
            group.reservation = reservation;
        } else {
            group.reservation.merge(reservation);
        }
    }

    /// Notes that an operation has ended, or was not submitted after all.
    pub fn end_operation(&mut self, name: u64) {
        let Some(group) = self.named.get_mut(&name) else { return };
        group.operations -= 1;
        self.in_flight -= 1;
        if group.operations == 0 {
            self.named.remove(&name);
        }
    }

    /// Returns the number of operations that have not ended.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Checks whether any of the operations pins pages.
    pub fn have_pins(&self) -> bool {
        self.named.values().any(|group| !group.reservation.is_empty())
    }

    /// Forgets all operations, and returns their reservations.
    pub fn take(&mut self) -> impl Iterator<Item = PinReservation> + use<> {
        self.in_flight = 0;
        core::mem::take(&mut self.named).into_values().map(|group| group.reservation)
    }

    fn pin_at_arming(&mut self, runtime: &Runtime) {
        self.named.values_mut().for_each(|group| group.reservation.pin_at_arming(runtime));
    }
}

/// Pages that stay for good, each pinned once however often it is named.
#[derive(Default)]
pub struct PermanentPins {
    pages: BTreeSet<u64>,
    pinned: bool,
}

impl PermanentPins {
    /// Checks whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Takes over the pages of a reservation.
    pub fn add(&mut self, mut reservation: PinReservation) {
        let runs = core::mem::take(&mut reservation.runs);
        self.pinned |= reservation.pinned;
        for number in runs.iter().flat_map(|run| run.start.0..run.start.0 + u64::from(run.count)) {
            if self.pages.insert(number) {
                LASTING_PAGES.fetch_add(1, Ordering::Relaxed);
            } else if reservation.pinned {
                unpin(PageId(number));
            }
        }
    }

    fn pin_at_arming(&mut self, runtime: &Runtime) {
        if self.pinned {
            return;
        }
        self.pinned = true;
        self.pages.retain(|&number| {
            let mut run = PinnedRun { start: PageId(number), count: 1 };
            arm::populate(runtime, &mut run);
            let pinned = fault_in_and_pin(runtime, run.start, run.count) == 1;
            LASTING_PAGES.fetch_sub(u64::from(!pinned), Ordering::Relaxed);
            pinned
        });
    }
}

impl Drop for PermanentPins {
    fn drop(&mut self) {
        LASTING_PAGES.fetch_sub(self.pages.len() as u64, Ordering::Relaxed);
        if self.pinned {
            self.pages.iter().for_each(|&number| unpin(PageId(number)));
        }
    }
}

/// Pins the pages of all operations in flight when faults become ours: they must not leave.
pub fn pin_all_at_arming(runtime: &Runtime) {
    let mut registry = ASYNC_IO_REGISTRY.lock();
    for ring in &mut registry.rings {
        ring.reap();
        ring.operations.pin_at_arming(runtime);
        ring.permanent.pin_at_arming(runtime);
        ring.registered.iter_mut().for_each(|reservation| reservation.pin_at_arming(runtime));
    }
    for context in &mut registry.contexts {
        context.reap();
        context.operations.pin_at_arming(runtime);
    }
}

/// Lets the pages of finished operations go. Called from time to time.
pub fn reap_completed(runtime: &Runtime) {
    {
        let Some(mut registry) = ASYNC_IO_REGISTRY.try_lock() else { return };
        if registry.rings.is_empty() && registry.contexts.is_empty() {
            return;
        }
        registry.rings.iter_mut().for_each(io_uring::Entry::reap);
        registry.contexts.iter_mut().for_each(aio::Entry::reap);
    }
    io_uring::find_closed(runtime);
}

/// Forgets the operations in flight in the child of a fork: they are the parent's, in the parent's
/// memory.
pub fn reset_in_child() {
    let mut registry = ASYNC_IO_REGISTRY.lock();
    registry.contexts.clear();
    registry.rings.retain_mut(io_uring::Entry::inherit);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reservations that pin nothing, told apart by what they have reserved.
    fn reservation(pages: u64) -> PinReservation {
        let runs = vec![PinnedRun { start: PageId(0), count: pages as u32 }];
        PAGES.fetch_add(pages, Ordering::Relaxed);
        OPERATIONS.fetch_add(1, Ordering::Relaxed);
        PinReservation { runs, pinned: false, pages, operations: 1, lasting: false }
    }

    #[test]
    fn pages_go_when_the_last_operation_of_a_name_has_ended() {
        let mut operations = AsyncOperations::default();
        operations.begin_operation(7, reservation(3));
        operations.begin_operation(8, PinReservation::default());
        operations.begin_operation(7, reservation(2));
        assert_eq!((PAGES.load(Ordering::Relaxed), operations.in_flight()), (5, 3));
        operations.end_operation(7);
        operations.end_operation(8);
        assert_eq!(PAGES.load(Ordering::Relaxed), 5, "which of the two it was cannot be told");
        operations.end_operation(9);
        assert!(operations.have_pins());
        operations.end_operation(7);
        assert_eq!(
            (PAGES.load(Ordering::Relaxed), OPERATIONS.load(Ordering::Relaxed), operations.in_flight()),
            (0, 0, 0)
        );
        operations.end_operation(7);
        assert!(!operations.have_pins());

        // A page that stays is counted once.
        let mut permanent = PermanentPins::default();
        permanent.add(reservation(3));
        permanent.add(reservation(5));
        assert_eq!((PAGES.load(Ordering::Relaxed), LASTING_PAGES.load(Ordering::Relaxed)), (0, 5));
        drop(permanent);
        assert_eq!(LASTING_PAGES.load(Ordering::Relaxed), 0);
    }
}
