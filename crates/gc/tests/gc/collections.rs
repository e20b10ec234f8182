//! Guards against a map or a log that differs from its twin in std: when it is mostly far, while others change it, while the
//! heap is collected, and whatever the program's own code does in between.

use crate::common::{heaps, is_deep, seed};
use core::hash::{Hash, Hasher};
use farfield_gc::collections::{AppendLog, MapKey, MapValue, OrderedMap, TrieMap, TriePosition};
use farfield_gc::{AnyObject, Bytes, FarObject, Gc, GcError, Mutator, Ref, Referent, Root, WeakRef};
use fastrand::Rng;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::sync::{Arc, Mutex};

fn steps(few: usize, many: usize) -> usize {
    if is_deep() { many } else { few }
}

/// All entries of a map, with safepoints in between.
fn walked<K: MapKey, V: MapValue, R: Eq + Hash>(
    m: &mut Mutator<'_>,
    map: &Root<TrieMap<K, V>>,
    tell: impl Fn(&Mutator<'_>, &K, Option<V::Given<'_>>) -> R,
) -> Vec<R> {
    let (mut all, mut at) = (Vec::new(), Some(TriePosition::default()));
    while let Some(from) = at {
        let (some, next) = m
            .with_room(|m| {
                let (entries, next) = m.get(map)?.walk(m, from, 50)?;
                let told = entries.iter().map(|entry| Ok(tell(m, entry.key(), entry.value(m)?)));
                Ok((told.collect::<Result<Vec<_>, GcError>>()?, next))
            })
            .unwrap();
        all.extend(some);
        at = next;
        m.safepoint().unwrap();
    }
    all
}

#[test]
fn a_map_of_strings_is_its_twin() {
    let (_heap, gc) = heaps(1, 64);
    let mut m = gc.enter();
    let map = m.root(m.alloc(TrieMap::<Ref<str>, Ref<Bytes>>::new()).unwrap());
    let (mut random, mut twin) = (Rng::with_seed(seed()), HashMap::new());
    for step in 0..steps(12_000, 300_000) {
        let key = format!("key {}", random.u32(..4000));
        match random.u32(..10) {
            0..6 => {
                let value = vec![random.u8(..); random.usize(..300)];
                let insert = |m: &Mutator<'_>| m.get(&map)?.insert(m, &key, m.alloc_copy(&value)?);
                let is_new = m.with_room(insert).unwrap();
                assert_eq!(is_new, twin.insert(key, value).is_none());
            }
            6..8 => {
                let was_there = m.with_room(|m| m.get(&map)?.remove(m, &key)).unwrap();
                assert_eq!(was_there, twin.remove(&key).is_some());
            }
            _ => {
                let found = m.get(&map).unwrap().get(&m, &key).unwrap();
                assert_eq!(found.as_deref(), twin.get(&key).map(|value| &value[..]));
            }
        }
        m.safepoint().unwrap();
        if step % 5000 == 0 {
            m.collect().unwrap();
        }
    }
    assert_eq!(m.get(&map).unwrap().len(), twin.len() as u64);
    let all =
        walked(&mut m, &map, |m, key, value| (key.load(m).unwrap().unwrap().to_string(), value.unwrap().to_vec()));
    assert_eq!(all.len(), twin.len(), "each once");
    assert_eq!(all.into_iter().collect::<HashMap<_, _>>(), twin);
    m.collect().unwrap();
    drop(m);
    gc.verify().unwrap();
}

/// Key whose hashes are few, and which does what it likes in the middle of everything.
#[derive(FarObject)]
struct Clash(u64);

#[derive(Clone, Copy)]
struct ClashQuery<'a> {
    number: u64,
    hashes: u64,
    meanwhile: Option<&'a dyn Fn(&Mutator<'_>)>,
}

impl Hash for ClashQuery<'static> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.number % self.hashes);
    }
}

impl MapKey for Clash {
    type Query = ClashQuery<'static>;

    fn new(query: &ClashQuery<'static>) -> Clash {
        Clash(query.number)
    }

    fn is(&self, m: &Mutator<'_>, query: &ClashQuery<'static>) -> Result<bool, GcError> {
        if let Some(meanwhile) = query.meanwhile {
            meanwhile(m);
        }
        Ok(self.0 == query.number)
    }
}

