//! Anonymous shared memory: memfds of a fixed size, mapped by several processes, sparse, freed hole
//! by hole.
//!
//! A memfd is sealed against shrinking and growing when it is made, so that no process that holds
//! it can turn an access of another one into SIGBUS. Memory that was never written, or was punched,
//! costs nothing and reads as zeros. (But a *load* from a hole of a mapping makes the kernel fill
//! the hole: ask a table before you touch it.)

use crate::errno::{Errno, Result};
use crate::gate::syscall;
use core::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Greatest offset: the kernel's `loff_t` is signed and has 64 bits.
const OFFSET_MAX: u64 = i64::MAX as u64;

fn raw(fd: BorrowedFd<'_>) -> usize {
    fd.as_raw_fd() as usize
}

/// Makes a memfd of `bytes` bytes, all holes, closed on `exec`, whose size can never change again.
/// `name` shows up in `/proc/PID/maps`.
pub fn create(name: &CStr, bytes: u64) -> Result<OwnedFd> {
    let fd = create_unsealed(name, bytes)?;
    seal(fd.as_fd(), libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL)?;
    Ok(fd)
}

/// Makes such a memfd that only the returned mapping can ever write. The kernel refuses every later
/// write and every later writable mapping, also to a process that opens the file again through
/// `/proc`.
pub fn create_published(name: &CStr, bytes: u64) -> Result<(OwnedFd, Mapping)> {
    let fd = create_unsealed(name, bytes)?;
    let mapping = Mapping::new(fd.as_fd(), bytes, MappingAccess::ReadWrite)?;
    seal(fd.as_fd(), PUBLISHED_SEALS | libc::F_SEAL_SEAL)?;
    Ok((fd, mapping))
}

/// Seals of a memfd that others can only read.
const PUBLISHED_SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE;

fn create_unsealed(name: &CStr, bytes: u64) -> Result<OwnedFd> {
    if bytes == 0 || bytes > OFFSET_MAX {
        return Err(Errno(libc::EINVAL));
    }
    let flags = (libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) as usize;
    // SAFETY: the name is a NUL-terminated string that the kernel only reads.
    let number = unsafe { syscall(libc::SYS_memfd_create, [name.as_ptr() as usize, flags, 0, 0, 0, 0]) }?;
    // SAFETY: the kernel has just made this descriptor and nobody else knows its number.
    let fd = unsafe { OwnedFd::from_raw_fd(number as i32) };
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_ftruncate, [number, bytes as usize, 0, 0, 0, 0]) }?;
    Ok(fd)
}

fn seal(fd: BorrowedFd<'_>, seals: i32) -> Result<()> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_fcntl, [raw(fd), libc::F_ADD_SEALS as usize, seals as usize, 0, 0, 0]) }.map(drop)
}

fn has_seals(fd: BorrowedFd<'_>, wanted: i32) -> bool {
    // SAFETY: no pointers.
    let seals = unsafe { syscall(libc::SYS_fcntl, [raw(fd), libc::F_GET_SEALS as usize, 0, 0, 0, 0]) };
    seals.is_ok_and(|seals| seals as i32 & wanted == wanted)
}

/// Checks whether the size of this file is fixed for good. A file from another process must be
/// sealed before we map it.
pub fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    has_seals(fd, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)
}

/// Checks whether this is a file of [`create_published`], which nobody but its maker can write.
pub fn is_published(fd: BorrowedFd<'_>) -> bool {
    has_seals(fd, PUBLISHED_SEALS)
}

