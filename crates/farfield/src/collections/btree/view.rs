//! What functions of users see of a tree: its root and its height. All else is in far nodes.

use super::FarBTreeMap;
use crate::call::view::{Loan, NearTables, ObjectRef, ViewSource, ViewTypes, layout};
use crate::call::{EntriesRef, FarView};
use core::mem::offset_of;

// SAFETY: the tree stays as it is while it is shared; only the guess of the root's cell, and those in
// nodes, change. Keys and values are `FarView` too.
unsafe impl<K: FarView + Send, V: FarView + Send> FarView for FarBTreeMap<K, V> {
    type View<'f> = EntriesRef<'f, K, V>;
    const NAME: &'static str = "FarBTreeMap";
    const LAYOUT: u64 = {
        let (leaf, inner) = (EntriesRef::<K, V>::LEAF, EntriesRef::<K, V>::INNER);
        layout(
            Self::NAME,
            size_of::<Self>(),
            align_of::<Self>(),
            &[
                ("root", offset_of!(Self, root), 0),
                ("height", offset_of!(Self, height), 0),
                ("len", offset_of!(Self, len), 0),
                (K::NAME, leaf.keys, size_of::<K>() as u64),
                (V::NAME, leaf.values, size_of::<V>() as u64),
                ("leaf", leaf.bytes, leaf.entries_max as u64),
                ("values", inner.values, inner.keys as u64),
                ("children", inner.children, inner.entries_max as u64),
            ],
        )
    };

    fn view<'f>(&self, loan: Loan<'f>) -> EntriesRef<'f, K, V> {
        let root = self.root.load().map(|slot| ObjectRef::of(slot, loan));
        EntriesRef::new(root, self.height, self.len).unwrap_or_else(|| unreachable!("no tree is so high"))
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<EntriesRef<'f, K, V>> {
        let field = |at: usize, size: usize| bytes.get(at..at + size);
        let root = ObjectRef::decode(field(offset_of!(Self, root), size_of::<u64>())?);
        let height = u32::decode(field(offset_of!(Self, height), size_of::<u32>())?, source)?;
        EntriesRef::new(root, height, usize::decode(field(offset_of!(Self, len), size_of::<usize>())?, source)?)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        let word = self.root.word();
        if word != 0 {
            tables.note((word >> 32) as u32);
        }
        image[offset_of!(Self, root)..][..size_of::<u64>()].copy_from_slice(&word.to_ne_bytes());
        image[offset_of!(Self, height)..][..size_of::<u32>()].copy_from_slice(&self.height.to_ne_bytes());
        image[offset_of!(Self, len)..][..size_of::<usize>()].copy_from_slice(&self.len.to_ne_bytes());
    }

    fn add_pointees(types: &mut ViewTypes) {
        types.add::<K>();
        types.add::<V>();
    }
}
