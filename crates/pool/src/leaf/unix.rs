//! Servers behind Unix sockets: where the socket is, and which users' servers are trusted there.
//!
//! A process that can replace the socket could pose as the server and receive a token and all far
//! memory. The kernel tells which user listens (`SO_PEERCRED`). This must be root, the user of this
//! process, one that was given to the [`crate::PoolBuilder`], or the one that the URL names
//! (`unix:PATH?uid=998`).

use crate::PoolError;
use farfield_os::serving;
use std::os::fd::BorrowedFd;

/// Option in front of the user that a URL names.
const UID: &str = "?uid=";

/// Parsed URL of the scheme `unix:` or `shm:`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnixSocket<'a> {
    /// Path of the socket; a leading `@` means the abstract namespace.
    pub path: &'a str,
    /// User whose server is trusted there, besides root and the user of this process.
    pub uid: Option<u32>,
}

impl UnixSocket<'_> {
    /// Parses a leaf of a pool URL; `None` if it has another scheme. Looks nothing up.
    pub fn parse(url: &str) -> Option<UnixSocket<'_>> {
        let rest = ["unix:", "shm:"].into_iter().find_map(|scheme| url.strip_prefix(scheme))?;
        let named = rest.rsplit_once(UID).and_then(|(path, uid)| Some((path, uid.parse().ok()?)));
        Some(named.map_or(UnixSocket { path: rest, uid: None }, |(path, uid)| UnixSocket { path, uid: Some(uid) }))
    }
}

/// Checks that root, the user of this process, or one of `others` listens at the other end of a
/// connected Unix socket. Nothing may be sent before this check. Otherwise the error is
/// [`PoolError::OtherUser`].
pub fn check_server_user(fd: BorrowedFd<'_>, server: u16, others: &[Option<u32>]) -> Result<(), PoolError> {
    let uid = serving::peer(fd).map_err(PoolError::Os)?.uid;
    match uid == 0 || uid == serving::effective_uid() || others.contains(&Some(uid)) {
        true => Ok(()),
        false => Err(PoolError::OtherUser { server, uid }),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a token and far memory that are given to whoever was first at a path.
    use super::*;
    use crate::PoolBuilder;
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::time::Duration;

    #[test]
    fn urls_name_a_path_and_perhaps_a_user() {
        let parse = |url| UnixSocket::parse(url).map(|socket| (socket.path, socket.uid));
        assert_eq!(parse("unix:/run/far"), Some(("/run/far", None)));
        assert_eq!(parse("shm:@far?uid=998"), Some(("@far", Some(998))));
        assert_eq!(parse("unix:/a?uid=b"), Some(("/a?uid=b", None)), "a path like any other");
        assert_eq!(parse("tcp://10.0.0.7:1"), None);
    }

    #[test]
    fn a_server_of_another_user_is_refused_before_anything_is_said_to_it() {
        // SAFETY: no arguments.
        if unsafe { libc::geteuid() } != 0 {
            return; // There is no other user to be.
        }
        let path = std::env::temp_dir().join(format!("farfield-other-user-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let url = format!("unix:{}", path.display());
        // A thread can be another user than the rest of its process. What counts is who calls `listen`.
        let listener = std::thread::spawn({
            let path = path.clone();
            move || {
                let listener = UnixListener::bind(&path).unwrap();
                // SAFETY: numbers only; this thread's user alone changes. Listening again says who listens.
                unsafe {
                    assert_eq!(libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534), 0);
                    assert_eq!(libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), 8), 0);
                }
                listener
            }
        })
        .join()
        .unwrap();
        let builder = || PoolBuilder::new().token("secret").pages(1).deadline(Duration::from_millis(500));
        let error = builder().url(&url).open().err().unwrap();
        assert!(matches!(error.pool_error(), Some(PoolError::OtherUser { uid: 65534, .. })), "{error}");
        assert!(error.to_string().contains("?uid=65534"), "{error}");
        // It has heard nothing.
        use std::io::Read;
        let mut heard = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut heard).unwrap();
        assert_eq!(heard, b"");
        // Who trusts it says so; it is silent, and that is another matter.
        for believing in [builder().url(&url).server_uid(65534), builder().url(format!("{url}?uid=65534"))] {
            let error = believing.open().err().unwrap();
            assert!(matches!(error.pool_error(), Some(PoolError::TimedOut { .. })), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn servers_of_this_user_are_believed() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(check_server_user(one.as_fd(), 0, &[]), Ok(()));
    }
}
