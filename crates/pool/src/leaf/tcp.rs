//! Member `tcp`: pages kept by a memory server across the network (or behind a Unix socket).
//!
//! A lane is one connection. It keeps many operations in flight and sends demand before background.
//! Where the batch is large it receives page bytes straight into the caller's buffer. It checks
//! every page against its checksum while the page is still in the cache. It polls before it sleeps,
//! because a wake-up costs five times a polled round trip.

use crate::contract::backend::{check_range, hand_over};
use crate::leaf::connection::{ServerSession, SessionConnection};
use crate::polling::Polling;
use crate::{
    Backend, Buffer, CallChannel, CallLane, CloneTicket, Completion, Health, Lane, LaneRequest, Op, PoolError,
    Priority, Share,
};
use core::time::Duration;
use farfield_core::Incarnation;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::session::{ClientConversation, ExpiredOperation, PageOperation, ReplyEvent};
use farfield_core::time::Moment;
use farfield_core::wire::{self, HEADER_BYTES, MessageHeader, PagePart, ReadReply, Reply, read_prefix_bytes};
use farfield_core::{PageId, RegionId, checksum, part_checksum};
use farfield_os::process::now_ns;
use farfield_os::{Errno, net};
use std::collections::VecDeque;
use std::sync::Arc;

/// Greatest number of operations of one lane that are in flight or waiting in it.
const SLOTS: u32 = 256;
/// Greatest number of background pages in flight: half a megabyte delays a demand answer by some 60
/// µs at 9 GB/s.
const BACKGROUND_PAGES_MAX: u32 = 128;
/// Number of page bytes after which a message to the kernel takes no further frame, so that a
/// demand read does not queue behind more.
const TRAIN_BYTES_MAX: usize = 512 * 1024;
/// Greatest number of frames handed to the kernel as one message.
const TRAIN_FRAMES_MAX: usize = 64;
/// Size of the buffer for received bytes that have no place of their own yet: the longest prefix of
/// a read, and small answers.
const INBOX_BYTES: usize = 64 * 1024;
/// Bytes received at once while the next frame is unknown, when large answers are to come. So their
/// pages go straight into their buffers and not through the inbox.
const PEEK_BYTES: usize = 1024;
/// Reads of at least this many pages count as large.
const LARGE_PAGES: u32 = 4;

const _: () = assert!(INBOX_BYTES > HEADER_BYTES + read_prefix_bytes(wire::BATCH_PAGES_LIMIT, wire::BATCH_PAGES_LIMIT));

/// Region at a memory server, reached by a stream of bytes.
pub(crate) struct TcpBackend {
    session: Arc<ServerSession>,
    region: RegionId,
    pages: u64,
}

impl TcpBackend {
    pub(crate) fn new(session: Arc<ServerSession>, region: RegionId, pages: u64) -> TcpBackend {
        TcpBackend { session, region, pages }
    }
}

impl Backend for TcpBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        if self.session.is_gone() {
            return Err(self.session.gone_error());
        }
        let connection = self.session.join()?;
        Ok(Box::new(TcpLane::new(self.session.clone(), connection, self.region, self.pages)))
    }

    fn open_calls(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        Ok(Box::new(CallLane::open(&self.session, self.region)?))
    }

    fn share(&self) -> Result<Share, PoolError> {
        Ok(self.session.share(self.region, self.pages))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        clone_region(&self.session, self.region, CLONE_TIMEOUT)
    }

    fn pages(&self) -> u64 {
        self.pages
    }

    fn incarnation(&self) -> Option<Incarnation> {
        Some(self.session.incarnation())
    }

    fn health(&self) -> Health {
        self.session.health()
    }

    fn answers(&self, within: Duration) -> bool {
        self.session.answers(within)
    }

    fn release(&self) {
        self.session.farewell();
    }

    fn abandon(&self) {
        self.session.abandon();
    }
}

