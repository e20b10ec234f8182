//! Optimizer rule that pushes aggregates over a far scan down to the memory server.

use crate::groups::FarGroups;
use crate::totals::FarTotals;
use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use std::sync::Arc;

/// Replaces aggregates directly over a [`FarScan`](crate::FarScan), with or without groups, by
/// nodes that the memory server answers.
#[derive(Debug)]
pub(crate) struct AggregatePushdown;

impl PhysicalOptimizerRule for AggregatePushdown {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _config: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|part| {
            if let Some(totals) = FarTotals::instead_of(part.as_ref())? {
                return Ok(Transformed::yes(Arc::new(totals) as Arc<dyn ExecutionPlan>));
            }
            if let Some(groups) = FarGroups::instead_of(&part)? {
                return Ok(Transformed::yes(Arc::new(groups) as Arc<dyn ExecutionPlan>));
            }
            Ok(Transformed::no(part))
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
