//! What a process takes along when it becomes another user.
//!
//! A job's control block and the socket of its private server open to the user that started it. Before a process gives up that user (or
//! a privilege, or its name space) it opens both once more, as descriptors that its children and the programs that they execute
//! inherit. Nobody else gets them, and a process that stays who it is has none.

use super::arm::with_descriptors;
use super::runtime::Runtime;
use crate::control::{Control, TEXT_BYTES, read_text};
use crate::window::DESCRIPTORS_END;
use core::ffi::CStr;
use farfield_os::{file, gate};
use farfield_pool::{leaf_urls, replace_leaves};

/// The control block.
pub const CONTROL: i32 = DESCRIPTORS_END - 1;
/// Sockets of servers, downwards from here in the order of the text of the URLs.
const SERVERS: i32 = CONTROL - 1;

/// Takes what is not there yet. Where it is refused, or descriptors are short, whoever needs it will say so.
pub fn take(runtime: &Runtime) {
    with_descriptors(|| {
        super::exec::with_control_path(|path| keep(path, libc::O_RDWR, CONTROL));
        let mut buffer = [0; TEXT_BYTES];
        for (key, url) in servers(runtime.control(), &mut buffer) {
            let Some(path) = socket_path(url) else { continue };
            let mut name = [0u8; 128];
            if path.len() < name.len() {
                name[..path.len()].copy_from_slice(path.as_bytes());
                if let Ok(path) = CStr::from_bytes_until_nul(&name) {
                    keep(path, libc::O_PATH, key);
                }
            }
        }
    });
}

/// Has this process, or one that it comes from, become another user?
pub fn are_there() -> bool {
    file::size(CONTROL) == Some(size_of::<Control>() as u64)
}

/// Opens `path` as descriptor `key`, which exec does not close.
fn keep(path: &CStr, flags: i32, key: i32) {
    if !file::is_free(key) {
        return;
    }
    if let Ok(fd) = file::open(path, flags) {
        // SAFETY: numbers only; nobody uses `key`.
        let _ = unsafe { gate::syscall(libc::SYS_dup3, [fd as usize, key as usize, 0, 0, 0, 0]) };
        file::close(fd);
    }
}

/// How this process reaches these servers, which its job has now; of those that it began with, there may be keys.
pub fn reach(control: &Control, urls: &[String]) -> Vec<String> {
    let mut buffer = [0; TEXT_BYTES];
    let first: Vec<_> = servers(control, &mut buffer).collect();
    let reach = |leaf: &str| -> Result<String, core::convert::Infallible> {
        let key = first.iter().find(|(key, url)| *url == leaf && socket_path(url).is_some() && file::is_socket(*key));
        Ok(key.map_or(leaf.to_owned(), |(key, _)| format!("unix:/proc/self/fd/{key}")))
    };
    let Ok(urls) = urls.iter().map(|url| replace_leaves(url, reach)).collect();
    urls
}

/// The servers of this job, each with the descriptor that is its key.
fn servers<'a>(control: &Control, buffer: &'a mut [u8; TEXT_BYTES]) -> impl Iterator<Item = (i32, &'a str)> {
    keys().zip(pools(control, buffer).flat_map(leaf_urls))
}

fn keys() -> impl Iterator<Item = i32> {
    (0..).map(|index| SERVERS - index)
}

fn pools<'a>(control: &Control, buffer: &'a mut [u8; TEXT_BYTES]) -> impl Iterator<Item = &'a str> {
    let text: &'a [u8] = read_text(&control.urls, &control.urls_len, buffer);
    // Written by the runner, from text.
    core::str::from_utf8(text).unwrap_or_default().lines().filter(|url| !url.is_empty())
}

/// The path of a socket that has a place in the file system.
fn socket_path(url: &str) -> Option<&str> {
    let path = ["unix:", "shm:"].into_iter().find_map(|scheme| url.strip_prefix(scheme))?;
    path.starts_with('/').then_some(path)
}
