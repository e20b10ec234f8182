//! Reactions of lanes to the answers of legs, and to missing answers.

use super::lane::MirrorLane;
use super::splits::{MirrorMemberRequest, MirrorOperation, MirrorRequestOwner, MirrorSplit, PIECES};
use crate::backend::OpKind;
use crate::members::{HEDGE_MIN, RUN_PAGES, WRITE_PATIENCE};
use crate::{Buffer, Completion, PoolError};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_os::process::now_ns;

impl MirrorLane {
    /// Sends a read whose leg has failed to another leg, if there is one.
    pub(super) fn retry_read(&mut self, piece: usize) {
        let Some(MirrorSplit { operation: parent, page, count, failed, error, .. }) = self.splits[piece] else {
            return;
        };
        let candidates = self.sources(page, count, failed);
        if candidates.is_empty() && self.members.has_new_lanes() {
            return self.defer_read(piece);
        }
        if candidates.is_empty() {
            return self.end_split(piece, Err(error.unwrap_or(self.table.gone())));
        }
        let is_whole =
            self.operations[parent].as_ref().is_some_and(|known| known.count == count && known.buffer.is_some());
        match self.best(candidates, count) {
            Some(leg) if count <= RUN_PAGES => self.send_read(piece, leg, false),
            _ if is_whole => {
                let leg = candidates.iter().next().expect("not empty");
                self.send_read(piece, leg, true);
            }
            _ => self.defer_read(piece),
        }
    }

    /// Puts a read off until there is room for it, or its time is over.
    fn defer_read(&mut self, piece: usize) {
        self.retry_reads.push_back(piece);
        let Some(known) = &mut self.splits[piece] else { return };
        known.alarm_at = self.operations[known.operation].as_ref().map_or(u64::MAX, MirrorOperation::ends_at);
        self.alarm_at = self.alarm_at.min(known.alarm_at);
    }

    pub(super) fn on_reply(&mut self, Completion { tag, result, buffer }: Completion) {
        let Some(MirrorMemberRequest { owner: target, member: leg, is_direct, started_at }) =
            self.requests[tag as usize].take()
        else {
            return;
        };
        self.free_requests.push(tag as u16);
        if let Err(error @ PoolError::ServerGone { .. }) = result {
            self.table.give_up(leg, error);
        }
        let own = |lane: &mut Self, buffer: Option<Buffer>| {
            if let (Some(buffer), Some(known)) = (buffer, &mut lane.members[leg]) {
                known.give_buffer(buffer);
            }
        };
        match target {
            MirrorRequestOwner::Abandoned => own(self, buffer),
            MirrorRequestOwner::LateWrite => {
                self.on_late_write_reply(leg, result);
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
                if let Some(walker) = &mut self.scrub_cursor {
                    walker.on_reply(&self.table.scrub, result, buffer.as_ref().map_or(&[], Buffer::sums));
                }
                own(self, buffer);
            }
            MirrorRequestOwner::Split(index) => {
                let Some(piece) = &mut self.splits[index] else { return };
                piece.requests[leg] = None;
                if piece.lagging.has(leg) {
                    piece.lagging = piece.lagging.difference(MemberSet::one(leg));
                    match result {
                        Ok(()) => piece.have = piece.have.union(MemberSet::one(leg)),
                        Err(PoolError::TimedOut { .. }) => {
                            piece.indeterminate = piece.indeterminate.union(MemberSet::one(leg))
                        }
                        Err(_) => {}
                    }
                    piece.failed = piece.failed.union(MemberSet::one(leg).difference(piece.have));
                    self.on_late_write_reply(leg, result);
                    own(self, buffer);
                    return self.on_write_reply(index);
                }
                let Some(parent) = &mut self.operations[piece.operation] else { return };
                match result {
                    Ok(()) => piece.have = piece.have.union(MemberSet::one(leg)),
                    Err(error) => {
                        piece.failed = piece.failed.union(MemberSet::one(leg));
                        match error {
                            PoolError::Corrupt { .. } => piece.wrong = piece.wrong.union(MemberSet::one(leg)),
                            PoolError::TimedOut { .. } => {
                                piece.indeterminate = piece.indeterminate.union(MemberSet::one(leg))
                            }
                            _ => {}
                        }
                        // The caller must know that a leg is full, unless it can go on without that
                        // leg. It must know that a leg is gone only if all are.
                        let is_full = matches!(error, PoolError::PoolFull { .. });
                        let is_worse = is_full && self.table.follower() != Some(leg);
                        if is_full && !is_worse {
                            self.table.give_up(leg, error);
                        }
                        if is_worse
                            || !is_full && piece.error.is_none_or(|known| matches!(known, PoolError::ServerGone { .. }))
                        {
                            piece.error = Some(error);
                        }
                    }
                }
                let is_read = matches!(parent.kind, OpKind::Read | OpKind::Part(_));
                if is_direct {
                    parent.buffer = buffer;
                } else {
                    if let (true, Ok(()), Some(from), Some(to)) = (is_read, result, &buffer, &mut parent.buffer) {
                        take_answer(parent.kind, from, to, (piece.page - parent.page) as usize);
                    }
                    own(self, buffer);
                }
                if is_read {
                    self.on_read_reply(index, leg, result.is_ok(), started_at);
                } else {
                    self.on_write_reply(index);
                }
            }
        }
    }

