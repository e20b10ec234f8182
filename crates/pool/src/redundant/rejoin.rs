//! Servers that come back: the server behind the URL of a failed member becomes one more spare,
//! unless it is in use as another member.
//!
//! It is opened as any spare is, as a new and empty region. The repair thread does that, or the
//! caller of [`Backend::rejoin`]; lanes never open anything. So it does not matter whether the
//! server was restarted or was unreachable for a while: its old contents are not used.
//!
//! A spare that comes this way takes a *spare slot* behind the members and spares of the URL. It is
//! another member than the one that failed, and nothing that is noted of that one counts for it.
//! Open lanes get their lane to it through a [`LaneMailbox`], a mailbox. A lane that has not
//! received it yet leaves the member out, as it does a lagging member.
//!
//! A slot whose server failed in turn is *released* when no other is free. Then no lane may be
//! connected to that server any more, and nothing may be noted of its contents. A lane gives up its
//! connections to failed members when nothing of it is in flight. It does nothing with a member to
//! which it has no connection. So nothing that was begun with one server ends with the next. Who has
//! no lane to a server and hears that it is gone says so of that server, not of its slot
//! ([`Rejoin::if_in_place`]).

use crate::Backend;
use crate::redundant::members::{MemberLane, PoolMember};
use core::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use core::time::Duration;
use farfield_core::{Incarnation, MemberSet};
use farfield_os::process::now_ns;
use farfield_os::sync::{Mutex, MutexGuard};
use std::sync::{Arc, Weak};

/// Shortest and longest pause between two tries.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Time that a server may take to answer a try.
pub(crate) const TRY_WITHIN: Duration = Duration::from_millis(300);
/// Pause between two checks whether unused members are alive.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Way to open the servers behind the URLs of failed members again.
pub(crate) struct Reopen {
    /// Members that are single servers; others do not come back.
    pub(crate) servers: MemberSet,
    /// Opens the server behind the URL of that member, with an empty region.
    pub(crate) open: Open,
}

type Open = Box<dyn Fn(usize) -> Option<Arc<dyn Backend>> + Send + Sync>;

/// Spares of a URL, and the way for more of them to come.
#[derive(Default)]
pub(crate) struct SpareMembers {
    pub(crate) members: Vec<PoolMember>,
    pub(crate) reopen: Option<Reopen>,
}

impl From<Vec<PoolMember>> for SpareMembers {
    fn from(members: Vec<PoolMember>) -> SpareMembers {
        SpareMembers { members, reopen: None }
    }
}

/// State of the servers that come back (see the module documentation).
pub(crate) struct Rejoin {
    pub(crate) reopen: Reopen,
    /// Spare slots for members that came back.
    pub(crate) spare_slots: MemberSet,
    backends: [Mutex<Option<Arc<dyn Backend>>>; MemberSet::MAX],
    backoff: Mutex<RejoinBackoff>,
    mailboxes: Mutex<Vec<Weak<LaneMailbox>>>,
}

struct RejoinBackoff {
    /// Members that were unreachable at the last try.
    unreachable: MemberSet,
    pause: Duration,
    at: u64,
    looks_at: u64,
}

impl Rejoin {
    pub(crate) fn new(reopen: Reopen, spare_slots: MemberSet) -> Rejoin {
        Rejoin {
            reopen,
            spare_slots,
            backends: Default::default(),
            backoff: Mutex::new(RejoinBackoff { unreachable: MemberSet(0), pause: PAUSE_MIN, at: 0, looks_at: 0 }),
            mailboxes: Mutex::default(),
        }
    }

    /// Returns the backend that came to this place.
    pub(crate) fn backend(&self, place: usize) -> Option<Arc<dyn Backend>> {
        self.backends[place].lock().clone()
    }

    pub(crate) fn free_slot(&self) -> Option<usize> {
        self.spare_slots.iter().find(|place| self.backend(*place).is_none())
    }

