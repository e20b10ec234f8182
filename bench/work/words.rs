//! Words in one array, summed chunk by chunk again and again: what a scan of a far vector costs when everything is near, against
//! one of a slice.

use crate::random::mix;
use crate::{Options, Outcome, figures_of};
use anyhow::{Result, ensure};
use farfield::{FarError, FarVec, Heap, Stats};
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
    let before = heap.stats();
    let found = scan(&mut outcome, set, passes, || {
        let mut chunks = far.scan_in(&mut scope, ..set as usize);
        let mut total = 0u64;
        while let Some(chunk) = chunks.next_chunk()? {
            total = total.wrapping_add(sum(chunk));
        }
        Ok::<_, FarError>(total)
    })?;
    drop(scope);
    if options.bandwidth_mib > 0 {
        let seconds = (set * passes) as f64 / outcome.per_second("scan");
        link_figures(&mut outcome, options, &before, &heap.stats(), seconds);
    }
    figures_of(&mut outcome, &heap.stats(), 0);
    outcome.checked(found, u64::from(found != expected(options, set)));
    Ok(outcome)
}

/// What the walk made of a link whose bandwidth is known: how many times as long it took as the link alone would have taken, what the link would
/// deliver in the time of an answer, and how much may be on its way because of that.
fn link_figures(outcome: &mut Outcome, options: &Options, before: &Stats, after: &Stats, seconds: f64) {
    let fetched = (after.fetched_bytes - before.fetched_bytes) as f64;
    let bandwidth = (options.bandwidth_mib << 20) as f64;
    outcome.figure("times_of_link", seconds / (fetched / bandwidth));
    outcome.figure("answer_us", after.answer_time.as_nanos() as f64 / 1e3);
    outcome.figure("product_pages", fetched / seconds * after.answer_time.as_secs_f64() / 4096.0);
    outcome.figure("window_pages", after.prefetch_depth as f64);
}
