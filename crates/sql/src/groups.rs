//! Grouped aggregates by up to four columns, pushed down to the memory server.
//!
//! `FarGroups` replaces the part of the plan that reads rows. If that part was a partial aggregate,
//! the operators behind it still merge its result. If there are more groups than one request may
//! return, the replaced part runs after all.
//!
//! Danger: groups that two threads return; another type than the replaced part would give; a sum
//! that wraps in SQL and is an error here; a mean of no values.

use crate::aggregate_request::{AggregateFunction, AggregateRequest};
use crate::computed::AggregateInput;
use crate::scan::{FarScan, failed};
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::stream::RecordBatchReceiverStreamBuilder;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};
use farfield_frame::arrow::array::{RecordBatch, UInt64Array};
use farfield_frame::arrow::compute::kernels::cmp::eq;
use farfield_frame::arrow::compute::{cast, nullif};
use farfield_frame::arrow::datatypes::DataType;
use farfield_frame::arrow::error::ArrowError;
use farfield_frame::{Agg, FrameError};
use futures_util::StreamExt;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Most groups that a memory server is asked for: one answer of it cannot hold more.
const GROUPS_MAX: usize = 1024;

/// Physical plan node that computes aggregates of the rows of a far frame, grouped by up to four of
/// its columns.
#[derive(Debug)]
pub struct FarGroups {
    scan: FarScan,
    by: Vec<String>,
    aggs: Vec<Agg>,
    /// Output columns that hold the counts of partial means. A partial state with count zero has to
    /// be null in both columns: otherwise DataFusion would compute a mean that is no number.
    counts_of_means: Vec<usize>,
    /// The replaced part of the plan, which runs if there are too many groups.
    instead: Arc<dyn ExecutionPlan>,
    lookup: Arc<Mutex<GroupLookup>>,
}

/// State of the search for groups, shared by all partitions.
#[derive(Clone, Debug)]
enum GroupLookup {
    Pending,
    /// The server cannot answer: there are too many groups, or a sum does not fit its type.
    Unavailable,
    /// The server has found all groups. The first partition returns them.
    Ready(RecordBatch),
}

