//! Extents: how a growing collection cuts its far space, so that an element's index gives its
//! place.
//!
//! Elements are packed into *units*: a page of small ones, or the pages of one that is larger.
//! Units lie in extents, which are runs of far pages. The first has 16 pages, each later one as
//! many as all before it, and from 16 MiB on all have the same size. So a short collection is
//! small, a long one has few extents, and nothing is ever copied to grow.

use super::SEGMENT_PAGES;
use crate::cast::u32_of;
use crate::geometry::PAGE_BYTES;

/// Layout of the extents for elements of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extents {
    per_unit: usize,
    unit_pages: u32,
    /// Number of units in the first extent, as a power of two.
    first_shift: u32,
    /// Ratio of the units in the largest extent to those in the first one, as a power of two.
    most_shift: u32,
}

/// Pages in the largest extent, unless one element is larger.
const MOST_PAGES: u32 = 4096;

impl Extents {
    /// Creates the layout for elements of `bytes` bytes.
    pub const fn of(bytes: usize) -> Extents {
        let bytes = if bytes == 0 { 1 } else { bytes };
        let per_unit = if bytes < PAGE_BYTES { PAGE_BYTES / bytes } else { 1 };
        let unit_pages = u32_of(bytes.div_ceil(PAGE_BYTES));
        let first_shift = if unit_pages < SEGMENT_PAGES { (SEGMENT_PAGES / unit_pages).ilog2() } else { 0 };
        let first_pages = unit_pages << first_shift;
        let most_shift = if first_pages < MOST_PAGES { (MOST_PAGES / first_pages).ilog2() } else { 0 };
        Extents { per_unit, unit_pages, first_shift, most_shift }
    }

    /// Returns the number of elements in one unit.
    #[inline]
    pub const fn per_unit(self) -> usize {
        self.per_unit
    }

    /// Returns the number of pages of one unit.
    #[inline]
    pub const fn unit_pages(self) -> u32 {
        self.unit_pages
    }

    /// Returns the extent in which a unit lies, and how many units of that extent come before it.
    #[inline]
    pub const fn locate(self, unit: usize) -> (usize, usize) {
        let firsts = unit >> self.first_shift;
        let (extent, start) = if firsts >> self.most_shift == 0 {
            let extent = (usize::BITS - firsts.leading_zeros()) as usize;
            (extent, (1 << extent) >> 1)
        } else {
            let later = firsts >> self.most_shift;
            (self.most_shift as usize + later, later << self.most_shift)
        };
        (extent, unit - (start << self.first_shift))
    }

    /// Returns the number of units in an extent.
    pub const fn units(self, extent: usize) -> usize {
        let doublings =
            if u32_of(extent) > self.most_shift { self.most_shift } else { u32_of(extent).saturating_sub(1) };
        1 << self.first_shift << doublings
    }

    /// Returns the number of units in all extents before this one.
    pub const fn units_before(self, extent: usize) -> usize {
        let firsts = match extent.checked_sub(self.most_shift as usize + 1) {
            None => (1 << extent) >> 1,
            Some(later) => (later + 1) << self.most_shift,
        };
        firsts << self.first_shift
    }
}

#[cfg(test)]
mod tests {
    //! Guards against two elements in one place.
    use super::*;

    #[test]
    fn units_follow_each_other_without_gap() {
        for bytes in [0, 1, 8, 24, 100, 2048, 4095, 4096, 4097, 9000, 20_000, 65_536, 70_000, 1 << 20, 20 << 20] {
            let extents = Extents::of(bytes);
            assert!(extents.per_unit() * bytes <= extents.unit_pages() as usize * PAGE_BYTES);
            assert!(extents.per_unit() >= 1 && (extents.per_unit() == 1 || extents.unit_pages() == 1));
            let mut unit = 0;
            for extent in 0..40 {
                assert_eq!(extents.units_before(extent), unit);
                let units = extents.units(extent);
                for within in [0, 1, units / 2, units - 1] {
                    let within = within.min(units - 1);
                    assert_eq!(
                        extents.locate(unit + within),
                        (extent, within),
                        "{bytes} bytes, unit {}",
                        unit + within
                    );
                }
                unit += units;
            }
        }
    }

    #[test]
    fn extents_are_neither_tiny_nor_huge() {
        for bytes in [1, 8, 4096, 5000, 60_000, 65_536, 1 << 20] {
            let extents = Extents::of(bytes);
            let pages = |extent| extents.units(extent) as u32 * extents.unit_pages();
            assert!(pages(0) <= SEGMENT_PAGES.max(extents.unit_pages()));
            assert!(pages(0) * 2 > SEGMENT_PAGES, "{bytes}");
            assert!(pages(100) <= MOST_PAGES && pages(100) * 2 > MOST_PAGES, "{bytes}");
        }
    }
}
