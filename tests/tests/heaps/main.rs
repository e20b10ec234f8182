//! Far heaps on real memory servers that die at any moment, fill up, or rot.
//!
//! Danger: a program that hangs or ends with its server; data that is lost before anybody says that there is no room; a rotten byte
//! that is taken for a value. `FARFIELD_SEED` repeats the choices.

mod collected;
mod liar;
mod world;

use farfield::{FarBox, FarError, FarMap, FarVec, Heap, Plane, PoolError};
use farfield_tests::{MIB, PATIENCE, Scratch, Server, deep, seeded, tier, wait_until};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use world::{OPERATIONS, Operation, World, is_gone};

const NEAR: u64 = 2 * MIB;
/// What a heap is filled with: three times what can be near.
const FILL: u64 = 3 * NEAR;

/// How a heap reaches its server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Tcp,
    Unix,
    Shm,
}

impl Way {
    fn start(self, scratch: &Scratch, capacity: &str) -> Server {
        let options = ["--capacity", capacity];
        match self {
            Way::Tcp => Server::start_tcp(scratch, "server", options),
            Way::Unix | Way::Shm => Server::start(scratch, "server", options),
        }
    }

    fn heap(self, server: &Server, plane: Plane) -> Heap {
        let url = match self {
            Way::Tcp | Way::Unix => server.url().to_owned(),
            Way::Shm => server.url().replacen("unix:", "shm:", 1),
        };
        let builder = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).pool(url);
        builder.patience(PATIENCE).build().expect("the server accepts")
    }
}

/// Steps that are tried; at most so many are served from what is near when the server is dead.
const STEPS_MAX: u64 = 200_000;

/// The server is killed in the middle of an operation.
fn die_in<const WORDS: usize>(way: Way, plane: Plane, operation: Operation, round: u64) {
    let mut random = seeded(round << 8 | operation as u64);
    let scratch = Scratch::new("heap-dies");
    let server = way.start(&scratch, "256M");
    let mut world = World::<WORDS>::new(way.heap(&server, plane), NEAR);
    let (steps, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let value_bytes = 8 * WORDS as u64;
    let filled = FILL / value_bytes;
    // While the heap is filled, now and then; else while the operation goes on.
    let at = match random.usize(..5) {
        0 => random.usize(..filled as usize) as u64,
        _ => filled + random.usize(..400) as u64,
    };
    let killer = std::thread::spawn({
        let (steps, done) = (steps.clone(), done.clone());
        move || {
            wait_until("the moment", || steps.load(Ordering::Relaxed) >= at || done.load(Ordering::Relaxed));
            server.kill();
        }
    });
    let mut end = world.fill(operation, &steps);
    while end.is_ok() && steps.fetch_add(1, Ordering::Relaxed) < STEPS_MAX {
        end = world.step(operation, &mut random);
    }
    done.store(true, Ordering::Relaxed);
    killer.join().expect("it kills and ends");
    match end {
        Err(error) => assert!(is_gone(error), "{error:?}"),
        // Memory that is mapped can be read when its server is dead.
        Ok(()) => assert_eq!(way, Way::Shm, "nothing was far any more"),
    }
    // Whatever is done now ends, well or with the same error.
    for _ in 0..if world.values.len() > 16 { 50 } else { 0 } {
        world.step(operation, &mut random).unwrap_or_else(|error| assert!(is_gone(error), "{error:?}"));
    }
    let (good, all) = (world.survivors(), world.values.len());
    println!("{way:?}, {plane:?}, {operation:?}, at step {at}: {good} of {all} values are near");
    // Some of the near memory holds collections, and what is on its way out.
    let near_at_least = (NEAR / 8 / value_bytes) as usize;
    assert!(!operation.is_of_values() || good >= all.min(near_at_least), "{good} of {all}");
    world.end();
}

/// Each operation, with a deadline for all of it.
fn die<const WORDS: usize>(way: Way, plane: Plane) {
    for round in 0..tier(1, 40) {
        for operation in OPERATIONS {
            let scene = std::thread::spawn(move || die_in::<WORDS>(way, plane, operation, round));
            wait_until(&format!("{way:?}, {plane:?}, {operation:?}"), || scene.is_finished());
            scene.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    }
}

#[test]
fn servers_across_tcp_die_in_the_middle_of_everything() {
    die::<512>(Way::Tcp, Plane::Page);
}

#[test]
fn servers_behind_a_socket_die_in_the_middle_of_everything() {
    die::<512>(Way::Unix, Plane::Page);
}

#[test]
fn servers_with_shared_memory_die_in_the_middle_of_everything() {
    die::<512>(Way::Shm, Plane::Page);
}

#[test]
fn servers_of_small_objects_die_in_the_middle_of_everything() {
    die::<32>(Way::Tcp, Plane::Object);
}

/// In the deep tier: this plane is made of the other two.
#[test]
fn servers_of_hybrid_heaps_die_in_the_middle_of_everything() {
    if deep() {
        die::<32>(Way::Shm, Plane::Hybrid);
    }
}

/// A network that passes so many bytes, both ways and of all connections together, and then nothing more.
struct Wire {
    left: AtomicU64,
    ends: Mutex<Vec<TcpStream>>,
}

impl Wire {
    /// The address of the near end.
    fn to(server: &Server, bytes: u64) -> String {
        let far = server.url().trim_start_matches("tcp://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it has one");
        let wire = Arc::new(Wire { left: AtomicU64::new(bytes), ends: Mutex::default() });
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(&far) else { continue };
                let copies = [(near.try_clone(), far.try_clone()), (far.try_clone(), near.try_clone())];
                wire.ends.lock().expect("nobody panics").extend([near, far]);
                for (from, to) in copies {
                    let (wire, from, to) = (wire.clone(), from.expect("a descriptor"), to.expect("a descriptor"));
                    std::thread::spawn(move || wire.pass(from, to));
                }
            }
        });
        format!("tcp://{address}")
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = [0; 5000];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            let take = |left: u64| Some(left.saturating_sub(count as u64));
            let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).expect("always some");
            if to.write_all(&bytes[..count.min(left as usize)]).is_err() || left <= count as u64 {
                break;
            }
        }
        // A server that dies closes all its connections.
        for end in &*self.ends.lock().expect("nobody panics") {
            end.shutdown(Shutdown::Both).ok();
        }
    }
}

