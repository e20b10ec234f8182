//! Changes of a tree. Nodes are split and merged on the way down, so that a change never has to
//! come back up. Each step leaves a whole tree behind. A step that cannot get the memory it needs
//! has changed nothing.

use super::FarBTreeMap;
use super::node::Node;
use crate::error::FarError;
use crate::heap::{AccessMode, HeapRef, Scope};
use core::borrow::Borrow;
use core::cmp::Ordering;

/// The place of a key in a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NodePosition {
    /// The entry with this index has the key.
    Entry(usize),
    /// The key is not in the node. It belongs before the entry with this index: in the child with
    /// this index.
    Gap(usize),
}

/// An entry's place: for each node from the root on the index of the child below, for the last one
/// the index of the entry.
pub(super) struct PathIndices(pub(super) Vec<usize>);

impl PathIndices {
    /// Updates the place after a step at a level has moved entries. Returns the level below.
    fn shift(&mut self, level: usize, shift: Shift) -> usize {
        self.0[level] = shift.number;
        self.0[level + 1] += shift.by;
        if shift.without_root {
            self.0.remove(level);
            return level;
        }
        level + 1
    }
}

/// The new position of entries that were in a child.
struct Shift {
    /// The child's index now.
    number: usize,
    /// The index, in that child, of the child's former first entry.
    by: usize,
    /// Whether the parent was the root and is gone: the child is the root now.
    without_root: bool,
}

impl<K, V> Node<K, V> {
    pub(super) fn find<Q: Ord + ?Sized>(self, key: &Q) -> NodePosition
    where
        K: Borrow<Q>,
    {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low.midpoint(high);
            // SAFETY: the entry exists, and nobody changes keys.
            match unsafe { &*self.key(middle) }.borrow().cmp(key) {
                Ordering::Less => low = middle + 1,
                Ordering::Equal => return NodePosition::Entry(middle),
                Ordering::Greater => high = middle,
            }
        }
        NodePosition::Gap(low)
    }
}

