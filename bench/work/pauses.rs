//! Threads that use much of a set that is larger than near memory: how long they wait for memory.
//!
//! `churn`: each round changes 4 MiB of 4-KiB values in random order in one scope (AIFM, Figure 14). `crowd`: many threads, each of which reads
//! 1 MiB in order and then does something else for a while (Figure 15).

use crate::random::Random;
use crate::{Options, Outcome, figures_of};
use anyhow::{Result, ensure};
use farfield::{FarBox, FarError, Heap, Stats};
use farfield_os::process;
use std::time::Duration;

type Value = [u64; 512];

const CHURN_VALUES: u64 = (4 << 20) / 4096;
const CROWD_VALUES: u64 = (1 << 20) / 4096;
/// Reads in one scope of the crowd.
const CROWD_SCOPE: u64 = 32;

/// Which of the two.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Scene {
    Churn,
    Crowd,
}

pub(crate) fn run(options: &Options, scene: Scene) -> Result<Outcome> {
    ensure!(options.threads >= 1, "--threads must be at least 1");
    let each = options.data_bytes() / 4096 / options.threads;
    let rounds = options.ops / options.threads;
    let mut outcome = Outcome::new();
    let heap = options.heap(each * options.threads * 8)?;
    let before = std::sync::Mutex::new(None);
    let filled = std::sync::Barrier::new(options.threads as usize);
    // The longest thread decides, so the phase holds filling, too; rounds are timed by their thread.
    let found = outcome.phase("all", options.ops, || -> Result<Vec<Thread>> {
        std::thread::scope(|threads| {
            let start = |thread: u64| {
                let (heap, before, filled) = (&heap, &before, &filled);
                let ready = move || {
                    filled.wait();
                    before.lock().expect("nobody panics").get_or_insert_with(|| heap.as_ref().map(Heap::stats));
                };
                threads.spawn(move || {
                    let random = Random::new(options.seed + thread);
                    let mut found = Thread { random, each, sum: 0, errors: 0, rounds: Vec::new() };
                    match heap {
                        None => found.near(options, scene, rounds, ready)?,
                        Some(heap) => found.far(options, scene, rounds, heap, ready)?,
                    }
                    Ok(found)
                })
            };
            let handles: Vec<_> = (0..options.threads).map(start).collect();
            handles.into_iter().map(|handle| handle.join().expect("no workload panics")).collect()
        })
    })?;
    let mut times: Vec<u64> = found.iter().flat_map(|thread| thread.rounds.iter().copied()).collect();
    times.sort_unstable();
    outcome.timed("round", options.ops, times.iter().sum::<u64>());
    outcome.figure("round_ns_p99", times[times.len() * 99 / 100] as f64);
    outcome.figure("round_ns_max", times[times.len() - 1] as f64);
    if let (Some(heap), Some(Some(before))) = (&heap, before.into_inner().expect("nobody panics")) {
        let stats = heap.stats();
        pauses_of(&mut outcome, &before, &stats);
        figures_of(&mut outcome, &stats, each * options.threads * 8);
    }
    let sum = found.iter().fold(0u64, |sum, thread| sum.wrapping_add(thread.sum));
    outcome.checked(sum, found.iter().map(|thread| thread.errors).sum());
    Ok(outcome)
}

/// How often threads waited for near memory, and how long, between two looks.
fn pauses_of(outcome: &mut Outcome, before: &Stats, after: &Stats) {
    // Class k is below 2^(k + 1) µs.
    let over = |class: usize| {
        let count = |stats: &Stats| stats.pauses[class..].iter().sum::<u64>();
        (count(after) - count(before)) as f64
    };
    outcome.figure("pauses", over(0));
    outcome.figure("pauses_over_1ms", over(10));
    outcome.figure("pauses_over_33ms", over(15));
    let misses = (after.misses - before.misses).max(1) as f64;
    outcome.figure("pauses_per_miss", over(0) / misses);
}

/// One thread and what it has found.
struct Thread {
    random: Random,
    each: u64,
    sum: u64,
    errors: u64,
    rounds: Vec<u64>,
}

fn value(index: u64) -> Value {
    let mut value = [index; 512];
    value[0] = 0;
    value
}

impl Thread {
    /// Values of a round: where it begins, and how many.
    fn round(&mut self, scene: Scene) -> (u64, u64) {
        match scene {
            Scene::Churn => (0, CHURN_VALUES),
            Scene::Crowd => (self.random.below(self.each - CROWD_VALUES), CROWD_VALUES),
        }
    }

    fn next(&mut self, scene: Scene, first: u64, step: u64) -> usize {
        match scene {
            Scene::Churn => self.random.below(self.each) as usize,
            Scene::Crowd => (first + step) as usize,
        }
    }

    fn changed(&mut self, index: usize, value: &mut Value) {
        value[0] += 1;
        self.seen(index, value);
        self.sum = self.sum.wrapping_add(value[0]);
    }

    fn seen(&mut self, index: usize, value: &Value) {
        self.errors += u64::from(value[511] != index as u64);
        self.sum = self.sum.wrapping_add(value[1]);
    }

    fn end(&mut self, options: &Options, started: u64) {
        self.rounds.push(process::now_ns() - started);
        std::thread::sleep(Duration::from_nanos(options.busy_ns));
    }

    fn near(&mut self, options: &Options, scene: Scene, rounds: u64, ready: impl FnOnce()) -> Result<()> {
        ensure!(self.each > CROWD_VALUES, "--data-mib is too small for so many threads");
        let mut values: Vec<Box<Value>> = (0..self.each).map(|index| Box::new(value(index))).collect();
        ready();
        for _ in 0..rounds {
            let started = process::now_ns();
            let (first, count) = self.round(scene);
            for step in 0..count {
                let index = self.next(scene, first, step);
                match scene {
                    Scene::Churn => self.changed(index, &mut values[index]),
                    Scene::Crowd => self.seen(index, &values[index]),
                }
            }
            self.end(options, started);
        }
        Ok(())
    }

    fn far(&mut self, options: &Options, scene: Scene, rounds: u64, heap: &Heap, ready: impl FnOnce()) -> Result<()> {
        ensure!(self.each > CROWD_VALUES, "--data-mib is too small for so many threads");
        let mut values: Vec<FarBox<Value>> = Vec::with_capacity(self.each as usize);
        for index in 0..self.each {
            values.push(heap.alloc(value(index)).map_err(FarError::from)?);
        }
        ready();
        for _ in 0..rounds {
            let started = process::now_ns();
            let (first, count) = self.round(scene);
            let mut scope = heap.enter();
            for step in 0..count {
                let index = self.next(scene, first, step);
                match scene {
                    Scene::Churn => self.changed(index, values[index].get_mut(&scope)?),
                    Scene::Crowd => {
                        if step % CROWD_SCOPE == 0 {
                            drop(scope);
                            scope = heap.enter();
                            heap.prefetch(&values[index..index + CROWD_SCOPE as usize]);
                        }
                        self.seen(index, values[index].get(&scope)?);
                    }
                }
            }
            drop(scope);
            self.end(options, started);
        }
        Ok(())
    }
}
