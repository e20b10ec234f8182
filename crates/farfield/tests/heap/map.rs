//! `FarMap` is a `HashMap`, wherever its entries are. Dangers: an entry lost while the table grows, a value of another key,
//! a reference to what was removed, a destructor that never runs or runs twice.

use crate::common::twin::{Twin, twins};
use crate::common::{self, MIB, Over, Rng, heap, seed};
use farfield::collections::{Entry, Index};
use farfield::{AllocError, Change, FarError, FarMap, Heap};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Binary keys and values of any size, and their twin.
struct Bytes {
    far: FarMap<[u8], [u8]>,
    near: HashMap<Vec<u8>, Vec<u8>>,
    keys: u64,
}

fn key(number: u64) -> Vec<u8> {
    // Short ones, long ones, with zeros inside, and beginning alike.
    let mut key = number.to_be_bytes().to_vec();
    key.resize(8 + (number % 40) as usize, 0);
    key
}

fn value(random: &mut Rng) -> Vec<u8> {
    let bytes = match random.usize(..100) {
        0 => random.usize(..20_000),
        1..20 => random.usize(..40),
        _ => 2500 + random.usize(..4000),
    };
    let mut value = vec![random.u64(..) as u8; bytes];
    for byte in value.iter_mut().take(8) {
        *byte = random.u64(..) as u8;
    }
    value
}

impl Bytes {
    fn with_index(heap: &Heap, bytes: u64, random: &mut Rng, index: Index) -> Bytes {
        let far = FarMap::<[u8], [u8]>::builder().index(index).build(heap).unwrap();
        let mut twin = Bytes { far, near: HashMap::new(), keys: bytes / 2500 };
        let mut filled = 0;
        while filled < bytes {
            let (key, value) = (key(random.u64(..) % twin.keys), value(random));
            filled += value.len() as u64;
            let scope = heap.enter();
            let old = twin.far.insert(&scope, &key[..], &value[..]).unwrap().map(<[u8]>::to_vec);
            assert_eq!(old, twin.near.insert(key, value));
        }
        twin
    }
}

impl Twin for Bytes {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Bytes {
        Bytes::with_index(heap, bytes, random, Index::Near)
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let key = key(random.u64(..) % self.keys);
        let scope = heap.enter();
        match random.usize(..10) {
            0..2 => {
                let value = value(random);
                let old = self.far.insert(&scope, &key[..], &value[..]).unwrap();
                assert_eq!(old, self.near.insert(key, value).as_deref());
            }
            2 => {
                let value = value(random);
                let old = self.far.insert_new(&scope, &key[..], value.clone()).unwrap();
                assert_eq!(old, self.near.get(&key).map(|value| &value[..]));
                self.near.entry(key).or_insert(value);
            }
            3 => assert_eq!(self.far.remove(&scope, &key).unwrap(), self.near.remove(&key).as_deref()),
            4 => {
                // Longer by one byte, if it is there; away, if it is long.
                let change = |old: Option<&[u8]>| match old {
                    None => Change::Keep,
                    Some(old) if old.len() > 6000 => Change::Remove,
                    Some(old) => Change::Put([old, &[7][..]].concat()),
                };
                let old = self.far.update(&scope, &key[..], change).unwrap();
                assert_eq!(old, self.near.get(&key).map(|value| &value[..]));
                match self.near.get_mut(&key) {
                    Some(value) if value.len() > 6000 => drop(self.near.remove(&key)),
                    Some(value) => value.push(7),
                    None => {}
                }
            }
            5 => {
                let value = self.far.get_mut(&scope, &key[..]).unwrap();
                let twin = self.near.get_mut(&key);
                assert_eq!(value.is_some(), twin.is_some());
                if let (Some(value), Some(twin)) = (value, twin) {
                    value.reverse();
                    twin.reverse();
                }
            }
            6 => {
                let entry = self.far.entry(&scope, &key[..]).unwrap();
                assert_eq!(matches!(entry, Entry::Occupied(_)), self.near.contains_key(&key));
                let value = entry.and_modify(|value| value.fill(3)).or_insert(&b"new"[..]).unwrap();
                let twin = self.near.entry(key).and_modify(|value| value.fill(3)).or_insert(b"new".to_vec());
                assert_eq!(value, &twin[..]);
            }
            7 => assert_eq!(self.far.contains_key(&scope, &key[..]).unwrap(), self.near.contains_key(&key)),
            _ => assert_eq!(self.far.get(&scope, &key[..]).unwrap(), self.near.get(&key).map(|value| &value[..])),
        }
        assert_eq!(self.far.len(), self.near.len() as u64);
    }

