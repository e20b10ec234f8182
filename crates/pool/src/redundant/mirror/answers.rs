//! Reactions of lanes to the answers of members, and to missing answers.

use super::lane::MirrorLane;
use super::splits::{MirrorMemberRequest, MirrorOperation, MirrorRequestOwner, MirrorSplit, SPLITS};
use crate::contract::backend::OpKind;
use crate::redundant::members::{HEDGE_MIN, RUN_PAGES, WRITE_TIMEOUT};
use crate::{Buffer, Completion, PoolError};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_os::process::now_ns;

impl MirrorLane {
    /// Sends a read whose member has failed to another member, if there is one.
    pub(super) fn retry_read(&mut self, split: usize) {
        let Some(MirrorSplit { operation, page, count, failed, error, .. }) = self.splits[split] else {
            return;
        };
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
        self.retry_reads.push_back(split);
        let Some(known) = &mut self.splits[split] else { return };
        known.alarm_at = self.operations[known.operation].as_ref().map_or(u64::MAX, MirrorOperation::ends_at);
        self.alarm_at = self.alarm_at.min(known.alarm_at);
    }

    pub(super) fn on_reply(&mut self, Completion { tag, result, buffer }: Completion) {
        let Some(MirrorMemberRequest { owner: target, member, is_direct, started_at }) =
            self.requests[tag as usize].take()
        else {
            return;
        };
        self.free_requests.push(tag as u16);
        if let Err(error @ PoolError::ServerGone { .. }) = result {
            self.table.give_up(member, error);
        }
        let own = |lane: &mut Self, buffer: Option<Buffer>| {
            if let (Some(buffer), Some(known)) = (buffer, &mut lane.members[member]) {
                known.give_buffer(buffer);
            }
        };
        match target {
            MirrorRequestOwner::Abandoned => own(self, buffer),
            MirrorRequestOwner::LateWrite => {
                self.on_late_write_reply(member, result);
                own(self, buffer);
            }
            MirrorRequestOwner::Copy(job) => {
                if let Some(mut copier) = self.copier.take() {
                    let step = copier.on_end(&self.table, job, result, buffer);
                    self.copier = Some(copier);
                    self.send_copy(job, step);
                }
            }
            MirrorRequestOwner::Look => {
                if let Some(cursor) = &mut self.scrub_cursor {
                    cursor.on_reply(&self.table.scrub, result, buffer.as_ref().map_or(&[], Buffer::sums));
                }
                own(self, buffer);
            }
            MirrorRequestOwner::Split(index) => {
                let Some(split) = &mut self.splits[index] else { return };
                split.requests[member] = None;
                if split.lagging.has(member) {
                    split.lagging = split.lagging.difference(MemberSet::one(member));
                    match result {
                        Ok(()) => split.have = split.have.union(MemberSet::one(member)),
                        Err(PoolError::TimedOut { .. }) => {
                            split.indeterminate = split.indeterminate.union(MemberSet::one(member))
                        }
                        Err(_) => {}
                    }
                    split.failed = split.failed.union(MemberSet::one(member).difference(split.have));
                    self.on_late_write_reply(member, result);
                    own(self, buffer);
                    return self.on_write_reply(index);
                }
                let Some(operation) = &mut self.operations[split.operation] else { return };
                match result {
                    Ok(()) => split.have = split.have.union(MemberSet::one(member)),
                    Err(error) => {
                        split.failed = split.failed.union(MemberSet::one(member));
                        match error {
                            PoolError::Corrupt { .. } => split.wrong = split.wrong.union(MemberSet::one(member)),
                            PoolError::TimedOut { .. } => {
                                split.indeterminate = split.indeterminate.union(MemberSet::one(member))
                            }
                            _ => {}
                        }
                        // The caller must know that a member is full, unless it can go on without
                        // that member. It must know that a member is gone only if all are.
                        let is_full = matches!(error, PoolError::PoolFull { .. });
                        let is_worse = is_full && self.table.follower() != Some(member);
                        if is_full && !is_worse {
                            self.table.give_up(member, error);
                        }
                        if is_worse
                            || !is_full && split.error.is_none_or(|known| matches!(known, PoolError::ServerGone { .. }))
                        {
                            split.error = Some(error);
                        }
                    }
                }
                let is_read = matches!(operation.kind, OpKind::Read | OpKind::Part(_));
                if is_direct {
                    operation.buffer = buffer;
                } else {
                    if let (true, Ok(()), Some(from), Some(to)) = (is_read, result, &buffer, &mut operation.buffer) {
                        take_answer(operation.kind, from, to, (split.page - operation.page) as usize);
                    }
                    own(self, buffer);
                }
                if is_read {
                    self.on_read_reply(index, member, result.is_ok(), started_at);
                } else {
                    self.on_write_reply(index);
                }
            }
        }
    }

