//! Frames from Parquet files.
//!
//! Danger: a file that is near as a whole; a value that becomes null because it does not fit; a damaged file that stops the program.

use crate::column::CHUNK_ROWS;
use crate::error::FrameError;
use crate::frame::{FarFrame, Maker};
use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use farfield::Heap;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

impl FarFrame {
    /// The table in a Parquet file. Strings of any form become `Utf8`, dictionaries what they stand for; what a column cannot hold is an error that names it.
    /// Near are one batch and the pages of the file that it comes from.
    pub fn from_parquet(heap: &Arc<Heap>, path: impl AsRef<Path>) -> Result<FarFrame, FrameError> {
        let name = path.as_ref().display().to_string();
        let file = File::open(path).map_err(|why| FrameError::File { name: name.clone(), why })?;
        let wrong = |why: String| FrameError::Parquet { name: name.clone(), why };
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| wrong(error.to_string()))?;
        let schema = Arc::new(stored(builder.schema()));
        let mut maker = Maker::new(heap, schema.clone())?;
        let reader = builder.with_batch_size(CHUNK_ROWS).build().map_err(|error| wrong(error.to_string()))?;
        for batch in reader {
            let batch = batch.map_err(|error| wrong(error.to_string()))?;
            maker.push(converted(&schema, &batch)?)?;
        }
        maker.finish()
    }
}

/// What columns are kept as.
fn stored(schema: &Schema) -> Schema {
    let field = |field: &Arc<Field>| Field::new(field.name(), stored_type(field.data_type()), field.is_nullable());
    Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>())
}

fn stored_type(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Dictionary(_, values) => stored_type(values),
        // A column that is always empty could be of any type.
        DataType::LargeUtf8 | DataType::Utf8View | DataType::Null => DataType::Utf8,
        DataType::Float16 => DataType::Float32,
        other => other.clone(),
    }
}

fn converted(schema: &SchemaRef, batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    // What does not fit is an error, and no null.
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    let columns = batch.columns().iter().zip(schema.fields());
    let columns = columns.map(|(column, field)| cast_with_options(column, field.data_type(), &strict));
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema.clone(), columns.collect::<Result<_, _>>()?, &options)
}
