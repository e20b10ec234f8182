//! Reads: a page comes from the leg that has it, or is made from as many others of its row as there
//! are data pages.

use super::index::{GROUP, Version};
use super::lane::{CARE_DEADLINE, EcLane};
use super::splits::{EcOperationKind, EcSplit, EcSplitKind, ROWS};
use super::writes::seal;
use crate::backend::OpKind as Asked;
use crate::members::HEDGE_MIN;
use crate::{Op, PoolError};
use farfield_core::gf256::{self, PARTS_MAX, Weights};
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;

/// Period, in reads, after which a slow leg is asked all the same, because it may have become
/// faster.
const PROBE_EVERY: u64 = 256;
/// Factor over the latency of the fastest leg from which on a leg counts as slow.
const SLOW_TIMES: u64 = 8;

/// Outcome of reading one page.
enum PageReadOutcome {
    Right,
    /// The page was written or moved meanwhile.
    Relocated,
    Wrong,
}

impl EcLane {
    /// Returns the page at `offset` of a parent.
    fn page_of(&self, parent: usize, offset: u64) -> u64 {
        match (&self.maintenance, &self.operations[parent]) {
            (Some(care), _) if parent == Self::MOVER => care.moves[offset as usize].0,
            (_, Some(known)) => known.page + offset,
            (_, None) => 0,
        }
    }

    /// Sends the next of `left` pages out together. Returns how many; `None` if there is no room
    /// for them now.
    pub(super) fn split_read(&mut self, parent: usize, offset: u64, left: u64) -> Option<u64> {
        if !self.has_room() {
            return None;
        }
        let usable = self.usable();
        if usable.count() < self.table.code.data() {
            if self.members.has_new_lanes() {
                return None;
            }
            self.end_pages(parent, left, Err(self.table.gone()));
            return Some(left);
        }
        let index = &self.table.index;
        let version = index.version(self.page_of(parent, offset));
        if version == Version::ZEROS {
            if let Some(buffer) = self.operations[parent].as_mut().and_then(|known| known.buffer.as_mut()) {
                buffer.page_mut(offset as usize).fill(0);
                buffer.sums_mut()[offset as usize] = self.zero_sum;
            }
            self.end_pages(parent, 1, Ok(()));
            return Some(1);
        }
        let (row, part) = (version.row(), version.part());
        let word = index.word(row);
        if !word.is_closed() || word.live() & 1 << part == 0 {
            // The page lies elsewhere by now.
            return Some(0);
        }
        let mut piece = EcSplit::new(EcSplitKind::Read { operation: parent, offset }, row, 1, now_ns());
        (piece.part, piece.present, piece.have, piece.versions[0]) = (part, word.present(), word.have(), version);
        let most = left.min(ROWS as u64).min(GROUP - row % GROUP);
        while piece.rows < most {
            let next = index.version(self.page_of(parent, offset + piece.rows));
            let is_behind = next != Version::ZEROS && next.row() == row + piece.rows && next.part() == part;
            if !is_behind {
                break;
            }
            let word = index.word(next.row());
            if !word.is_closed() || (word.present(), word.have()) != (piece.present, piece.have) {
                break;
            }
            piece.versions[piece.rows as usize] = next;
            piece.rows += 1;
        }
        let (leg, rows) = (self.table.member_of(row, part), piece.rows);
        let is_probe = self.is_slow(leg, usable) && {
            self.slow_reads += 1;
            self.slow_reads.is_multiple_of(PROBE_EVERY)
        };
        if !piece.have.has(leg) || !usable.has(leg) || self.is_slow(leg, usable) && !is_probe {
            let piece = self.add_split(piece);
            self.widen(piece);
            return Some(rows);
        }
        let lane = self.members[leg].as_mut().filter(|lane| lane.has_buffer_for_read(rows))?;
        let (buffer, patience) =
            (lane.take_buffer(rows)?, if is_probe { HEDGE_MIN.as_nanos() as u64 } else { lane.hedge_after() });
        let (page, alarm_at) = (PageId(row), piece.started_at.saturating_add(patience));
        let op = match self.operations[parent].as_ref().map(|known| known.kind) {
            Some(EcOperationKind::Caller(asked)) => asked.read(page, buffer),
            _ => Op::Read { page, buffer },
        };
        piece.direct = Some(leg);
        let piece = self.add_split(piece);
        self.send(piece, leg, op);
        self.set_alarm(piece, alarm_at);
        Some(rows)
    }

