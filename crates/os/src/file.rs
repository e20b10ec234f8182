//! Descriptors and small files, without libc's buffering and locks.

use crate::errno::{Errno, Result};
use crate::gate::syscall;
use core::ffi::CStr;

/// Opens `path` with `flags` (`O_CLOEXEC` is added).
pub fn open(path: &CStr, flags: i32) -> Result<i32> {
    // SAFETY: the path is NUL-terminated.
    unsafe {
        syscall(
            libc::SYS_openat,
            [libc::AT_FDCWD as usize, path.as_ptr() as usize, (flags | libc::O_CLOEXEC) as usize, 0, 0, 0],
        )
    }
    .map(|fd| fd as i32)
}

/// Opens the formatted path to read it. ENAMETOOLONG if it has 64 bytes or more.
pub(crate) fn open_formatted(path: core::fmt::Arguments<'_>) -> Result<i32> {
    struct PathBuffer([u8; 64], usize);
    impl core::fmt::Write for PathBuffer {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            // The last byte stays zero.
            let end = (self.1 + text.len()).min(self.0.len() - 1);
            self.0[self.1..end].copy_from_slice(&text.as_bytes()[..end - self.1]);
            if end - self.1 < text.len() {
                return Err(core::fmt::Error);
            }
            self.1 = end;
            Ok(())
        }
    }
    let mut written = PathBuffer([0; 64], 0);
    core::fmt::write(&mut written, path).map_err(|_| Errno(libc::ENAMETOOLONG))?;
    let path = CStr::from_bytes_until_nul(&written.0).map_err(|_| Errno(libc::ENAMETOOLONG))?;
    open(path, libc::O_RDONLY)
}

