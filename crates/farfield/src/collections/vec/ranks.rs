//! Elements by their rank, as the median, and by their value, found where they are.

use super::FarVec;
use crate::collections::columns::{Look, OfRows, Table};
use crate::heap::{Heap, Scope};
use crate::offload::OffloadError;
use core::ops::{Bound, Range, RangeBounds};
use farfield_wic::columns::{Bucket, Buckets, Find, Found, Ranks, Search, Span};
use farfield_wic::{CallError, Number, Where};
use std::collections::VecDeque;

/// Rounds that narrow a span to one value: each leaves a thousandth.
const ROUNDS_MAX: u32 = 8;
/// Rows whose indices are put in order together.
const WINDOW: usize = 1 << 20;

impl<N: Number> FarVec<N> {
    /// The median, and elements of other ranks, which are found where they are, as in [`FarVec::aggregate`], in a few rounds. What is no number (NaN) is passed
    /// over, and −0 is smaller than +0.
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let mut fares = FarVec::new();
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25, 52.5])?;
    /// assert_eq!(fares.ranks(&heap).median()?, Some(7.5));
    /// assert_eq!(fares.ranks(&heap).over(1..).nth(2)?, Some(52.5));
    /// assert_eq!(fares.ranks(&heap).quantile(1.0)?, Some(52.5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ranks<'v>(&'v self, heap: &'v Heap) -> Ranking<'v, N> {
        Ranking { vec: self, table: Table::new(heap, vec![self.into()]) }
    }

    /// The indices of the elements with some values, which are found where they are, as in [`FarVec::aggregate`].
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let mut fares = FarVec::new();
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25, 52.5])?;
    /// let dear = fares.find(&heap, 10.0..).run()?;
    /// let dear = fares.take(&heap, &dear).run()?;
    /// assert_eq!((dear.len(), dear.read(1, f64::clone)?), (2, Some(52.5)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn find<'v>(&'v self, heap: &'v Heap, values: impl RangeBounds<N>) -> Finding<'v, N> {
        let values = (values.start_bound().cloned(), values.end_bound().cloned());
        Finding { vec: self, table: Table::new(heap, vec![self.into()]), values }
    }
}

/// Elements of which some are to be found by rank. See [`FarVec::ranks`].
#[derive(Debug)]
#[must_use = "nothing is done before it is asked"]
pub struct Ranking<'v, N: Number> {
    vec: &'v FarVec<N>,
    table: Table<'v>,
}

impl<N: Number> Ranking<'_, N> {
    /// Of the elements with these indices only.
    ///
    /// # Panics
    /// If there are no such elements.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.table.over(range);
        self
    }

    /// Where it is done: see [`Aggregate::at`](super::Aggregate::at).
    pub fn at(mut self, at: Where) -> Self {
        self.table.at = at;
        self
    }

    /// The element in the middle, of two the smaller one; `None` if there is none.
    pub fn median(self) -> Result<Option<N>, OffloadError> {
        self.pick(|count| (count - 1) / 2)
    }

    /// The smallest element that at least this share of them (from 0 to 1) does not exceed.
    pub fn quantile(self, share: f64) -> Result<Option<N>, OffloadError> {
        self.pick(|count| ((count as f64 * share).ceil() as u64).saturating_sub(1).min(count - 1))
    }

    /// The element that so many come before in order; `None` if there are not so many.
    pub fn nth(self, rank: u64) -> Result<Option<N>, OffloadError> {
        self.pick(|_| rank)
    }

    /// The element of a rank, which is chosen by how many there are.
    fn pick(self, rank: impl FnOnce(u64) -> u64) -> Result<Option<N>, OffloadError> {
        let (mut first, mut last) = (0, u64::MAX);
        let mut buckets = self.buckets(first, last)?;
        let count = buckets.0.values().fold(0u64, |count, bucket| count.saturating_add(bucket.count));
        if count == 0 {
            return Ok(None);
        }
        let mut rank = rank(count);
        for _ in 0..ROUNDS_MAX {
            let Some(bucket) = bucket_of(&buckets, &mut rank) else { return Ok(None) };
            (first, last) = (bucket.first.max(first), bucket.last.min(last));
            if first == last {
                return Ok(Some(N::of_image(first)));
            }
            buckets = self.buckets(first, last)?;
        }
        // Who answers so does not count.
        Err(CallError::Answer.into())
    }

    fn buckets(&self, first: u64, last: u64) -> Result<Buckets, OffloadError> {
        let mut round = Round { vec: self.vec, first, last, buckets: Buckets::default() };
        self.table.run(&mut round)?;
        Ok(round.buckets)
    }
}

