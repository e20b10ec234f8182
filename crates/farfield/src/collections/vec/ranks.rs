//! Elements by their rank, such as the median, and indices of elements by value, computed where the
//! elements are.

use super::FarVec;
use crate::Heap;
use crate::collections::columns::{ColumnKernel, ColumnTable, RowReply};
use crate::heap::Scope;
use crate::offload::OffloadError;
use core::ops::{Bound, Range, RangeBounds};
use farfield_wic::columns::{Bucket, Buckets, Find, Found, Histogram, Ranks, Search, Span};
use farfield_wic::{CallError, Number, Where};
use std::collections::VecDeque;

/// Rounds that narrow a span to one value. Each leaves a thousandth, but for one that shows that a
/// guess was wrong.
const ROUNDS_MAX: u32 = 9;
/// From this many rows on, a sample is read first, to guess where the element is: some units of the
/// column, spread from its beginning to its end.
const GUESSED_ROWS: usize = 1 << 20;
const GUESS_UNITS: usize = 64;
/// Distance from one sampled unit to the next one that is read.
const GUESS_STEP: usize = 37;
/// The share of all elements that the guess may be wrong by.
const GUESS_SHARE: f64 = 0.03;
/// Rows whose indices are sorted together.
const WINDOW: usize = 1 << 20;

impl<N: Number> FarVec<N> {
    /// Finds the median, and elements of other ranks, in a few rounds. Far elements are counted
    /// where they are, as in [`FarVec::aggregate`]. NaN is passed over, and −0 is smaller than +0.
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
        Ranking { vec: self, table: ColumnTable::new(heap, vec![self.into()]) }
    }

    /// Finds the indices of the elements with some values. Far elements are searched where they
    /// are, as in [`FarVec::aggregate`].
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
        Finding { vec: self, table: ColumnTable::new(heap, vec![self.into()]), values }
    }
}

/// A search for elements by rank, not done yet. See [`FarVec::ranks`].
#[derive(Debug)]
#[must_use = "nothing is done before it is asked"]
pub struct Ranking<'v, N: Number> {
    vec: &'v FarVec<N>,
    table: ColumnTable<'v>,
}

impl<N: Number> Ranking<'_, N> {
    /// Restricts the search to the elements with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.table.over(range);
        self
    }

    /// Sets where the search is done: see [`Aggregate::at`](super::Aggregate::at).
    pub fn at(mut self, at: Where) -> Self {
        self.table.at = at;
        self
    }

    /// Finds the element in the middle, of two the smaller one, and waits for it. `None` if there
    /// is no element.
    pub fn median(self) -> Result<Option<N>, OffloadError> {
        self.pick(|count| (count - 1) / 2)
    }

    /// Finds the smallest element that at least this share of the elements (from 0 to 1) does not
    /// exceed, and waits for it.
    pub fn quantile(self, share: f64) -> Result<Option<N>, OffloadError> {
        self.pick(|count| ((count as f64 * share).ceil() as u64).saturating_sub(1).min(count - 1))
    }

    /// Finds the element that has `rank` elements before it in order, and waits for it. `None` if
    /// there are not so many.
    pub fn nth(self, rank: u64) -> Result<Option<N>, OffloadError> {
        self.pick(|_| rank)
    }

    /// Finds the element of a rank, which is computed from the number of elements.
    fn pick(self, rank: impl Fn(u64) -> u64) -> Result<Option<N>, OffloadError> {
        // `sure`: the images between which the element is for sure. `span`: those between which it
        // is searched next.
        let mut sure = (0, u64::MAX);
        let mut span = self.guess(&rank)?;
        for _ in 0..ROUNDS_MAX {
            let found = self.buckets(span)?;
            if found.count == 0 {
                return Ok(None);
            }
            let rank = rank(found.count);
            if rank >= found.count {
                return Ok(None);
            }
            match rank.checked_sub(found.before) {
                None => sure.1 = span.0.saturating_sub(1),
                Some(rank) => match bucket_of(&found, rank) {
                    Some(bucket) => sure = (bucket.first.max(sure.0), bucket.last.min(sure.1)),
                    None => sure.0 = span.1.saturating_add(1),
                },
            }
            if sure.0 == sure.1 {
                return Ok(Some(N::of_image(sure.0)));
            }
            span = sure;
        }
        // Correct answers lead to one element within so many rounds.
        Err(CallError::Answer.into())
    }

    /// Guesses, from a sample, between which images the element is. Small tables are not sampled.
    fn guess(&self, rank: impl Fn(u64) -> u64) -> Result<(u64, u64), OffloadError> {
        let (rows, all) = (self.table.rows.clone(), (0, u64::MAX));
        if rows.len() < GUESSED_ROWS {
            return Ok(all);
        }
        let mut some = Vec::with_capacity(GUESS_UNITS * FarVec::<N>::PER_UNIT);
        for index in 0..GUESS_UNITS {
            // Not in order: a thread that reads with a stride is expected to need what comes next,
            // too.
            let row = rows.start + index * GUESS_STEP % GUESS_UNITS * (rows.len() / GUESS_UNITS);
            let first = row - row % FarVec::<N>::PER_UNIT;
            let unit = first..self.vec.len().min(first + FarVec::<N>::PER_UNIT);
            let scope = self.table.heap.enter();
            for numbers in self.vec.chunks_in(&scope, unit) {
                some.extend(numbers?.iter().filter(|number| number.is_ordered()).map(|number| number.image()));
            }
        }
        some.sort_unstable();
        let share = rank(rows.len() as u64) as f64 / rows.len() as f64;
        let place = |share: f64| (share * some.len() as f64) as usize;
        let first = if share < GUESS_SHARE { None } else { some.get(place(share - GUESS_SHARE)) };
        let last = some.get(place(share + GUESS_SHARE));
        Ok((first.copied().unwrap_or(all.0), last.copied().unwrap_or(all.1)))
    }

    fn buckets(&self, (first, last): (u64, u64)) -> Result<Buckets, OffloadError> {
        let mut round = RankKernel::new(self.vec, first, last);
        self.table.run(&mut round)?;
        Ok(round.histogram.buckets())
    }
}

