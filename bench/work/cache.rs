//! A key-value cache in the program (Atlas, Figure 4: Memcached under CacheLib's trace, and under YCSB's uniform one): 87.4 % of the
//! requests get a value, the others replace one by another. Every request is a scope of its own.
//!
//! Sizes of values are those of CacheLib's `kvcache_reg`. *Skewed*: keys by Zipf's law with churn, every new key is the most popular one
//! for a moment and then falls behind those that come after it; with `real = 1` those of a disk's blocks ([`real`]). *Uniform*: all keys alike. With `rate_per_s` requests arrive in an open
//! loop ([`latency`]).

use crate::entry::{Key, key};
use crate::random::{Random, mix};
use crate::real::{self, Numbers};
use crate::zipf::Zipf;
use crate::{Options, Outcome, course, figures_since, latency};
use anyhow::{Context, Result};
use farfield::collections::Index;
use farfield::{FarError, FarMap, Heap};
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;

/// How keys are chosen.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Trace {
    Skewed,
    Uniform,
}

/// YCSB's.
const EXPONENT: f64 = 0.99;
/// Requests until another key is the most popular one.
const CHURN: u64 = 64;
const SETS_PER_MILLE: u64 = 126;
/// Of the plain program: key, value, and what finds them.
const BYTES_PER_ENTRY: u64 = 240;
/// Bytes of values, and how many of a hundred have so many at most. Rarer, larger ones are left out.
const SIZES: [(u64, u64); 7] = [(95, 13), (127, 24), (159, 49), (223, 6), (511, 4), (1023, 3), (2047, 1)];

pub(crate) fn run(options: &Options, trace: Trace) -> Result<Outcome> {
    with_store(options, |store, heap| {
        let mut outcome = Outcome::new();
        let mut requests = Requests::new(options, trace)?;
        outcome.phase("fill", requests.entries, || requests.fill(store))?;
        requests.serve(store, options.ops)?;
        let before = heap.map(Heap::stats);
        latency::timed(&mut outcome, options, || requests.one(store))?;
        if let (Some(heap), Some(before)) = (heap, before) {
            figures_since(&mut outcome, &before, &heap.stats(), options.ops, 0);
        }
        outcome.checked(requests.sum, requests.errors);
        Ok(outcome)
    })
}

/// Does `work` with a cache, and with the heap in which it is.
fn with_store(
    options: &Options,
    work: impl FnOnce(&mut dyn Store, Option<&Heap>) -> Result<Outcome>,
) -> Result<Outcome> {
    let entries = options.data_bytes() / BYTES_PER_ENTRY;
    match options.heap(0)? {
        None => work(&mut Near(HashMap::with_capacity(entries as usize)), None),
        Some(heap) => {
            let map = FarMap::builder().capacity(entries).index(Index::Far).build(&heap)?;
            course::followed(options, &heap, || work(&mut Far { heap: &heap, map }, Some(&heap)))
        }
    }
}

/// Who keeps the values.
trait Store {
    /// Shows the value of a key.
    fn get(&self, key: &Key, see: &mut dyn FnMut(&[u8])) -> Result<()>;
    fn set(&mut self, key: Key, value: &[u8]) -> Result<()>;
}

struct Near(HashMap<Key, Box<[u8]>>);

impl Store for Near {
    fn get(&self, key: &Key, see: &mut dyn FnMut(&[u8])) -> Result<()> {
        see(self.0.get(key).context("a key is missing")?);
        Ok(())
    }

    fn set(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.0.insert(key, value.into());
        Ok(())
    }
}

struct Far<'a> {
    heap: &'a Heap,
    map: FarMap<Key, [u8]>,
}

impl Store for Far<'_> {
    fn get(&self, key: &Key, see: &mut dyn FnMut(&[u8])) -> Result<()> {
        let scope = self.heap.enter();
        see(self.map.get(&scope, key)?.context("a key is missing")?);
        Ok(())
    }

    fn set(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let scope = self.heap.enter();
        self.map.insert(&scope, key, value).map_err(FarError::from)?;
        Ok(())
    }
}

/// Whose key comes next.
enum Keys {
    Alike,
    Skewed(Zipf),
    Real(Numbers<BufReader<File>, 4>),
}

/// What is asked for, and what has been found.
struct Requests {
    entries: u64,
    sum: u64,
    errors: u64,
    keys: Keys,
    random: Random,
    seed: u64,
    made: u64,
    /// A value to be stored.
    value: Vec<u8>,
}

impl Requests {
    fn new(options: &Options, trace: Trace) -> Result<Requests> {
        let entries = options.data_bytes() / BYTES_PER_ENTRY;
        let keys = match trace {
            Trace::Uniform => Keys::Alike,
            Trace::Skewed if options.real == 1 => {
                Keys::Real(Numbers::new(real::open(real::REQUESTS)?, |bytes| u32::from_le_bytes(bytes).into()))
            }
            Trace::Skewed => Keys::Skewed(Zipf::new(entries, EXPONENT)),
        };
        Ok(Requests {
            entries,
            sum: 0,
            errors: 0,
            keys,
            random: Random::new(options.seed),
            seed: options.seed,
            made: 0,
            value: Vec::new(),
        })
    }

