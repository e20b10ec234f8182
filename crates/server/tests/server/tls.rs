//! Encrypted connections: the same backend, and nobody in between or without a certificate.
//!
//! Dangers: a client that is let in though nobody vouches for it, one tenant's data for another, an error that does not
//! say what to do, handshakes that keep others out, certificates that need a restart.

use crate::common::certificates::Certificates;
use crate::common::{Client, config, eventually, hello, serve, tcp};
use farfield_core::PageId;
use farfield_core::wire::RefuseCode;
use farfield_pool::{Buffer, Lane, LaneRequest, Op, PoolBuilder, Priority, conformance};
use farfield_server::{Config, Server, Tenants};
use farfield_tls::authority::Purpose;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(20);

fn encrypted(certificates: &Certificates) -> Config {
    let listen = vec!["tls://127.0.0.1:0".parse().unwrap(), "tcp://127.0.0.1:0".parse().unwrap()];
    Config { listen, tls: Some(certificates.server()), ..config() }
}

fn url(certificates: &Certificates, server: &Server) -> String {
    certificates.url(tcp(server), "client")
}

fn builder(url: &str) -> PoolBuilder {
    PoolBuilder::new().url(url).pages(4096).deadline(DEADLINE)
}

fn refusal(url: &str) -> String {
    builder(url).open().err().expect("it is refused").to_string()
}

/// Writes a page and reads it.
fn works(lane: &mut dyn Lane, page: u64) {
    let mut done = Vec::with_capacity(1);
    let mut finish = |op| {
        let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: DEADLINE, op };
        lane.submit(request).expect("room");
        while lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_millis(50));
        }
        let completion = done.remove(0);
        completion.result.map(|()| completion.buffer)
    };
    let mut buffer = Buffer::new(1);
    buffer.bytes_mut().fill(page as u8 | 1);
    buffer.seal();
    finish(Op::Write { page: PageId(page), buffer }).unwrap();
    let read = finish(Op::Read { page: PageId(page), buffer: Buffer::new(1) }).unwrap().unwrap();
    assert!(read.bytes().iter().all(|byte| *byte == page as u8 | 1));
}

#[test]
fn tls_is_a_backend() {
    let certificates = Certificates::new();
    let server = serve(encrypted(&certificates));
    conformance::run(&PoolBuilder::new().url(url(&certificates, &server)));
}

#[test]
fn tls_reports_the_death_of_its_server() {
    let certificates = Certificates::new();
    let server = serve(encrypted(&certificates));
    let builder = PoolBuilder::new().url(url(&certificates, &server));
    conformance::death(&builder, || drop(server));
}

#[test]
fn answers_that_a_client_leaves_lying_arrive_whole() {
    // 60 MiB of pages: more than a socket holds.
    const READS: u64 = 240;
    const RUN: u64 = 64;
    const PAGES: u64 = 4096;
    let certificates = Certificates::new();
    let server = serve(Config { capacity_bytes: Some(64 << 20), ..encrypted(&certificates) });
    for url in [url(&certificates, &server), server.endpoints()[1].clone()] {
        let backend = builder(&url).open().unwrap();
        let [mut lane, mut other] = [(); 2].map(|()| backend.open_lane().unwrap());
        let submit = |lane: &mut dyn Lane, tag, op| {
            lane.submit(LaneRequest { tag, priority: Priority::Demand, deadline: DEADLINE, op }).expect("room");
        };
        for page in (0..PAGES).step_by(RUN as usize) {
            let mut buffer = Buffer::new(RUN as usize);
            (0..RUN).for_each(|at| buffer.page_mut(at as usize).fill((page + at) as u8 | 1));
            buffer.seal();
            submit(&mut *lane, page, Op::Write { page: PageId(page), buffer });
        }
        let mut done = Vec::with_capacity(READS as usize);
        while lane.in_flight() > 0 {
            lane.wait(DEADLINE);
            lane.poll(&mut done);
            done.drain(..).for_each(|completion| completion.result.unwrap());
        }
        for tag in 0..READS {
            let page = PageId(tag * 17 % (PAGES - RUN));
            submit(&mut *lane, page.0, Op::Read { page, buffer: Buffer::new(RUN as usize) });
        }
        lane.poll(&mut done);
        // The server fills the socket meanwhile, and keeps what does not fit.
        (0..PAGES).step_by(64).for_each(|page| works(&mut *other, page));
        let mut ended = 0;
        while ended < READS {
            lane.wait(Duration::from_millis(50));
            lane.poll(&mut done);
            for completion in done.drain(..) {
                completion.result.unwrap();
                let buffer = completion.buffer.unwrap();
                for at in 0..RUN {
                    let page = completion.tag + at;
                    assert!(buffer.page(at as usize).iter().all(|byte| *byte == page as u8 | 1), "{url}: {page}");
                }
                ended += 1;
            }
        }
    }
}

