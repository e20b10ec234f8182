//! Scan of a far frame as a part of a query plan.
//!
//! Danger: rows that a partition leaves out or returns twice; a query that is dropped and goes on
//! reading.

use crate::range::ColumnRange;
use datafusion::common::stats::Precision;
use datafusion::common::{ColumnStatistics, DataFusionError, Result, ScalarValue, Statistics};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::stream::RecordBatchReceiverStreamBuilder;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties};
use farfield_frame::arrow::array::{AsArray, RecordBatch};
use farfield_frame::arrow::datatypes::DataType;
use farfield_frame::arrow::error::ArrowError;
use farfield_frame::{Agg, CHUNK_ROWS, Expression, FarFrame, FrameError, Scan, Sums};
use std::fmt;
use std::sync::Arc;

/// Batches that each partition reads ahead.
const AHEAD: usize = 1;

/// Physical plan node that reads some columns of a far frame, of the rows that conditions keep.
#[derive(Clone, Debug)]
pub struct FarScan {
    frame: FarFrame,
    columns: Vec<usize>,
    ranges: Vec<ColumnRange>,
    rest: Option<ResidualFilter>,
    limit: Option<usize>,
    /// Values that are aggregated and never read: their names and what they are computed from. Their
    /// indices come after those of the frame's columns.
    computed: Vec<(String, Expression)>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

/// The part of a query's condition that is not a range.
#[derive(Clone, Debug)]
pub(crate) struct ResidualFilter {
    /// Columns that the filter reads.
    pub(crate) columns: Vec<usize>,
    pub(crate) filter: Arc<dyn PhysicalExpr>,
}

impl FarScan {
    pub(crate) fn new(
        frame: FarFrame,
        columns: Vec<usize>,
        ranges: Vec<ColumnRange>,
        rest: Option<ResidualFilter>,
        limit: Option<usize>,
        partitions: usize,
    ) -> Result<FarScan> {
        let schema = Arc::new(frame.schema().project(&columns)?);
        let partitions = frame.rows().div_ceil(CHUNK_ROWS).clamp(1, partitions.max(1));
        let properties = Arc::new(PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(partitions),
            EmissionType::Incremental,
            Boundedness::Bounded,
        ));
        let (computed, metrics) = (Vec::new(), ExecutionPlanMetricsSet::new());
        Ok(FarScan { frame, columns, ranges, rest, limit, computed, properties, metrics })
    }

    fn partitions(&self) -> usize {
        self.properties.partitioning.partition_count()
    }

    fn names<'s>(&'s self, columns: &'s [usize]) -> Vec<String> {
        columns.iter().map(|column| self.frame.schema().field(*column).name().clone()).collect()
    }

    /// Scans `columns` of the rows that all conditions keep.
    fn rows_of(&self, columns: &[usize]) -> Result<Scan, FrameError> {
        let names = self.names(columns);
        let mut scan = self.frame.scan(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
        for range in &self.ranges {
            scan = range.narrow(scan)?;
        }
        let Some(ResidualFilter { columns, filter }) = self.rest.clone() else { return Ok(scan) };
        let names = self.names(&columns);
        let keep = move |batch: &RecordBatch| {
            let kept = filter.evaluate(batch).and_then(|kept| kept.into_array(batch.num_rows()));
            Ok(kept.map_err(|error| ArrowError::ExternalError(error.into()))?.as_boolean().clone())
        };
        scan.filter(&names.iter().map(String::as_str).collect::<Vec<_>>(), keep)
    }
}

/// Metadata for [`FarTotals`](crate::FarTotals) and [`FarGroups`](crate::FarGroups). Indices of
/// columns are those of the frame, and those of computed values.
impl FarScan {
    /// Adds values that are aggregated, or finds them. Returns their index, or `None` if the memory
    /// server cannot compute them.
    pub(crate) fn computed(&mut self, name: String, expression: Expression) -> Option<usize> {
        let first = self.frame.schema().fields().len();
        if let Some(known) = self.computed.iter().position(|(known, _)| *known == name) {
            return Some(first + known);
        }
        self.frame.scan(&[]).and_then(|scan| scan.computed(&name, &expression)).ok()?;
        self.computed.push((name, expression));
        Some(first + self.computed.len() - 1)
    }

    /// Scans no columns of the rows that all conditions keep, to aggregate them.
    fn aggregated(&self) -> Result<Scan, FrameError> {
        let computed = self.computed.iter();
        computed.fold(self.rows_of(&[]), |scan, (name, expression)| scan?.computed(name, expression))
    }

    /// Returns the index in the frame of the column with index `read` in the scan.
    pub(crate) fn column(&self, read: usize) -> usize {
        self.columns[read]
    }

    pub(crate) fn name_of(&self, column: usize) -> String {
        match self.computed_at(column) {
            Some((name, _)) => name.clone(),
            None => self.frame.schema().field(column).name().clone(),
        }
    }

    fn computed_at(&self, index: usize) -> Option<&(String, Expression)> {
        self.computed.get(index.checked_sub(self.frame.schema().fields().len())?)
    }

