//! Background maintenance of an erasure-coded pool: gives members the parts that they lack, writes
//! sparse rows again, and discards unneeded rows at the members.

use super::index::{GROUP, Version};
use super::lane::{EcLane, EcScheme, MOVER};
use super::splits::{EcSplit, EcSplitKind, EcTask, ROWS};
use crate::contract::backend::OpKind;
use crate::redundant::lane::SPLITS;
use crate::redundant::operation::Operation;
use crate::redundant::repair_schedule::{RepairLook, RepairSchedule};
use crate::redundant::scheme::Scheme;
use crate::redundant::split::Split;
use crate::{Buffer, Op, PoolError, Priority};
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;

/// Number of pages that are looked at in one go.
const LOOK: u64 = 512;
/// Share of live data pages, as a fraction, up to which a row is written again: four of five.
const SPARSE: (u32, u32) = (4, 5);

/// Background maintenance that one lane does besides its operations.
pub(super) struct EcMaintenance {
    most: usize,
    pub(super) schedule: RepairSchedule,
    /// Group that is looked at next for spent rows, from the last one downwards.
    trims_from: u64,
    /// Page that is looked at next for sparse rows.
    moves_from: u64,
    /// Pages that are moved, each with the version that it has until then.
    pub(super) moves: Vec<(u64, Version)>,
    buffer: Option<Buffer>,
}

impl EcMaintenance {
    /// Creates the maintenance of a lane, with at most `most` splits under way; `batch` pages are
    /// moved together.
    pub(super) fn new(most: usize, batch: usize) -> EcMaintenance {
        EcMaintenance {
            most,
            schedule: RepairSchedule::new(),
            trims_from: 0,
            moves_from: 0,
            moves: Vec::with_capacity(batch),
            buffer: Some(Buffer::new(batch)),
        }
    }
}

impl EcLane {
    /// Begins the next maintenance task, if there is one.
    pub(super) fn begin_maintenance(&mut self) {
        let Some(mut maintenance) = self.scheme.maintenance.take() else { return };
        if !maintenance.schedule.is_resting()
            && self.free_splits.len() > SPLITS / 2
            && self.free_requests.len() > 16 * MemberSet::MAX
        {
            let repair = self.begin(&mut maintenance);
            self.scheme.maintenance = Some(maintenance);
            if let Some(split) = repair {
                self.repair_rows(split);
            }
            return;
        }
        self.scheme.maintenance = Some(maintenance);
    }

    /// Begins a trim or a move, or returns a split to repair, which the caller begins.
    fn begin(&mut self, maintenance: &mut EcMaintenance) -> Option<EcSplit> {
        let to_repair = self.table.repairable().intersection(self.usable());
        let (is_trim, data) = (self.table.index.has_too_many_spent(), self.table.code.data());
        let is_sparse = self.table.index.is_sparse(data as u64);
        if to_repair.is_empty() && !is_trim && !is_sparse {
            return None;
        }
        if self.splits.iter().flatten().filter(|split| split.task.is_maintenance()).count() >= maintenance.most {
            return None;
        }
        if !to_repair.is_empty() {
            return self.find_to_repair(maintenance, to_repair);
        }
        if is_trim {
            self.begin_trim(maintenance);
        } else if self.operations[MOVER].is_none() {
            self.begin_move(maintenance);
        }
        None
    }

    /// Looks at some rows for one of which a member lacks its part, and claims it.
    fn find_to_repair(&self, maintenance: &mut EcMaintenance, to_repair: MemberSet) -> Option<EcSplit> {
        let index = &self.table.index;
        let end = index.rows_end();
        maintenance.schedule.find(
            &self.table,
            to_repair,
            |row| (row < end).then_some(row),
            |row, member| {
                let word = index.word(row);
                if !word.is_closed() || word.live() == 0 || word.have().has(member) {
                    return RepairLook::Whole;
                }
                if self.table.is_lagging(member) || !index.claim_repair(row, member) {
                    return RepairLook::Busy;
                }
                // Most of the time the neighbours of the row lack the same part.
                let mut task = EcTask::new(EcSplitKind::Repair { member }, row, 1, now_ns());
                let word = index.word(row);
                (task.present, task.have) = (word.present(), word.have());
                while task.rows < ROWS as u64 && !(row + task.rows).is_multiple_of(GROUP) && row + task.rows < end {
                    let next = index.word(row + task.rows);
                    let is_alike = next.is_closed() && (next.present(), next.have()) == (task.present, task.have);
                    if !is_alike || !index.claim_repair(row + task.rows, member) {
                        break;
                    }
                    task.rows += 1;
                }
                let next = row + task.rows;
                RepairLook::Claimed { repair: Split::new(task), next }
            },
        )
    }

