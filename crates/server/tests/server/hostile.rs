//! Guards against one tenant who uses up what belongs to all: at each resource a hostile tenant takes what it can get, and an honest
//! one goes on as if nobody else were there. When the hostile one has gone, nothing of it is left on the ledgers.

use crate::common::*;
use farfield_core::wire::{ErrorCode, MessageHeader, MessageKind, RefuseCode, Request};
use farfield_core::{PageId, RegionId};
use farfield_server::{Config, Server, Tenants};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const GIB_PAGES: u64 = 1 << 18;

fn config_for_two() -> Config {
    Config {
        tenants: Some(Tenants::parse("hostile h-token 16M\nhonest g-token 64M\n").unwrap()),
        capacity_bytes: Some(256 << 20),
        metrics: Some("127.0.0.1:0".parse().unwrap()),
        lease: Duration::ZERO,
        connections_max: 40,
        sweep_every: Duration::from_millis(20),
        ..config()
    }
}

fn hostile(server: &Server) -> Client {
    let (client, greeting) = Client::open(tcp(server), &hello("h-token", None));
    greeting.unwrap();
    client
}

/// A client that does everything that clients do, and remembers what it stored.
struct Honest {
    client: Client,
    region: RegionId,
    value: u64,
}

impl Honest {
    fn new(server: &Server) -> Honest {
        let (mut client, greeting) = Client::open(tcp(server), &hello("g-token", None));
        greeting.unwrap();
        let region = client.create(4 * GIB_PAGES).unwrap();
        let mut honest = Honest { client, region, value: 1 };
        honest.goes_on(server);
        honest
    }

    /// Old and new pages, long and short, near and far from each other; clones; new regions, sessions and connections.
    fn goes_on(&mut self, server: &Server) {
        let Honest { client, region, .. } = self;
        let before = self.value;
        self.value += 1;
        for first in [0, GIB_PAGES + 7, 3 * GIB_PAGES] {
            if before > 1 {
                assert_eq!(client.read(*region, first, 256), Ok(vec![Some(before); 256]));
            }
            client.write(*region, first, &[self.value; 256]).unwrap();
            client.write(*region, first + 3, &[self.value]).unwrap();
            assert_eq!(client.read(*region, first + 3, 1), Ok(vec![Some(self.value)]));
            assert_eq!(client.read(*region, first, 256), Ok(vec![Some(self.value); 256]));
        }
        let ticket = client.clone_region(*region).unwrap();
        let (mut other, greeting) = Client::open(tcp(server), &hello("g-token", None));
        greeting.unwrap();
        let copy = other.claim(ticket).unwrap();
        assert_eq!(other.read(copy, GIB_PAGES, 8), Ok([vec![None; 7], vec![Some(self.value)]].concat()));
        let fresh = other.create(1000).unwrap();
        other.write(fresh, 0, &[5]).unwrap();
        assert_eq!(other.read(fresh, 0, 2), Ok(vec![Some(5), None]));
        other.ask(Request::Bye).unwrap();
    }
}

