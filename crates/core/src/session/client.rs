//! One lane as the client sees it: which operations are queued, sent or finished, and what goes
//! next.
//!
//! The driver owns socket, clock and page bytes. A value `C` travels with each operation (a buffer,
//! a caller's tag) and is given back exactly once, however the operation ends. Demand operations
//! are sent before queued background ones. Only a bounded number of background pages is under way
//! at a time, so that a demand answer never queues behind megabytes. After
//! [`ClientConversation::new`] nothing allocates.
//!
//! A tag on the wire is the slot of the operation and the generation of that slot: an answer that
//! comes after its operation timed out meets a newer generation and is skipped.

use crate::time::Moment;
use crate::wire::{
    ErrorCode, MessageHeader, MessageKind, PagePart, ReadReply, Reply, WireError, WireReply, flags, part_body_bytes,
    write_body_bytes,
};
use crate::{PageId, RegionId};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

/// An operation on pages of the lane's region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageOperation {
    /// Reads `count` pages.
    Read {
        /// First page.
        page: PageId,
        /// Number of pages.
        count: u32,
    },
    /// Reads bytes inside one page.
    ReadPart {
        /// The page.
        page: PageId,
        /// Part of the page to read.
        part: PagePart,
    },
    /// Stores `count` pages.
    Write {
        /// First page.
        page: PageId,
        /// Number of pages.
        count: u32,
    },
    /// Forgets `count` pages.
    Discard {
        /// First page.
        page: PageId,
        /// Number of pages.
        count: u32,
    },
}

impl PageOperation {
    fn kind(self) -> MessageKind {
        match self {
            PageOperation::Read { .. } => MessageKind::Read,
            PageOperation::ReadPart { .. } => MessageKind::ReadPart,
            PageOperation::Write { .. } => MessageKind::Write,
            PageOperation::Discard { .. } => MessageKind::Discard,
        }
    }

    /// Returns the first page and the number of pages.
    pub fn run(self) -> (PageId, u32) {
        match self {
            PageOperation::Read { page, count }
            | PageOperation::Write { page, count }
            | PageOperation::Discard { page, count } => (page, count),
            PageOperation::ReadPart { page, .. } => (page, 1),
        }
    }

    /// Returns the number of pages whose bytes travel.
    fn pages_moved(self) -> u32 {
        match self {
            PageOperation::Read { count, .. } | PageOperation::Write { count, .. } => count,
            PageOperation::ReadPart { .. } => 1,
            PageOperation::Discard { .. } => 0,
        }
    }
}

/// Message to send next: this header, then, for a write, the checksums and bytes of its pages.
#[derive(Clone, Copy, Debug)]
pub struct OutgoingMessage {
    /// Slot of the operation; give it to [`ClientConversation::on_sent`].
    pub slot: u32,
    /// The header of the frame.
    pub header: MessageHeader,
    /// Call that the operation makes.
    pub call: PageOperation,
}

/// Meaning of an arrived header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyEvent {
    /// Pages of a read follow. When `prefix` bytes of the body are there, [`ReadReply::decode`]
    /// tells which. Then come their bytes, then [`ClientConversation::finish`].
    Pages {
        /// Slot of the read.
        slot: u32,
        /// Number of pages that were asked for.
        asked: u32,
        /// Number of bytes before the page bytes.
        prefix: usize,
    },
    /// A part of a page follows. When the whole body is there, [`crate::wire::part_reply`] decodes it; then
    /// [`ClientConversation::finish`].
    Part {
        /// Slot of the read.
        slot: u32,
        /// Part of the page that was asked for.
        part: PagePart,
        /// The stored checksum of the page, as the server says.
        page_sum: u64,
    },
    /// The operation is done; [`ClientConversation::finish`] it.
    Done {
        /// Slot of the operation.
        slot: u32,
    },
    /// The operation failed; [`ClientConversation::finish`] it.
    Failed {
        /// Slot of the operation.
        slot: u32,
        /// Reason of the failure.
        code: ErrorCode,
        /// Page that the failure is about.
        page: PageId,
    },
    /// The answer comes too late: skip the body.
    Stale,
}

/// An operation that its driver must end because its time is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpiredOperation {
    /// The operation was never sent, or sent and not answered: [`ClientConversation::finish`] it.
    Quiet {
        /// Slot of the operation.
        slot: u32,
    },
    /// A part of its frame was sent, so the connection cannot go on without the rest: give it up.
    Sending {
        /// Slot of the operation.
        slot: u32,
    },
    /// A part of its pages was received: finish it and skip the rest.
    Receiving {
        /// Slot of the operation.
        slot: u32,
    },
}

/// An operation that ended; the slot is free again.
#[derive(Debug)]
pub struct FinishedOperation<C> {
    /// Call that the operation was.
    pub call: PageOperation,
    /// Time that the operation was given.
    pub wait: Duration,
    /// Value that the driver gave along.
    pub carried: C,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Queued,
    Sending,
    Waiting,
    Receiving,
}

#[derive(Debug)]
struct PendingOperation<C> {
    state: State,
    background: bool,
    call: PageOperation,
    wait: Duration,
    deadline: Moment,
    carried: C,
}

