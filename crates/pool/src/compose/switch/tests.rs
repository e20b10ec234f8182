//! Guards against a switch that loses a write or brings back an old version, whatever is written,
//! dies, fills up or is cancelled meanwhile.
use super::{SwitchBackend, SwitchError, SwitchHost};
use crate::conformance::{self, Random};
use crate::trial::{PAGES, SILENT, SilentMember, assert_version, one, random_history, read, wait_until, write};
use crate::{Backend, Health, Op, PoolBuilder, PoolError};
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use farfield_core::PageId;
use std::sync::{Arc, Mutex};

fn side(url: &str, pages: u64) -> Arc<dyn Backend> {
    PoolBuilder::new().url(url).pages(pages).open().unwrap_or_else(|error| panic!("{url}: {error}"))
}

fn pool(url: &str, pages: u64) -> SwitchBackend {
    SwitchBackend::new(side(url, pages)).unwrap()
}

/// Wants a switch until it does not, and lets it take place or not.
struct Host {
    is_wanted: AtomicBool,
    commits: bool,
}

impl SwitchHost for Host {
    fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst)
    }

    fn run_exclusive(&self, act: &mut dyn FnMut() -> bool) {
        match self.commits {
            true => {
                act();
            }
            false => self.is_wanted.store(false, Ordering::SeqCst),
        }
    }
}

fn host(commits: bool) -> Host {
    Host { is_wanted: AtomicBool::new(true), commits }
}

fn switch(pool: &SwitchBackend, url: &str) -> Result<(), SwitchError> {
    pool.switch(side(url, pool.pages()), &host(true))
}

/// A switch that ends, at the latest, in the moment in which it would have taken place.
fn visit(pool: &SwitchBackend, url: &str) -> Result<(), SwitchError> {
    pool.switch(side(url, pool.pages()), &host(false))
}

/// A pool that is switched to and fro for as long as somebody has it.
fn restless(first: Arc<dyn Backend>) -> Arc<dyn Backend> {
    // What is claimed may hold anything: chunks that were never noted would not move.
    let pool = Arc::new(SwitchBackend::new(first).unwrap());
    assert!((0..pool.pages().div_ceil(64)).all(|chunk| pool.dirty_chunks.mark(chunk)));
    let weak = Arc::downgrade(&pool);
    std::thread::spawn(move || {
        for url in ["ram:", "fault:delay=30us@ram:", "fault:die=300@ram:"].iter().cycle() {
            let Some(pool) = weak.upgrade() else { return };
            let result = if url.contains("die") { visit(&pool, url) } else { switch(&pool, url) };
            let is_expected = matches!(result, Ok(()) | Err(SwitchError::New(_) | SwitchError::Cancelled));
            assert!(is_expected, "{url}: {result:?}");
        }
    });
    pool
}

#[test]
fn a_pool_conforms_before_during_and_after_switches() {
    conformance::run(&PoolBuilder::new().url("ram:").wrapped(|side| Arc::new(SwitchBackend::new(side).unwrap())));
    conformance::run(&PoolBuilder::new().url("ram:").wrapped(restless));
}

#[test]
fn a_switch_moves_all_pages_and_frees_the_source() {
    let pool = pool("ram:", 4000);
    let mut lane = pool.open_lane().unwrap();
    write(&mut *lane, 7, 100, 1).unwrap();
    write(&mut *lane, 3990, 10, 2).unwrap();
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(20), count: 40 }).result, Ok(()));
    let old = Arc::downgrade(&pool.stage().source);
    assert_eq!(switch(&pool, "lz:?size=1G"), Ok(()));
    assert_eq!(old.strong_count(), 0, "nobody has the old side any more");
    let how = pool.how();
    assert!(!how.is_empty(), "it is lz");
    assert_version(&mut *lane, 7, 13, 1);
    assert!(read(&mut *lane, 20, 40).bytes().iter().all(|byte| *byte == 0));
    assert_version(&mut *lane, 60, 47, 1);
    assert_version(&mut *lane, 3990, 10, 2);
    assert_eq!(pool.health(), Health::Good);
    let progress = pool.progress();
    assert_eq!((progress.is_active, progress.switches, progress.pages), (false, 1, 0));
}