    /// Handles the answer of a member to a write that was late there.
    fn on_late_write_reply(&mut self, member: usize, result: Result<(), PoolError>) {
        match result {
            // The write may still arrive, at any time.
            Err(PoolError::TimedOut { .. }) if !self.table.is_dual_write() => return self.table.stay_lagging(member),
            Err(error) if self.table.is_dual_write() => self.table.give_up(member, error),
            _ => {}
        }
        self.table.on_late_reply(member);
    }

    pub(super) fn on_read_reply(&mut self, index: usize, member: usize, is_answer: bool, started_at: u64) {
        let Some(split) = &self.splits[index] else { return };
        let (others, wrong, page, count) = (split.under_way(), split.wrong, split.page, split.count);
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

    pub(super) fn on_write_reply(&mut self, index: usize) {
        let Some(split) = &mut self.splits[index] else { return };
        if split.under_way().is_empty() {
            self.end_write(index);
        } else if !split.have.is_empty() && !split.is_over {
            let now = now_ns();
            if split.degrades_at == u64::MAX {
                split.degrades_at = self.table.counts_with_fewer_at(now);
            }
            // Each answer may complete a sufficient set of members.
            split.alarm_at = split.alarm_at.min(split.degrades_at.max(now));
            self.alarm_at = self.alarm_at.min(split.alarm_at);
        }
    }

    pub(super) fn end_write(&mut self, index: usize) {
        let Some(split) = &self.splits[index] else { return };
        if !split.have.is_empty() {
            // A write that was not answered may still arrive, on top of newer bytes.
            let authoritative = self.table.authoritative();
            let unsure = split.indeterminate.difference(self.table.failed());
            unsure
                .iter()
                .filter(|member| Some(*member) != authoritative)
                .for_each(|member| self.table.note_indeterminate(member));
        } else if !split.indeterminate.is_empty() && split.is_over {
            // The write may still be made, and its outcome stays unknown: the chunk keeps its
            // writer, so it is not copied.
            return self.drop_split(index);
        }
        let kept = self.table.end_write(split.page, split.count, split.requested(), split.have);
        if split.is_over {
            return self.drop_split(index);
        }
        // Only a member that is not read there any more has the write: it was late meanwhile with a
        // neighbour that others have, or it is being given up. The others shall have this write,
        // too.
        let is_unlucky =
            !kept && !split.have.is_empty() && self.table.keeps(split.page, split.count, self.connected_members());
        let result = match split.error {
            Some(PoolError::PoolFull { server }) => Err(PoolError::PoolFull { server }),
            _ if is_unlucky => Err(self.table.gone()),
            error if !kept => Err(error.unwrap_or(self.table.gone())),
            _ => Ok(()),
        };
        if let Some(operation) = self.operations[split.operation].as_mut().filter(|_| is_unlucky) {
            operation.is_unlucky = true;
        }
        self.end_split(index, result);
    }

    fn drop_split(&mut self, index: usize) {
        self.splits[index] = None;
        self.free_splits.push(index);
    }

    /// Ends a write whose time is over while only members that have not answered can say what
    /// became of it.
    fn end_in_time(&mut self, index: usize, now: u64) {
        let Some(split) = &mut self.splits[index] else { return };
        (split.is_over, split.lagging, split.alarm_at) = (true, split.under_way(), u64::MAX);
        let (late, owner) = (split.lagging, split.operation);
        late.iter().for_each(|member| self.table.mark_lagging(member, now));
        let server = late.iter().next().map_or(0, |member| self.table.server(member));
        let Some(operation) = &mut self.operations[owner] else { return };
        operation.result = operation.result.and(Err(PoolError::TimedOut { server, after: operation.deadline }));
        // Pages that have not set out have no time left either.
        operation.split_pages = operation.count;
        operation.splits -= 1;
        self.queued.retain(|queued| *queued != owner);
        self.end_unsplit_operation(owner);
    }

    pub(super) fn end_split(&mut self, index: usize, result: Result<(), PoolError>) {
        let Some(split) = self.splits[index].take() else { return };
        self.free_splits.push(index);
        let Some(operation) = &mut self.operations[split.operation] else { return };
        for request in split.requests.into_iter().flatten() {
            if let Some(request) = &mut self.requests[request as usize] {
                request.owner = if operation.kind == OpKind::Write || operation.kind == OpKind::Discard {
                    MirrorRequestOwner::LateWrite
                } else {
                    MirrorRequestOwner::Abandoned
                };
            }
        }
        if operation.result.is_ok() {
            operation.result = result;
        }
        operation.splits -= 1;
        self.end_unsplit_operation(split.operation);
    }

    pub(super) fn end_unsplit_operation(&mut self, index: usize) {
        let is_over = |operation: &MirrorOperation| operation.splits == 0 && operation.split_pages == operation.count;
        if !self.operations[index].as_ref().is_some_and(is_over) || self.queued.contains(&index) {
            return;
        }
        if self.restart_write(index) {
            return self.retry_writes.push(index);
        }
        if let Some(MirrorOperation { tag, buffer, result, .. }) = self.operations[index].take() {
            self.free_operations.push(index);
            self.ended.push_back(Completion { tag, result, buffer });
        }
    }

    /// Retries a change at members that came since it began, if members died under it. Returns
    /// whether it does.
    fn restart_write(&mut self, index: usize) -> bool {
        let Some(MirrorOperation { kind, result: Err(PoolError::ServerGone { .. }), knew, buffer, is_unlucky, .. }) =
            &self.operations[index]
        else {
            return false;
        };
        let is_change = *kind == OpKind::Discard || *kind == OpKind::Write && buffer.is_some();
        let members = self.connected_members();
        if !is_change || !is_unlucky && !self.members.has_news(members, *knew) {
            return false;
        }
        if let Some(operation) = &mut self.operations[index] {
            (operation.split_pages, operation.result, operation.knew, operation.is_unlucky) =
                (0, Ok(()), members, false);
        }
        true
    }

    /// Checks whether the split is a read that waits for room and has no time left.
    fn is_read_over(&self, index: usize, now: u64) -> bool {
        let Some(split) = &self.splits[index] else { return false };
        split.under_way().is_empty()
            && self.operations[split.operation].as_ref().is_some_and(|known| known.ends_at() <= now)
    }

    /// Handles a write that has waited long: for a member that others may do without, or for all
    /// the time that it has.
    fn write_is_slow(&mut self, index: usize, now: u64) {
        let Some(split) = &self.splits[index] else { return };
        let (slow, ends_at) = (split.under_way(), split.ends_at);
        // The members that have the write may lack the bytes that were there before; then the slow
        // member is waited for. The answer of the authoritative member is waited for, too.
        let is_kept = !split.have.is_empty() && self.table.keeps(split.page, split.count, split.have);
        let decides = self.table.authoritative().is_some_and(|authoritative| slow.has(authoritative));
        let counts_in_the_end = ends_at <= now && self.table.write_timeout().is_some();
        if is_kept && !decides && (split.degrades_at <= now || counts_in_the_end) {
            slow.iter().for_each(|member| self.table.mark_lagging(member, ends_at));
            return self.end_write(index);
        }
        if ends_at <= now {
            return self.end_in_time(index, now);
        }
        if !is_kept && ends_at != u64::MAX {
            self.ask_more(index);
        }
        let Some(split) = &mut self.splits[index] else { return };
        let look_at = now.saturating_add(WRITE_TIMEOUT.as_nanos() as u64);
        let look_at = if split.degrades_at > now { look_at.min(split.degrades_at) } else { look_at };
        split.alarm_at = ends_at.min(look_at);
        self.alarm_at = self.alarm_at.min(split.alarm_at);
    }

    /// Hedges slow reads, and ends writes that only a slow member lacks, and operations that have
    /// no time left.
    pub(super) fn on_alarm(&mut self, now: u64) {
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
            } else if self.is_read_over(index, now) {
                self.retry_reads.retain(|split| *split != index);
                let (after, server) = (Duration::ZERO, self.table.slow_server());
                self.end_split(index, Err(PoolError::TimedOut { server, after }));
            } else if let Some(split) = &self.splits[index]
                && !split.is_hedged
                && !split.under_way().is_empty()
                && self.free_requests.len() > MemberSet::MAX
            {
                let (page, count, asked) = (split.page, split.count, split.under_way().union(split.failed));
                let candidates = self.sources(page, count, asked);
                let member = self.best(candidates, count);
                if let Some(split) = &mut self.splits[index] {
                    split.is_hedged = member.is_some();
                    split.alarm_at = now.saturating_add(HEDGE_MIN.as_nanos() as u64);
                    self.alarm_at = self.alarm_at.min(split.alarm_at);
                }
                if let Some(member) = member {
                    self.send_read(index, member, false);
                }
            }
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
