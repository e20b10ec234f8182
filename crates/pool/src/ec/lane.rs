//! Channel of one thread to all legs of an erasure-coded pool.
//!
//! An operation is cut into *pieces*. Pages that lie in the same part of neighbouring rows are read
//! together. Pages that are written at the same time share rows, whichever operations they belong
//! to. A leg's part of a piece is an *errand*, with bytes of its own, so a piece can end while a
//! leg still works on its errand.

use super::care::Care;
use super::pieces::{Errand, For, Kind, PIECES, Parent, Piece, ROWS, Task};
use super::table::RowTable;
use crate::backend::{Kind as Asked, check_range, hand_over};
use crate::healer::Nurse;
use crate::leg_lanes::{LegLanes, Legged, SLEEP_SLICE};
use crate::legs::{ANSWER_WITHIN, FAREWELL_PATIENCE, HEDGE_MIN};
use crate::scrub::{self, Walker};
use crate::{Buffer, Completion, Lane, Op, PoolError, Priority, Request};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId, checksum};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations that one lane has under way.
const SLOTS: usize = 256;
/// Most errands that one lane has under way.
pub(super) const ERRANDS: usize = 1024;
/// Number of pages that a discard forgets in one go.
const DISCARD_PAGES: u64 = 1 << 16;
/// Time limit of one step of background care. (Tests have less time.)
pub(super) const CARE_DEADLINE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

pub(super) struct EcLane {
    pub(super) table: Arc<RowTable>,
    pub(super) legs: LegLanes,
    /// Operations of callers, and behind them that of `care`.
    pub(super) parents: Box<[Option<Parent>]>,
    free_parents: Vec<usize>,
    /// Operations of which not all pages have set out.
    pub(super) queued: VecDeque<usize>,
    pub(super) pieces: Box<[Option<Piece>]>,
    pub(super) free_pieces: Vec<usize>,
    /// Writes whose legs died, to be made anew at legs that came meanwhile.
    pub(super) anew: Vec<usize>,
    /// Pages that have to be read again, because they lie elsewhere by now: parent, offset, count.
    pub(super) again: VecDeque<(usize, u64, u64)>,
    /// Pieces that have to read several parts and found no buffers for that.
    pub(super) starved: VecDeque<usize>,
    /// Spare lists for the entries of pieces that write.
    pub(super) entries: Vec<Vec<super::pieces::Entry>>,
    pub(super) errands: Box<[Option<Errand>]>,
    pub(super) free_errands: Vec<u16>,
    arrived: Vec<Completion>,
    ended: VecDeque<Completion>,
    pub(super) care: Option<Care>,
    /// Scrub of this lane, if it is the one that takes care and there is a scrub.
    pub(super) walker: Option<Box<Walker>>,
    /// When to look at the alarms of pieces.
    pub(super) alarm_at: u64,
    pub(super) slow_reads: u64,
    pub(super) zero_sum: u64,
}

impl EcLane {
    /// Opens a lane with up to `cares` pieces of background care at a time.
    pub(super) fn open(table: &Arc<RowTable>, cares: usize) -> Result<EcLane, PoolError> {
        let door = table.new_door();
        let legs = LegLanes::behind(table.open_lanes(ERRANDS)?, door);
        let batch = ROWS * table.code.data();
        Ok(EcLane {
            table: table.clone(),
            legs,
            parents: std::iter::repeat_with(|| None).take(SLOTS + 1).collect(),
            free_parents: (0..SLOTS).rev().collect(),
            queued: VecDeque::with_capacity(SLOTS + 1),
            pieces: std::iter::repeat_with(|| None).take(PIECES).collect(),
            free_pieces: (0..PIECES).rev().collect(),
            anew: Vec::with_capacity(SLOTS),
            again: VecDeque::with_capacity(PIECES * ROWS),
            starved: VecDeque::with_capacity(PIECES),
            entries: (0..32).map(|_| Vec::with_capacity(batch)).collect(),
            errands: std::iter::repeat_with(|| None).take(ERRANDS).collect(),
            free_errands: (0..ERRANDS as u16).rev().collect(),
            arrived: Vec::with_capacity(64),
            ended: VecDeque::with_capacity(SLOTS),
            care: (cares > 0).then(|| Care::new(cares, batch)),
            walker: (cares > 0 && table.scrub.is_on()).then(|| Box::new(Walker::new())),
            alarm_at: u64::MAX,
            slow_reads: 0,
            zero_sum: checksum(&[0; PAGE_BYTES]),
        })
    }

