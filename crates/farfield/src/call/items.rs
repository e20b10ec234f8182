//! Elements in order, as functions read them: those of lists, queues, stacks, vectors and arrays.
//!
//! The table of such a collection is near: which chunks or units it has. So a function at a server
//! walks it only if the table came with the call, as a part of the root.

use super::part::{FarPart, NearTables, ObjectRef};
use super::place::FarPlace;
use super::view_traits::{FarView, Loan, ViewSource};
use crate::collections::{ChainChunk, unchecked_range_of};
use crate::heap::SlotWord;
use core::fmt::Debug;
use core::marker::PhantomData;
use core::ops::{Range, RangeBounds};
use farfield_core::heap::{Extents, SlotHint};
use farfield_wic::Fault;

/// The elements of a [`FarList`](crate::FarList), [`FarQueue`](crate::FarQueue),
/// [`FarStack`](crate::FarStack), [`FarVec`](crate::FarVec) or [`FarArray`](crate::FarArray), as a
/// [`FarFunction`](crate::FarFunction) sees them. [`FarPlace::items`] and [`FarPlace::item`] read them.
pub struct ItemsRef<'f, T: FarView> {
    table: ItemTable<'f>,
    /// Number of elements before those of the table, which may be a part of the collection's.
    base: usize,
    len: usize,
    points: PhantomData<&'f T>,
}

impl<T: FarView> Clone for ItemsRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: FarView> Copy for ItemsRef<'_, T> {}

impl<T: FarView> Debug for ItemsRef<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ItemsRef({} elements)", self.len)
    }
}

/// Table that says where elements are.
#[derive(Clone, Copy)]
enum ItemTable<'f> {
    /// Chunks of a chain in this process, and the number of the first one.
    Chunks(&'f [ChainChunk], u32),
    /// First pages of the extents of a vector in this process.
    Extents(&'f [u32]),
    /// So many words, from this one on, of the tables that came with the call.
    Sent { kind: ItemKind, first: u32, count: u32 },
    /// It is in another process.
    Elsewhere,
}

/// Kind of a collection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ItemKind {
    /// Chunks, one after the other.
    Chain,
    /// Units, found by their number.
    Paged,
}

/// A chunk of a chain: its slot, and which of its places are elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkPlace {
    pub(crate) slot: SlotWord,
    pub(crate) start: u16,
    pub(crate) len: u16,
}

/// Words of a chunk in a table that is sent: number, card, and start and length.
const CHUNK_WORDS: usize = 3;
/// Bytes of an image: first word and number of words of the table, number of elements before those of
/// the table, and of all.
const IMAGE_BYTES: usize = 24;
/// Most segments of which a call reads the elements, where a walk is cut into calls. Their part of a
/// table is some 16 KiB of an argument, and they have up to 8 MiB, unless elements are large.
const PIECE_SEGMENTS: usize = if cfg!(test) { 64 } else { 2048 };

/// Elements side by side in one object.
#[derive(Clone, Copy)]
struct Segment<'f> {
    object: ObjectRef<'f>,
    /// Place of the first one in the object, and their number.
    start: usize,
    count: usize,
}

impl<'f, T: FarView> ItemsRef<'f, T> {
    const EXTENTS: Extents = Extents::of(size_of::<T>());

