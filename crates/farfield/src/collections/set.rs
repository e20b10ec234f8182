//! `FarSet`: a hash set for many threads.

use super::map::{FarMap, FarMapBuilder, Item, Source};
use crate::Heap;
use crate::error::{AllocError, BuildError, FarError};
use crate::heap::Scope;
use core::borrow::Borrow;
use core::hash::{BuildHasher, Hash};
use std::hash::RandomState;

/// A hash set whose values are near or far, shared by threads: a [`FarMap`] whose entries are keys
/// only.
///
/// Values are any `T: Send + Sync + 'static`, or `[u8]` or `str` of any length. All methods take
/// `&self`: threads look up, insert and remove at the same time, and readers take no lock.
///
/// ```
/// use farfield::{FarSet, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let seen: FarSet<str> = FarSet::new(&heap)?;
/// let scope = heap.enter();
/// assert!(seen.insert(&scope, "https://example.org/")?);
/// assert!(!seen.insert(&scope, "https://example.org/")?);
/// assert!(seen.contains(&scope, "https://example.org/")?);
/// assert!(seen.remove(&scope, "https://example.org/")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FarSet<T: Item + ?Sized, S = RandomState> {
    map: FarMap<T, (), S>,
}

impl<T: Item + ?Sized> FarSet<T> {
    /// Makes an empty set in this heap.
    pub fn new(heap: &Heap) -> Result<FarSet<T>, BuildError> {
        FarSet::from_builder(FarMap::builder(), heap)
    }
}

impl<T: Item + ?Sized, S> FarSet<T, S> {
    /// Makes an empty set in this heap, as a map of this builder would be made: with room from the
    /// beginning, another place of the index, or another hash function.
    pub fn from_builder(builder: FarMapBuilder<T, (), S>, heap: &Heap) -> Result<FarSet<T, S>, BuildError> {
        Ok(FarSet { map: builder.build(heap)? })
    }
}

impl<T: Item + ?Sized + Hash + Eq, S: BuildHasher> FarSet<T, S> {
    /// Returns the number of values. Other threads may change it at any moment.
    pub fn len(&self) -> u64 {
        self.map.len()
    }

    /// Checks whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Checks whether the set has a value.
    pub fn contains<Q: Hash + Eq + ?Sized>(&self, scope: &Scope<'_>, value: &Q) -> Result<bool, FarError>
    where
        T: Borrow<Q>,
    {
        self.map.contains_key(scope, value)
    }

    /// Returns the value in the set that is equal to this one, if there is one.
    pub fn get<'a, Q>(&'a self, scope: &'a Scope<'_>, value: &Q) -> Result<Option<&'a T>, FarError>
    where
        T: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        Ok(self.map.get_key_value(scope, value)?.map(|(value, ())| value))
    }

    /// Puts a value in, and returns whether it is new. A value that is there stays, and the other
    /// one is dropped.
    pub fn insert<A: Source<T>>(&self, scope: &Scope<'_>, value: A) -> Result<bool, AllocError<A>> {
        match self.map.insert_new(scope, value, ()) {
            Ok(old) => Ok(old.is_none()),
            Err(AllocError { error, value: (value, ()) }) => Err(AllocError { error, value }),
        }
    }

    /// Removes a value, and returns whether it was there.
    pub fn remove<Q: Hash + Eq + ?Sized>(&self, scope: &Scope<'_>, value: &Q) -> Result<bool, FarError>
    where
        T: Borrow<Q>,
    {
        Ok(self.map.remove(scope, value)?.is_some())
    }

    /// Visits all values, in no order, and renews the scope on the way. Values that are added or
    /// removed meanwhile may be visited or not.
    pub fn for_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&T)) -> Result<(), FarError> {
        self.map.for_each(scope, |value, ()| visit(value))
    }

    /// Keeps only the values that `keep` accepts, of those that are in the set from the beginning
    /// to the end of this call. Renews the scope on the way.
    pub fn retain(&self, scope: &mut Scope<'_>, mut keep: impl FnMut(&T) -> bool) -> Result<(), FarError> {
        self.map.retain(scope, |value, ()| keep(value))
    }

    /// Removes all values that are in the set from the beginning to the end of this call. Renews
    /// the scope on the way.
    pub fn clear(&self, scope: &mut Scope<'_>) -> Result<(), FarError> {
        self.map.clear(scope)
    }
}

impl<T: Item + ?Sized, S> core::fmt::Debug for FarSet<T, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarSet({:?})", self.map)
    }
}
