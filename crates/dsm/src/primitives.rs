//! Locks, atomics and threads of what the models run (`tests/model.rs`, `tests/schedules.rs`): there, loom's and
//! shuttle's types stand in for these.

pub(crate) use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;
