//! Triangles of a growing graph (Atlas, Figure 4: Aspen): after each batch of edges, how many three vertices are all neighbours.
//!
//! A list has those neighbours of a vertex that have smaller numbers, in order. Vertices with many neighbours have small numbers, so that no
//! list is very long; a triangle is found from its largest number, and one of eight is looked for.

use crate::graph::{
    Arrivals, BATCHES, BYTES_PER_EDGE, ElementBytes, FRIENDS, Far, Lists, Near, Neighbour, ONE_PIECE, Size, neighbours,
    vertex,
};
use crate::random::mix;
use crate::{Options, Outcome, course, figures_since};
use anyhow::Result;
use farfield::FarError;
use std::cmp::Ordering;

/// Of the plain program: the head of a list.
const BYTES_PER_VERTEX: u64 = 24 + 8;
/// One of so many vertices is asked for its triangles.
const SAMPLE: usize = 8;
/// Neighbours whose lists are looked at in one scope.
const RUN: usize = 16;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let size = Size::new(options, ElementBytes { vertex: BYTES_PER_VERTEX, edge: BYTES_PER_EDGE }, FRIENDS)?;
    let (vertices, edges) = (size.vertices, size.edges);
    match options.heap(0)? {
        None => grow(size, &mut Near::new(vertices, ONE_PIECE), |lists| near(lists, SAMPLE)),
        Some(heap) => course::followed(options, &heap, || {
            let before = heap.stats();
            let mut outcome = grow(size, &mut Far::new(&heap, vertices, ONE_PIECE)?, |lists| far(lists, SAMPLE))?;
            figures_since(&mut outcome, &before, &heap.stats(), edges, 0);
            Ok(outcome)
        }),
    }
}

fn grow<L: Lists>(size: Size, lists: &mut L, triangles: impl Fn(&L) -> Result<u64, FarError>) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let edges = size.edges;
    let mut arrivals = Arrivals::of(size);
    let mut counts = Vec::new();
    for batch in 1..=BATCHES {
        let end = edges * batch / BATCHES;
        while let Some(log) = arrivals.next_log(end)? {
            log.iter_mut().for_each(|edge| (edge.from, edge.to) = (edge.from.max(edge.to), edge.from.min(edge.to)));
            // Who is a neighbour of itself is in no triangle.
            log.sort_unstable_by_key(|edge| edge.from == edge.to);
            let others = log.partition_point(|edge| edge.from != edge.to);
            outcome.phase("evolve", log.len() as u64, || lists.add(&mut log[..others]))?;
        }
        let count = outcome.phase("evolve", end, || {
            lists.sort()?;
            triangles(lists)
        })?;
        counts.push(count);
    }
    let errors = u64::from(!counts.is_sorted());
    outcome.checked(counts.iter().fold(0, |checksum, count| mix(checksum ^ count)), errors);
    outcome.figure("triangles", counts[counts.len() - 1] as f64);
    Ok(outcome)
}

/// How many are in both.
fn common(mut one: &[Neighbour], mut other: &[Neighbour]) -> u64 {
    let mut count = 0;
    while let (Some(first), Some(second)) = (one.first(), other.first()) {
        match vertex(first).cmp(&vertex(second)) {
            Ordering::Less => one = &one[1..],
            Ordering::Greater => other = &other[1..],
            Ordering::Equal => (one, other, count) = (&one[1..], &other[1..], count + 1),
        }
    }
    count
}

fn near(lists: &Near, step: usize) -> Result<u64, FarError> {
    let of_one =
        |list: &Vec<Neighbour>| list.iter().map(|to| common(list, &lists.lists[vertex(to)].newest)).sum::<u64>();
    Ok(lists.lists.iter().step_by(step).map(|list| of_one(&list.newest)).sum())
}

fn far(lists: &Far<'_>, step: usize) -> Result<u64, FarError> {
    let mut count = 0;
    let mut scope = lists.heap.enter();
    for at in (0..lists.lists.len()).step_by(step) {
        let mut first = 0;
        loop {
            scope.renew();
            let list = neighbours(lists.lists.at(&scope, at)?.newest.get(&scope)?);
            for to in list.iter().skip(first).take(RUN) {
                let other = lists.lists.at(&scope, vertex(to))?.newest.get(&scope)?;
                count += common(list, neighbours(other));
            }
            first += RUN;
            if first >= list.len() {
                break;
            }
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Edge;
    use farfield::Heap;

    #[test]
    fn known_graphs_have_known_triangles() {
        let check = |edges: &[(u32, u32)], expected: u64| {
            let edges = edges.iter().map(|(one, other)| Edge::between(*one.max(other), *one.min(other)));
            let mut edges: Vec<_> = edges.collect();
            let mut lists = Near::new(8, ONE_PIECE);
            lists.add(&mut edges).unwrap();
            lists.sort().unwrap();
            assert_eq!(near(&lists, 1).unwrap(), expected);
            let heap = Heap::builder().near(2 << 20).build().unwrap();
            let mut lists = Far::new(&heap, 8, ONE_PIECE).unwrap();
            lists.add(&mut edges).unwrap();
            lists.sort().unwrap();
            assert_eq!(far(&lists, 1).unwrap(), expected);
        };
        check(&[(0, 1), (1, 2), (2, 3), (3, 0)], 0);
        check(&[(0, 1), (1, 2), (2, 0), (0, 2), (2, 5)], 1);
        let complete: Vec<_> = (0..8).flat_map(|a| (0..a).map(move |b| (a, b))).collect();
        check(&complete, 56);
    }
}
