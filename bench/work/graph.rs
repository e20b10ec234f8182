//! A graph that grows: edges arrive in three batches, and a question is asked after each (Atlas, Table 1). Adjacency lists, as GraphOne
//! keeps them: each grows alone, and what was one batch lies anywhere.
//!
//! An edge has a weight, a time and more besides, 32 bytes in all. Edges are made up by the law of R-MAT (Chakrabarti and others, 2004): a few
//! vertices have most of them. With `real = 1` they are those of a real graph ([`real`]), and arrive in no order.

use crate::random::{Random, mix};
use crate::{Options, real};
use anyhow::{Context, Result, ensure};
use farfield::{FarBytes, FarError, FarVec, Heap};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::mem::take;
use std::num::NonZeroU32;
use std::path::Path;

pub(crate) const BATCHES: u64 = 3;
/// Data for each vertex: so there are 12 to 26 edges for each.
const DATA_PER_VERTEX: u64 = 640;
/// Edges that are sorted before they go to their lists, as in GraphOne.
const LOG_EDGES: usize = 1 << 16;
/// Vertices in one scope.
const RUN: usize = 64;

/// A vertex in a list, with what is known of its edge.
pub(crate) type Neighbour = [u8; 32];
/// Of the plain program, with the room that a growing list has.
pub(crate) const BYTES_PER_EDGE: u64 = size_of::<Neighbour>() as u64 * 3 / 2;

pub(crate) fn vertex(neighbour: &Neighbour) -> usize {
    neighbour.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize
}

/// The time of its edge.
pub(crate) fn stamp(neighbour: &Neighbour) -> u64 {
    neighbour[8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// What a vertex and an edge take in a plain program.
#[derive(Clone, Copy)]
pub(crate) struct ElementBytes {
    /// Of a vertex, besides its edges.
    pub(crate) vertex: u64,
    pub(crate) edge: u64,
}

/// How large a graph is, and whence its edges.
pub(crate) struct Size {
    pub(crate) vertices: usize,
    pub(crate) edges: u64,
    source: Source,
}

/// Whence edges are.
enum Source {
    /// Made up by their number, between `2^scale` vertices.
    Law { scale: u32, skew: Skew, seed: u64 },
    /// A real graph; the next one is the last.
    Links(Vec<[u32; 2]>),
    /// A file of [`write_links`]; the next one is the first.
    File(BufReader<File>),
}

impl Size {
    /// A graph that takes as much in the plain program as there is data.
    pub(crate) fn new(options: &Options, bytes: ElementBytes, skew: Skew) -> Result<Size> {
        if options.real == 1 {
            let (links, vertices) = real::graph(options.graph)?;
            return Size::of_links(links, vertices, options, bytes);
        }
        let scale = (options.data_bytes() / DATA_PER_VERTEX).ilog2();
        ensure!(scale < 32, "--data-mib is too large for vertices of four bytes");
        let edges = (options.data_bytes() - (bytes.vertex << scale)) / bytes.edge;
        Ok(Size { vertices: 1 << scale, edges, source: Source::Law { scale, skew, seed: options.seed } })
    }

    /// The graph that [`write_links`] has left.
    pub(crate) fn of_file(path: &Path) -> Result<Size> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut file = BufReader::new(file);
        let [vertices, edges] = [read_number(&mut file)?, read_number(&mut file)?];
        Ok(Size { vertices: vertices as usize, edges: edges.into(), source: Source::File(file) })
    }

    /// As many of these edges, in any order. They wait in the program's own memory.
    fn of_links(mut links: Vec<[u32; 2]>, vertices: usize, options: &Options, bytes: ElementBytes) -> Result<Size> {
        let least = bytes.vertex * vertices as u64;
        let edges = options.data_bytes().saturating_sub(least) / bytes.edge;
        let most = least + links.len() as u64 * bytes.edge;
        ensure!(
            (1..=links.len() as u64).contains(&edges),
            "with this graph --data-mib must be {} to {}",
            (least >> 20) + 1,
            most >> 20
        );
        let mut random = Random::new(options.seed);
        (1..links.len()).rev().for_each(|last| links.swap(last, random.below(last as u64 + 1) as usize));
        links.truncate(edges as usize);
        Ok(Size { vertices, edges, source: Source::Links(links) })
    }
}

fn read_number(file: &mut impl Read) -> Result<u32> {
    let mut bytes = [0; 4];
    file.read_exact(&mut bytes).context("the file of links ends too early")?;
    Ok(u32::from_be_bytes(bytes))
}

/// Writes a graph for programs that wait for its edges without having them in memory: the number of vertices, that of edges, and
/// the ends of each, in the order in which they arrive. All numbers have four bytes, the highest first.
pub(crate) fn write_links(size: Size, path: &Path) -> Result<()> {
    let edges = size.edges;
    let mut file = BufWriter::new(File::create(path).with_context(|| format!("cannot write {}", path.display()))?);
    for number in [u32::try_from(size.vertices)?, u32::try_from(edges)?] {
        file.write_all(&number.to_be_bytes())?;
    }
    let mut arrivals = Arrivals::of(size);
    while let Some(log) = arrivals.next_log(edges)? {
        for end in log.iter().flat_map(|edge| [edge.from, edge.to]) {
            file.write_all(&end.to_be_bytes())?;
        }
    }
    Ok(file.flush()?)
}

/// An edge that arrives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Edge {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) time: u64,
}

