//! Expressions over the columns of a row: conditions, and values of new columns.
//!
//! An expression is built without a frame. When it is used, its types are checked on a batch without
//! rows, and Arrow's kernels evaluate it a batch at a time. The parts of a condition that compare a
//! column with a value become ranges of a [`Scan`], which the memory server searches.
//!
//! Danger: a range that keeps other rows than the kernel would; a value that is rounded to the type
//! of a column before it is compared; an expression so deep that its evaluation overflows the stack.

use crate::column::{FrameColumn, Values, natives, with_numbers};
use crate::error::FrameError;
use crate::frame::FarFrame;
use crate::scan::Scan;
use crate::zones::ImageRange;
use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, Datum, Float64Array, Int64Array, RecordBatch};
use arrow::array::{StringArray, UInt32Array, new_empty_array};
use arrow::compute::kernels::{cmp, comparison, numeric};
use arrow::compute::{CastOptions, can_cast_types};
use arrow::compute::{and_kleene, cast_with_options, is_null, not, or_kleene, take};
use arrow::datatypes::{ArrowNativeType, DECIMAL128_MAX_PRECISION, DataType, Field, Float64Type, Schema, SchemaRef};
use arrow::error::ArrowError;
use farfield::{FarVec, Formula, Number};
use std::collections::BTreeSet;
use std::ops::{Add, Bound, Div, Mul, Neg, Not, Rem, Sub};
use std::sync::Arc;

/// Most levels of an expression. Each takes about a KiB of stack while it is evaluated.
const DEPTH_MAX: usize = 256;

/// Returns the value of a column in each row.
pub fn column(name: impl Into<String>) -> Expression {
    Expression::leaf(Term::Column(name.into()))
}

/// A formula over the columns of a row, such as `column("fare") * 2.into()` or
/// `column("fare").more_than(10.0)`.
///
/// Values are compared as Arrow does: −0 is smaller than +0, and NaN larger than all other numbers. A
/// comparison with null is null, and so is arithmetic; `and` and `or` are those of SQL. Types are
/// made common first: of integers and floating-point numbers `f64`, of integers 64 bits. A value
/// takes the type of the column that it is compared with where it keeps its meaning, so a string is
/// also a date or a time. Integers that overflow are an error.
///
/// ```
/// use farfield::Heap;
/// use farfield_frame::{FarFrame, column};
/// use std::sync::Arc;
///
/// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
/// let trips = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n")?;
/// let trips = trips.with_values("doubled", &(column("fare") * 2.into()))?;
/// let dear = trips.matching(&column("doubled").more_than(20).and(column("zone").equal_to("Harlem")))?;
/// assert_eq!(dear.totals("doubled")?.sum, 105.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Expression {
    node: Arc<Term>,
    depth: usize,
}

#[derive(Debug)]
enum Term {
    Column(String),
    /// A single value.
    Literal(ArrayRef),
    Binary(Operator, Expression, Expression),
    Not(Expression),
    Negative(Expression),
    IsNull(Expression),
    Cast(Expression, DataType),
    /// Stands for an expression of more than [`DEPTH_MAX`] levels.
    TooDeep,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    More,
    MoreEqual,
    And,
    Or,
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
    Contains,
    StartsWith,
    EndsWith,
}

impl Expression {
    /// Returns this value in each row: the element of an array that has one.
    ///
    /// # Panics
    /// Panics if the array has another length.
    #[track_caller]
    pub fn literal(value: ArrayRef) -> Expression {
        assert_eq!(value.len(), 1, "a literal is one value");
        Expression::leaf(Term::Literal(value))
    }

