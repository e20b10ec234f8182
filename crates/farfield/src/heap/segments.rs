//! Which far addresses are in use: segments of one size class each, with a bit per object (slab
//! allocation).
//!
//! A thread fills one segment per class, from low addresses to high, so what is made together lies
//! together; places of objects that are gone are used again. A segment is *owned* by the thread
//! that fills it, *listed* when any thread may take it over, *full*, or *free*.

use super::memory::{ReservedArray, Zeroed};
use crate::error::{BuildError, FarError};
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use farfield_core::geometry::PAGE_SHIFT;
use farfield_core::heap::{CARD_BYTES, Class, FreeRuns, SEGMENT_PAGES};
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A segment's number: its first page divided by [`SEGMENT_PAGES`].
pub(crate) type SegmentId = u32;

/// Metadata of one segment.
pub(crate) struct HeapSegment {
    /// Bitmap with one bit per object, set while it lives.
    bits: AtomicPtr<AtomicU64>,
    /// Number of objects that live.
    live: AtomicU32,
    /// For a run, the number of its pages; for a segment inside one, the number of its first
    /// segment.
    extra: AtomicU32,
    /// For a run, the number of pages of each of its units.
    unit: AtomicU32,
    /// FREE, RUN, INSIDE, LOG, or CLASS plus a class's index.
    kind: AtomicU8,
    status: AtomicU8,
}

// SAFETY: atomics, for which zero is a value.
unsafe impl Zeroed for HeapSegment {}

const FREE: u8 = 0;
/// The first segment of a run: one large object, or the units of a collection.
const RUN: u8 = 1;
const INSIDE: u8 = 2;
/// Log pages of the object plane, which knows what is in them.
const LOG: u8 = 3;
const CLASS: u8 = 4;

const OWNED: u8 = 1;
const LISTED: u8 = 2;
const FULL: u8 = 3;

/// Bytes that a segment costs beside its bits.
pub(crate) const SEGMENT_HEAD_BYTES: usize = size_of::<HeapSegment>();

/// All segments of a heap.
pub(crate) struct Segments {
    heads: ReservedArray<HeapSegment>,
    free: Mutex<FreeRuns>,
    partial: [Mutex<BTreeSet<SegmentId>>; Class::COUNT],
    /// End of the segments that were ever used.
    high: AtomicU32,
    bit_bytes: AtomicU64,
    /// End of the segments that new values may use: the tables of more would not fit into near
    /// memory.
    end: AtomicU32,
    /// Bytes of tables that a segment takes, here and elsewhere.
    cost: u64,
}

/// Unit of transfer: pages that are fetched and evicted together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TransferUnit {
    /// First page.
    pub(crate) page: u32,
    /// Number of pages.
    pub(crate) pages: u32,
}

/// Consequence for a segment when an object in it was freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FreeOutcome {
    /// Segment that is still in use, or that its owner will use again.
    Keep,
    /// Segment whose pages the caller must release before it calls [`Segments::give_back`].
    Release,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn words(class: Class) -> usize {
    class.per_segment().div_ceil(64) as usize
}

impl Segments {
    /// Makes the table for so many pages, each of which takes `bytes_per_page` of tables elsewhere.
    pub(crate) fn new(pages: u32, bytes_per_page: usize) -> Result<Segments, BuildError> {
        let count = pages / SEGMENT_PAGES;
        let mut free = FreeRuns::new();
        free.put(0, count);
        Ok(Segments {
            heads: ReservedArray::new(count as usize)?,
            free: Mutex::new(free),
            partial: core::array::from_fn(|_| Mutex::new(BTreeSet::new())),
            high: AtomicU32::new(0),
            bit_bytes: AtomicU64::new(0),
            end: AtomicU32::new(count),
            cost: (SEGMENT_HEAD_BYTES + SEGMENT_PAGES as usize * bytes_per_page) as u64,
        })
    }

    fn take_below(
        &self,
        end: u32,
        count: u32,
        next: impl Fn(SegmentId) -> Option<SegmentId>,
    ) -> Result<SegmentId, FarError> {
        let mut free = lock(&self.free);
        let Some(first) = free.take_at(end, count, &next) else {
            let elsewhere = free.take_at(u32::MAX, count, next);
            elsewhere.iter().for_each(|first| free.put(*first, count));
            let bytes = u64::from(count) * self.cost;
            return Err(elsewhere.map_or(FarError::FarFull, |_| FarError::TablesFull { bytes }));
        };
        self.high.fetch_max(first + count, Ordering::Relaxed);
        Ok(first)
    }

