//! Guards against a mirror that gives an old version, or an error while one member lives: whatever
//! dies, lies or is late, and whoever copies.
use super::MirrorBackend;
use super::copier::Copier;
use super::lane::MirrorScheme;
use super::replica_map::{InitialContents, ReplicaMap};
use crate::conformance::Random;
use crate::dirty_chunks::DirtyChunks;
use crate::redundant::members::PoolMember;
use crate::redundant::scheme::Scheme;
use crate::trial::{self, NEVER, SilentMember, assert_version, filled, open, read, survive, wait_until, write};
use crate::{Backend, Health, LaneRequest, Op, PoolBuilder, PoolError, Priority, conformance};
use core::time::Duration;
use farfield_core::{MemberSet, PageId};
use std::sync::Arc;
use std::time::Instant;

#[test]
fn mirrors_conform() {
    for url in [
        "mirror(ram:, ram:)",
        "mirror(ram:, fault:delay=20us@ram:, stripe(ram:, ram:), spare=ram:)",
        "mirror(fault:die=2000@ram:, ram:)",
        "stripe(mirror(ram:, ram:), mirror(fault:die=900@ram:, ram:))",
    ] {
        conformance::run(&PoolBuilder::new().url(url));
        conformance::run(&PoolBuilder::new().url(url).repair_thread());
    }
}

#[test]
fn what_is_not_protected_is_counted() {
    trial::says_what_is_not_protected("mirror(fault:die=40@ram:,ram:)", "mirror(fault:die=40@ram:,ram:,spare=ram:)");
}

#[test]
fn legs_that_lie_are_repaired() {
    conformance::run(&PoolBuilder::new().url("mirror(fault:corrupt=0.05,seed=5@ram:, ram:)"));
    let backend = open("mirror(fault:corrupt=1@ram:, ram:)", 256);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 3, 100, 1).unwrap();
    // Whichever member is asked first: the wrong one is found out by the second read.
    for _ in 0..10 {
        assert_version(&mut *lane, 3, 100, 1);
    }
    wait_until("the leg is right again", || backend.health() == Health::Good);
}

#[test]
fn a_leg_that_does_not_answer_stalls_nobody() {
    trial::goes_on_degraded(&format!("mirror({NEVER}, ram:)"));
}

#[test]
fn a_leg_that_answers_late_is_brought_up_to_date() {
    trial::brings_up_to_date("mirror(fault:delay=1500ms@ram:, fault:die=200@ram:)");
}

