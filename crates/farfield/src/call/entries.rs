//! Entries in the order of their keys, as functions read them: those of ordered maps and sets.
//!
//! All of a tree but its root's slot lies in far nodes, so a function at a server walks any tree
//! that it meets. A walk keeps the nodes on its way as pointers, and reads a leaf at a time.

use super::part::{ObjectRef, PartBytes};
use super::place::FarPlace;
use super::view_traits::FarView;
use crate::collections::NodeLayout;
use core::cmp::Ordering;
use core::fmt::Debug;
use core::marker::PhantomData;
use core::ops::{Bound, RangeBounds};
use farfield_wic::Fault;

/// The entries of a [`FarBTreeMap`](crate::FarBTreeMap), as a [`FarFunction`](crate::FarFunction) sees
/// them; those of a [`FarBTreeSet`](crate::FarBTreeSet) have values `()`. [`FarPlace::range`] and
/// [`FarPlace::get`] read them.
pub struct EntriesRef<'f, K: FarView, V: FarView> {
    root: Option<ObjectRef<'f>>,
    height: u32,
    len: usize,
    points: PhantomData<&'f (K, V)>,
}

impl<K: FarView, V: FarView> Clone for EntriesRef<'_, K, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K: FarView, V: FarView> Copy for EntriesRef<'_, K, V> {}

impl<K: FarView, V: FarView> Debug for EntriesRef<'_, K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "EntriesRef({} entries)", self.len)
    }
}

/// Trees are less high: each inner node has at least two children.
const HEIGHT_MAX: u32 = 63;

impl<'f, K: FarView, V: FarView> EntriesRef<'f, K, V> {
    pub(crate) const LEAF: NodeLayout = NodeLayout::of::<K, V>(true);
    pub(crate) const INNER: NodeLayout = NodeLayout::of::<K, V>(false);

    /// Makes one of a tree's root; `None` if no tree is so high.
    pub(crate) fn new(root: Option<ObjectRef<'f>>, height: u32, len: usize) -> Option<EntriesRef<'f, K, V>> {
        (height <= HEIGHT_MAX).then_some(EntriesRef { root, height, len, points: PhantomData })
    }

    /// Returns the number of entries, as the map says.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether there is no entry, as the map says.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Returns where a key lies, seen from a range: before it, in it, or beyond it.
pub(super) fn position<K: Ord>(range: &impl RangeBounds<K>, key: &K) -> Ordering {
    let is_before = match range.start_bound() {
        Bound::Included(start) => key < start,
        Bound::Excluded(start) => key <= start,
        Bound::Unbounded => false,
    };
    let is_beyond = match range.end_bound() {
        Bound::Included(end) => key > end,
        Bound::Excluded(end) => key >= end,
        Bound::Unbounded => false,
    };
    match (is_before, is_beyond) {
        (true, _) => Ordering::Less,
        (false, true) => Ordering::Greater,
        (false, false) => Ordering::Equal,
    }
}

/// A node of a tree, while it is read.
struct NodeBytes<'b, 'p, 'f, K, V> {
    part: &'b PartBytes<'p, 'f>,
    layout: NodeLayout,
    len: usize,
    holds: PhantomData<(K, V)>,
}

impl<'b, 'p, 'f, K: FarView, V: FarView> NodeBytes<'b, 'p, 'f, K, V> {
    /// # Safety
    /// In this process, the part is a node of a tree with these types, and has this layout.
    unsafe fn of(part: &'b PartBytes<'p, 'f>, layout: NodeLayout) -> Option<NodeBytes<'b, 'p, 'f, K, V>> {
        let mut len = [0; 2];
        // SAFETY: a node begins with the number of its entries.
        unsafe { part.copy(0, &mut len) }?;
        let len = usize::from(u16::from_ne_bytes(len));
        (len <= layout.entries_max).then_some(NodeBytes { part, layout, len, holds: PhantomData })
    }

    /// Returns the key of an entry.
    fn key(&self, index: usize) -> Option<K::View<'f>> {
        assert!(index < self.len);
        // SAFETY: a node has so many keys there.
        unsafe { self.part.value::<K>(self.layout.keys + index * size_of::<K>()) }
    }

    /// Returns an entry.
    fn entry(&self, index: usize) -> Option<(K::View<'f>, V::View<'f>)> {
        let key = self.key(index)?;
        // SAFETY: as above, and of values.
        Some((key, unsafe { self.part.value::<V>(self.layout.values + index * size_of::<V>()) }?))
    }