    /// Calls `act` if the backend at this place is still this one, and returns its result. The place
    /// is not released meanwhile.
    pub(crate) fn if_in_place<T>(
        &self,
        place: usize,
        backend: &Arc<dyn Backend>,
        act: impl FnOnce() -> T,
    ) -> Option<T> {
        let known = self.backends[place].lock();
        known.as_ref().is_some_and(|known| Arc::ptr_eq(known, backend)).then(act)
    }

    /// Checks whether no lane is connected to the backend at this place any more.
    pub(crate) fn is_left(&self, place: usize) -> bool {
        is_left_by(&self.mailboxes.lock(), place)
    }

    /// Frees a slot whose backend failed, when nothing is noted of its contents any more, unless a
    /// lane that was opened since may be connected to that backend. `clear` clears the state of the
    /// member: nothing that is said of the old backend is noted any more, and nothing yet of the next.
    pub(crate) fn release_slot(&self, place: usize, clear: impl FnOnce()) {
        let _left = {
            // Lanes whose mailboxes come later do not find the old backend.
            let mailboxes = self.mailboxes.lock();
            let mut backend = self.backends[place].lock();
            if !is_left_by(&mailboxes, place) {
                return;
            }
            clear();
            backend.take()
        };
    }

    /// Abandons the backends in the child of a `fork`. Only tries the locks: there, a lock that was
    /// held is never released.
    pub(crate) fn abandon(&self) {
        let backends = self.backends.iter().filter_map(|backend| backend.try_lock());
        backends.for_each(|backend| backend.iter().for_each(|backend| backend.abandon()));
    }

    /// Drops the connections that lanes have given up.
    pub(crate) fn clear_mailboxes(&self) {
        self.mailboxes.lock().iter().filter_map(Weak::upgrade).for_each(|mailbox| mailbox.clear());
    }

    /// Checks whether it is time to look which members are alive; if so, sets the next time.
    pub(crate) fn is_time_to_look(&self) -> bool {
        let (mut tries, now) = (self.backoff.lock(), now_ns());
        let is_time = now >= tries.looks_at;
        if is_time {
            tries.looks_at = now + LOOK_EVERY.as_nanos() as u64;
        }
        is_time
    }

    /// Checks whether it is time to try whether a server that is `unreachable` is back.
    pub(crate) fn is_time_to_try(&self, away: MemberSet) -> bool {
        if away.is_empty() {
            return false;
        }
        let mut tries = self.backoff.lock();
        if away != tries.unreachable {
            (tries.unreachable, tries.pause, tries.at) = (away, PAUSE_MIN, 0);
        }
        now_ns() >= tries.at
    }

    /// Tries to open the server of `origin` again. Returns the place to which it has come, if it is
    /// none of those that are `used` and has at least `pages` pages. Doubles the pause before the
    /// next try.
    pub(crate) fn attempt(&self, origin: usize, used: &[Incarnation], pages: u64) -> Option<usize> {
        let place = self.free_slot();
        let opened = place.and_then(|_| (self.reopen.open)(origin));
        {
            let mut tries = self.backoff.lock();
            tries.at = now_ns() + tries.pause.as_nanos() as u64;
            tries.pause = (tries.pause * 2).min(PAUSE_MAX);
        }
        let (place, backend) = place.zip(opened)?;
        let is_another = backend.incarnation().is_some_and(|incarnation| !used.contains(&incarnation));
        if !is_another || backend.pages() < pages {
            backend.release();
            return None;
        }
        *self.backends[place].lock() = Some(backend);
        Some(place)
    }

    /// Makes a mailbox for a lane that is about to be opened. Must be called before the lane looks
    /// which members are present.
    pub(crate) fn new_mailbox(&self) -> Arc<LaneMailbox> {
        let mailbox = Arc::new(LaneMailbox::new());
        let mut mailboxes = self.mailboxes.lock();
        mailboxes.retain(|mailbox| mailbox.strong_count() > 0);
        mailboxes.push(Arc::downgrade(&mailbox));
        mailbox
    }

