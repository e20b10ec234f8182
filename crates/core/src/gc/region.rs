//! Regions: how the far space of a collected heap is cut up.
//!
//! A region is a run of far pages that are taken and given back together. It is cut into units of
//! one size: pages for objects that lie inside of pages, or as many pages as one large object has.
//! Objects do not cross units. So a unit without a live object can be given back alone.

use crate::cast::{low_u32, u32_of, usize_of};
use crate::geometry::PAGE_BYTES;
use crate::heap::CARD_BYTES;
use alloc::vec;
use alloc::vec::Vec;

/// Size of the largest object that shares its page with others, in bytes with its header.
pub const INSIDE_BYTES_MAX: usize = PAGE_BYTES / 2;

/// Size of the smallest object, in bytes with its header.
pub const OBJECT_BYTES_MIN: usize = 2 * CARD_BYTES;

/// Number of regions' worth of pages above which a unit has a run of its own.
const OWN_RUN_PAGES: u32 = 16;

/// Place that an object of some size needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectPlacement {
    /// So many cards inside of a page, beside other objects.
    Inside {
        /// Number of cards.
        cards: u32,
    },
    /// A unit of its own, of so many pages.
    Unit {
        /// Number of pages.
        pages: u32,
    },
}

impl ObjectPlacement {
    /// Returns the place that an object of so many bytes needs, header included; `None` if the
    /// object is too large for any page number.
    #[inline]
    pub fn of(bytes: u64) -> Option<ObjectPlacement> {
        if bytes <= INSIDE_BYTES_MAX as u64 {
            let bytes = usize_of(bytes).max(OBJECT_BYTES_MIN);
            return Some(ObjectPlacement::Inside { cards: u32_of(bytes.div_ceil(CARD_BYTES)) });
        }
        let pages = u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).ok()?;
        Some(ObjectPlacement::Unit { pages })
    }
}

/// Size of a heap's regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionGeometry {
    pages: u32,
}

impl RegionGeometry {
    /// Smallest and largest region, in bytes.
    pub const BYTES: (u64, u64) = (64 << 10, 16 << 20);

    /// Region size of a heap that says nothing else: 1 MiB.
    pub const DEFAULT: RegionGeometry = RegionGeometry { pages: 256 };

    /// Creates the geometry of regions of so many bytes: a power of two within
    /// [`RegionGeometry::BYTES`].
    pub fn new(bytes: u64) -> Option<RegionGeometry> {
        let (least, most) = RegionGeometry::BYTES;
        let fits = bytes.is_power_of_two() && (least..=most).contains(&bytes);
        fits.then_some(RegionGeometry { pages: low_u32(bytes / PAGE_BYTES as u64) })
    }

    /// Returns the number of pages of a region.
    pub fn pages(self) -> u32 {
        self.pages
    }

    /// Returns the number of units of a region whose units have so many pages: as many as fit, or
    /// one if the unit is so large that it has a region of its own.
    pub fn units(self, unit_pages: u32) -> u32 {
        assert!(unit_pages > 0);
        if unit_pages > OWN_RUN_PAGES.min(self.pages) { 1 } else { self.pages / unit_pages }
    }
}

/// Units of one region that are in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitMap {
    words: Vec<u64>,
    units: u32,
    used: u32,
}

impl UnitMap {
    /// Creates the map of a region with so many units, of which none is in use.
    pub fn new(units: u32) -> UnitMap {
        UnitMap { words: vec![0; units.div_ceil(64) as usize], units, used: 0 }
    }

    /// Takes the first unit that is free; `None` if all are in use.
    pub fn take(&mut self) -> Option<u32> {
        let index = self.words.iter().position(|word| *word != u64::MAX)?;
        let unit = u32_of(index) * 64 + self.words[index].trailing_ones();
        if unit >= self.units {
            return None;
        }
        self.words[index] |= 1 << (unit % 64);
        self.used += 1;
        Some(unit)
    }

    /// Gives a unit back, which was in use.
    pub fn give_back(&mut self, unit: u32) {
        assert!(self.is_used(unit), "unit {unit} is given back twice");
        self.words[unit as usize / 64] &= !(1 << (unit % 64));
        self.used -= 1;
    }

    /// Checks whether a unit is in use.
    pub fn is_used(&self, unit: u32) -> bool {
        unit < self.units && self.words[unit as usize / 64] & 1 << (unit % 64) != 0
    }

    /// Returns the number of units.
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Returns the number of units that are in use.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Checks whether each unit is in use.
    pub fn is_full(&self) -> bool {
        self.used == self.units
    }

    /// Checks whether no unit is in use.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }
}

#[cfg(test)]
mod tests {
    //! Guards against objects that get less than they need, and against units that two have.
    use super::*;

    #[test]
    fn every_object_has_room_and_none_crosses_a_page() {
        for bytes in 1..=3 * PAGE_BYTES as u64 {
            match ObjectPlacement::of(bytes).unwrap() {
                ObjectPlacement::Inside { cards } => {
                    let room = u64::from(cards) * CARD_BYTES as u64;
                    assert!(room >= bytes && room >= OBJECT_BYTES_MIN as u64 && room < bytes.max(17) + 16);
                    assert!(bytes <= INSIDE_BYTES_MAX as u64);
                }
                ObjectPlacement::Unit { pages } => {
                    let room = u64::from(pages) * PAGE_BYTES as u64;
                    assert!(room >= bytes && room - bytes < PAGE_BYTES as u64 && bytes > INSIDE_BYTES_MAX as u64);
                }
            }
        }
        assert_eq!(ObjectPlacement::of(u64::MAX), None);
    }

    #[test]
    fn only_some_sizes_are_regions() {
        for bytes in [0, 1, 4096, 32 << 10, 65_535, 96 << 10, 32 << 20, u64::MAX] {
            assert_eq!(RegionGeometry::new(bytes), None, "{bytes}");
        }
        for power in 16..=24 {
            let region = RegionGeometry::new(1 << power).unwrap();
            assert_eq!(u64::from(region.pages()) * PAGE_BYTES as u64, 1 << power);
            for unit in 1..=300 {
                let units = region.units(unit);
                assert!(units >= 1 && (units == 1 || units * unit <= region.pages()));
            }
        }
        assert_eq!(RegionGeometry::new(1 << 20), Some(RegionGeometry::DEFAULT));
    }

    #[test]
    fn units_are_taken_once() {
        for units in [1, 2, 63, 64, 65, 128, 256, 4096] {
            let mut map = UnitMap::new(units);
            assert!(map.is_empty());
            for unit in 0..units {
                assert!(!map.is_full() && !map.is_used(unit));
                assert_eq!(map.take(), Some(unit));
                assert!(map.is_used(unit) && map.used() == unit + 1);
            }
            assert!(map.is_full() && map.take().is_none() && !map.is_used(units));
            for unit in (0..units).rev().step_by(3) {
                map.give_back(unit);
            }
            while let Some(unit) = map.take() {
                assert_eq!((units - 1 - unit) % 3, 0);
            }
            (0..units).for_each(|unit| map.give_back(unit));
            assert!(map.is_empty());
        }
    }
}
