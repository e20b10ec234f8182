//! Random operations on a graph, and on a model of it outside of the heap. Tests of servers, which are elsewhere, share it.

use crate::common::{MIB, assert_in_budget, seed};
use farfield::Heap;
use farfield_gc::{Atom, Bytes, FarObject, FarTracing, Gc, GcError, GcHeap, GcStats, Mutator, Ref, Root, WeakRef};

use fastrand::Rng;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};

#[derive(FarObject, Default)]
struct Node {
    id: u64,
    stamp: Atom<u64>,
    edges: [Ref<Node>; 3],
    weak: WeakRef<Node>,
    array: Ref<[Ref<Node>]>,
    bytes: Ref<Bytes>,
}

/// What the model knows of a node.
#[derive(Clone, Default)]
struct Shadow {
    stamp: u64,
    edges: [Option<u64>; 3],
    weak: Option<u64>,
    array: Option<Vec<Option<u64>>>,
    bytes: Option<Vec<u8>>,
}

#[derive(Default)]
struct Model {
    nodes: HashMap<u64, Shadow>,
    roots: BTreeMap<u64, Root<Node>>,
    next_id: u64,
}

impl Model {
    fn leads_to(&self, id: u64) -> impl Iterator<Item = u64> + '_ {
        let node = &self.nodes[&id];
        node.edges.iter().chain(node.array.iter().flatten()).flatten().copied()
    }

    fn reachable(&self) -> HashSet<u64> {
        let mut stack: Vec<u64> = self.roots.keys().copied().collect();
        let mut seen: HashSet<u64> = stack.iter().copied().collect();
        while let Some(id) = stack.pop() {
            stack.extend(self.leads_to(id).filter(|next| seen.insert(*next)));
        }
        seen
    }

    /// Drops a quarter of the roots, so that a full heap has room.
    fn drop_roots(&mut self) {
        let mut at = 0;
        self.roots.retain(|_, _| {
            at += 1;
            at % 4 != 0
        });
    }

    /// Forgets what is not reachable. Returns the number of objects that are.
    fn collect(&mut self) -> u64 {
        let alive = self.reachable();
        self.nodes.retain(|id, _| alive.contains(id));
        let mut objects = 0;
        for node in self.nodes.values_mut() {
            node.weak = node.weak.filter(|id| alive.contains(id));
            objects += 1 + u64::from(node.array.is_some()) + u64::from(node.bytes.is_some());
        }
        objects
    }
}

/// Checks a node against the model, and what it leads to by name.
fn check(m: &Mutator<'_>, model: &Model, node: Gc<'_, Node>) -> Result<(), GcError> {
    let shadow = &model.nodes[&node.id];
    assert_eq!(node.stamp.get(), shadow.stamp);
    for (edge, id) in node.edges.iter().zip(shadow.edges) {
        assert_eq!(edge.load(m)?.map(|next| next.id), id);
    }
    assert_eq!(node.bytes.load(m)?.as_deref(), shadow.bytes.as_deref());
    match (node.array.load(m)?, &shadow.array) {
        (Some(array), Some(ids)) => {
            assert_eq!(array.len(), ids.len());
            for (edge, id) in array.iter().zip(ids) {
                assert_eq!(edge.load(m)?.map(|next| next.id), *id);
            }
        }
        (array, ids) => assert!(array.is_none() && ids.is_none()),
    }
    Ok(())
}

/// Size of a graph: roots, at most, and bytes of a node.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) roots: usize,
    pub(crate) bytes: usize,
}

/// Goes along random edges, and returns where it ends.
fn walk<'m>(m: &'m Mutator<'_>, model: &Model, random: &mut Rng) -> Result<Option<Gc<'m, Node>>, GcError> {
    if model.roots.is_empty() {
        return Ok(None);
    }
    let at = model.next_id * random.usize(..1000) as u64 / 1000;
    let root = model.roots.range(at..).next().or(model.roots.iter().next());
    let (id, root) = root.expect("there is one");
    let mut node = m.get(root)?;
    assert_eq!(node.id, *id);
    for _ in 0..random.usize(..6) {
        let next = if random.usize(..4) == 0
            && let Some(array) = node.array.load(m)?
        {
            array[random.usize(..array.len())].load(m)?
        } else {
            node.edges[random.usize(..3)].load(m)?
        };
        let Some(next) = next else { break };
        node = next;
        assert_eq!(node.stamp.get(), model.nodes[&node.id].stamp);
    }
    Ok(Some(node))
}

