//! `FarBTreeMap` is a `BTreeMap`, wherever its nodes are. Dangers: an order broken where nodes are split, merged or lend entries;
//! ranges that begin or end one too early or too late; entries dropped never or twice.

use crate::common::twin::{Twin, elements, twins};
use crate::common::{MIB, Rng, heap, seed};
use farfield::collections::BTreeEntry;
use farfield::{FarBTreeMap, FarError, Heap};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

type Value = [u64; 40];
type Changeable<'a> = Result<(&'a u64, &'a mut Value), FarError>;

fn value(number: u64) -> Value {
    core::array::from_fn(|at| number ^ at as u64)
}

struct Map {
    far: FarBTreeMap<u64, Value>,
    near: BTreeMap<u64, u64>,
    keys: u64,
}

impl Twin for Map {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Map {
        let count = bytes / size_of::<Value>() as u64;
        let mut twin = Map { far: FarBTreeMap::new(), near: BTreeMap::new(), keys: count * 2 };
        // Ascending, descending and anywhere; of many mostly in order, because the others are misses.
        let some = count.min(12 * MIB / size_of::<Value>() as u64);
        for number in 0..count {
            let key = match number % 3 {
                _ if number > some => number * 2,
                0 => number,
                1 => twin.keys - number,
                _ => random.u64(..) % twin.keys,
            };
            let old = twin.far.insert(&heap.enter(), key, value(number)).unwrap();
            assert_eq!(old, twin.near.insert(key, number).map(value));
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let (key, number) = (random.u64(..) % self.keys, random.u64(..));
        let scope = heap.enter();
        match random.usize(..12) {
            0 | 1 => {
                let old = self.far.insert(&scope, key, value(number)).unwrap();
                assert_eq!(old, self.near.insert(key, number).map(value));
            }
            2 => self.remove_run(heap, random),
            3 => {
                assert_eq!(self.far.pop_first(&scope).unwrap(), self.near.pop_first().map(|(k, n)| (k, value(n))));
                assert_eq!(self.far.pop_last(&scope).unwrap(), self.near.pop_last().map(|(k, n)| (k, value(n))));
            }
            4 => {
                let first = self.far.first_key_value(&scope).unwrap().map(|(key, _)| *key);
                let last = self.far.last_key_value(&scope).unwrap().map(|(key, _)| *key);
                assert_eq!(first, self.near.first_key_value().map(|(key, _)| *key));
                assert_eq!(last, self.near.last_key_value().map(|(key, _)| *key));
            }
            5 => {
                let found = self.far.get_mut(&scope, &key).unwrap();
                let twin = self.near.get_mut(&key);
                assert_eq!(found.is_some(), twin.is_some());
                if let (Some(found), Some(twin)) = (found, twin) {
                    (*found, *twin) = (value(number), number);
                }
            }
            6 => {
                let end = key + random.u64(..) % 100;
                let bound = |choice, key| match choice {
                    0 => Bound::Included(key),
                    1 => Bound::Excluded(key),
                    _ => Bound::Unbounded,
                };
                let range = (bound(random.usize(..3), key), bound(random.usize(..3), end + 1));
                let mut far = self.far.range(&scope, range).unwrap();
                let mut near = self.near.range(range);
                for _ in 0..random.usize(..60) {
                    let (far, near) = match random.usize(..2) {
                        0 => (far.next(), near.next()),
                        _ => (far.next_back(), near.next_back()),
                    };
                    let far = far.map(|entry| entry.map(|(key, found)| (*key, *found)).unwrap());
                    assert_eq!(far, near.map(|(key, number)| (*key, value(*number))));
                }
            }
            7 => self.by_entry(heap, key, number),
            8 => {
                let (few, backwards) = (random.usize(..30), random.usize(..2) == 0);
                let far = self.far.range_mut(&scope, key..).unwrap();
                let near = self.near.range_mut(key..);
                let change = |(far, near): (Changeable<'_>, (&u64, &mut u64))| {
                    let (key, found) = far.unwrap();
                    assert_eq!((*key, *found), (*near.0, value(*near.1)));
                    (*found, *near.1) = (value(number ^ key), number ^ key);
                };
                if backwards {
                    far.rev().zip(near.rev()).take(few).for_each(change);
                } else {
                    far.zip(near).take(few).for_each(change);
                }
            }
            _ => assert_eq!(self.far.get(&scope, &key).unwrap().copied(), self.near.get(&key).map(|n| value(*n))),
        }
        assert_eq!(self.far.len(), self.near.len());
    }

