//! Are the numbers of a far vector added up where they are, and is the answer that of a loop over a `Vec`?
//!
//! Danger: bytes of before at the server; an answer that depends on what is near, on the pool or on who uses the heap meanwhile; a server without
//! the function, or one that dies, that takes the answer with it. `FARFIELD_SEED` repeats the choices.

use farfield::{CallError, FarError, FarVec, Health, Heap, Number, OffloadError, Part, Plane, Where};
use farfield_server::{Config, Server};
use farfield_tests::{
    MIB, Over, PATIENCE, Relay, Scratch, ask_until_gone, heap_at, seeded, serve_here, tier, wait_until,
};
use farfield_wic::{Aggregate, Registry};
use fastrand::Rng;
use std::fmt::Debug;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const NEAR: u64 = 2 * MIB;
const PLANES: [Plane; 3] = [Plane::Page, Plane::Object, Plane::Hybrid];
const PLACES: [Where; 3] = [Where::Client, Where::Server, Where::Auto];

/// A server of this process, and where it is found: across TCP, a socket, shared memory.
fn serve(functions: Registry) -> (Server, [String; 3]) {
    serve_here(Config { functions, ..Config::default() })
}

fn heap(url: &str, plane: Plane) -> Heap {
    heap_at(url, plane, NEAR)
}

fn word(random: &mut Rng) -> u64 {
    (0..3).fold(0, |word, _| word << 24 | random.usize(..1 << 24) as u64)
}

/// Numbers by chance.
trait Any: Number {
    fn any(random: &mut Rng) -> Self;
}
macro_rules! any {
    ($($number:ty: $make:expr;)*) => {$(
        impl Any for $number {
            fn any(random: &mut Rng) -> $number {
                let make: fn(u64) -> $number = $make;
                make(word(random))
            }
        }
    )*};
}
any! {
    u8: |bits| bits as u8;
    i32: |bits| bits as i32;
    u64: |bits| bits;
    i64: |bits| bits as i64;
    f32: |bits| (bits as i32 as f32) / 1000.0;
    // Of all sizes, so that a sum with rounding at each step would show its order; seldom NaN.
    f64: |bits| if bits.is_multiple_of(100_003) { f64::NAN } else { (bits as i32 as f64) * 10f64.powi((bits >> 32) as i32 % 12) };
}

/// The same bits, whatever they say.
fn bits<T: Debug>(value: T) -> String {
    format!("{value:?}")
}

/// What a loop finds.
fn twin<N: Number>(numbers: &[N], values: &(Bound<N>, Bound<N>)) -> Part<N> {
    let mut part = Part::default();
    // In another order and in other parts than anybody else.
    for chunk in numbers.rchunks(777) {
        let mut of_chunk = Part::default();
        of_chunk.add_all(chunk, values);
        part.merge(&of_chunk);
    }
    part
}

#[track_caller]
fn compare<N: Number>(found: &Part<N>, right: &Part<N>) {
    let all = |part: &Part<N>| bits((part.count(), part.sum(), part.mean(), part.min(), part.max()));
    assert_eq!(all(found), all(right));
}

