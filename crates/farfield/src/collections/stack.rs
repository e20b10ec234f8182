//! `FarStack`: last in, first out.

use super::chain::{Chain, ChainEnd};
use crate::error::{AllocError, FarError};
use crate::heap::Scope;

/// A LIFO stack whose elements are near or far.
///
/// The top is near when it is used; deep elements are far.
pub struct FarStack<T: Send + 'static> {
    pub(super) chain: Chain<T>,
}

impl<T: Send + 'static> FarStack<T> {
    /// Makes an empty stack. It belongs to the heap of its first element.
    pub const fn new() -> FarStack<T> {
        FarStack { chain: Chain::new() }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.chain.len()
    }

    /// Checks whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts an element on top.
    pub fn push(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        self.chain.push(scope, ChainEnd::Back, value)
    }

    /// Takes the top element off, if there is one. If it was the last one of its chunk, the chunk
    /// below the next is fetched ahead.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        self.chain.pop_ahead(scope, ChainEnd::Back)
    }

    /// Takes the top element off like [`FarStack::pop`], for a task: other tasks run while the
    /// element is fetched.
    pub async fn fetch_pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        scope.retry(|| self.pop(scope)).await
    }

    /// Returns the top element, if there is one.
    pub fn top<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(ChainEnd::Back))
    }

    /// Returns the top element, to be changed, if there is one.
    pub fn top_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(ChainEnd::Back))
    }

    /// Drops all elements.
    pub fn clear(&mut self) {
        self.chain = Chain::new();
    }
}

impl<T: Send + 'static> Default for FarStack<T> {
    fn default() -> FarStack<T> {
        FarStack::new()
    }
}

impl<T: Send + 'static> core::fmt::Debug for FarStack<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarStack({} elements)", self.len())
    }
}
