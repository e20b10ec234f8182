//! A cache that evicts by second chance within a limit: whoever finds no value puts one in. In a
//! collected heap it is the example `gc_memcached` of `farfield-gc`, called without sockets; with
//! std's types it is what one writes with `Arc`, `HashMap` and `VecDeque`.
//!
//! There are twice as many keys as fit. They are chosen by Zipf's law; with `real = 1` they are
//! those of a disk's blocks ([`real`]).

#[path = "../../crates/gc/examples/memcached/cache.rs"]
#[allow(dead_code, reason = "clients of the example ask more")]
mod cache;
#[path = "../../crates/farfield/examples/memcached/counts.rs"]
#[allow(dead_code, reason = "clients of the example ask more")]
mod counts;
#[path = "../../crates/farfield/examples/memcached/request.rs"]
#[allow(dead_code, reason = "clients of the example ask more")]
mod request;
#[path = "../../crates/farfield/examples/memcached/text.rs"]
#[allow(dead_code, reason = "clients of the example ask more")]
mod text;
#[path = "../../crates/farfield/examples/memcached/times.rs"]
#[allow(dead_code, reason = "clients of the example ask more")]
mod times;

use crate::collected::{far_limit, figures_of_collections, record_waits};
use crate::entry::{Key, key};
use crate::random::{Random, mix};
use crate::real::{self, Numbers};
use crate::zipf::Zipf;
use crate::{Options, Outcome, figures_since};
use anyhow::{Result, anyhow, ensure};
use cache::{Cache, ENTRY_BYTES, Limits};
use counts::{Counts, count};
use request::Verb;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::BufReader;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use times::Times;

/// Sizes of values, in bytes.
const SIZES: (u64, u64) = (64, 1024);
/// Requests that set without asking, as in CacheLib's `kvcache_reg`.
const SETS_PER_MILLE: u64 = 126;
/// Keys for each value that fits.
const KEYS_PER_ENTRY: u64 = 2;
/// What an entry counts against the limit of the cache.
const COUNTED_BYTES: u64 = size_of::<Key>() as u64 + (SIZES.0 + SIZES.1) / 2 + ENTRY_BYTES as u64;
/// What an entry takes in the plain program, with its key and its places in map and queue.
const PLAIN_BYTES: u64 = 810;
/// What an entry takes in the collected heap.
const COLLECTED_BYTES: u64 = 800;

/// Who keeps the values.
trait Store {
    /// Shows the value of a key. Returns whether there is one.
    fn get(&self, key: &Key, see: &mut dyn FnMut(&[u8])) -> Result<bool>;
    fn set(&self, key: &Key, value: &[u8]) -> Result<()>;
    fn counts(&self) -> &Counts;
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let entries = options.data_bytes() / PLAIN_BYTES;
    let far = far_limit(entries * COLLECTED_BYTES);
    let limits = Limits { capacity: entries * COUNTED_BYTES, far, value_max: SIZES.1 as usize, evict: true };
    // No value has a time to live.
    let clock = || 1;
    let keys = entries * KEYS_PER_ENTRY;
    match options.heap(0)? {
        None => use_cache(options, keys, &PlainCache::new(limits, clock)),
        Some(heap) => {
            let cache = Cache::new(heap, limits, clock).map_err(|error| anyhow!("{error}"))?;
            record_waits(&cache.gc);
            let before = cache.heap.stats();
            let mut outcome = use_cache(options, keys, &cache)?;
            figures_since(&mut outcome, &before, &cache.heap.stats(), options.ops, 0);
            figures_of_collections(&mut outcome, &cache.gc);
            Ok(outcome)
        }
    }
}