    /// Compares for equality.
    #[must_use]
    pub fn equal_to(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::Equal, other.into())
    }

    /// Compares for inequality.
    #[must_use]
    pub fn not_equal_to(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::NotEqual, other.into())
    }

    /// Compares by `<`.
    #[must_use]
    pub fn less_than(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::Less, other.into())
    }

    /// Compares by `<=`.
    #[must_use]
    pub fn at_most(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::LessEqual, other.into())
    }

    /// Compares by `>`.
    #[must_use]
    pub fn more_than(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::More, other.into())
    }

    /// Compares by `>=`.
    #[must_use]
    pub fn at_least(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::MoreEqual, other.into())
    }

    /// Returns whether both conditions hold: false and null are false.
    #[must_use]
    pub fn and(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::And, other.into())
    }

    /// Returns whether one of two conditions holds: true or null are true.
    #[must_use]
    pub fn or(self, other: impl Into<Expression>) -> Expression {
        self.binary(Operator::Or, other.into())
    }

    /// Returns whether the value is null.
    #[must_use]
    pub fn is_null(self) -> Expression {
        self.unary(Term::IsNull)
    }

    /// Converts the value to another type. A value that the type does not have is an error.
    #[must_use]
    pub fn cast(self, data_type: DataType) -> Expression {
        self.unary(|of| Term::Cast(of, data_type))
    }

    /// Returns whether a string has this part.
    #[must_use]
    pub fn contains(self, part: impl Into<Expression>) -> Expression {
        self.binary(Operator::Contains, part.into())
    }

    /// Returns whether a string begins so.
    #[must_use]
    pub fn starts_with(self, start: impl Into<Expression>) -> Expression {
        self.binary(Operator::StartsWith, start.into())
    }

    /// Returns whether a string ends so.
    #[must_use]
    pub fn ends_with(self, end: impl Into<Expression>) -> Expression {
        self.binary(Operator::EndsWith, end.into())
    }

    /// Returns whether the value equals one of these: null if it is null, or if it equals none of
    /// them and one is null.
    #[must_use]
    pub fn is_in(self, values: impl IntoIterator<Item = Expression>) -> Expression {
        let mut conditions: Vec<_> = values.into_iter().map(|value| self.clone().equal_to(value)).collect();
        // By halves, so that a thousand values are ten levels.
        while conditions.len() > 1 {
            let pair = |pair: &[Expression]| match pair {
                [one, other] => one.clone().or(other.clone()),
                _ => pair[0].clone(),
            };
            conditions = conditions.chunks(2).map(pair).collect();
        }
        conditions.pop().unwrap_or_else(|| false.into())
    }

    /// Returns the names of the columns whose values are used.
    pub fn columns(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        self.add_columns(&mut names);
        names
    }

    /// Returns the type of the values for rows with these columns. Returns an error if there is no
    /// such column, or if types do not fit together.
    pub fn data_type(&self, schema: &SchemaRef) -> Result<DataType, FrameError> {
        Ok(self.value(&RecordBatch::new_empty(schema.clone()))?.array.data_type().clone())
    }

    /// Computes the values of the rows of a batch.
    pub fn evaluate(&self, batch: &RecordBatch) -> Result<ArrayRef, FrameError> {
        let value = self.value(batch)?;
        match value.is_literal {
            true => Ok(take(&value.array, &UInt32Array::from(vec![0; batch.num_rows()]), None)?),
            false => Ok(value.array),
        }
    }

    fn leaf(node: Term) -> Expression {
        Expression { node: Arc::new(node), depth: 1 }
    }

    fn unary(self, node: impl FnOnce(Expression) -> Term) -> Expression {
        let depth = self.depth + 1;
        Expression::of(depth, || node(self))
    }

    fn binary(self, operator: Operator, other: Expression) -> Expression {
        let depth = self.depth.max(other.depth) + 1;
        Expression::of(depth, || Term::Binary(operator, self, other))
    }

    fn of(depth: usize, node: impl FnOnce() -> Term) -> Expression {
        match depth <= DEPTH_MAX {
            true => Expression { node: Arc::new(node()), depth },
            false => Expression { node: Arc::new(Term::TooDeep), depth: DEPTH_MAX },
        }
    }

    fn add_columns<'e>(&'e self, names: &mut BTreeSet<&'e str>) {
        match &*self.node {
            Term::Column(name) => {
                names.insert(name);
            }
            Term::Literal(_) | Term::TooDeep => {}
            Term::Binary(_, left, right) => {
                left.add_columns(names);
                right.add_columns(names);
            }
            Term::Not(of) | Term::Negative(of) | Term::IsNull(of) | Term::Cast(of, _) => of.add_columns(names),
        }
    }

    /// Returns the conditions that all have to hold for this one to hold.
    fn conjuncts(&self) -> Vec<Expression> {
        match &*self.node {
            Term::Binary(Operator::And, left, right) => [left.conjuncts(), right.conjuncts()].concat(),
            _ => vec![self.clone()],
        }
    }

    fn value(&self, batch: &RecordBatch) -> Result<Operand, FrameError> {
        let value = match &*self.node {
            Term::Column(name) => match batch.column_by_name(name) {
                Some(array) => Operand::of(array.clone()),
                None => return Err(FrameError::NoColumn { name: name.clone() }),
            },
            Term::Literal(array) => Operand { array: array.clone(), is_literal: true },
            Term::Binary(operator, left, right) => {
                return operator.apply(left.value(batch)?, right.value(batch)?, batch.num_rows());
            }
            Term::Not(of) => of.value(batch)?.condition()?.map(|array| Ok(Arc::new(not(array.as_boolean())?)))?,
            Term::Negative(of) => of.value(batch)?.map(|array| numeric::neg(array))?,
            Term::IsNull(of) => of.value(batch)?.map(|array| Ok(Arc::new(is_null(array)?)))?,
            Term::Cast(of, data_type) => of.value(batch)?.cast(data_type)?,
            Term::TooDeep => return Err(FrameError::TooDeep { levels_max: DEPTH_MAX }),
        };
        Ok(value)
    }
}

