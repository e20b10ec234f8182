//! Transport of bytes: the inbox, the outbox, and the waits for the client.

use super::{BATCH_PAGES_MAX, ClientConnection, CloseReason};
use crate::store::{Charge, Resource};
use farfield_core::wire;
use farfield_os::{Errno, net, serving};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// Size of the inbox before the client has authenticated: one `Hello` and a little more.
pub(super) const GREETING_BYTES: usize = 2 * (wire::HEADER_BYTES + wire::Hello::BODY_BYTES_MAX);
/// Size of the inbox afterwards. It grows when a longer message is announced.
pub(super) const INBOX_BYTES: usize = 64 * 1024;
/// Size up to which the outbox is not charged.
const OUTBOX_BYTES: usize = 128 * 1024;
/// Slowest transfer, in bytes per second, that is tolerated while buffers are short.
const BYTES_PER_SECOND_MIN: usize = 64 * 1024;
/// Time for which a connection that waits for buffers sleeps before it tries again.
const ASK_AGAIN: Duration = Duration::from_millis(2);
/// Largest size of the inbox: two of the longest messages, so that one can arrive while the other
/// is served.
const INBOX_BYTES_MAX: usize = 2 * (wire::HEADER_BYTES + wire::write_body_bytes(BATCH_PAGES_MAX));
/// Interval at which an idle connection checks whether its inbox is larger than it needs to be.
const IDLE: Duration = Duration::from_secs(10);