    /// Handles the answer of a leg to a write that was late there.
    fn on_late_write_reply(&mut self, leg: usize, result: Result<(), PoolError>) {
        match result {
            // The write may still arrive, at any time.
            Err(PoolError::TimedOut { .. }) if !self.table.is_dual_write() => return self.table.stay_lagging(leg),
            Err(error) if self.table.is_dual_write() => self.table.give_up(leg, error),
            _ => {}
        }
        self.table.on_late_reply(leg);
    }

    pub(super) fn on_read_reply(&mut self, index: usize, leg: usize, is_answer: bool, started_at: u64) {
        let Some(piece) = &self.splits[index] else { return };
        let (others, wrong, page, count) = (piece.under_way(), piece.wrong, piece.page, piece.count);
        if !is_answer {
            if others.is_empty() {
                self.retry_read(index);
            }
            return;
        }
        let now = now_ns();
        if let Some(known) = &mut self.members[leg] {
            known.took(now.saturating_sub(started_at));
        }
        for slow in others.iter() {
            let asked_at =
                piece.requests[slow].and_then(|errand| Some(self.requests[errand as usize].as_ref()?.started_at));
            // The slow leg was asked earlier, and it is unknown how long it will take. It has taken
            // this long already.
            if let (Some(known), Some(asked_at)) = (&mut self.members[slow], asked_at.filter(|at| *at < started_at)) {
                known.is_slower_than(now.saturating_sub(asked_at));
            }
        }
        for leg in wrong.iter() {
            self.table.suspect(page, count, leg);
        }
        self.end_split(index, Ok(()));
    }

    pub(super) fn on_write_reply(&mut self, index: usize) {
        let Some(piece) = &mut self.splits[index] else { return };
        if piece.under_way().is_empty() {
            self.end_write(index);
        } else if !piece.have.is_empty() && !piece.is_over {
            let now = now_ns();
            if piece.patient_until == u64::MAX {
                piece.patient_until = self.table.counts_with_fewer_at(now);
            }
            // Each answer may complete a sufficient set of legs.
            piece.alarm_at = piece.alarm_at.min(piece.patient_until.max(now));
            self.alarm_at = self.alarm_at.min(piece.alarm_at);
        }
    }

    pub(super) fn end_write(&mut self, index: usize) {
        let Some(piece) = &self.splits[index] else { return };
        if !piece.have.is_empty() {
            // A write that was not answered may still arrive, on top of newer bytes.
            let leader = self.table.authoritative();
            let unsure = piece.indeterminate.difference(self.table.failed());
            unsure.iter().filter(|leg| Some(*leg) != leader).for_each(|leg| self.table.note_indeterminate(leg));
        } else if !piece.indeterminate.is_empty() && piece.is_over {
            // The write may still be made, and its outcome stays unknown: the chunk keeps its
            // writer, so it is not copied.
            return self.drop_split(index);
        }
        let kept = self.table.end_write(piece.page, piece.count, piece.requested(), piece.have);
        if piece.is_over {
            return self.drop_split(index);
        }
        // Only a leg that is not read there any more has the write: it was late meanwhile with a
        // neighbour that others have, or it is being given up. The others shall have this write,
        // too.
        let is_unlucky =
            !kept && !piece.have.is_empty() && self.table.keeps(piece.page, piece.count, self.connected_members());
        let result = match piece.error {
            Some(PoolError::PoolFull { server }) => Err(PoolError::PoolFull { server }),
            _ if is_unlucky => Err(self.table.gone()),
            error if !kept => Err(error.unwrap_or(self.table.gone())),
            _ => Ok(()),
        };
        if let Some(parent) = self.operations[piece.operation].as_mut().filter(|_| is_unlucky) {
            parent.is_unlucky = true;
        }
        self.end_split(index, result);
    }

    fn drop_split(&mut self, index: usize) {
        self.splits[index] = None;
        self.free_splits.push(index);
    }

    /// Ends a write whose time is over while only legs that have not answered can say what became
    /// of it.
    fn end_in_time(&mut self, index: usize, now: u64) {
        let Some(piece) = &mut self.splits[index] else { return };
        (piece.is_over, piece.lagging, piece.alarm_at) = (true, piece.under_way(), u64::MAX);
        let (late, owner) = (piece.lagging, piece.operation);
        late.iter().for_each(|leg| self.table.mark_lagging(leg, now));
        let server = late.iter().next().map_or(0, |leg| self.table.server(leg));
        let Some(parent) = &mut self.operations[owner] else { return };
        parent.result = parent.result.and(Err(PoolError::TimedOut { server, after: parent.deadline }));
        // Pages that have not set out have no time left either.
        parent.split_pages = parent.count;
        parent.splits -= 1;
        self.queued.retain(|queued| *queued != owner);
        self.end_unsplit_operation(owner);
    }

