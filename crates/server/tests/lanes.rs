//! Guards what the pool promises about lanes to a real server: no allocation after opening, typed errors for everything
//! when the server dies, room counted for one-sided writers, and pools of several servers; and that functions allocate nothing at a server either.

#[path = "server/common/certificates.rs"]
mod certificates;
#[path = "server/common/list.rs"]
mod list;

use certificates::Certificates;
use farfield_core::PageId;
use farfield_pool::{
    Backend, Buffer, CloneTicket, Completion, Health, Lane, LaneRequest, Op, PoolBuilder, PoolError, Priority,
    conformance,
};
use farfield_server::{Config, Server};
use farfield_wic::{Budget, Fault, Function, Memory, Registry, Task};
use list::{List, ListStart};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that is going away has no counter any more, and nobody asks for it.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: hands everything to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: passed on.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations and releases of this thread while `work` runs.
fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

const DEADLINE: Duration = Duration::from_secs(20);

fn serve(configure: impl FnOnce(&mut Config)) -> Server {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let socket = format!("unix:@farfield-lanes-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let listen = vec!["tcp://127.0.0.1:0".parse().unwrap(), socket.parse().unwrap()];
    let mut config = Config { listen, ..Config::default() };
    configure(&mut config);
    Server::start(config).unwrap()
}

fn filled(pages: usize, byte: u8) -> Buffer {
    let mut buffer = Buffer::new(pages);
    buffer.bytes_mut().fill(byte);
    buffer.seal();
    buffer
}

fn request(tag: u64, op: Op) -> LaneRequest {
    LaneRequest { tag, priority: Priority::Demand, deadline: DEADLINE, op }
}

fn one(lane: &mut dyn Lane, done: &mut Vec<Completion>, op: Op) -> (Result<(), PoolError>, Option<Buffer>) {
    lane.submit(request(1, op)).expect("room");
    let start = Instant::now();
    while lane.poll(done) == 0 {
        lane.wait(Duration::from_millis(50));
        assert!(start.elapsed() < DEADLINE, "an operation never completes");
    }
    let completion = done.pop().expect("one");
    (completion.result, completion.buffer)
}

fn write(lane: &mut dyn Lane, page: u64, buffer: Buffer) -> Result<(), PoolError> {
    one(lane, &mut Vec::with_capacity(1), Op::Write { page: PageId(page), buffer }).0
}

fn read(lane: &mut dyn Lane, page: u64, pages: usize) -> Buffer {
    let (result, buffer) =
        one(lane, &mut Vec::with_capacity(1), Op::Read { page: PageId(page), buffer: Buffer::new(pages) });
    assert_eq!(result, Ok(()));
    buffer.expect("a buffer")
}

fn open(url: &str, pages: u64) -> (Arc<dyn Backend>, Box<dyn Lane>) {
    let backend = PoolBuilder::new().url(url).pages(pages).open().unwrap();
    let lane = backend.open_lane().unwrap();
    (backend, lane)
}

fn does_not_allocate(urls: &[&str]) {
    let backend = PoolBuilder::new().urls(urls.iter().copied()).pages(1 << 20).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let mut done = Vec::with_capacity(64);
    let mut small: Vec<Buffer> = (0..32).map(|_| filled(1, 3)).collect();
    let mut large: Vec<Buffer> = (0..16).map(|_| filled(64, 5)).collect();
    let count = allocations(|| {
        for round in 0..200 {
            let write = round % 2 == 0;
            for (tag, buffers) in [(0, &mut small), (1, &mut large)] {
                while let Some(buffer) = buffers.pop() {
                    let page = PageId(buffers.len() as u64 * 100 + round * 64);
                    let op = if write { Op::Write { page, buffer } } else { Op::Read { page, buffer } };
                    let priority = if tag == 0 { Priority::Demand } else { Priority::Background };
                    lane.submit(LaneRequest { priority, ..request(tag, op) }).expect("room");
                }
            }
            lane.submit(request(2, Op::Discard { page: PageId(round * 64), count: 3000 })).expect("room");
            while lane.in_flight() > 0 {
                if lane.poll(&mut done) == 0 {
                    lane.wait(Duration::from_millis(50));
                }
                for completion in done.drain(..) {
                    completion.result.expect("all well");
                    match (completion.tag, completion.buffer) {
                        (0, Some(buffer)) => small.push(buffer),
                        (1, Some(buffer)) => large.push(buffer),
                        _ => {}
                    }
                }
            }
        }
        // Also when there is an error to report, and when a snapshot is taken.
        let buffer = small.pop().expect("a buffer");
        let (result, buffer) = one(&mut *lane, &mut done, Op::Read { page: PageId(u64::MAX), buffer });
        assert!(matches!(result, Err(PoolError::Refused { .. })));
        small.extend(buffer);
        backend.clone_region().expect("a clone");
    });
    assert_eq!(count, 0, "{urls:?} allocates while it works");
}

#[test]
fn an_open_lane_never_allocates() {
    let server = serve(|_| {});
    let [tcp, unix] = [&server.endpoints()[0], &server.endpoints()[1]];
    does_not_allocate(&[tcp]);
    does_not_allocate(&[unix]);
    does_not_allocate(&[tcp, unix]);
    does_not_allocate(&[&format!("mirror({tcp},{unix})")]);
    does_not_allocate(&[&format!("mirror({tcp},fault:die=300@{tcp},spare={unix})")]);
    does_not_allocate(&[&format!("ec(1,1,{tcp},{unix})")]);
    does_not_allocate(&[&format!("ec(2,2,{tcp},{unix},fault:die=300@{tcp},{unix},spare={unix})")]);
    does_not_allocate(&[&format!("tier({tcp},{unix})")]);
    does_not_allocate(&[&format!("tier(fault:full=300@{tcp},fault:die=300@{unix},{tcp})")]);
    does_not_allocate(&["ram:", &format!("fault:delay=1us@{tcp}")][1..]);
}

/// Serves with certificates, at a port with TLS.
fn serve_encrypted() -> (Certificates, Server) {
    let certificates = Certificates::new();
    let tls = Some(certificates.server());
    let server = serve(|config| {
        config.listen = vec!["tls://127.0.0.1:0".parse().unwrap()];
        config.tls = tls;
    });
    (certificates, server)
}

#[test]
fn an_open_lane_with_tls_never_allocates() {
    let (certificates, server) = serve_encrypted();
    let url = certificates.url(&server.endpoints()[0], "client");
    does_not_allocate(&[&url]);
    does_not_allocate(&[&format!("mirror({url},fault:die=300@{url},spare={url})")]);
}

/// Relay in front of a server, which passes on the bytes of a connection only once it may.
fn gated_relay(to: String) -> (String, Arc<AtomicBool>) {
    fn carry(mut from: TcpStream, mut to: TcpStream) {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    }
    let (listener, is_open) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(AtomicBool::new(true)));
    let (address, gate) = (listener.local_addr().unwrap(), is_open.clone());
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let (to, gate) = (to.clone(), gate.clone());
            std::thread::spawn(move || {
                while !gate.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                let Ok(server) = TcpStream::connect(to) else { return };
                let (from, back) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || carry(from, server));
                carry(back, client);
            });
        }
    });
    (format!("tls://{address}"), is_open)
}

