//! Calls of functions that write pages themselves, made at every member that holds everything. No
//! such call begins while a member that takes part lacks something: it would write at the others
//! only.
//!
//! For the words of the chunks such a call is a write: the write begins before the functions do.
//! When all have ended, some members may lack the pages: those at which a function did not succeed,
//! and those that missed something meanwhile. Members that have the pages give them to these.
//! Answers are compared: where they differ the pages count as not written, at any member.
//!
//! A member that is silent when the others have answered, and does not even say that it is there,
//! is lagging, as with any write. Its functions may still write there, so nothing is asked or
//! copied there before it has said that they are over. If it never does, it is given up as soon as
//! the others can do without it.
//!
//! Dangers that the tests guard against: a member that is read without having the pages; a function
//! that still writes where others have written since.

use super::replica_map::ReplicaMap;
use crate::contract::calls;
use crate::redundant::members::ANSWER_WITHIN;
use crate::redundant::scheme::RedundantMap;
use crate::redundant::write_epochs::WriteEpochGuard;
use crate::{Backend, CallChannel, CallEnd, CallFailure, FarCall, IncompleteWrite, PoolError, WriteReservation};
use core::sync::atomic::{AtomicU16, Ordering};
use core::time::Duration;
use farfield_core::wire::ErrorCode;
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;
use farfield_os::sync::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Time that a member may be silent after the others have answered before it is asked whether it is
/// there.
const STALL_TIMEOUT: Duration = Duration::from_millis(400);
/// Time that one member is waited for before the others are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Reason of the refusal when members that should hold the same pages answer differently.
const DIFFER: &str = "servers that should keep the same answer differently";

/// Functions that write the same pages at all members of a mirror.
pub(super) struct MirrorWriteReservation(Arc<BroadcastState>);

struct BroadcastState {
    table: Arc<ReplicaMap>,
    runs: Vec<(PageId, u64)>,
    /// Members that are asked, which held everything when it began, and the missed generation of
    /// each by then.
    members: MemberSet,
    missed_generations: [u32; MemberSet::MAX],
    /// Backend of each member at the beginning. Another may have taken its place by the end.
    backends: Vec<Option<Arc<dyn Backend>>>,
    /// Members at which something failed; at which something may still be under way when its call
    /// has ended; and for which a thread waits until nothing is.
    failed: Set,
    indeterminate: Set,
    lagging: Set,
    /// Change that is under way; `None` once it has ended.
    epoch_guard: Mutex<Option<WriteEpochGuard>>,
}

#[derive(Default)]
struct Set(AtomicU16);

impl Set {
    fn add(&self, members: MemberSet) {
        self.0.fetch_or(members.0, Ordering::SeqCst);
    }

    fn members(&self) -> MemberSet {
        MemberSet(self.0.load(Ordering::SeqCst))
    }
}

impl MirrorWriteReservation {
    pub(super) fn begin(table: &Arc<ReplicaMap>, runs: &[(PageId, u64)]) -> Result<MirrorWriteReservation, PoolError> {
        let change = table.write_epochs.begin();
        let missed_generations =
            core::array::from_fn(|member| if table.all().has(member) { table.missed_generation(member) } else { 0 });
        let asked: MemberSet = table.all().iter().filter(|member| table.is_whole(*member)).collect();
        // What such a call writes would lie at fewer members than take part, and if calls follow
        // each other closely, the member that is being repaired would lack something again after
        // each of them. Ordinary writes go to that member, too.
        if asked.is_empty() || asked != table.active() {
            return Err(PoolError::Refused { server: 0, reason: calls::NOT_NOW });
        }
        for (begun, (page, count)) in runs.iter().enumerate() {
            if !table.begin_write(page.0, *count, asked) {
                runs[..begun].iter().for_each(|(page, count)| {
                    table.end_write(page.0, *count, asked, MemberSet(0));
                });
                return Err(PoolError::Refused { server: 0, reason: calls::NOT_NOW });
            }
        }
        Ok(MirrorWriteReservation(Arc::new(BroadcastState {
            table: table.clone(),
            runs: runs.to_vec(),
            members: asked,
            missed_generations,
            backends: (0..table.all().count()).map(|member| table.backend(member)).collect(),
            failed: Set::default(),
            indeterminate: Set::default(),
            lagging: Set::default(),
            epoch_guard: Mutex::new(Some(change)),
        })))
    }
}

