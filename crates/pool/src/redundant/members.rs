//! Members of a backend that outlives some of them (mirror, ec): which are active, failed, waiting
//! as spares, or lagging.
//!
//! ```text
//!            called                 late answer to a write             silent for long, or nobody will ever
//!   spare ───────────▶ active ──────────────────────────▶ lagging ───▶ know what it holds, and the others are
//!                         ▲ │                                 │        whole: leaving ─────────▶ failed
//!                         │ └─ its server is gone ─▶ failed   │                  └─ they are not: lagging still
//!                         └──────── all have come ────────────┘
//! ```
//!
//! A member whose server is gone is *failed*: it is never used again, and a spare takes its shard.
//! A member that is slow to answer a write is *lagging*. Until it has answered, it is asked only
//! for what no other member has. A lagging member is given up, and failed, only if the others can
//! do without it ([`farfield_core::policy::give_up`]). Whether a member holds the newest version of
//! a chunk is another matter, and is noted for each chunk.

use crate::redundant::rejoin::{LaneMailbox, Rejoin, SpareMembers};
use crate::redundant::write_epochs::WriteEpochs;
use crate::{Backend, Buffer, CloneTicket, Health, Lane, LaneRequest, PoolError, Protection};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::policy::give_up::may_give_up;
use farfield_core::{Incarnation, MemberSet};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Greatest number of pages of a request that travels in buffers of the lane.
pub(crate) const RUN_PAGES: u64 = 16;
/// Time that a member may take for a write that enough others have, unless the URL says otherwise.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_millis(500);
/// Least time that a member has for a write, even after the operation has ended without it. As long
/// as its answer may come, nothing else is written to the same pages of that member.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Time that the owner of a closing lane waits for late answers that no other lane could take.
pub(crate) const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two tries to give up a member that the others could not do without.
const GIVE_UP_PAUSE: Duration = Duration::from_millis(200);
/// Time stamp that means "never": there is nothing to give up.
const NEVER: u64 = u64::MAX;
/// Time that a member may take to show that it is alive, where others can do without it.
const REPLY_TIMEOUT: Duration = Duration::from_millis(300);
/// Hedged reads: a read is sent to another member, too, after this multiple of its usual latency,
/// within the bounds below.
const HEDGE_TIMES: u64 = 8;
pub(crate) const HEDGE_MIN: Duration = Duration::from_millis(1);
pub(crate) const HEDGE_MAX: Duration = Duration::from_millis(100);
/// Number of buffers for one member's requests: of one page, and of a run.
const SINGLES: usize = 32;
const RUNS: usize = 4;

/// Member: one of the backends that a mirror or an erasure code is made of.
pub(crate) struct PoolMember {
    /// Backend of the member; `None` if it had failed before.
    pub(crate) backend: Option<Arc<dyn Backend>>,
    /// Number of leaves in the member, and so of the secrets of a ticket that are its own.
    pub(crate) leaves: usize,
    /// Number of the first leaf of the member.
    pub(crate) server: u16,
}

/// Iterates over the backends of the members that are present.
pub(crate) fn backends(members: &[PoolMember]) -> impl Iterator<Item = &Arc<dyn Backend>> {
    members.iter().filter_map(|member| member.backend.as_ref())
}

/// Membership of the members: which are active, failed, lagging or spare (see the module
/// documentation).
pub(crate) struct Membership {
    pub(crate) members: Vec<PoolMember>,
    /// Way for servers of failed members to come back, if there is one.
    rejoin: Option<Rejoin>,
    /// For each member, the member of the URL whose server it is: itself, unless it came back.
    origins: [AtomicU8; MemberSet::MAX],
    /// Number of members without spares.
    pub(crate) wanted: usize,
    /// Number of members that must be present for anything to be read.
    needed: usize,
    /// Member of each shard; there are as many shards as members are wanted.
    shards: [AtomicU8; MemberSet::MAX],
    /// Sets of members: active, failed for good, waiting as spares.
    active: AtomicU16,
    failed: AtomicU16,
    spare: AtomicU16,
    /// Failed members that were present before: lanes give up their connections to them.
    former: AtomicU16,
    /// Number of writes to each member that it has not answered although the operation has ended.
    lagging: [AtomicU32; MemberSet::MAX],
    /// Deadline (ns) of each lagging member, after which the others shall go on without it for
    /// good. Below: the earliest of these deadlines.
    give_up_at: [AtomicU64; MemberSet::MAX],
    next_give_up: AtomicU64,
    /// Set of members that a thread is giving up at this moment.
    leaving: AtomicU16,
    /// Number of writes that are ending without each member, until it is noted that the member
    /// lacks them.
    unrecorded_misses: [AtomicU32; MemberSet::MAX],
    /// Time (ns) that a write waits for all members before it counts with fewer; [`NEVER`] means
    /// until the missing ones are known to be gone.
    write_timeout_ns: AtomicU64,
    /// Generations: how often each member came to lack something, and up to which of these times
    /// everything is repaired.
    missed_generation: [AtomicU32; MemberSet::MAX],
    repaired_generation: [AtomicU32; MemberSet::MAX],
    pub(crate) write_epochs: WriteEpochs,
    /// Number of pages that members were given because they lacked them.
    restored: AtomicU64,
    /// Whether this is a child of `fork`: nothing here may be used then.
    abandoned: AtomicBool,
}

