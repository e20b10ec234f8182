//! Walking through a map while others change it.

use super::FarMap;
use super::item::{EntryLayout, Item};
use crate::error::FarError;
use crate::heap::{Scope, SlotWord};
use core::hash::{BuildHasher, Hash};

/// A walk over the entries of a [`FarMap`], made by [`FarMap::walk`].
///
/// An entry is met exactly once if it is in the map during the whole walk, even if other entries
/// are added or removed meanwhile. Each step may use another scope, so a walk holds nothing near
/// for long.
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// # let map: farfield::FarMap<u32, u32> = farfield::FarMap::new(&heap).unwrap();
/// let scope = heap.enter();
/// let some = map.walk().next(&scope).unwrap();
/// drop(scope); // error: cannot move out of `scope` because it is borrowed
/// println!("{some:?}");
/// ```
pub struct Walk<'map, K: Item + ?Sized, V: Item + ?Sized, S> {
    map: &'map FarMap<K, V, S>,
    /// Position among the reversed hashes.
    at: Option<u32>,
    slots: Vec<SlotWord>,
    /// The position up to which entries were fetched ahead, and the number of buckets until then.
    ahead: Option<u32>,
    buckets_ahead: usize,
}

/// Buckets whose entries are fetched ahead, at most.
const WINDOW: usize = 16;

impl<'map, K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> Walk<'map, K, V, S> {
    pub(super) fn new(map: &'map FarMap<K, V, S>, at: u32) -> Self {
        Walk { map, at: Some(at), slots: Vec::new(), ahead: None, buckets_ahead: 0 }
    }

    /// Returns the entries of the next bucket that has some; `None` at the end. After an error the
    /// same step can be tried again.
    pub fn next<'a>(&mut self, scope: &'a Scope<'_>) -> Result<Option<Vec<(&'a K, &'a V)>>, FarError>
    where
        'map: 'a,
    {
        self.map.body.heap_ref.check(scope)?;
        let _brief = scope.begin_transient();
        let addresses = self.step(scope, |slots| slots.iter().map(|slot| slot.address(scope)).collect())?;
        let Some(addresses) = addresses else { return Ok(None) };
        scope.mark_used();
        // SAFETY: as in `FarMap::get_key_value`.
        let view = |at: *mut u8| unsafe { (EntryLayout::<K, V>::key(at), EntryLayout::<K, V>::value(at)) };
        Ok(Some(addresses.into_iter().map(view).collect()))
    }

    /// Returns the slots of the entries of the next bucket that has some. The entries may be far.
    #[cfg(feature = "serde")]
    pub(super) fn next_slots(&mut self, scope: &Scope<'_>) -> Result<Option<Vec<SlotWord>>, FarError> {
        self.step(scope, |slots| Ok(slots.to_vec()))
    }

    /// Applies `find` to the entries of the next bucket that has some, and returns its result;
    /// `None` at the end.
    fn step<R>(
        &mut self,
        scope: &Scope<'_>,
        mut find: impl FnMut(&[SlotWord]) -> Result<Vec<R>, FarError>,
    ) -> Result<Option<Vec<R>>, FarError> {
        while let Some(at) = self.at {
            self.go_ahead(scope, at);
            let (next, found) = scope.with_room(|| {
                let next = self.map.body.table.entries_at(scope, at, &mut self.slots)?;
                Ok((next, find(&self.slots)?))
            })?;
            self.at = next;
            self.buckets_ahead = self.buckets_ahead.saturating_sub(1);
            if !found.is_empty() {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Begins to bring the entries of the next buckets, if the index is near, so that reading it
    /// does not wait.
    fn go_ahead(&mut self, scope: &Scope<'_>, at: u32) {
        let table = &self.map.body.table;
        if self.buckets_ahead > WINDOW / 2 || !table.is_near() {
            return;
        }
        if self.buckets_ahead == 0 {
            self.ahead = Some(at);
        }
        // An entry that the index names now lives as long as the scope.
        let _held = scope.hold();
        let mut numbers = Vec::new();
        while self.buckets_ahead < WINDOW
            && let Some(ahead) = self.ahead
            && let Ok(next) = table.entries_at(scope, ahead, &mut self.slots)
        {
            numbers.extend(self.slots.iter().map(|slot| slot.parts(scope.core).0));
            self.ahead = next;
            self.buckets_ahead += 1;
        }
        if !numbers.is_empty() {
            scope.core.prefetch(scope.record, numbers);
        }
    }
}

impl<K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> FarMap<K, V, S> {
    /// Puts the slots of the entries of the bucket at a position into `slots`. Returns the next position.
    pub(crate) fn slots_at(
        &self,
        scope: &Scope<'_>,
        position: u32,
        slots: &mut Vec<SlotWord>,
    ) -> Result<Option<u32>, FarError> {
        self.body.heap_ref.check(scope)?;
        let _brief = scope.begin_transient();
        scope.with_room(|| self.body.table.entries_at(scope, position, slots))
    }
}

impl<K: Item + ?Sized, V: Item + ?Sized, S> core::fmt::Debug for Walk<'_, K, V, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Walk(at {:?})", self.at)
    }
}
