//! `FarBTreeMap`: a map in the order of its keys.
//!
//! A B-tree of far nodes of about a page (`node`), changed from the root down (`tree`). Only the
//! root's slot is near.

mod entry;
mod node;
mod range;
#[cfg(feature = "serde")]
mod snapshot;
mod teardown;
mod tree;
mod view;
mod walk;
mod whole;

pub use entry::{BTreeEntry, OccupiedBTreeEntry, VacantBTreeEntry};
pub use range::{RangeIter, RangeIterMut};

use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, HeapRef, Scope, SlotCell};
use core::borrow::Borrow;
use core::marker::PhantomData;
pub(crate) use node::NodeLayout;

use node::Node;
use teardown::BTreeTeardown;
use tree::{NodePosition, PathIndices};
use walk::BTreePath;

/// An ordered map, the far counterpart of `BTreeMap`: its entries are near or far.
///
/// Nodes have about a page. Large values (from some hundred bytes on) are better kept in a
/// [`FarBox`](crate::FarBox). Then nodes have more keys, the tree is less deep, and a search brings
/// keys near and not values.
///
/// ```
/// use farfield::{FarBTreeMap, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let scope = heap.enter();
/// let mut map = FarBTreeMap::new();
/// for number in 0..1000u64 {
///     map.insert(&scope, number, number * number)?;
/// }
/// assert_eq!(map.get(&scope, &7)?, Some(&49));
/// let three = map.range(&scope, 10..)?.take(3).map(|entry| entry.map(|(key, _)| *key));
/// assert_eq!(three.collect::<Result<Vec<_>, _>>()?, [10, 11, 12]);
/// *map.entry(&scope, 7)?.or_default()? += 1;
/// assert_eq!(map.get(&scope, &7)?, Some(&50));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Entries that an iterator has returned prevent changes of the map, and end with their scope:
///
/// ```compile_fail,E0502
/// # let heap = farfield::Heap::builder().build().unwrap();
/// # let mut map = farfield::FarBTreeMap::<u32, u32>::new();
/// let scope = heap.enter();
/// let first = map.iter(&scope).unwrap().next();
/// map.remove(&scope, &7).unwrap(); // error: cannot borrow `map` as mutable
/// println!("{first:?}");
/// ```
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// # let mut map = farfield::FarBTreeMap::<u32, u32>::new();
/// let scope = heap.enter();
/// let first = map.range_mut(&scope, 7..).unwrap().next();
/// drop(scope); // error: cannot move out of `scope` because it is borrowed
/// println!("{first:?}");
/// ```
pub struct FarBTreeMap<K: Send + 'static, V: Send + 'static> {
    root: SlotCell,
    /// Levels below the root.
    height: u32,
    len: usize,
    heap_ref: Option<HeapRef>,
    owns: PhantomData<(K, V)>,
}

/// An entry: its node, near as long as a scope lasts, and its index there.
type At<K, V> = (Node<K, V>, usize);

impl<K: Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Makes an empty map. It belongs to the heap of its first entry.
    pub const fn new() -> FarBTreeMap<K, V> {
        FarBTreeMap { root: SlotCell::nothing(), height: 0, len: 0, heap_ref: None, owns: PhantomData }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Drops all entries.
    pub fn clear(&mut self) {
        *self = FarBTreeMap::new();
    }

    fn check(&self, scope: &Scope<'_>) -> Result<(), FarError> {
        self.heap_ref.as_ref().map_or(Ok(()), |heap_ref| heap_ref.check(scope))
    }

    /// Returns the first entry.
    pub fn first_key_value<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<(&'a K, &'a V)>, FarError> {
        let path = self.end_path(scope, false)?;
        // SAFETY: as in `get_key_value`.
        Ok(path
            .entry(scope, AccessMode::Read)?
            .map(|(node, index)| unsafe { (&*node.key(index), &*node.value(index)) }))
    }

    /// Returns the last entry.
    pub fn last_key_value<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<(&'a K, &'a V)>, FarError> {
        let path = self.end_path(scope, true)?;
        // SAFETY: as in `get_key_value`.
        Ok(path
            .entry(scope, AccessMode::Read)?
            .map(|(node, index)| unsafe { (&*node.key(index), &*node.value(index)) }))
    }

    fn end_path(&self, scope: &Scope<'_>, last: bool) -> Result<BTreePath, FarError> {
        self.check(scope)?;
        let _brief = scope.begin_transient();
        scope.with_room(|| BTreePath::end::<K, V>(self.root.load(), self.height, scope, last))
    }
}

