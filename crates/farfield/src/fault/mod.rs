//! Faults: far pages and small objects that somebody wants near.
//!
//! An [`AccessFault`] is one state machine for pages and objects, for threads and tasks. It decides, and
//! takes what is far for a flight; each answer is a [`FaultStep`] that says what it needs next. It
//! never waits for the pool, for room, or for others. That is what the drivers do:
//!
//! | file | driver | waits |
//! |---|---|---|
//! | `thread` | a thread that follows a pointer | helps other flights, pauses, frees frames |
//! | `task` | a future | leaves a waker, queues for frames |
//! | `prefetch` | hints and batches | not at all: what needs more than there is is skipped |
//!
//! The steps over the words themselves are pure ([`farfield_core::heap::fault`]). (One wait is
//! short: while the evictor copies the log page in which an object gets its place.)
//!
//! The others are what a thread or task makes of faults:
//!
//! | file | decides |
//! |---|---|
//! | `try_access` | how code written for threads runs in tasks |
//! | `batch_lookup` | how many look-ups wait together |
//! | `pins` | which units stay near without a scope |

mod batch_lookup;
mod pins;
mod prefetch;
mod task;
mod thread;
mod try_access;

pub(crate) use pins::{Pin, PinFault};
pub(crate) use prefetch::AHEAD_MAX;
pub(crate) use task::FaultFuture;
pub(crate) use try_access::{AttemptKind, WOULD_BLOCK, try_access};

use crate::error::FarError;
use crate::heap::{FetchFlight, HeapInner, ThreadState, TransferUnit, add, count_use};
use crate::plane::object::{FetchGranularity, Objects};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::fault::{
    AccessMode, FarObject, FetchIntent, ObjectLookup, PageClaim, PageLookup, look_up_page, peek_object, peek_page,
};
use farfield_core::heap::{FrameId, IngressPath, LogClass, SlotHint, State};

/// State machine of one access to a page or small object that may be far.
///
/// Its owner is in a scope, for which a value that was found stays near.
#[derive(Clone, Copy)]
pub(crate) struct AccessFault {
    /// Number within the heap of a value that lives as long as this: its page, or its handle above
    /// all pages.
    number: u32,
    mode: AccessMode,
    /// True if a task is told when the flights of this fault land.
    is_awaited: bool,
    /// True if the value was far when its present use began.
    brought: bool,
    /// Page that this fault has fetched whole for its object.
    whole_page: Option<u32>,
}

/// Answer of an [`AccessFault`]: what its driver does next.
pub(crate) enum FaultStep {
    /// The value is near, in this place; for a page, the place of its start.
    Done(SlotHint),
    /// The value comes in somebody's flight of this number: wait for that, then look again.
    WaitFor(u32),
    /// The value belongs to another thread for a moment: look again soon.
    Retry,
    /// The value is fetched, or the page made, by nobody: begin, now without frames.
    Far(FetchTarget),
    /// The fault needs frames: take them, then begin with them.
    NeedFrames(FetchTarget),
    /// The value is taken for this flight: submit it.
    Submit(FetchFlight),
    /// The Empty page is taken for the caller, who makes it with this frame.
    Make(NewUnit),
}

/// Unit of far memory that a fault fetches, or makes, in one go.
#[derive(Clone, Copy)]
pub(crate) enum FetchTarget {
    /// A unit of so many pages, which is far or Empty.
    Unit(PageClaim, u32),
    /// A log page, which comes whole.
    LogPage(u32),
    /// An object of this class, which comes alone.
    Object(FarObject, LogClass),
}

/// An Empty unit that was taken to be made, and its first frame.
pub(crate) struct NewUnit {
    pub(crate) claim: PageClaim,
    pub(crate) pages: u32,
    pub(crate) frame: FrameId,
}

/// Result of the attempt to take a [`FetchTarget`].
enum Departure {
    NeedFrames,
    Flight(FetchFlight),
    NewUnit(NewUnit),
    /// The target is taken by another thread. Frames were given back.
    Lost,
}

impl AccessFault {
    /// Makes the fault of a thread. If an attempt is repeated, the value may have come for it.
    pub(crate) fn of_thread(record: &ThreadState, number: u32, mode: AccessMode) -> AccessFault {
        AccessFault { number, mode, is_awaited: false, brought: record.is_retry.get(), whole_page: None }
    }

    /// Makes the fault of a task.
    pub(crate) fn of_task(number: u32, mode: AccessMode) -> AccessFault {
        AccessFault { number, mode, is_awaited: true, brought: false, whole_page: None }
    }

    /// Looks for the value. Returns anything but `NeedFrames`, `Submit` and `Make`.
    pub(crate) fn look(&mut self, core: &HeapInner, record: &ThreadState) -> FaultStep {
        match (&core.objects, self.number.checked_sub(core.pages)) {
            (Some(objects), Some(_)) => self.look_for_object(core, record, objects),
            _ => self.look_for_page(core, record),
        }
    }

    #[inline]
    pub(crate) fn look_for_page(&self, core: &HeapInner, record: &ThreadState) -> FaultStep {
        match look_up_page(core, self.number, self.mode) {
            PageLookup::Resident(frame, seen) => {
                if self.mode != AccessMode::Peek {
                    count_use(record, seen);
                }
                FaultStep::Done(SlotHint::new(frame, 0))
            }
            PageLookup::Loading => FaultStep::WaitFor(self.number),
            PageLookup::Retry => FaultStep::Retry,
            PageLookup::Far(claim) | PageLookup::Empty(claim) => {
                let pages = core.segments.unit_of(self.number).map_or(1, |unit| unit.pages);
                FaultStep::Far(FetchTarget::Unit(claim, pages))
            }
        }
    }

