//! Writes: pages become rows, and become the newest versions when enough legs have those rows.

use super::index::Version;
use super::lane::EcLane;
use super::splits::{EcSplit, EcSplitKind, Entry, ROWS};
use crate::{Buffer, Op, PoolError};
use farfield_core::gf256::{self, PARTS_MAX};
use farfield_core::{MemberSet, PageId, checksum};
use farfield_os::process::now_ns;

/// Layout of a piece's pages in its rows. The first `rows` pages lie in part 0, the next ones in
/// part 1, so neighbours are read together.
#[derive(Clone, Copy)]
struct RowLayout {
    rows: usize,
    pages: usize,
}

impl RowLayout {
    fn of(piece: &EcSplit) -> RowLayout {
        RowLayout { rows: piece.rows as usize, pages: piece.entries.len() }
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
    /// Sends pages of this parent, and of others that wait, out together. Returns how many are this
    /// one's; `None` if there is no room for them now.
    pub(super) fn split_write(&mut self, parent: usize) -> Option<u64> {
        let (known, code) = (self.usable(), self.table.code);
        if !self.has_room() {
            return None;
        }
        // If too few legs are left, buffers do not change that.
        let are_enough = |legs: MemberSet| legs == known || legs.count() >= code.data();
        let usable = self.members.takers(
            known,
            now_ns(),
            self.table.write_patience(),
            |leg| leg.has_buffer(1) && leg.has_buffer(2),
            are_enough,
        )?;
        let change = self.table.write_epochs.begin();
        if self.members.has_new_lanes() || !self.usable().difference(known).is_empty() {
            return None;
        }
        let mut entries = self.entries.pop()?;
        self.list_entries(parent, &mut entries);
        let claimed = self.table.index.claim(entries.len().div_ceil(code.data()) as u64);
        let rows = claimed.map_or(1, |(_, rows)| rows as usize);
        entries.truncate(rows * code.data());
        let taken = self.set_out(parent, &entries);
        let layout = RowLayout { rows, pages: entries.len() };
        let mut piece = EcSplit::new(EcSplitKind::Write, claimed.map_or(0, |(first, _)| first), rows as u64, now_ns());
        let ends_at =
            entries.iter().filter_map(|entry| Some(self.operations[entry.operation].as_ref()?.ends_at())).min();
        piece.ends_at = ends_at.unwrap_or(u64::MAX);
        (piece.entries, piece.epoch_guard) = (entries, Some(change));
        let Some((first, _)) = claimed else {
            self.end_entries(piece, Err(PoolError::PoolFull { server: self.table.members[0].server }));
            return Some(taken);
        };
        let legs = self.table.members_of(first);
        let reachable = (0..code.parts()).filter(|&part| usable.has(legs[part])).count();
        if reachable < code.data() {
            self.table.index.unclaim(first, rows as u64, false);
            self.end_entries(piece, Err(self.table.gone()));
            return Some(taken);
        }
        let mut buffers = self.code_rows(&piece.entries, layout, &legs, usable);
        self.note_digests(first, &piece.entries, layout, &buffers);
        let ends_at = piece.ends_at;
        let piece = self.add_split(piece);
        self.set_alarm(piece, ends_at);
        for part in 0..code.parts() {
            if let Some(buffer) = buffers[part].take() {
                self.send(piece, legs[part], Op::Write { page: PageId(first), buffer });
            }
        }
        Some(taken)
    }

    /// Lists pages of `operation` that have not set out, and of others that write, as many as fit into
    /// a piece.
    fn list_entries(&self, parent: usize, entries: &mut Vec<Entry>) {
        let most = ROWS * self.table.code.data();
        let others = self.queued.iter().copied().filter(|&other| other != parent);
        for parent in core::iter::once(parent).chain(others) {
            let Some(known) = self.operations[parent].as_ref().filter(|known| known.kind.is_write()) else { continue };
            let Some(buffer) = &known.buffer else { continue };
            for offset in known.split_pages..known.count {
                if entries.len() == most {
                    return;
                }
                let (page, only_after) = self.page_and_version(parent, known, offset);
                let sum = buffer.sums()[offset as usize];
                entries.push(Entry { operation: parent, offset: offset as usize, page, sum, only_after });
            }
        }
    }

    fn page_and_version(
        &self,
        parent: usize,
        known: &super::splits::EcOperation,
        offset: u64,
    ) -> (u64, Option<Version>) {
        match &self.maintenance {
            Some(care) if parent == Self::MOVER => {
                let (page, version) = care.moves[offset as usize];
                (page, Some(version))
            }
            _ => (known.page + offset, None),
        }
    }

    /// Notes that these pages have set out. Returns how many are of `operation`, which the caller
    /// notes itself.
    fn set_out(&mut self, parent: usize, entries: &[Entry]) -> u64 {
        let mut own = 0;
        for entry in entries {
            if entry.operation == parent {
                own += 1;
            } else if let Some(other) = &mut self.operations[entry.operation] {
                other.split_pages += 1;
            }
        }
        own
    }

    /// Returns the bytes that each usable leg shall store, by number of the part.
    fn code_rows(
        &mut self,
        entries: &[Entry],
        layout: RowLayout,
        legs: &[usize; PARTS_MAX],
        usable: MemberSet,
    ) -> [Option<Buffer>; PARTS_MAX] {
        let code = self.table.code;
        let mut buffers = [const { None }; PARTS_MAX];
        for part in 0..code.parts() {
            let pages = if part < code.data() { layout.pages_in(part) } else { layout.rows };
            if pages > 0 && usable.has(legs[part]) {
                buffers[part] = self.members[legs[part]].as_mut().and_then(|leg| leg.take_buffer(pages as u64));
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

    /// Checks whether enough of these legs have the piece to read every page.
    fn is_written(&self, piece: &EcSplit, legs: MemberSet) -> bool {
        let empty = self.table.code.data() - RowLayout::of(piece).parts();
        piece.got.intersection(legs).count() + empty >= self.table.code.data()
    }

    pub(super) fn on_write_reply(&mut self, index: usize) {
        let Some(piece) = &self.splits[index] else { return };
        if piece.under_way().is_empty() {
            return self.end_write(index, None);
        }
        if !self.is_written(piece, self.table.all()) || piece.patient_until != u64::MAX {
            return;
        }
        let patient_until = self.table.counts_with_fewer_at(now_ns());
        let alarm_at = patient_until.min(piece.alarm_at);
        if let Some(piece) = &mut self.splits[index] {
            piece.patient_until = patient_until;
        }
        self.set_alarm(index, alarm_at);
    }

    /// Handles a write that others have had for long, or whose time is over.
    pub(super) fn write_is_slow(&mut self, index: usize, now: u64) {
        let Some(piece) = &self.splits[index] else { return };
        let (slow, ends_at, patient_until) = (piece.under_way(), piece.ends_at, piece.patient_until);
        let counts_in_the_end = ends_at <= now && self.table.write_patience().is_some();
        let is_enough = self.is_written(piece, self.table.all()) && (patient_until <= now || counts_in_the_end);
        if !is_enough && ends_at > now {
            return self.set_alarm(index, if patient_until > now { ends_at.min(patient_until) } else { ends_at });
        }
        slow.iter().for_each(|leg| self.table.mark_lagging(leg, ends_at));
        let server = slow.iter().next().map_or(0, |leg| self.table.server(leg));
        let after = core::time::Duration::from_nanos(now.saturating_sub(piece.started_at));
        self.end_write(index, (!is_enough).then_some(PoolError::TimedOut { server, after }));
    }

    /// Ends a write. With `over` it has failed, whichever legs have it.
    fn end_write(&mut self, index: usize, over: Option<PoolError>) {
        let Some(piece) = &self.splits[index] else { return };
        let (had, late) = (self.is_written(piece, self.table.all()), piece.under_way());
        // Legs without the rows are noted first, before any lane can take other legs for complete.
        // Rows that only legs have that are being given up would be lost.
        let lacking = self.table.present().difference(piece.got);
        let table = self.table.clone();
        table.with_unrecorded_miss(lacking, || {
            let is_kept = had && over.is_none() && {
                let Some(piece) = &self.splits[index] else { return };
                self.is_written(piece, self.table.all().difference(self.table.unreliable()))
            };
            let Some(piece) = self.take_split(index, true) else { return };
            self.end_rows(piece, had, is_kept, late, over);
        });
    }

    fn end_rows(&mut self, piece: EcSplit, had: bool, is_kept: bool, late: MemberSet, over: Option<PoolError>) {
        let full = match piece.error {
            Some(PoolError::PoolFull { server }) => Some(PoolError::PoolFull { server }),
            _ => None,
        };
        if had {
            // A write that was not answered may still arrive, on top of newer bytes.
            piece
                .indeterminate
                .difference(self.table.failed())
                .iter()
                .for_each(|leg| self.table.note_indeterminate(leg));
        }
        if !is_kept || full.is_some() {
            // Where a write may still arrive, no other write goes.
            if late.is_empty() && (had || piece.indeterminate.is_empty()) {
                self.table.index.unclaim(piece.first, piece.rows, false);
            }
            if had && full.is_none() && over.is_none() {
                for entry in &piece.entries {
                    if let Some(parent) = &mut self.operations[entry.operation] {
                        parent.is_unlucky = true;
                    }
                }
                return self.end_entries(piece, Err(self.table.gone()));
            }
            let error = full.or(over).or(piece.error).unwrap_or(self.table.gone());
            return self.end_entries(piece, Err(error));
        }
        let layout = RowLayout::of(&piece);
        let empty = layout.parts()..self.table.code.data();
        // Every leg has the parts that are zeros by definition.
        let have =
            empty.fold(piece.got, |have, part| have.union(MemberSet::one(self.table.member_of(piece.first, part))));
        for row in 0..layout.rows {
            self.table.index.close(piece.first + row as u64, have, layout.present(row));
        }
        self.table.lacking(have).iter().for_each(|leg| self.table.note_missed(leg));
        for (number, entry) in piece.entries.iter().enumerate() {
            let (part, row) = layout.place(number);
            let version = Version::new(piece.first + row as u64, part, entry.sum);
            self.table.index.set_version(entry.page, version, entry.only_after);
        }
        self.end_entries(piece, Ok(()));
    }

    fn end_entries(&mut self, mut piece: EcSplit, result: Result<(), PoolError>) {
        let mut entries = core::mem::take(&mut piece.entries);
        for entry in entries.drain(..) {
            self.end_pages(entry.operation, 1, result);
        }
        self.entries.push(entries);
    }
}

/// Sets the checksum of a page that was made here, and returns it.
pub(super) fn seal(buffer: &mut Buffer, index: usize) -> u64 {
    let sum = checksum(buffer.page(index));
    buffer.sums_mut()[index] = sum;
    sum
}
