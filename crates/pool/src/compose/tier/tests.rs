//! Guards against a tiered pool that gives an old version, or an error while there is room,
//! whatever moves, dies or is full.
use super::TierBackend;
use crate::conformance::Random;
use crate::redundant::members::PoolMember;
use crate::trial::{NEVER, TEST_TIMEOUT, assert_version, filled, one, open, read, survive, wait_until, write};
use crate::{
    Backend, Buffer, Health, Lane, LaneRequest, Op, PagePart, PoolBuilder, PoolError, Priority, TierPages, conformance,
};
use core::time::Duration;
use farfield_core::PageId;
use std::time::Instant;

/// Of two pools in memory, the first with room for so many pages.
fn tiered(first_pages: u64, pages: u64) -> TierBackend {
    let member = |server: u16, url: String| PoolMember { backend: Some(open(&url, pages)), leaves: 1, server };
    let members = vec![member(0, format!("ram:?size={}K", first_pages * 4)), member(1, "ram:".to_owned())];
    TierBackend::new(members, pages, true).unwrap()
}

fn held(backend: &TierBackend) -> Vec<u64> {
    backend.table.counts().0
}

/// Nothing is left to move or to give back, nor is anything on its way; and what is counted is what the words say.
fn settle(backend: &TierBackend, lane: &mut dyn Lane) {
    let is_still = || {
        let mut by_words = vec![0; backend.table.members.len()];
        let words = (0..backend.table.pages).map(|page| backend.table.word(page));
        let is_still = words.fold(true, |is_still, word| {
            word.copies().iter().for_each(|tier| by_words[tier] += 1);
            is_still && word.claimed().is_none() && word.garbage().is_empty()
        });
        is_still && by_words == held(backend)
    };
    wait_until("all is where it belongs", || {
        lane.poll(&mut Vec::new());
        is_still() && !backend.table.has_work()
    });
}

#[test]
fn tiers_conform() {
    for url in [
        "tier(ram:, ram:)",
        "tier(ram:?size=400K, ram:)",
        "tier(ram:?size=8K, fault:delay=5us@ram:?size=1M, stripe(ram:, ram:))",
        "tier(lz:?size=16M, fault:delay=20us@ram:)",
        "mirror(tier(ram:?size=1M, ram:), fault:die=900@tier(ram:?size=64K, ram:))",
        "tier(ram:?size=256K, ec(2,1, ram:, ram:, ram:))",
    ] {
        conformance::run(&PoolBuilder::new().url(url));
        conformance::run(&PoolBuilder::new().url(url).repair_thread());
    }
}

#[test]
fn what_is_new_is_in_front_and_what_is_old_moves_on() {
    let backend = tiered(160, 4096);
    let mut lane = backend.open_lane().unwrap();
    let mut last = 0;
    // How much fits it learns when it is full, and what others gave back in that moment it learns next time.
    wait_until("the first tier is full but for its reserve", || {
        last += 1;
        for page in (0..1024).step_by(8) {
            write(&mut *lane, page, 8, last).unwrap();
        }
        settle(&backend, &mut *lane);
        let counts = held(&backend);
        assert!(counts[0] <= 160 && counts[0] + counts[1] == 1024, "{counts:?}");
        last >= 3 && (64..=150).contains(&counts[0])
    });
    // What is written again and again is in front nearly always, while everything else passes through.
    let mut in_front = 0;
    for version in 4..40 {
        write(&mut *lane, 40, 16, version).unwrap();
        write(&mut *lane, 64 + version * 16, 16, version).unwrap();
        settle(&backend, &mut *lane);
        in_front += u32::from((40..56).all(|page| backend.table.word(page).at() == Some(0)));
    }
    assert!(in_front >= 18, "in {in_front} of 36 rounds");
    assert!((64..256).any(|page| backend.table.word(page).at() == Some(1)));
    assert_version(&mut *lane, 40, 16, 39);
    assert_version(&mut *lane, 64 + 39 * 16, 16, 39);
    assert_version(&mut *lane, 0, 40, last);
    assert!(backend.how().contains("pages in tier 2"));
    one(&mut *lane, Op::Discard { page: PageId(0), count: 4096 });
    settle(&backend, &mut *lane);
    assert_eq!(held(&backend), [0, 0], "all tiers have their memory back");
}

