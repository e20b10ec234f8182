//! Maps and a log of values of 64 bytes that threads could share: `TrieMap`, `OrderedMap` and `AppendLog` of a collected heap,
//! and with std's types a `HashMap`, a `BTreeMap` and a `VecDeque` behind a lock, whose values are behind `Arc`.
//!
//! Values do not change: an update puts another one in its place. Keys come in random order, and are chosen by
//! Zipf's law; indices of the log are all alike.

use crate::collected::{collected, figures_of_collections};
use crate::random::{Random, mix};
use crate::zipf::Zipf;
use crate::{Options, Outcome, figures_since};
use anyhow::{Context, Result};
use farfield_gc::collections::{AppendLog, OrderedMap, TrieMap};
use farfield_gc::{Gc, GcError, Mutator, Ref, Root};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Operations between two safepoints.
const OPS_PER_SAFEPOINT: u64 = 16;
/// Entries of a scan.
const SCAN_ENTRIES: usize = 64;
/// Appends after which a log is trimmed.
const APPENDS_PER_TRIM: u64 = 64;

/// What a workload does with which collection.
#[derive(Clone, Copy)]
pub(crate) enum Scene {
    /// Gets of a map in no order, and updates.
    Trie,
    /// Gets of a map in the order of its keys, and updates.
    Ordered,
    /// Scans of a map in the order of its keys, and updates.
    Scan,
    /// Rows of a table in the order of its keys, by the mix of the options.
    Table,
    /// Gets from a log, and appends to it, with trims.
    Log,
}

/// Number, version, and a check of both. 64 bytes, with what an owner or a header adds.
type Value = [u64; 6];

/// Bytes that an entry takes: with std's types, and in the collected heap.
struct EntryBytes {
    plain: u64,
    collected: u64,
}

impl Scene {
    fn entry_bytes(self) -> EntryBytes {
        match self {
            Scene::Trie => EntryBytes { plain: 110, collected: 170 },
            Scene::Ordered | Scene::Scan | Scene::Table => EntryBytes { plain: 105, collected: 100 },
            Scene::Log => EntryBytes { plain: 90, collected: 82 },
        }
    }
}

fn value(number: u64, version: u64) -> Value {
    let check = mix(number ^ version.rotate_left(32));
    [number, version, check, !check, number, version]
}

/// What was found, and whether it was right.
#[derive(Default)]
struct Found {
    sum: u64,
    errors: u64,
}

impl Found {
    /// Adds the value that an operation has found for a number, if there is to be one.
    fn add(&mut self, number: u64, found: Option<&Value>) {
        let is_right = found.is_some_and(|found| *found == value(number, found[1]));
        self.errors += u64::from(!is_right);
        self.sum = self.sum.wrapping_add(found.map_or(0, |found| found[2])).rotate_left(1);
    }
}

