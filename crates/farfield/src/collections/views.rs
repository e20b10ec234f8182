//! What functions of users see of collections: where the elements are.
//!
//! Bytes and texts lie in one object, which their owner names. The tables of short chains and vectors lie
//! in themselves. Those of longer ones are near, so elsewhere they are known only if they come with the
//! call.

use super::chain::Chain;
use super::{FarArray, FarBTreeMap, FarBTreeSet, FarBytes, FarList, FarQueue, FarStack, FarString, FarVec};
use crate::call::view::{Loan, NearTables, ObjectRef, ViewSource, ViewTypes, layout};
use crate::call::{BytesRef, EntriesRef, FarRef, FarView, ItemKind, ItemsRef, TextRef};
use core::mem::offset_of;
use farfield_core::heap::Extents;

// SAFETY: the bytes stay as they are while they are shared; only the guess of the cell changes.
unsafe impl FarView for FarBytes {
    type View<'f> = BytesRef<'f>;
    const NAME: &'static str = "FarBytes";
    const LAYOUT: u64 = layout(
        Self::NAME,
        size_of::<Self>(),
        align_of::<Self>(),
        &[("cell", offset_of!(FarBytes, cell), 0), ("len", offset_of!(FarBytes, len), 0)],
    );

    fn view<'f>(&self, loan: Loan<'f>) -> BytesRef<'f> {
        let object = self.cell.load().map(|slot| ObjectRef::of(slot, loan));
        let Some(bytes) = BytesRef::new(object, self.len()) else { unreachable!("bytes lie in an object") };
        bytes
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<BytesRef<'f>> {
        let word = |at: usize| bytes.get(at..at + 8);
        let len = usize::decode(word(offset_of!(FarBytes, len))?, source)?;
        BytesRef::new(ObjectRef::decode(word(offset_of!(FarBytes, cell))?), len)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        write_object(self.view_object(), &mut image[offset_of!(FarBytes, cell)..], tables);
        image[offset_of!(FarBytes, len)..][..size_of::<usize>()].copy_from_slice(&self.len().to_ne_bytes());
    }

    fn add_pointees(_: &mut ViewTypes) {}
}

impl FarBytes {
    fn view_object(&self) -> u64 {
        self.cell.word()
    }
}

/// Writes the word of a cell.
fn write_object(word: u64, image: &mut [u8], tables: &mut NearTables) {
    if word != 0 {
        tables.note((word >> 32) as u32);
    }
    image[..size_of::<u64>()].copy_from_slice(&word.to_ne_bytes());
}

// SAFETY: a text is its bytes.
unsafe impl FarView for FarString {
    type View<'f> = TextRef<'f>;
    const NAME: &'static str = "FarString";
    const LAYOUT: u64 = layout(
        Self::NAME,
        size_of::<Self>(),
        align_of::<Self>(),
        &[("bytes", offset_of!(FarString, bytes), FarBytes::LAYOUT)],
    );

    fn view<'f>(&self, loan: Loan<'f>) -> TextRef<'f> {
        TextRef::new(self.bytes.view(loan))
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<TextRef<'f>> {
        let at = offset_of!(FarString, bytes);
        FarBytes::decode(bytes.get(at..at + size_of::<FarBytes>())?, source).map(TextRef::new)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        self.bytes.write_image(&mut image[offset_of!(FarString, bytes)..], tables);
    }

    fn add_pointees(_: &mut ViewTypes) {}
}