    #[inline]
    pub(crate) fn look_for_object(&mut self, core: &HeapInner, record: &ThreadState, objects: &Objects) -> FaultStep {
        let object = self.number - core.pages;
        match core.look_up_object(record, objects, object, self.mode, self.brought) {
            ObjectLookup::Resident(place, _) => {
                if let Some(page) = self.whole_page.take() {
                    core.mark_streamed_page(record, page);
                }
                FaultStep::Done(place)
            }
            ObjectLookup::Relocating => FaultStep::WaitFor(self.number),
            ObjectLookup::Loading(page) => FaultStep::WaitFor(page),
            ObjectLookup::Retry => FaultStep::Retry,
            ObjectLookup::Far(far) => {
                FetchTarget::of_object(core, objects, far).map_or(FaultStep::Retry, FaultStep::Far)
            }
        }
    }

    /// Takes what is far for a flight, with these frames if it has said that it needs some. If
    /// another thread was faster, looks again.
    ///
    /// The frames come first, so that nobody waits for a page whose owner waits for room.
    pub(crate) fn begin(
        &mut self,
        core: &HeapInner,
        record: &ThreadState,
        target: FetchTarget,
        frame: Option<FrameId>,
    ) -> Result<FaultStep, FarError> {
        Ok(match target.depart(core, record, self.mode.fetch_intent(), self.is_awaited, frame)? {
            Departure::NeedFrames => FaultStep::NeedFrames(target),
            Departure::NewUnit(unit) => FaultStep::Make(unit),
            Departure::Lost => self.look(core, record),
            Departure::Flight(flight) => {
                self.brought = true;
                if let FetchTarget::LogPage(page) = target {
                    self.whole_page = Some(page);
                }
                FaultStep::Submit(flight)
            }
        })
    }

    /// Goes on after a flight of its own, for a thread whose scope has held what came since then.
    fn after(&mut self, core: &HeapInner, record: &ThreadState, flight: &FetchFlight) -> FaultStep {
        match flight {
            FetchFlight::Unit { unit, frame, .. } if unit.page == self.number => {
                FaultStep::Done(SlotHint::new(*frame, 0))
            }
            _ => self.look(core, record),
        }
    }
}

impl FetchTarget {
    /// Finds what a prefetch of this number fetches; `None` if it is not far. Leaves no mark.
    fn ahead(core: &HeapInner, number: u32) -> Option<FetchTarget> {
        let Some(object) = number.checked_sub(core.pages) else {
            let unit = core.segments.unit_of(number)?;
            return Some(FetchTarget::Unit(peek_page(core, unit.page)?, unit.pages));
        };
        let objects = core.objects.as_ref().filter(|objects| object < objects.handles.count())?;
        FetchTarget::of_object(core, objects, peek_object(core, object)?)
    }

    /// Decides how a far object comes. `None` if its page is on its way, or dead.
    pub(crate) fn of_object(core: &HeapInner, objects: &Objects, far: FarObject) -> Option<FetchTarget> {
        Some(match objects.fetch_granularity(far.page(), core.frames.limit())? {
            FetchGranularity::Page(page) => FetchTarget::LogPage(page),
            FetchGranularity::Object(class) => FetchTarget::Object(far, class),
        })
    }

    /// Returns how many frames it needs.
    fn frames(&self) -> u32 {
        if let FetchTarget::Unit(_, pages) = self { *pages } else { 1 }
    }

    /// Checks whether its frames stay clean after an access: they can be had even if the pool is
    /// full. (An object gets a place in a page that is filled.)
    fn stays_clean(&self, mode: AccessMode) -> bool {
        mode.is_read() && !matches!(self, FetchTarget::Object(..))
    }

    /// Checks whether it is made and not fetched.
    fn is_empty(&self) -> bool {
        matches!(self, FetchTarget::Unit(claim, _) if claim.seen().state() == State::Empty)
    }

    /// Takes the target for a flight, if nobody was faster. `is_wanted`: a task waits for it.
    fn depart(
        self,
        core: &HeapInner,
        record: &ThreadState,
        intent: FetchIntent,
        is_wanted: bool,
        frame: Option<FrameId>,
    ) -> Result<Departure, FarError> {
        let Some(frame) = frame else {
            let FetchTarget::Object(far, class) = self else { return Ok(Departure::NeedFrames) };
            // The page that the thread fills may have room.
            let Some(spot) = core.spot_now(record, core.objects(), far.object(), class, true)? else {
                return Ok(Departure::NeedFrames);
            };
            let flight = core.depart_object(record, far, spot, intent, is_wanted);
            return Ok(flight.map_or(Departure::Lost, Departure::Flight));
        };
        match self {
            FetchTarget::Unit(claim, pages) => {
                if !claim.take(core, is_wanted) {
                    core.frames.put(frame, pages);
                    return Ok(Departure::Lost);
                }
                if self.is_empty() {
                    return Ok(Departure::NewUnit(NewUnit { claim, pages, frame }));
                }
                if intent != FetchIntent::Prefetch {
                    core.count_miss(record, claim.page(), IngressPath::Page);
                }
                add(&record.counters.fetched_bytes, u64::from(pages) * PAGE_BYTES as u64);
                let unit = TransferUnit { page: claim.page(), pages };
                Ok(Departure::Flight(FetchFlight::Unit { unit, frame, intent }))
            }
            FetchTarget::LogPage(page) => {
                let flight = core.depart_page(record, page, frame, intent, is_wanted);
                Ok(flight.map_or(Departure::Lost, Departure::Flight))
            }
            FetchTarget::Object(_, class) => {
                core.open_page(record, core.objects(), class, frame)?;
                self.depart(core, record, intent, is_wanted, None)
            }
        }
    }
}