    /// Index of the parent whose pages are moved.
    pub(super) const MOVER: usize = SLOTS;

    /// Checks whether nothing is under way at any leg. Then the lane needs a lost leg for nothing
    /// more, and the way to it can go.
    fn is_at_rest(&self) -> bool {
        self.free_pieces.len() == PIECES && self.free_errands.len() == ERRANDS && !self.is_caring()
    }

    /// Returns the legs that this lane can use now.
    pub(super) fn usable(&self) -> MemberSet {
        self.legs.open(self.table.active())
    }

    /// Returns the legs that are not lost and that this lane has a way to.
    pub(super) fn open_legs(&self) -> MemberSet {
        self.legs.open(self.table.present())
    }

    /// Checks whether there is room for one more piece, whatever it needs.
    pub(super) fn has_room(&self) -> bool {
        !self.free_pieces.is_empty() && self.free_errands.len() >= 2 * MemberSet::MAX
    }

    /// Cuts queued operations into pieces, demand first, as far as there is room.
    fn start(&mut self) {
        self.legs.submit_waiting();
        for parent in self.anew.drain(..) {
            self.queued.push_back(parent);
        }
        for _ in 0..self.starved.len() {
            let Some(piece) = self.starved.pop_front() else { break };
            self.widen(piece);
        }
        while let Some((parent, offset, count)) = self.again.pop_front() {
            let Some(taken) = self.cut_read(parent, offset, count) else {
                self.again.push_front((parent, offset, count));
                break;
            };
            if taken < count {
                self.again.push_front((parent, offset + taken, count - taken));
            }
        }
        while let Some(index) = self.next_queued() {
            let parent = self.queued[index];
            if !self.cut(parent) {
                return self.look_after_queue();
            }
            if let Some(index) = self.queued.iter().position(|&queued| queued == parent) {
                self.queued.remove(index);
            }
            self.end_parent_without_pages(parent);
        }
    }

    /// Sets the alarm so that an operation that waits for room does not wait beyond its deadline.
    fn look_after_queue(&mut self) {
        let ends = self.queued.iter().filter_map(|parent| Some(self.parents[*parent].as_ref()?.ends_at()));
        self.alarm_at = ends.fold(self.alarm_at, u64::min);
    }

    /// Ends operations that wait for room and have no time left.
    fn end_queued(&mut self, now: u64) {
        for place in (0..self.queued.len()).rev() {
            let parent = self.queued[place];
            let Some(known) = self.parents[parent].as_mut().filter(|known| known.ends_at() <= now) else { continue };
            let (left, after) = (known.count - known.cut, known.deadline);
            known.cut = known.count;
            self.queued.remove(place);
            let error = PoolError::TimedOut { server: self.table.slow_server(), after };
            self.end_pages(parent, left, Err(error));
        }
        if !self.queued.is_empty() {
            self.look_after_queue();
        }
    }

    fn next_queued(&self) -> Option<usize> {
        let is_demand =
            |&parent: &usize| self.parents[parent].as_ref().is_some_and(|known| known.priority == Priority::Demand);
        self.queued.iter().position(is_demand).or((!self.queued.is_empty()).then_some(0))
    }

    /// Sends all pages of an operation out; returns `false` if there is no room for all of them
    /// now.
    fn cut(&mut self, parent: usize) -> bool {
        while let Some(known) = &mut self.parents[parent]
            && known.cut < known.count
        {
            let (offset, left) = (known.cut, known.count - known.cut);
            let taken = match known.kind {
                Kind::Asked(Asked::Read | Asked::Part(_)) | Kind::Gather => self.cut_read(parent, offset, left),
                Kind::Asked(Asked::Write) | Kind::Move => self.cut_write(parent),
                Kind::Asked(Asked::Discard) => {
                    let count = left.min(DISCARD_PAGES);
                    let page = known.page + offset;
                    known.left -= count;
                    self.table.index.discard(page, page + count);
                    Some(count)
                }
            };
            let Some(taken) = taken else { return false };
            if let Some(known) = &mut self.parents[parent] {
                known.cut += taken;
            }
        }
        true
    }

    pub(super) fn add_piece(&mut self, piece: Piece) -> usize {
        let index = self.free_pieces.pop().expect("counted before");
        self.pieces[index] = Some(piece);
        index
    }

