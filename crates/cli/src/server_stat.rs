//! Client that asks a memory server for its statistics.

use anyhow::{Context, anyhow, bail, ensure};
use farfield_core::wire::{
    HEADER_BYTES, Hello, MessageHeader, Reply, Request, Stat, VERSION_MAX, VERSION_MIN, Welcome, WireReply,
    WireRequest, encode_request,
};
use farfield_os::{Errno, net};
use farfield_pool::{UnixSocket, check_server_user, leaf_urls, tls_connector};
use farfield_tls::{RecordStream, SessionHandshake};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

/// Longest time that the server may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Most bytes in the body of an answer.
const BODY_BYTES_MAX: usize = 4096;

trait ByteStream: Read + Write + Send {}
impl<T: Read + Write + Send> ByteStream for T {}

/// Returns the URLs of the servers that keep pages of a pool and can be asked.
pub(crate) fn servers_of(pool_url: &str) -> impl Iterator<Item = &str> {
    let is_network = |url: &str| url.starts_with("tcp://") || url.starts_with("tls://");
    leaf_urls(pool_url).filter(move |url| is_network(url) || UnixSocket::parse(url).is_some())
}

/// Client that only asks for statistics.
pub(crate) struct StatClient {
    url: String,
    token: Vec<u8>,
    server_uid: Option<u32>,
    connected: Option<ServerConnection>,
}

/// Statistics of a server.
pub(crate) struct ServerStats {
    /// Random number that tells this run of the server from others.
    pub(crate) incarnation: u64,
    /// Counters by name.
    pub(crate) numbers: BTreeMap<&'static str, u64>,
}

struct ServerConnection {
    stream: Box<dyn ByteStream>,
    incarnation: u64,
    tag: u64,
}

impl StatClient {
    /// Makes a client for the server at `url`, without connecting. At a Unix socket, the server may
    /// also belong to user `server_uid`.
    pub(crate) fn new(url: &str, token: Vec<u8>, server_uid: Option<u32>) -> anyhow::Result<StatClient> {
        ensure!(token.len() <= Hello::TOKEN_BYTES_MAX, "the token is longer than {} bytes", Hello::TOKEN_BYTES_MAX);
        let mut urls = farfield_pool::resolve_urls(&[url])?;
        Ok(StatClient { url: urls.remove(0), token, server_uid, connected: None })
    }

    /// Asks for the server's counters. Connects first if needed, and reconnects once if the
    /// connection was lost. Each read and write blocks for [`ANSWER_WITHIN`] at most.
    pub(crate) fn ask(&mut self) -> anyhow::Result<ServerStats> {
        let again = self.connected.is_some();
        match self.ask_once() {
            Err(_) if again => {
                self.connected = None;
                self.ask_once()
            }
            answer => answer,
        }
        .with_context(|| format!("memory server {}", self.url))
    }

    fn ask_once(&mut self) -> anyhow::Result<ServerStats> {
        let connected = match &mut self.connected {
            Some(connected) => connected,
            None => self.connected.insert(ServerConnection::open(&self.url, &self.token, self.server_uid)?),
        };
        let stat = connected.stat()?;
        Ok(ServerStats { incarnation: connected.incarnation, numbers: named(&stat) })
    }
}

impl ServerConnection {
    fn open(url: &str, token: &[u8], server_uid: Option<u32>) -> anyhow::Result<ServerConnection> {
        let mut stream = connect(url, server_uid)?;
        let mut bytes = Vec::new();
        let hello = Hello {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: 0,
            session: None,
            token,
            client_name: "farfield top",
        };
        hello.encode(&mut bytes);
        stream.write_all(&bytes)?;
        let (head, body) = receive(&mut *stream)?;
        match Welcome::decode(&head, &body)? {
            Ok(welcome) => Ok(ServerConnection { stream, incarnation: welcome.incarnation.0, tag: 0 }),
            Err(refusal) => bail!("refused: {} (a token is given with --token-file or FARFIELD_TOKEN)", refusal.text),
        }
    }

    fn stat(&mut self) -> anyhow::Result<Stat> {
        self.tag += 1;
        let mut bytes = Vec::new();
        let deadline = Some(ANSWER_WITHIN);
        let request = WireRequest { tag: self.tag, background: false, deadline, request: Request::Stat };
        encode_request(&request, &mut bytes);
        self.stream.write_all(&bytes)?;
        let (head, body) = receive(&mut *self.stream)?;
        match WireReply::decode(&head, &body)? {
            WireReply { tag, reply: Reply::Stat(stat), .. } if tag == self.tag => Ok(stat),
            WireReply { reply: Reply::Failed { code, .. }, .. } => bail!("{}", code.text()),
            _ => bail!("its answer is not valid"),
        }
    }
}

