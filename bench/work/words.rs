//! Words in one array, summed chunk by chunk again and again: what a scan of a far vector costs when everything is near, against
//! one of a slice.

use crate::random::mix;
use crate::{Options, Outcome, figures_of};
use anyhow::{Result, ensure};
use farfield::{FarError, FarVec, Heap};
use std::hint::black_box;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / 8;
    let set = if options.set_kib == 0 { count } else { (options.set_kib << 7).min(count) };
    let passes = options.ops / set;
    ensure!(passes > 0, "--ops must be at least the {set} words of one pass");
    match options.heap(0)? {
        None => Ok(near(options, count, set, passes)),
        Some(heap) => far(options, count, set, passes, &heap),
    }
}

fn words(options: &Options, count: u64) -> impl Iterator<Item = u64> {
    let seed = options.seed;
    (0..count).map(move |index| mix(index ^ seed))
}

fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word))
}

/// What the first `set` words sum up to in one pass.
fn expected(options: &Options, set: u64) -> u64 {
    words(options, set).fold(0, u64::wrapping_add)
}

/// `pass` sums once.
fn scan<E>(outcome: &mut Outcome, set: u64, passes: u64, mut pass: impl FnMut() -> Result<u64, E>) -> Result<u64, E> {
    outcome.phase("scan", set * passes, || (0..passes).try_fold(0, |_, _| pass().map(black_box)))
}

fn near(options: &Options, count: u64, set: u64, passes: u64) -> Outcome {
    let mut outcome = Outcome::new();
    let plain: Vec<u64> = outcome.phase("fill", count, || words(options, count).collect());
    let Ok(found) = scan(&mut outcome, set, passes, || Ok::<_, std::convert::Infallible>(sum(&plain[..set as usize])));
    outcome.checked(found, u64::from(found != expected(options, set)));
    outcome
}

fn far(options: &Options, count: u64, set: u64, passes: u64, heap: &Heap) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut far = FarVec::new();
    outcome.phase("fill", count, || {
        words(options, count).try_for_each(|word| far.push(&heap.enter(), word)).map_err(FarError::from)
    })?;
    let mut scope = heap.enter();
    let found = scan(&mut outcome, set, passes, || {
        let mut chunks = far.scan_in(&mut scope, ..set as usize);
        let mut total = 0u64;
        while let Some(chunk) = chunks.next_chunk()? {
            total = total.wrapping_add(sum(chunk));
        }
        Ok::<_, FarError>(total)
    })?;
    drop(scope);
    figures_of(&mut outcome, &heap.stats(), 0);
    outcome.checked(found, u64::from(found != expected(options, set)));
    Ok(outcome)
}
