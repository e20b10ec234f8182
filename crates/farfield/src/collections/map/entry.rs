//! Entries that are inserted or changed in place, with exclusive access to the map.

use super::FarMap;
use super::item::{EntryLayout, Item, Source};
use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, Scope};
use core::hash::{BuildHasher, Hash};

/// The place of a key in a [`FarMap`], with or without a value. Made by [`FarMap::entry`].
pub enum Entry<'a, K: Item + ?Sized, V: Item + ?Sized, S, A> {
    /// The key has a value.
    Occupied(OccupiedEntry<'a, K, V, S, A>),
    /// The key has no value.
    Vacant(VacantEntry<'a, K, V, S, A>),
}

/// The place of a key that has a value.
pub struct OccupiedEntry<'a, K: Item + ?Sized, V: Item + ?Sized, S, A> {
    map: &'a FarMap<K, V, S>,
    scope: &'a Scope<'a>,
    key: A,
    value: &'a mut V,
}

/// The place of a key that has no value.
pub struct VacantEntry<'a, K: Item + ?Sized, V: Item + ?Sized, S, A> {
    map: &'a FarMap<K, V, S>,
    scope: &'a Scope<'a>,
    key: A,
}

impl<K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> FarMap<K, V, S> {
    /// Returns the place of a key. Needs exclusive access to the map; with many threads, use
    /// [`FarMap::update`].
    pub fn entry<'a, A: Source<K>>(
        &'a mut self,
        scope: &'a Scope<'a>,
        key: A,
    ) -> Result<Entry<'a, K, V, S, A>, AllocError<A>> {
        let found = match self.locate::<K>(scope, key.borrow(), AccessMode::Write) {
            Ok(found) => found,
            Err(error) => return Err(AllocError { error, value: key }),
        };
        // From here on, only the entry uses the map.
        let map = &*self;
        let Some(at) = found else { return Ok(Entry::Vacant(VacantEntry { map, scope, key })) };
        // SAFETY: as in `get_mut`; the map is borrowed by the entry, which uses it only when it has given up the value.
        let value = unsafe { EntryLayout::<K, V>::value_mut(at) };
        Ok(Entry::Occupied(OccupiedEntry { map, scope, key, value }))
    }
}

impl<'a, K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher, A: Source<K>> Entry<'a, K, V, S, A> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        match self {
            Entry::Occupied(entry) => entry.key(),
            Entry::Vacant(entry) => entry.key(),
        }
    }

    /// Returns the value of the key. Inserts `value` if there is none.
    pub fn or_insert<B: Source<V>>(self, value: B) -> Result<&'a mut V, AllocError<(A, B)>> {
        self.or_insert_with(|| value)
    }

    /// Returns the value of the key. Inserts the result of `make` if there is none.
    pub fn or_insert_with<B: Source<V>>(self, make: impl FnOnce() -> B) -> Result<&'a mut V, AllocError<(A, B)>> {
        self.or_insert_with_key(|_| make())
    }

    /// Returns the value of the key. Inserts the result of `make`, which is given the key, if there
    /// is none.
    pub fn or_insert_with_key<B: Source<V>>(self, make: impl FnOnce(&K) -> B) -> Result<&'a mut V, AllocError<(A, B)>> {
        match self {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let value = make(entry.key());
                entry.insert(value)
            }
        }
    }

    /// Returns the value of the key. Inserts the default value if there is none.
    pub fn or_default(self) -> Result<&'a mut V, AllocError<(A, V)>>
    where
        V: Default + Source<V>,
    {
        self.or_insert_with(V::default)
    }

    /// Changes the value if there is one.
    pub fn and_modify(mut self, modify: impl FnOnce(&mut V)) -> Self {
        if let Entry::Occupied(entry) = &mut self {
            modify(entry.get_mut());
        }
        self
    }
}

impl<'a, K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher, A: Source<K>> OccupiedEntry<'a, K, V, S, A> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        self.key.borrow()
    }

    /// Returns the value.
    pub fn get(&self) -> &V {
        self.value
    }

    /// Returns the value, to be changed.
    pub fn get_mut(&mut self) -> &mut V {
        self.value
    }

    /// Returns the value, to be changed, for as long as the scope lasts.
    pub fn into_mut(self) -> &'a mut V {
        self.value
    }

    /// Replaces the value. Returns the old one.
    pub fn insert<B: Source<V>>(self, value: B) -> Result<Option<&'a V>, AllocError<(A, B)>> {
        self.map.insert(self.scope, self.key, value)
    }

    /// Removes the entry. Returns its value.
    pub fn remove(self) -> Result<Option<&'a V>, FarError> {
        self.map.remove::<K>(self.scope, self.key.borrow())
    }
}

impl<'a, K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher, A: Source<K>> VacantEntry<'a, K, V, S, A> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        self.key.borrow()
    }

    /// Gives the key back.
    pub fn into_key(self) -> A {
        self.key
    }

    /// Inserts a value for the key. Returns it, to be changed.
    pub fn insert<B: Source<V>>(self, value: B) -> Result<&'a mut V, AllocError<(A, B)>> {
        let put = self.map.put(self.scope, self.key, value, |_| true)?;
        let Some(at) = put.new.and_then(|slot| slot.address_now(self.scope)) else {
            unreachable!("put in a moment ago, and near as long as the scope lasts")
        };
        self.scope.mark_used();
        // SAFETY: as in `FarMap::get_mut`: the entry had the map for itself, and so has the
        // reference. The page is dirty: it was made so with the object, and stays so as long as it
        // is near.
        Ok(unsafe { EntryLayout::<K, V>::value_mut(at) })
    }
}
