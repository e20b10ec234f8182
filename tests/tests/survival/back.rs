//! Are programs protected again when servers that were killed are started again, at the same URL and with nothing in them, and no spare is named?
//!
//! Danger: a server that is back is believed to hold what it held before, or what it was not given yet, and is then the only one that is asked.
//! `FARFIELD_SEED` repeats the choices.

use super::stops::{HOG, Job};
use super::{Made, NEAR, VALUES, Value, Way, value};
use farfield::{Health, Heap, Plane};
use farfield_tests::{PATIENCE, Scratch, compile, seeded, tier, wait_until};
use fastrand::Rng;

/// Accesses between two events.
const STEPS: usize = 400;

/// A heap, and what is in it.
struct Load {
    heap: Heap,
    values: Vec<Value>,
    rounds: Vec<u64>,
    random: Rng,
}

impl Load {
    fn new(heap: Heap, seed: u64) -> Load {
        let values = (0..VALUES).map(|index| heap.alloc(value(index, 0)).expect("there is room")).collect();
        Load { heap, values, rounds: vec![0; VALUES], random: seeded(seed) }
    }

    /// Reads and writes values, and compares.
    fn work(&mut self) {
        for _ in 0..STEPS {
            let index = self.random.usize(..VALUES);
            let scope = self.heap.enter();
            let held = self.values[index].get_mut(&scope).expect("a member lives");
            assert!(held[..] == value(index, self.rounds[index]), "value {index} is not of its round");
            self.rounds[index] += 1;
            *held = value(index, self.rounds[index]);
        }
    }

    fn check(&self) {
        for (index, held) in self.values.iter().enumerate() {
            let scope = self.heap.enter();
            assert!(held.get(&scope).expect("a member lives")[..] == value(index, self.rounds[index]), "value {index}");
        }
    }
}

/// Each server is killed and started again, more often than the pool could lose any; in the end as many as may die together. How many.
fn come_back(made: Made, way: Way, plane: Plane, pool: u64) -> usize {
    let (members, may_die) = made.members();
    let scratch = Scratch::new("survival-back");
    let mut servers: Vec<_> = (0..members).map(|number| way.start(&scratch, number)).collect();
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).pool(made.url(&servers));
    let mut load = Load::new(heap.patience(PATIENCE).build().expect("the servers accept"), pool << 8 | way as u64);
    // In the deep run once more often than there are places for servers that come back.
    let kills = if pool == 0 { tier(members + may_die, 16) } else { members + may_die };
    for kill in 0..kills {
        let context = format!("{made:?}, {way:?}, {plane:?}, kill {kill}");
        let (member, restored) = (kill % members, load.heap.stats().restored_pages);
        let url = servers[member].url().to_owned();
        servers.remove(member).kill();
        load.work();
        wait_until("the death is noticed", || load.heap.health() == Health::Degraded);
        let stats = load.heap.stats();
        assert!(stats.missing_legs >= 1 && stats.exposed_pages > 0, "{context}: {stats:?}");
        servers.insert(member, way.start_again(&scratch, members + kill, &url));
        load.work();
        wait_until("all members hold everything", || load.heap.health() == Health::Good);
        wait_until("nothing is exposed", || load.heap.stats().exposed_pages == 0);
        let stats = load.heap.stats();
        assert!(stats.restored_pages > restored, "{context}: {stats:?}");
        load.work();
    }
    wait_until("all members hold everything", || load.heap.health() == Health::Good);
    for _ in 0..may_die {
        servers.remove(load.random.usize(..servers.len())).kill();
    }
    load.work();
    load.check();
    load.values.clear();
    load.heap.verify();
    kills + may_die
}

fn come_back_often(made: Made, way: Way, plane: Plane) {
    let killed: usize = (0..tier(1, 20)).map(|pool| come_back(made, way, plane, pool)).sum();
    println!("{made:?}, {way:?}, {plane:?}: {killed} servers were killed, and nothing was lost");
}

#[test]
fn a_server_of_a_mirror_that_is_started_again_protects_again() {
    come_back_often(Made::Mirror, Way::Tcp, Plane::Page);
    come_back_often(Made::Mirror, Way::Both, Plane::Hybrid);
    come_back_often(Made::Mirror, Way::Tls, Plane::Page);
}

#[test]
fn a_server_of_an_erasure_code_that_is_started_again_protects_again() {
    come_back_often(Made::Ec(2, 1), Way::Both, Plane::Page);
    come_back_often(Made::Ec(4, 2), Way::Tcp, Plane::Hybrid);
}

/// Two processes, one of which has what the other had.
const HEIRS: [&str; 2] = ["24", "stays"];

/// The same under a program that was not written for it, two processes of it.
fn come_back_under_programs(made: Made, way: Way, mode: &str, program: &str, words: &[&str]) {
    let (members, may_die) = made.members();
    let scratch = Scratch::new("survival-back-run");
    let Some(program) = compile(program, scratch.path()) else { return };
    let mut servers: Vec<_> = (0..members).map(|number| way.start(&scratch, number)).collect();
    let words = [&[program.to_str().expect("an ASCII path")], words].concat();
    let job = Job::start(&scratch, &made.url(&servers), mode, &words);
    job.bring_near(20_000);
    for kill in 0..tier(members, 4 * members) {
        let member = kill % members;
        let url = servers[member].url().to_owned();
        servers.remove(member).kill();
        job.wait_until_degraded(true, "the death is noticed");
        job.bring_near(2000);
        servers.insert(member, way.start_again(&scratch, members + kill, &url));
        job.wait_until_degraded(false, "all members hold everything");
    }
    for _ in 0..may_die {
        servers.remove(0).kill();
    }
    job.wait_until_degraded(true, "the death is noticed");
    // More than the whole memory.
    job.bring_near(20_000);
}

#[test]
fn a_server_that_is_started_again_protects_programs_again() {
    come_back_under_programs(Made::Mirror, Way::Shm, "thread", "hog", &HOG);
    come_back_under_programs(Made::Mirror, Way::Tls, "signal", "hog", &HOG);
    // CI tries an erasure code with programs that fork.
    if farfield_tests::deep() {
        come_back_under_programs(Made::Mirror, Way::Tcp, "signal", "hog", &HOG);
        come_back_under_programs(Made::Ec(2, 1), Way::Both, "signal", "hog", &HOG);
        come_back_under_programs(Made::Mirror, Way::Tls, "thread", "hog", &HOG);
    }
}

#[test]
fn a_server_that_is_started_again_protects_forked_programs_again() {
    if farfield_tests::deep() {
        come_back_under_programs(Made::Mirror, Way::Both, "thread", "forks", &HEIRS);
    }
    come_back_under_programs(Made::Ec(2, 1), Way::Tcp, "signal", "forks", &HEIRS);
}
