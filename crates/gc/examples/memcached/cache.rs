//! The cache: records in a map of a collected heap, bounded, with times to live and versions.
//!
//! A record does not change, but for when it ends and whether it was used: a change puts another one in its place, and the
//! old one is garbage. A log has the keys in the order in which they came. Who needs room takes them from its beginning, and
//! appends those again that were used since: so what was used least recently is evicted (second chance).

use super::counts::{Counts, count};
use super::request::{Outcome, Verb};
use super::times::Times;
use farfield::{Heap, PoolError};
use farfield_gc::collections::{AppendLog, TrieMap};
use farfield_gc::{Atom, Bytes, FarObject, Gc, GcError, GcHeap, Mutator, Ref, Root};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

/// A value with what is known of it.
#[derive(Clone, Copy)]
pub(crate) struct Record<'a> {
    /// When it is gone, in seconds since 1970; 0 for never.
    expires: u64,
    pub(crate) cas: u64,
    pub(crate) flags: u32,
    pub(crate) data: &'a [u8],
}

/// A record in the heap.
#[derive(FarObject)]
struct Stored {
    expires: Atom<u64>,
    cas: u64,
    flags: u32,
    /// Is not 0 if it was looked at since the hand came by.
    used: Atom<u32>,
    data: Ref<Bytes>,
}

/// Everything that is in the heap.
#[derive(FarObject)]
struct Contents {
    map: TrieMap<Ref<Bytes>, Ref<Stored>>,
    keys: AppendLog<Bytes>,
}

/// What an entry costs beside its key and its data, about.
pub(crate) const ENTRY_BYTES: i64 = 84;
/// What nodes of the map and of the log take at most that a change makes beside the record.
const NODE_BYTES: usize = 4096;
/// Keys that the hand takes from the log before it trims it.
const TURNS: u64 = 64;

/// What becomes of a record.
enum Next {
    Keep,
    Put { expires: u64, flags: u32, data: Vec<u8> },
    Expire(u64),
    Remove,
}

/// Why it cannot be done now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Failure {
    /// The capacity is used up, and nothing may be evicted; or the heap's is.
    Full,
    Far(GcError),
}

impl From<GcError> for Failure {
    fn from(error: GcError) -> Failure {
        match error {
            GcError::HeapFull { .. } | GcError::SafepointDue | GcError::TooLarge { .. } | GcError::EntriesFull => {
                Failure::Full
            }
            GcError::Far(farfield::FarError::Pool(PoolError::PoolFull { .. })) => Failure::Full,
            other => Failure::Far(other),
        }
    }
}

/// What a cache is made with.
pub(crate) struct Limits {
    /// Bytes of keys and values, and what goes with them.
    pub(crate) capacity: u64,
    /// Bytes of far memory, garbage included. It lies there until it is collected.
    pub(crate) far: u64,
    /// The largest value.
    pub(crate) value_max: usize,
    /// Without room: evict, or refuse.
    pub(crate) evict: bool,
}

/// Keys and records of many clients.
pub(crate) struct Cache {
    pub(crate) heap: Heap,
    pub(crate) gc: GcHeap,
    contents: Root<Contents>,
    pub(crate) limits: Limits,
    times: Times,
    used: AtomicI64,
    /// Index in the log of the key that is looked at next.
    hand: Mutex<u64>,
    pub(crate) counts: Counts,
}

