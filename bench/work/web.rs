//! A web front end (AIFM, Figure 6): a request looks up 32 keys in a hash map, adds what it finds up to the number of an element of
//! 8 KiB in an array, encrypts that with AES-CBC and packs it with Snappy. Requests are chosen by Zipf's law. With `rate_per_s` they
//! arrive in an open loop ([`latency`]).
//!
//! The map has 10 parts of 26 of the data, the array the rest. With `--offload own`, elements are encrypted and packed where the array is
//! (Atlas, Figure 8).

use crate::entry::{Key, key, value, word};
use crate::random::{Random, mix};
use crate::zipf::Zipf;
use crate::{OffloadName, Options, Outcome, course, figures_since, latency};
use anyhow::{Context, Result, ensure};
use farfield::collections::{FarVec, Index};
use farfield::{FarError, FarMap, FarRange, Heap, Scope, Where};
use farfield_bench::press::{ELEMENT_BYTES, Element, Press, PressElement};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

const LOOKUPS: u64 = 32;
/// Of a value; an entry is 64 bytes.
const VALUE: usize = 52;
const ENTRY_BYTES: u64 = 64;
/// Of an entry in the map's index, which is far if it would take more than three quarters of what may be near.
const INDEX_BYTES: u64 = 20;
/// One of so many requests more is served after the timed ones, to see what missed.
const COUNTED_PART: u64 = 10;

type Value = [u8; VALUE];

/// How much there is of everything.
#[derive(Clone, Copy)]
struct Sizes {
    requests: u64,
    entries: u64,
    elements: u64,
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let map_bytes = options.data_bytes() * 10 / 26;
    let requests = map_bytes / ENTRY_BYTES / LOOKUPS;
    let sizes = Sizes {
        requests,
        entries: requests * LOOKUPS,
        elements: (options.data_bytes() - map_bytes) / ELEMENT_BYTES as u64,
    };
    ensure!(requests > 0 && sizes.elements > 0, "--data-mib is too small for one request");
    let zipf = Zipf::new(sizes.requests, options.zipf_percent as f64 / 100.0);
    match options.heap(0)? {
        None => near(options, sizes, &zipf),
        Some(heap) => course::followed(options, &heap, || far(options, sizes, &zipf, &heap)),
    }
}

fn element(index: u64, seed: u64) -> Element {
    let mut element = [0; ELEMENT_BYTES];
    for (at, part) in element.chunks_exact_mut(8).enumerate() {
        part.copy_from_slice(&mix(index * 1024 + at as u64 / 4 + seed).to_le_bytes());
    }
    element
}

/// Who asks, and the sum of what was answered.
struct Requests<'z> {
    all: u64,
    zipf: &'z Zipf,
    random: Random,
    press: Press,
    sum: u64,
}

impl Requests<'_> {
    fn new(zipf: &Zipf, seed: u64, all: u64) -> Requests<'_> {
        Requests { all, zipf, random: Random::new(seed), press: Press::default(), sum: 0 }
    }

    /// The next one, by `serve`, which looks up its keys and presses its element.
    fn one(&mut self, serve: &impl Fn(&mut Press, u64) -> Result<u64>) -> Result<()> {
        let request = mix(self.zipf.sample(&mut self.random)) % self.all;
        self.sum = self.sum.wrapping_add(serve(&mut self.press, request)?);
        Ok(())
    }
}

/// Serves as many requests as are timed, so that near memory holds what it will, then those. The sum of the latter's answers.
fn requests(
    outcome: &mut Outcome,
    options: &Options,
    zipf: &Zipf,
    all: u64,
    heap: Option<&Heap>,
    serve: impl Fn(&mut Press, u64) -> Result<u64> + Sync,
) -> Result<u64> {
    in_threads(options, zipf, all, &serve)?;
    let before = heap.map(Heap::stats);
    let sum = if options.threads == 1 {
        let mut requests = Requests::new(zipf, options.seed, all);
        latency::timed(outcome, options, || requests.one(&serve))?;
        requests.sum
    } else {
        ensure!(options.rate_per_s == 0, "requests that arrive by a law are served by one thread");
        outcome.phase("request", options.ops, || in_threads(options, zipf, all, &serve))?
    };
    if let (Some(heap), Some(before)) = (heap, before) {
        figures_since(outcome, &before, &heap.stats(), options.ops, 0);
    }
    Ok(sum)
}

/// Serves the requests in threads, each of which has some of its own. The sum of the answers.
fn in_threads(
    options: &Options,
    zipf: &Zipf,
    all: u64,
    serve: &(impl Fn(&mut Press, u64) -> Result<u64> + Sync),
) -> Result<u64> {
    let work = |thread| {
        let mut requests = Requests::new(zipf, options.seed + thread, all);
        (0..options.ops / options.threads).try_for_each(|_| requests.one(serve))?;
        anyhow::Ok(requests.sum)
    };
    if options.threads == 1 {
        return work(0);
    }
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads).map(|thread| scope.spawn(move || work(thread))).collect();
        threads
            .into_iter()
            .try_fold(0u64, |sum, thread| Ok(sum.wrapping_add(thread.join().expect("no request panics")?)))
    })
}

