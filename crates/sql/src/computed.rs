//! What is aggregated where that is no column of the table: an expression over columns of a row.
//!
//! The planner computes what several aggregates share in a projection below them, so references to
//! its columns are replaced by what they stand for.
//!
//! Danger: an expression that is computed in another type than DataFusion would.

use crate::scan::FarScan;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{BinaryExpr, CastExpr, Column, Literal};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::{ExecutionPlan, PhysicalExpr};
use farfield_frame::arrow::datatypes::DataType;
use farfield_frame::{Expression, column};
use std::sync::Arc;

/// The rows that an aggregate reads.
pub(crate) struct AggregateInput {
    pub(crate) scan: FarScan,
    /// Expressions over the columns of the scan, if there is a projection between it and the
    /// aggregate.
    projected: Option<Vec<Arc<dyn PhysicalExpr>>>,
}

impl AggregateInput {
    /// Returns the input of an aggregate if it is a scan of all rows that conditions keep.
    pub(crate) fn of(plan: &Arc<dyn ExecutionPlan>) -> Option<AggregateInput> {
        let projection = plan.downcast_ref::<ProjectionExec>();
        let scan = projection.map_or(plan, ProjectionExec::input).downcast_ref::<FarScan>()?;
        let projected = projection.map(|projection| projection.expr().iter().map(|one| one.expr.clone()).collect());
        scan.is_unlimited().then(|| AggregateInput { scan: scan.clone(), projected })
    }

    /// Returns an expression over the columns of the scan.
    pub(crate) fn resolved(&self, expression: &Arc<dyn PhysicalExpr>) -> Result<Arc<dyn PhysicalExpr>> {
        let Some(projected) = &self.projected else { return Ok(expression.clone()) };
        let replaced = expression.clone().transform_up(|part| {
            Ok(match part.downcast_ref::<Column>() {
                Some(column) => Transformed::yes(projected[column.index()].clone()),
                None => Transformed::no(part),
            })
        });
        Ok(replaced?.data)
    }

    /// Returns the index of the column that an expression is, in the frame.
    pub(crate) fn column(&self, expression: &Arc<dyn PhysicalExpr>) -> Option<usize> {
        expression.downcast_ref::<Column>().map(|column| self.scan.column(column.index()))
    }

    /// Returns the index that the scan gives to the values of an expression, or `None` if the memory
    /// server cannot compute them.
    pub(crate) fn computed(&mut self, expression: &Arc<dyn PhysicalExpr>) -> Option<usize> {
        let translated = self.translated(expression)?;
        self.scan.computed(expression.to_string(), translated)
    }

    /// Translates sums, differences and products of `f64`. All parts have this type, so the frame
    /// has no types to make common, which it does by other rules.
    fn translated(&self, expression: &Arc<dyn PhysicalExpr>) -> Option<Expression> {
        if let Some(index) = self.column(expression) {
            let is_floating = self.scan.data_type(index) == DataType::Float64;
            return is_floating.then(|| column(self.scan.name_of(index)));
        }
        if let Some(cast) = expression.downcast_ref::<CastExpr>() {
            let index = self.column(cast.expr())?;
            let of = self.scan.data_type(index);
            let is_exact = *cast.cast_type() == DataType::Float64 && (of.is_integer() || of == DataType::Float32);
            return is_exact.then(|| column(self.scan.name_of(index)).cast(DataType::Float64));
        }
        if let Some(literal) = expression.downcast_ref::<Literal>() {
            let ScalarValue::Float64(Some(value)) = literal.value() else { return None };
            return Some((*value).into());
        }
        let binary = expression.downcast_ref::<BinaryExpr>()?;
        let (left, right) = (self.translated(binary.left())?, self.translated(binary.right())?);
        match binary.op() {
            Operator::Plus => Some(left + right),
            Operator::Minus => Some(left - right),
            Operator::Multiply => Some(left * right),
            _ => None,
        }
    }
}
