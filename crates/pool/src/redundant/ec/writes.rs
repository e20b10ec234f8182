//! Writes: pages become rows, and become the newest versions when enough members have those rows.

use super::index::Version;
use super::lane::{EcLane, MOVER};
use super::splits::{EcSplit, EcSplitKind, EcTask, Entry, ROWS};
use crate::contract::backend::OpKind;
use crate::redundant::operation::Operation;
use crate::redundant::split::Split;
use crate::{Buffer, Op, PoolError};
use farfield_core::gf256::{self, PARTS_MAX};
use farfield_core::{MemberSet, PageId, checksum};
use farfield_os::process::now_ns;

/// Layout of a split's pages in its rows. The first `rows` pages lie in part 0, the next ones in
/// part 1, so neighbours are read together.
#[derive(Clone, Copy)]
struct RowLayout {
    rows: usize,
    pages: usize,
}

impl RowLayout {
    fn of(split: &EcSplit) -> RowLayout {
        RowLayout { rows: split.task.rows as usize, pages: split.task.entries.len() }
    }

    /// Returns the part and the row of a page.
    fn place(self, page: usize) -> (usize, usize) {
        (page / self.rows, page % self.rows)
    }

    /// Returns the number of pages in a data part, which lie in the first rows.
    fn pages_in(self, part: usize) -> usize {
        self.pages.saturating_sub(part * self.rows).min(self.rows)
    }

    /// Returns the number of data parts that have pages.
    fn parts(self) -> usize {
        self.pages.div_ceil(self.rows)
    }

    /// Returns the data parts with a page in this row, one bit for each.
    fn present(self, row: usize) -> u16 {
        (0..self.parts()).filter(|&part| row < self.pages_in(part)).fold(0, |present, part| present | 1 << part)
    }
}

impl EcLane {
    /// Sends pages of this operation, and of others that wait, out together. Returns how many are
    /// this one's; `None` if there is no room for them now.
    pub(super) fn split_write(&mut self, operation: usize) -> Option<u64> {
        let (known, code) = (self.usable(), self.table.code);
        if !self.has_room() {
            return None;
        }
        // If too few members are left, buffers do not change that.
        let are_enough = |members: MemberSet| members == known || members.count() >= code.data();
        let usable = self.members.takers(
            known,
            now_ns(),
            self.table.write_timeout(),
            |member| member.has_buffer(1) && member.has_buffer(2),
            are_enough,
        )?;
        let change = self.table.write_epochs.begin();
        if self.members.has_new_lanes() || !self.usable().difference(known).is_empty() {
            return None;
        }
        let mut entries = self.scheme.entries.pop()?;
        self.list_entries(operation, &mut entries);
        let claimed = self.table.index.claim(entries.len().div_ceil(code.data()) as u64);
        let rows = claimed.map_or(1, |(_, rows)| rows as usize);
        entries.truncate(rows * code.data());
        let taken = self.set_out(operation, &entries);
        let layout = RowLayout { rows, pages: entries.len() };
        let first = claimed.map_or(0, |(first, _)| first);
        let mut split = Split::new(EcTask::new(EcSplitKind::Write, first, rows as u64, now_ns()));
        let ends_at =
            entries.iter().filter_map(|entry| Some(self.operations[entry.operation].as_ref()?.ends_at())).min();
        split.ends_at = ends_at.unwrap_or(u64::MAX);
        (split.task.entries, split.epoch_guard) = (entries, Some(change));
        let Some((first, _)) = claimed else {
            self.end_entries(split, Err(PoolError::PoolFull { server: self.table.members[0].server }));
            return Some(taken);
        };
        let members = self.table.members_of(first);
        let reachable = (0..code.parts()).filter(|&part| usable.has(members[part])).count();
        if reachable < code.data() {
            self.table.index.unclaim(first, rows as u64, false);
            self.end_entries(split, Err(self.table.gone()));
            return Some(taken);
        }
        let mut buffers = self.code_rows(&split.task.entries, layout, &members, usable);
        self.note_digests(first, &split.task.entries, layout, &buffers);
        let ends_at = split.ends_at;
        let split = self.add_split(split);
        self.set_alarm(split, ends_at);
        for part in 0..code.parts() {
            if let Some(buffer) = buffers[part].take() {
                self.send(split, members[part], false, Op::Write { page: PageId(first), buffer });
            }
        }
        Some(taken)
    }

