//! The evacuator moves live objects out of a log page that is about to leave. Hot objects move
//! together, and cold ones too, so that hot ones stay near and pages that leave are dense (AIFM).
//!
//! The evacuator is a part of the evictor, which has claimed the page: no scope refers to it, and
//! threads that want it wait, for no longer than its objects are copied. An object is *hot* if it
//! was used again after it came; moving clears that mark. Objects go to pages that only the
//! evacuator fills; those of cold objects leave as soon as they are full. While a thread waits for
//! a frame, or when there is no frame to move objects to, pages leave as they are.
//!
//! The evacuator also compacts far pages in which few objects live (`heap/eviction/compaction.rs`).

use super::tags::PageTags;
use super::{ObjectId, Objects};
use crate::heap::{HeapInner, Watermark};
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{CARD_BYTES, EvacuationDecision, FrameId, Handle, IngressPath, LogClass};
use farfield_os::memory::load_ahead;

/// Pages that the evacuator fills.
#[derive(Default)]
pub(crate) struct Evacuator {
    /// Open pages, per class: one for cold objects, one for hot ones.
    targets: [[Option<EvacuationTarget>; 2]; LogClass::COUNT],
    /// Full pages of cold objects, which leave next.
    cold: Vec<u32>,
}

/// A page being filled.
#[derive(Clone, Copy)]
struct EvacuationTarget {
    page: u32,
    frame: FrameId,
    next: u32,
}

/// A page whose objects move, with its bytes. The page is Claimed, or Far and kept so
/// ([`LogPages::begin_departure`](super::LogPages::begin_departure)).
struct EvacuationSource<'a> {
    page: u32,
    class: LogClass,
    bytes: &'a [u8],
}

/// An object that lives in the source page.
struct LiveObject {
    object: ObjectId,
    index: u32,
    handle: Handle,
}

impl Evacuator {
    /// Checks whether this is one of the pages that the evacuator fills. They must not leave.
    pub(crate) fn fills(&self, core: &HeapInner, page: u32) -> bool {
        core.objects.as_ref().is_some_and(|objects| objects.log.word(page).is_open())
            && self.targets.iter().flatten().flatten().any(|target| target.page == page)
    }

    /// Checks whether this log page, which is in use, is worth emptying: its frame would be free
    /// for the price of a few copies.
    pub(crate) fn is_sparse(objects: &Objects, page: u32) -> bool {
        objects.log.word(page).is_sparse(2)
    }

    /// Decides about a Claimed log page, and empties it if that is the decision, `may_move` allows
    /// it, and there is room. Returns true if the page is dead by that, and the caller's to retire.
    pub(crate) fn take(
        &mut self,
        core: &HeapInner,
        objects: &Objects,
        page: u32,
        frame: FrameId,
        may_move: bool,
    ) -> (EvacuationDecision, bool) {
        let word = objects.log.word(page);
        let Some(class) = word.class().filter(|_| !word.is_open()) else {
            return (EvacuationDecision::Write, false);
        };
        crate::heap::launder(core.frames.address(frame));
        // SAFETY: a frame of the arena, which is initialised memory of the kernel; its page is
        // Claimed and the evictor's, so nobody writes it until it is told what becomes of the page.
        let bytes = unsafe { core::slice::from_raw_parts(core.frames.address(frame), PAGE_BYTES) };
        let source = EvacuationSource { page, class, bytes };
        let mut found = source.live(objects);
        Self::forget_ahead(core, objects, &mut found);
        objects.heat.tick(core);
        let count = |is: &dyn Fn(Handle) -> bool| found.iter().filter(|found| is(found.handle)).count() as u32;
        let (hot, used) = (count(&|handle| objects.is_hot(handle)), count(&Handle::is_used));
        let choice = objects.paths.as_ref().map(|paths| (paths, paths.choose(class, word, used)));
        let mut died = false;
        let decision = match EvacuationDecision::of(found.len() as u32, hot, class.capacity()) {
            EvacuationDecision::Stay | EvacuationDecision::Evacuate if !may_move => EvacuationDecision::Write,
            EvacuationDecision::Evacuate if matches!(choice, Some((_, IngressPath::Page))) => EvacuationDecision::Write,
            EvacuationDecision::Evacuate if !self.move_all(core, objects, &source, &found, &mut died) => {
                EvacuationDecision::Write
            }
            decision => decision,
        };
        let marks = match (decision, choice) {
            (EvacuationDecision::Stay, _) => {
                found.iter().for_each(|found| objects.cool_down(found.object, found.handle));
                0
            }
            (EvacuationDecision::Write, Some((paths, path))) => {
                paths.count(class, path, used);
                paths.leaves(page, class, word);
                objects.log.send(page, path);
                Handle::HEAT | Handle::USED
            }
            _ => 0,
        };
        if decision != EvacuationDecision::Stay
            && let Some((paths, _)) = choice
        {
            paths.learn(class, word, used);
        }
        for found in found.iter().filter(|found| found.handle.0 & marks != 0) {
            objects.handles[found.object].fetch_and(!marks, Ordering::Relaxed);
        }
        (decision, died)
    }

