//! System calls on far buffers: the buffers are brought near and pinned until the call has
//! returned.
//!
//! The handler does not make the call itself, for then the program's signals would be blocked
//! meanwhile. It collects and pins the pages, then lets the thread resume in a stub. The stub
//! makes the call at the forward gate, marks the pages as free to go, and returns to where the
//! program called. The stub's frame lies below the program's red zone:
//!
//! ```text
//! sp - 1168: address of the frame's `active` word   (popped)
//! sp - 1160: where the program goes on               (return address)
//! sp - 1152: 1024 bytes of scratch: copies of masks and iovecs that the call uses instead of the program's
//! sp -  128: red zone
//! sp
//! ```

use super::call::{CallOutcome, Context, error, forward as call_forward};
use super::fault::{fault_in, fault_in_and_pin, settled_phase};
use super::io_uring;
use super::runtime::{Phase, RUNTIME, Runtime};
use super::signal::OURS;
use super::thread::{self, CallFrame, CallFramePages, NO_MASK, PinnedRun, RUNS, ThreadRecord};
use crate::space::{FOREIGN, PageRange};
use crate::submission::{OperandMemory, SYS_IO_PGETEVENTS};
use crate::window;
use core::sync::atomic::Ordering;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::signals::SignalSet;
use farfield_os::{file, gate, process, uffd};

const RED_ZONE: usize = 128;
const SCRATCH: usize = 1024;
/// Bytes that the stub has on the stack.
const STUB_BYTES: usize = RED_ZONE + SCRATCH + 16;
/// Bytes that a call whose pointers we do not know in detail may touch behind each of them.
const UNKNOWN_BYTES: usize = 4096;
/// End of user addresses.
const USER_END: usize = 0x7fff_ffff_f000;
/// Flag that makes the argument of `io_uring_enter` a structure (`IORING_ENTER_EXT_ARG`).
const ENTER_EXTENDED: u32 = 1 << 3;
/// Number of iovecs that fit the scratch.
const IOVECS: usize = 32;

core::arch::global_asm!(
    ".pushsection .text.farfield_forward,\"ax\",@progbits",
    ".balign 16",
    ".globl farfield_forward_stub",
    ".hidden farfield_forward_stub",
    "farfield_forward_stub:",
    "call qword ptr [rip + 2f]",
    // rcx and r11 are free: the kernel has overwritten them.
    "pop r11",
    "mov dword ptr [r11], 0",
    "ret {skip}",
    // The second stub is for a call whose first half has been made already: its result is the first
    // word of the scratch.
    ".balign 16",
    ".globl farfield_forward_rest_stub",
    ".hidden farfield_forward_rest_stub",
    "farfield_forward_rest_stub:",
    "call qword ptr [rip + 2f]",
    "pop r11",
    "mov dword ptr [r11], 0",
    "mov rax, qword ptr [rsp + 8]",
    "ret {skip}",
    ".balign 8",
    "2: .quad {gate}",
    ".popsection",
    skip = const RED_ZONE + SCRATCH,
    gate = const window::GATE_FORWARD,
);

unsafe extern "C" {
    fn farfield_forward_stub();
    fn farfield_forward_rest_stub();
}

/// Lets the kernel make the call, with its buffers near and pinned.
pub fn forward(number: usize, context: &Context) {
    resume_in_stub(number, context, farfield_forward_stub, |_| Some(()));
}