impl Membership {
    /// Makes the membership of `members` and `spares`, of up to `most` members. Spares are not in
    /// use yet, unless the members are `inherited`: in a snapshot, a spare that is present holds
    /// what the others hold.
    pub(crate) fn new(
        mut members: Vec<PoolMember>,
        spares: SpareMembers,
        needed: usize,
        inherited: bool,
        most: usize,
    ) -> Membership {
        let wanted = members.len();
        members.extend(spares.members);
        let places = MemberSet::first(most).difference(MemberSet::first(members.len()));
        let rejoin = spares.reopen.map(|reopen| Rejoin::new(reopen, places));
        if rejoin.is_some() {
            // These members stay empty until a server comes back.
            members.extend(places.iter().map(|_| PoolMember { backend: None, leaves: 0, server: 0 }));
        }
        let all = MemberSet::first(members.len());
        let is_lost = |member: &usize| members[*member].backend.is_none();
        let failed: MemberSet = all.iter().filter(is_lost).collect();
        let spare = if inherited { MemberSet(0) } else { all.difference(MemberSet::first(wanted)).difference(failed) };
        let membership = Membership {
            origins: core::array::from_fn(|member| AtomicU8::new(member as u8)),
            members,
            rejoin,
            wanted,
            needed,
            shards: core::array::from_fn(|shard| AtomicU8::new(shard as u8)),
            active: AtomicU16::new(all.difference(spare).difference(failed).0),
            failed: AtomicU16::new(failed.0),
            spare: AtomicU16::new(spare.0),
            former: AtomicU16::new(0),
            lagging: Default::default(),
            give_up_at: [const { AtomicU64::new(NEVER) }; MemberSet::MAX],
            next_give_up: AtomicU64::new(NEVER),
            leaving: AtomicU16::new(0),
            unrecorded_misses: Default::default(),
            write_timeout_ns: AtomicU64::new(WRITE_TIMEOUT.as_nanos() as u64),
            missed_generation: Default::default(),
            repaired_generation: Default::default(),
            write_epochs: WriteEpochs::new(),
            restored: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
        };
        for member in spare.union(membership.spare_slots()).iter() {
            membership.missed_generation[member].store(1, Ordering::Relaxed);
        }
        for member in failed.intersection(MemberSet::first(wanted)).iter() {
            membership.call_spare(member);
        }
        membership
    }

    /// Returns the set of the members with a backend for which `is_in` holds.
    pub(crate) fn select(&self, is_in: impl Fn(usize, &Arc<dyn Backend>) -> bool) -> MemberSet {
        let chosen = |member: &usize| self.backend(*member).is_some_and(|backend| is_in(*member, &backend));
        (0..self.members.len()).filter(chosen).collect()
    }

    /// Returns the backend of a member; `None` if it had failed before, or has not come yet.
    pub(crate) fn backend(&self, member: usize) -> Option<Arc<dyn Backend>> {
        self.members[member].backend.clone().or_else(|| self.rejoin.as_ref()?.backend(member))
    }

    pub(crate) fn backends(&self) -> impl Iterator<Item = Arc<dyn Backend>> {
        (0..self.members.len()).filter_map(|member| self.backend(member))
    }

    /// Returns the member of the URL whose server `member` is.
    pub(crate) fn origin(&self, member: usize) -> usize {
        self.origins[member].load(Ordering::SeqCst).into()
    }

    /// Notes that `member` is the server of the failed member `origin`.
    pub(crate) fn set_origin(&self, member: usize, origin: usize) {
        self.origins[member].store(origin as u8, Ordering::SeqCst);
    }

    /// Returns the members that came back and are present, each with the member of the URL whose
    /// server it is.
    pub(crate) fn moved(&self) -> Vec<(usize, usize)> {
        let members = self.all().difference(self.failed());
        members.iter().map(|member| (member, self.origin(member))).filter(|(member, origin)| member != origin).collect()
    }

    /// Returns the number of the first leaf of `member`.
    pub(crate) fn server(&self, member: usize) -> u16 {
        self.members[self.origin(member)].server
    }

    /// Returns the range of the member's leaves among those of all members, in the order of a
    /// ticket.
    pub(crate) fn leaves(&self, member: usize) -> Range<usize> {
        let origin = self.origin(member);
        let first = self.members[..origin].iter().map(|member| member.leaves).sum();
        first..first + self.members[origin].leaves
    }