/// Opens a second descriptor of the same memory through which it can be read and mapped, but not
/// written.
pub fn read_only(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    // "/proc/self/fd/" and at most ten digits and NUL.
    let mut path = [0u8; 32];
    let prefix = b"/proc/self/fd/";
    path[..prefix.len()].copy_from_slice(prefix);
    let mut digits = [0u8; 10];
    let mut number = fd.as_raw_fd() as u32;
    let mut length = 0;
    loop {
        digits[length] = b'0' + (number % 10) as u8;
        length += 1;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    for index in 0..length {
        path[prefix.len() + index] = digits[length - 1 - index];
    }
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
    let at = libc::AT_FDCWD as usize;
    // SAFETY: the path is NUL-terminated (the array is longer than what was written) and only read.
    let opened = unsafe { syscall(libc::SYS_openat, [at, path.as_ptr() as usize, flags, 0, 0, 0]) }?;
    // SAFETY: just made by the kernel, known to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(opened as i32) })
}

/// Frees the memory of `bytes` bytes from `offset` on; they read as zeros afterwards.
pub fn punch(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let mode = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as usize;
    // SAFETY: no pointers. Mappings stay valid: a punched page is filled with zeros when touched.
    unsafe { syscall(libc::SYS_fallocate, [raw(fd), mode, offset as usize, bytes as usize, 0, 0]) }.map(|_| ())
}

/// Size of a memfd and memory really in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemfdUsage {
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// Memory behind the file in bytes.
    pub used_bytes: u64,
}

/// Asks the kernel how much memory stands behind `fd`.
pub fn usage(fd: BorrowedFd<'_>) -> Result<MemfdUsage> {
    let mut stat = core::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel writes one `struct stat`, for which there is room.
    unsafe { syscall(libc::SYS_fstat, [raw(fd), stat.as_mut_ptr() as usize, 0, 0, 0, 0]) }?;
    // SAFETY: filled by the kernel; all bit patterns of its integers are valid.
    let stat = unsafe { stat.assume_init() };
    // `st_blocks` counts in units of 512 bytes, whatever the block size.
    Ok(MemfdUsage { size_bytes: stat.st_size as u64, used_bytes: stat.st_blocks as u64 * 512 })
}