    /// Sends an operation to a leg, as an errand of a piece.
    pub(super) fn send(&mut self, piece: usize, leg: usize, op: Op) {
        let now = now_ns();
        let Some(known) = &self.pieces[piece] else { return };
        let passed = |parent: &Parent| Duration::from_nanos(now.saturating_sub(parent.started_at));
        // A deadline of zero would mean that there is none.
        let left = |parent: &Parent| {
            (parent.priority, parent.deadline.saturating_sub(passed(parent)).max(Duration::from_micros(1)))
        };
        let of = |parent: usize| self.parents[parent].as_ref().map(left);
        let asked = match known.task {
            Task::Read { parent, .. } => of(parent),
            Task::Write => known.entries.iter().filter_map(|entry| of(entry.parent)).reduce(|one, other| {
                let is_demand = one.0 == Priority::Demand || other.0 == Priority::Demand;
                (if is_demand { Priority::Demand } else { Priority::Background }, one.1.min(other.1))
            }),
            Task::Mend { .. } | Task::Trim => None,
        };
        let (priority, deadline) = asked.unwrap_or((Priority::Background, CARE_DEADLINE));
        // The lane keeps the time of its operations. A leg that is late with a change is waited
        // for: until it has answered, it is unknown which bytes it holds.
        let is_change = matches!(op, Op::Write { .. } | Op::Discard { .. });
        let deadline = if is_change { deadline.max(ANSWER_WITHIN) } else { deadline };
        let errand = self.send_errand(For::Piece(piece), leg, priority, deadline, op);
        if let Some(known) = &mut self.pieces[piece] {
            known.errands[leg] = Some(errand);
        }
    }

    pub(super) fn send_errand(
        &mut self,
        target: For,
        leg: usize,
        priority: Priority,
        deadline: Duration,
        op: Op,
    ) -> u16 {
        let errand = self.free_errands.pop().expect("counted before");
        self.errands[errand as usize] = Some(Errand { target, leg, started_at: now_ns() });
        let lane = self.legs[leg].as_mut().expect("usable");
        lane.submit(Request { tag: u64::from(errand), priority, deadline, op });
        errand
    }

    /// Sets when to look at a piece again.
    pub(super) fn set_alarm(&mut self, piece: usize, at: u64) {
        if let Some(known) = &mut self.pieces[piece] {
            known.alarm_at = at;
            self.alarm_at = self.alarm_at.min(at);
        }
    }

    fn collect(&mut self) {
        for leg in 0..self.legs.len() {
            while self.legs.poll(leg, &mut self.arrived) {
                while let Some(completion) = self.arrived.pop() {
                    self.errand_ended(completion);
                }
            }
        }
    }

    pub(super) fn give_buffer(&mut self, leg: usize, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer
            && let Some(lane) = &mut self.legs[leg]
        {
            lane.give_buffer(buffer);
        }
    }

    fn errand_ended(&mut self, Completion { tag, result, buffer }: Completion) {
        let Some(Errand { target, leg, started_at }) = self.errands[tag as usize].take() else { return };
        self.free_errands.push(tag as u16);
        if matches!(result, Err(PoolError::ServerGone { .. })) {
            self.table.lose(leg);
        }
        let index = match target {
            For::Nobody => return self.give_buffer(leg, buffer),
            For::Look => {
                if let Some(walker) = &mut self.walker {
                    walker.answered(&self.table.scrub, result, buffer.as_ref().map_or(&[], Buffer::sums));
                }
                return self.give_buffer(leg, buffer);
            }
            For::LateWrite => {
                self.late_write_ended(leg, result);
                return self.give_buffer(leg, buffer);
            }
            For::Piece(index) => index,
        };
        let Some(piece) = &mut self.pieces[index] else { return };
        piece.errands[leg] = None;
        if piece.late.has(leg) {
            piece.late = piece.late.difference(MemberSet::one(leg));
            self.late_write_ended(leg, result);
        }
        let Some(piece) = &mut self.pieces[index] else { return };
        match result {
            Ok(()) => piece.got = piece.got.union(MemberSet::one(leg)),
            Err(error) => piece.fail(leg, error),
        }
        match piece.task {
            Task::Read { .. } => {
                piece.buffers[leg] = buffer;
                self.read_answered(index, leg, result.is_ok(), started_at);
            }
            Task::Mend { leg: target } if leg == target => {
                self.give_buffer(leg, buffer);
                self.end_mend(index, result);
            }
            Task::Mend { .. } => {
                piece.buffers[leg] = buffer;
                let is_right = result.is_ok() && self.is_as_written(index, leg);
                self.read_answered(index, leg, is_right, started_at);
            }
            Task::Write => {
                self.give_buffer(leg, buffer);
                self.write_answered(index);
            }
            Task::Trim => self.trim_answered(index),
        }
    }

