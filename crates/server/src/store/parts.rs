//! Reads of parts of pages. They are checked by short checksums of [`Blocks`], the *notes*, without
//! reading the whole page each time.
//!
//! The first read of a part has to read and check its whole page, unless a client that has mapped
//! the region has written the notes.

use super::RegionStoreError;
use super::region::{Location, RegionReader};
use super::table::Entry;
use arrayvec::ArrayVec;
use farfield_core::blocks::Blocks;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::PagePart;
use farfield_core::{PageId, checksum};
use farfield_os::memory::load_ahead;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

const LINE_BYTES: usize = 64;
/// Values that are prefetched together.
const LOAD_AHEAD: usize = 32;

/// Buffer for the bytes of one page.
pub(crate) type Scratch = [u8; PAGE_BYTES];

impl Entry for Blocks {
    const BYTES: u64 = Blocks::BYTES as u64;
}

impl RegionReader<'_> {
    /// Prefetches the memory that [`RegionReader::part`] will look at, because the part will be read
    /// soon. So the parts of a batch do not wait for memory one after the other.
    pub(crate) fn announce(&self, page: PageId, part: PagePart) {
        let Ok(Some(Location { mapped: Some(bytes), .. })) = self.locate(page) else { return };
        if let Some(sum) = self.sum_at(page) {
            load_ahead(sum);
        }
        if let Some(blocks) = self.notes_of(page) {
            load_ahead(blocks.first(part));
        }
        for offset in Blocks::span(part).step_by(LINE_BYTES) {
            load_ahead(bytes.wrapping_add(offset));
        }
    }

    /// Reads `part` of a page into `scratch`. The bytes are compared with the page's notes or its
    /// checksum. Returns the bytes and the checksum. An absent page reads as zeros.
    pub(crate) fn part<'s>(
        &self,
        page: PageId,
        part: PagePart,
        scratch: &'s mut Scratch,
    ) -> Result<(&'s [u8], u64), RegionStoreError> {
        let Some(found) = self.locate(page)? else {
            let zeros = scratch.get_mut(part.range()).ok_or(RegionStoreError::OutOfRange)?;
            zeros.fill(0);
            return Ok((zeros, zero_sum()));
        };
        let sum = self.sum_of(page);
        let blocks = self.notes_of(page);
        found.copy(Blocks::span(part), scratch)?;
        if !blocks.is_some_and(|blocks| blocks.match_part(part, scratch, sum)) {
            if !found.copy_whole(sum, scratch)? {
                return Err(RegionStoreError::Corrupt(page));
            }
            if let Some(blocks) = blocks {
                blocks.note(scratch, sum);
            }
        }
        let bytes = scratch.get(part.range()).ok_or(RegionStoreError::OutOfRange)?;
        Ok((bytes, sum))
    }

    /// Reads values of `N` bytes without a comparison with the checksums of their pages. Values
    /// must not cross a page boundary.
    pub(crate) fn load<const N: usize>(&self, offsets: &[u64], into: &mut [[u8; N]]) -> Result<(), RegionStoreError> {
        for (offsets, into) in offsets.chunks(LOAD_AHEAD).zip(into.chunks_mut(LOAD_AHEAD)) {
            let mut found = ArrayVec::<_, LOAD_AHEAD>::new();
            for offset in offsets {
                let page = PageId::containing(*offset);
                let skip = usize::try_from(offset - page.offset()).map_err(|_| RegionStoreError::OutOfRange)?;
                let value = self.locate(page)?;
                if skip + N > PAGE_BYTES {
                    return Err(RegionStoreError::OutOfRange);
                }
                if let Some(Location { mapped: Some(bytes), .. }) = value {
                    load_ahead(bytes.wrapping_add(skip));
                }
                found.push((value, skip));
            }
            for ((value, skip), into) in found.iter().zip(into) {
                match value {
                    None => *into = [0; N],
                    Some(value) => value.copy_bytes(*skip, into)?,
                }
            }
        }
        Ok(())
    }

    /// Returns the checksum that a page should have.
    pub(crate) fn sum(&self, page: PageId) -> Result<u64, RegionStoreError> {
        Ok(if self.locate(page)?.is_some() { self.sum_of(page) } else { zero_sum() })
    }

    /// Checks whether the page should have this checksum and has it. A caller that asked for the
    /// [sum](Reader::sum) first and then [loaded](Reader::load) from the page has read what was
    /// stored: if another thread was writing, its bytes or its sum are visible by now.
    pub(crate) fn matches(&self, page: PageId, sum: u64, scratch: &mut Scratch) -> Result<bool, RegionStoreError> {
        // The loads below must not be reordered before the caller's loads.
        fence(Ordering::Acquire);
        Ok(match self.locate(page)? {
            Some(found) => self.sum_of(page) == sum && found.copy_whole(sum, scratch)?,
            None => zero_sum() == sum,
        })
    }

    /// Reads a whole page and compares it with its checksum, which is faster than with the notes of
    /// each block.
    pub(crate) fn whole(&self, page: PageId, into: &mut Scratch) -> Result<(), RegionStoreError> {
        let Some(found) = self.locate(page)? else {
            into.fill(0);
            return Ok(());
        };
        if found.copy_whole(self.sum_of(page), into)? { Ok(()) } else { Err(RegionStoreError::Corrupt(page)) }
    }
}