/// Asks the server for a snapshot; the ticket has its one secret in the first place. After a
/// time-out the server may still make one, which is never claimed then.
pub(crate) fn clone_region(
    session: &ServerSession,
    region: RegionId,
    within: Duration,
) -> Result<CloneTicket, PoolError> {
    match session.ask(wire::Request::CloneRegion { region }, within.min(session.deadline()))? {
        Reply::Ticket { secret } => Ok(CloneTicket::of_leaf(secret)),
        _ => Err(PoolError::Refused { server: session.server, reason: "its answer is not valid" }),
    }
}

/// Time that a snapshot waits for a server. Backends with other members may do without this one,
/// and other callers can ask again.
const CLONE_TIMEOUT: Duration = Duration::from_millis(700);

/// Data of the caller that travels with an operation.
struct Carried {
    tag: u64,
    buffer: Option<Buffer>,
}

/// Frames on their way to the kernel.
///
/// The parts point into `headers` and into the buffers of the operations being sent. All of these
/// stay where they are until the parts are sent: a write whose parts are not all sent is never
/// finished before the lane is dead and the train is cleared.
struct Train {
    heads: Box<[u8]>,
    heads_used: usize,
    parts: Vec<libc::iovec>,
    /// Index of the first part that is not wholly sent.
    next: usize,
    /// Writes, each with the number of parts after which it is sent.
    writes: VecDeque<(u32, usize)>,
}

impl Train {
    fn new() -> Train {
        Train {
            heads: vec![0; TRAIN_FRAMES_MAX * HEADER_BYTES].into_boxed_slice(),
            heads_used: 0,
            parts: Vec::with_capacity(TRAIN_FRAMES_MAX * 3),
            next: 0,
            writes: VecDeque::with_capacity(TRAIN_FRAMES_MAX),
        }
    }

    fn is_sent(&self) -> bool {
        self.next == self.parts.len()
    }

    fn clear(&mut self) {
        self.heads_used = 0;
        self.parts.clear();
        self.next = 0;
        self.writes.clear();
    }

    fn has_room(&self) -> bool {
        self.heads_used < self.heads.len()
    }

    fn add_header(&mut self, header: &MessageHeader) {
        let place = &mut self.heads[self.heads_used..][..HEADER_BYTES];
        place.copy_from_slice(&header.encode());
        let start: *mut u8 = place.as_mut_ptr();
        self.heads_used += HEADER_BYTES;
        // Adjacent headers travel as one part.
        match self.parts.last_mut() {
            Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == start.cast() => last.iov_len += HEADER_BYTES,
            _ => self.parts.push(libc::iovec { iov_base: start.cast(), iov_len: HEADER_BYTES }),
        }
    }

    fn add_bytes(&mut self, start: *const u8, len: usize) {
        self.parts.push(libc::iovec { iov_base: start.cast_mut().cast(), iov_len: len });
    }

    /// Notes that the kernel took `sent` bytes.
    fn advance(&mut self, mut sent: usize) {
        while sent > 0 {
            let part = &mut self.parts[self.next];
            let taken = sent.min(part.iov_len);
            part.iov_base = part.iov_base.wrapping_byte_add(taken);
            part.iov_len -= taken;
            sent -= taken;
            if part.iov_len == 0 {
                self.next += 1;
            }
        }
    }
}

/// Meaning of the next received bytes.
#[derive(Clone, Copy, Debug)]
enum Expect {
    Head,
    /// Prefix of the answer to a read, in front of the pages.
    Prefix {
        slot: u32,
        header: MessageHeader,
        asked: u32,
        bytes: usize,
    },
    /// Page bytes of the read in `slot`.
    Pages {
        slot: u32,
        asked: u32,
        index: u32,
        offset: usize,
        corrupt: Option<PageId>,
    },
    /// Checksum and bytes of the part of a page that `slot` reads.
    Part {
        slot: u32,
        part: PagePart,
        page_sum: u64,
    },
    /// Bytes of an answer that no operation waits for any more.
    Skip {
        bytes: usize,
    },
}

