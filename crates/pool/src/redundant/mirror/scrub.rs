//! Scrub of a mirror: compares the pages that members hold with each other.
//!
//! Only the members know what was written. A page that does not match the checksum that its member
//! has of it is wrong. Where pages match their checksums and differ, a member has forgotten a
//! write, or has it somewhere else. A forgotten page reads as zeros, so other bytes count for more;
//! then the bytes of most members; then those of the first. So members hold the same pages
//! afterwards.

use super::replica_map::{CHUNK_PAGES, ReplicaMap};
use crate::redundant::scrub::{MemberChecksums, MismatchedMembers, RepairStatus, Scrub, ScrubRange, ScrubTarget};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, checksum};
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
        let members = self.word(chunk).valid().intersection(self.active());
        let end = ((chunk + 1) * CHUNK_PAGES).min(self.pages);
        Ok(ScrubRange { first: from, count: most.min(end - from), members, is_watched })
    }

    fn decide(&self, run: &ScrubRange, answers: &MemberChecksums) -> Option<MismatchedMembers> {
        let mut wrong = MismatchedMembers::default();
        for (place, wrong) in wrong.iter_mut().enumerate().take(run.count as usize) {
            *wrong = outvoted(run.members, |member| answers.sum(member, place));
        }
        let is_still = run.is_watched && self.word(run.first / CHUNK_PAGES).is_watched();
        let differ = wrong.iter().any(|members| !members.is_empty());
        (!differ || is_still).then_some(wrong)
    }

    fn suspect(&self, place: u64, member: usize) -> bool {
        ReplicaMap::suspect(self, place, 1, member) || self.repair_status(place, member) == RepairStatus::Pending
    }

    fn unwatch(&self, run: &ScrubRange) {
        if run.is_watched {
            ReplicaMap::unwatch(self, run.first / CHUNK_PAGES);
        }
    }

    fn repair_status(&self, place: u64, member: usize) -> RepairStatus {
        if !self.present().has(member) {
            return RepairStatus::Obsolete;
        }
        let is_repaired = self.word(place / CHUNK_PAGES).valid().has(member);
        if is_repaired { RepairStatus::Repaired } else { RepairStatus::Pending }
    }
}

/// Returns the members whose page differs from that of most, by the order that the module
/// describes.
fn outvoted(members: MemberSet, sum: impl Fn(usize) -> Option<u64>) -> MemberSet {
    let said = |member: &usize| sum(*member).is_some();
    let Some(first) = members.iter().find(said) else { return MemberSet(0) };
    if members.iter().filter(said).all(|member| sum(member) == sum(first)) {
        return MemberSet(0);
    }
    let zeros = checksum(&[0; PAGE_BYTES]);
    let votes = |member: usize| members.iter().filter(|other| sum(*other) == sum(member)).count();
    let weight = |member: &usize| (sum(*member) != Some(zeros), votes(*member), MemberSet::MAX - member);
    let best = members.iter().filter(said).max_by_key(weight);
    let is_other = |member: &usize| said(member) && best.is_some_and(|best| sum(*member) != sum(best));
    members.iter().filter(is_other).collect()
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
            assert_eq!(outvoted(MemberSet::first(said.len()), |member| said[member]), MemberSet(wrong), "{said:?}");
        }
        assert_eq!(
            outvoted(MemberSet(0b110), |member| [1, 7, 8].get(member).copied()),
            MemberSet(0b100),
            "others are not asked"
        );
    }
}