/// Closes `fd`.
pub fn close(fd: i32) {
    // SAFETY: the caller owns it; numbers only.
    let _ = unsafe { syscall(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// Reads up to `into.len()` bytes; returns how many were read.
pub fn read(fd: i32, into: &mut [u8]) -> Result<usize> {
    // SAFETY: `into` is writable.
    unsafe { syscall(libc::SYS_read, [fd as usize, into.as_mut_ptr() as usize, into.len(), 0, 0, 0]) }
}

/// Reads up to `into.len()` bytes at `offset`; returns how many were read.
pub fn read_at(fd: i32, into: &mut [u8], offset: u64) -> Result<usize> {
    // SAFETY: `into` is writable.
    unsafe { syscall(libc::SYS_pread64, [fd as usize, into.as_mut_ptr() as usize, into.len(), offset as usize, 0, 0]) }
}

/// Writes all of `bytes`, in several calls if need be.
pub fn write_all(fd: i32, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        // SAFETY: `bytes` is readable.
        match unsafe { syscall(libc::SYS_write, [fd as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]) } {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Duplicates `fd` to a number not below `floor`, close-on-exec, and closes `fd`. Errs without
/// closing it if there is no number left.
pub fn move_above(fd: i32, floor: i32) -> Result<i32> {
    // SAFETY: numbers only.
    let moved =
        unsafe { syscall(libc::SYS_fcntl, [fd as usize, libc::F_DUPFD_CLOEXEC as usize, floor as usize, 0, 0, 0]) }?;
    close(fd);
    Ok(moved as i32)
}

/// The limit of open descriptors, raised for a moment.
pub struct RaisedLimit {
    before: libc::rlimit,
    available: u64,
}

/// Raises the soft limit of open descriptors to `wanted`, as far as the hard limit allows.
pub fn raise_descriptor_limit(wanted: u64) -> RaisedLimit {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `before` is writable.
    let known =
        unsafe { syscall(libc::SYS_prlimit64, [0, libc::RLIMIT_NOFILE as usize, 0, &raw mut before as usize, 0, 0]) };
    if known.is_err() || before.rlim_cur >= wanted {
        return RaisedLimit { before, available: before.rlim_cur };
    }
    let raised = libc::rlimit { rlim_cur: wanted.min(before.rlim_max), rlim_max: before.rlim_max };
    set_descriptor_limit(&raised);
    RaisedLimit { before, available: raised.rlim_cur }
}

fn set_descriptor_limit(limit: &libc::rlimit) {
    let new = core::ptr::from_ref(limit) as usize;
    // SAFETY: `limit` is readable.
    let _ = unsafe { syscall(libc::SYS_prlimit64, [0, libc::RLIMIT_NOFILE as usize, new, 0, 0, 0]) };
}

impl RaisedLimit {
    /// Returns the limit that is in force now: descriptors below this number can be had.
    pub fn available(&self) -> u64 {
        self.available
    }

    /// Puts the limit back. Descriptors above it stay open.
    pub fn restore(self) {
        if self.available != self.before.rlim_cur {
            set_descriptor_limit(&self.before);
        }
    }
}

/// Returns the first open descriptor of this process for which `is` returns true.
pub fn find_descriptor(mut is: impl FnMut(i32) -> bool) -> Option<i32> {
    let folder = open(c"/proc/self/fd", libc::O_RDONLY | libc::O_DIRECTORY).ok()?;
    let mut entries = [0u64; 256];
    let found = loop {
        let args = [folder as usize, entries.as_mut_ptr() as usize, size_of_val(&entries), 0, 0, 0];
        // SAFETY: `entries` is writable.
        let len = match unsafe { syscall(libc::SYS_getdents64, args) } {
            Ok(0) | Err(_) => break None,
            Ok(len) => len,
        };
        // SAFETY: plain numbers, seen as the bytes that the kernel wrote.
        let bytes =
            unsafe { core::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), len.min(size_of_val(&entries))) };
        let numbers = names(bytes).filter_map(|name| core::str::from_utf8(name).ok()?.parse().ok());
        if let Some(found) = numbers.filter(|&fd| fd != folder).find(|&fd| is(fd)) {
            break Some(found);
        }
    };
    close(folder);
    found
}

/// Iterates over the names of `struct linux_dirent64`s: the length of each is at 16, its name from
/// 19 on.
pub(crate) fn names(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    core::iter::from_fn(move || {
        let len = u16::from_ne_bytes(bytes.get(16..18)?.try_into().ok()?);
        let name = bytes.get(19..usize::from(len))?;
        bytes = &bytes[usize::from(len)..];
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Some(&name[..end])
    })
}

/// Checks whether `fd` is a regular file.
pub fn is_regular(fd: i32) -> bool {
    kind(fd) == Some(libc::S_IFREG)
}

/// Checks whether transfers of `fd` bypass the page cache (`O_DIRECT`).
pub fn is_direct(fd: i32) -> bool {
    // SAFETY: numbers only.
    unsafe { syscall(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize, 0, 0, 0, 0]) }
        .is_ok_and(|flags| flags as i32 & libc::O_DIRECT != 0)
}

/// Checks whether `fd` is a stream, of which a read or write may take a part: a pipe, a terminal, a
/// stream socket.
pub fn is_stream(fd: i32) -> bool {
    match kind(fd) {
        Some(libc::S_IFIFO | libc::S_IFCHR) => true,
        Some(libc::S_IFSOCK) => {
            let mut kind = 0i32;
            let mut len = 4u32;
            let (value, size) = (&raw mut kind as usize, &raw mut len as usize);
            let args = [fd as usize, libc::SOL_SOCKET as usize, libc::SO_TYPE as usize, value, size, 0];
            // SAFETY: both words are writable.
            unsafe { syscall(libc::SYS_getsockopt, args) }.is_ok() && kind == libc::SOCK_STREAM
        }
        _ => false,
    }
}

/// Checks whether `fd` is a socket, open or only named (`O_PATH`).
pub fn is_socket(fd: i32) -> bool {
    kind(fd) == Some(libc::S_IFSOCK)
}

/// Checks whether there is no descriptor of this number.
pub fn is_free(fd: i32) -> bool {
    stat(fd).is_none()
}

/// Returns the size of the file behind `fd` in bytes.
pub fn size(fd: i32) -> Option<u64> {
    stat(fd).map(|stat| stat.st_size as u64)
}

/// Returns the number of links to the file behind `fd`.
pub fn links(fd: i32) -> Option<u64> {
    stat(fd).map(|stat| stat.st_nlink)
}

/// A descriptor that is closed through the gate when it is dropped. (The standard library's is
/// closed by the C library: inside a program such a call is refused, because the descriptor is
/// ours.)
#[derive(Debug)]
pub struct Descriptor(i32);

impl Descriptor {
    /// Takes over a descriptor.
    ///
    /// # Safety
    /// It is open, and nobody else closes it.
    pub unsafe fn new(fd: i32) -> Descriptor {
        Descriptor(fd)
    }
}

impl std::os::fd::AsFd for Descriptor {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        // SAFETY: open as long as `self`.
        unsafe { std::os::fd::BorrowedFd::borrow_raw(self.0) }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// Returns device and inode of the file behind `fd`.
pub fn identity(fd: i32) -> Option<(u64, u64)> {
    stat(fd).map(|stat| (stat.st_dev, stat.st_ino))
}

/// Writes text to `fd` as far as that can be done without waiting.
pub fn write_without_waiting(fd: i32, text: &[u8]) {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: the structure is readable and writable.
    let ready = unsafe { syscall(libc::SYS_poll, [&raw mut poll as usize, 1, 0, 0, 0, 0]) };
    if ready == Ok(1) && poll.revents & libc::POLLOUT != 0 {
        // SAFETY: `text` is readable.
        let _ = unsafe { syscall(libc::SYS_write, [fd as usize, text.as_ptr() as usize, text.len(), 0, 0, 0]) };
    }
}

/// Returns the inode number of the file behind `fd`.
pub(crate) fn inode(fd: i32) -> Option<u64> {
    stat(fd).map(|stat| stat.st_ino)
}

/// Returns the magic number of the file system that `fd` lies in.
pub(crate) fn file_system(fd: i32) -> Option<u64> {
    // SAFETY: statfs is plain numbers; all-zero is valid.
    let mut found: libc::statfs = unsafe { core::mem::zeroed() };
    // SAFETY: `found` is writable.
    unsafe { syscall(libc::SYS_fstatfs, [fd as usize, &raw mut found as usize, 0, 0, 0, 0]) }.ok()?;
    Some(found.f_type as u64)
}

/// Returns the number of the device that `fd` leads to.
pub(crate) fn device(fd: i32) -> Option<libc::dev_t> {
    stat(fd).map(|stat| stat.st_rdev)
}

/// Returns the file type of `fd` (`S_IF…`).
pub(crate) fn kind(fd: i32) -> Option<libc::mode_t> {
    stat(fd).map(|stat| stat.st_mode & libc::S_IFMT)
}

fn stat(fd: i32) -> Option<libc::stat> {
    // SAFETY: stat is plain numbers; all-zero is valid.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` is writable.
    unsafe { syscall(libc::SYS_fstat, [fd as usize, &raw mut stat as usize, 0, 0, 0, 0]) }.ok()?;
    Some(stat)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_open_descriptor_is_found() {
        let all: Vec<i32> = (0..100).map(|_| open(c"/dev/null", libc::O_RDONLY).unwrap()).collect();
        for &fd in &all {
            assert_eq!(find_descriptor(|one| one == fd), Some(fd));
        }
        all.iter().for_each(|&fd| close(fd));
        assert_eq!(find_descriptor(|one| one == i32::MAX), None);
    }
}
