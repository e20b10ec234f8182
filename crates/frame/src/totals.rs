//! Aggregates and quantiles of a column of numbers, computed by the memory server where possible.

use crate::column::{FrameColumn, Values, is_decimal, with_numbers};
use crate::error::FrameError;
use crate::expression::Expression;
use crate::frame::FarFrame;
use crate::sums::Sums;
use arrow::array::{ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type};
use farfield::{FarVec, Heap, Number, OffloadError, Part};
use std::ops::{Bound, RangeBounds};

/// Count, sum, mean, minimum and maximum of the values of a column that are not null. They are
/// rounded to floating-point numbers if the column has another type.
///
/// NaN is counted, makes sum and mean NaN, and is neither minimum nor maximum.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Totals {
    /// Number of values that are not null.
    pub count: u64,
    /// Sum of the values.
    pub sum: f64,
    /// Mean of the values, `None` if there are none.
    pub mean: Option<f64>,
    /// Smallest value.
    pub min: Option<f64>,
    /// Largest value.
    pub max: Option<f64>,
}

/// A line of [`FarFrame::describe`].
#[derive(Clone, PartialEq, Debug)]
pub struct Summary {
    /// Name of the column.
    pub name: String,
    /// Type of the column.
    pub data_type: DataType,
    /// Number of rows without a value.
    pub nulls: u64,
    /// Aggregates, if the column has numbers.
    pub totals: Option<Totals>,
    /// Quartiles: a quarter, half and three quarters of the numbers are no larger than these.
    /// `None` if there are no numbers, or if they are decimal.
    pub quartiles: Option<[f64; 3]>,
}

impl FarFrame {
    /// Computes the aggregates of a column of numbers. If the memory server runs functions, the
    /// column is not brought near, unless it has nulls and also NaN or −0. Returns an error if the
    /// column holds no numbers.
    pub fn totals(&self, name: &str) -> Result<Totals, FrameError> {
        self.totals_in(name, ..)
    }

    /// Computes the aggregates of the values of a column that are in a range: of the rows that a
    /// filter by this range would keep. NaN is in no range but `..`.
    pub fn totals_in(&self, name: &str, values: impl RangeBounds<f64>) -> Result<Totals, FrameError> {
        let index = self.index(name)?;
        let data_type = self.schema().field(index).data_type().clone();
        if !data_type.is_numeric() {
            return Err(FrameError::Type { name: name.to_owned(), data_type });
        }
        let values = (values.start_bound().cloned(), values.end_bound().cloned());
        let column = &self.columns[index];
        if column.nulls() == 0
            && let Some(totals) = at_server(&self.heap, column, &values)?
        {
            return Ok(totals);
        }
        if values == (Bound::Unbounded, Bound::Unbounded)
            && let Some(Sums { count, sum, mean, ends }) = self.scan(&[])?.sums(name)?
        {
            let ends = ends.map(|ends| present(&ends)).transpose()?;
            let end = |index: usize| ends.as_ref().map(|ends| ends[index]);
            return Ok(Totals { count, sum: sum.rounded(), mean, min: end(0), max: end(1) });
        }
        let mut part = Part::default();
        for batch in self.batches_of(&[name])? {
            part.add_all(&present(batch?.column(0))?, &values);
        }
        Ok(totals_of(&part, part.sum(), |value| value))
    }

