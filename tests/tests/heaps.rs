//! Far heaps on real memory servers that die at any moment, fill up, or rot.
//!
//! Danger: a program that hangs or ends with its server; data that is lost before anybody says that there is no room; a rotten byte
//! that is taken for a value. `FARFIELD_SEED` repeats the choices.

use farfield::task::Executor;
use farfield::{FarBTreeMap, FarBox, FarError, FarList, FarMap, FarVec, Heap, Plane, PoolError};
use farfield_tests::{MIB, PATIENCE, Scratch, Server, tier, wait_until};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

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

struct Random(u64);

impl Random {
    fn new(salt: u64) -> Random {
        let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1u64);
        println!("FARFIELD_SEED={seed}");
        Random((seed ^ salt << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end as u64) as usize
    }
}

fn is_gone(error: FarError) -> bool {
    matches!(error, FarError::Pool(PoolError::ServerGone { .. }))
}

/// Of 4 KiB on the page plane; small on the object plane, where larger ones come by pages, too.
type Value<const WORDS: usize> = [u64; WORDS];

/// What goes on while the server dies.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Get,
    GetMut,
    GetMany,
    Alloc,
    Fetch,
    Prefetch,
    Vector,
    Map,
    Tree,
    List,
}

const OPERATIONS: [Operation; 10] = [
    Operation::Get,
    Operation::GetMut,
    Operation::GetMany,
    Operation::Alloc,
    Operation::Fetch,
    Operation::Prefetch,
    Operation::Vector,
    Operation::Map,
    Operation::Tree,
    Operation::List,
];

/// Everything that is in the heap.
struct World<const WORDS: usize> {
    heap: Heap,
    values: Vec<FarBox<Value<WORDS>>>,
    vector: FarVec<Value<8>>,
    map: FarMap<u64, Value<8>>,
    tree: FarBTreeMap<u64, Value<8>>,
    list: FarList<Value<8>>,
}

impl<const WORDS: usize> World<WORDS> {
    fn new(heap: Heap) -> World<WORDS> {
        let map = FarMap::new(&heap).expect("room for a map");
        let (vector, tree, list) = (FarVec::new(), FarBTreeMap::new(), FarList::new());
        World { heap, values: Vec::new(), vector, map, tree, list }
    }

    fn add(&mut self) -> Result<(), FarError> {
        let mut value = [self.values.len() as u64; WORDS];
        value[0] = 0;
        self.values.push(self.heap.alloc(value)?);
        Ok(())
    }

    /// One step of `operation`. What it finds is right.
    fn step(&mut self, operation: Operation, random: &mut Random) -> Result<(), FarError> {
        let (heap, values) = (&self.heap, &mut self.values);
        let scope = heap.enter();
        let count = values.len();
        let right = |index: usize, value: &Value<WORDS>| assert_eq!(value[1..], [index as u64; WORDS][1..]);
        match operation {
            Operation::Get => {
                let index = random.below(count);
                right(index, values[index].get(&scope)?);
            }
            Operation::GetMut => {
                let index = random.below(count);
                let value = values[index].get_mut(&scope)?;
                value[0] += 1;
                right(index, value);
            }
            Operation::GetMany => {
                let first = random.below(count - 16);
                let found = heap.get_many(&scope, &values[first..first + 16])?;
                found.into_iter().enumerate().for_each(|(at, value)| right(first + at, value));
            }
            Operation::Alloc => {
                drop(scope);
                self.add()?;
            }
            Operation::Fetch => {
                drop(scope);
                let executor = Executor::new(heap);
                let values = &*values;
                let fetch = |index: usize| {
                    executor.spawn(async move {
                        let scope = heap.enter();
                        values[index].fetch(&scope).await.map(|value| right(index, value))
                    })
                };
                let tasks: Vec<_> = (0..16).map(|_| fetch(random.below(count))).collect();
                return executor.block_on(async {
                    let mut all = Ok(());
                    for task in tasks {
                        all = all.and(task.await.expect("no task panics"));
                    }
                    all
                });
            }
            Operation::Prefetch => {
                let first = random.below(count - 16);
                heap.prefetch(&values[first..first + 16]);
                let index = first + random.below(16);
                right(index, values[index].get(&scope)?);
            }
            Operation::Vector => match random.below(4) {
                0 => self.vector.push(&scope, [self.vector.len() as u64; 8])?,
                _ if self.vector.is_empty() => {}
                _ => {
                    let index = random.below(self.vector.len());
                    assert_eq!(self.vector.get(&scope, index)?, Some(&[index as u64; 8]));
                }
            },
            Operation::Map => {
                let key = random.below(40_000) as u64;
                match random.below(2) {
                    0 => drop(self.map.insert(&scope, key, [key; 8])?),
                    _ => assert!(self.map.get(&scope, &key)?.is_none_or(|value| *value == [key; 8])),
                }
            }
            Operation::Tree => {
                let key = random.below(40_000) as u64;
                match random.below(2) {
                    0 => drop(self.tree.insert(&scope, key, [key; 8])?),
                    _ => assert!(self.tree.get(&scope, &key)?.is_none_or(|value| *value == [key; 8])),
                }
            }
            Operation::List => match random.below(3) {
                0 => drop(self.list.pop_front(&scope)?),
                _ => self.list.push_back(&scope, [7; 8])?,
            },
        }
        Ok(())
    }