/// The connections are cut after any number of bytes: in a head, in a page, in a checksum, in the handshake.
#[test]
fn connections_are_cut_at_any_byte() {
    let scratch = Scratch::new("heap-cut");
    let server = Way::Tcp.start(&scratch, "256M");
    let mut random = seeded(77);
    for round in 0..tier(6, 1500) {
        let bytes = match round % 4 {
            0 => random.usize(..1500),
            _ => random.usize(..2 * FILL as usize),
        };
        let url = Wire::to(&server, bytes as u64);
        let plane = [Plane::Page, Plane::Object, Plane::Hybrid][round % 3];
        let builder = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).pool(url);
        let heap = match builder.patience(PATIENCE).build() {
            Ok(heap) => heap,
            // Cut in the handshake.
            Err(error) => {
                assert!(bytes < 2000, "after {bytes} bytes: {error}");
                continue;
            }
        };
        let mut world = World::<32>::new(heap, NEAR);
        let mut end = world.fill(Operation::Get, &AtomicU64::new(0));
        for step in 0..STEPS_MAX {
            if end.is_err() {
                break;
            }
            let operation = OPERATIONS[step as usize % OPERATIONS.len()];
            end = world.step(operation, &mut random);
        }
        let error = end.expect_err("something was far");
        assert!(is_gone(error), "after {bytes} bytes: {error:?}");
        let (good, all) = (world.survivors(), world.values.len());
        println!("cut after {bytes} bytes: {good} of {all} values are near");
        world.end();
    }
}

/// A server that is full says so before anything is lost, and takes more when there is room again.
#[test]
fn a_full_server_is_said_before_data_is_at_risk() {
    for (way, plane) in
        [(Way::Tcp, Plane::Page), (Way::Unix, Plane::Object), (Way::Shm, Plane::Page), (Way::Tcp, Plane::Hybrid)]
    {
        let scratch = Scratch::new("heap-full");
        let server = way.start(&scratch, "8M");
        let mut world = World::<512>::new(way.heap(&server, plane), NEAR);
        let full = loop {
            let number = world.values.len() as u64;
            match world.heap.alloc([number; 512]) {
                Ok(value) => world.values.push(value),
                Err(error) => {
                    assert_eq!(error.value, [number; 512], "the value comes back");
                    break error.error;
                }
            }
            assert!(number < 4096, "8 MiB take no 16");
        };
        assert!(matches!(full, FarError::Pool(PoolError::PoolFull { .. })), "{way:?}: {full:?}");
        assert!(world.values.len() as u64 >= 8 * MIB / 4096, "{way:?}: {} pages", world.values.len());
        // Nothing more gets in, and nothing is lost: each value can be read.
        for (index, value) in world.values.iter().enumerate().step_by(5) {
            assert_eq!(*value.get(&world.heap.enter()).unwrap(), [index as u64; 512], "{way:?}");
        }
        // Room: what is dropped is given back, and then everything else can be had, and more be made.
        let all = world.values.len() as u64;
        let kept: Vec<_> = (0..all).zip(world.values.drain(..)).filter(|(number, _)| number % 4 != 0).collect();
        for (number, value) in &kept {
            wait_until("room", || match value.get(&world.heap.enter()) {
                Ok(value) => *value == [*number; 512],
                Err(FarError::Pool(PoolError::PoolFull { .. })) => false,
                Err(other) => panic!("{way:?}: {other:?}"),
            });
        }
        wait_until("room for more", || world.heap.alloc([1; 512]).is_ok());
        drop(kept);
        world.heap.verify();
    }
}

