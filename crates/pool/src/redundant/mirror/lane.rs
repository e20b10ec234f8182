//! Channel of one thread to all members of a mirror.
//!
//! An operation is cut into *splits*; a write's split goes to every member, a read's to one. A
//! member's part of a split is a *request*. Requests have bytes of their own, copied from or to the
//! caller's buffer, so a split can end while a member still works on its request. Only where a
//! member is near, or the only one, does it get the caller's buffer itself.
//!
//! A read that takes longer than usual is sent to another member too, and the first answer is taken
//! (hedged read). If a member has not answered a write for half a second while others have it, the
//! write ends without that member. A write that only a silent member could make last fails when its
//! time is over. Its split goes on: until the member has answered nobody copies the chunk.

use super::copier::Copier;
use super::replica_map::{CHUNK_PAGES, ReplicaMap};
use super::splits::{MirrorMemberRequest, MirrorOperation, MirrorRequestOwner, MirrorSplit, SPLITS};
use crate::contract::backend::{OpKind, check_range, hand_over};
use crate::redundant::member_lanes::{CompositeLane, MemberLanes, SLEEP_SLICE};
use crate::redundant::members::{ANSWER_WITHIN, FAREWELL_TIMEOUT, MemberLane, RUN_PAGES, WRITE_TIMEOUT};
use crate::redundant::repair::Repairer;
use crate::redundant::scrub::{self, ScrubCursor};
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations that one lane has under way.
const SLOTS: usize = 256;
/// Most requests that one lane has under way.
pub(super) const MEMBER_REQUESTS: usize = 1024;
/// Most pages of one split of a discard, which bounds how many words are changed at once.
const DISCARD_PAGES: u64 = 256 * CHUNK_PAGES;
/// Period, in reads, after which one read goes to another member than the best, because that member
/// may have become better.
const PROBE_EVERY: u64 = 4096;

pub(crate) struct MirrorLane {
    pub(super) table: Arc<ReplicaMap>,
    pub(super) members: MemberLanes,
    pub(super) operations: Box<[Option<MirrorOperation>]>,
    pub(super) free_operations: Vec<usize>,
    /// Operations that are not all in splits.
    pub(super) queued: VecDeque<usize>,
    pub(super) splits: Box<[Option<MirrorSplit>]>,
    pub(super) free_splits: Vec<usize>,
    /// Writes whose members died, to be retried at members that came meanwhile.
    pub(super) retry_writes: Vec<usize>,
    /// Reads whose member failed and for which no other member had room.
    pub(super) retry_reads: VecDeque<usize>,
    pub(super) requests: Box<[Option<MirrorMemberRequest>]>,
    pub(super) free_requests: Vec<u16>,
    pub(super) arrived: Vec<Completion>,
    pub(super) ended: VecDeque<Completion>,
    pub(super) copier: Option<Copier>,
    /// Scrub of this lane, if it is the one that copies and there is a scrub.
    pub(super) scrub_cursor: Option<Box<ScrubCursor>>,
    /// When to look at the alarms of splits.
    pub(super) alarm_at: u64,
    pub(super) reads: u64,
}

impl MirrorLane {
    /// Opens a lane that copies up to `copies` chunks at a time.
    pub(crate) fn open(table: &Arc<ReplicaMap>, copies: usize) -> Result<MirrorLane, PoolError> {
        let mailbox = table.new_mailbox();
        Ok(MirrorLane::over(table, MemberLanes::with_mailbox(table.open_lanes(MEMBER_REQUESTS)?, mailbox), copies))
    }

    /// Creates a lane of a dual write over a lane to the new member. It has no lane to the old
    /// member yet.
    pub(crate) fn over_target(table: &Arc<ReplicaMap>, lane: Box<dyn Lane>) -> MirrorLane {
        MirrorLane::over(table, MemberLanes::new(vec![None, Some(MemberLane::new(lane, MEMBER_REQUESTS))]), 0)
    }

