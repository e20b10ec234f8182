//! Does a map whose index is far answer alike here and at the server, whatever the pool is?
//!
//! Danger: bytes of before at the server; a value of another key; a server without the function, or one that dies, that takes the answer with it;
//! pages that come near though the server was asked. `FARFIELD_SEED` repeats the choices.

use farfield::{FarError, FarFlatMap, Heap, Plane, PoolError, Where};
use farfield_server::{Config, Server};
use farfield_tests::{MIB, PATIENCE, heap_at, seeded, serve_here, tier};
use farfield_wic::{Aggregate, Registry};
use fastrand::Rng;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

const PLANES: [Plane; 3] = [Plane::Page, Plane::Object, Plane::Hybrid];
const PLACES: [Where; 3] = [Where::Client, Where::Server, Where::Auto];

type Key = [u8; 16];
type Value = [u64; 8];

/// A server of this process, and where it is found: across TCP and in shared memory.
fn serve(functions: Registry) -> (Server, [String; 2]) {
    let (server, [tcp, _, shared]) = serve_here(Config { functions, ..Config::default() });
    (server, [tcp, shared])
}

fn heap(url: &str, plane: Plane) -> Heap {
    heap_at(url, plane, MIB)
}

fn key(number: u64) -> Key {
    let mut key = [1; 16];
    key[..8].copy_from_slice(&number.to_le_bytes());
    key
}

/// Fills a map of eight times near, and its twin.
fn fill(map: &mut FarFlatMap<Key, Value>, heap: &Heap, random: &mut Rng) -> HashMap<Key, Value> {
    fill_with(map, heap, random, 60_000)
}

fn fill_with(map: &mut FarFlatMap<Key, Value>, heap: &Heap, random: &mut Rng, entries: u64) -> HashMap<Key, Value> {
    let mut twin = HashMap::new();
    for number in 0..entries {
        let value = [number, random.u64(..), 2, 3, 4, 5, 6, 7];
        assert_eq!(map.insert(&heap.enter(), key(number), value).unwrap(), twin.insert(key(number), value));
    }
    twin
}

/// Changes and look-ups by turns, of single keys and of many.
fn look_up_and_change(url: &str, plane: Plane, at: Where, random: &mut Rng) {
    let heap = heap(url, plane);
    let mut map: FarFlatMap<Key, Value> = FarFlatMap::new().at(at);
    let mut twin = fill_with(&mut map, &heap, random, tier(24_000, 60_000));
    for round in 0..tier(4, 60) {
        for _ in 0..500 {
            let (key, value) = (key(random.u64(..70_000)), [random.u64(..); 8]);
            match random.u32(..3) {
                0 => assert_eq!(map.remove(&heap.enter(), &key).unwrap(), twin.remove(&key)),
                _ => assert_eq!(map.insert(&heap.enter(), key, value).unwrap(), twin.insert(key, value)),
            }
        }
        for _ in 0..200 {
            let key = key(random.u64(..70_000));
            let found = map.get(&heap.enter(), &key).unwrap();
            assert_eq!(found, twin.get(&key).copied(), "{url}, {plane:?}, {at:?}, round {round}");
        }
        for count in [1, 70, 3000] {
            let keys: Vec<Key> = (0..count).map(|_| key(random.u64(..90_000))).collect();
            let found = map.get_many(&heap.enter(), &keys).unwrap();
            let expected: Vec<_> = keys.iter().map(|key| twin.get(key).copied()).collect();
            assert_eq!(found, expected, "{url}, {plane:?}, {at:?}, round {round}");
        }
    }
    drop(map);
    heap.verify();
}

#[test]
fn the_answer_is_that_of_a_hash_map_at_each_place_and_on_each_plane() {
    let mut random = seeded(0x39);
    let (_server, urls) = serve(Registry::standard());
    for (index, plane) in PLANES.into_iter().enumerate() {
        for at in PLACES {
            look_up_and_change(&urls[index % 2], plane, at, &mut random);
        }
    }
}

#[test]
fn over_mirrors_and_stripes_too() {
    let mut random = seeded(0x139);
    let servers = [(); 3].map(|()| serve(Registry::standard()));
    let [(_, one), (_, two), (_, three)] = &servers;
    let mirror = format!("mirror({},{})", one[0], two[1]);
    for url in [format!("stripe({},{})", one[0], two[1]), format!("stripe({mirror},{})", three[0]), mirror] {
        look_up_and_change(&url, Plane::Page, Where::Server, &mut random);
    }
}

