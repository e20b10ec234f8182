//! Reads: a page comes from the member that has it, or is made from as many others of its row as
//! there are data pages.

use super::index::{GROUP, Version};
use super::lane::{EcLane, EcScheme, MOVER};
use super::splits::{EcSplit, EcSplitKind, EcTask, ROWS};
use super::writes::seal;
use crate::contract::backend::OpKind;
use crate::redundant::members::HEDGE_MIN;
use crate::redundant::scheme::Scheme;
use crate::redundant::split::Split;
use crate::{Op, PoolError};
use farfield_core::gf256::{self, PARTS_MAX, Weights};
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;

/// Period, in reads, after which a slow member is asked all the same, because it may have become
/// faster.
const PROBE_EVERY: u64 = 256;
/// Factor over the latency of the fastest member from which on a member counts as slow.
const SLOW_TIMES: u64 = 8;

/// Outcome of reading one page.
enum PageReadOutcome {
    Right,
    /// The page was written or moved meanwhile.
    Relocated,
    Wrong,
}

impl EcLane {
    /// Returns the page at `offset` of an operation.
    fn page_of(&self, operation: usize, offset: u64) -> u64 {
        match (&self.scheme.maintenance, &self.operations[operation]) {
            (Some(maintenance), _) if operation == MOVER => maintenance.moves[offset as usize].0,
            (_, Some(known)) => known.page + offset,
            (_, None) => 0,
        }
    }

    /// Sends the next of `left` pages out together. Returns how many; `None` if there is no room
    /// for them now.
    pub(super) fn split_read(&mut self, operation: usize, offset: u64, left: u64) -> Option<u64> {
        if !self.has_room() {
            return None;
        }
        let usable = self.usable();
        if usable.count() < self.table.code.data() {
            if self.members.has_new_lanes() {
                return None;
            }
            self.end_pages(operation, left, Err(self.table.gone()));
            return Some(left);
        }
        let index = &self.table.index;
        let version = index.version(self.page_of(operation, offset));
        if version == Version::ZEROS {
            if let Some(buffer) = self.operations[operation].as_mut().and_then(|known| known.buffer.as_mut()) {
                buffer.page_mut(offset as usize).fill(0);
                buffer.sums_mut()[offset as usize] = self.scheme.zero_sum;
            }
            self.end_pages(operation, 1, Ok(()));
            return Some(1);
        }
        let (row, part) = (version.row(), version.part());
        let word = index.word(row);
        if !word.is_closed() || word.live() & 1 << part == 0 {
            // The page lies elsewhere by now.
            return Some(0);
        }
        let mut split = Split::new(EcTask::new(EcSplitKind::Read { operation, offset }, row, 1, now_ns()));
        (split.task.part, split.task.present, split.task.have, split.task.versions[0]) =
            (part, word.present(), word.have(), version);
        let most = left.min(ROWS as u64).min(GROUP - row % GROUP);
        while split.task.rows < most {
            let next = index.version(self.page_of(operation, offset + split.task.rows));
            let is_behind = next != Version::ZEROS && next.row() == row + split.task.rows && next.part() == part;
            if !is_behind {
                break;
            }
            let word = index.word(next.row());
            if !word.is_closed() || (word.present(), word.have()) != (split.task.present, split.task.have) {
                break;
            }
            split.task.versions[split.task.rows as usize] = next;
            split.task.rows += 1;
        }
        let (member, rows) = (self.table.member_of(row, part), split.task.rows);
        let is_probe = self.is_slow(member, usable) && {
            self.scheme.slow_reads += 1;
            self.scheme.slow_reads.is_multiple_of(PROBE_EVERY)
        };
        if !split.task.have.has(member) || !usable.has(member) || self.is_slow(member, usable) && !is_probe {
            let split = self.add_split(split);
            self.widen(split);
            return Some(rows);
        }
        let lane = self.members[member].as_mut()?;
        if !lane.has_buffer_for_read(rows) {
            let waits_until = lane.read_waits_until(split.task.started_at);
            if waits_until > split.task.started_at {
                self.look_again_at(waits_until);
                return None;
            }
            // It answers none of the reads that have the buffers.
            let split = self.add_split(split);
            self.widen(split);
            return Some(rows);
        }
        let (buffer, hedge_after) =
            (lane.take_buffer(rows)?, if is_probe { HEDGE_MIN.as_nanos() as u64 } else { lane.hedge_after() });
        let (page, alarm_at) = (PageId(row), split.task.started_at.saturating_add(hedge_after));
        let kind = self.operations[operation].as_ref().map_or(OpKind::Read, |known| known.kind);
        split.task.direct = Some(member);
        let split = self.add_split(split);
        self.send(split, member, false, kind.read(page, buffer));
        self.set_alarm(split, alarm_at);
        Some(rows)
    }

