//! Control connection of a session: handshake, and requests that are made one at a time.
//!
//! Every lane is a connection of its own that joins the session. The control connection keeps the
//! session alive and carries everything that is not about pages. After [`ServerSession::open`] nothing
//! here allocates.

use crate::leaf::unix::check_server_user;
use crate::{Health, PoolError, Share};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::wire::{
    ErrorCode, HEADER_BYTES, Hello, MessageHeader, RefuseCode, Reply, Request, SessionSecret, VERSION_MAX, VERSION_MIN,
    Welcome, WireReply, WireRequest, features,
};
use farfield_core::{Incarnation, PageId, RegionId};
use farfield_os::net::{ConnectProgress, ConnectTarget};
use farfield_os::process::now_ns;
use farfield_os::{Errno, file, net};
use farfield_tls::{Connector, EncryptionSecret, LaneHandshake, RecordStream, SessionHandshake};
use std::cell::UnsafeCell;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Address at which a server listens.
#[derive(Clone, Debug)]
pub(crate) enum ServerAddress {
    Tcp(SocketAddr),
    /// An address with TLS, and how both sides know each other.
    Tls(SocketAddr, Connector),
    /// Path of a Unix socket (a leading `@` means the abstract namespace), and the users whose
    /// servers are trusted there.
    Unix(Vec<u8>, [Option<u32>; 2]),
}

impl ServerAddress {
    fn target(&self) -> Result<ConnectTarget, Errno> {
        match self {
            ServerAddress::Tcp(address) | ServerAddress::Tls(address, _) => Ok(ConnectTarget::tcp(*address)),
            ServerAddress::Unix(path, _) => ConnectTarget::unix(path),
        }
    }

    /// Returns the users whose servers are trusted, if the address is a Unix socket.
    fn users(&self) -> Option<[Option<u32>; 2]> {
        match self {
            ServerAddress::Tcp(_) | ServerAddress::Tls(..) => None,
            ServerAddress::Unix(_, users) => Some(*users),
        }
    }
}

/// Identity of the client, and its deadline for answers.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) token: Vec<u8>,
    pub(crate) client_name: String,
    pub(crate) deadline: Duration,
}

/// Table of every descriptor that a backend and its lanes hold, so that [`crate::Backend::abandon`]
/// finds them all. A free slot holds -1.
pub(crate) struct SessionDescriptorTable([AtomicI32; SessionDescriptorTable::MAX]);

impl SessionDescriptorTable {
    /// Greatest number of connections of one backend to one server.
    const MAX: usize = 1024;

    fn new() -> SessionDescriptorTable {
        SessionDescriptorTable([const { AtomicI32::new(-1) }; SessionDescriptorTable::MAX])
    }

    /// Puts a descriptor into a free slot and returns the slot; closes the descriptor if no slot is
    /// free.
    fn keep(&self, fd: i32) -> Result<usize, Errno> {
        for (place, held) in self.0.iter().enumerate() {
            if held.load(Ordering::Relaxed) == -1
                && held.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                return Ok(place);
            }
        }
        file::close(fd);
        Err(Errno(libc::EMFILE))
    }

    /// Closes the descriptor in `place`, unless it was closed before.
    fn close(&self, place: usize) {
        let fd = self.0[place].swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            file::close(fd);
        }
    }

    fn close_all(&self) {
        (0..Self::MAX).for_each(|place| self.close(place));
    }
}

/// Bytes of a connection: plain, or sealed in records. Its calls behave like the system calls.
pub(crate) struct ConnectionStream {
    fd: i32,
    records: Option<Box<RecordStream>>,
}

impl ConnectionStream {
    /// Sends bytes at `parts`; returns how many. After `EAGAIN` the next call must begin with the
    /// same bytes.
    ///
    /// # Safety
    /// As for [`net::send`].
    pub(crate) unsafe fn send(&mut self, parts: &[libc::iovec]) -> Result<usize, Errno> {
        match &mut self.records {
            // SAFETY: passed on to the caller.
            None => unsafe { net::send(self.fd, parts) },
            // SAFETY: passed on to the caller.
            Some(records) => unsafe { records.send(self.fd, parts) },
        }
    }

    /// Receives the bytes that are there into `parts`; returns how many. Less than there was room
    /// for means that nothing is left.
    ///
    /// # Safety
    /// As for [`net::receive`].
    pub(crate) unsafe fn receive(&mut self, parts: &[libc::iovec]) -> Result<usize, Errno> {
        match &mut self.records {
            // SAFETY: passed on to the caller.
            None => unsafe { net::receive(self.fd, parts) },
            // SAFETY: passed on to the caller.
            Some(records) => unsafe { records.receive(self.fd, parts) },
        }
    }

