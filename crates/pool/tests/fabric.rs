//! Guards against a station that lies or breaks: what it shows is believed only if its checksum is right, and asked for by message
//! otherwise. The server here is a script with a real station.
#![cfg(feature = "fabric")]
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "it runs outside of programs")]

mod common;

use common::frame;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::*;
use farfield_core::{Incarnation, PageId, RegionId, checksum};
use farfield_fabric::{Provider, Station};
use farfield_os::memfd::{self, Mapping, MappingAccess};
use farfield_pool::{Backend, Buffer, Completion, Lane, Op, PoolBuilder, PoolError, Priority};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGES: u64 = 64;
const LONG: Duration = Duration::from_secs(20);

/// What a right page holds: by message all of them do.
fn right(page: u64) -> Vec<u8> {
    vec![page as u8 | 0x40; PAGE_BYTES]
}

fn file(bytes: &[u8]) -> Mapping {
    let bytes = [bytes, &vec![0; bytes.len().next_multiple_of(PAGE_BYTES) - bytes.len()]].concat();
    let fd = memfd::create(c"window", bytes.len() as u64).unwrap();
    memfd::write_at(fd.as_fd(), &bytes, 0).unwrap();
    Mapping::new(fd.as_fd(), bytes.len() as u64, MappingAccess::Read).unwrap()
}

/// Page map, checksums and one layer in which all is right, to be spoilt.
struct Shown {
    page_map: Vec<u8>,
    sums: Vec<u64>,
    layer: Vec<u8>,
    layer_is_open: bool,
}

impl Shown {
    fn new() -> Shown {
        let layer: Vec<u8> = (0..PAGES).flat_map(right).collect();
        let sums = (0..PAGES).map(|page| checksum(&right(page))).collect();
        Shown { page_map: vec![1; PAGES as usize], sums, layer, layer_is_open: true }
    }
}

struct Script {
    station: Station,
    windows: [RemoteWindow; 3],
    /// Pages that were asked for by message.
    asked: Mutex<Vec<u64>>,
    /// Bits turned over in pages that are sent.
    spoils: AtomicU32,
    is_over: AtomicBool,
}

impl Script {
    fn converse(&self, mut peer: TcpStream) {
        while let Some((header, _)) = frame(&mut peer) {
            let mut out = Vec::new();
            match MessageKind::of_request(header.kind).unwrap() {
                MessageKind::Hello => Welcome {
                    version: 1,
                    lease_ms: 1000,
                    features: features::FABRIC | features::PART,
                    incarnation: Incarnation(42),
                    session: SessionSecret(7),
                    batch_pages_max: 64,
                    in_flight_max: 128,
                }
                .encode(&mut out),
                MessageKind::CreateRegion => encode_created(header.tag, RegionId(5), &mut out),
                MessageKind::Station => {
                    let address = self.station.address().unwrap();
                    encode_station(header.tag, &StationReply { provider: "tcp", address: &address }, &mut out);
                }
                MessageKind::Expose => {
                    let [page_map, sums, layer] = self.windows;
                    let reply = ExposeReply::new(PAGES, 1, 1, 0, [page_map, sums]);
                    encode_expose(header.tag, &reply, [layer].into_iter(), &mut out);
                }
                MessageKind::Read => {
                    let pages = header.page..header.page + u64::from(header.count);
                    self.asked.lock().unwrap().extend(pages.clone());
                    let sums = pages.clone().enumerate().map(|(index, page)| (index as u32, checksum(&right(page))));
                    encode_read(header.tag, header.count, sums, &mut out);
                    let spoils = self.spoils.load(Ordering::Relaxed) as u8;
                    out.extend(pages.flat_map(right).map(|byte| byte ^ spoils));
                }
                kind => encode_ok(header.tag, kind, &mut out),
            }
            if peer.write_all(&out).is_err() {
                return;
            }
        }
    }
}

