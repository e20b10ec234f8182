//! Guards against an erasure code that gives an old version, or an error while enough members live:
//! whatever dies, lies or is late, and whoever repairs.
use super::EcBackend;
use crate::conformance::Random;
use crate::leaf::ram::RamBackend;
use crate::redundant::members::{HEDGE_MAX, PoolMember};
use crate::redundant::scheme::Scheme;
use crate::trial::{self, NEVER, SilentMember, assert_version, filled, one, open, read, survive, wait_until, write};
use crate::{
    Backend, Buffer, CloneTicket, Completion, Health, Lane, LaneRequest, Op, PoolBuilder, PoolError, Priority,
    conformance,
};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::gf256::ErasureCode;
use std::sync::Arc;
use std::time::Instant;

fn ec(data: usize, parity: usize, members: &[&str]) -> String {
    assert_eq!(members.iter().filter(|member| !member.starts_with("spare")).count(), data + parity);
    format!("ec({data},{parity},{})", members.join(","))
}

#[test]
fn a_leg_that_falls_silent_before_another_has_what_it_missed_is_waited_for() {
    let sides = [SilentMember::new(800), SilentMember::new(800), SilentMember::new(800)];
    let members = sides.iter().map(|side| PoolMember { backend: Some(side.clone()), leaves: 1, server: 0 }).collect();
    let backend = EcBackend::new(ErasureCode::new(2, 1), members, vec![], 400, None, false).unwrap();
    trial::waits_for_the_only_one(&backend, &sides);
}

#[test]
fn erasure_codes_conform() {
    for url in [
        ec(1, 1, &["ram:"; 2]),
        ec(2, 1, &["ram:", "fault:delay=20us@ram:", "stripe(ram:,ram:)", "spare=ram:"]),
        ec(3, 2, &["fault:die=900@ram:", "ram:", "fault:die=2000@ram:", "ram:", "ram:"]),
        ec(4, 2, &["ram:"; 6]),
        ec(13, 3, &["ram:"; 16]),
        format!(
            "stripe({},mirror(ram:,{}))",
            ec(2, 1, &["ram:"; 3]),
            ec(1, 2, &["fault:die=900@ram:", "ram:", "ram:"])
        ),
    ] {
        conformance::run(&PoolBuilder::new().url(&url));
    }
    conformance::run(&PoolBuilder::new().url("ec(2,1,ram:,fault:die=900@ram:,ram:,spare=ram:)").repair_thread());
}

#[test]
fn what_is_not_protected_is_counted() {
    trial::says_what_is_not_protected(
        "ec(2,1,fault:die=40@ram:,ram:,ram:)",
        "ec(2,1,fault:die=40@ram:,ram:,ram:,spare=ram:)",
    );
}

#[test]
fn legs_that_lie_are_repaired() {
    conformance::run(&PoolBuilder::new().url("ec(2,1,fault:corrupt=0.05,seed=5@ram:, ram:,ram:)"));
    for place in 0..3 {
        let mut members = ["ram:"; 3];
        members[place] = "fault:corrupt=0.3,seed=3@ram:";
        let backend = open(&ec(2, 1, &members), 256);
        let mut lane = backend.open_lane().unwrap();
        write(&mut *lane, 3, 100, 1).unwrap();
        for _ in 0..10 {
            assert_version(&mut *lane, 3, 100, 1);
        }
        wait_until("the leg is right again", || backend.health() == Health::Good);
    }
}

#[test]
fn a_leg_that_does_not_answer_stalls_nobody() {
    for place in 0..3 {
        let mut members = ["ram:"; 3];
        members[place] = NEVER;
        trial::goes_on_degraded(&ec(2, 1, &members));
    }
}

#[test]
fn a_leg_that_answers_late_is_brought_up_to_date() {
    trial::brings_up_to_date("ec(2,1,fault:delay=1500ms@ram:, fault:die=200@ram:, ram:)");
}

