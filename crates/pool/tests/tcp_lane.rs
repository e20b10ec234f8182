//! Guards against a lane that trusts its server: one that is silent, late, wrong, or gone at any moment. The server here
//! is a script, because a real one does not do these things.
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "it runs outside of programs")]

use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::*;
use farfield_core::{Incarnation, PageId, RegionId, checksum};
use farfield_pool::{
    Backend, Buffer, Completion, Health, Lane, LaneRequest, Op, OpenError, PoolBuilder, PoolError, Priority,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);
/// A deadline that is missed in a test, and long enough for a request to leave in time when the machine is busy.
const ENOUGH: Duration = Duration::from_millis(500);
const PAGES: u64 = 1024;

/// One connection of the scripted server.
struct Peer(TcpStream);

impl Peer {
    fn frame(&mut self) -> (MessageHeader, Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).expect("a head");
        let header = MessageHeader::decode(&header).unwrap().unwrap();
        let mut body = vec![0; header.body as usize];
        self.0.read_exact(&mut body).expect("a body");
        (header, body)
    }

    fn say(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = Vec::new();
        encode(&mut bytes);
        self.0.write_all(&bytes).expect("the client listens");
    }

    fn welcome(&mut self) {
        let (header, body) = self.frame();
        let hello = Hello::decode(&header, &body).expect("a greeting");
        assert_eq!((hello.token, hello.client_name), (&b"open sesame"[..], "test"));
        let welcome = Welcome {
            version: 1,
            lease_ms: 1000,
            features: 0,
            incarnation: Incarnation(42),
            session: SessionSecret(7),
            batch_pages_max: 64,
            in_flight_max: 128,
        };
        self.say(|out| welcome.encode(out));
    }

    /// Answers a read with pages full of `byte`, those in `present` only.
    fn answer_read(&mut self, header: &MessageHeader, byte: u8, present: &[u32]) {
        let page = [byte; PAGE_BYTES];
        let sums = present.iter().map(|index| (*index, checksum(&page)));
        self.say(|out| {
            encode_read(header.tag, header.count, sums, out);
            present.iter().for_each(|_| out.extend(page));
        });
    }
}

/// A server that welcomes the control connection and one lane, makes one region, and then follows `script` on the lane.
fn serve(script: impl FnOnce(&mut Peer) + Send + 'static) -> (PoolBuilder, JoinHandle<()>) {
    serve_when(|| (), script)
}

/// The same; `before` it looks at the lane's connection for the first time, that happens.
fn serve_when(
    before: impl FnOnce() + Send + 'static,
    script: impl FnOnce(&mut Peer) + Send + 'static,
) -> (PoolBuilder, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let builder = PoolBuilder::new()
        .url(format!("tcp://{}", listener.local_addr().unwrap()))
        .token("open sesame")
        .client_name("test")
        .pages(PAGES)
        .deadline(LONG);
    let server = std::thread::spawn(move || {
        let mut control = Peer(listener.accept().unwrap().0);
        control.welcome();
        let (header, _) = control.frame();
        assert_eq!((header.kind, header.page), (MessageKind::CreateRegion as u8, PAGES));
        control.say(|out| encode_created(header.tag, RegionId(5), out));
        before();
        let mut lane = Peer(listener.accept().unwrap().0);
        lane.welcome();
        script(&mut lane);
        // Whatever else the client says on the control connection is not answered.
    });
    (builder, server)
}

fn connect(builder: &PoolBuilder) -> (Arc<dyn Backend>, Box<dyn Lane>) {
    let backend = builder.open().unwrap();
    let lane = backend.open_lane().unwrap();
    (backend, lane)
}

fn read(tag: u64, page: u64, pages: usize) -> LaneRequest {
    let op = Op::Read { page: PageId(page), buffer: Buffer::new(pages) };
    LaneRequest { tag, priority: Priority::Demand, deadline: LONG, op }
}

fn write(tag: u64, page: u64, pages: usize) -> LaneRequest {
    let mut buffer = Buffer::new(pages);
    buffer.bytes_mut().fill(tag as u8);
    buffer.seal();
    LaneRequest { tag, priority: Priority::Demand, deadline: LONG, op: Op::Write { page: PageId(page), buffer } }
}

/// Waits for so many completions, in order of their tags.
fn collect(lane: &mut dyn Lane, count: usize) -> Vec<Completion> {
    let mut done = Vec::with_capacity(count);
    let start = Instant::now();
    while done.len() < count {
        if lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_millis(50));
        }
        assert!(start.elapsed() < LONG, "only {} of {count} completed", done.len());
    }
    done.sort_by_key(|completion| completion.tag);
    done
}

fn gone() -> Result<(), PoolError> {
    Err(PoolError::ServerGone { server: 0, incarnation: Incarnation(42) })
}

