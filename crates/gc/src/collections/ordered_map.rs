//! Map from keys to values, in the order of the keys: a B+ tree whose nodes do not change.
//!
//! A change makes new nodes from the leaf up to the root, and exchanges the root. So whoever reads
//! sees the map as it was at one moment, and a copy of the map shares its nodes.

use super::{GcError, MapValue, Mutator};
use crate::FarObject;
use crate::object::{AnyObject, Atom};
use crate::reference::{Gc, Ref};
use core::marker::PhantomData;
use core::ops::Bound;

/// Greatest number of items of a node.
const ITEMS_MAX: usize = 24;
/// Number of items below which a node is joined with a neighbour, if both are not too large then.
const ITEMS_MIN: usize = 8;

/// Number of inner nodes on most ways from the root to a leaf, at most.
const DEPTH: usize = 8;
/// Number of items for which a range has room at first.
const RANGE_MIN: usize = 64;

/// Map from keys to values, in the order of the keys.
///
/// A value is a number, a [`Ref`], or a [`WeakRef`](crate::WeakRef). Keys are copied, and compared by
/// their `Ord`; where that contradicts itself, keys may not be found again.
///
/// A change costs a few hundred bytes of garbage for each level of the tree. It is tried again as long
/// as other threads change the map at the same time.
#[derive(FarObject)]
pub struct OrderedMap<K: FarObject + Ord + Copy, V: MapValue> {
    len: Atom<u64>,
    root: Ref<AnyObject>,
    items: PhantomData<fn() -> (K, V)>,
}

/// Key of a leaf and its value, or first key of a node and the node.
#[derive(FarObject)]
struct TreeItem<K, V> {
    key: K,
    value: V,
}

/// Reference to a node below. It is no value of a map, so no leaf has the type of an inner node.
#[derive(FarObject)]
struct Child {
    node: Ref<AnyObject>,
}

impl MapValue for Child {
    type Given<'m> = Gc<'m, AnyObject>;

    fn new(_: Gc<'_, AnyObject>) -> Child {
        Child { node: Ref::null() }
    }

    #[inline]
    fn fill(&self, m: &Mutator<'_>, given: Gc<'_, AnyObject>) -> Result<(), GcError> {
        self.node.store(m, Some(given));
        Ok(())
    }

    fn copy(&self) -> Child {
        Child { node: Ref::null() }
    }

    #[inline]
    fn fill_from(&self, m: &Mutator<'_>, other: &Child) {
        self.node.copy_from(m, &other.node);
    }

    #[inline]
    fn find<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<Gc<'m, AnyObject>>, GcError> {
        self.node.load(m)
    }
}

type Leaf<K, V> = [TreeItem<K, V>];
type Inner<K> = [TreeItem<K, Child>];

/// Item of a node that is being made.
struct NewItem<'m, K, V: MapValue> {
    key: K,
    value: NewItemValue<'m, V>,
}

enum NewItemValue<'m, V: MapValue> {
    New(V::Given<'m>),
    Copy(&'m V),
}

/// Change of a node: another item at an index, or one more.
struct ItemChange<'m, K, V: MapValue> {
    index: usize,
    is_new: bool,
    key: K,
    value: V::Given<'m>,
}

/// Way from the root to a leaf: each inner node, and the index of the child.
struct Path<'m, K: FarObject, V: MapValue> {
    inner: Vec<(Gc<'m, Inner<K>>, usize)>,
    leaf: Gc<'m, Leaf<K, V>>,
}

impl<K: FarObject + Ord + Copy, V: MapValue> Default for OrderedMap<K, V> {
    fn default() -> OrderedMap<K, V> {
        OrderedMap::new()
    }
}

impl<K: FarObject + Ord + Copy, V: MapValue> OrderedMap<K, V> {
    /// Makes an empty map. It can be filled when it is in a heap.
    pub fn new() -> OrderedMap<K, V> {
        OrderedMap { len: Atom::new(0), root: Ref::null(), items: PhantomData }
    }

