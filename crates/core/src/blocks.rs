//! Per-block checksums, so that a part of a page can be checked without reading the whole page.
//!
//! Each block of 128 bytes of a page has a short checksum, its *note*. Notes are taken by a thread
//! that has just seen the whole page: the one that stores it, or the one that compared it with its
//! checksum. From then on only the blocks of a part are read and compared.
//!
//! A note is tied to the checksum of its page. So code that stores or discards a page need not know
//! of notes: the note of another page, or one that was never taken, does not match, and then the
//! whole page is checked again. For the same reason several threads may take notes at the same
//! time, in any order.

use crate::cast::low_u32;
use crate::checksum;
use crate::geometry::PAGE_BYTES;
use crate::wire::PagePart;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

/// Bytes of a block: two cache lines. Smaller blocks would take more notes than they save; larger
/// ones would bring more memory for a value of some 64 bytes.
const BLOCK_BYTES: usize = 128;
const COUNT: usize = PAGE_BYTES / BLOCK_BYTES;

/// Notes of all blocks of one page.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Blocks([AtomicU32; COUNT]);

const _: () = assert!(size_of::<Blocks>() == Blocks::BYTES);

impl Blocks {
    /// Size of the notes of a page in bytes.
    pub const BYTES: usize = 4 * COUNT;

    /// Returns the byte range of the blocks that the part touches.
    pub fn span(part: PagePart) -> Range<usize> {
        let end = part.offset() + part.len();
        part.offset() / BLOCK_BYTES * BLOCK_BYTES..end.next_multiple_of(BLOCK_BYTES)
    }

    /// Returns the first note that [`Blocks::match_part`] reads.
    pub fn first(&self, part: PagePart) -> &AtomicU32 {
        &self.0[part.offset() / BLOCK_BYTES]
    }

    /// Notes all blocks of `page`, whose checksum is `page_sum`.
    pub fn note(&self, page: &[u8], page_sum: u64) {
        for (note, block) in self.0.iter().zip(page.chunks_exact(BLOCK_BYTES)) {
            note.store(short_sum(block, page_sum), Ordering::Relaxed);
        }
    }

    /// Checks whether the blocks that the part touches belong to the page with checksum `page_sum`.
    /// The other blocks are not read.
    pub fn match_part(&self, part: PagePart, page: &[u8], page_sum: u64) -> bool {
        let span = Self::span(part);
        let notes = &self.0[span.start / BLOCK_BYTES..span.end / BLOCK_BYTES];
        let mut both = notes.iter().zip(page[span].chunks_exact(BLOCK_BYTES));
        both.all(|(note, block)| note.load(Ordering::Relaxed) == short_sum(block, page_sum))
    }
}

fn short_sum(block: &[u8], page_sum: u64) -> u32 {
    low_u32(checksum(block) ^ page_sum)
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