    /// Makes one of the chunks of a chain, which is lent.
    pub(crate) fn of_chain(chunks: &'f [ChainChunk], first: u32, len: usize) -> ItemsRef<'f, T> {
        ItemsRef { table: ItemTable::Chunks(chunks, first), base: 0, len, points: PhantomData }
    }

    /// Makes one of the extents of a vector, which is lent.
    pub(crate) fn of_extents(extents: &'f [u32], len: usize) -> ItemsRef<'f, T> {
        ItemsRef { table: ItemTable::Extents(extents), base: 0, len, points: PhantomData }
    }

    /// Makes one that is valid as long as the collection is lent.
    pub(crate) fn lent<'long>(self, _: Loan<'long>) -> ItemsRef<'long, T> {
        // SAFETY: tables are memory of the collection's own, which nobody changes or frees while it is
        // lent, wherever the collection itself is moved meanwhile.
        let chunks = |chunks: &[ChainChunk]| unsafe { &*core::ptr::from_ref(chunks) };
        // SAFETY: as above.
        let extents = |extents: &[u32]| unsafe { &*core::ptr::from_ref(extents) };
        let table = match self.table {
            ItemTable::Chunks(table, first) => ItemTable::Chunks(chunks(table), first),
            ItemTable::Extents(table) => ItemTable::Extents(extents(table)),
            ItemTable::Sent { kind, first, count } => ItemTable::Sent { kind, first, count },
            ItemTable::Elsewhere => ItemTable::Elsewhere,
        };
        ItemsRef { table, base: self.base, len: self.len, points: PhantomData }
    }

