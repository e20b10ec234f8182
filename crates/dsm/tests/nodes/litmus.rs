//! Litmus tests of the memory model: what programs of a few steps on atomic numbers may see is what
//! some interleaving of their steps shows (sequential consistency).
//!
//! Each number is at another node, and each thread, too. What may be seen is computed by trying all
//! interleavings, so a program is all that a test consists of.

use crate::support::{Checked, NodesTest, is_deep, seeded};
use farfield_dsm::{DArc, DAtomic, Far, Here, JoinError, NodeId, ShareError};
use std::collections::BTreeSet;

pub(crate) const TESTS: &[NodesTest] = &[
    ("litmus_programs_see_some_interleaving_at_one_node", 1, litmus_programs_see_some_interleaving),
    ("litmus_programs_see_some_interleaving_of_two_nodes", 2, litmus_programs_see_some_interleaving),
    ("litmus_programs_see_some_interleaving_of_three_nodes", 3, litmus_programs_see_some_interleaving),
    ("litmus_programs_see_some_interleaving_of_four_nodes", 4, litmus_programs_see_some_interleaving),
    ("random_programs_see_some_interleaving", 3, random_programs_see_some_interleaving),
    ("petersons_lock_excludes", 2, petersons_lock_excludes),
    ("dekkers_lock_excludes", 2, dekkers_lock_excludes),
    ("the_bakery_serves_one_at_a_time", 3, the_bakery_serves_one_at_a_time),
    ("readers_of_a_seqlock_see_no_torn_pair", 3, readers_of_a_seqlock_see_no_torn_pair),
    ("sums_of_all_nodes_are_whole", 3, sums_of_all_nodes_are_whole),
];

/// Step of a thread: of the number `x`, `y` or `z`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Far)]
enum Op {
    None,
    Write(u8, u64),
    Read(u8),
    Add(u8, u64),
    /// Writes the second number if the first one is found.
    Exchange(u8, u64, u64),
}
use Op::{Add, Exchange, Read, Write};

const THREADS: usize = 4;
const OPS: usize = 4;
const NUMBERS: usize = 3;
const X: u8 = 0;
const Y: u8 = 1;
const Z: u8 = 2;

/// Steps of each thread.
type Program = [[Op; OPS]; THREADS];
/// What the threads' steps return, and the numbers at the end.
type Outcome = ([[u64; OPS]; THREADS], [u64; NUMBERS]);

/// The programs that the literature names (Alglave, Maranget, Tautschnig: "Herding Cats", 2014).
const NAMED: &[(&str, &[&[Op]])] = &[
    ("CoRR", &[&[Write(X, 1)], &[Read(X), Read(X)]]),
    ("CoWW", &[&[Write(X, 1), Write(X, 2)]]),
    ("CoRW1", &[&[Read(X), Write(X, 1)]]),
    ("CoRW2", &[&[Read(X), Write(X, 1)], &[Write(X, 2)]]),
    ("CoWR", &[&[Write(X, 1), Read(X)], &[Write(X, 2)]]),
    ("atomicity", &[&[Add(X, 1), Add(X, 1)], &[Add(X, 1), Read(X)], &[Exchange(X, 0, 9), Add(X, 1)]]),
    ("one winner", &[&[Exchange(X, 0, 1)], &[Exchange(X, 0, 2)], &[Exchange(X, 0, 3)]]),
    ("SB", &[&[Write(X, 1), Read(Y)], &[Write(Y, 1), Read(X)]]),
    ("MP", &[&[Write(X, 1), Write(Y, 1)], &[Read(Y), Read(X)]]),
    ("LB", &[&[Read(X), Write(Y, 1)], &[Read(Y), Write(X, 1)]]),
    ("IRIW", &[&[Write(X, 1)], &[Read(X), Read(Y)], &[Write(Y, 1)], &[Read(Y), Read(X)]]),
    ("WRC", &[&[Write(X, 1)], &[Read(X), Write(Y, 1)], &[Read(Y), Read(X)]]),
    ("RWC", &[&[Write(X, 1)], &[Read(X), Read(Y)], &[Write(Y, 1), Read(X)]]),
    ("WWC", &[&[Write(X, 2)], &[Read(X), Write(Y, 1)], &[Read(Y), Write(X, 1)]]),
    ("ISA2", &[&[Write(X, 1), Write(Y, 1)], &[Read(Y), Write(Z, 1)], &[Read(Z), Read(X)]]),
    ("2+2W", &[&[Write(X, 1), Write(Y, 2)], &[Write(Y, 1), Write(X, 2)]]),
    ("R", &[&[Write(X, 1), Write(Y, 1)], &[Write(Y, 2), Read(X)]]),
    ("S", &[&[Write(X, 2), Write(Y, 1)], &[Read(Y), Write(X, 1)]]),
    ("3.SB", &[&[Write(X, 1), Read(Y)], &[Write(Y, 1), Read(Z)], &[Write(Z, 1), Read(X)]]),
    ("3.LB", &[&[Read(X), Write(Y, 1)], &[Read(Y), Write(Z, 1)], &[Read(Z), Write(X, 1)]]),
    ("3.2W", &[&[Write(X, 2), Write(Y, 1)], &[Write(Y, 2), Write(Z, 1)], &[Write(Z, 2), Write(X, 1)]]),
    ("W+RWC", &[&[Write(X, 1), Write(Y, 1)], &[Read(Y), Read(Z)], &[Write(Z, 1), Read(X)]]),
    ("Z6.0", &[&[Write(X, 1), Write(Y, 1)], &[Read(Y), Write(Z, 1)], &[Write(Z, 2), Read(X)]]),
    ("Z6.1", &[&[Write(X, 2), Write(Y, 1)], &[Write(Y, 2), Write(Z, 1)], &[Read(Z), Write(X, 1)]]),
    ("Z6.2", &[&[Write(X, 2), Write(Y, 1)], &[Read(Y), Write(Z, 1)], &[Read(Z), Write(X, 1)]]),
    ("Z6.3", &[&[Write(X, 1), Write(Y, 1)], &[Write(Y, 2), Write(Z, 1)], &[Read(Z), Read(X)]]),
    ("Z6.4", &[&[Write(X, 1), Write(Y, 1)], &[Write(Y, 2), Read(Z)], &[Write(Z, 1), Read(X)]]),
    ("Z6.5", &[&[Write(X, 2), Write(Y, 1)], &[Write(Y, 2), Read(Z)], &[Write(Z, 1), Write(X, 1)]]),
];