/// Changes, reads and questions by turns, while another thread uses the same vector and the same heap.
fn ask_and_change<N: Any>(heap: &Heap, random: &mut Rng, rounds: usize) {
    let count = (2 * NEAR) as usize / size_of::<N>();
    let mut model: Vec<N> = (0..count).map(|_| N::any(random)).collect();
    let mut vec = FarVec::new();
    let mut other: FarVec<u64> = FarVec::new();
    for part in model.chunks(10_000) {
        vec.extend_from_slice(&heap.enter(), part).unwrap();
    }
    for start in (0..50_000u64).step_by(1000) {
        other.extend(&heap.enter(), start..start + 1000).unwrap();
    }
    for _ in 0..rounds {
        for _ in 0..random.usize(..300) {
            let (index, number) = (random.usize(..count), N::any(random));
            *vec.get_mut(&heap.enter(), index).unwrap().unwrap() = number;
            model[index] = number;
        }
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let (vec, model, is_over) = (&vec, &model, &is_over);
            let mut of_reader = seeded(word(random));
            let other = &mut other;
            let reader = threads.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let index = of_reader.usize(..count);
                    assert_eq!(bits(vec.get(&heap.enter(), index).unwrap().unwrap()), bits(model[index]));
                    *other.get_mut(&heap.enter(), index % 50_000).unwrap().unwrap() += 1;
                }
            });
            let over = Over(is_over);
            for place in PLACES {
                let (one, end) = (random.usize(..count + 1), random.usize(..count + 1));
                let range = one.min(end)..one.max(end);
                let (low, high) = (N::any(random), N::any(random));
                let values = match random.usize(..4) {
                    0 => (Bound::Included(low), Bound::Excluded(high)),
                    1 => (Bound::Excluded(low), Bound::Unbounded),
                    _ => (Bound::Unbounded, Bound::Unbounded),
                };
                let found = vec.aggregate(heap).over(range.clone()).filter(values).at(place).run();
                let found = found.unwrap_or_else(|error| panic!("{place:?}, {range:?}: {error}"));
                compare(&found, &twin(&model[range], &values));
            }
            drop(over);
            // A scope does not wait until a thread has given back what it had of the heap.
            reader.join().unwrap();
        });
    }
    drop((vec, other));
}

#[test]
fn the_answer_is_that_of_a_loop_on_each_plane() {
    let mut random = seeded(0x0ff);
    let (_server, urls) = serve(Registry::standard());
    for (plane, url) in PLANES.into_iter().zip(&urls) {
        let heap = heap(url, plane);
        let rounds = tier(1, 20);
        ask_and_change::<f64>(&heap, &mut random, rounds);
        match plane {
            Plane::Page => {
                ask_and_change::<i64>(&heap, &mut random, 2 * rounds);
                ask_and_change::<u8>(&heap, &mut random, rounds);
            }
            Plane::Object => {
                ask_and_change::<i32>(&heap, &mut random, rounds);
                ask_and_change::<f32>(&heap, &mut random, rounds);
            }
            _ => ask_and_change::<u64>(&heap, &mut random, 2 * rounds),
        }
        heap.verify();
    }
}

/// Numbers of eight times near, in a heap at this pool; and what they come to.
fn numbers(heap: &Heap) -> (FarVec<u64>, Part<u64>) {
    let all = (Bound::Unbounded, Bound::Unbounded);
    let mut vec = FarVec::new();
    let mut right = Part::default();
    for start in (0..8 * NEAR / 8).step_by(4096) {
        let part: Vec<u64> = (start..start + 4096).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        right.add_all(&part, &all);
        vec.extend_from_slice(&heap.enter(), &part).unwrap();
    }
    (vec, right)
}

/// Questions that are answered at the servers of this heap's pool bring nothing near, but for what is there already.
fn assert_stays_far(heap: &Heap, pool: &str) {
    let (vec, right) = numbers(heap);
    for place in [Where::Auto, Where::Server] {
        let before = heap.stats().fetched_bytes;
        compare(&vec.aggregate(heap).at(place).run().unwrap(), &right);
        let fetched = heap.stats().fetched_bytes - before;
        assert!(fetched <= 2 * NEAR, "{pool} {place:?} fetched {fetched} bytes");
    }
}

#[test]
fn aggregated_far_pages_stay_far() {
    let (_server, urls) = serve(Registry::standard());
    let heap = heap(&urls[0], Plane::Page);
    let (vec, right) = numbers(&heap);
    for (place, most) in [(Where::Auto, 2 * NEAR), (Where::Server, 2 * NEAR), (Where::Client, u64::MAX)] {
        let before = heap.stats().fetched_bytes;
        compare(&vec.aggregate(&heap).at(place).run().unwrap(), &right);
        let fetched = heap.stats().fetched_bytes - before;
        assert!(fetched <= most, "{place:?} fetched {fetched} bytes");
        assert!(place != Where::Client || fetched >= 6 * NEAR, "{fetched}: so it would have been seen");
    }
}

