//! Groups found by the memory server. Up to four key columns hold numbers, dates, times, booleans
//! or strings of few kinds. The aggregated columns hold numbers, dates or times.
//!
//! Where there are nulls, validity bits become part of the keys, and a condition on the rows whose
//! numbers are added up. So the server does not mention a group that has nothing but nulls, and
//! groups are counted separately.
//!
//! Danger: another answer than reading rows one by one would give; a zero below a null that is
//! taken for a value; a group of nulls that is lost.

use crate::chunk_runs::narrowed;
use crate::column::{FrameColumn, Values, with_images, with_numbers};
use crate::error::FrameError;
use crate::scan::Scan;
use crate::sums::{Sum, Summed};
use arrow::array::ArrayRef;
use arrow::buffer::NullBuffer;
use core::mem::discriminant;
use farfield::collections::{Grouping, KEYS_MAX, KeyColumn, VALUES_MAX};
use farfield::{FarVec, OffloadError, Part};
use std::collections::BTreeMap;

/// Images of the values in a row's key columns ([`farfield::Number::image`]).
type Key = [u64; KEYS_MAX];
/// Number of rows in each group, in the order of the groups.
pub(crate) type Counts = BTreeMap<Key, u64>;

/// Most columns to group by. Each takes two words of a key: its value, and whether it has one.
const COLUMNS_MAX: usize = KEYS_MAX / 2;

/// Aggregates of a column in each group, in the order of the groups.
pub(crate) struct GroupAggregates {
    pub(crate) counts: Vec<u64>,
    pub(crate) sums: Vec<Sum>,
    pub(crate) means: Vec<Option<f64>>,
    /// Minimum and maximum, of the column's type; null where a group has no values except NaN.
    pub(crate) ends: [ArrayRef; 2],
}

/// Checks whether the memory server can group by `keys` and aggregate `others`.
pub(crate) fn can_push_down<'c>(keys: &[&FrameColumn], mut others: impl Iterator<Item = &'c FrameColumn>) -> bool {
    // Several values of NaN are one group, and so are −0 and +0.
    let is_plain = |column: &&FrameColumn| column.has_images() && !column.zones.is_odd;
    keys.len() <= COLUMNS_MAX && keys.iter().all(is_plain) && others.all(FrameColumn::has_numbers)
}

/// Counts the rows of a scan in each group by `keys`. Returns `None` if there are more than `most`
/// groups.
pub(crate) fn count_groups(scan: &Scan, keys: &[&FrameColumn], most: usize) -> Result<Option<Counts>, FrameError> {
    let mut counts = Counts::new();
    let columns: Vec<KeyColumn<'_>> = keys.iter().flat_map(|key| key.key_columns()).collect();
    for run in scan.runs() {
        let request = narrowed!(scan.frame.heap.tally(&columns[..]), run);
        let Some(some) = few(request.most(most).run())? else { return Ok(None) };
        some.iter().for_each(|(key, count)| *counts.entry(*key).or_default() += count);
    }
    Ok(Some(counts).filter(|counts| counts.len() <= most))
}

/// Checks whether two columns can be aggregated in one pass: they store numbers of one type, and have no
/// nulls, of which each column would leave out other rows.
pub(crate) fn share_pass(one: &FrameColumn, other: &FrameColumn) -> bool {
    discriminant(&one.values) == discriminant(&other.values) && one.valid().is_none() && other.valid().is_none()
}

/// Aggregates columns in each group, as many as [share passes](share_pass) with the first one. Sets
/// `counts` if the groups are not known yet. Returns `None` if there are more than `most` groups, or if
/// the columns have no numbers.
pub(crate) fn aggregate_groups(
    scan: &Scan,
    keys: &[&FrameColumn],
    of: &[&FrameColumn],
    counts: &mut Option<Counts>,
    most: usize,
) -> Result<Option<Vec<GroupAggregates>>, FrameError> {
    let mut all = Vec::new();
    for some in of.chunks(VALUES_MAX) {
        let found = with_numbers!(&some[0].values,
            numbers => aggregate_columns(scan, keys, some, numbers, counts, most)?,
            Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => None);
        let Some(found) = found else { return Ok(None) };
        all.extend(found);
    }
    Ok(Some(all))
}

/// Aggregates columns, the first of which has these numbers, in one pass.
fn aggregate_columns<N: Summed>(
    scan: &Scan,
    keys: &[&FrameColumn],
    of: &[&FrameColumn],
    first: &FarVec<N>,
    counts: &mut Option<Counts>,
    most: usize,
) -> Result<Option<Vec<GroupAggregates>>, FrameError> {
    let valid = of[0].valid();
    if valid.is_some() && counts.is_none() {
        *counts = count_groups(scan, keys, most)?;
        if counts.is_none() {
            return Ok(None);
        }
    }
    let mut groups: BTreeMap<Key, Vec<Part<N>>> = BTreeMap::new();
    let columns: Vec<KeyColumn<'_>> = keys.iter().flat_map(|key| key.key_columns()).collect();
    for run in scan.runs() {
        let others = of[1..].iter().filter_map(|column| N::column(&column.values));
        let request = others.fold(scan.frame.heap.group(&columns[..], first), Grouping::and);
        let mut request = narrowed!(request, run);
        if let Some(valid) = valid {
            request = request.marked(valid);
        }
        let Some(some) = few(request.most(most).run_all())? else { return Ok(None) };
        for (key, parts) in some {
            let known = groups.entry(key).or_insert_with(|| vec![Part::default(); of.len()]);
            known.iter_mut().zip(&parts).for_each(|(known, part)| known.merge(part));
        }
    }
    if groups.len() > most {
        return Ok(None);
    }
    let counts = counts.get_or_insert_with(|| groups.iter().map(|(key, parts)| (*key, parts[0].count())).collect());
    let column = |(index, column): (usize, &&FrameColumn)| {
        let part = |key| groups.get(key).map_or_else(Part::default, |parts| parts[index].clone());
        GroupAggregates::new(column, &counts.keys().map(part).collect::<Vec<Part<N>>>())
    };
    of.iter().enumerate().map(column).collect::<Result<_, _>>().map(Some)
}

/// Returns the key columns of these groups as arrays. Returns `None` if a column has no images.
pub(crate) fn arrays(columns: &[&FrameColumn], counts: &Counts) -> Result<Option<Vec<ArrayRef>>, FrameError> {
    let mut words = 0..;
    let mut images = || {
        let word = words.next().unwrap_or(0);
        counts.keys().map(move |key| key[word])
    };
    let array = |column: &&FrameColumn| {
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

impl GroupAggregates {
    fn new<N: Summed>(of: &FrameColumn, parts: &[Part<N>]) -> Result<GroupAggregates, FrameError> {
        let ends = |of_part: fn(&Part<N>) -> Option<N>| {
            let values = parts.iter().map(|part| of_part(part).unwrap_or_default()).collect();
            let nulls = NullBuffer::from_iter(parts.iter().map(|part| of_part(part).is_some()));
            of.array_of(values, Some(nulls))
        };
        Ok(GroupAggregates {
            counts: parts.iter().map(Part::count).collect(),
            sums: parts.iter().map(N::summed).collect(),
            means: parts.iter().map(Part::mean).collect(),
            ends: [ends(Part::min)?, ends(Part::max)?],
        })
    }
}
