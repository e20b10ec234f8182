//! Guards against two who hold a lock at once, at the server and at clients, against updates that are lost under one, against the dead who keep
//! the living waiting, and against what they write late. Clients die as real processes, killed without a chance to say so.

use crate::common::functions::*;
use crate::common::*;
use farfield_core::lock::LockRecord;
use farfield_pool::{Backend, PoolBuilder, Share};
use farfield_server::{Config, Server};
use farfield_wic::{CallError, Caller, Fault, Function, Place, Registry, Sim, Stop, Where, WicLock};
use fastrand::Rng;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// The lock, and two words that it guards: one beside it in its page, one in another page.
const LOCK: u64 = 4096 + 128;
const WORDS: [u64; 2] = [4096 + 8, 12288 + 64];
/// Of those who are not meant to die: longer than a busy machine keeps a thread from running.
const LONG_LEASE: Duration = Duration::from_secs(15);
/// Of simulations, where each look at the clock takes a microsecond: longer than all the others' looks while one has the lock.
const SIM_LEASE: Duration = Duration::from_millis(3);
/// Of those who die.
const SHORT_LEASE: Duration = Duration::from_millis(300);

fn lock() -> WicLock {
    WicLock::at(LOCK).lease(LONG_LEASE).within(PATIENCE)
}

function!(
    /// Increments both words so many times, by reading and writing, with such a lease. How often was the lock left?
    Count: (u64, Duration) => u64, |place, given| {
        let (times, lease) = given;
        let mut left = 0;
        for _ in 0..times {
            let held = lock().lease(lease).lock(place).await?;
            left += u64::from(held.was_left());
            let words = [place.read_u64(WORDS[0]).await?, place.read_u64(WORDS[1]).await?];
            held.write_u64(WORDS[0], words[0] + 1).await?;
            place.yield_now().await;
            held.write_u64(WORDS[1], words[1] + 1).await?;
            held.unlock().await?;
        }
        Ok(left)
    }
);

function!(
    /// Both words, of one moment, so many times.
    Look: u64 => Vec<[u64; 2]>, |place, times| {
        let mut seen = Vec::new();
        for _ in 0..times {
            let held = lock().read(place).await?;
            let words = [place.read_u64(WORDS[0]).await?, place.read_u64(WORDS[1]).await?];
            held.unlock().await?;
            seen.push(words);
        }
        Ok(seen)
    }
);

function!(
    /// Has the lock for a moment, with a lease of so many milliseconds, if it is free within so many; was it left?
    Try: (u64, u64) => bool, |place, given| {
        let lock = WicLock::at(LOCK).lease(Duration::from_millis(given.0)).within(Duration::from_millis(given.1));
        let held = lock.lock(place).await?;
        let was_left = held.was_left();
        held.unlock().await?;
        Ok(was_left)
    }
);

function!(
    /// Takes the lock and does not give it back by itself: it fails, panics, or goes on until it is ended.
    Leave: u64 => (), |place, how| {
        let held = lock().lock(place).await?;
        held.write_u64(WORDS[0], 1).await?;
        match how {
            0 => place.read_u64(BYTES).await.map(drop),
            1 => panic!("as it shall"),
            _ => loop {
                place.read_u64(0).await?;
            }
        }
    }
);

function!(
    /// Writes under a lock that it has lost by its own fault: it is too slow. Then under one that it has.
    Late: u64 => (), |place, lease_ms| {
        let held = WicLock::at(LOCK).lease(Duration::from_millis(lease_ms)).within(PATIENCE).lock(place).await?;
        let began = place.now();
        while place.now() - began < Duration::from_millis(lease_ms) {
            place.pause(Duration::from_millis(1)).await;
        }
        held.write_u64(WORDS[0], 99).await
    }
);

function!(
    /// Writes more often than its lease of 50 µs allows in a simulation, having kept it on, or not.
    Keep: bool => (), |place, keeps| {
        let held = lock().lease(Duration::from_micros(50)).lock(place).await?;
        if keeps {
            held.keep(LONG_LEASE).await?;
        }
        for number in 0..100 {
            held.write_u64(WORDS[0], number).await?;
        }
        held.unlock().await
    }
);

fn registry() -> Registry {
    Registry::standard().with::<Count>().with::<Look>().with::<Try>().with::<Leave>().with::<Late>().with::<Repair>()
}

fn server() -> Server {
    serve(Config { functions: registry(), call_within: PATIENCE, call_steps_max: u64::MAX, ..config() })
}

