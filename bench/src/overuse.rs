//! `farfield-bench overuse`: a tenant of a memory server that takes as much of one resource as it gets, until it is killed.
//!
//! It speaks the protocol itself, because a client of ours does none of this.

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{
    CallBody, HEADER_BYTES, Hello, MessageHeader, MessageKind, Reply, Request, Welcome, WireReply, WireRequest,
    encode_request, write_body_bytes,
};
use farfield_core::{PageId, RegionId, checksum};
use farfield_os::serving;
use farfield_wic::{Aggregate, Function, Range};
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The resource that a tenant takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Overuse {
    /// Processors and network: reads of 64 pages, sixteen at a time on each connection.
    Reads,
    /// Processors: reads of single pages, 256 at a time on each connection.
    Requests,
    /// Processors: functions that run until the server ends them.
    Functions,
    /// The thread that cleans up: snapshots of regions whose pages are then written again.
    Clones,
    /// Bookkeeping and mappings: a page of each GiB of large regions.
    Mappings,
    /// The listener: connections that authenticate and end, and as many that end without a word.
    Connections,
    /// Buffers: writes of which half arrives, and reads whose answers nobody takes.
    Halves,
}

impl Overuse {
    /// Returns the resource of that name.
    pub(crate) fn named(name: &str) -> Result<Overuse> {
        let names = || Overuse::value_variants().iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
        Overuse::from_str(name, false)
            .ok()
            .with_context(|| format!("no tenant overuses {name:?}; known are {}", names()))
    }

    /// Returns the name on the command line and in parameter files.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }
}

#[derive(Debug, Args)]
pub(crate) struct OveruseArgs {
    /// The server: tcp://HOST:PORT.
    #[arg(long)]
    url: String,
    /// The tenant's token.
    #[arg(long)]
    token: String,
    /// What the tenant takes.
    #[arg(long, value_enum)]
    of: Overuse,
    /// Made when each connection has got through once, or was refused.
    #[arg(long)]
    ready: PathBuf,
}

/// Threads, each with a connection, or with as many as it is given one after the other.
const THREADS: u64 = 64;
/// Pause of a thread that was refused.
const PAUSE: Duration = Duration::from_millis(10);
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Pages of the region that is read.
const READ_PAGES: u64 = 64;
const GIB_PAGES: u64 = 1 << 18;

/// Overuses the server until this process is killed, by the end of its parent at the latest.
pub(crate) fn run(args: &OveruseArgs) -> Result<()> {
    serving::signal_when_parent_dies(libc::SIGKILL)?;
    let (rounds, is_let_in) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (rounds, is_let_in) = (&rounds, &is_let_in);
            scope.spawn(move || {
                for round in 0.. {
                    let is_refused = overuse(args, thread + round, || {
                        is_let_in.store(true, Ordering::Relaxed);
                        rounds.fetch_add(1, Ordering::Relaxed);
                    });
                    if is_refused.is_err() {
                        rounds.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(PAUSE);
                    }
                }
            });
        }
        let until = Instant::now() + READY_WITHIN;
        while !is_let_in.load(Ordering::Relaxed) || rounds.load(Ordering::Relaxed) < THREADS {
            if Instant::now() > until {
                eprintln!("the server at {} lets nobody in", args.url);
                std::process::exit(1);
            }
            std::thread::sleep(PAUSE);
        }
        File::create(&args.ready).map(drop)
    })?;
    Ok(())
}

/// Takes what one connection gets, and calls `done` for each round of it. Returns when the server refuses or ends it.
fn overuse(args: &OveruseArgs, number: u64, done: impl Fn()) -> Result<()> {
    if args.of == Overuse::Connections && number % 2 == 1 {
        return connect(&args.url).map(drop);
    }
    let mut connection = Connection::open(&args.url, &args.token)?;
    match args.of {
        Overuse::Reads => {
            let region = connection.filled()?;
            loop {
                connection.exchange(16, |_| Request::Read { region, page: PageId(0), count: READ_PAGES as u32 })?;
                done();
            }
        }
        Overuse::Requests => {
            let region = connection.filled()?;
            loop {
                connection.exchange(256, |n| Request::Read { region, page: PageId(n % READ_PAGES), count: 1 })?;
                done();
            }
        }
        Overuse::Functions => {
            let region = connection.create(1 << 20)?;
            let words = Range { offset: 0, count: (1 << 20) * (PAGE_BYTES as u64 / 8) };
            let argument = postcard::to_stdvec(&words)?;
            loop {
                let call = CallBody { name: Aggregate::NAME, version: Aggregate::VERSION, argument: &argument };
                connection.send(Request::Call { region, steps_max: 0, call })?;
                done();
                connection.receive()?;
            }
        }
        Overuse::Clones => {
            let region = connection.filled()?;
            loop {
                // Refused while too many tickets wait.
                connection.send(Request::CloneRegion { region })?;
                connection.receive()?;
                connection.write(region, 0, READ_PAGES)?;
                done();
            }
        }
        Overuse::Mappings => loop {
            let region = connection.create(1 << 32)?;
            // The second write of a page goes through a mapping.
            for page in (0..200).chain(0..200) {
                connection.write(region, page * GIB_PAGES, 1)?;
                done();
            }
            connection.send(Request::DropRegion { region })?;
            connection.receive()?;
        },
        Overuse::Connections => {
            connection.send(Request::Bye)?;
            done();
            Ok(())
        }
        Overuse::Halves => {
            let region = connection.filled()?;
            let is_write = number.is_multiple_of(2);
            if is_write {
                let whole = write_frame(region, 0, 256);
                connection.stream.write_all(whole.get(..whole.len() * 2 / 3).unwrap_or_default())?;
            } else {
                connection.stream.set_write_timeout(Some(Duration::from_secs(1)))?;
                // Until its answers fill all buffers in between.
                while connection.send(Request::Read { region, page: PageId(0), count: READ_PAGES as u32 }).is_ok() {}
            }
            done();
            // Until the server has had enough of it.
            connection.stream.set_read_timeout(None)?;
            while is_write && connection.stream.read(&mut [0; 4096])? > 0 {}
            std::thread::sleep(Duration::from_secs(1));
            Ok(())
        }
    }
}