    /// Lists pages of `operation` that have not set out, and of others that write, as many as fit into
    /// a split.
    fn list_entries(&self, operation: usize, entries: &mut Vec<Entry>) {
        let most = ROWS * self.table.code.data();
        let others = self.queued.iter().copied().filter(|&other| other != operation);
        for operation in core::iter::once(operation).chain(others) {
            let Some(known) = self.operations[operation].as_ref().filter(|known| known.kind == OpKind::Write) else {
                continue;
            };
            let Some(buffer) = &known.buffer else { continue };
            for offset in known.split_pages..known.count {
                if entries.len() == most {
                    return;
                }
                let (page, only_after) = self.page_and_version(operation, known, offset);
                let sum = buffer.sums()[offset as usize];
                entries.push(Entry { operation, offset: offset as usize, page, sum, only_after });
            }
        }
    }

    fn page_and_version(&self, operation: usize, known: &Operation, offset: u64) -> (u64, Option<Version>) {
        match &self.scheme.maintenance {
            Some(maintenance) if operation == MOVER => {
                let (page, version) = maintenance.moves[offset as usize];
                (page, Some(version))
            }
            _ => (known.page + offset, None),
        }
    }

    /// Notes that these pages have set out. Returns how many are of `operation`, which the caller
    /// notes itself.
    fn set_out(&mut self, operation: usize, entries: &[Entry]) -> u64 {
        let mut own = 0;
        for entry in entries {
            if entry.operation == operation {
                own += 1;
            } else if let Some(other) = &mut self.operations[entry.operation] {
                other.split_pages += 1;
            }
        }
        own
    }

    /// Returns the bytes that each usable member shall store, by number of the part.
    fn code_rows(
        &mut self,
        entries: &[Entry],
        layout: RowLayout,
        members: &[usize; PARTS_MAX],
        usable: MemberSet,
    ) -> [Option<Buffer>; PARTS_MAX] {
        let code = self.table.code;
        let mut buffers = [const { None }; PARTS_MAX];
        for part in 0..code.parts() {
            let pages = if part < code.data() { layout.pages_in(part) } else { layout.rows };
            if pages > 0 && usable.has(members[part]) {
                buffers[part] =
                    self.members[members[part]].as_mut().and_then(|member| member.take_buffer(pages as u64));
            }
            if let Some(buffer) = buffers[part].as_mut().filter(|_| part >= code.data()) {
                buffer.bytes_mut().fill(0);
            }
        }
        for (number, entry) in entries.iter().enumerate() {
            let Some(page) = self.operations[entry.operation].as_ref().and_then(|known| known.buffer.as_ref()) else {
                continue;
            };
            let (page, (column, row)) = (page.page(entry.offset), layout.place(number));
            if let Some(buffer) = &mut buffers[column] {
                buffer.page_mut(row).copy_from_slice(page);
                buffer.sums_mut()[row] = entry.sum;
            }
            for (part, buffer) in buffers.iter_mut().enumerate().skip(code.data()) {
                if let Some(buffer) = buffer {
                    gf256::add(buffer.page_mut(row), page, code.coefficient(part, column));
                }
            }
        }
        buffers[code.data()..].iter_mut().flatten().for_each(Buffer::seal);
        buffers
    }

    /// Notes the digests of all parts of the rows from `first` on.
    fn note_digests(&self, first: u64, entries: &[Entry], layout: RowLayout, buffers: &[Option<Buffer>; PARTS_MAX]) {
        let (index, code) = (&self.table.index, self.table.code);
        for row in 0..layout.rows {
            for (part, buffer) in buffers.iter().enumerate().take(code.parts()) {
                let number = part * layout.rows + row;
                let sum = match part < code.data() {
                    true => entries.get(number).map(|entry| entry.sum),
                    false => buffer.as_ref().map(|buffer| buffer.sums()[row]),
                };
                index.set_digest(first + row as u64, part, sum);
            }
        }
    }