#[test]
fn a_lane_that_gets_its_keys_while_it_is_polled_allocates_nothing() {
    let (certificates, server) = serve_encrypted();
    let (relay, is_open) = gated_relay(server.endpoints()[0].strip_prefix("tls://").unwrap().to_owned());
    let backend = PoolBuilder::new().url(certificates.url(&relay, "client")).pages(64).open().unwrap();
    is_open.store(false, Ordering::Relaxed);
    let mut lane = backend.open_lane().unwrap();
    lane.submit(request(1, Op::Write { page: PageId(3), buffer: filled(1, 9) })).expect("room");
    let mut done = Vec::with_capacity(1);
    assert_eq!(lane.poll(&mut done), 0, "it cannot have joined");
    let count = allocations(|| {
        is_open.store(true, Ordering::Relaxed);
        while lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_millis(50));
        }
    });
    done[0].result.expect("all well");
    assert_eq!(count, 0, "a lane allocates while it joins");
    assert!(read(&mut *lane, 3, 1).bytes().iter().all(|byte| *byte == 9));
}

/// The first of these: it has both transports. All of them in the deep tier.
fn some_of<T>(ways: &[T]) -> &[T] {
    let is_deep = std::env::var("FARFIELD_DEEP").is_ok_and(|deep| deep == "1");
    if is_deep { ways } else { &ways[..1] }
}

#[test]
fn stripes_of_servers_are_backends() {
    let [first, second] = [serve(|_| {}), serve(|_| {})];
    conformance::run(&PoolBuilder::new().url(&first.endpoints()[0]).url(&second.endpoints()[0]));
    conformance::run(
        &PoolBuilder::new().url(&first.endpoints()[1]).url(&second.endpoints()[0]).url(&first.endpoints()[0]),
    );
}

#[test]
fn mirrors_of_servers_are_backends() {
    let [first, second] = [serve(|_| {}), serve(|_| {})];
    for [one, other] in some_of(&[[0, 1], [0, 0], [1, 1]]) {
        let url = format!("mirror({},{})", first.endpoints()[*one], second.endpoints()[*other]);
        conformance::run(&PoolBuilder::new().url(&url));
        // One that dies while the claims are tried out.
        conformance::run(&PoolBuilder::new().url(url.replace("mirror(", "mirror(fault:die=1000@")));
    }
    let url = format!("mirror({},{})", first.endpoints()[0], second.endpoints()[1]);
    conformance::death(&PoolBuilder::new().url(url), move || drop((first, second)));
}

