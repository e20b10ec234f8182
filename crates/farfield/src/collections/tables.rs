//! Group-by push-down: counting values, and aggregating numbers by the values of other columns,
//! where they are.

use super::columns::{ColumnKernel, ColumnTable, Conditions, KeyColumn, Keys, RowImages, RowReply, named};
use super::formula::FormulaInput;
use super::{FarVec, Formula};
use crate::Heap;
use crate::heap::Scope;
use crate::offload::OffloadError;
use core::marker::PhantomData;
use core::ops::{Range, RangeBounds};
use farfield_wic::columns::{
    self, Compute, Computed, FormulaMachine, FormulaStep, Group, Grouped, Groups, Tallied, Tallies, Tally, VALUES_MAX,
    is_computable,
};
use farfield_wic::{CallError, Number, Part, Where};
use std::collections::VecDeque;

/// Default limit of the number of different keys in an answer. The memory of an answer is not part
/// of the heap's near memory.
const MOST: usize = 1 << 20;

impl Heap {
    /// Counts how often each value of a column of numbers occurs, or each combination of values of
    /// several columns of equal length (see [`Keys`]). Far rows are counted where they are, as in
    /// [`FarVec::aggregate`].
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let (mut vendors, mut passengers) = (FarVec::new(), FarVec::new());
    /// vendors.extend(&heap.enter(), [2u8, 1, 2, 2])?;
    /// passengers.extend(&heap.enter(), [1i32, 1, 4, 1])?;
    /// assert_eq!(heap.tally(&vendors).run()?, [(1, 1), (2, 3)]);
    /// assert_eq!(heap.tally((&vendors, &passengers)).run()?, [((1, 1), 1), ((2, 1), 2), ((2, 4), 1)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Values are compared and ordered by their bits: −0 comes before +0, and NaN before or behind
    /// all others.
    ///
    /// # Panics
    /// If the columns do not have equally many numbers, or there is no column.
    #[track_caller]
    pub fn tally<'v, K: Keys<'v>>(&'v self, keys: K) -> Tallying<'v, K> {
        Tallying {
            table: ColumnTable::new(self, keys.columns()),
            conditions: Conditions::default(),
            most: MOST,
            keys: PhantomData,
        }
    }

    /// Computes number, sum, smallest, largest and mean of the numbers of a column, for each value
    /// of another column (group by). A key can have the values of several columns (see [`Keys`]).
    /// With `()` as key, all rows are one group.
    ///
    /// [Conditions](Grouping::within) select rows. The numbers are added up where they are: rows of
    /// which all columns are far, at the server.
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let (mut vendors, mut fares) = (FarVec::new(), FarVec::new());
    /// vendors.extend(&heap.enter(), [2u8, 1, 2])?;
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25])?;
    /// let by_vendor = heap.group(&vendors, &fares).run()?;
    /// let sums: Vec<_> = by_vendor.iter().map(|(vendor, fares)| (*vendor, fares.sum())).collect();
    /// assert_eq!(sums, [(1, 12.0), (2, 10.75)]);
    /// let of_vendor_2 = heap.group((), &fares).within(&vendors, 2..=2).run()?;
    /// assert_eq!(of_vendor_2[0].1.max(), Some(7.5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Keys are as in [`Heap::tally`], sums as in [`FarVec::aggregate`]. Several columns of numbers
    /// are [aggregated in one pass](Grouping::and). Instead of a column, a [`Formula`] over several
    /// columns can be aggregated.
    ///
    /// # Panics
    /// If the columns do not have equally many numbers, or there is no column.
    #[track_caller]
    pub fn group<'v, K: Keys<'v>, N: Number>(
        &'v self,
        keys: K,
        values: impl Into<Formula<'v, N>>,
    ) -> Grouping<'v, K, N> {
        let (mut columns, values) = (keys.columns(), values.into());
        columns.extend(values.columns());
        let (table, conditions) = (ColumnTable::new(self, columns), Conditions::default());
        Grouping { table, values: vec![values], conditions, most: MOST, keys: PhantomData }
    }
}

/// A count of values, not computed yet. See [`Heap::tally`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Tallying<'v, K: Keys<'v>> {
    table: ColumnTable<'v>,
    conditions: Conditions<'v>,
    most: usize,
    keys: PhantomData<K>,
}

