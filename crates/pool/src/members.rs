//! Legs of a backend that outlives some of them (mirror, ec): which are in use, lost, waiting as
//! spares, or late.
//!
//! ```text
//!            called                 late answer to a write             silent for long, or nobody will ever
//!   spare ───────────▶ in use ─────────────────────────────▶ late ───▶ know what it holds, and the others are
//!                         ▲ │                                 │        whole: leaving ─────────▶ lost
//!                         │ └─ its server is gone ─▶ lost     │                  └─ they are not: late still
//!                         └──────── all have come ────────────┘
//! ```
//!
//! A leg whose server is gone is *lost*: it is never used again, and a spare takes its seat. A leg
//! that is slow to answer a write is *late*. Until it has answered, it is asked only for what no
//! other leg has. A late leg is given up, and lost, only if the others can do without it
//! ([`farfield_core::policy::give_up`]). Whether a leg holds the newest version of a chunk is
//! another matter, and is noted for each chunk.

use crate::rejoin::{LaneMailbox, Rejoin, SpareMembers};
use crate::write_epochs::WriteEpochs;
use crate::{Backend, Buffer, Health, Lane, LaneRequest, PoolError, Protection};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::policy::give_up::may_give_up;
use farfield_core::{Incarnation, MemberSet};
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;

/// Greatest number of pages of an errand that travels in buffers of the lane.
pub(crate) const RUN_PAGES: u64 = 16;
/// Time that a leg may take for a write that enough others have, unless the URL says otherwise.
pub(crate) const WRITE_PATIENCE: Duration = Duration::from_millis(500);
/// Least time that a leg has for a write, even after the operation has ended without it. As long as
/// its answer may come, nothing else is written to the same pages of that leg.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Time that the owner of a closing lane waits for late answers that no other lane could take.
pub(crate) const FAREWELL_PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two tries to give up a leg that the others could not do without.
const GIVE_UP_PAUSE: Duration = Duration::from_millis(200);
/// Time stamp that means "never": there is nothing to give up.
const NEVER: u64 = u64::MAX;
/// Time that a leg may take to show that it is alive, where others can do without it.
const ANSWER_PATIENCE: Duration = Duration::from_millis(300);
/// Hedged reads: a read is sent to another leg, too, after this multiple of its usual latency,
/// within the bounds below.
const HEDGE_TIMES: u64 = 8;
pub(crate) const HEDGE_MIN: Duration = Duration::from_millis(1);
pub(crate) const HEDGE_MAX: Duration = Duration::from_millis(100);
/// Number of buffers for one leg's errands: of one page, and of a run.
const SINGLES: usize = 32;
const RUNS: usize = 4;

/// Leg: one of the backends that a mirror or an erasure code is made of.
pub(crate) struct PoolMember {
    /// Backend of the leg; `None` if it was lost before.
    pub(crate) backend: Option<Arc<dyn Backend>>,
    /// Number of leaves in the leg, and so of the secrets of a ticket that are its own.
    pub(crate) leaves: usize,
    /// Number of the first leaf of the leg.
    pub(crate) server: u16,
}

/// Iterates over the backends of the legs that are present.
pub(crate) fn backends(legs: &[PoolMember]) -> impl Iterator<Item = &Arc<dyn Backend>> {
    legs.iter().filter_map(|leg| leg.backend.as_ref())
}