#[test]
fn answers_in_another_order_and_in_small_pieces_are_understood() {
    let (builder, server) = serve(|peer| {
        let heads: Vec<MessageHeader> = (0..4).map(|_| peer.frame().0).collect();
        peer.0.set_nodelay(true).unwrap();
        for header in heads.iter().rev() {
            let page = [header.page as u8; PAGE_BYTES];
            let mut bytes = Vec::new();
            // Every second page is there.
            let present: Vec<u32> = (0..header.count).filter(|index| index % 2 == 1).collect();
            encode_read(header.tag, header.count, present.iter().map(|index| (*index, checksum(&page))), &mut bytes);
            present.iter().for_each(|_| bytes.extend(page));
            // Pieces of a size that falls together with nothing.
            for piece in bytes.chunks(997) {
                peer.0.write_all(piece).unwrap();
                std::thread::yield_now();
            }
        }
    });
    let (_backend, mut lane) = connect(&builder);
    for (tag, pages) in [(1, 1), (2, 2), (3, 7), (4, 64)] {
        lane.submit(read(tag, tag * 100, pages)).unwrap();
    }
    for completion in collect(&mut *lane, 4) {
        assert_eq!(completion.result, Ok(()));
        let buffer = completion.buffer.unwrap();
        for index in 0..buffer.pages() {
            let expected = if index % 2 == 1 { (completion.tag * 100) as u8 } else { 0 };
            assert_eq!(buffer.page(index), [expected; PAGE_BYTES]);
            assert_eq!(buffer.sums()[index], checksum(&[expected; PAGE_BYTES]));
        }
    }
    server.join().unwrap();
}

#[test]
fn a_flipped_bit_is_corrupt_and_the_lane_goes_on() {
    let (builder, server) = serve(|peer| {
        let (header, _) = peer.frame();
        let page = [3; PAGE_BYTES];
        peer.say(|out| {
            encode_read(header.tag, 2, [(0, checksum(&page)), (1, checksum(&page))].into_iter(), out);
            out.extend(page);
            out.extend(page);
            *out.last_mut().unwrap() ^= 0x40;
        });
        let (header, _) = peer.frame();
        peer.answer_read(&header, 4, &[0]);
    });
    let (_backend, mut lane) = connect(&builder);
    lane.submit(read(1, 10, 2)).unwrap();
    let done = collect(&mut *lane, 1).remove(0);
    assert_eq!(done.result, Err(PoolError::Corrupt { page: PageId(11), server: 0 }));
    assert!(done.buffer.is_some());
    lane.submit(read(2, 10, 1)).unwrap();
    assert_eq!(collect(&mut *lane, 1)[0].result, Ok(()));
    server.join().unwrap();
}

#[test]
fn a_late_answer_lands_nowhere() {
    let (go, wait) = std::sync::mpsc::channel();
    let (builder, server) = serve(move |peer| {
        let (late, _) = peer.frame();
        wait.recv().unwrap();
        peer.answer_read(&late, 0xaa, &[0, 1, 2, 3]);
        let (header, _) = peer.frame();
        peer.answer_read(&header, 0xbb, &[0]);
    });
    let (_backend, mut lane) = connect(&builder);
    let after = ENOUGH;
    lane.submit(LaneRequest { deadline: after, ..read(1, 0, 4) }).unwrap();
    let done = collect(&mut *lane, 1).remove(0);
    assert_eq!(done.result, Err(PoolError::TimedOut { server: 0, after }));
    let buffer = done.buffer.unwrap();
    go.send(()).unwrap();
    lane.submit(read(2, 0, 1)).unwrap();
    let fresh = collect(&mut *lane, 1).remove(0);
    assert_eq!((fresh.tag, fresh.result), (2, Ok(())));
    assert_eq!(fresh.buffer.unwrap().page(0), [0xbb; PAGE_BYTES]);
    assert!(buffer.bytes().iter().all(|byte| *byte == 0), "a buffer that was given back was written");
    server.join().unwrap();
}

#[test]
fn a_snapshot_that_comes_too_late_is_passed_over() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("tcp://{}", listener.local_addr().unwrap());
    let builder = PoolBuilder::new()
        .url(url)
        .token("open sesame")
        .client_name("test")
        .pages(PAGES)
        .deadline(Duration::from_millis(500));
    let (go, wait) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        let mut control = Peer(listener.accept().unwrap().0);
        control.welcome();
        let (header, _) = control.frame();
        control.say(|out| encode_created(header.tag, RegionId(5), out));
        let (late, _) = control.frame();
        wait.recv().unwrap();
        control.say(|out| encode_ticket(late.tag, 77, out));
        let (header, _) = control.frame();
        assert_eq!((late.kind, header.kind), (MessageKind::CloneRegion as u8, MessageKind::CloneRegion as u8));
        control.say(|out| encode_ticket(header.tag, 78, out));
    });
    let backend = builder.open().unwrap();
    assert!(matches!(backend.clone_region(), Err(PoolError::TimedOut { server: 0, .. })));
    assert_eq!(backend.health(), Health::Good, "it may be back soon");
    go.send(()).unwrap();
    let ticket = backend.clone_region().unwrap();
    assert_eq!(ticket.secrets[0], 78);
    ticket.forget();
    server.join().unwrap();
}

