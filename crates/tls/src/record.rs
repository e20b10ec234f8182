//! Records: what both sides send after their handshake.
//!
//! A record is a head of four bytes (`F`, version 1, length of the content as a little-endian u16),
//! the content, sealed, and a tag of 16 bytes. [`RecordStream::send`] and [`RecordStream::receive`]
//! stand where the system calls stood, and behave like them: as many bytes as can be moved now, or
//! `EAGAIN`. After [`RecordStream::new`] nothing here allocates.

use crate::keys::{ConnectionKeys, Direction};
use farfield_os::{Errno, net};

/// Greatest number of bytes in one record.
pub const RECORD_BYTES_MAX: usize = 16 * 1024;
const HEAD_BYTES: usize = 4;
const TAG_BYTES: usize = 16;
/// Bytes that a record adds to its content.
const OVERHEAD: usize = HEAD_BYTES + TAG_BYTES;
/// Number of records that a client seals before the kernel is asked to take them, and receives at once.
const TRAIN: usize = 4;
const BUFFER_BYTES: usize = TRAIN * (RECORD_BYTES_MAX + OVERHEAD);
/// Length of the buffers of a server, which has many connections.
const SERVER_BUFFER_BYTES: usize = BUFFER_BYTES / 2;
/// Length of the buffers of a connection that has not authenticated: greeting and welcome.
const SMALL_BYTES: usize = 2 * 1024;
const FIRST: [u8; 2] = [b'F', 1];

/// Error number for bytes that do not open: they were changed, or are not of this connection.
const DAMAGED: Errno = Errno(libc::EBADMSG);
/// Error number for a stream without keys.
const NO_KEYS: Errno = Errno(libc::ENOTCONN);

/// Stream of sealed records over a socket.
pub struct RecordStream {
    sealing: Option<Direction>,
    opening: Option<Direction>,
    /// Sealed records. Those in `out_from..out_to` are not with the kernel yet.
    out: Box<[u8]>,
    out_from: usize,
    out_to: usize,
    /// Number of bytes of content in `out`.
    out_content: usize,
    /// Received bytes: opened content in `open_from..open_to`, and sealed bytes in `from..to`.
    inbox: Box<[u8]>,
    open_from: usize,
    open_to: usize,
    from: usize,
    to: usize,
}

impl core::fmt::Debug for RecordStream {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RecordStream").field("has_keys", &self.sealing.is_some()).finish_non_exhaustive()
    }
}

impl Default for RecordStream {
    fn default() -> Self {
        RecordStream::new()
    }
}

impl RecordStream {
    /// Size of both buffers of a server's connection that has [grown](RecordStream::grow).
    pub const SERVER_BYTES: usize = 2 * SERVER_BUFFER_BYTES;

    /// Allocates a stream that has no keys yet.
    pub fn new() -> RecordStream {
        RecordStream::with_buffers(BUFFER_BYTES)
    }

    /// Allocates a stream with small buffers, for a peer that has not authenticated.
    pub(crate) fn small() -> RecordStream {
        RecordStream::with_buffers(SMALL_BYTES)
    }

    fn with_buffers(bytes: usize) -> RecordStream {
        let buffer = || vec![0; bytes].into_boxed_slice();
        RecordStream {
            sealing: None,
            opening: None,
            out: buffer(),
            out_from: 0,
            out_to: 0,
            out_content: 0,
            inbox: buffer(),
            open_from: 0,
            open_to: 0,
            from: 0,
            to: 0,
        }
    }

    /// Gives a server's stream with small buffers its full ones.
    pub fn grow(&mut self) {
        let grown = |old: &[u8]| {
            let mut buffer = vec![0; SERVER_BUFFER_BYTES].into_boxed_slice();
            buffer[..old.len()].copy_from_slice(old);
            buffer
        };
        if self.out.len() < SERVER_BUFFER_BYTES {
            (self.out, self.inbox) = (grown(&self.out), grown(&self.inbox));
        }
    }

    /// Sets the keys, as the client of a connection uses them.
    pub fn set_client_keys(&mut self, keys: &ConnectionKeys) {
        let (sealing, opening) = keys.of_client();
        (self.sealing, self.opening) = (Some(sealing), Some(opening));
    }

