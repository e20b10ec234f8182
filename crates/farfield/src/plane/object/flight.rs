//! Flights: objects on their way to near memory.
//!
//! The flight of an object owns its handle (Moving) and a place in the log page of the thread that
//! wanted it. That page stays near as long as an object is *coming*. A flight begins in a scope in
//! which the page is near, and the evictor checks after that scope is over, so it sees the count
//! before it takes the page. So the flight needs no thread and no scope, and any thread that polls
//! the lane can land it. The bytes are copied into the place, and the handle says that the object
//! is there. If the object could not be had, the handle says where it was.

use super::tags::PageTags;
use super::{LogPageBitmap, ObjectId, Objects, OpenLogPage};
use crate::error::FarError;
use crate::heap::{Backoff, FetchFlight, HeapInner, ThreadState, TransferUnit, add, count};
use core::sync::atomic::Ordering;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::fault::{FarObject, FetchIntent, fetch_log_page, give_up_place, land_object, lock_object};
use farfield_core::heap::{CARD_BYTES, DerefOutcome, FrameId, FrameWord, IngressPath, LogClass, SlotHint};
use farfield_pool::PagePart;

/// A place for an object: near, dirty, and counted.
#[derive(Clone, Copy)]
pub(crate) struct LogReservation {
    pub(super) page: u32,
    pub(super) place: SlotHint,
    pub(super) class: LogClass,
}

/// An object on its way.
#[derive(Clone, Copy)]
pub(crate) struct ObjectFlight {
    object: ObjectId,
    /// Page in which the object is, and from which it will be read.
    page: u32,
    card: u8,
    spot: LogReservation,
    intent: FetchIntent,
}

impl ObjectFlight {
    /// Returns the object's number within its heap.
    pub(crate) fn number(&self, core: &HeapInner) -> u32 {
        core.pages + self.object
    }

    /// Returns the page, and the part of it to be read.
    pub(crate) fn part(&self) -> (PageId, PagePart) {
        let part = PagePart::new(usize::from(self.card) * CARD_BYTES, self.spot.class.bytes());
        let Some(part) = part else { unreachable!("an object lies inside its page") };
        (PageId(u64::from(self.page)), part)
    }
}

impl HeapInner {
    /// Takes a far object for a flight to this place. Returns `None`, and gives up the place, if
    /// another thread was faster. `is_wanted`: a task waits for it.
    pub(crate) fn depart_object(
        &self,
        record: &ThreadState,
        far: FarObject,
        spot: LogReservation,
        intent: FetchIntent,
        is_wanted: bool,
    ) -> Option<FetchFlight> {
        if !lock_object(self, far, spot.class, is_wanted) {
            give_up_place(self, spot.page);
            return None;
        }
        let travels = if self.checksums.needs_whole_pages() { PAGE_BYTES } else { spot.class.bytes() };
        add(&record.counters.fetched_bytes, travels as u64);
        if intent != FetchIntent::Prefetch {
            self.count_miss(record, far.page(), IngressPath::Object);
        }
        if far.is_ahead() {
            self.evictor.ahead.fetch_add(1, Ordering::Relaxed);
        }
        let (object, page, card) = (far.object(), far.page(), far.card());
        Some(FetchFlight::Object(ObjectFlight { object, page, card, spot, intent }))
    }

    /// Ends a flight, with the bytes if they were to be had. Returns true if tasks wait for the
    /// object and are to be woken.
    pub(crate) fn land_object(&self, flight: ObjectFlight, bytes: Option<&[u8]>) -> bool {
        let ObjectFlight { object, page, spot, intent, .. } = flight;
        if let Some(bytes) = bytes {
            assert_eq!(bytes.len(), spot.class.bytes());
            // SAFETY: a place for so many bytes inside the arena, which is the flight's alone, and
            // near as long as its page expects it.
            unsafe {
                let target = self.frames.base().add(spot.place.offset());
                target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            }
        }
        // The exchange of the handle releases: a reader that finds the object there finds its bytes.
        land_object(self, object, page, (spot.page, spot.place.card()), bytes.map(|_| intent))
    }

    /// Takes a log page that was far, for a flight of the whole of it to this frame, which is the
    /// caller's. Returns `None`, and gives the frame back, if the page is not far any more or must
    /// not come whole. `is_wanted`: a task waits for it.
    pub(crate) fn depart_page(
        &self,
        record: &ThreadState,
        page: u32,
        frame: FrameId,
        intent: FetchIntent,
        is_wanted: bool,
    ) -> Option<FetchFlight> {
        if !fetch_log_page(self, page, is_wanted) {
            self.frames.put(frame, 1);
            return None;
        }
        add(&record.counters.fetched_bytes, PAGE_BYTES as u64);
        count(&record.counters.whole_pages);
        if intent != FetchIntent::Prefetch {
            self.count_miss(record, page, IngressPath::Page);
        }
        Some(FetchFlight::Unit { unit: TransferUnit { page, pages: 1 }, frame, intent })
    }

