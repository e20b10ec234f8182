//! Access by index to a column in pieces.

use super::{Entry, PAGE};
use crate::{Fault, Place, Range};

/// A column in pieces, by index. The *position* of an element is the offset of its bytes when the
/// pages of all pieces are placed one behind the other.
pub(super) struct Pieces {
    /// Elements before the end of each piece.
    ends: Vec<u64>,
    /// Offset in the region, and position, of each piece, minus the bytes of the elements before
    /// it.
    bases: Vec<[u64; 2]>,
    /// Pages before each piece, and its first page in the region.
    pages: Vec<(u64, u64)>,
    pub(super) pages_all: u64,
    bytes: u64,
}

impl Pieces {
    pub(super) fn new(pieces: &[Range], bytes: u64, region_bytes: u64) -> Result<Pieces, Fault> {
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

    /// Checks that no element goes beyond the end of its page.
    pub(super) fn is_aligned(&self) -> bool {
        self.bases.iter().all(|[offset, _]| offset.is_multiple_of(self.bytes))
    }

    #[inline]
    fn base(&self, index: u64) -> Option<[u64; 2]> {
        let piece = self.ends.partition_point(|end| *end <= index);
        self.bases.get(piece).copied()
    }

    /// Returns the offset in the region of the element with this index.
    #[inline]
    pub(super) fn offset(&self, index: u64) -> Option<u64> {
        self.base(index).map(|[offset, _]| offset.wrapping_add(index.wrapping_mul(self.bytes)))
    }

    #[inline]
    pub(super) fn position(&self, index: u64) -> Option<u64> {
        self.base(index).map(|[_, position]| position.wrapping_add(index.wrapping_mul(self.bytes)))
    }

    /// Returns the offset in the region of a position.
    pub(super) fn offset_of(&self, position: u64) -> u64 {
        let page = position / PAGE;
        let piece = self.pages.partition_point(|(before, _)| *before <= page) - 1;
        let (before, first) = self.pages[piece];
        (first + page - before) * PAGE + position % PAGE
    }

    /// Returns the offset of the first page of each piece, and its number of pages.
    fn runs(&self) -> impl Iterator<Item = (u64, usize)> {
        let ends = self.pages.iter().skip(1).map(|(before, _)| *before).chain([self.pages_all]);
        self.pages.iter().zip(ends).map(|((before, first), end)| (first * PAGE, (end - before) as usize))
    }

    /// Returns the checksums that the pages of each piece should have.
    pub(super) async fn sums<P: Place>(&self, place: &P) -> Result<Vec<Vec<u64>>, Fault> {
        let mut sums = Vec::with_capacity(self.pages.len());
        for (offset, count) in self.runs() {
            sums.push(place.sums(offset, count).await?);
        }
        Ok(sums)
    }

    pub(super) async fn matches<P: Place>(&self, place: &P, sums: &[Vec<u64>]) -> Result<bool, Fault> {
        for ((offset, _), sums) in self.runs().zip(sums) {
            if !place.matches(offset, sums).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
