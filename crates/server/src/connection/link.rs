//! Bytes in and out: the inbox, the outbox, and the waits for the client.

use super::{BATCH_PAGES_MAX, Connection, End};
use farfield_core::wire;
use farfield_os::{Errno, net, serving};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// First size of the inbox; it grows when a longer message is announced.
pub(super) const INBOX_BYTES: usize = 64 * 1024;
/// Largest size of the inbox: two of the longest messages, so that one can arrive while the other is served.
const INBOX_BYTES_MAX: usize = 2 * (wire::HEAD_BYTES + wire::write_body_bytes(BATCH_PAGES_MAX));
/// An idle connection looks this often whether its inbox is larger than it needs to be.
const IDLE: Duration = Duration::from_secs(10);

impl Connection<'_> {
    /// Receives at least one byte. `need` is the length of the next message as far as is known.
    pub(super) fn receive(&mut self, need: usize, until: Option<Instant>) -> Result<(), End> {
        self.make_room(need);
        let mut spinning = self.shared.spinners.enter(&self.patience, Instant::now());
        loop {
            let free = &mut self.inbox[self.unread.end..];
            let part = libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() };
            // SAFETY: the free part of the inbox is ours alone.
            match unsafe { net::receive(self.fd.as_raw_fd(), &[part]) } {
                Ok(0) => return Err(End::Closed),
                Ok(count) => {
                    self.unread.end += count;
                    self.tally.received_bytes += count as u64;
                    return Ok(());
                }
                Err(errno) if errno.is_transient() => {}
                Err(errno) => return Err(lost(errno)),
            }
            if let Some(spin) = &mut spinning {
                if spin.go_on(&mut self.patience, Instant::now()) {
                    std::hint::spin_loop();
                    continue;
                }
                spinning = None;
            }
            self.tally.sleeps += 1;
            let limit = until.unwrap_or_else(|| Instant::now() + IDLE);
            if !self.wait(libc::POLLIN, limit)? {
                if until.is_some() {
                    return Err(End::Silent);
                }
                self.shrink();
            }
        }
    }

    fn make_room(&mut self, need: usize) {
        if self.unread.is_empty() {
            self.unread = 0..0;
        }
        let room_for = need.min(INBOX_BYTES_MAX);
        if self.unread.start + room_for > self.inbox.len() || self.unread.end == self.inbox.len() {
            self.inbox.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        if room_for > self.inbox.len() {
            self.inbox.resize((2 * room_for).min(INBOX_BYTES_MAX), 0);
        }
        debug_assert!(self.unread.end < self.inbox.len());
    }

    /// Nothing came for a while: what a long message needed is given back.
    fn shrink(&mut self) {
        if self.unread.is_empty() && self.inbox.len() > INBOX_BYTES {
            self.unread = 0..0;
            self.inbox.truncate(INBOX_BYTES);
            self.inbox.shrink_to_fit();
        }
    }

    /// Sends all of the outbox; waits for the client, but not forever.
    pub(super) fn flush(&mut self) -> Result<(), End> {
        let mut until = None;
        while self.sent < self.outbox.len() {
            let rest = &self.outbox[self.sent..];
            let part = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the rest of the outbox is readable and ours.
            match unsafe { net::send(self.fd.as_raw_fd(), &[part]) } {
                Ok(count) => {
                    self.sent += count;
                    self.tally.sent_bytes += count as u64;
                    until = None;
                }
                Err(errno) if errno.is_transient() => {
                    let until = *until.get_or_insert_with(|| Instant::now() + self.shared.config.stall_max);
                    if !self.wait(libc::POLLOUT, until)? {
                        return Err(End::Stalled);
                    }
                }
                Err(errno) => return Err(lost(errno)),
            }
        }
        self.outbox.clear();
        self.sent = 0;
        Ok(())
    }

    /// Waits for one of `events`; false when `until` has passed.
    pub(super) fn wait(&self, events: i16, until: Instant) -> Result<bool, End> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            match net::poll(self.fd.as_raw_fd(), events, left) {
                Ok(0) => {}
                Ok(_) => return Ok(true),
                Err(errno) => return Err(End::Os(errno)),
            }
        }
    }

    /// Sends the last words and waits until the client has heard them: closing while bytes of the client are unread
    /// would make the kernel throw away ours.
    pub(super) fn say_goodbye(&mut self) {
        if self.flush().is_err() {
            return;
        }
        serving::finish_sending(self.fd.as_fd());
        let until = Instant::now() + Duration::from_millis(500);
        let mut left = 64 * INBOX_BYTES;
        while left > 0 && self.wait(libc::POLLIN, until).is_ok_and(|ready| ready) {
            let part = libc::iovec { iov_base: self.inbox.as_mut_ptr().cast(), iov_len: self.inbox.len() };
            // SAFETY: the inbox is ours alone.
            match unsafe { net::receive(self.fd.as_raw_fd(), &[part]) } {
                Ok(0) => return,
                Ok(count) => left = left.saturating_sub(count),
                Err(errno) if errno.is_transient() => {}
                Err(_) => return,
            }
        }
    }
}

pub(super) fn lost(errno: Errno) -> End {
    match errno.0 {
        libc::ECONNRESET | libc::EPIPE | libc::ETIMEDOUT => End::Closed,
        _ => End::Os(errno),
    }
}
