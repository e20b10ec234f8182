//! `ff.take.*`: elements of a column in the order of indices, put one after the other into whole pages of the same region (AIFM's *Shuffle*).
//! One function for each size of element.

use super::copy::Target;
use super::{CHUNK_BYTES, Walk};
use crate::{Fault, Function, Place, Range};
use serde::{Deserialize, Serialize};

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

/// Indices that are looked up at a time.
const BATCH: usize = 512;

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
        let mut target = Target::new(place, &taken.to)?;
        let mut words = Vec::with_capacity(BATCH);
        for indices in &taken.indices {
            match indices {
                Indices::These(these) => {
                    for batch in these.chunks(BATCH) {
                        if let Some(outside) = put::<BYTES, P>(place, &column, batch, &mut target).await? {
                            return Ok(Some(outside));
                        }
                    }
                }
                Indices::There(range) => {
                    let pieces = [*range];
                    let mut walk = Walk::new(&pieces, 8);
                    loop {
                        let count = walk.ready().min(BATCH as u64).min(CHUNK_BYTES / 8);
                        if count == 0 {
                            break;
                        }
                        {
                            let bytes = walk.next(place, count).await?;
                            words.clear();
                            words.extend(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
                        }
                        if let Some(outside) = put::<BYTES, P>(place, &column, &words, &mut target).await? {
                            return Ok(Some(outside));
                        }
                    }
                }
            }
        }
        target.end(place).await?;
        Ok(None)
    }
}

/// Puts the elements with these indices, unless there is none with one of them.
async fn put<const BYTES: usize, P: Place>(
    place: &P,
    column: &Pieces,
    indices: &[u64],
    target: &mut Target<'_>,
) -> Result<Option<u64>, Fault> {
    let mut offsets = [0; BATCH];
    let mut elements = [[0; BYTES]; BATCH];
    for (offset, index) in offsets.iter_mut().zip(indices) {
        match column.offset(*index) {
            Some(there) => *offset = there,
            None => return Ok(Some(*index)),
        }
    }
    let elements = &mut elements[..indices.len()];
    place.read_many(&offsets[..indices.len()], elements).await?;
    let mut bytes: &[u8] = elements.as_flattened();
    while !bytes.is_empty() {
        let (now, later) = bytes.split_at(bytes.len().min(target.room()));
        target.add(place, now).await?;
        bytes = later;
    }
    Ok(None)
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
    use farfield_core::geometry::PAGE_BYTES;

    const PAGE: u64 = PAGE_BYTES as u64;

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
