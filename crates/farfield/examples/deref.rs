//! What a dereference costs when everything is near: `FarBox` against `Box`, in caches and over DRAM.
//!
//! `cargo run --release -p farfield --example deref [MILLIONS [object]]`: values of 64 bytes, read in random order through pointers that
//! are themselves read in random order. Prints nanoseconds, median of several rounds, and their ratio.

use farfield::{FarBox, Heap, Plane};
use std::hint::black_box;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let millions: usize = std::env::args().nth(1).map_or(Ok(8), |word| word.parse())?;
    let plane = if std::env::args().nth(2).as_deref() == Some("object") { Plane::Object } else { Plane::Page };
    println!("{plane:?} plane");
    println!("{:>12} {:>9} {:>9} {:>7} {:>9} {:>7}", "values", "Box ns", "FarBox ns", "ratio", "get_mut", "ratio");
    for count in [1 << 10, 1 << 15, millions << 20] {
        let near = (count as u64 * 64 * 3 / 2).max(16 << 20);
        let heap = Heap::builder().near(near).near_max(near).plane(plane).build()?;
        let mut order: Vec<u32> = (0..count as u32).collect();
        fastrand::Rng::with_seed(88).shuffle(&mut order);
        let boxed: Vec<Box<[u64; 8]>> = (0..count).map(|index| Box::new([index as u64; 8])).collect();
        let mut far: Vec<FarBox<[u64; 8]>> = Vec::with_capacity(count);
        for index in 0..count {
            far.push(heap.alloc([index as u64; 8])?);
        }
        let repeat = ((1 << 23) / count).max(1);
        let per = |started: Instant| started.elapsed().as_secs_f64() * 1e9 / (repeat * count) as f64;
        let (mut boxes, mut fars, mut muts) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..5 {
            let started = Instant::now();
            let mut sum = 0u64;
            for _ in 0..repeat {
                for index in &order {
                    sum = sum.wrapping_add(boxed[*index as usize][0]);
                }
            }
            black_box(sum);
            boxes.push(per(started));

            let started = Instant::now();
            let scope = heap.enter();
            let mut sum = 0u64;
            for _ in 0..repeat {
                for index in &order {
                    sum = sum.wrapping_add(far[*index as usize].get(&scope)?[0]);
                }
            }
            drop(scope);
            black_box(sum);
            fars.push(per(started));

            let started = Instant::now();
            let scope = heap.enter();
            for _ in 0..repeat {
                for index in &order {
                    far[*index as usize].get_mut(&scope)?[0] += 1;
                }
            }
            drop(scope);
            muts.push(per(started));
        }
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let (a, b, c) = (median(&mut boxes), median(&mut fars), median(&mut muts));
        println!("{count:>12} {a:>9.2} {b:>9.2} {:>7.2} {c:>9.2} {:>7.2}", b / a, c / a);
        assert_eq!(heap.stats().misses, 0, "everything is near");
    }
    Ok(())
}
