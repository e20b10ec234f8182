//! Objects of a page in order, with work at each (AIFM, Figure 13): how much work hides the way of the next object.

use crate::random::mix;
use crate::{Options, Outcome, figures_of};
use anyhow::Result;
use farfield::collections::FarVec;
use farfield::{FarError, Heap};
use farfield_os::process;

const WORDS: usize = 512;
type Object = [u64; WORDS];

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / size_of::<Object>() as u64;
    match options.heap(0)? {
        None => Ok(near(options, count)),
        Some(heap) => far(options, count, &heap),
    }
}

fn object(index: u64, seed: u64) -> Object {
    let mut object = [index; WORDS];
    object[WORDS - 1] = mix(index ^ seed);
    object
}

/// Uses an object: adds its last word, and takes its time.
fn use_up(object: &Object, busy_ns: u64, sum: &mut u64) {
    let until = process::now_ns() + busy_ns;
    *sum = sum.wrapping_add(object[WORDS - 1]).rotate_left(1);
    while process::now_ns() < until {
        std::hint::spin_loop();
    }
}

fn expected(options: &Options, count: u64) -> u64 {
    (0..count).fold(0u64, |sum, index| sum.wrapping_add(mix(index ^ options.seed)).rotate_left(1))
}

fn near(options: &Options, count: u64) -> Outcome {
    let mut outcome = Outcome::new();
    let objects: Vec<Object> =
        outcome.phase("fill", count, || (0..count).map(|index| object(index, options.seed)).collect());
    let mut sum = 0;
    outcome.phase("scan", count, || {
        for object in &objects {
            use_up(object, options.busy_ns, &mut sum);
        }
    });
    outcome.checked(sum, u64::from(sum != expected(options, count)));
    outcome
}

fn far(options: &Options, count: u64, heap: &Heap) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut objects = FarVec::new();
    outcome.phase("fill", count, || -> Result<()> {
        for index in 0..count {
            let scope = heap.enter();
            objects.push(&scope, object(index, options.seed)).map_err(FarError::from)?;
        }
        Ok(())
    })?;
    let mut sum = 0;
    outcome.phase("scan", count, || -> Result<(), FarError> {
        let mut scope = heap.enter();
        let mut scan = objects.scan(&mut scope);
        while let Some(chunk) = scan.next_chunk()? {
            for object in chunk {
                use_up(object, options.busy_ns, &mut sum);
            }
        }
        Ok(())
    })?;
    figures_of(&mut outcome, &heap.stats(), 0);
    outcome.checked(sum, u64::from(sum != expected(options, count)));
    Ok(outcome)
}
