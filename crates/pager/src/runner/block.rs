//! The blocks of a job as mappings: made by the runner, opened by `farfield top` and
//! `farfield pool`.

use super::{machine, sys};
use crate::config::{Capture, JobConfig, MAGIC, RequestBlock, TEXT_BYTES};
use crate::control::{FaultMode, JobAccounts};
use core::ffi::CStr;
use core::sync::atomic::Ordering;
use farfield_os::memfd::{self, Mapping, MappingAccess};
use farfield_os::serving;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Name of a job's configuration, as `/proc/PID/fd` and `/proc/PID/maps` show it.
const CONFIG_NAME: &CStr = c"farfield-config";
/// Name of a job's control block.
const CONTROL_NAME: &CStr = c"farfield-control";
/// Name of a job's request block. Only runners have one open.
const REQUESTS_NAME: &CStr = c"farfield-requests";

/// Settings that the runner writes into a new configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Near budget of the job, in bytes.
    pub near_limit_bytes: u64,
    /// Way in which faults are served.
    pub mode: FaultMode,
    /// Whether memory lies in huge pages until some of it has to leave, also where the program does
    /// not ask for them.
    pub huge_pages: bool,
    /// Which memory of the program becomes far-capable.
    pub capture: Capture,
    /// Pool URLs, with numeric addresses.
    pub urls: Vec<String>,
    /// Token for the servers; empty if none.
    pub token: Vec<u8>,
}

/// Blocks of a job as every process may have them: the configuration read-only, the control block
/// read-write.
pub struct ControlBlock {
    config: Mapping,
    control: Mapping,
    path: PathBuf,
}

/// Blocks of a job as its runner has them. Only the runner can write the configuration.
pub struct RunnerBlock {
    block: ControlBlock,
    requests: Mapping,
    /// Files that keep the paths alive. Only runners hold a request block open: this tells them
    /// from processes that only look.
    _files: [OwnedFd; 3],
}

/// Makes the blocks of one job and fills in what its processes must know. Fails if a text is longer
/// than [`TEXT_BYTES`].
pub fn create_control(settings: &Settings) -> io::Result<RunnerBlock> {
    let urls = settings.urls.join("\n");
    if urls.len() > TEXT_BYTES || settings.token.len() > TEXT_BYTES {
        let text = format!("the URLs, and the token, can have at most {TEXT_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let (config_file, config) = memfd::create_published(CONFIG_NAME, size_of::<JobConfig>() as u64)?;
    let control_file = memfd::create(CONTROL_NAME, size_of::<JobAccounts>() as u64)?;
    let requests_file = memfd::create(REQUESTS_NAME, size_of::<RequestBlock>() as u64)?;
    let control = map::<JobAccounts>(control_file.as_fd(), MappingAccess::ReadWrite)?;
    let requests = map::<RequestBlock>(requests_file.as_fd(), MappingAccess::ReadWrite)?;
    // The path does not use /proc/self, because other processes open it.
    let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), config_file.as_raw_fd()));
    let numbers = [&control_file, &requests_file].map(|file| file.as_raw_fd() as u32);
    let block = ControlBlock { config, control, path };
    let made = RunnerBlock { block, requests, _files: [config_file, control_file, requests_file] };
    let config = made.config();
    let [control_fd, requests_fd] = numbers;
    config.control_fd.store(control_fd, Ordering::Relaxed);
    config.requests_fd.store(requests_fd, Ordering::Relaxed);
    config.runner_uid.store(serving::effective_uid(), Ordering::Relaxed);
    config.mode.store(settings.mode as u32, Ordering::Relaxed);
    config.huge_pages.store(settings.huge_pages.into(), Ordering::Relaxed);
    config.capture.store(settings.capture as u32, Ordering::Relaxed);
    config.near_limit_bytes.store(settings.near_limit_bytes, Ordering::Relaxed);
    config.near_offer_bytes.store(settings.near_limit_bytes, Ordering::Relaxed);
    config.near_least_bytes.store(machine::NEAR_BYTES_MIN, Ordering::Relaxed);
    config.first.write(urls.as_bytes(), &settings.token);
    config.pools[0].write(urls.as_bytes(), &settings.token);
    // The magic is stored last: a process that sees it sees the rest.
    config.magic.store(MAGIC, Ordering::Release);
    Ok(made)
}

