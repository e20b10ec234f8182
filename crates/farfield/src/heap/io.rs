//! One thread's lane, and what is on its way on it.
//!
//! A unit that is being read is a *flight*. It owns its page (Loading) and its frames, where the
//! lane puts the bytes, until it lands: the page is then Near, or Far again. A flight of one small
//! object owns its handle and a place in a log page (`plane/object/flight`); its bytes come in a
//! buffer of the lane. No thread belongs to a flight: any thread that polls the lane lands what has
//! arrived (`fetch`).

use super::HeapInner;
use super::segments::TransferUnit;
use crate::plane::object::ObjectFlight;
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use farfield_core::heap::fault::FetchIntent;
use farfield_core::policy::link::Link;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use std::collections::VecDeque;
use std::time::Instant;

/// Read from the pool that is on its way.
#[derive(Clone, Copy)]
pub(crate) enum FetchFlight {
    /// A unit, which is read to these frames.
    Unit { unit: TransferUnit, frame: FrameId, intent: FetchIntent },
    /// A small object of the object plane.
    Object(ObjectFlight),
}

impl FetchFlight {
    /// Returns the number within the heap of what is read: its first page, or its handle above all
    /// pages.
    pub(crate) fn number(&self, core: &HeapInner) -> u32 {
        match self {
            FetchFlight::Unit { unit, .. } => unit.page,
            FetchFlight::Object(flight) => flight.number(core),
        }
    }

    /// Returns the first page of which something is read.
    fn page(&self) -> u32 {
        match self {
            FetchFlight::Unit { unit, .. } => unit.page,
            FetchFlight::Object(flight) => flight.part().0.0 as u32,
        }
    }

    /// Compares what a request has brought, from the flight's `first` page on, with what was
    /// written to the pool.
    fn check(&self, core: &HeapInner, first: u32, buffer: &Buffer) -> Result<(), PoolError> {
        match self {
            FetchFlight::Unit { unit, frame, .. } => (0..buffer.pages()).try_for_each(|index| {
                let (at, sum) = (first + index as u32, buffer.sums()[index]);
                core.check_far(unit.page + at, sum, buffer.page(index))?;
                core.frames.infos[frame.0 + at].set_sum(sum);
                Ok(())
            }),
            FetchFlight::Object(_) => core.check_far(self.page(), buffer.sums()[0], buffer.page(0)),
        }
    }
}

/// Tag of a request: its flight's index in the table, whether it is in the background, and its
/// first page in the unit.
struct Tag(u64);

impl Tag {
    fn new(number: u32, is_background: bool, first: u32) -> Tag {
        Tag(u64::from(first) << 32 | u64::from(is_background) << 31 | u64::from(number))
    }

    fn parts(self) -> (u32, bool, u32) {
        (self.0 as u32 & !(1 << 31), self.0 & 1 << 31 != 0, (self.0 >> 32) as u32)
    }
}

struct FlightEntry {
    flight: FetchFlight,
    priority: Priority,
    /// Number of pages that the lane was asked for; for an object, 1 when it was.
    asked: u32,
    /// Number of requests in the lane.
    open: u32,
    /// Time when the lane was first asked in the background, else when the lane was opened.
    asked_at: Instant,
    result: Result<(), PoolError>,
    /// True if the lane's thread waits for this flight.
    is_awaited: bool,
}

/// A lane and its flights.
pub(crate) struct FetchLane {
    lane: Box<dyn Lane>,
    opened_at: Instant,
    /// Flights that have not landed; [`Tag`]s of requests refer to their index here.
    entries: Vec<Option<FlightEntry>>,
    free: Vec<u32>,
    /// Queued flights of which the lane has not taken all requests. Demand overtakes prefetches.
    demand: VecDeque<u32>,
    ahead: VecDeque<u32>,
    /// Number of background requests in the lane; `link` says how many there may be.
    background: u32,
    link: Link,
    done: Vec<Completion>,
    /// Number of flights that the lane's thread waits for, and the result of those that have
    /// landed.
    awaited: u32,
    outcome: Result<(), PoolError>,
    /// Buffers of one page each for the bytes of objects: those not under way, and how many exist
    /// in all.
    buffers: Vec<Buffer>,
    buffer_count: usize,
    /// Results for tasks that wait and have not been told yet, by number within the heap.
    pub(crate) wanted: Vec<(u32, Result<(), PoolError>)>,
    deadline: Duration,
}