    fn is_slow(&self, member: usize, usable: MemberSet) -> bool {
        let latency = |member: usize| self.members[member].as_ref().map_or(0, |known| known.latency_ns);
        let own = latency(member);
        let least = || usable.iter().map(latency).filter(|ns| *ns > 0).min().unwrap_or(0);
        own > HEDGE_MIN.as_nanos() as u64 && own / SLOW_TIMES > least()
    }

    /// Returns the members with a part of the split's rows that helps to make the wanted one, and
    /// how many of those it takes.
    fn sources(&self, split: &EcSplit) -> (MemberSet, usize) {
        let code = self.table.code;
        let is_zero = |part: usize| part < code.data() && split.task.present & 1 << part == 0;
        let helps = |member: &usize| self.table.part_of(split.task.first, *member).is_some_and(|part| !is_zero(part));
        let needed = split.task.present.count_ones() as usize;
        let of = |members: MemberSet| -> MemberSet {
            let may = split.task.have.intersection(members).difference(split.failed);
            may.iter().filter(helps).collect()
        };
        let sources = of(self.usable());
        // Lagging members are better than none. Members that were asked already may stay silent.
        let is_enough = sources.difference(split.under_way()).union(sources.intersection(split.done)).count() >= needed;
        let is_first_try = !split.task.is_wide && !split.task.needs_all;
        (if is_enough && is_first_try { sources } else { of(self.connected_members()) }, needed)
    }

    /// Reads several parts, to make the one that is wanted. That begins when there are buffers for
    /// all of them, so that splits do not wait for each other.
    pub(super) fn widen(&mut self, index: usize) {
        let Some(split) = &self.splits[index] else { return };
        if split.task.is_wide || self.scheme.starved.contains(&index) {
            return;
        }
        let (all, needed) = self.sources(split);
        let (sources, rows) = (all.difference(split.under_way()).difference(split.done), split.task.rows);
        if sources.count() < needed {
            if split.under_way().is_empty() {
                self.end_read_badly(index);
            }
            return;
        }
        let has_buffer =
            |member: &usize| self.members[*member].as_ref().is_some_and(|lane| lane.has_buffer_for_read(rows));
        let with_room: MemberSet = sources.iter().filter(has_buffer).collect();
        let needed = if split.task.needs_all { sources.count() } else { needed };
        let repaired = match split.task.kind {
            EcSplitKind::Repair { member } => Some(member),
            _ => None,
        };
        let is_ready =
            repaired.is_none_or(|member| self.members[member].as_ref().is_some_and(|lane| lane.has_buffer(rows)));
        if with_room.count() < needed || !is_ready || self.free_requests.len() < MemberSet::MAX {
            self.scheme.starved.push_back(index);
            // The split does not wait beyond its deadline.
            if let EcSplitKind::Read { operation, .. } = split.task.kind
                && split.under_way().is_empty()
                && let Some(ends_at) = self.operations[operation].as_ref().map(|operation| operation.ends_at())
            {
                self.set_alarm(index, ends_at);
            }
            return;
        }
        for member in with_room.iter().chain(repaired) {
            let buffer = self.members[member].as_mut().and_then(|lane| lane.take_buffer(rows));
            if let Some(split) = &mut self.splits[index] {
                split.task.buffers[member] = buffer;
            }
        }
        if let Some(split) = &mut self.splits[index] {
            split.task.is_wide = true;
        }
        self.ask(index, needed);
        // All that were to be asked may have died since they were chosen.
        if self.splits[index].as_ref().is_some_and(|split| split.under_way().is_empty()) {
            self.end_read_badly(index);
        }
    }

    /// Asks `count` more members, the fastest of those that have not been asked.
    fn ask(&mut self, index: usize, count: usize) {
        let now = now_ns();
        for _ in 0..count {
            let Some(split) = &self.splits[index] else { return };
            let asked = split.done.union(split.failed).union(split.under_way());
            let is_open = |member: &usize| {
                split.task.have.has(*member) && !asked.has(*member) && split.task.buffers[*member].is_some()
            };
            let latency = |member: &usize| self.members[*member].as_ref().map_or(u64::MAX, |lane| lane.latency_ns);
            let usable = self.usable();
            // Lagging members come last.
            let order = |member: &usize| (!usable.has(*member), latency(member));
            let Some(member) = self.connected_members().iter().filter(is_open).min_by_key(order) else { break };
            let page = PageId(split.task.first);
            let Some(buffer) = self.splits[index].as_mut().and_then(|split| split.task.buffers[member].take()) else {
                break;
            };
            self.send(index, member, false, Op::Read { page, buffer });
            let hedge_after = self.members[member].as_ref().map_or(0, |lane| lane.hedge_after());
            self.set_alarm(index, now.saturating_add(hedge_after));
        }
    }

