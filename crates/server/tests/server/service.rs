//! What a server promises its clients, said over the wire: limits, isolation, leases, refusals, the way it stops.

use crate::common::*;
use farfield_core::wire::{ErrorCode, MessageHeader, MessageKind, RefuseCode, Reply, Request, flags};
use farfield_core::{PageId, RegionId};
use farfield_server::{Config, StartError, Tenants};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

#[test]
fn discarded_and_dropped_memory_is_given_back() {
    let server = serve(config());
    for url in [tcp(&server), unix(&server)] {
        let mut client = Client::new(url);
        let region = client.create(1 << 20).unwrap();
        client.write(region, 100, &[1, 2, 3, 4]).unwrap();
        client.write(region, 1 << 19, &[5]).unwrap();
        assert_eq!(client.stat().used_pages, 5);
        client.discard(region, 101, 2).unwrap();
        assert_eq!(client.stat().used_pages, 3);
        assert_eq!(client.read(region, 100, 4), Ok(vec![Some(1), None, None, Some(4)]));
        client.discard(region, 0, 1 << 20).unwrap();
        assert_eq!(client.stat().used_pages, 0);
        client.write(region, 7, &[9]).unwrap();
        client.ask(Request::DropRegion { region }).unwrap();
        assert_eq!(client.stat().used_pages, 0);
        assert_eq!(client.read(region, 7, 1), Err(ErrorCode::UnknownRegion));
    }
}

#[test]
fn a_full_server_says_so_and_stores_nothing() {
    let server = serve(Config { capacity_bytes: Some(MIB), ..config() });
    let mut client = Client::new(tcp(&server));
    let region = client.create(1 << 20).unwrap();
    client.write(region, 0, &[1; 200]).unwrap();
    assert_eq!(client.write(region, 100, &[2; 200]), Err(ErrorCode::PoolFull));
    assert_eq!(client.stat().used_pages, 200);
    assert_eq!(client.read(region, 199, 2), Ok(vec![Some(1), None]));
    client.write(region, 100, &[3; 156]).unwrap();
    assert_eq!(client.stat().used_pages, 256);
    assert_eq!(client.write(region, 300, &[4]), Err(ErrorCode::PoolFull));
    client.write(region, 0, &[5; 256]).unwrap();
    client.discard(region, 0, 1).unwrap();
    client.write(region, 300, &[4]).unwrap();
}

fn two_tenants() -> Config {
    Config { tenants: Some(Tenants::parse("alice a-token 1M\nbob b-token -\n").unwrap()), ..config() }
}

#[test]
fn a_quota_binds_its_tenant_and_nobody_else() {
    let server = serve(two_tenants());
    let client = |token| {
        let (client, greeting) = Client::open(tcp(&server), &hello(token, None));
        greeting.unwrap();
        client
    };
    let (mut alice, mut alice_again, mut bob) = (client("a-token"), client("a-token"), client("b-token"));
    let region = alice.create(1000).unwrap();
    let second = alice_again.create(1000).unwrap();
    let other = bob.create(1000).unwrap();
    alice.write(region, 0, &[1; 200]).unwrap();
    assert_eq!(alice_again.write(second, 0, &[1; 57]), Err(ErrorCode::PoolFull));
    alice_again.write(second, 0, &[1; 56]).unwrap();
    bob.write(other, 0, &[1; 256]).unwrap();
    bob.write(other, 256, &[1; 256]).unwrap();
}

#[test]
fn a_wrong_token_is_refused_on_every_road() {
    let server = serve(two_tenants());
    for url in [tcp(&server), unix(&server)] {
        for token in ["", "a-toke", "a-token2", "x"] {
            let (mut client, greeting) = Client::open(url, &hello(token, None));
            assert_eq!(greeting, Err(RefuseCode::Token));
            client.expect_close();
        }
        let (_, greeting) = Client::open(url, &hello("b-token", None));
        greeting.unwrap();
    }
}