    fn is_slow(&self, leg: usize, usable: MemberSet) -> bool {
        let latency = |leg: usize| self.members[leg].as_ref().map_or(0, |known| known.latency_ns);
        let own = latency(leg);
        let least = || usable.iter().map(latency).filter(|ns| *ns > 0).min().unwrap_or(0);
        own > HEDGE_MIN.as_nanos() as u64 && own / SLOW_TIMES > least()
    }

    /// Returns the legs with a part of the piece's rows that helps to make the wanted one, and how
    /// many of those it takes.
    fn sources(&self, piece: &EcSplit) -> (MemberSet, usize) {
        let code = self.table.code;
        let is_zero = |part: usize| part < code.data() && piece.present & 1 << part == 0;
        let helps = |leg: &usize| self.table.part_of(piece.first, *leg).is_some_and(|part| !is_zero(part));
        let needed = piece.present.count_ones() as usize;
        let of = |legs: MemberSet| -> MemberSet {
            let may = piece.have.intersection(legs).difference(piece.failed);
            may.iter().filter(helps).collect()
        };
        let sources = of(self.usable());
        // Late legs are better than none. Legs that were asked already may stay silent.
        let is_enough = sources.difference(piece.under_way()).union(sources.intersection(piece.got)).count() >= needed;
        (if is_enough && !piece.is_wide { sources } else { of(self.connected_members()) }, needed)
    }

    /// Reads several parts, to make the one that is wanted. That begins when there are buffers for
    /// all of them, so that pieces do not wait for each other.
    pub(super) fn widen(&mut self, index: usize) {
        let Some(piece) = &self.splits[index] else { return };
        if piece.is_wide || self.starved.contains(&index) {
            return;
        }
        let (all, needed) = self.sources(piece);
        let (sources, rows) = (all.difference(piece.under_way()).difference(piece.got), piece.rows);
        if sources.count() < needed {
            if piece.under_way().is_empty() {
                self.end_read_badly(index);
            }
            return;
        }
        let has_buffer = |leg: &usize| self.members[*leg].as_ref().is_some_and(|lane| lane.has_buffer_for_read(rows));
        let with_room: MemberSet = sources.iter().filter(has_buffer).collect();
        let mended = match piece.kind {
            EcSplitKind::Repair { member: leg } => Some(leg),
            _ => None,
        };
        let is_ready = mended.is_none_or(|leg| self.members[leg].as_ref().is_some_and(|lane| lane.has_buffer(rows)));
        if with_room.count() < needed || !is_ready || self.free_requests.len() < MemberSet::MAX {
            self.starved.push_back(index);
            // The piece does not wait beyond its deadline.
            if let EcSplitKind::Read { operation: parent, .. } = piece.kind
                && piece.under_way().is_empty()
                && let Some(ends_at) = self.operations[parent].as_ref().map(|parent| parent.ends_at())
            {
                self.set_alarm(index, ends_at);
            }
            return;
        }
        for leg in with_room.iter().chain(mended) {
            let buffer = self.members[leg].as_mut().and_then(|lane| lane.take_buffer(rows));
            if let Some(piece) = &mut self.splits[index] {
                piece.buffers[leg] = buffer;
            }
        }
        if let Some(piece) = &mut self.splits[index] {
            piece.is_wide = true;
        }
        self.ask(index, needed);
    }

    /// Asks `count` more legs, the fastest of those that have not been asked.
    fn ask(&mut self, index: usize, count: usize) {
        let now = now_ns();
        for _ in 0..count {
            let Some(piece) = &self.splits[index] else { return };
            let asked = piece.got.union(piece.failed).union(piece.under_way());
            let is_open = |leg: &usize| piece.have.has(*leg) && !asked.has(*leg) && piece.buffers[*leg].is_some();
            let latency = |leg: &usize| self.members[*leg].as_ref().map_or(u64::MAX, |lane| lane.latency_ns);
            let usable = self.usable();
            // Late legs come last.
            let order = |leg: &usize| (!usable.has(*leg), latency(leg));
            let Some(leg) = self.connected_members().iter().filter(is_open).min_by_key(order) else { break };
            let page = PageId(piece.first);
            let Some(buffer) = self.splits[index].as_mut().and_then(|piece| piece.buffers[leg].take()) else { break };
            self.send(index, leg, Op::Read { page, buffer });
            let patience = self.members[leg].as_ref().map_or(0, |lane| lane.hedge_after());
            self.set_alarm(index, now.saturating_add(patience));
        }
    }

