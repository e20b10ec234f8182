//! A table of measures, as a user of the library would write it: its columns are vectors of a far heap,
//! and its questions are functions of its own, which run where the columns are.
//!
//! It knows what the library cannot: keys are small whole numbers, so groups lie in a dense table, and
//! all measures are whole, so sums are exact in any order.

use farfield::{AtServer, FarFunction, FarPlace, FarRef, FarVec, FarView, Fault, ItemCursor};
use farfield_wic::Registry;
use serde::{Deserialize, Serialize};

/// Columns that a table can have.
pub const MEASURES_MAX: usize = 20;
/// Keys of groups are smaller.
pub const KEYS: usize = 256;
/// Parts of a histogram.
pub const BINS: usize = 1024;
/// Rows of which one search tells, so that its answer is half as long as it may be.
pub const SEARCH_ROWS: u64 = 1 << 18;
/// Sums that are made side by side.
const LANES: usize = 8;

/// Columns of whole numbers.
#[derive(Debug, Default, FarView)]
pub struct Measures {
    /// The columns. All that are filled have equally many rows.
    pub columns: [FarVec<f64>; MEASURES_MAX],
}

/// Some rows of a column.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MeasureRows {
    /// Number of the column.
    pub column: u32,
    /// The first row.
    pub from: u64,
    /// End of the rows, which is none of them.
    pub until: u64,
}

/// Number, sum, smallest and largest of some measures.
pub type MeasureSummary = [f64; 4];

/// Summary of no measure.
pub const NO_MEASURES: MeasureSummary = [0.0, 0.0, f64::MAX, f64::MIN];

/// Adds up two summaries.
pub fn merge(one: MeasureSummary, other: MeasureSummary) -> MeasureSummary {
    [one[0] + other[0], one[1] + other[1], one[2].min(other[2]), one[3].max(other[3])]
}

/// Adds measures to a summary.
fn add_all(summary: &mut MeasureSummary, measures: &[f64]) {
    let (mut sums, mut least, mut most) = ([0.0; LANES], [f64::MAX; LANES], [f64::MIN; LANES]);
    let (many, rest) = measures.as_chunks::<LANES>();
    for some in many {
        for lane in 0..LANES {
            sums[lane] += some[lane];
            least[lane] = if some[lane] < least[lane] { some[lane] } else { least[lane] };
            most[lane] = if some[lane] > most[lane] { some[lane] } else { most[lane] };
        }
    }
    let lanes = (0..LANES).map(|lane| [0.0, sums[lane], least[lane], most[lane]]);
    let all = lanes.chain(rest.iter().map(|measure| [0.0, *measure, *measure, *measure])).fold(*summary, merge);
    *summary = [all[0] + measures.len() as f64, all[1], all[2], all[3]];
}

/// Returns a walk over some rows.
fn cursor<'f, P: FarPlace>(
    far: &'f P,
    table: &MeasuresView<'f>,
    rows: MeasureRows,
) -> Result<ItemCursor<'f, P, f64>, Fault> {
    let column = table.columns.get(rows.column as usize).ok_or(Fault::OutOfRange { offset: rows.from })?;
    Ok(far.items_in(*column, rows.from as usize..rows.until as usize))
}

/// Adds the questions to the functions of a server.
pub(crate) fn with_measures(functions: Registry) -> Registry {
    let functions = functions.with::<AtServer<Summarize>>().with::<AtServer<SummarizeGroups>>();
    functions.with::<AtServer<SearchLarger>>().with::<AtServer<CountBins>>()
}

/// Summary of rows.
#[derive(Debug)]
pub struct Summarize;

impl FarFunction for Summarize {
    const NAME: &'static str = "bench.summarize";
    const VERSION: u32 = 1;
    type Root = Measures;
    type Argument = MeasureRows;
    type Answer = MeasureSummary;

    async fn run<P: FarPlace>(
        far: &P,
        table: FarRef<'_, Measures>,
        rows: MeasureRows,
    ) -> Result<MeasureSummary, Fault> {
        let table = far.follow(table).await?;
        let (mut column, mut summary) = (cursor(far, &table, rows)?, NO_MEASURES);
        while let Some(measures) = column.next_chunk().await? {
            add_all(&mut summary, measures);
        }
        Ok(summary)
    }
}

/// Summaries of the rows of a column by the keys in the same rows of another one (its number). Without
/// measures, the rows of each key are counted.
#[derive(Debug)]
pub struct SummarizeGroups;