#[test]
fn erasure_codes_of_servers_are_backends() {
    let servers = [serve(|_| {}), serve(|_| {}), serve(|_| {})];
    for ways in some_of(&[[0, 1, 0], [0, 0, 0], [1, 1, 1]]) {
        let [one, two, three] = [0, 1, 2].map(|server| &servers[server].endpoints()[ways[server]]);
        conformance::run(&PoolBuilder::new().url(format!("ec(2,1,{one},{two},{three})")));
        // One that dies while the claims are tried out.
        conformance::run(&PoolBuilder::new().url(format!("ec(1,2,{one},fault:die=1000@{two},{three})")));
    }
    let [one, two, three] = [0, 1, 2].map(|server| &servers[server].endpoints()[0]);
    let url = format!("ec(2,1,{one},{two},{three})");
    conformance::death(&PoolBuilder::new().url(url), move || drop(servers));
}

#[test]
fn tiers_of_servers_are_backends() {
    let servers = [serve(|config| config.capacity_bytes = Some(300 << 12)), serve(|_| {})];
    for ways in some_of(&[[0, 1], [1, 0], [0, 0], [1, 1]]) {
        let [one, two] = [0, 1].map(|server| &servers[server].endpoints()[ways[server]]);
        conformance::run(&PoolBuilder::new().url(format!("tier({one},{two})")));
        conformance::run(&PoolBuilder::new().url(format!("tier({one},{two})")).repair_thread());
    }
    let url = format!("tier({},{})", servers[0].endpoints()[0], servers[1].endpoints()[1]);
    conformance::death(&PoolBuilder::new().url(url), move || drop(servers));
}

#[test]
fn the_death_of_a_server_ends_everything() {
    for endpoint in [0, 1] {
        let server = serve(|_| {});
        let builder = PoolBuilder::new().url(&server.endpoints()[endpoint]);
        conformance::death(&builder, move || {
            server.shutdown(Duration::ZERO);
        });
    }
    let [first, second] = [serve(|_| {}), serve(|_| {})];
    let backend = PoolBuilder::new().url(&first.endpoints()[0]).url(&second.endpoints()[0]).pages(64).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    second.shutdown(Duration::ZERO);
    assert!(matches!(write(&mut *lane, 16, filled(1, 1)), Err(PoolError::ServerGone { server: 1, .. })));
    assert_eq!(write(&mut *lane, 0, filled(1, 1)), Ok(()));
    assert_eq!(backend.health(), Health::Degraded);
}

#[test]
fn room_is_counted_for_those_who_write_by_themselves() {
    const CAPACITY: u64 = 5000;
    for endpoint in [0, 1] {
        let server = serve(|config| config.capacity_bytes = Some(CAPACITY * 4096));
        let (_backend, mut lane) = open(&server.endpoints()[endpoint], 1 << 20);
        let mut stored = 0;
        let full = loop {
            match write(&mut *lane, stored, filled(8, 1)) {
                Ok(()) => stored += 8,
                Err(error) => break error,
            }
            assert!(stored <= CAPACITY, "more is stored than there is room for");
        };
        assert_eq!(full, PoolError::PoolFull { server: 0 });
        assert!(stored >= CAPACITY - 8, "full with {stored} of {CAPACITY} pages");
        // What is there can be written over, and what is discarded makes room again.
        assert_eq!(write(&mut *lane, 0, filled(8, 2)), Ok(()));
        let (result, _) = one(&mut *lane, &mut Vec::with_capacity(1), Op::Discard { page: PageId(100), count: 2000 });
        assert_eq!(result, Ok(()));
        for page in (0..2000).step_by(8) {
            assert_eq!(write(&mut *lane, 10_000 + page, filled(8, 3)), Ok(()), "{page} of 2000 pages");
        }
        assert_eq!(read(&mut *lane, 0, 1).page(0)[0], 2);
        assert_eq!(read(&mut *lane, 10_000, 1).page(0)[0], 3);
        assert_eq!(read(&mut *lane, 100, 1).page(0)[0], 0);
    }
}

