//! Background care of an erasure-coded pool: gives legs the parts that they lack, writes sparse
//! rows again, and discards unneeded rows at the legs.

use super::index::{GROUP, Version};
use super::lane::{CARE_DEADLINE, EcLane};
use super::splits::{EcOperation, EcOperationKind, EcSplit, EcSplitKind, PIECES, ROWS};
use crate::{Buffer, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;

/// Number of rows, or of pages, that are looked at in one go.
const LOOK: u64 = 512;
/// Pause after a failure.
const REST: Duration = Duration::from_millis(100);
/// Share of live data pages, as a fraction, up to which a row is written again: four of five.
const SPARSE: (u32, u32) = (4, 5);

/// Background care that one lane takes besides its operations.
pub(super) struct EcMaintenance {
    most: usize,
    /// Round over all rows: the leg that it is for, how often that leg had been hurt when it began,
    /// the next row, and whether anything was found.
    round: Option<EcRepairPass>,
    /// Group that is looked at next for spent rows, from the last one downwards.
    trims_from: u64,
    /// Page that is looked at next for sparse rows.
    moves_from: u64,
    /// Pages that are moved, each with the version that it has until then.
    pub(super) moves: Vec<(u64, Version)>,
    buffer: Option<Buffer>,
    rests_until: u64,
}

struct EcRepairPass {
    member: usize,
    missed_generation: u32,
    next: u64,
    is_clean: bool,
}

impl EcMaintenance {
    /// Creates the care of a lane, with at most `most` pieces under way; `batch` pages are moved
    /// together.
    pub(super) fn new(most: usize, batch: usize) -> EcMaintenance {
        EcMaintenance {
            most,
            round: None,
            trims_from: 0,
            moves_from: 0,
            moves: Vec::with_capacity(batch),
            buffer: Some(Buffer::new(batch)),
            rests_until: 0,
        }
    }

    /// Starts nothing more; care that is under way ends.
    pub(super) fn give_up(&mut self) {
        self.rests_until = u64::MAX;
    }

    pub(super) fn go_on(&mut self) {
        self.rests_until = 0;
    }

    fn rest(&mut self) {
        self.rests_until = self.rests_until.max(now_ns().saturating_add(REST.as_nanos() as u64));
    }
}

impl EcLane {
    /// Begins the next task of care, if there is one.
    pub(super) fn begin_maintenance(&mut self) {
        let Some(mut care) = self.maintenance.take() else { return };
        let is_resting = care.rests_until > 0 && now_ns() < care.rests_until;
        if !is_resting && self.free_splits.len() > PIECES / 2 && self.free_requests.len() > 16 * MemberSet::MAX {
            let mend = self.begin(&mut care);
            self.maintenance = Some(care);
            if let Some(piece) = mend {
                self.repair_rows(piece);
            }
            return;
        }
        self.maintenance = Some(care);
    }

    /// Begins a trim or a move, or returns a piece to mend, which the caller begins.
    fn begin(&mut self, care: &mut EcMaintenance) -> Option<EcSplit> {
        let to_heal = self.table.repairable().intersection(self.usable());
        let (is_trim, data) = (self.table.index.has_too_many_spent(), self.table.code.data());
        let is_sparse = self.table.index.is_sparse(data as u64);
        if to_heal.is_empty() && !is_trim && !is_sparse {
            return None;
        }
        let is_care = |piece: &&EcSplit| matches!(piece.kind, EcSplitKind::Repair { .. } | EcSplitKind::Trim);
        if self.splits.iter().flatten().filter(is_care).count() >= care.most {
            return None;
        }
        if !to_heal.is_empty() {
            return self.find_to_repair(care, to_heal);
        }
        if is_trim {
            self.begin_trim(care);
        } else if self.operations[Self::MOVER].is_none() {
            self.begin_move(care);
        }
        None
    }

    /// Looks at some rows for one of which a leg lacks its part. A round over all rows is for one
    /// leg; the leg is healed when the round finds nothing.
    fn find_to_repair(&self, care: &mut EcMaintenance, to_heal: MemberSet) -> Option<EcSplit> {
        let table = &self.table;
        let round = care.round.get_or_insert_with(|| {
            let leg = to_heal.iter().next().unwrap_or(0);
            EcRepairPass { member: leg, missed_generation: table.missed_generation(leg), next: 0, is_clean: true }
        });
        let (leg, end) = (round.member, table.index.rows_end());
        for _ in 0..LOOK {
            if round.next >= end || !to_heal.has(leg) {
                if round.is_clean && to_heal.has(leg) {
                    table.set_repaired(leg, round.missed_generation);
                }
                care.round = None;
                return None;
            }
            let row = round.next;
            round.next += 1;
            let word = table.index.word(row);
            if !word.is_closed() || word.live() == 0 || word.have().has(leg) {
                continue;
            }
            round.is_clean = false;
            if table.is_lagging(leg) || !table.index.claim_repair(row, leg) {
                continue;
            }
            // Most of the time the neighbours of the row lack the same part.
            let mut piece = EcSplit::new(EcSplitKind::Repair { member: leg }, row, 1, now_ns());
            let word = table.index.word(row);
            (piece.present, piece.have) = (word.present(), word.have());
            while piece.rows < ROWS as u64 && !(row + piece.rows).is_multiple_of(GROUP) && row + piece.rows < end {
                let next = table.index.word(row + piece.rows);
                let is_alike = next.is_closed() && (next.present(), next.have()) == (piece.present, piece.have);
                if !is_alike || !table.index.claim_repair(row + piece.rows, leg) {
                    break;
                }
                piece.rows += 1;
            }
            round.next = row + piece.rows;
            return Some(piece);
        }
        None
    }

    fn repair_rows(&mut self, mut piece: EcSplit) {
        let EcSplitKind::Repair { member: leg } = piece.kind else { return };
        let Some(part) = self.table.part_of(piece.first, leg) else {
            // The leg has lost its seat.
            return self.finish_repair(&piece, leg, false);
        };
        if part < self.table.code.data() && piece.present & 1 << part == 0 {
            // The part is zeros by definition.
            return self.finish_repair(&piece, leg, true);
        }
        piece.part = part;
        let index = self.add_split(piece);
        self.widen(index);
    }

    fn finish_repair(&self, piece: &EcSplit, leg: usize, mended: bool) {
        (piece.first..piece.first + piece.rows).for_each(|row| self.table.index.finish_repair(row, leg, mended));
    }

    /// Checks whether the part that a leg gave for a mend is what was written. If it is not, the
    /// leg is not asked again, and others are.
    pub(super) fn is_as_written(&mut self, index: usize, leg: usize) -> bool {
        let (table, Some(piece)) = (&self.table, &mut self.splits[index]) else { return true };
        let (Some(part), Some(buffer)) = (table.part_of(piece.first, leg), &piece.buffers[leg]) else { return true };
        let is_other =
            |row: &usize| table.index.is_digest(piece.first + *row as u64, part, buffer.sums()[*row]) == Some(false);
        let Some(row) = (0..piece.rows as usize).find(is_other) else { return true };
        let page = PageId(piece.first + row as u64);
        piece.got = piece.got.difference(MemberSet::one(leg));
        piece.fail(leg, PoolError::Corrupt { page, server: table.server(leg) });
        let buffer = piece.buffers[leg].take();
        self.give_buffer(leg, buffer);
        false
    }

    /// Ends a mend: the leg has its part, or could not be given it.
    pub(super) fn end_repair(&mut self, index: usize, result: Result<(), PoolError>) {
        let Some(piece) = self.take_split(index, false) else { return };
        let EcSplitKind::Repair { member: leg } = piece.kind else { return };
        if piece.indeterminate.has(leg) && !self.table.failed().has(leg) {
            // The write may still arrive.
            self.table.note_indeterminate(leg);
        }
        self.finish_repair(&piece, leg, result.is_ok());
        if result.is_ok() {
            self.table.restored(piece.rows);
        }
        for wrong in piece.wrong.difference(MemberSet::one(leg)).iter() {
            self.table.suspect(piece.first, piece.rows, wrong);
        }
        if let (Err(_), Some(care)) = (result, &mut self.maintenance) {
            care.rest();
        }
    }

    /// Notes legs as late that do not store or discard in time. Nobody waits for them, and the rows
    /// stay claimed until they have answered.
    pub(super) fn maintenance_is_slow(&mut self, index: usize, now: u64) {
        let Some(piece) = &mut self.splits[index] else { return };
        piece.lagging = match piece.kind {
            EcSplitKind::Repair { member: leg } => MemberSet::one(leg),
            _ => piece.under_way(),
        };
        let give_up_at = now.saturating_add(CARE_DEADLINE.as_nanos() as u64);
        piece.lagging.iter().for_each(|leg| self.table.mark_lagging(leg, give_up_at));
    }

    /// Discards spent rows at all legs.
    fn begin_trim(&mut self, care: &mut EcMaintenance) {
        let last = (self.table.index.rows_end() / GROUP).min(self.table.index.rows / GROUP - 1);
        if care.trims_from == 0 || care.trims_from > last {
            care.trims_from = last;
        }
        let (claimed, group) = self.table.index.claim_spent(care.trims_from);
        care.trims_from = group;
        let Some((first, rows)) = claimed else { return care.rest() };
        let usable = self.usable();
        let piece = self.add_split(EcSplit::new(EcSplitKind::Trim, first, rows, now_ns()));
        self.set_alarm(piece, now_ns().saturating_add(CARE_DEADLINE.as_nanos() as u64));
        for leg in usable.iter() {
            self.send(piece, leg, Op::Discard { page: PageId(first), count: rows });
        }
        if usable.is_empty() {
            self.on_trim_reply(piece);
        }
    }

    pub(super) fn on_trim_reply(&mut self, index: usize) {
        if !self.splits[index].as_ref().is_some_and(|piece| piece.under_way().is_empty()) {
            return;
        }
        let Some(piece) = self.take_split(index, false) else { return };
        // A discard that was not answered may still arrive, on top of newer bytes.
        piece.indeterminate.difference(self.table.failed()).iter().for_each(|leg| self.table.note_indeterminate(leg));
        let is_clean = piece.failed.is_empty();
        self.table.index.unclaim(piece.first, piece.rows, is_clean);
        if let (false, Some(care)) = (is_clean, &mut self.maintenance) {
            care.rest();
        }
    }

    /// Looks at some pages, in order, for those that lie in sparse rows. Pages that are neighbours
    /// in the region shall be neighbours at the legs.
    fn begin_move(&mut self, care: &mut EcMaintenance) {
        let (index, data) = (&self.table.index, self.table.code.data() as u32);
        let batch = ROWS * data as usize;
        let (mut page, mut is_round) = (care.moves_from, false);
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
                    care.moves.push((page, version));
                }
            }
            page += 1;
            if care.moves.len() == batch {
                break;
            }
        }
        care.moves_from = page;
        let is_enough = care.moves.len() == batch || is_round && !care.moves.is_empty();
        if !is_enough {
            return;
        }
        let Some(mut buffer) = care.buffer.take() else { return };
        let count = care.moves.len() as u64;
        buffer.set_pages(count as usize);
        self.operations[Self::MOVER] = Some(EcOperation {
            tag: 0,
            priority: Priority::Background,
            deadline: CARE_DEADLINE,
            started_at: now_ns(),
            kind: EcOperationKind::Gather,
            page: 0,
            count,
            split_pages: 0,
            left: count,
            buffer: Some(buffer),
            result: Ok(()),
            knew: MemberSet(0),
            is_unlucky: false,
        });
        self.queued.push_back(Self::MOVER);
    }

    /// Goes on when all pages are read, and ends the move when all are written again.
    pub(super) fn end_mover(&mut self, parent: EcOperation) {
        let Some(care) = &mut self.maintenance else { return };
        if parent.kind == EcOperationKind::Gather && parent.result.is_ok() && care.rests_until != u64::MAX {
            let parent = EcOperation {
                kind: EcOperationKind::Move,
                split_pages: 0,
                left: parent.count,
                started_at: now_ns(),
                ..parent
            };
            self.operations[Self::MOVER] = Some(parent);
            return self.queued.push_back(Self::MOVER);
        }
        if parent.result.is_err() {
            care.rest();
        }
        care.buffer = parent.buffer;
        care.moves.clear();
    }
}