    /// Asks more members for a read that takes longer than usual (hedged read).
    pub(super) fn read_is_slow(&mut self, index: usize) {
        match &self.splits[index] {
            Some(split) if split.task.is_wide => {
                let before = split.under_way();
                self.ask(index, PARTS_MAX);
                let Some(split) = &self.splits[index] else { return };
                let unasked = self.sources(split).0.difference(split.done).difference(split.under_way());
                if split.under_way() == before && !unasked.is_empty() {
                    // The members that could answer had no free buffers.
                    self.note_slow(index);
                    self.restart_read(index);
                }
            }
            Some(_) => self.widen(index),
            None => {}
        }
    }

    /// Notes as slow the members that have not answered for longer than usual.
    fn note_slow(&mut self, index: usize) {
        let (Some(split), now) = (&self.splits[index], now_ns()) else { return };
        for slow in split.under_way().iter() {
            let asked_at =
                split.requests[slow].and_then(|request| Some(self.requests[request as usize].as_ref()?.started_at));
            if let (Some(lane), Some(asked_at)) = (&mut self.members[slow], asked_at) {
                let passed = now.saturating_sub(asked_at);
                if passed >= lane.hedge_after() || lane.latency_ns == 0 {
                    // It is unknown how long the answer will take. It has taken this long already.
                    lane.is_slower_than(passed);
                }
            }
        }
    }

    pub(super) fn on_read_reply(&mut self, index: usize, member: usize, is_answer: bool, started_at: u64) {
        let now = now_ns();
        if let Some(lane) = self.members[member].as_mut().filter(|_| is_answer) {
            lane.took(now.saturating_sub(started_at));
        }
        let Some(split) = &self.splits[index] else { return };
        let is_whole =
            split.task.part < PARTS_MAX && self.table.part_of(split.task.first, member) == Some(split.task.part);
        if is_answer && is_whole && matches!(split.task.kind, EcSplitKind::Read { .. }) && self.deliver(index, member) {
            return;
        }
        let Some(split) = &self.splits[index] else { return };
        if !split.task.is_wide {
            // A member has failed, or has given other bytes than those that were written.
            if !self.scheme.starved.contains(&index) {
                self.widen(index);
            }
            return;
        }
        let (sources, needed) = self.sources(split);
        let (got, coming) = (split.done.intersection(sources), split.under_way().intersection(sources));
        if got.count() >= needed {
            return self.make(index, got);
        }
        let lacking = needed.saturating_sub(got.count() + coming.count());
        if lacking == 0 {
            return;
        }
        self.ask(index, lacking);
        let Some(split) = &self.splits[index] else { return };
        if split.done.union(split.under_way()).intersection(sources).count() < needed {
            if sources.count() < needed {
                if split.under_way().is_empty() {
                    self.end_read_badly(index);
                }
                return;
            }
            self.restart_read(index);
        }
    }

    /// Reads a split from the beginning, because there were no buffers for the members that must be
    /// asked. So it keeps no buffers meanwhile.
    fn restart_read(&mut self, index: usize) {
        let Some(old) = &self.splits[index] else { return };
        let mut split = Split::new(EcTask::new(old.task.kind, old.task.first, old.task.rows, old.task.started_at));
        (split.task.part, split.task.present, split.task.have, split.task.versions) =
            (old.task.part, old.task.present, old.task.have, old.task.versions);
        (split.failed, split.wrong, split.error) = (old.failed, old.wrong, old.error);
        split.task.needs_all = old.task.needs_all;
        self.take_split(index);
        let index = self.add_split(split);
        self.widen(index);
    }

    fn read_outcome(&self, split: &EcSplit, row: usize, sum: Option<u64>) -> PageReadOutcome {
        let EcSplitKind::Read { operation, offset } = split.task.kind else { return PageReadOutcome::Right };
        let version = split.task.versions[row];
        if self.table.index.version(self.page_of(operation, offset + row as u64)) != version {
            PageReadOutcome::Relocated
        } else if sum.is_some_and(|sum| !version.is_of(sum)) {
            PageReadOutcome::Wrong
        } else {
            PageReadOutcome::Right
        }
    }

