//! Snapshots of maps, with entries in any order. Other threads may read the map meanwhile. If they
//! change its number of entries, the snapshot fails.

use super::item::EntryLayout;
use super::{FarMap, Item, Source};
use crate::heap::Scope;
use crate::snapshot::{not_restored, not_written, with_target};
use core::fmt;
use core::hash::{BuildHasher, Hash};
use core::marker::PhantomData;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::{Error as _, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A key or a value of a map that can be restored from a snapshot.
pub trait Restored: Item {
    /// The type that is read from the snapshot: `T` itself; `Vec<u8>` and `String` for `[u8]` and
    /// `str`.
    type Owned: Source<Self>;
}

impl<T: Send + Sync + 'static> Restored for T {
    type Owned = T;
}

impl Restored for [u8] {
    type Owned = Vec<u8>;
}

impl Restored for str {
    type Owned = String;
}

impl<K, V, H> Serialize for FarMap<K, V, H>
where
    K: Item + ?Sized + Hash + Eq + Serialize,
    V: Item + ?Sized + Serialize,
    H: BuildHasher,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let expected = self.len();
        let mut map = serializer.serialize_map(usize::try_from(expected).ok())?;
        let (mut walk, mut written) = (self.walk(), 0);
        let core = self.body.heap_ref.core();
        // Without a scope: entries may have far parts, each of which has one of its own. So others
        // may remove an entry, but not free it.
        let _kept = self.body.retired.keep();
        while let Some(slots) = walk.next_slots(&Scope::new(core)).map_err(not_written)? {
            written += slots.len() as u64;
            for slot in slots {
                let near = || {
                    let scope = Scope::new(core);
                    let at = scope.with_room(|| slot.address(&scope))?;
                    Ok((at, scope.pin_at(at)?))
                };
                let (at, _pin) = near().map_err(not_written)?;
                // SAFETY: an entry that was in the map after `_kept`, so it is not freed; it is
                // pinned. Nobody changes it: that takes `&mut self`.
                let (key, value) = unsafe { (EntryLayout::<K, V>::key(at), EntryLayout::<K, V>::value(at)) };
                map.serialize_entry(key, value)?;
            }
        }
        if written != expected {
            return Err(S::Error::custom("the map was changed while it was written"));
        }
        map.end()
    }
}

struct FarMapVisitor<K: ?Sized, V: ?Sized, H>(PhantomData<(H, Box<K>, Box<V>)>);

impl<'de, K, V, H> Visitor<'de> for FarMapVisitor<K, V, H>
where
    K: Restored<Owned: Deserialize<'de>> + ?Sized + Hash + Eq,
    V: Restored<Owned: Deserialize<'de>> + ?Sized,
    H: BuildHasher + Default,
{
    type Value = FarMap<K, V, H>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<FarMap<K, V, H>, A::Error> {
        let map =
            with_target(|heap| FarMap::<K, V>::builder().hasher(H::default()).build(heap).map_err(A::Error::custom))?;
        while let Some((key, value)) = entries.next_entry::<K::Owned, V::Owned>()? {
            with_target(|heap| {
                let scope = heap.enter();
                map.insert(&scope, key, value).map(drop).map_err(|error| not_restored(error.error))
            })?;
        }
        Ok(map)
    }
}

/// Restores a map with its index near. A map with a far index is better restored entry by entry.
impl<'de, K, V, H> Deserialize<'de> for FarMap<K, V, H>
where
    K: Restored<Owned: Deserialize<'de>> + ?Sized + Hash + Eq,
    V: Restored<Owned: Deserialize<'de>> + ?Sized,
    H: BuildHasher + Default,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FarMap<K, V, H>, D::Error> {
        deserializer.deserialize_map(FarMapVisitor(PhantomData))
    }
}