    /// Returns the index behind the last member that is, or was, present.
    pub(crate) fn known(&self) -> usize {
        let was_there = |member: &usize| !self.spare_slots().has(*member) || self.backend(*member).is_some();
        self.all().iter().filter(was_there).last().map_or(0, |member| member + 1)
    }

    /// Returns the places for servers that come back.
    pub(crate) fn spare_slots(&self) -> MemberSet {
        self.rejoin.as_ref().map_or(MemberSet(0), |rejoin| rejoin.spare_slots)
    }

    /// Returns the members of the URL that have failed and whose server has not come back at
    /// another place.
    fn unreachable(&self) -> MemberSet {
        let failed = self.failed();
        let back: MemberSet = self.all().difference(failed).iter().map(|member| self.origin(member)).collect();
        let servers = self.rejoin.as_ref().map_or(MemberSet(0), |rejoin| rejoin.reopen.servers);
        failed.intersection(servers).difference(back)
    }

    /// Checks whether it is time to look which servers are gone or back, here or in a member that
    /// has no thread for that.
    pub(crate) fn is_rejoin_due(&self) -> bool {
        self.is_own_rejoin_due() || self.backends().any(|backend| backend.is_rejoin_due())
    }

    fn is_own_rejoin_due(&self) -> bool {
        let Some(rejoin) = self.rejoin.as_ref().filter(|_| !self.is_abandoned()) else { return false };
        if rejoin.is_time_to_look() {
            self.check_health();
        }
        rejoin.is_time_to_try(self.unreachable())
    }

    /// Checks whether a server is unreachable for which there is no free slot.
    pub(crate) fn is_full(&self) -> bool {
        let is_full = |rejoin: &Rejoin| rejoin.free_slot().is_none();
        self.rejoin.as_ref().is_some_and(is_full) && !self.is_abandoned() && !self.unreachable().is_empty()
    }

    /// Frees a slot, if there is one that no lane is connected to. `forget` drops what the member
    /// was known to hold. Must not be called while a snapshot is made.
    pub(crate) fn release_slot(&self, forget: impl Fn(usize)) {
        let Some(rejoin) = self.rejoin.as_ref().filter(|_| self.is_full()) else { return };
        rejoin.clear_mailboxes();
        let Some(place) = rejoin.spare_slots.intersection(self.failed()).iter().find(|place| rejoin.is_left(*place))
        else {
            return;
        };
        forget(place);
        rejoin.release_slot(place, || {
            self.lagging[place].store(0, Ordering::SeqCst);
            self.give_up_at[place].store(NEVER, Ordering::SeqCst);
            self.note_missed(place);
            self.former.fetch_and(!MemberSet::one(place).0, Ordering::SeqCst);
        });
    }

    /// Takes servers that are back as spares, if they have at least `pages` pages. Blocks until
    /// they answer or time out.
    pub(crate) fn rejoin(&self, pages: u64, requests: usize) {
        if self.is_own_rejoin_due()
            && let Some(rejoin) = &self.rejoin
        {
            self.readmit(rejoin, pages, requests);
            rejoin.clear_mailboxes();
        }
        self.backends().for_each(|backend| backend.rejoin());
    }

    fn readmit(&self, rejoin: &Rejoin, pages: u64, requests: usize) {
        for origin in self.unreachable().iter() {
            // A server that serves as two members would protect nothing.
            let of = |members: MemberSet| members.iter().filter_map(|member| self.backend(member)).collect::<Vec<_>>();
            let in_use = of(self.all().difference(self.failed()));
            let used: Vec<_> = in_use.iter().filter_map(|backend| backend.incarnation()).collect();
            let Some(place) = rejoin.attempt(origin, &used, pages) else { continue };
            self.set_origin(place, origin);
            // If the server was only out of reach, it still keeps a region that will not be used
            // again: free it.
            let came = self.backend(place).and_then(|backend| backend.incarnation());
            let failed = self.failed().difference(MemberSet::one(place));
            of(failed).iter().filter(|old| old.incarnation() == came).for_each(|old| old.release());
            if rejoin.open_member_lanes(place, requests) {
                self.admit(place);
            } else {
                self.mark_failed(place);
            }
        }
    }

    /// Takes a spare that has come to this place. If a member has failed, the spare takes its
    /// shard. The shard may be that of the place itself.
    fn admit(&self, place: usize) {
        let bit = MemberSet::one(place).0;
        if self.shard_of(place).is_some() {
            return self.write_epochs.during_join(|| {
                self.active.fetch_or(bit, Ordering::SeqCst);
                self.failed.fetch_and(!bit, Ordering::SeqCst);
            });
        }
        // The spare bit is set before the failed bit is cleared: a member is never in use without
        // having been called.
        self.spare.fetch_or(bit, Ordering::SeqCst);
        self.failed.fetch_and(!bit, Ordering::SeqCst);
        for shard in 0..self.wanted {
            let member = self.member_of_shard(shard);
            if self.failed().has(member) {
                self.call_spare(member);
            }
        }
    }