    fn compare(&self, heap: &Heap) {
        let mut twin = self.near.iter();
        let visit = |key: &u64, found: &Value| {
            assert_eq!(twin.next().map(|(key, number)| (*key, value(*number))), Some((*key, *found)));
        };
        self.far.for_each(&mut heap.enter(), visit).unwrap();
        assert_eq!(twin.next(), None);
    }
}

impl Map {
    /// Looks at the place of a key, and fills, changes or empties it.
    fn by_entry(&mut self, heap: &Heap, key: u64, number: u64) {
        let scope = heap.enter();
        let twin = self.near.get(&key).copied();
        let entry = self.far.entry(&scope, key).unwrap();
        assert_eq!(*entry.key(), key);
        match entry {
            BTreeEntry::Occupied(entry) if number.is_multiple_of(3) => {
                assert_eq!(Some((key, entry.remove_entry().unwrap().1)), twin.map(|n| (key, value(n))));
                self.near.remove(&key);
            }
            BTreeEntry::Occupied(mut entry) if number % 3 == 1 => {
                assert_eq!(Some(*entry.get()), twin.map(value));
                assert_eq!(Some(entry.insert(value(number))), twin.map(value));
                self.near.insert(key, number);
            }
            entry => {
                let change = |found: &mut Value| *found = value(found[0] + 1);
                let found = entry.and_modify(change).or_insert_with(|| value(number)).unwrap();
                let twin = self.near.entry(key).and_modify(|n| *n += 1).or_insert(number);
                assert_eq!(*found, value(*twin));
                // The reference is to the entry in the tree.
                (*found, *twin) = (value(number + 7), number + 7);
            }
        }
    }