    /// Returns a child of an inner node, which has one more than entries.
    fn child(&self, index: usize) -> Option<ObjectRef<'f>> {
        assert!(index <= self.len);
        // SAFETY: as above, and of children.
        unsafe { self.part.object(self.layout.children + index * size_of::<u64>()) }
    }

    /// Returns the number of keys at the beginning of the node for which this holds.
    fn count_while(&self, holds: impl Fn(&K::View<'f>) -> bool) -> Option<usize> {
        let (mut low, mut high) = (0, self.len);
        while low < high {
            let middle = low.midpoint(high);
            if holds(&self.key(middle)?) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Some(low)
    }
}

/// A node on the way of a walk.
#[derive(Clone, Copy, Debug)]
struct Pending<'f> {
    node: ObjectRef<'f>,
    height: u32,
    next: NextInNode,
}

/// What a walk does in a node. A walk backwards does the same from the other end.
#[derive(Clone, Copy, Debug)]
enum NextInNode {
    /// Find the first entry that is not before the range.
    Seek,
    /// Begin with the first entry.
    Start,
    /// Go on with this entry of an inner node, and with the child behind it. Backwards: with the entry
    /// before the child of this number, and with the child before that.
    Entry(usize),
}

/// Numbers of the first two kinds in a place of a walk. Nodes have fewer entries.
const START: u16 = u16::MAX;
const SEEK: u16 = u16::MAX - 1;

/// Direction of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WalkDirection {
    Forwards,
    Backwards,
}

impl WalkDirection {
    /// Returns where a key lies, seen from a range in the direction of the walk: before it, in it, or
    /// beyond it.
    fn seen(self, position: Ordering) -> Ordering {
        if self == WalkDirection::Forwards { position } else { position.reverse() }
    }
}

/// Children that are fetched ahead.
const WINDOW: usize = 4;

/// A walk over entries in the order of their keys ([`FarPlace::range`]).
///
/// It reads a leaf at a time, of about a page.
pub struct EntryCursor<'f, P: FarPlace, K: FarView, V: FarView, B: Fn(&K::View<'f>) -> Ordering> {
    far: &'f P,
    map: EntriesRef<'f, K, V>,
    position: B,
    direction: WalkDirection,
    way: Vec<Pending<'f>>,
    entries: Vec<(K::View<'f>, V::View<'f>)>,
    /// The next one of those that were read.
    next: usize,
}

impl<'f, P: FarPlace, K: FarView, V: FarView, B: Fn(&K::View<'f>) -> Ordering> Debug for EntryCursor<'f, P, K, V, B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("EntryCursor").field("way", &self.way).finish_non_exhaustive()
    }
}

/// What a walk has found in a node.
struct NodeFound<'f> {
    /// The way on: first this node again, then a child.
    again: Option<Pending<'f>>,
    child: Option<Pending<'f>>,
    /// Entries of the range, if they are only counted.
    count: usize,
    is_over: bool,
    ahead: [Option<ObjectRef<'f>>; WINDOW],
}

