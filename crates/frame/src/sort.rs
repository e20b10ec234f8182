//! External merge sort of the rows of a frame.
//!
//! Runs of a bounded number of chunks are sorted near. Then several runs at a time are merged to
//! one, until one is left. Rows are compared by the bytes of Arrow's row format, whose order is
//! that of Arrow's kernels.
//!
//! Danger: equal rows that change places; nulls and NaN at the wrong end; rows of a chunk that is
//! replaced before they are copied; more memory near than promised.

use crate::column::CHUNK_ROWS;
use crate::error::FrameError;
use crate::frame::{FarFrame, Maker};
use arrow::array::{ArrayRef, RecordBatch};
use arrow::compute::{SortOptions, interleave_record_batch};
use arrow::datatypes::Schema;
use arrow::row::{Row, RowConverter, Rows, SortField};

/// Chunks that are sorted near in one run.
const RUN_CHUNKS: usize = 16;
/// Runs that are merged at a time.
const MERGED_RUNS: usize = 16;

/// A sort column with its direction and the place of nulls. See [`FarFrame::sort`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SortBy {
    name: String,
    options: SortOptions,
}

impl SortBy {
    /// Sorts by this column, small values first, nulls last.
    pub fn ascending(name: impl Into<String>) -> SortBy {
        SortBy { name: name.into(), options: SortOptions { descending: false, nulls_first: false } }
    }

    /// Sorts by this column, large values first, nulls last.
    pub fn descending(name: impl Into<String>) -> SortBy {
        SortBy { name: name.into(), options: SortOptions { descending: true, nulls_first: false } }
    }

    /// Puts nulls first.
    pub fn nulls_first(mut self) -> SortBy {
        self.options.nulls_first = true;
        self
    }
}

impl FarFrame {
    /// Returns the rows sorted by these columns; a later column orders rows that are equal in all
    /// earlier ones. The sort is stable. Numbers are compared as Arrow does: −0 is smaller than +0,
    /// and NaN larger than all others. Strings are compared by their bytes.
    ///
    /// Besides the heap's budget, 17 chunks of each column are near, and the sort columns once
    /// more. For a while, the rows are far twice, in addition to the frame itself.
    ///
    /// ```
    /// use farfield::Heap;
    /// use farfield_frame::{FarFrame, SortBy};
    /// use std::sync::Arc;
    ///
    /// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let trips = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n")?;
    /// let sorted = trips.sort(&[SortBy::ascending("zone"), SortBy::descending("fare")])?;
    /// assert_eq!(sorted.range(1..2)?.totals("fare")?.max, Some(52.5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sort(&self, by: &[SortBy]) -> Result<FarFrame, FrameError> {
        let order = ExternalSorter::new(self, by)?;
        if by.is_empty() || self.rows() == 0 {
            return Ok(self.clone());
        }
        order.sort(self, RUN_CHUNKS, MERGED_RUNS)
    }
}

struct ExternalSorter {
    /// Columns by which rows are compared.
    columns: Vec<usize>,
    converter: RowConverter,
}

impl ExternalSorter {
    fn new(frame: &FarFrame, by: &[SortBy]) -> Result<ExternalSorter, FrameError> {
        let columns = by.iter().map(|by| frame.key_index(&by.name)).collect::<Result<Vec<usize>, _>>()?;
        let schema: &Schema = &frame.schema;
        let field = |(index, by): (&usize, &SortBy)| {
            SortField::new_with_options(schema.field(*index).data_type().clone(), by.options)
        };
        let converter = RowConverter::new(columns.iter().zip(by).map(field).collect())?;
        Ok(ExternalSorter { columns, converter })
    }

    fn sort(&self, frame: &FarFrame, run_chunks: usize, merged_runs: usize) -> Result<FarFrame, FrameError> {
        let chunks: Vec<usize> = (0..frame.rows().div_ceil(CHUNK_ROWS)).collect();
        let mut runs =
            chunks.chunks(run_chunks).map(|chunks| self.run(frame, chunks)).collect::<Result<Vec<_>, _>>()?;
        while runs.len() > 1 {
            let mut merged = Vec::new();
            let mut left = runs.into_iter().peekable();
            while left.peek().is_some() {
                // The merged runs are given back before the next ones are merged.
                merged.push(self.merge(left.by_ref().take(merged_runs).collect())?);
            }
            runs = merged;
        }
        Ok(runs.pop().expect("there are rows"))
    }

    fn keys(&self, batch: &RecordBatch) -> Result<Rows, FrameError> {
        let columns: Vec<ArrayRef> = self.columns.iter().map(|index| batch.column(*index).clone()).collect();
        Ok(self.converter.convert_columns(&columns)?)
    }

    /// Sorts the rows of these chunks near, into a new frame.
    fn run(&self, frame: &FarFrame, chunks: &[usize]) -> Result<FarFrame, FrameError> {
        let batches = chunks.iter().map(|chunk| frame.batches().chunk(*chunk)).collect::<Result<Vec<_>, _>>()?;
        let keys = batches.iter().map(|batch| self.keys(batch)).collect::<Result<Vec<_>, _>>()?;
        let all = |(batch, keys): (usize, &Rows)| (0..keys.num_rows()).map(move |row| (batch, row));
        let mut rows: Vec<(usize, usize)> = keys.iter().enumerate().flat_map(all).collect();
        rows.sort_by_key(|(batch, row)| Key(keys[*batch].row(*row)));
        let mut maker = Maker::new(&frame.heap, frame.schema())?;
        let batches: Vec<&RecordBatch> = batches.iter().collect();
        for rows in rows.chunks(CHUNK_ROWS) {
            maker.push(interleave_record_batch(&batches, rows)?)?;
        }
        maker.finish()
    }

