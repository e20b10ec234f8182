//! Guards against transfers that write where nobody expects them any more.
#![cfg(feature = "libfabric")]

use core::ops::Range;
use core::time::Duration;
use farfield_fabric::{
    FabricError, MemoryWindow, Post, Provider, Station, StationReader, TransferCompletion, TransferPart,
};
use farfield_os::memfd::{self, Mapping, MappingAccess};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const BYTES: usize = 1 << 20;

fn memory(first: u8) -> Mapping {
    let fd = memfd::create(c"window", BYTES as u64).unwrap();
    let bytes: Vec<u8> = (0..BYTES).map(|index| (index / 4096) as u8 ^ first).collect();
    memfd::write_at(fd.as_fd(), &bytes, 0).unwrap();
    Mapping::new(fd.as_fd(), BYTES as u64, MappingAccess::Read).unwrap()
}

/// A station that is served while `work` goes on.
fn with_station(work: impl FnOnce(&Station)) {
    let station = Station::open(Provider::Tcp, Some(HERE)).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                station.serve(Duration::ZERO, Duration::from_millis(5)).unwrap();
            }
        });
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&station)));
        over.store(true, Ordering::Relaxed);
        worked.unwrap();
    });
}

fn reader(station: &Station) -> StationReader {
    StationReader::open(Provider::Tcp, HERE, &station.address().unwrap(), 64 * 4096).unwrap()
}

fn post(reader: &StationReader, landing: Range<usize>, remote: u64, key: u64, context: u64) {
    post_parts(reader, &[TransferPart { landing: landing.start, bytes: landing.len(), remote, key }], context);
}

fn post_parts(reader: &StationReader, parts: &[TransferPart], context: u64) {
    let started = Instant::now();
    while reader.post(parts, context).unwrap() == Post::Later {
        assert!(started.elapsed() < Duration::from_secs(20), "never begun");
        reader.poll(|ended| panic!("{ended:?}")).unwrap();
    }
}

fn end(reader: &StationReader, count: usize) -> Vec<TransferCompletion> {
    let (started, mut all) = (Instant::now(), Vec::new());
    while all.len() < count {
        assert!(started.elapsed() < Duration::from_secs(20), "{all:?} of {count}");
        reader.poll(|ended| all.push(ended)).unwrap();
    }
    all
}

fn read(reader: &StationReader, window: MemoryWindow, page: usize) -> Result<Vec<u8>, FabricError> {
    post(reader, 0..4096, window.base + page as u64 * 4096, window.key, 7);
    let ended = end(reader, 1)[0];
    assert_eq!(ended.context, 7);
    let mut bytes = vec![0; 4096];
    reader.copy(0, &mut bytes);
    ended.result.map(|()| bytes)
}

#[test]
fn reads_reach_the_memory_of_a_station_and_nothing_else() {
    with_station(|station| {
        let windows = [station.expose(memory(0), 0x1234).unwrap(), station.expose(memory(0x80), 0x5678).unwrap()];
        let first = reader(station);
        assert_eq!(read(&first, windows[0], 3), Ok(vec![3; 4096]));
        assert_eq!(read(&first, windows[1], 255), Ok(vec![0x7F; 4096]));
        // Many at a time.
        for index in 0..32 {
            post(
                &first,
                index * 4096..(index + 1) * 4096,
                windows[0].base + index as u64 * 4096,
                windows[0].key,
                index as u64,
            );
        }
        let mut contexts: Vec<u64> =
            end(&first, 32).iter().map(|ended| ended.result.map(|()| ended.context).unwrap()).collect();
        contexts.sort_unstable();
        assert!(contexts.into_iter().eq(0..32));
        for index in 0..32 {
            let mut bytes = [0xFF; 4096];
            first.copy(index * 4096, &mut bytes);
            assert_eq!(bytes, [index as u8; 4096]);
        }
        // Parts of several windows at a time.
        let all: Vec<TransferPart> = (0..first.parts_max())
            .map(|index| {
                let MemoryWindow { base, key, .. } = windows[index % 2];
                TransferPart {
                    landing: index * 4096,
                    bytes: 4096 - index,
                    remote: base + 40 * 4096 + index as u64,
                    key,
                }
            })
            .collect();
        post_parts(&first, &all, 9);
        assert_eq!(end(&first, 1)[0].result, Ok(()));
        for part in &all {
            let mut bytes = vec![0; part.bytes];
            first.copy(part.landing, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == if part.key == 0x1234 { 40 } else { 40 ^ 0x80 }));
        }
        // Without a right key, or beyond the end.
        assert!(read(&reader(station), MemoryWindow { key: 0x4321, ..windows[0] }, 0).is_err());
        assert!(read(&reader(station), windows[0], BYTES / 4096).is_err());
        station.withdraw(windows[1]);
        assert!(read(&reader(station), windows[1], 0).is_err());
        assert_eq!(read(&reader(station), windows[0], 9), Ok(vec![9; 4096]), "others do not notice");
    });
}

#[test]
fn a_reader_may_go_while_transfers_are_under_way() {
    with_station(|station| {
        let window = station.expose(memory(0), 1).unwrap();
        for _ in 0..20 {
            let reader = reader(station);
            for index in 0..64 {
                post_any(&reader, index, window);
            }
        }
        assert_eq!(read(&reader(station), window, 5), Ok(vec![5; 4096]));
    });
}

fn post_any(reader: &StationReader, index: usize, window: MemoryWindow) {
    let started = Instant::now();
    let part = TransferPart { landing: index * 4096, bytes: 4096, remote: window.base, key: window.key };
    while reader.post(&[part], 0).unwrap() == Post::Later {
        assert!(started.elapsed() < Duration::from_secs(20), "never begun");
        reader.poll(|_| ()).unwrap();
    }
}

#[test]
fn addresses_that_are_none_are_refused() {
    with_station(|station| {
        let address = station.address().unwrap();
        for wrong in [&address[1..], &[], &[0; 300]] {
            assert!(StationReader::open(Provider::Tcp, HERE, wrong, 4096).is_err());
        }
    });
}
