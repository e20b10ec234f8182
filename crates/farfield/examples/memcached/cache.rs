//! The cache: records in a [`FarMap`], bounded, with times to live and versions.

use super::counts::{Counts, count};
use super::request::{Outcome, Verb};
use super::times::Times;
use farfield::collections::Index;
use farfield::{BuildError, Change, FarError, FarMap, Heap, PoolError};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

/// A value with what is known of it. In the map: times, version and flags, then the data.
pub(crate) struct Record<'a> {
    /// When it is gone, in seconds since 1970; 0 for never.
    expires: u64,
    pub(crate) cas: u64,
    pub(crate) flags: u32,
    pub(crate) data: &'a [u8],
}

const HEAD_BYTES: usize = 20;
/// What an entry costs beside its bytes, about: the index and what is lost in its size class.
const ENTRY_BYTES: i64 = 64;
/// Keys of one request that are looked up together.
const TOGETHER: usize = 64;

impl<'a> Record<'a> {
    fn read(bytes: &'a [u8]) -> Record<'a> {
        let (head, data) = bytes.split_at(HEAD_BYTES);
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|byte| head[at + byte]));
        let flags = u32::from_le_bytes(core::array::from_fn(|byte| head[16 + byte]));
        Record { expires: word(0), cas: word(8), flags, data }
    }

    fn bytes(&self, before: &[u8], behind: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + before.len() + self.data.len() + behind.len());
        bytes.extend(self.expires.to_le_bytes());
        bytes.extend(self.cas.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend([before, self.data, behind].concat());
        bytes
    }
}

/// Why it cannot be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failure {
    /// The capacity is used up, and nothing may be evicted; or the heap's is.
    Full,
    Far(FarError),
}

impl From<FarError> for Failure {
    fn from(error: FarError) -> Failure {
        match error {
            FarError::FarFull | FarError::TablesFull { .. } | FarError::TooLarge { .. } => Failure::Full,
            FarError::Pool(PoolError::PoolFull { .. }) => Failure::Full,
            other => Failure::Far(other),
        }
    }
}

/// What a cache is made with.
pub(crate) struct Limits {
    /// Bytes of keys and values, and what goes with them.
    pub(crate) capacity: u64,
    /// The largest value.
    pub(crate) value_max: usize,
    /// Where the map's index is.
    pub(crate) index: Index,
    /// Without room: evict, or refuse.
    pub(crate) evict: bool,
}

/// Keys and records of many clients.
pub(crate) struct Cache {
    pub(crate) heap: Heap,
    map: FarMap<[u8], [u8]>,
    pub(crate) limits: Limits,
    times: Times,
    used: AtomicI64,
    /// Keys of some entries, to be evicted next.
    victims: Mutex<Vec<Vec<u8>>>,
    pub(crate) counts: Counts,
}

