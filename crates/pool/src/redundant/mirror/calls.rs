//! Calls of functions that change nothing, at one member that holds everything.
//!
//! A write that a member misses raises its *missed generation* before the writer hears that the
//! write is done. So an answer reflects what the pool holds if its member held everything when the
//! call set out, and was missed nothing, and was neither failed nor lagging, until the answer was
//! here. Otherwise the answer is dropped, and the call is retried at another member, in what is
//! left of its time. The same happens when the member dies. A member from which nothing comes is
//! asked whether it is there. If it does not say so it is left, and for a while it is asked after
//! the others.
//!
//! Dangers that the tests guard against: old bytes, from a member that has missed a write; a call
//! that ends with a member that others could do without, or waits for it.

use super::replica_map::ReplicaMap;
use crate::contract::calls;
use crate::{CallChannel, CallEnd, CallFailure, FarCall, PoolError};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_core::wire::ErrorCode;
use farfield_os::process::now_ns;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Time without an answer after which a member is asked whether it is there. The next time it is
/// twice as long.
const STALL_TIMEOUT: Duration = Duration::from_millis(400);
/// Time for which a member that did not say that it is there is asked after the others.
const SILENCE: Duration = Duration::from_secs(5);
/// Period in which a sleeping caller checks whether the member still holds everything.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Choice of the member that is called next: each in turn, because each has processors of its own.
#[derive(Default)]
pub(super) struct Callees {
    turn: AtomicUsize,
    /// Time before which each member is asked last.
    silent_until: [AtomicU64; MemberSet::MAX],
}

impl Callees {
    fn next(&self, members: MemberSet, now: u64) -> Option<usize> {
        let is_awake = |member: &usize| self.silent_until[*member].load(Ordering::Relaxed) <= now;
        let awake: MemberSet = members.iter().filter(is_awake).collect();
        let members = if awake.is_empty() { members } else { awake };
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        members.iter().nth(turn.checked_rem(members.count())?)
    }

    fn mark_silent(&self, member: usize, now: u64) {
        self.silent_until[member].store(now.saturating_add(SILENCE.as_nanos() as u64), Ordering::Relaxed);
    }
}

/// Channel to the member that is called.
struct CalleeChannel {
    member: usize,
    /// Missed generation of the member when it was found to hold everything.
    missed_generation: u32,
    calls: Box<dyn CallChannel>,
    /// When the last answer came, or the member last had nothing to do.
    heard_at: u64,
    timeout: Duration,
}

struct RetriableCall {
    call: FarCall,
    until: u64,
    /// Members that do not run it, and the last refusal.
    refused: MemberSet,
    refusal: Option<CallFailure>,
}

/// Channel that calls functions at one member of a mirror that holds everything.
pub(super) struct MirrorCalls {
    table: Arc<ReplicaMap>,
    channel: Option<CalleeChannel>,
    /// Calls by the tag that members are told, which is never used twice.
    pending: BTreeMap<u64, RetriableCall>,
    /// Calls that were sent to no member yet.
    unsent: VecDeque<u64>,
    next: u64,
    arrived: Vec<CallEnd>,
    ended: VecDeque<CallEnd>,
    /// Members that run no functions.
    without_functions: MemberSet,
}

impl MirrorCalls {
    pub(super) fn open(table: &Arc<ReplicaMap>) -> Result<MirrorCalls, PoolError> {
        let mut calls = MirrorCalls {
            table: table.clone(),
            channel: None,
            pending: BTreeMap::new(),
            unsent: VecDeque::new(),
            next: 0,
            arrived: Vec::new(),
            ended: VecDeque::new(),
            without_functions: MemberSet(0),
        };
        calls.channel = Some(calls.open_channel(MemberSet(0))?);
        Ok(calls)
    }

    /// Returns the members that hold everything and may run functions, without those in `out`.
    fn whole(&self, out: MemberSet) -> MemberSet {
        let members = self.table.all().difference(self.without_functions).difference(out);
        members.iter().filter(|member| self.table.is_whole(*member)).collect()
    }

