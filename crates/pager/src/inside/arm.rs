//! Arming: the way from dormant to armed.
//!
//! Below the budget the kernel serves all faults, at native speed. When the job comes close to its
//! limit this process opens the pool, registers the window with userfaultfd and counts what
//! is near. A monitor thread decides when. It is started once the program could reach the limit at
//! all; after arming it evicts ahead of need.

use super::direct_calls::Announcement;
use super::evict::{self, WindowEvictor};
use super::runtime::{Armed, Phase, RUNTIME, Runtime, fail};
use super::store::{Store, enqueue};
use super::switching::{InheritedSnapshot, PoolLocation};
use super::syscall_pinning::pin_all;
use super::thread::PinnedRun;
use super::{huge, inherited_fds, maintenance_thread, own_code, sync};
use crate::control::{FaultMode, believed, exit};
use crate::space::{PageRange, Space};
use crate::window;
use core::sync::atomic::{Ordering, fence};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::pagemap::{PageRun, Pagemap, category};
use farfield_os::pipe::PagePipe;
use farfield_os::uffd::{FaultEvent, FaultOrigin, Uffd, feature};
use farfield_os::{file, memory, process, signals};
use farfield_pool::{Backend, Health, PoolBuilder, SwitchBackend};

/// Interval between two looks of the monitor while dormant; `TICK` is that while armed.
const LOOK: Duration = Duration::from_millis(10);
const TICK: Duration = Duration::from_millis(2);
/// Interval between two looks of the monitor while it evicts: the program must not use up the
/// reserve meanwhile.
const AHEAD_TICK: Duration = Duration::from_micros(500);
/// Number of ticks between two looks for the server: a few times a second.
const SERVER_TICKS: u32 = 64;
/// Processor time between two looks below which a program counts as waiting, after `IDLE_LOOKS`
/// such looks in a row.
const IDLE_NS: u64 = 20_000;
const IDLE_LOOKS: u32 = 8;
/// Number of handler threads of thread mode; `SPINS` is the number of empty looks of one before it
/// sleeps.
const HANDLERS: usize = 2;
const SPINS: u32 = 2000;
/// Bytes above which a dormant process that may touch them is watched, and arms when its job needs
/// the room.
const SMALL_BYTES: i64 = 1 << 20;

/// Takes note that the program may now touch `touchable` bytes. While dormant all of them count as
/// near, so that the budget holds whatever the program does. When they do not fit, faults become
/// ours, and only what is really near counts.
pub fn arm_if_needed(runtime: &Runtime, touchable: i64) {
    // A borrower's descriptors and threads would end with it: its parent arms.
    if runtime.is_borrowed() {
        return runtime.set_near(touchable);
    }
    let more = touchable - believed(&runtime.slot().near_bytes);
    if is_close(runtime, more) && touchable > SMALL_BYTES / 4 {
        return arm(runtime, None);
    }
    runtime.set_near(touchable);
    if touchable > SMALL_BYTES {
        start_monitor(runtime);
    }
}

/// Checks whether `more` near bytes would exceed the job's budget.
pub fn is_close(runtime: &Runtime, more: i64) -> bool {
    let (near, limit) = runtime.near();
    near + more > limit
}

/// Starts the monitor, once. Ends the program if that fails.
pub fn start_monitor(runtime: &Runtime) {
    if runtime.monitor.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return;
    }
    // SAFETY: `monitor` never returns and keeps to the laws of this module.
    if let Err(errno) = unsafe { sync::spawn(monitor) } {
        fail(exit::INTERNAL, format_args!("the monitor thread could not be started: {errno}"));
    }
}

extern "C" fn monitor(_: usize) -> ! {
    signals::set_mask(!super::signal::OURS);
    let runtime = &RUNTIME;
    own_code::begin_thread();
    let mut idle = IdleDetector::default();
    let mut ticks = 0u32;
    let mut turn = 0usize;
    loop {
        match runtime.phase() {
            Phase::Dormant => {
                let (near, limit) = runtime.near();
                if near > limit - Runtime::reserve_bytes(limit) {
                    arm(runtime, None);
                    continue;
                }
                super::async_io::reap_completed(runtime);
                process::sleep(LOOK);
            }
            Phase::Armed => {
                runtime.settle_heap();
                runtime.armed().store.progress();
                ticks = ticks.wrapping_add(1);
                if ticks.is_multiple_of(SERVER_TICKS) {
                    let health = runtime.armed().store.look_for_server();
                    tell(runtime, &runtime.armed().store, health);
                }
                let evicted = (idle.is_idle() || evicts_ahead(runtime)) && evict::reclaim_ahead(runtime);
                maintenance_thread::start_if_needed(runtime);
                runtime.threads.reap_dead(turn);
                turn = turn.wrapping_add(1);
                super::async_io::reap_completed(runtime);
                process::sleep(if evicted { AHEAD_TICK } else { TICK });
            }
            Phase::Arming | Phase::Off => process::sleep(TICK),
        }
    }
}

