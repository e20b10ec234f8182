//! Descriptors that a process takes along when it becomes another user.
//!
//! A job's blocks and the socket of its private server open to the user that started it. Before a
//! process gives up that user (or a privilege, or its name space) it opens them once more, as
//! descriptors that its children and the programs that they execute inherit. The configuration is
//! opened to read, the control block to read and write. Nobody else gets them, and a process that
//! stays who it is has none.

use super::arm::with_descriptors;
use super::runtime::Runtime;
use crate::config::JobConfig;
use crate::window::DESCRIPTORS_END;
use core::ffi::CStr;
use core::sync::atomic::Ordering;
use farfield_os::{file, gate};
use farfield_pool::{UnixSocket, leaf_urls, replace_leaves};

/// Descriptor of the configuration.
pub const CONFIG: i32 = DESCRIPTORS_END - 1;
/// Descriptor of the control block.
pub const CONTROL: i32 = CONFIG - 1;
/// Descriptor of the first server's socket. The others follow downwards, in the order of the text
/// of the URLs.
const SERVERS: i32 = CONTROL - 1;

/// Opens the descriptors that are not there yet. Where that is refused, or descriptors are short,
/// their later users report it.
pub fn take(runtime: &Runtime) {
    with_descriptors(|| {
        let config = runtime.config();
        super::exec::with_config_path(|path| {
            keep(path, libc::O_RDONLY, CONFIG);
            with_control_path(path, config, |path| keep(path, libc::O_RDWR, CONTROL));
        });
        config.first.with_urls(|urls| {
            for (number, url) in servers(urls) {
                let Some(path) = socket_path(url) else { continue };
                let mut name = [0u8; 128];
                if path.len() < name.len() {
                    name[..path.len()].copy_from_slice(path.as_bytes());
                    if let Ok(path) = CStr::from_bytes_until_nul(&name) {
                        keep(path, libc::O_PATH, number);
                    }
                }
            }
        });
    });
}

/// Checks whether this process, or one that it comes from, has become another user.
pub fn are_open() -> bool {
    file::size(CONFIG) == Some(size_of::<JobConfig>() as u64)
}

/// Calls `action` with the path of the control block, which is beside that of the configuration.
pub fn with_control_path<T>(config_path: &CStr, config: &JobConfig, action: impl FnOnce(&CStr) -> T) -> T {
    use core::fmt::Write;
    let bytes = config_path.to_bytes();
    let folder = &bytes[..bytes.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1)];
    let mut path = PathText { bytes: [0; 64], len: 0 };
    // The folder is "/proc/", a number, "/fd/" and a number. A text that does not fit is no such
    // path, and is not there.
    let _ = path.write_str(core::str::from_utf8(folder).unwrap_or_default());
    let _ = write!(path, "{}", config.control_fd.load(Ordering::Relaxed));
    action(CStr::from_bytes_until_nul(&path.bytes).unwrap_or_default())
}

struct PathText {
    bytes: [u8; 64],
    len: usize,
}

impl core::fmt::Write for PathText {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        // The last byte stays zero.
        let free = &mut self.bytes[self.len..63];
        let into = free.get_mut(..text.len()).ok_or(core::fmt::Error)?;
        into.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

/// Opens `path` as descriptor `number`, which exec does not close.
fn keep(path: &CStr, flags: i32, number: i32) {
    if !file::is_free(number) {
        return;
    }
    if let Ok(fd) = file::open(path, flags) {
        // SAFETY: numbers only; nobody uses `number`.
        let _ = unsafe { gate::syscall(libc::SYS_dup3, [fd as usize, number as usize, 0, 0, 0, 0]) };
        file::close(fd);
    }
}

/// Returns URLs by which this process reaches these servers, which its job has now. For the servers
/// that the job began with, there may be inherited descriptors.
pub fn reach(config: &JobConfig, urls: &[String]) -> Vec<String> {
    let first: Vec<(i32, String)> =
        config.first.with_urls(|urls| servers(urls).map(|(number, url)| (number, url.to_owned())).collect());
    let reach = |leaf: &str| -> Result<String, core::convert::Infallible> {
        let number =
            first.iter().find(|(number, url)| url == leaf && socket_path(url).is_some() && file::is_socket(*number));
        let uid = UnixSocket::parse(leaf).and_then(|socket| socket.uid).map(|uid| format!("?uid={uid}"));
        let uid = uid.unwrap_or_default();
        Ok(number.map_or(leaf.to_owned(), |(number, _)| format!("unix:/proc/self/fd/{number}{uid}")))
    };
    let Ok(urls) = urls.iter().map(|url| replace_leaves(url, reach)).collect();
    urls
}

/// Returns the servers behind these pool URLs, each with the number of its inherited descriptor.
fn servers<'a>(urls: core::str::Lines<'a>) -> impl Iterator<Item = (i32, &'a str)> {
    numbers().zip(urls.filter(|url| !url.is_empty()).flat_map(leaf_urls))
}

fn numbers() -> impl Iterator<Item = i32> {
    (0..).map(|index| SERVERS - index)
}

/// Returns the path of a socket that has a place in the file system.
fn socket_path(url: &str) -> Option<&str> {
    UnixSocket::parse(url).map(|socket| socket.path).filter(|path| path.starts_with('/'))
}