#[test]
fn plain_text_at_the_port_of_tls_and_the_reverse_are_told_what_to_write() {
    let certificates = Certificates::new();
    let server = serve(encrypted(&certificates));
    let [tls, tcp] = [0, 1].map(|index| server.endpoints()[index].clone());
    let error = refusal(&tls.replace("tls://", "tcp://"));
    assert!(error.contains("this port speaks TLS: write tls://"), "{error}");
    let error = refusal(&certificates.url(&tcp.replace("tcp://", "tls://"), "client"));
    assert!(error.contains("does not speak TLS: write tcp://"), "{error}");
    works(&mut *builder(&tcp).open().unwrap().open_lane().unwrap(), 5);
}

#[test]
fn clients_without_a_certificate_or_with_one_of_another_authority_are_refused() {
    let (certificates, others) = (Certificates::new(), Certificates::new());
    let server = serve(encrypted(&certificates));
    let url = url(&certificates, &server);
    let (nobody, _) = url.split_once("&cert=").unwrap();
    assert!(refusal(nobody).contains("add cert=FILE&key=FILE"), "{}", refusal(nobody));
    let stranger = others.url(tcp(&server), "client");
    assert!(refusal(&stranger).contains("authority in ca="), "{}", refusal(&stranger));
    let (trusts, _) = url.split_once("&cert=").unwrap();
    let (_, own) = stranger.split_once("&cert=").unwrap();
    let error = refusal(&format!("{trusts}&cert={own}"));
    assert!(error.contains("--tls-client-ca"), "{error}");
}

#[test]
fn a_certificate_has_the_name_of_its_tenant() {
    let certificates = Certificates::new();
    certificates.issue(Purpose::Client, "bob", "bob");
    certificates.issue(Purpose::Client, "carol", "carol");
    let tenants = Tenants::parse("alice - 1M\nbob secret -").unwrap();
    let server = serve(Config { tenants: Some(tenants), ..encrypted(&certificates) });
    let url = |client| certificates.url(tcp(&server), client);
    let open = |url: &str, token: &str| builder(url).token(token).open();
    let mut lanes: Vec<_> = [("client", ""), ("bob", ""), ("carol", "secret")]
        .into_iter()
        .map(|(client, token)| open(&url(client), token).unwrap().open_lane().unwrap())
        .collect();
    lanes.iter_mut().zip(0..).for_each(|(lane, page)| works(&mut **lane, page));
    let error = open(&url("carol"), "").err().unwrap().to_string();
    assert!(error.contains("no tenant has a name that is in your certificate"), "{error}");
    let error = open(&url("client"), "-").err().unwrap().to_string();
    assert!(error.contains("wrong token"), "{error}");
    let (_, greeting) = Client::open(&server.endpoints()[1], &hello("", None));
    assert_eq!(greeting.err(), Some(RefuseCode::Token), "without TLS a token is needed as ever");
    // The quota of `alice` is a megabyte, and one page of it is used.
    let lane = &mut *lanes[0];
    let mut buffer = Buffer::new(256);
    buffer.seal();
    let op = Op::Write { page: PageId(1000), buffer };
    lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline: DEADLINE, op }).expect("room");
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(50));
    }
    assert!(done[0].result.is_err(), "{:?}", done[0].result);
}