/// A lane to a server that shows this, and what it was asked by message.
fn with_lane(shown: &Shown, work: impl FnOnce(&mut dyn Lane, &Script)) {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let station = Station::open(Provider::Tcp, Some(here)).unwrap();
    let sums: Vec<u8> = shown.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    let mut key = 100;
    let windows = [file(&shown.page_map), file(&sums), file(&shown.layer)].map(|memory| {
        key += 1;
        let farfield_fabric::MemoryWindow { key, base } = station.expose(memory, key).unwrap();
        RemoteWindow { key, base }
    });
    let mut windows = windows;
    if !shown.layer_is_open {
        windows[2].key = 999;
    }
    let (asked, spoils, is_over) = (Mutex::default(), AtomicU32::new(0), AtomicBool::new(false));
    let script = Arc::new(Script { station, windows, asked, spoils, is_over });
    let served = script.clone();
    let serves = std::thread::spawn(move || {
        while !served.is_over.load(Ordering::Relaxed) {
            served.station.serve(Duration::ZERO, Duration::from_millis(5)).unwrap();
        }
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("fabric:tcp://{}", listener.local_addr().unwrap());
    let accepting = script.clone();
    // The control connection, and one lane.
    std::thread::spawn(move || {
        for _ in 0..2 {
            let (peer, script) = (listener.accept().unwrap().0, accepting.clone());
            std::thread::spawn(move || script.converse(peer));
        }
    });
    let backend: Arc<dyn Backend> = PoolBuilder::new().url(url).pages(PAGES).deadline(LONG).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    work(&mut *lane, &script);
    drop(lane);
    script.is_over.store(true, Ordering::Relaxed);
    serves.join().unwrap();
}

fn read(lane: &mut dyn Lane, page: u64, pages: usize) -> Completion {
    let op = Op::Read { page: PageId(page), buffer: Buffer::new(pages) };
    lane.submit(farfield_pool::LaneRequest { tag: 1, priority: Priority::Demand, deadline: LONG, op }).unwrap();
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(50));
    }
    done.remove(0)
}

fn assert_right(completion: &Completion, first: u64) {
    assert_eq!(completion.result, Ok(()));
    let buffer = completion.buffer.as_ref().unwrap();
    for (index, page) in (first..first + buffer.pages() as u64).enumerate() {
        assert!(buffer.page(index) == right(page), "page {page}");
        assert_eq!(buffer.sums()[index], checksum(&right(page)), "page {page}");
    }
}

#[test]
fn intact_pages_are_read_without_a_message() {
    with_lane(&Shown::new(), |lane, script| {
        for (page, pages) in [(0, 1), (3, 16), (10, 17), (0, 64)] {
            assert_right(&read(lane, page, pages), page);
        }
        assert!(script.asked.lock().unwrap().is_empty());
    });
}

#[test]
fn corrupt_pages_are_read_again_by_message() {
    let mut shown = Shown::new();
    shown.layer[5 * PAGE_BYTES + 77] ^= 1;
    shown.sums[9] ^= 1 << 40;
    shown.page_map[12] = 2; // A layer that there is not.
    shown.page_map[13] = 255;
    with_lane(&shown, |lane, script| {
        for page in [4, 5, 9, 11, 12, 13, 14] {
            assert_right(&read(lane, page, 1), page);
        }
        assert_eq!(*script.asked.lock().unwrap(), [5, 9, 12, 13]);
        assert_right(&read(lane, 0, 40), 0);
        // Wrong there, too: now it is an error, which names the page.
        script.spoils.store(1, Ordering::Relaxed);
        let error = PoolError::Corrupt { page: PageId(5), server: 0 };
        assert_eq!(read(lane, 5, 1).result, Err(error));
        assert_right(&read(lane, 6, 1), 6);
    });
}

#[test]
fn unreadable_pages_are_read_by_message() {
    let mut shown = Shown::new();
    shown.page_map[20] = 0;
    shown.layer_is_open = false;
    with_lane(&shown, |lane, script| {
        for page in [1, 2, 3] {
            assert_right(&read(lane, page, 2), page);
        }
        assert_eq!(*script.asked.lock().unwrap(), [1, 2, 2, 3, 3, 4]);
        // Nothing but the page map is needed for this one. What went wrong ended the connection of the endpoints; libfabric makes
        // another one, and until then it comes by message.
        let started = Instant::now();
        loop {
            let read = read(lane, 20, 1);
            if read.buffer.as_ref().unwrap().bytes() == [0; PAGE_BYTES] {
                break assert_eq!(read.result, Ok(()));
            }
            assert_right(&read, 20);
            assert!(started.elapsed() < LONG, "never read one-sided again");
        }
    });
}