/// The result of an expression: an element for each row, or one that stands for all.
#[derive(Clone)]
struct Operand {
    array: ArrayRef,
    is_literal: bool,
}

impl Datum for Operand {
    fn get(&self) -> (&dyn Array, bool) {
        (&*self.array, self.is_literal)
    }
}

impl Operand {
    fn of(array: ArrayRef) -> Operand {
        Operand { array, is_literal: false }
    }

    fn data_type(&self) -> &DataType {
        self.array.data_type()
    }

    fn map(self, compute: impl FnOnce(&ArrayRef) -> Result<ArrayRef, ArrowError>) -> Result<Operand, ArrowError> {
        Ok(Operand { array: compute(&self.array)?, ..self })
    }

    /// Converts to another type. A value that it does not have is an error.
    fn cast(self, data_type: &DataType) -> Result<Operand, ArrowError> {
        match self.data_type() == data_type {
            true => Ok(self),
            false => self.map(|array| cast_with_options(array, data_type, &STRICT)),
        }
    }

    /// Returns the value as a condition; only null has no type of its own.
    fn condition(self) -> Result<Operand, FrameError> {
        match self.data_type() {
            DataType::Boolean => Ok(self),
            DataType::Null => Ok(self.cast(&DataType::Boolean)?),
            other => Err(FrameError::NoCondition { data_type: other.clone() }),
        }
    }

    /// Returns the literal in the type of a column that it is compared with, if it keeps its meaning
    /// there: 10.0 is the integer 10, and 10.5 is none.
    fn fitted(&self, data_type: &DataType) -> Option<Operand> {
        let fitted = cast_with_options(&self.array, data_type, &STRICT).ok()?;
        // A column of `f32` has no 0.1 but its own.
        let is_meant = match (self.data_type(), data_type) {
            (DataType::Float64, DataType::Float32) => true,
            _ => cast_with_options(&fitted, self.data_type(), &STRICT).is_ok_and(|back| *back == *self.array),
        };
        is_meant.then_some(Operand { array: fitted, is_literal: true })
    }
}