    /// Merges sorted runs to one.
    fn merge(&self, mut runs: Vec<FarFrame>) -> Result<FarFrame, FrameError> {
        if runs.len() == 1 {
            return Ok(runs.remove(0));
        }
        let mut maker = Maker::new(&runs[0].heap, runs[0].schema())?;
        let mut cursors = runs.iter().map(|run| MergeCursor::new(self, run)).collect::<Result<Vec<_>, _>>()?;
        // A binary heap of the cursors that have rows, the smallest row first; among equal rows,
        // that of the first run.
        let mut first: Vec<usize> = (0..cursors.len()).collect();
        first.sort_by_key(|run_index| (cursors[*run_index].key(), *run_index));
        let mut picked = Vec::with_capacity(CHUNK_ROWS);
        while let Some(run_index) = first.first().copied() {
            picked.push((run_index, cursors[run_index].row));
            cursors[run_index].row += 1;
            let is_at_end = cursors[run_index].row == cursors[run_index].batch.num_rows();
            // The picked rows of a batch are copied before the next batch replaces it.
            if is_at_end || picked.len() == CHUNK_ROWS {
                let batches: Vec<&RecordBatch> = cursors.iter().map(|cursor| &cursor.batch).collect();
                maker.push(interleave_record_batch(&batches, &picked)?)?;
                picked.clear();
            }
            if is_at_end && !cursors[run_index].advance(self, &runs[run_index])? {
                first.swap_remove(0);
            }
            sink(&mut first, |run_index| (cursors[run_index].key(), run_index));
        }
        drop(cursors);
        maker.finish()
    }
}

/// The current chunk of a run that is merged, and the position in it.
struct MergeCursor {
    chunk: usize,
    batch: RecordBatch,
    keys: Rows,
    row: usize,
}

impl MergeCursor {
    fn new(order: &ExternalSorter, run: &FarFrame) -> Result<MergeCursor, FrameError> {
        let batch = run.batches().chunk(0)?;
        Ok(MergeCursor { chunk: 0, keys: order.keys(&batch)?, batch, row: 0 })
    }

    fn key(&self) -> Key<'_> {
        Key(self.keys.row(self.row))
    }

    /// Reads the next chunk. Returns false if there is none.
    fn advance(&mut self, order: &ExternalSorter, run: &FarFrame) -> Result<bool, FrameError> {
        self.chunk += 1;
        if self.chunk * CHUNK_ROWS >= run.rows() {
            return Ok(false);
        }
        self.batch = run.batches().chunk(self.chunk)?;
        (self.keys, self.row) = (order.keys(&self.batch)?, 0);
        Ok(true)
    }
}

/// Restores the order of a binary heap whose first element has become larger.
fn sink<K: Ord>(heap: &mut [usize], key: impl Fn(usize) -> K) {
    let mut at = 0;
    while let Some(child) = (2 * at + 1..heap.len().min(2 * at + 3)).min_by_key(|child| key(heap[*child])) {
        if key(heap[at]) <= key(heap[child]) {
            return;
        }
        heap.swap(at, child);
        at = child;
    }
}

/// A row that is ordered by its bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key<'r>(Row<'r>);

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::{AsArray, UInt32Array};
    use arrow::datatypes::UInt32Type;
    use farfield::Heap;
    use std::sync::Arc;

    #[test]
    fn more_runs_than_are_merged_at_a_time() {
        // Backwards, so that each run comes before all that were there, in triples, whose rows are to stay as they are.
        let count = (20 * CHUNK_ROWS + 5) as u32;
        let column = |value: fn(u32, u32) -> u32| -> ArrayRef {
            Arc::new(UInt32Array::from_iter_values((0..count).map(|row| value(row, count))))
        };
        let columns = [("number", column(|row, count| (count - row) / 3)), ("row", column(|row, _| row))];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let heap = Arc::new(Heap::builder().near(1 << 20).near_max(1 << 20).far(64 << 20).build().unwrap());
        let frame = FarFrame::from_batches(&heap, batch.schema(), [Ok(batch)]).unwrap();
        let order = ExternalSorter::new(&frame, &[SortBy::ascending("number")]).unwrap();
        for (run_chunks, merged_runs) in [(1, 2), (2, 3), (3, 16)] {
            let sorted = order.sort(&frame, run_chunks, merged_runs).unwrap();
            let (mut before, mut seen) = (None, 0);
            for batch in sorted.batches() {
                let batch = batch.unwrap();
                let column = |index: usize| batch.column(index).as_primitive::<UInt32Type>().values().iter().copied();
                for (number, row) in column(0).zip(column(1)) {
                    assert_eq!(number, (count - row) / 3);
                    assert!(before < Some((number, row)), "{before:?} {number} {row}");
                    (before, seen) = (Some((number, row)), seen + 1);
                }
            }
            assert_eq!(seen, count);
        }
    }
}