#[test]
fn an_address_that_guesses_tokens_is_slowed_down_and_its_sessions_go_on() {
    let server = serve(two_tenants());
    let (_kept, greeting) = Client::open(tcp(&server), &hello("b-token", None));
    let session = greeting.unwrap().session;
    // So many are not looked at within a second, however they come.
    let closed = (0..200).any(|guess| {
        drop(Client::open(tcp(&server), &hello(&format!("guess-{guess}"), None)));
        Client::open(tcp(&server), &hello("b-token", None)).1 == Err(RefuseCode::Guesses)
    });
    assert!(closed, "right and wrong are no longer told apart");
    for (url, session) in [(tcp(&server), Some(session)), (unix(&server), None)] {
        let (_, greeting) = Client::open(url, &hello("b-token", session));
        greeting.unwrap();
    }
    eventually("it is forgiven", || Client::open(tcp(&server), &hello("b-token", None)).1.is_ok());
}

#[test]
fn without_tokens_a_socket_serves_its_own_user_only() {
    let server = serve(config());
    let url = unix(&server).to_owned();
    // The raw call changes this one thread only, where libc's would change the process.
    let stranger = std::thread::spawn(move || {
        const NOBODY: libc::c_long = 65534;
        // SAFETY: no pointers.
        if unsafe { libc::syscall(libc::SYS_setresuid, -1 as libc::c_long, NOBODY, -1 as libc::c_long) } != 0 {
            eprintln!("only root can be somebody else: nothing tested");
            return None;
        }
        Some(Client::open(&url, &hello("", None)).1)
    });
    if let Some(greeting) = stranger.join().unwrap() {
        assert_eq!(greeting, Err(RefuseCode::Token));
    }
    Client::new(unix(&server));
}

#[test]
fn pages_of_one_client_are_not_found_by_another() {
    let server = serve(two_tenants());
    let (mut alice, alices) = Client::open(tcp(&server), &hello("a-token", None));
    let (mut bob, _) = Client::open(tcp(&server), &hello("b-token", None));
    let region = alice.create(100).unwrap();
    alice.write(region, 0, &[42]).unwrap();
    let ticket = alice.clone_region(region).unwrap();
    assert_eq!(bob.read(region, 0, 1), Err(ErrorCode::UnknownRegion));
    assert_eq!(bob.write(region, 0, &[1]), Err(ErrorCode::UnknownRegion));
    assert_eq!(bob.discard(region, 0, 1), Err(ErrorCode::UnknownRegion));
    assert_eq!(bob.clone_region(region), Err(ErrorCode::UnknownRegion));
    assert_eq!(bob.ask(Request::DropRegion { region }), Err(ErrorCode::UnknownRegion));
    assert_eq!(bob.claim(ticket), Err(ErrorCode::Ticket));
    let joined = Client::open(tcp(&server), &hello("b-token", Some(alices.unwrap().session))).1;
    assert_eq!(joined, Err(RefuseCode::Session));
    let (mut second_of_alice, _) = Client::open(tcp(&server), &hello("a-token", None));
    assert_eq!(second_of_alice.read(region, 0, 1), Err(ErrorCode::UnknownRegion), "another session of the same tenant");
    assert_eq!(alice.read(region, 0, 1), Ok(vec![Some(42)]));
}

#[test]
fn a_clone_holds_what_was_there_and_lives_on_its_own() {
    let server = serve(config());
    let mut parent = Client::new(tcp(&server));
    let region = parent.create(1000).unwrap();
    parent.write(region, 0, &[1, 2, 3]).unwrap();
    let ticket = parent.clone_region(region).unwrap();
    parent.write(region, 0, &[10]).unwrap();
    parent.discard(region, 2, 1).unwrap();
    let mut child = Client::new(tcp(&server));
    let copy = child.claim(ticket).unwrap();
    assert_eq!(child.claim(ticket), Err(ErrorCode::Ticket), "a ticket is good once");
    child.write(copy, 1, &[20]).unwrap();
    assert_eq!(parent.read(region, 0, 3), Ok(vec![Some(10), Some(2), None]));
    assert_eq!(child.read(copy, 0, 3), Ok(vec![Some(1), Some(20), Some(3)]));
    drop(parent);
    assert_eq!(child.read(copy, 0, 3), Ok(vec![Some(1), Some(20), Some(3)]));
}

