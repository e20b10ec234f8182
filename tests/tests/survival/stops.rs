//! Do programs go on while servers of a mirror, or of an erasure code, are silent: stopped for a while, or behind a network that is cut?
//!
//! Danger: whoever waits for a server that others can do without; a server that is believed when it is back, before it has what it missed.
//! `FARFIELD_SEED` repeats the choices. What a program waited for longest in the best of several silences is compared with a second: a machine that is busy
//! makes programs wait, too.

use farfield::{FarBox, Health, Heap, Plane};
use farfield_tests::{
    Command, FarRun, MIB, PATIENCE, Random, Relay, Running, Scratch, Server, compile, farfield, tier, wait_until,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NEAR: u64 = 2 * MIB;
/// Values of a page each: four times what can be near.
const VALUES: usize = 2048;
const WORDS: usize = 512;
/// No program waits longer for a server that others can do without.
const STALL_MAX: Duration = Duration::from_secs(1);

/// A server that can be silent.
struct Leg {
    server: Server,
    /// The network before it.
    relay: Option<Relay>,
}

/// Why it is silent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Silence {
    /// It is stopped, and its sockets take what still fits.
    Stop,
    /// The same, and programs have its memory: they notice only when they need more of it.
    StopShm,
    /// Nothing gets through to it.
    Cut,
}

impl Leg {
    fn start(scratch: &Scratch, silence: Silence, number: usize) -> Leg {
        let (name, options) = (format!("server-{number}"), ["--capacity", "256M"]);
        let server = match silence {
            Silence::StopShm => Server::start(scratch, &name, options),
            Silence::Stop | Silence::Cut => Server::start_tcp(scratch, &name, options),
        };
        let relay = (silence == Silence::Cut).then(|| Relay::to(server.url()));
        Leg { server, relay }
    }

    fn url(&self) -> &str {
        self.relay.as_ref().map_or(self.server.url(), Relay::url)
    }

    fn fall_silent(&self) {
        match &self.relay {
            Some(relay) => relay.cut(),
            None => self.server.running().signal(libc::SIGSTOP),
        }
    }

    fn speak(&self) {
        match &self.relay {
            Some(relay) => relay.mend(),
            None => self.server.running().signal(libc::SIGCONT),
        }
    }
}

/// A mirror of two, or `Some((K, M))`.
type Made = Option<(usize, usize)>;

fn url(made: Made, legs: &[Leg]) -> String {
    let urls = legs.iter().map(Leg::url).collect::<Vec<_>>().join(",");
    made.map_or(format!("mirror({urls})"), |(data, parity)| format!("ec({data},{parity},{urls})"))
}

/// Legs, and how many of them may be lost.
fn legs(made: Made, scratch: &Scratch, silence: Silence) -> (Vec<Leg>, usize) {
    let (all, may_die) = made.map_or((2, 1), |(data, parity)| (data + parity, parity));
    ((0..all).map(|number| Leg::start(scratch, silence, number)).collect(), may_die)
}

type Value = FarBox<[u64; WORDS]>;

/// The number that every word of a value is, and its round.
fn value(index: usize, round: u64) -> [u64; WORDS] {
    [(index as u64) << 32 | round; WORDS]
}

/// What threads that use a heap have seen.
#[derive(Default)]
struct Load {
    is_over: AtomicBool,
    steps: AtomicU64,
    longest_ns: AtomicU64,
}