fn program(threads: &[&[Op]]) -> Program {
    let mut program = [[Op::None; OPS]; THREADS];
    for (ops, of_thread) in program.iter_mut().zip(threads) {
        ops[..of_thread.len()].copy_from_slice(of_thread);
    }
    program
}

/// Collects what some interleaving shows.
fn interleave(program: &Program, at: [usize; THREADS], seen: Outcome, all: &mut BTreeSet<Outcome>) {
    let mut is_over = true;
    for thread in 0..THREADS {
        let Some(op) = program[thread].get(at[thread]).filter(|op| **op != Op::None) else { continue };
        is_over = false;
        let (mut at, (mut returned, mut numbers)) = (at, seen);
        returned[thread][at[thread]] = match *op {
            Op::None => 0,
            Write(number, value) => {
                numbers[usize::from(number)] = value;
                0
            }
            Read(number) => numbers[usize::from(number)],
            Add(number, more) => {
                numbers[usize::from(number)] += more;
                numbers[usize::from(number)] - more
            }
            Exchange(number, current, new) => {
                let found = numbers[usize::from(number)];
                if found == current {
                    numbers[usize::from(number)] = new;
                }
                found
            }
        };
        at[thread] += 1;
        interleave(program, at, (returned, numbers), all);
    }
    if is_over {
        all.insert(seen);
    }
}

/// Rounds that are run by one task in a row.
const ROUNDS: usize = 16;
/// Numbers of each round, and one at which the threads wait for each other.
type Numbers = ([[DAtomic<u64>; NUMBERS]; ROUNDS], DAtomic<u64>);

/// Runs the steps of one thread, in each round at the same time as the others.
fn run_thread(
    here: &Here<'_>,
    numbers: &Numbers,
    ops: [Op; OPS],
    threads: u64,
) -> Result<[[u64; OPS]; ROUNDS], ShareError> {
    let mut returned = [[0; OPS]; ROUNDS];
    for (round, (of_round, returned)) in (1u64..).zip(numbers.0.iter().zip(&mut returned)) {
        numbers.1.fetch_add(here, 1)?;
        while numbers.1.load(here)? < threads * round {
            std::thread::yield_now();
        }
        for (op, returned) in ops.iter().zip(returned) {
            *returned = match *op {
                Op::None => break,
                Write(number, value) => of_round[usize::from(number)].store(here, value).map(|()| 0)?,
                Read(number) => of_round[usize::from(number)].load(here)?,
                Add(number, more) => of_round[usize::from(number)].fetch_add(here, more)?,
                Exchange(number, current, new) => {
                    let found = of_round[usize::from(number)].compare_exchange(here, current, new)?;
                    found.unwrap_or_else(|found| found)
                }
            };
        }
    }
    Ok(returned)
}

