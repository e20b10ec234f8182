//! Groups that are found where the columns are: by one column of integers, dates or times, of columns of numbers, all without nulls.
//!
//! Danger: another answer than rows that are looked at one by one would give.

use crate::column::{Column, Values, with_numbers};
use crate::error::FrameError;
use crate::sums::{Sum, Summed};
use arrow::array::ArrayRef;
use arrow::buffer::NullBuffer;
use farfield::{FarVec, Heap, OffloadError, Part};
use std::sync::Arc;

/// What the numbers of a column come to in each group, the groups in an order that is the same for all columns.
pub(crate) struct Found {
    /// What is in the column that groups are made by.
    pub(crate) keys: ArrayRef,
    pub(crate) counts: Vec<u64>,
    pub(crate) sums: Vec<Sum>,
    pub(crate) means: Vec<Option<f64>>,
    /// The smallest and the largest, of the column's type; null where there is nothing but NaN.
    pub(crate) ends: [ArrayRef; 2],
}

/// Can groups of rows with these columns, of which one has their keys, be found where they are?
pub(crate) fn are_there(keys: &Column, columns: &[Arc<Column>]) -> bool {
    let is_whole =
        |column: &Arc<Column>| column.nulls() == 0 && !matches!(column.values, Values::Bits(_) | Values::Text(_));
    !matches!(keys.values, Values::F32(_) | Values::F64(_)) && columns.iter().all(is_whole)
}

/// Groups by `keys` of the numbers `of` another column. `None`: they are more than `most`, or [are not there](are_there).
pub(crate) fn found(heap: &Heap, keys: &Column, of: &Column, most: usize) -> Result<Option<Found>, FrameError> {
    with_numbers!(&of.values, numbers => by(heap, keys, of, numbers, most), Values::Bits(_) | Values::Text(_) => Ok(None))
}

fn by<N: Summed>(
    heap: &Heap,
    keys: &Column,
    of: &Column,
    numbers: &FarVec<N>,
    most: usize,
) -> Result<Option<Found>, FrameError> {
    macro_rules! by_integers {
        ($($kind:ident)*) => {
            match &keys.values {
                $(Values::$kind(values) => {
                    let Some(groups) = few(heap.group(values, numbers).most(most).run())? else { return Ok(None) };
                    let (values, parts): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
                    Found::new(keys.array_of(values, None)?, of, &parts).map(Some)
                })*
                _ => Ok(None),
            }
        };
    }
    by_integers! { I8 I16 I32 I64 U8 U16 U32 U64 }
}

/// How many rows there are of each group. `None` as in [`found`].
pub(crate) fn counted(heap: &Heap, keys: &Column, most: usize) -> Result<Option<(ArrayRef, Vec<u64>)>, FrameError> {
    macro_rules! by_integers {
        ($($kind:ident)*) => {
            match &keys.values {
                $(Values::$kind(values) => {
                    let Some(groups) = few(heap.tally(values).most(most).run())? else { return Ok(None) };
                    let (values, counts): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
                    Ok(Some((keys.array_of(values, None)?, counts)))
                })*
                _ => Ok(None),
            }
        };
    }
    by_integers! { I8 I16 I32 I64 U8 U16 U32 U64 }
}

fn few<T>(groups: Result<T, OffloadError>) -> Result<Option<T>, FrameError> {
    match groups {
        Err(OffloadError::TooMany { .. }) => Ok(None),
        groups => Ok(Some(groups?)),
    }
}

impl Found {
    fn new<N: Summed>(keys: ArrayRef, of: &Column, parts: &[Part<N>]) -> Result<Found, FrameError> {
        let ends = |of_part: fn(&Part<N>) -> Option<N>| {
            let values = parts.iter().map(|part| of_part(part).unwrap_or_default()).collect();
            let nulls = NullBuffer::from_iter(parts.iter().map(|part| of_part(part).is_some()));
            of.array_of(values, Some(nulls))
        };
        Ok(Found {
            keys,
            counts: parts.iter().map(Part::count).collect(),
            sums: parts.iter().map(N::summed).collect(),
            means: parts.iter().map(Part::mean).collect(),
            ends: [ends(Part::min)?, ends(Part::max)?],
        })
    }
}