impl WriteReservation for MirrorWriteReservation {
    fn open(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        let table = &self.0.table;
        let (mut channels, mut why) = (Vec::new(), None);
        for member in self.0.members.iter() {
            match self.0.backends[member].as_ref().map(|backend| backend.open_calls()) {
                Some(Ok(calls)) => {
                    channels.push(MemberChannel { member, calls: Some(calls), unsent: VecDeque::new(), owes: 0 })
                }
                // The others would have to give it the pages after each call.
                Some(Err(error @ PoolError::Refused { reason: calls::NOWHERE, .. })) => {
                    self.0.failed.add(self.0.members);
                    return Err(error);
                }
                other => {
                    self.0.failed.add(MemberSet::one(member));
                    table.check_health();
                    why = other.and_then(Result::err).or(why);
                }
            }
        }
        if channels.is_empty() {
            return Err(why.unwrap_or(table.gone()));
        }
        let (shared, pending) = (self.0.clone(), BTreeMap::new());
        let (arrived, ended, timer) = (Vec::new(), VecDeque::new(), None);
        Ok(Box::new(BroadcastChannel { shared, channels, pending, next: 0, arrived, ended, stall_timer: timer }))
    }

    fn end(self: Box<MirrorWriteReservation>) -> Result<(), IncompleteWrite> {
        self.0.end()
    }
}

impl Drop for MirrorWriteReservation {
    fn drop(&mut self) {
        // A chunk that has a writer for ever is never copied.
        let _ = self.0.end();
    }
}

impl BroadcastState {
    /// Calls `act`, and returns `true`, if the member still has the backend that was asked. If not,
    /// that backend failed and another server has come, or may come, to its place. `act` must not
    /// look up backends.
    fn if_same_backend(&self, member: usize, act: impl FnOnce()) -> bool {
        let asked = self.backends[member].as_ref();
        asked.is_some_and(|asked| self.table.if_in_place(member, asked, act).is_some())
    }

    fn end(&self) -> Result<(), IncompleteWrite> {
        let Some(_change) = self.epoch_guard.lock().take() else { return Ok(()) };
        let table = &self.table;
        let is_true = |member: &usize| {
            table.missed_generation(*member) == self.missed_generations[*member] && table.is_whole(*member)
        };
        let have: MemberSet = self.members.difference(self.failed.members()).iter().filter(is_true).collect();
        let (unsure, late) = (self.indeterminate.members(), self.lagging.members());
        if !have.is_empty() {
            // A function that was not answered may still write, on top of newer bytes.
            for member in unsure.iter() {
                self.if_same_backend(member, || table.note_indeterminate(member));
            }
        }
        let mut is_kept = true;
        for (page, count) in &self.runs {
            is_kept &= table.end_write(page.0, *count, self.members, have);
        }
        let may_write = unsure.union(late).difference(table.failed());
        let is_over = !may_write.iter().any(|member| self.if_same_backend(member, || ()));
        table.expel_the_silent();
        if is_kept { Ok(()) } else { Err(IncompleteWrite { is_over }) }
    }
}

/// Channel to one member, and the calls that it has not answered.
struct MemberChannel {
    member: usize,
    /// Channel to the member; `None` if another thread waits for its answers.
    calls: Option<Box<dyn CallChannel>>,
    /// Calls that the channel had no room for.
    unsent: VecDeque<FarCall>,
    /// Number of calls that the member has not answered.
    owes: usize,
}

