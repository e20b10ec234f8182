//! Map from keys to values, in the order of the keys: a B+ tree.
//!
//! Keys of a node do not change. A change makes a leaf anew and lets one link lead to it: that of the
//! node above, or where this node cannot stay as it is, one further up. A node that a snapshot may
//! have, too, is made anew before anything in it changes (Driscoll et al., *Making Data Structures
//! Persistent*, JCSS 1989, path copying).

use super::{GcError, MapValue, Mutator};
use crate::FarObject;
use crate::collections::fields::Sealed;
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
/// Another value for a key is one store, if values are a [`Ref`]. Other changes cost a leaf of a few
/// hundred bytes, the first ones after a [snapshot](OrderedMap::snapshot) one for each level of the tree.
/// A change is tried again as long as other threads change the map at the same time; it is written in a
/// few stores, for which they wait. Who reads does not wait.
#[derive(FarObject)]
pub struct OrderedMap<K: FarObject + Ord + Copy, V: MapValue> {
    len: Atom<u64>,
    /// Twice the number of changes and snapshots; one more while one is being written.
    version: Atom<u64>,
    /// Version in which the last snapshot was taken. Nodes that are no newer may be part of other maps; the
    /// first change afterwards makes the root anew.
    shared: Atom<u64>,
    root: Ref<AnyObject>,
    items: PhantomData<fn() -> (K, V)>,
}

/// Reference to a node, with the version of the map in which the node was made.
#[derive(FarObject)]
struct NodeLink {
    node: Ref<AnyObject>,
    version: Atom<u64>,
}

/// What a link is set to.
#[derive(Clone, Copy)]
struct LinkedNode<'m> {
    node: Gc<'m, AnyObject>,
    version: u64,
}

/// Key of a leaf and its value, or a link to a node. The keys of that node and those after it are not
/// less than the key, but for the first link of a node, whose key has no meaning.
#[derive(FarObject)]
struct TreeItem<K, V> {
    key: K,
    value: V,
}

/// It is no value of a map, so no leaf has the type of an inner node.
impl MapValue for NodeLink {
    type Given<'m> = LinkedNode<'m>;

    fn new(given: LinkedNode<'_>) -> NodeLink {
        NodeLink { node: Ref::null(), version: Atom::new(given.version) }
    }

    #[inline]
    fn fill(&self, m: &Mutator<'_>, given: LinkedNode<'_>) -> Result<(), GcError> {
        self.node.store(m, Some(given.node));
        Ok(())
    }

    fn copy(&self) -> NodeLink {
        NodeLink { node: Ref::null(), version: Atom::new(self.version.get()) }
    }

    #[inline]
    fn fill_from(&self, m: &Mutator<'_>, other: &NodeLink) {
        self.node.copy_from(m, &other.node);
    }

    #[inline]
    fn find<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<LinkedNode<'m>>, GcError> {
        let node = self.node.load(m)?;
        Ok(node.map(|node| LinkedNode { node, version: self.version.get() }))
    }
}

type Leaf<K, V> = [TreeItem<K, V>];
type Inner<K> = [TreeItem<K, NodeLink>];

/// Item of a node that is being made.
struct NewItem<'m, K, V: MapValue> {
    key: K,
    value: NewItemValue<'m, V>,
}

enum NewItemValue<'m, V: MapValue> {
    New(V::Given<'m>),
    Copy(&'m V),
}

/// Change of a node: an item at an index goes, another one comes there, or both.
struct ItemChange<'m, K, V: MapValue> {
    index: usize,
    removes: bool,
    inserts: Option<(K, V::Given<'m>)>,
}

/// Inner node on the way to a leaf.
struct PathStep<'m, K: FarObject> {
    node: Gc<'m, Inner<K>>,
    /// No other map has the node.
    is_owned: bool,
    /// Index of the child on the way.
    index: usize,
}

/// Way from the root to a leaf.
struct Path<'m, K: FarObject, V: MapValue> {
    inner: Vec<PathStep<'m, K>>,
    leaf: Gc<'m, Leaf<K, V>>,
    /// No other map has the leaf.
    is_owned: bool,
}

/// Right to write into a map, which has this version meanwhile plus one. Dropped, it leaves `next` as the
/// version.
struct Writing<'a> {
    version: &'a Atom<u64>,
    next: u64,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.version.set(self.next);
    }
}

