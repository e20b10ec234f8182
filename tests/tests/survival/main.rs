//! Do programs outlive the servers of a mirror, or of an erasure code? Members are killed by SIGKILL at random moments, under load, and others come in.
//!
//! Danger: a byte that was only at the server that died; a spare that is believed before it holds everything; an old version after a death.
//! `FARFIELD_SEED` repeats the choices.

mod back;
mod collected;
mod promises;
mod steps;
mod stops;

use collected::Graph;
use farfield::{FarBox, Health, Heap, Plane};
use farfield_tests::{FarRun, MIB, Over, PATIENCE, Scratch, Server, compile, deep, seeded, tier, wait_until};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const NEAR: u64 = 2 * MIB;
/// Values of a page each: four times what can be near.
const VALUES: usize = 2048;
const WORDS: usize = 512;
/// Spares of one pool; all of them come in.
const SPARES: usize = 4;

/// How the servers are reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Tcp,
    Shm,
    Both,
    Tls,
}

impl Way {
    /// One more server, which keeps much less than all of them together.
    fn start(self, scratch: &Scratch, number: usize) -> Server {
        let (name, options) = (format!("server-{number}"), ["--capacity", "256M"]);
        match self {
            Way::Tls => Server::start_tls(scratch, &name, "tls://127.0.0.1:0", &options),
            Way::Shm => Server::start(scratch, &name, options),
            Way::Both if number.is_multiple_of(2) => Server::start(scratch, &name, options),
            Way::Tcp | Way::Both => Server::start_tcp(scratch, &name, options),
        }
    }

    /// Another one where one was, with nothing in it.
    fn start_again(self, scratch: &Scratch, number: usize, url: &str) -> Server {
        let (name, options) = (format!("server-{number}"), ["--capacity", "256M"]);
        match self {
            Way::Tls => Server::start_tls(scratch, &name, url, &options),
            _ => Server::start_at(scratch, &name, url.to_owned(), options),
        }
    }
}

/// What the pool is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Made {
    Mirror,
    Ec(usize, usize),
}

impl Made {
    /// Servers besides spares, and how many of them may die.
    fn members(self) -> (usize, usize) {
        match self {
            Made::Mirror => (2, 1),
            Made::Ec(data, parity) => (data + parity, parity),
        }
    }

    /// Of all of these; those behind its members are spares.
    fn url(self, servers: &[Server]) -> String {
        let members = self.members().0;
        let urls = servers.iter().enumerate().map(|(index, server)| match index < members {
            true => server.url().to_owned(),
            false => format!("spare={}", server.url()),
        });
        let urls = urls.collect::<Vec<_>>().join(",");
        match self {
            Made::Mirror => format!("mirror({urls})"),
            Made::Ec(data, parity) => format!("ec({data},{parity},{urls})"),
        }
    }
}

type Value = FarBox<[u64; WORDS]>;

/// The number that every word of a value is, and its round.
fn value(index: usize, round: u64) -> [u64; WORDS] {
    [(index as u64) << 32 | round; WORDS]
}

/// What a heap does while its servers die, and compares.
trait Load {
    fn new(heap: &Heap) -> Self;
    fn step(&mut self, heap: &Heap, random: &mut Rng);
    /// Compares all there is.
    fn check(self, heap: &Heap);
}

/// Values of a page each, which are read and written.
struct Values {
    values: Vec<Value>,
    rounds: Vec<u64>,
}

impl Load for Values {
    fn new(heap: &Heap) -> Values {
        let values = (0..VALUES).map(|index| heap.alloc(value(index, 0)).expect("there is room")).collect();
        Values { values, rounds: vec![0; VALUES] }
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let index = random.usize(..VALUES);
        let (scope, round) = (heap.enter(), &mut self.rounds[index]);
        let expected = value(index, *round);
        if random.usize(..2) == 0 {
            assert!(self.values[index].get(&scope).expect("a member lives")[..] == expected, "value {index}");
        } else {
            let held = self.values[index].get_mut(&scope).expect("a member lives");
            assert!(held[..] == expected, "value {index} is not of round {round}");
            *round += 1;
            *held = value(index, *round);
        }
    }

    fn check(self, heap: &Heap) {
        for (index, held) in self.values.iter().enumerate() {
            let scope = heap.enter();
            let held = held.get(&scope).expect("a member lives");
            assert!(held[..] == value(index, self.rounds[index]), "value {index} at the end");
        }
    }
}