/// Lets the kernel make the waiting half of `io_uring_enter`, whose submitting half is done, with
/// its buffers near and pinned. The call gets a copy of its mask that leaves our signals open. The
/// program gets `submitted` as the result, if there were any.
pub fn wait_on_ring(context: &Context, submitted: u32) -> CallOutcome {
    let (args, sp) = (context.arguments(), context.sp());
    let mut waits_with = None;
    let (flags, argument, size) = (args[3] as u32, args[4], args[5]);
    let stub = if submitted > 0 { farfield_forward_rest_stub } else { farfield_forward_stub };
    let prepared = resume_in_stub(libc::SYS_io_uring_enter as usize, context, stub, |scratch| {
        let (result, extended, mask) = (scratch, scratch + 16, scratch + 48);
        let pointer = match (argument, flags & ENTER_EXTENDED != 0) {
            (0, _) => 0,
            (_, false) => argument,
            (_, true) if size != size_of::<[u64; 3]>() => 0, // The kernel will refuse it.
            (_, true) => {
                let mut copy = peek::<[u64; 3]>(argument)?;
                let pointer = copy[0] as usize;
                if pointer != 0 {
                    copy[0] = mask as u64;
                }
                // SAFETY: inside the scratch.
                unsafe { (extended as *mut [u64; 3]).write(copy) };
                context.set_argument(4, extended);
                pointer
            }
        };
        let open = if pointer == 0 { 0 } else { peek::<SignalSet>(pointer)? & !OURS };
        waits_with = (pointer != 0).then_some(open);
        // SAFETY: inside the scratch.
        unsafe {
            (result as *mut usize).write(submitted as usize);
            (mask as *mut SignalSet).write(open);
        }
        if pointer != 0 && flags & ENTER_EXTENDED == 0 {
            context.set_argument(4, mask);
        }
        context.set_argument(1, 0);
        Some(())
    });
    wait_with(sp, waits_with);
    if prepared { CallOutcome::Resume } else { error(libc::EFAULT) }
}

/// Returns the mask of a call that has just been interrupted while it waited with one of its own.
/// (The frame of the signal has the mask that is in force again after the call.)
pub fn mask_of_wait(record: &ThreadRecord, context: &Context) -> Option<SignalSet> {
    // The thread is behind the `syscall` of the gate, which the stub has called.
    if context.ip() != window::GATE_FORWARD + 2 || context.result() != -(libc::EINTR as isize) {
        return None;
    }
    let sp = context.sp() + size_of::<usize>() + STUB_BYTES;
    let mask = record.frame_at(sp)?.mask.load(Ordering::Relaxed);
    (mask != NO_MASK).then_some(mask)
}

/// Remembers the mask with which the call that is prepared on this stack will wait.
fn wait_with(sp: usize, mask: Option<SignalSet>) {
    if let (Some(mask), Some(frame)) = (mask, thread::current().and_then(|record| record.frame_at(sp))) {
        frame.mask.store(mask, Ordering::Relaxed);
    }
}

/// Lets the kernel make a call that sets a signal mask while it waits, with its buffers near and
/// pinned. The call gets a copy of the mask that leaves our signals open.
pub fn forward_with_mask(number: usize, context: &Context) -> CallOutcome {
    let (args, sp) = (context.arguments(), context.sp());
    let mut waits_with = None;
    let prepared = resume_in_stub(number, context, farfield_forward_stub, |scratch| {
        let mut masked = |pointer: usize| {
            waits_with = peek::<SignalSet>(pointer).map(|mask| mask & !OURS);
            waits_with
        };
        match number as i64 {
            libc::SYS_pselect6 | SYS_IO_PGETEVENTS if args[5] == 0 => {}
            libc::SYS_pselect6 | SYS_IO_PGETEVENTS => {
                let [pointer, size] = peek::<[usize; 2]>(args[5])?;
                let mask = if pointer == 0 { None } else { Some(masked(pointer)?) };
                let copy = if mask.is_some() { scratch + 16 } else { 0 };
                // SAFETY: inside the scratch.
                unsafe {
                    (scratch as *mut [usize; 2]).write([copy, size]);
                    if let Some(mask) = mask {
                        (copy as *mut SignalSet).write(mask);
                    }
                }
                context.set_argument(5, scratch);
            }
            call => {
                let index = match call {
                    libc::SYS_rt_sigsuspend => 0,
                    libc::SYS_ppoll => 3,
                    _ => 4,
                };
                if args[index] != 0 {
                    // SAFETY: inside the scratch.
                    unsafe { (scratch as *mut SignalSet).write(masked(args[index])?) };
                    context.set_argument(index, scratch);
                }
            }
        }
        Some(())
    });
    wait_with(sp, waits_with);
    if prepared { CallOutcome::Resume } else { error(libc::EFAULT) }
}

