//! Gets from a hash map, keys chosen by Zipf's law (AIFM, Figures 9 and 10).
//!
//! An entry is a key of 12 bytes and a value; both derive from the key's number. Std's map is behind a reference, as ours is.

use crate::entry::{Key, key, value, word};
use crate::random::{Random, mix};
use crate::zipf::Zipf;
use crate::{Options, Outcome, figures_since};
use anyhow::{Result, bail, ensure};
use farfield::{FarError, FarMap, Heap, Scope};
use std::collections::HashMap;

/// Gets in one scope: what is used inside a scope cannot leave.
const OPS_PER_SCOPE: u64 = 64;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    match options.object_bytes {
        16 => sized::<4>(options),
        64 => sized::<52>(options),
        512 => sized::<500>(options),
        other => bail!("--object-bytes of a map's entry must be 16, 64 or 512, not {other}"),
    }
}

fn sized<const VALUE: usize>(options: &Options) -> Result<Outcome> {
    ensure!(options.threads >= 1, "--threads must be at least 1");
    ensure!((1..=OPS_PER_SCOPE).contains(&options.at_once), "--at-once must be 1 to {OPS_PER_SCOPE}");
    let entries = options.data_bytes() / options.object_bytes;
    match options.heap(0)? {
        None => near::<VALUE>(options, entries),
        Some(heap) => far::<VALUE>(options, entries, &heap),
    }
}

/// Adds what was found to `sum`; is it wrong?
fn check<const VALUE: usize>(number: u64, found: Option<&[u8; VALUE]>, sum: &mut u64) -> bool {
    let Some(found) = found else { return true };
    *sum = sum.wrapping_add(word(found));
    word(found) != word(&value::<VALUE>(number)) || found[VALUE - 1] != value::<VALUE>(number)[VALUE - 1]
}

/// Runs `work` in every thread, with a choice of keys and a number of gets of its own; sums what they return.
fn in_threads(
    options: &Options,
    entries: u64,
    work: impl Fn(Keys<'_>, u64) -> Result<(u64, u64)> + Sync,
) -> Result<(u64, u64)> {
    let zipf = Zipf::new(entries, options.zipf_percent as f64 / 100.0);
    let each = options.ops / options.threads;
    std::thread::scope(|scope| {
        let start = |thread| {
            let keys = Keys { zipf: &zipf, random: Random::new(options.seed + thread), entries };
            scope.spawn(|| work(keys, each))
        };
        let threads: Vec<_> = (0..options.threads).map(start).collect();
        threads.into_iter().try_fold((0u64, 0), |(sum, errors), thread| {
            let (more, wrong) = thread.join().expect("no workload panics")?;
            Ok((sum.wrapping_add(more), errors + wrong))
        })
    })
}

/// Numbers of keys, the popular ones spread over all.
struct Keys<'a> {
    zipf: &'a Zipf,
    random: Random,
    entries: u64,
}

impl Keys<'_> {
    fn next(&mut self) -> u64 {
        mix(self.zipf.sample(&mut self.random)) % self.entries
    }
}

fn near<const VALUE: usize>(options: &Options, entries: u64) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut map: HashMap<Key, [u8; VALUE]> = HashMap::with_capacity(entries as usize);
    outcome.phase("fill", entries, || map.extend((0..entries).map(|n| (key(n, options.seed), value(n)))));
    let map = &map;
    let gets = |mut keys: Keys<'_>, ops| {
        let (mut sum, mut errors) = (0, 0);
        for _ in 0..ops {
            let number = keys.next();
            errors += u64::from(check(number, map.get(&key(number, options.seed)), &mut sum));
        }
        Ok((sum, errors))
    };
    warm(options, entries, &gets)?;
    let (sum, errors) = outcome.phase("get", options.ops, || in_threads(options, entries, gets))?;
    outcome.checked(sum, errors);
    Ok(outcome)
}

fn far<const VALUE: usize>(options: &Options, entries: u64, heap: &Heap) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let map: FarMap<Key, [u8; VALUE]> = FarMap::builder().capacity(entries).build(heap)?;
    outcome.phase("fill", entries, || -> Result<()> {
        for number in 0..entries {
            let scope = heap.enter();
            map.insert(&scope, key(number, options.seed), value::<VALUE>(number)).map_err(FarError::from)?;
        }
        Ok(())
    })?;
    let gets = |mut keys: Keys<'_>, ops: u64| {
        let (mut sum, mut errors) = (0, 0);
        let mut left = ops;
        while left > 0 {
            let scope: Scope<'_> = heap.enter();
            let mut here = left.min(OPS_PER_SCOPE);
            left -= here;
            while here > 0 && options.at_once == 1 {
                let number = keys.next();
                errors += u64::from(check(number, map.get(&scope, &key(number, options.seed))?, &mut sum));
                here -= 1;
            }
            while here > 0 {
                let some = here.min(options.at_once);
                here -= some;
                let some: Vec<_> =
                    (0..some).map(|_| keys.next()).map(|number| (number, key(number, options.seed))).collect();
                for ((number, _), found) in some.iter().zip(map.get_many(&scope, some.iter().map(|(_, key)| key))?) {
                    errors += u64::from(check(*number, found, &mut sum));
                }
            }
        }
        Ok((sum, errors))
    };
    warm(options, entries, &gets)?;
    let before = heap.stats();
    let (sum, errors) = outcome.phase("get", options.ops, || in_threads(options, entries, gets))?;
    outcome.figure("index_bytes", map.index_bytes() as f64);
    figures_since(&mut outcome, &before, &heap.stats(), options.ops, 0);
    outcome.checked(sum, errors);
    Ok(outcome)
}

/// As many gets as are timed afterwards, so that what is popular is near.
fn warm(options: &Options, entries: u64, gets: &(impl Fn(Keys<'_>, u64) -> Result<(u64, u64)> + Sync)) -> Result<()> {
    in_threads(options, entries, gets).map(drop)
}
