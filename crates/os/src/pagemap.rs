//! `/proc/self/pagemap`: which pages are present, and which were written.

use crate::errno::Result;
use crate::gate::syscall;

/// Categories of `PAGEMAP_SCAN`.
pub mod category {
    /// Pages written since they were last write-protected.
    pub const WRITTEN: u64 = 1 << 1;
    /// Pages in memory.
    pub const PRESENT: u64 = 1 << 3;
}

/// A run of pages that have a category.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PageRun {
    /// Address of the first byte.
    pub start: u64,
    /// Address of the first byte after the run.
    pub end: u64,
    /// Categories asked for that the pages have.
    pub categories: u64,
}

#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// The open page map of this process.
#[derive(Debug)]
pub struct Pagemap {
    fd: i32,
}

impl Pagemap {
    /// Opens the page map of this process.
    pub fn open() -> Result<Pagemap> {
        // SAFETY: the path is a NUL-terminated constant.
        let fd = unsafe {
            syscall(
                libc::SYS_openat,
                [
                    libc::AT_FDCWD as usize,
                    c"/proc/self/pagemap".as_ptr() as usize,
                    (libc::O_RDONLY | libc::O_CLOEXEC) as usize,
                    0,
                    0,
                    0,
                ],
            )
        }?;
        Ok(Pagemap { fd: fd as i32 })
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// Wraps a descriptor that was moved.
    pub fn from_fd(fd: i32) -> Pagemap {
        Pagemap { fd }
    }

    /// Finds runs of pages in `[start, end)` that have all categories of `mask`, up to `runs.len()`
    /// of them. Returns the number of runs and where the walk ended (`end` when all was seen).
    pub fn scan(&self, start: usize, end: usize, mask: u64, runs: &mut [PageRun]) -> Result<(usize, usize)> {
        const PAGEMAP_SCAN: usize = (3 << 30) | (size_of::<ScanArg>() << 16) | ((b'f' as usize) << 8) | 16;
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: 0,
            start: start as u64,
            end: end as u64,
            walk_end: 0,
            vec: runs.as_mut_ptr() as u64,
            vec_len: runs.len() as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: mask,
            category_anyof_mask: 0,
            return_mask: mask,
        };
        // SAFETY: the argument matches the request; `runs` is writable.
        let found =
            unsafe { syscall(libc::SYS_ioctl, [self.fd as usize, PAGEMAP_SCAN, &raw mut arg as usize, 0, 0, 0]) }?;
        Ok((found, arg.walk_end as usize))
    }
}
