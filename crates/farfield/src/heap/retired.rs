//! Objects that a collection has unlinked while others may still read them: freed when no scope can
//! refer to them (epoch-based reclamation).
//!
//! Unlink, then note the heap's epoch *E* and add one to it. A scope of a later epoch has acquired
//! the addition, and a scope that the look at the records does not see begins after that look: both
//! find the object unlinked. So it is free when every scope is of a later epoch than *E*, by the
//! same argument as for pages that leave (`threads`).

use super::HeapInner;
use super::raw::SlotWord;
use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The unlinked objects of one collection.
#[derive(Default)]
pub(crate) struct RetiredObjects(Mutex<RetirementBatches>);

#[derive(Default)]
struct RetirementBatches {
    open: Vec<SlotWord>,
    /// Bytes of the objects in `open`.
    bytes: usize,
    closed: VecDeque<(u64, Vec<SlotWord>)>,
    /// Number of [`RetirementHold`]s that exist.
    keeps: usize,
}

/// Guard that keeps every object which a scope that began afterwards has found, even when that
/// scope has ended.
#[cfg(feature = "serde")]
pub(crate) struct RetirementHold<'a>(&'a RetiredObjects);

/// Number of objects, or of bytes (below), at which a batch is closed.
const OBJECTS_MAX: usize = 64;
const BYTES_MAX: usize = 64 << 10;

impl HeapInner {
    /// Ends an epoch and returns it: scopes of later ones see everything that the caller did
    /// before.
    pub(crate) fn next_epoch(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::AcqRel)
    }
}

#[cfg(feature = "serde")]
impl Drop for RetirementHold<'_> {
    fn drop(&mut self) {
        self.0.lock().keeps -= 1;
    }
}

impl RetiredObjects {
    fn lock(&self) -> MutexGuard<'_, RetirementBatches> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "serde")]
    pub(crate) fn keep(&self) -> RetirementHold<'_> {
        self.lock().keeps += 1;
        RetirementHold(self)
    }

    /// Takes over an object of so many bytes, which no slot names any more. Returns the objects
    /// that no scope can look at now, to be freed by the caller.
    #[must_use]
    pub(crate) fn push(&self, core: &HeapInner, slot: SlotWord, bytes: usize) -> Vec<SlotWord> {
        let mut batches = self.lock();
        batches.open.push(slot);
        batches.bytes += bytes;
        if batches.open.len() < OBJECTS_MAX && batches.bytes < BYTES_MAX {
            return Vec::new();
        }
        let batch = core::mem::take(&mut batches.open);
        batches.bytes = 0;
        batches.closed.push_back((core.next_epoch(), batch));
        let mut over = Vec::new();
        while batches.keeps == 0
            && let Some((epoch, _)) = batches.closed.front()
            && core.threads.is_over(*epoch)
        {
            over.extend(batches.closed.pop_front().into_iter().flat_map(|(_, batch)| batch));
        }
        over
    }

    /// Takes all objects out. The caller has the collection for itself.
    #[must_use]
    pub(crate) fn take_all(&mut self) -> Vec<SlotWord> {
        let batches = core::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner));
        batches.closed.into_iter().flat_map(|(_, batch)| batch).chain(batches.open).collect()
    }
}