fn new_node<'m>(m: &'m Mutator<'_>, model: &mut Model) -> Result<Gc<'m, Node>, GcError> {
    let id = model.next_id;
    let node = m.alloc(Node { id, ..Node::default() })?;
    model.next_id += 1;
    model.nodes.insert(id, Shadow::default());
    Ok(node)
}

/// Makes one operation, in the heap and then in the model.
fn operate(m: &Mutator<'_>, model: &mut Model, random: &mut Rng, size: Size) -> Result<(), GcError> {
    let Some(node) = walk(m, model, random)? else {
        let node = new_node(m, model)?;
        let root = m.root(node);
        model.roots.insert(node.id, root);
        return Ok(());
    };
    match random.usize(..16) {
        0 | 1 if model.roots.len() < size.roots => {
            let new = new_node(m, model)?;
            new.edges[0].store(m, Some(node));
            model.nodes.get_mut(&new.id).expect("just made").edges[0] = Some(node.id);
            model.roots.insert(new.id, m.root(new));
        }
        0..=2 => {
            let at = model.next_id * random.usize(..1000) as u64 / 1000;
            if let Some(id) = model.roots.range(at..).next().map(|(id, _)| *id) {
                model.roots.remove(&id);
            }
        }
        3..=6 => {
            let (target, edge) = match random.usize(..4) {
                0 => (walk(m, model, random)?, random.usize(..3)),
                1 => (None, random.usize(..3)),
                _ => (Some(new_node(m, model)?), random.usize(..3)),
            };
            node.edges[edge].store(m, target);
            model.nodes.get_mut(&node.id).expect("alive").edges[edge] = target.map(|target| target.id);
        }
        7 => {
            let targets: Vec<_> =
                (0..random.usize(..20) + 1).map(|_| walk(m, model, random)).collect::<Result<_, GcError>>()?;
            let array = m.alloc_array(targets.len(), |_| Ref::null())?;
            for (edge, target) in array.iter().zip(&targets) {
                edge.store(m, *target);
            }
            node.array.store(m, Some(array));
            let ids = targets.iter().map(|target| target.map(|target| target.id)).collect();
            model.nodes.get_mut(&node.id).expect("alive").array = Some(ids);
        }
        8..=10 => {
            let len = if random.usize(..50) == 0 { random.usize(..20_000) } else { random.usize(..size.bytes) };
            let bytes: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
            let object = m.alloc_copy(&bytes)?;
            node.bytes.store(m, Some(object));
            model.nodes.get_mut(&node.id).expect("alive").bytes = Some(bytes);
        }
        11 => {
            let target = walk(m, model, random)?;
            node.weak.store(m, target)?;
            model.nodes.get_mut(&node.id).expect("alive").weak = target.map(|target| target.id);
        }
        12 => {
            // Nobody else may lead to it: then either it was collected, or it lives again.
            let found = node.weak.load(m)?;
            let shadow = model.nodes[&node.id].weak;
            if let Some(found) = found {
                assert_eq!(Some(found.id), shadow);
                node.edges[2].store(m, Some(found));
                model.nodes.get_mut(&node.id).expect("alive").edges[2] = shadow;
            } else if let Some(id) = shadow {
                assert!(!model.reachable().contains(&id), "a weak reference lost an object that lives");
            }
        }
        13 => {
            node.stamp.set(random.u64(..));
            model.nodes.get_mut(&node.id).expect("alive").stamp = node.stamp.get();
        }
        _ => check(m, model, node)?,
    }
    Ok(())
}