#[test]
fn an_unclaimed_clone_does_not_hold_memory_forever() {
    let server = serve(Config { ticket_life: Duration::from_millis(50), ..config() });
    let mut client = Client::new(tcp(&server));
    let region = client.create(1000).unwrap();
    client.write(region, 0, &[1; 100]).unwrap();
    let ticket = client.clone_region(region).unwrap();
    client.ask(Request::DropRegion { region }).unwrap();
    eventually("the snapshot is gone", || server.stat().used_pages == 0);
    assert_eq!(client.claim(ticket), Err(ErrorCode::Ticket));
}

#[test]
fn superseded_pages_are_given_back_after_the_clone_is_gone() {
    let server = serve(Config { sweep_every: Duration::from_millis(20), ..config() });
    let mut client = Client::new(tcp(&server));
    let region = client.create(1000).unwrap();
    client.write(region, 0, &[1; 100]).unwrap();
    let ticket = client.clone_region(region).unwrap();
    let copy = client.claim(ticket).unwrap();
    client.write(region, 0, &[2; 100]).unwrap();
    assert_eq!(server.stat().used_pages, 200);
    client.ask(Request::DropRegion { region: copy }).unwrap();
    eventually("the old pages are swept", || server.stat().used_pages == 100);
    assert_eq!(client.read(region, 0, 100), Ok(vec![Some(2); 100]));
}

#[test]
fn regions_outlive_a_lost_connection_by_the_lease_and_no_longer() {
    let store = |server: &farfield_server::Server| {
        let (mut client, greeting) = Client::open(tcp(server), &hello("", None));
        let region = client.create(100).unwrap();
        client.write(region, 0, &[7]).unwrap();
        (greeting.unwrap().session, region)
    };
    let server = serve(Config { lease: PATIENCE, ..config() });
    let (session, region) = store(&server);
    let (mut back, greeting) = Client::open(tcp(&server), &hello("", Some(session)));
    greeting.unwrap();
    assert_eq!(back.read(region, 0, 1), Ok(vec![Some(7)]));

    let lease = Duration::from_millis(300);
    let server = serve(Config { lease, ..config() });
    let before = Instant::now();
    let (session, _) = store(&server);
    eventually("the lease is over", || server.stat().sessions == 0);
    assert!(before.elapsed() >= lease, "the lease was kept");
    assert_eq!(server.stat().used_pages, 0);
    assert_eq!(Client::open(tcp(&server), &hello("", Some(session))).1, Err(RefuseCode::Session));
}

#[test]
fn without_a_lease_memory_goes_with_the_connection_and_bye_never_waits() {
    let server = serve(Config { lease: Duration::ZERO, ..config() });
    let mut client = Client::new(unix(&server));
    let region = client.create(100).unwrap();
    client.write(region, 0, &[7]).unwrap();
    drop(client);
    eventually("freed", || server.stat().used_pages == 0);

    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    let region = client.create(100).unwrap();
    client.write(region, 0, &[7]).unwrap();
    client.ask(Request::Bye).unwrap();
    assert_eq!((server.stat().used_pages, server.stat().sessions), (0, 0));
    client.expect_close();
}

#[test]
fn requests_that_cannot_be_are_errors_and_the_connection_goes_on() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    assert_eq!(client.create(0), Err(ErrorCode::BadRequest));
    assert_eq!(client.create(u64::MAX), Err(ErrorCode::BadRequest));
    let region = client.create(100).unwrap();
    assert_eq!(client.read(region, 99, 2), Err(ErrorCode::OutOfRange));
    assert_eq!(client.read(region, u64::MAX, 1), Err(ErrorCode::OutOfRange));
    assert_eq!(client.read(region, 0, 0), Err(ErrorCode::BadRequest));
    assert_eq!(client.read(region, 0, 1 << 20), Err(ErrorCode::TooMuch));
    assert_eq!(client.write(region, 100, &[1]), Err(ErrorCode::OutOfRange));
    assert_eq!(client.discard(region, 1, 100), Err(ErrorCode::OutOfRange));
    assert_eq!(client.claim(12345), Err(ErrorCode::Ticket));
    for request in [
        Request::MapRegion { region, first_layer: 0 },
        Request::Reserve { region, pages: 1 },
        Request::Release { region, pages: 1 },
    ] {
        assert_eq!(client.ask(request), Err(ErrorCode::Unsupported), "{request:?} needs a Unix socket");
    }
    // A kind of a later version.
    client.send(&MessageHeader { kind: 0x3f, tag: 77, ..MessageHeader::default() }.encode());
    let (head, _) = client.receive().unwrap();
    assert_eq!((head.tag, head.code), (77, ErrorCode::Unsupported.number()));
    assert_eq!(client.ask(Request::Ping), Ok(Reply::Done));
}