pub(crate) struct TcpLane {
    session: Arc<ServerSession>,
    connection: SessionConnection,
    pages: u64,
    conversation: ClientConversation<Carried>,
    train: Train,
    inbox: Box<[u8]>,
    inbox_start: usize,
    inbox_end: usize,
    expect: Expect,
    /// Presence map of the read whose pages are being received.
    present: Box<[u64]>,
    /// Checksum of a page of zeros.
    zero_sum: u64,
    large_reads: u32,
    ended: VecDeque<Completion>,
    /// Time at which the first operation was submitted since the lane was polled; those after it
    /// get the same time.
    submitted: Option<Moment>,
    polling: Polling,
    dead: Option<PoolError>,
}

// SAFETY: what keeps it from being `Send` by itself are the pointers in the train. They point into
// memory that the lane owns (its headers, the buffers inside its conversation), which moves to the
// other thread with it.
unsafe impl Send for TcpLane {}

impl TcpLane {
    pub(crate) fn new(
        session: Arc<ServerSession>,
        connection: SessionConnection,
        region: RegionId,
        pages: u64,
    ) -> TcpLane {
        TcpLane {
            conversation: ClientConversation::new(region, SLOTS, session.welcome.in_flight_max, BACKGROUND_PAGES_MAX),
            connection,
            session,
            pages,
            train: Train::new(),
            inbox: vec![0; INBOX_BYTES].into_boxed_slice(),
            inbox_start: 0,
            inbox_end: 0,
            expect: Expect::Head,
            present: vec![0; wire::present_words(wire::BATCH_PAGES_LIMIT)].into_boxed_slice(),
            zero_sum: checksum(&[0; PAGE_BYTES]),
            large_reads: 0,
            ended: VecDeque::with_capacity(SLOTS as usize),
            submitted: None,
            polling: Polling::default(),
            dead: None,
        }
    }

    /// Translates the operation for the conversation, or returns why it cannot be one.
    fn call(&self, op: &Op) -> Result<PageOperation, PoolError> {
        let refuse = |reason| PoolError::Refused { server: self.session.server, reason };
        let (page, count) = op.range();
        check_range((page, count), self.pages, self.session.server)?;
        if count > u64::from(u32::MAX) {
            return Err(refuse("an operation has more pages than the protocol can express"));
        }
        let count = count as u32;
        if !matches!(op, Op::Discard { .. }) && count > self.session.welcome.batch_pages_max {
            return Err(refuse("more pages in one operation than the server takes"));
        }
        Ok(match op {
            Op::Read { .. } => PageOperation::Read { page, count },
            Op::ReadPart { part, .. } if self.session.welcome.features & wire::features::PART != 0 => {
                PageOperation::ReadPart { page, part: *part }
            }
            // An older server sends the whole page, into the same place.
            Op::ReadPart { .. } => PageOperation::Read { page, count },
            Op::Write { .. } => PageOperation::Write { page, count },
            Op::Discard { .. } => PageOperation::Discard { page, count },
        })
    }

    fn end(&mut self, slot: u32, result: Result<(), PoolError>) {
        let Some(finished) = self.conversation.finish(slot) else { return };
        if matches!(finished.call, PageOperation::Read { count, .. } if count >= LARGE_PAGES) {
            self.large_reads -= 1;
        }
        let Carried { tag, buffer } = finished.carried;
        self.ended.push_back(Completion { tag, result, buffer });
    }

    /// Marks the connection as dead: everything in flight ends with `error`, as does everything
    /// that is submitted later.
    fn die(&mut self, error: PoolError) {
        if self.dead.is_some() {
            return;
        }
        self.dead = Some(error);
        self.train.clear();
        if self.connection.is_joined() {
            self.session.set_gone();
        }
        while let Some(slot) = self.conversation.any() {
            self.end(slot, Err(error));
        }
    }

    fn die_of(&mut self, errno: Errno) {
        self.die(self.session.broken_error(errno));
    }