#[test]
fn keys_whose_hashes_are_equal_are_told_apart() {
    for hashes in [1, 3] {
        let (_heap, gc) = heaps(1, 32);
        let mut m = gc.enter();
        let map = m.root(m.alloc(TrieMap::<Clash, u64>::new()).unwrap());
        let (mut random, mut twin) = (Rng::with_seed(seed()), HashMap::new());
        for step in 0..4000 {
            let query = ClashQuery { number: random.u64(..40), hashes, meanwhile: None };
            if random.bool() {
                let is_new = m.with_room(|m| m.get(&map)?.insert(m, &query, step)).unwrap();
                assert_eq!(is_new, twin.insert(query.number, step).is_none());
            } else {
                let was_there = m.with_room(|m| m.get(&map)?.remove(m, &query)).unwrap();
                assert_eq!(was_there, twin.remove(&query.number).is_some());
            }
            let query = ClashQuery { number: random.u64(..40), ..query };
            assert_eq!(m.get(&map).unwrap().get(&m, &query).unwrap(), twin.get(&query.number).copied());
            m.safepoint().unwrap();
        }
        let all = walked(&mut m, &map, |_, key, value| (key.0, value.unwrap()));
        assert_eq!(all.len(), twin.len());
        assert_eq!(all.into_iter().collect::<HashMap<_, _>>(), twin);
    }
}

#[test]
fn a_key_that_changes_the_map_while_it_is_compared_loses_nothing() {
    let (_heap, gc) = heaps(4, 32);
    let m = gc.enter();
    let map = m.root(m.alloc(TrieMap::<Clash, u64>::new()).unwrap());
    let plain = |number| ClashQuery { number, hashes: 1, meanwhile: None };
    for number in 0..3 {
        m.get(&map).unwrap().insert(&m, &plain(number), number).unwrap();
    }
    // Each comparison inserts one more, and removes one.
    let (seen, other) = (Mutex::new(10), map.clone());
    let meanwhile: &'static dyn Fn(&Mutator<'_>) = Box::leak(Box::new(move |m: &Mutator<'_>| {
        let mut next = seen.lock().unwrap();
        if *next < 20 {
            *next += 1;
            let map = m.get(&other).unwrap();
            assert!(map.insert(m, &plain(*next), *next).unwrap());
            map.remove(m, &plain(2)).unwrap();
        }
    }));
    let restless = |number| ClashQuery { meanwhile: Some(meanwhile), ..plain(number) };
    let map = m.get(&map).unwrap();
    assert!(!map.insert(&m, &restless(1), 100).unwrap());
    assert!(map.remove(&m, &restless(0)).unwrap());
    let (entries, rest) = map.walk(&m, TriePosition::default(), 1).unwrap();
    assert!(rest.is_none(), "equal hashes come together");
    let mut found: Vec<_> = entries.iter().map(|entry| (entry.key().0, entry.value(&m).unwrap().unwrap())).collect();
    found.sort_unstable();
    let mut wanted: Vec<_> = (11..=20).map(|number| (number, number)).collect();
    wanted.insert(0, (1, 100));
    assert_eq!(found, wanted);
    assert_eq!(map.len(), wanted.len() as u64);
}

