//! Many look-ups at a time.

use super::item::EntryLayout;
use super::{FarMap, Item};
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};
use core::borrow::Borrow;
use core::hash::{BuildHasher, Hash};

impl<K: Item + ?Sized + Hash + Eq, V: Item + ?Sized, S: BuildHasher> FarMap<K, V, S> {
    /// Returns the values of many keys, in their order. This is faster than one look-up after the
    /// other, also where everything is near. A look-up is a chain of loads that depend on each
    /// other (bucket, slot, entry), and here those of several keys overlap. Far pages of all keys
    /// are fetched at the same time, too. The scope must be able to hold all values that are found
    /// ([`FarError::NearFull`]).
    ///
    /// ```
    /// # use farfield::{FarMap, Heap};
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let ages = FarMap::<str, u32>::new(&heap)?;
    /// ages.insert(&heap.enter(), "Ada", 36)?;
    /// let scope = heap.enter();
    /// assert_eq!(ages.get_many(&scope, ["Ada", "Bob"])?, [Some(&36), None]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// References end with their scope:
    ///
    /// ```compile_fail,E0505
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// # let ages: farfield::FarMap<str, u32> = farfield::FarMap::new(&heap).unwrap();
    /// let scope = heap.enter();
    /// let found = ages.get_many(&scope, ["Ada"]).unwrap();
    /// drop(scope); // error: cannot move out of `scope` because it is borrowed
    /// println!("{found:?}");
    /// ```
    pub fn get_many<'a, 'key, Q>(
        &'a self,
        scope: &'a Scope<'_>,
        keys: impl IntoIterator<Item = &'key Q>,
    ) -> Result<Vec<Option<&'a V>>, FarError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized + 'key,
    {
        self.body.heap_ref.check(scope)?;
        let keys: Vec<(u32, &Q)> = keys.into_iter().map(|key| (self.hash(key), key)).collect();
        let look_up = |(hash, key): &(u32, &Q)| {
            // SAFETY: as in `get_key_value`.
            Ok(self
                .locate_hash(scope, *hash, *key, AccessMode::Read)?
                .map(|at| unsafe { EntryLayout::<K, V>::value(at) }))
        };
        scope.look_up_many(&keys, |some| self.load_ahead(scope, some), look_up)
    }

    /// Prefetches for a few look-ups in rounds: buckets, then slots, then entries. Each load has
    /// the whole round of the others to complete.
    fn load_ahead<Q: ?Sized>(&self, scope: &Scope<'_>, keys: &[(u32, &Q)]) {
        let table = &self.body.table;
        keys.iter().for_each(|(hash, _)| table.load_ahead(*hash));
        let slots = || keys.iter().filter_map(|(hash, _)| table.guess(scope, *hash));
        slots().for_each(|slot| slot.load_ahead(scope));
        slots().for_each(|slot| slot.load_page_ahead(scope));
    }
}
