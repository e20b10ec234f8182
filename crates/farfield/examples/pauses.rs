//! How long threads wait because memory is short: AIFM's loop for its pauseless evacuator (Figure 14).
//!
//! `cargo run --release -p farfield --example pauses [page|object [VALUE_BYTES [THREADS]]]`: threads change 4 MiB of random values per scope, of a set four
//! times as large as near memory. Prints what a round takes, and what waiting for near memory takes of it: misses are waits for
//! the pool and not for the evacuator.

use farfield::{FarBox, Heap, Plane};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const NEAR: usize = 256 * MIB;
const FAR: usize = 4 * NEAR;
const ROUND_BYTES: usize = 4 * MIB;
const ROUNDS: usize = 60;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let plane = if std::env::args().nth(1).as_deref() == Some("object") { Plane::Object } else { Plane::Page };
    let bytes: usize = std::env::args().nth(2).map_or(Ok(4096), |word| word.parse())?;
    let threads: usize = std::env::args().nth(3).map_or(Ok(2), |word| word.parse())?;
    println!(
        "{plane:?} plane, values of {bytes} bytes, {} MiB of them, {} MiB near, {threads} threads",
        FAR / MIB,
        NEAR / MIB
    );
    match bytes {
        4096 => run::<512>(plane, threads),
        1024 => run::<128>(plane, threads),
        256 => run::<32>(plane, threads),
        _ => Err("values have 256, 1024 or 4096 bytes".into()),
    }
}

fn run<const WORDS: usize>(plane: Plane, count_of_threads: usize) -> Result<(), Box<dyn std::error::Error>> {
    let heap = Heap::builder().near(NEAR as u64).near_max(NEAR as u64).far(4 * FAR as u64).plane(plane).build()?;
    let count = FAR / count_of_threads / (8 * WORDS);
    let mut rounds: Vec<Duration> = Vec::new();
    std::thread::scope(|threads| {
        let start = |thread: u64| {
            let heap = &heap;
            threads.spawn(move || {
                let mut values: Vec<FarBox<[u64; WORDS]>> = Vec::with_capacity(count);
                for index in 0..count {
                    values.push(heap.alloc([index as u64; WORDS]).map_err(|error| error.error)?);
                }
                let mut random = 88_172_645_463_325_252 + thread;
                let mut rounds = Vec::with_capacity(ROUNDS);
                for _ in 0..ROUNDS {
                    let started = Instant::now();
                    let scope = heap.enter();
                    for _ in 0..ROUND_BYTES / (8 * WORDS) {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        values[(random % count as u64) as usize].get_mut(&scope)?[0] += 1;
                    }
                    drop(scope);
                    rounds.push(started.elapsed());
                }
                Ok::<_, farfield::FarError>(rounds)
            })
        };
        for handle in (0..count_of_threads as u64).map(start).collect::<Vec<_>>() {
            match handle.join() {
                Ok(result) => rounds.extend(result?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok::<_, farfield::FarError>(())
    })?;
    rounds.sort();
    let stats = heap.stats();
    println!(
        "rounds: median {:?}, p99 {:?}, longest {:?}",
        rounds[rounds.len() / 2],
        percentile(&rounds),
        rounds[rounds.len() - 1]
    );
    println!("misses {}, written pages {}, moved values {}", stats.misses, stats.written_pages, stats.moved_values);
    println!("waits for near memory: {}, longest {:?}", stats.throttled, stats.longest_pause);
    for (class, count) in stats.pauses.iter().enumerate().filter(|(_, count)| **count > 0) {
        println!("{:>12} below {:?}", count, Duration::from_micros(2 << class));
    }
    Ok(())
}

fn percentile(sorted: &[Duration]) -> Duration {
    sorted[sorted.len() * 99 / 100]
}