/// Notes the state of the pool in the process's slot.
fn tell(runtime: &Runtime, store: &Store, health: Health) {
    let slot = runtime.slot();
    slot.pool_degraded.store(u32::from(health != Health::Good), Ordering::Relaxed);
    slot.set_scrubbed(store.scrubbed());
    slot.set_protection(store.protection());
}

/// Detector of idleness: pages of a process that waits are the best ones to evict when its job
/// needs room.
#[derive(Default)]
struct IdleDetector {
    used_ns: u64,
    looks: u32,
}

impl IdleDetector {
    /// Checks whether the program has used no processor for [`IDLE_LOOKS`] looks, of which this is
    /// one.
    fn is_idle(&mut self) -> bool {
        let used_ns = process::cpu_ns().saturating_sub(process::thread_cpu_ns());
        let waits = used_ns.saturating_sub(self.used_ns) < IDLE_NS;
        self.looks = if waits { self.looks + 1 } else { 0 };
        self.used_ns = used_ns;
        self.looks >= IDLE_LOOKS
    }
}

/// Checks whether it is worth a thread of its own to evict ahead of need. Dirty pages are: their
/// bytes are copied elsewhere while the program goes on. Dropping clean ones costs less than the
/// interruptions.
fn evicts_ahead(runtime: &Runtime) -> bool {
    let (near, limit) = runtime.near();
    near > limit || (runtime.dirty_share.get() > 48 && runtime.armed().store.is_mapped())
}

/// Makes faults ours. `inherited` names the snapshot of the region to go on with, in the child of a
/// fork. Does nothing in a borrower of another process's memory, or if the process is armed
/// already.
pub fn arm(runtime: &Runtime, inherited: Option<InheritedSnapshot>) {
    if !runtime.is_borrowed() {
        runtime.vm_sharing.open_descriptors_for_good(|| arm_now(runtime, inherited));
    }
}

fn arm_now(runtime: &Runtime, inherited: Option<InheritedSnapshot>) {
    let is_child = inherited.is_some();
    // The space is held: no thread that holds it ever waits for the end of Arming.
    let space = runtime.space.lock();
    if !runtime.advance(Phase::Dormant, Phase::Arming) {
        return;
    }
    let armed = with_descriptors(|| open(runtime, inherited));
    let limit_pages = runtime.config().near_limit() as usize / PAGE_BYTES;
    {
        let mut queue = runtime.queue.lock();
        if !is_child && let Err(errno) = queue.reserve(limit_pages * 2 + 8192) {
            fail(exit::INTERNAL, format_args!("no memory for the eviction queue: {errno}"));
        }
    }
    runtime.set_armed(armed);
    let armed = runtime.armed();
    // Calls under way pin nothing yet: what they may touch must be near before faults are ours.
    if !is_child {
        for record in runtime.threads.all() {
            for frame in record.all_frames() {
                populate_frame(runtime, frame);
            }
        }
        super::async_io::pin_all_at_arming(runtime);
        populate_announced(runtime, &space);
    }
    // Files that the program mapped into the window are the kernel's.
    let parts = window::parts().map(|(start, end)| PageRange { start, end });
    for range in parts.flat_map(|part| space.between_foreign(part)) {
        let (address, len) = (window::address_of(PageId(range.start)), range.pages() as usize * PAGE_BYTES);
        if let Err(errno) = armed.uffd.register(address, len) {
            fail(exit::INTERNAL, format_args!("the window could not be registered with userfaultfd: {errno}"));
        }
    }
    huge::stop();
    runtime.slot().state.store(armed.mode as u32, Ordering::Relaxed);
    if !is_child {
        count_near_pages(runtime, armed, &space.mapped_in(PageRange { start: 0, end: window::PAGES }));
    }
    let advanced = runtime.advance(Phase::Arming, Phase::Armed);
    assert!(advanced);
    start_monitor(runtime);
    if armed.mode == FaultMode::Thread {
        for _ in 0..HANDLERS {
            // SAFETY: `serve_faults` never returns and keeps to the laws of this module.
            if let Err(errno) = unsafe { sync::spawn(serve_faults) } {
                fail(exit::INTERNAL, format_args!("a handler thread could not be started: {errno}"));
            }
        }
    }
}