impl<K: FarObject + Ord + Copy, V: MapValue> Default for OrderedMap<K, V> {
    fn default() -> OrderedMap<K, V> {
        OrderedMap::new()
    }
}

impl<K: FarObject + Ord + Copy, V: MapValue> OrderedMap<K, V> {
    /// Makes an empty map. It can be filled when it is in a heap.
    pub fn new() -> OrderedMap<K, V> {
        // Not changed since a snapshot of nothing.
        let (len, version, shared) = (Atom::new(0), Atom::new(next_version(0)), Atom::new(0));
        OrderedMap { len, version, shared, root: Ref::null(), items: PhantomData }
    }

    /// Returns the number of keys.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Checks whether the map has no keys.
    pub fn is_empty(&self) -> bool {
        self.root.is_null()
    }

    /// Returns the version, when nobody writes.
    fn quiet_version(&self) -> u64 {
        loop {
            let version = self.version.get();
            if version.is_multiple_of(2) {
                return version;
            }
            // Whoever writes does so in a few stores, without waiting for anything.
            std::thread::yield_now();
        }
    }

    /// Lets this thread write, if the map still has this version. Until that is dropped, nothing may fail
    /// or wait, and no code of the program may be called.
    fn write(&self, seen: u64) -> Option<Writing<'_>> {
        self.version.compare_exchange(seen, seen + 1).ok()?;
        Some(Writing { version: &self.version, next: seen })
    }

    /// Makes a map that has what this one has now, and shares it: neither sees later changes of the
    /// other. Takes a constant time.
    pub fn snapshot<'m>(&self, m: &'m Mutator<'_>) -> Result<Gc<'m, OrderedMap<K, V>>, GcError> {
        let copy = m.alloc(OrderedMap::new())?;
        loop {
            let seen = self.quiet_version();
            copy.len.set(self.len());
            copy.version.set(next_version(seen));
            copy.shared.set(seen);
            copy.root.copy_from(m, &self.root);
            if self.share_nodes(seen) {
                return Ok(copy);
            }
        }
    }

    /// Lets no node change any more that is in the map now. Returns `false`, and has changed nothing, if the
    /// map has another version than `seen`.
    fn share_nodes(&self, seen: u64) -> bool {
        let Some(mut writing) = self.write(seen) else { return false };
        self.shared.set(seen);
        writing.next = next_version(seen);
        true
    }

    /// Returns the value of a key, and brings it near. `None` if the key is not there, or if what its
    /// value leads to was collected.
    pub fn get<'m>(&self, m: &'m Mutator<'_>, key: &K) -> Result<Option<V::Given<'m>>, GcError> {
        let Some(leaf) = self.leaf(m, key)? else { return Ok(None) };
        match leaf.binary_search_by(|item| item.key.cmp(key)) {
            Ok(index) => Gc::get(leaf)[index].value.find(m),
            Err(_) => Ok(None),
        }
    }

    /// Checks whether the key is there, without bringing its value near.
    pub fn contains(&self, m: &Mutator<'_>, key: &K) -> Result<bool, GcError> {
        let leaf = self.leaf(m, key)?;
        Ok(leaf.is_some_and(|leaf| leaf.binary_search_by(|item| item.key.cmp(key)).is_ok()))
    }

    /// Returns the leaf in which a key is, if it is there; `None` if the map is empty. What it returns was
    /// the key's leaf at some moment during the call, because a node that was replaced does not change.
    fn leaf<'m>(&self, m: &'m Mutator<'_>, key: &K) -> Result<Option<Gc<'m, Leaf<K, V>>>, GcError> {
        let Some(root) = self.root.load(m)? else { return Ok(None) };
        Self::descend(m, root, key, |_, _| {}).map(Some)
    }

    /// Returns the way to the leaf in which a key is, if it is there, in this version; `None` if the map is
    /// empty.
    fn path<'m>(&self, m: &'m Mutator<'_>, seen: u64, key: &K) -> Result<Option<Path<'m, K, V>>, GcError> {
        let Some(root) = self.root.load(m)? else { return Ok(None) };
        let shared = self.shared.get();
        let (mut inner, mut is_owned) = (Vec::with_capacity(DEPTH), seen > next_version(shared));
        let leaf = Self::descend(m, root, key, |node, index| {
            inner.push(PathStep { node, is_owned, index });
            is_owned = node[index].value.version.get() > shared;
        })?;
        Ok(Some(Path { inner, leaf, is_owned }))
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
            let next = child(m, inner, index)?;
            pass(inner, index);
            node = next;
        }
        node.downcast(m).ok_or_else(|| foreign(node))
    }

    /// Inserts a value, in place of the one that the key has, if any. Returns whether the key is new.
    pub fn insert<'m>(&self, m: &'m Mutator<'_>, key: K, value: V::Given<'m>) -> Result<bool, GcError> {
        loop {
            let seen = self.quiet_version();
            let path = self.path(m, seen, &key)?;
            let old = path.as_ref().map_or(&[][..], |path| Gc::get(path.leaf));
            let (index, is_new) = match old.binary_search_by(|item| item.key.cmp(&key)) {
                Ok(index) => (index, false),
                Err(index) => (index, true),
            };
            if !is_new
                && path.as_ref().is_some_and(|path| path.is_owned)
                && let Some(writing) = self.write(seen)
                && old[index].value.set(m, value, Sealed)
            {
                self.end_change(writing, 0);
                return Ok(false);
            }
            let inner = path.map_or(Vec::new(), |path| path.inner);
            let change = ItemChange { index, removes: !is_new, inserts: Some((key, value)) };
            if self.change(m, seen, &inner, old, change)? {
                return Ok(is_new);
            }
        }
    }

    /// Removes a key. Returns whether it was there.
    pub fn remove(&self, m: &Mutator<'_>, key: &K) -> Result<bool, GcError> {
        loop {
            let seen = self.quiet_version();
            let Some(Path { inner, leaf, .. }) = self.path(m, seen, key)? else { return Ok(false) };
            let Ok(index) = leaf.binary_search_by(|item| item.key.cmp(key)) else { return Ok(false) };
            let change = ItemChange { index, removes: true, inserts: None };
            if self.change(m, seen, &inner, Gc::get(leaf), change)? {
                return Ok(true);
            }
        }
    }

    /// Makes a leaf with this change, in place of one to which this way leads. Returns as
    /// [`OrderedMap::link`] does.
    fn change<'m>(
        &self,
        m: &'m Mutator<'_>,
        seen: u64,
        inner: &[PathStep<'m, K>],
        leaf: &'m [TreeItem<K, V>],
        change: ItemChange<'m, K, V>,
    ) -> Result<bool, GcError> {
        let more = u64::from(change.inserts.is_some()).wrapping_sub(change.removes.into());
        let len = change.len_of(leaf);
        // Nodes are neither cut nor joined, unless the leaf is too large or too small.
        if len <= ITEMS_MAX && (len >= ITEMS_MIN || inner.is_empty() && len > 0) {
            let node = make_changed(m, leaf, &change)?.as_any();
            return self.link(m, seen, inner, node, more);
        }
        let mut items: Vec<_> = leaf.iter().map(NewItem::copy).collect();
        let new = change.inserts.map(|(key, value)| NewItem { key, value: NewItemValue::New(value) });
        items.splice(change.removed(), new);
        self.replace(m, seen, inner, items, more)
    }

    /// Lets this node be in place of the one to which this way leads. Nodes above it that are shared
    /// with other maps are made anew.
    ///
    /// Returns `false`, and has changed nothing, if the map has another version meanwhile than `seen`.
    fn link<'m>(
        &self,
        m: &'m Mutator<'_>,
        seen: u64,
        inner: &[PathStep<'m, K>],
        mut node: Gc<'m, AnyObject>,
        more: u64,
    ) -> Result<bool, GcError> {
        let version = next_version(seen);
        for PathStep { node: above, is_owned, index } in inner.iter().rev() {
            let TreeItem { key, value: link } = &Gc::get(*above)[*index];
            if *is_owned {
                let Some(writing) = self.write(seen) else { return Ok(false) };
                link.node.store(m, Some(node));
                link.version.set(version);
                self.end_change(writing, more);
                return Ok(true);
            }
            let inserts = Some((*key, LinkedNode { node, version }));
            node = make_changed(m, above, &ItemChange { index: *index, removes: true, inserts })?.as_any();
        }
        Ok(self.set_root(m, seen, Some(node), more))
    }

    /// Lets this node be the root, which no other map has. Returns as [`OrderedMap::link`] does.
    fn set_root(&self, m: &Mutator<'_>, seen: u64, node: Option<Gc<'_, AnyObject>>, more: u64) -> bool {
        let Some(writing) = self.write(seen) else { return false };
        self.root.store(m, node);
        self.end_change(writing, more);
        true
    }

    /// Counts so many keys more, or wrapping around, less, and ends a change.
    fn end_change(&self, mut writing: Writing<'_>, more: u64) {
        self.len.fetch_add(more);
        writing.next = next_version(writing.next);
    }

    /// Makes nodes of these items, in place of a leaf to which this way leads, and as many of those
    /// above it as must have other children. Returns as [`OrderedMap::link`] does.
    fn replace<'m>(
        &self,
        m: &'m Mutator<'_>,
        seen: u64,
        inner: &[PathStep<'m, K>],
        mut items: Vec<NewItem<'m, K, V>>,
        more: u64,
    ) -> Result<bool, GcError> {
        let version = next_version(seen);
        let mut above = inner;
        let mut range = join(m, above.last(), &mut items)?;
        let mut nodes = make_nodes(m, &items, version)?;
        while let Some((parent, further)) = above.split_last() {
            if let ([node], 1) = (&nodes[..], range.len())
                && let Some(made) = node.value.find(m)?
            {
                return self.link(m, seen, above, made.node, more);
            }
            let mut items: Vec<_> = Gc::get(parent.node).iter().map(NewItem::copy).collect();
            let (start, key) = (range.start, items[range.start].key);
            // What is first there now, has the keys from there on.
            let begins_there = start == 0 || !nodes.is_empty();
            items.splice(range, nodes);
            items.get_mut(start).filter(|_| begins_there).into_iter().for_each(|first| first.key = key);
            above = further;
            if let ([], [only]) = (above, &items[..])
                && let Some(only) = only.value.find(m)?
                && only.version > self.shared.get()
            {
                // A root with one child: the child is the root.
                return Ok(self.set_root(m, seen, Some(only.node), more));
            }
            range = join(m, above.last(), &mut items)?;
            nodes = make_nodes(m, &items, version)?;
        }
        while nodes.len() > 1 {
            nodes = make_nodes(m, &nodes, version)?;
        }
        let root = nodes.pop().map_or(Ok(None), |root| root.value.find(m))?;
        Ok(self.set_root(m, seen, root.map(|root| root.node), more))
    }

    /// Returns up to `most` keys, at least one, from a bound on, in their order, with their values, all of
    /// one moment. What is far is brought near; values that were collected are left out.
    ///
    /// A walk that goes on after the last key, with safepoints in between, sees changes meanwhile; one
    /// over a [snapshot](OrderedMap::snapshot) does not.
    pub fn range<'m>(
        &self,
        m: &'m Mutator<'_>,
        from: Bound<K>,
        most: usize,
    ) -> Result<Vec<(K, V::Given<'m>)>, GcError> {
        self.of_one_moment(m, |root| {
            let mut found = Vec::with_capacity(most.min(RANGE_MIN));
            let mut take = |item: &'m TreeItem<K, V>| {
                if let Some(value) = item.value.find(m)? {
                    found.push((item.key, value));
                }
                Ok(found.len() < most)
            };
            Self::visit(m, root, from, &mut take)?;
            Ok(found)
        })
    }

    /// Returns up to `most` keys, at least one, from a bound on, in their order, all of one moment, without
    /// bringing values near.
    pub fn keys(&self, m: &Mutator<'_>, from: Bound<K>, most: usize) -> Result<Vec<K>, GcError> {
        self.of_one_moment(m, |root| {
            let mut found = Vec::new();
            let mut take = |item: &TreeItem<K, V>| {
                found.push(item.key);
                Ok(found.len() < most)
            };
            Self::visit(m, root, from, &mut take)?;
            Ok(found)
        })
    }

    /// Returns what `look` finds from the root on, if nothing changes meanwhile. Otherwise keeps the nodes
    /// as they are, as a snapshot does, and looks again.
    fn of_one_moment<'m, T: Default>(
        &self,
        m: &'m Mutator<'_>,
        mut look: impl FnMut(Gc<'m, AnyObject>) -> Result<T, GcError>,
    ) -> Result<T, GcError> {
        let mut look = |root: Option<_>| root.map_or(Ok(T::default()), &mut look);
        let seen = self.quiet_version();
        let found = look(self.root.load(m)?)?;
        if self.version.get() == seen {
            return Ok(found);
        }
        loop {
            let seen = self.quiet_version();
            let root = self.root.load(m)?;
            if self.share_nodes(seen) {
                return look(root);
            }
        }
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

impl<K, V: MapValue> ItemChange<'_, K, V> {
    /// Returns the range of items that go.
    fn removed(&self) -> core::ops::Range<usize> {
        self.index..self.index + usize::from(self.removes)
    }

    /// Returns the number of items that there are afterwards.
    fn len_of(&self, items: &[TreeItem<K, V>]) -> usize {
        items.len() + usize::from(self.inserts.is_some()) - usize::from(self.removes)
    }
}

