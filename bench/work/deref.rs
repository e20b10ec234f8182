//! Objects behind pointers, used in random order (AIFM, Figure 12): what a dereference costs when the object is near, and
//! when it may be far.
//!
//! Word 0 of an object is a stamp with the number of writes so far, the last word a pattern.

use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_since};
use anyhow::{Result, bail};
use farfield::{FarBox, FarError, Heap};

type Object<const WORDS: usize> = [u64; WORDS];

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    match options.object_bytes {
        64 => sized::<8>(options),
        4096 => sized::<512>(options),
        other => bail!("--object-bytes must be 64 or 4096, not {other}"),
    }
}

fn sized<const WORDS: usize>(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / (WORDS as u64 * 8);
    match options.heap(count * 8)? {
        None => Ok(near::<WORDS>(options, count)),
        Some(heap) => far::<WORDS>(options, count, &heap),
    }
}

fn object<const WORDS: usize>(index: u64, seed: u64) -> Object<WORDS> {
    let mut object = [mix(index ^ seed); WORDS];
    object[WORDS - 1] = mix(index.wrapping_mul(3) ^ seed);
    object
}

/// Which object, and whether it is written.
struct Steps {
    random: Random,
    among: u64,
    write_percent: u64,
}

impl Steps {
    fn new<const WORDS: usize>(options: &Options, count: u64) -> Steps {
        let set = (options.set_kib << 10) / (WORDS as u64 * 8);
        let among = if set == 0 { count } else { set.min(count) };
        Steps { random: Random::new(options.seed), among, write_percent: options.write_percent }
    }

    fn next(&mut self) -> (usize, bool) {
        let index = self.random.below(self.among);
        let write = self.write_percent > 0 && self.random.below(100) < self.write_percent;
        (index as usize, write)
    }
}

fn near<const WORDS: usize>(options: &Options, count: u64) -> Outcome {
    let mut outcome = Outcome::new();
    let mut objects: Vec<Box<Object<WORDS>>> = outcome
        .phase("fill", count, || (0..count).map(|index| Box::new(object::<WORDS>(index, options.seed))).collect());
    let mut steps = Steps::new::<WORDS>(options, count);
    let mut sum = 0u64;
    outcome.phase("access", options.ops, || {
        for _ in 0..options.ops {
            let (index, write) = steps.next();
            if write {
                objects[index][0] += 1;
            } else {
                sum = sum.wrapping_add(objects[index][WORDS - 1]);
            }
        }
    });
    let (mut check, mut errors) = (0u64, 0);
    for (index, value) in objects.iter().enumerate() {
        check = check.wrapping_add(value[0]);
        errors += u64::from(value[WORDS - 1] != mix((index as u64).wrapping_mul(3) ^ options.seed));
    }
    outcome.checked(sum ^ check, errors);
    outcome
}

/// Dereferences in one scope: what is used inside a scope cannot leave.
const OPS_PER_SCOPE: u64 = 64;

fn far<const WORDS: usize>(options: &Options, count: u64, heap: &Heap) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut objects: Vec<FarBox<Object<WORDS>>> = Vec::with_capacity(count as usize);
    outcome.phase("fill", count, || -> Result<()> {
        for index in 0..count {
            objects.push(heap.alloc(object::<WORDS>(index, options.seed)).map_err(FarError::from)?);
        }
        Ok(())
    })?;
    let mut steps = Steps::new::<WORDS>(options, count);
    let mut sum = 0u64;
    let before = heap.stats();
    outcome.phase("access", options.ops, || -> Result<(), FarError> {
        let mut left = options.ops;
        while left > 0 {
            let scope = heap.enter();
            for _ in 0..left.min(OPS_PER_SCOPE) {
                let (index, write) = steps.next();
                if write {
                    objects[index].get_mut(&scope)?[0] += 1;
                } else {
                    sum = sum.wrapping_add(objects[index].get(&scope)?[WORDS - 1]);
                }
            }
            left = left.saturating_sub(OPS_PER_SCOPE);
        }
        Ok(())
    })?;
    figures_since(&mut outcome, &before, &heap.stats(), options.ops, count * 8);
    let (mut check, mut errors) = (0u64, 0);
    for (index, value) in objects.iter().enumerate() {
        let scope = heap.enter();
        let value = value.get(&scope)?;
        check = check.wrapping_add(value[0]);
        errors += u64::from(value[WORDS - 1] != mix((index as u64).wrapping_mul(3) ^ options.seed));
    }
    outcome.checked(sum ^ check, errors);
    Ok(outcome)
}
