//! Where functions of users find the elements of a vector that lies in a far value: its first extents
//! are noted in the vector itself.

use super::FarVec;
use super::Paged;
use crate::call::view::layout;
use crate::call::{FarView, ItemKind, ItemsRef};
use crate::collections::paged::FIRSTS;
use core::mem::offset_of;
use farfield_core::heap::Extents;

impl<T: Send + 'static> FarVec<T> {
    /// Digest of where the parts of a vector lie that [`FarVec::decode_items`] reads.
    pub(in crate::collections) const TABLE_LAYOUT: u64 = layout(
        "vector",
        FIRSTS,
        align_of::<u32>(),
        &[("firsts", Self::FIRSTS_AT, 0), ("len", offset_of!(Self, len), size_of::<usize>() as u64)],
    );
    const FIRSTS_AT: usize = offset_of!(Self, units) + Paged::<T>::FIRSTS_AT;
}

impl<T: FarView + Send> FarVec<T> {
    /// Returns where the elements of a vector with these bytes are, as far as the bytes say it.
    pub(in crate::collections) fn decode_items<'f>(bytes: &[u8]) -> Option<ItemsRef<'f, T>> {
        let len = usize::from_ne_bytes(*bytes.get(offset_of!(Self, len)..)?.first_chunk()?);
        let firsts = bytes.get(Self::FIRSTS_AT..)?.get(..size_of::<[u32; FIRSTS]>())?;
        let mut table = [0; FIRSTS];
        table.iter_mut().zip(firsts.as_chunks().0).for_each(|(page, bytes)| *page = u32::from_ne_bytes(*bytes));
        let extents = Extents::of(size_of::<T>());
        let count = len.checked_sub(1).map_or(0, |last| extents.locate(last / extents.per_unit()).0 + 1);
        ItemsRef::of_short(ItemKind::Paged, &table[..count.min(FIRSTS)], len)
    }
}
