//! `ff.take.*`: gathers elements of a column, in the order of indices, into whole pages of the same
//! region (AIFM's *Shuffle*). There is one function for each size of element.
//!
//! There are two implementations: `loads` and `batch`.

mod batch;
mod loads;
mod pieces;

use super::PieceCursor;
use super::copy::PageStreamWriter;
use crate::{Fault, Function, Place, Range};
use batch::{Entry, SortedGather};
use farfield_core::geometry::PAGE_BYTES;
use loads::DirectGather;
use pieces::Pieces;
use serde::{Deserialize, Serialize};

const PAGE: u64 = PAGE_BYTES as u64;

/// Takes elements of `BYTES` bytes.
#[derive(Debug)]
pub struct Take<const BYTES: usize>;

/// Column, indices, and pages for the result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Taken {
    /// The column, in order; counts are of elements.
    pub from: Vec<Range>,
    /// Indices of the elements, in the order of the output.
    pub indices: Vec<Indices>,
    /// Output: whole pages, as in [`Copied`](super::Copied).
    pub to: Vec<Range>,
}

/// A list of indices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Indices {
    /// Indices in the argument.
    These(Vec<u64>),
    /// Indices in words of the region, little-endian.
    There(Range),
}

impl Taken {
    /// Elements that are looked up together: the more they are, the more of them share a page. They
    /// take about twelve megabytes.
    pub const BATCH: usize = 1 << Entry::NUMBER_BITS;
}

#[cfg(test)]
const BATCH_PAGES: usize = Taken::BATCH * 8 / PAGE_BYTES;
/// Number of elements for each page of a column from which on loading them, and then comparing all
/// pages, is faster than reading them.
const LOADED: u64 = 6;
/// Most elements to load: the checksums of the pages take memory.
const LOADED_MAX: u64 = 1 << 23;

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
    /// First index beyond the end of the column, if there is one. Then only a part of the pages is
    /// written.
    type Answer = Option<u64>;

    async fn run<P: Place>(place: &P, taken: Taken) -> Result<Option<u64>, Fault> {
        let column = Pieces::new(&taken.from, BYTES as u64, place.region_bytes())?;
        let wanted = taken.indices.iter().map(Indices::count).fold(0, u64::saturating_add);
        if (column.pages_all * LOADED..=LOADED_MAX).contains(&wanted) && column.is_aligned() {
            let sums = column.sums(place).await?;
            let mut loads = DirectGather::<BYTES>::new(PageStreamWriter::new(place, &taken.to)?);
            let outside = put_all(place, &column, &taken.indices, &mut loads).await?;
            if outside.is_some() || column.matches(place, &sums).await? {
                return Ok(outside);
            }
            // A page of the column is being written, or is corrupt: each is compared as it is read.
        }
        let mut batch = SortedGather::<BYTES>::new(PageStreamWriter::new(place, &taken.to)?, &column, wanted);
        put_all(place, &column, &taken.indices, &mut batch).await
    }
}

/// Output of the elements with given indices.
trait ElementGather {
    /// Returns how many more indices can be added before [`ElementGather::put`].
    fn room(&self) -> usize;
    /// Adds the index of an element, for which there must be room; `None` if there is no such
    /// element.
    fn add(&mut self, column: &Pieces, index: u64) -> Option<()>;
    async fn put<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault>;
    /// Puts the rest of the elements.
    async fn end<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault>;
}

/// Puts the elements with these indices. Returns the first index that has no element.
async fn put_all<P: Place>(
    place: &P,
    column: &Pieces,
    indices: &[Indices],
    into: &mut impl ElementGather,
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
                let mut walk = PieceCursor::new(&pieces, 8);
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

    /// Elements that cross the ends of pages, pages with few of them and with many, more of them
    /// than are looked up together.
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