#[test]
fn the_only_leg_that_holds_a_chunk_may_be_slow() {
    let backend = open("mirror(fault:delay=1500ms@ram:, fault:die=200@ram:, spare=ram:)", 64);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 10, 10, 1).unwrap();
    wait_until("the slow leg has it, too", || {
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    // The other one goes, and the spare has nothing yet.
    while backend.health() == Health::Good {
        assert_version(&mut *lane, 10, 10, 1);
    }
    assert_eq!(write(&mut *lane, 12, 3, 2), Ok(()), "both legs live");
    assert_version(&mut *lane, 12, 3, 2);
    assert_version(&mut *lane, 10, 2, 1);
}

#[test]
fn a_leg_that_falls_silent_before_the_other_has_what_it_missed_is_waited_for() {
    let sides = [SilentMember::new(400), SilentMember::new(400)];
    let members = sides.iter().map(|side| PoolMember { backend: Some(side.clone()), leaves: 1, server: 0 }).collect();
    let backend = MirrorBackend::new(members, vec![], 400, InitialContents::Zeros, None, false).unwrap();
    trial::waits_for_the_only_one(&backend, &sides);
}

#[test]
fn a_leg_is_mended_at_once_however_far_behind_in_the_region_the_pages_are() {
    let backend = open("mirror(fault:corrupt=1,seed=3@ram:, ram:)", 1 << 36);
    let mut lane = backend.open_lane().unwrap();
    let page = (1 << 36) - 64;
    write(&mut *lane, page, 64, 1).unwrap();
    for _ in 0..10 {
        assert_version(&mut *lane, page, 64, 1);
    }
    wait_until("the leg is right again", || backend.health() == Health::Good);
}

#[test]
fn a_spare_lacks_what_is_first_written_by_those_who_did_not_see_it_come() {
    let member = || PoolMember { backend: Some(open("ram:", 64)), leaves: 1, server: 0 };
    let table = ReplicaMap::new(vec![member(), member()], vec![member()].into(), 64, InitialContents::Zeros).unwrap();
    let seen = MemberSet::one(0);
    table.mark_failed(1);
    // Whoever repairs looks at everything: nothing was ever written.
    assert_eq!(table.repairable(), MemberSet::one(2));
    table.set_repaired(2, table.missed_generation(2));
    assert!(table.is_whole(2));
    assert!(table.begin_write(0, 1, seen));
    assert!(!table.is_whole(2), "it lacks the chunk");
    assert!(table.end_write(0, 1, seen, seen));
    assert_eq!(table.repairable(), MemberSet::one(2));
}

#[test]
fn what_was_never_written_can_be_read_from_a_leg_that_came_later() {
    let member = || PoolMember { backend: Some(open("ram:", 128)), leaves: 1, server: 0 };
    let spare = ReplicaMap::new(vec![member(), member()], vec![member()].into(), 128, InitialContents::Zeros).unwrap();
    spare.mark_failed(0);
    spare.mark_failed(1);
    assert_eq!(spare.valid(0, 128, spare.active()), MemberSet::one(2));
    // A lane that is not moved back yet when the old side of a switch is given up.
    let pair =
        ReplicaMap::dual_write(open("ram:", 128), open("ram:", 128), Arc::new(DirtyChunks::new(2).unwrap())).unwrap();
    pair.admit();
    pair.set_authoritative(Some(ReplicaMap::NEW));
    pair.mark_failed(ReplicaMap::OLD);
    assert_eq!(pair.valid(64, 64, pair.active()), MemberSet::one(ReplicaMap::NEW));
    assert!(pair.keeps(64, 64, pair.active()));
}

#[test]
fn a_leg_that_comes_to_lead_lacks_what_it_was_not_asked_for() {
    let (side, dirty) = (|| open("ram:", 64), DirtyChunks::new(1).unwrap());
    let table = ReplicaMap::dual_write(side(), side(), Arc::new(dirty)).unwrap();
    table.admit();
    let (old, both) = (MemberSet::one(ReplicaMap::OLD), MemberSet::first(2));
    assert!(table.begin_write(0, 1, both) && table.end_write(0, 1, both, both));
    table.set_repaired(ReplicaMap::NEW, table.missed_generation(ReplicaMap::NEW));
    assert!(table.is_whole(ReplicaMap::NEW));
    // Whoever writes chose the members before the new one was admitted, and was delayed.
    assert!(table.begin_write(0, 1, old));
    table.set_authoritative(Some(ReplicaMap::NEW));
    assert!(table.end_write(0, 1, old, old), "the old leg has it");
    assert!(!table.is_whole(ReplicaMap::NEW) && table.is_whole(ReplicaMap::OLD));
    assert_eq!(table.valid(0, 1, both), old);
    // One that was asked and has not got it decides.
    assert!(table.begin_write(0, 1, both));
    table.set_authoritative(Some(ReplicaMap::OLD));
    assert!(!table.end_write(0, 1, both, MemberSet::one(ReplicaMap::NEW)));
}

#[test]
fn a_copy_that_was_read_while_a_write_was_under_way_says_nothing_of_its_source() {
    let torn = Err(PoolError::Corrupt { page: PageId(3), server: 0 });
    for is_written in [true, false] {
        let (side, dirty) = (|| open("ram:", 64), DirtyChunks::new(1).unwrap());
        dirty.mark(0);
        let table = ReplicaMap::dual_write(side(), side(), Arc::new(dirty)).unwrap();
        table.admit();
        let (old, both) = (MemberSet::one(ReplicaMap::OLD), MemberSet::first(2));
        let mut copier = Copier::new(1);
        let Some((job, (ReplicaMap::OLD, Op::Read { buffer, .. }))) = copier.start(&table, both, both) else {
            panic!("the old leg is read");
        };
        if is_written {
            assert!(table.begin_write(3, 1, both));
        }
        assert!(copier.on_end(&table, job, torn, Some(buffer)).is_none());
        assert!(!copier.is_busy());
        if is_written {
            assert!(table.end_write(3, 1, both, both));
            assert_eq!((table.failed(), table.cause(), table.valid(0, 64, both)), (MemberSet(0), None, old));
        } else {
            assert_eq!((table.failed(), table.cause()), (MemberSet::one(ReplicaMap::NEW), torn.err()));
        }
    }
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
    assert!(PoolBuilder::new().url(url).pages(9).open().is_err());
    let backend = PoolBuilder::new().url(url).degraded().pages(9).open().unwrap();
    assert_eq!(backend.health(), Health::Degraded);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 1, 8, 1).unwrap();
    assert_version(&mut *lane, 1, 8, 1);
    assert!(PoolBuilder::new().url("mirror(unix:/no/such, unix:/no/such/socket)").degraded().pages(9).open().is_err());
}