#[test]
fn parts_of_pages_that_are_not_there_are_out_of_range_also_many_at_once() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    let region = client.create(10).unwrap();
    for page in [10, 1 << 13, 1 << 32, 1 << 40, u64::MAX] {
        // In one packet, so that the server looks at them together.
        let head = MessageHeader {
            kind: MessageKind::ReadPart as u8,
            count: 8,
            region: region.0,
            page,
            ..MessageHeader::default()
        };
        let frames: Vec<u8> = (1..=3).flat_map(|tag| MessageHeader { tag, ..head }.encode()).collect();
        client.send(&frames);
        for tag in 1..=3 {
            let (head, _) = client.receive().unwrap();
            assert_eq!((head.tag, head.code), (tag, ErrorCode::OutOfRange.number()), "page {page}");
        }
    }
}

#[test]
fn a_page_that_arrives_damaged_is_not_stored() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    let region = client.create(100).unwrap();
    client.write(region, 5, &[1, 2]).unwrap();
    let (_, mut frame) = client.write_frame(region, 5, &[3, 4]);
    let last = frame.len() - 1;
    frame[last] ^= 1;
    client.send(&frame);
    let (head, _) = client.receive().unwrap();
    assert_eq!((head.code, head.page), (ErrorCode::Corrupt.number(), 6));
    assert_eq!(client.read(region, 5, 2), Ok(vec![Some(1), Some(2)]));
}

#[test]
fn demand_is_served_before_background_of_the_same_batch() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    let region = client.create(1000).unwrap();
    client.write(region, 0, &[1]).unwrap();
    // In one packet, so that the server sees them together: nine for nobody, then one that somebody waits for.
    let mut frames = Vec::new();
    let read = MessageHeader { kind: MessageKind::Read as u8, count: 1, region: region.0, ..MessageHeader::default() };
    for tag in 100..109 {
        frames.extend_from_slice(&MessageHeader { tag, flags: flags::BACKGROUND, ..read }.encode());
    }
    frames.extend_from_slice(&MessageHeader { tag: 200, ..read }.encode());
    client.send(&frames);
    let order: Vec<u64> = (0..10).map(|_| client.receive().unwrap().0.tag).collect();
    assert_eq!(order[0], 200, "{order:?}");
    assert_eq!(order[1..], [100, 101, 102, 103, 104, 105, 106, 107, 108]);
}

#[test]
fn a_request_that_waited_too_long_is_not_served() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    let region = client.create(10_000).unwrap();
    // A write in front takes longer than a microsecond. The network may deliver the two apart, and then the second is in
    // time; so again, until they arrive together.
    eventually("the two arrive together", || {
        let (_, mut frames) = client.write_frame(region, 0, &[1; 15]);
        let discard = MessageHeader {
            kind: MessageKind::Discard as u8,
            tag: 999,
            count: 1,
            region: region.0,
            ..MessageHeader::default()
        };
        frames.extend_from_slice(&MessageHeader { deadline_us: 1, ..discard }.encode());
        client.send(&frames);
        let (written, _) = client.receive().unwrap();
        assert_eq!(written.kind, MessageKind::Write.answer());
        let (head, _) = client.receive().unwrap();
        let late = head.kind == MessageKind::ERROR;
        if late {
            assert_eq!((head.tag, head.code), (999, ErrorCode::TimedOut.number()));
        }
        assert_eq!(client.read(region, 0, 1), Ok(vec![late.then_some(1)]), "what is late changes nothing");
        late
    });
}

