//! Address space of the window: which pages are mapped, and where new mappings go. This is pure
//! bookkeeping; the kernel's mappings follow it.
//!
//! Small mappings are packed side by side, so that equal neighbours merge into one kernel mapping
//! and `vm.max_map_count` is not reached. Large ones get room behind them, so that `mremap` grows
//! them in place.

use std::collections::BTreeMap;

/// Minimum number of pages of a large mapping (1 MiB).
const LARGE_PAGES: u64 = 256;
/// Maximum number of pages left free behind a large mapping (4 GiB).
const ROOM_PAGES: u64 = 1 << 20;
/// Alignment of large mappings in pages: 2 MiB, so that huge pages can be used.
const LARGE_ALIGN: u64 = 512;

/// The protection `PROT_NONE` of `mmap`: no access.
const PROT_NONE: i32 = 0;

/// Mark, in place of a protection, of memory that is not far-capable: a file, or shared memory,
/// that the program put into the window.
pub const FOREIGN: i32 = i32::MIN;

/// Mark, in place of `PROT_NONE`, of memory that could be touched before, and may hold something.
const CLOSED: i32 = 1 << 30;

/// Returns the protection as the program knows it.
fn protection(mark: i32) -> i32 {
    if mark == CLOSED { PROT_NONE } else { mark }
}

/// Pages `start .. end`, as numbers in the window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRange {
    /// First page.
    pub start: u64,
    /// First page after the last.
    pub end: u64,
}

impl PageRange {
    /// Returns the number of pages.
    pub fn pages(self) -> u64 {
        self.end - self.start
    }
}

/// Mapped ranges of the window, with their protection.
#[derive(Debug)]
pub struct Space {
    /// Mapped ranges by start, with their end and their protection or mark. Neighbours of one mark
    /// are one entry.
    mapped: BTreeMap<u64, (u64, i32)>,
    small: PageRange,
    large: PageRange,
    pages: u64,
    touchable: u64,
}

impl Space {
    /// Creates an empty space. `small` and `large` are the zones for new small and large mappings.
    pub const fn new(small: PageRange, large: PageRange) -> Space {
        Space { mapped: BTreeMap::new(), small, large, pages: 0, touchable: 0 }
    }

    /// Returns the number of mapped pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the number of mapped pages that may hold something: they can be touched, or could be
    /// before they were closed.
    pub fn touchable_pages(&self) -> u64 {
        self.touchable
    }

    /// Finds a free range of `pages` pages, without taking it.
    pub fn find(&self, pages: u64) -> Option<PageRange> {
        assert!(pages > 0);
        if pages < LARGE_PAGES {
            return self.first_gap(self.small, pages, 1, 0).map(|start| PageRange { start, end: start + pages });
        }
        // Room behind every neighbour to double; if no such place is left, any gap that is long
        // enough.
        let start = self
            .first_gap(self.large, pages, LARGE_ALIGN, ROOM_PAGES)
            .or_else(|| self.first_gap(self.large, pages, LARGE_ALIGN, 0))?;
        Some(PageRange { start, end: start + pages })
    }

    /// Finds a free range like [`find`](Space::find), but side by side with others whatever its length: for
    /// memory that is not expected to grow, of which there may be very many pieces.
    pub fn find_packed(&self, pages: u64) -> Option<PageRange> {
        assert!(pages > 0);
        let packed = self.first_gap(self.small, pages, 1, 0);
        packed.map(|start| PageRange { start, end: start + pages }).or_else(|| self.find(pages))
    }

    /// Returns the first place in the zone for `pages` pages that keeps room free behind each
    /// neighbour. That room is `room` pages, but not more than the neighbour's length.
    fn first_gap(&self, zone: PageRange, pages: u64, align: u64, room: u64) -> Option<u64> {
        let behind = |start: u64, end: u64| end + (end - start).min(room);
        let first = self.mapped.range(..=zone.start).next_back();
        let mut at = first.map_or(zone.start, |(&start, &(end, _))| behind(start, end)).max(zone.start);
        for (&start, &(end, _)) in self.mapped.range(zone.start..zone.end) {
            if start >= at.next_multiple_of(align).checked_add(pages)? {
                break;
            }
            at = at.max(behind(start, end));
        }
        at = at.next_multiple_of(align);
        (at.checked_add(pages)? <= zone.end).then_some(at)
    }

    /// Checks whether nothing is mapped in the range.
    pub fn is_free(&self, range: PageRange) -> bool {
        self.mapped.range(..range.end).next_back().is_none_or(|(_, &(end, _))| end <= range.start)
    }