    /// Moves these objects out of a Claimed page, hot ones together and cold ones together. Returns
    /// false if there is no room for all that still live.
    fn move_all(
        &mut self,
        core: &HeapInner,
        objects: &Objects,
        source: &EvacuationSource<'_>,
        found: &[LiveObject],
        died: &mut bool,
    ) -> bool {
        for found in found {
            let Some(target) = self.target(core, objects, source.class, objects.is_hot(found.handle)) else {
                self.close(core);
                return *died;
            };
            *died |= target.receive(core, objects, source, found);
        }
        true
    }

    /// Moves the objects that live in a page with these bytes to pages of cold objects. The page is
    /// Far and kept so. An object that another thread brings near meanwhile is that thread's: the
    /// handle decides.
    pub(crate) fn merge(&mut self, core: &HeapInner, objects: &Objects, page: u32, bytes: &[u8]) {
        let Some(class) = objects.log.word(page).class() else { return };
        let source = EvacuationSource { page, class, bytes };
        let mut found = source.live(objects);
        Self::forget_ahead(core, objects, &mut found);
        for found in found {
            let Some(target) = self.target(core, objects, class, false) else { break };
            let died = target.receive(core, objects, &source, &found);
            debug_assert!(!died, "the caller takes objects out of it");
        }
    }

