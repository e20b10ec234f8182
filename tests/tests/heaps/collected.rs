//! Collected heaps on real memory servers: a graph whose objects are replaced all the time, and servers that die.

use crate::{NEAR, Way, Wire};
use farfield::{FarError, Heap, Plane, PoolError, Verify};
use farfield_gc::{BrokenRule, Bytes, FarObject, FarTracing, GcError, GcHeap, GcStats, Mutator, Ref, Root, WeakRef};
use farfield_tests::{Command, MIB, PATIENCE, Scratch, Server, seeded, tier, wait_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What can be far; four times what can be near is live.
const LIMIT: u64 = 8 * NEAR;
const NODES: usize = 4096;

/// Each node leads to another one that leads back.
#[derive(FarObject)]
struct Node {
    at: u64,
    bytes: Ref<Bytes>,
    partner: Ref<Node>,
}

fn bytes(at: u64) -> [u8; 1900] {
    core::array::from_fn(|byte| (at as u8).wrapping_mul(7) ^ byte as u8)
}

/// Puts a new node and its partner at this place. Those that were there lead to each other, and nothing to them.
fn replace(m: &mut Mutator<'_>, nodes: &Root<[Ref<Node>]>, at: usize) -> Result<(), GcError> {
    m.safepoint()?;
    let node = |at| m.alloc(Node { at, bytes: Ref::null(), partner: Ref::null() });
    let (node, partner) = (node(at as u64)?, node(u64::MAX)?);
    node.bytes.store(m, Some(m.alloc_copy(&bytes(at as u64))?));
    node.partner.store(m, Some(partner));
    partner.partner.store(m, Some(node));
    m.get(nodes)?[at].store(m, Some(node));
    Ok(())
}

/// Reads the node at this place, if one is there.
fn read(m: &mut Mutator<'_>, nodes: &Root<[Ref<Node>]>, at: usize) -> Result<(), GcError> {
    m.safepoint()?;
    let Some(node) = m.get(nodes)?[at].load(m)? else { return Ok(()) };
    let partner = node.partner.load(m)?.expect("a partner");
    assert!(node.at == at as u64 && partner.at == u64::MAX && partner.partner.load(m)?.expect("back").is(node));
    assert_eq!(node.bytes.load(m)?.as_deref(), Some(&bytes(at as u64)[..]));
    Ok(())
}

fn places(gc: &GcHeap) -> Root<[Ref<Node>]> {
    let m = gc.enter();
    m.root(m.alloc_array(NODES, |_| Ref::null()).unwrap())
}

fn fill(gc: &GcHeap, nodes: &Root<[Ref<Node>]>, steps: &AtomicU64) -> Result<(), GcError> {
    let mut m = gc.enter();
    (0..NODES).try_for_each(|at| {
        steps.fetch_add(1, Ordering::Relaxed);
        replace(&mut m, nodes, at)
    })
}

#[test]
fn graphs_at_a_quarter_near_stay_within_their_limit_on_each_kind_of_server() {
    for way in [Way::Tcp, Way::Unix, Way::Shm] {
        let scratch = Scratch::new("collected");
        let server = way.start(&scratch, "64M");
        let heap = way.heap(&server, Plane::Page);
        let builder = GcHeap::in_heap(&heap).limit(LIMIT).far_tracing(FarTracing::Servers);
        let gc = builder.broken(BrokenRule::ServersAreFaster).build().unwrap();
        let nodes = places(&gc);
        fill(&gc, &nodes, &AtomicU64::new(0)).unwrap();
        let mut random = seeded(35);
        let mut m = gc.enter();
        for _ in 0..3 * NODES {
            replace(&mut m, &nodes, random.usize(..NODES)).unwrap();
            read(&mut m, &nodes, random.usize(..NODES)).unwrap();
        }
        m.collect().unwrap();
        drop(m);
        let (stats, far) = (gc.stats(), heap.stats());
        println!("{way:?}: {stats:?}, {} misses", far.misses);
        assert_eq!(stats.live_objects, 1 + 3 * NODES as u64);
        assert!(stats.live_bytes > 7 * MIB && stats.used_bytes <= LIMIT && stats.collections > 1);
        assert!(far.near_bytes <= NEAR && far.misses > NODES as u64);
        assert!(stats.traced_at_servers > 500 && stats.flushed_pages > 0, "{stats:?}");
        let verified = gc.verify().unwrap();
        assert_eq!((verified.objects, verified.allocated), (stats.live_objects, stats.live_objects));
    }
}

/// Leads to one that is changed when it is near.
#[derive(FarObject)]
struct Outer {
    inner: Ref<Inner>,
    bytes: Ref<Bytes>,
}

#[derive(FarObject)]
struct Inner {
    node: Ref<Node>,
    padding: [u64; 120],
}

/// Collects when some of what servers have is not what is near. The objects that only near changes lead to live.
fn collect_behind_servers(way: Way, broken: BrokenRule) -> Result<GcStats, GcError> {
    let scratch = Scratch::new("collected-behind");
    let server = way.start(&scratch, "64M");
    let heap = way.heap(&server, Plane::Page);
    let builder = GcHeap::in_heap(&heap).limit(2 * LIMIT).far_tracing(FarTracing::Servers);
    let gc = builder.broken(broken).build().unwrap();
    let mut m = gc.enter();
    let outers = m.root(m.alloc_array(NODES, |_| Ref::<Outer>::null())?);
    let inners = m.root(m.alloc_array(NODES, |_| WeakRef::<Inner>::null())?);
    let all = m.root(m.alloc_array(NODES, |_| Ref::<Inner>::null())?);
    // They lie in other pages than the ones that lead to them.
    for at in 0..NODES {
        m.safepoint()?;
        let inner = m.alloc(Inner { node: Ref::null(), padding: [at as u64; 120] })?;
        inner.node.store(&m, Some(m.alloc(Node { at: at as u64, bytes: Ref::null(), partner: Ref::null() })?));
        m.get(&all)?[at].store(&m, Some(inner));
        m.get(&inners)?[at].store(&m, Some(inner))?;
    }
    for at in 0..NODES {
        m.safepoint()?;
        let outer = m.alloc(Outer { inner: Ref::null(), bytes: Ref::null() })?;
        // In no order, so that it is worth while to ask servers.
        outer.inner.store(&m, m.get(&all)?[at * 1021 % NODES].load(&m)?);
        outer.bytes.store(&m, Some(m.alloc_copy(&bytes(at as u64)[..900])?));
        m.get(&outers)?[at].store(&m, Some(outer));
    }
    drop(all);
    m.collect()?;
    // The old nodes die. What leads to these is far.
    for at in NODES - 300..NODES {
        m.safepoint()?;
        let inner = m.get(&inners)?[at].load(&m)?.expect("its outer lives");
        inner.node.store(&m, Some(m.alloc(Node { at: at as u64, bytes: Ref::null(), partner: Ref::null() })?));
    }
    drop(m);
    gc.collect()?;
    let stats = gc.stats();
    let verified = gc.verify()?;
    assert_eq!((verified.objects, verified.allocated), (stats.live_objects, stats.live_objects));
    Ok(stats)
}

#[test]
fn servers_trace_what_is_near_and_was_changed_and_not_what_was_there_before() {
    for way in [Way::Tcp, Way::Shm] {
        let stats = collect_behind_servers(way, BrokenRule::ServersAreFaster).unwrap();
        assert!(stats.traced_at_servers > 500 && stats.live_objects == 2 + 4 * NODES as u64, "{stats:?}");
    }
    // Which pages are near then is not decided here: one of several shows it.
    let is_shown = (0..5).any(|_| {
        let broken = || collect_behind_servers(Way::Tcp, BrokenRule::FlushBeforeTracing);
        !matches!(std::panic::catch_unwind(broken), Ok(Ok(_)))
    });
    assert!(is_shown, "nothing shows that the flush is needed");
}

#[test]
fn a_heap_with_a_key_asks_no_server() {
    let scratch = Scratch::new("collected-key");
    let server = Way::Tcp.start(&scratch, "64M");
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).pool(server.url()).verify(Verify::Keyed);
    let heap = heap.build().unwrap();
    let builder = GcHeap::in_heap(&heap).limit(LIMIT).far_tracing(FarTracing::Servers);
    let gc = builder.evacuate_at_servers(true).build().unwrap();
    let nodes = places(&gc);
    fill(&gc, &nodes, &AtomicU64::new(0)).unwrap();
    gc.collect().unwrap();
    let stats = gc.stats();
    assert_eq!((stats.traced_at_servers, stats.flushed_pages, stats.live_objects), (0, 0, 1 + 3 * NODES as u64));
    assert_eq!((stats.moved_at_servers, stats.server_moves_given_up), (0, 0));
}

