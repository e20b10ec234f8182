//! The entry word: where one collected object is, as one word that never moves.
//!
//! ```text
//!  63              32 31          16 15    8 7     0
//! +------------------+--------------+-------+-------+
//! | page             | generation   | card  | flags |
//! +------------------+--------------+-------+-------+
//! ```
//!
//! The shape is that of a [`Handle`](crate::heap::Handle) of the object plane. Entries lie in far
//! pages, 512 in each, in the order of their numbers (the heap indirection table of Mako). The page
//! is counted within the heap.
//!
//! An entry that is free keeps the word of its last object: whether it is in use is written in a
//! bitmap that is always near, so a collection does not fetch the entries of what has died. The
//! *generation* grows each time the entry is used again. A weak reference names it, so it never
//! leads to the next object of its entry. An entry in its last generation is never used again.

use crate::cast::{low_u8, low_u16, u32_of};
use crate::geometry::PAGE_BYTES;

/// Entries in a page.
pub const ENTRIES_PER_PAGE: u32 = u32_of(PAGE_BYTES / size_of::<u64>());

/// Word of one entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryWord(pub u64);

const USED: u64 = 1;

impl EntryWord {
    /// Word of an entry that was never used: zeros, so that a fresh page is full of them.
    pub const FRESH: EntryWord = EntryWord(0);

    /// Last generation of an entry.
    pub const GENERATION_MAX: u16 = u16::MAX;

    /// Creates the word of an object that begins at this card of this page.
    #[inline]
    pub fn new(page: u32, card: u8, generation: u16) -> EntryWord {
        EntryWord(u64::from(page) << 32 | u64::from(generation) << 16 | u64::from(card) << 8 | USED)
    }

    /// Returns the word of the next object that has this entry; `None` if the entry must not be
    /// used again.
    #[inline]
    pub fn next(self, page: u32, card: u8) -> Option<EntryWord> {
        match (self.is_used(), self.generation()) {
            (false, _) => Some(EntryWord::new(page, card, 0)),
            (true, EntryWord::GENERATION_MAX) => None,
            (true, generation) => Some(EntryWord::new(page, card, generation + 1)),
        }
    }

    /// Returns the page in which the object begins, counted within the heap.
    #[inline]
    pub fn page(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns the card of that page at which the object begins.
    #[inline]
    pub fn card(self) -> u8 {
        low_u8(self.0 >> 8)
    }

    /// Returns how often the entry was used before.
    #[inline]
    pub fn generation(self) -> u16 {
        low_u16(self.0 >> 16)
    }

    /// Checks whether the entry was ever used.
    #[inline]
    pub fn is_used(self) -> bool {
        self.0 & USED != 0
    }
}

#[cfg(test)]
mod tests {
    //! Guards against entries that two parties read differently, and against a weak reference that
    //! finds the next object.
    use super::*;

    #[test]
    fn fields_do_not_mix() {
        for page in [0, 1, 77, u32::MAX] {
            for card in 0..=255u8 {
                for generation in [0, 1, 0x5555, u16::MAX] {
                    let word = EntryWord::new(page, card, generation);
                    assert_eq!((word.page(), word.card(), word.generation()), (page, card, generation));
                    assert!(word.is_used());
                }
            }
        }
        assert!(!EntryWord::FRESH.is_used());
    }

    #[test]
    fn no_generation_comes_twice() {
        let (mut word, mut generations) = (EntryWord::FRESH, 0u32);
        while let Some(next) = word.next(generations, 3) {
            assert_eq!((next.page(), next.card(), u32::from(next.generation())), (generations, 3, generations));
            (word, generations) = (next, generations + 1);
        }
        assert_eq!(generations, 1 << 16);
    }
}
