//! Sockets of the client side: connect, send and receive without blocking, pass descriptors.
//!
//! A foreign program may live in the same process and assumes that it knows all descriptors. So
//! every one that is made here is moved above a floor ([`set_descriptor_floor`]) and is closed on
//! `exec`. Nothing here blocks but [`poll`] and [`poll_either`], which take a limit; nothing raises
//! SIGPIPE.

use crate::errno::{Errno, Result};
use crate::file;
use crate::gate::syscall;
use core::mem::size_of;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicI32, Ordering};
use core::time::Duration;

/// Time in milliseconds after which a connection ends whose server leaves data unacknowledged, or
/// has no room for them. The kernel would wait for up to 15 minutes. The time is three times as
/// long as an operation of a job may take.
pub const SERVER_TIMEOUT_MS: i32 = 60_000;

/// Least number of a descriptor made here; 0: any number that the kernel chooses.
static FLOOR: AtomicI32 = AtomicI32::new(0);

/// Sets the least number of every descriptor that is made here from now on.
pub fn set_descriptor_floor(floor: i32) {
    FLOOR.store(floor, Ordering::Relaxed);
}

/// Moves a descriptor above the floor; closes it if that fails.
pub fn lift(fd: i32) -> Result<i32> {
    let floor = FLOOR.load(Ordering::Relaxed);
    if fd >= floor {
        return Ok(fd);
    }
    file::move_above(fd, floor).inspect_err(|_| file::close(fd))
}

fn socket(domain: i32) -> Result<i32> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let fd = unsafe { syscall(libc::SYS_socket, [domain as usize, kind as usize, 0, 0, 0, 0]) }?;
    lift(fd as i32)
}

fn set_option(fd: i32, level: i32, option: i32, value: i32) -> Result<()> {
    let args = [fd as usize, level as usize, option as usize, &raw const value as usize, size_of::<i32>(), 0];
    // SAFETY: the kernel reads one i32.
    unsafe { syscall(libc::SYS_setsockopt, args) }.map(drop)
}

/// Address that a socket is to be connected to, in the kernel's form.
#[derive(Clone)]
pub struct ConnectTarget {
    address: Raw,
    bytes: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
union Raw {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
    unix: libc::sockaddr_un,
}

/// Progress of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectProgress {
    /// The connection is established.
    Done,
    /// The attempt is in progress; the socket becomes writable when it has ended.
    InProgress,
    /// The other side's queue is full, and nothing says when it is not. Try again a little later.
    Retry,
}

impl ConnectTarget {
    /// Creates the target of a TCP server.
    pub fn tcp(address: SocketAddr) -> ConnectTarget {
        match address {
            SocketAddr::V4(v4) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                ConnectTarget { address: Raw { v4: raw }, bytes: size_of::<libc::sockaddr_in>() }
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as u16,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                ConnectTarget { address: Raw { v6: raw }, bytes: size_of::<libc::sockaddr_in6>() }
            }
        }
    }

    /// Creates the target of a Unix stream socket. A leading `@` means the abstract namespace.
    /// ENAMETOOLONG if the path is empty or too long.
    pub fn unix(path: &[u8]) -> Result<ConnectTarget> {
        // SAFETY: plain numbers; all-zero is valid.
        let mut raw: libc::sockaddr_un = unsafe { core::mem::zeroed() };
        raw.sun_family = libc::AF_UNIX as u16;
        if path.is_empty() || path.len() >= raw.sun_path.len() {
            return Err(Errno(libc::ENAMETOOLONG));
        }
        for (target, byte) in raw.sun_path.iter_mut().zip(path) {
            *target = *byte as libc::c_char;
        }
        let base = core::mem::offset_of!(libc::sockaddr_un, sun_path);
        let bytes = if path[0] == b'@' {
            raw.sun_path[0] = 0;
            base + path.len()
        } else {
            base + path.len() + 1
        };
        Ok(ConnectTarget { address: Raw { unix: raw }, bytes })
    }

    fn family(&self) -> i32 {
        // SAFETY: all of them begin with the family.
        i32::from(unsafe { self.address.unix.sun_family })
    }

    /// Creates a socket for this target, not connected yet. A TCP socket is without Nagle's delay.
    pub fn socket(&self) -> Result<i32> {
        let fd = socket(self.family())?;
        if self.family() == libc::AF_UNIX {
            return Ok(fd);
        }
        let configured = set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
            // A server that vanishes without a word is noticed even when nothing is asked of it.
            .and_then(|()| set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1))
            .and_then(|()| set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5))
            .and_then(|()| set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2))
            .and_then(|()| set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3))
            // And so is one that vanishes while data are on their way to it, for which no
            // keepalives are sent.
            .and_then(|()| set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, SERVER_TIMEOUT_MS));
        configured.map(|()| fd).inspect_err(|_| file::close(fd))
    }

    /// Begins to connect such a socket, or checks the progress.
    pub fn connect(&self, fd: i32) -> Result<ConnectProgress> {
        let args = [fd as usize, &raw const self.address as usize, self.bytes, 0, 0, 0];
        loop {
            // SAFETY: the kernel reads `bytes` bytes of the address.
            return match unsafe { syscall(libc::SYS_connect, args) } {
                Ok(_) | Err(Errno(libc::EISCONN)) => Ok(ConnectProgress::Done),
                Err(Errno(libc::EINPROGRESS | libc::EALREADY)) => Ok(ConnectProgress::InProgress),
                Err(Errno(libc::EAGAIN)) => Ok(ConnectProgress::Retry),
                Err(Errno(libc::EINTR)) => continue,
                Err(errno) => Err(errno),
            };
        }
    }
}

