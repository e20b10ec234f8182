//! The control block as a mapping: made by the runner, opened by `farfield top`.

use crate::control::{Control, ENV_CONTROL, MAGIC, Mode, TEXT_BYTES, write_text};
use core::ffi::CStr;
use core::sync::atomic::Ordering;
use farfield_os::memfd::{self, Access, Mapping};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Name of the memfd, as `/proc/PID/fd` and `/proc/PID/maps` show it.
pub const MEMFD_NAME: &CStr = c"farfield-control";

/// What the runner writes into a new control block.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Near budget of the job.
    pub near_limit_bytes: u64,
    /// How faults are served.
    pub mode: Mode,
    /// Huge pages until some memory has to leave, also where the program does not ask for them.
    pub huge_pages: bool,
    /// Pool URLs, addresses numeric.
    pub urls: Vec<String>,
    /// Token for the servers; empty if none.
    pub token: Vec<u8>,
}

/// A mapped control block.
pub struct ControlBlock {
    mapping: Mapping,
    path: PathBuf,
    /// Keeps `path` alive. Only the runner holds the block open: that is how it is told from those who look.
    _file: Option<OwnedFd>,
}

/// Makes a control block for one job and fills in what its processes must know.
pub fn create_control(settings: &Settings) -> io::Result<ControlBlock> {
    let urls = settings.urls.join("\n");
    if urls.len() > TEXT_BYTES || settings.token.len() > TEXT_BYTES {
        let text = format!("the URLs, and the token, can have at most {TEXT_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let file = memfd::create(MEMFD_NAME, size_of::<Control>() as u64)?;
    // Not /proc/self: other processes open it.
    let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
    let block = ControlBlock { mapping: map(file.as_fd())?, path, _file: Some(file) };
    block.near_limit_bytes.store(settings.near_limit_bytes, Ordering::Relaxed);
    block.mode.store(settings.mode as u32, Ordering::Relaxed);
    block.huge_pages.store(settings.huge_pages.into(), Ordering::Relaxed);
    write_text(&block.urls, &block.urls_len, urls.as_bytes());
    write_text(&block.token, &block.token_len, &settings.token);
    block.pools[0].write(urls.as_bytes(), &settings.token);
    // Last: whoever sees the magic sees the rest.
    block.magic.store(MAGIC, Ordering::Release);
    Ok(block)
}

impl ControlBlock {
    /// Maps the control block behind `path` (`/proc/PID/fd/N`).
    pub fn open(path: &Path) -> io::Result<ControlBlock> {
        let file = File::options().read(true).write(true).open(path)?;
        let bytes = file.metadata()?.len();
        if bytes != size_of::<Control>() as u64 || !memfd::is_sealed(file.as_fd()) {
            return Err(other_release());
        }
        let block = ControlBlock { mapping: map(file.as_fd())?, path: path.into(), _file: None };
        if block.magic.load(Ordering::Acquire) != MAGIC {
            return Err(other_release());
        }
        Ok(block)
    }

    /// Where processes of the job find the block: the value of [`crate::control::ENV_CONTROL`].
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn map(file: BorrowedFd<'_>) -> io::Result<Mapping> {
    Ok(Mapping::new(file, size_of::<Control>() as u64, Access::ReadWrite)?)
}

/// The control block of the job that process `pid` belongs to, and the pid of its runner.
pub fn find_control(pid: u32) -> io::Result<(u32, ControlBlock)> {
    // Our own child of `farfield run` is found by what it was told, the runner itself by what it has open.
    let path = match environment_path(pid) {
        Some(path) => Some(path),
        None => descriptor_path(pid)?,
    };
    let path = path.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("process {pid} does not belong to a job of `farfield run`"))
    })?;
    let runner = path.components().nth(2).and_then(|pid| pid.as_os_str().to_str()?.parse().ok());
    let block = ControlBlock::open(&path)?;
    Ok((runner.unwrap_or(pid), block))
}

/// All jobs whose runner this user may look into.
pub fn find_jobs() -> Vec<(u32, ControlBlock)> {
    let open = |pid| Some((pid, ControlBlock::open(&descriptor_path(pid).ok()??).ok()?));
    processes().filter_map(open).collect()
}

