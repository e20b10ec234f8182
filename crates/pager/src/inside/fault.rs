//! Page faults: a page that is not near is needed. Each page is brought by one thread, and the
//! others wait for it (single flight).

use super::call::Context;
use super::evict::{EvictionSize, make_room};
use super::runtime::{Phase, RUNTIME, Runtime, fail};
use super::store::{install, wait_for};
use super::sync::{AtomicU64, Ordering, Wait, tid};
use super::thread;
use crate::control::{believed, bucket_of, exit};
use crate::window;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::page_word::FaultAction;
use farfield_core::policy::prefetch::{PrefetchBatch, Prefetcher};
use farfield_core::{PageId, page_word::State};
use farfield_os::process::now_ns;
use farfield_os::uffd::Track;

/// Maximum number of pages mapped at once when a program touches new memory in order.
const TOUCH_AHEAD: u64 = 16;
/// Number of faults on a page that is near, after which the thread has met a bug of ours.
const RETRIES_MAX: u32 = 1_000_000;

static LAST_TOUCH: AtomicU64 = AtomicU64::new(0);
static ZEROS: AtomicU64 = AtomicU64::new(0);
static SPURIOUS: AtomicU64 = AtomicU64::new(0);

/// Serves a fault of a thread of the program on a page that the kernel does not have. Blocks until
/// the page is near.
///
/// Returns `false` if the page is not ours to provide: a file that the program mapped into the
/// window and that has become shorter. `context` is the thread's, if its own handler serves the
/// fault.
pub fn on_fault(address: usize, write: bool, context: Option<&Context>) -> bool {
    let runtime = &RUNTIME;
    let started = now_ns();
    let page = window::page_of(address);
    let served = fault_in_for(runtime, page, write, context);
    let counters = runtime.counters();
    counters.faults.fetch_add(1, Ordering::Relaxed);
    let took = now_ns() - started;
    counters.fault_ns[bucket_of(took)].fetch_add(1, Ordering::Relaxed);
    if served {
        SPURIOUS.store(0, Ordering::Relaxed);
    } else if SPURIOUS.fetch_add(1, Ordering::Relaxed) > u64::from(RETRIES_MAX) {
        fail(exit::INTERNAL, format_args!("page {} is near but cannot be accessed", page.0));
    }
    runtime.table().word(page).state() != State::Absent || !is_foreign(runtime, page) || is_late(address)
}

/// Checks whether the memory of a fault that is not ours may have been given up
/// ([`super::own_faults`]) since the fault was raised. Then the kernel serves it if it is tried
/// again; if not, it comes back here.
fn is_late(address: usize) -> bool {
    let Some(record) = thread::current() else { return false };
    let before = record.late_fault.swap(address, Ordering::Relaxed);
    if before == address {
        record.late_fault.store(0, Ordering::Relaxed);
    }
    before != address
}

/// Checks whether the page belongs to a file that the program mapped into the window. Such a page
/// is not ours to provide.
fn is_foreign(runtime: &Runtime, page: PageId) -> bool {
    matches!(runtime.space.lock().stretch(page.0), Some((_, crate::space::FOREIGN)))
}

/// Enters a section during which no fork may take its snapshot. Waits for a fork under way.
pub fn enter(runtime: &Runtime) {
    let mut wait = Wait::new("a fork, or an exchange of the pool, to be over");
    let me = tid() as u32;
    loop {
        runtime.busy.fetch_add(1, Ordering::SeqCst);
        let frozen_by = runtime.frozen_by.load(Ordering::SeqCst);
        if frozen_by == 0 || frozen_by == me {
            return;
        }
        runtime.busy.fetch_sub(1, Ordering::SeqCst);
        wait.pause();
    }
}

/// Leaves the section that [`enter`] has entered.
pub fn leave(runtime: &Runtime) {
    runtime.busy.fetch_sub(1, Ordering::SeqCst);
}

/// Makes `page` near. Returns whether this call did it.
pub fn fault_in(runtime: &Runtime, page: PageId, write: bool) -> bool {
    fault_in_for(runtime, page, write, None)
}