#[test]
fn threads_that_change_a_map_lose_nothing_of_each_other() {
    let (_heap, gc) = heaps(2, 64);
    let map = gc.enter().with_room(|m| Ok(m.root(m.alloc(TrieMap::<u64, u64>::new())?))).unwrap();
    let threads = 4;
    let each = steps(2000, 40_000) as u64;
    let wins: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|me| {
                let (gc, map) = (&gc, &map);
                scope.spawn(move || {
                    let (mut m, mut wins) = (gc.enter(), 0);
                    for number in 0..each {
                        // Its own key, which it removes again every third time, and one that all want to be first at.
                        let own = number * threads + me;
                        assert!(m.with_room(|m| m.get(map)?.insert(m, &own, number)).unwrap());
                        let shared = u64::MAX - number;
                        wins += u64::from(m.with_room(|m| m.get(map)?.insert(m, &shared, me)).unwrap());
                        if number % 3 == 0 {
                            assert!(m.with_room(|m| m.get(map)?.remove(m, &own)).unwrap());
                        }
                        m.safepoint().unwrap();
                    }
                    wins
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!(wins, each, "each shared key is new once");
    let mut m = gc.enter();
    for number in 0..each {
        let at = m.get(&map).unwrap();
        for me in 0..threads {
            let wanted = (number % 3 != 0).then_some(number);
            assert_eq!(at.get(&m, &(number * threads + me)).unwrap(), wanted);
        }
        assert!(at.get(&m, &(u64::MAX - number)).unwrap().is_some_and(|who| who < threads));
        m.safepoint().unwrap();
    }
    let kept = each + threads * (each - each.div_ceil(3));
    assert_eq!(m.get(&map).unwrap().len(), kept);
}

#[test]
fn counters_that_are_exchanged_by_many_threads_count_each_step() {
    let (_heap, gc) = heaps(2, 64);
    let map = gc.enter().with_room(|m| Ok(m.root(m.alloc(TrieMap::<u64, u64>::new())?))).unwrap();
    let each = steps(2000, 30_000);
    std::thread::scope(|scope| {
        for me in 0..4 {
            let (gc, map) = (&gc, &map);
            scope.spawn(move || {
                let (mut m, mut random) = (gc.enter(), Rng::with_seed(seed() + me));
                for _ in 0..each {
                    let key = random.u64(..10);
                    let count = |m: &Mutator<'_>| {
                        let map = m.get(map)?;
                        loop {
                            let entry = map.entry(m, &key)?;
                            let value = entry.map_or(Ok(None), |entry| entry.value(m))?;
                            // What reaches a hundred is taken out, and counted in another place.
                            let next = value.map_or(Some(1), |value| (value < 99).then_some(value + 1));
                            if map.compare_exchange(m, &key, entry, next)? {
                                return Ok(next.is_none());
                            }
                        }
                    };
                    if m.with_room(count).unwrap() {
                        let add = |m: &Mutator<'_>| loop {
                            let map = m.get(map)?;
                            let entry = map.entry(m, &u64::MAX)?;
                            let value = entry.map_or(Ok(None), |entry| entry.value(m))?.unwrap_or(0);
                            if map.compare_exchange(m, &u64::MAX, entry, Some(value + 100))? {
                                return Ok(());
                            }
                        };
                        m.with_room(add).unwrap();
                    }
                    m.safepoint().unwrap();
                }
            });
        }
    });
    let m = gc.enter();
    let map = m.get(&map).unwrap();
    let (entries, _) = map.walk(&m, TriePosition::default(), 100).unwrap();
    let sum: u64 = entries.iter().map(|entry| entry.value(&m).unwrap().unwrap()).sum();
    assert_eq!((sum, map.len()), (4 * each as u64, entries.len() as u64));
    assert!(map.compare_exchange(&m, &77, None, None).unwrap(), "it is not there");
    assert!(!map.compare_exchange(&m, &77, Some(entries[0]), Some(1)).unwrap());
    assert!(!map.compare_exchange(&m, entries[0].key(), None, Some(1)).unwrap());
}

#[derive(FarObject)]
struct Document {
    number: u64,
    others: TrieMap<u64, WeakRef<Document>>,
}

#[test]
fn a_map_of_weak_references_keeps_nothing_alive() {
    let (_heap, gc) = heaps(1, 32);
    let mut m = gc.enter();
    let first = m.root(m.alloc(Document { number: 0, others: TrieMap::new() }).unwrap());
    let mut kept = Vec::new();
    for number in 1..2000 {
        m.with_room(|m| {
            let other = m.alloc(Document { number, others: TrieMap::new() })?;
            if number % 10 == 0 {
                kept.push(m.root(other));
            }
            m.get(&first)?.others.insert(m, &number, other)
        })
        .unwrap();
        m.safepoint().unwrap();
    }
    m.collect().unwrap();
    for number in 1..2000 {
        let found = m.get(&first).unwrap().others.get(&m, &number).unwrap();
        assert_eq!(found.map(|document| document.number), (number % 10 == 0).then_some(number));
        m.safepoint().unwrap();
    }
    drop(kept);
    m.collect().unwrap();
    let first = m.get(&first).unwrap();
    assert!(first.others.get(&m, &1000).unwrap().is_none());
    assert_eq!(first.others.len(), 1999, "entries stay until they are removed");
}

/// All keys of an ordered map and what `take` makes of their values, with safepoints in between.
fn in_order<T: Referent + ?Sized, R>(
    m: &mut Mutator<'_>,
    map: &Root<OrderedMap<u32, Ref<T>>>,
    take: impl Fn(&T) -> R,
) -> Vec<(u32, R)> {
    let (mut from, mut all) = (Bound::Unbounded, Vec::new());
    loop {
        let some = m.get(map).unwrap().range(m, from, 100).unwrap();
        let Some((last, _)) = some.last() else { return all };
        from = Bound::Excluded(*last);
        all.extend(some.iter().map(|(key, value)| (*key, take(value))));
        m.safepoint().unwrap();
    }
}

#[test]
fn an_ordered_map_is_its_twin() {
    let (_heap, gc) = heaps(1, 64);
    let mut m = gc.enter();
    let map = m.root(m.alloc(OrderedMap::<u32, Ref<str>>::new()).unwrap());
    let (mut random, mut twin) = (Rng::with_seed(seed()), BTreeMap::new());
    let mut snapshots = Vec::new();
    let total = steps(9000, 200_000);
    for step in 0..total {
        // It grows at first and then loses nearly everything.
        let key = random.u32(..3000);
        let inserts = if step < total / 2 { 7 } else { 2 };
        if random.u32(..10) < inserts {
            let text = format!("{key} at {step}");
            let is_new = m.with_room(|m| m.get(&map)?.insert(m, key, m.alloc_str(&text)?)).unwrap();
            assert_eq!(is_new, twin.insert(key, text).is_none());
        } else {
            let was_there = m.with_room(|m| m.get(&map)?.remove(m, &key)).unwrap();
            assert_eq!(was_there, twin.remove(&key).is_some());
        }
        m.safepoint().unwrap();
        {
            let map = m.get(&map).unwrap();
            let key = random.u32(..3000);
            assert_eq!(map.get(&m, &key).unwrap().as_deref(), twin.get(&key).map(|text| &text[..]));
            assert_eq!(map.contains(&m, &key).unwrap(), twin.contains_key(&key));
            assert_eq!(map.last_key(&m).unwrap().as_ref(), twin.keys().next_back());
            let from = if random.bool() { Bound::Included(key) } else { Bound::Excluded(key) };
            let some = map.range(&m, from, 5).unwrap();
            let wanted: Vec<_> = twin.range((from, Bound::Unbounded)).take(5).collect();
            assert_eq!(some.len(), wanted.len());
            let keys = map.keys(&m, from, 5).unwrap();
            assert!(keys.iter().eq(some.iter().map(|(key, _)| key)));
            for ((key, text), (wanted_key, wanted_text)) in some.iter().zip(wanted) {
                assert_eq!((key, &**text), (wanted_key, &wanted_text[..]));
            }
            assert_eq!((map.len(), map.is_empty()), (twin.len() as u64, twin.is_empty()));
        }
        if step % (total / 4) == 100 {
            snapshots.push((m.root(m.get(&map).unwrap().snapshot(&m).unwrap()), twin.clone()));
            m.collect().unwrap();
        }
        m.safepoint().unwrap();
    }
    snapshots.push((map.clone(), twin.clone()));
    for (snapshot, twin) in snapshots {
        let all = in_order(&mut m, &snapshot, |text| text.to_string());
        assert_eq!(all, twin.into_iter().collect::<Vec<_>>());
    }
    let keys: Vec<u32> = twin.into_keys().collect();
    for key in keys {
        assert!(m.with_room(|m| m.get(&map)?.remove(m, &key)).unwrap());
        m.safepoint().unwrap();
    }
    let map = m.get(&map).unwrap();
    assert!(map.is_empty() && map.last_key(&m).unwrap().is_none());
}

#[test]
fn threads_that_change_an_ordered_map_lose_nothing_of_each_other() {
    let (_heap, gc) = heaps(2, 64);
    let map = gc.enter().with_room(|m| Ok(m.root(m.alloc(OrderedMap::<u64, u64>::new())?))).unwrap();
    let each = steps(600, 10_000) as u64;
    std::thread::scope(|scope| {
        for me in 0..4 {
            let (gc, map) = (&gc, &map);
            scope.spawn(move || {
                let mut m = gc.enter();
                for number in 0..each {
                    let key = number * 4 + me;
                    assert!(m.with_room(|m| m.get(map)?.insert(m, key, me)).unwrap());
                    if number % 2 == 0 {
                        assert!(m.with_room(|m| m.get(map)?.remove(m, &key)).unwrap());
                    }
                    m.safepoint().unwrap();
                }
            });
        }
    });
    let m = gc.enter();
    let map = m.get(&map).unwrap();
    let all = map.range(&m, Bound::Unbounded, usize::MAX).unwrap();
    let wanted = (0..each * 4).filter(|key| key / 4 % 2 == 1).map(|key| (key, key % 4));
    assert_eq!(all, wanted.collect::<Vec<_>>());
    assert_eq!(map.len(), all.len() as u64);
}

/// Maps that share nodes with each other, each beside its twin.
#[test]
fn snapshots_and_their_maps_change_without_each_other() {
    // Of one leaf or a few, and of three levels.
    change_maps_that_share(40, steps(6000, 300_000));
    change_maps_that_share(1500, steps(6000, 150_000));
}

fn change_maps_that_share(keys: u32, total: usize) {
    let (_heap, gc) = heaps(1, 64);
    let mut m = gc.enter();
    let mut random = Rng::with_seed(seed());
    let first = m.root(m.alloc(OrderedMap::<u32, Ref<u64>>::new()).unwrap());
    let mut all = vec![(first, BTreeMap::new())];
    for step in 0..total as u64 {
        let at = random.usize(..all.len());
        let (map, twin) = &mut all[at];
        // Runs of keys grow and shrink, so that nodes are cut and joined at both of their ends.
        let (begin, inserts) = (random.u32(..keys), random.u32(..10) < 6);
        for key in begin..begin + random.u32(1..40) {
            if inserts {
                let is_new = m.with_room(|m| m.get(map)?.insert(m, key, m.alloc(step)?)).unwrap();
                assert_eq!(is_new, twin.insert(key, step).is_none());
            } else {
                let was_there = m.with_room(|m| m.get(map)?.remove(m, &key)).unwrap();
                assert_eq!(was_there, twin.remove(&key).is_some());
            }
            m.safepoint().unwrap();
        }
        assert_eq!(m.get(map).unwrap().len(), twin.len() as u64);
        if step.is_multiple_of(10) {
            let copy = (m.with_room(|m| Ok(m.root(m.get(map)?.snapshot(m)?))).unwrap(), twin.clone());
            match all.len() {
                ..6 => all.push(copy),
                len => all[random.usize(..len)] = copy,
            }
        }
        if step.is_multiple_of(100) || step + 1 == total as u64 {
            let (map, twin) = &all[random.usize(..all.len())];
            let found = in_order(&mut m, map, |value| *value);
            assert_eq!(found, twin.iter().map(|(key, value)| (*key, *value)).collect::<Vec<_>>());
        }
        m.safepoint().unwrap();
    }
    drop(m);
    gc.verify().unwrap();
}

/// The root of a map becomes a leaf that a snapshot has, too.
#[test]
fn a_snapshot_keeps_the_leaf_that_its_map_is_left_with() {
    let (_heap, gc) = heaps(1, 64);
    let m = gc.enter();
    let map = m.alloc(OrderedMap::<u32, Ref<u64>>::new()).unwrap();
    let set = |key, value| map.insert(&m, key, m.alloc(value).unwrap()).unwrap();
    // Two leaves, the first of which is full.
    assert!((0..=48).step_by(2).chain((1..22).step_by(2)).all(|key| set(key, 1)));
    assert!((28..=48).step_by(2).all(|key| map.remove(&m, &key).unwrap()));
    let snapshot = map.snapshot(&m).unwrap();
    assert!(map.remove(&m, &26).unwrap() && !set(4, 2));
    assert_eq!(map.get(&m, &4).unwrap().map(|value| *value), Some(2));
    assert_eq!(snapshot.get(&m, &4).unwrap().map(|value| *value), Some(1));
    assert_eq!((map.len(), snapshot.len()), (24, 25));
}

/// Value that does what it likes when it is looked at.
#[derive(FarObject)]
struct Looked(Ref<u64>);

std::thread_local! {
    static MEANWHILE: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// Does what somebody else would do now. What that looks at does nothing more.
fn do_meanwhile() {
    if let Some(mut meanwhile) = MEANWHILE.take() {
        meanwhile();
        MEANWHILE.set(Some(meanwhile));
    }
}

impl MapValue for Looked {
    type Given<'m> = Gc<'m, u64>;

    fn new(_: Gc<'_, u64>) -> Looked {
        Looked(Ref::null())
    }

    fn fill(&self, m: &Mutator<'_>, given: Gc<'_, u64>) -> Result<(), GcError> {
        self.0.store(m, Some(given));
        Ok(())
    }

    fn copy(&self) -> Looked {
        Looked(Ref::null())
    }

    fn fill_from(&self, m: &Mutator<'_>, other: &Looked) {
        self.0.copy_from(m, &other.0);
    }

    fn find<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<Gc<'m, u64>>, GcError> {
        do_meanwhile();
        self.0.load(m)
    }
}

/// Each look at a value changes all values, so any two looks are at different moments.
#[test]
fn a_range_is_of_one_moment_though_the_map_changes_all_the_time() {
    const KEYS: u64 = 40;
    let (_heap, gc) = heaps(8, 64);
    let gc = Arc::new(gc);
    let m = gc.enter();
    let map = m.root(m.alloc(OrderedMap::<u64, Looked>::new()).unwrap());
    let count_up = |m: &Mutator<'_>, map: &OrderedMap<u64, Looked>, round: u64| {
        for key in 0..KEYS {
            map.insert(m, key, m.alloc(round).unwrap()).unwrap();
        }
        map.insert(m, KEYS + round, m.alloc(round).unwrap()).unwrap();
    };
    count_up(&m, &m.get(&map).unwrap(), 0);
    let (other_gc, other_map, mut round) = (Arc::clone(&gc), map.clone(), 0);
    MEANWHILE.set(Some(Box::new(move || {
        round += 1;
        let m = other_gc.enter();
        count_up(&m, &m.get(&other_map).unwrap(), round);
    })));
    let found = m.get(&map).unwrap().range(&m, Bound::Unbounded, usize::MAX).unwrap();
    MEANWHILE.set(None);
    let round = *found[0].1;
    assert!(round > 0, "it changed meanwhile");
    assert!(found[..KEYS as usize].iter().all(|(_, value)| **value == round));
    assert!(found[KEYS as usize..].iter().map(|(key, _)| *key).eq(KEYS..=KEYS + round));
}