/// Collects and pins a call's pages, and makes the thread resume in the stub. `prepare` may use
/// the scratch and change arguments; `None` from it means that a pointer is bad. Returns whether
/// all pointers were good.
fn resume_in_stub(
    number: usize,
    context: &Context,
    stub: unsafe extern "C" fn(),
    prepare: impl FnOnce(usize) -> Option<()>,
) -> bool {
    let runtime = &RUNTIME;
    let sp = context.sp();
    let base = sp - STUB_BYTES;
    // A stack in far memory (a coroutine's) must be near for the writes below.
    touch_near(runtime, base, SCRATCH + 16);
    if prepare(base + 16).is_none() {
        return false;
    }
    let Some(record) = thread::current() else {
        context.set_result(-(libc::EAGAIN as isize));
        return true;
    };
    let frame = record.enter(sp);
    let large = large_transfer(runtime, number, context, base + 16);
    if let Some(result) = large {
        frame.active.store(0, Ordering::Release);
        context.set_result(result);
        return true;
    }
    // The pages are collected without the frame's lock, which an arming thread takes.
    let mut collected =
        CallFramePages { runs: [PinnedRun { start: PageId(0), count: 0 }; RUNS], len: 0, pinned: false };
    let mut collector = BufferCollector::new(runtime, &mut collected);
    collector.call(number, &context.arguments());
    let guarded = collected.len > 0;
    pin_for(runtime, frame, collected, || must_pin(runtime, number, context.arguments()[0]));
    if guarded {
        runtime.counters().syscalls_guarded.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: below the thread's red zone, on its own stack, brought near above.
    unsafe {
        (base as *mut usize).write(frame.active.as_ptr() as usize);
        ((base + 8) as *mut usize).write(context.ip());
    }
    context.set_sp(base);
    context.set_ip(stub as *const () as usize);
    context.set_number(number);
    true
}

/// Pins pages until the frame, which is active, is not active any more.
pub fn pin_for(runtime: &Runtime, frame: &CallFrame, collected: CallFramePages, must: impl FnOnce() -> bool) {
    let mut pages = frame.pages.lock();
    pages.release(runtime);
    *pages = collected;
    drop(pages);
    // From here on an arming thread pins these pages. If a thread is just arming, or has armed
    // before it could see them, they are pinned here.
    settled_phase(runtime);
    if must() {
        let mut pages = frame.pages.lock();
        if !pages.pinned {
            pin_all(runtime, &mut pages);
        }
    }
}

/// Collects the pages of these buffers (address and length), as far as they are in the window and
/// mapped.
pub fn collect(runtime: &Runtime, buffers: &[(usize, usize)]) -> CallFramePages {
    let mut pages = CallFramePages { runs: [PinnedRun { start: PageId(0), count: 0 }; RUNS], len: 0, pinned: false };
    let mut collector = BufferCollector::new(runtime, &mut pages);
    buffers.iter().for_each(|&(address, len)| collector.add(address, len));
    pages
}

/// Checks whether the buffers of a call must be near and pinned. In signal mode they always must,
/// once faults are ours. In thread mode faults inside calls are served too. There they must only
/// where a device fills memory that the kernel has looked up before: a page that left in between
/// would miss what arrives.
fn must_pin(runtime: &Runtime, number: usize, descriptor: usize) -> bool {
    let reads = matches!(
        number as i64,
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_readv | libc::SYS_preadv | libc::SYS_preadv2
    );
    settled_phase(runtime) == Phase::Armed && (runtime.guards() || reads && file::is_direct(descriptor as i32))
}

/// Pins the pages that a frame names.
pub fn pin_all(runtime: &Runtime, pages: &mut CallFramePages) {
    for index in 0..pages.len {
        let run = pages.runs[index];
        let pinned = fault_in_and_pin(runtime, run.start, run.count);
        if pinned < run.count {
            // The rest cannot be provided: the kernel will return EFAULT, as it should.
            pages.runs[index].count = pinned;
            pages.len = index + 1;
            break;
        }
    }
    pages.pinned = true;
}

/// Returns the maximum number of bytes that one call may pin.
fn pin_bytes_max(runtime: &Runtime) -> usize {
    ((runtime.near().1 / 16) as usize).clamp(256 << 10, 64 << 20)
}

/// Returns the maximum number of bytes that a call may pin which can wait for ever. It may wait
/// for a peer or a terminal, and many threads may be in such a call.
pub fn waiting_bytes_max(runtime: &Runtime) -> usize {
    ((runtime.near().1 / 256) as usize).clamp(64 << 10, 16 << 20)
}

/// Handles reads and writes larger than what one call may pin. A transfer of a file is made piece
/// by piece, so that the program gets what it asked for. A transfer of a stream is shortened, which
/// a program must expect there. Returns the result if all is done.
fn large_transfer(runtime: &Runtime, number: usize, context: &Context, scratch: usize) -> Option<isize> {
    let args = context.arguments();
    if !must_pin(runtime, number, args[0]) {
        return None;
    }
    if args[1].checked_add(args[2]).is_none_or(|end| end > USER_END) {
        // The arguments are nonsense: the kernel's answer is the right one.
        return None;
    }
    let max = pin_bytes_max(runtime);
    let waiting = waiting_bytes_max(runtime);
    let stream = || file::is_stream(args[0] as i32);
    match number as i64 {
        libc::SYS_read | libc::SYS_write | libc::SYS_recvfrom | libc::SYS_sendto if args[2] > waiting && stream() => {
            context.set_argument(2, waiting);
            None
        }
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64
            if args[2] > max && file::is_regular(args[0] as i32) =>
        {
            Some(piecewise(runtime, number, args, max))
        }
        libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_preadv
        | libc::SYS_pwritev
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
            if !fits(args[1], args[2], waiting) =>
        {
            let most = if stream() { waiting } else { max };
            if fits(args[1], args[2], most) {
                return None;
            }
            let flagged = matches!(number as i64, libc::SYS_preadv2 | libc::SYS_pwritev2);
            if !flagged && file::is_regular(args[0] as i32) {
                return Some(piecewise_vector(runtime, number, args, max));
            }
            shorten_vector(context, args, most, scratch);
            None
        }
        _ => None,
    }
}

/// Checks whether one call can pin the whole vector.
fn fits(address: usize, count: usize, max: usize) -> bool {
    let mut parts = [libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; IOVECS];
    if count > IOVECS || !peek_slice(address, &mut parts[..count]) {
        return false;
    }
    parts[..count].iter().fold(0usize, |sum, part| sum.saturating_add(part.iov_len)) <= max
}

/// Makes a vectored transfer of a file that one call cannot pin, part by part. Returns the
/// kernel's result.
fn piecewise_vector(runtime: &Runtime, number: usize, args: [usize; 6], max: usize) -> isize {
    if args[2] > 1024 {
        return -(libc::EINVAL as isize);
    }
    let (single, positioned) = match number as i64 {
        libc::SYS_readv => (libc::SYS_read, false),
        libc::SYS_writev => (libc::SYS_write, false),
        libc::SYS_preadv => (libc::SYS_pread64, true),
        _ => (libc::SYS_pwrite64, true),
    };
    let mut total = 0usize;
    for index in 0..args[2] {
        let Some(part) = peek::<libc::iovec>(args[1] + index * size_of::<libc::iovec>()) else {
            return if total > 0 { total as isize } else { -(libc::EFAULT as isize) };
        };
        let offset = if positioned { args[3] + total } else { 0 };
        let step = [args[0], part.iov_base as usize, part.iov_len, offset, 0, 0];
        let result = piecewise(runtime, single as usize, step, max);
        if result < 0 {
            return if total > 0 { total as isize } else { result };
        }
        total += result as usize;
        if (result as usize) < part.iov_len {
            break;
        }
    }
    total as isize
}

fn piecewise(runtime: &Runtime, number: usize, args: [usize; 6], max: usize) -> isize {
    let mut total = 0usize;
    while total < args[2] {
        let len = (args[2] - total).min(max);
        let mut pages = collect(runtime, &[(args[1] + total, len)]);
        pin_all(runtime, &mut pages);
        let mut step = args;
        step[1] += total;
        step[2] = len;
        if matches!(number as i64, libc::SYS_pread64 | libc::SYS_pwrite64) {
            step[3] += total;
        }
        // SAFETY: the program's own call, a piece of it.
        let result = unsafe { call_forward(number, step) };
        pages.release(runtime);
        if result < 0 {
            return if total > 0 { total as isize } else { result };
        }
        total += result as usize;
        if (result as usize) < len {
            break;
        }
    }
    total as isize
}

/// Shortens a vectored transfer with more parts or bytes than one call may pin to its first parts.
fn shorten_vector(context: &Context, args: [usize; 6], max: usize, scratch: usize) {
    let mut parts = [libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; IOVECS];
    let look = args[2].min(IOVECS);
    if args[2] > 1024 || look == 0 || !peek_slice(args[1], &mut parts[..look]) {
        return;
    }
    let mut bytes = 0usize;
    let mut used = 0;
    for part in &mut parts[..look] {
        if bytes >= max {
            break;
        }
        part.iov_len = part.iov_len.min(max - bytes);
        bytes += part.iov_len;
        used += 1;
    }
    // SAFETY: inside the scratch, which has room for IOVECS parts.
    unsafe { core::ptr::copy_nonoverlapping(parts.as_ptr(), scratch as *mut libc::iovec, used) };
    context.set_argument(1, scratch);
    context.set_argument(2, used);
}

const _: () = assert!(IOVECS * size_of::<libc::iovec>() <= SCRATCH);

/// Container of the runs that a collector finds.
pub trait RunSink {
    /// Returns the run found last.
    fn last(&mut self) -> Option<&mut PinnedRun>;
    /// Appends a run, if there is room.
    fn push(&mut self, run: PinnedRun);
}

impl RunSink for CallFramePages {
    fn last(&mut self) -> Option<&mut PinnedRun> {
        self.runs[..self.len].last_mut()
    }
    fn push(&mut self, run: PinnedRun) {
        if self.len < RUNS {
            self.runs[self.len] = run;
            self.len += 1;
        }
    }
}

impl RunSink for Vec<PinnedRun> {
    fn last(&mut self) -> Option<&mut PinnedRun> {
        self.last_mut()
    }
    fn push(&mut self, run: PinnedRun) {
        self.push(run);
    }
}

/// Collector of the pages of a call's buffers.
pub struct BufferCollector<'a, R> {
    runtime: &'a Runtime,
    pages: &'a mut R,
    bytes: usize,
}

