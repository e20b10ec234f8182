//! Channel of one thread to all members of a redundant backend.
//!
//! An operation is cut into *splits*; a member's part of a split is a *request*. Requests have
//! bytes of their own, copied from or to the caller's buffer, so a split can end while a member
//! still works on its request. (Where a member is near, or the only one, a mirror gives it the
//! caller's buffer itself.) Which members a split asks, and how many of them are enough, is the
//! [`Scheme`]'s to decide. This is what all schemes have in common:
//!
//! - A change is counted by its epoch from its beginning to its end.
//! - A member that has not answered a write for half a second while enough others have is *lagging*,
//!   and the write ends without it. Its answer is waited for all the same, for at least a minute:
//!   until then it is unknown which bytes the member holds.
//! - A change whose members died under it is retried at members that came meanwhile.
//! - A lane that is dropped waits for what may still land. What does not answer stays lagging.

use super::member_lanes::{CompositeLane, MemberLanes, SLEEP_SLICE};
use super::members::{ANSWER_WITHIN, FAREWELL_TIMEOUT};
use super::operation::Operation;
use super::repair::Repairer;
use super::scheme::{MEMBER_REQUESTS, RedundantMap, Scheme};
use super::scrub::{self, ScrubCursor, ScrubLane, ScrubTarget};
use super::split::{MemberRequest, RequestOwner, Split, SplitReply, WriteDecision};
use crate::contract::backend::{OpKind, check_range, hand_over};
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Most operations that one lane has under way for its owner.
pub(super) const SLOTS: usize = 256;
/// Most splits that one lane has under way.
pub(super) const SPLITS: usize = 256;

/// Lane of a redundant backend (see the module documentation).
pub(crate) struct RedundantLane<S: Scheme> {
    pub(super) table: Arc<S::Map>,
    pub(super) members: MemberLanes,
    /// What the scheme keeps.
    pub(super) scheme: S,
    /// Operations of the owner, and behind them those of the lane itself.
    pub(super) operations: Box<[Option<Operation>]>,
    free_operations: Vec<usize>,
    /// Operations of which not all pages have set out.
    pub(super) queued: VecDeque<usize>,
    pub(super) splits: Box<[Option<Split<S::Task>>]>,
    pub(super) free_splits: Vec<usize>,
    /// Writes whose members died, to be retried at members that came meanwhile.
    retry_writes: Vec<usize>,
    pub(super) requests: Box<[Option<MemberRequest>]>,
    pub(super) free_requests: Vec<u16>,
    arrived: Vec<Completion>,
    ended: VecDeque<Completion>,
    /// Scrub of this lane, if it is one that repairs and there is a scrub.
    scrub_cursor: Option<Box<ScrubCursor>>,
    /// When to look at the alarms of splits.
    alarm_at: u64,
}

fn slab<T>(count: usize) -> Box<[Option<T>]> {
    std::iter::repeat_with(|| None).take(count).collect()
}

impl<S: Scheme> RedundantLane<S> {
    /// Opens a lane that makes up to `repairs_max` repairs at a time.
    pub(crate) fn open(table: &Arc<S::Map>, repairs_max: usize) -> Result<RedundantLane<S>, PoolError> {
        // The mailbox is made before the lane looks which members are present.
        let mailbox = table.new_mailbox();
        let lanes = table.open_member_lanes()?;
        Ok(RedundantLane::over(table, MemberLanes::with_mailbox(lanes, mailbox), repairs_max))
    }

