//! Tasks: code that runs at a node, and the wait for its result.

pub(crate) mod code;
mod join;
mod scope;
mod workers;

pub(crate) use join::TaskEnd;
pub use join::TaskHandle;
pub(crate) use join::{OpenJoins, Waiting};
pub use scope::{Lent, LentMut, Owner, OwnerMut, ScopedHandle, TaskScope, scope};
pub(crate) use scope::{UsedLoan, sealed};
pub(crate) use workers::{Borrows, QueuedTask, TaskRefusal, Workers};