#[test]
fn numbers_are_written_back_before_the_server_is_asked() {
    let (_server, urls) = serve(Registry::standard());
    let heap = heap(&urls[1], Plane::Page);
    let mut vec = FarVec::new();
    vec.extend(&heap.enter(), 0..10_000i64).unwrap();
    {
        let scope = heap.enter();
        assert_eq!(vec.get(&scope, 5).unwrap(), Some(&5));
        let refused = vec.aggregate(&heap).at(Where::Server).run();
        assert_eq!(refused, Err(OffloadError::Far(FarError::NearFull)));
        assert_eq!(vec.aggregate(&heap).run().unwrap().sum(), 49_995_000, "here it can be done");
    }
    *vec.get_mut(&heap.enter(), 9_999).unwrap().unwrap() = -1;
    let found = vec.aggregate(&heap).at(Where::Server).run().unwrap();
    assert_eq!((found.sum(), found.min(), found.max()), (49_995_000 - 10_000, Some(-1), Some(9_998)));
    let other = Heap::builder().build().unwrap();
    assert_eq!(vec.aggregate(&other).run(), Err(OffloadError::Far(FarError::OtherHeap)));
    assert_eq!(FarVec::<f32>::new().aggregate(&heap).at(Where::Server).run().unwrap().count(), 0);
}

#[test]
fn pools_without_one_server_and_servers_without_the_function_answer_near() {
    let (_server, urls) = serve(Registry::standard());
    let (_old, of_old) = serve(Registry::new().with::<Aggregate>());
    let pools = ["ram:".to_owned(), "lz:?size=64M".to_owned(), format!("stripe({},ram:)", urls[0])];
    let half_old = format!("stripe({},{})", urls[0], of_old[0]);
    let of_old: Vec<&String> = of_old.iter().chain([&half_old]).collect();
    for pool in pools.iter().chain(of_old.iter().copied()) {
        let heap = heap(pool, Plane::Page);
        let (vec, right) = numbers(&heap);
        for _ in 0..2 {
            compare(&vec.aggregate(&heap).run().unwrap(), &right);
            let refused = vec.aggregate(&heap).at(Where::Server).run();
            let is_named = match refused {
                Err(OffloadError::Call(CallError::NoFunction { name })) => {
                    name == "ff.totals.u64" && of_old.contains(&pool)
                }
                Err(OffloadError::Call(CallError::Nowhere)) => !of_old.contains(&pool),
                _ => false,
            };
            assert!(is_named, "{pool}: {refused:?}");
        }
    }
}

#[test]
fn a_server_that_dies_gives_an_error_by_name() {
    for place in PLACES {
        let (server, urls) = serve(Registry::standard());
        let heap = heap(&urls[0], Plane::Page);
        let (vec, right) = numbers(&heap);
        ask_until_gone(server, &format!("{place:?}"), || {
            compare(&vec.aggregate(&heap).at(place).run()?, &right);
            Ok(())
        });
    }
}

/// Two servers of this process as a mirror, one of them across the network.
fn mirror_of_two() -> ([Server; 2], String) {
    let (one, of_one) = serve(Registry::standard());
    let (other, of_other) = serve(Registry::standard());
    ([one, other], format!("mirror({},{})", of_one[0], of_other[2]))
}

#[test]
fn over_a_mirror_the_answer_is_that_of_a_loop_and_what_is_far_stays_far() {
    let mut random = seeded(0x2ff);
    let (_servers, url) = mirror_of_two();
    for plane in PLANES {
        let heap = heap(&url, plane);
        ask_and_change::<f64>(&heap, &mut random, tier(1, 10));
        heap.verify();
    }
    assert_stays_far(&heap(&url, Plane::Page), &url);
}

