//! Do programs go on while servers of a mirror, or of an erasure code, are silent: stopped for a while, or behind a network that is cut?
//!
//! Danger: whoever waits for a server that others can do without, also to fork; a server that is believed when it is back, before it has what it missed, or after
//! another took its place.
//! `FARFIELD_SEED` repeats the choices. What a program waited for longest in the best of several silences is compared with a second: a machine that is busy
//! makes programs wait, too.

use farfield::{FarBox, Health, Heap, Plane};
use farfield_tests::{
    Command, FarRun, MIB, Over, PATIENCE, Relay, Running, Scratch, Server, compile, deep, farfield, seeded, tier,
    wait_until,
};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NEAR: u64 = 2 * MIB;
/// Values of a page each: four times what can be near.
const VALUES: usize = 2048;
const WORDS: usize = 512;
/// No program waits longer for a server that others can do without.
const STALL_MAX: Duration = Duration::from_secs(1);

/// A server that can be silent.
struct Member {
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

impl Member {
    fn start(scratch: &Scratch, silence: Silence, number: usize) -> Member {
        // Children that have ended leave what they had for as long as a lease; and of who forks more often than that, servers keep what was overwritten.
        let (name, options) = (format!("server-{number}"), ["--capacity", "4G", "--lease", "1s"]);
        let server = match silence {
            Silence::StopShm => Server::start(scratch, &name, options),
            Silence::Stop | Silence::Cut => Server::start_tcp(scratch, &name, options),
        };
        let relay = (silence == Silence::Cut).then(|| Relay::to(server.url()));
        Member { server, relay }
    }

    fn url(&self) -> &str {
        self.relay.as_ref().map_or(self.server.url(), Relay::url)
    }