    /// Checks whether every page of the range is mapped.
    pub fn is_mapped(&self, range: PageRange) -> bool {
        self.mapped_from(range) == range
    }

    /// Returns the mapped stretch of one protection that holds the page, and its protection.
    pub fn stretch(&self, page: u64) -> Option<(PageRange, i32)> {
        self.entry(page).map(|(stretch, mark)| (stretch, protection(mark)))
    }

    fn entry(&self, page: u64) -> Option<(PageRange, i32)> {
        let (&start, &(end, mark)) = self.mapped.range(..=page).next_back()?;
        (page < end).then_some((PageRange { start, end }, mark))
    }

    /// Returns the parts of `range` that are mapped, in order, with their protection.
    pub fn parts_in(&self, range: PageRange) -> Vec<(PageRange, i32)> {
        self.entries_in(range).into_iter().map(|(part, mark)| (part, protection(mark))).collect()
    }

    fn entries_in(&self, range: PageRange) -> Vec<(PageRange, i32)> {
        let first = self.mapped.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        self.mapped
            .range(first..range.end)
            .map(|(&start, &(end, mark))| (PageRange { start: start.max(range.start), end: end.min(range.end) }, mark))
            .filter(|(part, _)| part.start < part.end)
            .collect()
    }

    /// Returns the part of `range` from its start to the first hole.
    pub fn mapped_from(&self, range: PageRange) -> PageRange {
        let mut end = range.start;
        while end < range.end {
            match self.stretch(end) {
                Some((stretch, _)) => end = stretch.end.min(range.end),
                None => break,
            }
        }
        PageRange { start: range.start, end }
    }

    /// Returns the stretches of `whole` between foreign mappings.
    pub fn between_foreign(&self, whole: PageRange) -> Vec<PageRange> {
        let mut free = Vec::new();
        let mut at = whole.start;
        for (part, _) in self.parts_in(whole).into_iter().filter(|(_, prot)| *prot == FOREIGN) {
            free.push(PageRange { start: at, end: part.start });
            at = part.end;
        }
        free.push(PageRange { start: at, end: whole.end });
        free.retain(|range| range.start < range.end);
        free
    }

    /// Returns the parts of `range` that are far-capable memory, in order.
    pub fn mapped_in(&self, range: PageRange) -> Vec<PageRange> {
        self.parts_in(range).into_iter().filter(|(_, prot)| *prot != FOREIGN).map(|(part, _)| part).collect()
    }

    /// Marks the range as mapped with `prot`, whatever was there.
    pub fn map(&mut self, range: PageRange, prot: i32) {
        self.unmap(range);
        self.pages += range.pages();
        self.touchable += if prot == PROT_NONE || prot == FOREIGN { 0 } else { range.pages() };
        let (mut start, mut end) = (range.start, range.end);
        let before = self.mapped.range(..start).next_back();
        if let Some((&before, _)) = before.filter(|(_, neighbour)| **neighbour == (start, prot)) {
            start = before;
        }
        if let Some(&(after, _)) = self.mapped.get(&end).filter(|(_, neighbour)| *neighbour == prot) {
            self.mapped.remove(&end);
            end = after;
        }
        self.mapped.insert(start, (end, prot));
    }

    /// Changes the protection of the mapped parts of the range.
    pub fn protect(&mut self, range: PageRange, prot: i32) {
        for (part, mark) in self.entries_in(range) {
            match (mark, prot) {
                (FOREIGN, _) | (PROT_NONE, PROT_NONE) => {}
                (_, PROT_NONE) => self.map(part, CLOSED),
                _ => self.map(part, prot),
            }
        }
    }

    /// Notes that the mapped parts of the range hold nothing any more.
    pub fn empty(&mut self, range: PageRange) {
        for (part, _) in self.entries_in(range).into_iter().filter(|(_, mark)| *mark == CLOSED) {
            self.map(part, PROT_NONE);
        }
    }