    /// Counts objects that were prefetched and are still unused as unused, and clears their marks.
    fn forget_ahead(core: &HeapInner, objects: &Objects, found: &mut [LiveObject]) {
        for found in found.iter_mut().filter(|found| found.handle.is_ahead()) {
            objects.handles[found.object].fetch_and(!Handle::AHEAD, Ordering::Relaxed);
            found.handle = Handle(found.handle.0 & !Handle::AHEAD);
            core.evictor.ahead.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the page for objects of this class and temperature, with room for one; `None` if
    /// there is no frame or no page for it.
    fn target(
        &mut self,
        core: &HeapInner,
        objects: &Objects,
        class: LogClass,
        hot: bool,
    ) -> Option<&mut EvacuationTarget> {
        let target = &mut self.targets[class.index()][usize::from(hot)];
        if let Some(full) = target.take_if(|target| target.next == class.capacity()) {
            core.close_log(&objects.log, full.page);
            self.cold.extend((!hot).then_some(full.page));
        }
        if target.is_none() {
            *target = Self::open(core, objects, class);
        }
        target.as_mut()
    }

    /// Opens a fresh page, near.
    fn open(core: &HeapInner, objects: &Objects, class: LogClass) -> Option<EvacuationTarget> {
        // Takes from the reserve too: evacuation gives back more frames than it takes.
        let frame = core.frames.take(1, Watermark::Emergency)?;
        let Ok(page) = core.open_log(&objects.log, class) else {
            core.frames.put(frame, 1);
            return None;
        };
        // Nobody else knows the page, and only the holder of the evictor's lock discards pages,
        // which we are. So there is nothing to wait for.
        if core.make_log(page, frame).is_err() {
            unreachable!("a fresh log page is Empty");
        }
        Some(EvacuationTarget { page, frame, next: 0 })
    }

    /// Returns the full pages of cold objects, and forgets them.
    pub(crate) fn take_cold(&mut self) -> Vec<u32> {
        core::mem::take(&mut self.cold)
    }

    /// Closes all open pages, for which there is no room: from now on they may leave.
    pub(crate) fn close(&mut self, core: &HeapInner) {
        let Some(objects) = &core.objects else { return };
        for target in self.targets.iter_mut().flatten().filter_map(Option::take) {
            core.close_log(&objects.log, target.page);
        }
    }
}

impl EvacuationSource<'_> {
    /// Returns the objects that live in the page.
    fn live(&self, objects: &Objects) -> Vec<LiveObject> {
        assert_eq!(self.bytes.len(), PAGE_BYTES);
        let tags = PageTags::new(&objects.log.tag_table, self.page, self.class);
        let tagged = |index| {
            // SAFETY: the bytes of a page, which nobody writes as long as we have them.
            let tag = unsafe { tags.get(self.bytes.as_ptr(), index) };
            tag.filter(|object| *object < objects.handles.count())
        };
        // Prefetches the handles, which lie anywhere: otherwise the processor waits for one after
        // the other.
        (0..self.class.capacity()).filter_map(tagged).for_each(|object| load_ahead(&objects.handles[object]));
        let live = |index| {
            let object = tagged(index)?;
            let handle = Handle(objects.handles[object].load(Ordering::Acquire));
            handle.is_at(self.page, self.class.card(index)).then_some(LiveObject { object, index, handle })
        };
        (0..self.class.capacity()).filter_map(live).collect()
    }
}

impl EvacuationTarget {
    /// Moves one object to this page. Returns true if the source page is dead by that.
    fn receive(
        &mut self,
        core: &HeapInner,
        objects: &Objects,
        source: &EvacuationSource<'_>,
        found: &LiveObject,
    ) -> bool {
        let EvacuationSource { page, class, bytes } = *source;
        let (index, card) = (self.next, class.card(self.next));
        self.next += 1;
        objects.log.enter(self.page, false);
        let from = &bytes[usize::from(class.card(found.index)) * CARD_BYTES..][..class.bytes()];
        // SAFETY: a place and a tag that nobody has, inside the frame of a page that only the
        // evacuator fills and that stays near as long as it does.
        unsafe {
            let target = core.frames.address(self.frame);
            target.add(usize::from(card) * CARD_BYTES).copy_from_nonoverlapping(from.as_ptr(), from.len());
            PageTags::new(&objects.log.tag_table, self.page, class).set(target, index, found.object);
        }
        let moved = objects.heat.rule.looked_at(found.handle).evacuated(self.page, card);
        let handle = &objects.handles[found.object];
        // Release: a reader that finds the object there finds its bytes. The exchange fails if the
        // object has ended meanwhile.
        if handle.compare_exchange(found.handle.0, moved.0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            core.leave_log(&objects.log, self.page);
            return false;
        }
        objects.moved.fetch_add(1, Ordering::Relaxed);
        objects.log.leave(page)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against log pages that nobody retires.
    use super::*;
    use crate::{FarBox, Heap, Plane};
    use farfield_core::heap::FrameWord;

    /// The last object of a page moves, and there is no room for another one, which has ended since it was found.
    #[test]
    fn a_page_that_dies_while_room_ends_is_said_to_be_dead() {
        let builder = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).plane(Plane::Object);
        let heap = builder.build().unwrap();
        let core = heap.core();
        let objects = core.objects.as_ref().unwrap();
        let class = LogClass::of(1000, 8).unwrap();
        let mut values: Vec<FarBox<[u8; 1000]>> =
            (0..class.capacity()).map(|_| heap.alloc([7; 1000]).unwrap()).collect();
        // The next one is in another page: the first is closed.
        values.push(heap.alloc([8; 1000]).unwrap());
        let page = (0..core.segments.high_page()).find(|page| objects.log.word(*page).live() == class.capacity());
        let page = page.unwrap();
        core.evictor.paused(|| {
            let scope = heap.enter();
            let frame = FrameWord(core.words[page].load(Ordering::Acquire)).frame().unwrap();
            // SAFETY: a frame of initialised memory, whose page stays there until the scope ends, and nobody writes.
            let bytes = unsafe { core::slice::from_raw_parts(core.frames.address(frame), PAGE_BYTES) };
            let source = EvacuationSource { page, class, bytes };
            let found = source.live(objects);
            assert_eq!(found.len() as u32, class.capacity());
            let mut evacuator = Evacuator::default();
            evacuator.target(core, objects, class, false).unwrap().next = class.capacity() - 1;
            let frames: Vec<_> = core::iter::from_fn(|| core.frames.take(1, Watermark::Emergency)).collect();
            // All but the first end, after they were found.
            values.drain(1..class.capacity() as usize);
            let mut died = false;
            assert!(evacuator.move_all(core, objects, &source, &found, &mut died));
            assert!(died);
            frames.into_iter().for_each(|frame| core.frames.put(frame, 1));
            evacuator.close(core);
            drop(scope);
            core.retire_log(&objects.log, page);
        });
        assert_eq!(values[0].read(|value| *value).unwrap(), [7; 1000]);
        drop(values);
        heap.verify();
    }
}
