//! A segment is 16 pages of one class. Small objects never cross a page, so each class is the
//! largest multiple of a card of which so many fit into a page. Larger objects begin at a page and
//! take whole ones.

use crate::cast::{u8_of, u16_of, u32_of};
use crate::geometry::{PAGE_BYTES, PAGE_SHIFT};

/// Unit of alignment and of access profiling.
pub const CARD_BYTES: usize = 16;
/// Number of pages of a segment.
pub const SEGMENT_PAGES: u32 = 16;
/// Size of a segment in bytes.
pub const SEGMENT_BYTES: usize = SEGMENT_PAGES as usize * PAGE_BYTES;

/// Cards of an object, by class: up to half a page as many to a page as fit, above in whole pages.
const CARDS: [u16; 32] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 21, 25, 28, 32, 36, 42, 51, 64, 85, 128, 256, 512, 768, 1024,
    1280, 2048, 4096,
];

/// Objects in one unit, by class: a table, because every allocation and every free asks.
const PER_UNIT: [u16; CARDS.len()] = {
    let mut counts = [0; CARDS.len()];
    let mut index = 0;
    while index < CARDS.len() {
        let bytes = CARDS[index] as usize * CARD_BYTES;
        counts[index] = if bytes < PAGE_BYTES { u16_of(PAGE_BYTES / bytes) } else { 1 };
        index += 1;
    }
    counts
};

/// Size class: how large an object may be, and where in a segment the n-th one lies. An object
/// above a segment has no class: it takes whole segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Class(u8);

impl Class {
    /// Number of classes.
    pub const COUNT: usize = CARDS.len();

    /// Returns the smallest class for objects of this size and alignment; `None` if they need more
    /// than a segment.
    pub fn of(bytes: usize, align: usize) -> Option<Class> {
        assert!(align.is_power_of_two() && align <= PAGE_BYTES, "alignment above a page");
        let fits = |class: &Class| {
            let cards = class.cards();
            cards * CARD_BYTES >= bytes && (cards * CARD_BYTES).is_multiple_of(align)
        };
        (0..u8_of(Self::COUNT)).map(Class).find(fits)
    }

    /// Returns the class with this index, below [`Class::COUNT`].
    pub fn from_index(index: usize) -> Class {
        assert!(index < Self::COUNT);
        Class(u8_of(index))
    }

    /// Returns the index of the class.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    fn cards(self) -> usize {
        usize::from(CARDS[self.index()])
    }

    /// Returns the bytes that an object of this class occupies.
    #[inline]
    pub fn bytes(self) -> usize {
        self.cards() * CARD_BYTES
    }

    /// Returns the number of pages that come and go together: more than one for objects larger than
    /// a page.
    #[inline]
    pub fn unit_pages(self) -> u32 {
        u32_of((self.bytes() >> PAGE_SHIFT).max(1))
    }

    /// Returns the number of objects in one unit.
    #[inline]
    pub fn per_unit(self) -> u32 {
        u32::from(PER_UNIT[self.index()])
    }

    /// Returns the number of objects in a segment.
    #[inline]
    pub fn per_segment(self) -> u32 {
        SEGMENT_PAGES / self.unit_pages() * self.per_unit()
    }

    /// Returns the page within the segment and the card within the page at which this object
    /// begins.
    #[inline]
    pub fn locate(self, object: u32) -> (u32, u8) {
        assert!(object < self.per_segment());
        let (unit, within) = (object / self.per_unit(), object % self.per_unit());
        (unit * self.unit_pages(), u8_of(within as usize * self.cards()))
    }

    /// Returns the index of the object that begins at this page and card.
    #[inline]
    pub fn object_at(self, page: u32, card: u8) -> u32 {
        let object = page / self.unit_pages() * self.per_unit() + u32::from(card) / u32_of(self.cards());
        debug_assert_eq!(self.locate(object), (page, card));
        object
    }

    /// Returns the first page of the unit to which `page` of a segment belongs; `None` for pages at
    /// the end that no unit uses.
    #[inline]
    pub fn unit_of(self, page: u32) -> Option<u32> {
        let first = page / self.unit_pages() * self.unit_pages();
        (first + self.unit_pages() <= SEGMENT_PAGES).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against objects that overlap, cross a page, or lie crooked.
    use super::*;
    use alloc::vec;

    fn all() -> impl Iterator<Item = Class> {
        (0..Class::COUNT).map(Class::from_index)
    }

    #[test]
    fn classes_grow_and_waste_little() {
        let mut last = 0;
        for class in all() {
            assert!(class.bytes() > last);
            // Below four cards the card itself is the waste.
            assert!(last < 64 || class.bytes() <= last * 2, "{last} then {}", class.bytes());
            last = class.bytes();
        }
        assert_eq!(last, SEGMENT_BYTES);
    }

    #[test]
    fn objects_do_not_overlap_and_small_ones_do_not_cross_pages() {
        for class in all() {
            let mut cards = vec![false; SEGMENT_BYTES / CARD_BYTES];
            for object in 0..class.per_segment() {
                let (page, card) = class.locate(object);
                assert_eq!(class.object_at(page, card), object);
                assert_eq!(class.unit_of(page), Some(page));
                let first = page as usize * 256 + usize::from(card);
                for taken in &mut cards[first..first + class.bytes() / CARD_BYTES] {
                    assert!(!*taken);
                    *taken = true;
                }
                let last = first + class.bytes() / CARD_BYTES - 1;
                assert!(class.unit_pages() > 1 || last / 256 == page as usize);
            }
        }
    }

    #[test]
    fn every_size_and_alignment_finds_its_class() {
        for bytes in 0..=SEGMENT_BYTES {
            let class = Class::of(bytes, 1).unwrap();
            assert!(class.bytes() >= bytes);
            assert!(class.index() == 0 || Class::from_index(class.index() - 1).bytes() < bytes.max(1));
        }
        for shift in 0..=12 {
            let align = 1 << shift;
            for bytes in [1, 16, 17, 100, 1000, 4096, 10_000] {
                let class = Class::of(bytes, align).unwrap();
                for object in 0..class.per_segment() {
                    let (page, card) = class.locate(object);
                    assert!((page as usize * PAGE_BYTES + usize::from(card) * CARD_BYTES).is_multiple_of(align));
                }
            }
        }
        assert_eq!(Class::of(SEGMENT_BYTES + 1, 1), None);
    }
}