/// Maximum number of pages of a request.
const READ_PAGES: u32 = 16;
/// Minimum and maximum number of background requests in the lane. Requests there cannot be
/// overtaken, so a [`Link`] decides how many they are; lanes take 256 in all.
const BACKGROUND: (u32, u32) = (32, 240);

impl FetchLane {
    /// Approximate bytes of near memory of a [`FetchLane`] with one buffer; see
    /// [`FetchLane::more_bytes`]. The bytes of units are in frames.
    pub(crate) const NEAR_BYTES: u64 = PAGE_BYTES as u64;

    /// Returns the bytes of near memory of its buffers after the first.
    pub(crate) fn more_bytes(&self) -> u64 {
        (self.buffer_count.saturating_sub(1) * PAGE_BYTES) as u64
    }

    pub(crate) fn new(backend: &dyn Backend, deadline: Duration) -> Result<FetchLane, PoolError> {
        Ok(FetchLane {
            lane: backend.open_lane()?,
            opened_at: Instant::now(),
            entries: Vec::new(),
            free: Vec::new(),
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            background: 0,
            link: Link::new(BACKGROUND.0, BACKGROUND.1),
            done: Vec::with_capacity(32),
            awaited: 0,
            outcome: Ok(()),
            buffers: Vec::new(),
            buffer_count: 0,
            wanted: Vec::new(),
            deadline,
        })
    }

    /// Checks whether the page or handle with this number within the heap is on its way on this
    /// lane.
    pub(crate) fn has(&self, core: &HeapInner, number: u32) -> bool {
        self.entries.iter().flatten().any(|entry| entry.flight.number(core) == number)
    }

    /// Returns how many background requests may be in the lane, and the least time that one took
    /// lately, in ns; zeros if there was none.
    pub(crate) fn link(&self) -> (u64, u64) {
        match self.link.delay_ns() {
            0 => (0, 0),
            delay_ns => (self.link.window().into(), delay_ns),
        }
    }