    /// Takes `count` free segments for new values.
    fn take(&self, count: u32) -> Result<SegmentId, FarError> {
        self.take_below(self.end.load(Ordering::Relaxed), count, Some)
    }

    /// Bounds new values to segments for whose tables there is room, in `bytes` more of near
    /// memory.
    pub(crate) fn bound(&self, bytes: u64) {
        let more = u32::try_from(bytes / self.cost).unwrap_or(u32::MAX);
        let end = self.high.load(Ordering::Relaxed).saturating_add(more);
        self.end.store(end, Ordering::Relaxed);
    }

    /// Returns the end of the pages that were ever used.
    pub(crate) fn high_page(&self) -> u32 {
        self.high.load(Ordering::Relaxed) * SEGMENT_PAGES
    }

    /// Returns the bytes of near memory that the tables here cost.
    pub(crate) fn table_bytes(&self) -> u64 {
        u64::from(self.high.load(Ordering::Relaxed)) * SEGMENT_HEAD_BYTES as u64
            + self.bit_bytes.load(Ordering::Relaxed)
    }

    /// Returns a segment with room for this class, owned by the caller from now on.
    pub(crate) fn own(&self, class: Class) -> Result<SegmentId, FarError> {
        let partial = &self.partial[class.index()];
        if let Some(id) = lock(partial).pop_first() {
            self.heads[id].status.store(OWNED, Ordering::SeqCst);
            return Ok(id);
        }
        let id = self.take(1)?;
        let head = &self.heads[id];
        let bits: Box<[AtomicU64]> = (0..words(class)).map(|_| AtomicU64::new(0)).collect();
        self.bit_bytes.fetch_add(8 * words(class) as u64, Ordering::Relaxed);
        head.bits.store(Box::into_raw(bits).cast(), Ordering::Relaxed);
        head.live.store(0, Ordering::Relaxed);
        head.status.store(OWNED, Ordering::Relaxed);
        head.kind.store(CLASS + class.index() as u8, Ordering::Release);
        Ok(id)
    }

    /// Returns the bitmap of a segment of this class.
    ///
    /// # Safety
    /// The segment is in use for the class and stays so during `'a`: the caller owns it, or one of its objects, or one
    /// of its pages.
    unsafe fn bits<'a>(&self, id: SegmentId, class: Class) -> &'a [AtomicU64] {
        let bits = self.heads[id].bits.load(Ordering::Relaxed);
        // SAFETY: `own` stored a boxed slice of this length before it published the kind;
        // `give_back` frees it only when nobody owns anything of the segment, which the caller
        // rules out.
        unsafe { core::slice::from_raw_parts(bits, words(class)) }
    }

    /// Takes a free object of a segment that the caller owns, and says whether it is the only one
    /// there. `None` if there is no room: then the segment is not owned any more.
    pub(crate) fn take_object(&self, id: SegmentId, class: Class) -> Option<(u32, bool)> {
        let head = &self.heads[id];
        loop {
            // SAFETY: the caller owns the segment.
            let bits = unsafe { self.bits(id, class) };
            for (index, word) in bits.iter().enumerate() {
                let value = word.load(Ordering::Relaxed);
                let object = index as u32 * 64 + value.trailing_ones();
                if value == u64::MAX || object >= class.per_segment() {
                    continue;
                }
                // Only the owner sets bits, so the bit is still free. Acquire: what the last user
                // of the place did is over.
                word.fetch_or(1 << (object % 64), Ordering::Acquire);
                return Some((object, head.live.fetch_add(1, Ordering::SeqCst) == 0));
            }
            head.status.store(FULL, Ordering::SeqCst);
            // A thread that freed an object before that did not see FULL, and leaves the segment to
            // us.
            let has_room = head.live.load(Ordering::SeqCst) < class.per_segment();
            if !has_room || head.status.compare_exchange(FULL, OWNED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                return None;
            }
        }
    }

    /// Gives up the ownership of a segment. A thread can take it over if there is room in it, else
    /// when an object of it is freed.
    pub(crate) fn disown(&self, id: SegmentId, class: Class) -> FreeOutcome {
        let head = &self.heads[id];
        head.status.store(FULL, Ordering::SeqCst);
        // As in `take_object`.
        let has_room = head.live.load(Ordering::SeqCst) < class.per_segment();
        if !has_room || head.status.compare_exchange(FULL, LISTED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return FreeOutcome::Keep;
        }
        self.list(id, class)
    }