    /// Sets the keys, as the server of a connection uses them.
    pub(crate) fn set_server_keys(&mut self, keys: &ConnectionKeys) {
        let (sealing, opening) = keys.of_server();
        (self.sealing, self.opening) = (Some(sealing), Some(opening));
    }

    /// Checks whether records were sealed that are not with the kernel yet. The next call of
    /// [`RecordStream::send`] must give the bytes that are in them once more.
    pub fn is_sending(&self) -> bool {
        self.out_from < self.out_to
    }

    /// Seals bytes at `parts` and sends them on `fd`. Returns how many bytes went, as [`net::send`] does.
    ///
    /// After `EAGAIN` the next call must begin with the same bytes: records of them may be on their
    /// way. (So it is with `SSL_write` of OpenSSL.)
    ///
    /// # Safety
    /// As for [`net::send`]: each part must be readable, or belong to memory whose concurrent change by
    /// others is acceptable to the caller.
    pub unsafe fn send(&mut self, fd: i32, parts: &[libc::iovec]) -> Result<usize, Errno> {
        if !self.is_sending() {
            // SAFETY: passed on to the caller.
            unsafe { self.seal(parts)? };
        }
        while self.is_sending() {
            let rest = &self.out[self.out_from..self.out_to];
            let part = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the part is ours and readable.
            self.out_from += unsafe { net::send(fd, &[part]) }?;
        }
        Ok(self.out_content)
    }

    /// Sends bytes, like [`RecordStream::send`].
    pub fn write(&mut self, fd: i32, bytes: &[u8]) -> Result<usize, Errno> {
        let part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: the bytes are readable.
        unsafe { self.send(fd, &[part]) }
    }

    /// Receives bytes, like [`RecordStream::receive`].
    pub fn read(&mut self, fd: i32, into: &mut [u8]) -> Result<usize, Errno> {
        let part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: the bytes are writable, and borrowed alone.
        unsafe { self.receive(fd, &[part]) }
    }

    /// Fills the empty outbox with records of the first bytes at `parts`.
    ///
    /// # Safety
    /// As for [`RecordStream::send`].
    unsafe fn seal(&mut self, parts: &[libc::iovec]) -> Result<(), Errno> {
        let sealing = self.sealing.as_mut().ok_or(NO_KEYS)?;
        (self.out_from, self.out_to, self.out_content) = (0, 0, 0);
        let mut parts = parts.iter().map(|part| (part.iov_base.cast::<u8>().cast_const(), part.iov_len));
        let mut part = parts.next();
        while let Some(room) = (self.out.len() - self.out_to).checked_sub(OVERHEAD + 1) {
            let room = (room + 1).min(RECORD_BYTES_MAX);
            let start = self.out_to + HEAD_BYTES;
            let mut len = 0;
            while let Some((bytes, left)) = &mut part {
                let taken = (*left).min(room - len);
                // SAFETY: `taken` bytes are readable at `bytes` by the caller's promise, and `out` has
                // room for `room` bytes and a tag from `start` on; a buffer of the caller is not ours.
                unsafe { core::ptr::copy_nonoverlapping(*bytes, self.out[start + len..].as_mut_ptr(), taken) };
                len += taken;
                (*bytes, *left) = (bytes.wrapping_add(taken), *left - taken);
                if *left > 0 {
                    break;
                }
                part = parts.next();
            }
            if len == 0 {
                break;
            }
            let head = head_of(len);
            let tag = sealing.seal(&head, &mut self.out[start..start + len]);
            self.out[self.out_to..start].copy_from_slice(&head);
            self.out[start + len..][..TAG_BYTES].copy_from_slice(tag.as_ref());
            self.out_to = start + len + TAG_BYTES;
            self.out_content += len;
        }
        Ok(())
    }

