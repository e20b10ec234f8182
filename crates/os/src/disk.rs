//! Files that keep pages, and block devices: private files without a name, room reserved ahead of need, holes.

use crate::errno::Result;
use crate::file;
use crate::gate::syscall;
use crate::net::lift;
use core::ffi::CStr;

/// Kind of file that a path leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A folder.
    Folder,
    /// A file.
    File,
    /// A block device.
    Device,
    /// Memory behind a device (DAX), which can be mapped.
    Dax(Dax),
    /// Anything else.
    Other,
}

/// Properties of a DAX device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dax {
    /// Size of the device in bytes.
    pub bytes: u64,
    /// Alignment in bytes: offset and length of each mapping must be a multiple of it.
    pub align_bytes: u64,
}

impl Dax {
    /// Reads the properties of the device with these numbers from its folder in `/sys`. `None`: it
    /// is not a DAX device.
    fn of(major: u32, minor: u32) -> Option<Dax> {
        let number = |name: &str| {
            let fd = file::open_formatted(format_args!("/sys/dev/char/{major}:{minor}/{name}")).ok()?;
            let mut bytes = [0; 32];
            let len = file::read_at(fd, &mut bytes, 0);
            file::close(fd);
            core::str::from_utf8(&bytes[..len.ok()?]).ok()?.trim().parse().ok()
        };
        let (bytes, align_bytes) = (number("size")?, number("align")?);
        (align_bytes > 0).then_some(Dax { bytes, align_bytes })
    }
}

/// Finds out what kind of file `path` leads to.
pub fn kind(path: &CStr) -> Result<FileKind> {
    let fd = file::open(path, libc::O_PATH)?;
    let kind = match file::kind(fd) {
        Some(libc::S_IFDIR) => FileKind::Folder,
        Some(libc::S_IFBLK) => FileKind::Device,
        Some(libc::S_IFREG) => FileKind::File,
        Some(libc::S_IFCHR) => file::device(fd)
            .and_then(|device| Dax::of(libc::major(device), libc::minor(device)))
            .map_or(FileKind::Other, FileKind::Dax),
        _ => FileKind::Other,
    };
    file::close(fd);
    Ok(kind)
}

fn open(folder: i32, path: &CStr, flags: i32) -> Result<i32> {
    let flags = (flags | libc::O_CLOEXEC) as usize;
    // SAFETY: the path is NUL-terminated; only the owner may open what is made.
    let fd = unsafe { syscall(libc::SYS_openat, [folder as usize, path.as_ptr() as usize, flags, 0o600, 0, 0]) }?;
    lift(fd as i32)
}

/// Creates a file in `folder` without a name, which vanishes when its last descriptor is closed.
/// EOPNOTSUPP where the file system has no such files.
pub fn create_unnamed(folder: &CStr) -> Result<i32> {
    open(libc::AT_FDCWD, folder, libc::O_TMPFILE | libc::O_RDWR)
}

/// Creates a file of this name. EEXIST if there is one.
pub fn create(path: &CStr) -> Result<i32> {
    open(libc::AT_FDCWD, path, libc::O_CREAT | libc::O_EXCL | libc::O_RDWR)
}

/// Opens an existing file to read and write; does not follow a symbolic link.
pub fn open_file(path: &CStr) -> Result<i32> {
    open(libc::AT_FDCWD, path, libc::O_RDWR | libc::O_NOFOLLOW)
}

/// Opens a block device exclusively. EBUSY if it is in use.
pub fn open_device(path: &CStr) -> Result<i32> {
    open(libc::AT_FDCWD, path, libc::O_RDWR | libc::O_EXCL)
}

/// Takes an exclusive advisory lock on the file (`flock`), held until the file is closed. EAGAIN if
/// it is locked already. Does not block.
pub fn lock(fd: i32) -> Result<()> {
    let how = (libc::LOCK_EX | libc::LOCK_NB) as usize;
    // SAFETY: numbers only.
    unsafe { syscall(libc::SYS_flock, [fd as usize, how, 0, 0, 0, 0]) }.map(drop)
}