    fn list(&self, id: SegmentId, class: Class) -> FreeOutcome {
        let head = &self.heads[id];
        let mut partial = lock(&self.partial[class.index()]);
        head.status.store(LISTED, Ordering::SeqCst);
        if head.live.load(Ordering::SeqCst) == 0 {
            return FreeOutcome::Release;
        }
        partial.insert(id);
        FreeOutcome::Keep
    }

    /// Gives up the ownership of a segment that has room, because a page of it is lost. No thread
    /// fills it until an object in it is freed.
    pub(crate) fn shelve(&self, id: SegmentId, class: Class) -> FreeOutcome {
        let head = &self.heads[id];
        head.status.store(FULL, Ordering::SeqCst);
        // A thread that freed the last object before that did not see FULL, and leaves the segment
        // to us.
        let is_empty = head.live.load(Ordering::SeqCst) == 0;
        if is_empty && head.status.compare_exchange(FULL, OWNED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return self.list(id, class);
        }
        FreeOutcome::Keep
    }

    /// Takes a run of `units` units of `unit_pages` pages each, and returns its first page. The
    /// caller owns all of it.
    pub(crate) fn take_run(&self, units: u32, unit_pages: u32) -> Result<u32, FarError> {
        self.take_run_at(units, unit_pages, Some)
    }

    /// Takes a run as [`Segments::take_run`] does. `next` returns the least page, not below another
    /// one, with which the run may begin. All such pages begin segments.
    pub(crate) fn take_run_at(
        &self,
        units: u32,
        unit_pages: u32,
        next: impl Fn(u32) -> Option<u32>,
    ) -> Result<u32, FarError> {
        let pages = units.checked_mul(unit_pages).ok_or(FarError::FarFull)?;
        let count = pages.div_ceil(SEGMENT_PAGES);
        let next_segment = |id: SegmentId| {
            let page = next(id * SEGMENT_PAGES)?;
            assert!(page.is_multiple_of(SEGMENT_PAGES));
            Some(page / SEGMENT_PAGES)
        };
        let first = self.take_below(self.end.load(Ordering::Relaxed), count, next_segment)?;
        for id in first + 1..first + count {
            self.heads[id].extra.store(first, Ordering::Relaxed);
            self.heads[id].kind.store(INSIDE, Ordering::Release);
        }
        self.heads[first].extra.store(pages, Ordering::Relaxed);
        self.heads[first].unit.store(unit_pages, Ordering::Relaxed);
        self.heads[first].live.store(1, Ordering::Relaxed);
        self.heads[first].kind.store(RUN, Ordering::Release);
        Ok(first * SEGMENT_PAGES)
    }

    /// Takes a segment of log pages, and returns its first page. It is never anything else again.
    ///
    /// It may lie beyond what has room for tables: far data must be able to come near wherever it
    /// goes.
    pub(crate) fn take_log(&self) -> Result<u32, FarError> {
        let id = self.take_below(u32::MAX, 1, Some)?;
        self.heads[id].kind.store(LOG, Ordering::Release);
        Ok(id * SEGMENT_PAGES)
    }

    /// Checks whether this is a log page.
    pub(crate) fn is_log(&self, page: u32) -> bool {
        self.heads[page / SEGMENT_PAGES].kind.load(Ordering::Acquire) == LOG
    }

    /// Returns the unit to which a page belongs; `None` if the page is not in use.
    pub(crate) fn unit_of(&self, page: u32) -> Option<TransferUnit> {
        let id = page / SEGMENT_PAGES;
        let head = &self.heads[id];
        match head.kind.load(Ordering::Acquire) {
            FREE => None,
            RUN => self.unit_in_run(id, page),
            INSIDE => self.unit_in_run(head.extra.load(Ordering::Relaxed), page),
            LOG => Some(TransferUnit { page, pages: 1 }),
            kind => {
                let class = Class::from_index(usize::from(kind - CLASS));
                let first = class.unit_of(page % SEGMENT_PAGES)?;
                Some(TransferUnit { page: id * SEGMENT_PAGES + first, pages: class.unit_pages() })
            }
        }
    }

    fn unit_in_run(&self, first: SegmentId, page: u32) -> Option<TransferUnit> {
        let head = &self.heads[first];
        let (start, pages) = (first * SEGMENT_PAGES, head.unit.load(Ordering::Relaxed));
        let within = page - start;
        (within < head.extra.load(Ordering::Relaxed))
            .then(|| TransferUnit { page: start + within / pages * pages, pages })
    }

