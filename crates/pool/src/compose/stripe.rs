//! Striped pool of several members: groups of pages are dealt out in turn ([`Deal`]), so that
//! neighbours travel together and load spreads.
//!
//! A run that lies in one group goes to its member in the caller's own buffer. A longer run is cut into
//! parts, each of at most 64 pages of one member. Parts travel in buffers of the lane and cost one
//! copy.

use crate::contract::backend::{check_range, hand_over};
use crate::polling::Polling;
use crate::{
    Backend, Buffer, CloneTicket, Completion, Deal, Health, Lane, LaneRequest, Mapped, Op, PoolError, Priority,
    Protection, ScrubStats,
};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Greatest number of pages in one part of a long run.
const PART_PAGES: u64 = 64;
/// Number of buffers for parts, per lane. Their memory is touched only when they are used.
const PART_BUFFERS: usize = 32;
/// Greatest number of operations of one lane at a time.
const SLOTS: usize = 256;
/// Greatest number of parts of one lane at its members at a time.
const PARTS: usize = 512;
/// Time that it sleeps at one member before it looks at the others.
const SLEEP_SLICE: Duration = Duration::from_micros(200);

/// Several members as one region.
pub(crate) struct StripeBackend {
    members: Vec<Arc<dyn Backend>>,
    /// Number of leaves of each member, and so of the secrets of a ticket that are its own.
    leaves: Vec<usize>,
    deal: Deal,
    pages: u64,
}

impl StripeBackend {
    /// Combines members, each with the number of its leaves, as `deal` says. `pages` is the wanted
    /// size of the region, 0 for as much as the members have.
    pub(crate) fn new(members: Vec<(Arc<dyn Backend>, usize)>, deal: Deal, pages: u64) -> StripeBackend {
        let (members, leaves): (Vec<_>, Vec<_>) = members.into_iter().unzip();
        assert_eq!(members.len() as u64, deal.members());
        // This is the smallest page that some member lacks: no more than that can be addressed.
        let lacking = members.iter().enumerate().map(|(index, member)| deal.page(index, member.pages()));
        let most = lacking.min().unwrap_or(0);
        StripeBackend { members, leaves, deal, pages: if pages == 0 { most } else { pages.min(most) } }
    }

    /// Returns the number of pages that member `index` needs for a region of `pages`: whole groups,
    /// at least one.
    pub(crate) fn pages_of_member(pages: u64, deal: Deal, index: usize) -> u64 {
        if deal.members() == 1 {
            return pages;
        }
        let group = deal.group_pages();
        deal.share(pages.next_multiple_of(group), index).max(group)
    }
}

impl Backend for StripeBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        let lanes: Vec<Box<dyn Lane>> =
            self.members.iter().map(|member| member.open_lane()).collect::<Result<_, PoolError>>()?;
        Ok(Box::new(StripeLane {
            deal: self.deal,
            pages: self.pages,
            waiting: lanes.iter().map(|_| VecDeque::with_capacity(PARTS)).collect(),
            lanes,
            queued: VecDeque::with_capacity(SLOTS),
            operations: std::iter::repeat_with(|| None).take(SLOTS).collect(),
            free_operations: (0..SLOTS).rev().collect(),
            splits: std::iter::repeat_with(|| None).take(PARTS).collect(),
            free_splits: (0..PARTS).rev().collect(),
            buffers: (0..PART_BUFFERS).map(|_| Buffer::new(PART_PAGES as usize)).collect(),
            arrived: Vec::with_capacity(64),
            ended: VecDeque::with_capacity(SLOTS),
            next_lane: 0,
            polling: Polling::default(),
        }))
    }

    fn deal(&self) -> Option<Deal> {
        Some(self.deal)
    }

    fn member(&self, index: usize) -> Option<Arc<dyn Backend>> {
        self.members.get(index).cloned()
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        self.members.iter().all(|member| member.mapped().is_some()).then_some(self)
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        let mut first = 0;
        for (member, leaves) in self.members.iter().zip(&self.leaves) {
            secrets[first..][..*leaves].copy_from_slice(&member.clone_region()?.secrets[..*leaves]);
            first += leaves;
        }
        Ok(CloneTicket { secrets })
    }

    fn pages(&self) -> u64 {
        self.pages
    }

    fn health(&self) -> Health {
        let gone = self.members.iter().filter(|member| member.health() == Health::Gone).count();
        let good = self.members.iter().filter(|member| member.health() == Health::Good).count();
        if gone == self.members.len() {
            Health::Gone
        } else if good == self.members.len() {
            Health::Good
        } else {
            Health::Degraded
        }
    }

    fn scrub_stats(&self) -> Option<ScrubStats> {
        ScrubStats::with_parts(None, self.members.iter())
    }

    fn protection(&self) -> Option<Protection> {
        Protection::with_parts(None, self.members.iter())
    }

    fn answers(&self, within: Duration) -> bool {
        self.members.iter().all(|member| member.answers(within))
    }

    fn is_rejoin_due(&self) -> bool {
        self.members.iter().any(|member| member.is_rejoin_due())
    }

    fn rejoin(&self) {
        self.members.iter().for_each(|member| member.rejoin());
    }

    fn release(&self) {
        self.members.iter().for_each(|member| member.release());
    }

    fn abandon(&self) {
        self.members.iter().for_each(|member| member.abandon());
    }
}