struct BroadcastCall {
    tag: u64,
    /// Results in the order of the ways.
    results: Vec<Option<Result<Vec<u8>, CallFailure>>>,
    steps: u32,
}

/// Channel to all members: a call has ended when it has ended at each of them.
struct BroadcastChannel {
    shared: Arc<BroadcastState>,
    channels: Vec<MemberChannel>,
    pending: BTreeMap<u64, BroadcastCall>,
    next: u64,
    arrived: Vec<CallEnd>,
    ended: VecDeque<CallEnd>,
    /// The only way that still owes answers: how many, since when, and for how long that may last.
    stall_timer: Option<StallTimer>,
}

#[derive(Clone, Copy)]
struct StallTimer {
    channel: usize,
    owes: usize,
    since: u64,
    timeout: Duration,
}

impl BroadcastChannel {
    fn work(&mut self) -> u64 {
        for index in 0..self.channels.len() {
            let channel = &mut self.channels[index];
            let Some(calls) = &mut channel.calls else { continue };
            while let Some(call) = channel.unsent.pop_front() {
                if let Err(call) = calls.submit(call) {
                    channel.unsent.push_front(call);
                    break;
                }
            }
            calls.poll(&mut self.arrived);
            let mut arrived = core::mem::take(&mut self.arrived);
            for CallEnd { tag, result, steps } in arrived.drain(..) {
                self.on_reply(index, tag, result, steps);
            }
            self.arrived = arrived;
        }
        let now = now_ns();
        self.look_for_the_silent(now);
        now
    }

    fn on_reply(&mut self, index: usize, id: u64, result: Result<Vec<u8>, CallFailure>, steps: u32) {
        let (member, table) = (MemberSet::one(self.channels[index].member), &self.shared.table);
        match result {
            Ok(_) => {}
            Err(CallFailure::Server { code, detail }) => {
                self.shared.failed.add(member);
                if code == ErrorCode::Corrupt && detail < table.pages {
                    member.iter().for_each(|member| _ = table.suspect(detail, 1, member));
                }
            }
            // It is unknown whether the function runs.
            Err(CallFailure::Pool(_)) => {
                self.shared.failed.add(member);
                self.shared.indeterminate.add(member);
                table.check_health();
            }
        }
        self.note(index, id, result, steps);
    }

    /// Notes the end of a call at one of the members.
    fn note(&mut self, index: usize, id: u64, result: Result<Vec<u8>, CallFailure>, steps: u32) {
        self.channels[index].owes -= 1;
        let Some(pending) = self.pending.get_mut(&id) else { return };
        pending.results[index] = Some(result);
        pending.steps = pending.steps.max(steps);
        if pending.results.iter().all(Option::is_some)
            && let Some(BroadcastCall { tag, results, steps }) = self.pending.remove(&id)
        {
            let result = self.settle(results.into_iter().flatten().collect());
            self.ended.push_back(CallEnd { tag, result, steps });
        }
    }

    /// Combines the answers of all members into one.
    fn settle(&self, results: Vec<Result<Vec<u8>, CallFailure>>) -> Result<Vec<u8>, CallFailure> {
        // The pool is as large as its smallest member, and runs only functions that all members
        // run. Else one member would lack these pages after each call, until it is given them.
        let is_for_all = |failure: &&CallFailure| {
            use ErrorCode::{NoFunction, OtherVersion, PoolFull, Unsupported};
            let CallFailure::Server { code, .. } = failure else { return false };
            matches!(code, PoolFull | NoFunction | OtherVersion | Unsupported)
        };
        let for_all = results.iter().filter_map(|result| result.as_ref().err()).find(is_for_all).copied();
        let mut answers = results.iter().flatten();
        let first = answers.next();
        let differs = answers.any(|answer| Some(answer) != first);
        if for_all.is_some() || differs {
            self.shared.failed.add(self.shared.members);
            let refused = PoolError::Refused { server: 0, reason: DIFFER };
            return Err(for_all.unwrap_or(CallFailure::Pool(refused)));
        }
        match first {
            Some(answer) => Ok(answer.clone()),
            None => results.into_iter().next().unwrap_or(Err(CallFailure::Pool(self.shared.table.gone()))),
        }
    }

