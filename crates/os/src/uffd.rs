//! userfaultfd: page faults of this process, served by this process.

use crate::errno::{Errno, Result};
use crate::gate::syscall;

const UFFD_USER_MODE_ONLY: usize = 1;
const API: u64 = 0xAA;

/// Feature bits that we ask for; see `ioctl_userfaultfd(2)`.
pub mod feature {
    /// Write-protect faults.
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// A missing page raises SIGBUS in the faulting thread instead of an event.
    pub const SIGBUS: u64 = 1 << 7;
    /// Events carry the thread id.
    pub const THREAD_ID: u64 = 1 << 8;
    /// Unpopulated pages can be write-protected.
    pub const WP_UNPOPULATED: u64 = 1 << 13;
    /// `UFFDIO_POISON`.
    pub const POISON: u64 = 1 << 14;
    /// The kernel resolves writes to protected pages itself; PAGEMAP_SCAN tells which were written.
    pub const WP_ASYNC: u64 = 1 << 15;
    /// `UFFDIO_MOVE`.
    pub const MOVE: u64 = 1 << 16;
}

/// Request of a program's own userfaultfd that registers a range: its argument begins with address and length.
pub const REGISTER: usize = iowr(0x00, size_of::<RegisterArg>());
/// Request of a program's own userfaultfd that copies memory: destination, source, length, mode, bytes copied.
pub const COPY: usize = iowr(0x03, size_of::<CopyArg>());

const fn iowr(number: usize, size: usize) -> usize {
    (3 << 30) | (size << 16) | (0xAA << 8) | number
}
const fn ior(number: usize, size: usize) -> usize {
    (2 << 30) | (size << 16) | (0xAA << 8) | number
}

#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}
#[repr(C)]
struct RangeArg {
    start: u64,
    len: u64,
}
#[repr(C)]
struct RegisterArg {
    range: RangeArg,
    mode: u64,
    ioctls: u64,
}
#[repr(C)]
struct CopyArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}
#[repr(C)]
struct ZeroArg {
    range: RangeArg,
    mode: u64,
    zeroed: i64,
}
#[repr(C)]
struct ProtectArg {
    range: RangeArg,
    mode: u64,
}

/// Whether a page is installed write-protected, so that PAGEMAP_SCAN can tell whether it was written since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Track {
    /// Protected: clean until the kernel sees a write.
    Clean,
    /// Writable: counts as written at once.
    Dirty,
}

/// Origin of the faults that are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultOrigin {
    /// Faults from user mode only; any user may ask for this.
    UserMode,
    /// Faults inside system calls too; needs privilege or `vm.unprivileged_userfaultfd=1`.
    UserAndKernel,
}

/// A fault event, in thread mode.
#[derive(Clone, Copy, Debug)]
pub struct FaultEvent {
    /// Faulting address, rounded down to its page.
    pub address: usize,
    /// Whether the access was a write.
    pub write: bool,
}

/// A userfaultfd.
#[derive(Debug)]
pub struct Uffd {
    fd: i32,
}

impl Uffd {
    /// Opens a userfaultfd with exactly these features; `EINVAL` if the kernel lacks one of them.
    pub fn open(scope: FaultOrigin, features: u64) -> Result<Uffd> {
        let only = if scope == FaultOrigin::UserMode { UFFD_USER_MODE_ONLY } else { 0 };
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize | only;
        // SAFETY: takes numbers only.
        let fd = unsafe { syscall(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]) }? as i32;
        let uffd = Uffd { fd };
        let mut arg = ApiArg { api: API, features, ioctls: 0 };
        // SAFETY: the argument matches the request.
        unsafe { uffd.ioctl(iowr(0x3F, size_of::<ApiArg>()), &raw mut arg as usize) }?;
        Ok(uffd)
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// Moves the descriptor elsewhere, so that a program does not stumble over it.
    pub fn renumber(&mut self, mover: impl FnOnce(i32) -> i32) {
        self.fd = mover(self.fd);
    }

