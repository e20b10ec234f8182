//! The aggregates that a query asks for: which functions, over which columns.
//!
//! Danger: an aggregate whose type or value differs from what the replaced part of the plan would
//! give.

use crate::computed::AggregateInput;
use crate::scan::FarScan;
use datafusion::common::Result;
use datafusion::physical_expr::expressions::{CastExpr, Literal};
use datafusion::physical_plan::PhysicalExpr;
use datafusion::physical_plan::udaf::AggregateFunctionExpr;
use farfield_frame::arrow::datatypes::DataType;
use std::sync::Arc;

/// An aggregate that a query asks for.
#[derive(Clone, Debug)]
pub(crate) struct AggregateRequest {
    pub(crate) function: AggregateFunction,
    /// Index that the scan gives to the column, or computed values, that are aggregated; `None` if
    /// rows are counted.
    pub(crate) column: Option<usize>,
    pub(crate) data_type: DataType,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AggregateFunction {
    Count,
    Sum,
    Mean,
    Min,
    Max,
}

impl AggregateRequest {
    /// Translates an aggregate of DataFusion. Returns `None` if it can only be found by reading
    /// rows.
    pub(crate) fn of(function: &AggregateFunctionExpr, input: &mut AggregateInput) -> Result<Option<AggregateRequest>> {
        let kind = match function.fun().name() {
            "count" => AggregateFunction::Count,
            "sum" => AggregateFunction::Sum,
            "avg" => AggregateFunction::Mean,
            "min" => AggregateFunction::Min,
            "max" => AggregateFunction::Max,
            _ => return Ok(None),
        };
        let arguments = function.expressions();
        let [argument] = &arguments[..] else { return Ok(None) };
        if function.is_distinct() || !function.order_bys().is_empty() {
            return Ok(None);
        }
        let argument = input.resolved(argument)?;
        let column = match input.column(without_cast(&argument, kind)) {
            None if kind == AggregateFunction::Count && is_value(&argument) => None,
            None => match input.computed(&argument) {
                None => return Ok(None),
                column => column,
            },
            column => column,
        };
        let request = AggregateRequest { function: kind, column, data_type: function.field().data_type().clone() };
        Ok(request.is_of_its_type(&input.scan)?.then_some(request))
    }

    /// Checks whether the server answers with the function's type. For a minimum or maximum it also
    /// checks that the frame knows the column's ends.
    fn is_of_its_type(&self, scan: &FarScan) -> Result<bool> {
        let Some(column) = self.column else { return Ok(self.data_type == DataType::Int64) };
        let of = scan.data_type(column);
        Ok(match self.function {
            AggregateFunction::Count => self.data_type == DataType::Int64,
            AggregateFunction::Mean => self.data_type == DataType::Float64,
            AggregateFunction::Sum if of.is_floating() => self.data_type == DataType::Float64,
            AggregateFunction::Sum if of.is_unsigned_integer() => self.data_type == DataType::UInt64,
            AggregateFunction::Sum => self.data_type == DataType::Int64,
            AggregateFunction::Min | AggregateFunction::Max => self.data_type == of && scan.has_ends(column)?,
        })
    }
}

/// Returns what is aggregated. The argument of a sum or mean may be a cast to a wider type, which
/// loses nothing.
fn without_cast(argument: &Arc<dyn PhysicalExpr>, kind: AggregateFunction) -> &Arc<dyn PhysicalExpr> {
    let wider = argument.downcast_ref::<CastExpr>().filter(|cast| {
        matches!(
            (kind, cast.cast_type()),
            (AggregateFunction::Sum, DataType::Int64 | DataType::UInt64 | DataType::Float64)
                | (AggregateFunction::Mean, DataType::Float64)
        )
    });
    wider.map_or(argument, CastExpr::expr)
}

fn is_value(argument: &Arc<dyn PhysicalExpr>) -> bool {
    argument.downcast_ref::<Literal>().is_some_and(|literal| !literal.value().is_null())
}
