//! Two programs that make much garbage from what lives, as those of Spark in the evaluations of Mako and MemLiner do: the transitive
//! closure of a graph, whose lists each round makes anew, and points that are assigned to the nearest centre, each sum of
//! which is a vector of its own. With std's types objects are behind `Arc`.

use crate::collected::{CHUNK, collected, figures_of_collections};
use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_since};
use anyhow::Result;
use farfield_gc::{FarObject, Gc, GcError, Mutator, Ref, Root};
use std::sync::{Arc, Mutex, PoisonError};

/// Nodes of a graph that lead to each other only.
const GROUP: u64 = 48;
/// Edges of a node.
const EDGES: usize = 2;
/// Bytes of a node and its list, with std's types and about as many in the collected heap.
const NODE_BYTES: u64 = 256;

/// Numbers of a point.
const DIMENSIONS: usize = 8;
/// Centres to which points are assigned.
const CENTRES: usize = 16;
/// Bytes of a point and its place in a table, with std's types and about as many in the collected heap.
const POINT_BYTES: u64 = 136;

/// Returns the numbers below this one, in random order if the heap is aged.
fn order(options: &Options, count: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    if options.aged == 1 {
        let mut random = Random::new(options.seed);
        for at in (1..order.len()).rev() {
            order.swap(at, random.below(at as u64 + 1) as usize);
        }
    }
    order
}

/// Table of objects of a collected heap, in parts.
struct Table<T: 'static> {
    parts: Vec<Root<[Ref<T>]>>,
}

impl<T: FarObject> Table<T> {
    /// Makes a table of objects, in their order.
    fn new(
        m: &mut Mutator<'_>,
        count: u64,
        make: impl for<'m> Fn(&'m Mutator<'_>, u64) -> Result<Gc<'m, T>, GcError>,
    ) -> Result<Table<T>, GcError> {
        let mut parts = Vec::new();
        for first in (0..count).step_by(CHUNK) {
            parts.push(m.with_room(|m| {
                let part = m.alloc_array(CHUNK.min((count - first) as usize), |_| Ref::<T>::null())?;
                for (place, at) in part.iter().zip(first..) {
                    place.store(m, Some(make(m, at)?));
                }
                Ok(m.root(part))
            })?);
            m.safepoint()?;
        }
        Ok(Table { parts })
    }

    fn get<'m>(&self, m: &'m Mutator<'_>, at: u64) -> Result<Gc<'m, T>, GcError> {
        let part = m.get(&self.parts[at as usize / CHUNK])?;
        found(part[at as usize % CHUNK].load(m)?)
    }
}

