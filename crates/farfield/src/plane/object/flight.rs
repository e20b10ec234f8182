//! Flights: objects on their way to near memory.
//!
//! The flight of an object owns its handle (Moving) and a place in the log page of the thread that
//! wanted it. That page stays near as long as an object is *coming*. A flight begins in a scope in
//! which the page is near, and the evictor checks after that scope is over, so it sees the count
//! before it takes the page. So the flight needs no thread and no scope, and any thread that polls
//! the lane can land it. The bytes are copied into the place, and the handle says that the object
//! is there. If the object could not be had, the handle says where it was.

use super::tags::PageTags;
use super::{FetchGranularity, LogPageBitmap, ObjectId, Objects, OpenLogPage};
use crate::error::FarError;
use crate::heap::{Backoff, FetchFlight, FetchIntent, HeapInner, ThreadState, TransferUnit, add, count};
use core::sync::atomic::Ordering;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{
    CARD_BYTES, DerefOutcome, FrameId, FrameWord, Handle, IngressPath, LogClass, ObjectLocation, SlotHint, State,
};
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
    /// Whether this is a prefetch, which no thread waits for yet.
    is_ahead: bool,
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
    /// Takes an object that was far when its handle was `seen`, for a flight to this place. Returns
    /// `None`, and gives up the place, if another thread was faster.
    pub(crate) fn depart(
        &self,
        record: &ThreadState,
        objects: &Objects,
        object: ObjectId,
        seen: Handle,
        spot: LogReservation,
        is_ahead: bool,
    ) -> Option<ObjectFlight> {
        let (ObjectLocation::At { page, card }, Some(locked)) = (seen.location(), seen.lock()) else {
            unreachable!("seen in a page");
        };
        if !objects.log.begin_departure(page) {
            self.give_up(objects, spot);
            return None;
        }
        // From here on the page stays what it is. Our earlier view of it may have been long ago.
        let is_far = FrameWord(self.words[page].load(Ordering::Acquire)).state() == State::Far;
        let is_same = objects.log.word(page).class() == Some(spot.class);
        // Acquire: the thread that put the object there is done.
        let lock = || objects.handles[object].compare_exchange(seen.0, locked.0, Ordering::AcqRel, Ordering::Relaxed);
        if !is_far || !is_same || lock().is_err() {
            self.end_departure(&objects.log, page);
            self.give_up(objects, spot);
            return None;
        }
        let flight = ObjectFlight { object, page, card, spot, is_ahead };
        let travels = if self.checksums.needs_whole_pages() { PAGE_BYTES } else { spot.class.bytes() };
        add(&record.counters.fetched_bytes, travels as u64);
        if !is_ahead {
            self.count_miss(record, page, IngressPath::Object);
        }
        if seen.is_ahead() {
            self.evictor.ahead.fetch_add(1, Ordering::Relaxed);
        }
        Some(flight)
    }

    /// Takes an object that is far, for a flight, if there is room; does not wait. The caller is
    /// inside a scope.
    pub(crate) fn depart_object_now(
        &self,
        record: &ThreadState,
        object: ObjectId,
        intent: FetchIntent,
    ) -> Option<FetchFlight> {
        let objects = self.objects.as_ref().filter(|objects| object < objects.handles.count())?;
        let seen = Handle(objects.handles[object].load(Ordering::Acquire));
        let ObjectLocation::At { page, .. } = seen.location() else { return None };
        if FrameWord(self.words[page].load(Ordering::Acquire)).state() != State::Far {
            return None;
        }
        let class = match objects.fetch_granularity(page, self.frames.limit())? {
            FetchGranularity::Object(class) => class,
            FetchGranularity::Page(page) => {
                let frame = self.take_frames_now(1, intent)?;
                return self.depart_page(record, objects, page, frame, intent);
            }
        };
        let mut spot = self.spot_now(record, objects, object, class, true).ok()?;
        if spot.is_none() {
            self.open_page(record, objects, class, self.take_frames_now(1, intent)?).ok()?;
            spot = self.spot_now(record, objects, object, class, true).ok()?;
        }
        self.depart(record, objects, object, seen, spot?, intent == FetchIntent::Prefetch).map(FetchFlight::Object)
    }

    /// Ends a flight, with the bytes if they were to be had. Returns true if tasks wait for the
    /// object and are to be woken.
    pub(crate) fn land_object(&self, flight: ObjectFlight, bytes: Option<&[u8]>) -> bool {
        let Some(objects) = &self.objects else { unreachable!("an object of a heap without") };
        let ObjectFlight { object, page, spot, is_ahead, .. } = flight;
        if let Some(bytes) = bytes {
            assert_eq!(bytes.len(), spot.class.bytes());
            // SAFETY: a place for so many bytes inside the arena, which is the flight's alone, and
            // near as long as its page expects it.
            unsafe {
                let target = self.frames.base().add(spot.place.offset());
                target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            }
        }
        let handle = &objects.handles[object];
        let mut seen = Handle(handle.load(Ordering::Relaxed));
        loop {
            let next = match bytes {
                Some(_) if is_ahead => seen.moved_ahead(spot.page, spot.place.card()),
                Some(_) => seen.moved(spot.page, spot.place.card()),
                None => seen.unlock(),
            };
            // Only marks change while the handle is ours. Release: a reader that finds the object
            // there finds its bytes.
            match handle.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => seen = Handle(now),
            }
        }
        match bytes {
            Some(_) => {
                self.end_arrival(&objects.log, spot.page);
                self.leave_log(&objects.log, page);
            }
            None => self.give_up(objects, spot),
        }
        self.end_departure(&objects.log, page);
        seen.is_wanted()
    }

    /// Takes a log page that was far, for a flight of the whole of it to this frame, which is the
    /// caller's. Returns `None`, and gives the frame back, if the page is not far any more or must
    /// not come whole.
    pub(crate) fn depart_page(
        &self,
        record: &ThreadState,
        objects: &Objects,
        page: u32,
        frame: FrameId,
        intent: FetchIntent,
    ) -> Option<FetchFlight> {
        if objects.log.fetch(page) {
            let word = &self.words[page];
            let seen = FrameWord(word.load(Ordering::Acquire));
            if seen.state() == State::Far && self.exchange(word, seen, seen.deref(false).0) {
                add(&record.counters.fetched_bytes, PAGE_BYTES as u64);
                count(&record.counters.whole_pages);
                if intent != FetchIntent::Prefetch {
                    self.count_miss(record, page, IngressPath::Page);
                }
                return Some(FetchFlight::Unit { unit: TransferUnit { page, pages: 1 }, frame, intent });
            }
            self.end_fetch(&objects.log, page, false);
        }
        self.frames.put(frame, 1);
        None
    }

    /// Ends the flight of a whole page, which came near or (`came` is false) did not.
    pub(crate) fn land_page(&self, page: u32, came: bool) {
        if let Some(objects) = &self.objects
            && objects.log.word(page).is_whole()
        {
            self.end_fetch(&objects.log, page, came);
        }
    }

    /// Gives up a place to which nothing comes after all.
    fn give_up(&self, objects: &Objects, spot: LogReservation) {
        self.end_arrival(&objects.log, spot.page);
        self.leave_log(&objects.log, spot.page);
    }

    /// Makes room for an object, with its tag, in the page that this thread fills; opens a page if
    /// there is none. `coming`: the object is still far. The caller is inside a scope.
    pub(crate) fn place_object(
        &self,
        record: &ThreadState,
        objects: &Objects,
        object: ObjectId,
        class: LogClass,
        coming: bool,
        renewable: bool,
    ) -> Result<LogReservation, FarError> {
        loop {
            if let Some(spot) = self.spot_now(record, objects, object, class, coming)? {
                return Ok(spot);
            }
            if !coming && self.reopen_page(record, objects, class)? {
                continue;
            }
            let frame = self.take_frames(record, 1, renewable)?;
            self.open_page(record, objects, class, frame)?;
        }
    }

    /// Makes room for an object, with its tag, if this thread has a page with room. `None`: [open
    /// one](HeapInner::open_page).
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
                    word.store(owned.finish_load(frame, true).0, Ordering::Release);
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