    /// Makes a mailbox for a lane that is about to be opened.
    pub(crate) fn new_mailbox(&self) -> Option<Arc<LaneMailbox>> {
        self.rejoin.as_ref().map(Rejoin::new_mailbox)
    }

    /// Returns the number of pages that all members can address.
    pub(crate) fn pages(&self) -> u64 {
        self.backends().map(|backend| backend.pages()).min().unwrap_or(0)
    }

    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        backends(&self.members).for_each(|backend| backend.abandon());
        self.rejoin.iter().for_each(Rejoin::abandon);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    pub(crate) fn all(&self) -> MemberSet {
        MemberSet::first(self.members.len())
    }

    pub(crate) fn failed(&self) -> MemberSet {
        MemberSet(self.failed.load(Ordering::SeqCst))
    }

    pub(crate) fn former(&self) -> MemberSet {
        MemberSet(self.former.load(Ordering::SeqCst))
    }

    fn spare(&self) -> MemberSet {
        MemberSet(self.spare.load(Ordering::SeqCst))
    }

    /// Returns the members to write to and read from.
    pub(crate) fn active(&self) -> MemberSet {
        let active = MemberSet(self.active.load(Ordering::SeqCst)).difference(self.failed());
        if self.are_enough(active) {
            return active;
        }
        // Slow members are better than none.
        self.present()
    }

    /// Returns the members that are neither failed nor spares; lagging ones are included.
    pub(crate) fn present(&self) -> MemberSet {
        self.all().difference(self.failed()).difference(self.spare())
    }

    /// Returns the member of `shard`; it may have failed.
    pub(crate) fn member_of_shard(&self, shard: usize) -> usize {
        self.shards[shard].load(Ordering::SeqCst).into()
    }

    /// Restores the shards as they were when a snapshot was made. Everything else in the snapshot
    /// starts afresh.
    pub(crate) fn set_shards(&self, shards: [usize; MemberSet::MAX]) {
        self.shards.iter().zip(shards).for_each(|(shard, member)| shard.store(member as u8, Ordering::SeqCst));
    }

    /// Returns the shard index of `member`, if it has one.
    pub(crate) fn shard_of(&self, member: usize) -> Option<usize> {
        (0..self.wanted).find(|&shard| self.member_of_shard(shard) == member)
    }

    /// Calls `act` if this backend is still the member's, and returns its result. Until `act` has
    /// returned, no other backend takes the place. `act` must not look up backends.
    pub(crate) fn if_in_place<T>(
        &self,
        member: usize,
        backend: &Arc<dyn Backend>,
        act: impl FnOnce() -> T,
    ) -> Option<T> {
        match &self.rejoin {
            Some(rejoin) if rejoin.spare_slots.has(member) => rejoin.if_in_place(member, backend, act),
            _ => Some(act()),
        }
    }

    /// Marks a member as failed whose backend has said that it is gone. Does nothing if another
    /// backend has come to the member's place since.
    pub(crate) fn mark_gone(&self, member: usize, backend: &Arc<dyn Backend>) {
        self.if_in_place(member, backend, || self.mark_failed(member));
    }