    pub(super) fn over(table: &Arc<S::Map>, members: MemberLanes, repairs_max: usize) -> RedundantLane<S> {
        RedundantLane {
            table: table.clone(),
            members,
            scheme: S::new(table, repairs_max),
            operations: slab(SLOTS + S::OWN_OPERATIONS),
            free_operations: (0..SLOTS).rev().collect(),
            queued: VecDeque::with_capacity(SLOTS + S::OWN_OPERATIONS),
            splits: slab(SPLITS),
            free_splits: (0..SPLITS).rev().collect(),
            retry_writes: Vec::with_capacity(SLOTS),
            requests: slab(MEMBER_REQUESTS),
            free_requests: (0..MEMBER_REQUESTS as u16).rev().collect(),
            arrived: Vec::with_capacity(64),
            ended: VecDeque::with_capacity(SLOTS),
            scrub_cursor: (repairs_max > 0 && table.scrub().is_on()).then(|| Box::new(ScrubCursor::new())),
            alarm_at: u64::MAX,
        }
    }

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

    // Operations.

    /// Cuts queued operations into splits, demand first, as far as there is room.
    fn start(&mut self) {
        self.members.submit_waiting();
        self.queued.extend(self.retry_writes.drain(..));
        S::resume_reads(self);
        while let Some(operation) = self.next_queued() {
            while self.operations[operation].as_ref().is_some_and(|known| known.split_pages < known.count) {
                if !S::split_next(self, operation) {
                    return self.look_after_queue();
                }
            }
            self.queued.retain(|queued| *queued != operation);
            self.end_operation(operation);
        }
    }

    /// Returns the operation that is cut next.
    fn next_queued(&self) -> Option<usize> {
        let is_demand = |&&operation: &&usize| {
            self.operations[operation].as_ref().is_some_and(|known| known.priority == Priority::Demand)
        };
        self.queued.iter().find(is_demand).or(self.queued.front()).copied()
    }

