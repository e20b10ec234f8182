//! Scrub of a mirror: compares the pages that legs hold with each other.
//!
//! Only the legs know what was written. A page that does not match the checksum that its leg has of
//! it is wrong. Where pages match their checksums and differ, a leg has forgotten a write, or has
//! it somewhere else. A forgotten page reads as zeros, so other bytes count for more; then the
//! bytes of most legs; then those of the first. So legs hold the same pages afterwards.

use super::lane::MirrorLane;
use super::replica_map::{CHUNK_PAGES, ReplicaMap};
use super::splits::MirrorRequestOwner;
use crate::Op;
use crate::scrub::{
    MemberChecksums, MismatchedMembers, RepairStatus, Scrub, ScrubCursor, ScrubLane, ScrubRange, ScrubTarget,
};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId, checksum};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl ScrubTarget for ReplicaMap {
    fn scrub(&self) -> &Scrub {
        &self.scrub
    }

    fn end(&self) -> u64 {
        self.pages.min(self.written.end() * CHUNK_PAGES)
    }

    fn stored(&self) -> u64 {
        self.pages.min(self.written_chunks.load(Ordering::SeqCst) * CHUNK_PAGES)
    }

    fn watch(&self, from: u64, most: u64) -> Result<ScrubRange, u64> {
        let chunk = from / CHUNK_PAGES;
        if !self.written.has(chunk) {
            return Err(self.written.next(chunk).unwrap_or(u64::MAX / CHUNK_PAGES) * CHUNK_PAGES);
        }
        let is_watched = ReplicaMap::watch(self, chunk);
        let legs = self.word(chunk).valid().intersection(self.active());
        let end = ((chunk + 1) * CHUNK_PAGES).min(self.pages);
        Ok(ScrubRange { first: from, count: most.min(end - from), members: legs, is_watched })
    }

    fn decide(&self, run: &ScrubRange, answers: &MemberChecksums) -> Option<MismatchedMembers> {
        let mut wrong = MismatchedMembers::default();
        for (place, wrong) in wrong.iter_mut().enumerate().take(run.count as usize) {
            *wrong = outvoted(run.members, |leg| answers.sum(leg, place));
        }
        let is_still = run.is_watched && self.word(run.first / CHUNK_PAGES).is_watched();
        let differ = wrong.iter().any(|legs| !legs.is_empty());
        (!differ || is_still).then_some(wrong)
    }

    fn suspect(&self, place: u64, leg: usize) -> bool {
        ReplicaMap::suspect(self, place, 1, leg) || self.repair_status(place, leg) == RepairStatus::Pending
    }

    fn unwatch(&self, run: &ScrubRange) {
        if run.is_watched {
            ReplicaMap::unwatch(self, run.first / CHUNK_PAGES);
        }
    }

    fn repair_status(&self, place: u64, leg: usize) -> RepairStatus {
        if !self.present().has(leg) {
            return RepairStatus::Obsolete;
        }
        let is_mended = self.word(place / CHUNK_PAGES).valid().has(leg);
        if is_mended { RepairStatus::Repaired } else { RepairStatus::Pending }
    }
}

/// Returns the legs whose page differs from that of most, by the order that the module describes.
fn outvoted(legs: MemberSet, sum: impl Fn(usize) -> Option<u64>) -> MemberSet {
    let said = |leg: &usize| sum(*leg).is_some();
    let Some(first) = legs.iter().find(said) else { return MemberSet(0) };
    if legs.iter().filter(said).all(|leg| sum(leg) == sum(first)) {
        return MemberSet(0);
    }
    let zeros = checksum(&[0; PAGE_BYTES]);
    let votes = |leg: usize| legs.iter().filter(|other| sum(*other) == sum(leg)).count();
    let weight = |leg: &usize| (sum(*leg) != Some(zeros), votes(*leg), MemberSet::MAX - leg);
    let best = legs.iter().filter(said).max_by_key(weight);
    let is_other = |leg: &usize| said(leg) && best.is_some_and(|best| sum(*leg) != sum(best));
    legs.iter().filter(is_other).collect()
}

impl ScrubLane for MirrorLane {
    type ScrubMap = ReplicaMap;

    fn scrub_target(&self) -> &Arc<ReplicaMap> {
        &self.table
    }

    fn scrub_cursor(&mut self) -> &mut Option<Box<ScrubCursor>> {
        &mut self.scrub_cursor
    }

    fn has_demand(&self) -> bool {
        !self.queued.is_empty() || !self.retry_reads.is_empty()
    }

    fn can_ask(&self, leg: usize) -> bool {
        self.usable().has(leg)
    }

    fn ask(&mut self, leg: usize, page: u64, count: u64) -> bool {
        let lane = self.members[leg].as_mut().filter(|lane| lane.has_buffer_for_read(count));
        if self.free_requests.len() <= 2 * MemberSet::MAX {
            return false;
        }
        let Some(buffer) = lane.and_then(|lane| lane.take_buffer(count)) else { return false };
        self.send(MirrorRequestOwner::Look, leg, false, Op::Read { page: PageId(page), buffer });
        true
    }

    fn forget(&mut self) {
        self.requests.iter_mut().flatten().filter(|errand| errand.owner == MirrorRequestOwner::Look).for_each(
            |errand| {
                errand.owner = MirrorRequestOwner::Abandoned;
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_count_for_more_than_zeros_and_many_for_more_than_few() {
        let zeros = checksum(&[0; PAGE_BYTES]);
        for (said, wrong) in [
            (&[Some(7), Some(7), Some(7)][..], 0b000),
            (&[Some(7), Some(8)], 0b10),
            (&[Some(7), Some(8), Some(8)], 0b001),
            (&[Some(zeros), Some(7)], 0b01),
            (&[Some(7), Some(zeros), Some(zeros)], 0b110),
            (&[Some(zeros), Some(zeros)], 0b00),
            (&[None, Some(7), Some(7)], 0b000),
            (&[None, None], 0b00),
            (&[Some(9), None, Some(7), Some(7), Some(8), Some(8)], 0b110001),
        ] {
            assert_eq!(outvoted(MemberSet::first(said.len()), |leg| said[leg]), MemberSet(wrong), "{said:?}");
        }
        assert_eq!(
            outvoted(MemberSet(0b110), |leg| [1, 7, 8].get(leg).copied()),
            MemberSet(0b100),
            "others are not asked"
        );
    }
}