    /// Gives up waiting for a member that is the last to answer and says nothing at all: it is
    /// lagging.
    fn look_for_the_silent(&mut self, now: u64) {
        let mut owing = (0..self.channels.len()).filter(|channel| self.channels[*channel].owes > 0);
        let (Some(channel), None) = (owing.next(), owing.next()) else {
            self.stall_timer = None;
            return;
        };
        let (member, owes) = (self.channels[channel].member, self.channels[channel].owes);
        let others = self.shared.members.difference(MemberSet::one(member)).difference(self.shared.failed.members());
        let timeout = self.shared.table.write_timeout().map_or(STALL_TIMEOUT, |timeout| timeout.max(STALL_TIMEOUT));
        let fresh = StallTimer { channel, owes, since: now, timeout };
        let timer = self.stall_timer.filter(|timer| timer.channel == channel && timer.owes == owes).unwrap_or(fresh);
        self.stall_timer = Some(timer);
        let is_long = now.saturating_sub(timer.since) >= timer.timeout.as_nanos() as u64;
        // A caller that wants all members to have it does not go on with fewer.
        let waits_for_all = self.shared.table.write_timeout().is_none();
        if others.is_empty() || !is_long || waits_for_all {
            return;
        }
        if !self.shared.table.answering(MemberSet::one(member)).is_empty() {
            self.stall_timer = Some(StallTimer { since: now_ns(), timeout: 2 * timer.timeout, ..timer });
            return;
        }
        let error = PoolError::TimedOut { server: self.shared.table.server(member), after: timer.timeout };
        self.give_up(channel);
        for id in self.pending.keys().copied().collect::<Vec<_>>() {
            if self.pending.get(&id).is_some_and(|pending| pending.results[channel].is_none()) {
                self.note(channel, id, Err(CallFailure::Pool(error)), 0);
            }
        }
    }

    /// Goes on without this channel's member until it has answered. A thread waits for its answers.
    #[expect(clippy::disallowed_methods, reason = "functions are called by heaps, never inside a program")]
    fn give_up(&mut self, channel: usize) {
        let MemberChannel { member, calls, unsent, .. } = &mut self.channels[channel];
        let (member, shared) = (*member, self.shared.clone());
        let Some(calls) = calls.take() else { return };
        unsent.clear();
        self.shared.failed.add(MemberSet::one(member));
        self.shared.lagging.add(MemberSet::one(member));
        let table = shared.table.clone();
        table.mark_lagging(member, now_ns().saturating_add(ANSWER_WITHIN.as_nanos() as u64));
        let wait = move || wait_for_late(&shared, member, calls);
        if std::thread::Builder::new().name("far-late".into()).spawn(wait).is_err() {
            table.stay_lagging(member);
        }
    }
}

/// Waits until all calls at a lagging member have ended. Each of them has a deadline.
fn wait_for_late(shared: &BroadcastState, member: usize, mut calls: Box<dyn CallChannel>) {
    let mut ends = Vec::new();
    while calls.in_flight() > 0 {
        calls.wait(STALL_TIMEOUT);
        calls.poll(&mut ends);
    }
    let failures = ends.into_iter().filter_map(|end| match end.result {
        Err(CallFailure::Pool(error)) => Some(error),
        _ => None,
    });
    let failure = failures.reduce(|one, other| if matches!(one, PoolError::ServerGone { .. }) { one } else { other });
    shared.if_same_backend(member, || match failure {
        Some(error @ PoolError::ServerGone { .. }) => {
            shared.table.give_up(member, error);
            shared.table.on_late_reply(member);
        }
        // The function may still write, at any time.
        Some(_) => shared.table.stay_lagging(member),
        None => shared.table.on_late_reply(member),
    });
    shared.table.expel_the_silent();
}

