//! Elements that are looked up together, in the order of the pages that have them: each page is read and compared with its checksum once.

use super::{PAGE, Pieces, Puts, Taken, Target};
use crate::{Fault, Place};
use farfield_core::geometry::PAGE_BYTES;

/// So many elements of a page take longer one by one than the page.
const DENSE: usize = 12;
/// Pages that are on their way together.
const PAGES: usize = 8;
/// And elements.
const ELEMENTS: usize = 512;
/// Most buckets that elements are put into, by their pages.
const BUCKETS_MAX: u64 = 1 << 16;

/// An element that is looked up, as one word: its position in the column, and which it is of those that are put. In order, so are the positions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Entry(u64);

impl Entry {
    pub(super) const NUMBER_BITS: u32 = 19;
    /// What a position is less than.
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

    /// Its bytes, of the page that has them all.
    fn bytes_of<const BYTES: usize>(self, page: &[u8; PAGE_BYTES]) -> [u8; BYTES] {
        let skip = (self.position() % PAGE) as usize;
        *page[skip..].first_chunk().expect("it ends inside its page")
    }

    fn ends_inside(self, bytes: usize) -> bool {
        self.position() % PAGE + bytes as u64 <= PAGE
    }
}

/// See the module.
pub(super) struct Batch<'t, const BYTES: usize> {
    target: Target<'t>,
    buckets: Buckets,
    /// Positions in the order in which they are put.
    positions: Vec<u64>,
    /// The same in the order of their pages.
    entries: Vec<Entry>,
    elements: Vec<[u8; BYTES]>,
    /// Pages that are read whole, and which of the entries are of each.
    pages: Vec<(u64, core::ops::Range<usize>)>,
    /// Those that are read alone.
    alone: Vec<Entry>,
    buffers: Vec<[u8; PAGE_BYTES]>,
}

impl<'t, const BYTES: usize> Batch<'t, BYTES> {
    /// For so many elements of a column, in all.
    pub(super) fn new(target: Target<'t>, column: &Pieces, wanted: u64) -> Batch<'t, BYTES> {
        let buckets = Buckets::new(column, wanted);
        let (positions, entries, elements, pages) = Default::default();
        Batch { target, buckets, positions, entries, elements, pages, alone: Vec::new(), buffers: Vec::new() }
    }

    /// Which pages are read, and what else.
    fn plan(&mut self) {
        let Batch { entries, elements, pages, alone, .. } = self;
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
        let Batch { entries, elements, pages, buffers, .. } = self;
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

impl<const BYTES: usize> Puts for Batch<'_, BYTES> {
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

/// Sorts elements by page: counted first, then put into place, each once. A bucket is a page, or a power of two of them when the column has too many.
struct Buckets {
    shift: u32,
    /// How many are in each, then where its next one goes.
    ends: Vec<u32>,
}

impl Buckets {
    /// For so many elements of a column.
    fn new(column: &Pieces, wanted: u64) -> Buckets {
        let (bytes, most) = (column.pages_all * PAGE, wanted.clamp(1, BUCKETS_MAX));
        let mut shift = PAGE.ilog2();
        while bytes >> shift > most {
            shift += 1;
        }
        Buckets { shift, ends: vec![0; (bytes >> shift) as usize + 1] }
    }

    /// All positions, with what number each has, in the order of their pages.
    fn sort(&mut self, positions: &[u64], into: &mut Vec<Entry>) {
        let Buckets { shift, ends } = self;
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