    fn repair_rows(&mut self, mut split: EcSplit) {
        let EcSplitKind::Repair { member } = split.task.kind else { return };
        let Some(part) = self.table.part_of(split.task.first, member) else {
            // The member has lost its shard.
            return self.finish_repair(&split, member, false);
        };
        if part < self.table.code.data() && split.task.present & 1 << part == 0 {
            // The part is zeros by definition.
            return self.finish_repair(&split, member, true);
        }
        split.task.part = part;
        let index = self.add_split(split);
        self.widen(index);
    }

    fn finish_repair(&self, split: &EcSplit, member: usize, repaired: bool) {
        (split.task.first..split.task.first + split.task.rows)
            .for_each(|row| self.table.index.finish_repair(row, member, repaired));
    }

    /// Checks whether the part that a member gave for a repair is what was written. If it is not,
    /// the member is not asked again, and others are.
    pub(super) fn is_as_written(&mut self, index: usize, member: usize) -> bool {
        let (table, Some(split)) = (&self.table, &mut self.splits[index]) else { return true };
        let (Some(part), Some(buffer)) = (table.part_of(split.task.first, member), &split.task.buffers[member]) else {
            return true;
        };
        let is_other = |row: &usize| {
            table.index.is_digest(split.task.first + *row as u64, part, buffer.sums()[*row]) == Some(false)
        };
        let Some(row) = (0..split.task.rows as usize).find(is_other) else { return true };
        let page = PageId(split.task.first + row as u64);
        split.done = split.done.difference(MemberSet::one(member));
        split.fail(member, PoolError::Corrupt { page, server: table.server(member) });
        let buffer = split.task.buffers[member].take();
        self.give_buffer(member, buffer);
        false
    }

    /// Ends a repair: the member has its part, or could not be given it.
    pub(super) fn end_repair(&mut self, index: usize, result: Result<(), PoolError>) {
        let Some(split) = self.take_split(index) else { return };
        let EcSplitKind::Repair { member } = split.task.kind else { return };
        if split.indeterminate.has(member) && !self.table.failed().has(member) {
            // The write may still arrive.
            self.table.note_indeterminate(member);
        }
        self.finish_repair(&split, member, result.is_ok());
        if result.is_ok() {
            self.table.restored(split.task.rows);
        }
        for wrong in split.wrong.difference(MemberSet::one(member)).iter() {
            self.table.suspect(split.task.first, split.task.rows, wrong);
        }
        if let (Err(_), Some(maintenance)) = (result, &mut self.scheme.maintenance) {
            maintenance.schedule.rest();
        }
    }

    /// Marks members as lagging that do not store or discard in time. Nobody waits for them, and
    /// the rows stay claimed until they have answered.
    pub(super) fn maintenance_is_slow(&mut self, index: usize, now: u64) {
        let Some(split) = &mut self.splits[index] else { return };
        split.lagging = match split.task.kind {
            EcSplitKind::Repair { member } => MemberSet::one(member),
            _ => split.under_way(),
        };
        let give_up_at = now.saturating_add(EcScheme::REPAIR_DEADLINE.as_nanos() as u64);
        split.lagging.iter().for_each(|member| self.table.mark_lagging(member, give_up_at));
    }