    /// Gives every open lane a connection to `place`, with room for `requests` waiting requests.
    /// Returns `false` if one of them could not be opened.
    pub(crate) fn open_member_lanes(&self, place: usize, requests: usize) -> bool {
        let Some(backend) = self.backend(place) else { return false };
        let mailboxes: Vec<_> = self.mailboxes.lock().iter().filter_map(Weak::upgrade).collect();
        for mailbox in mailboxes {
            match backend.open_lane() {
                Ok(lane) => mailbox.put(place, MemberLane::new(lane, requests)),
                // A lane without a connection to this member would fail when no other member is
                // left.
                Err(_) => return false,
            }
        }
        true
    }
}

/// Checks whether none of these lanes is connected to the backend at this place.
fn is_left_by(mailboxes: &[Weak<LaneMailbox>], place: usize) -> bool {
    mailboxes.iter().filter_map(Weak::upgrade).all(|mailbox| !mailbox.is_connected(place))
}

/// Mailbox through which a lane gets connections to members that joined after it was opened, and
/// leaves those that it no longer needs. The lane only ever tries the lock: if it is held, the lane
/// looks again at its next poll.
pub(crate) struct LaneMailbox {
    is_full: AtomicBool,
    /// Members to which the lane has a connection, or finds one here; all of them until that is
    /// known.
    connected: AtomicU16,
    contents: Mutex<MailboxContents>,
}

/// Contents of a mailbox: connections that came, and those that were left.
struct MailboxContents {
    come: Vec<(usize, MemberLane)>,
    left: Vec<MemberLane>,
}

impl LaneMailbox {
    fn new() -> LaneMailbox {
        let contents =
            MailboxContents { come: Vec::with_capacity(MemberSet::MAX), left: Vec::with_capacity(2 * MemberSet::MAX) };
        LaneMailbox {
            is_full: AtomicBool::new(false),
            connected: AtomicU16::new(u16::MAX),
            contents: Mutex::new(contents),
        }
    }

    fn is_connected(&self, member: usize) -> bool {
        MemberSet(self.connected.load(Ordering::SeqCst)).has(member)
    }

    /// Notes that the lane begins with connections to these members.
    pub(crate) fn begin(&self, ways: MemberSet) {
        let contents = self.enter();
        let come: MemberSet = contents.come.iter().map(|(member, _)| *member).collect();
        self.connected.store(ways.union(come).0, Ordering::SeqCst);
    }

    fn put(&self, member: usize, lane: MemberLane) {
        let mut contents = self.enter();
        contents.come.push((member, lane));
        self.connected.fetch_or(MemberSet::one(member).0, Ordering::SeqCst);
        self.is_full.store(true, Ordering::SeqCst);
    }

    fn clear(&self) {
        // The capacity is kept.
        self.enter().left.clear();
    }