impl<'v, K: Keys<'v>> Tallying<'v, K> {
    /// Restricts the count to the rows with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.table.over(range);
        self
    }

    /// Restricts the count to rows with a number of this range in another column of equal length.
    /// Several conditions must all hold. Numbers are ordered as keys are: by their bits.
    ///
    /// # Panics
    /// If the column does not have equally many numbers, or there are more than
    /// [`CONDITIONS_MAX`](super::CONDITIONS_MAX) conditions.
    #[track_caller]
    pub fn within<M: Number>(mut self, column: &'v FarVec<M>, values: impl RangeBounds<M>) -> Self {
        self.conditions.within(&mut self.table, column, values);
        self
    }

    /// Restricts the count to rows whose bit in these words is set, the lowest bit of each word
    /// first. This is a condition as [`within`](Self::within).
    ///
    /// # Panics
    /// If there are fewer bits than rows, or there are too many conditions.
    #[track_caller]
    pub fn marked(mut self, words: &'v FarVec<u64>) -> Self {
        self.conditions.marked(&mut self.table, words);
        self
    }

    /// Sets the largest number of different values. More are an error ([`OffloadError::TooMany`]).
    /// Default: a million (2²⁰).
    pub fn most(mut self, most: usize) -> Self {
        self.most = most;
        self
    }

    /// Sets where the values are counted: see [`Aggregate::at`](super::Aggregate::at).
    pub fn at(mut self, at: Where) -> Self {
        self.table.at = at;
        self
    }

    /// Counts the values, and waits. Returns each value and how often it occurs, the smallest value
    /// first.
    pub fn run(self) -> Result<Vec<(K::Key, u64)>, OffloadError> {
        let Tallying { table, conditions, most, .. } = self;
        let keys = table.columns[..table.columns.len() - conditions.len()].to_vec();
        let mut count = TallyKernel::new(keys, conditions, most);
        table.run(&mut count)?;
        let TallyKernel { near, mut others, .. } = count;
        others.merge(near.finish());
        check(others.counts.len(), most)?;
        Ok(others.counts.into_iter().map(|(key, count)| (K::key(key), count)).collect())
    }
}

/// Counting of values in a table that has the keys' columns first, then those of conditions.
struct TallyKernel<'v> {
    keys: Vec<KeyColumn<'v>>,
    conditions: Conditions<'v>,
    images: RowImages,
    /// Counts of rows that this thread has processed here.
    near: columns::Tallying,
    /// Counts from servers and other threads.
    others: Tallies,
    most: usize,
}

impl<'v> TallyKernel<'v> {
    fn new(keys: Vec<KeyColumn<'v>>, conditions: Conditions<'v>, most: usize) -> TallyKernel<'v> {
        let (near, others) = (columns::Tallying::default(), Tallies::default());
        TallyKernel { keys, conditions, images: RowImages::default(), near, others, most }
    }
}

impl RowReply for Tallies {
    fn rows(&self) -> Option<u64> {
        Some(self.rows)
    }
}

impl ColumnKernel for TallyKernel<'_> {
    type Function = Tally;

    fn fork(&self) -> Self {
        TallyKernel::new(self.keys.clone(), self.conditions.clone(), self.most)
    }

    fn merge(&mut self, other: Self) -> Result<(), OffloadError> {
        self.others.merge(other.near.finish());
        check(self.others.counts.len(), self.most)
    }

    fn argument(&self, mut pieces: Vec<Vec<farfield_wic::Range>>) -> Tallied {
        let conditions = self.conditions.named(pieces.split_off(self.keys.len()));
        Tallied { keys: named(&self.keys, pieces), conditions }
    }

    fn merge_answer(&mut self, _rows: &VecDeque<Range<usize>>, answer: Tallies) -> Result<(), OffloadError> {
        self.others.merge(answer);
        check(self.others.counts.len(), self.most)
    }

    fn process(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError> {
        let rows = self.images.read(scope, &self.keys, &self.conditions, rows)?;
        let is_all = self.near.add_all(&rows, self.most);
        if is_all { Ok(()) } else { Err(OffloadError::TooMany { most: self.most }) }
    }
}