    pub(super) fn end_split(&mut self, index: usize, result: Result<(), PoolError>) {
        let Some(piece) = self.splits[index].take() else { return };
        self.free_splits.push(index);
        let Some(parent) = &mut self.operations[piece.operation] else { return };
        for errand in piece.requests.into_iter().flatten() {
            if let Some(errand) = &mut self.requests[errand as usize] {
                errand.owner = if parent.kind == OpKind::Write || parent.kind == OpKind::Discard {
                    MirrorRequestOwner::LateWrite
                } else {
                    MirrorRequestOwner::Abandoned
                };
            }
        }
        if parent.result.is_ok() {
            parent.result = result;
        }
        parent.splits -= 1;
        self.end_unsplit_operation(piece.operation);
    }

    pub(super) fn end_unsplit_operation(&mut self, index: usize) {
        let is_over = |parent: &MirrorOperation| parent.splits == 0 && parent.split_pages == parent.count;
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

    /// Begins a change anew at legs that came since it began, if legs died under it. Returns
    /// whether it does.
    fn restart_write(&mut self, index: usize) -> bool {
        let Some(MirrorOperation { kind, result: Err(PoolError::ServerGone { .. }), knew, buffer, is_unlucky, .. }) =
            &self.operations[index]
        else {
            return false;
        };
        let is_change = *kind == OpKind::Discard || *kind == OpKind::Write && buffer.is_some();
        let legs = self.connected_members();
        if !is_change || !is_unlucky && !self.members.has_news(legs, *knew) {
            return false;
        }
        if let Some(parent) = &mut self.operations[index] {
            (parent.split_pages, parent.result, parent.knew, parent.is_unlucky) = (0, Ok(()), legs, false);
        }
        true
    }

    /// Checks whether the piece is a read that waits for room and has no time left.
    fn is_read_over(&self, index: usize, now: u64) -> bool {
        let Some(piece) = &self.splits[index] else { return false };
        piece.under_way().is_empty()
            && self.operations[piece.operation].as_ref().is_some_and(|known| known.ends_at() <= now)
    }

    /// Handles a write that has waited long: for a leg that others may do without, or for all the
    /// time that it has.
    fn write_is_slow(&mut self, index: usize, now: u64) {
        let Some(piece) = &self.splits[index] else { return };
        let (slow, ends_at) = (piece.under_way(), piece.ends_at);
        // The legs that have the write may lack the bytes that were there before; then the slow leg
        // is waited for. The leader's answer is waited for, too.
        let is_kept = !piece.have.is_empty() && self.table.keeps(piece.page, piece.count, piece.have);
        let decides = self.table.authoritative().is_some_and(|leader| slow.has(leader));
        let counts_in_the_end = ends_at <= now && self.table.write_patience().is_some();
        if is_kept && !decides && (piece.patient_until <= now || counts_in_the_end) {
            slow.iter().for_each(|leg| self.table.mark_lagging(leg, ends_at));
            return self.end_write(index);
        }
        if ends_at <= now {
            return self.end_in_time(index, now);
        }
        if !is_kept && ends_at != u64::MAX {
            self.ask_more(index);
        }
        let Some(piece) = &mut self.splits[index] else { return };
        let look_at = now.saturating_add(WRITE_PATIENCE.as_nanos() as u64);
        let look_at = if piece.patient_until > now { look_at.min(piece.patient_until) } else { look_at };
        piece.alarm_at = ends_at.min(look_at);
        self.alarm_at = self.alarm_at.min(piece.alarm_at);
    }

    /// Hedges slow reads, and ends writes that only a slow leg lacks, and operations that have no
    /// time left.
    pub(super) fn on_alarm(&mut self, now: u64) {
        self.alarm_at = u64::MAX;
        self.end_queued(now);
        for index in 0..PIECES {
            let Some(piece) = &mut self.splits[index] else { continue };
            if piece.alarm_at > now {
                self.alarm_at = self.alarm_at.min(piece.alarm_at);
                continue;
            }
            piece.alarm_at = u64::MAX;
            if piece.epoch_guard.is_some() {
                self.write_is_slow(index, now);
            } else if self.is_read_over(index, now) {
                self.retry_reads.retain(|piece| *piece != index);
                let (after, server) = (Duration::ZERO, self.table.slow_server());
                self.end_split(index, Err(PoolError::TimedOut { server, after }));
            } else if let Some(piece) = &self.splits[index]
                && !piece.is_hedged
                && !piece.under_way().is_empty()
                && self.free_requests.len() > MemberSet::MAX
            {
                let (page, count, asked) = (piece.page, piece.count, piece.under_way().union(piece.failed));
                let candidates = self.sources(page, count, asked);
                let leg = self.best(candidates, count);
                if let Some(piece) = &mut self.splits[index] {
                    piece.is_hedged = leg.is_some();
                    piece.alarm_at = now.saturating_add(HEDGE_MIN.as_nanos() as u64);
                    self.alarm_at = self.alarm_at.min(piece.alarm_at);
                }
                if let Some(leg) = leg {
                    self.send_read(index, leg, false);
                }
            }
        }
    }
}

/// Copies the answer of a leg to where the caller wants it.
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