    /// Asks more legs for a read that takes longer than usual (hedged read).
    pub(super) fn read_is_slow(&mut self, index: usize) {
        match &self.splits[index] {
            Some(piece) if piece.is_wide => {
                let before = piece.under_way();
                self.ask(index, PARTS_MAX);
                let Some(piece) = &self.splits[index] else { return };
                let unasked = self.sources(piece).0.difference(piece.got).difference(piece.under_way());
                if piece.under_way() == before && !unasked.is_empty() {
                    // The legs that could answer had no free buffers.
                    self.note_slow(index);
                    self.restart_read(index);
                }
            }
            Some(_) => self.widen(index),
            None => {}
        }
    }

    /// Notes as slow the legs that have not answered for longer than usual.
    fn note_slow(&mut self, index: usize) {
        let (Some(piece), now) = (&self.splits[index], now_ns()) else { return };
        for slow in piece.under_way().iter() {
            let asked_at =
                piece.requests[slow].and_then(|errand| Some(self.requests[errand as usize].as_ref()?.started_at));
            if let (Some(lane), Some(asked_at)) = (&mut self.members[slow], asked_at) {
                let passed = now.saturating_sub(asked_at);
                if passed >= lane.hedge_after() {
                    // It is unknown how long the answer will take. It has taken this long already.
                    lane.is_slower_than(passed);
                }
            }
        }
    }

    pub(super) fn on_read_reply(&mut self, index: usize, leg: usize, is_answer: bool, started_at: u64) {
        let now = now_ns();
        if let Some(lane) = self.members[leg].as_mut().filter(|_| is_answer) {
            lane.took(now.saturating_sub(started_at));
        }
        let Some(piece) = &self.splits[index] else { return };
        let is_whole = piece.part < PARTS_MAX && self.table.part_of(piece.first, leg) == Some(piece.part);
        if is_answer && is_whole && matches!(piece.kind, EcSplitKind::Read { .. }) && self.deliver(index, leg) {
            return;
        }
        let Some(piece) = &self.splits[index] else { return };
        if !piece.is_wide {
            // A leg has failed, or has given other bytes than those that were written.
            if !self.starved.contains(&index) {
                self.widen(index);
            }
            return;
        }
        let (sources, needed) = self.sources(piece);
        let (got, coming) = (piece.got.intersection(sources), piece.under_way().intersection(sources));
        if got.count() >= needed {
            return self.make(index, got);
        }
        let lacking = needed.saturating_sub(got.count() + coming.count());
        if lacking == 0 {
            return;
        }
        self.ask(index, lacking);
        let Some(piece) = &self.splits[index] else { return };
        if piece.got.union(piece.under_way()).intersection(sources).count() < needed {
            if sources.count() < needed {
                if piece.under_way().is_empty() {
                    self.end_read_badly(index);
                }
                return;
            }
            self.restart_read(index);
        }
    }

    /// Reads a piece from the beginning, because there were no buffers for the legs that must be
    /// asked. So it keeps no buffers meanwhile.
    fn restart_read(&mut self, index: usize) {
        let Some(old) = &self.splits[index] else { return };
        let mut piece = EcSplit::new(old.kind, old.first, old.rows, old.started_at);
        (piece.part, piece.present, piece.have, piece.versions) = (old.part, old.present, old.have, old.versions);
        (piece.failed, piece.wrong, piece.error) = (old.failed, old.wrong, old.error);
        self.take_split(index, false);
        let index = self.add_split(piece);
        self.widen(index);
    }

    fn read_outcome(&self, piece: &EcSplit, row: usize, sum: Option<u64>) -> PageReadOutcome {
        let EcSplitKind::Read { operation: parent, offset } = piece.kind else { return PageReadOutcome::Right };
        let version = piece.versions[row];
        if self.table.index.version(self.page_of(parent, offset + row as u64)) != version {
            PageReadOutcome::Relocated
        } else if sum.is_some_and(|sum| !version.is_of(sum)) {
            PageReadOutcome::Wrong
        } else {
            PageReadOutcome::Right
        }
    }