/// Far memory in which nothing is any more is kept for what leaves next, but no server is full of that.
#[test]
fn a_server_is_not_full_of_what_holds_nothing() {
    for way in [Way::Shm, Way::Tcp, Way::Unix].into_iter().take(tier(1, 3)) {
        let scratch = Scratch::new("heap-vacant");
        let server = way.start(&scratch, "16M");
        let heap = way.heap(&server, Plane::Object);
        let small: Vec<_> = (0..100_000).map(|number| heap.alloc([number; 8]).expect("room for 8 MiB")).collect();
        // Nothing that is large uses far addresses of what is small.
        drop(small);
        let (mut large, mut vacant) = (Vec::new(), heap.stats().vacant_pages);
        let full = loop {
            match heap.alloc([large.len() as u64; 512]) {
                Ok(value) => large.push(value),
                Err(error) => break error.error,
            }
            vacant = vacant.max(heap.stats().vacant_pages);
            assert!((large.len() as u64) < 20 * MIB / 4096, "16 MiB, and two near, take no more");
        };
        assert!(matches!(full, FarError::Pool(PoolError::PoolFull { .. })), "{way:?}: {full:?}");
        let stats = heap.stats();
        assert!(vacant > 0 && stats.vacant_pages == 0, "{way:?}: at most {vacant}, {stats:?}");
        assert!(large.len() as u64 >= 16 * MIB / 4096, "{way:?}: {} pages", large.len());
        for (index, value) in large.iter().enumerate().step_by(3) {
            assert_eq!(value.read(|value| value[7]), Ok(index as u64), "{way:?}");
        }
        drop(large);
        heap.verify();
    }
}

/// AIFM's tests across TCP: arrays are added, maps hold keys and values of any size, threads share a map.
#[test]
fn collections_are_right_across_the_network() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid].into_iter().take(tier(1, 3)) {
        let scratch = Scratch::new("heap-collections");
        let server = Way::Tcp.start(&scratch, "256M");
        let heap = Way::Tcp.heap(&server, plane);
        add_arrays(&heap).unwrap_or_else(|error| panic!("{plane:?}: {error:?}"));
        any_sizes(&heap).unwrap_or_else(|error| panic!("{plane:?}: {error:?}"));
        let map = FarMap::new(&heap).expect("room for a map");
        std::thread::scope(|threads| {
            let start = |thread| {
                let (heap, map) = (&heap, &map);
                threads.spawn(move || share(heap, map, thread).unwrap_or_else(|error| panic!("{plane:?}: {error:?}")))
            };
            let handles: Vec<_> = (0..8u8).map(start).collect();
            // Joined by hand: a scope does not wait until threads have given back what they had of the heap.
            handles.into_iter().for_each(|handle| handle.join().unwrap());
        });
        drop(map);
        assert!(heap.stats().misses > 1000, "{:?}", heap.stats());
        heap.verify();
    }
}

fn add_arrays(heap: &Heap) -> Result<(), FarError> {
    let count = (NEAR / 8) as usize;
    let (mut a, mut b, mut c) = (FarVec::new(), FarVec::new(), FarVec::new());
    for index in 0..count as u64 {
        let scope = heap.enter();
        a.push(&scope, index)?;
        b.push(&scope, 3 * index)?;
    }
    for index in 0..count {
        let scope = heap.enter();
        c.push(&scope, a.at(&scope, index)? + b.at(&scope, index)?)?;
    }
    let mut scope = heap.enter();
    let (mut scan, mut index) = (c.scan(&mut scope), 0);
    while let Some(chunk) = scan.next_chunk()? {
        for sum in chunk {
            assert_eq!(*sum, 4 * index);
            index += 1;
        }
    }
    assert_eq!(index, count as u64);
    Ok(())
}