    /// Receives like [`ConnectionStream::receive`], and whatever descriptors come with the bytes. Records
    /// come with none.
    fn receive_descriptors(&mut self, into: &mut [u8], fds: &mut [i32]) -> Result<(usize, usize), Errno> {
        match &mut self.records {
            None => net::receive_descriptors(self.fd, into, fds),
            Some(records) => {
                let part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
                // SAFETY: the part is writable, and borrowed alone.
                unsafe { records.receive(self.fd, &[part]) }.map(|got| (got, 0))
            }
        }
    }

    /// Checks whether bytes are partly with the kernel that no call has counted as sent yet.
    fn is_sending(&self) -> bool {
        self.records.as_ref().is_some_and(|records| records.is_sending())
    }
}

/// Stream of the control connection, with its lock.
struct ControlStream {
    fd: i32,
    is_busy: AtomicBool,
    stream: UnsafeCell<ConnectionStream>,
}

// SAFETY: `stream` is used by whoever set `is_busy`, one thread at a time (`ControlStream::lock`).
unsafe impl Sync for ControlStream {}

impl ControlStream {
    /// Calls `use_it` with the stream once no other thread uses it. Returns `None` if that is not
    /// before `until`.
    fn lock<T>(&self, until: u64, use_it: impl FnOnce(&mut ConnectionStream) -> T) -> Option<T> {
        while self.is_busy.swap(true, Ordering::Acquire) {
            if now_ns() > until {
                return None;
            }
            farfield_os::process::yield_now();
        }
        // SAFETY: `is_busy` was false, so no other thread is between here and the store below.
        let result = use_it(unsafe { &mut *self.stream.get() });
        self.is_busy.store(false, Ordering::Release);
        Some(result)
    }
}

/// Session with one server.
pub(crate) struct ServerSession {
    pub(crate) server: u16,
    pub(crate) welcome: Welcome,
    address: ServerAddress,
    deadline: Duration,
    /// Hello message that further connections of the session send first.
    greeting: Vec<u8>,
    descriptors: Box<SessionDescriptorTable>,
    control: ControlStream,
    /// Secret from which lanes get their keys, if the connections are encrypted.
    secret: Option<EncryptionSecret>,
    /// Whether another process began the session, and will end it.
    is_guest: bool,
    gone: AtomicBool,
    abandoned: AtomicBool,
    tags: AtomicU64,
}

/// Connection that belongs to a session; closed when dropped, unless the session was abandoned.
pub(crate) struct SessionConnection {
    session: Arc<ServerSession>,
    place: usize,
    pub(crate) fd: i32,
    /// Stream that is used once the connection has joined; until then the handshake has it.
    pub(crate) stream: ConnectionStream,
    is_joined: bool,
    /// Handshake, if it did not finish at once. It stays until the connection is dropped: a thread
    /// that polls lanes must not free memory.
    handshake: Option<Box<Handshake>>,
}

impl SessionConnection {
    /// Checks whether the connection has joined the session. Goes on with the handshake as far as
    /// that can be done without blocking.
    pub(crate) fn try_join(&mut self) -> Result<bool, PoolError> {
        if let (false, Some(handshake)) = (self.is_joined, &mut self.handshake)
            && let Some(welcome) = handshake.advance().map_err(|error| self.session.join_error(error))?
        {
            // Session secrets are random, so another server cannot know this one. The incarnation
            // is checked all the same.
            if welcome.incarnation != self.session.welcome.incarnation {
                self.session.set_gone();
                return Err(self.session.gone_error());
            }
            self.stream.records = handshake.stream.records.take();
            self.is_joined = true;
        }
        Ok(self.is_joined)
    }

    pub(crate) fn is_joined(&self) -> bool {
        self.is_joined
    }

    /// Returns the poll events to wait for until [`SessionConnection::try_join`] can go on.
    pub(crate) fn join_events(&self) -> i16 {
        self.handshake.as_ref().map_or(0, |handshake| handshake.events())
    }

    /// Waits until [`SessionConnection::try_join`] can go on, at most `most`.
    pub(crate) fn wait_to_join(&self, most: Duration) {
        if let (false, Some(handshake)) = (self.is_joined, &self.handshake) {
            handshake.wait(most);
        }
    }
}

impl Drop for SessionConnection {
    fn drop(&mut self) {
        if !self.session.abandoned.load(Ordering::Relaxed) {
            self.session.descriptors.close(self.place);
        }
    }
}

/// Reason why a session could not be opened.
pub(crate) enum HandshakeError {
    /// Error that is not specific to the handshake.
    Pool(PoolError),
    /// The server refused, for this reason.
    Refused(String),
    /// The connection could not be encrypted, for this reason.
    Tls(String),
    /// The connection was closed without an answer.
    HungUp,
}

