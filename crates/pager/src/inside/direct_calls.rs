//! System calls that a program makes without a trap, by functions in front of the C library's.
//!
//! A trap costs some 2 µs, often more than the call. So the preload library stands in front of the
//! functions that programs call most (`read`, `send`, `open`, …). Such a function makes the call at
//! the gate by itself if nothing must be brought near for it. In all other cases it goes on to the C
//! library's function, whose call traps.
//!
//! No page is pinned for it. The thread *announces* the memory that its call may touch, in a record
//! that whoever evicts looks at (hazard pointers, Michael 2004):
//!
//! - *Armed.* The thread announces, then checks that the pages are near. An evictor makes its victims
//!   Evicting, then looks at all announcements, and lets those victims stay that are announced. Each
//!   side writes before it reads, so at least one of them sees the other.
//! - *Dormant.* The thread announces, then checks that the process is still dormant. An arming thread
//!   leaves Dormant, then looks at all announcements and makes near what is announced.
//!
//! A record has room for one announcement. A handler of the program that interrupts such a call
//! makes its own calls by traps.

use super::runtime::{Phase, RUNTIME, Runtime};
use super::signal::OURS;
use super::sync::{AtomicU32, AtomicUsize, Ordering};
use super::syscall_pinning::waiting_bytes_max;
use super::thread::{self, STACK_SPAN, ThreadRecord};
use crate::space::PageRange;
use crate::window;
use core::sync::atomic::AtomicBool;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::page_word::State;
use farfield_os::signals;

/// Maximum number of buffers of one call.
pub const BUFFERS: usize = 7;
/// Maximum number of bytes that one call may name. Beside the work of larger ones a trap is cheap.
const BYTES_MAX: usize = 256 << 10;

/// Maximum number of parts of a vector that a call without a trap may have.
const VECTOR_MAX: usize = 16;
/// Bytes above the stack pointer in which a program's local variables are looked at.
const STACK_BYTES: usize = 64 << 10;

/// Buffers of a system call, as far as they are in the window.
#[derive(Clone, Copy, Default)]
pub struct Buffers {
    parts: [(usize, usize); BUFFERS],
    count: usize,
    /// Whether there were more parts, or larger ones, than a call without a trap may have.
    is_too_much: bool,
    /// Whether the filter traps such a call wherever its buffers are.
    traps_otherwise: bool,
}

impl Buffers {
    /// Adds `len` bytes at `address`, if any of them is in the window.
    pub fn add(&mut self, address: usize, len: usize) {
        if len == 0 || !window::contains(address) {
            return;
        }
        let fits = len <= BYTES_MAX && address.checked_add(len).is_some_and(|end| end <= window::end_of(address));
        if self.count == BUFFERS || !fits {
            self.is_too_much = true;
            return;
        }
        self.parts[self.count] = (address, len);
        self.count += 1;
    }

    /// Adds a path at `address`: the rest of its page. A path that is longer may lead to EFAULT.
    pub fn add_path(&mut self, address: usize) {
        self.add(address, PAGE_BYTES - address % PAGE_BYTES);
    }

    /// Adds an array of buffers, and those that it names. The array must be on the stack, and short:
    /// elsewhere it may not be readable.
    ///
    /// # Safety
    /// If the array lies within 64 KiB above the stack pointer, it must be part of the stack.
    pub unsafe fn add_vector(&mut self, vector: *const libc::iovec, count: usize) {
        self.traps_otherwise = true;
        if count > VECTOR_MAX || !is_on_stack(vector) {
            self.is_too_much |= count > 0;
            return;
        }
        self.add(vector as usize, count * size_of::<libc::iovec>());
        for index in 0..count {
            // SAFETY: on the stack, by the caller. The program may change it meanwhile, as any memory.
            let part = unsafe { vector.add(index).read_volatile() };
            self.add(part.iov_base as usize, part.iov_len);
        }
    }