impl ControlBlock {
    /// Maps the blocks of the job whose configuration is behind `path` (`/proc/PID/fd/N`).
    pub fn open(path: &Path) -> io::Result<ControlBlock> {
        let file = File::open(path)?;
        if !has_size_of::<JobConfig>(&file)? || !memfd::is_published(file.as_fd()) {
            return Err(other_release());
        }
        let config = map::<JobConfig>(file.as_fd(), MappingAccess::Read)?;
        let header = config_in(&config);
        let (magic, control_fd) = (header.magic.load(Ordering::Acquire), header.control_fd.load(Ordering::Relaxed));
        if magic != MAGIC {
            return Err(other_release());
        }
        let control = open_shared::<JobAccounts>(&path.with_file_name(control_fd.to_string()), CONTROL_NAME)?;
        Ok(ControlBlock {
            config,
            control: map::<JobAccounts>(control.as_fd(), MappingAccess::ReadWrite)?,
            path: path.into(),
        })
    }

    /// Returns the path of the configuration for processes of the job: the value of
    /// [`crate::config::ENV_CONTROL`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the configuration, which the runner has decided.
    pub fn config(&self) -> &JobConfig {
        config_in(&self.config)
    }

    /// Opens the runner's request block. The kernel lets only the runner's own user and root do
    /// that.
    pub(super) fn open_requests(&self) -> io::Result<(File, Requests)> {
        let number = self.config().requests_fd.load(Ordering::Relaxed);
        let file = open_shared::<RequestBlock>(&self.path.with_file_name(number.to_string()), REQUESTS_NAME)?;
        let mapping = map::<RequestBlock>(file.as_fd(), MappingAccess::ReadWrite)?;
        Ok((file, Requests(mapping)))
    }
}

impl RunnerBlock {
    /// Returns the request block.
    pub(super) fn requests(&self) -> &RequestBlock {
        requests_in(&self.requests)
    }

    /// Tells processes between which pools the job may move. Fails if the text is longer than [`TEXT_BYTES`].
    pub(super) fn set_places(&self, places: &[String]) -> io::Result<()> {
        let text = places.join("\n");
        if text.len() > TEXT_BYTES {
            let text = format!("the URLs of all pools together can have at most {TEXT_BYTES} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        self.config().places.write(text.as_bytes(), &[]);
        Ok(())
    }
}

/// Request block as an asking process has it.
pub(super) struct Requests(Mapping);

impl Deref for Requests {
    type Target = RequestBlock;
    fn deref(&self) -> &RequestBlock {
        requests_in(&self.0)
    }
}

fn config_in(mapping: &Mapping) -> &JobConfig {
    // SAFETY: mapped with the size of `JobConfig`, which the file has and keeps (it is sealed),
    // page-aligned; all fields are atomics, for which every bit pattern is a value and which
    // the runner may write at any time. The mapping lives as long as the reference.
    unsafe { &*mapping.as_ptr().cast() }
}

fn requests_in(mapping: &Mapping) -> &RequestBlock {
    // SAFETY: as in `config_in`, with the size of `RequestBlock`.
    unsafe { &*mapping.as_ptr().cast() }
}

fn map<T>(file: BorrowedFd<'_>, access: MappingAccess) -> io::Result<Mapping> {
    Ok(Mapping::new(file, size_of::<T>() as u64, access)?)
}

fn has_size_of<T>(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.len() == size_of::<T>() as u64)
}

/// Opens a block that is written by many processes. A file without this name is not opened at all.
fn open_shared<T>(path: &Path, name: &CStr) -> io::Result<File> {
    // The link is read first, for an error that says who may do this.
    std::fs::read_link(path)?;
    if !is_memfd(path, name) {
        return Err(other_release());
    }
    let file = File::options().read(true).write(true).open(path)?;
    if !has_size_of::<T>(&file)? || !memfd::is_sealed(file.as_fd()) {
        return Err(other_release());
    }
    Ok(file)
}

/// Finds the blocks of the job that process `pid` belongs to, and the pid of its runner.
///
/// All processes of a job descend from its runner, which adopts orphans, or from the process that it
/// keeps far memory for. The statements of a
/// process about itself are not believed: it may be another user's, and lead the caller to a runner
/// of its own.
pub fn find_control(pid: u32) -> io::Result<(u32, ControlBlock)> {
    let own = runner_path(pid)?;
    let mut outermost = own.map(|path| (pid, path));
    let mut at = pid;
    let mut line = vec![pid];
    while let Some(parent) = sys::parent(at).filter(|&parent| parent != 0 && parent != at) {
        // Processes of other users cannot be looked into.
        if let Ok(Some(path)) = runner_path(parent) {
            outermost = Some((parent, path));
        }
        line.push(parent);
        at = parent;
    }
    if outermost.is_none()
        && let Some(kept) = find_jobs().into_iter().find(|(runner, control)| keeps(*runner, control, &line))
    {
        return Ok(kept);
    }
    let (runner, path) = outermost.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("process {pid} does not belong to a job of `farfield run`"))
    })?;
    Ok((runner, ControlBlock::open(&path)?))
}

