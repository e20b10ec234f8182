//! The store: one graph in a collected heap, and what is asked of it.

use farfield_gc::collections::{AppendLog, OrderedMap, TrieMap};
use farfield_gc::{Atom, FarObject, Gc, GcError, GcHeap, Mutator, Ref, Root};
use std::collections::BTreeMap;
use std::ops::Bound;

#[derive(FarObject)]
pub(crate) struct Node {
    id: u64,
    properties: TrieMap<Ref<str>, Ref<str>>,
    out: OrderedMap<u64, Ref<Node>>,
    incoming: OrderedMap<u64, Ref<Node>>,
    /// Rank of this round and of the next one, as bits of numbers.
    ranks: [Atom<u64>; 2],
    /// Steps from the node that was asked for last, and one; 0 for never reached.
    distance: Atom<u32>,
    /// Ids of neighbours that come later in the order of edges, sorted, while triangles are counted.
    later: Ref<[u64]>,
}

#[derive(FarObject)]
pub(crate) struct Graph {
    by_id: TrieMap<u64, Ref<Node>>,
    nodes: AppendLog<Node>,
}

/// Nodes that are looked at between two safepoints.
const STEP: usize = 16;
/// Share of a rank that follows edges.
pub(crate) const DAMPING: f64 = 0.85;

/// Store of one graph: its root is the only thing that it keeps outside of the heap.
pub(crate) struct Store<'gc> {
    pub(crate) m: Mutator<'gc>,
    graph: Root<Graph>,
}

fn node_of<'m>(m: &'m Mutator<'_>, graph: Gc<'m, Graph>, id: u64) -> Result<Gc<'m, Node>, GcError> {
    if let Some(node) = graph.by_id.get(m, &id)? {
        return Ok(node);
    }
    let node = m.alloc(Node {
        id,
        properties: TrieMap::new(),
        out: OrderedMap::new(),
        incoming: OrderedMap::new(),
        ranks: [Atom::new(0), Atom::new(0)],
        distance: Atom::new(0),
        later: Ref::null(),
    })?;
    graph.nodes.push(m, node)?;
    graph.by_id.insert(m, &id, node)?;
    Ok(node)
}

/// Counts what two sorted lists have in common.
pub(crate) fn common(one: &[u64], other: &[u64]) -> u64 {
    let (mut at, mut count) = (0, 0);
    for id in one {
        while at < other.len() && other[at] < *id {
            at += 1;
        }
        count += u64::from(other.get(at) == Some(id));
    }
    count
}

impl Node {
    /// Place in an order in which nodes with few edges come first.
    fn order(&self) -> (u64, u64) {
        (self.out.len() + self.incoming.len(), self.id)
    }
}