    /// Sets when to look again at what waits for room, at the latest.
    pub(super) fn look_again_at(&mut self, at: u64) {
        self.alarm_at = self.alarm_at.min(at);
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
            let (unsent, after) = (known.drop_unsent(), known.deadline);
            self.queued.remove(place);
            let error = PoolError::TimedOut { server: self.table.slow_server(), after };
            self.end_pages(operation, unsent, Err(error));
        }
        if !self.queued.is_empty() {
            self.look_after_queue();
        }
    }

    /// Ends `count` pages of an operation with this result.
    pub(super) fn end_pages(&mut self, operation: usize, count: u64, result: Result<(), PoolError>) {
        if let Some(known) = &mut self.operations[operation] {
            known.end_pages(count, result);
            self.end_operation(operation);
        }
    }

    /// Ends an operation if all of it has ended.
    fn end_operation(&mut self, index: usize) {
        if !self.operations[index].as_ref().is_some_and(Operation::is_over) || self.queued.contains(&index) {
            return;
        }
        if self.restart_write(index) {
            return self.retry_writes.push(index);
        }
        let Some(operation) = self.operations[index].take() else { return };
        if index >= SLOTS {
            return S::end_own_operation(self, operation);
        }
        self.free_operations.push(index);
        let Operation { tag, buffer, result, .. } = operation;
        self.ended.push_back(Completion { tag, result, buffer });
    }

    /// Retries a change at members that came since it began, if members died under it. Returns
    /// whether it does.
    fn restart_write(&mut self, index: usize) -> bool {
        let Some(operation) = &self.operations[index] else { return false };
        let has_bytes = operation.kind == OpKind::Discard || operation.buffer.is_some();
        let is_gone = matches!(operation.result, Err(PoolError::ServerGone { .. }));
        if !is_gone || !operation.is_change() || !has_bytes || index >= SLOTS {
            return false;
        }
        let members = self.connected_members();
        if !operation.is_unlucky && !self.members.has_news(members, operation.knew) {
            return false;
        }
        if let Some(operation) = &mut self.operations[index] {
            operation.restart(members);
        }
        true
    }

    // Requests and their answers.

    /// Adds a split, for which there is room.
    pub(super) fn add_split(&mut self, split: Split<S::Task>) -> usize {
        let index = self.free_splits.pop().expect("counted before");
        self.splits[index] = Some(split);
        index
    }

    /// Removes a split that has ended. Its requests that are still under way are late writes, or are
    /// for nobody.
    pub(super) fn close_split(&mut self, index: usize) -> Option<Split<S::Task>> {
        let split = self.splits[index].take()?;
        self.free_splits.push(index);
        let owner = match split.epoch_guard {
            Some(_) => RequestOwner::LateWrite(S::place(&split)),
            None => RequestOwner::Abandoned,
        };
        for request in split.requests.into_iter().flatten() {
            if let Some(request) = &mut self.requests[request as usize] {
                request.owner = owner;
            }
        }
        Some(split)
    }

    /// Sets when to look at a split again.
    pub(super) fn set_alarm(&mut self, split: usize, at: u64) {
        if let Some(known) = &mut self.splits[split] {
            known.alarm_at = at;
            self.alarm_at = self.alarm_at.min(at);
        }
    }

    /// Sends an operation to a member, as a request of a split.
    pub(super) fn send(&mut self, split: usize, member: usize, is_direct: bool, op: Op) {
        let (now, Some(known)) = (now_ns(), &self.splits[split]) else { return };
        let urgency = S::urgency(self, known, now).unwrap_or((Priority::Background, S::REPAIR_DEADLINE));
        let request = self.send_request(RequestOwner::Split(split), member, now, urgency, is_direct, op);
        if let Some(known) = &mut self.splits[split] {
            known.requests[member] = Some(request);
        }
    }

    /// Sends an operation to a member, with this priority and this time for the answer. Returns the
    /// number of the request.
    pub(super) fn send_request(
        &mut self,
        owner: RequestOwner,
        member: usize,
        now: u64,
        (priority, deadline): (Priority, Duration),
        is_direct: bool,
        op: Op,
    ) -> u16 {
        // The lane keeps the time of its operations. A member that is late with a change is waited
        // for: until it has answered, it is unknown which bytes it holds.
        let is_change = matches!(op, Op::Write { .. } | Op::Discard { .. });
        let is_owed = is_change && !is_direct && self.table.waits_for_late_answers();
        let deadline = if is_owed { deadline.max(ANSWER_WITHIN) } else { deadline };
        let request = self.free_requests.pop().expect("counted before");
        self.requests[request as usize] = Some(MemberRequest { owner, member, is_direct, started_at: now });
        let lane = self.members[member].as_mut().expect("usable");
        lane.submit(LaneRequest { tag: u64::from(request), priority, deadline, op });
        request
    }

    /// Takes the answers that have arrived.
    pub(super) fn collect(&mut self) {
        for member in 0..self.members.len() {
            while self.members.poll(member, &mut self.arrived) {
                while let Some(completion) = self.arrived.pop() {
                    self.on_reply(completion);
                }
            }
        }
    }

    fn on_reply(&mut self, Completion { tag, result, buffer }: Completion) {
        let Some(MemberRequest { owner, member, is_direct, started_at }) = self.requests[tag as usize].take() else {
            return;
        };
        self.free_requests.push(tag as u16);
        if let Err(error @ PoolError::ServerGone { .. }) = result {
            self.table.expel(member, error);
        }
        let index = match owner {
            RequestOwner::Split(index) => index,
            RequestOwner::Repair(job) => return S::on_repair_reply(self, job, result, buffer),
            RequestOwner::Scrub => {
                if let Some(cursor) = &mut self.scrub_cursor {
                    cursor.on_reply(self.table.scrub(), result, buffer.as_ref().map_or(&[], Buffer::sums));
                }
                return self.give_buffer(member, buffer);
            }
            RequestOwner::LateWrite(place) => {
                self.table.on_late_write_reply(member, result);
                self.end_late_write(place);
                return self.give_buffer(member, buffer);
            }
            RequestOwner::Abandoned => return self.give_buffer(member, buffer),
        };
        let Some(split) = &mut self.splits[index] else { return };
        split.requests[member] = None;
        let is_late = split.lagging.has(member);
        if is_late {
            split.lagging = split.lagging.difference(MemberSet::one(member));
            self.table.on_late_write_reply(member, result);
        }
        match result {
            Ok(()) => split.done = split.done.union(MemberSet::one(member)),
            Err(error) if self.table.pardons(member, error) => {
                split.failed = split.failed.union(MemberSet::one(member));
            }
            Err(error) => split.fail(member, error),
        }
        S::on_reply(self, index, SplitReply { member, result, buffer, started_at, is_direct, is_late });
    }

    /// Ends a late write. After the last one of its split, other writes may go there.
    fn end_late_write(&mut self, place: (u64, u64)) {
        let is_of_split = |request: &MemberRequest| request.owner == RequestOwner::LateWrite(place);
        if !self.requests.iter().flatten().any(is_of_split) {
            S::on_late_writes_over(&self.table, place);
        }
    }

    /// Gives a buffer back to the member that it is for.
    pub(super) fn give_buffer(&mut self, member: usize, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer
            && let Some(lane) = &mut self.members[member]
        {
            lane.give_buffer(buffer);
        }
    }

    // Writes that wait for members.

    /// Looks whether a write has ended, or may end without some members after a while.
    pub(super) fn on_write_reply(&mut self, index: usize) {
        let Some(split) = &self.splits[index] else { return };
        if split.under_way().is_empty() {
            return S::end_write(self, index);
        }
        if !S::may_degrade(self, split) {
            return;
        }
        let now = now_ns();
        let is_first = split.degrades_at == u64::MAX;
        let degrades_at = if is_first { self.table.counts_with_fewer_at(now) } else { split.degrades_at };
        // Each answer may complete a sufficient set of members.
        let alarm_at = split.alarm_at.min(degrades_at.max(now));
        if let Some(split) = &mut self.splits[index] {
            split.degrades_at = degrades_at;
        }
        self.set_alarm(index, alarm_at);
    }

    /// Handles a write that has waited long: for a member that others may do without, or for all
    /// the time that it has.
    fn write_is_slow(&mut self, index: usize, now: u64) {
        let Some(split) = &self.splits[index] else { return };
        let (slow, ends_at, has_enough) = (split.under_way(), split.ends_at, S::has_enough(self, split));
        let decision = split.decide_write(has_enough, self.table.write_timeout().is_some(), now);
        if let WriteDecision::Wait(at) = decision {
            let look_at = S::ask_more(self, index, has_enough, now);
            return self.set_alarm(index, at.min(look_at));
        }
        slow.iter().for_each(|member| self.table.mark_lagging(member, ends_at));
        match decision {
            WriteDecision::Count => S::end_write(self, index),
            _ => S::end_in_time(self, index, slow, now),
        }
    }

    /// Looks at the splits whose time has come, and ends operations that have no time left.
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
            if split.epoch_guard.is_some() {
                self.write_is_slow(index, now);
            } else {
                S::on_alarm(self, index, now);
            }
        }
    }

    /// Checks whether this request is late and its member, which has not failed, may still do it.
    fn is_owed(&self, request: &MemberRequest) -> bool {
        let is_late = match request.owner {
            RequestOwner::LateWrite(_) => true,
            RequestOwner::Split(split) => {
                self.splits[split].as_ref().is_some_and(|split| split.lagging.has(request.member))
            }
            RequestOwner::Repair(job) => self.scheme.is_late(job),
            RequestOwner::Scrub | RequestOwner::Abandoned => false,
        };
        is_late && !self.table.failed().has(request.member)
    }
}

