//! Reads that do not wait, and reads that outlive their scope.
#![allow(unsafe_code, reason = "objects are borrowed by their owners' words")]

use crate::copies::{CopyFlight, ObjectCopy};
use crate::node::ShareNode;
use crate::{Here, Object, Owner, ShareError};
use core::future::Future;
use core::marker::PhantomData;
use core::ops::Deref;
use core::pin::Pin;
use core::task::{Context, Poll};
use farfield_core::dsm::OwnerWord;
use std::sync::Arc;

/// Shared borrow of an object that needs no scope, and may go to other threads. Made by
/// [`Owner::pin`].
pub struct PinnedObject<'a, T: Object + ?Sized> {
    object: &'a T,
    /// The object lies in memory of this node, or of one that it has mapped.
    _node: Arc<ShareNode>,
    _copy: Option<Arc<ObjectCopy>>,
}

impl<'a, T: Object + ?Sized> PinnedObject<'a, T> {
    pub(crate) fn new<O: Owner<Object = T>>(owner: &'a O, here: &Here<'_>) -> Result<Self, ShareError> {
        let (word, extent) = owner.place();
        let (object, copy) = here.pinning::<T>(word, extent)?;
        // SAFETY: as for `DBox::get`; the copy is kept by the guard, and other memory by its node.
        Ok(PinnedObject { object: unsafe { &*object }, _node: here.node().clone(), _copy: copy })
    }
}

impl<T: Object + ?Sized + core::fmt::Debug> core::fmt::Debug for PinnedObject<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.object.fmt(f)
    }
}

impl<T: Object + ?Sized> Deref for PinnedObject<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.object
    }
}

/// Shared borrow that is waited for by `await`. Made by [`Owner::fetch`].
#[must_use = "nothing is fetched before it is polled"]
pub struct ObjectFetch<'a, T: Object + ?Sized> {
    here: &'a Here<'a>,
    word: OwnerWord,
    extent: T::Extent,
    flight: Option<Arc<CopyFlight>>,
    object: PhantomData<&'a T>,
}

impl<'a, T: Object + ?Sized> ObjectFetch<'a, T> {
    pub(crate) fn new<O: Owner<Object = T>>(owner: &'a O, here: &'a Here<'_>) -> Self {
        let (word, extent) = owner.place();
        ObjectFetch { here, word, extent, flight: None, object: PhantomData }
    }
}

impl<T: Object + ?Sized> core::fmt::Debug for ObjectFetch<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ObjectFetch(is on its way: {})", self.flight.is_some())
    }
}

/// Nothing in it is pinned.
impl<T: Object + ?Sized> Unpin for ObjectFetch<'_, T> {}

impl<'a, T: Object + ?Sized> Future for ObjectFetch<'a, T> {
    type Output = Result<&'a T, ShareError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let read = this.here.poll_reading::<T>(this.word, this.extent, &mut this.flight, context.waker());
        // SAFETY: as for `DBox::get`.
        read.map(|object| object.map(|object| unsafe { &*object }))
    }
}