const STRICT: CastOptions<'static> =
    CastOptions { safe: false, format_options: arrow::util::display::FormatOptions::new() };

impl Operator {
    fn apply(self, left: Operand, right: Operand, rows: usize) -> Result<Operand, FrameError> {
        use Operator::*;
        let is_literal = left.is_literal && right.is_literal;
        let types = || FrameError::Types { left: left.data_type().clone(), right: right.data_type().clone() };
        let array: ArrayRef = match self {
            And | Or => {
                let rows = if is_literal { 1 } else { rows };
                let both = [left.condition()?, right.condition()?].map(|side| match side.is_literal && !is_literal {
                    true => take(&side.array, &UInt32Array::from(vec![0; rows]), None),
                    false => Ok(side.array),
                });
                let [left, right] = both;
                let (left, right) = (left?, right?);
                let kernel = if self == And { and_kleene } else { or_kleene };
                Arc::new(kernel(left.as_boolean(), right.as_boolean())?)
            }
            Equal | NotEqual | Less | LessEqual | More | MoreEqual => {
                let (left, right) = comparable(&left, &right).ok_or_else(types)??;
                let kernel = match self {
                    Equal => cmp::eq,
                    NotEqual => cmp::neq,
                    Less => cmp::lt,
                    LessEqual => cmp::lt_eq,
                    More => cmp::gt,
                    _ => cmp::gt_eq,
                };
                Arc::new(kernel(&left, &right)?)
            }
            Contains | StartsWith | EndsWith => {
                let (left, right) = match (left.data_type(), right.data_type()) {
                    (DataType::Utf8, DataType::Utf8) => (left, right),
                    _ => return Err(types()),
                };
                let kernel = match self {
                    Contains => comparison::contains,
                    StartsWith => comparison::starts_with,
                    _ => comparison::ends_with,
                };
                Arc::new(kernel(&left, &right)?)
            }
            Add | Subtract | Multiply | Divide | Remainder => {
                let (left, right) = self.operands(&left, &right).ok_or_else(types)??;
                let kernel = match self {
                    Add => numeric::add,
                    Subtract => numeric::sub,
                    Multiply => numeric::mul,
                    Divide => numeric::div,
                    _ => numeric::rem,
                };
                kernel(&left, &right)?
            }
        };
        Ok(Operand { array, is_literal })
    }

    /// Returns the operands of arithmetic in types that it works on, or `None` if there are none.
    fn operands(self, left: &Operand, right: &Operand) -> Option<Result<(Operand, Operand), ArrowError>> {
        let (first, second) = (left.data_type(), right.data_type());
        if !(first.is_numeric() || first.is_null()) || !(second.is_numeric() || second.is_null()) {
            // A date less a date, a time and a duration: Arrow knows.
            let is_of_time =
                (first.is_temporal() && second.is_temporal()) && matches!(self, Operator::Add | Operator::Subtract);
            return is_of_time.then(|| Ok((left.clone(), right.clone())));
        }
        let mut common = common_number(first, second)?;
        if self == Operator::Divide && common.is_integer() {
            common = DataType::Float64;
        }
        // Decimal numbers have rules of their own for scales.
        match is_decimal(first) && is_decimal(second) {
            true => Some(Ok((left.clone(), right.clone()))),
            false => Some(left.clone().cast(&common).and_then(|left| Ok((left, right.clone().cast(&common)?)))),
        }
    }

    /// Returns the operator with its sides exchanged, if it compares.
    fn exchanged(self) -> Option<Operator> {
        match self {
            Operator::Equal => Some(Operator::Equal),
            Operator::Less => Some(Operator::More),
            Operator::LessEqual => Some(Operator::MoreEqual),
            Operator::More => Some(Operator::Less),
            Operator::MoreEqual => Some(Operator::LessEqual),
            _ => None,
        }
    }
}

