//! Aggregate push-down: count, sum, minimum, maximum and mean of the numbers in a vector. Numbers
//! that are near are added up here, far ones at the memory server, and only the results meet.
//!
//! While the vector is borrowed nobody changes its numbers. So a page that was far at some moment
//! during that time has its current bytes at the server, even if it is brought near meanwhile.

use super::FarVec;
use crate::Heap;
use crate::collections::{FarArray, range_of};
use crate::error::FarError;
use crate::heap::FarRange;
use crate::offload::{CHANNELS, OffloadError, OffloadTarget};
use core::ops::{Bound, Range, RangeBounds, RangeInclusive};
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::{Number, Part, Totals, Wanted, Where};
use std::collections::BTreeMap;

/// Bytes that one call looks at, at least and at most. The limit lets a server serve others in
/// between, and keeps a call within its budget.
const CALL_BYTES: RangeInclusive<u64> = 512 << 10..=64 << 20;
/// Pieces of one call, at most. Their encoding is a third of the longest argument.
const CALL_PIECES: usize = 1024;
/// Calls under way at a time. With this many, all are answered within the heap's patience.
const CALLS: usize = 8;
/// Up to this many far units are fetched instead: that takes less than a call, or not much more.
const FEW_UNITS: usize = 4;

impl<N: Number> FarVec<N> {
    /// Computes number, sum, smallest, largest and mean of the elements, or of
    /// [some](Aggregate::over), [chosen](Aggregate::filter) by value. Far elements stay far and are
    /// added up where they are, if the pool runs functions: one memory server, a mirror of such, or
    /// a stripe of either.
    ///
    /// ```
    /// use farfield::{Heap, collections::FarVec};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let mut fares = FarVec::new();
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25, 52.5])?;
    /// let all = fares.aggregate(&heap).run()?;
    /// assert_eq!((all.count(), all.sum(), all.mean()), (4, 75.25, Some(18.8125)));
    /// assert_eq!((all.min(), all.max()), (Some(3.25), Some(52.5)));
    /// let short = fares.aggregate(&heap).filter(..10.0).run()?;
    /// assert_eq!(short.count(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The answer is the same wherever it is computed. Sums are exact. A sum of floating-point
    /// numbers is rounded once, at the end, so it does not depend on an order. It may differ in its
    /// last bits from the sum of a loop that rounds at each step.
    pub fn aggregate<'v>(&'v self, heap: &'v Heap) -> Aggregate<'v, N> {
        let values = (Bound::Unbounded, Bound::Unbounded);
        Aggregate { vec: self, heap, range: 0..self.len, values, at: Where::Auto }
    }
}

impl<N: Number, const D: usize> FarArray<N, D> {
    /// Aggregates the elements like [`FarVec::aggregate`]. For a row, a plane and so on, use
    /// [`over`](Aggregate::over) with its [part](FarArray::part).
    ///
    /// ```
    /// use farfield::{FarArray, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let table = FarArray::from_fn(&heap.enter(), [1000, 100], |[row, column]| (row * column) as u32)?;
    /// let row = table.aggregate(&heap).over(table.part([7])).run()?;
    /// assert_eq!((row.count(), row.sum(), row.max()), (100, 34_650, Some(693)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn aggregate<'v>(&'v self, heap: &'v Heap) -> Aggregate<'v, N> {
        self.elements.aggregate(heap)
    }
}

/// An aggregate over the numbers of a vector, not computed yet. See [`FarVec::aggregate`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Aggregate<'v, N: Number> {
    vec: &'v FarVec<N>,
    heap: &'v Heap,
    range: Range<usize>,
    values: (Bound<N>, Bound<N>),
    at: Where,
}

