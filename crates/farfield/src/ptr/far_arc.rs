//! `FarArc`: several owners.

use super::{FarBox, FarPtr, FarWeak, Follow, Pinned, Pointer};
use crate::error::FarError;
use crate::heap::{Scope, unshare};
use core::mem::ManuallyDrop;

/// An owner, among several, of a value of a [`Heap`](crate::Heap), near or far: the far counterpart
/// of `Arc`.
///
/// A pointer takes eight bytes, also as an `Option`. It may lie anywhere, inside other far values
/// too. A clone is another owner. Cloning an owner and dropping one that is not the last neither
/// need the value near nor wait for anything. The last owner drops the value, as [`FarBox`] does.
/// Owners that lie in each other's values keep them for ever, unless one of them is a [`FarWeak`].
///
/// Owner counts are kept near: nothing for a value with one owner, about 40 bytes for a value with
/// several, and about 100 for one that has had weak pointers.
///
/// ```
/// use farfield::{FarArc, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let style = heap.alloc_shared(String::from("italic"))?;
/// let words = ["far", "near"].map(|word| heap.alloc((word, style.clone())));
/// drop(style);
/// let scope = heap.enter();
/// for word in words {
///     let word = word?;
///     let (text, style) = word.get(&scope)?;
///     println!("{text} {}", style.get(&scope)?);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A reference ends with its scope, and with the owner that it came from:
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc_shared(7).unwrap();
/// let scope = heap.enter();
/// let seven = value.get(&scope).unwrap();
/// drop(value); // error: cannot move out of `value` because it is borrowed
/// println!("{seven}");
/// ```
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc_shared(7).unwrap();
/// let scope = heap.enter();
/// let seven = value.get(&scope).unwrap();
/// drop(scope); // error: cannot move out of `scope` because it is borrowed
/// println!("{seven}");
/// ```
///
/// Owners may be in several threads, so the value must be one that threads can share:
///
/// ```compile_fail,E0277
/// # let heap = farfield::Heap::builder().build().unwrap();
/// // error: `Cell<i32>` cannot be shared between threads safely
/// let value = heap.alloc_shared(std::cell::Cell::new(7));
/// ```
#[repr(transparent)]
pub struct FarArc<T: Send + Sync + 'static> {
    /// Shared by all owners; the last one drops it.
    value: ManuallyDrop<FarBox<T>>,
}

const _: () = assert!(size_of::<FarArc<u8>>() == 8 && size_of::<Option<FarArc<u8>>>() == 8);

