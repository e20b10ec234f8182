//! A store of a property graph that is mostly far.
//!
//! Nodes refer to each other in both directions and have properties; edges come and go. What is asked of
//! such stores is asked here: degrees, the distances from a node, triangles, and PageRank. Whatever is
//! replaced is collected.
//!
//! ```sh
//! zstdcat EDGES.txt.zst | cargo run --release -p farfield-gc --example graph_store -- [NEAR_MIB] [LIMIT_MIB] [POOL]
//! ```
//!
//! Each line of the input names two nodes by their numbers: an edge from the first one to the second. After a `-` and a space,
//! that edge is removed.

use farfield::{BuildError, Heap};
use farfield_gc::collections::{AppendLog, OrderedMap, TrieMap};
use farfield_gc::{Atom, FarObject, Gc, GcError, GcHeap, Mutator, Ref, Root};
use std::collections::BTreeMap;
use std::io::BufRead;
use std::ops::Bound;
use std::time::Instant;

#[derive(FarObject)]
struct Node {
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
struct Graph {
    by_id: TrieMap<u64, Ref<Node>>,
    nodes: AppendLog<Node>,
}

/// Nodes that are looked at between two safepoints.
const STEP: usize = 16;
/// Share of a rank that follows edges.
const DAMPING: f64 = 0.85;

/// Store of one graph: its root is the only thing that it keeps outside of the heap.
struct Store<'gc> {
    m: Mutator<'gc>,
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
fn common(one: &[u64], other: &[u64]) -> u64 {
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
    fn new(gc: &'gc GcHeap) -> Result<Store<'gc>, GcError> {
        let mut m = gc.enter();
        let graph = m.with_room(|m| {
            let graph = m.alloc(Graph { by_id: TrieMap::new(), nodes: AppendLog::new() })?;
            Ok(m.root(graph))
        })?;
        Ok(Store { m, graph })
    }

    /// Adds an edge. Returns whether it is new.
    fn add(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        self.m.with_room(|m| {
            let graph = m.get(&self.graph)?;
            let (from, to) = (node_of(m, graph, from)?, node_of(m, graph, to)?);
            to.incoming.insert(m, from.id, from)?;
            from.out.insert(m, to.id, to)
        })
    }

    /// Removes an edge. Returns whether it was there.
    fn remove(&mut self, from: u64, to: u64) -> Result<bool, GcError> {
        self.m.with_room(|m| {
            let graph = m.get(&self.graph)?;
            let (Some(from), Some(to)) = (graph.by_id.get(m, &from)?, graph.by_id.get(m, &to)?) else {
                return Ok(false);
            };
            to.incoming.remove(m, &from.id)?;
            from.out.remove(m, &to.id)
        })
    }

    fn set_property(&mut self, id: u64, name: &str, value: &str) -> Result<(), GcError> {
        self.m.with_room(|m| {
            let node = node_of(m, m.get(&self.graph)?, id)?;
            node.properties.insert(m, name, m.alloc_str(value)?)?;
            Ok(())
        })
    }

    fn property(&mut self, id: u64, name: &str) -> Result<Option<String>, GcError> {
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
    fn degrees(&mut self) -> Result<[u64; 4], GcError> {
        let mut counts = [0; 4];
        self.for_each(|_, node| {
            let (out, incoming) = (node.out.len(), node.incoming.len());
            counts = [counts[0] + 1, counts[1] + out, counts[2].max(out), counts[3].max(incoming)];
            Ok(())
        })?;
        Ok(counts)
    }

    /// Returns how many nodes are so many steps away, along edges.
    fn distances(&mut self, from: u64) -> Result<BTreeMap<u32, u64>, GcError> {
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
    fn triangles(&mut self) -> Result<u64, GcError> {
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
    fn page_rank(&mut self, rounds: usize, top: usize) -> Result<Vec<(f64, u64)>, GcError> {
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

fn keep_top(ranks: &mut Vec<(f64, u64)>, top: usize) {
    ranks.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
    ranks.truncate(top);
}

fn heap(near: u64, pool: Option<&str>) -> Result<Heap, BuildError> {
    let builder = Heap::builder().name("graph_store").near(near).near_max(near);
    pool.into_iter().fold(builder, |builder, pool| builder.pool(pool)).build()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let near = arguments.next().map_or(Ok(32), |text| text.parse::<u64>())?;
    let limit = arguments.next().map_or(Ok(512), |text| text.parse::<u64>())?;
    let pool = arguments.next();
    let heap = heap(near << 20, pool.as_deref())?;
    let gc = GcHeap::in_heap(&heap).limit(limit << 20).build()?;
    let mut store = Store::new(&gc)?;
    let began = Instant::now();
    for (number, line) in std::io::stdin().lock().lines().enumerate() {
        let line = line?;
        let (removes, names) = line.strip_prefix("- ").map_or((false, &line[..]), |names| (true, names));
        let mut ids = names.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(from)), Some(Ok(to))) = (ids.next(), ids.next()) else {
            if line.trim().is_empty() || line.starts_with(['#', '%']) {
                continue;
            }
            return Err(format!("line {}: two numbers of nodes are wanted, and not {line:?}", number + 1).into());
        };
        if removes {
            store.remove(from, to)?
        } else {
            store.add(from, to)?
        };
        store.m.safepoint()?;
    }
    let report = |what: &str, answer: &dyn std::fmt::Debug| {
        let (heap, gc) = (heap.stats(), gc.stats());
        println!("{what}: {answer:?}");
        println!(
            "  after {:.1} s: {} MiB near, {} of {} MiB far, {} misses, {} collections",
            began.elapsed().as_secs_f64(),
            heap.near_bytes >> 20,
            gc.used_bytes >> 20,
            gc.limit_bytes >> 20,
            heap.misses,
            gc.collections
        );
    };
    report("nodes, edges, greatest degrees out and in", &store.degrees()?);
    let ranks = store.page_rank(10, 5)?;
    report("PageRank of the first five", &ranks);
    let first = ranks.first().map_or(0, |(_, id)| *id);
    report("nodes by their distance from the first", &store.distances(first)?);
    store.set_property(first, "rank", "first")?;
    report("its property", &store.property(first, "rank")?);
    report("triangles", &store.triangles()?);
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Danger: an answer that differs from that of a graph in plain memory, after edges have come and gone.
    use super::*;
    use std::collections::{BTreeSet, HashMap, VecDeque};

    /// The same graph in plain memory.
    #[derive(Default)]
    struct Twin {
        /// In the order in which they came.
        nodes: Vec<u64>,
        edges: BTreeSet<(u64, u64)>,
    }

    impl Twin {
        fn add(&mut self, from: u64, to: u64) -> bool {
            for id in [from, to] {
                if !self.nodes.contains(&id) {
                    self.nodes.push(id);
                }
            }
            self.edges.insert((from, to))
        }

        fn out(&self, id: u64) -> impl Iterator<Item = u64> {
            self.edges.range((id, 0)..=(id, u64::MAX)).map(|edge| edge.1)
        }

        fn incoming(&self) -> HashMap<u64, Vec<u64>> {
            let mut all: HashMap<_, Vec<_>> = HashMap::new();
            self.edges.iter().for_each(|(from, to)| all.entry(*to).or_default().push(*from));
            all
        }

        fn degrees(&self) -> [u64; 4] {
            let most = |lens: &mut dyn Iterator<Item = usize>| lens.max().unwrap_or(0) as u64;
            let out = most(&mut self.nodes.iter().map(|id| self.out(*id).count()));
            let incoming = most(&mut self.incoming().values().map(Vec::len));
            [self.nodes.len() as u64, self.edges.len() as u64, out, incoming]
        }

        fn distances(&self, from: u64) -> BTreeMap<u32, u64> {
            let (mut known, mut queue) = (HashMap::from([(from, 0)]), VecDeque::from([from]));
            while let Some(id) = queue.pop_front() {
                for next in self.out(id) {
                    if !known.contains_key(&next) {
                        known.insert(next, known[&id] + 1);
                        queue.push_back(next);
                    }
                }
            }
            let mut counts = BTreeMap::new();
            known.into_values().for_each(|distance| *counts.entry(distance).or_default() += 1);
            counts
        }

        fn triangles(&self) -> u64 {
            let mut above: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
            for (from, to) in self.edges.iter().filter(|(from, to)| from != to) {
                above.entry(*from.min(to)).or_default().insert(*from.max(to));
            }
            let of = |id| above.get(id).into_iter().flatten();
            above
                .keys()
                .flat_map(|one| of(one).map(move |two| (one, two)))
                .map(|(one, two)| of(two).filter(|three| above[one].contains(three)).count() as u64)
                .sum()
        }

        fn page_rank(&self, rounds: usize, top: usize) -> Vec<(f64, u64)> {
            let (nodes, incoming) = (self.nodes.len() as f64, self.incoming());
            let degree: HashMap<_, _> = self.nodes.iter().map(|id| (*id, self.out(*id).count() as f64)).collect();
            let mut ranks: HashMap<_, _> = self.nodes.iter().map(|id| (*id, 1.0 / nodes)).collect();
            for _ in 0..rounds {
                let mut lost = 0.0;
                self.nodes.iter().for_each(|id| lost += if degree[id] == 0.0 { ranks[id] } else { 0.0 });
                let base = (1.0 - DAMPING + DAMPING * lost) / nodes;
                let sum =
                    |id| incoming.get(id).into_iter().flatten().fold(0.0, |sum, from| sum + ranks[from] / degree[from]);
                ranks = self.nodes.iter().map(|id| (*id, base + DAMPING * sum(id))).collect();
            }
            let mut ranks = ranks.into_iter().map(|(id, rank)| (rank, id)).collect();
            keep_top(&mut ranks, top);
            ranks
        }
    }

    #[test]
    fn answers_are_those_of_a_graph_in_plain_memory() {
        let heap = heap(1 << 20, None).unwrap();
        let gc = GcHeap::in_heap(&heap).limit(3 << 20).build().unwrap();
        let (mut store, mut twin) = (Store::new(&gc).unwrap(), Twin::default());
        let mut random = fastrand::Rng::with_seed(11);
        for step in 0..16_000 {
            // Some have many edges, as in most graphs.
            let mut id = || (random.u64(..1200) * random.u64(..1200)) / 1200 * 3;
            let (from, to) = (id(), id());
            if step % 3 == 2 {
                assert_eq!(store.remove(from, to).unwrap(), twin.edges.remove(&(from, to)));
            } else {
                assert_eq!(store.add(from, to).unwrap(), twin.add(from, to));
            }
            if step % 50 == 0 {
                store.set_property(from, "step", &step.to_string()).unwrap();
                assert_eq!(store.property(from, "step").unwrap(), Some(step.to_string()));
            }
            store.m.safepoint().unwrap();
        }
        assert_eq!(store.degrees().unwrap(), twin.degrees());
        let ranks = store.page_rank(8, 20).unwrap();
        assert_eq!(ranks, twin.page_rank(8, 20), "the same sums in the same order");
        for id in [ranks[0].1, ranks[9].1, twin.nodes[twin.nodes.len() - 1]] {
            assert_eq!(store.distances(id).unwrap(), twin.distances(id));
        }
        assert_eq!(store.triangles().unwrap(), twin.triangles());
        drop(store);
        gc.collect().unwrap();
        let (stats, far) = (gc.stats(), heap.stats());
        println!("{stats:?}, {} misses", far.misses);
        assert!(stats.collections > 1 && stats.live_objects == 0 && far.misses > 5000, "{stats:?} {far:?}");
        gc.verify().unwrap();
        drop(gc);
        heap.verify();
    }
}
