//! Batched look-up of elements, in the order of the pages that have them: each page is read and
//! compared with its checksum once.

use super::{ElementGather, PAGE, PageStreamWriter, Pieces, Taken};
use crate::{Fault, Place};
use farfield_core::geometry::PAGE_BYTES;

/// Number of elements of a page from which on it is faster to read the whole page.
const DENSE: usize = 12;
/// Pages that are read together.
const PAGES: usize = 8;
/// Elements that are read together.
const ELEMENTS: usize = 512;
/// Most buckets into which elements are sorted by their pages.
const BUCKETS_MAX: u64 = 1 << 16;

/// An element to look up, as one word: its position in the column, and its number in the output.
/// Entries are ordered by position.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Entry(u64);

impl Entry {
    pub(super) const NUMBER_BITS: u32 = 19;
    /// Bound of the positions: all are less than this.
    pub(super) const POSITIONS: u64 = 1 << (u64::BITS - Entry::NUMBER_BITS);

    fn new(position: u64, number: usize) -> Entry {
        Entry(position << Entry::NUMBER_BITS | number as u64)
    }

    fn number(self) -> usize {
        (self.0 & ((1 << Entry::NUMBER_BITS) - 1)) as usize
    }

    fn position(self) -> u64 {
        self.0 >> Entry::NUMBER_BITS
    }

    fn page(self) -> u64 {
        self.position() / PAGE
    }

    /// Returns the element's bytes from its page.
    fn bytes_of<const BYTES: usize>(self, page: &[u8; PAGE_BYTES]) -> [u8; BYTES] {
        let skip = (self.position() % PAGE) as usize;
        *page[skip..].first_chunk().expect("it ends inside its page")
    }

    fn ends_inside(self, bytes: usize) -> bool {
        self.position() % PAGE + bytes as u64 <= PAGE
    }
}

/// Elements of a column that are looked up together, in the order of their pages.
pub(super) struct SortedGather<'t, const BYTES: usize> {
    target: PageStreamWriter<'t>,
    buckets: PageBuckets,
    /// Positions in the order of the output.
    positions: Vec<u64>,
    /// Entries of these positions in the order of their pages.
    entries: Vec<Entry>,
    elements: Vec<[u8; BYTES]>,
    /// Pages that are read whole, and the range of the entries of each.
    pages: Vec<(u64, core::ops::Range<usize>)>,
    /// Entries that are read one by one.
    alone: Vec<Entry>,
    buffers: Vec<[u8; PAGE_BYTES]>,
}

impl<'t, const BYTES: usize> SortedGather<'t, BYTES> {
    /// Makes a batch for `wanted` elements of a column in all.
    pub(super) fn new(target: PageStreamWriter<'t>, column: &Pieces, wanted: u64) -> SortedGather<'t, BYTES> {
        let buckets = PageBuckets::new(column, wanted);
        let (positions, entries, elements, pages) = Default::default();
        SortedGather { target, buckets, positions, entries, elements, pages, alone: Vec::new(), buffers: Vec::new() }
    }

    /// Decides which pages are read whole, and which elements one by one.
    fn plan(&mut self) {
        let SortedGather { entries, elements, pages, alone, .. } = self;
        elements.resize(entries.len(), [0; BYTES]);
        pages.clear();
        alone.clear();
        let mut first = 0;
        for group in entries.chunk_by(|one, other| one.page() == other.page()) {
            let of_page = first..first + group.len();
            first = of_page.end;
            if group.len() >= DENSE && group.iter().all(|entry| entry.ends_inside(BYTES)) {
                pages.push((group[0].page() * PAGE, of_page));
            } else {
                alone.extend_from_slice(group);
            }
        }
    }

    async fn read_pages<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault> {
        let SortedGather { entries, elements, pages, buffers, .. } = self;
        for some in pages.chunks(PAGES) {
            buffers.resize(PAGES, [0; PAGE_BYTES]);
            let mut from = [0; PAGES];
            from.iter_mut().zip(some).for_each(|(from, (page, _))| *from = column.offset_of(*page));
            place.read_many(&from[..some.len()], &mut buffers[..some.len()]).await?;
            for ((_, of_page), page) in some.iter().zip(buffers.iter()) {
                for entry in &entries[of_page.clone()] {
                    elements[entry.number()] = entry.bytes_of(page);
                }
            }
        }
        Ok(())
    }

    async fn read_alone<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault> {
        let mut from = [0; ELEMENTS];
        let mut found = [[0; BYTES]; ELEMENTS];
        for some in self.alone.chunks(ELEMENTS) {
            from.iter_mut().zip(some).for_each(|(from, entry)| *from = column.offset_of(entry.position()));
            place.read_many(&from[..some.len()], &mut found[..some.len()]).await?;
            some.iter().zip(&found).for_each(|(entry, found)| self.elements[entry.number()] = *found);
        }
        Ok(())
    }
}

impl<const BYTES: usize> ElementGather for SortedGather<'_, BYTES> {
    fn room(&self) -> usize {
        Taken::BATCH - self.positions.len()
    }

    fn add(&mut self, column: &Pieces, index: u64) -> Option<()> {
        self.positions.push(column.position(index)?);
        Some(())
    }

    async fn put<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault> {
        self.buckets.sort(&self.positions, &mut self.entries);
        self.positions.clear();
        self.plan();
        self.read_pages(place, column).await?;
        self.read_alone(place, column).await?;
        self.target.put(place, self.elements.as_flattened()).await
    }

    async fn end<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault> {
        self.put(place, column).await?;
        self.target.end(place).await
    }
}

/// Counting sort of elements by page. A bucket is a page, or a power of two of them when the column
/// has too many.
struct PageBuckets {
    shift: u32,
    /// Number of elements of each bucket, then the index of its next one.
    ends: Vec<u32>,
}

impl PageBuckets {
    /// Makes buckets for `wanted` elements of a column.
    fn new(column: &Pieces, wanted: u64) -> PageBuckets {
        let (bytes, most) = (column.pages_all * PAGE, wanted.clamp(1, BUCKETS_MAX));
        let mut shift = PAGE.ilog2();
        while bytes >> shift > most {
            shift += 1;
        }
        PageBuckets { shift, ends: vec![0; (bytes >> shift) as usize + 1] }
    }

    /// Writes the entries of all positions, in the order of their pages, to `into`.
    fn sort(&mut self, positions: &[u64], into: &mut Vec<Entry>) {
        let PageBuckets { shift, ends } = self;
        let bucket = |position: u64| (position >> *shift) as usize;
        ends.fill(0);
        positions.iter().for_each(|position| ends[bucket(*position)] += 1);
        let mut before = 0;
        for end in ends.iter_mut() {
            before += core::mem::replace(end, before);
        }
        into.resize(positions.len(), Entry::default());
        for (number, position) in positions.iter().enumerate() {
            let next = &mut ends[bucket(*position)];
            into[*next as usize] = Entry::new(*position, number);
            *next += 1;
        }
        if PAGE >> *shift == 0 {
            let mut start = 0;
            for end in ends {
                into[start..*end as usize].sort_unstable();
                start = *end as usize;
            }
        }
    }
}