#[test]
fn what_is_full_is_said_and_what_is_gone_is_gone() {
    let backend = open("ec(2,1,ram:,ram:,fault:full=3@ram:)", 64);
    let mut lane = backend.open_lane().unwrap();
    assert_eq!([1, 2, 3].map(|version| write(&mut *lane, 1, 1, version)), [Ok(()); 3]);
    let full = PoolError::PoolFull { server: 2 };
    assert_eq!([4, 5].map(|version| write(&mut *lane, 1, 5, version)), [Err(full); 2]);
    assert_version(&mut *lane, 1, 1, 3);
    assert!(read(&mut *lane, 2, 4).bytes().iter().all(|byte| *byte == 0), "nothing of it was stored");

    let backend = open("ec(2,1,fault:die=6@ram:,fault:die=9@ram:,ram:)", 64);
    let mut lane = backend.open_lane().unwrap();
    let ends: Vec<_> = (1..20).map(|version| write(&mut *lane, 1, 2, version)).collect();
    assert!(ends[0].is_ok() && ends.iter().any(|end| matches!(end, Err(PoolError::ServerGone { .. }))), "{ends:?}");
    assert!(matches!(ends.last(), Some(Err(PoolError::ServerGone { .. }))));
    assert_eq!(backend.health(), Health::Gone);
    assert!(backend.open_lane().is_err() && backend.clone_region().is_err());
}

#[test]
fn a_wrong_leg_is_found_when_the_pool_is_opened() {
    let url = "ec(2,1,ram:,ram:, unix:/no/such/socket)";
    assert!(PoolBuilder::new().url(url).pages(9).open().is_err());
    let backend = PoolBuilder::new().url(url).degraded().pages(9).open().unwrap();
    assert_eq!(backend.health(), Health::Degraded);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 1, 8, 1).unwrap();
    assert_version(&mut *lane, 1, 8, 1);
    assert!(PoolBuilder::new().url("ec(2,1,unix:/no/such,ram:,unix:/no)").degraded().pages(9).open().is_err());
}

#[test]
fn a_snapshot_is_what_was_written_when_it_was_made() {
    let builder = PoolBuilder::new().url("ec(2,1,fault:die=300@ram:, ram:, ram:, spare=ram:)").pages(300);
    let backend = builder.open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let mut random = Random(9);
    for version in 1..40 {
        write(&mut *lane, 0, 300, version).unwrap();
        let page = 1 + random.below(298);
        write(&mut *lane, page, 1, 77).unwrap();
        let ticket = backend.clone_region().unwrap();
        assert_ne!(ticket.secrets[1], 0);
        let claimed = builder.claim(&ticket).unwrap();
        write(&mut *lane, 100, 100, 99).unwrap();
        let mut copy = claimed.open_lane().unwrap();
        assert_version(&mut *copy, 0, page as usize, version);
        assert_version(&mut *copy, page, 1, 77);
        assert_version(&mut *copy, page + 1, (299 - page) as usize, version);
        write(&mut *copy, 0, 300, 55).unwrap();
        assert_version(&mut *copy, 0, 300, 55);
        assert!(builder.claim(&ticket).is_err(), "good once");
    }
    assert_eq!(backend.health(), Health::Good, "the spare has come in");
}

/// A member that says that it has stored what it has not, now and then.
struct Forgetful {
    inner: RamBackend,
    writes: Arc<AtomicU64>,
}

struct ForgetfulLane {
    inner: Box<dyn Lane>,
    writes: Arc<AtomicU64>,
    forgotten: Vec<Completion>,
}

impl Backend for Forgetful {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        let (inner, writes) = (self.inner.open_lane()?, self.writes.clone());
        Ok(Box::new(ForgetfulLane { inner, writes, forgotten: vec![] }))
    }
    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        self.inner.clone_region()
    }
    fn pages(&self) -> u64 {
        self.inner.pages()
    }
    fn health(&self) -> Health {
        Health::Good
    }
    fn abandon(&self) {}
}

impl Lane for ForgetfulLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        match request.op {
            Op::Write { buffer, .. } if self.writes.fetch_add(1, Ordering::Relaxed) % 5 == 4 => {
                self.forgotten.push(Completion { tag: request.tag, result: Ok(()), buffer: Some(buffer) });
                Ok(())
            }
            op => self.inner.submit(LaneRequest { op, ..request }),
        }
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let moved = self.forgotten.len();
        done.append(&mut self.forgotten);
        moved + self.inner.poll(done)
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.forgotten.len()
    }
    fn wait(&mut self, timeout: Duration) {
        self.inner.wait(timeout);
    }
}

