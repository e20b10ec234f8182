//! Holes: places in log pages whose objects are gone, and that are filled again while the page is
//! near.
//!
//! A page is noted in the list of its class when a sixteenth of its places is free, but at least
//! one. A thread that needs a page for new objects first takes the page that was noted last. It
//! opens the page again if that is still near and of that class. So near memory is as full of live
//! objects as on the page plane, and not of what a growing collection has left behind.
//!
//! A place is free if the handle that its tag names points elsewhere. The thread that opens the
//! page again is its only owner, the page is near, and nothing is on its way to it. The thread is
//! in a scope, so the objects that live in the page stay there. Another thread may have freed an
//! object without having updated the page's word yet. So no more places are filled than the word
//! knows to be free.

use super::tags::PageTags;
use super::{LogPageBitmap, Objects, OpenLogPage};
use crate::error::FarError;
use crate::heap::{HeapInner, ThreadState};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FrameWord, Handle, LogClass, State};
use farfield_os::memory::load_ahead;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Pages with holes, of each class, in the order in which they were noted. They may be far by now,
/// or in another use.
pub(super) struct Holes {
    lists: [Mutex<VecDeque<u32>>; LogClass::COUNT],
    /// Most pages in a list. When it is full, the page noted first is forgotten; the evacuator
    /// empties it.
    most: usize,
    /// Bytes that the lists take.
    bytes: AtomicU64,
}

/// Part of the frames, as a divisor, for which a list has room; at most [`PAGES_MAX`] pages. Both
/// are powers of two, as lists grow by doubling.
const SHARE: u64 = 32;
const PAGES_MAX: u64 = 1 << 12;
/// Most pages of a list that are tried when a page is wanted.
const LOOKS: u32 = 16;

impl Holes {
    /// Makes empty lists for this many bytes of near memory.
    pub(super) fn new(near: u64) -> Holes {
        let most = (near / PAGE_BYTES as u64 / SHARE).clamp(16, PAGES_MAX).next_power_of_two();
        Holes { lists: core::array::from_fn(|_| Mutex::default()), most: most as usize, bytes: AtomicU64::new(0) }
    }

    fn list(&self, class: LogClass) -> MutexGuard<'_, VecDeque<u32>> {
        self.lists[class.index()].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of near memory that the lists cost: few programs have values of all
    /// classes.
    pub(super) fn table_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Notes that this page of this class has holes that are worth filling.
    pub(super) fn note(&self, page: u32, class: LogClass) {
        let mut list = self.list(class);
        if list.len() == self.most {
            list.pop_front();
        }
        let before = list.capacity();
        list.push_back(page);
        let grown = list.capacity() - before;
        if grown > 0 {
            self.bytes.fetch_add((grown * size_of::<u32>()) as u64, Ordering::Relaxed);
        }
    }

    /// Removes the page that was noted last and returns it.
    fn take(&self, class: LogClass) -> Option<u32> {
        self.list(class).pop_back()
    }
}

