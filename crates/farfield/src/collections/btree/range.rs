//! Iterators over entries in order, from either end.

use super::walk::BTreePath;
use super::{At, FarBTreeMap};
use crate::error::FarError;
use crate::heap::{AccessMode, Scope, SlotWord};
use core::borrow::Borrow;
use core::marker::PhantomData;
use core::ops::RangeBounds;

impl<K: Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Iterates over all entries in order, from either end. All that it has passed stays near as
    /// long as the scope lasts; for long walks there is [`FarBTreeMap::for_each`].
    pub fn iter<'a>(&'a self, scope: &'a Scope<'a>) -> Result<RangeIter<'a, K, V>, FarError> {
        let ends = Ends::new(self, scope, self.end_path(scope, false)?, BTreePath::nowhere(), AccessMode::Read);
        Ok(RangeIter { ends, map: PhantomData })
    }

    /// Iterates over all entries in order, from either end, to change values. For long walks there
    /// is [`FarBTreeMap::for_each_mut`].
    pub fn iter_mut<'a>(&'a mut self, scope: &'a Scope<'a>) -> Result<RangeIterMut<'a, K, V>, FarError> {
        let ends = Ends::new(self, scope, self.end_path(scope, false)?, BTreePath::nowhere(), AccessMode::Write);
        Ok(RangeIterMut { ends, map: PhantomData })
    }

    /// Iterates over all keys in order, from either end, as [`FarBTreeMap::iter`].
    pub fn keys<'a>(
        &'a self,
        scope: &'a Scope<'a>,
    ) -> Result<impl DoubleEndedIterator<Item = Result<&'a K, FarError>>, FarError> {
        Ok(self.iter(scope)?.map(|entry| entry.map(|(key, _)| key)))
    }

    /// Iterates over all values in the order of their keys, from either end, as
    /// [`FarBTreeMap::iter`].
    pub fn values<'a>(
        &'a self,
        scope: &'a Scope<'a>,
    ) -> Result<impl DoubleEndedIterator<Item = Result<&'a V, FarError>>, FarError> {
        Ok(self.iter(scope)?.map(|entry| entry.map(|(_, value)| value)))
    }

    /// Iterates over all values in the order of their keys, from either end, to change them: see
    /// [`FarBTreeMap::iter_mut`].
    pub fn values_mut<'a>(
        &'a mut self,
        scope: &'a Scope<'a>,
    ) -> Result<impl DoubleEndedIterator<Item = Result<&'a mut V, FarError>>, FarError> {
        Ok(self.iter_mut(scope)?.map(|entry| entry.map(|(_, value)| value)))
    }
}

impl<K: Ord + Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Iterates over the entries with keys in a range, in order, from either end.
    ///
    /// # Panics
    /// Like std, if the start of the range is greater than its end, or both are equal and excluded.
    pub fn range<'a, Q, R>(&'a self, scope: &'a Scope<'a>, range: R) -> Result<RangeIter<'a, K, V>, FarError>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
        R: RangeBounds<Q>,
    {
        Ok(RangeIter { ends: self.ends(scope, range, AccessMode::Read)?, map: PhantomData })
    }

    /// Iterates over the entries with keys in a range, in order, from either end, to change values.
    ///
    /// ```
    /// # use farfield::{FarBTreeMap, Heap};
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// # let scope = heap.enter();
    /// let mut prices = FarBTreeMap::new();
    /// for day in 1..=31 {
    ///     prices.insert(&scope, day, 100)?;
    /// }
    /// for price in prices.range_mut(&scope, 24..=26)? {
    ///     *price?.1 /= 2;
    /// }
    /// assert_eq!(prices.get(&scope, &25)?, Some(&50));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    /// Like std, if the start of the range is greater than its end, or both are equal and excluded.
    pub fn range_mut<'a, Q, R>(&'a mut self, scope: &'a Scope<'a>, range: R) -> Result<RangeIterMut<'a, K, V>, FarError>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
        R: RangeBounds<Q>,
    {
        Ok(RangeIterMut { ends: self.ends(scope, range, AccessMode::Write)?, map: PhantomData })
    }

    fn ends<'a, Q, R>(&self, scope: &'a Scope<'a>, range: R, mode: AccessMode) -> Result<Ends<'a, K, V>, FarError>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
        R: RangeBounds<Q>,
    {
        use core::ops::Bound::{Excluded, Included, Unbounded};
        self.check(scope)?;
        match (range.start_bound(), range.end_bound()) {
            (Excluded(start), Excluded(end)) if start == end => panic!("range start and end are equal and excluded"),
            (Included(start) | Excluded(start), Included(end) | Excluded(end)) if start > end => {
                panic!("range start is greater than range end")
            }
            _ => {}
        }
        let front = match range.start_bound() {
            Included(start) => self.path_to(scope, start, false)?,
            Excluded(start) => self.path_to(scope, start, true)?,
            Unbounded => self.end_path(scope, false)?,
        };
        let back = match range.end_bound() {
            Included(end) => self.path_to(scope, end, true)?,
            Excluded(end) => self.path_to(scope, end, false)?,
            Unbounded => BTreePath::nowhere(),
        };
        Ok(Ends::new(self, scope, front, back, mode))
    }

    /// Returns the place of the first entry that is not before a key, or, if `behind`, of the first
    /// entry after it.
    pub(super) fn path_to<Q: Ord + ?Sized>(
        &self,
        scope: &Scope<'_>,
        key: &Q,
        behind: bool,
    ) -> Result<BTreePath, FarError>
    where
        K: Borrow<Q>,
    {
        let _brief = scope.begin_transient();
        scope.with_room(|| BTreePath::to::<K, V, Q>(self.root.load(), self.height, scope, key, behind))
    }
}

