//! Guards against a mirror that gives an old version, or an error while one leg lives: whatever dies, lies or is late, and whoever copies.
use crate::conformance::Random;
use crate::{
    Backend, Buffer, Completion, Health, Lane, Op, Opener, PagePart, PoolError, Priority, Request, conformance,
};
use core::time::Duration;
use farfield_core::{PageId, geometry::PAGE_BYTES};
use std::sync::Arc;
use std::time::Instant;

const LONG: Duration = Duration::from_secs(7200);
/// Nobody waits for an answer that takes an hour.
const NEVER: &str = "fault:delay=3600s@ram:";

fn open(url: &str, pages: u64) -> Arc<dyn Backend> {
    Opener::new().url(url).pages(pages).heals().open().unwrap()
}

fn submit(lane: &mut dyn Lane, tag: u64, op: Op) {
    lane.submit(Request { tag, priority: Priority::Demand, deadline: LONG, op }).expect("room");
}

fn one(lane: &mut dyn Lane, op: Op) -> Completion {
    submit(lane, 0, op);
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(100));
    }
    done.remove(0)
}

fn filled(pages: usize, page: u64, version: u64) -> Buffer {
    let mut buffer = Buffer::new(pages);
    for index in 0..pages {
        let word = ((page + index as u64) << 32 | version).to_le_bytes();
        buffer.page_mut(index).as_chunks_mut::<8>().0.fill(word);
    }
    buffer.seal();
    buffer
}

fn write(lane: &mut dyn Lane, page: u64, pages: usize, version: u64) -> Result<(), PoolError> {
    one(lane, Op::Write { page: PageId(page), buffer: filled(pages, page, version) }).result
}

fn read(lane: &mut dyn Lane, page: u64, pages: usize) -> Buffer {
    let Completion { result, buffer, .. } = one(lane, Op::Read { page: PageId(page), buffer: Buffer::new(pages) });
    assert_eq!(result, Ok(()), "page {page}");
    buffer.unwrap()
}

fn assert_version(lane: &mut dyn Lane, page: u64, pages: usize, version: u64) {
    assert!(read(lane, page, pages).bytes() == filled(pages, page, version).bytes(), "page {page}");
}

/// Waits for what happens in the background.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let (started, mut looks) = (Instant::now(), 0);
    while !is_so() {
        looks += 1;
        assert!(looks < 100 || started.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn mirrors_conform() {
    for url in [
        "mirror(ram:, ram:)",
        "mirror(ram:, fault:delay=20us@ram:, stripe(ram:, ram:), spare=ram:)",
        "mirror(fault:die=2000@ram:, ram:)",
        "stripe(mirror(ram:, ram:), mirror(fault:die=900@ram:, ram:))",
    ] {
        conformance::run(&Opener::new().url(url));
        conformance::run(&Opener::new().url(url).heals());
    }
}

#[test]
fn legs_that_lie_are_repaired() {
    conformance::run(&Opener::new().url("mirror(fault:corrupt=0.05,seed=5@ram:, ram:)"));
    let backend = open("mirror(fault:corrupt=1@ram:, ram:)", 256);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 3, 100, 1).unwrap();
    // Whichever leg is asked first: the wrong one is found out by the second read.
    for _ in 0..10 {
        assert_version(&mut *lane, 3, 100, 1);
    }
    wait_until("the leg is right again", || backend.health() == Health::Good);
}

#[test]
fn a_leg_that_does_not_answer_stalls_nobody() {
    let backend = open(&format!("mirror({NEVER}, ram:)"), 256);
    let mut lane = backend.open_lane().unwrap();
    let mut other = backend.open_lane().unwrap();
    assert!(read(&mut *lane, 0, 100).bytes().iter().all(|byte| *byte == 0));
    write(&mut *lane, 0, 100, 1).unwrap();
    write(&mut *other, 50, 20, 2).unwrap();
    assert_version(&mut *lane, 0, 50, 1);
    assert_version(&mut *lane, 50, 20, 2);
    let part = PagePart::new(100, 60).unwrap();
    let answer = one(&mut *other, Op::ReadPart { page: PageId(55), part, buffer: Buffer::new(1) });
    assert_eq!(answer.result, Ok(()));
    assert_eq!(answer.buffer.unwrap().page(0)[part.range()], filled(1, 55, 2).page(0)[part.range()]);
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(0), count: 60 }).result, Ok(()));
    assert!(read(&mut *other, 0, 60).bytes().iter().all(|byte| *byte == 0));
    assert_eq!(backend.health(), Health::Degraded);
}

