//! `FarFlatMap` is a `HashMap` of plain entries, wherever its pages are. Dangers: an entry lost in a split or behind a full page, a value of
//! another key, near memory for each entry, and hash functions that lie, panic, or know one number only.

use crate::common::twin::{Twin, elements, steps, twins};
use crate::common::{MIB, Rng, builder, heap, is_deep, seed};
use farfield::task::Executor;
use farfield::{Change, FarError, FarFlatMap, FarMap, Heap, Plane, PoolError};
use std::cell::Cell;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

type Key = [u8; 16];
type Value = [u64; 8];

fn key(number: u64) -> Key {
    let mut key = [7; 16];
    key[4..12].copy_from_slice(&number.to_be_bytes());
    key
}

fn value(random: &mut Rng) -> Value {
    [random.u64(..), 0, 1, 2, 3, 4, 5, random.u64(..)]
}

/// A map and its twin.
struct Flat<S> {
    far: FarFlatMap<Key, Value, S>,
    near: HashMap<Key, Value>,
    keys: u64,
}

impl<S: BuildHasher> Flat<S> {
    fn new(hasher: S, keys: u64) -> Flat<S> {
        Flat { far: FarFlatMap::with_hasher(hasher), near: HashMap::new(), keys }
    }

    /// One random operation on both; the map may fail with an error, and then has changed nothing.
    fn try_step(&mut self, heap: &Heap, random: &mut Rng) -> Result<(), FarError> {
        let key = key(random.u64(..) % self.keys);
        let mut scope = heap.enter();
        match random.u32(..10) {
            0..3 => {
                let value = value(random);
                assert_eq!(self.far.insert(&scope, key, value)?, self.near.insert(key, value));
            }
            3 => {
                let value = value(random);
                assert_eq!(self.far.insert_new(&scope, key, value)?, self.near.get(&key).copied());
                self.near.entry(key).or_insert(value);
            }
            4 => assert_eq!(self.far.remove(&scope, &key)?, self.near.remove(&key)),
            5 => {
                let change = |old: Option<&Value>| match old {
                    None => Change::Keep,
                    Some(old) if old[0] % 2 == 0 => Change::Remove,
                    Some(old) => Change::Put([old[0] ^ 5; 8]),
                };
                assert_eq!(self.far.update(&scope, key, change)?, self.near.get(&key).copied());
                match change(self.near.get(&key)) {
                    Change::Keep => {}
                    Change::Put(value) => drop(self.near.insert(key, value)),
                    Change::Remove => drop(self.near.remove(&key)),
                }
            }
            6 => {
                let keys: Vec<Key> =
                    (0..random.usize(..80)).map(|_| self::key(random.u64(..) % (2 * self.keys))).collect();
                let expected: Vec<_> = keys.iter().map(|key| self.near.get(key).copied()).collect();
                assert_eq!(self.far.get_many(&scope, &keys)?, expected);
            }
            7 if random.usize(..300) == 0 => {
                let bit = random.u32(..4);
                let keep = |_: &Key, value: &mut Value| {
                    value[3] += 1;
                    value[0] >> bit & 7 != 0
                };
                self.near.retain(keep);
                self.far.retain(&mut scope, keep)?;
            }
            7 => assert_eq!(self.far.contains_key(&scope, &key)?, self.near.contains_key(&key)),
            _ => assert_eq!(self.far.get(&scope, &key)?, self.near.get(&key).copied()),
        }
        assert_eq!(self.far.len(), self.near.len() as u64);
        Ok(())
    }

    fn compare_all(&self, heap: &Heap) {
        let mut left = self.near.clone();
        self.far
            .for_each(&mut heap.enter(), |key, value| assert_eq!(left.remove(key), Some(*value), "once, and this one"))
            .unwrap();
        assert!(left.is_empty());
        // The walk has met each of them, and most look-ups wait for a page.
        let every = if is_deep() { 1 } else { 32 };
        for key in self.near.keys().step_by(every) {
            assert_eq!(self.far.get(&heap.enter(), key).unwrap().as_ref(), self.near.get(key));
        }
    }
}

impl Twin for Flat<RandomState> {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Self {
        let mut twin = Flat::new(RandomState::new(), bytes / 80);
        while (twin.near.len() as u64) < bytes / 120 {
            let (key, value) = (key(random.u64(..) % twin.keys), value(random));
            assert_eq!(twin.far.insert(&heap.enter(), key, value).unwrap(), twin.near.insert(key, value));
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        self.try_step(heap, random).unwrap();
    }