impl Edge {
    #[cfg(test)]
    pub(crate) fn between(from: u32, to: u32) -> Edge {
        Edge { from, to, time: 0 }
    }

    pub(crate) fn neighbour(&self) -> Neighbour {
        let mut neighbour = Neighbour::default();
        neighbour[..4].copy_from_slice(&self.to.to_le_bytes());
        neighbour[4..8].copy_from_slice(&(mix(self.time) as u32).to_le_bytes());
        neighbour[8..16].copy_from_slice(&self.time.to_le_bytes());
        neighbour
    }
}

/// The neighbours in the bytes of a list.
pub(crate) fn neighbours(list: &[u8]) -> &[Neighbour] {
    list.as_chunks().0
}

/// Lists are never full.
pub(crate) const ONE_PIECE: usize = u32::MAX as usize;

/// What vertices are neighbours of each.
pub(crate) trait Lists {
    /// Adds at most as many as a full list has.
    fn append(&mut self, at: usize, more: &[Neighbour]) -> Result<(), FarError>;
    /// Puts each list in order and leaves every neighbour in it once; a full one and the next are two.
    fn sort(&mut self) -> Result<(), FarError>;
    fn full(&self) -> usize;

    /// Adds edges to the lists of those from whom they are, and sorts them for that.
    fn add(&mut self, edges: &mut [Edge]) -> Result<(), FarError> {
        edges.sort_unstable();
        let mut more: Vec<Neighbour> = Vec::new();
        for of_one in edges.chunk_by(|one, next| one.from == next.from) {
            more.clear();
            more.extend(of_one.iter().map(Edge::neighbour));
            more.chunks(self.full()).try_for_each(|more| self.append(of_one[0].from as usize, more))?;
        }
        Ok(())
    }
}

/// Neighbours of a vertex: the newest, and where those before them are.
pub(crate) struct List<L> {
    pub(crate) newest: L,
    pub(crate) before: Option<NonZeroU32>,
}

/// Lists in std's types.
pub(crate) struct Near {
    /// One for each vertex, then those that are full.
    pub(crate) lists: Vec<List<Vec<Neighbour>>>,
    full: usize,
}

impl Near {
    /// Lists are full with so many edges; then others are begun.
    pub(crate) fn new(vertices: usize, full: usize) -> Near {
        let lists = (0..vertices).map(|_| List { newest: Vec::new(), before: None }).collect();
        Near { lists, full }
    }
}

impl Lists for Near {
    fn append(&mut self, at: usize, more: &[Neighbour]) -> Result<(), FarError> {
        let next = NonZeroU32::new(self.lists.len() as u32);
        let list = &mut self.lists[at];
        if list.newest.len() + more.len() > self.full && !list.newest.is_empty() {
            let full = List { newest: take(&mut list.newest), before: list.before };
            list.before = next;
            self.lists.push(full);
        }
        self.lists[at].newest.extend_from_slice(more);
        Ok(())
    }

    fn sort(&mut self) -> Result<(), FarError> {
        for list in &mut self.lists {
            let kept = in_order(&mut list.newest);
            list.newest.truncate(kept);
        }
        Ok(())
    }

    fn full(&self) -> usize {
        self.full
    }
}

