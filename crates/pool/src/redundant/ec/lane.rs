//! How an erasure code cuts operations. Pages that lie in the same part of neighbouring rows are
//! read together. Pages that are written at the same time share rows, whichever operations they
//! belong to.

use super::maintenance::EcMaintenance;
use super::row_map::RowMap;
use super::splits::{EcSplit, EcSplitKind, EcTask, Entry, ROWS};
use crate::contract::backend::OpKind;
use crate::redundant::lane::{RedundantLane, SLOTS, SPLITS};
use crate::redundant::member_lanes::CompositeLane;
use crate::redundant::members::HEDGE_MIN;
use crate::redundant::operation::Operation;
use crate::redundant::scheme::Scheme;
use crate::redundant::split::SplitReply;
use crate::{Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId, checksum};
use farfield_os::process::now_ns;
use std::collections::VecDeque;

/// Number of pages that a discard forgets in one go.
const DISCARD_PAGES: u64 = 1 << 16;
/// Index of the operation whose pages are moved. It reads them first, and then writes them.
pub(super) const MOVER: usize = SLOTS;

/// Lane of an erasure-coded pool.
pub(super) type EcLane = RedundantLane<EcScheme>;

/// What a lane keeps for an erasure code.
pub(crate) struct EcScheme {
    /// Pages that have to be read again, because they lie elsewhere by now: operation, offset,
    /// count.
    pub(super) retry_reads: VecDeque<(usize, u64, u64)>,
    /// Splits that have to read several parts and found no buffers for that.
    pub(super) starved: VecDeque<usize>,
    /// Spare lists for the entries of splits that write.
    pub(super) entries: Vec<Vec<Entry>>,
    pub(super) maintenance: Option<EcMaintenance>,
    pub(super) slow_reads: u64,
    pub(super) zero_sum: u64,
}

impl EcLane {
    /// Checks whether there is room for one more split, whatever it needs.
    pub(super) fn has_room(&self) -> bool {
        !self.free_splits.is_empty() && self.free_requests.len() >= 2 * MemberSet::MAX
    }

    /// Takes a split that has ended, and gives its buffers back.
    pub(super) fn take_split(&mut self, index: usize) -> Option<EcSplit> {
        let mut split = self.close_split(index)?;
        for (member, buffer) in split.task.buffers.iter_mut().enumerate() {
            self.give_buffer(member, buffer.take());
        }
        Some(split)
    }

