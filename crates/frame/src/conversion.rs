//! Batches of any Arrow types in the types that frames keep.
//!
//! Danger: a value that becomes null because it does not fit.

use crate::error::FrameError;
use crate::frame::FarFrame;
use arrow::array::{RecordBatch, RecordBatchOptions, RecordBatchReader};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use arrow::error::ArrowError;
use farfield::Heap;
use std::sync::Arc;

impl FarFrame {
    /// Reads all rows of an Arrow reader, a batch at a time. Strings of any form become `Utf8`, bytes
    /// of any length `Binary`, and dictionaries become their values, also in lists, structs and maps.
    /// A column that frames do not keep (unions, list views) is an error that names it.
    pub fn from_reader(heap: &Arc<Heap>, reader: impl RecordBatchReader) -> Result<FarFrame, FrameError> {
        let schema = Arc::new(kept_types(&reader.schema()));
        let batches = reader.map(|batch| batch.and_then(|batch| in_kept_types(&schema, &batch)));
        FarFrame::from_batches(heap, schema.clone(), batches)
    }
}

/// Returns a schema with the types that a frame keeps.
pub(crate) fn kept_types(schema: &Schema) -> Schema {
    Schema::new(schema.fields().iter().map(kept_field).collect::<Vec<_>>())
}

fn kept_field(field: &FieldRef) -> FieldRef {
    Arc::new(Field::new(field.name(), kept_type(field.data_type()), field.is_nullable()))
}

fn kept_type(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Dictionary(_, values) => kept_type(values),
        // A column without any value could have any type.
        DataType::LargeUtf8 | DataType::Utf8View | DataType::Null => DataType::Utf8,
        DataType::LargeBinary | DataType::BinaryView => DataType::Binary,
        DataType::Float16 => DataType::Float32,
        DataType::List(field) => DataType::List(kept_field(field)),
        DataType::LargeList(field) => DataType::LargeList(kept_field(field)),
        DataType::FixedSizeList(field, length) => DataType::FixedSizeList(kept_field(field), *length),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(kept_field).collect()),
        DataType::Map(entries, is_sorted) => DataType::Map(kept_field(entries), *is_sorted),
        other => other.clone(),
    }
}

/// Returns a batch in the types of such a schema.
pub(crate) fn in_kept_types(schema: &SchemaRef, batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    // A value that does not fit is an error, not a null.
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    let columns = batch.columns().iter().zip(schema.fields());
    let columns = columns.map(|(column, field)| cast_with_options(column, field.data_type(), &strict));
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema.clone(), columns.collect::<Result<_, _>>()?, &options)
}
