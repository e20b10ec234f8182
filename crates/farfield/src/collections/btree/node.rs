//! Layout of a tree node in far memory: the number of entries, then keys, values, and in inner
//! nodes children.

use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope, SlotCell, SlotWord};
use core::marker::PhantomData;
use farfield_core::geometry::PAGE_BYTES;
use std::alloc::Layout;

/// A node that is near as long as a scope lasts.
pub(super) struct Node<K, V> {
    at: *mut u8,
    /// Levels below it; 0 for a leaf.
    pub(super) height: u32,
    holds: PhantomData<*mut (K, V)>,
}

impl<K, V> Clone for Node<K, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K, V> Copy for Node<K, V> {}

/// Layout of a kind of node, as byte offsets of its parts.
#[derive(Clone, Copy)]
pub(crate) struct NodeLayout {
    pub(crate) keys: usize,
    pub(crate) values: usize,
    pub(crate) children: usize,
    pub(crate) bytes: usize,
    /// Most entries: an odd number, so that a full node splits into two of the smallest allowed
    /// size and an entry.
    pub(crate) entries_max: usize,
}

impl NodeLayout {
    pub(crate) const fn of<K, V>(is_leaf: bool) -> NodeLayout {
        let child = if is_leaf { 0 } else { size_of::<SlotCell>() };
        let entry = size_of::<K>() + size_of::<V>() + child;
        // Alignment wastes at most this much.
        let fixed = 8 + child + align_of::<K>() + align_of::<V>();
        let fit = if entry == 0 || fixed >= PAGE_BYTES { 255 } else { (PAGE_BYTES - fixed) / entry };
        let fit = if fit < 5 {
            5
        } else if fit > 255 {
            255
        } else {
            fit
        };
        let entries_max = if fit.is_multiple_of(2) { fit - 1 } else { fit };
        let keys = 8usize.next_multiple_of(align_of::<K>());
        let values = (keys + entries_max * size_of::<K>()).next_multiple_of(align_of::<V>());
        let children = (values + entries_max * size_of::<V>()).next_multiple_of(8);
        NodeLayout { keys, values, children, bytes: children + (entries_max + 1) * child, entries_max }
    }
}

impl<K, V> Node<K, V> {
    const LEAF: NodeLayout = NodeLayout::of::<K, V>(true);
    const INNER: NodeLayout = NodeLayout::of::<K, V>(false);
    const ALIGN: usize = {
        assert!(
            align_of::<K>() <= PAGE_BYTES && align_of::<V>() <= PAGE_BYTES,
            "far values cannot be aligned to more than a page"
        );
        let items = if align_of::<K>() > align_of::<V>() { align_of::<K>() } else { align_of::<V>() };
        if items > 8 { items } else { 8 }
    };