/// Finds the bucket of the element that has `rank` elements before it inside the span.
fn bucket_of(buckets: &Buckets, mut rank: u64) -> Option<Bucket> {
    for bucket in buckets.inside.values() {
        if rank < bucket.count {
            return Some(*bucket);
        }
        rank -= bucket.count;
    }
    None
}

struct RankKernel<'v, N: Number> {
    vec: &'v FarVec<N>,
    first: u64,
    last: u64,
    histogram: Histogram,
}

impl<'v, N: Number> RankKernel<'v, N> {
    fn new(vec: &'v FarVec<N>, first: u64, last: u64) -> RankKernel<'v, N> {
        RankKernel { vec, first, last, histogram: Histogram::new(first, last) }
    }
}

impl RowReply for Buckets {
    fn rows(&self) -> Option<u64> {
        None
    }
}

impl<N: Number> ColumnKernel for RankKernel<'_, N> {
    type Function = Ranks<N>;

    fn fork(&self) -> Self {
        RankKernel::new(self.vec, self.first, self.last)
    }

    fn merge(&mut self, other: Self) -> Result<(), OffloadError> {
        Ok(self.histogram.merge(&other.histogram.buckets()).ok_or(CallError::Answer)?)
    }

    fn argument(&self, mut pieces: Vec<Vec<farfield_wic::Range>>) -> Span {
        Span { pieces: pieces.pop().unwrap_or_default(), first: self.first, last: self.last }
    }

    fn merge_answer(&mut self, _rows: &VecDeque<Range<usize>>, answer: Buckets) -> Result<(), OffloadError> {
        Ok(self.histogram.merge(&answer).ok_or(CallError::Answer)?)
    }

    fn process(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError> {
        for numbers in self.vec.chunks_in(scope, rows) {
            self.histogram.add_all(numbers?);
        }
        Ok(())
    }
}

/// A search for elements by value, not done yet. See [`FarVec::find`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Finding<'v, N: Number> {
    vec: &'v FarVec<N>,
    table: ColumnTable<'v>,
    values: (Bound<N>, Bound<N>),
}

impl<N: Number> Finding<'_, N> {
    /// Restricts the search to the elements with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.table.over(range);
        self
    }

    /// Sets where the search is done: see [`Aggregate::at`](super::Aggregate::at).
    pub fn at(mut self, at: Where) -> Self {
        self.table.at = at;
        self
    }

    /// Runs the search, and waits. Returns the indices, ascending.
    pub fn run(mut self) -> Result<FarVec<u64>, OffloadError> {
        let (rows, heap) = (self.table.rows.clone(), self.table.heap);
        let mut all = FarVec::new();
        for start in rows.clone().step_by(WINDOW) {
            self.table.rows = start..rows.end.min(start + WINDOW);
            let mut window = FindKernel { vec: self.vec, values: self.values, indices: Vec::new() };
            self.table.run(&mut window)?;
            window.indices.sort_unstable();
            for some in window.indices.chunks(FarVec::<u64>::PER_UNIT) {
                all.extend_from_slice(&heap.enter(), some)?;
            }
        }
        Ok(all)
    }
}

struct FindKernel<'v, N: Number> {
    vec: &'v FarVec<N>,
    values: (Bound<N>, Bound<N>),
    indices: Vec<u64>,
}

impl RowReply for Found {
    fn rows(&self) -> Option<u64> {
        Some(self.rows)
    }
}

impl<N: Number> ColumnKernel for FindKernel<'_, N> {
    type Function = Find<N>;

    fn fork(&self) -> Self {
        FindKernel { vec: self.vec, values: self.values, indices: Vec::new() }
    }

    fn merge(&mut self, other: Self) -> Result<(), OffloadError> {
        self.indices.extend(other.indices);
        Ok(())
    }

    fn argument(&self, mut pieces: Vec<Vec<farfield_wic::Range>>) -> Search<N> {
        Search { pieces: pieces.pop().unwrap_or_default(), values: self.values }
    }

    fn merge_answer(&mut self, rows: &VecDeque<Range<usize>>, answer: Found) -> Result<(), OffloadError> {
        let mut rows = rows.iter().flat_map(Range::clone).take(answer.rows as usize);
        for gap in answer.gaps {
            let row = usize::try_from(gap).ok().and_then(|gap| rows.nth(gap));
            self.indices.push(row.ok_or(CallError::Answer)? as u64);
        }
        Ok(())
    }

    fn process(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError> {
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
