//! Channel of one thread to all tiers.
//!
//! An operation is a *job*: pages that have to set out. Neighbours that lie in the same tier, or go
//! to the same, set out as one *piece*. If a piece was in vain, because its pages had moved
//! meanwhile or the tier was full, its pages are a job again.

use super::care::Care;
use super::table::{Bid, Choice, TierTable};
use crate::backend::{Kind, check_range, hand_over};
use crate::healer::Nurse;
use crate::leg_lanes::{LegLanes, Legged, SLEEP_SLICE};
use crate::legs::RUN_PAGES;
use crate::{Buffer, Completion, Lane, Op, PoolError, Priority, Request};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId, checksum};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations that one lane has under way, and most pieces.
const SLOTS: usize = 256;
pub(super) const PIECES: usize = 512;
/// Number of pages of a discard that are looked at in one go.
const DISCARD_LOOK: u64 = 1 << 16;
/// Time limit of one step of background care, and of giving old copies back.
const CARE_DEADLINE: Duration = Duration::from_secs(5);
/// Sleep of a lane that has nothing under way and waits for others.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Operation of the caller.
struct Parent {
    tag: u64,
    priority: Priority,
    deadline: Duration,
    started_at: u64,
    kind: Kind,
    page: u64,
    count: u64,
    /// Number of pages that have not ended.
    left: u64,
    buffer: Option<Buffer>,
    result: Result<(), PoolError>,
}

/// Pages of a parent that have to set out; if they are written, for tiers from `from` on.
#[derive(Clone, Copy)]
struct Job {
    parent: usize,
    offset: u64,
    count: u64,
    from: usize,
    /// Value of [`TierTable::clearing`] at which the job is tried once more, because all tiers were
    /// full for it.
    clearing: Option<u64>,
}

/// Outcome of an attempt to send pages of a job out.
enum Cut {
    /// Number of pages that have set out, or ended.
    Pages(u64),
    /// The lane has no room for jobs of this kind.
    NoRoom,
    /// The job cannot set out now.
    Later,
}

/// Purpose of a piece.
#[derive(Clone, Copy)]
pub(super) enum Task {
    /// Reads pages of a parent from this offset on. Their stamp shall still be `stamp` afterwards.
    Read {
        parent: usize,
        offset: u64,
        stamp: u64,
    },
    Write {
        parent: usize,
        offset: u64,
        bid: Bid,
        clearing: Option<u64>,
    },
    /// Gives old copies back, for a parent or in the background.
    Sweep {
        parent: Option<usize>,
    },
    /// Reads pages that are moved.
    MoveRead {
        to: usize,
        bid: Bid,
    },
    MoveWrite {
        from: usize,
        bid: Bid,
    },
}

impl Task {
    fn is_care(self) -> bool {
        matches!(self, Task::Sweep { parent: None } | Task::MoveRead { .. } | Task::MoveWrite { .. })
    }
}

#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) task: Task,
    pub(super) tier: usize,
    pub(super) page: u64,
    pub(super) count: u64,
}

pub(super) struct TierLane {
    pub(super) table: Arc<TierTable>,
    pub(super) legs: LegLanes,
    parents: Box<[Option<Parent>]>,
    free_parents: Vec<usize>,
    jobs: VecDeque<Job>,
    pieces: Box<[Option<Piece>]>,
    pub(super) free_pieces: Vec<usize>,
    arrived: Vec<Completion>,
    ended: VecDeque<Completion>,
    /// Operations that changed pages. They are handed over when this lane moves nothing.
    ended_changes: VecDeque<Completion>,
    /// Number of operations that change pages and are not handed over yet.
    pub(super) changes: usize,
    pub(super) care: Option<Care>,
    zero_sum: u64,
}

impl TierLane {
    /// Opens a lane. With `cares` it moves pages while its owner changes some.
    pub(super) fn open(table: &Arc<TierTable>, cares: bool) -> Result<TierLane, PoolError> {
        TierLane::with(table, cares.then(Care::of_owner))
    }

    /// Opens a lane for the thread, with up to `cares` steps of care at a time.
    pub(super) fn open_for_thread(table: &Arc<TierTable>, cares: usize) -> Result<TierLane, PoolError> {
        TierLane::with(table, Some(Care::of_thread(cares)))
    }

