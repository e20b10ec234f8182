//! A table of far columns.

use crate::column::{CHUNK_ROWS, FrameColumn};
use crate::error::FrameError;
use arrow::array::{ArrayRef, BooleanArray, RecordBatch, RecordBatchOptions};
use arrow::compute::{concat_batches, filter_record_batch};
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use farfield::Heap;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// A table whose columns are in far memory. It is immutable: every operation makes a new frame,
/// which shares the columns that did not change.
///
/// Besides the heap's budget, one chunk of each column that is read is near, or two while a frame
/// is made. A chunk of numbers of eight bytes takes 64 KiB.
#[derive(Clone)]
pub struct FarFrame {
    pub(crate) heap: Arc<Heap>,
    pub(crate) schema: SchemaRef,
    pub(crate) columns: Vec<Arc<FrameColumn>>,
    rows: usize,
}

impl FarFrame {
    /// Makes a frame of the rows of these batches, which must all have this schema.
    pub fn from_batches(
        heap: &Arc<Heap>,
        schema: SchemaRef,
        batches: impl IntoIterator<Item = Result<RecordBatch, ArrowError>>,
    ) -> Result<FarFrame, FrameError> {
        let mut maker = Maker::new(heap, schema)?;
        batches.into_iter().try_for_each(|batch| maker.push(batch?))?;
        maker.finish()
    }

    /// Returns the names and types of the columns.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of nulls in a column.
    pub fn nulls(&self, name: &str) -> Result<usize, FrameError> {
        Ok(self.columns[self.index(name)?].nulls())
    }

    /// Returns the smallest and the largest number of a column, as two values of its type. They are
    /// known in advance, so nothing is brought near. Returns `None` if there are no numbers, or if
    /// some are NaN or −0, which two orders compare differently.
    pub fn ends(&self, name: &str) -> Result<Option<ArrayRef>, FrameError> {
        self.columns[self.index(name)?].ends()
    }

    /// Returns an iterator over all rows in batches. Each batch is brought near only when it is
    /// asked for.
    pub fn batches(&self) -> Batches<'_> {
        Batches { frame: self, which: (0..self.columns.len()).collect(), schema: self.schema.clone(), next: 0 }
    }

    /// Returns an iterator over all rows in batches, of these columns in this order.
    pub fn batches_of(&self, names: &[&str]) -> Result<Batches<'_>, FrameError> {
        let which = names.iter().map(|name| self.index(name)).collect::<Result<Vec<_>, _>>()?;
        let schema = Arc::new(self.schema.project(&which)?);
        Ok(Batches { frame: self, which, schema, next: 0 })
    }

    /// Returns a frame of these columns in this order. Copies nothing.
    pub fn select(&self, names: &[&str]) -> Result<FarFrame, FrameError> {
        let which = names.iter().map(|name| self.index(name)).collect::<Result<Vec<_>, _>>()?;
        let schema = Arc::new(self.schema.project(&which)?);
        unique_names(&schema)?;
        let columns = which.iter().map(|index| self.columns[*index].clone()).collect();
        Ok(FarFrame { heap: self.heap.clone(), schema, columns, rows: self.rows })
    }

    /// Returns the rows for which `keep` returns true, not false or null. `keep` sees the columns
    /// `names`. Other columns come near only for chunks that keep rows.
    pub fn filter(
        &self,
        names: &[&str],
        mut keep: impl FnMut(&RecordBatch) -> Result<BooleanArray, ArrowError>,
    ) -> Result<FarFrame, FrameError> {
        let mut maker = Maker::new(&self.heap, self.schema.clone())?;
        for (chunk, batch) in self.batches_of(names)?.enumerate() {
            let batch = batch?;
            let kept = keep(&batch)?;
            same_length(batch.num_rows(), kept.len())?;
            if kept.has_true() {
                maker.push(filter_record_batch(&self.batches().chunk(chunk)?, &kept)?)?;
            }
        }
        maker.finish()
    }

    /// Returns the rows with these indices. Returns an error if the range is not within the frame.
    pub fn range(&self, rows: Range<usize>) -> Result<FarFrame, FrameError> {
        if rows.start > rows.end || rows.end > self.rows {
            return Err(FrameError::NoRows { end: rows.end.max(rows.start), rows: self.rows });
        }
        let mut maker = Maker::new(&self.heap, self.schema.clone())?;
        for chunk in rows.start / CHUNK_ROWS..rows.end.div_ceil(CHUNK_ROWS) {
            let first = chunk * CHUNK_ROWS;
            let batch = self.batches().chunk(chunk)?;
            let start = rows.start.max(first) - first;
            let end = rows.end.min(first + batch.num_rows()) - first;
            maker.push(batch.slice(start, end - start))?;
        }
        maker.finish()
    }

    /// Returns a frame with one more column, whose values `make` computes from the columns `names`.
    pub fn with_column(
        &self,
        field: Field,
        names: &[&str],
        mut make: impl FnMut(&RecordBatch) -> Result<ArrayRef, ArrowError>,
    ) -> Result<FarFrame, FrameError> {
        let fields = self.schema.fields().iter().cloned().chain([Arc::new(field.clone())]);
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        unique_names(&schema)?;
        let made = self.make_column(field, names, &mut make)?;
        let columns = self.columns.iter().cloned().chain([made]).collect();
        Ok(FarFrame { heap: self.heap.clone(), schema, columns, rows: self.rows })
    }

    /// Returns a frame in which columns have other names: pairs of an old name and a new one. Copies
    /// nothing.
    pub fn renamed(&self, names: &[(&str, &str)]) -> Result<FarFrame, FrameError> {
        let mut fields: Vec<_> = self.schema.fields().iter().cloned().collect();
        for (old, new) in names {
            let index = self.index(old)?;
            fields[index] = Arc::new(self.schema.field(index).clone().with_name(*new));
        }
        let schema = Arc::new(Schema::new(fields));
        unique_names(&schema)?;
        Ok(FarFrame { heap: self.heap.clone(), schema, columns: self.columns.clone(), rows: self.rows })
    }

    /// Makes a column of values that `make` computes from the columns `names`.
    pub(crate) fn make_column(
        &self,
        field: Field,
        names: &[&str],
        make: &mut dyn FnMut(&RecordBatch) -> Result<ArrayRef, ArrowError>,
    ) -> Result<Arc<FrameColumn>, FrameError> {
        let mut maker = Maker::new(&self.heap, Arc::new(Schema::new(vec![field])))?;
        for batch in self.batches_of(names)? {
            let batch = batch?;
            let values = make(&batch)?;
            same_length(batch.num_rows(), values.len())?;
            // Arrow checks the type, and that a column without nulls has none.
            maker.push(RecordBatch::try_new(maker.schema.clone(), vec![values])?)?;
        }
        Ok(maker.finish()?.columns.swap_remove(0))
    }

    pub(crate) fn index(&self, name: &str) -> Result<usize, FrameError> {
        self.schema.index_of(name).map_err(|_| FrameError::NoColumn { name: name.to_owned() })
    }
}