    /// Discards spent rows at all members.
    fn begin_trim(&mut self, maintenance: &mut EcMaintenance) {
        let last = (self.table.index.rows_end() / GROUP).min(self.table.index.rows / GROUP - 1);
        if maintenance.trims_from == 0 || maintenance.trims_from > last {
            maintenance.trims_from = last;
        }
        let (claimed, group) = self.table.index.claim_spent(maintenance.trims_from);
        maintenance.trims_from = group;
        let Some((first, rows)) = claimed else { return maintenance.schedule.rest() };
        let usable = self.usable();
        let split = self.add_split(Split::new(EcTask::new(EcSplitKind::Trim, first, rows, now_ns())));
        self.set_alarm(split, now_ns().saturating_add(EcScheme::REPAIR_DEADLINE.as_nanos() as u64));
        for member in usable.iter() {
            self.send(split, member, false, Op::Discard { page: PageId(first), count: rows });
        }
        if usable.is_empty() {
            self.on_trim_reply(split);
        }
    }

    pub(super) fn on_trim_reply(&mut self, index: usize) {
        if !self.splits[index].as_ref().is_some_and(|split| split.under_way().is_empty()) {
            return;
        }
        let Some(split) = self.take_split(index) else { return };
        // A discard that was not answered may still arrive, on top of newer bytes.
        split
            .indeterminate
            .difference(self.table.failed())
            .iter()
            .for_each(|member| self.table.note_indeterminate(member));
        let is_clean = split.failed.is_empty();
        self.table.index.unclaim(split.task.first, split.task.rows, is_clean);
        if let (false, Some(maintenance)) = (is_clean, &mut self.scheme.maintenance) {
            maintenance.schedule.rest();
        }
    }

    /// Looks at some pages, in order, for those that lie in sparse rows. Pages that are neighbours
    /// in the region shall be neighbours at the members.
    fn begin_move(&mut self, maintenance: &mut EcMaintenance) {
        let (index, data) = (&self.table.index, self.table.code.data() as u32);
        let batch = ROWS * data as usize;
        let (mut page, mut is_round) = (maintenance.moves_from, false);
        for _ in 0..LOOK {
            page = index.next_written(page);
            if page >= index.pages {
                (page, is_round) = (0, true);
                break;
            }
            let version = index.version(page);
            if version != Version::ZEROS {
                let live = index.word(version.row()).live().count_ones();
                if live < data && live * SPARSE.1 <= data * SPARSE.0 {
                    maintenance.moves.push((page, version));
                }
            }
            page += 1;
            if maintenance.moves.len() == batch {
                break;
            }
        }
        maintenance.moves_from = page;
        let is_enough = maintenance.moves.len() == batch || is_round && !maintenance.moves.is_empty();
        if !is_enough {
            return;
        }
        let Some(mut buffer) = maintenance.buffer.take() else { return };
        let count = maintenance.moves.len() as u64;
        buffer.set_pages(count as usize);
        self.operations[MOVER] = Some(Operation {
            tag: 0,
            priority: Priority::Background,
            deadline: EcScheme::REPAIR_DEADLINE,
            started_at: now_ns(),
            kind: OpKind::Read,
            page: 0,
            count,
            split_pages: 0,
            left: count,
            buffer: Some(buffer),
            result: Ok(()),
            knew: MemberSet(0),
            is_unlucky: false,
        });
        self.queued.push_back(MOVER);
    }

    /// Goes on when all pages are read, and ends the move when all are written again.
    pub(super) fn end_mover(&mut self, operation: Operation) {
        let Some(maintenance) = &mut self.scheme.maintenance else { return };
        if operation.kind == OpKind::Read && operation.result.is_ok() && !maintenance.schedule.is_stopped() {
            let operation = Operation {
                kind: OpKind::Write,
                split_pages: 0,
                left: operation.count,
                started_at: now_ns(),
                ..operation
            };
            self.operations[MOVER] = Some(operation);
            return self.queued.push_back(MOVER);
        }
        if operation.result.is_err() {
            maintenance.schedule.rest();
        }
        maintenance.buffer = operation.buffer;
        maintenance.moves.clear();
    }
}