/// Sends as many of the bytes at `parts` as the kernel takes at once; returns how many. `EAGAIN`:
/// none now. `EPIPE`, `ECONNRESET`: the other side is gone.
///
/// # Safety
/// Each part must be readable, or belong to memory whose concurrent change by others is acceptable
/// to the caller.
pub unsafe fn send(fd: i32, parts: &[libc::iovec]) -> Result<usize> {
    let flags = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) as usize;
    if let [part] = parts {
        let args = [fd as usize, part.iov_base as usize, part.iov_len, flags, 0, 0];
        // SAFETY: passed on to the caller.
        return unsafe { syscall(libc::SYS_sendto, args) };
    }
    let message = message(parts);
    // SAFETY: `message` describes `parts`; their bytes are the caller's promise.
    unsafe { syscall(libc::SYS_sendmsg, [fd as usize, &raw const message as usize, flags, 0, 0, 0]) }
}

/// Receives the bytes that are there into `parts`; returns how many. `Ok(0)`: the other side
/// closed. `EAGAIN`: none now.
///
/// # Safety
/// Each part must be writable and belong to the caller alone.
pub unsafe fn receive(fd: i32, parts: &[libc::iovec]) -> Result<usize> {
    let flags = libc::MSG_DONTWAIT as usize;
    if let [part] = parts {
        let args = [fd as usize, part.iov_base as usize, part.iov_len, flags, 0, 0];
        // SAFETY: passed on to the caller.
        return unsafe { syscall(libc::SYS_recvfrom, args) };
    }
    let message = message(parts);
    // SAFETY: `message` describes `parts`; their bytes are the caller's promise.
    unsafe { syscall(libc::SYS_recvmsg, [fd as usize, &raw const message as usize, flags, 0, 0, 0]) }
}

/// Creates a `msghdr` for the kernel to read. The kernel does not write to the parts of a message
/// that it sends. On receiving it writes to the memory that they name, never to the parts.
fn message(parts: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: plain numbers and null pointers.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut();
    message.msg_iovlen = parts.len();
    message
}

/// Greatest number of descriptors that the kernel passes in one message.
pub const DESCRIPTORS_MAX: usize = 253;

