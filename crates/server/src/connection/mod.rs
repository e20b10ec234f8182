//! A connection: its thread receives requests, serves them and sends the answers.
//!
//! Everything received at once is one batch. Its demand requests are served first, then those in
//! the background, which no thread waits for. Page bytes of reads are sent straight from the
//! layers. All other answers are sent together at the end of the batch. While the client does not
//! read its answers, nothing more is received. So one batch bounds what a connection can make the
//! server hold.

// Clients can send anything: no indexing into slices and no narrowing of numbers without a check.
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod calls;
mod encryption;
mod greeting;
mod link;
mod perform;
mod reads;

use crate::address::PeerAddress;
use crate::counters::ConnectionTally;
use crate::server::ServerState;
use crate::sessions::ClientSession;
use crate::spin::SpinBackoff;
use crate::store::{Charge, Ledger, PresentPage, Scratch};
use crate::work_semaphore::WorkTurn;
use calls::{CallBatch, call_of};
use farfield_core::RegionId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::session::{ServerAction, ServerConversation};
use farfield_core::wire::{self, ErrorCode, MessageHeader, RefuseCode, Request, WireError, WireRequest};
use farfield_os::Errno;
use farfield_tls::{AcceptError, PeerNames, RecordStream, SessionEntry};
use greeting::greet;
use link::GREETING_BYTES;
use reads::{SendSlice, announce, read_bytes};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Most pages in one read or write.
pub(crate) const BATCH_PAGES_MAX: u32 = 256;
/// Most requests of one connection that wait for their answers.
pub(crate) const IN_FLIGHT_MAX: u32 = 1024;

/// Most requests that are parsed before the first of them is served.
const BATCH_MAX: usize = 256;

/// Kind of socket that connects the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    Tcp,
    /// TCP, with sealed records on it.
    Tls,
    /// A Unix socket. The client is on this machine, so memory can be shared.
    Unix,
}

/// Reason why a connection is over.
#[derive(Debug)]
pub(crate) enum CloseReason {
    /// The client closed the connection, or died.
    Closed,
    /// The client sent Bye.
    Bye,
    /// The server refused the client.
    Refused(RefuseCode),
    /// The received bytes do not follow the protocol.
    Broken(WireError),
    /// The connection could not be encrypted.
    Handshake(AcceptError),
    /// The client did not authenticate in time.
    Silent,
    /// The client does not read its answers.
    Stalled,
    /// A message did not arrive completely in time, and its buffer is needed.
    Slow,
    /// The kernel returned an error.
    Os(Errno),
}

impl std::fmt::Display for CloseReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CloseReason::Closed => f.write_str("closed by the client"),
            CloseReason::Bye => f.write_str("the client said bye"),
            CloseReason::Refused(code) => write!(f, "refused: {code:?}"),
            CloseReason::Broken(error) => write!(f, "no conversation: {error}"),
            CloseReason::Handshake(error) => write!(f, "{error}"),
            CloseReason::Silent => f.write_str("the client did not say who it is"),
            CloseReason::Slow => f.write_str("a message did not arrive whole in time"),
            CloseReason::Stalled => f.write_str("the client does not take its answers"),
            CloseReason::Os(errno) => write!(f, "{errno}"),
        }
    }
}

/// A complete message in the inbox.
struct InboxMessage {
    bytes: Range<usize>,
    background: bool,
    /// The decoded message, if it is a read: reads refer to no bytes in the inbox.
    read: Option<WireRequest<'static>>,
}

pub(crate) struct ClientConnection<'a> {
    shared: &'a ServerState,
    fd: Arc<OwnedFd>,
    number: u64,
    transport: Transport,
    address: PeerAddress,
    /// Records of an encrypted connection, once it has keys.
    records: Option<Box<RecordStream>>,
    /// Names in the client's certificate.
    names: PeerNames,
    /// Entry of the session that this connection has begun: lanes can get keys as long as it lives.
    tls_session: Option<SessionEntry>,
    conversation: ServerConversation,
    session: Option<Arc<ClientSession>>,
    /// Ledger that pays for this connection, once the client has authenticated.
    ledger: Option<Arc<Ledger>>,
    held: Option<Charge>,
    /// Charges for inbox and outbox beyond the size that every connection has.
    inbox_held: Option<Charge>,
    outbox_held: Option<Charge>,
    /// Charge for the buffers of records.
    records_held: Option<Charge>,
    /// Charge for descriptors that were sent and that the client has not received yet.
    under_way: Option<Charge>,
    /// Turns at the processors, of newcomers until the client has authenticated: a permit is held while
    /// requests are served.
    turn: WorkTurn,
    /// Arrival time of the first bytes of a message that has arrived in part.
    message_since: Option<Instant>,
    inbox: Vec<u8>,
    /// Range of the inbox that was received and is not consumed yet.
    unread: Range<usize>,
    batch: Vec<InboxMessage>,
    /// Bytes of the pages that the batch reads.
    batch_bytes: usize,
    outbox: Vec<u8>,
    /// Bytes of the outbox that were sent.
    sent: usize,
    parts: Vec<SendSlice>,
    vectors: Vec<libc::iovec>,
    found: Vec<Option<PresentPage>>,
    /// Buffer in which a page is compared with its checksum.
    scratch: Box<Scratch>,
    backoff: SpinBackoff,
    tally: ConnectionTally,
}