#[test]
fn old_bytes_are_not_believed() {
    for place in 0..3 {
        let member = |number: usize| {
            let inner = RamBackend::new(number as u16, EcBackend::pages_of_member(400));
            let backend: Arc<dyn Backend> = if number == place {
                Arc::new(Forgetful { inner, writes: Arc::new(AtomicU64::new(0)) })
            } else {
                Arc::new(inner)
            };
            PoolMember { backend: Some(backend), leaves: 1, server: number as u16 }
        };
        // Nobody repairs here: then another member would become what this one is.
        let backend =
            EcBackend::new(ErasureCode::new(2, 1), (0..3).map(member).collect(), vec![], 400, None, false).unwrap();
        let mut lane = super::lane::EcLane::open(&backend.table, 0).unwrap();
        let (mut random, mut versions) = (Random(5), vec![0; 400]);
        for version in 1..600 {
            let page = random.below(400);
            let count = (1 + random.below(20)).min(400 - page);
            write(&mut lane, page, count as usize, version).unwrap();
            versions[page as usize..(page + count) as usize].fill(version);
            let page = random.below(400);
            if versions[page as usize] != 0 {
                assert_version(&mut lane, page, 1, versions[page as usize]);
            }
        }
    }
}

#[test]
fn rows_are_used_again_and_sparse_ones_are_written_again() {
    const PAGES: u64 = 8000;
    let member = |number: usize| {
        let ram: Arc<dyn Backend> = Arc::new(RamBackend::new(number as u16, EcBackend::pages_of_member(PAGES)));
        PoolMember { backend: Some(ram), leaves: 1, server: number as u16 }
    };
    let backend =
        EcBackend::new(ErasureCode::new(4, 1), (0..5).map(member).collect(), vec![], PAGES, None, false).unwrap();
    let mut lane = backend.open_lane().unwrap();
    for page in (0..PAGES).step_by(64) {
        write(&mut *lane, page, 64, 1).unwrap();
    }
    let (rows, live, _) = backend.table.index.counts();
    assert_eq!((rows, live), (PAGES / 4, PAGES), "batches fill their rows");
    let (mut random, mut versions) = (Random(3), vec![1; PAGES as usize]);
    for version in 2..20_000 {
        let page = random.below(PAGES);
        write(&mut *lane, page, 1, version).unwrap();
        versions[page as usize] = version;
    }
    let settle = |lane: &mut dyn Lane| {
        wait_until("nothing is left to do", || {
            lane.poll(&mut Vec::new());
            !backend.table.index.is_sparse(4) && !backend.table.index.has_too_many_spent()
        });
    };
    settle(&mut *lane);
    let (rows, live, spent) = backend.table.index.counts();
    assert_eq!(live, PAGES);
    assert!(rows * 4 <= PAGES * 5 / 4 + 4 * 64 && spent <= rows / 8 + 256, "{rows} rows, {spent} spent");
    for (page, version) in versions.iter().enumerate() {
        assert_version(&mut *lane, page as u64, 1, *version);
    }
    one(&mut *lane, Op::Discard { page: PageId(0), count: PAGES });
    settle(&mut *lane);
    assert_eq!(backend.table.index.counts().1, 0);
    assert!(backend.table.index.counts().2 <= 256, "the legs have their memory back");
}

#[test]
fn writes_of_many_operations_share_rows() {
    let member = |number: usize| {
        let ram: Arc<dyn Backend> = Arc::new(RamBackend::new(number as u16, EcBackend::pages_of_member(1000)));
        PoolMember { backend: Some(ram), leaves: 1, server: number as u16 }
    };
    let backend =
        EcBackend::new(ErasureCode::new(4, 2), (0..6).map(member).collect(), vec![], 1000, None, false).unwrap();
    let mut lane = backend.open_lane().unwrap();
    for number in 0..64 {
        let op = Op::Write { page: PageId(number * 15), buffer: filled(1, number * 15, 3) };
        let request = LaneRequest { tag: number, priority: Priority::Background, deadline: Duration::from_secs(9), op };
        lane.submit(request).unwrap();
    }
    let mut done = Vec::with_capacity(64);
    while lane.in_flight() > 0 {
        lane.poll(&mut done);
    }
    assert!(done.len() == 64 && done.iter().all(|completion| completion.result.is_ok()));
    assert_eq!(backend.table.index.counts(), (16, 64, 0));
    (0..64).for_each(|number| assert_version(&mut *lane, number * 15, 1, 3));
}

