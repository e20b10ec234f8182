//! Queries by SQL.

use crate::errors::{exception, of_frame};
use farfield::Heap;
use farfield_frame::{FarFrame, FrameError, block_on, share_cancellation};
use farfield_sql::datafusion::error::DataFusionError;
use farfield_sql::{FarTable, context, to_frame};
use pyo3::PyErr;
use std::sync::Arc;

/// Error of a query.
pub(crate) enum SqlError {
    Plan(DataFusionError),
    Frame(FrameError),
    Runtime(std::io::Error),
}

impl SqlError {
    pub(crate) fn exception(self) -> PyErr {
        match self {
            SqlError::Runtime(error) => error.into(),
            SqlError::Frame(error) => of_frame(error),
            SqlError::Plan(error) => match frame_error(error) {
                Ok(error) => of_frame(error),
                Err(text) => exception("QueryError", text),
            },
        }
    }
}

/// Takes the error of a frame out of that of DataFusion, or returns its text.
fn frame_error(error: DataFusionError) -> Result<FrameError, String> {
    match error {
        DataFusionError::External(error) => error.downcast().map(|error| *error).map_err(|error| error.to_string()),
        error => Err(error.to_string()),
    }
}

/// Answers a query over these tables. If the operation is cancelled, the query is dropped, and its threads end
/// at their next chunk: those of the runtime are waited for here.
pub(crate) fn answer(heap: &Arc<Heap>, query: &str, tables: Vec<(String, FarFrame)>) -> Result<FarFrame, SqlError> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.on_thread_start(share_cancellation()).build().map_err(SqlError::Runtime)?;
    let _entered = runtime.enter();
    let answer = block_on(async {
        let context = context();
        for (name, frame) in tables {
            context.register_table(name, Arc::new(FarTable::new(frame)))?;
        }
        to_frame(heap, context.sql(query).await?).await
    });
    answer.map_err(SqlError::Frame)?.map_err(SqlError::Plan)
}