    /// Makes one of the bytes of a collection.
    pub(crate) fn decode(kind: ItemKind, bytes: &[u8], source: ViewSource) -> Option<ItemsRef<'f, T>> {
        let (image, _) = bytes.split_first_chunk::<IMAGE_BYTES>()?;
        let word = |at: usize| image[at..].first_chunk().copied().map(u32::from_ne_bytes);
        let number = |at: usize| usize::try_from(u64::from_ne_bytes(*image[at..].first_chunk()?)).ok();
        let (table, base, len) = match source {
            // In a far value: its bytes are those of the collection, whose table is at the client.
            ViewSource::Region => (ItemTable::Elsewhere, 0, 0),
            ViewSource::Root => (ItemTable::Sent { kind, first: word(0)?, count: word(4)? }, number(8)?, number(16)?),
        };
        Some(ItemsRef { table, base, len, points: PhantomData })
    }

    /// Writes what [`ItemsRef::decode`] reads of a root.
    pub(crate) fn write_image(self, image: &mut [u8], tables: &mut NearTables) {
        let first = tables.len();
        // Of a chain, the chunks that have elements of the window.
        let window = tables.window();
        let (mut base, mut index) = (0, 0);
        match self.table {
            ItemTable::Chunks(chunks, mut at) => {
                while let Some((chunk, next)) = chunks.get(at as usize).and_then(ChainChunk::place) {
                    at = next;
                    index += usize::from(chunk.len);
                    if index <= window.start {
                        base = index;
                        continue;
                    }
                    let object = ObjectRef::of(chunk.slot, self.loan());
                    tables.note(object.number.get());
                    tables.push(object.number.get());
                    tables.push(SlotHint(object.place).card().into());
                    tables.push(u32::from(chunk.start) << 16 | u32::from(chunk.len));
                    if index >= window.end {
                        break;
                    }
                }
            }
            ItemTable::Extents(extents) => {
                for page in extents {
                    tables.note(*page);
                    tables.push(*page);
                }
            }
            ItemTable::Sent { .. } | ItemTable::Elsewhere => unreachable!("images are made of collections"),
        }
        image[..4].copy_from_slice(&(first as u32).to_ne_bytes());
        image[4..8].copy_from_slice(&((tables.len() - first) as u32).to_ne_bytes());
        image[8..16].copy_from_slice(&(base as u64).to_ne_bytes());
        image[16..IMAGE_BYTES].copy_from_slice(&(self.len as u64).to_ne_bytes());
    }

    /// Returns the number of elements. At a server it is 0 for a collection inside of a far value.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether there is no element, as [`ItemsRef::len`] says.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the loan under which a collection of this process is viewed.
    fn loan(&self) -> Loan<'f> {
        // SAFETY: the table of a collection in this process was lent for `'f`, and with it all that
        // the table names.
        unsafe { Loan::new() }
    }

    /// Returns where a walk begins.
    fn first(&self) -> usize {
        match self.table {
            ItemTable::Chunks(_, first) => first as usize,
            ItemTable::Extents(_) | ItemTable::Sent { .. } | ItemTable::Elsewhere => 0,
        }
    }

    /// Returns the elements at a place of a walk, and the next place. `tables` are those that came
    /// with the call.
    fn segment(&self, at: usize, tables: &[u32]) -> Option<(Segment<'f>, usize)> {
        match self.table {
            ItemTable::Chunks(chunks, _) => {
                let (chunk, next) = chunks.get(at)?.place()?;
                let object = ObjectRef::of(chunk.slot, self.loan());
                Some((Segment { object, start: chunk.start.into(), count: chunk.len.into() }, next as usize))
            }
            ItemTable::Extents(extents) => self.unit(at, extents, |page| Some(ObjectRef::of_unit(page, self.loan()))),
            ItemTable::Sent { kind, first, count } => {
                let words = tables.get(first as usize..)?.get(..count as usize)?;
                match kind {
                    ItemKind::Paged => self.unit(at, words, ObjectRef::unit_elsewhere),
                    ItemKind::Chain => {
                        let [number, card, range] = *words.get(at.checked_mul(CHUNK_WORDS)?..)?.first_chunk()?;
                        let object = ObjectRef::elsewhere(u64::from(number) << 32 | u64::from(card as u8))?;
                        let (start, count) = ((range >> 16) as usize, (range & 0xFFFF) as usize);
                        Some((Segment { object, start, count }, at + 1))
                    }
                }
            }
            ItemTable::Elsewhere => None,
        }
    }

    /// Returns the elements of a unit.
    fn unit(
        &self,
        unit: usize,
        extents: &[u32],
        object: impl FnOnce(u32) -> Option<ObjectRef<'f>>,
    ) -> Option<(Segment<'f>, usize)> {
        let per_unit = Self::EXTENTS.per_unit();
        let count = self.len.checked_sub(unit.checked_mul(per_unit)?).filter(|count| *count > 0)?.min(per_unit);
        let (extent, within) = Self::EXTENTS.locate(unit);
        let pages = (within as u32).wrapping_mul(Self::EXTENTS.unit_pages());
        let object = object(extents.get(extent)?.wrapping_add(pages))?;
        Some((Segment { object, start: 0, count }, unit + 1))
    }

    /// Cuts a range of the elements of a collection in this process into pieces that a call reads. One
    /// piece at least.
    pub(crate) fn pieces(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut pieces = Vec::new();
        let (mut start, mut index, mut at, mut count) = (range.start, 0, self.first(), 0);
        if self.is_paged() {
            let per_unit = Self::EXTENTS.per_unit();
            (index, at) = (range.start - range.start % per_unit, range.start / per_unit);
        }
        while index < range.end
            && let Some((segment, next)) = self.segment(at, &[])
        {
            (index, at) = (index + segment.count, next);
            if index <= range.start {
                continue;
            }
            count += 1;
            if count == PIECE_SEGMENTS || index >= range.end {
                let end = index.min(range.end);
                pieces.push(core::mem::replace(&mut start, end)..end);
                count = 0;
            }
        }
        if pieces.is_empty() {
            pieces.push(range);
        }
        pieces
    }

    /// Checks whether elements are found by the number of their unit.
    fn is_paged(&self) -> bool {
        matches!(self.table, ItemTable::Extents(_) | ItemTable::Sent { kind: ItemKind::Paged, .. })
    }
}

impl<'f> Segment<'f> {
    /// Returns the bytes of the elements from this one on.
    fn part<T: FarView>(self, skip: usize, count: usize) -> FarPart<'f> {
        // Starts and counts have 16 bits in chains; units have at most a page of elements, or one.
        self.object.part(self.start.saturating_add(skip).saturating_mul(size_of::<T>()), count * size_of::<T>())
    }
}

/// Segments that are fetched ahead of a walk.
const WINDOW: usize = 8;

