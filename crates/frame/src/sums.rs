//! What the numbers of a column come to, of the rows that ranges keep: found where they are.
//!
//! Danger: numbers that are added up twice, or not, where chunks that are known meet others.

use crate::column::{Column, Values, with_images, with_numbers};
use crate::error::FrameError;
use crate::kept::narrowed;
use crate::scan::Scan;
use arrow::array::ArrayRef;
use arrow::datatypes::ArrowNativeType;
use farfield::{FarVec, Number, Part};

/// Number, sum, mean, smallest and largest of some numbers. Nothing is lost on the way to a sum.
#[derive(Clone, Debug)]
pub struct Sums {
    /// How many.
    pub count: u64,
    /// All together.
    pub sum: Sum,
    /// The sum divided by how many there are, if there are any.
    pub mean: Option<f64>,
    /// The smallest and the largest, two values of the column's type. `None`: there are none, or the column has NaN or −0, of which orders differ.
    pub ends: Option<ArrayRef>,
}

/// A sum of numbers of a column, by their type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Sum {
    /// Of integers that have a sign.
    Signed(i128),
    /// Of those that have none.
    Unsigned(u128),
    /// Of floating-point numbers: rounded once.
    Float(f64),
}

impl Sum {
    /// As a whole number. Of integers; none that there can be rows for has no room.
    pub(crate) fn whole(self) -> i128 {
        match self {
            Sum::Signed(sum) => sum,
            Sum::Unsigned(sum) => i128::try_from(sum).unwrap_or(i128::MAX),
            Sum::Float(sum) => sum as i128,
        }
    }

    /// As a floating-point number.
    pub fn rounded(self) -> f64 {
        match self {
            Sum::Signed(sum) => sum as f64,
            Sum::Unsigned(sum) => sum as f64,
            Sum::Float(sum) => sum,
        }
    }
}

impl Scan {
    /// Can [`sums`](Scan::sums) of this column be had? It is one of numbers, dates or times. Rows are kept by ranges of columns, if at all, as many as
    /// [groups](Scan::has_groups) may have; where there are ranges or nulls it has neither NaN nor −0.
    pub fn has_sums(&self, name: &str) -> Result<bool, FrameError> {
        let column = &self.frame.columns[self.frame.index(name)?];
        let is_known = !column.zones.is_odd || self.is_whole() && column.nulls() == 0;
        Ok(column.has_numbers() && self.is_of_ranges() && is_known)
    }

    /// What the numbers of a column of all these rows come to. They are added up where they are ([`FarVec::aggregate`], [`Heap::group`](farfield::Heap::group)). `None`: they have to be
    /// looked at, see [`has_sums`](Scan::has_sums).
    pub fn sums(&self, name: &str) -> Result<Option<Sums>, FrameError> {
        if !self.has_sums(name)? {
            return Ok(None);
        }
        let index = self.frame.index(name)?;
        with_numbers!(&self.frame.columns[index].values, numbers => self.sums_of(index, numbers).map(Some),
            Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => Ok(None))
    }

    fn sums_of<N: Summed>(&self, index: usize, numbers: &FarVec<N>) -> Result<Sums, FrameError> {
        let (heap, column): (_, &Column) = (&self.frame.heap, &self.frame.columns[index]);
        let mut part = Part::default();
        // Of all rows it is known how many have a value, and zeros change no sum.
        let valid = column.valid().filter(|_| !self.is_whole());
        for run in self.runs() {
            match &run.conditions[..] {
                _ if valid.is_some() => {
                    let asked = narrowed!(heap.group((), numbers), run);
                    let parts = valid.into_iter().fold(asked, |asked, valid| asked.marked(valid)).run()?;
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

/// Numbers with a sum of some type.
pub(crate) trait Summed: Number + ArrowNativeType {
    fn summed(part: &Part<Self>) -> Sum;
}

macro_rules! summed {
    ($sum:ident: $($number:ty)*) => {$(
        impl Summed for $number {
            fn summed(part: &Part<$number>) -> Sum {
                Sum::$sum(part.sum())
            }
        }
    )*};
}
summed! { Signed: i8 i16 i32 i64 }
summed! { Unsigned: u8 u16 u32 u64 }
summed! { Float: f32 f64 }