    /// Opens a channel to a member that holds everything and is not in `out`.
    fn open_channel(&mut self, out: MemberSet) -> Result<CalleeChannel, PoolError> {
        let mut out = out;
        while let Some(member) = self.table.callees.next(self.whole(out), now_ns()) {
            // The count is read first: if the member misses something after this, its answers do
            // not count.
            let missed_generation = self.table.missed_generation(member);
            out = out.union(MemberSet::one(member));
            match self.table.backend(member).map(|backend| backend.open_reads()) {
                Some(Ok(calls)) => {
                    return Ok(CalleeChannel {
                        member,
                        missed_generation,
                        calls,
                        heard_at: now_ns(),
                        timeout: STALL_TIMEOUT,
                    });
                }
                Some(Err(PoolError::Refused { reason: calls::NOWHERE, .. })) => {
                    self.without_functions = self.without_functions.union(MemberSet::one(member));
                }
                // Its session says whether it is gone.
                Some(Err(PoolError::ServerGone { .. })) => self.table.check_health(),
                _ => {}
            }
        }
        let present = self.table.present();
        if present.is_empty() {
            return Err(self.table.gone());
        }
        let reason =
            if present.difference(self.without_functions).is_empty() { calls::NOWHERE } else { calls::NOT_NOW };
        Err(PoolError::Refused { server: self.table.server(present.iter().next().unwrap_or(0)), reason })
    }

    /// Checks whether the member has held everything since it was chosen.
    fn is_true(&self, channel: &CalleeChannel) -> bool {
        self.table.missed_generation(channel.member) == channel.missed_generation && self.table.is_whole(channel.member)
    }

    /// Leaves the member: all calls that were sent to it will be sent elsewhere.
    fn leave(&mut self) {
        self.channel = None;
        self.unsent = self.pending.keys().copied().collect();
    }

    fn work(&mut self) -> u64 {
        self.hear();
        let now = now_ns();
        self.expire(now);
        self.probe_silent(now);
        self.send();
        now
    }

    /// Takes the answers that have come, if they count.
    fn hear(&mut self) {
        let Some(mut channel) = self.channel.take() else { return };
        if channel.calls.poll(&mut self.arrived) > 0 || channel.calls.in_flight() == 0 {
            (channel.heard_at, channel.timeout) = (now_ns(), STALL_TIMEOUT);
        }
        // This is checked when the answers are here, not before.
        if !self.is_true(&channel) {
            self.arrived.clear();
            return self.leave();
        }
        let mut arrived = core::mem::take(&mut self.arrived);
        let mut is_lost = false;
        for CallEnd { tag, result, steps } in arrived.drain(..) {
            is_lost |= !self.on_reply(channel.member, tag, result, steps);
        }
        self.arrived = arrived;
        if is_lost {
            self.table.check_health();
            return self.leave();
        }
        self.channel = Some(channel);
    }

    /// Handles one answer; returns `false` if the member was not reached.
    fn on_reply(&mut self, member: usize, id: u64, result: Result<Vec<u8>, CallFailure>, steps: u32) -> bool {
        // A call that is not pending has run out of time before.
        let Some(pending) = self.pending.get_mut(&id) else { return true };
        let is_of_member = match result {
            Ok(_) | Err(CallFailure::Pool(PoolError::TimedOut { .. })) => false,
            Err(CallFailure::Pool(_)) => true,
            Err(CallFailure::Server { code, detail }) => match code {
                ErrorCode::NoFunction | ErrorCode::OtherVersion | ErrorCode::Unsupported => true,
                ErrorCode::UnknownRegion | ErrorCode::Internal => true,
                // Others may have the right bytes.
                ErrorCode::Corrupt => detail < self.table.pages && self.table.suspect(detail, 1, member),
                _ => false,
            },
        };
        if is_of_member {
            pending.refused = pending.refused.union(MemberSet::one(member));
            let is_gone = matches!(result, Err(CallFailure::Pool(PoolError::ServerGone { .. })));
            pending.refusal = result.as_ref().err().copied().filter(|_| !is_gone).or(pending.refusal);
            self.unsent.push_back(id);
            return !matches!(result, Err(CallFailure::Pool(_)));
        }
        if let Some(RetriableCall { call, .. }) = self.pending.remove(&id) {
            self.ended.push_back(CallEnd { tag: call.tag, result, steps });
        }
        true
    }

