//! Scans: some columns of the rows that conditions keep, a batch at a time.
//!
//! Ranges of numbers are evaluated first. Zone maps ([`zones`](crate::zones)) decide for most
//! chunks that all or none of their rows are in a range. In the other chunks, the memory server
//! finds the rows. Then closures see the columns that they name. The requested columns are read
//! last: by chunks, or, if few rows are left, only these rows, which the server gathers.
//!
//! Danger: a row that is there twice, not at all, or with another row's values; a range that the
//! server compares differently.

use crate::column::{CHUNK_ROWS, FrameColumn, Values, chunk_of, natives, read, with_images, with_numbers};
use crate::error::FrameError;
use crate::expression::Expression;
use crate::frame::{FarFrame, same_length};
use crate::zones::{ImageRange, ZoneMatch, runs};
use arrow::array::{Array, BooleanArray, RecordBatch, RecordBatchOptions, StringArray, UInt32Array};
use arrow::compute::kernels::cmp::eq;
use arrow::compute::take;
use arrow::datatypes::{ArrowNativeType, DataType, SchemaRef};
use arrow::error::ArrowError;
use farfield::{FarVec, Heap, Number};
use std::any::TypeId;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

/// Chunks whose rows are found by one request.
const SPAN_CHUNKS: usize = 32;
/// Inverse of a share: if fewer than 1/16 of the rows in the matching chunks are kept, the server
/// gathers single rows.
const FEW: usize = 16;

impl FarFrame {
    /// Scans the columns `names` of all rows. The methods of the scan narrow it to some rows.
    ///
    /// ```
    /// use farfield::Heap;
    /// use farfield_frame::FarFrame;
    /// use std::sync::Arc;
    ///
    /// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let trips = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n")?;
    /// let mut dear = trips.scan(&["zone"])?.within("fare", 10.0..)?;
    /// assert_eq!(dear.next().unwrap()?.num_rows(), 2);
    /// assert!(dear.next().is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn scan(&self, names: &[&str]) -> Result<Scan, FrameError> {
        let columns = self.indices(names)?;
        let schema = Arc::new(self.schema.project(&columns)?);
        let chunks = 0..self.rows().div_ceil(CHUNK_ROWS);
        let (within, keep, found, computed) = (Vec::new(), Vec::new(), VecDeque::new(), BTreeMap::new());
        Ok(Scan { frame: self.clone(), columns, schema, within, keep, chunks, found, computed })
    }

    /// Returns the error that a column has the wrong type.
    fn wrong_type(&self, index: usize) -> FrameError {
        let field = self.schema.field(index);
        FrameError::Type { name: field.name().clone(), data_type: field.data_type().clone() }
    }

    fn indices(&self, names: &[&str]) -> Result<Vec<usize>, FrameError> {
        names.iter().map(|name| self.index(name)).collect()
    }
}

/// Closure that says which rows of a batch are kept.
type Keep = Box<dyn FnMut(&RecordBatch) -> Result<BooleanArray, ArrowError> + Send>;

/// Iterator over rows of a frame, in order, in batches of at most [`CHUNK_ROWS`] rows. See
/// [`FarFrame::scan`].
///
/// Besides the heap's budget, a chunk of each column that is read is near, and the indices of the
/// rows that are kept of 32 chunks.
pub struct Scan {
    pub(crate) frame: FarFrame,
    columns: Vec<usize>,
    schema: SchemaRef,
    /// Columns of numbers or of kinds of strings, with the range that their values must be in.
    /// `None` stands for an empty range.
    pub(crate) within: Vec<(usize, Option<ImageRange>)>,
    pub(crate) keep: Vec<(Vec<usize>, Keep)>,
    /// Chunks that were not searched yet.
    pub(crate) chunks: Range<usize>,
    found: VecDeque<RowSelection>,
    /// Columns that are aggregated and never read: their names and what they are computed from.
    pub(crate) computed: BTreeMap<String, Expression>,
}

/// Rows that are brought near together.
enum RowSelection {
    /// All rows of a chunk.
    Chunk(usize),
    /// Some rows of a chunk, by their index in it.
    Part(usize, Vec<u32>),
    /// Some rows of any chunks, ascending.
    Sparse(Vec<u64>),
}

impl Scan {
    /// Keeps only rows whose value in a column of numbers is in this range. Numbers are compared as
    /// Arrow does: −0 is smaller than +0, and NaN larger than all others. Null is in no range.
    /// Dates and times are the integers that Arrow stores. `N` must be the type that is stored.
    pub fn within<N: Number>(mut self, name: &str, values: impl RangeBounds<N>) -> Result<Scan, FrameError> {
        let index = self.frame.index(name)?;
        let values_of = &self.frame.columns[index].values;
        let is_stored_type = with_numbers!(values_of, numbers => are::<N, _>(numbers),
            Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => false);
        if !is_stored_type {
            return Err(self.frame.wrong_type(index));
        }
        self.within.push((index, ImageRange::of(&values)));
        Ok(self)
    }

