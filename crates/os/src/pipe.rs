//! Pipes that hold references to pages: `vmsplice` keeps a page's memory alive after it is
//! unmapped, so that its last content can still be read.

use crate::errno::{Errno, Result};
use crate::gate::syscall;

/// A pipe with room for `pages` pages.
#[derive(Debug)]
pub struct PagePipe {
    read: i32,
    write: i32,
}

impl PagePipe {
    /// Opens a pipe, non-blocking, close-on-exec.
    pub fn open(pages: usize) -> Result<PagePipe> {
        let mut ends = [0i32; 2];
        // SAFETY: `ends` is writable.
        unsafe {
            syscall(
                libc::SYS_pipe2,
                [ends.as_mut_ptr() as usize, (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize, 0, 0, 0, 0],
            )
        }?;
        // SAFETY: numbers only.
        unsafe { syscall(libc::SYS_fcntl, [ends[1] as usize, libc::F_SETPIPE_SZ as usize, pages * 4096, 0, 0, 0]) }?;
        Ok(PagePipe { read: ends[0], write: ends[1] })
    }

    /// Returns the two descriptors, read end first.
    pub fn fds(&self) -> [i32; 2] {
        [self.read, self.write]
    }

    /// Wraps descriptors that were moved.
    pub fn from_fds(fds: [i32; 2]) -> PagePipe {
        PagePipe { read: fds[0], write: fds[1] }
    }

    /// Takes references to the pages of `ranges`, which must be whole pages. Returns the bytes taken: fewer than
    /// asked for if a page is missing or the pipe is full.
    pub fn take(&self, ranges: &[libc::iovec]) -> Result<usize> {
        // SAFETY: the kernel only takes references; it checks the ranges.
        unsafe {
            syscall(
                libc::SYS_vmsplice,
                [self.write as usize, ranges.as_ptr() as usize, ranges.len(), libc::SPLICE_F_NONBLOCK as usize, 0, 0],
            )
        }
    }

    /// Copies the oldest `len` bytes out and lets their pages go.
    ///
    /// # Safety
    /// `into` must be writable for `len` bytes.
    pub unsafe fn read_exact(&self, into: *mut u8, len: usize) -> Result<()> {
        let mut done = 0;
        while done < len {
            // SAFETY: inside the caller's buffer.
            let got =
                unsafe { syscall(libc::SYS_read, [self.read as usize, into.add(done) as usize, len - done, 0, 0, 0]) }?;
            if got == 0 {
                return Err(Errno(libc::EIO));
            }
            done += got;
        }
        Ok(())
    }

    /// Lets the pages of the oldest `len` bytes go, unread, into `null`, an open `/dev/null`.
    pub fn release(&self, null: i32, len: usize) -> Result<()> {
        let mut done = 0;
        while done < len {
            // SAFETY: numbers only.
            let got = unsafe {
                syscall(
                    libc::SYS_splice,
                    [self.read as usize, 0, null as usize, 0, len - done, libc::SPLICE_F_NONBLOCK as usize],
                )
            }?;
            if got == 0 {
                return Err(Errno(libc::EIO));
            }
            done += got;
        }
        Ok(())
    }
}
