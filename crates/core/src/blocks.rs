//! Parts of pages, checked without reading the whole page each time.
//!
//! Each block of 128 bytes of a page gets a short checksum, which is *noted* by whoever has just seen the whole page: who stores it, or who compared
//! it with its checksum. From then on only the blocks of a part are read and compared.
//!
//! What is noted of a block is tied to the checksum of its page. So nobody who stores or discards a page need know of this: what was noted of
//! another page, or was never noted, does not match, and then the whole page is looked at again. For the same reason several may
//! note at the same time, in any order.

use crate::checksum;
use crate::geometry::PAGE_BYTES;
use crate::wire::PagePart;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

/// Two cache lines: smaller ones would take more notes than they save, larger ones more memory to be brought for a value of some 64 bytes.
const BLOCK_BYTES: usize = 128;
const COUNT: usize = PAGE_BYTES / BLOCK_BYTES;

/// What is noted of the blocks of one page.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Blocks([AtomicU32; COUNT]);

const _: () = assert!(size_of::<Blocks>() == Blocks::BYTES);

impl Blocks {
    /// Size of the notes of a page.
    pub const BYTES: usize = 4 * COUNT;

    /// The bytes of the blocks that a part lies in.
    pub fn span(part: PagePart) -> Range<usize> {
        let end = part.offset() + part.len();
        part.offset() / BLOCK_BYTES * BLOCK_BYTES..end.next_multiple_of(BLOCK_BYTES)
    }

    /// The first of the notes that [`Blocks::match_part`] looks at.
    pub fn first(&self, part: PagePart) -> &AtomicU32 {
        &self.0[part.offset() / BLOCK_BYTES]
    }

    /// Notes the blocks of `page`, whose checksum this is.
    pub fn note(&self, page: &[u8], page_sum: u64) {
        for (note, block) in self.0.iter().zip(page.chunks_exact(BLOCK_BYTES)) {
            note.store(short_sum(block, page_sum), Ordering::Relaxed);
        }
    }

    /// Are the blocks of `page` that the part lies in those of the page with this checksum? The others are not looked at.
    pub fn match_part(&self, part: PagePart, page: &[u8], page_sum: u64) -> bool {
        let span = Self::span(part);
        let notes = &self.0[span.start / BLOCK_BYTES..span.end / BLOCK_BYTES];
        let mut both = notes.iter().zip(page[span].chunks_exact(BLOCK_BYTES));
        both.all(|(note, block)| note.load(Ordering::Relaxed) == short_sum(block, page_sum))
    }
}

fn short_sum(block: &[u8], page_sum: u64) -> u32 {
    (checksum(block) ^ page_sum) as u32
}

#[cfg(test)]
mod tests {
    //! Guards against blocks that are taken for good because others are, or because another page was.
    use super::*;
    use alloc::vec;

    #[test]
    fn a_part_matches_the_page_that_was_noted_and_no_other() {
        let mut page = vec![0u8; PAGE_BYTES];
        (0..PAGE_BYTES).for_each(|at| page[at] = (at * 7 / 3) as u8);
        let sum = checksum(&page);
        let blocks = Blocks::default();
        for (offset, len) in [(0, 1), (127, 2), (128, 128), (100, 1000), (4095, 1), (0, PAGE_BYTES)] {
            let part = PagePart::new(offset, len).unwrap();
            let span = Blocks::span(part);
            assert!(span.start <= offset && offset - span.start < BLOCK_BYTES);
            assert!(span.end >= offset + len && span.end - (offset + len) < BLOCK_BYTES);
            assert!(!Blocks::default().match_part(part, &page, sum), "nothing was noted");
            blocks.note(&page, sum);
            assert!(blocks.match_part(part, &page, sum));
            assert!(!blocks.match_part(part, &page, sum ^ 1), "another page was stored meanwhile");
            for at in [0, span.start.wrapping_sub(1), span.start, offset, span.end - 1, span.end, PAGE_BYTES - 1] {
                let Some(byte) = page.get_mut(at) else { continue };
                *byte ^= 0x10;
                assert_eq!(blocks.match_part(part, &page, sum), !span.contains(&at), "byte {at} of {part:?}");
                page[at] ^= 0x10;
            }
        }
    }
}
