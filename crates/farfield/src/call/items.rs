//! Elements in order, as functions read them: those of lists, queues, stacks, vectors and arrays.
//!
//! A short collection has its table in itself: which chunks or units it has. The table of a longer one
//! is near. So a function at a server walks that only if the table came with the call, as a part of the
//! root.

use super::part::{FarPart, NearTables, ObjectRef};
use super::place::FarPlace;
use super::view_traits::{FarView, Loan};
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
    /// Chunks of a chain in this process, and the numbers of the first and the last one.
    Chunks { chunks: &'f [ChainChunk], ends: [u32; 2] },
    /// First pages of the extents of a vector in this process.
    Extents(&'f [u32]),
    /// So many words, from this one on, of the tables that came with the call.
    Sent { kind: ItemKind, first: u32, count: u32 },
    /// Copy of the words that lie in the collection itself.
    Short { kind: ItemKind, words: [u32; SHORT_WORDS], count: usize, is_here: bool },
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

/// Words of a chunk in a table: number, card, and start and length.
const CHUNK_WORDS: usize = 3;
/// Most words of a table that lies in its collection.
const SHORT_WORDS: usize = 12;
/// Bytes of an image: first word and number of words of the table, number of elements before those of
/// the table, and of all.
const IMAGE_BYTES: usize = 24;
/// Most segments of which a call reads the elements, where a walk is cut into calls. Their part of a
/// table is some 16 KiB of an argument, and they have up to 8 MiB, unless elements are large.
pub(super) const PIECE_SEGMENTS: usize = if cfg!(test) { 64 } else { 2048 };

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
    /// Bytes that [`ItemsRef::write_image`] writes.
    pub(super) const IMAGE_BYTES: usize = IMAGE_BYTES;

    /// Makes one of the chunks of a chain, which is lent.
    pub(crate) fn of_chain(chunks: &'f [ChainChunk], ends: [u32; 2], len: usize) -> ItemsRef<'f, T> {
        ItemsRef { table: ItemTable::Chunks { chunks, ends }, base: 0, len, points: PhantomData }
    }

    /// Makes one of the extents of a vector, which is lent.
    pub(crate) fn of_extents(extents: &'f [u32], len: usize) -> ItemsRef<'f, T> {
        ItemsRef { table: ItemTable::Extents(extents), base: 0, len, points: PhantomData }
    }

    /// Makes one of the chunks of a short chain in this process. It keeps a copy of the table, because that
    /// lies in the chain, which may move while it is lent.
    pub(crate) fn of_short_chain(chunks: &'f [ChainChunk], first: u32, len: usize) -> ItemsRef<'f, T> {
        let (mut words, mut count, mut at) = ([0; SHORT_WORDS], 0, first);
        while let Some((chunk, next)) = chunks.get(at as usize).and_then(ChainChunk::place) {
            let chunk = Self::chunk_words(chunk.slot.word(), chunk.start, chunk.len);
            words[count..count + CHUNK_WORDS].copy_from_slice(&chunk);
            (at, count) = (next, count + CHUNK_WORDS);
        }
        let table = ItemTable::Short { kind: ItemKind::Chain, words, count, is_here: true };
        ItemsRef { table, base: 0, len, points: PhantomData }
    }

    /// Makes one of a table's words that a collection with these bytes has in itself.
    pub(crate) fn of_short(kind: ItemKind, table: &[u32], len: usize) -> Option<ItemsRef<'f, T>> {
        let mut words = [0; SHORT_WORDS];
        words.get_mut(..table.len())?.copy_from_slice(table);
        let table = ItemTable::Short { kind, words, count: table.len(), is_here: false };
        Some(ItemsRef { table, base: 0, len, points: PhantomData })
    }

    /// Makes one of a collection whose table is in another process.
    pub(crate) fn elsewhere(len: usize) -> ItemsRef<'f, T> {
        ItemsRef { table: ItemTable::Elsewhere, base: 0, len, points: PhantomData }
    }

    /// Returns what a table says of a chunk.
    pub(crate) fn chunk_words(slot: u64, start: u16, len: u16) -> [u32; CHUNK_WORDS] {
        [(slot >> 32) as u32, slot as u32, u32::from(start) << 16 | u32::from(len)]
    }

    /// Makes one that is valid as long as the collection is lent.
    pub(crate) fn lent<'long>(self, _: Loan<'long>) -> ItemsRef<'long, T> {
        // SAFETY: tables are memory of the collection's own, which nobody changes or frees while it is
        // lent, wherever the collection itself is moved meanwhile.
        let chunks = |chunks: &[ChainChunk]| unsafe { &*core::ptr::from_ref(chunks) };
        // SAFETY: as above.
        let extents = |extents: &[u32]| unsafe { &*core::ptr::from_ref(extents) };
        let table = match self.table {
            ItemTable::Chunks { chunks: table, ends } => ItemTable::Chunks { chunks: chunks(table), ends },
            ItemTable::Extents(table) => ItemTable::Extents(extents(table)),
            ItemTable::Sent { kind, first, count } => ItemTable::Sent { kind, first, count },
            ItemTable::Short { kind, words, count, is_here } => ItemTable::Short { kind, words, count, is_here },
            ItemTable::Elsewhere => ItemTable::Elsewhere,
        };
        ItemsRef { table, base: self.base, len: self.len, points: PhantomData }
    }

    /// Makes one of the image of a collection, which came with the call.
    pub(crate) fn decode_image(kind: ItemKind, bytes: &[u8]) -> Option<ItemsRef<'f, T>> {
        let (image, _) = bytes.split_first_chunk::<IMAGE_BYTES>()?;
        let word = |at: usize| image[at..].first_chunk().copied().map(u32::from_ne_bytes);
        let number = |at: usize| usize::try_from(u64::from_ne_bytes(*image[at..].first_chunk()?)).ok();
        let table = ItemTable::Sent { kind, first: word(0)?, count: word(4)? };
        Some(ItemsRef { table, base: number(8)?, len: number(16)?, points: PhantomData })
    }

    /// Writes what [`ItemsRef::decode_image`] reads.
    pub(crate) fn write_image(self, image: &mut [u8], tables: &mut NearTables) {
        let first = tables.len();
        // Of a chain, the chunks that have elements of the window.
        let window = tables.window();
        let (mut base, mut index) = (0, 0);
        match self.table {
            ItemTable::Chunks { .. } | ItemTable::Short { .. } => {
                let mut at = self.first();
                while let Some((chunk, next)) = self.segment(at, &[]) {
                    at = next;
                    index += chunk.count;
                    if index <= window.start {
                        base = index;
                        continue;
                    }
                    let number = chunk.object.number.get();
                    tables.note(number);
                    tables.push(number);
                    tables.push(SlotHint(chunk.object.place).card().into());
                    tables.push((chunk.start as u32) << 16 | chunk.count as u32);
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

    /// Returns the number of elements.
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
            ItemTable::Chunks { ends: [first, _], .. } => first as usize,
            _ => 0,
        }
    }

    /// Returns the elements at a place of a walk, and the next place. `tables` are those that came
    /// with the call.
    fn segment(&self, at: usize, tables: &[u32]) -> Option<(Segment<'f>, usize)> {
        match self.table {
            ItemTable::Chunks { chunks, .. } => {
                let (chunk, next) = chunks.get(at)?.place()?;
                let object = ObjectRef::of(chunk.slot, self.loan());
                Some((Segment { object, start: chunk.start.into(), count: chunk.len.into() }, next as usize))
            }
            ItemTable::Extents(extents) => self.unit(at, extents, |page| Some(ObjectRef::of_unit(page, self.loan()))),
            ItemTable::Sent { kind, first, count } => {
                let words = tables.get(first as usize..)?.get(..count as usize)?;
                self.segment_of_words(kind, words, at, false)
            }
            ItemTable::Short { kind, ref words, count, is_here } => {
                self.segment_of_words(kind, words.get(..count)?, at, is_here)
            }
            ItemTable::Elsewhere => None,
        }
    }

    /// Returns where a walk backwards begins that has the element before `end` first, and the number of
    /// elements up to the end of the segment there. `None` if the table does not say it.
    fn last(&self, end: usize, tables: &[u32]) -> Option<(usize, usize)> {
        if self.is_paged() {
            let (at, per_unit) = (end.checked_sub(1)? / Self::EXTENTS.per_unit(), Self::EXTENTS.per_unit());
            return Some((at, at * per_unit + self.segment(at, tables)?.0.count));
        }
        if let ItemTable::Chunks { ends: [_, last], .. } = self.table {
            return Some((last as usize, self.len));
        }
        let (mut place, mut until) = (None, self.base);
        while let Some((segment, next)) = self.segment(place.map_or(0, |place: usize| place + 1), tables) {
            place = Some(next - 1);
            until = until.saturating_add(segment.count);
        }
        Some((place?, until)).filter(|(_, until)| *until >= end)
    }

    /// Returns the place of the segment before this one.
    fn before(&self, at: usize) -> Option<usize> {
        match self.table {
            ItemTable::Chunks { chunks, .. } => chunks.get(at)?.previous(),
            _ => at.checked_sub(1),
        }
    }

    /// Returns the elements at a place of a walk, as the words of a table say.
    fn segment_of_words(
        &self,
        kind: ItemKind,
        words: &[u32],
        at: usize,
        is_here: bool,
    ) -> Option<(Segment<'f>, usize)> {
        match kind {
            ItemKind::Paged => self.unit(at, words, ObjectRef::unit_elsewhere),
            ItemKind::Chain => {
                let [number, place, range] = *words.get(at.checked_mul(CHUNK_WORDS)?..)?.first_chunk()?;
                let mut object = ObjectRef::elsewhere(u64::from(number) << 32 | u64::from(place))?;
                object.is_here = is_here;
                let (start, count) = ((range >> 16) as usize, (range & 0xFFFF) as usize);
                Some((Segment { object, start, count }, at + 1))
            }
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

    /// Cuts a range of the elements of a collection in this process into pieces that a call reads, of so
    /// many elements at most. One piece at least.
    pub(crate) fn pieces(&self, range: Range<usize>, elements_max: usize) -> Vec<Range<usize>> {
        let elements_max = elements_max.max(1);
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
            let end = index.min(range.end);
            while end - start > elements_max {
                pieces.push(start..start + elements_max);
                (start, count) = (start + elements_max, 1);
            }
            if count == PIECE_SEGMENTS || index >= range.end {
                pieces.push(start..end);
                (start, count) = (end, 0);
            }
        }
        if pieces.is_empty() {
            pieces.push(range);
        }
        pieces
    }

    /// Returns the object at a place of a walk.
    pub(super) fn object(&self, at: usize, tables: &[u32]) -> Option<ObjectRef<'f>> {
        self.segment(at, tables).map(|(segment, _)| segment.object)
    }

    /// Checks whether the table is in another process.
    pub(super) fn is_elsewhere(&self) -> bool {
        matches!(self.table, ItemTable::Elsewhere)
    }

    /// Checks whether elements are found by the number of their unit.
    fn is_paged(&self) -> bool {
        match self.table {
            ItemTable::Extents(_) => true,
            ItemTable::Sent { kind, .. } | ItemTable::Short { kind, .. } => kind == ItemKind::Paged,
            ItemTable::Chunks { .. } | ItemTable::Elsewhere => false,
        }
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
    /// Elements that were left at the beginning.
    whole: Range<usize>,
    is_back: bool,
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
        let whole = range.clone();
        let (is_back, views) = (false, Vec::new());
        ItemCursor { far, items, at, ahead: at, passed: 0, index, range, whole, is_back, views, next: 0 }
    }

    /// Returns a walk over the same elements that begins with the last one.
    pub fn rev(self) -> ItemCursor<'f, P, T> {
        ItemCursor { is_back: !self.is_back, ..ItemCursor::new(self.far, self.items, self.whole) }
    }

    /// Returns the next element, if there is one.
    ///
    /// Takes one step for each chunk of elements, and one more for each whole 4 KiB of it.
    ///
    /// # Errors
    /// Those of [`FarPlace::follow`].
    pub async fn next(&mut self) -> Result<Option<T::View<'f>>, Fault> {
        if self.next == self.views.len() && !self.read().await? {
            return Ok(None);
        }
        self.next += 1;
        Ok(Some(self.views[self.next - 1]))
    }

    /// Returns the next elements, as many as were read together: up to a chunk of them, of about a page.
    /// `None` if there is none. A loop over a chunk takes much less time than one of
    /// [`ItemCursor::next`]. Walks from the same index over vectors whose elements have the same size
    /// return chunks of the same length.
    ///
    /// Takes the steps of [`ItemCursor::next`].
    ///
    /// # Errors
    /// Those of [`FarPlace::follow`].
    pub async fn next_chunk(&mut self) -> Result<Option<&[T::View<'f>]>, Fault> {
        if self.next == self.views.len() && !self.read().await? {
            return Ok(None);
        }
        let start = core::mem::replace(&mut self.next, self.views.len());
        Ok(Some(&self.views[start..]))
    }

    /// Reads the next elements, in the order of the walk. False if there is none.
    async fn read(&mut self) -> Result<bool, Fault> {
        self.views.clear();
        self.next = 0;
        loop {
            let is_read = match self.is_back {
                true => self.read_segment_back().await?,
                false => !self.range.is_empty() && self.read_segment().await?,
            };
            if !is_read || !self.views.is_empty() {
                return Ok(is_read);
            }
        }
    }

    /// Reads the last segment that has elements of the walk. False if there is none. After an error, it
    /// is still the last one.
    async fn read_segment_back(&mut self) -> Result<bool, Fault> {
        let end = self.range.end.min(self.items.len);
        if self.range.start >= end {
            return Ok(false);
        }
        let tables = self.far.tables();
        let mut place = match self.passed {
            // `index` is that of the end of the segment here, from the first one on.
            0 => self.items.last(end, tables),
            _ => Some((self.at, self.index)),
        };
        while let Some((at, until)) = place {
            let Some((segment, _)) = self.items.segment(at, tables) else { break };
            let start = until.saturating_sub(segment.count);
            let before = self.items.before(at);
            if start >= end {
                place = before.map(|at| (at, start));
                continue;
            }
            if self.passed == 0 {
                self.ahead = at;
            }
            (self.at, self.index) = (at, until);
            self.fetch_ahead();
            let from = start.max(self.range.start);
            let (part, views) = (segment.part::<T>(from - start, end - from), &mut self.views);
            // SAFETY: as in `read_segment`.
            self.far.look(part, |found| unsafe { found.values::<T>(0, end - from, views) }).await?;
            self.views.reverse();
            self.range.end = from;
            return Ok(true);
        }
        // Elements that exist are not in the part of the table that came with the call.
        self.far.halt_without_table().await
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
            if self.is_back {
                let Some(before) = self.items.before(self.ahead) else { return };
                self.ahead = before;
            }
            let Some((segment, next)) = self.items.segment(self.ahead, tables) else { return };
            if !self.is_back {
                self.ahead = next;
            }
            if self.passed > 1 {
                self.far.announce(segment.object);
            }
        }
    }
}
