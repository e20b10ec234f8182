//! Models: the code inside programs, run in every interleaving that a scheduler finds.
//!
//! Only the program is imitated. Its threads are threads of the model. Memory, page faults,
//! eviction, discards and forks are the real code on the real kernel (userfaultfd, pipes, page map)
//! and a real pool (`ram:`). The work of a thread between two accesses to an atomic happens at
//! once; at each access the scheduler decides which thread goes on.
//!
//! An access of the program is a copy through the kernel (`process_vm_readv`), which fails where an
//! instruction would raise SIGBUS. Then the thread does what the signal handler does and tries
//! again.

pub mod scenarios;
pub mod schedule;

use crate::config::Capture;
use crate::control::FaultMode;
use crate::inside::call::Context;
use crate::inside::evict::{EvictionSize, ReclaimMode};
use crate::inside::runtime::{Phase, RUNTIME, Runtime};
use crate::inside::{arm, emulate, fault, queue::PageQueue, switching, table::PageWordTable};
use crate::runner::{Settings, create_control};
use crate::space::PageRange;
use crate::window;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::page_word::{PageWord, State};
use farfield_os::pagemap::{PageRun, category};
use farfield_os::{gate, memory, process};
use std::collections::BTreeSet;

/// Number of pages of the model's program.
pub const PAGES: u64 = 4;
/// Number of threads of a scenario that write.
pub const WRITERS: usize = 4;
/// Number of near pages besides: with next to nothing near the pager brings nothing ahead of need.
const BALLAST_PAGES: i64 = 256;
/// Near budget in bytes, more than a scenario ever needs.
const LIMIT_BYTES: u64 = 1 << 30;
/// Capacity of the eviction queue: so short that it is swept and grows.
const QUEUE_ENTRIES: usize = 3;

/// Returns the first page of the program's memory: the first behind the break's part of the window.
fn first() -> PageId {
    window::page_of(Runtime::BREAK_LIMIT)
}

fn page(index: u64) -> PageId {
    PageId(first().0 + index)
}

fn range() -> PageRange {
    PageRange { start: first().0, end: first().0 + PAGES }
}

/// Returns the address of the word that a writer has in a page.
fn address(index: u64, writer: usize) -> usize {
    window::address_of(page(index)) + writer * 8
}

/// Knowledge of the program about its memory. (No scheduler sees these atomics: knowing takes no
/// time.)
struct WriteHistory {
    /// Last value that each writer has stored in each page.
    stored: [[AtomicU64; PAGES as usize]; WRITERS],
    /// Number of discards of each page that have begun; `over` counts those that are over.
    begun: [AtomicU64; PAGES as usize],
    over: [AtomicU64; PAGES as usize],
}

static KNOWN: WriteHistory = WriteHistory {
    stored: [const { [const { AtomicU64::new(0) }; PAGES as usize] }; WRITERS],
    begun: [const { AtomicU64::new(0) }; PAGES as usize],
    over: [const { AtomicU64::new(0) }; PAGES as usize],
};

/// Makes this process one that runs under the pager, dormant. Called once.
pub fn set_up() {
    let settings = Settings {
        near_limit_bytes: LIMIT_BYTES,
        mode: FaultMode::Signal,
        huge_pages: false,
        capture: Capture::Everything,
        urls: vec!["ram:".into()],
        token: vec![],
    };
    let control = Box::leak(Box::new(create_control(&settings).expect("a control block")));
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE touches nobody's memory.
    unsafe { memory::mmap(window::BASE, window::LEN, libc::PROT_NONE, flags, -1, 0) }.expect("the window");
    // SAFETY: advice on our own reservation.
    unsafe { memory::madvise(window::BASE, window::LEN, libc::MADV_NOHUGEPAGE) }.expect("small pages");
    let slot = control.take_slot(process::pid() as u32, process::identity()).expect("a slot");
    RUNTIME.set_up(control.config(), control, slot, PageWordTable::reserve().expect("tables"));
    RUNTIME.threads.reserve().expect("thread records");
    farfield_os::sync::set_yield(schedule::give_way);
    // The monitor is a thread of the model.
    RUNTIME.monitor.store(1, Ordering::Relaxed);
    assert!(RUNTIME.advance(Phase::Off, Phase::Dormant));
    map();
}