    fn compare(&self, heap: &Heap) {
        let mut met = 0;
        let mut scope = heap.enter();
        let visit = |key: &[u8], value: &[u8]| {
            met += 1;
            assert_eq!(self.near.get(key).map(|value| &value[..]), Some(value));
        };
        self.far.for_each(&mut scope, visit).unwrap();
        assert_eq!(met, self.near.len());
    }
}

twins!(bytes, Bytes, 1_000);

#[test]
fn vacant_entries_are_filled() {
    let heap = heap(1);
    let mut map = FarMap::<str, u64>::new(&heap).unwrap();
    let scope = heap.enter();
    *map.entry(&scope, "far").unwrap().or_default().unwrap() += 7;
    assert_eq!(*map.entry(&scope, "away").unwrap().or_insert_with_key(|key| key.len() as u64).unwrap(), 4);
    assert_eq!(*map.entry(&scope, "far").unwrap().or_default().unwrap(), 7);
}

/// The same with the index in far memory.
struct FarIndex(Bytes);

impl Twin for FarIndex {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> FarIndex {
        FarIndex(Bytes::with_index(heap, bytes, random, Index::Far))
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        self.0.step(heap, random);
    }

    fn compare(&self, heap: &Heap) {
        self.0.compare(heap);
    }
}

twins!(far_index, FarIndex, 1_000);

/// Counts how many exist.
struct Counted {
    alive: Arc<AtomicI64>,
    number: u64,
    fill: [u64; 500],
}