impl CallChannel for BroadcastChannel {
    fn submit(&mut self, call: FarCall) -> Result<(), FarCall> {
        if self.in_flight() >= calls::CALLS_MAX {
            return Err(call);
        }
        // A member that was given up is not asked, and lacks the pages already.
        let gone = || Err(CallFailure::Pool(self.shared.table.gone()));
        let results = self.channels.iter().map(|channel| channel.calls.is_none().then(gone)).collect();
        self.pending.insert(self.next, BroadcastCall { tag: call.tag, results, steps: 0 });
        for channel in self.channels.iter_mut().filter(|channel| channel.calls.is_some()) {
            channel.unsent.push_back(FarCall { tag: self.next, ..call.clone() });
            channel.owes += 1;
        }
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
            let mut owing: Vec<_> = self.channels.iter_mut().filter(|channel| channel.owes > 0).collect();
            let most = Duration::from_nanos(limit - now);
            let most = if owing.len() > 1 { most.min(LOOK_EVERY) } else { most.min(STALL_TIMEOUT) };
            match owing.first_mut().and_then(|channel| channel.calls.as_mut()) {
                Some(calls) => calls.wait(most),
                None => farfield_os::process::sleep(LOOK_EVERY),
            }
        }
    }
}

impl Drop for BroadcastChannel {
    fn drop(&mut self) {
        let owing: MemberSet =
            self.channels.iter().filter(|channel| channel.owes > 0).map(|channel| channel.member).collect();
        self.shared.failed.add(owing);
        self.shared.indeterminate.add(owing);
    }
}

#[cfg(test)]
mod tests {
    use super::super::MirrorBackend;
    use super::super::replica_map::InitialContents;
    use super::*;
    use crate::redundant::members::PoolMember;
    use crate::trial::{LONG, SilentMember, assert_version, wait_until, write};
    use crate::{Health, Lane};
    use std::time::Instant;

    const PAGES: u64 = 256;
    /// The pages that functions write: they lie in three chunks.
    const RUNS: [(PageId, u64); 2] = [(PageId(60), 10), (PageId(200), 3)];

    type Said = Vec<Result<Vec<u8>, CallFailure>>;

    struct World {
        sides: [Arc<SilentMember>; 2],
        backend: MirrorBackend,
        lane: Box<dyn Lane>,
    }

    impl World {
        /// All pages are of version 1.
        fn new() -> World {
            let sides = [SilentMember::new(PAGES), SilentMember::new(PAGES)];
            let members =
                sides.iter().map(|side| PoolMember { backend: Some(side.clone()), leaves: 1, server: 0 }).collect();
            let backend = MirrorBackend::new(members, vec![], PAGES, InitialContents::Zeros, None, false).unwrap();
            let mut lane = backend.open_lane().unwrap();
            write(&mut *lane, 0, PAGES as usize, 1).unwrap();
            World { sides, backend, lane }
        }

        fn pages() -> impl Iterator<Item = u64> {
            RUNS.into_iter().flat_map(|(first, count)| first.0..first.0 + count)
        }

        /// Has functions write the pages, through two channels; what these say, and what the end is.
        fn write(&self, version: u64) -> (Said, Result<(), IncompleteWrite>) {
            let writes = self.backend.begin_writes(&RUNS).unwrap();
            let mut channels = [writes.open().unwrap(), writes.open().unwrap()];
            for (page, side) in World::pages().zip([0, 1].into_iter().cycle()) {
                let argument = [page.to_le_bytes(), version.to_le_bytes()].concat();
                let call = FarCall { tag: page, deadline: LONG, steps_max: 0, name: "fill", version: 1, argument };
                channels[side].submit(call).unwrap();
            }
            let mut done = Vec::new();
            for channel in &mut channels {
                while channel.in_flight() > 0 {
                    channel.wait(LONG);
                    channel.poll(&mut done);
                }
            }
            drop(channels);
            let said = done.into_iter().map(|end| end.result).collect();
            (said, writes.end())
        }

