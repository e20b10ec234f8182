//! Groups that are found where the columns are: by one or two columns of numbers, dates or times, of columns of such, all without nulls.
//!
//! Danger: another answer than rows that are looked at one by one would give.

use crate::column::{Column, Values, with_numbers};
use crate::error::FrameError;
use crate::kept::narrowed;
use crate::scan::Scan;
use crate::sums::{Sum, Summed};
use arrow::array::ArrayRef;
use arrow::buffer::NullBuffer;
use farfield::collections::{KEYS_MAX, KeyColumn};
use farfield::{FarVec, OffloadError, Part};
use std::collections::BTreeMap;

/// What the numbers of a row's key columns are ([`farfield::Number::image`]).
type Key = [u64; KEYS_MAX];

/// What the numbers of a column come to in each group, the groups in an order that is the same for all columns.
pub(crate) struct Found {
    /// What is in the columns that groups are made by.
    pub(crate) keys: Vec<ArrayRef>,
    pub(crate) counts: Vec<u64>,
    pub(crate) sums: Vec<Sum>,
    pub(crate) means: Vec<Option<f64>>,
    /// The smallest and the largest, of the column's type; null where there is nothing but NaN.
    pub(crate) ends: [ArrayRef; 2],
}

/// How many rows there are of each group.
pub(crate) struct Counted {
    /// What is in the columns that groups are made by.
    pub(crate) keys: Vec<ArrayRef>,
    pub(crate) rows: Vec<u64>,
}

/// Can groups of rows by these columns, of the others, be found where they are?
pub(crate) fn are_there(keys: &[&Column], columns: &[&Column]) -> bool {
    let is_whole =
        |column: &&Column| column.nulls() == 0 && !matches!(column.values, Values::Bits(_) | Values::Text(_));
    // Of NaN and −0 several are one group.
    let is_plain = |column: &&Column| is_whole(column) && !column.zones.is_odd;
    keys.len() <= 2 && keys.iter().all(is_plain) && columns.iter().all(is_whole)
}

/// Groups by `keys` of the numbers `of` another column, of the rows of a scan. `None`: they are more than `most`, or [are not there](are_there).
pub(crate) fn found(scan: &Scan, keys: &[&Column], of: &Column, most: usize) -> Result<Option<Found>, FrameError> {
    with_numbers!(&of.values, numbers => by(scan, keys, of, numbers, most), Values::Bits(_) | Values::Text(_) => Ok(None))
}

fn by<N: Summed>(
    scan: &Scan,
    keys: &[&Column],
    of: &Column,
    numbers: &FarVec<N>,
    most: usize,
) -> Result<Option<Found>, FrameError> {
    let mut groups: BTreeMap<Key, Part<N>> = BTreeMap::new();
    let columns: Vec<KeyColumn<'_>> = keys.iter().filter_map(|key| key.key_column()).collect();
    for run in scan.runs() {
        let asked = narrowed!(scan.frame.heap.group(&columns[..], numbers), run);
        let Some(some) = few(asked.most(most).run())? else { return Ok(None) };
        some.iter().for_each(|(key, part)| groups.entry(*key).or_default().merge(part));
    }
    let (found, parts): (Vec<Key>, Vec<_>) = groups.into_iter().unzip();
    match arrays(keys, &found)? {
        Some(keys) if parts.len() <= most => Found::new(keys, of, &parts).map(Some),
        _ => Ok(None),
    }
}

/// How many rows there are of each group. `None` as in [`found`].
pub(crate) fn counted(scan: &Scan, keys: &[&Column], most: usize) -> Result<Option<Counted>, FrameError> {
    let mut groups: BTreeMap<Key, u64> = BTreeMap::new();
    let columns: Vec<KeyColumn<'_>> = keys.iter().filter_map(|key| key.key_column()).collect();
    for run in scan.runs() {
        let asked = narrowed!(scan.frame.heap.tally(&columns[..]), run);
        let Some(some) = few(asked.most(most).run())? else { return Ok(None) };
        some.iter().for_each(|(key, count)| *groups.entry(*key).or_default() += count);
    }
    let (found, counts): (Vec<Key>, Vec<_>) = groups.into_iter().unzip();
    let keys = arrays(keys, &found)?.filter(|_| counts.len() <= most);
    Ok(keys.map(|keys| Counted { keys, rows: counts }))
}

/// What is in each of these columns in rows with these keys.
fn arrays(columns: &[&Column], keys: &[Key]) -> Result<Option<Vec<ArrayRef>>, FrameError> {
    let array = |(index, column): (usize, &&Column)| column.array_of_images(keys.iter().map(|key| key[index]));
    columns.iter().enumerate().map(array).collect()
}

fn few<T>(groups: Result<T, OffloadError>) -> Result<Option<T>, FrameError> {
    match groups {
        Err(OffloadError::TooMany { .. }) => Ok(None),
        groups => Ok(Some(groups?)),
    }
}

impl Found {
    fn new<N: Summed>(keys: Vec<ArrayRef>, of: &Column, parts: &[Part<N>]) -> Result<Found, FrameError> {
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