/// All processes.
pub fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// From `FARFIELD_CONTROL` of a process, if it is of the form that the runner gives it.
fn environment_path(pid: u32) -> Option<PathBuf> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let prefix = format!("{ENV_CONTROL}=");
    let value = environment.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(prefix.as_bytes()))?;
    let path = PathBuf::from(OsStr::from_bytes(value));
    (path.starts_with("/proc") && is_memfd(&path, MEMFD_NAME)).then_some(path)
}

/// An open control block among the descriptors of a process.
fn descriptor_path(pid: u32) -> io::Result<Option<PathBuf>> {
    Ok(find_memfds(pid, MEMFD_NAME)?.next())
}

/// The memfds of this name that a process has open.
pub fn find_memfds(pid: u32, name: &CStr) -> io::Result<impl Iterator<Item = PathBuf>> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(io::ErrorKind::NotFound, format!("there is no process {pid}")),
        kind => io::Error::new(kind, format!("process {pid} cannot be looked into: {error}; ask its user, or root")),
    })?;
    Ok(descriptors.flatten().map(|entry| entry.path()).filter(move |path| is_memfd(path, name)))
}

fn is_memfd(path: &Path, name: &CStr) -> bool {
    let name = [b"/memfd:", name.to_bytes()].concat();
    std::fs::read_link(path).is_ok_and(|target| target.as_os_str().as_bytes().starts_with(&name))
}

fn other_release() -> io::Error {
    let text = "not a control block of this release: use the farfield command that started the job";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl Deref for ControlBlock {
    type Target = Control;
    fn deref(&self) -> &Control {
        // SAFETY: mapped in `map` with the size of `Control`, which the file has and keeps (it is sealed), page-aligned;
        // all fields are atomics, for which every bit pattern is a value and which other processes may write at any
        // time. The mapping lives as long as `self`.
        unsafe { &*self.mapping.as_ptr().cast() }
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a process of the job that finds no control block, or believes a wrong one.
    use super::*;
    use crate::control::read_text;

    fn settings() -> Settings {
        let urls = vec!["tcp://127.0.0.1:7400".into(), "unix:/run/farfield".into()];
        Settings { near_limit_bytes: 1 << 30, mode: Mode::Thread, huge_pages: false, urls, token: b"secret".to_vec() }
    }

    #[test]
    fn what_the_runner_writes_is_what_a_process_reads() {
        let made = create_control(&settings()).unwrap();
        let opened = ControlBlock::open(made.path()).unwrap();
        assert_eq!(opened.near_limit_bytes.load(Ordering::Relaxed), 1 << 30);
        assert_eq!(opened.mode.load(Ordering::Relaxed), 2);
        let mut buffer = [0; TEXT_BYTES];
        let urls = read_text(&opened.urls, &opened.urls_len, &mut buffer);
        assert_eq!(urls, b"tcp://127.0.0.1:7400\nunix:/run/farfield");
        assert_eq!(read_text(&opened.token, &opened.token_len, &mut buffer), b"secret");
        opened.near_bytes.fetch_add(5, Ordering::Relaxed);
        assert_eq!(made.near_bytes.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn whoever_looks_is_not_taken_for_the_runner() {
        use std::os::unix::fs::MetadataExt;
        let made = create_control(&settings()).unwrap();
        let _looking = ControlBlock::open(made.path()).unwrap();
        let inode = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.ino()).ok();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path());
        // Other tests of this process have blocks of their own.
        let ours = descriptors.filter(|path| is_memfd(path, MEMFD_NAME) && inode(path) == inode(made.path()));
        assert_eq!(ours.count(), 1);
        assert!(find_control(std::process::id()).is_ok_and(|(runner, _)| runner == std::process::id()));
    }

    #[test]
    fn another_file_is_refused() {
        let path = std::env::temp_dir().join(format!("farfield-block-{}", std::process::id()));
        std::fs::write(&path, b"hello").unwrap();
        assert!(ControlBlock::open(&path).is_err());
        File::options().write(true).open(&path).unwrap().set_len(size_of::<Control>() as u64).unwrap();
        assert!(ControlBlock::open(&path).is_err(), "no magic");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn texts_that_do_not_fit_are_refused() {
        let long = Settings { token: vec![b'x'; TEXT_BYTES + 1], ..settings() };
        assert!(create_control(&long).is_err());
    }
}