fn check(keys: usize, most: usize) -> Result<(), OffloadError> {
    if keys > most { Err(OffloadError::TooMany { most }) } else { Ok(()) }
}

/// Keys, the smallest first, and the aggregates of their numbers.
pub type ByKey<K, N> = Vec<(K, Part<N>)>;

/// Keys, the smallest first, and the aggregates of their numbers in each column.
pub type AllByKey<K, N> = Vec<(K, Vec<Part<N>>)>;

/// Aggregates by key, not computed yet. See [`Heap::group`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Grouping<'v, K: Keys<'v>, N: Number> {
    table: ColumnTable<'v>,
    values: Vec<Formula<'v, N>>,
    conditions: Conditions<'v>,
    most: usize,
    keys: PhantomData<K>,
}

impl<'v, K: Keys<'v>, N: Number> Grouping<'v, K, N> {
    /// Aggregates this column or formula, too, in the same pass: the keys are looked up once for all of
    /// them. See [`run_all`](Self::run_all).
    ///
    /// # Panics
    /// If a column does not have equally many numbers, or there are more than
    /// [`VALUES_MAX`](super::VALUES_MAX) columns and formulas.
    #[track_caller]
    pub fn and(mut self, values: impl Into<Formula<'v, N>>) -> Self {
        assert!(self.values.len() < VALUES_MAX, "at most {VALUES_MAX} columns are aggregated in one pass");
        let values = values.into();
        values.columns().for_each(|column| self.table.push(column));
        // Columns of conditions come last.
        let (columns, conditions) = (values.columns().len(), self.conditions.len());
        let end = self.table.columns.len();
        self.table.columns[end - columns - conditions..].rotate_right(columns);
        self.values.push(values);
        self
    }

    /// Restricts the aggregates to the rows with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.table.over(range);
        self
    }

    /// Restricts the aggregates to rows with a number of this range in another column of equal
    /// length. Several conditions must all hold. Numbers are ordered as keys are: by their bits.
    ///
    /// # Panics
    /// If the column does not have equally many numbers, or there are more than
    /// [`CONDITIONS_MAX`](super::CONDITIONS_MAX) conditions.
    #[track_caller]
    pub fn within<M: Number>(mut self, column: &'v FarVec<M>, values: impl RangeBounds<M>) -> Self {
        self.conditions.within(&mut self.table, column, values);
        self
    }

    /// Restricts the aggregates to rows whose bit in these words is set, the lowest bit of each
    /// word first. This is a condition as [`within`](Self::within).
    ///
    /// # Panics
    /// If there are fewer bits than rows, or there are too many conditions.
    #[track_caller]
    pub fn marked(mut self, words: &'v FarVec<u64>) -> Self {
        self.conditions.marked(&mut self.table, words);
        self
    }

    /// Sets the largest number of different keys. More are an error ([`OffloadError::TooMany`]).
    /// Default: a million (2²⁰).
    pub fn most(mut self, most: usize) -> Self {
        self.most = most;
        self
    }

    /// Sets where the aggregates are computed: see [`Aggregate::at`](super::Aggregate::at).
    pub fn at(mut self, at: Where) -> Self {
        self.table.at = at;
        self
    }

    /// Computes the aggregates of the first column, and waits. Returns them by key, the smallest key
    /// first.
    pub fn run(self) -> Result<ByKey<K::Key, N>, OffloadError> {
        let first = |(key, mut parts): (_, Vec<Part<N>>)| Some((key, parts.drain(..).next()?));
        Ok(self.run_all()?.into_iter().filter_map(first).collect())
    }

    /// Computes the aggregates of all columns, and waits. Returns them by key, the smallest key first,
    /// those of a key in the order in which the columns were named.
    ///
    /// ```
    /// # use farfield::{FarVec, Heap};
    /// # let heap = Heap::builder().near(16 << 20).build()?;
    /// let (mut vendors, mut fares, mut tips) = (FarVec::new(), FarVec::new(), FarVec::new());
    /// vendors.extend(&heap.enter(), [2u8, 1, 2])?;
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25])?;
    /// tips.extend(&heap.enter(), [0.5, 0.0, 1.5])?;
    /// let by_vendor = heap.group(&vendors, &fares).and(&tips).run_all()?;
    /// assert_eq!((by_vendor[1].1[0].sum(), by_vendor[1].1[1].sum()), (10.75, 2.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn run_all(self) -> Result<AllByKey<K::Key, N>, OffloadError> {
        let Grouping { mut table, values, conditions, most, .. } = self;
        let columns: usize = values.iter().map(|values| values.columns().len()).sum();
        let keys = table.columns[..table.columns.len() - columns - conditions.len()].to_vec();
        let plain: Option<Vec<_>> = values.iter().map(Formula::plain).collect();
        let groups = if let Some(plain) = plain {
            let mut sums = GroupKernel::new(keys, plain, conditions, most);
            table.run(&mut sums)?;
            sums.others.merge(&sums.near.finish());
            sums.others.groups
        } else {
            let mut inputs = Vec::new();
            let formulas: Vec<_> = values.iter().map(|values| values.steps(&mut inputs)).collect();
            // Each input is read once, however many formulas it is in.
            table.columns.splice(keys.len()..keys.len() + columns, inputs.iter().map(|input| input.column));
            if !is_computable(formulas.iter().map(Vec::as_slice), inputs.len()) {
                table.at = match table.at {
                    Where::Server => return Err(CallError::Nowhere.into()),
                    _ => Where::Client,
                };
            }
            let mut sums = ComputeKernel::new(keys, inputs, formulas, conditions, most);
            table.run(&mut sums)?;
            sums.others.merge(&sums.near.finish());
            sums.others.groups
        };
        check(groups.len(), most)?;
        Ok(groups.into_iter().map(|(key, parts)| (K::key(key), parts)).collect())
    }
}