/// The bucket in which this rank is, which becomes the rank inside it.
fn bucket_of(buckets: &Buckets, rank: &mut u64) -> Option<Bucket> {
    for bucket in buckets.0.values() {
        if *rank < bucket.count {
            return Some(*bucket);
        }
        *rank -= bucket.count;
    }
    None
}

struct Round<'v, N: Number> {
    vec: &'v FarVec<N>,
    first: u64,
    last: u64,
    buckets: Buckets,
}

impl OfRows for Buckets {
    fn rows(&self) -> Option<u64> {
        None
    }
}

impl<N: Number> Look for Round<'_, N> {
    type Function = Ranks<N>;

    fn argument(&self, mut pieces: Vec<Vec<farfield_wic::Range>>) -> Span {
        Span { pieces: pieces.pop().unwrap_or_default(), first: self.first, last: self.last }
    }

    fn merge(&mut self, _rows: &VecDeque<Range<usize>>, answer: Buckets) -> Result<(), OffloadError> {
        self.buckets.merge(&answer);
        Ok(())
    }

    fn look(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError> {
        for numbers in self.vec.chunks_in(scope, rows) {
            self.buckets.add_all(numbers?, self.first, self.last);
        }
        Ok(())
    }
}

/// Elements that are to be found by value. See [`FarVec::find`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Finding<'v, N: Number> {
    vec: &'v FarVec<N>,
    table: Table<'v>,
    values: (Bound<N>, Bound<N>),
}

impl<N: Number> Finding<'_, N> {
    /// Of the elements with these indices only.
    ///
    /// # Panics
    /// If there are no such elements.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.table.over(range);
        self
    }

    /// Where it is done: see [`Aggregate::at`](super::Aggregate::at).
    pub fn at(mut self, at: Where) -> Self {
        self.table.at = at;
        self
    }

    /// Does it, and waits: the indices, ascending.
    pub fn run(mut self) -> Result<FarVec<u64>, OffloadError> {
        let (rows, heap) = (self.table.rows.clone(), self.table.heap);
        let mut all = FarVec::new();
        for start in rows.clone().step_by(WINDOW) {
            self.table.rows = start..rows.end.min(start + WINDOW);
            let mut window = Window { vec: self.vec, values: self.values, indices: Vec::new() };
            self.table.run(&mut window)?;
            window.indices.sort_unstable();
            for some in window.indices.chunks(FarVec::<u64>::PER_UNIT) {
                all.extend_from_slice(&heap.enter(), some)?;
            }
        }
        Ok(all)
    }
}

struct Window<'v, N: Number> {
    vec: &'v FarVec<N>,
    values: (Bound<N>, Bound<N>),
    indices: Vec<u64>,
}

impl OfRows for Found {
    fn rows(&self) -> Option<u64> {
        Some(self.rows)
    }
}

impl<N: Number> Look for Window<'_, N> {
    type Function = Find<N>;

    fn argument(&self, mut pieces: Vec<Vec<farfield_wic::Range>>) -> Search<N> {
        Search { pieces: pieces.pop().unwrap_or_default(), values: self.values }
    }

    fn merge(&mut self, rows: &VecDeque<Range<usize>>, answer: Found) -> Result<(), OffloadError> {
        let mut rows = rows.iter().flat_map(Range::clone).take(answer.rows as usize);
        for gap in answer.gaps {
            let row = usize::try_from(gap).ok().and_then(|gap| rows.nth(gap));
            self.indices.push(row.ok_or(CallError::Answer)? as u64);
        }
        Ok(())
    }

    fn look(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError> {
        let is_all = matches!(self.values, (Bound::Unbounded, Bound::Unbounded));
        let mut index = rows.start as u64;
        for numbers in self.vec.chunks_in(scope, rows) {
            for number in numbers? {
                if is_all || self.values.contains(number) {
                    self.indices.push(index);
                }
                index += 1;
            }
        }
        Ok(())
    }
}