impl Mapped for StripeBackend {
    fn page(&self, page: PageId) -> Option<*const u8> {
        let (member, local) = self.deal.place(page.0);
        self.members[member].mapped()?.page(PageId(local))
    }
}

/// Operation of the caller that was cut into parts.
struct StripeOperation {
    tag: u64,
    page: u64,
    buffer: Option<Buffer>,
    is_read: bool,
    splits_left: usize,
    result: Result<(), PoolError>,
}

/// Part of an operation, done by one member.
struct StripeSplit {
    operation: usize,
    member: usize,
    /// First page of the part, as the member counts.
    local: u64,
    count: u64,
    /// Whether the buffer is the caller's own, not one of the lane's.
    whole: bool,
}

struct StripeLane {
    deal: Deal,
    pages: u64,
    lanes: Vec<Box<dyn Lane>>,
    /// Parts for which a member's lane had no room.
    waiting: Vec<VecDeque<LaneRequest>>,
    queued: VecDeque<LaneRequest>,
    operations: Box<[Option<StripeOperation>]>,
    free_operations: Vec<usize>,
    splits: Box<[Option<StripeSplit>]>,
    free_splits: Vec<usize>,
    buffers: Vec<Buffer>,
    arrived: Vec<Completion>,
    ended: VecDeque<Completion>,
    next_lane: usize,
    polling: Polling,
}

impl StripeLane {
    /// Starts queued operations, in order, demand first, as far as there are parts and buffers for
    /// them.
    fn start(&mut self) {
        for member in 0..self.lanes.len() {
            while let Some(request) = self.waiting[member].pop_front() {
                if let Err(back) = self.lanes[member].submit(request) {
                    self.waiting[member].push_front(back);
                    break;
                }
            }
        }
        while let Some(index) = self.next_queued() {
            let Some(request) = self.queued.remove(index) else { return };
            if let Err(back) = self.try_start(request) {
                self.queued.insert(index, back);
                return;
            }
        }
    }

    fn next_queued(&self) -> Option<usize> {
        let demand = self.queued.iter().position(|request| request.priority == Priority::Demand);
        demand.or((!self.queued.is_empty()).then_some(0))
    }