fn words(backend: &dyn Backend) -> [u64; 2] {
    let bytes = contents(backend);
    WORDS.map(|offset| word(&bytes, offset).unwrap())
}

/// Nobody has it, and nobody waits.
fn is_free(backend: &dyn Backend) -> bool {
    let bytes = contents(backend);
    let bytes = bytes[LOCK as usize..].first_chunk().unwrap();
    let mut caller_clock = LockRecord::decode(bytes).unwrap().encode();
    // Tickets and epochs go on.
    caller_clock[..16].fill(0);
    caller_clock == LockRecord::FREE.encode()
}

#[test]
fn both_sides_count_under_one_lock_and_lose_nothing() {
    const TIMES: u64 = 40;
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let owner = open(url);
        let share = owner.share().unwrap();
        // Another process could be each of these; two have the region of the first.
        let backends: Vec<Arc<dyn Backend>> = (0..6)
            .map(|thread| match thread % 3 {
                2 => PoolBuilder::new().url(url.replace("unix:", "shm:")).deadline(PATIENCE).attach(&share).unwrap(),
                _ => owner.clone(),
            })
            .collect();
        let barrier = Barrier::new(6);
        std::thread::scope(|scope| {
            for (thread, backend) in backends.into_iter().enumerate() {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut caller = Caller::new(backend);
                    let place = EVERYWHERE[thread % 2];
                    barrier.wait();
                    if thread < 4 {
                        let within = PATIENCE * 2;
                        let left =
                            caller.calls::<Count>(vec![(TIMES / 4, LONG_LEASE); 4]).at(place).within(within).run();
                        assert!(left.iter().all(|left| *left == Ok(0)), "{left:?} {place:?} at {url}");
                    } else {
                        let seen = caller.call::<Look>(TIMES).at(place).within(PATIENCE * 2).run().unwrap();
                        assert!(seen.iter().all(|[one, other]| one == other), "{seen:?} {place:?} at {url}");
                        assert!(seen.is_sorted());
                    }
                });
            }
        });
        assert_eq!(words(&*owner), [4 * TIMES; 2], "{url}");
        assert!(is_free(&*owner));
    }
}

#[test]
fn in_any_order_a_simulation_loses_nothing() {
    for seed in 0..30 {
        let sim = Sim::new(seed, vec![0; BYTES as usize]).steps(u64::MAX);
        assert!(sim.run::<Count>(vec![(5, SIM_LEASE); 12]).iter().all(|left| *left == Ok(0)), "seed {seed}");
        let bytes = sim.bytes();
        WORDS.iter().for_each(|offset| assert_eq!(word(&bytes, *offset), Some(60), "seed {seed}"));
        // Whoever fails on the way leaves the lock to the next one.
        let faulty = Sim::new(seed, vec![0; BYTES as usize]).steps(u64::MAX).faults(1000);
        let ends = faulty.run::<Count>(vec![(2, SIM_LEASE); 8]);
        assert!(ends.iter().any(Result::is_ok), "seed {seed}: {ends:?}");
    }
}

#[test]
fn the_next_holder_learns_that_a_lock_was_left_locked() {
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        for (place, how) in
            [(Where::Client, 0), (Where::Server, 0), (Where::Server, 1), (Where::Client, 2), (Where::Server, 2)]
        {
            let mut caller = Caller::new(backend.clone());
            let end = caller.call::<Leave>(how).at(place).steps(500).run().unwrap_err();
            let is_right = match how {
                0 => end == CallError::Fault(Fault::OutOfRange { offset: BYTES }),
                1 => end == CallError::Panicked,
                _ => matches!(end, CallError::Overrun { .. }),
            };
            assert!(is_right, "{end:?}");
            let mut other = Caller::new(backend.clone());
            let patience = PATIENCE.as_millis() as u64;
            // Long before its lease is over.
            let started = Instant::now();
            assert_eq!(other.call::<Try>((patience, patience)).at(place).within(PATIENCE).run(), Ok(true));
            assert!(started.elapsed() < LONG_LEASE);
            assert_eq!(other.call::<Try>((patience, 0)).at(place).run(), Ok(false), "and the next one is told nothing");
        }
    }
}