impl<'m, K: Copy, V: MapValue> NewItem<'m, K, V> {
    fn copy(item: &'m TreeItem<K, V>) -> NewItem<'m, K, V> {
        NewItem { key: item.key, value: NewItemValue::Copy(&item.value) }
    }
}

impl<'m> NewItemValue<'m, NodeLink> {
    fn find(&self, m: &'m Mutator<'_>) -> Result<Option<LinkedNode<'m>>, GcError> {
        match self {
            NewItemValue::New(given) => Ok(Some(*given)),
            NewItemValue::Copy(link) => link.find(m),
        }
    }
}

/// Returns the version of a map after a change or a snapshot.
fn next_version(seen: u64) -> u64 {
    seen + 2
}

/// Adds the items of a neighbour to those of a node that would have too few. Returns the range of
/// children of the parent that the items are in place of.
fn join<'m, K: FarObject + Copy, V: MapValue>(
    m: &'m Mutator<'_>,
    parent: Option<&PathStep<'m, K>>,
    items: &mut Vec<NewItem<'m, K, V>>,
) -> Result<core::ops::Range<usize>, GcError> {
    let Some(PathStep { node: parent, index, .. }) = parent else { return Ok(0..0) };
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
    let (before, after) = (&old[..change.index], &old[change.removed().end..]);
    let copy = |item: &TreeItem<K, V>| TreeItem { key: item.key, value: item.value.copy() };
    let behind = change.len_of(old) - after.len();
    let node = m.alloc_array(behind + after.len(), |at| match change.inserts {
        _ if at < before.len() => copy(&before[at]),
        Some((key, value)) if at < behind => TreeItem { key, value: V::new(value) },
        _ => copy(&after[at - behind]),
    })?;
    let (first, last) = Gc::get(node).split_at(behind);
    let fill = |new: &[TreeItem<K, V>], old: &[TreeItem<K, V>]| {
        new.iter().zip(old).for_each(|(new, old)| new.value.fill_from(m, &old.value));
    };
    fill(first, before);
    if let Some((_, value)) = change.inserts {
        first[change.index].value.fill(m, value)?;
    }
    fill(last, after);
    Ok(node)
}

/// Makes as many nodes of items as are needed, for this version of the map. Returns each with its first
/// key.
fn make_nodes<'m, K: FarObject + Copy, V: MapValue>(
    m: &'m Mutator<'_>,
    items: &[NewItem<'m, K, V>],
    version: u64,
) -> Result<Vec<NewItem<'m, K, NodeLink>>, GcError> {
    let count = items.len().div_ceil(ITEMS_MAX).max(1);
    items.chunks(items.len().div_ceil(count).max(1)).map(|items| make_node(m, items, version)).collect()
}

fn make_node<'m, K: FarObject + Copy, V: MapValue>(
    m: &'m Mutator<'_>,
    items: &[NewItem<'m, K, V>],
    version: u64,
) -> Result<NewItem<'m, K, NodeLink>, GcError> {
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
    Ok(NewItem { key: items[0].key, value: NewItemValue::New(LinkedNode { node: node.as_any(), version }) })
}
