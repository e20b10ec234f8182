//! What a scan costs when most of it is far: a `FarVec` with an eighth of its bytes near.
//!
//! `cargo run --release -p farfield --example far_scan [URL [MIB]]`. Without a URL, far is this process with answers that take 100 µs.
//! Prints MB/s, median of several rounds, and how pages came.

use farfield::collections::FarVec;
use farfield::{Heap, Stats};
use std::time::Instant;

const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "fault:delay=100us@ram:".to_owned());
    let mib: u64 = std::env::args().nth(2).map_or(Ok(256), |word| word.parse())?;
    let near = mib << 17;
    let heap = Heap::builder().near(near).near_max(near).far(mib << 21).pool(url).build()?;
    let mut far = FarVec::new();
    let mut scope = heap.enter();
    for word in 0..mib << 17 {
        far.push(&scope, word)?;
    }
    println!("{:>12} {:>8} {:>9} {:>10} {:>10} {:>8}", "", "MB/s", "misses", "prefetched", "used", "unused");
    for (name, stride) in [("words", 1), ("every 3rd page", 1_536), ("backwards", -1)] {
        let before = heap.stats();
        let mut rates = Vec::new();
        for _ in 0..ROUNDS {
            let started = Instant::now();
            let (sum, bytes) = if stride == 1 {
                let (mut scan, mut sum) = (far.scan(&mut scope), 0u64);
                while let Some(chunk) = scan.next_chunk()? {
                    sum = chunk.iter().fold(sum, |sum, word| sum.wrapping_add(*word));
                }
                (sum, mib << 20)
            } else {
                let count = far.len() as i64 / i64::abs(stride);
                let start = if stride > 0 { 0 } else { far.len() as i64 - 1 };
                let mut sum = 0u64;
                for step in 0..count {
                    sum = sum.wrapping_add(*far.at(&scope, (start + step * stride) as usize)?);
                    if step % 512 == 0 || stride > 1 && step % 16 == 0 {
                        scope.renew();
                    }
                }
                (sum, count as u64 * if stride > 0 { 4096 } else { 8 })
            };
            std::hint::black_box(sum);
            rates.push(bytes as f64 / 1e6 / started.elapsed().as_secs_f64());
        }
        rates.sort_by(f64::total_cmp);
        let after = heap.stats();
        let since = |count: fn(&Stats) -> u64| (count(&after) - count(&before)) / ROUNDS as u64;
        println!(
            "{name:>15} {:>8.0} {:>9} {:>10} {:>10} {:>8}",
            rates[ROUNDS / 2],
            since(|stats| stats.misses),
            since(|stats| stats.prefetches),
            since(|stats| stats.prefetches_used),
            since(|stats| stats.prefetches_unused),
        );
    }
    Ok(())
}
