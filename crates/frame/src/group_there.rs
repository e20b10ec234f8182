//! Groups that are found where the columns are: by up to four columns of numbers, dates, times, booleans or few kinds of strings, of columns of numbers, dates or times.
//!
//! Where there are nulls, bits say which rows have a value: they are a part of keys, and a condition on rows whose numbers are added up. So of a group that has
//! nothing but nulls nothing is said, and groups are counted by themselves.
//!
//! Danger: another answer than rows that are looked at one by one would give; a zero below a null that is taken for a value; a group of nulls that is lost.

use crate::column::{Column, Values, with_images, with_numbers};
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
/// The rows of each group, in the order of the groups.
pub(crate) type Counts = BTreeMap<Key, u64>;

/// Columns that groups can be made by: each of them, and whether it has a value.
const COLUMNS_MAX: usize = KEYS_MAX / 2;

/// What the numbers of a column come to in each group, in the order of the groups.
pub(crate) struct Found {
    pub(crate) counts: Vec<u64>,
    pub(crate) sums: Vec<Sum>,
    pub(crate) means: Vec<Option<f64>>,
    /// The smallest and the largest, of the column's type; null where there is nothing but NaN.
    pub(crate) ends: [ArrayRef; 2],
}

/// Can groups of rows by these columns be found where they are, with what others come to?
pub(crate) fn are_there<'c>(keys: &[&Column], mut others: impl Iterator<Item = &'c Column>) -> bool {
    // Of NaN and of −0 with +0 several are one group.
    let is_plain = |column: &&Column| column.has_images() && !column.zones.is_odd;
    keys.len() <= COLUMNS_MAX && keys.iter().all(is_plain) && others.all(Column::has_numbers)
}

/// How many rows there are of each group by `keys` of the rows of a scan. `None`: the groups are more than `most`.
pub(crate) fn counted(scan: &Scan, keys: &[&Column], most: usize) -> Result<Option<Counts>, FrameError> {
    let mut counts = Counts::new();
    let columns: Vec<KeyColumn<'_>> = keys.iter().flat_map(|key| key.key_columns()).collect();
    for run in scan.runs() {
        let asked = narrowed!(scan.frame.heap.tally(&columns[..]), run);
        let Some(some) = few(asked.most(most).run())? else { return Ok(None) };
        some.iter().for_each(|(key, count)| *counts.entry(*key).or_default() += count);
    }
    Ok(Some(counts).filter(|counts| counts.len() <= most))
}

/// What the values `of` a column come to in each group; which groups there are is found with it, unless it is known. `None` as in [`counted`].
pub(crate) fn found(
    scan: &Scan,
    keys: &[&Column],
    of: &Column,
    counts: &mut Option<Counts>,
    most: usize,
) -> Result<Option<Found>, FrameError> {
    with_numbers!(&of.values, numbers => by(scan, keys, of, numbers, counts, most), Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => Ok(None))
}

fn by<N: Summed>(
    scan: &Scan,
    keys: &[&Column],
    of: &Column,
    numbers: &FarVec<N>,
    counts: &mut Option<Counts>,
    most: usize,
) -> Result<Option<Found>, FrameError> {
    if of.valid().is_some() && counts.is_none() {
        *counts = counted(scan, keys, most)?;
        if counts.is_none() {
            return Ok(None);
        }
    }
    let mut groups: BTreeMap<Key, Part<N>> = BTreeMap::new();
    let columns: Vec<KeyColumn<'_>> = keys.iter().flat_map(|key| key.key_columns()).collect();
    for run in scan.runs() {
        let mut asked = narrowed!(scan.frame.heap.group(&columns[..], numbers), run);
        if let Some(valid) = of.valid() {
            asked = asked.marked(valid);
        }
        let Some(some) = few(asked.most(most).run())? else { return Ok(None) };
        some.iter().for_each(|(key, part)| groups.entry(*key).or_default().merge(part));
    }
    if groups.len() > most {
        return Ok(None);
    }
    let counts = counts.get_or_insert_with(|| groups.iter().map(|(key, part)| (*key, part.count())).collect());
    let parts: Vec<Part<N>> = counts.keys().map(|key| groups.remove(key).unwrap_or_default()).collect();
    Found::new(of, &parts).map(Some)
}

/// What is in each of these columns in groups with these keys. `None`: one has no images.
pub(crate) fn arrays(columns: &[&Column], counts: &Counts) -> Result<Option<Vec<ArrayRef>>, FrameError> {
    let mut words = 0..;
    let mut images = || {
        let word = words.next().unwrap_or(0);
        counts.keys().map(move |key| key[word])
    };
    let array = |column: &&Column| {
        let nulls = column.valid().map(|_| images().map(|bit| bit == 1).collect());
        column.array_of_images(images(), nulls)
    };
    columns.iter().map(array).collect()
}

fn few<T>(groups: Result<T, OffloadError>) -> Result<Option<T>, FrameError> {
    match groups {
        Err(OffloadError::TooMany { .. }) => Ok(None),
        groups => Ok(Some(groups?)),
    }
}

impl Found {
    fn new<N: Summed>(of: &Column, parts: &[Part<N>]) -> Result<Found, FrameError> {
        let ends = |of_part: fn(&Part<N>) -> Option<N>| {
            let values = parts.iter().map(|part| of_part(part).unwrap_or_default()).collect();
            let nulls = NullBuffer::from_iter(parts.iter().map(|part| of_part(part).is_some()));
            of.array_of(values, Some(nulls))
        };
        Ok(Found {
            counts: parts.iter().map(Part::count).collect(),
            sums: parts.iter().map(N::summed).collect(),
            means: parts.iter().map(Part::mean).collect(),
            ends: [ends(Part::min)?, ends(Part::max)?],
        })
    }
}