impl<S: Scheme> CompositeLane for RedundantLane<S> {
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
        if !self.queued.is_empty() || !self.retry_writes.is_empty() || self.scheme.has_waiting_reads() {
            self.start();
        }
        S::begin_repair(self);
        scrub::step_scrub(self);
        self.table.expel_the_silent();
        let former = self.table.former();
        if !former.is_empty() && self.is_at_rest() {
            self.members.leave(former);
        }
    }

    fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    fn alarm_at(&self) -> u64 {
        self.alarm_at
    }
}

impl<S: Scheme> Repairer for RedundantLane<S> {
    fn is_owed_answers(&self) -> bool {
        self.requests.iter().flatten().any(|request| self.is_owed(request))
    }

    fn is_repairing(&self) -> bool {
        self.scrub_cursor.as_ref().is_some_and(|cursor| cursor.is_looking()) || S::is_repairing(self)
    }

    fn finish_repairs(&mut self) {
        scrub::pause(self);
        while self.is_repairing() {
            S::finish_repairs(self);
            self.members.sleep(SLEEP_SLICE);
        }
        self.scheme.resume_repairs();
        scrub::go_on(self);
    }
}

impl<S: Scheme> ScrubLane for RedundantLane<S> {
    type ScrubMap = S::Map;

    fn scrub_target(&self) -> &Arc<S::Map> {
        &self.table
    }