impl From<PoolError> for HandshakeError {
    fn from(error: PoolError) -> Self {
        HandshakeError::Pool(error)
    }
}

/// Length in bytes of the longest question: the greeting with its token and name.
const QUESTION_MAX: usize = HEADER_BYTES + 40 + Hello::TOKEN_BYTES_MAX + Hello::NAME_BYTES_MAX;
/// Length in bytes of the longest body of an answer to a control request.
pub(crate) const CONTROL_BODY_MAX: usize = 1024;
/// Time that a new connection waits for the server before it is returned without having joined.
const JOIN_TIMEOUT: Duration = Duration::from_millis(50);
/// Pause before connecting again when the server's queue is full.
const CONNECT_AGAIN: Duration = Duration::from_millis(1);

impl ServerSession {
    /// Connects and starts a new session, or joins that of another process. Blocks, at most
    /// `within`.
    pub(crate) fn open(
        server: u16,
        address: ServerAddress,
        identity: &Identity,
        within: Duration,
        joins: Option<SessionSecret>,
    ) -> Result<ServerSession, HandshakeError> {
        let is_guest = joins.is_some();
        let hello = greeting(&address, identity, joins, is_guest);
        let mut handshake = Handshake::begin(server, &address, &hello, None)?.with_records();
        let (descriptors, fd) = (Box::new(SessionDescriptorTable::new()), handshake.stream.fd);
        descriptors.keep(fd).map_err(PoolError::Os)?;
        let welcome = handshake.finish(within, Handshake::advance);
        let welcome = welcome.and_then(|welcome| welcome.ok_or(PoolError::TimedOut { server, after: within }.into()));
        let welcome = welcome.inspect_err(|_| descriptors.close_all())?;
        Ok(ServerSession {
            server,
            greeting: greeting(&address, identity, Some(welcome.session), is_guest),
            welcome,
            address,
            deadline: identity.deadline,
            descriptors,
            control: ControlStream { fd, is_busy: AtomicBool::new(false), stream: UnsafeCell::new(handshake.stream) },
            secret: handshake.secret,
            is_guest,
            gone: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            tags: AtomicU64::new(1),
        })
    }

    /// Opens another connection of this session. Blocks for at most [`JOIN_TIMEOUT`]: if the
    /// server has not answered by then, the connection has not [joined](Connection::try_join) yet.
    /// A silent server must not delay callers who can do without it.
    pub(crate) fn join(self: &Arc<Self>) -> Result<SessionConnection, PoolError> {
        let error = |error| self.join_error(error);
        let handshake = Handshake::begin(self.server, &self.address, &self.greeting, Some(self));
        let handshake = handshake.map_err(error)?.with_records();
        let fd = handshake.stream.fd;
        let place = self.descriptors.keep(fd).map_err(PoolError::Os)?;
        let handshake = Some(Box::new(handshake));
        let stream = ConnectionStream { fd, records: None };
        let mut connection =
            SessionConnection { session: self.clone(), place, fd, stream, is_joined: false, handshake };
        let until = now_ns().saturating_add(JOIN_TIMEOUT.as_nanos() as u64);
        while !connection.try_join()? {
            match until.saturating_sub(now_ns()) {
                0 => return Ok(connection),
                left => connection.wait_to_join(Duration::from_nanos(left)),
            }
        }
        connection.handshake = None;
        Ok(connection)
    }

    /// Checks whether the server answers a new connection within that time.
    pub(crate) fn answers(&self, within: Duration) -> bool {
        // Any other error will show at the next question.
        let Ok(mut handshake) = Handshake::begin(self.server, &self.address, &self.greeting, Some(self)) else {
            return true;
        };
        let answer = match self.secret {
            None => handshake.finish(within, Handshake::advance).map(|welcome| welcome.is_some()),
            // The server's nonce is an answer; a greeting in records would need memory.
            Some(_) => handshake.finish(within, Handshake::advance_encryption).map(|keys| keys.is_some()),
        };
        file::close(handshake.stream.fd);
        !matches!(answer, Ok(false))
    }

    fn join_error(&self, error: HandshakeError) -> PoolError {
        match error {
            // The server was there when the session began.
            HandshakeError::HungUp => self.gone_error(),
            HandshakeError::Pool(PoolError::Os(errno)) if is_of_the_gone(errno) => self.gone_error(),
            HandshakeError::Pool(PoolError::ServerGone { .. }) => {
                self.set_gone();
                self.gone_error()
            }
            HandshakeError::Pool(error) => error,
            HandshakeError::Refused(_) | HandshakeError::Tls(_) => self.gone_error(),
        }
    }