fn use_cache(options: &Options, keys: u64, cache: &impl Store) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut requests = Requests::new(options, keys)?;
    outcome.phase("fill", keys, || (0..keys).try_for_each(|number| requests.set(cache, number)))?;
    (0..options.ops).try_for_each(|_| requests.one(cache))?;
    let load = |of: fn(&Counts) -> &AtomicU64| of(cache.counts()).load(Ordering::Relaxed);
    let (gets, hits) = (load(|counts| &counts.gets), load(|counts| &counts.hits));
    outcome.phase("request", options.ops, || (0..options.ops).try_for_each(|_| requests.one(cache)))?;
    let (gets, hits) = (load(|counts| &counts.gets) - gets, load(|counts| &counts.hits) - hits);
    let evictions = load(|counts| &counts.evictions);
    outcome.checked(mix(requests.sum ^ hits) ^ evictions, requests.errors);
    outcome.figure("hits", hits as f64);
    outcome.figure("hit_percent", hits as f64 * 100.0 / gets.max(1) as f64);
    outcome.figure("evictions", evictions as f64);
    Ok(outcome)
}

/// Whose key comes next.
enum Keys {
    Skewed(Zipf),
    Real(Numbers<BufReader<File>, 4>),
}

/// What is asked for, and what has been found.
struct Requests {
    count: u64,
    keys: Keys,
    random: Random,
    seed: u64,
    /// Values that were made.
    versions: u32,
    value: Vec<u8>,
    sum: u64,
    errors: u64,
}

impl Requests {
    fn new(options: &Options, count: u64) -> Result<Requests> {
        let keys = match options.real {
            1 => Keys::Real(Numbers::new(real::open(real::REQUESTS)?, |bytes| u32::from_le_bytes(bytes).into())),
            _ => Keys::Skewed(Zipf::new(count, options.zipf_percent as f64 / 100.0)),
        };
        let (random, seed) = (Random::new(options.seed), options.seed);
        Ok(Requests { count, keys, random, seed, versions: 0, value: Vec::new(), sum: 0, errors: 0 })
    }

    /// Makes the next request.
    fn one(&mut self, cache: &impl Store) -> Result<()> {
        let number = match &mut self.keys {
            Keys::Skewed(zipf) => zipf.sample(&mut self.random),
            Keys::Real(numbers) => numbers.next()?,
        };
        // Popular keys are anywhere among those of the fill.
        let number = mix(number) % self.count;
        if self.random.below(1000) < SETS_PER_MILLE {
            return self.set(cache, number);
        }
        let (mut sum, mut errors) = (0, 0);
        let is_found = cache.get(&key(number, self.seed), &mut |value| match version(number, value) {
            Some(version) => sum = u64::from(version),
            None => errors = 1,
        })?;
        self.sum = self.sum.wrapping_add(sum).rotate_left(1);
        self.errors += errors;
        if is_found { Ok(()) } else { self.set(cache, number) }
    }

    fn set(&mut self, cache: &impl Store, number: u64) -> Result<()> {
        self.versions += 1;
        self.value.clear();
        self.value.extend(self.versions.to_le_bytes());
        self.value.extend((mix(number ^ u64::from(self.versions)) as u32).to_le_bytes());
        self.value.resize(size(number, self.versions), number as u8);
        cache.set(&key(number, self.seed), &self.value)
    }
}

/// Bytes of this version of a key's value.
fn size(number: u64, version: u32) -> usize {
    (SIZES.0 + mix(number ^ u64::from(version) << 32) % (SIZES.1 + 1 - SIZES.0)) as usize
}

/// The version of a value, if it is one of this key.
fn version(number: u64, value: &[u8]) -> Option<u32> {
    let (version, rest) = value.split_first_chunk::<4>()?;
    let (check, rest) = rest.split_first_chunk::<4>()?;
    let version = u32::from_le_bytes(*version);
    let is_right = u32::from_le_bytes(*check) == mix(number ^ u64::from(version)) as u32
        && value.len() == size(number, version)
        && rest.last() == Some(&(number as u8));
    is_right.then_some(version)
}

impl Store for Cache {
    fn get(&self, key: &Key, see: &mut dyn FnMut(&[u8])) -> Result<bool> {
        Cache::get(self, key, |record| see(record.data)).map_err(|failure| anyhow!("get: {failure:?}"))
    }

    fn set(&self, key: &Key, value: &[u8]) -> Result<()> {
        let stored = self.store(Verb::Set, key, 0, 0, value, 0).map_err(|failure| anyhow!("set: {failure:?}"))?;
        ensure!(matches!(stored, request::Outcome::Done(_)), "set: {stored:?}");
        Ok(())
    }

    fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// As the example has it, for memcached's clients.
struct PlainRecord {
    expires: AtomicU64,
    cas: u64,
    used: AtomicU32,
    data: Box<[u8]>,
}

#[derive(Default)]
struct PlainContents {
    map: HashMap<Arc<[u8]>, Arc<PlainRecord>>,
    /// Keys in the order in which they came; the hand is at the front.
    keys: VecDeque<Arc<[u8]>>,
}

/// As threads could share it.
struct PlainCache {
    contents: Mutex<PlainContents>,
    limits: Limits,
    times: Times,
    used: AtomicI64,
    counts: Counts,
}

impl PlainCache {
    fn new(limits: Limits, clock: impl Fn() -> u64 + Send + Sync + 'static) -> PlainCache {
        let (contents, used, counts) = Default::default();
        PlainCache { contents, limits, times: Times::new(clock), used, counts }
    }

    fn contents(&self) -> MutexGuard<'_, PlainContents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_gone(&self, record: &PlainRecord, now: u64) -> bool {
        self.times.is_gone(record.cas, record.expires.load(Ordering::Relaxed), now)
    }

    fn has_room(&self, more: i64) -> bool {
        self.used.load(Ordering::Relaxed) + more <= self.limits.capacity as i64
    }

    /// Puts a value in, if there is room.
    fn put(&self, key: &[u8], data: &[u8]) -> bool {
        let size = |data: usize| (key.len() + data) as i64 + ENTRY_BYTES;
        let (expires, used) = Default::default();
        let new = PlainRecord { expires, cas: self.times.next_version(), used, data: data.into() };
        let mut contents = self.contents();
        let PlainContents { map, keys } = &mut *contents;
        let stored = map.get_mut(key);
        let before = stored.as_ref().map_or(0, |stored| size(stored.data.len()));
        let more = size(data.len()) - before;
        if more > 0 && !self.has_room(more) {
            return false;
        }
        match stored {
            Some(stored) => *stored = Arc::new(new),
            None => {
                let key: Arc<[u8]> = key.into();
                keys.push_back(key.clone());
                map.insert(key, Arc::new(new));
            }
        }
        self.used.fetch_add(more, Ordering::Relaxed);
        true
    }

    /// Makes so much room.
    fn evict(&self, need: i64) {
        let mut contents = self.contents();
        let PlainContents { map, keys } = &mut *contents;
        let goal = self.used.load(Ordering::Relaxed) - need;
        let is_enough = || self.has_room(need) && self.used.load(Ordering::Relaxed) <= goal.max(0);
        let mut turns = 2 * keys.len() + 1;
        while !is_enough() && turns > 0 {
            turns -= 1;
            let Some(key) = keys.pop_front() else { return };
            let Some(record) = map.get(&key) else { continue };
            if !self.is_gone(record, self.times.now()) && record.used.swap(0, Ordering::Relaxed) != 0 {
                keys.push_back(key);
                continue;
            }
            self.used.fetch_sub((key.len() + record.data.len()) as i64 + ENTRY_BYTES, Ordering::Relaxed);
            map.remove(&key);
            count(&self.counts.evictions);
        }
    }
}

impl Store for PlainCache {
    fn get(&self, key: &Key, see: &mut dyn FnMut(&[u8])) -> Result<bool> {
        count(&self.counts.gets);
        let now = self.times.now();
        let record = self.contents().map.get(&key[..]).cloned();
        let Some(record) = record.filter(|record| !self.is_gone(record, now)) else { return Ok(false) };
        if record.used.load(Ordering::Relaxed) == 0 {
            record.used.store(1, Ordering::Relaxed);
        }
        count(&self.counts.hits);
        see(&record.data);
        Ok(true)
    }

    fn set(&self, key: &Key, value: &[u8]) -> Result<()> {
        count(&self.counts.sets);
        let need = (key.len() + value.len()) as i64 + ENTRY_BYTES;
        let mut is_stored = self.put(key, value);
        for _ in 0..8 {
            if is_stored {
                break;
            }
            self.evict(need);
            is_stored = self.put(key, value);
        }
        ensure!(is_stored, "set: there is no room");
        Ok(())
    }

    fn counts(&self) -> &Counts {
        &self.counts
    }
}
