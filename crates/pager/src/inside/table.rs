//! Table of one page word and one checksum per page of the window, in sparse memory.

use super::runtime::RUNTIME;
use super::sync::{AtomicU8, AtomicU64, Ordering};
use crate::window;
use farfield_core::{PageId, page_word::PageWord};
use farfield_os::{Result, memory};

/// Number of pages per chunk of the summary: 2 MiB of window.
pub const CHUNK: u64 = 512;
/// Bit in the summary of a touched chunk: it is no huge page.
const SPLIT: u8 = 2;

/// Page words, checksums and the summary of touched chunks. Untouched parts cost nothing.
#[derive(Clone, Copy)]
pub struct PageWordTable {
    words: usize,
    sums: usize,
    touched: usize,
}

impl PageWordTable {
    /// Reserves address space for the table.
    pub fn reserve() -> Result<PageWordTable> {
        let pages = window::PAGES as usize;
        Ok(PageWordTable {
            words: memory::map_anonymous(pages * 8)?,
            sums: memory::map_anonymous(pages * 8)?,
            touched: memory::map_anonymous(pages / CHUNK as usize)?,
        })
    }

    fn at(&self, base: usize, page: PageId) -> &AtomicU64 {
        debug_assert!(page.0 < window::PAGES);
        // SAFETY: inside the mapping, which is never unmapped; zero bytes are a valid atomic.
        unsafe { &*((base + page.0 as usize * 8) as *const AtomicU64) }
    }

    fn touched(&self, page: u64) -> &AtomicU8 {
        // SAFETY: inside the mapping, which is never unmapped; zero bytes are a valid atomic.
        unsafe { &*((self.touched + (page / CHUNK) as usize) as *const AtomicU8) }
    }

    /// Returns the word of a page.
    pub fn word(&self, page: PageId) -> PageWord {
        PageWord(self.at(self.words, page).load(Ordering::Acquire))
    }

    /// Runs a transition of a page's word until it wins or gives `None`. Returns the word before
    /// and after.
    pub fn update(
        &self,
        page: PageId,
        mut step: impl FnMut(PageWord) -> Option<PageWord>,
    ) -> Option<(PageWord, PageWord)> {
        let cell = self.at(self.words, page);
        let mut old = cell.load(Ordering::Acquire);
        loop {
            let new = step(PageWord(old))?;
            match cell.compare_exchange_weak(old, new.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    let touched = self.touched(page.0);
                    if touched.load(Ordering::Relaxed) == 0 && touched.swap(1, Ordering::AcqRel) == 0 {
                        // The table itself is part of the budget: 16 bytes a page.
                        RUNTIME.add_meta(CHUNK as i64 * 16);
                    }
                    return Some((PageWord(old), new));
                }
                Err(now) => old = now,
            }
        }
    }

    /// Checks whether any page of this page's chunk was ever ours to look after.
    pub fn chunk_touched(&self, page: u64) -> bool {
        self.touched(page).load(Ordering::Acquire) != 0
    }

    /// Notes that this page's chunk, which is touched, is no huge page any more. Returns whether
    /// that was new.
    pub fn split_chunk(&self, page: PageId) -> bool {
        let touched = self.touched(page.0);
        touched.load(Ordering::Relaxed) & SPLIT == 0 && touched.fetch_or(SPLIT, Ordering::Relaxed) & SPLIT == 0
    }

    /// Returns the checksum of the far copy of a page.
    pub fn sum(&self, page: PageId) -> u64 {
        self.at(self.sums, page).load(Ordering::Relaxed)
    }

    /// Remembers the checksum of the far copy of a page.
    pub fn set_sum(&self, page: PageId, sum: u64) {
        self.at(self.sums, page).store(sum, Ordering::Relaxed);
    }
}
