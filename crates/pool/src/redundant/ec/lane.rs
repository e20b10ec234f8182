//! Channel of one thread to all members of an erasure-coded pool.
//!
//! An operation is cut into *splits*. Pages that lie in the same part of neighbouring rows are read
//! together. Pages that are written at the same time share rows, whichever operations they belong
//! to. A member's part of a split is a *request*, with bytes of its own, so a split can end while a
//! member still works on its request.

use super::maintenance::EcMaintenance;
use super::row_map::RowMap;
use super::splits::{
    EcMemberRequest, EcOperation, EcOperationKind, EcRequestOwner, EcSplit, EcSplitKind, ROWS, SPLITS,
};
use crate::contract::backend::{OpKind, check_range, hand_over};
use crate::redundant::member_lanes::{CompositeLane, MemberLanes, SLEEP_SLICE};
use crate::redundant::members::{ANSWER_WITHIN, FAREWELL_TIMEOUT, HEDGE_MIN};
use crate::redundant::repair::Repairer;
use crate::redundant::scrub::{self, ScrubCursor};
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId, checksum};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations that one lane has under way.
const SLOTS: usize = 256;
/// Most requests that one lane has under way.
pub(super) const MEMBER_REQUESTS: usize = 1024;
/// Number of pages that a discard forgets in one go.
const DISCARD_PAGES: u64 = 1 << 16;
/// Time limit of one step of background maintenance. (Tests have less time.)
pub(super) const MAINTENANCE_DEADLINE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

pub(super) struct EcLane {
    pub(super) table: Arc<RowMap>,
    pub(super) members: MemberLanes,
    /// Operations of callers, and behind them that of `maintenance`.
    pub(super) operations: Box<[Option<EcOperation>]>,
    free_operations: Vec<usize>,
    /// Operations of which not all pages have set out.
    pub(super) queued: VecDeque<usize>,
    pub(super) splits: Box<[Option<EcSplit>]>,
    pub(super) free_splits: Vec<usize>,
    /// Writes whose members died, to be retried at members that came meanwhile.
    pub(super) retry_writes: Vec<usize>,
    /// Pages that have to be read again, because they lie elsewhere by now: operation, offset,
    /// count.
    pub(super) retry_reads: VecDeque<(usize, u64, u64)>,
    /// Splits that have to read several parts and found no buffers for that.
    pub(super) starved: VecDeque<usize>,
    /// Spare lists for the entries of splits that write.
    pub(super) entries: Vec<Vec<super::splits::Entry>>,
    pub(super) requests: Box<[Option<EcMemberRequest>]>,
    pub(super) free_requests: Vec<u16>,
    arrived: Vec<Completion>,
    ended: VecDeque<Completion>,
    pub(super) maintenance: Option<EcMaintenance>,
    /// Scrub of this lane, if it is the one that does maintenance and there is a scrub.
    pub(super) scrub_cursor: Option<Box<ScrubCursor>>,
    /// When to look at the alarms of splits.
    pub(super) alarm_at: u64,
    pub(super) slow_reads: u64,
    pub(super) zero_sum: u64,
}

impl EcLane {
    /// Opens a lane with up to `tasks_max` maintenance tasks at a time.
    pub(super) fn open(table: &Arc<RowMap>, tasks_max: usize) -> Result<EcLane, PoolError> {
        let mailbox = table.new_mailbox();
        let members = MemberLanes::with_mailbox(table.open_lanes(MEMBER_REQUESTS)?, mailbox);
        let batch = ROWS * table.code.data();
        Ok(EcLane {
            table: table.clone(),
            members,
            operations: std::iter::repeat_with(|| None).take(SLOTS + 1).collect(),
            free_operations: (0..SLOTS).rev().collect(),
            queued: VecDeque::with_capacity(SLOTS + 1),
            splits: std::iter::repeat_with(|| None).take(SPLITS).collect(),
            free_splits: (0..SPLITS).rev().collect(),
            retry_writes: Vec::with_capacity(SLOTS),
            retry_reads: VecDeque::with_capacity(SPLITS * ROWS),
            starved: VecDeque::with_capacity(SPLITS),
            entries: (0..32).map(|_| Vec::with_capacity(batch)).collect(),
            requests: std::iter::repeat_with(|| None).take(MEMBER_REQUESTS).collect(),
            free_requests: (0..MEMBER_REQUESTS as u16).rev().collect(),
            arrived: Vec::with_capacity(64),
            ended: VecDeque::with_capacity(SLOTS),
            maintenance: (tasks_max > 0).then(|| EcMaintenance::new(tasks_max, batch)),
            scrub_cursor: (tasks_max > 0 && table.scrub.is_on()).then(|| Box::new(ScrubCursor::new())),
            alarm_at: u64::MAX,
            slow_reads: 0,
            zero_sum: checksum(&[0; PAGE_BYTES]),
        })
    }

