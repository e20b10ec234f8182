//! Sums, counts and ends of a column over the rows that ranges keep, computed by the memory server.
//!
//! Danger: numbers that are added up twice, or not at all, where chunks that zone maps decide meet
//! others.

use crate::chunk_runs::narrowed;
use crate::column::{FrameColumn, Values, with_images, with_numbers};
use crate::error::FrameError;
use crate::expression::Expression;
use crate::scan::Scan;
use arrow::array::ArrayRef;
use arrow::datatypes::ArrowNativeType;
use farfield::{FarVec, Formula, Number, Part};

/// Count, sum, mean, minimum and maximum of some numbers. The sum is computed without loss.
#[derive(Clone, Debug)]
pub struct Sums {
    /// Number of values.
    pub count: u64,
    /// Sum of the values.
    pub sum: Sum,
    /// Mean of the values, `None` if there are none.
    pub mean: Option<f64>,
    /// Minimum and maximum, two values of the column's type. `None` if there are no values, if the
    /// column has NaN or −0, which two orders compare differently, or if it is computed.
    pub ends: Option<ArrayRef>,
}

/// A sum of numbers of a column, by their type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Sum {
    /// Sum of signed integers.
    Signed(i128),
    /// Sum of unsigned integers.
    Unsigned(u128),
    /// Sum of floating-point numbers, rounded once.
    Float(f64),
}

impl Sum {
    /// Returns a sum of integers as an `i128`. The sum of fewer than 2⁶³ numbers always fits.
    pub(crate) fn whole(self) -> i128 {
        match self {
            Sum::Signed(sum) => sum,
            Sum::Unsigned(sum) => i128::try_from(sum).unwrap_or(i128::MAX),
            Sum::Float(sum) => sum as i128,
        }
    }

    /// Returns the sum as a floating-point number.
    pub fn rounded(self) -> f64 {
        match self {
            Sum::Signed(sum) => sum as f64,
            Sum::Unsigned(sum) => sum as f64,
            Sum::Float(sum) => sum,
        }
    }
}