    /// Returns the number of keys. Those that others insert or remove at this moment may count or
    /// not.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Checks whether the map has no keys.
    pub fn is_empty(&self) -> bool {
        self.root.is_null()
    }

    /// Makes a map that has what this one has now, and shares it: neither sees later changes of the
    /// other. Takes a constant time. If others change this map at this moment, the length of the copy
    /// may stay off by what they do.
    pub fn snapshot<'m>(&self, m: &'m Mutator<'_>) -> Result<Gc<'m, OrderedMap<K, V>>, GcError> {
        let copy = m.alloc(OrderedMap::new())?;
        copy.len.set(self.len());
        copy.root.copy_from(m, &self.root);
        Ok(copy)
    }

    /// Returns the value of a key, and brings it near. `None` if the key is not there, or if what its
    /// value leads to was collected.
    pub fn get<'m>(&self, m: &'m Mutator<'_>, key: &K) -> Result<Option<V::Given<'m>>, GcError> {
        let Some(root) = self.root.load(m)? else { return Ok(None) };
        let leaf = Gc::get(Self::leaf(m, root, key)?);
        match leaf.binary_search_by(|item| item.key.cmp(key)) {
            Ok(index) => leaf[index].value.find(m),
            Err(_) => Ok(None),
        }
    }

    /// Checks whether the key is there, without bringing its value near.
    pub fn contains(&self, m: &Mutator<'_>, key: &K) -> Result<bool, GcError> {
        let Some(root) = self.root.load(m)? else { return Ok(false) };
        Ok(Self::leaf(m, root, key)?.binary_search_by(|item| item.key.cmp(key)).is_ok())
    }