    /// Computes the aggregates of the values of an expression that are not null. Sums, differences and
    /// products of columns without nulls, one of which has floating-point numbers, are computed by the
    /// memory server, and no column is made of them. Returns an error if the values are no numbers.
    ///
    /// ```
    /// use farfield::Heap;
    /// use farfield_frame::{Expression, FarFrame, column};
    /// use std::sync::Arc;
    ///
    /// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let lines = FarFrame::from_csv_text(&heap, "price,discount\n10.5,0.5\n4.5,0.0\n")?;
    /// let revenue = lines.totals_of(&(column("price") * (Expression::from(1.0) - column("discount"))))?;
    /// assert_eq!(revenue.sum, 9.75);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn totals_of(&self, expression: &Expression) -> Result<Totals, FrameError> {
        let data_type = expression.data_type(&self.schema)?;
        if !data_type.is_numeric() {
            return Err(FrameError::Type { name: "the expression".to_owned(), data_type });
        }
        let names: Vec<&str> = expression.columns().into_iter().collect();
        if let Some(formula) = self.computable(expression)? {
            let part = self.heap.group((), formula).run()?.pop().map_or_else(Part::default, |((), part)| part);
            return Ok(totals_of(&part, part.sum(), |value| value));
        }
        let mut part = Part::default();
        for batch in self.batches_of(&names)? {
            part.add_all(&present(&expression.evaluate(&batch?)?)?, &(Bound::Unbounded, Bound::Unbounded));
        }
        Ok(totals_of(&part, part.sum(), |value| value))
    }

    /// Returns the smallest number of a column such that at least this share (0 to 1) of the values
    /// does not exceed it. Returns `None` if there are no values. Nulls and NaN are ignored. The
    /// memory server finds the number if it runs functions; a column with nulls is first copied
    /// without them. Returns an error if the column holds no numbers, or decimal ones.
    ///
    /// ```
    /// use farfield::Heap;
    /// use farfield_frame::FarFrame;
    /// use std::sync::Arc;
    ///
    /// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let trips = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n")?;
    /// assert_eq!(trips.quantile("fare", 0.5)?, Some(12.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn quantile(&self, name: &str, share: f64) -> Result<Option<f64>, FrameError> {
        Ok(self.quantiles(name, [share])?.map(|[value]| value))
    }

    fn quantiles<const N: usize>(&self, name: &str, shares: [f64; N]) -> Result<Option<[f64; N]>, FrameError> {
        let data_type = self.schema().field(self.index(name)?).data_type().clone();
        if !data_type.is_numeric() || is_decimal(&data_type) {
            return Err(FrameError::Type { name: name.to_owned(), data_type });
        }
        let present = self.select(&[name])?.present(1)?;
        let mut values = [0.0; N];
        for (value, share) in values.iter_mut().zip(shares) {
            let found = with_numbers!(&present.columns[0].values, numbers => ranked(&self.heap, numbers, share)?,
                Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => None);
            match found {
                Some(found) => *value = found,
                None => return Ok(None),
            }
        }
        Ok(Some(values))
    }

    /// Summarizes every column: nulls, aggregates of numbers, and their quartiles.
    pub fn describe(&self) -> Result<Vec<Summary>, FrameError> {
        let line = |(index, column): (usize, &std::sync::Arc<FrameColumn>)| {
            let (name, data_type) =
                (self.schema().field(index).name().clone(), self.schema().field(index).data_type().clone());
            let (totals, quartiles) = match data_type.is_numeric() {
                true if is_decimal(&data_type) => (Some(self.totals(&name)?), None),
                true => (Some(self.totals(&name)?), self.quantiles(&name, [0.25, 0.5, 0.75])?),
                false => (None, None),
            };
            Ok(Summary { name, data_type, nulls: column.nulls() as u64, totals, quartiles })
        };
        self.columns.iter().enumerate().map(line).collect()
    }
}

/// Returns the values that are not null, as floating-point numbers.
fn present(array: &ArrayRef) -> Result<Vec<f64>, FrameError> {
    Ok(cast(array, &DataType::Float64)?.as_primitive::<Float64Type>().iter().flatten().collect())
}

/// Computes the aggregates at the memory server. Returns `None` if the range has bounds and the
/// column does not hold `f64`: then values have to be compared one by one.
fn at_server(
    heap: &Heap,
    column: &FrameColumn,
    values: &(Bound<f64>, Bound<f64>),
) -> Result<Option<Totals>, OffloadError> {
    if let Values::F64(numbers) = &column.values {
        let part = numbers.aggregate(heap).filter(*values).run()?;
        return Ok(Some(totals_of(&part, part.sum(), |value| value)));
    }
    if *values != (Bound::Unbounded, Bound::Unbounded) {
        return Ok(None);
    }
    with_numbers!(&column.values, numbers => whole(heap, numbers).map(Some),
        Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => Ok(None))
}

fn ranked<N: Number + Rounded>(heap: &Heap, numbers: &FarVec<N>, share: f64) -> Result<Option<f64>, OffloadError> {
    Ok(numbers.ranks(heap).quantile(share)?.map(N::rounded))
}

fn whole<N: Number + Rounded>(heap: &Heap, numbers: &FarVec<N>) -> Result<Totals, OffloadError> {
    let part = numbers.aggregate(heap).run()?;
    Ok(totals_of(&part, Rounded::sum(&part), N::rounded))
}

fn totals_of<N: Number>(part: &Part<N>, sum: f64, rounded: impl Fn(N) -> f64) -> Totals {
    let (min, max) = (part.min().map(&rounded), part.max().map(&rounded));
    Totals { count: part.count(), sum, mean: part.mean(), min, max }
}

/// Numbers that convert to floating-point numbers, and their sums.
trait Rounded: Number {
    fn rounded(self) -> f64;
    fn sum(part: &Part<Self>) -> f64;
}

macro_rules! rounded {
    ($($number:ty)*) => {$(
        impl Rounded for $number {
            fn rounded(self) -> f64 {
                self as f64
            }
            fn sum(part: &Part<$number>) -> f64 {
                part.sum() as f64
            }
        }
    )*};
}
rounded! { i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 }
