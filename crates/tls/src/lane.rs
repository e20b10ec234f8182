//! Beginning of a lane: one message of each side, from which its keys come.
//!
//! The client sends a magic number, the name of its session and a nonce. The server answers with a
//! nonce. Nothing here is secret, and neither side believes anything until a record opens: only
//! whoever has the session's secret can seal one, and only under nonces that both sides chose.

use crate::EncryptionError;
use crate::keys::{ConnectionKeys, EncryptionSecret, NONCE_BYTES, SESSION_ID_BYTES};
use farfield_os::{Errno, net, serving};

/// First bytes of both messages. No TLS record begins so, and no message of Farfield's protocol: its
/// first four bytes are a length, and this one is beyond its limit.
pub(crate) const MAGIC: [u8; 4] = *b"FFL\x01";
pub(crate) const REQUEST_BYTES: usize = MAGIC.len() + SESSION_ID_BYTES + NONCE_BYTES;
pub(crate) const REPLY_BYTES: usize = MAGIC.len() + 4 + NONCE_BYTES;

/// First message of a client that opens a lane.
pub(crate) struct LaneHello {
    pub(crate) session: [u8; SESSION_ID_BYTES],
    pub(crate) nonce: [u8; NONCE_BYTES],
}

impl LaneHello {
    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<LaneHello> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (session, rest) = rest.split_first_chunk()?;
        let (nonce, _) = rest.split_first_chunk()?;
        (*magic == MAGIC).then_some(LaneHello { session: *session, nonce: *nonce })
    }

    fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        let (magic, rest) = bytes.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        rest[..SESSION_ID_BYTES].copy_from_slice(&self.session);
        rest[SESSION_ID_BYTES..].copy_from_slice(&self.nonce);
        bytes
    }
}

/// Encodes the server's answer; without a nonce it knows no such session.
pub(crate) fn encode_reply(nonce: Option<&[u8; NONCE_BYTES]>) -> [u8; REPLY_BYTES] {
    let mut bytes = [0; REPLY_BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    match nonce {
        Some(nonce) => bytes[MAGIC.len() + 4..].copy_from_slice(nonce),
        None => bytes[MAGIC.len()] = 1,
    }
    bytes
}

/// Decodes such an answer. Returns `None` inside if the server knows no such session.
fn decode_reply(bytes: &[u8; REPLY_BYTES]) -> Result<Option<[u8; NONCE_BYTES]>, EncryptionError> {
    let (head, nonce) = bytes.split_at(MAGIC.len() + 4);
    match (head.strip_prefix(&MAGIC), nonce.first_chunk()) {
        (Some([0, 0, 0, 0]), Some(nonce)) => Ok(Some(*nonce)),
        (Some([1, 0, 0, 0]), _) => Ok(None),
        _ => Err(EncryptionError::NoTls),
    }
}

/// Client's side of the beginning of a lane: a state machine whose steps never wait, allocate or
/// take a lock.
pub struct LaneHandshake {
    session: EncryptionSecret,
    nonce: [u8; NONCE_BYTES],
    request: [u8; REQUEST_BYTES],
    sent: usize,
    reply: [u8; REPLY_BYTES],
    received: usize,
}

impl core::fmt::Debug for LaneHandshake {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("LaneHandshake").field("received", &self.received).finish_non_exhaustive()
    }
}

impl LaneHandshake {
    /// Begins a lane of this session. Fails if the kernel gives no random numbers.
    pub fn new(session: &EncryptionSecret) -> Result<LaneHandshake, Errno> {
        let mut nonce = [0; NONCE_BYTES];
        serving::fill_random(&mut nonce)?;
        let request = LaneHello { session: session.id, nonce }.encode();
        Ok(LaneHandshake { session: session.clone(), nonce, request, sent: 0, reply: [0; REPLY_BYTES], received: 0 })
    }

    /// Returns the poll events to wait for.
    pub fn events(&self) -> i16 {
        if self.sent < REQUEST_BYTES { libc::POLLOUT } else { libc::POLLIN }
    }

    /// Sends and receives what can be moved now. Returns the keys once both messages were exchanged.
    pub fn advance(&mut self, fd: i32) -> Result<Option<ConnectionKeys>, EncryptionError> {
        while self.sent < REQUEST_BYTES {
            let left = &self.request[self.sent..];
            let part = libc::iovec { iov_base: left.as_ptr().cast_mut().cast(), iov_len: left.len() };
            // SAFETY: what is left is readable.
            match unsafe { net::send(fd, &[part]) } {
                Ok(sent) => self.sent += sent,
                Err(Errno(libc::EINTR)) => {}
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                Err(errno) => return Err(EncryptionError::Os(errno)),
            }
        }
        while self.received < REPLY_BYTES {
            let free = &mut self.reply[self.received..];
            let part = libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() };
            // SAFETY: the part is ours and writable.
            match unsafe { net::receive(fd, &[part]) } {
                Ok(0) => return Err(EncryptionError::HungUp),
                Ok(got) => self.received += got,
                Err(Errno(libc::EINTR)) => {}
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                Err(errno) => return Err(EncryptionError::Os(errno)),
            }
        }
        let nonce = decode_reply(&self.reply)?.ok_or(EncryptionError::SessionUnknown)?;
        Ok(Some(self.session.lane_keys(&self.nonce, &nonce)))
    }
}
