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

mod store;

use farfield::{BuildError, Heap};
use farfield_gc::GcHeap;
use std::io::BufRead;
use std::time::Instant;
use store::Store;

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
    use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
    use store::{DAMPING, keep_top};

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