/// Returns what a reference leads to that was set.
fn found<T: ?Sized>(object: Option<Gc<'_, T>>) -> Result<Gc<'_, T>, GcError> {
    Ok(object.unwrap_or_else(|| unreachable!("each was set")))
}

/// Returns the ends of the edges of each node. Groups are neighbours, or lie anywhere if the heap is aged.
fn edges(options: &Options, count: u64) -> Vec<[u32; EDGES]> {
    let order = order(options, count);
    let mut edges = vec![[0; EDGES]; count as usize];
    for (at, node) in order.iter().enumerate() {
        let first = at as u64 / GROUP * GROUP;
        edges[*node as usize] = core::array::from_fn(|edge| {
            let to = mix(options.seed ^ (at * EDGES + edge) as u64) % GROUP;
            order[(first + to) as usize]
        });
    }
    edges
}

/// Node of a graph, and the nodes that it reaches as far as that is known, in their order.
#[derive(FarObject)]
struct Node {
    edges: [Ref<Node>; EDGES],
    reached: Ref<[u32]>,
}

struct PlainNode {
    edges: [u32; EDGES],
    reached: Mutex<Arc<[u32]>>,
}

impl PlainNode {
    fn reached(&self) -> Arc<[u32]> {
        Arc::clone(&self.reached.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Puts all numbers of some lists into one, each once, in their order.
fn unite<'l>(lists: impl IntoIterator<Item = &'l [u32]>, into: &mut Vec<u32>) {
    into.clear();
    lists.into_iter().for_each(|list| into.extend_from_slice(list));
    into.sort_unstable();
    into.dedup();
}

fn add_list(sum: u64, list: &[u32]) -> u64 {
    list.iter().fold(mix(sum ^ list.len() as u64), |sum, node| sum.rotate_left(5) ^ u64::from(*node))
}

/// The transitive closure of a graph: in each round, each node learns what those reach that it leads to.
pub(crate) fn run_closure(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / NODE_BYTES / GROUP * GROUP;
    let rounds = (options.ops / count).max(1);
    let mut united = Vec::new();
    let mut outcome = Outcome::new();
    let Some((heap, gc)) = collected(options, count * NODE_BYTES)? else {
        let nodes: Vec<Arc<PlainNode>> = outcome.phase("fill", count, || {
            let node = |edges: [u32; EDGES]| {
                unite([&edges[..]], &mut united);
                Arc::new(PlainNode { edges, reached: Mutex::new(united[..].into()) })
            };
            edges(options, count).into_iter().map(node).collect()
        });
        outcome.phase("join", rounds * count, || {
            for node in (0..rounds).flat_map(|_| &nodes) {
                let lists =
                    [node.reached(), nodes[node.edges[0] as usize].reached(), nodes[node.edges[1] as usize].reached()];
                unite(lists.iter().map(|list| &**list), &mut united);
                let before = core::mem::replace(
                    &mut *node.reached.lock().unwrap_or_else(PoisonError::into_inner),
                    united[..].into(),
                );
                drop(before);
            }
        });
        outcome.checked(nodes.iter().fold(0, |sum, node| add_list(sum, &node.reached())), 0);
        return Ok(outcome);
    };
    let mut m = gc.enter();
    let nodes = outcome.phase("fill", count, || -> Result<_> {
        let nodes =
            Table::new(&mut m, count, |m, _| Ok(m.alloc(Node { edges: Default::default(), reached: Ref::null() })?))?;
        for (at, edges) in edges(options, count).iter().enumerate() {
            unite([&edges[..]], &mut united);
            m.with_room(|m| {
                let node = nodes.get(m, at as u64)?;
                for (edge, to) in node.edges.iter().zip(edges) {
                    edge.store(m, Some(nodes.get(m, (*to).into())?));
                }
                node.reached.store(m, Some(m.alloc_copy(&united)?));
                Ok(())
            })?;
            m.safepoint()?;
        }
        Ok(nodes)
    })?;
    let before = heap.stats();
    outcome.phase("join", rounds * count, || -> Result<(), GcError> {
        for at in (0..rounds).flat_map(|_| 0..count) {
            m.with_room(|m| {
                let node = nodes.get(m, at)?;
                let [first, second] = &node.edges;
                let lists = [node, found(first.load(m)?)?, found(second.load(m)?)?];
                let [own, first, second] = lists.map(|node| found(node.reached.load(m)?));
                unite([&*own?, &*first?, &*second?], &mut united);
                node.reached.store(m, Some(m.alloc_copy(&united)?));
                Ok(())
            })?;
            m.safepoint()?;
        }
        Ok(())
    })?;
    figures_since(&mut outcome, &before, &heap.stats(), rounds * count, 0);
    figures_of_collections(&mut outcome, &gc);
    let mut sum = 0;
    for at in 0..count {
        sum = m.with_room(|m| Ok(add_list(sum, &found(nodes.get(m, at)?.reached.load(m)?)?)))?;
        m.safepoint()?;
    }
    outcome.checked(sum, 0);
    Ok(outcome)
}

type Vector = [f64; DIMENSIONS];

/// Point, whose numbers are an object of their own.
#[derive(FarObject)]
struct Point {
    vector: Ref<Vector>,
}

/// Point and its centre, until those of a part of the points were added.
#[derive(FarObject)]
struct Assigned {
    centre: u64,
    vector: Ref<Vector>,
}

struct PlainPoint {
    vector: Mutex<Arc<Vector>>,
}

struct PlainAssigned {
    centre: usize,
    vector: Arc<Vector>,
}

impl PlainPoint {
    fn vector(&self) -> Arc<Vector> {
        Arc::clone(&self.vector.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the numbers of a point, each between 0 and 1.
fn vector_of(options: &Options, point: u64) -> Vector {
    core::array::from_fn(|at| {
        (mix(options.seed ^ (point * DIMENSIONS as u64 + at as u64)) >> 11) as f64 / (1u64 << 53) as f64
    })
}

fn nearest(centres: &[Vector; CENTRES], vector: &Vector) -> usize {
    let distance = |centre: &Vector| -> f64 { centre.iter().zip(vector).map(|(a, b)| (a - b) * (a - b)).sum() };
    let nearer = |best: (usize, f64), (at, distance)| if distance < best.1 { (at, distance) } else { best };
    centres.iter().map(distance).enumerate().fold((0, f64::INFINITY), nearer).0
}

fn plus(sum: &Vector, vector: &Vector) -> Vector {
    core::array::from_fn(|at| sum[at] + vector[at])
}

/// Sums of the points of each centre, and their numbers.
#[derive(Default)]
struct Sums([(Vector, u64); CENTRES]);

impl Sums {
    fn add(&mut self, centre: usize, vector: &Vector, points: u64) {
        let (sum, count) = &mut self.0[centre];
        (*sum, *count) = (plus(sum, vector), *count + points);
    }

    /// Moves each centre that has points to their middle.
    fn move_centres(&self, centres: &mut [Vector; CENTRES]) {
        for (centre, (sum, count)) in centres.iter_mut().zip(&self.0).filter(|(_, (_, count))| *count > 0) {
            *centre = sum.map(|sum| sum / *count as f64);
        }
    }
}

/// Assigns points to centres, in rounds, as k-means does.
pub(crate) fn run_clusters(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / POINT_BYTES;
    let rounds = (options.ops / count).max(1);
    let mut centres: [Vector; CENTRES] = core::array::from_fn(|at| vector_of(options, at as u64));
    let mut outcome = Outcome::new();
    match collected(options, count * POINT_BYTES)? {
        None => assign_plain(options, &mut outcome, count, rounds, &mut centres),
        Some((heap, gc)) => {
            let mut m = gc.enter();
            let points = outcome.phase("fill", count, || {
                let points = Table::new(&mut m, count, |m, at| {
                    let point = m.alloc(Point { vector: Ref::null() })?;
                    point.vector.store(m, Some(m.alloc(vector_of(options, at))?));
                    Ok(point)
                })?;
                for at in replaced(options, count) {
                    m.with_room(|m| {
                        let point = points.get(m, at.into())?;
                        let vector = *found(point.vector.load(m)?)?;
                        point.vector.store(m, Some(m.alloc(vector)?));
                        Ok(())
                    })?;
                    m.safepoint()?;
                }
                anyhow::Ok(points)
            })?;
            let before = heap.stats();
            outcome.phase("assign", rounds * count, || assign(&mut m, &points, rounds, &mut centres))?;
            figures_since(&mut outcome, &before, &heap.stats(), rounds * count, 0);
            figures_of_collections(&mut outcome, &gc);
        }
    }
    outcome.checked(centres.iter().flatten().fold(0, |sum, number| mix(sum ^ number.to_bits())), 0);
    Ok(outcome)
}

/// Returns the points whose vectors are replaced before they are used, in this order.
fn replaced(options: &Options, count: u64) -> Vec<u32> {
    if options.aged == 1 { order(options, count) } else { Vec::new() }
}

fn assign_plain(options: &Options, outcome: &mut Outcome, count: u64, rounds: u64, centres: &mut [Vector; CENTRES]) {
    let points: Vec<Arc<PlainPoint>> = outcome.phase("fill", count, || {
        let point = |at| Arc::new(PlainPoint { vector: Mutex::new(Arc::new(vector_of(options, at))) });
        let points: Vec<_> = (0..count).map(point).collect();
        for at in replaced(options, count) {
            let mut vector = points[at as usize].vector.lock().unwrap_or_else(PoisonError::into_inner);
            *vector = Arc::new(**vector);
        }
        points
    });
    outcome.phase("assign", rounds * count, || {
        for _ in 0..rounds {
            let mut sums = Sums::default();
            for part in points.chunks(CHUNK) {
                let assign = |point: &Arc<PlainPoint>| {
                    let vector = point.vector();
                    Arc::new(PlainAssigned { centre: nearest(centres, &vector), vector })
                };
                let assigned: Vec<Arc<PlainAssigned>> = part.iter().map(assign).collect();
                let mut of_part: [(Arc<Vector>, u64); CENTRES] = core::array::from_fn(|_| (Arc::default(), 0));
                for it in &assigned {
                    let (sum, count) = &mut of_part[it.centre];
                    (*sum, *count) = (Arc::new(plus(sum, &it.vector)), *count + 1);
                }
                of_part.iter().enumerate().for_each(|(centre, (sum, count))| sums.add(centre, sum, *count));
            }
            sums.move_centres(centres);
        }
    });
}

fn assign(
    m: &mut Mutator<'_>,
    points: &Table<Point>,
    rounds: u64,
    centres: &mut [Vector; CENTRES],
) -> Result<(), GcError> {
    for _ in 0..rounds {
        let mut sums = Sums::default();
        for part in &points.parts {
            let of_part = m.with_room(|m| {
                let part = m.get(part)?;
                let assigned = m.alloc_array(part.len(), |_| Ref::<Assigned>::null())?;
                for (point, place) in part.iter().zip(&*assigned) {
                    let vector = found(found(point.load(m)?)?.vector.load(m)?)?;
                    let it = m.alloc(Assigned { centre: nearest(centres, &vector) as u64, vector: Ref::null() })?;
                    it.vector.store(m, Some(vector));
                    place.store(m, Some(it));
                }
                let added = m.alloc_array(CENTRES, |_| Ref::<Vector>::null())?;
                let mut counts = [0; CENTRES];
                for place in &*assigned {
                    let it = found(place.load(m)?)?;
                    let centre = it.centre as usize;
                    let sum = added[centre].load(m)?.map_or([0.0; DIMENSIONS], |sum| *sum);
                    added[centre].store(m, Some(m.alloc(plus(&sum, &*found(it.vector.load(m)?)?))?));
                    counts[centre] += 1;
                }
                let mut of_part = [([0.0; DIMENSIONS], 0); CENTRES];
                for (centre, sum) in added.iter().enumerate() {
                    of_part[centre] = (sum.load(m)?.map_or([0.0; DIMENSIONS], |sum| *sum), counts[centre]);
                }
                Ok(of_part)
            })?;
            of_part.iter().enumerate().for_each(|(centre, (sum, count))| sums.add(centre, sum, *count));
            m.safepoint()?;
        }
        sums.move_centres(centres);
    }
    Ok(())
}