/// One thread counts all values up, from the first key to the last, and inserts and removes keys between
/// them. So at each moment they fall by one at most, at one key.
#[test]
fn snapshots_beside_a_thread_that_changes_the_map_are_of_one_moment() {
    const KEYS: u64 = 120;
    let (_heap, gc) = heaps(2, 64);
    let map = gc.enter().with_room(|m| Ok(m.root(m.alloc(OrderedMap::<u64, Ref<u64>>::new())?))).unwrap();
    let rounds = steps(60, 2000) as u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut m = gc.enter();
            for round in 1..=rounds {
                for key in 0..KEYS {
                    m.with_room(|m| m.get(&map)?.insert(m, 2 * key, m.alloc(round)?)).unwrap();
                    let between = 2 * ((key + round) % KEYS) + 1;
                    m.with_room(|m| match round % 2 {
                        0 => m.get(&map)?.remove(m, &between),
                        _ => m.get(&map)?.insert(m, between, m.alloc(round)?),
                    })
                    .unwrap();
                    m.safepoint().unwrap();
                }
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let (mut m, mut last) = (gc.enter(), 0);
                while last < rounds {
                    let found = m.with_room(|m| {
                        let found = m.get(&map)?.snapshot(m)?.range(m, Bound::Unbounded, usize::MAX)?;
                        Ok(found.iter().filter(|(key, _)| key % 2 == 0).map(|(_, value)| **value).collect::<Vec<_>>())
                    });
                    let values = found.unwrap();
                    let first = values.first().copied().unwrap_or(0);
                    last = values.last().copied().unwrap_or(0);
                    assert!(values.is_sorted_by(|a, b| a >= b) && first - last <= 1, "{values:?}");
                    m.safepoint().unwrap();
                }
            });
        }
    });
    let m = gc.enter();
    let map = m.get(&map).unwrap();
    assert_eq!(map.len(), map.keys(&m, Bound::Unbounded, usize::MAX).unwrap().len() as u64);
}