impl std::fmt::Debug for FarFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FarFrame").field("rows", &self.rows).field("schema", &self.schema).finish_non_exhaustive()
    }
}

/// Iterator over the rows of a frame, one chunk at a time.
#[derive(Debug)]
pub struct Batches<'f> {
    frame: &'f FarFrame,
    which: Vec<usize>,
    schema: SchemaRef,
    next: usize,
}

impl Batches<'_> {
    pub(crate) fn chunk(&self, chunk: usize) -> Result<RecordBatch, FrameError> {
        let frame = self.frame;
        let columns = self.which.iter().map(|index| frame.columns[*index].chunk(&frame.heap, chunk));
        // If there are no columns, Arrow has to be told the number of rows.
        let rows = CHUNK_ROWS.min(frame.rows - chunk * CHUNK_ROWS);
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        Ok(RecordBatch::try_new_with_options(self.schema.clone(), columns.collect::<Result<_, _>>()?, &options)?)
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<RecordBatch, FrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.frame.rows.div_ceil(CHUNK_ROWS) {
            return None;
        }
        self.next += 1;
        Some(self.chunk(self.next - 1))
    }

    /// Skips batches without bringing them near.
    fn nth(&mut self, batches: usize) -> Option<Self::Item> {
        self.next = self.next.saturating_add(batches);
        self.next()
    }
}

/// A frame under construction. It collects rows until they fill a chunk.
pub(crate) struct Maker {
    heap: Arc<Heap>,
    schema: SchemaRef,
    columns: Vec<FrameColumn>,
    rows: usize,
    waiting: Vec<RecordBatch>,
    waiting_rows: usize,
}

impl Maker {
    pub(crate) fn new(heap: &Arc<Heap>, schema: SchemaRef) -> Result<Maker, FrameError> {
        unique_names(&schema)?;
        let columns = schema.fields().iter().map(|field| FrameColumn::new(field)).collect::<Result<_, _>>()?;
        Ok(Maker { heap: heap.clone(), schema, columns, rows: 0, waiting: Vec::new(), waiting_rows: 0 })
    }

    pub(crate) fn push(&mut self, mut batch: RecordBatch) -> Result<(), FrameError> {
        if batch.schema().fields() != self.schema.fields() {
            return Err(ArrowError::SchemaError("batches of one frame have the same columns".into()).into());
        }
        while self.waiting_rows + batch.num_rows() >= CHUNK_ROWS {
            let now = CHUNK_ROWS - self.waiting_rows;
            self.waiting.push(batch.slice(0, now));
            batch = batch.slice(now, batch.num_rows() - now);
            self.store()?;
        }
        if batch.num_rows() > 0 {
            self.waiting_rows += batch.num_rows();
            self.waiting.push(batch);
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<FarFrame, FrameError> {
        if self.waiting_rows > 0 {
            self.store()?;
        }
        assert!(self.columns.iter().all(|column| column.rows() == self.rows));
        let columns = self.columns.into_iter().map(Arc::new).collect();
        Ok(FarFrame { heap: self.heap, schema: self.schema, columns, rows: self.rows })
    }

    fn store(&mut self) -> Result<(), FrameError> {
        let waiting = std::mem::take(&mut self.waiting);
        self.waiting_rows = 0;
        let rows: usize = waiting.iter().map(RecordBatch::num_rows).sum();
        // Batches of one frame may differ in the metadata of their schemas.
        let schema = waiting[0].schema();
        let chunk = if let [batch] = &waiting[..] { batch.clone() } else { concat_batches(&schema, &waiting)? };
        for (column, array) in self.columns.iter_mut().zip(chunk.columns()) {
            column.push(&self.heap, array)?;
        }
        self.rows += rows;
        Ok(())
    }
}

pub(crate) fn same_length(rows: usize, values: usize) -> Result<(), FrameError> {
    if rows == values { Ok(()) } else { Err(FrameError::Lengths { rows, values }) }
}

fn unique_names(schema: &Schema) -> Result<(), FrameError> {
    let mut names = BTreeSet::new();
    match schema.fields().iter().find(|field| !names.insert(field.name())) {
        Some(field) => Err(FrameError::SameName { name: field.name().clone() }),
        None => Ok(()),
    }
}
