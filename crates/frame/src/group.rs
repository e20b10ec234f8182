//! Aggregates of the rows of a frame, grouped by the values of some of its columns.
//!
//! Groups are kept near as long as there are no more of them than a bound. If there are more, rows
//! are partitioned into far frames by the hash of their keys, and each part is grouped by itself.
//!
//! Danger: a group that appears twice or loses rows where parts are cut; sums that depend on the
//! partition; nulls that are counted; integers that overflow silently.

use crate::column::{CHUNK_ROWS, FrameColumn};
use crate::error::FrameError;
use crate::expression::Expression;
use crate::frame::{FarFrame, Maker};
use crate::group_pushdown::{self, GroupAggregates, Measure};
use crate::keys::KeyConverter;
use crate::scan::Scan;
use crate::sort::SortBy;
use crate::sums::Sum;
use arrow::array::{Array, ArrayRef, AsArray, Decimal128Array, Float64Array, Int64Array};
use arrow::array::{RecordBatch, UInt64Array, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{DECIMAL128_MAX_PRECISION, DataType, Decimal128Type, Field, Float64Type, Int64Type};
use arrow::datatypes::{Schema, SchemaRef, UInt64Type};
use arrow::error::ArrowError;
use arrow::row::{Row, RowConverter, Rows, SortField};
use farfield::Part;
use std::collections::{BTreeMap, HashMap};
use std::hash::RandomState;
use std::ops::Bound;
use std::sync::Arc;

/// Groups that are near at a time.
const GROUPS_MAX: usize = CHUNK_ROWS;
/// Bytes of keys, minima and maxima that are near at a time.
const BYTES_MAX: usize = 8 << 20;

/// An aggregate to compute for each group. See [`FarFrame::group_by`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agg {
    function: AggFunction,
    column: Option<String>,
    name: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AggFunction {
    Rows,
    Count,
    Sum,
    Mean,
    Min,
    Max,
}

impl Agg {
    fn of(function: AggFunction, column: impl Into<String>, suffix: &str) -> Agg {
        let column = column.into();
        Agg { function, name: format!("{column}_{suffix}"), column: Some(column) }
    }

    /// Counts rows, in the column `count`.
    pub fn rows() -> Agg {
        Agg { function: AggFunction::Rows, column: None, name: "count".into() }
    }

    /// Counts the values of a column that are not null, in the column `…_count`.
    pub fn count(column: impl Into<String>) -> Agg {
        Agg::of(AggFunction::Count, column, "count")
    }

    /// Adds up the values of a column of numbers, in the column `…_sum`. The sum of integers has 64
    /// bits; a larger one is an error. The sum of floating-point numbers is exact and rounded once.
    pub fn sum(column: impl Into<String>) -> Agg {
        Agg::of(AggFunction::Sum, column, "sum")
    }

    /// Computes the mean of the values of a column of numbers, in the column `…_mean`.
    pub fn mean(column: impl Into<String>) -> Agg {
        Agg::of(AggFunction::Mean, column, "mean")
    }

    /// Finds the smallest value of a column, in the column `…_min`. NaN is ignored. The type is any but
    /// lists, structs and maps.
    pub fn min(column: impl Into<String>) -> Agg {
        Agg::of(AggFunction::Min, column, "min")
    }

    /// Finds the largest value of a column, in the column `…_max`. NaN is ignored. The type is any but
    /// lists, structs and maps.
    pub fn max(column: impl Into<String>) -> Agg {
        Agg::of(AggFunction::Max, column, "max")
    }

    /// Sets the name of the result column.
    pub fn named(mut self, name: impl Into<String>) -> Agg {
        self.name = name.into();
        self
    }
}

/// A frame with the columns to group its rows by. See [`FarFrame::group_by`].
#[derive(Clone, Debug)]
#[must_use = "nothing is done before it is asked"]
pub struct GroupBy {
    frame: FarFrame,
    names: Vec<String>,
}

impl FarFrame {
    /// Groups rows by the values of these columns. As in SQL, nulls are one group, NaN is another,
    /// and −0 is in the group of +0.
    ///
    /// ```
    /// use farfield::Heap;
    /// use farfield_frame::{Agg, FarFrame};
    /// use std::sync::Arc;
    ///
    /// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let trips = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n")?;
    /// let zones = trips.group_by(&["zone"])?.agg(&[Agg::rows(), Agg::mean("fare")])?;
    /// assert_eq!((zones.rows(), zones.totals("fare_mean")?.max), (2, Some(30.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn group_by(&self, names: &[&str]) -> Result<GroupBy, FrameError> {
        if names.is_empty() {
            return Err(FrameError::NoKeys);
        }
        names.iter().try_for_each(|name| self.key_index(name).map(drop))?;
        Ok(GroupBy { frame: self.clone(), names: names.iter().map(|name| (*name).to_owned()).collect() })
    }
}