/// A heap works, and one member after the other is killed, whenever all hold everything, and in the end as many as may die. How many.
fn outlive<L: Load>(made: Made, way: Way, plane: Plane, pool: u64) -> usize {
    let mut random = seeded(pool << 8 | way as u64);
    let (members, may_die) = made.members();
    let kills = SPARES + may_die;
    let scratch = Scratch::new("survival");
    let mut servers: Vec<_> = (0..members + SPARES).map(|number| way.start(&scratch, number)).collect();
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).pool(made.url(&servers));
    let heap = heap.patience(PATIENCE).build().expect("the servers accept");
    let mut load = L::new(&heap);
    // How much is done before each kill, and which of the members it is.
    let choices: Vec<_> =
        (0..kills).map(|kill| (random.usize(..3000), random.usize(..members - kill.saturating_sub(SPARES)))).collect();
    let (steps, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            // Ends the load also when something panics here.
            let _over = Over(&is_over);
            for (kill, (wait, member)) in choices.into_iter().enumerate() {
                let from = steps.load(Ordering::Relaxed);
                wait_until("the load goes on", || steps.load(Ordering::Relaxed) >= from + wait);
                // The last ones die together.
                if kill <= SPARES {
                    wait_until("all members hold everything", || heap.health() == Health::Good);
                }
                // The next one comes in behind the other members.
                servers.remove(member).kill();
            }
            wait_until("the death is noticed", || heap.health() == Health::Degraded);
        });
        while !is_over.load(Ordering::Relaxed) {
            load.step(&heap, &mut random);
            steps.fetch_add(1, Ordering::Relaxed);
        }
        killer.join().expect("it kills and ends");
    });
    load.check(&heap);
    heap.verify();
    kills
}

fn outlive_many<L: Load>(made: Made, way: Way, plane: Plane) {
    let mut killed = 0;
    for pool in 0..tier(1, 50) {
        killed += outlive::<L>(made, way, plane, pool);
    }
    println!("{made:?}, {way:?}, {plane:?}: {killed} servers were killed, and nothing was lost");
}

#[test]
fn heaps_outlive_servers_across_tcp() {
    outlive_many::<Values>(Made::Mirror, Way::Tcp, Plane::Page);
}

#[test]
fn heaps_outlive_servers_with_shared_memory() {
    outlive_many::<Values>(Made::Mirror, Way::Shm, Plane::Page);
}

#[test]
fn heaps_outlive_encrypted_servers() {
    outlive_many::<Values>(Made::Mirror, Way::Tls, Plane::Page);
}

#[test]
fn heaps_of_small_values_outlive_servers_near_and_elsewhere() {
    outlive_many::<Values>(Made::Mirror, Way::Both, Plane::Hybrid);
}

#[test]
fn heaps_outlive_one_of_three_servers() {
    outlive_many::<Values>(Made::Ec(2, 1), Way::Tcp, Plane::Hybrid);
}

#[test]
fn heaps_outlive_two_of_six_servers() {
    outlive_many::<Values>(Made::Ec(4, 2), Way::Both, Plane::Page);
}

#[test]
fn collected_heaps_outlive_servers_while_their_objects_move() {
    outlive_many::<Graph<false>>(Made::Mirror, Way::Both, Plane::Page);
}

#[test]
fn collected_heaps_outlive_servers_that_move_their_objects() {
    outlive_many::<Graph<true>>(Made::Mirror, Way::Both, Plane::Page);
}

#[test]
fn programs_outlive_servers() {
    programs_outlive(&[Way::Tcp, Way::Shm, Way::Both], tier(3, 250));
}

#[test]
fn programs_outlive_encrypted_servers() {
    // CI tries one that comes back.
    if deep() {
        programs_outlive(&[Way::Tls], 250);
    }
}

/// Runs so many programs, one after the other, and kills a server under each.
fn programs_outlive(ways: &[Way], rounds: usize) {
    let mut random = seeded(99);
    let scratch = Scratch::new("survival-run");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let hog = hog.to_str().expect("an ASCII path");
    let mut killed = 0;
    for round in 0..rounds {
        let way = ways[round % ways.len()];
        let made = [Made::Mirror, Made::Ec(2, 1)][round % 2];
        let (members, _) = made.members();
        let mut servers: Vec<_> = (0..members).map(|number| way.start(&scratch, number)).collect();
        let mode = ["signal", "thread"][random.usize(..2)];
        let options = ["--near", "16M", "--mode", mode, "--far", &made.url(&servers)];
        // Two processes, one of which the other has forked; each checks every word of its memory, again and again.
        let job = FarRun::new(&scratch, options, [hog, "48", tier("2", "4"), "2", "2"]).start();
        // Before, the job would be refused: its user shall know at once that a member is not there.
        wait_until("the program has started", || job.output().contains("started"));
        // Any moment is as good as another.
        std::thread::sleep(Duration::from_millis(random.usize(..1200) as u64));
        let was_running = !job.is_over();
        servers.remove(random.usize(..members)).kill();
        killed += usize::from(was_running);
        let ended = job.wait();
        let said = || format!("round {round}, {made:?}, {way:?}, {mode}: {}\n{}", ended.text(), ended.errors);
        assert!(ended.code == 0 && ended.text().contains("0 wrong"), "{}", said());
    }
    println!("{killed} servers were killed under programs");
    assert!(killed > 0, "all programs ended before");
}