impl<'a, R: RunSink> BufferCollector<'a, R> {
    /// Creates a collector that adds to `pages`.
    pub fn new(runtime: &'a Runtime, pages: &'a mut R) -> BufferCollector<'a, R> {
        BufferCollector { runtime, pages, bytes: 0 }
    }

    /// Returns the number of bytes in the pages found.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds the memory that an asynchronous operation names.
    pub fn part(&mut self, part: OperandMemory) {
        match part {
            OperandMemory::Nothing => {}
            OperandMemory::Bytes(address, len) | OperandMemory::Provided(address, len) => {
                self.add(address as usize, len as usize)
            }
            OperandMemory::Text(address) => self.add(address as usize, UNKNOWN_BYTES),
            OperandMemory::Vector(address, count) => self.vector(address as usize, count as usize),
            OperandMemory::Message(address) => self.message(address as usize),
            OperandMemory::Waiters(address, count) => self.waiters(address as usize, count as usize),
        }
    }

    /// Adds a buffer, if any of it is in the window and mapped.
    pub fn add(&mut self, address: usize, len: usize) {
        if len == 0 || !window::contains(address) {
            return;
        }
        // The sum is never more than half the budget: the kernel stops where the rest is missing,
        // and so does the call.
        let len = len.min(((self.runtime.near().1 / 2) as usize).saturating_sub(self.bytes));
        if len == 0 {
            return;
        }
        let end = address.saturating_add(len).min(window::end_of(address));
        let mut range = PageRange { start: window::page_of(address).0, end: window::page_of(end - 1).0 + 1 };
        // The range ends at the first gap in what is mapped: the kernel stops there too.
        {
            let space = self.runtime.space.lock();
            let mut mapped_end = range.start;
            while mapped_end < range.end {
                match space.stretch(mapped_end) {
                    Some((stretch, prot)) if prot != libc::PROT_NONE && prot != FOREIGN => mapped_end = stretch.end,
                    _ => break,
                }
            }
            range.end = range.end.min(mapped_end);
        }
        if range.start >= range.end {
            return;
        }
        self.bytes += range.pages() as usize * PAGE_BYTES;
        if let Some(last) = self.pages.last() {
            let last_end = last.start.0 + u64::from(last.count);
            if range.start >= last.start.0 && range.start <= last_end {
                last.count = (range.end.max(last_end) - last.start.0) as u32;
                return;
            }
        }
        self.pages.push(PinnedRun { start: PageId(range.start), count: range.pages() as u32 });
    }

    /// Adds an array of iovecs and what they name.
    pub fn vector(&mut self, address: usize, count: usize) {
        self.add(address, count.min(1024) * size_of::<libc::iovec>());
        for index in 0..count.min(1024) {
            let Some(part) = peek::<libc::iovec>(address + index * size_of::<libc::iovec>()) else { return };
            self.add(part.iov_base as usize, part.iov_len);
        }
    }

    fn message(&mut self, address: usize) {
        self.add(address, size_of::<libc::msghdr>());
        // SAFETY: plain numbers and pointers.
        let Some(message) = peek::<libc::msghdr>(address) else { return };
        self.add(message.msg_name as usize, message.msg_namelen as usize);
        self.vector(message.msg_iov as usize, message.msg_iovlen);
        self.add(message.msg_control as usize, message.msg_controllen);
    }

    fn waiters(&mut self, address: usize, count: usize) {
        self.add(address, count.min(128) * 24);
        for index in 0..count.min(128) {
            let Some(waiter) = peek::<[u64; 3]>(address + index * 24) else { break };
            self.add(waiter[1] as usize, 8);
        }
    }

    /// Adds all buffers of a call.
    fn call(&mut self, number: usize, args: &[usize; 6]) {
        let a = *args;
        match number as i64 {
            libc::SYS_read
            | libc::SYS_write
            | libc::SYS_pread64
            | libc::SYS_pwrite64
            | libc::SYS_getdents
            | libc::SYS_getdents64
            | libc::SYS_mq_timedsend
            | libc::SYS_mq_timedreceive => self.add(a[1], a[2]),
            libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
            | libc::SYS_vmsplice
            | libc::SYS_process_vm_readv
            | libc::SYS_process_vm_writev => {
                self.vector(a[1], a[2]);
                if matches!(number as i64, libc::SYS_process_vm_readv | libc::SYS_process_vm_writev) {
                    self.add(a[3], a[4].min(1024) * size_of::<libc::iovec>());
                }
            }
            libc::SYS_recvfrom | libc::SYS_sendto => {
                self.add(a[1], a[2]);
                self.add(a[4], 128);
                self.add(a[5], 4);
            }
            libc::SYS_sendmsg | libc::SYS_recvmsg => self.message(a[1]),
            libc::SYS_sendmmsg | libc::SYS_recvmmsg => {
                for index in 0..a[2].min(64) {
                    let address = a[1] + index * size_of::<libc::mmsghdr>();
                    self.add(address, size_of::<libc::mmsghdr>());
                    self.message(address);
                }
                self.add(a[4], 16);
            }
            libc::SYS_poll | libc::SYS_ppoll => {
                self.add(a[0], a[1].saturating_mul(size_of::<libc::pollfd>()));
                self.add(a[2], 16);
            }
            libc::SYS_select | libc::SYS_pselect6 => {
                for pointer in &a[1..4] {
                    self.add(*pointer, a[0].min(1 << 20).div_ceil(64) * 8);
                }
                self.add(a[4], 16);
            }
            libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => {
                self.add(a[1], a[2].saturating_mul(size_of::<libc::epoll_event>()));
                self.add(a[3], 16);
            }
            libc::SYS_getcwd | libc::SYS_getrandom => self.add(a[0], a[1]),
            libc::SYS_readlink | libc::SYS_listxattr | libc::SYS_llistxattr | libc::SYS_flistxattr => {
                self.add(a[0], UNKNOWN_BYTES);
                self.add(a[1], a[2]);
            }
            libc::SYS_readlinkat
            | libc::SYS_getxattr
            | libc::SYS_lgetxattr
            | libc::SYS_fgetxattr
            | libc::SYS_setxattr
            | libc::SYS_lsetxattr
            | libc::SYS_fsetxattr => {
                self.add(a[0], UNKNOWN_BYTES);
                self.add(a[1], UNKNOWN_BYTES);
                self.add(a[2], a[3]);
            }
            libc::SYS_futex => {
                self.add(a[0], 4);
                self.add(a[3], 16);
                self.add(a[4], 4);
            }
            libc::SYS_futex_waitv => {
                self.waiters(a[0], a[1]);
                self.add(a[3], 16);
            }
            libc::SYS_io_getevents | SYS_IO_PGETEVENTS => {
                self.add(a[3], a[2].saturating_mul(32));
                self.add(a[4], 16);
            }
            libc::SYS_io_uring_enter => {
                if a[3] as u32 & ENTER_EXTENDED != 0
                    && let Some(extended) = peek::<[u64; 3]>(a[4])
                {
                    self.add(extended[2] as usize, 16);
                }
            }
            libc::SYS_io_uring_register => {
                self.add(a[2], a[3].saturating_mul(16).max(UNKNOWN_BYTES));
                if let Some(list) = io_uring::list_of_registration(a[1], a[2], a[3]) {
                    self.add(list.0, list.1);
                }
            }
            libc::SYS_mincore => self.add(a[2], a[1].div_ceil(PAGE_BYTES)),
            libc::SYS_getgroups | libc::SYS_setgroups => self.add(a[1], a[0].min(65536) * 4),
            libc::SYS_sched_getaffinity | libc::SYS_sched_setaffinity => self.add(a[2], a[1]),
            libc::SYS_setsockopt => self.add(a[3], a[4]),
            libc::SYS_getsockopt => {
                self.add(a[4], 4);
                if let Some(len) = peek::<u32>(a[4]) {
                    self.add(a[3], len as usize);
                }
            }
            libc::SYS_ioctl if a[1] as u32 == uffd::COPY as u32 => {
                self.add(a[2], 40);
                if let Some(copy) = peek::<[usize; 3]>(a[2]) {
                    self.add(copy[1], copy[2]);
                }
            }
            libc::SYS_msgsnd | libc::SYS_msgrcv => self.add(a[1], a[2].saturating_add(8)),
            libc::SYS_semop | libc::SYS_semtimedop => {
                self.add(a[1], a[2].saturating_mul(6));
                self.add(a[3], 16);
            }
            _ => {
                for pointer in a {
                    self.add(pointer, UNKNOWN_BYTES);
                }
            }
        }
    }
}