#[test]
fn a_waiter_that_times_out_is_told_and_leaves_the_line() {
    let server = server();
    let backend = open(tcp(&server));
    let (held, go_on) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    /// Has the lock until the test goes on.
    struct Hold;
    thread_local! { static GATES: std::cell::RefCell<Vec<Arc<Barrier>>> = const { std::cell::RefCell::new(Vec::new()) } }
    impl Function for Hold {
        const NAME: &'static str = "Hold";
        const VERSION: u32 = 1;
        type Argument = ();
        type Answer = ();
        async fn run<P: Place>(place: &P, (): ()) -> Result<(), Fault> {
            let held = lock().lock(place).await?;
            GATES.with_borrow(|gates| {
                for gate in gates {
                    gate.wait();
                }
            });
            held.unlock().await
        }
    }
    std::thread::scope(|scope| {
        let (gates, backend_of_holder) = (vec![held.clone(), go_on.clone()], backend.clone());
        scope.spawn(move || {
            GATES.set(gates);
            Caller::new(backend_of_holder).call::<Hold>(()).within(PATIENCE).run().unwrap();
        });
        held.wait();
        let mut caller = Caller::new(backend.clone());
        for place in EVERYWHERE {
            for within in [0, 30] {
                let locked = Err(CallError::Fault(Fault::Locked { offset: LOCK }));
                assert_eq!(caller.call::<Try>((1000, within)).at(place).run(), locked, "{place:?} within {within}");
            }
            // Ended while it waits.
            let ended = caller.call::<Try>((1000, 20_000)).at(place).within(Duration::from_millis(40)).run();
            assert!(matches!(ended, Err(CallError::TimedOut { .. })), "{ended:?}");
        }
        go_on.wait();
    });
    eventually("nobody waits", || is_free(&*backend));
}

#[test]
fn a_holder_whose_lease_expired_writes_nothing() {
    let server = server();
    let backend = open(tcp(&server));
    let mut caller = Caller::new(backend.clone());
    for place in EVERYWHERE {
        let fenced = Err(CallError::Fault(Fault::Fenced { offset: LOCK }));
        assert_eq!(caller.call::<Late>(20).at(place).within(PATIENCE).run(), fenced, "{place:?}");
        assert_eq!(words(&*backend), [0; 2]);
        let patience = PATIENCE.as_millis() as u64;
        assert_eq!(caller.call::<Try>((patience, patience)).at(place).run(), Ok(true), "it was left");
    }
    for seed in 0..10 {
        let sim = Sim::new(seed, vec![0; BYTES as usize]);
        assert_eq!(sim.run_one::<Keep>(true), Ok(()));
        assert_eq!(sim.run_one::<Keep>(false), Err(Stop::Fault(Fault::Fenced { offset: LOCK })));
    }
}

#[test]
fn bytes_that_are_no_lock_are_an_error() {
    let server = server();
    let backend = open(tcp(&server));
    let mut bytes = vec![0xEE; BYTES as usize];
    bytes[..4096].fill(0);
    fill(&*backend, &bytes);
    let mut caller = Caller::new(backend);
    let sim = Sim::new(1, bytes);
    for place in EVERYWHERE {
        let no_lock = Fault::NoLock { offset: LOCK };
        assert_eq!(caller.call::<Try>((1, 1)).at(place).run(), Err(CallError::Fault(no_lock)));
        assert_eq!(sim.run_one::<Try>((1, 1)), Err(Stop::Fault(no_lock)));
    }
    let mut caller = Caller::new(open("ram:"));
    assert_eq!(caller.call::<Try>((1, 1)).run(), Err(CallError::Fault(Fault::NotHere)));
}

const ENV_URL: &str = "FARFIELD_TEST_LOCK_URL";
const ENV_SHARE: &str = "FARFIELD_TEST_LOCK_SHARE";
const ENV_ROLE: &str = "FARFIELD_TEST_LOCK_ROLE";

function!(
    /// What the process that is killed does.
    Doomed: String => (), |place, role| {
        let lock = WicLock::at(LOCK).lease(SHORT_LEASE).within(PATIENCE);
        if role == "count" {
            println!("held");
            loop {
                let held = lock.lock(place).await?;
                let first = place.read_u64(WORDS[0]).await?;
                held.write_u64(WORDS[0], first + 1).await?;
                held.write_u64(WORDS[1], first + 1).await?;
                held.unlock().await?;
            }
        }
        let held = lock.lock(place).await?;
        println!("held");
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
        held.write_u64(WORDS[0], 1000).await
    }
);

/// Not a test: a client in a process of its own.
#[test]
#[ignore = "started by the tests of this file, in a process of its own"]
fn client_that_has_the_lock() {
    let [Ok(url), Ok(share), Ok(role)] = [ENV_URL, ENV_SHARE, ENV_ROLE].map(std::env::var) else { return };
    let share = Share::from_secret(&share).unwrap();
    let backend = PoolBuilder::new().url(url).client_name("doomed").deadline(PATIENCE).attach(&share).unwrap();
    let end = Caller::new(backend).call::<Doomed>(role).steps(u64::MAX).within(PATIENCE * 2).run();
    println!("end {end:?}");
}