/// The pages that a tier has, by the words.
fn pages_by_words(backend: &TierBackend, tier: usize) -> Vec<u64> {
    (0..backend.table.pages).filter(|page| backend.table.word(*page).at() == Some(tier)).collect()
}

fn named_pages(pages: &TierPages) -> Vec<u64> {
    pages.runs().iter().flat_map(|(first, count)| *first..first + count).collect()
}

#[test]
fn the_pages_of_a_tier_are_named_as_they_are_and_their_loss_is_noticed() {
    let backend = tiered(160, 4096);
    let mut lane = backend.open_lane().unwrap();
    let places = backend.places().unwrap();
    assert_eq!(places.tiers(), 2);
    let mut random = Random(3);
    for version in 1..200u64 {
        let before: Vec<TierPages> = (0..2).map(|tier| places.pages_at(tier, 4096).unwrap()).collect();
        let old = pages_by_words(&backend, 0);
        let page = random.below(1000);
        match random.below(4) {
            0 => {
                one(&mut *lane, Op::Discard { page: PageId(page), count: 1 + random.below(8) });
            }
            _ => write(&mut *lane, page, 1 + random.below(8) as usize, version).unwrap(),
        }
        settle(&backend, &mut *lane);
        for tier in 0..2 {
            let (named, right) = (places.pages_at(tier, 4096).unwrap(), pages_by_words(&backend, tier));
            assert_eq!(named_pages(&named), right, "version {version}");
            assert!(places.are_kept(&named));
            assert!(right.iter().all(|page| places.tier_of(PageId(*page)) == Some(tier)));
            let runs = named.runs().len();
            assert!(places.pages_at(tier, runs).is_some());
            assert!(runs == 0 || places.pages_at(tier, runs - 1).is_none());
        }
        let left = old.iter().any(|page| places.tier_of(PageId(*page)) != Some(0));
        assert!(!left || !places.are_kept(&before[0]), "a page has left, and its copy was given back");
    }
    assert_eq!(places.tier_of(PageId(4096)), None);
}

#[test]
fn what_the_first_tier_cannot_keep_goes_to_the_next_at_once() {
    // Sixteen megabytes of noise and more.
    let backend = PoolBuilder::new().url("tier(lz:?size=16M, ram:)").pages(8192).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let (mut random, mut noise) = (Random(5), Buffer::new(64));
    let mut fill = |buffer: &mut Buffer| {
        buffer
            .bytes_mut()
            .as_chunks_mut::<8>()
            .0
            .iter_mut()
            .for_each(|word| *word = random.below(u64::MAX).to_le_bytes());
        buffer.seal();
    };
    fill(&mut noise);
    for page in (0..8192).step_by(64) {
        let done = one(&mut *lane, Op::Write { page: PageId(page), buffer: noise });
        assert_eq!(done.result, Ok(()));
        noise = done.buffer.unwrap();
    }
    assert!((0..8192).step_by(64).all(|page| read(&mut *lane, page, 64).bytes() == noise.bytes()));
    // What compressed well, and is there, does not any more.
    for page in (0..8192).step_by(64) {
        write(&mut *lane, page, 64, 9).unwrap();
    }
    for page in (0..8192).step_by(64) {
        fill(&mut noise);
        let done = one(&mut *lane, Op::Write { page: PageId(page), buffer: noise });
        assert_eq!(done.result, Ok(()));
        noise = done.buffer.unwrap();
        assert!(read(&mut *lane, page, 64).bytes() == noise.bytes(), "page {page}");
    }
}

#[test]
fn it_is_full_when_the_last_tier_is() {
    // A hundred pages and what is left behind take it less than 400 operations: it is not asked again and again.
    let backend = open("tier(ram:?size=128K, fault:die=400@ram:?size=256K)", 256);
    let mut lane = backend.open_lane().unwrap();
    let mut stored = 0;
    while write(&mut *lane, stored, 4, 1).is_ok() {
        stored += 4;
    }
    assert!(stored >= 92, "{stored} pages");
    assert_eq!(write(&mut *lane, stored, 4, 2), Err(PoolError::PoolFull { server: 1 }));
    assert!(read(&mut *lane, stored, 4).bytes().iter().all(|byte| *byte == 0), "nothing of it was stored");
    assert_version(&mut *lane, 0, stored as usize, 1);
    assert_eq!(write(&mut *lane, 40, 8, 3), Ok(()), "what is there can be written");
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(0), count: 40 }).result, Ok(()));
    wait_until("there is room again", || write(&mut *lane, stored, 4, 2).is_ok());
    assert_version(&mut *lane, 40, 8, 3);
    assert_version(&mut *lane, 48, stored as usize - 48, 1);
    assert_version(&mut *lane, stored, 4, 2);
}

