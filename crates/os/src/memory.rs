//! Address space: mmap and its family, one wrapper per call.

use crate::errno::Result;
use crate::gate::syscall;

/// `mmap` of anonymous private memory, readable and writable, at an address of the kernel's choice.
///
/// Returns the address of `len` zeroed bytes.
pub fn map_anonymous(len: usize) -> Result<usize> {
    // SAFETY: a new mapping at a free address touches nobody's memory.
    unsafe {
        mmap(
            0,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    }
}

/// `mmap`.
///
/// # Safety
/// With `MAP_FIXED`, whatever was mapped there is gone: nobody may still use it.
pub unsafe fn mmap(addr: usize, len: usize, prot: i32, flags: i32, fd: i32, offset: usize) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_mmap, [addr, len, prot as usize, flags as usize, fd as usize, offset]) }
}

/// `munmap`.
///
/// # Safety
/// Nobody may still use the range.
pub unsafe fn munmap(addr: usize, len: usize) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_munmap, [addr, len, 0, 0, 0, 0]) }.map(drop)
}

/// `mprotect`.
///
/// # Safety
/// The new protection must suit whoever uses the range.
pub unsafe fn mprotect(addr: usize, len: usize, prot: i32) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_mprotect, [addr, len, prot as usize, 0, 0, 0]) }.map(drop)
}

/// `madvise`.
///
/// # Safety
/// `MADV_DONTNEED` and its like lose the content of the range.
pub unsafe fn madvise(addr: usize, len: usize, advice: i32) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_madvise, [addr, len, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Opens a pidfd on this process, close-on-exec.
pub fn pidfd_self() -> Result<i32> {
    let pid = crate::process::pid();
    // SAFETY: takes numbers only.
    unsafe { syscall(libc::SYS_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) }.map(|fd| fd as i32)
}

/// `process_madvise(MADV_DONTNEED)` on this process: drops the scattered `ranges` with one TLB flush. Returns the
/// bytes dropped, which may be fewer than asked for.
///
/// # Safety
/// The content of the ranges is lost.
pub unsafe fn drop_scattered(pidfd: i32, ranges: &[libc::iovec]) -> Result<usize> {
    // SAFETY: `ranges` is readable; the rest is passed on to the caller.
    unsafe {
        syscall(
            libc::SYS_process_madvise,
            [pidfd as usize, ranges.as_ptr() as usize, ranges.len(), libc::MADV_DONTNEED as usize, 0, 0],
        )
    }
}