/// Makes `page` near for the program thread that is interrupted in `context`. Returns whether this
/// call did it.
fn fault_in_for(runtime: &Runtime, page: PageId, write: bool, context: Option<&Context>) -> bool {
    // This comes before anything is owned: the thread's storage may be far itself, even in this
    // very page.
    let me = thread::current();
    enter(runtime);
    let table = runtime.table();
    let mut wait = Wait::new("a page that another thread moves");
    let served = loop {
        let word = table.word(page);
        match word.fault().1 {
            FaultAction::Retry => break wait.has_waited(),
            FaultAction::Wait => {
                if word.state() == State::Loading && !wait.has_waited() && !runtime.armed().store.is_mapped() {
                    ask_further(runtime, me, page, context);
                }
                wait_for(runtime, &mut wait);
            }
            FaultAction::Zero | FaultAction::Read => {
                let mut need = FaultAction::Retry;
                table.update(page, |word| {
                    let (next, fault) = word.fault();
                    need = fault;
                    matches!(fault, FaultAction::Zero | FaultAction::Read).then_some(next)
                });
                match need {
                    FaultAction::Zero => touch(runtime, page, write, context),
                    FaultAction::Read => read_in(runtime, me, page, write, context),
                    FaultAction::Retry | FaultAction::Wait => continue,
                }
                break true;
            }
        }
    };
    leave(runtime);
    served
}

/// Provides a page that is nowhere: zeros. Pages touched in order come several at a time.
fn touch(runtime: &Runtime, page: PageId, write: bool, context: Option<&Context>) {
    runtime.counters().first_touches.fetch_add(1, Ordering::Relaxed);
    let mut count = 1;
    if write && LAST_TOUCH.load(Ordering::Relaxed) + 1 == page.0 {
        let end = match runtime.space.try_lock().map(|space| space.stretch(page.0)) {
            Some(Some((stretch, prot))) if prot & libc::PROT_WRITE != 0 => stretch.end,
            _ => page.0 + 1,
        };
        let last = end.min(page.0 + TOUCH_AHEAD);
        while page.0 + count < last && own(runtime, PageId(page.0 + count), FaultAction::Zero) {
            count += 1;
        }
    }
    LAST_TOUCH.store(page.0 + count - 1, Ordering::Relaxed);
    make_room(runtime, count as i64, EvictionSize::Batch, context);
    install(runtime, page, zeros(), count as usize, Track::Dirty, false);
}

/// Takes an idle page in order to bring it along, if it needs exactly `kind`. Returns whether it
/// did.
fn own(runtime: &Runtime, page: PageId, kind: FaultAction) -> bool {
    page.0 < window::PAGES
        && runtime
            .table()
            .update(page, |word| {
                let (next, fault) = word.fault();
                (fault == kind).then_some(next)
            })
            .is_some()
}

/// Reads a page that is in the pool, and behind it pages that will be wanted next.
fn read_in(runtime: &Runtime, me: Option<&thread::ThreadRecord>, page: PageId, write: bool, context: Option<&Context>) {
    let counters = runtime.counters();
    counters.demand_reads.fetch_add(1, Ordering::Relaxed);
    runtime.armed().store.will_need(page);
    let mut runs = NO_RUNS;
    let count = match me.and_then(|record| record.prefetcher.try_lock()) {
        Some(mut prefetcher) => {
            let ahead = prefetcher.on_fault(page.0, ahead_max(runtime));
            own_ahead(runtime, &mut prefetcher, page, ahead, &mut runs)
        }
        None => 0,
    };
    let store = &runtime.armed().store;
    let Some(me) = me.filter(|_| !store.is_mapped()) else {
        return store.fetch(page, write, &runs[..count], context);
    };
    let began = now_ns();
    store.fetch(page, write, &runs[..count], context);
    let ended = now_ns();
    let before = me.fetch_ended_ns.swap(ended, Ordering::Relaxed);
    if let Some(mut prefetcher) = me.prefetcher.try_lock() {
        // A fault of our own, on the way, may have ended in between.
        prefetcher.on_waited(ended - began, began.saturating_sub(before));
    }
}