/// Keys up to 200 bytes, values up to 700: found, then every third removed, then absent and the others there.
fn any_sizes(heap: &Heap) -> Result<(), FarError> {
    let map = FarMap::<[u8], [u8]>::builder().build(heap).expect("room for a map");
    let key =
        |number: u64| -> Vec<u8> { number.to_le_bytes().into_iter().cycle().take(8 + number as usize % 193).collect() };
    let value = |number: u64| vec![number as u8; 1 + number as usize * 7 % 700];
    let count = 3 * NEAR / 500;
    for number in 0..count {
        let scope = heap.enter();
        assert!(map.insert(&scope, &key(number)[..], &value(number)[..])?.is_none());
    }
    for number in (0..count).step_by(3) {
        let scope = heap.enter();
        assert_eq!(map.remove(&scope, &key(number)[..])?, Some(&value(number)[..]));
    }
    for number in 0..count {
        let scope = heap.enter();
        let expected = (number % 3 != 0).then(|| value(number));
        assert_eq!(map.get(&scope, &key(number)[..])?, expected.as_deref(), "{number}");
    }
    Ok(())
}

/// Whatever a thread finds belongs to its key and names a thread.
fn share(heap: &Heap, map: &FarMap<u32, [u8; 100]>, thread: u8) -> Result<(), FarError> {
    let mut random = seeded(u64::from(thread));
    for _ in 0..3000 {
        let key = random.usize(..20_000) as u32;
        let scope = heap.enter();
        match random.usize(..4) {
            0 => drop(map.remove(&scope, &key)?),
            1 => {
                let mut value = [thread; 100];
                value[..4].copy_from_slice(&key.to_le_bytes());
                map.insert(&scope, key, value)?;
            }
            _ => {
                let Some(value) = map.get(&scope, &key)? else { continue };
                assert_eq!(value[..4], key.to_le_bytes());
                assert!(value[4] < 8 && value[4..].iter().all(|byte| *byte == value[4]));
            }
        }
    }
    Ok(())
}

/// Far memory that was given back is used again: several times what the server takes goes through it. And two heaps of one server do
/// not see each other.
#[test]
fn freed_pages_are_reused_and_heaps_stay_apart() {
    let scratch = Scratch::new("heap-again");
    let server = Way::Tcp.start(&scratch, "16M");
    let heaps = [Plane::Page, Plane::Object].map(|plane| Way::Tcp.heap(&server, plane));
    for round in 0..8u64 {
        let fill = |heap: &Heap, mark: u64| -> Vec<FarBox<[u64; 512]>> {
            let mut values = Vec::new();
            while values.len() < 1400 {
                // Pages of the round before are on their way back.
                wait_until("room at the server", || match heap.alloc([mark; 512]) {
                    Ok(value) => {
                        values.push(value);
                        true
                    }
                    Err(error) => {
                        assert!(matches!(error.error, FarError::Pool(PoolError::PoolFull { .. })), "{error:?}");
                        false
                    }
                });
            }
            values
        };
        let filled = [fill(&heaps[0], round), fill(&heaps[1], 1000 + round)];
        for (heap, (values, mark)) in heaps.iter().zip(filled.iter().zip([round, 1000 + round])) {
            for value in values {
                assert_eq!(*value.get(&heap.enter()).expect("it fits"), [mark; 512]);
            }
        }
    }
    heaps.iter().for_each(Heap::verify);
}

/// Resident memory of this process, as the kernel counts it.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("/proc is mounted");
    let pages = text.split(' ').nth(1).and_then(|word| word.parse::<u64>().ok());
    pages.expect("the second number") * 4096
}

/// What the budget says is what the kernel sees, tables included.
#[test]
fn the_kernel_sees_no_more_than_the_budget_of_a_heap() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let scratch = Scratch::new("heap-budget");
        let server = Way::Tcp.start(&scratch, "512M");
        let near = 24 * MIB;
        let before = resident_bytes();
        let builder = Heap::builder().near(near).near_max(near).far(1 << 30).plane(plane).pool(server.url());
        let heap = builder.patience(PATIENCE).build().expect("the server accepts");
        let map: FarMap<u64, [u64; 120]> = FarMap::new(&heap).expect("room for a map");
        let count = 3 * near / 968;
        let mut peak = 0;
        for key in 0..count {
            map.insert(&heap.enter(), key, [key; 120]).expect("there is room");
            if key % 1000 == 0 {
                peak = peak.max(resident_bytes());
            }
        }
        for key in (0..count).step_by(7) {
            assert_eq!(map.get(&heap.enter(), &key).expect("the server lives"), Some(&[key; 120]));
        }
        let peak = peak.max(resident_bytes()) - before;
        println!("{plane:?}: {} of {} MiB near, says the kernel", peak / MIB, near / MIB);
        // Lanes and stacks are the process's own.
        assert!(peak <= near + near / 50 + 8 * MIB, "{plane:?}: {peak} of {near}; {:?}", heap.stats());
        assert!(peak >= near / 2, "{plane:?}: only {peak} of {near} were ever used");
        drop(map);
        heap.verify();
    }
}

