//! Conditions of a query that are ranges of numbers, or equality with one string.
//!
//! Danger: a comparison that means something else here than in DataFusion.

use datafusion::common::ScalarValue;
use datafusion::logical_expr::{BinaryExpr, Expr, Operator};
use farfield_frame::{FarFrame, FrameError, Scan};
use std::fmt;
use std::ops::Bound;

/// Comparison of a column of numbers, dates or times with a value of its type, or equality of a
/// column of strings with a value.
#[derive(Clone, Debug)]
pub(crate) struct ColumnRange {
    column: String,
    operator: Operator,
    value: ScalarValue,
}

impl ColumnRange {
    /// Translates an expression. Returns `None` if it is not such a comparison.
    pub(crate) fn of(expression: &Expr, frame: &FarFrame) -> Option<ColumnRange> {
        let Expr::BinaryExpr(BinaryExpr { left, op, right }) = expression else { return None };
        let (column, operator, value) = match (&**left, &**right) {
            (Expr::Column(column), Expr::Literal(value, _)) => (column, *op, value),
            (Expr::Literal(value, _), Expr::Column(column)) => (column, op.swap()?, value),
            _ => return None,
        };
        let range = ColumnRange { column: column.name().to_owned(), operator, value: value.clone() };
        let is_of_its_type = frame
            .schema()
            .field_with_name(&range.column)
            .is_ok_and(|field| *field.data_type() == range.value.data_type());
        (is_of_its_type && range.narrow(frame.scan(&[]).ok()?).is_ok()).then_some(range)
    }

    pub(crate) fn column(&self) -> &str {
        &self.column
    }

    /// Narrows a scan to the rows that meet this condition. Returns an error if the column has
    /// another type, or if the comparison is not a range.
    pub(crate) fn narrow(&self, scan: Scan) -> Result<Scan, FrameError> {
        use ScalarValue::*;
        let (name, of) = (&self.column, self.operator);
        let scan = match &self.value {
            Int8(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            Int16(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            Int32(Some(value)) | Date32(Some(value)) | Time32Second(Some(value)) | Time32Millisecond(Some(value)) => {
                bounds(of, value).map(|bounds| scan.within(name, bounds))
            }
            Int64(Some(value))
            | Date64(Some(value))
            | Time64Microsecond(Some(value))
            | Time64Nanosecond(Some(value))
            | TimestampSecond(Some(value), _)
            | TimestampMillisecond(Some(value), _)
            | TimestampMicrosecond(Some(value), _)
            | TimestampNanosecond(Some(value), _)
            | DurationSecond(Some(value))
            | DurationMillisecond(Some(value))
            | DurationMicrosecond(Some(value))
            | DurationNanosecond(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            UInt8(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            UInt16(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            UInt32(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            UInt64(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            Float32(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            Float64(Some(value)) => bounds(of, value).map(|bounds| scan.within(name, bounds)),
            Utf8(Some(value)) if of == Operator::Eq => return scan.equal_to(name, value),
            _ => None,
        };
        scan.unwrap_or_else(|| Err(FrameError::Type { name: name.clone(), data_type: self.value.data_type() }))
    }
}

/// Returns the range of the values `x` for which `x operator value` is true. Returns `None` if they
/// are not a range.
fn bounds<N: Copy>(operator: Operator, value: &N) -> Option<(Bound<N>, Bound<N>)> {
    use Bound::{Excluded, Included, Unbounded};
    match operator {
        Operator::Eq => Some((Included(*value), Included(*value))),
        Operator::Lt => Some((Unbounded, Excluded(*value))),
        Operator::LtEq => Some((Unbounded, Included(*value))),
        Operator::Gt => Some((Excluded(*value), Unbounded)),
        Operator::GtEq => Some((Included(*value), Unbounded)),
        _ => None,
    }
}

impl fmt::Display for ColumnRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.column, self.operator, self.value)
    }
}