    /// Checks whether an object of so many bytes can begin at this page and card: whether the place
    /// is one of objects of at least that size. Says nothing of whether one lives there.
    pub(crate) fn has_room(&self, page: u32, card: u8, bytes: usize) -> bool {
        let (id, within) = (page / SEGMENT_PAGES, page % SEGMENT_PAGES);
        let head = &self.heads[id];
        match head.kind.load(Ordering::Acquire) {
            FREE | INSIDE | LOG => false,
            RUN => {
                within == 0 && card == 0 && bytes as u64 <= u64::from(head.extra.load(Ordering::Relaxed)) << PAGE_SHIFT
            }
            kind => {
                let class = Class::from_index(usize::from(kind - CLASS));
                let (unit_pages, cards) = (class.unit_pages(), (class.bytes() / CARD_BYTES) as u32);
                let index = u32::from(card) / cards;
                let is_begin = within.is_multiple_of(unit_pages) && u32::from(card) == index * cards;
                is_begin && index < class.per_unit() && class.unit_of(within).is_some() && bytes <= class.bytes()
            }
        }
    }

    /// Checks whether an object lives in this unit. The caller owns the unit, so that its segment
    /// stays what it is.
    pub(crate) fn is_live(&self, unit: TransferUnit) -> bool {
        let id = unit.page / SEGMENT_PAGES;
        let kind = self.heads[id].kind.load(Ordering::Acquire);
        if kind < CLASS {
            // The owner of a run releases its units.
            return kind != FREE;
        }
        let class = Class::from_index(usize::from(kind - CLASS));
        // SAFETY: the caller owns a page of the segment.
        let bits = unsafe { self.bits(id, class) };
        let first = class.object_at(unit.page % SEGMENT_PAGES, 0);
        (first..first + class.per_unit())
            .any(|object| bits[object as usize / 64].load(Ordering::SeqCst) & 1 << (object % 64) != 0)
    }

    /// Frees the object that begins at this page and card, and says whether it was the only one in
    /// its segment. A run is freed as a whole.
    ///
    /// The caller owned the object; pages that it had for itself are released already.
    pub(crate) fn free_object(&self, page: u32, card: u8) -> (FreeOutcome, bool) {
        let id = page / SEGMENT_PAGES;
        let head = &self.heads[id];
        let kind = head.kind.load(Ordering::Acquire);
        if kind == RUN {
            head.live.store(0, Ordering::Relaxed);
            return (FreeOutcome::Release, true);
        }
        let class = Class::from_index(usize::from(kind - CLASS));
        let object = class.object_at(page % SEGMENT_PAGES, card);
        // SAFETY: the caller owns an object of the segment.
        let bits = unsafe { self.bits(id, class) };
        // Release: what we did to the object is over when a thread takes the place.
        let before = bits[object as usize / 64].fetch_and(!(1 << (object % 64)), Ordering::AcqRel);
        assert!(before & 1 << (object % 64) != 0, "an object was freed twice");
        let last = head.live.fetch_sub(1, Ordering::SeqCst) == 1;
        if head.status.compare_exchange(FULL, LISTED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return (self.list(id, class), last);
        }
        let release = last && self.unlist_if_empty(id, class);
        (if release { FreeOutcome::Release } else { FreeOutcome::Keep }, last)
    }

    fn unlist_if_empty(&self, id: SegmentId, class: Class) -> bool {
        let mut partial = lock(&self.partial[class.index()]);
        // A thread that lists it later finds it empty and releases it.
        self.heads[id].live.load(Ordering::SeqCst) == 0 && partial.remove(&id)
    }

    /// Returns the units of the segment to which `page` belongs, for callers that release them.
    pub(crate) fn units(&self, page: u32) -> impl Iterator<Item = TransferUnit> + use<> {
        let id = page / SEGMENT_PAGES;
        let head = &self.heads[id];
        let kind = head.kind.load(Ordering::Acquire);
        let (pages, count) = if kind == RUN {
            let pages = head.unit.load(Ordering::Relaxed);
            (pages, head.extra.load(Ordering::Relaxed) / pages)
        } else {
            let pages = Class::from_index(usize::from(kind - CLASS)).unit_pages();
            (pages, SEGMENT_PAGES / pages)
        };
        (0..count).map(move |unit| TransferUnit { page: id * SEGMENT_PAGES + unit * pages, pages })
    }