/// Lists in a far heap.
pub(crate) struct Far<'a> {
    pub(crate) heap: &'a Heap,
    /// As in [`Near`].
    pub(crate) lists: FarVec<List<FarBytes>>,
    full: usize,
}

impl<'a> Far<'a> {
    pub(crate) fn new(heap: &'a Heap, vertices: usize, full: usize) -> Result<Far<'a>, FarError> {
        let mut lists = FarVec::new();
        for first in (0..vertices).step_by(RUN) {
            let run = first..vertices.min(first + RUN);
            lists.extend(&heap.enter(), run.map(|_| List { newest: FarBytes::new(), before: None }))?;
        }
        Ok(Far { heap, lists, full })
    }
}

impl Lists for Far<'_> {
    fn append(&mut self, at: usize, more: &[Neighbour]) -> Result<(), FarError> {
        let scope = self.heap.enter();
        let next = NonZeroU32::new(self.lists.len() as u32);
        let list = self.lists.at_mut(&scope, at)?;
        let bytes = (list.newest.len(), size_of_val(more));
        if bytes.0 + bytes.1 > self.full * size_of::<Neighbour>() && bytes.0 > 0 {
            let full = List { newest: take(&mut list.newest), before: list.before };
            list.before = next;
            self.lists.push(&scope, full)?;
        }
        self.lists.at_mut(&scope, at)?.newest.extend_from_slice(&scope, more.as_flattened())
    }

    fn sort(&mut self) -> Result<(), FarError> {
        let mut scope = self.heap.enter();
        for at in 0..self.lists.len() {
            scope.renew();
            if self.lists.at(&scope, at)?.newest.is_empty() {
                continue;
            }
            let list = &mut self.lists.at_mut(&scope, at)?.newest;
            let kept = in_order(list.get_mut(&scope)?.as_chunks_mut().0);
            list.truncate(kept * size_of::<Neighbour>());
        }
        Ok(())
    }

    fn full(&self) -> usize {
        self.full
    }
}

/// Sorts; moves those that are there more than once behind the others, and says how many others there are.
fn in_order(list: &mut [Neighbour]) -> usize {
    list.sort_unstable_by_key(vertex);
    let mut kept = 0;
    for at in 0..list.len() {
        if kept == 0 || vertex(&list[at]) != vertex(&list[kept - 1]) {
            list[kept] = list[at];
            kept += 1;
        }
    }
    kept
}

/// How many of a hundred edges are in the first three quarters of the matrix, at each level.
pub(crate) type Skew = [u64; 3];
/// A social network with a few vertices that everybody knows: Graph500's.
pub(crate) const STARS: Skew = [57, 19, 19];
/// One of friends: GTgraph's.
pub(crate) const FRIENDS: Skew = [45, 15, 15];

/// Edges that arrive, a log of them at a time.
pub(crate) struct Arrivals {
    source: Source,
    made: u64,
    log: Vec<Edge>,
}

impl Arrivals {
    /// All of a graph.
    pub(crate) fn of(size: Size) -> Arrivals {
        Arrivals { source: size.source, made: 0, log: Vec::with_capacity(LOG_EDGES) }
    }

    /// The next edges up to number `end`, if there are any.
    pub(crate) fn next_log(&mut self, end: u64) -> Result<Option<&mut [Edge]>> {
        let count = (end - self.made).min(LOG_EDGES as u64);
        self.log.clear();
        let times = self.made..self.made + count;
        match &mut self.source {
            Source::Law { scale, skew, seed } => {
                self.log.extend(times.map(|time| edge(time, *scale, *skew, *seed)));
            }
            Source::Links(links) => {
                let next = links.drain(links.len() - count as usize..);
                self.log.extend(times.zip(next).map(|(time, [from, to])| Edge { from, to, time }));
            }
            Source::File(file) => {
                for time in times {
                    self.log.push(Edge { from: read_number(file)?, to: read_number(file)?, time });
                }
            }
        }
        self.made += count;
        Ok(Some(&mut self.log[..]).filter(|log| !log.is_empty()))
    }
}