    fn compare(&self, heap: &Heap) {
        self.compare_all(heap);
    }
}

twins!(flat_maps, Flat<RandomState>, 6000);

/// A hash function of a user's that answers something else.
#[derive(Clone, Copy)]
enum Liar {
    /// The same for all keys.
    Constant,
    /// One of three numbers, which end alike.
    Few,
    /// Only the upper bits differ.
    Upper,
}

struct LiarHasher(Liar, u64);

impl BuildHasher for Liar {
    type Hasher = LiarHasher;

    fn build_hasher(&self) -> LiarHasher {
        LiarHasher(*self, 0)
    }
}

impl Hasher for LiarHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.1 = self.1.wrapping_mul(31).wrapping_add(u64::from(*byte));
        }
    }

    fn finish(&self) -> u64 {
        match self.0 {
            Liar::Constant => 0xABCD_EF01,
            Liar::Few => ((self.1 % 3) << 20) | 5,
            Liar::Upper => (self.1 % 512) << 23,
        }
    }
}

#[test]
fn bad_hash_functions_make_a_map_slow_and_not_wrong() {
    let mut random = Rng::with_seed(seed());
    for liar in [Liar::Constant, Liar::Few, Liar::Upper] {
        let heap = heap(1);
        let mut twin = Flat::new(liar, 3000);
        for _ in 0..steps(6000) {
            twin.try_step(&heap, &mut random).unwrap();
        }
        twin.compare_all(&heap);
        // A directory for hashes that end alike is as small as for others.
        assert!(twin.far.index_bytes() <= 4096, "{} bytes", twin.far.index_bytes());
        drop(twin);
        heap.verify();
    }
}

/// A hash function that changes its mind, and panics now and then.
struct Fickle {
    random: std::cell::RefCell<Rng>,
    panics: u64,
}

impl BuildHasher for &Fickle {
    type Hasher = LiarHasher;

    fn build_hasher(&self) -> LiarHasher {
        let mut random = self.random.borrow_mut();
        if self.panics > 0 && random.u64(..).is_multiple_of(self.panics) {
            panic!("user code panics");
        }
        LiarHasher(if random.bool() { Liar::Few } else { Liar::Upper }, 0)
    }
}

#[test]
fn a_hash_function_that_changes_its_mind_loses_no_entry() {
    let heap = heap(1);
    let fickle = Fickle { random: Rng::with_seed(seed()).into(), panics: 20 };
    let mut map: FarFlatMap<u64, u64, _> = FarFlatMap::with_hasher(&fickle);
    let (mut expected, mut panics) = (0, 0);
    for number in 0..steps(20_000) {
        let result = catch_unwind(AssertUnwindSafe(|| match number % 7 {
            0 => -i64::from(map.remove(&heap.enter(), &(number % 500)).unwrap().is_some()),
            1 => {
                let found = map.get(&heap.enter(), &(number % 500)).unwrap();
                assert!(found.is_none_or(|value| value % 500 == number % 500));
                0
            }
            _ => i64::from(map.insert(&heap.enter(), number % 500, number).unwrap().is_none()),
        }));
        match result {
            Ok(change) => expected += change,
            Err(_) => panics += 1,
        }
        assert_eq!(map.len() as i64, expected);
    }
    let mut met = 0;
    map.for_each(&mut heap.enter(), |key, value| {
        assert_eq!(*key, value % 500);
        met += 1;
    })
    .unwrap();
    assert_eq!(met, expected);
    assert!(panics > 100 && met > 500, "{panics} panics, {met} entries: some keys are there several times");
    drop(map);
    heap.verify();
}

