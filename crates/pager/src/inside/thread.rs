//! Records of the program's threads: the alternate signal stack of each, and the pages that its
//! system calls pin.
//!
//! Records come from a fixed table, and each has a place for its stack. So a handler knows its
//! thread by its stack pointer, whatever the program has made of its thread-local storage. A record
//! whose thread is gone is used again.

use super::direct_calls::Announcement;
use super::lock::SpinLock;
use super::runtime::{RUNTIME, Runtime};
use super::sync::{self, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::policy::prefetch::Prefetcher;
use farfield_os::{Errno, memory, process};

/// Maximum number of threads of one process.
pub const RECORDS: usize = 8192;
/// Offset of the announcements, which lie behind the records, in the same order.
const ANNOUNCEMENTS: usize = RECORDS * size_of::<ThreadRecord>();
/// Bytes reserved for the records, and for the announcement of each.
pub const TABLE_BYTES: u64 = (ANNOUNCEMENTS + RECORDS * size_of::<Announcement>()) as u64;
const _: () = assert!(ANNOUNCEMENTS.is_multiple_of(align_of::<Announcement>()));
/// Maximum number of nested system calls of one thread (a signal handler's inside an interrupted
/// one's).
pub const FRAMES: usize = 6;
/// Maximum number of runs of pages that one system call can pin.
pub const RUNS: usize = 40;
/// Size of our alternate stacks in bytes. The kernel's frame alone can take 11 KiB (AVX-512 and AMX
/// state).
const STACK_BYTES: usize = 256 << 10;

/// Bytes of a stack that our handlers touch.
const STACK_TOUCHED: i64 = 48 << 10;

/// Bytes of the place of a stack. It has a page without access, the stack, and storage of ours
/// ([`super::storage`]) on both sides of the storage's address, which is at `STORAGE`.
const PLACE_BYTES: usize = PAGE_BYTES + STACK_BYTES + 2 * PAGE_BYTES;
const STORAGE: usize = PAGE_BYTES + STACK_BYTES + PAGE_BYTES;

/// Bytes of one stack within which calls nest. A call deeper in the same stack than another is
/// over when the other begins.
pub(super) const STACK_SPAN: usize = 1 << 20;

/// Value in place of a mask: no call has it, because SIGKILL cannot be blocked.
pub const NO_MASK: u64 = !0;

/// Run of pinned pages.
#[derive(Clone, Copy)]
pub struct PinnedRun {
    /// First page.
    pub start: PageId,
    /// Number of pages.
    pub count: u32,
}

/// Pages that one system call may touch.
pub struct CallFrame {
    /// 1 from before the pages are collected until the call has returned. The forward stub clears
    /// it and has no registers to spare for more: the pages themselves are let go later, by
    /// [`ThreadRecord::reap`].
    pub active: AtomicU32,
    /// Stack pointer of the call.
    pub sp: AtomicUsize,
    /// Mask with which the call waits, if it has one of its own; else [`NO_MASK`].
    pub mask: AtomicU64,
    /// Pages of the call, and whether they are pinned yet.
    pub pages: SpinLock<CallFramePages>,
}

/// Runs of pages in a [`CallFrame`].
pub struct CallFramePages {
    /// The runs in use.
    pub runs: [PinnedRun; RUNS],
    /// Number of runs in use.
    pub len: usize,
    /// Whether the page words count these pins.
    pub pinned: bool,
}

/// Record of one thread.
pub struct ThreadRecord {
    /// Id of the thread; 0 = free.
    pub tid: AtomicI32,
    /// Base of the thread's alternate stack, made by us; 0 = none yet.
    pub stack: AtomicUsize,
    /// Thread pointer that the program had when a handler interrupted it last.
    pub program_storage: AtomicUsize,
    /// Alternate stack that the program believes to have.
    pub program_stack: UnsafeCell<libc::stack_t>,
    /// Base and length of the alternate stack on which a handler of the program began last.
    pub handler_stack: [AtomicUsize; 2],
    /// Our signals that the program believes blocked.
    pub hidden_mask: AtomicU64,
    /// Signals of `hidden_mask` that were sent meanwhile.
    pub postponed_mask: AtomicU64,
    /// Information of the first postponed signal of each kind: SIGBUS, then SIGSYS.
    pub postponed: UnsafeCell<[MaybeUninit<libc::siginfo_t>; 2]>,
    /// Address of the thread's last fault that was not ours and was tried again.
    pub late_fault: AtomicUsize,
    /// 1 for a child of `vfork` that is traced from its `execve` on.
    pub is_traced: AtomicU32,
    /// Base and length of the copies of arguments that the thread's last `execve` worked with.
    pub scratch: [AtomicUsize; 2],
    /// Number of our handlers that the thread is inside of: see [`super::own_code`].
    pub own_code_depth: AtomicU32,
    /// Predictor of the pages that the thread will want next.
    pub prefetcher: SpinLock<Prefetcher>,
    /// Time when the thread's last page had come from the pool; 0 = never.
    pub fetch_ended_ns: AtomicU64,
    /// Frames of nested calls.
    pub frames: [CallFrame; FRAMES],
    /// Pages that the kernel and our handlers use of the thread as long as it lives.
    pub home: CallFrame,
}

// SAFETY: `program_stack` and `postponed` are touched only by the record's own thread; the rest is
// atomic or locked.
unsafe impl Sync for ThreadRecord {}

/// Table of records, in memory of its own: zero bytes are free records.
pub struct ThreadTable {
    base: AtomicUsize,
    /// Address where the places of the stacks begin.
    stacks: AtomicUsize,
    used: AtomicUsize,
}

impl ThreadTable {
    /// Creates the state without a table.
    pub const fn new() -> ThreadTable {
        ThreadTable { base: AtomicUsize::new(0), stacks: AtomicUsize::new(0), used: AtomicUsize::new(0) }
    }

    /// Reserves address space for the table, and for the places of the stacks.
    pub fn reserve(&self) -> farfield_os::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let stacks = unsafe { memory::mmap(0, RECORDS * PLACE_BYTES, libc::PROT_NONE, flags, -1, 0) }?;
        self.stacks.store(stacks, Ordering::Release);
        self.base.store(memory::map_anonymous(TABLE_BYTES as usize)?, Ordering::Release);
        Ok(())
    }

    /// Returns the records in use, or used before.
    pub fn all(&self) -> &[ThreadRecord] {
        let base = self.base.load(Ordering::Acquire);
        if base == 0 {
            return &[];
        }
        // SAFETY: the table is mapped for good; zero bytes are valid records (atomics, open locks,
        // empty frames, a prefetcher whose unused streams are replaced first).
        unsafe {
            core::slice::from_raw_parts(base as *const ThreadRecord, self.used.load(Ordering::Acquire).min(RECORDS))
        }
    }

    /// Returns the announcements of all records in use, or used before.
    pub fn announcements(&self) -> &[Announcement] {
        let base = self.base.load(Ordering::Acquire);
        if base == 0 {
            return &[];
        }
        let first = (base + ANNOUNCEMENTS) as *const Announcement;
        // SAFETY: as in `all`; zero bytes announce nothing.
        unsafe { core::slice::from_raw_parts(first, self.used.load(Ordering::SeqCst).min(RECORDS)) }
    }

    /// Returns the record with this index, which [`ThreadTable::announcement_of`] has given, and its
    /// announcement.
    pub fn record(&self, index: usize) -> (&ThreadRecord, &Announcement) {
        assert!(index < RECORDS);
        let base = self.base.load(Ordering::Relaxed);
        let (records, announcements) = (base as *const ThreadRecord, (base + ANNOUNCEMENTS) as *const Announcement);
        // SAFETY: inside the table, which exists once there is an index.
        unsafe { (&*records.add(index), &*announcements.add(index)) }
    }

    /// Returns the index and the announcement of a record.
    pub fn announcement_of(&self, record: &ThreadRecord) -> (usize, &Announcement) {
        let index = self.index_of(record);
        (index, self.record(index).1)
    }

    /// Finds the record whose stack this address lies on.
    fn with_stack(&self, address: usize) -> Option<&ThreadRecord> {
        let stacks = self.stacks.load(Ordering::Relaxed);
        let index = address.checked_sub(stacks)? / PLACE_BYTES;
        if stacks == 0 || index >= RECORDS {
            return None;
        }
        // SAFETY: inside the table.
        Some(unsafe { &*(self.base.load(Ordering::Relaxed) as *const ThreadRecord).add(index) })
    }

    fn index_of(&self, record: &ThreadRecord) -> usize {
        (core::ptr::from_ref(record) as usize - self.base.load(Ordering::Relaxed)) / size_of::<ThreadRecord>()
    }

    /// Returns the address of the place of a record's stack.
    fn place_of(&self, record: &ThreadRecord) -> usize {
        self.stacks.load(Ordering::Relaxed) + self.index_of(record) * PLACE_BYTES
    }

    fn acquire(&self, tid: i32) -> Option<&ThreadRecord> {
        for record in self.all() {
            let old = record.tid.load(Ordering::Acquire);
            let free = old == 0 || !sync::thread_exists(old);
            if free && record.tid.compare_exchange(old, tid, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                record.unpin_all();
                record.own_code_depth.store(0, Ordering::Relaxed);
                record.hidden_mask.store(0, Ordering::Relaxed);
                record.postponed_mask.store(0, Ordering::Relaxed);
                record.enter_handler_stack(0, 0);
                record.is_traced.store(0, Ordering::Relaxed);
                return Some(record);
            }
        }
        loop {
            let index = self.used.load(Ordering::Acquire);
            if index == RECORDS {
                return None;
            }
            let base = self.base.load(Ordering::Acquire);
            // SAFETY: inside the table.
            let record = unsafe { &*(base as *const ThreadRecord).add(index) };
            if record.tid.compare_exchange(0, tid, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                let _ = self.used.compare_exchange(index, index + 1, Ordering::AcqRel, Ordering::Relaxed);
                return Some(record);
            }
            // Another thread took the record and has not moved the end yet: help.
            let _ = self.used.compare_exchange(index, index + 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Takes a record for a thread that is about to be made, which gets its
    /// [`name`](ThreadRecord::name) then. `None` if all are taken.
    pub fn acquire_unnamed(&self) -> Option<&ThreadRecord> {
        self.acquire(UNNAMED)
    }

    /// Lets the pages of finished calls go, and frees, a few at a time, the records of threads that
    /// have ended. `turn` counts the calls.
    pub fn reap_dead(&self, turn: usize) {
        const LOOKS: usize = 8;
        let records = self.all();
        records.iter().for_each(ThreadRecord::reap);
        for index in (turn * LOOKS..).take(LOOKS.min(records.len())) {
            let record = &records[index % records.len()];
            let tid = record.tid.load(Ordering::Acquire);
            // The record is taken before it is emptied: no other thread may get it meanwhile.
            if tid > 0
                && !sync::thread_exists(tid)
                && record.tid.compare_exchange(tid, UNNAMED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                record.leave();
            }
        }
    }

    /// Keeps, in the child of a fork, only the record of the forking thread, which exists under a
    /// new id.
    pub fn reset_in_child(&self, me: Option<&ThreadRecord>) {
        for record in self.all() {
            for frame in record.all_frames() {
                // SAFETY: no other thread exists.
                unsafe { frame.pages.reset() };
            }
            if me.is_some_and(|me| core::ptr::eq(record, me)) {
                record.tid.store(sync::tid(), Ordering::Release);
                record.postponed_mask.store(0, Ordering::Relaxed);
            } else {
                record.leave();
            }
        }
    }
}

impl Default for ThreadTable {
    fn default() -> Self {
        Self::new()
    }
}

/// Value in place of the id of a thread that is not there yet. (No thread has it, and to the kernel
/// it is no id: it is not "gone".)
const UNNAMED: i32 = -1;

/// Returns the stack pointer.
#[inline(always)]
pub(super) fn stack_pointer() -> usize {
    let sp: usize;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mov {}, rsp", out(reg) sp, options(nomem, nostack, preserves_flags)) };
    sp
}

/// Returns the record of this thread, made on first use. `None` when there are too many threads.
///
/// A handler runs on the stack of its thread's record. Exceptions are a thread's first handler, and
/// threads that we did not start.
pub fn current() -> Option<&'static ThreadRecord> {
    if let Some(record) = RUNTIME.threads.with_stack(stack_pointer()) {
        return Some(record);
    }
    let tid = sync::tid();
    let known = RUNTIME.threads.all().iter().find(|record| record.tid.load(Ordering::Acquire) == tid);
    known.or_else(|| RUNTIME.threads.acquire(tid))
}

/// Starts a thread of ours, which runs on the stack of a record as handlers do. It inherits the
/// signal mask.
///
/// # Safety
/// `entry` must never return, and must not use thread-locals that need the dynamic loader.
pub unsafe fn spawn(entry: extern "C" fn(usize) -> !) -> farfield_os::Result<()> {
    let record = RUNTIME.threads.acquire_unnamed().ok_or(Errno(libc::EAGAIN))?;
    let started = record.alternate_stack().and_then(|(base, len)| {
        // SAFETY: the stack and the storage are those of a thread that is not there yet; `entry` by
        // the caller.
        unsafe { process::spawn_on(base + len, record.storage()?, entry, 0) }
    });
    match started {
        Ok(tid) => record.name(tid),
        Err(_) => record.leave(),
    }
    started.map(drop)
}

impl ThreadRecord {
    /// Returns base and length of the thread's alternate stack, which is made on first use.
    pub fn alternate_stack(&self) -> farfield_os::Result<(usize, usize)> {
        let base = self.stack.load(Ordering::Relaxed);
        if base != 0 {
            return Ok((base, STACK_BYTES));
        }
        let place = RUNTIME.threads.place_of(self);
        let (new, storage) = (place + PAGE_BYTES, place + STORAGE);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the place is this record's, and nothing is there yet.
        unsafe {
            memory::mprotect(new, PLACE_BYTES - PAGE_BYTES, access)?;
            process::begin_storage(storage);
        }
        RUNTIME.add_meta(STACK_TOUCHED);
        self.stack.store(new, Ordering::Relaxed);
        Ok((new, STACK_BYTES))
    }

    /// Returns the thread pointer of handlers on this stack.
    pub fn storage(&self) -> farfield_os::Result<usize> {
        self.alternate_stack().map(|(base, _)| base - PAGE_BYTES + STORAGE)
    }

    /// Remembers the memory of an `execve` and frees that of the one before. After a vfork child
    /// has gone on to another program, its copies are still in our memory.
    pub fn replace_scratch(&self, base: usize, len: usize) {
        let (old, old_len) =
            (self.scratch[0].swap(base, Ordering::Relaxed), self.scratch[1].swap(len, Ordering::Relaxed));
        if old != 0 {
            // SAFETY: made by an `execve` of this thread that is over.
            let _ = unsafe { memory::munmap(old, old_len) };
        }
    }

    /// Notes that the thread that the record was acquired for is there.
    pub fn name(&self, tid: i32) {
        // The first call counts: parent and child both make it, and the child may have ended
        // meanwhile.
        let _ = self.tid.compare_exchange(UNNAMED, tid, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Sets what a new thread has of the thread that made it.
    pub fn inherit(&self, parent: &ThreadRecord, stack_too: bool) {
        self.hidden_mask.store(parent.hidden_mask.load(Ordering::Relaxed), Ordering::Relaxed);
        let none = libc::stack_t { ss_sp: core::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: the parent is this thread, and the new one does not run yet.
        unsafe { *self.program_stack.get() = if stack_too { *parent.program_stack.get() } else { none } };
    }

    /// Frees the record when its thread is gone: another one may have it.
    pub fn leave(&self) {
        self.unpin_all();
        self.replace_scratch(0, 0);
        self.tid.store(0, Ordering::Release);
    }

    /// Lets all pages go, also those of calls under way.
    fn unpin_all(&self) {
        RUNTIME.threads.announcement_of(self).1.change_thread();
        for frame in self.all_frames() {
            frame.active.store(0, Ordering::Release);
        }
        self.reap();
    }

    /// Returns the frames of calls, and the thread's own.
    pub fn all_frames(&self) -> impl Iterator<Item = &CallFrame> {
        self.frames.iter().chain([&self.home])
    }

    /// Checks whether the address is on our alternate stack of this thread.
    pub fn on_alternate_stack(&self, address: usize) -> bool {
        let base = self.stack.load(Ordering::Relaxed);
        base != 0 && address >= base && address < base + STACK_BYTES
    }

    /// Checks whether the address is on the alternate stack of the program on which a handler began
    /// last.
    fn on_handler_stack(&self, address: usize) -> bool {
        let [base, len] = [0, 1].map(|index| self.handler_stack[index].load(Ordering::Relaxed));
        address >= base && address - base <= len
    }

    /// Checks whether two addresses of the thread's stacks are both on that alternate stack, or both
    /// not.
    pub(super) fn is_same_stack(&self, one: usize, other: usize) -> bool {
        self.on_handler_stack(one) == self.on_handler_stack(other)
    }

    /// Notes that a handler of the program begins on an alternate stack.
    pub fn enter_handler_stack(&self, base: usize, len: usize) {
        self.handler_stack[0].store(base, Ordering::Relaxed);
        self.handler_stack[1].store(len, Ordering::Relaxed);
    }

    /// Finds the call under way whose stack pointer was `sp`.
    pub fn frame_at(&self, sp: usize) -> Option<&CallFrame> {
        let is_it =
            |frame: &&CallFrame| frame.active.load(Ordering::Relaxed) != 0 && frame.sp.load(Ordering::Relaxed) == sp;
        self.frames.iter().find(is_it)
    }

    /// Lets the pages of finished calls go.
    pub fn reap(&self) {
        for frame in self.all_frames() {
            if frame.active.load(Ordering::Acquire) == 0 {
                let Some(mut pages) = frame.pages.try_lock() else { continue };
                if frame.active.load(Ordering::Acquire) == 0 {
                    pages.release(&RUNTIME);
                }
            }
        }
    }

    /// Takes a frame for a call whose stack pointer is `sp`. Frames of calls that a signal handler
    /// jumped out of are recognised by their place on the stack and ended.
    pub fn enter(&self, sp: usize) -> &CallFrame {
        self.reap();
        for frame in &self.frames {
            let old = frame.sp.load(Ordering::Relaxed);
            // A call deeper in the same stack than we are now cannot still be under way.
            let same_stack = self.is_same_stack(sp, old);
            if frame.active.load(Ordering::Relaxed) != 0 && same_stack && old <= sp && sp - old < STACK_SPAN {
                frame.active.store(0, Ordering::Release);
            }
        }
        self.reap();
        let frame = self
            .frames
            .iter()
            .find(|frame| frame.active.load(Ordering::Relaxed) == 0)
            .unwrap_or(&self.frames[FRAMES - 1]);
        let mut pages = frame.pages.lock();
        pages.release(&RUNTIME);
        frame.sp.store(sp, Ordering::Relaxed);
        frame.mask.store(NO_MASK, Ordering::Relaxed);
        frame.active.store(1, Ordering::SeqCst);
        drop(pages);
        frame
    }
}

impl CallFramePages {
    /// Forgets the pages, after having let them go.
    pub fn release(&mut self, runtime: &Runtime) {
        if self.pinned {
            for run in &self.runs[..self.len] {
                for index in 0..u64::from(run.count) {
                    let page = PageId(run.start.0 + index);
                    let _ = runtime.table().update(page, |word| (word.holds() > 0).then(|| word.release()));
                }
            }
        }
        self.len = 0;
        self.pinned = false;
    }
}