impl Scan {
    /// Adds a column of the values of an expression, which [`sums`](Scan::sums) and
    /// [`groups`](Scan::groups) can add up, by this name. No batch has it. Returns an error if the
    /// memory server cannot compute it (see [`FarFrame::totals_of`](crate::FarFrame::totals_of)), or
    /// if the frame has a column of this name.
    ///
    /// ```
    /// use farfield::Heap;
    /// use farfield_frame::{Agg, FarFrame, column};
    /// use std::sync::Arc;
    ///
    /// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let lines = FarFrame::from_csv_text(&heap, "shop,price,rate\n1,10.5,0.5\n1,4.5,2.0\n2,1.5,1.0\n")?;
    /// let sales = column("price") * column("rate");
    /// let scan = lines.scan(&[])?.within("price", 2.0..)?.computed("sales", &sales)?;
    /// assert_eq!(scan.sums("sales")?.unwrap().sum.rounded(), 14.25);
    /// assert_eq!(scan.groups(&["shop"], &[Agg::sum("sales")], 100)?.unwrap().num_rows(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn computed(mut self, name: &str, expression: &Expression) -> Result<Scan, FrameError> {
        if self.frame.index(name).is_ok() {
            return Err(FrameError::SameName { name: name.to_owned() });
        }
        if self.frame.computable(expression)?.is_none() {
            let data_type = expression.data_type(&self.frame.schema)?;
            return Err(FrameError::Type { name: name.to_owned(), data_type });
        }
        self.computed.insert(name.to_owned(), expression.clone());
        Ok(self)
    }

    /// Checks whether [`sums`](Scan::sums) can answer for this column, which must hold numbers,
    /// dates or times. Nothing but ranges of columns may keep rows, and no more of them than
    /// [`has_groups`](Scan::has_groups) allows. Where there are ranges or nulls, the column must
    /// have neither NaN nor −0.
    pub fn has_sums(&self, name: &str) -> Result<bool, FrameError> {
        if self.computed.contains_key(name) {
            return Ok(self.is_of_ranges());
        }
        let column = &self.frame.columns[self.frame.index(name)?];
        let is_known = !column.zones.is_odd || self.is_whole() && column.nulls() == 0;
        Ok(column.has_numbers() && self.is_of_ranges() && is_known)
    }

    /// Computes aggregates of a column over the rows of this scan. The memory server adds up the
    /// numbers ([`FarVec::aggregate`], [`Heap::group`](farfield::Heap::group)). Returns `None` if
    /// they have to be read; see [`has_sums`](Scan::has_sums).
    pub fn sums(&self, name: &str) -> Result<Option<Sums>, FrameError> {
        if !self.has_sums(name)? {
            return Ok(None);
        }
        if let Some(expression) = self.computed.get(name) {
            let formula = self.frame.computable(expression)?;
            return formula.map(|formula| self.sums_of_formula(&formula)).transpose();
        }
        let index = self.frame.index(name)?;
        with_numbers!(&self.frame.columns[index].values, numbers => self.sums_of(index, numbers).map(Some),
            Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => Ok(None))
    }

    fn sums_of_formula(&self, formula: &Formula<'_, f64>) -> Result<Sums, FrameError> {
        let mut part = Part::default();
        for run in self.runs() {
            let parts = narrowed!(self.frame.heap.group((), formula.clone()), run).run()?;
            parts.iter().for_each(|((), kept)| part.merge(kept));
        }
        Ok(Sums { count: part.count(), sum: Sum::Float(part.sum()), mean: part.mean(), ends: None })
    }

    fn sums_of<N: Summed>(&self, index: usize, numbers: &FarVec<N>) -> Result<Sums, FrameError> {
        let (heap, column): (_, &FrameColumn) = (&self.frame.heap, &self.frame.columns[index]);
        let mut part = Part::default();
        // For all rows the number of nulls is known, and the zeros that are stored for nulls change
        // no sum.
        let valid = column.valid().filter(|_| !self.is_whole());
        for run in self.runs() {
            match &run.conditions[..] {
                _ if valid.is_some() => {
                    let request = narrowed!(heap.group((), numbers), run);
                    let parts = valid.into_iter().fold(request, |request, valid| request.marked(valid)).run()?;
                    parts.iter().for_each(|((), kept)| part.merge(kept));
                }
                [] => part.merge(&numbers.aggregate(heap).over(run.rows).run()?),
                [own] if own.index == index => {
                    part.merge(&numbers.aggregate(heap).over(run.rows).filter(own.numbers(numbers)).run()?);
                }
                _ => {
                    let parts = narrowed!(heap.group((), numbers), run).run()?;
                    parts.iter().for_each(|((), kept)| part.merge(kept));
                }
            }
        }
        let is_known = self.is_whole() && column.nulls() > 0;
        let count = if is_known { (column.rows() - column.nulls()) as u64 } else { part.count() };
        let ends = match (part.min(), part.max()) {
            _ if is_known => column.ends()?,
            (Some(min), Some(max)) if !column.zones.is_odd => Some(column.array_of(vec![min, max], None)?),
            _ => None,
        };
        let sum = N::summed(&part);
        Ok(Sums { count, sum, mean: (count > 0).then(|| sum.rounded() / count as f64), ends })
    }
}

/// Numbers with a type of sum.
pub(crate) trait Summed: Number + ArrowNativeType {
    fn summed(part: &Part<Self>) -> Sum;
    /// Returns the numbers of a column, if they are of this type.
    fn column(values: &Values) -> Option<&FarVec<Self>>;
}

macro_rules! summed {
    ($sum:ident: $($number:ty, $values:ident;)*) => {$(
        impl Summed for $number {
            fn summed(part: &Part<$number>) -> Sum {
                Sum::$sum(part.sum())
            }

            fn column(values: &Values) -> Option<&FarVec<$number>> {
                match values {
                    Values::$values(numbers) => Some(numbers),
                    _ => None,
                }
            }
        }
    )*};
}
summed! { Signed: i8, I8; i16, I16; i32, I32; i64, I64; }
summed! { Unsigned: u8, U8; u16, U16; u32, U32; u64, U64; }
summed! { Float: f32, F32; f64, F64; }
