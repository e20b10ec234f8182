//! Locks, atomics, threads and the clock of what the models run (`tests/model.rs`): there, loom's
//! types stand in for these.

pub(crate) use core::sync::atomic::{AtomicBool, AtomicU64};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{Thread, ThreadId, current as current_thread};
pub(crate) use std::time::Instant;
