//! External merge sort where the numbers are: sorted copies of a vector, and the order of its
//! elements. Runs are sorted first, and then merged, many into one.

use super::FarVec;
use super::copy::{FEW_UNITS, add};
use crate::Heap;
use crate::collections::output_units::OutputUnits;
use crate::collections::range_of;
use crate::error::FarError;
use crate::offload::OffloadError;
use core::ops::{Range, RangeBounds};
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::columns::{Form, Merge, Merged, Runs, Sort, Unsorted};
use farfield_wic::{CallError, Number, Where};

/// Elements of a run, which one call sorts.
const RUN: usize = Sort::MOST as usize;
/// Elements that one call merges, at most: with this many, it takes some milliseconds.
const CALL_ELEMENTS: usize = 2 * RUN;
/// Calls under way at a time.
const CALLS: usize = 4;

// Approximate costs, in nanoseconds per page, for the choice between server and client.
const MISS_NS: usize = 6000;
const WRITE_BACK_NS: usize = 5000;

impl<N: Number> FarVec<N> {
    /// Sorts the elements, or [some](Sorting::over), into a new vector in ascending order, or into
    /// [the indices](Sorting::order) that lead there. Far elements stay far and are sorted where
    /// they are, if the pool runs functions: one memory server, or a mirror of such. The result is
    /// far, too.
    ///
    /// Floating-point numbers are ordered as [`f64::total_cmp`] does, −0 before +0, but for NaN,
    /// which comes last, whatever its sign. Of equal elements the first one's index comes first.
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let (mut fares, mut tips) = (FarVec::new(), FarVec::new());
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25, 52.5])?;
    /// tips.extend(&heap.enter(), [1u8, 2, 3, 4])?;
    /// let sorted = fares.sorted(&heap).run()?;
    /// assert_eq!(sorted.read(0, f64::clone)?, Some(3.25));
    /// // Another column in the order of this one.
    /// let tips = tips.take(&heap, &fares.sorted(&heap).order()?).run()?;
    /// assert_eq!(tips.read(0, u8::clone)?, Some(3));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sorted<'v>(&'v self, heap: &'v Heap) -> Sorting<'v, N> {
        Sorting { vec: self, heap, rows: 0..self.len, at: Where::Auto }
    }
}

/// A sorted copy that is not made yet. See [`FarVec::sorted`].
#[derive(Debug)]
#[must_use = "nothing is done before it is asked"]
pub struct Sorting<'v, N: Number> {
    vec: &'v FarVec<N>,
    heap: &'v Heap,
    rows: Range<usize>,
    at: Where,
}

/// Index and rank of an element, in the form that server functions use.
type Pair = [u64; 2];

