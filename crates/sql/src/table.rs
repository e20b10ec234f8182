//! A far frame as a table of DataFusion.

use crate::pushdown::AggregatePushdown;
use crate::range::ColumnRange;
use crate::scan::{FarScan, ResidualFilter};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::tree_node::TreeNode;
use datafusion::common::{Result, ToDFSchema};
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::config::SessionConfig;
use datafusion::execution::context::SessionContext;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::logical_expr::utils::{conjunction, split_conjunction};
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown, TableType};
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_plan::ExecutionPlan;
use farfield_frame::FarFrame;
use farfield_frame::arrow::datatypes::SchemaRef;
use std::sync::Arc;

/// Returns a DataFusion session for queries over far tables. Its optimizer pushes aggregates down
/// to the memory server; other sessions compute them near.
pub fn context() -> SessionContext {
    context_with(SessionConfig::new(), Arc::new(RuntimeEnv::default()))
}

/// Returns such a session with a configuration and a runtime. The runtime bounds the memory that
/// queries use besides the heap's budget.
pub fn context_with(config: SessionConfig, runtime: Arc<RuntimeEnv>) -> SessionContext {
    let mut rules = PhysicalOptimizer::new().rules;
    // The rule comes after the one that answers from statistics, and before those that split the
    // plan for several threads.
    let known = rules.iter().position(|rule| rule.name() == "aggregate_statistics");
    rules.insert(known.map_or(0, |known| known + 1), Arc::new(AggregatePushdown));
    let state = SessionStateBuilder::new().with_config(config).with_runtime_env(runtime).with_default_features();
    SessionContext::new_with_state(state.with_physical_optimizer_rules(rules).build())
}

/// A far frame as a read-only DataFusion table.
#[derive(Debug)]
pub struct FarTable {
    frame: FarFrame,
}

impl FarTable {
    /// Wraps a frame.
    pub fn new(frame: FarFrame) -> FarTable {
        FarTable { frame }
    }
}

#[async_trait]
impl TableProvider for FarTable {
    fn schema(&self) -> SchemaRef {
        self.frame.schema()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    /// Accepts all filters that depend on one row at a time. Columns that only a filter names are
    /// read only for the rows that the ranges keep.
    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> Result<Vec<TableProviderFilterPushDown>> {
        let of = |filter: &&Expr| match is_of_rows(filter) {
            true => TableProviderFilterPushDown::Exact,
            false => TableProviderFilterPushDown::Unsupported,
        };
        Ok(filters.iter().map(of).collect())
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let schema = self.frame.schema();
        let columns = projection.cloned().unwrap_or_else(|| (0..schema.fields().len()).collect());
        let (mut ranges, mut rest) = (Vec::new(), Vec::new());
        for filter in filters.iter().flat_map(split_conjunction) {
            match ColumnRange::of(filter, &self.frame) {
                Some(range) => ranges.push(range),
                None => rest.push(filter.clone()),
            }
        }
        let rest = conjunction(rest).map(|rest| self.rest(state, &rest)).transpose()?;
        let partitions = state.config().target_partitions();
        Ok(Arc::new(FarScan::new(self.frame.clone(), columns, ranges, rest, limit, partitions)?))
    }
}

impl FarTable {
    fn rest(&self, state: &dyn Session, filter: &Expr) -> Result<ResidualFilter> {
        let schema = self.frame.schema();
        let mut columns = Vec::new();
        for column in filter.column_refs() {
            columns.push(schema.index_of(column.name())?);
        }
        columns.sort_unstable();
        let schema = schema.project(&columns)?;
        Ok(ResidualFilter { columns, filter: state.create_physical_expr(filter.clone(), &schema.to_dfschema()?)? })
    }
}

/// Checks whether a filter depends only on the row itself and always gives the same answer.
fn is_of_rows(filter: &Expr) -> bool {
    let is_other = |part: &Expr| {
        Ok(matches!(
            part,
            Expr::ScalarSubquery(_) | Expr::Exists(_) | Expr::InSubquery(_) | Expr::OuterReferenceColumn(..)
        ))
    };
    !filter.is_volatile() && !filter.exists(is_other).unwrap_or(true)
}
