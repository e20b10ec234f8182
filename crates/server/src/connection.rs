//! One connection: a thread that receives requests, serves them and sends the answers.
//!
//! Everything received at once is one batch: its demand requests are served first, then those that nobody waits for.
//! Page bytes of reads are sent straight from the layers; answers to everything else leave together at the end of
//! the batch. While the client does not take its answers nothing more is received, so what one connection can make the
//! server hold is bounded by one batch.

use crate::counters::{Counters, Tally};
use crate::server::Shared;
use crate::sessions::{NoRegion, Session, Tenant};
use crate::spin::Patience;
use crate::store::{Found, Reader, Region, Scratch, StoreError};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::session::{ServerConversation, Step};
use farfield_core::wire::{self, ErrorCode, Head, Hello, Kind, Refusal, RefuseCode, Request, WireError, WireRequest};
use farfield_core::{PageId, RegionId, checksum};
use farfield_os::{Errno, net, serving};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most pages in one read or write.
pub(crate) const BATCH_PAGES_MAX: u32 = 256;
/// Most requests of one connection that wait for their answer.
pub(crate) const IN_FLIGHT_MAX: u32 = 1024;
/// Most pages of one region.
const REGION_PAGES_MAX: u64 = 1 << 32;

/// First size of the inbox; it grows when a longer message is announced.
const INBOX_BYTES: usize = 64 * 1024;
/// Largest size of the inbox: two of the longest messages, so that one can arrive while the other is served.
const INBOX_BYTES_MAX: usize = 2 * (wire::HEAD_BYTES + wire::write_body_bytes(BATCH_PAGES_MAX));
/// Requests looked at before the first of them is served.
const BATCH_MAX: usize = 256;
/// Page bytes gathered before they are sent.
const GATHER_BYTES_MAX: usize = 1 << 20;
/// Parts gathered before they are sent. The last read may add a part per page, a head and a tail.
const PARTS_MAX: usize = 512;
/// Parts that the kernel takes at once.
const VECTORS_MAX: usize = 1024;
const _: () = assert!(PARTS_MAX + BATCH_PAGES_MAX as usize + 2 <= VECTORS_MAX);
/// An idle connection looks this often whether its inbox is larger than it needs to be.
const IDLE: Duration = Duration::from_secs(10);

/// How the client is connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    Tcp,
    /// The same machine, so memory can be shared.
    Unix,
}

/// Why a connection is over.
#[derive(Debug)]
pub(crate) enum End {
    /// The client closed, or died.
    Closed,
    /// The client said Bye.
    Bye,
    /// The server does not take the client.
    Refused(RefuseCode),
    /// The bytes are no conversation.
    Broken(WireError),
    /// The client did not say who it is in time.
    Silent,
    /// The client does not take its answers.
    Stalled,
    /// The kernel.
    Os(Errno),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Closed => f.write_str("closed by the client"),
            End::Bye => f.write_str("the client said bye"),
            End::Refused(code) => write!(f, "refused: {code:?}"),
            End::Broken(error) => write!(f, "no conversation: {error}"),
            End::Silent => f.write_str("the client did not say who it is"),
            End::Stalled => f.write_str("the client does not take its answers"),
            End::Os(errno) => write!(f, "{errno}"),
        }
    }
}

/// One complete message in the inbox.
struct Item {
    bytes: Range<usize>,
    background: bool,
    /// The message itself, if it is a read: nothing of it is in the inbox only.
    read: Option<WireRequest<'static>>,
}

/// A part of what is sent next.
enum Part {
    /// Of the outbox.
    Own(Range<usize>),
    /// Of a layer.
    Layer { bytes: *const u8, len: usize },
}

