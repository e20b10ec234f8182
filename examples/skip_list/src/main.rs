//! Sums ranges of a far skip list, in this process and at the memory server.
//!
//! `cargo run --release -p farfield-skip-list -- tcp://127.0.0.1:7400`

use anyhow::{Context, Result};
use farfield::{Heap, Where};
use skip_list::SkipList;
use std::time::Instant;

const KEYS: u64 = 200_000;

fn main() -> Result<()> {
    let far = std::env::args().nth(1).context("give the URL of a memory server, such as tcp://127.0.0.1:7400")?;
    let heap = Heap::builder().near(4 << 20).pool(far).build()?;
    let mut list = SkipList::new(&heap)?;
    for number in 0..KEYS {
        // Scattered, so that neighbours by key lie in different pages.
        list.insert(number.wrapping_mul(0x9E37_79B9_7F4A_7C15), 1)?;
    }
    for (place, at) in
        [("here", Where::Client), ("at the memory server", Where::Server), ("at the memory server", Where::Server)]
    {
        let began = Instant::now();
        let totals = list.range(u64::MAX / 4..u64::MAX / 2, at)?;
        let milliseconds = began.elapsed().as_secs_f64() * 1e3;
        println!("summed {place} in {milliseconds:.2} ms: {} keys, {} in all", totals.count, totals.sum);
    }
    Ok(())
}