#[test]
fn a_tier_that_is_gone_takes_its_own_pages_and_no_others() {
    for (url, lost, kept) in [
        ("tier(fault:die=40@ram:?size=64K, ram:)", "first", 1),
        ("tier(ram:?size=64K, fault:die=40@ram:)", "second", 0),
    ] {
        let backend = PoolBuilder::new().url(url).pages(256).open().unwrap();
        let mut lane = backend.open_lane().unwrap();
        for page in 0..32 {
            write(&mut *lane, page, 1, 1).unwrap();
        }
        let mut end = |page| one(&mut *lane, Op::Read { page: PageId(page), buffer: Buffer::new(1) }).result;
        let mut looks = 0;
        while (0..32).all(|page| end(page).is_ok()) {
            looks += 1;
            assert!(looks < 100, "it never dies");
        }
        let ends: Vec<_> = (0..32).map(&mut end).collect();
        let gone = |end: &&Result<(), PoolError>| matches!(end, Err(PoolError::ServerGone { server, .. }) if usize::from(*server) == 1 - kept);
        let (gone, good) = (ends.iter().filter(gone).count(), ends.iter().filter(|end| end.is_ok()).count());
        assert!(gone > 0 && good > 0 && gone + good == 32, "the {lost} tier is gone: {ends:?}");
        assert_eq!(backend.health(), Health::Degraded);
        // What is lost can be written again, as far as there is room.
        let page = ends.iter().position(Result::is_err).unwrap() as u64;
        one(&mut *lane, Op::Discard { page: PageId(0), count: 32 });
        assert_eq!(write(&mut *lane, page, 1, 2), Ok(()));
        assert_version(&mut *lane, page, 1, 2);
        assert!(backend.open_lane().is_ok());
        let claimed = PoolBuilder::new().url(url).claim(&backend.clone_region().unwrap()).unwrap();
        assert_eq!(claimed.health(), Health::Degraded);
        assert_version(&mut *claimed.open_lane().unwrap(), page, 1, 2);
    }
    let backend = PoolBuilder::new().url("tier(fault:die=3@ram:, fault:die=3@ram:)").pages(64).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let ends: Vec<_> = (1..20).map(|version| write(&mut *lane, 1, 2, version)).collect();
    assert!(matches!(ends.last(), Some(Err(PoolError::ServerGone { .. }))), "{ends:?}");
    assert_eq!(backend.health(), Health::Gone);
    assert!(backend.open_lane().is_err() && backend.clone_region().is_err());
}

#[test]
fn a_tier_that_does_not_answer_stalls_its_own_pages_only() {
    let backend = open(&format!("tier(ram:?size=64K, {NEVER})"), 64);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 12, 1).unwrap();
    assert_version(&mut *lane, 0, 12, 1);
    let part = PagePart::new(100, 60).unwrap();
    let answer = one(&mut *lane, Op::ReadPart { page: PageId(5), part, buffer: Buffer::new(1) });
    assert_eq!(answer.buffer.unwrap().page(0)[part.range()], filled(1, 5, 1).page(0)[part.range()]);
    // There is no room for all of these, so some go where nobody answers.
    let deadline = Duration::from_millis(20);
    for page in (20..60).step_by(4) {
        let op = Op::Write { page: PageId(page), buffer: filled(4, page, 1) };
        lane.submit(LaneRequest { tag: page, priority: Priority::Demand, deadline, op }).unwrap();
    }
    let mut done = Vec::with_capacity(16);
    while lane.in_flight() > 0 {
        lane.poll(&mut done);
        lane.wait(deadline);
    }
    assert_eq!(done.len(), 10);
    for completion in &done {
        match completion.result {
            Ok(()) => assert_version(&mut *lane, completion.tag, 4, 1),
            Err(error) => {
                assert!(matches!(error, PoolError::TimedOut { server: 1, .. }));
                assert!(read(&mut *lane, completion.tag, 4).bytes().iter().all(|byte| *byte == 0), "as it was");
            }
        }
    }
    assert!(done.iter().any(|completion| completion.result.is_err()));
    // Whoever moves pages finds nobody there, and keeps snapshots waiting no longer than that takes.
    assert!(backend.clone_region().is_ok());
    // Some of these are perhaps on their way to where nobody answers.
    for version in 2..20 {
        assert_eq!(write(&mut *lane, 0, 12, version), Ok(()));
        assert_version(&mut *lane, 0, 12, version);
    }
}

