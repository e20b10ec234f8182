//! Frames.

use crate::errors::{exception, of_frame};
use crate::expression::PyExpression;
use crate::interruptible::interruptible;
use crate::of_process::OfProcess;
use crate::values::{numbers, objects};
use arrow::array::{ArrayRef, RecordBatch, RecordBatchReader};
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::ffi_stream::FFI_ArrowArrayStream;
use arrow::util::pretty::pretty_format_batches;
use farfield_frame::{Agg, FarFrame, FrameError, Join, Scan, SortBy};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyCapsule, PyDict, PyList};

/// A table in far memory.
#[pyclass(frozen, name = "Frame", module = "farfield._native")]
pub(crate) struct PyFrame {
    frame: OfProcess<FarFrame>,
}

/// Count, sum, mean, minimum and maximum of a column.
type Totals = (u64, f64, Option<f64>, Option<f64>, Option<f64>);

impl PyFrame {
    pub(crate) fn new(frame: FarFrame) -> PyFrame {
        PyFrame { frame: OfProcess::new(frame) }
    }

    pub(crate) fn shared(&self) -> PyResult<FarFrame> {
        self.frame.get().cloned()
    }

    /// Makes another frame by an operation that ^C ends.
    fn map(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(&FarFrame) -> Result<FarFrame, FrameError> + Send + 'static,
    ) -> PyResult<PyFrame> {
        let frame = self.shared()?;
        interruptible(py, move || operation(&frame)).map(PyFrame::new)
    }
}

#[pymethods]
impl PyFrame {
    fn rows(&self) -> PyResult<usize> {
        Ok(self.frame.get()?.rows())
    }

