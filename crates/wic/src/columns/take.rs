//! `ff.take.*`: elements of a column in the order of indices, put one after the other into whole pages of the same region (AIFM's *Shuffle*).
//! One function for each size of element.

use super::Walk;
use super::copy::Target;
use crate::{Fault, Function, Place, Range};
use farfield_core::geometry::PAGE_BYTES;
use serde::{Deserialize, Serialize};

const PAGE: u64 = PAGE_BYTES as u64;

/// Takes elements of `BYTES` bytes.
#[derive(Debug)]
pub struct Take<const BYTES: usize>;

/// What is taken, and where to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Taken {
    /// The column, in order; counts are of elements.
    pub from: Vec<Range>,
    /// Which elements, in the order in which they are put.
    pub indices: Vec<Indices>,
    /// Whole pages that get them, as in [`Copied`](super::Copied).
    pub to: Vec<Range>,
}

/// Some indices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Indices {
    /// These.
    These(Vec<u64>),
    /// Words of the region, little-endian.
    There(Range),
}

impl Taken {
    /// Elements that are looked up together: the more, the more of them share a page. They take some twelve megabytes.
    pub const BATCH: usize = 1 << Entry::NUMBER_BITS;
}

#[cfg(test)]
const BATCH_PAGES: usize = Taken::BATCH * 8 / PAGE_BYTES;
/// So many elements for each page of a column take longer when they are read than when they are loaded and then all of its pages are compared.
const LOADED: u64 = 6;
/// And so many at most: what is noted of pages takes memory.
const LOADED_MAX: u64 = 1 << 23;
/// Elements that are loaded together.
const LOADS: usize = 2048;
/// So many elements of a page take longer one by one than the page.
const DENSE: usize = 12;
/// Pages that are on their way together.
const PAGES: usize = 8;
/// And elements.
const ELEMENTS: usize = 512;
/// Most buckets that elements are put into, by their pages.
const BUCKETS_MAX: u64 = 1 << 16;

impl<const BYTES: usize> Function for Take<BYTES> {
    const NAME: &'static str = match BYTES {
        1 => "ff.take.1",
        2 => "ff.take.2",
        4 => "ff.take.4",
        8 => "ff.take.8",
        _ => panic!("numbers have 1, 2, 4 or 8 bytes"),
    };
    const VERSION: u32 = 1;
    type Argument = Taken;
    /// The first index behind the column, if there is one. Then pages are written in part.
    type Answer = Option<u64>;

    async fn run<P: Place>(place: &P, taken: Taken) -> Result<Option<u64>, Fault> {
        let column = Pieces::new(&taken.from, BYTES as u64, place.region_bytes())?;
        let wanted = taken.indices.iter().map(Indices::count).fold(0, u64::saturating_add);
        if (column.pages_all * LOADED..=LOADED_MAX).contains(&wanted) && column.is_aligned() {
            let sums = column.sums(place).await?;
            let mut loads = Loads::<BYTES>::new(Target::new(place, &taken.to)?);
            let outside = put_all(place, &column, &taken.indices, &mut loads).await?;
            if outside.is_some() || column.matches(place, &sums).await? {
                return Ok(outside);
            }
            // Somebody writes to a page of the column, or one is corrupt: each is compared as it is read.
        }
        let mut batch = Batch::<BYTES>::new(Target::new(place, &taken.to)?, column.buckets(wanted));
        put_all(place, &column, &taken.indices, &mut batch).await
    }
}

/// Puts elements where they belong.
trait Puts {
    /// So many more before it puts them.
    fn room(&self) -> usize;
    /// Takes the index of an element for which there is room; `None`: there is none.
    fn add(&mut self, column: &Pieces, index: u64) -> Option<()>;
    async fn put<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault>;
    /// Of the rest.
    async fn end<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault>;
}