impl<'f, P: FarPlace, K: FarView, V: FarView, B: Fn(&K::View<'f>) -> Ordering> EntryCursor<'f, P, K, V, B> {
    pub(super) fn new(far: &'f P, map: EntriesRef<'f, K, V>, position: B) -> EntryCursor<'f, P, K, V, B> {
        let root = map.root.map(|node| Pending { node, height: map.height, next: NextInNode::Seek });
        let (way, direction) = (root.into_iter().collect(), WalkDirection::Forwards);
        EntryCursor { far, map, position, direction, way, entries: Vec::new(), next: 0 }
    }

    /// Returns a walk over the same range that begins with its last entry.
    pub fn rev(self) -> EntryCursor<'f, P, K, V, B> {
        let direction =
            if self.direction == WalkDirection::Forwards { WalkDirection::Backwards } else { WalkDirection::Forwards };
        EntryCursor { direction, ..EntryCursor::new(self.far, self.map, self.position) }
    }

    /// Returns the next entry of the range, if there is one.
    ///
    /// Takes one step for each node, and one more for each whole 4 KiB of it.
    ///
    /// # Errors
    /// Those of [`FarPlace::follow`].
    pub async fn next(&mut self) -> Result<Option<(K::View<'f>, V::View<'f>)>, Fault> {
        loop {
            while let Some(entry) = self.entries.get(self.next) {
                self.next += 1;
                match self.direction.seen((self.position)(&entry.0)) {
                    Ordering::Less => {}
                    Ordering::Equal => return Ok(Some(*entry)),
                    Ordering::Greater => {
                        self.end();
                        return Ok(None);
                    }
                }
            }
            self.entries.clear();
            self.next = 0;
            let Some(pending) = self.way.last() else { return Ok(None) };
            self.visit(*pending, false).await?;
        }
    }

    /// Counts the entries of the range that are left. Takes the steps of a walk, and looks at few
    /// keys of each node.
    ///
    /// # Errors
    /// Those of [`FarPlace::follow`].
    pub async fn count(mut self) -> Result<usize, Fault> {
        let is_in = |entry: &&(K::View<'f>, V::View<'f>)| (self.position)(&entry.0).is_eq();
        let mut count = self.entries[self.next..].iter().filter(is_in).count();
        while let Some(pending) = self.way.last() {
            count += self.visit(*pending, true).await?;
        }
        Ok(count)
    }

    /// Returns where the walk is, if all that was read has been returned: for each node on the way, what
    /// it does there.
    pub(super) fn place(&self) -> Option<Vec<u16>> {
        let step = |pending: &Pending<'f>| match pending.next {
            NextInNode::Entry(index) => index as u16,
            NextInNode::Start => START,
            NextInNode::Seek => SEEK,
        };
        (self.next >= self.entries.len()).then(|| self.way.iter().map(step).collect())
    }

    /// Goes to a place of a walk over the same tree and range. Takes a step for each level.
    pub(super) async fn resume(&mut self, place: &[u16]) -> Result<(), Fault> {
        self.end();
        let (mut node, mut height) = (self.map.root, Some(self.map.height));
        for (level, step) in place.iter().enumerate() {
            let next = match *step {
                START => NextInNode::Start,
                SEEK => NextInNode::Seek,
                index => NextInNode::Entry(index.into()),
            };
            let pending = node.zip(height).map(|(node, height)| Pending { node, height, next });
            self.way.extend(pending);
            if level + 1 == place.len() && pending.is_some() {
                return Ok(());
            }
            // The next node on the way is the child behind the entry.
            node = match (pending, next) {
                (Some(Pending { node, height: 1.., .. }), NextInNode::Entry(child)) => {
                    let look = |part: &PartBytes<'_, 'f>| {
                        // SAFETY: as in `visit`.
                        let node = unsafe { NodeBytes::<K, V>::of(part, EntriesRef::<K, V>::INNER) }?;
                        Some(if child <= node.len { node.child(child) } else { None })
                    };
                    self.far.look(node.part(0, EntriesRef::<K, V>::INNER.bytes), look).await?
                }
                _ => None,
            };
            height = height.and_then(|height| height.checked_sub(1));
        }
        // A place that the tree does not have: only a server can say it.
        self.end();
        self.far.yield_now().await;
        Err(Fault::OutOfRange { offset: 0 })
    }

    fn end(&mut self) {
        self.way.clear();
        self.entries.clear();
        self.next = 0;
    }

    /// Reads the last node of the way, and takes what it has of the range. If that is only counted,
    /// returns the number. After an error, the node is still the last one.
    async fn visit(&mut self, pending: Pending<'f>, is_count: bool) -> Result<usize, Fault> {
        let layout = if pending.height == 0 { EntriesRef::<K, V>::LEAF } else { EntriesRef::<K, V>::INNER };
        let (position, direction, entries) = (&self.position, self.direction, &mut self.entries);
        let look = |part: &PartBytes<'_, 'f>| {
            // SAFETY: in this process, a tree names its nodes, and leaves have height 0. A place reads the
            // part that it was asked for (`FarPlace` is sealed).
            let node = unsafe { NodeBytes::<K, V>::of(part, layout) }?;
            match pending.height {
                0 => look_at_leaf(&node, pending, direction, position, is_count, entries),
                _ => look_at_inner(&node, pending, direction, position, is_count, entries),
            }
        };
        let found = self.far.look(pending.node.part(0, layout.bytes), look).await?;
        if found.is_over {
            self.way.clear();
            return Ok(found.count);
        }
        self.way.pop();
        self.way.extend(found.again.into_iter().chain(found.child));
        found.ahead.into_iter().flatten().for_each(|node| self.far.announce(node));
        Ok(found.count)
    }
}