fn is_decimal(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Decimal128(..) | DataType::Decimal256(..))
}

/// Returns two values in one type, in which they are compared. `None`: there is none.
fn comparable(left: &Operand, right: &Operand) -> Option<Result<(Operand, Operand), ArrowError>> {
    if left.data_type() == right.data_type() {
        return Some(Ok((left.clone(), right.clone())));
    }
    let (first, second) = (left.data_type(), right.data_type());
    let is_alike = first.is_numeric() == second.is_numeric();
    match (left.is_literal, right.is_literal) {
        (false, true) if is_alike && let Some(right) = right.fitted(first) => return Some(Ok((left.clone(), right))),
        (true, false) if is_alike && let Some(left) = left.fitted(second) => return Some(Ok((left, right.clone()))),
        _ => {}
    }
    let common = match (first, second) {
        (DataType::Null, other) | (other, DataType::Null) => other.clone(),
        _ if first.is_numeric() && second.is_numeric() => common_number(first, second)?,
        // A date or time as it is written; one that is none is an error that shows it.
        (DataType::Utf8, time) if time.is_temporal() && left.is_literal && can_cast_types(first, time) => time.clone(),
        (time, DataType::Utf8) if time.is_temporal() && right.is_literal && can_cast_types(second, time) => {
            time.clone()
        }
        (DataType::Timestamp(..), DataType::Date32 | DataType::Date64) => first.clone(),
        (DataType::Date32 | DataType::Date64, DataType::Timestamp(..)) => second.clone(),
        (DataType::Timestamp(one, zone), DataType::Timestamp(other, other_zone)) => {
            // The finer unit of both.
            let unit = *one.max(other);
            DataType::Timestamp(unit, zone.clone().or_else(|| other_zone.clone()))
        }
        _ => return None,
    };
    Some(left.clone().cast(&common).and_then(|left| Ok((left, right.clone().cast(&common)?))))
}

/// Returns the type in which numbers of two types are compared and computed with.
fn common_number(first: &DataType, second: &DataType) -> Option<DataType> {
    let scale = |data_type: &DataType| match data_type {
        DataType::Decimal128(_, scale) => Some(*scale),
        DataType::Decimal256(..) => None,
        _ => Some(0),
    };
    Some(match (first, second) {
        (DataType::Null, other) | (other, DataType::Null) => common_number(other, other)?,
        (DataType::Float32, DataType::Float32) => DataType::Float32,
        _ if first.is_floating() || second.is_floating() => DataType::Float64,
        _ if is_decimal(first) || is_decimal(second) => {
            DataType::Decimal128(DECIMAL128_MAX_PRECISION, scale(first)?.max(scale(second)?))
        }
        (DataType::UInt64, other) | (other, DataType::UInt64) if other.is_unsigned_integer() => DataType::UInt64,
        // Only a decimal number has room for both.
        (DataType::UInt64, _) | (_, DataType::UInt64) => DataType::Decimal128(DECIMAL128_MAX_PRECISION, 0),
        _ => DataType::Int64,
    })
}

macro_rules! literals {
    ($($from:ty, $array:ident;)*) => {$(
        impl From<$from> for Expression {
            fn from(value: $from) -> Expression {
                Expression::literal(Arc::new($array::from(vec![value])))
            }
        }
    )*};
}
literals! { bool, BooleanArray; i64, Int64Array; f64, Float64Array; &str, StringArray; String, StringArray; }

impl From<i32> for Expression {
    fn from(value: i32) -> Expression {
        i64::from(value).into()
    }
}

macro_rules! operators {
    ($($name:ident, $method:ident, $operator:ident;)*) => {$(
        impl $name for Expression {
            type Output = Expression;
            fn $method(self, other: Expression) -> Expression {
                self.binary(Operator::$operator, other)
            }
        }
    )*};
}
operators! { Add, add, Add; Sub, sub, Subtract; Mul, mul, Multiply; Div, div, Divide; Rem, rem, Remainder; }

