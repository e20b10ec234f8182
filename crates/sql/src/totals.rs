//! What columns come to, found by the memory server instead of a part of the plan that reads them.
//!
//! Danger: another type or another value than the part that is replaced would give, for no rows, nulls, or numbers of which orders differ.

use crate::scan::{FarScan, failed};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::common::{Result, ScalarValue, internal_err};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_expr::expressions::{CastExpr, Column, Literal};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::stream::RecordBatchReceiverStreamBuilder;
use datafusion::physical_plan::udaf::AggregateFunctionExpr;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PhysicalExpr, PlanProperties,
};
use farfield_frame::arrow::array::{ArrayRef, RecordBatch};
use farfield_frame::arrow::datatypes::{DataType, SchemaRef};
use farfield_frame::{Sum, Sums};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Finds what columns of a [`FarScan`] come to where they are, if nothing else is asked of it.
#[derive(Debug)]
pub(crate) struct SumsAtServer;

impl PhysicalOptimizerRule for SumsAtServer {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _config: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|part| match FarTotals::instead_of(part.as_ref())? {
            Some(totals) => Ok(Transformed::yes(Arc::new(totals) as Arc<dyn ExecutionPlan>)),
            None => Ok(Transformed::no(part)),
        })
        .data()
    }

    fn name(&self) -> &str {
        "sums_at_server"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The part of a plan that says what columns of a far frame come to, in one row.
#[derive(Debug)]
pub struct FarTotals {
    scan: FarScan,
    wanted: Vec<Wanted>,
    properties: Arc<PlanProperties>,
}

/// A number that is wanted.
#[derive(Clone, Debug)]
struct Wanted {
    what: What,
    /// The column that is summed up for it. `None`: all rows are counted.
    column: Option<usize>,
    data_type: DataType,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Count,
    Sum,
    Mean,
    Min,
    Max,
}

impl FarTotals {
    fn instead_of(plan: &dyn ExecutionPlan) -> Result<Option<FarTotals>> {
        let Some(all) = plan.downcast_ref::<AggregateExec>() else { return Ok(None) };
        let below = match all.mode() {
            AggregateMode::Single | AggregateMode::SinglePartitioned => all,
            AggregateMode::Final | AggregateMode::FinalPartitioned => {
                let Some(below) = all.input().downcast_ref::<AggregateExec>() else { return Ok(None) };
                below
            }
            _ => return Ok(None),
        };
        let is_plain = below.group_expr().is_empty() && below.filter_expr().iter().all(Option::is_none);
        let Some(scan) = below.input().downcast_ref::<FarScan>().filter(|scan| is_plain && scan.is_unlimited()) else {
            return Ok(None);
        };
        let mut wanted = Vec::new();
        for function in below.aggr_expr() {
            let Some(one) = Wanted::of(function, scan)? else { return Ok(None) };
            wanted.push(one);
        }
        Ok(Some(FarTotals::new(scan.clone(), wanted, plan.schema())))
    }

    fn new(scan: FarScan, wanted: Vec<Wanted>, schema: SchemaRef) -> FarTotals {
        let properties = Arc::new(PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            Boundedness::Bounded,
        ));
        FarTotals { scan, wanted, properties }
    }
}

impl Wanted {
    /// `None`: rows have to be looked at for it.
    fn of(function: &AggregateFunctionExpr, scan: &FarScan) -> Result<Option<Wanted>> {
        let what = match function.fun().name() {
            "count" => What::Count,
            "sum" => What::Sum,
            "avg" => What::Mean,
            "min" => What::Min,
            "max" => What::Max,
            _ => return Ok(None),
        };
        let arguments = function.expressions();
        let [argument] = &arguments[..] else { return Ok(None) };
        if function.is_distinct() || !function.order_bys().is_empty() {
            return Ok(None);
        }
        let column = match column_of(argument, what) {
            Some(column) => Some(scan.column(column)),
            // Rows that are in ranges have a value.
            None if what == What::Count && is_value(argument) => scan.column_of_ranges(),
            None => return Ok(None),
        };
        let wanted = Wanted { what, column, data_type: function.field().data_type().clone() };
        let is_there = match column {
            Some(column) => scan.has_sums(column).map_err(failed)?,
            None => scan.is_whole(),
        };
        Ok((is_there && wanted.is_of_its_type(scan)?).then_some(wanted))
    }