impl<N: Number> Sorting<'_, N> {
    /// Restricts the sort to the elements with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.rows = range_of(range, self.vec.len);
        self
    }

    /// Sets where the elements are sorted. By default, [`Where::Auto`]: at the server, if that is
    /// expected to take less time than fetching the far elements. Near elements that were changed
    /// are [written back](Heap::write_back) before. Otherwise, and where the server does not do it,
    /// here.
    ///
    /// With [`Where::Client`], here. With [`Where::Server`], at the server, and the elements are
    /// written back before; the calling thread must be in no scope of the heap.
    pub fn at(mut self, at: Where) -> Self {
        self.at = at;
        self
    }

    /// Sorts the elements, and waits for the result.
    pub fn run(self) -> Result<FarVec<N>, OffloadError> {
        self.make(
            || self.sort_there::<N, N>(Merged::Numbers(N::KIND), Merged::Numbers(N::KIND)),
            || self.numbers_here(),
        )
    }

    /// Returns the indices of the elements in sorted order, as [`FarVec::take`] takes them, and
    /// waits for them.
    pub fn order(self) -> Result<FarVec<u64>, OffloadError> {
        self.make(|| self.sort_there::<Pair, u64>(Merged::Pairs, Merged::Indices), || self.order_here())
    }

    fn make<T: Send + 'static>(
        &self,
        there: impl Fn() -> Result<FarVec<T>, OffloadError>,
        here: impl Fn() -> Result<FarVec<T>, OffloadError>,
    ) -> Result<FarVec<T>, OffloadError> {
        if self.rows.is_empty() {
            return Ok(FarVec::new());
        }
        if self.vec.units.core() != Some(core::ptr::from_ref(self.heap.core())) {
            return Err(FarError::OtherHeap.into());
        }
        match self.at {
            Where::Server => {
                self.heap.write_back(self.vec.far_ranges(self.rows.clone()))?;
                there()
            }
            Where::Auto if self.is_worth_asking() => {
                let asked = self.write_back().map_err(OffloadError::from).and_then(|()| there());
                // Whatever went wrong there, the pages that were written by then are not used.
                asked.or_else(|_| here())
            }
            _ => here(),
        }
    }

    /// Checks whether the server runs the functions and would take less time than fetching the far
    /// elements.
    fn is_worth_asking(&self) -> bool {
        let core = self.heap.core();
        if !core.may_offload::<Sort>() || !core.may_offload::<Merge>() {
            return false;
        }
        let units = self.vec.units_of(self.rows.clone());
        let far = units.clone().filter(|unit| self.vec.units.is_far(*unit)).count();
        let room = core.near.load(Ordering::Relaxed) as usize / PAGE_BYTES / 2;
        // Sorting here halves parts, each time with all of it, until they have room near.
        let rounds = 1 + (units.len() / room.max(1)).checked_ilog2().map_or(0, |rounds| rounds as usize + 1);
        let changed = units.filter(|unit| !self.vec.units.is_as_far(*unit)).count();
        far > FEW_UNITS && changed * WRITE_BACK_NS < far.saturating_mul(MISS_NS * rounds)
    }

    /// Writes back the elements of which the server has an older copy.
    fn write_back(&self) -> Result<(), FarError> {
        let units = self.vec.units_of(self.rows.clone());
        let changed = units.filter(|unit| !self.vec.units.is_as_far(*unit));
        let elements = |unit: usize| {
            let first = unit * FarVec::<N>::PER_UNIT;
            first..self.vec.len.min(first + FarVec::<N>::PER_UNIT)
        };
        let ranges: Vec<_> = changed.flat_map(|unit| self.vec.far_ranges(elements(unit))).collect();
        if ranges.is_empty() { Ok(()) } else { self.heap.write_back(ranges) }
    }

    /// Sorts runs, and merges them until there is one. Intermediate runs have elements of type `R`,
    /// the result of type `T`.
    fn sort_there<R: Send + 'static, T: Send + 'static>(
        &self,
        between: Merged,
        last: Merged,
    ) -> Result<FarVec<T>, OffloadError> {
        if self.rows.len() <= RUN {
            return self.runs(last);
        }
        let mut runs: FarVec<R> = self.runs(between)?;
        let mut run = RUN;
        while runs.len.div_ceil(run) > Merge::MOST {
            runs = self.merge(&runs, run, between)?;
            run *= Merge::MOST;
        }
        self.merge(&runs, run, last)
    }

    /// Makes runs of the elements, each of them sorted.
    fn runs<T: Send + 'static>(&self, what: Merged) -> Result<FarVec<T>, OffloadError> {
        let len = self.rows.len();
        let mut output = OutputUnits::claim(self.heap.core(), len.div_ceil(FarVec::<T>::PER_UNIT))?;
        let runs: Vec<Range<usize>> = (0..len).step_by(RUN).map(|start| start..len.min(start + RUN)).collect();
        for some in runs.chunks(CALLS) {
            let calls = some.iter().map(|run| {
                let rows = self.rows.start + run.start..self.rows.start + run.end;
                let first = rows.start as u64;
                let form = match what {
                    Merged::Numbers(_) => Form::Numbers,
                    Merged::Pairs => Form::Pairs { first },
                    Merged::Indices => Form::Indices { first },
                };
                let units = run.start / FarVec::<T>::PER_UNIT..run.end.div_ceil(FarVec::<T>::PER_UNIT);
                let (pieces, to) = (pieces(self.vec, rows), output.pages(units.clone()));
                (vec![units], Unsorted { kind: N::KIND, pieces, form, to })
            });
            let answers = output.ask::<Sort>(calls.collect())?;
            if answers.iter().zip(some).any(|(sorted, run)| *sorted != run.len() as u64) {
                return Err(CallError::Answer.into());
            }
        }
        Ok(FarVec { units: output.finish(), len })
    }

    /// Merges runs of `run` elements each into fewer, longer ones.
    fn merge<R: Send + 'static, T: Send + 'static>(
        &self,
        runs: &FarVec<R>,
        run: usize,
        form: Merged,
    ) -> Result<FarVec<T>, OffloadError> {
        let mut output = OutputUnits::claim(self.heap.core(), runs.len.div_ceil(FarVec::<T>::PER_UNIT))?;
        let starts = (0..runs.len).step_by(run * Merge::MOST);
        let mut groups: Vec<MergeGroup> = starts.map(|start| MergeGroup::new(start, runs.len, run)).collect();
        while !groups.is_empty() {
            let calls = groups.iter().take(CALLS).map(|group| {
                let places = group.next();
                let units = places.start / FarVec::<T>::PER_UNIT..places.end.div_ceil(FarVec::<T>::PER_UNIT);
                let to = output.pages(units.clone());
                // No more of a run is taken than is made.
                let rest = |run: &Range<usize>| pieces(runs, run.start..run.end.min(run.start + places.len()));
                let rest = group.runs.iter().map(rest).collect();
                (vec![units], Runs { form, runs: rest, count: places.len() as u64, to })
            });
            let answers = output.ask::<Merge>(calls.collect())?;
            for (group, taken) in groups.iter_mut().zip(answers) {
                group.took(&taken).ok_or(CallError::Answer)?;
            }
            groups.retain(|group| !group.places.is_empty());
        }
        Ok(FarVec { units: output.finish(), len: runs.len })
    }

    fn numbers_here(&self) -> Result<FarVec<N>, OffloadError> {
        let mut copy = self.vec.copy(self.heap).over(self.rows.clone()).at(Where::Client).run()?;
        copy.sort_unstable_by_key(&mut self.heap.enter(), |number| number.rank())?;
        Ok(copy)
    }

    fn order_here(&self) -> Result<FarVec<u64>, OffloadError> {
        let mut pairs: FarVec<(u64, u64)> = FarVec::new();
        let mut some = Vec::with_capacity(FarVec::<N>::PER_UNIT);
        for start in self.rows.clone().step_by(FarVec::<N>::PER_UNIT) {
            let rows = start..self.rows.end.min(start + FarVec::<N>::PER_UNIT);
            some.clear();
            let mut scope = self.heap.enter();
            let mut scan = self.vec.scan_in(&mut scope, rows).once();
            while let Some(numbers) = scan.next_chunk()? {
                let index = start + some.len();
                some.extend(numbers.iter().zip(index as u64..).map(|(number, index)| (number.rank(), index)));
            }
            scope.renew();
            pairs.extend_from_slice(&scope, &some)?;
        }
        pairs.sort_unstable(&mut self.heap.enter())?;
        let mut order = FarVec::new();
        let mut some = Vec::with_capacity(FarVec::<u64>::PER_UNIT);
        for start in (0..pairs.len).step_by(FarVec::<u64>::PER_UNIT) {
            some.clear();
            let mut scope = self.heap.enter();
            let mut scan = pairs.scan_in(&mut scope, start..pairs.len.min(start + FarVec::<u64>::PER_UNIT)).once();
            while let Some(pairs) = scan.next_chunk()? {
                some.extend(pairs.iter().map(|(_, index)| *index));
            }
            scope.renew();
            order.extend_from_slice(&scope, &some)?;
        }
        Ok(order)
    }
}