    /// Delivers the answer of the member that has the pages. Returns `false` if that is not what
    /// was written.
    fn deliver(&mut self, index: usize, member: usize) -> bool {
        let Some(split) = &self.splits[index] else { return true };
        let (EcSplitKind::Read { operation, offset }, Some(buffer)) = (split.task.kind, &split.task.buffers[member])
        else {
            return true;
        };
        let kind = self.operations[operation].as_ref().map(|known| known.kind);
        let part = match kind {
            Some(OpKind::Part(part)) if split.task.direct == Some(member) => Some(part),
            _ => None,
        };
        // A part comes with the checksum of its page.
        let rows = split.task.rows as usize;
        if (0..rows)
            .any(|row| matches!(self.read_outcome(split, row, Some(buffer.sums()[row])), PageReadOutcome::Wrong))
        {
            let error =
                PoolError::Corrupt { page: PageId(self.page_of(operation, offset)), server: self.table.server(member) };
            if let Some(split) = &mut self.splits[index] {
                split.done = split.done.difference(MemberSet::one(member));
                split.fail(member, error);
                let buffer = split.task.buffers[member].take();
                self.give_buffer(member, buffer);
            }
            return false;
        }
        if let Some(target) = self.operations[operation].as_mut().and_then(|known| known.buffer.as_mut()) {
            for row in 0..rows {
                let (to, range) = (offset as usize + row, part.map_or(0..buffer.page(row).len(), |part| part.range()));
                target.page_mut(to)[range.clone()].copy_from_slice(&buffer.page(row)[range]);
                target.sums_mut()[to] = buffer.sums()[row];
            }
        }
        self.end_read(index);
        true
    }

    /// Returns how to make the wanted part from the parts that these members gave, if they are
    /// enough.
    fn recipe(&self, split: &EcSplit, got: MemberSet) -> Option<Recipe> {
        let code = self.table.code;
        let zeros = (0..code.data()).filter(|part| split.task.present & 1 << part == 0);
        let mut from = zeros.fold(0u16, |from, part| from | 1 << part);
        let mut members = [None; PARTS_MAX];
        for member in got.iter() {
            if let Some(part) = self.table.part_of(split.task.first, member)
                && (from.count_ones() as usize) < code.data()
            {
                members[part] = Some(member);
                from |= 1 << part;
            }
        }
        let is_enough = from.count_ones() as usize == code.data();
        is_enough.then(|| Recipe { members, weights: code.weights(from, split.task.part) })
    }

    /// Makes the wanted part, now that enough others are there.
    fn make(&mut self, index: usize, got: MemberSet) {
        let Some(split) = &self.splits[index] else { return };
        let Some(recipe) = self.recipe(split, got) else {
            // Shards have moved to other members.
            return self.restart_read(index);
        };
        let EcSplitKind::Repair { member } = split.task.kind else { return self.make_for_caller(index, got) };
        let Some(split) = &mut self.splits[index] else { return };
        let Some(mut target) = split.task.buffers[member].take() else { return };
        let mut is_right = true;
        for row in 0..split.task.rows as usize {
            recipe.make(split, target.page_mut(row), row);
            let (number, sum) = (split.task.first + row as u64, seal(&mut target, row));
            match self.table.index.is_digest(number, split.task.part, sum) {
                Some(is_same) => is_right &= is_same,
                None => self.table.index.set_digest(number, split.task.part, Some(sum)),
            }
        }
        let page = PageId(split.task.first);
        split.alarm_at = u64::MAX;
        if !is_right {
            split.task.buffers[member] = Some(target);
            return self.end_repair(index, Err(PoolError::Corrupt { page, server: self.table.server(member) }));
        }
        self.send(index, member, false, Op::Write { page, buffer: target });
        self.set_alarm(index, now_ns().saturating_add(EcScheme::REPAIR_DEADLINE.as_nanos() as u64));
    }

