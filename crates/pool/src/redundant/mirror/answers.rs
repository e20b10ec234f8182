//! Reactions of a mirror's lanes to the answers of members, and to missing answers.

use super::lane::MirrorLane;
use super::splits::MirrorTask;
use crate::contract::backend::OpKind;
use crate::redundant::members::{HEDGE_MIN, RUN_PAGES};
use crate::redundant::operation::Operation;
use crate::redundant::split::SplitReply;
use crate::{Buffer, PoolError};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_os::process::now_ns;

impl MirrorLane {
    /// Sends a read whose member has failed to another member, if there is one.
    pub(super) fn retry_read(&mut self, split: usize) {
        let Some(known) = &self.splits[split] else { return };
        let (MirrorTask { operation, page, count, .. }, failed, error) = (known.task, known.failed, known.error);
        let candidates = self.sources(page, count, failed);
        if candidates.is_empty() && self.members.has_new_lanes() {
            return self.defer_read(split);
        }
        if candidates.is_empty() {
            return self.end_split(split, Err(error.unwrap_or(self.table.gone())));
        }
        let is_whole =
            self.operations[operation].as_ref().is_some_and(|known| known.count == count && known.buffer.is_some());
        match self.best(candidates, count) {
            Some(member) if count <= RUN_PAGES => self.send_read(split, member, false),
            _ if is_whole => {
                let member = candidates.iter().next().expect("not empty");
                self.send_read(split, member, true);
            }
            _ => self.defer_read(split),
        }
    }

    /// Puts a read off until there is room for it, or its time is over.
    fn defer_read(&mut self, split: usize) {
        self.scheme.retry_reads.push_back(split);
        let Some(known) = &self.splits[split] else { return };
        let ends_at = self.operations[known.task.operation].as_ref().map_or(u64::MAX, Operation::ends_at);
        self.set_alarm(split, ends_at);
    }

    pub(super) fn on_split_reply(&mut self, index: usize, reply: SplitReply) {
        let SplitReply { member, result, buffer, started_at, is_direct, is_late } = reply;
        // The operation of a late write may have ended, and another may have its place.
        if is_late {
            self.give_buffer(member, buffer);
            return self.on_write_reply(index);
        }
        let Some(MirrorTask { operation, page, .. }) = self.splits[index].as_ref().map(|split| split.task) else {
            return;
        };
        let Some(operation) = &mut self.operations[operation] else { return };
        let is_read = !operation.is_change();
        if is_direct {
            operation.buffer = buffer;
        } else {
            if let (true, Ok(()), Some(from), Some(to)) = (is_read, result, &buffer, &mut operation.buffer) {
                take_answer(operation.kind, from, to, (page - operation.page) as usize);
            }
            self.give_buffer(member, buffer);
        }
        if is_read {
            self.on_read_reply(index, member, result.is_ok(), started_at);
        } else {
            self.on_write_reply(index);
        }
    }

    fn on_read_reply(&mut self, index: usize, member: usize, is_answer: bool, started_at: u64) {
        let Some(split) = &self.splits[index] else { return };
        let (others, wrong, page, count) = (split.under_way(), split.wrong, split.task.page, split.task.count);
        if !is_answer {
            if others.is_empty() {
                self.retry_read(index);
            }
            return;
        }
        let now = now_ns();
        if let Some(known) = &mut self.members[member] {
            known.took(now.saturating_sub(started_at));
        }
        for slow in others.iter() {
            let asked_at =
                split.requests[slow].and_then(|request| Some(self.requests[request as usize].as_ref()?.started_at));
            // The slow member was asked earlier, and it is unknown how long it will take. It has
            // taken this long already.
            if let (Some(known), Some(asked_at)) = (&mut self.members[slow], asked_at.filter(|at| *at < started_at)) {
                known.is_slower_than(now.saturating_sub(asked_at));
            }
        }
        for member in wrong.iter() {
            self.table.suspect(page, count, member);
        }
        self.end_split(index, Ok(()));
    }