/// Makes memory that we are about to touch near, if it is in the window.
fn touch_near(runtime: &Runtime, address: usize, len: usize) {
    if !window::contains(address) || settled_phase(runtime) != Phase::Armed {
        return;
    }
    let end = (address + len).min(window::end_of(address));
    let (first, last) = (window::page_of(address).0, window::page_of(end - 1).0);
    for number in first..=last {
        fault_in(runtime, PageId(number), true);
    }
}

/// Copies a value from an address that the program gave us. `None` if it is not readable.
pub fn peek<T: Copy>(address: usize) -> Option<T> {
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: only used with types for which any bytes are a value (numbers, raw pointers).
    copy(address, value.as_mut_ptr() as usize, size_of::<T>(), libc::SYS_process_vm_readv)
        .then(|| unsafe { value.assume_init() })
}

/// Copies a slice from an address that the program gave us. `false` if it is not readable.
pub fn peek_slice<T: Copy>(address: usize, into: &mut [T]) -> bool {
    copy(address, into.as_mut_ptr() as usize, size_of_val(into), libc::SYS_process_vm_readv)
}

/// Copies a value to an address that the program gave us. `false` if it is not writable.
pub fn poke<T: Copy>(address: usize, value: T) -> bool {
    copy(address, &raw const value as usize, size_of::<T>(), libc::SYS_process_vm_writev)
}

/// Copies a slice to an address that the program gave us. `false` if it is not writable.
pub fn poke_slice<T: Copy>(address: usize, from: &[T]) -> bool {
    copy(address, from.as_ptr() as usize, size_of_val(from), libc::SYS_process_vm_writev)
}

fn copy(remote: usize, local: usize, len: usize, call: libc::c_long) -> bool {
    if len == 0 {
        return true;
    }
    let runtime = &RUNTIME;
    // Between bringing it near and copying, a page may leave again: then it is tried once more.
    for _ in 0..100 {
        touch_near(runtime, remote, len);
        let ours = libc::iovec { iov_base: local as *mut libc::c_void, iov_len: len };
        let theirs = libc::iovec { iov_base: remote as *mut libc::c_void, iov_len: len };
        let args = [process::pid() as usize, &raw const ours as usize, 1, &raw const theirs as usize, 1, 0];
        // SAFETY: `local` is ours and of this length; the kernel checks `remote`.
        match unsafe { gate::syscall(call, args) } {
            Ok(copied) if copied == len => return true,
            _ if window::contains(remote) => {}
            _ => return false,
        }
    }
    false
}
