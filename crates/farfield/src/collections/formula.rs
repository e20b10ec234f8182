//! Formulas over columns: what is computed of the numbers of a row, where they are.

use super::FarVec;
use super::columns::KeyColumn;
use crate::error::FarError;
use crate::heap::Scope;
use core::any::Any;
use core::fmt::Debug;
use core::ops::{Add, Mul, Range, Sub};
use farfield_wic::Number;
use farfield_wic::columns::{Cell, FormulaMachine, FormulaStep};

/// A number that is computed of those of a row, from columns of equal length:
/// [`Heap::group`](crate::Heap::group) aggregates it, without a column for it.
///
/// A formula is a column, a constant, or the sum, difference or product of two formulas. All of it is
/// computed in the type `N`; columns of other types are [converted](Formula::of). Whole numbers wrap around.
///
/// ```
/// use farfield::{FarVec, Formula, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let (mut pieces, mut prices, mut discounts) = (FarVec::new(), FarVec::new(), FarVec::new());
/// pieces.extend(&heap.enter(), [3u32, 1, 2])?;
/// prices.extend(&heap.enter(), [10.0, 4.0, 2.5])?;
/// discounts.extend(&heap.enter(), [0.5, 0.0, 0.25])?;
/// let paid = Formula::of(&pieces) * &prices * (Formula::constant(1.0) - &discounts);
/// let revenue = heap.group((), paid).run()?;
/// assert_eq!(revenue[0].1.sum(), 15.0 + 4.0 + 3.75);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Formula<'v, N: Number> {
    /// Columns, by the number that steps give them.
    inputs: Vec<FormulaInput<'v, N>>,
    steps: Vec<FormulaStep>,
}

/// A column with which a formula computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct FormulaInput<'v, N: Number> {
    pub(super) column: KeyColumn<'v>,
    /// The column, if its numbers have the type in which is computed.
    own: Option<&'v FarVec<N>>,
}

impl<N: Number> FormulaInput<'_, N> {
    /// Reads the numbers of rows of one unit, as an input of the machine. `images` is a buffer.
    pub(super) fn read(
        &self,
        scope: &Scope<'_>,
        rows: Range<usize>,
        images: &mut Vec<u64>,
        (machine, index): (&mut FormulaMachine<N>, usize),
    ) -> Result<(), FarError> {
        if let Some(own) = self.own {
            let numbers = machine.input(index);
            for chunk in own.chunks_in(scope, rows) {
                numbers.extend_from_slice(chunk?);
            }
            return Ok(());
        }
        let Cell::Number(kind) = self.column.any().cell() else { unreachable!("formulas are made of numbers") };
        self.column.any().images(scope, rows, images)?;
        N::cast_images(kind, images, machine.input(index));
        Ok(())
    }
}

impl<N: Number> Debug for Formula<'_, N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Formula({:?} of {} columns)", self.steps, self.inputs.len())
    }
}

impl<'v, N: Number> From<&'v FarVec<N>> for Formula<'v, N> {
    fn from(column: &'v FarVec<N>) -> Formula<'v, N> {
        Formula::of(column)
    }
}

impl<'v, N: Number> Formula<'v, N> {
    /// Makes a formula of the numbers of a column, converted as by `as`: whole numbers keep their lowest
    /// bits, and floating-point numbers become the nearest whole number towards 0 that there is.
    pub fn of<M: Number>(column: &'v FarVec<M>) -> Formula<'v, N> {
        let own = (column as &'v dyn Any).downcast_ref();
        Formula { inputs: vec![FormulaInput { column: column.into(), own }], steps: vec![FormulaStep::Input(0)] }
    }

    /// Makes a formula of the same number for all rows.
    pub fn constant(number: N) -> Formula<'v, N> {
        Formula { inputs: Vec::new(), steps: vec![FormulaStep::Constant(number.image())] }
    }

    pub(super) fn columns(&self) -> impl ExactSizeIterator<Item = KeyColumn<'v>> {
        self.inputs.iter().map(|input| input.column)
    }

    /// Returns the column, if the formula is nothing but one of numbers of its own type.
    pub(super) fn plain(&self) -> Option<&'v FarVec<N>> {
        if let [FormulaStep::Input(0)] = self.steps[..] { self.inputs[0].own } else { None }
    }

    /// Returns the steps of the formula. Its columns are among `inputs` afterwards, which the steps name.
    pub(super) fn steps(&self, inputs: &mut Vec<FormulaInput<'v, N>>) -> Vec<FormulaStep> {
        let place = |input: &FormulaInput<'v, N>| {
            let known = inputs.iter().position(|known| core::ptr::addr_eq(known.column.any(), input.column.any()));
            known.unwrap_or_else(|| {
                inputs.push(*input);
                inputs.len() - 1
            })
        };
        let places: Vec<usize> = self.inputs.iter().map(place).collect();
        let renamed = |step: &FormulaStep| match step {
            FormulaStep::Input(input) => FormulaStep::Input(places[*input as usize] as u32),
            other => *other,
        };
        self.steps.iter().map(renamed).collect()
    }

    /// Makes the formula of two others.
    fn join(mut self, other: Formula<'v, N>, operation: FormulaStep) -> Formula<'v, N> {
        self.steps.extend(other.steps(&mut self.inputs));
        self.steps.push(operation);
        self
    }
}

impl<'v, N: Number, O: Into<Formula<'v, N>>> Add<O> for Formula<'v, N> {
    type Output = Formula<'v, N>;

    fn add(self, other: O) -> Formula<'v, N> {
        self.join(other.into(), FormulaStep::Add)
    }
}

impl<'v, N: Number, O: Into<Formula<'v, N>>> Sub<O> for Formula<'v, N> {
    type Output = Formula<'v, N>;

    fn sub(self, other: O) -> Formula<'v, N> {
        self.join(other.into(), FormulaStep::Subtract)
    }
}

impl<'v, N: Number, O: Into<Formula<'v, N>>> Mul<O> for Formula<'v, N> {
    type Output = Formula<'v, N>;

    fn mul(self, other: O) -> Formula<'v, N> {
        self.join(other.into(), FormulaStep::Multiply)
    }
}
