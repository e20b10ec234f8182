//! Expressions over the columns of a row.

use crate::errors::exception;
use arrow::array::{ArrayRef, BinaryArray, BooleanArray, Decimal128Array, Float64Array, Int64Array};
use arrow::array::{NullArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DECIMAL128_MAX_PRECISION, DataType, TimeUnit};
use farfield_frame::Expression;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyString};
use std::sync::Arc;

/// A formula: what `col("fare") > 10` makes.
#[pyclass(frozen, name = "Expression", module = "farfield._native", from_py_object)]
#[derive(Clone)]
pub(crate) struct PyExpression(pub(crate) Expression);

#[pymethods]
impl PyExpression {
    /// The value of a column in each row.
    #[staticmethod]
    fn column(name: String) -> PyExpression {
        PyExpression(farfield_frame::column(name))
    }

    /// The same value in each row.
    #[staticmethod]
    fn literal(value: &Bound<'_, PyAny>) -> PyResult<PyExpression> {
        Ok(PyExpression(Expression::literal(literal(value)?)))
    }

    /// Combines two expressions by an operator of Python, or by the name of a method.
    fn binary(&self, operator: &str, other: PyExpression) -> PyResult<PyExpression> {
        let (left, right) = (self.0.clone(), other.0);
        Ok(PyExpression(match operator {
            "==" => left.equal_to(right),
            "!=" => left.not_equal_to(right),
            "<" => left.less_than(right),
            "<=" => left.at_most(right),
            ">" => left.more_than(right),
            ">=" => left.at_least(right),
            "&" => left.and(right),
            "|" => left.or(right),
            "+" => left + right,
            "-" => left - right,
            "*" => left * right,
            "/" => left / right,
            "%" => left % right,
            "contains" => left.contains(right),
            "starts_with" => left.starts_with(right),
            "ends_with" => left.ends_with(right),
            other => return Err(PyTypeError::new_err(format!("no operator {other}"))),
        }))
    }

    fn negative(&self) -> PyExpression {
        PyExpression(-self.0.clone())
    }

    fn inverse(&self) -> PyExpression {
        PyExpression(!self.0.clone())
    }

    fn is_null(&self) -> PyExpression {
        PyExpression(self.0.clone().is_null())
    }

    fn is_in(&self, values: Vec<PyExpression>) -> PyExpression {
        PyExpression(self.0.clone().is_in(values.into_iter().map(|value| value.0)))
    }

    fn cast(&self, data_type: &str) -> PyResult<PyExpression> {
        let data_type: DataType = match data_type {
            "str" => DataType::Utf8,
            "int" => DataType::Int64,
            "float" => DataType::Float64,
            "bool" => DataType::Boolean,
            "date" => DataType::Date32,
            // Arrow's own names: Int32, Timestamp(µs), Decimal128(10, 2).
            other => {
                other.parse().map_err(|error| exception("QueryError", format!("{other:?} is no type: {error}")))?
            }
        };
        Ok(PyExpression(self.0.clone().cast(data_type)))
    }
}

/// Returns an array of one value.
fn literal(value: &Bound<'_, PyAny>) -> PyResult<ArrayRef> {
    if value.is_none() {
        return Ok(Arc::new(NullArray::new(1)));
    }
    // A truth value is an integer, too.
    if value.is_instance_of::<PyBool>() {
        return Ok(Arc::new(BooleanArray::from(vec![value.extract::<bool>()?])));
    }
    if value.is_instance_of::<PyInt>() {
        return integer(value);
    }
    if value.is_instance_of::<PyFloat>() {
        return Ok(Arc::new(Float64Array::from(vec![value.extract::<f64>()?])));
    }
    if value.is_instance_of::<PyString>() {
        return Ok(Arc::new(StringArray::from(vec![value.extract::<String>()?])));
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(Arc::new(BinaryArray::from(vec![bytes.as_bytes()])));
    }
    of_time(value)
}

fn integer(value: &Bound<'_, PyAny>) -> PyResult<ArrayRef> {
    if let Ok(value) = value.extract::<i64>() {
        return Ok(Arc::new(Int64Array::from(vec![value])));
    }
    let value: i128 = value.extract().map_err(|_| PyOverflowError::new_err("an integer of more than 127 bits"))?;
    let array = Decimal128Array::from(vec![value]).with_precision_and_scale(DECIMAL128_MAX_PRECISION, 0);
    let array = array.map_err(|error| PyOverflowError::new_err(error.to_string()))?;
    array
        .validate_decimal_precision(DECIMAL128_MAX_PRECISION)
        .map_err(|error| PyOverflowError::new_err(error.to_string()))?;
    Ok(Arc::new(array))
}

/// Dates, times and decimal numbers, which say themselves as text, and NumPy's numbers.
fn of_time(value: &Bound<'_, PyAny>) -> PyResult<ArrayRef> {
    let py = value.py();
    let is = |module: &str, class: &str| -> PyResult<bool> { value.is_instance(&py.import(module)?.getattr(class)?) };
    let text = |method: &str| -> PyResult<ArrayRef> {
        Ok(Arc::new(StringArray::from(vec![value.call_method0(method)?.extract::<String>()?])))
    };
    let parsed = |array: ArrayRef, data_type: &DataType| -> PyResult<ArrayRef> {
        cast(&array, data_type).map_err(|error| PyTypeError::new_err(error.to_string()))
    };
    // A moment is a date, too.
    if is("datetime", "datetime")? {
        let moment = text("isoformat")?;
        let zone: Option<Arc<str>> = (!value.getattr("tzinfo")?.is_none()).then(|| "UTC".into());
        let unit = TimeUnit::Microsecond;
        return parsed(moment, &DataType::Timestamp(unit, zone));
    }
    if is("datetime", "date")? {
        return parsed(text("isoformat")?, &DataType::Date32);
    }
    if is("decimal", "Decimal")? {
        let digits: String = value.str()?.extract()?;
        let scale = digits.split_once('.').map_or(0, |(_, fraction)| fraction.len()).min(38) as i8;
        let array: ArrayRef = Arc::new(StringArray::from(vec![digits]));
        return parsed(array, &DataType::Decimal128(DECIMAL128_MAX_PRECISION, scale));
    }
    // Scalars of NumPy.
    if value.hasattr("item")? {
        let plain = value.call_method0("item")?;
        if !plain.get_type().is(value.get_type()) {
            return literal(&plain);
        }
    }
    let class = value.get_type().name()?;
    let text = format!(
        "a value of the type {class} cannot be compared with a column: give a number, str, bytes, bool, date, \
         datetime or Decimal"
    );
    Err(PyTypeError::new_err(text))
}
