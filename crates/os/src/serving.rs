//! System calls of a server beside those of clients: credentials of the peer, passing descriptors,
//! signals.

use crate::errno::{Errno, Result};
use crate::gate::syscall;
use crate::signals::SignalSet;
use core::mem::size_of;
use core::time::Duration;
use std::os::fd::{AsRawFd, BorrowedFd};

fn set_option(fd: BorrowedFd<'_>, level: i32, option: i32, value: i32) -> Result<()> {
    let number = fd.as_raw_fd() as usize;
    let args = [number, level as usize, option as usize, &raw const value as usize, size_of::<i32>(), 0];
    // SAFETY: the kernel reads one i32.
    unsafe { syscall(libc::SYS_setsockopt, args) }.map(drop)
}

/// Prepares an accepted TCP connection. It has no Nagle delay, and a peer whose machine vanished is
/// noticed within ~11 s while nothing is on its way to it. While something is, [`has_vanished`]
/// tells.
///
/// (`TCP_USER_TIMEOUT` would not do: it also ends the connection of a client that is stopped, and
/// whose kernel answers that there is no room.)
pub fn prepare_tcp(fd: BorrowedFd<'_>) -> Result<()> {
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5)?;
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2)?;
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)
}

/// Number of unanswered retransmissions in a row from which on a peer has vanished. That takes 25 s
/// on a near network, where the kernel waits 200 ms at first and then twice as long each time. The
/// kernel itself would give up after 15 minutes.
const UNANSWERED_MAX: u8 = 7;

/// Returns whether the machine at the other end of a TCP connection does not answer any more
/// although data are on their way to it. A peer that is stopped answers: its kernel does.
pub fn has_vanished(fd: BorrowedFd<'_>) -> bool {
    unanswered(fd).is_ok_and(|times| times >= UNANSWERED_MAX)
}

/// Returns how often data, or window probes, were sent again since the peer was heard last.
fn unanswered(fd: BorrowedFd<'_>) -> Result<u8> {
    // SAFETY: plain numbers; all-zero is valid.
    let mut info: libc::tcp_info = unsafe { core::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    let args = [
        fd.as_raw_fd() as usize,
        libc::IPPROTO_TCP as usize,
        libc::TCP_INFO as usize,
        &raw mut info as usize,
        &raw mut len as usize,
        0,
    ];
    // SAFETY: the kernel writes at most `len` bytes of `info`, and the length.
    unsafe { syscall(libc::SYS_getsockopt, args) }?;
    Ok(info.tcpi_retransmits.max(info.tcpi_probes))
}

/// Process at the other end of a Unix socket, as it was when it connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Process id.
    pub pid: i32,
    /// Effective user id.
    pub uid: u32,
}

/// Returns the process at the other end of a Unix socket.
pub fn peer(fd: BorrowedFd<'_>) -> Result<Peer> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let args = [
        fd.as_raw_fd() as usize,
        libc::SOL_SOCKET as usize,
        libc::SO_PEERCRED as usize,
        &raw mut credentials as usize,
        &raw mut len as usize,
        0,
    ];
    // SAFETY: the kernel writes one `ucred` and its length.
    unsafe { syscall(libc::SYS_getsockopt, args) }?;
    Ok(Peer { pid: credentials.pid, uid: credentials.uid })
}

/// Returns the effective user id of this process.
pub fn effective_uid() -> u32 {
    // SAFETY: no arguments; cannot fail.
    unsafe { syscall(libc::SYS_geteuid, [0; 6]) }.unwrap_or(0) as u32
}

/// Ends both directions of a connection now; threads that wait on it wake up.
pub fn shut_down(fd: BorrowedFd<'_>) {
    // SAFETY: no pointers. Fails when the other side was faster.
    let _ = unsafe { syscall(libc::SYS_shutdown, [fd.as_raw_fd() as usize, libc::SHUT_RDWR as usize, 0, 0, 0, 0]) };
}

/// Ends the receiving on a connection; threads that wait to receive on it wake up. Answers can
/// still be sent.
pub fn finish_receiving(fd: BorrowedFd<'_>) {
    // SAFETY: no pointers. Fails when the other side was faster.
    let _ = unsafe { syscall(libc::SYS_shutdown, [fd.as_raw_fd() as usize, libc::SHUT_RD as usize, 0, 0, 0, 0]) };
}

