//! How many misses one core can have in flight: tasks that each read values at random, nearly all of them far.
//!
//! ```text
//! cargo run --release -p farfield --example many_misses                          # far = this process, with and without a delay
//! cargo run --release -p farfield --example many_misses -- tcp://10.0.0.7:7400   # far = that machine, as it is and 100 µs away
//! ```
//!
//! Prints misses per second against the number of tasks, median of five rounds each, for the pool as it is and for one whose every
//! answer takes 100 µs longer (50 µs each way), and what the delay costs.

use farfield::task::Executor;
use farfield::{FarBox, FarError, Heap};
use std::cell::Cell;
use std::time::Instant;

/// One page each, so that every miss is one page.
type Value = [u64; 512];

const VALUES: usize = 65_536;
const NEAR: u64 = 32 << 20;
const ROUNDS: usize = 5;

fn heap(url: &str) -> Result<Heap, farfield::BuildError> {
    Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).pool(url).build()
}

fn filled(heap: &Heap) -> Result<Vec<FarBox<Value>>, FarError> {
    (0..VALUES).map(|index| heap.alloc([index as u64; 512]).map_err(FarError::from)).collect()
}

/// Misses per second with so many tasks.
fn round(heap: &Heap, values: &[FarBox<Value>], tasks: usize, reads: usize) -> f64 {
    // Other values than before: what the last round read is near.
    let seed = heap.stats().misses;
    let left = Cell::new(reads);
    let misses = heap.stats().misses;
    let executor = Executor::new(heap);
    for task in 0..tasks {
        let left = &left;
        executor.spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed ^ (task as u64) << 32);
            while left.get() > 0 {
                left.set(left.get() - 1);
                let index = random.usize(..values.len());
                let scope = heap.enter();
                let seen = values[index].fetch(&scope).await?;
                assert_eq!(seen[511], index as u64);
            }
            Ok::<(), FarError>(())
        });
    }
    let started = Instant::now();
    executor.run();
    (heap.stats().misses - misses) as f64 / started.elapsed().as_secs_f64()
}

/// Median and spread.
fn measure(heap: &Heap, values: &[FarBox<Value>], tasks: usize) -> (f64, f64, f64) {
    // Long enough to measure, short enough to wait for.
    let reads = (tasks * 400).clamp(2_000, 60_000);
    let mut rates: Vec<f64> = (0..ROUNDS).map(|_| round(heap, values, tasks, reads)).collect();
    rates.sort_by(f64::total_cmp);
    (rates[ROUNDS / 2], rates[0], rates[ROUNDS - 1])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "ram:".to_owned());
    let (plain, late) = (heap(&url)?, heap(&format!("fault:delay=100us@{url}"))?);
    let (plain_values, late_values) = (filled(&plain)?, filled(&late)?);
    println!("{url}: thousand misses per second, median (lowest to highest) of {ROUNDS}");
    println!("{:>6} {:>24} {:>24} {:>7}", "tasks", "as it is", "100 µs later", "share");
    for tasks in (0..10).map(|power| 1 << power) {
        let (a, a_low, a_high) = measure(&plain, &plain_values, tasks);
        let (b, b_low, b_high) = measure(&late, &late_values, tasks);
        let show =
            |middle: f64, low: f64, high: f64| format!("{:.1} ({:.1} to {:.1})", middle / 1e3, low / 1e3, high / 1e3);
        println!("{tasks:>6} {:>24} {:>24} {:>7.2}", show(a, a_low, a_high), show(b, b_low, b_high), b / a);
    }
    println!("{:?}", late.stats());
    Ok(())
}
