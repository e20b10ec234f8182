//! `FarQueue`: first in, first out.

use super::chain::{Chain, End};
use super::list::ListIter;
use crate::error::{AllocError, FarError};
use crate::heap::Scope;

/// A queue whose elements are near or far: what was put in first comes out first.
///
/// Both ends are near when they are used; what waits between them is far.
pub struct FarQueue<T: Send + 'static> {
    pub(super) chain: Chain<T>,
}

impl<T: Send + 'static> FarQueue<T> {
    /// An empty queue. It belongs to the heap of its first element.
    pub const fn new() -> FarQueue<T> {
        FarQueue { chain: Chain::new() }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.chain.len()
    }

    /// Is there no element?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts a value in at the end.
    pub fn push(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        self.chain.push(scope, End::Back, value)
    }

    /// Takes the first element out. When it was the last of its chunk, the chunk after the next is fetched ahead.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        self.chain.pop_ahead(scope, End::Front)
    }

    /// The same, for a task: while the element is on its way, others run.
    pub async fn fetch_pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        scope.retry(|| self.pop(scope)).await
    }

    /// The first element, which comes out next.
    pub fn front<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(End::Front))
    }

    /// The last element, which came in last.
    pub fn back<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(End::Back))
    }

    /// The first element, to be changed.
    pub fn front_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(End::Front))
    }

    /// The last element, to be changed.
    pub fn back_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(End::Back))
    }

    /// All elements in order, from either end. What it has passed stays near as long as the scope lasts.
    pub fn iter<'a>(&'a self, scope: &'a Scope<'a>) -> ListIter<'a, T> {
        ListIter::new(&self.chain, scope)
    }

    /// Keeps the elements that `keep` accepts; renews the scope on the way. If it fails, what it has asked about is done.
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