impl Drop for ClientConnection<'_> {
    fn drop(&mut self) {
        self.add_up();
        if let Some(session) = self.session.take()
            && self.shared.sessions.leave(&session, Instant::now())
        {
            tracing::debug!(session = session.number, "session ended with its last connection");
        }
    }
}

impl<'a> ClientConnection<'a> {
    pub(crate) fn new(
        shared: &'a ServerState,
        fd: Arc<OwnedFd>,
        number: u64,
        transport: Transport,
        address: PeerAddress,
    ) -> ClientConnection<'a> {
        ClientConnection {
            shared,
            fd,
            number,
            transport,
            address,
            records: None,
            names: PeerNames::default(),
            tls_session: None,
            conversation: ServerConversation::new(),
            session: None,
            ledger: None,
            held: None,
            inbox_held: None,
            outbox_held: None,
            records_held: None,
            under_way: None,
            turn: WorkTurn::new(shared.budget.newcomers.clone()),
            message_since: None,
            inbox: vec![0; GREETING_BYTES],
            unread: 0..0,
            batch: Vec::new(),
            batch_bytes: 0,
            outbox: Vec::new(),
            sent: 0,
            parts: Vec::new(),
            vectors: Vec::new(),
            found: Vec::new(),
            scratch: Box::new([0; PAGE_BYTES]),
            backoff: SpinBackoff::default(),
            tally: ConnectionTally::default(),
        }
    }

    /// Serves requests until the connection is over.
    pub(crate) fn run(&mut self) -> CloseReason {
        let end = match self.serve() {
            Ok(never) => match never {},
            Err(end) => end,
        };
        self.turn.end();
        match &end {
            CloseReason::Refused(_) => self.tally.refused_connections += 1,
            CloseReason::Broken(_) | CloseReason::Handshake(_) | CloseReason::Silent | CloseReason::Slow => {
                self.tally.broken_connections += 1
            }
            _ => {}
        }
        if matches!(
            end,
            CloseReason::Refused(_) | CloseReason::Broken(_) | CloseReason::Handshake(_) | CloseReason::Bye
        ) {
            self.say_goodbye();
        }
        // Held until all is settled.
        self.turn.begin();
        end
    }

    /// Refuses the client without reading its greeting.
    pub(crate) fn turn_away(&mut self, code: RefuseCode, text: &str) -> CloseReason {
        let end = self.refuse(code, text);
        self.tally.refused_connections += 1;
        self.say_goodbye();
        end
    }

    fn serve(&mut self) -> Result<std::convert::Infallible, CloseReason> {
        let greeting_until = Instant::now() + self.shared.config.greeting_within;
        if self.transport == Transport::Tls {
            self.encrypt(greeting_until)?;
        }
        let mut need = wire::HEADER_BYTES;
        loop {
            let until = (!self.conversation.is_open()).then_some(greeting_until);
            self.receive(need, until)?;
            let arrived = Instant::now();
            let began_at = self.unread.start;
            need = self.serve_received(arrived)?;
            self.turn.end();
            if self.unread.is_empty() {
                self.message_since = None;
            } else if self.unread.start != began_at || self.message_since.is_none() {
                self.message_since = Some(arrived);
            }
            self.add_up();
        }
    }

    /// Serves all complete messages in the inbox and sends the answers. Returns the length of the
    /// next message as far as it is known.
    fn serve_received(&mut self, arrived: Instant) -> Result<usize, CloseReason> {
        loop {
            self.batch.clear();
            let mut at = self.unread.start;
            let mut broken = None;
            let mut need = None;
            while self.batch.len() < BATCH_MAX {
                match self.conversation.step(self.inbox.get(at..self.unread.end).unwrap_or_default()) {
                    ServerAction::Need { bytes } => {
                        need = Some(bytes);
                        break;
                    }
                    ServerAction::Request { request, used } => {
                        let (background, read) = (request.background, read_of(&request));
                        self.batch.push(InboxMessage { bytes: at..at + used, background, read });
                        at += used;
                    }
                    ServerAction::Fail { tag, code, used } => {
                        at += used;
                        self.fail(tag, code, 0);
                    }
                    ServerAction::Hello { hello, version, used } => {
                        self.turn.begin();
                        let greeting = greet(self.shared, self.transport, self.address, &self.names, &hello, version);
                        at += used;
                        self.greeted(greeting)?;
                    }
                    ServerAction::Broken { error, refuse } => {
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
                return Err(CloseReason::Broken(error));
            }
            if let Some(need) = need {
                return Ok(need);
            }
        }
    }

    fn serve_batch(&mut self, arrived: Instant) -> Result<(), CloseReason> {
        let batch = core::mem::take(&mut self.batch);
        let inbox = core::mem::take(&mut self.inbox);
        let served = self.serve_items(&batch, &inbox, arrived);
        (self.batch, self.inbox) = (batch, inbox);
        served
    }

    fn serve_items(&mut self, batch: &[InboxMessage], inbox: &[u8], arrived: Instant) -> Result<(), CloseReason> {
        let Some(session) = self.session.clone() else { return Ok(()) };
        if batch.is_empty() {
            return Ok(());
        }
        // Given back whenever this thread waits for the client.
        self.turn.begin();
        self.batch_bytes = read_bytes(batch);
        announce(&session, batch);
        for background in [false, true] {
            let mut requests =
                batch.iter().filter(|item| item.background == background).map(|item| request_of(inbox, item));
            let mut next = requests.next();
            while let Some(request) = next {
                let request = request.map_err(CloseReason::Broken)?;
                if let Some(first) = call_of(&request) {
                    let mut row = CallBatch::new();
                    row.push((request, first));
                    loop {
                        next = requests.next();
                        let Some(Ok(following)) = next else { break };
                        match call_of(&following) {
                            Some(call) if call.is_like(&first) && !row.is_full() => row.push((following, call)),
                            _ => break,
                        }
                    }
                    self.serve_calls(&session, &row, arrived)?;
                    self.turn.begin();
                    continue;
                }
                let Some(region) = region_read(&request.request) else {
                    self.serve_one(&session, &request, arrived)?;
                    next = requests.next();
                    continue;
                };
                // Consecutive reads of one region are gathered into few sends.
                self.serve_reads(&session, region, request, &mut requests, &mut next, arrived)?;
            }
            if !background {
                // Clients wait for these answers, and writes take a while.
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Adds this connection's counts to the counters of the server and the tenant.
    pub(super) fn add_up(&mut self) {
        if let Some(session) = &self.session {
            session.tenant.counters.copy(&self.tally);
        }
        self.shared.counters.add(&mut self.tally);
    }

    /// Appends an answer to the outbox.
    fn answer(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.outbox.len();
        encode(&mut self.outbox);
        if self.shared.draining.load(Ordering::Relaxed) {
            mark_stopping(self.outbox.get_mut(start..).unwrap_or_default());
        }
    }

    /// Appends an error as the answer, and counts it.
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
}

fn request_of<'i>(inbox: &'i [u8], item: &InboxMessage) -> Result<WireRequest<'i>, WireError> {
    if let Some(read) = item.read {
        return Ok(read);
    }
    let frame = inbox.get(item.bytes.clone()).unwrap_or_default();
    let head = MessageHeader::decode(frame)?.ok_or(WireError::Field("head"))?;
    WireRequest::decode(&head, frame.get(wire::HEADER_BYTES..).unwrap_or_default())
}

/// Returns the request without a borrow of the inbox, if it is a read.
fn read_of(request: &WireRequest<'_>) -> Option<WireRequest<'static>> {
    let WireRequest { tag, background, deadline, .. } = *request;
    let request = match request.request {
        Request::Read { region, page, count } => Request::Read { region, page, count },
        Request::ReadPart { region, page, part } => Request::ReadPart { region, page, part },
        _ => return None,
    };
    Some(WireRequest { tag, background, deadline, request })
}

/// Returns the region that a request reads, if it is a read.
fn region_read(request: &Request<'_>) -> Option<RegionId> {
    match *request {
        Request::Read { region, .. } | Request::ReadPart { region, .. } => Some(region),
        _ => None,
    }
}

fn is_late(request: &WireRequest<'_>, arrived: Instant, now: Instant) -> bool {
    request.deadline.is_some_and(|deadline| now.saturating_duration_since(arrived) > deadline)
}

/// Sets the flag in a frame that says that the server is about to stop.
fn mark_stopping(frame: &mut [u8]) {
    const FLAGS_AT: usize = 5;
    if let Some(flags) = frame.get_mut(FLAGS_AT) {
        *flags |= wire::flags::STOPPING;
    }
}
