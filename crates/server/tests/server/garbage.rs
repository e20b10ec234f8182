//! Guards against bytes that bring the server down: random ones, and honest conversations with bits turned over.

use crate::common::*;
use farfield_core::wire::{
    self, CallBody, HEADER_BYTES, MessageHeader, MessageKind, PagePart, Request, WireRequest, encode_request,
};
use farfield_core::{PageId, RegionId};
use farfield_server::Config;
use fastrand::Rng;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An honest conversation: hello, then a few requests of all kinds.
fn conversation(client: &mut Client, dice: &mut Rng, region: RegionId) -> Vec<u8> {
    let mut bytes = Vec::new();
    if dice.u64(..10) > 0 {
        hello("", None).encode(&mut bytes);
    }
    for _ in 0..dice.u64(..8) {
        let page = PageId(dice.u64(..120));
        let count = dice.u32(..20);
        let request = match dice.u64(..19) {
            0 => Request::CreateRegion { pages: dice.u64(..1000) },
            1 => Request::DropRegion { region },
            2..=4 => Request::Read { region, page, count },
            5 => Request::Discard { region, page, count },
            6 => Request::CloneRegion { region },
            7 => Request::ClaimRegion { ticket: u128::from(dice.u64(..5)) },
            8 => Request::Stat,
            9 => Request::MapRegion { region, first_layer: count },
            10 => Request::Reserve { region, pages: count },
            11 => Request::Release { region, pages: count },
            12 => Request::Ping,
            13 => Request::Station,
            14 => Request::Expose { region, first_layer: count },
            15 | 16 => {
                let name = ["ff.tally", "ff.aggregate", "f"][dice.usize(..3)];
                let argument = [dice.u64(..200) as u8, dice.u64(..200) as u8, dice.u64(..200) as u8, 0];
                let argument = &argument[..dice.usize(..5)];
                let call = CallBody { name, version: 1 + dice.u32(..2), argument };
                let request = Request::Call { region, steps_max: count, call };
                let asked = WireRequest { tag: dice.u64(..9), background: false, deadline: None, request };
                encode_request(&asked, &mut bytes);
                continue;
            }
            17 => {
                let part = PagePart::new(dice.usize(..4000), 1 + dice.usize(..90)).unwrap();
                // Inside, a little outside, and far outside.
                let page = PageId([page.0, 999 + dice.u64(..3), 1 << dice.u64(..64)][dice.usize(..3)]);
                Request::ReadPart { region, page, part }
            }
            _ => {
                bytes.extend_from_slice(&client.write_frame(region, page.0, &[7; 3]).1);
                continue;
            }
        };
        let (background, deadline) = (dice.u64(..2) == 0, None);
        encode_request(&WireRequest { tag: dice.u64(..9), background, deadline, request }, &mut bytes);
    }
    bytes
}

/// Turns a few bits over, cuts, doubles or inserts.
fn damage(bytes: &mut Vec<u8>, dice: &mut Rng) {
    for _ in 0..=dice.u64(..4) {
        if bytes.is_empty() {
            return;
        }
        let at = dice.usize(..bytes.len());
        match dice.u64(..6) {
            0..=2 => bytes[at] ^= 1 << dice.u64(..8),
            3 => bytes.truncate(at),
            4 => bytes.insert(at, dice.u8(..)),
            _ => {
                // A length, count or page that is as large as can be.
                let end = bytes.len().min(at + 1 + dice.usize(..8));
                bytes[at..end].fill(0xff);
            }
        }
    }
}

/// A panic of a server thread ends one connection only, so nobody would notice.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        usual(panic);
    }));
}

#[test]
fn no_bytes_bring_the_server_down() {
    count_panics();
    let seed = 0x5eed_cafe_f00d_0001;
    let mut dice = Rng::with_seed(seed);
    let server = serve(Config { lease: std::time::Duration::ZERO, ..config() });
    let mut good = Client::new(tcp(&server));
    let region = good.create(1000).unwrap();
    good.write(region, 0, &[1, 2, 3]).unwrap();
    let (mut welcomed, mut answered) = (0, 0);
    for case in 0..4000 {
        let url = if case % 2 == 0 { tcp(&server) } else { unix(&server) };
        let mut client = Client::connect(url);
        let mut bytes = match dice.u64(..10) {
            // Noise from the first byte on.
            0 => (0..dice.u64(..300)).map(|_| dice.u8(..)).collect(),
            _ => {
                // Numbers that exist: the good client's region, and those that strangers make.
                let target = RegionId(region.0 + dice.u64(..3));
                conversation(&mut client, &mut dice, target)
            }
        };
        if dice.u64(..4) > 0 {
            damage(&mut bytes, &mut dice);
        }
        // The server may close while we talk; that is its right.
        if client.try_send(&bytes) && case % 4 != 0 {
            answered += usize::from(client.drain() > 0);
        }
        if case % 50 == 0 {
            let (_, greeting) = Client::open(url, &hello("", None));
            welcomed += usize::from(greeting.is_ok());
            assert_eq!(
                good.read(region, 0, 4),
                Ok(vec![Some(1), Some(2), Some(3), None]),
                "seed {seed:#x} case {case}"
            );
        }
    }
    assert_eq!(welcomed, 80, "an honest client is always welcome");
    assert!(answered > 2000, "only {answered} conversations got anywhere: the test tests nothing");
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "seed {seed:#x}: a thread of the server panicked");
    good.write(region, 3, &[4]).unwrap();
    assert_eq!(good.read(region, 0, 4), Ok(vec![Some(1), Some(2), Some(3), Some(4)]));
    eventually("the strangers and what they left are gone", || {
        let stat = server.stat();
        (stat.sessions, stat.connections, stat.regions) == (1, 1, 1)
    });
    // Snapshots that were cloned and never claimed may still wait; nothing else holds pages.
    assert!(server.stat().used_pages >= 4);
}

#[test]
fn an_overlong_message_is_refused_before_its_body_arrives() {
    let server = serve(config());
    let head = |kind: MessageKind, body: u32, count: u32| {
        MessageHeader { kind: kind as u8, body, count, ..MessageHeader::default() }.encode()
    };
    // A stranger's hello of a megabyte, and of four gigabytes.
    for body in [1 << 20, u32::MAX] {
        let mut client = Client::connect(tcp(&server));
        client.send(&head(MessageKind::Hello, body, 0));
        let (answer, _) = client.receive().expect("a refusal");
        assert_eq!(answer.kind, MessageKind::REFUSAL);
        client.expect_close();
    }
    // Anything but a hello at first.
    let mut client = Client::connect(tcp(&server));
    client.send(&head(MessageKind::Stat, 0, 0));
    assert_eq!(client.receive().expect("a refusal").0.kind, MessageKind::REFUSAL);
    client.expect_close();
    // A guest's write that is longer than agreed: the connection is over, and nothing of it was waited for.
    for (body, count) in
        [(u32::MAX, 1), (wire::write_body_bytes(257) as u32, 257), (wire::BODY_BYTES_LIMIT as u32, 4096)]
    {
        let mut client = Client::new(tcp(&server));
        client.send(&head(MessageKind::Write, body, count));
        client.expect_close();
    }
    // A length that does not fit the count.
    let mut client = Client::new(tcp(&server));
    let mut frame = head(MessageKind::Write, 100, 1).to_vec();
    frame.resize(HEADER_BYTES + 100, 0);
    client.send(&frame);
    client.expect_close();
    Client::new(tcp(&server)).ask(Request::Ping).unwrap();
}
