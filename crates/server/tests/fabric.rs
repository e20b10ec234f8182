//! One-sided reads: the member `fabric` is a backend, and the server does nothing for its reads.
#![cfg(feature = "fabric")]

use farfield_core::PageId;
use farfield_pool::{Buffer, Lane, LaneRequest, Op, OpenError, PoolBuilder, PoolError, Priority, conformance};
use farfield_server::{Config, Server};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

fn serve(fabric: Option<&str>) -> Server {
    let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
    Server::start(Config { listen, fabric: fabric.map(str::to_owned), ..Config::default() }).unwrap()
}

fn builder(server: &Server) -> PoolBuilder {
    PoolBuilder::new().url(format!("fabric:{}", server.endpoints()[0])).deadline(LONG).pages(1 << 12)
}

fn one(lane: &mut dyn Lane, op: Op) -> (Result<(), PoolError>, Option<Buffer>) {
    lane.submit(LaneRequest { tag: 1, priority: Priority::Demand, deadline: LONG, op }).unwrap();
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(100));
    }
    (done[0].result, done.remove(0).buffer)
}

#[test]
fn fabric_is_a_backend() {
    conformance::run(&builder(&serve(Some("tcp"))));
}

#[test]
fn fabric_reports_the_death_of_its_server() {
    let server = serve(Some("tcp"));
    conformance::death(&builder(&server), || drop(server));
}

#[test]
fn reads_do_not_reach_the_server() {
    let server = serve(Some("tcp"));
    let backend = builder(&server).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let mut buffer = Buffer::new(100);
    for index in 0..100 {
        buffer.page_mut(index).fill(index as u8);
    }
    buffer.seal();
    assert_eq!(one(&mut *lane, Op::Write { page: PageId(50), buffer }).0, Ok(()));
    for first in [0, 50, 51, 140, 300] {
        let (result, buffer) = one(&mut *lane, Op::Read { page: PageId(first), buffer: Buffer::new(64) });
        assert_eq!(result, Ok(()));
        for (index, page) in (first..first + 64).enumerate() {
            let expected = if (50..150).contains(&page) { page - 50 } else { 0 };
            assert_eq!(buffer.as_ref().unwrap().page(index), [expected as u8; 4096], "page {page}");
        }
    }
    let stat = server.stat();
    assert_eq!((stat.written_pages, stat.read_pages), (100, 0), "{stat:?}");
    assert_eq!(stat.used_pages, 100, "looking costs nothing");
}

#[test]
fn a_page_that_moved_to_another_layer_is_read_from_there() {
    let server = serve(Some("tcp"));
    let backend = builder(&server).open().unwrap();
    let (mut lane, mut other) = (backend.open_lane().unwrap(), backend.open_lane().unwrap());
    let filled = |pages: usize, with: u8| {
        let mut buffer = Buffer::new(pages);
        buffer.bytes_mut().fill(with);
        buffer.seal();
        buffer
    };
    let read = |lane: &mut dyn Lane, count: usize| {
        let (result, buffer) = one(lane, Op::Read { page: PageId(0), buffer: Buffer::new(count) });
        assert_eq!(result, Ok(()));
        let buffer = buffer.unwrap();
        (0..count)
            .map(|page| {
                assert!(buffer.page(page).iter().all(|byte| *byte == buffer.page(page)[0]), "page {page} is torn");
                buffer.page(page)[0]
            })
            .collect::<Vec<u8>>()
    };
    assert_eq!(one(&mut *lane, Op::Write { page: PageId(0), buffer: filled(24, 1) }).0, Ok(()));
    let expected =
        |pages: [(u8, usize); 4]| pages.iter().flat_map(|(with, count)| vec![*with; *count]).collect::<Vec<u8>>();
    // Never-written ones among them, twice: as nobody knows of them, and as they are known.
    for _ in 0..2 {
        assert_eq!(read(&mut *other, 40), expected([(1, 24), (0, 16), (0, 0), (0, 0)]));
    }
    let _snapshot = backend.clone_region().unwrap();
    // Written and not collected: nobody here knows yet that these pages are in another layer, or in none.
    for (page, buffer, written) in [(4, filled(8, 2), 32), (30, filled(2, 3), 34)] {
        let op = Op::Write { page: PageId(page), buffer };
        lane.submit(LaneRequest { tag: page, priority: Priority::Demand, deadline: LONG, op }).unwrap();
        while server.stat().written_pages < written {
            lane.wait(Duration::from_millis(10));
        }
    }
    for _ in 0..2 {
        let pages = read(&mut *other, 40);
        assert_eq!(pages[..30], expected([(1, 4), (2, 8), (1, 12), (0, 6)]));
        assert_eq!(pages[30..], expected([(3, 2), (0, 8), (0, 0), (0, 0)]));
    }
    let mut done = Vec::with_capacity(4);
    while done.len() < 2 {
        lane.wait(LONG);
        lane.poll(&mut done);
    }
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(2), count: 4 }).0, Ok(()));
    for lane in [&mut lane, &mut other] {
        assert_eq!(read(&mut **lane, 24), expected([(1, 2), (0, 4), (2, 6), (1, 12)]));
    }
    assert_eq!(server.stat().read_pages, 0, "nothing was asked by message");
}