impl<N: Number> Aggregate<'_, N> {
    /// Restricts the aggregate to the elements with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.range = range_of(range, self.vec.len);
        self
    }

    /// Restricts the aggregate to the elements with these values. NaN is in no range but `..`.
    pub fn filter(mut self, values: impl RangeBounds<N>) -> Self {
        self.values = (values.start_bound().cloned(), values.end_bound().cloned());
        self
    }

    /// Sets where the aggregate is computed. By default, [`Where::Auto`]: near elements here, far
    /// ones at the server, and here what the server does not answer.
    ///
    /// With [`Where::Client`], far elements are brought near, one after the other, and are evicted
    /// first. With [`Where::Server`], near ones are [written back](Heap::write_back) before; the
    /// calling thread must be in no scope of the heap.
    pub fn at(mut self, at: Where) -> Self {
        self.at = at;
        self
    }

    /// Computes the aggregate, and waits for the result.
    pub fn run(self) -> Result<Part<N>, OffloadError> {
        if self.range.is_empty() {
            return Ok(Part::default());
        }
        if self.vec.units.core() != Some(core::ptr::from_ref(self.heap.core())) {
            return Err(FarError::OtherHeap.into());
        }
        match self.at {
            Where::Server => {
                self.heap.write_back(self.vec.far_ranges(self.range.clone()))?;
                self.ask_server(self.vec.far_ranges(self.range.clone()))
            }
            Where::Auto if self.heap.core().may_offload::<Totals<N>>() => Ok(self.run_where_they_are()?),
            _ => Ok(self.run_here([self.range.clone()])?),
        }
    }

    fn run_where_they_are(&self) -> Result<Part<N>, FarError> {
        let (near, far) = self.vec.by_distance(self.range.clone());
        let far_units: usize = far.iter().map(|range| range.len().div_ceil(FarVec::<N>::PER_UNIT)).sum();
        if far_units <= FEW_UNITS {
            return self.run_here([self.range.clone()]);
        }
        let of_far = match self.ask_server(far.iter().flat_map(|range| self.vec.far_ranges(range.clone()))) {
            Ok(part) => part,
            Err(_) => self.run_here(far)?,
        };
        let mut all = self.run_here(near)?;
        all.merge(&of_far);
        Ok(all)
    }

    fn run_here(&self, ranges: impl IntoIterator<Item = Range<usize>>) -> Result<Part<N>, FarError> {
        let mut part = Part::default();
        let mut scope = self.heap.enter();
        for range in ranges {
            let mut scan = self.vec.scan_in(&mut scope, range).once();
            while let Some(numbers) = scan.next_chunk()? {
                part.add_all(numbers, &self.values);
            }
        }
        Ok(part)
    }

    fn ask_server(&self, ranges: impl Iterator<Item = FarRange>) -> Result<Part<N>, OffloadError> {
        let core = self.heap.core();
        let layout = core.offload_layout();
        let mut targets: BTreeMap<OffloadTarget, Vec<FarRange>> = BTreeMap::new();
        for FarRange { start, len } in ranges {
            // One page, and so at one target.
            let (target, start) = layout.place(start);
            targets.entry(target).or_default().push(FarRange { start, len });
        }
        let calls = targets.into_iter().map(|(target, ranges)| {
            let calls = calls_of(ranges, size_of::<N>() as u64).into_iter();
            calls.map(move |pieces| (target, Wanted { pieces, values: self.values }))
        });
        // Alternating between targets, so that all are busy.
        let mut calls: Vec<_> = calls.collect();
        let mut whole = Part::default();
        let mut some = Vec::new();
        while !calls.is_empty() {
            some.extend(calls.iter_mut().filter_map(Iterator::next));
            calls.retain(|calls| calls.len() > 0);
            if some.len() >= CALLS || calls.is_empty() {
                let parts = core.offload::<Totals<N>>(layout, core::mem::take(&mut some))?;
                parts.iter().for_each(|part| whole.merge(part));
            }
        }
        Ok(whole)
    }
}

/// Groups the ranges into calls of about equal length, as pieces without gaps.
fn calls_of(ranges: Vec<FarRange>, number_bytes: u64) -> Vec<Vec<farfield_wic::Range>> {
    let mut calls: Vec<Vec<farfield_wic::Range>> = Vec::new();
    let all: u64 = ranges.iter().map(|range| range.len).sum();
    let share = all.div_ceil(CHANNELS as u64).next_multiple_of(PAGE_BYTES as u64);
    let most = share.clamp(*CALL_BYTES.start(), *CALL_BYTES.end());
    let mut bytes = 0;
    for FarRange { start, len } in ranges {
        let count = len / number_bytes;
        bytes += len;
        let last = calls.last_mut().filter(|_| bytes <= most);
        let Some(call) = last.filter(|call| call.len() < CALL_PIECES) else {
            calls.push(vec![farfield_wic::Range { offset: start, count }]);
            bytes = len;
            continue;
        };
        match call.last_mut() {
            Some(piece) if piece.offset + piece.count * number_bytes == start => piece.count += count,
            _ => call.push(farfield_wic::Range { offset: start, count }),
        }
    }
    calls
}

impl<N: Number> FarVec<N> {
    /// Splits these elements into those that are near or on their way, and those that are far.
    fn by_distance(&self, range: Range<usize>) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        let (mut near, mut far): (Vec<Range<usize>>, Vec<Range<usize>>) = Default::default();
        for unit in self.units_of(range.clone()) {
            let first = unit * Self::PER_UNIT;
            let elements = range.start.max(first)..range.end.min(first + Self::PER_UNIT);
            let side = if self.units.is_far(unit) { &mut far } else { &mut near };
            match side.last_mut() {
                Some(last) if last.end == elements.start => last.end = elements.end,
                _ => side.push(elements),
            }
        }
        (near, far)
    }
}