#[test]
fn over_a_stripe_each_member_answers_for_what_it_keeps() {
    let mut random = seeded(0x3ff);
    let (_mirrored, mirror) = mirror_of_two();
    let (_one, of_one) = serve(Registry::standard());
    let (_other, of_other) = serve(Registry::standard());
    for (plane, url) in [
        (Plane::Page, format!("stripe({},{})", of_one[0], of_other[2])),
        (Plane::Object, format!("stripe({},{mirror},{})", of_one[2], of_other[1])),
        (Plane::Hybrid, format!("stripe({mirror},{})", of_one[0])),
    ] {
        let heap = heap(&url, plane);
        ask_and_change::<f64>(&heap, &mut random, tier(1, 10));
        ask_and_change::<u8>(&heap, &mut random, tier(1, 10));
        heap.verify();
        assert_stays_far(&heap, &url);
    }
}

#[test]
fn a_member_of_a_stripe_that_dies_gives_an_error_by_name() {
    for place in PLACES {
        let (_stays, of_one) = serve(Registry::standard());
        let (server, of_other) = serve(Registry::standard());
        let heap = heap(&format!("stripe({},{})", of_one[0], of_other[0]), Plane::Page);
        let (vec, right) = numbers(&heap);
        ask_until_gone(server, &format!("{place:?}"), || {
            compare(&vec.aggregate(&heap).at(place).run()?, &right);
            Ok(())
        });
    }
}