    /// Checks whether enough of these members have the split to read every page.
    pub(super) fn is_written(&self, split: &EcSplit, members: MemberSet) -> bool {
        let empty = self.table.code.data() - RowLayout::of(split).parts();
        split.done.intersection(members).count() + empty >= self.table.code.data()
    }

    /// Ends a write. With `over` it has failed, whichever members have it.
    pub(super) fn end_rows_of(&mut self, index: usize, over: Option<PoolError>) {
        let Some(split) = &self.splits[index] else { return };
        let (had, late) = (self.is_written(split, self.table.all()), split.under_way());
        // Members without the rows are noted first, before any lane can take other members for
        // complete. Rows that only members have that are being given up would be lost.
        let lacking = self.table.present().difference(split.done);
        let table = self.table.clone();
        table.with_unrecorded_miss(lacking, || {
            let is_kept = had && over.is_none() && {
                let Some(split) = &self.splits[index] else { return };
                self.is_written(split, self.table.all().difference(self.table.unreliable()))
            };
            let Some(split) = self.take_split(index) else { return };
            self.end_rows(split, had, is_kept, late, over);
        });
    }

    fn end_rows(&mut self, split: EcSplit, had: bool, is_kept: bool, late: MemberSet, over: Option<PoolError>) {
        let full = match split.error {
            Some(PoolError::PoolFull { server }) => Some(PoolError::PoolFull { server }),
            _ => None,
        };
        if had {
            // A write that was not answered may still arrive, on top of newer bytes.
            split
                .indeterminate
                .difference(self.table.failed())
                .iter()
                .for_each(|member| self.table.note_indeterminate(member));
        }
        if !is_kept || full.is_some() {
            // Where a write may still arrive, no other write goes.
            if had || split.indeterminate.is_empty() {
                let (index, task) = (&self.table.index, &split.task);
                if late.is_empty() {
                    index.unclaim(task.first, task.rows, false);
                } else {
                    index.abandon(task.first, task.rows);
                }
            }
            if had && full.is_none() && over.is_none() {
                for entry in &split.task.entries {
                    if let Some(operation) = &mut self.operations[entry.operation] {
                        operation.is_unlucky = true;
                    }
                }
                return self.end_entries(split, Err(self.table.gone()));
            }
            let error = full.or(over).or(split.error).unwrap_or(self.table.gone());
            return self.end_entries(split, Err(error));
        }
        let layout = RowLayout::of(&split);
        let empty = layout.parts()..self.table.code.data();
        // Every member has the parts that are zeros by definition.
        let have = empty
            .fold(split.done, |have, part| have.union(MemberSet::one(self.table.member_of(split.task.first, part))));
        for row in 0..layout.rows {
            self.table.index.close(split.task.first + row as u64, have, layout.present(row), !late.is_empty());
        }
        self.table.lacking(have).iter().for_each(|member| self.table.note_missed(member));
        for (number, entry) in split.task.entries.iter().enumerate() {
            let (part, row) = layout.place(number);
            let version = Version::new(split.task.first + row as u64, part, entry.sum);
            self.table.index.set_version(entry.page, version, entry.only_after);
        }
        self.end_entries(split, Ok(()));
    }

    fn end_entries(&mut self, mut split: EcSplit, result: Result<(), PoolError>) {
        let mut entries = core::mem::take(&mut split.task.entries);
        for entry in entries.drain(..) {
            self.end_pages(entry.operation, 1, result);
        }
        self.scheme.entries.push(entries);
    }
}

/// Sets the checksum of a page that was made here, and returns it.
pub(super) fn seal(buffer: &mut Buffer, index: usize) -> u64 {
    let sum = checksum(buffer.page(index));
    buffer.sums_mut()[index] = sum;
    sum
}