#[test]
fn a_server_without_a_fabric_says_what_is_missing() {
    let server = serve(None);
    let Err(OpenError::Refused { text, .. }) = builder(&server).open() else { panic!("opened") };
    assert!(text.contains("--fabric tcp"), "{text}");
}

#[test]
fn providers_that_cannot_be_used_are_refused_by_name() {
    for (provider, reason) in [("shm", "shm:PATH"), ("verbs", "pin"), ("nonsense", "use tcp")] {
        let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
        let config = Config { listen, fabric: Some(provider.to_owned()), ..Config::default() };
        let text = Server::start(config).unwrap_err().to_string();
        assert!(text.contains(reason) && text.contains(provider), "{text}");
        let text = PoolBuilder::new()
            .url(format!("fabric:{provider}://127.0.0.1:1"))
            .pages(1)
            .open()
            .err()
            .unwrap()
            .to_string();
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn memory_is_given_back_when_the_session_ends() {
    let server = serve(Some("tcp"));
    let backend = builder(&server).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let mut buffer = Buffer::new(64);
    buffer.seal();
    assert_eq!(one(&mut *lane, Op::Write { page: PageId(0), buffer }).0, Ok(()));
    assert_eq!(server.stat().used_pages, 64);
    backend.release();
    drop((lane, backend));
    assert_eq!((server.stat().used_pages, server.stat().sessions), (0, 0));
}

/// Not a test: the server that is killed or stopped.
#[test]
#[ignore = "started by the tests of this file, in a process of its own"]
fn server_that_waits_to_be_killed() {
    let server = serve(Some("tcp"));
    println!("listening {}", server.endpoints()[0]);
    std::thread::park_timeout(LONG * 6);
}

struct OtherServer(Child);

impl OtherServer {
    fn start() -> (OtherServer, PoolBuilder) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "server_that_waits_to_be_killed", "--ignored", "--nocapture"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let url = lines.find_map(|line| line.split_once("listening ").map(|(_, url)| format!("fabric:{url}")));
        (OtherServer(child), PoolBuilder::new().url(url.unwrap()).deadline(LONG).pages(1 << 12))
    }

    fn signal(&self, signal: i32) {
        // SAFETY: our own child, which nobody has waited for.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }

    /// Stops it. Returns when all of its threads have stopped: the signal itself only reaches one of them.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        // SAFETY: all zeros is a valid `siginfo_t`.
        let mut found: libc::siginfo_t = unsafe { core::mem::zeroed() };
        // SAFETY: an out pointer to a local; without `WEXITED`, the child is not reaped.
        assert_eq!(unsafe { libc::waitid(libc::P_PID, self.0.id(), &mut found, libc::WSTOPPED) }, 0);
    }
}

impl Drop for OtherServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_server_ends_everything_with_server_gone() {
    let (server, builder) = OtherServer::start();
    conformance::death(&builder, || server.signal(libc::SIGKILL));
}

#[test]
fn a_stopped_server_is_waited_for_until_the_deadline_and_serves_again() {
    const SHORT: Duration = Duration::from_millis(300);
    let (server, builder) = OtherServer::start();
    let backend = builder.open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let mut buffer = Buffer::new(16);
    buffer.bytes_mut().fill(7);
    buffer.seal();
    assert_eq!(one(&mut *lane, Op::Write { page: PageId(0), buffer }).0, Ok(()));
    server.stop();
    let mut done = Vec::with_capacity(64);
    for tag in 0..64 {
        let op = Op::Read { page: PageId(tag % 3), buffer: Buffer::new(1 + tag as usize % 13) };
        lane.submit(LaneRequest { tag, priority: Priority::Demand, deadline: SHORT, op }).unwrap();
    }
    let started = Instant::now();
    while done.len() < 64 {
        assert!(started.elapsed() < LONG, "{} of 64", done.len());
        lane.wait(Duration::from_millis(50));
        lane.poll(&mut done);
    }
    for completion in &done {
        assert_eq!(completion.result, Err(PoolError::TimedOut { server: 0, after: SHORT }));
        assert!(completion.buffer.is_some());
    }
    // Their buffers go; what was under way lands in memory of the lane.
    done.clear();
    server.signal(libc::SIGCONT);
    for _ in 0..50 {
        let (result, buffer) = one(&mut *lane, Op::Read { page: PageId(0), buffer: Buffer::new(16) });
        assert_eq!(result, Ok(()));
        assert_eq!(buffer.unwrap().bytes(), [7; 16 * 4096]);
    }
}
