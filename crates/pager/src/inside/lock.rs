//! A spin lock that yields. Holders run with signals blocked, so a thread never interrupts itself
//! while holding. No other lock is used inside programs, not even one of the standard library's:
//! see [`super::own_code`].

use super::sync::{AtomicU32, Ordering, Wait};
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};

/// Mutual exclusion over `T`.
pub struct SpinLock<T> {
    taken: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and `taken` makes guards exclusive.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    /// Creates an open lock.
    pub const fn new(value: T) -> SpinLock<T> {
        SpinLock { taken: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Takes the lock. Spins and yields until it is free.
    #[track_caller]
    pub fn lock(&self) -> Guard<'_, T> {
        let mut wait = Wait::new("a lock");
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            wait.pause();
        }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        if self.taken.load(Ordering::Relaxed) == 0
            && self.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            return Some(Guard { lock: self });
        }
        None
    }

    /// Opens the lock by force: in the child of a fork, where the holder does not exist.
    ///
    /// # Safety
    /// No guard may be in use.
    pub unsafe fn reset(&self) {
        self.taken.store(0, Ordering::Release);
    }
}

/// Guard of a held lock.
pub struct Guard<'a, T> {
    lock: &'a SpinLock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard is exclusive.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard is exclusive.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.lock.taken.store(0, Ordering::Release);
    }
}