impl<K: Ord + Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Makes room for a new key: in a leaf, at the index that the entry gets.
    pub(super) fn make_room(&mut self, scope: &Scope<'_>, key: &K) -> Result<(Node<K, V>, usize), FarError> {
        if self.heap_ref.is_none() {
            self.heap_ref = Some(HeapRef::of(scope));
        }
        if self.root.load().is_none() {
            let (slot, leaf) = Node::make(scope, 0)?;
            self.root.store(slot.word());
            self.height = 0;
            return Ok((leaf, 0));
        }
        let mut node = Node::load(scope, &self.root, self.height, AccessMode::Write)?;
        if node.is_full() {
            node = self.add_root(scope, node)?;
        }
        loop {
            let NodePosition::Gap(mut index) = node.find(key) else { unreachable!("the key is not in the tree") };
            if node.height == 0 {
                return Ok((node, index));
            }
            let mut child = Node::load(scope, node.child(index), node.height - 1, AccessMode::Write)?;
            if child.is_full() {
                split(scope, node, index, child)?;
                // SAFETY: the entry that came up exists.
                if unsafe { &*node.key(index) } < key {
                    index += 1;
                    child = Node::load(scope, node.child(index), node.height - 1, AccessMode::Write)?;
                }
            }
            node = child;
        }
    }

    /// Adds a root above the full one, which is split.
    fn add_root(&mut self, scope: &Scope<'_>, old: Node<K, V>) -> Result<Node<K, V>, FarError> {
        let (slot, root) = Node::make(scope, self.height + 1)?;
        let Some(old_slot) = self.root.load() else { unreachable!("there is a root") };
        root.set_child(0, old_slot);
        if let Err(error) = split(scope, root, 0, old) {
            // SAFETY: made above, and in no tree.
            unsafe { Node::<K, V>::free(scope.core, slot) };
            return Err(error);
        }
        self.root.store(slot.word());
        self.height += 1;
        Ok(root)
    }

    /// Takes an entry out. On an error, its place is still right, though other entries may have
    /// moved beside it. So it can be tried again.
    pub(super) fn take(&mut self, scope: &Scope<'_>, place: &mut PathIndices) -> Result<(K, V), FarError> {
        let mut node = Node::load(scope, &self.root, self.height, AccessMode::Write)?;
        let mut level = 0;
        loop {
            let index = place.0[level];
            if level + 1 < place.0.len() {
                let shift;
                (node, shift) = self.fill(scope, node, index)?;
                level = place.shift(level, shift);
                continue;
            }
            if node.height == 0 {
                // SAFETY: it exists, and the tree is ours.
                return Ok(unsafe { node.remove(index, 1) });
            }
            let [left, right] = self.children(scope, node, index)?;
            if left.can_give() {
                let entry = self.take_end(scope, left, true)?;
                // SAFETY: the entry exists; another one takes its place.
                return Ok(unsafe { replace(node, index, entry) });
            }
            if right.can_give() {
                let entry = self.take_end(scope, right, false)?;
                // SAFETY: as above.
                return Ok(unsafe { replace(node, index, entry) });
            }
            // Then the entry is in the middle of both.
            place.0.push(left.len());
            let without_root = self.merge(scope, node, index, left, right);
            level = place.shift(level, Shift { number: index, by: 0, without_root });
            node = left;
        }
    }

    /// Takes the last or the first entry out of a subtree whose root can give one.
    pub(super) fn take_end(&mut self, scope: &Scope<'_>, mut node: Node<K, V>, last: bool) -> Result<(K, V), FarError> {
        while node.height > 0 {
            (node, _) = self.fill(scope, node, if last { node.len() } else { 0 })?;
        }
        let index = if last { node.len() - 1 } else { 0 };
        // SAFETY: it exists, and the tree is ours.
        Ok(unsafe { node.remove(index, 1) })
    }

    /// Returns the children on both sides of an entry.
    fn children(&self, scope: &Scope<'_>, node: Node<K, V>, index: usize) -> Result<[Node<K, V>; 2], FarError> {
        let child = |index| Node::load(scope, node.child(index), node.height - 1, AccessMode::Write);
        Ok([child(index)?, child(index + 1)?])
    }

    /// Makes sure that an entry can be taken out of a child. Returns the child, or the one that it
    /// was merged into, and where its entries are.
    fn fill(&mut self, scope: &Scope<'_>, node: Node<K, V>, index: usize) -> Result<(Node<K, V>, Shift), FarError> {
        let same = Shift { number: index, by: 0, without_root: false };
        let child = Node::load(scope, node.child(index), node.height - 1, AccessMode::Write)?;
        if child.can_give() {
            return Ok((child, same));
        }
        if index > 0 {
            let [left, child] = self.children(scope, node, index - 1)?;
            if left.can_give() {
                let last = left.len() - 1;
                let moved = (left.height > 0).then(|| left.child(last + 1).load()).flatten();
                // SAFETY: the entries exist, and the child has room: it has the fewest that it may
                // have. The tree is ours.
                unsafe {
                    let entry = left.remove(last, 1);
                    let entry = replace(node, index - 1, entry);
                    child.insert(0, entry, moved, 0);
                }
                return Ok((child, Shift { by: 1, ..same }));
            }
        }
        if index < node.len() {
            let [child, right] = self.children(scope, node, index)?;
            if right.can_give() {
                let moved = (right.height > 0).then(|| right.child(0).load()).flatten();
                // SAFETY: as above.
                unsafe {
                    let entry = right.remove(0, 0);
                    let entry = replace(node, index, entry);
                    child.insert(child.len(), entry, moved, 1);
                }
                return Ok((child, same));
            }
        }
        let between = if index > 0 { index - 1 } else { index };
        let [left, right] = self.children(scope, node, between)?;
        let by = if between < index { left.len() + 1 } else { 0 };
        let without_root = self.merge(scope, node, between, left, right);
        Ok((left, Shift { number: between, by, without_root }))
    }

    /// Merges two children with the fewest entries and the entry between them. Removes the root if
    /// it has no entry left, and returns whether it did.
    fn merge(
        &mut self,
        scope: &Scope<'_>,
        node: Node<K, V>,
        index: usize,
        left: Node<K, V>,
        right: Node<K, V>,
    ) -> bool {
        let Some(gone) = node.child(index + 1).load() else { unreachable!("a tree names its nodes") };
        // SAFETY: twice the fewest and one are the most. The tree is ours, and the right one's
        // place is free afterwards.
        unsafe {
            let entry = node.remove(index, 1);
            let at = left.len();
            left.key(at).write(entry.0);
            left.value(at).write(entry.1);
            left.set_len(at + 1);
            right.move_tail(0, left);
            Node::<K, V>::free(scope.core, gone);
        }
        let without_root = node.len() == 0;
        if without_root {
            let (Some(old), Some(only)) = (self.root.load(), node.child(0).load()) else { unreachable!("as above") };
            self.root.store(only.word());
            self.height -= 1;
            // SAFETY: without an entry it was the root, and is in the tree no more.
            unsafe { Node::<K, V>::free(scope.core, old) };
        }
        without_root
    }
}

/// Splits a full child. The entry in its middle moves up to `index`.
fn split<K, V>(scope: &Scope<'_>, node: Node<K, V>, index: usize, child: Node<K, V>) -> Result<(), FarError> {
    let (slot, right) = Node::make(scope, child.height)?;
    let middle = child.entries_min();
    // SAFETY: the child is full, the new node is empty, and the parent has room: full ones were
    // split on the way. The middle entry is moved: the child is one shorter.
    unsafe {
        child.move_tail(middle + 1, right);
        let entry = (child.key(middle).read(), child.value(middle).read());
        child.set_len(middle);
        node.insert(index, entry, Some(slot), 1);
    }
    Ok(())
}

/// Replaces an entry. Returns the old one.
///
/// # Safety
/// The entry exists, and the tree is the caller's.
unsafe fn replace<K, V>(node: Node<K, V>, index: usize, (key, value): (K, V)) -> (K, V) {
    // SAFETY: passed on to the caller.
    unsafe { (node.key(index).replace(key), node.value(index).replace(value)) }
}