    /// Adds a message, and what it names. It must be on the stack.
    ///
    /// # Safety
    /// The contract is that of [`Buffers::add_vector`].
    pub unsafe fn add_message(&mut self, message: *const libc::msghdr) {
        self.traps_otherwise = true;
        if !is_on_stack(message) {
            self.is_too_much = true;
            return;
        }
        self.add(message as usize, size_of::<libc::msghdr>());
        // SAFETY: as in `add_vector`.
        unsafe {
            let message = message.read_volatile();
            self.add(message.msg_name as usize, message.msg_namelen as usize);
            self.add(message.msg_control as usize, message.msg_controllen);
            self.add_vector(message.msg_iov, message.msg_iovlen);
        }
    }

    /// Makes the call one that needs a trap.
    pub fn refuse(&mut self) {
        self.is_too_much = true;
    }

    fn are_near(&self, runtime: &Runtime) -> bool {
        let parts = &self.parts[..self.count];
        parts.iter().map(|(_, len)| len).sum::<usize>() <= waiting_bytes_max(runtime).min(BYTES_MAX)
            && parts.iter().all(|&(address, len)| {
                let pages = window::page_of(address).0..=window::page_of(address + len - 1).0;
                pages.into_iter().all(|page| runtime.table().word(PageId(page)).state() == State::Near)
            })
    }
}

/// Memory that a call of one thread may touch, and whose thread that is.
#[repr(C, align(128))]
pub struct Announcement {
    /// Number of times that the record has changed its thread.
    generation: AtomicU32,
    /// Number of buffers announced; 0 = no call is under way.
    count: AtomicU32,
    /// Stack pointer of the call.
    sp: AtomicUsize,
    buffers: [[AtomicUsize; 2]; BUFFERS],
}

impl Announcement {
    fn publish(&self, buffers: &Buffers, sp: usize) {
        self.sp.store(sp, Ordering::Relaxed);
        for (place, part) in self.buffers.iter().zip(&buffers.parts[..buffers.count]) {
            place[0].store(part.0, Ordering::Relaxed);
            place[1].store(part.1, Ordering::Relaxed);
        }
        // A full fence: what follows is read after this was written.
        self.count.swap(buffers.count as u32, Ordering::SeqCst);
    }

    fn withdraw(&self) {
        self.count.store(0, Ordering::Release);
    }

    /// Withdraws what a thread has announced that the record belongs to no longer.
    pub fn change_thread(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.withdraw();
    }

    /// Returns the pages of each buffer that is announced. The caller has made visible what the
    /// announcing thread looks at afterwards, by a sequentially consistent access. While the thread
    /// announces another call, the pages may be any.
    pub fn pages(&self) -> impl Iterator<Item = PageRange> {
        let count = self.count.load(Ordering::SeqCst) as usize;
        self.buffers[..count].iter().map(|[address, len]| {
            let (address, len) = (address.load(Ordering::Relaxed), len.load(Ordering::Relaxed));
            let start = window::page_of(address).0;
            PageRange { start, end: start + (address % PAGE_BYTES + len).div_ceil(PAGE_BYTES) as u64 }
        })
    }
}

/// Whether threads may share their thread-local storage, so that it does not tell whose record is
/// whose.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// Makes all later calls trap: a thread or process that uses another one's storage is about to begin.
pub fn stop() {
    IS_OFF.store(true, Ordering::SeqCst);
}

/// Announced call: while it lives, its buffers stay near.
pub struct AnnouncedCall {
    announcement: &'static Announcement,
}

/// Announces a call of the program with these buffers, from the program's own code. `None` if it must
/// trap: something is not near, or may not stay so, or nothing is in the window.
pub fn announce(buffers: &Buffers) -> Option<AnnouncedCall> {
    let runtime = &RUNTIME;
    let is_for_kernel = buffers.count == 0 && !buffers.traps_otherwise;
    if is_for_kernel || buffers.is_too_much || runtime.phase() == Phase::Off || IS_OFF.load(Ordering::Relaxed) {
        return None;
    }
    let (record, announcement) = own_record(runtime)?;
    let sp = thread::stack_pointer();
    if announcement.count.load(Ordering::Relaxed) != 0 && !has_left(record, announcement.sp.load(Ordering::Relaxed), sp)
    {
        return None;
    }
    announcement.publish(buffers, sp);
    let call = AnnouncedCall { announcement };
    let is_safe = match runtime.phase() {
        Phase::Dormant => true,
        Phase::Armed => buffers.are_near(runtime),
        Phase::Off | Phase::Arming => false,
    };
    is_safe.then_some(call)
}

