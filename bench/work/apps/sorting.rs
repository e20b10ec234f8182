//! What is done with chunks of values to sort them: samples say where ranges begin, each chunk is divided into ranges, and the
//! parts of a range are merged.

use super::chunked::PARTS;
use std::cmp::Ordering;

/// Values of a chunk from which the ranges follow.
pub(super) const SAMPLES: usize = 64;

/// Where the ranges begin, but for the first one.
pub(super) type Pivots<T> = [T; PARTS - 1];

/// Value that is sorted.
pub(super) trait SortKey: Copy + PartialOrd {
    fn order(&self, other: &Self) -> Ordering;
}

impl SortKey for u64 {
    fn order(&self, other: &u64) -> Ordering {
        self.cmp(other)
    }
}

impl SortKey for f64 {
    fn order(&self, other: &f64) -> Ordering {
        self.total_cmp(other)
    }
}

/// Returns some of the values of a chunk, by their rows.
pub(super) fn sample<T>(rows: usize, value: impl Fn(usize) -> T) -> [T; SAMPLES] {
    std::array::from_fn(|at| value(at * rows / SAMPLES))
}

/// Returns where ranges begin that have about as many values each.
pub(super) fn pivots<T: SortKey>(samples: impl Iterator<Item = T>) -> Pivots<T> {
    let mut samples: Vec<T> = samples.collect();
    samples.sort_unstable_by(T::order);
    std::array::from_fn(|at| samples[(at + 1) * samples.len() / PARTS])
}

/// Returns the values of a chunk, divided into ranges and sorted in each.
pub(super) fn ranges<T: SortKey>(values: impl ExactSizeIterator<Item = T>, pivots: &Pivots<T>) -> [Vec<T>; PARTS] {
    let mut parts = std::array::from_fn(|_| Vec::with_capacity(values.len() / PARTS * 5 / 4));
    values.for_each(|value| parts[pivots.partition_point(|pivot| *pivot <= value)].push(value));
    parts.iter_mut().for_each(|part| part.sort_unstable_by(T::order));
    parts
}

/// Returns the values of a range in order.
pub(super) fn merged<'a, T: SortKey + 'a>(ranges: impl Iterator<Item = &'a [T]>) -> Vec<T> {
    let mut values: Vec<T> = ranges.flatten().copied().collect();
    // The ranges are sorted already, which this makes use of.
    values.sort_by(T::order);
    values
}
