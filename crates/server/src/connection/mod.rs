//! One connection: a thread that receives requests, serves them and sends the answers.
//!
//! Everything received at once is one batch: its demand requests are served first, then those that nobody waits for.
//! Page bytes of reads are sent straight from the layers; answers to everything else leave together at the end of
//! the batch. While the client does not take its answers nothing more is received, so what one connection can make the
//! server hold is bounded by one batch.

// What clients say is anything: no place in a slice and no narrower number without a check.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::cast_possible_truncation))]

mod calls;
mod greeting;
mod link;
mod perform;
mod reads;

pub(crate) use greeting::random_u64;
use greeting::random_u128;

use crate::address::Address;
use crate::counters::Tally;
use crate::server::Shared;
use crate::sessions::Session;
use crate::spin::Patience;
use crate::store::{Charge, Found, Ledger, Scratch};
use crate::turns::Turn;
use calls::{Row, call_of};
use farfield_core::RegionId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::session::{ServerConversation, Step};
use farfield_core::wire::{self, ErrorCode, Head, RefuseCode, Request, WireError, WireRequest};
use farfield_os::Errno;
use greeting::greet;
use link::GREETING_BYTES;
use reads::{Part, announce, read_bytes};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Most pages in one read or write.
pub(crate) const BATCH_PAGES_MAX: u32 = 256;
/// Most requests of one connection that wait for their answer.
pub(crate) const IN_FLIGHT_MAX: u32 = 1024;

/// Requests looked at before the first of them is served.
const BATCH_MAX: usize = 256;

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
    /// A message did not arrive whole in time, and its room is needed.
    Slow,
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
            End::Slow => f.write_str("a message did not arrive whole in time"),
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

pub(crate) struct Connection<'a> {
    shared: &'a Shared,
    fd: Arc<OwnedFd>,
    number: u64,
    transport: Transport,
    address: Address,
    conversation: ServerConversation,
    session: Option<Arc<Session>>,
    /// Whoever pays for this connection, once it is known.
    ledger: Option<Arc<Ledger>>,
    held: Option<Charge>,
    /// What is paid for inbox and outbox beyond what each connection has.
    inbox_held: Option<Charge>,
    outbox_held: Option<Charge>,
    /// Descriptors that were sent and that the client has not taken yet.
    under_way: Option<Charge>,
    /// While requests are served.
    turn: Option<Turn>,
    /// When the message began that has arrived in part.
    message_since: Option<Instant>,
    inbox: Vec<u8>,
    /// The bytes of the inbox that were received and not used.
    unread: Range<usize>,
    batch: Vec<Item>,
    /// Of the pages that the batch reads.
    batch_bytes: usize,
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
        self.add_up();
        if let Some(session) = self.session.take()
            && self.shared.sessions.leave(&session, Instant::now())
        {
            tracing::debug!(session = session.number, "session ended with its last connection");
        }
    }
}

impl<'a> Connection<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        fd: Arc<OwnedFd>,
        number: u64,
        transport: Transport,
        address: Address,
    ) -> Connection<'a> {
        Connection {
            shared,
            fd,
            number,
            transport,
            address,
            conversation: ServerConversation::new(),
            session: None,
            ledger: None,
            held: None,
            inbox_held: None,
            outbox_held: None,
            under_way: None,
            turn: None,
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
        self.turn = None;
        match &end {
            End::Refused(_) => self.tally.refused_connections += 1,
            End::Broken(_) | End::Silent | End::Slow => self.tally.broken_connections += 1,
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
            let began_at = self.unread.start;
            need = self.serve_received(arrived)?;
            self.turn = None;
            if self.unread.is_empty() {
                self.message_since = None;
            } else if self.unread.start != began_at || self.message_since.is_none() {
                self.message_since = Some(arrived);
            }
            self.add_up();
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
                match self.conversation.step(self.inbox.get(at..self.unread.end).unwrap_or_default()) {
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
                        let greeting = greet(self.shared, self.transport, self.address, &hello, version);
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

    fn serve_batch(&mut self, arrived: Instant) -> Result<(), End> {
        let batch = core::mem::take(&mut self.batch);
        let inbox = core::mem::take(&mut self.inbox);
        let served = self.serve_items(&batch, &inbox, arrived);
        (self.batch, self.inbox) = (batch, inbox);
        served
    }

    fn serve_items(&mut self, batch: &[Item], inbox: &[u8], arrived: Instant) -> Result<(), End> {
        let Some(session) = self.session.clone() else { return Ok(()) };
        if batch.is_empty() {
            return Ok(());
        }
        self.take_turn();
        self.batch_bytes = read_bytes(batch);
        announce(&session, batch);
        for background in [false, true] {
            let mut requests =
                batch.iter().filter(|item| item.background == background).map(|item| request_of(inbox, item));
            let mut next = requests.next();
            while let Some(request) = next {
                let request = request.map_err(End::Broken)?;
                if let Some(first) = call_of(&request) {
                    let mut row = Row::new();
                    row.push((request, first));
                    loop {
                        next = requests.next();
                        let Some(Ok(following)) = next else { break };
                        match call_of(&following) {
                            Some(asked) if asked.is_like(&first) && !row.is_full() => row.push((following, asked)),
                            _ => break,
                        }
                    }
                    self.serve_calls(&session, &row, arrived)?;
                    self.take_turn();
                    continue;
                }
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

    /// Adds to the counters what was counted since.
    pub(super) fn add_up(&mut self) {
        if let Some(session) = &self.session {
            session.tenant.counters.copy(&self.tally);
        }
        self.shared.counters.add(&mut self.tally);
    }

    /// Waits for a turn at the processors; it is given back whenever the client is waited for.
    fn take_turn(&mut self) {
        if self.turn.is_none() {
            self.turn = self.ledger.as_ref().map(|ledger| ledger.work());
        }
    }

    /// Puts an answer into the outbox.
    fn answer(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.outbox.len();
        encode(&mut self.outbox);
        if self.shared.draining.load(Ordering::Relaxed) {
            mark_stopping(self.outbox.get_mut(start..).unwrap_or_default());
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
}

fn request_of<'i>(inbox: &'i [u8], item: &Item) -> Result<WireRequest<'i>, WireError> {
    if let Some(read) = item.read {
        return Ok(read);
    }
    let frame = inbox.get(item.bytes.clone()).unwrap_or_default();
    let head = Head::decode(frame)?.ok_or(WireError::Field("head"))?;
    WireRequest::decode(&head, frame.get(wire::HEAD_BYTES..).unwrap_or_default())
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

/// Flags a frame as sent by a server that is about to stop.
fn mark_stopping(frame: &mut [u8]) {
    const FLAGS_AT: usize = 5;
    if let Some(flags) = frame.get_mut(FLAGS_AT) {
        *flags |= wire::flags::STOPPING;
    }
}