    /// Index of the operation whose pages are moved.
    pub(super) const MOVER: usize = SLOTS;

    /// Checks whether nothing is under way at any member. Then the lane needs a failed member for
    /// nothing more, and the way to it can go.
    fn is_at_rest(&self) -> bool {
        self.free_splits.len() == SPLITS && self.free_requests.len() == MEMBER_REQUESTS && !self.is_repairing()
    }

    /// Returns the members that this lane can use now.
    pub(super) fn usable(&self) -> MemberSet {
        self.members.open(self.table.active())
    }

    /// Returns the members that have not failed and that this lane has a way to.
    pub(super) fn connected_members(&self) -> MemberSet {
        self.members.open(self.table.present())
    }

    /// Checks whether there is room for one more split, whatever it needs.
    pub(super) fn has_room(&self) -> bool {
        !self.free_splits.is_empty() && self.free_requests.len() >= 2 * MemberSet::MAX
    }

    /// Cuts queued operations into splits, demand first, as far as there is room.
    fn start(&mut self) {
        self.members.submit_waiting();
        for operation in self.retry_writes.drain(..) {
            self.queued.push_back(operation);
        }
        for _ in 0..self.starved.len() {
            let Some(split) = self.starved.pop_front() else { break };
            self.widen(split);
        }
        while let Some((operation, offset, count)) = self.retry_reads.pop_front() {
            let Some(taken) = self.split_read(operation, offset, count) else {
                self.retry_reads.push_front((operation, offset, count));
                break;
            };
            if taken < count {
                self.retry_reads.push_front((operation, offset + taken, count - taken));
            }
        }
        while let Some(index) = self.next_queued() {
            let operation = self.queued[index];
            if !self.split(operation) {
                return self.look_after_queue();
            }
            if let Some(index) = self.queued.iter().position(|&queued| queued == operation) {
                self.queued.remove(index);
            }
            self.end_empty_operation(operation);
        }
    }

    /// Sets the alarm so that an operation that waits for room does not wait beyond its deadline.
    fn look_after_queue(&mut self) {
        let ends = self.queued.iter().filter_map(|operation| Some(self.operations[*operation].as_ref()?.ends_at()));
        self.alarm_at = ends.fold(self.alarm_at, u64::min);
    }

    /// Ends operations that wait for room and have no time left.
    fn end_queued(&mut self, now: u64) {
        for place in (0..self.queued.len()).rev() {
            let operation = self.queued[place];
            let Some(known) = self.operations[operation].as_mut().filter(|known| known.ends_at() <= now) else {
                continue;
            };
            let (left, after) = (known.count - known.split_pages, known.deadline);
            known.split_pages = known.count;
            self.queued.remove(place);
            let error = PoolError::TimedOut { server: self.table.slow_server(), after };
            self.end_pages(operation, left, Err(error));
        }
        if !self.queued.is_empty() {
            self.look_after_queue();
        }
    }

    fn next_queued(&self) -> Option<usize> {
        let is_demand = |&operation: &usize| {
            self.operations[operation].as_ref().is_some_and(|known| known.priority == Priority::Demand)
        };
        self.queued.iter().position(is_demand).or((!self.queued.is_empty()).then_some(0))
    }