/// A page of a layer of the server, as it is since a bit of it was flipped.
struct RottenPage {
    layer: Arc<File>,
    start: u64,
    bytes: [u8; 4096],
}

/// Which byte of a page rots.
const ROTTEN_BYTE: usize = 1000;

/// Flips a bit in every page that the server keeps, as failing memory would.
fn rot(server: &Server) -> Vec<RottenPage> {
    let mut pages = Vec::new();
    for entry in
        std::fs::read_dir(format!("/proc/{}/fd", server.running().pid())).expect("the server is ours").flatten()
    {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        if !name.to_string_lossy().contains("farfield-layer") {
            continue;
        }
        let Ok(file) = File::options().read(true).write(true).open(entry.path()) else { continue };
        let layer = Arc::new(file);
        let end = layer.metadata().expect("a file").len() as i64;
        let mut start = 0;
        loop {
            // SAFETY: a system call with numbers, on a descriptor that is ours.
            start = unsafe { libc::lseek(layer.as_raw_fd(), start, libc::SEEK_DATA) };
            if start < 0 || start >= end {
                break;
            }
            let mut page = RottenPage { layer: layer.clone(), start: start as u64, bytes: [0; 4096] };
            layer.read_exact_at(&mut page.bytes, page.start).expect("a page of it");
            page.flip();
            pages.push(page);
            start += 4096;
        }
    }
    assert!(pages.len() > 100, "only {} pages at the server", pages.len());
    pages
}

impl RottenPage {
    fn flip(&mut self) {
        self.bytes[ROTTEN_BYTE] ^= 1;
        let byte = &self.bytes[ROTTEN_BYTE..=ROTTEN_BYTE];
        self.layer.write_all_at(byte, self.start + ROTTEN_BYTE as u64).expect("layers can be written");
    }

    /// Flips the bit back, unless the heap has written the page since: values of the object plane are written anew
    /// when they leave again.
    fn mend(mut self) {
        let mut bytes = [0; 4096];
        self.layer.read_exact_at(&mut bytes, self.start).expect("a page of it");
        if bytes == self.bytes {
            self.flip();
        }
    }
}

/// What rotted at the server is an error and never a value; what is near, and what is whole again, is right.
#[test]
fn corrupt_server_memory_is_an_error_and_never_a_value() {
    fn check<const WORDS: usize>(way: Way, plane: Plane) {
        let scratch = Scratch::new("heap-rots");
        let server = way.start(&scratch, "64M");
        let mut world = World::<WORDS>::new(way.heap(&server, plane), NEAR);
        world.fill(Operation::Get, &AtomicU64::new(0)).expect("there is room");
        let look = |world: &World<WORDS>| {
            let mut corrupt = 0;
            for (index, value) in world.values.iter().enumerate() {
                match value.get(&world.heap.enter()) {
                    Ok(value) => assert_eq!(value[1..], [index as u64; WORDS][1..]),
                    Err(FarError::Pool(PoolError::Corrupt { .. })) => corrupt += 1,
                    Err(other) => panic!("{way:?}, {plane:?}: {other:?}"),
                }
            }
            corrupt
        };
        assert_eq!(look(&world), 0);
        let rotten = rot(&server);
        let corrupt = look(&world);
        println!("{way:?}, {plane:?}: {corrupt} of {} values rotted", world.values.len());
        assert!(corrupt > 20, "{way:?}, {plane:?}: {corrupt}");
        rotten.into_iter().for_each(RottenPage::mend);
        wait_until("all values are whole again", || look(&world) == 0);
        world.end();
    }
    let started = Instant::now();
    for way in [Way::Tcp, Way::Unix, Way::Shm] {
        check::<512>(way, Plane::Page);
    }
    check::<32>(Way::Tcp, Plane::Object);
    check::<32>(Way::Shm, Plane::Hybrid);
    assert!(started.elapsed() < PATIENCE + Duration::from_secs(60));
}
