//! Tables in chunks of rows. A task for each chunk works beside it. What it gives to others, to be grouped or sorted, it leaves in
//! as many parts as there are tasks that take them.
//!
//! A task at each node starts those of its chunks or parts and gathers what they return, so what is done one after the other
//! does not grow with the number of chunks.

use super::dsm::{DBox, DVec, Far, Here, JoinError, Lent, NodeId, Owner, ShareError, scope};
use super::{all, in_threads, part, store};
use std::ops::Range;
use std::sync::Mutex;

/// Parts in which a chunk leaves rows for others.
pub(super) const PARTS: usize = 256;

/// Returns what a function gives for each number, worked out by so many threads.
pub(super) fn map_in_threads<R: Send>(threads: u64, count: usize, work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let results: Vec<Mutex<Option<R>>> = (0..count).map(|_| Mutex::new(None)).collect();
    in_threads(threads, results.iter().enumerate(), |(number, result)| {
        *result.lock().expect("no kernel panics") = Some(work(number));
    });
    let result = |result: Mutex<Option<R>>| result.into_inner().expect("no kernel panics").expect("each has a result");
    results.into_iter().map(result).collect()
}

/// Values that are at the nodes by whose numbers they are found.
pub(super) type AtNodes<T> = DVec<DVec<T>>;
/// For each part, and for each chunk of a node, what the chunk leaves.
pub(super) type Parts<T> = DVec<DVec<T>>;

/// Returns the chunks or parts, of so many, that a node has.
pub(super) fn own(here: &Here<'_>, node: NodeId, count: usize) -> Range<usize> {
    let [begin, end] = [0, 1].map(|next| ((usize::from(node.0) + next) * count).div_ceil(here.nodes().count()));
    begin..end
}

/// Runs a task for each chunk or part, of so many, at the nodes in order. Returns what is gathered at each node of what its
/// tasks return.
pub(super) fn each<T, X, R, G>(
    here: &Here<'_>,
    object: &DBox<T>,
    count: usize,
    extra: X,
    body: impl for<'t, 'h> FnOnce(&Here<'h>, (Lent<'t, T>, usize, X)) -> Result<R, ShareError> + Copy,
    gather: impl for<'h> FnOnce(&Here<'h>, Vec<R>) -> Result<G, ShareError> + Copy,
) -> Result<Vec<G>, JoinError>
where
    T: Far,
    X: Far + Copy,
    R: Far,
    G: Far,
{
    scope(here, |s| {
        let start = |node| {
            s.spawn_to(node, (s.lend(object), count, extra), move |here, (object, count, extra)| {
                let results = scope(here, |s| {
                    let tasks = own(here, here.id(), count);
                    let tasks = tasks.map(|number| s.spawn_to(here.id(), (s.lend(&object), number, extra), body));
                    let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
                    tasks.into_iter().map(|task| task.join()?).collect::<Result<Vec<R>, ShareError>>()
                })??;
                gather(here, results)
            })
        };
        let tasks = here.nodes().map(start).collect::<Result<Vec<_>, ShareError>>()?;
        tasks.into_iter().map(|task| Ok(task.join()??)).collect()
    })?
}

/// Stores values that may own others side by side at this node.
pub(super) fn list<T: Far>(here: &Here<'_>, values: impl ExactSizeIterator<Item = T>) -> Result<DVec<T>, ShareError> {
    let mut list = DVec::with_chunk(values.len());
    for value in values {
        list.push(here, value)?;
    }
    Ok(list)
}

/// Gathers what the chunks of a node have left for each part.
pub(super) fn by_part<T: Far>(here: &Here<'_>, left: Vec<[DVec<T>; PARTS]>) -> Result<Parts<T>, ShareError> {
    let mut parts = DVec::with_chunk(left.len() * PARTS);
    let mut left: Vec<_> = left.into_iter().map(IntoIterator::into_iter).collect();
    for _ in 0..PARTS {
        for chunk in &mut left {
            parts.push(here, chunk.next().expect("a chunk leaves something for each part"))?;
        }
    }
    Ok(parts)
}

/// Stores what a chunk leaves for each part.
pub(super) fn store_parts<T: Far + Copy>(
    here: &Here<'_>,
    parts: &[Vec<T>; PARTS],
) -> Result<[DVec<T>; PARTS], ShareError> {
    let mut stored = std::array::from_fn(|_| DVec::new());
    for (stored, values) in stored.iter_mut().zip(parts) {
        *stored = store(here, values)?;
    }
    Ok(stored)
}

/// Borrows all values of some vectors, which are asked for at once.
pub(super) fn all_of<'a, T: Far>(
    here: &'a Here<'_>,
    vectors: impl Iterator<Item = &'a DVec<T>> + Clone,
) -> Result<Vec<&'a [T]>, ShareError> {
    for vector in vectors.clone() {
        if let Some(values) = vector.chunk(here, 0)? {
            values.prefetch(here);
        }
    }
    vectors.map(|vector| all(here, vector)).collect()
}

/// Borrows what all chunks have left for one part, in order.
pub(super) fn left_for<'a, T: Far>(
    here: &'a Here<'_>,
    left: &'a AtNodes<DVec<T>>,
    number: usize,
) -> Result<Vec<&'a [T]>, ShareError> {
    let nodes = left.iter(here).collect::<Result<Vec<_>, ShareError>>()?;
    let mut vectors = Vec::new();
    for node in &nodes {
        if let Some(parts) = node.chunk(here, 0)? {
            parts.prefetch(here);
        }
    }
    for node in nodes {
        let chunks = node.len() / PARTS;
        vectors.extend(part(here, node, number * chunks..(number + 1) * chunks)?);
    }
    all_of(here, vectors.into_iter())
}

/// Returns the sums of counts of several chunks or nodes.
pub(super) fn summed<const N: usize>(counts: &[[i64; N]]) -> [i64; N] {
    std::array::from_fn(|at| counts.iter().map(|counts| counts[at]).sum())
}
