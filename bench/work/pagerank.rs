//! PageRank on a growing graph (Atlas, Figure 4: GraphOne): after each batch of edges some rounds in which every vertex sums up what
//! those who point to it give it.
//!
//! A list has who points to a vertex. What a vertex gives is in an array, which is read at random.

use crate::graph::{
    Arrivals, BATCHES, BYTES_PER_EDGE, Edge, ElementBytes, Far, Lists, Near, STARS, Size, neighbours, vertex,
};
use crate::random::mix;
use crate::{Options, Outcome, course, figures_since};
use anyhow::Result;
use farfield::collections::PinnedVec;
use farfield::{FarError, FarVec, Heap, Scope};

const ROUNDS: u64 = 3;
const DAMPING: f64 = 0.85;
/// Of the plain program: the head of a list and three numbers.
const BYTES_PER_VERTEX: u64 = 24 + 20 + 8;
/// Vertices in one scope, a page of numbers.
const RUN: usize = 512;
/// Edges of a full list; each may bring a page in its scope.
const FULL: usize = 32;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let size = Size::new(options, ElementBytes { vertex: BYTES_PER_VERTEX, edge: BYTES_PER_EDGE }, STARS)?;
    let (vertices, edges) = (size.vertices, size.edges);
    match options.heap(0)? {
        None => grow(size, &mut NearRanks::new(vertices)),
        Some(heap) => course::followed(options, &heap, || {
            let before = heap.stats();
            let mut outcome = grow(size, &mut FarRanks::new(&heap, vertices)?)?;
            figures_since(&mut outcome, &before, &heap.stats(), edges, 0);
            Ok(outcome)
        }),
    }
}

fn grow(size: Size, ranks: &mut impl Ranks) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let edges = size.edges;
    let mut arrivals = Arrivals::of(size);
    let mut sums = Vec::new();
    for batch in 1..=BATCHES {
        let end = edges * batch / BATCHES;
        while let Some(log) = arrivals.next_log(end)? {
            outcome.phase("evolve", log.len() as u64, || ranks.add(log))?;
        }
        let sum = outcome.phase("evolve", end * ROUNDS, || -> Result<f64> {
            ranks.restart()?;
            let mut sum = 0.0;
            for _ in 0..ROUNDS {
                ranks.give()?;
                sum = ranks.take()?;
            }
            Ok(sum)
        })?;
        sums.push(sum);
    }
    // What those give who point to nobody is lost, and nothing else.
    let wrong = sums.iter().filter(|sum| !(1.0 - DAMPING..1.000_001).contains(*sum)).count();
    let checksum = sums.iter().fold(0, |checksum, sum| mix(checksum ^ sum.to_bits()));
    outcome.checked(checksum, wrong as u64);
    Ok(outcome)
}

/// Vertices and what they have.
trait Ranks {
    /// Adds edges from the first to the second, and changes their order.
    fn add(&mut self, edges: &mut [Edge]) -> Result<()>;
    /// Gives all the same rank.
    fn restart(&mut self) -> Result<()>;
    /// Divides each rank among those to whom its vertex points.
    fn give(&mut self) -> Result<()>;
    /// Sums up what each is given; the sum of all ranks.
    fn take(&mut self) -> Result<f64>;
}

/// What one of so many gives in each direction.
fn share(rank: f64, degree: u32) -> f64 {
    if degree == 0 { 0.0 } else { rank / f64::from(degree) }
}

fn rank(given: f64, vertices: usize) -> f64 {
    (1.0 - DAMPING) / vertices as f64 + DAMPING * given
}

struct NearRanks {
    /// Who points to each.
    sources: Near,
    /// To how many each points.
    degrees: Vec<u32>,
    ranks: Vec<f64>,
    shares: Vec<f64>,
}

impl NearRanks {
    fn new(vertices: usize) -> NearRanks {
        NearRanks {
            sources: Near::new(vertices, FULL),
            degrees: vec![0; vertices],
            ranks: vec![0.0; vertices],
            shares: vec![0.0; vertices],
        }
    }

    /// What all who point to a vertex give it.
    fn given(&self, at: usize) -> f64 {
        let (mut given, mut next) = (0.0, Some(at));
        while let Some(at) = next {
            let list = &self.sources.lists[at];
            for from in &list.newest {
                given += self.shares[vertex(from)];
            }
            next = list.before.map(|before| before.get() as usize);
        }
        given
    }
}

impl Ranks for NearRanks {
    fn add(&mut self, edges: &mut [Edge]) -> Result<()> {
        for edge in edges.iter_mut() {
            self.degrees[edge.from as usize] += 1;
            std::mem::swap(&mut edge.from, &mut edge.to);
        }
        Ok(self.sources.add(edges)?)
    }