#[test]
fn a_snapshot_is_what_was_written_when_it_was_made() {
    let builder = PoolBuilder::new().url("tier(ram:?size=256K, ram:?size=1M, stripe(ram:, ram:))").pages(1000);
    for builder in [builder.clone(), builder.repair_thread()] {
        let backend = builder.open().unwrap();
        let mut lane = backend.open_lane().unwrap();
        for version in 1..20 {
            for page in (0..1000).step_by(50) {
                write(&mut *lane, page, 50, version).unwrap();
            }
            let ticket = backend.clone_region().unwrap();
            let claimed = builder.claim(&ticket).unwrap();
            write(&mut *lane, 100, 100, 99).unwrap();
            let mut copy = claimed.open_lane().unwrap();
            assert_version(&mut *copy, 0, 1000, version);
            write(&mut *copy, 0, 500, 55).unwrap();
            assert_version(&mut *copy, 0, 500, 55);
            assert_version(&mut *copy, 500, 500, version);
            assert_version(&mut *lane, 100, 100, 99);
            assert!(builder.claim(&ticket).is_err(), "good once");
        }
    }
}

#[test]
fn random_histories_lose_nothing() {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    let rounds = if std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1") { 100 } else { 2 };
    let seeds = given.map_or(1..=rounds, |seed| seed..=seed);
    for seed in seeds {
        let mut random = Random(seed << 20 | 1);
        for _ in 0..3 {
            let mut size = |most: u64| 4 * (1 + random.below(most));
            let urls = [
                format!("tier(ram:?size={}K, ram:)", size(200)),
                format!("tier(ram:?size={}K, ram:?size={}K, ram:)", size(100), size(200)),
                format!("tier(fault:delay=3us@ram:?size={}K, stripe(ram:, ram:))", size(200)),
                format!("tier(ram:?size={}K, fault:delay=30us@ram:)", size(20)),
                format!("tier(fault:full={}@ram:, ram:)", size(300)),
            ];
            for url in urls {
                survive(&url, random.below(2) == 0, seed, 2_000);
            }
        }
    }
}

#[test]
fn threads_that_write_and_read_see_their_own_versions() {
    let backend = tiered(100, 512);
    // Who moves pages may get no processor for a while.
    let has_moved = || backend.table.counts().1 > 100;
    std::thread::scope(|scope| {
        for me in 0..3 {
            let (backend, has_moved) = (&backend, &has_moved);
            scope.spawn(move || {
                let mut lane = backend.open_lane().unwrap();
                let (mut random, mut versions) = (Random(me << 32 | 5), [0; 128]);
                let started = Instant::now();
                for version in
                    (1..).take_while(|version| *version < 3000 || !has_moved() && started.elapsed() < TEST_TIMEOUT)
                {
                    let page = random.below(124);
                    let count = 1 + random.below(4);
                    let pages = page as usize..(page + count) as usize;
                    if random.below(2) == 0 {
                        write(&mut *lane, me * 128 + page, count as usize, version).unwrap();
                        versions[pages].fill(version);
                    } else if let Some(first) = pages.clone().find(|page| versions[*page] != 0) {
                        assert_version(&mut *lane, me * 128 + first as u64, 1, versions[first]);
                    }
                }
            });
        }
    });
    let mut lane = backend.open_lane().unwrap();
    settle(&backend, &mut *lane);
    assert!(has_moved(), "{} pages", backend.table.counts().1);
}