/// Checks whether this runner keeps the far memory of one of these processes, which it did not
/// start. It must be of the process's own user: that one could read and write the process anyway.
fn keeps(runner: u32, control: &ControlBlock, pids: &[u32]) -> bool {
    let user = |pid: u32| std::fs::metadata(format!("/proc/{pid}")).map(|process| process.uid()).ok();
    let kept = control.config().kept_pid.load(Ordering::Relaxed);
    kept != 0 && pids.contains(&kept) && user(kept).is_some() && user(kept) == user(runner)
}

/// Finds all jobs whose runner this user may look into, with the pids of their runners.
pub fn find_jobs() -> Vec<(u32, ControlBlock)> {
    let open = |pid| Some((pid, ControlBlock::open(&runner_path(pid).ok()??).ok()?));
    processes().filter_map(open).collect()
}

/// Returns the pids of all processes.
pub fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the path of the configuration of the job whose runner this process is; `None` if it is
/// no runner.
pub(super) fn runner_path(pid: u32) -> io::Result<Option<PathBuf>> {
    if find_memfds(pid, REQUESTS_NAME)?.next().is_none() {
        return Ok(None);
    }
    Ok(find_memfds(pid, CONFIG_NAME)?.next())
}

/// Returns the paths of the memfds of this name that a process has open.
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
    type Target = JobAccounts;
    fn deref(&self) -> &JobAccounts {
        // SAFETY: as in `config_in`, with the size of `JobAccounts`, which other processes
        // may write, too.
        unsafe { &*self.control.as_ptr().cast() }
    }
}

