//! `ff.copy`: copies bytes of a region to whole pages of it, inside the server (AIFM's *Copy*).

use crate::{Fault, Function, Place, RANGE_BYTES_MAX, Range};
use farfield_core::geometry::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// Copies bytes to pages of the same region. A call must not write the bytes that it reads.
#[derive(Debug)]
pub struct CopyBytes;

/// Bytes to copy, and pages for them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Copied {
    /// Pieces that are read one after the other; counts are of bytes.
    pub from: Vec<Range>,
    /// Output: whole pages, in this order; counts are of pages. They are overwritten as a whole:
    /// the rest of the last one becomes zeros.
    pub to: Vec<Range>,
}

impl Function for CopyBytes {
    const NAME: &'static str = "ff.copy";
    const VERSION: u32 = 1;
    type Argument = Copied;
    /// Number of bytes that were copied.
    type Answer = u64;

    async fn run<P: Place>(place: &P, copied: Copied) -> Result<u64, Fault> {
        let mut target = PageStreamWriter::new(place, &copied.to)?;
        for piece in &copied.from {
            let end = piece.offset.checked_add(piece.count).filter(|end| *end <= place.region_bytes());
            let end = end.ok_or(Fault::OutOfRange { offset: piece.offset })?;
            let mut offset = piece.offset;
            while offset < end {
                let len = (end - offset).min(target.room() as u64);
                let bytes = place.read_range(offset, len as usize).await?;
                target.add(place, &bytes).await?;
                offset += len;
            }
        }
        target.end(place).await?;
        Ok(target.bytes)
    }
}

/// Writer of a stream of bytes to whole pages.
pub(super) struct PageStreamWriter<'t> {
    pages: &'t [Range],
    /// Pages of the first range that were written.
    written: u64,
    /// Bytes that are not yet written.
    held: Vec<u8>,
    bytes: u64,
}

/// Bytes that are written at a time.
const WRITE_BYTES: usize = RANGE_BYTES_MAX / 2;