/// Sets more pages on their way if the thread has caught up with those that it asked for, so that
/// the link is not idle when the last of them has come.
fn ask_further(runtime: &Runtime, me: Option<&thread::ThreadRecord>, page: PageId, context: Option<&Context>) {
    let mut runs = NO_RUNS;
    let Some(mut prefetcher) = me.and_then(|record| record.prefetcher.try_lock()) else { return };
    let Some(ahead) = prefetcher.on_late_fault(page.0, ahead_max(runtime)) else { return };
    let count = own_ahead(runtime, &mut prefetcher, page, ahead, &mut runs);
    drop(prefetcher);
    if count > 0 {
        runtime.armed().store.fetch_ahead(&runs[..count], context);
    }
}

/// Returns the most pages to bring ahead: a small window as long as it is at most an eighth of the
/// budget and half of what this process has of it. Larger ones may have an eighth of that, because
/// all threads of all processes of a job may have one, and lane buffers for it.
fn ahead_max(runtime: &Runtime) -> u32 {
    const SMALL_WINDOW: u32 = 64;
    let near = believed(&runtime.slot().near_bytes).max(0);
    let pages = ((runtime.near().1 / 8).min(near / 2) as usize / PAGE_BYTES) as u32;
    pages.min(SMALL_WINDOW.max(pages / 8))
}

/// Runs of pages that come together: the first page, and the number of pages.
type Runs = [(PageId, usize); 64];
const NO_RUNS: Runs = [(PageId(0), 0); 64];

/// Takes the pages to bring ahead that are far and idle, as runs. Returns the number of runs.
fn own_ahead(
    runtime: &Runtime,
    prefetcher: &mut Prefetcher,
    page: PageId,
    ahead: PrefetchBatch,
    runs: &mut Runs,
) -> usize {
    let (mut count, mut pages) = (0, 0);
    for step in 1..=i64::from(ahead.count) {
        let Ok(next) = u64::try_from(page.0 as i64 + step * ahead.stride) else { break };
        let is_beside = runs[..count].last().is_some_and(|(start, len)| start.0 + *len as u64 == next);
        if count == runs.len() && !is_beside {
            break;
        }
        if !own(runtime, PageId(next), FaultAction::Read) {
            continue;
        }
        pages += 1;
        if is_beside {
            runs[count - 1].1 += 1;
        } else {
            runs[count] = (PageId(next), 1);
            count += 1;
        }
    }
    prefetcher.on_brought(pages);
    runtime.counters().prefetch_hits.fetch_add(prefetcher.take_hits(), Ordering::Relaxed);
    count
}

/// Returns the address of zeros that are enough for one touch.
fn zeros() -> usize {
    let known = ZEROS.load(Ordering::Relaxed);
    if known != 0 {
        return known as usize;
    }
    match farfield_os::memory::map_anonymous(TOUCH_AHEAD as usize * PAGE_BYTES) {
        Ok(address) => {
            ZEROS.store(address as u64, Ordering::Relaxed);
            address
        }
        Err(errno) => fail(exit::INTERNAL, format_args!("no memory for a page of zeros: {errno}")),
    }
}

/// Makes `count` pages from `first` on near and pins them: they do not leave before they are
/// released. Stops at the first page that is not ours to provide; the kernel will tell the program.
/// Returns the number of pages pinned.
pub fn fault_in_and_pin(runtime: &Runtime, first: PageId, count: u32) -> u32 {
    let table = runtime.table();
    for index in 0..count {
        let page = PageId(first.0 + u64::from(index));
        loop {
            if table.update(page, |word| word.hold()).is_some() {
                break;
            }
            fault_in(runtime, page, true);
            // A page of zeros that has left again is Absent too.
            if table.word(page).state() == State::Absent && is_foreign(runtime, page) {
                return index;
            }
        }
    }
    count
}

/// Returns the phase, after waiting while faults are just becoming ours.
pub fn settled_phase(runtime: &Runtime) -> Phase {
    let mut wait = Wait::new("far memory to be set up");
    loop {
        match runtime.phase() {
            Phase::Arming => wait.pause(),
            phase => return phase,
        }
    }
}
