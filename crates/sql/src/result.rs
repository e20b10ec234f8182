//! The result of a query as a far frame.

use crate::scan::failed;
use datafusion::common::{DataFusionError, Result};
use datafusion::dataframe::DataFrame;
use farfield::Heap;
use farfield_frame::FarFrame;
use farfield_frame::arrow::array::RecordBatch;
use farfield_frame::arrow::compute::cast;
use farfield_frame::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use farfield_frame::arrow::error::ArrowError;
use futures_util::StreamExt;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Batches that may wait to be stored.
const WAITING: usize = 1;

/// Runs a query and stores its rows in far memory as they arrive. Columns of `LargeUtf8`,
/// `Utf8View` and dictionaries are cast to `Utf8` or the type of the dictionary's values.
pub async fn to_frame(heap: &Arc<Heap>, query: DataFrame) -> Result<FarFrame> {
    let schema = kept(query.schema().as_arrow());
    let mut rows = query.execute_stream().await?;
    let (sender, mut receiver) = mpsc::channel::<Result<RecordBatch>>(WAITING);
    let (heap, to) = (heap.clone(), schema.clone());
    let stored = tokio::task::spawn_blocking(move || {
        let batches = std::iter::from_fn(|| receiver.blocking_recv());
        let batches = batches.map(|batch| batch.map_err(ArrowError::from).and_then(|batch| fitted(&batch, &to)));
        FarFrame::from_batches(&heap, to.clone(), batches)
    });
    while let Some(batch) = rows.next().await {
        // The receiver has failed. Its error is returned below.
        if sender.send(batch).await.is_err() {
            break;
        }
    }
    drop(sender);
    stored.await.map_err(|error| DataFusionError::External(error.into()))?.map_err(failed)
}

/// Returns the schema with the types that a frame keeps.
fn kept(schema: &Schema) -> SchemaRef {
    let kept = |field: &Arc<Field>| match field.data_type() {
        DataType::LargeUtf8 | DataType::Utf8View => Arc::new(field.as_ref().clone().with_data_type(DataType::Utf8)),
        DataType::Dictionary(_, values) => Arc::new(field.as_ref().clone().with_data_type((**values).clone())),
        _ => field.clone(),
    };
    Arc::new(Schema::new(schema.fields().iter().map(kept).collect::<Vec<_>>()))
}

fn fitted(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, ArrowError> {
    let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| cast(column, field.data_type()));
    RecordBatch::try_new(schema.clone(), columns.collect::<Result<_, _>>()?)
}