impl GroupBy {
    /// Returns a frame with one row for each group, sorted by the group columns, nulls first. It
    /// has the group columns and then the aggregates. Sum, mean, minimum and maximum of no values
    /// are null.
    ///
    /// Besides the heap's budget, one chunk of each named column is near, and up to 16384 groups:
    /// about 8 MiB of keys, minima and maxima, and 600 bytes for each sum of floating-point
    /// numbers. While rows are partitioned, 16 chunks are near.
    pub fn agg(&self, aggs: &[Agg]) -> Result<FarFrame, FrameError> {
        let plan = GroupPlan::new(self, aggs, &BTreeMap::new())?;
        let mut maker = Maker::new(&self.frame.heap, plan.schema.clone())?;
        let names: Vec<&str> = plan.read.iter().map(String::as_str).collect();
        match plan.push_down(&self.frame.scan(&[])?, GROUPS_MAX)? {
            Some(groups) => maker.push(groups)?,
            None => plan.group(self.frame.select(&names)?, GROUPS_MAX, &mut maker)?,
        }
        let by: Vec<SortBy> = self.names.iter().map(|name| SortBy::ascending(name).nulls_first()).collect();
        maker.finish()?.sort(&by)
    }
}

impl Scan {
    /// Checks whether [`groups`](Scan::groups) can answer for these columns, provided that there
    /// are not too many groups. All of these must hold:
    ///
    /// - There are one to four group columns, without NaN and −0.
    /// - Nothing but ranges of columns keeps rows: at most fifteen, where a column with nulls
    ///   counts twice.
    /// - All named columns hold numbers, dates or times, or are [computed](Scan::computed). Group
    ///   columns may also hold booleans, or strings of up to 8192 kinds.
    pub fn has_groups(&self, names: &[&str], aggs: &[Agg]) -> Result<bool, FrameError> {
        let plan = GroupPlan::new(&self.frame.group_by(names)?, aggs, &self.computed)?;
        plan.can_push_down(self)
    }

    /// Computes aggregates of these rows by group, as [`GroupBy::agg`] does, but in any order and
    /// near. The memory server finds the groups ([`Heap::group`](farfield::Heap::group)).
    ///
    /// Returns `None` if rows have to be read, see [`has_groups`](Scan::has_groups), or if there
    /// are more than `most` groups. A memory server returns up to 1024 groups at a time;
    /// neighbouring rows of more groups are brought near instead.
    pub fn groups(&self, names: &[&str], aggs: &[Agg], most: usize) -> Result<Option<RecordBatch>, FrameError> {
        GroupPlan::new(&self.frame.group_by(names)?, aggs, &self.computed)?.push_down(self, most)
    }
}

struct GroupPlan {
    /// Columns that are read, keys first.
    read: Vec<String>,
    keys: KeyConverter,
    /// Aggregates: function, index in `read`, and type of the column.
    aggregates: Vec<(AggFunction, Option<usize>, DataType)>,
    schema: SchemaRef,
}

