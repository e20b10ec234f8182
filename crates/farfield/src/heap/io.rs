//! One thread's lane, and the units that are on their way on it.
//!
//! A unit that is being read is a *flight*. It owns its page (Fetching) and its frames, where the lane puts the bytes, until it
//! lands: Near, or Far again. No thread belongs to it: whoever polls the lane lands what has arrived (`fetch`).

use super::Core;
use super::segments::Unit;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use farfield_pool::{Backend, Buffer, Completion, Lane, Op, PagePart, PoolError, Priority, Request};
use std::collections::VecDeque;
use std::time::Instant;

/// How a unit comes near.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Landing {
    /// To be read.
    Clean,
    /// To be written.
    Dirty,
    /// Nobody wants it yet.
    Ahead,
}

/// A unit on its way.
#[derive(Clone, Copy)]
pub(crate) struct Flight {
    pub(crate) unit: Unit,
    pub(crate) frame: FrameId,
    pub(crate) landing: Landing,
}

/// Bytes inside a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) page: u32,
    pub(crate) part: PagePart,
}

/// The request that reads a [`Part`]. No flight has this tag.
const PART: u64 = u64::MAX;

/// Names a request: its flight's number, whether it is in the background, and its first page in the unit.
struct Tag(u64);

impl Tag {
    fn new(number: u32, is_background: bool, first: u32) -> Tag {
        Tag(u64::from(first) << 32 | u64::from(is_background) << 31 | u64::from(number))
    }

    fn parts(self) -> (u32, bool, u32) {
        (self.0 as u32 & !(1 << 31), self.0 & 1 << 31 != 0, (self.0 >> 32) as u32)
    }
}

struct Entry {
    flight: Flight,
    priority: Priority,
    /// Pages that the lane was asked for.
    asked: u32,
    /// Requests in the lane.
    open: u32,
    result: Result<(), PoolError>,
}

/// A lane and its flights.
pub(crate) struct Io {
    lane: Box<dyn Lane>,
    /// By number. For the tags of their requests see [`Tag`].
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Flights of which the lane has not taken all requests: demand in front, so that it overtakes what is ahead of need.
    queue: VecDeque<u32>,
    /// Background requests in the lane.
    background: usize,
    done: Vec<Completion>,
    /// The flight that the lane's thread waits for, and how it ended.
    awaited: Option<u32>,
    outcome: Option<Result<(), PoolError>>,
    /// For parts of pages; `None` only while it is under way.
    part_buffer: Option<Buffer>,
    part_outcome: Option<Result<(), PoolError>>,
    /// Pages for which tasks wait that have not been told yet.
    pub(crate) wanted: Vec<(u32, Result<(), PoolError>)>,
    deadline: Duration,
}

/// Most pages of a request.
const READ_PAGES: u32 = 16;
/// Most background requests in the lane: what is there cannot be overtaken.
const BACKGROUND_MAX: usize = 32;

impl Io {
    /// Near memory of one of these, about. The bytes of flights are in frames.
    pub(crate) const NEAR_BYTES: u64 = PAGE_BYTES as u64;

    pub(crate) fn new(backend: &dyn Backend, deadline: Duration) -> Result<Io, PoolError> {
        Ok(Io {
            lane: backend.open_lane()?,
            entries: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            background: 0,
            done: Vec::with_capacity(32),
            awaited: None,
            outcome: None,
            part_buffer: None,
            part_outcome: None,
            wanted: Vec::new(),
            deadline,
        })
    }

    /// Is the page on its way here?
    pub(crate) fn has(&self, page: u32) -> bool {
        self.entries.iter().flatten().any(|entry| entry.flight.unit.page == page)
    }

    /// Flights that have not landed.
    pub(crate) fn in_flight(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Starts a flight. Its page is Fetching and ours, and so are its frames.
    pub(crate) fn launch(&mut self, core: &Core, flight: Flight, priority: Priority) -> u32 {
        let entry = Some(Entry { flight, priority, asked: 0, open: 0, result: Ok(()) });
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
            Priority::Demand => self.queue.push_front(number),
            Priority::Background => self.queue.push_back(number),
        }
        self.ask(core);
        number
    }

    /// Somebody waits for the page: if its flight is still queued, it goes first.
    pub(crate) fn hurry(&mut self, core: &Core, page: u32) {
        let queued = |number: &u32| self.entry(*number).is_some_and(|entry| entry.flight.unit.page == page);
        if let Some(at) = self.queue.iter().position(queued)
            && let Some(number) = self.queue.remove(at)
        {
            if let Some(entry) = &mut self.entries[number as usize] {
                entry.priority = Priority::Demand;
            }
            self.queue.push_front(number);
            self.ask(core);
        }
    }

    fn entry(&self, number: u32) -> Option<&Entry> {
        self.entries[number as usize].as_ref()
    }

