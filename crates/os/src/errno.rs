//! Error numbers of the kernel.

use core::fmt;

/// An error number of Linux, as a positive value (`EAGAIN`, `ENOMEM`, …).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

/// Result of a system call.
pub type Result<T> = core::result::Result<T, Errno>;

impl Errno {
    /// Splits a raw return value of the kernel into value and error.
    pub(crate) fn from_raw(value: isize) -> Result<usize> {
        if (-4095..0).contains(&value) { Err(Errno(-value as i32)) } else { Ok(value as usize) }
    }
    /// Checks whether the same call may succeed if made again at once (`EINTR`, `EAGAIN`).
    pub fn is_transient(self) -> bool {
        matches!(self.0, libc::EINTR | libc::EAGAIN)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "errno {}", self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not strerror: that one allocates and locks, and this may run inside a signal handler.
        let text = match self.0 {
            libc::EPERM => "operation not permitted",
            libc::ENOENT => "no such file or directory",
            libc::EINTR => "interrupted",
            libc::EIO => "input/output error",
            libc::EBADF => "bad file descriptor",
            libc::EAGAIN => "try again",
            libc::ENOMEM => "out of memory",
            libc::EACCES => "permission denied",
            libc::EFAULT => "bad address",
            libc::EBUSY => "busy",
            libc::EEXIST => "exists already",
            libc::EINVAL => "invalid argument",
            libc::EMFILE => "too many open files",
            libc::ENOSPC => "no space left",
            libc::EPIPE => "broken pipe",
            libc::ENOSYS => "not implemented by this kernel",
            libc::ECONNREFUSED => "connection refused",
            libc::ECONNRESET => "connection reset by peer",
            libc::ETIMEDOUT => "timed out",
            libc::EHOSTUNREACH => "no route to host",
            libc::EOPNOTSUPP => "not supported",
            other => return write!(f, "error number {other}"),
        };
        f.write_str(text)
    }
}

impl std::error::Error for Errno {}

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        std::io::Error::from_raw_os_error(errno.0)
    }
}
