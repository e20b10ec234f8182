//! What the loom models of the heap share: cells, scopes, and how a model is run.
#![allow(dead_code, reason = "each model uses a part")]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering, fence};

pub(crate) fn read(cell: &UnsafeCell<u64>) -> u64 {
    // SAFETY: loom fails the model if somebody writes at the same time.
    cell.with(|value| unsafe { *value })
}

pub(crate) fn write(cell: &UnsafeCell<u64>, value: u64) {
    // SAFETY: loom fails the model if somebody else accesses the cell at the same time.
    cell.with_mut(|target| unsafe { *target = value });
}

/// The heap's epoch, and the records of two mutators. The steps are those of `crates/farfield/src/heap/threads.rs`.
pub(crate) struct Scopes {
    epoch: AtomicU64,
    records: [AtomicU64; 2],
}

impl Scopes {
    pub(crate) fn new() -> Scopes {
        Scopes { epoch: AtomicU64::new(1), records: [AtomicU64::new(0), AtomicU64::new(0)] }
    }

    /// The outermost scope of a mutator begins.
    pub(crate) fn enter(&self, record: usize) {
        self.show(record, self.now());
        fence(Ordering::SeqCst);
    }

    /// The epoch in which a further scope begins.
    pub(crate) fn now(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The mutator's oldest scope is one of this epoch.
    pub(crate) fn show(&self, record: usize, epoch: u64) {
        self.records[record].store(epoch, Ordering::Release);
    }

    /// Its last scope ends.
    pub(crate) fn leave(&self, record: usize) {
        self.show(record, 0);
    }

    /// The epoch of what was made Leaving, or unlinked, until now.
    pub(crate) fn end_epoch(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::AcqRel)
    }

    /// Can no scope refer to what belongs to this epoch?
    pub(crate) fn is_over(&self, epoch: u64) -> bool {
        fence(Ordering::SeqCst);
        self.records.iter().all(|record| {
            let entered = record.load(Ordering::Acquire);
            entered == 0 || entered > epoch
        })
    }
}

/// All interleavings with so many preemptions at most.
pub(crate) fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}
