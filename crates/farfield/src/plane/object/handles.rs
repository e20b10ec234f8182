//! Free handles: a list through the free handles themselves, and a part of it for each thread.

use super::ObjectId;
use crate::error::{BuildError, FarError};
use crate::heap::ReservedArray;
use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::Handle;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// All handles of a heap.
pub(crate) struct Handles {
    words: ReservedArray<AtomicU64>,
    count: u32,
    free: Mutex<FreeHandles>,
}

struct FreeHandles {
    /// First handle of the list of those that were used and are free again.
    first: Option<ObjectId>,
    /// Number of the first handle that was never used; later ones were not either.
    fresh: u32,
}

/// Free handles of one thread.
#[derive(Default)]
pub(crate) struct ThreadHandles {
    first: Cell<Option<ObjectId>>,
    count: Cell<u32>,
}

/// Number of handles that a thread takes or gives at a time.
const BATCH: u32 = 64;

impl Handles {
    pub(super) fn new(count: u32) -> Result<Handles, BuildError> {
        Ok(Handles {
            words: ReservedArray::new(count as usize)?,
            count,
            free: Mutex::new(FreeHandles { first: None, fresh: 0 }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, FreeHandles> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of handles that there can be.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Returns the number below which handles were used.
    pub(crate) fn high(&self) -> u32 {
        self.lock().fresh
    }

    pub(super) fn table_bytes(&self) -> u64 {
        (u64::from(self.high()) * size_of::<Handle>() as u64).next_multiple_of(PAGE_BYTES as u64)
    }

    /// Checks whether there is a free handle, or fewer than `most` were ever used.
    pub(super) fn has_room(&self, own: &ThreadHandles, most: impl FnOnce() -> u64) -> bool {
        own.first.get().is_some() || {
            let most = most().min(u64::from(self.count));
            let free = self.lock();
            free.first.is_some() || u64::from(free.fresh) < most
        }
    }

    fn pop(&self, first: &mut Option<ObjectId>) -> Option<ObjectId> {
        let object = (*first)?;
        *first = Handle(self[object].load(Ordering::Relaxed)).next_free();
        Some(object)
    }

    fn push(&self, first: &mut Option<ObjectId>, object: ObjectId) {
        self[object].store(Handle::free(*first).0, Ordering::Relaxed);
        *first = Some(object);
    }

    /// Takes a free handle for the caller; true if the table has grown by that. Fails with
    /// [`FarError::FarFull`] if there is none.
    pub(super) fn take(&self, own: &ThreadHandles) -> Result<(ObjectId, bool), FarError> {
        let mut first = own.first.get();
        let mut grown = false;
        if first.is_none() {
            let mut free = self.lock();
            for _ in 0..BATCH {
                let used = self.pop(&mut free.first);
                let object = match used {
                    Some(object) => object,
                    None if free.fresh < self.count => {
                        free.fresh += 1;
                        grown = true;
                        free.fresh - 1
                    }
                    None => break,
                };
                self.push(&mut first, object);
                own.count.set(own.count.get() + 1);
            }
        }
        let object = self.pop(&mut first).ok_or(FarError::FarFull)?;
        own.first.set(first);
        own.count.set(own.count.get() - 1);
        Ok((object, grown))
    }

    /// Makes the handle free, for this thread first.
    pub(super) fn give(&self, own: &ThreadHandles, object: ObjectId) {
        let mut first = own.first.get();
        self.push(&mut first, object);
        own.first.set(first);
        own.count.set(own.count.get() + 1);
        if own.count.get() >= 2 * BATCH {
            self.give_batch(own);
        }
    }

    /// Gives all free handles of a thread, which ends, to the others.
    pub(super) fn give_all(&self, own: &ThreadHandles) {
        while own.count.get() > 0 {
            self.give_batch(own);
        }
    }

    fn give_batch(&self, own: &ThreadHandles) {
        let mut first = own.first.get();
        let mut free = self.lock();
        for _ in 0..BATCH {
            let Some(object) = self.pop(&mut first) else { break };
            self.push(&mut free.first, object);
            own.count.set(own.count.get() - 1);
        }
        own.first.set(first);
    }
}

impl core::ops::Index<ObjectId> for Handles {
    type Output = AtomicU64;

    #[inline]
    fn index(&self, object: ObjectId) -> &AtomicU64 {
        &self.words[object]
    }
}
