//! Parts of pages, checked without reading the whole page each time: by what was noted of their [`Blocks`].
//!
//! The first part that is asked for costs a look at its whole page, unless a client that has the region mapped has noted it.

use super::StoreError;
use super::region::{Found, Reader};
use super::table::{Entry, Table};
use farfield_core::blocks::Blocks;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::PagePart;
use farfield_core::{PageId, checksum};
use farfield_os::memory::load_ahead;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

const LINE_BYTES: usize = 64;
/// Values whose memory is on its way together.
const LOAD_AHEAD: usize = 32;

/// Room for the bytes of one page.
pub(crate) type Scratch = [u8; PAGE_BYTES];

impl Entry for Blocks {
    const BYTES: u64 = Blocks::BYTES as u64;
}

/// The notes of a region; made for the first part that is read, or for a client that maps it. `None`: there is no memory for them.
pub(super) type Notes = OnceLock<Option<Table<Blocks>>>;

impl Reader<'_> {
    /// The part will be read soon: the processor begins to bring what [`Reader::part`] will look at. So the parts of a batch do
    /// not wait for memory one after the other.
    pub(crate) fn announce(&self, page: PageId, part: PagePart) {
        let (Ok(()), Ok(Some(bytes))) = (self.check_run(page, 1), self.bytes(page)) else { return };
        load_ahead(self.sum_at(page));
        if let Some(notes) = self.notes() {
            load_ahead(notes.at(page).first(part));
        }
        for offset in Blocks::span(part).step_by(LINE_BYTES) {
            load_ahead(bytes.wrapping_add(offset));
        }
    }

    /// The bytes of `part`, in `scratch`, compared with the checksum of their page or with what was noted of it.
    pub(crate) fn part<'s>(
        &self,
        page: PageId,
        part: PagePart,
        scratch: &'s mut Scratch,
    ) -> Result<&'s [u8], StoreError> {
        self.check_run(page, 1)?;
        let Some(found) = self.page(page)? else {
            scratch[part.range()].fill(0);
            return Ok(&scratch[part.range()]);
        };
        let blocks = self.notes().map(|notes| notes.at(page));
        copy(found, Blocks::span(part), scratch);
        if !blocks.is_some_and(|blocks| blocks.match_part(part, scratch, found.sum)) {
            if !copy_whole(found, scratch) {
                return Err(StoreError::Corrupt(page));
            }
            if let Some(blocks) = blocks {
                blocks.note(scratch, found.sum);
            }
        }
        Ok(&scratch[part.range()])
    }

    /// Values of `N` bytes, as they are: nobody has compared them with the checksums of their pages.
    pub(crate) fn load<const N: usize>(&self, offsets: &[u64], into: &mut [[u8; N]]) -> Result<(), StoreError> {
        for (offsets, into) in offsets.chunks(LOAD_AHEAD).zip(into.chunks_mut(LOAD_AHEAD)) {
            let mut found = [core::ptr::null(); LOAD_AHEAD];
            for (found, offset) in found.iter_mut().zip(offsets) {
                let page = PageId::containing(*offset);
                let skip = (offset - page.offset()) as usize;
                self.check_run(page, 1)?;
                if skip + N > PAGE_BYTES {
                    return Err(StoreError::OutOfRange);
                }
                if let Some(bytes) = self.bytes(page)? {
                    *found = bytes.wrapping_add(skip);
                    load_ahead(*found);
                }
            }
            for (found, into) in found.iter().zip(into) {
                match found.is_null() {
                    true => *into = [0; N],
                    // SAFETY: `N` bytes inside a whole page of a layer, by the line above, mapped as long as the reader holds the region. As
                    // in `copy`, another process may be writing them.
                    false => unsafe { found.copy_to_nonoverlapping(into.as_mut_ptr(), N) },
                }
            }
        }
        Ok(())
    }

    /// The checksum that a page should have.
    pub(crate) fn sum(&self, page: PageId) -> Result<u64, StoreError> {
        self.check_run(page, 1)?;
        Ok(self.page(page)?.map_or_else(zero_sum, |found| found.sum))
    }

    /// Should the page have this checksum, and has it? Whoever asked for the [sum](Reader::sum) before and [loaded](Reader::load) from the page has what
    /// was stored: of somebody who writes either bytes or the sum are to be seen by now.
    pub(crate) fn matches(&self, page: PageId, sum: u64, scratch: &mut Scratch) -> Result<bool, StoreError> {
        // What is read here is read after what was loaded.
        fence(Ordering::Acquire);
        self.check_run(page, 1)?;
        Ok(match self.page(page)? {
            Some(found) => found.sum == sum && copy_whole(found, scratch),
            None => zero_sum() == sum,
        })
    }

    /// The bytes of a page, compared with its checksum: quicker than with what was noted of each block.
    pub(crate) fn whole(&self, page: PageId, into: &mut Scratch) -> Result<(), StoreError> {
        self.check_run(page, 1)?;
        let Some(found) = self.page(page)? else {
            into.fill(0);
            return Ok(());
        };
        if copy_whole(found, into) { Ok(()) } else { Err(StoreError::Corrupt(page)) }
    }
}