    /// Returns the number of flights that have not landed.
    pub(crate) fn in_flight(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Starts a flight for which this thread [waits](FetchLane::wait_for_awaited). The caller owns
    /// the page or handle and passes it to the flight.
    pub(crate) fn launch_awaited(&mut self, core: &HeapInner, flight: FetchFlight) {
        self.awaited += 1;
        self.start(core, flight, Priority::Demand, true);
    }

    /// Starts a flight. The caller owns the page or handle and passes it to the flight.
    pub(crate) fn launch(&mut self, core: &HeapInner, flight: FetchFlight, priority: Priority) {
        self.start(core, flight, priority, false);
    }

    fn start(&mut self, core: &HeapInner, flight: FetchFlight, priority: Priority, is_awaited: bool) {
        core.checksums.announce(flight.page());
        let entry = Some(FlightEntry {
            flight,
            priority,
            asked: 0,
            open: 0,
            asked_at: self.opened_at,
            result: Ok(()),
            is_awaited,
        });
        let number = match self.free.pop() {
            Some(number) => {
                self.entries[number as usize] = entry;
                number
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        match priority {
            Priority::Demand => self.demand.push_back(number),
            Priority::Background => self.ahead.push_back(number),
        }
        self.ask(core);
    }

    /// Gives a flight that is still queued as a prefetch demand priority, because a thread or task
    /// waits for it. `number` is within the heap.
    pub(crate) fn promote_to_demand(&mut self, core: &HeapInner, number: u32) {
        let is_it = |entry: &FlightEntry| entry.flight.number(core) == number;
        let queued = |at: &u32| self.entries[*at as usize].as_ref().is_some_and(is_it);
        if let Some(place) = self.ahead.iter().position(queued)
            && let Some(at) = self.ahead.remove(place)
        {
            if let Some(entry) = &mut self.entries[at as usize] {
                entry.priority = Priority::Demand;
            }
            self.demand.push_back(at);
            self.ask(core);
        }
    }

    /// Submits queued requests as long as the lane takes them.
    fn ask(&mut self, core: &HeapInner) {
        while let Some(number) = self.demand.front()
            && self.ask_for(core, *number)
        {
            self.demand.pop_front();
        }
        while self.demand.is_empty()
            && let Some(number) = self.ahead.front()
            && self.ask_for(core, *number)
        {
            self.ahead.pop_front();
        }
    }

    /// Submits all requests of a flight; false if the lane, or we, cannot take them all now.
    fn ask_for(&mut self, core: &HeapInner, number: u32) -> bool {
        // The flight has failed meanwhile, and landed.
        let Some(entry) = &mut self.entries[number as usize] else { return true };
        let pages = match &entry.flight {
            FetchFlight::Unit { unit, .. } => unit.pages,
            FetchFlight::Object(_) => 1,
        };
        let is_background = entry.priority == Priority::Background;
        while entry.asked < pages && entry.result.is_ok() {
            if is_background && self.background >= self.link.window() {
                return false;
            }
            let (op, asked) = match &entry.flight {
                FetchFlight::Unit { unit, frame, .. } => {
                    let pages = (unit.pages - entry.asked).min(READ_PAGES);
                    let target = core.frames.address(FrameId(frame.0 + entry.asked));
                    super::launder(target);
                    // SAFETY: frames are pages of initialised memory (`launder`). These are the
                    // flight's alone until it lands, which is when the lane has given back all its
                    // buffers, or is gone.
                    let buffer = unsafe { Buffer::over(target, pages as usize) };
                    (Op::Read { page: PageId(u64::from(unit.page + entry.asked)), buffer }, pages)
                }
                FetchFlight::Object(flight) => {
                    if self.buffers.is_empty() && self.buffer_count < buffers_max(core) {
                        self.buffers.push(Buffer::new(1));
                        self.buffer_count += 1;
                    }
                    let Some(buffer) = self.buffers.pop() else { return false };
                    let (page, part) = flight.part();
                    let op = match core.checksums.needs_whole_pages() {
                        true => Op::Read { page, buffer },
                        false => Op::ReadPart { page, part, buffer },
                    };
                    (op, 1)
                }
            };
            let tag = Tag::new(number, is_background, entry.asked).0;
            let request = LaneRequest { tag, priority: entry.priority, deadline: self.deadline, op };
            if let Err(back) = self.lane.submit(request) {
                if let (Op::Read { buffer, .. } | Op::ReadPart { buffer, .. }, FetchFlight::Object(_)) =
                    (back.op, &entry.flight)
                {
                    self.buffers.push(buffer);
                }
                return false;
            }
            if is_background {
                self.background += 1;
                if entry.asked == 0 {
                    entry.asked_at = Instant::now();
                }
            }
            entry.asked += asked;
            entry.open += 1;
        }
        true
    }

    /// Lands what has arrived, without waiting. Returns the number of flights.
    pub(crate) fn collect(&mut self, core: &HeapInner) -> usize {
        let mut landed = 0;
        let mut done = core::mem::take(&mut self.done);
        loop {
            let moved = self.lane.poll(&mut done);
            self.measure(&done);
            for completion in done.drain(..) {
                landed += usize::from(self.complete(core, completion));
            }
            self.ask(core);
            if moved < done.capacity() {
                break;
            }
        }
        self.done = done;
        landed
    }

    /// Tells the [`Link`] how long these requests took.
    fn measure(&mut self, done: &[Completion]) {
        let asked_at = |completion: &Completion| {
            let (number, is_background, _) = Tag(completion.tag).parts();
            let entry =
                self.entries[number as usize].as_ref().filter(|_| is_background && completion.result.is_ok())?;
            Some(entry.asked_at)
        };
        let (mut come, mut last) = (0, self.opened_at);
        for asked_at in done.iter().filter_map(asked_at) {
            (come, last) = (come + 1, last.max(asked_at));
        }
        if come > 0 {
            let now = Instant::now();
            let ns = |since: Instant| (now - since).as_nanos() as u64;
            let waiting = !self.ahead.is_empty();
            self.link.on_look(ns(self.opened_at), come, ns(last), self.background, waiting);
        }
    }

    /// Handles the end of one request; true if its flight landed.
    fn complete(&mut self, core: &HeapInner, completion: Completion) -> bool {
        let (number, is_background, first) = Tag(completion.tag).parts();
        self.background -= u32::from(is_background);
        let Some(entry) = &mut self.entries[number as usize] else { unreachable!("a flight waits for its requests") };
        entry.open -= 1;
        let came = match &completion.buffer {
            Some(buffer) => completion.result.and_then(|()| entry.flight.check(core, first, buffer)),
            None => completion.result,
        };
        entry.result = entry.result.and(came);
        match entry.flight {
            FetchFlight::Unit { unit, .. } => {
                // The frames may have another owner from here on.
                drop(completion.buffer);
                if entry.open > 0 || entry.asked < unit.pages && entry.result.is_ok() {
                    return false;
                }
                self.land(core, number, None);
            }
            FetchFlight::Object(_) => {
                self.land(core, number, completion.buffer.as_ref());
                if self.buffer_count <= buffers_max(core) {
                    self.buffers.extend(completion.buffer);
                } else {
                    self.buffer_count -= 1;
                }
            }
        }
        true
    }

    fn land(&mut self, core: &HeapInner, number: u32, buffer: Option<&Buffer>) {
        let Some(FlightEntry { flight, result, is_awaited, .. }) = self.entries[number as usize].take() else { return };
        self.free.push(number);
        if is_awaited {
            self.awaited -= 1;
            self.outcome = self.outcome.and(result);
        }
        if core.land(flight, result, buffer) {
            self.wanted.push((flight.number(core), result));
        }
    }

    /// Waits for all flights that were started by [`FetchLane::launch_awaited`], and returns the
    /// first error. `None` if the lane has forgotten a request: then the lane is of no use any
    /// more.
    pub(crate) fn wait_for_awaited(&mut self, core: &HeapInner) -> Option<Result<(), PoolError>> {
        let started = Instant::now();
        // The lane keeps the deadline; ours is for a lane that does not.
        while started.elapsed() < self.deadline * 2 {
            self.collect(core);
            if self.awaited == 0 {
                return Some(core::mem::replace(&mut self.outcome, Ok(())));
            }
            self.lane.wait(self.deadline);
        }
        None
    }

    /// Waits until something is likely to have arrived, at most for `most`.
    pub(crate) fn wait(&mut self, most: Duration) {
        self.lane.wait(most);
    }

    /// Closes a lane that has forgotten flights, and fails those. Returns the results that tasks
    /// wait for.
    pub(crate) fn abandon(self, core: &HeapInner) -> Vec<(u32, Result<(), PoolError>)> {
        let FetchLane { lane, entries, mut wanted, deadline, .. } = self;
        // Its buffers go with the lane: nobody writes into frames of ours after this.
        drop(lane);
        let result = Err(PoolError::TimedOut { server: 0, after: deadline * 2 });
        for FlightEntry { flight, .. } in entries.into_iter().flatten() {
            if core.land(flight, result, None) {
                wanted.push((flight.number(core), result));
            }
        }
        wanted
    }
}

/// Returns the maximum number of buffers for objects, which is how many can be under way on one
/// lane. They take a thirty-second of the near memory; there are 8 to 256.
fn buffers_max(core: &HeapInner) -> usize {
    (core.near.load(Ordering::Relaxed) / 32 / PAGE_BYTES as u64).clamp(8, 256) as usize
}