/// Runs that are merged into one.
struct MergeGroup {
    /// Indices in the merged run that are not made yet.
    places: Range<usize>,
    /// Elements of each run that are not taken yet.
    runs: Vec<Range<usize>>,
}

impl MergeGroup {
    fn new(start: usize, len: usize, run: usize) -> MergeGroup {
        let places = start..len.min(start + run * Merge::MOST);
        let runs = places.clone().step_by(run).map(|start| start..places.end.min(start + run)).collect();
        MergeGroup { places, runs }
    }

    /// Returns the indices that the next call makes.
    fn next(&self) -> Range<usize> {
        self.places.start..self.places.end.min(self.places.start + CALL_ELEMENTS)
    }

    /// Records how many elements of each run the server took. `None` if the numbers cannot be
    /// right.
    fn took(&mut self, taken: &[u64]) -> Option<()> {
        let made = self.next();
        if taken.len() != self.runs.len()
            || taken.iter().try_fold(0u64, |all, run| all.checked_add(*run))? != made.len() as u64
        {
            return None;
        }
        for (run, taken) in self.runs.iter_mut().zip(taken) {
            run.start += usize::try_from(*taken).ok().filter(|taken| *taken <= run.len())?;
        }
        self.places.start = made.end;
        Some(())
    }
}

/// Returns where elements lie in the region, as byte offsets and element counts.
fn pieces<T: Send + 'static>(vec: &FarVec<T>, elements: Range<usize>) -> Vec<farfield_wic::Range> {
    let bytes = size_of::<T>() as u64;
    let mut pieces = Vec::new();
    for piece in vec.far_ranges(elements) {
        add(&mut pieces, piece.start, piece.len / bytes, bytes);
    }
    pieces
}

const _: () = assert!(RUN.is_multiple_of(PAGE_BYTES), "runs and calls make whole units, whatever they are of");

#[cfg(test)]
mod tests {
    //! Guards against an answer that is believed though it cannot be, and against runs that are cut wrong.
    use super::*;

    #[test]
    fn groups_have_each_run_once_and_believe_no_more_than_there_is() {
        let run = 3 * RUN;
        let len = run * (Merge::MOST + 2) + 5;
        let groups: Vec<MergeGroup> =
            (0..len).step_by(run * Merge::MOST).map(|start| MergeGroup::new(start, len, run)).collect();
        let lens: Vec<usize> = groups.iter().map(|group| group.runs.len()).collect();
        assert_eq!(lens, [Merge::MOST, 3]);
        assert!(groups.iter().flat_map(|group| &group.runs).map(Range::len).sum::<usize>() == len);
        let mut group = MergeGroup::new(0, 2 * CALL_ELEMENTS + 7, CALL_ELEMENTS);
        let all = CALL_ELEMENTS as u64;
        for wrong in
            [vec![], vec![all], vec![all, 0, 1], vec![all + 1, 0, 0], vec![u64::MAX, all + 1, 0], vec![all - 8, 0, 8]]
        {
            assert_eq!(MergeGroup::new(0, 2 * CALL_ELEMENTS + 7, CALL_ELEMENTS).took(&wrong), None, "{wrong:?}");
        }
        for right in [[all - 7, 0, 7], [7, all - 7, 0], [0, 7, 0]] {
            assert_eq!(group.took(&right), Some(()), "{right:?}");
        }
        assert!(group.places.is_empty() && group.runs.iter().all(Range::is_empty));
    }
}