    /// Neighbours, so that nodes run empty.
    fn remove_run(&mut self, heap: &Heap, random: &mut Rng) {
        let start = random.u64(..) % self.keys;
        let keys: Vec<u64> = self.near.range(start..).take(random.usize(..30)).map(|(key, _)| *key).collect();
        for key in keys.into_iter().chain([start]) {
            let removed = self.far.remove(&heap.enter(), &key).unwrap();
            assert_eq!(removed, self.near.remove(&key).map(value));
        }
    }
}

twins!(maps, Map, 1_000);

/// Counts how many exist.
struct Counted {
    alive: Arc<AtomicI64>,
    number: u64,
    fill: [u64; 60],
}

impl Counted {
    fn new(alive: &Arc<AtomicI64>, number: u64) -> Counted {
        alive.fetch_add(1, Ordering::Relaxed);
        Counted { alive: alive.clone(), number, fill: [number; 60] }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(self.fill, [self.number; 60]);
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Keys and values with destructors.
struct Texts {
    alive: Arc<AtomicI64>,
    far: FarBTreeMap<String, Counted>,
    near: BTreeMap<String, u64>,
    keys: u64,
}

impl Twin for Texts {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Texts {
        let keys = bytes / 400;
        let mut twin = Texts { alive: Arc::default(), far: FarBTreeMap::new(), near: BTreeMap::new(), keys };
        for _ in 0..bytes / 500 {
            let number = random.u64(..) % twin.keys;
            twin.far.insert(&heap.enter(), number.to_string(), Counted::new(&twin.alive, number)).unwrap();
            twin.near.insert(number.to_string(), number);
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let (key, number) = ((random.u64(..) % self.keys).to_string(), random.u64(..));
        let scope = heap.enter();
        if random.usize(..2) == 0 {
            let old = self.far.insert(&scope, key.clone(), Counted::new(&self.alive, number)).unwrap();
            assert_eq!(old.map(|old| old.number), self.near.insert(key, number));
        } else {
            let old = self.far.remove_entry(&scope, key.as_str()).unwrap();
            assert_eq!(old.map(|(key, old)| (key, old.number)), self.near.remove_entry(&key));
        }
    }

    fn compare(&self, heap: &Heap) {
        let mut twin = self.near.iter();
        let visit = |key: &String, value: &Counted| assert_eq!(twin.next(), Some((key, &value.number)));
        self.far.for_each(&mut heap.enter(), visit).unwrap();
        assert_eq!(twin.next(), None);
        assert_eq!(self.alive.load(Ordering::Relaxed), self.near.len() as i64);
    }
}

twins!(texts, Texts, 500);

/// Every kind of change of a tree, many times: from empty to empty.
#[test]
fn trees_grow_and_shrink_to_nothing() {
    let heap = heap(8);
    let mut random = Rng::with_seed(seed());
    for round in 0..6 {
        // Seven entries to a node at most, so that the tree is deep.
        let mut far: FarBTreeMap<u32, [u64; 60]> = FarBTreeMap::new();
        let mut near = BTreeMap::new();
        for (count, remove) in [(3_000, 3), (6_000, 8)] {
            for _ in 0..count {
                let scope = heap.enter();
                let key = random.usize(..4_000) as u32;
                if random.usize(..10) < remove {
                    assert_eq!(far.remove(&scope, &key).unwrap().map(|v| v[59]), near.remove(&key));
                } else {
                    assert_eq!(
                        far.insert(&scope, key, [u64::from(key); 60]).unwrap().is_some(),
                        near.contains_key(&key)
                    );
                    near.insert(key, u64::from(key));
                }
            }
            let mut keys = near.keys();
            far.for_each(&mut heap.enter(), |key, _| assert_eq!(Some(key), keys.next())).unwrap();
            assert_eq!(keys.next(), None);
        }
        while let Some((key, value)) = if round % 2 == 0 { near.pop_first() } else { near.pop_last() } {
            let scope = heap.enter();
            let popped = if round % 2 == 0 { far.pop_first(&scope) } else { far.pop_last(&scope) };
            assert_eq!(popped.unwrap(), Some((key, [value; 60])));
        }
        let scope = heap.enter();
        assert!(far.is_empty() && far.iter(&scope).unwrap().next().is_none());
        assert_eq!((far.pop_first(&scope).unwrap(), far.first_key_value(&scope).unwrap()), (None, None));
        assert_eq!(far.insert(&scope, 1, [1; 60]).unwrap(), None);
        drop(scope);
        drop(far);
        heap.verify();
    }
}

/// Every place in a tree whence an entry can go: runs, every other one, all, none, from trees of many levels.
#[test]
fn some_are_kept() {
    let heap = heap(1);
    let mut random = Rng::with_seed(seed());
    for (round, kept_of_ten) in [10, 9, 5, 5, 1, 0].into_iter().enumerate() {
        let mut far: FarBTreeMap<u32, Counted> = FarBTreeMap::new();
        let mut near = BTreeMap::new();
        let alive = Arc::default();
        for _ in 0..elements(6_000) {
            let (key, number) = (random.usize(..elements(20_000)) as u32, random.u64(..));
            far.insert(&heap.enter(), key, Counted::new(&alive, number)).unwrap();
            near.insert(key, number);
        }
        // Decisions come in runs as long as a node and longer.
        let salt = random.u64(..);
        let runs = 1 << (3 * round as u32);
        let keep = |key: u32| Rng::with_seed(salt ^ u64::from(key / runs)).usize(..10) < kept_of_ten;
        let mut last = None;
        let decide = |key: &u32, value: &mut Counted| {
            assert!(last < Some(*key), "in order, and once");
            last = Some(*key);
            value.number ^= 1;
            value.fill = [value.number; 60];
            keep(*key)
        };
        far.retain(&mut heap.enter(), decide).unwrap();
        near.retain(|key, number| {
            *number ^= 1;
            keep(*key)
        });
        let mut scope = heap.enter();
        let mut twin = near.iter();
        far.for_each(&mut scope, |key, value| assert_eq!(twin.next(), Some((key, &value.number)))).unwrap();
        assert_eq!((twin.next(), far.len()), (None, near.len()));
        assert_eq!(alive.load(Ordering::Relaxed), near.len() as i64);
        scope.renew();
        let few = |key: Result<&u32, FarError>| *key.unwrap();
        assert!(far.keys(&scope).unwrap().rev().take(20).map(few).eq(near.keys().rev().take(20).copied()));
        assert!(far.values(&scope).unwrap().take(20).map(|v| v.unwrap().number).eq(near.values().take(20).copied()));
        drop((scope, far));
        heap.verify();
    }
}

#[test]
fn one_map_takes_over_another() {
    let heap = heap(1);
    let mut random = Rng::with_seed(seed());
    let (mut far, mut near) = ([FarBTreeMap::new(), FarBTreeMap::new()], [BTreeMap::new(), BTreeMap::new()]);
    for _ in 0..6 {
        for (far, near) in far.iter_mut().zip(&mut near) {
            for _ in 0..random.usize(..3_000) {
                let (key, number) = (random.u64(..) % 20_000, random.u64(..));
                far.insert(&heap.enter(), key, value(number)).unwrap();
                near.insert(key, number);
            }
        }
        let ([far, other], [near, other_near]) = (&mut far, &mut near);
        far.append(&mut heap.enter(), other).unwrap();
        near.append(other_near);
        assert!(other.is_empty());
        far.for_each_mut(&mut heap.enter(), |_, found| *found = value(found[0] / 2)).unwrap();
        near.values_mut().for_each(|number| *number /= 2);
        let mut twin = near.iter().map(|(key, number)| (*key, value(*number)));
        far.for_each(&mut heap.enter(), |key, found| assert_eq!(twin.next(), Some((*key, *found)))).unwrap();
        assert_eq!(twin.next(), None);
    }
    drop(far);
    heap.verify();
}

#[test]
fn odd_entries_and_other_heaps() {
    let (one, two) = (heap(2), heap(2));
    let mut set: FarBTreeMap<u16, ()> = FarBTreeMap::new();
    assert_eq!(set.get(&two.enter(), &1).unwrap(), None, "without an entry it belongs to no heap");
    for key in (0..3_000).rev() {
        assert_eq!(set.insert(&one.enter(), key, ()).unwrap(), None);
    }
    let scope = one.enter();
    assert!(set.range(&scope, 100..200).unwrap().rev().map(|e| *e.unwrap().0).eq((100..200).rev()));
    drop(scope);
    assert_eq!(set.get(&two.enter(), &1), Err(FarError::OtherHeap));
    let error = set.insert(&two.enter(), 1, ()).unwrap_err();
    assert_eq!((error.error, error.value), (FarError::OtherHeap, (1, ())));
    assert_eq!(set.entry(&two.enter(), 1).map(drop).unwrap_err().value, 1, "the key is given back");
    let mut large: FarBTreeMap<u8, [u8; 3_000]> = FarBTreeMap::new();
    for key in 0..100 {
        large.insert(&one.enter(), key, [key; 3_000]).unwrap();
    }
    for key in 0..100 {
        assert_eq!(large.remove(&one.enter(), &key).unwrap(), Some([key; 3_000]));
    }
    drop((set, large));
    one.verify();
}

#[test]
fn long_walks_are_fetched_ahead() {
    let heap = heap(1);
    let mut map = FarBTreeMap::new();
    let count = 8 * MIB / size_of::<Value>() as u64;
    for key in 0..count {
        map.insert(&heap.enter(), key, value(key)).unwrap();
    }
    let before = heap.stats().prefetches_used;
    let mut next = 0;
    let visit = |key: &u64, found: &Value| {
        assert_eq!((*key, found[7]), (next, next ^ 7));
        next += 1;
    };
    map.for_each(&mut heap.enter(), visit).unwrap();
    assert_eq!(next, count);
    let used = heap.stats().prefetches_used - before;
    assert!(used > count / 12 / 4, "{used} of about {} leaves", count / 6);
}
