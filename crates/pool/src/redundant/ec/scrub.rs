//! Scrub of an erasure-coded pool: compares the parts of rows that members hold with digests of
//! what was written.

use super::index::GROUP;
use super::row_map::RowMap;
use crate::redundant::scrub::{MemberChecksums, MismatchedMembers, RepairStatus, Scrub, ScrubRange, ScrubTarget};
use farfield_core::MemberSet;
use farfield_core::row_word::RowWord;

/// Number of rows that are looked at in one go.
const LOOK: u64 = 512;

impl RowMap {
    /// Returns the members that hold a part of the row which is not zeros by definition.
    fn with_bytes(&self, row: u64, word: RowWord) -> MemberSet {
        let data = self.code.data();
        let has_bytes = |member: &usize| {
            self.part_of(row, *member).is_some_and(|part| part >= data || word.present() & 1 << part != 0)
        };
        word.have().iter().filter(has_bytes).collect()
    }
}

impl ScrubTarget for RowMap {
    fn scrub(&self) -> &Scrub {
        &self.scrub
    }

    fn end(&self) -> u64 {
        self.index.rows_end()
    }

    fn stored(&self) -> u64 {
        self.index.counts().0
    }

    fn watch(&self, from: u64, most: u64) -> Result<ScrubRange, u64> {
        let last = self.index.rows_end().min(from + LOOK);
        if from >= last || !self.index.watch(from) {
            let is_stored = |row: &u64| self.index.word(*row).watch().is_some();
            return Err((from + 1..last).find(is_stored).unwrap_or(last));
        }
        let word = self.index.word(from);
        let is_alike = |row: u64| {
            let next = self.index.word(row);
            (next.present(), next.have()) == (word.present(), word.have())
        };
        let end = last.min(from + most).min((from / GROUP + 1) * GROUP);
        let mut next = from + 1;
        while next < end && is_alike(next) && self.index.watch(next) {
            next += 1;
        }
        let members = self.with_bytes(from, word).intersection(self.active());
        Ok(ScrubRange { first: from, count: next - from, members, is_watched: true })
    }

    fn decide(&self, run: &ScrubRange, answers: &MemberChecksums) -> Option<MismatchedMembers> {
        let mut wrong = MismatchedMembers::default();
        for (place, wrong) in wrong.iter_mut().enumerate().take(run.count as usize) {
            let row = run.first + place as u64;
            let is_wrong = |member: &usize| {
                let said = self.part_of(row, *member).zip(answers.sum(*member, place));
                said.is_some_and(|(part, sum)| self.index.is_digest(row, part, sum) == Some(false))
            };
            *wrong = run.members.iter().filter(is_wrong).collect();
        }
        Some(wrong)
    }

    fn suspect(&self, place: u64, member: usize) -> bool {
        RowMap::suspect(self, place, 1, member) || self.repair_status(place, member) == RepairStatus::Pending
    }

    fn unwatch(&self, run: &ScrubRange) {
        (run.first..run.first + run.count).for_each(|row| self.index.unwatch(row));
    }

    fn repair_status(&self, place: u64, member: usize) -> RepairStatus {
        let word = self.index.word(place);
        if !self.present().has(member) || !word.is_closed() || word.live() == 0 {
            RepairStatus::Obsolete
        } else if word.have().has(member) {
            RepairStatus::Repaired
        } else {
            RepairStatus::Pending
        }
    }
}
