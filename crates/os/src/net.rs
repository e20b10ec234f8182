//! Sockets of the client side: connect with a deadline, send and receive without blocking, pass descriptors.
//!
//! A foreign program may live in the same process and believes that it knows its descriptors, so every one that is made
//! here is moved above a floor ([`set_descriptor_floor`]) and is closed on `exec`. Nothing here blocks but
//! [`connect_tcp`], [`connect_unix`] and [`poll`], which take a limit; nothing raises SIGPIPE.

use crate::errno::{Errno, Result};
use crate::file;
use crate::gate::syscall;
use crate::process::now_ns;
use core::mem::size_of;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicI32, Ordering};
use core::time::Duration;

/// No descriptor made here is below this; 0: wherever the kernel puts them.
static FLOOR: AtomicI32 = AtomicI32::new(0);

/// From now on every descriptor made here has a number of at least `floor`.
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

/// The error that is pending on a socket, for a connection under way.
fn pending_error(fd: i32) -> Result<()> {
    let mut value = 0i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    let args = [
        fd as usize,
        libc::SOL_SOCKET as usize,
        libc::SO_ERROR as usize,
        &raw mut value as usize,
        &raw mut len as usize,
        0,
    ];
    // SAFETY: the kernel writes one i32 and its length.
    unsafe { syscall(libc::SYS_getsockopt, args) }?;
    if value == 0 { Ok(()) } else { Err(Errno(value)) }
}

/// Connects `fd` to the address of `len` bytes at `address`; closes it on failure.
///
/// # Safety
/// `address` must be readable for `len` bytes.
unsafe fn connect(fd: i32, address: *const u8, len: usize, within: Duration) -> Result<i32> {
    let until = now_ns().saturating_add(within.as_nanos() as u64);
    let attempt = || loop {
        // SAFETY: passed on to the caller.
        match unsafe { syscall(libc::SYS_connect, [fd as usize, address as usize, len, 0, 0, 0]) } {
            Ok(_) => return Ok(()),
            Err(Errno(libc::EISCONN)) => return Ok(()),
            Err(Errno(libc::EINTR)) => {}
            Err(Errno(libc::EINPROGRESS | libc::EALREADY)) => {
                if poll(fd, libc::POLLOUT, left(until)?)? != 0 {
                    return pending_error(fd);
                }
            }
            // A Unix socket whose queue is full has no way to say when it is not: ask again a little later.
            Err(Errno(libc::EAGAIN)) => {
                crate::process::sleep(left(until)?.min(Duration::from_millis(1)));
            }
            Err(errno) => return Err(errno),
        }
    };
    match attempt() {
        Ok(()) => Ok(fd),
        Err(errno) => {
            file::close(fd);
            Err(errno)
        }
    }
}

fn left(until: u64) -> Result<Duration> {
    match until.saturating_sub(now_ns()) {
        0 => Err(Errno(libc::ETIMEDOUT)),
        nanos => Ok(Duration::from_nanos(nanos)),
    }
}

/// Connects to a TCP server, without Nagle's delay.
pub fn connect_tcp(address: SocketAddr, within: Duration) -> Result<i32> {
    let fd = socket(if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 })?;
    let configured = set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
        // A server that vanishes without a word is noticed even when nothing is asked of it.
        .and_then(|()| set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1))
        .and_then(|()| set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5))
        .and_then(|()| set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2))
        .and_then(|()| set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3));
    if let Err(errno) = configured {
        file::close(fd);
        return Err(errno);
    }
    match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: a whole `sockaddr_in`.
            unsafe { connect(fd, (&raw const raw).cast(), size_of::<libc::sockaddr_in>(), within) }
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: a whole `sockaddr_in6`.
            unsafe { connect(fd, (&raw const raw).cast(), size_of::<libc::sockaddr_in6>(), within) }
        }
    }
}

/// Connects to a Unix stream socket. A leading `@` means the abstract namespace.
pub fn connect_unix(path: &[u8], within: Duration) -> Result<i32> {
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
    let len = if path[0] == b'@' {
        raw.sun_path[0] = 0;
        base + path.len()
    } else {
        base + path.len() + 1
    };
    let fd = socket(libc::AF_UNIX)?;
    // SAFETY: `len` is within `sockaddr_un`.
    unsafe { connect(fd, (&raw const raw).cast(), len, within) }
}

/// Sends what the kernel takes at once of the bytes at `parts`. `EAGAIN`: nothing now. `EPIPE`, `ECONNRESET`: the
/// other side is gone.
///
/// # Safety
/// Each part must be readable, or belong to memory whose concurrent change by others is acceptable to the caller.
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

/// Receives what is there into `parts`. `Ok(0)`: the other side closed. `EAGAIN`: nothing now.
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

/// A `msghdr` for the kernel to read: it does not write to the parts of a message that it sends, and on
/// receiving it writes to the memory that they name, never to the parts.
fn message(parts: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: plain numbers and null pointers.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut();
    message.msg_iovlen = parts.len();
    message
}

/// Most descriptors that the kernel passes in one message.
pub const DESCRIPTORS_MAX: usize = 253;

/// Receives bytes and the descriptors that come with them, which are lifted above the floor. The numbers of bytes and of
/// descriptors put into `fds`; those that find no room are closed and the result is `EMFILE`.
pub fn receive_descriptors(fd: i32, bytes: &mut [u8], fds: &mut [i32]) -> Result<(usize, usize)> {
    #[repr(C, align(8))]
    struct Control([u8; 16 + DESCRIPTORS_MAX * 4 + 4]);
    const _: () = assert!(size_of::<libc::cmsghdr>() == 16);
    let mut control = Control([0; 16 + DESCRIPTORS_MAX * 4 + 4]);
    let part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let parts = [part];
    let mut message = message(&parts);
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>();
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

/// Waits until one of `events` (`POLLIN`, `POLLOUT`) or a hang-up happens on `fd`; what happened, or 0 when `within`
/// has passed or a signal came.
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

/// The same for two descriptors, each with its events; did something happen?
pub fn poll_either(ends: [(i32, i16); 2], within: Duration) -> Result<bool> {
    let mut entries = ends.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
    let mut time = libc::timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    let args = [entries.as_mut_ptr() as usize, entries.len(), &raw mut time as usize, 0, 0, 0];
    // SAFETY: the kernel reads and writes so many `pollfd`s and the time (what is left of it); no signal mask.
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

    #[test]
    fn bytes_go_both_ways_over_tcp_and_the_end_is_noticed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = connect_tcp(listener.local_addr().unwrap(), Duration::from_secs(60)).unwrap();
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
    fn nobody_there_is_an_error_at_once() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // The port of a client: nobody listens there, and nobody else gets it meanwhile.
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let address = client.local_addr().unwrap();
        assert_eq!(connect_tcp(address, Duration::from_secs(60)).unwrap_err(), Errno(libc::ECONNREFUSED));
        assert_eq!(connect_unix(b"/nowhere/socket", Duration::from_secs(60)).unwrap_err(), Errno(libc::ENOENT));
        assert_eq!(connect_unix(&[b'x'; 200], Duration::from_secs(60)).unwrap_err(), Errno(libc::ENAMETOOLONG));
    }

    #[test]
    fn passed_descriptors_arrive_above_the_floor_and_close_on_exec() {
        let directory = std::env::temp_dir().join(format!("farfield-net-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        set_descriptor_floor(500);
        let fd = connect_unix(path.as_os_str().as_encoded_bytes(), Duration::from_secs(60)).unwrap();
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