#[test]
fn closures_may_use_the_scope_for_anything_and_panic() {
    let heap = heap(1);
    let other: FarMap<u64, [u64; 60]> = FarMap::new(&heap).unwrap();
    let mut twin = Flat::new(RandomState::new(), 5000);
    let mut random = Rng::with_seed(seed());
    for _ in 0..8000 {
        let (key, value) = (key(random.u64(..5000)), value(&mut random));
        twin.far.insert(&heap.enter(), key, value).unwrap();
        twin.near.insert(key, value);
    }
    let mut panics = 0;
    for round in 0..steps(400) {
        let key = key(random.u64(..5000));
        let scope = heap.enter();
        let result = catch_unwind(AssertUnwindSafe(|| {
            twin.far.update(&scope, key, |old| {
                let before = old.copied();
                // More than near memory, so that the page of the entry leaves meanwhile.
                for number in 0..600 {
                    other.insert(&scope, number, [round; 60]).ok();
                }
                assert_eq!(old.copied(), before);
                if round % 3 == 0 {
                    panic!("user code panics");
                }
                Change::Put([round; 8])
            })
        }));
        match result {
            Ok(Ok(old)) => assert_eq!(old, twin.near.insert(key, [round; 8])),
            // The closure has filled the scope.
            Ok(Err(error)) => assert_eq!(error, FarError::NearFull),
            Err(_) => panics += 1,
        }
    }
    assert!(panics > 50, "{panics}");
    twin.compare_all(&heap);

    // What the pages before the panic have been made, they stay.
    let met = Cell::new(0u64);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        twin.far.retain(&mut heap.enter(), |_, _| {
            met.set(met.get() + 1);
            assert!(met.get() < 1000, "user code panics");
            false
        })
    }));
    assert!(panic.is_err());
    let mut left = 0;
    twin.far
        .for_each(&mut heap.enter(), |key, value| {
            assert_eq!(twin.near.get(key), Some(value));
            left += 1;
        })
        .unwrap();
    assert_eq!(left, twin.far.len());
    assert!(left > twin.near.len() as u64 - 1000 && left < twin.near.len() as u64 - 900, "{left}");
}

#[test]
fn the_index_takes_less_than_a_byte_near_for_each_entry() {
    const ENTRIES: u64 = 100_000;
    // The tables of the other planes have more bytes for each page, whatever lies in it.
    let heap = Heap::builder().plane(Plane::Page).near(MIB).near_max(MIB).far(1 << 30).build().unwrap();
    let before = heap.stats().table_bytes;
    let mut map: FarFlatMap<Key, Value> = FarFlatMap::new();
    for number in 0..ENTRIES {
        map.insert(&heap.enter(), key(number), [number; 8]).unwrap();
    }
    let stats = heap.stats();
    let bytes = stats.table_bytes - before;
    println!("{bytes} bytes near for {ENTRIES} entries, of which {} are the directory; {stats:?}", map.index_bytes());
    assert!(map.index_bytes() > 0 && map.index_bytes() * 4 < ENTRIES, "{} bytes", map.index_bytes());
    assert!(bytes >= map.index_bytes() && bytes < ENTRIES, "{bytes} bytes");
    // The pages are used well enough: 84 bytes for an entry, and no more than half of a page unused.
    assert!(stats.pages * 4096 < 84 * ENTRIES * 2 + (4 << 20), "{} pages", stats.pages);
    // And a get is one access.
    let before = heap.stats().misses;
    for number in (0..ENTRIES).step_by(37) {
        assert_eq!(map.get(&heap.enter(), &key(number)).unwrap(), Some([number; 8]));
    }
    let misses = (heap.stats().misses - before) as f64 / (ENTRIES / 37) as f64;
    assert!(misses > 0.5 && misses < 1.02, "{misses} misses a get");
    // It is all given back.
    map.clear();
    assert_eq!((map.len(), map.index_bytes()), (0, 0));
    assert_eq!(map.get(&heap.enter(), &key(1)).unwrap(), None);
    map.insert(&heap.enter(), key(1), [1; 8]).unwrap();
    assert_eq!(map.get(&heap.enter(), &key(1)).unwrap(), Some([1; 8]));
    drop(map);
    heap.verify();
}

#[test]
fn growth_stops_nobody_for_longer_than_the_split_of_one_bucket() {
    let heap = builder().near(MIB).near_max(MIB).far(1 << 30).build().unwrap();
    let mut map: FarFlatMap<u64, [u64; 8]> = FarFlatMap::new();
    for number in 0..elements(60_000) as u64 {
        let before = heap.stats().misses;
        map.insert(&heap.enter(), number, [number; 8]).unwrap();
        let misses = heap.stats().misses - before;
        assert!(misses <= 4, "{misses} misses for insert {number}");
    }
    assert!(heap.stats().misses > 10_000);
}

#[test]
fn an_operation_that_fails_has_changed_nothing() {
    let mut random = Rng::with_seed(seed());
    for faults in ["corrupt=0.1", "corrupt=0.3"] {
        let url = format!("fault:{faults},seed={}@ram:", random.u32(..));
        let heap = builder().near(MIB).near_max(MIB).far(1 << 30).patience(Duration::from_secs(5)).pool(url);
        let heap = heap.build().unwrap();
        let mut twin = Flat::new(RandomState::new(), 30_000);
        let mut failed = 0;
        for _ in 0..steps(40_000) {
            let (key, value) = (key(random.u64(..30_000)), value(&mut random));
            // A twin changes only with the map.
            let result = match random.u32(..4) {
                0 => twin.far.remove(&heap.enter(), &key).map(|old| assert_eq!(old, twin.near.remove(&key))),
                _ => {
                    twin.far.insert(&heap.enter(), key, value).map(|old| assert_eq!(old, twin.near.insert(key, value)))
                }
            };
            failed += u32::from(result.is_err());
            assert_eq!(twin.far.len(), twin.near.len() as u64);
        }
        assert!(failed > 0, "{faults}: faults are seen");
        let mut missing = 0;
        for (key, value) in &twin.near {
            let found = (0..1000).find_map(|_| match twin.far.get(&heap.enter(), key) {
                Err(FarError::Pool(PoolError::Corrupt { .. })) => None,
                other => Some(other.unwrap()),
            });
            missing += u32::from(found != Some(Some(*value)));
        }
        assert_eq!(missing, 0, "{faults}: of {} entries", twin.near.len());
    }
}