    fn fall_silent(&self) {
        match &self.relay {
            Some(relay) => relay.cut(),
            None => self.server.running().stop(),
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

fn url(made: Made, members: &[Member]) -> String {
    url_with(made, members.iter().map(|member| member.url().to_owned()))
}

/// Of members, and of spares as `spare=URL`.
fn url_with(made: Made, urls: impl Iterator<Item = String>) -> String {
    let urls = urls.collect::<Vec<_>>().join(",");
    made.map_or(format!("mirror({urls})"), |(data, parity)| format!("ec({data},{parity},{urls})"))
}

/// Members, and how many of them may be lost.
fn members(made: Made, scratch: &Scratch, silence: Silence) -> (Vec<Member>, usize) {
    let (all, may_die) = made.map_or((2, 1), |(data, parity)| (data + parity, parity));
    ((0..all).map(|number| Member::start(scratch, silence, number)).collect(), may_die)
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
    fn run(&self, heap: &Heap, random: &mut Rng, first: usize, values: &mut [Value], rounds: &mut [u64]) {
        while !self.is_over.load(Ordering::Relaxed) {
            let index = random.usize(..values.len());
            let number = first + index;
            let writes = random.usize(..2) == 0;
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

fn heap(made: Made, members: &[Member], plane: Plane) -> Heap {
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).pool(url(made, members));
    heap.patience(PATIENCE).build().expect("the servers accept")
}

/// A heap works while one member after the other is silent for a while; each time a thread touches far memory for the first time. In the end as many die as may,
/// and those that are left were silent once.
fn go_on(made: Made, silence: Silence, plane: Plane) {
    let mut random = seeded(silence as u64 + 7);
    let scratch = Scratch::new("stops");
    let (mut members, may_die) = members(made, &scratch, silence);
    let heap = heap(made, &members, plane);
    let load = Load::default();
    let mut values: Vec<Value> = (0..VALUES).map(|index| heap.alloc(value(index, 0)).expect("there is room")).collect();
    let mut rounds = vec![0u64; VALUES];
    let (own_values, others) = values.split_at_mut(VALUES / 2);
    let (own_rounds, other_rounds) = rounds.split_at_mut(VALUES / 2);
    let longest = std::thread::scope(|scope| {
        let (load, heap, members) = (&load, &heap, &mut members);
        let silencer = scope.spawn(move || {
            let _over = Over(&load.is_over);
            let (mut random, mut other, mut longest) = (seeded(3), Some((others, other_rounds)), Vec::new());
            for round in 0..tier(3, 40) {
                wait_until("all members hold everything", || heap.health() == Health::Good);
                load.take_steps(300);
                load.longest();
                let member = &members[round % members.len()];
                member.fall_silent();
                if silence != Silence::StopShm {
                    wait_until("the member is left out", || heap.health() == Health::Degraded);
                }
                if let Some((values, rounds)) = other.take() {
                    let mut random = seeded(random.usize(..1 << 20) as u64);
                    scope.spawn(move || load.run(heap, &mut random, VALUES / 2, values, rounds));
                }
                load.take_steps(300 + random.usize(..300) as u64);
                member.speak();
                wait_until("it is used again, and holds everything", || heap.health() == Health::Good);
                longest.push(load.longest());
            }
            (0..may_die).for_each(|_| members.remove(0).server.kill());
            wait_until("the death is noticed", || heap.health() == Health::Degraded);
            longest
        });
        load.run(heap, &mut random, 0, own_values, own_rounds);
        silencer.join().expect("it ends")
    });
    judge(&format!("{made:?}, {silence:?}, {plane:?}"), &longest);
    for (index, held) in values.iter().enumerate() {
        let scope = heap.enter();
        assert!(
            held.get(&scope).expect("a member lives")[..] == value(index, rounds[index]),
            "value {index} at the end"
        );
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

/// A member falls silent while a heap writes, and answers when nobody uses the heap any more: it is used again and given what it lacks all the same.
#[test]
fn a_heap_at_rest_is_protected_again_when_a_silent_server_answers() {
    for made in [None, Some((2, 1))] {
        let (mut random, scratch) = (seeded(11), Scratch::new("stops-rest"));
        let (mut members, _) = members(made, &scratch, Silence::Stop);
        let heap = heap(made, &members, Plane::Page);
        let mut values: Vec<Value> = (0..VALUES).map(|index| heap.alloc(value(index, 0)).expect("room")).collect();
        let mut rounds = vec![0u64; VALUES];
        members[0].fall_silent();
        wait_until("the member is left out", || {
            let (index, scope) = (random.usize(..VALUES), heap.enter());
            rounds[index] += 1;
            *values[index].get_mut(&scope).expect("enough servers answer") = value(index, rounds[index]);
            heap.health() == Health::Degraded
        });
        members[0].speak();
        wait_until("it holds everything, though nobody uses the heap", || heap.health() == Health::Good);
        members.remove(1).server.kill();
        for (index, held) in values.iter().enumerate() {
            let scope = heap.enter();
            assert!(
                held.get(&scope).expect("enough live")[..] == value(index, rounds[index]),
                "{made:?}, value {index}"
            );
        }
    }
}

/// A job under which servers fall silent.
pub(super) struct Job<'a> {
    scratch: &'a Scratch,
    job: Running,
}

impl Job<'_> {
    pub(super) fn start<'a>(scratch: &'a Scratch, url: &str, mode: &str, words: &[&str]) -> Job<'a> {
        let options = ["--near", "16M", "--mode", mode, "--far", url];
        Job { scratch, job: FarRun::new(scratch, options, words).start() }
    }

    /// What a command of ours says of the job.
    fn ask(&self, words: &[&str]) -> String {
        let program = farfield();
        let program = program.to_str().expect("an ASCII path");
        let words: Vec<_> = [program].iter().chain(words).map(|word| (*word).to_owned()).collect();
        Command::new(&self.scratch.folder("ask"), words.into_iter().chain([self.job.pid().to_string()])).run().text()
    }

    fn wait_until(&self, what: &str, mut is_true: impl FnMut() -> bool) {
        wait_until(what, || {
            assert!(!self.job.is_over(), "{what}: it has ended: {}{}", self.job.output(), self.job.errors());
            is_true()
        });
    }

    /// Until a server is silent, lost, or lacks something; or none.
    pub(super) fn wait_until_degraded(&self, is_so: bool, what: &str) {
        self.wait_until(what, || self.ask(&["pool", "status"]).contains("silent") == is_so);
    }

    /// Pages that it has brought near so far.
    fn pages_in(&self) -> u64 {
        let Ok(seen) = serde_json::from_str::<serde_json::Value>(&self.ask(&["top", "--once", "--json"])) else {
            return 0;
        };
        seen["jobs"][0]["counters"]["pages_in"].as_u64().unwrap_or(0)
    }

    pub(super) fn bring_near(&self, pages: u64) {
        let from = self.pages_in();
        self.wait_until("the program goes on", || self.pages_in() >= from + pages);
    }

    /// So many rounds of `forks`, the last of which began after this call.
    fn go_round(&self) {
        let rounds = || self.job.output().lines().filter(|line| line.starts_with("round")).count();
        let from = rounds();
        self.wait_until("parent and child go on", || rounds() >= from + 2);
    }

    /// Times that `what` took, as the program has said since it had said so much.
    fn took(&self, what: &str, from: usize) -> Vec<Duration> {
        let said = self.job.output();
        let times = said[from..].lines().filter_map(|line| line.strip_prefix(what)?.strip_suffix(" ms")?.parse().ok());
        times.map(Duration::from_millis).collect()
    }
}

fn best(longest: &[Duration]) -> Duration {
    *longest.iter().min().expect("there was a silence")
}

/// Says for how long somebody waited in each of the silences; fails if that was too long whenever.
fn judge(what: &str, longest: &[Duration]) {
    println!("{what}: longest steps while a server was silent {longest:.0?}");
    assert!(best(longest) < STALL_MAX, "{what}: some step took {longest:.0?} in each of the silences");
}

/// Two processes, one of which the other has forked; each checks every word of its memory, again and again, until it is killed.
pub(super) const HOG: [&str; 5] = ["48", "0", "2", "2", "stalls"];

fn programs_go_on(made: Made, silence: Silence, mode: &str) {
    let scratch = Scratch::new("stops-run");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let (mut members, may_die) = members(made, &scratch, silence);
    let words = [&[hog.to_str().expect("an ASCII path")], &HOG[..]].concat();
    let job = Job::start(&scratch, &url(made, &members), mode, &words);
    job.bring_near(20_000);
    let mut stalls = Vec::new();
    // One silence says nothing of a machine that is busy.
    let (least, most) = tier((1, 3), (30, 30));
    while stalls.len() < least || stalls.len() < most && best(&stalls) >= STALL_MAX {
        job.wait_until_degraded(false, "all members hold everything");
        let (silent, said) = (stalls.len() % members.len(), job.job.output().len());
        members[silent].fall_silent();
        if silence != Silence::StopShm {
            job.wait_until_degraded(true, "the member is left out");
        }
        job.bring_near(2000);
        stalls.push(job.took("took ", said).into_iter().max().unwrap_or_default());
        members[silent].speak();
    }
    job.wait_until_degraded(false, "the last one is used again, and holds everything");
    // Those that were silent have to hold what was written meanwhile.
    (0..may_die).filter_map(|_| members.pop()).for_each(|member| member.server.kill());
    job.wait_until_degraded(true, "the death is noticed");
    // More pages than the whole memory has.
    job.bring_near(20_000);
    judge(&format!("{made:?}, {silence:?}, {mode}"), &stalls);
}

/// A program forks again and again, also while a member is silent; parent and children change what they have in common.
fn programs_fork(made: Made, silence: Silence, mode: &str) {
    let scratch = Scratch::new("stops-forks");
    let Some(forks) = compile("forks", scratch.path()) else { return };
    let (mut members, may_die) = members(made, &scratch, silence);
    let job = Job::start(&scratch, &url(made, &members), mode, &[forks.to_str().expect("an ASCII path"), "24"]);
    job.go_round();
    let mut forks = Vec::new();
    // A server whose memory is ours, and that fell silent in the middle of a snapshot, is given up: what it makes of that nobody could know in time.
    let comes_back = silence != Silence::StopShm;
    for round in 0..if comes_back { tier(1, 20) } else { 1 } {
        job.wait_until_degraded(false, "all members hold everything");
        // A child that was forked while a member was silent does without it, and outlives no other one.
        job.go_round();
        let (silent, said) = (round % members.len(), job.job.output().len());
        members[silent].fall_silent();
        job.go_round();
        forks.extend(job.took("fork took ", said));
        members[silent].speak();
    }
    job.go_round();
    if comes_back {
        job.wait_until_degraded(false, "the last one is used again, and holds everything");
        job.go_round();
        (0..may_die).for_each(|_| members.remove(0).server.kill());
        job.go_round();
    }
    judge(&format!("{made:?}, {silence:?}, {mode}, fork"), &forks);
}

/// A member is cut off for so long that it is given up, and a spare is filled. Then as many others may die as before; when it can be reached again it is filled as any other.
fn programs_give_up(made: Made, mode: &str) {
    let scratch = Scratch::new("stops-spare");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let (mut members, may_die) = members(made, &scratch, Silence::Cut);
    let spare = Member::start(&scratch, Silence::Cut, members.len());
    let urls = members.iter().map(|member| member.url().to_owned()).chain([format!("spare={}", spare.url())]);
    let words = [&[hog.to_str().expect("an ASCII path")], &HOG[..]].concat();
    let job = Job::start(&scratch, &url_with(made, urls), mode, &words);
    job.bring_near(20_000);
    job.wait_until_degraded(false, "all members hold everything");
    members[0].fall_silent();
    job.wait_until_degraded(true, "the member is left out");
    job.bring_near(2000);
    job.wait_until_degraded(false, "the member is given up, and the spare holds everything");
    (0..may_die).for_each(|_| members.remove(1).server.kill());
    job.wait_until_degraded(true, "the death is noticed");
    // More than the whole memory: what only the spare has is read, too.
    job.bring_near(20_000);
    // It still has what it held when it was cut off, for whoever would ask it for that.
    members[0].speak();
    job.wait_until_degraded(false, "the one that can be reached again holds everything");
    spare.server.kill();
    job.wait_until_degraded(true, "the death is noticed");
    job.bring_near(20_000);
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
    // CI tries this with a mirror: what decides is shared.
    if !deep() {
        return;
    }
    programs_go_on(Some((2, 1)), Silence::Stop, "thread");
    programs_go_on(Some((2, 1)), Silence::Cut, "signal");
}

#[test]
fn programs_fork_while_a_server_of_a_mirror_is_stopped() {
    programs_fork(None, Silence::Stop, "signal");
    if deep() {
        programs_fork(None, Silence::StopShm, "thread");
    }
}

#[test]
fn programs_fork_while_a_server_of_an_erasure_code_is_stopped() {
    // CI tries this with a mirror: what decides is shared.
    if !deep() {
        return;
    }
    programs_fork(Some((2, 1)), Silence::Stop, "signal");
}

#[test]
fn a_server_of_a_mirror_that_stays_away_is_replaced() {
    programs_give_up(None, "signal");
}

#[test]
fn a_server_of_an_erasure_code_that_stays_away_is_replaced() {
    // CI tries this with a mirror: what decides is shared.
    if !deep() {
        return;
    }
    programs_give_up(Some((2, 1)), "thread");
}