fn map() {
    let (address, len) = (window::address_of(first()), PAGES as usize * PAGE_BYTES);
    // SAFETY: the model's own memory.
    unsafe { memory::mprotect(address, len, libc::PROT_READ | libc::PROT_WRITE) }.expect("memory");
    RUNTIME.space.lock().map(range(), libc::PROT_READ | libc::PROT_WRITE);
}

/// Start state of a schedule.
#[derive(Clone, Copy)]
struct ScheduleStart {
    armed: bool,
    /// Near bytes that other processes of the job leave to this one, beyond what it has.
    room_bytes: i64,
    /// Number of threads of the scenario that are the program's; with more than one it does not
    /// matter how many.
    program_threads: u64,
}

impl ScheduleStart {
    const ARMED: ScheduleStart = ScheduleStart { armed: true, room_bytes: LIMIT_BYTES as i64 / 2, program_threads: 2 };
    const DORMANT: ScheduleStart = ScheduleStart { armed: false, ..ScheduleStart::ARMED };
    /// There is never room, so that every fault evicts; but where nothing can leave, a fault may
    /// overshoot.
    const TIGHT: ScheduleStart =
        ScheduleStart { room_bytes: -(BALLAST_PAGES * PAGE_BYTES as i64), ..ScheduleStart::ARMED };
    /// The program has one thread.
    const ONE: ScheduleStart = ScheduleStart { program_threads: 1, ..ScheduleStart::ARMED };
    /// There is just room for another pool, if all pages of the program leave.
    const SWITCH: ScheduleStart = ScheduleStart { room_bytes: switching::LANES_BYTES, ..ScheduleStart::ARMED };
    /// There is room for another pool of this process and of two children, beside what they share.
    const SWITCH_AND_FORK: ScheduleStart =
        ScheduleStart { room_bytes: 4 * switching::LANES_BYTES, ..ScheduleStart::ARMED };
}

/// Restores the state before the first schedule, except for `start`.
fn reset(start: ScheduleStart) {
    let runtime = &RUNTIME;
    KNOWN.stored.iter().flatten().chain(&KNOWN.begun).chain(&KNOWN.over).for_each(|n| n.store(0, Ordering::Relaxed));
    if runtime.phase() == Phase::Armed && !start.armed {
        // SAFETY: no other thread runs.
        unsafe { runtime.drop_inherited() };
        assert!(runtime.advance(Phase::Armed, Phase::Dormant));
    }
    runtime.set_near(BALLAST_PAGES * PAGE_BYTES as i64);
    if start.armed && runtime.phase() == Phase::Dormant {
        empty_queue();
        arm::arm(runtime, None);
        runtime.set_near(BALLAST_PAGES * PAGE_BYTES as i64);
    }
    empty_queue();
    if start.armed {
        runtime.queue.lock().reserve(QUEUE_ENTRIES).expect("a queue");
    }
}

fn empty_queue() {
    let mut queue = RUNTIME.queue.lock();
    while let Some(page) = queue.pop() {
        RUNTIME.table().update(page, |_| Some(PageWord::default()));
    }
    *queue = PageQueue::empty();
}

/// Runs one schedule of threads: from a clean start, to a state that is checked.
fn run(start: ScheduleStart, threads: Vec<Box<dyn FnOnce() + Send>>) {
    reset(start);
    let (near, limit) = RUNTIME.near();
    let others_bytes = limit - near - start.room_bytes;
    RUNTIME.control().near_bytes.fetch_add(others_bytes, Ordering::Relaxed);
    schedule::begin(start.program_threads);
    let handles: Vec<_> = threads.into_iter().map(shuttle::thread::spawn).collect();
    handles.into_iter().for_each(|handle| handle.join().expect("a thread of the model"));
    schedule::end();
    RUNTIME.control().near_bytes.fetch_sub(others_bytes, Ordering::Relaxed);
    // Arming counts only the pages that exist, and so forgets the ballast.
    check_all(if start.armed { BALLAST_PAGES } else { 0 });
    emulate::discard(&RUNTIME, range(), true);
    let slot = RUNTIME.slot();
    assert_eq!(slot.far_bytes.load(Ordering::Relaxed), 0, "far bytes after everything was discarded");
}

