//! Guards against rot that stays where nobody reads, against a scrub that takes right bytes for
//! wrong ones, and against one that others wait for.
use super::ScrubStats;
use crate::conformance::Random;
use crate::leaf::ram::RamBackend;
use crate::redundant::ec::EcBackend;
use crate::redundant::members::PoolMember;
use crate::redundant::mirror::{InitialContents, MirrorBackend};
use crate::trial::{Over, PAGES, assert_version, one, random_history, wait_until, write};
use crate::{Backend, CloneTicket, Completion, Health, Lane, LaneRequest, Op, PoolBuilder, PoolError};
use core::sync::atomic::{AtomicU8, Ordering};
use core::time::Duration;
use farfield_core::gf256::ErasureCode;
use farfield_core::{Incarnation, PageId};
use farfield_os::process::now_ns;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Soon enough for a test: it is always behind.
const SOON: Option<Duration> = Some(Duration::from_millis(1));

const ALIVE: u8 = 0;
const SILENT: u8 = 1;
const DEAD: u8 = 2;

/// A member that rots, falls silent or dies when the test says so.
struct TestMember {
    ram: RamBackend,
    state: Arc<AtomicU8>,
}

struct TestLane {
    inner: Box<dyn Lane>,
    state: Arc<AtomicU8>,
    /// Asked while it was silent, and until when that may be answered.
    unheard: Vec<(u64, LaneRequest)>,
}

const GONE: PoolError = PoolError::ServerGone { server: 0, incarnation: Incarnation(0) };

impl TestMember {
    fn set(&self, state: u8) {
        self.state.store(state, Ordering::SeqCst);
    }
}

impl Backend for TestMember {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        if self.state.load(Ordering::SeqCst) == DEAD {
            return Err(GONE);
        }
        Ok(Box::new(TestLane { inner: self.ram.open_lane()?, state: self.state.clone(), unheard: vec![] }))
    }
    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        self.ram.clone_region()
    }
    fn pages(&self) -> u64 {
        self.ram.pages()
    }
    fn health(&self) -> Health {
        if self.state.load(Ordering::SeqCst) == DEAD { Health::Gone } else { Health::Good }
    }
    fn answers(&self, _within: Duration) -> bool {
        self.state.load(Ordering::SeqCst) == ALIVE
    }
    fn abandon(&self) {}
}

impl Lane for TestLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.state.load(Ordering::SeqCst) == ALIVE {
            return self.inner.submit(request);
        }
        self.unheard.push((now_ns().saturating_add(request.deadline.as_nanos() as u64), request));
        Ok(())
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        self.inner.poll(done);
        let is_dead = self.state.load(Ordering::SeqCst) == DEAD;
        if is_dead {
            done[before..].iter_mut().for_each(|completion| completion.result = Err(GONE));
        }
        for (until, request) in core::mem::take(&mut self.unheard) {
            if !is_dead && now_ns() < until || done.len() == done.capacity() {
                self.unheard.push((until, request));
                continue;
            }
            let LaneRequest { tag, deadline, op, .. } = request;
            let buffer = match op {
                Op::Read { buffer, .. } | Op::ReadPart { buffer, .. } | Op::Write { buffer, .. } => Some(buffer),
                Op::Discard { .. } => None,
            };
            let error = if is_dead { GONE } else { PoolError::TimedOut { server: 0, after: deadline } };
            done.push(Completion { tag, result: Err(error), buffer });
        }
        done.len() - before
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.unheard.len()
    }
    fn wait(&mut self, _timeout: Duration) {}
}

/// A pool over members of the test.
struct Pool {
    members: Vec<Arc<TestMember>>,
    /// So many must live.
    needed: usize,
    backend: Box<dyn Backend>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Mirror(usize),
    Ec(usize, usize),
}

