//! `FarMap`: a hash map for many threads, with entries that are near or far.
//!
//! Each entry is one far object, key and value together. An index (`index`, `buckets`) leads from
//! hashes to the slots of entries. An entry's value is replaced as a whole: a new object, one store
//! in the index, and the old object is retired until no scope can look at it (epoch-based
//! reclamation). So readers take no lock and write nothing, and a reference shows the same value as
//! long as its scope lasts.

mod buckets;
mod entry;
mod fetch;
mod hints;
mod index;
mod item;
mod many;
#[cfg(feature = "serde")]
mod snapshot;
mod teardown;
mod walk;

pub use buckets::Index;
pub use entry::{Entry, OccupiedEntry, VacantEntry};
pub use item::{Item, Source};
#[cfg(feature = "serde")]
pub use snapshot::Restored;
pub use walk::Walk;

use crate::Heap;
use crate::error::{AllocError, BuildError, FarError};
use crate::heap::{AccessMode, HeapInner, HeapRef, Panics, RetiredObjects, Scope, SlotWord};
use core::borrow::Borrow;
use core::hash::{BuildHasher, Hash};
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicI64, Ordering};
use index::{IndexSearch, IndexTable};
pub(crate) use item::EntryLayout;
use std::hash::RandomState;
use teardown::{MapTeardown, drop_entry};

/// A hash map whose entries are near or far, shared by threads.
///
/// Keys and values are any `T: Send + Sync + 'static`, or `[u8]` or `str` of any length:
/// `FarMap<[u8], [u8]>` holds binary keys and values. All but a few methods take `&self`: threads
/// look up, insert and remove at the same time, and readers take no lock. A reference from a scope
/// shows the value as it was when it was looked up, also if it is replaced or removed meanwhile.
/// The destructor of such a value runs when no scope can see it any more, at the latest when the
/// map is dropped.
///
/// ```
/// use farfield::{Change, FarMap, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let map: FarMap<str, u64> = FarMap::new(&heap)?;
/// let scope = heap.enter();
/// map.insert(&scope, "one", 1)?;
/// assert_eq!(map.get(&scope, "one")?, Some(&1));
/// map.update(&scope, "one", |old| Change::Put(old.copied().unwrap_or(0) + 1))?;
/// assert_eq!(map.remove(&scope, "one")?, Some(&2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A reference ends with its scope, and with the map:
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// # let map: farfield::FarMap<u32, u32> = farfield::FarMap::new(&heap).unwrap();
/// let scope = heap.enter();
/// let seven = map.get(&scope, &7).unwrap();
/// drop(map); // error: cannot move out of `map` because it is borrowed
/// println!("{seven:?}");
/// ```
pub struct FarMap<K: Item + ?Sized, V: Item + ?Sized, S = RandomState> {
    body: ManuallyDrop<Body<K, V>>,
    len: Counter,
    hasher: S,
}

/// The part of a map that may be dropped later than the map itself.
struct Body<K: Item + ?Sized, V: Item + ?Sized> {
    table: IndexTable,
    retired: RetiredObjects,
    heap_ref: HeapRef,
    owns: PhantomData<(Box<K>, Box<V>)>,
}

/// The decision of the closure that is passed to [`FarMap::update`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change<B> {
    /// Leaves the entry as it is.
    Keep,
    /// Puts this value in.
    Put(B),
    /// Removes the entry.
    Remove,
}

/// Result of putting an entry in.
struct InsertOutcome<'a, V: ?Sized> {
    /// The value that was there.
    old: Option<&'a V>,
    /// The slot of the new entry, if it was put in.
    new: Option<SlotWord>,
}

/// Number of entries, on a cache line of its own: writers change it, and readers of the fields
/// beside it must not be slowed down.
///
/// An entry can be taken out before the thread that has put it in has counted it, so this is below
/// zero at times.
#[repr(align(128))]
struct Counter(AtomicI64);