/// Connection with TLS. Each of its calls blocks for [`ANSWER_WITHIN`] at most.
struct TlsStream {
    socket: TcpStream,
    records: RecordStream,
}

impl TlsStream {
    fn open(url: &str) -> anyhow::Result<TlsStream> {
        let (address, connector) = tls_connector(url).map_err(anyhow::Error::msg)?;
        let socket = TcpStream::connect_timeout(&address, ANSWER_WITHIN)?;
        socket.set_nodelay(true)?;
        let mut handshake = SessionHandshake::new(&connector).map_err(|error| anyhow!("{error}"))?;
        let until = Instant::now() + ANSWER_WITHIN;
        let mut records = RecordStream::new();
        loop {
            if let Some((_, keys)) = handshake.advance(socket.as_raw_fd()).map_err(|error| anyhow!("{error}"))? {
                records.set_client_keys(&keys);
                return Ok(TlsStream { socket, records });
            }
            wait(&socket, handshake.events(), until)?;
        }
    }

    /// Calls `step` until it does not have to wait for `events` any more.
    fn finish<T>(
        &mut self,
        events: i16,
        mut step: impl FnMut(&mut RecordStream, i32) -> Result<T, Errno>,
    ) -> io::Result<T> {
        let until = Instant::now() + ANSWER_WITHIN;
        loop {
            match step(&mut self.records, self.socket.as_raw_fd()) {
                Ok(result) => return Ok(result),
                Err(errno) if errno.is_transient() => wait(&self.socket, events, until)?,
                Err(errno) => return Err(io::Error::from_raw_os_error(errno.0)),
            }
        }
    }
}

/// Waits for one of `events`. Fails when `until` has passed.
fn wait(socket: &TcpStream, events: i16, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    net::poll(socket.as_raw_fd(), events, left).map(drop).map_err(|errno| io::Error::from_raw_os_error(errno.0))
}

impl Read for TlsStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.finish(libc::POLLIN, |records, fd| records.read(fd, into))
    }
}

impl Write for TlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.finish(libc::POLLOUT, |records, fd| records.write(fd, bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn connect(url: &str, server_uid: Option<u32>) -> anyhow::Result<Box<dyn ByteStream>> {
    if url.starts_with("tls://") {
        return Ok(Box::new(TlsStream::open(url)?));
    }
    if let Some(address) = url.strip_prefix("tcp://") {
        let stream = TcpStream::connect_timeout(&address.parse()?, ANSWER_WITHIN)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        stream.set_write_timeout(Some(ANSWER_WITHIN))?;
        return Ok(Box::new(stream));
    }
    if let Some(UnixSocket { path, uid }) = UnixSocket::parse(url) {
        let stream = match path.strip_prefix('@') {
            Some(name) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?,
            None => UnixStream::connect(path)?,
        };
        check_server_user(stream.as_fd(), 0, &[uid, server_uid])?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        stream.set_write_timeout(Some(ANSWER_WITHIN))?;
        return Ok(Box::new(stream));
    }
    bail!("only servers at tcp://HOST:PORT, tls://HOST:PORT, unix:PATH and shm:PATH can be asked")
}

fn receive(stream: &mut dyn ByteStream) -> anyhow::Result<(MessageHeader, Vec<u8>)> {
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes)?;
    let head = MessageHeader::decode(&bytes)?.context("a whole head was read")?;
    ensure!(head.body as usize <= BODY_BYTES_MAX, "its answer is too long");
    let mut body = vec![0; head.body as usize];
    stream.read_exact(&mut body)?;
    Ok((head, body))
}

fn named(stat: &Stat) -> BTreeMap<&'static str, u64> {
    let bytes = |pages: u64| pages.saturating_mul(farfield_core::geometry::PAGE_BYTES as u64);
    BTreeMap::from([
        ("uptime_ms", stat.uptime_ms),
        ("capacity_bytes", bytes(stat.capacity_pages)),
        ("used_bytes", bytes(stat.used_pages)),
        ("reserved_bytes", bytes(stat.reserved_pages)),
        ("regions", stat.regions),
        ("sessions", stat.sessions),
        ("connections", stat.connections),
        ("read_pages", stat.read_pages),
        ("written_pages", stat.written_pages),
        ("discarded_pages", stat.discarded_pages),
        ("received_bytes", stat.received_bytes),
        ("sent_bytes", stat.sent_bytes),
        ("failed_requests", stat.failed_requests),
    ])
}