/// Checks what must hold whenever nothing is under way.
fn check_all(ballast_pages: i64) {
    let runtime = &RUNTIME;
    assert_eq!((runtime.busy.load(Ordering::SeqCst), runtime.frozen_by.load(Ordering::SeqCst)), (0, 0));
    for record in runtime.threads.all() {
        record.reap();
    }
    for (writer, pages) in KNOWN.stored.iter().enumerate() {
        for index in 0..PAGES {
            ModelWriter::new(writer).check_last(index, pages[index as usize].load(Ordering::Relaxed));
        }
    }
    if runtime.phase() != Phase::Armed {
        return;
    }
    drop(runtime.armed().store.quiesce());
    let table = runtime.table();
    let (mut near, mut stored) = (BTreeSet::new(), 0);
    for index in 0..PAGES {
        let word = table.word(page(index));
        assert!(!matches!(word.state(), State::Loading | State::Evicting), "page {index} belongs to nobody: {word:?}");
        assert_eq!(word.holds(), 0, "page {index} is held by nobody");
        stored += i64::from(word.is_stored());
        if word.state() == State::Near {
            near.insert(page(index).0);
        }
    }
    let queue = runtime.queue.lock();
    let mut queued = BTreeSet::new();
    for index in 0..queue.len() {
        let page = queue.peek(index).expect("below len");
        assert!(queued.insert(page.0), "page {} is in the queue twice", page.0);
        assert!(table.word(page).is_queued(), "the word of page {} does not know the queue", page.0);
    }
    assert!(near.is_subset(&queued), "a near page will never leave: {near:?} are near, {queued:?} queued");
    for index in 0..PAGES {
        let word = table.word(page(index));
        assert_eq!(word.is_queued(), queued.contains(&page(index).0), "page {index} and the queue disagree: {word:?}");
    }
    let slot = runtime.slot();
    let pages = |bytes: i64| bytes / PAGE_BYTES as i64;
    assert_eq!(pages(slot.near_bytes.load(Ordering::Relaxed)) - ballast_pages, near.len() as i64, "near bytes");
    assert_eq!(pages(slot.far_bytes.load(Ordering::Relaxed)), stored, "far bytes");
    let mut runs = [PageRun::default(); PAGES as usize];
    let (start, end) = (window::address_of(first()), window::address_of(page(PAGES)));
    let (found, _) = runtime.armed().pagemap.scan(start, end, category::PRESENT, &mut runs).expect("the page map");
    let present = runs[..found].iter().flat_map(|run| (run.start as usize..run.end as usize).step_by(PAGE_BYTES));
    let present: BTreeSet<u64> = present.map(|address| window::page_of(address).0).collect();
    assert_eq!(present, near, "what the kernel has near, and what the words say");
}

/// Makes one access as an instruction would. `false` if it would fault.
fn access(call: libc::c_long, address: usize, value: &mut u64) -> bool {
    let ours = libc::iovec { iov_base: (value as *mut u64).cast(), iov_len: 8 };
    let theirs = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: 8 };
    let args = [process::pid() as usize, &raw const ours as usize, 1, &raw const theirs as usize, 1, 0];
    // SAFETY: `value` is ours; the kernel checks the address, which is the model's memory.
    let copied = unsafe { gate::syscall(call, args) };
    copied == Ok(8)
}