#[test]
fn a_region_of_sixteen_tebibytes_costs_what_is_in_it() {
    let server = serve(|_| {});
    for endpoint in [0, 1] {
        let (backend, mut lane) = open(&server.endpoints()[endpoint], 1 << 32);
        let last = (1 << 32) - 64;
        assert_eq!(write(&mut *lane, last, filled(64, 9)), Ok(()));
        assert_eq!(write(&mut *lane, 12345, filled(1, 8)), Ok(()));
        // Snapshots of it do not run out of address space either, and it can be emptied at once.
        let tickets: Vec<CloneTicket> = (0..20).map(|_| backend.clone_region().unwrap()).collect();
        assert_eq!(read(&mut *lane, last, 64).page(63)[0], 9);
        let builder = PoolBuilder::new().url(&server.endpoints()[endpoint]);
        let clone = builder.claim(&tickets[7]).unwrap();
        let start = Instant::now();
        let discard = Op::Discard { page: PageId(0), count: (1 << 32) - 1 };
        assert_eq!(one(&mut *lane, &mut Vec::with_capacity(1), discard).0, Ok(()));
        // Page by page it would take minutes, and tens of gigabytes of tables.
        assert!(start.elapsed() < Duration::from_secs(10), "emptying took {:?}", start.elapsed());
        assert_eq!(read(&mut *lane, last, 1).page(0)[0], 0);
        assert_eq!(read(&mut *clone.open_lane().unwrap(), last, 64).page(63)[0], 9);
    }
}

#[test]
fn mapped_pages_are_the_pages() {
    let server = serve(|_| {});
    let (backend, mut lane) = open(&server.endpoints()[1], 1 << 20);
    let mapped = backend.mapped().expect("shared memory can be mapped");
    let byte = |page| {
        // SAFETY: a page of the region; nobody writes it meanwhile.
        mapped.page(PageId(page)).map(|address| unsafe { address.add(4095).read_volatile() })
    };
    assert_eq!(byte(7), None);
    write(&mut *lane, 7, filled(1, 1)).unwrap();
    write(&mut *lane, (1 << 20) - 1, filled(1, 2)).unwrap();
    assert_eq!((byte(7), byte((1 << 20) - 1)), (Some(1), Some(2)));
    let ticket = backend.clone_region().unwrap();
    write(&mut *lane, 7, filled(1, 3)).unwrap();
    assert_eq!((byte(7), byte((1 << 20) - 1)), (Some(3), Some(2)));
    let clone = PoolBuilder::new().url(&server.endpoints()[1]).claim(&ticket).unwrap();
    let frozen = clone.mapped().unwrap().page(PageId(7)).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { frozen.read_volatile() }, 1);
    one(&mut *lane, &mut Vec::with_capacity(1), Op::Discard { page: PageId(7), count: 1 }).0.unwrap();
    assert_eq!(byte(7), None);
}

#[test]
fn abandoned_connections_say_nothing_and_the_parent_goes_on() {
    let server = serve(|_| {});
    for endpoint in [0, 1] {
        let (backend, mut lane) = open(&server.endpoints()[endpoint], 1 << 10);
        write(&mut *lane, 1, filled(1, 1)).unwrap();
        // SAFETY: the child calls nothing but what is made for this, and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            backend.abandon();
            drop(lane);
            drop(backend);
            // SAFETY: ends the child without running anything of the parent.
            unsafe { libc::_exit(0) };
        }
        let mut status = -1;
        // SAFETY: `status` is writable; the child ends by itself.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(read(&mut *lane, 1, 1).page(0)[0], 1);
        assert_eq!(backend.health(), Health::Good);
        assert!(backend.clone_region().is_ok());
    }
}

/// A ring of nodes of eight bytes: each leads to the one behind it.
struct Ring;

impl Memory for Ring {
    fn region_bytes(&self) -> u64 {
        1 << 20
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        let next = (offset + 64) % self.region_bytes();
        into.fill(0);
        into[..8].copy_from_slice(&next.to_le_bytes());
        Ok(())
    }

    fn write(&self, offset: u64, _: &[u8]) -> Result<(), Fault> {
        Err(Fault::OutOfRange { offset })
    }

    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
        work()
    }

    fn clock(&self) -> u64 {
        1
    }
}

#[test]
fn functions_at_a_server_allocate_nothing() {
    let registry = Registry::new().with::<List>();
    let arguments: Vec<Vec<u8>> =
        (1..100).map(|node| postcard::to_stdvec(&ListStart { node: node * 64, hops: 9 }).unwrap()).collect();
    let budget = Budget { steps_max: 1 << 20, until: None };
    let tasks: Vec<Task<'_>> = arguments.iter().map(|argument| Task { argument, budget }).collect();
    for together in [1, 2, 16, tasks.len()] {
        let mut ended = 0;
        let mut run = || {
            let mut count = |_, result: Result<&[u8], _>, _| ended += usize::from(result.is_ok());
            registry.run(List::NAME, List::VERSION, &Ring, &tasks[..together], &mut count).unwrap();
        };
        // The first of a thread makes what the others use.
        run();
        assert_eq!(allocations(run), 0, "{together} together");
        assert_eq!(ended, 2 * together);
    }
}