const KINDS: [Kind; 5] = [Kind::Mirror(2), Kind::Mirror(3), Kind::Ec(2, 1), Kind::Ec(4, 1), Kind::Ec(2, 2)];

impl Pool {
    fn new(kind: Kind, spares: usize, scrub: Option<Duration>, repairs: bool) -> Pool {
        let (count, needed) = match kind {
            Kind::Mirror(members) => (members, 1),
            Kind::Ec(data, parity) => (data + parity, data),
        };
        let pages = match kind {
            Kind::Mirror(_) => PAGES,
            Kind::Ec(..) => EcBackend::pages_of_member(PAGES),
        };
        let member =
            |number| TestMember { ram: RamBackend::new(number as u16, pages), state: Arc::new(AtomicU8::new(ALIVE)) };
        let members: Vec<Arc<TestMember>> = (0..count + spares).map(|number| Arc::new(member(number))).collect();
        let as_member = |member: &Arc<TestMember>| PoolMember { backend: Some(member.clone()), leaves: 1, server: 0 };
        let (used, spare): (Vec<PoolMember>, Vec<PoolMember>) =
            (members[..count].iter().map(as_member).collect(), members[count..].iter().map(as_member).collect());
        let backend: Box<dyn Backend> = match kind {
            Kind::Mirror(_) => {
                Box::new(MirrorBackend::new(used, spare, PAGES, InitialContents::Zeros, scrub, repairs).unwrap())
            }
            Kind::Ec(data, parity) => {
                Box::new(EcBackend::new(ErasureCode::new(data, parity), used, spare, PAGES, scrub, repairs).unwrap())
            }
        };
        Pool { members, needed, backend }
    }

    fn counts(&self) -> ScrubStats {
        self.backend.scrub_stats().expect("there is a scrub")
    }

    /// Until everything that is stored now was looked at, and is repaired.
    fn wait_for_a_turn(&self, lanes: &mut [Box<dyn Lane>]) {
        // The turn that is under way may have begun before.
        let turns = self.counts().turns + 2;
        wait_until("everything was looked at", || {
            // Whichever of them walks.
            lanes.iter_mut().for_each(|lane| assert_eq!(lane.poll(&mut Vec::new()), 0));
            let counts = self.counts();
            counts.turns >= turns && self.backend.health() == Health::Good
        });
    }

    /// Only `member` and as few others as can be are left.
    fn kill_others(&self, member: usize) {
        let others = (0..self.members.len()).filter(|other| *other != member);
        others.skip(self.needed - 1).for_each(|other| self.members[other].set(DEAD));
    }
}

/// For whom a test is made: with a thread, and without.
fn both(mut test: impl FnMut(Kind, bool)) {
    for kind in KINDS {
        for repairs in [true, false] {
            println!("{kind:?}, heals: {repairs}");
            test(kind, repairs);
        }
    }
}

#[test]
fn corrupt_pages_that_nobody_reads_are_repaired() {
    both(|kind, repairs| {
        let members = match kind {
            Kind::Mirror(members) => members,
            Kind::Ec(data, parity) => data + parity,
        };
        for member in 0..members {
            let pool = Pool::new(kind, 0, SOON, repairs);
            let mut lane = pool.backend.open_lane().unwrap();
            for page in (0..PAGES).step_by(40) {
                write(&mut *lane, page, 40, 1).unwrap();
            }
            let stored = pool.members[member].ram.stored();
            // Every way to be wrong, at one member: at an erasure code that is data and parity.
            let (mut planted, ram) = (0, &pool.members[member].ram);
            for (number, page) in stored.iter().enumerate() {
                planted += match (number % 5, kind) {
                    (1, _) => u64::from(ram.rot(*page)),
                    (2, _) => u64::from(ram.forget(*page)),
                    // Where there are only two members nobody knows which of them is right.
                    (3, Kind::Mirror(3) | Kind::Ec(..)) => u64::from(ram.confuse(*page, stored[number - 3])),
                    _ => 0,
                }
            }
            pool.wait_for_a_turn(core::slice::from_mut(&mut lane));
            let counts = pool.counts();
            assert!(counts.wrong_pages > 0 && counts.mended_pages == counts.wrong_pages, "{counts:?}");
            assert!(counts.looked_pages >= stored.len() as u64 && counts.turn_age().is_some(), "{counts:?}");
            if let Kind::Ec(..) = kind {
                assert_eq!(counts.wrong_pages, planted, "each was found, and nothing else");
            }
            pool.kill_others(member);
            for page in (0..PAGES).step_by(40) {
                assert_version(&mut *lane, page, 40, 1);
            }
        }
    });
}

