//! `DBox`: the owner of one shared object.
#![allow(unsafe_code, reason = "objects are borrowed by their owners' words")]

use crate::node;
use crate::task::code::object_bytes_of;
use crate::{Far, FarGroup, Here, NodeId, Object, ShareError};
use core::marker::PhantomData;
use core::mem::{ManuallyDrop, size_of};
use core::ops::{Deref, DerefMut};
use farfield_core::dsm::{BlockRights, OwnerWord};

/// Owner of an object in shared memory, as `Box` is for one process.
///
/// It is a word of 8 bytes, which can be sent to tasks at other nodes and lie in other shared
/// objects. The object stays where it is meanwhile. A shared borrow elsewhere reads a copy; a
/// mutable borrow brings the object to the borrower's node. When its owner is dropped, the object
/// is dropped at its node.
pub struct DBox<T: Object + ?Sized> {
    pub(crate) word: OwnerWord,
    pub(crate) extent: T::Extent,
    object: PhantomData<T>,
}

impl<T: Object + ?Sized> core::fmt::Debug for DBox<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DBox(at node {}, version {})", self.home(), self.word.colour().0)
    }
}

impl<T: FarGroup> DBox<T> {
    pub(crate) fn new(here: &Here<'_>, value: T) -> Result<DBox<T>, ShareError> {
        let bytes = object_bytes_of(value);
        match here.node().store(&bytes) {
            Ok(word) => {
                if T::HAS_TIES {
                    here.node().begin_version(word);
                }
                Ok(DBox::of_word(word, ()))
            }
            Err(error) => {
                // SAFETY: the bytes of the value, which nobody else has.
                drop(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() });
                Err(error)
            }
        }
    }

    /// Takes the object out of shared memory. On an error the owner is dropped, and the object with
    /// it. What is tied to the object is at this node afterwards.
    pub fn into_inner(mut self, here: &Here<'_>) -> Result<T, ShareError> {
        if T::HAS_TIES {
            self.get_mut(here)?;
        }
        let bytes = here.node().contents(self.word, size_of::<T>())?;
        here.node().free(self.into_word(), None);
        // SAFETY: the bytes of the object, which is there no longer and was not dropped.
        Ok(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
    }
}

impl<T: Far> DBox<[T]> {
    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.extent
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.extent == 0
    }
}

impl<T: Object + ?Sized> DBox<T> {
    /// Makes the owner of an object that nobody owns.
    pub(crate) fn of_word(word: OwnerWord, extent: T::Extent) -> DBox<T> {
        const { T::ALIGNED };
        DBox { word, extent, object: PhantomData }
    }

    /// Gives up the owner. The object is whose who has the word.
    pub(crate) fn into_word(self) -> OwnerWord {
        ManuallyDrop::new(self).word
    }

    /// Returns the node that keeps the object now.
    pub fn home(&self) -> NodeId {
        NodeId::of(self.word)
    }

    /// Borrows the object. If it is at another node and there is no copy of this version here,
    /// waits for one.
    pub fn get<'a>(&'a self, here: &'a Here<'_>) -> Result<&'a T, ShareError> {
        let object = here.reading::<T>(self.word, self.extent)?;
        // SAFETY: the object, or a copy of its bytes, aligned to 16 bytes. Its owner is borrowed,
        // so nobody writes to it; a copy is there as long as the scope, whose guard is borrowed,
        // too.
        Ok(unsafe { &*object })
    }

    /// Borrows the object mutably. It is at this node afterwards, and waits for it if it was
    /// elsewhere. Nothing happens when the borrow ends, or is forgotten.
    pub fn get_mut<'a>(&'a mut self, here: &'a Here<'_>) -> Result<Mut<'a, T>, ShareError> {
        let (word, object) = here.writing::<T>(self.word, self.extent, BlockRights::Owner)?;
        // The owner has the new version before anybody can write.
        self.word = word;
        // SAFETY: the object, at this node. Its owner is borrowed mutably, so nobody else reads or writes
        // it.
        Ok(unsafe { Mut::new(object) })
    }
}

impl<T: Object + ?Sized> Drop for DBox<T> {
    fn drop(&mut self) {
        node::free(self.word, T::destructor(self.extent));
    }
}

/// Mutable borrow of a shared object.
pub struct Mut<'a, T: Object + ?Sized> {
    value: &'a mut T,
}

impl<'a, T: Object + ?Sized> Mut<'a, T> {
    /// # Safety
    /// Nobody else reads or writes the object as long as the borrow lasts.
    pub(crate) unsafe fn new(object: *mut T) -> Self {
        // SAFETY: the caller's promise.
        Mut { value: unsafe { &mut *object } }
    }

    /// Returns the borrow as a plain reference, which lasts as long as the owner is borrowed: so a list can be
    /// followed and changed.
    pub fn into_mut(this: Mut<'a, T>) -> &'a mut T {
        this.value
    }
}

impl<T: Object + ?Sized + core::fmt::Debug> core::fmt::Debug for Mut<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.value.fmt(f)
    }
}

impl<T: Object + ?Sized> Deref for Mut<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value
    }
}

impl<T: Object + ?Sized> DerefMut for Mut<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value
    }
}
