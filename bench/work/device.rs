//! The data frame of [`trips`](crate::trips) as a table of the program's own (AIFM: a remote device): its questions are functions of this
//! crate, which a `farfield-bench serve` has. Columns are still copied and put into another order by the library.

use crate::trips::{Far, Place, Totals};
use anyhow::{Context, Result, ensure};
use farfield::{FarFunction, FarVec, Where};
use farfield_bench::measures::{
    BINS, BinnedMeasures, CountBins, GroupedMeasures, MEASURES_MAX, MeasureRows, MeasureSummary, Measures, NO_MEASURES,
    SEARCH_ROWS, SearchLarger, Summarize, SummarizeGroups, merge,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Threads that ask, each about some of the rows: as many as the library uses for a question.
const THREADS: usize = 4;
/// Rows that lie in a page. Pieces begin at pages.
const PAGE_ROWS: u64 = 512;

/// A table, and where it is asked.
pub(crate) struct Device<'a> {
    far: Far<'a>,
    table: RefCell<Measures>,
    /// Columns that are in use.
    used: Cell<usize>,
}

/// A column, by its number.
pub(crate) struct DeviceColumn(usize);

impl<'a> Device<'a> {
    pub(crate) fn new(far: Far<'a>) -> Device<'a> {
        Device { far, table: RefCell::default(), used: Cell::new(0) }
    }

    /// Puts a column into the table.
    fn add(&self, numbers: FarVec<f64>) -> Result<DeviceColumn> {
        let number = self.used.replace(self.used.get() + 1);
        ensure!(number < MEASURES_MAX, "a table has at most {MEASURES_MAX} columns");
        self.table.borrow_mut().columns[number] = numbers;
        Ok(DeviceColumn(number))
    }

    /// Calls a function for parts of a column's rows, `most` of them at a time, from several threads. Returns the answers in order.
    fn ask<F>(
        &self,
        column: &DeviceColumn,
        most: u64,
        argument: impl Fn(MeasureRows) -> F::Argument + Sync,
    ) -> Result<Vec<F::Answer>>
    where
        F: FarFunction<Root = Measures>,
    {
        let table = self.table.borrow();
        let (heap, table) = (self.far.heap, &*table);
        let rows = table.columns[column.0].len() as u64;
        let share = rows.div_ceil(THREADS as u64).next_multiple_of(PAGE_ROWS).min(most).max(1);
        let parts: Vec<_> = (0..rows)
            .step_by(share as usize)
            .map(|from| MeasureRows { column: column.0 as u32, from, until: rows.min(from + share) })
            .collect();
        let each = parts.len().div_ceil(THREADS).max(1);
        let call = |rows: &MeasureRows| heap.call::<F>(table, argument(*rows)).at(Where::Server).run();
        let ask = |parts: &[MeasureRows]| parts.iter().map(&call).collect::<Result<Vec<_>, _>>();
        let ask = &ask;
        let mut answers = Vec::with_capacity(parts.len());
        std::thread::scope(|scope| {
            let threads: Vec<_> = parts.chunks(each).map(|parts| scope.spawn(move || ask(parts))).collect();
            for thread in threads {
                answers.extend(thread.join().expect("no call panics")?);
            }
            Ok(answers)
        })
    }

    fn groups(&self, keys: &DeviceColumn, measures: Option<&DeviceColumn>) -> Result<BTreeMap<u32, MeasureSummary>> {
        let measures = measures.map(|column| column.0 as u32);
        let mut groups = BTreeMap::new();
        for (key, summary) in
            self.ask::<SummarizeGroups>(keys, u64::MAX, |keys| GroupedMeasures { keys, measures })?.concat()
        {
            let group = groups.entry(key).or_insert(NO_MEASURES);
            *group = merge(*group, summary);
        }
        Ok(groups)
    }
}

impl Place for Device<'_> {
    type Numbers = DeviceColumn;
    type Order = FarVec<u64>;

    fn column(&self) -> Result<DeviceColumn> {
        self.add(FarVec::new())
    }

    fn push(&self, column: &mut DeviceColumn, values: &[f64]) -> Result<()> {
        self.far.push(&mut self.table.borrow_mut().columns[column.0], values)
    }

    fn order(&self, indices: &mut dyn Iterator<Item = u64>) -> Result<FarVec<u64>> {
        self.far.order(indices)
    }

    fn walk(&self, columns: [&DeviceColumn; 2], visit: &mut dyn FnMut(&[f64], &[f64])) -> Result<()> {
        let table = self.table.borrow();
        self.far.walk(columns.map(|column| &table.columns[column.0]), visit)
    }

    fn difference(&self, columns: [&DeviceColumn; 2]) -> Result<DeviceColumn> {
        let differences = {
            let table = self.table.borrow();
            self.far.difference(columns.map(|column| &table.columns[column.0]))?
        };
        self.add(differences)
    }

    fn copy(&self, column: &DeviceColumn) -> Result<DeviceColumn> {
        let copy = self.far.copy(&self.table.borrow().columns[column.0])?;
        self.add(copy)
    }

    fn take(&self, column: &DeviceColumn, order: &FarVec<u64>) -> Result<DeviceColumn> {
        let taken = self.far.take(&self.table.borrow().columns[column.0], order)?;
        self.add(taken)
    }

    fn totals(&self, column: &DeviceColumn) -> Result<Totals> {
        Ok(self.ask::<Summarize>(column, u64::MAX, |rows| rows)?.into_iter().fold(NO_MEASURES, merge))
    }

    fn tally(&self, column: &DeviceColumn) -> Result<Vec<(f64, u64)>> {
        Ok(self.groups(column, None)?.into_iter().map(|(key, [count, ..])| (f64::from(key), count as u64)).collect())
    }

    fn group(&self, keys: &DeviceColumn, values: &DeviceColumn) -> Result<Vec<(f64, Totals)>> {
        Ok(self.groups(keys, Some(values))?.into_iter().map(|(key, summary)| (f64::from(key), summary)).collect())
    }

    fn find(&self, column: &DeviceColumn, than: f64) -> Result<FarVec<u64>> {
        let parts = self.ask::<SearchLarger>(column, SEARCH_ROWS, |rows| (rows, than))?;
        let bytes = parts.iter().flatten().zip((0..).step_by(8));
        let rows = |(byte, first): (&u8, u64)| {
            let byte = *byte;
            (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| first + bit)
        };
        self.far.order(&mut bytes.flat_map(rows))
    }

    fn median(&self, column: &DeviceColumn) -> Result<f64> {
        let [count, _, least, most] = self.totals(column)?;
        let mut rank = (count as u64).saturating_sub(1) / 2;
        let mut low = least as i64;
        let mut shift = (u64::BITS - ((most as i64 - low) as u64 / BINS as u64).leading_zeros()).min(u64::BITS - 1);
        loop {
            let mut bins = [0; BINS];
            for part in self.ask::<CountBins>(column, u64::MAX, |rows| BinnedMeasures { rows, low, shift })? {
                bins.iter_mut().zip(part).for_each(|(bin, count)| *bin += count);
            }
            let bin = bins.iter().position(|count| {
                let is_there = rank < *count;
                rank -= if is_there { 0 } else { *count };
                is_there
            });
            low += (bin.context("the median lies between the smallest and the largest")? as i64) << shift;
            if shift == 0 {
                return Ok(low as f64);
            }
            shift = shift.saturating_sub(BINS.trailing_zeros());
        }
    }
}
