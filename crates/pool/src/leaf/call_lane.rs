//! Calls of functions at one memory server.
//!
//! A channel is a connection of its own that joins the session, so a long function keeps no page
//! operation waiting. Many calls may be in flight; all calls submitted since the last poll go to
//! the kernel at once. A call is sent once. When the connection is lost, it is unknown whether the
//! function ran, and every call in flight ends with an error that says so. Unlike a lane, a channel
//! may allocate.
//!
//! Dangers that the tests guard against (`server/tests/server/calls.rs`): a call that never ends, an
//! answer that reaches the wrong caller.

use crate::contract::calls;
use crate::leaf::connection::{ServerSession, SessionConnection};
use crate::leaf::request_slab::{RequestSlab, UnissuedNumber};
use crate::polling::Polling;
use crate::{CallChannel, CallEnd, CallFailure, FarCall, PoolError};
use core::ops::Range;
use core::time::Duration;
use farfield_core::RegionId;
use farfield_core::wire::{
    CallBody, HEADER_BYTES, MessageHeader, Reply, Request, WireError, WireReply, WireRequest, encode_request, features,
};
use farfield_os::process::now_ns;
use farfield_os::{Errno, net};
use std::collections::VecDeque;
use std::sync::Arc;

/// Size of the receive buffer: one of the longest answers and the beginning of the next.
const INBOX_BYTES: usize = HEADER_BYTES + CallBody::ANSWER_BYTES_MAX + 8 * 1024;

const _: () = assert!(calls::CALLS_MAX == RequestSlab::<PendingCall>::MAX);

struct PendingCall {
    tag: u64,
    until: u64,
    wait: Duration,
}

/// A thread's private channel to the functions of a server.
pub struct CallLane {
    session: Arc<ServerSession>,
    connection: SessionConnection,
    region: RegionId,
    calls_max: usize,
    /// Calls in flight, by their tag on the wire.
    pending: RequestSlab<PendingCall>,
    /// Earliest time (in ns) at which the deadline of a pending call passes.
    soonest: u64,
    /// Time at which the first call was submitted since the last poll.
    now: Option<u64>,
    outbox: Vec<u8>,
    sent: usize,
    inbox: Box<[u8]>,
    /// Range of the inbox that was received and not yet used.
    unread: Range<usize>,
    ended: VecDeque<CallEnd>,
    polling: Polling,
    dead: Option<PoolError>,
}

impl core::fmt::Debug for CallLane {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "CallLane({} in flight)", self.in_flight())
    }
}

impl CallLane {
    /// Greatest number of calls in flight on one channel.
    pub const CALLS_MAX: usize = calls::CALLS_MAX;
    /// Reason for a refusal: the backend runs no functions.
    pub const NOWHERE: &'static str = calls::NOWHERE;
    /// Reason for a refusal: the backend runs no functions now, but perhaps will later.
    pub const NOT_NOW: &'static str = calls::NOT_NOW;

    pub(crate) fn open(session: &Arc<ServerSession>, region: RegionId) -> Result<CallLane, PoolError> {
        if session.is_gone() {
            return Err(session.gone_error());
        }
        if session.welcome.features & features::CALL == 0 {
            return Err(PoolError::Refused { server: session.server, reason: Self::NOWHERE });
        }
        Ok(CallLane {
            connection: session.join()?,
            session: session.clone(),
            region,
            calls_max: Self::CALLS_MAX.min(session.welcome.in_flight_max as usize),
            pending: RequestSlab::new(),
            soonest: u64::MAX,
            now: None,
            outbox: Vec::new(),
            sent: 0,
            inbox: vec![0; INBOX_BYTES].into_boxed_slice(),
            unread: 0..0,
            ended: VecDeque::new(),
            polling: Polling::default(),
            dead: None,
        })
    }
}