impl Location<'_> {
    /// Copies the whole page. Returns whether it matches its checksum.
    fn copy_whole(&self, sum: u64, into: &mut Scratch) -> Result<bool, RegionStoreError> {
        self.copy(0..PAGE_BYTES, into)?;
        Ok(checksum(into) == sum)
    }

    /// Copies some bytes of the page to the same place in `scratch`.
    fn copy(&self, bytes: Range<usize>, scratch: &mut Scratch) -> Result<(), RegionStoreError> {
        let skip = bytes.start;
        self.copy_bytes(skip, scratch.get_mut(bytes).ok_or(RegionStoreError::OutOfRange)?)
    }

    /// Copies bytes of the page from `skip` on. Another process may be writing them. Then they
    /// belong to no page that was ever stored, which the page's checksum shows.
    pub(super) fn copy_bytes(&self, skip: usize, into: &mut [u8]) -> Result<(), RegionStoreError> {
        if skip.saturating_add(into.len()) > PAGE_BYTES {
            return Err(RegionStoreError::OutOfRange);
        }
        match self.mapped {
            // SAFETY: inside a whole page of a layer, by the comparison above, mapped as long as the reader holds the
            // region.
            Some(source) => unsafe { source.add(skip).copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) },
            None => self.layer.copy_out(self.page, skip, into)?,
        }
        Ok(())
    }
}

/// Returns the checksum of an absent page, which is all zeros.
fn zero_sum() -> u64 {
    static ZERO_SUM: OnceLock<u64> = OnceLock::new();
    *ZERO_SUM.get_or_init(|| checksum(&[0; PAGE_BYTES]))
}

#[cfg(test)]
mod tests {
    //! Guards against parts of pages that rotted, or that were stored meanwhile, being served as good.

    use super::*;
    use crate::store::StoredRegion;
    use crate::store::tests::account;
    use fastrand::Rng;

    const PAGES: u64 = 8;

    fn region() -> StoredRegion {
        StoredRegion::new(PAGES, account(None, None)).unwrap()
    }

    fn store(region: &StoredRegion, page: u64, bytes: &Scratch) {
        region.write(PageId(page), bytes, |_| checksum(bytes)).unwrap();
    }

    fn read(region: &StoredRegion, page: u64, offset: usize, len: usize) -> Result<Vec<u8>, RegionStoreError> {
        let part = PagePart::new(offset, len).unwrap();
        region.reader().announce(PageId(page), part);
        region.reader().part(PageId(page), part, &mut [0xEE; PAGE_BYTES]).map(|(bytes, sum)| {
            assert_eq!(region.reader().sum(PageId(page)), Ok(sum));
            bytes.to_vec()
        })
    }

    fn flip(region: &StoredRegion, page: u64, offset: usize) {
        let found = region.reader().page(PageId(page)).unwrap().unwrap();
        // SAFETY: inside a page of the region, which is mapped writable; this thread alone uses it.
        unsafe { *found.bytes.add(offset).cast_mut() ^= 1 };
    }

    #[test]
    fn parts_are_what_was_stored_last() {
        let region = region();
        let mut twin: [Option<Scratch>; PAGES as usize] = [None; PAGES as usize];
        let mut dice = Rng::with_seed(0x5eed);
        for step in 0..20_000 {
            let page = dice.usize(..PAGES as usize);
            match dice.usize(..16) {
                0 => {
                    // Most of a page stays as it is when it is stored again.
                    let mut bytes = twin[page].unwrap_or([step as u8; PAGE_BYTES]);
                    let at = dice.usize(..PAGE_BYTES);
                    bytes[at] = bytes[at].wrapping_add(1 + dice.usize(..255) as u8);
                    store(&region, page as u64, &bytes);
                    twin[page] = Some(bytes);
                }
                1 if dice.usize(..4) == 0 => {
                    region.discard(PageId(page as u64), 1).unwrap();
                    twin[page] = None;
                }
                _ => {
                    let offset = dice.usize(..PAGE_BYTES);
                    let len = 1 + dice.usize(..600.min(PAGE_BYTES - offset));
                    let expected = &twin[page].unwrap_or([0; PAGE_BYTES])[offset..offset + len];
                    assert_eq!(read(&region, page as u64, offset, len).unwrap(), expected, "step {step}");
                }
            }
        }
        assert_eq!(
            region.reader().part(PageId(PAGES), PagePart::new(0, 1).unwrap(), &mut [0; PAGE_BYTES]),
            Err(RegionStoreError::OutOfRange)
        );
    }

    #[test]
    fn a_block_that_rots_is_never_served() {
        let region = region();
        let mut dice = Rng::with_seed(0xbad);
        for seen_before in [false, true] {
            for _ in 0..200 {
                let bytes: Scratch = core::array::from_fn(|_| dice.usize(..256) as u8);
                store(&region, 3, &bytes);
                let (offset, len) = (dice.usize(..PAGE_BYTES - 64), 64);
                if seen_before {
                    assert_eq!(read(&region, 3, offset, len).unwrap(), bytes[offset..offset + len]);
                }
                let rotten = offset + dice.usize(..len);
                flip(&region, 3, rotten);
                assert_eq!(read(&region, 3, offset, len), Err(RegionStoreError::Corrupt(PageId(3))));
                flip(&region, 3, rotten);
                assert_eq!(read(&region, 3, offset, len).unwrap(), bytes[offset..offset + len]);
            }
        }
    }

    #[test]
    fn a_page_that_is_bad_from_the_beginning_is_never_served() {
        let region = region();
        let bytes = [7; PAGE_BYTES];
        region.write(PageId(0), &bytes, |_| checksum(&bytes) ^ 1 << 40).unwrap();
        assert_eq!(read(&region, 0, 0, 16), Err(RegionStoreError::Corrupt(PageId(0))));
        assert_eq!(
            read(&region, 0, 0, 16),
            Err(RegionStoreError::Corrupt(PageId(0))),
            "and it does not become good by asking"
        );
    }
}