impl Counter {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed).max(0).unsigned_abs()
    }

    /// Counts one more, and returns how many there are.
    fn add(&self) -> u64 {
        (self.0.fetch_add(1, Ordering::Relaxed) + 1).max(0).unsigned_abs()
    }

    fn subtract(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A builder for a [`FarMap`]. Made by [`FarMap::builder`].
pub struct FarMapBuilder<K: ?Sized, V: ?Sized, S = RandomState> {
    entries: u64,
    index: Index,
    hasher: S,
    makes: PhantomData<fn(&K, &V)>,
}

impl<K: Item + ?Sized, V: Item + ?Sized, S> FarMapBuilder<K, V, S> {
    /// Makes room for this many entries from the beginning. The map grows beyond that anyway, a
    /// bucket at a time.
    pub fn capacity(mut self, entries: u64) -> Self {
        self.entries = entries;
        self
    }

    /// Sets where the index is. Default: near.
    pub fn index(mut self, index: Index) -> Self {
        self.index = index;
        self
    }

    /// Replaces the hash function.
    pub fn hasher<H: BuildHasher>(self, hasher: H) -> FarMapBuilder<K, V, H> {
        FarMapBuilder { entries: self.entries, index: self.index, hasher, makes: PhantomData }
    }

    /// Makes the map in this heap.
    pub fn build(self, heap: &Heap) -> Result<FarMap<K, V, S>, BuildError> {
        let heap_ref = HeapRef::of(&heap.enter());
        let table = IndexTable::new(heap_ref.core(), self.index)?;
        let body = ManuallyDrop::new(Body { table, retired: RetiredObjects::default(), heap_ref, owns: PhantomData });
        let map = FarMap { body, len: Counter(AtomicI64::new(0)), hasher: self.hasher };
        map.body.table.start(&mut heap.enter(), self.entries)?;
        Ok(map)
    }
}

impl<K: ?Sized, V: ?Sized, S> core::fmt::Debug for FarMapBuilder<K, V, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarMapBuilder({} entries, {:?})", self.entries, self.index)
    }
}

impl<K: Item + ?Sized, V: Item + ?Sized> FarMap<K, V> {
    /// Makes an empty map in this heap.
    pub fn new(heap: &Heap) -> Result<FarMap<K, V>, BuildError> {
        Self::builder().build(heap)
    }

    /// Returns a builder, to make a map with other settings than [`FarMap::new`].
    pub fn builder() -> FarMapBuilder<K, V> {
        FarMapBuilder { entries: 0, index: Index::Near, hasher: RandomState::new(), makes: PhantomData }
    }
}

impl<K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> FarMap<K, V, S> {
    /// Returns the number of entries. While others change the map, this is the number at some
    /// moment.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Checks whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes that the index uses, in buckets of 64 bytes.
    pub fn index_bytes(&self) -> u64 {
        let (first, more) = self.body.table.bucket_counts();
        (u64::from(first) + u64::from(more)) * 64
    }

    fn hash<Q: Hash + ?Sized>(&self, key: &Q) -> u32 {
        let hash = self.hasher.hash_one(key);
        // Both halves, for hash functions that leave one of them empty.
        (hash ^ hash >> 32) as u32
    }

    /// Checks whether this is the key of the entry at `at`.
    ///
    /// # Safety
    /// There is an entry, and its map exists.
    #[inline]
    unsafe fn is_key<Q: Eq + ?Sized>(key: &Q, at: *const u8) -> bool
    where
        K: Borrow<Q>,
    {
        // SAFETY: passed on to the caller; keys never change.
        unsafe { EntryLayout::<K, V>::key(at) }.borrow() == key
    }

    /// Returns the value of a key, if the map has the key.
    #[inline]
    pub fn get<'a, Q: Hash + Eq + ?Sized>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
    {
        // SAFETY: as in `get_key_value`.
        Ok(self.locate(scope, key, AccessMode::Read)?.map(|at| unsafe { EntryLayout::<K, V>::value(at) }))
    }