#[test]
fn half_an_answer_does_not_keep_the_buffer() {
    let (go, wait) = std::sync::mpsc::channel();
    let (builder, server) = serve(move |peer| {
        let (header, _) = peer.frame();
        let page = [0xaa; PAGE_BYTES];
        let mut bytes = Vec::new();
        encode_read(header.tag, 4, (0..4).map(|index| (index, checksum(&page))), &mut bytes);
        (0..4).for_each(|_| bytes.extend(page));
        let (first, rest) = bytes.split_at(6000);
        peer.0.write_all(first).unwrap();
        wait.recv().unwrap();
        peer.0.write_all(rest).unwrap();
        let (header, _) = peer.frame();
        peer.answer_read(&header, 0xbb, &[0]);
    });
    let (_backend, mut lane) = connect(&builder);
    let after = ENOUGH;
    lane.submit(LaneRequest { deadline: after, ..read(1, 0, 4) }).unwrap();
    let done = collect(&mut *lane, 1).remove(0);
    assert_eq!(done.result, Err(PoolError::TimedOut { server: 0, after }));
    let buffer = done.buffer.unwrap();
    let before = buffer.bytes().to_vec();
    go.send(()).unwrap();
    lane.submit(read(2, 0, 1)).unwrap();
    assert_eq!(collect(&mut *lane, 1)[0].result, Ok(()));
    assert!(buffer.bytes() == before, "the rest of the late answer was written into the buffer");
    server.join().unwrap();
}

#[test]
fn a_write_that_is_stuck_ends_in_time_and_takes_the_connection_with_it() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (builder, server) = serve(move |_peer| {
        let _ = wait.recv(); // Reads nothing.
    });
    let (backend, mut lane) = connect(&builder);
    let after = ENOUGH;
    let count = 120;
    for tag in 0..count {
        // More than sockets hold.
        lane.submit(LaneRequest { deadline: after, ..write(tag, 0, 64) }).unwrap();
    }
    let done = collect(&mut *lane, count as usize);
    let timed_out = done.iter().filter(|done| matches!(done.result, Err(PoolError::TimedOut { .. }))).count();
    assert!(timed_out >= 1);
    for completion in done {
        assert!(completion.result == gone() || completion.result == Err(PoolError::TimedOut { server: 0, after }));
        assert!(completion.buffer.is_some());
    }
    assert_eq!(backend.health(), Health::Gone);
    drop(go);
    server.join().unwrap();
}

#[test]
fn a_reset_ends_everything_in_flight_and_all_that_follows() {
    let (builder, server) = serve(|peer| {
        peer.frame();
        // Unread bytes make the kernel answer with a reset instead of an end.
    });
    let (backend, mut lane) = connect(&builder);
    for tag in 0..50 {
        let request = if tag % 2 == 0 { read(tag, tag, 2) } else { write(tag, tag, 2) };
        lane.submit(request).unwrap();
    }
    let done = collect(&mut *lane, 50);
    assert!(done.iter().all(|done| done.result == gone() && done.buffer.is_some()));
    lane.submit(read(60, 0, 1)).unwrap();
    assert_eq!(collect(&mut *lane, 1)[0].result, gone());
    assert_eq!(backend.health(), Health::Gone);
    assert_eq!(backend.open_lane().err(), Some(gone().unwrap_err()));
    server.join().unwrap();
}

#[test]
fn a_lane_is_open_before_the_server_answers() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (builder, server) = serve_when(
        move || wait.recv().unwrap(),
        |peer| {
            // Nobody waits for the first one any more; it was never sent.
            let (header, _) = peer.frame();
            peer.answer_read(&header, 0xbb, &[0, 1]);
        },
    );
    let (_backend, mut lane) = connect(&builder);
    let after = ENOUGH;
    lane.submit(LaneRequest { deadline: after, ..read(1, 3, 1) }).unwrap();
    assert_eq!(collect(&mut *lane, 1)[0].result, Err(PoolError::TimedOut { server: 0, after }));
    lane.submit(read(2, 10, 2)).unwrap();
    lane.wait(Duration::from_millis(1));
    assert_eq!(lane.in_flight(), 1);
    go.send(()).unwrap();
    let done = collect(&mut *lane, 1).remove(0);
    assert_eq!((done.tag, done.result), (2, Ok(())));
    assert_eq!(done.buffer.unwrap().page(1), [0xbb; PAGE_BYTES]);
    server.join().unwrap();
}

