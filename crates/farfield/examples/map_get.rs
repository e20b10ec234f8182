//! What a look-up costs when everything is near: `FarMap` against `HashMap`, keys of 12 bytes and values of 4 in random order.
//!
//! `cargo run --release -p farfield --example map_get [MILLIONS]`: nanoseconds, median of several rounds, and their ratio; for a scope per
//! look-up and for a scope per 64.

use farfield::{FarMap, Heap};
use std::collections::HashMap;
use std::hash::RandomState;
use std::hint::black_box;
use std::time::Instant;

type Key = [u8; 12];

fn key(number: u64) -> Key {
    let mut key = [0x20; 12];
    key[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    key
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let millions: u64 = std::env::args().nth(1).map_or(Ok(4), |word| word.parse())?;
    println!(
        "{:>12} {:>10} {:>10} {:>6} {:>10} {:>6}",
        "entries", "HashMap ns", "FarMap ns", "ratio", "64 a scope", "ratio"
    );
    for count in [1 << 14, millions << 20] {
        let near = (count * 80).max(16 << 20);
        let heap = Heap::builder().near(near).near_max(near).build()?;
        let hasher = RandomState::new();
        let far: FarMap<Key, u32, _> = FarMap::builder().hasher(hasher.clone()).build(&heap)?;
        let mut map: HashMap<Key, u32> = HashMap::with_hasher(hasher);
        for number in 0..count {
            far.insert(&heap.enter(), key(number), number as u32)?;
            map.insert(key(number), number as u32);
        }
        let rounds = 5;
        let look_ups = (1 << 22).min(count * 64);
        let mut random = fastrand::Rng::with_seed(88);
        let mut order = Vec::with_capacity(look_ups as usize);
        for _ in 0..look_ups {
            order.push(key(random.u64(..count)));
        }
        let per = |started: Instant| started.elapsed().as_secs_f64() * 1e9 / look_ups as f64;
        let (mut stds, mut fars, mut batches) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let started = Instant::now();
            let mut sum = 0u64;
            for key in &order {
                sum += u64::from(map[key]);
            }
            let expected = black_box(sum);
            stds.push(per(started));

            let started = Instant::now();
            let mut sum = 0u64;
            for key in &order {
                let scope = heap.enter();
                sum += u64::from(*far.get(&scope, key)?.ok_or("an entry is lost")?);
            }
            fars.push(per(started));
            assert_eq!(sum, expected);

            let started = Instant::now();
            let mut sum = 0u64;
            for keys in order.chunks(64) {
                let scope = heap.enter();
                for key in keys {
                    sum += u64::from(*far.get(&scope, key)?.ok_or("an entry is lost")?);
                }
            }
            batches.push(per(started));
            assert_eq!(sum, expected);
        }
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let (a, b, c) = (median(&mut stds), median(&mut fars), median(&mut batches));
        println!("{count:>12} {a:>10.1} {b:>10.1} {:>6.2} {c:>10.1} {:>6.2}", b / a, c / a);
        assert_eq!(heap.stats().misses, 0, "everything is near");
    }
    Ok(())
}
