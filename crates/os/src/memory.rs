//! Address space: mmap and its family, one wrapper per call.

use crate::errno::{Errno, Result};
use crate::file;
use crate::gate::syscall;

/// Maps anonymous private memory, readable and writable, at an address of the kernel's choice
/// (`mmap`).
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

/// Calls `mmap`; returns the address of the mapping.
///
/// # Safety
/// With `MAP_FIXED`, whatever was mapped there is gone: nobody may still use it.
pub unsafe fn mmap(addr: usize, len: usize, prot: i32, flags: i32, fd: i32, offset: usize) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_mmap, [addr, len, prot as usize, flags as usize, fd as usize, offset]) }
}

/// Calls `munmap`.
///
/// # Safety
/// Nobody may still use the range.
pub unsafe fn munmap(addr: usize, len: usize) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_munmap, [addr, len, 0, 0, 0, 0]) }.map(drop)
}

/// Calls `mremap`; returns the address of the mapping, which has moved if it could not grow where it
/// was and `may_move`.
///
/// # Safety
/// Nobody may use the range afterwards, except at the address that is returned.
pub unsafe fn mremap(addr: usize, old_len: usize, new_len: usize, may_move: bool) -> Result<usize> {
    let flags = if may_move { libc::MREMAP_MAYMOVE } else { 0 };
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_mremap, [addr, old_len, new_len, flags as usize, 0, 0]) }
}

/// Calls `mprotect`.
///
/// # Safety
/// The new protection must suit all users of the range.
pub unsafe fn mprotect(addr: usize, len: usize, prot: i32) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_mprotect, [addr, len, prot as usize, 0, 0, 0]) }.map(drop)
}

/// Calls `madvise`.
///
/// # Safety
/// `MADV_DONTNEED` and similar advice lose the content of the range.
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

/// Drops the scattered `ranges` of this process with one TLB flush:
/// `process_madvise(MADV_DONTNEED)`. Returns the bytes dropped, which may be fewer than asked for.
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

/// Access through `/proc/self/mem` to this process's memory, also where the protection forbids to
/// read it.
#[derive(Debug)]
pub struct OwnMemory {
    fd: i32,
}

impl OwnMemory {
    /// Opens the file for reading.
    pub fn open() -> Result<OwnMemory> {
        file::open(c"/proc/self/mem", libc::O_RDONLY).map(|fd| OwnMemory { fd })
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// Wraps a descriptor that was moved.
    pub fn from_fd(fd: i32) -> OwnMemory {
        OwnMemory { fd }
    }

    /// Copies the bytes at `address`. EIO if it is not mapped, or if the kernel was told to respect
    /// protections even here.
    pub fn read_exact(&self, address: usize, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let args = [self.fd as usize, rest.as_mut_ptr() as usize, rest.len(), address + done, 0, 0];
            // SAFETY: the rest of the slice is writable.
            match unsafe { syscall(libc::SYS_pread64, args) }? {
                0 => return Err(Errno(libc::EIO)),
                got => done += got,
            }
        }
        Ok(())
    }
}

/// Prefetches the cache line of this address while the processor does other things. Any address is
/// allowed: one that is not mapped is ignored.
#[inline]
pub fn load_ahead<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which accesses nothing and cannot fault.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast())
    };
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