    /// Marks the range as not mapped.
    pub fn unmap(&mut self, range: PageRange) {
        for (part, mark) in self.entries_in(range) {
            let (stretch, _) = self.entry(part.start).expect("the part is mapped");
            self.mapped.remove(&stretch.start);
            if stretch.start < part.start {
                self.mapped.insert(stretch.start, (part.start, mark));
            }
            if part.end < stretch.end {
                self.mapped.insert(part.end, (stretch.end, mark));
            }
            self.pages -= part.pages();
            self.touchable -= if mark == PROT_NONE || mark == FOREIGN { 0 } else { part.pages() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: PageRange = PageRange { start: 1000, end: 3000 };
    const LARGE: PageRange = PageRange { start: 4096, end: 20480 };

    #[test]
    fn packed_mappings_are_one_entry_until_their_zone_is_full() {
        let mut space = Space::new(SMALL, LARGE);
        for _ in 0..7 {
            let found = space.find_packed(280).expect("there is room");
            space.map(found, 3);
        }
        assert_eq!(space.stretch(1000), Some((PageRange { start: 1000, end: 2960 }, 3)));
        let found = space.find_packed(280).expect("in the other zone");
        assert!(found.start >= LARGE.start && found.pages() == 280 && space.is_free(found), "{found:?}");
    }

    /// Random operations against a page-by-page model.
    #[test]
    fn agrees_with_a_page_by_page_model() {
        for seed in 1..200u64 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = move |below: u64| rng.u64(..below);
            let mut space = Space::new(SMALL, LARGE);
            let mut model = vec![None; 20480];
            let mut touched = vec![false; 20480];
            for _ in 0..120 {
                let start = 1000 + random(8000);
                let range = PageRange { start, end: start + 1 + random(700) };
                let cells = range.start as usize..range.end as usize;
                let prot = random(3) as i32;
                match random(5) {
                    0 => {
                        let pages = 1 + random(600);
                        let found = if random(2) == 0 { space.find(pages) } else { space.find_packed(pages) };
                        if let Some(found) = found {
                            assert!(space.is_free(found), "seed {seed}");
                            assert_eq!(found.pages(), pages);
                            space.map(found, prot);
                            model[found.start as usize..found.end as usize].fill(Some(prot));
                            touched[found.start as usize..found.end as usize].fill(prot != 0);
                        }
                    }
                    1 => {
                        space.map(range, prot);
                        model[cells.clone()].fill(Some(prot));
                        touched[cells.clone()].fill(prot != 0);
                    }
                    2 => {
                        space.unmap(range);
                        model[cells.clone()].fill(None);
                        touched[cells.clone()].fill(false);
                    }
                    3 => {
                        space.empty(range);
                        for cell in cells.clone().filter(|&cell| model[cell] == Some(0)) {
                            touched[cell] = false;
                        }
                    }
                    _ => {
                        space.protect(range, prot);
                        for cell in cells.clone() {
                            if model[cell].is_some() {
                                model[cell] = Some(prot);
                                touched[cell] |= prot != 0;
                            }
                        }
                    }
                }
                assert_eq!(space.is_free(range), model[cells.clone()].iter().all(Option::is_none), "seed {seed}");
                assert_eq!(space.is_mapped(range), model[cells].iter().all(Option::is_some), "seed {seed}");
                assert_eq!(space.pages(), model.iter().flatten().count() as u64, "seed {seed}");
                let touchable = touched.iter().filter(|touched| **touched).count() as u64;
                assert_eq!(space.touchable_pages(), touchable, "seed {seed}");
                let probe = random(20480);
                assert_eq!(space.stretch(probe).map(|(_, prot)| prot), model[probe as usize], "seed {seed}");
            }
        }
    }

    #[test]
    fn small_mappings_merge_and_large_ones_can_double() {
        let mut space = Space::new(SMALL, LARGE);
        for _ in 0..100 {
            let range = space.find(16).unwrap();
            space.map(range, 3);
        }
        assert_eq!(space.mapped.len(), 1);
        let first = space.find(1024).unwrap();
        space.map(first, 3);
        let second = space.find(1024).unwrap();
        space.map(second, 3);
        assert!(second.start >= first.end + 1024);
    }

    #[test]
    fn foreign_mappings_are_left_out() {
        let mut space = Space::new(SMALL, LARGE);
        space.map(PageRange { start: 0, end: 2 }, FOREIGN);
        space.map(PageRange { start: 10, end: 20 }, 3);
        space.map(PageRange { start: 20, end: 30 }, FOREIGN);
        let whole = PageRange { start: 0, end: 100 };
        assert_eq!(space.between_foreign(whole), [PageRange { start: 2, end: 20 }, PageRange { start: 30, end: 100 }]);
        assert_eq!(space.mapped_in(whole), [PageRange { start: 10, end: 20 }]);
        space.unmap(whole);
        assert_eq!(space.between_foreign(whole), [whole]);
    }

    #[test]
    fn a_full_zone_says_so() {
        let mut space = Space::new(SMALL, LARGE);
        assert!(space.find(20000).is_none());
        assert!(space.find(u64::MAX).is_none());
        space.map(SMALL, 3);
        assert!(space.find(1).is_none());
    }
}