    #[inline]
    fn shape(self) -> &'static NodeLayout {
        if self.height == 0 { const { &Self::LEAF } } else { const { &Self::INNER } }
    }

    /// Makes an empty node.
    pub(super) fn make(scope: &Scope<'_>, height: u32) -> Result<(SlotWord, Node<K, V>), FarError> {
        let bytes = if height == 0 { Self::LEAF.bytes } else { Self::INNER.bytes };
        let layout = Layout::from_size_align(bytes, Self::ALIGN);
        let (slot, at) = SlotWord::make(scope, layout.map_err(|_| FarError::TooLarge { bytes: bytes as u64 })?)?;
        let node = Node { at, height, holds: PhantomData };
        node.set_len(0);
        Ok((slot, node))
    }

    /// Returns the node at an address.
    pub(super) fn at(at: *mut u8, height: u32) -> Node<K, V> {
        Node { at, height, holds: PhantomData }
    }

    /// Brings the node near that a cell names.
    #[inline]
    pub(super) fn load(
        scope: &Scope<'_>,
        cell: &SlotCell,
        height: u32,
        mode: AccessMode,
    ) -> Result<Node<K, V>, FarError> {
        let Some(slot) = cell.load() else { unreachable!("a tree names its nodes") };
        Ok(Node { at: cell.address(scope, slot, mode)?, height, holds: PhantomData })
    }

    /// Returns the number of entries.
    #[inline]
    pub(super) fn len(self) -> usize {
        // SAFETY: a node begins with it.
        usize::from(u16::from_ne_bytes(unsafe { self.at.cast::<[u8; 2]>().read() }))
    }

    pub(super) fn set_len(self, len: usize) {
        debug_assert!(len <= self.entries_max());
        // SAFETY: as in `len`; a caller that changes a node has the tree for itself.
        unsafe { self.at.cast::<[u8; 2]>().write((len as u16).to_ne_bytes()) };
    }

    /// Returns the most entries that a node holds.
    pub(super) fn entries_max(self) -> usize {
        self.shape().entries_max
    }

    /// Returns the fewest entries that a node holds, except for a root.
    pub(super) fn entries_min(self) -> usize {
        self.entries_max() / 2
    }

    pub(super) fn is_full(self) -> bool {
        self.len() == self.entries_max()
    }

    /// Checks whether an entry can be taken out without falling below the minimum.
    pub(super) fn can_give(self) -> bool {
        self.len() > self.entries_min()
    }

    #[inline]
    pub(super) fn key(self, index: usize) -> *mut K {
        debug_assert!(index < self.entries_max());
        // SAFETY: inside the node, and aligned for keys.
        unsafe { self.at.add(self.shape().keys).cast::<K>().add(index) }
    }

    #[inline]
    pub(super) fn value(self, index: usize) -> *mut V {
        debug_assert!(index < self.entries_max());
        // SAFETY: inside the node, and aligned for values.
        unsafe { self.at.add(self.shape().values).cast::<V>().add(index) }
    }

    /// Returns the address of a child's cell; `index` goes up to the number of entries.
    #[inline]
    #[expect(clippy::cast_ptr_alignment, reason = "children are aligned to 8 bytes")]
    fn child_at(self, index: usize) -> *mut SlotCell {
        debug_assert!(self.height > 0 && index <= self.entries_max());
        // SAFETY: inside an inner node, and aligned for slots.
        unsafe { self.at.add(self.shape().children).cast::<SlotCell>().add(index) }
    }

    /// Returns the cell of a child that exists, which is valid as long as the node is near.
    #[inline]
    pub(super) fn child<'a>(self, index: usize) -> &'a SlotCell {
        assert!(index <= self.len());
        // SAFETY: an inner node has one more child than entries; cells are atomics. Nobody keeps it
        // longer than the node is near, which all callers see to: they use it at once.
        unsafe { &*self.child_at(index) }
    }

    pub(super) fn set_child(self, index: usize, slot: SlotWord) {
        // SAFETY: a place for a child; a caller that changes a node has the tree for itself.
        unsafe { self.child_at(index).write(SlotCell::new(slot)) };
    }

    /// Takes an entry out, and with it the child behind it (`behind` = 1) or before it (0).
    ///
    /// # Safety
    /// The entry exists, and the tree is the caller's alone. The entry is the caller's from now on.
    pub(super) unsafe fn remove(self, index: usize, behind: usize) -> (K, V) {
        let rest = self.len() - index - 1;
        // SAFETY: entries behind the one that is read move up by one, and children too.
        unsafe {
            let entry = (self.key(index).read(), self.value(index).read());
            self.key(index).copy_from(self.key(index).add(1), rest);
            self.value(index).copy_from(self.value(index).add(1), rest);
            if self.height > 0 {
                let child = self.child_at(index + behind);
                child.copy_from(child.add(1), rest + 1 - behind);
            }
            self.set_len(self.len() - 1);
            entry
        }
    }

    /// Puts an entry in, and in an inner node a child behind it (`behind` = 1) or before it (0).
    ///
    /// # Safety
    /// There is room, and the tree is the caller's alone.
    pub(super) unsafe fn insert(self, index: usize, (key, value): (K, V), child: Option<SlotWord>, behind: usize) {
        let rest = self.len() - index;
        // SAFETY: entries from `index` on move down by one, and children too.
        unsafe {
            self.key(index).add(1).copy_from(self.key(index), rest);
            self.value(index).add(1).copy_from(self.value(index), rest);
            self.key(index).write(key);
            self.value(index).write(value);
            if let Some(slot) = child {
                let place = self.child_at(index + behind);
                place.add(1).copy_from(place, rest + 1 - behind);
                place.write(SlotCell::new(slot));
            }
        }
        self.set_len(self.len() + 1);
    }

    /// Moves the entries from `from` on to the end of `target`. Their children move with them, also
    /// the one before the first of them.
    ///
    /// # Safety
    /// `target` has room for them, is of the same height, and the tree is the caller's alone.
    pub(super) unsafe fn move_tail(self, from: usize, target: Node<K, V>) {
        let (count, at) = (self.len() - from, target.len());
        // SAFETY: so many entries are here, and there is room; they are the target's from now on.
        unsafe {
            target.key(0).add(at).copy_from_nonoverlapping(self.key(0).add(from), count);
            target.value(0).add(at).copy_from_nonoverlapping(self.value(0).add(from), count);
            if self.height > 0 {
                target.child_at(at).copy_from_nonoverlapping(self.child_at(from), count + 1);
            }
        }
        target.set_len(at + count);
        self.set_len(from);
    }

    /// Frees the node's memory. Its entries were moved elsewhere before.
    ///
    /// # Safety
    /// The slot names a node that is no longer in the tree, and something keeps the heap alive.
    pub(super) unsafe fn free(core: &HeapInner, slot: SlotWord) {
        // SAFETY: passed on to the caller.
        unsafe { slot.free(core) };
    }
}
