//! Groups that are found where the columns are: by one column of integers, dates or times, of columns of numbers, all without nulls.
//!
//! Danger: another answer than rows that are looked at one by one would give.

use crate::column::{Column, Values, with_numbers};
use crate::error::FrameError;
use crate::kept::narrowed;
use crate::scan::Scan;
use crate::sums::{Sum, Summed};
use arrow::array::ArrayRef;
use arrow::buffer::NullBuffer;
use farfield::{FarVec, OffloadError, Part};
use std::collections::BTreeMap;

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

/// Can groups of rows by this column, of these columns, be found where they are?
pub(crate) fn are_there<'c>(keys: &Column, columns: impl IntoIterator<Item = &'c Column>) -> bool {
    let is_whole = |column: &Column| column.nulls() == 0 && !matches!(column.values, Values::Bits(_) | Values::Text(_));
    let is_integer = !matches!(keys.values, Values::F32(_) | Values::F64(_));
    is_integer && is_whole(keys) && columns.into_iter().all(is_whole)
}

/// The same for all kinds of integers that keys can be.
macro_rules! with_integers {
    ($values:expr, $numbers:ident => $integral:expr) => {
        match $values {
            Values::I8($numbers) => $integral,
            Values::I16($numbers) => $integral,
            Values::I32($numbers) => $integral,
            Values::I64($numbers) => $integral,
            Values::U8($numbers) => $integral,
            Values::U16($numbers) => $integral,
            Values::U32($numbers) => $integral,
            Values::U64($numbers) => $integral,
            Values::F32(_) | Values::F64(_) | Values::Bits(_) | Values::Text(_) => Ok(None),
        }
    };
}

/// Groups by `keys` of the numbers `of` another column, of the rows of a scan. `None`: they are more than `most`, or [are not there](are_there).
pub(crate) fn found(scan: &Scan, keys: &Column, of: &Column, most: usize) -> Result<Option<Found>, FrameError> {
    with_numbers!(&of.values, numbers => by(scan, keys, of, numbers, most), Values::Bits(_) | Values::Text(_) => Ok(None))
}

fn by<N: Summed>(
    scan: &Scan,
    keys: &Column,
    of: &Column,
    numbers: &FarVec<N>,
    most: usize,
) -> Result<Option<Found>, FrameError> {
    with_integers!(&keys.values, values => {
        let mut groups: BTreeMap<_, Part<N>> = BTreeMap::new();
        for run in scan.runs() {
            let Some(some) = few(narrowed!(scan.frame.heap.group(values, numbers), run).most(most).run())? else { return Ok(None) };
            some.iter().for_each(|(key, part)| groups.entry(*key).or_default().merge(part));
        }
        let (values, parts): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
        if parts.len() > most { Ok(None) } else { Found::new(keys.array_of(values, None)?, of, &parts).map(Some) }
    })
}

/// How many rows there are of each group. `None` as in [`found`].
pub(crate) fn counted(scan: &Scan, keys: &Column, most: usize) -> Result<Option<(ArrayRef, Vec<u64>)>, FrameError> {
    with_integers!(&keys.values, values => {
        let mut groups: BTreeMap<_, u64> = BTreeMap::new();
        for run in scan.runs() {
            let Some(some) = few(narrowed!(scan.frame.heap.tally(values), run).most(most).run())? else { return Ok(None) };
            some.iter().for_each(|(key, count)| *groups.entry(*key).or_default() += count);
        }
        let (values, counts): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
        if counts.len() > most { Ok(None) } else { Ok(Some((keys.array_of(values, None)?, counts))) }
    })
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