#[test]
fn a_leg_that_answers_late_is_brought_up_to_date() {
    let backend = open("mirror(fault:delay=1500ms@ram:, fault:die=200@ram:)", 64);
    let mut lane = backend.open_lane().unwrap();
    for version in 1..5 {
        write(&mut *lane, 10, 10, version).unwrap();
    }
    assert_eq!(backend.health(), Health::Degraded, "it has not answered");
    wait_until("everything is copied", || {
        // Its answers are seen by whoever polls.
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    // Now the other one goes.
    for _ in 0..200 {
        assert_version(&mut *lane, 10, 10, 4);
        if backend.health() != Health::Good {
            return;
        }
    }
    panic!("nothing died");
}

#[test]
fn what_is_full_is_said_and_what_is_gone_is_gone() {
    let backend = open("mirror(fault:full=3@ram:, ram:)", 64);
    let mut lane = backend.open_lane().unwrap();
    assert_eq!((1..3).map(|version| write(&mut *lane, 1, 1, version)).collect::<Vec<_>>(), [Ok(()), Ok(())]);
    assert_eq!(write(&mut *lane, 9, 1, 1), Ok(()));
    assert_eq!(write(&mut *lane, 9, 1, 2), Err(PoolError::PoolFull { server: 0 }));
    assert_version(&mut *lane, 1, 1, 2);

    let backend = open("mirror(fault:die=3@ram:, fault:die=4@ram:)", 64);
    let mut lane = backend.open_lane().unwrap();
    let ends: Vec<_> = (1..9).map(|version| write(&mut *lane, 1, 1, version)).collect();
    assert!(ends[0].is_ok() && ends.iter().any(|end| matches!(end, Err(PoolError::ServerGone { .. }))), "{ends:?}");
    assert!(matches!(ends.last(), Some(Err(PoolError::ServerGone { .. }))));
    assert_eq!(backend.health(), Health::Gone);
    assert!(backend.open_lane().is_err() && backend.clone_region().is_err());
}

#[test]
fn a_wrong_leg_is_found_when_the_pool_is_opened() {
    let url = "mirror(ram:, unix:/no/such/socket)";
    assert!(Opener::new().url(url).pages(9).open().is_err());
    let backend = Opener::new().url(url).degraded().pages(9).open().unwrap();
    assert_eq!(backend.health(), Health::Degraded);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 1, 8, 1).unwrap();
    assert_version(&mut *lane, 1, 8, 1);
    assert!(Opener::new().url("mirror(unix:/no/such, unix:/no/such/socket)").degraded().pages(9).open().is_err());
}

#[test]
fn a_snapshot_is_made_of_the_legs_that_hold_everything() {
    let opener = Opener::new().url("mirror(fault:die=30@ram:, ram:, spare=ram:)").pages(300);
    let backend = opener.open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    for version in 1..40 {
        write(&mut *lane, 0, 300, version).unwrap();
        let ticket = backend.clone_region().unwrap();
        assert_ne!(ticket.secrets[1], 0);
        let claimed = opener.claim(&ticket).unwrap();
        write(&mut *lane, 100, 100, 99).unwrap();
        let mut copy = claimed.open_lane().unwrap();
        assert_version(&mut *copy, 0, 300, version);
        assert!(opener.claim(&ticket).is_err(), "good once");
    }
}

const PAGES: u64 = 400;

/// What every page holds, by the version written last; operations on several lanes at a time, none of which meet on a page.
struct Model {
    versions: Vec<u64>,
    busy: Vec<bool>,
    /// By tag: first page, pages, and the version that is written (`None`: read, `Some(0)`: discarded).
    under_way: Vec<Option<(u64, u64, Option<u64>)>>,
}

impl Model {
    fn begin(&mut self, random: &mut Random, lanes: &mut [Box<dyn Lane>], version: u64) {
        let Some(tag) = self.under_way.iter().position(Option::is_none) else { return };
        let page = random.below(PAGES);
        let count = (1 + [0, 3, 40][random.below(3) as usize]).min(PAGES - page);
        let pages = page as usize..(page + count) as usize;
        if self.busy[pages.clone()].iter().any(|busy| *busy) {
            return;
        }
        self.busy[pages].fill(true);
        let lane = random.below(lanes.len() as u64) as usize;
        let (op, writes) = match random.below(8) {
            0 => (Op::Discard { page: PageId(page), count }, Some(0)),
            1..4 => (Op::Write { page: PageId(page), buffer: filled(count as usize, page, version) }, Some(version)),
            _ => (Op::Read { page: PageId(page), buffer: Buffer::new(count as usize) }, None),
        };
        self.under_way[tag] = Some((page, count, writes));
        submit(&mut *lanes[lane], tag as u64, op);
    }

    fn end(&mut self, completion: Completion) {
        let (page, count, writes) = self.under_way[completion.tag as usize].take().expect("it was submitted");
        assert_eq!(completion.result, Ok(()), "{count} pages from {page} on, {writes:?}");
        for index in 0..count {
            let at = (page + index) as usize;
            self.busy[at] = false;
            match (writes, &completion.buffer) {
                (Some(version), _) => self.versions[at] = version,
                (None, Some(buffer)) => {
                    let expected = match self.versions[at] {
                        0 => [0; PAGE_BYTES].to_vec(),
                        version => filled(1, at as u64, version).bytes().to_vec(),
                    };
                    assert!(buffer.page(index as usize) == expected, "page {at} is not version {}", self.versions[at]);
                }
                (None, None) => panic!("buffers always come back"),
            }
        }
    }
}

fn survive(url: &str, heals: bool, seed: u64, operations: u64) {
    let context = format!("FARFIELD_SEED={seed} {url} heals: {heals}");
    println!("{context}");
    let opener = Opener::new().url(url).pages(PAGES);
    let backend = if heals { opener.heals() } else { opener }.open().unwrap();
    let mut lanes: Vec<_> = (0..3).map(|_| backend.open_lane().unwrap()).collect();
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut model =
        Model { versions: vec![0; PAGES as usize], busy: vec![false; PAGES as usize], under_way: vec![None; 12] };
    let mut done = Vec::with_capacity(16);
    for version in 1..=operations {
        model.begin(&mut random, &mut lanes, version);
        let lane = random.below(3) as usize;
        lanes[lane].poll(&mut done);
        done.drain(..).for_each(|completion| model.end(completion));
        if version % 1500 == 0 {
            // A thread goes, another comes.
            while lanes[lane].in_flight() > 0 {
                lanes[lane].poll(&mut done);
                done.drain(..).for_each(|completion| model.end(completion));
            }
            lanes[lane] = backend.open_lane().unwrap();
        }
    }
    for lane in &mut lanes {
        while lane.in_flight() > 0 {
            lane.poll(&mut done);
            done.drain(..).for_each(|completion| model.end(completion));
        }
    }
    if url.contains("spare=ram:") {
        wait_until("the spare holds everything", || {
            lanes.iter_mut().for_each(|lane| {
                lane.poll(&mut Vec::new());
            });
            backend.health() == Health::Good
        });
    }
    if url.contains("die=30000") {
        // Now the leg from which it was copied goes.
        let mut version = operations;
        while backend.health() == Health::Good {
            version += 1;
            write(&mut *lanes[1], 7, 1, version).unwrap();
            model.versions[7] = version;
        }
    }
    for page in 0..PAGES {
        let buffer = read(&mut *lanes[0], page, 1);
        let version = model.versions[page as usize];
        let right = if version == 0 { vec![0; PAGE_BYTES] } else { filled(1, page, version).bytes().to_vec() };
        assert!(buffer.bytes() == right, "page {page} is not version {version} at the end: {context}");
    }
}

#[test]
fn random_deaths_lose_nothing() {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    let rounds = if std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1") { 300 } else { 2 };
    let seeds = given.map_or(1..=rounds, |seed| seed..=seed);
    for seed in seeds {
        let mut random = Random(seed << 20 | 1);
        let mut die = || random.below(4_000) + 1;
        for (url, heals) in [
            (format!("mirror(fault:die={}@ram:, ram:)", die()), false),
            (format!("mirror(fault:die=30000@ram:, fault:die={}@ram:, spare=ram:)", die()), true),
            (format!("mirror(fault:die={},corrupt=0.01,seed={seed}@ram:, ram:, spare=ram:)", die()), false),
            // The first spare dies while it is filled, or later; both legs do, one after the other.
            (
                format!("mirror(fault:die={}@ram:, fault:die=20000@ram:, ram:, spare=fault:die={}@ram:)", die(), die()),
                true,
            ),
            (format!("mirror(stripe(ram:,fault:die={}@ram:), fault:delay=3us@ram:)", die()), true),
        ] {
            survive(&url, heals, seed, 7_000);
        }
    }
}
