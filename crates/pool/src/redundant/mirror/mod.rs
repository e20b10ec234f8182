//! Pool of several members that hold the same pages (RAID 1): it lives as long as one of its
//! members does.
//!
//! Writes go to all members, reads to one. For each chunk of 64 pages a word notes which members
//! hold the right bytes ([`farfield_core::chunk_word`]). A member that missed a write, or gave
//! wrong bytes, is not read there until the chunk was copied to it (`copier`). Pages that nobody
//! reads are compared in turn (`scrub`). A member that is gone is never used again; a spare takes
//! its place and is filled by the same copies, while reads and writes go on. A slow member is asked
//! for nothing until it has answered.

mod answers;
mod broadcast;
mod calls;
mod copier;
mod lane;
mod replica_map;
mod scrub;
mod splits;
#[cfg(test)]
mod tests;

use crate::redundant::backend::RedundantBackend;
use crate::redundant::members::{MemberLane, PoolMember};
use crate::redundant::rejoin::SpareMembers;
use crate::redundant::repair::complete_members;
use crate::redundant::scheme::{MEMBER_REQUESTS, RedundantMap};
use crate::redundant::scrub::{Scrub, ScrubTarget};
use crate::{CallChannel, CloneTicket, PoolError, WriteReservation};
use broadcast::MirrorWriteReservation;
use calls::MirrorCalls;
use core::time::Duration;
use farfield_core::PageId;
pub(crate) use lane::MirrorLane;
use lane::MirrorScheme;
pub(crate) use replica_map::{CHUNK_PAGES, InitialContents, ReplicaMap, chunks};
use std::sync::Arc;

/// Backend that keeps the same pages at each of several members.
pub(crate) type MirrorBackend = RedundantBackend<MirrorScheme>;

impl MirrorBackend {
    /// Creates a mirror of `members`, where `holds` says what each of them holds. A member that has
    /// failed already has no backend. The `spares` hold zeros, or what the members hold if they are
    /// a snapshot. The region addresses `pages` pages; 0 means as many as the members have. If
    /// there is a period `scrub`, everything is compared once in that time. With `repairs` a thread
    /// looks after the members and copies; without, lanes do.
    pub(crate) fn new(
        members: Vec<PoolMember>,
        spares: impl Into<SpareMembers>,
        pages: u64,
        holds: InitialContents,
        scrub: Option<Duration>,
        repairs: bool,
    ) -> Result<MirrorBackend, PoolError> {
        let mut table = ReplicaMap::new(members, spares.into(), pages, holds)?;
        table.scrub = Scrub::new(scrub);
        Ok(RedundantBackend::start(table, repairs))
    }
}

impl RedundantMap for ReplicaMap {
    type Scheme = MirrorScheme;

    fn region_pages(&self) -> u64 {
        self.pages
    }

    fn member_pages(&self) -> u64 {
        self.pages
    }

    fn stored_pages(&self) -> u64 {
        self.stored()
    }

    fn forget_member(&self, member: usize) {
        self.forget(member);
    }

    fn snapshot(self: &Arc<ReplicaMap>) -> Result<CloneTicket, PoolError> {
        // A snapshot of a member that lacks a page would not know that it lacks it.
        let secrets = self.clone_members(complete_members(self)?)?;
        Ok(CloneTicket { secrets })
    }

    fn open_function_reads(self: &Arc<ReplicaMap>) -> Result<Box<dyn CallChannel>, PoolError> {
        Ok(Box::new(MirrorCalls::open(self)?))
    }

    fn begin_function_writes(
        self: &Arc<ReplicaMap>,
        runs: &[(PageId, u64)],
    ) -> Result<Box<dyn WriteReservation>, PoolError> {
        Ok(Box::new(MirrorWriteReservation::begin(self, runs)?))
    }

    /// Opens a lane to each member that is there. The new member of a dual write counts as not
    /// there if it gives none. A lane of a dual write must have both members that are there: it
    /// would be without a side when one of them is given back.
    fn open_member_lanes(&self) -> Result<Vec<Option<MemberLane>>, PoolError> {
        self.open_lanes_but(MEMBER_REQUESTS, &|member, error| {
            if self.follower() == Some(member) {
                self.give_up(member, error);
                return true;
            }
            error.is_silence() && !self.is_dual_write()
        })
    }

    fn expel(&self, member: usize, error: PoolError) {
        self.give_up(member, error);
    }

    /// Checks whether the new member of a dual write is full. The caller can go on without it.
    fn pardons(&self, member: usize, error: PoolError) -> bool {
        let is_pardoned = matches!(error, PoolError::PoolFull { .. }) && self.follower() == Some(member);
        if is_pardoned {
            self.give_up(member, error);
        }
        is_pardoned
    }

    fn waits_for_late_answers(&self) -> bool {
        !self.is_dual_write()
    }

    fn on_late_write_reply(&self, member: usize, result: Result<(), PoolError>) {
        match result {
            // The write may still arrive, at any time.
            Err(PoolError::TimedOut { .. }) if !self.is_dual_write() => return self.stay_lagging(member),
            Err(error) if self.is_dual_write() => self.give_up(member, error),
            _ => {}
        }
        self.on_late_reply(member);
    }

    fn give_up_answer(&self, member: usize) {
        if self.is_dual_write() { self.mark_failed(member) } else { self.stay_lagging(member) }
    }
}