    /// Returns the key in the map and its value, if the map has the key.
    pub fn get_key_value<'a, Q>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<(&'a K, &'a V)>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let found = self.locate(scope, key, AccessMode::Read)?;
        // SAFETY: an entry of this map, near until the scope ends. It was in the map when the scope had begun, so it is
        // freed only after the scope, or with the map, which is borrowed. Nobody changes it: that takes `&mut self`.
        Ok(found.map(|at| unsafe { (EntryLayout::<K, V>::key(at), EntryLayout::<K, V>::value(at)) }))
    }

    /// Checks whether the map has the key.
    pub fn contains_key<Q: Hash + Eq + ?Sized>(&self, scope: &Scope<'_>, key: &Q) -> Result<bool, FarError>
    where
        K: Borrow<Q>,
    {
        Ok(self.locate(scope, key, AccessMode::Read)?.is_some())
    }

    /// Returns the value of a key, to be changed, if the map has the key.
    pub fn get_mut<'a, Q>(&'a mut self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a mut V>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let found = self.locate(scope, key, AccessMode::Write)?;
        // SAFETY: as in `get_key_value`, and `&mut self` makes it exclusive.
        Ok(found.map(|at| unsafe { EntryLayout::<K, V>::value_mut(at) }))
    }

    /// Returns the address of an entry, which is valid as long as the scope lasts.
    #[inline]
    fn locate<Q>(&self, scope: &Scope<'_>, key: &Q, mode: AccessMode) -> Result<Option<*mut u8>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.body.heap_ref.check(scope)?;
        self.locate_hash(scope, self.hash(key), key, mode)
    }

    /// Returns the address of an entry, by the hash of its key. The scope is one of this heap.
    #[inline]
    fn locate_hash<Q>(
        &self,
        scope: &Scope<'_>,
        hash: u32,
        key: &Q,
        mode: AccessMode,
    ) -> Result<Option<*mut u8>, FarError>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let _brief = scope.begin_transient();
        let found = scope.with_room(|| {
            // SAFETY: the index names entries of this map.
            self.body.table.find(scope, hash, mode, |at, _| unsafe { Self::is_key(key, at) })
        })?;
        if found.is_some() {
            scope.mark_used();
        }
        Ok(found.map(|(_, at)| at))
    }

    /// Puts an entry in. Returns the value that it replaces.
    pub fn insert<'a, A: Source<K>, B: Source<V>>(
        &'a self,
        scope: &'a Scope<'_>,
        key: A,
        value: B,
    ) -> Result<Option<&'a V>, AllocError<(A, B)>> {
        self.put(scope, key, value, |_| true).map(|put| put.old)
    }

    /// Puts an entry in if the map does not have the key. Otherwise changes nothing and returns the
    /// value that is there.
    pub fn insert_new<'a, A: Source<K>, B: Source<V>>(
        &'a self,
        scope: &'a Scope<'_>,
        key: A,
        value: B,
    ) -> Result<Option<&'a V>, AllocError<(A, B)>> {
        self.put(scope, key, value, |old| old.is_none()).map(|put| put.old)
    }

    /// Puts an entry in if `when` accepts the value that is there now.
    fn put<'a, A: Source<K>, B: Source<V>>(
        &'a self,
        scope: &'a Scope<'_>,
        key: A,
        value: B,
        when: impl Fn(Option<&V>) -> bool,
    ) -> Result<InsertOutcome<'a, V>, AllocError<(A, B)>> {
        let _brief = scope.begin_transient();
        let hash = self.hash::<K>(key.borrow());
        let mut search = IndexSearch::default();
        let result = self.body.heap_ref.check(scope).and_then(|()| {
            scope.with_room(|| {
                loop {
                    self.search(scope, hash, &mut search, key.borrow())?;
                    // SAFETY: as in `get_key_value`.
                    if !when(search.found.map(|(_, at)| unsafe { EntryLayout::<K, V>::value(at) })) {
                        return Ok(None);
                    }
                    if let Some(new) = self.replace(scope, hash, &mut search, &key, &value)? {
                        return Ok(Some(new));
                    }
                }
            })
        });
        self.body.table.finish(&mut search);
        match result {
            Ok(new) => {
                if new.is_some() {
                    key.placed();
                    value.placed();
                }
                Ok(InsertOutcome { old: self.changed(scope, &search, new.is_some(), new.is_some()), new })
            }
            Err(error) => Err(AllocError { error, value: (key, value) }),
        }
    }

    /// Looks at an entry and changes it, atomically. `change` is called with the value that is
    /// there. It is called again if another thread changes the entry meanwhile, and its last
    /// decision is carried out. Returns the value that was there.
    pub fn update<'a, A: Source<K>, B: Source<V>>(
        &'a self,
        scope: &'a Scope<'_>,
        key: A,
        mut change: impl FnMut(Option<&V>) -> Change<B>,
    ) -> Result<Option<&'a V>, AllocError<A>> {
        let _brief = scope.begin_transient();
        let hash = self.hash::<K>(key.borrow());
        let mut search = IndexSearch::default();
        let mut step = || {
            loop {
                self.search(scope, hash, &mut search, key.borrow())?;
                // SAFETY: as in `get_key_value`.
                let done = match change(search.found.map(|(_, at)| unsafe { EntryLayout::<K, V>::value(at) })) {
                    Change::Keep => return Ok((false, false)),
                    Change::Remove => self.body.table.exchange(scope, hash, &mut search, None)?,
                    Change::Put(value) => {
                        let done = self.replace(scope, hash, &mut search, &key, &value)?.is_some();
                        if done {
                            value.placed();
                            return Ok((true, true));
                        }
                        false
                    }
                };
                if done {
                    return Ok((true, false));
                }
            }
        };
        let result = self.body.heap_ref.check(scope).and_then(|()| scope.with_room(&mut step));
        self.body.table.finish(&mut search);
        match result {
            Ok((done, put)) => {
                if put {
                    key.placed();
                }
                Ok(self.changed(scope, &search, done, put))
            }
            Err(error) => Err(AllocError { error, value: key }),
        }
    }

    fn search(&self, scope: &Scope<'_>, hash: u32, search: &mut IndexSearch, key: &K) -> Result<(), FarError> {
        // SAFETY: the index names entries of this map.
        self.body.table.search(scope, hash, search, |at| unsafe { Self::is_key(key, at) })
    }

    /// Makes an entry and puts it in place of the one that the search found. `None` if that is not
    /// there any more. The new entry is a copy of key and value: if it is in the map, the caller
    /// must call `placed` on both.
    fn replace(
        &self,
        scope: &Scope<'_>,
        hash: u32,
        search: &mut IndexSearch,
        key: &impl Source<K>,
        value: &impl Source<V>,
    ) -> Result<Option<SlotWord>, FarError> {
        let (slot, at) = SlotWord::make(scope, EntryLayout::<K, V>::layout_of(key.borrow(), value.borrow())?)?;
        // SAFETY: room for an entry of this layout, which nobody else knows.
        unsafe { EntryLayout::<K, V>::write(at, key, value) };
        let result = self.body.table.exchange(scope, hash, search, Some(slot));
        if result != Ok(true) {
            // SAFETY: made above, and in no index.
            unsafe { slot.free(scope.core) };
        }
        result.map(|done| done.then_some(slot))
    }

    /// Completes a change, if `done`: counts entries, retires an entry that was replaced or
    /// removed, and grows the table. Returns the value that the search found.
    fn changed<'a>(&'a self, scope: &'a Scope<'_>, search: &IndexSearch, done: bool, put: bool) -> Option<&'a V> {
        let Some((old, at)) = search.found else {
            if put {
                self.body.table.grow(scope, self.len.add());
            }
            return None;
        };
        scope.mark_used();
        if done {
            if !put {
                self.len.subtract();
            }
            // SAFETY: an entry of this map; we took it out of the index, so we retire it, and nobody else does.
            unsafe { self.retire(scope.core, old, EntryLayout::<K, V>::bytes(at)) };
        }
        // SAFETY: as in `get_key_value`: retired now, it is freed after this scope, or with the map.
        Some(unsafe { EntryLayout::<K, V>::value(at) })
    }

    /// # Safety
    /// The entry was in this map's index, and the caller has taken it out.
    unsafe fn retire(&self, core: &HeapInner, slot: SlotWord, bytes: usize) {
        let mut panics = Panics::default();
        for over in self.body.retired.push(core, slot, bytes) {
            // SAFETY: it was an entry of this map, and no scope can see it any more.
            panics.catch(|| unsafe { drop_entry::<K, V>(core, over) });
        }
        panics.resume();
    }

    /// Removes an entry. Returns its value.
    pub fn remove<'a, Q>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.remove_if(scope, key, |_| true)
    }

    /// Removes an entry if `when` accepts its value. Returns the value that is or was there.
    pub fn remove_if<'a, Q>(
        &'a self,
        scope: &'a Scope<'_>,
        key: &Q,
        when: impl Fn(&V) -> bool,
    ) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.body.heap_ref.check(scope)?;
        let _brief = scope.begin_transient();
        let hash = self.hash(key);
        let mut search = IndexSearch::default();
        let result = scope.with_room(|| {
            loop {
                // SAFETY: the index names entries of this map.
                self.body.table.search(scope, hash, &mut search, |at| unsafe { Self::is_key(key, at) })?;
                // SAFETY: as in `get_key_value`.
                if !search.found.is_some_and(|(_, at)| when(unsafe { EntryLayout::<K, V>::value(at) })) {
                    return Ok(false);
                }
                if self.body.table.exchange(scope, hash, &mut search, None)? {
                    return Ok(true);
                }
            }
        });
        self.body.table.finish(&mut search);
        let done = result?;
        Ok(self.changed(scope, &search, done, false))
    }

    /// Removes all entries that are in the map from the beginning to the end of this call. Renews
    /// the scope on the way.
    pub fn clear(&self, scope: &mut Scope<'_>) -> Result<(), FarError> {
        let mut walk = self.walk();
        while let Some(entries) = walk.next(scope)? {
            for (key, _) in entries {
                self.remove::<K>(scope, key)?;
            }
            scope.renew();
        }
        Ok(())
    }

    /// Keeps only the entries that `keep` accepts, of those that are in the map from the beginning
    /// to the end of this call. Renews the scope on the way.
    pub fn retain(&self, scope: &mut Scope<'_>, mut keep: impl FnMut(&K, &V) -> bool) -> Result<(), FarError> {
        let mut walk = self.walk();
        while let Some(entries) = walk.next(scope)? {
            for (key, value) in entries {
                if !keep(key, value) {
                    self.remove_if::<K>(scope, key, |now| core::ptr::eq(now, value))?;
                }
            }
            scope.renew();
        }
        Ok(())
    }

    /// Starts a walk over all entries, a bucket at a time, in no order.
    pub fn walk(&self) -> Walk<'_, K, V, S> {
        Walk::new(self, 0)
    }

    /// Starts a walk at a position of that order, which goes on to its end: to look at a part of a
    /// large map.
    pub fn walk_from(&self, position: u32) -> Walk<'_, K, V, S> {
        Walk::new(self, position)
    }

    /// Visits all entries, and renews the scope between buckets. Entries that are added or removed
    /// meanwhile may be visited or not.
    pub fn for_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&K, &V)) -> Result<(), FarError> {
        let mut walk = self.walk();
        while let Some(entries) = walk.next(scope)? {
            entries.into_iter().for_each(|(key, value)| visit(key, value));
            scope.renew();
        }
        Ok(())
    }
}

impl<K: Item + ?Sized, V: Item + ?Sized, S> Drop for FarMap<K, V, S> {
    fn drop(&mut self) {
        // SAFETY: not used afterwards.
        let body = unsafe { ManuallyDrop::take(&mut self.body) };
        MapTeardown::drop_now(body, self.len.get());
    }
}

impl<K: Item + ?Sized, V: Item + ?Sized, S> core::fmt::Debug for FarMap<K, V, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarMap({} entries)", self.len.get())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a number of entries beyond all bounds, for which the index would grow.
    use super::*;

    #[test]
    fn an_entry_can_be_removed_before_it_is_counted() {
        let counter = Counter(AtomicI64::new(0));
        counter.subtract();
        assert_eq!((counter.get(), counter.add(), counter.get(), counter.add()), (0, 0, 0, 1));
    }
}
