//! Changed pages: which near pages differ from their far copies, so that whoever reads the region
//! can be told what not to read there (Atlas keeps such pages from its offload space).
//!
//! Each frame has a bit. A transition that makes a page dirty sets the bit of the page's frame. The
//! bit is cleared by the next walk that finds the page clean, or gone. A walk reads one word for 64
//! frames that hold nothing that was changed.
//!
//! A page that is being flushed is clean before its copy has arrived, so a walk misses it. Only pages
//! of a [`Space`](crate::space::Space) are flushed, and no far pointer leads there.

use super::HeapInner;
use super::memory::ReservedArray;
use crate::error::BuildError;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::{FrameId, FrameWord};
use std::sync::{Mutex, PoisonError};

/// Marks of the frames whose page was made dirty since a walk last found it clean.
pub(crate) struct ChangedPages {
    marks: ReservedArray<AtomicU64>,
    /// Held by the walk that takes marks away for a moment.
    walk: Mutex<()>,
}

impl ChangedPages {
    /// Creates the marks of an arena of so many frames, without any memory yet.
    pub(super) fn new(frames: usize) -> Result<ChangedPages, BuildError> {
        let marks = ReservedArray::new(frames.div_ceil(u64::BITS as usize))?;
        Ok(ChangedPages { marks, walk: Mutex::default() })
    }

    /// Marks the frame of a page whose word has just become dirty.
    pub(crate) fn mark(&self, frame: FrameId) {
        // AcqRel: a walk that clears the mark before it was set sees the word that is dirty.
        self.marks[frame.0 / u64::BITS].fetch_or(1 << (frame.0 % u64::BITS), Ordering::AcqRel);
    }

    /// Returns the bytes of near memory that the marks of so many frames cost.
    pub(super) fn bytes(frames: u32) -> u64 {
        u64::from(frames.div_ceil(u64::BITS)) * size_of::<AtomicU64>() as u64
    }
}

impl HeapInner {
    /// Returns the pages that are near and dirty, or on their way to the pool since they were, in
    /// ascending order. A page that somebody changes meanwhile may be missing. `None` if there are
    /// more than `most`.
    pub(crate) fn changed_pages(&self, most: usize) -> Option<Vec<u32>> {
        let changed = &self.changed;
        let _walk = changed.walk.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pages = Vec::new();
        for frames in self.frames.used().ranges() {
            for index in frames.start / u64::BITS..frames.end.div_ceil(u64::BITS) {
                let marks = &changed.marks[index];
                let mut left = marks.load(Ordering::Acquire);
                while left != 0 {
                    let bit = left & left.wrapping_neg();
                    let frame = FrameId(index * u64::BITS + left.trailing_zeros());
                    left ^= bit;
                    // Before the look: a change that the look does not see sets the mark again.
                    marks.fetch_and(!bit, Ordering::AcqRel);
                    let Some(page) = self.dirty_page_in(frame) else { continue };
                    marks.fetch_or(bit, Ordering::AcqRel);
                    let unit_pages = self.segments.unit_of(page).map_or(1, |unit| unit.pages);
                    if pages.len() + unit_pages as usize > most {
                        return None;
                    }
                    pages.extend(page..page + unit_pages);
                }
            }
        }
        pages.sort_unstable();
        pages.dedup();
        Some(pages)
    }

    /// Returns the first page of the unit that begins in this frame, if it is dirty.
    fn dirty_page_in(&self, frame: FrameId) -> Option<u32> {
        let page = self.frames.infos[frame.0].page()?;
        let word = FrameWord(self.words[page].load(Ordering::Acquire));
        (word.frame() == Some(frame) && word.is_dirty()).then_some(page)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a changed page that nobody is told of.
    use crate::heap::HeapInner;
    use crate::{FarBox, Heap, Plane};
    use core::sync::atomic::{AtomicBool, Ordering};
    use farfield_core::heap::{FrameWord, State};
    use std::collections::BTreeSet;

    /// The dirty pages by a look at the word of each page.
    fn dirty(core: &HeapInner) -> Vec<u32> {
        let mut pages = Vec::new();
        for page in 0..core.segments.high_page() {
            let word = FrameWord(core.words[page].load(Ordering::Acquire));
            if word.is_dirty() && !matches!(word.state(), State::Empty | State::Far | State::Loading) {
                let unit = core.segments.unit_of(page).unwrap();
                pages.extend(unit.page..unit.page + unit.pages);
            }
        }
        pages
    }

    #[test]
    fn changed_pages_are_those_whose_words_are_dirty() {
        for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
            let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).plane(plane).build().unwrap();
            let mut random = fastrand::Rng::with_seed(7);
            let mut small: Vec<FarBox<[u64; 20]>> =
                (0..16_000).map(|number| heap.alloc([number; 20]).unwrap()).collect();
            let mut large: Vec<FarBox<[u64; 1500]>> =
                (0..40).map(|number| heap.alloc([number; 1500]).unwrap()).collect();
            for _ in 0..20 {
                for _ in 0..random.usize(..200) {
                    let index = random.usize(..small.len());
                    match random.bool() {
                        true => small[index].get_mut(&heap.enter()).unwrap()[1] += 1,
                        false => assert_eq!(small[index].get(&heap.enter()).unwrap()[0], index as u64),
                    }
                }
                let index = random.usize(..large.len());
                large[index].get_mut(&heap.enter()).unwrap()[9] += 1;
                let core = heap.core();
                core.evictor.paused(|| {
                    assert_eq!(core.changed_pages(usize::MAX), Some(dirty(core)), "{plane:?}");
                    assert_eq!(core.changed_pages(usize::MAX), Some(dirty(core)), "a walk keeps the marks");
                    assert_eq!(core.changed_pages(0), None);
                });
            }
            if plane == Plane::Page {
                heap.write_back([crate::FarRange { start: 0, len: u64::MAX }]).unwrap();
                assert_eq!(heap.core().changed_pages(usize::MAX), Some(Vec::new()));
            }
            drop((small, large));
            heap.verify();
        }
    }

    #[test]
    fn a_page_changed_during_walks_is_found_by_the_next_one() {
        let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
        let values: Vec<FarBox<[u64; 300]>> = (0..1000).map(|number| heap.alloc([number; 300]).unwrap()).collect();
        let pages: Vec<u32> = values.iter().map(|value| (heap.far_range(value).unwrap().start >> 12) as u32).collect();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    heap.core().changed_pages(usize::MAX);
                    std::thread::yield_now();
                }
            });
            for (mut value, page) in values.into_iter().zip(pages) {
                // Held by a pin, so that it does not leave before the look.
                let mut pinned = value.pin_mut().unwrap();
                pinned[3] += 1;
                let found: BTreeSet<u32> = heap.core().changed_pages(usize::MAX).unwrap().into_iter().collect();
                assert!(found.contains(&page));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        heap.verify();
    }
}