    pub(super) fn end_write(&mut self, index: usize) {
        let Some(split) = &self.splits[index] else { return };
        if !split.done.is_empty() {
            // A write that was not answered may still arrive, on top of newer bytes.
            let authoritative = self.table.authoritative();
            let unsure = split.indeterminate.difference(self.table.failed());
            unsure
                .iter()
                .filter(|member| Some(*member) != authoritative)
                .for_each(|member| self.table.note_indeterminate(member));
        } else if !split.indeterminate.is_empty() && split.task.is_over {
            // The write may still be made, and its outcome stays unknown: the chunk keeps its
            // writer, so it is not copied.
            self.close_split(index);
            return;
        }
        let kept = self.table.end_write(split.task.page, split.task.count, split.requested(), split.done);
        if split.task.is_over {
            self.close_split(index);
            return;
        }
        // Only a member that is not read there any more has the write: it was late meanwhile with a
        // neighbour that others have, or it is being given up. The others shall have this write,
        // too.
        let is_unlucky = !kept
            && !split.done.is_empty()
            && self.table.keeps(split.task.page, split.task.count, self.connected_members());
        let result = match split.error {
            Some(PoolError::PoolFull { server }) => Err(PoolError::PoolFull { server }),
            _ if is_unlucky => Err(self.table.gone()),
            error if !kept => Err(error.unwrap_or(self.table.gone())),
            _ => Ok(()),
        };
        if let Some(operation) = self.operations[split.task.operation].as_mut().filter(|_| is_unlucky) {
            operation.is_unlucky = true;
        }
        self.end_split(index, result);
    }

    /// Ends the operation of a write whose time is over while only members that have not answered
    /// can say what became of it.
    pub(super) fn end_in_time(&mut self, index: usize, late: MemberSet) {
        let Some(split) = &mut self.splits[index] else { return };
        (split.task.is_over, split.lagging, split.alarm_at) = (true, late, u64::MAX);
        let MirrorTask { operation: owner, count, .. } = split.task;
        let server = late.iter().next().map_or(0, |member| self.table.server(member));
        let Some(operation) = &mut self.operations[owner] else { return };
        let error = PoolError::TimedOut { server, after: operation.deadline };
        // Pages that have not set out have no time left either.
        let unsent = operation.drop_unsent();
        self.queued.retain(|queued| *queued != owner);
        self.end_pages(owner, unsent + count, Err(error));
    }

    pub(super) fn end_split(&mut self, index: usize, result: Result<(), PoolError>) {
        if let Some(split) = self.close_split(index) {
            self.end_pages(split.task.operation, split.task.count, result);
        }
    }

    /// Hedges a slow read, or ends one that waits for room and has no time left.
    pub(super) fn read_is_slow(&mut self, index: usize, now: u64) {
        let Some(split) = &self.splits[index] else { return };
        let (MirrorTask { operation, page, count, is_hedged, .. }, under_way) = (split.task, split.under_way());
        if under_way.is_empty() {
            if self.operations[operation].as_ref().is_some_and(|known| known.ends_at() <= now) {
                self.scheme.retry_reads.retain(|split| *split != index);
                let (after, server) = (Duration::ZERO, self.table.slow_server());
                self.end_split(index, Err(PoolError::TimedOut { server, after }));
            }
            return;
        }
        if is_hedged || self.free_requests.len() <= MemberSet::MAX {
            return;
        }
        let candidates = self.sources(page, count, under_way.union(split.failed));
        let member = self.best(candidates, count);
        if let Some(split) = &mut self.splits[index] {
            split.task.is_hedged = member.is_some();
        }
        self.set_alarm(index, now.saturating_add(HEDGE_MIN.as_nanos() as u64));
        if let Some(member) = member {
            self.send_read(index, member, false);
        }
    }
}

/// Copies the answer of a member to where the caller wants it.
fn take_answer(kind: OpKind, from: &Buffer, to: &mut Buffer, first: usize) {
    if let OpKind::Part(part) = kind {
        to.page_mut(first)[part.range()].copy_from_slice(&from.page(0)[part.range()]);
        to.sums_mut()[first] = from.sums()[0];
        return;
    }
    for index in 0..from.pages() {
        to.page_mut(first + index).copy_from_slice(from.page(index));
        to.sums_mut()[first + index] = from.sums()[index];
    }
}
