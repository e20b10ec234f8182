//! Page occupancy: the allocation bits of one page, one per card of 16 bytes.
//!
//! A bit is set where an object begins. The smallest object has two cards, so at most half of the
//! bits are set. A collection builds the bits anew from what it has marked; pages without a bit hold
//! nothing.

use crate::geometry::PAGE_BYTES;
use crate::heap::CARD_BYTES;

/// Words of the bits of a page.
const WORDS: usize = PAGE_BYTES / CARD_BYTES / 64;

/// Cards of a page at which objects begin.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PageOccupancy([u64; WORDS]);

impl PageOccupancy {
    /// Occupancy of a page that holds nothing.
    pub const EMPTY: PageOccupancy = PageOccupancy([0; WORDS]);

    /// Creates an occupancy from its bits, those of the first cards first.
    pub const fn from_words(words: [u64; WORDS]) -> PageOccupancy {
        PageOccupancy(words)
    }

    /// Returns the bits, those of the first cards first.
    pub const fn words(self) -> [u64; WORDS] {
        self.0
    }

    /// Adds an object that begins at this card. False if one begins there already.
    #[inline]
    pub fn insert(&mut self, card: u8) -> bool {
        let (word, bit) = (&mut self.0[usize::from(card / 64)], 1 << (card % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Removes the object that begins at this card.
    pub fn remove(&mut self, card: u8) {
        self.0[usize::from(card / 64)] &= !(1 << (card % 64));
    }

    /// Checks whether an object begins at this card.
    pub fn contains(&self, card: u8) -> bool {
        self.0[usize::from(card / 64)] & 1 << (card % 64) != 0
    }

    /// Checks whether no object begins in the page.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// Returns the number of objects that begin in the page.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the cards at which objects begin, in order.
    pub fn iter(&self) -> impl Iterator<Item = u8> + '_ {
        (0..=u8::MAX).filter(|card| self.contains(*card))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an object that is not found, or found where none is.
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn each_card_is_one_bit() {
        for first in 0..=255u8 {
            for second in 0..=255u8 {
                let mut page = PageOccupancy::EMPTY;
                assert!(page.is_empty());
                assert!(page.insert(first) && !page.insert(first));
                assert_eq!(page.insert(second), first != second);
                let mut expected = vec![first.min(second), first.max(second)];
                expected.dedup();
                assert_eq!(page.count() as usize, expected.len());
                assert_eq!(page.iter().collect::<Vec<u8>>(), expected);
                assert_eq!(PageOccupancy::from_words(page.words()), page);
                page.remove(first);
                assert_eq!((page.contains(first), page.is_empty()), (false, first == second));
            }
        }
    }
}
