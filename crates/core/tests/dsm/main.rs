//! Simulator of shared memory: nodes in one process, virtual time, one step at a time, all of it from a seed.
//!
//! Danger: an object with two owners, or with none that somebody reads; a version that is older than what was told; a
//! block that is written to, freed or used again while somebody has borrowed what is in it; a batch of a backup that
//! counts in half; a writer that goes on after its node was given up; a lock with a writer beside others, or of which
//! a release is lost; a value of a channel that arrives twice or never; a wait that never ends. Nodes die or are
//! stopped at any boundary of a message, and messages are late, overtake each other and are lost. What the nodes decide
//! is decided by the pure code of `core::dsm`. Each rule of it can be switched off, and the simulator must notice.

mod channels;
mod locks;
mod node;
mod program;
mod world;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use world::{FIRST, Fate, Kind, Phase, Plan, RULES, Rule, Seen, Victim, World};

/// Runs a program to its end. Returns what was seen, or the promise that was broken.
fn run(plan: &Plan) -> Result<Seen, String> {
    let world = World::new(plan.clone());
    let is_over = Rc::new(Cell::new(false));
    program::start(&world, is_over.clone());
    let seen = world.run()?;
    if !is_over.get() {
        return Err("the program waits for ever".into());
    }
    // Those that die keep what others own.
    if plan.faults.is_empty() && !world.has_unclaimed_values() {
        for node in 0..world::NODES {
            let objects = world.node(node).objects();
            if objects > 0 {
                return Err(format!("node {node} keeps {objects} objects that nobody has"));
            }
        }
    }
    Ok(seen)
}

fn is_deep() -> bool {
    std::env::var("FARFIELD_DEEP").is_ok_and(|deep| deep == "1")
}

/// `FARFIELD_SEED`, or a fixed one.
fn first_seed() -> u64 {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    println!("seed {seed} (FARFIELD_SEED={seed})");
    seed
}

/// Returns how the program of a seed runs if nothing goes wrong.
fn calm(seed: u64) -> Plan {
    let loss = if seed.is_multiple_of(3) { 30 } else { 0 };
    let (has_backups, reads_in_place) = (!seed.is_multiple_of(4), seed % 8 < 4);
    let (has_locks, has_channels) = (seed % 2 == 1, seed % 4 >= 2);
    let (without, faults) = (None, Vec::new());
    let plan = Plan { seed, without, faults, loss, has_backups, has_locks, ..Plan::default() };
    Plan { has_channels, reads_in_place, ..plan }
}

/// Returns how it runs with backups at two memory servers, one of which cannot be reached from some moment on, by one
/// node or by any.
fn mirrored(seed: u64) -> Plan {
    let mut random = fastrand::Rng::with_seed(seed ^ 0xc07);
    let by = [None, Some(random.u16(FIRST + 1..world::NODES))][random.usize(..2)];
    let replica = random.usize(..2);
    let mut cuts = vec![(random.u64(..400), replica, by)];
    // The node that takes backups over may reach the other server only, or none of them.
    if random.bool() {
        cuts.push((random.u64(..400), random.usize(..2), Some(FIRST)));
    }
    Plan { has_backups: true, has_mirrors: true, cuts, ..calm(seed) }
}

/// Runs the program of a seed, and again with one or two faults. Adds what was struck.
fn run_with_faults(
    plan: Plan,
    mut fate: impl FnMut(&mut fastrand::Rng) -> Fate,
    struck: &mut BTreeSet<(Kind, Phase, Victim)>,
) -> Result<Seen, String> {
    let broken = |plan: &Plan, broken: String| format!("{broken}\n{plan:?}");
    let boundaries = run(&plan).map_err(|text| broken(&plan, text))?.boundaries;
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let faults = (0..random.usize(1..3)).map(|_| {
        let victim = if random.bool() { Victim::Sender } else { Victim::Receiver };
        (random.u64(1..=boundaries), victim, fate(&mut random))
    });
    let plan = Plan { faults: faults.collect(), ..plan };
    let seen = run(&plan).map_err(|text| broken(&plan, text))?;
    struck.extend(&seen.struck);
    Ok(seen)
}