    /// Sends one request and waits for the answer, at most `within`. After a time-out the server
    /// may still carry out the request later.
    pub(crate) fn ask(&self, request: Request<'_>, within: Duration) -> Result<Reply, PoolError> {
        let (reply, _) = self.ask_for_descriptors(request, within, &mut [])?;
        Ok(reply)
    }

    /// Sends one request whose answer is more than a [`Reply`]. Puts the whole body of the answer
    /// into `body` and returns its length, too.
    #[cfg(feature = "fabric")]
    pub(crate) fn ask_for_body(
        &self,
        request: Request<'_>,
        within: Duration,
        body: &mut [u8; CONTROL_BODY_MAX],
    ) -> Result<(Reply, usize), PoolError> {
        let (reply, length, _) = self.ask_for_all(request, within, body, &mut [])?;
        Ok((reply, length))
    }

    /// Sends one request whose answer brings descriptors. Returns their number, too; the caller
    /// closes them.
    pub(crate) fn ask_for_descriptors(
        &self,
        request: Request<'_>,
        within: Duration,
        fds: &mut [i32],
    ) -> Result<(Reply, usize), PoolError> {
        let (reply, _, count) = self.ask_for_all(request, within, &mut [0; CONTROL_BODY_MAX], fds)?;
        Ok((reply, count))
    }

    /// Sends one request. Returns the answer, the length of its body and the number of descriptors.
    fn ask_for_all(
        &self,
        request: Request<'_>,
        within: Duration,
        body: &mut [u8; CONTROL_BODY_MAX],
        fds: &mut [i32],
    ) -> Result<(Reply, usize, usize), PoolError> {
        if self.gone.load(Ordering::Relaxed) {
            return Err(self.gone_error());
        }
        let until = now_ns().saturating_add(within.as_nanos() as u64);
        let answer = self.control.lock(until, |stream| {
            let tag = self.tags.fetch_add(1, Ordering::Relaxed);
            exchange(stream, tag, request, until, body, fds)
        });
        match answer.ok_or(PoolError::TimedOut { server: self.server, after: within })? {
            Ok((Reply::Failed { code, page }, _, count)) => {
                fds[..count].iter().for_each(|fd| file::close(*fd));
                Err(self.failure(code, PageId(page), within))
            }
            Ok(answer) => Ok(answer),
            // The answer may still come; it is skipped then.
            Err(ExchangeError::Silent) => Err(PoolError::TimedOut { server: self.server, after: within }),
            Err(failure) => {
                // It is unknown where the next answer begins in the stream.
                self.set_gone();
                Err(match failure {
                    ExchangeError::Silent | ExchangeError::TimedOut => {
                        PoolError::TimedOut { server: self.server, after: within }
                    }
                    ExchangeError::Os(errno) => PoolError::Os(errno),
                    ExchangeError::Gone | ExchangeError::Malformed => self.gone_error(),
                })
            }
        }
    }

    /// Adds a descriptor to the table, so that it is closed with the others; returns its slot.
    /// Closes it if there is no room.
    pub(crate) fn keep(&self, fd: i32) -> Result<usize, Errno> {
        self.descriptors.keep(fd)
    }

    /// Closes the descriptor in slot `place`.
    pub(crate) fn close(&self, place: usize) {
        self.descriptors.close(place);
    }

    pub(crate) fn gone_error(&self) -> PoolError {
        PoolError::ServerGone { server: self.server, incarnation: self.incarnation() }
    }

    /// Translates an error of a connection into an error of the pool.
    pub(crate) fn broken_error(&self, errno: Errno) -> PoolError {
        match errno.0 {
            libc::ECONNRESET | libc::EPIPE | libc::ENOTCONN | libc::ETIMEDOUT | libc::EHOSTUNREACH => self.gone_error(),
            // A record was changed on its way: nothing that comes now can be trusted.
            libc::EBADMSG => self.gone_error(),
            _ => PoolError::Os(errno),
        }
    }

    /// Returns the right of another process to a region of this session.
    pub(crate) fn share(&self, region: RegionId, pages: u64) -> Share {
        Share { session: self.welcome.session.0, region: region.0, pages }
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        self.welcome.incarnation
    }

    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Returns the state of the server as far as it is visible without asking it: whether it has
    /// hung up.
    pub(crate) fn health(&self) -> Health {
        let ends = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
        if !self.is_gone()
            && net::poll(self.control.fd, libc::POLLRDHUP, Duration::ZERO).is_ok_and(|end| end & ends != 0)
        {
            self.set_gone();
        }
        if self.is_gone() { Health::Gone } else { Health::Good }
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Translates the server's error code into an error for the user of the pool.
    pub(crate) fn failure(&self, code: ErrorCode, page: PageId, after: Duration) -> PoolError {
        let server = self.server;
        match code {
            ErrorCode::PoolFull => PoolError::PoolFull { server },
            ErrorCode::TimedOut => PoolError::TimedOut { server, after },
            ErrorCode::Corrupt => PoolError::Corrupt { page, server },
            code => PoolError::Refused { server, reason: code.text() },
        }
    }

    /// Tells the server that the session ends, so that it frees the regions now and not when the
    /// lease runs out. Waits 200 ms at most. It does no harm if the server does not hear it. Does
    /// nothing for a guest.
    pub(crate) fn farewell(&self) {
        if self.is_guest {
            return;
        }
        let _ = self.ask(Request::Bye, self.deadline.min(Duration::from_millis(200)));
    }

    /// Closes every connection without a word to the server.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.set_gone();
        self.descriptors.close_all();
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }
}

