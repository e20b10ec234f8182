//! `FarQueue`: first in, first out.

use super::chain::{Chain, ChainEnd};
use super::list::ListIter;
use crate::error::{AllocError, FarError};
use crate::heap::Scope;

/// A FIFO queue whose elements are near or far.
///
/// Both ends are near when they are used; elements between them are far.
pub struct FarQueue<T: Send + 'static> {
    pub(super) chain: Chain<T>,
}

impl<T: Send + 'static> FarQueue<T> {
    /// Makes an empty queue. It belongs to the heap of its first element.
    pub const fn new() -> FarQueue<T> {
        FarQueue { chain: Chain::new() }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.chain.len()
    }

    /// Checks whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an element at the end.
    pub fn push(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        self.chain.push(scope, ChainEnd::Back, value)
    }

    /// Takes the first element out, if there is one. If it was the last one of its chunk, the chunk
    /// after the next is fetched ahead.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        self.chain.pop_ahead(scope, ChainEnd::Front)
    }

    /// Takes the first element out like [`FarQueue::pop`], for a task: other tasks run while the
    /// element is fetched.
    pub async fn fetch_pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        scope.retry(|| self.pop(scope)).await
    }

    /// Returns the first element, which is taken out next.
    pub fn front<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(ChainEnd::Front))
    }

    /// Returns the last element, which was added last.
    pub fn back<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(ChainEnd::Back))
    }

    /// Returns the first element, to be changed, if there is one.
    pub fn front_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(ChainEnd::Front))
    }

    /// Returns the last element, to be changed, if there is one.
    pub fn back_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(ChainEnd::Back))
    }

    /// Iterates over all elements in order, from either end. All that it has passed stays near as
    /// long as the scope lasts.
    pub fn iter<'a>(&'a self, scope: &'a Scope<'a>) -> ListIter<'a, T> {
        ListIter::new(&self.chain, scope)
    }

    /// Keeps only the elements that `keep` accepts. Renews the scope on the way. If it fails, all
    /// elements that `keep` has rejected are removed, except perhaps the last one.
    pub fn retain(&mut self, scope: &mut Scope<'_>, keep: impl FnMut(&mut T) -> bool) -> Result<(), FarError> {
        self.chain.retain(scope, keep)
    }

    /// Moves the elements of another queue to the end of this one: see [`FarList::append`](super::FarList::append).
    pub fn append(&mut self, scope: &Scope<'_>, other: &mut FarQueue<T>) -> Result<(), FarError> {
        self.chain.append(scope, &mut other.chain)
    }

    /// Drops all elements.
    pub fn clear(&mut self) {
        self.chain = Chain::new();
    }
}

impl<T: Send + 'static> Default for FarQueue<T> {
    fn default() -> FarQueue<T> {
        FarQueue::new()
    }
}

impl<T: Send + 'static> core::fmt::Debug for FarQueue<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarQueue({} elements)", self.len())
    }
}