    /// Loads the next train of frames: demand first, up to a limit of bytes.
    fn load(&mut self, now: Moment) {
        self.train.clear();
        let mut bytes = 0;
        while self.train.has_room() && bytes < TRAIN_BYTES_MAX {
            let Some(outgoing) = self.conversation.poll_send(now) else { break };
            self.train.add_header(&outgoing.header);
            if let PageOperation::Write { .. } = outgoing.call {
                let carried = self.conversation.carried(outgoing.slot);
                let Some(buffer) = carried.and_then(|carried| carried.buffer.as_ref()) else { continue };
                let sums = buffer.sums();
                // The wire is little-endian, and so is every machine that this is compiled for.
                const { assert!(cfg!(target_endian = "little")) };
                self.train.add_bytes(sums.as_ptr().cast(), size_of_val(sums));
                self.train.add_bytes(buffer.bytes().as_ptr(), buffer.bytes().len());
                self.train.writes.push_back((outgoing.slot, self.train.parts.len()));
                bytes += buffer.bytes().len();
            } else {
                // Nothing of the operation is needed any more: its frame is in the train's own
                // memory.
                self.conversation.on_sent(outgoing.slot);
            }
        }
    }

    /// Sends what the kernel takes now.
    fn send(&mut self, now: Moment) {
        while self.dead.is_none() && self.connection.is_joined() {
            if self.train.is_sent() {
                if !self.conversation.wants_to_send() {
                    return;
                }
                self.load(now);
            }
            // SAFETY: see `Train`: everything that its parts point to is alive and unchanged until
            // sent.
            match unsafe { self.connection.stream.send(&self.train.parts[self.train.next..]) } {
                Ok(sent) => {
                    self.train.advance(sent);
                    while let Some(&(slot, parts)) = self.train.writes.front()
                        && parts <= self.train.next
                    {
                        self.conversation.on_sent(slot);
                        self.train.writes.pop_front();
                    }
                }
                Err(Errno(libc::EAGAIN)) => return,
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return self.die_of(errno),
            }
        }
    }

    /// Receives what has arrived and acts on it.
    fn receive(&mut self) {
        while self.dead.is_none() {
            let asked = match self.receive_once() {
                Ok((got, asked)) => {
                    if got == 0 {
                        return self.die(self.session.gone_error());
                    }
                    if self.digest().is_err() {
                        // The peer does not speak the protocol (any more); nothing it says can be
                        // trusted.
                        return self.die(self.session.gone_error());
                    }
                    if got == asked { continue } else { asked }
                }
                Err(Errno(libc::EAGAIN)) => return,
                Err(Errno(libc::EINTR)) => continue,
                Err(errno) => return self.die_of(errno),
            };
            // Less came than there was room for: nothing is left, and another attempt would cost a
            // system call.
            let _ = asked;
            return;
        }
    }