#[derive(Debug)]
struct LaneSlot<C> {
    generation: u32,
    operation: Option<PendingOperation<C>>,
}

/// Splits a tag into slot and generation.
fn split_tag(tag: u64) -> (u32, u32) {
    let [s0, s1, s2, s3, g0, g1, g2, g3] = tag.to_le_bytes();
    (u32::from_le_bytes([s0, s1, s2, s3]), u32::from_le_bytes([g0, g1, g2, g3]))
}

/// Client side of one lane: a state machine without I/O.
#[derive(Debug)]
pub struct ClientConversation<C> {
    region: RegionId,
    slots: Box<[LaneSlot<C>]>,
    free: Vec<u32>,
    demand: VecDeque<u32>,
    background: VecDeque<u32>,
    /// Number of operations sent (at least in part) and not ended.
    under_way: u32,
    under_way_max: u32,
    background_pages: u32,
    background_pages_max: u32,
    /// Lower bound of the deadlines of all operations.
    next_deadline: Moment,
}

impl<C> ClientConversation<C> {
    /// Creates a lane to `region` for up to `slots` operations at a time, of which the server takes
    /// `in_flight_max`. Up to `background_pages_max` pages of background operations are under way
    /// at a time (one operation always may be).
    pub fn new(region: RegionId, slots: u32, in_flight_max: u32, background_pages_max: u32) -> Self {
        assert!(slots > 0 && in_flight_max > 0);
        ClientConversation {
            region,
            slots: (0..slots).map(|_| LaneSlot { generation: 0, operation: None }).collect(),
            free: (0..slots).rev().collect(),
            demand: VecDeque::with_capacity(slots as usize),
            background: VecDeque::with_capacity(slots as usize),
            under_way: 0,
            under_way_max: in_flight_max,
            background_pages: 0,
            background_pages_max,
            next_deadline: Moment::NEVER,
        }
    }

    /// Returns the number of operations submitted and not ended.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Checks whether an operation could be sent now.
    pub fn wants_to_send(&self) -> bool {
        self.next_queued().is_some()
    }

    /// Queues an operation that was submitted at `now` and may take `wait`. Gives `carried` back if
    /// all slots are taken.
    pub fn submit(
        &mut self,
        now: Moment,
        call: PageOperation,
        background: bool,
        wait: Duration,
        carried: C,
    ) -> Result<(), C> {
        let Some(slot) = self.free.pop() else { return Err(carried) };
        let deadline = now.after(wait);
        self.next_deadline = self.next_deadline.min(deadline);
        let queue = if background { &mut self.background } else { &mut self.demand };
        queue.push_back(slot);
        let state = State::Queued;
        let operation = PendingOperation { state, background, call, wait, deadline, carried };
        match self.slots.get_mut(slot as usize) {
            Some(place) => place.operation = Some(operation),
            None => return Err(operation.carried),
        }
        Ok(())
    }

    fn next_queued(&self) -> Option<u32> {
        if self.under_way >= self.under_way_max {
            return None;
        }
        if let Some(&slot) = self.demand.front() {
            return Some(slot);
        }
        let slot = *self.background.front()?;
        let pages = self.operation(slot)?.call.pages_moved();
        let fits = self.background_pages == 0 || self.background_pages + pages <= self.background_pages_max;
        fits.then_some(slot)
    }

    /// Returns the next operation to send, demand first. `None`: none may be sent now.
    pub fn poll_send(&mut self, now: Moment) -> Option<OutgoingMessage> {
        let slot = self.next_queued()?;
        let LaneSlot { generation, operation } = self.slots.get_mut(slot as usize)?;
        let (generation, operation) = (*generation, operation.as_mut()?);
        let queue = if operation.background { &mut self.background } else { &mut self.demand };
        queue.pop_front();
        operation.state = State::Sending;
        self.under_way += 1;
        if operation.background {
            self.background_pages += operation.call.pages_moved();
        }
        let (page, count) = match operation.call {
            PageOperation::ReadPart { page, part } => (page, part.count()),
            other => other.run(),
        };
        let body = match operation.call {
            PageOperation::Write { count, .. } => u32::try_from(write_body_bytes(count)).unwrap_or(u32::MAX),
            _ => 0,
        };
        let left = u32::try_from(operation.deadline.since(now).as_micros().max(1)).unwrap_or(u32::MAX);
        let header = MessageHeader {
            body,
            kind: operation.call.kind() as u8,
            flags: if operation.background { flags::BACKGROUND } else { 0 },
            code: 0,
            tag: u64::from(generation) << 32 | u64::from(slot),
            deadline_us: left,
            count,
            region: self.region.0,
            page: page.0,
        };
        Some(OutgoingMessage { slot, header, call: operation.call })
    }

    /// Notes that the whole frame of this operation is on its way.
    pub fn on_sent(&mut self, slot: u32) {
        if let Some(operation) = self.operation_mut(slot) {
            debug_assert!(operation.state == State::Sending);
            operation.state = State::Waiting;
        }
    }