        /// What was written is read, now and when members have what they lack, and then it is what
        /// each of them holds.
        fn check(mut self, version: u64) {
            for page in World::pages() {
                assert_version(&mut *self.lane, page, 1, version);
            }
            wait_until("both hold everything", || {
                self.lane.poll(&mut Vec::new());
                self.backend.health() == Health::Good
            });
            for side in &self.sides {
                let mut own = side.memory().open_lane().unwrap();
                for page in 0..PAGES {
                    let version = if World::pages().any(|written| written == page) { version } else { 1 };
                    assert_version(&mut *own, page, 1, version);
                }
            }
        }
    }

    #[test]
    fn what_functions_write_is_at_all_legs() {
        let world = World::new();
        let (said, ended) = world.write(2);
        assert!(said.iter().all(Result::is_ok) && ended == Ok(()));
        assert_eq!(world.backend.health(), Health::Good);
        world.check(2);
    }

    #[test]
    fn a_leg_at_which_a_function_failed_lacks_the_pages_until_it_is_given_them() {
        for side in 0..2 {
            let world = World::new();
            world.sides[side].functions().panic.store(true, Ordering::SeqCst);
            let (said, ended) = world.write(2);
            assert!(said.iter().all(Result::is_ok) && ended == Ok(()));
            assert!(!world.backend.table.is_whole(side) && world.backend.table.is_whole(1 - side));
            world.check(2);
        }
    }

    #[test]
    fn nothing_is_written_by_functions_while_a_leg_lacks_something() {
        let mut world = World::new();
        world.sides[1].functions().panic.store(true, Ordering::SeqCst);
        assert_eq!(world.write(2).1, Ok(()));
        world.sides[1].functions().panic.store(false, Ordering::SeqCst);
        let not_now = PoolError::Refused { server: 0, reason: calls::NOT_NOW };
        assert!(matches!(world.backend.begin_writes(&RUNS), Err(error) if error == not_now));
        wait_until("both hold everything", || {
            world.lane.poll(&mut Vec::new());
            world.backend.health() == Health::Good
        });
        assert_eq!(world.write(3).1, Ok(()));
        assert_eq!(world.backend.health(), Health::Good);
        world.check(3);
    }

    #[test]
    fn nothing_is_written_by_functions_at_fewer_members_than_writes_wait_for() {
        let world = World::new();
        let table = &world.backend.table;
        world.backend.set_write_timeout(None);
        table.mark_lagging(1, u64::MAX);
        let not_now = PoolError::Refused { server: 0, reason: calls::NOT_NOW };
        assert!(matches!(world.backend.begin_writes(&RUNS), Err(error) if error == not_now));
        table.on_late_reply(1);
        assert_eq!(world.write(2).1, Ok(()));
        world.check(2);
    }

    #[test]
    fn a_leg_that_is_silent_meanwhile_keeps_nobody_waiting_and_is_not_read_before_it_is_over() {
        for side in 0..2 {
            let world = World::new();
            world.sides[side].set_silent(true);
            let started = Instant::now();
            // Channels are there already.
            world.sides[side].set_silent(false);
            let writes = world.backend.begin_writes(&RUNS).unwrap();
            let mut channel = writes.open().unwrap();
            world.sides[side].set_silent(true);
            for page in World::pages() {
                let argument = [page.to_le_bytes(), 2u64.to_le_bytes()].concat();
                let call = FarCall { tag: page, deadline: LONG, steps_max: 0, name: "fill", version: 1, argument };
                channel.submit(call).unwrap();
            }
            let mut done = Vec::new();
            while channel.in_flight() > 0 {
                channel.wait(LONG);
                channel.poll(&mut done);
            }
            assert!(done.iter().all(|end| end.result.is_ok()), "{done:?}");
            drop(channel);
            assert_eq!(writes.end(), Ok(()));
            assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
            assert!(world.backend.table.is_lagging(side) && world.backend.table.repairable().is_empty());
            world.sides[side].set_silent(false);
            world.check(2);
        }
    }

