//! What a scan costs when everything is near: chunks of a `FarVec` against one slice of a `Vec`.
//!
//! `cargo run --release -p farfield --example vec_scan [MIB]`: sums 64-bit words, in a second-level cache and over DRAM. Prints GB/s,
//! median of several rounds, and the time in slice scans; the last column reads single elements in random order, in `Vec` reads.

use farfield::Heap;
use farfield::collections::FarVec;
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 15;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mib: usize = std::env::args().nth(1).map_or(Ok(1024), |word| word.parse())?;
    println!("{:>9} {:>10} {:>8} {:>8} {:>8} {:>8}", "KiB", "slice GB/s", "chunks", "scan", "write", "random");
    for count in [1 << 15, 1 << 18, mib << 17] {
        let near = (count as u64 * 8 * 5 / 4).max(32 << 20);
        let heap = Heap::builder().near(near).near_max(near).build()?;
        let mut plain: Vec<u64> = (0..count as u64).collect();
        let mut far = FarVec::new();
        let mut scope = heap.enter();
        for word in &plain {
            far.push(&scope, *word)?;
        }
        let repeat = ((1 << 24) / count).max(1);
        let mut rng = fastrand::Rng::with_seed(88);
        let random: Vec<usize> = (0..1 << 20).map(|_| rng.usize(..count)).collect();

        let mut times: [Vec<f64>; 7] = Default::default();
        for _ in 0..ROUNDS {
            times[0].push(seconds(repeat, || plain.iter().sum()));
            times[1].push(seconds(repeat, || far.chunks(&scope).map(|chunk| chunk.unwrap().iter().sum::<u64>()).sum()));
            times[2].push(seconds(repeat, || {
                let mut scan = far.scan(&mut scope);
                let mut sum = 0;
                while let Some(chunk) = scan.next_chunk().unwrap() {
                    sum += chunk.iter().sum::<u64>();
                }
                sum
            }));
            times[3].push(seconds(repeat, || {
                plain.iter_mut().for_each(|word| *word += 1);
                plain[0]
            }));
            times[4].push(seconds(repeat, || {
                let mut scan = far.scan_mut(&mut scope);
                while let Some(chunk) = scan.next_chunk().unwrap() {
                    chunk.iter_mut().for_each(|word| *word += 1);
                }
                0
            }));
            times[5].push(seconds(1, || random.iter().map(|index| plain[*index]).sum()));
            times[6].push(seconds(1, || random.iter().map(|index| *far.at(&scope, *index).unwrap()).sum()));
        }
        let [slice, chunks, scan, write, write_far, get, get_far] = times.map(median);
        println!(
            "{:>9} {:>10.2} {:>8.3} {:>8.3} {:>8.3} {:>8.3}",
            count / 128,
            count as f64 * 8.0 / slice / 1e9,
            chunks / slice,
            scan / slice,
            write_far / write,
            get_far / get,
        );
        assert_eq!(heap.stats().misses, 0, "everything is near");
    }
    Ok(())
}

fn seconds(repeat: usize, mut work: impl FnMut() -> u64) -> f64 {
    let started = Instant::now();
    for _ in 0..repeat {
        black_box(work());
    }
    started.elapsed().as_secs_f64() / repeat as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