    /// Receives from `fd` and puts opened bytes into `parts`. Returns how many, as [`net::receive`] does:
    /// less than there is room for means that nothing more has arrived. `EBADMSG`: the bytes were
    /// changed on their way.
    ///
    /// # Safety
    /// As for [`net::receive`]: each part must be writable and belong to the caller alone.
    pub unsafe fn receive(&mut self, fd: i32, parts: &[libc::iovec]) -> Result<usize, Errno> {
        let (mut total, mut is_drained) = (0, false);
        for part in parts {
            let mut done = 0;
            while done < part.iov_len {
                let open = &self.inbox[self.open_from..self.open_to];
                if !open.is_empty() {
                    let taken = open.len().min(part.iov_len - done);
                    // SAFETY: the caller's part has `iov_len` writable bytes and is not our inbox.
                    unsafe {
                        core::ptr::copy_nonoverlapping(open.as_ptr(), part.iov_base.cast::<u8>().add(done), taken);
                    }
                    self.open_from += taken;
                    (done, total) = (done + taken, total + taken);
                } else if !self.open_next()? {
                    if is_drained {
                        return if total > 0 { Ok(total) } else { Err(Errno(libc::EAGAIN)) };
                    }
                    match self.fill(fd) {
                        Ok(Filled::End) => return Ok(total),
                        Ok(Filled::All) => {}
                        Ok(Filled::Part) => is_drained = true,
                        Err(_) if total > 0 => return Ok(total),
                        Err(errno) => return Err(errno),
                    }
                }
            }
        }
        Ok(total)
    }

    /// Opens the next record, if it is complete.
    fn open_next(&mut self) -> Result<bool, Errno> {
        let opening = self.opening.as_mut().ok_or(NO_KEYS)?;
        let room = self.inbox.len();
        let Some((head, rest)) = self.inbox[self.from..self.to].split_first_chunk_mut::<HEAD_BYTES>() else {
            return Ok(false);
        };
        let len = record_len(*head).ok_or(DAMAGED)?;
        if HEAD_BYTES + len + TAG_BYTES > room {
            return Err(DAMAGED);
        }
        let Some(sealed) = rest.get_mut(..len + TAG_BYTES) else { return Ok(false) };
        opening.open(head, sealed).map_err(|_| DAMAGED)?;
        self.open_from = self.from + HEAD_BYTES;
        self.open_to = self.open_from + len;
        self.from = self.open_to + TAG_BYTES;
        Ok(true)
    }

    /// Receives once behind the sealed bytes. All opened ones were taken.
    fn fill(&mut self, fd: i32) -> Result<Filled, Errno> {
        self.inbox.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        (self.open_from, self.open_to) = (0, 0);
        let free = &mut self.inbox[self.to..];
        let part = libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() };
        // SAFETY: the free part of the inbox is ours alone.
        let got = unsafe { net::receive(fd, &[part]) }?;
        self.to += got;
        Ok(match got {
            0 => Filled::End,
            got if got < part.iov_len => Filled::Part,
            _ => Filled::All,
        })
    }
}

enum Filled {
    /// The peer has closed the connection.
    End,
    /// All that had arrived was received.
    Part,
    /// The free part of the inbox was filled.
    All,
}

fn head_of(len: usize) -> [u8; HEAD_BYTES] {
    let [low, high] = (len as u16).to_le_bytes();
    [FIRST[0], FIRST[1], low, high]
}

/// Returns the length of the content of a record; `None` if this is no head of one.
fn record_len(head: [u8; HEAD_BYTES]) -> Option<usize> {
    let [first, version, low, high] = head;
    let len = usize::from(u16::from_le_bytes([low, high]));
    ([first, version] == FIRST && (1..=RECORD_BYTES_MAX).contains(&len)).then_some(len)
}