/// The entries that a request looks up, by number.
fn numbers(request: u64) -> Range<u64> {
    request * LOOKUPS..(request + 1) * LOOKUPS
}

fn near(options: &Options, sizes: Sizes, zipf: &Zipf) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut map: HashMap<Key, Value> = HashMap::with_capacity(sizes.entries as usize);
    let mut array: Vec<Element> = Vec::with_capacity(sizes.elements as usize);
    outcome.phase("fill", sizes.entries, || {
        map.extend((0..sizes.entries).map(|number| (key(number, options.seed), value(number))));
        array.extend((0..sizes.elements).map(|index| element(index, options.seed)));
    });
    let errors = AtomicU64::new(0);
    let serve = |press: &mut Press, request| {
        let mut at = 0u64;
        for number in numbers(request) {
            let found = map.get(&key(number, options.seed));
            errors.fetch_add(u64::from(found != Some(&value(number))), Ordering::Relaxed);
            at = at.wrapping_add(found.map_or(0, word));
        }
        Ok(press.press(&array[(at % sizes.elements) as usize]))
    };
    let sum = requests(&mut outcome, options, zipf, sizes.requests, None, serve)?;
    outcome.checked(sum, errors.into_inner());
    Ok(outcome)
}

fn far(options: &Options, sizes: Sizes, zipf: &Zipf, heap: &Heap) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let is_large = sizes.entries * INDEX_BYTES > heap.stats().near_limit_bytes / 4 * 3;
    let index = if is_large { Index::Far } else { Index::Near };
    let map: FarMap<Key, Value> = FarMap::builder().capacity(sizes.entries).index(index).build(heap)?;
    let mut array: FarVec<Element> = FarVec::new();
    outcome.phase("fill", sizes.entries, || -> Result<()> {
        for number in 0..sizes.entries {
            let scope = heap.enter();
            map.insert(&scope, key(number, options.seed), value::<VALUE>(number)).map_err(FarError::from)?;
        }
        for index in 0..sizes.elements {
            let scope = heap.enter();
            array.push(&scope, element(index, options.seed)).map_err(FarError::from)?;
        }
        if options.offload == OffloadName::Own {
            // A call names the pages that the server must not read. Nothing changes from now on, so there are none.
            heap.write_back([FarRange { start: 0, len: u64::MAX }])?;
        }
        Ok(())
    })?;
    let errors = AtomicU64::new(0);
    let look_up = |scope: &Scope<'_>, request| -> Result<usize> {
        let mut at = 0u64;
        let keys: Vec<Key> = numbers(request).map(|number| key(number, options.seed)).collect();
        let found = map.get_many(scope, &keys)?;
        for (number, found) in numbers(request).zip(found) {
            errors.fetch_add(u64::from(found != Some(&value(number))), Ordering::Relaxed);
            at = at.wrapping_add(found.map_or(0, word));
        }
        Ok((at % sizes.elements) as usize)
    };
    let press_at = |scope: Scope<'_>, press: &mut Press, at| {
        if options.offload == OffloadName::Own {
            // While the answer is waited for, nothing is kept near.
            drop(scope);
            let pressed = heap.call::<PressElement>(&array, at as u64).at(Where::Server).run()?;
            return pressed.context("below the length");
        }
        let found = if options.once == 1 { array.get_once(&scope, at)? } else { array.get(&scope, at)? };
        Ok(press.press(found.context("below the length")?))
    };
    let sum = requests(&mut outcome, options, zipf, sizes.requests, Some(heap), |press, request| {
        let scope = heap.enter();
        let at = look_up(&scope, request)?;
        press_at(scope, press, at)
    })?;
    // Looking at counters takes time, so who missed is seen in requests that are not timed (Figure 6c).
    let counted = options.ops.div_ceil(COUNTED_PART);
    let mut more = Requests::new(zipf, options.seed, sizes.requests);
    let misses = [const { AtomicU64::new(0) }; 2];
    for _ in 0..counted {
        more.one(&|press: &mut Press, request| {
            let scope = heap.enter();
            let before = heap.stats().misses;
            let at = look_up(&scope, request)?;
            let between = heap.stats().misses;
            let answer = press_at(scope, press, at)?;
            misses[0].fetch_add(between - before, Ordering::Relaxed);
            misses[1].fetch_add(heap.stats().misses - between, Ordering::Relaxed);
            Ok(answer)
        })?;
    }
    let [map_misses, array_misses] = misses.map(|misses| misses.into_inner() as f64 / counted as f64);
    outcome.figure("map_misses_per_op", map_misses);
    outcome.figure("array_misses_per_op", array_misses);
    outcome.figure("index_bytes", map.index_bytes() as f64);
    outcome.checked(sum, errors.into_inner());
    Ok(outcome)
}
