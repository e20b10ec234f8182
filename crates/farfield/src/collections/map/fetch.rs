//! Look-ups for tasks.

use super::{FarMap, Item, Walk};
use crate::error::FarError;
use crate::heap::Scope;
use core::borrow::Borrow;
use core::hash::{BuildHasher, Hash};

impl<K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> FarMap<K, V, S> {
    /// Returns the value like [`FarMap::get`], for a task: other tasks run while index and entry
    /// are fetched.
    pub async fn fetch<'a, Q: Hash + Eq + ?Sized>(
        &'a self,
        scope: &'a Scope<'_>,
        key: &Q,
    ) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
    {
        scope.retry(|| self.get(scope, key)).await
    }
}

impl<'map, K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> Walk<'map, K, V, S> {
    /// Returns entries like [`Walk::next`], for a task: other tasks run while they are fetched.
    pub async fn fetch_next<'a>(&mut self, scope: &'a Scope<'_>) -> Result<Option<Vec<(&'a K, &'a V)>>, FarError>
    where
        'map: 'a,
    {
        scope.retry(|| self.next(scope)).await
    }
}