    /// Sends all pages of an operation out; returns `false` if there is no room for all of them
    /// now.
    fn split(&mut self, operation: usize) -> bool {
        while let Some(known) = &mut self.operations[operation]
            && known.split_pages < known.count
        {
            let (offset, left) = (known.split_pages, known.count - known.split_pages);
            let taken = match known.kind {
                EcOperationKind::Caller(OpKind::Read | OpKind::Part(_)) | EcOperationKind::Gather => {
                    self.split_read(operation, offset, left)
                }
                EcOperationKind::Caller(OpKind::Write) | EcOperationKind::Move => self.split_write(operation),
                EcOperationKind::Caller(OpKind::Discard) => {
                    let count = left.min(DISCARD_PAGES);
                    let page = known.page + offset;
                    known.left -= count;
                    self.table.index.discard(page, page + count);
                    Some(count)
                }
            };
            let Some(taken) = taken else { return false };
            if let Some(known) = &mut self.operations[operation] {
                known.split_pages += taken;
            }
        }
        true
    }

    pub(super) fn add_split(&mut self, split: EcSplit) -> usize {
        let index = self.free_splits.pop().expect("counted before");
        self.splits[index] = Some(split);
        index
    }

    /// Sends an operation to a member, as a request of a split.
    pub(super) fn send(&mut self, split: usize, member: usize, op: Op) {
        let now = now_ns();
        let Some(known) = &self.splits[split] else { return };
        let passed = |operation: &EcOperation| Duration::from_nanos(now.saturating_sub(operation.started_at));
        // A deadline of zero would mean that there is none.
        let left = |operation: &EcOperation| {
            (operation.priority, operation.deadline.saturating_sub(passed(operation)).max(Duration::from_micros(1)))
        };
        let of = |operation: usize| self.operations[operation].as_ref().map(left);
        let asked = match known.kind {
            EcSplitKind::Read { operation, .. } => of(operation),
            EcSplitKind::Write => known.entries.iter().filter_map(|entry| of(entry.operation)).reduce(|one, other| {
                let is_demand = one.0 == Priority::Demand || other.0 == Priority::Demand;
                (if is_demand { Priority::Demand } else { Priority::Background }, one.1.min(other.1))
            }),
            EcSplitKind::Repair { .. } | EcSplitKind::Trim => None,
        };
        let (priority, deadline) = asked.unwrap_or((Priority::Background, MAINTENANCE_DEADLINE));
        // The lane keeps the time of its operations. A member that is late with a change is waited
        // for: until it has answered, it is unknown which bytes it holds.
        let is_change = matches!(op, Op::Write { .. } | Op::Discard { .. });
        let deadline = if is_change { deadline.max(ANSWER_WITHIN) } else { deadline };
        let request = self.send_request(EcRequestOwner::Split(split), member, priority, deadline, op);
        if let Some(known) = &mut self.splits[split] {
            known.requests[member] = Some(request);
        }
    }

    pub(super) fn send_request(
        &mut self,
        target: EcRequestOwner,
        member: usize,
        priority: Priority,
        deadline: Duration,
        op: Op,
    ) -> u16 {
        let request = self.free_requests.pop().expect("counted before");
        self.requests[request as usize] = Some(EcMemberRequest { owner: target, member, started_at: now_ns() });
        let lane = self.members[member].as_mut().expect("usable");
        lane.submit(LaneRequest { tag: u64::from(request), priority, deadline, op });
        request
    }

    /// Sets when to look at a split again.
    pub(super) fn set_alarm(&mut self, split: usize, at: u64) {
        if let Some(known) = &mut self.splits[split] {
            known.alarm_at = at;
            self.alarm_at = self.alarm_at.min(at);
        }
    }

    fn collect(&mut self) {
        for member in 0..self.members.len() {
            while self.members.poll(member, &mut self.arrived) {
                while let Some(completion) = self.arrived.pop() {
                    self.on_reply(completion);
                }
            }
        }
    }