impl CallChannel for CallLane {
    fn submit(&mut self, call: FarCall) -> Result<(), FarCall> {
        if self.in_flight() >= self.calls_max {
            return Err(call);
        }
        let FarCall { tag, deadline, steps_max, name, version, argument } = call;
        let body = CallBody { name, version, argument: &argument };
        let failure = match self.dead {
            Some(error) => Some(error),
            None if !body.is_sendable() => {
                let reason = "name or argument of a call is too long";
                Some(PoolError::Refused { server: self.session.server, reason })
            }
            None => None,
        };
        if let Some(error) = failure {
            self.ended.push_back(CallEnd { tag, result: Err(CallFailure::Pool(error)), steps: 0 });
            return Ok(());
        }
        self.polling.renew();
        let request = Request::Call { region: self.region, steps_max, call: body };
        let now = *self.now.get_or_insert_with(now_ns);
        let until = now.saturating_add(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        let tag = self.pending.add(PendingCall { tag, until, wait: deadline });
        encode_request(&WireRequest { tag, background: false, deadline: Some(deadline), request }, &mut self.outbox);
        self.soonest = self.soonest.min(until);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<CallEnd>) -> usize {
        // After a wait, the ended calls are known already; there is no need to poll again.
        if self.ended.is_empty() || self.sent < self.outbox.len() {
            self.work();
        }
        let count = self.ended.len();
        done.extend(self.ended.drain(..));
        count
    }

    fn in_flight(&self) -> usize {
        self.pending.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        let start = now_ns();
        let limit = start.saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        loop {
            let now = self.work();
            if !self.ended.is_empty() || self.pending.is_empty() {
                self.polling.renew();
                return;
            }
            if now >= limit {
                return;
            }
            if self.polling.goes_on(start, now) {
                continue;
            }
            let sleep = Duration::from_nanos(limit.min(self.soonest).saturating_sub(now));
            if !self.connection.is_joined() {
                self.connection.wait_to_join(sleep);
                continue;
            }
            let out = if self.sent < self.outbox.len() { libc::POLLOUT } else { 0 };
            if let Err(errno) = net::poll(self.connection.fd, libc::POLLIN | out, sleep) {
                self.die_of(errno);
            }
        }
    }
}

impl CallLane {
    /// Sends, receives and expires calls; returns the time in ns.
    fn work(&mut self) -> u64 {
        if self.dead.is_none() {
            match self.connection.try_join() {
                Ok(true) => {
                    self.send();
                    self.receive();
                }
                Ok(false) => {}
                Err(error) => self.die(error),
            }
        }
        self.now = None;
        let now = now_ns();
        self.expire(now);
        now
    }

    fn send(&mut self) {
        while self.sent < self.outbox.len() {
            let rest = &self.outbox[self.sent..];
            let part = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the rest of the outbox is readable and ours.
            match unsafe { self.connection.stream.send(&[part]) } {
                Ok(count) => self.sent += count,
                Err(errno) if errno.is_transient() => return,
                Err(errno) => return self.die_of(errno),
            }
        }
        self.outbox.clear();
        self.sent = 0;
    }

    fn receive(&mut self) {
        while self.dead.is_none() {
            if self.unread.end == self.inbox.len() {
                self.inbox.copy_within(self.unread.clone(), 0);
                self.unread = 0..self.unread.len();
            }
            let free = &mut self.inbox[self.unread.end..];
            let part = libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() };
            // SAFETY: the free end of the inbox, borrowed exclusively.
            match unsafe { self.connection.stream.receive(&[part]) } {
                Ok(0) => return self.die(self.session.gone_error()),
                Ok(count) => {
                    let is_all = count < part.iov_len;
                    self.unread.end += count;
                    if self.digest().is_err() {
                        return self.die(self.session.gone_error());
                    }
                    if is_all {
                        return;
                    }
                }
                Err(errno) if errno.is_transient() => return,
                Err(errno) => return self.die_of(errno),
            }
        }
    }

    /// Acts on the complete answers in the inbox.
    fn digest(&mut self) -> Result<(), WireError> {
        while let Some(header) = MessageHeader::decode(&self.inbox[self.unread.clone()])? {
            if header.body as usize > CallBody::ANSWER_BYTES_MAX {
                return Err(WireError::Length { kind: header.kind, body: header.body });
            }
            let frame = &self.inbox[self.unread.clone()];
            let Some(body) = frame.get(HEADER_BYTES..header.frame_bytes()) else { return Ok(()) };
            let (result, steps) = match WireReply::decode(&header, body)?.reply {
                Reply::Answer { steps } => (Ok(body.to_vec()), steps),
                Reply::Failed { code, page } => (Err(CallFailure::Server { code, detail: page }), 0),
                _ => return Err(WireError::Kind(header.kind)),
            };
            // If the tag is not pending, the deadline of its call passed before.
            if let Some(pending) = self.pending.remove(header.tag).map_err(|UnissuedNumber| WireError::Unasked)? {
                self.ended.push_back(CallEnd { tag: pending.tag, result, steps });
            }
            self.unread.start += header.frame_bytes();
        }
        if self.unread.is_empty() {
            self.unread = 0..0;
        }
        Ok(())
    }

    /// Ends calls whose deadline has passed. The server ends them by itself.
    fn expire(&mut self, now: u64) {
        if now < self.soonest {
            return;
        }
        let server = self.session.server;
        self.ended.extend(self.pending.extract_if(|pending| pending.until <= now).map(|pending| {
            let error = PoolError::TimedOut { server, after: pending.wait };
            CallEnd { tag: pending.tag, result: Err(CallFailure::Pool(error)), steps: 0 }
        }));
        self.soonest = self.pending.values().map(|pending| pending.until).min().unwrap_or(u64::MAX);
    }

    fn die(&mut self, error: PoolError) {
        if self.dead.is_some() {
            return;
        }
        self.dead = Some(error);
        if self.connection.is_joined() {
            self.session.set_gone();
        }
        let failed = |PendingCall { tag, .. }| CallEnd { tag, result: Err(CallFailure::Pool(error)), steps: 0 };
        self.ended.extend(self.pending.extract_if(|_| true).map(failed));
    }

    fn die_of(&mut self, errno: Errno) {
        self.die(self.session.broken_error(errno));
    }
}
