//! Joining and splitting vectors, and access to their first and last elements.

use super::FarVec;
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};
use core::ops::Range;

impl<T: Send + 'static> FarVec<T> {
    /// Returns the first element, if there is one.
    pub fn first<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.get(scope, 0)
    }

    /// Returns the last element, if there is one.
    pub fn last<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.len.checked_sub(1).map_or(Ok(None), |last| self.get(scope, last))
    }

    /// Returns the first element, to be changed, if there is one.
    pub fn first_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.get_mut(scope, 0)
    }

    /// Returns the last element, to be changed, if there is one.
    pub fn last_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.len.checked_sub(1).map_or(Ok(None), |last| self.get_mut(scope, last))
    }

    /// Moves the elements of another vector to the end of this one. If it fails, both are
    /// unchanged.
    ///
    /// ```
    /// # use farfield::{FarVec, Heap};
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// # let scope = heap.enter();
    /// let (mut near, mut far) = (FarVec::new(), FarVec::new());
    /// near.extend(&scope, [1, 2])?;
    /// far.extend(&scope, [3, 4])?;
    /// near.append(&scope, &mut far)?;
    /// let mut back = near.split_off(&scope, 3)?;
    /// assert_eq!((near.len(), far.len(), back.pop(&scope)?), (3, 0, Some(4)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn append(&mut self, scope: &Scope<'_>, other: &mut FarVec<T>) -> Result<(), FarError> {
        if self.is_empty() {
            core::mem::swap(self, other);
            return Ok(());
        }
        self.copy_in(scope, other, 0..other.len)?;
        self.len += core::mem::take(&mut other.len);
        other.clear();
        Ok(())
    }

    /// Moves the elements from an index on into a new vector. If it fails, nothing has changed.
    ///
    /// # Panics
    /// If the index is beyond the end.
    pub fn split_off(&mut self, scope: &Scope<'_>, at: usize) -> Result<FarVec<T>, FarError> {
        assert!(at <= self.len, "`at` split index (is {at}) should be <= len (is {})", self.len);
        let mut tail = FarVec::new();
        if at == 0 {
            core::mem::swap(self, &mut tail);
            return Ok(tail);
        }
        tail.copy_in(scope, self, at..self.len)?;
        tail.len = self.len - at;
        self.len = at;
        self.trim();
        Ok(tail)
    }

    /// Copies the bytes of elements of `source` behind the end of this vector. Until the caller
    /// changes the lengths, the copies are no elements yet, and those they were copied from still
    /// are.
    fn copy_in(&mut self, scope: &Scope<'_>, source: &FarVec<T>, elements: Range<usize>) -> Result<(), FarError> {
        let _patient = scope.allow_blocking();
        let (mut from, mut to) = (elements.start, self.len);
        while from < elements.end {
            let count = (Self::PER_UNIT - from % Self::PER_UNIT)
                .min(Self::PER_UNIT - to % Self::PER_UNIT)
                .min(elements.end - from);
            if let Err(error) = self.copy_some(scope, source, from, to, count) {
                self.trim();
                return Err(error);
            }
            (from, to) = (from + count, to + count);
        }
        Ok(())
    }

    /// Copies elements of one unit to places of one unit.
    fn copy_some(
        &mut self,
        scope: &Scope<'_>,
        source: &FarVec<T>,
        from: usize,
        to: usize,
        count: usize,
    ) -> Result<(), FarError> {
        let _both = scope.hold();
        let address = source.element(scope, from, AccessMode::Read)?;
        let unit = to / Self::PER_UNIT;
        let made = unit < self.units.made();
        let target = if made { self.units.unit(scope, unit, AccessMode::Write) } else { self.units.make(scope) }?;
        // SAFETY: so many elements are in the one unit and so many places in the other, both near
        // as long as the scope is held; the places are behind our end, and ours alone.
        unsafe { target.add(to % Self::PER_UNIT).copy_from_nonoverlapping(address, count) };
        Ok(())
    }
}
