//! Guards against memory files that could kill or fool their reader: the server here is a script that sends them.
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "it runs outside of programs")]

mod common;

use common::frame;
use farfield_core::blocks::Blocks;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::*;
use farfield_core::{Incarnation, PageId, RegionId, checksum};
use farfield_os::{memfd, serving};
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, OpenError, PoolBuilder, PoolError, Priority};
use std::io::Write;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const PAGES: u64 = 100;
const LONG: Duration = Duration::from_secs(20);

/// A file whose size anybody may change.
fn unsealed(bytes: u64) -> OwnedFd {
    // SAFETY: a NUL-terminated name.
    let fd = unsafe { libc::memfd_create(c"unsealed".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: just made, known to nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    std::fs::File::from(fd.try_clone().unwrap()).set_len(bytes).unwrap();
    fd
}

fn sealed(bytes: u64) -> OwnedFd {
    memfd::create(c"sealed", bytes).unwrap()
}

/// Page map, checksums, notes and layers as they should be.
fn files(layers: usize) -> Vec<OwnedFd> {
    let mut files = vec![sealed(4096), sealed(4096), sealed(PAGES * Blocks::BYTES as u64)];
    files.extend((0..layers).map(|_| sealed(PAGES * PAGE_BYTES as u64)));
    files
}

fn say(peer: &mut UnixStream, encode: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = Vec::new();
    encode(&mut bytes);
    peer.write_all(&bytes).unwrap();
}

fn welcome(peer: &mut UnixStream) {
    let (header, body) = frame(peer).expect("a greeting");
    let hello = Hello::decode(&header, &body).unwrap();
    assert!(hello.features & features::MAP != 0, "over a Unix socket the client can map");
    let welcome = Welcome {
        version: 1,
        lease_ms: 1000,
        features: features::MAP,
        incarnation: Incarnation(42),
        session: SessionSecret(7),
        batch_pages_max: 64,
        in_flight_max: 128,
    };
    say(peer, |out| welcome.encode(out));
}

type Opened = (Arc<dyn Backend>, Box<dyn Lane>);

/// What the first lane of a region with these files finds, or why there is none.
fn open(files: Vec<OwnedFd>, reply: MapReply) -> Result<Opened, OpenError> {
    open_when(|| (), files, reply)
}

/// The same; that happens `before` the first question of a lane is answered.
fn open_when(
    before: impl FnOnce() + Send + 'static,
    files: Vec<OwnedFd>,
    reply: MapReply,
) -> Result<Opened, OpenError> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("farfield-shm-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let mut control = listener.accept().unwrap().0;
        welcome(&mut control);
        let (header, _) = frame(&mut control).expect("a region is asked for");
        say(&mut control, |out| encode_created(header.tag, RegionId(5), out));
        let (header, _) = frame(&mut control).expect("its files are asked for");
        assert_eq!((header.kind, header.count), (MessageKind::MapRegion as u8, 0));
        let mut bytes = Vec::new();
        encode_map(header.tag, &reply, &mut bytes);
        let sent = serving::send_descriptors(control.as_fd(), &bytes, &files).unwrap();
        control.write_all(&bytes[sent..]).unwrap();
        let Ok((mut lane, _)) = listener.accept() else { return };
        welcome(&mut lane);
        let mut before = Some(before);
        // Room is never refused here.
        while let Some((header, _)) = frame(&mut lane) {
            before.take().into_iter().for_each(|before| before());
            say(&mut lane, |out| encode_ok(header.tag, MessageKind::of_request(header.kind).unwrap(), out));
        }
    });
    let opened = PoolBuilder::new().url(format!("shm:{}", path.display())).pages(PAGES).deadline(LONG).open();
    let lane = opened.map(|backend| {
        let lane = backend.open_lane().unwrap();
        (backend, lane)
    });
    std::fs::remove_file(&path).unwrap();
    lane
}

fn reply(layers: u32) -> MapReply {
    MapReply { pages: PAGES, generation: 1, layers_total: layers, first_layer: 0, layers }
}

fn read(lane: &mut dyn Lane, page: u64) -> Completion {
    perform(lane, Op::Read { page: PageId(page), buffer: Buffer::new(1) })
}

fn perform(lane: &mut dyn Lane, op: Op) -> Completion {
    lane.submit(LaneRequest { tag: 1, priority: Priority::Demand, deadline: LONG, op }).unwrap();
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(50));
    }
    done.remove(0)
}

fn refusal(files: Vec<OwnedFd>, reply: MapReply) -> PoolError {
    let error = open(files, reply).err().expect("must not be mapped");
    error.pool_error().unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn only_writes_wait_for_a_server_that_does_not_answer() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (_backend, mut lane) = open_when(move || wait.recv().unwrap(), files(1), reply(1)).unwrap();
    let after = Duration::from_millis(300);
    let sealed = || {
        let mut buffer = Buffer::new(2);
        buffer.bytes_mut().fill(7);
        buffer.seal();
        buffer
    };
    let write = |tag, deadline| {
        let op = Op::Write { page: PageId(10), buffer: sealed() };
        LaneRequest { tag, priority: Priority::Background, deadline, op }
    };
    lane.submit(write(2, after)).unwrap();
    // It is read meanwhile.
    assert_eq!(read(&mut *lane, 11).buffer.unwrap().page(0), [0; PAGE_BYTES]);
    let mut done = Vec::with_capacity(4);
    let end = |lane: &mut dyn Lane, done: &mut Vec<Completion>| {
        while lane.poll(done) == 0 {
            lane.wait(LONG);
        }
        done.pop().unwrap()
    };
    let late = end(&mut *lane, &mut done);
    assert_eq!((late.tag, late.result), (2, Err(PoolError::TimedOut { server: 0, after })));
    assert!(late.buffer.is_some());
    lane.submit(write(3, LONG)).unwrap();
    assert_eq!((lane.poll(&mut done), lane.in_flight()), (0, 1));
    go.send(()).unwrap();
    assert_eq!(end(&mut *lane, &mut done).result, Ok(()));
    assert_eq!(read(&mut *lane, 11).buffer.unwrap().page(0), [7; PAGE_BYTES]);
}