/// Membership of the legs: which are active, lost, late or spare (see the module documentation).
pub(crate) struct Membership {
    pub(crate) members: Vec<PoolMember>,
    /// Way for servers of lost legs to come back, if there is one.
    rejoin: Option<Rejoin>,
    /// For each leg, the leg of the URL whose server it is: itself, unless it came back.
    origins: [AtomicU8; MemberSet::MAX],
    /// Number of legs without spares.
    pub(crate) wanted: usize,
    /// Number of legs that must be present for anything to be read.
    needed: usize,
    /// Leg at each seat; there are as many seats as legs are wanted.
    shards: [AtomicU8; MemberSet::MAX],
    /// Sets of legs: in use, lost for good, waiting as spares.
    active: AtomicU16,
    failed: AtomicU16,
    spare: AtomicU16,
    /// Lost legs that were present before: lanes give up their connections to them.
    former: AtomicU16,
    /// Number of writes to each leg that it has not answered although the operation has ended.
    lagging: [AtomicU32; MemberSet::MAX],
    /// Deadline (ns) of each late leg, after which the others shall go on without it for good.
    /// Below: the earliest of these deadlines.
    give_up_at: [AtomicU64; MemberSet::MAX],
    next_give_up: AtomicU64,
    /// Set of legs that a thread is giving up at this moment.
    leaving: AtomicU16,
    /// Number of writes that are ending without each leg, until it is noted that the leg lacks
    /// them.
    unrecorded_misses: [AtomicU32; MemberSet::MAX],
    /// Time (ns) that a write waits for all legs before it counts with fewer; [`NEVER`] means until
    /// the missing ones are known to be gone.
    write_patience_ns: AtomicU64,
    /// Generations: how often each leg came to lack something, and up to which of these times
    /// everything is repaired.
    missed_generation: [AtomicU32; MemberSet::MAX],
    repaired_generation: [AtomicU32; MemberSet::MAX],
    pub(crate) write_epochs: WriteEpochs,
    /// Number of pages that legs were given because they lacked them.
    restored: AtomicU64,
    /// Whether this is a child of `fork`: nothing here may be used then.
    abandoned: AtomicBool,
}

impl Membership {
    /// Makes the membership of `members` and `spares`, of up to `most` legs. Spares are not in use
    /// yet, unless the legs are `inherited`: in a snapshot, a spare that is present holds what the
    /// others hold.
    pub(crate) fn new(
        mut legs: Vec<PoolMember>,
        spares: SpareMembers,
        needed: usize,
        inherited: bool,
        most: usize,
    ) -> Membership {
        let wanted = legs.len();
        legs.extend(spares.members);
        let places = MemberSet::first(most).difference(MemberSet::first(legs.len()));
        let rejoin = spares.reopen.map(|reopen| Rejoin::new(reopen, places));
        if rejoin.is_some() {
            // These legs stay empty until a server comes back.
            legs.extend(places.iter().map(|_| PoolMember { backend: None, leaves: 0, server: 0 }));
        }
        let all = MemberSet::first(legs.len());
        let is_lost = |leg: &usize| legs[*leg].backend.is_none();
        let lost: MemberSet = all.iter().filter(is_lost).collect();
        let spare = if inherited { MemberSet(0) } else { all.difference(MemberSet::first(wanted)).difference(lost) };
        let roster = Membership {
            origins: core::array::from_fn(|leg| AtomicU8::new(leg as u8)),
            members: legs,
            rejoin,
            wanted,
            needed,
            shards: core::array::from_fn(|seat| AtomicU8::new(seat as u8)),
            active: AtomicU16::new(all.difference(spare).difference(lost).0),
            failed: AtomicU16::new(lost.0),
            spare: AtomicU16::new(spare.0),
            former: AtomicU16::new(0),
            lagging: Default::default(),
            give_up_at: [const { AtomicU64::new(NEVER) }; MemberSet::MAX],
            next_give_up: AtomicU64::new(NEVER),
            leaving: AtomicU16::new(0),
            unrecorded_misses: Default::default(),
            write_patience_ns: AtomicU64::new(WRITE_PATIENCE.as_nanos() as u64),
            missed_generation: Default::default(),
            repaired_generation: Default::default(),
            write_epochs: WriteEpochs::new(),
            restored: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
        };
        for leg in spare.union(roster.spare_slots()).iter() {
            roster.missed_generation[leg].store(1, Ordering::Relaxed);
        }
        for leg in lost.intersection(MemberSet::first(wanted)).iter() {
            roster.call_spare(leg);
        }
        roster
    }