/// An authenticated connection.
struct Connection {
    stream: TcpStream,
    next_tag: u64,
}

fn connect(url: &str) -> Result<TcpStream> {
    Ok(TcpStream::connect(url.strip_prefix("tcp://").context("the URL of a TCP server")?)?)
}

impl Connection {
    fn open(url: &str, token: &str) -> Result<Connection> {
        let stream = connect(url)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        let mut connection = Connection { stream, next_tag: 1 };
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            features: farfield_core::wire::features::CLONE | farfield_core::wire::features::CALL,
            session: None,
            token: token.as_bytes(),
            client_name: "overuse",
        };
        let mut out = Vec::new();
        hello.encode(&mut out);
        connection.stream.write_all(&out)?;
        let (header, body) = connection.receive()?;
        match Welcome::decode(&header, &body)? {
            Ok(_) => Ok(connection),
            Err(refusal) => bail!("refused: {:?}", refusal.code),
        }
    }

    fn frame(&mut self, request: Request<'_>, out: &mut Vec<u8>) {
        let tag = self.next_tag;
        self.next_tag += 1;
        encode_request(&WireRequest { tag, background: false, deadline: None, request }, out);
    }

    fn send(&mut self, request: Request<'_>) -> Result<()> {
        let mut out = Vec::new();
        self.frame(request, &mut out);
        Ok(self.stream.write_all(&out)?)
    }

    /// Sends so many requests at once and takes their answers.
    fn exchange<'a>(&mut self, count: u64, request: impl Fn(u64) -> Request<'a>) -> Result<()> {
        let mut out = Vec::new();
        (0..count).for_each(|number| self.frame(request(number), &mut out));
        self.stream.write_all(&out)?;
        (0..count).try_for_each(|_| self.receive().map(drop))
    }

    fn receive(&mut self) -> Result<(MessageHeader, Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let header = MessageHeader::decode(&header)?.context("no header of a message")?;
        let mut body = vec![0; header.body as usize];
        self.stream.read_exact(&mut body)?;
        Ok((header, body))
    }

    fn create(&mut self, pages: u64) -> Result<RegionId> {
        self.send(Request::CreateRegion { pages })?;
        let (header, body) = self.receive()?;
        match WireReply::decode(&header, &body)?.reply {
            Reply::Created { region } => Ok(region),
            other => bail!("no region: {other:?}"),
        }
    }

    /// Makes a region whose pages are all there.
    fn filled(&mut self) -> Result<RegionId> {
        let region = self.create(READ_PAGES)?;
        self.write(region, 0, READ_PAGES)?;
        Ok(region)
    }

    fn write(&mut self, region: RegionId, first: u64, pages: u64) -> Result<()> {
        self.stream.write_all(&write_frame(region, first, pages))?;
        self.receive().map(drop)
    }
}

/// A message that writes pages without zeros.
fn write_frame(region: RegionId, first: u64, pages: u64) -> Vec<u8> {
    let page = [0xa5; PAGE_BYTES];
    let count = pages as u32;
    let header = MessageHeader {
        body: write_body_bytes(count) as u32,
        kind: MessageKind::Write as u8,
        tag: u64::MAX,
        count,
        region: region.0,
        page: first,
        ..MessageHeader::default()
    };
    let mut out = header.encode().to_vec();
    (0..pages).for_each(|_| out.extend_from_slice(&checksum(&page).to_le_bytes()));
    (0..pages).for_each(|_| out.extend_from_slice(&page));
    out
}