#[test]
fn nonsense_is_not_believed() {
    let nonsense: [fn(&MessageHeader) -> Vec<u8>; 5] = [
        |_| b"HTTP/1.1 400 Bad Request\r\nServer: nobody\r\n\r\n".to_vec(),
        |header| {
            MessageHeader { kind: MessageKind::Write.answer(), tag: header.tag, ..MessageHeader::default() }
                .encode()
                .to_vec()
        },
        |header| {
            MessageHeader { kind: MessageKind::Read.answer(), tag: header.tag + 1, ..MessageHeader::default() }
                .encode()
                .to_vec()
        },
        // More pages than were asked for.
        |header| {
            let mut bytes = Vec::new();
            encode_read(header.tag, 2, [(0, 0), (1, 0)].into_iter(), &mut bytes);
            bytes
        },
        // A presence map that says other than the length.
        |header| {
            let body = read_prefix_bytes(1, 1) + PAGE_BYTES;
            let (kind, tag) = (MessageKind::Read.answer(), header.tag);
            let mut bytes =
                MessageHeader { kind, tag, count: 1, body: body as u32, ..MessageHeader::default() }.encode().to_vec();
            bytes.extend([0xff; 5000]);
            bytes
        },
    ];
    for (index, say) in nonsense.into_iter().enumerate() {
        let (builder, server) = serve(move |peer| {
            let (header, _) = peer.frame();
            peer.0.write_all(&say(&header)).unwrap();
            let _ = peer.0.read(&mut [0]); // Until the client gives up.
        });
        let (backend, mut lane) = connect(&builder);
        lane.submit(read(1, 0, 1)).unwrap();
        assert_eq!(collect(&mut *lane, 1)[0].result, gone(), "nonsense {index}");
        drop(lane);
        drop(backend);
        server.join().unwrap();
    }
}

#[test]
fn demand_leaves_before_queued_background() {
    let (builder, server) = serve(|peer| {
        // The first background requests may be on their way before the demand read is submitted; of the rest, none.
        let order: Vec<MessageHeader> = (0..101).map(|_| peer.frame().0).collect();
        let demand = order.iter().position(|header| header.flags & flags::BACKGROUND == 0).unwrap();
        assert_eq!(demand, 0, "background went first");
        for header in order {
            peer.answer_read(&header, 1, &[]);
        }
    });
    let (_backend, mut lane) = connect(&builder);
    for tag in 0..100 {
        lane.submit(LaneRequest { priority: Priority::Background, ..read(tag, tag, 1) }).unwrap();
    }
    lane.submit(read(100, 100, 1)).unwrap(); // Submitted last; nothing was polled yet, so nothing was sent.
    assert!(collect(&mut *lane, 101).iter().all(|done| done.result == Ok(())));
    server.join().unwrap();
}

#[test]
fn errors_of_the_server_are_errors_of_the_pool() {
    let codes = [
        (ErrorCode::PoolFull, PoolError::PoolFull { server: 0 }),
        (ErrorCode::Corrupt, PoolError::Corrupt { page: PageId(3), server: 0 }),
        (ErrorCode::TimedOut, PoolError::TimedOut { server: 0, after: LONG }),
        (ErrorCode::UnknownRegion, PoolError::Refused { server: 0, reason: ErrorCode::UnknownRegion.text() }),
    ];
    let (builder, server) = serve(move |peer| {
        for (code, _) in codes {
            let (header, body) = peer.frame();
            let request = WireRequest::decode(&header, &body).unwrap().request;
            assert!(matches!(request, Request::Write { pages, .. } if pages.count() == 2));
            peer.say(|out| encode_error(header.tag, code, 3, out));
        }
    });
    let (_backend, mut lane) = connect(&builder);
    for (_, error) in codes {
        lane.submit(write(1, 2, 2)).unwrap();
        assert_eq!(collect(&mut *lane, 1)[0].result, Err(error));
    }
    server.join().unwrap();
}

#[test]
fn a_refusal_says_why() {
    let cases: [(RefuseCode, &str); 4] = [
        (RefuseCode::Token, "wrong token"),
        (RefuseCode::Version, "protocol version 9"),
        (RefuseCode::Connections, "come back later"),
        (RefuseCode::Other(77), "come back later"),
    ];
    for (code, expected) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("tcp://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let mut peer = Peer(listener.accept().unwrap().0);
            peer.frame();
            let refusal = ConnectionRefusal { code, version_min: 8, version_max: 9, text: "come back later" };
            peer.say(|out| encode_refusal(&refusal, out));
        });
        let error: OpenError = PoolBuilder::new().url(url).pages(1).deadline(LONG).open().err().expect("refused");
        assert!(error.to_string().contains(expected), "{error}");
        server.join().unwrap();
    }
}