    fn with(table: &Arc<TierTable>, care: Option<Care>) -> Result<TierLane, PoolError> {
        Ok(TierLane {
            table: table.clone(),
            legs: LegLanes::new(table.open_lanes(PIECES)?),
            parents: std::iter::repeat_with(|| None).take(SLOTS).collect(),
            free_parents: (0..SLOTS).rev().collect(),
            jobs: VecDeque::with_capacity(SLOTS + PIECES),
            pieces: std::iter::repeat_with(|| None).take(PIECES).collect(),
            free_pieces: (0..PIECES).rev().collect(),
            arrived: Vec::with_capacity(64),
            ended: VecDeque::with_capacity(SLOTS),
            ended_changes: VecDeque::with_capacity(SLOTS),
            changes: 0,
            care,
            zero_sum: checksum(&[0; PAGE_BYTES]),
        })
    }

    /// Returns the tiers that this lane can use.
    fn usable(&self) -> MemberSet {
        self.legs.open(self.table.living())
    }

    /// Cuts jobs into pieces, demand first, as far as there is room.
    fn start(&mut self) {
        self.legs.submit_waiting();
        for priority in [Priority::Demand, Priority::Background] {
            let mut has_room = true;
            for _ in 0..self.jobs.len() {
                let Some(mut job) = self.jobs.pop_front() else { break };
                let is_its_turn = self.parents[job.parent].as_ref().is_some_and(|known| known.priority == priority);
                while has_room && is_its_turn && job.count > 0 {
                    match self.cut(job) {
                        Cut::Pages(count) => {
                            job.offset += count;
                            job.count -= count;
                        }
                        Cut::NoRoom => has_room = false,
                        Cut::Later => break,
                    }
                }
                if job.count > 0 {
                    self.jobs.push_back(job);
                }
            }
        }
    }

    fn cut(&mut self, job: Job) -> Cut {
        let Some(known) = &self.parents[job.parent] else { return Cut::Pages(job.count) };
        if self.free_pieces.is_empty() {
            return Cut::NoRoom;
        }
        let (first, is_whole) = (known.page + job.offset, job.count == known.count);
        match known.kind {
            Kind::Read | Kind::Part(_) => self.cut_read(job, first, is_whole),
            Kind::Write => self.cut_write(job, first, is_whole),
            Kind::Discard => self.cut_discard(job, first),
        }
    }

    fn cut_read(&mut self, job: Job, first: u64, is_whole: bool) -> Cut {
        let at = self.table.word(first).at();
        let alike = |page: &u64| self.table.word(*page).at() == at;
        let count = run(first, job.count, is_whole, alike);
        let Some(tier) = at else {
            if let Some(buffer) = self.parents[job.parent].as_mut().and_then(|known| known.buffer.as_mut()) {
                for index in job.offset..job.offset + count {
                    buffer.page_mut(index as usize).fill(0);
                    buffer.sums_mut()[index as usize] = self.zero_sum;
                }
            }
            self.end_pages(job.parent, count, Ok(()));
            return Cut::Pages(count);
        };
        if self.legs[tier].is_none() {
            self.end_pages(job.parent, count, Err(self.table.gone(tier)));
            return Cut::Pages(count);
        }
        let Some(stamp) = self.table.stamp(first, count, tier) else { return Cut::Later };
        let Some(buffer) = self.take_buffer(job.parent, tier, count) else { return Cut::NoRoom };
        let kind = self.parents[job.parent].as_ref().map_or(Kind::Read, |known| known.kind);
        let op = kind.read(PageId(first), buffer);
        let task = Task::Read { parent: job.parent, offset: job.offset, stamp };
        self.send(Piece { task, tier, page: first, count }, op);
        Cut::Pages(count)
    }