/// A walk over elements in order ([`FarPlace::items`]).
///
/// It reads a chunk or a unit at a time, of about a page.
pub struct ItemCursor<'f, P: FarPlace, T: FarView> {
    far: &'f P,
    items: ItemsRef<'f, T>,
    /// Place of the segment that is read next, and of the one that is fetched next.
    at: usize,
    ahead: usize,
    /// Segments that were read.
    passed: usize,
    /// Number of elements before the segment that is read next.
    index: usize,
    /// Elements that are left to be read.
    range: Range<usize>,
    views: Vec<T::View<'f>>,
    /// The next one of those that were read.
    next: usize,
}

impl<P: FarPlace, T: FarView> Debug for ItemCursor<'_, P, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ItemCursor({:?} of {:?})", self.range, self.items)
    }
}

impl<'f, P: FarPlace, T: FarView> ItemCursor<'f, P, T> {
    /// Makes a walk over the elements of this range that exist.
    pub(super) fn new(far: &'f P, items: ItemsRef<'f, T>, range: impl RangeBounds<usize>) -> ItemCursor<'f, P, T> {
        let range = unchecked_range_of(range, usize::MAX);
        let (mut at, mut index) = (items.first(), items.base);
        if items.is_paged() {
            let per_unit = ItemsRef::<T>::EXTENTS.per_unit();
            (at, index) = (range.start / per_unit, range.start - range.start % per_unit);
        }
        ItemCursor { far, items, at, ahead: at, passed: 0, index, range, views: Vec::new(), next: 0 }
    }

    /// Returns the next element, if there is one.
    ///
    /// Takes one step for each chunk of elements, and one more for each whole 4 KiB of it.
    ///
    /// # Errors
    /// Those of [`FarPlace::follow`].
    pub async fn next(&mut self) -> Result<Option<T::View<'f>>, Fault> {
        loop {
            if let Some(view) = self.views.get(self.next) {
                self.next += 1;
                return Ok(Some(*view));
            }
            self.views.clear();
            self.next = 0;
            if self.range.is_empty() || !self.read_segment().await? {
                return Ok(None);
            }
        }
    }

    /// Reads the next segment that has elements of the walk. False if there is none. After an error,
    /// it is still the next one.
    async fn read_segment(&mut self) -> Result<bool, Fault> {
        if matches!(self.items.table, ItemTable::Elsewhere) {
            return self.far.halt_without_table().await;
        }
        let tables = self.far.tables();
        while let Some((segment, next)) = self.items.segment(self.at, tables) {
            let end = self.index.saturating_add(segment.count);
            if end > self.range.start && self.index <= self.range.start {
                self.fetch_ahead();
                let count = end.min(self.range.end) - self.range.start;
                let (part, views) = (segment.part::<T>(self.range.start - self.index, count), &mut self.views);
                // SAFETY: in this process, the elements of a chunk or a unit lie side by side there,
                // and these are some of them. A place reads the part that it was asked for (`FarPlace` is sealed).
                self.far.look(part, |found| unsafe { found.values::<T>(0, count, views) }).await?;
                (self.at, self.index, self.range.start) = (next, end, self.range.start + count);
                return Ok(true);
            }
            if self.index > self.range.start {
                break;
            }
            (self.at, self.index, self.ahead) = (next, end, next);
        }
        // Elements that exist are not in the part of the table that came with the call.
        if self.range.start < self.items.len.min(self.range.end) {
            return self.far.halt_without_table().await;
        }
        Ok(false)
    }

    /// Begins to fetch the segments that come next. After the first one, it fetches nothing yet, for
    /// the sake of short walks.
    fn fetch_ahead(&mut self) {
        self.passed += 1;
        let steps = match self.passed {
            1 => 1,
            2 => WINDOW,
            _ => 1,
        };
        let tables = self.far.tables();
        for _ in 0..steps {
            let Some((segment, next)) = self.items.segment(self.ahead, tables) else { return };
            self.ahead = next;
            if self.passed > 1 {
                self.far.announce(segment.object);
            }
        }
    }
}