    /// Gives the lane what it takes.
    fn ask(&mut self, core: &Core) {
        while let Some(number) = self.queue.front()
            && let Some(entry) = &mut self.entries[*number as usize]
        {
            let Flight { unit, frame, .. } = entry.flight;
            while entry.asked < unit.pages && entry.result.is_ok() {
                let is_background = entry.priority == Priority::Background;
                if is_background && self.background >= BACKGROUND_MAX {
                    return;
                }
                let pages = (unit.pages - entry.asked).min(READ_PAGES);
                let target = core.frames.address(FrameId(frame.0 + entry.asked));
                super::launder(target);
                // SAFETY: frames are pages of initialised memory (`launder`). These are the flight's alone until it lands, which
                // is when the lane has given back all its buffers, or is gone.
                let buffer = unsafe { Buffer::over(target, pages as usize) };
                let request = Request {
                    tag: Tag::new(*number, is_background, entry.asked).0,
                    priority: entry.priority,
                    deadline: self.deadline,
                    op: Op::Read { page: PageId(u64::from(unit.page + entry.asked)), buffer },
                };
                if self.lane.submit(request).is_err() {
                    return;
                }
                self.background += usize::from(is_background);
                entry.asked += pages;
                entry.open += 1;
            }
            self.queue.pop_front();
        }
    }

    /// Lands what has arrived; how many flights. Does not wait.
    pub(crate) fn collect(&mut self, core: &Core) -> usize {
        let mut landed = 0;
        let mut done = core::mem::take(&mut self.done);
        loop {
            let moved = self.lane.poll(&mut done);
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

    /// Reads a part of a page and waits for it. `None`: the lane has forgotten it, and is of no use any more.
    pub(crate) fn read_part(
        &mut self,
        core: &Core,
        part: Part,
        take: impl FnOnce(&[u8]),
    ) -> Option<Result<(), PoolError>> {
        let started = Instant::now();
        let buffer = self.part_buffer.take().unwrap_or_else(|| Buffer::new(1));
        let op = Op::ReadPart { page: PageId(u64::from(part.page)), part: part.part, buffer };
        let mut request = Request { tag: PART, priority: Priority::Demand, deadline: self.deadline, op };
        while let Err(back) = self.lane.submit(request) {
            request = back;
            self.lane.wait(Duration::from_millis(1));
            self.collect(core);
            if started.elapsed() > self.deadline * 2 {
                return None;
            }
        }
        while started.elapsed() < self.deadline * 2 {
            self.collect(core);
            if let Some(result) = self.part_outcome.take() {
                if let (Ok(()), Some(buffer)) = (&result, &self.part_buffer) {
                    take(&buffer.page(0)[part.part.range()]);
                }
                return Some(result);
            }
            self.lane.wait(self.deadline);
        }
        None
    }

    /// One request has ended; true if its flight landed.
    fn complete(&mut self, core: &Core, completion: Completion) -> bool {
        if completion.tag == PART {
            (self.part_outcome, self.part_buffer) = (Some(completion.result), completion.buffer);
            return false;
        }
        let (number, is_background, first) = Tag(completion.tag).parts();
        self.background -= usize::from(is_background);
        let Some(entry) = &mut self.entries[number as usize] else { unreachable!("a flight waits for its requests") };
        let Flight { unit, frame, .. } = entry.flight;
        entry.open -= 1;
        entry.result = entry.result.and(completion.result);
        for (index, sum) in completion.buffer.iter().flat_map(|buffer| buffer.sums()).enumerate() {
            core.frames.infos[frame.0 + first + index as u32].set_sum(*sum);
        }
        // The frames may be somebody else's from here on.
        drop(completion.buffer);
        if entry.open > 0 || entry.asked < unit.pages && entry.result.is_ok() {
            return false;
        }
        self.land(core, number);
        true
    }

    fn land(&mut self, core: &Core, number: u32) {
        let Some(Entry { flight, result, .. }) = self.entries[number as usize].take() else { return };
        self.free.push(number);
        if self.awaited == Some(number) {
            self.outcome = Some(result);
        }
        if core.land(flight, result) {
            self.wanted.push((flight.unit.page, result));
        }
    }

    /// Waits for a flight of this lane; how it ended. `None`: the lane has forgotten it, and is of no use any more.
    pub(crate) fn wait_for(&mut self, core: &Core, number: u32) -> Option<Result<(), PoolError>> {
        let started = Instant::now();
        self.awaited = Some(number);
        // The lane keeps the deadline; ours is for a lane that does not.
        while started.elapsed() < self.deadline * 2 {
            self.collect(core);
            if let Some(outcome) = self.outcome.take() {
                self.awaited = None;
                return Some(outcome);
            }
            self.lane.wait(self.deadline);
        }
        None
    }

    /// Waits until something is likely to have arrived, at most so long.
    pub(crate) fn wait(&mut self, most: Duration) {
        self.lane.wait(most);
    }

    /// The lane has forgotten flights. It goes, and they fail; the pages for which tasks wait.
    pub(crate) fn abandon(self, core: &Core) -> Vec<(u32, Result<(), PoolError>)> {
        let Io { lane, entries, mut wanted, deadline, .. } = self;
        // With it go its buffers: nobody writes into frames of ours after this.
        drop(lane);
        let result = Err(PoolError::TimedOut { server: 0, after: deadline * 2 });
        for Entry { flight, .. } in entries.into_iter().flatten() {
            if core.land(flight, result) {
                wanted.push((flight.unit.page, result));
            }
        }
        wanted
    }
}
