//! Hints: keys that are looked up soon, entries that are used once, entries that are not needed
//! soon.

use super::item::EntryLayout;
use super::{FarMap, Item};
use crate::error::FarError;
use crate::heap::{AccessMode, Scope, SlotCell, SlotWord, StreamingHint};
use core::borrow::Borrow;
use core::hash::{BuildHasher, Hash};

impl<K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> FarMap<K, V, S> {
    /// Returns the value like [`FarMap::get`], with the hint that the entry will not be used again
    /// soon. If the entry has to be brought near, it is evicted first. The index is used by others,
    /// and stays.
    pub fn get_once<'a, Q>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.body.heap_ref.check(scope)?;
        let found = scope.run_streaming(|hint| self.locate_once(scope, self.hash(key), key, hint))?;
        // SAFETY: as in `get_key_value`.
        Ok(found.map(|at| unsafe { EntryLayout::<K, V>::value(at) }))
    }

    /// Returns the value like [`FarMap::get_once`], for a task: other tasks run while index and
    /// entry are fetched.
    pub async fn fetch_once<'a, Q>(&'a self, scope: &'a Scope<'_>, key: &Q) -> Result<Option<&'a V>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.body.heap_ref.check(scope)?;
        let hash = self.hash(key);
        let look = async |hint: &StreamingHint| scope.retry(|| self.locate_once(scope, hash, key, hint)).await;
        let found = scope.fetch_streaming(look).await?;
        // SAFETY: as in `get_key_value`.
        Ok(found.map(|at| unsafe { EntryLayout::<K, V>::value(at) }))
    }

    /// [`FarMap::locate_hash`] for an entry that is used once.
    fn locate_once<Q>(
        &self,
        scope: &Scope<'_>,
        hash: u32,
        key: &Q,
        hint: &StreamingHint,
    ) -> Result<Option<*mut u8>, FarError>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let address = |cell: &SlotCell, slot: SlotWord| {
            slot.note(hint, scope);
            cell.address(scope, slot, AccessMode::Read)
        };
        let _brief = scope.begin_transient();
        let found = scope.with_room(|| {
            // SAFETY: the index names entries of this map.
            self.body.table.find_by(scope, hash, address, |at, _| unsafe { Self::is_key(key, at) })
        })?;
        if found.is_some() {
            scope.mark_used();
        }
        Ok(found.map(|(_, at)| at))
    }

    /// Begins to bring entries near whose keys will be looked up soon, and does not wait. Returns
    /// the number of pages (or small entries of the [object plane](crate::Plane::Object)) that are
    /// on their way now. This is a hint: entries that are near, or for which there is no room, are
    /// passed over. If the index is far, the part of it that has the key comes first, instead of
    /// the entry.
    ///
    /// ```
    /// # use farfield::{FarMap, Heap};
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let ages = FarMap::<str, u32>::new(&heap)?;
    /// ages.insert(&heap.enter(), "Ada", 36)?;
    /// let scope = heap.enter();
    /// ages.prefetch(&scope, ["Ada", "Bob"]); // something else to do meanwhile
    /// assert_eq!(ages.get(&scope, "Ada")?, Some(&36));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn prefetch<'key, Q>(&self, scope: &Scope<'_>, keys: impl IntoIterator<Item = &'key Q>) -> usize
    where
        K: Borrow<Q>,
        Q: Hash + ?Sized + 'key,
    {
        // An entry that the index names now lives as long as the scope.
        let _held = scope.hold();
        let mut numbers = Vec::new();
        if self.body.heap_ref.check(scope).is_ok() {
            keys.into_iter().for_each(|key| self.body.table.numbers(scope, self.hash(key), &mut numbers));
        }
        scope.core.prefetch(scope.record, numbers) as usize
    }

    /// Marks the entry of this key as not needed soon: it is evicted before others.
    pub fn cold<Q>(&self, scope: &Scope<'_>, key: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + ?Sized,
    {
        // As in `prefetch`.
        let _held = scope.hold();
        let mut numbers = Vec::new();
        if self.body.heap_ref.check(scope).is_ok() {
            self.body.table.numbers(scope, self.hash(key), &mut numbers);
        }
        numbers.into_iter().for_each(|number| scope.core.mark_cold(scope.core.first_page + number));
    }
}