    /// Returns the leaf in which a key is, if it is there, from a node on.
    fn leaf<'m>(m: &'m Mutator<'_>, node: Gc<'m, AnyObject>, key: &K) -> Result<Gc<'m, Leaf<K, V>>, GcError> {
        Self::descend(m, node, key, |_, _| {})
    }

    /// Returns the way from a node to the leaf in which a key is, if it is there.
    fn path<'m>(m: &'m Mutator<'_>, node: Gc<'m, AnyObject>, key: &K) -> Result<Path<'m, K, V>, GcError> {
        let mut inner = Vec::with_capacity(DEPTH);
        let leaf = Self::descend(m, node, key, |node, index| inner.push((node, index)))?;
        Ok(Path { inner, leaf })
    }

    /// Follows a key from a node on to its leaf, which is returned. Shows each inner node, and the index of
    /// the child.
    #[inline]
    fn descend<'m>(
        m: &'m Mutator<'_>,
        mut node: Gc<'m, AnyObject>,
        key: &K,
        mut pass: impl FnMut(Gc<'m, Inner<K>>, usize),
    ) -> Result<Gc<'m, Leaf<K, V>>, GcError> {
        while let Some(inner) = node.downcast::<Inner<K>>(m) {
            let index = inner.partition_point(|item| item.key <= *key).saturating_sub(1);
            pass(inner, index);
            node = child(m, inner, index)?;
        }
        node.downcast(m).ok_or_else(|| foreign(node))
    }

    /// Inserts a value, in place of the one that the key has, if any. Returns whether the key is new.
    pub fn insert<'m>(&self, m: &'m Mutator<'_>, key: K, value: V::Given<'m>) -> Result<bool, GcError> {
        loop {
            let root = self.root.load(m)?;
            let path = root.map(|root| Self::path(m, root, &key)).transpose()?;
            let old = path.as_ref().map_or(&[][..], |path| Gc::get(path.leaf));
            let (index, is_new) = match old.binary_search_by(|item| item.key.cmp(&key)) {
                Ok(index) => (index, false),
                Err(index) => (index, true),
            };
            let inner = path.map_or(Vec::new(), |path| path.inner);
            let change = ItemChange { index, is_new, key, value };
            let len = old.len() + usize::from(is_new);
            // Nodes are neither cut nor joined, unless the leaf is too large or too small.
            let is_replaced = if len <= ITEMS_MAX && (len >= ITEMS_MIN || inner.is_empty()) {
                self.replace_simply(m, root, &inner, old, &change)?
            } else {
                let mut items: Vec<_> = old.iter().map(NewItem::copy).collect();
                let new = NewItem { key, value: NewItemValue::New(value) };
                if is_new {
                    items.insert(index, new)
                } else {
                    items[index] = new
                }
                self.replace(m, root, &inner, items)?
            };
            if is_replaced {
                self.len.fetch_add(u64::from(is_new));
                return Ok(is_new);
            }
        }
    }

    /// Removes a key. Returns whether it was there.
    pub fn remove(&self, m: &Mutator<'_>, key: &K) -> Result<bool, GcError> {
        loop {
            let Some(root) = self.root.load(m)? else { return Ok(false) };
            let Path { inner, leaf } = Self::path(m, root, key)?;
            let Ok(index) = leaf.binary_search_by(|item| item.key.cmp(key)) else { return Ok(false) };
            let mut items: Vec<_> = Gc::get(leaf).iter().map(NewItem::copy).collect();
            items.remove(index);
            if self.replace(m, Some(root), &inner, items)? {
                self.len.fetch_add(u64::MAX);
                return Ok(true);
            }
        }
    }

    /// Makes a leaf with this change, in place of one to which this way leads, and each node above it
    /// with the same number of children. Returns `false` as [`OrderedMap::replace`] does.
    fn replace_simply<'m>(
        &self,
        m: &'m Mutator<'_>,
        seen: Option<Gc<'m, AnyObject>>,
        inner: &[(Gc<'m, Inner<K>>, usize)],
        leaf: &[TreeItem<K, V>],
        change: &ItemChange<'m, K, V>,
    ) -> Result<bool, GcError> {
        let leaf = make_changed(m, leaf, change)?;
        let (mut key, mut node) = (leaf[0].key, leaf.as_any());
        for (above, index) in inner.iter().rev() {
            let change = ItemChange { index: *index, is_new: false, key, value: node };
            let made = make_changed(m, above, &change)?;
            (key, node) = (made[0].key, made.as_any());
        }
        Ok(self.root.compare_exchange(m, seen, Some(node)))
    }

    /// Makes nodes of these items, in place of a leaf to which this way leads, and a new root. Returns
    /// `false` if the map has another root meanwhile than `seen`.
    fn replace<'m>(
        &self,
        m: &'m Mutator<'_>,
        seen: Option<Gc<'m, AnyObject>>,
        inner: &[(Gc<'m, Inner<K>>, usize)],
        mut items: Vec<NewItem<'m, K, V>>,
    ) -> Result<bool, GcError> {
        let mut above = inner.iter().rev();
        let mut parent = above.next();
        let mut range = join::<K, V>(m, parent, &mut items)?;
        let mut nodes = make_nodes(m, &items)?;
        while let Some((node, _)) = parent {
            let mut items: Vec<_> = Gc::get(*node).iter().map(NewItem::copy).collect();
            items.splice(range, nodes);
            parent = above.next();
            if parent.is_none() && items.len() == 1 {
                // A root with one child: the child is the root.
                nodes = items;
                break;
            }
            range = join::<K, Child>(m, parent, &mut items)?;
            nodes = make_nodes(m, &items)?;
        }
        while nodes.len() > 1 {
            nodes = make_nodes(m, &nodes)?;
        }
        let root = match nodes.pop().map(|node| node.value) {
            Some(NewItemValue::New(root)) => Some(root),
            Some(NewItemValue::Copy(root)) => root.find(m)?,
            None => None,
        };
        Ok(self.root.compare_exchange(m, seen, root))
    }

    /// Returns up to `most` keys, at least one, from a bound on, in their order, with their values. What
    /// is far is brought near; values that were collected are left out.
    ///
    /// A walk that goes on after the last key, with safepoints in between, sees changes meanwhile; one
    /// over a [snapshot](OrderedMap::snapshot) does not.
    pub fn range<'m>(
        &self,
        m: &'m Mutator<'_>,
        from: Bound<K>,
        most: usize,
    ) -> Result<Vec<(K, V::Given<'m>)>, GcError> {
        let mut found = Vec::with_capacity(most.min(RANGE_MIN));
        if let Some(root) = self.root.load(m)? {
            let mut take = |item: &'m TreeItem<K, V>| {
                if let Some(value) = item.value.find(m)? {
                    found.push((item.key, value));
                }
                Ok(found.len() < most)
            };
            Self::visit(m, root, from, &mut take)?;
        }
        Ok(found)
    }

    /// Returns up to `most` keys, at least one, from a bound on, in their order, without bringing values
    /// near.
    pub fn keys(&self, m: &Mutator<'_>, from: Bound<K>, most: usize) -> Result<Vec<K>, GcError> {
        let mut found = Vec::new();
        if let Some(root) = self.root.load(m)? {
            let mut take = |item: &TreeItem<K, V>| {
                found.push(item.key);
                Ok(found.len() < most)
            };
            Self::visit(m, root, from, &mut take)?;
        }
        Ok(found)
    }

    /// Calls `take` for each item from a bound on, until it returns `false`. Returns whether it did
    /// not.
    fn visit<'m>(
        m: &'m Mutator<'_>,
        node: Gc<'m, AnyObject>,
        from: Bound<K>,
        take: &mut dyn FnMut(&'m TreeItem<K, V>) -> Result<bool, GcError>,
    ) -> Result<bool, GcError> {
        if let Some(inner) = node.downcast::<Inner<K>>(m) {
            let first = match from {
                Bound::Unbounded => 0,
                Bound::Included(key) | Bound::Excluded(key) => inner.partition_point(|item| item.key <= key),
            };
            for index in first.saturating_sub(1)..inner.len() {
                if !Self::visit(m, child(m, inner, index)?, from, take)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let leaf = node.downcast::<Leaf<K, V>>(m).ok_or_else(|| foreign(node))?;
        let first = match from {
            Bound::Unbounded => 0,
            Bound::Included(key) => leaf.partition_point(|item| item.key < key),
            Bound::Excluded(key) => leaf.partition_point(|item| item.key <= key),
        };
        for item in Gc::get(leaf).iter().skip(first) {
            if !take(item)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the last key.
    pub fn last_key(&self, m: &Mutator<'_>) -> Result<Option<K>, GcError> {
        let Some(mut node) = self.root.load(m)? else { return Ok(None) };
        while let Some(inner) = node.downcast::<Inner<K>>(m) {
            node = child(m, inner, inner.len().saturating_sub(1))?;
        }
        let leaf = node.downcast::<Leaf<K, V>>(m).ok_or_else(|| foreign(node))?;
        Ok(leaf.last().map(|item| item.key))
    }
}

fn foreign(node: Gc<'_, AnyObject>) -> GcError {
    GcError::Damaged { entry: node.entry(), what: "it is no part of this map" }
}

fn child<'m, K: FarObject>(
    m: &'m Mutator<'_>,
    inner: Gc<'m, Inner<K>>,
    index: usize,
) -> Result<Gc<'m, AnyObject>, GcError> {
    let child = Gc::get(inner).get(index).map_or(Ok(None), |item| item.value.node.load(m))?;
    child.ok_or_else(|| foreign(inner.as_any()))
}

impl<'m, K: Copy, V: MapValue> NewItem<'m, K, V> {
    fn copy(item: &'m TreeItem<K, V>) -> NewItem<'m, K, V> {
        NewItem { key: item.key, value: NewItemValue::Copy(&item.value) }
    }
}

/// Adds the items of a neighbour to those of a node that would have too few. Returns the range of
/// children of the parent that the items are in place of.
fn join<'m, K: FarObject + Copy, V: MapValue>(
    m: &'m Mutator<'_>,
    parent: Option<&(Gc<'m, Inner<K>>, usize)>,
    items: &mut Vec<NewItem<'m, K, V>>,
) -> Result<core::ops::Range<usize>, GcError> {
    let Some((parent, index)) = parent else { return Ok(0..0) };
    let is_small = !items.is_empty() && items.len() < ITEMS_MIN;
    // The one before, or for the first one that behind.
    let other = if *index > 0 { index - 1 } else { index + 1 };
    if !is_small || other >= parent.len() {
        return Ok(*index..index + 1);
    }
    let node = child(m, *parent, other)?;
    let neighbour = node.downcast::<[TreeItem<K, V>]>(m).ok_or_else(|| foreign(node))?;
    if neighbour.len() + items.len() > ITEMS_MAX {
        return Ok(*index..index + 1);
    }
    let at = if other < *index { 0 } else { items.len() };
    items.splice(at..at, Gc::get(neighbour).iter().map(NewItem::copy));
    let first = other.min(*index);
    Ok(first..first + 2)
}

/// Makes a node like this one, with a change.
fn make_changed<'m, K: FarObject + Copy, V: MapValue>(
    m: &'m Mutator<'_>,
    old: &[TreeItem<K, V>],
    change: &ItemChange<'_, K, V>,
) -> Result<Gc<'m, [TreeItem<K, V>]>, GcError> {
    let behind = change.index + usize::from(!change.is_new);
    let (before, after) = (&old[..change.index], &old[behind..]);
    let copy = |item: &TreeItem<K, V>| TreeItem { key: item.key, value: item.value.copy() };
    let node = m.alloc_array(before.len() + 1 + after.len(), |at| match at.checked_sub(change.index) {
        None => copy(&before[at]),
        Some(0) => TreeItem { key: change.key, value: V::new(change.value) },
        Some(from) => copy(&after[from - 1]),
    })?;
    let (new_before, rest) = Gc::get(node).split_at(change.index);
    let fill = |new: &[TreeItem<K, V>], old: &[TreeItem<K, V>]| {
        new.iter().zip(old).for_each(|(new, old)| new.value.fill_from(m, &old.value));
    };
    fill(new_before, before);
    rest[0].value.fill(m, change.value)?;
    fill(&rest[1..], after);
    Ok(node)
}

