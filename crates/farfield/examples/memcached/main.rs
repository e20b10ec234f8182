//! A cache server that speaks memcached's text and binary protocols, and keeps most of its data far.
//!
//! ```text
//! cargo run --release -p farfield --example memcached -- --near 64 --capacity 1024 --pool tcp://10.0.0.7:7400
//! printf 'set greeting 0 0 5\r\nhello\r\nget greeting\r\nquit\r\n' | nc 127.0.0.1 11211
//! ```
//!
//! Keys and values are entries of one `FarMap`, which all connections share. `request`, `text` and `binary` understand,
//! `cache` does, `serve` answers. A connection is a thread: the work is in the map, and threads are the shortest way to it.
//! The example of `farfield-gc` has all but `cache` from here.

mod binary;
mod cache;
mod connections;
mod counts;
mod request;
mod serve;
#[cfg(test)]
mod tests;
mod text;
mod times;

use cache::{Cache, Limits};
use farfield::Heap;
use farfield::collections::Index;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

const USAGE: &str = "\
memcached [--listen ADDRESS] [--near MIB] [--capacity MIB] [--value-max KIB] [--no-evict] [--far-index] [--pool URL]…
  --listen     where to listen (127.0.0.1:11211)
  --near       near memory, tables included (64)
  --capacity   keys and values in all (1024)
  --value-max  the largest value (1024)
  --no-evict   without room, refuse instead of evicting
  --far-index  the index in far memory, too
  --pool       a memory server; without one, far is this process, to try it out";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut listen, mut near, mut capacity, mut value_max) = ("127.0.0.1:11211".to_owned(), 64u64, 1024u64, 1024usize);
    let (mut evict, mut index, mut pools) = (true, Index::Near, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--listen" => listen = value()?,
            "--near" => near = value()?.parse()?,
            "--capacity" => capacity = value()?.parse()?,
            "--value-max" => value_max = value()?.parse()?,
            "--no-evict" => evict = false,
            "--far-index" => index = Index::Far,
            "--pool" => pools.push(value()?),
            _ => return Err(USAGE.into()),
        }
    }
    // Room for what size classes and retired entries cost.
    let mut builder = Heap::builder().name("memcached").near(near << 20).far((capacity + near) << 21);
    for pool in pools {
        builder = builder.pool(pool);
    }
    let limits = Limits { capacity: capacity << 20, value_max: value_max << 10, index, evict };
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let cache = Arc::new(Cache::new(builder.build()?, limits, clock)?);
    let listener = TcpListener::bind(&listen)?;
    println!("listening on {}", listener.local_addr()?);
    connections::accept(&listener, &cache);
    Ok(())
}

/// A cache of little near memory, for tests.
#[cfg(test)]
fn trial_cache(capacity: u64, evict: bool, clock: impl Fn() -> u64 + Send + Sync + 'static) -> Cache {
    let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
    Cache::new(heap, Limits { capacity, value_max: 100_000, index: Index::Near, evict }, clock).unwrap()
}
