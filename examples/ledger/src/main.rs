//! Computes balances of an account in far memory, in this process and at the memory server, and charges a
//! fee there.
//!
//! `cargo run --release -p farfield-ledger -- tcp://127.0.0.1:7400`

use anyhow::{Context, Result};
use farfield::{FarBox, Heap, Where};
use ledger::{Balance, Charge, Entry};
use std::time::Instant;

const DAYS: u32 = 2_000;

fn main() -> Result<()> {
    let far = std::env::args().nth(1).context("give the URL of a memory server, such as tcp://127.0.0.1:7400")?;
    let heap = Heap::builder().near(4 << 20).pool(far).build()?;
    let mut account = heap.alloc(Entry { day: 0, cents: 1_000_000, before: None })?;
    // Each page has an entry of this account and some of others, as with accounts that grow together.
    let mut others: Vec<FarBox<Entry>> = Vec::new();
    for day in 1..DAYS {
        account = heap.alloc(Entry { day, cents: -10, before: Some(account) })?;
        for _ in 0..99 {
            others.push(heap.alloc(Entry { day, cents: -20, before: None })?);
        }
    }
    for (place, at) in
        [("here", Where::Client), ("at the memory server", Where::Server), ("at the memory server", Where::Server)]
    {
        let began = Instant::now();
        let cents = heap.call::<Balance>(&account, DAYS / 2).at(at).run()?;
        println!(
            "computed {place} in {:.1} ms: {}.{:02}",
            began.elapsed().as_secs_f64() * 1e3,
            cents / 100,
            cents % 100
        );
    }
    let began = Instant::now();
    let count = heap.call_mut::<Charge>(&mut account, (DAYS / 2..DAYS / 2 + 100, -5)).at(Where::Server).run()?;
    println!("charged {count} entries at the memory server in {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
    Ok(())
}