impl GroupPlan {
    fn new(by: &GroupBy, aggs: &[Agg], computed: &BTreeMap<String, Expression>) -> Result<GroupPlan, FrameError> {
        let schema = by.frame.schema();
        let mut read = by.names.clone();
        let mut fields: Vec<Field> =
            by.names.iter().map(|name| schema.field_with_name(name).cloned()).collect::<Result<_, _>>()?;
        let types: Vec<DataType> = fields.iter().map(|field| field.data_type().clone()).collect();
        let mut aggregates = Vec::new();
        for agg in aggs {
            let Some(name) = &agg.column else {
                aggregates.push((agg.function, None, DataType::UInt64));
                fields.push(Field::new(&agg.name, DataType::UInt64, false));
                continue;
            };
            let is_end = matches!(agg.function, AggFunction::Min | AggFunction::Max);
            let data_type = match computed.contains_key(name) {
                true if is_end => {
                    return Err(FrameError::Type { name: name.clone(), data_type: DataType::Float64 });
                }
                true => DataType::Float64,
                false if is_end => schema.field(by.frame.key_index(name)?).data_type().clone(),
                false => schema.field(by.frame.index(name)?).data_type().clone(),
            };
            let is_summed = data_type.is_numeric() && !matches!(data_type, DataType::Decimal256(..));
            if matches!(agg.function, AggFunction::Sum | AggFunction::Mean) && !is_summed {
                return Err(FrameError::Type { name: name.clone(), data_type });
            }
            let made = match agg.function {
                AggFunction::Rows | AggFunction::Count => DataType::UInt64,
                AggFunction::Mean => DataType::Float64,
                AggFunction::Sum if data_type.is_floating() => DataType::Float64,
                AggFunction::Sum if data_type.is_signed_integer() => DataType::Int64,
                AggFunction::Sum => decimal_sum(&data_type).unwrap_or(DataType::UInt64),
                AggFunction::Min | AggFunction::Max => data_type.clone(),
            };
            let index = read.iter().position(|other| other == name).unwrap_or(read.len());
            if index == read.len() {
                read.push(name.clone());
            }
            fields.push(Field::new(&agg.name, made, agg.function != AggFunction::Count));
            aggregates.push((agg.function, Some(index), data_type));
        }
        Ok(GroupPlan { read, keys: KeyConverter::new(&types)?, aggregates, schema: Arc::new(Schema::new(fields)) })
    }

