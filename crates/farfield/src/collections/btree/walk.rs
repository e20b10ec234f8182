//! Walking through a tree in order.

use super::At;
use super::node::Node;
use super::tree::{NodePosition, PathIndices};
use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope, SlotCell, SlotWord};
use core::borrow::Borrow;

/// An entry's place: the nodes from the root to its node, each with the index of the child below,
/// the last with the index of the entry. An empty path is the place behind the last entry. Valid as
/// long as the tree is not changed; nodes may be evicted and come back.
#[derive(Clone, Debug)]
pub(super) struct BTreePath {
    steps: Vec<(SlotWord, usize)>,
    /// Height of the last node.
    height: u32,
    /// A bit for each node of the path: whether it was [new](Scope::is_new) when the path came to
    /// it. Bits below the last node are left over from earlier.
    new: u64,
}

/// Children that are fetched ahead.
const WINDOW: usize = 4;

impl BTreePath {
    pub(super) fn nowhere() -> BTreePath {
        BTreePath { steps: Vec::new(), height: 0, new: 0 }
    }

    /// Checks whether both are the same place.
    pub(super) fn is(&self, other: &BTreePath, core: &HeapInner) -> bool {
        match (self.steps.last(), other.steps.last()) {
            (Some((one, index)), Some((two, other))) => one.is(*two, core) && index == other,
            (one, two) => one.is_none() && two.is_none(),
        }
    }

    /// Returns the last node of the path and the index of the entry.
    pub(super) fn node<K, V>(&self, scope: &Scope<'_>) -> Result<Option<At<K, V>>, FarError> {
        let Some((slot, index)) = self.steps.last() else { return Ok(None) };
        Ok(Some((Node::at(slot.address(scope)?, self.height), *index)))
    }

    /// Returns the last node and the index of the entry. The node is near as long as the scope
    /// lasts, and may be changed if `mode` is `AccessMode::Write`.
    pub(super) fn entry<K, V>(&self, scope: &Scope<'_>, mode: AccessMode) -> Result<Option<At<K, V>>, FarError> {
        let Some((slot, index)) = self.steps.last() else { return Ok(None) };
        let address = scope.with_room(|| SlotCell::new(*slot).address(scope, *slot, mode))?;
        scope.mark_used();
        Ok(Some((Node::at(address, self.height), *index)))
    }

    /// Notes whether a node below the last one, which is used next, is new.
    fn come_to(&mut self, slot: SlotWord, scope: &Scope<'_>) {
        let bit = 1 << self.steps.len();
        self.new = self.new & !bit | if slot.is_new(scope) { bit } else { 0 };
    }

    /// Marks nodes that the walk has left, on its way from here to `next`: those that were new are
    /// evicted first.
    pub(super) fn leave_for(&self, next: &BTreePath, core: &HeapInner) {
        for (depth, (slot, _)) in self.steps.iter().enumerate() {
            let is_left = next.steps.get(depth).is_none_or(|(other, _)| !other.is(*slot, core));
            if is_left && self.new & 1 << depth != 0 {
                slot.mark_cold(core);
            }
        }
    }

    /// Returns the place without its nodes.
    pub(super) fn numbers(&self) -> PathIndices {
        PathIndices(self.steps.iter().map(|(_, number)| *number).collect())
    }

    /// Returns the path to the first or the last entry.
    pub(super) fn end<K, V>(
        root: Option<SlotWord>,
        height: u32,
        scope: &Scope<'_>,
        last: bool,
    ) -> Result<BTreePath, FarError> {
        let mut path = BTreePath::nowhere();
        let Some(root) = root else { return Ok(path) };
        path.go_down::<K, V>(root, height, scope, last)?;
        let is_empty = path.node::<K, V>(scope)?.is_none_or(|(node, _)| node.len() == 0);
        Ok(if is_empty { BTreePath::nowhere() } else { path })
    }