    pub(super) fn give_buffer(&mut self, member: usize, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer
            && let Some(lane) = &mut self.members[member]
        {
            lane.give_buffer(buffer);
        }
    }

    fn on_reply(&mut self, Completion { tag, result, buffer }: Completion) {
        let Some(EcMemberRequest { owner: target, member, started_at }) = self.requests[tag as usize].take() else {
            return;
        };
        self.free_requests.push(tag as u16);
        if matches!(result, Err(PoolError::ServerGone { .. })) {
            self.table.mark_failed(member);
        }
        let index = match target {
            EcRequestOwner::Abandoned => return self.give_buffer(member, buffer),
            EcRequestOwner::Look => {
                if let Some(cursor) = &mut self.scrub_cursor {
                    cursor.on_reply(&self.table.scrub, result, buffer.as_ref().map_or(&[], Buffer::sums));
                }
                return self.give_buffer(member, buffer);
            }
            EcRequestOwner::LateWrite => {
                self.on_late_write_reply(member, result);
                return self.give_buffer(member, buffer);
            }
            EcRequestOwner::Split(index) => index,
        };
        let Some(split) = &mut self.splits[index] else { return };
        split.requests[member] = None;
        if split.lagging.has(member) {
            split.lagging = split.lagging.difference(MemberSet::one(member));
            self.on_late_write_reply(member, result);
        }
        let Some(split) = &mut self.splits[index] else { return };
        match result {
            Ok(()) => split.got = split.got.union(MemberSet::one(member)),
            Err(error) => split.fail(member, error),
        }
        match split.kind {
            EcSplitKind::Read { .. } => {
                split.buffers[member] = buffer;
                self.on_read_reply(index, member, result.is_ok(), started_at);
            }
            EcSplitKind::Repair { member: target } if member == target => {
                self.give_buffer(member, buffer);
                self.end_repair(index, result);
            }
            EcSplitKind::Repair { .. } => {
                split.buffers[member] = buffer;
                let is_right = result.is_ok() && self.is_as_written(index, member);
                self.on_read_reply(index, member, is_right, started_at);
            }
            EcSplitKind::Write => {
                self.give_buffer(member, buffer);
                self.on_write_reply(index);
            }
            EcSplitKind::Trim => self.on_trim_reply(index),
        }
    }

    /// Handles the answer of a member to a write that was late there.
    fn on_late_write_reply(&mut self, member: usize, result: Result<(), PoolError>) {
        match result {
            // The write may still arrive, at any time.
            Err(PoolError::TimedOut { .. }) => self.table.stay_lagging(member),
            _ => self.table.on_late_reply(member),
        }
    }

    /// Takes a split that has ended. Its requests that are still under way are for nobody, or are
    /// `lagging` writes.
    pub(super) fn take_split(&mut self, index: usize, late: bool) -> Option<EcSplit> {
        let mut split = self.splits[index].take()?;
        self.free_splits.push(index);
        for (member, request) in split.requests.iter().enumerate() {
            if let Some(request) = request
                && let Some(request) = &mut self.requests[*request as usize]
            {
                request.owner = if late { EcRequestOwner::LateWrite } else { EcRequestOwner::Abandoned };
            }
            let buffer = split.buffers[member].take();
            self.give_buffer(member, buffer);
        }
        Some(split)
    }

    /// Ends `count` pages of an operation with this result.
    pub(super) fn end_pages(&mut self, operation: usize, count: u64, result: Result<(), PoolError>) {
        let Some(known) = &mut self.operations[operation] else { return };
        if known.result.is_ok() {
            known.result = result;
        }
        known.left -= count;
        self.end_empty_operation(operation);
    }