#[test]
fn a_new_side_that_dies_or_is_full_changes_nothing() {
    for (url, error) in [("fault:die=40@ram:", None), ("fault:full=9@ram:", Some(PoolError::PoolFull { server: 0 }))] {
        let pool = pool("ram:", 1000);
        let mut lane = pool.open_lane().unwrap();
        (0..1000).step_by(10).for_each(|page| write(&mut *lane, page, 10, 2).unwrap());
        write(&mut *lane, 500, 20, 3).unwrap();
        match (switch(&pool, url), error) {
            (Err(SwitchError::New(found)), Some(error)) => assert_eq!(found, error, "{url}"),
            (Err(SwitchError::New(PoolError::ServerGone { .. })), None) => {}
            (other, _) => panic!("{url}: {other:?}"),
        }
        assert_version(&mut *lane, 500, 20, 3);
        write(&mut *lane, 510, 20, 4).unwrap();
        assert_version(&mut *lane, 510, 20, 4);
        assert_eq!((pool.health(), pool.progress().switches), (Health::Good, 0));
        assert_eq!(switch(&pool, "ram:"), Ok(()), "the next one is better");
        assert_version(&mut *lane, 510, 20, 4);
    }
}

#[test]
fn a_lane_that_is_opened_in_the_middle_has_both_sides_or_is_not_opened() {
    for is_new in [false, true] {
        let sides = [SilentMember::new(1000), SilentMember::new(1000)];
        let pool = Arc::new(SwitchBackend::new(sides[0].clone()).unwrap());
        let mut lane = pool.open_lane().unwrap();
        write(&mut *lane, 0, 100, 1).unwrap();
        /// Opens a lane just before the switch takes place, while one side is silent.
        struct Opens {
            pool: Arc<SwitchBackend>,
            silent: Arc<SilentMember>,
            error: Mutex<Option<PoolError>>,
        }
        impl SwitchHost for Opens {
            fn is_wanted(&self) -> bool {
                true
            }
            fn run_exclusive(&self, act: &mut dyn FnMut() -> bool) {
                self.silent.set_silent(true);
                *self.error.lock().unwrap() = self.pool.open_lane().err();
                self.silent.set_silent(false);
                act();
            }
        }
        let silent = sides[usize::from(is_new)].clone();
        let host = Opens { pool: pool.clone(), silent, error: Mutex::new(None) };
        let result = pool.switch(sides[1].clone(), &host);
        if is_new {
            assert_eq!(result, Err(SwitchError::New(SILENT)), "it is given up");
        } else {
            assert_eq!((result, *host.error.lock().unwrap()), (Ok(()), Some(SILENT)), "it is not lost");
        }
        assert_version(&mut *lane, 0, 100, 1);
        assert_version(&mut *pool.open_lane().unwrap(), 0, 100, 1);
    }
}

#[test]
fn pages_that_moved_before_the_source_died_are_right() {
    let pool = Arc::new(pool("fault:die=60@ram:", 64 * 64));
    let mut lane = pool.open_lane().unwrap();
    for chunk in 0..32 {
        write(&mut *lane, chunk * 64, 1, 1).unwrap();
    }
    let result = switch(&pool, "ram:");
    assert!(matches!(result, Err(SwitchError::Old(_))), "{result:?}");
    let mut had_moved = 0;
    for chunk in 0..32 {
        let op = Op::Read { page: PageId(chunk * 64), buffer: crate::Buffer::new(1) };
        match one(&mut *lane, op).result {
            Ok(()) => {
                assert_version(&mut *lane, chunk * 64, 1, 1);
                had_moved += 1;
            }
            Err(error) => assert!(matches!(error, PoolError::ServerGone { .. }), "{error}"),
        }
    }
    assert!((1..32).contains(&had_moved), "{had_moved}");
    assert!(matches!(switch(&pool, "ram:"), Err(SwitchError::Old(_))));
    assert!(!pool.progress().is_active);
}

#[test]
fn a_switch_ends_when_both_sides_die() {
    for (old, new) in [(40, 1), (60, 20), (60, 60), (90, 200)] {
        let pool = pool(&format!("fault:die={old}@ram:"), 64 * 64);
        let mut lane = pool.open_lane().unwrap();
        (0..32).for_each(|chunk| write(&mut *lane, chunk * 64, 1, 1).unwrap());
        let result = switch(&pool, &format!("fault:die={new}@ram:"));
        assert!(matches!(result, Err(SwitchError::New(_) | SwitchError::Old(_))), "{result:?}");
        let gone = |lane: &mut dyn crate::Lane| {
            let buffer = crate::Buffer::new(1);
            let result = one(lane, Op::Read { page: PageId(64 * 31), buffer }).result;
            matches!(result, Err(PoolError::ServerGone { .. }))
        };
        assert!((0..200).any(|_| gone(&mut *lane)), "{old} {new}");
    }
}