    fn cut_write(&mut self, job: Job, first: u64, is_whole: bool) -> Cut {
        if self.waits_for_room(job.parent, job.clearing) {
            // Moving pages away is what this lane does meanwhile.
            self.care.iter_mut().for_each(Care::on_change);
            return Cut::Later;
        }
        let usable = self.usable();
        let choose = |page: u64| self.table.choose(self.table.word(page), usable, job.from);
        let choice = choose(first);
        let tier = match choice {
            Choice::Tier(tier) => tier,
            Choice::Later if !self.is_over_time(job.parent) => return Cut::Later,
            Choice::Later | Choice::Full | Choice::Gone => {
                let error = match choice {
                    Choice::Later => self.timed_out(job.parent),
                    Choice::Full => self.table.full(),
                    _ => self.table.gone(0),
                };
                self.end_pages(job.parent, 1, Err(error));
                return Cut::Pages(1);
            }
        };
        let count = run(first, job.count, is_whole, |page| choose(*page) == choice);
        let Some(mut buffer) = self.take_buffer(job.parent, tier, count) else { return Cut::NoRoom };
        let (mut begun, mut added) = (0, 0);
        while begun < count
            && let Some(is_new) = self.table.begin_write(first + begun, tier)
        {
            begun += 1;
            added += u64::from(is_new);
        }
        let is_direct = self.parents[job.parent].as_ref().is_some_and(|known| known.buffer.is_none());
        if begun == 0 || is_direct && begun < count {
            // Another lane has claimed one of the pages just now.
            self.table.end_write(first, begun, tier, false);
            self.give_buffer(job.parent, tier, buffer);
            return Cut::Later;
        }
        if let Some(whole) = self.parents[job.parent].as_ref().and_then(|known| known.buffer.as_ref()) {
            buffer.set_pages(begun as usize);
            for index in 0..begun as usize {
                let from = job.offset as usize + index;
                buffer.page_mut(index).copy_from_slice(whole.page(from));
                buffer.sums_mut()[index] = whole.sums()[from];
            }
        }
        let bid = self.table.bid(tier, added);
        let task = Task::Write { parent: job.parent, offset: job.offset, bid, clearing: job.clearing };
        self.send(Piece { task, tier, page: first, count: begun }, Op::Write { page: PageId(first), buffer });
        Cut::Pages(begun)
    }

    /// Makes the pages zeros from now on, and gives their copies back, except those that another
    /// lane works on. The care gives back the others.
    fn cut_discard(&mut self, job: Job, first: u64) -> Cut {
        let (end, stop) = (first + job.count, first + job.count.min(DISCARD_LOOK));
        let (mut page, mut swept) = (first, 0);
        while page < stop {
            let next = self.table.next_written(page).min(end);
            if next > page {
                page = next;
                continue;
            }
            if self.free_pieces.is_empty() {
                break;
            }
            self.table.discard(page);
            let count = match self.table.word(page).garbage().iter().next() {
                Some(tier) => self.sweep(page, stop, tier, Some(job.parent)),
                None => 0,
            };
            swept += count;
            page += count.max(1);
        }
        self.end_pages(job.parent, page - first - swept, Ok(()));
        Cut::Pages(page - first)
    }

    /// Gives back the old copies of this page, and of those behind it, at `tier`. Returns their
    /// number.
    pub(super) fn sweep(&mut self, first: u64, end: u64, tier: usize, parent: Option<usize>) -> u64 {
        let count = self.table.claim_sweep(first, end, tier, parent.is_some());
        if count > 0 && self.usable().has(tier) {
            let piece = Piece { task: Task::Sweep { parent }, tier, page: first, count };
            self.send(piece, Op::Discard { page: PageId(first), count });
        } else if count > 0 {
            self.table.finish_sweep(first, count, tier, true);
            self.table.end_leaving(tier, count);
            if let Some(parent) = parent {
                self.end_pages(parent, count, Ok(()));
            }
        }
        count
    }

    /// Takes the parent's own buffer if it is for all of the parent, else one of the lane's.
    fn take_buffer(&mut self, parent: usize, tier: usize, count: u64) -> Option<Buffer> {
        let known = self.parents[parent].as_mut()?;
        if count == known.count { known.buffer.take() } else { self.legs[tier].as_mut()?.take_buffer(count) }
    }

    fn give_buffer(&mut self, parent: usize, tier: usize, buffer: Buffer) {
        match (&mut self.parents[parent], &mut self.legs[tier]) {
            (Some(known), _) if known.buffer.is_none() => known.buffer = Some(buffer),
            (_, Some(leg)) => leg.give_buffer(buffer),
            _ => unreachable!("it came from one of the two"),
        }
    }

    /// Sends a piece to its tier.
    pub(super) fn send(&mut self, piece: Piece, op: Op) {
        let of = |parent: usize| self.parents[parent].as_ref();
        let (priority, deadline) = match piece.task {
            Task::Read { parent, .. } | Task::Write { parent, .. } => {
                of(parent).map_or((Priority::Background, CARE_DEADLINE), |known| (known.priority, known.time_left()))
            }
            Task::Sweep { parent: Some(parent) } => of(parent).map_or((Priority::Background, CARE_DEADLINE), |known| {
                (known.priority, known.time_left().min(CARE_DEADLINE))
            }),
            Task::Sweep { parent: None } | Task::MoveRead { .. } | Task::MoveWrite { .. } => {
                (Priority::Background, CARE_DEADLINE)
            }
        };
        if piece.task.is_care() {
            self.care.iter_mut().for_each(Care::on_sent);
        }
        let index = self.free_pieces.pop().expect("looked at before");
        self.pieces[index] = Some(piece);
        let leg = self.legs[piece.tier].as_mut().expect("usable");
        leg.submit(Request { tag: index as u64, priority, deadline, op });
    }