    /// Marks a member as failed for good, because it is gone or its contents are unknown; a spare
    /// takes its shard. The caller must know that the member is still the one that it means: because
    /// a lane is connected to it, or by [`Membership::if_in_place`].
    pub(crate) fn mark_failed(&self, member: usize) {
        let bit = MemberSet::one(member).0;
        self.former.fetch_or(bit, Ordering::SeqCst);
        if self.failed.fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            self.active.fetch_and(!bit, Ordering::SeqCst);
            if self.spare.fetch_and(!bit, Ordering::SeqCst) & bit == 0 {
                self.call_spare(member);
            }
        }
    }

    /// Puts a spare, if there is one, in use for the shard of the member that has `failed`.
    pub(crate) fn call_spare(&self, failed: usize) {
        if !self.spare().is_empty() {
            self.write_epochs.during_join(|| self.assign_spare(failed));
        }
    }

    fn assign_spare(&self, failed: usize) {
        loop {
            let spare = self.spare();
            let Some(member) = spare.iter().next() else { return };
            // The active bit is set before the spare bit is cleared, so that the member always has
            // one of them.
            self.active.fetch_or(MemberSet::one(member).0, Ordering::SeqCst);
            if self.spare.fetch_and(!MemberSet::one(member).0, Ordering::SeqCst) & MemberSet::one(member).0 == 0 {
                continue;
            }
            let Some(shard) = self.shard_of(failed) else { return };
            let seated =
                self.shards[shard].compare_exchange(failed as u8, member as u8, Ordering::SeqCst, Ordering::SeqCst);
            if seated.is_err() {
                // Another spare took the shard first. This one becomes a spare again.
                self.active.fetch_and(!MemberSet::one(member).0, Ordering::SeqCst);
                self.spare.fetch_or(MemberSet::one(member).0, Ordering::SeqCst);
            }
            return;
        }
    }

    /// Asks every member that is present for its health; those that are gone become failed.
    pub(crate) fn check_health(&self) {
        for member in self.all().iter() {
            if let Some(backend) = self.backend(member).filter(|backend| backend.health() == Health::Gone) {
                self.mark_gone(member, &backend);
            }
        }
    }

    /// Returns the time that a write waits for all members before it counts with fewer; `None`
    /// means until the missing ones are known to be gone.
    pub(crate) fn write_timeout(&self) -> Option<Duration> {
        let timeout = self.write_timeout_ns.load(Ordering::Relaxed);
        (timeout != NEVER).then(|| Duration::from_nanos(timeout))
    }

    pub(crate) fn set_write_timeout(&self, timeout: Option<Duration>) {
        let ns = timeout.map_or(NEVER, |timeout| timeout.as_nanos().min(u128::from(NEVER - 1)) as u64);
        self.write_timeout_ns.store(ns, Ordering::Relaxed);
    }

    /// Returns the time (ns) at which a write that enough members have by `now` counts without
    /// those that have not answered.
    pub(crate) fn counts_with_fewer_at(&self, now: u64) -> u64 {
        self.write_timeout().map_or(NEVER, |timeout| now.saturating_add(timeout.as_nanos() as u64))
    }

    /// Marks `member` as lagging: it has not answered a write for long. Until it answers, it is
    /// asked for nothing that others can do. If it has not by the time `give_up_at` (ns), it is
    /// given up as soon as they can do without it.
    pub(crate) fn mark_lagging(&self, member: usize, give_up_at: u64) {
        self.lagging[member].fetch_add(1, Ordering::SeqCst);
        if self.write_timeout().is_some() {
            self.active.fetch_and(!MemberSet::one(member).0, Ordering::SeqCst);
            self.shall_be_given_up(member, give_up_at);
        }
    }

    /// Marks that it will never be known whether a write for which `member` lags has arrived there,
    /// or will. The member is given up as soon as the others can do without it.
    pub(crate) fn stay_lagging(&self, member: usize) {
        self.active.fetch_and(!MemberSet::one(member).0, Ordering::SeqCst);
        self.shall_be_given_up(member, 0);
    }

    /// Like [`Membership::stay_lagging`], for a write that was not late before.
    pub(crate) fn note_indeterminate(&self, member: usize) {
        self.lagging[member].fetch_add(1, Ordering::SeqCst);
        self.stay_lagging(member);
    }

    fn shall_be_given_up(&self, member: usize, at: u64) {
        self.give_up_at[member].fetch_min(at, Ordering::SeqCst);
        self.next_give_up.fetch_min(at, Ordering::SeqCst);
    }

    /// Takes a late answer of `member` into account; after the last one the member is in use again.
    pub(crate) fn on_late_reply(&self, member: usize) {
        if self.lagging[member].fetch_sub(1, Ordering::SeqCst) != 1 || self.failed().has(member) {
            return;
        }
        self.give_up_at[member].store(NEVER, Ordering::SeqCst);
        self.write_epochs.during_join(|| self.active.fetch_or(MemberSet::one(member).0, Ordering::SeqCst));
        if self.is_lagging(member) && self.write_timeout().is_some() {
            // The member lags again since.
            self.active.fetch_and(!MemberSet::one(member).0, Ordering::SeqCst);
            self.shall_be_given_up(member, now_ns().saturating_add(ANSWER_WITHIN.as_nanos() as u64));
        }
    }

    /// Gives up members that have been silent for long, if the others can do without them.
    /// `give_up` notes it in the tables of the backend. Called by each thread that polls a lane.
    pub(crate) fn give_up_the_silent(&self, give_up: impl Fn(usize)) {
        if self.next_give_up.load(Ordering::SeqCst) == NEVER {
            return;
        }
        let now = now_ns();
        if self.next_give_up.load(Ordering::SeqCst) > now {
            return;
        }
        self.next_give_up.store(NEVER, Ordering::SeqCst);
        for member in self.present().iter() {
            let at = self.give_up_at[member].load(Ordering::SeqCst);
            let is_over = at <= now && self.is_lagging(member) && self.try_to_give_up(member, &give_up);
            if !is_over && at != NEVER {
                self.next_give_up.fetch_min(at.max(now + GIVE_UP_PAUSE.as_nanos() as u64), Ordering::SeqCst);
            }
        }
    }

    /// Gives up a member whose server may be alive, unless the member is needed.
    fn try_to_give_up(&self, member: usize, give_up: impl Fn(usize)) -> bool {
        let bit = MemberSet::one(member).0;
        let leaving = self.leaving.fetch_or(bit, Ordering::SeqCst);
        if leaving & bit != 0 {
            // Another thread is giving it up.
            return false;
        }
        let whole = self.select(|member, backend| {
            self.is_whole(member)
                && self.unrecorded_misses[member].load(Ordering::SeqCst) == 0
                && backend.health() != Health::Gone
        });
        // Check again, because an unrecorded miss may have been recorded since.
        let whole = whole.iter().filter(|member| self.is_whole(*member)).collect();
        let may = may_give_up(member, whole, MemberSet(leaving | bit), self.needed);
        if may {
            give_up(member);
        }
        self.leaving.fetch_and(!bit, Ordering::SeqCst);
        may
    }

    /// Returns the members that must not be relied on, because they have failed or are being given
    /// up.
    pub(crate) fn unreliable(&self) -> MemberSet {
        MemberSet(self.leaving.load(Ordering::SeqCst)).union(self.failed())
    }

    /// Runs `change`, which notes that these members lack something, unless it fails. Meanwhile
    /// these members do not count as whole when another member is to be given up
    /// ([`farfield_core::policy::give_up`]).
    pub(crate) fn with_unrecorded_miss<T>(&self, members: MemberSet, change: impl FnOnce() -> T) -> T {
        members.iter().for_each(|member| _ = self.unrecorded_misses[member].fetch_add(1, Ordering::SeqCst));
        let result = change();
        members.iter().for_each(|member| _ = self.unrecorded_misses[member].fetch_sub(1, Ordering::SeqCst));
        result
    }

    /// Checks whether a write that no operation waits for may still arrive at the member.
    pub(crate) fn is_lagging(&self, member: usize) -> bool {
        self.lagging[member].load(Ordering::SeqCst) != 0
    }

    /// Checks whether the member holds everything.
    pub(crate) fn is_whole(&self, member: usize) -> bool {
        let is_used = self.active().has(member) && !self.is_lagging(member);
        is_used && self.missed_generation(member) == self.repaired_generation[member].load(Ordering::SeqCst)
    }

    pub(crate) fn missed_generation(&self, member: usize) -> u32 {
        self.missed_generation[member].load(Ordering::SeqCst)
    }

    /// Notes that the member lacks something. Must be called after that is visible: a thread that
    /// has found nothing to repair has read the count before.
    pub(crate) fn note_missed(&self, member: usize) {
        self.missed_generation[member].fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that everything is repaired that the member lacked when its missed generation was
    /// `generation`.
    pub(crate) fn set_repaired(&self, member: usize, generation: u32) {
        self.repaired_generation[member].fetch_max(generation, Ordering::SeqCst);
    }

    /// Returns the members that lack something and may be given it.
    pub(crate) fn repairable(&self) -> MemberSet {
        let is_incomplete = |member: &usize| {
            self.missed_generation(*member) != self.repaired_generation[*member].load(Ordering::SeqCst)
                && !self.is_lagging(*member)
        };
        self.active().iter().filter(is_incomplete).collect()
    }

    /// Returns by how many the members that hold everything are fewer than wanted. The result is at
    /// least 1 while a change is in flight that may not know of a member.
    fn missing(&self) -> usize {
        // This is read first: a change that has ended by then has noted which members lack it.
        let are_old = self.write_epochs.has_old_writes();
        let whole = (0..self.members.len()).filter(|member| self.is_whole(*member)).count();
        self.wanted.saturating_sub(whole).max(usize::from(are_old))
    }

    /// Counts pages that a member lacked and was given.
    pub(crate) fn restored(&self, pages: u64) {
        self.restored.fetch_add(pages, Ordering::Relaxed);
    }

    /// Returns the protection of a pool that has `stored` pages.
    pub(crate) fn protection(&self, stored: u64) -> Protection {
        let (missing_legs, shared_legs) = (self.missing() as u64, self.shared());
        let exposed_pages = if missing_legs + shared_legs > 0 { stored } else { 0 };
        let restored_pages = self.restored.load(Ordering::Relaxed);
        Protection { missing_legs, shared_legs, exposed_pages, restored_pages }
    }

    /// Counts the members in use whose server already serves as another member.
    fn shared(&self) -> u64 {
        let mut seen = [None; MemberSet::MAX];
        let mut shared = 0;
        for member in self.present().iter() {
            let Some(incarnation) = self.backend(member).and_then(|backend| backend.incarnation()) else { continue };
            shared += u64::from(seen.contains(&Some(incarnation)));
            seen[member] = Some(incarnation);
        }
        shared
    }

    pub(crate) fn health(&self) -> Health {
        if !self.are_enough(self.present()) {
            Health::Gone
        } else if self.missing() == 0 {
            Health::Good
        } else {
            Health::Degraded
        }
    }

    /// Returns those of these members that answer now. Blocks for each silent member.
    pub(crate) fn answering(&self, members: MemberSet) -> MemberSet {
        self.select(|member, backend| members.has(member) && backend.answers(REPLY_TIMEOUT))
    }

    pub(crate) fn are_enough(&self, members: MemberSet) -> bool {
        members.count() >= self.needed
    }

    /// Returns the server of a member that keeps operations waiting, for the error that says so.
    pub(crate) fn slow_server(&self) -> u16 {
        let slow = self.present().iter().find(|member| self.is_lagging(*member));
        self.server(slow.or(self.present().iter().next()).unwrap_or(0))
    }

    /// Makes a snapshot of each of these members that answers. Returns the secrets, if there are
    /// enough of them; those of other members are 0.
    pub(crate) fn clone_members(&self, members: MemberSet) -> Result<[u128; CloneTicket::SERVERS_MAX], PoolError> {
        let mut secrets = [0; CloneTicket::SERVERS_MAX];
        let (mut cloned, mut failed) = (MemberSet(0), None);
        for member in members.iter() {
            let own = self.leaves(member);
            let Some(backend) = self.backend(member) else { continue };
            match backend.clone_region() {
                Ok(ticket) => {
                    secrets[own.clone()].copy_from_slice(&ticket.secrets[..own.len()]);
                    cloned = cloned.union(MemberSet::one(member));
                }
                Err(error) => {
                    if matches!(error, PoolError::ServerGone { .. }) {
                        self.mark_gone(member, &backend);
                    }
                    failed = Some(error);
                }
            }
        }
        if self.are_enough(cloned) { Ok(secrets) } else { Err(failed.unwrap_or(self.gone())) }
    }

    /// Returns the error for too few members that hold everything for the time `after`.
    pub(crate) fn silent(&self, after: Duration) -> PoolError {
        let lacking = self.present().iter().find(|member| !self.is_whole(*member)).unwrap_or(0);
        PoolError::TimedOut { server: self.server(lacking), after }
    }

    /// Returns the error for too few members that are left.
    pub(crate) fn gone(&self) -> PoolError {
        let server = self.failed().difference(self.spare_slots()).iter().last().map_or(0, |member| self.server(member));
        PoolError::ServerGone { server, incarnation: Incarnation(0) }
    }

    /// Opens a lane to each member that is present, with room for `requests` waiting requests. A
    /// member that is present and does not answer is left out.
    pub(crate) fn open_lanes(&self, requests: usize) -> Result<Vec<Option<MemberLane>>, PoolError> {
        self.open_lanes_but(requests, &|_, error| error.is_silence())
    }

    /// Opens a lane to each member that is present, but leaves out those whose error `may_lack`
    /// accepts.
    pub(crate) fn open_lanes_but(
        &self,
        requests: usize,
        may_lack: &dyn Fn(usize, PoolError) -> bool,
    ) -> Result<Vec<Option<MemberLane>>, PoolError> {
        loop {
            let failed = self.failed();
            let (lanes, lacking) = self.open_what_is_there(requests, may_lack)?;
            if lanes.iter().flatten().count() >= self.needed {
                return Ok(lanes);
            }
            // Members that died meanwhile may have successors, which this round came too early for.
            if self.failed() == failed || !self.are_enough(self.present()) {
                // A caller that hears that everything is gone would give up for good what is only slow.
                return Err(lacking.unwrap_or_else(|| self.gone()));
            }
        }
    }

    /// Opens lanes for [`Membership::open_lanes_but`], however few. Returns the error of a member
    /// that was left out and has not failed with them.
    fn open_what_is_there(
        &self,
        requests: usize,
        may_lack: &dyn Fn(usize, PoolError) -> bool,
    ) -> Result<(Vec<Option<MemberLane>>, Option<PoolError>), PoolError> {
        let (mut lanes, mut lacking) = (Vec::with_capacity(self.members.len()), None);
        for index in 0..self.members.len() {
            let backend = self.backend(index);
            let lane = match backend.as_ref().map(|backend| (backend, backend.open_lane())) {
                Some((_, Ok(lane))) => Some(lane),
                Some((backend, Err(PoolError::ServerGone { .. }))) => {
                    self.mark_gone(index, backend);
                    None
                }
                Some((_, Err(error))) if may_lack(index, error) => {
                    lacking = Some(error).filter(|_| !self.failed().has(index)).or(lacking);
                    None
                }
                Some((_, Err(error))) => return Err(error),
                None => None,
            };
            lanes.push(lane.map(|lane| MemberLane::new(lane, requests)));
        }
        Ok((lanes, lacking))
    }
}