/// Runs a program many times at once, and returns what was seen.
fn run_program(here: &Here<'_>, program: &Program, rotation: u16) -> Result<Vec<Outcome>, JoinError> {
    let nodes = here.nodes().count() as u16;
    let node = |index: usize| NodeId((index as u16 + rotation) % nodes);
    // A number at each node, made there.
    let mut of_number = [const { None }; NUMBERS];
    for (index, made) in of_number.iter_mut().enumerate() {
        let task = here.spawn_to(node(index + 1), (), |here, ()| {
            let made: Result<Vec<_>, _> = (0..ROUNDS).map(|_| DAtomic::new(here, 0u64)).collect();
            made.map(|made| <[DAtomic<u64>; ROUNDS]>::try_from(made).expect("so many"))
        })?;
        *made = Some(task.join(here)??.into_iter());
    }
    let rounds: [_; ROUNDS] = std::array::from_fn(|_| {
        of_number.each_mut().map(|numbers| numbers.as_mut().and_then(Iterator::next).expect("one for each round"))
    });
    let numbers = DArc::new(here, (rounds, DAtomic::new(here, 0)?))?;
    let threads = program.iter().filter(|ops| ops[0] != Op::None).count();
    let mut tasks = Vec::new();
    for (thread, ops) in program.iter().enumerate().take(threads) {
        let arguments = (numbers.try_clone(here)?, *ops, threads as u64);
        tasks.push(here.spawn_to(node(thread), arguments, |here, (numbers, ops, threads)| {
            run_thread(here, numbers.get(here)?, ops, threads)
        })?);
    }
    let returned = tasks.into_iter().map(|task| Ok(task.join(here)??)).collect::<Result<Vec<_>, JoinError>>()?;
    let (of_rounds, _) = numbers.get(here)?;
    let mut seen = Vec::new();
    for (round, numbers) in of_rounds.iter().enumerate() {
        let mut outcome: Outcome = Default::default();
        for (into, returned) in outcome.0.iter_mut().zip(&returned) {
            *into = returned[round];
        }
        for (into, number) in outcome.1.iter_mut().zip(numbers) {
            *into = number.load(here)?;
        }
        seen.push(outcome);
    }
    Ok(seen)
}

fn litmus_programs_see_some_interleaving(here: &Here<'_>) -> Checked {
    let repeats = if is_deep() { 60 } else { 1 };
    let mut seen_of = 0;
    for (name, threads) in NAMED {
        let (program, mut all) = (program(threads), BTreeSet::new());
        interleave(&program, [0; THREADS], Outcome::default(), &mut all);
        let mut seen = BTreeSet::new();
        for repeat in 0..repeats {
            for outcome in run_program(here, &program, repeat)? {
                assert!(all.contains(&outcome), "{name}: no interleaving shows {outcome:?}");
                seen.insert(outcome);
            }
        }
        seen_of += seen.len();
    }
    println!("  {seen_of} different outcomes of {} programs", NAMED.len());
    Ok(())
}

fn random_programs_see_some_interleaving(here: &Here<'_>) -> Checked {
    let (mut random, programs) = (seeded(11), if is_deep() { 3000 } else { 15 });
    for rotation in 0..programs {
        let mut threads = [[Op::None; OPS]; THREADS];
        for ops in threads.iter_mut().take(3) {
            let len = 1 + random.usize(..OPS);
            for op in &mut ops[..len] {
                let number = random.u8(..NUMBERS as u8);
                *op = match random.u8(..6) {
                    0 | 1 => Write(number, random.u64(1..4)),
                    2 | 3 => Read(number),
                    4 => Add(number, random.u64(1..4)),
                    _ => Exchange(number, random.u64(..3), random.u64(1..4)),
                };
            }
        }
        let mut all = BTreeSet::new();
        interleave(&threads, [0; THREADS], Outcome::default(), &mut all);
        for outcome in run_program(here, &threads, rotation)? {
            assert!(all.contains(&outcome), "{threads:?}: no interleaving shows {outcome:?}");
        }
    }
    Ok(())
}

/// Adds one to a number in two steps, which others must not come between.
fn add_in_two_steps(here: &Here<'_>, number: &DAtomic<u64>) -> Result<(), ShareError> {
    let value = number.load(here)?;
    number.store(here, value + 1)
}