    /// Is its type the one that there is, and are there the ends that it asks for?
    fn is_of_its_type(&self, scan: &FarScan) -> Result<bool> {
        let Some(column) = self.column else { return Ok(self.data_type == DataType::Int64) };
        let of = scan.data_type(column);
        Ok(match self.what {
            What::Count => self.data_type == DataType::Int64,
            What::Mean => self.data_type == DataType::Float64,
            What::Sum if of.is_floating() => self.data_type == DataType::Float64,
            What::Sum if of.is_unsigned_integer() => self.data_type == DataType::UInt64,
            What::Sum => self.data_type == DataType::Int64,
            What::Min | What::Max => self.data_type == of && scan.has_ends(column)?,
        })
    }

    fn value(&self, scan: &FarScan, found: &BTreeMap<usize, Sums>) -> Result<ArrayRef> {
        let Some(column) = self.column else { return ScalarValue::Int64(Some(scan.rows() as i64)).to_array() };
        let sums = &found[&column];
        let some = sums.count > 0;
        let value = match (self.what, sums.sum, &sums.ends) {
            (What::Count, ..) => ScalarValue::Int64(Some(sums.count as i64)),
            (What::Mean, ..) => ScalarValue::Float64(sums.mean),
            (What::Min, _, Some(ends)) => ScalarValue::try_from_array(ends, 0)?,
            (What::Max, _, Some(ends)) => ScalarValue::try_from_array(ends, 1)?,
            (What::Min | What::Max, _, None) => ScalarValue::try_new_null(&self.data_type)?,
            // As in SQL of integers: what has no room wraps.
            (What::Sum, Sum::Signed(sum), _) => ScalarValue::Int64(some.then_some(sum as i64)),
            (What::Sum, Sum::Unsigned(sum), _) => ScalarValue::UInt64(some.then_some(sum as u64)),
            (What::Sum, Sum::Float(sum), _) => ScalarValue::Float64(some.then_some(sum)),
        };
        value.to_array()
    }
}

/// The column that a function looks at. A sum or mean may see its numbers as a wider type: nothing of them is lost.
fn column_of(argument: &Arc<dyn PhysicalExpr>, what: What) -> Option<usize> {
    let wider = argument.downcast_ref::<CastExpr>().filter(|cast| {
        matches!(
            (what, cast.cast_type()),
            (What::Sum, DataType::Int64 | DataType::UInt64 | DataType::Float64) | (What::Mean, DataType::Float64)
        )
    });
    let argument = wider.map_or(argument, CastExpr::expr);
    argument.downcast_ref::<Column>().map(Column::index)
}

fn is_value(argument: &Arc<dyn PhysicalExpr>) -> bool {
    argument.downcast_ref::<Literal>().is_some_and(|literal| !literal.value().is_null())
}

impl ExecutionPlan for FarTotals {
    fn name(&self) -> &str {
        "FarTotals"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn with_new_children(self: Arc<Self>, _children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, _partition: usize, _context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (scan, wanted, schema) = (self.scan.clone(), self.wanted.clone(), self.schema());
        let mut stream = RecordBatchReceiverStreamBuilder::new(schema.clone(), 1);
        let sender = stream.tx();
        stream.spawn_blocking(move || {
            let columns: BTreeSet<usize> = wanted.iter().filter_map(|one| one.column).collect();
            let mut found = BTreeMap::new();
            for column in columns {
                let Some(sums) = scan.sums(column).map_err(failed)? else {
                    return internal_err!("column {column} of a far frame has no sums any longer");
                };
                found.insert(column, sums);
            }
            let columns = wanted.iter().map(|one| one.value(&scan, &found)).collect::<Result<_>>()?;
            // Nobody may wait for it any longer.
            let _ = sender.blocking_send(Ok(RecordBatch::try_new(schema, columns)?));
            Ok(())
        });
        Ok(stream.build())
    }
}

impl DisplayAs for FarTotals {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.schema().fields().iter().map(|field| field.name().clone()).collect();
        write!(f, "FarTotals: [{}] of ", names.join(", "))?;
        self.scan.fmt_as(format, f)
    }
}