#[test]
fn right_bytes_are_never_suspected() {
    both(|kind, repairs| {
        let pool = Pool::new(kind, 0, SOON, repairs);
        let (mut lanes, model) = random_history(&*pool.backend, 11, 3_000);
        pool.wait_for_a_turn(&mut lanes);
        let counts = pool.counts();
        assert!((counts.wrong_pages, counts.mended_pages) == (0, 0) && counts.looked_pages > 0, "{counts:?}");
        model.check(&mut *lanes[0], &format!("{kind:?}"));
    });
}

#[test]
fn pages_that_become_corrupt_in_use_are_repaired() {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    let is_deep = std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1");
    let rounds = if is_deep { 30 } else { 1 };
    for seed in given.map_or(1..=rounds, |seed| seed..=seed) {
        both(|kind, repairs| {
            println!("FARFIELD_SEED={seed} {kind:?} heals: {repairs}");
            let pool = Pool::new(kind, 0, SOON, repairs);
            let (is_over, rotten) = (AtomicBool::new(false), seed as usize % 2);
            let (mut lanes, model) = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut random = Random(seed << 9 | 1);
                    while !is_over.load(Ordering::SeqCst) {
                        let page = random.below(PAGES);
                        match (random.below(4), kind) {
                            // Who reads a mirror knows nothing of a page but its checksum.
                            (0, Kind::Ec(..)) => pool.members[rotten].ram.forget(page),
                            _ => pool.members[rotten].ram.rot(page),
                        };
                        std::thread::sleep(Duration::from_micros(500));
                    }
                });
                let _over = Over(&is_over);
                random_history(&*pool.backend, seed, 2_000)
            });
            pool.wait_for_a_turn(&mut lanes);
            pool.kill_others(rotten);
            model.check(&mut *lanes[0], &format!("FARFIELD_SEED={seed} {kind:?} heals: {repairs}"));
        });
    }
}

#[test]
fn a_lost_leg_is_not_waited_for() {
    both(|kind, repairs| {
        if matches!(kind, Kind::Mirror(2) | Kind::Ec(_, 1)) {
            // Nobody is left to repair from.
            return;
        }
        let pool = Pool::new(kind, 0, SOON, repairs);
        let mut lane = pool.backend.open_lane().unwrap();
        write(&mut *lane, 0, 100, 1).unwrap();
        pool.members[0].set(DEAD);
        pool.members[1].ram.rot_all();
        wait_until("the other one is mended", || {
            lane.poll(&mut Vec::new());
            let counts = pool.counts();
            counts.wrong_pages > 0 && counts.mended_pages == counts.wrong_pages && counts.turns > 1
        });
        assert_eq!(pool.backend.health(), Health::Degraded);
        pool.kill_others(1);
        pool.members[0].set(DEAD);
        if let Kind::Mirror(_) = kind {
            assert_version(&mut *lane, 0, 100, 1);
        }
    });
}