/// Makes as many nodes of items as are needed. Returns each with its first key.
fn make_nodes<'m, K: FarObject + Copy, V: MapValue>(
    m: &'m Mutator<'_>,
    items: &[NewItem<'m, K, V>],
) -> Result<Vec<NewItem<'m, K, Child>>, GcError> {
    let count = items.len().div_ceil(ITEMS_MAX).max(1);
    items.chunks(items.len().div_ceil(count).max(1)).map(|items| make_node(m, items)).collect()
}

fn make_node<'m, K: FarObject + Copy, V: MapValue>(
    m: &'m Mutator<'_>,
    items: &[NewItem<'m, K, V>],
) -> Result<NewItem<'m, K, Child>, GcError> {
    let node = m.alloc_array(items.len(), |index| {
        let NewItem { key, value } = &items[index];
        let value = match value {
            NewItemValue::New(given) => V::new(*given),
            NewItemValue::Copy(value) => value.copy(),
        };
        TreeItem { key: *key, value }
    })?;
    for (item, new) in node.iter().zip(items) {
        match &new.value {
            NewItemValue::New(given) => item.value.fill(m, *given)?,
            NewItemValue::Copy(value) => item.value.fill_from(m, value),
        }
    }
    Ok(NewItem { key: items[0].key, value: NewItemValue::New(node.as_any()) })
}