#[test]
fn a_server_that_dies_ends_collections_with_an_error_and_nothing_hangs() {
    for (way, at) in [(Way::Tcp, 2000), (Way::Tcp, 5000), (Way::Unix, 6000), (Way::Shm, 3000)] {
        let scene = std::thread::spawn(move || die_at(way, at));
        wait_until(&format!("{way:?}, {at}"), || scene.is_finished());
        scene.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

fn is_gone(error: &GcError) -> bool {
    matches!(error, GcError::Far(FarError::Pool(PoolError::ServerGone { .. })))
}

/// A heap that asks servers whatever they can do.
fn asking(heap: &Heap) -> GcHeap {
    let builder = GcHeap::in_heap(heap).limit(LIMIT).far_tracing(FarTracing::Servers);
    builder.broken(BrokenRule::ServersAreFaster).evacuate_at_servers(true).build().unwrap()
}

/// Makes a graph and changes it, until its server is gone or so much was done that all of the graph has been far.
fn change_until_gone(gc: &GcHeap, random: &mut fastrand::Rng, steps: &AtomicU64) -> Result<(), GcError> {
    let nodes = places(gc);
    fill(gc, &nodes, steps)?;
    let mut m = gc.enter();
    while steps.fetch_add(1, Ordering::Relaxed) < 40_000 {
        replace(&mut m, &nodes, random.usize(..NODES))?;
        read(&mut m, &nodes, random.usize(..NODES))?;
    }
    Ok(())
}

/// Collects when the server is gone, which fails or needs nothing that is far.
fn collect_what_is_left(gc: &GcHeap) {
    let used = gc.stats().used_bytes;
    if let Err(error) = gc.collect() {
        assert!(is_gone(&error) && gc.stats().used_bytes == used, "{error}");
    }
}

/// The server is killed at this step.
fn die_at(way: Way, at: u64) {
    let scratch = Scratch::new("collected-dies");
    let server = way.start(&scratch, "64M");
    let heap = way.heap(&server, Plane::Page);
    let gc = asking(&heap);
    let steps = Arc::new(AtomicU64::new(0));
    let killer = std::thread::spawn({
        let steps = steps.clone();
        move || {
            wait_until("the moment", || steps.load(Ordering::Relaxed) >= at);
            server.kill();
        }
    });
    let end = change_until_gone(&gc, &mut seeded(at), &steps);
    steps.fetch_max(at, Ordering::Relaxed);
    killer.join().expect("it kills and ends");
    match end {
        Err(error) => assert!(is_gone(&error), "{error}"),
        // Memory that is mapped can be read when its server is dead.
        Ok(()) => assert_eq!(way, Way::Shm, "nothing was far any more"),
    }
    collect_what_is_left(&gc);
    println!("{way:?}, at step {at}: {:?}", gc.stats());
}

/// In the handshake, in a page, in a question, in what the server answers to it.
#[test]
fn a_connection_that_is_cut_at_any_byte_ends_collections_with_an_error() {
    let scratch = Scratch::new("collected-cut");
    let server = Way::Tcp.start(&scratch, "256M");
    let mut random = seeded(78);
    for round in 0..tier(3, 600) {
        let bytes = random.usize(..if round % 8 == 7 { 1500 } else { 4 * LIMIT as usize });
        let url = Wire::to(&server, bytes as u64);
        let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).pool(url).patience(PATIENCE).build();
        let heap = match heap {
            Ok(heap) => heap,
            // Cut in the handshake.
            Err(error) => {
                assert!(bytes < 2000, "after {bytes} bytes: {error}");
                continue;
            }
        };
        let gc = asking(&heap);
        let error = change_until_gone(&gc, &mut random, &AtomicU64::new(0)).expect_err("more bytes than that travel");
        assert!(is_gone(&error), "after {bytes} bytes: {error}");
        collect_what_is_left(&gc);
        println!("cut after {bytes} bytes: {:?}", gc.stats());
    }
}

/// Nodes of a table.
const EACH: usize = 128;

/// Makes a table of nodes and keeps it, as full as it gets.
fn add_table(m: &mut Mutator<'_>, tables: &mut Vec<Root<[Ref<Node>]>>) -> Result<(), GcError> {
    let table = m.with_room(|m| Ok(m.root(m.alloc_array(EACH, |_| Ref::null())?)))?;
    tables.push(table.clone());
    (0..EACH).try_for_each(|at| replace(m, &table, at))
}

/// A server that has less room than the heap's limit says so before anything is lost, and has room again when a collection has given
/// back what was dropped.
#[test]
fn a_server_that_is_full_has_room_after_a_collection() {
    let is_full = |error: &GcError| matches!(error, GcError::Far(FarError::Pool(PoolError::PoolFull { .. })));
    for way in [Way::Tcp, Way::Shm] {
        let scratch = Scratch::new("collected-full");
        let server = way.start(&scratch, "4M");
        let heap = way.heap(&server, Plane::Page);
        let gc = asking(&heap);
        let (mut m, mut tables) = (gc.enter(), Vec::new());
        let error = std::iter::repeat_with(|| add_table(&mut m, &mut tables)).take(64).find_map(Result::err);
        let error = error.expect("4 MiB, and two near, take no 16");
        assert!(is_full(&error) && tables.len() > 12, "{way:?}: {error}, {} tables", tables.len());
        let mut at = 0;
        tables.retain(|_| {
            at += 1;
            at % 3 == 0
        });
        m.collect().unwrap();
        for _ in 0..tables.len() / 2 {
            add_table(&mut m, &mut tables).unwrap();
        }
        for table in &tables {
            (0..EACH).for_each(|at| read(&mut m, table, at).unwrap());
        }
        drop(m);
        println!("{way:?}: {} tables, {:?}", tables.len(), gc.stats());
        gc.verify().unwrap();
    }
}

const POOL: &str = "FARFIELD_TEST_POOL";

/// Process of [`what_a_process_had_that_is_killed_is_given_back`].
#[test]
#[ignore = "runs until it is killed"]
fn changes_a_graph_until_it_is_killed() {
    let pool = std::env::var(POOL).expect("the test that starts this names a pool");
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).pool(pool).build().unwrap();
    let gc = asking(&heap);
    loop {
        change_until_gone(&gc, &mut seeded(5), &AtomicU64::new(0)).unwrap();
    }
}

#[test]
fn what_a_process_had_that_is_killed_is_given_back() {
    let scratch = Scratch::new("collected-killed");
    let options = ["--capacity", "256M", "--lease", "1s", "--metrics", "127.0.0.1:0"];
    let servers = [Server::start_tcp(&scratch, "tcp", options), Server::start(&scratch, "unix", options)];
    let mut random = seeded(43);
    let program = std::env::current_exe().expect("a program has a path");
    let program = program.to_str().expect("an ASCII path");
    for round in 0..tier(4, 100) {
        let server = &servers[round % 2];
        let words = [program, "--exact", "collected::changes_a_graph_until_it_is_killed", "--ignored"];
        let running = Command::new(&scratch.folder("run"), words).env(POOL, server.url()).start();
        // While it fills its heap, or when it collects all the time.
        let bytes = random.u64(1..7) * MIB;
        wait_until("the process uses its heap", || server.metric("farfield_used_bytes") >= bytes);
        std::thread::sleep(Duration::from_millis(random.u64(..30)));
        assert!(!running.is_over());
        drop(running);
        for name in ["farfield_used_bytes", "farfield_reserved_bytes", "farfield_regions"] {
            wait_until(name, || server.metric(name) == 0);
        }
    }
}
