//! Objects behind pointers, read in random order by threads (AIFM, Figure 1): how many far objects come near in a second. In a far heap each
//! thread has many tasks that wait without it; without one, whoever waits for an object waits with its thread.

use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_since};
use anyhow::{Result, bail, ensure};
use farfield::task::Executor;
use farfield::{FarBox, FarError, Heap};
use std::cell::RefCell;

type Object<const WORDS: usize> = [u64; WORDS];

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    ensure!(options.threads >= 1 && options.in_flight >= 1, "--threads and --in-flight must be at least 1");
    match options.object_bytes {
        64 => sized::<8>(options),
        4096 => sized::<512>(options),
        other => bail!("--object-bytes must be 64 or 4096, not {other}"),
    }
}

fn sized<const WORDS: usize>(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / (WORDS as u64 * 8);
    match options.heap(count * 8)? {
        None => near::<WORDS>(options, count),
        Some(heap) => far::<WORDS>(options, count, &heap),
    }
}

fn object<const WORDS: usize>(index: u64, seed: u64) -> Object<WORDS> {
    let mut object = [index; WORDS];
    object[WORDS - 1] = mix(index ^ seed);
    object
}

/// What one thread reads, and what it has found.
struct Reads {
    random: Random,
    count: u64,
    left: u64,
    sum: u64,
    errors: u64,
}

impl Reads {
    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        Some(self.random.below(self.count))
    }

    fn seen<const WORDS: usize>(&mut self, index: u64, object: &Object<WORDS>) {
        self.errors += u64::from(object[0] != index);
        self.sum = self.sum.wrapping_add(object[WORDS - 1]);
    }
}

/// Runs `work` in every thread, with reads of its own; sums what they found.
fn in_threads(options: &Options, count: u64, work: impl Fn(&mut Reads) -> Result<()> + Sync) -> Result<(u64, u64)> {
    std::thread::scope(|scope| {
        let start = |thread| {
            let random = Random::new(options.seed + thread);
            let mut reads = Reads { random, count, left: options.ops / options.threads, sum: 0, errors: 0 };
            let work = &work;
            scope.spawn(move || work(&mut reads).map(|()| reads))
        };
        let threads: Vec<_> = (0..options.threads).map(start).collect();
        threads.into_iter().try_fold((0u64, 0), |(sum, errors), thread| {
            let reads = thread.join().expect("no workload panics")?;
            Ok((sum.wrapping_add(reads.sum), errors + reads.errors))
        })
    })
}

fn near<const WORDS: usize>(options: &Options, count: u64) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let objects: Vec<Box<Object<WORDS>>> =
        outcome.phase("fill", count, || (0..count).map(|index| Box::new(object(index, options.seed))).collect());
    let read = |reads: &mut Reads| {
        while let Some(index) = reads.next() {
            reads.seen(index, &objects[index as usize]);
        }
        Ok(())
    };
    let (sum, errors) = outcome.phase("read", options.ops, || in_threads(options, count, read))?;
    outcome.checked(sum, errors);
    Ok(outcome)
}

fn far<const WORDS: usize>(options: &Options, count: u64, heap: &Heap) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut objects: Vec<FarBox<Object<WORDS>>> = Vec::with_capacity(count as usize);
    outcome.phase("fill", count, || -> Result<()> {
        for index in 0..count {
            objects.push(heap.alloc(object(index, options.seed)).map_err(FarError::from)?);
        }
        Ok(())
    })?;
    let read = |reads: &mut Reads| {
        let reads = RefCell::new(reads);
        let objects = &objects;
        let next = || reads.borrow_mut().next();
        let executor = Executor::new(heap);
        let task = async || {
            while let Some(index) = next() {
                let scope = heap.enter();
                let object = objects[index as usize].fetch(&scope).await?;
                reads.borrow_mut().seen(index, object);
            }
            Ok::<(), FarError>(())
        };
        let tasks: Vec<_> = (0..options.in_flight).map(|_| executor.spawn(task())).collect();
        executor.block_on(async {
            for task in tasks {
                task.await.expect("no task panics")?;
            }
            Ok::<(), FarError>(())
        })?;
        Ok(())
    };
    let before = heap.stats();
    let (sum, errors) = outcome.phase("read", options.ops, || in_threads(options, count, read))?;
    figures_since(&mut outcome, &before, &heap.stats(), options.ops, count * 8);
    outcome.checked(sum, errors);
    Ok(outcome)
}