impl AnnouncedCall {
    /// Makes the call at the gate. Returns the kernel's result, an error as `-errno`. Blocks as long as
    /// the call does.
    ///
    /// # Safety
    /// The call must be the program's, and may touch no other memory of the window than the buffers.
    pub unsafe fn make(&self, number: libc::c_long, args: [usize; 6]) -> isize {
        // SAFETY: by the caller.
        unsafe { super::call::forward(number as usize, args) }
    }
}

impl Drop for AnnouncedCall {
    fn drop(&mut self) {
        self.announcement.withdraw();
    }
}

/// Checks whether a local variable of the program, which has called us, can be at `pointer`.
fn is_on_stack<T>(pointer: *const T) -> bool {
    let sp = thread::stack_pointer();
    (sp..sp + STACK_BYTES).contains(&(pointer as usize)) && pointer.is_aligned()
}

/// Checks whether a call that was made with the stack pointer `old` is over although it has withdrawn
/// nothing: a handler of the program has jumped out of it.
fn has_left(record: &ThreadRecord, old: usize, sp: usize) -> bool {
    record.is_same_stack(sp, old) && old <= sp && sp - old < STACK_SPAN
}

core::arch::global_asm!(
    ".pushsection .tbss.farfield_own_record,\"awT\",@nobits",
    ".balign 16",
    ".hidden farfield_own_record",
    ".globl farfield_own_record",
    ".type farfield_own_record,@object",
    ".size farfield_own_record,16",
    "farfield_own_record:",
    ".zero 16",
    ".popsection",
);

/// What a thread knows of its record: the index plus 1, and the generation. It is in the program's
/// thread-local storage, as the C library's own variables are.
#[repr(C)]
struct OwnRecord {
    number: usize,
    generation: usize,
}

/// Returns this thread's place for what it knows of its record. It is in static thread-local storage:
/// a look at it calls nothing.
fn own_record_cell() -> *mut OwnRecord {
    let cell: *mut OwnRecord;
    // SAFETY: adds the variable's offset to the thread pointer, which the C library keeps at offset 0.
    unsafe {
        core::arch::asm!(
            "mov {cell}, qword ptr fs:[0]",
            "add {cell}, qword ptr [rip + farfield_own_record@GOTTPOFF]",
            cell = out(reg) cell,
            options(nostack, readonly),
        );
    }
    cell
}

/// Returns the record and the announcement of this thread, which is in the program's code.
fn own_record(runtime: &'static Runtime) -> Option<(&'static ThreadRecord, &'static Announcement)> {
    let cell = own_record_cell();
    // SAFETY: this thread's own storage.
    let OwnRecord { number, generation } = unsafe { cell.read() };
    // (Threads of a model share their storage.)
    if number != 0 && !cfg!(feature = "model") {
        let (record, announcement) = runtime.threads.record(number - 1);
        if announcement.generation.load(Ordering::Relaxed) as usize == generation {
            return Some((record, announcement));
        }
    }
    // A child of `vfork` has its parent's storage, and not for good.
    if runtime.is_borrowed() {
        return None;
    }
    let mask = signals::set_mask(!OURS);
    let record = thread::current();
    signals::set_mask(mask);
    let record = record?;
    let (index, announcement) = runtime.threads.announcement_of(record);
    let generation = announcement.generation.load(Ordering::Relaxed) as usize;
    // SAFETY: as above.
    unsafe { cell.write(OwnRecord { number: index + 1, generation }) };
    Some((record, announcement))
}
