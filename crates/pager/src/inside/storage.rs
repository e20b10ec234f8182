//! Thread-local storage of our handlers.
//!
//! A handler of ours interrupts the program anywhere, and the program's thread pointer may be its
//! own affair. Go's threads without the C library have one of their own, and others may have none,
//! or one whose memory is far. So handlers run with storage of ours, at the end of their stack,
//! which has as much as a compiler may rely on: the pointer to itself, and the canary of stacks.
//! Nothing in handlers uses thread-locals that need the dynamic loader. With this storage that
//! would fail in every program, and not only in some.

use super::thread;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_os::gate;

const ARCH_SET_FS: usize = 0x1002;
const ARCH_GET_FS: usize = 0x1003;
const AT_HWCAP2: libc::c_ulong = 26;
const HWCAP2_FSGSBASE: libc::c_ulong = 2;

/// 1 if the thread pointer can be read and set without a system call.
static HAS_INSTRUCTIONS: AtomicU32 = AtomicU32::new(0);

/// Finds out, at the start, what the processor and the kernel can do.
pub fn start() {
    // SAFETY: reads what the kernel gave the program.
    let has = unsafe { libc::getauxval(AT_HWCAP2) } & HWCAP2_FSGSBASE != 0;
    HAS_INSTRUCTIONS.store(u32::from(has), Ordering::Relaxed);
}

/// Returns the thread pointer.
fn pointer() -> usize {
    let mut pointer = 0usize;
    if HAS_INSTRUCTIONS.load(Ordering::Relaxed) != 0 {
        // SAFETY: `rdfsbase rax`, which the kernel allows.
        unsafe { core::arch::asm!(".byte 0xf3, 0x48, 0x0f, 0xae, 0xc0", out("rax") pointer, options(nomem, nostack)) };
    } else {
        // SAFETY: the word is writable.
        let _ = unsafe { gate::syscall(libc::SYS_arch_prctl, [ARCH_GET_FS, &raw mut pointer as usize, 0, 0, 0, 0]) };
    }
    pointer
}

/// Sets the thread pointer.
///
/// # Safety
/// The pointer must be one for the code that runs next.
pub unsafe fn set_pointer(pointer: usize) {
    if HAS_INSTRUCTIONS.load(Ordering::Relaxed) != 0 {
        // SAFETY: `wrfsbase rax`, which the kernel allows; by the caller.
        unsafe { core::arch::asm!(".byte 0xf3, 0x48, 0x0f, 0xae, 0xd0", in("rax") pointer, options(nostack)) };
    } else {
        // SAFETY: by the caller.
        let _ = unsafe { gate::syscall(libc::SYS_arch_prctl, [ARCH_SET_FS, pointer, 0, 0, 0, 0]) };
    }
}

/// Guard: while it lives the thread has storage of ours.
pub struct HandlerStorageGuard {
    /// Thread pointer before, if it was another one.
    before: Option<usize>,
}

/// Gives the thread, which is in a handler of ours, storage of ours.
pub fn enter() -> HandlerStorageGuard {
    let Some((record, own)) = thread::current().and_then(|record| Some((record, record.storage().ok()?))) else {
        return HandlerStorageGuard { before: None };
    };
    let before = pointer();
    if before == own {
        return HandlerStorageGuard { before: None };
    }
    record.program_storage.store(before, Ordering::Relaxed);
    // SAFETY: made for handlers.
    unsafe { set_pointer(own) };
    HandlerStorageGuard { before: Some(before) }
}

/// Guard: while it lives the thread, which is in a handler of ours, has the program's storage.
pub struct ProgramStorageGuard {
    own: usize,
}

/// Gives the thread the storage that the program has.
pub fn lend(record: &thread::ThreadRecord) -> ProgramStorageGuard {
    let own = pointer();
    // SAFETY: what the thread had when the handler interrupted the program.
    unsafe { set_pointer(record.program_storage.load(Ordering::Relaxed)) };
    ProgramStorageGuard { own }
}

impl Drop for ProgramStorageGuard {
    fn drop(&mut self) {
        // SAFETY: made for handlers.
        unsafe { set_pointer(self.own) };
    }
}

impl Drop for HandlerStorageGuard {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: the handler returns to where it was so.
            unsafe { set_pointer(before) };
        }
    }
}
