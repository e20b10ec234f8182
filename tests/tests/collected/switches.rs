//! The pool is exchanged in the middle of a collection: while servers trace, while they move objects, and at any moment.
//!
//! Danger: an answer of a server that does not have the heap any more, and is believed; a fresh page that is written at the pool that
//! the heap leaves; a region that is taken for one server's because it was.

use crate::common::{MIB, Over, far_heap_at, is_deep, seed};
use crate::counters::{Counter, Counters, count_in, sparse_heap_at};
use crate::held::{Held, hold};
use crate::{serve, ways};
use farfield::{Heap, PoolError, SwitchError};
use farfield_gc::{BrokenRule, FarTracing, GcBuilder, GcHeap, GcStats};
use farfield_server::Server;
use farfield_wic::Registry;
use farfield_wic::evacuate::Evacuate;
use farfield_wic::trace::Trace;
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const OBJECTS: usize = 30_000;
const LIVE: usize = OBJECTS / 10;
const PAGE_BYTES: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(60);

fn builder(heap: &Heap) -> GcBuilder<'_> {
    let builder = GcHeap::in_heap(heap).limit(24 * MIB).region(256 << 10).far_tracing(FarTracing::Servers);
    builder.broken(BrokenRule::ServersAreFaster).evacuate_at_servers(true)
}

fn slot(at: usize) -> usize {
    at * 1021 % LIVE
}

/// Collects a heap of which one object in ten lives, and calls `switch` with it while a server that it has asked is held and until
/// `end` is dropped. Then all is as it was, and further collections use the servers that the heap has then.
fn collect_beside(
    pool: &str,
    switch: impl FnOnce(&Heap, &mut dyn FnMut()) + Send,
    uses_servers_afterwards: bool,
) -> GcStats {
    let heap = far_heap_at(pool, 1);
    let (gc, all) = sparse_heap_at(builder(&heap), OBJECTS, slot);
    let (holding, asked) = hold();
    let before = gc.stats();
    std::thread::scope(|threads| {
        let collecting = threads.spawn(|| gc.collect());
        asked.recv_timeout(PATIENCE).expect("a server is asked");
        let mut holding = Some(holding);
        switch(&heap, &mut || drop(holding.take()));
        drop(holding);
        collecting.join().unwrap().expect("a switch is no matter of the collection");
    });
    let during = gc.stats();
    println!("{pool}: {during:?}");
    assert_eq!((during.collections, during.given_up, during.moves_given_up), (before.collections + 1, 0, 0));
    check(&gc, &all);
    // Half of what lives is replaced, so that pages are sparse again.
    let mut m = gc.enter();
    (0..LIVE).step_by(2).for_each(|at| all.replace(&mut m, slot(at), at as u64 * 10 + 9));
    drop(m);
    // Others use all that is near, so that objects are far again.
    let others: Vec<_> = (0..1000u64).map(|at| heap.alloc([at; PAGE_BYTES / 8]).unwrap()).collect();
    gc.collect().unwrap();
    gc.collect().unwrap();
    drop(others);
    let after = gc.stats();
    println!("{pool}, afterwards: {after:?}");
    // The number is that of the last collection.
    assert_eq!(after.traced_at_servers > 0, uses_servers_afterwards, "{after:?}");
    check(&gc, &all);
    drop((all, gc));
    heap.verify();
    during
}

fn check(gc: &GcHeap, all: &Counters) {
    let verified = gc.verify().unwrap();
    assert_eq!(verified.objects, verified.allocated);
    let mut m = gc.enter();
    (0..LIVE).for_each(|at| assert_eq!(all.with(&mut m, slot(at), Counter::value), at as u64 * 10 + 9));
}

/// Pools to which a heap at the first server is moved, one after the other: of fewer or more members, with groups that are larger or
/// smaller than regions.
fn others(servers: &[Server; 3]) -> [String; 4] {
    let [[one, _], [two, shm], [three, _]] = servers.each_ref().map(ways);
    [
        shm,
        format!("stripe({two},{three})?group=256K"),
        format!("stripe({three},{two})"),
        format!("mirror({one},{three})"),
    ]
}

