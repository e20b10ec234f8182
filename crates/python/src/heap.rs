//! Heaps.

use crate::errors::of_build;
use crate::frame::PyFrame;
use crate::interruptible::{interruptible, run};
use crate::of_process::OfProcess;
use arrow::ffi_stream::ArrowArrayStreamReader;
use arrow_pyarrow::FromPyArrow;
use farfield::Heap;
use farfield_frame::FarFrame;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;

/// A heap: near memory within a budget, and far memory behind it.
#[pyclass(frozen, name = "Heap", module = "farfield._native")]
pub(crate) struct PyHeap {
    heap: OfProcess<Arc<Heap>>,
}

impl PyHeap {
    fn shared(&self) -> PyResult<Arc<Heap>> {
        self.heap.get().cloned()
    }
}

#[pymethods]
impl PyHeap {
    /// Opens a heap; sizes in bytes.
    #[new]
    #[pyo3(signature = (near, far, near_max, far_max, token, name))]
    fn new(
        py: Python<'_>,
        near: u64,
        far: Vec<String>,
        near_max: Option<u64>,
        far_max: Option<u64>,
        token: Option<String>,
        name: Option<String>,
    ) -> PyResult<PyHeap> {
        let mut builder = Heap::builder().near(near);
        builder = far.into_iter().fold(builder, |builder, url| builder.pool(url));
        builder = near_max.into_iter().fold(builder, |builder, bytes| builder.near_max(bytes));
        builder = far_max.into_iter().fold(builder, |builder, bytes| builder.far(bytes));
        builder = token.into_iter().fold(builder, |builder, token| builder.token(token));
        builder = name.into_iter().fold(builder, |builder, name| builder.name(name));
        let heap = run(py, || builder.build())?.map_err(of_build)?;
        Ok(PyHeap { heap: OfProcess::new(Arc::new(heap)) })
    }

    #[getter]
    fn near(&self) -> PyResult<u64> {
        Ok(self.heap.get()?.stats().near_limit_bytes)
    }

    /// Changes the budget; pages leave until it holds.
    fn set_near(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        let heap = self.shared()?;
        run(py, move || heap.set_near(bytes))
    }

    /// Moves the far memory to other servers.
    fn switch_pool(&self, py: Python<'_>, url: String) -> PyResult<()> {
        let heap = self.shared()?;
        run(py, move || heap.switch_pool(url).map(drop))?.map_err(of_build)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.heap.get()?.stats();
        let dict = PyDict::new(py);
        dict.set_item("near_bytes", stats.near_bytes)?;
        dict.set_item("near_limit_bytes", stats.near_limit_bytes)?;
        dict.set_item("misses", stats.misses)?;
        dict.set_item("fetched_bytes", stats.fetched_bytes)?;
        dict.set_item("written_pages", stats.written_pages)?;
        dict.set_item("missing_servers", stats.missing_legs)?;
        Ok(dict)
    }

    #[pyo3(signature = (path, names))]
    fn read_parquet(&self, py: Python<'_>, path: PathBuf, names: Option<Vec<String>>) -> PyResult<PyFrame> {
        let heap = self.shared()?;
        let read = move || match names {
            None => FarFrame::from_parquet(&heap, path),
            Some(names) => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                FarFrame::from_parquet_columns(&heap, path, &names)
            }
        };
        interruptible(py, read).map(PyFrame::new)
    }

    fn read_csv(&self, py: Python<'_>, path: PathBuf) -> PyResult<PyFrame> {
        let heap = self.shared()?;
        interruptible(py, move || FarFrame::from_csv(&heap, path)).map(PyFrame::new)
    }

    fn read_csv_text(&self, py: Python<'_>, text: String) -> PyResult<PyFrame> {
        let heap = self.shared()?;
        interruptible(py, move || FarFrame::from_csv_text(&heap, &text)).map(PyFrame::new)
    }

    /// Reads what has Arrow's stream interface, or PyArrow's reader, batch by batch.
    fn read_arrow(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<PyFrame> {
        let heap = self.shared()?;
        let reader = ArrowArrayStreamReader::from_pyarrow_bound(data)?;
        interruptible(py, move || FarFrame::from_reader(&heap, reader)).map(PyFrame::new)
    }

    /// Answers a query over frames that have these names in it.
    #[cfg(feature = "sql")]
    fn sql(&self, py: Python<'_>, query: String, frames: Vec<(String, PyRef<'_, PyFrame>)>) -> PyResult<PyFrame> {
        let heap = self.shared()?;
        let shared = |(name, frame): (String, PyRef<'_, PyFrame>)| Ok((name, frame.shared()?));
        let frames = frames.into_iter().map(shared).collect::<PyResult<Vec<_>>>()?;
        let answer = run(py, move || crate::sql::answer(&heap, &query, frames))?;
        answer.map(PyFrame::new).map_err(|error| error.exception())
    }
}