    fn expire(&mut self, now: u64) {
        let server = self.channel.as_ref().map_or(0, |channel| self.table.server(channel.member));
        let ended = &mut self.ended;
        let count = self.pending.len();
        self.pending.retain(|_, pending| {
            let is_late = pending.until <= now;
            if is_late {
                let error = PoolError::TimedOut { server, after: pending.call.deadline };
                ended.push_back(CallEnd { tag: pending.call.tag, result: Err(CallFailure::Pool(error)), steps: 0 });
            }
            !is_late
        });
        if self.pending.len() < count {
            let pending = &self.pending;
            self.unsent.retain(|id| pending.contains_key(id));
        }
    }

    /// Asks a silent member whether it is there, if others could answer, and leaves it if it is
    /// not.
    fn probe_silent(&mut self, now: u64) {
        let Some(CalleeChannel { member, heard_at, timeout, .. }) = self.channel else { return };
        if self.pending.is_empty() || now.saturating_sub(heard_at) < timeout.as_nanos() as u64 {
            return;
        }
        let others = self.whole(MemberSet::one(member));
        if !others.is_empty() && self.table.answering(MemberSet::one(member)).is_empty() {
            self.table.callees.mark_silent(member, now_ns());
            return self.leave();
        }
        if let Some(channel) = &mut self.channel {
            (channel.heard_at, channel.timeout) = (now_ns(), 2 * timeout);
        }
    }

    /// Sends calls to a member that runs them. Calls that were refused wait until there is nothing
    /// else.
    fn send(&mut self) {
        while let Some(first) = self.unsent.front().copied() {
            let Some(RetriableCall { refused, refusal, .. }) = self.pending.get(&first) else {
                self.unsent.pop_front();
                continue;
            };
            let (refused, refusal) = (*refused, *refusal);
            let of_way = self
                .channel
                .as_ref()
                .filter(|channel| self.is_true(channel))
                .map(|channel| (channel.member, channel.calls.in_flight()));
            match of_way {
                Some((member, 0)) if refused.has(member) => self.channel = None,
                Some((member, _)) if refused.has(member) => return,
                Some(_) => {}
                None if self.channel.is_some() => {
                    self.leave();
                    continue;
                }
                None => {}
            }
            if self.channel.is_none() {
                match self.open_channel(refused) {
                    Ok(channel) => self.channel = Some(channel),
                    Err(error) => {
                        self.unsent.pop_front();
                        let is_for_now = matches!(error, PoolError::Refused { .. });
                        let failure = refusal.filter(|_| is_for_now).unwrap_or(CallFailure::Pool(error));
                        if let Some(RetriableCall { call, .. }) = self.pending.remove(&first) {
                            self.ended.push_back(CallEnd { tag: call.tag, result: Err(failure), steps: 0 });
                        }
                    }
                }
                continue;
            }
            let (Some(channel), Some(pending)) = (&mut self.channel, self.pending.get(&first)) else { return };
            let left = Duration::from_nanos(pending.until.saturating_sub(now_ns()));
            if channel.calls.submit(FarCall { tag: first, deadline: left, ..pending.call.clone() }).is_err() {
                return;
            }
            self.unsent.pop_front();
        }
    }
}

impl CallChannel for MirrorCalls {
    fn submit(&mut self, call: FarCall) -> Result<(), FarCall> {
        if self.in_flight() >= calls::CALLS_MAX {
            return Err(call);
        }
        let until = now_ns().saturating_add(u64::try_from(call.deadline.as_nanos()).unwrap_or(u64::MAX));
        self.pending.insert(self.next, RetriableCall { call, until, refused: MemberSet(0), refusal: None });
        self.unsent.push_back(self.next);
        self.next += 1;
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<CallEnd>) -> usize {
        self.work();
        let count = self.ended.len();
        done.extend(self.ended.drain(..));
        count
    }

