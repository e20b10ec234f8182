//! How a mirror cuts operations: a write's split goes to every member, a read's to one.
//!
//! Only where a member is near, or the only one, does it get the caller's buffer itself. A write that
//! only a silent member could make last fails when its time is over. Its split goes on: until the
//! member has answered nobody copies the chunk.

use super::copier::Copier;
use super::replica_map::{CHUNK_PAGES, ReplicaMap};
use super::splits::{MirrorSplit, MirrorTask};
use crate::contract::backend::OpKind;
use crate::redundant::lane::{RedundantLane, SPLITS};
use crate::redundant::member_lanes::{CompositeLane, MemberLanes};
use crate::redundant::members::{MemberLane, RUN_PAGES, WRITE_TIMEOUT};
use crate::redundant::operation::Operation;
use crate::redundant::repair::Repairer;
use crate::redundant::scheme::{MEMBER_REQUESTS, Scheme};
use crate::redundant::split::{RequestOwner, Split, SplitReply};
use crate::{Buffer, Lane, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most pages of one split of a discard, which bounds how many words are changed at once.
const DISCARD_PAGES: u64 = 256 * CHUNK_PAGES;
/// Period, in reads, after which one read goes to another member than the best, because that member
/// may have become better.
const PROBE_EVERY: u64 = 4096;

/// Lane of a mirror.
pub(crate) type MirrorLane = RedundantLane<MirrorScheme>;

/// What a lane keeps for a mirror.
pub(crate) struct MirrorScheme {
    /// Reads whose member failed and for which no other member had room.
    pub(super) retry_reads: VecDeque<usize>,
    pub(super) copier: Option<Copier>,
    reads: u64,
}

impl MirrorLane {
    /// Creates a lane of a dual write over a lane to the new member. It has no lane to the old
    /// member yet.
    pub(crate) fn over_target(table: &Arc<ReplicaMap>, lane: Box<dyn Lane>) -> MirrorLane {
        MirrorLane::over(table, MemberLanes::new(vec![None, Some(MemberLane::new(lane, MEMBER_REQUESTS))]), 0)
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
        self.scheme.reads += 1;
        let latency = |member: &usize| match &self.members[*member] {
            Some(known) if !self.table.near.has(*member) => known.latency_ns,
            _ => 0,
        };
        let with_room =
            |member: &usize| self.members[*member].as_ref().is_some_and(|known| known.has_buffer_for_read(pages));
        let best = candidates.iter().filter(with_room).min_by_key(latency)?;
        if self.scheme.reads.is_multiple_of(PROBE_EVERY) {
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
            self.send(split, member, direct, Op::Write { page: PageId(page), buffer });
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
        let Some(known) = &self.splits[split] else { return };
        let (MirrorTask { operation, page, count, .. }, asked) = (known.task, known.requested());
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
                self.send(split, member, false, op);
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
            self.send(split, member, false, Op::Discard { page: PageId(page), count });
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
        let ends_at = self.operations[operation].as_ref().map_or(u64::MAX, Operation::ends_at);
        if let Some(known) = &mut self.splits[split] {
            known.epoch_guard = Some(change);
            if !self.table.is_dual_write() {
                known.ends_at = ends_at;
                self.set_alarm(split, ends_at.min(now_ns().saturating_add(WRITE_TIMEOUT.as_nanos() as u64)));
            }
        }
        if usable.is_empty() {
            self.end_write(split);
        }
        Some(split)
    }

    fn new_split(&mut self, operation: usize, page: u64, count: u64) -> usize {
        if let Some(known) = &mut self.operations[operation] {
            known.split_pages += count;
        }
        self.add_split(Split::new(MirrorTask { operation, page, count, is_over: false, is_hedged: false }))
    }

    pub(super) fn send_read(&mut self, split: usize, member: usize, direct: bool) {
        let Some(MirrorTask { operation, page, count, .. }) = self.splits[split].as_ref().map(|known| known.task)
        else {
            return;
        };
        let Some(known) = &mut self.operations[operation] else { return };
        let kind = known.kind;
        let lane = self.members[member].as_mut();
        let buffer = if direct { known.buffer.take() } else { lane.and_then(|lane| lane.take_buffer(count)) };
        let buffer = buffer.expect("looked for before");
        let page = PageId(page);
        self.send(split, member, direct, kind.read(page, buffer));
        if let Some(lane) = self.members[member].as_ref().filter(|_| !direct) {
            self.set_alarm(split, now_ns().saturating_add(lane.hedge_after()));
        }
    }

    fn mark_lagging_copies(&mut self) {
        if let Some(copier) = &mut self.scheme.copier {
            copier.mark_lagging(&self.table);
        }
    }

    fn send_copy(&mut self, job: usize, step: Option<(usize, Op)>) {
        if let Some((member, op)) = step {
            let urgency = (Priority::Background, MirrorScheme::REPAIR_DEADLINE);
            self.send_request(RequestOwner::Repair(job), member, now_ns(), urgency, false, op);
        }
    }
}

impl Scheme for MirrorScheme {
    type Map = ReplicaMap;
    type Task = MirrorTask;

    fn new(_map: &ReplicaMap, repairs_max: usize) -> MirrorScheme {
        MirrorScheme {
            retry_reads: VecDeque::with_capacity(SPLITS),
            copier: (repairs_max > 0).then(|| Copier::new(repairs_max)),
            reads: 0,
        }
    }

    fn split_next(lane: &mut MirrorLane, operation: usize) -> bool {
        // Each member must have a request, and others too if one fails.
        if lane.free_splits.is_empty() || lane.free_requests.len() < MemberSet::MAX {
            return false;
        }
        let Some(known) = &lane.operations[operation] else { return true };
        let (page, left, is_first) =
            (known.page + known.split_pages, known.count - known.split_pages, known.split_pages == 0);
        match known.kind {
            OpKind::Read | OpKind::Part(_) => lane.split_read(operation, page, left, is_first),
            OpKind::Write => lane.split_write(operation, page, left, is_first),
            OpKind::Discard => lane.split_discard(operation, page, left.min(DISCARD_PAGES)),
        }
    }

    fn resume_reads(lane: &mut MirrorLane) {
        for _ in 0..lane.scheme.retry_reads.len() {
            let Some(split) = lane.scheme.retry_reads.pop_front() else { break };
            lane.retry_read(split);
        }
    }

    fn has_waiting_reads(&self) -> bool {
        !self.retry_reads.is_empty()
    }

    fn urgency(lane: &MirrorLane, split: &MirrorSplit, now: u64) -> Option<(Priority, Duration)> {
        lane.operations[split.task.operation].as_ref().map(|known| (known.priority, known.time_left(now)))
    }

    fn on_reply(lane: &mut MirrorLane, split: usize, reply: SplitReply) {
        lane.on_split_reply(split, reply);
    }

    fn on_alarm(lane: &mut MirrorLane, split: usize, now: u64) {
        lane.read_is_slow(split, now);
    }

    fn may_degrade(_lane: &MirrorLane, split: &MirrorSplit) -> bool {
        !split.done.is_empty() && !split.task.is_over
    }

    fn has_enough(lane: &MirrorLane, split: &MirrorSplit) -> bool {
        // The members that have the write may lack the bytes that were there before; then the slow
        // member is waited for. The answer of the authoritative member is waited for, too.
        let is_kept = !split.done.is_empty() && lane.table.keeps(split.task.page, split.task.count, split.done);
        is_kept && lane.table.authoritative().is_none_or(|authoritative| !split.under_way().has(authoritative))
    }

    fn ask_more(lane: &mut MirrorLane, split: usize, has_enough: bool, now: u64) -> u64 {
        if !has_enough && !lane.table.is_dual_write() {
            lane.ask_more(split);
        }
        now.saturating_add(WRITE_TIMEOUT.as_nanos() as u64)
    }

    fn end_write(lane: &mut MirrorLane, split: usize) {
        lane.end_write(split);
    }

    fn end_in_time(lane: &mut MirrorLane, split: usize, late: MemberSet, _now: u64) {
        lane.end_in_time(split, late);
    }

    fn begin_repair(lane: &mut MirrorLane) {
        lane.mark_lagging_copies();
        let Some(mut copier) = lane.scheme.copier.take() else { return };
        let mut step = None;
        if lane.free_requests.len() > 2 * MemberSet::MAX {
            step = copier.start(&lane.table, lane.usable(), lane.connected_members());
        }
        lane.scheme.copier = Some(copier);
        if let Some((job, step)) = step {
            lane.send_copy(job, Some(step));
        }
    }

    fn is_repairing(lane: &MirrorLane) -> bool {
        lane.scheme.copier.as_ref().is_some_and(Copier::is_busy)
    }

    fn on_repair_reply(lane: &mut MirrorLane, job: usize, result: Result<(), PoolError>, buffer: Option<Buffer>) {
        if let Some(mut copier) = lane.scheme.copier.take() {
            let step = copier.on_end(&lane.table, job, result, buffer);
            lane.scheme.copier = Some(copier);
            lane.send_copy(job, step);
        }
    }

    fn is_late(&self, job: usize) -> bool {
        self.copier.as_ref().is_some_and(|copier| copier.is_late(job))
    }

    fn finish_repairs(lane: &mut MirrorLane) {
        lane.collect();
        lane.mark_lagging_copies();
    }

    fn cut_repairs_short(&mut self) {
        self.copier.iter_mut().for_each(Copier::give_up);
    }
}