/// Measures to be grouped.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct GroupedMeasures {
    /// Rows of the keys.
    pub keys: MeasureRows,
    /// Column of the measures.
    pub measures: Option<u32>,
}

impl FarFunction for SummarizeGroups {
    const NAME: &'static str = "bench.summarize-groups";
    const VERSION: u32 = 1;
    type Root = Measures;
    type Argument = GroupedMeasures;
    /// Keys that occur, with their summaries.
    type Answer = Vec<(u32, MeasureSummary)>;

    async fn run<P: FarPlace>(
        far: &P,
        table: FarRef<'_, Measures>,
        grouped: GroupedMeasures,
    ) -> Result<Vec<(u32, MeasureSummary)>, Fault> {
        let table = far.follow(table).await?;
        let mut groups = vec![NO_MEASURES; KEYS];
        let mut keys = cursor(far, &table, grouped.keys)?;
        // A key is a whole number. What is none counts as the last key, so that nothing is out of range.
        let number = |key: f64| (key as usize).min(KEYS - 1);
        match grouped.measures {
            None => {
                while let Some(keys) = keys.next_chunk().await? {
                    keys.iter().for_each(|key| groups[number(*key)][0] += 1.0);
                }
            }
            Some(column) => {
                let mut measures = cursor(far, &table, MeasureRows { column, ..grouped.keys })?;
                while let (Some(keys), Some(measures)) = (keys.next_chunk().await?, measures.next_chunk().await?) {
                    for (key, measure) in keys.iter().zip(measures) {
                        let group = &mut groups[number(*key)];
                        *group = merge(*group, [1.0, *measure, *measure, *measure]);
                    }
                }
            }
        }
        let groups = (0..).zip(groups).filter(|(_, summary)| summary[0] > 0.0);
        Ok(groups.collect())
    }
}

/// Says which rows of a column are larger than a number: a bit for each, [`SEARCH_ROWS`] at most.
#[derive(Debug)]
pub struct SearchLarger;

impl FarFunction for SearchLarger {
    const NAME: &'static str = "bench.search-larger";
    const VERSION: u32 = 1;
    type Root = Measures;
    /// The rows, and the number.
    type Argument = (MeasureRows, f64);
    type Answer = Vec<u8>;

    async fn run<P: FarPlace>(
        far: &P,
        table: FarRef<'_, Measures>,
        (rows, than): (MeasureRows, f64),
    ) -> Result<Vec<u8>, Fault> {
        let table = far.follow(table).await?;
        let count = rows.until.saturating_sub(rows.from).min(SEARCH_ROWS);
        let mut column = cursor(far, &table, MeasureRows { until: rows.from + count, ..rows })?;
        let (mut bits, mut row) = (vec![0u8; count.div_ceil(8) as usize], 0);
        while let Some(measures) = column.next_chunk().await? {
            for measure in measures {
                bits[row / 8] |= u8::from(*measure > than) << (row % 8);
                row += 1;
            }
        }
        Ok(bits)
    }
}

/// Counts the rows of a column by size: in [`BINS`] parts from a number on, each of `1 << shift` whole
/// numbers.
#[derive(Debug)]
pub struct CountBins;

/// Measures to be counted.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct BinnedMeasures {
    /// The rows.
    pub rows: MeasureRows,
    /// The smallest number that counts.
    pub low: i64,
    /// Bits of the width of a part.
    pub shift: u32,
}

impl FarFunction for CountBins {
    const NAME: &'static str = "bench.count-bins";
    const VERSION: u32 = 1;
    type Root = Measures;
    type Argument = BinnedMeasures;
    type Answer = Vec<u64>;

    async fn run<P: FarPlace>(
        far: &P,
        table: FarRef<'_, Measures>,
        BinnedMeasures { rows, low, shift }: BinnedMeasures,
    ) -> Result<Vec<u64>, Fault> {
        let table = far.follow(table).await?;
        let mut column = cursor(far, &table, rows)?;
        // The last one is for what is outside.
        let mut bins = vec![0u64; BINS + 1];
        while let Some(measures) = column.next_chunk().await? {
            for measure in measures {
                let above = (*measure as i64).wrapping_sub(low) as u64;
                bins[above.checked_shr(shift).map_or(BINS, |bin| bin.min(BINS as u64) as usize)] += 1;
            }
        }
        bins.truncate(BINS);
        Ok(bins)
    }
}