/// Of a page that is not there.
fn zero_sum() -> u64 {
    static ZERO_SUM: OnceLock<u64> = OnceLock::new();
    *ZERO_SUM.get_or_init(|| checksum(&[0; PAGE_BYTES]))
}

/// All of the page; does it match its checksum?
fn copy_whole(found: Found, into: &mut Scratch) -> bool {
    copy(found, 0..PAGE_BYTES, into);
    checksum(into) == found.sum
}

fn copy(found: Found, bytes: Range<usize>, scratch: &mut Scratch) {
    let target = &mut scratch[bytes.clone()];
    // SAFETY: a whole page of a layer, mapped as long as the reader holds the region. Another process may be writing it: then the
    // copy is of no page that was ever stored, which its checksum shows.
    unsafe { found.bytes.add(bytes.start).copy_to_nonoverlapping(target.as_mut_ptr(), target.len()) };
}

#[cfg(test)]
mod tests {
    //! Guards against parts of pages that rotted, or that were stored meanwhile, being served as good.

    use super::*;
    use crate::store::Region;
    use crate::store::tests::{Dice, account};

    const PAGES: u64 = 8;

    fn region() -> Region {
        Region::new(PAGES, account(None, None)).unwrap()
    }

    fn store(region: &Region, page: u64, bytes: &Scratch) {
        region.write(PageId(page), bytes, |_| checksum(bytes)).unwrap();
    }

    fn read(region: &Region, page: u64, offset: usize, len: usize) -> Result<Vec<u8>, StoreError> {
        let part = PagePart::new(offset, len).unwrap();
        region.reader().announce(PageId(page), part);
        region.reader().part(PageId(page), part, &mut [0xEE; PAGE_BYTES]).map(<[u8]>::to_vec)
    }

    fn flip(region: &Region, page: u64, offset: usize) {
        let found = region.reader().page(PageId(page)).unwrap().unwrap();
        // SAFETY: inside a page of the region, which is mapped writable; this thread alone uses it.
        unsafe { *found.bytes.add(offset).cast_mut() ^= 1 };
    }

    #[test]
    fn parts_are_what_was_stored_last() {
        let region = region();
        let mut twin: [Option<Scratch>; PAGES as usize] = [None; PAGES as usize];
        let mut dice = Dice(0x5eed);
        for step in 0..20_000 {
            let page = dice.below(PAGES as usize);
            match dice.below(16) {
                0 => {
                    // Most of a page stays as it is when it is stored again.
                    let mut bytes = twin[page].unwrap_or([step as u8; PAGE_BYTES]);
                    let at = dice.below(PAGE_BYTES);
                    bytes[at] = bytes[at].wrapping_add(1 + dice.below(255) as u8);
                    store(&region, page as u64, &bytes);
                    twin[page] = Some(bytes);
                }
                1 if dice.below(4) == 0 => {
                    region.discard(PageId(page as u64), 1).unwrap();
                    twin[page] = None;
                }
                _ => {
                    let offset = dice.below(PAGE_BYTES);
                    let len = 1 + dice.below(600.min(PAGE_BYTES - offset));
                    let expected = &twin[page].unwrap_or([0; PAGE_BYTES])[offset..offset + len];
                    assert_eq!(read(&region, page as u64, offset, len).unwrap(), expected, "step {step}");
                }
            }
        }
        assert_eq!(
            region.reader().part(PageId(PAGES), PagePart::new(0, 1).unwrap(), &mut [0; PAGE_BYTES]),
            Err(StoreError::OutOfRange)
        );
    }

    #[test]
    fn a_block_that_rots_is_never_served() {
        let region = region();
        let mut dice = Dice(0xbad);
        for seen_before in [false, true] {
            for _ in 0..200 {
                let bytes: Scratch = core::array::from_fn(|_| dice.below(256) as u8);
                store(&region, 3, &bytes);
                let (offset, len) = (dice.below(PAGE_BYTES - 64), 64);
                if seen_before {
                    assert_eq!(read(&region, 3, offset, len).unwrap(), bytes[offset..offset + len]);
                }
                let rotten = offset + dice.below(len);
                flip(&region, 3, rotten);
                assert_eq!(read(&region, 3, offset, len), Err(StoreError::Corrupt(PageId(3))));
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
        assert_eq!(read(&region, 0, 0, 16), Err(StoreError::Corrupt(PageId(0))));
        assert_eq!(
            read(&region, 0, 0, 16),
            Err(StoreError::Corrupt(PageId(0))),
            "and it does not become good by asking"
        );
    }
}
