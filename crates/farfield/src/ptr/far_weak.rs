//! `FarWeak`: a pointer to a shared value that does not own it.

use super::{FarArc, FarBox, Follow, Pointer};
use crate::error::AllocError;
use crate::heap::{HeapInner, WeakCell};
use core::marker::PhantomData;
use std::sync::{Arc, Weak};

/// A weak pointer to a value with owners ([`FarArc`]), near or far: the far counterpart of
/// `std::sync::Weak`.
///
/// A weak pointer does not keep its value. When the last owner goes, the value is dropped and its
/// far space is free, however many weak pointers there are. A weak pointer keeps neither the heap
/// nor its far memory. It takes eight bytes, also as an `Option`, and may lie anywhere, inside far
/// values too.
///
/// To use the value, [`FarWeak::upgrade`] makes an owner. Making, cloning, upgrading and dropping
/// weak pointers does not need the value near, and waits for no pool.
///
/// A value that has had weak pointers takes about 100 bytes of near memory, in the budget, until it
/// is dropped. Its weak pointers then keep 32 of them, outside of the budget, until the last one
/// goes.
///
/// ```
/// use farfield::{FarWeak, Heap};
///
/// struct Folder {
///     name: &'static str,
///     /// An owner here would keep both for ever, because the parent owns its children.
///     parent: FarWeak<Folder>,
/// }
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let root = heap.alloc_shared(Folder { name: "root", parent: FarWeak::new() })?;
/// let child = heap.alloc_shared(Folder { name: "child", parent: root.downgrade() })?;
/// let parent = child.read(|child| child.parent.upgrade())?.ok_or("no parent")?;
/// assert_eq!(parent.read(|parent| parent.name)?, "root");
/// drop((root, parent));
/// assert!(child.read(|child| child.parent.upgrade().is_none())?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A weak pointer gives no reference by itself. One comes from an owner, and ends with it:
///
/// ```compile_fail,E0716
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc_shared(7).unwrap();
/// let weak = value.downgrade();
/// let scope = heap.enter();
/// let seven = weak.upgrade().unwrap().get(&scope).unwrap(); // error: temporary value dropped while borrowed
/// println!("{seven}");
/// ```
///
/// ```compile_fail,E0599
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let weak = heap.alloc_shared(7).unwrap().downgrade();
/// weak.get(&heap.enter()); // error: no method named `get`
/// ```
///
/// Values must be such that threads can share them, as for [`FarArc`]:
///
/// ```compile_fail,E0277
/// // error: `Cell<i32>` cannot be shared between threads safely
/// let weak = farfield::FarWeak::<std::cell::Cell<i32>>::new();
/// ```
#[repr(transparent)]
pub struct FarWeak<T: Send + Sync + 'static> {
    cell: Weak<WeakCell>,
    points_to: PhantomData<T>,
}

const _: () = assert!(size_of::<FarWeak<u8>>() == 8 && size_of::<Option<FarWeak<u8>>>() == 8);

impl<T: Send + Sync + 'static> FarWeak<T> {
    /// Makes a weak pointer that leads nowhere. Allocates nothing.
    pub const fn new() -> FarWeak<T> {
        FarWeak { cell: Weak::new(), points_to: PhantomData }
    }

    pub(super) fn from_cell(cell: Weak<WeakCell>) -> FarWeak<T> {
        FarWeak { cell, points_to: PhantomData }
    }

    /// Makes a value that is given a weak pointer to itself: see [`Heap::alloc_cyclic`](crate::Heap::alloc_cyclic).
    pub(crate) fn make_cyclic(
        core: &HeapInner,
        make: impl FnOnce(&FarWeak<T>) -> T,
    ) -> Result<FarArc<T>, AllocError<T>> {
        let cell = Arc::new(WeakCell::unborn());
        let value = make(&FarWeak::from_cell(Arc::downgrade(&cell)));
        let owner = FarArc::from(FarBox::new_in(core, value)?);
        core.begin_cell(owner.pointer().key(), owner.pointer().halves(), cell);
        Ok(owner)
    }

    /// Makes an owner of the value, if it still has one.
    pub fn upgrade(&self) -> Option<FarArc<T>> {
        let (place, number) = self.cell.upgrade()?.upgrade()?;
        // SAFETY: the cell is of a `T` (`downgrade`, `make_cyclic`), which had an owner and so
        // lives, and the new owner has been counted.
        Some(unsafe { FarArc::from_pointer(Pointer::from_halves(place, number)) })
    }

    /// Returns the number of owners; 0 if the value is gone. Unless it is 0, others may change it at
    /// any moment.
    pub fn owners(&self) -> u64 {
        self.cell.upgrade().map_or(0, |cell| cell.owners())
    }

    /// Returns the number of weak pointers; 0 if the value is gone. Others may change it at any
    /// moment.
    pub fn weak_count(&self) -> u64 {
        self.cell.upgrade().filter(|cell| cell.owners() > 0).map_or(0, |cell| Arc::weak_count(&cell) as u64)
    }

    /// Checks whether both point to the same value, or neither to any.
    ///
    /// Pointers made by [`FarWeak::new`] never had a value. A value that is gone is still another
    /// one than those that are made later.
    pub fn ptr_eq(&self, other: &FarWeak<T>) -> bool {
        self.cell.ptr_eq(&other.cell)
    }
}

impl<T: Send + Sync + 'static> Default for FarWeak<T> {
    fn default() -> FarWeak<T> {
        FarWeak::new()
    }
}

impl<T: Send + Sync + 'static> Clone for FarWeak<T> {
    fn clone(&self) -> FarWeak<T> {
        FarWeak { cell: self.cell.clone(), points_to: PhantomData }
    }
}

impl<T: Send + Sync + 'static> core::fmt::Debug for FarWeak<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("FarWeak")
    }
}