/// Checks whether loads from a mapping of this file go to the medium, without a page cache (DAX).
pub fn is_dax(fd: i32) -> bool {
    let mut found = core::mem::MaybeUninit::<libc::statx>::zeroed();
    let (path, at) = (c"".as_ptr() as usize, found.as_mut_ptr() as usize);
    let args = [fd as usize, path, libc::AT_EMPTY_PATH as usize, libc::STATX_BASIC_STATS as usize, at, 0];
    // SAFETY: the path is NUL-terminated, and there is room for the answer.
    let known = unsafe { syscall(libc::SYS_statx, args) };
    // SAFETY: plain numbers, filled by the kernel or zero.
    known.is_ok() && unsafe { found.assume_init() }.stx_attributes & libc::STATX_ATTR_DAX as u64 != 0
}

/// Removes a name from its folder.
pub fn unlink(path: &CStr) -> Result<()> {
    // SAFETY: the path is NUL-terminated.
    unsafe { syscall(libc::SYS_unlinkat, [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Makes transfers of `fd` bypass the page cache (`O_DIRECT`), if its file system can do that.
pub fn set_direct(fd: i32) -> Result<()> {
    // SAFETY: numbers only.
    unsafe {
        let flags = syscall(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize, 0, 0, 0, 0])?;
        let flags = flags | libc::O_DIRECT as usize;
        syscall(libc::SYS_fcntl, [fd as usize, libc::F_SETFL as usize, flags, 0, 0, 0]).map(drop)
    }
}

/// Reserves room on the medium for the range, so that writing there does not fail for lack of it.
/// The file grows if need be.
pub fn reserve(fd: i32, offset: u64, bytes: u64) -> Result<()> {
    // SAFETY: numbers only.
    unsafe { syscall(libc::SYS_fallocate, [fd as usize, 0, offset as usize, bytes as usize, 0, 0]) }.map(drop)
}

/// Frees the room of the range. On a device its content is forgotten.
pub fn punch(fd: i32, offset: u64, bytes: u64) -> Result<()> {
    let mode = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as usize;
    // SAFETY: numbers only.
    unsafe { syscall(libc::SYS_fallocate, [fd as usize, mode, offset as usize, bytes as usize, 0, 0]) }.map(drop)
}

/// Sets the length of the file.
pub fn resize(fd: i32, bytes: u64) -> Result<()> {
    // SAFETY: numbers only.
    unsafe { syscall(libc::SYS_ftruncate, [fd as usize, bytes as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Makes `target` a copy of `source` that shares its blocks until one of them is written (reflink).
/// Few file systems can.
pub fn share(source: i32, target: i32) -> Result<()> {
    const FICLONE: usize = 0x4004_9409;
    // SAFETY: numbers only.
    unsafe { syscall(libc::SYS_ioctl, [target as usize, FICLONE, source as usize, 0, 0, 0]) }.map(drop)
}

/// Returns the size of the block device behind `fd` in bytes.
pub fn device_bytes(fd: i32) -> Result<u64> {
    const BLKGETSIZE64: usize = 0x8008_1272;
    let mut bytes = 0u64;
    // SAFETY: `bytes` is writable.
    unsafe { syscall(libc::SYS_ioctl, [fd as usize, BLKGETSIZE64, &raw mut bytes as usize, 0, 0, 0]) }?;
    Ok(bytes)
}

/// Returns the size of the whole file system behind `fd` in bytes.
pub fn file_system_bytes(fd: i32) -> Result<u64> {
    // SAFETY: statfs is plain numbers; all-zero is valid.
    let mut stat: libc::statfs = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` is writable.
    unsafe { syscall(libc::SYS_fstatfs, [fd as usize, &raw mut stat as usize, 0, 0, 0, 0]) }?;
    Ok(stat.f_blocks.saturating_mul(stat.f_bsize as u64))
}

/// Returns the length of the longest file that this process may write (`ulimit -f`). A longer one
/// raises SIGXFSZ instead of an error.
pub fn file_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: u64::MAX, rlim_max: u64::MAX };
    // SAFETY: `limit` is writable.
    let _ = unsafe { syscall(libc::SYS_prlimit64, [0, libc::RLIMIT_FSIZE as usize, 0, &raw mut limit as usize, 0, 0]) };
    limit.rlim_cur
}

/// Reads up to `len` bytes at `offset` into `address`; returns how many were read.
///
/// # Safety
/// The `len` bytes from `address` on are writable and nobody else's.
pub unsafe fn read_at(fd: i32, address: usize, len: usize, offset: u64) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_pread64, [fd as usize, address, len, offset as usize, 0, 0]) }
}

/// Writes up to `len` bytes from `address` at `offset`; returns how many were written.
///
/// # Safety
/// The `len` bytes from `address` on are readable, and nobody writes them meanwhile.
pub unsafe fn write_at(fd: i32, address: usize, len: usize, offset: u64) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_pwrite64, [fd as usize, address, len, offset as usize, 0, 0]) }
}

/// Calls `each` with every name in the folder.
pub fn for_each_name(folder: &CStr, mut each: impl FnMut(&[u8])) -> Result<()> {
    let folder = file::open(folder, libc::O_RDONLY | libc::O_DIRECTORY)?;
    let mut entries = [0u64; 512];
    let result = loop {
        let args = [folder as usize, entries.as_mut_ptr() as usize, size_of_val(&entries), 0, 0, 0];
        // SAFETY: `entries` is writable.
        match unsafe { syscall(libc::SYS_getdents64, args) } {
            Ok(0) => break Ok(()),
            Err(errno) => break Err(errno),
            Ok(len) => {
                // SAFETY: plain numbers, seen as the bytes that the kernel wrote.
                let bytes = unsafe { core::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), len) };
                file::names(bytes).for_each(&mut each);
            }
        }
    };
    file::close(folder);
    result
}

/// Returns the seconds since 1970 (UTC).
pub fn unix_seconds() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let at = &raw mut time as usize;
    // SAFETY: `time` is writable.
    let _ = unsafe { syscall(libc::SYS_clock_gettime, [libc::CLOCK_REALTIME as usize, at, 0, 0, 0, 0]) };
    time.tv_sec as u64
}

#[cfg(test)]
mod tests {
    //! Guards against files that stay behind, and against room that is promised and not there.
    use super::*;
    use crate::errno::Errno;
    use std::ffi::CString;

    fn folder() -> CString {
        CString::new(std::env::temp_dir().into_os_string().into_encoded_bytes()).unwrap()
    }

    #[test]
    fn an_unnamed_file_is_in_no_folder_and_keeps_what_is_written() {
        let folder = folder();
        let fd = create_unnamed(&folder).unwrap();
        assert_eq!(file::links(fd), Some(0));
        reserve(fd, 0, 8192).unwrap();
        assert_eq!(file::size(fd), Some(8192));
        let (from, mut into) = ([7u8; 4096], [0u8; 4096]);
        // SAFETY: both arrays are that long.
        unsafe {
            assert_eq!(write_at(fd, from.as_ptr() as usize, 4096, 4096), Ok(4096));
            assert_eq!(read_at(fd, into.as_mut_ptr() as usize, 4096, 4096), Ok(4096));
        }
        assert_eq!(into, from);
        punch(fd, 4096, 4096).unwrap();
        // SAFETY: as above.
        unsafe { assert_eq!(read_at(fd, into.as_mut_ptr() as usize, 4096, 4096), Ok(4096)) };
        assert_eq!(into, [0; 4096]);
        resize(fd, 4096).unwrap();
        // SAFETY: as above.
        unsafe { assert_eq!(read_at(fd, into.as_mut_ptr() as usize, 4096, 4096), Ok(0)) };
        file::close(fd);
    }

    #[test]
    fn a_file_is_had_by_one_at_a_time() {
        let (folder, path) = (folder(), format!("farfield-lock-{}\0", std::process::id()));
        let path = CString::from_vec_with_nul([folder.to_bytes(), b"/", path.as_bytes()].concat()).unwrap();
        let (one, other) = (create(&path).unwrap(), open_file(&path).unwrap());
        unlink(&path).unwrap();
        lock(one).unwrap();
        assert_eq!(lock(other), Err(Errno(libc::EAGAIN)));
        file::close(one);
        lock(other).unwrap();
        file::close(other);
    }

    #[test]
    fn paths_are_told_apart_and_names_are_found() {
        assert_eq!(kind(&folder()), Ok(FileKind::Folder));
        assert_eq!(kind(c"/dev/null"), Ok(FileKind::Other));
        assert_eq!(kind(c"/proc/self/maps"), Ok(FileKind::File));
        assert_eq!(kind(c"/no/such/path"), Err(Errno(libc::ENOENT)));
        let mut names = Vec::new();
        for_each_name(c"/proc/self", |name| names.push(name.to_vec())).unwrap();
        assert!(names.contains(&b"maps".to_vec()) && names.contains(&b"task".to_vec()));
    }
}