#[test]
fn files_that_could_shrink_or_are_too_small_are_refused() {
    for place in 0..4 {
        for wrong in [unsealed(1 << 20), sealed(64)] {
            let mut files = files(1);
            files[place] = wrong;
            let error = refusal(files, reply(1));
            let expected = "its memory files are not sealed or too small";
            assert_eq!(error, PoolError::Refused { server: 0, reason: expected }, "file {place}");
        }
    }
}

#[test]
fn more_or_fewer_files_than_promised_are_refused() {
    for (count, promised) in [(1, 2), (3, 2)] {
        assert!(matches!(refusal(files(count), reply(promised)), PoolError::Refused { .. }));
    }
    for wrong in [
        MapReply { pages: PAGES + 1, ..reply(1) },
        MapReply { first_layer: 1, layers_total: 2, ..reply(1) },
        MapReply { layers: 0, layers_total: 1, ..reply(1) },
    ] {
        assert!(matches!(refusal(files(wrong.layers as usize), wrong), PoolError::Refused { .. }), "{wrong:?}");
    }
}

#[test]
fn region_files_are_checked_before_they_are_used() {
    let files = files(2);
    let page = [5; PAGE_BYTES];
    let [page_map, sums] = [&files[0], &files[1]].map(|fd| fd.try_clone().unwrap());
    let put = |fd: &OwnedFd, bytes: &[u8], at: u64| memfd::write_at(fd.as_fd(), bytes, at).unwrap();
    // Page 1 is right, in the frozen layer; 2 names a layer that is not there; 3 does not match its checksum.
    put(&files[3], &page, PAGE_BYTES as u64);
    put(&files[4], &page, 3 * PAGE_BYTES as u64);
    put(&page_map, &[0, 1, 3, 2, 255], 0);
    put(&sums, &checksum(&page).to_le_bytes(), 8);
    let (backend, mut lane) = open(files, reply(2)).unwrap();
    assert_eq!(read(&mut *lane, 0).buffer.unwrap().page(0), [0; PAGE_BYTES]);
    let right = read(&mut *lane, 1);
    assert_eq!(right.result, Ok(()));
    assert_eq!(right.buffer.unwrap().page(0), page);
    for page in [2, 3, 4] {
        let wrong = read(&mut *lane, page);
        assert_eq!(wrong.result, Err(PoolError::Corrupt { page: PageId(page), server: 0 }));
        assert!(wrong.buffer.is_some());
    }
    // Direct loads cannot say what is wrong; they end the region.
    let mapped = backend.mapped().unwrap();
    assert!(mapped.page(PageId(1)).is_some());
    assert!(mapped.page(PageId(4)).is_none());
    assert_eq!(backend.health(), farfield_pool::Health::Gone);
}

#[test]
fn parts_are_compared_with_what_was_noted_of_their_blocks_or_with_the_whole_page() {
    let files = files(1);
    let top = files[3].try_clone().unwrap();
    let put = |bytes: &[u8], at: u64| memfd::write_at(top.as_fd(), bytes, at).unwrap();
    let (_backend, mut lane) = open(files, reply(1)).unwrap();
    let bytes: Vec<u8> = (0..PAGE_BYTES).map(|at| (at * 7 / 3) as u8).collect();
    let store = |lane: &mut dyn Lane, page: u64| {
        let mut buffer = Buffer::new(1);
        buffer.page_mut(0).copy_from_slice(&bytes);
        buffer.sums_mut()[0] = checksum(&bytes);
        assert_eq!(perform(lane, Op::Write { page: PageId(page), buffer }).result, Ok(()));
    };
    let part = |lane: &mut dyn Lane, page: u64, offset: usize| {
        let part = PagePart::new(offset, 100).unwrap();
        let read = perform(lane, Op::ReadPart { page: PageId(page), part, buffer: Buffer::new(1) });
        read.result.map(|()| read.buffer.unwrap().page(0)[part.range()].to_vec())
    };
    let right = |offset: usize| Ok(bytes[offset..offset + 100].to_vec());
    let corrupt = |page| Err(PoolError::Corrupt { page: PageId(page), server: 0 });

    // Stored before anybody asked for parts: the first part costs a look at the page, which notes all blocks.
    store(&mut *lane, 7);
    put(&[bytes[3000] ^ 1], 7 * PAGE_BYTES as u64 + 3000);
    assert_eq!(part(&mut *lane, 7, 200), corrupt(7), "nothing is noted of a page that is wrong");
    put(&[bytes[3000]], 7 * PAGE_BYTES as u64 + 3000);
    assert_eq!(part(&mut *lane, 7, 200), right(200));
    // Noted now, and of a page that is stored from here on at once: what rots is served to nobody, what did not is.
    store(&mut *lane, 8);
    for page in [7, 8] {
        put(&[bytes[3000] ^ 1], page * PAGE_BYTES as u64 + 3000);
        assert_eq!(part(&mut *lane, page, 200), right(200));
        assert_eq!(part(&mut *lane, page, 2950), corrupt(page));
        put(&[bytes[3000]], page * PAGE_BYTES as u64 + 3000);
        assert_eq!(part(&mut *lane, page, 2950), right(2950));
    }
    assert_eq!(part(&mut *lane, 9, 0), Ok(vec![0; 100]), "never stored");
}
