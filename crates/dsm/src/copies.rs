//! CopyCache of other nodes' objects, by the words of their owners.
//!
//! A word means one version of one object for ever, so a copy is never wrong, only unused.
//! CopyCache leave oldest first when objects or newer copies need their memory, and are freed by
//! epochs (Fraser 2004) when no scope can have a reference to them.
#![allow(unsafe_code, reason = "copies are referred to by scopes")]

use core::ptr::NonNull;
use crossbeam_epoch::Guard;
use farfield_core::dsm::OwnerWord;
use std::alloc::Layout;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub(crate) struct CopyCache(Mutex<CopyTable>);

#[derive(Default)]
struct CopyTable {
    by_word: HashMap<OwnerWord, ObjectCopy>,
    /// Words in the order in which their copies came.
    order: VecDeque<OwnerWord>,
    bytes: u64,
}

/// Memory with the bytes of an object. They are not the object: they are never dropped.
struct ObjectCopy {
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, written before anybody else can see it and only read afterwards.
unsafe impl Send for ObjectCopy {}

impl ObjectCopy {
    fn new(bytes: &[u8]) -> ObjectCopy {
        let layout = Layout::from_size_align(bytes.len().max(1), OwnerWord::ALIGN as usize).expect("a small size");
        // SAFETY: the size is not zero.
        let address = unsafe { std::alloc::alloc(layout) };
        let Some(address) = NonNull::new(address) else { std::alloc::handle_alloc_error(layout) };
        // SAFETY: new memory of that size.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), bytes.len()) };
        ObjectCopy { address, layout }
    }

    /// Frees the memory once no scope of today is open any more.
    fn retire(self, guard: &Guard) {
        // SAFETY: it is out of the table, so only scopes that are open now can have references to
        // it.
        unsafe { guard.defer_unchecked(move || drop(self)) };
    }
}

impl Drop for ObjectCopy {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.address.as_ptr(), self.layout) };
    }
}

impl CopyCache {
    fn lock(&self) -> MutexGuard<'_, CopyTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Returns the address of the copy of this version. It is valid as long as `guard`.
    pub(crate) fn get(&self, word: OwnerWord, _guard: &Guard) -> Option<*const u8> {
        self.lock().by_word.get(&word).map(|copy| copy.address.as_ptr().cast_const())
    }

    /// Keeps a copy, if there is none, and as many others as fit `limit_bytes`. Returns its
    /// address, which is valid as long as `guard`.
    pub(crate) fn insert(&self, word: OwnerWord, bytes: &[u8], limit_bytes: u64, guard: &Guard) -> *const u8 {
        let mut table = self.lock();
        if let Some(copy) = table.by_word.get(&word) {
            return copy.address.as_ptr();
        }
        table.shrink(limit_bytes.saturating_sub(bytes.len() as u64), guard);
        let copy = ObjectCopy::new(bytes);
        let address = copy.address.as_ptr();
        table.bytes += copy.layout.size() as u64;
        table.order.push_back(word);
        table.by_word.insert(word, copy);
        address
    }

    /// Retires copies, oldest first, until the rest takes no more than `bytes`.
    pub(crate) fn shrink(&self, bytes: u64, guard: &Guard) {
        self.lock().shrink(bytes, guard);
    }
}

impl CopyTable {
    fn shrink(&mut self, bytes: u64, guard: &Guard) {
        while self.bytes > bytes {
            let Some(oldest) = self.order.pop_front() else { return };
            if let Some(copy) = self.by_word.remove(&oldest) {
                self.bytes -= copy.layout.size() as u64;
                copy.retire(guard);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_epoch::Collector;
    use farfield_core::dsm::{Colour, Partition};

    #[test]
    fn copies_leave_oldest_first_and_references_of_open_scopes_stay() {
        let (copies, handle) = (CopyCache::default(), Collector::new().register());
        let word = |number: u64| OwnerWord::new(Partition::new(1).unwrap(), 16 * number, Colour(0)).unwrap();
        let guard = handle.pin();
        let first = copies.insert(word(1), &[1; 100], 250, &guard);
        copies.insert(word(2), &[2; 100], 250, &guard);
        assert_eq!(copies.insert(word(1), &[9; 100], 250, &guard), first, "it is there already");
        copies.insert(word(3), &[3; 100], 250, &guard);
        assert!(copies.get(word(1), &guard).is_none() && copies.get(word(2), &guard).is_some());
        // SAFETY: the guard is older than the eviction.
        assert_eq!(unsafe { core::slice::from_raw_parts(first, 100) }, [1; 100]);
        assert_eq!(copies.bytes(), 200);
        copies.shrink(0, &guard);
        assert_eq!(copies.bytes(), 0);
    }
}
