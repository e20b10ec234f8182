//! A store of a graph in which edges come and go, and questions about it: PageRank and triangles. In a collected heap it is the
//! example `graph_store` of `farfield-gc`; with std's types it is what one writes with `Arc`, `BTreeMap` and `HashMap`.

#[path = "../../crates/gc/examples/graph_store/store.rs"]
#[allow(dead_code, reason = "the example asks more")]
mod store;

use crate::collected::{collected, figures_of_collections};
use crate::graph::{Arrivals, ElementBytes, FRIENDS, Size, write_links};
use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_since};
use anyhow::Result;
use farfield_gc::GcError;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use store::{DAMPING, Store, common, keep_top};

/// Of the plain program: a node with its places in two tables, and the two map entries of an edge.
const PLAIN: ElementBytes = ElementBytes { vertex: 300, edge: 88 };
/// Of the collected heap: with its part of the nodes an edge of a graph that is made up, some of whose vertices have none; nodes and
/// edges of a real graph.
const COLLECTED_BYTES_PER_EDGE: u64 = 65;
const COLLECTED: ElementBytes = ElementBytes { vertex: 310, edge: 39 };
/// Rounds of PageRank.
const ROUNDS: usize = 3;
/// Nodes whose ranks are told.
const TOP: usize = 10;

/// What is asked of a store.
trait GraphStore {
    fn add(&mut self, from: u64, to: u64) -> Result<bool, GcError>;
    fn remove(&mut self, from: u64, to: u64) -> Result<bool, GcError>;
    fn page_rank(&mut self) -> Result<Vec<(f64, u64)>, GcError>;
    fn triangles(&mut self) -> Result<u64, GcError>;
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    if let Some(folder) = &options.columns {
        write_links(Size::new(options, PLAIN, FRIENDS)?, &folder.join("links"))?;
        return Ok(Outcome::new());
    }
    let size = match &options.links {
        Some(file) => Size::of_file(file)?,
        None => Size::new(options, PLAIN, FRIENDS)?,
    };
    let live_bytes = match options.real {
        1 => size.vertices as u64 * COLLECTED.vertex + size.edges * COLLECTED.edge,
        _ => size.edges * COLLECTED_BYTES_PER_EDGE,
    };
    match collected(options, live_bytes)? {
        None => use_store(options, size, &mut PlainStore::default()),
        Some((heap, gc)) => {
            let before = heap.stats();
            let edges = size.edges;
            let mut outcome = use_store(options, size, &mut Store::new(&gc)?)?;
            figures_since(&mut outcome, &before, &heap.stats(), edges, 0);
            figures_of_collections(&mut outcome, &gc);
            Ok(outcome)
        }
    }
}

fn use_store(options: &Options, size: Size, store: &mut impl GraphStore) -> Result<Outcome> {
    let (mut outcome, edges, vertices) = (Outcome::new(), size.edges, size.vertices as u64);
    let mut arrivals = Arrivals::of(size);
    // Edges that are removed later.
    let mut old = Vec::new();
    let (mut added, mut removed) = (0u64, 0u64);
    while let Some(log) = arrivals.next_log(edges)? {
        let left = (options.ops as usize).saturating_sub(old.len());
        old.extend(log.iter().take(left).map(|edge| (edge.from, edge.to)));
        outcome.phase("fill", log.len() as u64, || {
            log.iter().try_for_each(|edge| {
                added += u64::from(store.add(edge.from.into(), edge.to.into())?);
                Ok::<(), GcError>(())
            })
        })?;
    }
    let mut random = Random::new(options.seed);
    outcome.phase("change", options.ops, || {
        old.iter().try_for_each(|(from, to)| {
            removed += u64::from(store.remove((*from).into(), (*to).into())?);
            added += u64::from(store.add((*from).into(), random.below(vertices))?);
            Ok::<(), GcError>(())
        })
    })?;
    let ranks = outcome.phase("rank", edges, || store.page_rank())?;
    let triangles = outcome.phase("triangles", edges, || store.triangles())?;
    outcome.all("all", &["fill", "change", "rank", "triangles"]);
    let ranks = ranks.iter().fold(0, |sum, (rank, id)| mix(sum ^ rank.to_bits() ^ id));
    outcome.checked(mix(ranks ^ triangles) ^ (added - removed), 0);
    outcome.figure("edges", (added - removed) as f64);
    outcome.figure("triangles", triangles as f64);
    Ok(outcome)
}

