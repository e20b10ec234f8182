//! Guards against what a dropped function leaves behind at the client, against errors of lanes that become answers, and against simulations that
//! cannot be repeated.

use core::future::{Future, poll_fn};
use core::pin::pin;
use core::task::Poll;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, LaneRequest, Op, PoolBuilder, PoolError, Priority};
use farfield_wic::{CallError, Caller, Fault, Function, Place, Sim, Stop, Where};
use std::sync::Arc;

const PAGES: u64 = 32;
const BYTES: u64 = PAGES * PAGE_BYTES as u64;
const PATIENCE: Duration = Duration::from_secs(20);

/// What stands at an offset.
fn stamp(offset: u64) -> u64 {
    (offset + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A region in which every word says where it is.
fn open(url: &str) -> Arc<dyn Backend> {
    let backend = PoolBuilder::new().url(url).pages(PAGES).open().unwrap();
    let mut buffer = Buffer::new(PAGES as usize);
    let words = buffer.bytes_mut().chunks_exact_mut(8).enumerate();
    words.for_each(|(index, word)| word.copy_from_slice(&stamp(index as u64 * 8).to_le_bytes()));
    buffer.seal();
    let mut lane = backend.open_lane().unwrap();
    let op = Op::Write { page: PageId(0), buffer };
    lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline: PATIENCE, op }).unwrap();
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(PATIENCE);
    }
    done.remove(0).result.unwrap();
    backend
}

