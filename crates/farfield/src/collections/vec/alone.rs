//! Access to elements without a scope.

use super::{FarVec, Scope};
use crate::error::FarError;
use crate::heap::HeapInner;

impl<T: Send + 'static> FarVec<T> {
    /// Calls `action` with the element of this index, if there is one, which is near as long as
    /// that takes. Needs no scope: it opens one.
    ///
    /// ```
    /// # use farfield::{FarVec, Heap};
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// let mut names = FarVec::new();
    /// names.push(&heap.enter(), String::from("far"))?;
    /// names.write(0, |name| name.push_str("field"))?;
    /// assert_eq!(names.read(0, String::clone)?.as_deref(), Some("farfield"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read<R>(&self, index: usize, action: impl FnOnce(&T) -> R) -> Result<Option<R>, FarError> {
        let Some(core) = self.core(index) else { return Ok(None) };
        // SAFETY: the element keeps it.
        let scope = Scope::new(unsafe { &*core });
        Ok(self.get(&scope, index)?.map(action))
    }

    /// Calls `action` like [`FarVec::read`], with the hint that the element will not be used again
    /// soon: see [`FarVec::get_once`].
    pub fn read_once<R>(&self, index: usize, action: impl FnOnce(&T) -> R) -> Result<Option<R>, FarError> {
        let Some(core) = self.core(index) else { return Ok(None) };
        // SAFETY: the element keeps it.
        let scope = Scope::new(unsafe { &*core });
        Ok(self.get_once(&scope, index)?.map(action))
    }

    /// Calls `action` with the element of this index, if there is one, to change it. Needs no
    /// scope: see [`FarVec::read`].
    pub fn write<R>(&mut self, index: usize, action: impl FnOnce(&mut T) -> R) -> Result<Option<R>, FarError> {
        let Some(core) = self.core(index) else { return Ok(None) };
        // SAFETY: the element keeps it, also while it is changed.
        let scope = Scope::new(unsafe { &*core });
        Ok(self.get_mut(&scope, index)?.map(action))
    }

    /// Returns the heap, if there is such an element. The heap exists as long as the element.
    pub(super) fn core(&self, index: usize) -> Option<*const HeapInner> {
        self.units.core().filter(|_| index < self.len)
    }
}
