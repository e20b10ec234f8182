//! `TBox`: the owner of an object that stays with its owner's object.
#![allow(unsafe_code, reason = "objects are used by their addresses")]

use crate::node;
use crate::task::code::{ShippedCode, object_bytes_of};
use crate::{FarGroup, Here, OwnedObject, ShareError};
use core::marker::PhantomData;
use core::mem::{ManuallyDrop, align_of, size_of};
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use farfield_core::dsm::OwnerWord;

/// Owner of an object in shared memory that is *tied* to it, as `Box` is for one process.
///
/// The object is at the node of its owner, always: it comes with the object in which its owner lies, in
/// the same message, to whoever reads or writes that. So it is used without [`Here`] and without a
/// check, by `Deref`. An owner on a stack stays at the node of the task, and cannot be sent; put into an
/// object of a [`DBox`](crate::DBox) it travels with that.
///
/// When its owner is dropped, the object is dropped a moment later by another thread of the node, so a list
/// of any length can be dropped.
pub struct TBox<T: FarGroup> {
    /// Address of the object in this process: where the owner is, the object is.
    object: NonNull<T>,
    owned: PhantomData<T>,
}

// SAFETY: owns a value of `T`, which is both.
unsafe impl<T: FarGroup> Send for TBox<T> {}
// SAFETY: as above.
unsafe impl<T: FarGroup> Sync for TBox<T> {}

// SAFETY: it is one tie, which is named.
unsafe impl<T: FarGroup> FarGroup for TBox<T> {
    const HAS_TIES: bool = true;

    fn visit_ties(&self, visit: &mut dyn FnMut(Tie)) {
        let slot = (&raw const self.object).cast();
        visit(Tie { slot, target: self.object.as_ptr().cast_const().cast(), member: MemberType::of::<T>() });
    }
}

impl<T: FarGroup + core::fmt::Debug> core::fmt::Debug for TBox<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: FarGroup> TBox<T> {
    const ALIGNED: () =
        assert!(align_of::<T>() <= OwnerWord::ALIGN as usize, "shared objects are aligned to 16 bytes at most");

    pub(crate) fn new(here: &Here<'_>, value: T) -> Result<TBox<T>, ShareError> {
        const { Self::ALIGNED };
        let bytes = object_bytes_of(value);
        match here.node().store_tied(&bytes) {
            Ok(object) => Ok(TBox { object: object.cast(), owned: PhantomData }),
            Err(error) => {
                // SAFETY: the bytes of the value, which nobody else has.
                drop(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() });
                Err(error)
            }
        }
    }

    /// Takes the object out of shared memory.
    pub fn into_inner(self) -> T {
        let object = ManuallyDrop::new(self).object;
        // SAFETY: the object, which nobody else uses, and which is not dropped below.
        let value = unsafe { object.read() };
        node::with_current(|node| node.free_tied(object.cast(), None));
        value
    }
}

impl<T: FarGroup> Deref for TBox<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: where the owner is, the object is: in this node's memory, which stays as long as tied
        // objects have owners, or in the copy in which the owner lies.
        unsafe { self.object.as_ref() }
    }
}

impl<T: FarGroup> DerefMut for TBox<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above. Who borrows an owner mutably has it at this node, and alone.
        unsafe { self.object.as_mut() }
    }
}

impl<T: FarGroup> Drop for TBox<T> {
    fn drop(&mut self) {
        node::with_current(|node| node.free_tied(self.object.cast(), ShippedCode::of_destructor::<T>(1)));
    }
}

/// A [`TBox`] in a value, for who copies or moves that.
#[doc(hidden)]
#[derive(Debug)]
pub struct Tie {
    /// Where the address of the object is.
    pub(crate) slot: *const u8,
    /// Address of the object at the node that the value comes from.
    pub(crate) target: *const u8,
    pub(crate) member: MemberType,
}

/// Type of an object of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemberType {
    pub(crate) bytes: usize,
    visit: unsafe fn(*const u8, &mut dyn FnMut(Tie)),
    visit_owned: unsafe fn(*const u8, &mut dyn FnMut(OwnedObject)),
}

impl MemberType {
    pub(crate) fn of<T: FarGroup>() -> MemberType {
        /// # Safety
        /// A value of `T` lies there, but for the addresses of what is tied to it.
        unsafe fn visit<T: FarGroup>(object: *const u8, visit: &mut dyn FnMut(Tie)) {
            // SAFETY: the caller's promise. A `TBox` may hold any address as long as it is not used.
            unsafe { &*object.cast::<T>() }.visit_ties(visit);
        }
        /// # Safety
        /// A value of `T` lies there, but for the addresses of what is tied to it.
        unsafe fn visit_owned<T: FarGroup>(object: *const u8, visit: &mut dyn FnMut(OwnedObject)) {
            // SAFETY: as above.
            unsafe { &*object.cast::<T>() }.visit_owned(visit);
        }
        MemberType { bytes: size_of::<T>(), visit: visit::<T>, visit_owned: visit_owned::<T> }
    }

    /// Passes the objects that an object owns, but not those that are tied to it.
    ///
    /// # Safety
    /// As for [`MemberType::visit_ties`].
    pub(crate) unsafe fn visit_owned(self, object: *const u8, visit: &mut dyn FnMut(OwnedObject)) {
        // SAFETY: the caller's promise.
        unsafe { (self.visit_owned)(object, visit) }
    }

    /// Passes the ties in an object.
    ///
    /// # Safety
    /// An object of this type lies there, aligned, which nobody writes to. The addresses in it may be
    /// those of another process.
    pub(crate) unsafe fn visit_ties(self, object: *const u8, visit: &mut dyn FnMut(Tie)) {
        // SAFETY: the caller's promise.
        unsafe { (self.visit)(object, visit) }
    }
}