impl Counted {
    fn new(alive: &Arc<AtomicI64>, number: u64) -> Counted {
        alive.fetch_add(1, Ordering::Relaxed);
        Counted { alive: alive.clone(), number, fill: [number; 500] }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(self.fill, [self.number; 500]);
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Values and keys with destructors.
struct Typed {
    alive: Arc<AtomicI64>,
    far: FarMap<String, Counted>,
    near: HashMap<String, u64>,
    keys: u64,
}

impl Twin for Typed {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Typed {
        let far = FarMap::new(heap).unwrap();
        let mut twin = Typed { alive: Arc::default(), far, near: HashMap::new(), keys: bytes / 2_600 };
        for _ in 0..bytes / 4_100 {
            let number = random.u64(..) % twin.keys;
            let scope = heap.enter();
            twin.far.insert(&scope, number.to_string(), Counted::new(&twin.alive, number)).unwrap();
            twin.near.insert(number.to_string(), number);
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let key = (random.u64(..) % self.keys).to_string();
        let number = random.u64(..);
        let scope = heap.enter();
        match random.usize(..4) {
            0 => {
                let old = self.far.insert(&scope, key.clone(), Counted::new(&self.alive, number)).unwrap();
                assert_eq!(old.map(|old| old.number), self.near.insert(key, number));
            }
            1 => {
                let old = self.far.remove(&scope, &key).unwrap();
                assert_eq!(old.map(|old| old.number), self.near.remove(&key));
            }
            2 => {
                let change = |old: Option<&Counted>| match old {
                    Some(old) => Change::Put(Counted::new(&old.alive, old.number + 1)),
                    None => Change::Keep,
                };
                self.far.update(&scope, key.clone(), change).unwrap();
                self.near.entry(key).and_modify(|number| *number += 1);
            }
            _ => {
                let value = self.far.get(&scope, &key).unwrap();
                assert_eq!(value.map(|value| (value.number, value.fill[499])), self.near.get(&key).map(|n| (*n, *n)));
            }
        }
    }

    fn compare(&self, heap: &Heap) {
        let mut met = 0;
        let mut scope = heap.enter();
        let visit = |key: &String, value: &Counted| {
            met += 1;
            assert_eq!(self.near.get(key), Some(&value.number));
        };
        self.far.for_each(&mut scope, visit).unwrap();
        assert_eq!(met, self.near.len());
        let alive = self.alive.load(Ordering::Relaxed);
        assert!(alive >= self.near.len() as i64, "{alive} alive of {}", self.near.len());
        assert!(alive < self.near.len() as i64 + 300, "what was removed goes: {alive} of {}", self.near.len());
    }
}

twins!(typed, Typed, 1_000);

#[test]
fn every_entry_is_dropped_once() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let map: FarMap<u64, Counted> = FarMap::new(&heap).unwrap();
    for number in 0..5_000 {
        let scope = heap.enter();
        map.insert(&scope, number % 3_000, Counted::new(&alive, number)).unwrap();
        if number % 7 == 0 {
            map.remove(&scope, &(number / 2)).unwrap();
        }
    }
    assert!(alive.load(Ordering::Relaxed) >= map.len() as i64);
    map.clear(&mut heap.enter()).unwrap();
    assert!(map.is_empty());
    map.insert(&heap.enter(), 1, Counted::new(&alive, 1)).unwrap();
    drop(map);
    assert_eq!((alive.load(Ordering::Relaxed), heap.stats().lost_values), (0, 0));
    heap.verify();
}

#[test]
fn values_seen_in_a_scope_stay_as_they_were() {
    let heap = heap(8);
    let map: FarMap<u64, [u64; 100]> = FarMap::new(&heap).unwrap();
    let scope = heap.enter();
    map.insert(&scope, 1, [1; 100]).unwrap();
    let one = map.get(&scope, &1).unwrap().unwrap();
    std::thread::scope(|threads| {
        let replace = || {
            for round in 0..2_000u64 {
                let scope = heap.enter();
                let old = map.insert(&scope, 1, [round + 2; 100]).unwrap().unwrap();
                assert_eq!(*old, [round + 1; 100]);
            }
        };
        threads.spawn(replace).join().unwrap();
    });
    assert_eq!(*one, [1; 100]);
    assert_eq!(*map.remove(&scope, &1).unwrap().unwrap(), [2001; 100]);
    assert_eq!((*one, map.get(&scope, &1).unwrap()), ([1; 100], None));
    drop(scope);
    drop(map);
    heap.verify();
}

#[test]
fn a_map_outlives_its_heap_and_dropping_it_needs_no_scope() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let map: FarMap<u64, Counted> = FarMap::new(&heap).unwrap();
    for number in 0..3_000 {
        map.insert(&heap.enter(), number, Counted::new(&alive, number)).unwrap();
    }
    drop(heap);
    std::thread::spawn(move || drop(map)).join().unwrap();
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

#[test]
fn far_maps_lie_in_far_values() {
    let heap = heap(1);
    let mut shelves = Vec::new();
    for shelf in 0..20u64 {
        let map: FarMap<u64, [u64; 64]> = FarMap::new(&heap).unwrap();
        for number in 0..200 {
            map.insert(&heap.enter(), number, [shelf * number; 64]).unwrap();
        }
        shelves.push(heap.alloc(map).unwrap());
    }
    for (shelf, map) in shelves.iter().enumerate() {
        let scope = heap.enter();
        let map = map.get(&scope).unwrap();
        assert_eq!(map.get(&scope, &7).unwrap(), Some(&[shelf as u64 * 7; 64]));
    }
    drop(shelves);
    heap.verify();
}

#[test]
fn other_heaps_are_refused_and_give_back_what_they_were_given() {
    let (one, two) = (heap(1), heap(1));
    let map: FarMap<u32, String> = FarMap::new(&one).unwrap();
    let scope = two.enter();
    assert_eq!(map.get(&scope, &1), Err(FarError::OtherHeap));
    let error = map.insert(&scope, 1, "value".to_owned()).unwrap_err();
    assert_eq!((error.error, error.value), (FarError::OtherHeap, (1, "value".to_owned())));
    assert!(map.is_empty());
}

/// The index is near memory, and counted.
#[test]
fn the_index_is_in_the_budget() {
    for index in [Index::Near, Index::Far] {
        let heap = common::builder().near(MIB).near_max(MIB).far(1 << 30).build().unwrap();
        let before = heap.stats().table_bytes;
        let map = FarMap::<u64, u64>::builder().index(index).build(&heap).unwrap();
        let error = (0..100_000).find_map(|number| map.insert(&heap.enter(), number, number).err());
        common::assert_in_budget(&heap);
        let tables = heap.stats().table_bytes - before;
        // Handles are near, too, and stay: up to a quarter of the budget.
        let handles = if common::plane() == farfield::Plane::Page { 0 } else { MIB / 4 };
        match index {
            // No near memory is too small to say so.
            Index::Near => {
                assert!(matches!(error.unwrap().error, FarError::TablesFull { .. }));
                assert!(tables > map.index_bytes() && map.index_bytes() > map.len() * 16, "{tables}");
            }
            Index::Far => {
                assert!(error.is_none());
                assert!(tables < 300_000 + handles, "{tables}");
            }
        }
        for number in (0..map.len()).step_by(37) {
            assert_eq!(map.get(&heap.enter(), &number).unwrap(), Some(&number));
        }
        drop(map);
        assert!(heap.stats().table_bytes - before < tables / 2 + 100_000 + handles);
        heap.verify();
    }
}

#[test]
fn hashes_that_are_all_equal_are_slow_and_nothing_else() {
    #[derive(PartialEq, Eq, Debug)]
    struct Same(u32);
    impl std::hash::Hash for Same {
        fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
            state.write_u8(1);
        }
    }
    let heap = heap(4);
    let map: FarMap<Same, u32> = FarMap::new(&heap).unwrap();
    for number in 0..300 {
        let scope = heap.enter();
        assert_eq!(map.insert(&scope, Same(number), number).unwrap(), None);
    }
    for number in 0..300 {
        let scope = heap.enter();
        assert_eq!(map.get(&scope, &Same(number)).unwrap(), Some(&number));
        assert_eq!(map.remove(&scope, &Same(number)).unwrap(), Some(&number));
        assert_eq!(map.get(&scope, &Same(number)).unwrap(), None);
    }
    drop(map);
    heap.verify();
}

/// AIFM's hopscotch test: whatever is read belongs to its key and names a thread.
fn threads_put_get_and_remove(near_mib: u64, index: Index, rounds: u64) {
    let heap = heap(near_mib);
    let map = FarMap::<[u8], [u8]>::builder().index(index).build(&heap).unwrap();
    let seed = seed();
    std::thread::scope(|threads| {
        let start = |thread: u8| {
            let (map, heap) = (&map, &heap);
            threads.spawn(move || {
                let mut random = Rng::with_seed(seed + u64::from(thread));
                for _ in 0..common::twin::steps(rounds) {
                    let number = random.u64(..) % 2_000;
                    let key = key(number);
                    let mut value = key.clone();
                    value.resize(1500, thread);
                    let check = |value: &[u8]| {
                        assert!(value.starts_with(&key) && value.len() == 1500);
                        assert!(value[1499] < 4 && value[key.len()..].iter().all(|byte| *byte == value[1499]));
                    };
                    let scope = heap.enter();
                    let seen = map.get(&scope, &key).unwrap();
                    let old = match random.usize(..4) {
                        0 | 1 => map.insert(&scope, &key[..], value).unwrap(),
                        2 => map.remove(&scope, &key[..]).unwrap(),
                        _ => map.get(&scope, &key[..]).unwrap(),
                    };
                    seen.into_iter().chain(old).for_each(check);
                }
            })
        };
        let handles: Vec<_> = (0..4u8).map(start).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    let mut met = 0;
    map.for_each(&mut heap.enter(), |_, _| met += 1).unwrap();
    assert_eq!(met, map.len());
    common::assert_in_budget(&heap);
    drop(map);
    heap.verify();
}

#[test]
fn threads_put_get_and_remove_with_a_third_near() {
    threads_put_get_and_remove(1, Index::Near, 4_000);
}

#[test]
fn threads_put_get_and_remove_with_everything_near() {
    threads_put_get_and_remove(16, Index::Near, 10_000);
}

#[test]
fn threads_put_get_and_remove_with_a_far_index() {
    threads_put_get_and_remove(1, Index::Far, 4_000);
}

#[test]
fn updates_of_threads_are_not_lost() {
    let heap = heap(1);
    let map: FarMap<u64, u64> = FarMap::new(&heap).unwrap();
    let (threads, each, keys) = (4, common::twin::steps(5_000), 10);
    std::thread::scope(|scope| {
        let start = |thread: u64| {
            let (map, heap) = (&map, &heap);
            scope.spawn(move || {
                let mut first = 0;
                for step in 0..each {
                    let scope = heap.enter();
                    let add = |old: Option<&u64>| Change::Put(old.map_or(1, |old| old + 1));
                    map.update(&scope, (step + thread) % keys, add).unwrap();
                    // Who comes first, and nobody else.
                    first += u64::from(map.insert_new(&scope, 1_000 + step, 0).unwrap().is_none());
                }
                let scope = heap.enter();
                map.update(&scope, 999, |old| Change::Put(old.map_or(first, |old| old + first))).unwrap();
            })
        };
        let handles: Vec<_> = (0..threads).map(start).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    let mut sum = 0;
    for key in 0..keys {
        sum += map.get(&heap.enter(), &key).unwrap().unwrap();
    }
    assert_eq!(sum, threads * each);
    assert_eq!(map.get(&heap.enter(), &999).unwrap(), Some(&each));
    drop(map);
    heap.verify();
}

/// The danger of growth: who looks while a bucket is split must not miss what is there all the time, nor meet it twice.
#[test]
fn lookups_find_every_key_while_the_map_grows() {
    for index in [Index::Near, Index::Far] {
        let heap = heap(8);
        let map = FarMap::<u64, u64>::builder().index(index).build(&heap).unwrap();
        let stable = 500u64;
        for number in 0..stable {
            map.insert(&heap.enter(), number, number).unwrap();
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            let writer = |thread: u64| {
                let (map, heap) = (&map, &heap);
                threads.spawn(move || {
                    let count = common::twin::steps(15_000);
                    for number in 0..count {
                        map.insert(&heap.enter(), 1_000_000 * (thread + 1) + number, number).unwrap();
                    }
                    for number in 0..count {
                        let scope = heap.enter();
                        let key = 1_000_000 * (thread + 1) + number;
                        assert_eq!(map.remove(&scope, &key).unwrap(), Some(&number));
                    }
                })
            };
            let writers = [writer(0), writer(1)];
            let reader = threads.spawn(|| {
                let mut random = Rng::with_seed(seed());
                let mut rounds = 0;
                while !done.load(Ordering::Relaxed) {
                    for _ in 0..100 {
                        let number = random.u64(..) % stable;
                        assert_eq!(map.get(&heap.enter(), &number).unwrap(), Some(&number));
                    }
                    rounds += 1;
                    if rounds % 10 == 0 {
                        let mut met = vec![0; stable as usize];
                        let visit = |key: &u64, _: &u64| {
                            if let Some(met) = met.get_mut(*key as usize) {
                                *met += 1;
                            }
                        };
                        map.for_each(&mut heap.enter(), visit).unwrap();
                        assert!(met.iter().all(|met| *met == 1), "{met:?}");
                    }
                }
            });
            let over = Over(&done);
            for writer in writers {
                writer.join().unwrap();
            }
            drop(over);
            reader.join().unwrap();
        });
        assert_eq!(map.len(), stable);
        drop(map);
        heap.verify();
    }
}

/// What one thread asked of one key, when it began and ended by a common clock, and what it was told.
#[derive(Clone, Copy, Debug)]
struct Event {
    began: u64,
    ended: u64,
    /// The value afterwards: of a look-up, `None`.
    put: Option<Option<u64>>,
    /// The value before.
    seen: Option<u64>,
}

/// Is there an order of the events, one at a time, that the clock allows and that explains what each was told?
fn has_order(events: &[Event], done: u32, value: Option<u64>, dead_ends: &mut Vec<(u32, Option<u64>)>) -> bool {
    if done.count_ones() as usize == events.len() {
        return true;
    }
    if dead_ends.contains(&(done, value)) {
        return false;
    }
    let left = || (0..events.len()).filter(|index| done & 1 << index == 0);
    let first_end = left().map(|index| events[index].ended).min().unwrap_or(u64::MAX);
    let found = left().any(|index| {
        let event = events[index];
        let possible = event.began <= first_end && event.seen == value;
        possible && has_order(events, done | 1 << index, event.put.unwrap_or(value), dead_ends)
    });
    if !found {
        dead_ends.push((done, value));
    }
    found
}

#[test]
fn the_order_of_events_can_be_told() {
    let event = |began, ended, put, seen| Event { began, ended, put, seen };
    let check = |events: &[Event]| has_order(events, 0, None, &mut Vec::new());
    assert!(check(&[event(0, 5, Some(Some(1)), None), event(1, 2, None, Some(1)), event(3, 4, None, Some(1))]));
    assert!(!check(&[event(0, 5, Some(Some(1)), None), event(1, 2, None, Some(1)), event(3, 4, None, None)]));
    assert!(!check(&[event(0, 1, Some(Some(1)), None), event(2, 3, None, None)]));
}

/// Every look-up, insertion and removal of threads happens at one moment between its beginning and its end.
#[test]
fn operations_of_threads_have_an_order() {
    let heap = heap(2);
    let map: FarMap<u64, u64> = FarMap::new(&heap).unwrap();
    let (clock, seed) = (std::sync::atomic::AtomicU64::new(0), seed());
    for round in 0..common::twin::steps(300) {
        let keys = 2;
        let run = |thread: u64| {
            let mut random = Rng::with_seed(seed + round * 10 + thread);
            let mut events = Vec::new();
            for step in 0..14 {
                let key = random.u64(..) % keys;
                let value = thread << 32 | step;
                let began = clock.fetch_add(1, Ordering::SeqCst);
                let scope = heap.enter();
                let at = round * 1_000 + key;
                let (put, seen) = match random.usize(..4) {
                    0 => (Some(Some(value)), map.insert(&scope, at, value).unwrap().copied()),
                    1 => (Some(None), map.remove(&scope, &at).unwrap().copied()),
                    2 => {
                        let seen = map.insert_new(&scope, at, value).unwrap().copied();
                        (seen.is_none().then_some(Some(value)), seen)
                    }
                    _ => (None, map.get(&scope, &at).unwrap().copied()),
                };
                let ended = clock.fetch_add(1, Ordering::SeqCst);
                events.push((key, Event { began, ended, put, seen }));
            }
            // So that the table grows beside it.
            for number in 0..20 {
                map.insert(&heap.enter(), 1 << 40 | thread << 32 | round << 8 | number, 0).unwrap();
            }
            events
        };
        let events: Vec<(u64, Event)> = std::thread::scope(|threads| {
            let handles: Vec<_> = (0..3).map(|thread| threads.spawn(move || run(thread))).collect();
            handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
        });
        for key in 0..keys {
            let of_key: Vec<Event> = events.iter().filter(|(known, _)| *known == key).map(|(_, e)| *e).collect();
            if of_key.len() <= 32 {
                assert!(has_order(&of_key, 0, None, &mut Vec::new()), "round {round}: {of_key:#?}");
            }
        }
    }
    drop(map);
    heap.verify();
}

#[test]
fn a_walk_asks_for_entries_before_it_needs_them() {
    let builder = common::builder().near(4 * MIB).near_max(4 * MIB).far(1 << 30).paranoid(true);
    let heap = builder.pool("fault:delay=100us@ram:").build().unwrap();
    let map = FarMap::<u64, [u64; 31]>::new(&heap).unwrap();
    for key in 0..40_000u64 {
        map.insert(&heap.enter(), key, [key; 31]).unwrap();
    }
    let before = heap.stats();
    let mut met = vec![false; 40_000];
    map.for_each(&mut heap.enter(), |key, value| {
        assert_eq!(*value, [*key; 31]);
        assert!(!std::mem::replace(&mut met[*key as usize], true));
    })
    .unwrap();
    assert!(met.into_iter().all(|met| met));
    let after = heap.stats();
    let (used, missed) = (after.prefetches_used - before.prefetches_used, after.misses - before.misses);
    assert!(used > 10_000 && used > 4 * missed, "{used} came ahead of need, {missed} were missed: {after:?}");
    assert!(after.prefetches_unused * 10 < used, "{after:?}");
    heap.verify();
}

/// The key was given, and there is no entry to keep it.
#[test]
fn an_entry_that_cannot_be_had_gives_its_key_back() {
    let (one, other) = (heap(1), heap(1));
    let mut map = FarMap::<String, u64>::new(&one).unwrap();
    let AllocError { error, value } = map.entry(&other.enter(), "key".to_owned()).err().unwrap();
    assert_eq!((error, &value[..]), (FarError::OtherHeap, "key"));
    let change = |_: Option<&u64>| -> Change<u64> { unreachable!("there is no entry to look at") };
    let AllocError { error, value } = map.update(&other.enter(), value, change).unwrap_err();
    assert_eq!((error, value), (FarError::OtherHeap, "key".to_owned()));
    // A server that dies.
    let builder = common::builder().near(MIB).near_max(MIB).far(1 << 30);
    let heap = builder.pool("fault:die=600@ram:").build().unwrap();
    let mut map = FarMap::<Vec<u64>, [u64; 400]>::new(&heap).unwrap();
    let mut made = 0;
    while map.insert(&heap.enter(), vec![made, 7], [made; 400]).is_ok() {
        made += 1;
        assert!(made < 100_000, "the server does not die");
    }
    let mut failed = 0;
    for number in 0..made {
        match map.entry(&heap.enter(), vec![number, 7]) {
            Ok(entry) => assert!(matches!(entry, Entry::Occupied(_)) && entry.key() == &[number, 7]),
            Err(error) => {
                assert_eq!(error.value, [number, 7]);
                failed += 1;
            }
        }
    }
    assert!(failed > 100, "{failed} of {made}");
    drop(map);
    heap.verify();
}