/// Begins it, and wants no more of it.
async fn begin<T>(future: impl Future<Output = T>) {
    let mut future = pin!(future);
    poll_fn(|context| {
        let _ = future.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
}

/// Begins reads of all kinds that it does not wait for, between those that it does.
struct Hasty;

impl Function for Hasty {
    const NAME: &'static str = "test.hasty";
    const VERSION: u32 = 1;
    type Argument = u64;
    type Answer = Vec<u64>;

    async fn run<P: Place>(place: &P, seed: u64) -> Result<Vec<u64>, Fault> {
        let mut answer = Vec::new();
        for round in 0..8 {
            let at = |nth: u64| (seed * 8 + round * 104 + nth * 4096) % (BYTES - 8192) / 8 * 8;
            begin(place.read_u64(at(1))).await;
            begin(place.read_range(at(2), 5000)).await;
            begin(place.read_many(&[at(3), at(4)], &mut [[0; 8]; 2])).await;
            answer.push(place.read_u64(at(5)).await?);
            begin(place.read_u64(at(6))).await;
            let bytes = place.read_range(at(7), 5000).await?;
            let last = bytes[4992..].first_chunk().copied().unwrap_or_default();
            let mut both = [[0; 8]; 2];
            // Another buffer is in use while this one is.
            place.read_many(&[at(8), at(9)], &mut both).await?;
            answer.extend([last, both[0], both[1]].map(u64::from_le_bytes));
            answer.extend([at(5), at(7) + 4992, at(8), at(9)]);
        }
        Ok(answer)
    }
}

/// Words, each against where it was read.
fn is_right(answer: &[u64]) -> bool {
    answer.len() == 64 && answer.chunks(8).all(|round| (0..4).all(|nth| round[nth] == stamp(round[nth + 4])))
}

#[test]
fn abandoned_operations_land_nowhere() {
    for url in ["ram:", "fault:delay=300us@ram:"] {
        let mut caller = Caller::new(open(url));
        for first in (0..2000).step_by(200) {
            let answers = caller.calls::<Hasty>((first..first + 200).collect()).run();
            assert!(answers.iter().all(|answer| is_right(answer.as_ref().unwrap())), "{url}");
        }
    }
}

#[test]
fn functions_that_are_dropped_in_the_middle_leave_the_caller_as_it_was() {
    let mut caller = Caller::new(open("fault:delay=2ms@ram:"));
    for round in 0..20 {
        // Some of what they began is on its way when they are dropped.
        let late = caller.calls::<Hasty>((0..100).collect()).within(Duration::from_millis(5)).run();
        assert!(late.iter().any(Result::is_err), "there was too much time");
        let is_late = |end: &Result<_, _>| matches!(end, Ok(_) | Err(CallError::TimedOut { .. }));
        assert!(late.iter().all(is_late), "{late:?}");
        let short = caller.calls::<Hasty>((0..20).collect()).steps(9).run();
        assert!(short.iter().all(|end| matches!(end, Err(CallError::Overrun { steps: 9 }))), "{short:?}");
        let answer = caller.call::<Hasty>(round).within(PATIENCE).run();
        assert!(is_right(&answer.unwrap()), "round {round}");
    }
}

#[test]
fn lane_errors_are_errors_and_never_answers() {
    let run = |url: &str, within| {
        let mut caller = Caller::new(open(url));
        let ends = caller.calls::<Hasty>((0..300).collect()).within(within).run();
        ends.iter().flatten().for_each(|answer| assert!(is_right(answer), "{url}"));
        ends.into_iter().filter_map(Result::err).collect::<Vec<_>>()
    };
    let corrupt = run("fault:corrupt=0.01,seed=5@ram:", PATIENCE);
    assert!(!corrupt.is_empty() && corrupt.iter().all(|end| matches!(end, CallError::Fault(Fault::Corrupt { .. }))));
    let dead = run("fault:die=3000@ram:", PATIENCE);
    let is_gone = |end: &CallError| matches!(end, CallError::Fault(Fault::Lost(PoolError::ServerGone { .. })));
    assert!(!dead.is_empty() && dead.iter().all(is_gone), "{dead:?}");
    let lost = run("fault:drop=0.01,seed=5@ram:", Duration::from_millis(300));
    assert!(!lost.is_empty() && lost.iter().all(|end| matches!(end, CallError::TimedOut { .. })), "{lost:?}");
}

/// Adds one to a word, and does not care who else does.
struct Careless;

impl Function for Careless {
    const NAME: &'static str = "test.careless";
    const VERSION: u32 = 1;
    type Argument = u64;
    type Answer = u64;

    async fn run<P: Place>(place: &P, offset: u64) -> Result<u64, Fault> {
        let before = place.read_u64(offset).await?;
        place.yield_now().await;
        place.write_u64(offset, before + 1).await?;
        Ok(before)
    }
}

#[test]
fn a_seed_is_a_simulation() {
    let run = |seed| {
        let sim = Sim::new(seed, vec![0; 16]);
        (sim.run::<Careless>(vec![8; 30]), sim.bytes())
    };
    let all: Vec<_> = (0..20).map(run).collect();
    assert!((0..20).map(run).eq(all.iter().cloned()), "it can be repeated");
    assert!(all.iter().any(|one| *one != all[0]), "orders differ");
    assert!(all.iter().all(|(_, bytes)| bytes[8] < 30), "and show what is wrong with a function");
}

/// Adds one to a word, whoever else does.
struct Careful;

impl Function for Careful {
    const NAME: &'static str = "test.careful";
    const VERSION: u32 = 1;
    type Argument = u64;
    type Answer = u64;

    async fn run<P: Place>(place: &P, offset: u64) -> Result<u64, Fault> {
        let mut before = place.read_u64(offset).await?;
        loop {
            let word = place.compare_exchange(offset, before, before + 1).await?;
            if word == before {
                return Ok(place.fetch_add(offset + 8, 1).await?.min(word));
            }
            before = word;
        }
    }
}

#[test]
fn words_lose_nothing_in_any_order() {
    for seed in 0..50 {
        let sim = Sim::new(seed, vec![0; 24]);
        let ends = sim.run::<Careful>(vec![8; 30]);
        assert!(ends.iter().all(Result::is_ok));
        let bytes = sim.bytes();
        assert!(bytes[8] == 30 && bytes[16] == 30, "seed {seed}: {bytes:?}");
    }
}

#[test]
fn atomics_fail_and_change_nothing_without_a_server() {
    let mut caller = Caller::new(open("ram:"));
    assert_eq!(caller.call::<Careful>(8).run(), Err(CallError::Fault(Fault::NotHere)));
}

/// Says that it only reads.
struct Pretends;

impl Function for Pretends {
    const NAME: &'static str = "test.pretends";
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = u64;
    type Answer = u64;

    async fn run<P: Place>(place: &P, offset: u64) -> Result<u64, Fault> {
        Careless::run(place, offset).await
    }
}

#[test]
#[should_panic(expected = "says that it only reads")]
fn a_simulation_finds_out_who_writes_and_says_that_it_only_reads() {
    const { assert!(Pretends::REPEATABLE && !Careless::REPEATABLE) };
    let _ = Sim::new(3, vec![0; 64]).run_one::<Pretends>(8);
}

#[test]
fn a_simulation_has_faults_and_budgets() {
    let faulty = Sim::new(3, vec![0; 4096]).faults(4).run::<Careless>(vec![8; 40]);
    let corrupt = Err(Stop::Fault(Fault::Corrupt { page: PageId(0) }));
    assert!(faulty.contains(&corrupt) && faulty.iter().any(Result::is_ok));
    assert_eq!(Sim::new(3, vec![0; 64]).steps(2).run_one::<Careless>(8), Err(Stop::Overrun { steps: 2 }));
    let outside = Err(Stop::Fault(Fault::OutOfRange { offset: 60 }));
    assert_eq!(Sim::new(3, vec![0; 64]).run_one::<Careless>(60), outside);
}

#[test]
fn auto_runs_at_the_client_without_a_server() {
    let mut caller = Caller::new(open("ram:"));
    for seed in 0..5 {
        assert!(is_right(&caller.call::<Hasty>(seed).at(Where::Auto).run().unwrap()));
    }
    let choices: Vec<_> = caller.choices().map(|(name, choice)| (name, choice.is_bound, choice.to_string())).collect();
    assert_eq!(choices.len(), 1);
    assert!(choices[0].0 == "test.hasty" && choices[0].1 && choices[0].2.contains("does not run it"), "{choices:?}");
}