    fn in_flight(&self) -> usize {
        self.pending.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        let limit = now_ns().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        loop {
            let now = self.work();
            if !self.ended.is_empty() || self.pending.is_empty() || now >= limit {
                return;
            }
            let soonest = self.pending.values().map(|pending| pending.until).min().unwrap_or(limit);
            let most = Duration::from_nanos(limit.min(soonest).saturating_sub(now)).min(LOOK_EVERY);
            match &mut self.channel {
                Some(channel) => channel.calls.wait(most),
                None => farfield_os::process::sleep(most),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MirrorBackend;
    use super::super::replica_map::InitialContents;
    use super::*;
    use crate::redundant::members::PoolMember;
    use crate::trial::{LONG, SilentMember, filled, open, wait_until, write};
    use crate::{Backend, Health};
    use std::time::Instant;

    const PAGES: u64 = 256;

    /// A mirror of these, which are repaired only by who polls a lane.
    fn mirror(sides: &[Arc<SilentMember>]) -> MirrorBackend {
        let members =
            sides.iter().map(|side| PoolMember { backend: Some(side.clone()), leaves: 1, server: 0 }).collect();
        MirrorBackend::new(members, vec![], PAGES, InitialContents::Zeros, None, false).unwrap()
    }

    fn sides() -> [Arc<SilentMember>; 2] {
        [SilentMember::new(PAGES), SilentMember::new(PAGES)]
    }

    fn ask(page: u64, deadline: Duration) -> FarCall {
        FarCall {
            tag: page,
            deadline,
            steps_max: 0,
            name: "first word",
            version: 1,
            argument: page.to_le_bytes().into(),
        }
    }

    fn answer(calls: &mut dyn CallChannel) -> Result<u64, CallFailure> {
        let mut done = Vec::new();
        while calls.poll(&mut done) == 0 {
            calls.wait(LONG);
        }
        done.remove(0).result.map(|word| u64::from_le_bytes(word.try_into().unwrap()))
    }

    fn word(page: u64, version: u64) -> u64 {
        u64::from_le_bytes(*filled(1, page, version).bytes().first_chunk().unwrap())
    }

    #[track_caller]
    fn assert_says(calls: &mut dyn CallChannel, page: u64, version: u64) {
        calls.submit(ask(page, LONG)).unwrap();
        assert_eq!(answer(calls), Ok(word(page, version)), "page {page}");
    }

    fn counts(sides: &[Arc<SilentMember>; 2]) -> [usize; 2] {
        [0, 1].map(|side: usize| sides[side].functions().count.load(Ordering::SeqCst))
    }

    #[test]
    fn a_leg_that_lacks_a_write_that_was_done_does_not_answer_before_it_has_it() {
        let sides = sides();
        let backend = mirror(&sides);
        let mut lane = backend.open_lane().unwrap();
        write(&mut *lane, 0, 200, 1).unwrap();
        // Ways to each of them, which are there when one of them misses something.
        let mut channels: Vec<_> = (0..4).map(|_| backend.open_reads().unwrap()).collect();
        channels.iter_mut().for_each(|channel| assert_says(&mut **channel, 7, 1));
        assert_eq!(counts(&sides), [2, 2], "each has its turn");
        sides[1].set_silent(true);
        write(&mut *lane, 7, 1, 2).unwrap();
        channels.iter_mut().for_each(|channel| assert_says(&mut **channel, 7, 2));
        sides[1].set_silent(false);
        // It takes new writes again, and lacks the old one.
        lane.poll(&mut Vec::new());
        let mut done = Vec::new();
        wait_until("its late answer comes", || {
            lane.poll(&mut done);
            backend.table.active().count() == 2
        });
        if !backend.table.is_whole(1) {
            channels.iter_mut().for_each(|channel| assert_says(&mut **channel, 7, 2));
            channels.extend((0..4).map(|_| backend.open_reads().unwrap()));
            channels.iter_mut().for_each(|channel| assert_says(&mut **channel, 190, 1));
        }
        assert_eq!(counts(&sides)[1], 2);
        wait_until("it has what it missed", || {
            lane.poll(&mut Vec::new());
            backend.health() == Health::Good
        });
        (0..2).for_each(|_| assert_says(&mut *backend.open_reads().unwrap(), 7, 2));
        assert_eq!(counts(&sides)[1], 3);
    }

    #[test]
    fn an_answer_does_not_count_if_its_leg_missed_a_write_meanwhile() {
        let sides = sides();
        let backend = mirror(&sides);
        let mut lane = backend.open_lane().unwrap();
        write(&mut *lane, 0, 200, 1).unwrap();
        let mut channel = backend.open_reads().unwrap();
        assert_says(&mut *channel, 7, 1);
        let asked = usize::from(counts(&sides)[1] == 1);
        sides[asked].functions().is_busy.store(true, Ordering::SeqCst);
        channel.submit(ask(7, LONG)).unwrap();
        assert_eq!((channel.poll(&mut Vec::new()), channel.poll(&mut Vec::new())), (0, 0), "it runs");
        sides[asked].set_silent(true);
        write(&mut *lane, 7, 1, 2).unwrap();
        sides[asked].set_silent(false);
        sides[asked].functions().is_busy.store(false, Ordering::SeqCst);
        assert_eq!(answer(&mut *channel), Ok(word(7, 2)));
        let mut asked_for = [2, 2];
        asked_for[1 - asked] = 1;
        assert_eq!(counts(&sides), asked_for);
    }

    #[test]
    fn nobody_waits_for_a_leg_that_is_silent_or_lost_while_another_holds_everything() {
        for is_lost in [false, true] {
            let sides = sides();
            let backend = mirror(&sides);
            let mut lane = backend.open_lane().unwrap();
            write(&mut *lane, 0, 200, 1).unwrap();
            let mut channel = backend.open_reads().unwrap();
            assert_says(&mut *channel, 7, 1);
            let asked = usize::from(counts(&sides)[1] == 1);
            let started = Instant::now();
            sides[asked].set_silent(!is_lost);
            sides[asked].functions().is_busy.store(true, Ordering::SeqCst);
            (0..5).for_each(|page| channel.submit(ask(page, LONG)).unwrap());
            channel.poll(&mut Vec::new());
            if is_lost {
                backend.table.mark_failed(asked);
            }
            let mut done = Vec::new();
            while channel.in_flight() > 0 {
                channel.wait(LONG);
                channel.poll(&mut done);
            }
            assert!(done.len() == 5 && done.iter().all(|end| end.result.is_ok()), "{done:?}");
            assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
            // Others do not wait for it at all.
            let started = Instant::now();
            (0..6).for_each(|_| assert_says(&mut *backend.open_reads().unwrap(), 9, 1));
            assert!(started.elapsed() < STALL_TIMEOUT);
            // Who is the only one is waited for, as long as there is time.
            backend.table.mark_failed(1 - asked);
            channel.submit(ask(3, Duration::from_millis(50))).unwrap();
            let nobody = answer(&mut *channel);
            match is_lost {
                true => assert!(matches!(nobody, Err(CallFailure::Pool(PoolError::ServerGone { .. }))), "{nobody:?}"),
                false => assert!(
                    matches!(nobody, Err(CallFailure::Pool(PoolError::TimedOut { .. } | PoolError::Refused { .. }))),
                    "{nobody:?}"
                ),
            }
        }
    }

    #[test]
    fn what_one_leg_does_not_run_another_does() {
        let sides = sides();
        let backend = mirror(&sides);
        let mut lane = backend.open_lane().unwrap();
        write(&mut *lane, 0, 200, 1).unwrap();
        let mut channels: Vec<_> = (0..4).map(|_| backend.open_reads().unwrap()).collect();
        sides[0].functions().lacks.store(true, Ordering::SeqCst);
        channels.iter_mut().for_each(|channel| assert_says(&mut **channel, 7, 1));
        sides[1].functions().lacks.store(true, Ordering::SeqCst);
        channels[0].submit(ask(7, LONG)).unwrap();
        let refusal = CallFailure::Server { code: ErrorCode::NoFunction, detail: 0 };
        assert_eq!(answer(&mut *channels[0]), Err(refusal));
    }

    #[test]
    fn why_nothing_runs_is_said() {
        let why = |backend: &dyn Backend| match backend.open_reads().err() {
            Some(PoolError::Refused { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(why(&*open("mirror(ram:,ram:)", PAGES)), calls::NOWHERE);
        let able = SilentMember::new(PAGES);
        let member = |backend| PoolMember { backend: Some(backend), leaves: 1, server: 0 };
        let members = vec![member(open("ram:", PAGES)), member(able)];
        let backend = MirrorBackend::new(members, vec![], PAGES, InitialContents::Zeros, None, false).unwrap();
        assert!(backend.open_reads().is_ok());
        backend.table.note_missed(1);
        assert_eq!(why(&backend), calls::NOT_NOW);
        backend.table.mark_failed(1);
        assert_eq!(why(&backend), calls::NOWHERE);
        backend.table.mark_failed(0);
        assert!(matches!(backend.open_reads().err(), Some(PoolError::ServerGone { .. })));
    }
}