    /// Keeps only rows whose value in a column of strings is this one. In a column of few kinds of
    /// strings, the memory server finds them, as it does for ranges.
    pub fn equal_to(mut self, name: &str, string: &str) -> Result<Scan, FrameError> {
        let index = self.frame.index(name)?;
        match &self.frame.columns[index].values {
            Values::Words(words) => {
                let number = words.number(string);
                self.within.push((index, number.and_then(|number| ImageRange::of(&(number..=number)))));
                Ok(self)
            }
            Values::Text(_) if self.frame.schema.field(index).data_type() == &DataType::Utf8 => {
                let string = StringArray::new_scalar(string);
                self.filter(&[name], move |batch| eq(batch.column(0), &string))
            }
            _ => Err(self.frame.wrong_type(index)),
        }
    }

    /// Keeps only rows for which `keep` returns true, not false or null. `keep` sees the columns
    /// `names` of the rows that all earlier conditions keep.
    pub fn filter(
        mut self,
        names: &[&str],
        keep: impl FnMut(&RecordBatch) -> Result<BooleanArray, ArrowError> + Send + 'static,
    ) -> Result<Scan, FrameError> {
        self.keep.push((self.frame.indices(names)?, Box::new(keep)));
        Ok(self)
    }

    /// Keeps only the rows of part number `part`, from 0, of `of` parts of the frame of about equal
    /// length.
    ///
    /// # Panics
    /// Panics if `part` is not less than `of`.
    #[track_caller]
    pub fn part(mut self, part: usize, of: usize) -> Scan {
        assert!(part < of, "part {part} of {of}");
        let chunks = self.frame.rows().div_ceil(CHUNK_ROWS);
        self.chunks = chunks * part / of..chunks * (part + 1) / of;
        self
    }

    /// Returns the names and types of the columns in a batch.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Finds the rows of the next chunks that are in all ranges.
    fn find(&mut self) -> Result<(), FrameError> {
        let span = self.chunks.start..self.chunks.end.min(self.chunks.start + SPAN_CHUNKS);
        self.chunks.start = span.end;
        let mut rows: Option<Vec<u64>> = None;
        let all = span.start * CHUNK_ROWS..self.frame.rows().min(span.end * CHUNK_ROWS);
        for (column, images) in &self.within {
            let column = &self.frame.columns[*column];
            let Some(images) = images else { return Ok(()) };
            let found = rows_within(&self.frame.heap, column, *images, span.clone())?;
            rows = Some(match rows {
                None => found,
                Some(rows) => common(&rows, &found),
            });
            if rows.as_ref().is_some_and(Vec::is_empty) {
                return Ok(());
            }
        }
        self.found = match rows {
            Some(rows) if rows.len() < all.len() => arranged(rows),
            _ => span.map(RowSelection::Chunk).collect(),
        };
        Ok(())
    }

    /// Reads the columns of the rows that all closures keep. Returns `None` if none are kept.
    fn read(&mut self, mut rows: RowSelection) -> Result<Option<RecordBatch>, FrameError> {
        for (columns, keep) in &mut self.keep {
            let schema = Arc::new(self.frame.schema.project(columns)?);
            let batch = self.frame.rows_of(columns, schema, &rows)?;
            let kept = keep(&batch)?;
            same_length(batch.num_rows(), kept.len())?;
            match rows.kept(&kept) {
                Some(some) => rows = some,
                None => return Ok(None),
            }
        }
        self.frame.rows_of(&self.columns, self.schema.clone(), &rows).map(Some)
    }

    fn advance(&mut self) -> Result<Option<RecordBatch>, FrameError> {
        loop {
            match self.found.pop_front() {
                Some(rows) => {
                    if let Some(batch) = self.read(rows)? {
                        return Ok(Some(batch));
                    }
                }
                None if self.chunks.is_empty() => return Ok(None),
                None => self.find()?,
            }
        }
    }
}

impl Iterator for Scan {
    type Item = Result<RecordBatch, FrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

impl fmt::Debug for Scan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.within.len();
        f.debug_struct("Scan")
            .field("frame", &self.frame)
            .field("schema", &self.schema)
            .field("ranges", &ranges)
            .finish_non_exhaustive()
    }
}

impl RowSelection {
    /// Returns the rows for which `says` is true, or `None` if there are none.
    fn kept(self, mask: &BooleanArray) -> Option<RowSelection> {
        let kept = match mask.nulls() {
            Some(nulls) => mask.values() & nulls.inner(),
            None => mask.values().clone(),
        };
        match kept.count_set_bits() {
            0 => return None,
            all if all == kept.len() => return Some(self),
            _ => {}
        }
        let indices = kept.set_indices();
        Some(match self {
            RowSelection::Chunk(chunk) => RowSelection::Part(chunk, indices.map(|index| index as u32).collect()),
            RowSelection::Part(chunk, rows) => RowSelection::Part(chunk, indices.map(|index| rows[index]).collect()),
            RowSelection::Sparse(rows) => RowSelection::Sparse(indices.map(|index| rows[index]).collect()),
        })
    }
}