    /// Delivers the answer of the leg that has the pages. Returns `false` if that is not what was
    /// written.
    fn deliver(&mut self, index: usize, leg: usize) -> bool {
        let Some(piece) = &self.splits[index] else { return true };
        let (EcSplitKind::Read { operation: parent, offset }, Some(buffer)) = (piece.kind, &piece.buffers[leg]) else {
            return true;
        };
        let kind = self.operations[parent].as_ref().map(|known| known.kind);
        let part = match kind {
            Some(EcOperationKind::Caller(Asked::Part(part))) if piece.direct == Some(leg) => Some(part),
            _ => None,
        };
        // A part comes with the checksum of its page.
        let rows = piece.rows as usize;
        if (0..rows)
            .any(|row| matches!(self.read_outcome(piece, row, Some(buffer.sums()[row])), PageReadOutcome::Wrong))
        {
            let error =
                PoolError::Corrupt { page: PageId(self.page_of(parent, offset)), server: self.table.server(leg) };
            if let Some(piece) = &mut self.splits[index] {
                piece.got = piece.got.difference(MemberSet::one(leg));
                piece.fail(leg, error);
                let buffer = piece.buffers[leg].take();
                self.give_buffer(leg, buffer);
            }
            return false;
        }
        if let Some(target) = self.operations[parent].as_mut().and_then(|known| known.buffer.as_mut()) {
            for row in 0..rows {
                let (to, range) = (offset as usize + row, part.map_or(0..buffer.page(row).len(), |part| part.range()));
                target.page_mut(to)[range.clone()].copy_from_slice(&buffer.page(row)[range]);
                target.sums_mut()[to] = buffer.sums()[row];
            }
        }
        self.end_read(index);
        true
    }

    /// Returns how to make the wanted part from the parts that these legs gave, if they are enough.
    fn recipe(&self, piece: &EcSplit, got: MemberSet) -> Option<Recipe> {
        let code = self.table.code;
        let zeros = (0..code.data()).filter(|part| piece.present & 1 << part == 0);
        let mut from = zeros.fold(0u16, |from, part| from | 1 << part);
        let mut legs = [None; PARTS_MAX];
        for leg in got.iter() {
            if let Some(part) = self.table.part_of(piece.first, leg)
                && (from.count_ones() as usize) < code.data()
            {
                legs[part] = Some(leg);
                from |= 1 << part;
            }
        }
        let is_enough = from.count_ones() as usize == code.data();
        is_enough.then(|| Recipe { members: legs, weights: code.weights(from, piece.part) })
    }

    /// Makes the wanted part, now that enough others are there.
    fn make(&mut self, index: usize, got: MemberSet) {
        let Some(piece) = &self.splits[index] else { return };
        let Some(recipe) = self.recipe(piece, got) else {
            // Seats have changed.
            return self.restart_read(index);
        };
        let EcSplitKind::Repair { member: leg } = piece.kind else { return self.make_for_caller(index, got) };
        let Some(piece) = &mut self.splits[index] else { return };
        let Some(mut target) = piece.buffers[leg].take() else { return };
        let mut is_right = true;
        for row in 0..piece.rows as usize {
            recipe.make(piece, target.page_mut(row), row);
            let (number, sum) = (piece.first + row as u64, seal(&mut target, row));
            match self.table.index.is_digest(number, piece.part, sum) {
                Some(is_same) => is_right &= is_same,
                None => self.table.index.set_digest(number, piece.part, Some(sum)),
            }
        }
        let page = PageId(piece.first);
        piece.alarm_at = u64::MAX;
        if !is_right {
            piece.buffers[leg] = Some(target);
            return self.end_repair(index, Err(PoolError::Corrupt { page, server: self.table.server(leg) }));
        }
        self.send(index, leg, Op::Write { page, buffer: target });
        self.set_alarm(index, now_ns().saturating_add(CARE_DEADLINE.as_nanos() as u64));
    }