impl Cache {
    pub(crate) fn new(
        heap: Heap,
        limits: Limits,
        clock: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<Cache, BuildError> {
        let map = FarMap::builder().index(limits.index).build(&heap)?;
        Ok(Cache {
            heap,
            map,
            limits,
            times: Times::new(clock),
            used: AtomicI64::new(0),
            victims: Mutex::default(),
            counts: Counts::default(),
        })
    }

    fn alive<'a>(&self, bytes: Option<&'a [u8]>, now: u64) -> Option<Record<'a>> {
        let record = Record::read(bytes?);
        (!self.times.is_gone(record.cas, record.expires, now)).then_some(record)
    }

    /// Looks at a record.
    pub(crate) fn get(&self, key: &[u8], mut see: impl FnMut(Record<'_>)) -> Result<bool, Failure> {
        count(&self.counts.gets);
        let now = self.times.now();
        let scope = self.heap.enter();
        let record = self.alive(self.map.get(&scope, key)?, now);
        let found = record.is_some();
        if let Some(record) = record {
            count(&self.counts.hits);
            see(record);
        }
        Ok(found)
    }

    /// Looks at several records: values that are far come near together.
    pub(crate) fn get_many(&self, keys: &[&[u8]], mut see: impl FnMut(&[u8], Record<'_>)) -> Result<(), Failure> {
        for keys in keys.chunks(TOGETHER) {
            let now = self.times.now();
            let scope = self.heap.enter();
            let found = match self.map.get_many(&scope, keys.iter().copied()) {
                // They cannot all be near at the same time.
                Err(FarError::NearFull) => {
                    drop(scope);
                    for key in keys {
                        self.get(key, |record| see(key, record))?;
                    }
                    continue;
                }
                found => found?,
            };
            for (key, bytes) in keys.iter().zip(found) {
                count(&self.counts.gets);
                if let Some(record) = self.alive(bytes, now) {
                    count(&self.counts.hits);
                    see(key, record);
                }
            }
        }
        Ok(())
    }

    /// Changes a record as one step. `change` gets the record that is there and the next version.
    fn change(
        &self,
        key: &[u8],
        cas: u64,
        mut change: impl FnMut(Option<Record<'_>>, u64) -> (Change<Vec<u8>>, Outcome),
    ) -> Result<Outcome, Failure> {
        let now = self.times.now();
        let version = self.times.next_version();
        let mut done = (Outcome::NotStored, 0);
        let size = |bytes: usize| (key.len() + bytes) as i64 + ENTRY_BYTES;
        let scope = self.heap.enter();
        let updated = self.map.update(&scope, key, |bytes| {
            let record = self.alive(bytes, now);
            let (mut next, mut outcome) = match &record {
                None if cas != 0 => (Change::Keep, Outcome::NotFound),
                Some(record) if cas != 0 && cas != record.cas => (Change::Keep, Outcome::Exists),
                _ => change(record, version),
            };
            let before = bytes.map_or(0, |bytes| size(bytes.len()));
            let after = match &next {
                Change::Keep => before,
                Change::Put(bytes) => size(bytes.len()),
                Change::Remove => 0,
            };
            if after > before && !self.has_room(after - before) {
                (next, outcome) = (Change::Keep, Outcome::NotStored);
                done = (outcome, i64::MAX);
                return next;
            }
            done = (outcome, after - before);
            next
        });
        updated.map_err(FarError::from)?;
        match done {
            (_, i64::MAX) => Err(Failure::Full),
            (outcome, grown) => {
                self.used.fetch_add(grown, Ordering::Relaxed);
                Ok(outcome)
            }
        }
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
        let put = || {
            self.change(key, cas, |old, cas| {
                let new = Record { expires, cas, flags, data };
                let bytes = match (verb, &old) {
                    (Verb::Set, _) | (Verb::Add, None) | (Verb::Replace, Some(_)) => new.bytes(b"", b""),
                    (Verb::Append, Some(old)) => Record { cas, ..*old }.bytes(b"", data),
                    (Verb::Prepend, Some(old)) => Record { cas, ..*old }.bytes(data, b""),
                    _ => return (Change::Keep, Outcome::NotStored),
                };
                if bytes.len() - HEAD_BYTES > self.limits.value_max {
                    return (Change::Keep, Outcome::NotStored);
                }
                (Change::Put(bytes), Outcome::Done(cas))
            })
        };
        let need = key.len() + data.len() + HEAD_BYTES + ENTRY_BYTES as usize;
        let mut result = put();
        // Others may take the room that an eviction made.
        for _ in 0..8 {
            if result != Err(Failure::Full) || !self.limits.evict || need as u64 > self.limits.capacity {
                break;
            }
            self.evict(need as i64)?;
            result = put();
        }
        result
    }

    /// Makes so much room: first what is gone already, then what comes next in the order of hashes, which is no order at all.
    fn evict(&self, need: i64) -> Result<(), Failure> {
        let mut victims = self.victims.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut rounds = 0;
        while !self.has_room(need) && rounds < 2 {
            if victims.is_empty() {
                rounds += 1;
                self.find_victims(&mut victims, rounds == 1)?;
            }
            while !self.has_room(need) {
                let Some(victim) = victims.pop() else { break };
                count(&self.counts.evictions);
                self.change(&victim, 0, |_, _| (Change::Remove, Outcome::Done(0)))?;
            }
        }
        Ok(())
    }

    /// Some keys, from anywhere in the map or from its beginning.
    fn find_victims(&self, victims: &mut Vec<Vec<u8>>, anywhere: bool) -> Result<(), Failure> {
        let now = self.times.now();
        let random = self.times.last_version().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let mut walk = self.map.walk_from(if anywhere { random as u32 } else { 0 });
        let mut scope = self.heap.enter();
        while victims.len() < 256
            && let Some(entries) = walk.next(&scope)?
        {
            let (mut gone, mut others) = (Vec::new(), Vec::new());
            for (key, value) in entries {
                let list = if self.alive(Some(value), now).is_none() { &mut gone } else { &mut others };
                list.push(key.to_vec());
            }
            // The last ones are taken first.
            victims.extend(others);
            victims.extend(gone);
            scope.renew();
        }
        Ok(())
    }

    pub(crate) fn delete(&self, key: &[u8], cas: u64) -> Result<Outcome, Failure> {
        self.change(key, cas, |old, _| match old {
            Some(_) => (Change::Remove, Outcome::Done(0)),
            None => (Change::Remove, Outcome::NotFound),
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
        self.change(key, cas, |old, cas| {
            let Some(old) = old else {
                let Some((first, expires)) = initial else { return (Change::Keep, Outcome::NotFound) };
                let text = first.to_string();
                let expires = self.times.deadline(expires).unwrap_or(1);
                let new = Record { expires, cas, flags: 0, data: text.as_bytes() };
                return (Change::Put(new.bytes(b"", b"")), Outcome::Number(first, cas));
            };
            let Some(number) = super::text::number::<u64>(old.data.trim_ascii_end()) else {
                return (Change::Keep, Outcome::NotNumber);
            };
            let number = if up { number.wrapping_add(delta) } else { number.saturating_sub(delta) };
            let text = number.to_string();
            let new = Record { cas, data: text.as_bytes(), ..old };
            (Change::Put(new.bytes(b"", b"")), Outcome::Number(number, cas))
        })
    }

    pub(crate) fn touch(&self, key: &[u8], expires: i64) -> Result<Outcome, Failure> {
        let expires = self.times.deadline(expires).unwrap_or(1);
        self.change(key, 0, |old, _| match old {
            // A new time to live is no new version.
            Some(old) => (Change::Put(Record { expires, ..old }.bytes(b"", b"")), Outcome::Done(old.cas)),
            None => (Change::Keep, Outcome::NotFound),
        })
    }

    /// Everything that is there is gone, now or after a delay.
    pub(crate) fn flush(&self, delay: i64) {
        self.times.flush(delay);
    }

    /// Names and values.
    pub(crate) fn stats(&self) -> Vec<(&'static str, u64)> {
        let heap = self.heap.stats();
        let mut stats = self.counts.stats(self.times.now());
        stats.extend([
            ("curr_items", self.map.len()),
            ("bytes", self.used.load(Ordering::Relaxed).max(0) as u64),
            ("limit_maxbytes", self.limits.capacity),
            ("near_bytes", heap.near_bytes),
            ("near_limit_bytes", heap.near_limit_bytes),
            ("index_bytes", self.map.index_bytes()),
            ("far_misses", heap.misses),
        ]);
        stats
    }
}
