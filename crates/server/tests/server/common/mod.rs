//! A client that says exactly what a test wants said, and a server to say it to.

pub(crate) mod certificates;
pub(crate) mod functions;
mod list;

use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{
    ErrorCode, HEADER_BYTES, Hello, MessageHeader, MessageKind, ReadReply, RefuseCode, Reply, Request, SessionSecret,
    Stat, Welcome, WireReply, WireRequest, encode_request, features,
};
use farfield_core::{PageId, RegionId, checksum};
use farfield_server::{Config, Server};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// No wait of a test is longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Listens at a free port of this machine and at a socket of its own. Sweeps seldom: a region that is being swept goes a
/// moment later, and tests count.
pub(crate) fn config() -> Config {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let socket = format!("unix:@farfield-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let listen = vec!["tcp://127.0.0.1:0".parse().unwrap(), socket.parse().unwrap()];
    Config { listen, sweep_every: Duration::from_secs(3600), ..Config::default() }
}

pub(crate) fn serve(config: Config) -> Server {
    Server::start(config).unwrap()
}

pub(crate) fn tcp(server: &Server) -> &str {
    &server.endpoints()[0]
}

pub(crate) fn unix(server: &Server) -> &str {
    &server.endpoints()[1]
}

/// Waits until `done`; panics with `what` when it takes too long.
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "still not: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

trait Stream: Read + Write + Send {
    fn finish(&self);
}
impl Stream for TcpStream {
    fn finish(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}
impl Stream for UnixStream {
    fn finish(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}

/// A connection, spoken over by hand.
pub(crate) struct Client {
    stream: Box<dyn Stream>,
    next_tag: u64,
}

/// What `Hello` got.
pub(crate) type Greeting = Result<Welcome, RefuseCode>;

pub(crate) fn hello<'a>(token: &'a str, session: Option<SessionSecret>) -> Hello<'a> {
    Hello {
        version_min: 1,
        version_max: 1,
        features: features::MAP | features::CLONE,
        session,
        token: token.as_bytes(),
        client_name: "test",
    }
}

impl Client {
    /// Connects without a word.
    pub(crate) fn connect(url: &str) -> Client {
        let stream: Box<dyn Stream> = if let Some(address) = url.strip_prefix("tcp://") {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_nodelay(true).unwrap();
            Box::new(stream)
        } else {
            use std::os::linux::net::SocketAddrExt;
            let name = url.strip_prefix("unix:@").unwrap();
            let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
            let stream = UnixStream::connect_addr(&address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        };
        Client { stream, next_tag: 1 }
    }

    /// Connects and says hello.
    pub(crate) fn open(url: &str, hello: &Hello<'_>) -> (Client, Greeting) {
        let mut client = Client::connect(url);
        let greeting = client.greet(hello);
        (client, greeting)
    }

    /// A welcome client without a token.
    pub(crate) fn new(url: &str) -> Client {
        let (client, greeting) = Client::open(url, &hello("", None));
        greeting.unwrap();
        client
    }

    pub(crate) fn greet(&mut self, hello: &Hello<'_>) -> Greeting {
        let mut out = Vec::new();
        hello.encode(&mut out);
        self.send(&out);
        let (head, body) = self.receive().expect("an answer to hello");
        Welcome::decode(&head, &body).unwrap().map_err(|refusal| refusal.code)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// The next frame; `None` when the server has closed.
    pub(crate) fn receive(&mut self) -> Option<(MessageHeader, Vec<u8>)> {
        let mut head = [0; HEADER_BYTES];
        match self.stream.read_exact(&mut head) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => return None,
            Err(error) => panic!("no answer: {error}"),
        }
        let head = MessageHeader::decode(&head).unwrap().unwrap();
        let mut body = vec![0; head.body as usize];
        self.stream.read_exact(&mut body).unwrap();
        Some((head, body))
    }

    /// Reads until the server closes; panics if it does not.
    pub(crate) fn expect_close(&mut self) {
        while self.receive().is_some() {}
    }

    /// Says nothing more and takes whatever comes until the server closes. The number of bytes.
    pub(crate) fn drain(&mut self) -> usize {
        self.stream.finish();
        let mut bytes = Vec::new();
        match self.stream.read_to_end(&mut bytes) {
            Ok(_) => bytes.len(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "the server does not close");
                bytes.len()
            }
        }
    }

    pub(crate) fn request(&mut self, request: Request<'_>) -> u64 {
        let tag = self.next_tag;
        self.next_tag += 1;
        let mut out = Vec::new();
        encode_request(&WireRequest { tag, background: false, deadline: None, request }, &mut out);
        self.send(&out);
        tag
    }

    /// Asks and waits for the answer.
    pub(crate) fn ask(&mut self, request: Request<'_>) -> Result<Reply, ErrorCode> {
        let tag = self.request(request);
        self.answer(tag)
    }

    fn answer(&mut self, tag: u64) -> Result<Reply, ErrorCode> {
        let (head, body) = self.receive().expect("an answer");
        let reply = WireReply::decode(&head, &body).unwrap();
        assert_eq!(reply.tag, tag);
        match reply.reply {
            Reply::Failed { code, .. } => Err(code),
            reply => Ok(reply),
        }
    }

    pub(crate) fn create(&mut self, pages: u64) -> Result<RegionId, ErrorCode> {
        match self.ask(Request::CreateRegion { pages })? {
            Reply::Created { region } => Ok(region),
            other => panic!("{other:?}"),
        }
    }

    /// The frame of a write of pages that are full of the given values.
    pub(crate) fn write_frame(&mut self, region: RegionId, first: u64, values: &[u64]) -> (u64, Vec<u8>) {
        let pages: Vec<Vec<u8>> = values.iter().map(|value| page_of(*value)).collect();
        let tag = self.next_tag;
        self.next_tag += 1;
        let head = MessageHeader {
            body: (pages.len() * (8 + PAGE_BYTES)) as u32,
            kind: MessageKind::Write as u8,
            tag,
            count: pages.len() as u32,
            region: region.0,
            page: first,
            ..MessageHeader::default()
        };
        let mut out = head.encode().to_vec();
        pages.iter().for_each(|page| out.extend_from_slice(&checksum(page).to_le_bytes()));
        pages.iter().for_each(|page| out.extend_from_slice(page));
        (tag, out)
    }

    pub(crate) fn write(&mut self, region: RegionId, first: u64, values: &[u64]) -> Result<(), ErrorCode> {
        let (tag, frame) = self.write_frame(region, first, values);
        self.send(&frame);
        self.answer(tag).map(|reply| assert_eq!(reply, Reply::Done))
    }

    /// The values that the pages are full of; `None` for absent ones.
    pub(crate) fn read(&mut self, region: RegionId, first: u64, count: u32) -> Result<Vec<Option<u64>>, ErrorCode> {
        let tag = self.request(Request::Read { region, page: PageId(first), count });
        let (head, body) = self.receive().expect("an answer");
        assert_eq!(head.tag, tag);
        if head.kind == MessageKind::ERROR {
            return Err(ErrorCode::from_number(head.code));
        }
        Ok(read_values(&head, &body, count))
    }

    pub(crate) fn discard(&mut self, region: RegionId, first: u64, count: u32) -> Result<(), ErrorCode> {
        self.ask(Request::Discard { region, page: PageId(first), count }).map(|reply| assert_eq!(reply, Reply::Done))
    }

    pub(crate) fn clone_region(&mut self, region: RegionId) -> Result<u128, ErrorCode> {
        match self.ask(Request::CloneRegion { region })? {
            Reply::Ticket { secret } => Ok(secret),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn claim(&mut self, ticket: u128) -> Result<RegionId, ErrorCode> {
        match self.ask(Request::ClaimRegion { ticket })? {
            Reply::Claimed { region, .. } => Ok(region),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn stat(&mut self) -> Stat {
        match self.ask(Request::Stat) {
            Ok(Reply::Stat(stat)) => stat,
            other => panic!("{other:?}"),
        }
    }
}

/// Pages in the answer to a read, each checked against its checksum and for being full of one value.
pub(crate) fn read_values(head: &MessageHeader, body: &[u8], count: u32) -> Vec<Option<u64>> {
    let prefix = ReadReply::prefix_bytes(head, count).unwrap();
    let reply = ReadReply::decode(head, count, &body[..prefix]).unwrap();
    let mut pages = body[prefix..].chunks_exact(PAGE_BYTES);
    let mut present = 0;
    let mut value_of = |index| {
        reply.is_present(index).then(|| {
            let page = pages.next().unwrap();
            assert_eq!(checksum(page), reply.sum_of_present(present));
            present += 1;
            let value = u64::from_le_bytes(page[..8].try_into().unwrap());
            assert_eq!(page, page_of(value));
            value
        })
    };
    (0..count).map(&mut value_of).collect()
}

pub(crate) fn page_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(PAGE_BYTES / 8)
}