    /// Returns a column that can be summed and has a value in every kept row: a range is about it,
    /// or it has no nulls. Its count is the number of kept rows.
    pub(crate) fn column_of_rows(&self) -> Result<Option<usize>, FrameError> {
        let schema = self.frame.schema();
        let of_ranges = self.ranges.iter().filter_map(|range| schema.index_of(range.column()).ok());
        for column in of_ranges.chain(0..schema.fields().len()) {
            let name = &self.names(&[column])[0];
            let is_sure = self.ranges.iter().any(|range| range.column() == name) || self.frame.nulls(name)? == 0;
            if is_sure && self.has_sums(column)? {
                return Ok(Some(column));
            }
        }
        Ok(None)
    }

    pub(crate) fn data_type(&self, column: usize) -> DataType {
        if self.computed_at(column).is_some() {
            return DataType::Float64;
        }
        self.frame.schema().field(column).data_type().clone()
    }

    /// Returns the number of rows of the whole frame.
    pub(crate) fn rows(&self) -> usize {
        self.frame.rows()
    }

    /// Checks whether the scan keeps all rows: no ranges, no filter and no limit.
    pub(crate) fn is_whole(&self) -> bool {
        self.ranges.is_empty() && self.rest.is_none() && self.limit.is_none()
    }

    pub(crate) fn is_unlimited(&self) -> bool {
        self.limit.is_none()
    }

    pub(crate) fn has_ends(&self, column: usize) -> Result<bool> {
        Ok(self.computed_at(column).is_none() && self.known(column)?.min_value != Precision::Absent)
    }

    pub(crate) fn has_sums(&self, column: usize) -> Result<bool, FrameError> {
        self.aggregated()?.has_sums(&self.name_of(column))
    }

    pub(crate) fn has_groups(&self, by: &[String], aggs: &[Agg]) -> Result<bool, FrameError> {
        self.aggregated()?.has_groups(&by.iter().map(String::as_str).collect::<Vec<_>>(), aggs)
    }

    pub(crate) fn groups(&self, by: &[String], aggs: &[Agg], most: usize) -> Result<Option<RecordBatch>, FrameError> {
        self.aggregated()?.groups(&by.iter().map(String::as_str).collect::<Vec<_>>(), aggs, most)
    }

    pub(crate) fn sums(&self, column: usize) -> Result<Option<Sums>, FrameError> {
        self.aggregated()?.sums(&self.name_of(column))
    }
}

/// Wraps an error of a frame as an error of DataFusion.
pub(crate) fn failed(error: FrameError) -> DataFusionError {
    DataFusionError::External(error.into())
}

impl ExecutionPlan for FarScan {
    fn name(&self) -> &str {
        "FarScan"
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

    fn execute(&self, partition: usize, _context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let scan = self.rows_of(&self.columns).map_err(failed)?.part(partition, self.partitions());
        let metrics = BaselineMetrics::new(&self.metrics, partition);
        let mut stream = RecordBatchReceiverStreamBuilder::new(self.schema(), AHEAD);
        let (sender, mut left) = (stream.tx(), self.limit);
        // Far memory blocks, so a thread that may block waits for it.
        stream.spawn_blocking(move || {
            for batch in scan {
                let mut batch = batch.map_err(failed)?;
                if let Some(left) = &mut left {
                    batch = batch.slice(0, batch.num_rows().min(*left));
                    *left -= batch.num_rows();
                }
                metrics.record_output(batch.num_rows());
                // The send fails if the query was dropped.
                if sender.blocking_send(Ok(batch)).is_err() || left == Some(0) {
                    break;
                }
            }
            Ok(())
        });
        Ok(stream.build())
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn partition_statistics(&self, partition: Option<usize>) -> Result<Arc<Statistics>> {
        if partition.is_some() {
            return Ok(Arc::new(Statistics::new_unknown(&self.schema())));
        }
        let columns = self.columns.iter().map(|column| self.known(*column)).collect::<Result<_>>()?;
        let rows = Precision::Exact(self.frame.rows());
        let all = Statistics { num_rows: rows, total_byte_size: Precision::Absent, column_statistics: columns };
        Ok(Arc::new(if self.is_whole() { all } else { all.to_inexact() }))
    }
}

impl FarScan {
    /// Returns the statistics of a column that the frame knows without reading rows.
    fn known(&self, column: usize) -> Result<ColumnStatistics> {
        let schema = self.frame.schema();
        let name = schema.field(column).name();
        let mut known = ColumnStatistics::new_unknown();
        known.null_count = Precision::Exact(self.frame.nulls(name).map_err(failed)?);
        if let Some(ends) = self.frame.ends(name).map_err(failed)? {
            known.min_value = Precision::Exact(ScalarValue::try_from_array(&ends, 0)?);
            known.max_value = Precision::Exact(ScalarValue::try_from_array(&ends, 1)?);
        }
        Ok(known)
    }
}

impl DisplayAs for FarScan {
    fn fmt_as(&self, _format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FarScan: columns=[{}]", self.names(&self.columns).join(", "))?;
        if !self.computed.is_empty() {
            let computed: Vec<&str> = self.computed.iter().map(|(name, _)| name.as_str()).collect();
            write!(f, ", computed=[{}]", computed.join(", "))?;
        }
        if !self.ranges.is_empty() {
            let ranges: Vec<String> = self.ranges.iter().map(ColumnRange::to_string).collect();
            write!(f, ", ranges=[{}]", ranges.join(", "))?;
        }
        if let Some(rest) = &self.rest {
            write!(f, ", filter={}", rest.filter)?;
        }
        self.limit.map_or(Ok(()), |limit| write!(f, ", limit={limit}"))
    }
}