#[test]
fn a_snapshot_is_made_of_the_legs_that_hold_everything() {
    let builder = PoolBuilder::new().url("mirror(fault:die=30@ram:, ram:, spare=ram:)").pages(300);
    let backend = builder.open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    for version in 1..40 {
        write(&mut *lane, 0, 300, version).unwrap();
        let ticket = backend.clone_region().unwrap();
        assert_ne!(ticket.secrets[1], 0);
        let claimed = builder.claim(&ticket).unwrap();
        write(&mut *lane, 100, 100, 99).unwrap();
        let mut copy = claimed.open_lane().unwrap();
        assert_version(&mut *copy, 0, 300, version);
        assert!(builder.claim(&ticket).is_err(), "good once");
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
        for (url, repairs) in [
            (format!("mirror(fault:die={}@ram:, ram:)", die()), false),
            (format!("mirror(fault:die=last@ram:, fault:die={}@ram:, spare=ram:)", die()), true),
            (format!("mirror(fault:die={},corrupt=0.01,seed={seed}@ram:, ram:, spare=ram:)", die()), false),
            // The first spare dies while it is filled, or later; both members do, one after the
            // other.
            (
                format!("mirror(fault:die={}@ram:, fault:die=20000@ram:, ram:, spare=fault:die={}@ram:)", die(), die()),
                true,
            ),
            (format!("mirror(stripe(ram:,fault:die={}@ram:), fault:delay=3us@ram:)", die()), true),
        ] {
            survive(&url, repairs, seed, 7_000);
        }
    }
}

/// A mirror of these; without a thread it is repaired by who polls a lane.
fn mirror(sides: &[Arc<SilentMember>], spares: &[Arc<SilentMember>], repairs: bool) -> MirrorBackend {
    let member = |side: &Arc<SilentMember>| PoolMember { backend: Some(side.clone()), leaves: 1, server: 0 };
    let spares: Vec<_> = spares.iter().map(member).collect();
    MirrorBackend::new(sides.iter().map(member).collect(), spares, 400, InitialContents::Zeros, None, repairs).unwrap()
}

fn sides<const COUNT: usize>() -> [Arc<SilentMember>; COUNT] {
    core::array::from_fn(|_| SilentMember::new(400))
}

/// How many random histories.
fn rounds(few: u64, many: u64) -> u64 {
    if std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1") { many } else { few }
}

#[test]
fn lanes_that_stall_in_turns_cost_no_operation_and_no_leg_while_all_legs_live() {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in given.map_or(1..=rounds(2, 60), |seed: u64| seed..=seed) {
        println!("FARFIELD_SEED={seed}");
        let sides = sides::<2>();
        let backend = mirror(&sides, &[], seed % 2 == 0);
        backend.set_write_timeout(Some(Duration::from_millis(10)));
        trial::lanes_stall_in_turns(&backend, &sides, seed, 3_200);
        assert!(backend.table.failed().is_empty(), "FARFIELD_SEED={seed}");
    }
}