impl ClientConnection<'_> {
    /// Receives at least one byte. `need` is the length of the next message as far as it is known.
    /// Returns [`CloseReason::Silent`] if nothing arrives before `until`. Without `until`, waits as long as
    /// it takes.
    pub(super) fn receive(&mut self, need: usize, until: Option<Instant>) -> Result<(), CloseReason> {
        self.make_room(need)?;
        // Newcomers must not take the slots for polling from clients.
        let may_spin = self.session.is_some();
        let mut spinning = may_spin.then(|| self.shared.spinners.enter(&self.backoff, Instant::now())).flatten();
        loop {
            let free = self.inbox.get_mut(self.unread.end..).unwrap_or_default();
            let part = libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() };
            let received = match &mut self.records {
                // SAFETY: the free part of the inbox is ours alone.
                Some(records) => unsafe { records.receive(self.fd.as_raw_fd(), &[part]) },
                // SAFETY: as above.
                None => unsafe { net::receive(self.fd.as_raw_fd(), &[part]) },
            };
            match received {
                Ok(0) => return Err(CloseReason::Closed),
                Ok(count) => {
                    self.unread.end += count;
                    self.tally.received_bytes += count as u64;
                    return Ok(());
                }
                Err(errno) if errno.is_transient() => {}
                Err(errno) => return Err(lost(errno)),
            }
            if let Some(spin) = &mut spinning {
                if spin.go_on(&mut self.backoff, Instant::now()) {
                    std::hint::spin_loop();
                    continue;
                }
                spinning = None;
            }
            self.tally.sleeps += 1;
            self.settle_under_way();
            let limit = until.unwrap_or_else(|| Instant::now() + IDLE);
            if !self.wait(libc::POLLIN, limit)? {
                if until.is_some() {
                    return Err(CloseReason::Silent);
                }
                self.check_message(need)?;
                self.shrink();
            }
        }
    }

    fn make_room(&mut self, need: usize) -> Result<(), CloseReason> {
        if self.unread.is_empty() {
            self.unread = 0..0;
            if self.is_short() {
                self.shrink();
            }
        }
        let room_for = need.min(INBOX_BYTES_MAX);
        if self.unread.start + room_for > self.inbox.len() || self.unread.end == self.inbox.len() {
            self.inbox.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        let size = match self.session {
            None => GREETING_BYTES,
            Some(_) if room_for <= INBOX_BYTES => INBOX_BYTES,
            Some(_) if self.is_short() => room_for,
            Some(_) => (2 * room_for).min(INBOX_BYTES_MAX),
        };
        if room_for > self.inbox.len() || (self.inbox.len() == GREETING_BYTES && size > GREETING_BYTES) {
            let held = self.buffer(size, INBOX_BYTES)?;
            self.inbox.resize(size, 0);
            self.inbox_held = held;
        }
        debug_assert!(self.unread.end < self.inbox.len());
        Ok(())
    }

    /// Gives back the memory that a long message needed, because the connection is idle or buffers
    /// are short.
    fn shrink(&mut self) {
        if self.unread.is_empty() && self.inbox.len() > INBOX_BYTES {
            self.unread = 0..0;
            self.inbox.truncate(INBOX_BYTES);
            self.inbox.shrink_to_fit();
            self.inbox_held = None;
        }
    }

    /// Checks whether this client might soon be refused memory for buffers.
    fn is_short(&self) -> bool {
        self.ledger.as_ref().is_some_and(|ledger| ledger.is_short(Resource::BufferBytes))
    }

    /// Charges a buffer of `bytes` bytes, of which `free` are not charged. Waits until the client's
    /// ledger allows it, because its other connections hold its share. Fails with [`CloseReason::Slow`]
    /// after `stall_max`.
    pub(super) fn buffer(&mut self, bytes: usize, free: usize) -> Result<Option<Charge>, CloseReason> {
        let Some(paid) = bytes.checked_sub(free).filter(|paid| *paid > 0) else { return Ok(None) };
        let Some(ledger) = self.ledger.clone() else { return Err(CloseReason::Slow) };
        let until = Instant::now() + self.shared.config.stall_max;
        loop {
            if let Ok(charge) = ledger.charge(Resource::BufferBytes, paid as u64) {
                return Ok(Some(charge));
            }
            self.turn.end();
            if self.shared.stopping() || Instant::now() >= until {
                return Err(CloseReason::Slow);
            }
            std::thread::sleep(ASK_AGAIN);
        }
    }

    /// Charges the outbox for `bytes` bytes of answers until they are sent.
    pub(super) fn hold_outbox(&mut self, bytes: usize) -> Result<(), CloseReason> {
        if self.outbox_held.is_none() {
            self.outbox_held = self.buffer(bytes, OUTBOX_BYTES)?;
        }
        Ok(())
    }

    /// Gives up on a client whose message does not become complete, if its buffer is needed. A
    /// client that was stopped in the middle of a message may go on some day, so there is no hurry
    /// otherwise.
    fn check_message(&self, need: usize) -> Result<(), CloseReason> {
        let Some(since) = self.message_since else { return Ok(()) };
        let most = self.shared.config.stall_max + time_for(need);
        if since.elapsed() > most && self.is_short() { Err(CloseReason::Slow) } else { Ok(()) }
    }

    /// Sends all of the outbox. Waits for the client, but at most `stall_max` without progress.
    /// While buffers are short, the client must also read with a minimum speed.
    pub(super) fn flush(&mut self) -> Result<(), CloseReason> {
        let mut until = None;
        let whole_until = Instant::now() + self.shared.config.stall_max + time_for(self.outbox.len());
        while self.sent < self.outbox.len() {
            let rest = self.outbox.get(self.sent..).unwrap_or_default();
            let part = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the rest of the outbox is readable and ours.
            match unsafe { self.send(&[part]) } {
                Ok(count) => {
                    self.sent += count;
                    self.tally.sent_bytes += count as u64;
                    until = None;
                }
                Err(errno) if errno.is_transient() => {
                    let until = *until.get_or_insert_with(|| Instant::now() + self.shared.config.stall_max);
                    self.turn.end();
                    let is_ready = self.wait(libc::POLLOUT, until)?;
                    if !is_ready || (self.is_short() && Instant::now() > whole_until) {
                        return Err(CloseReason::Stalled);
                    }
                }
                Err(errno) => return Err(lost(errno)),
            }
        }
        self.outbox.clear();
        if self.outbox.capacity() > OUTBOX_BYTES {
            self.outbox.shrink_to(OUTBOX_BYTES);
        }
        self.outbox_held = None;
        self.sent = 0;
        Ok(())
    }

    /// Sends bytes at `parts` as far as the kernel takes them; returns how many. If it takes none, the
    /// next call must begin with the same bytes.
    ///
    /// # Safety
    /// As for [`net::send`].
    pub(super) unsafe fn send(&mut self, parts: &[libc::iovec]) -> farfield_os::Result<usize> {
        match &mut self.records {
            // SAFETY: passed on to the caller.
            Some(records) => unsafe { records.send(self.fd.as_raw_fd(), parts) },
            // SAFETY: passed on to the caller.
            None => unsafe { net::send(self.fd.as_raw_fd(), parts) },
        }
    }

    /// Gives back the charge for sent descriptors once the client has received them. Returns false
    /// while it has not.
    fn settle_under_way(&mut self) -> bool {
        let is_taken =
            self.under_way.is_none() || serving::unacknowledged_bytes(self.fd.as_fd()).is_ok_and(|bytes| bytes == 0);
        if is_taken {
            self.under_way = None;
        }
        is_taken
    }

    /// Waits until the client has received the descriptors that were sent to it, at most
    /// `stall_max`.
    pub(super) fn wait_until_taken(&mut self) -> Result<(), CloseReason> {
        let until = Instant::now() + self.shared.config.stall_max;
        while !self.settle_under_way() {
            self.turn.end();
            if self.shared.stopping() || Instant::now() >= until {
                return Err(CloseReason::Stalled);
            }
            std::thread::sleep(ASK_AGAIN);
        }
        Ok(())
    }

    /// Waits for one of `events`. Returns false when `until` has passed.
    pub(super) fn wait(&self, events: i16, until: Instant) -> Result<bool, CloseReason> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            match net::poll(self.fd.as_raw_fd(), events, left) {
                Ok(0) => {}
                Ok(_) => return Ok(true),
                Err(errno) => return Err(CloseReason::Os(errno)),
            }
        }
    }

    /// Sends the last answers and waits until the client has read them, at most half a second.
    /// Closing while bytes of the client are unread would make the kernel discard ours.
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

/// Returns the time that so many bytes may take at the slowest tolerated speed.
fn time_for(bytes: usize) -> Duration {
    Duration::from_secs((bytes / BYTES_PER_SECOND_MIN) as u64)
}

pub(super) fn lost(errno: Errno) -> CloseReason {
    match errno.0 {
        libc::ECONNRESET | libc::EPIPE | libc::ETIMEDOUT => CloseReason::Closed,
        _ => CloseReason::Os(errno),
    }
}
