//! Entries that are inserted or changed in place.

use super::{At, FarBTreeMap};
use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, Scope};

/// The place of a key in a [`FarBTreeMap`], with or without a value. Made by [`FarBTreeMap::entry`].
pub enum BTreeEntry<'a, K: Ord + Send + 'static, V: Send + 'static> {
    /// The key has a value.
    Occupied(OccupiedBTreeEntry<'a, K, V>),
    /// The key has no value.
    Vacant(VacantBTreeEntry<'a, K, V>),
}

/// The place of a key that has a value.
pub struct OccupiedBTreeEntry<'a, K: Ord + Send + 'static, V: Send + 'static> {
    map: &'a mut FarBTreeMap<K, V>,
    scope: &'a Scope<'a>,
    key: K,
    /// The entry, near as long as the scope lasts. Nobody else uses it as long as the map is
    /// borrowed.
    at: At<K, V>,
}

/// The place of a key that has no value.
pub struct VacantBTreeEntry<'a, K: Ord + Send + 'static, V: Send + 'static> {
    map: &'a mut FarBTreeMap<K, V>,
    scope: &'a Scope<'a>,
    key: K,
}

impl<K: Ord + Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Returns the place of a key, to insert or change its entry.
    ///
    /// ```
    /// # use farfield::{FarBTreeMap, Heap};
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// # let scope = heap.enter();
    /// let mut counts = FarBTreeMap::new();
    /// for word in ["near", "far", "near"] {
    ///     *counts.entry(&scope, word)?.or_insert(0)? += 1;
    /// }
    /// assert_eq!(counts.get(&scope, "near")?, Some(&2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn entry<'a>(&'a mut self, scope: &'a Scope<'a>, key: K) -> Result<BTreeEntry<'a, K, V>, AllocError<K>> {
        match self.locate(scope, &key, AccessMode::Write) {
            Ok(Some(at)) => Ok(BTreeEntry::Occupied(OccupiedBTreeEntry { map: self, scope, key, at })),
            Ok(None) => Ok(BTreeEntry::Vacant(VacantBTreeEntry { map: self, scope, key })),
            Err(error) => Err(AllocError { error, value: key }),
        }
    }
}

impl<'a, K: Ord + Send + 'static, V: Send + 'static> BTreeEntry<'a, K, V> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        match self {
            BTreeEntry::Occupied(entry) => entry.key(),
            BTreeEntry::Vacant(entry) => entry.key(),
        }
    }

    /// Returns the value of the key. Inserts `value` if there is none.
    pub fn or_insert(self, value: V) -> Result<&'a mut V, AllocError<(K, V)>> {
        self.or_insert_with(|| value)
    }

    /// Returns the value of the key. Inserts the result of `make` if there is none.
    pub fn or_insert_with(self, make: impl FnOnce() -> V) -> Result<&'a mut V, AllocError<(K, V)>> {
        self.or_insert_with_key(|_| make())
    }

    /// Returns the value of the key. Inserts the result of `make`, which is given the key, if there
    /// is none.
    pub fn or_insert_with_key(self, make: impl FnOnce(&K) -> V) -> Result<&'a mut V, AllocError<(K, V)>> {
        match self {
            BTreeEntry::Occupied(entry) => Ok(entry.into_mut()),
            BTreeEntry::Vacant(entry) => {
                let value = make(&entry.key);
                entry.insert(value)
            }
        }
    }

    /// Returns the value of the key. Inserts the default value if there is none.
    pub fn or_default(self) -> Result<&'a mut V, AllocError<(K, V)>>
    where
        V: Default,
    {
        self.or_insert_with(V::default)
    }

    /// Changes the value if there is one.
    pub fn and_modify(mut self, modify: impl FnOnce(&mut V)) -> Self {
        if let BTreeEntry::Occupied(entry) = &mut self {
            modify(entry.get_mut());
        }
        self
    }
}

impl<'a, K: Ord + Send + 'static, V: Send + 'static> OccupiedBTreeEntry<'a, K, V> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        &self.key
    }

    /// Returns the value.
    pub fn get(&self) -> &V {
        // SAFETY: as in `FarBTreeMap::get_key_value`: the entry has the map and borrows the scope.
        unsafe { &*self.at.0.value(self.at.1) }
    }

    /// Returns the value, to be changed.
    pub fn get_mut(&mut self) -> &mut V {
        // SAFETY: as in `FarBTreeMap::get_mut`.
        unsafe { &mut *self.at.0.value(self.at.1) }
    }

    /// Returns the value, to be changed, for as long as the scope lasts.
    pub fn into_mut(self) -> &'a mut V {
        // SAFETY: as in `FarBTreeMap::get_mut`; the map stays borrowed.
        unsafe { &mut *self.at.0.value(self.at.1) }
    }

    /// Replaces the value. Returns the old one.
    pub fn insert(&mut self, value: V) -> V {
        core::mem::replace(self.get_mut(), value)
    }

    /// Removes the entry. Returns its value.
    pub fn remove(self) -> Result<V, FarError> {
        Ok(self.remove_entry()?.1)
    }

    /// Removes the entry. Returns its key and value.
    pub fn remove_entry(self) -> Result<(K, V), FarError> {
        let removed = self.map.remove_entry(self.scope, &self.key)?;
        Ok(removed.unwrap_or_else(|| unreachable!("the key has a value")))
    }
}

impl<'a, K: Ord + Send + 'static, V: Send + 'static> VacantBTreeEntry<'a, K, V> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        &self.key
    }

    /// Gives the key back.
    pub fn into_key(self) -> K {
        self.key
    }

    /// Inserts a value for the key. Returns it, to be changed.
    pub fn insert(self, value: V) -> Result<&'a mut V, AllocError<(K, V)>> {
        let (node, index) = self.map.put_new(self.scope, self.key, value)?;
        self.scope.mark_used();
        // SAFETY: as in `FarBTreeMap::get_mut`: the node is near since the scope began, and the map stays borrowed.
        Ok(unsafe { &mut *node.value(index) })
    }
}

impl<K: Ord + Send + 'static, V: Send + 'static> core::fmt::Debug for BTreeEntry<'_, K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            BTreeEntry::Occupied(_) => "BTreeEntry(occupied)",
            BTreeEntry::Vacant(_) => "BTreeEntry(vacant)",
        })
    }
}
