//! Does a collection that is written on public API alone answer alike in the heap, at the server, and in std?
//!
//! Danger: the guide's example is wrong; totals that a change leaves behind; a range whose answer depends on the place. `FARFIELD_SEED` repeats
//! the choices.

use farfield::{AtServer, AtServerMut, CallError, Heap, OffloadError, Plane, Where};
use farfield_server::{Config, Server};
use farfield_tests::{MIB, Scratch, heap_at, seeded, tier};
use farfield_wic::Registry;
use fastrand::Rng;
use skip_list::{RangeTotals, Replace, SkipList, Totals};
use std::collections::BTreeMap;

fn heap(url: &str, plane: Plane) -> Heap {
    heap_at(url, plane, 4 * MIB)
}

fn server() -> Server {
    let functions = Registry::standard().with::<AtServer<RangeTotals>>().with::<AtServerMut<Replace>>();
    let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
    Server::start(Config { listen, functions, ..Config::default() }).unwrap()
}

/// The totals of a range, by the twin.
fn expected(twin: &BTreeMap<u64, i64>, from: u64, to: u64) -> Totals {
    let values = twin.range(from..to).map(|(_, value)| value);
    values.fold(Totals::default(), |all, value| Totals { count: all.count + 1, sum: all.sum.wrapping_add(*value) })
}

/// Changes a list and its twin at random. Returns how many keys there are.
fn change(random: &mut Rng, list: &mut SkipList<'_>, twin: &mut BTreeMap<u64, i64>, keys: u64, steps: u64) {
    for _ in 0..steps {
        // Neighbours by key are far apart in memory, and each key is met several times.
        let key = random.u64(..keys).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        if random.u8(..4) == 0 {
            assert_eq!(list.remove(key).unwrap(), twin.remove(&key));
        } else {
            let value = random.i64(..);
            assert_eq!(list.insert(key, value).unwrap(), twin.insert(key, value));
        }
    }
}

#[test]
fn range_sums_of_a_skip_list_of_ones_own_are_right_at_each_place() {
    let server = server();
    for plane in [Plane::Page, Plane::Hybrid, Plane::Object] {
        let mut random = seeded(39);
        let heap = heap(&server.endpoints()[0], plane);
        let (mut list, mut twin) = (SkipList::new(&heap).unwrap(), BTreeMap::new());
        assert_eq!(list.range(.., Where::Client).unwrap(), Totals::default());
        for round in 0..tier(4, 40) {
            change(&mut random, &mut list, &mut twin, 60_000, tier(15_000, 60_000));
            let mut ends = [random.u64(..), random.u64(..)];
            ends.sort_unstable();
            for (from, to) in [(ends[0], ends[1]), (0, u64::MAX), (ends[1], ends[1]), (0, ends[0])] {
                let expected = expected(&twin, from, to);
                for at in [Where::Client, Where::Server, Where::Auto] {
                    let answer = list.range(from..to, at);
                    if plane == Plane::Object && at == Where::Server {
                        assert_eq!(answer, Err(OffloadError::Movable), "only the heap finds a value that moves");
                    } else if plane == Plane::Page || at != Where::Server {
                        assert_eq!(answer, Ok(expected), "{plane:?}, round {round}, {from}..{to}, {at:?}");
                    }
                }
            }
            // Values of keys that are there, and of some that are not.
            let keys: Vec<u64> = twin.keys().copied().step_by(499).collect();
            for (index, key) in keys.into_iter().chain([0, u64::MAX, random.u64(..)]).enumerate() {
                let (value, at) = (random.i64(..), [Where::Client, Where::Server, Where::Auto][index % 3]);
                let before = twin.get(&key).copied();
                match list.replace(key, value, at) {
                    Err(error) if at == Where::Server && plane != Plane::Page => {
                        assert_eq!(error, OffloadError::Movable)
                    }
                    answer => {
                        assert_eq!(answer, Ok(before), "{plane:?}, round {round}, {at:?}");
                        twin.entry(key).and_modify(|present| *present = value);
                    }
                }
            }
            for key in twin.keys().step_by(997) {
                assert_eq!(list.get(*key).unwrap(), twin.get(key).copied());
                assert_eq!(list.range(*key..=*key, Where::Auto).unwrap(), expected(&twin, *key, key + 1));
            }
        }
        assert_eq!(list.range(.., Where::Auto).unwrap().count, twin.len() as u64);
        // All of them out again.
        for (key, value) in twin {
            assert_eq!(list.remove(key).unwrap(), Some(value));
        }
        assert_eq!(list.range(.., Where::Client).unwrap(), Totals::default());
        drop(list);
        heap.verify();
    }
}

#[test]
fn a_range_of_far_nodes_takes_one_call_and_brings_nothing_near() {
    let server = server();
    let heap = heap(&server.endpoints()[0], Plane::Page);
    let mut list = SkipList::new(&heap).unwrap();
    let mut twin = BTreeMap::new();
    change(&mut seeded(40), &mut list, &mut twin, 100_000, 150_000);
    let range = || list.range(1 << 60..1 << 63, Where::Server).unwrap();
    // The first call writes back what it meets.
    assert_eq!(range(), expected(&twin, 1 << 60, 1 << 63));
    let before = heap.stats().misses;
    assert_eq!(range(), expected(&twin, 1 << 60, 1 << 63));
    assert_eq!(heap.stats().misses, before);
}

#[test]
fn the_command_loads_the_skip_list_from_its_library() {
    let program = std::env::current_exe().expect("a program has a path");
    let library =
        program.ancestors().skip(1).take(2).map(|folder| folder.join("libskip_list.so")).find(|path| path.exists());
    let library = library.expect("libskip_list.so is built with the tests: build farfield-skip-list");
    let scratch = Scratch::new("skip-list");
    let server = farfield_tests::Server::start_tcp(&scratch, "server", [&"--functions".into(), &library]);
    let heap = heap(server.url(), Plane::Page);
    let mut list = SkipList::new(&heap).unwrap();
    (0..1000).for_each(|key| assert_eq!(list.insert(key, key as i64).unwrap(), None));
    assert_eq!(list.range(10..20, Where::Server).unwrap(), Totals { count: 10, sum: 145 });

    // A server without the library says so, and `Auto` does without.
    let plain = farfield_tests::Server::start_tcp(&scratch, "plain", [] as [&std::path::Path; 0]);
    let heap = self::heap(plain.url(), Plane::Page);
    let mut list = SkipList::new(&heap).unwrap();
    (0..1000).for_each(|key| assert_eq!(list.insert(key, key as i64).unwrap(), None));
    let missing = list.range(10..20, Where::Server);
    assert!(matches!(missing, Err(OffloadError::Call(CallError::NoFunction { .. }))), "{missing:?}");
    assert_eq!(list.range(10..20, Where::Auto).unwrap(), Totals { count: 10, sum: 145 });
}