impl<'gc> Store<'gc> {
    /// Creates a store without nodes.
    pub(crate) fn new(gc: &'gc GcHeap) -> Result<Store<'gc>, GcError> {
        let mut m = gc.enter();
        let graph = m.with_room(|m| {
            let graph = m.alloc(Graph { by_id: TrieMap::new(), nodes: AppendLog::new() })?;
            Ok(m.root(graph))
        })?;
        Ok(Store { m, graph })
    }

    /// Adds an edge. Returns whether it is new.
    pub(crate) fn add(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        self.m.with_room(|m| {
            let graph = m.get(&self.graph)?;
            let (from, to) = (node_of(m, graph, from)?, node_of(m, graph, to)?);
            to.incoming.insert(m, from.id, from)?;
            from.out.insert(m, to.id, to)
        })
    }

    /// Removes an edge. Returns whether it was there.
    pub(crate) fn remove(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        self.m.with_room(|m| {
            let graph = m.get(&self.graph)?;
            let (Some(from), Some(to)) = (graph.by_id.get(m, &from)?, graph.by_id.get(m, &to)?) else {
                return Ok(false);
            };
            to.incoming.remove(m, &from.id)?;
            from.out.remove(m, &to.id)
        })
    }

    pub(crate) fn set_property(&mut self, id: u64, name: &str, value: &str) -> Result<(), GcError> {
        self.m.with_room(|m| {
            let node = node_of(m, m.get(&self.graph)?, id)?;
            node.properties.insert(m, name, m.alloc_str(value)?)?;
            Ok(())
        })
    }

    pub(crate) fn property(&mut self, id: u64, name: &str) -> Result<Option<String>, GcError> {
        self.m.with_room(|m| {
            let node = m.get(&self.graph)?.by_id.get(m, &id)?;
            let value = node.map_or(Ok(None), |node| node.properties.get(m, name))?;
            Ok(value.map(|value| value.to_string()))
        })
    }

    /// Calls `look` for each node, some between two safepoints.
    fn for_each(
        &mut self,
        mut look: impl FnMut(&Mutator<'_>, Gc<'_, Node>) -> Result<(), GcError>,
    ) -> Result<(), GcError> {
        let (mut at, mut done) = (0, 0);
        loop {
            let count = self.m.with_room(|m| {
                let nodes = m.get(&self.graph)?.nodes.range(m, at, STEP)?;
                // What was looked at before room was wanting is not looked at again.
                for node in nodes.iter().skip(done) {
                    look(m, *node)?;
                    done += 1;
                }
                Ok(nodes.len())
            })?;
            if count == 0 {
                return Ok(());
            }
            (at, done) = (at + count as u64, 0);
            self.m.safepoint()?;
        }
    }

    /// Calls `look` for each neighbour of a node, some between two safepoints: all of them may be more
    /// than can be near.
    fn for_each_neighbour(
        &mut self,
        node: &Root<Node>,
        of: impl Fn(&Node) -> &OrderedMap<u64, Ref<Node>>,
        mut look: impl FnMut(&Node),
    ) -> Result<(), GcError> {
        let mut from = Bound::Unbounded;
        loop {
            let last = self.m.with_room(|m| {
                let some = of(&*m.get(node)?).range(m, from, STEP)?;
                some.iter().for_each(|(_, neighbour)| look(neighbour));
                Ok(some.last().map(|(id, _)| *id))
            })?;
            let Some(last) = last else { return Ok(()) };
            from = Bound::Excluded(last);
            self.m.safepoint()?;
        }
    }

    /// Returns a root of the node that came as this one, counted from 0.
    fn root_of(&mut self, at: u64) -> Result<Option<Root<Node>>, GcError> {
        self.m.with_room(|m| Ok(m.get(&self.graph)?.nodes.get(m, at)?.map(|node| m.root(node))))
    }

    /// Returns the number of nodes, of edges, and the greatest degrees out and in.
    pub(crate) fn degrees(&mut self) -> Result<[u64; 4], GcError> {
        let mut counts = [0; 4];
        self.for_each(|_, node| {
            let (out, incoming) = (node.out.len(), node.incoming.len());
            counts = [counts[0] + 1, counts[1] + out, counts[2].max(out), counts[3].max(incoming)];
            Ok(())
        })?;
        Ok(counts)
    }

    /// Returns how many nodes are so many steps away, along edges.
    pub(crate) fn distances(&mut self, from: u64) -> Result<BTreeMap<u32, u64>, GcError> {
        self.for_each(|_, node| {
            node.distance.set(0);
            Ok(())
        })?;
        let queue = self.m.with_room(|m| {
            let queue = m.alloc(AppendLog::<Node>::new())?;
            if let Some(node) = m.get(&self.graph)?.by_id.get(m, &from)? {
                node.distance.set(1);
                queue.push(m, node)?;
            }
            Ok(m.root(queue))
        })?;
        let (mut counts, mut at) = (BTreeMap::new(), 0);
        while at < self.m.get(&queue)?.len() {
            let (node, distance) = self.m.with_room(|m| {
                let node = m.get(&queue)?.get(m, at)?.expect("nobody else trims the queue");
                Ok((m.root(node), node.distance.get()))
            })?;
            *counts.entry(distance - 1).or_default() += 1;
            let mut next = Vec::new();
            self.for_each_neighbour(
                &node,
                |node| &node.out,
                |neighbour| {
                    if neighbour.distance.get() == 0 {
                        neighbour.distance.set(distance + 1);
                        next.push(neighbour.id);
                    }
                },
            )?;
            for id in next {
                self.m.with_room(|m| {
                    let node = m.get(&self.graph)?.by_id.get(m, &id)?;
                    node.map_or(Ok(0), |node| m.get(&queue)?.push(m, node))
                })?;
            }
            at += 1;
            if at.is_multiple_of(64) {
                self.m.with_room(|m| m.get(&queue)?.trim(m, at))?;
            }
            self.m.safepoint()?;
        }
        Ok(counts)
    }

    /// Counts the triangles, whatever the directions of their edges: at the one of the three that comes
    /// first in the order, so nodes with many edges do not look at all of them.
    pub(crate) fn triangles(&mut self) -> Result<u64, GcError> {
        let mut at = 0;
        while let Some(node) = self.root_of(at)? {
            let (mut later, own) = (Vec::new(), self.m.with_room(|m| Ok(m.get(&node)?.order()))?);
            let mut add = |other: &Node| later.extend((other.order() > own).then_some(other.id));
            self.for_each_neighbour(&node, |node| &node.out, &mut add)?;
            self.for_each_neighbour(&node, |node| &node.incoming, &mut add)?;
            later.sort_unstable();
            later.dedup();
            self.m.with_room(|m| {
                m.get(&node)?.later.store(m, Some(m.alloc_copy(&later)?));
                Ok(())
            })?;
            at += 1;
        }
        let (mut count, mut at) = (0, 0);
        while let Some(node) = self.root_of(at)? {
            let ids = self.m.with_room(|m| Ok(m.get(&node)?.later.load(m)?.map(|later| later.to_vec())))?;
            let ids = ids.unwrap_or_default();
            for id in &ids {
                count += self.m.with_room(|m| {
                    let node = m.get(&self.graph)?.by_id.get(m, id)?;
                    let later = node.map_or(Ok(None), |node| node.later.load(m))?;
                    Ok(later.map_or(0, |later| common(&ids, &later)))
                })?;
                self.m.safepoint()?;
            }
            at += 1;
        }
        Ok(count)
    }

    /// Computes the ranks of all nodes in so many rounds. Returns those of the first ones, with their
    /// ids.
    pub(crate) fn page_rank(&mut self, rounds: usize, top: usize) -> Result<Vec<(f64, u64)>, GcError> {
        let nodes = self.m.get(&self.graph)?.nodes.len() as f64;
        self.for_each(|_, node| {
            node.ranks[0].set((1.0 / nodes).to_bits());
            Ok(())
        })?;
        let rank = |node: &Node, round: usize| f64::from_bits(node.ranks[round % 2].get());
        for round in 0..rounds {
            // What nodes without edges have goes to all.
            let mut lost = 0.0;
            self.for_each(|_, node| {
                lost += if node.out.is_empty() { rank(&node, round) } else { 0.0 };
                Ok(())
            })?;
            let base = (1.0 - DAMPING + DAMPING * lost) / nodes;
            let mut at = 0;
            while let Some(node) = self.root_of(at)? {
                let mut sum = 0.0;
                let add = |from: &Node| sum += rank(from, round) / from.out.len() as f64;
                self.for_each_neighbour(&node, |node| &node.incoming, add)?;
                let next = (base + DAMPING * sum).to_bits();
                self.m.with_room(|m| {
                    m.get(&node)?.ranks[(round + 1) % 2].set(next);
                    Ok(())
                })?;
                at += 1;
            }
        }
        let mut ranks = Vec::new();
        self.for_each(|_, node| {
            ranks.push((rank(&node, rounds), node.id));
            if ranks.len() > 2 * top + STEP {
                keep_top(&mut ranks, top);
            }
            Ok(())
        })?;
        keep_top(&mut ranks, top);
        Ok(ranks)
    }
}

pub(crate) fn keep_top(ranks: &mut Vec<(f64, u64)>, top: usize) {
    ranks.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
    ranks.truncate(top);
}
