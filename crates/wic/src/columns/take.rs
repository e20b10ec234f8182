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

/// Indices that are looked up together: the more, the more of them share a page. They take some ten megabytes.
const BATCH: usize = 256 * 1024;
#[cfg(test)]
const BATCH_PAGES: usize = BATCH * 8 / PAGE_BYTES;
/// So many elements of a page take longer one by one than the page.
const DENSE: usize = 12;
/// Pages that are on their way together.
const PAGES: usize = 8;
/// And elements.
const ELEMENTS: usize = 512;

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
        let mut batch = Batch::<BYTES>::new(Target::new(place, &taken.to)?);
        for indices in &taken.indices {
            match indices {
                Indices::These(these) => {
                    let mut these = these.as_slice();
                    while !these.is_empty() {
                        let (now, later) = these.split_at(these.len().min(batch.room()));
                        if let Some(outside) = batch.add(place, &column, now.iter().copied()).await? {
                            return Ok(Some(outside));
                        }
                        these = later;
                    }
                }
                Indices::There(range) => {
                    let pieces = [*range];
                    let mut walk = Walk::new(&pieces, 8);
                    loop {
                        let count = walk.ready().min(batch.room() as u64);
                        if count == 0 {
                            break;
                        }
                        let bytes = walk.next(place, count).await?;
                        let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
                        if let Some(outside) = batch.add(place, &column, words).await? {
                            return Ok(Some(outside));
                        }
                    }
                }
            }
        }
        batch.end(place).await?;
        Ok(None)
    }
}

/// An element that is looked up: where it lies, and which it is of those that are put.
#[derive(Clone, Copy)]
struct Entry {
    offset: u64,
    number: u32,
}

impl Entry {
    fn page(self) -> u64 {
        self.offset / PAGE
    }

    /// Its bytes, of the page that has them all.
    fn bytes_of<const BYTES: usize>(self, page: &[u8; PAGE_BYTES]) -> [u8; BYTES] {
        let skip = (self.offset % PAGE) as usize;
        *page[skip..].first_chunk().expect("it ends inside its page")
    }

    fn ends_inside(self, bytes: usize) -> bool {
        self.offset % PAGE + bytes as u64 <= PAGE
    }
}

/// Elements that are looked up together, in the order of the pages that have them: each page is read and compared with its checksum once.
struct Batch<'t, const BYTES: usize> {
    target: Target<'t>,
    /// In the order in which they are put; when they are looked up, in that of their pages.
    entries: Vec<Entry>,
    elements: Vec<[u8; BYTES]>,
    /// Pages that are read whole, and which of the entries are of each.
    pages: Vec<(u64, core::ops::Range<usize>)>,
    /// Those that are read alone.
    alone: Vec<Entry>,
    buffers: Vec<[u8; PAGE_BYTES]>,
}

impl<'t, const BYTES: usize> Batch<'t, BYTES> {
    fn new(target: Target<'t>) -> Batch<'t, BYTES> {
        let (entries, elements, pages) = Default::default();
        Batch { target, entries, elements, pages, alone: Vec::new(), buffers: Vec::new() }
    }

    /// So many more before it is put.
    fn room(&self) -> usize {
        BATCH - self.entries.len()
    }

    /// Takes indices for which there is [room](Batch::room), unless there is no element with one of them.
    async fn add<P: Place>(
        &mut self,
        place: &P,
        column: &Pieces,
        indices: impl Iterator<Item = u64>,
    ) -> Result<Option<u64>, Fault> {
        for index in indices {
            let number = self.entries.len() as u32;
            match column.offset(index) {
                Some(offset) => self.entries.push(Entry { offset, number }),
                None => return Ok(Some(index)),
            }
        }
        if self.room() == 0 {
            self.put(place).await?;
        }
        Ok(None)
    }

    async fn put<P: Place>(&mut self, place: &P) -> Result<(), Fault> {
        self.plan();
        self.read_pages(place).await?;
        self.read_alone(place).await?;
        self.target.put(place, self.elements.as_flattened()).await?;
        self.entries.clear();
        Ok(())
    }

    async fn end<P: Place>(mut self, place: &P) -> Result<u64, Fault> {
        self.put(place).await?;
        self.target.end(place).await
    }

    /// Which pages are read, and what else.
    fn plan(&mut self) {
        let Batch { entries, elements, pages, alone, .. } = self;
        radsort::sort_by_key(entries, |entry| entry.page());
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

    async fn read_pages<P: Place>(&mut self, place: &P) -> Result<(), Fault> {
        let Batch { entries, elements, pages, buffers, .. } = self;
        for some in pages.chunks(PAGES) {
            buffers.resize(PAGES, [0; PAGE_BYTES]);
            let mut from = [0; PAGES];
            from.iter_mut().zip(some).for_each(|(from, (page, _))| *from = *page);
            place.read_many(&from[..some.len()], &mut buffers[..some.len()]).await?;
            for ((_, of_page), page) in some.iter().zip(buffers.iter()) {
                for entry in &entries[of_page.clone()] {
                    elements[entry.number as usize] = entry.bytes_of(page);
                }
            }
        }
        Ok(())
    }

    async fn read_alone<P: Place>(&mut self, place: &P) -> Result<(), Fault> {
        let mut from = [0; ELEMENTS];
        let mut found = [[0; BYTES]; ELEMENTS];
        for some in self.alone.chunks(ELEMENTS) {
            from.iter_mut().zip(some).for_each(|(from, entry)| *from = entry.offset);
            place.read_many(&from[..some.len()], &mut found[..some.len()]).await?;
            some.iter().zip(&found).for_each(|(entry, found)| self.elements[entry.number as usize] = *found);
        }
        Ok(())
    }
}

/// A column, by index.
struct Pieces {
    /// Elements before the end of each piece, and where an element 0 would lie if all were side by side as in the piece.
    ends: Vec<(u64, u64)>,
    bytes: u64,
}

impl Pieces {
    fn new(pieces: &[Range], bytes: u64, region_bytes: u64) -> Result<Pieces, Fault> {
        let mut before = 0u64;
        let ends = pieces.iter().map(|piece| {
            let outside = Fault::OutOfRange { offset: piece.offset };
            let len = piece.count.checked_mul(bytes).ok_or(outside)?;
            let end = piece.offset.checked_add(len).filter(|end| *end <= region_bytes);
            end.ok_or(outside)?;
            let base = piece.offset.wrapping_sub(before.wrapping_mul(bytes));
            before = before.checked_add(piece.count).ok_or(outside)?;
            Ok((before, base))
        });
        Ok(Pieces { ends: ends.collect::<Result<_, Fault>>()?, bytes })
    }

    /// Where the element with this index lies.
    fn offset(&self, index: u64) -> Option<u64> {
        let piece = self.ends.partition_point(|(end, _)| *end <= index);
        let (_, base) = self.ends.get(piece)?;
        Some(base.wrapping_add(index.wrapping_mul(self.bytes)))
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
        let count = BATCH as u64 + 5000;
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
        let bytes = vec![7; (8 + BATCH_PAGES) * PAGE_BYTES];
        let indices = vec![Indices::These((0..BATCH as u64).map(|index| index * 37 % 1024).collect())];
        let taken = Taken { from: vec![range(0, 1024)], indices, to: vec![range(8 * PAGE, BATCH_PAGES as u64)] };
        // Two pages, and what is written: two steps for a page, some more for what goes together.
        let answer = Sim::new(1, bytes).steps(2 * 2 + 2 * BATCH_PAGES as u64).run_one::<Take<8>>(taken);
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