impl Drop for ServerSession {
    fn drop(&mut self) {
        if !self.is_abandoned() && !self.is_gone() {
            self.farewell();
        }
        self.descriptors.close_all();
    }
}

/// Reason why a request has no answer.
pub(crate) enum ExchangeError {
    Gone,
    Malformed,
    /// The deadline passed in the middle of a message.
    TimedOut,
    /// The deadline passed before any byte of the message was moved.
    Silent,
    Os(Errno),
}

/// Checks whether this error means that there is no server any more.
fn is_of_the_gone(errno: Errno) -> bool {
    // ENOENT: a server that ends takes its socket file with it.
    matches!(
        errno.0,
        libc::ECONNRESET | libc::EPIPE | libc::ENOTCONN | libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENOENT
    )
}

impl From<Errno> for ExchangeError {
    fn from(errno: Errno) -> Self {
        match errno.0 {
            _ if is_of_the_gone(errno) => ExchangeError::Gone,
            libc::ETIMEDOUT => ExchangeError::TimedOut,
            _ => ExchangeError::Os(errno),
        }
    }
}

/// Sends one request on a connection that no other thread uses meanwhile. Returns the answer, the
/// length of its body and the number of descriptors.
fn exchange(
    stream: &mut ConnectionStream,
    tag: u64,
    request: Request<'_>,
    until: u64,
    body: &mut [u8; CONTROL_BODY_MAX],
    fds: &mut [i32],
) -> Result<(Reply, usize, usize), ExchangeError> {
    let left = Duration::from_nanos(until.saturating_sub(now_ns()));
    let request = WireRequest { tag, background: false, deadline: Some(left), request };
    let mut bytes = [0; HEADER_BYTES + 16];
    let mut len = HEADER_BYTES;
    bytes[..HEADER_BYTES].copy_from_slice(&request.header().encode());
    if let Request::ClaimRegion { ticket } = request.request {
        bytes[HEADER_BYTES..].copy_from_slice(&ticket.to_le_bytes());
        len += 16;
    }
    send_all(stream, &bytes[..len], until)?;
    let wanted = request.header().kind;
    loop {
        let (header, len, count) = receive_frame(stream, body, until, fds)?;
        let answer = WireReply::decode(&header, &body[..len]).map_err(|_| ExchangeError::Malformed);
        let is_right = |answer: &WireReply| answer.kind.is_none_or(|kind| kind as u8 == wanted);
        match answer {
            Ok(answer) if answer.tag == tag && is_right(&answer) => return Ok((answer.reply, len, count)),
            answer => {
                fds[..count].iter().for_each(|fd| file::close(*fd));
                // The answer to an earlier question that was given up is skipped.
                if !answer.is_ok_and(|answer| answer.tag < tag) {
                    return Err(ExchangeError::Malformed);
                }
            }
        }
    }
}

fn time_left(until: u64) -> Result<Duration, ExchangeError> {
    match until.saturating_sub(now_ns()) {
        0 => Err(ExchangeError::TimedOut),
        nanos => Ok(Duration::from_nanos(nanos)),
    }
}

