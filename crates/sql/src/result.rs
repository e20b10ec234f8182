//! The result of a query as a far frame.

use crate::scan::failed;
use datafusion::common::{DataFusionError, Result};
use datafusion::dataframe::DataFrame;
use farfield::Heap;
use farfield_frame::FarFrame;
use farfield_frame::arrow::array::{RecordBatch, RecordBatchIterator};
use farfield_frame::arrow::error::ArrowError;
use futures_util::StreamExt;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Batches that may wait to be stored.
const WAITING: usize = 1;

/// Runs a query and stores its rows in far memory as they arrive, in the types that
/// [frames keep](FarFrame::from_reader).
pub async fn to_frame(heap: &Arc<Heap>, query: DataFrame) -> Result<FarFrame> {
    let schema = Arc::new(query.schema().as_arrow().clone());
    let mut rows = query.execute_stream().await?;
    let (sender, mut receiver) = mpsc::channel::<Result<RecordBatch>>(WAITING);
    let heap = heap.clone();
    let stored = tokio::task::spawn_blocking(move || {
        let batches = std::iter::from_fn(|| receiver.blocking_recv()).map(|batch| batch.map_err(ArrowError::from));
        FarFrame::from_reader(&heap, RecordBatchIterator::new(batches, schema))
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