/// Member as one lane sees it.
pub(crate) struct MemberLane {
    pub(crate) lane: Box<dyn Lane>,
    /// Requests for which the lane had no room.
    waiting: VecDeque<LaneRequest>,
    singles: Vec<Buffer>,
    runs: Vec<Buffer>,
    /// Time (ns) since which a write waits for a buffer; 0 if none does.
    starved_at: u64,
    /// Time (ns) since which a read waits for a buffer; 0 if none does.
    read_starved_at: u64,
    /// Moving average of the latency of reads, in ns; 0 if unknown.
    pub(crate) latency_ns: u64,
}

impl MemberLane {
    pub(crate) fn new(lane: Box<dyn Lane>, requests: usize) -> MemberLane {
        MemberLane {
            lane,
            waiting: VecDeque::with_capacity(requests),
            singles: (0..SINGLES).map(|_| Buffer::new(1)).collect(),
            runs: (0..RUNS).map(|_| Buffer::new(RUN_PAGES as usize)).collect(),
            starved_at: 0,
            read_starved_at: 0,
            latency_ns: 0,
        }
    }

    /// Checks whether nothing is in flight or waiting.
    pub(crate) fn is_idle(&self) -> bool {
        self.lane.in_flight() == 0 && self.waiting.is_empty()
    }