#[test]
fn a_switch_can_be_cancelled_and_only_one_goes_on() {
    let pool = Arc::new(pool("fault:delay=1ms@ram:", 64 * 500));
    let mut lane = pool.open_lane().unwrap();
    for chunk in 0..500 {
        write(&mut *lane, chunk * 64, 1, 1).unwrap();
    }
    let wanted = Arc::new(host(true));
    let (there, flag) = (pool.clone(), wanted.clone());
    let thread = std::thread::spawn(move || there.switch(side("ram:", there.pages()), &*flag));
    wait_until("something has moved", || {
        let progress = pool.progress();
        progress.is_active && progress.moved_pages > 0
    });
    assert_eq!(switch(&pool, "ram:"), Err(SwitchError::Busy));
    write(&mut *lane, 70, 5, 2).unwrap();
    wanted.is_wanted.store(false, Ordering::SeqCst);
    assert_eq!(thread.join().unwrap(), Err(SwitchError::Cancelled));
    assert_version(&mut *lane, 70, 5, 2);
    assert_version(&mut *lane, 64 * 499, 1, 1);
    assert_eq!(pool.progress(), super::SwitchProgress::default());
    let small = SwitchError::TooSmall { pages: 10, wanted: 64 * 500 };
    assert_eq!(pool.switch(side("ram:", 10), &*wanted), Err(small));
}

#[test]
fn a_lane_that_nobody_polls_moves_too() {
    let pool = pool("ram:", 1000);
    let mut idle = pool.open_lane().unwrap();
    let mut lane = pool.open_lane().unwrap();
    write(&mut *lane, 0, 100, 1).unwrap();
    let (page, buffer) = (PageId(3), crate::Buffer::new(9));
    let deadline = Duration::from_secs(9);
    let request =
        crate::LaneRequest { tag: 5, priority: crate::Priority::Demand, deadline, op: Op::Read { page, buffer } };
    idle.submit(request).unwrap();
    for url in ["lz:?size=1G", "ram:", "fault:delay=50us@ram:"] {
        assert_eq!(switch(&pool, url), Ok(()));
    }
    assert_eq!(idle.in_flight(), 1);
    let mut done = Vec::with_capacity(1);
    assert_eq!(idle.poll(&mut done), 1);
    assert_eq!((done[0].tag, done[0].result, idle.in_flight()), (5, Ok(()), 0));
    assert_version(&mut *idle, 3, 9, 1);
}

#[test]
fn random_switches_lose_nothing() {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    let rounds = if std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1") { 200 } else { 1 };
    let folder = std::env::temp_dir();
    for seed in given.map_or(1..=rounds, |seed| seed..=seed) {
        let context = format!("FARFIELD_SEED={seed}");
        println!("{context}");
        let pool = Arc::new(pool("ram:", PAGES));
        let (there, stop) = (pool.clone(), Arc::new(AtomicBool::new(false)));
        let (ended, ssd) = (stop.clone(), format!("ssd:{}?size=8M&io=pread", folder.display()));
        let thread = std::thread::spawn(move || {
            let mut random = Random(seed << 20 | 1);
            let mut done = 0;
            while !ended.load(Ordering::SeqCst) || done < 3 {
                let die = random.below(2000) + 1;
                let url = match random.below(8) {
                    0 => ssd.clone(),
                    1 => "lz:?size=1G".to_owned(),
                    2 => "mirror(ram:,fault:delay=20us@ram:)".to_owned(),
                    3 => format!("fault:die={die}@ram:"),
                    4 => format!("fault:full={die}@ram:"),
                    5 => format!("mirror(fault:die={die}@ram:,ram:)"),
                    6 => "stripe(ram:,fault:delay=20us@ram:)".to_owned(),
                    _ => "fault:corrupt=0.01@ram:".to_owned(),
                };
                // What dies, lies or is full comes and fails, or comes and has to go before it does so.
                let frail = url.starts_with("fault:");
                let result = if frail { visit(&there, &url) } else { switch(&there, &url) };
                match result {
                    Ok(()) => assert!(!frail),
                    Err(SwitchError::Cancelled | SwitchError::New(_)) => assert!(frail, "{url}: {result:?}"),
                    Err(error) => panic!("{url}: {error}"),
                }
                done += 1;
            }
            done
        });
        let (mut lanes, model) = random_history(&*pool, seed, 30_000);
        stop.store(true, Ordering::SeqCst);
        println!("{} switches", thread.join().unwrap());
        model.check(&mut *lanes[1], &context);
    }
}
