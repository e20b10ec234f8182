//! In place of etcd in a build without it: a program that asks for it is told what to do.

use super::ElectionInvitation;
use crate::NodeStartError;
use crate::backup::BackupAccess;
use crate::node::{NodeBuilder, Running};

const ABSENT: NodeStartError = NodeStartError::Argument(
    "this program was built without etcd: add the feature etcd to its dependency farfield-dsm",
);

pub(super) fn found(_: &NodeBuilder, _: &str, _: Vec<BackupAccess>) -> Result<ElectionInvitation, NodeStartError> {
    Err(ABSENT)
}

pub(super) fn begin(_: &Running, _: &ElectionInvitation, _: &NodeBuilder) -> Result<(), NodeStartError> {
    Err(ABSENT)
}
