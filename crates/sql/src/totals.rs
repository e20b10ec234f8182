//! Aggregates of whole columns, pushed down to the memory server.
//!
//! Danger: an aggregate whose type or value differs from what the replaced part of the plan would
//! give: for no rows, for nulls, or for numbers that two orders compare differently (NaN, −0).

use crate::aggregate_request::{AggregateFunction, AggregateRequest};
use crate::computed::AggregateInput;
use crate::scan::{FarScan, failed};
use datafusion::common::{Result, ScalarValue, internal_err};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::stream::RecordBatchReceiverStreamBuilder;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties};
use farfield_frame::arrow::array::{ArrayRef, RecordBatch};
use farfield_frame::arrow::datatypes::SchemaRef;
use farfield_frame::{Sum, Sums};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Physical plan node that computes aggregates of columns of a far frame, in one row.
#[derive(Debug)]
pub struct FarTotals {
    scan: FarScan,
    requests: Vec<AggregateRequest>,
    properties: Arc<PlanProperties>,
}

impl FarTotals {
    pub(crate) fn instead_of(plan: &dyn ExecutionPlan) -> Result<Option<FarTotals>> {
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
        let Some(mut input) = AggregateInput::of(below.input()).filter(|_| is_plain) else { return Ok(None) };
        let mut requests = Vec::new();
        for function in below.aggr_expr() {
            let Some(mut request) = AggregateRequest::of(function, &mut input)? else { return Ok(None) };
            let scan = &input.scan;
            if request.column.is_none() && !scan.is_whole() {
                request.column = scan.column_of_rows().map_err(failed)?;
            }
            let is_there = match request.column {
                Some(column) => scan.has_sums(column).map_err(failed)?,
                None => scan.is_whole(),
            };
            if !is_there {
                return Ok(None);
            }
            requests.push(request);
        }
        Ok(Some(FarTotals::new(input.scan, requests, plan.schema())))
    }

    fn new(scan: FarScan, requests: Vec<AggregateRequest>, schema: SchemaRef) -> FarTotals {
        let properties = Arc::new(PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            Boundedness::Bounded,
        ));
        FarTotals { scan, requests, properties }
    }
}

impl AggregateRequest {
    fn value(&self, scan: &FarScan, sums_by_column: &BTreeMap<usize, Sums>) -> Result<ArrayRef> {
        let Some(column) = self.column else { return ScalarValue::Int64(Some(scan.rows() as i64)).to_array() };
        let sums = &sums_by_column[&column];
        let some = sums.count > 0;
        let value = match (self.function, sums.sum, &sums.ends) {
            (AggregateFunction::Count, ..) => ScalarValue::Int64(Some(sums.count as i64)),
            (AggregateFunction::Mean, ..) => ScalarValue::Float64(sums.mean),
            (AggregateFunction::Min, _, Some(ends)) => ScalarValue::try_from_array(ends, 0)?,
            (AggregateFunction::Max, _, Some(ends)) => ScalarValue::try_from_array(ends, 1)?,
            (AggregateFunction::Min | AggregateFunction::Max, _, None) => ScalarValue::try_new_null(&self.data_type)?,
            // As in SQL, a sum of integers that overflows wraps.
            (AggregateFunction::Sum, Sum::Signed(sum), _) => ScalarValue::Int64(some.then_some(sum as i64)),
            (AggregateFunction::Sum, Sum::Unsigned(sum), _) => ScalarValue::UInt64(some.then_some(sum as u64)),
            (AggregateFunction::Sum, Sum::Float(sum), _) => ScalarValue::Float64(some.then_some(sum)),
        };
        value.to_array()
    }
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
        let (scan, requests, schema) = (self.scan.clone(), self.requests.clone(), self.schema());
        let mut stream = RecordBatchReceiverStreamBuilder::new(schema.clone(), 1);
        let sender = stream.tx();
        stream.spawn_blocking(move || {
            let columns: BTreeSet<usize> = requests.iter().filter_map(|one| one.column).collect();
            let mut sums_by_column = BTreeMap::new();
            for column in columns {
                let Some(sums) = scan.sums(column).map_err(failed)? else {
                    return internal_err!("column {column} of a far frame has no sums any longer");
                };
                sums_by_column.insert(column, sums);
            }
            let columns = requests.iter().map(|one| one.value(&scan, &sums_by_column)).collect::<Result<_>>()?;
            // The send fails if the query was dropped.
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