/// Changes, and questions that are answered at a server of the mirror if one holds everything; whether it was answered there.
fn change_and_ask(heap: &Heap, random: &mut Rng, vec: &mut FarVec<u64>, model: &mut [u64]) -> bool {
    let all = (Bound::Unbounded, Bound::Unbounded);
    for _ in 0..random.usize(..300) {
        let (index, number) = (random.usize(..model.len()), word(random));
        *vec.get_mut(&heap.enter(), index).unwrap().unwrap() = number;
        model[index] = number;
    }
    let from = random.usize(..model.len());
    let right = twin(&model[from..], &all);
    compare(&vec.aggregate(heap).over(from..).run().unwrap(), &right);
    match vec.aggregate(heap).over(from..).at(Where::Server).run() {
        Ok(found) => {
            compare(&found, &right);
            true
        }
        // One is being filled, and the other has just gone.
        Err(OffloadError::Call(CallError::NotNow)) => false,
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn servers_of_a_mirror_are_killed_and_nobody_who_asks_notices() {
    let mut random = seeded(0xdead);
    let scratch = Scratch::new("offload-kills");
    let begin = |number: usize, url: &str| {
        farfield_tests::Server::start_at::<&str>(&scratch, &format!("server-{number}"), url.to_owned(), [])
    };
    let mut servers = [begin(0, "tcp://127.0.0.1:0"), begin(1, "tcp://127.0.0.1:0")].map(Some);
    let urls = servers.each_ref().map(|server| server.as_ref().unwrap().url().to_owned());
    let heap = heap(&format!("mirror({})", urls.join(",")), Plane::Page);
    let mut model: Vec<u64> = (0..2 * NEAR / 8).map(|_| word(&mut random)).collect();
    let mut vec = FarVec::new();
    for part in model.chunks(10_000) {
        vec.extend_from_slice(&heap.enter(), part).unwrap();
    }
    let (rounds, there, is_over) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let mut of_killer = seeded(word(&mut random));
    std::thread::scope(|threads| {
        let killer = threads.spawn(|| {
            let _over = Over(&is_over);
            for kill in 0..tier(4, 40) {
                let from = rounds.load(Ordering::Relaxed) + 1 + of_killer.usize(..4);
                wait_until("all goes on", || rounds.load(Ordering::Relaxed) >= from);
                wait_until("both hold everything", || heap.health() == Health::Good);
                std::thread::sleep(Duration::from_micros(of_killer.usize(..20_000) as u64));
                servers[kill % 2].take().unwrap().kill();
                let from = rounds.load(Ordering::Relaxed) + of_killer.usize(..3);
                wait_until("it goes on", || rounds.load(Ordering::Relaxed) >= from);
                servers[kill % 2] = Some(begin(kill % 2, &urls[kill % 2]));
            }
        });
        while !is_over.load(Ordering::Relaxed) {
            let is_there = change_and_ask(&heap, &mut random, &mut vec, &mut model);
            there.fetch_add(usize::from(is_there), Ordering::Relaxed);
            rounds.fetch_add(1, Ordering::Relaxed);
        }
        killer.join().unwrap();
    });
    let (rounds, there) = (rounds.into_inner(), there.into_inner());
    assert!(2 * there > rounds, "{there} of {rounds} were answered where the numbers are");
    drop(vec);
    heap.verify();
}

#[test]
fn a_server_of_a_mirror_that_missed_what_was_written_does_not_answer() {
    let mut random = seeded(0x1a7e);
    let (servers, relays): (Vec<_>, Vec<_>) = (0..2)
        .map(|_| {
            let (server, urls) = serve(Registry::standard());
            (server, Relay::to(&urls[0]))
        })
        .unzip();
    let heap = heap(&format!("mirror({},{})", relays[0].url(), relays[1].url()), Plane::Page);
    let mut model: Vec<u64> = (0..2 * NEAR / 8).map(|_| word(&mut random)).collect();
    let mut vec = FarVec::new();
    for part in model.chunks(10_000) {
        vec.extend_from_slice(&heap.enter(), part).unwrap();
    }
    let mut longest = Duration::ZERO;
    for round in 0..tier(6, 60) {
        // What answers late is heard by whoever uses the heap.
        wait_until("both hold everything", || {
            change_and_ask(&heap, &mut random, &mut vec, &mut model);
            heap.health() == Health::Good
        });
        // There are ways to both.
        for _ in 0..4 {
            change_and_ask(&heap, &mut random, &mut vec, &mut model);
        }
        let relay = &relays[round % 2];
        relay.cut();
        let index = random.usize(..model.len());
        *vec.get_mut(&heap.enter(), index).unwrap().unwrap() = round as u64;
        model[index] = round as u64;
        heap.write_back(vec.far_ranges(..)).unwrap();
        let right = twin(&model, &(Bound::Unbounded, Bound::Unbounded));
        let ask = || {
            let started = Instant::now();
            compare(&vec.aggregate(&heap).at(Where::Server).run().expect("the other has it"), &right);
            started.elapsed()
        };
        longest = longest.max(ask());
        relay.mend();
        for _ in 0..4 {
            longest = longest.max(ask());
        }
    }
    assert!(longest < Duration::from_secs(20), "nobody waits for {longest:?}");
    drop(vec);
    heap.verify();
    drop((heap, relays, servers));
}

#[test]
fn answers_are_right_while_the_pool_is_exchanged() {
    let (_one, of_one) = serve(Registry::standard());
    let (_two, of_two) = serve(Registry::standard());
    let heap = heap(&of_one[0], Plane::Page);
    let (vec, right) = numbers(&heap);
    let stripe = format!("stripe({},{})", of_one[1], of_two[2]);
    let other_way = format!("stripe({},{})", of_two[1], of_one[0]);
    for to in [&of_two[0], &of_one[1], &stripe, &other_way, &of_two[2]] {
        let switch = heap.switch_pool(to.as_str()).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let asker = threads.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    compare(&vec.aggregate(&heap).run().unwrap(), &right);
                }
            });
            let switched = switch.wait(PATIENCE);
            is_over.store(true, Ordering::Relaxed);
            switched.expect("it ends").unwrap();
            asker.join().unwrap();
        });
        compare(&vec.aggregate(&heap).at(Where::Server).run().unwrap(), &right);
    }
}