/// An edge: at each level it is in one of the quarters of what is left of the matrix.
fn edge(time: u64, scale: u32, [first, second, third]: Skew, seed: u64) -> Edge {
    let (mut from, mut to, mut random) = (0, 0, 0);
    for level in 0..scale {
        if level % 4 == 0 {
            random = mix(mix(time ^ seed).wrapping_add(u64::from(level)));
        }
        let part = ((random & 0xFFFF) * 100) >> 16;
        let row = u32::from(part >= first + second);
        let column = u32::from((first..first + second).contains(&part) || part >= first + second + third);
        (from, to, random) = (from << 1 | row, to << 1 | column, random >> 16);
    }
    Edge { from, to, time }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERTICES: usize = 1 << 12;
    const EDGES: u64 = 200_000;

    fn arrivals() -> Arrivals {
        let source = Source::Law { scale: 12, skew: STARS, seed: 5 };
        Arrivals::of(Size { vertices: VERTICES, edges: EDGES, source })
    }

    #[test]
    fn links_arrive_once_in_no_order_and_as_many_as_fit() {
        let links: Vec<[u32; 2]> = (0..40_000).map(|number| [number % 1000, number]).collect();
        let size = |mib: &str| {
            let options = <Options as clap::Parser>::parse_from(["work", "pagerank", "--data-mib", mib]);
            Size::of_links(links.clone(), 40_000, &options, ElementBytes { vertex: 20, edge: BYTES_PER_EDGE })
        };
        let all = size("2").unwrap();
        assert_eq!(all.edges, ((2 << 20) - 800_000) / 48);
        let edges = all.edges;
        let mut arrivals = Arrivals::of(all);
        let mut seen: Vec<u32> = Vec::new();
        while let Some(log) = arrivals.next_log(edges).unwrap() {
            assert!(log.iter().all(|edge| edge.from == edge.to % 1000));
            seen.extend(log.iter().map(|edge| edge.to));
        }
        assert!(!seen.is_sorted());
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len() as u64, edges);
        let complaint = size("9").err().unwrap().to_string();
        assert!(complaint.contains("1 to 2"), "{complaint}");
    }

    fn expected() -> Vec<Vec<usize>> {
        let mut expected = vec![Vec::new(); VERTICES];
        for number in 0..EDGES {
            let edge = edge(number, 12, STARS, 5);
            expected[edge.from as usize].push(edge.to as usize);
        }
        expected
    }

    fn fill(lists: &mut impl Lists) {
        let mut arrivals = arrivals();
        for end in [70_000, 70_000, EDGES] {
            while let Some(log) = arrivals.next_log(end).unwrap() {
                lists.add(log).unwrap();
            }
            lists.sort().unwrap();
        }
    }

    #[test]
    fn every_edge_is_in_its_list_once() {
        let mut expected = expected();
        expected.iter_mut().for_each(|list| {
            list.sort_unstable();
            list.dedup();
        });
        let mut near = Near::new(VERTICES, ONE_PIECE);
        fill(&mut near);
        let heap = Heap::builder().near(32 << 20).far(64 << 20).build().unwrap();
        let mut far = Far::new(&heap, VERTICES, ONE_PIECE).unwrap();
        fill(&mut far);
        for (at, expected) in expected.iter().enumerate() {
            let scope = heap.enter();
            let list = far.lists.at(&scope, at).unwrap().newest.get(&scope).unwrap();
            let plain = |list: &[Neighbour]| list.iter().map(vertex).collect::<Vec<_>>();
            assert_eq!(plain(&near.lists[at].newest), *expected);
            assert_eq!(plain(neighbours(list)), *expected);
        }
    }

    #[test]
    fn full_lists_lead_to_those_before_them() {
        let expected = expected();
        let mut near = Near::new(VERTICES, 10);
        let mut arrivals = arrivals();
        while let Some(log) = arrivals.next_log(EDGES).unwrap() {
            near.add(log).unwrap();
        }
        for (at, expected) in expected.iter().enumerate() {
            let mut found = Vec::new();
            let mut next = Some(&near.lists[at]);
            while let Some(list) = next {
                assert!(list.newest.len() <= 10);
                found.extend(list.newest.iter().map(vertex));
                next = list.before.map(|before| &near.lists[before.get() as usize]);
            }
            let mut expected = expected.clone();
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_few_vertices_have_most_edges() {
        let mut degrees: Vec<_> = expected().iter().map(Vec::len).collect();
        degrees.sort_unstable_by(|one, other| other.cmp(one));
        assert!(degrees[..VERTICES / 16].iter().sum::<usize>() > 100_000, "a sixteenth has less than half");
        assert!(degrees[0] < 20_000, "one has a tenth");
    }
}
