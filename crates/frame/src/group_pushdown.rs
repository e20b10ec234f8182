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
use crate::column::{FrameColumn, Values, array_of, with_images, with_numbers};
use crate::error::FrameError;
use crate::scan::Scan;
use crate::sums::{Sum, Summed};
use arrow::array::ArrayRef;
use arrow::buffer::NullBuffer;
use arrow::datatypes::DataType;
use core::mem::discriminant;
use farfield::collections::{Grouping, KEYS_MAX, KeyColumn, VALUES_MAX};
use farfield::{FarVec, Formula, OffloadError, Part};
use std::collections::BTreeMap;

/// Images of the values in a row's key columns ([`farfield::Number::image`]).
type Key = [u64; KEYS_MAX];
/// Number of rows in each group, in the order of the groups.
pub(crate) type Counts = BTreeMap<Key, u64>;

/// Most columns to group by. Each takes two words of a key: its value, and whether it has one.
const COLUMNS_MAX: usize = KEYS_MAX / 2;

/// Numbers of rows that are aggregated.
pub(crate) enum Measure<'f> {
    Column(&'f FrameColumn),
    Formula(Formula<'f, f64>),
}

impl<'f> Measure<'f> {
    pub(crate) fn nulls(&self) -> usize {
        if let Measure::Column(column) = self { column.nulls() } else { 0 }
    }

    fn has_numbers(&self) -> bool {
        if let Measure::Column(column) = self { column.has_numbers() } else { true }
    }

    fn valid(&self) -> Option<&'f FarVec<u64>> {
        if let Measure::Column(column) = self { column.valid() } else { None }
    }

    /// Returns the numbers as a formula, or `None` if they have another type.
    fn floating(&self) -> Option<Formula<'f, f64>> {
        match self {
            Measure::Column(column) => f64::column(&column.values).map(Formula::of),
            Measure::Formula(formula) => Some(formula.clone()),
        }
    }

    fn numbers<N: Summed>(&self, _first: &FarVec<N>) -> Option<Formula<'f, N>> {
        if let Measure::Column(column) = self { N::column(&column.values).map(Formula::of) } else { None }
    }

    /// Checks whether two measures can be aggregated in one pass: they have numbers of one type, and no
    /// nulls, of which each would leave out other rows.
    pub(crate) fn shares_pass(&self, other: &Measure<'_>) -> bool {
        let is_one_type = match (self, other) {
            (Measure::Column(one), Measure::Column(other)) => discriminant(&one.values) == discriminant(&other.values),
            _ => self.floating().is_some() && other.floating().is_some(),
        };
        is_one_type && self.nulls() == 0 && other.nulls() == 0
    }
}

/// Aggregates of a column in each group, in the order of the groups.
pub(crate) struct GroupAggregates {
    pub(crate) counts: Vec<u64>,
    pub(crate) sums: Vec<Sum>,
    pub(crate) means: Vec<Option<f64>>,
    /// Minimum and maximum, of the column's type; null where a group has no values except NaN.
    pub(crate) ends: [ArrayRef; 2],
}

/// Checks whether the memory server can group by `keys` and aggregate `others`.
pub(crate) fn can_push_down<'m>(keys: &[&FrameColumn], mut others: impl Iterator<Item = &'m Measure<'m>>) -> bool {
    // Several values of NaN are one group, and so are −0 and +0.
    let is_plain = |column: &&FrameColumn| column.has_images() && !column.zones.is_odd;
    keys.len() <= COLUMNS_MAX && keys.iter().all(is_plain) && others.all(Measure::has_numbers)
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

/// Aggregates measures in each group, all of which [share passes](Measure::shares_pass) with the first
/// one. Sets `counts` if the groups are not known yet. Returns `None` if there are more than `most`
/// groups, or if the measures have no numbers.
pub(crate) fn aggregate_groups(
    scan: &Scan,
    keys: &[&FrameColumn],
    of: &[Measure<'_>],
    counts: &mut Option<Counts>,
    most: usize,
) -> Result<Option<Vec<GroupAggregates>>, FrameError> {
    let mut all = Vec::new();
    for some in of.chunks(VALUES_MAX) {
        let floating: Option<Vec<_>> = some.iter().map(Measure::floating).collect();
        let found = match (floating, &some[0]) {
            (Some(formulas), _) => aggregate_formulas(scan, keys, some, formulas, counts, most)?,
            (None, Measure::Formula(_)) => None,
            (None, Measure::Column(first)) => with_numbers!(&first.values, numbers => {
                    let formulas = some.iter().filter_map(|measure| measure.numbers(numbers)).collect();
                    aggregate_formulas(scan, keys, some, formulas, counts, most)?
                },
                Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => None),
        };
        let Some(found) = found else { return Ok(None) };
        all.extend(found);
    }
    Ok(Some(all))
}

/// Aggregates measures, which are these formulas, in one pass.
fn aggregate_formulas<N: Summed>(
    scan: &Scan,
    keys: &[&FrameColumn],
    of: &[Measure<'_>],
    formulas: Vec<Formula<'_, N>>,
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
        let (first, others) = formulas.split_first().expect("something is aggregated");
        let request = scan.frame.heap.group(&columns[..], first.clone());
        let request = others.iter().cloned().fold(request, Grouping::and);
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
    let column = |(index, measure): (usize, &Measure<'_>)| {
        let part = |key| groups.get(key).map_or_else(Part::default, |parts| parts[index].clone());
        GroupAggregates::new(measure, &counts.keys().map(part).collect::<Vec<Part<N>>>())
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
    fn new<N: Summed>(of: &Measure<'_>, parts: &[Part<N>]) -> Result<GroupAggregates, FrameError> {
        let ends = |of_part: fn(&Part<N>) -> Option<N>| {
            let values = parts.iter().map(|part| of_part(part).unwrap_or_default()).collect();
            let nulls = NullBuffer::from_iter(parts.iter().map(|part| of_part(part).is_some()));
            match of {
                Measure::Column(column) => column.array_of(values, Some(nulls)),
                Measure::Formula(_) => array_of(&DataType::Float64, values, Some(nulls)),
            }
        };
        Ok(GroupAggregates {
            counts: parts.iter().map(Part::count).collect(),
            sums: parts.iter().map(N::summed).collect(),
            means: parts.iter().map(Part::mean).collect(),
            ends: [ends(Part::min)?, ends(Part::max)?],
        })
    }
}
