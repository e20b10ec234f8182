//! Each way to look at far objects finds the same ones.
//!
//! Danger: an object that one tracer overlooks, or a cycle that waits for a program that does nothing.

use crate::common::{MIB, far_heap};
use core::sync::atomic::{AtomicBool, Ordering};
use farfield_gc::{FarObject, FarTracing, GcError, GcHeap, Mutator, Ref, Root};
use fastrand::Rng;
use std::time::{Duration, Instant};

const ALL: [FarTracing; 4] = [FarTracing::Frames, FarTracing::Copies, FarTracing::Arrivals, FarTracing::Servers];

#[derive(FarObject)]
struct Node {
    number: u64,
    edges: [Ref<Node>; 3],
    rest: [u64; 3],
}

const EACH: usize = 256;

type Table = Vec<Root<[Ref<Node>]>>;

fn node(m: &Mutator<'_>, table: &Table, at: usize) -> Result<Root<Node>, GcError> {
    let node = m.get(&table[at / EACH])?[at % EACH].load(m)?;
    Ok(m.root(node.expect("each is set")))
}

/// Makes nodes, each of which leads to these others.
fn make(m: &mut Mutator<'_>, edges: &[[usize; 3]]) -> Table {
    let mut table = Table::new();
    for chunk in 0..edges.len().div_ceil(EACH) {
        let nodes = |m: &Mutator<'_>| {
            let nodes = m.alloc_array(EACH, |_| Ref::null())?;
            for (within, place) in nodes.iter().enumerate() {
                let number = (chunk * EACH + within) as u64;
                place.store(m, Some(m.alloc(Node { number, edges: Default::default(), rest: [number; 3] })?));
            }
            Ok(m.root(nodes))
        };
        table.push(m.with_room(nodes).unwrap());
        m.safepoint().unwrap();
    }
    for (at, edges) in edges.iter().enumerate() {
        let connect = |m: &Mutator<'_>| {
            let from = node(m, &table, at)?;
            for (index, to) in edges.iter().enumerate() {
                let to = node(m, &table, *to)?;
                m.get(&from)?.edges[index].store(m, Some(m.get(&to)?));
            }
            Ok(())
        };
        m.with_room(connect).unwrap();
        m.safepoint().unwrap();
    }
    table
}

/// Returns the number of nodes that the first one leads to.
fn reachable(edges: &[[usize; 3]]) -> u64 {
    let mut is_found = vec![false; edges.len()];
    is_found[0] = true;
    let mut stack = vec![0];
    let mut found = 0;
    while let Some(at) = stack.pop() {
        found += 1;
        for to in edges[at] {
            if !std::mem::replace(&mut is_found[to], true) {
                stack.push(to);
            }
        }
    }
    found
}

#[test]
fn each_tracer_finds_what_is_reachable() {
    let mut random = Rng::with_seed(crate::common::seed());
    // Half of the nodes lead to what is near them, half anywhere; a part of them is led to by nothing.
    let edges: Vec<[usize; 3]> = (0..64 * EACH)
        .map(|at| match at % 2 {
            0 => [(at + 2) % (60 * EACH), at / 2, at / 3],
            _ => std::array::from_fn(|_| random.usize(..50 * EACH)),
        })
        .collect();
    let wanted = reachable(&edges);
    assert!(wanted > 1000 && wanted < edges.len() as u64);
    for tracing in ALL {
        let heap = far_heap(1);
        let gc = GcHeap::in_heap(&heap).limit(16 * MIB).far_tracing(tracing).build().unwrap();
        let mut m = gc.enter();
        let table = make(&mut m, &edges);
        let first = m.with_room(|m| node(m, &table, 0)).unwrap();
        drop(table);
        for _ in 0..2 {
            m.collect().unwrap();
            let stats = gc.stats();
            assert_eq!(stats.live_objects, wanted, "{tracing:?}");
            // The program waits for the collection, so nothing arrives, and there is little to wait for.
            assert!(2 * stats.waited <= stats.last_collection + Duration::from_millis(20), "{stats:?}");
            assert_eq!(stats.read_pages > 0, tracing != FarTracing::Frames, "{tracing:?} {stats:?}");
            assert!(stats.waited == Duration::ZERO || tracing == FarTracing::Arrivals, "{tracing:?}");
        }
        drop(m);
        let found = gc.verify().unwrap();
        assert_eq!((found.objects, found.allocated), (wanted, wanted), "{tracing:?}");
        drop(first);
    }
}

#[test]
fn objects_are_looked_at_when_the_program_brings_them() {
    let mut random = Rng::with_seed(crate::common::seed());
    let edges: Vec<[usize; 3]> = (0..64 * EACH).map(|_| std::array::from_fn(|_| random.usize(..64 * EACH))).collect();
    let heap = far_heap(1);
    let gc = GcHeap::in_heap(&heap).limit(16 * MIB).far_tracing(FarTracing::Arrivals).build().unwrap();
    let table = make(&mut gc.enter(), &edges);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut m = gc.enter();
            while !is_done.load(Ordering::Relaxed) {
                let at = random.usize(..edges.len());
                let number = |m: &Mutator<'_>| {
                    let node = node(m, &table, at)?;
                    let node = m.get(&node)?;
                    assert_eq!(node.rest, [node.number; 3]);
                    Ok(node.number)
                };
                assert_eq!(m.with_room(number).unwrap(), at as u64);
                m.safepoint().unwrap();
            }
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            gc.collect().unwrap();
            let stats = gc.stats();
            assert!(stats.live_objects >= edges.len() as u64);
            if stats.arrived_objects > 0 && stats.waited > Duration::ZERO {
                break;
            }
            assert!(Instant::now() < deadline, "{stats:?}");
        }
        is_done.store(true, Ordering::Relaxed);
    });
    gc.verify().unwrap();
}