impl<T: Send + Sync + 'static> FarArc<T> {
    /// Returns the value, and brings it near if it is far. It stays where it is as long as the
    /// scope lasts.
    #[inline]
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        self.value.get(scope)
    }

    /// Returns the value, to be changed, if there is no other owner and no weak pointer.
    ///
    /// ```
    /// # let heap = farfield::Heap::builder().build()?;
    /// let mut value = heap.alloc_shared(7)?;
    /// let scope = heap.enter();
    /// *value.get_mut(&scope)?.unwrap() += 1;
    /// let other = value.clone();
    /// assert_eq!(value.get_mut(&scope)?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        if self.pointer().heap().is_unshared(self.pointer().key()) {
            self.value.get_mut(scope).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Returns the value like [`FarArc::get`], with the hint that it will not be used again soon:
    /// see [`FarBox::get_once`].
    pub fn get_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        self.value.get_once(scope)
    }

    /// Returns the value like [`FarArc::get`], for a task: see [`FarBox::fetch`].
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        self.value.fetch(scope).await
    }

    /// Returns the value like [`FarArc::fetch`], with the hint that it will not be used again soon:
    /// see [`FarBox::get_once`].
    pub async fn fetch_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        self.value.fetch_once(scope).await
    }

    /// Calls `action` with the value, which is near as long as that takes: see [`FarBox::read`].
    pub fn read<R>(&self, action: impl FnOnce(&T) -> R) -> Result<R, FarError> {
        self.value.read(action)
    }

    /// Calls `action` like [`FarArc::read`], with the hint that the value will not be used again
    /// soon: see [`FarBox::get_once`].
    pub fn read_once<R>(&self, action: impl FnOnce(&T) -> R) -> Result<R, FarError> {
        self.value.read_once(action)
    }

    /// Brings the value near and keeps it there: see [`FarBox::pin`].
    pub fn pin(&self) -> Result<Pinned<'_, T>, FarError> {
        self.value.pin()
    }

    /// Pins the value like [`FarArc::pin`], for a task of any executor: see
    /// [`FarBox::fetch_pinned`].
    pub async fn fetch_pinned(&self) -> Result<Pinned<'_, T>, FarError> {
        self.value.fetch_pinned().await
    }

    /// Begins to bring the value near, and does not wait: see [`Heap::prefetch`](crate::Heap::prefetch).
    pub fn prefetch(&self) {
        self.value.prefetch();
    }

    /// Marks the value as not needed soon: its page is evicted before others.
    pub fn cold(&self) {
        self.value.cold();
    }

    /// Returns the number of owners. Unless it is one, other owners may change it at any moment.
    pub fn owners(&self) -> u64 {
        self.pointer().heap().owners(self.pointer().key())
    }

    /// Returns the number of weak pointers. Others may change it at any moment.
    pub fn weak_count(&self) -> u64 {
        self.pointer().heap().weak_count(self.pointer().key())
    }

    /// Makes a weak pointer to the value. Needs the value not near, and waits for nothing.
    pub fn downgrade(&self) -> FarWeak<T> {
        let pointer = self.pointer();
        FarWeak::from_cell(pointer.heap().downgrade(pointer.key(), pointer.halves()))
    }

    /// Makes an owner of the value that this pointer points to.
    ///
    /// # Safety
    /// A `T` lives there, and the owner has been counted.
    pub(super) unsafe fn from_pointer(pointer: Pointer) -> FarArc<T> {
        // SAFETY: passed on to the caller; the count says which of the owners is the last, and only
        // that one drops or changes the value.
        FarArc { value: ManuallyDrop::new(unsafe { FarBox::from_pointer(pointer) }) }
    }

    /// Checks whether both own the same value.
    pub fn ptr_eq(&self, other: &FarArc<T>) -> bool {
        self.pointer().is(other.pointer())
    }

    /// Turns the only owner into a [`FarBox`], without moving the value. Gives this owner back as
    /// the error if there are others. Weak pointers lead nowhere afterwards.
    pub fn into_box(self) -> Result<FarBox<T>, FarArc<T>> {
        if !self.pointer().heap().detach_weak(self.pointer().key()) {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: the only pointer to the value, and not used afterwards.
        Ok(unsafe { this.value.alias() })
    }
}

impl<T: Send + Sync + 'static> From<FarBox<T>> for FarArc<T> {
    fn from(value: FarBox<T>) -> FarArc<T> {
        FarArc { value: ManuallyDrop::new(value) }
    }
}

impl<T: Send + Sync + 'static> Clone for FarArc<T> {
    fn clone(&self) -> FarArc<T> {
        self.pointer().heap().share(self.pointer().key());
        // SAFETY: the count says which of the owners is the last, and only that one drops or
        // changes the value.
        FarArc { value: ManuallyDrop::new(unsafe { self.value.alias() }) }
    }
}

impl<T: Send + Sync + 'static> Drop for FarArc<T> {
    fn drop(&mut self) {
        // SAFETY: this owner gives itself up.
        if unsafe { unshare(self.pointer().core(), self.pointer().key()) } {
            // SAFETY: it was the last one, and is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T: Send + Sync + 'static> FarPtr for FarArc<T> {
    type Value = T;
}

impl<T: Send + Sync + 'static> Follow for FarArc<T> {
    fn pointer(&self) -> &Pointer {
        self.value.pointer()
    }
}

impl<T: Send + Sync + 'static> core::fmt::Debug for FarArc<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarArc({:?})", self.pointer())
    }
}