    /// Ends the flight of a whole page, which came near or (`came` is false) did not.
    pub(crate) fn land_log_page(&self, page: u32, came: bool) {
        if let Some(objects) = &self.objects
            && objects.log.word(page).is_whole()
        {
            self.end_fetch(&objects.log, page, came);
        }
    }

    /// Makes room for an object that is near, with its tag, in the page that this thread fills;
    /// opens a page if there is none. The caller is inside a scope.
    pub(crate) fn place_object(
        &self,
        record: &ThreadState,
        objects: &Objects,
        object: ObjectId,
        class: LogClass,
        renewable: bool,
    ) -> Result<LogReservation, FarError> {
        loop {
            if let Some(spot) = self.spot_now(record, objects, object, class, false)? {
                return Ok(spot);
            }
            if self.reopen_page(record, objects, class)? {
                continue;
            }
            let frame = self.take_frames(record, 1, renewable)?;
            self.open_page(record, objects, class, frame)?;
        }
    }

    /// Makes room for an object, with its tag, if this thread has a page with room. `coming`: the
    /// object is still far. `None`: [open a page](HeapInner::open_page).
    pub(crate) fn spot_now(
        &self,
        record: &ThreadState,
        objects: &Objects,
        object: ObjectId,
        class: LogClass,
        coming: bool,
    ) -> Result<Option<LogReservation>, FarError> {
        let cell = record.objects.page(class);
        let Some(OpenLogPage { page, mut free }) = cell.get() else { return Ok(None) };
        let Some(index) = free.take() else {
            cell.set(None);
            self.close_log(&objects.log, page);
            if record.objects.is_streaming.get() {
                self.mark_evict_first(core::iter::once(page));
            }
            return Ok(None);
        };
        cell.set(Some(OpenLogPage { page, free }));
        objects.log.enter(page, coming);
        let found = self.near_log(page);
        if let Ok(Some(frame)) = found {
            let place = SlotHint::new(frame, class.card(index));
            let tags = PageTags::new(&objects.log.tag_table, page, class);
            // SAFETY: the frame holds the page until our scope ends; nobody else writes this tag,
            // because the page is open and this thread fills it, and the place is free.
            unsafe { tags.set(self.frames.address(frame), index, object) };
            return Ok(Some(LogReservation { page, place, class }));
        }
        if found.is_ok() {
            // The page has left before it was full; it is not worth fetching.
            cell.set(None);
            self.close_log(&objects.log, page);
        }
        if coming {
            self.end_arrival(&objects.log, page);
        }
        self.leave_log(&objects.log, page);
        found.map(|_| None)
    }

    /// Opens a page in this frame, the caller's, for this thread to fill. On failure, the frame is
    /// given back.
    pub(crate) fn open_page(
        &self,
        record: &ThreadState,
        objects: &Objects,
        class: LogClass,
        frame: FrameId,
    ) -> Result<(), FarError> {
        let opened = self.open_log(&objects.log, class).and_then(|page| match self.make_log(page, frame) {
            Ok(()) => Ok(page),
            Err(error) => {
                self.close_log(&objects.log, page);
                Err(error)
            }
        });
        match opened {
            Ok(page) => {
                let before =
                    record.objects.page(class).replace(Some(OpenLogPage { page, free: LogPageBitmap::all(class) }));
                debug_assert!(before.is_none(), "a page that nobody closes");
            }
            Err(_) => self.frames.put(frame, 1),
        }
        opened.map(drop)
    }

    /// Creates a fresh log page in this frame of the caller's, filled with zeros. Waits while the
    /// previous page of this number is discarded.
    pub(super) fn make_log(&self, page: u32, frame: FrameId) -> Result<(), FarError> {
        let word = &self.words[page];
        let mut backoff = Backoff::new(self.patience);
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            match seen.create() {
                (owned, DerefOutcome::Zero) if self.exchange(word, seen, owned) => {
                    self.occupy(seen);
                    // SAFETY: the frame is the caller's.
                    unsafe { self.frames.address(frame).write_bytes(0, PAGE_BYTES) };
                    self.frames.infos[frame.0].moved_in(page);
                    let made = owned.finish_load(frame, true);
                    word.store(made.0, Ordering::Release);
                    self.note_changed(made);
                    return Ok(());
                }
                // What an earlier page of this number left in the pool is being discarded.
                _ => backoff.wait()?,
            }
        }
    }

    /// Returns the frame of a page that this thread has open, and makes it dirty; `None` if the
    /// page has left.
    pub(super) fn near_log(&self, page: u32) -> Result<Option<FrameId>, FarError> {
        let word = &self.words[page];
        let mut backoff = Backoff::new(self.patience);
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            match seen.create() {
                (next, DerefOutcome::Resident(frame)) => {
                    if next == seen || self.exchange(word, seen, next) {
                        return Ok(Some(frame));
                    }
                }
                (next, DerefOutcome::Wait) => {
                    if next == seen || self.exchange(word, seen, next) {
                        backoff.wait()?;
                    }
                }
                // The page was written, or dropped because nothing lived in it.
                (_, DerefOutcome::Fetch | DerefOutcome::Zero) => return Ok(None),
            }
        }
    }
}