impl Load {
    /// The longest step since this was asked last.
    fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest_ns.swap(0, Ordering::Relaxed))
    }

    fn take_steps(&self, steps: u64) {
        let from = self.steps.load(Ordering::Relaxed);
        wait_until("the load goes on", || self.steps.load(Ordering::Relaxed) >= from + steps);
    }

    /// Reads and writes values of its own, and compares, until it is over.
    fn run(&self, heap: &Heap, random: &mut Random, first: usize, values: &mut [Value], rounds: &mut [u64]) {
        while !self.is_over.load(Ordering::Relaxed) {
            let index = random.below(values.len());
            let number = first + index;
            let writes = random.below(2) == 0;
            let started = Instant::now();
            let scope = heap.enter();
            let expected = value(number, rounds[index]);
            if writes {
                let held = values[index].get_mut(&scope).expect("enough servers answer");
                assert!(held[..] == expected, "value {number} is not of round {}", rounds[index]);
                rounds[index] += 1;
                *held = value(number, rounds[index]);
            } else {
                assert!(values[index].get(&scope).expect("enough servers answer")[..] == expected, "value {number}");
            }
            drop(scope);
            self.longest_ns.fetch_max(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
            self.steps.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Says that it is over when it is dropped: also when something panics.
struct Over<'a>(&'a Load);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

fn heap(made: Made, legs: &[Leg], plane: Plane) -> Heap {
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).pool(url(made, legs));
    heap.patience(PATIENCE).build().expect("the servers accept")
}

/// A heap works while one leg after the other is silent for a while; each time a thread touches far memory for the first time. In the end as many die as may,
/// and those that are left were silent once.
fn go_on(made: Made, silence: Silence, plane: Plane) {
    let mut random = Random::new(silence as u64 + 7);
    let scratch = Scratch::new("stops");
    let (mut legs, may_die) = legs(made, &scratch, silence);
    let heap = heap(made, &legs, plane);
    let load = Load::default();
    let mut values: Vec<Value> = (0..VALUES).map(|index| heap.alloc(value(index, 0)).expect("there is room")).collect();
    let mut rounds = vec![0u64; VALUES];
    let (own_values, others) = values.split_at_mut(VALUES / 2);
    let (own_rounds, other_rounds) = rounds.split_at_mut(VALUES / 2);
    let longest = std::thread::scope(|scope| {
        let (load, heap, legs) = (&load, &heap, &mut legs);
        let silencer = scope.spawn(move || {
            let _over = Over(load);
            let (mut random, mut other, mut longest) = (Random::new(3), Some((others, other_rounds)), Vec::new());
            for round in 0..tier(3, 40) {
                wait_until("all legs hold everything", || heap.health() == Health::Good);
                load.take_steps(300);
                load.longest();
                let leg = &legs[round % legs.len()];
                leg.fall_silent();
                if silence != Silence::StopShm {
                    wait_until("the leg is left out", || heap.health() == Health::Degraded);
                }
                if let Some((values, rounds)) = other.take() {
                    let mut random = Random::new(random.below(1 << 20) as u64);
                    scope.spawn(move || load.run(heap, &mut random, VALUES / 2, values, rounds));
                }
                load.take_steps(300 + random.below(300) as u64);
                leg.speak();
                wait_until("it is used again, and holds everything", || heap.health() == Health::Good);
                longest.push(load.longest());
            }
            (0..may_die).for_each(|_| legs.remove(0).server.kill());
            wait_until("the death is noticed", || heap.health() == Health::Degraded);
            longest
        });
        load.run(heap, &mut random, 0, own_values, own_rounds);
        silencer.join().expect("it ends")
    });
    judge(&format!("{made:?}, {silence:?}, {plane:?}"), &longest);
    for (index, held) in values.iter().enumerate() {
        let scope = heap.enter();
        assert!(held.get(&scope).expect("a leg lives")[..] == value(index, rounds[index]), "value {index} at the end");
    }
    drop(values);
    heap.verify();
}

#[test]
fn heaps_go_on_while_a_server_of_a_mirror_is_stopped() {
    go_on(None, Silence::Stop, Plane::Page);
}

#[test]
fn heaps_go_on_while_a_server_on_this_machine_is_stopped() {
    go_on(None, Silence::StopShm, Plane::Hybrid);
}

#[test]
fn heaps_go_on_while_a_server_of_a_mirror_cannot_be_reached() {
    go_on(None, Silence::Cut, Plane::Hybrid);
}

#[test]
fn heaps_go_on_while_a_server_of_an_erasure_code_is_stopped() {
    go_on(Some((2, 1)), Silence::Stop, Plane::Page);
}

#[test]
fn heaps_go_on_while_a_server_of_an_erasure_code_cannot_be_reached() {
    go_on(Some((2, 2)), Silence::Cut, Plane::Page);
}

/// `farfield pool status` of a job.
fn status(scratch: &Scratch, job: &Running) -> String {
    let words =
        [farfield().to_str().expect("an ASCII path"), "pool", "status", &job.pid().to_string()].map(str::to_owned);
    Command::new(&scratch.folder("status"), words).run().text()
}

/// The longest time that a block took, as the program has said since it had said so much.
fn longest(job: &Running, from: usize) -> Duration {
    let said = job.output();
    let said = said[from..].lines().filter_map(|line| line.strip_prefix("took ")?.strip_suffix(" ms")?.parse().ok());
    Duration::from_millis(said.max().unwrap_or(0))
}

/// Says for how long somebody waited in each of the silences; fails if that was too long whenever.
fn judge(what: &str, longest: &[Duration]) {
    println!("{what}: longest steps while a server was silent {longest:.0?}");
    let best = longest.iter().min().expect("there was a silence");
    assert!(*best < STALL_MAX, "{what}: some step took {longest:.0?} in each of the silences");
}

/// Pages that it has brought near so far.
fn pages_in(scratch: &Scratch, job: &Running) -> u64 {
    let words = [farfield().to_str().expect("an ASCII path"), "top", "--once", "--json", &job.pid().to_string()]
        .map(str::to_owned);
    let top = Command::new(&scratch.folder("top"), words).run();
    let Ok(seen) = serde_json::from_str::<serde_json::Value>(&top.text()) else { return 0 };
    seen["jobs"][0]["counters"]["pages_in"].as_u64().unwrap_or(0)
}

fn programs_go_on(made: Made, silence: Silence, mode: &str) {
    let scratch = Scratch::new("stops-run");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let (mut legs, may_die) = legs(made, &scratch, silence);
    let options = ["--near", "16M", "--mode", mode, "--far", &url(made, &legs)];
    // Two processes, one of which the other has forked; each checks every word of its memory, again and again, until it is killed.
    let words = [hog.to_str().expect("an ASCII path"), "48", "0", "2", "2", "stalls"];
    let job = FarRun::new(&scratch, options, words).start();
    let degraded = |is_so: bool| move |status: &str| status.contains("silent") == is_so;
    let wait_for = |what: &str, is_so: &dyn Fn(&str) -> bool| {
        wait_until(what, || {
            assert!(!job.is_over(), "{what}: the program has ended: {}{}", job.output(), job.errors());
            is_so(&status(&scratch, &job))
        });
    };
    let bring_near = |pages: u64| {
        let from = pages_in(&scratch, &job);
        wait_until("the program goes on", || {
            assert!(!job.is_over(), "the program has ended: {}{}", job.output(), job.errors());
            pages_in(&scratch, &job) >= from + pages
        });
    };
    bring_near(20_000);
    let mut stalls = Vec::new();
    for round in 0..tier(2, 30) {
        wait_for("all legs hold everything", &degraded(false));
        let (silent, said) = (round % legs.len(), job.output().len());
        legs[silent].fall_silent();
        if silence != Silence::StopShm {
            wait_for("the leg is left out", &degraded(true));
        }
        bring_near(2000);
        stalls.push(longest(&job, said));
        legs[silent].speak();
    }
    wait_for("the last one is used again, and holds everything", &degraded(false));
    (0..may_die).for_each(|_| legs.remove(0).server.kill());
    wait_for("the death is noticed", &degraded(true));
    bring_near(2000);
    judge(&format!("{made:?}, {silence:?}, {mode}"), &stalls);
}

#[test]
fn programs_go_on_while_a_server_of_a_mirror_is_stopped() {
    programs_go_on(None, Silence::Stop, "signal");
    programs_go_on(None, Silence::Cut, "thread");
}

#[test]
fn programs_go_on_while_a_server_on_this_machine_is_stopped() {
    programs_go_on(None, Silence::StopShm, "signal");
}

#[test]
fn programs_go_on_while_a_server_of_an_erasure_code_is_stopped() {
    programs_go_on(Some((2, 1)), Silence::Stop, "thread");
    programs_go_on(Some((2, 1)), Silence::Cut, "signal");
}