    fn over(table: &Arc<ReplicaMap>, members: MemberLanes, copies: usize) -> MirrorLane {
        MirrorLane {
            table: table.clone(),
            members,
            operations: std::iter::repeat_with(|| None).take(SLOTS).collect(),
            free_operations: (0..SLOTS).rev().collect(),
            queued: VecDeque::with_capacity(SLOTS),
            splits: std::iter::repeat_with(|| None).take(SPLITS).collect(),
            free_splits: (0..SPLITS).rev().collect(),
            retry_writes: Vec::with_capacity(SLOTS),
            retry_reads: VecDeque::with_capacity(SPLITS),
            requests: std::iter::repeat_with(|| None).take(MEMBER_REQUESTS).collect(),
            free_requests: (0..MEMBER_REQUESTS as u16).rev().collect(),
            arrived: Vec::with_capacity(64),
            ended: VecDeque::with_capacity(SLOTS),
            copier: (copies > 0).then(|| Copier::new(copies)),
            scrub_cursor: (copies > 0 && table.scrub.is_on()).then(|| Box::new(ScrubCursor::new())),
            alarm_at: u64::MAX,
            reads: 0,
        }
    }

    /// Takes the lane to one member out of a lane without operations; returns `None` while the
    /// member still works for an operation that has ended.
    pub(crate) fn take_member(&mut self, member: usize) -> Option<Box<dyn Lane>> {
        self.collect();
        self.members[member].take_if(|member| member.is_idle()).map(|member| member.lane)
    }

    /// Checks whether there is a lane to this member.
    pub(crate) fn has_member(&self, member: usize) -> bool {
        self.members[member].is_some()
    }

    /// Adds a lane to a member that had none.
    pub(crate) fn add_member(&mut self, member: usize, lane: Box<dyn Lane>) {
        self.members[member] = Some(MemberLane::new(lane, MEMBER_REQUESTS));
    }

