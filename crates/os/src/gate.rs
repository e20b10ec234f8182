//! The gate: the one `syscall` instruction through which all our own calls go.
//!
//! In an ordinary process (server, command line, tests) it is a local stub. Inside a program that runs under
//! `farfield run` it is a page at a fixed address, the same in every process of the job, so that the seccomp
//! filter, which outlives `exec`, still recognises it.

use crate::errno::{Errno, Result};
use core::sync::atomic::{AtomicUsize, Ordering};

core::arch::global_asm!(
    ".pushsection .text.farfield_gate,\"ax\",@progbits",
    ".balign 16",
    // Callers are inlined into other crates, so the name must be visible to the linker, but not beyond.
    ".globl farfield_local_gate",
    ".hidden farfield_local_gate",
    "farfield_local_gate:",
    "syscall",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    fn farfield_local_gate();
}

/// Address of the gate in force; 0 means the local stub.
pub(crate) static GATE: AtomicUsize = AtomicUsize::new(0);

/// Makes all later calls go through the code at `address`, which must be `syscall; ret`.
///
/// # Safety
/// The two instructions must be mapped executable there for the rest of the process.
pub unsafe fn set(address: usize) {
    GATE.store(address, Ordering::Relaxed);
}

/// Returns the address of the gate in force: code that is `syscall; ret`.
#[inline]
pub fn address() -> usize {
    match GATE.load(Ordering::Relaxed) {
        0 => farfield_local_gate as *const () as usize,
        address => address,
    }
}

/// Makes one system call with up to six arguments; returns the kernel's error as [`Errno`].
///
/// # Safety
/// That of the call itself: pointers in `args` must satisfy what the kernel does with them.
#[inline]
pub unsafe fn syscall(number: libc::c_long, args: [usize; 6]) -> Result<usize> {
    // SAFETY: passed on to the caller.
    Errno::from_raw(unsafe { syscall_raw(number as usize, args) })
}

/// Makes one system call and returns the kernel's return value untouched: an error is between -4095
/// and -1.
///
/// # Safety
/// As for [`syscall`].
#[inline]
pub unsafe fn syscall_raw(number: usize, args: [usize; 6]) -> isize {
    let gate = address();
    let result: isize;
    // SAFETY: the gate is `syscall; ret`; the kernel clobbers rcx and r11 only. The asm block may use the stack
    // (no `nostack`), so the pushed return address does not land in a red zone.
    unsafe {
        core::arch::asm!(
            "call {gate}",
            gate = in(reg) gate,
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            out("rcx") _, out("r11") _,
        );
    }
    result
}