    /// Handles the answer of a leg to a write that was late there.
    fn late_write_ended(&mut self, leg: usize, result: Result<(), PoolError>) {
        match result {
            // The write may still arrive, at any time.
            Err(PoolError::TimedOut { .. }) => self.table.stay_late(leg),
            _ => self.table.late_came(leg),
        }
    }

    /// Takes a piece that has ended. Its errands that are still under way are for nobody, or are
    /// `late` writes.
    pub(super) fn take_piece(&mut self, index: usize, late: bool) -> Option<Piece> {
        let mut piece = self.pieces[index].take()?;
        self.free_pieces.push(index);
        for (leg, errand) in piece.errands.iter().enumerate() {
            if let Some(errand) = errand
                && let Some(errand) = &mut self.errands[*errand as usize]
            {
                errand.target = if late { For::LateWrite } else { For::Nobody };
            }
            let buffer = piece.buffers[leg].take();
            self.give_buffer(leg, buffer);
        }
        Some(piece)
    }

    /// Ends `count` pages of a parent with this result.
    pub(super) fn end_pages(&mut self, parent: usize, count: u64, result: Result<(), PoolError>) {
        let Some(known) = &mut self.parents[parent] else { return };
        if known.result.is_ok() {
            known.result = result;
        }
        known.left -= count;
        self.end_parent_without_pages(parent);
    }

    fn end_parent_without_pages(&mut self, index: usize) {
        let is_over = |parent: &Parent| parent.left == 0 && parent.cut == parent.count;
        if !self.parents[index].as_ref().is_some_and(is_over) || self.queued.contains(&index) {
            return;
        }
        if self.is_for_others(index) {
            return self.anew.push(index);
        }
        let Some(parent) = self.parents[index].take() else { return };
        if index == Self::MOVER {
            return self.end_mover(parent);
        }
        self.free_parents.push(index);
        let Parent { tag, buffer, result, .. } = parent;
        self.ended.push_back(Completion { tag, result, buffer });
    }

    /// Begins a write anew at legs that came since it began, if legs died under it. Returns whether
    /// it does.
    fn is_for_others(&mut self, index: usize) -> bool {
        let Some(Parent { kind, result: Err(PoolError::ServerGone { .. }), knew, is_unlucky, .. }) =
            &self.parents[index]
        else {
            return false;
        };
        let legs = self.open_legs();
        if *kind != Kind::Asked(Asked::Write) || !is_unlucky && !self.legs.has_news(legs, *knew) {
            return false;
        }
        if let Some(parent) = &mut self.parents[index] {
            (parent.cut, parent.left, parent.result, parent.knew) = (0, parent.count, Ok(()), legs);
            parent.is_unlucky = false;
        }
        true
    }

    /// Asks more legs where one is slow, and ends operations that have no time left.
    fn ring(&mut self, now: u64) {
        self.alarm_at = u64::MAX;
        self.end_queued(now);
        for index in 0..PIECES {
            let Some(piece) = &mut self.pieces[index] else { continue };
            if piece.alarm_at > now {
                self.alarm_at = self.alarm_at.min(piece.alarm_at);
                continue;
            }
            piece.alarm_at = u64::MAX;
            let (task, errands) = (piece.task, piece.errands);
            match task {
                Task::Mend { leg } if errands[leg].is_some() => self.care_is_slow(index, now),
                Task::Trim => self.care_is_slow(index, now),
                Task::Read { parent, .. } if self.is_read_over(index, parent, now) => {
                    self.starved.retain(|piece| *piece != index);
                    self.end_read_badly(index);
                }
                Task::Read { .. } | Task::Mend { .. } => {
                    self.set_alarm(index, now.saturating_add(HEDGE_MIN.as_nanos() as u64));
                    self.read_is_slow(index);
                }
                Task::Write => self.write_is_slow(index, now),
            }
        }
    }

    /// Checks whether the piece is a read that waits for room and has no time left. Sets its error
    /// if so.
    fn is_read_over(&mut self, index: usize, parent: usize, now: u64) -> bool {
        let Some(piece) = &mut self.pieces[index] else { return false };
        let Some(parent) = self.parents[parent].as_ref().filter(|parent| parent.ends_at() <= now) else { return false };
        let is_over = piece.under_way().is_empty() && self.starved.contains(&index);
        if is_over {
            piece.error = Some(PoolError::TimedOut { server: self.table.slow_server(), after: parent.deadline });
        }
        is_over
    }