    #[test]
    fn a_leg_that_missed_something_meanwhile_has_not_written_rightly() {
        let mut world = World::new();
        let writes = world.backend.begin_writes(&RUNS).unwrap();
        let mut channel = writes.open().unwrap();
        let argument = [60u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
        channel.submit(FarCall { tag: 0, deadline: LONG, steps_max: 0, name: "fill", version: 1, argument }).unwrap();
        let mut done = Vec::new();
        while channel.in_flight() > 0 {
            channel.wait(LONG);
            channel.poll(&mut done);
        }
        world.sides[1].set_silent(true);
        // In another chunk.
        write(&mut *world.lane, 130, 1, 2).unwrap();
        world.sides[1].set_silent(false);
        drop(channel);
        assert_eq!(writes.end(), Ok(()));
        assert_eq!(world.backend.table.valid(60, 1, world.backend.table.all()), MemberSet::one(0));
        assert_version(&mut *world.lane, 60, 1, 2);
    }

    #[test]
    fn what_was_not_written_is_said_and_so_is_whether_it_may_be_written_later() {
        // They answer differently.
        let world = World::new();
        world.sides[1].functions().lies.store(true, Ordering::SeqCst);
        let (said, ended) = world.write(2);
        let differ = CallFailure::Pool(PoolError::Refused { server: 0, reason: DIFFER });
        assert!(said.iter().all(|said| *said == Err(differ)), "{said:?}");
        assert_eq!(ended, Err(IncompleteWrite { is_over: true }));
        // One does not have it; it fails at both.
        let world = World::new();
        world.sides[1].functions().lacks.store(true, Ordering::SeqCst);
        assert_eq!(world.write(2).1, Err(IncompleteWrite { is_over: true }));
        assert_eq!(world.backend.health(), Health::Good);
        world.sides[1].functions().lacks.store(false, Ordering::SeqCst);
        world.sides.iter().for_each(|side| side.functions().panic.store(true, Ordering::SeqCst));
        assert_eq!(world.write(2).1, Err(IncompleteWrite { is_over: true }));
        world.sides.iter().for_each(|side| side.functions().panic.store(false, Ordering::SeqCst));
        assert_eq!(world.write(3).1, Ok(()));
        world.check(3);
        // Nobody waited for the end of it: at one member, or at both.
        for busy in [&[1][..], &[0, 1]] {
            let world = World::new();
            let writes = world.backend.begin_writes(&RUNS).unwrap();
            let mut channel = writes.open().unwrap();
            busy.iter().for_each(|side: &usize| world.sides[*side].functions().is_busy.store(true, Ordering::SeqCst));
            let argument = [60u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
            let call = FarCall { tag: 0, deadline: LONG, steps_max: 0, name: "fill", version: 1, argument };
            channel.submit(call).unwrap();
            channel.poll(&mut Vec::new());
            channel.poll(&mut Vec::new());
            drop(channel);
            match busy.len() {
                1 => {
                    assert_eq!(writes.end(), Ok(()));
                    assert!(world.backend.table.failed().has(1), "it may still write");
                }
                _ => assert_eq!(writes.end(), Err(IncompleteWrite { is_over: false })),
            }
        }
        // And of whoever panics nothing is left but what was there.
        let world = World::new();
        drop(world.backend.begin_writes(&RUNS).unwrap());
        assert!(world.backend.table.watch(0) && world.backend.table.watch(60 / 64));
    }
}
