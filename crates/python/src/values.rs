//! Columns as objects of Python and as bytes for NumPy.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::*;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList};

/// Returns the values of an array as numbers, truth values, `str`, `bytes`, dates, datetimes and
/// `Decimal`; null is `None`. Values of other types are what Arrow prints.
pub(crate) fn objects<'py>(py: Python<'py>, array: &ArrayRef) -> PyResult<Bound<'py, PyList>> {
    macro_rules! plain {
        ($type:ty) => {
            PyList::new(py, array.as_primitive::<$type>().iter())
        };
    }
    match array.data_type() {
        DataType::Int8 => plain!(Int8Type),
        DataType::Int16 => plain!(Int16Type),
        DataType::Int32 => plain!(Int32Type),
        DataType::Int64 => plain!(Int64Type),
        DataType::UInt8 => plain!(UInt8Type),
        DataType::UInt16 => plain!(UInt16Type),
        DataType::UInt32 => plain!(UInt32Type),
        DataType::UInt64 => plain!(UInt64Type),
        DataType::Float32 => plain!(Float32Type),
        DataType::Float64 => plain!(Float64Type),
        DataType::Boolean => PyList::new(py, array.as_boolean().iter()),
        DataType::Utf8 => PyList::new(py, array.as_string::<i32>().iter()),
        DataType::Binary => {
            PyList::new(py, array.as_binary::<i32>().iter().map(|bytes| bytes.map(|bytes| PyBytes::new(py, bytes))))
        }
        DataType::Date32 => parsed(py, array, "date"),
        DataType::Timestamp(_, zone) => {
            // Python knows microseconds.
            let data_type = DataType::Timestamp(TimeUnit::Microsecond, zone.clone());
            parsed(py, &cast(array, &data_type).map_err(failed)?, "datetime")
        }
        DataType::Decimal128(..) | DataType::Decimal256(..) => {
            let class = py.import("decimal")?.getattr("Decimal")?;
            texts(py, array, |text| class.call1((text,)))
        }
        _ => texts(py, array, |text| text.into_bound_py_any(py)),
    }
}

/// Makes objects of a class of `datetime` of what Arrow prints.
fn parsed<'py>(py: Python<'py>, array: &ArrayRef, class: &str) -> PyResult<Bound<'py, PyList>> {
    let class = py.import("datetime")?.getattr(class)?;
    // Python 3.10 does not know Z.
    texts(py, array, |text| class.call_method1("fromisoformat", (text.replace('Z', "+00:00"),)))
}

fn texts<'py>(
    py: Python<'py>,
    array: &ArrayRef,
    object: impl Fn(&str) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let options = FormatOptions::default();
    let formatter = ArrayFormatter::try_new(array, &options).map_err(failed)?;
    let objects = (0..array.len()).map(|row| match array.is_valid(row) {
        true => object(&formatter.value(row).try_to_string().map_err(failed)?),
        false => Ok(py.None().into_bound(py)),
    });
    PyList::new(py, objects.collect::<PyResult<Vec<_>>>()?)
}

/// Returns the bytes of an array of numbers, dates or times without nulls, and their type as NumPy
/// calls it; `None` for other arrays.
pub(crate) fn numbers<'py>(
    py: Python<'py>,
    array: &ArrayRef,
) -> PyResult<Option<(&'static str, Bound<'py, PyByteArray>)>> {
    let kind = match array.data_type() {
        _ if array.null_count() > 0 => return Ok(None),
        DataType::Int8 => "i1",
        DataType::Int16 => "<i2",
        DataType::Int32 => "<i4",
        DataType::Int64 => "<i8",
        DataType::UInt8 => "u1",
        DataType::UInt16 => "<u2",
        DataType::UInt32 => "<u4",
        DataType::UInt64 => "<u8",
        DataType::Float32 => "<f4",
        DataType::Float64 => "<f8",
        DataType::Timestamp(TimeUnit::Second, None) => "<M8[s]",
        DataType::Timestamp(TimeUnit::Millisecond, None) => "<M8[ms]",
        DataType::Timestamp(TimeUnit::Microsecond, None) => "<M8[us]",
        DataType::Timestamp(TimeUnit::Nanosecond, None) => "<M8[ns]",
        _ => return Ok(None),
    };
    let data = array.to_data();
    let width = data.data_type().primitive_width().unwrap_or(1);
    let bytes = &data.buffers()[0].as_slice()[data.offset() * width..][..data.len() * width];
    // NumPy may write to a bytearray, and not to bytes.
    Ok(Some((kind, PyByteArray::new(py, bytes))))
}

fn failed(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}