    fn fill(&mut self, store: &mut dyn Store) -> Result<()> {
        (0..self.entries).try_for_each(|number| self.set(store, number, 0))
    }

    fn serve(&mut self, store: &mut dyn Store, count: u64) -> Result<()> {
        (0..count).try_for_each(|_| self.one(store))
    }

    /// Makes the next request.
    fn one(&mut self, store: &mut dyn Store) -> Result<()> {
        self.made += 1;
        let number = self.number()?;
        if self.random.below(1000) < SETS_PER_MILLE {
            return self.set(store, number, self.made as u32);
        }
        let (mut sum, mut errors) = (0, 0);
        store.get(&key(number, self.seed), &mut |value| match version(number, value) {
            Some(version) => sum = u64::from(version),
            None => errors = 1,
        })?;
        self.sum = self.sum.wrapping_add(sum).rotate_left(1);
        self.errors += errors;
        Ok(())
    }

    /// Whose key comes next.
    fn number(&mut self) -> Result<u64> {
        Ok(match &mut self.keys {
            Keys::Alike => self.random.below(self.entries),
            // Who is at the top now will be one place further down when the next one is there.
            Keys::Skewed(zipf) => {
                let newest = self.made / CHURN;
                mix(newest.wrapping_sub(zipf.sample(&mut self.random))) % self.entries
            }
            Keys::Real(numbers) => mix(numbers.next()?) % self.entries,
        })
    }

    fn set(&mut self, store: &mut dyn Store, number: u64, version: u32) -> Result<()> {
        self.value.clear();
        self.value.extend(version.to_le_bytes());
        self.value.extend((mix(number ^ u64::from(version)) as u32).to_le_bytes());
        self.value.resize(size(number), number as u8);
        store.set(key(number, self.seed), &self.value)
    }
}

/// Bytes of the value of a key.
fn size(number: u64) -> usize {
    let random = mix(number ^ 0x51_2E);
    let (mut left, mut least) = (random % 100, 64);
    for (most, share) in SIZES {
        if left < share {
            return (least + (random >> 32) % (most + 1 - least)) as usize;
        }
        (left, least) = (left - share, most + 1);
    }
    unreachable!("shares add up to a hundred")
}

/// The version of a value, if it is one of this key.
fn version(number: u64, value: &[u8]) -> Option<u32> {
    let (version, rest) = value.split_first_chunk::<4>()?;
    let (check, rest) = rest.split_first_chunk::<4>()?;
    let version = u32::from_le_bytes(*version);
    let is_right = u32::from_le_bytes(*check) == mix(number ^ u64::from(version)) as u32
        && value.len() == size(number)
        && rest.last() == Some(&(number as u8));
    is_right.then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_trace() {
        assert_eq!(SIZES.iter().map(|(_, share)| share).sum::<u64>(), 100);
        let count = |most: usize| (0..100_000).filter(|number| size(*number) <= most).count();
        assert!((12_500..13_500).contains(&count(95)), "{}", count(95));
        assert!((85_500..86_500).contains(&count(159)), "{}", count(159));
        assert_eq!(count(2047), 100_000);
        assert_eq!(count(63), 0);
    }

    #[test]
    fn values_of_others_are_wrong() {
        let mut store = Near(HashMap::new());
        let options = <Options as clap::Parser>::parse_from(["work", "cache", "--data-mib", "1"]);
        let mut requests = Requests::new(&options, Trace::Uniform).unwrap();
        requests.fill(&mut store).unwrap();
        let value = |number: u64| store.0[&key(number, options.seed)].clone();
        assert_eq!(version(7, &value(7)), Some(0));
        assert_eq!(version(7, &value(8)), None);
        let mut torn = value(7);
        *torn.last_mut().unwrap() ^= 1;
        assert_eq!(version(7, &torn), None);
    }

    #[test]
    fn the_popular_keys_change() {
        let options = <Options as clap::Parser>::parse_from(["work", "cache", "--data-mib", "16"]);
        let mut requests = Requests::new(&options, Trace::Skewed).unwrap();
        let mut most_popular = |from: u64| {
            let mut seen = HashMap::<u64, u64>::new();
            for made in from..from + CHURN {
                requests.made = made;
                (0..100).for_each(|_| *seen.entry(requests.number().unwrap()).or_default() += 1);
            }
            seen.into_iter().max_by_key(|(_, count)| *count).unwrap().0
        };
        assert_eq!(most_popular(0), most_popular(0));
        assert_ne!(most_popular(0), most_popular(100 * CHURN));
    }
}