    /// Submits a request, behind those that wait already.
    pub(crate) fn submit(&mut self, request: LaneRequest) {
        if !self.waiting.is_empty() {
            self.waiting.push_back(request);
        } else if let Err(back) = self.lane.submit(request) {
            self.waiting.push_back(back);
        }
    }

    /// Submits waiting requests, as far as there is room by now.
    pub(crate) fn submit_waiting(&mut self) {
        while let Some(request) = self.waiting.pop_front() {
            if let Err(back) = self.lane.submit(request) {
                self.waiting.push_front(back);
                break;
            }
        }
    }

    pub(crate) fn has_buffer(&self, pages: u64) -> bool {
        if pages == 1 { !self.singles.is_empty() } else { !self.runs.is_empty() }
    }

    /// Checks whether a read may take a buffer. Half of the buffers are kept for writes: when a
    /// member does not answer reads, it is writes that show that it is slow.
    pub(crate) fn has_buffer_for_read(&self, pages: u64) -> bool {
        if pages == 1 { self.singles.len() > SINGLES / 2 } else { self.runs.len() > RUNS / 2 }
    }

    pub(crate) fn take_buffer(&mut self, pages: u64) -> Option<Buffer> {
        let mut buffer = if pages == 1 { self.singles.pop()? } else { self.runs.pop()? };
        buffer.set_pages(pages as usize);
        Some(buffer)
    }