    /// Takes the header of an answer. An error means that the server does not keep to the protocol:
    /// give the connection up.
    pub fn on_header(&mut self, header: &MessageHeader) -> Result<ReplyEvent, WireError> {
        let (slot, generation) = split_tag(header.tag);
        let known = self.slots.get_mut(slot as usize).ok_or(WireError::Unasked)?;
        if known.generation != generation {
            // Generations wrap; one that is not behind was never given out.
            let behind = known.generation.wrapping_sub(generation);
            return if behind < u32::MAX / 2 { Ok(ReplyEvent::Stale) } else { Err(WireError::Unasked) };
        }
        let operation = known.operation.as_mut().ok_or(WireError::Unasked)?;
        if operation.state != State::Waiting {
            return Err(WireError::Unasked);
        }
        if header.kind != MessageKind::ERROR && header.kind != operation.call.kind().answer() {
            return Err(WireError::Kind(header.kind));
        }
        if let PageOperation::ReadPart { part, .. } = operation.call
            && header.kind != MessageKind::ERROR
        {
            if header.body as usize != part_body_bytes(part) {
                return Err(WireError::Length { kind: header.kind, body: header.body });
            }
            operation.state = State::Receiving;
            return Ok(ReplyEvent::Part { slot, part, page_sum: header.page });
        }
        if let PageOperation::Read { count: asked, .. } = operation.call
            && header.kind != MessageKind::ERROR
        {
            let prefix = ReadReply::prefix_bytes(header, asked)?;
            operation.state = State::Receiving;
            return Ok(ReplyEvent::Pages { slot, asked, prefix });
        }
        // Neither the answers to writes and discards nor failures have a body.
        if header.body != 0 {
            return Err(WireError::Length { kind: header.kind, body: header.body });
        }
        match WireReply::decode(header, &[])?.reply {
            Reply::Failed { code, page } => Ok(ReplyEvent::Failed { slot, code, page: PageId(page) }),
            _ => Ok(ReplyEvent::Done { slot }),
        }
    }

    /// Returns the value that travels with the operation, to change it.
    pub fn carried_mut(&mut self, slot: u32) -> Option<&mut C> {
        self.operation_mut(slot).map(|operation| &mut operation.carried)
    }

    /// Returns the value that travels with the operation.
    pub fn carried(&self, slot: u32) -> Option<&C> {
        self.operation(slot).map(|operation| &operation.carried)
    }

    /// Returns the operation in `slot`.
    pub fn call_of(&self, slot: u32) -> Option<PageOperation> {
        self.operation(slot).map(|operation| operation.call)
    }

    /// Returns the time that the operation in `slot` was given; zero if there is none.
    pub fn wait_of(&self, slot: u32) -> Duration {
        self.operation(slot).map_or(Duration::ZERO, |operation| operation.wait)
    }

    /// Ends an operation and frees its slot.
    pub fn finish(&mut self, slot: u32) -> Option<FinishedOperation<C>> {
        let known = self.slots.get_mut(slot as usize)?;
        let operation = known.operation.take()?;
        known.generation = known.generation.wrapping_add(1);
        if operation.state == State::Queued {
            let queue = if operation.background { &mut self.background } else { &mut self.demand };
            queue.retain(|&queued| queued != slot);
        } else {
            self.under_way -= 1;
            if operation.background {
                self.background_pages -= operation.call.pages_moved();
            }
        }
        self.free.push(slot);
        if self.free.len() == self.slots.len() {
            self.next_deadline = Moment::NEVER;
        }
        Some(FinishedOperation { call: operation.call, wait: operation.wait, carried: operation.carried })
    }

    /// Returns the earliest moment at which [`ClientConversation::poll_expired`] may have
    /// something.
    pub fn next_deadline(&self) -> Moment {
        self.next_deadline
    }

    /// Returns an operation whose time is over.
    pub fn poll_expired(&mut self, now: Moment) -> Option<ExpiredOperation> {
        if now < self.next_deadline {
            return None;
        }
        let mut next = Moment::NEVER;
        for (slot, known) in (0..).zip(&self.slots) {
            let Some(operation) = &known.operation else { continue };
            if operation.deadline <= now {
                return Some(match operation.state {
                    State::Queued | State::Waiting => ExpiredOperation::Quiet { slot },
                    State::Sending => ExpiredOperation::Sending { slot },
                    State::Receiving => ExpiredOperation::Receiving { slot },
                });
            }
            next = next.min(operation.deadline);
        }
        self.next_deadline = next;
        None
    }

    /// Returns any operation that has not ended. After the connection is lost, the driver finishes
    /// all of them by this.
    pub fn any(&self) -> Option<u32> {
        if self.free.len() == self.slots.len() {
            return None;
        }
        (0..).zip(&self.slots).find(|(_, slot)| slot.operation.is_some()).map(|(slot, _)| slot)
    }

    fn operation(&self, slot: u32) -> Option<&PendingOperation<C>> {
        self.slots.get(slot as usize)?.operation.as_ref()
    }

    fn operation_mut(&mut self, slot: u32) -> Option<&mut PendingOperation<C>> {
        self.slots.get_mut(slot as usize)?.operation.as_mut()
    }
}
