//! Evacuation: which pages a collection empties, and where their objects go.
//!
//! A page that holds a few live objects keeps all of its far memory. A collection moves the objects
//! of such *sparse* pages close together into fresh pages, so that the sparse ones can be given
//! back.

use super::{OBJECT_BYTES_MIN, PageOccupancy};
use crate::cast::{low_u8, u32_of};
use crate::geometry::PAGE_BYTES;
use crate::heap::CARD_BYTES;

/// Number of cards in a page.
pub const CARDS_PER_PAGE: u32 = u32_of(PAGE_BYTES / CARD_BYTES);

/// Smallest part of a page that is free if the page is sparse.
const FREE_PART: u32 = 8;

/// Part of the pages in use that an evacuation frees at least.
const GAIN_PART: u64 = 16;

/// Part of a fresh page that stays free at its end, in the mean, because the next object does not
/// fit.
const TAIL_PART: u64 = 32;

/// Checks whether a page is sparse that holds so many live objects, which take so many cards.
///
/// At least an eighth of it is free, and one more object of the same size would fit. So a page that
/// was filled with large objects, one after the other, is not moved again and again.
pub fn is_sparse(objects: u32, cards: u32) -> bool {
    let free = CARDS_PER_PAGE.saturating_sub(cards);
    objects > 0 && free >= CARDS_PER_PAGE / FREE_PART && free >= cards.div_ceil(objects)
}

/// Sparse pages of a heap, and the live objects in them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SparseTotals {
    /// Number of sparse pages.
    pub pages: u64,
    /// Cards that their live objects take.
    pub cards: u64,
}

impl SparseTotals {
    /// Checks whether emptying all of these pages frees enough of the pages in use to be worth the
    /// work. `is_needed` if the heap has no room left: then one page is enough.
    pub fn pays(self, used: u64, is_needed: bool) -> bool {
        let cards = self.cards + self.cards / TAIL_PART;
        let gain = self.pages.saturating_sub(cards.div_ceil(u64::from(CARDS_PER_PAGE)));
        gain > 0 && (is_needed || gain >= used / GAIN_PART)
    }
}

/// Page that is filled with objects, one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PageFill {
    next_card: u32,
    occupancy: PageOccupancy,
}

impl PageFill {
    /// Returns the card at which the next object of so many cards will begin; `None` if the page
    /// has no room for it.
    #[inline]
    pub fn next(&self, cards: u32) -> Option<u8> {
        (self.next_card.saturating_add(cards) <= CARDS_PER_PAGE).then(|| low_u8(self.next_card.into()))
    }

    /// Puts an object there.
    #[inline]
    pub fn insert(&mut self, cards: u32) {
        let Some(card) = self.next(cards) else { unreachable!("the page has room for the object") };
        self.occupancy.insert(card);
        self.next_card += cards;
    }

    /// Returns the cards at which objects begin.
    pub fn occupancy(&self) -> PageOccupancy {
        self.occupancy
    }
}

/// Fresh pages that are filled with objects, one page after the other.
///
/// Whoever places objects of the same sizes in the same order finds the same places. So a memory
/// server that has copied objects need not say where they are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageSequence {
    pages: usize,
    /// Number of the page that is being filled.
    page: usize,
    fill: PageFill,
}

impl PageSequence {
    /// Creates a sequence of so many empty pages.
    pub fn new(pages: usize) -> PageSequence {
        PageSequence { pages, page: 0, fill: PageFill::default() }
    }

    /// Places an object of so many bytes. Returns the number of its page and its card there; `None` if
    /// no page has room for it.
    pub fn place(&mut self, bytes: usize) -> Option<(usize, u8)> {
        let cards = cards_of(bytes);
        let fits_here = self.fill.next(cards).is_some();
        let page = if fits_here { self.page } else { self.page + 1 };
        if cards > CARDS_PER_PAGE || page >= self.pages {
            return None;
        }
        if !fits_here {
            (self.page, self.fill) = (page, PageFill::default());
        }
        let card = self.fill.next(cards)?;
        self.fill.insert(cards);
        Some((page, card))
    }

    /// Returns the number of pages that hold an object.
    pub fn used(&self) -> usize {
        self.page + usize::from(!self.fill.occupancy().is_empty())
    }
}

/// Returns the number of cards that an object of so many bytes takes.
pub fn cards_of(bytes: usize) -> u32 {
    u32::try_from(bytes.max(OBJECT_BYTES_MIN).div_ceil(CARD_BYTES)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    //! Guards against pages that are moved for nothing, or again and again, and against objects that
    //! overlap.
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn a_page_is_sparse_if_more_of_its_objects_would_fit() {
        assert!(!is_sparse(0, 0), "nothing is moved");
        for objects in 1..=128 {
            for cards in 2 * objects..=CARDS_PER_PAGE {
                let free = CARDS_PER_PAGE - cards;
                assert_eq!(is_sparse(objects, cards), free >= 32 && free * objects >= cards, "{objects} in {cards}");
            }
        }
        // An object of more than half a page is alone wherever it is.
        assert!(!is_sparse(1, 129) && is_sparse(1, 128));
    }

    #[test]
    fn fresh_pages_are_not_sparse() {
        for cards in 2..=CARDS_PER_PAGE {
            let mut page = PageFill::default();
            let mut begins = Vec::new();
            while let Some(card) = page.next(cards) {
                begins.push(card);
                page.insert(cards);
            }
            assert_eq!(begins.len() as u32, CARDS_PER_PAGE / cards);
            assert!(begins.iter().zip(0..).all(|(card, index)| u32::from(*card) == index * cards));
            assert_eq!(page.occupancy().iter().collect::<Vec<u8>>(), begins);
            let objects = begins.len() as u32;
            assert!(!is_sparse(objects, objects * cards), "{cards} cards");
        }
    }

    #[test]
    fn objects_follow_each_other_through_pages_and_none_is_put_behind_them() {
        for (bytes, per_page) in [(1, 128), (32, 128), (33, 85), (2048, 2), (2049, 1), (PAGE_BYTES, 1)] {
            let mut pages = PageSequence::new(3);
            assert_eq!(pages.used(), 0);
            for index in 0..3 * per_page {
                let card = (index % per_page) as u32 * cards_of(bytes);
                assert_eq!(pages.place(bytes), Some((index / per_page, card as u8)), "{bytes} bytes");
                assert_eq!(pages.used(), index / per_page + 1);
            }
            let full = pages.clone();
            assert_eq!((pages.place(bytes), pages.place(PAGE_BYTES + 1), pages.place(usize::MAX)), (None, None, None));
            assert_eq!(pages, full);
        }
        let mut pages = PageSequence::new(2);
        assert_eq!((pages.place(PAGE_BYTES + 1), pages.place(4000)), (None, Some((0, 0))));
        // A small one that comes later does not go back.
        assert_eq!((pages.place(500), pages.place(32), pages.used()), (Some((1, 0)), Some((1, 32)), 2));
        assert_eq!(PageSequence::new(0).place(1), None);
    }

    #[test]
    fn an_evacuation_pays_if_it_frees_a_sixteenth() {
        let sparse = |pages, cards| SparseTotals { pages, cards };
        assert!(!sparse(0, 0).pays(0, true) && !sparse(1, 2).pays(100, true));
        assert!(sparse(2, 64).pays(1000, true) && !sparse(2, 64).pays(1000, false));
        assert!(sparse(100, 100 * 64).pays(1000, false) && !sparse(100, 100 * 192).pays(1000, false));
    }
}