    /// Cuts an operation into parts; gives it back if there is no room for them now.
    fn try_start(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        let (page, count) = request.op.range();
        if let Err(error) = check_range((page, count), self.pages, 0) {
            self.end(request, Err(error));
            return Ok(());
        }
        let (page, moves) = (page.0, !matches!(request.op, Op::Discard { .. }));
        let whole = self.deal.within(page) + count <= self.deal.group_pages();
        if count == 0 {
            self.end(request, Ok(()));
            return Ok(());
        }
        let parts_needed = if whole { 1 } else { self.parts_of(page, count, moves) };
        let buffers_needed = if moves && !whole { parts_needed } else { 0 };
        if parts_needed > PARTS || buffers_needed > PART_BUFFERS {
            let error = PoolError::Refused { server: 0, reason: "an operation has more pages than a stripe takes" };
            self.end(request, Err(error));
            return Ok(());
        }
        if self.free_splits.len() < parts_needed || self.buffers.len() < buffers_needed {
            return Err(request);
        }
        let Some(operation) = self.free_operations.pop() else { return Err(request) };
        let LaneRequest { tag, priority, deadline, op } = request;
        let is_read = matches!(op, Op::Read { .. });
        let is_write = matches!(op, Op::Write { .. });
        let known = StripeOperation { tag, page, buffer: None, is_read, splits_left: parts_needed, result: Ok(()) };
        self.operations[operation] = Some(known);
        if whole {
            let (member, local) = self.deal.place(page);
            let op = match op {
                Op::Read { buffer, .. } => Op::Read { page: PageId(local), buffer },
                Op::ReadPart { part, buffer, .. } => Op::ReadPart { page: PageId(local), part, buffer },
                Op::Write { buffer, .. } => Op::Write { page: PageId(local), buffer },
                Op::Discard { count, .. } => Op::Discard { page: PageId(local), count },
            };
            self.send(StripeSplit { operation, member, local, count, whole: true }, priority, deadline, op);
            return Ok(());
        }
        let buffer = match op {
            Op::Read { buffer, .. } | Op::ReadPart { buffer, .. } | Op::Write { buffer, .. } => Some(buffer),
            Op::Discard { .. } => None,
        };
        for member in 0..self.lanes.len() {
            let end = self.deal.share(page + count, member);
            let mut local = self.deal.share(page, member);
            while local < end {
                let count = if moves { (end - local).min(PART_PAGES) } else { end - local };
                let op = match &buffer {
                    None => Op::Discard { page: PageId(local), count },
                    Some(whole_run) => {
                        let Some(mut part) = self.buffers.pop() else { break };
                        part.set_pages(count as usize);
                        if is_write {
                            for index in 0..count {
                                let from = (self.deal.page(member, local + index) - page) as usize;
                                part.page_mut(index as usize).copy_from_slice(whole_run.page(from));
                                part.sums_mut()[index as usize] = whole_run.sums()[from];
                            }
                            Op::Write { page: PageId(local), buffer: part }
                        } else {
                            Op::Read { page: PageId(local), buffer: part }
                        }
                    }
                };
                self.send(StripeSplit { operation, member, local, count, whole: false }, priority, deadline, op);
                local += count;
            }
        }
        if let Some(known) = &mut self.operations[operation] {
            known.buffer = buffer;
        }
        Ok(())
    }

    fn parts_of(&self, page: u64, count: u64, moves: bool) -> usize {
        let parts = |member| {
            let pages = self.deal.share(page + count, member) - self.deal.share(page, member);
            if moves { pages.div_ceil(PART_PAGES) as usize } else { usize::from(pages > 0) }
        };
        (0..self.lanes.len()).map(parts).sum()
    }

    fn send(&mut self, part: StripeSplit, priority: Priority, deadline: Duration, op: Op) {
        let member = part.member;
        let slot = self.free_splits.pop().expect("counted before");
        self.splits[slot] = Some(part);
        let request = LaneRequest { tag: slot as u64, priority, deadline, op };
        // The request queues behind those that wait already.
        if !self.waiting[member].is_empty() {
            self.waiting[member].push_back(request);
        } else if let Err(back) = self.lanes[member].submit(request) {
            self.waiting[member].push_back(back);
        }
    }

    fn end(&mut self, request: LaneRequest, result: Result<(), PoolError>) {
        let buffer = match request.op {
            Op::Read { buffer, .. } | Op::ReadPart { buffer, .. } | Op::Write { buffer, .. } => Some(buffer),
            Op::Discard { .. } => None,
        };
        self.ended.push_back(Completion { tag: request.tag, result, buffer });
    }

    fn collect(&mut self) {
        for member in 0..self.lanes.len() {
            while self.lanes[member].in_flight() > 0 {
                self.lanes[member].poll(&mut self.arrived);
                if self.arrived.is_empty() {
                    break;
                }
                while let Some(completion) = self.arrived.pop() {
                    self.part_ended(completion);
                }
            }
        }
    }

