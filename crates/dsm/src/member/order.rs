//! The order of `farfield share run` to this process.

use crate::{NodeBuilder, NodeStartError};
use farfield_core::dsm::{LaunchOrder, LaunchRole};

/// Returns the order to this process, if there is one.
pub(crate) fn order() -> Result<Option<LaunchOrder>, NodeStartError> {
    let Some(text) = std::env::var_os(LaunchOrder::VARIABLE) else { return Ok(None) };
    let order: Option<LaunchOrder> = text.to_str().and_then(|text| serde_json::from_str(text).ok());
    match order {
        // A program that a node has started inherits the variable.
        Some(order) if order.process == std::process::id() => Ok(Some(order)),
        Some(_) => Ok(None),
        None => Err(NodeStartError::Argument(
            "FARFIELD_SHARE_ORDER is not an order of this version: start the program with its `farfield share run`",
        )),
    }
}

impl NodeBuilder {
    /// Returns the configuration with what an order says instead.
    pub(crate) fn with_order(&self, order: &LaunchOrder) -> NodeBuilder {
        let nodes = match &order.role {
            LaunchRole::First { nodes, .. } => nodes.unwrap_or(self.nodes),
            LaunchRole::Joined { .. } => self.nodes,
        };
        NodeBuilder {
            nodes,
            near_bytes: order.near_bytes.unwrap_or(self.near_bytes),
            workers: order.workers.unwrap_or(self.workers),
            expel_after: order.expel_after.unwrap_or(self.expel_after),
            backup: order.backup.clone().or_else(|| self.backup.clone()),
            backup_token: order.backup_token.clone().unwrap_or_else(|| self.backup_token.clone()),
            etcd: order.etcd.clone().or_else(|| self.etcd.clone()),
            ..self.clone()
        }
    }
}
