//! `FarStack`: last in, first out.

use super::chain::{Chain, End};
use crate::error::{AllocError, FarError};
use crate::heap::Scope;

/// A stack whose elements are near or far: what was put in last comes out first.
///
/// Its top is near when it is used; what lies deep is far.
pub struct FarStack<T: Send + 'static> {
    pub(super) chain: Chain<T>,
}

impl<T: Send + 'static> FarStack<T> {
    /// An empty stack. It belongs to the heap of its first element.
    pub const fn new() -> FarStack<T> {
        FarStack { chain: Chain::new() }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.chain.len()
    }

    /// Is there no element?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts a value on top.
    pub fn push(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        self.chain.push(scope, End::Back, value)
    }

    /// Takes the top element off. When it was the last of its chunk, the chunk below the next is fetched ahead.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        self.chain.pop_ahead(scope, End::Back)
    }

    /// The same, for a task: while the element is on its way, others run.
    pub async fn fetch_pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        scope.retry(|| self.pop(scope)).await
    }

    /// The top element.
    pub fn top<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(End::Back))
    }

    /// The top element, to be changed.
    pub fn top_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(End::Back))
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
