//! `DArc`: one of many owners of one shared object.
#![allow(unsafe_code, reason = "objects are borrowed by their words")]

use crate::node;
use crate::task::code::ShippedCode;
use crate::{Far, FarGroup, Here, NodeId, OwnedObject, Portable, ShareError};
use core::marker::PhantomData;
use farfield_core::dsm::OwnerWord;

/// One of many owners of an object in shared memory, as `Arc` is for one process.
///
/// It is a word of 8 bytes, which can be sent to tasks and lie in other shared objects. The object does
/// not change, and stays at its node; other nodes read copies. What is to change lies in a
/// [`DMutex`](crate::DMutex) or [`DAtomic`](crate::DAtomic) within it. The object is dropped at its
/// node after its last owner, some milliseconds later.
pub struct DArc<T: Far> {
    word: OwnerWord,
    object: PhantomData<T>,
}

// SAFETY: a word, which holds no address and stands for one owner wherever it is.
unsafe impl<T: Far> Portable for DArc<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for DArc<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::of::<T>(self.word, ()));
    }
}
// SAFETY: the word never changes.
unsafe impl<T: Far> Far for DArc<T> {}

impl<T: Far> core::fmt::Debug for DArc<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DArc(at node {})", self.home())
    }
}

impl<T: Far> DArc<T> {
    /// Stores a value at this node. Errors are those of [`Here::alloc`].
    pub fn new(here: &Here<'_>, value: T) -> Result<DArc<T>, ShareError> {
        let word = here.alloc(value)?.into_word();
        here.node().begin_count(word, ShippedCode::of_destructor::<T>(1));
        Ok(DArc::of_word(word))
    }

    /// Makes an owner that is counted already.
    pub(crate) fn of_word(word: OwnerWord) -> DArc<T> {
        DArc { word, object: PhantomData }
    }

    pub(crate) fn owner_word(&self) -> OwnerWord {
        self.word
    }

    /// Returns the node that keeps the object.
    pub fn home(&self) -> NodeId {
        NodeId::of(self.word)
    }

    /// Borrows the object. If it is at another node and there is no copy here, waits for one.
    pub fn get<'a>(&'a self, here: &'a Here<'_>) -> Result<&'a T, ShareError> {
        let object = here.reading::<T>(self.word, ())?;
        // SAFETY: the object, or a copy of its bytes, aligned to 16 bytes. It does not change, and is
        // there as long as it has an owner; a copy, as long as the scope.
        Ok(unsafe { &*object })
    }

    /// Returns another owner. Away from the object's node it asks that node for a few at a time, so
    /// most calls send no message.
    pub fn try_clone(&self, here: &Here<'_>) -> Result<DArc<T>, ShareError> {
        here.node().share(self.word).map_err(|unanswered| unanswered.error)?;
        Ok(DArc::of_word(self.word))
    }
}

impl<T: Far> Drop for DArc<T> {
    fn drop(&mut self) {
        node::with_current(|node| node.unshare(self.word));
    }
}