impl FarGroups {
    pub(crate) fn instead_of(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<FarGroups>> {
        let Some(all) = plan.downcast_ref::<AggregateExec>() else { return Ok(None) };
        let is_partial = match all.mode() {
            AggregateMode::Partial => true,
            AggregateMode::Single | AggregateMode::SinglePartitioned => false,
            _ => return Ok(None),
        };
        let is_plain = all.group_expr().is_single() && all.filter_expr().iter().all(Option::is_none);
        let Some(mut input) = AggregateInput::of(all.input()).filter(|_| is_plain) else { return Ok(None) };
        let mut by = Vec::new();
        for (expression, _) in all.group_expr().expr() {
            let Some(column) = input.column(&input.resolved(expression)?) else { return Ok(None) };
            by.push(input.scan.name_of(column));
        }
        if by.is_empty() {
            return Ok(None);
        }
        let (mut aggs, mut types, mut counts_of_means) = (Vec::new(), Vec::new(), Vec::new());
        for function in all.aggr_expr() {
            let Some(request) = AggregateRequest::of(function, &mut input)? else { return Ok(None) };
            if is_partial && request.function == AggregateFunction::Mean {
                counts_of_means.push(by.len() + aggs.len());
            }
            for (agg, data_type) in columns_of(&request, &input.scan, is_partial) {
                aggs.push(agg);
                types.push(data_type);
            }
        }
        let (scan, made) = (input.scan, plan.schema());
        let is_made = made.fields().iter().skip(by.len()).map(|field| field.data_type()).eq(&types);
        let is_there = match scan.has_groups(&by, &aggs) {
            // SQL adds up dates as numbers. Frames do not, and refuse with this error.
            Err(FrameError::Type { .. }) => false,
            is_there => is_there.map_err(failed)?,
        };
        if !is_made || !is_there {
            return Ok(None);
        }
        Ok(Some(FarGroups { scan, by, aggs, counts_of_means, instead: plan.clone(), lookup: pending() }))
    }

    /// Finds the groups on the first call and returns the cached answer on later calls. Blocks.
    fn find(
        scan: &FarScan,
        by: &[String],
        aggs: &[Agg],
        lookup: &Mutex<GroupLookup>,
    ) -> Result<GroupLookup, FrameError> {
        let mut lookup = lookup.lock().unwrap_or_else(PoisonError::into_inner);
        if let GroupLookup::Pending = *lookup {
            *lookup = match scan.groups(by, aggs, GROUPS_MAX) {
                Ok(Some(groups)) => GroupLookup::Ready(groups),
                // In SQL, a sum that overflows wraps.
                Ok(None) | Err(FrameError::Arrow(ArrowError::ArithmeticOverflow(_))) => GroupLookup::Unavailable,
                Err(error) => return Err(error),
            };
        }
        Ok(lookup.clone())
    }
}

fn pending() -> Arc<Mutex<GroupLookup>> {
    Arc::new(Mutex::new(GroupLookup::Pending))
}

/// Returns the aggregates that the frame has to compute for one SQL aggregate, and the types of the
/// columns that they make.
fn columns_of(request: &AggregateRequest, scan: &FarScan, is_partial: bool) -> Vec<(Agg, DataType)> {
    let Some(column) = request.column else { return vec![(Agg::rows(), DataType::Int64)] };
    let name = scan.name_of(column);
    match request.function {
        AggregateFunction::Count => vec![(Agg::count(name), DataType::Int64)],
        AggregateFunction::Sum => vec![(Agg::sum(name), request.data_type.clone())],
        AggregateFunction::Mean if is_partial => {
            vec![(Agg::count(name.clone()), DataType::UInt64), (Agg::sum(name), DataType::Float64)]
        }
        AggregateFunction::Mean => vec![(Agg::mean(name), DataType::Float64)],
        AggregateFunction::Min => vec![(Agg::min(name), request.data_type.clone())],
        AggregateFunction::Max => vec![(Agg::max(name), request.data_type.clone())],
    }
}

impl ExecutionPlan for FarGroups {
    fn name(&self) -> &str {
        "FarGroups"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.instead.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn with_new_children(self: Arc<Self>, _children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn reset_state(self: Arc<Self>) -> Result<Arc<dyn ExecutionPlan>> {
        let FarGroups { scan, by, aggs, counts_of_means, instead, .. } = &*self;
        let (scan, by, aggs, counts_of_means) = (scan.clone(), by.clone(), aggs.clone(), counts_of_means.clone());
        let instead = instead.clone().reset_state()?;
        Ok(Arc::new(FarGroups { scan, by, aggs, counts_of_means, instead, lookup: pending() }))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (scan, by, aggs, schema) = (self.scan.clone(), self.by.clone(), self.aggs.clone(), self.schema());
        let (lookup, instead, counts_of_means) =
            (self.lookup.clone(), self.instead.clone(), self.counts_of_means.clone());
        let mut stream = RecordBatchReceiverStreamBuilder::new(schema.clone(), 1);
        let sender = stream.tx();
        stream.spawn(async move {
            // Far memory blocks, so a thread that may block waits for it.
            let lookup = SpawnedTask::spawn_blocking(move || FarGroups::find(&scan, &by, &aggs, &lookup)).await;
            match lookup.map_err(|error| DataFusionError::External(error.into()))?.map_err(failed)? {
                GroupLookup::Ready(groups) if partition == 0 => {
                    let columns = groups.columns().iter().zip(schema.fields()).enumerate();
                    let columns = columns.map(|(index, (column, field))| {
                        let column = cast(column, field.data_type())?;
                        match counts_of_means.contains(&index) {
                            true => Ok(nullif(&column, &eq(&column, &UInt64Array::new_scalar(0))?)?),
                            false => Ok(column),
                        }
                    });
                    let columns = columns.collect::<Result<_>>()?;
                    // The send fails if the query was dropped.
                    let _ = sender.send(Ok(RecordBatch::try_new(schema, columns)?)).await;
                }
                GroupLookup::Ready(_) => {}
                GroupLookup::Pending | GroupLookup::Unavailable => {
                    let mut batches = instead.execute(partition, context)?;
                    while let Some(batch) = batches.next().await {
                        if sender.send(batch).await.is_err() {
                            break;
                        }
                    }
                }
            }
            Ok(())
        });
        Ok(stream.build())
    }
}

impl DisplayAs for FarGroups {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> =
            self.schema().fields().iter().skip(self.by.len()).map(|field| field.name().clone()).collect();
        write!(f, "FarGroups: [{}] by [{}] of ", names.join(", "), self.by.join(", "))?;
        self.scan.fmt_as(format, f)
    }
}