#[test]
fn what_nobody_answers_ends_in_time() {
    for wait in [Some(Duration::from_millis(10)), None] {
        let sides = sides::<2>();
        let backend = mirror(&sides, &[], false);
        backend.set_write_timeout(wait);
        trial::ends_in_time_without_an_answer(&backend, &sides);
    }
}

#[test]
fn a_leg_that_does_not_take_copies_is_read_all_the_same_and_never_lost_while_it_alone_holds_something() {
    let sides = sides::<2>();
    let backend = mirror(&sides, &[], false);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 200, 1).unwrap();
    // The first member lacks one chunk, the second another.
    sides[0].set_holds_changes(true);
    assert!(backend.table.suspect(0, 1, 0) && backend.table.suspect(64, 1, 1));
    wait_until("the copy is late", || {
        lane.poll(&mut Vec::new());
        backend.table.is_lagging(0)
    });
    let started = Instant::now();
    while started.elapsed() < 3 * MirrorScheme::REPAIR_DEADLINE {
        assert_version(&mut *lane, 0, 200, 1);
    }
    assert!(backend.table.failed().is_empty());
    assert_eq!(backend.health(), Health::Degraded);
    sides[0].set_holds_changes(false);
    wait_until("both hold everything", || {
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    backend.table.mark_failed(1);
    assert_version(&mut *lane, 0, 200, 1);
}

#[test]
fn a_silent_leg_makes_place_for_a_spare_when_the_others_can_do_without_it() {
    let [silent, other, spare] = sides::<3>();
    let backend = mirror(&[silent.clone(), other.clone()], std::slice::from_ref(&spare), false);
    backend.set_write_timeout(Some(Duration::from_millis(10)));
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 200, 1).unwrap();
    // The other one lacks something, which the silent one has.
    other.set_holds_changes(true);
    assert!(backend.table.suspect(64, 1, 1));
    silent.set_silent(true);
    let op = Op::Write { page: PageId(64), buffer: filled(1, 64, 2) };
    let brief = Duration::from_millis(200);
    let ended = trial::one_within(&mut *lane, op, brief).result;
    assert!(matches!(ended, Err(PoolError::TimedOut { .. })), "{ended:?}");
    let started = Instant::now();
    while started.elapsed() < 10 * brief {
        lane.poll(&mut Vec::new());
        assert!(backend.table.failed().is_empty(), "it alone has it");
    }
    silent.set_silent(false);
    other.set_holds_changes(false);
    wait_until("both hold everything", || {
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    // Now the other one has it all.
    silent.set_silent(true);
    let op = Op::Write { page: PageId(64), buffer: filled(1, 64, 3) };
    assert_eq!(trial::one_within(&mut *lane, op, brief).result, Ok(()));
    wait_until("the spare has taken its seat, and holds everything", || {
        lane.poll(&mut Vec::new());
        backend.table.failed() == MemberSet::one(0) && backend.health() == Health::Good
    });
    other.set_silent(true);
    assert_version(&mut *lane, 64, 1, 3);
    assert_version(&mut *lane, 0, 64, 1);
}

#[test]
fn a_mirror_that_waits_for_all_counts_a_write_only_when_all_have_it() {
    let sides = sides::<2>();
    let backend = mirror(&sides, &[], false);
    backend.set_write_timeout(None);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 10, 1).unwrap();
    sides[1].set_silent(true);
    let write_within = |lane: &mut dyn crate::Lane, version| {
        let op = Op::Write { page: PageId(3), buffer: filled(1, 3, version) };
        trial::one_within(lane, op, Duration::from_millis(1200)).result
    };
    assert!(matches!(write_within(&mut *lane, 2), Err(PoolError::TimedOut { .. })));
    assert!(matches!(write_within(&mut *lane, 3), Err(PoolError::TimedOut { .. })), "it is asked again");
    assert!(backend.table.failed().is_empty());
    assert!(read(&mut *lane, 0, 1).bytes() == filled(1, 0, 1).bytes(), "what one has can be read");
    sides[1].set_silent(false);
    wait_until("both hold everything", || {
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    assert_eq!(write(&mut *lane, 3, 1, 4), Ok(()));
    // Who is known to be gone is not waited for.
    backend.table.mark_failed(1);
    assert_eq!(write(&mut *lane, 3, 1, 5), Ok(()));
    assert_version(&mut *lane, 3, 1, 5);
}

#[test]
fn a_write_that_set_out_to_the_only_leg_in_use_is_made_at_another_that_is_used_again() {
    let sides = sides::<2>();
    let backend = mirror(&sides, &[], false);
    backend.set_write_timeout(Some(Duration::from_millis(10)));
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 400, 1).unwrap();
    sides[1].set_silent(true);
    write(&mut *lane, 300, 1, 2).unwrap();
    sides[0].set_silent(true);
    let op = Op::Write { page: PageId(1), buffer: filled(1, 1, 2) };
    assert!(lane.submit(LaneRequest { tag: 1, priority: Priority::Demand, deadline: trial::LONG, op }).is_ok());
    sides[1].set_silent(false);
    let mut done = Vec::with_capacity(1);
    wait_until("it is made at the other leg, while the first is silent", || {
        lane.poll(&mut done);
        done.len() == 1
    });
    assert_eq!(done[0].result, Ok(()));
    assert_version(&mut *lane, 1, 1, 2);
    sides[0].set_silent(false);
}

#[test]
fn an_operation_with_little_time_counts_with_those_that_answer() {
    let sides = sides::<2>();
    let backend = mirror(&sides, &[], false);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 10, 1).unwrap();
    sides[1].set_silent(true);
    let op = Op::Write { page: PageId(3), buffer: filled(1, 3, 2) };
    // Less than a write waits for all.
    assert_eq!(trial::one_within(&mut *lane, op, Duration::from_millis(40)).result, Ok(()));
    assert_version(&mut *lane, 3, 1, 2);
}

#[test]
fn neighbours_that_are_written_at_different_legs_at_the_same_time_are_both_kept() {
    let sides = sides::<2>();
    let backend = mirror(&sides, &[], false);
    backend.set_write_timeout(Some(Duration::from_millis(10)));
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 400, 1).unwrap();
    // One member is lagging with something else, and the other one is all that a write is sent to;
    // then that one is silent, too.
    sides[1].set_silent(true);
    write(&mut *lane, 300, 1, 2).unwrap();
    assert!(backend.table.is_lagging(1));
    sides[0].set_silent(true);
    let begin = |lane: &mut dyn crate::Lane, page: u64| {
        let op = Op::Write { page: PageId(page), buffer: filled(1, page, 2) };
        let request = LaneRequest { tag: page, priority: Priority::Demand, deadline: trial::LONG, op };
        assert!(lane.submit(request).is_ok());
    };
    begin(&mut *lane, 1);
    sides[1].set_silent(false);
    let mut done = Vec::with_capacity(4);
    wait_until("the late leg is used again", || {
        lane.poll(&mut done);
        !backend.table.is_lagging(1)
    });
    assert!(done.is_empty());
    // The neighbour is at this one alone, unless the first one is asked for here by then.
    begin(&mut *lane, 2);
    wait_until("the neighbour counts", || {
        lane.poll(&mut done);
        done.iter().any(|done| done.tag == 2)
    });
    sides[0].set_silent(false);
    wait_until("the first one counts, too", || {
        lane.poll(&mut done);
        done.len() == 2
    });
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    wait_until("both hold everything", || {
        lane.poll(&mut done);
        backend.health() == Health::Good
    });
    for side in &sides {
        side.set_silent(true);
        assert_version(&mut *lane, 1, 2, 2);
        assert_version(&mut *lane, 3, 100, 1);
        side.set_silent(false);
    }
}