    /// Makes the pages where the caller wants them. If they are not what was written, one of the
    /// members has given old bytes: each is left out in turn.
    fn make_for_caller(&mut self, index: usize, got: MemberSet) {
        let Some(split) = &self.splits[index] else { return };
        let needed = self.sources(split).1;
        let one_less = got.iter().map(MemberSet::one).filter(|_| got.count() > needed);
        for without in core::iter::once(MemberSet(0)).chain(one_less) {
            let Some(split) = &self.splits[index] else { return };
            let Some(recipe) = self.recipe(split, got.difference(without)) else { continue };
            let EcSplitKind::Read { operation, offset } = split.task.kind else { return };
            let Some(target) = self.operations[operation].as_mut().and_then(|known| known.buffer.as_mut()) else {
                return;
            };
            let mut sums = [0; ROWS];
            for (row, sum) in sums.iter_mut().enumerate().take(split.task.rows as usize) {
                let to = offset as usize + row;
                recipe.make(split, target.page_mut(to), row);
                *sum = seal(target, to);
            }
            let is_wrong =
                |row: usize| matches!(self.read_outcome(split, row, Some(sums[row])), PageReadOutcome::Wrong);
            if !(0..split.task.rows as usize).any(is_wrong) {
                if let Some(split) = &mut self.splits[index] {
                    split.wrong = split.wrong.union(without);
                }
                return self.end_read(index);
            }
        }
        let server = self.table.server(self.table.member_of(split.task.first, split.task.part));
        let page = PageId(split.task.first);
        if let Some(split) = &mut self.splits[index] {
            split.error = Some(PoolError::Corrupt { page, server });
            split.task.needs_all = true;
        }
        self.ask(index, PARTS_MAX);
        let Some(split) = &self.splits[index] else { return };
        if !split.under_way().is_empty() {
            return;
        }
        if self.sources(split).0.difference(split.done).is_empty() {
            self.end_read_badly(index);
        } else {
            // Others had no free buffers.
            self.restart_read(index);
        }
    }

    /// Ends a read whose pages are where the caller wants them. Pages that have another version by
    /// now are read again.
    fn end_read(&mut self, index: usize) {
        let Some(split) = self.splits[index].as_ref() else { return };
        let (EcSplitKind::Read { operation, offset }, rows) = (split.task.kind, split.task.rows) else { return };
        let mut right = 0;
        for row in 0..rows {
            match self.read_outcome(split, row as usize, None) {
                PageReadOutcome::Right => right += 1,
                _ => self.scheme.retry_reads.push_back((operation, offset + row, 1)),
            }
        }
        self.note_slow(index);
        let Some(split) = self.take_split(index) else { return };
        for member in split.wrong.iter() {
            self.table.suspect(split.task.first, split.task.rows, member);
        }
        self.end_pages(operation, right, Ok(()));
    }

    /// Ends a read or a repair for which too few members have an answer.
    pub(super) fn end_read_badly(&mut self, index: usize) {
        let Some(split) = self.splits[index].as_ref() else { return };
        let error = split.error.unwrap_or(self.table.gone());
        let (task, rows) = (split.task.kind, split.task.rows);
        match task {
            EcSplitKind::Repair { .. } => self.end_repair(index, Err(error)),
            EcSplitKind::Read { operation, offset } => {
                // Members name pages by their row.
                let error = match error {
                    PoolError::Corrupt { server, .. } => {
                        PoolError::Corrupt { page: PageId(self.page_of(operation, offset)), server }
                    }
                    other => other,
                };
                // Pages that have another version by now are read from there. Pages that other
                // members have by now are read from those.
                let have = |row: u64| self.table.index.word(split.task.first + row).have();
                let is_again = |row: u64| {
                    self.members.has_new_lanes()
                        || matches!(self.read_outcome(split, row as usize, None), PageReadOutcome::Relocated)
                        || !have(row).difference(split.task.have).is_empty()
                };
                let again: [bool; ROWS] = core::array::from_fn(|row| (row as u64) < rows && is_again(row as u64));
                for row in (0..rows).filter(|row| again[*row as usize]) {
                    self.scheme.retry_reads.push_back((operation, offset + row, 1));
                }
                self.take_split(index);
                let ended = rows - again.iter().filter(|again| **again).count() as u64;
                if ended > 0 {
                    self.end_pages(operation, ended, Err(error));
                }
            }
            EcSplitKind::Write | EcSplitKind::Trim => {}
        }
    }
}

/// Way to make a part from others of its row.
struct Recipe {
    /// Index of the member that gave each part.
    members: [Option<usize>; PARTS_MAX],
    weights: Weights,
}

impl Recipe {
    fn make(&self, split: &EcSplit, target: &mut [u8], row: usize) {
        target.fill(0);
        for (member, weight) in self.members.iter().zip(self.weights) {
            if let Some(buffer) = member.and_then(|member| split.task.buffers[member].as_ref()) {
                gf256::add(target, buffer.page(row), weight);
            }
        }
    }
}