    /// Extends the path from a subtree's root to its first or last entry, which is in a leaf.
    fn go_down<K, V>(
        &mut self,
        mut slot: SlotWord,
        mut height: u32,
        scope: &Scope<'_>,
        last: bool,
    ) -> Result<(), FarError> {
        loop {
            self.come_to(slot, scope);
            let node = Node::<K, V>::at(slot.address(scope)?, height);
            self.height = height;
            if height == 0 {
                self.steps.push((slot, if last { node.len().saturating_sub(1) } else { 0 }));
                return Ok(());
            }
            let index = if last { node.len() } else { 0 };
            self.steps.push((slot, index));
            (slot, height) = (child(node, index), height - 1);
        }
    }

    /// Returns the path to the first entry that is not before a key, or, if `behind`, to the first
    /// entry after it.
    pub(super) fn to<K: Borrow<Q>, V, Q: Ord + ?Sized>(
        root: Option<SlotWord>,
        height: u32,
        scope: &Scope<'_>,
        key: &Q,
        behind: bool,
    ) -> Result<BTreePath, FarError> {
        let mut path = BTreePath::nowhere();
        let Some(mut slot) = root else { return Ok(path) };
        path.height = height;
        loop {
            path.come_to(slot, scope);
            let node = Node::<K, V>::at(slot.address(scope)?, path.height);
            match node.find(key) {
                NodePosition::Entry(index) => {
                    path.steps.push((slot, index));
                    if behind {
                        path.advance::<K, V>(scope, false)?;
                    }
                    return Ok(path);
                }
                NodePosition::Gap(index) => {
                    path.steps.push((slot, index));
                    if path.height == 0 {
                        path.come_up::<K, V>(scope)?;
                        return Ok(path);
                    }
                    (slot, path.height) = (child(node, index), path.height - 1);
                }
            }
        }
    }

    /// Goes from behind the last entry of a node up to the entry that follows it, in a node above.
    fn come_up<K, V>(&mut self, scope: &Scope<'_>) -> Result<(), FarError> {
        while let Some((slot, index)) = self.steps.last() {
            if *index < Node::<K, V>::at(slot.address(scope)?, self.height).len() {
                return Ok(());
            }
            self.steps.pop();
            self.height += 1;
        }
        self.height = 0;
        Ok(())
    }

    /// Goes to the entry behind this one. On an error it stays here. `ahead`: prefetches leaves
    /// that come next.
    pub(super) fn advance<K, V>(&mut self, scope: &Scope<'_>, ahead: bool) -> Result<(), FarError> {
        let Some((node, index)) = self.node::<K, V>(scope)? else { return Ok(()) };
        if node.height == 0 && index + 1 < node.len() {
            if let Some((_, place)) = self.steps.last_mut() {
                *place = index + 1;
            }
            return Ok(());
        }
        let mut path = self.clone();
        if let Some((_, place)) = path.steps.last_mut() {
            *place = index + 1;
        }
        if node.height > 0 {
            let height = node.height - 1;
            if ahead && height == 0 && (index + 1).is_multiple_of(WINDOW) {
                let children =
                    (index + 2..=node.len()).take(WINDOW).map(|index| child(node, index).parts(scope.core).0);
                scope.core.prefetch(scope.record, children);
            }
            path.go_down::<K, V>(child(node, index + 1), height, scope, false)?;
        } else {
            path.come_up::<K, V>(scope)?;
        }
        *self = path;
        Ok(())
    }

    /// Returns the path to the entry before this one, which exists.
    pub(super) fn previous<K, V>(
        &self,
        root: Option<SlotWord>,
        height: u32,
        scope: &Scope<'_>,
    ) -> Result<BTreePath, FarError> {
        let mut path = self.clone();
        let Some((node, index)) = path.node::<K, V>(scope)? else {
            return BTreePath::end::<K, V>(root, height, scope, true);
        };
        if node.height > 0 {
            path.go_down::<K, V>(child(node, index), node.height - 1, scope, true)?;
            return Ok(path);
        }
        while let Some((_, index)) = path.steps.last_mut() {
            if *index > 0 {
                *index -= 1;
                return Ok(path);
            }
            path.steps.pop();
            path.height += 1;
        }
        Ok(BTreePath::nowhere())
    }
}

fn child<K, V>(node: Node<K, V>, index: usize) -> SlotWord {
    let Some(slot) = node.child(index).load() else { unreachable!("a tree names its nodes") };
    slot
}