impl<'t> PageStreamWriter<'t> {
    /// Makes a writer. Fails unless all pages lie in the region.
    pub(super) fn new<P: Place>(place: &P, pages: &'t [Range]) -> Result<PageStreamWriter<'t>, Fault> {
        for range in pages {
            let bytes = range.count.checked_mul(PAGE_BYTES as u64);
            let end = bytes.and_then(|bytes| range.offset.checked_add(bytes));
            if end.is_none_or(|end| end > place.region_bytes()) {
                return Err(Fault::OutOfRange { offset: range.offset });
            }
            if !range.offset.is_multiple_of(PAGE_BYTES as u64) {
                return Err(Fault::Unaligned { offset: range.offset });
            }
        }
        Ok(PageStreamWriter { pages, written: 0, held: Vec::with_capacity(WRITE_BYTES), bytes: 0 })
    }

    /// Returns how many bytes [`PageStreamWriter::add`] takes at a time.
    pub(super) fn room(&self) -> usize {
        WRITE_BYTES - self.held.len()
    }

    /// Takes bytes, for which there is [room](Target::room).
    pub(super) async fn add<P: Place>(&mut self, place: &P, bytes: &[u8]) -> Result<(), Fault> {
        self.bytes += bytes.len() as u64;
        self.held.extend_from_slice(bytes);
        if self.held.len() >= WRITE_BYTES { self.write(place).await } else { Ok(()) }
    }

    /// Takes any number of bytes.
    pub(super) async fn put<P: Place>(&mut self, place: &P, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(self.room()));
            self.add(place, now).await?;
            bytes = later;
        }
        Ok(())
    }

    /// Writes the rest.
    pub(super) async fn end<P: Place>(&mut self, place: &P) -> Result<(), Fault> {
        self.held.resize(self.held.len().next_multiple_of(PAGE_BYTES), 0);
        self.write(place).await
    }

    async fn write<P: Place>(&mut self, place: &P) -> Result<(), Fault> {
        let mut done = 0;
        while done < self.held.len() {
            let Some((range, rest)) = self.pages.split_first() else {
                return Err(Fault::TooLong { bytes: self.bytes });
            };
            let left = range.count - self.written;
            if left == 0 {
                (self.pages, self.written) = (rest, 0);
                continue;
            }
            let count = left.min(((self.held.len() - done) / PAGE_BYTES) as u64);
            let bytes = count as usize * PAGE_BYTES;
            place.write(range.offset + self.written * PAGE_BYTES as u64, &self.held[done..done + bytes]).await?;
            self.written += count;
            done += bytes;
        }
        self.held.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against bytes that are not those of a copy here, and against pages beside the target that change.
    use super::*;
    use crate::{Sim, Stop};

    const PAGE: u64 = PAGE_BYTES as u64;

    fn range(offset: u64, count: u64) -> Range {
        Range { offset, count }
    }

    fn region(pages: usize) -> Vec<u8> {
        (0..pages * PAGE_BYTES).map(|index| (index * 7 % 251) as u8 | 1).collect()
    }

    #[test]
    fn bytes_from_anywhere_fill_pages_in_order() {
        for (from, to) in [
            (vec![range(0, PAGE)], vec![range(20 * PAGE, 1)]),
            (vec![range(5, 3 * PAGE + 17)], vec![range(30 * PAGE, 1), range(20 * PAGE, 9)]),
            (
                vec![range(8, 60_000), range(3, 0), range(7, 9)],
                vec![range(25 * PAGE, 3), range(20 * PAGE, 2), range(28 * PAGE, 12)],
            ),
            (vec![], vec![]),
        ] {
            let before = region(40);
            let sim = Sim::new(3, before.clone());
            let answer = sim.run_one::<CopyBytes>(Copied { from: from.clone(), to: to.clone() });
            let mut wanted: Vec<u8> = Vec::new();
            from.iter().for_each(|piece| wanted.extend(&before[piece.offset as usize..][..piece.count as usize]));
            assert_eq!(answer, Ok(wanted.len() as u64));
            wanted.resize(wanted.len().next_multiple_of(PAGE_BYTES), 0);
            let mut after = before.clone();
            let mut pages = to.iter().flat_map(|range| (0..range.count).map(|page| range.offset + page * PAGE));
            for chunk in wanted.chunks(PAGE_BYTES) {
                after[pages.next().unwrap() as usize..][..PAGE_BYTES].copy_from_slice(chunk);
            }
            assert_eq!(sim.bytes(), after);
        }
    }

    #[test]
    fn a_copy_that_does_not_fit_is_a_fault() {
        let run = |from: Vec<Range>, to: Vec<Range>| Sim::new(1, region(4)).run_one::<CopyBytes>(Copied { from, to });
        for offset in [4 * PAGE, u64::MAX] {
            let outside = Err(Stop::Fault(Fault::OutOfRange { offset }));
            assert_eq!(run(vec![range(offset, 8)], vec![range(0, 1)]), outside);
            let offset = offset / PAGE * PAGE;
            let outside = Err(Stop::Fault(Fault::OutOfRange { offset }));
            assert_eq!(run(vec![range(0, 8)], vec![range(offset, 1)]), outside);
        }
        assert_eq!(run(vec![range(0, 8)], vec![range(8, 1)]), Err(Stop::Fault(Fault::Unaligned { offset: 8 })));
        assert_eq!(run(vec![range(0, u64::MAX)], vec![range(0, 1)]), Err(Stop::Fault(Fault::OutOfRange { offset: 0 })));
        assert_eq!(
            run(vec![range(0, PAGE + 1)], vec![range(2 * PAGE, 1)]),
            Err(Stop::Fault(Fault::TooLong { bytes: PAGE + 1 }))
        );
    }
}