impl Cache {
    pub(crate) fn new(
        heap: Heap,
        limits: Limits,
        clock: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<Cache, Box<dyn std::error::Error>> {
        let gc = GcHeap::in_heap(&heap).limit(limits.far).build()?;
        let contents = gc.enter().with_room(|m| {
            let contents = m.alloc(Contents { map: TrieMap::new(), keys: AppendLog::new() })?;
            Ok(m.root(contents))
        })?;
        Ok(Cache {
            heap,
            gc,
            contents,
            limits,
            times: Times::new(clock),
            used: AtomicI64::new(0),
            hand: Mutex::new(0),
            counts: Counts::default(),
        })
    }

    fn is_gone(&self, stored: &Stored, now: u64) -> bool {
        self.times.is_gone(stored.cas, stored.expires.get(), now)
    }

    /// Looks at a record.
    pub(crate) fn get(&self, key: &[u8], mut see: impl FnMut(Record<'_>)) -> Result<bool, Failure> {
        self.get_with(&mut self.gc.enter(), key, &mut see)
    }

    fn get_with(&self, m: &mut Mutator<'_>, key: &[u8], see: &mut dyn FnMut(Record<'_>)) -> Result<bool, Failure> {
        count(&self.counts.gets);
        let now = self.times.now();
        let is_found = m.with_room(|m| {
            let stored = m.get(&self.contents)?.map.get(m, key)?;
            let Some(stored) = stored.filter(|stored| !self.is_gone(stored, now)) else { return Ok(false) };
            let data = stored.data.load(m)?;
            if stored.used.get() == 0 {
                stored.used.set(1);
            }
            let data = data.as_deref().unwrap_or_default();
            see(Record { expires: stored.expires.get(), cas: stored.cas, flags: stored.flags, data });
            Ok(true)
        })?;
        if is_found {
            count(&self.counts.hits);
        }
        Ok(is_found)
    }

    /// Looks at several records.
    pub(crate) fn get_many(&self, keys: &[&[u8]], mut see: impl FnMut(&[u8], Record<'_>)) -> Result<(), Failure> {
        let mut m = self.gc.enter();
        for key in keys {
            self.get_with(&mut m, key, &mut |record| see(key, record))?;
            m.safepoint()?;
        }
        Ok(())
    }

    /// Changes a record as one step. `change` gets the record that is there.
    fn change(
        &self,
        m: &mut Mutator<'_>,
        key: &[u8],
        cas: u64,
        change: impl Fn(Option<Record<'_>>, u64) -> (Next, Outcome),
    ) -> Result<Outcome, Failure> {
        let now = self.times.now();
        let version = self.times.next_version();
        let size = |data: usize| (key.len() + data) as i64 + ENTRY_BYTES;
        let mut is_full = false;
        let outcome = m.with_room(|m| {
            let contents = m.get(&self.contents)?;
            loop {
                let entry = contents.map.entry(m, key)?;
                let stored = entry.map_or(Ok(None), |entry| entry.value(m))?;
                let data = stored.map_or(Ok(None), |stored| stored.data.load(m))?;
                let record = stored.filter(|stored| !self.is_gone(stored, now)).map(|stored| {
                    let data = data.as_deref().unwrap_or_default();
                    Record { expires: stored.expires.get(), cas: stored.cas, flags: stored.flags, data }
                });
                let (next, outcome) = match record {
                    None if cas != 0 => (Next::Keep, Outcome::NotFound),
                    Some(record) if cas != 0 && cas != record.cas => (Next::Keep, Outcome::Exists),
                    record => change(record, version),
                };
                let before = data.map_or(0, |data| size(data.len()));
                let (new, after) = match next {
                    Next::Keep => return Ok(outcome),
                    Next::Expire(expires) => {
                        stored.iter().for_each(|stored| stored.expires.set(expires));
                        return Ok(outcome);
                    }
                    Next::Remove => (None, 0),
                    Next::Put { expires, flags, data } => {
                        let after = size(data.len());
                        if after > before && !self.has_room(after - before) {
                            is_full = true;
                            return Ok(Outcome::NotStored);
                        }
                        let stored = Stored {
                            expires: Atom::new(expires),
                            cas: version,
                            flags,
                            used: Atom::new(0),
                            data: Ref::null(),
                        };
                        let new = m.alloc(stored)?;
                        new.data.store(m, Some(m.alloc_copy(&data)?));
                        if entry.is_none() {
                            // A key that is in the log in vain is passed over.
                            contents.keys.push(m, m.alloc_copy(key)?)?;
                        }
                        (Some(new), after)
                    }
                };
                if contents.map.compare_exchange(m, key, entry, new)? {
                    self.used.fetch_add(after - before, Ordering::Relaxed);
                    return Ok(outcome);
                }
            }
        })?;
        if is_full { Err(Failure::Full) } else { Ok(outcome) }
    }

    fn has_room(&self, more: i64) -> bool {
        self.used.load(Ordering::Relaxed).saturating_add(more) <= self.limits.capacity as i64
    }

    /// Puts a value in.
    pub(crate) fn store(
        &self,
        verb: Verb,
        key: &[u8],
        flags: u32,
        expires: i64,
        data: &[u8],
        cas: u64,
    ) -> Result<Outcome, Failure> {
        count(&self.counts.sets);
        // What is dead on arrival is kept until somebody looks.
        let expires = self.times.deadline(expires).unwrap_or(1);
        let mut m = self.gc.enter();
        let put = |m: &mut Mutator<'_>| {
            // So that no attempt ends after the key was put into the log, and another one puts it there again.
            m.safepoint_for(key.len() + data.len() + NODE_BYTES)?;
            self.change(m, key, cas, |old, cas| {
                let (expires, flags, data) = match (verb, &old) {
                    (Verb::Set, _) | (Verb::Add, None) | (Verb::Replace, Some(_)) => (expires, flags, data.to_vec()),
                    (Verb::Append, Some(old)) => (old.expires, old.flags, [old.data, data].concat()),
                    (Verb::Prepend, Some(old)) => (old.expires, old.flags, [data, old.data].concat()),
                    _ => return (Next::Keep, Outcome::NotStored),
                };
                if data.len() > self.limits.value_max {
                    return (Next::Keep, Outcome::NotStored);
                }
                (Next::Put { expires, flags, data }, Outcome::Done(cas))
            })
        };
        let need = (key.len() + data.len()) as i64 + ENTRY_BYTES;
        let mut result = put(&mut m);
        // Others may take the room that an eviction made.
        for _ in 0..8 {
            if result != Err(Failure::Full) || !self.limits.evict || need as u64 > self.limits.capacity {
                break;
            }
            self.evict(&mut m, need)?;
            result = put(&mut m);
        }
        result
    }

    /// Makes so much room: what is gone already goes, and what was not used since the hand came by.
    fn evict(&self, m: &mut Mutator<'_>, need: i64) -> Result<(), Failure> {
        // Others may hold the lock while they wait for a collection.
        let mut hand = m.blocking(|| self.hand.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        let goal = self.used.load(Ordering::Relaxed) - need;
        let is_enough = || self.has_room(need) && self.used.load(Ordering::Relaxed) <= goal.max(0);
        // Twice around: after the first time nothing was used since.
        let mut turns = 2 * m.with_room(|m| Ok(m.get(&self.contents)?.keys.len()))?.saturating_sub(*hand) + 1;
        while !is_enough() && turns > 0 {
            let is_evicted = m.with_room(|m| {
                let contents = m.get(&self.contents)?;
                let Some(key) = contents.keys.get(m, *hand)? else { return Ok(false) };
                self.take_turn(m, contents, key)
            })?;
            if is_evicted {
                count(&self.counts.evictions);
            }
            *hand += 1;
            if hand.is_multiple_of(TURNS) {
                m.with_room(|m| m.get(&self.contents)?.keys.trim(m, *hand))?;
            }
            turns -= 1;
            m.safepoint()?;
        }
        Ok(())
    }

    /// Evicts the record of a key, or lets it wait for its next turn. Returns whether it was evicted.
    fn take_turn(&self, m: &Mutator<'_>, contents: Gc<'_, Contents>, key: Gc<'_, Bytes>) -> Result<bool, GcError> {
        loop {
            let Some(entry) = contents.map.entry(m, &key)? else { return Ok(false) };
            let Some(stored) = entry.value(m)? else { return Ok(false) };
            if !self.is_gone(&stored, self.times.now()) && stored.used.get() != 0 {
                contents.keys.push(m, key)?;
                // Not before, as an attempt that needs a safepoint is made again.
                stored.used.set(0);
                return Ok(false);
            }
            let bytes = stored.data.load(m)?.map_or(0, |data| data.len());
            if contents.map.compare_exchange(m, &key, Some(entry), None)? {
                self.used.fetch_sub((key.len() + bytes) as i64 + ENTRY_BYTES, Ordering::Relaxed);
                return Ok(true);
            }
        }
    }

    pub(crate) fn delete(&self, key: &[u8], cas: u64) -> Result<Outcome, Failure> {
        self.change(&mut self.gc.enter(), key, cas, |old, _| match old {
            Some(_) => (Next::Remove, Outcome::Done(0)),
            None => (Next::Remove, Outcome::NotFound),
        })
    }

    pub(crate) fn count(
        &self,
        key: &[u8],
        up: bool,
        delta: u64,
        initial: Option<(u64, i64)>,
        cas: u64,
    ) -> Result<Outcome, Failure> {
        self.change(&mut self.gc.enter(), key, cas, |old, cas| {
            let Some(old) = old else {
                let Some((first, expires)) = initial else { return (Next::Keep, Outcome::NotFound) };
                let expires = self.times.deadline(expires).unwrap_or(1);
                let data = first.to_string().into_bytes();
                return (Next::Put { expires, flags: 0, data }, Outcome::Number(first, cas));
            };
            let Some(number) = super::text::number::<u64>(old.data.trim_ascii_end()) else {
                return (Next::Keep, Outcome::NotNumber);
            };
            let number = if up { number.wrapping_add(delta) } else { number.saturating_sub(delta) };
            let data = number.to_string().into_bytes();
            (Next::Put { expires: old.expires, flags: old.flags, data }, Outcome::Number(number, cas))
        })
    }

    pub(crate) fn touch(&self, key: &[u8], expires: i64) -> Result<Outcome, Failure> {
        let expires = self.times.deadline(expires).unwrap_or(1);
        self.change(&mut self.gc.enter(), key, 0, |old, _| match old {
            // A new time to live is no new version.
            Some(old) => (Next::Expire(expires), Outcome::Done(old.cas)),
            None => (Next::Keep, Outcome::NotFound),
        })
    }

    /// Everything that is there is gone, now or after a delay.
    pub(crate) fn flush(&self, delay: i64) {
        self.times.flush(delay);
    }

    /// Names and values.
    pub(crate) fn stats(&self) -> Vec<(&'static str, u64)> {
        let (heap, gc) = (self.heap.stats(), self.gc.stats());
        let items = self.gc.enter().get(&self.contents).map_or(0, |contents| contents.map.len());
        let mut stats = self.counts.stats(self.times.now());
        stats.extend([
            ("curr_items", items),
            ("bytes", self.used.load(Ordering::Relaxed).max(0) as u64),
            ("limit_maxbytes", self.limits.capacity),
            ("near_bytes", heap.near_bytes),
            ("near_limit_bytes", heap.near_limit_bytes),
            ("far_misses", heap.misses),
            ("collections", gc.collections),
        ]);
        stats
    }
}

/// A cache of little near memory, for tests.
#[cfg(test)]
pub(crate) fn trial_cache(capacity: u64, evict: bool, clock: impl Fn() -> u64 + Send + Sync + 'static) -> Cache {
    let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
    Cache::new(heap, Limits { capacity, far: 2 * capacity + (8 << 20), value_max: 100_000, evict }, clock).unwrap()
}

#[cfg(test)]
mod tests {
    //! Danger: an eviction of what is used all the time.
    use super::*;

    #[test]
    fn a_record_that_is_used_stays_while_others_come_and_go() {
        let cache = trial_cache(400_000, true, || 1);
        let set = |key: &str| cache.store(Verb::Set, key.as_bytes(), 0, 0, &[7; 5000], 0).unwrap();
        let has = |key: &str| cache.get(key.as_bytes(), |record| assert_eq!(record.data, [7; 5000])).unwrap();
        ["hot", "warm", "cold"].iter().for_each(|key| assert!(matches!(set(key), Outcome::Done(_))));
        for number in 0..2000 {
            set(&format!("key {number}"));
            assert!(has("hot"), "after {number}");
            assert!(number % 20 != 0 || has("warm"), "after {number}");
        }
        assert!(!has("cold"));
        assert!(cache.stats().contains(&("bytes", cache.used.load(Ordering::Relaxed) as u64)));
        assert!(!cache.has_room(10_000), "it is filled");
    }
}