/// Populates and pins the pages of a call that was under way before we pinned pages.
fn populate_frame(runtime: &Runtime, frame: &super::thread::CallFrame) {
    let mut pages = frame.pages.lock();
    if frame.active.load(Ordering::SeqCst) == 0 || pages.pinned {
        return;
    }
    let used = pages.len;
    pages.runs[..used].iter_mut().for_each(|run| populate(runtime, run));
    pin_all(runtime, &mut pages);
}

/// Populates what calls under way may touch that pin no pages ([`super::direct_calls`]).
fn populate_announced(runtime: &Runtime, space: &Space) {
    fence(Ordering::SeqCst);
    for pages in runtime.threads.announcements().iter().flat_map(Announcement::pages) {
        for range in space.mapped_in(pages) {
            populate(runtime, &mut PinnedRun { start: PageId(range.start), count: range.pages() as u32 });
        }
    }
}

/// Makes a run near while the kernel still serves its faults. A run that is not accessible is
/// emptied: the kernel will tell the call.
pub fn populate(runtime: &Runtime, run: &mut PinnedRun) {
    let (address, len) = (window::address_of(run.start), run.count as usize * PAGE_BYTES);
    // SAFETY: populating changes no content.
    let populated = unsafe {
        memory::madvise(address, len, libc::MADV_POPULATE_WRITE)
            .or_else(|_| memory::madvise(address, len, libc::MADV_POPULATE_READ))
    };
    if populated.is_err() {
        run.count = 0;
    }
    for number in run.start.0..run.start.0 + u64::from(run.count) {
        count_near_page(runtime, PageId(number));
    }
}

/// Counts a page that the kernel made near. Returns whether it was not counted before.
fn count_near_page(runtime: &Runtime, page: PageId) -> bool {
    let new = runtime.table().update(page, |word| word.found()).is_some();
    if new {
        enqueue(runtime, page);
    }
    new
}

/// Counts all pages that are near when faults become ours.
fn count_near_pages(runtime: &Runtime, armed: &Armed, mapped: &[PageRange]) {
    let mut runs = [PageRun::default(); 256];
    let mut pages = 0i64;
    for range in mapped {
        let mut start = window::address_of(PageId(range.start));
        let end = window::address_of(PageId(range.end));
        while start < end {
            let (found_runs, walked) = match armed.pagemap.scan(start, end, category::PRESENT, &mut runs) {
                Ok(result) => result,
                Err(errno) => fail(exit::INTERNAL, format_args!("PAGEMAP_SCAN failed: {errno}")),
            };
            for run in &runs[..found_runs] {
                for address in (run.start as usize..run.end as usize).step_by(PAGE_BYTES) {
                    count_near_page(runtime, window::page_of(address));
                    pages += 1;
                }
            }
            start = walked.max(start + PAGE_BYTES);
        }
    }
    runtime.set_near(pages * PAGE_BYTES as i64);
}

/// Runs `action` with room for our descriptors above the program's limit.
pub fn with_descriptors<T>(action: impl FnOnce() -> T) -> T {
    let limit = file::raise_descriptor_limit(window::DESCRIPTORS_END as u64);
    let floor = if limit.available() >= window::DESCRIPTORS_END as u64 {
        window::DESCRIPTORS
    } else {
        (limit.available() as i32 - (window::DESCRIPTORS_END - window::DESCRIPTORS)).max(3)
    };
    farfield_os::net::set_descriptor_floor(floor);
    let result = action();
    limit.restore();
    result
}

/// Returns the builder of the pool at this location, with the access that this process has.
pub fn pool_builder(runtime: &Runtime, location: &PoolLocation) -> PoolBuilder {
    let builder = PoolBuilder::new()
        .inside_a_program()
        .client_name("farfield run")
        .pages(window::PAGES)
        .deadline(Duration::from_secs(10))
        // The runner has seen all servers; since then a member of a mirror may have died.
        .degraded()
        .server_uid(runtime.config().runner_uid.load(Ordering::Relaxed))
        .urls(inherited_fds::reach(runtime.config(), &location.urls));
    if location.token.is_empty() { builder } else { builder.token(location.token.as_str()) }
}