/// Sends pieces of `content` with these lengths, changes bytes of the stream at these positions, and
/// receives with `room` bytes at a time. Panics unless what opens is the beginning of what was sent, and all
/// of it if nothing was changed.
#[cfg(any(test, feature = "conformance"))]
pub fn check_stream(content: &[u8], pieces: &[u16], changes: &[(u16, u8)], room: u16) {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    let keys = crate::EncryptionSecret { id: [7; 16], secret: [9; 32] }.control_keys();
    let (mut sealing, mut opening) = (RecordStream::new(), RecordStream::new());
    sealing.set_client_keys(&keys);
    opening.set_server_keys(&keys);
    let pair = || UnixStream::pair().expect("the kernel gives a pair of sockets");
    // A pair of sockets has room for that.
    let mut rest = &content[..content.len().min(32 * 1024)];
    let sent = rest;
    let (from, mut wire) = pair();
    let mut pieces = pieces.iter().take(64);
    while !rest.is_empty() {
        let piece = pieces.next().map_or(rest.len(), |piece| usize::from(*piece).clamp(1, rest.len()));
        let count = sealing.write(from.as_raw_fd(), &rest[..piece]).expect("there is room");
        rest = &rest[count..];
    }
    drop(from);
    let mut bytes = Vec::new();
    wire.read_to_end(&mut bytes).expect("the pair is ours");
    let before = bytes.clone();
    for (position, change) in changes {
        if let Some(byte) = bytes.get_mut(usize::from(*position)) {
            *byte ^= change;
        }
    }
    let (mut to, from) = pair();
    to.write_all(&bytes).expect("there is room");
    drop(to);
    let (mut got, mut into) = (Vec::new(), vec![0; usize::from(room).max(1)]);
    let end = loop {
        match opening.read(from.as_raw_fd(), &mut into) {
            Ok(0) => break Ok(()),
            Ok(count) => got.extend_from_slice(&into[..count]),
            Err(Errno(libc::EAGAIN)) => {}
            Err(errno) => break Err(errno),
        }
    };
    assert!(sent.starts_with(&got), "what opens was never sent");
    if bytes == before {
        assert_eq!((got.len(), end), (sent.len(), Ok(())), "what was not changed opens");
    }
}