#[test]
fn slow_handshakes_by_the_hundred_keep_nobody_out_and_end() {
    let certificates = Certificates::new();
    let greeting_within = Duration::from_millis(700);
    let server = serve(Config { greeting_within, connections_max: 40, ..encrypted(&certificates) });
    let address = tcp(&server).strip_prefix("tls://").unwrap();
    let begun = Instant::now();
    let slow: Vec<_> = (0..200)
        .map(|index| {
            use std::io::Write;
            let mut stream = TcpStream::connect(address).unwrap();
            // The beginning of a TLS record, of a lane, or nothing.
            let _ = stream.write_all([&[22, 3, 1, 2, 0, 1][..], b"FFL\x01", &[22], &[]][index % 4]);
            stream
        })
        .collect();
    works(&mut *builder(&url(&certificates, &server)).open().unwrap().open_lane().unwrap(), 7);
    eventually("all slow handshakes were ended", || {
        slow.iter().all(|mut stream| {
            use std::io::Read;
            stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
            let end = stream.read(&mut [0; 512]);
            !end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        })
    });
    assert!(begun.elapsed() < Duration::from_secs(15));
}

#[test]
fn certificates_are_exchanged_under_load() {
    let certificates = Certificates::new();
    let server = serve(encrypted(&certificates));
    let url = url(&certificates, &server);
    let old = builder(&url).open().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut lane = old.open_lane().unwrap();
            let mut page = 0;
            while !stop.load(Ordering::Relaxed) {
                works(&mut *lane, page % 4096);
                page += 1;
            }
            page
        });
        for _ in 0..5 {
            certificates.issue(Purpose::Server, "server", "127.0.0.1");
            server.reload_certificates().unwrap();
            works(&mut *builder(&url).open().unwrap().open_lane().unwrap(), 3);
            works(&mut *old.open_lane().unwrap(), 4095);
        }
        // A certificate for another name: new clients refuse it, and those of before go on.
        certificates.issue(Purpose::Server, "server", "other.test");
        server.reload_certificates().unwrap();
        let error = refusal(&url);
        assert!(error.contains("not for this name"), "{error}");
        stop.store(true, Ordering::Relaxed);
        assert!(worker.join().unwrap() > 10);
        works(&mut *old.open_lane().unwrap(), 9);
    });
}

#[test]
fn a_server_with_tls_needs_certificates_that_fit() {
    let certificates = Certificates::new();
    let start = |tls| Server::start(Config { tls, ..encrypted(&certificates) }).unwrap_err().to_string();
    assert!(start(None).contains("--tls-cert"), "{}", start(None));
    let mut files = certificates.server();
    files.key = files.key.with_file_name("client.key");
    assert!(start(Some(files)).contains("not the one of the certificate"));
}

#[test]
fn mirrors_and_stripes_take_servers_with_tls() {
    let certificates = Certificates::new();
    let servers = [serve(encrypted(&certificates)), serve(encrypted(&certificates))];
    let [one, other] = [&servers[0], &servers[1]].map(|server| url(&certificates, server));
    for url in [format!("mirror({one},{other})"), format!("stripe({one},throttle(latency=1us,{other}))")] {
        let backend = builder(&url).open().unwrap();
        let mut lane = backend.open_lane().unwrap();
        (0..40).for_each(|page| works(&mut *lane, page * 16));
    }
    let backend = builder(&format!("mirror({one},{other})")).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    works(&mut *lane, 1);
    let [_, survivor] = servers;
    works(&mut *lane, 2);
    drop(survivor);
}
