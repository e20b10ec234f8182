//! Tasks: code that runs at a node, and the wait for its result.

pub(crate) mod code;
mod join;
mod workers;

pub use join::TaskHandle;
pub(crate) use join::{OpenJoins, Waiting};
pub(crate) use workers::{QueuedTask, Workers};
