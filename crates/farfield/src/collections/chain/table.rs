//! Table of the chunks of a chain.
//!
//! The first few entries lie in the chain itself, so a short chain takes no near memory of its own.
//! If it is a field of a far value, all of it is far, and a function at a memory server can walk it.

use super::{Chain, ChainChunk, NONE};
use crate::call::view::layout;
use crate::call::{FarView, ItemKind, ItemsRef};
use core::mem::offset_of;

/// Entries that lie in the chain.
const FEW: usize = 4;
/// Places for which near memory is made at least.
const MORE_MIN: usize = 8;

/// Table of chunks, used or not, by their numbers.
pub(super) struct ChunkTable {
    /// All entries, as long as there are no more.
    few: [ChainChunk; FEW],
    len: u32,
    /// All entries, if there are more.
    many: Vec<ChainChunk>,
}

impl ChunkTable {
    pub(super) const fn new() -> ChunkTable {
        ChunkTable { few: [const { ChainChunk::unused(NONE) }; FEW], len: 0, many: Vec::new() }
    }

    /// Returns the number of entries.
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(super) fn entries(&self) -> &[ChainChunk] {
        let len = self.len as usize;
        if len <= FEW { &self.few[..len] } else { &self.many }
    }

    #[inline]
    pub(super) fn entries_mut(&mut self) -> &mut [ChainChunk] {
        let len = self.len as usize;
        if len <= FEW { &mut self.few[..len] } else { &mut self.many }
    }

    /// Returns for how many entries there is near memory beside the chain.
    pub(super) fn capacity_beside(&self) -> usize {
        self.many.capacity()
    }

    /// Returns for how many places more near memory is needed before an entry can be added.
    pub(super) fn growth(&self) -> usize {
        let capacity = self.many.capacity();
        if self.len() < FEW || self.len() < capacity { 0 } else { capacity.max(MORE_MIN) }
    }

    /// Makes near memory for `more` places. False if there is none.
    pub(super) fn grow(&mut self, more: usize) -> bool {
        let held = self.many.len();
        self.many.try_reserve_exact(self.many.capacity() - held + more).is_ok()
    }

    /// Adds an entry, for which there is room.
    pub(super) fn push(&mut self, entry: ChainChunk) {
        let len = self.len();
        if len < FEW {
            self.few[len] = entry;
        } else {
            if len == FEW {
                let few = core::mem::replace(&mut self.few, [const { ChainChunk::unused(NONE) }; FEW]);
                self.many.extend(few);
            }
            self.many.push(entry);
        }
        self.len += 1;
    }
}

impl<T: Send + 'static> Chain<T> {
    /// Digest of where the parts of a chain lie that [`Chain::decode_items`] reads.
    pub(in crate::collections) const TABLE_LAYOUT: u64 = layout(
        "chain",
        FEW,
        size_of::<ChainChunk>(),
        &[
            ("few", offset_of!(Self, chunks.few), 0),
            ("chunks", offset_of!(Self, chunks.len), 0),
            ("first", offset_of!(Self, first), 0),
            ("len", offset_of!(Self, len), 0),
            ("cell", offset_of!(ChainChunk, cell), 0),
            ("start", offset_of!(ChainChunk, start), 0),
            ("count", offset_of!(ChainChunk, len), 0),
            ("next", offset_of!(ChainChunk, next), 0),
        ],
    );
}

impl<T: FarView + Send> Chain<T> {
    /// Returns where the elements are, as long as the chain is borrowed.
    pub(in crate::collections) fn items(&self) -> ItemsRef<'_, T> {
        let (chunks, len) = (self.chunks.entries(), self.len);
        if self.chunks.len() <= FEW {
            ItemsRef::of_short_chain(chunks, self.first, len)
        } else {
            ItemsRef::of_chain(chunks, [self.first, self.last], len)
        }
    }

    /// Returns where the elements of a chain with these bytes are, as far as the bytes say it; `None`
    /// if no chain has them.
    pub(in crate::collections) fn decode_items<'f>(bytes: &[u8]) -> Option<ItemsRef<'f, T>> {
        let len = usize::from_ne_bytes(*bytes.get(offset_of!(Self, len)..)?.first_chunk()?);
        let used = half(bytes, offset_of!(Self, chunks.len))? as usize;
        if used > FEW {
            return Some(ItemsRef::elsewhere(len));
        }
        let (mut chunks, mut count, mut elements) = ([0; 3 * FEW], 0, 0usize);
        let mut next = half(bytes, offset_of!(Self, first))?;
        while next != NONE {
            let at = (next as usize) * size_of::<ChainChunk>();
            // A table that leads in a circle has more chunks than there are.
            if next as usize >= used || count == used {
                return None;
            }
            let entry = bytes.get(offset_of!(Self, chunks.few) + at..)?;
            let places = [offset_of!(ChainChunk, start), offset_of!(ChainChunk, len)];
            let [start, chunk_len] = places.map(|at| entry.get(at..).and_then(<[u8]>::first_chunk).copied());
            let [start, chunk_len] = [u16::from_ne_bytes(start?), u16::from_ne_bytes(chunk_len?)];
            let cell = u64::from_ne_bytes(*entry.get(offset_of!(ChainChunk, cell)..)?.first_chunk()?);
            chunks[3 * count..3 * count + 3].copy_from_slice(&ItemsRef::<T>::chunk_words(cell, start, chunk_len));
            (count, elements) = (count + 1, elements.checked_add(chunk_len.into())?);
            next = half(entry, offset_of!(ChainChunk, next))?;
        }
        (elements == len).then(|| ItemsRef::of_short(ItemKind::Chain, &chunks[..3 * count], len)).flatten()
    }
}

/// Returns the number of four bytes at this place.
fn half(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|half| u32::from_ne_bytes(*half))
}

#[cfg(test)]
mod tests {
    //! Guards against entries that are lost when a table becomes long, and against near memory that is not asked for.
    use super::*;

    #[test]
    fn entries_keep_their_numbers_and_few_take_no_near_memory() {
        let mut table = ChunkTable::new();
        for number in 0..100u32 {
            let more = table.growth();
            assert_eq!(more > 0, number == 4 || number >= 8 && number.is_power_of_two(), "{number}");
            if more > 0 {
                assert!(table.grow(more));
                assert_eq!(table.growth(), 0);
            }
            let before = table.capacity_beside();
            table.push(ChainChunk::unused(number));
            assert_eq!(table.capacity_beside(), before, "what was asked for is enough");
            assert_eq!(before == 0, number < 4);
            assert!(table.entries().iter().map(|entry| entry.next).eq(0..=number));
            table.entries_mut()[number as usize / 2].start = 7;
            assert_eq!(table.entries()[number as usize / 2].start, 7);
        }
        assert_eq!(table.len(), 100);
    }
}