fn any_fate(random: &mut fastrand::Rng) -> Fate {
    if random.u8(..3) == 0 { Fate::IsStopped } else { Fate::Dies }
}

#[test]
fn random_programs_keep_their_promises_whatever_happens_to_their_nodes() {
    let (first, seeds) = (first_seed(), if is_deep() { 10_000 } else { 500 });
    let (mut struck, mut promotions, mut fenced, mut checkpoints) = (BTreeSet::new(), 0, 0, 0);
    let (mut grants, mut lenders, mut lost_replicas) = (0, 0, 0);
    for seed in first..first + seeds {
        let seen = run_with_faults(calm(seed), any_fate, &mut struck).unwrap_or_else(|broken| panic!("{broken}"));
        promotions += seen.promotions;
        fenced += seen.fenced_writers;
        checkpoints += seen.checkpoints;
        grants += seen.grants;
        lenders += seen.lenders;
        if seed.is_multiple_of(2) {
            let seen = run_with_faults(mirrored(seed), any_fate, &mut BTreeSet::new());
            lost_replicas += seen.unwrap_or_else(|broken| panic!("{broken}")).lost_replicas;
        }
        if seed.is_multiple_of(3) {
            let plan = Plan { has_locks: true, has_unused_locks: true, ..calm(seed) };
            run_with_faults(plan, any_fate, &mut BTreeSet::new()).unwrap_or_else(|broken| panic!("{broken}"));
        }
    }
    println!("{promotions} backups taken over, {fenced} writers fenced, {checkpoints} checkpoints, {struck:?}");
    assert!(promotions > seeds / 4 && fenced > 0 && checkpoints > seeds / 10 && struck.len() > 30);
    println!(
        "{grants} locks were taken, {lenders} dead readers had lent something, {lost_replicas} replicas were lost"
    );
    assert!(grants > seeds && lost_replicas > seeds / 10);
}

/// Boundaries at which a node other than the first one can die. Its memory server, and the first node, do not.
fn boundaries() -> BTreeSet<(Kind, Phase, Victim)> {
    let mut all = BTreeSet::new();
    for phase in [Phase::Leaves, Phase::Arrives, Phase::Answered] {
        for kind in [
            Kind::Fetch,
            Kind::Free,
            Kind::Spawn,
            Kind::Ended,
            Kind::Outlast,
            Kind::Outlasted,
            Kind::Lock,
            Kind::Unlock,
            Kind::Answered,
            Kind::Send,
            Kind::Receive,
            Kind::Cancel,
            Kind::Told,
        ] {
            all.extend([(kind, phase, Victim::Sender), (kind, phase, Victim::Receiver)]);
        }
        all.insert((Kind::View, phase, Victim::Receiver));
        all.extend([(Kind::Page, phase, Victim::Sender), (Kind::Commit, phase, Victim::Sender)]);
    }
    all
}

/// Each boundary of some programs, one after the other, with each fate of each end. Of what is said only after a
/// death, the same for a second one.
#[test]
fn every_boundary_of_a_message_is_struck() {
    let programs: u64 = if is_deep() { 60 } else { 3 };
    let (mut struck, mut runs) = (BTreeSet::new(), 0u64);
    let mut strike_all = |plan: &Plan| {
        let boundaries = run(plan).unwrap_or_else(|broken| panic!("{broken}\n{plan:?}")).boundaries;
        for number in 1..=boundaries {
            for victim in [Victim::Sender, Victim::Receiver] {
                for fate in [Fate::Dies, Fate::IsStopped] {
                    let mut plan = plan.clone();
                    plan.faults.push((number, victim, fate));
                    let seen = run(&plan).unwrap_or_else(|broken| panic!("{broken}\n{plan:?}"));
                    struck.extend(seen.struck);
                    runs += 1;
                }
            }
        }
    };
    for seed in 1..=programs {
        let has_channels = seed != 1;
        strike_all(&Plan { has_backups: true, has_locks: !has_channels, has_channels, ..calm(seed) });
    }
    // Programs in which the first node, and another one, waits for a lock or a channel.
    for (kind, is_first) in [Kind::Answered, Kind::Told].into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let has_channels = kind == Kind::Told;
        let plan = |seed| Plan { has_backups: true, has_locks: !has_channels, has_channels, ..calm(seed) };
        let waits = (1..).filter(|seed: &u64| !seed.is_multiple_of(5)).map(plan);
        let waits = waits.filter(|plan| run(plan).is_ok_and(|seen| seen.said.contains(&(kind, is_first))));
        waits.take(programs.div_ceil(3) as usize).for_each(|plan| strike_all(&plan));
    }
    // Programs in which the first node, and another one, waits for borrowers of a dead one.
    for is_first in [true, false] {
        let waits = (1..)
            .filter(|seed: &u64| !seed.is_multiple_of(5))
            .map(|seed| {
                let number = fastrand::Rng::with_seed(seed).u64(..200);
                Plan { has_backups: true, faults: vec![(number, Victim::Sender, Fate::Dies)], ..calm(seed) }
            })
            .filter(|plan| run(plan).is_ok_and(|seen| seen.said.contains(&(Kind::Outlasted, is_first))));
        waits.take(programs.div_ceil(3) as usize).for_each(|plan| strike_all(&plan));
    }
    println!("{runs} runs");
    let missing: Vec<_> = boundaries().difference(&struck).copied().collect();
    assert!(missing.is_empty() && struck.is_subset(&boundaries()), "{missing:?}");
}