    /// Returns the set of the legs with a backend for which `is_in` holds.
    pub(crate) fn select(&self, is_in: impl Fn(usize, &Arc<dyn Backend>) -> bool) -> MemberSet {
        let chosen = |leg: &usize| self.backend(*leg).is_some_and(|backend| is_in(*leg, &backend));
        (0..self.members.len()).filter(chosen).collect()
    }

    /// Returns the backend of a leg; `None` if it was lost before, or has not come yet.
    pub(crate) fn backend(&self, leg: usize) -> Option<Arc<dyn Backend>> {
        self.members[leg].backend.clone().or_else(|| self.rejoin.as_ref()?.backend(leg))
    }

    pub(crate) fn backends(&self) -> impl Iterator<Item = Arc<dyn Backend>> {
        (0..self.members.len()).filter_map(|leg| self.backend(leg))
    }

    /// Returns the leg of the URL whose server `leg` is.
    pub(crate) fn origin(&self, leg: usize) -> usize {
        self.origins[leg].load(Ordering::SeqCst).into()
    }

    /// Notes that `leg` is the server of the lost leg `origin`.
    pub(crate) fn set_origin(&self, leg: usize, origin: usize) {
        self.origins[leg].store(origin as u8, Ordering::SeqCst);
    }

    /// Returns the legs that came back and are present, each with the leg of the URL whose server
    /// it is.
    pub(crate) fn moved(&self) -> Vec<(usize, usize)> {
        let legs = self.all().difference(self.failed());
        legs.iter().map(|leg| (leg, self.origin(leg))).filter(|(leg, origin)| leg != origin).collect()
    }

    /// Returns the number of the first leaf of `leg`.
    pub(crate) fn server(&self, leg: usize) -> u16 {
        self.members[self.origin(leg)].server
    }

    /// Returns the range of the leg's leaves among those of all legs, in the order of a ticket.
    pub(crate) fn leaves(&self, leg: usize) -> Range<usize> {
        let origin = self.origin(leg);
        let first = self.members[..origin].iter().map(|leg| leg.leaves).sum();
        first..first + self.members[origin].leaves
    }

    /// Returns the index behind the last leg that is, or was, present.
    pub(crate) fn known(&self) -> usize {
        let was_there = |leg: &usize| !self.spare_slots().has(*leg) || self.backend(*leg).is_some();
        self.all().iter().filter(was_there).last().map_or(0, |leg| leg + 1)
    }

    /// Returns the places for servers that come back.
    pub(crate) fn spare_slots(&self) -> MemberSet {
        self.rejoin.as_ref().map_or(MemberSet(0), |rejoin| rejoin.spare_slots)
    }

    /// Returns the legs of the URL that are lost and whose server has not come back at another
    /// place.
    fn unreachable(&self) -> MemberSet {
        let lost = self.failed();
        let back: MemberSet = self.all().difference(lost).iter().map(|leg| self.origin(leg)).collect();
        let servers = self.rejoin.as_ref().map_or(MemberSet(0), |rejoin| rejoin.reopen.servers);
        lost.intersection(servers).difference(back)
    }

    /// Checks whether it is time to look which servers are gone or back, here or in a leg that has
    /// no thread for that.
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

    /// Checks whether a server is away for which there is no free place.
    pub(crate) fn is_full(&self) -> bool {
        let is_full = |rejoin: &Rejoin| rejoin.free_slot().is_none();
        self.rejoin.as_ref().is_some_and(is_full) && !self.is_abandoned() && !self.unreachable().is_empty()
    }

