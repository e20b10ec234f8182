//! Scrub of an erasure-coded pool: compares the parts of rows that legs hold with digests of what
//! was written.

use super::index::GROUP;
use super::lane::EcLane;
use super::pieces::For;
use super::table::RowTable;
use crate::scrub::{Answers, Mended, READ_DEADLINE, Run, Scrub, Shelves, Walker, Walks, Wrong};
use crate::{Op, Priority};
use farfield_core::row_word::RowWord;
use farfield_core::{MemberSet, PageId};
use std::sync::Arc;

/// Number of rows that are looked at in one go.
const LOOK: u64 = 512;

impl RowTable {
    /// Returns the legs that hold a part of the row which is not zeros by definition.
    fn with_bytes(&self, row: u64, word: RowWord) -> MemberSet {
        let data = self.code.data();
        let has_bytes =
            |leg: &usize| self.part_of(row, *leg).is_some_and(|part| part >= data || word.present() & 1 << part != 0);
        word.have().iter().filter(has_bytes).collect()
    }
}

impl Shelves for RowTable {
    fn scrub(&self) -> &Scrub {
        &self.scrub
    }

    fn end(&self) -> u64 {
        self.index.rows_end()
    }

    fn stored(&self) -> u64 {
        self.index.counts().0
    }

    fn watch(&self, from: u64, most: u64) -> Result<Run, u64> {
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
        let legs = self.with_bytes(from, word).intersection(self.active());
        Ok(Run { first: from, count: next - from, legs, is_watched: true })
    }

    fn judge(&self, run: &Run, answers: &Answers) -> Option<Wrong> {
        let mut wrong = Wrong::default();
        for (place, wrong) in wrong.iter_mut().enumerate().take(run.count as usize) {
            let row = run.first + place as u64;
            let is_wrong = |leg: &usize| {
                let said = self.part_of(row, *leg).zip(answers.sum(*leg, place));
                said.is_some_and(|(part, sum)| self.index.is_digest(row, part, sum) == Some(false))
            };
            *wrong = run.legs.iter().filter(is_wrong).collect();
        }
        Some(wrong)
    }

    fn suspect(&self, place: u64, leg: usize) -> bool {
        RowTable::suspect(self, place, 1, leg) || self.mended(place, leg) == Mended::NotYet
    }

    fn unwatch(&self, run: &Run) {
        (run.first..run.first + run.count).for_each(|row| self.index.unwatch(row));
    }

    fn mended(&self, place: u64, leg: usize) -> Mended {
        let word = self.index.word(place);
        if !self.present().has(leg) || !word.is_closed() || word.live() == 0 {
            Mended::Never
        } else if word.have().has(leg) {
            Mended::Yes
        } else {
            Mended::NotYet
        }
    }
}

impl Walks for EcLane {
    type Shelves = RowTable;

    fn shelves(&self) -> &Arc<RowTable> {
        &self.table
    }

    fn walker(&mut self) -> &mut Option<Box<Walker>> {
        &mut self.walker
    }

    fn has_demand(&self) -> bool {
        !self.queued.is_empty() || !self.again.is_empty() || !self.starved.is_empty()
    }

    fn can_ask(&self, leg: usize) -> bool {
        self.usable().has(leg)
    }

    fn ask(&mut self, leg: usize, page: u64, count: u64) -> bool {
        let lane = self.legs[leg].as_mut().filter(|lane| lane.has_buffer_for_read(count));
        if self.free_errands.len() <= 2 * MemberSet::MAX {
            return false;
        }
        let Some(buffer) = lane.and_then(|lane| lane.take_buffer(count)) else { return false };
        self.send_errand(For::Look, leg, Priority::Background, READ_DEADLINE, Op::Read { page: PageId(page), buffer });
        true
    }

    fn forget(&mut self) {
        self.errands.iter_mut().flatten().filter(|errand| errand.target == For::Look).for_each(|errand| {
            errand.target = For::Nobody;
        });
    }
}