impl GraphStore for Store<'_> {
    fn add(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        let is_new = Store::add(self, from, to)?;
        self.m.safepoint()?;
        Ok(is_new)
    }

    fn remove(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        let was_there = Store::remove(self, from, to)?;
        self.m.safepoint()?;
        Ok(was_there)
    }

    fn page_rank(&mut self) -> Result<Vec<(f64, u64)>, GcError> {
        Store::page_rank(self, ROUNDS, TOP)
    }

    fn triangles(&mut self) -> Result<u64, GcError> {
        Store::triangles(self)
    }
}

type Neighbours = Mutex<BTreeMap<u64, Arc<PlainNode>>>;

/// As threads could share it.
struct PlainNode {
    id: u64,
    out: Neighbours,
    incoming: Neighbours,
    /// Of this round and of the next one, as bits of numbers.
    ranks: [AtomicU64; 2],
    later: Mutex<Vec<u64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PlainNode {
    fn order(&self) -> (u64, u64) {
        ((lock(&self.out).len() + lock(&self.incoming).len()) as u64, self.id)
    }

    fn rank(&self, round: usize) -> f64 {
        f64::from_bits(self.ranks[round % 2].load(Ordering::Relaxed))
    }
}

#[derive(Default)]
struct PlainStore {
    by_id: HashMap<u64, Arc<PlainNode>>,
    nodes: Vec<Arc<PlainNode>>,
}

impl PlainStore {
    fn node(&mut self, id: u64) -> Arc<PlainNode> {
        let nodes = &mut self.nodes;
        let new = || {
            let (out, incoming) = Default::default();
            let node = PlainNode { id, out, incoming, ranks: Default::default(), later: Mutex::default() };
            nodes.push(Arc::new(node));
            nodes[nodes.len() - 1].clone()
        };
        self.by_id.entry(id).or_insert_with(new).clone()
    }
}

impl Drop for PlainStore {
    fn drop(&mut self) {
        // Edges are cycles of owners.
        for node in &self.nodes {
            lock(&node.out).clear();
            lock(&node.incoming).clear();
        }
    }
}

impl GraphStore for PlainStore {
    fn add(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        let (from, to) = (self.node(from), self.node(to));
        lock(&to.incoming).insert(from.id, from.clone());
        let before = lock(&from.out).insert(to.id, to);
        Ok(before.is_none())
    }

    fn remove(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        let (Some(from), Some(to)) = (self.by_id.get(&from), self.by_id.get(&to)) else { return Ok(false) };
        lock(&to.incoming).remove(&from.id);
        let before = lock(&from.out).remove(&to.id);
        Ok(before.is_some())
    }

    fn page_rank(&mut self) -> Result<Vec<(f64, u64)>, GcError> {
        let count = self.nodes.len() as f64;
        self.nodes.iter().for_each(|node| node.ranks[0].store((1.0 / count).to_bits(), Ordering::Relaxed));
        for round in 0..ROUNDS {
            let mut lost = 0.0;
            for node in &self.nodes {
                lost += if lock(&node.out).is_empty() { node.rank(round) } else { 0.0 };
            }
            let base = (1.0 - DAMPING + DAMPING * lost) / count;
            for node in &self.nodes {
                let mut sum = 0.0;
                for from in lock(&node.incoming).values() {
                    // Who has an edge to itself is locked only once at a time: these are two tables.
                    sum += from.rank(round) / lock(&from.out).len() as f64;
                }
                node.ranks[(round + 1) % 2].store((base + DAMPING * sum).to_bits(), Ordering::Relaxed);
            }
        }
        let mut ranks: Vec<_> = self.nodes.iter().map(|node| (node.rank(ROUNDS), node.id)).collect();
        keep_top(&mut ranks, TOP);
        Ok(ranks)
    }

    fn triangles(&mut self) -> Result<u64, GcError> {
        for node in &self.nodes {
            let own = node.order();
            let ends = |of: &Neighbours| lock(of).values().cloned().collect::<Vec<_>>();
            let ends = [ends(&node.out), ends(&node.incoming)].concat();
            let mut later: Vec<u64> = ends.iter().filter(|end| end.order() > own).map(|end| end.id).collect();
            later.sort_unstable();
            later.dedup();
            *lock(&node.later) = later;
        }
        let mut count = 0;
        for node in &self.nodes {
            let ids = lock(&node.later);
            for id in ids.iter() {
                count += self.by_id.get(id).map_or(0, |other| common(&ids, &lock(&other.later)));
            }
        }
        Ok(count)
    }
}