    fn part_ended(&mut self, completion: Completion) {
        let slot = completion.tag as usize;
        let Some(part) = self.splits[slot].take() else { return };
        self.free_splits.push(slot);
        let Some(operation) = &mut self.operations[part.operation] else { return };
        if let Err(error) = completion.result {
            // Errors name pages as the caller knows them.
            let error = match error {
                PoolError::Corrupt { page, server } => {
                    PoolError::Corrupt { page: PageId(self.deal.page(part.member, page.0)), server }
                }
                other => other,
            };
            if operation.result.is_ok() {
                operation.result = Err(error);
            }
        }
        if part.whole {
            operation.buffer = completion.buffer;
        } else if let Some(buffer) = completion.buffer {
            if let Some(whole_run) = &mut operation.buffer
                && operation.is_read
                && completion.result.is_ok()
            {
                for index in 0..part.count {
                    let to = (self.deal.page(part.member, part.local + index) - operation.page) as usize;
                    whole_run.page_mut(to).copy_from_slice(buffer.page(index as usize));
                    whole_run.sums_mut()[to] = buffer.sums()[index as usize];
                }
            }
            self.buffers.push(buffer);
        }
        operation.splits_left -= 1;
        if operation.splits_left == 0
            && let Some(StripeOperation { tag, buffer, result, .. }) = self.operations[part.operation].take()
        {
            self.free_operations.push(part.operation);
            self.ended.push_back(Completion { tag, result, buffer });
        }
    }

    fn work(&mut self) {
        self.start();
        self.collect();
        if !self.queued.is_empty() {
            self.start();
        }
    }
}

impl Lane for StripeLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        self.polling.renew();
        self.queued.push_back(request);
        if self.queued.len() == 1 {
            self.start();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.work();
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        self.queued.len() + (SLOTS - self.free_operations.len()) + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        let start = now_ns();
        let limit = start.saturating_add(timeout.as_nanos() as u64);
        loop {
            self.work();
            if !self.ended.is_empty() || self.in_flight() == 0 {
                self.polling.renew();
                return;
            }
            let now = now_ns();
            if now >= limit {
                return;
            }
            if self.polling.goes_on(start, now) {
                continue;
            }
            // Sleep at one busy member, another each time, so that a silent one delays the others
            // by a slice at most.
            let slice = Duration::from_nanos(limit - now).min(SLEEP_SLICE);
            for _ in 0..self.lanes.len() {
                self.next_lane = (self.next_lane + 1) % self.lanes.len();
                if self.lanes[self.next_lane].in_flight() > 0 {
                    self.lanes[self.next_lane].wait(slice);
                    break;
                }
            }
        }
    }
}

const _: () = assert!(PART_PAGES as usize * PAGE_BYTES * PART_BUFFERS <= 8 << 20);

#[cfg(test)]
mod tests {
    //! Guards against a member that is asked for pages it does not have, and against the loss of more than a dead member kept.
    use super::*;
    use crate::{PoolBuilder, conformance};

    #[test]
    fn every_member_has_room_for_its_pages() {
        for (members, group) in (1..6).flat_map(|members| [16, 64, 4096].map(|group| (members, group))) {
            let deal = Deal::new(members, group).unwrap();
            for page in (0..40_000).step_by(if group == 16 { 1 } else { 7 }) {
                let (member, local) = deal.place(page);
                let room = StripeBackend::pages_of_member(page + 1, deal, member);
                assert!(local < room, "page {page} of {members} members, groups of {group}");
            }
        }
    }

    #[test]
    fn stripes_conform() {
        for members in [2, 3, 5] {
            conformance::run(&PoolBuilder::new().urls(vec!["ram:"; members]));
        }
        conformance::run(&PoolBuilder::new().urls(["fault:delay=30us@ram:", "ram:", "fault:delay=5us@ram:"]));
        for group in ["128K", "1M", "16M"] {
            conformance::run(
                &PoolBuilder::new().url(format!("stripe(ram:, fault:delay=5us@ram:, ram:)?group={group}")),
            );
        }
        conformance::run(&PoolBuilder::new().url("stripe(stripe(ram:, fault:delay=5us@stripe(ram:, ram:)), ram:)"));
    }

    #[test]
    fn a_dead_member_fails_its_pages_and_no_others() {
        let backend = PoolBuilder::new().urls(["ram:", "fault:die=1@ram:"]).pages(64).open().unwrap();
        let mut lane = backend.open_lane().unwrap();
        let mut done = Vec::with_capacity(4);
        for (tag, page) in [(0, 0), (1, 16)] {
            let op = Op::Read { page: PageId(page), buffer: Buffer::new(1) };
            lane.submit(LaneRequest { tag, priority: Priority::Demand, deadline: Duration::from_secs(5), op }).unwrap();
        }
        while lane.in_flight() > 0 {
            lane.poll(&mut done);
        }
        done.sort_by_key(|completion| completion.tag);
        assert_eq!(done[0].result, Ok(()));
        assert!(matches!(done[1].result, Err(PoolError::ServerGone { server: 1, .. })));
        assert_eq!(backend.health(), Health::Degraded);
    }
}
