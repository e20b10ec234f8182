//! What rows come to by what is in up to four columns, found by the memory server instead of a part of the plan that reads them.
//!
//! The part that is replaced is the one that reads; what is to be put together of several threads is so behind it, as ever. If there are more groups than are worth it, the part does its work after all.
//!
//! Danger: groups that two threads give; another type than the part that is replaced would give; a sum that wraps there and is an error here; a mean of nothing.

use crate::asked::{Asked, What};
use crate::scan::{FarScan, failed};
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::stream::RecordBatchReceiverStreamBuilder;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PhysicalExpr, PlanProperties};
use farfield_frame::arrow::array::{RecordBatch, UInt64Array};
use farfield_frame::arrow::compute::kernels::cmp::eq;
use farfield_frame::arrow::compute::{cast, nullif};
use farfield_frame::arrow::datatypes::DataType;
use farfield_frame::arrow::error::ArrowError;
use farfield_frame::{Agg, FrameError};
use futures_util::StreamExt;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Groups that a memory server is asked for: of more it cannot say at a time.
const GROUPS_MAX: usize = 1024;

/// The part of a plan that says what rows of a far frame come to, by what is in up to four of its columns.
#[derive(Debug)]
pub struct FarGroups {
    scan: FarScan,
    by: Vec<String>,
    aggs: Vec<Agg>,
    /// Columns of what is made that say of how many numbers a mean is. The state of one of none is null as a whole: else it is a mean, and no number.
    counts_of_means: Vec<usize>,
    /// What does it if there are too many groups.
    instead: Arc<dyn ExecutionPlan>,
    found: Arc<Mutex<Found>>,
}

/// What is known of the groups, by all partitions.
#[derive(Clone, Debug)]
enum Found {
    Unknown,
    /// They are too many, or a sum has no room in its type.
    Not,
    /// All of them, for the first partition.
    Here(RecordBatch),
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
        let Some(scan) = all.input().downcast_ref::<FarScan>().filter(|scan| is_plain && scan.is_unlimited()) else {
            return Ok(None);
        };
        let name =
            |by: &Arc<dyn PhysicalExpr>| by.downcast_ref::<Column>().map(|by| scan.name_of(scan.column(by.index())));
        let by: Option<Vec<String>> = all.group_expr().expr().iter().map(|(by, _)| name(by)).collect();
        let Some(by) = by.filter(|by| !by.is_empty()) else { return Ok(None) };
        let (mut aggs, mut types, mut counts_of_means) = (Vec::new(), Vec::new(), Vec::new());
        for function in all.aggr_expr() {
            let Some(asked) = Asked::of(function, scan)? else { return Ok(None) };
            if is_partial && asked.what == What::Mean {
                counts_of_means.push(by.len() + aggs.len());
            }
            for (agg, data_type) in columns_of(&asked, scan, is_partial) {
                aggs.push(agg);
                types.push(data_type);
            }
        }
        let made = plan.schema();
        let is_made = made.fields().iter().skip(by.len()).map(|field| field.data_type()).eq(&types);
        let is_there = match scan.has_groups(&by, &aggs) {
            // Dates as numbers, which only SQL adds up.
            Err(FrameError::Type { .. }) => false,
            is_there => is_there.map_err(failed)?,
        };
        if !is_made || !is_there {
            return Ok(None);
        }
        Ok(Some(FarGroups { scan: scan.clone(), by, aggs, counts_of_means, instead: plan.clone(), found: unknown() }))
    }

    /// Finds the groups, or has found them.
    fn find(scan: &FarScan, by: &[String], aggs: &[Agg], found: &Mutex<Found>) -> Result<Found, FrameError> {
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Found::Unknown = *found {
            *found = match scan.groups(by, aggs, GROUPS_MAX) {
                Ok(Some(groups)) => Found::Here(groups),
                // In SQL it wraps.
                Ok(None) | Err(FrameError::Arrow(ArrowError::ArithmeticOverflow(_))) => Found::Not,
                Err(error) => return Err(error),
            };
        }
        Ok(found.clone())
    }
}

fn unknown() -> Arc<Mutex<Found>> {
    Arc::new(Mutex::new(Found::Unknown))
}

/// What is asked of each group for it, and the types of the columns that it makes.
fn columns_of(asked: &Asked, scan: &FarScan, is_partial: bool) -> Vec<(Agg, DataType)> {
    let Some(column) = asked.column else { return vec![(Agg::rows(), DataType::Int64)] };
    let name = scan.name_of(column);
    match asked.what {
        What::Count => vec![(Agg::count(name), DataType::Int64)],
        What::Sum => vec![(Agg::sum(name), asked.data_type.clone())],
        What::Mean if is_partial => {
            vec![(Agg::count(name.clone()), DataType::UInt64), (Agg::sum(name), DataType::Float64)]
        }
        What::Mean => vec![(Agg::mean(name), DataType::Float64)],
        What::Min => vec![(Agg::min(name), asked.data_type.clone())],
        What::Max => vec![(Agg::max(name), asked.data_type.clone())],
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
        Ok(Arc::new(FarGroups { scan, by, aggs, counts_of_means, instead, found: unknown() }))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (scan, by, aggs, schema) = (self.scan.clone(), self.by.clone(), self.aggs.clone(), self.schema());
        let (found, instead, counts_of_means) =
            (self.found.clone(), self.instead.clone(), self.counts_of_means.clone());
        let mut stream = RecordBatchReceiverStreamBuilder::new(schema.clone(), 1);
        let sender = stream.tx();
        stream.spawn(async move {
            // Far memory is waited for by a thread that may wait.
            let found = SpawnedTask::spawn_blocking(move || FarGroups::find(&scan, &by, &aggs, &found)).await;
            match found.map_err(|error| DataFusionError::External(error.into()))?.map_err(failed)? {
                Found::Here(groups) if partition == 0 => {
                    let columns = groups.columns().iter().zip(schema.fields()).enumerate();
                    let columns = columns.map(|(index, (column, field))| {
                        let column = cast(column, field.data_type())?;
                        match counts_of_means.contains(&index) {
                            true => Ok(nullif(&column, &eq(&column, &UInt64Array::new_scalar(0))?)?),
                            false => Ok(column),
                        }
                    });
                    let columns = columns.collect::<Result<_>>()?;
                    // Nobody may wait for it any longer.
                    let _ = sender.send(Ok(RecordBatch::try_new(schema, columns)?)).await;
                }
                Found::Here(_) => {}
                Found::Unknown | Found::Not => {
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