/// A figure of the server's metrics.
fn metric(server: &Server, name: &str) -> u64 {
    let mut stream = TcpStream::connect(server.metrics_address().unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
}

fn held(server: &Server, resource: &str) -> u64 {
    metric(server, &format!("farfield_held{{resource=\"{resource}\"}}"))
}

/// While a hostile tenant keeps what `take` gave it the honest one goes on; afterwards nothing is left of either.
fn others_go_on<T>(config: Config, take: impl FnOnce(&Server) -> T) {
    let server = serve(config);
    let mut honest = Honest::new(&server);
    let taken = take(&server);
    for _ in 0..3 {
        honest.goes_on(&server);
    }
    assert!(metric(&server, "farfield_tenant_used_bytes{tenant=\"hostile\"}") <= 16 << 20);
    drop(taken);
    honest.goes_on(&server);
    drop(honest);
    let resources = ["descriptors", "mappings", "address_bytes", "sessions", "connections", "buffer_bytes"];
    for resource in resources {
        eventually(resource, || held(&server, resource) == 0);
    }
    eventually("no bookkeeping", || metric(&server, "farfield_bookkeeping_bytes") == 0);
    assert_eq!(server.stat().used_pages, 0);
}

#[test]
fn others_go_on_while_one_tenant_uses_up_mappings() {
    others_go_on(Config { mappings_max: Some(400), ..config_for_two() }, |server| {
        let mut client = hostile(server);
        let region = client.create(1 << 32).unwrap();
        // Stored again through a mapping, of which there is one for each GiB.
        for lap in 0..2 {
            for page in 0..500 {
                client.write(region, page * GIB_PAGES, &[lap + page]).unwrap();
            }
        }
        for page in 0..500 {
            assert_eq!(client.read(region, page * GIB_PAGES, 1), Ok(vec![Some(1 + page)]), "mapped or not");
        }
        assert!((150..300).contains(&held(server, "mappings")), "as many as are left for others");
        client
    });
}

/// Makes regions until there are no more for this tenant.
fn fill_with_regions(client: &mut Client, pages: u64) -> usize {
    for made in 0.. {
        match client.create(pages) {
            Ok(_) => {}
            Err(ErrorCode::TooMuch | ErrorCode::PoolFull) => return made,
            Err(other) => panic!("{other:?}"),
        }
    }
    unreachable!()
}

#[test]
fn others_go_on_while_one_tenant_makes_regions_without_pages() {
    for pages in [1, 1 << 32] {
        others_go_on(config_for_two(), |server| {
            let mut client = hostile(server);
            let made = fill_with_regions(&mut client, pages);
            assert!((100..5000).contains(&made), "{made} regions of {pages} pages");
            client
        });
    }
}

#[test]
fn others_go_on_while_one_tenant_uses_up_address_space_or_descriptors() {
    let tenants = Some(Tenants::parse("hostile h-token -\nhonest g-token 64M\n").unwrap());
    others_go_on(Config { tenants, ..config_for_two() }, |server| {
        let mut client = hostile(server);
        assert!(fill_with_regions(&mut client, 1 << 32) < 1400);
        client
    });
}

#[test]
fn others_go_on_while_one_tenant_clones_what_is_sparse() {
    others_go_on(Config { ticket_life: Duration::from_secs(5), ..config_for_two() }, |server| {
        let mut client = hostile(server);
        let region = client.create(1 << 32).unwrap();
        for page in 0..600 {
            client.write(region, page << 20, &[page]).unwrap();
        }
        let clones = (0..1000).find_map(|made| client.clone_region(region).err().map(|error| (made, error)));
        let (made, error) = clones.expect("clones end");
        assert_eq!(error, ErrorCode::PoolFull);
        assert!(made < 10, "each takes two pages of bookkeeping for each page: {made}");
        assert!(metric(server, "farfield_bookkeeping_bytes") < 20 << 20);
        // Tickets end with their time, and here before the server is looked at.
        client.ask(Request::Bye).unwrap();
        drop(client);
        eventually("the tickets are over", || metric(server, "farfield_tenant_used_bytes{tenant=\"hostile\"}") == 0);
    });
}

#[test]
fn one_tenant_gets_half_of_the_connections_and_others_the_rest() {
    others_go_on(config_for_two(), |server| {
        let mut kept = Vec::new();
        let refused = loop {
            let (client, greeting) = Client::open(tcp(server), &hello("h-token", None));
            match greeting {
                Ok(_) => kept.push(client),
                Err(code) => break code,
            }
        };
        assert_eq!(refused, RefuseCode::Connections);
        assert!((10..=20).contains(&kept.len()), "{}", kept.len());
        kept
    });
}

#[test]
fn connections_that_say_nothing_do_not_keep_others_out() {
    others_go_on(config_for_two(), |server| (0..200).map(|_| Client::connect(tcp(server))).collect::<Vec<_>>());
}

/// A connection that takes as much of `bytes` as the server and the kernel do, and no answers.
fn one_sided(server: &Server, bytes: impl FnOnce(RegionId) -> Vec<u8>) -> (Client, TcpStream) {
    let (mut first, greeting) = Client::open(tcp(server), &hello("h-token", None));
    let region = first.create(1000).unwrap();
    first.write(region, 0, &[7; 64]).unwrap();
    let mut out = Vec::new();
    hello("h-token", Some(greeting.unwrap().session)).encode(&mut out);
    let mut stream = TcpStream::connect(tcp(server).strip_prefix("tcp://").unwrap()).unwrap();
    stream.write_all(&out).unwrap();
    stream.read_exact(&mut [0; 40 + 48]).unwrap();
    stream.set_nonblocking(true).unwrap();
    let _ = stream.write(&bytes(region));
    (first, stream)
}

#[test]
fn others_go_on_while_one_tenant_sends_halves_of_messages() {
    let config = Config { connections_max: 400, ..config_for_two() };
    others_go_on(config, |server| {
        let half = |region: RegionId| {
            let head = MessageHeader {
                kind: MessageKind::Write as u8,
                body: 256 * 4104,
                count: 256,
                region: region.0,
                ..MessageHeader::default()
            };
            [&head.encode()[..], &vec![7; 700_000]].concat()
        };
        let kept: Vec<_> = (0..50).map(|_| one_sided(server, half)).collect();
        assert!(held(server, "buffer_bytes") <= 72 << 20, "half of 128 MiB, and what the honest one holds");
        kept
    });
}

#[test]
fn others_go_on_while_one_tenant_takes_no_answers() {
    let config = Config { connections_max: 400, ..config_for_two() };
    others_go_on(config, |server| {
        let reads = |region: RegionId| {
            let read = |tag| MessageHeader {
                kind: MessageKind::Read as u8,
                count: 64,
                tag,
                region: region.0,
                ..MessageHeader::default()
            };
            (0..1000).flat_map(|tag| read(tag).encode()).collect()
        };
        let kept: Vec<_> = (0..50).map(|_| one_sided(server, reads)).collect();
        assert!(held(server, "buffer_bytes") <= 72 << 20, "half of 128 MiB, and what the honest one holds");
        kept
    });
}

#[test]
fn others_go_on_while_one_tenant_takes_no_descriptors() {
    others_go_on(config_for_two(), |server| {
        let clients: Vec<_> = (0..8)
            .map(|_| {
                let (mut client, greeting) = Client::open(unix(server), &hello("h-token", None));
                greeting.unwrap();
                let region = client.create(1000).unwrap();
                for _ in 0..200 {
                    client.request(Request::MapRegion { region, first_layer: 0 });
                }
                client
            })
            .collect();
        assert!(held(server, "descriptors") < 8 * (4 + 4) + 40, "a region, and one answer that is not taken");
        clients
    });
}

#[test]
fn descriptors_are_sent_at_the_pace_of_the_receiver() {
    let server = serve(config());
    let mut client = Client::new(unix(&server));
    let region = client.create(1000).unwrap();
    let tags: Vec<u64> = (0..50).map(|_| client.request(Request::MapRegion { region, first_layer: 0 })).collect();
    for tag in tags {
        assert_eq!(
            client.receive().map(|(head, _)| (head.tag, head.kind)),
            Some((tag, MessageKind::MapRegion.answer()))
        );
    }
}

#[test]
fn without_tokens_one_address_gets_half_and_another_the_rest() {
    let config = Config { tenants: None, connections_max: 40, ..config() };
    let server = serve(config);
    let mut kept = Vec::new();
    let refused = loop {
        let (client, greeting) = Client::open(tcp(&server), &hello("", None));
        match greeting {
            Ok(_) => kept.push(client),
            Err(code) => break code,
        }
    };
    assert_eq!(refused, RefuseCode::Connections);
    assert_eq!(kept.len(), 20);
    // Another address: a user of this machine.
    let mut other = Client::new(unix(&server));
    let region = other.create(100).unwrap();
    other.write(region, 0, &[1]).unwrap();
    assert_eq!(other.ask(Request::Read { region, page: PageId(0), count: 1 }).map(drop), Ok(()));
}

#[test]
fn a_tenant_is_told_of_itself_only() {
    let server = serve(config_for_two());
    let mut honest = Honest::new(&server);
    let mut other = hostile(&server);
    let before = other.stat();
    honest.goes_on(&server);
    let after = other.stat();
    assert_eq!((after.used_pages, after.regions, after.sessions, after.connections), (0, 0, 1, 1));
    assert_eq!((after.read_pages, after.written_pages, after.failed_requests), (0, 0, 0));
    assert_eq!(after.capacity_pages, 4096, "its quota");
    assert!(after.received_bytes - before.received_bytes < 1000);
    eventually("what was overwritten is swept", || honest.client.stat().used_pages == 3 * 256);
    let stat = honest.client.stat();
    assert_eq!(stat.regions, 1);
    assert!(stat.read_pages > 0 && stat.written_pages > 0);
    assert_eq!(server.stat().used_pages, 3 * 256, "whoever runs the server sees all");
}
