//! Snapshots: entries in order.

use super::{BTreePath, FarBTreeMap};
use crate::heap::{AccessMode, Scope};
use crate::snapshot::{not_restored, not_written, with_target};
use core::fmt;
use core::marker::PhantomData;
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

impl<K: Send + Serialize + 'static, V: Send + Serialize + 'static> Serialize for FarBTreeMap<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len()))?;
        let Some(heap_ref) = &self.heap_ref else { return map.end() };
        let mut path: Option<BTreePath> = None;
        loop {
            let mut near = || {
                let scope = Scope::new(heap_ref.core());
                match &mut path {
                    Some(path) => {
                        let _brief = scope.begin_transient();
                        scope.with_room(|| path.advance::<K, V>(&scope, true))?;
                    }
                    None => path = Some(self.end_path(&scope, false)?),
                }
                let Some(path) = &path else { return Ok(None) };
                let Some((node, index)) = path.entry::<K, V>(&scope, AccessMode::Read)? else { return Ok(None) };
                let key = node.key(index);
                Ok(Some((key, node.value(index), scope.pin_at(key.cast())?)))
            };
            // Without a scope: entries may have far parts, each of which has one of its own.
            let Some((key, value, _pin)) = near().map_err(not_written)? else { return map.end() };
            // SAFETY: as in `get_key_value`; the node is pinned.
            unsafe { map.serialize_entry(&*key, &*value) }?;
        }
    }
}

struct FarBTreeMapVisitor<K, V>(PhantomData<(K, V)>);

impl<'de, K, V> Visitor<'de> for FarBTreeMapVisitor<K, V>
where
    K: Ord + Send + Deserialize<'de> + 'static,
    V: Send + Deserialize<'de> + 'static,
{
    type Value = FarBTreeMap<K, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<FarBTreeMap<K, V>, A::Error> {
        let mut map = FarBTreeMap::new();
        while let Some((key, value)) = entries.next_entry()? {
            with_target(|heap| map.insert(&heap.enter(), key, value).map_err(|error| not_restored(error.error)))?;
        }
        Ok(map)
    }
}

impl<'de, K, V> Deserialize<'de> for FarBTreeMap<K, V>
where
    K: Ord + Send + Deserialize<'de> + 'static,
    V: Send + Deserialize<'de> + 'static,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FarBTreeMap<K, V>, D::Error> {
        deserializer.deserialize_map(FarBTreeMapVisitor(PhantomData))
    }
}