/// Key that does what it likes when it is compared.
#[derive(FarObject, Clone, Copy, PartialEq, Eq)]
struct Restless(u64);

impl PartialOrd for Restless {
    fn partial_cmp(&self, other: &Restless) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Restless {
    fn cmp(&self, other: &Restless) -> core::cmp::Ordering {
        do_meanwhile();
        self.0.cmp(&other.0)
    }
}

#[test]
fn a_key_that_changes_an_ordered_map_while_it_is_compared_loses_nothing() {
    let (_heap, gc) = heaps(4, 32);
    let gc = Arc::new(gc);
    let m = gc.enter();
    let map = m.root(m.alloc(OrderedMap::<Restless, u64>::new()).unwrap());
    for number in 0..100 {
        m.get(&map).unwrap().insert(&m, Restless(number), number).unwrap();
    }
    let (other_gc, other_map, mut next) = (Arc::clone(&gc), map.clone(), 1000);
    MEANWHILE.set(Some(Box::new(move || {
        next += 1;
        if next <= 1050 {
            let m = other_gc.enter();
            let map = m.get(&other_map).unwrap();
            assert!(map.insert(&m, Restless(next), next).unwrap() && map.remove(&m, &Restless(next - 1001)).unwrap());
        }
    })));
    let found = m.get(&map).unwrap();
    assert!(!found.insert(&m, Restless(70), 7).unwrap() && found.remove(&m, &Restless(80)).unwrap());
    assert!(!found.snapshot(&m).unwrap().is_empty());
    assert_eq!(found.get(&m, &Restless(70)).unwrap(), Some(7));
    MEANWHILE.set(None);
    let found: Vec<_> = found.range(&m, Bound::Unbounded, 500).unwrap();
    let wanted = (50..100).filter(|number| *number != 80).chain(1001..1051);
    let wanted: Vec<_> = wanted.map(|number| (Restless(number), if number == 70 { 7 } else { number })).collect();
    assert!(found.len() == wanted.len() && found.iter().zip(&wanted).all(|(a, b)| a.0.0 == b.0.0 && a.1 == b.1));
}

#[derive(FarObject)]
struct Event {
    thread: u64,
    number: u64,
}

#[test]
fn a_log_has_each_object_once_and_forgets_the_oldest() {
    let (_heap, gc) = heaps(1, 64);
    let log = gc.enter().with_room(|m| Ok(m.root(m.alloc(AppendLog::<Event>::new())?))).unwrap();
    let each = steps(3000, 100_000) as u64;
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (gc, log) = (&gc, &log);
            scope.spawn(move || {
                let (mut m, mut last) = (gc.enter(), None);
                for number in 0..each {
                    let push = |m: &Mutator<'_>| m.get(log)?.push(m, m.alloc(Event { thread, number })?);
                    let index = m.with_room(push).unwrap();
                    assert!(last.is_none_or(|last| last < index));
                    last = Some(index);
                    m.safepoint().unwrap();
                }
            });
        }
    });
    let mut m = gc.enter();
    let len = 3 * each;
    let (mut seen, mut at) = (HashSet::new(), 0);
    while at < len {
        let log = m.get(&log).unwrap();
        let some = log.range(&m, at, 150).unwrap();
        assert_eq!(some.len() as u64, 150.min(len - at));
        seen.extend(some.iter().map(|event| (event.thread, event.number)));
        let one = log.get(&m, at + some.len() as u64 / 2).unwrap().unwrap();
        assert!(one.is(some[some.len() / 2]));
        at += some.len() as u64;
        m.safepoint().unwrap();
    }
    assert_eq!(seen.len() as u64, len);
    assert!(m.get(&log).unwrap().get(&m, len).unwrap().is_none());
    m.collect().unwrap();
    let before = gc.stats().live_objects;
    // In steps that are no multiples of a node.
    for trimmed in (0..len - 1).step_by(777).chain([len - 1, 5]) {
        m.with_room(|m| m.get(&log)?.trim(m, trimmed)).unwrap();
        let log = m.get(&log).unwrap();
        assert!(trimmed == 5 || log.start() == trimmed);
        assert!(trimmed == 0 || log.get(&m, trimmed - 1).unwrap().is_none());
        assert_eq!(log.get(&m, log.start()).unwrap().is_some(), log.start() < len);
        m.safepoint().unwrap();
    }
    m.collect().unwrap();
    let after = gc.stats().live_objects;
    assert!(after < before - len + 100, "{before} objects before, {after} after");
    let index = m.with_room(|m| m.get(&log)?.push(m, m.alloc(Event { thread: 9, number: 9 })?)).unwrap();
    let log = m.get(&log).unwrap();
    assert_eq!((index, log.len(), log.is_empty()), (len, len + 1, false));
    assert_eq!(log.range(&m, 0, 10).unwrap().iter().map(|event| event.thread).collect::<Vec<_>>().last(), Some(&9));
}