fn look_at_leaf<'f, K: FarView, V: FarView>(
    node: &NodeBytes<'_, '_, 'f, K, V>,
    pending: Pending<'f>,
    direction: WalkDirection,
    position: &impl Fn(&K::View<'f>) -> Ordering,
    is_count: bool,
    entries: &mut Vec<(K::View<'f>, V::View<'f>)>,
) -> Option<NodeFound<'f>> {
    let mut found = NodeFound { again: None, child: None, count: 0, is_over: false, ahead: [None; WINDOW] };
    let is_sought = matches!(pending.next, NextInNode::Seek);
    let before = || node.count_while(|key| position(key).is_lt());
    let until = || node.count_while(|key| position(key).is_le());
    if is_count {
        // At the end at which the walk has come into the leaf, nothing is out of the range.
        let (start, end) = match direction {
            WalkDirection::Forwards => (if is_sought { before()? } else { 0 }, until()?),
            WalkDirection::Backwards => (before()?, if is_sought { until()? } else { node.len }),
        };
        found.count = end.saturating_sub(start);
        found.is_over = if direction == WalkDirection::Forwards { end < node.len } else { start > 0 };
        return Some(found);
    }
    match direction {
        WalkDirection::Forwards => {
            for index in if is_sought { before()? } else { 0 }..node.len {
                entries.push(node.entry(index)?);
            }
        }
        WalkDirection::Backwards => {
            for index in (0..if is_sought { until()? } else { node.len }).rev() {
                entries.push(node.entry(index)?);
            }
        }
    }
    Some(found)
}

fn look_at_inner<'f, K: FarView, V: FarView>(
    node: &NodeBytes<'_, '_, 'f, K, V>,
    pending: Pending<'f>,
    direction: WalkDirection,
    position: &impl Fn(&K::View<'f>) -> Ordering,
    is_count: bool,
    entries: &mut Vec<(K::View<'f>, V::View<'f>)>,
) -> Option<NodeFound<'f>> {
    let Pending { node: at, height, next } = pending;
    let mut found = NodeFound { again: None, child: None, count: 0, is_over: false, ahead: [None; WINDOW] };
    // An entry of the node, and the child that the walk comes to after it.
    let step = match (direction, next) {
        (WalkDirection::Forwards, NextInNode::Seek) => (None, node.count_while(|key| position(key).is_lt())?),
        (WalkDirection::Backwards, NextInNode::Seek) => (None, node.count_while(|key| position(key).is_le())?),
        (WalkDirection::Forwards, NextInNode::Start) => (None, 0),
        (WalkDirection::Backwards, NextInNode::Start) => (None, node.len),
        (WalkDirection::Forwards, NextInNode::Entry(index)) if index < node.len => (Some(index), index + 1),
        (WalkDirection::Backwards, NextInNode::Entry(index)) if (1..=node.len).contains(&index) => {
            (Some(index - 1), index - 1)
        }
        (_, NextInNode::Entry(_)) => return Some(found),
    };
    let (entry, child) = step;
    if let Some(index) = entry {
        match direction.seen(position(&node.key(index)?)) {
            Ordering::Greater => found.is_over = true,
            Ordering::Equal if is_count => found.count = 1,
            Ordering::Equal => entries.push(node.entry(index)?),
            Ordering::Less => {}
        }
    }
    let below = if matches!(next, NextInNode::Seek) { NextInNode::Seek } else { NextInNode::Start };
    found.again = Some(Pending { node: at, height, next: NextInNode::Entry(child) });
    found.child = Some(Pending { node: node.child(child)?, height: height - 1, next: below });
    if height == 1 && child.is_multiple_of(WINDOW) && !found.is_over {
        for (ahead, step) in found.ahead.iter_mut().zip(1..) {
            *ahead = match direction {
                WalkDirection::Forwards => Some(child + step).filter(|index| *index <= node.len),
                WalkDirection::Backwards => child.checked_sub(step),
            }
            .and_then(|index| node.child(index));
        }
    }
    Some(found)
}

/// Finds the value of a key.
pub(super) async fn get<'f, P: FarPlace, K: FarView, V: FarView>(
    far: &'f P,
    map: EntriesRef<'f, K, V>,
    order: impl Fn(&K::View<'f>) -> Ordering,
) -> Result<Option<V::View<'f>>, Fault> {
    let (mut next, mut height) = (map.root, map.height);
    while let Some(at) = next {
        let layout = if height == 0 { EntriesRef::<K, V>::LEAF } else { EntriesRef::<K, V>::INNER };
        let look = |part: &PartBytes<'_, 'f>| {
            // SAFETY: as in `EntryCursor::visit`.
            let node = unsafe { NodeBytes::<K, V>::of(part, layout) }?;
            let index = node.count_while(|key| order(key).is_lt())?;
            if index < node.len {
                let (key, value) = node.entry(index)?;
                if order(&key).is_eq() {
                    return Some((Some(value), None));
                }
            }
            Some((None, if height == 0 { None } else { Some(node.child(index)?) }))
        };
        match far.look(at.part(0, layout.bytes), look).await? {
            (Some(value), _) => return Ok(Some(value)),
            (None, child) => next = child,
        }
        height = height.saturating_sub(1);
    }
    Ok(None)
}
