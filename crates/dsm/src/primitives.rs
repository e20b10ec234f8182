//! Locks and atomics of what the models run (`tests/model.rs`): there, loom's types stand in for these.

pub(crate) use core::sync::atomic::AtomicU64;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