fn send_all(stream: &mut ConnectionStream, mut bytes: &[u8], until: u64) -> Result<(), ExchangeError> {
    let all = bytes.len();
    while !bytes.is_empty() {
        let part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: `bytes` is readable.
        match unsafe { stream.send(&[part]) } {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno(libc::EAGAIN)) => {
                let is_unsent = bytes.len() == all && !stream.is_sending();
                let left = time_left(until).map_err(|error| if is_unsent { ExchangeError::Silent } else { error })?;
                net::poll(stream.fd, libc::POLLOUT, left)?;
            }
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Receives exactly `into.len()` bytes and whatever descriptors come with them; returns the number
/// of descriptors.
fn receive_all(
    stream: &mut ConnectionStream,
    into: &mut [u8],
    until: u64,
    fds: &mut [i32],
) -> Result<usize, ExchangeError> {
    let mut done = 0;
    let mut descriptors = 0;
    let result = loop {
        if done == into.len() {
            break Ok(());
        }
        match stream.receive_descriptors(&mut into[done..], &mut fds[descriptors..]) {
            Ok((0, _)) => break Err(ExchangeError::Gone),
            Ok((bytes, count)) => {
                done += bytes;
                descriptors += count;
            }
            Err(Errno(libc::EAGAIN)) => {
                let waited = time_left(until).and_then(|left| Ok(net::poll(stream.fd, libc::POLLIN, left)?));
                match waited {
                    Ok(_) => {}
                    Err(ExchangeError::TimedOut) if done == 0 => break Err(ExchangeError::Silent),
                    Err(error) => break Err(error),
                }
            }
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => break Err(errno.into()),
        }
    };
    match result {
        Ok(()) => Ok(descriptors),
        Err(error) => {
            fds[..descriptors].iter().for_each(|fd| file::close(*fd));
            Err(error)
        }
    }
}

fn receive_frame(
    stream: &mut ConnectionStream,
    body: &mut [u8],
    until: u64,
    fds: &mut [i32],
) -> Result<(MessageHeader, usize, usize), ExchangeError> {
    let mut bytes = [0; HEADER_BYTES];
    let count = receive_all(stream, &mut bytes, until, fds)?;
    let rest = match MessageHeader::decode(&bytes) {
        Ok(Some(header)) if header.body as usize <= body.len() => {
            let rest = receive_all(stream, &mut body[..header.body as usize], until, &mut []);
            rest.map(|_| header)
                .map_err(|error| if let ExchangeError::Silent = error { ExchangeError::TimedOut } else { error })
        }
        _ => Err(ExchangeError::Malformed),
    };
    match rest {
        Ok(header) => Ok((header, header.body as usize, count)),
        Err(error) => {
            fds[..count].iter().for_each(|fd| file::close(*fd));
            Err(error)
        }
    }
}

/// Encodes the hello message that a client sends first.
fn greeting(address: &ServerAddress, identity: &Identity, session: Option<SessionSecret>, is_guest: bool) -> Vec<u8> {
    let one_sided = match address {
        // A guest shares the region with others, so it has the server write it.
        _ if is_guest => 0,
        ServerAddress::Unix(..) => features::MAP,
        ServerAddress::Tcp(_) => features::FABRIC,
        ServerAddress::Tls(..) => 0,
    };
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: features::CLONE | features::PART | features::CALL | one_sided,
        session,
        token: &identity.token,
        client_name: &identity.client_name,
    };
    let mut bytes = Vec::with_capacity(QUESTION_MAX);
    hello.encode(&mut bytes);
    bytes
}

/// Beginning of a connection: a state machine whose steps never wait. Joining a session allocates
/// nothing.
struct Handshake {
    server: u16,
    stream: ConnectionStream,
    joins: bool,
    target: ConnectTarget,
    /// Users whose servers are trusted at a Unix socket ([`ServerAddress::users`]).
    users: Option<[Option<u32>; 2]>,
    /// Result of the last attempt to connect.
    connected: ConnectProgress,
    /// Step that comes before the exchange.
    encryption: Encryption,
    /// Secret of a session that this handshake has begun.
    secret: Option<EncryptionSecret>,
    exchange: Exchange,
}

/// Step of a handshake that gives a connection its keys.
enum Encryption {
    /// Nothing is left to do.
    Done,
    /// The connection begins a session.
    Session(Box<SessionHandshake>),
    /// The connection joins one. Not in a box, which would have to be freed where a lane is polled.
    Lane(LaneHandshake),
}

impl Handshake {
    /// Creates a socket and the state machine for it, which joins a session of this process or
    /// begins one. The caller must close the socket.
    fn begin(
        server: u16,
        address: &ServerAddress,
        hello: &[u8],
        joined: Option<&ServerSession>,
    ) -> Result<Handshake, HandshakeError> {
        let target = address.target().map_err(PoolError::Os)?;
        let encryption = match (address, joined.map(|session| &session.secret)) {
            (ServerAddress::Tls(..), Some(Some(secret))) => {
                Encryption::Lane(LaneHandshake::new(secret).map_err(PoolError::Os)?)
            }
            (ServerAddress::Tls(_, connector), _) => {
                let handshake = SessionHandshake::new(connector);
                Encryption::Session(Box::new(handshake.map_err(|error| HandshakeError::Tls(error.to_string()))?))
            }
            _ => Encryption::Done,
        };
        Ok(Handshake {
            server,
            stream: ConnectionStream { fd: target.socket().map_err(PoolError::Os)?, records: None },
            joins: joined.is_some(),
            target,
            users: address.users(),
            connected: ConnectProgress::Retry,
            encryption,
            secret: None,
            exchange: Exchange::new(hello),
        })
    }

    /// Allocates the buffers of records, if the connection will have any.
    fn with_records(mut self) -> Handshake {
        if !matches!(self.encryption, Encryption::Done) {
            self.stream.records = Some(Box::new(RecordStream::new()));
        }
        self
    }

    /// Returns the poll events to wait for.
    fn events(&self) -> i16 {
        match &self.encryption {
            Encryption::Done => self.exchange.events(),
            Encryption::Session(handshake) => handshake.events(),
            Encryption::Lane(handshake) => handshake.events(),
        }
    }

    /// Runs the handshake to the end of `step`. Returns `None` if that takes longer than `within`.
    fn finish<T>(
        &mut self,
        within: Duration,
        step: impl Fn(&mut Self) -> Result<Option<T>, HandshakeError>,
    ) -> Result<Option<T>, HandshakeError> {
        let until = now_ns().saturating_add(within.as_nanos() as u64);
        loop {
            if let Some(result) = step(self)? {
                return Ok(Some(result));
            }
            match until.saturating_sub(now_ns()) {
                0 => return Ok(None),
                left => self.wait(Duration::from_nanos(left)),
            }
        }
    }

    /// Waits until there is something to do, at most `most`.
    fn wait(&self, most: Duration) {
        if self.connected == ConnectProgress::Retry {
            return farfield_os::process::sleep(most.min(CONNECT_AGAIN));
        }
        // If something is wrong with the socket, the next step will show it.
        let _ = net::poll(self.stream.fd, self.events(), most);
    }

    /// Advances as far as possible without blocking. Returns `None` if the handshake has not
    /// ended yet.
    fn advance(&mut self) -> Result<Option<Welcome>, HandshakeError> {
        if self.advance_encryption()?.is_none() {
            return Ok(None);
        }
        match self.exchange.advance(&mut self.stream) {
            Ok(Some((header, body))) => Self::read_answer(self.server, self.joins, &header, body).map(Some),
            Ok(None) => Ok(None),
            Err(ExchangeError::Gone) => Err(HandshakeError::HungUp),
            Err(ExchangeError::Malformed) => Err(stranger(self.server).into()),
            Err(ExchangeError::TimedOut | ExchangeError::Silent) => Err(PoolError::Os(Errno(libc::ETIMEDOUT)).into()),
            Err(ExchangeError::Os(errno)) => Err(PoolError::Os(errno).into()),
        }
    }

    /// Connects, and advances until the connection has keys, if it needs any. Returns `None` if it
    /// is not that far yet.
    fn advance_encryption(&mut self) -> Result<Option<()>, HandshakeError> {
        if self.connected != ConnectProgress::Done {
            self.connected = self.target.connect(self.stream.fd).map_err(PoolError::Os)?;
            if self.connected != ConnectProgress::Done {
                return Ok(None);
            }
            if let Some(users) = self.users {
                // SAFETY: the socket is open; closing it is for the caller of `begin`.
                check_server_user(unsafe { BorrowedFd::borrow_raw(self.stream.fd) }, self.server, &users)?;
            }
        }
        let fd = self.stream.fd;
        let keys = match &mut self.encryption {
            Encryption::Done => return Ok(Some(())),
            Encryption::Session(handshake) => match handshake.advance(fd) {
                Ok(None) => return Ok(None),
                Ok(Some((secret, keys))) => {
                    self.secret = Some(secret);
                    keys
                }
                Err(error) => return Err(session_error(error)),
            },
            Encryption::Lane(handshake) => match handshake.advance(fd) {
                Ok(None) => return Ok(None),
                Ok(Some(keys)) => keys,
                Err(error) => return Err(lane_error(self.server, &error)),
            },
        };
        if let Some(records) = &mut self.stream.records {
            records.set_client_keys(&keys);
        }
        self.encryption = Encryption::Done;
        Ok(Some(()))
    }

    fn read_answer(server: u16, joins: bool, header: &MessageHeader, body: &[u8]) -> Result<Welcome, HandshakeError> {
        match Welcome::decode(header, body) {
            Err(_) => Err(stranger(server).into()),
            Ok(Err(refusal)) => Err(match refusal.code {
                RefuseCode::Version => {
                    PoolError::Version { server, theirs: refusal.version_max, ours: VERSION_MAX }.into()
                }
                RefuseCode::Token => {
                    PoolError::Refused { server, reason: "wrong token: give the one the server was started with" }
                        .into()
                }
                // The session is over, or another server listens at the same address.
                RefuseCode::Session if joins => PoolError::ServerGone { server, incarnation: Incarnation(0) }.into(),
                // Lanes join while they are polled, so nothing may be allocated here.
                _ if joins => {
                    PoolError::Refused { server, reason: "the session does not take another connection" }.into()
                }
                _ => HandshakeError::Refused(refusal.text.to_owned()),
            }),
            Ok(Ok(welcome)) if !(VERSION_MIN..=VERSION_MAX).contains(&welcome.version) => {
                Err(PoolError::Version { server, theirs: welcome.version, ours: VERSION_MAX }.into())
            }
            Ok(Ok(welcome)) => Ok(welcome),
        }
    }
}

/// Translates the error of a handshake that begins a session.
fn session_error(error: farfield_tls::EncryptionError) -> HandshakeError {
    use farfield_tls::EncryptionError as Tls;
    match error {
        Tls::HungUp => HandshakeError::HungUp,
        Tls::Os(errno) => PoolError::Os(errno).into(),
        Tls::Plain(bytes) => {
            // A server with TLS that has no slot for a connection says so without a handshake.
            let header = MessageHeader::decode(&bytes).ok().flatten();
            let body = bytes.get(HEADER_BYTES..).unwrap_or_default();
            match header.map(|header| Welcome::decode(&header, body)) {
                Some(Ok(Err(refusal))) if refusal.code == RefuseCode::Connections => {
                    HandshakeError::Refused(refusal.text.to_owned())
                }
                _ => HandshakeError::Tls(Tls::NoTls.to_string()),
            }
        }
        error => HandshakeError::Tls(error.to_string()),
    }
}

/// Translates the error of a lane's handshake. Allocates nothing: lanes join while they are polled.
fn lane_error(server: u16, error: &farfield_tls::EncryptionError) -> HandshakeError {
    use farfield_tls::EncryptionError as Tls;
    match error {
        Tls::HungUp => HandshakeError::HungUp,
        Tls::Os(errno) => PoolError::Os(*errno).into(),
        Tls::SessionUnknown => PoolError::ServerGone { server, incarnation: Incarnation(0) }.into(),
        _ => stranger(server).into(),
    }
}

fn stranger(server: u16) -> PoolError {
    PoolError::Refused { server, reason: "it is not a Farfield memory server" }
}

/// Question and its answer on a connection: a state machine whose steps never wait.
pub(crate) struct Exchange {
    question: [u8; QUESTION_MAX],
    asked: usize,
    sent: usize,
    answer: [u8; HEADER_BYTES + CONTROL_BODY_MAX],
    received: usize,
}

impl Exchange {
    /// Begins with this question, which may be empty.
    pub(crate) fn new(question: &[u8]) -> Exchange {
        let answer = [0; HEADER_BYTES + CONTROL_BODY_MAX];
        let mut exchange = Exchange { question: [0; QUESTION_MAX], asked: 0, sent: 0, answer, received: 0 };
        exchange.put(question);
        exchange
    }

    fn put(&mut self, question: &[u8]) {
        self.question[..question.len()].copy_from_slice(question);
        (self.asked, self.sent, self.received) = (question.len(), 0, 0);
    }

    /// Begins another question, after the answer to the one before.
    pub(crate) fn ask(&mut self, header: &MessageHeader) {
        self.put(&header.encode());
    }

    /// Returns the poll events to wait for.
    pub(crate) fn events(&self) -> i16 {
        if self.sent < self.asked { libc::POLLOUT } else { libc::POLLIN }
    }

    /// Sends and receives what can be moved without blocking. Returns the answer once it is
    /// complete.
    pub(crate) fn advance(
        &mut self,
        stream: &mut ConnectionStream,
    ) -> Result<Option<(MessageHeader, &[u8])>, ExchangeError> {
        while self.sent < self.asked {
            let left = &self.question[self.sent..self.asked];
            let part = libc::iovec { iov_base: left.as_ptr().cast_mut().cast(), iov_len: left.len() };
            // SAFETY: what is left is readable.
            match unsafe { stream.send(&[part]) } {
                Ok(sent) => self.sent += sent,
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        loop {
            let wanted = match MessageHeader::decode(&self.answer[..self.received]) {
                Ok(None) => HEADER_BYTES,
                Ok(Some(header)) if header.body as usize > CONTROL_BODY_MAX => return Err(ExchangeError::Malformed),
                Ok(Some(header)) if self.received == HEADER_BYTES + header.body as usize => {
                    return Ok(Some((header, &self.answer[HEADER_BYTES..self.received])));
                }
                Ok(Some(header)) => HEADER_BYTES + header.body as usize,
                Err(_) => return Err(ExchangeError::Malformed),
            };
            let free = &mut self.answer[self.received..wanted];
            let part = libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() };
            // SAFETY: the part is ours and writable.
            match unsafe { stream.receive(&[part]) } {
                Ok(0) => return Err(ExchangeError::Gone),
                Ok(got) => self.received += got,
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