#[test]
fn random_deaths_lose_nothing() {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    let rounds = if std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1") { 100 } else { 1 };
    let seeds = given.map_or(1..=rounds, |seed| seed..=seed);
    for seed in seeds {
        let mut random = Random(seed << 20 | 1);
        for (data, parity) in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (5, 3)] {
            let mut members = vec!["ram:".to_owned(); data + parity];
            for _ in 0..parity {
                // As many as may die; perhaps one of them twice.
                let member = random.below(members.len() as u64) as usize;
                let corrupt = ["", ",corrupt=0.01"][random.below(2) as usize & usize::from(parity > 1)];
                members[member] = format!("fault:die={}{corrupt},seed={seed}@ram:", 1 + random.below(1200));
            }
            if random.below(2) == 0 {
                (0..parity).for_each(|_| members.push("spare=ram:".to_owned()));
            }
            let members: Vec<&str> = members.iter().map(String::as_str).collect();
            survive(&ec(data, parity, &members), random.below(2) == 0, seed, 1_000);
        }
        // Spares die while they are filled; members one after the other, each when the one before
        // is replaced; a member that is not quick.
        let mut die = || random.below(1_200) + 1;
        let spares = format!("spare=fault:die={}@ram:,spare=ram:", die());
        survive(&format!("ec(2,1,fault:die={}@ram:,ram:,ram:,{spares})", die()), true, seed, 1_500);
        survive(
            &format!("ec(2,2,fault:die={}@ram:,fault:die=last@ram:,ram:,ram:,spare=ram:)", die()),
            true,
            seed,
            1_500,
        );
        survive(
            &format!("ec(3,1,fault:delay=3us@ram:,stripe(ram:,fault:die={}@ram:),ram:,ram:)", die()),
            false,
            seed,
            1_500,
        );
    }
}

fn sides() -> [Arc<SilentMember>; 3] {
    core::array::from_fn(|_| SilentMember::new(1600))
}

/// An `ec(2,1,…)` of these.
fn two_and_one(sides: &[Arc<SilentMember>], repairs: bool) -> EcBackend {
    let members = sides.iter().map(|side| PoolMember { backend: Some(side.clone()), leaves: 1, server: 0 }).collect();
    EcBackend::new(ErasureCode::new(2, 1), members, vec![], 400, None, repairs).unwrap()
}

#[test]
fn lanes_that_stall_in_turns_cost_no_operation_and_no_leg_while_all_legs_live() {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    let rounds = if std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1") { 60 } else { 2 };
    for seed in given.map_or(1..=rounds, |seed: u64| seed..=seed) {
        println!("FARFIELD_SEED={seed}");
        let sides = sides();
        let backend = two_and_one(&sides, seed % 2 == 0);
        backend.set_write_timeout(Some(Duration::from_millis(10)));
        trial::lanes_stall_in_turns(&backend, &sides, seed, 3_200);
        assert!(backend.table.failed().is_empty(), "FARFIELD_SEED={seed}");
    }
}

/// A lane that has never had an answer of a member, because another one was slow and that one then fell silent.
#[test]
fn a_silent_member_with_all_buffers_of_reads_keeps_no_read_waiting() {
    let sides = sides();
    let backend = two_and_one(&sides, false);
    write(&mut *backend.open_lane().unwrap(), 0, 200, 1).unwrap();
    let pages_at = |member: usize| -> Vec<u64> {
        let is_there = |page: &u64| {
            let version = backend.table.index.version(*page);
            backend.table.member_of(version.row(), version.part()) == member
        };
        (0..200).filter(is_there).collect()
    };
    let mut lane = backend.open_lane().unwrap();
    let mut read_some = |member: usize, count: usize| {
        for page in pages_at(member).into_iter().cycle().take(count) {
            let op = Op::Read { page: PageId(page), buffer: Buffer::new(1) };
            let started = Instant::now();
            let done = trial::one_within(&mut *lane, op, Duration::from_secs(20));
            assert!(started.elapsed() < Duration::from_secs(10), "page {page} of member {member}");
            assert_eq!(done.result, Ok(()), "page {page} of member {member}");
            assert!(done.buffer.unwrap().bytes() == filled(1, page, 1).bytes());
        }
    };
    sides[0].set_silent(true);
    sides[2].set_silent(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(HEDGE_MAX * 2 / 5);
            sides[2].set_silent(false);
        });
        // It answers, slowly.
        read_some(2, 1);
    });
    // Each of these asks the silent one, too.
    read_some(2, 100);
    read_some(0, 100);
}