    fn restart(&mut self) -> Result<()> {
        let vertices = self.ranks.len();
        self.ranks.fill(1.0 / vertices as f64);
        Ok(())
    }

    fn give(&mut self) -> Result<()> {
        let from = self.ranks.iter().zip(&self.degrees);
        self.shares.iter_mut().zip(from).for_each(|(to, (rank, degree))| *to = share(*rank, *degree));
        Ok(())
    }

    fn take(&mut self) -> Result<f64> {
        let mut sum = 0.0;
        for at in 0..self.ranks.len() {
            self.ranks[at] = rank(self.given(at), self.ranks.len());
            sum += self.ranks[at];
        }
        Ok(sum)
    }
}

struct FarRanks<'a> {
    sources: Far<'a>,
    degrees: FarVec<u32>,
    ranks: FarVec<f64>,
    shares: FarVec<f64>,
}

impl<'a> FarRanks<'a> {
    fn new(heap: &'a Heap, vertices: usize) -> Result<FarRanks<'a>> {
        let mut made = FarRanks {
            sources: Far::new(heap, vertices, FULL)?,
            degrees: FarVec::new(),
            ranks: FarVec::new(),
            shares: FarVec::new(),
        };
        for first in (0..vertices).step_by(RUN) {
            let scope = heap.enter();
            let count = RUN.min(vertices - first);
            made.degrees.extend_from_slice(&scope, &[0; RUN][..count])?;
            made.ranks.extend_from_slice(&scope, &[0.0; RUN][..count])?;
            made.shares.extend_from_slice(&scope, &[0.0; RUN][..count])?;
        }
        Ok(made)
    }

    /// What all who point to a vertex give it, of these shares. Renews the scope for each list.
    fn given(&self, shares: &PinnedVec<'_, f64>, scope: &mut Scope<'_>, at: usize) -> Result<f64, FarError> {
        let (mut given, mut next) = (0.0, Some(at));
        while let Some(at) = next {
            let list = self.sources.lists.at(scope, at)?;
            for from in neighbours(list.newest.get(scope)?) {
                given += shares[vertex(from)];
            }
            next = list.before.map(|before| before.get() as usize);
            scope.renew();
        }
        Ok(given)
    }
}

impl Ranks for FarRanks<'_> {
    fn add(&mut self, edges: &mut [Edge]) -> Result<()> {
        for few in edges.chunks_mut(FULL) {
            let scope = self.sources.heap.enter();
            for edge in few {
                *self.degrees.at_mut(&scope, edge.from as usize)? += 1;
                std::mem::swap(&mut edge.from, &mut edge.to);
            }
        }
        Ok(self.sources.add(edges)?)
    }

    fn restart(&mut self) -> Result<()> {
        let vertices = self.ranks.len();
        let mut scope = self.sources.heap.enter();
        let mut scan = self.ranks.scan_mut(&mut scope);
        while let Some(ranks) = scan.next_chunk()? {
            ranks.fill(1.0 / vertices as f64);
        }
        Ok(())
    }

    fn give(&mut self) -> Result<()> {
        let vertices = self.ranks.len();
        for first in (0..vertices).step_by(RUN) {
            let scope = self.sources.heap.enter();
            let run = first..vertices.min(first + RUN);
            // A run lies in one page of each, so it is one slice.
            let ranks = self.ranks.chunks_in(&scope, run.clone()).next().unwrap_or(Ok(&[]))?;
            let degrees = self.degrees.chunks_in(&scope, run.clone()).next().unwrap_or(Ok(&[]))?;
            let shares = self.shares.chunks_mut_in(&scope, run).next().unwrap_or(Ok(&mut []))?;
            let from = ranks.iter().zip(degrees);
            shares.iter_mut().zip(from).for_each(|(to, (rank, degree))| *to = share(*rank, *degree));
        }
        Ok(())
    }

    fn take(&mut self) -> Result<f64> {
        let vertices = self.ranks.len();
        let mut sum = 0.0;
        // All of them are used at random, in each round, and there are few beside the edges.
        let shares = self.shares.pin()?;
        let mut scope = self.sources.heap.enter();
        let mut found = Vec::with_capacity(RUN);
        for first in (0..vertices).step_by(RUN) {
            let run = first..vertices.min(first + RUN);
            found.clear();
            for at in run.clone() {
                let rank = rank(self.given(&shares, &mut scope, at)?, vertices);
                found.push(rank);
                sum += rank;
            }
            self.ranks.chunks_mut_in(&scope, run).next().unwrap_or(Ok(&mut []))?.copy_from_slice(&found);
            scope.renew();
        }
        Ok(sum)
    }
}