/// With a rule off, some promise is broken soon.
#[test]
fn each_rule_is_needed() {
    for rule in RULES {
        // What only those can break that are told of a loss at one moment: each boundary of some programs.
        let each_boundary = |seed| {
            let plan = Plan { without: Some(rule), has_backups: true, has_locks: true, ..calm(seed) };
            let plan = Plan { has_channels: false, reads_in_place: true, ..plan };
            let boundaries = run(&plan).map_or(0, |seen| seen.boundaries);
            let dies = |number| Plan { faults: vec![(number, Victim::Sender, Fate::Dies)], ..plan.clone() };
            (1..=boundaries).find_map(|number| Some((seed, run(&dies(number)).err()?)))
        };
        let broken = (0..4000).find_map(|seed| {
            if rule == Rule::OlderViewsCatchUp {
                return each_boundary(24 + seed);
            }
            let plan = Plan { without: Some(rule), ..calm(seed) };
            // What only those can break that are stopped, or that have backups.
            let (plan, fate): (_, fn(&mut fastrand::Rng) -> Fate) = match rule {
                Rule::TakenOverWithFence => (Plan { has_backups: true, ..plan }, |_| Fate::IsStopped),
                Rule::WithdrawnTicketsAreKnown => (Plan { has_locks: true, ..plan }, |_| Fate::IsStopped),
                Rule::LocksOutlastBorrowers
                | Rule::PromotedLocksOutlastBorrowers
                | Rule::LentLocksAreStored
                | Rule::BorrowsHaveRoots => (Plan { has_backups: true, has_locks: true, ..plan }, |_| Fate::Dies),
                Rule::LostReplicasAreKnown => (Plan { without: Some(rule), ..mirrored(seed) }, |_| Fate::Dies),
                Rule::LaterLocksAreNotLent | Rule::BorrowersAreTold => {
                    (Plan { has_locks: true, has_unused_locks: true, ..plan }, |_| Fate::Dies)
                }
                Rule::StoredBeforeSent | Rule::PagesBeforeCommit | Rule::LoansOfLoansKeepBlocks => {
                    (Plan { has_backups: true, ..plan }, |_| Fate::Dies)
                }
                _ => (plan, any_fate),
            };
            Some((seed, run_with_faults(plan, fate, &mut BTreeSet::new()).err()?))
        });
        let (seed, broken) = broken.unwrap_or_else(|| panic!("{rule:?} is not missed"));
        println!("{rule:?}, seed {seed}: {}", broken.lines().next().unwrap_or_default());
    }
}

#[test]
fn a_run_is_repeated_by_its_plan() {
    for seed in 0..20 {
        let plan = Plan { faults: vec![(40, Victim::Receiver, Fate::IsStopped)], ..calm(seed) };
        assert_eq!(run(&plan), run(&plan));
    }
    assert_eq!(FIRST, 0, "faults spare it");
}