/// The elements with these indices, or the first index with which there is none.
async fn put_all<P: Place>(
    place: &P,
    column: &Pieces,
    indices: &[Indices],
    into: &mut impl Puts,
) -> Result<Option<u64>, Fault> {
    for indices in indices {
        match indices {
            Indices::These(these) => {
                let mut these = these.as_slice();
                while !these.is_empty() {
                    let (now, later) = these.split_at(these.len().min(into.room()));
                    if let Some(outside) = now.iter().find(|index| into.add(column, **index).is_none()) {
                        return Ok(Some(*outside));
                    }
                    if into.room() == 0 {
                        into.put(place, column).await?;
                    }
                    these = later;
                }
            }
            Indices::There(range) => {
                let pieces = [*range];
                let mut walk = Walk::new(&pieces, 8);
                loop {
                    let count = walk.ready().min(into.room() as u64);
                    if count == 0 {
                        break;
                    }
                    {
                        let bytes = walk.next(place, count).await?;
                        let mut words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
                        if let Some(outside) = words.find(|index| into.add(column, *index).is_none()) {
                            return Ok(Some(outside));
                        }
                    }
                    if into.room() == 0 {
                        into.put(place, column).await?;
                    }
                }
            }
        }
    }
    into.end(place, column).await?;
    Ok(None)
}

impl Indices {
    fn count(&self) -> u64 {
        match self {
            Indices::These(these) => these.len() as u64,
            Indices::There(range) => range.count,
        }
    }
}

/// Elements of a column of which most pages have many: loaded one by one, as they come; each page is compared with its checksum when all are there.
struct Loads<'t, const BYTES: usize> {
    target: Target<'t>,
    offsets: Vec<u64>,
    elements: Vec<[u8; BYTES]>,
}

impl<'t, const BYTES: usize> Loads<'t, BYTES> {
    fn new(target: Target<'t>) -> Loads<'t, BYTES> {
        Loads { target, offsets: Vec::with_capacity(LOADS), elements: vec![[0; BYTES]; LOADS] }
    }
}

impl<const BYTES: usize> Puts for Loads<'_, BYTES> {
    fn room(&self) -> usize {
        LOADS - self.offsets.len()
    }

    fn add(&mut self, column: &Pieces, index: u64) -> Option<()> {
        self.offsets.push(column.offset(index)?);
        Some(())
    }

    async fn put<P: Place>(&mut self, place: &P, _column: &Pieces) -> Result<(), Fault> {
        let elements = &mut self.elements[..self.offsets.len()];
        place.load_many(&self.offsets, elements).await?;
        self.offsets.clear();
        self.target.put(place, elements.as_flattened()).await
    }

    async fn end<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault> {
        self.put(place, column).await?;
        self.target.end(place).await
    }
}

/// An element that is looked up, as one word: its position in the column, and which it is of those that are put. In order, so are the positions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Entry(u64);