/// Receives bytes and the descriptors that come with them, which are lifted above the floor.
/// Returns the numbers of bytes and of descriptors put into `fds`. If some find no room, all are
/// closed and the result is `EMFILE`.
pub fn receive_descriptors(fd: i32, bytes: &mut [u8], fds: &mut [i32]) -> Result<(usize, usize)> {
    #[repr(C, align(8))]
    struct ReceiveControlBuffer([u8; 16 + DESCRIPTORS_MAX * 4 + 4]);
    const _: () = assert!(size_of::<libc::cmsghdr>() == 16);
    let mut control = ReceiveControlBuffer([0; 16 + DESCRIPTORS_MAX * 4 + 4]);
    let part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let parts = [part];
    let mut message = message(&parts);
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<ReceiveControlBuffer>();
    let flags = (libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) as usize;
    // SAFETY: bytes and control are writable for the lengths given.
    let got = unsafe { syscall(libc::SYS_recvmsg, [fd as usize, &raw mut message as usize, flags, 0, 0, 0]) }?;
    let mut kept = 0;
    let mut failed = (message.msg_flags & libc::MSG_CTRUNC != 0).then_some(Errno(libc::EMFILE));
    let filled = message.msg_controllen.min(control.0.len());
    let mut at = 0;
    while at + size_of::<libc::cmsghdr>() <= filled {
        // SAFETY: inside `control`, and aligned: `at` starts at 0 and moves by multiples of 8.
        #[allow(clippy::cast_ptr_alignment)]
        let header = unsafe { control.0.as_ptr().add(at).cast::<libc::cmsghdr>().read() };
        let len = header.cmsg_len;
        if len < size_of::<libc::cmsghdr>() || at + len > filled {
            break;
        }
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            for raw in control.0[at + size_of::<libc::cmsghdr>()..at + len].as_chunks::<4>().0 {
                let received = i32::from_ne_bytes(*raw);
                match fds.get_mut(kept) {
                    None => {
                        file::close(received);
                        failed = Some(Errno(libc::EMFILE));
                    }
                    Some(place) => match lift(received) {
                        Ok(lifted) => {
                            *place = lifted;
                            kept += 1;
                        }
                        Err(errno) => failed = Some(errno),
                    },
                }
            }
        }
        at += len.next_multiple_of(8);
    }
    if let Some(errno) = failed {
        fds[..kept].iter().for_each(|fd| file::close(*fd));
        return Err(errno);
    }
    Ok((got, kept))
}

/// Waits until one of `events` (`POLLIN`, `POLLOUT`) or a hang-up happens on `fd`. Returns what
/// happened, or 0 when `within` has passed or a signal came.
pub fn poll(fd: i32, events: i16, within: Duration) -> Result<i16> {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    let mut time = libc::timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    let args = [&raw mut entry as usize, 1, &raw mut time as usize, 0, 0, 0];
    // SAFETY: the kernel reads and writes one `pollfd` and the time (what is left of it); no signal mask.
    match unsafe { syscall(libc::SYS_ppoll, args) } {
        Ok(_) => Ok(entry.revents),
        Err(Errno(libc::EINTR)) => Ok(0),
        Err(errno) => Err(errno),
    }
}