#[test]
fn any_object_is_what_it_was_made_as() {
    let (_heap, gc) = heaps(1, 8);
    let (_other_heap, other) = heaps(1, 8);
    let mut m = gc.enter();
    let holder = m.root(m.alloc(Ref::<AnyObject>::null()).unwrap());
    m.get(&holder).unwrap().store(&m, Some(m.alloc_str("ä text").unwrap().as_any()));
    m.collect().unwrap();
    let any = m.get(&holder).unwrap().load(&m).unwrap().unwrap();
    assert_eq!(any.downcast::<str>(&m).as_deref(), Some("ä text"));
    // Bytes are another type, and so is what this heap has never had.
    assert!(any.downcast::<Bytes>(&m).is_none() && any.downcast::<Event>(&m).is_none());
    let n = other.enter();
    assert!(any.downcast::<str>(&n).is_none());
    let number = n.alloc(7u64).unwrap();
    assert!(number.as_any().downcast::<u64>(&n).is_some_and(|same| same.is(number) && *same == 7));
    assert_eq!(&*m.alloc_str("").unwrap(), "");
}

/// References between the map's own nodes are to any object, too.
#[test]
fn an_ordered_map_has_values_of_any_type() {
    let gc = heaps(1, 16).1;
    let mut m = gc.enter();
    let map = m.root(m.alloc(OrderedMap::<u32, Ref<AnyObject>>::new()).unwrap());
    for key in 0..500 {
        m.with_room(|m| m.get(&map)?.insert(m, key, m.alloc(u64::from(key))?.as_any())).unwrap();
        m.safepoint().unwrap();
    }
    let map = m.get(&map).unwrap();
    let number = |key: u32| map.get(&m, &key).unwrap().and_then(|value| value.downcast::<u64>(&m)).map(|value| *value);
    assert!((0..500).all(|key| number(key) == Some(key.into())) && number(500).is_none());
    assert_eq!((map.len(), map.last_key(&m).unwrap()), (500, Some(499)));
}

