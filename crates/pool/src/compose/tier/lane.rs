//! Channel of one thread to all tiers.
//!
//! An operation is *unsent ranges*: pages that have to set out. Neighbours that lie in the same
//! tier, or go to the same, set out as one *split*. If a split was in vain, because its pages had
//! moved meanwhile or the tier was full, its pages are unsent again.

use super::maintenance::TierMaintenance;
use super::table::{Bid, TierChoice, TierTable};
use crate::contract::backend::{OpKind, check_range, hand_over};
use crate::redundant::member_lanes::{CompositeLane, MemberLanes, SLEEP_SLICE};
use crate::redundant::members::RUN_PAGES;
use crate::redundant::repair::Repairer;
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId, checksum};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations that one lane has under way, and most splits.
const SLOTS: usize = 256;
pub(super) const SPLITS: usize = 512;
/// Number of pages of a discard that are looked at in one go.
const DISCARD_LOOK: u64 = 1 << 16;
/// Time limit of one step of background maintenance, and of giving old copies back.
const MAINTENANCE_DEADLINE: Duration = Duration::from_secs(5);
/// Sleep of a lane that has nothing under way and waits for others.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Operation of the caller.
struct TierOperation {
    tag: u64,
    priority: Priority,
    deadline: Duration,
    started_at: u64,
    kind: OpKind,
    page: u64,
    count: u64,
    /// Number of pages that have not ended.
    left: u64,
    buffer: Option<Buffer>,
    result: Result<(), PoolError>,
}

/// Pages of an operation that have to set out; if they are written, for tiers from `from` on.
#[derive(Clone, Copy)]
struct UnsentRange {
    operation: usize,
    offset: u64,
    count: u64,
    from: usize,
    /// Value of [`TierTable::clearing`] at which the range is tried once more, because all tiers
    /// were full for it.
    clearing: Option<u64>,
}

/// Outcome of an attempt to send pages of an unsent range out.
enum SplitOutcome {
    /// Number of pages that have set out, or ended.
    Pages(u64),
    /// The lane has no room for ranges of this kind.
    NoRoom,
    /// The range cannot set out now.
    Busy,
}