#[cfg(test)]
mod tests {
    //! Guards against bytes that are lost, doubled or believed though they were changed; and against memory that is taken
    //! where none may be.
    use super::*;
    use crate::keys::EncryptionSecret;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, RecordStream, UnixStream, RecordStream) {
        let (client_fd, server_fd) = UnixStream::pair().unwrap();
        let keys = EncryptionSecret { id: [7; 16], secret: [9; 32] }.control_keys();
        let (mut client, mut server) = (RecordStream::new(), RecordStream::new());
        client.set_client_keys(&keys);
        server.set_server_keys(&keys);
        (client_fd, client, server_fd, server)
    }

    fn send(stream: &mut RecordStream, fd: &UnixStream, parts: &[&[u8]]) -> Result<usize, Errno> {
        let part = |part: &&[u8]| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
        let parts: Vec<_> = parts.iter().map(part).collect();
        // SAFETY: the parts are readable.
        unsafe { stream.send(fd.as_raw_fd(), &parts) }
    }

    fn receive(stream: &mut RecordStream, fd: &UnixStream, into: &mut [u8]) -> Result<usize, Errno> {
        stream.read(fd.as_raw_fd(), into)
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|index| (index * 7 + index / 251) as u8).collect()
    }

    #[test]
    fn bytes_of_any_length_arrive_in_order_however_they_are_taken() {
        let (client_fd, mut client, server_fd, mut server) = pair();
        let all = bytes(300_000);
        let (mut sent, mut got) = (0, Vec::new());
        let mut piece = 1;
        while got.len() < all.len() {
            let rest = &all[sent..];
            let (first, second) = rest.split_at(rest.len() / 3);
            match send(&mut client, &client_fd, &[first, &[], second]) {
                Ok(count) => sent += count,
                Err(errno) => assert_eq!(errno, Errno(libc::EAGAIN)),
            }
            piece = piece * 3 % 40_009;
            let mut into = vec![0; piece];
            match receive(&mut server, &server_fd, &mut into) {
                Ok(count) => got.extend_from_slice(&into[..count]),
                Err(errno) => assert_eq!(errno, Errno(libc::EAGAIN)),
            }
        }
        assert!(got == all && sent == all.len());
        drop(client_fd);
        assert_eq!(receive(&mut server, &server_fd, &mut [0; 9]), Ok(0));
    }

    #[test]
    fn a_receive_that_fills_its_room_may_leave_opened_bytes_and_one_that_does_not_leaves_none() {
        let (client_fd, mut client, server_fd, mut server) = pair();
        assert_eq!(send(&mut client, &client_fd, &[&bytes(100)]), Ok(100));
        assert_eq!(send(&mut client, &client_fd, &[&bytes(50)]), Ok(50));
        let mut into = [0; 70];
        assert_eq!(receive(&mut server, &server_fd, &mut into), Ok(70));
        assert_eq!(receive(&mut server, &server_fd, &mut [0; 200]), Ok(80));
        assert_eq!(receive(&mut server, &server_fd, &mut into), Err(Errno(libc::EAGAIN)));
    }

    #[test]
    fn every_bit_that_is_changed_every_record_that_is_repeated_or_left_out_is_noticed() {
        let record = |content: &[u8]| {
            let (client_fd, mut client, mut server_fd, _) = pair();
            send(&mut client, &client_fd, &[b"first"]).unwrap();
            send(&mut client, &client_fd, &[content]).unwrap();
            drop(client_fd);
            let mut raw = Vec::new();
            server_fd.read_to_end(&mut raw).unwrap();
            raw.split_off("first".len() + OVERHEAD)
        };
        let first = {
            let (client_fd, mut client, mut server_fd, _) = pair();
            send(&mut client, &client_fd, &[b"first"]).unwrap();
            drop(client_fd);
            let mut raw = Vec::new();
            server_fd.read_to_end(&mut raw).unwrap();
            raw
        };
        let check = |raw: &[u8], expected: Result<usize, Errno>| {
            let (mut client_fd, _, server_fd, mut server) = pair();
            client_fd.write_all(raw).unwrap();
            assert_eq!(receive(&mut server, &server_fd, &mut [0; 64]), expected);
        };
        check(&first, Ok(5));
        check(&record(b"second"), Err(DAMAGED));
        check(&[&first[..], &first].concat(), Err(DAMAGED));
        for bit in 0..first.len() * 8 {
            let mut changed = first.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let (mut client_fd, _, server_fd, mut server) = pair();
            client_fd.write_all(&changed).unwrap();
            // A length that became greater waits for the rest, and is noticed then.
            let noticed = receive(&mut server, &server_fd, &mut [0; 64]);
            assert!(matches!(noticed, Err(DAMAGED | Errno(libc::EAGAIN))), "bit {bit}: {noticed:?}");
            client_fd.write_all(&[0; 40_000]).unwrap();
            assert_eq!(receive(&mut server, &server_fd, &mut [0; 64]), Err(DAMAGED), "bit {bit}");
        }
    }

    #[test]
    fn whatever_is_changed_what_opens_was_sent() {
        let content = bytes(32 * 1024);
        for round in 0..200u16 {
            let pieces = [round * 7, 1, round.wrapping_mul(331), 20_000];
            let changes = [(round.wrapping_mul(163), 1 << (round % 8)), (round.wrapping_mul(401), round as u8)];
            let few = &changes[..usize::from(round % 3)];
            check_stream(&content[usize::from(round)..], &pieces, few, round * 97);
        }
    }

    #[test]
    fn after_a_full_socket_the_same_bytes_go_on() {
        let (client_fd, mut client, server_fd, mut server) = pair();
        let all = bytes(1 << 20);
        let mut sent = 0;
        loop {
            match send(&mut client, &client_fd, &[&all[sent..]]) {
                Ok(count) => sent += count,
                Err(errno) => break assert_eq!(errno, Errno(libc::EAGAIN)),
            }
        }
        assert!(client.is_sending() && sent > 0);
        let mut got = Vec::new();
        let mut into = vec![0; 1 << 20];
        while got.len() < all.len() {
            while let Ok(count) = receive(&mut server, &server_fd, &mut into) {
                got.extend_from_slice(&into[..count]);
            }
            while sent < all.len()
                && let Ok(count) = send(&mut client, &client_fd, &[&all[sent..]])
            {
                sent += count;
            }
        }
        assert!(got == all);
    }
}