    /// Makes one receive call: page bytes go straight into their buffer, everything else into the
    /// inbox. Returns the number of bytes received, and of bytes there was room for.
    fn receive_once(&mut self) -> Result<(usize, usize), Errno> {
        if self.inbox_start == self.inbox_end {
            (self.inbox_start, self.inbox_end) = (0, 0);
        } else if self.inbox_start > 0 && self.inbox.len() - self.inbox_end < INBOX_BYTES / 2 {
            self.inbox.copy_within(self.inbox_start..self.inbox_end, 0);
            (self.inbox_start, self.inbox_end) = (0, self.inbox_end - self.inbox_start);
        }
        let free = &mut self.inbox[self.inbox_end..];
        let mut inbox_part = libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() };
        if self.large_reads > 0 {
            inbox_part.iov_len = inbox_part.iov_len.min(match self.expect {
                Expect::Prefix { bytes, .. } => bytes.saturating_sub(self.inbox_end - self.inbox_start).max(PEEK_BYTES),
                _ => PEEK_BYTES,
            });
        }
        if let Expect::Pages { slot, asked, index, offset, .. } = self.expect {
            debug_assert!(self.inbox_start == self.inbox_end);
            let mut run = 0;
            while index + run < asked && self.is_present(index + run) {
                run += 1;
            }
            let buffer = self.conversation.carried_mut(slot).and_then(|carried| carried.buffer.as_mut());
            if let Some(buffer) = buffer {
                let place = &mut buffer.bytes_mut()[index as usize * PAGE_BYTES + offset..];
                let room = run as usize * PAGE_BYTES - offset;
                let page_part = libc::iovec { iov_base: place.as_mut_ptr().cast(), iov_len: room.min(place.len()) };
                let asked = page_part.iov_len + inbox_part.iov_len;
                // SAFETY: both parts are borrowed exclusively from `self`: a place in the buffer
                // that the lane owns while the read is in flight, and the free end of the inbox.
                let got = unsafe { self.connection.stream.receive(&[page_part, inbox_part]) }?;
                let into_inbox = got.saturating_sub(page_part.iov_len);
                self.inbox_end += into_inbox;
                self.pages_arrived(got - into_inbox);
                return Ok((got, asked));
            }
        }
        // SAFETY: the free end of the inbox, borrowed exclusively.
        let got = unsafe { self.connection.stream.receive(&[inbox_part]) }?;
        self.inbox_end += got;
        Ok((got, inbox_part.iov_len))
    }

    fn is_present(&self, index: u32) -> bool {
        self.present[index as usize / 64] >> (index % 64) & 1 != 0
    }

    /// Acts on the bytes in the inbox, as far as they are complete.
    fn digest(&mut self) -> Result<(), wire::WireError> {
        loop {
            let received = &self.inbox[self.inbox_start..self.inbox_end];
            match self.expect {
                Expect::Head => {
                    let Some(header) = MessageHeader::decode(received)? else { return Ok(()) };
                    let answer = self.conversation.on_header(&header)?;
                    self.inbox_start += HEADER_BYTES;
                    match answer {
                        ReplyEvent::Pages { slot, asked, prefix } => {
                            self.expect = Expect::Prefix { slot, header, asked, bytes: prefix };
                        }
                        ReplyEvent::Part { slot, part, page_sum } => {
                            self.expect = Expect::Part { slot, part, page_sum }
                        }
                        ReplyEvent::Done { slot } => self.end(slot, Ok(())),
                        ReplyEvent::Failed { slot, code, page } => {
                            let error = self.session.failure(code, page, Duration::ZERO);
                            let error = match error {
                                PoolError::TimedOut { server, .. } => {
                                    let after = self.conversation.wait_of(slot);
                                    PoolError::TimedOut { server, after }
                                }
                                other => other,
                            };
                            self.end(slot, Err(error));
                        }
                        ReplyEvent::Stale => self.expect = Expect::Skip { bytes: header.body as usize },
                    }
                }
                Expect::Prefix { slot, header, asked, bytes } => {
                    let Some(prefix) = received.get(..bytes) else { return Ok(()) };
                    let reply = ReadReply::decode(&header, asked, prefix)?;
                    let mut nth = 0;
                    let carried = self.conversation.carried_mut(slot);
                    let buffer = carried.and_then(|carried| carried.buffer.as_mut());
                    let Some(buffer) = buffer else { return Err(wire::WireError::Unasked) };
                    self.present[..wire::present_words(asked)].fill(0);
                    for index in 0..asked {
                        if reply.is_present(index) {
                            self.present[index as usize / 64] |= 1 << (index % 64);
                            buffer.sums_mut()[index as usize] = reply.sum_of_present(nth);
                            nth += 1;
                        } else {
                            buffer.page_mut(index as usize).fill(0);
                            buffer.sums_mut()[index as usize] = self.zero_sum;
                        }
                    }
                    self.inbox_start += bytes;
                    self.expect = Expect::Pages { slot, asked, index: 0, offset: 0, corrupt: None };
                    self.skip_absent();
                }
                Expect::Part { slot, part, page_sum } => {
                    let Some(body) = received.get(..wire::part_body_bytes(part)) else { return Ok(()) };
                    let Some((sum, bytes)) = wire::part_reply(body) else { return Ok(()) };
                    let carried = self.conversation.carried_mut(slot);
                    let buffer = carried.and_then(|carried| carried.buffer.as_mut());
                    let Some(buffer) = buffer else { return Err(wire::WireError::Unasked) };
                    let place = &mut buffer.page_mut(0)[part.range()];
                    place.copy_from_slice(bytes);
                    let is_right = part_checksum(part, place, page_sum) == sum;
                    buffer.sums_mut()[0] = page_sum;
                    let result = match is_right {
                        true => Ok(()),
                        false => {
                            let page = self.conversation.call_of(slot).map_or(PageId(0), |call| call.run().0);
                            Err(PoolError::Corrupt { page, server: self.session.server })
                        }
                    };
                    self.inbox_start += wire::part_body_bytes(part);
                    self.expect = Expect::Head;
                    self.end(slot, result);
                }
                Expect::Pages { slot, index, offset, .. } => {
                    if received.is_empty() {
                        return Ok(());
                    }
                    let len = received.len().min(PAGE_BYTES - offset);
                    let carried = self.conversation.carried_mut(slot);
                    let buffer = carried.and_then(|carried| carried.buffer.as_mut());
                    let Some(buffer) = buffer else { return Err(wire::WireError::Unasked) };
                    buffer.page_mut(index as usize)[offset..offset + len].copy_from_slice(&received[..len]);
                    self.inbox_start += len;
                    self.pages_arrived(len);
                }
                Expect::Skip { bytes } => {
                    let skipped = bytes.min(received.len());
                    self.inbox_start += skipped;
                    if skipped < bytes {
                        self.expect = Expect::Skip { bytes: bytes - skipped };
                        return Ok(());
                    }
                    self.expect = Expect::Head;
                }
            }
        }
    }

    /// Takes note of `bytes` more bytes of the expected pages in their buffer: checks the pages
    /// that are complete, and moves on.
    fn pages_arrived(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let Expect::Pages { slot, asked, index, offset, mut corrupt } = self.expect else { return };
            let taken = bytes.min(PAGE_BYTES - offset);
            bytes -= taken;
            if offset + taken < PAGE_BYTES {
                self.expect = Expect::Pages { slot, asked, index, offset: offset + taken, corrupt };
                return;
            }
            if let Some(Carried { buffer: Some(buffer), .. }) = self.conversation.carried(slot)
                && checksum(buffer.page(index as usize)) != buffer.sums()[index as usize]
                && corrupt.is_none()
            {
                let first = self.conversation.call_of(slot).map_or(0, |call| call.run().0.0);
                corrupt = Some(PageId(first + u64::from(index)));
            }
            self.expect = Expect::Pages { slot, asked, index: index + 1, offset: 0, corrupt };
            self.skip_absent();
        }
    }

    /// Moves on to the next page that is present, or ends the read.
    fn skip_absent(&mut self) {
        let Expect::Pages { slot, asked, mut index, offset, corrupt } = self.expect else { return };
        while index < asked && !self.is_present(index) {
            index += 1;
        }
        if index < asked {
            self.expect = Expect::Pages { slot, asked, index, offset, corrupt };
            return;
        }
        self.expect = Expect::Head;
        let result = match corrupt {
            Some(page) => Err(PoolError::Corrupt { page, server: self.session.server }),
            None => Ok(()),
        };
        self.end(slot, result);
    }

    /// Ends operations whose deadline has passed.
    fn expire(&mut self, now: Moment) {
        while let Some(expired) = self.conversation.poll_expired(now) {
            let (ExpiredOperation::Quiet { slot }
            | ExpiredOperation::Sending { slot }
            | ExpiredOperation::Receiving { slot }) = expired;
            let after = self.conversation.wait_of(slot);
            let error = PoolError::TimedOut { server: self.session.server, after };
            match expired {
                ExpiredOperation::Quiet { .. } => {}
                // The rest of the frame would have to be sent from a buffer that its owner gets
                // back now.
                ExpiredOperation::Sending { .. } => {
                    self.train.clear();
                    self.end(slot, Err(error));
                    return self.die(self.session.gone_error());
                }
                ExpiredOperation::Receiving { .. } => self.expect = Expect::Skip { bytes: self.unreceived() },
            }
            self.end(slot, Err(error));
        }
    }

    /// Returns the number of bytes of the present frame's body that have not been used yet.
    fn unreceived(&self) -> usize {
        match self.expect {
            Expect::Head => 0,
            Expect::Prefix { header, .. } => header.body as usize,
            Expect::Part { part, .. } => wire::part_body_bytes(part),
            Expect::Pages { asked, index, offset, .. } => {
                let pages = (index..asked).filter(|index| self.is_present(*index)).count();
                pages * PAGE_BYTES - offset
            }
            Expect::Skip { bytes } => bytes,
        }
    }

    /// Returns what a sleeping lane waits for: its descriptor, poll events, and a deadline in ns.
    pub(crate) fn sleeps_on(&self) -> (i32, i16, u64) {
        let out = if self.train.is_sent() { 0 } else { libc::POLLOUT };
        let events = if self.connection.is_joined() { libc::POLLIN | out } else { self.connection.join_events() };
        (self.connection.fd, events, self.conversation.next_deadline().0)
    }

    /// Checks whether there is a completion to collect.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Sends, receives and expires operations; returns the time in ns.
    pub(crate) fn work(&mut self) -> u64 {
        let now = Moment(now_ns());
        if self.dead.is_some() {
            return now.0;
        }
        match self.connection.try_join() {
            Ok(true) => {
                self.send(now);
                self.receive();
            }
            Ok(false) => {}
            Err(error) => self.die(error),
        }
        if now >= self.conversation.next_deadline() {
            self.expire(now);
        }
        if self.conversation.wants_to_send() {
            self.send(now); // Answers made room.
        }
        now.0
    }
}