    fn is_over_time(&self, parent: usize) -> bool {
        self.parents[parent].as_ref().is_none_or(|known| known.time_left() == Parent::NO_TIME)
    }

    fn timed_out(&self, parent: usize) -> PoolError {
        let after = self.parents[parent].as_ref().map_or(Duration::ZERO, |known| known.deadline);
        PoolError::TimedOut { server: self.table.legs[0].server, after }
    }

    fn collect(&mut self) {
        for tier in 0..self.legs.len() {
            while self.legs.poll(tier, &mut self.arrived) {
                while let Some(completion) = self.arrived.pop() {
                    self.piece_ended(completion);
                }
            }
        }
    }

    fn piece_ended(&mut self, Completion { tag, result, buffer }: Completion) {
        let Some(piece) = self.pieces[tag as usize].take() else { return };
        self.free_pieces.push(tag as usize);
        let Piece { task, tier, page, count } = piece;
        if task.is_care() {
            self.care.iter_mut().for_each(Care::on_ended);
        }
        if matches!(result, Err(PoolError::ServerGone { .. })) {
            self.table.lose(tier);
        }
        match (task, buffer) {
            (Task::Read { parent, offset, stamp }, Some(buffer)) => {
                self.read_ended(piece, parent, offset, stamp, result, buffer);
            }
            (Task::Write { parent, offset, bid, clearing }, Some(buffer)) => {
                // The bytes that a refused write leaves in its own tier make no room there.
                let garbage = self.table.clearing();
                if !matches!(result, Err(PoolError::TimedOut { .. })) {
                    self.table.end_write(page, count, tier, result.is_ok());
                }
                self.give_buffer(parent, tier, buffer);
                let job = Job { parent, offset, count, from: 0, clearing };
                let next = match result {
                    Err(PoolError::PoolFull { .. }) => {
                        self.table.set_full(tier, bid);
                        let is_last = self.usable().iter().last() == Some(tier);
                        if is_last && clearing.is_none() && garbage.is_some() {
                            // Room will become free.
                            Job { clearing: garbage, ..job }
                        } else {
                            Job { from: tier + 1, ..job }
                        }
                    }
                    Err(PoolError::ServerGone { .. }) => job,
                    Ok(()) | Err(_) => {
                        if result.is_ok() {
                            self.table.took(tier, bid);
                        }
                        return self.end_pages(parent, count, result);
                    }
                };
                self.jobs.push_back(next);
            }
            (Task::Sweep { parent }, _) => {
                self.sweep_ended(piece, result);
                if let Some(parent) = parent {
                    // The pages are zeros in any case.
                    self.end_pages(parent, count, Ok(()));
                }
            }
            (Task::MoveRead { to, bid }, Some(buffer)) => self.move_read(piece, (to, bid), result, buffer),
            (Task::MoveWrite { from, bid }, Some(buffer)) => self.move_ended(piece, (from, bid), result, buffer),
            (_, None) => unreachable!("buffers always come back"),
        }
    }

    /// Checks whether a job that found all tiers full should go on waiting for room.
    fn waits_for_room(&self, parent: usize, clearing: Option<u64>) -> bool {
        clearing.is_some_and(|clearing| !self.table.is_cleared(clearing)) && !self.is_over_time(parent)
    }

    fn read_ended(
        &mut self,
        Piece { tier, page, count, .. }: Piece,
        parent: usize,
        offset: u64,
        stamp: u64,
        result: Result<(), PoolError>,
        buffer: Buffer,
    ) {
        let is_right = self.table.stamp(page, count, tier) == Some(stamp);
        if let (true, Ok(()), Some(known)) = (is_right, result, &mut self.parents[parent])
            && let Some(whole) = &mut known.buffer
        {
            for index in 0..count as usize {
                let to = offset as usize + index;
                whole.page_mut(to).copy_from_slice(buffer.page(index));
                whole.sums_mut()[to] = buffer.sums()[index];
            }
        }
        self.give_buffer(parent, tier, buffer);
        if is_right {
            self.end_pages(parent, count, result);
        } else {
            // The pages were written or moved meanwhile.
            self.jobs.push_back(Job { parent, offset, count, from: 0, clearing: None });
        }
    }