impl HeapInner {
    /// Makes a near page of this class with holes the thread's to fill; false if none is found. The
    /// caller is inside a scope.
    pub(super) fn reopen_page(
        &self,
        record: &ThreadState,
        objects: &Objects,
        class: LogClass,
    ) -> Result<bool, FarError> {
        for _ in 0..LOOKS {
            let Some(page) = objects.log.holes.take(class) else { break };
            if let Some(free) = self.reopen(objects, page, class)? {
                let before = record.objects.page(class).replace(Some(OpenLogPage { page, free }));
                debug_assert!(before.is_none(), "a page that nobody closes");
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Opens this page again, if it can be filled, and returns its free places.
    fn reopen(&self, objects: &Objects, page: u32, class: LogClass) -> Result<Option<LogPageBitmap>, FarError> {
        let log = &objects.log;
        // A page that is being copied would have to be waited for.
        if !matches!(FrameWord(self.words[page].load(Ordering::Relaxed)).state(), State::Near | State::Cooling) {
            return Ok(None);
        }
        // From here on the page stays near until our scope ends, if it does not die before we have
        // it.
        let Some(frame) = self.near_log(page)? else { return Ok(None) };
        let Some(word) = log.reopen(page, class) else { return Ok(None) };
        let tags = PageTags::new(&log.tag_table, page, class);
        let bytes = self.frames.address(frame);
        // SAFETY: the page is near until our scope ends, and ours to fill: nobody else writes its
        // tags.
        let tag = |index| unsafe { tags.get(bytes, index) };
        (0..class.capacity()).filter_map(tag).for_each(|object| load_ahead(&objects.handles[object]));
        let is_taken = |index: &u32| {
            tag(*index).is_some_and(|object| {
                // Acquire: all that the owner did to an object that is gone is over.
                Handle(objects.handles[object].load(Ordering::Acquire)).is_at(page, class.card(*index))
            })
        };
        let free = (0..class.capacity()).filter(|index| !is_taken(index));
        let known = (class.capacity() - word.live()) as usize;
        Ok(Some(free.take(known).collect()))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against places that are filled while something lives there, or never, and against
    //! pages with more objects than places.
    use super::*;
    use crate::{FarBox, Heap, Plane};
    use farfield_core::heap::ObjectLocation;

    fn heap(plane: Plane) -> Heap {
        Heap::builder().near(8 << 20).near_max(8 << 20).plane(plane).alone_above(0).build().unwrap()
    }

    fn check<const BYTES: usize>(plane: Plane) {
        let heap = heap(plane);
        let make = |index: usize| Some(heap.alloc([index as u8; BYTES]).unwrap());
        let mut values: Vec<Option<FarBox<[u8; BYTES]>>> = (0..(2 << 20) / BYTES).map(make).collect();
        let pages = heap.stats().value_pages;
        for round in 1..=4 {
            // Every third one goes, another one each time, and others take their places.
            for gone in values.iter_mut().skip(round % 3).step_by(3) {
                *gone = None;
            }
            for index in (round % 3..values.len()).step_by(3) {
                values[index] = make(index);
            }
        }
        for (index, value) in values.iter().enumerate() {
            assert_eq!(*value.as_ref().unwrap().get(&heap.enter()).unwrap(), [index as u8; BYTES]);
        }
        let after = heap.stats().value_pages;
        assert!(after <= pages + pages / 8, "{pages} pages of {BYTES} bytes, then {after} on {plane:?}");
        drop(values);
        heap.verify();
    }

    #[test]
    fn places_of_values_that_are_gone_are_filled() {
        for plane in [Plane::Object, Plane::Hybrid] {
            check::<40>(plane);
            check::<200>(plane);
            check::<512>(plane);
            check::<1024>(plane);
            check::<1300>(plane);
        }
    }

    #[test]
    fn places_that_the_page_does_not_know_to_be_free_are_not_filled() {
        let heap = heap(Plane::Object);
        let core = heap.core();
        let objects = core.objects.as_ref().unwrap();
        let class = LogClass::of(1000, 8).unwrap();
        let capacity = class.capacity() as usize;
        // The last one is in another page: the first is closed.
        let mut values: Vec<FarBox<[u8; 1000]>> = (0..=capacity).map(|_| heap.alloc([7; 1000]).unwrap()).collect();
        let number =
            |value: &FarBox<[u8; 1000]>| crate::ptr::Follow::pointer(value).number_in(core).unwrap() - core.pages;
        let (first, second) = (number(&values[0]), number(&values[1]));
        let ObjectLocation::At { page, card } = objects.handle(second).location() else { unreachable!("at rest") };
        assert!(core.reopen(objects, page, class).unwrap().is_none(), "it is full");
        drop(values.remove(0));
        let scope = heap.enter();
        // As if its owner had freed it, and not come to the page's word yet.
        let seen = objects.handles[second].swap(Handle::free(None).0, Ordering::SeqCst);
        let mut free = core.reopen(objects, page, class).unwrap().expect("one place");
        assert!(core.reopen(objects, page, class).unwrap().is_none(), "it is ours");
        let taken: Vec<u32> = core::iter::from_fn(|| free.take()).collect();
        assert_eq!(taken.len(), 1, "of {first} and {second}");
        objects.handles[second].store(seen, Ordering::SeqCst);
        core.close_log(&objects.log, page);
        let mut free = core.reopen(objects, page, class).unwrap().expect("one place");
        assert_eq!(free.take(), Some(0));
        assert_ne!(class.index_at(card), 0);
        core.close_log(&objects.log, page);
        drop(scope);
        drop(values);
        heap.verify();
    }

    #[test]
    fn a_full_list_forgets_what_was_noted_first_and_costs_what_it_takes() {
        let (holes, class) = (Holes::new(1 << 20), LogClass::of(64, 8).unwrap());
        assert_eq!(holes.table_bytes(), 0);
        (0..40).for_each(|page| holes.note(page, class));
        assert!(holes.list(class).capacity() <= holes.most);
        assert_eq!(holes.table_bytes(), (holes.list(class).capacity() * size_of::<u32>()) as u64);
        let taken: Vec<u32> = core::iter::from_fn(|| holes.take(class)).collect();
        assert_eq!(taken, (40 - holes.most as u32..40).rev().collect::<Vec<_>>());
    }
}