    /// Names and types of the columns.
    fn schema<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for field in self.frame.get()?.schema().fields() {
            dict.set_item(field.name(), field.data_type().to_string())?;
        }
        Ok(dict)
    }

    fn select(&self, names: Vec<String>) -> PyResult<PyFrame> {
        self.frame.get()?.select(&strs(&names)).map(PyFrame::new).map_err(of_frame)
    }

    fn range(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<PyFrame> {
        self.map(py, move |frame| frame.range(start..end))
    }

    fn matching(&self, py: Python<'_>, condition: PyExpression) -> PyResult<PyFrame> {
        self.map(py, move |frame| frame.matching(&condition.0))
    }

    /// Adds a column, in the place of one with this name.
    fn with_values(&self, py: Python<'_>, name: String, expression: PyExpression) -> PyResult<PyFrame> {
        self.map(py, move |frame| frame.with_values(&name, &expression.0))
    }

    fn renamed(&self, names: Vec<(String, String)>) -> PyResult<PyFrame> {
        let names: Vec<(&str, &str)> = names.iter().map(|(old, new)| (old.as_str(), new.as_str())).collect();
        self.frame.get()?.renamed(&names).map(PyFrame::new).map_err(of_frame)
    }

    /// Sorts by columns, each with whether large values come first.
    fn sort(&self, py: Python<'_>, by: Vec<(String, bool)>) -> PyResult<PyFrame> {
        let by = by.into_iter().map(|(name, descending)| match descending {
            true => SortBy::descending(name),
            false => SortBy::ascending(name),
        });
        let by: Vec<SortBy> = by.collect();
        self.map(py, move |frame| frame.sort(&by))
    }

    /// Groups by columns; each aggregate has the name of its column, a function and a column.
    fn aggregate(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        aggregates: Vec<(String, String, Option<String>)>,
    ) -> PyResult<PyFrame> {
        let agg = |(name, function, column): (String, String, Option<String>)| {
            let agg = match (function.as_str(), column) {
                ("count", None) => Agg::rows(),
                ("count", Some(column)) => Agg::count(column),
                ("sum", Some(column)) => Agg::sum(column),
                ("mean", Some(column)) => Agg::mean(column),
                ("min", Some(column)) => Agg::min(column),
                ("max", Some(column)) => Agg::max(column),
                (function, _) => {
                    let text = format!("there is no aggregate {function:?}: write count, sum, mean, min or max");
                    return Err(exception("QueryError", text));
                }
            };
            Ok(agg.named(name))
        };
        let aggregates = aggregates.into_iter().map(agg).collect::<PyResult<Vec<_>>>()?;
        self.map(py, move |frame| frame.group_by(&strs(&names))?.agg(&aggregates))
    }

    /// Joins with another frame by pairs of columns.
    fn join(
        &self,
        py: Python<'_>,
        other: &PyFrame,
        on: Vec<(String, String)>,
        keeps_left: bool,
        suffix: Option<String>,
    ) -> PyResult<PyFrame> {
        let other = other.shared()?;
        let mut join = if keeps_left { Join::left(&[]) } else { Join::inner(&[]) };
        join = on.into_iter().fold(join, |join, (left, right)| join.on(left, right));
        join = suffix.into_iter().fold(join, Join::suffix);
        self.map(py, move |frame| frame.join(&other, &join))
    }

    fn totals(&self, py: Python<'_>, name: String) -> PyResult<Totals> {
        let frame = self.shared()?;
        let totals = interruptible(py, move || frame.totals(&name))?;
        Ok((totals.count, totals.sum, totals.mean, totals.min, totals.max))
    }

    fn nulls(&self, name: &str) -> PyResult<usize> {
        self.frame.get()?.nulls(name).map_err(of_frame)
    }

    fn quantile(&self, py: Python<'_>, name: String, share: f64) -> PyResult<Option<f64>> {
        let frame = self.shared()?;
        interruptible(py, move || frame.quantile(&name, share))
    }

    /// The values of a column, as objects of Python.
    fn objects<'py>(&self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyList>> {
        objects(py, &self.column(py, name)?)
    }

    /// The values of the rows of a chunk, as objects of Python, by column; nothing behind the last one.
    fn chunk<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Option<Bound<'py, PyDict>>> {
        let frame = self.shared()?;
        let Some(batch) = interruptible(py, move || frame.batches().nth(number).transpose())? else { return Ok(None) };
        let dict = PyDict::new(py);
        for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
            dict.set_item(field.name(), objects(py, column)?)?;
        }
        Ok(Some(dict))
    }

    /// The values of a column of numbers without nulls, as bytes, and their type as NumPy calls it.
    fn numbers<'py>(&self, py: Python<'py>, name: String) -> PyResult<Option<(&'static str, Bound<'py, PyByteArray>)>> {
        numbers(py, &self.column(py, name)?)
    }

    /// Rows as text, in a table.
    fn text(&self, py: Python<'_>, rows: usize) -> PyResult<String> {
        let frame = self.shared()?;
        interruptible(py, move || {
            let head = frame.range(0..rows.min(frame.rows()))?;
            let batches = head.batches().collect::<Result<Vec<_>, _>>()?;
            let batches = if batches.is_empty() { vec![RecordBatch::new_empty(head.schema())] } else { batches };
            Ok(pretty_format_batches(&batches)?.to_string())
        })
    }

    /// Arrow's C stream interface: all rows, a batch at a time, as whoever reads them asks for them.
    fn stream<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let frame = self.frame.get()?;
        let schema = frame.schema();
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        let scan = frame.scan(&names).map_err(of_frame)?;
        let stream = Stream { scan: OfProcess::new(scan), schema: schema.clone() };
        PyCapsule::new(py, FFI_ArrowArrayStream::new(Box::new(stream)), Some(c"arrow_array_stream".into()))
    }
}

impl PyFrame {
    /// Brings a whole column.
    fn column(&self, py: Python<'_>, name: String) -> PyResult<ArrayRef> {
        let frame = self.shared()?;
        interruptible(py, move || {
            let column = frame.select(&[&name])?;
            let batches = column.batches().collect::<Result<Vec<_>, _>>()?;
            Ok(concat_batches(&column.schema(), &batches)?.column(0).clone())
        })
    }
}

/// The rows of a frame, a batch at a time.
struct Stream {
    scan: OfProcess<Scan>,
    schema: SchemaRef,
}

impl Iterator for Stream {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.scan.get_mut() {
            Ok(scan) => scan.next().map(|batch| batch.map_err(ArrowError::from)),
            Err(error) => Some(Err(ArrowError::from_external_error(Box::new(error)))),
        }
    }
}

impl RecordBatchReader for Stream {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}