    /// Ends `count` pages of a parent with this result.
    fn end_pages(&mut self, parent: usize, count: u64, result: Result<(), PoolError>) {
        let Some(known) = &mut self.parents[parent] else { return };
        if known.result.is_ok() {
            known.result = result;
        }
        known.left -= count;
        if known.left == 0
            && let Some(Parent { tag, kind, buffer, result, .. }) = self.parents[parent].take()
        {
            self.free_parents.push(parent);
            let ended =
                if matches!(kind, Kind::Write | Kind::Discard) { &mut self.ended_changes } else { &mut self.ended };
            ended.push_back(Completion { tag, result, buffer });
        }
    }
}

/// Returns how many pages from `first` on are `alike`. The number exceeds what a lane's buffer
/// takes only if these are all pages of the operation.
fn run(first: u64, count: u64, is_whole: bool, alike: impl FnMut(&u64) -> bool) -> u64 {
    let most = if is_whole { count } else { count.min(RUN_PAGES) };
    let alike = 1 + (first + 1..first + most).take_while(alike).count() as u64;
    if alike == count && is_whole { count } else { alike.min(RUN_PAGES) }
}

impl Parent {
    /// Least time that an operation has left; a deadline of zero would mean that there is none.
    const NO_TIME: Duration = Duration::from_micros(1);

    fn time_left(&self) -> Duration {
        let passed = Duration::from_nanos(now_ns().saturating_sub(self.started_at));
        self.deadline.saturating_sub(passed).max(Parent::NO_TIME)
    }
}

impl Legged for TierLane {
    fn legs(&mut self) -> &mut LegLanes {
        &mut self.legs
    }

    fn work(&mut self) {
        self.start();
        self.collect();
        if !self.jobs.is_empty() {
            self.start();
        }
        self.begin_care();
    }

    fn has_ended(&self) -> bool {
        !self.ended.is_empty() || !self.ended_changes.is_empty() && !self.is_caring()
    }

    fn alarm_at(&self) -> u64 {
        u64::MAX
    }
}

impl Lane for TierLane {
    fn submit(&mut self, request: Request) -> Result<(), Request> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let Some(index) = self.free_parents.pop() else { return Err(request) };
        let Request { tag, priority, deadline, op } = request;
        let (page, count) = op.range();
        let result = check_range((page, count), self.table.pages, self.table.legs[0].server);
        let (kind, buffer) = op.into_parts();
        let left = if result.is_ok() { count } else { 0 };
        let (started_at, page) = (now_ns(), page.0);
        self.parents[index] =
            Some(Parent { tag, priority, deadline, started_at, kind, page, count, left, buffer, result });
        if matches!(kind, Kind::Write | Kind::Discard) {
            self.changes += 1;
            self.care.iter_mut().for_each(Care::on_change);
        }
        if left == 0 {
            self.end_pages(index, 0, Ok(()));
            return Ok(());
        }
        self.jobs.push_back(Job { parent: index, offset: 0, count, from: 0, clearing: None });
        if self.jobs.len() == 1 {
            self.start();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.work();
        let mut moved = hand_over(&mut self.ended, done);
        if !self.is_caring() {
            // Nothing stays claimed while the owner does something else.
            let changes = hand_over(&mut self.ended_changes, done);
            self.changes -= changes;
            moved += changes;
        }
        moved
    }

    fn in_flight(&self) -> usize {
        SLOTS - self.free_parents.len() + self.ended.len() + self.ended_changes.len()
    }

    fn wait(&mut self, timeout: Duration) {
        self.wait_for_legs(timeout);
        if !self.has_ended() && self.free_pieces.len() == PIECES && !self.jobs.is_empty() {
            farfield_os::process::sleep(LOOK_AGAIN);
        }
    }
}

impl Nurse for TierLane {
    fn is_caring(&self) -> bool {
        self.care.as_ref().is_some_and(Care::is_busy)
    }

    fn finish_care(&mut self) {
        self.care.iter_mut().for_each(Care::stop);
        while self.is_caring() {
            self.work();
            self.legs.sleep(SLEEP_SLICE);
        }
        self.care.iter_mut().for_each(Care::go_on);
    }
}

impl Drop for TierLane {
    fn drop(&mut self) {
        if self.table.is_abandoned() {
            return;
        }
        // Copies that are claimed here are given back when their end is known. It has a deadline.
        self.jobs.clear();
        self.care.iter_mut().for_each(Care::stop);
        let is_sweep = |piece: &Piece| matches!(piece.task, Task::Sweep { .. });
        while self.is_caring() || self.pieces.iter().flatten().any(is_sweep) {
            self.work();
            self.legs.sleep(SLEEP_SLICE);
        }
        // Pages that are being written stay in that state for ever, because the write may still
        // arrive.
    }
}
