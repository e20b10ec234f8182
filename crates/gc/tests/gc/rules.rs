//! A collection runs beside mutators that change the graph, and each of its rules is needed for that.
//!
//! Danger: an object that a mutator has moved out of the collector's sight and that is freed, and a test that would not see it.

use crate::common::{MIB, far_heap, seed};
use farfield_gc::{BrokenRule, FarObject, GcError, GcHeap, Mutator, Ref, Root, WeakRef};
use fastrand::Rng;

#[derive(FarObject, Default)]
struct Node {
    leaf: Ref<Leaf>,
    /// Nothing else leads to that one.
    weak: WeakRef<Leaf>,
}

#[derive(FarObject, Default)]
struct Leaf {
    id: u64,
    inner: Ref<[u64]>,
}

const NODES: usize = 15_000;

type Table = [Ref<Node>];

fn new_leaf<'m>(m: &'m Mutator<'_>, id: u64) -> Result<farfield_gc::Gc<'m, Leaf>, GcError> {
    let leaf = m.alloc(Leaf { id, ..Leaf::default() })?;
    leaf.inner.store(m, Some(m.alloc_copy(&[id; 3])?));
    Ok(leaf)
}

fn build(m: &mut Mutator<'_>) -> Root<Table> {
    let table = m.root(m.alloc_array(NODES, |_| Ref::null()).unwrap());
    for at in 0..NODES {
        let make = |m: &Mutator<'_>| {
            let node = m.alloc(Node::default())?;
            node.leaf.store(m, Some(new_leaf(m, at as u64)?));
            node.weak.store(m, Some(new_leaf(m, (NODES + at) as u64)?))?;
            m.get(&table)?[at].store(m, Some(node));
            Ok(())
        };
        m.with_room(make).unwrap();
    }
    table
}

/// Moves leaves between nodes and one root, so that each has one way to it at most.
fn change(m: &Mutator<'_>, table: &Root<Table>, hand: &mut Root<Leaf>, random: &mut Rng) -> Result<(), GcError> {
    let nodes = m.get(table)?;
    let any = |random: &mut Rng| nodes[random.usize(..NODES)].load(m).map(|node| node.expect("each is set"));
    let (from, to) = (any(random)?, any(random)?);
    match random.usize(..5) {
        0 => {
            let moved = from.weak.load(m)?;
            if let Some(moved) = moved {
                assert_eq!(moved.inner.load(m)?.expect("it was set")[0], moved.id);
                from.weak.store(m, None)?;
                to.leaf.store(m, Some(moved));
            }
        }
        1 => to.leaf.store(m, Some(new_leaf(m, 7)?)),
        2 => {
            let held = m.get(hand)?;
            if let Some(moved) = from.leaf.load(m)? {
                from.leaf.store(m, Some(held));
                hand.set(moved);
            }
        }
        3 => {
            let moved = from.leaf.swap(m, None)?;
            to.leaf.store(m, moved);
        }
        _ => {
            let moved = from.leaf.load(m)?;
            if from.leaf.compare_exchange(m, moved, None) {
                to.leaf.store(m, moved);
            }
        }
    }
    Ok(())
}

/// Collects once while the graph changes, and verifies what is left.
fn collect_beside_changes(broken: Option<BrokenRule>, seed: u64) -> Result<(), GcError> {
    let heap = far_heap(1);
    let builder = GcHeap::in_heap(&heap).limit(16 * MIB);
    let gc = match broken {
        Some(rule) => builder.broken(rule),
        None => builder,
    };
    let gc = gc.build().unwrap();
    let mut m = gc.enter();
    let table = build(&mut m);
    let mut hand = m.with_room(|m| Ok(m.root(new_leaf(m, 0)?))).unwrap();
    let mut random = Rng::with_seed(seed);
    std::thread::scope(|threads| {
        let collected = threads.spawn(|| gc.collect());
        // Nothing is used any more once something may be missing.
        while gc.stats().collections == 0 {
            for _ in 0..8 {
                match change(&m, &table, &mut hand, &mut random) {
                    Ok(()) | Err(GcError::SafepointDue | GcError::Far(farfield::FarError::NearFull)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            m.safepoint().unwrap();
        }
        drop(m);
        collected.join().unwrap().unwrap();
    });
    let verified = gc.verify()?;
    println!("{:?} {verified:?}", gc.stats());
    Ok(())
}

#[test]
fn a_collection_keeps_what_mutators_move_meanwhile() {
    let seed = seed();
    for round in 0..if crate::common::is_deep() { 100 } else { 5 } {
        collect_beside_changes(None, seed + round).unwrap();
    }
}

#[test]
fn a_collection_without_one_of_its_rules_loses_objects() {
    let seed = seed();
    for rule in [BrokenRule::LogRemoved, BrokenRule::LogWeaklyFound, BrokenRule::ShareLogs, BrokenRule::CloseOpenPages]
    {
        let is_noticed = (0..30).any(|round| collect_beside_changes(Some(rule), seed + round).is_err());
        assert!(is_noticed, "nobody notices that {rule:?} is broken");
    }
}

#[test]
fn a_heap_that_is_dropped_ends_the_collection_that_runs() {
    let heap = far_heap(1);
    for round in 0..20 {
        let gc = GcHeap::in_heap(&heap).limit(8 * MIB).build().unwrap();
        let mut m = gc.enter();
        let mut roots = Vec::new();
        // Near the limit, safepoints ask for a collection and go on.
        while gc.stats().used_bytes < 8 * MIB - MIB / 2 + round * 8192 {
            if let Ok(object) = m.alloc([1u64; 200]) {
                roots.push(m.root(object));
            }
            m.safepoint().unwrap();
        }
        drop(m);
        drop(gc);
        let again = GcHeap::in_heap(&heap).build();
        assert!(roots.is_empty() || again.is_err(), "its roots keep the heap");
        drop(roots);
    }
    heap.verify();
}