struct Process {
    child: Child,
    says: BufReader<std::process::ChildStdout>,
}

impl Process {
    /// A client that has the lock, or had it once.
    fn new(url: &str, share: &Share, role: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "locks::client_that_has_the_lock", "--ignored", "--nocapture"])
            .env(ENV_URL, url.replace("unix:", "shm:"))
            .env(ENV_SHARE, share.to_secret())
            .env(ENV_ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        let mut process = Process { child, says };
        process.hear("held");
        process
    }

    fn hear(&mut self, what: &str) -> String {
        let mut line = String::new();
        while self.says.read_line(&mut line).unwrap() > 0 {
            if line.contains(what) {
                return line;
            }
            line.clear();
        }
        panic!("it did not say {what:?}");
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn a_holder_that_is_killed_is_waited_for_no_longer_than_its_lease() {
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        let share = backend.share().unwrap();
        for place in EVERYWHERE {
            let holder = Process::new(url, &share, "hold");
            let mut caller = Caller::new(backend.clone());
            let patience = PATIENCE.as_millis() as u64;
            let locked = Err(CallError::Fault(Fault::Locked { offset: LOCK }));
            let (first, started) = (caller.call::<Try>((patience, 0)).at(place).run(), Instant::now());
            holder.kill();
            // On a busy machine its lease may be over by now.
            assert!([locked, Ok(true)].contains(&first), "{first:?}");
            if first != Ok(true) {
                assert_eq!(
                    caller.call::<Try>((patience, patience)).at(place).within(PATIENCE).run(),
                    Ok(true),
                    "{place:?}"
                );
            }
            assert!(started.elapsed() < PATIENCE / 2);
        }
    }
}

#[test]
fn a_late_write_of_a_former_holder_is_refused() {
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        let share = backend.share().unwrap();
        let mut holder = Process::new(url, &share, "hold");
        let mut caller = Caller::new(backend.clone());
        let left = caller.call::<Count>((1, LONG_LEASE)).at(Where::Server).within(PATIENCE).run();
        assert_eq!(left, Ok(1), "the lock was left");
        // It is alive, and believes that it has the lock.
        writeln!(holder.child.stdin.take().unwrap(), "go on").unwrap();
        let end = holder.hear("end");
        assert!(end.contains("Fenced"), "{end}");
        assert_eq!(words(&*backend), [1, 1], "nothing of it has arrived");
        holder.child.wait().unwrap();
        assert_eq!(caller.call::<Count>((1, LONG_LEASE)).within(PATIENCE).run(), Ok(0), "nor did it harm the next one");
    }
}

#[test]
fn clients_may_be_killed_at_any_moment() {
    let server = server();
    let backend = open(tcp(&server));
    let share = backend.share().unwrap();
    let mut caller = Caller::new(backend.clone());
    let mut dice = Rng::with_seed(0xdead);
    for round in 0..4 {
        let doomed = [(); 2].map(|()| Process::new(tcp(&server), &share, "count"));
        let place = EVERYWHERE[round % 2];
        // Meanwhile the living go on.
        let rounds = 1 + dice.u64(..6);
        let before = words_of(&mut caller, place);
        for _ in 0..rounds {
            let seen = words_of(&mut caller, place);
            assert!(seen >= before, "{seen:?} after {before:?}");
        }
        doomed.into_iter().for_each(Process::kill);
        words_of(&mut caller, place);
    }

    /// The words as they are when nobody changes them; repaired, if somebody died in between.
    fn words_of(caller: &mut Caller, place: Where) -> [u64; 2] {
        let (words, was_left) = caller.call::<Repair>(()).at(place).within(PATIENCE).run().unwrap();
        assert!(was_left || words[0] == words[1], "{words:?} {place:?}, and nobody says that somebody died");
        [words[0]; 2]
    }
}

function!(
    Repair: () => ([u64; 2], bool), |place, _nothing| {
        let held = lock().lock(place).await?;
        let words = [place.read_u64(WORDS[0]).await?, place.read_u64(WORDS[1]).await?];
        held.write_u64(WORDS[1], words[0]).await?;
        let was_left = held.was_left();
        held.unlock().await?;
        Ok((words, was_left))
    }
);