    /// Makes the segment of an object free for any use. Its [`FreeOutcome`] was `Release`, and all
    /// its pages are Empty now.
    pub(crate) fn give_back(&self, page: u32) {
        let id = page / SEGMENT_PAGES;
        let head = &self.heads[id];
        let kind = head.kind.swap(FREE, Ordering::AcqRel);
        let mut count = 1;
        if kind == RUN {
            count = head.extra.load(Ordering::Relaxed).div_ceil(SEGMENT_PAGES);
            for inside in id + 1..id + count {
                self.heads[inside].kind.store(FREE, Ordering::Release);
            }
        } else {
            let class = Class::from_index(usize::from(kind - CLASS));
            self.drop_bits(head, class);
        }
        lock(&self.free).put(id, count);
    }

    fn drop_bits(&self, head: &HeapSegment, class: Class) {
        let bits = head.bits.swap(core::ptr::null_mut(), Ordering::Relaxed);
        self.bit_bytes.fetch_sub(8 * words(class) as u64, Ordering::Relaxed);
        // SAFETY: made by `own` from a box of this length; the segment is free, so nobody else reads it.
        drop(unsafe { Box::from_raw(core::ptr::slice_from_raw_parts_mut(bits, words(class))) });
    }

    /// Checks that counts and bits agree, for the verifier, on a heap at rest. Returns the number
    /// of segments with objects.
    pub(crate) fn verify(&self) -> u64 {
        let mut occupied = 0;
        let free = lock(&self.free).clone();
        for id in 0..self.high.load(Ordering::Relaxed) {
            let head = &self.heads[id];
            let kind = head.kind.load(Ordering::Acquire);
            assert_eq!(kind == FREE, free.contains(id), "segment {id} is free and in use");
            let live = head.live.load(Ordering::SeqCst);
            if kind >= CLASS {
                let class = Class::from_index(usize::from(kind - CLASS));
                // SAFETY: the heap is at rest.
                let bits = unsafe { self.bits(id, class) };
                let set: u32 = bits.iter().map(|word| word.load(Ordering::SeqCst).count_ones()).sum();
                assert_eq!(live, set, "segment {id}: objects and bits");
                let listed = lock(&self.partial[class.index()]).contains(&id);
                assert_eq!(listed, head.status.load(Ordering::SeqCst) == LISTED, "segment {id} is lost");
                assert!(!listed || live > 0 && live < class.per_segment(), "segment {id} is in the wrong list");
            }
            occupied += u64::from(kind != FREE && kind != INSIDE && live > 0);
        }
        occupied
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        for id in 0..self.high.load(Ordering::Relaxed) {
            let head = &self.heads[id];
            let kind = head.kind.load(Ordering::Relaxed);
            if kind >= CLASS {
                self.drop_bits(head, Class::from_index(usize::from(kind - CLASS)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a segment that nobody fills any more and that nobody finds either.
    use super::*;

    #[test]
    fn a_segment_is_left_to_others_whether_it_is_full_or_not() {
        let class = Class::of(4096, 8).unwrap();
        let segments = Segments::new(64 * SEGMENT_PAGES, 1).unwrap();
        for missing in [2, 1, 0] {
            let id = segments.own(class).unwrap();
            let objects: Vec<u32> =
                (missing..class.per_segment()).map(|_| segments.take_object(id, class).unwrap().0).collect();
            // Its owner has not seen that it is full.
            assert_eq!(segments.disown(id, class), FreeOutcome::Keep);
            segments.verify();
            let again = segments.own(class).unwrap();
            assert_eq!(again == id, missing > 0, "a full segment is of no use to others");
            assert_eq!(
                segments.disown(again, class),
                if again == id { FreeOutcome::Keep } else { FreeOutcome::Release }
            );
            if again != id {
                segments.give_back(again * SEGMENT_PAGES);
            }
            for (left, object) in objects.iter().enumerate().rev() {
                let (page, card) = class.locate(*object);
                let (freed, last) = segments.free_object(id * SEGMENT_PAGES + page, card);
                assert_eq!(
                    (freed, last),
                    (if left == 0 { FreeOutcome::Release } else { FreeOutcome::Keep }, left == 0)
                );
                if left > 0 {
                    segments.verify();
                }
            }
            segments.give_back(id * SEGMENT_PAGES);
            segments.verify();
        }
    }
}