/// Waits until one of its events happens on one of two descriptors. Returns `false` when `within`
/// has passed or a signal came.
pub fn poll_either(ends: [(i32, i16); 2], within: Duration) -> Result<bool> {
    let mut entries = ends.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
    let mut time = libc::timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    let args = [entries.as_mut_ptr() as usize, entries.len(), &raw mut time as usize, 0, 0, 0];
    // SAFETY: the kernel reads and writes that many `pollfd`s and the time (what is left of it); no
    // signal mask.
    match unsafe { syscall(libc::SYS_ppoll, args) } {
        Ok(count) => Ok(count > 0),
        Err(Errno(libc::EINTR)) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against descriptors that land among the program's, that leak, and against waits without an end.
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::net::UnixListener;

    fn part(bytes: &[u8]) -> libc::iovec {
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
    }

    /// A socket connected to it.
    fn connected(target: &ConnectTarget) -> Result<i32> {
        let fd = target.socket()?;
        while target.connect(fd)? != ConnectProgress::Done {
            poll(fd, libc::POLLOUT, Duration::from_secs(60))?;
        }
        Ok(fd)
    }

    #[test]
    fn a_connection_has_a_bound_on_what_is_not_acknowledged() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = connected(&ConnectTarget::tcp(listener.local_addr().unwrap())).unwrap();
        let (mut value, mut len) = (0i32, size_of::<i32>());
        let args = [
            fd as usize,
            libc::IPPROTO_TCP as usize,
            libc::TCP_USER_TIMEOUT as usize,
            &raw mut value as usize,
            &raw mut len as usize,
            0,
        ];
        // SAFETY: the kernel writes one i32 and its length.
        unsafe { syscall(libc::SYS_getsockopt, args) }.unwrap();
        file::close(fd);
        assert_eq!(value, SERVER_TIMEOUT_MS);
    }

    #[test]
    fn bytes_go_both_ways_over_tcp_and_the_end_is_noticed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = connected(&ConnectTarget::tcp(listener.local_addr().unwrap())).unwrap();
        // SAFETY: ours alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let (mut other, _) = listener.accept().unwrap();
        // SAFETY: both parts are readable.
        let sent = unsafe { send(fd.as_raw_fd(), &[part(b"hello "), part(b"world")]) }.unwrap();
        assert_eq!(sent, 11);
        let mut got = [0; 11];
        other.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello world");
        let mut back = [0u8; 8];
        // SAFETY: `back` is writable.
        assert_eq!(unsafe { receive(fd.as_raw_fd(), &[part(&back)]) }, Err(Errno(libc::EAGAIN)));
        assert_eq!(poll(fd.as_raw_fd(), libc::POLLIN, Duration::from_millis(1)).unwrap(), 0);
        other.write_all(b"yes").unwrap();
        assert_ne!(poll(fd.as_raw_fd(), libc::POLLIN, Duration::from_secs(60)).unwrap(), 0);
        let whole = libc::iovec { iov_base: back.as_mut_ptr().cast(), iov_len: back.len() };
        // SAFETY: `back` is writable.
        assert_eq!(unsafe { receive(fd.as_raw_fd(), &[whole]) }, Ok(3));
        assert_eq!(&back[..3], b"yes");
        drop(other);
        assert_ne!(poll(fd.as_raw_fd(), libc::POLLIN, Duration::from_secs(60)).unwrap(), 0);
        // SAFETY: `back` is writable.
        assert_eq!(unsafe { receive(fd.as_raw_fd(), &[whole]) }, Ok(0));
    }

    #[test]
    fn connecting_where_nothing_listens_fails_at_once() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // The port of a client: nobody listens there, and nobody else gets it meanwhile.
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let address = client.local_addr().unwrap();
        assert_eq!(connected(&ConnectTarget::tcp(address)), Err(Errno(libc::ECONNREFUSED)));
        assert_eq!(
            ConnectTarget::unix(b"/nowhere/socket").and_then(|target| connected(&target)),
            Err(Errno(libc::ENOENT))
        );
        assert_eq!(ConnectTarget::unix(&[b'x'; 200]).err(), Some(Errno(libc::ENAMETOOLONG)));
    }

    #[test]
    fn passed_descriptors_arrive_above_the_floor_and_close_on_exec() {
        let directory = std::env::temp_dir().join(format!("farfield-net-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        set_descriptor_floor(500);
        let fd =
            ConnectTarget::unix(path.as_os_str().as_encoded_bytes()).and_then(|target| connected(&target)).unwrap();
        // SAFETY: ours alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        assert!(fd.as_raw_fd() >= 500);
        let (other, _) = listener.accept().unwrap();
        let passed = [other.as_raw_fd(), listener.as_raw_fd()];
        #[repr(C, align(8))]
        struct Control([u8; 24]);
        let mut control = Control([0; 24]);
        control.0[..8].copy_from_slice(&24usize.to_ne_bytes());
        control.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        control.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        control.0[16..20].copy_from_slice(&passed[0].to_ne_bytes());
        control.0[20..24].copy_from_slice(&passed[1].to_ne_bytes());
        let parts = [part(b"take")];
        let mut header = message(&parts);
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = 24;
        // SAFETY: parts and control are readable.
        let sent =
            unsafe { syscall(libc::SYS_sendmsg, [other.as_raw_fd() as usize, &raw const header as usize, 0, 0, 0, 0]) };
        assert_eq!(sent, Ok(4));
        let (mut bytes, mut fds) = ([0; 16], [0; 4]);
        assert_eq!(receive_descriptors(fd.as_raw_fd(), &mut bytes, &mut fds).unwrap(), (4, 2));
        set_descriptor_floor(0);
        for received in &fds[..2] {
            assert!(*received >= 500);
            // SAFETY: no pointers.
            let flags = unsafe { syscall(libc::SYS_fcntl, [*received as usize, libc::F_GETFD as usize, 0, 0, 0, 0]) };
            assert_eq!(flags, Ok(libc::FD_CLOEXEC as usize));
            file::close(*received);
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
