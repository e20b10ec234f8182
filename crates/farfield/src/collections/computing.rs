//! Columns of what formulas make of rows, computed where the rows are: no byte of a far page goes over
//! the network.

use super::columns::{KeyColumn, named};
use super::formula::FormulaInput;
use super::output_units::OutputUnits;
use super::paged::Paged;
use super::vec::FEW_UNITS;
use super::{FarVec, Formula, range_of};
use crate::Heap;
use crate::error::FarError;
use crate::offload::{CHANNELS, OffloadError};
use core::ops::{Range, RangeBounds};
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::columns::{ComputeColumn, ComputedColumn, FormulaMachine, FormulaStep, is_computable};
use farfield_wic::{CallError, Number, Where};

/// Pages that one call makes, at most: with this many, it takes some milliseconds.
const CALL_PAGES: usize = 512;
/// Pieces of one call, at most.
const CALL_PIECES: usize = 1024;

impl Heap {
    /// Computes a column: what a formula makes of the numbers of each row, in the formula's type. Rows whose
    /// columns are far are computed where they are, if the pool runs functions: one memory server, or a
    /// mirror of such. Their results are far, too.
    ///
    /// ```
    /// use farfield::{FarVec, Formula, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let (mut fares, mut tips) = (FarVec::new(), FarVec::new());
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25])?;
    /// tips.extend(&heap.enter(), [0.5, 0.0, 1.0])?;
    /// let paid = heap.compute(Formula::of(&fares) + &tips).run()?;
    /// assert_eq!(paid.read(2, f64::clone)?, Some(4.25));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    /// If the columns do not have equally many numbers, or there is no column.
    #[track_caller]
    pub fn compute<'v, N: Number>(&'v self, formula: impl Into<Formula<'v, N>>) -> Computing<'v, N> {
        let mut inputs = Vec::new();
        let formula = formula.into().steps(&mut inputs);
        let rows = inputs.first().expect("a formula has columns").column.any().rows();
        let is_even = inputs.iter().all(|input| input.column.any().rows() == rows);
        assert!(is_even, "columns of a formula have equal lengths");
        Computing { heap: self, inputs, formula, rows: 0..rows, at: Where::Auto }
    }
}

/// A column that is not computed yet. See [`Heap::compute`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Computing<'v, N: Number> {
    heap: &'v Heap,
    inputs: Vec<FormulaInput<'v, N>>,
    formula: Vec<FormulaStep>,
    rows: Range<usize>,
    at: Where,
}

impl<N: Number> Computing<'_, N> {
    /// Restricts the column to the rows with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[track_caller]
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.rows = range_of(range, self.rows.end);
        self
    }

    /// Sets where the column is computed, as [`Copying::at`](super::Copying::at) does for a copy.
    pub fn at(mut self, at: Where) -> Self {
        self.at = at;
        self
    }

    /// Computes the column, and waits for it.
    pub fn run(self) -> Result<FarVec<N>, OffloadError> {
        if self.rows.is_empty() {
            return Ok(FarVec::new());
        }
        let core = self.heap.core();
        if self.inputs.iter().any(|input| input.column.any().heap() != Some(core::ptr::from_ref(core))) {
            return Err(FarError::OtherHeap.into());
        }
        let is_computable = is_computable(core::iter::once(&self.formula[..]), self.inputs.len());
        let units = self.rows.len().div_ceil(Paged::<N>::PER_UNIT);
        let mut output = match self.at {
            Where::Server if !is_computable => return Err(CallError::Nowhere.into()),
            Where::Server => {
                self.heap
                    .write_back(self.inputs.iter().flat_map(|input| input.column.any().ranges(self.rows.clone())))?;
                let mut output = OutputUnits::claim(core, units)?;
                self.ask_server(&mut output, 0..units)?;
                output
            }
            Where::Auto if is_computable && core.may_offload::<ComputeColumn<N>>() => {
                let far: Vec<usize> = (0..units).filter(|unit| self.is_far(*unit)).collect();
                let mut output = OutputUnits::claim(core, units)?;
                if far.len() > FEW_UNITS && self.ask_server(&mut output, far.into_iter()).is_err() {
                    output.renew_if_lost()?;
                }
                output
            }
            _ => OutputUnits::claim(core, units)?,
        };
        self.make_here(&mut output)?;
        Ok(FarVec::from_units(output.finish(), self.rows.len()))
    }

    /// Returns the rows of which a unit of the column is made.
    fn rows_of(&self, unit: usize) -> Range<usize> {
        let first = self.rows.start + unit * Paged::<N>::PER_UNIT;
        first..self.rows.end.min(first + Paged::<N>::PER_UNIT)
    }

    /// Checks whether all of these rows are far, in all columns.
    fn is_far(&self, unit: usize) -> bool {
        let rows = self.rows_of(unit);
        let is_far = |input: &FormulaInput<'_, N>| {
            let (column, per_unit) = (input.column.any(), input.column.any().per_unit());
            (rows.start / per_unit..rows.end.div_ceil(per_unit)).all(|unit| column.is_far(unit))
        };
        self.inputs.iter().all(is_far)
    }

    fn ask_server(
        &self,
        output: &mut OutputUnits<'_, N>,
        units: impl Iterator<Item = usize>,
    ) -> Result<(), OffloadError> {
        let units: Vec<usize> = units.collect();
        let columns: Vec<KeyColumn<'_>> = self.inputs.iter().map(|input| input.column).collect();
        // Calls that are under way together end together.
        let share = units.len().div_ceil(CHANNELS).min(CALL_PAGES);
        let (mut calls, mut rest) = (Vec::new(), &units[..]);
        while !rest.is_empty() {
            let mut made: Vec<Range<usize>> = Vec::new();
            let mut pieces = vec![Vec::new(); self.inputs.len()];
            let (mut pages, mut count) = (0, 0);
            while let Some((unit, others)) = rest.split_first()
                && pages < share
                && count < CALL_PIECES
            {
                match made.last_mut() {
                    Some(last) if last.end == *unit => last.end += 1,
                    _ => made.push(*unit..unit + 1),
                }
                for (column, pieces) in columns.iter().zip(&mut pieces) {
                    column.any().add_pieces(self.rows_of(*unit), pieces);
                }
                (pages, rest) = (pages + 1, others);
                count = made.len() + pieces.iter().map(Vec::len).sum::<usize>();
            }
            let mut to = Vec::new();
            for page in made.iter().flat_map(|units| output.pages(units.clone())) {
                super::vec::add(&mut to, page.offset, page.count, PAGE_BYTES as u64);
            }
            let inputs = named(&columns, pieces);
            calls.push((made, ComputedColumn { inputs, formula: self.formula.clone(), to }));
            if calls.len() == CHANNELS || rest.is_empty() {
                output.ask::<ComputeColumn<N>>(core::mem::take(&mut calls))?;
            }
        }
        Ok(())
    }

    /// Makes the units that the server has not made.
    fn make_here(&self, output: &mut OutputUnits<'_, N>) -> Result<(), FarError> {
        let mut machine = FormulaMachine::<N>::new(self.inputs.len(), 1);
        let mut images = Vec::with_capacity(Paged::<N>::PER_UNIT);
        for unit in output.missing() {
            let (rows, scope) = (self.rows_of(unit), self.heap.enter());
            for (index, input) in self.inputs.iter().enumerate() {
                input.read(&scope, rows.clone(), &mut images, (&mut machine, index))?;
            }
            machine.compute(core::iter::once(&self.formula[..]), rows.len());
            let numbers = machine.results().next().unwrap_or_default();
            output.make_here(&scope, unit, numbers)?;
        }
        Ok(())
    }
}