/// Returns the first stretch at or after `offset` that has memory behind it, as `start..end`;
/// `None` if there is none.
pub fn next_data(fd: BorrowedFd<'_>, offset: u64) -> Result<Option<core::ops::Range<u64>>> {
    let seek = |from: usize, whence: i32| {
        // SAFETY: no pointers. The file position is moved, which nobody uses: reads and writes carry their own offset.
        unsafe { syscall(libc::SYS_lseek, [raw(fd), from, whence as usize, 0, 0, 0]) }
    };
    let start = match seek(offset as usize, libc::SEEK_DATA) {
        Ok(start) => start,
        Err(Errno(libc::ENXIO)) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    match seek(start, libc::SEEK_HOLE) {
        Ok(end) => Ok(Some(start as u64..end as u64)),
        // Punched up to the end between the two calls.
        Err(Errno(libc::ENXIO)) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Copies `bytes` to `offset`. For pages that have no memory yet this is cheaper than storing
/// through a mapping (no page fault, no zeroing), and lack of memory is an error and not a SIGBUS.
pub fn write_at(fd: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<()> {
    while !bytes.is_empty() {
        let args = [raw(fd), bytes.as_ptr() as usize, bytes.len(), offset as usize, 0, 0];
        // SAFETY: the kernel reads at most `bytes.len()` bytes from `bytes`.
        match unsafe { syscall(libc::SYS_pwrite64, args) } {
            Ok(0) => return Err(Errno(libc::ENOSPC)),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(errno) if errno.0 == libc::EINTR => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Copies from `offset` on into all of `bytes`. Reading a hole this way fills nothing.
pub fn read_at(fd: BorrowedFd<'_>, mut bytes: &mut [u8], mut offset: u64) -> Result<()> {
    while !bytes.is_empty() {
        let args = [raw(fd), bytes.as_mut_ptr() as usize, bytes.len(), offset as usize, 0, 0];
        // SAFETY: the kernel writes at most `bytes.len()` bytes into `bytes`, which is exclusively ours.
        match unsafe { syscall(libc::SYS_pread64, args) } {
            Ok(0) => return Err(Errno(libc::EINVAL)),
            Ok(read) => {
                bytes = &mut bytes[read..];
                offset += read as u64;
            }
            Err(errno) if errno.0 == libc::EINTR => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Access that the holder of a mapping has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MappingAccess {
    /// Loads only; a store is SIGSEGV.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// A memfd mapped shared into this process; unmapped when dropped. Other processes can write it at
/// any time, so the mapping is only ever a raw pointer: copy from it, or use it atomically.
pub struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; accesses through the pointer are the
// responsibility of the code that makes them.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out the address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of `fd`. Takes address space only, no memory and no swap reservation.
    pub fn new(fd: BorrowedFd<'_>, bytes: u64, access: MappingAccess) -> Result<Mapping> {
        Self::part(fd, 0, bytes, access)
    }

    /// Maps `bytes` bytes of `fd` from `offset` on, which must be a multiple of the page size.
    pub fn part(fd: BorrowedFd<'_>, offset: u64, bytes: u64, access: MappingAccess) -> Result<Mapping> {
        if bytes == 0 || bytes > OFFSET_MAX || offset > OFFSET_MAX {
            return Err(Errno(libc::EINVAL));
        }
        let protection = match access {
            MappingAccess::Read => libc::PROT_READ,
            MappingAccess::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        } as usize;
        let flags = (libc::MAP_SHARED | libc::MAP_NORESERVE) as usize;
        // SAFETY: without MAP_FIXED the kernel chooses a free range, so no mapping of anybody is replaced.
        let start =
            unsafe { syscall(libc::SYS_mmap, [0, bytes as usize, protection, flags, raw(fd), offset as usize]) }?;
        Ok(Mapping { start: start as *mut u8, bytes: bytes as usize })
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Replaces the file by zeros at the same address. The range reads as zeros from now on and can
    /// no longer be written.
    pub fn blank(&mut self) -> Result<()> {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE) as usize;
        let args = [self.start as usize, self.bytes, libc::PROT_READ as usize, flags, usize::MAX, 0];
        // SAFETY: exactly what `part` mapped, and still ours; whoever has the pointer may go on reading.
        unsafe { syscall(libc::SYS_mmap, args) }.map(|_| ())
    }

    /// Returns `false`: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped; whoever took the pointer must not outlive `self`.
        let _ = unsafe { syscall(libc::SYS_munmap, [self.start as usize, self.bytes, 0, 0, 0, 0]) };
    }
}

impl core::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Mapping({:p}, {} bytes)", self.start, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against memory that is not given back, and against a size that somebody else can change.
    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn a_new_memfd_costs_nothing_and_its_size_is_fixed() {
        let fd = create(c"test", 1 << 40).unwrap();
        assert_eq!(usage(fd.as_fd()).unwrap(), MemfdUsage { size_bytes: 1 << 40, used_bytes: 0 });
        assert!(is_sealed(fd.as_fd()));
        // SAFETY: no pointers.
        let cut = unsafe { syscall(libc::SYS_ftruncate, [raw(fd.as_fd()), 4096, 0, 0, 0, 0]) };
        assert_eq!(cut, Err(Errno(libc::EPERM)));
    }

    #[test]
    fn punched_pages_are_given_back_and_read_as_zeros() {
        let fd = create(c"test", 64 * PAGE).unwrap();
        write_at(fd.as_fd(), &[7; 8 * PAGE as usize], 4 * PAGE).unwrap();
        assert_eq!(usage(fd.as_fd()).unwrap().used_bytes, 8 * PAGE);
        assert_eq!(next_data(fd.as_fd(), 0).unwrap(), Some(4 * PAGE..12 * PAGE));
        punch(fd.as_fd(), 5 * PAGE, 2 * PAGE).unwrap();
        assert_eq!(usage(fd.as_fd()).unwrap().used_bytes, 6 * PAGE);
        assert_eq!(next_data(fd.as_fd(), 0).unwrap(), Some(4 * PAGE..5 * PAGE));
        assert_eq!(next_data(fd.as_fd(), 5 * PAGE).unwrap(), Some(7 * PAGE..12 * PAGE));
        assert_eq!(next_data(fd.as_fd(), 12 * PAGE).unwrap(), None);
        let mut page = [1; PAGE as usize];
        read_at(fd.as_fd(), &mut page, 5 * PAGE).unwrap();
        assert_eq!(page, [0; PAGE as usize]);
        assert_eq!(usage(fd.as_fd()).unwrap().used_bytes, 6 * PAGE, "reading a hole fills nothing");
    }

    #[test]
    fn two_mappings_see_the_same_bytes_and_a_read_only_descriptor_cannot_write() {
        let fd = create(c"test", 4 * PAGE).unwrap();
        let writer = Mapping::new(fd.as_fd(), 4 * PAGE, MappingAccess::ReadWrite).unwrap();
        let looking = read_only(fd.as_fd()).unwrap();
        let reader = Mapping::new(looking.as_fd(), 4 * PAGE, MappingAccess::Read).unwrap();
        // SAFETY: both mappings are alive and four pages long; nobody else has them.
        unsafe {
            writer.as_ptr().add(5000).write_volatile(9);
            assert_eq!(reader.as_ptr().add(5000).read_volatile(), 9);
        }
        let mut blank = Mapping::new(looking.as_fd(), 4 * PAGE, MappingAccess::Read).unwrap();
        blank.blank().unwrap();
        // SAFETY: still mapped.
        assert_eq!(unsafe { blank.as_ptr().add(5000).read_volatile() }, 0, "nothing of the file is left");
        assert_eq!(Mapping::new(looking.as_fd(), PAGE, MappingAccess::ReadWrite).unwrap_err(), Errno(libc::EACCES));
        assert_eq!(write_at(looking.as_fd(), &[1], 0), Err(Errno(libc::EBADF)));
    }

    /// Opens a descriptor's file again, as every process can that sees it in `/proc`.
    fn open_again(fd: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        Ok(std::fs::File::options().read(true).write(true).open(path)?.into())
    }

    #[test]
    fn published_memory_is_writable_for_its_maker_alone() {
        let (fd, writer) = create_published(c"test", 2 * PAGE).unwrap();
        assert!(is_published(fd.as_fd()) && is_sealed(fd.as_fd()));
        assert!(!is_published(create(c"test", PAGE).unwrap().as_fd()));
        let reader = Mapping::new(fd.as_fd(), 2 * PAGE, MappingAccess::Read).unwrap();
        // SAFETY: both mappings are alive and two pages long; nobody else has them.
        unsafe {
            writer.as_ptr().write_volatile(7);
            assert_eq!(reader.as_ptr().read_volatile(), 7);
        }
        for fd in [fd.try_clone().unwrap(), open_again(fd.as_fd()).unwrap()] {
            assert_eq!(Mapping::new(fd.as_fd(), PAGE, MappingAccess::ReadWrite).unwrap_err(), Errno(libc::EPERM));
            assert_eq!(write_at(fd.as_fd(), &[1], 0), Err(Errno(libc::EPERM)));
            assert_eq!(punch(fd.as_fd(), 0, PAGE), Err(Errno(libc::EPERM)));
            assert_eq!(
                seal(fd.as_fd(), libc::F_SEAL_WRITE),
                Err(Errno(libc::EPERM)),
                "nor can it be taken from its maker"
            );
        }
        let (start, protection) = (reader.as_ptr() as usize, (libc::PROT_READ | libc::PROT_WRITE) as usize);
        // SAFETY: would make the test's own mapping writable; nothing is stored through it.
        let writable = unsafe { syscall(libc::SYS_mprotect, [start, PAGE as usize, protection, 0, 0, 0]) };
        assert_eq!(writable, Err(Errno(libc::EACCES)));
        // SAFETY: would drop the pages of the test's own mapping.
        let removed =
            unsafe { syscall(libc::SYS_madvise, [start, PAGE as usize, libc::MADV_REMOVE as usize, 0, 0, 0]) };
        assert!(removed.is_err());
        // SAFETY: still mapped.
        assert_eq!(unsafe { reader.as_ptr().read_volatile() }, 7);
    }
}