/// The node to which an edge of this node leads; those of its array follow its own.
fn edge<'m>(m: &'m Mutator<'_>, node: Gc<'m, Node>, index: usize) -> Result<Option<Gc<'m, Node>>, GcError> {
    match index.checked_sub(node.edges.len()) {
        None => node.edges[index].load(m),
        Some(index) => node.array.load(m)?.map_or(Ok(None), |array| array[index].load(m)),
    }
}

/// Collects, and compares all of the heap with the model.
fn compare(gc: &GcHeap, model: &mut Model) {
    gc.collect().unwrap();
    let objects = model.collect();
    let verified = gc.verify().unwrap();
    assert_eq!((verified.objects, verified.allocated), (objects, objects));
    let mut m = gc.enter();
    let mut stack: Vec<u64> = model.roots.keys().copied().collect();
    let mut known: HashMap<u64, Root<Node>> = model.roots.iter().map(|(id, root)| (*id, root.clone())).collect();
    while let Some(id) = stack.pop() {
        // What one step looks at is little: a scope can hold a sixteenth of what is near.
        let count = m.with_room(|m| {
            let node = m.get(&known[&id])?;
            assert_eq!(node.id, id);
            check(m, model, node)?;
            let weak = node.weak.load(m)?.map(|target| target.id);
            assert_eq!(weak, model.nodes[&id].weak, "weak references end with the collection");
            Ok(node.edges.len() + node.array.load(m)?.map_or(0, |array| array.len()))
        });
        let mut found = Vec::new();
        for index in 0..count.unwrap() {
            let next = m.with_room(|m| Ok(edge(m, m.get(&known[&id])?, index)?.map(|next| (next.id, m.root(next)))));
            found.extend(next.unwrap().filter(|(next, _)| !known.contains_key(next)));
        }
        for (id, root) in found {
            if known.insert(id, root).is_none() {
                stack.push(id);
            }
        }
        // A heap that is full of what lives can be read all the same. A safepoint would collect each time.
        m.blocking(|| ());
    }
    assert_eq!(known.len(), model.nodes.len());
}

/// How collections look at far objects and move them.
#[derive(Clone, Copy)]
pub(crate) struct Cycles {
    pub(crate) tracing: FarTracing,
    pub(crate) evacuate_at_servers: bool,
}

/// Changes a graph on some threads, and compares all of it with the model now and then.
pub(crate) fn run_in(heap: Heap, cycles: Cycles, limit_mib: u64, size: Size, threads: u64, operations: u64) -> GcStats {
    let seed = seed();
    let Cycles { tracing, evacuate_at_servers } = cycles;
    let builder = GcHeap::in_heap(&heap).limit(limit_mib * MIB).far_tracing(tracing);
    let gc = builder.evacuate_at_servers(evacuate_at_servers).build().unwrap();
    let model = Mutex::new(Model::default());
    let lock = || -> MutexGuard<'_, Model> { model.lock().unwrap() };
    for round in 0..4 {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (gc, lock) = (&gc, &lock);
                scope.spawn(move || {
                    let mut random = Rng::with_seed(seed.wrapping_mul(1_000_003) + round * 1000 + thread);
                    let mut m = gc.enter();
                    for _ in 0..operations / threads / 4 {
                        // Nobody waits for a safepoint of others with the model.
                        let done = m.with_room(|m| operate(m, &mut lock(), &mut random, size));
                        match done {
                            Ok(()) => {}
                            Err(GcError::HeapFull { .. }) => lock().drop_roots(),
                            Err(error) => panic!("{error}"),
                        }
                        match m.safepoint() {
                            Ok(()) => {}
                            Err(GcError::HeapFull { .. }) => lock().drop_roots(),
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
        });
        compare(&gc, &mut lock());
    }
    let (stats, far) = (gc.stats(), heap.stats());
    println!("{stats:?} {} misses", far.misses);
    assert!(stats.collections > 4 && stats.given_up == 0 && stats.used_bytes <= limit_mib * MIB);
    assert_in_budget(&heap);
    model.into_inner().unwrap().roots.clear();
    gc.collect().unwrap();
    assert_eq!(gc.verify().unwrap().allocated, 0);
    drop(gc);
    heap.verify();
    stats
}
