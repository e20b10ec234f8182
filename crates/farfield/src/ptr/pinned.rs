//! References that need no scope, because their value is pinned.

use crate::fault::Pin;
use core::fmt;
use core::ops::{Deref, DerefMut};

/// A shared reference to a value that stays near until this guard is dropped. Made by
/// [`FarBox::pin`](crate::FarBox::pin).
///
/// The guard may go to other threads if they may share the value. If the guard is forgotten
/// (`mem::forget`), the page stays near, perhaps longer than the value.
pub struct Pinned<'a, T> {
    value: &'a T,
    _pin: Pin<'a>,
}

/// A mutable reference to a value that stays near until this guard is dropped. Made by
/// [`FarBox::pin_mut`](crate::FarBox::pin_mut).
pub struct PinnedMut<'a, T> {
    value: &'a mut T,
    _pin: Pin<'a>,
}

impl<'a, T> Pinned<'a, T> {
    pub(super) fn new(value: &'a T, pin: Pin<'a>) -> Pinned<'a, T> {
        Pinned { value, _pin: pin }
    }
}

impl<'a, T> PinnedMut<'a, T> {
    pub(super) fn new(value: &'a mut T, pin: Pin<'a>) -> PinnedMut<'a, T> {
        PinnedMut { value, _pin: pin }
    }
}

impl<T> Deref for Pinned<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value
    }
}

impl<T> Deref for PinnedMut<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value
    }
}

impl<T> DerefMut for PinnedMut<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.value
    }
}

impl<T: fmt::Debug> fmt::Debug for Pinned<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

impl<T: fmt::Debug> fmt::Debug for PinnedMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}
