//! Rows that ranges of columns keep, as runs of chunks for one request each.
//!
//! Danger: a chunk that is skipped although rows match; a row that is there twice, or not at all,
//! where runs meet; a null that matches a range because a zero is stored for it.

use crate::column::{CHUNK_ROWS, FrameColumn};
use crate::scan::Scan;
use crate::zones::{ImageRange, Zone, ZoneMatch, runs};
use core::ops::{Bound, Range};
use farfield::collections::CONDITIONS_MAX;
use farfield::{FarVec, Number};
use std::collections::BTreeMap;

/// Neighbouring chunks from which ranges keep rows.
pub(crate) struct ChunkRun<'s> {
    pub(crate) rows: Range<usize>,
    /// Ranges that the numbers of columns must be in. Empty if all rows are kept.
    pub(crate) conditions: Vec<RangeCondition<'s>>,
}

/// Range that the numbers of a column must be in, within some chunks.
pub(crate) struct RangeCondition<'s> {
    pub(crate) index: usize,
    pub(crate) column: &'s FrameColumn,
    images: ImageRange,
    zones: &'s [Option<Zone>],
}

impl RangeCondition<'_> {
    /// Returns the condition as a range of numbers.
    pub(crate) fn numbers<N: Number>(&self, _column: &FarVec<N>) -> (Bound<N>, Bound<N>) {
        self.images.numbers(self.zones)
    }
}

/// Narrows a request to the rows of a [`ChunkRun`].
macro_rules! narrowed {
    ($request:expr, $run:expr) => {{
        let mut request = $request.over($run.rows.clone());
        for condition in &$run.conditions {
            request = with_images!(&condition.column.values,
                numbers => request.within(numbers, condition.numbers(numbers)),
                Values::Bits(_) | Values::Text(_) | Values::Plain(_) => unreachable!("ranges are of numbers"));
            if let Some(valid) = condition.column.valid() {
                request = request.marked(valid);
            }
        }
        request
    }};
}
pub(crate) use narrowed;

impl Scan {
    /// Checks whether the scan keeps all rows of the frame.
    pub(crate) fn is_whole(&self) -> bool {
        let chunks = 0..self.frame.rows().div_ceil(CHUNK_ROWS);
        self.keep.is_empty() && self.within.is_empty() && self.chunks == chunks
    }

    /// Checks whether only ranges keep rows, and no more of them than a request may have. A column
    /// with nulls needs one condition more, for its validity bits, and so may the column that is
    /// aggregated.
    pub(crate) fn is_of_ranges(&self) -> bool {
        let conditions = |(index, _): &(usize, _)| 1 + usize::from(self.frame.columns[*index].nulls() > 0);
        self.keep.is_empty() && self.within.iter().map(conditions).sum::<usize>() < CONDITIONS_MAX
    }

    /// Returns the runs of chunks from which all ranges ([`Scan::is_of_ranges`]) may keep rows.
    pub(crate) fn runs(&self) -> Vec<ChunkRun<'_>> {
        let mut ranges: BTreeMap<usize, ImageRange> = BTreeMap::new();
        for (index, images) in &self.within {
            let common = ranges.get(index).copied().unwrap_or(ImageRange::ALL);
            let Some(images) = images.and_then(|images| images.common(common)) else { return Vec::new() };
            ranges.insert(*index, images);
        }
        let zones = |index: &usize, chunks: Range<usize>| &self.frame.columns[*index].zones.chunks[chunks];
        let share = |chunk: usize| {
            let shares = ranges.iter().map(|(index, images)| match images.share(zones(index, chunk..chunk + 1)[0]) {
                // A zone says nothing about the chunk's nulls.
                ZoneMatch::All if self.frame.columns[*index].nulls() > 0 => ZoneMatch::Some,
                share => share,
            });
            shares.fold(ZoneMatch::All, |share, other| match (share, other) {
                (ZoneMatch::None, _) | (_, ZoneMatch::None) => ZoneMatch::None,
                (ZoneMatch::All, ZoneMatch::All) => ZoneMatch::All,
                _ => ZoneMatch::Some,
            })
        };
        let run = |(share, run): (ZoneMatch, Range<usize>)| {
            let chunks = self.chunks.start + run.start..self.chunks.start + run.end;
            let condition = |(index, images): (&usize, &ImageRange)| RangeCondition {
                index: *index,
                column: &self.frame.columns[*index],
                images: *images,
                zones: zones(index, chunks.clone()),
            };
            let conditions = match share {
                ZoneMatch::None => return None,
                ZoneMatch::All => Vec::new(),
                ZoneMatch::Some => ranges.iter().map(condition).collect(),
            };
            let rows = chunks.start * CHUNK_ROWS..self.frame.rows().min(chunks.end * CHUNK_ROWS);
            Some(ChunkRun { rows, conditions })
        };
        runs(self.chunks.clone().map(share)).into_iter().filter_map(run).collect()
    }
}