    fn scrub_cursor(&mut self) -> &mut Option<Box<ScrubCursor>> {
        &mut self.scrub_cursor
    }

    fn has_demand(&self) -> bool {
        !self.queued.is_empty() || self.scheme.has_waiting_reads()
    }

    fn can_ask(&self, member: usize) -> bool {
        self.usable().has(member)
    }

    fn ask(&mut self, member: usize, page: u64, count: u64) -> bool {
        let lane = self.members[member].as_mut().filter(|lane| lane.has_buffer_for_read(count));
        if self.free_requests.len() <= 2 * MemberSet::MAX {
            return false;
        }
        let Some(buffer) = lane.and_then(|lane| lane.take_buffer(count)) else { return false };
        let op = Op::Read { page: PageId(page), buffer };
        let urgency = (Priority::Background, scrub::READ_DEADLINE);
        self.send_request(RequestOwner::Scrub, member, now_ns(), urgency, false, op);
        true
    }

    fn forget(&mut self) {
        let requests = self.requests.iter_mut().flatten();
        requests
            .filter(|request| request.owner == RequestOwner::Scrub)
            .for_each(|request| request.owner = RequestOwner::Abandoned);
    }
}

impl<S: Scheme> Lane for RedundantLane<S> {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let Some(index) = self.free_operations.pop() else { return Err(request) };
        self.members.polling.renew();
        let LaneRequest { tag, priority, deadline, op } = request;
        let (page, count) = op.range();
        let result = check_range((page, count), self.table.region_pages(), self.table.members[0].server)
            .and_then(|()| S::check(&self.table, &op));
        let (kind, buffer) = op.into_parts();
        // An operation that is refused counts as cut and ended already.
        let (split_pages, left) = if result.is_ok() { (0, count) } else { (count, 0) };
        self.operations[index] = Some(Operation {
            tag,
            priority,
            deadline,
            started_at: now_ns(),
            kind,
            page: page.0,
            count,
            split_pages,
            left,
            buffer,
            result,
            knew: self.connected_members(),
            is_unlucky: false,
        });
        self.queued.push_back(index);
        if self.queued.len() == 1 && S::starts_at_once(kind) {
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

impl<S: Scheme> Drop for RedundantLane<S> {
    fn drop(&mut self) {
        if self.table.is_abandoned() {
            return;
        }
        // A repair that is under way may still land, and until then no other lane can write there.
        // It has a deadline.
        self.scheme.cut_repairs_short();
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
        owed.for_each(|request| self.table.give_up_answer(request.member));
        let place = |request: &MemberRequest| match request.owner {
            RequestOwner::LateWrite(place) => Some(place),
            _ => None,
        };
        let places: BTreeSet<(u64, u64)> = self.requests.iter().flatten().filter_map(place).collect();
        places.into_iter().for_each(|place| S::on_late_writes_over(&self.table, place));
        self.table.expel_the_silent();
        // A write that is given up here, and had not ended, keeps its place claimed: no other write or
        // repair goes there.
    }
}
