//! A web front end (AIFM, Figure 6): a request looks up 32 keys in a hash map, adds what it finds up to the number of an element of
//! 8 KiB in an array, encrypts that with AES-CBC and packs it with Snappy. Requests are chosen by Zipf's law. With `rate_per_s` they
//! arrive in an open loop ([`latency`]).
//!
//! The map has 10 parts of 26 of the data, the array the rest.

use crate::entry::{Key, key, value, word};
use crate::random::{Random, mix};
use crate::zipf::Zipf;
use crate::{Options, Outcome, course, figures_since, latency};
use aes::Aes128;
use aes::cipher::block_padding::NoPadding;
use aes::cipher::{BlockModeEncrypt, KeyIvInit};
use anyhow::{Result, ensure};
use farfield::collections::{FarVec, Index};
use farfield::{FarError, FarMap, Heap, Scope};
use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;

const LOOKUPS: u64 = 32;
const ELEMENT_BYTES: usize = 8192;
/// Of a value; an entry is 64 bytes.
const VALUE: usize = 52;
const ENTRY_BYTES: u64 = 64;
/// Of an entry in the map's index, which is far if it would take more than three quarters of what may be near.
const INDEX_BYTES: u64 = 20;
/// One of so many requests more is served after the timed ones, to see what missed.
const COUNTED_PART: u64 = 10;

type Element = [u8; ELEMENT_BYTES];
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
    match options.heap(0)? {
        None => near(options, sizes),
        Some(heap) => course::followed(options, &heap, || far(options, sizes, &heap)),
    }
}

fn element(index: u64, seed: u64) -> Element {
    let mut element = [0; ELEMENT_BYTES];
    for (at, part) in element.chunks_exact_mut(8).enumerate() {
        part.copy_from_slice(&mix(index * 1024 + at as u64 / 4 + seed).to_le_bytes());
    }
    element
}

/// What a request does with its element: the number of packed bytes, and a byte of them.
struct Press {
    sealed: Vec<u8>,
    packed: Vec<u8>,
    encoder: snap::raw::Encoder,
}

impl Press {
    fn new() -> Press {
        let packed = vec![0; snap::raw::max_compress_len(ELEMENT_BYTES)];
        Press { sealed: vec![0; ELEMENT_BYTES], packed, encoder: snap::raw::Encoder::new() }
    }

    fn press(&mut self, element: &Element) -> Result<u64> {
        let cipher = cbc::Encryptor::<Aes128>::new(&[0; 16].into(), &[0; 16].into());
        let sealed = cipher
            .encrypt_padded_b2b::<NoPadding>(element, &mut self.sealed)
            .map_err(|_| anyhow::anyhow!("an element is no whole number of blocks"))?;
        let bytes = self.encoder.compress(sealed, &mut self.packed)?;
        Ok(bytes as u64 + u64::from(self.packed[bytes / 2]))
    }
}

/// Who asks, and the sum of what was answered.
struct Requests {
    all: u64,
    zipf: Zipf,
    random: Random,
    press: Press,
    sum: u64,
}

impl Requests {
    fn new(options: &Options, sizes: Sizes) -> Requests {
        let zipf = Zipf::new(sizes.requests, options.zipf_percent as f64 / 100.0);
        Requests { all: sizes.requests, zipf, random: Random::new(options.seed), press: Press::new(), sum: 0 }
    }

    /// The next one, by `serve`, which looks up its keys and presses its element.
    fn one(&mut self, serve: &mut impl FnMut(&mut Press, u64) -> Result<u64>) -> Result<()> {
        let request = mix(self.zipf.sample(&mut self.random)) % self.all;
        self.sum = self.sum.wrapping_add(serve(&mut self.press, request)?);
        Ok(())
    }
}

/// Serves as many requests as are timed, so that near memory holds what it will, then those. The sum of the latter's answers.
fn requests(
    outcome: &mut Outcome,
    options: &Options,
    sizes: Sizes,
    heap: Option<&Heap>,
    mut serve: impl FnMut(&mut Press, u64) -> Result<u64>,
) -> Result<u64> {
    let mut first = Requests::new(options, sizes);
    (0..options.ops).try_for_each(|_| first.one(&mut serve))?;
    let (before, mut requests) = (heap.map(Heap::stats), Requests::new(options, sizes));
    latency::timed(outcome, options, || requests.one(&mut serve))?;
    if let (Some(heap), Some(before)) = (heap, before) {
        figures_since(outcome, &before, &heap.stats(), options.ops, 0);
    }
    Ok(requests.sum)
}

/// The entries that a request looks up, by number.
fn numbers(request: u64) -> Range<u64> {
    request * LOOKUPS..(request + 1) * LOOKUPS
}

fn near(options: &Options, sizes: Sizes) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut map: HashMap<Key, Value> = HashMap::with_capacity(sizes.entries as usize);
    let mut array: Vec<Element> = Vec::with_capacity(sizes.elements as usize);
    outcome.phase("fill", sizes.entries, || {
        map.extend((0..sizes.entries).map(|number| (key(number, options.seed), value(number))));
        array.extend((0..sizes.elements).map(|index| element(index, options.seed)));
    });
    let mut errors = 0;
    let mut serve = |press: &mut Press, request| {
        let mut at = 0u64;
        for number in numbers(request) {
            let found = map.get(&key(number, options.seed));
            errors += u64::from(found != Some(&value(number)));
            at = at.wrapping_add(found.map_or(0, word));
        }
        press.press(&array[(at % sizes.elements) as usize])
    };
    let sum = requests(&mut outcome, options, sizes, None, &mut serve)?;
    outcome.checked(sum, errors);
    Ok(outcome)
}

fn far(options: &Options, sizes: Sizes, heap: &Heap) -> Result<Outcome> {
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
        Ok(())
    })?;
    let errors = Cell::new(0);
    let look_up = |scope: &Scope<'_>, request| -> Result<usize> {
        let mut at = 0u64;
        let keys: Vec<Key> = numbers(request).map(|number| key(number, options.seed)).collect();
        let found = map.get_many(scope, &keys)?;
        for (number, found) in numbers(request).zip(found) {
            errors.update(|errors| errors + u64::from(found != Some(&value(number))));
            at = at.wrapping_add(found.map_or(0, word));
        }
        Ok((at % sizes.elements) as usize)
    };
    let press_at = |scope: &Scope<'_>, press: &mut Press, at| {
        let found = if options.once == 1 { array.get_once(scope, at)? } else { array.get(scope, at)? };
        press.press(found.expect("below the length"))
    };
    let sum = requests(&mut outcome, options, sizes, Some(heap), |press, request| {
        let scope = heap.enter();
        let at = look_up(&scope, request)?;
        press_at(&scope, press, at)
    })?;
    // Looking at counters takes time, so who missed is seen in requests that are not timed (Figure 6c).
    let counted = options.ops.div_ceil(COUNTED_PART);
    let (mut more, mut misses) = (Requests::new(options, sizes), [0; 2]);
    for _ in 0..counted {
        more.one(&mut |press, request| {
            let scope = heap.enter();
            let before = heap.stats().misses;
            let at = look_up(&scope, request)?;
            let between = heap.stats().misses;
            let answer = press_at(&scope, press, at)?;
            misses[0] += between - before;
            misses[1] += heap.stats().misses - between;
            Ok(answer)
        })?;
    }
    outcome.figure("map_misses_per_op", misses[0] as f64 / counted as f64);
    outcome.figure("array_misses_per_op", misses[1] as f64 / counted as f64);
    outcome.figure("index_bytes", map.index_bytes() as f64);
    outcome.checked(sum, errors.get());
    Ok(outcome)
}