/// The rest of a range. No entry is given out twice, and the tree is not changed meanwhile.
struct Ends<'a, K, V> {
    root: Option<SlotWord>,
    height: u32,
    scope: &'a Scope<'a>,
    front: BTreePath,
    /// The place behind the last entry.
    back: BTreePath,
    mode: AccessMode,
    passed: usize,
    failed: bool,
    /// Whether nodes that were brought near for this walk are evicted first when it has passed
    /// them.
    once: bool,
    gives: PhantomData<fn() -> At<K, V>>,
}

impl<'a, K: Send + 'static, V: Send + 'static> Ends<'a, K, V> {
    fn new(map: &FarBTreeMap<K, V>, scope: &'a Scope<'a>, front: BTreePath, back: BTreePath, mode: AccessMode) -> Self {
        let (root, height) = (map.root.load(), map.height);
        Ends { root, height, scope, front, back, mode, passed: 0, failed: false, once: false, gives: PhantomData }
    }

    /// Takes the next entry from one end, and moves that end.
    fn take(&mut self, from_back: bool) -> Result<Option<At<K, V>>, FarError> {
        let scope = self.scope;
        if self.failed || self.front.is(&self.back, scope.core) {
            // The walk leaves the nodes of both ends.
            self.pass(&self.front, &BTreePath::nowhere());
            self.pass(&self.back, &BTreePath::nowhere());
            return Ok(None);
        }
        if from_back {
            let next = scope.with_room(|| self.back.previous::<K, V>(self.root, self.height, scope))?;
            let before = core::mem::replace(&mut self.back, next);
            self.pass(&before, &self.back);
            return self.back.entry(scope, self.mode);
        }
        let found = self.front.entry(scope, self.mode)?;
        self.passed += 1;
        let before = self.once.then(|| self.front.clone());
        self.front.advance::<K, V>(scope, self.passed > 1)?;
        if let Some(before) = before {
            self.pass(&before, &self.front);
        }
        Ok(found)
    }

    /// Marks nodes that one end of the walk has left, if the walk uses them once.
    fn pass(&self, before: &BTreePath, now: &BTreePath) {
        if self.once {
            before.leave_for(now, self.scope.core);
        }
    }

    fn item(&mut self, from_back: bool) -> Option<Result<At<K, V>, FarError>> {
        let item = self.take(from_back);
        self.failed |= item.is_err();
        item.transpose()
    }
}

/// An iterator over entries of a map in order. See [`FarBTreeMap::range`].
pub struct RangeIter<'a, K: Send + 'static, V: Send + 'static> {
    ends: Ends<'a, K, V>,
    map: PhantomData<&'a FarBTreeMap<K, V>>,
}

/// An iterator over entries of a map in order, to change values. See [`FarBTreeMap::range_mut`].
pub struct RangeIterMut<'a, K: Send + 'static, V: Send + 'static> {
    ends: Ends<'a, K, V>,
    map: PhantomData<&'a mut FarBTreeMap<K, V>>,
}

impl<'a, K: Send + 'static, V: Send + 'static> RangeIter<'a, K, V> {
    /// Hints that the nodes that this walk brings near will not be used again soon: they are
    /// evicted first, and nodes that were near stay.
    pub fn once(mut self) -> Self {
        self.ends.once = true;
        self
    }

    fn item(&mut self, from_back: bool) -> Option<Result<(&'a K, &'a V), FarError>> {
        let item = self.ends.item(from_back)?;
        // SAFETY: as in `FarBTreeMap::get_key_value`.
        Some(item.map(|(node, index)| unsafe { (&*node.key(index), &*node.value(index)) }))
    }
}

impl<'a, K: Send + 'static, V: Send + 'static> RangeIterMut<'a, K, V> {
    /// Hints that the nodes that this walk brings near will not be used again soon: they are
    /// evicted first, and nodes that were near stay.
    pub fn once(mut self) -> Self {
        self.ends.once = true;
        self
    }

    fn item(&mut self, from_back: bool) -> Option<Result<(&'a K, &'a mut V), FarError>> {
        let item = self.ends.item(from_back)?;
        // SAFETY: as in `FarBTreeMap::get_mut`; no entry is given out twice.
        Some(item.map(|(node, index)| unsafe { (&*node.key(index), &mut *node.value(index)) }))
    }
}

impl<'a, K: Send + 'static, V: Send + 'static> Iterator for RangeIter<'a, K, V> {
    type Item = Result<(&'a K, &'a V), FarError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.item(false)
    }
}

impl<K: Send + 'static, V: Send + 'static> DoubleEndedIterator for RangeIter<'_, K, V> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.item(true)
    }
}

impl<'a, K: Send + 'static, V: Send + 'static> Iterator for RangeIterMut<'a, K, V> {
    type Item = Result<(&'a K, &'a mut V), FarError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.item(false)
    }
}

impl<K: Send + 'static, V: Send + 'static> DoubleEndedIterator for RangeIterMut<'_, K, V> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.item(true)
    }
}

impl<K: Send + 'static, V: Send + 'static> core::fmt::Debug for RangeIter<'_, K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("RangeIter")
    }
}

impl<K: Send + 'static, V: Send + 'static> core::fmt::Debug for RangeIterMut<'_, K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("RangeIterMut")
    }
}