fn open(runtime: &Runtime, inherited: Option<InheritedSnapshot>) -> Armed {
    let internal = |what: &'static str| {
        move |errno: farfield_os::Errno| -> ! { fail(exit::INTERNAL, format_args!("{what}: {errno}")) }
    };
    let config = runtime.config();
    let (location, opened) = match inherited {
        Some(InheritedSnapshot { location, ticket, contents }) => {
            let source = pool_builder(runtime, &location).claim_with(&ticket, &contents);
            (location, source.map(|source| Ok(SwitchBackend::inherit(source, contents))))
        }
        None => {
            let location = PoolLocation::wanted(config);
            let source = pool_builder(runtime, &location).open();
            (location, source.map(SwitchBackend::new))
        }
    };
    let backend = match opened {
        Ok(Ok(backend)) => backend,
        Ok(Err(error)) => super::store::fail_pool_lost(error),
        Err(error) => fail(exit::SERVER_LOST, format_args!("{error}")),
    };
    runtime.slot().pool_epoch.store(location.epoch, Ordering::SeqCst);
    let store = match Store::new(backend, location) {
        Ok(store) => store,
        Err(error) => super::store::fail_pool_lost(error),
    };
    // The child of a fork may have fewer members than its parent.
    tell(runtime, &store, store.backend().health());
    let (mut uffd, mode) = open_uffd(config.mode.load(Ordering::Relaxed));
    let keep = |fd: i32| match file::move_above(fd, window::DESCRIPTORS) {
        Ok(fd) => fd,
        // If the program has a lower limit of descriptors, ours stay where they are.
        Err(_) => fd,
    };
    uffd.renumber(keep);
    let pagemap = match Pagemap::open().or_else(|_| process::while_dumpable(Pagemap::open)) {
        Ok(pagemap) => Pagemap::from_fd(keep(pagemap.fd())),
        Err(errno) => internal("/proc/self/pagemap cannot be opened")(errno),
    };
    let pidfd = match memory::pidfd_self() {
        Ok(fd) => keep(fd),
        Err(errno) => internal("no pidfd")(errno),
    };
    let null = match file::open(c"/dev/null", libc::O_WRONLY) {
        Ok(fd) => keep(fd),
        Err(errno) => internal("/dev/null cannot be opened")(errno),
    };
    let own_memory = memory::OwnMemory::open().or_else(|_| process::while_dumpable(memory::OwnMemory::open));
    let own_memory = own_memory.map(|file| memory::OwnMemory::from_fd(keep(file.fd()))).ok();
    let threads = process::ThreadCount::open().map(|count| process::ThreadCount::from_fd(keep(count.fd()))).ok();
    let pipe = match PagePipe::open(evict::BATCH) {
        Ok(pipe) => PagePipe::from_fds(pipe.fds().map(keep)),
        Err(errno) => internal("no pipe")(errno),
    };
    let evictor = super::lock::SpinLock::new(WindowEvictor::new(pipe));
    Armed { uffd, mode, pagemap, pidfd, null, own_memory, threads, store, evictor }
}

/// Opens a userfaultfd of the mode asked for. In automatic mode, prefers signal mode if it is
/// possible.
fn open_uffd(asked: u32) -> (Uffd, FaultMode) {
    let common = feature::PAGEFAULT_FLAG_WP | feature::WP_UNPOPULATED | feature::WP_ASYNC;
    if asked != FaultMode::Thread as u32 {
        match Uffd::open(FaultOrigin::UserMode, common | feature::SIGBUS) {
            Ok(uffd) => return (uffd, FaultMode::Signal),
            Err(errno) if asked == FaultMode::Signal as u32 => {
                fail(exit::INTERNAL, format_args!("signal mode is not possible here ({errno}); see `farfield doctor`"))
            }
            Err(_) => {}
        }
    }
    match Uffd::open(FaultOrigin::UserAndKernel, common) {
        Ok(uffd) => (uffd, FaultMode::Thread),
        // This process may have been allowed to, before it became another user.
        Err(_) if asked == FaultMode::Thread as u32 && inherited_fds::are_open() => open_uffd(FaultMode::Signal as u32),
        Err(errno) => fail(
            exit::INTERNAL,
            format_args!(
                "userfaultfd refused to serve faults inside system calls ({errno}): thread mode needs root, \
                 CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1; see `farfield doctor`"
            ),
        ),
    }
}

/// Serves the faults of thread mode. Never returns.
extern "C" fn serve_faults(_: usize) -> ! {
    signals::set_mask(!super::signal::OURS);
    let runtime = &RUNTIME;
    own_code::begin_thread();
    let mut faults = [FaultEvent { address: 0, write: false }; 16];
    let mut idle = 0u32;
    loop {
        let served = match runtime.phase() {
            Phase::Armed => runtime.armed().uffd.read_faults(&mut faults).unwrap_or(0),
            _ => 0,
        };
        for fault in &faults[..served] {
            super::fault::on_fault(fault.address, fault.write, None);
            // Whichever thread brought the page, this thread may have missed the wake-up.
            let _ = runtime.armed().uffd.wake(fault.address, PAGE_BYTES);
        }
        idle = if served > 0 { 0 } else { idle + 1 };
        if idle > SPINS && runtime.phase() == Phase::Armed {
            process::wait_readable(runtime.armed().uffd.fd(), TICK);
        }
    }
}