pub(crate) struct Connection<'a> {
    shared: &'a Shared,
    fd: Arc<OwnedFd>,
    transport: Transport,
    conversation: ServerConversation,
    session: Option<Arc<Session>>,
    inbox: Vec<u8>,
    /// The bytes of the inbox that were received and not used.
    unread: Range<usize>,
    batch: Vec<Item>,
    outbox: Vec<u8>,
    /// Bytes of the outbox that are sent.
    sent: usize,
    parts: Vec<Part>,
    vectors: Vec<libc::iovec>,
    found: Vec<Option<Found>>,
    /// Where a page is compared with its checksum.
    scratch: Box<Scratch>,
    patience: Patience,
    tally: Tally,
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        self.shared.counters.add(&mut self.tally);
        if let Some(session) = self.session.take()
            && self.shared.sessions.leave(&session, Instant::now())
        {
            tracing::debug!(session = session.number, "session ended with its last connection");
        }
    }
}

impl<'a> Connection<'a> {
    pub(crate) fn new(shared: &'a Shared, fd: Arc<OwnedFd>, transport: Transport) -> Connection<'a> {
        Connection {
            shared,
            fd,
            transport,
            conversation: ServerConversation::new(),
            session: None,
            inbox: vec![0; INBOX_BYTES],
            unread: 0..0,
            batch: Vec::with_capacity(BATCH_MAX),
            outbox: Vec::with_capacity(16 * 1024),
            sent: 0,
            parts: Vec::with_capacity(VECTORS_MAX),
            vectors: Vec::with_capacity(VECTORS_MAX),
            found: Vec::with_capacity(BATCH_PAGES_MAX as usize),
            scratch: Box::new([0; PAGE_BYTES]),
            patience: Patience::default(),
            tally: Tally::default(),
        }
    }

    /// Serves until the connection is over.
    pub(crate) fn run(&mut self) -> End {
        let end = match self.serve() {
            Ok(never) => match never {},
            Err(end) => end,
        };
        match &end {
            End::Refused(_) => self.tally.refused_connections += 1,
            End::Broken(_) | End::Silent => self.tally.broken_connections += 1,
            _ => {}
        }
        if matches!(end, End::Refused(_) | End::Broken(_) | End::Bye) {
            self.say_goodbye();
        }
        end
    }

    /// Refuses without listening.
    pub(crate) fn turn_away(&mut self, code: RefuseCode, text: &str) -> End {
        let end = self.refuse(code, text);
        self.tally.refused_connections += 1;
        self.say_goodbye();
        end
    }

    fn serve(&mut self) -> Result<std::convert::Infallible, End> {
        let greeting_until = Instant::now() + self.shared.config.greeting_within;
        let mut need = wire::HEAD_BYTES;
        loop {
            let until = (!self.conversation.is_open()).then_some(greeting_until);
            self.receive(need, until)?;
            let arrived = Instant::now();
            need = self.serve_received(arrived)?;
            self.shared.counters.add(&mut self.tally);
        }
    }

    /// Serves every complete message of the inbox and sends the answers. Returns how long the next message is, as far as
    /// is known.
    fn serve_received(&mut self, arrived: Instant) -> Result<usize, End> {
        loop {
            self.batch.clear();
            let mut at = self.unread.start;
            let mut broken = None;
            let mut need = None;
            while self.batch.len() < BATCH_MAX {
                match self.conversation.step(&self.inbox[at..self.unread.end]) {
                    Step::Need { bytes } => {
                        need = Some(bytes);
                        break;
                    }
                    Step::Request { request, used } => {
                        let (background, read) = (request.background, read_of(&request));
                        self.batch.push(Item { bytes: at..at + used, background, read });
                        at += used;
                    }
                    Step::Fail { tag, code, used } => {
                        at += used;
                        self.fail(tag, code, 0);
                    }
                    Step::Hello { hello, version, used } => {
                        let greeting = greet(self.shared, self.transport, &hello, version);
                        at += used;
                        self.greeted(greeting)?;
                    }
                    Step::Broken { error, refuse } => {
                        broken = Some((error, refuse));
                        break;
                    }
                }
            }
            self.serve_batch(arrived)?;
            self.unread.start = at;
            self.flush()?;
            if let Some((error, refuse)) = broken {
                if !self.conversation.is_open() && self.session.is_none() {
                    self.refuse(refuse, &error.to_string());
                }
                return Err(End::Broken(error));
            }
            if let Some(need) = need {
                return Ok(need);
            }
        }
    }

    fn greeted(
        &mut self,
        greeting: Result<(Arc<Session>, wire::Welcome), (RefuseCode, &'static str)>,
    ) -> Result<(), End> {
        match greeting {
            Ok((session, welcome)) => {
                self.session = Some(session);
                self.conversation.on_welcome(&welcome);
                self.answer(|out| welcome.encode(out));
                Ok(())
            }
            Err((code, text)) => Err(self.refuse(code, text)),
        }
    }

    fn serve_batch(&mut self, arrived: Instant) -> Result<(), End> {
        let batch = core::mem::take(&mut self.batch);
        let inbox = core::mem::take(&mut self.inbox);
        let served = self.serve_items(&batch, &inbox, arrived);
        (self.batch, self.inbox) = (batch, inbox);
        served
    }

    fn serve_items(&mut self, batch: &[Item], inbox: &[u8], arrived: Instant) -> Result<(), End> {
        let Some(session) = self.session.clone() else { return Ok(()) };
        announce(&session, batch);
        for background in [false, true] {
            let mut requests =
                batch.iter().filter(|item| item.background == background).map(|item| request_of(inbox, item));
            let mut next = requests.next();
            while let Some(request) = next {
                let request = request.map_err(End::Broken)?;
                let Some(region) = region_read(&request.request) else {
                    self.serve_one(&session, &request, arrived)?;
                    next = requests.next();
                    continue;
                };
                // All reads of one region in a row are gathered into few sends.
                self.serve_reads(&session, region, request, &mut requests, &mut next, arrived)?;
            }
            if !background {
                // Somebody waits for these, and writes take a while.
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Serves `first` and the reads of the same region that follow it; `next` is the first request that is none.
    fn serve_reads<'i>(
        &mut self,
        session: &Session,
        id: RegionId,
        first: WireRequest<'i>,
        requests: &mut impl Iterator<Item = Result<WireRequest<'i>, WireError>>,
        next: &mut Option<Result<WireRequest<'i>, WireError>>,
        arrived: Instant,
    ) -> Result<(), End> {
        let region = session.region(id);
        let now = Instant::now();
        let mut current = Some(first);
        while current.is_some() {
            let reader = region.as_ref().map(|region| region.reader());
            self.parts.clear();
            let mut gathered = 0;
            let mut own_from = self.sent;
            while let Some(request) = current {
                self.tally.requests[kind_of(&request.request) as usize] += 1;
                self.conversation.on_answered();
                let outcome = match &reader {
                    _ if is_late(&request, arrived, now) => Err((ErrorCode::TimedOut, 0)),
                    None => Err((ErrorCode::UnknownRegion, 0)),
                    Some(reader) => self.collect(reader, &request, &mut own_from),
                };
                match outcome {
                    Ok(bytes) => gathered += bytes,
                    Err((code, page)) => self.fail(request.tag, code, page),
                }
                *next = requests.next();
                current = match next {
                    Some(Ok(following)) if region_read(&following.request) == Some(id) => Some(*following),
                    _ => None,
                };
                if gathered >= GATHER_BYTES_MAX || self.parts.len() >= PARTS_MAX {
                    break;
                }
            }
            if own_from < self.outbox.len() {
                self.parts.push(Part::Own(own_from..self.outbox.len()));
            }
            self.send_parts()?;
            // The region's lock must not be held while waiting for the client.
            drop(reader);
            self.flush()?;
        }
        Ok(())
    }

    /// Puts the answer to one read into outbox and parts; `own_from` is the start of the outbox bytes that no part covers yet.
    /// Bytes of pages that will be sent; on an error nothing was put.
    fn collect(
        &mut self,
        reader: &Reader<'_>,
        request: &WireRequest<'_>,
        own_from: &mut usize,
    ) -> Result<usize, (ErrorCode, u64)> {
        match request.request {
            Request::ReadPart { page, part, .. } => {
                let bytes = reader.part(page, part, &mut self.scratch).map_err(error_code)?;
                wire::encode_part(request.tag, part, checksum(bytes), bytes, &mut self.outbox);
                Ok(bytes.len())
            }
            Request::Read { page, count, .. } => {
                let (parts, found) = (&mut self.parts, &mut self.found);
                let mut collected = Collected { parts, found, own_from: *own_from, present: 0 };
                collect_read(reader, request.tag, page, count, &mut self.outbox, &mut collected)?;
                let Collected { own_from: from, present, .. } = collected;
                *own_from = from;
                self.tally.read_pages += present;
                self.tally.absent_pages += u64::from(count) - present;
                Ok(present as usize * PAGE_BYTES)
            }
            _ => unreachable!("only reads get here"),
        }
    }

    fn serve_one(&mut self, session: &Arc<Session>, wire: &WireRequest<'_>, arrived: Instant) -> Result<(), End> {
        self.conversation.on_answered();
        let tag = wire.tag;
        if wire.deadline.is_some() && is_late(wire, arrived, Instant::now()) {
            self.fail(tag, ErrorCode::TimedOut, 0);
            return Ok(());
        }
        let kind = kind_of(&wire.request);
        self.tally.requests[kind as usize] += 1;
        let outcome = self.perform(session, tag, kind, &wire.request);
        if let Err((code, page)) = outcome {
            self.fail(tag, code, page);
        }
        match (wire.request, outcome) {
            (Request::Bye, _) => {
                self.flush()?;
                Err(End::Bye)
            }
            (Request::MapRegion { region, first_layer }, Ok(())) => self.send_map(session, tag, region, first_layer),
            _ => Ok(()),
        }
    }

    /// Does what is asked and puts the answer into the outbox.
    fn perform(
        &mut self,
        session: &Arc<Session>,
        tag: u64,
        kind: Kind,
        request: &Request<'_>,
    ) -> Result<(), (ErrorCode, u64)> {
        let find = |id| session.region(id).ok_or((ErrorCode::UnknownRegion, 0));
        let local = || match self.transport {
            Transport::Unix => Ok(()),
            Transport::Tcp => Err((ErrorCode::Unsupported, 0)),
        };
        match *request {
            Request::Write { region, page, pages } => {
                let region = find(region)?;
                for (index, (sum, bytes)) in pages.iter().enumerate() {
                    if checksum(bytes) != sum {
                        return Err((ErrorCode::Corrupt, page.0.saturating_add(index as u64)));
                    }
                }
                region.write(page, pages.bytes(), |index| pages.sum(index)).map_err(error_code)?;
                self.tally.written_pages += u64::from(pages.count());
            }
            Request::Discard { region, page, count } => {
                let forgotten = find(region)?.discard(page, u64::from(count)).map_err(error_code)?;
                self.tally.discarded_pages += forgotten;
            }
            Request::CreateRegion { pages } => {
                if pages == 0 || pages > REGION_PAGES_MAX {
                    return Err((ErrorCode::BadRequest, pages));
                }
                let account = session.tenant.account(&self.shared.capacity);
                let region = Region::new(pages, account).map_err(error_code)?;
                let region = self.shared.sessions.add_region(session, region).map_err(no_region)?;
                tracing::debug!(session = session.number, region = region.0, pages, "region created");
                self.answer(|out| wire::encode_created(tag, region, out));
                return Ok(());
            }
            Request::DropRegion { region } => {
                session.remove(region).ok_or((ErrorCode::UnknownRegion, 0))?;
                tracing::debug!(session = session.number, region = region.0, "region dropped");
            }
            Request::CloneRegion { region } => {
                let snapshot = find(region)?.snapshot().map_err(error_code)?;
                let secret = random_u128().map_err(|errno| error_code(StoreError::from(errno)))?;
                if !self.shared.sessions.add_ticket(secret, snapshot, session.tenant.clone(), Instant::now()) {
                    return Err((ErrorCode::TooMuch, 0));
                }
                self.answer(|out| wire::encode_ticket(tag, secret, out));
                return Ok(());
            }
            Request::ClaimRegion { ticket } => {
                let snapshot = self.shared.sessions.claim(ticket, &session.tenant, Instant::now());
                let snapshot = snapshot.ok_or((ErrorCode::Ticket, 0))?;
                let account = session.tenant.account(&self.shared.capacity);
                let region = Region::from_snapshot(snapshot, account).map_err(error_code)?;
                let pages = region.pages();
                let region = self.shared.sessions.add_region(session, region).map_err(no_region)?;
                tracing::debug!(session = session.number, region = region.0, pages, "region cloned");
                self.answer(|out| wire::encode_claimed(tag, region, pages, out));
                return Ok(());
            }
            Request::Stat => {
                self.shared.counters.add(&mut self.tally);
                let stat = self.shared.stat();
                self.answer(|out| wire::encode_stat(tag, &stat, out));
                return Ok(());
            }
            Request::MapRegion { region, .. } => {
                local()?;
                find(region)?;
                // The answer carries descriptors, so it is sent by itself.
                return Ok(());
            }
            Request::Reserve { region, pages } => {
                local()?;
                find(region)?.reserve(u64::from(pages)).map_err(error_code)?;
            }
            Request::Release { region, pages } => {
                local()?;
                find(region)?.release(u64::from(pages)).map_err(error_code)?;
            }
            Request::Bye => {
                tracing::debug!(session = session.number, "session ended by its client");
                self.shared.sessions.end(session);
            }
            Request::Ping => {}
            Request::Read { .. } | Request::ReadPart { .. } => unreachable!("reads are served in rows"),
        }
        self.answer(|out| wire::encode_ok(tag, kind, out));
        Ok(())
    }

    fn send_map(&mut self, session: &Session, tag: u64, id: RegionId, first_layer: u32) -> Result<(), End> {
        let layers_max = wire::MapReply::LAYERS_AT_ONCE as usize;
        let found = session
            .region(id)
            .ok_or((ErrorCode::UnknownRegion, 0))
            .and_then(|region| region.descriptors(first_layer as usize, layers_max).map_err(error_code));
        let descriptors = match found {
            Ok(descriptors) => descriptors,
            Err((code, page)) => {
                self.fail(tag, code, page);
                return Ok(());
            }
        };
        let map = wire::MapReply {
            pages: descriptors.pages,
            generation: descriptors.generation,
            layers_total: descriptors.layers_total,
            first_layer: descriptors.first_layer,
            layers: descriptors.fds.len() as u32 - 2,
        };
        // What was answered before goes first.
        self.flush()?;
        let start = self.outbox.len();
        self.answer(|out| wire::encode_map(tag, &map, out));
        let until = Instant::now() + self.shared.config.stall_max;
        loop {
            match serving::send_descriptors(self.fd.as_fd(), &self.outbox[start..], &descriptors.fds) {
                Ok(count) => {
                    self.tally.sent_bytes += count as u64;
                    self.sent += count;
                    return self.flush();
                }
                Err(errno) if errno.is_transient() => {
                    self.wait(libc::POLLOUT, until).and_then(|ready| match ready {
                        true => Ok(()),
                        false => Err(End::Stalled),
                    })?
                }
                Err(errno) => return Err(lost(errno)),
            }
        }
    }

    /// Puts an answer into the outbox.
    fn answer(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.outbox.len();
        encode(&mut self.outbox);
        if self.shared.draining.load(Ordering::Relaxed) {
            mark_stopping(&mut self.outbox[start..]);
        }
    }

    /// Answers with an error.
    fn fail(&mut self, tag: u64, code: ErrorCode, page: u64) {
        self.tally.failed_requests += 1;
        match code {
            ErrorCode::PoolFull => self.tally.full_requests += 1,
            ErrorCode::Corrupt => self.tally.corrupt_requests += 1,
            ErrorCode::TimedOut => self.tally.late_requests += 1,
            _ => {}
        }
        self.answer(|out| wire::encode_error(tag, code, page, out));
    }

    fn refuse(&mut self, code: RefuseCode, text: &str) -> End {
        let refusal = Refusal { code, version_min: wire::VERSION_MIN, version_max: wire::VERSION_MAX, text };
        wire::encode_refusal(&refusal, &mut self.outbox);
        End::Refused(code)
    }

    /// Receives at least one byte. `need` is the length of the next message as far as is known.
    fn receive(&mut self, need: usize, until: Option<Instant>) -> Result<(), End> {
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
    fn flush(&mut self) -> Result<(), End> {
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

    /// Sends what the kernel takes of the gathered parts and copies the rest to the outbox.
    fn send_parts(&mut self) -> Result<(), End> {
        self.vectors.clear();
        let mut total = 0;
        for part in &self.parts {
            let (bytes, len) = match part {
                Part::Own(range) => (self.outbox[range.clone()].as_ptr(), range.len()),
                Part::Layer { bytes, len } => (*bytes, *len),
            };
            self.vectors.push(libc::iovec { iov_base: bytes.cast_mut().cast(), iov_len: len });
            total += len;
        }
        // SAFETY: parts of the outbox are ours; parts of layers are mapped for as long as the reader of the region lives, which
        // the caller holds, and if their owner changes them meanwhile, he sends himself what he did.
        let mut sent = match unsafe { net::send(self.fd.as_raw_fd(), &self.vectors) } {
            Ok(sent) => sent,
            Err(errno) if errno.is_transient() => 0,
            Err(errno) => return Err(lost(errno)),
        };
        self.tally.sent_bytes += sent as u64;
        let mut rest: Vec<u8> = Vec::with_capacity(total - sent);
        if sent < total {
            for vector in &self.vectors {
                let skip = sent.min(vector.iov_len);
                sent -= skip;
                let len = vector.iov_len - skip;
                // SAFETY: as above; `rest` has room for everything that is not sent, and raw copies make no reference into
                // the layer.
                unsafe {
                    let target = rest.as_mut_ptr().add(rest.len());
                    core::ptr::copy_nonoverlapping(vector.iov_base.cast::<u8>().add(skip), target, len);
                    rest.set_len(rest.len() + len);
                }
            }
            self.outbox = rest;
        } else {
            self.outbox.clear();
        }
        self.sent = 0;
        self.parts.clear();
        Ok(())
    }

    /// Waits for one of `events`; false when `until` has passed.
    fn wait(&self, events: i16, until: Instant) -> Result<bool, End> {
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
    fn say_goodbye(&mut self) {
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

/// Begins to bring what reads of parts will look at; a single one is served at once.
fn announce(session: &Session, batch: &[Item]) {
    let mut parts = batch.iter().filter_map(|item| match item.read?.request {
        Request::ReadPart { region, page, part } => Some((region, page, part)),
        _ => None,
    });
    let (Some(first), Some(second)) = (parts.next(), parts.next()) else { return };
    let Some(region) = session.region(first.0) else { return };
    let reader = region.reader();
    let parts = [first, second].into_iter().chain(parts);
    parts.filter(|(id, ..)| *id == first.0).for_each(|(_, page, part)| reader.announce(page, part));
}

/// What a row of reads has gathered for sending.
struct Collected<'a> {
    parts: &'a mut Vec<Part>,
    /// Pages of the read at hand.
    found: &'a mut Vec<Option<Found>>,
    /// Start of the outbox bytes that no part covers yet.
    own_from: usize,
    present: u64,
}

/// Puts the answer to one read into outbox and parts; on an error nothing was put.
fn collect_read(
    reader: &Reader<'_>,
    tag: u64,
    first: PageId,
    count: u32,
    outbox: &mut Vec<u8>,
    collected: &mut Collected<'_>,
) -> Result<(), (ErrorCode, u64)> {
    reader.check_run(first, u64::from(count)).map_err(error_code)?;
    collected.found.clear();
    for page in first.0..first.0 + u64::from(count) {
        // Looked up once: the owner may change the page map between two looks.
        collected.found.push(reader.page(PageId(page)).map_err(error_code)?);
    }
    let present = || collected.found.iter().enumerate().filter_map(|(index, found)| Some((index as u32, (*found)?)));
    wire::encode_read(tag, count, present().map(|(index, found)| (index, found.sum)), outbox);
    let before = collected.parts.len();
    for page in collected.found.iter().flatten() {
        collected.present += 1;
        if collected.parts.len() == before {
            collected.parts.push(Part::Own(collected.own_from..outbox.len()));
            collected.own_from = outbox.len();
        } else if let Some(Part::Layer { bytes, len }) = collected.parts.last_mut()
            && bytes.wrapping_add(*len) == page.bytes
        {
            *len += PAGE_BYTES;
            continue;
        }
        collected.parts.push(Part::Layer { bytes: page.bytes, len: PAGE_BYTES });
    }
    Ok(())
}

fn request_of<'i>(inbox: &'i [u8], item: &Item) -> Result<WireRequest<'i>, WireError> {
    if let Some(read) = item.read {
        return Ok(read);
    }
    let frame = &inbox[item.bytes.clone()];
    let head = Head::decode(frame)?.ok_or(WireError::Field("head"))?;
    WireRequest::decode(&head, &frame[wire::HEAD_BYTES..])
}

/// The request, if it is a read.
fn read_of(request: &WireRequest<'_>) -> Option<WireRequest<'static>> {
    let WireRequest { tag, background, deadline, .. } = *request;
    let request = match request.request {
        Request::Read { region, page, count } => Request::Read { region, page, count },
        Request::ReadPart { region, page, part } => Request::ReadPart { region, page, part },
        _ => return None,
    };
    Some(WireRequest { tag, background, deadline, request })
}

/// The region that is read, if it is a read.
fn region_read(request: &Request<'_>) -> Option<RegionId> {
    match *request {
        Request::Read { region, .. } | Request::ReadPart { region, .. } => Some(region),
        _ => None,
    }
}

fn is_late(request: &WireRequest<'_>, arrived: Instant, now: Instant) -> bool {
    request.deadline.is_some_and(|deadline| now.saturating_duration_since(arrived) > deadline)
}

fn kind_of(request: &Request<'_>) -> Kind {
    match request {
        Request::CreateRegion { .. } => Kind::CreateRegion,
        Request::DropRegion { .. } => Kind::DropRegion,
        Request::Read { .. } => Kind::Read,
        Request::ReadPart { .. } => Kind::ReadPart,
        Request::Write { .. } => Kind::Write,
        Request::Discard { .. } => Kind::Discard,
        Request::CloneRegion { .. } => Kind::CloneRegion,
        Request::ClaimRegion { .. } => Kind::ClaimRegion,
        Request::Stat => Kind::Stat,
        Request::Ping => Kind::Ping,
        Request::MapRegion { .. } => Kind::MapRegion,
        Request::Reserve { .. } => Kind::Reserve,
        Request::Release { .. } => Kind::Release,
        Request::Bye => Kind::Bye,
    }
}

/// Flags a frame as sent by a server that is about to stop.
fn mark_stopping(frame: &mut [u8]) {
    const FLAGS_AT: usize = 5;
    if let Some(flags) = frame.get_mut(FLAGS_AT) {
        *flags |= wire::flags::STOPPING;
    }
}

fn no_region(reason: NoRegion) -> (ErrorCode, u64) {
    match reason {
        NoRegion::Ended => (ErrorCode::BadRequest, 0),
        NoRegion::TooMany => {
            tracing::warn!("no descriptors left for more regions: raise the limit (ulimit -n)");
            (ErrorCode::TooMuch, 0)
        }
    }
}

fn error_code(error: StoreError) -> (ErrorCode, u64) {
    match error {
        StoreError::Full(_) => (ErrorCode::PoolFull, 0),
        StoreError::OutOfRange => (ErrorCode::OutOfRange, 0),
        StoreError::Corrupt(page) => (ErrorCode::Corrupt, page.0),
        StoreError::Os(errno) => {
            tracing::error!(%errno, "the operating system refused");
            (ErrorCode::Internal, 0)
        }
    }
}

fn lost(errno: Errno) -> End {
    match errno.0 {
        libc::ECONNRESET | libc::EPIPE | libc::ETIMEDOUT => End::Closed,
        _ => End::Os(errno),
    }
}

pub(crate) fn random_u128() -> Result<u128, Errno> {
    let mut bytes = [0; 16];
    loop {
        serving::fill_random(&mut bytes)?;
        // Zero means "none" on the wire.
        match u128::from_le_bytes(bytes) {
            0 => {}
            number => return Ok(number),
        }
    }
}

/// Takes the client into a session, or says why not.
fn greet(
    shared: &Shared,
    transport: Transport,
    hello: &Hello<'_>,
    version: Option<u16>,
) -> Result<(Arc<Session>, wire::Welcome), (RefuseCode, &'static str)> {
    let Some(version) = version else {
        return Err((RefuseCode::Version, "no protocol version in common: use the same release on both sides"));
    };
    let tenant: &Arc<Tenant> = shared.tenant_of(hello.token).ok_or((RefuseCode::Token, "wrong token"))?;
    let session = match hello.session {
        Some(secret) => shared
            .sessions
            .join(secret, tenant)
            .ok_or((RefuseCode::Session, "the session is over: its lease ran out or the server is another one"))?,
        // Who comes for a snapshot goes on with work that is here already.
        None if shared.draining.load(Ordering::Relaxed) && !shared.sessions.awaits_claim(tenant) => {
            return Err((RefuseCode::Stopping, "the server is about to stop"));
        }
        None => {
            let secret = random_u128().map_err(|_| (RefuseCode::Malformed, "the server has no random numbers"))?;
            let session = shared.sessions.open(wire::SessionSecret(secret), tenant.clone(), hello.client_name);
            let (number, client, tenant) = (session.number, &session.client_name, &session.tenant.name);
            tracing::debug!(session = number, client, tenant, ?transport, "session opened");
            session
        }
    };
    let mut features = wire::features::CLONE | wire::features::PART;
    if transport == Transport::Unix {
        features |= wire::features::MAP;
    }
    let welcome = wire::Welcome {
        version,
        lease_ms: u32::try_from(shared.config.lease.as_millis()).unwrap_or(u32::MAX),
        features: hello.features & features,
        incarnation: shared.incarnation,
        session: session.secret,
        batch_pages_max: BATCH_PAGES_MAX,
        in_flight_max: IN_FLIGHT_MAX,
    };
    Ok((session, welcome))
}

impl Counters {
    /// Kinds of request with their names and counts.
    pub(crate) fn by_kind(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Kind::ALL.into_iter().map(|kind| (kind_name(kind), Self::get(&self.requests[kind as usize])))
    }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Hello => "hello",
        Kind::CreateRegion => "create_region",
        Kind::DropRegion => "drop_region",
        Kind::Read => "read",
        Kind::ReadPart => "read_part",
        Kind::Write => "write",
        Kind::Discard => "discard",
        Kind::CloneRegion => "clone_region",
        Kind::ClaimRegion => "claim_region",
        Kind::Stat => "stat",
        Kind::Ping => "ping",
        Kind::MapRegion => "map_region",
        Kind::Reserve => "reserve",
        Kind::Release => "release",
        Kind::Bye => "bye",
    }
}