impl Entry {
    const NUMBER_BITS: u32 = 19;
    /// What a position is less than.
    const POSITIONS: u64 = 1 << (u64::BITS - Entry::NUMBER_BITS);

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

/// Elements that are looked up together, in the order of the pages that have them: each page is read and compared with its checksum once.
struct Batch<'t, const BYTES: usize> {
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
    fn new(target: Target<'t>, buckets: Buckets) -> Batch<'t, BYTES> {
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

/// A column, by index. Its pieces are also thought of one behind the other, page by page: the *position* of an element is where its bytes are then.
struct Pieces {
    /// Elements before the end of each piece.
    ends: Vec<u64>,
    /// What to add to the bytes before an element of each to get its offset in the region, and its position.
    bases: Vec<[u64; 2]>,
    /// Pages before each piece, and its first page in the region.
    pages: Vec<(u64, u64)>,
    pages_all: u64,
    bytes: u64,
}

impl Pieces {
    fn new(pieces: &[Range], bytes: u64, region_bytes: u64) -> Result<Pieces, Fault> {
        let (ends, bases, pages) = Default::default();
        let mut column = Pieces { ends, bases, pages, pages_all: 0, bytes };
        let mut before = 0u64;
        for piece in pieces {
            let outside = Fault::OutOfRange { offset: piece.offset };
            let len = piece.count.checked_mul(bytes).ok_or(outside)?;
            let end = piece.offset.checked_add(len).filter(|end| *end <= region_bytes).ok_or(outside)?;
            if len == 0 {
                continue;
            }
            let position = column.pages_all * PAGE + piece.offset % PAGE;
            column.bases.push([piece.offset, position].map(|start| start.wrapping_sub(before * bytes)));
            before += piece.count;
            column.ends.push(before);
            column.pages.push((column.pages_all, piece.offset / PAGE));
            column.pages_all += end.div_ceil(PAGE) - piece.offset / PAGE;
            if column.pages_all > Entry::POSITIONS / PAGE {
                return Err(Fault::TooLong { bytes: before * bytes });
            }
        }
        Ok(column)
    }

    /// Does no element go beyond the end of its page?
    fn is_aligned(&self) -> bool {
        self.bases.iter().all(|[offset, _]| offset.is_multiple_of(self.bytes))
    }

    #[inline]
    fn base(&self, index: u64) -> Option<[u64; 2]> {
        let piece = self.ends.partition_point(|end| *end <= index);
        self.bases.get(piece).copied()
    }

    /// Where the element with this index lies in the region.
    #[inline]
    fn offset(&self, index: u64) -> Option<u64> {
        self.base(index).map(|[offset, _]| offset.wrapping_add(index.wrapping_mul(self.bytes)))
    }

    #[inline]
    fn position(&self, index: u64) -> Option<u64> {
        self.base(index).map(|[_, position]| position.wrapping_add(index.wrapping_mul(self.bytes)))
    }

    /// Where a position is in the region.
    fn offset_of(&self, position: u64) -> u64 {
        let page = position / PAGE;
        let piece = self.pages.partition_point(|(before, _)| *before <= page) - 1;
        let (before, first) = self.pages[piece];
        (first + page - before) * PAGE + position % PAGE
    }

    /// The first page of each piece, and how many it has.
    fn runs(&self) -> impl Iterator<Item = (u64, usize)> {
        let ends = self.pages.iter().skip(1).map(|(before, _)| *before).chain([self.pages_all]);
        self.pages.iter().zip(ends).map(|((before, first), end)| (first * PAGE, (end - before) as usize))
    }

    /// The checksums that its pages should have.
    async fn sums<P: Place>(&self, place: &P) -> Result<Vec<Vec<u64>>, Fault> {
        let mut sums = Vec::with_capacity(self.pages.len());
        for (offset, count) in self.runs() {
            sums.push(place.sums(offset, count).await?);
        }
        Ok(sums)
    }

    async fn matches<P: Place>(&self, place: &P, sums: &[Vec<u64>]) -> Result<bool, Fault> {
        for ((offset, _), sums) in self.runs().zip(sums) {
            if !place.matches(offset, sums).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// For so many elements.
    fn buckets(&self, wanted: u64) -> Buckets {
        let most = wanted.clamp(1, BUCKETS_MAX);
        let mut shift = PAGE.ilog2();
        while (self.pages_all * PAGE) >> shift > most {
            shift += 1;
        }
        let buckets = ((self.pages_all * PAGE) >> shift) + 1;
        Buckets { shift, ends: vec![0; buckets as usize] }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an element of another index, and against reads behind the column.
    use super::*;
    use crate::{Sim, Stop};

    fn range(offset: u64, count: u64) -> Range {
        Range { offset, count }
    }

    fn run<const BYTES: usize>(indices: Vec<Indices>) -> (Result<Option<u64>, Stop>, Vec<u8>, Vec<u8>) {
        // Two pages of column in three pieces, a page of indices, room.
        let mut bytes: Vec<u8> = (0..2 * PAGE_BYTES).map(|index| (index * 31 % 241) as u8).collect();
        (0..512u64).for_each(|index| bytes.extend((index * 37 % 600).to_le_bytes()));
        bytes.resize(30 * PAGE_BYTES, 0xEE);
        let wide = BYTES as u64;
        let from = vec![range(PAGE, 300), range(0, 0), range(16, 200), range(16 + 200 * wide, 100)];
        let flat: Vec<u8> = [&bytes[PAGE_BYTES..][..300 * BYTES], &bytes[16..][..300 * BYTES]].concat();
        let sim = Sim::new(9, bytes);
        let answer =
            sim.run_one::<Take<BYTES>>(Taken { from, indices, to: vec![range(20 * PAGE, 4), range(10 * PAGE, 4)] });
        (answer, flat, sim.bytes())
    }

    fn check<const BYTES: usize>() {
        let these: Vec<u64> = (0..700).map(|index| index * 13 % 600).collect();
        let indices =
            vec![Indices::These(these.clone()), Indices::There(range(2 * PAGE, 512)), Indices::These(vec![599])];
        let (answer, flat, after) = run::<BYTES>(indices);
        assert_eq!(answer, Ok(None));
        let all = these.into_iter().chain((0..512).map(|index| index * 37 % 600)).chain([599]);
        let mut wanted: Vec<u8> = all.flat_map(|index| flat[index as usize * BYTES..][..BYTES].to_vec()).collect();
        wanted.resize(wanted.len().next_multiple_of(PAGE_BYTES), 0);
        let got = [&after[20 * PAGE_BYTES..24 * PAGE_BYTES], &after[10 * PAGE_BYTES..14 * PAGE_BYTES]].concat();
        assert_eq!(got[..wanted.len()], wanted);
        assert!(got[wanted.len()..].iter().all(|byte| *byte == 0xEE), "pages that nothing was put into");
    }

    /// Elements that cross the ends of pages, pages with few of them and with many, more of them than are looked up together.
    #[test]
    fn batches_are_those_of_a_loop() {
        let bytes: Vec<u8> = (0..40 * PAGE).map(|index| ((index * 31 % 241) ^ (index >> 8)) as u8).collect();
        // Eight pages of column, one piece of it beside the words of everybody else.
        let from = vec![range(3, 300), range(4 * PAGE, 2 * PAGE / 8), range(8 * PAGE - 5, 600)];
        let starts: Vec<u64> =
            from.iter().flat_map(|piece| (0..piece.count).map(|index| piece.offset + index * 8)).collect();
        let count = Taken::BATCH as u64 + 5000;
        let to = BATCH_PAGES + 10;
        let near = |index: u64| index.is_multiple_of(3);
        let wanted = |index: u64| if near(index) { index % 9 } else { (index * index) % starts.len() as u64 };
        for all in [0, 1, count] {
            let indices = vec![Indices::These((0..all).map(wanted).collect())];
            let sim = Sim::new(all, [&bytes[..], &vec![0; to * PAGE_BYTES]].concat());
            let to = vec![range(40 * PAGE, to as u64)];
            let answer = sim.run_one::<Take<8>>(Taken { from: from.clone(), indices, to });
            assert_eq!(answer, Ok(None));
            let after = sim.bytes();
            for index in 0..all {
                let start = starts[wanted(index) as usize] as usize;
                let got = &after[40 * PAGE_BYTES + index as usize * 8..][..8];
                assert_eq!(got, &bytes[start..start + 8], "element {index} of {all}");
            }
        }
    }

    #[test]
    fn a_page_with_many_of_them_is_read_once() {
        // Of a column with far more pages than they are in.
        let bytes = vec![7; (1024 + 8) * PAGE_BYTES];
        let indices = vec![Indices::These((0..4096).map(|index| index * 37 % 1024).collect())];
        let taken = Taken { from: vec![range(0, 512 * 1024)], indices, to: vec![range(1024 * PAGE, 8)] };
        // Two pages, and what is written: two steps for a page, some more for what goes together.
        let answer = Sim::new(1, bytes).steps(2 * 2 + 2 * 8).run_one::<Take<8>>(taken);
        assert_eq!(answer, Ok(None));
    }

    #[test]
    fn elements_come_in_the_order_of_their_indices() {
        check::<1>();
        check::<2>();
        check::<4>();
        check::<8>();
    }

    #[test]
    fn an_index_behind_the_column_is_said() {
        assert_eq!(run::<8>(vec![Indices::These(vec![3, 600, 700])]).0, Ok(Some(600)));
        assert_eq!(run::<8>(vec![Indices::These(vec![u64::MAX])]).0, Ok(Some(u64::MAX)));
        let outside = Range { offset: 30 * PAGE - 8, count: 2 };
        let fault = Err(Stop::Fault(Fault::OutOfRange { offset: 30 * PAGE - 8 }));
        assert_eq!(run::<4>(vec![Indices::There(outside)]).0, fault);
    }

    #[test]
    fn columns_outside_the_region_are_refused() {
        for (offset, count) in [(0, 513), (8, 512), (u64::MAX, 1), (8, u64::MAX / 4)] {
            let taken = Taken { from: vec![range(offset, count)], indices: Vec::new(), to: Vec::new() };
            let answer = Sim::new(1, vec![0; 4096]).run_one::<Take<8>>(taken);
            assert_eq!(answer, Err(Stop::Fault(Fault::OutOfRange { offset })));
        }
    }
}