/// One member has lost what it held, and says that it is zeros. Another one, with the pages that are
/// read, is slow, and all its buffers for reads are taken.
#[test]
fn a_read_that_old_bytes_spoil_waits_for_the_buffers_of_who_could_tell() {
    let sides = sides();
    let backend = two_and_one(&sides, false);
    let mut lane = backend.open_lane().unwrap();
    // Each of these has a row of its own, so that its parity is enough to make it.
    (0..40).for_each(|page| write(&mut *lane, page, 1, 1).unwrap());
    write(&mut *lane, 100, 20, 1).unwrap();
    let member_of = |part| backend.table.member_of(0, part);
    let is_at_slow = |page: &u64| backend.table.index.version(*page).part() == 0;
    let mut lost = sides[member_of(1)].memory().open_lane().unwrap();
    one(&mut *lost, Op::Discard { page: PageId(0), count: sides[0].memory().pages() });
    sides[member_of(0)].set_silent(true);
    let submit = |lane: &mut dyn Lane, pages: &[u64]| {
        for page in pages {
            let op = Op::Read { page: PageId(*page), buffer: Buffer::new(1) };
            let request = LaneRequest { tag: *page, priority: Priority::Demand, deadline: Duration::from_secs(20), op };
            lane.submit(request).unwrap();
        }
    };
    let mut done = Vec::with_capacity(64);
    submit(&mut *lane, &Vec::from_iter(0..40));
    wait_until("the parity has answered for the slow one", || {
        lane.poll(&mut done);
        done.len() == 40
    });
    let pages: Vec<u64> = (100..120).filter(is_at_slow).collect();
    submit(&mut *lane, &pages);
    let silent_until = Instant::now() + HEDGE_MAX;
    while Instant::now() < silent_until {
        lane.poll(&mut done);
    }
    assert_eq!(done.len(), 40);
    sides[member_of(0)].set_silent(false);
    wait_until("all are read", || {
        lane.poll(&mut done);
        done.len() == 40 + pages.len()
    });
    for completion in done {
        let page = completion.tag;
        assert_eq!(completion.result, Ok(()), "page {page}");
        assert!(completion.buffer.unwrap().bytes() == filled(1, page, 1).bytes(), "page {page}");
    }
}

#[test]
fn what_nobody_answers_ends_in_time() {
    for wait in [Some(Duration::from_millis(10)), None] {
        let sides = sides();
        let backend = two_and_one(&sides, false);
        backend.set_write_timeout(wait);
        trial::ends_in_time_without_an_answer(&backend, &sides);
        // What failed is answered by now, and its rows can be written again.
        let index = &backend.table.index;
        assert_eq!(index.used_rows(), index.counts().0, "rows that nobody reads or can write");
    }
}

#[test]
fn pages_that_moved_are_waited_for_no_longer_than_the_read_may_take() {
    let backend = two_and_one(&sides(), false);
    let mut lane = super::lane::EcLane::open(&backend.table, 0).unwrap();
    write(&mut lane, 0, 16, 1).unwrap();
    let room = core::mem::take(&mut lane.free_splits);
    let (deadline, op) = (Duration::from_millis(50), Op::Read { page: PageId(0), buffer: Buffer::new(16) });
    assert!(lane.submit(LaneRequest { tag: 7, priority: Priority::Demand, deadline, op }).is_ok());
    // As if its pages had been looked for, and had been elsewhere by then.
    let operation = lane.queued.pop_front().unwrap();
    lane.operations[operation].as_mut().unwrap().split_pages = 16;
    lane.scheme.retry_reads.push_back((operation, 0, 16));
    let mut done = Vec::with_capacity(1);
    wait_until("it has ended", || lane.poll(&mut done) > 0);
    assert!(
        matches!(done[0].result, Err(PoolError::TimedOut { after, .. }) if after == deadline),
        "{:?}",
        done[0].result
    );
    lane.free_splits = room;
    assert_version(&mut lane, 0, 16, 1);
}

#[test]
fn a_leg_that_is_not_mended_in_time_is_read_all_the_same_and_never_lost_while_it_is_needed() {
    let sides = sides();
    let backend = two_and_one(&sides, false);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 200, 1).unwrap();
    // Each of two members lacks a row that the other has.
    sides[0].set_holds_changes(true);
    assert!(backend.table.suspect(0, 1, 0) && backend.table.suspect(40, 1, 1));
    wait_until("what is mended is late", || {
        lane.poll(&mut Vec::new());
        backend.table.is_lagging(0)
    });
    let started = Instant::now();
    while started.elapsed() < 3 * super::lane::EcScheme::REPAIR_DEADLINE {
        assert_version(&mut *lane, 0, 200, 1);
    }
    assert!(backend.table.failed().is_empty());
    sides[0].set_holds_changes(false);
    wait_until("all hold everything", || {
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    backend.table.mark_failed(2);
    assert_version(&mut *lane, 0, 200, 1);
}
