//! `FarBTreeSet`: a set in the order of its values.

use super::btree::FarBTreeMap;
use crate::error::{AllocError, FarError};
use crate::heap::Scope;
use core::borrow::Borrow;
use core::ops::RangeBounds;

/// An ordered set, the far counterpart of `BTreeSet`: its values are near or far.
///
/// ```
/// use farfield::{FarBTreeSet, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let scope = heap.enter();
/// let mut primes = FarBTreeSet::new();
/// for number in [7, 2, 5, 3] {
///     assert!(primes.insert(&scope, number)?);
/// }
/// let from_three = primes.range(&scope, 3..)?.map(|prime| prime.copied());
/// assert_eq!(from_three.collect::<Result<Vec<_>, _>>()?, [3, 5, 7]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FarBTreeSet<T: Send + 'static> {
    pub(super) map: FarBTreeMap<T, ()>,
}

impl<T: Send + 'static> FarBTreeSet<T> {
    /// Makes an empty set. It belongs to the heap of its first value.
    pub const fn new() -> FarBTreeSet<T> {
        FarBTreeSet { map: FarBTreeMap::new() }
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Checks whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Drops all values.
    pub fn clear(&mut self) {
        self.map.clear();
    }

    /// Returns the first value.
    pub fn first<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        Ok(self.map.first_key_value(scope)?.map(|(value, ())| value))
    }

    /// Returns the last value.
    pub fn last<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        Ok(self.map.last_key_value(scope)?.map(|(value, ())| value))
    }

    /// Iterates over all values in order, from either end. All that it has passed stays near as
    /// long as the scope lasts; for long walks there is [`FarBTreeSet::for_each`].
    pub fn iter<'a>(
        &'a self,
        scope: &'a Scope<'a>,
    ) -> Result<impl DoubleEndedIterator<Item = Result<&'a T, FarError>>, FarError> {
        self.map.keys(scope)
    }
}

impl<T: Ord + Send + 'static> FarBTreeSet<T> {
    /// Checks whether the set has a value.
    pub fn contains<Q: Ord + ?Sized>(&self, scope: &Scope<'_>, value: &Q) -> Result<bool, FarError>
    where
        T: Borrow<Q>,
    {
        self.map.contains_key(scope, value)
    }

    /// Returns the value in the set that is equal to this one, if there is one.
    pub fn get<'a, Q: Ord + ?Sized>(&'a self, scope: &'a Scope<'_>, value: &Q) -> Result<Option<&'a T>, FarError>
    where
        T: Borrow<Q>,
    {
        Ok(self.map.get_key_value(scope, value)?.map(|(value, ())| value))
    }

    /// Puts a value in, and returns whether it is new. A value that is there stays, and the other
    /// one is dropped, as in std.
    pub fn insert(&mut self, scope: &Scope<'_>, value: T) -> Result<bool, AllocError<T>> {
        match self.map.insert(scope, value, ()) {
            Ok(old) => Ok(old.is_none()),
            Err(AllocError { error, value: (value, ()) }) => Err(AllocError { error, value }),
        }
    }

    /// Removes a value, and returns whether it was there.
    pub fn remove<Q: Ord + ?Sized>(&mut self, scope: &Scope<'_>, value: &Q) -> Result<bool, FarError>
    where
        T: Borrow<Q>,
    {
        Ok(self.take(scope, value)?.is_some())
    }

    /// Removes a value and returns it, if it was there.
    pub fn take<Q: Ord + ?Sized>(&mut self, scope: &Scope<'_>, value: &Q) -> Result<Option<T>, FarError>
    where
        T: Borrow<Q>,
    {
        Ok(self.map.remove_entry(scope, value)?.map(|(value, ())| value))
    }

    /// Removes the first value and returns it, if there is one.
    pub fn pop_first(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        Ok(self.map.pop_first(scope)?.map(|(value, ())| value))
    }

    /// Removes the last value and returns it, if there is one.
    pub fn pop_last(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        Ok(self.map.pop_last(scope)?.map(|(value, ())| value))
    }

    /// Iterates over the values in a range, in order, from either end.
    ///
    /// # Panics
    /// Like std, if the start of the range is greater than its end, or both are equal and excluded.
    pub fn range<'a, Q, R>(
        &'a self,
        scope: &'a Scope<'a>,
        range: R,
    ) -> Result<impl DoubleEndedIterator<Item = Result<&'a T, FarError>>, FarError>
    where
        T: Borrow<Q>,
        Q: Ord + ?Sized,
        R: RangeBounds<Q>,
    {
        Ok(self.map.range(scope, range)?.map(|entry| entry.map(|(value, ())| value)))
    }

    /// Visits all values in order, and renews the scope on the way.
    pub fn for_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&T)) -> Result<(), FarError> {
        self.map.for_each(scope, |value, ()| visit(value))
    }
}

impl<T: Send + 'static> Default for FarBTreeSet<T> {
    fn default() -> FarBTreeSet<T> {
        FarBTreeSet::new()
    }
}

impl<T: Send + 'static> core::fmt::Debug for FarBTreeSet<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarBTreeSet({} values)", self.len())
    }
}
