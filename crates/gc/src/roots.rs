//! Roots: references that outlive safepoints, from outside of the heap.

use crate::heap::GcInner;
use crate::object::Referent;
use crate::reference::Gc;
use core::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Reference to an object that keeps it alive, wherever it is kept.
///
/// [`Mutator::get`](crate::Mutator::get) gives the object. A root keeps the memory of its heap.
pub struct Root<T: ?Sized> {
    heap: Arc<GcInner>,
    index: usize,
    /// Entry of the object, which is its own as long as it lives.
    entry: u32,
    leads_to: PhantomData<fn(*const T) -> *const T>,
}

/// Entries of the objects that roots lead to.
#[derive(Default)]
pub(crate) struct RootTable(Mutex<RootList>);

#[derive(Default)]
struct RootList {
    /// Entry of each root, 0 for none.
    entries: Vec<u32>,
    free: Vec<usize>,
}

impl RootTable {
    fn lock(&self) -> MutexGuard<'_, RootList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, entry: u32) -> usize {
        let mut list = self.lock();
        match list.free.pop() {
            Some(index) => {
                list.entries[index] = entry;
                index
            }
            None => {
                list.entries.push(entry);
                list.entries.len() - 1
            }
        }
    }

    /// Returns the entries of all roots.
    pub(crate) fn entries(&self) -> Vec<u32> {
        self.lock().entries.iter().copied().filter(|entry| *entry != 0).collect()
    }

    /// Returns the number of roots.
    pub(crate) fn len(&self) -> usize {
        let list = self.lock();
        list.entries.len() - list.free.len()
    }
}

impl<T: ?Sized> Root<T> {
    /// Makes a root of the object of this entry, which is alive and of this type.
    pub(crate) fn new(heap: Arc<GcInner>, entry: u32) -> Root<T> {
        let index = heap.roots.add(entry);
        Root { heap, index, entry, leads_to: PhantomData }
    }

    /// Lets the root lead to this object, and not to the one before. For each step of a long walk,
    /// this costs less than a new root.
    ///
    /// # Panics
    /// The object belongs to another heap.
    pub fn set(&mut self, object: Gc<'_, T>)
    where
        T: Referent,
    {
        let (arena, bytes) = self.heap.arena;
        let address = object.header().as_ptr() as usize;
        assert!(address.wrapping_sub(arena) < bytes, "the object belongs to another heap");
        self.entry = object.entry();
        self.heap.roots.lock().entries[self.index] = self.entry;
    }

    #[inline]
    pub(crate) fn entry(&self) -> u32 {
        self.entry
    }

    #[inline]
    pub(crate) fn is_of(&self, heap: &GcInner) -> bool {
        core::ptr::eq(&*self.heap, heap)
    }
}

impl<T: ?Sized> Clone for Root<T> {
    fn clone(&self) -> Root<T> {
        Root::new(Arc::clone(&self.heap), self.entry())
    }
}

impl<T: ?Sized> Drop for Root<T> {
    fn drop(&mut self) {
        let mut list = self.heap.roots.lock();
        list.entries[self.index] = 0;
        list.free.push(self.index);
    }
}

impl<T: ?Sized> core::fmt::Debug for Root<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Root")
    }
}