    /// Makes the pages where the caller wants them. If they are not what was written, one of the
    /// legs has given old bytes: each is left out in turn.
    fn make_for_caller(&mut self, index: usize, got: MemberSet) {
        let Some(piece) = &self.splits[index] else { return };
        let needed = self.sources(piece).1;
        let one_less = got.iter().map(MemberSet::one).filter(|_| got.count() > needed);
        for without in core::iter::once(MemberSet(0)).chain(one_less) {
            let Some(piece) = &self.splits[index] else { return };
            let Some(recipe) = self.recipe(piece, got.difference(without)) else { continue };
            let EcSplitKind::Read { operation: parent, offset } = piece.kind else { return };
            let Some(target) = self.operations[parent].as_mut().and_then(|known| known.buffer.as_mut()) else { return };
            let mut sums = [0; ROWS];
            for (row, sum) in sums.iter_mut().enumerate().take(piece.rows as usize) {
                let to = offset as usize + row;
                recipe.make(piece, target.page_mut(to), row);
                *sum = seal(target, to);
            }
            let is_wrong =
                |row: usize| matches!(self.read_outcome(piece, row, Some(sums[row])), PageReadOutcome::Wrong);
            if !(0..piece.rows as usize).any(is_wrong) {
                if let Some(piece) = &mut self.splits[index] {
                    piece.wrong = piece.wrong.union(without);
                }
                return self.end_read(index);
            }
        }
        let server = self.table.server(self.table.member_of(piece.first, piece.part));
        let page = PageId(piece.first);
        if let Some(piece) = &mut self.splits[index] {
            piece.error = Some(PoolError::Corrupt { page, server });
        }
        self.ask(index, PARTS_MAX);
        if self.splits[index].as_ref().is_some_and(|piece| piece.under_way().is_empty()) {
            self.end_read_badly(index);
        }
    }

    /// Ends a read whose pages are where the caller wants them. Pages that have another version by
    /// now are read again.
    fn end_read(&mut self, index: usize) {
        let Some(piece) = self.splits[index].as_ref() else { return };
        let (EcSplitKind::Read { operation: parent, offset }, rows) = (piece.kind, piece.rows) else { return };
        let mut right = 0;
        for row in 0..rows {
            match self.read_outcome(piece, row as usize, None) {
                PageReadOutcome::Right => right += 1,
                _ => self.retry_reads.push_back((parent, offset + row, 1)),
            }
        }
        self.note_slow(index);
        let Some(piece) = self.take_split(index, false) else { return };
        for leg in piece.wrong.iter() {
            self.table.suspect(piece.first, piece.rows, leg);
        }
        self.end_pages(parent, right, Ok(()));
    }

    /// Ends a read or a mend for which too few legs have an answer.
    pub(super) fn end_read_badly(&mut self, index: usize) {
        let Some(piece) = self.splits[index].as_ref() else { return };
        let error = piece.error.unwrap_or(self.table.gone());
        let (task, rows) = (piece.kind, piece.rows);
        match task {
            EcSplitKind::Repair { .. } => self.end_repair(index, Err(error)),
            EcSplitKind::Read { operation: parent, offset } => {
                // Legs name pages by their row.
                let error = match error {
                    PoolError::Corrupt { server, .. } => {
                        PoolError::Corrupt { page: PageId(self.page_of(parent, offset)), server }
                    }
                    other => other,
                };
                // Pages that have another version by now are read from there. Pages that other legs
                // have by now are read from those.
                let have = |row: u64| self.table.index.word(piece.first + row).have();
                let is_again = |row: u64| {
                    self.members.has_new_lanes()
                        || matches!(self.read_outcome(piece, row as usize, None), PageReadOutcome::Relocated)
                        || !have(row).difference(piece.have).is_empty()
                };
                let again: [bool; ROWS] = core::array::from_fn(|row| (row as u64) < rows && is_again(row as u64));
                for row in (0..rows).filter(|row| again[*row as usize]) {
                    self.retry_reads.push_back((parent, offset + row, 1));
                }
                self.take_split(index, false);
                let ended = rows - again.iter().filter(|again| **again).count() as u64;
                if ended > 0 {
                    self.end_pages(parent, ended, Err(error));
                }
            }
            EcSplitKind::Write | EcSplitKind::Trim => {}
        }
    }
}

/// Way to make a part from others of its row.
struct Recipe {
    /// Index of the leg that gave each part.
    members: [Option<usize>; PARTS_MAX],
    weights: Weights,
}

impl Recipe {
    fn make(&self, piece: &EcSplit, target: &mut [u8], row: usize) {
        target.fill(0);
        for (leg, weight) in self.members.iter().zip(self.weights) {
            if let Some(buffer) = leg.and_then(|leg| piece.buffers[leg].as_ref()) {
                gf256::add(target, buffer.page(row), weight);
            }
        }
    }
}