impl Neg for Expression {
    type Output = Expression;
    fn neg(self) -> Expression {
        self.unary(Term::Negative)
    }
}

impl Not for Expression {
    type Output = Expression;
    fn not(self) -> Expression {
        self.unary(Term::Not)
    }
}

impl FarFrame {
    /// Returns the rows for which a condition is true, not false or null. The memory server searches
    /// the parts of it that compare a column of numbers, dates or times with a value, and those that
    /// ask for one string. Other columns come near only for the rows that are left, or whose chunks
    /// are.
    pub fn matching(&self, condition: &Expression) -> Result<FarFrame, FrameError> {
        let schema = self.schema();
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        let scan = self.scan(&names)?.matching(condition)?;
        let batches = scan.map(|batch| batch.map_err(ArrowError::from));
        FarFrame::from_batches(&self.heap, schema.clone(), batches)
    }

    /// Returns a frame with a column of the values of an expression in each row. It takes the place of
    /// a column with this name, if there is one, or comes last.
    pub fn with_values(&self, name: &str, expression: &Expression) -> Result<FarFrame, FrameError> {
        let data_type = expression.data_type(&self.schema)?;
        let field = Field::new(name, data_type, true);
        let names: Vec<&str> = expression.columns().into_iter().collect();
        let mut make = |batch: &RecordBatch| expression.evaluate(batch).map_err(ArrowError::from);
        let Ok(index) = self.index(name) else { return self.with_column(field, &names, make) };
        let mut frame = self.clone();
        frame.columns[index] = self.make_column(field.clone(), &names, &mut make)?;
        let mut fields: Vec<_> = self.schema.fields().iter().cloned().collect();
        fields[index] = Arc::new(field);
        frame.schema = Arc::new(Schema::new(fields));
        Ok(frame)
    }

    /// Returns an expression as a formula of floating-point numbers over at least one column, or
    /// `None` if the memory server cannot compute it.
    pub(crate) fn computable(&self, expression: &Expression) -> Result<Option<Formula<'_, f64>>, FrameError> {
        let is_floating = expression.data_type(&self.schema)? == DataType::Float64;
        if is_floating && !expression.columns().is_empty() { self.formula_of(expression) } else { Ok(None) }
    }

    /// Translates an expression to a formula that a memory server computes: sums, differences and
    /// products in floating-point numbers, of numbers without nulls. Returns `None` for others.
    pub(crate) fn formula_of(&self, expression: &Expression) -> Result<Option<Formula<'_, f64>>, FrameError> {
        match &*expression.node {
            Term::Column(name) => {
                let index = self.index(name)?;
                let column = &self.columns[index];
                if column.nulls() > 0 || !self.schema.field(index).data_type().is_numeric() {
                    return Ok(None);
                }
                Ok(with_numbers!(&column.values, numbers => Some(Formula::of(numbers)),
                    Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => None))
            }
            Term::Literal(value) if value.data_type().is_numeric() && value.null_count() == 0 => {
                let value = cast_with_options(value, &DataType::Float64, &STRICT)?;
                Ok(Some(Formula::constant(value.as_primitive::<Float64Type>().value(0))))
            }
            Term::Cast(of, DataType::Float64) if matches!(*of.node, Term::Column(_)) => self.formula_of(of),
            // Of whole numbers, arithmetic would notice what is too large.
            Term::Binary(operator, left, right) if expression.data_type(&self.schema)? == DataType::Float64 => {
                let (Some(left), Some(right)) = (self.formula_of(left)?, self.formula_of(right)?) else {
                    return Ok(None);
                };
                Ok(match operator {
                    Operator::Add => Some(left + right),
                    Operator::Subtract => Some(left - right),
                    Operator::Multiply => Some(left * right),
                    _ => None,
                })
            }
            _ => Ok(None),
        }
    }

    /// Translates the comparison of a column with a value to a range of the column's images. Returns
    /// `None` if a condition is no such comparison, or if the column has no images.
    fn range_of(&self, condition: &Expression) -> Result<Option<(usize, Option<ImageRange>)>, FrameError> {
        let Term::Binary(operator, left, right) = &*condition.node else { return Ok(None) };
        let (name, operator, literal) = match (&*left.node, &*right.node) {
            (Term::Column(name), Term::Literal(literal)) => (name, Some(*operator), literal),
            (Term::Literal(literal), Term::Column(name)) => (name, operator.exchanged(), literal),
            _ => return Ok(None),
        };
        let (index, literal) = (self.index(name)?, Operand { array: literal.clone(), is_literal: true });
        let empty = Operand::of(new_empty_array(self.schema.field(index).data_type()));
        // The kernel would cast the column instead if the value is none of its type.
        let Some(Ok((column, literal))) = comparable(&empty, &literal) else { return Ok(None) };
        let is_range = column.data_type() == empty.data_type() && literal.array.null_count() == 0;
        let Some(operator) = operator.filter(|_| is_range) else { return Ok(None) };
        Ok(images(&self.columns[index], operator, &literal.array).map(|images| (index, images)))
    }
}