#[test]
fn a_get_at_the_server_brings_nothing_near() {
    let (_server, urls) = serve(Registry::standard());
    let servers = [(); 2].map(|()| serve(Registry::standard()));
    let stripe = format!("stripe({},{})", servers[0].1[0], servers[1].1[1]);
    for url in [&urls[0], &urls[1], &stripe] {
        let heap = heap(url, Plane::Page);
        let mut map = FarFlatMap::new().at(Where::Server);
        let twin = fill(&mut map, &heap, &mut seeded(0x239));
        let before = heap.stats();
        let keys: Vec<Key> = twin.keys().copied().collect();
        for some in keys.chunks(1000).take(20) {
            map.get_many(&heap.enter(), some).unwrap();
        }
        for key in keys.iter().step_by(60) {
            assert_eq!(map.get(&heap.enter(), key).unwrap().as_ref(), twin.get(key));
        }
        let after = heap.stats();
        // Buckets of more than one page are looked at here: one in some hundreds.
        assert!(after.misses - before.misses < 210, "{url}: {} misses of 21,000 gets", after.misses - before.misses);
        // Here, it would have been seen.
        let map = map.at(Where::Client);
        keys.iter().step_by(60).for_each(|key| assert!(map.contains_key(&heap.enter(), key).unwrap()));
        assert!(heap.stats().misses - after.misses > 500);
    }
}

#[test]
fn pools_without_the_function_answer_near() {
    let mut random = seeded(0x339);
    let (_old, of_old) = serve(Registry::new().with::<Aggregate>());
    let (_new, of_new) = serve(Registry::standard());
    for url in ["ram:".to_owned(), of_old[0].clone(), format!("stripe({},{})", of_new[0], of_old[0])] {
        for at in tier(&[Where::Server][..], &[Where::Server, Where::Auto]) {
            look_up_and_change(&url, Plane::Page, *at, &mut random);
        }
    }
}

#[test]
fn a_server_of_a_mirror_that_dies_takes_no_answer_with_it() {
    let (first, of_first) = serve(Registry::standard());
    let (_second, of_second) = serve(Registry::standard());
    let heap = heap(&format!("mirror({},{})", of_first[0], of_second[0]), Plane::Page);
    let mut map = FarFlatMap::new().at(Where::Server);
    let twin = fill(&mut map, &heap, &mut seeded(0x439));
    let keys: Vec<Key> = twin.keys().copied().collect();
    let mut first = Some(first);
    for (index, some) in keys.chunks(500).take(60).enumerate() {
        if index == 20 {
            drop(first.take());
        }
        let found = map.get_many(&heap.enter(), some).unwrap();
        assert!(found.iter().zip(some).all(|(found, key)| found.as_ref() == twin.get(key)), "batch {index}");
        assert_eq!(map.get(&heap.enter(), &some[0]).unwrap().as_ref(), twin.get(&some[0]));
    }
}

#[test]
fn a_server_that_dies_is_an_error_of_the_pool() {
    let (server, urls) = serve(Registry::standard());
    let heap = heap(&urls[0], Plane::Page);
    let mut map = FarFlatMap::new().at(Where::Server);
    let twin = fill(&mut map, &heap, &mut seeded(0x539));
    drop(server);
    let mut errors = 0;
    for (key, value) in twin.iter().take(400) {
        match map.get(&heap.enter(), key) {
            Ok(found) => assert_eq!(found.as_ref(), Some(value), "it was near"),
            Err(FarError::Pool(PoolError::ServerGone { .. })) => errors += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(errors > 200, "{errors}");
    // Its pages cannot leave any more.
    core::mem::forget((map, heap));
}

#[test]
fn answers_are_right_while_the_pool_is_exchanged() {
    let servers = [(); 2].map(|()| serve(Registry::standard()));
    let [(_, one), (_, two)] = &servers;
    let heap = heap(&one[0], Plane::Page);
    let mut map = FarFlatMap::new().at(Where::Server);
    let twin = fill(&mut map, &heap, &mut seeded(0x639));
    let keys: Vec<Key> = twin.keys().copied().collect();
    let look_up = |some: &[Key]| {
        let found = map.get_many(&heap.enter(), some).unwrap();
        assert!(found.iter().zip(some).all(|(found, key)| found.as_ref() == twin.get(key)));
    };
    for to in [two[0].clone(), format!("stripe({},{})", one[0], two[1]), one[1].clone()] {
        let switch = heap.switch_pool(to).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let reader = threads.spawn(|| {
                for some in keys.chunks(100).cycle() {
                    look_up(some);
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            let switched = switch.wait(PATIENCE);
            is_over.store(true, Ordering::Relaxed);
            switched.expect("it ends").unwrap();
            reader.join().unwrap();
        });
        let before = heap.stats().misses;
        keys.chunks(1000).take(5).for_each(look_up);
        assert!(heap.stats().misses - before < 60, "the new pool answers");
    }
}