impl Deref for RunnerBlock {
    type Target = ControlBlock;
    fn deref(&self) -> &ControlBlock {
        &self.block
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a process of the job that finds no control block, or believes a wrong one.
    use super::*;

    fn settings() -> Settings {
        let urls = vec!["tcp://127.0.0.1:7400".into(), "unix:/run/farfield".into()];
        Settings {
            near_limit_bytes: 1 << 30,
            mode: FaultMode::Thread,
            huge_pages: false,
            capture: Capture::Everything,
            urls,
            token: b"secret".to_vec(),
        }
    }

    #[test]
    fn a_process_reads_the_configuration_that_the_runner_wrote() {
        let made = create_control(&settings()).unwrap();
        let opened = ControlBlock::open(made.path()).unwrap();
        let config = opened.config();
        assert_eq!(config.near_limit(), 1 << 30);
        assert_eq!(config.mode.load(Ordering::Relaxed), 2);
        let first = (settings().urls, b"secret".to_vec());
        assert_eq!(config.first.read(), first);
        assert_eq!(config.pool(), (0, first.0, first.1));
        made.config().near_limit_bytes.store(5, Ordering::Relaxed);
        assert_eq!(config.near_limit(), 5, "it may change");
        opened.near_bytes.fetch_add(5, Ordering::Relaxed);
        assert_eq!(made.near_bytes.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn no_process_but_the_runner_can_decide_where_far_memory_is() {
        let made = create_control(&settings()).unwrap();
        // As every process of this user can, with as many rights as it can get.
        let file = File::options().read(true).write(true).open(made.path()).unwrap();
        assert!(map::<JobConfig>(file.as_fd(), MappingAccess::ReadWrite).is_err());
        assert!(std::os::unix::fs::FileExt::write_at(&file, &[1], 0).is_err() && file.set_len(0).is_err());
        let opened = ControlBlock::open(made.path()).unwrap();
        let config = opened.config.as_ptr();
        // SAFETY: a mapping of ours, which nobody stores through.
        let writable =
            unsafe { libc::mprotect(config.cast(), size_of::<JobConfig>(), libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(writable, -1);
    }

    #[test]
    fn a_reader_or_an_impostor_is_not_taken_for_the_runner() {
        let made = create_control(&settings()).unwrap();
        let _looking = ControlBlock::open(made.path()).unwrap();
        assert!(find_control(std::process::id()).is_ok_and(|(runner, _)| runner == std::process::id()));
        let start = |config: OwnedFd, requests: Option<OwnedFd>| {
            let mut command = std::process::Command::new("sleep");
            command.arg("1000").stdin(config).stdout(requests.map_or(std::process::Stdio::null(), Into::into));
            command.spawn().unwrap()
        };
        // A process takes the configuration along when it becomes another user.
        let mut child = start(File::open(made.path()).unwrap().into(), None);
        assert!(runner_path(child.id()).unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        // A process of the job can make blocks of its own, with servers of its own in them.
        let (config, _) = memfd::create_published(CONFIG_NAME, size_of::<JobConfig>() as u64).unwrap();
        let requests = memfd::create(REQUESTS_NAME, size_of::<RequestBlock>() as u64).unwrap();
        let mut child = start(config, Some(requests));
        assert!(runner_path(child.id()).unwrap().is_some(), "it looks like a runner");
        assert!(find_control(child.id()).is_ok_and(|(runner, _)| runner == std::process::id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn another_file_is_refused() {
        let path = std::env::temp_dir().join(format!("farfield-block-{}", std::process::id()));
        std::fs::write(&path, b"hello").unwrap();
        assert!(ControlBlock::open(&path).is_err());
        File::options().write(true).open(&path).unwrap().set_len(size_of::<JobConfig>() as u64).unwrap();
        assert!(ControlBlock::open(&path).is_err(), "it can be written by others");
        std::fs::remove_file(&path).unwrap();
        let open = |file: &OwnedFd| ControlBlock::open(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())));
        let (published, mapping) = memfd::create_published(CONFIG_NAME, size_of::<JobConfig>() as u64).unwrap();
        assert!(open(&published).is_err(), "no magic");
        let config = config_in(&mapping);
        config.magic.store(MAGIC, Ordering::Relaxed);
        config.control_fd.store(0, Ordering::Relaxed);
        assert!(open(&published).is_err(), "what it calls the control block is none");
    }

    #[test]
    fn texts_that_do_not_fit_are_refused() {
        let long = Settings { token: vec![b'x'; TEXT_BYTES + 1], ..settings() };
        assert!(create_control(&long).is_err());
        let block = create_control(&settings()).unwrap();
        let places = ["tls://10.0.0.1:7400?ca=/ca".to_owned(), "ram:".to_owned()];
        block.set_places(&places).unwrap();
        assert!(block.set_places(&["x".repeat(TEXT_BYTES), "y".into()]).is_err());
        assert_eq!(block.config().places.read(), (places.to_vec(), Vec::new()), "those that fitted");
    }
}