impl FarFrame {
    fn rows_of(&self, columns: &[usize], schema: SchemaRef, rows: &RowSelection) -> Result<RecordBatch, FrameError> {
        let columns = columns.iter().map(|index| {
            let (heap, column) = (&self.heap, &self.columns[*index]);
            match rows {
                RowSelection::Chunk(chunk) => column.chunk(heap, *chunk),
                RowSelection::Part(chunk, rows) => {
                    let rows = UInt32Array::from_iter_values(rows.iter().copied());
                    Ok(take(&column.chunk(heap, *chunk)?, &rows, None)?)
                }
                RowSelection::Sparse(rows) => column.gather(heap, rows),
            }
        });
        let count = match rows {
            RowSelection::Chunk(chunk) => CHUNK_ROWS.min(self.rows() - chunk * CHUNK_ROWS),
            RowSelection::Part(_, rows) => rows.len(),
            RowSelection::Sparse(rows) => rows.len(),
        };
        let options = RecordBatchOptions::new().with_row_count(Some(count));
        Ok(RecordBatch::try_new_with_options(schema, columns.collect::<Result<_, _>>()?, &options)?)
    }
}

/// Returns the rows of these chunks that are in a range, ascending.
fn rows_within(
    heap: &Heap,
    column: &FrameColumn,
    images: ImageRange,
    span: Range<usize>,
) -> Result<Vec<u64>, FrameError> {
    let mut rows = Vec::new();
    for (share, run) in runs(column.zones.chunks[span.clone()].iter().map(|zone| images.share(*zone))) {
        let chunks = span.start + run.start..span.start + run.end;
        match share {
            ZoneMatch::None => {}
            ZoneMatch::All => {
                let all = chunks.start * CHUNK_ROWS..column.rows().min(chunks.end * CHUNK_ROWS);
                rows.extend(present(heap, column, (all.start as u64..all.end as u64).collect())?);
            }
            ZoneMatch::Some => {
                with_images!(&column.values, numbers => find(heap, column, numbers, images, chunks, &mut rows)?,
                Values::Bits(_) | Values::Text(_) | Values::Plain(_) => unreachable!("these have no ranges"))
            }
        }
    }
    Ok(rows)
}

/// Returns the rows that have a value.
fn present(heap: &Heap, column: &FrameColumn, rows: Vec<u64>) -> Result<Vec<u64>, FrameError> {
    Ok(match column.valid_at(heap, &rows)? {
        None => rows,
        Some(valid) => valid.set_indices().map(|at| rows[at]).collect(),
    })
}

/// Appends the matching rows of chunks that match in part. The memory server finds them, unless the
/// column has NaN or −0: its numbers are then brought near and compared by their images.
fn find<N: Number + ArrowNativeType>(
    heap: &Heap,
    column: &FrameColumn,
    numbers: &FarVec<N>,
    images: ImageRange,
    chunks: Range<usize>,
    rows: &mut Vec<u64>,
) -> Result<(), FrameError> {
    if !column.zones.is_odd {
        let all = chunks.start * CHUNK_ROWS..column.rows().min(chunks.end * CHUNK_ROWS);
        let values = images.numbers::<N>(&column.zones.chunks[chunks]);
        let found = numbers.find(heap, values).over(all).run()?;
        let found = read(heap, &found, 0..found.len())?;
        // A row without a value stores a zero.
        rows.extend(if values.contains(&N::default()) { present(heap, column, found)? } else { found });
        return Ok(());
    }
    for chunk in chunks {
        let data = column.chunk(heap, chunk)?.to_data();
        let numbers: &[N] = natives(&data);
        let is_in = |row: &usize| images.contains(numbers[*row].image());
        let is_valid = |row: &usize| data.nulls().is_none_or(|nulls| nulls.is_valid(*row));
        let first = chunk * CHUNK_ROWS;
        rows.extend((0..numbers.len()).filter(is_valid).filter(is_in).map(|row| (first + row) as u64));
    }
    Ok(())
}

/// Splits rows into batches: by chunks, or, if they are few, across chunks.
fn arranged(rows: Vec<u64>) -> VecDeque<RowSelection> {
    let chunks: Vec<&[u64]> = rows.chunk_by(|row, next| chunk_of(*row) == chunk_of(*next)).collect();
    if rows.len() * FEW < chunks.len() * CHUNK_ROWS {
        return rows.chunks(CHUNK_ROWS).map(|rows| RowSelection::Sparse(rows.to_vec())).collect();
    }
    let part = |rows: &&[u64]| {
        let chunk = chunk_of(rows[0]);
        RowSelection::Part(chunk, rows.iter().map(|row| (*row as usize - chunk * CHUNK_ROWS) as u32).collect())
    };
    chunks.iter().map(part).collect()
}

/// Returns the rows in both lists, which must ascend.
fn common(some: &[u64], others: &[u64]) -> Vec<u64> {
    let mut others = others.iter().peekable();
    let is_common = |row: &&u64| {
        while others.next_if(|other| other < row).is_some() {}
        others.peek() == Some(row)
    };
    some.iter().filter(is_common).copied().collect()
}

fn are<N: Number, M: Number>(_numbers: &FarVec<M>) -> bool {
    TypeId::of::<N>() == TypeId::of::<M>()
}