#[test]
fn a_scope_that_is_full_is_an_error_and_another_heap_too() {
    let heap = heap(1);
    let mut map: FarFlatMap<u64, Value> = FarFlatMap::new();
    let values: Vec<_> = (0..2000).map(|number| heap.alloc([number; 400]).unwrap()).collect();
    for number in 0..20_000 {
        map.insert(&heap.enter(), number, [number; 8]).unwrap();
    }
    let scope = heap.enter();
    let held = values.iter().take_while(|value| value.get(&scope).is_ok()).count();
    assert!(held > 10 && held < 2000, "{held}");
    let mut refused = 0;
    for number in 0..400 {
        match map.insert(&scope, number, [0; 8]) {
            Ok(old) => assert_eq!(old, Some([number; 8])),
            Err(error) => {
                assert_eq!(error, FarError::NearFull);
                refused += 1;
                continue;
            }
        }
        assert_eq!(map.insert(&scope, number, [number; 8]), Ok(Some([0; 8])));
    }
    assert!(refused > 100, "{refused}");
    drop(scope);
    let other = self::heap(1);
    assert_eq!(map.get(&other.enter(), &3), Err(FarError::OtherHeap));
    assert_eq!(map.get_many(&other.enter(), &[3, 4]), Err(FarError::OtherHeap));
    assert_eq!(map.insert(&other.enter(), 3, [1; 8]), Err(FarError::OtherHeap));
    assert_eq!(map.remove(&other.enter(), &3), Err(FarError::OtherHeap));
    assert_eq!(map.for_each(&mut other.enter(), |_, _| {}), Err(FarError::OtherHeap));
    assert_eq!((map.len(), map.get(&heap.enter(), &3)), (20_000, Ok(Some([3; 8]))));
}

#[test]
fn entries_of_all_sizes_are_found() {
    fn of<K: farfield::Pod + Eq + std::hash::Hash + std::fmt::Debug, V: farfield::Pod + PartialEq + std::fmt::Debug>(
        key: impl Fn(u64) -> K,
        value: impl Fn(u64) -> V,
    ) {
        let heap = heap(1);
        let (mut map, mut keys) = (FarFlatMap::new(), HashMap::new());
        for number in 0..3000 {
            map.insert(&heap.enter(), key(number), value(number)).unwrap();
            keys.insert(key(number), number);
        }
        for (key, number) in &keys {
            assert_eq!(map.get(&heap.enter(), key).unwrap(), Some(value(*number)));
        }
        assert_eq!(map.len(), keys.len() as u64);
    }
    of(|number| number as u8, |_| ());
    of(|_| (), |number| number);
    of(|number| number as u16, |number| number as f32);
    of(|number| [number as u32; 3], |number| [number as u8; 5]);
    of(u128::from, |number| [number; 125]);
}

#[test]
fn tasks_look_up_while_others_wait() {
    let heap = builder().near(MIB).near_max(MIB).far(1 << 30).pool("fault:delay=20us@ram:").build().unwrap();
    let mut map: FarFlatMap<u64, Value> = FarFlatMap::new();
    for number in 0..30_000 {
        map.insert(&heap.enter(), number, [number; 8]).unwrap();
    }
    let (heap, map) = (&heap, &map);
    let executor = Executor::new(heap);
    let tasks: Vec<_> = (0..16u64)
        .map(|task| {
            executor.spawn(async move {
                for number in 0..100 {
                    let key = (number * 7919 + task * 104_729) % 60_000;
                    let found = map.fetch(&heap.enter(), &key).await.unwrap();
                    assert_eq!(found, (key < 30_000).then_some([key; 8]));
                }
            })
        })
        .collect();
    tasks.into_iter().for_each(|task| executor.block_on(task).unwrap());
    drop(executor);
    heap.verify();
}