    /// Frees a place, if there is one that no lane is connected to. `forget` drops what the leg was
    /// known to hold. Must not be called while a snapshot is made.
    pub(crate) fn release_slot(&self, forget: impl Fn(usize)) {
        let Some(rejoin) = self.rejoin.as_ref().filter(|_| self.is_full()) else { return };
        rejoin.clear_mailboxes();
        let Some(place) = rejoin.spare_slots.intersection(self.failed()).iter().find(|place| rejoin.is_left(*place))
        else {
            return;
        };
        forget(place);
        self.lagging[place].store(0, Ordering::SeqCst);
        self.give_up_at[place].store(NEVER, Ordering::SeqCst);
        self.note_missed(place);
        rejoin.release_slot(place);
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
            // A server that serves as two legs would protect nothing.
            let of = |legs: MemberSet| legs.iter().filter_map(|leg| self.backend(leg)).collect::<Vec<_>>();
            let in_use = of(self.all().difference(self.failed()));
            let used: Vec<_> = in_use.iter().filter_map(|backend| backend.incarnation()).collect();
            let Some(place) = rejoin.attempt(origin, &used, pages) else { continue };
            self.former.fetch_and(!MemberSet::one(place).0, Ordering::SeqCst);
            self.set_origin(place, origin);
            // If the server was only out of reach, it still keeps a region that will not be used
            // again: free it.
            let came = self.backend(place).and_then(|backend| backend.incarnation());
            let lost = self.failed().difference(MemberSet::one(place));
            of(lost).iter().filter(|old| old.incarnation() == came).for_each(|old| old.release());
            if rejoin.open_member_lanes(place, requests) {
                self.admit(place);
            } else {
                self.mark_failed(place);
            }
        }
    }

    /// Takes a spare that has come to this place. If a leg is lost, the spare takes its seat. The
    /// seat may be that of the place itself.
    fn admit(&self, place: usize) {
        let bit = MemberSet::one(place).0;
        if self.shard_of(place).is_some() {
            return self.write_epochs.during_join(|| {
                self.active.fetch_or(bit, Ordering::SeqCst);
                self.failed.fetch_and(!bit, Ordering::SeqCst);
            });
        }
        // The spare bit is set before the lost bit is cleared: a leg is never in use without having
        // been called.
        self.spare.fetch_or(bit, Ordering::SeqCst);
        self.failed.fetch_and(!bit, Ordering::SeqCst);
        for seat in 0..self.wanted {
            let leg = self.member_of_shard(seat);
            if self.failed().has(leg) {
                self.call_spare(leg);
            }
        }
    }

    /// Makes a mailbox for a lane that is about to be opened.
    pub(crate) fn new_mailbox(&self) -> Option<Arc<LaneMailbox>> {
        self.rejoin.as_ref().map(Rejoin::new_mailbox)
    }

    /// Returns the number of pages that all legs can address.
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

    /// Returns the legs to write to and read from.
    pub(crate) fn active(&self) -> MemberSet {
        let active = MemberSet(self.active.load(Ordering::SeqCst)).difference(self.failed());
        if self.are_enough(active) {
            return active;
        }
        // Slow legs are better than none.
        self.present()
    }

    /// Returns the legs that are neither lost nor spares; late ones are included.
    pub(crate) fn present(&self) -> MemberSet {
        self.all().difference(self.failed()).difference(self.spare())
    }

    /// Returns the leg at `seat`; it may be lost.
    pub(crate) fn member_of_shard(&self, seat: usize) -> usize {
        self.shards[seat].load(Ordering::SeqCst).into()
    }

    /// Restores the seats as they were when a snapshot was made. Everything else in the snapshot
    /// starts afresh.
    pub(crate) fn set_shards(&self, seats: [usize; MemberSet::MAX]) {
        self.shards.iter().zip(seats).for_each(|(seat, leg)| seat.store(leg as u8, Ordering::SeqCst));
    }

    /// Returns the seat of `leg`, if it has one.
    pub(crate) fn shard_of(&self, leg: usize) -> Option<usize> {
        (0..self.wanted).find(|&seat| self.member_of_shard(seat) == leg)
    }

    /// Marks a leg as lost for good, because it is gone or its contents are unknown; a spare takes
    /// its seat.
    pub(crate) fn mark_failed(&self, leg: usize) {
        let bit = MemberSet::one(leg).0;
        self.former.fetch_or(bit, Ordering::SeqCst);
        if self.failed.fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            self.active.fetch_and(!bit, Ordering::SeqCst);
            if self.spare.fetch_and(!bit, Ordering::SeqCst) & bit == 0 {
                self.call_spare(leg);
            }
        }
    }

    /// Puts a spare, if there is one, in use at the seat of the leg that is `failed`.
    pub(crate) fn call_spare(&self, lost: usize) {
        if !self.spare().is_empty() {
            self.write_epochs.during_join(|| self.assign_spare(lost));
        }
    }

    fn assign_spare(&self, lost: usize) {
        loop {
            let spare = self.spare();
            let Some(leg) = spare.iter().next() else { return };
            // The active bit is set before the spare bit is cleared, so that the leg always has one
            // of them.
            self.active.fetch_or(MemberSet::one(leg).0, Ordering::SeqCst);
            if self.spare.fetch_and(!MemberSet::one(leg).0, Ordering::SeqCst) & MemberSet::one(leg).0 == 0 {
                continue;
            }
            let Some(seat) = self.shard_of(lost) else { return };
            let seated = self.shards[seat].compare_exchange(lost as u8, leg as u8, Ordering::SeqCst, Ordering::SeqCst);
            if seated.is_err() {
                // Another spare took the seat first. This one becomes a spare again.
                self.active.fetch_and(!MemberSet::one(leg).0, Ordering::SeqCst);
                self.spare.fetch_or(MemberSet::one(leg).0, Ordering::SeqCst);
            }
            return;
        }
    }

    /// Asks every leg that is present for its health; those that are gone become lost.
    pub(crate) fn check_health(&self) {
        self.select(|_, backend| backend.health() == Health::Gone).iter().for_each(|leg| self.mark_failed(leg));
    }

    /// Returns the time that a write waits for all legs before it counts with fewer; `None` means
    /// until the missing ones are known to be gone.
    pub(crate) fn write_patience(&self) -> Option<Duration> {
        let patience = self.write_patience_ns.load(Ordering::Relaxed);
        (patience != NEVER).then(|| Duration::from_nanos(patience))
    }

    pub(crate) fn set_write_patience(&self, patience: Option<Duration>) {
        let ns = patience.map_or(NEVER, |patience| patience.as_nanos().min(u128::from(NEVER - 1)) as u64);
        self.write_patience_ns.store(ns, Ordering::Relaxed);
    }

    /// Returns the time (ns) at which a write that enough legs have by `now` counts without those
    /// that have not answered.
    pub(crate) fn counts_with_fewer_at(&self, now: u64) -> u64 {
        self.write_patience().map_or(NEVER, |patience| now.saturating_add(patience.as_nanos() as u64))
    }

    /// Marks `leg` as late: it has not answered a write for long. Until it answers, it is asked for
    /// nothing that others can do. If it has not by the time `give_up_at` (ns), it is given up as
    /// soon as they can do without it.
    pub(crate) fn mark_lagging(&self, leg: usize, give_up_at: u64) {
        self.lagging[leg].fetch_add(1, Ordering::SeqCst);
        if self.write_patience().is_some() {
            self.active.fetch_and(!MemberSet::one(leg).0, Ordering::SeqCst);
            self.shall_be_given_up(leg, give_up_at);
        }
    }

    /// Marks that it will never be known whether a write for which `leg` is late has arrived there,
    /// or will. The leg is given up as soon as the others can do without it.
    pub(crate) fn stay_lagging(&self, leg: usize) {
        self.active.fetch_and(!MemberSet::one(leg).0, Ordering::SeqCst);
        self.shall_be_given_up(leg, 0);
    }

    /// Like [`Membership::stay_lagging`], for a write that was not late before.
    pub(crate) fn note_indeterminate(&self, leg: usize) {
        self.lagging[leg].fetch_add(1, Ordering::SeqCst);
        self.stay_lagging(leg);
    }

    fn shall_be_given_up(&self, leg: usize, at: u64) {
        self.give_up_at[leg].fetch_min(at, Ordering::SeqCst);
        self.next_give_up.fetch_min(at, Ordering::SeqCst);
    }

    /// Takes a late answer of `leg` into account; after the last one the leg is in use again.
    pub(crate) fn on_late_reply(&self, leg: usize) {
        if self.lagging[leg].fetch_sub(1, Ordering::SeqCst) != 1 || self.failed().has(leg) {
            return;
        }
        self.give_up_at[leg].store(NEVER, Ordering::SeqCst);
        self.write_epochs.during_join(|| self.active.fetch_or(MemberSet::one(leg).0, Ordering::SeqCst));
        if self.is_lagging(leg) && self.write_patience().is_some() {
            // The leg has become late again since.
            self.active.fetch_and(!MemberSet::one(leg).0, Ordering::SeqCst);
            self.shall_be_given_up(leg, now_ns().saturating_add(ANSWER_WITHIN.as_nanos() as u64));
        }
    }

    /// Gives up legs that have been silent for long, if the others can do without them. `give_up`
    /// notes it in the tables of the backend. Called by each thread that polls a lane.
    pub(crate) fn give_up_the_silent(&self, give_up: impl Fn(usize)) {
        if self.next_give_up.load(Ordering::SeqCst) == NEVER {
            return;
        }
        let now = now_ns();
        if self.next_give_up.load(Ordering::SeqCst) > now {
            return;
        }
        self.next_give_up.store(NEVER, Ordering::SeqCst);
        for leg in self.present().iter() {
            let at = self.give_up_at[leg].load(Ordering::SeqCst);
            let is_over = at <= now && self.is_lagging(leg) && self.try_to_give_up(leg, &give_up);
            if !is_over && at != NEVER {
                self.next_give_up.fetch_min(at.max(now + GIVE_UP_PAUSE.as_nanos() as u64), Ordering::SeqCst);
            }
        }
    }

    /// Gives up a leg whose server may be alive, unless the leg is needed.
    fn try_to_give_up(&self, leg: usize, give_up: impl Fn(usize)) -> bool {
        let bit = MemberSet::one(leg).0;
        let leaving = self.leaving.fetch_or(bit, Ordering::SeqCst);
        if leaving & bit != 0 {
            // Another thread is giving it up.
            return false;
        }
        let whole = self.select(|leg, backend| {
            self.is_whole(leg)
                && self.unrecorded_misses[leg].load(Ordering::SeqCst) == 0
                && backend.health() != Health::Gone
        });
        // Check again, because a doubt may have become a hurt since.
        let whole = whole.iter().filter(|leg| self.is_whole(*leg)).collect();
        let may = may_give_up(leg, whole, MemberSet(leaving | bit), self.needed);
        if may {
            give_up(leg);
        }
        self.leaving.fetch_and(!bit, Ordering::SeqCst);
        may
    }

    /// Returns the legs that must not be relied on, because they are lost or are being given up.
    pub(crate) fn unreliable(&self) -> MemberSet {
        MemberSet(self.leaving.load(Ordering::SeqCst)).union(self.failed())
    }

    /// Runs `change`, which notes that these legs lack something, unless it fails. Meanwhile these
    /// legs do not count as whole when another leg is to be given up
    /// ([`farfield_core::policy::give_up`]).
    pub(crate) fn with_unrecorded_miss<T>(&self, legs: MemberSet, change: impl FnOnce() -> T) -> T {
        legs.iter().for_each(|leg| _ = self.unrecorded_misses[leg].fetch_add(1, Ordering::SeqCst));
        let result = change();
        legs.iter().for_each(|leg| _ = self.unrecorded_misses[leg].fetch_sub(1, Ordering::SeqCst));
        result
    }

    /// Checks whether a write that no operation waits for may still arrive at the leg.
    pub(crate) fn is_lagging(&self, leg: usize) -> bool {
        self.lagging[leg].load(Ordering::SeqCst) != 0
    }

    /// Checks whether the leg holds everything.
    pub(crate) fn is_whole(&self, leg: usize) -> bool {
        let is_used = self.active().has(leg) && !self.is_lagging(leg);
        is_used && self.missed_generation(leg) == self.repaired_generation[leg].load(Ordering::SeqCst)
    }

    pub(crate) fn missed_generation(&self, leg: usize) -> u32 {
        self.missed_generation[leg].load(Ordering::SeqCst)
    }

    /// Notes that the leg lacks something. Must be called after that is visible: a thread that has
    /// found nothing to repair has read the count before.
    pub(crate) fn note_missed(&self, leg: usize) {
        self.missed_generation[leg].fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that everything is repaired that the leg lacked when its count of hurts was `missed_generation`.
    pub(crate) fn set_repaired(&self, leg: usize, hurts: u32) {
        self.repaired_generation[leg].fetch_max(hurts, Ordering::SeqCst);
    }

    /// Returns the legs that lack something and may be given it.
    pub(crate) fn repairable(&self) -> MemberSet {
        let hurt = |leg: &usize| {
            self.missed_generation(*leg) != self.repaired_generation[*leg].load(Ordering::SeqCst)
                && !self.is_lagging(*leg)
        };
        self.active().iter().filter(hurt).collect()
    }

    /// Returns by how many the legs that hold everything are fewer than wanted. The result is at
    /// least 1 while a change is in flight that may not know of a leg.
    fn missing(&self) -> usize {
        // This is read first: a change that has ended by then has noted which legs lack it.
        let are_old = self.write_epochs.has_old_writes();
        let whole = (0..self.members.len()).filter(|leg| self.is_whole(*leg)).count();
        self.wanted.saturating_sub(whole).max(usize::from(are_old))
    }

    /// Counts pages that a leg lacked and was given.
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

    /// Counts the legs in use whose server already serves as another leg.
    fn shared(&self) -> u64 {
        let mut seen = [None; MemberSet::MAX];
        let mut shared = 0;
        for leg in self.present().iter() {
            let Some(incarnation) = self.backend(leg).and_then(|backend| backend.incarnation()) else { continue };
            shared += u64::from(seen.contains(&Some(incarnation)));
            seen[leg] = Some(incarnation);
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

    /// Returns those of these legs that answer now. Blocks for each silent leg.
    pub(crate) fn answering(&self, legs: MemberSet) -> MemberSet {
        self.select(|leg, backend| legs.has(leg) && backend.answers(ANSWER_PATIENCE))
    }

    pub(crate) fn are_enough(&self, legs: MemberSet) -> bool {
        legs.count() >= self.needed
    }

    /// Returns the error for too few legs that hold everything for the time `after`.
    pub(crate) fn silent(&self, after: Duration) -> PoolError {
        let lacking = self.present().iter().find(|leg| !self.is_whole(*leg)).unwrap_or(0);
        PoolError::TimedOut { server: self.server(lacking), after }
    }

    /// Returns the error for too few legs that are left.
    pub(crate) fn gone(&self) -> PoolError {
        let server = self.failed().difference(self.spare_slots()).iter().last().map_or(0, |leg| self.server(leg));
        PoolError::ServerGone { server, incarnation: Incarnation(0) }
    }

    /// Opens a lane to each leg that is present, with room for `requests` waiting requests. A leg
    /// that is present and does not answer is left out.
    pub(crate) fn open_lanes(&self, requests: usize) -> Result<Vec<Option<MemberLane>>, PoolError> {
        self.open_lanes_but(requests, &|_, error| is_silence(error))
    }

    /// Opens a lane to each leg that is present, but leaves out those whose error `may_lack`
    /// accepts.
    pub(crate) fn open_lanes_but(
        &self,
        requests: usize,
        may_lack: &dyn Fn(usize, PoolError) -> bool,
    ) -> Result<Vec<Option<MemberLane>>, PoolError> {
        let (mut lanes, mut lacking) = (Vec::with_capacity(self.members.len()), None);
        for index in 0..self.members.len() {
            let lane = match self.backend(index).map(|backend| backend.open_lane()) {
                Some(Ok(lane)) => Some(lane),
                Some(Err(PoolError::ServerGone { .. })) => {
                    self.mark_failed(index);
                    None
                }
                Some(Err(error)) if may_lack(index, error) => {
                    lacking = Some(error).filter(|_| !self.failed().has(index)).or(lacking);
                    None
                }
                Some(Err(error)) => return Err(error),
                None => None,
            };
            lanes.push(lane.map(|lane| MemberLane::new(lane, requests)));
        }
        if lanes.iter().flatten().count() < self.needed {
            // A caller that hears that everything is gone would give up for good what is only slow.
            return Err(lacking.unwrap_or_else(|| self.gone()));
        }
        Ok(lanes)
    }
}

/// Checks whether the error is a mere time-out: the server may be alive all the same.
pub(crate) fn is_silence(error: PoolError) -> bool {
    matches!(error, PoolError::TimedOut { .. })
}

/// Leg as one lane sees it.
pub(crate) struct MemberLane {
    pub(crate) lane: Box<dyn Lane>,
    /// Requests for which the lane had no room.
    waiting: VecDeque<LaneRequest>,
    singles: Vec<Buffer>,
    runs: Vec<Buffer>,
    /// Time (ns) since which a write waits for a buffer; 0 if none does.
    starved_at: u64,
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

    /// Checks whether a read may take a buffer. Half of the buffers are kept for writes: when a leg
    /// does not answer reads, it is writes that show that it is slow.
    pub(crate) fn has_buffer_for_read(&self, pages: u64) -> bool {
        if pages == 1 { self.singles.len() > SINGLES / 2 } else { self.runs.len() > RUNS / 2 }
    }

    pub(crate) fn take_buffer(&mut self, pages: u64) -> Option<Buffer> {
        let mut buffer = if pages == 1 { self.singles.pop()? } else { self.runs.pop()? };
        buffer.set_pages(pages as usize);
        Some(buffer)
    }

    /// Notes that a write waits for a buffer. Returns whether none has come back for longer than
    /// `patience`, so that others shall not wait for this leg.
    pub(crate) fn is_stuck(&mut self, now: u64, patience: Option<Duration>) -> bool {
        if self.starved_at == 0 {
            self.starved_at = now;
        }
        patience.is_some_and(|patience| now.saturating_sub(self.starved_at) > patience.as_nanos() as u64)
    }

    pub(crate) fn give_buffer(&mut self, buffer: Buffer) {
        self.starved_at = 0;
        if buffer.capacity() == 1 { self.singles.push(buffer) } else { self.runs.push(buffer) }
    }

    /// Takes the latency of an answered read into the average (weight 1/8).
    pub(crate) fn took(&mut self, ns: u64) {
        self.latency_ns = if self.latency_ns == 0 { ns } else { (self.latency_ns * 7 + ns) / 8 };
    }

    /// Notes that a read has been unanswered for `ns`, while another leg answered one that was sent
    /// later.
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
    //! Danger: a leg that was slow once is taken for one that is gone, and what it holds for lost.
    use super::*;
    use crate::trial::{SILENT, SilentMember};

    #[test]
    fn who_finds_too_few_that_answer_hears_that_and_not_that_they_are_gone() {
        let slow = SilentMember::new(100);
        let leg = |backend| PoolMember { backend, leaves: 1, server: 0 };
        let roster = Membership::new(vec![leg(Some(slow.clone())), leg(None)], SpareMembers::default(), 1, false, 2);
        slow.set_silent(true);
        assert_eq!(roster.open_lanes(1).err(), Some(SILENT));
        assert!(!roster.failed().has(0));
        slow.set_silent(false);
        assert_eq!(roster.open_lanes(1).unwrap().iter().flatten().count(), 1);
        roster.mark_failed(0);
        assert!(matches!(roster.gone(), PoolError::ServerGone { .. }));
    }
}
