//! The verifier: the invariants of a heap at rest.

use super::HeapInner;
use core::sync::atomic::Ordering;
use farfield_core::heap::{FrameId, FrameWord, IngressPath, LogWord, ObjectLocation, State};
use std::collections::BTreeMap;

impl HeapInner {
    pub(crate) fn verify(&self) {
        self.land_all();
        self.evictor.paused(|| {
            let occupied = self.segments.verify();
            let objects = self.verify_objects();
            let expected = occupied + objects + 1 + self.heap_refs.load(Ordering::SeqCst);
            assert_eq!(
                self.references.load(Ordering::SeqCst),
                expected,
                "references, segments with objects, objects with handles, collections"
            );
            let shared = self.shares.verify();
            assert!(shared == 0 || occupied + objects > 0, "owners of values that are gone");
            let (in_use, cooling) = self.verify_words();
            assert_eq!(self.frames.cooling(), cooling, "units Cooling");
            let (resident, counted) = self.frames.resident();
            assert_eq!(counted, in_use, "frames in use");
            assert!(resident >= in_use);
            for frame in self.frames.used().iter() {
                let Some(page) = self.frames.infos[frame].page() else { continue };
                let word = FrameWord(self.words[page].load(Ordering::SeqCst));
                assert_eq!(word.frame(), Some(FrameId(frame)), "frame {frame} says it holds page {page}");
            }
        });
    }

    /// Returns the number of objects that have handles. Checks that each is in a log page whose tag
    /// says so, and that log pages count them.
    fn verify_objects(&self) -> u64 {
        let Some(objects) = &self.objects else { return 0 };
        let mut live = BTreeMap::<u32, u32>::new();
        for object in 0..objects.handles.high() {
            let handle = objects.handle(object);
            let (page, card) = match handle.location() {
                ObjectLocation::At { page, card } => (page, card),
                ObjectLocation::Nowhere => continue,
                ObjectLocation::Moving => panic!("object {object} is moving at rest"),
            };
            *live.entry(page).or_default() += 1;
            let word = objects.log.word(page);
            let Some(class) = word.class() else { panic!("object {object} is in page {page}, which is not in use") };
            if let Some(frame) = FrameWord(self.words[page].load(Ordering::SeqCst)).frame() {
                // SAFETY: the heap is at rest.
                let tagged =
                    unsafe { objects.log.tagged(page, class, class.index_at(card), self.frames.address(frame)) };
                assert_eq!(tagged, Some(object), "object in page {page}");
            }
        }
        let (mut in_use, mut by_page) = (0, 0);
        for page in 0..self.segments.high_page() {
            let word = objects.log.word(page);
            in_use += u32::from(word.class().is_some());
            by_page += u32::from(word.path() == IngressPath::Page);
            assert_eq!(word.live(), live.get(&page).copied().unwrap_or(0), "objects in log page {page}");
            assert_eq!(word.coming(), 0, "objects on their way to log page {page} at rest");
            assert!(word.going() == 0 && !word.is_whole(), "somebody is at log page {page} at rest: {word:?}");
            assert!(
                word.class().is_none() || word.is_open() || word.live() > 0,
                "log page {page} is dead and was not retired"
            );
        }
        assert_eq!(objects.log.in_use(), (in_use, by_page), "log pages, and those that come whole");
        for page in objects.log.unused() {
            assert_eq!(objects.log.word(page), LogWord::UNUSED, "log page {page} is free and in use");
            let word = FrameWord(self.words[page].load(Ordering::SeqCst));
            assert_eq!(word.state(), State::Empty, "log page {page} is free and holds something");
        }
        live.values().map(|live| u64::from(*live)).sum()
    }

    /// Returns the numbers of frames that words refer to, and of units that are Cooling. Checks the
    /// count of vacancies.
    fn verify_words(&self) -> (u32, u32) {
        let (mut in_use, mut cooling, mut vacant) = (0, 0, 0);
        let mut page = 0;
        while page < self.segments.high_page() {
            let unit = self.segments.unit_of(page);
            let word = FrameWord(self.words[page].load(Ordering::SeqCst));
            let pages = unit.map_or(1, |unit| unit.pages);
            match word.state() {
                State::Empty => vacant += u64::from(word.is_stored()),
                State::Far => assert!(unit.is_some() && word.is_stored(), "page {page} is far and not in the pool"),
                State::Near | State::Cooling => {
                    let Some(FrameId(frame)) = word.frame() else { unreachable!() };
                    assert_eq!(unit.map(|unit| unit.page), Some(page), "page {page} is near and in no unit");
                    assert_eq!(self.frames.infos[frame].page(), Some(page), "page {page} says it is in frame {frame}");
                    for (at, frame) in (frame..frame + pages).enumerate() {
                        assert!(!self.frames.is_free(FrameId(frame)), "page {page} is in frame {frame}, which is free");
                        let is_as_far = word.is_stored() && !word.is_dirty();
                        let agrees = || self.checksums.agrees(page + at as u32, self.frames.infos[frame].sum());
                        assert!(!is_as_far || agrees(), "page {page} + {at} is near, and another one is far");
                    }
                    in_use += pages;
                    cooling += u32::from(word.state() == State::Cooling);
                }
                other => panic!("page {page} is {other:?} at rest"),
            }
            for inside in page + 1..page + pages {
                let word = FrameWord(self.words[inside].load(Ordering::SeqCst));
                let expected = if word_is_in_use(unit.is_some(), self, page) { State::Loading } else { State::Empty };
                assert_eq!(word.state(), expected, "page {inside} inside the unit of page {page}");
                vacant += u64::from(word.state() == State::Empty && word.is_stored());
            }
            page += pages;
        }
        assert_eq!(self.vacancies.count(), vacant, "vacant pages");
        (in_use, cooling)
    }
}

fn word_is_in_use(in_unit: bool, core: &HeapInner, page: u32) -> bool {
    in_unit && FrameWord(core.words[page].load(Ordering::SeqCst)).state() != State::Empty
}