impl<K: Ord + Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Finds a key. Returns its node, near as long as the scope lasts, and its index there.
    fn locate<Q>(&self, scope: &Scope<'_>, key: &Q, mode: AccessMode) -> Result<Option<At<K, V>>, FarError>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        self.check(scope)?;
        if self.root.load().is_none() {
            return Ok(None);
        }
        let _brief = scope.begin_transient();
        let found = scope.with_room(|| {
            let mut node = Node::load(scope, &self.root, self.height, mode)?;
            loop {
                match node.find(key) {
                    NodePosition::Entry(index) => return Ok(Some((node, index))),
                    NodePosition::Gap(_) if node.height == 0 => return Ok(None),
                    NodePosition::Gap(index) => node = Node::load(scope, node.child(index), node.height - 1, mode)?,
                }
            }
        })?;
        if found.is_some() {
            scope.mark_used();
        }
        Ok(found)
    }

    /// Returns the place of a key in the tree.
    fn place_of<Q: Ord + ?Sized>(&self, scope: &Scope<'_>, key: &Q) -> Result<Option<PathIndices>, FarError>
    where
        K: Borrow<Q>,
    {
        self.check(scope)?;
        if self.root.load().is_none() {
            return Ok(None);
        }
        let _brief = scope.begin_transient();
        scope.with_room(|| {
            let mut node = Node::<K, V>::load(scope, &self.root, self.height, AccessMode::Write)?;
            let mut numbers = Vec::with_capacity(self.height as usize + 1);
            loop {
                match node.find(key) {
                    NodePosition::Entry(index) => {
                        numbers.push(index);
                        return Ok(Some(PathIndices(numbers)));
                    }
                    NodePosition::Gap(_) if node.height == 0 => return Ok(None),
                    NodePosition::Gap(index) => {
                        numbers.push(index);
                        node = Node::load(scope, node.child(index), node.height - 1, AccessMode::Write)?;
                    }
                }
            }
        })
    }

    /// Returns the value of a key, if the map has the key.
    pub fn get<'a, Q: Ord + ?Sized>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
    {
        Ok(self.get_key_value(scope, key)?.map(|(_, value)| value))
    }

    /// Returns the value like [`FarBTreeMap::get`], for a task: other tasks run while nodes are
    /// fetched.
    pub async fn fetch<'a, Q: Ord + ?Sized>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
    {
        scope.retry(|| self.get(scope, key)).await
    }

    /// Returns the key in the map and its value, if the map has the key.
    pub fn get_key_value<'a, Q>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<(&'a K, &'a V)>, FarError>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let found = self.locate(scope, key, AccessMode::Read)?;
        // SAFETY:
        // - initialised: the entry exists;
        // - alive: its node became near after the scope began, so it keeps its frame until the
        //   scope ends, and `'a` ends before that; it also ends before the map is changed, which
        //   takes `&mut self`;
        // - shared: a writer has `&mut self`, or writes through interior mutability, which the
        //   types allow.
        Ok(found.map(|(node, index)| unsafe { (&*node.key(index), &*node.value(index)) }))
    }

    /// Returns the value of a key, to be changed, if the map has the key.
    pub fn get_mut<'a, Q>(&'a mut self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a mut V>, FarError>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let found = self.locate(scope, key, AccessMode::Write)?;
        // SAFETY: as in `get_key_value`, and `&mut self` makes it exclusive.
        Ok(found.map(|(node, index)| unsafe { &mut *node.value(index) }))
    }

    /// Returns the value like [`FarBTreeMap::get_mut`], for a task: other tasks run while nodes are
    /// fetched.
    pub async fn fetch_mut<'a, Q>(&'a mut self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a mut V>, FarError>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let found = scope.retry(|| self.locate(scope, key, AccessMode::Write)).await?;
        // SAFETY: as in `get_mut`; `retry` has marked the scope as used.
        Ok(found.map(|(node, index)| unsafe { &mut *node.value(index) }))
    }

    /// Checks whether the map has the key.
    pub fn contains_key<Q: Ord + ?Sized>(&self, scope: &Scope<'_>, key: &Q) -> Result<bool, FarError>
    where
        K: Borrow<Q>,
    {
        Ok(self.locate(scope, key, AccessMode::Read)?.is_some())
    }

    /// Puts an entry in. Returns the value that it replaces.
    pub fn insert(&mut self, scope: &Scope<'_>, key: K, value: V) -> Result<Option<V>, AllocError<(K, V)>> {
        match self.locate(scope, &key, AccessMode::Write) {
            Err(error) => return Err(AllocError { error, value: (key, value) }),
            // SAFETY: as in `get_mut`.
            Ok(Some((node, index))) => return Ok(Some(unsafe { node.value(index).replace(value) })),
            Ok(None) => {}
        }
        self.put_new(scope, key, value).map(|_| None)
    }

    /// Puts an entry in whose key the map does not have. Returns its place.
    fn put_new(&mut self, scope: &Scope<'_>, key: K, value: V) -> Result<At<K, V>, AllocError<(K, V)>> {
        let _brief = scope.begin_transient();
        match scope.with_room(|| self.make_room(scope, &key)) {
            Ok((leaf, index)) => {
                // SAFETY: the leaf has room, and the tree is ours.
                unsafe { leaf.insert(index, (key, value), None, 1) };
                self.len += 1;
                Ok((leaf, index))
            }
            Err(error) => Err(AllocError { error, value: (key, value) }),
        }
    }

    /// Removes an entry. Returns its value.
    pub fn remove<Q: Ord + ?Sized>(&mut self, scope: &Scope<'_>, key: &Q) -> Result<Option<V>, FarError>
    where
        K: Borrow<Q>,
    {
        Ok(self.remove_entry(scope, key)?.map(|(_, value)| value))
    }

    /// Removes an entry. Returns its key and value.
    pub fn remove_entry<Q: Ord + ?Sized>(&mut self, scope: &Scope<'_>, key: &Q) -> Result<Option<(K, V)>, FarError>
    where
        K: Borrow<Q>,
    {
        let Some(mut place) = self.place_of(scope, key)? else { return Ok(None) };
        let _brief = scope.begin_transient();
        let entry = scope.with_room(|| self.take(scope, &mut place))?;
        self.len -= 1;
        Ok(Some(entry))
    }

    /// Removes the first entry and returns it, if there is one.
    pub fn pop_first(&mut self, scope: &Scope<'_>) -> Result<Option<(K, V)>, FarError> {
        self.pop(scope, false)
    }

    /// Removes the last entry and returns it, if there is one.
    pub fn pop_last(&mut self, scope: &Scope<'_>) -> Result<Option<(K, V)>, FarError> {
        self.pop(scope, true)
    }

    fn pop(&mut self, scope: &Scope<'_>, last: bool) -> Result<Option<(K, V)>, FarError> {
        self.check(scope)?;
        if self.is_empty() {
            return Ok(None);
        }
        let _brief = scope.begin_transient();
        let entry = scope.with_room(|| {
            let root = Node::load(scope, &self.root, self.height, AccessMode::Write)?;
            self.take_end(scope, root, last)
        })?;
        self.len -= 1;
        Ok(Some(entry))
    }
}

impl<K: Send + 'static, V: Send + 'static> Default for FarBTreeMap<K, V> {
    fn default() -> FarBTreeMap<K, V> {
        FarBTreeMap::new()
    }
}

impl<K: Send + 'static, V: Send + 'static> Drop for FarBTreeMap<K, V> {
    fn drop(&mut self) {
        if let (Some(heap_ref), Some(root)) = (self.heap_ref.take(), self.root.load()) {
            BTreeTeardown::<K, V>::drop_now(heap_ref, root, self.height, self.len);
        }
    }
}

impl<K: Send + 'static, V: Send + 'static> core::fmt::Debug for FarBTreeMap<K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarBTreeMap({} entries)", self.len())
    }
}