#[test]
fn a_pool_that_is_exchanged_while_servers_trace_loses_nothing() {
    let held = serve(Registry::new().with::<Held<Trace>>().with::<Evacuate>());
    let servers = [serve(Registry::standard()), serve(Registry::standard()), serve(Registry::standard())];
    let [tcp, _] = ways(&held);
    for to in others(&servers) {
        let switch = |heap: &Heap, _: &mut dyn FnMut()| {
            // All of it while the call is under way: the answer comes from a server that has the heap no more.
            let switched = heap.switch_pool(to.as_str()).unwrap().wait(PATIENCE);
            assert_eq!(switched, Some(Ok(())), "{to}");
        };
        let during = collect_beside(&tcp, switch, true);
        assert_eq!(during.traced_at_servers, 0, "no answer of the old server is believed");
        assert!(during.read_pages > 0, "{during:?}");
    }
}

#[test]
fn a_pool_that_is_exchanged_while_servers_move_objects_loses_nothing() {
    let held = serve(Registry::new().with::<Trace>().with::<Held<Evacuate>>());
    let servers = [serve(Registry::standard()), serve(Registry::standard()), serve(Registry::standard())];
    let [tcp, _] = ways(&held);
    for to in others(&servers) {
        let switch = |heap: &Heap, let_go: &mut dyn FnMut()| {
            // It begins when the call is over, and goes on beside the stops in which entries get new places.
            let switch = heap.switch_pool(to.as_str()).unwrap();
            assert_eq!(switch.wait(Duration::ZERO), None, "a server writes");
            let_go();
            assert_eq!(switch.wait(PATIENCE), Some(Ok(())), "{to}");
        };
        let during = collect_beside(&tcp, switch, true);
        assert!(during.moved_at_servers > 0 && during.moved_objects > LIVE as u64 / 2, "{to}: {during:?}");
    }
}

/// The new pool dies, is full, or has no functions.
#[test]
fn a_switch_that_fails_or_leads_to_no_server_beside_a_collection_loses_nothing() {
    let held = serve(Registry::new().with::<Held<Trace>>().with::<Evacuate>());
    let [tcp, _] = ways(&held);
    for to in ["fault:die=10@ram:", "fault:full=10@ram:", "ram:"] {
        let switch = |heap: &Heap, _: &mut dyn FnMut()| {
            let switched = heap.switch_pool(to).unwrap().wait(PATIENCE).expect("it ends");
            match switched {
                Ok(()) => assert_eq!(to, "ram:"),
                Err(SwitchError::New(PoolError::ServerGone { .. })) => assert!(to.contains("die")),
                Err(SwitchError::New(PoolError::PoolFull { .. })) => assert!(to.contains("full")),
                Err(error) => panic!("{to}: {error}"),
            }
        };
        collect_beside(&tcp, switch, to != "ram:");
    }
}

/// Objects are changed and replaced beside collections that do not rest, and beside switches that do not either.
#[test]
fn no_change_is_lost_while_the_pool_is_exchanged_at_any_moment() {
    let servers = [serve(Registry::standard()), serve(Registry::standard()), serve(Registry::standard())];
    let [[one, _], ..] = servers.each_ref().map(ways);
    let pools = others(&servers);
    for round in 0..if is_deep() { 30 } else { 1 } {
        let seed = seed() + round;
        let heap = far_heap_at(&one, 1);
        let is_over = AtomicBool::new(false);
        let switches = std::thread::scope(|threads| {
            let switching = threads.spawn(|| {
                let (mut random, mut switches) = (Rng::with_seed(seed), 0);
                while !is_over.load(Ordering::Relaxed) {
                    let switch = heap.switch_pool(pools[random.usize(..pools.len())].as_str()).unwrap();
                    if random.usize(..4) == 0 {
                        switch.cancel();
                    }
                    match switch.wait(PATIENCE).expect("it ends") {
                        Ok(()) => switches += 1,
                        Err(SwitchError::Cancelled) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                switches
            });
            let over = Over(&is_over);
            let builder = GcHeap::in_heap(&heap).region(256 << 10).far_tracing(FarTracing::Servers);
            let builder = builder.evacuate_at_servers(true);
            let (wrong, stats) = count_in(builder, Some(BrokenRule::ServersAreFaster), seed, 8_000);
            drop(over);
            assert_eq!((wrong, stats.given_up), (0, 0), "{stats:?}");
            assert!(stats.moved_objects > 1000 && stats.collections > 2, "{stats:?}");
            switching.join().unwrap()
        });
        println!("{switches} switches");
        assert!(switches > 2);
        heap.verify();
    }
}