/// Aggregation in a table that has the keys' columns first, then the values', then those of
/// conditions.
struct GroupKernel<'v, N: Number> {
    keys: Vec<KeyColumn<'v>>,
    values: Vec<&'v FarVec<N>>,
    conditions: Conditions<'v>,
    images: RowImages,
    /// Groups of rows that this thread has processed here.
    near: columns::Grouping<N>,
    /// Groups from servers and other threads.
    others: Groups<N>,
    most: usize,
}

impl<'v, N: Number> GroupKernel<'v, N> {
    fn new(
        keys: Vec<KeyColumn<'v>>,
        values: Vec<&'v FarVec<N>>,
        conditions: Conditions<'v>,
        most: usize,
    ) -> GroupKernel<'v, N> {
        let (near, others) = (columns::Grouping::new(values.len()), Groups::default());
        GroupKernel { keys, values, conditions, images: RowImages::default(), near, others, most }
    }
}

impl<N: Number> RowReply for Groups<N> {
    fn rows(&self) -> Option<u64> {
        Some(self.rows)
    }
}

impl<N: Number> ColumnKernel for GroupKernel<'_, N> {
    type Function = Group<N>;

    fn fork(&self) -> Self {
        GroupKernel::new(self.keys.clone(), self.values.clone(), self.conditions.clone(), self.most)
    }

    fn merge(&mut self, other: Self) -> Result<(), OffloadError> {
        self.others.merge(&other.near.finish());
        check(self.others.groups.len(), self.most)
    }

    fn argument(&self, mut pieces: Vec<Vec<farfield_wic::Range>>) -> Grouped {
        let conditions = self.conditions.named(pieces.split_off(self.keys.len() + self.values.len()));
        let values = pieces.split_off(self.keys.len());
        Grouped { keys: named(&self.keys, pieces), values, conditions }
    }

    fn fits(&self, answer: &Groups<N>) -> bool {
        answer.has_columns(self.values.len())
    }

    fn merge_answer(&mut self, _rows: &VecDeque<Range<usize>>, answer: Groups<N>) -> Result<(), OffloadError> {
        self.others.merge(&answer);
        check(self.others.groups.len(), self.most)
    }

    fn process(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError> {
        let images = self.images.read(scope, &self.keys, &self.conditions, rows.clone())?;
        // The rows lie in one unit of each column, so they are one slice.
        let mut values: Vec<&[N]> = Vec::with_capacity(self.values.len());
        for column in &self.values {
            values.push(column.chunks_in(scope, rows.clone()).next().transpose()?.unwrap_or_default());
        }
        match self.near.add_all(&images, values.into_iter(), self.most) {
            true => Ok(()),
            false => Err(OffloadError::TooMany { most: self.most }),
        }
    }
}