    /// Locks the mailbox; waits for a lane that holds the lock.
    fn enter(&self) -> MutexGuard<'_, MailboxContents> {
        self.contents.lock()
    }

    /// Checks whether there is something to take. If so, the lane does not know all members yet.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::SeqCst)
    }

    /// Moves the connections that came to `lanes`. Neither allocates nor frees: if a lane has one
    /// to a member already, the new one stays here.
    pub(crate) fn take(&self, lanes: &mut [Option<MemberLane>]) {
        if !self.is_full() {
            return;
        }
        let Some(mut contents) = self.contents.try_lock() else { return };
        let mut at = 0;
        while at < contents.come.len() {
            if lanes[contents.come[at].0].is_some() {
                at += 1;
                continue;
            }
            let (member, lane) = contents.come.swap_remove(at);
            lanes[member] = Some(lane);
        }
        self.is_full.store(false, Ordering::SeqCst);
    }

    /// Takes back connections that the lane, of which nothing is in flight, no longer needs.
    /// Neither allocates nor frees memory.
    pub(crate) fn leave(&self, members: MemberSet, lanes: &mut [Option<MemberLane>]) {
        let Some(mut contents) = self.contents.try_lock() else { return };
        let MailboxContents { come, left } = &mut *contents;
        for member in members.iter() {
            // There may be two: the lane's own, and another that came while it had one.
            if left.capacity() - left.len() < 2 || lanes[member].as_ref().is_some_and(|lane| !lane.is_idle()) {
                continue;
            }
            left.extend(lanes[member].take());
            left.extend(come.iter().position(|known| known.0 == member).map(|at| come.swap_remove(at).1));
            self.connected.fetch_and(!MemberSet::one(member).0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Dangers: what a server held when it was lost is taken for what it should hold; one server is
    //! two members; a server that is back is believed to hold what it does not, by whoever was
    //! there before it; a place is given twice.
    use super::*;
    use crate::leaf::ram::RamBackend;
    use crate::redundant::ec::EcBackend;
    use crate::redundant::members::Membership;
    use crate::redundant::mirror::{InitialContents, MirrorBackend};
    use crate::trial::{Over, PAGES, assert_version, filled, random_history, wait_until, write};
    use crate::{CloneTicket, Completion, Health, Lane, LaneRequest, Op, PoolError, Priority};
    use core::cell::Cell;
    use core::sync::atomic::{AtomicU64, AtomicUsize};
    use farfield_core::PageId;
    use farfield_core::gf256::ErasureCode;
    use std::thread::{self, ThreadId};

    const GONE: PoolError = PoolError::ServerGone { server: 0, incarnation: Incarnation(0) };

    /// A server from its start to its end.
    struct Life {
        ram: RamBackend,
        incarnation: u64,
        is_over: Arc<AtomicBool>,
        /// Its answers do not arrive, at lanes of the thread that began its life.
        is_held: Arc<AtomicBool>,
        began_in: ThreadId,
        /// Happens before it answers once how it is, and before a lane to it is opened.
        before_answer: Arc<Mutex<Option<Event>>>,
        before_open: Arc<Mutex<Option<Event>>>,
    }

    type Event = Box<dyn FnOnce() + Send>;

    struct LifeLane {
        inner: Box<dyn Lane>,
        is_over: Arc<AtomicBool>,
        is_held: Option<Arc<AtomicBool>>,
        unheard: Vec<LaneRequest>,
    }

    impl Life {
        /// As a server opens one: empty.
        fn another_region(&self, pages: u64) -> Arc<dyn Backend> {
            let ram = RamBackend::new(0, pages);
            Arc::new(Life {
                ram,
                incarnation: self.incarnation,
                is_over: self.is_over.clone(),
                is_held: self.is_held.clone(),
                began_in: self.began_in,
                before_answer: self.before_answer.clone(),
                before_open: self.before_open.clone(),
            })
        }

        fn is_over(&self) -> bool {
            self.is_over.load(Ordering::SeqCst)
        }
    }

    impl Backend for Life {
        fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
            let event = self.before_open.lock().take();
            event.into_iter().for_each(|happen| happen());
            if self.is_over() {
                return Err(GONE);
            }
            let is_held = (thread::current().id() == self.began_in).then(|| self.is_held.clone());
            let (inner, is_over) = (self.ram.open_lane()?, self.is_over.clone());
            Ok(Box::new(LifeLane { inner, is_over, is_held, unheard: vec![] }))
        }
        fn clone_region(&self) -> Result<CloneTicket, PoolError> {
            self.ram.clone_region()
        }
        fn pages(&self) -> u64 {
            self.ram.pages()
        }
        fn health(&self) -> Health {
            let event = self.before_answer.lock().take();
            event.into_iter().for_each(|happen| happen());
            if self.is_over() { Health::Gone } else { Health::Good }
        }
        fn incarnation(&self) -> Option<Incarnation> {
            Some(Incarnation(self.incarnation))
        }
        fn abandon(&self) {}
    }

    impl Lane for LifeLane {
        fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
            if self.is_over.load(Ordering::SeqCst) {
                self.unheard.push(request);
                return Ok(());
            }
            self.inner.submit(request)
        }
        fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
            let before = done.len();
            let is_held = self.is_held.as_ref().is_some_and(|held| held.load(Ordering::SeqCst));
            if is_held && !self.is_over.load(Ordering::SeqCst) {
                return 0;
            }
            self.inner.poll(done);
            if self.is_over.load(Ordering::SeqCst) {
                done[before..].iter_mut().for_each(|completion| completion.result = Err(GONE));
                while done.len() < done.capacity()
                    && let Some(LaneRequest { tag, op, .. }) = self.unheard.pop()
                {
                    let buffer = match op {
                        Op::Read { buffer, .. } | Op::ReadPart { buffer, .. } | Op::Write { buffer, .. } => {
                            Some(buffer)
                        }
                        Op::Discard { .. } => None,
                    };
                    done.push(Completion { tag, result: Err(GONE), buffer });
                }
            }
            done.len() - before
        }
        fn in_flight(&self) -> usize {
            self.inner.in_flight() + self.unheard.len()
        }
        fn wait(&mut self, _timeout: Duration) {}
    }

    /// What is behind the URLs: the lives of each server, one after the other.
    struct World {
        lives: Mutex<Vec<Arc<Life>>>,
        next: AtomicU64,
        tries: AtomicUsize,
        pages: u64,
    }

    impl World {
        fn new(servers: usize, pages: u64) -> Arc<World> {
            let world = World { lives: Mutex::default(), next: AtomicU64::new(1), tries: AtomicUsize::new(0), pages };
            (0..servers).for_each(|server| world.begin(server));
            Arc::new(world)
        }

        /// A new life of the server.
        fn begin(&self, server: usize) {
            let incarnation = self.next.fetch_add(1, Ordering::SeqCst);
            let ram = RamBackend::new(server as u16, self.pages);
            let (is_over, is_held, began_in) = (Arc::default(), Arc::default(), thread::current().id());
            let (before_answer, before_open) = Default::default();
            let life = Arc::new(Life { ram, incarnation, is_over, is_held, began_in, before_answer, before_open });
            let mut lives = self.lives.lock();
            if server < lives.len() { lives[server] = life } else { lives.push(life) }
        }

        fn life(&self, server: usize) -> Arc<Life> {
            self.lives.lock()[server].clone()
        }

        fn end(&self, server: usize) {
            self.life(server).is_over.store(true, Ordering::SeqCst);
        }

        /// What is said to come from the server `from`, whichever was lost.
        fn spares(self: &Arc<World>, from: impl Fn(usize) -> usize + Send + Sync + 'static) -> SpareMembers {
            let world = self.clone();
            let open = move |member| {
                world.tries.fetch_add(1, Ordering::SeqCst);
                let life = world.life(from(member));
                (!life.is_over()).then(|| life.another_region(world.pages))
            };
            let servers = MemberSet::first(self.lives.lock().len());
            SpareMembers { members: vec![], reopen: Some(Reopen { servers, open: Box::new(open) }) }
        }

        fn members(&self) -> Vec<PoolMember> {
            let member = |(server, life): (usize, &Arc<Life>)| PoolMember {
                backend: Some(life.clone()),
                leaves: 1,
                server: server as u16,
            };
            self.lives.lock().iter().enumerate().map(member).collect()
        }
    }

    /// A pool that outlives one of its servers, with a thread that repairs or without.
    fn pool(
        code: Option<ErasureCode>,
        from: impl Fn(usize) -> usize + Send + Sync + 'static,
        repairs: bool,
    ) -> (Arc<World>, Box<dyn Backend>) {
        let Some(code) = code else {
            let world = World::new(2, PAGES);
            let backend =
                MirrorBackend::new(world.members(), world.spares(from), PAGES, InitialContents::Zeros, None, repairs);
            return (world, Box::new(backend.unwrap()));
        };
        let world = World::new(code.parts(), EcBackend::pages_of_member(PAGES));
        let backend = EcBackend::new(code, world.members(), world.spares(from), PAGES, None, repairs);
        (world, Box::new(backend.unwrap()))
    }

    fn poll_until(what: &str, backend: &dyn Backend, lanes: &mut [Box<dyn Lane>], mut is_so: impl FnMut() -> bool) {
        wait_until(what, || {
            if backend.is_rejoin_due() {
                backend.rejoin();
            }
            lanes.iter_mut().for_each(|lane| {
                lane.poll(&mut Vec::new());
            });
            is_so()
        });
    }

    #[test]
    fn servers_that_come_back_are_filled_and_may_then_be_the_only_ones() {
        // More often than there are places.
        let made = [(None, 2, 12), (Some(ErasureCode::new(2, 1)), 3, 18)];
        for ((code, servers, rounds), repairs) in made.into_iter().flat_map(|made| [(made, true), (made, false)]) {
            let (world, backend) = pool(code, |member| member, repairs);
            // Lanes that are older than all that comes.
            let (mut lanes, mut model) = random_history(&*backend, 7, 300);
            for round in 0..rounds {
                let server = round % servers;
                world.end(server);
                poll_until("the death is noticed", &*backend, &mut lanes, || {
                    backend.protection().unwrap().missing_legs == 1
                });
                // Something that the server never had.
                write(&mut *lanes[0], 5, 90, 1000 + round as u64).unwrap();
                model.versions[5..95].fill(1000 + round as u64);
                world.begin(server);
                poll_until("all servers hold everything", &*backend, &mut lanes, || backend.health() == Health::Good);
                poll_until("nothing is exposed", &*backend, &mut lanes, || {
                    backend.protection().unwrap().exposed_pages == 0
                });
                write(&mut *lanes[1], 40, 20, 2000 + round as u64).unwrap();
                model.versions[40..60].fill(2000 + round as u64);
                poll_until("nothing is late", &*backend, &mut lanes, || backend.health() == Health::Good);
            }
            model.check(&mut *lanes[0], &format!("{servers} servers"));
        }
    }

    #[test]
    fn a_place_is_not_given_again_while_a_lane_has_a_way_to_who_had_it() {
        for (code, servers, places) in [(None, 2, 6), (Some(ErasureCode::new(2, 1)), 3, 13)] {
            let (world, backend) = pool(code, |member| member, true);
            let mut lanes: Vec<_> = (0..2).map(|_| backend.open_lane().unwrap()).collect();
            let mut idle = lanes.pop().unwrap();
            write(&mut *lanes[0], 0, 100, 1).unwrap();
            let lose = |lanes: &mut Vec<Box<dyn Lane>>, server: usize| {
                world.end(server);
                poll_until("the death is noticed", &*backend, lanes, || {
                    backend.protection().unwrap().missing_legs == 1
                });
                world.begin(server);
            };
            for round in 0..places {
                lose(&mut lanes, round % servers);
                poll_until("it is back", &*backend, &mut lanes, || backend.health() == Health::Good);
            }
            let tries = world.tries.load(Ordering::SeqCst);
            lose(&mut lanes, 0);
            write(&mut *lanes[0], 40, 10, 2).unwrap();
            assert_eq!((backend.health(), world.tries.load(Ordering::SeqCst)), (Health::Degraded, tries));
            // It sees that they have failed.
            idle.poll(&mut Vec::new());
            poll_until("it is back", &*backend, &mut lanes, || backend.health() == Health::Good);
            world.end(1);
            lanes.push(idle);
            for lane in &mut lanes {
                assert_version(&mut **lane, 0, 40, 1);
                assert_version(&mut **lane, 40, 10, 2);
                assert_version(&mut **lane, 50, 50, 1);
            }
        }
    }

    /// A pair of which the first server died, came back to the only slot, and died again.
    fn pair_with_a_dead_slot() -> (Arc<World>, Arc<Membership>) {
        let world = World::new(2, PAGES);
        let membership = Arc::new(Membership::new(world.members(), world.spares(|member| member), 1, false, 3));
        world.end(0);
        membership.check_health();
        come_back(&world, &membership, 0, 2);
        world.end(0);
        membership.check_health();
        assert_eq!((membership.failed(), membership.former()), (MemberSet(0b101), MemberSet(0b101)));
        (world, membership)
    }

    /// A server of the pair comes to this slot.
    fn come_back(world: &World, membership: &Membership, server: usize, slot: usize) {
        world.begin(server);
        wait_until("it is back", || {
            membership.rejoin(PAGES, 1);
            !membership.failed().has(slot)
        });
    }

    #[test]
    fn a_server_that_gets_a_slot_is_not_blamed_for_the_death_of_the_one_before() {
        let (world, membership) = pair_with_a_dead_slot();
        let (dead, known) = (world.life(0), membership.clone());
        // The slot is given again between the question and what follows from the answer.
        *dead.before_answer.lock() = Some(Box::new(move || {
            known.release_slot(|_| ());
            come_back(&world, &known, 0, 2);
        }));
        membership.check_health();
        assert!(dead.before_answer.lock().is_none(), "it was asked");
        // Neither has it failed, nor do lanes leave it.
        assert_eq!((membership.failed(), membership.former()), (MemberSet(0b001), MemberSet(0b001)));
    }

    #[test]
    fn a_lane_that_is_opened_while_members_take_turns_finds_those_that_came() {
        let world = World::new(2, PAGES);
        let membership = Arc::new(Membership::new(world.members(), world.spares(|member| member), 1, false, 4));
        for (server, slot) in [(0, 2), (1, 3)] {
            world.end(server);
            membership.check_health();
            come_back(&world, &membership, server, slot);
        }
        world.end(0);
        membership.check_health();
        membership.release_slot(|_| ());
        assert!(membership.backend(2).is_none() && !membership.failed().has(3));
        // One comes to a slot that the lane has passed by; then the one dies that it reaches.
        let (known, turns) = (membership.clone(), world.clone());
        *world.life(1).before_open.lock() = Some(Box::new(move || {
            come_back(&turns, &known, 0, 2);
            turns.end(1);
        }));
        let lanes = membership.open_lanes(1).unwrap();
        assert_eq!(lanes.iter().position(Option::is_some), Some(2));
    }

    #[test]
    fn a_slot_is_kept_if_a_lane_is_opened_while_it_is_released() {
        let (world, membership) = pair_with_a_dead_slot();
        let opened = Cell::new(None);
        let is_kept = || membership.backend(2).is_some() && membership.former().has(2);
        membership.release_slot(|_| opened.set(membership.new_mailbox()));
        assert!(is_kept(), "the lane may have found the dead server there");
        membership.release_slot(|_| ());
        assert!(is_kept());
        drop(opened);
        membership.release_slot(|_| ());
        assert!(!is_kept());
        come_back(&world, &membership, 0, 2);
        assert_eq!((membership.failed(), membership.former()), (MemberSet(0b001), MemberSet(0b001)));
    }

    #[test]
    fn lanes_that_are_busy_opened_and_closed_meanwhile_lose_nothing() {
        for (code, servers) in [(None, 2), (Some(ErasureCode::new(2, 1)), 3)] {
            let (world, backend) = pool(code, |member| member, true);
            let (backend, is_over, steps) = (&*backend, &AtomicBool::new(false), &[const { AtomicU64::new(0) }; 2]);
            thread::scope(|scope| {
                for (thread, steps) in steps.iter().enumerate() {
                    scope.spawn(move || {
                        // Both write to the same chunks.
                        let pages = || (thread as u64 * 16..PAGES - 16).step_by(64);
                        for version in 1.. {
                            if is_over.load(Ordering::SeqCst) {
                                break;
                            }
                            let mut lane = backend.open_lane().unwrap();
                            for version in version * 20..version * 20 + 20 {
                                for page in pages() {
                                    write(&mut *lane, page, 16, version).unwrap();
                                    steps.fetch_add(1, Ordering::SeqCst);
                                }
                                pages().for_each(|page| assert_version(&mut *lane, page, 16, version));
                            }
                        }
                    });
                }
                let _over = Over(is_over);
                for round in 0..60 {
                    world.end(round % servers);
                    wait_until("the death is noticed", || backend.protection().unwrap().missing_legs == 1);
                    world.begin(round % servers);
                    wait_until("all servers hold everything", || backend.health() == Health::Good);
                }
            });
            // Neither stood still.
            assert!(steps.iter().all(|steps| steps.load(Ordering::SeqCst) >= 60));
        }
    }

    #[test]
    fn while_a_write_is_under_way_that_a_server_lacks_which_came_back_not_all_is_whole() {
        // (A mirror has the chunk nowhere else until then.)
        for (code, dies) in [(None, false), (Some(ErasureCode::new(2, 1)), false), (Some(ErasureCode::new(2, 1)), true)]
        {
            let (world, backend) = pool(code, |member| member, true);
            let mut lanes = vec![backend.open_lane().unwrap()];
            world.end(0);
            poll_until("the death is noticed", &*backend, &mut lanes, || {
                backend.protection().unwrap().missing_legs == 1
            });
            let last = world.life(1);
            last.is_held.store(true, Ordering::SeqCst);
            let op = Op::Write { page: PageId(7), buffer: filled(2, 7, 5) };
            let deadline = Duration::from_secs(60);
            assert!(lanes[0].submit(LaneRequest { tag: 1, priority: Priority::Demand, deadline, op }).is_ok());
            let mut done = Vec::with_capacity(1);
            lanes[0].poll(&mut done);
            let tries = world.tries.load(Ordering::SeqCst);
            world.begin(0);
            wait_until("it is back", || world.tries.load(Ordering::SeqCst) > tries);
            // As long as it takes to be filled, and longer: a lane that is not polled does not know.
            for _ in 0..100 {
                assert_eq!((backend.health(), done.len()), (Health::Degraded, 0));
                thread::sleep(Duration::from_millis(1));
            }
            if dies {
                world.end(1);
            }
            last.is_held.store(false, Ordering::SeqCst);
            wait_until("it is written", || lanes[0].poll(&mut done) > 0);
            assert_eq!(done[0].result, Ok(()));
            if !dies {
                poll_until("all servers hold it", &*backend, &mut lanes, || backend.health() == Health::Good);
                world.end(1);
            }
            assert_version(&mut *lanes[0], 7, 2, 5);
        }
    }

    #[test]
    fn a_server_that_was_out_of_reach_is_filled_again_and_one_that_is_in_use_is_refused() {
        for (code, from) in [(None, 0), (None, 1), (Some(ErasureCode::new(2, 1)), 0), (Some(ErasureCode::new(2, 1)), 1)]
        {
            let (world, backend) = pool(code, move |_| from, true);
            let mut lanes = vec![backend.open_lane().unwrap()];
            write(&mut *lanes[0], 0, 100, 1).unwrap();
            world.end(0);
            poll_until("the death is noticed", &*backend, &mut lanes, || {
                backend.protection().unwrap().missing_legs == 1
            });
            write(&mut *lanes[0], 0, 100, 2).unwrap();
            // The same life goes on.
            world.life(0).is_over.store(false, Ordering::SeqCst);
            if from == 1 {
                let tries = world.tries.load(Ordering::SeqCst);
                wait_until("it was tried", || world.tries.load(Ordering::SeqCst) >= tries + 3);
                assert_eq!(backend.health(), Health::Degraded);
            } else {
                poll_until("all servers hold everything", &*backend, &mut lanes, || backend.health() == Health::Good);
                world.end(1);
            }
            assert_version(&mut *lanes[0], 0, 100, 2);
        }
    }

    #[test]
    fn a_server_that_comes_back_waits_as_a_spare_where_one_has_taken_its_seat() {
        let world = World::new(3, PAGES);
        let mut members = world.members();
        let spare = members.pop().unwrap();
        let spares = SpareMembers { members: vec![spare], ..world.spares(|member| member) };
        let backend = MirrorBackend::new(members, spares, PAGES, InitialContents::Zeros, None, true).unwrap();
        let mut lanes = vec![backend.open_lane().unwrap()];
        write(&mut *lanes[0], 0, 200, 1).unwrap();
        for server in [0, 1, 2] {
            // Each time one that waits comes in at once, and the one that was lost waits when it is back.
            world.end(server);
            let tries = world.tries.load(Ordering::SeqCst);
            world.begin(server);
            poll_until("it was taken", &backend, &mut lanes, || world.tries.load(Ordering::SeqCst) > tries);
            poll_until("all servers hold everything", &backend, &mut lanes, || backend.health() == Health::Good);
            assert_version(&mut *lanes[0], 0, 200, 1);
        }
    }
}