/// Ends the sending on a connection; sent bytes still arrive.
pub fn finish_sending(fd: BorrowedFd<'_>) {
    // SAFETY: no pointers. Fails when the other side was faster.
    let _ = unsafe { syscall(libc::SYS_shutdown, [fd.as_raw_fd() as usize, libc::SHUT_WR as usize, 0, 0, 0, 0]) };
}

/// Fills `bytes` with random bits fit for secrets.
pub fn fill_random(mut bytes: &mut [u8]) -> Result<()> {
    while !bytes.is_empty() {
        let args = [bytes.as_mut_ptr() as usize, bytes.len(), 0, 0, 0, 0];
        // SAFETY: the kernel writes at most `bytes.len()` bytes into `bytes`.
        match unsafe { syscall(libc::SYS_getrandom, args) } {
            Ok(filled) => bytes = &mut bytes[filled..],
            Err(errno) if errno.0 == libc::EINTR => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Sends as many of `bytes` as the kernel takes at once; the descriptors go with the first of them.
/// Returns how many. `EAGAIN`: nothing was sent.
pub fn send_descriptors(fd: BorrowedFd<'_>, bytes: &[u8], descriptors: &[impl AsRawFd]) -> Result<usize> {
    const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
    #[repr(C, align(8))]
    struct SendControlBuffer([u8; HEADER_BYTES + crate::net::DESCRIPTORS_MAX.next_multiple_of(2) * 4]);
    if descriptors.is_empty() || descriptors.len() > crate::net::DESCRIPTORS_MAX || bytes.is_empty() {
        return Err(Errno(libc::EINVAL));
    }
    let mut control = SendControlBuffer([0; _]);
    let control_bytes = HEADER_BYTES + descriptors.len() * 4;
    control.0[..8].copy_from_slice(&control_bytes.to_ne_bytes());
    control.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    control.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
    for (place, descriptor) in control.0[HEADER_BYTES..].chunks_exact_mut(4).zip(descriptors) {
        place.copy_from_slice(&descriptor.as_raw_fd().to_ne_bytes());
    }
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: plain numbers and null pointers.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = control_bytes.next_multiple_of(8);
    let flags = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) as usize;
    // SAFETY: `bytes` and the control data are readable for the lengths given; the kernel only reads them.
    unsafe { syscall(libc::SYS_sendmsg, [fd.as_raw_fd() as usize, &raw const message as usize, flags, 0, 0, 0]) }
}

/// Returns the number of bytes that were sent on a connection and that the other side has not
/// acknowledged yet. It includes the kernel's own overhead for them.
pub fn unacknowledged_bytes(fd: BorrowedFd<'_>) -> Result<usize> {
    let mut bytes: i32 = 0;
    let args = [fd.as_raw_fd() as usize, libc::TIOCOUTQ as usize, &raw mut bytes as usize, 0, 0, 0];
    // SAFETY: the kernel writes one i32 (`SIOCOUTQ`, the number of `TIOCOUTQ`).
    unsafe { syscall(libc::SYS_ioctl, args) }?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Raises this process's limit of descriptors to the hard limit; returns the limit.
pub fn raise_descriptor_limit() -> Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let resource = libc::RLIMIT_NOFILE as usize;
    // SAFETY: the kernel writes one `rlimit` to the fourth argument.
    unsafe { syscall(libc::SYS_prlimit64, [0, resource, 0, &raw mut limit as usize, 0, 0]) }?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one `rlimit` from the third argument.
    unsafe { syscall(libc::SYS_prlimit64, [0, resource, &raw const limit as usize, 0, 0, 0]) }?;
    Ok(limit.rlim_cur)
}

/// Returns the id of the parent of this process.
pub fn parent_pid() -> i32 {
    // SAFETY: no arguments; cannot fail.
    unsafe { syscall(libc::SYS_getppid, [0; 6]) }.unwrap_or(0) as i32
}

/// Asks for `signal` when the thread that started this process ends.
pub fn signal_when_parent_dies(signal: i32) -> Result<()> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as usize, signal as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Takes one of the (blocked) signals in `set`; blocks until then. `None` when `within` has passed,
/// or another signal interrupts the wait.
pub fn wait_for_signal(set: SignalSet, within: Duration) -> Result<Option<i32>> {
    let time = libc::timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    let args = [&raw const set as usize, 0, &raw const time as usize, size_of::<SignalSet>(), 0, 0];
    // SAFETY: the kernel reads the set and the time, and is not asked for details of the signal.
    match unsafe { syscall(libc::SYS_rt_sigtimedwait, args) } {
        Ok(signal) => Ok(Some(signal as i32)),
        Err(Errno(libc::EAGAIN | libc::EINTR)) => Ok(None),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_travel_with_the_first_byte_and_the_peer_is_known() {
        let (one, other) = UnixStream::pair().unwrap();
        let memory = crate::memfd::create(c"test", 4096).unwrap();
        let memory_again = memory.try_clone().unwrap();
        assert_eq!(unacknowledged_bytes(one.as_fd()), Ok(0));
        assert_eq!(send_descriptors(one.as_fd(), b"take", &[memory, memory_again]).unwrap(), 4);
        assert!(unacknowledged_bytes(one.as_fd()).unwrap() > 0);
        let (mut bytes, mut fds) = ([0; 16], [0; 4]);
        assert_eq!(net::receive_descriptors(other.as_raw_fd(), &mut bytes, &mut fds).unwrap(), (4, 2));
        assert_eq!(unacknowledged_bytes(one.as_fd()), Ok(0));
        fds[..2].iter().for_each(|fd| crate::file::close(*fd));
        let peer = peer(other.as_fd()).unwrap();
        assert_eq!((peer.pid, peer.uid), (crate::process::pid(), effective_uid()));
        shut_down(one.as_fd());
        assert_ne!(net::poll(other.as_raw_fd(), libc::POLLIN, Duration::from_secs(60)).unwrap(), 0);
    }

    #[test]
    fn a_peer_that_vanished_is_told_from_one_that_is_stopped() {
        use std::io::{ErrorKind, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || {
            let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            prepare_tcp(server.as_fd()).unwrap();
            server.set_nonblocking(true).unwrap();
            (client, server)
        };
        let fill = |mut server: &std::net::TcpStream| loop {
            match server.write(&[7; 1 << 16]) {
                Ok(sent) => assert_ne!(sent, 0),
                Err(error) => break assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        };
        // It does not read: its kernel says that there is no room.
        let (_stopped, to_stopped) = connect();
        fill(&to_stopped);
        // Its kernel drops whatever comes, as a machine does that is not there.
        let (gone, to_gone) = connect();
        let nothing = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: (&raw const nothing).cast_mut() };
        let args = [
            gone.as_raw_fd() as usize,
            libc::SOL_SOCKET as usize,
            libc::SO_ATTACH_FILTER as usize,
            &raw const program as usize,
            size_of::<libc::sock_fprog>(),
            0,
        ];
        // SAFETY: the kernel reads the program and its one instruction: accept no byte.
        unsafe { syscall(libc::SYS_setsockopt, args) }.unwrap();
        fill(&to_gone);
        let started = std::time::Instant::now();
        while unanswered(to_gone.as_fd()).unwrap() < 3 {
            assert!(started.elapsed() < Duration::from_secs(60), "the kernel counts what is not answered");
            std::thread::sleep(Duration::from_millis(10));
            assert!(unanswered(to_stopped.as_fd()).unwrap() < 2);
        }
        assert!(!has_vanished(to_stopped.as_fd()));
    }

    #[test]
    fn a_blocked_signal_is_taken_and_no_signal_is_a_time_out() {
        let old = crate::signals::set_mask(crate::signals::bit(libc::SIGUSR2));
        let set = crate::signals::bit(libc::SIGUSR2);
        assert_eq!(wait_for_signal(set, Duration::from_millis(1)).unwrap(), None);
        let (pid, tid) = (crate::process::pid() as usize, crate::process::tid() as usize);
        // SAFETY: no pointers; the signal is blocked in this thread.
        unsafe { syscall(libc::SYS_tgkill, [pid, tid, libc::SIGUSR2 as usize, 0, 0, 0]) }.unwrap();
        assert_eq!(wait_for_signal(set, Duration::from_secs(60)).unwrap(), Some(libc::SIGUSR2));
        crate::signals::set_mask(old);
    }
}