/// Aggregation of formulas, in a table that has the keys' columns first, then the inputs', then those of
/// conditions.
struct ComputeKernel<'v, N: Number> {
    keys: Vec<KeyColumn<'v>>,
    inputs: Vec<FormulaInput<'v, N>>,
    formulas: Vec<Vec<FormulaStep>>,
    conditions: Conditions<'v>,
    images: RowImages,
    machine: FormulaMachine<N>,
    /// Groups of rows that this thread has processed here.
    near: columns::Grouping<N>,
    /// Groups from servers and other threads.
    others: Groups<N>,
    most: usize,
}

impl<'v, N: Number> ComputeKernel<'v, N> {
    fn new(
        keys: Vec<KeyColumn<'v>>,
        inputs: Vec<FormulaInput<'v, N>>,
        formulas: Vec<Vec<FormulaStep>>,
        conditions: Conditions<'v>,
        most: usize,
    ) -> ComputeKernel<'v, N> {
        let machine = FormulaMachine::new(inputs.len(), formulas.len());
        let (near, others) = (columns::Grouping::new(formulas.len()), Groups::default());
        ComputeKernel { keys, inputs, formulas, conditions, images: RowImages::default(), machine, near, others, most }
    }
}

impl<N: Number> ColumnKernel for ComputeKernel<'_, N> {
    type Function = Compute<N>;

    fn fork(&self) -> Self {
        let (keys, inputs) = (self.keys.clone(), self.inputs.clone());
        ComputeKernel::new(keys, inputs, self.formulas.clone(), self.conditions.clone(), self.most)
    }

    fn merge(&mut self, other: Self) -> Result<(), OffloadError> {
        self.others.merge(&other.near.finish());
        check(self.others.groups.len(), self.most)
    }

    fn argument(&self, mut pieces: Vec<Vec<farfield_wic::Range>>) -> Computed {
        let conditions = self.conditions.named(pieces.split_off(self.keys.len() + self.inputs.len()));
        let columns: Vec<KeyColumn<'_>> = self.inputs.iter().map(|input| input.column).collect();
        let inputs = named(&columns, pieces.split_off(self.keys.len()));
        Computed { keys: named(&self.keys, pieces), inputs, formulas: self.formulas.clone(), conditions }
    }

    fn fits(&self, answer: &Groups<N>) -> bool {
        answer.has_columns(self.formulas.len())
    }

    fn merge_answer(&mut self, _rows: &VecDeque<Range<usize>>, answer: Groups<N>) -> Result<(), OffloadError> {
        self.others.merge(&answer);
        check(self.others.groups.len(), self.most)
    }

    fn process(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError> {
        let mut images = Vec::with_capacity(rows.len());
        for (index, input) in self.inputs.iter().enumerate() {
            input.read(scope, rows.clone(), &mut images, (&mut self.machine, index))?;
        }
        self.machine.compute(self.formulas.iter().map(Vec::as_slice), rows.len());
        let images = self.images.read(scope, &self.keys, &self.conditions, rows)?;
        match self.near.add_all(&images, self.machine.results(), self.most) {
            true => Ok(()),
            false => Err(OffloadError::TooMany { most: self.most }),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against answers of servers with other columns than were asked for.
    use super::*;

    #[test]
    fn groups_have_a_result_for_each_column() {
        let (fares, tips) = (FarVec::<u64>::new(), FarVec::new());
        let kernel = GroupKernel::new(Vec::new(), vec![&fares, &tips], Conditions::default(), MOST);
        let answer = |columns: &[usize]| {
            let parts = columns.iter().map(|count| vec![Part::default(); *count]);
            Groups { groups: (0..).map(|key| [key; 8]).zip(parts).collect(), rows: 1 }
        };
        assert!(kernel.fits(&answer(&[])) && kernel.fits(&answer(&[2, 2])));
        for wrong in [[2, 1], [2, 3], [0, 2]] {
            assert!(!kernel.fits(&answer(&wrong)), "{wrong:?}");
        }
    }
}