    unsafe fn ioctl(&self, request: usize, arg: usize) -> Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe { syscall(libc::SYS_ioctl, [self.fd as usize, request, arg, 0, 0, 0]) }
    }

    /// Registers the range: missing pages in it are ours to provide from now on.
    pub fn register(&self, addr: usize, len: usize) -> Result<()> {
        const MISSING_AND_WP: u64 = 3;
        let mut arg =
            RegisterArg { range: RangeArg { start: addr as u64, len: len as u64 }, mode: MISSING_AND_WP, ioctls: 0 };
        // SAFETY: the argument matches the request.
        unsafe { self.ioctl(iowr(0x00, size_of::<RegisterArg>()), &raw mut arg as usize) }.map(drop)
    }

    /// Unregisters the range: the kernel serves missing pages in it again, and none of it is
    /// protected.
    pub fn unregister(&self, addr: usize, len: usize) -> Result<()> {
        let mut arg = RangeArg { start: addr as u64, len: len as u64 };
        // SAFETY: the argument matches the request.
        unsafe { self.ioctl(ior(0x01, size_of::<RangeArg>()), &raw mut arg as usize) }.map(drop)
    }

    /// Installs `len` bytes from `src` at the missing pages of `dst`. Errs with how many bytes were
    /// installed before the error, and the error: `EEXIST` if a page was there already.
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes.
    pub unsafe fn copy(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        track: Track,
        wake: bool,
    ) -> core::result::Result<(), (usize, Errno)> {
        let mode = u64::from(!wake) | if track == Track::Clean { 2 } else { 0 };
        let mut arg = CopyArg { dst: dst as u64, src: src as u64, len: len as u64, mode, copied: 0 };
        let mut done = 0;
        loop {
            // SAFETY: the argument matches the request; `src` by the caller.
            match unsafe { self.ioctl(iowr(0x03, size_of::<CopyArg>()), &raw mut arg as usize) } {
                Ok(_) => return Ok(()),
                Err(errno) => {
                    let step = if arg.copied > 0 { arg.copied as usize } else { 0 };
                    done += step;
                    if errno != Errno(libc::EAGAIN) {
                        return Err((done, errno));
                    }
                    arg.dst += step as u64;
                    arg.src += step as u64;
                    arg.len -= step as u64;
                    arg.copied = 0;
                }
            }
        }
    }

    /// Installs zeros at the missing pages of the range; errors as for [`Uffd::copy`]. The pages
    /// are the shared zero page, so reading costs no memory and the first write copies.
    pub fn zero(&self, addr: usize, len: usize, wake: bool) -> core::result::Result<(), (usize, Errno)> {
        let mut arg =
            ZeroArg { range: RangeArg { start: addr as u64, len: len as u64 }, mode: u64::from(!wake), zeroed: 0 };
        // SAFETY: the argument matches the request.
        match unsafe { self.ioctl(iowr(0x04, size_of::<ZeroArg>()), &raw mut arg as usize) } {
            Ok(_) => Ok(()),
            Err(errno) => Err((arg.zeroed.max(0) as usize, errno)),
        }
    }

    /// Protects the present pages of the range against writes, so that they count as clean.
    pub fn protect(&self, addr: usize, len: usize) -> Result<()> {
        let mut arg = ProtectArg { range: RangeArg { start: addr as u64, len: len as u64 }, mode: 1 };
        // SAFETY: the argument matches the request.
        unsafe { self.ioctl(iowr(0x06, size_of::<ProtectArg>()), &raw mut arg as usize) }.map(drop)
    }

    /// Wakes threads that wait for a page in the range.
    pub fn wake(&self, addr: usize, len: usize) -> Result<()> {
        let mut arg = RangeArg { start: addr as u64, len: len as u64 };
        // SAFETY: the argument matches the request.
        unsafe { self.ioctl(ior(0x02, size_of::<RangeArg>()), &raw mut arg as usize) }.map(drop)
    }

    /// Reads up to 16 pending fault events into `into`; returns how many. `EAGAIN` if there are
    /// none.
    pub fn read_faults(&self, into: &mut [FaultEvent]) -> Result<usize> {
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Message {
            event: u8,
            pad: [u8; 7],
            flags: u64,
            address: u64,
            rest: u64,
        }
        const PAGEFAULT: u8 = 0x12;
        const BATCH: usize = 16;
        let mut messages = [Message { event: 0, pad: [0; 7], flags: 0, address: 0, rest: 0 }; BATCH];
        let count = into.len().min(BATCH);
        let len = count * size_of::<Message>();
        // SAFETY: `messages` is writable for `len` bytes.
        let got = unsafe { syscall(libc::SYS_read, [self.fd as usize, messages.as_mut_ptr() as usize, len, 0, 0, 0]) }?;
        let mut faults = 0;
        for message in &messages[..got / size_of::<Message>()] {
            if message.event == PAGEFAULT {
                into[faults] = FaultEvent { address: message.address as usize & !4095, write: message.flags & 1 != 0 };
                faults += 1;
            }
        }
        Ok(faults)
    }
}

impl Drop for Uffd {
    fn drop(&mut self) {
        // SAFETY: ours to close.
        let _ = unsafe { syscall(libc::SYS_close, [self.fd as usize, 0, 0, 0, 0, 0]) };
    }
}