    /// Checks whether this errand is late and its leg, which is not lost, may still do it.
    fn is_owed(&self, errand: &Errand) -> bool {
        let is_late = match errand.target {
            For::LateWrite => true,
            For::Piece(piece) => self.pieces[piece].as_ref().is_some_and(|piece| piece.late.has(errand.leg)),
            For::Look | For::Nobody => false,
        };
        is_late && !self.table.lost().has(errand.leg)
    }
}

impl Legged for EcLane {
    fn legs(&mut self) -> &mut LegLanes {
        &mut self.legs
    }

    fn work(&mut self) {
        self.start();
        self.collect();
        if self.alarm_at != u64::MAX {
            let now = now_ns();
            if now >= self.alarm_at {
                self.ring(now);
            }
        }
        if !(self.queued.is_empty() && self.again.is_empty() && self.starved.is_empty() && self.anew.is_empty()) {
            self.start();
        }
        self.begin_care();
        scrub::walk(self);
        self.table.give_up_the_silent(|leg| self.table.lose(leg));
        let past = self.table.past();
        if !past.is_empty() && self.is_at_rest() {
            self.legs.leave(past);
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
    fn submit(&mut self, request: Request) -> Result<(), Request> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let Some(index) = self.free_parents.pop() else { return Err(request) };
        let Request { tag, priority, deadline, op } = request;
        let (page, count) = op.range();
        let result = check_range((page, count), self.table.index.pages, self.table.legs[0].server)
            .and_then(|()| self.check_sums(&op));
        let (asked, buffer) = op.into_parts();
        // An operation that is refused counts as cut already.
        let (cut, left) = if result.is_ok() { (0, count) } else { (count, 0) };
        let (started_at, kind, page) = (now_ns(), Kind::Asked(asked), page.0);
        let knew = self.open_legs();
        let parent = Parent {
            tag,
            priority,
            deadline,
            started_at,
            kind,
            page,
            count,
            cut,
            left,
            buffer,
            result,
            knew,
            is_unlucky: false,
        };
        self.parents[index] = Some(parent);
        self.queued.push_back(index);
        // Writes wait until the next poll for others that can share their rows.
        if asked != Asked::Write && self.queued.len() == 1 {
            self.start();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.work();
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        SLOTS - self.free_parents.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        self.wait_for_legs(timeout);
    }
}

impl EcLane {
    /// Checks the checksums of pages to write, because wrong bytes must not become parity.
    fn check_sums(&self, op: &Op) -> Result<(), PoolError> {
        let Op::Write { page, buffer } = op else { return Ok(()) };
        let wrong = (0..buffer.pages()).find(|&index| checksum(buffer.page(index)) != buffer.sums()[index]);
        let server = self.table.legs[0].server;
        wrong.map_or(Ok(()), |index| Err(PoolError::Corrupt { page: PageId(page.0 + index as u64), server }))
    }
}

impl Nurse for EcLane {
    fn is_owed_answers(&self) -> bool {
        self.errands.iter().flatten().any(|errand| self.is_owed(errand))
    }

    fn is_caring(&self) -> bool {
        // Late pieces are not waited for.
        let is_care = |piece: &Piece| matches!(piece.task, Task::Mend { .. } | Task::Trim) && piece.late.is_empty();
        let is_looking = self.walker.as_ref().is_some_and(|walker| walker.is_looking());
        is_looking || self.parents[Self::MOVER].is_some() || self.pieces.iter().flatten().any(is_care)
    }

    fn finish_care(&mut self) {
        scrub::pause(self);
        if let Some(care) = &mut self.care {
            care.give_up();
        }
        while self.is_caring() {
            self.work();
            self.legs.sleep(SLEEP_SLICE);
        }
        if let Some(care) = &mut self.care {
            care.go_on();
        }
        scrub::go_on(self);
    }
}

impl Drop for EcLane {
    fn drop(&mut self) {
        if self.table.is_abandoned() {
            return;
        }
        // Care that is under way may still land, and until then no other lane can write there. It
        // has a deadline.
        scrub::end(self);
        self.finish_care();
        // Writes that were not waited for may land, too. If that takes too long, their outcome
        // stays unknown.
        let until = now_ns().saturating_add(FAREWELL_PATIENCE.as_nanos() as u64);
        while self.is_owed_answers() && now_ns() < until {
            self.collect();
            self.legs.sleep(SLEEP_SLICE);
        }
        let owed = self.errands.iter().flatten().filter(|errand| self.is_owed(errand));
        owed.for_each(|errand| self.table.stay_late(errand.leg));
        self.table.give_up_the_silent(|leg| self.table.lose(leg));
        // Rows of a write that is given up here stay claimed, so no other write goes there.
    }
}