    /// Fills what `operation` works on.
    fn fill(&mut self, operation: Operation, count: &AtomicU64) -> Result<(), FarError> {
        for _ in 0..FILL / size_of::<Value<WORDS>>() as u64 {
            self.add()?;
            count.fetch_add(1, Ordering::Relaxed);
        }
        let entries = NEAR / 64;
        for number in 0..entries {
            let scope = self.heap.enter();
            match operation {
                Operation::Vector => self.vector.push(&scope, [number; 8])?,
                Operation::Map => drop(self.map.insert(&scope, number, [number; 8])?),
                Operation::Tree => drop(self.tree.insert(&scope, number, [number; 8])?),
                Operation::List => self.list.push_back(&scope, [7; 8])?,
                _ => break,
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How many values are there; all others are gone with the server, which is said.
    fn survivors(&self) -> usize {
        let mut good = 0;
        for (index, value) in self.values.iter().enumerate() {
            let scope = self.heap.enter();
            match value.get(&scope) {
                Ok(value) => {
                    assert_eq!(value[1..], [index as u64; WORDS][1..]);
                    good += 1;
                }
                Err(error) => assert!(is_gone(error), "{error:?}"),
            }
        }
        good
    }
}

/// Steps that are tried; at most so many are served from what is near when the server is dead.
const STEPS_MAX: u64 = 200_000;

/// The server is killed in the middle of an operation.
fn die_in<const WORDS: usize>(way: Way, plane: Plane, operation: Operation, round: u64) {
    let mut random = Random::new(round << 8 | operation as u64);
    let scratch = Scratch::new("heap-dies");
    let server = way.start(&scratch, "256M");
    let mut world = World::<WORDS>::new(way.heap(&server, plane));
    let (steps, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let filled = FILL / size_of::<Value<WORDS>>() as u64;
    // While the heap is filled, now and then; else while the operation goes on.
    let at = match random.below(5) {
        0 => random.below(filled as usize) as u64,
        _ => filled + random.below(400) as u64,
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
    let near_at_least = (NEAR / 8 / size_of::<Value<WORDS>>() as u64) as usize;
    let only_values = !matches!(operation, Operation::Vector | Operation::Map | Operation::Tree | Operation::List);
    assert!(!only_values || good >= all.min(near_at_least), "{good} of {all}");
    let World { heap, values, vector, map, tree, list } = world;
    drop((values, vector, map, tree, list));
    heap.verify();
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

/// A server that is full says so before anything is lost, and takes more when there is room again.
#[test]
fn a_full_server_is_said_before_data_is_at_risk() {
    for (way, plane) in [(Way::Tcp, Plane::Page), (Way::Unix, Plane::Object), (Way::Shm, Plane::Page)] {
        let scratch = Scratch::new("heap-full");
        let server = way.start(&scratch, "8M");
        let mut world = World::<512>::new(way.heap(&server, plane));
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
        // Nothing more gets in, and nothing is lost: each value is right, or has to wait for room.
        let mut waiting = 0;
        for (index, value) in world.values.iter().enumerate() {
            match value.get(&world.heap.enter()) {
                Ok(value) => assert_eq!(*value, [index as u64; 512]),
                Err(FarError::Pool(PoolError::PoolFull { .. })) => waiting += 1,
                Err(other) => panic!("{way:?}: {other:?}"),
            }
        }
        println!("{way:?}: {waiting} of {} values wait for room", world.values.len());
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

/// Flips a bit in every page that the server keeps, as failing memory would.
fn rot(server: &Server, at: u64) {
    let mut pages = 0;
    for entry in
        std::fs::read_dir(format!("/proc/{}/fd", server.running().pid())).expect("the server is ours").flatten()
    {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        if !name.to_string_lossy().contains("farfield-layer") {
            continue;
        }
        let Ok(file) = std::fs::OpenOptions::new().read(true).write(true).open(entry.path()) else { continue };
        let end = file.metadata().expect("a file").len() as i64;
        let mut start = 0;
        loop {
            // SAFETY: a system call with numbers, on a descriptor that is ours.
            start = unsafe { libc::lseek(file.as_raw_fd(), start, libc::SEEK_DATA) };
            if start < 0 || start >= end {
                break;
            }
            let mut byte = [0];
            file.read_exact_at(&mut byte, start as u64 + at).expect("a page of it");
            byte[0] ^= 1;
            file.write_all_at(&byte, start as u64 + at).expect("layers can be written");
            pages += 1;
            start += 4096;
        }
    }
    assert!(pages > 100, "only {pages} pages at the server");
}

/// What rotted at the server is an error and never a value; what is near, and what is whole again, is right.
#[test]
fn what_rots_at_the_server_is_an_error_and_never_a_value() {
    fn check<const WORDS: usize>(way: Way, plane: Plane) {
        let scratch = Scratch::new("heap-rots");
        let server = way.start(&scratch, "64M");
        let mut world = World::<WORDS>::new(way.heap(&server, plane));
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
        rot(&server, 1000);
        let corrupt = look(&world);
        println!("{way:?}, {plane:?}: {corrupt} of {} values rotted", world.values.len());
        assert!(corrupt > 20, "{way:?}, {plane:?}: {corrupt}");
        rot(&server, 1000);
        wait_until("all values are whole again", || look(&world) == 0);
        drop(world.values);
        world.heap.verify();
    }
    let started = Instant::now();
    for way in [Way::Tcp, Way::Unix, Way::Shm] {
        check::<512>(way, Plane::Page);
        check::<32>(way, Plane::Object);
    }
    assert!(started.elapsed() < PATIENCE + Duration::from_secs(60));
}