    /// Reads pages again that lie elsewhere by now. Those that do so once more wait for the next poll,
    /// which takes lanes to new members first.
    fn retry_reads(&mut self) {
        let mut left = self.scheme.retry_reads.len();
        while left > 0
            && let Some((operation, offset, count)) = self.scheme.retry_reads.pop_front()
        {
            left -= 1;
            let over = self.operations[operation].as_ref().filter(|known| known.ends_at() <= now_ns());
            if let Some(after) = over.map(|known| known.deadline) {
                let error = PoolError::TimedOut { server: self.table.slow_server(), after };
                self.end_pages(operation, count, Err(error));
                continue;
            }
            let taken = self.split_read(operation, offset, count);
            let rest = count - taken.unwrap_or(0);
            if rest > 0 {
                self.scheme.retry_reads.push_front((operation, offset + count - rest, rest));
                left += 1;
            }
            if taken.is_none() {
                return;
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
        let is_over = split.under_way().is_empty() && self.scheme.starved.contains(&index);
        if is_over {
            split.error = Some(PoolError::TimedOut { server: self.table.slow_server(), after: operation.deadline });
        }
        is_over
    }
}

impl Scheme for EcScheme {
    type Map = RowMap;
    type Task = EcTask;
    const OWN_OPERATIONS: usize = 1;

    fn new(map: &RowMap, repairs_max: usize) -> EcScheme {
        let batch = ROWS * map.code.data();
        EcScheme {
            retry_reads: VecDeque::with_capacity(SPLITS * ROWS),
            starved: VecDeque::with_capacity(SPLITS),
            entries: (0..32).map(|_| Vec::with_capacity(batch)).collect(),
            maintenance: (repairs_max > 0).then(|| EcMaintenance::new(repairs_max, batch)),
            slow_reads: 0,
            zero_sum: checksum(&[0; PAGE_BYTES]),
        }
    }

    /// Checks the checksums of pages to write, because wrong bytes must not become parity.
    fn check(map: &RowMap, op: &Op) -> Result<(), PoolError> {
        let Op::Write { page, buffer } = op else { return Ok(()) };
        let wrong = (0..buffer.pages()).find(|&index| checksum(buffer.page(index)) != buffer.sums()[index]);
        let server = map.members[0].server;
        wrong.map_or(Ok(()), |index| Err(PoolError::Corrupt { page: PageId(page.0 + index as u64), server }))
    }

    /// Writes wait until the next poll for others that can share their rows.
    fn starts_at_once(kind: OpKind) -> bool {
        kind != OpKind::Write
    }

    fn split_next(lane: &mut EcLane, operation: usize) -> bool {
        let Some(known) = &mut lane.operations[operation] else { return true };
        let (offset, left) = (known.split_pages, known.count - known.split_pages);
        let taken = match known.kind {
            OpKind::Read | OpKind::Part(_) => lane.split_read(operation, offset, left),
            OpKind::Write => lane.split_write(operation),
            OpKind::Discard => {
                let count = left.min(DISCARD_PAGES);
                let page = known.page + offset;
                known.left -= count;
                lane.table.index.discard(page, page + count);
                Some(count)
            }
        };
        if let (Some(taken), Some(known)) = (taken, &mut lane.operations[operation]) {
            known.split_pages += taken;
        }
        taken.is_some()
    }

    fn resume_reads(lane: &mut EcLane) {
        for _ in 0..lane.scheme.starved.len() {
            let Some(split) = lane.scheme.starved.pop_front() else { break };
            lane.widen(split);
        }
        lane.retry_reads();
    }

    fn has_waiting_reads(&self) -> bool {
        !self.retry_reads.is_empty() || !self.starved.is_empty()
    }

    fn urgency(lane: &EcLane, split: &EcSplit, now: u64) -> Option<(Priority, Duration)> {
        let of = |operation: usize| {
            lane.operations[operation].as_ref().map(|operation| (operation.priority, operation.time_left(now)))
        };
        match split.task.kind {
            EcSplitKind::Read { operation, .. } => of(operation),
            EcSplitKind::Write => {
                split.task.entries.iter().filter_map(|entry| of(entry.operation)).reduce(|one, other| {
                    let is_demand = one.0 == Priority::Demand || other.0 == Priority::Demand;
                    (if is_demand { Priority::Demand } else { Priority::Background }, one.1.min(other.1))
                })
            }
            EcSplitKind::Repair { .. } | EcSplitKind::Trim => None,
        }
    }

    fn on_reply(lane: &mut EcLane, index: usize, reply: SplitReply) {
        let SplitReply { member, result, buffer, started_at, .. } = reply;
        let Some(split) = &mut lane.splits[index] else { return };
        match split.task.kind {
            EcSplitKind::Read { .. } => {
                split.task.buffers[member] = buffer;
                lane.on_read_reply(index, member, result.is_ok(), started_at);
            }
            EcSplitKind::Repair { member: target } if member == target => {
                lane.give_buffer(member, buffer);
                lane.end_repair(index, result);
            }
            EcSplitKind::Repair { .. } => {
                split.task.buffers[member] = buffer;
                let is_right = result.is_ok() && lane.is_as_written(index, member);
                lane.on_read_reply(index, member, is_right, started_at);
            }
            EcSplitKind::Write => {
                lane.give_buffer(member, buffer);
                lane.on_write_reply(index);
            }
            EcSplitKind::Trim => lane.on_trim_reply(index),
        }
    }

    fn on_alarm(lane: &mut EcLane, index: usize, now: u64) {
        let Some((kind, requests)) = lane.splits[index].as_ref().map(|split| (split.task.kind, split.requests)) else {
            return;
        };
        match kind {
            EcSplitKind::Repair { member } if requests[member].is_some() => lane.maintenance_is_slow(index, now),
            EcSplitKind::Trim => lane.maintenance_is_slow(index, now),
            EcSplitKind::Read { operation, .. } if lane.is_read_over(index, operation, now) => {
                lane.scheme.starved.retain(|split| *split != index);
                lane.end_read_badly(index);
            }
            EcSplitKind::Read { .. } | EcSplitKind::Repair { .. } => {
                lane.set_alarm(index, now.saturating_add(HEDGE_MIN.as_nanos() as u64));
                lane.read_is_slow(index);
            }
            EcSplitKind::Write => {}
        }
    }

    fn end_own_operation(lane: &mut EcLane, operation: Operation) {
        lane.end_mover(operation);
    }

    fn place(split: &EcSplit) -> (u64, u64) {
        (split.task.first, split.task.rows)
    }

    /// Rows that were closed before all members had answered can be written again now.
    fn on_late_writes_over(map: &RowMap, (first, rows): (u64, u64)) {
        (first..first + rows).for_each(|row| map.index.answered(row));
    }

    fn may_degrade(lane: &EcLane, split: &EcSplit) -> bool {
        lane.is_written(split, lane.table.all())
    }

    fn has_enough(lane: &EcLane, split: &EcSplit) -> bool {
        lane.is_written(split, lane.table.all())
    }

    fn end_write(lane: &mut EcLane, split: usize) {
        lane.end_rows_of(split, None);
    }

    fn end_in_time(lane: &mut EcLane, index: usize, late: MemberSet, now: u64) {
        let Some(split) = &lane.splits[index] else { return };
        let server = late.iter().next().map_or(0, |member| lane.table.server(member));
        let after = Duration::from_nanos(now.saturating_sub(split.task.started_at));
        lane.end_rows_of(index, Some(PoolError::TimedOut { server, after }));
    }

    fn begin_repair(lane: &mut EcLane) {
        lane.begin_maintenance();
    }

    fn is_repairing(lane: &EcLane) -> bool {
        // Late splits are not waited for.
        let is_maintenance = |split: &EcSplit| split.task.is_maintenance() && split.lagging.is_empty();
        lane.operations[MOVER].is_some() || lane.splits.iter().flatten().any(is_maintenance)
    }

    fn finish_repairs(lane: &mut EcLane) {
        lane.scheme.maintenance.iter_mut().for_each(|maintenance| maintenance.schedule.stop());
        lane.work();
    }

    fn resume_repairs(&mut self) {
        self.maintenance.iter_mut().for_each(|maintenance| maintenance.schedule.go_on());
    }
}
