//! Tasks: code that waits for far values without a thread, so that one core keeps many misses in flight.

mod executor;
mod join;

pub(crate) use executor::is_polled;
pub use executor::{Executor, spawn};
pub use join::{JoinHandle, Panicked};