impl Lane for TcpLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS as usize {
            return Err(request);
        }
        let LaneRequest { tag, priority, deadline, op } = request;
        let call = match self.dead {
            Some(error) => Err(error),
            None => self.call(&op),
        };
        let buffer = match op {
            Op::Read { buffer, .. } | Op::ReadPart { buffer, .. } | Op::Write { buffer, .. } => Some(buffer),
            Op::Discard { .. } => None,
        };
        let call = match call {
            Ok(call) => call,
            Err(error) => {
                self.ended.push_back(Completion { tag, result: Err(error), buffer });
                return Ok(());
            }
        };
        let background = priority == Priority::Background;
        self.polling.renew();
        let now = *self.submitted.get_or_insert_with(|| Moment(now_ns()));
        // There is a free slot: fewer than all are in flight.
        let taken = self.conversation.submit(now, call, background, deadline, Carried { tag, buffer });
        if let Err(carried) = taken {
            let result = Err(PoolError::Refused { server: self.session.server, reason: "the lane is full" });
            self.ended.push_back(Completion { tag: carried.tag, result, buffer: carried.buffer });
        } else if matches!(call, PageOperation::Read { count, .. } if count >= LARGE_PAGES) {
            self.large_reads += 1;
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.submitted = None;
        if self.ended.is_empty() {
            self.work();
        } else if self.dead.is_none() && (!self.train.is_sent() || self.conversation.wants_to_send()) {
            // There is a completion to return already; asking the kernel for more would delay the
            // caller.
            self.send(Moment(now_ns()));
        }
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        self.conversation.in_flight() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        self.submitted = None;
        let start = now_ns();
        let limit = start.saturating_add(timeout.as_nanos() as u64);
        loop {
            let now = self.work();
            if self.has_ended() || self.in_flight() == 0 {
                self.polling.renew();
                return;
            }
            if now >= limit {
                return;
            }
            if self.polling.goes_on(start, now) {
                continue;
            }
            let (fd, events, until) = self.sleeps_on();
            let sleep = Duration::from_nanos(limit.min(until).saturating_sub(now));
            if !self.connection.is_joined() {
                self.connection.wait_to_join(sleep);
            } else if let Err(errno) = net::poll(fd, events, sleep) {
                self.die_of(errno);
            }
        }
    }
}

impl Drop for TcpLane {
    fn drop(&mut self) {
        // Operations in flight are given up; their buffers are freed with the lane. The pointers in
        // the train are dropped before the buffers to which they point.
        self.train.clear();
    }
}