    /// Returns the columns to group by.
    fn key_columns<'f>(&self, frame: &'f FarFrame) -> Result<Vec<&'f FrameColumn>, FrameError> {
        let keys = &self.read[..self.keys.columns()];
        keys.iter().map(|name| Ok(&*frame.columns[frame.index(name)?])).collect()
    }

    /// Returns the numbers that are aggregated, by their index in `read`.
    fn measures<'s>(&self, scan: &'s Scan) -> Result<BTreeMap<usize, Measure<'s>>, FrameError> {
        let frame = &scan.frame;
        let measure = |index: &usize| {
            let name = &self.read[*index];
            let formula = scan.computed.get(name).map(|expression| frame.computable(expression)).transpose()?;
            let measure = match formula.flatten() {
                Some(formula) => Measure::Formula(formula),
                None => Measure::Column(&frame.columns[frame.index(name)?]),
            };
            Ok((*index, measure))
        };
        self.aggregates.iter().filter_map(|(_, index, _)| index.as_ref()).map(measure).collect()
    }

    fn can_push_down(&self, scan: &Scan) -> Result<bool, FrameError> {
        let (keys, measures) = (self.key_columns(&scan.frame)?, self.measures(scan)?);
        Ok(scan.is_of_ranges() && group_pushdown::can_push_down(&keys, measures.values()))
    }

    /// Returns the groups of the rows of a scan, found by the memory server. Returns `None` if the
    /// server cannot find them, or if there are too many.
    fn push_down(&self, scan: &Scan, most: usize) -> Result<Option<RecordBatch>, FrameError> {
        if !self.can_push_down(scan)? {
            return Ok(None);
        }
        let keys = self.key_columns(&scan.frame)?;
        let (mut found, mut counts) = (BTreeMap::new(), None);
        let mut of: Vec<(usize, Measure<'_>)> = self.measures(scan)?.into_iter().collect();
        // Aggregates of a column without nulls also count the rows.
        of.sort_by_key(|(index, measure)| (measure.nulls() > 0, *index));
        while !of.is_empty() {
            let first = of.remove(0);
            let (together, rest) = of.into_iter().partition(|(_, measure)| first.1.shares_pass(measure));
            let together: Vec<_> = [first].into_iter().chain::<Vec<_>>(together).collect();
            let (indices, measures): (Vec<usize>, Vec<Measure<'_>>) = together.into_iter().unzip();
            let Some(groups) = group_pushdown::aggregate_groups(scan, &keys, &measures, &mut counts, most)? else {
                return Ok(None);
            };
            found.extend(indices.into_iter().zip(groups));
            of = rest;
        }
        if counts.is_none() {
            counts = group_pushdown::count_groups(scan, &keys, most)?;
        }
        let Some(counts) = counts else { return Ok(None) };
        let Some(mut columns) = group_pushdown::arrays(&keys, &counts)? else { return Ok(None) };
        for (function, index, data_type) in &self.aggregates {
            columns.push(match index {
                Some(index) => column_of(&found[index], *function, data_type)?,
                None => Arc::new(UInt64Array::from_iter_values(counts.values().copied())),
            });
        }
        Ok(Some(RecordBatch::try_new(self.schema.clone(), columns)?))
    }

    /// Pushes one row for each group, in parts if there are too many.
    fn group(&self, frame: FarFrame, groups_max: usize, maker: &mut Maker) -> Result<(), FrameError> {
        if let Some(groups) = self.build_table(&frame, groups_max)? {
            return maker.push(groups.finish(self)?);
        }
        let parts = self.keys.parts(&frame, &RandomState::new())?;
        drop(frame);
        // A part's memory is given back before the next part is grouped.
        parts.into_iter().try_for_each(|part| self.group(part, groups_max, maker))
    }

    /// Groups the rows of a frame near. Returns `None` if there are too many groups.
    fn build_table(&self, frame: &FarFrame, groups_max: usize) -> Result<Option<GroupTable>, FrameError> {
        let mut groups = GroupTable::new(self)?;
        for batch in frame.batches() {
            groups.add(self, &batch?)?;
            // A single key is always accepted, however large. Parts of two keys get smaller
            // eventually.
            if groups.numbers.len() > 1 && (groups.numbers.len() > groups_max || groups.bytes() > BYTES_MAX) {
                return Ok(None);
            }
        }
        Ok(Some(groups))
    }
}

#[derive(Default)]
struct GroupTable {
    numbers: HashMap<Arc<[u8]>, usize>,
    keys: Vec<Arc<[u8]>>,
    key_bytes: usize,
    states: Vec<State>,
}

impl GroupTable {
    fn new(plan: &GroupPlan) -> Result<GroupTable, FrameError> {
        let states = plan.aggregates.iter().map(|(function, _, data_type)| State::new(*function, data_type));
        Ok(GroupTable { states: states.collect::<Result<_, _>>()?, ..GroupTable::default() })
    }

    fn bytes(&self) -> usize {
        self.key_bytes + self.states.iter().map(State::bytes).sum::<usize>()
    }

    fn add(&mut self, plan: &GroupPlan, batch: &RecordBatch) -> Result<(), FrameError> {
        let numbers: Vec<usize> = plan.keys.of(batch)?.iter().map(|key| self.number(key)).collect();
        for (state, (_, column, _)) in self.states.iter_mut().zip(&plan.aggregates) {
            state.add(&numbers, self.keys.len(), column.map(|index| batch.column(index)))?;
        }
        Ok(())
    }

    fn number(&mut self, key: Row<'_>) -> usize {
        if let Some(number) = self.numbers.get(key.data()) {
            return *number;
        }
        let key: Arc<[u8]> = key.data().into();
        self.key_bytes += key.len();
        self.keys.push(key.clone());
        self.numbers.insert(key, self.keys.len() - 1);
        self.keys.len() - 1
    }

    fn finish(self, plan: &GroupPlan) -> Result<RecordBatch, FrameError> {
        let mut columns = plan.keys.columns_of(self.keys.iter().map(|key| &**key))?;
        for state in self.states {
            columns.push(state.finish()?);
        }
        Ok(RecordBatch::try_new(plan.schema.clone(), columns)?)
    }
}

/// Running values of one aggregate, indexed by group number.
enum State {
    Count(Vec<u64>),
    /// Sums and counts of integers.
    Whole {
        function: AggFunction,
        is_signed: bool,
        sums: Vec<(i128, u64)>,
    },
    /// Sums and counts of decimal numbers, in units of their last digit.
    Decimal {
        function: AggFunction,
        data_type: DataType,
        sums: Vec<(i128, u64)>,
    },
    Float {
        function: AggFunction,
        parts: Vec<Part<f64>>,
    },
    /// Minima or maxima, in Arrow's row format.
    End(MinMaxState),
}

impl State {
    fn new(function: AggFunction, data_type: &DataType) -> Result<State, FrameError> {
        Ok(match function {
            AggFunction::Rows | AggFunction::Count => State::Count(Vec::new()),
            AggFunction::Min | AggFunction::Max => State::End(MinMaxState {
                is_min: function == AggFunction::Min,
                data_type: data_type.clone(),
                converter: RowConverter::new(vec![SortField::new(data_type.clone())])?,
                values: Vec::new(),
                bytes: 0,
            }),
            _ if data_type.is_floating() => State::Float { function, parts: Vec::new() },
            _ => match decimal_sum(data_type) {
                Some(data_type) => State::Decimal { function, data_type, sums: Vec::new() },
                None => State::Whole { function, is_signed: data_type.is_signed_integer(), sums: Vec::new() },
            },
        })
    }

    fn bytes(&self) -> usize {
        if let State::End(end) = self { end.bytes } else { 0 }
    }

    /// Adds the values of a column, each to the group with its number.
    fn add(&mut self, numbers: &[usize], groups: usize, column: Option<&ArrayRef>) -> Result<(), FrameError> {
        let nulls = column.and_then(|column| column.logical_nulls());
        let is_valid = |row: &usize| nulls.as_ref().is_none_or(|nulls| nulls.is_valid(*row));
        let rows = (0..numbers.len()).filter(is_valid);
        let column = || column.expect("only rows are counted without a column");
        match self {
            State::Count(counts) => {
                counts.resize(groups, 0);
                rows.for_each(|row| counts[numbers[row]] += 1);
            }
            State::Whole { is_signed, sums, .. } => {
                sums.resize(groups, (0, 0));
                let mut add = |row: usize, value: i128| {
                    let (sum, count) = &mut sums[numbers[row]];
                    (*sum, *count) = (*sum + value, *count + 1);
                };
                if *is_signed {
                    let values = cast(column(), &DataType::Int64)?;
                    rows.for_each(|row| add(row, values.as_primitive::<Int64Type>().value(row).into()));
                } else {
                    let values = cast(column(), &DataType::UInt64)?;
                    rows.for_each(|row| add(row, values.as_primitive::<UInt64Type>().value(row).into()));
                }
            }
            State::Decimal { data_type, sums, .. } => {
                sums.resize(groups, (0, 0));
                let values = cast(column(), data_type)?;
                let values = values.as_primitive::<Decimal128Type>();
                for row in rows {
                    let (sum, count) = &mut sums[numbers[row]];
                    *sum = sum.checked_add(values.value(row)).ok_or_else(too_large)?;
                    *count += 1;
                }
            }
            State::Float { parts, .. } => {
                parts.resize(groups, Part::default());
                let values = cast(column(), &DataType::Float64)?;
                let values = values.as_primitive::<Float64Type>();
                let all = (Bound::Unbounded, Bound::Unbounded);
                rows.for_each(|row| parts[numbers[row]].add_all(&[values.value(row)], &all));
            }
            State::End(end) => {
                end.values.resize(groups, None);
                let keys = end.converter.convert_columns(&[column().clone()])?;
                let is_nan = nan_of(column())?;
                rows.filter(|row| !is_nan.as_ref().is_some_and(|nan| nan[*row]))
                    .for_each(|row| end.add(numbers[row], &keys, row));
            }
        }
        Ok(())
    }

    /// Returns the column of results.
    fn finish(self) -> Result<ArrayRef, FrameError> {
        Ok(match self {
            State::Count(counts) => Arc::new(UInt64Array::from(counts)),
            State::Whole { function: AggFunction::Mean, sums, .. } => {
                let mean = |(sum, count): (i128, u64)| (count > 0).then(|| sum as f64 / count as f64);
                Arc::new(sums.into_iter().map(mean).collect::<Float64Array>())
            }
            State::Whole { is_signed: true, sums, .. } => {
                Arc::new(fitting::<i64>(sums)?.into_iter().collect::<Int64Array>())
            }
            State::Whole { sums, .. } => Arc::new(fitting::<u64>(sums)?.into_iter().collect::<UInt64Array>()),
            State::Decimal { function: AggFunction::Mean, data_type, sums } => {
                let unit = 10f64.powi(-i32::from(scale_of(&data_type)));
                let mean = |(sum, count): (i128, u64)| (count > 0).then(|| sum as f64 * unit / count as f64);
                Arc::new(sums.into_iter().map(mean).collect::<Float64Array>())
            }
            State::Decimal { data_type, sums, .. } => {
                let sums = sums.into_iter().map(|(sum, count)| (count > 0).then_some(sum)).collect::<Decimal128Array>();
                sums.validate_decimal_precision(DIGITS_MAX)?;
                Arc::new(sums.with_precision_and_scale(DIGITS_MAX, scale_of(&data_type))?)
            }
            State::Float { function, parts } => {
                let sum = |part: &Part<f64>| (part.count() > 0).then(|| part.sum());
                let value = |part: &Part<f64>| if function == AggFunction::Mean { part.mean() } else { sum(part) };
                Arc::new(parts.iter().map(value).collect::<Float64Array>())
            }
            State::End(end) => end.finish()?,
        })
    }
}

struct MinMaxState {
    is_min: bool,
    data_type: DataType,
    converter: RowConverter,
    values: Vec<Option<Box<[u8]>>>,
    bytes: usize,
}

impl MinMaxState {
    fn add(&mut self, group: usize, keys: &Rows, row: usize) {
        let (key, value) = (keys.row(row), &mut self.values[group]);
        let key = key.data();
        let is_better = match value.as_deref() {
            None => true,
            Some(value) => {
                if self.is_min {
                    key < value
                } else {
                    key > value
                }
            }
        };
        if is_better {
            self.bytes += key.len();
            self.bytes -= value.replace(key.into()).map_or(0, |value| value.len());
        }
    }

    fn finish(self) -> Result<ArrayRef, FrameError> {
        let null = self.converter.convert_columns(&[new_null_array(&self.data_type, 1)])?;
        let (parser, null) = (self.converter.parser(), null.row(0));
        let rows = self.values.iter().map(|value| parser.parse(value.as_deref().unwrap_or(null.data())));
        Ok(self.converter.convert_rows(rows)?.remove(0))
    }
}

/// Returns the result column of one aggregate, from groups that the memory server found.
/// `data_type` is the type of the aggregated column.
fn column_of(found: &GroupAggregates, function: AggFunction, data_type: &DataType) -> Result<ArrayRef, FrameError> {
    let whole = || found.sums.iter().map(|sum| sum.whole()).zip(found.counts.iter().copied()).collect();
    Ok(match function {
        AggFunction::Rows | AggFunction::Count => Arc::new(UInt64Array::from(found.counts.clone())),
        AggFunction::Mean => Arc::new(found.means.iter().copied().collect::<Float64Array>()),
        AggFunction::Min => found.ends[0].clone(),
        AggFunction::Max => found.ends[1].clone(),
        AggFunction::Sum if data_type.is_floating() => {
            let sum = |(sum, count): (&Sum, &u64)| (*count > 0).then(|| sum.rounded());
            Arc::new(found.sums.iter().zip(&found.counts).map(sum).collect::<Float64Array>())
        }
        AggFunction::Sum if data_type.is_signed_integer() => Arc::new(Int64Array::from(fitting(whole())?)),
        AggFunction::Sum => Arc::new(UInt64Array::from(fitting(whole())?)),
    })
}

/// Digits of the longest decimal numbers that can be added up.
const DIGITS_MAX: u8 = DECIMAL128_MAX_PRECISION;

/// Returns the type of a sum of decimal numbers. Returns `None` for other types and for
/// `Decimal256`.
fn decimal_sum(data_type: &DataType) -> Option<DataType> {
    match data_type {
        DataType::Decimal32(_, scale) | DataType::Decimal64(_, scale) | DataType::Decimal128(_, scale) => {
            Some(DataType::Decimal128(DIGITS_MAX, *scale))
        }
        _ => None,
    }
}

/// Returns the number of digits behind the decimal point.
fn scale_of(data_type: &DataType) -> i8 {
    if let DataType::Decimal128(_, scale) = data_type { *scale } else { 0 }
}

fn too_large() -> ArrowError {
    ArrowError::ArithmeticOverflow(format!("the sum of a group has more than {DIGITS_MAX} digits"))
}

/// Converts sums to their type, or errs if one does not fit. The sum of no values is `None`.
fn fitting<N: TryFrom<i128>>(sums: Vec<(i128, u64)>) -> Result<Vec<Option<N>>, FrameError> {
    let fit = |sum: i128| {
        N::try_from(sum).map_err(|_| {
            ArrowError::ArithmeticOverflow(format!("the sum {sum} of a group does not fit 64 bits")).into()
        })
    };
    sums.into_iter().map(|(sum, count)| (count > 0).then(|| fit(sum)).transpose()).collect()
}

/// Returns which values are NaN, or `None` if the type has no NaN.
fn nan_of(column: &ArrayRef) -> Result<Option<Vec<bool>>, FrameError> {
    if !column.data_type().is_floating() {
        return Ok(None);
    }
    let values = cast(column, &DataType::Float64)?;
    Ok(Some(values.as_primitive::<Float64Type>().values().iter().map(|value| value.is_nan()).collect()))
}
