//! Who is a node, and who says so: the first process, with which all others end.
//!
//! It starts nodes on its own machine, and lets others join that know the program's token. It asks
//! each node for a sign of life, and expels those that give none.

mod beats;
mod first;
mod order;
mod others;

pub(crate) use beats::FirstProcess;
pub(crate) use first::start;
pub(crate) use order::order;
pub(crate) use others::{invitation, join, serve};

use crate::NodeStartError;
use crate::backup::BackupAccess;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// The file of this program, even if it was replaced since it started.
const PROGRAM: &str = "/proc/self/exe";

/// Words of the first process to another one that is to be a node.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct Invitation {
    pub(crate) node: u16,
    pub(crate) nodes: u16,
    pub(crate) first_partition: u16,
    pub(crate) near_bytes: u64,
    pub(crate) workers: usize,
    pub(crate) expel_after: Duration,
    /// Where it keeps its backup.
    pub(crate) backup: Option<BackupAccess>,
}

/// Returns the hash of the program's file, by which nodes know whether they are of one build.
fn build() -> Result<u128, NodeStartError> {
    let program = std::fs::read(Path::new(PROGRAM)).map_err(NodeStartError::os("read the file of this program"))?;
    Ok(twox_hash::XxHash3_128::oneshot(&program))
}

/// Writes a line to stderr. `eprintln!` is not used, because it panics if stderr is closed.
pub(crate) fn say(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("farfield: {text}\n").as_bytes());
}