#[test]
fn large_reads_in_a_row_all_come_whole() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    let region = client.create(10_000).unwrap();
    let value = |page: u64| page * 31 + 1;
    for first in (0..2048).step_by(256) {
        let values: Vec<u64> = (first..first + 256).map(value).collect();
        client.write(region, first, &values).unwrap();
    }
    // 64 MiB of answers asked for at once: far more than socket buffers hold, so sends are cut everywhere.
    let mut frames = Vec::new();
    for tag in 0..64u64 {
        let page = tag % 8 * 256;
        let read = MessageHeader {
            kind: MessageKind::Read as u8,
            tag,
            count: 256,
            region: region.0,
            page,
            ..MessageHeader::default()
        };
        frames.extend_from_slice(&read.encode());
    }
    client.send(&frames);
    for tag in 0..64u64 {
        let (head, body) = client.receive().unwrap();
        assert_eq!(head.tag, tag);
        let first = tag % 8 * 256;
        let expected: Vec<_> = (first..first + 256).map(|page| Some(value(page))).collect();
        assert_eq!(read_values(&head, &body, 256), expected);
    }
}

#[test]
fn more_connections_than_allowed_are_told_so() {
    let server = serve(Config { connections_max: 3, ..config() });
    let kept: Vec<Client> = (0..3).map(|_| Client::new(tcp(&server))).collect();
    let mut refused = Client::connect(tcp(&server));
    assert_eq!(refused.greet(&hello("", None)), Err(RefuseCode::Connections));
    refused.expect_close();
    drop(kept);
    eventually("there is room again", || Client::open(tcp(&server), &hello("", None)).1.is_ok());
}

#[test]
fn no_version_in_common_is_refused_with_ours() {
    let server = serve(config());
    let future = farfield_core::wire::Hello { version_min: 900, version_max: 901, ..hello("", None) };
    assert_eq!(Client::open(tcp(&server), &future).1, Err(RefuseCode::Version));
}

#[test]
fn a_client_that_says_nothing_is_not_waited_for() {
    let server = serve(Config { greeting_within: Duration::from_millis(50), ..config() });
    let mut silent = Client::connect(tcp(&server));
    let mut slow = Client::connect(tcp(&server));
    slow.send(&[1, 2, 3]);
    silent.expect_close();
    slow.expect_close();
}

#[test]
fn a_draining_server_keeps_its_clients_and_takes_no_new_ones() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    let region = client.create(100).unwrap();
    client.write(region, 0, &[7]).unwrap();
    assert_eq!(client.receive_flags_of_ping(), 0);
    server.drain();
    assert!(!server.is_drained());
    assert_ne!(client.receive_flags_of_ping() & flags::STOPPING, 0, "clients are told");
    assert_eq!(Client::open(tcp(&server), &hello("", None)).1, Err(RefuseCode::Stopping));
    assert_eq!(client.read(region, 0, 1), Ok(vec![Some(7)]));
    let url = tcp(&server).to_owned();
    let waiting = std::thread::spawn(move || server.shutdown(PATIENCE));
    client.ask(Request::DropRegion { region }).unwrap();
    assert!(waiting.join().unwrap(), "all regions were gone in time");
    client.expect_close();
    assert!(std::net::TcpStream::connect(url.strip_prefix("tcp://").unwrap()).is_err());
}

#[test]
fn a_draining_server_still_gives_out_the_snapshots_that_it_promised() {
    let server = serve(config());
    let mut parent = Client::new(tcp(&server));
    let region = parent.create(100).unwrap();
    parent.write(region, 0, &[7]).unwrap();
    let ticket = parent.clone_region(region).unwrap();
    parent.ask(Request::DropRegion { region }).unwrap();
    server.drain();
    assert!(!server.is_drained(), "a child is on its way");
    let mut child = Client::new(tcp(&server));
    let copy = child.claim(ticket).unwrap();
    assert_eq!(child.read(copy, 0, 1), Ok(vec![Some(7)]));
    assert_eq!(Client::open(tcp(&server), &hello("", None)).1, Err(RefuseCode::Stopping));
    child.ask(Request::Bye).unwrap();
    assert!(server.is_drained());
}

impl Client {
    fn receive_flags_of_ping(&mut self) -> u8 {
        self.request(Request::Ping);
        self.receive().unwrap().0.flags
    }
}

#[test]
fn shutdown_does_not_wait_longer_than_it_was_given() {
    let server = serve(config());
    let mut client = Client::new(tcp(&server));
    client.create(100).unwrap();
    let start = Instant::now();
    assert!(!server.shutdown(Duration::from_millis(100)));
    assert!(start.elapsed() < PATIENCE);
    client.expect_close();
}

