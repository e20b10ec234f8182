//! The verifier: what must hold in a heap at rest.

use super::Core;
use core::sync::atomic::Ordering;
use farfield_core::heap::{FrameId, FrameWord, State};

impl Core {
    pub(crate) fn verify(&self) {
        self.land_all();
        self.evictor.paused(|| {
            let occupied = self.segments.verify();
            let expected = occupied + 1 + self.anchors.load(Ordering::SeqCst);
            assert_eq!(
                self.references.load(Ordering::SeqCst),
                expected,
                "references, segments with objects, collections"
            );
            let in_use = self.verify_words();
            let (resident, counted) = self.frames.resident();
            assert_eq!(counted, in_use, "frames in use");
            assert!(resident >= in_use);
            for frame in 1..self.frames.high() {
                let Some(page) = self.frames.infos[frame].page() else { continue };
                let word = FrameWord(self.words[page].load(Ordering::SeqCst));
                assert_eq!(word.frame(), Some(FrameId(frame)), "frame {frame} says it holds page {page}");
            }
        });
    }

    /// Frames that words refer to.
    fn verify_words(&self) -> u32 {
        let mut in_use = 0;
        let mut page = 0;
        while page < self.segments.high_page() {
            let unit = self.segments.unit_of(page);
            let word = FrameWord(self.words[page].load(Ordering::SeqCst));
            let pages = unit.map_or(1, |unit| unit.pages);
            match word.state() {
                State::Empty => {}
                State::Far => assert!(unit.is_some() && word.is_stored(), "page {page} is far and not in the pool"),
                State::Near | State::Leaving => {
                    let Some(FrameId(frame)) = word.frame() else { unreachable!() };
                    assert_eq!(unit.map(|unit| unit.page), Some(page), "page {page} is near and in no unit");
                    assert_eq!(self.frames.infos[frame].page(), Some(page), "page {page} says it is in frame {frame}");
                    for frame in frame..frame + pages {
                        assert!(!self.frames.is_free(FrameId(frame)), "page {page} is in frame {frame}, which is free");
                    }
                    in_use += pages;
                }
                other => panic!("page {page} is {other:?} at rest"),
            }
            for inside in page + 1..page + pages {
                let word = FrameWord(self.words[inside].load(Ordering::SeqCst));
                let expected = if word_is_in_use(unit.is_some(), self, page) { State::Fetching } else { State::Empty };
                assert_eq!(word.state(), expected, "page {inside} inside the unit of page {page}");
            }
            page += pages;
        }
        in_use
    }
}

fn word_is_in_use(in_unit: bool, core: &Core, page: u32) -> bool {
    in_unit && FrameWord(core.words[page].load(Ordering::SeqCst)).state() != State::Empty
}