#[test]
fn a_map_outside_of_a_heap_is_empty() {
    let gc = heaps(1, 8).1;
    let m = gc.enter();
    let map = TrieMap::<u64, u64>::new();
    assert!(map.is_empty() && map.get(&m, &1).unwrap().is_none() && !map.remove(&m, &1).unwrap());
    assert!(OrderedMap::<u64, u64>::new().get(&m, &1).unwrap().is_none());
}

#[test]
#[should_panic(expected = "allocate the object first")]
fn a_map_outside_of_a_heap_cannot_be_filled() {
    let gc = heaps(1, 8).1;
    let m = gc.enter();
    let _ = TrieMap::<u64, u64>::new().insert(&m, &1, 1);
}

/// The limit is reached in the middle of changes, which then have changed nothing or all.
#[test]
fn a_heap_that_is_full_leaves_its_maps_as_they_were() {
    let (_heap, gc) = heaps(1, 2);
    let mut m = gc.enter();
    let map = m.root(m.alloc(OrderedMap::<u64, Ref<Bytes>>::new()).unwrap());
    let other = m.root(m.alloc(TrieMap::<u64, Ref<Bytes>>::new()).unwrap());
    let mut held = 0;
    let error = loop {
        let value = [held as u8; 900];
        if let Err(error) = m.with_room(|m| m.get(&map)?.insert(m, held, m.alloc_copy(&value)?)) {
            break error;
        }
        held += 1;
        if let Err(error) = m.with_room(|m| m.get(&other)?.insert(m, &held, m.alloc_copy(&value)?)) {
            break error;
        }
    };
    assert!(matches!(error, GcError::HeapFull { .. } | GcError::SafepointDue), "{error}");
    assert!(held > 500, "{held}");
    for key in 0..held {
        let value = m.get(&map).unwrap().get(&m, &key).unwrap().unwrap();
        assert!(value.iter().all(|byte| *byte == key as u8));
        let value = m.get(&other).unwrap().get(&m, &(key + 1)).unwrap();
        assert!(value.map_or(key + 1 == held, |value| value.iter().all(|byte| *byte == key as u8)));
        // What was made in vain leaves no room for a safepoint's reserve, and needs none. Each of them collects.
        if key % 16 == 0 {
            let _ = m.safepoint();
        }
    }
    drop(m);
    gc.verify().unwrap();
}