    /// Copies up to `chunks` chunks and waits until that has ended. Returns whether there was
    /// anything to do.
    pub(crate) fn copy_chunks(&mut self, chunks: usize) -> bool {
        (0..chunks).for_each(|_| self.work());
        let is_busy = self.is_repairing();
        self.finish_repairs();
        is_busy
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

    /// Returns the members to read these pages from: those that can be used now, and only if none
    /// of them has the pages, lagging ones. For lagging ones it is better to wait.
    pub(super) fn sources(&self, page: u64, count: u64, failed: MemberSet) -> MemberSet {
        let of = |members: MemberSet| self.table.valid(page, count, members).difference(failed);
        [of(self.usable()), of(self.connected_members())]
            .into_iter()
            .find(|members| !members.is_empty())
            .unwrap_or_default()
    }

    /// Returns the members at which to change these pages. Lagging ones are included where no
    /// usable member has the bytes that are there now.
    fn targets(&self, page: u64, count: u64) -> MemberSet {
        let usable = self.usable();
        if self.table.keeps(page, count, usable) { usable } else { self.connected_members() }
    }

    /// Checks whether `usable` is the only member that is left. A lagging member may be back before
    /// this one answers.
    fn is_last(&self, usable: MemberSet) -> bool {
        usable.count() == 1 && self.table.present() == usable
    }

    /// Cuts queued operations into splits, demand first, as far as there is room.
    fn start(&mut self) {
        self.members.submit_waiting();
        for operation in self.retry_writes.drain(..) {
            self.queued.push_back(operation);
        }
        for _ in 0..self.retry_reads.len() {
            let Some(split) = self.retry_reads.pop_front() else { break };
            self.retry_read(split);
        }
        while let Some(index) = self.next_queued() {
            let operation = self.queued[index];
            while self.operations[operation].as_ref().is_some_and(|known| known.split_pages < known.count) {
                if !self.split_next(operation) {
                    return self.look_after_queue();
                }
            }
            self.queued.remove(index);
            self.end_unsplit_operation(operation);
        }
    }

    /// Sets the alarm so that an operation that waits for room does not wait beyond its deadline.
    fn look_after_queue(&mut self) {
        let ends = self.queued.iter().filter_map(|operation| Some(self.operations[*operation].as_ref()?.ends_at()));
        self.alarm_at = ends.fold(self.alarm_at, u64::min);
    }

    /// Ends operations that wait for room and have no time left.
    pub(super) fn end_queued(&mut self, now: u64) {
        for place in (0..self.queued.len()).rev() {
            let operation = self.queued[place];
            let Some(known) = self.operations[operation].as_mut().filter(|known| known.ends_at() <= now) else {
                continue;
            };
            known.split_pages = known.count;
            let after = known.deadline;
            known.result = known.result.and(Err(PoolError::TimedOut { server: self.table.slow_server(), after }));
            self.queued.remove(place);
            self.end_unsplit_operation(operation);
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

    /// Starts the next split of an operation; returns `false` if there is no room for it now.
    fn split_next(&mut self, operation: usize) -> bool {
        // Each member must have a request, and others too if one fails.
        if self.free_splits.is_empty() || self.free_requests.len() < MemberSet::MAX {
            return false;
        }
        let Some(known) = &self.operations[operation] else { return true };
        let (page, left, kind, is_first) =
            (known.page + known.split_pages, known.count - known.split_pages, known.kind, known.split_pages == 0);
        match kind {
            OpKind::Read | OpKind::Part(_) => self.split_read(operation, page, left, is_first),
            OpKind::Write => self.split_write(operation, page, left, is_first),
            OpKind::Discard => self.split_discard(operation, page, left.min(DISCARD_PAGES)),
        }
    }

    fn split_read(&mut self, operation: usize, page: u64, left: u64, is_first: bool) -> bool {
        let usable = self.usable();
        let whole = self.table.valid(page, left, usable);
        let near = whole.intersection(self.table.near);
        if is_first && (!near.is_empty() || whole.count() == 1 && self.is_last(usable)) {
            let nearest = if near.is_empty() { whole } else { near };
            let split = self.new_split(operation, page, left);
            nearest.iter().take(1).for_each(|member| self.send_read(split, member, true));
            return true;
        }
        let count = left.min(RUN_PAGES).min(CHUNK_PAGES - page % CHUNK_PAGES);
        let candidates = self.sources(page, count, MemberSet(0));
        if candidates.is_empty() && self.members.has_new_lanes() {
            return false;
        }
        if candidates.is_empty() {
            let split = self.new_split(operation, page, count);
            self.end_split(split, Err(self.table.gone()));
            return true;
        }
        let Some(member) = self.best(candidates, count) else { return false };
        let split = self.new_split(operation, page, count);
        self.send_read(split, member, false);
        true
    }

    /// Returns the member to read from: the nearest that has a buffer.
    pub(super) fn best(&mut self, candidates: MemberSet, pages: u64) -> Option<usize> {
        self.reads += 1;
        let latency = |member: &usize| match &self.members[*member] {
            Some(known) if !self.table.near.has(*member) => known.latency_ns,
            _ => 0,
        };
        let with_room =
            |member: &usize| self.members[*member].as_ref().is_some_and(|known| known.has_buffer_for_read(pages));
        let best = candidates.iter().filter(with_room).min_by_key(latency)?;
        if self.reads.is_multiple_of(PROBE_EVERY) {
            return candidates.iter().filter(with_room).find(|&member| member != best).or(Some(best));
        }
        Some(best)
    }

    fn split_write(&mut self, operation: usize, page: u64, left: u64, is_first: bool) -> bool {
        // An answer may come after the operation has ended, unless the member is near. So the
        // member must not work on the caller's buffer.
        let usable = self.usable();
        let direct = is_first && self.is_last(usable) && usable.difference(self.table.near).is_empty();
        let count = if direct { left } else { left.min(RUN_PAGES) };
        let known = self.targets(page, count);
        // The authoritative member decides. The bytes that only a left-out member held before must
        // not be lost with it.
        let (table, authoritative) = (&self.table, self.table.authoritative());
        let are_enough = |members: MemberSet| {
            members == known
                || authoritative.is_none_or(|authoritative| members.has(authoritative))
                    && table.keeps(page, count, members)
        };
        let has_room = |member: &MemberLane| direct || member.has_buffer(count);
        let timeout = self.table.write_timeout();
        let Some(usable) = self.members.takers(known, now_ns(), timeout, has_room, are_enough) else { return false };
        let Some(split) = self.begin_write(operation, page, count, usable, known) else { return false };
        for member in usable.iter() {
            let buffer = match direct {
                true => self.operations[operation].as_mut().and_then(|known| known.buffer.take()),
                false => self.copy_of(operation, member, page, count),
            };
            let Some(buffer) = buffer else { break };
            self.send(MirrorRequestOwner::Split(split), member, direct, Op::Write { page: PageId(page), buffer });
        }
        true
    }

    /// Copies a part of the bytes to write into a buffer of one member.
    fn copy_of(&mut self, operation: usize, member: usize, page: u64, count: u64) -> Option<Buffer> {
        let known = self.operations[operation].as_ref()?;
        let whole = known.buffer.as_ref()?;
        let mut own = self.members[member].as_mut()?.take_buffer(count)?;
        for index in 0..count as usize {
            let from = (page - known.page) as usize + index;
            own.page_mut(index).copy_from_slice(whole.page(from));
            own.sums_mut()[index] = whole.sums()[from];
        }
        Some(own)
    }

    /// Sends a change that was not answered to more members: those that hold the pages and were
    /// late when it set out.
    pub(super) fn ask_more(&mut self, split: usize) {
        let Some(MirrorSplit { operation, page, count, .. }) = self.splits[split] else { return };
        let asked = self.splits[split].as_ref().map_or(MemberSet(0), MirrorSplit::requested);
        let Some(kind) = self.operations[operation].as_ref().map(|known| known.kind) else { return };
        for member in self.table.valid(page, count, self.usable()).difference(asked).iter() {
            if self.free_requests.len() < MemberSet::MAX {
                return;
            }
            let page = PageId(page);
            let op = match kind {
                OpKind::Discard => Some(Op::Discard { page, count }),
                _ => self.copy_of(operation, member, page.0, count).map(|buffer| Op::Write { page, buffer }),
            };
            if let Some(op) = op {
                self.send(MirrorRequestOwner::Split(split), member, false, op);
            }
        }
    }

    fn split_discard(&mut self, operation: usize, page: u64, count: u64) -> bool {
        if self.table.is_untouched(page, count) {
            let split = self.new_split(operation, page, count);
            self.end_split(split, Ok(()));
            return true;
        }
        let usable = self.targets(page, count);
        let Some(split) = self.begin_write(operation, page, count, usable, usable) else { return false };
        for member in usable.iter() {
            self.send(MirrorRequestOwner::Split(split), member, false, Op::Discard { page: PageId(page), count });
        }
        true
    }

    /// Begins a split that changes pages at `usable` members, chosen from those that were `known`.
    /// Returns `None` if that cannot be done now.
    fn begin_write(
        &mut self,
        operation: usize,
        page: u64,
        count: u64,
        usable: MemberSet,
        known: MemberSet,
    ) -> Option<usize> {
        let change = self.table.write_epochs.begin();
        if self.members.has_new_lanes() || !self.targets(page, count).difference(known).is_empty() {
            return None;
        }
        if !self.table.begin_write(page, count, usable) {
            return None;
        }
        let split = self.new_split(operation, page, count);
        let ends_at = self.operations[operation].as_ref().map_or(u64::MAX, MirrorOperation::ends_at);
        if let Some(known) = &mut self.splits[split] {
            known.epoch_guard = Some(change);
            if !self.table.is_dual_write() {
                known.ends_at = ends_at;
                known.alarm_at = ends_at.min(now_ns().saturating_add(WRITE_TIMEOUT.as_nanos() as u64));
                self.alarm_at = self.alarm_at.min(known.alarm_at);
            }
        }
        if usable.is_empty() {
            self.end_write(split);
        }
        Some(split)
    }

    pub(super) fn new_split(&mut self, operation: usize, page: u64, count: u64) -> usize {
        let split = self.free_splits.pop().expect("counted before");
        self.splits[split] = Some(MirrorSplit {
            operation,
            page,
            count,
            requests: [None; MemberSet::MAX],
            have: MemberSet(0),
            failed: MemberSet(0),
            wrong: MemberSet(0),
            indeterminate: MemberSet(0),
            error: None,
            alarm_at: u64::MAX,
            degrades_at: u64::MAX,
            ends_at: u64::MAX,
            is_over: false,
            lagging: MemberSet(0),
            is_hedged: false,
            epoch_guard: None,
        });
        if let Some(known) = &mut self.operations[operation] {
            known.split_pages += count;
            known.splits += 1;
        }
        split
    }

    pub(super) fn send_read(&mut self, split: usize, member: usize, direct: bool) {
        let Some(MirrorSplit { operation, page, count, .. }) = self.splits[split] else { return };
        let Some(known) = &mut self.operations[operation] else { return };
        let kind = known.kind;
        let lane = self.members[member].as_mut();
        let buffer = if direct { known.buffer.take() } else { lane.and_then(|lane| lane.take_buffer(count)) };
        let buffer = buffer.expect("looked for before");
        let page = PageId(page);
        self.send(MirrorRequestOwner::Split(split), member, direct, kind.read(page, buffer));
        if !direct && let (Some(known), Some(lane)) = (&mut self.splits[split], &self.members[member]) {
            known.alarm_at = now_ns().saturating_add(lane.hedge_after());
            self.alarm_at = self.alarm_at.min(known.alarm_at);
        }
    }

    /// Sends an operation to a member.
    pub(super) fn send(&mut self, target: MirrorRequestOwner, member: usize, is_direct: bool, op: Op) {
        let now = now_ns();
        let (priority, deadline) = match target {
            MirrorRequestOwner::Split(split) => {
                let operation = self.splits[split].as_ref().and_then(|known| self.operations[known.operation].as_ref());
                let passed = |known: &MirrorOperation| Duration::from_nanos(now.saturating_sub(known.started_at));
                // A deadline of zero would mean that there is none.
                let left = |known: &MirrorOperation| {
                    known.deadline.saturating_sub(passed(known)).max(Duration::from_micros(1))
                };
                operation.map_or((Priority::Demand, Duration::ZERO), |known| (known.priority, left(known)))
            }
            MirrorRequestOwner::Look => (Priority::Background, scrub::READ_DEADLINE),
            _ => (Priority::Background, Copier::DEADLINE),
        };
        let is_change = matches!(op, Op::Write { .. } | Op::Discard { .. });
        // The lane keeps the time of its operations. A member that is late with a change is waited
        // for: until it has answered, it is unknown which bytes it holds.
        let deadline =
            if is_change && !is_direct && !self.table.is_dual_write() { deadline.max(ANSWER_WITHIN) } else { deadline };
        let request = self.free_requests.pop().expect("counted before");
        self.requests[request as usize] =
            Some(MirrorMemberRequest { owner: target, member, is_direct, started_at: now });
        if let MirrorRequestOwner::Split(split) = target
            && let Some(known) = &mut self.splits[split]
        {
            known.requests[member] = Some(request);
        }
        let lane = self.members[member].as_mut().expect("usable");
        lane.submit(LaneRequest { tag: u64::from(request), priority, deadline, op });
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

    /// Copies chunks that a member lacks.
    fn copy(&mut self) {
        self.mark_lagging_copies();
        let Some(mut copier) = self.copier.take() else { return };
        let mut step = None;
        if self.free_requests.len() > 2 * MemberSet::MAX {
            step = copier.start(&self.table, self.usable(), self.connected_members());
        }
        self.copier = Some(copier);
        if let Some((job, step)) = step {
            self.send_copy(job, Some(step));
        }
    }

    fn mark_lagging_copies(&mut self) {
        if let Some(copier) = &mut self.copier {
            copier.mark_lagging(&self.table);
        }
    }

    /// Checks whether this request is late and its member, which has not failed, may still do it.
    fn is_owed(&self, request: &MirrorMemberRequest) -> bool {
        let is_late = match request.owner {
            MirrorRequestOwner::LateWrite => true,
            MirrorRequestOwner::Split(split) => {
                self.splits[split].as_ref().is_some_and(|split| split.lagging.has(request.member))
            }
            MirrorRequestOwner::Copy(job) => self.copier.as_ref().is_some_and(|copier| copier.is_late(job)),
            MirrorRequestOwner::Look | MirrorRequestOwner::Abandoned => false,
        };
        is_late && !self.table.failed().has(request.member)
    }

    pub(super) fn send_copy(&mut self, job: usize, step: Option<(usize, Op)>) {
        if let Some((member, op)) = step {
            self.send(MirrorRequestOwner::Copy(job), member, false, op);
        }
    }
}

impl CompositeLane for MirrorLane {
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
        if !(self.queued.is_empty() && self.retry_reads.is_empty() && self.retry_writes.is_empty()) {
            self.start();
        }
        self.copy();
        scrub::step_scrub(self);
        self.table.give_up_the_silent();
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

impl Repairer for MirrorLane {
    fn is_owed_answers(&self) -> bool {
        self.requests.iter().flatten().any(|request| self.is_owed(request))
    }

    fn is_repairing(&self) -> bool {
        let is_looking = self.scrub_cursor.as_ref().is_some_and(|cursor| cursor.is_looking());
        is_looking || self.copier.as_ref().is_some_and(Copier::is_busy)
    }

    fn finish_repairs(&mut self) {
        scrub::pause(self);
        while self.is_repairing() {
            self.collect();
            self.mark_lagging_copies();
            self.members.sleep(SLEEP_SLICE);
        }
        scrub::go_on(self);
    }
}

impl Lane for MirrorLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let Some(index) = self.free_operations.pop() else { return Err(request) };
        let LaneRequest { tag, priority, deadline, op } = request;
        let (page, count) = op.range();
        let result = check_range((page, count), self.table.pages, self.table.members[0].server);
        let (kind, buffer) = op.into_parts();
        // An operation outside of the region counts as cut already.
        let cut = if result.is_err() { count } else { 0 };
        let (started_at, page) = (now_ns(), page.0);
        let knew = self.connected_members();
        let operation = MirrorOperation {
            tag,
            priority,
            deadline,
            started_at,
            kind,
            page,
            count,
            split_pages: cut,
            splits: 0,
            buffer,
            result,
            knew,
            is_unlucky: false,
        };
        self.operations[index] = Some(operation);
        self.queued.push_back(index);
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
        SLOTS - self.free_operations.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        self.wait_for_members(timeout);
    }
}

impl Drop for MirrorLane {
    fn drop(&mut self) {
        if self.table.is_abandoned() {
            return;
        }
        // A copy that is under way may still land, and until then no other lane can copy there. It
        // has a deadline.
        self.copier.iter_mut().for_each(Copier::give_up);
        scrub::end(self);
        self.finish_repairs();
        // Writes that were not waited for may land, too. If that takes too long, their outcome
        // stays unknown.
        let until = now_ns().saturating_add(FAREWELL_TIMEOUT.as_nanos() as u64);
        while self.is_owed_answers() && now_ns() < until {
            self.collect();
            self.members.sleep(SLEEP_SLICE);
        }
        for request in self.requests.iter().flatten().filter(|request| self.is_owed(request)) {
            if self.table.is_dual_write() {
                self.table.mark_failed(request.member)
            } else {
                self.table.stay_lagging(request.member)
            }
        }
        self.table.give_up_the_silent();
        // A write that is given up here leaves its chunk with a writer, so the chunk is not copied
        // any more.
    }
}