/// Returns a context, which only a handler has: nothing is interrupted here, and nobody looks at
/// the registers.
fn context() -> Context {
    // SAFETY: the registers are not looked at, and as in a handler the thread does nothing else as
    // long as this lives.
    unsafe { Context::new(core::ptr::null_mut()) }
}

/// Repeats an access until it succeeds, and does in between what the handler of SIGBUS does.
fn insist(call: libc::c_long, address: usize, value: &mut u64) {
    while !access(call, address, value) {
        let phase = fault::settled_phase(&RUNTIME);
        if phase == Phase::Armed {
            assert!(fault::on_fault(address, call == libc::SYS_process_vm_writev, Some(&context())));
        }
    }
}

/// Thread of the program with a word of its own in every page.
struct ModelWriter {
    number: usize,
    /// Number of discards of each page that were over when the last value was stored.
    over: [u64; PAGES as usize],
    /// Number of moments between the look at a page and the store, at which other threads may go
    /// on.
    slowness: u32,
}

impl ModelWriter {
    fn new(number: usize) -> ModelWriter {
        ModelWriter { number, over: [0; PAGES as usize], slowness: 1 }
    }

    /// Returns a value as it lies in memory; each third is zero, so that whole pages are.
    fn encode(value: u64) -> u64 {
        if value % 3 == 2 { 0 } else { value }
    }

    /// Checks the value that the writer stored last in a page.
    fn check(&self, index: u64) {
        let last = KNOWN.stored[self.number][index as usize].load(Ordering::Relaxed);
        let mut found = 0;
        insist(libc::SYS_process_vm_readv, address(index, self.number), &mut found);
        let discarded = KNOWN.begun[index as usize].load(Ordering::Relaxed) > self.over[index as usize];
        assert!(
            found == ModelWriter::encode(last) || found == 0 && discarded,
            "writer {} stored {last} in page {index} and finds {found}",
            self.number
        );
    }

    /// Checks a page at the end, when nobody knows which discards came before the last value.
    fn check_last(&mut self, index: u64, last: u64) {
        let mut found = 0;
        insist(libc::SYS_process_vm_readv, address(index, self.number), &mut found);
        let discarded = KNOWN.begun[index as usize].load(Ordering::Relaxed) > 0;
        assert!(
            found == ModelWriter::encode(last) || found == 0 && discarded,
            "writer {} stored {last} in page {index}, at the end there is {found}",
            self.number
        );
    }

    /// Checks a page, then stores the next value.
    fn write(&mut self, index: u64) {
        self.check(index);
        // The page is near, and may be clean.
        (0..self.slowness).for_each(|_| schedule::point());
        self.over[index as usize] = KNOWN.over[index as usize].load(Ordering::Relaxed);
        let next = KNOWN.stored[self.number][index as usize].load(Ordering::Relaxed) + 1;
        let mut value = ModelWriter::encode(next);
        insist(libc::SYS_process_vm_writev, address(index, self.number), &mut value);
        KNOWN.stored[self.number][index as usize].store(next, Ordering::Relaxed);
    }
}

/// Discards one page as `madvise(MADV_DONTNEED)` does.
fn discard(index: u64) {
    KNOWN.begun[index as usize].fetch_add(1, Ordering::Relaxed);
    // The space is held, as in `emulate::advise`.
    let space = RUNTIME.space.lock();
    emulate::discard(&RUNTIME, PageRange { start: page(index).0, end: page(index).0 + 1 }, true);
    drop(space);
    KNOWN.over[index as usize].fetch_add(1, Ordering::Relaxed);
}

/// Runs one round of the monitor, as between two of its sleeps.
fn monitor() {
    if RUNTIME.phase() != Phase::Armed {
        return;
    }
    RUNTIME.armed().store.progress();
    evict();
    for record in RUNTIME.threads.all() {
        record.reap();
    }
}

/// Evicts one batch ahead of need.
fn evict() {
    let armed = RUNTIME.armed();
    if let Some(mut evictor) = armed.evictor.try_lock() {
        evictor.run(&RUNTIME, armed, ReclaimMode::Background, EvictionSize::Batch);
    }
}