#[test]
fn a_silent_leg_delays_neither_others_nor_snapshots() {
    for kind in [Kind::Mirror(3), Kind::Ec(2, 2)] {
        let pool = Pool::new(kind, 0, SOON, true);
        let mut lane = pool.backend.open_lane().unwrap();
        write(&mut *lane, 0, 100, 1).unwrap();
        pool.members[0].set(SILENT);
        // Until the scrub waits for it.
        let looked = || pool.counts().looked_pages;
        let mut before = looked();
        wait_until("it does", || {
            std::thread::sleep(Duration::from_millis(20));
            core::mem::replace(&mut before, looked()) == before
        });
        let started = Instant::now();
        pool.backend.clone_region().unwrap();
        assert!(started.elapsed() < super::READ_DEADLINE / 2, "{kind:?}: {:?}", started.elapsed());
        pool.members[1].ram.rot_all();
        wait_until("the other one is mended", || {
            let counts = pool.counts();
            counts.wrong_pages > 0 && counts.mended_pages == counts.wrong_pages && counts.turns > 1
        });
    }
}

#[test]
fn pages_that_a_member_has_forgotten_are_not_copied_to_a_spare() {
    let pool = Pool::new(Kind::Ec(2, 2), 1, None, true);
    let mut lane = pool.backend.open_lane().unwrap();
    for page in (0..PAGES).step_by(40) {
        write(&mut *lane, page, 40, 1).unwrap();
    }
    assert_eq!(pool.backend.scrub_stats(), None);
    let forgotten = pool.members[0].ram.stored();
    assert!(forgotten.iter().step_by(2).all(|page| pool.members[0].ram.forget(*page)));
    pool.members[3].set(DEAD);
    wait_until("the spare holds everything", || pool.backend.health() == Health::Good);
    [0, 1].iter().for_each(|member| pool.members[*member].set(DEAD));
    for page in (0..PAGES).step_by(40) {
        assert_version(&mut *lane, page, 40, 1);
    }
}

#[test]
fn discarded_pages_do_not_count_as_corrupt() {
    both(|kind, repairs| {
        let pool = Pool::new(kind, 0, SOON, repairs);
        let mut lane = pool.backend.open_lane().unwrap();
        write(&mut *lane, 0, 200, 1).unwrap();
        assert_eq!(one(&mut *lane, Op::Discard { page: PageId(30), count: 100 }).result, Ok(()));
        pool.wait_for_a_turn(core::slice::from_mut(&mut lane));
        assert_eq!(pool.counts().wrong_pages, 0);
        assert_version(&mut *lane, 0, 30, 1);
        assert_version(&mut *lane, 130, 70, 1);
    });
}

#[test]
fn a_pool_of_pools_has_the_counts_of_its_parts() {
    let open = |url: &str| PoolBuilder::new().url(url).pages(256).repair_thread().open().unwrap();
    assert_eq!(open("stripe(ram:,mirror(ram:,ram:,scrub=off))").scrub_stats(), None);
    for url in [
        "stripe(mirror(ram:,ram:,scrub=1ms),ec(1,1,ram:,ram:,scrub=1ms))",
        "tier(mirror(ram:,ram:,scrub=1ms),fault:seed=1@ec(1,1,ram:,ram:,scrub=1ms))",
        "mirror(ec(1,1,ram:,ram:,scrub=1ms),ram:,scrub=1ms)",
    ] {
        let backend = open(url);
        let mut lane = backend.open_lane().unwrap();
        write(&mut *lane, 0, 256, 1).unwrap();
        let is_tier = url.starts_with("tier");
        wait_until(url, || {
            lane.poll(&mut Vec::new());
            let counts = backend.scrub_stats().unwrap();
            // Nothing is in the second tier: it has no turns.
            counts.looked_pages >= 512 && (counts.turns > 0 || is_tier)
        });
    }
    // By default a day passes before all of it was looked at.
    let backend = open("mirror(ram:,ram:)");
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 256, 1).unwrap();
    (0..100).for_each(|_| assert_eq!(lane.poll(&mut Vec::new()), 0));
    assert_eq!(backend.scrub_stats(), Some(ScrubStats::default()));
}
