//! The entry word: where one collected object is, as one word that never moves.
//!
//! ```text
//!  63              32 31           9 8     1   0
//! +------------------+--------------+-------+------+
//! | page             | generation   | card  | used |
//! +------------------+--------------+-------+------+
//! ```
//!
//! Entries lie in far pages, 512 in each, in the order of their numbers (the heap indirection table
//! of Mako). The page is counted within the heap.
//!
//! An entry that is free keeps the word of its last object: whether it is in use is written in a
//! bitmap that is always near, so a collection does not fetch the entries of what has died. The
//! *generation* grows each time the entry is used again. A weak reference names it, so it never
//! leads to the next object of its entry. An entry in its last generation, the eight-millionth, is
//! never used again. A page of entries of which none is in use can be given back: entries of the
//! page that takes its place begin in a generation that none of them has had.

use crate::cast::{low_u8, low_u32, u32_of};
use crate::geometry::PAGE_BYTES;

/// Entries in a page.
pub const ENTRIES_PER_PAGE: u32 = u32_of(PAGE_BYTES / size_of::<u64>());

/// Word of one entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryWord(pub u64);

const USED: u64 = 1;
const CARD_SHIFT: u32 = 1;
const GENERATION_SHIFT: u32 = 9;

impl EntryWord {
    /// Word of an entry that was never used: zeros, so that a fresh page is full of them.
    pub const FRESH: EntryWord = EntryWord(0);

    /// Last generation of an entry.
    pub const GENERATION_MAX: u32 = u32::MAX >> GENERATION_SHIFT;

    /// Creates the word of an object that begins at this card of this page. A generation is
    /// [`EntryWord::GENERATION_MAX`] at most.
    #[inline]
    pub fn new(page: u32, card: u8, generation: u32) -> EntryWord {
        debug_assert!(generation <= EntryWord::GENERATION_MAX);
        let low = u64::from(generation) << GENERATION_SHIFT | u64::from(card) << CARD_SHIFT | USED;
        EntryWord(u64::from(page) << 32 | low)
    }

    /// Returns the word of the next object that has this entry; `None` if the entry must not be
    /// used again. An entry that was never used begins in generation `first`.
    #[inline]
    pub fn next(self, page: u32, card: u8, first: u32) -> Option<EntryWord> {
        match (self.is_used(), self.generation()) {
            (false, _) => Some(EntryWord::new(page, card, first)),
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
        low_u8(self.0 >> CARD_SHIFT)
    }

    /// Returns the generation of the entry, which grows each time it is used again.
    #[inline]
    pub fn generation(self) -> u32 {
        low_u32(self.0) >> GENERATION_SHIFT
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
                for generation in [0, 1, 0x5555, EntryWord::GENERATION_MAX] {
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
        for first in [0, 1, EntryWord::GENERATION_MAX] {
            let (mut word, mut generation) = (EntryWord::FRESH, first);
            while let Some(next) = word.next(generation, 3, first) {
                assert_eq!((next.page(), next.card(), next.generation()), (generation, 3, generation));
                (word, generation) = (next, generation + 1);
            }
            assert_eq!(generation, 1 << 23);
        }
    }
}