macro_rules! items {
    ($($name:ident $(const $dims:ident)?, $kind:ident: $table:ty, $at:expr, $this:ident => $view:expr;)*) => {$(
        // SAFETY: the collection and its table stay as they are while they are shared; only guesses of
        // cells change. Elements are `FarView` too.
        unsafe impl<T: FarView + Send $(, const $dims: usize)?> FarView for $name<T $(, $dims)?> {
            type View<'f> = ItemsRef<'f, T>;
            const NAME: &'static str = stringify!($name);
            // Where elements lie follows from their size.
            const LAYOUT: u64 = layout(
                Self::NAME,
                size_of::<Self>(),
                align_of::<Self>(),
                &[
                    (T::NAME, size_of::<T>(), 0),
                    ("units", Extents::of(size_of::<T>()).per_unit(), 0),
                    ("table", $at, <$table>::TABLE_LAYOUT),
                ],
            );

            fn view<'f>(&self, loan: Loan<'f>) -> ItemsRef<'f, T> {
                self.items().lent(loan)
            }

            fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<ItemsRef<'f, T>> {
                match source {
                    ViewSource::Root => ItemsRef::decode_image(ItemKind::$kind, bytes),
                    ViewSource::Region => <$table>::decode_items(bytes.get($at..)?),
                }
            }

            fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
                self.items().write_image(image, tables);
            }

            fn add_pointees(types: &mut ViewTypes) {
                types.add::<T>();
            }
        }

        impl<T: FarView + Send $(, const $dims: usize)?> $name<T $(, $dims)?> {
            /// Returns where the elements are, as long as the collection is borrowed.
            pub(crate) fn items(&self) -> ItemsRef<'_, T> {
                let $this = self;
                $view
            }
        }

        impl<'f, T: FarView + Send $(, const $dims: usize)?> From<&'f $name<T $(, $dims)?>>
            for FarRef<'f, $name<T $(, $dims)?>>
        {
            fn from(near: &'f $name<T $(, $dims)?>) -> Self {
                FarRef::near(near)
            }
        }
    )*};
}

items! {
    FarList, Chain: Chain<T>, offset_of!(Self, chain), list => list.chain.items();
    FarQueue, Chain: Chain<T>, offset_of!(Self, chain), queue => queue.chain.items();
    FarStack, Chain: Chain<T>, offset_of!(Self, chain), stack => stack.chain.items();
    FarVec, Paged: FarVec<T>, 0, vec => ItemsRef::of_extents(vec.units.extents(), vec.len());
    FarArray const D, Paged: FarVec<T>, offset_of!(Self, elements), array => array.elements.items();
}

// SAFETY: a set is a map.
unsafe impl<T: FarView + Send> FarView for FarBTreeSet<T> {
    type View<'f> = EntriesRef<'f, T, ()>;
    const NAME: &'static str = "FarBTreeSet";
    const LAYOUT: u64 = layout(
        Self::NAME,
        size_of::<Self>(),
        align_of::<Self>(),
        &[("map", offset_of!(Self, map), FarBTreeMap::<T, ()>::LAYOUT)],
    );

    fn view<'f>(&self, loan: Loan<'f>) -> Self::View<'f> {
        self.map.view(loan)
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>> {
        let at = offset_of!(Self, map);
        FarBTreeMap::<T, ()>::decode(bytes.get(at..at + size_of::<FarBTreeMap<T, ()>>())?, source)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        self.map.write_image(&mut image[offset_of!(Self, map)..], tables);
    }

    fn add_pointees(types: &mut ViewTypes) {
        types.add::<T>();
    }
}

impl<'f, T: FarView + Send> From<&'f FarBTreeSet<T>> for FarRef<'f, FarBTreeSet<T>> {
    fn from(near: &'f FarBTreeSet<T>) -> Self {
        FarRef::near(near)
    }
}

impl<'f, K: FarView + Send, V: FarView + Send> From<&'f FarBTreeMap<K, V>> for FarRef<'f, FarBTreeMap<K, V>> {
    fn from(near: &'f FarBTreeMap<K, V>) -> Self {
        FarRef::near(near)
    }
}

impl<'f> From<&'f FarBytes> for FarRef<'f, FarBytes> {
    fn from(near: &'f FarBytes) -> Self {
        FarRef::near(near)
    }
}

impl<'f> From<&'f FarString> for FarRef<'f, FarString> {
    fn from(near: &'f FarString) -> Self {
        FarRef::near(near)
    }
}