#[test]
fn an_idle_server_stops_at_once() {
    let mut best = Duration::MAX;
    // Every `farfield run` without --far pays for this. Its threads look by themselves once a second; so much longer takes a
    // server that does not wake them. The best of ten, because the machine may be busy.
    for _ in 0..10 {
        let server = serve(Config { metrics: Some("127.0.0.1:0".parse().unwrap()), ..config() });
        let start = Instant::now();
        assert!(server.shutdown(PATIENCE));
        best = best.min(start.elapsed());
    }
    assert!(best < Duration::from_millis(500), "{best:?}");
}

#[test]
fn a_place_that_is_taken_is_said_to_be_and_a_dead_socket_is_taken_over() {
    let server = serve(config());
    let taken = |url: &str| {
        let config = Config { listen: vec![url.parse().unwrap()], ..Config::default() };
        farfield_server::Server::start(config)
    };
    assert!(matches!(taken(tcp(&server)), Err(StartError::AddressInUse { .. })));
    assert!(matches!(taken("unix:/nowhere/at/all"), Err(StartError::Listen { .. })));
    assert!(matches!(farfield_server::Server::start(Config::default()), Err(StartError::NowhereToListen)));

    let path = std::env::temp_dir().join(format!("farfield-socket-{}", std::process::id()));
    let url = format!("unix:{}", path.display());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let first = taken(&url).expect("what a dead server left behind is in nobody's use");
    assert!(matches!(taken(&url), Err(StartError::AddressInUse { .. })));
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(first);
    assert!(!path.exists(), "a server cleans up after itself");
}

#[test]
fn room_is_set_aside_and_given_back_over_a_unix_socket() {
    let server = serve(Config { capacity_bytes: Some(100 * 4096), ..config() });
    let mut client = Client::new(unix(&server));
    let region = client.create(1000).unwrap();
    assert_eq!(client.ask(Request::Reserve { region: RegionId(99_999), pages: 1 }), Err(ErrorCode::UnknownRegion));
    client.ask(Request::Reserve { region, pages: 60 }).unwrap();
    assert_eq!(client.ask(Request::Reserve { region, pages: 60 }), Err(ErrorCode::PoolFull));
    client.ask(Request::Release { region, pages: 30 }).unwrap();
    client.ask(Request::Reserve { region, pages: 60 }).unwrap();
    drop(client);
    let mut other = Client::new(tcp(&server));
    let region = other.create(1000).unwrap();
    assert_eq!(other.write(region, 0, &[1; 50]), Err(ErrorCode::PoolFull));
    assert_eq!(other.ask(Request::Read { region, page: PageId(0), count: 1 }), Ok(Reply::Read));
}

#[test]
fn metrics_say_what_happened() {
    use std::io::{Read, Write};
    let metrics = Some("127.0.0.1:0".parse().unwrap());
    let server = serve(Config { metrics, ..two_tenants() });
    let (mut alice, _) = Client::open(tcp(&server), &hello("a-token", None));
    let region = alice.create(1000).unwrap();
    alice.write(region, 0, &[1; 10]).unwrap();
    alice.read(region, 5, 10).unwrap();
    assert_eq!(alice.write(region, 0, &[1; 256]).and(alice.write(region, 256, &[1])), Err(ErrorCode::PoolFull));
    // Connections add up at the end of a batch; after the answer to the next request they have.
    alice.stat();
    let get = |request: &str| {
        let mut stream = std::net::TcpStream::connect(server.metrics_address().unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = get("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for line in [
        "farfield_used_bytes 1048576",
        "farfield_regions 1",
        "farfield_tenant_used_bytes{tenant=\"alice\"} 1048576",
        "farfield_tenant_used_bytes{tenant=\"bob\"} 0",
        "farfield_tenant_quota_bytes{tenant=\"alice\"} 1048576",
        "farfield_read_pages_total 5",
        "farfield_absent_pages_total 5",
        "farfield_full_requests_total 1",
        "farfield_requests_total{kind=\"write\"} 3",
        "# EOF",
    ] {
        assert!(answer.lines().any(|found| found == line), "{line} is not in\n{answer}");
    }
    assert!(get("GET /secret HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(get("rubbish\r\n\r\n").starts_with("HTTP/1.1 400 "));
    assert!(!answer.contains("a-token"));
}