/// Purpose of a split.
#[derive(Clone, Copy)]
pub(super) enum TierSplitKind {
    /// Reads pages of an operation from this offset on. Their stamp shall still be `stamp`
    /// afterwards.
    Read {
        operation: usize,
        offset: u64,
        stamp: u64,
    },
    Write {
        operation: usize,
        offset: u64,
        bid: Bid,
        clearing: Option<u64>,
    },
    /// Gives old copies back, for an operation or in the background.
    Sweep {
        operation: Option<usize>,
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

impl TierSplitKind {
    fn is_maintenance(self) -> bool {
        matches!(
            self,
            TierSplitKind::Sweep { operation: None } | TierSplitKind::MoveRead { .. } | TierSplitKind::MoveWrite { .. }
        )
    }
}

#[derive(Clone, Copy)]
pub(super) struct TierSplit {
    pub(super) kind: TierSplitKind,
    pub(super) tier: usize,
    pub(super) page: u64,
    pub(super) count: u64,
}

pub(super) struct TierLane {
    pub(super) table: Arc<TierTable>,
    pub(super) members: MemberLanes,
    operations: Box<[Option<TierOperation>]>,
    free_operations: Vec<usize>,
    unsent: VecDeque<UnsentRange>,
    splits: Box<[Option<TierSplit>]>,
    pub(super) free_splits: Vec<usize>,
    arrived: Vec<Completion>,
    ended: VecDeque<Completion>,
    /// Operations that changed pages. They are handed over when this lane moves nothing.
    ended_changes: VecDeque<Completion>,
    /// Number of operations that change pages and are not handed over yet.
    pub(super) changes: usize,
    pub(super) maintenance: Option<TierMaintenance>,
    zero_sum: u64,
}

impl TierLane {
    /// Opens a lane. With `has_maintenance` it moves pages while its owner changes some.
    pub(super) fn open(table: &Arc<TierTable>, has_maintenance: bool) -> Result<TierLane, PoolError> {
        TierLane::with(table, has_maintenance.then(TierMaintenance::of_owner))
    }

    /// Opens a lane for the thread, with up to `tasks_max` maintenance steps at a time.
    pub(super) fn open_for_thread(table: &Arc<TierTable>, tasks_max: usize) -> Result<TierLane, PoolError> {
        TierLane::with(table, Some(TierMaintenance::of_thread(tasks_max)))
    }

    fn with(table: &Arc<TierTable>, maintenance: Option<TierMaintenance>) -> Result<TierLane, PoolError> {
        Ok(TierLane {
            table: table.clone(),
            members: MemberLanes::new(table.open_lanes(SPLITS)?),
            operations: std::iter::repeat_with(|| None).take(SLOTS).collect(),
            free_operations: (0..SLOTS).rev().collect(),
            unsent: VecDeque::with_capacity(SLOTS + SPLITS),
            splits: std::iter::repeat_with(|| None).take(SPLITS).collect(),
            free_splits: (0..SPLITS).rev().collect(),
            arrived: Vec::with_capacity(64),
            ended: VecDeque::with_capacity(SLOTS),
            ended_changes: VecDeque::with_capacity(SLOTS),
            changes: 0,
            maintenance,
            zero_sum: checksum(&[0; PAGE_BYTES]),
        })
    }

    /// Returns the tiers that this lane can use.
    fn usable(&self) -> MemberSet {
        self.members.open(self.table.living())
    }

    /// Cuts unsent ranges into splits, demand first, as far as there is room.
    fn start(&mut self) {
        self.members.submit_waiting();
        for priority in [Priority::Demand, Priority::Background] {
            let mut has_room = true;
            for _ in 0..self.unsent.len() {
                let Some(mut range) = self.unsent.pop_front() else { break };
                let is_its_turn =
                    self.operations[range.operation].as_ref().is_some_and(|known| known.priority == priority);
                while has_room && is_its_turn && range.count > 0 {
                    match self.split(range) {
                        SplitOutcome::Pages(count) => {
                            range.offset += count;
                            range.count -= count;
                        }
                        SplitOutcome::NoRoom => has_room = false,
                        SplitOutcome::Busy => break,
                    }
                }
                if range.count > 0 {
                    self.unsent.push_back(range);
                }
            }
        }
    }

    fn split(&mut self, range: UnsentRange) -> SplitOutcome {
        let Some(known) = &self.operations[range.operation] else { return SplitOutcome::Pages(range.count) };
        if self.free_splits.is_empty() {
            return SplitOutcome::NoRoom;
        }
        let (first, is_whole) = (known.page + range.offset, range.count == known.count);
        match known.kind {
            OpKind::Read | OpKind::Part(_) => self.split_read(range, first, is_whole),
            OpKind::Write => self.split_write(range, first, is_whole),
            OpKind::Discard => self.split_discard(range, first),
        }
    }

    fn split_read(&mut self, range: UnsentRange, first: u64, is_whole: bool) -> SplitOutcome {
        let at = self.table.word(first).at();
        let alike = |page: &u64| self.table.word(*page).at() == at;
        let count = run(first, range.count, is_whole, alike);
        let Some(tier) = at else {
            if let Some(buffer) = self.operations[range.operation].as_mut().and_then(|known| known.buffer.as_mut()) {
                for index in range.offset..range.offset + count {
                    buffer.page_mut(index as usize).fill(0);
                    buffer.sums_mut()[index as usize] = self.zero_sum;
                }
            }
            self.end_pages(range.operation, count, Ok(()));
            return SplitOutcome::Pages(count);
        };
        if self.members[tier].is_none() {
            self.end_pages(range.operation, count, Err(self.table.gone(tier)));
            return SplitOutcome::Pages(count);
        }
        let Some(stamp) = self.table.stamp(first, count, tier) else { return SplitOutcome::Busy };
        let Some(buffer) = self.take_buffer(range.operation, tier, count) else { return SplitOutcome::NoRoom };
        let kind = self.operations[range.operation].as_ref().map_or(OpKind::Read, |known| known.kind);
        let op = kind.read(PageId(first), buffer);
        let task = TierSplitKind::Read { operation: range.operation, offset: range.offset, stamp };
        self.send(TierSplit { kind: task, tier, page: first, count }, op);
        SplitOutcome::Pages(count)
    }

    fn split_write(&mut self, range: UnsentRange, first: u64, is_whole: bool) -> SplitOutcome {
        if self.waits_for_room(range.operation, range.clearing) {
            // Moving pages away is what this lane does meanwhile.
            self.maintenance.iter_mut().for_each(TierMaintenance::on_change);
            return SplitOutcome::Busy;
        }
        let usable = self.usable();
        let choose = |page: u64| self.table.choose(self.table.word(page), usable, range.from);
        let choice = choose(first);
        let tier = match choice {
            TierChoice::Tier(tier) => tier,
            TierChoice::Busy if !self.is_over_time(range.operation) => return SplitOutcome::Busy,
            TierChoice::Busy | TierChoice::Full | TierChoice::Gone => {
                let error = match choice {
                    TierChoice::Busy => self.timed_out(range.operation),
                    TierChoice::Full => self.table.full(),
                    _ => self.table.gone(0),
                };
                self.end_pages(range.operation, 1, Err(error));
                return SplitOutcome::Pages(1);
            }
        };
        let count = run(first, range.count, is_whole, |page| choose(*page) == choice);
        let Some(mut buffer) = self.take_buffer(range.operation, tier, count) else { return SplitOutcome::NoRoom };
        let (mut begun, mut added) = (0, 0);
        while begun < count
            && let Some(is_new) = self.table.begin_write(first + begun, tier)
        {
            begun += 1;
            added += u64::from(is_new);
        }
        let is_direct = self.operations[range.operation].as_ref().is_some_and(|known| known.buffer.is_none());
        if begun == 0 || is_direct && begun < count {
            // Another lane has claimed one of the pages just now.
            self.table.end_write(first, begun, tier, false);
            self.give_buffer(range.operation, tier, buffer);
            return SplitOutcome::Busy;
        }
        if let Some(whole) = self.operations[range.operation].as_ref().and_then(|known| known.buffer.as_ref()) {
            buffer.set_pages(begun as usize);
            for index in 0..begun as usize {
                let from = range.offset as usize + index;
                buffer.page_mut(index).copy_from_slice(whole.page(from));
                buffer.sums_mut()[index] = whole.sums()[from];
            }
        }
        let bid = self.table.bid(tier, added);
        let task =
            TierSplitKind::Write { operation: range.operation, offset: range.offset, bid, clearing: range.clearing };
        self.send(TierSplit { kind: task, tier, page: first, count: begun }, Op::Write { page: PageId(first), buffer });
        SplitOutcome::Pages(begun)
    }

    /// Makes the pages zeros from now on, and gives their copies back, except those that another
    /// lane works on. Maintenance gives back the others.
    fn split_discard(&mut self, range: UnsentRange, first: u64) -> SplitOutcome {
        let (end, stop) = (first + range.count, first + range.count.min(DISCARD_LOOK));
        let (mut page, mut swept) = (first, 0);
        while page < stop {
            let next = self.table.next_written(page).min(end);
            if next > page {
                page = next;
                continue;
            }
            if self.free_splits.is_empty() {
                break;
            }
            self.table.discard(page);
            let count = match self.table.word(page).garbage().iter().next() {
                Some(tier) => self.sweep(page, stop, tier, Some(range.operation)),
                None => 0,
            };
            swept += count;
            page += count.max(1);
        }
        self.end_pages(range.operation, page - first - swept, Ok(()));
        SplitOutcome::Pages(page - first)
    }

    /// Gives back the old copies of this page, and of those behind it, at `tier`. Returns their
    /// number.
    pub(super) fn sweep(&mut self, first: u64, end: u64, tier: usize, operation: Option<usize>) -> u64 {
        let count = self.table.claim_sweep(first, end, tier, operation.is_some());
        if count > 0 && self.usable().has(tier) {
            let split = TierSplit { kind: TierSplitKind::Sweep { operation }, tier, page: first, count };
            self.send(split, Op::Discard { page: PageId(first), count });
        } else if count > 0 {
            self.table.finish_sweep(first, count, tier, true);
            self.table.end_leaving(tier, count);
            if let Some(operation) = operation {
                self.end_pages(operation, count, Ok(()));
            }
        }
        count
    }

    /// Takes the operation's own buffer if it is for all of the operation, else one of the lane's.
    fn take_buffer(&mut self, operation: usize, tier: usize, count: u64) -> Option<Buffer> {
        let known = self.operations[operation].as_mut()?;
        if count == known.count { known.buffer.take() } else { self.members[tier].as_mut()?.take_buffer(count) }
    }

    fn give_buffer(&mut self, operation: usize, tier: usize, buffer: Buffer) {
        match (&mut self.operations[operation], &mut self.members[tier]) {
            (Some(known), _) if known.buffer.is_none() => known.buffer = Some(buffer),
            (_, Some(member)) => member.give_buffer(buffer),
            _ => unreachable!("it came from one of the two"),
        }
    }

    /// Sends a split to its tier.
    pub(super) fn send(&mut self, split: TierSplit, op: Op) {
        let of = |operation: usize| self.operations[operation].as_ref();
        let (priority, deadline) = match split.kind {
            TierSplitKind::Read { operation, .. } | TierSplitKind::Write { operation, .. } => of(operation)
                .map_or((Priority::Background, MAINTENANCE_DEADLINE), |known| (known.priority, known.time_left())),
            TierSplitKind::Sweep { operation: Some(operation) } => of(operation)
                .map_or((Priority::Background, MAINTENANCE_DEADLINE), |known| {
                    (known.priority, known.time_left().min(MAINTENANCE_DEADLINE))
                }),
            TierSplitKind::Sweep { operation: None }
            | TierSplitKind::MoveRead { .. }
            | TierSplitKind::MoveWrite { .. } => (Priority::Background, MAINTENANCE_DEADLINE),
        };
        if split.kind.is_maintenance() {
            self.maintenance.iter_mut().for_each(TierMaintenance::on_sent);
        }
        let index = self.free_splits.pop().expect("looked at before");
        self.splits[index] = Some(split);
        let member = self.members[split.tier].as_mut().expect("usable");
        member.submit(LaneRequest { tag: index as u64, priority, deadline, op });
    }

    fn is_over_time(&self, operation: usize) -> bool {
        self.operations[operation].as_ref().is_none_or(|known| known.time_left() == TierOperation::NO_TIME)
    }

    fn timed_out(&self, operation: usize) -> PoolError {
        let after = self.operations[operation].as_ref().map_or(Duration::ZERO, |known| known.deadline);
        PoolError::TimedOut { server: self.table.members[0].server, after }
    }

    fn collect(&mut self) {
        for tier in 0..self.members.len() {
            while self.members.poll(tier, &mut self.arrived) {
                while let Some(completion) = self.arrived.pop() {
                    self.on_reply(completion);
                }
            }
        }
    }

    fn on_reply(&mut self, Completion { tag, result, buffer }: Completion) {
        let Some(split) = self.splits[tag as usize].take() else { return };
        self.free_splits.push(tag as usize);
        let TierSplit { kind: task, tier, page, count } = split;
        if task.is_maintenance() {
            self.maintenance.iter_mut().for_each(TierMaintenance::on_ended);
        }
        if matches!(result, Err(PoolError::ServerGone { .. })) {
            self.table.mark_failed(tier);
        }
        match (task, buffer) {
            (TierSplitKind::Read { operation, offset, stamp }, Some(buffer)) => {
                self.on_read_reply(split, operation, offset, stamp, result, buffer);
            }
            (TierSplitKind::Write { operation, offset, bid, clearing }, Some(buffer)) => {
                // The bytes that a refused write leaves in its own tier make no room there.
                let garbage = self.table.clearing();
                if !matches!(result, Err(PoolError::TimedOut { .. })) {
                    self.table.end_write(page, count, tier, result.is_ok());
                }
                self.give_buffer(operation, tier, buffer);
                let range = UnsentRange { operation, offset, count, from: 0, clearing };
                let next = match result {
                    Err(PoolError::PoolFull { .. }) => {
                        self.table.set_full(tier, bid);
                        let is_last = self.usable().iter().last() == Some(tier);
                        if is_last && clearing.is_none() && garbage.is_some() {
                            // Room will become free.
                            UnsentRange { clearing: garbage, ..range }
                        } else {
                            UnsentRange { from: tier + 1, ..range }
                        }
                    }
                    Err(PoolError::ServerGone { .. }) => range,
                    Ok(()) | Err(_) => {
                        if result.is_ok() {
                            self.table.took(tier, bid);
                        }
                        return self.end_pages(operation, count, result);
                    }
                };
                self.unsent.push_back(next);
            }
            (TierSplitKind::Sweep { operation }, _) => {
                self.sweep_ended(split, result);
                if let Some(operation) = operation {
                    // The pages are zeros in any case.
                    self.end_pages(operation, count, Ok(()));
                }
            }
            (TierSplitKind::MoveRead { to, bid }, Some(buffer)) => self.move_read(split, (to, bid), result, buffer),
            (TierSplitKind::MoveWrite { from, bid }, Some(buffer)) => {
                self.move_ended(split, (from, bid), result, buffer)
            }
            (_, None) => unreachable!("buffers always come back"),
        }
    }

    /// Checks whether a range that found all tiers full should go on waiting for room.
    fn waits_for_room(&self, operation: usize, clearing: Option<u64>) -> bool {
        clearing.is_some_and(|clearing| !self.table.is_cleared(clearing)) && !self.is_over_time(operation)
    }

    fn on_read_reply(
        &mut self,
        TierSplit { tier, page, count, .. }: TierSplit,
        operation: usize,
        offset: u64,
        stamp: u64,
        result: Result<(), PoolError>,
        buffer: Buffer,
    ) {
        let is_right = self.table.stamp(page, count, tier) == Some(stamp);
        if let (true, Ok(()), Some(known)) = (is_right, result, &mut self.operations[operation])
            && let Some(whole) = &mut known.buffer
        {
            for index in 0..count as usize {
                let to = offset as usize + index;
                whole.page_mut(to).copy_from_slice(buffer.page(index));
                whole.sums_mut()[to] = buffer.sums()[index];
            }
        }
        self.give_buffer(operation, tier, buffer);
        if is_right {
            self.end_pages(operation, count, result);
        } else {
            // The pages were written or moved meanwhile.
            self.unsent.push_back(UnsentRange { operation, offset, count, from: 0, clearing: None });
        }
    }

    /// Ends `count` pages of an operation with this result.
    fn end_pages(&mut self, operation: usize, count: u64, result: Result<(), PoolError>) {
        let Some(known) = &mut self.operations[operation] else { return };
        if known.result.is_ok() {
            known.result = result;
        }
        known.left -= count;
        if known.left == 0
            && let Some(TierOperation { tag, kind, buffer, result, .. }) = self.operations[operation].take()
        {
            self.free_operations.push(operation);
            let ended =
                if matches!(kind, OpKind::Write | OpKind::Discard) { &mut self.ended_changes } else { &mut self.ended };
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

impl TierOperation {
    /// Least time that an operation has left; a deadline of zero would mean that there is none.
    const NO_TIME: Duration = Duration::from_micros(1);

    fn time_left(&self) -> Duration {
        let passed = Duration::from_nanos(now_ns().saturating_sub(self.started_at));
        self.deadline.saturating_sub(passed).max(TierOperation::NO_TIME)
    }
}

impl CompositeLane for TierLane {
    fn member_lanes(&mut self) -> &mut MemberLanes {
        &mut self.members
    }

    fn work(&mut self) {
        self.start();
        self.collect();
        if !self.unsent.is_empty() {
            self.start();
        }
        self.begin_maintenance();
    }

    fn has_ended(&self) -> bool {
        !self.ended.is_empty() || !self.ended_changes.is_empty() && !self.is_repairing()
    }

    fn alarm_at(&self) -> u64 {
        u64::MAX
    }
}

impl Lane for TierLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let Some(index) = self.free_operations.pop() else { return Err(request) };
        self.members.polling.renew();
        let LaneRequest { tag, priority, deadline, op } = request;
        let (page, count) = op.range();
        let result = check_range((page, count), self.table.pages, self.table.members[0].server);
        let (kind, buffer) = op.into_parts();
        let left = if result.is_ok() { count } else { 0 };
        let (started_at, page) = (now_ns(), page.0);
        self.operations[index] =
            Some(TierOperation { tag, priority, deadline, started_at, kind, page, count, left, buffer, result });
        if matches!(kind, OpKind::Write | OpKind::Discard) {
            self.changes += 1;
            self.maintenance.iter_mut().for_each(TierMaintenance::on_change);
        }
        if left == 0 {
            self.end_pages(index, 0, Ok(()));
            return Ok(());
        }
        self.unsent.push_back(UnsentRange { operation: index, offset: 0, count, from: 0, clearing: None });
        if self.unsent.len() == 1 {
            self.start();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.work();
        let mut moved = hand_over(&mut self.ended, done);
        if !self.is_repairing() {
            // Nothing stays claimed while the owner does something else.
            let changes = hand_over(&mut self.ended_changes, done);
            self.changes -= changes;
            moved += changes;
        }
        moved
    }

    fn in_flight(&self) -> usize {
        SLOTS - self.free_operations.len() + self.ended.len() + self.ended_changes.len()
    }

    fn wait(&mut self, timeout: Duration) {
        self.wait_for_members(timeout);
        if !self.has_ended() && self.free_splits.len() == SPLITS && !self.unsent.is_empty() {
            farfield_os::process::sleep(LOOK_AGAIN);
        }
    }
}

impl Repairer for TierLane {
    fn is_repairing(&self) -> bool {
        self.maintenance.as_ref().is_some_and(TierMaintenance::is_busy)
    }

    fn finish_repairs(&mut self) {
        self.maintenance.iter_mut().for_each(TierMaintenance::stop);
        while self.is_repairing() {
            self.work();
            self.members.sleep(SLEEP_SLICE);
        }
        self.maintenance.iter_mut().for_each(TierMaintenance::go_on);
    }
}

impl Drop for TierLane {
    fn drop(&mut self) {
        if self.table.is_abandoned() {
            return;
        }
        // Copies that are claimed here are given back when their end is known. It has a deadline.
        self.unsent.clear();
        self.maintenance.iter_mut().for_each(TierMaintenance::stop);
        let is_sweep = |split: &TierSplit| matches!(split.kind, TierSplitKind::Sweep { .. });
        while self.is_repairing() || self.splits.iter().flatten().any(is_sweep) {
            self.work();
            self.members.sleep(SLEEP_SLICE);
        }
        // Pages that are being written stay in that state for ever, because the write may still
        // arrive.
    }
}