impl Scan {
    /// Keeps only rows for which a condition is true, not false or null.
    pub fn matching(mut self, condition: &Expression) -> Result<Scan, FrameError> {
        let data_type = condition.data_type(&self.frame.schema)?;
        if !matches!(data_type, DataType::Boolean | DataType::Null) {
            return Err(FrameError::NoCondition { data_type });
        }
        let mut rest = Vec::new();
        for part in condition.conjuncts() {
            match self.frame.range_of(&part)? {
                Some(range) => self.within.push(range),
                None => rest.push(part),
            }
        }
        if rest.is_empty() {
            return Ok(self);
        }
        let names: BTreeSet<String> = rest.iter().flat_map(Expression::columns).map(str::to_owned).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.filter(&names, move |batch| {
            let mut kept = BooleanArray::from(vec![true; batch.num_rows()]);
            for condition in &rest {
                let holds = condition.evaluate(batch).and_then(|array| Operand::of(array).condition())?;
                kept = and_kleene(&kept, holds.array.as_boolean())?;
            }
            Ok(kept)
        })
    }
}

/// Returns the images of the values of a column for which a comparison with a value of its type is
/// true: `Some(None)` if there are none, and `None` if they are not a range of images.
fn images(column: &FrameColumn, operator: Operator, value: &ArrayRef) -> Option<Option<ImageRange>> {
    if let Values::Words(words) = &column.values {
        let number = words.number(value.as_string_opt::<i32>()?.value(0));
        return (operator == Operator::Equal)
            .then(|| number.and_then(|number| ImageRange::of(&(Bound::Included(number), Bound::Included(number)))));
    }
    with_numbers!(&column.values, numbers => range_of_numbers(numbers, operator, value),
        Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => None)
}

fn range_of_numbers<N: Number + ArrowNativeType>(
    _column: &FarVec<N>,
    operator: Operator,
    value: &ArrayRef,
) -> Option<Option<ImageRange>> {
    use Bound::{Excluded, Included, Unbounded};
    let data = value.to_data();
    let value: N = *natives(&data).first()?;
    let bounds = match operator {
        Operator::Equal => (Included(value), Included(value)),
        Operator::Less => (Unbounded, Excluded(value)),
        Operator::LessEqual => (Unbounded, Included(value)),
        Operator::More => (Excluded(value), Unbounded),
        Operator::MoreEqual => (Included(value), Unbounded),
        _ => return None,
    };
    Some(ImageRange::of(&bounds))
}