    /// Notes that a write waits for a buffer. Returns whether none has come back for longer than
    /// `timeout`, so that others shall not wait for this member.
    pub(crate) fn is_stuck(&mut self, now: u64, timeout: Option<Duration>) -> bool {
        if self.starved_at == 0 {
            self.starved_at = now;
        }
        timeout.is_some_and(|timeout| now.saturating_sub(self.starved_at) > timeout.as_nanos() as u64)
    }

    /// Notes that a read waits for a buffer. Returns until when (ns) it may: if none has come back
    /// for longer than an answer usually takes, others shall be asked.
    pub(crate) fn read_waits_until(&mut self, now: u64) -> u64 {
        if self.read_starved_at == 0 {
            self.read_starved_at = now;
        }
        self.read_starved_at.saturating_add(self.hedge_after())
    }

    pub(crate) fn give_buffer(&mut self, buffer: Buffer) {
        (self.starved_at, self.read_starved_at) = (0, 0);
        if buffer.capacity() == 1 { self.singles.push(buffer) } else { self.runs.push(buffer) }
    }

    /// Takes the latency of an answered read into the average (weight 1/8).
    pub(crate) fn took(&mut self, ns: u64) {
        self.latency_ns = if self.latency_ns == 0 { ns } else { (self.latency_ns * 7 + ns) / 8 };
    }

    /// Notes that a read has been unanswered for `ns`, while another member answered one that was
    /// sent later.
    pub(crate) fn is_slower_than(&mut self, ns: u64) {
        self.latency_ns = self.latency_ns.max(ns).min(HEDGE_MAX.as_nanos() as u64);
    }

    pub(crate) fn hedge_after(&self) -> u64 {
        match self.latency_ns {
            0 => HEDGE_MAX.as_nanos() as u64 / 4,
            usual => (usual * HEDGE_TIMES).clamp(HEDGE_MIN.as_nanos() as u64, HEDGE_MAX.as_nanos() as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a member that was slow once is taken for one that is gone, and what it holds for
    //! lost.
    use super::*;
    use crate::trial::{SILENT, SilentMember};

    #[test]
    fn too_few_answering_members_are_reported_as_silent_and_not_as_gone() {
        let slow = SilentMember::new(100);
        let member = |backend| PoolMember { backend, leaves: 1, server: 0 };
        let membership =
            Membership::new(vec![member(Some(slow.clone())), member(None)], SpareMembers::default(), 1, false, 2);
        slow.set_silent(true);
        assert_eq!(membership.open_lanes(1).err(), Some(SILENT));
        assert!(!membership.failed().has(0));
        slow.set_silent(false);
        assert_eq!(membership.open_lanes(1).unwrap().iter().flatten().count(), 1);
        membership.mark_failed(0);
        assert!(matches!(membership.gone(), PoolError::ServerGone { .. }));
    }
}