    fn end_empty_operation(&mut self, index: usize) {
        let is_over = |operation: &EcOperation| operation.left == 0 && operation.split_pages == operation.count;
        if !self.operations[index].as_ref().is_some_and(is_over) || self.queued.contains(&index) {
            return;
        }
        if self.restart_write(index) {
            return self.retry_writes.push(index);
        }
        let Some(operation) = self.operations[index].take() else { return };
        if index == Self::MOVER {
            return self.end_mover(operation);
        }
        self.free_operations.push(index);
        let EcOperation { tag, buffer, result, .. } = operation;
        self.ended.push_back(Completion { tag, result, buffer });
    }

    /// Retries a write at members that came since it began, if members died under it. Returns
    /// whether it does.
    fn restart_write(&mut self, index: usize) -> bool {
        let Some(EcOperation { kind, result: Err(PoolError::ServerGone { .. }), knew, is_unlucky, .. }) =
            &self.operations[index]
        else {
            return false;
        };
        let members = self.connected_members();
        if *kind != EcOperationKind::Caller(OpKind::Write) || !is_unlucky && !self.members.has_news(members, *knew) {
            return false;
        }
        if let Some(operation) = &mut self.operations[index] {
            (operation.split_pages, operation.left, operation.result, operation.knew) =
                (0, operation.count, Ok(()), members);
            operation.is_unlucky = false;
        }
        true
    }

    /// Asks more members where one is slow, and ends operations that have no time left.
    fn on_alarm(&mut self, now: u64) {
        self.alarm_at = u64::MAX;
        self.end_queued(now);
        for index in 0..SPLITS {
            let Some(split) = &mut self.splits[index] else { continue };
            if split.alarm_at > now {
                self.alarm_at = self.alarm_at.min(split.alarm_at);
                continue;
            }
            split.alarm_at = u64::MAX;
            let (task, requests) = (split.kind, split.requests);
            match task {
                EcSplitKind::Repair { member } if requests[member].is_some() => self.maintenance_is_slow(index, now),
                EcSplitKind::Trim => self.maintenance_is_slow(index, now),
                EcSplitKind::Read { operation, .. } if self.is_read_over(index, operation, now) => {
                    self.starved.retain(|split| *split != index);
                    self.end_read_badly(index);
                }
                EcSplitKind::Read { .. } | EcSplitKind::Repair { .. } => {
                    self.set_alarm(index, now.saturating_add(HEDGE_MIN.as_nanos() as u64));
                    self.read_is_slow(index);
                }
                EcSplitKind::Write => self.write_is_slow(index, now),
            }
        }
    }

    /// Checks whether the split is a read that waits for room and has no time left. Sets its error
    /// if so.
    fn is_read_over(&mut self, index: usize, operation: usize, now: u64) -> bool {
        let Some(split) = &mut self.splits[index] else { return false };
        let Some(operation) = self.operations[operation].as_ref().filter(|operation| operation.ends_at() <= now) else {
            return false;
        };
        let is_over = split.under_way().is_empty() && self.starved.contains(&index);
        if is_over {
            split.error = Some(PoolError::TimedOut { server: self.table.slow_server(), after: operation.deadline });
        }
        is_over
    }

    /// Checks whether this request is late and its member, which has not failed, may still do it.
    fn is_owed(&self, request: &EcMemberRequest) -> bool {
        let is_late = match request.owner {
            EcRequestOwner::LateWrite => true,
            EcRequestOwner::Split(split) => {
                self.splits[split].as_ref().is_some_and(|split| split.lagging.has(request.member))
            }
            EcRequestOwner::Look | EcRequestOwner::Abandoned => false,
        };
        is_late && !self.table.failed().has(request.member)
    }
}

impl CompositeLane for EcLane {
    fn member_lanes(&mut self) -> &mut MemberLanes {
        &mut self.members
    }

    fn work(&mut self) {
        self.start();
        self.collect();
        if self.alarm_at != u64::MAX {
            let now = now_ns();
            if now >= self.alarm_at {
                self.on_alarm(now);
            }
        }
        if !(self.queued.is_empty()
            && self.retry_reads.is_empty()
            && self.starved.is_empty()
            && self.retry_writes.is_empty())
        {
            self.start();
        }
        self.begin_maintenance();
        scrub::step_scrub(self);
        self.table.give_up_the_silent(|member| self.table.mark_failed(member));
        let past = self.table.former();
        if !past.is_empty() && self.is_at_rest() {
            self.members.leave(past);
        }
    }

    fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    fn alarm_at(&self) -> u64 {
        self.alarm_at
    }
}

impl Lane for EcLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let Some(index) = self.free_operations.pop() else { return Err(request) };
        let LaneRequest { tag, priority, deadline, op } = request;
        let (page, count) = op.range();
        let result = check_range((page, count), self.table.index.pages, self.table.members[0].server)
            .and_then(|()| self.check_sums(&op));
        let (asked, buffer) = op.into_parts();
        // An operation that is refused counts as cut already.
        let (cut, left) = if result.is_ok() { (0, count) } else { (count, 0) };
        let (started_at, kind, page) = (now_ns(), EcOperationKind::Caller(asked), page.0);
        let knew = self.connected_members();
        let operation = EcOperation {
            tag,
            priority,
            deadline,
            started_at,
            kind,
            page,
            count,
            split_pages: cut,
            left,
            buffer,
            result,
            knew,
            is_unlucky: false,
        };
        self.operations[index] = Some(operation);
        self.queued.push_back(index);
        // Writes wait until the next poll for others that can share their rows.
        if asked != OpKind::Write && self.queued.len() == 1 {
            self.start();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.work();
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        SLOTS - self.free_operations.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        self.wait_for_members(timeout);
    }
}

impl EcLane {
    /// Checks the checksums of pages to write, because wrong bytes must not become parity.
    fn check_sums(&self, op: &Op) -> Result<(), PoolError> {
        let Op::Write { page, buffer } = op else { return Ok(()) };
        let wrong = (0..buffer.pages()).find(|&index| checksum(buffer.page(index)) != buffer.sums()[index]);
        let server = self.table.members[0].server;
        wrong.map_or(Ok(()), |index| Err(PoolError::Corrupt { page: PageId(page.0 + index as u64), server }))
    }
}

impl Repairer for EcLane {
    fn is_owed_answers(&self) -> bool {
        self.requests.iter().flatten().any(|request| self.is_owed(request))
    }

    fn is_repairing(&self) -> bool {
        // Late splits are not waited for.
        let is_maintenance = |split: &EcSplit| {
            matches!(split.kind, EcSplitKind::Repair { .. } | EcSplitKind::Trim) && split.lagging.is_empty()
        };
        let is_looking = self.scrub_cursor.as_ref().is_some_and(|cursor| cursor.is_looking());
        is_looking || self.operations[Self::MOVER].is_some() || self.splits.iter().flatten().any(is_maintenance)
    }

    fn finish_repairs(&mut self) {
        scrub::pause(self);
        if let Some(maintenance) = &mut self.maintenance {
            maintenance.give_up();
        }
        while self.is_repairing() {
            self.work();
            self.members.sleep(SLEEP_SLICE);
        }
        if let Some(maintenance) = &mut self.maintenance {
            maintenance.go_on();
        }
        scrub::go_on(self);
    }
}

impl Drop for EcLane {
    fn drop(&mut self) {
        if self.table.is_abandoned() {
            return;
        }
        // Maintenance that is under way may still land, and until then no other lane can write
        // there. It has a deadline.
        scrub::end(self);
        self.finish_repairs();
        // Writes that were not waited for may land, too. If that takes too long, their outcome
        // stays unknown.
        let until = now_ns().saturating_add(FAREWELL_TIMEOUT.as_nanos() as u64);
        while self.is_owed_answers() && now_ns() < until {
            self.collect();
            self.members.sleep(SLEEP_SLICE);
        }
        let owed = self.requests.iter().flatten().filter(|request| self.is_owed(request));
        owed.for_each(|request| self.table.stay_lagging(request.member));
        self.table.give_up_the_silent(|member| self.table.mark_failed(member));
        // Rows of a write that is given up here stay claimed, so no other write goes there.
    }
}