/// Map of values by keys that are made of their numbers.
trait Map {
    fn put(&mut self, key: u64, value: Value) -> Result<()>;
    fn get(&mut self, key: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()>;
    /// Shows the values of the next keys, in their order.
    fn scan(&mut self, _from: u64, _see: &mut dyn FnMut(&Value)) -> Result<()> {
        unreachable!("it has no order")
    }
    fn len(&mut self) -> Result<u64>;
}

/// Log of values.
trait Log {
    fn push(&mut self, value: Value) -> Result<()>;
    fn get(&mut self, index: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()>;
    /// Forgets the values before an index.
    fn trim(&mut self, before: u64) -> Result<()>;
}

pub(crate) fn run(options: &Options, scene: Scene) -> Result<Outcome> {
    let bytes = scene.entry_bytes();
    // A table has so many at its end.
    let entries = options.data_bytes() / bytes.plain;
    let Some((heap, gc)) = collected(options, entries * bytes.collected)? else {
        return match scene {
            Scene::Trie => use_map(options, scene, entries, &mut RwLock::new(HashMap::new())),
            Scene::Ordered | Scene::Scan | Scene::Table => {
                use_map(options, scene, entries, &mut RwLock::new(BTreeMap::new()))
            }
            Scene::Log => use_log(options, entries, &mut PlainLog::default()),
        };
    };
    let before = heap.stats();
    let m = gc.enter();
    let mut outcome = match scene {
        Scene::Trie => use_map(options, scene, entries, &mut Collected::new(m, TrieMap::new)?),
        Scene::Ordered | Scene::Scan | Scene::Table => {
            use_map(options, scene, entries, &mut Collected::new(m, OrderedMap::new)?)
        }
        Scene::Log => use_log(options, entries, &mut Collected::new(m, AppendLog::new)?),
    }?;
    figures_since(&mut outcome, &before, &heap.stats(), options.ops, 0);
    figures_of_collections(&mut outcome, &gc);
    Ok(outcome)
}

fn use_map(options: &Options, scene: Scene, entries: u64, map: &mut impl Map) -> Result<Outcome> {
    if let Scene::Table = scene {
        return use_table(options, entries, map);
    }
    let (mut outcome, mut found, mut version) = (Outcome::new(), Found::default(), 0);
    outcome.phase("fill", entries, || (0..entries).try_for_each(|number| map.put(mix(number), value(number, 0))))?;
    let zipf = Zipf::new(entries, options.zipf_percent as f64 / 100.0);
    let mut random = Random::new(options.seed);
    outcome.phase("use", options.ops, || -> Result<()> {
        for _ in 0..options.ops {
            let number = mix(zipf.sample(&mut random)) % entries;
            if random.below(100) < options.write_percent {
                version += 1;
                map.put(mix(number), value(number, version))?;
            } else if let Scene::Scan = scene {
                map.scan(mix(number), &mut |value| found.add(value[0], Some(value)))?;
            } else {
                map.get(mix(number), &mut |value| found.add(number, value))?;
            }
        }
        Ok(())
    })?;
    let len = map.len()?;
    outcome.checked(found.sum ^ len, found.errors + len.abs_diff(entries));
    Ok(outcome)
}

/// A table of rows, of which some come while it is used. The rows that there are at first lie in the order of their keys, or in
/// none if the heap is aged.
fn use_table(options: &Options, entries: u64, table: &mut impl Map) -> Result<Outcome> {
    let (mut outcome, mut found, mut random) = (Outcome::new(), Found::default(), Random::new(options.seed));
    let (inserts, updates) = options.mix.percents();
    let first =
        entries.checked_sub(options.ops * inserts / 100).context("fewer operations: they insert more rows than fit")?;
    outcome.phase("fill", first, || {
        let mut rows: Vec<u64> = (0..first).collect();
        if options.aged == 0 {
            rows.sort_unstable_by_key(|number| mix(*number));
        }
        rows.iter().try_for_each(|number| table.put(mix(*number), value(*number, 0)))
    })?;
    let zipf = Zipf::new(first, options.zipf_percent as f64 / 100.0);
    let (mut next, mut version) = (first, 0);
    outcome.phase("use", options.ops, || -> Result<()> {
        for _ in 0..options.ops {
            let chance = random.below(100);
            let number = mix(zipf.sample(&mut random)) % first;
            if chance < inserts && next < entries {
                table.put(mix(next), value(next, 0))?;
                next += 1;
            } else if chance < inserts + updates {
                version += 1;
                table.put(mix(number), value(number, version))?;
            } else {
                table.get(mix(number), &mut |value| found.add(number, value))?;
            }
        }
        Ok(())
    })?;
    let len = table.len()?;
    outcome.checked(found.sum ^ len, found.errors + len.abs_diff(next));
    Ok(outcome)
}

/// A log of the newest `entries` values, of which half are forgotten at first: each operation appends a value, or gets one.
fn use_log(options: &Options, entries: u64, log: &mut impl Log) -> Result<Outcome> {
    let (mut outcome, mut found, mut random) = (Outcome::new(), Found::default(), Random::new(options.seed));
    outcome.phase("fill", entries, || (0..entries).try_for_each(|number| log.push(value(number, 0))))?;
    let (kept, mut end) = (entries / 2, entries);
    log.trim(end - kept)?;
    outcome.phase("use", options.ops, || -> Result<()> {
        for _ in 0..options.ops {
            if random.below(100) < options.write_percent {
                log.push(value(end, 0))?;
                end += 1;
                if end.is_multiple_of(APPENDS_PER_TRIM) {
                    log.trim(end - kept)?;
                }
            } else {
                let number = end - 1 - random.below(kept);
                log.get(number, &mut |value| found.add(number, value))?;
            }
        }
        Ok(())
    })?;
    outcome.checked(mix(found.sum) ^ end, found.errors);
    Ok(outcome)
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl Map for RwLock<HashMap<u64, Arc<Value>>> {
    fn put(&mut self, key: u64, value: Value) -> Result<()> {
        let value = Arc::new(value);
        let before = write(self).insert(key, value);
        drop(before);
        Ok(())
    }

    fn get(&mut self, key: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()> {
        let found = read(self).get(&key).cloned();
        see(found.as_deref());
        Ok(())
    }

    fn len(&mut self) -> Result<u64> {
        Ok(read(self).len() as u64)
    }
}

impl Map for RwLock<BTreeMap<u64, Arc<Value>>> {
    fn put(&mut self, key: u64, value: Value) -> Result<()> {
        let value = Arc::new(value);
        let before = write(self).insert(key, value);
        drop(before);
        Ok(())
    }

    fn get(&mut self, key: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()> {
        let found = read(self).get(&key).cloned();
        see(found.as_deref());
        Ok(())
    }

    fn scan(&mut self, from: u64, see: &mut dyn FnMut(&Value)) -> Result<()> {
        let next = |map: &BTreeMap<u64, Arc<Value>>| -> Vec<_> {
            map.range(from..).take(SCAN_ENTRIES).map(|(key, value)| (*key, Arc::clone(value))).collect()
        };
        let found = next(&read(self));
        found.iter().for_each(|(_, value)| see(value));
        Ok(())
    }

    fn len(&mut self) -> Result<u64> {
        Ok(read(self).len() as u64)
    }
}

#[derive(Default)]
struct PlainLog(Mutex<PlainRecords>);

#[derive(Default)]
struct PlainRecords {
    /// Number of values that were forgotten.
    start: u64,
    values: VecDeque<Arc<Value>>,
}

impl Log for PlainLog {
    fn push(&mut self, value: Value) -> Result<()> {
        let value = Arc::new(value);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values.push_back(value);
        Ok(())
    }

    fn get(&mut self, index: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()> {
        let records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = index.checked_sub(records.start).and_then(|at| records.values.get(at as usize).cloned());
        drop(records);
        see(found.as_deref());
        Ok(())
    }

    fn trim(&mut self, before: u64) -> Result<()> {
        let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = before.saturating_sub(records.start).min(records.values.len() as u64);
        records.values.drain(..count as usize);
        records.start += count;
        Ok(())
    }
}

/// A collection of a collected heap, and the thread's right to use it.
struct Collected<'gc, T> {
    m: Mutator<'gc>,
    root: Root<T>,
    ops: u64,
}

impl<'gc, T: farfield_gc::FarObject> Collected<'gc, T> {
    fn new(mut m: Mutator<'gc>, make: impl Fn() -> T) -> Result<Collected<'gc, T>> {
        let root = m.with_room(|m| Ok(m.root(m.alloc(make())?)))?;
        Ok(Collected { m, root, ops: 0 })
    }

    /// Does an operation, and reaches a safepoint now and then.
    fn with<R>(&mut self, mut action: impl FnMut(&Mutator<'_>, Gc<'_, T>) -> Result<R, GcError>) -> Result<R> {
        let root = &self.root;
        let done = self.m.with_room(|m| action(m, m.get(root)?))?;
        self.ops += 1;
        if self.ops.is_multiple_of(OPS_PER_SAFEPOINT) {
            self.m.safepoint()?;
        }
        Ok(done)
    }
}

impl Map for Collected<'_, TrieMap<u64, Ref<Value>>> {
    fn put(&mut self, key: u64, value: Value) -> Result<()> {
        self.with(|m, map| map.insert(m, &key, m.alloc(value)?)).map(drop)
    }

    fn get(&mut self, key: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()> {
        self.with(|m, map| {
            let found = map.get(m, &key)?;
            see(found.as_deref());
            Ok(())
        })
    }

    fn len(&mut self) -> Result<u64> {
        self.with(|_, map| Ok(map.len()))
    }
}

impl Map for Collected<'_, OrderedMap<u64, Ref<Value>>> {
    fn put(&mut self, key: u64, value: Value) -> Result<()> {
        self.with(|m, map| map.insert(m, key, m.alloc(value)?)).map(drop)
    }

    fn get(&mut self, key: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()> {
        self.with(|m, map| {
            let found = map.get(m, &key)?;
            see(found.as_deref());
            Ok(())
        })
    }

    fn scan(&mut self, from: u64, see: &mut dyn FnMut(&Value)) -> Result<()> {
        self.with(|m, map| {
            let found = map.range(m, Bound::Included(from), SCAN_ENTRIES)?;
            found.iter().for_each(|(_, value)| see(value));
            Ok(())
        })
    }

    fn len(&mut self) -> Result<u64> {
        self.with(|_, map| Ok(map.len()))
    }
}

impl Log for Collected<'_, AppendLog<Value>> {
    fn push(&mut self, value: Value) -> Result<()> {
        self.with(|m, log| log.push(m, m.alloc(value)?)).map(drop)
    }

    fn get(&mut self, index: u64, see: &mut dyn FnMut(Option<&Value>)) -> Result<()> {
        self.with(|m, log| {
            let found = log.get(m, index)?;
            see(found.as_deref());
            Ok(())
        })
    }

    fn trim(&mut self, before: u64) -> Result<()> {
        self.with(|m, log| log.trim(m, before)).context("trim")
    }
}