/// Flags of two tasks, whose turn it is, and what their lock protects.
type TwoTasks = ([DAtomic<bool>; 2], DAtomic<u64>, DAtomic<u64>);

#[derive(Clone, Copy, Far)]
enum TwoTaskLock {
    Peterson,
    Dekker,
}

impl TwoTaskLock {
    fn enter(self, here: &Here<'_>, (flags, turn, _): &TwoTasks, me: usize) -> Result<(), ShareError> {
        let (other, others) = (1 - me, 1 - me as u64);
        flags[me].store(here, true)?;
        match self {
            TwoTaskLock::Peterson => {
                turn.store(here, others)?;
                while flags[other].load(here)? && turn.load(here)? == others {
                    std::thread::yield_now();
                }
            }
            TwoTaskLock::Dekker => {
                while flags[other].load(here)? {
                    if turn.load(here)? == others {
                        flags[me].store(here, false)?;
                        while turn.load(here)? == others {
                            std::thread::yield_now();
                        }
                        flags[me].store(here, true)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn leave(self, here: &Here<'_>, (flags, turn, _): &TwoTasks, me: usize) -> Result<(), ShareError> {
        if matches!(self, TwoTaskLock::Dekker) {
            turn.store(here, 1 - me as u64)?;
        }
        flags[me].store(here, false)
    }
}

fn petersons_lock_excludes(here: &Here<'_>) -> Checked {
    two_tasks_exclude_each_other(here, TwoTaskLock::Peterson)
}

fn dekkers_lock_excludes(here: &Here<'_>) -> Checked {
    two_tasks_exclude_each_other(here, TwoTaskLock::Dekker)
}

fn two_tasks_exclude_each_other(here: &Here<'_>, lock: TwoTaskLock) -> Checked {
    const ROUNDS: u64 = 200;
    let there = here.spawn_to(NodeId(1), (), |here, ()| {
        Ok::<_, ShareError>((DAtomic::new(here, false)?, DAtomic::new(here, 0u64)?))
    })?;
    let (flag, turn) = there.join(here)??;
    let shared: DArc<TwoTasks> = DArc::new(here, ([DAtomic::new(here, false)?, flag], turn, DAtomic::new(here, 0)?))?;
    let mut tasks = Vec::new();
    for node in here.nodes() {
        tasks.push(here.spawn_to(node, (shared.try_clone(here)?, lock), |here, (shared, lock)| {
            let (shared, me) = (shared.get(here)?, usize::from(here.id().0));
            for _ in 0..ROUNDS {
                lock.enter(here, shared, me)?;
                add_in_two_steps(here, &shared.2)?;
                lock.leave(here, shared, me)?;
            }
            Ok::<_, ShareError>(())
        })?);
    }
    for task in tasks {
        task.join(here)??;
    }
    assert_eq!(shared.get(here)?.2.load(here)?, 2 * ROUNDS);
    Ok(())
}

fn the_bakery_serves_one_at_a_time(here: &Here<'_>) -> Checked {
    const ROUNDS: u64 = 60;
    /// Who chooses, the numbers that were drawn, and what the lock protects.
    type Shared = ([(DAtomic<bool>, DAtomic<u64>); 3], DAtomic<u64>);
    let made = [NodeId(0), NodeId(1), NodeId(2)].map(|node| {
        let made = here.spawn_to(node, (), |here, ()| {
            Ok::<_, ShareError>((DAtomic::new(here, false)?, DAtomic::new(here, 0u64)?))
        });
        made.expect("the node lives").join(here).expect("the node lives").expect("there is room")
    });
    let shared: DArc<Shared> = DArc::new(here, (made, DAtomic::new(here, 0)?))?;
    let mut tasks = Vec::new();
    for node in here.nodes() {
        tasks.push(here.spawn_to(node, shared.try_clone(here)?, |here, shared| {
            let (customers, number) = shared.get(here)?;
            let me = usize::from(here.id().0);
            for _ in 0..ROUNDS {
                customers[me].0.store(here, true)?;
                let mut highest = 0;
                for (_, drawn) in customers {
                    highest = highest.max(drawn.load(here)?);
                }
                customers[me].1.store(here, highest + 1)?;
                customers[me].0.store(here, false)?;
                for (other, (chooses, drawn)) in customers.iter().enumerate().filter(|(other, _)| *other != me) {
                    while chooses.load(here)? {
                        std::thread::yield_now();
                    }
                    loop {
                        let drawn = drawn.load(here)?;
                        if drawn == 0 || (drawn, other) > (highest + 1, me) {
                            break;
                        }
                        std::thread::yield_now();
                    }
                }
                add_in_two_steps(here, number)?;
                customers[me].1.store(here, 0)?;
            }
            Ok::<_, ShareError>(())
        })?);
    }
    for task in tasks {
        task.join(here)??;
    }
    assert_eq!(shared.get(here)?.1.load(here)?, 3 * ROUNDS);
    Ok(())
}

fn readers_of_a_seqlock_see_no_torn_pair(here: &Here<'_>) -> Checked {
    /// Sequence, odd while somebody writes; a pair of equal numbers; and the number of writers that are done.
    type SeqLock = (DAtomic<u64>, [DAtomic<u64>; 2], DAtomic<u64>);
    let rounds: u64 = if is_deep() { 5000 } else { 60 };
    let [sequence, first, second] = [NodeId(0), NodeId(1), NodeId(2)].map(|node| {
        let made = here.spawn_to(node, (), |here, ()| DAtomic::new(here, 0u64));
        made.expect("the node lives").join(here).expect("the node lives").expect("there is room")
    });
    let shared: DArc<SeqLock> = DArc::new(here, (sequence, [first, second], DAtomic::new(here, 0)?))?;
    let mut writers = Vec::new();
    for node in [NodeId(0), NodeId(2)] {
        writers.push(here.spawn_to(node, (shared.try_clone(here)?, rounds), |here, (shared, rounds)| {
            let (sequence, pair, writers) = shared.get(here)?;
            for _ in 0..rounds {
                let mut before = sequence.load(here)?;
                while before % 2 == 1 || sequence.compare_exchange(here, before, before + 1)?.is_err() {
                    std::thread::yield_now();
                    before = sequence.load(here)?;
                }
                for number in pair {
                    number.store(here, before)?;
                }
                sequence.store(here, before + 2)?;
            }
            writers.fetch_add(here, 1)
        })?);
    }
    let mut readers = Vec::new();
    for node in [NodeId(1), NodeId(0)] {
        readers.push(here.spawn_to(node, shared.try_clone(here)?, |here, shared| {
            let (sequence, [first, second], writers) = shared.get(here)?;
            let (mut whole, mut refused) = (0u64, 0u64);
            while writers.load(here)? < 2 || whole == 0 {
                let before = sequence.load(here)?;
                let pair = (first.load(here)?, second.load(here)?);
                if before % 2 == 0 && sequence.load(here)? == before {
                    assert!(pair.0 == pair.1 && pair.0 <= before, "{pair:?} at {before}");
                    whole += 1;
                } else {
                    refused += 1;
                }
            }
            Ok::<_, ShareError>((whole, refused))
        })?);
    }
    for writer in writers {
        writer.join(here)??;
    }
    let mut read = (0, 0);
    for reader in readers {
        let (whole, refused) = reader.join(here)??;
        read = (read.0 + whole, read.1 + refused);
    }
    println!("  {} pairs were read, {} reads met a writer", read.0, read.1);
    assert_eq!(shared.get(here)?.0.load(here)?, 4 * rounds);
    Ok(())
}

fn sums_of_all_nodes_are_whole(here: &Here<'_>) -> Checked {
    const ROUNDS: u64 = 300;
    let numbers = DArc::new(here, (DAtomic::new(here, -5i64)?, DAtomic::new(here, 0u64)?, DAtomic::new(here, false)?))?;
    let mut tasks = Vec::new();
    for node in here.nodes().chain(here.nodes()) {
        tasks.push(here.spawn_to(node, numbers.try_clone(here)?, |here, numbers| {
            let (sum, bits, flag) = numbers.get(here)?;
            let mut won = 0u64;
            for round in 0..ROUNDS {
                sum.fetch_add(here, 3)?;
                sum.fetch_sub(here, 1)?;
                bits.fetch_xor(here, 1 << (round % 60))?;
                won += u64::from(!flag.swap(here, true)?);
            }
            Ok::<_, ShareError>(won)
        })?);
    }
    let mut won = 0;
    for task in tasks {
        won += task.join(here)??;
    }
    let (sum, bits, flag) = numbers.get(here)?;
    assert_eq!((sum.load(here)?, bits.load(here)?, flag.load(here)?), (6 * 2 * ROUNDS as i64 - 5, 0, true));
    assert_eq!(won, 1, "one has found it unset");
    Ok(())
}
